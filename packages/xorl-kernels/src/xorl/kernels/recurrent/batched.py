"""Recurrent layers for devices on which many small operations take long: the plain arithmetic, for many chunks at once.

Chunks are padded to equal lengths and computed in groups of equal size, so every product has the same shape whatever
the row is, and a document has the same bits in any row. Only one operation for each chunk is in sequence.

Shapes: T tokens, M documents, H heads of P channels, G groups of heads, N channels of a group's states, L tokens of a
chunk, B chunks of a batch, C channels of a convolution, W taps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent.backends import RecurrenceFns
from xorl.kernels.recurrent.causal_conv import Activation
from xorl.kernels.recurrent.causal_conv import check_inputs as check_conv
from xorl.kernels.recurrent.decay import Decays, read_and_write, read_and_write_gradients
from xorl.kernels.recurrent.recurrence import checked_states, define, state_dtype
from xorl.kernels.recurrent.state_space import check_inputs as check_space
from xorl.kernels.recurrent.state_space import count_flops

# Longer chunks have fewer states, but more work per token.
CHUNK_TOKENS = 128
# At once: of a model with 128 heads, what lies between the products takes 64 MB.
BATCH_CHUNKS = 8


def state_space(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, layout: SequenceLayout) -> Tensor:
    """As the plain `state_space`."""
    check_space(x, dt, a, b, c, d, layout)
    none = checked_states(None, (x.shape[1], b.shape[2], x.shape[2]), x, layout)
    return _scan([x, dt, b, c], [a, d], none, layout.offsets, False)[0]


def state_space_with_states(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    layout: SequenceLayout,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the plain `state_space_with_states`."""
    check_space(x, dt, a, b, c, d, layout)
    states = checked_states(states, (x.shape[1], b.shape[2], x.shape[2]), x, layout)
    return _scan([x, dt, b, c], [a, d], states, layout.offsets, True)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, layout: SequenceLayout
) -> Tensor:
    """As the plain `causal_conv`, for all tokens at once. On a CPU, bits may depend on a token's place in the row."""
    check_conv(x, weight, bias, activation, layout)
    out = _CausalConv.apply(x, weight, bias, activation == "silu", layout.positions)
    assert isinstance(out, Tensor)
    return out.to(x.dtype)


class _Batch(NamedTuple):
    """Some chunks, which have the tokens of `rows`.

    Attributes:
        places: [rows], of each token among the B * L places of these chunks.
        documents: of each chunk; -1 for chunks that only fill the batch.
        begins, ends: whether each chunk is the first, and the last, of its document.
    """

    rows: slice
    places: Tensor
    documents: Sequence[int]
    begins: Sequence[bool]
    ends: Sequence[bool]

    def padded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The tokens x [T, K, ...] as [B * K, L, ...], zeros where there are none."""
        out = x.new_zeros((BATCH_CHUNKS * CHUNK_TOKENS, *x.shape[1:]), dtype=dtype)
        out[self.places] = x[self.rows].to(dtype)
        return out.unflatten(0, (BATCH_CHUNKS, CHUNK_TOKENS)).transpose(1, 2).flatten(0, 1).contiguous()

    def put(self, padded: Tensor, out: Tensor) -> None:
        """The opposite: writes padded [B * K, L, ...] to the rows of out [T, K, ...]."""
        out[self.rows] = (
            padded.unflatten(0, (BATCH_CHUNKS, -1)).transpose(1, 2).flatten(0, 1)[self.places].to(out.dtype)
        )


def _batches(offsets: Tensor, device: torch.device) -> list[_Batch]:
    """The chunks of all documents, in order."""
    lengths = offsets.diff()
    counts = (lengths + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    first_chunks = counts.cumsum(0) - counts
    tokens = torch.arange(int(offsets[-1]))
    document_of = torch.arange(len(lengths)).repeat_interleave(lengths)
    places = first_chunks[document_of] * CHUNK_TOKENS + tokens - offsets[document_of]
    num_filled = -(-int(counts.sum()) // BATCH_CHUNKS) * BATCH_CHUNKS
    documents = torch.full((num_filled,), -1)
    documents[: int(counts.sum())] = torch.arange(len(lengths)).repeat_interleave(counts)
    begins, ends = torch.zeros(2, num_filled, dtype=torch.bool).unbind()
    begins[first_chunks] = True
    ends[first_chunks + counts - 1] = True
    starts = torch.searchsorted(places, torch.arange(0, num_filled + 1, BATCH_CHUNKS) * CHUNK_TOKENS).tolist()
    on_device, of_chunks = places.to(device), [each.tolist() for each in (documents, begins, ends)]
    return [
        _Batch(
            slice(start, stop),
            on_device[start:stop] - first * CHUNK_TOKENS,
            *(each[first : first + BATCH_CHUNKS] for each in of_chunks),
        )
        for first, start, stop in zip(range(0, num_filled, BATCH_CHUNKS), starts, starts[1:], strict=False)
    ]


class _Chunks(NamedTuple):
    """The tokens of a batch, heads first.

    Attributes:
        x: [B * H, L, P].
        dt: [B * H, L, 1].
        b, c: [B * H, L, N].
        a, d: [B * H, 1].
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    d: Tensor
    decays: Decays

    @classmethod
    def of(cls, batch: _Batch, tokens: Sequence[Tensor], parameters: Sequence[Tensor], dtype: torch.dtype) -> "_Chunks":
        x, dt, b, c = (batch.padded(each, dtype) for each in (tokens[0], tokens[1][..., None], *tokens[2:]))
        a, d = (each.to(dtype).repeat(BATCH_CHUNKS)[:, None] for each in parameters)
        ratio = tokens[0].shape[1] // tokens[2].shape[1]
        b, c = (each.repeat_interleave(ratio, dim=0) for each in (b, c))
        return cls(x, dt, b, c, a, d, Decays.of(dt[..., 0] * a))

    @property
    def written(self) -> Tensor:
        """What the tokens of each chunk add to the state after it: [B, H, N, P]."""
        return self._by_chunk((self.decays.after * self.b).transpose(1, 2) @ (self.dt * self.x))

    def read_gradient(self, grad_out: Tensor) -> Tensor:
        """What the outputs of each chunk add to the gradient of the state before it: [B, H, N, P]."""
        return self._by_chunk(self.c.transpose(1, 2) @ (self.decays.before * grad_out))

    @property
    def kept(self) -> Tensor:
        """The decay of a state over each chunk: [B, H, 1, 1]."""
        return self._by_chunk(self.decays.whole)

    @staticmethod
    def _by_chunk(x: Tensor) -> Tensor:
        return x.unflatten(0, (BATCH_CHUNKS, -1))


