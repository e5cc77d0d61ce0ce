"""Layers in CUDA graphs, which the CPU emulates: the gradients of plain layers to the bit, for all kinds of rows."""

import logging
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import EmulatedMemory, backend, device_attention
from tiny_decoders import tiny_decoder
from tiny_models import hf_config
from xorl.core.loss import cross_entropy
from xorl.core.models import Decoder
from xorl.core.models.decoder_layer import DecoderLayer
from xorl.core.nn import LayerKernels
from xorl.core.nn.all_gather import AllGather
from xorl.core.nn.dispatch import AllToAll
from xorl.core.nn.kernels import choose_kernels
from xorl.core.parallel import ParallelPolicy, graphed
from xorl.core.parallel.activations import recompute_layers
from xorl.core.parallel.apply import check_parallelizable
from xorl.core.parallel.compile import compile_layers
from xorl.core.parallel.graphed import LayerGraphs
from xorl.kernels.attention.operator import PackedAttention
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.experts import ExpertsFn, grouped, reference
from xorl.kernels.layout import RankGroup, SequenceLayout

DENSE = hf_config(num_hidden_layers=3)
EXPERTS = hf_config(
    "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0], output_router_logits=True, router_aux_loss_coef=0.1
)
# Sizes that come back, one after the other and in turn.
ROWS = [[5, 9, 2], [5, 9, 2], [16], [5, 9, 2], [16], [16], [5, 9, 2]]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(graphed, "GraphMemory", EmulatedMemory)


def models_of(config: dict) -> tuple[Decoder, Decoder, LayerGraphs]:
    """Two equal models, the second one in graphs, and these."""
    kernels = choose_kernels(
        device_attention, device_type="cpu", dtype=torch.float32, compiled=True, native=(), cast_bf16=False
    )
    plain, model = (tiny_decoder(config, kernels=kernels) for _ in range(2))
    compiler = backend()
    for each in (plain, model):
        recompute_layers(each.layers, "layer", reentrant=False, compiled=True)
        compile_layers(list(each.layers), backend=compiler, device_type="cpu")
    graphs = LayerGraphs()
    graphs.install(list(model.layers))
    return plain, model, graphs


