"""Adapters trained here and by PEFT on transformers, on the same rows: outputs, gradients, losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_cases import make_twin
from xorl.core.loss import cross_entropy
from xorl.core.models import Decoder
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, adapters, inject, load_adapter_state_dict
from xorl.lora.merge import magnitude

TOLERANCE = 1e-5
LENGTHS = [23, 1, 12, 9]
VOCAB = 83
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
GPT2_SIZES = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.1}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=6)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=None)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, **NO_DROPOUT, attn_implementation="eager")),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
CASES: list[tuple[str, AdapterSpec]] = [
    ("qwen3", AdapterSpec(rank=4, alpha=8.0)),
    ("qwen3", AdapterSpec(rank=4, alpha=6.0, use_dora=True)),
    ("qwen3", AdapterSpec(rank=4, alpha=6.0, targets=("embed_tokens", "lm_head", "v_proj", "down_proj"))),
    ("llama", AdapterSpec(rank=8, targets=ATTENTION, use_rslora=True, use_dora=True)),
    ("llama", AdapterSpec(rank=4, rank_pattern={"k_proj": 2, "1.mlp.up_proj": 6}, alpha_pattern={"down_proj": 3.0})),
    ("qwen2", AdapterSpec(rank=3, alpha=5.0, targets=("q_proj", "up_proj"), use_rslora=True)),
    # Norms of 1 + w around each block, and files that stack projections.
    ("gemma3", AdapterSpec(rank=4, alpha=6.0, use_dora=True)),
    ("phi3", AdapterSpec(rank=4, targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))),
    ("gpt2", AdapterSpec(rank=4, targets=("c_attn", "c_proj", "c_fc"))),
]
IDS = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
LABELS = torch.cat([torch.cat((row[1:], torch.tensor([-100]))) for row in IDS.split(LENGTHS)])


def peft_of(name: str, spec: AdapterSpec) -> nn.Module:
    """PEFT's model with adapters that change something."""
    torch.manual_seed(0)
    model = MODELS[name]()
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern=dict(spec.alpha_pattern),
        fan_in_fan_out=name == "gpt2",
    )
    adapted = get_peft_model(model, config)
    for key, parameter in adapted.named_parameters():
        if parameter.requires_grad and "magnitude" not in key:
            nn.init.normal_(parameter, std=0.2)
        elif parameter.requires_grad:
            parameter.data *= 1 + 0.1 * torch.rand(parameter.shape)
    return adapted


LEAVES = {
    "lora_A.default.weight": "lora_A",
    "lora_B.default.weight": "lora_B",
    "lora_embedding_A.default": "lora_A",
    "lora_embedding_B.default": "lora_B",
    "lora_magnitude_vector.default.weight": "lora_magnitude_offset",
}


def by_our_names(adapted: nn.Module, *, gradient: bool = False) -> dict[str, Tensor]:
    """PEFT's adapters, or their gradients, under the names of ours."""
    found: dict[str, Tensor] = {}
    for key, parameter in adapted.named_parameters():
        for theirs, ours in LEAVES.items():
            if key.endswith(f".{theirs}"):
                name = key.removeprefix("base_model.model.").removesuffix(f".{theirs}")
                value = parameter.grad if gradient else parameter.detach()
                assert value is not None
                found[f"{name}.{ours}"] = value.clone()
    return found


def ours_of(name: str, spec: AdapterSpec, adapted: nn.Module) -> Decoder:
    """xorl's decoder with the weights that PEFT's model began with, and its adapters."""
    torch.manual_seed(0)
    decoder, _ = make_twin(MODELS[name]())
    inject(decoder, spec)
    values = by_our_names(adapted)
    for key, adapter in adapters(decoder).items():
        if adapter.magnitude_offset is not None:
            values[f"{key}.lora_magnitude_offset"] -= magnitude(adapter)
    load_adapter_state_dict(decoder, values)
    return decoder


def their_loss(adapted: nn.Module) -> tuple[Tensor, Tensor]:
    logits = torch.cat([adapted(row[None]).logits[0] for row in IDS.split(LENGTHS)])
    return F.cross_entropy(logits, LABELS, reduction="sum") / (LABELS >= 0).sum(), logits.detach()


def our_loss(decoder: Decoder) -> Tensor:
    layout = SequenceLayout.from_lengths(LENGTHS)
    return decoder(IDS, layout, lambda h, w: cross_entropy(h, w, {"labels": LABELS})).sum / (LABELS >= 0).sum()


def relative(measured: Tensor, expected: Tensor) -> float:
    return float((measured - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "spec"), CASES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.filterwarnings("ignore")
def test_training_is_that_of_peft(name: str, spec: AdapterSpec) -> None:
    # Catches any difference in what adapters compute, forward or backward, and in what their optimizer sees.
    adapted = peft_of(name, spec)
    decoder = ours_of(name, spec, adapted)
    expected_loss, logits = their_loss(adapted)
    assert relative(decoder(IDS, SequenceLayout.from_lengths(LENGTHS)).detach(), logits) <= TOLERANCE
    expected_loss.backward()
    our_loss(decoder).backward()
    theirs: Mapping[str, Tensor] = by_our_names(adapted, gradient=True)
    ours = adapter_parameters(decoder)
    assert theirs.keys() == ours.keys()
    for key, gradient in theirs.items():
        assert relative(ours[key].grad, gradient) <= TOLERANCE, key
    # Decay of what DoRA trains is towards the base's norms here and towards zero there.
    decay = 0.0 if spec.use_dora else 0.1
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizers = [torch.optim.AdamW(each, lr=2e-3, weight_decay=decay) for each in (trained, list(ours.values()))]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected_loss, loss = their_loss(adapted)[0], our_loss(decoder)
        assert float(loss) == pytest.approx(float(expected_loss), rel=TOLERANCE)
        expected_loss.backward()
        loss.backward()
