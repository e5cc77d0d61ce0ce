"""Generation on several ranks gives the tokens of one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from placement import num_ranks, place
from xorl.core.models import spec_for
from xorl.core.nn import LayerKernels
from xorl.server.sampler import Sampler, SampleRequest, SampleResult

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
REQUESTS = [
    SampleRequest(tuple(range(3, 40)), 12, seed=1, num_samples=3, prompt_logprobs=True),
    SampleRequest((5,), 9, seed=2, top_p=0.8),
    SampleRequest(tuple(range(20)), 15, temperature=0, stop=((1,), (2, 3))),
]


def results(layout: str) -> list[SampleResult]:
    spec = spec_for(HF_CONFIG)
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(HF_CONFIG), merge_qkv=True, kernels=LayerKernels())
    placed = place(model, layout)
    parameters = list(model.parameters())  # after a pass, the module shows gathered copies of some
    sampler = Sampler(placed, device=torch.device("cpu"), cache_tokens=512, max_step_tokens=30)
    before = sampler.run(REQUESTS)
    # Weights that changed, as an optimizer step does it.
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.2)
    placed.drop_gathered()
    sampler.weights_changed(1)
    return before + sampler.run(REQUESTS)


@pytest.mark.multi
@pytest.mark.parametrize("layout", ["zero3-2", "zero2-2", "ddp-2"])
def test_ranks_give_the_tokens_of_one(layout: str, run_ranks) -> None:
    # Catches ranks that draw differently, collectives that do not match, and parameters that are gathered too early.
    [wanted] = run_ranks(lambda: results("none"), 1)
    for got in run_ranks(lambda: results(layout), num_ranks(layout)):
        for one, other in zip(wanted, got, strict=True):
            assert [sample.tokens for sample in one.samples] == [sample.tokens for sample in other.samples]
        np.testing.assert_allclose(got[0].prompt_logprobs, wanted[0].prompt_logprobs, atol=1e-4)
    assert wanted[0].samples != wanted[len(REQUESTS)].samples
