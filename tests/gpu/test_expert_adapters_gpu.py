"""Adapters on experts on a GPU, of each alone or shared, beside the same model in fp64 on a CPU."""

from typing import get_args

import pytest
import torch

from tiny_models import hf_config
from xorl.core.models import Decoder, spec_for
from xorl.core.nn import LayerKernels
from xorl.kernels.experts import EXPERTS, ExpertsRequest
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, inject
from xorl.lora.spec import ExpertSharing

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_hidden_layers": 1}
LENGTHS = [150, 90, 61]


def decoder_of(sharing: ExpertSharing, device: str, dtype: torch.dtype, kernels: LayerKernels | None) -> Decoder:
    """With the same weights and adapters, rounded to bf16, on any device."""
    shape = hf_config("qwen3_moe", **SIZES)
    family = spec_for(shape)
    config = family.config_from_hf(shape)
    decoder = family.build(config) if kernels is None else family.build(config, kernels=kernels)
    decoder.init_weights(0)
    targets = ("gate_proj", "up_proj", "down_proj")
    inject(decoder, AdapterSpec(rank=8, targets=targets, expert_sharing=sharing))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(decoder).values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    for parameter in decoder.parameters():
        parameter.data = parameter.data.bfloat16().float()
    decoder.to(device, dtype)
    decoder.compute_dtype = dtype
    return decoder


@pytest.mark.parametrize("sharing", get_args(ExpertSharing))
@pytest.mark.parametrize("name", ["native", "triton"])
def test_gradients_are_those_of_the_twin(name: str, sharing: ExpertSharing) -> None:
    # Catches a shared factor that a kernel of a GPU reads as an expert's, and its gradient of one expert alone.
    try:
        experts = EXPERTS.resolve(name, ExpertsRequest("cuda", torch.float32, 128, 64))
    except RuntimeError as error:
        pytest.skip(str(error))
    found = decoder_of(sharing, "cuda", torch.float32, LayerKernels(experts=experts))
    exact = decoder_of(sharing, "cpu", torch.float64, None)
    ids = torch.arange(sum(LENGTHS)) * 7 % 64
    for decoder, device in ((found, "cuda"), (exact, "cpu")):
        layout = SequenceLayout.from_lengths(LENGTHS, device=torch.device(device))
        decoder(ids.to(device), layout).square().mean().backward()
    theirs = adapter_parameters(exact)
    for key, parameter in adapter_parameters(found).items():
        assert parameter.grad is not None
        expected = theirs[key].grad
        assert expected is not None
        assert (parameter.grad.cpu() - expected).norm() <= 1e-3 * expected.norm(), key
