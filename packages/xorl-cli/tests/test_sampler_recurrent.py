"""Samples from models with recurrences, whose states are in the sampler's cache."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from sampling import CPU, VOCAB, decode_apart, logits_of, make_sampler, place
from tiny_models import hf_config
from xorl.core.parallel import ParallelModel
from xorl.server.sampler import GenerationRequest, GenerationResult, Sampler
from xorl.server.sampler.cache_size import num_slots, state_bytes

FAMILIES = ("qwen3_5_text", "qwen3_next", "lfm2", "nemotron_h", "granitemoehybrid")
# Of one token, shorter than the convolution, and longer than a block of the cache and than a chunk.
PROMPTS = [tuple((7 * i + 3 * length) % VOCAB for i in range(length)) for length in (1, 2, 70, 17, 3)]


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[False, True], ids=["mixed", "decode"])
def separate_decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tokens of running samples have passes of their own, as on GPUs."""
    if request.param:
        decode_apart(monkeypatch)
    return request.param


def model_of(family: str) -> ParallelModel:
    return place(hf_config(family, vocab_size=VOCAB, max_position_embeddings=256, initializer_range=0.3))


def requests(num_tokens: int = 9) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, num_tokens, seed=seed) for seed, prompt in enumerate(PROMPTS)]


def assert_as_whole(model: ParallelModel, result: GenerationResult, prompt: tuple[int, ...]) -> None:
    """The log-probabilities of a result are those of a forward pass over its whole sequence."""
    for sample in result.samples:
        tokens = torch.tensor([*prompt, *sample.tokens])
        logprobs = logits_of(model, tokens).log_softmax(-1)
        wanted = logprobs[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_probabilities_of_whole_passes(family: str, separate_decode: bool) -> None:
    # Catches states of another sequence of the batch, of another position, and those that are not restored.
    model = model_of(family)
    # Prompts take several passes, some of them together with tokens of running samples.
    sampler = make_sampler(model, max_step_tokens=24)
    for prompt, result in zip(PROMPTS, sampler.run(requests()), strict=True):
        assert_as_whole(model, result, prompt)
    # Others in the same slots, and a prompt that is in the cache of keys.
    again = sampler.run(requests()[::-1])
    for prompt, result in zip(PROMPTS[::-1], again, strict=True):
        assert_as_whole(model, result, prompt)
        assert result.num_cached_tokens == 0


def test_samples_of_one_request_have_states_of_their_own(separate_decode: bool) -> None:
    # Catches samples that share a slot as they share blocks.
    model = model_of("nemotron_h")
    request = GenerationRequest(PROMPTS[3], 6, num_samples=3, seed=1)
    [result] = make_sampler(model).run([request])
    assert len({sample.tokens for sample in result.samples}) > 1
    assert_as_whole(model, result, PROMPTS[3])


def test_a_sample_that_lost_its_blocks_begins_anew() -> None:
    # Catches states that remain from before.
    model = model_of("qwen3_5_text")
    sampler: Sampler = make_sampler(model, cache_tokens=112)
    ids = [sampler.submit(each) for each in requests(30)]
    found: dict[int, GenerationResult] = {}
    for step in range(400):
        found |= {each.request_id: each for each in sampler.step()}
        if step == 7:
            sampler.release_memory()
        if not sampler.num_pending:
            break
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        assert_as_whole(model, found[request_id], prompt)


def test_no_more_samples_run_than_their_states_have_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a sampler whose states take the memory of the model.
    model = model_of("nemotron_h")
    per_slot = state_bytes(model.module.config, torch.float32)
    assert per_slot == 2 * 4 * (8 * 4 * 8 + 3 * (32 + 2 * 4 * 8))
    monkeypatch.setattr("xorl.server.sampler.cache_size._memory", lambda _: 30 * per_slot)
    assert num_slots(model.module, CPU, 256) == 3
    sampler = make_sampler(model)
    for prompt, result in zip(PROMPTS, sampler.run(requests(3)), strict=True):
        assert_as_whole(model, result, prompt)
