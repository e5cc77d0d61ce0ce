"""Optimizer updates in one pass over memory, which round stochastically to bf16, each with a plain twin."""

from xorl.kernels.optim.noise import Noise, philox2x32, round_stochastically
from xorl.kernels.optim.updates import adamw_, descend_, momentum_, scale_

__all__ = ["Noise", "adamw_", "descend_", "momentum_", "philox2x32", "round_stochastically", "scale_"]
