"""Recurrent layers over packed rows: plain torch for any device, one operator for each pass."""

from xorl.kernels.recurrent.causal_conv import causal_conv, causal_conv_with_states
from xorl.kernels.recurrent.gated_delta import gated_delta, gated_delta_with_states
from xorl.kernels.recurrent.state_space import state_space, state_space_with_states

__all__ = [
    "causal_conv",
    "causal_conv_with_states",
    "gated_delta",
    "gated_delta_with_states",
    "state_space",
    "state_space_with_states",
]
