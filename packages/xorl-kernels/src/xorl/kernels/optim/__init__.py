"""The computations of optimizers, each with a plain twin.

These are in-place updates in one pass over memory (bf16 results may be rounded stochastically), sums of squares, and
products of matrices with their transposes.
"""

from xorl.kernels.optim.noise import Noise, philox2x32, round_stochastically
from xorl.kernels.optim.symmetric import symmetric_product
from xorl.kernels.optim.updates import adamw_, descend_, momentum_, scale_, square_sum

__all__ = [
    "Noise",
    "adamw_",
    "descend_",
    "momentum_",
    "philox2x32",
    "round_stochastically",
    "scale_",
    "square_sum",
    "symmetric_product",
]
