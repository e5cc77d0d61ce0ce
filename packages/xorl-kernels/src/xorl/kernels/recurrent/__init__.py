"""Recurrent layers over packed rows: plain torch for any device, and backends by name."""

from xorl.kernels.recurrent.backends import (
    PLAIN_RECURRENCE,
    RECURRENCES,
    RecurrenceFns,
    RecurrenceRequest,
)
from xorl.kernels.recurrent.cached import over_cache
from xorl.kernels.recurrent.causal_conv import causal_conv, causal_conv_with_states
from xorl.kernels.recurrent.certify import resolve_recurrence
from xorl.kernels.recurrent.gated_delta import gated_delta, gated_delta_with_states
from xorl.kernels.recurrent.state_space import state_space, state_space_with_states

__all__ = [
    "PLAIN_RECURRENCE",
    "RECURRENCES",
    "RecurrenceFns",
    "RecurrenceRequest",
    "causal_conv",
    "causal_conv_with_states",
    "gated_delta",
    "gated_delta_with_states",
    "over_cache",
    "resolve_recurrence",
    "state_space",
    "state_space_with_states",
]
