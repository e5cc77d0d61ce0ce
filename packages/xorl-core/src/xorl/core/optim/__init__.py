"""Optimizers, the learning-rate schedule and gradient clipping."""

from xorl.core.optim.accumulate import WideAccumulation
from xorl.core.optim.clip import gradient_scale, scale_and_clip_
from xorl.core.optim.muon import MuonOptions
from xorl.core.optim.optimizer import OptimizerName, build_optimizer, weight_decays
from xorl.core.optim.schedule import DecayStyle, Schedule
from xorl.core.optim.state import OptimizerState

__all__ = [
    "DecayStyle",
    "MuonOptions",
    "OptimizerName",
    "OptimizerState",
    "Schedule",
    "WideAccumulation",
    "build_optimizer",
    "gradient_scale",
    "scale_and_clip_",
    "weight_decays",
]
