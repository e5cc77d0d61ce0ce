"""Generation on several ranks gives the tokens of one."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from placement import assert_same, num_ranks, placed, whole
from tiny_models import hf_config
from xorl.kernels.layout import SequenceLayout
from xorl.server.sampler import GenerationRequest, GenerationResult, Sampler

HF_CONFIG = hf_config("llama", num_hidden_layers=3, tie_word_embeddings=True)
REQUESTS = [
    GenerationRequest(tuple(range(3, 40)), 12, seed=1, num_samples=3, prompt_logprobs=True),
    GenerationRequest((5,), 9, seed=2, top_p=0.8),
    GenerationRequest(tuple(range(20)), 15, temperature=0, stop=((1,), (2, 3))),
]


@dataclass
class Outcome:
    """Results before and after the weights change, of each pass before it its collectives and tokens, and a gradient
    after all."""

    results: list[GenerationResult]
    collectives: list[int]
    num_tokens: list[int]
    gradient: dict[str, Tensor]


def outcome(layout: str, keep_gathered: bool = False, is_distributed: bool = False) -> Outcome:
    model = placed(HF_CONFIG, layout)
    module = model.module
    parameters = list(module.parameters())  # after a pass, the module shows gathered copies of some
    sampler = Sampler(
        model,
        device=torch.device("cpu"),
        cache_tokens=512,
        max_step_tokens=30,
        keep_gathered=keep_gathered,
        is_distributed=is_distributed,
    )
    collectives, num_tokens = [], []
    hook = module.register_forward_pre_hook(lambda _, inputs: num_tokens.append(len(inputs[0])))
    for request in REQUESTS:
        sampler.submit(request)
    before = []
    while sampler.num_pending:
        with CommDebugMode() as communication:
            before += sampler.step()
        collectives.append(communication.get_total_counts())
    hook.remove()
    # Weights that changed, as an optimizer step does it.
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.2)
    model.drop_gathered()
    sampler.weights_changed(1)
    after = sampler.run(REQUESTS)
    module.train()
    layout_of_row = SequenceLayout.from_lengths([20])
    model.forward(torch.arange(20), layout_of_row).square().sum().backward()
    model.drop_gathered()
    gradients = {name: whole(p.grad) / model.mesh.data.size for name, p in module.named_parameters()}
    return Outcome(sorted(before, key=lambda result: result.request_id) + after, collectives, num_tokens, gradients)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("zero3-2", {}),
        ("zero3-2", {"keep_gathered": True}),
        ("zero3-2", {"is_distributed": True}),
        ("zero2-2", {}),
        ("ddp-2", {"is_distributed": True}),
    ],
)
def test_ranks_give_the_tokens_of_one(layout: str, options: dict[str, bool], run_ranks) -> None:
    # Catches ranks that draw differently, wait for others or compute what others do, parameters that are gathered too
    # early or again, and training after it that computes with what generation left.
    [alone] = run_ranks(lambda: outcome("none"), 1)
    for got in run_ranks(lambda: outcome(layout, **options), num_ranks(layout)):
        for one, other in zip(alone.results, got.results, strict=True):
            assert [sample.tokens for sample in one.samples] == [sample.tokens for sample in other.samples]
        np.testing.assert_allclose(got.results[0].prompt_logprobs, alone.results[0].prompt_logprobs, atol=1e-4)
        gathers_again = layout == "zero3-2" and "keep_gathered" not in options
        assert (sum(got.collectives[1:]) > 0) == (gathers_again or "is_distributed" in options)
        assert (sum(got.num_tokens) < sum(alone.num_tokens)) == ("is_distributed" in options)
        assert_same(alone.gradient, got.gradient, limit=1e-5)
    assert alone.results[0].samples[0].tokens != alone.results[len(REQUESTS)].samples[0].tokens