class _StateSpace:
    """The scan. The backward pass keeps a state for each batch, and computes the others again."""

    def forward(
        self,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
        *,
        returns_states: bool,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(tokens[0], memory_format=torch.contiguous_format)
        finals = states.new_zeros((len(offsets) - 1 if returns_states else 0, *states.shape[1:]))
        state = states.new_zeros(states.shape[1:])
        for batch in _batches(offsets, out.device):
            chunks = _Chunks.of(batch, tokens, parameters, states.dtype)
            before, state = _pass_on(batch, chunks, states, state, finals)
            found, _ = read_and_write(chunks.c, chunks.b, chunks.dt * chunks.x, chunks.decays, before.flatten(0, 1))
            batch.put(found + chunks.d[..., None] * chunks.x, out)
        return out, finals

    def backward(
        self,
        grad_out: Tensor,
        grad_finals: Tensor,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
    ) -> list[Tensor]:
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens]
        of_parameters = [torch.zeros_like(x, dtype=states.dtype) for x in parameters]
        grad_states = torch.zeros_like(states, memory_format=torch.contiguous_format)
        batches, state = _batches(offsets, grad_out.device), states.new_zeros(states.shape[1:])
        before_batches: list[Tensor] = []
        for batch in batches:
            before_batches.append(state)
            chunks = _Chunks.of(batch, tokens, parameters, states.dtype)
            _, state = _pass_on(batch, chunks, states, state, states.new_empty((0,)))
        grad_state = torch.zeros_like(state)
        num_groups = tokens[2].shape[1]
        for batch in reversed(batches):
            chunks = _Chunks.of(batch, tokens, parameters, states.dtype)
            before, _ = _pass_on(batch, chunks, states, before_batches.pop(), states.new_empty((0,)))
            grad_chunks = batch.padded(grad_out, states.dtype)
            grad_next, grad_state = _pass_back(batch, chunks, grad_chunks, grad_state, grad_finals, grad_states)
            updates = chunks.dt * chunks.x
            found = read_and_write_gradients(
                grad_chunks, grad_next.flatten(0, 1), chunks.c, chunks.b, updates, chunks.decays, before.flatten(0, 1)
            )
            grad_g = chunks.decays.gradient(found.decays)[..., None]  # [B * H, L, 1], of dt * a
            batch.put(chunks.dt * found.updates + chunks.d[..., None] * grad_chunks, grads[0])
            grad_dt = (found.updates * chunks.x).sum(-1, keepdim=True) + grad_g * chunks.a[..., None]
            batch.put(grad_dt, grads[1][..., None])
            for grad, of_heads in ((grads[2], found.k), (grads[3], found.q)):
                batch.put(of_heads.unflatten(0, (BATCH_CHUNKS * num_groups, -1)).sum(1), grad)
            terms = (grad_g * chunks.dt).sum((1, 2)), (grad_chunks * chunks.x).sum((1, 2))
            for total, term in zip(of_parameters, terms, strict=True):
                total += term.unflatten(0, (BATCH_CHUNKS, -1)).sum(0)
        narrow = (grad.to(x.dtype, copy=True) for grad, x in zip(of_parameters, parameters, strict=True))
        return [*grads, *narrow, grad_states]


