"""FLOPs: against torch's own count of the forward pass, and against counting pairs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny_models import LATENT_EXPERTS, hf_config
from xorl.core.models import SPECS, training_flops
from xorl.core.models.flops import causal_pairs
from xorl.core.nn import LayerKernels
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.kernels.experts import reference as reference_experts
from xorl.kernels.layout import SequenceLayout

SIZES = {"num_hidden_layers": 3, "max_position_embeddings": 64}
HF_CONFIGS = {
    "Qwen2ForCausalLM": hf_config("qwen2", **SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "Qwen3ForCausalLM": hf_config("qwen3", **SIZES, head_dim=16),
    "GPT2LMHeadModel": hf_config("gpt2", n_layer=3),
    "MixtralForCausalLM": hf_config("mixtral", **SIZES),
    "Qwen3MoeForCausalLM": hf_config("qwen3_moe", **SIZES, mlp_only_layers=[1]),
    "Qwen2MoeForCausalLM": hf_config("qwen2_moe", **SIZES),
    "Qwen3_5ForCausalLM": hf_config("qwen3_5_text"),
    "Qwen3NextForCausalLM": hf_config("qwen3_next"),
    "Glm4MoeForCausalLM": hf_config("glm4_moe", **SIZES),
    "NemotronHForCausalLM": hf_config("nemotron_h", **LATENT_EXPERTS),
}


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 1), (7, 3), (7, 7), (7, 9)])
def test_causal_pairs_are_what_counting_gives(length, window):
    """Catches an off-by-one in the closed form."""
    counted = sum(1 for i in range(length) for j in range(i + 1) if window is None or i - j < window)
    assert causal_pairs(length, window) == counted


@pytest.mark.parametrize("architecture", HF_CONFIGS)
def test_agrees_with_the_count_of_the_operations_that_run(architecture):
    """Catches a forgotten matrix, such as the head, a factor of two, or experts that compute nothing: MFU is off."""
    spec = SPECS[architecture]
    config = spec.config_from_hf(HF_CONFIGS[architecture])
    attention = resolve_attention("eager", AttentionRequest("cpu", torch.float32, config.attentions[0].head_dim))
    decoder = spec.build(config, merge_qkv=True, kernels=LayerKernels(attention, experts=reference_experts.experts))
    decoder.init_weights(seed=0)
    lengths = [9, 4]
    with FlopCounterMode(display=False) as counter:
        decoder(torch.randint(50, (13,)), SequenceLayout.from_lengths(lengths)).sum().backward()
    assert counter.get_total_flops() == training_flops(config, lengths)


def test_documents_add_up_and_longer_ones_cost_more():
    """Catches attention counted over the whole pack instead of inside each document."""
    config = SPECS["Qwen3ForCausalLM"].config_from_hf(HF_CONFIGS["Qwen3ForCausalLM"])
    assert training_flops(config, [5, 8]) == training_flops(config, [5]) + training_flops(config, [8])
    assert training_flops(config, [13]) > training_flops(config, [5, 8])
    assert training_flops(config, []) == 0
