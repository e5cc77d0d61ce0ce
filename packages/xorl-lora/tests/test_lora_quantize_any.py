"""QLoRA on modules that are not xorl's: quantised in place, trained, merged, described for PEFT."""

import pytest
import torch
from torch import nn

from xorl.kernels.quant import QuantScheme
from xorl.lora import AdapterSpec, adapter_parameters, inject, merge_, quantize_
from xorl.lora.peft import AdapterConfig, config_of
from xorl.lora.quantized import QuantizedLinear


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))


@pytest.mark.parametrize(
    ("scheme", "tolerance"),
    [(QuantScheme("nf4", 16), 0.12), (QuantScheme("nvfp4", 16), 0.15), (QuantScheme("block_fp8", 16), 0.04)],
)
def test_any_module_is_quantised_and_trains_adapters(scheme, tolerance) -> None:
    # Catches quantisation that only a decoder's layers support, or that loses the current values.
    plain, x = module(), torch.randn(32, 64)
    model = module()
    assert quantize_(model, scheme) == ("0", "2")
    assert all(isinstance(model[index], QuantizedLinear) for index in (0, 2))
    expected = plain(x)
    assert (model(x) - expected).norm() / expected.norm() < tolerance
    inject(model, AdapterSpec(rank=4))
    optimizer = torch.optim.Adam(adapter_parameters(model).values(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": QuantScheme("nf4", 32)}, "group_size: layer '2' does not fit nf4: rows of 48 .* into groups of 16"),
        ({"exclude": ["head"]}, "exclude: no layer among the targets is named head"),
        ({"exclude": "head"}, r"exclude must be a tuple of names, got the string 'head': write \('head',\)"),
        ({"targets": "2"}, "targets must be 'all-linear' or a tuple of names, got the string '2'"),
        ({"scheme": "nf4"}, "scheme must be a xorl.kernels.quant.*QuantScheme, got a str"),
        ({"targets": ["5"]}, r"targets \['5'\] match no layer"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(options, message) -> None:
    # Catches a model that is half quantised.
    model = module()
    with pytest.raises(ValueError, match=message):
        quantize_(model, **{"scheme": QuantScheme("nf4", 16), **options})
    assert all(type(model[index]) is nn.Linear for index in (0, 2))


def test_a_merge_without_values_or_to_another_kind_of_number_is_refused() -> None:
    # Catches a merge that does nothing, and weights in a dtype that no layer computes with.
    model = module()
    inject(model, AdapterSpec(rank=2))
    with pytest.raises(ValueError, match=r"dequantize_to must be one of torch.bfloat16, .*; got torch.float8_e4m3fn"):
        merge_(model, dequantize_to=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="has adapters on the meta device, without values to merge"):
        merge_(model.to("meta"))


def test_layers_may_be_left_out() -> None:
    # Catches an exclusion without effect.
    model = module()
    assert quantize_(model, QuantScheme("nf4", 16), exclude=["2"]) == ("0",)
    assert type(model[2]) is nn.Linear
    inject(model, AdapterSpec(rank=2))
    with pytest.raises(ValueError, match="targets: '2' has an adapter"):
        quantize_(model, QuantScheme("nf4", 16), targets=["2"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_into_dequantised_weights_computes_the_same(dtype) -> None:
    # Catches an update that is rounded to the quantised format, and a layer that stays quantised.
    model, x = nn.Sequential(module(), nn.Linear(8, 3)), torch.randn(32, 64)
    quantize_(model, QuantScheme("nf4", 16), targets=["0.0", "0.2"])
    inject(model, AdapterSpec(rank=4, targets=("0.0", "1")))
    for parameter in adapter_parameters(model).values():
        nn.init.normal_(parameter, std=0.1)
    expected = model.eval()(x)
    merge_(model, dequantize_to=dtype)
    assert [type(layer) for layer in (*model[0], model[1])] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    assert {model[0][0].weight.dtype, model[0][2].weight.dtype} == {dtype}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert (model.float()(x) - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05)


def test_the_task_of_an_adapter_is_a_parameter() -> None:
    # Catches a module that is no language model described as one.
    model = module()
    inject(model, spec := AdapterSpec(rank=2))
    assert config_of(model, spec, base=None).to_json()["task_type"] == "CAUSAL_LM"
    content = config_of(model, spec, base=None, task_type=None).to_json()
    assert content["task_type"] is None
    assert AdapterConfig.from_json({**content, "task_type": "SEQ_CLS"}).task_type == "SEQ_CLS"