def loss_of(model: Decoder, lengths: list[int], seed: int, num_padding: int = 0, **others: Tensor) -> Tensor:
    ids = torch.randint(64, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    layout = SequenceLayout.from_lengths(lengths)
    if num_padding:
        num_real = torch.tensor(sum(lengths) - num_padding)
        layout = SequenceLayout(layout.cu_seqlens, layout.positions, lengths, num_real)
    targets = {"labels": ids}
    return model(ids, layout, loss=lambda hidden, head: cross_entropy(hidden, head, targets).sum, **others)


def gradients_of(model: Decoder, loss: Tensor) -> dict[str, Tensor | None]:
    """Also the loss."""
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


def assert_same_step(model: Decoder, plain: Decoder, lengths: list[int], seed: int, **options: object) -> None:
    found, expected = (gradients_of(each, loss_of(each, lengths, seed, **options)) for each in (model, plain))
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (found[name] is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_graphs_change_no_bit(config: dict) -> None:
    # Catches an output, a gradient or a saved choice of experts that the graphs of another layer overwrite, an input of
    # another row, and a layer that is captured again for each call.
    plain, model, graphs = models_of(config)
    for index, lengths in enumerate(ROWS):
        assert_same_step(model, plain, lengths, index)
    assert len(graphs) == 6


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_rows_with_about_as_many_documents_share_graphs(config: dict) -> None:
    # Catches documents of the row that was captured, empty ones that count in the losses of routers, and a length that
    # the host rounds down.
    plain, model, graphs = models_of(config)
    for index, lengths in enumerate([[7, 5, 4], [3, 6, 7], [8, 5, 3], [4, 4, 5, 3], [2, 7, 7]]):
        assert_same_step(model, plain, lengths, index, num_padding=index % 3)
    # The row without padding has no tensor that says so.
    assert len(graphs) == 6


def test_two_rows_may_wait_for_their_backward_pass() -> None:
    # Catches values of the second row in the backward pass of the first one.
    plain, model, _ = models_of(EXPERTS)
    for seed in range(3):
        found, expected = (
            gradients_of(each, loss_of(each, [5, 9, 2], seed) + 2 * loss_of(each, [5, 9, 2], seed + 7))
            for each in (model, plain)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_recorded_experts_are_an_input() -> None:
    # Catches routes of the row that was captured.
    plain, model, graphs = models_of(EXPERTS)
    for seed in range(4):
        scores = torch.rand(
            16, 2, model.config.layers[1].ffn.num_experts, generator=torch.Generator().manual_seed(seed)
        )
        recorded = scores.topk(model.config.layers[1].ffn.num_active).indices
        assert_same_step(model, plain, [5, 9, 2], seed, recorded=recorded)
    assert len(graphs) == 3


def test_parameters_that_moved_or_are_frozen_get_other_graphs() -> None:
    # Catches graphs that read the memory where parameters were, and gradients of those that are not trained.
    plain, model, graphs = models_of(DENSE)
    for seed in range(2):
        assert_same_step(model, plain, [16], seed)
    for each in (plain, model):
        for parameter in each.layers[1].parameters():
            parameter.data = parameter.data * 1.5
    assert_same_step(model, plain, [16], 2)
    assert_same_step(model, plain, [16], 3)
    assert len(graphs) == 4
    for each in (plain, model):
        each.layers[0].self_attn.requires_grad_(False)
    for seed in range(4, 7):
        assert_same_step(model, plain, [16], seed)
    assert len(graphs) == 5


def test_passes_without_gradients_are_no_graphs() -> None:
    # Catches a capture of evaluation or of layers below the first trained one, and the values of an earlier pass there.
    plain, model, graphs = models_of(DENSE)
    for each in (plain, model):
        each.model.embed_tokens.requires_grad_(False)
        each.layers[0].requires_grad_(False)
    for seed in range(3):
        assert_same_step(model, plain, [16], seed)
        with torch.no_grad():
            assert torch.equal(loss_of(model, [16], seed), loss_of(plain, [16], seed))
    assert len(graphs) == 2


def test_evaluation_with_gradients_has_graphs_of_its_own() -> None:
    # Catches routes without the sums of training in a graph that a pass in evaluation mode captured.
    plain, model, _ = models_of(EXPERTS)
    for training in (False, False, True, True, False):
        for each in (plain, model):
            each.train(training)
        assert_same_step(model, plain, [16], 0)


def test_rows_without_tokens_or_of_unequal_ranks_are_no_graphs() -> None:
    # Catches a rank that captures a collective which the others launch.
    layout = SequenceLayout.from_lengths([5, 9, 2])
    assert SequenceLayout.from_lengths([]).rounded() is None
    assert layout.among(20).rounded() is None
    rounded = layout.among(16, (5, 12)).rounded()
    assert rounded is not None
    assert rounded.offsets.tolist() == [0, 16, *[16] * 7]
    assert rounded.cu_seqlens.tolist() == [0, 5, 14, 16, *[16] * 5]


def test_sizes_beyond_the_first_ones_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches memory that grows with each new size, and an option that has no effect without a word.
    monkeypatch.setattr(graphed, "MAX_SIZES", 2)
    plain, model, graphs = models_of(DENSE)
    with caplog.at_level(logging.WARNING, "xorl"):
        for lengths in ([16], [8], [12], [16], [8], [12], [12], [16]):
            assert_same_step(model, plain, lengths, 0)
    assert len(graphs) == 6
    [told] = [record.getMessage() for record in caplog.records if record.name == graphed.__name__]
    assert told.startswith(
        "CUDA graphs: 2 sizes of rows have graphs, and kernels for further ones are launched one by one"
    )


GRAPHS = {"data_parallel_mode": "ddp", "recompute": "layer", "compile_backend": "aot_eager", "cuda_graphs": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_mode": "fsdp2"}, "cuda_graphs: .* fsdp2 gathers: use ddp or none"),
        ({"recompute": "none"}, "cuda_graphs: need layers that are compiled, all of them with recompute"),
        ({"recompute_num_layers": 1}, "cuda_graphs: need layers that are compiled, all of them with recompute"),
        ({"compile_backend": None}, "cuda_graphs: need layers that are compiled, all of them with recompute"),
        ({"fp8": "rowwise"}, "cuda_graphs: cannot contain what fp8"),
        ({"activation_offload_limit": 0.0}, "cuda_graphs: cannot contain what .* activation_offload_limit"),
    ],
)
def test_what_graphs_cannot_contain_is_refused(changes: dict, message: str) -> None:
    # Catches graphs of parameters that move, and of layers whose activations would all be copied.
    with pytest.raises(ValueError, match=message):
        ParallelPolicy(**{**GRAPHS, **changes})


@pytest.mark.parametrize(
    ("config", "message"),
    [(hf_config("qwen3_5_text"), "GatedDeltaNet"), (hf_config("lfm2"), "ShortConv"), (DENSE, None), (EXPERTS, None)],
)
def test_layers_that_the_host_waits_in_are_refused(config: dict, message: str | None) -> None:
    # Catches a capture that fails in the second step.
    model, policy = tiny_decoder(config), ParallelPolicy(**GRAPHS)
    assert isinstance(model.layers[0], DecoderLayer)
    if message is None:
        check_parallelizable(model, policy, "cpu")
        return
    with pytest.raises(ValueError, match=f"cuda_graphs: the host reads the documents for the recurrence of {message}"):
        check_parallelizable(model, policy, "cpu")


GROUPED, READING = partial(grouped.experts, products="native"), reference.experts


@pytest.mark.parametrize(
    ("attention", "experts", "dispatcher", "message"),
    [
        (sdpa_attention, GROUPED, None, "with attention by sdpa, the host reads the lengths of documents"),
        (device_attention, READING, None, "how many tokens an expert has, except with grouped products"),
        (device_attention, GROUPED, AllToAll, "how many tokens are exchanged, except with allgather"),
        (device_attention, GROUPED, AllGather, None),
        (device_attention, GROUPED, None, None),
    ],
)
def test_kernels_that_the_host_waits_in_are_refused(
    attention: PackedAttention, experts: ExpertsFn, dispatcher: type | None, message: str | None
) -> None:
    # Catches a capture that fails in the second step, and one of lengths that other rows do not have.
    ranks = None if dispatcher is None else dispatcher(RankGroup(0, 2, ""))
    layers = tiny_decoder(EXPERTS, kernels=LayerKernels(attention, experts=experts, dispatcher=ranks)).layers
    refusal = graphed.kernels_refusal(layers)
    assert refusal is None if message is None else message in (refusal or "")


def test_dropout_is_refused() -> None:
    # Catches masks that are the same in each step.
    model = tiny_decoder(DENSE)
    model.layers[0].dropout = nn.Dropout(0.1)
    assert "dropout" in (graphed.graphs_refusal(model.layers) or "")
