"""Adapters in a model: what they start as, what trains, and what merging leaves."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.lora import (
    AdapterSpec,
    adapter_parameters,
    adapter_state_dict,
    adapters,
    inject,
    load_adapter_state_dict,
    merge_,
)

SPEC = AdapterSpec(rank=3, alpha=6.0)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 5, bias=False)).to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(11, 7, generator=torch.Generator().manual_seed(1)).to(dtype)


def adapted(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A model whose adapters are as if trained: B is not zero."""
    module = model(dtype)
    inject(module, SPEC)
    generator = torch.Generator().manual_seed(2)
    load_adapter_state_dict(
        module, {name: torch.randn(v.shape, generator=generator) for name, v in adapter_state_dict(module).items()}
    )
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fresh_adapter_changes_no_output(dtype):
    """Catches an adapter that starts off zero, or a forward pass that rounds the base's output once more."""
    base = model(dtype)
    module = copy.deepcopy(base)
    assert inject(module, SPEC) == ("0", "3")
    assert torch.equal(module(inputs(dtype)), base(inputs(dtype)))
    assert {value.dtype for value in adapter_parameters(module).values()} == {torch.float32}


def test_gradients_reach_the_adapters_alone():
    """Catches a base, norm or bias that goes on training, and an adapter that cannot."""
    module = adapted()
    module(inputs()).square().sum().backward()
    trained = {id(parameter) for parameter in module.parameters() if parameter.grad is not None}
    assert trained == {id(parameter) for parameter in adapter_parameters(module).values()}
    assert set(adapter_parameters(module)) == {"0.lora_A", "0.lora_B", "3.lora_A", "3.lora_B"}
    assert all(parameter.grad.abs().sum() > 0 for parameter in adapter_parameters(module).values())


def test_output_and_gradients_are_those_of_the_summed_weight():
    """Catches a wrong scale and swapped factors: W + (alpha / rank) * B @ A, written out, is the plain twin."""
    module = adapted()
    layer, adapter = module[0], adapters(module)["0"]
    a, b = (value.detach().clone().requires_grad_() for value in (adapter.A, adapter.B))
    expected = F.linear(inputs(), layer.weight + (6.0 / 3) * b @ a, layer.bias)
    output = layer(inputs())
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(adapter.A.grad, a.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(adapter.B.grad, b.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_computes_in_the_dtype_of_its_input(base_dtype, dtype):
    """Catches fp32 adapters that widen every activation after them, and a base that only takes its own dtype."""
    module = adapted(base_dtype)
    output, adapter = module[0](inputs(dtype)), adapters(module)["0"]
    output.float().sum().backward()
    assert (output.dtype, adapter.A.grad.dtype, adapter.B.grad.dtype) == (dtype, torch.float32, torch.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_merged_model_computes_the_same_with_plain_layers(dtype, tolerance):
    """Catches a merge with another scale, and a model that still holds adapters after it."""
    module = adapted(dtype)
    weight = module[0].weight
    before = module(inputs(dtype))
    merge_(module)
    torch.testing.assert_close(module(inputs(dtype)), before, rtol=tolerance, atol=tolerance)
    assert [type(layer) for layer in module] == [type(layer) for layer in model()]
    assert module.state_dict().keys() == model().state_dict().keys()
    assert module[0].weight is weight


def test_a_bf16_base_is_merged_in_fp32_and_rounded_once():
    """Catches a product computed in bf16, which loses what small updates have learnt."""
    module = adapted(torch.bfloat16)
    adapter = adapters(module)["0"]
    exact = module[0].weight.double() + adapter.scale * adapter.B.double() @ adapter.A.double()
    merge_(module)
    half_unit = exact.abs() * 2**-8  # bf16 keeps 8 bits
    assert module[0].weight.dtype == torch.bfloat16
    assert ((module[0].weight.double() - exact).abs() <= half_unit + 1e-6).all()


def test_adapters_learn_a_regression_that_the_base_does_not_fit():
    """Catches adapters that are trained but not used, or used but not trained."""
    module = model()
    frozen = {name: value.clone() for name, value in module.state_dict().items()}
    inject(module, SPEC)
    targets = inputs() @ torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(adapter_parameters(module).values(), lr=0.03)
    losses = []
    for _ in range(150):
        loss = F.mse_loss(module(inputs()), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    assert all(torch.equal(module.state_dict()[name], value) for name, value in frozen.items())


def test_initial_values_depend_on_seed_name_and_shape_alone():
    """Catches adapters drawn from the global generator, or in an order that other targets shift."""
    values = {}
    for key, targets, seed, before in [("all", "all-linear", 5, 0), ("one", ("3",), 5, 9), ("other", ("3",), 6, 0)]:
        module = model()
        torch.manual_seed(before)
        state = torch.get_rng_state()
        inject(module, AdapterSpec(rank=3, targets=targets), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        values[key] = adapter_state_dict(module)["3.lora_A"]
    assert torch.equal(values["all"], values["one"])
    assert not torch.equal(values["all"], values["other"])
    assert 0 < values["all"].abs().max() <= 13**-0.5


def test_a_state_dict_goes_into_a_fresh_model():
    """Catches adapters that are saved under names, or copied in a way, that load as nothing."""
    trained, fresh = adapted(), model()
    inject(fresh, SPEC, seed=1)
    load_adapter_state_dict(fresh, adapter_state_dict(trained))
    assert torch.equal(fresh(inputs()), trained(inputs()))


def test_names_are_plain_under_a_compiled_module():
    """Catches `_orig_mod.` in the keys, which every other reader drops without a word."""
    module = adapted()
    assert adapter_parameters(torch.compile(module)).keys() == adapter_parameters(module).keys()


def test_a_state_dict_of_other_adapters_is_refused_whole():
    """Catches a load that skips what does not fit, and one that has copied half before it stops."""
    module = adapted()
    before = {name: value.clone() for name, value in adapter_state_dict(module).items()}
    state = {name: torch.zeros_like(value) for name, value in before.items() if name != "0.lora_A"}
    state |= {"0.lora_B": torch.zeros(13, 4), "head.lora_A": torch.zeros(1)}
    message = r"0.lora_A is missing; 0.lora_B has shape \[13, 4\], the model has \[13, 3\]; head.lora_A is not in"
    with pytest.raises(ValueError, match=message):
        load_adapter_state_dict(module, state)
    assert all(torch.equal(value, before[name]) for name, value in adapter_state_dict(module).items())


def test_a_refused_injection_or_merge_leaves_the_model_as_it_was():
    """Catches a model frozen by a call that failed, and adapters silently frozen by a second call."""
    module = model()
    with pytest.raises(ValueError, match="match no layer"):
        inject(module, AdapterSpec(targets=("0", "head")))
    with pytest.raises(ValueError, match="no adapters to merge"):
        merge_(module)
    assert all(parameter.requires_grad for parameter in module.parameters())
    inject(module, AdapterSpec(targets=("0",)))
    with pytest.raises(ValueError, match="already has adapters"):
        inject(module, AdapterSpec(targets=("3",)))
    assert list(adapters(module)) == ["0"]
    assert all(parameter.requires_grad for parameter in adapter_parameters(module).values())