def _pass_on(batch: _Batch, chunks: _Chunks, states: Tensor, state: Tensor, finals: Tensor) -> tuple[Tensor, Tensor]:
    """The states [B, H, N, P] before each chunk, and that after the last. Writes those after documents to `finals`."""
    written, kept = chunks.written, chunks.kept
    before = torch.empty_like(written)
    for index, document in enumerate(batch.documents):
        if batch.begins[index]:
            state = states[document] if len(states) else torch.zeros_like(state)
        before[index] = state
        state = torch.addcmul(written[index], kept[index], state)
        if batch.ends[index] and len(finals):
            finals[document] = state
    return before, state


def _pass_back(
    batch: _Batch, chunks: _Chunks, grad_out: Tensor, grad_state: Tensor, grad_finals: Tensor, grad_states: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients [B, H, N, P] of the states after each chunk, and that of the state before the first.

    Args:
        grad_state: of the state after the last chunk, by the chunks after it.
        grad_finals: of the states after documents; [0, ...] if they have none.
        grad_states: of the states before documents, which are written here; [0, ...] if there are none.
    """
    read, kept = chunks.read_gradient(grad_out), chunks.kept
    after = torch.empty_like(read)
    for index in reversed(range(BATCH_CHUNKS)):
        document = batch.documents[index]
        if batch.ends[index]:
            grad_state = grad_finals[document] if len(grad_finals) else torch.zeros_like(grad_state)
        after[index] = grad_state
        grad_state = torch.addcmul(read[index], kept[index], grad_state)
        if batch.begins[index] and len(grad_states):
            grad_states[document] = grad_state
    return after, grad_state


_scan = define("state_space_batched", _StateSpace(), count_flops)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    activates: bool


class _CausalConv(torch.autograd.Function):
    """The convolution, before it is rounded. Keeps only the inputs."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None, activates: bool, positions: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, positions, *(() if bias is None else (bias,)))
        ctx.activates = activates
        out = _convolve(x, weight, bias, positions)
        return F.silu(out) if activates else out

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, positions, *others = ctx.saved_tensors
        bias = others[0] if others else None
        if ctx.activates:
            before = _convolve(x, weight, bias, positions)
            gate = before.sigmoid()
            grad = grad * gate * (1 + before * (1 - gate))
        num_taps = weight.shape[1]
        grad_x, of_taps = torch.zeros_like(grad), []
        for tap in range(num_taps):
            distance = num_taps - 1 - tap
            of_taps.append((grad * _earlier(x, distance, positions)).sum(0))
            # From each token to the one that is `distance` before it, in the same document.
            back = grad.masked_fill((positions < distance)[:, None], 0)
            grad_x += F.pad(back, (0, 0, 0, distance))[distance:] * weight[:, tap].to(grad.dtype)
        grad_weight = torch.stack(of_taps, dim=1).to(weight.dtype)
        grad_bias = None if bias is None else grad.sum(0).to(bias.dtype)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    """The sum of the taps and the bias [T, C], in fp32 at least."""
    wide, num_taps = state_dtype(x.dtype), weight.shape[1]
    out = torch.zeros_like(x, dtype=wide) if bias is None else bias.to(wide).expand(x.shape)
    for tap in range(num_taps):
        out = out + _earlier(x, num_taps - 1 - tap, positions) * weight[:, tap].to(wide)
    return out


def _earlier(x: Tensor, distance: int, positions: Tensor) -> Tensor:
    """The tokens that are `distance` before each, in fp32 at least; zeros before the first of a document."""
    shifted = F.pad(x, (0, 0, distance, 0))[: len(x)].to(state_dtype(x.dtype))
    return shifted.masked_fill((positions < distance)[:, None], 0)


FUNCTIONS = RecurrenceFns(causal_conv=causal_conv, state_space=state_space)
