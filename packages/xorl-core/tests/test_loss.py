"""Losses: the fused and the plain form are one function."""

import pytest
import torch

from xorl.core.loss import cross_entropy, score_tokens
from xorl.kernels.head import HeadWeight, LogitOptions


def make_inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator).to(dtype)
    weight = torch.randn(30, 16, generator=generator)
    labels = torch.randint(30, (40,), generator=generator)
    labels[::4] = -100
    return hidden, weight, {"labels": labels}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("logits_fp32", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_logits_give_the_same_loss_and_gradient(dtype, logits_fp32, softcap):
    """Catches forms of the loss that differ in more than memory, and rounding that only one of them does."""
    hidden, weight, targets = make_inputs(dtype)
    results = []
    for whole_logits in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        head = HeadWeight(leaves[1], LogitOptions(fp32=logits_fp32, softcap=softcap, whole=whole_logits))
        output = cross_entropy(leaves[0], head, targets)
        output.sum.backward()
        assert not output.per_token.requires_grad
        results.append((output.sum.detach(), output.per_token, *(leaf.grad for leaf in leaves)))
    for plain, fused in zip(*results, strict=True):
        assert plain.dtype == fused.dtype
        limit = 1e-6 if dtype == torch.float32 or plain.dim() < 2 else 6e-3
        assert (plain - fused).norm() <= limit * plain.norm()


@pytest.mark.parametrize("whole_logits", [True, False])
def test_scores_are_the_loss_and_the_choice(whole_logits):
    """Catches an evaluation that measures another loss than training does, or counts what is not trained."""
    hidden, weight, targets = make_inputs(torch.float32)
    scores = score_tokens(hidden, HeadWeight(weight, LogitOptions(whole=whole_logits)), targets)
    torch.testing.assert_close(scores.sum, cross_entropy(hidden, weight, targets).sum)
    assert torch.equal(scores.metrics["correct"], (hidden @ weight.t()).argmax(-1) == targets["labels"])
