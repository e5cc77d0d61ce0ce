"""Losses over a vocabulary that ranks share, beside those of one process."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ranks import Launch, Launches
from xorl.core import runtime
from xorl.core.loss import IGNORE, LOSSES, cross_entropy, score_tokens
from xorl.core.loss.output import LossOutput
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.nn.tensor import TensorRanks
from xorl.kernels import linear_ce
from xorl.kernels.head import HeadWeight, LogitOptions
from xorl.kernels.vocabulary import Vocabulary

# Not a multiple of the ranks: the last has fewer.
NUM_TOKENS, WIDTH, VOCAB = 24, 8, 13
OPTIONS = {
    "fused": {},
    "fused, rounded logits": {"fp32": False},
    "whole logits": {"whole": True},
    "whole logits, rounded": {"whole": True, "fp32": False},
    "fused, capped": {"softcap": 2.0},
    "whole logits, capped": {"whole": True, "softcap": 2.0},
}
CASES: dict[str, Callable[..., LossOutput]] = {
    "cross-entropy": cross_entropy,
    "weights": LOSSES["cross_entropy"],
    "several labels": LOSSES["cross_entropy"],
    "policy": LOSSES["importance_sampling"],
    "scores": score_tokens,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inputs(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    weight[9] = weight[3]  # of different ranks, with the same logits, which are the largest of some tokens
    hidden[:4] += 3 * weight[3]
    hidden[4] *= 60  # logits of a rank that are all far below those of another
    labels = torch.arange(NUM_TOKENS) % VOCAB
    labels[:4] = torch.tensor([3, 9, 3, 12])
    labels[5::7] = IGNORE
    targets = {"labels": labels}
    if case == "several labels":
        targets = {"labels": torch.stack([labels, labels.roll(3)], dim=1)}
    if case in ("weights", "several labels"):
        targets["weights"] = torch.rand(targets["labels"].shape, generator=generator)
    if case == "policy":
        targets["advantages"] = torch.randn(NUM_TOKENS, generator=generator)
        targets["logprobs"] = torch.full((NUM_TOKENS,), -2.0)
    return hidden.to(dtype), weight.to(dtype), targets


def computed(case: str, options: dict[str, bool], dtype: torch.dtype, ranks: TensorRanks) -> dict[str, Tensor]:
    """The loss and its gradients, as a decoder computes them: hidden states of this rank's tokens, gathered."""
    hidden, weight, targets = inputs(case, dtype)
    vocab = Vocabulary(VOCAB, ranks.group)
    own = weight[vocab.held.start : vocab.held.stop].clone().requires_grad_()
    part = ranks.local(hidden).clone().requires_grad_()
    head = HeadWeight(own, LogitOptions(vocab=vocab if ranks.size > 1 else None, **options))
    output = CASES[case](ranks.gather(part), head, targets, None)
    found = {"sum": output.sum.detach(), "per token": output.per_token.detach()}
    if output.logprobs is not None:
        found["logprobs"] = output.logprobs.detach()
    if case == "scores":
        return found | {"correct": output.metrics["correct"].float()}
    output.sum.backward()
    assert part.grad is not None
    assert own.grad is not None
    return found | {"weight": own.grad, "hidden": part.grad}


def all_cases(num_ranks: int) -> dict[tuple[str, str, str], dict[str, Tensor]]:
    ranks = TensorRanks(Mesh(ParallelDims(tp=num_ranks), "cpu").tp.ranks)
    assert ranks.size == runtime.world_size()
    found: dict[tuple[str, str, str], dict[str, Tensor]] = {}
    for chunk in (4, None):
        with pytest.MonkeyPatch.context() as patch:
            if chunk is not None:  # several chunks, each with an exchange of its own
                patch.setattr(linear_ce, "chunk_rows", lambda *_, size=chunk, **__: size)
            found |= {
                (case, f"{name}, {chunk} at once", dtype): computed(case, dict(options), DTYPES[dtype], ranks)
                for case in CASES
                for name, options in OPTIONS.items()
                for dtype in DTYPES
                if not (case == "several labels" and "whole" in options)
            }
    return found


@pytest.fixture(scope="module")
def found(launch: Launch) -> Launches:
    return launch({(count,): (count, partial(all_cases, count)) for count in (1, 2, 3)})


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_shared_vocabulary_gives_the_losses_and_gradients_of_a_whole_one(num_ranks: int, found: Launches) -> None:
    # Catches labels counted from another rank's first token, a last rank with fewer tokens, sums of one rank, a mean in
    # place of a sum, two ranks that both have the most likely token, and exponentials that overflow or all vanish.
    [expected], by_rank = found(1), found(num_ranks)
    for key, whole in expected.items():
        parts = [one[key] for one in by_rank]
        tolerance = 2e-2 if key[2] == "bf16" else 2e-6
        for name, value in whole.items():
            if name in ("weight", "hidden"):
                got = torch.cat([part[name] for part in parts])
            else:
                got = parts[0][name]
                assert all(torch.equal(part[name], got) for part in parts), (key, name)
            error = (got.float() - value.float()).abs().max() / value.float().abs().max().clamp(min=1e-6)
            assert error <= (0 if name == "correct" else tolerance), (key, name, float(error))
