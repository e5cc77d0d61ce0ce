"""Biases, penalties and grammars of the sampler, against the same computed for one row at a time."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from sampling import VOCAB, logits_of, make_sampler, place
from xorl.core.parallel import ParallelModel
from xorl.server.sampler import EditRules, GenerationRequest
from xorl.server.sampler.draw import DrawRule, draw, uniform_number
from xorl.server.sampler.edits import LogitEdits, edited_logits

PROMPT = tuple(range(3, 13))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> ParallelModel:
    request.getfixturevalue("place")
    return place()


class Alternating:
    """A grammar: even tokens and odd ones take turns, and after five tokens it has a problem."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def problem(self) -> str | None:
        return "too long" if len(self.tokens) >= 5 else None

    def add(self, token: int) -> None:
        self.tokens.append(token)

    def allowed(self) -> np.ndarray:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[len(self.tokens) % 2 : VOCAB : 2] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


RULES = {
    "none": None,
    "bias": EditRules(bias={7: 30.0, 9: -100.0}),
    "presence": EditRules(presence=2.0),
    "frequency": EditRules(frequency=1.5),
    "repetition": EditRules(repetition=1.8),
    "all": EditRules(bias={4: 3.0}, repetition=0.7, frequency=-0.5, presence=1.0),
}


def changed_by_hand(logits: torch.Tensor, rules: EditRules, prompt: list[int], sampled: list[int]) -> torch.Tensor:
    """One row, as the documentation of the penalties says it."""
    changed = logits.clone()
    for token, bias in rules.bias.items():
        changed[token] += bias
    for token in {*prompt, *sampled}:
        changed[token] *= 1 / rules.repetition if changed[token] > 0 else rules.repetition
    for token, count in Counter(sampled).items():
        changed[token] -= rules.presence + count * rules.frequency
    return changed


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_of_a_batch_are_each_changed_by_their_own_rules(model: ParallelModel, temperature: float) -> None:
    # Catches a penalty of a neighbour, counts that include the prompt, and log-probabilities of changed logits.
    requests = [
        GenerationRequest(PROMPT, max_tokens=24, seed=index, temperature=temperature, edits=rules)
        for index, rules in enumerate(RULES.values())
    ]
    for request, result in zip(requests, make_sampler(model).run(requests), strict=True):
        (sample,) = result.samples
        logits = logits_of(model, [*PROMPT, *sample.tokens])[len(PROMPT) - 1 :]
        for index, token in enumerate(sample.tokens):
            rules, sampled = request.edits or EditRules(), list(sample.tokens[:index])
            changed = changed_by_hand(logits[index], rules, list(PROMPT), sampled)
            divisor = temperature or 1.0
            assert sample.logprobs[index] == pytest.approx(
                (logits[index] / divisor).log_softmax(-1)[token].item(), abs=1e-4
            )
            if temperature:
                sums = (changed / divisor).softmax(-1).double().cumsum(0)
                share = uniform_number(request.seed, index)
                assert (sums[token - 1] if token else 0) - 1e-5 <= share <= sums[token] + 1e-5
            else:
                assert changed[token].item() == pytest.approx(changed.max().item(), abs=1e-4)


def test_rules_change_what_is_drawn_and_no_neighbour(model: ParallelModel) -> None:
    # Catches rules that do nothing, and a row without rules that depends on whether others have some.
    def sample(edits: EditRules | None) -> GenerationRequest:
        return GenerationRequest(PROMPT, max_tokens=30, seed=3, temperature=0.6, edits=edits)

    alone = make_sampler(model).run([sample(None)])[0].samples[0]
    together = [result.samples[0] for result in make_sampler(model).run([sample(rules) for rules in RULES.values()])]
    assert together[0].tokens == alone.tokens
    np.testing.assert_allclose(together[0].logprobs, alone.logprobs, atol=1e-5)
    assert len({one.tokens for one in together}) == len(RULES)
    assert 9 not in together[1].tokens
    assert together[1].tokens.count(7) > 15


@pytest.mark.parametrize("rules", [RULES["all"], EditRules(grammar=Alternating)], ids=["penalties", "grammar"])
def test_a_continued_sample_has_the_rules_of_the_whole(model: ParallelModel, rules: EditRules) -> None:
    # Catches parts of a stream that begin to count anew, or begin a grammar anew.
    whole = GenerationRequest(PROMPT, max_tokens=5, seed=3, edits=rules)
    (sample,) = make_sampler(model).run([whole])[0].samples
    begun = (*PROMPT, *sample.tokens[:3])
    rest = replace(whole, prompt=begun, num_continued=3, max_tokens=2)
    assert make_sampler(model).run([rest])[0].samples[0].tokens == sample.tokens[3:]


def test_a_grammar_masks_each_row_and_its_problem_ends_the_request(model: ParallelModel) -> None:
    # Catches a mask that is shifted by a word or a row, one that leaves nothing for top_k, and a sample without an end.
    requests = [
        GenerationRequest(PROMPT, max_tokens=4, seed=1, temperature=0.0, edits=EditRules(grammar=Alternating)),
        GenerationRequest(PROMPT, max_tokens=4, seed=1, top_k=3),
        GenerationRequest(PROMPT, 4, seed=1, num_samples=3, top_k=2, top_p=0.9, edits=EditRules(grammar=Alternating)),
        GenerationRequest(PROMPT, max_tokens=50, seed=1, edits=EditRules(grammar=Alternating)),
    ]
    greedy, _, cut, long = make_sampler(model).run(requests)
    for sample in (*greedy.samples, *cut.samples):
        assert [token % 2 for token in sample.tokens] == [0, 1, 0, 1]
        assert np.isfinite(sample.logprobs).all()
    assert (greedy.problem, cut.problem) == (None, None)
    assert len(long.samples[0].tokens) == 5
    assert long.problem == "too long"


def test_edits_leave_the_given_logits_alone_and_words_of_masks_have_the_lowest_bit_first() -> None:
    # Catches an edit in place, which recorded passes of a GPU would read again.
    class Only:
        problem = None

        def add(self, token: int) -> None: ...

        def allowed(self) -> np.ndarray:
            return np.array([1 << 4, 1 << 2, -(2**31)], np.int32)

    logits = torch.randn(2, 96)
    before = logits.clone()
    edits = [LogitEdits(EditRules(grammar=Only), [], []), LogitEdits(EditRules(bias={95: 1.0}), [], [])]
    changed = edited_logits(logits, edits)
    assert torch.equal(logits, before)
    assert torch.isfinite(changed[0]).nonzero().flatten().tolist() == [4, 34, 95]
    assert (changed[1] - before[1]).nonzero().flatten().tolist() == [95]
    (token,) = draw(logits[:1], [DrawRule(1.0, None, 1e-9, 0.5, edits[0])], 0).tokens.tolist()
    assert token == changed[0].argmax()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bias": {3: float("inf")}}, "logit_bias must be finite numbers"),
        ({"repetition": 0.0}, "repetition_penalty must be finite and above 0"),
        ({"frequency": float("nan")}, "frequency_penalty must be finite"),
        ({"presence": float("inf")}, "presence_penalty must be finite"),
    ],
)
def test_rules_that_make_no_sense_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EditRules(**changes)
