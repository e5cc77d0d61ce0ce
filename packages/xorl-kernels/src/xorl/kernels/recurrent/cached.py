"""The functions of recurrent layers over a cache of states, for generation. They have no gradients.

Each sequence of a `CachedLayout` has a slot, where the states after its tokens so far are: the last inputs of the
convolution, then the state of the recurrence. The functions read those before the new tokens, and overwrite them with
those after. A sequence whose first token is new begins with zeros, whatever its slot holds.

Shapes: T new tokens of S sequences; others as in the modules of the plain functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.kernels.attention import CachedLayout
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent import batched
from xorl.kernels.recurrent.backends import RecurrenceFns
from xorl.kernels.recurrent.causal_conv import Activation, causal_conv_with_states
from xorl.kernels.recurrent.gated_delta import gated_delta_with_states
from xorl.kernels.recurrent.state_space import state_space_with_states

# The places of states among those of a layer.
CONVOLUTION, RECURRENCE = 0, 1
# Maps tokens and the states before them to outputs and the states after them.
Advance = Callable[[Sequence[Tensor], SequenceLayout, Tensor], tuple[Tensor, Tensor]]
Step = Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]


def over_cache(functions: RecurrenceFns, layout: SequenceLayout) -> RecurrenceFns:
    """`functions`, of which those with states read and write the cache of `layout`, if it has one."""
    if not isinstance(layout, CachedLayout):
        return functions
    return replace(
        functions, gated_delta=_cached_gated_delta, causal_conv=_cached_causal_conv, state_space=_cached_state_space
    )


def _cached_gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: SequenceLayout) -> Tensor:
    def advance(tokens: Sequence[Tensor], layout: SequenceLayout, states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = tokens
        return gated_delta_with_states(q, k, v, g, beta, layout, states)

    def step(tokens: Sequence[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (x.to(states.dtype) for x in tokens)
        q, k = (_of_each_head(x, v.shape[1]) for x in (q, k))
        states = states * g.exp()[..., None, None]
        updates = beta[..., None] * (v - _read(k, states))
        states = states + k[..., None] * updates[..., None, :]
        return _read(q, states).to(tokens[2].dtype), states

    return _over_cache(RECURRENCE, (q, k, v, g, beta), layout, advance, step)


def _cached_state_space(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, layout: SequenceLayout
) -> Tensor:
    def advance(tokens: Sequence[Tensor], layout: SequenceLayout, states: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, b, c = tokens
        scan = state_space_with_states if states.device.type == "cpu" else batched.state_space_with_states
        return scan(x, dt, a, b, c, d, layout, states)

    def step(tokens: Sequence[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, b, c = (each.to(states.dtype) for each in tokens)
        b, c = (_of_each_head(each, x.shape[1]) for each in (b, c))
        states = states * (dt * a).exp()[..., None, None] + b[..., None] * (dt[..., None] * x)[..., None, :]
        return (_read(c, states) + d[:, None] * x).to(tokens[0].dtype), states

    return _over_cache(RECURRENCE, (x, dt, b, c), layout, advance, step)


def _cached_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, layout: SequenceLayout
) -> Tensor:
    def advance(tokens: Sequence[Tensor], layout: SequenceLayout, states: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv_with_states(tokens[0], weight, bias, activation, layout, states)

    def step(tokens: Sequence[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([states, tokens[0][:, None].to(states.dtype)], dim=1)  # [S, W, C]
        out = (joined * weight.t().to(states.dtype)).sum(1)
        out = out if bias is None else out + bias.to(states.dtype)
        return (F.silu(out) if activation == "silu" else out).to(x.dtype), joined[:, 1:]

    return _over_cache(CONVOLUTION, (x,), layout, advance, step)


def _over_cache(place: int, tokens: Sequence[Tensor], layout: SequenceLayout, advance: Advance, step: Step) -> Tensor:
    """Computes sequences with one new token together, by `step`, and the others by `advance`."""
    assert isinstance(layout, CachedLayout), "over_cache is only for these"
    states = layout.states_before(place)
    single = [index for index, length in enumerate(layout.lengths) if length == 1]
    others = [index for index, length in enumerate(layout.lengths) if length > 1]
    if not others:
        out, states = step(tokens, states)
    elif not single:
        out, states = advance(tokens, SequenceLayout.from_lengths(layout.lengths, states.device), states)
    else:
        offsets, device = layout.offsets.tolist(), states.device
        out: Tensor | None = None
        after = torch.empty_like(states)
        for indices in (single, others):
            sequences = torch.tensor(indices, device=device)
            rows = torch.cat([torch.arange(offsets[each], offsets[each + 1]) for each in indices]).to(device)
            part, before = [each[rows] for each in tokens], states[sequences]
            if indices is single:
                found, after[sequences] = step(part, before)
            else:
                lengths = [layout.lengths[each] for each in indices]
                found, after[sequences] = advance(part, SequenceLayout.from_lengths(lengths, device), before)
            out = found.new_empty((layout.num_tokens, *found.shape[1:])) if out is None else out
            out[rows] = found
        assert out is not None, "there are sequences of both kinds"
        states = after
    layout.keep_states(place, states)
    return out


def _read(x: Tensor, states: Tensor) -> Tensor:
    """What vectors [S, H, K] read from states [S, H, K, V]: [S, H, V]."""
    return (x[..., None] * states).sum(-2)


def _of_each_head(x: Tensor, num_heads: int) -> Tensor:
    """Repeats groups for their heads: [S, G, K] to [S, H, K]."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)
