"""Many adapters in one pass on a GPU: torch's grouped kernels, which no CPU has, and compiled layers over them."""

import pytest
import torch
from torch import Tensor

from tiny_models import hf_config
from xorl.core.loss import cross_entropy
from xorl.core.models import SPECS
from xorl.core.parallel.compile import compile_layers
from xorl.kernels.grouped_linear import TokenGroups, grouped_linear
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.testing import TOLERANCES, assert_matches_reference
from xorl.lora import Adam, AdapterBank, AdapterSpec, adapter_parameters, inject
from xorl.lora.bank_layer import BankedLinear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SIZES = hf_config("llama", vocab_size=256, hidden_size=128, intermediate_size=256, initializer_range=0.05)
MEMBERS = {f"r{rank}": AdapterSpec(rank=rank, alpha=2.0 * rank) for rank in (4, 5, 16, 64)}
LENGTHS = (37, 3, 130, 64)


def one_by_one(runs: list[tuple[int, int]]):
    def product(x: Tensor, weight: Tensor) -> Tensor:
        pieces = x.split([length for _, length in runs])
        return torch.cat([piece @ weight[index].t() for (index, _), piece in zip(runs, pieces, strict=True)])

    return product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "runs", [[(0, 64), (1, 128), (2, 8)], [(3, 37), (0, 1), (2, 101)], [(2, 77)], [(1, 0), (0, 33), (3, 0), (2, 5)]]
)
@pytest.mark.parametrize("widths", [(128, 16), (16, 384), (24, 40)])
def test_grouped_products(dtype, runs, widths):
    # Catches groups that begin anywhere, empty ones whose gradient is whatever lay there, and ranks below a tile.
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(length for _, length in runs)
    x = torch.randn(num_tokens, widths[0], generator=generator).to("cuda", dtype)
    weight = torch.randn(4, widths[1], widths[0], generator=generator).to("cuda", dtype)
    groups = TokenGroups(*(tensor.cuda() for tensor in TokenGroups.of(runs, 4)))
    assert_matches_reference(
        lambda x, weight: grouped_linear(x, weight, groups), one_by_one(runs), [x, weight], tolerance=TOLERANCES[dtype]
    )


def decoder():
    spec = SPECS["LlamaForCausalLM"]
    model = spec.build(spec.config_from_hf(SIZES), merge_qkv=True)
    model.init_weights(0)
    model.compute_dtype = torch.bfloat16
    return model.to("cuda", torch.bfloat16)


def run(model, indices: list[int]) -> Tensor:
    layout = SequenceLayout.from_lengths([LENGTHS[index] for index in indices], "cuda")
    rows = [torch.randint(256, (LENGTHS[index],), generator=torch.Generator().manual_seed(index)) for index in indices]
    ids = torch.cat(rows).cuda()
    return model(ids, layout, loss=lambda hidden, head: cross_entropy(hidden, head, {"labels": ids}).sum)


def as_if_trained(parameters: dict[str, Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(parameters.items()):
            parameter.add_(torch.randn(parameter.shape, generator=generator).cuda(), alpha=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_mixed_batch_are_those_of_runs_alone(compiled):
    # Catches compiled code that reads groups once, and bf16 products that are off by more than their rounding.
    mixed = decoder()
    if compiled:
        compile_layers(list(mixed.layers), backend="inductor", device_type="cuda")
    bank = AdapterBank(mixed, num_resident=4, max_rank=64, device="cuda")
    for seed, (name, spec) in enumerate(MEMBERS.items()):
        bank.add(name, spec, seed=seed)
        parts = bank.adapters(name)
        as_if_trained({f"{layer}.lora_A": part.A for layer, part in parts.items()}, seed)
        as_if_trained({f"{layer}.lora_B": part.B for layer, part in parts.items()}, seed + 50)
    for order in ([0, 1, 2, 3], [3, 1], [2, 0, 3]):
        names = [list(MEMBERS)[index] for index in order]
        bank.activate([(name, LENGTHS[index]) for name, index in zip(names, order, strict=True)])
        run(mixed, order).backward()
        for index, name in zip(order, names, strict=True):
            alone = decoder()
            inject(alone, MEMBERS[name], seed=index)
            parameters = adapter_parameters(alone)
            as_if_trained({key: value for key, value in parameters.items() if key.endswith("lora_A")}, index)
            as_if_trained({key: value for key, value in parameters.items() if key.endswith("lora_B")}, index + 50)
            run(alone, [index]).backward()
            got, wanted = bank.gradients(name), {key: value.grad for key, value in parameters.items()}
            largest = max(value.norm() for value in wanted.values())
            for key, value in wanted.items():
                # Those of queries and keys of short documents are differences that bf16 leaves little of.
                assert (got[key] - value).norm() <= 3e-2 * value.norm() + 3e-3 * largest, (name, key)
        for name in names:
            bank.zero_grad(name)


def test_adapters_page_through_pinned_memory_and_step():
    # Catches copies to the host that are read before they have arrived, and steps on stale values.
    model = decoder()
    bank = AdapterBank(model, num_resident=1, max_rank=64, device="cuda")
    for seed, (name, spec) in enumerate(MEMBERS.items()):
        bank.add(name, spec, seed=seed)
    before = {name: bank.snapshot(name).values[""] for name in MEMBERS}
    for index, name in enumerate(MEMBERS):
        bank.activate([(name, LENGTHS[index])])
        run(model, [index]).backward()
    for name in MEMBERS:
        assert bank.step(name, Adam(lr=1e-2)).grad_norm > 0
    for name in MEMBERS:
        assert not torch.equal(bank.snapshot(name).values[""], before[name])
        assert bank.snapshot(name).step == 1


def test_an_adapter_alone_has_the_factors_that_it_has_among_others():
    # Catches a scale that is rounded to bf16 where an adapter computes alone: 0.18 % off for 2/3.
    model = decoder()
    bank = AdapterBank(model, num_resident=2, max_rank=8, device="cuda")
    for seed, name in enumerate(("one", "other")):
        bank.add(name, AdapterSpec(rank=3, alpha=2.0), seed=seed)
    layers = [layer for layer in model.modules() if isinstance(layer, BankedLinear) and len(layer.pairs()) == 1]
    assert layers
    bank.activate([("one", 3), ("other", 4)])
    among = [layer._factors(torch.bfloat16, layer.pairs()[0].stop)[0].clone() for layer in layers]
    bank.activate([("one", 7)])
    for layer, downs in zip(layers, among, strict=True):
        assert layer.single is not None
        alone, _ = layer._single_factors(layer.single, torch.bfloat16, layer.pairs()[0].stop)
        assert any(torch.equal(alone[:3], down[:3]) for down in downs)
