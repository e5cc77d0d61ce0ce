"""Mixtures of experts: losses of routers, padding, recomputation, and roles of parameters."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_decoders import tiny_decoder
from tiny_models import hf_config
from xorl.core.models import Decoder
from xorl.core.models.router_losses import RouterLossOptions, RouterSums
from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.moe import MixtureOfExperts, Router
from xorl.core.optim import MuonOptions, OptimizerName, build_optimizer
from xorl.core.optim.muon import lr_ratio
from xorl.core.optim.newton_schulz import orthogonalise
from xorl.core.parallel.activations import Recompute, recompute_layers
from xorl.core.parallel.compile import compile_layers
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy

CONFIG = hf_config("qwen3_moe", vocab_size=61, num_hidden_layers=3, mlp_only_layers=[1], initializer_range=0.3)
CORRECTED = hf_config("glm4_moe", vocab_size=61, num_hidden_layers=3, initializer_range=0.3)
LENGTHS = [9, 1, 14, 5]


def make_decoder(**changes: object) -> Decoder:
    return tiny_decoder({**CONFIG, **changes}, seed=1, kernels=LayerKernels())


def make_corrected() -> Decoder:
    """With scores that are corrected and grouped, and shared experts."""
    decoder = tiny_decoder(CORRECTED, seed=1, kernels=LayerKernels())
    for mixture in decoder.modules():
        if isinstance(mixture, MixtureOfExperts):
            nn.init.normal_(mixture.correction, std=0.2, generator=torch.Generator().manual_seed(2))
    return decoder


def make_ids(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(61, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def loss_of(
    decoder: Decoder,
    ids: Tensor,
    lengths: list[int],
    *,
    num_padding: int = 0,
    of_tokens: bool = True,
    recorded: Tensor | None = None,
) -> Tensor:
    """The summed loss of tokens (of_tokens) and routers, without those of the padding, which is the last document."""
    plain = SequenceLayout.from_lengths(lengths)
    end = len(ids) - num_padding
    labels = torch.where(torch.arange(len(ids)) < end, ids, -100) if of_tokens else torch.full_like(ids, -100)
    trained = torch.tensor(lengths) if not num_padding else torch.tensor([*lengths[:-1], 0])
    layout = SequenceLayout(plain.cu_seqlens, plain.positions, plain.lengths, torch.tensor(end), trained)
    return decoder(
        ids, layout, lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)[0].sum(), recorded=recorded
    )


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    trained = {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad.clone() for name, parameter in trained.items()}
    decoder.zero_grad()
    return found


def test_a_router_multiplies_in_fp32_unless_told_otherwise() -> None:
    """Catches a product in bf16, which sends tokens to other experts than the reference does."""
    generator = torch.Generator().manual_seed(0)
    router = Router(256, 8)
    nn.init.normal_(router.weight, generator=generator)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    weight = router.weight.bfloat16()
    wide, narrow = F.linear(x.float(), weight.float()), F.linear(x, weight).float()
    torch.testing.assert_close(router(x), wide, rtol=0, atol=1e-4)
    router.fp32 = False
    torch.testing.assert_close(router(x), narrow, rtol=0, atol=0)
    assert (narrow - wide).abs().max() > 1e-2


LOSSES = [RouterLossOptions(), RouterLossOptions(balance_coef=0.1), RouterLossOptions(z_coef=0.1)]


@pytest.mark.parametrize("options", LOSSES, ids=["none", "balance", "z"])
@pytest.mark.parametrize("of_tokens", [True, False])
def test_losses_do_not_depend_on_the_split(options: RouterLossOptions, of_tokens: bool) -> None:
    # Catches a balancing loss over a whole batch, which is not the sum of those of its parts.
    decoder, ids = make_decoder(), make_ids(sum(LENGTHS))
    assert decoder.routers is not None
    decoder.routers.options = options
    loss_of(decoder, ids, LENGTHS, of_tokens=of_tokens).backward()
    packed, sums = gradients(decoder), decoder.routers.take()
    # Two layers, two experts a token; and all tokens are trained.
    assert sums[:, :-5].sum(-1).tolist() == [2 * 2 * length for length in LENGTHS]
    assert sums[:, -1].tolist() == LENGTHS
    apart_sums = []
    for part in ids.split(LENGTHS):
        loss_of(decoder, part, [len(part)], of_tokens=of_tokens).backward()
        apart_sums.append(decoder.routers.take())
    apart = gradients(decoder)
    torch.testing.assert_close(sums, torch.cat(apart_sums), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-4)
    if options != RouterLossOptions():
        assert packed["model.layers.0.mlp.gate.weight"].norm() > 0


@pytest.mark.parametrize("options", LOSSES, ids=["none", "balance", "z"])
def test_padding_changes_nothing(options: RouterLossOptions) -> None:
    # Catches padding that is routed, counted, or part of a loss.
    decoder, ids = make_decoder(), make_ids(sum(LENGTHS))
    assert decoder.routers is not None
    decoder.routers.options = options
    loss_of(decoder, ids, LENGTHS).backward()
    expected = gradients(decoder), decoder.routers.take()
    padded = torch.cat([ids, torch.zeros(7, dtype=torch.int64)])
    loss_of(decoder, padded, [*LENGTHS, 7], num_padding=7).backward()
    sums = decoder.routers.take()
    loss_of(decoder, padded[-7:], [7], num_padding=7).backward()
    torch.testing.assert_close((gradients(decoder), sums[:-1]), expected, rtol=1e-4, atol=1e-4)
    assert not sums[-1].any()
    assert not decoder.routers.take().any()


@pytest.mark.parametrize("recompute", ["none", "layer", "operation", ("mlp",), ("self_attn",)])
@pytest.mark.parametrize("experts", [False, True])
def test_recomputation_changes_no_bit(recompute: Recompute, experts: bool) -> None:
    # Catches tokens that change their experts, and statistics that count twice.
    plain, other = make_decoder(), make_decoder()
    recompute_layers(other.layers, recompute, experts=experts, reentrant=False)
    ids, found = make_ids(sum(LENGTHS)), []
    for decoder in (plain, other):
        assert decoder.routers is not None
        decoder.routers.options = RouterLossOptions(balance_coef=0.1, z_coef=0.1)
        loss_of(decoder, ids, LENGTHS).backward()
        found.append((gradients(decoder), decoder.routers.take()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def record(decoder: Decoder, ids: Tensor, lengths: list[int]) -> Tensor:
    """The experts of each token, [T, 2, 2], of a pass without gradients."""
    assert decoder.routers is not None
    decoder.eval()
    with torch.no_grad(), decoder.routers.recording():
        decoder(ids, SequenceLayout.from_lengths(lengths))
        routes = decoder.routers.take_routes()
    decoder.train()
    return routes


@pytest.mark.parametrize(
    ("model_type", "recompute", "compiled"),
    [
        *((family, kind, False) for family in ("qwen3_moe", "glm4_moe") for kind in ("none", "layer", "operation")),
        *((family, "operation", True) for family in ("qwen3_moe", "glm4_moe")),
        ("qwen3_moe", "layer", True),
    ],
)
def test_replaying_its_own_routes_changes_no_bit(model_type: str, recompute: Recompute, compiled: bool) -> None:
    # Catches weights of other experts or in another order, and a second choice when layers are recomputed, which
    # differs from the first one where rounding does.
    torch._dynamo.reset()
    operations: set[str] = set()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.add(func.name())
            return func(*args, **(kwargs or {}))

    decoder, ids = make_corrected() if model_type == "glm4_moe" else make_decoder(), make_ids(sum(LENGTHS))
    num_active = 3 if model_type == "glm4_moe" else 2
    recompute_layers(decoder.layers, recompute, reentrant=False, compiled=compiled)
    if compiled:
        compile_layers(list(decoder.layers), backend="aot_eager", device_type="cpu")
    assert decoder.routers is not None
    decoder.routers.options = RouterLossOptions(balance_coef=0.1, z_coef=0.1)
    with decoder.routers.recording():
        losses = [loss_of(decoder, ids, LENGTHS)]
        routes = decoder.routers.take_routes().to(torch.int16)
    assert routes.shape == (sum(LENGTHS), 2, num_active)
    with Operations():
        losses[0].backward()
    assert ("xorl::route_plan" in operations) == (recompute != "none")
    assert "xorl::top_experts" not in operations
    found = [(gradients(decoder), decoder.routers.take())]
    # Of the second document, nothing is recorded; of the last, nothing of its last token.
    routes[9] = routes[-1] = -1
    losses.append(loss_of(decoder, ids, LENGTHS, recorded=routes))
    losses[1].backward()
    found.append((gradients(decoder), decoder.routers.take()))
    assert torch.equal(losses[0], losses[1])
    assert all(torch.equal(found[1][0][name], gradient) for name, gradient in found[0][0].items())
    assert torch.equal(found[0][1][:, :-5], found[1][1][:, :-5])
    assert found[0][1][:, -5:-3].tolist() == [[0, 0]] * 4
    assert found[1][1][:, -5:-3].tolist() == [[2 * num_active * length, 0] for length in (9, 0, 14, 4)]


@pytest.mark.parametrize("normalize", [False, True])
def test_replayed_experts_are_weighted_by_the_routers_own_scores(normalize: bool) -> None:
    # Catches weights that are 0 for experts that the router would not have chosen, or normalised over others.
    decoder = make_decoder(norm_topk_prob=normalize)
    block, layout = decoder.layers[0].mlp, SequenceLayout.from_lengths([3, 2])
    x = torch.randn(5, block.gate.weight.shape[1], generator=torch.Generator().manual_seed(1))
    worst = block.gate(x).argsort(-1)[:, :2]
    recorded = torch.cat([worst[:3], torch.full((2, 2), -1)]).to(torch.int16)
    out, routes = block(x, layout, recorded)
    scores = block.gate(x).softmax(-1)
    ids = torch.cat([worst[:3], scores.topk(2).indices[3:]])
    weights = scores.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    gate_up, down = block.experts.gate_up_proj.stacked(x.dtype), block.experts.down_proj.stacked(x.dtype)
    gate, up = torch.einsum("td,tkfd->tkf", x, gate_up[ids]).chunk(2, dim=-1)
    outputs = torch.einsum("tkf,tkdf->tkd", nn.functional.silu(gate) * up, down[ids])
    expected = (weights[:, :, None] * outputs).sum(1)
    torch.testing.assert_close(out, expected)
    assert torch.equal(routes.ids, ids)
    assert routes.replayed is not None
    assert routes.replayed.tolist() == [[6, 6], [0, 0]]
    # The router learns from experts that it would not have chosen.
    [gradient] = torch.autograd.grad(out.square().sum(), block.gate.weight, retain_graph=True)
    [wanted] = torch.autograd.grad(expected.square().sum(), block.gate.weight)
    assert (gradient - wanted).norm() < 1e-4 * wanted.norm()


def test_a_record_that_is_shifted_by_a_token_changes_the_loss() -> None:
    # Catches a record that is not used.
    decoder, ids = make_decoder(), make_ids(sum(LENGTHS))
    assert decoder.routers is not None
    routes, loss = record(decoder, ids, LENGTHS), loss_of(decoder, ids, LENGTHS)
    decoder.routers.take()
    assert torch.equal(loss_of(decoder, ids, LENGTHS, recorded=routes), loss)
    decoder.routers.take()
    assert (loss_of(decoder, ids, LENGTHS, recorded=routes.roll(1, 0)) - loss).abs() > 1e-3
    sums = RouterSums(decoder.routers.take().sum(0), num_experts=4)
    own = routes.roll(1, 0)[:, 0]
    # In the first layer, the routers choose as before.
    first = sum(len(set(new.tolist()) - set(old.tolist())) for new, old in zip(own, routes[:, 0], strict=True))
    assert sums.values[-5] == 2 * 2 * len(ids)
    assert first <= sums.values[-4] <= first + 2 * len(ids)
    assert sums.replay_metrics()["router_changed_routes"] == sums.values[-4] / sums.values[-5]


@pytest.mark.parametrize("is_one_token", [False, True])
def test_a_document_does_not_change_its_neighbours(is_one_token: bool) -> None:
    # Catches experts with a capacity or without tokens, and rows that are mixed up in the sort.
    decoder = make_decoder(num_experts=8, num_experts_per_tok=1)
    assert decoder.routers is not None
    layout, ids = SequenceLayout.from_lengths(LENGTHS), make_ids(sum(LENGTHS))
    # The first token of the last document sees itself alone, as all tokens of such a document do: to one expert.
    changed = ids[24].repeat(14) if is_one_token else make_ids(14, seed=5)
    before, _ = decoder(ids, layout), decoder.routers.take()
    after, sums = decoder(torch.cat([ids[:10], changed, ids[24:]]), layout), decoder.routers.take()
    counts = sums.sum(0)[:-5].view(-1, 8)
    if is_one_token:
        assert counts.amax(-1).min() >= 15
        assert (counts == 0).any()
    for part in (slice(0, 10), slice(24, None)):
        assert (after[part] - before[part]).norm() <= 1e-6 * before[part].norm()


def test_an_evaluation_computes_the_same_and_counts_nothing() -> None:
    # Catches held-out tokens in the statistics of a step, and a loss that is reported with those of routers.
    decoder, ids = make_decoder(), make_ids(sum(LENGTHS))
    assert decoder.routers is not None
    decoder.routers.options = RouterLossOptions(balance_coef=0.1, z_coef=0.1)
    trained, _ = loss_of(decoder, ids, LENGTHS), decoder.routers.take()
    with torch.no_grad():
        assert torch.equal(loss_of(decoder.eval(), ids, LENGTHS), trained)
    assert decoder.routers._newest is None


def test_a_router_learns_without_a_loss_of_its_own() -> None:
    # Catches routing weights without a gradient, or with one that vanishes where they are normalised.
    decoder = make_decoder()
    loss_of(decoder, make_ids(sum(LENGTHS)), LENGTHS).backward()
    assert all(gradient.norm() > 0 for name, gradient in gradients(decoder).items() if name.endswith("gate.weight"))


def test_every_expert_is_a_matrix_of_its_own_and_routers_are_none() -> None:
    # Catches an optimizer of matrices that orthogonalises all experts of a layer as one, or the router.
    matrices = make_decoder().layer_matrices()
    assert matrices["model.layers.0.mlp.experts.gate_up_proj.weight"] == (24,) * 8
    assert matrices["model.layers.0.mlp.experts.down_proj.weight"] == (32,) * 4
    assert not any("gate.weight" in name for name in matrices)


def test_muon_moves_each_projection_of_each_expert_by_itself() -> None:
    # Catches gate and up that are orthogonalised as one, routers in muon's hands, and decay of what no_decay_* names.
    decoder = make_decoder()
    mlp, muon = decoder.layers[0].mlp, MuonOptions(decoder.layer_matrices(), lr=0.1)
    options = {"lr": 0.1, "weight_decay": 0.5, "no_decay_modules": ["experts"], "state_dtype": torch.float32}
    optimizer = build_optimizer("muon", decoder.named_parameters(), muon=muon, **options)
    loss_of(decoder, make_ids(sum(LENGTHS)), LENGTHS).backward()
    before = {name: (parameter.detach().clone(), parameter.grad.clone()) for name, parameter in mlp.named_parameters()}
    optimizer.step()
    for name, shape in (("gate_up_proj", (24, 32)), ("down_proj", (32, 24))):
        weight, gradient = (tensor.view(-1, *shape) for tensor in before[f"experts.{name}.weight"])
        expected = weight - 0.1 * lr_ratio("original", *shape) * orthogonalise(gradient, 5)
        measured = mlp.experts.get_parameter(f"{name}.weight").view(-1, *shape)
        torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-4)
    weight, gradient = before["gate.weight"]
    # The first step of AdamW.
    torch.testing.assert_close(mlp.gate.weight, 0.95 * weight - 0.1 * gradient.sign(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "moment", "kept"), [("adamw", "exp_avg", 0.9), ("muon", "momentum_buffer", 0.95)])
def test_an_expert_without_tokens_is_updated_like_any_matrix(name: OptimizerName, moment: str, kept: float) -> None:
    # Catches moments that stand still, or weights that do not decay, while no token comes.
    decoder = make_decoder(num_experts=8, num_experts_per_tok=1)
    options = {"weight_decay": 0.5, "state_dtype": torch.float32, "muon": MuonOptions(decoder.layer_matrices())}
    optimizer = build_optimizer(name, decoder.named_parameters(), lr=0.01, **options)
    weight = decoder.layers[0].mlp.experts.down_proj.weight
    loss_of(decoder, make_ids(40), [40]).backward()
    optimizer.step()
    before, moment_before = weight.detach().clone(), optimizer.state[weight][moment].clone()
    optimizer.zero_grad()
    loss_of(decoder, make_ids(1).repeat(40), [40]).backward()
    is_idle = (weight.grad.view(8, -1) == 0).all(-1).repeat_interleave(32)
    assert is_idle.sum() == 7 * 32
    optimizer.step()
    assert moment_before[is_idle].any()
    torch.testing.assert_close(optimizer.state[weight][moment][is_idle], kept * moment_before[is_idle])
    assert (weight != before)[is_idle].all()


def test_a_module_without_roles_is_not_left_uninitialised() -> None:
    # Catches memory that nobody gave values, after a model was made on the meta device.
    decoder = make_decoder()
    decoder.layers[0].extra = nn.Conv1d(2, 2, 2)
    with pytest.raises(AssertionError, match="Conv1d declares no roles"):
        decoder.init_weights(seed=0)


def test_metrics_of_routers_say_how_even_the_load_is() -> None:
    # Catches shares over all layers at once, and an entropy that is not 1 for an even load.
    even = RouterSums(torch.tensor([5.0] * 8 + [0, 0] + [30.0, 6.0, 10.0]), num_experts=4).metrics()
    assert {name: value.item() for name, value in even.items()} == pytest.approx(
        {
            "router_balance_loss": 3.0,
            "router_z_loss": 0.6,
            "router_imbalance": 1.0,
            "router_entropy": 1.0,
            "router_dead_experts": 0.0,
        }
    )
    one = RouterSums(torch.tensor([8.0, 0, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0]), num_experts=4).metrics()
    assert one["router_imbalance"] == 4.0
    assert one["router_entropy"] == pytest.approx(0.5)
    assert one["router_dead_experts"] == 3


@pytest.mark.parametrize("skipped", [False, True])
def test_corrections_move_towards_an_even_load(skipped: bool) -> None:
    # Catches the wrong direction, the counts of another layer, and a step that was skipped elsewhere.
    decoder = make_corrected()
    assert decoder.routers is not None
    decoder.routers.options = RouterLossOptions(correction_rate=0.25)
    mixtures = [each for each in decoder.modules() if isinstance(each, MixtureOfExperts)]
    before = [each.correction.clone() for each in mixtures]
    num_experts = mixtures[0].num_experts
    counts = torch.arange(float(len(mixtures) * num_experts), dtype=torch.float64).view(-1, num_experts)
    counts[1] = counts[1].flip(0)
    sums = RouterSums(torch.cat([counts.flatten(), torch.zeros(5, dtype=torch.float64)]), num_experts)
    decoder.correct_routers(sums, skipped=torch.tensor(float(skipped)))
    half = num_experts // 2
    wanted = torch.tensor([0.25] * half + [-0.25] * half) * (not skipped)
    for mixture, old, change in zip(mixtures, before, (wanted, wanted.flip(0)), strict=True):
        torch.testing.assert_close(mixture.correction, old + change, rtol=0, atol=1e-6)
