"""Optimizers, the learning-rate schedule and gradient clipping."""

from xorl.core.optim.accumulate import Fp32Accumulation
from xorl.core.optim.clip import gradient_norms, gradient_scale, scale_and_clip_
from xorl.core.optim.muon import MuonOptions
from xorl.core.optim.optimizer import OptimizerName, build_optimizer
from xorl.core.optim.schedule import Schedule

__all__ = [
    "Fp32Accumulation",
    "MuonOptions",
    "OptimizerName",
    "Schedule",
    "build_optimizer",
    "gradient_norms",
    "gradient_scale",
    "scale_and_clip_",
]
