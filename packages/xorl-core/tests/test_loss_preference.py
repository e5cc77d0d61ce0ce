"""Losses of pairs against their definitions, on full logits in fp64, pair by pair."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from xorl.core.loss import IGNORE, PREFERENCE_LOSSES, combine_metrics, read_metrics, score_answers
from xorl.core.loss.preference import BASELINE, PREFERENCE, REFERENCE
from xorl.kernels.layout import SequenceLayout

VOCAB, WIDTH = 23, 8
# Chosen, rejected, chosen, rejected, ..., padding.
LENGTHS = (9, 12, 5, 3, 8, 8, 4)
NUM_PAIRS = 3


def make_inputs(dtype=torch.float64):
    """Hidden states, head, targets and layout of three pairs and padding."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(LENGTHS)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)
    head = 0.5 * torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    layout = SequenceLayout.from_lengths(LENGTHS)
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    labels[layout.positions < 1] = IGNORE  # prompts
    side = torch.repeat_interleave(torch.tensor([1.0, -1.0] * NUM_PAIRS + [0.0]), torch.tensor(LENGTHS))
    labels[side == 0] = IGNORE
    reference = torch.randn(num_tokens, generator=generator, dtype=torch.float64) - 3
    targets = {
        "labels": labels,
        PREFERENCE: side,
        REFERENCE: reference.masked_fill(labels == IGNORE, 0.0).to(dtype),
        BASELINE: torch.full((num_tokens,), 0.3, dtype=dtype),
    }
    return hidden.to(dtype), head.to(dtype), targets, layout


def log_sigmoid(x):
    return -torch.log1p(torch.exp(-x))


def dpo(pair, o):
    chosen, rejected = (side["now"] - side["ref"] for side in pair)
    if o.length_normalized:
        chosen, rejected = chosen / pair[0]["n"], rejected / pair[1]["n"]
    x = o.beta * (chosen - rejected)
    return -(1 - o.label_smoothing) * log_sigmoid(x) - o.label_smoothing * log_sigmoid(-x)


def simpo(pair, o):
    chosen, rejected = (side["now"] / side["n"] for side in pair)
    x = o.beta * (chosen - rejected) - o.gamma
    return -(1 - o.label_smoothing) * log_sigmoid(x) - o.label_smoothing * log_sigmoid(-x)


def orpo(pair, o):
    chosen, rejected = (side["now"] / side["n"] for side in pair)
    odds = [torch.exp(x) / (1 - torch.exp(x)) for x in (chosen, rejected)]
    return -chosen - o.beta * log_sigmoid(torch.log(odds[0] / odds[1]))


def kto(pair, o):
    chosen, rejected = (side["now"] - side["ref"] for side in pair)
    z = 0.3
    desirable = o.desirable_weight * (1 - torch.sigmoid(o.beta * (chosen - z)))
    undesirable = o.undesirable_weight * (1 - torch.sigmoid(o.beta * (z - rejected)))
    return (desirable + undesirable) / 2


DEFINITIONS = {"dpo": dpo, "simpo": simpo, "orpo": orpo, "kto": kto}
CASES = [
    ("dpo", {}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.2}),
    ("dpo", {"length_normalized": True}),
    ("simpo", {}),
    ("simpo", {"gamma": 1.5, "label_smoothing": 0.1}),
    ("orpo", {"beta": 0.7}),
    ("kto", {}),
    ("kto", {"desirable_weight": 2.0, "undesirable_weight": 0.5}),
]


def loss_of(name, options):
    loss = PREFERENCE_LOSSES[name]
    return replace(loss, options=replace(loss.options, **options))


