"""Mixtures of experts: losses of routers, padding, recomputation, and roles of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tiny_models import hf_config
from xorl.core.models import SPECS, Decoder
from xorl.core.models.router_losses import RouterLossOptions, RouterSums
from xorl.core.nn.kernels import LayerKernels
from xorl.core.parallel.activations import Recompute, recompute_layers
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy

CONFIG = hf_config("qwen3_moe", vocab_size=61, num_hidden_layers=3, mlp_only_layers=[1], initializer_range=0.3)
LENGTHS = [9, 1, 14, 5]


def make_decoder(**changes: object) -> Decoder:
    spec = SPECS["Qwen3MoeForCausalLM"]
    config = spec.config_from_hf({**CONFIG, **changes})
    decoder = spec.build(config, kernels=LayerKernels())
    decoder.init_weights(seed=1)
    return decoder


def make_ids(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(61, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def loss_of(
    decoder: Decoder, ids: Tensor, lengths: list[int], *, num_padding: int = 0, of_tokens: bool = True
) -> Tensor:
    """The summed loss of tokens (of_tokens) and routers, without those of the padding, which is the last document."""
    plain = SequenceLayout.from_lengths(lengths)
    end = len(ids) - num_padding
    labels = torch.where(torch.arange(len(ids)) < end, ids, -100) if of_tokens else torch.full_like(ids, -100)
    trained = torch.tensor(lengths) if not num_padding else torch.tensor([*lengths[:-1], 0])
    layout = SequenceLayout(plain.cu_seqlens, plain.positions, plain.lengths, torch.tensor(end), trained)
    return decoder(ids, layout, lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)[0].sum())


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    return found


LOSSES = [
    RouterLossOptions(),
    RouterLossOptions(balance_coef=0.1),
    RouterLossOptions(z_coef=0.1),
]


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
    assert sums[:, :-3].sum(-1).tolist() == [2 * 2 * length for length in LENGTHS]
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
    torch.testing.assert_close((gradients(decoder), sums[:-1]), expected, rtol=1e-4, atol=1e-4)
    assert not sums[-1].any()


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


def test_a_document_does_not_change_its_neighbours() -> None:
    # Catches experts with a capacity, and rows that are mixed up in the sort.
    decoder = make_decoder().eval()
    layout, ids = SequenceLayout.from_lengths(LENGTHS), make_ids(sum(LENGTHS))
    changed = torch.cat([ids[:10], make_ids(14, seed=5), ids[24:]])
    before, after = decoder(ids, layout), decoder(changed, layout)
    for part in (slice(0, 10), slice(24, None)):
        torch.testing.assert_close(before[part], after[part], rtol=1e-6, atol=1e-6)


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


def test_a_module_without_roles_is_not_left_uninitialised() -> None:
    # Catches memory that nobody gave values, after a model was made on the meta device.
    decoder = make_decoder()
    decoder.layers[0].extra = nn.Conv1d(2, 2, 2)
    with pytest.raises(AssertionError, match="Conv1d declares no roles"):
        decoder.init_weights(seed=0)


def test_metrics_of_routers_say_how_even_the_load_is() -> None:
    # Catches shares over all layers at once, and an entropy that is not 1 for an even load.
    even = RouterSums(torch.tensor([5.0] * 8 + [30.0, 6.0, 10.0]), num_experts=4).metrics()
    assert {name: value.item() for name, value in even.items()} == pytest.approx(
        {
            "router_balance_loss": 3.0,
            "router_z_loss": 0.6,
            "router_imbalance": 1.0,
            "router_entropy": 1.0,
            "router_dead_experts": 0.0,
        }
    )
    one = RouterSums(torch.tensor([8.0, 0, 0, 0, 2, 2, 2, 2, 0, 0, 0]), num_experts=4).metrics()
    assert one["router_imbalance"] == 4.0
    assert one["router_entropy"] == pytest.approx(0.5)
    assert one["router_dead_experts"] == 3
