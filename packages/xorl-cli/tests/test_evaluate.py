"""Evaluation: what is reported of a model on held-out data, also of one that computes no numbers."""

import math

import numpy as np
import pytest
import torch

from tiny_decoders import tiny_decoder
from tiny_models import hf_config
from xorl.core.mesh import Mesh
from xorl.core.parallel import ParallelModel
from xorl.core.runtime import Runtime
from xorl.data.batch import Document, collate
from xorl.train import Engine, evaluate


class OneStep:
    """A held-out set of one micro-batch."""

    def steps(self, start: int = 0):
        ids = np.arange(12)
        yield 0, [collate([Document(ids, ids)])]


@pytest.mark.parametrize("weight", [1.0, math.nan])
def test_nothing_is_right_or_wrong_where_the_loss_is_nan(weight: float, place: Runtime, mesh: Mesh) -> None:
    # Catches a fraction of right tokens that reads as a bad model's, and is that of one that computes nothing.
    model = tiny_decoder(hf_config())
    with torch.no_grad():
        model.model.norm.weight.fill_(weight)
    parallel = ParallelModel(model, model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scores = evaluate(Engine(parallel, optimizer, place.device, max_grad_norm=None, flops=sum), OneStep())
    is_nan = {name: math.isnan(value) for name, value in scores.items()}
    measured = dict.fromkeys(("eval_loss", "eval_token_accuracy", "eval_accuracy"), math.isnan(weight))
    assert is_nan == {**measured, "eval_num_tokens": False}