def defined(name, options, hidden, head, targets):
    """The loss of each pair by its definition."""
    labels = targets["labels"]
    logprobs = (hidden @ head.t()).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).tolist()
    sides = []
    for start, stop in pairwise(ends[:-1]):
        trained = labels[start:stop] != IGNORE
        sides.append(
            {
                "now": logprobs[start:stop][trained].sum(),
                "ref": targets[REFERENCE][start:stop].sum(),
                "n": int(trained.sum()),
            }
        )
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    return torch.stack([DEFINITIONS[name](pair, options) for pair in pairs]), pairs


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_loss_is_its_definition(name, options):
    """Catches another formula, sums over other tokens, and gradients that stop or reach the reference."""
    hidden, head, targets, layout = make_inputs()
    loss = loss_of(name, options)
    found = []
    for compute in (
        lambda: loss(hidden, head, targets, layout).sum,
        lambda: defined(name, loss.options, hidden, head, targets)[0].sum(),
    ):
        hidden.requires_grad_()
        head.requires_grad_()
        total = compute()
        found.append((total.detach(), *torch.autograd.grad(total, (hidden, head))))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_metrics_count_each_pair_once(name):
    """Catches means over tokens or documents, and ranks that count the same pair."""
    hidden, head, targets, layout = make_inputs()
    output = loss_of(name, {})(hidden, head, targets, layout)
    losses, pairs = defined(name, PREFERENCE_LOSSES[name].options, hidden, head, targets)
    metrics = read_metrics(combine_metrics([output.metrics, PREFERENCE_LOSSES[name].empty_metrics(hidden.device)]))
    assert metrics["valid_tokens:sum"] == NUM_PAIRS
    assert math.isclose(metrics["loss:mean"], float(losses.mean()), rel_tol=1e-9)
    chosen = torch.stack([pair[0]["now"] for pair in pairs])
    assert math.isclose(metrics["logprobs_chosen:mean"], float(chosen.mean()), rel_tol=1e-9)
    margin = metrics["reward_chosen:mean"] - metrics["reward_rejected:mean"]
    assert math.isclose(metrics["reward_margin:mean"], margin, rel_tol=1e-9, abs_tol=1e-12)
    assert metrics["reward_accuracy:mean"] in (0.0, 1 / 3, 2 / 3, 1.0)
    # The terms are where they count.
    assert output.per_token.nonzero().flatten().tolist() == [0, 21, 29]


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_rows_without_pairs_have_no_loss(name):
    """Catches NaN from padding alone, which a rank has in a short step."""
    hidden, head, _, _ = make_inputs()
    padding = {
        "labels": torch.full((4,), IGNORE),
        PREFERENCE: torch.zeros(4),
        REFERENCE: torch.zeros(4),
        BASELINE: torch.zeros(4),
    }
    hidden = hidden[:4].requires_grad_()
    output = loss_of(name, {})(hidden, head, padding, SequenceLayout.from_lengths([4]))
    assert output.sum == 0
    [gradient] = torch.autograd.grad(output.sum, hidden)
    assert not gradient.any()
    assert output.metrics["valid_tokens:sum"] == 0


def test_certain_answers_have_finite_odds():
    """Catches log(0), and gradients that are not numbers, once a model is certain."""
    hidden, head, targets, layout = make_inputs(torch.float32)
    labels = targets["labels"]
    certain = torch.nn.functional.one_hot(labels.clamp(min=0), VOCAB).float() * 200
    hidden, head = certain.requires_grad_(), torch.eye(VOCAB)
    output = loss_of("orpo", {})(hidden, head, targets, layout)
    [gradient] = torch.autograd.grad(output.sum, hidden)
    assert torch.isfinite(output.sum)
    assert torch.isfinite(gradient).all()


def test_a_loss_names_the_input_that_it_lacks():
    """Catches a reference of zeros, which would train something else."""
    hidden, head, targets, layout = make_inputs()
    del targets[REFERENCE]
    with pytest.raises(ValueError, match="loss 'dpo' needs reference_logprobs"):
        loss_of("dpo", {})(hidden, head, targets, layout)
    loss_of("orpo", {})(hidden, head, targets, layout)


def test_scores_are_log_probabilities():
    """Catches scores with a gradient, or with terms of prompts."""
    hidden, head, targets, layout = make_inputs()
    output = score_answers(hidden.requires_grad_(), head, targets, layout)
    assert not output.sum.requires_grad
    assert output.logprobs is not None
    assert not output.logprobs[targets["labels"] == IGNORE].any()
    assert math.isclose(float(output.sum), float(output.logprobs.sum()), rel_tol=1e-9)
