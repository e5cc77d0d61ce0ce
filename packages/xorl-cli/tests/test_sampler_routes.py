"""The experts that a sampler returns with its tokens."""

import numpy as np
import pytest
import torch

from sampling import MIXTURE, decode_apart, make_sampler, place
from xorl.kernels.layout import SequenceLayout
from xorl.server.sampler import GenerationRequest, GenerationResult

pytestmark = pytest.mark.usefixtures("place")
PROMPT = tuple(range(3, 43))


@pytest.mark.parametrize("passes", ["in one pass", "decode apart"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_step_tokens": 7}, {"cache_tokens": 9 * 16, "max_running": 3}],
    ids=["at once", "in parts", "preempted"],
)
def test_the_routes_of_a_sample_are_those_of_the_whole_sequence(
    passes: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches rows of another token, of a token that was found in the cache, or that was computed twice.
    if passes == "decode apart":
        decode_apart(monkeypatch)
    model = place(MIXTURE)
    routers = model.module.routers
    asked = {"prompt_routes": True, "sample_routes": True}
    requests = [
        GenerationRequest(PROMPT, 30, num_samples=3),
        *(GenerationRequest(prompt, 9, num_samples=2, **asked) for prompt in [PROMPT, (7,), PROMPT[:17], PROMPT[5:38]]),
        GenerationRequest(PROMPT, 20, seed=5, num_samples=3, **asked),
        GenerationRequest(PROMPT, 0, **asked),
    ]
    sampler = make_sampler(model, **options)
    alone, joined = sampler.run(requests), GenerationResult.of_shares(sampler.run(requests[-2].shares(2)))
    assert alone[0].prompt_routes is None
    assert all(sample.routes is None for sample in alone[0].samples)
    for request, result in zip([*requests[1:], requests[-2]], [*alone[1:], joined], strict=True):
        assert len(result.samples) == (request.num_samples if request.max_tokens else 0)
        rows = [((), result.prompt_routes)]
        for sample in result.samples:
            assert len(sample.routes) == len(sample.tokens)
            rows.append((sample.tokens, np.concatenate([result.prompt_routes, sample.routes])))
        for tokens, routes in rows:
            whole = (*request.prompt, *tokens)
            layout = SequenceLayout.from_lengths([len(whole)])
            with model.generation(keep_gathered=False), routers.recording():
                model.forward(torch.tensor(whole), layout)
                expected = routers.take_routes()
            np.testing.assert_array_equal(routes, expected[:-1])
