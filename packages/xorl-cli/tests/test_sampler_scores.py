"""Scores of the end of a prompt, and tokens that the sampler draws in place of a prompt's own."""

import numpy as np
import pytest
import torch

from sampling import HF_CONFIG, VOCAB, logits_of, make_sampler, place
from xorl.core.parallel import ParallelModel
from xorl.server.sampler import GenerationRequest
from xorl.server.sampler.draw import draw_alternatives

pytestmark = pytest.mark.usefixtures("place")
PROMPT = tuple(range(3, 43))


@pytest.fixture(scope="module")
def model() -> ParallelModel:
    return place(HF_CONFIG)


@pytest.mark.parametrize("max_step_tokens", [11, 8192])
@pytest.mark.parametrize("last", [1, 2, 17, 39])
def test_the_end_of_a_prompt_is_scored_as_in_the_whole(model: ParallelModel, last: int, max_step_tokens: int) -> None:
    """Catches scores that the cache or a border between passes shifts or hides, and work on a prefix that is cached."""
    sampler = make_sampler(model, max_step_tokens=max_step_tokens)
    targets = np.array([[token] for token in PROMPT[1:]])
    whole = GenerationRequest(PROMPT, 0, prompt_logprobs=True, top_prompt_logprobs=3)
    [wanted] = sampler.run([whole])
    for options in ({}, {"target_tokens": targets}, {"prompt_draws": 2}):
        seen: list[int] = []
        hook = model.module.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(len(inputs[0])))
        end = GenerationRequest(
            PROMPT, 1, prompt_logprobs=True, top_prompt_logprobs=3, num_prompt_scored=last, **options
        )
        [result] = sampler.run([end])
        hook.remove()
        # What is not scored and in whole blocks of 16 is in the cache; other requests need all positions.
        num_cached = 0 if options else (len(PROMPT) - 1 - last) // 16 * 16
        assert (sum(seen), result.num_cached_tokens) == (len(PROMPT) - num_cached, num_cached)
        np.testing.assert_allclose(result.prompt_logprobs[-last:], wanted.prompt_logprobs[-last:], atol=1e-4)
        assert np.isnan(result.prompt_logprobs[:-last]).all()
        np.testing.assert_array_equal(
            result.top_prompt_logprobs.token_ids[-last:], wanted.top_prompt_logprobs.token_ids[-last:]
        )
        assert np.isnan(result.top_prompt_logprobs.logprobs[:-last]).all()
        assert not np.isnan(result.top_prompt_logprobs.logprobs[-last:]).any()
        if "target_tokens" in options:
            np.testing.assert_allclose(result.target_logprobs[:, 0], wanted.prompt_logprobs[1:], atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_tokens_in_place_of_the_prompts_are_drawn_from_the_model(model: ParallelModel, temperature: float) -> None:
    """Catches draws of the next position, at another temperature, or that depend on the passes."""
    request = GenerationRequest(PROMPT, 0, seed=4, temperature=temperature, prompt_draws=512)
    [draws], [again] = (make_sampler(model, max_step_tokens=size).run([request]) for size in (8192, 7))
    token_ids, found = draws.prompt_draws
    assert token_ids.shape == (len(PROMPT) - 1, 512)
    assert (again.prompt_draws.token_ids != token_ids).mean() < 0.01
    logits = logits_of(model, PROMPT)[:-1]
    logprobs = logits.log_softmax(-1)
    np.testing.assert_allclose(found, logprobs.gather(1, torch.tensor(token_ids).long()), atol=1e-4)
    if not temperature:
        assert (token_ids == logits.argmax(-1, keepdim=True).numpy()).all()
        return
    shares = np.stack([np.bincount(row, minlength=VOCAB) for row in token_ids]).sum(0) / token_ids.size
    np.testing.assert_allclose(shares, (logits / temperature).softmax(-1).mean(0), atol=0.01)
    other = make_sampler(model).run([GenerationRequest(PROMPT, 0, seed=5, temperature=temperature, prompt_draws=8)])
    assert (other[0].prompt_draws.token_ids != token_ids[:, :8]).any()


def test_draws_depend_on_their_position_and_not_on_the_rows_beside_them() -> None:
    """Catches random numbers that begin anew with each part of a long prompt."""
    logits = torch.randn(150, 7, generator=torch.Generator().manual_seed(0))
    whole = draw_alternatives(logits, 1.0, 3, 0, 4)
    assert torch.equal(
        whole, torch.cat([draw_alternatives(logits[:50], 1.0, 3, 0, 4), draw_alternatives(logits[50:], 1.0, 3, 50, 4)])
    )
    assert not torch.equal(whole, draw_alternatives(logits, 1.0, 3, 1, 4))
