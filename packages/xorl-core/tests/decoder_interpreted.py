"""Decoders with fused kernels in Triton's interpreter; test_nn_kernels.py runs this file."""

from itertools import combinations

import pytest
import torch

from tiny_models import hf_config
from xorl.core.models import SPECS
from xorl.core.nn.kernels import FUSED_KERNELS, LayerKernels, choose_kernels
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.layout import SequenceLayout

HF_CONFIG = hf_config(
    vocab_size=13,
    hidden_size=12,
    intermediate_size=10,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    initializer_range=0.3,
)
CASES = [
    ("Qwen3ForCausalLM", True, native, False)
    for number in range(len(FUSED_KERNELS) + 1)
    for native in combinations(FUSED_KERNELS, number)
]
CASES += [
    ("Qwen3ForCausalLM", False, (), False),
    ("LlamaForCausalLM", True, (), True),
    ("LlamaForCausalLM", True, ("rms_norm",), False),
]


def gradients(architecture, merge_qkv, kernels):
    spec = SPECS[architecture]
    decoder = spec.build(spec.config_from_hf(HF_CONFIG), merge_qkv=merge_qkv, kernels=kernels)
    decoder.init_weights(seed=0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    logits = decoder(torch.arange(7), SequenceLayout.from_lengths([4, 3]))
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in decoder.parameters())]


@pytest.mark.parametrize(("architecture", "merge_qkv", "native", "compiled"), CASES, ids=str)
def test_kernels_train_as_the_plain_forms_do(architecture, merge_qkv, native, compiled):
    # Catches a choice that leaves a norm out or does it twice, or that takes other arguments than its twin.
    kernels = choose_kernels(
        eager_attention, device_type="cuda", dtype=torch.float32, compiled=compiled, native=native, cast_bf16=False
    )
    wanted = gradients(architecture, merge_qkv, LayerKernels(eager_attention))
    for got, plain in zip(gradients(architecture, merge_qkv, kernels), wanted, strict=True):
        assert (got - plain).norm() <= 1e-5 * plain.norm()
