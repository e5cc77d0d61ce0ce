"""The state-space scan of Mamba-2 in Triton, as `state_space` defines it (SSD, arXiv:2405.21060).

Products are in the dtype of the inputs, sums in fp32, and the states between chunks are rounded to that dtype. One
kernel passes states through the chunks of a document, or gradients of states back; the others compute each chunk alone.
So a document and the gradients of its tokens have the same bits in any row. Autograd keeps only the inputs.

In a chunk with the state S before it, s_i the sum of dt a up to token i:

    y_i = exp(s_i) S^T C_i + sum over j <= i of exp(s_i - s_j) dt_j (C_i . B_j) x_j + D x_i
    S' = exp(s_last) S + sum over j of exp(s_last - s_j) dt_j B_j x_j^T

Shapes: T tokens, M chunks of L tokens, H heads of P channels, G groups of heads, N channels of a group's states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch, power_of_2
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent import batched
from xorl.kernels.recurrent.backends import RecurrenceFns
from xorl.kernels.recurrent.recurrence import checked_states, define
from xorl.kernels.recurrent.state_space import check_inputs, count_flops

CHUNK_TOKENS = 64
# Channels that a program has at once, and the fewest of states. On Hopper, Triton 3.6 computes wrong products with
# blocks of fewer channels of a head than of its states, so heads have whole blocks.
BLOCK = 64
MIN_BLOCK_OF_STATES = 32
# Of states, in the kernel that has the most accumulators.
BLOCK_DIFFERENTIATED = 32


def state_space(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, layout: SequenceLayout) -> Tensor:
    """As the plain `state_space`, but with products in the dtype of x."""
    check_inputs(x, dt, a, b, c, d, layout)
    none = checked_states(None, (x.shape[1], b.shape[2], x.shape[2]), x, layout)
    return _scan([x, dt, b, c], [a, d], none, layout.offsets, False)[0]


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a row.

    Attributes:
        of_chunks: [M, 2], the first token of each chunk, and that after its last.
        of_documents: [documents + 1], the first chunk of each, followed by M.
    """

    of_chunks: Tensor
    of_documents: Tensor

    @classmethod
    def of(cls, offsets: Tensor, device: torch.device) -> "_Chunks":
        lengths = offsets.diff()
        counts = (lengths + CHUNK_TOKENS - 1) // CHUNK_TOKENS
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        documents = torch.arange(len(counts)).repeat_interleave(counts)
        numbers = torch.arange(len(documents)) - ends[documents]
        first = offsets[documents] + numbers * CHUNK_TOKENS
        last = torch.minimum(first + CHUNK_TOKENS, offsets[documents + 1])
        tables = torch.stack([first, last], 1).to(torch.int32), ends.to(torch.int32)
        return cls(*(table.to(device, non_blocking=True) for table in tables))

    def __len__(self) -> int:
        return len(self.of_chunks)


@dataclass(frozen=True)
class _Sizes:
    num_heads: int
    num_groups: int
    state_dim: int
    head_dim: int

    @classmethod
    def of(cls, x: Tensor, b: Tensor) -> "_Sizes":
        return cls(x.shape[1], b.shape[1], b.shape[2], x.shape[2])

    @property
    def constants(self) -> dict[str, int]:
        return {
            "num_heads": self.num_heads,
            "num_groups": self.num_groups,
            "state_dim": self.state_dim,
            "head_dim": self.head_dim,
            "LENGTH": CHUNK_TOKENS,
            "BLOCK_K": min(BLOCK, max(MIN_BLOCK_OF_STATES, power_of_2(self.state_dim))),
            "BLOCK_V": BLOCK,
        }

    def pass_states(
        self, keys: Tensor, values: Tensor, dt: Tensor, a: Tensor, chunks: _Chunks, *, back: bool
    ) -> Tensor:
        """The states [M, H, N, P] before each chunk, from B and x; or `back` the gradients of those after, from C."""
        states = values.new_empty((len(chunks), self.num_heads, self.state_dim, self.head_dim))
        constants = self.constants
        blocks = _blocks(self.state_dim, constants["BLOCK_K"]) * _blocks(self.head_dim, constants["BLOCK_V"])
        grid = len(chunks.of_documents) - 1, self.num_heads, blocks
        tables = chunks.of_chunks, chunks.of_documents
        launch(_pass_states, grid, keys, values, dt, a, states, *tables, num_warps=4, BACK=back, **constants)
        return states


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


class _StateSpace:
    """The `Scan`, of rows without states before them."""

    def forward(
        self,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
        *,
        returns_states: bool,
    ) -> tuple[Tensor, Tensor]:
        assert not len(states)
        assert not returns_states
        x, dt, b, c = (each.contiguous() for each in tokens)
        a, d = parameters
        sizes, chunks = _Sizes.of(x, b), _Chunks.of(offsets, x.device)
        before = sizes.pass_states(b, x, dt, a, chunks, back=False)
        out = torch.empty_like(x)
        grid = len(chunks), sizes.num_heads
        launch(_read, grid, x, dt, a, b, c, d, before, out, chunks.of_chunks, num_warps=4, **sizes.constants)
        return out, torch.empty_like(states)

    def backward(
        self,
        grad_out: Tensor,
        grad_finals: Tensor,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
    ) -> list[Tensor]:
        x, dt, b, c, grad_out = (each.contiguous() for each in (*tokens, grad_out))
        a, d = parameters
        sizes, chunks = _Sizes.of(x, b), _Chunks.of(offsets, x.device)
        before = sizes.pass_states(b, x, dt, a, chunks, back=False)
        grad_after = sizes.pass_states(c, grad_out, dt, a, chunks, back=True)
        grad_x, grad_b, grad_c = torch.empty_like(x), torch.empty_like(b), torch.empty_like(c)
        # Of dt in updates dt x, and of the sums y + D x.
        of_updates, of_factor = (torch.empty_like(dt, dtype=torch.float32) for _ in range(2))
        constants, table = sizes.constants, chunks.of_chunks
        common = (x, dt, a, b, c)
        outputs = grad_x, of_updates, of_factor
        grid = len(chunks), sizes.num_heads
        launch(_differentiate_x, grid, *common, d, grad_out, grad_after, *outputs, table, num_warps=4, **constants)
        constants["BLOCK_K"] = min(BLOCK_DIFFERENTIATED, constants["BLOCK_K"])
        num_blocks = _blocks(sizes.state_dim, constants["BLOCK_K"])
        # Of dt a, from each block of the states' channels.
        parts = dt.new_empty((num_blocks, *dt.shape), dtype=torch.float32)
        outputs = grad_b, grad_c, parts
        grid = len(chunks), sizes.num_groups, num_blocks
        launch(
            _differentiate_b_c,
            grid,
            *common,
            grad_out,
            before,
            grad_after,
            *outputs,
            len(dt),
            table,
            num_warps=8,
            **constants,
        )
        of_exponents = parts.sum(0)
        grad_dt = of_updates + of_exponents * a
        return [grad_x, grad_dt, grad_b, grad_c, (of_exponents * dt).sum(0), of_factor.sum(0), torch.empty_like(states)]


@triton.jit
def _rows(chunks_ptr: tl.tensor, chunk: tl.tensor, token: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The rows of a chunk's tokens, and which of them the chunk has."""
    first = tl.load(chunks_ptr + 2 * chunk).to(tl.int64)
    return first + token, token < tl.load(chunks_ptr + 2 * chunk + 1) - first


@triton.jit
def _sums(
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    rows: tl.tensor,
    is_real: tl.tensor,
    head: tl.tensor,
    num_heads: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """dt of each token, the sum of dt a up to it, and that of all tokens."""
    dt = tl.load(dt_ptr + rows * num_heads + head, mask=is_real, other=0.0)
    exponents = dt * tl.load(a_ptr + head)
    return dt, tl.cumsum(exponents, 0), tl.sum(exponents)


@triton.jit
def _between(sums: tl.tensor, token: tl.tensor, is_real: tl.tensor) -> tl.tensor:
    """exp(s_i - s_j) where j <= i, else 0."""
    is_earlier = (token[:, None] >= token[None, :]) & is_real[:, None] & is_real[None, :]
    # Where a token is later, the exponent may overflow.
    return tl.exp(tl.where(is_earlier, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def _pass_states(
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    states_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    documents_ptr: tl.tensor,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    state_dim: tl.constexpr,
    head_dim: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BACK: tl.constexpr,
) -> None:
    document, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // (num_heads // num_groups)
    blocks_v: tl.constexpr = tl.cdiv(head_dim, BLOCK_V)
    k = block // blocks_v * BLOCK_K + tl.arange(0, BLOCK_K)
    v = block % blocks_v * BLOCK_V + tl.arange(0, BLOCK_V)
    is_state = (k < state_dim)[:, None] & (v < head_dim)[None, :]
    token = tl.arange(0, LENGTH)
    first_chunk = tl.load(documents_ptr + document).to(tl.int64)
    num_chunks = tl.load(documents_ptr + document + 1) - first_chunk
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    index = num_chunks * 0
    while index < num_chunks:
        chunk = first_chunk + (num_chunks - 1 - index if BACK else index)
        rows, is_real = _rows(chunks_ptr, chunk, token)  # pyright: ignore[reportGeneralTypeIssues]
        place = (chunk * num_heads + head) * state_dim * head_dim + k[:, None] * head_dim + v[None, :]
        tl.store(states_ptr + place, state.to(states_ptr.dtype.element_ty), mask=is_state)
        dt, sums, last = _sums(dt_ptr, a_ptr, rows, is_real, head, num_heads)
        is_key = is_real[:, None] & (k < state_dim)[None, :]
        keys = tl.load(keys_ptr + (rows * num_groups + group)[:, None] * state_dim + k[None, :], mask=is_key, other=0.0)
        is_value = is_real[:, None] & (v < head_dim)[None, :]
        value_place = (rows * num_heads + head)[:, None] * head_dim + v[None, :]
        values = tl.load(values_ptr + value_place, mask=is_value, other=0.0)
        factor = tl.exp(sums) if BACK else tl.exp(last - sums) * dt
        weighted = (keys * factor[:, None]).to(keys_ptr.dtype.element_ty)
        state = state * tl.exp(last) + tl.dot(tl.trans(weighted), values, input_precision="ieee")
        index += 1


@triton.jit
def _scores(
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    rows: tl.tensor,
    is_real: tl.tensor,
    group: tl.tensor,
    num_groups: tl.constexpr,
    state_dim: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """C_i . B_j."""
    scores = tl.zeros([LENGTH, LENGTH], dtype=tl.float32)
    for start in range(0, state_dim, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        place = (rows * num_groups + group)[:, None] * state_dim + k[None, :]
        is_in = is_real[:, None] & (k < state_dim)[None, :]
        b = tl.load(b_ptr + place, mask=is_in, other=0.0)
        c = tl.load(c_ptr + place, mask=is_in, other=0.0)
        scores += tl.dot(c, tl.trans(b), input_precision="ieee")
    return scores


@triton.jit
def _times_states(
    keys_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows: tl.tensor,
    is_real: tl.tensor,
    group: tl.tensor,
    state: tl.tensor,
    v: tl.tensor,
    num_groups: tl.constexpr,
    state_dim: tl.constexpr,
    head_dim: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tl.tensor:
    """Keys [L, N] times the columns `v` of the state that begins at `state`."""
    out = tl.zeros([LENGTH, BLOCK_V], dtype=tl.float32)
    for start in range(0, state_dim, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        place = (rows * num_groups + group)[:, None] * state_dim + k[None, :]
        keys = tl.load(keys_ptr + place, mask=is_real[:, None] & (k < state_dim)[None, :], other=0.0)
        is_state = (k < state_dim)[:, None] & (v < head_dim)[None, :]
        states = tl.load(states_ptr + state + k[:, None] * head_dim + v[None, :], mask=is_state, other=0.0)
        out += tl.dot(keys, states, input_precision="ieee")
    return out


@triton.jit
def _read(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    states_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    state_dim: tl.constexpr,
    head_dim: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = head // (num_heads // num_groups)
    token = tl.arange(0, LENGTH)
    rows, is_real = _rows(chunks_ptr, chunk, token)  # pyright: ignore[reportGeneralTypeIssues]
    dt, sums, _ = _sums(dt_ptr, a_ptr, rows, is_real, head, num_heads)  # pyright: ignore[reportGeneralTypeIssues]
    scores = _scores(b_ptr, c_ptr, rows, is_real, group, num_groups, state_dim, LENGTH, BLOCK_K)
    scores = (scores * _between(sums, token, is_real) * dt[None, :]).to(x_ptr.dtype.element_ty)
    d = tl.load(d_ptr + head)
    state = (chunk * num_heads + head) * state_dim * head_dim
    for start in range(0, head_dim, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        is_in = is_real[:, None] & (v < head_dim)[None, :]
        place = (rows * num_heads + head)[:, None] * head_dim + v[None, :]
        x = tl.load(x_ptr + place, mask=is_in, other=0.0)
        out = _times_states(
            c_ptr,
            states_ptr,
            rows,
            is_real,
            group,
            state,
            v,
            num_groups,
            state_dim,
            head_dim,
            LENGTH,
            BLOCK_K,
            BLOCK_V,
        )
        out = out * tl.exp(sums)[:, None] + tl.dot(scores, x, input_precision="ieee") + d * x.to(tl.float32)
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _differentiate_x(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    grad_out_ptr: tl.tensor,
    grad_after_ptr: tl.tensor,
    grad_x_ptr: tl.tensor,
    of_updates_ptr: tl.tensor,
    of_factor_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    state_dim: tl.constexpr,
    head_dim: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = head // (num_heads // num_groups)
    token = tl.arange(0, LENGTH)
    rows, is_real = _rows(chunks_ptr, chunk, token)  # pyright: ignore[reportGeneralTypeIssues]
    dt, sums, last = _sums(dt_ptr, a_ptr, rows, is_real, head, num_heads)  # pyright: ignore[reportGeneralTypeIssues]
    scores = _scores(b_ptr, c_ptr, rows, is_real, group, num_groups, state_dim, LENGTH, BLOCK_K)
    scores = (scores * _between(sums, token, is_real)).to(x_ptr.dtype.element_ty)
    d = tl.load(d_ptr + head)
    state = (chunk * num_heads + head) * state_dim * head_dim
    of_updates = tl.zeros([LENGTH], dtype=tl.float32)
    of_factor = tl.zeros([LENGTH], dtype=tl.float32)
    for start in range(0, head_dim, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        is_in = is_real[:, None] & (v < head_dim)[None, :]
        place = (rows * num_heads + head)[:, None] * head_dim + v[None, :]
        x = tl.load(x_ptr + place, mask=is_in, other=0.0)
        grad_out = tl.load(grad_out_ptr + place, mask=is_in, other=0.0)
        grad = _times_states(
            b_ptr,
            grad_after_ptr,
            rows,
            is_real,
            group,
            state,
            v,
            num_groups,
            state_dim,
            head_dim,
            LENGTH,
            BLOCK_K,
            BLOCK_V,
        )
        grad = grad * tl.exp(last - sums)[:, None] + tl.dot(tl.trans(scores), grad_out, input_precision="ieee")
        x, grad_out = x.to(tl.float32), grad_out.to(tl.float32)
        of_updates += tl.sum(grad * x, 1)
        of_factor += tl.sum(grad_out * x, 1)
        tl.store(grad_x_ptr + place, (grad * dt[:, None] + d * grad_out).to(grad_x_ptr.dtype.element_ty), mask=is_in)
    tl.store(of_updates_ptr + rows * num_heads + head, of_updates, mask=is_real)
    tl.store(of_factor_ptr + rows * num_heads + head, of_factor, mask=is_real)


@triton.jit
def _differentiate_b_c(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    grad_out_ptr: tl.tensor,
    before_ptr: tl.tensor,
    grad_after_ptr: tl.tensor,
    grad_b_ptr: tl.tensor,
    grad_c_ptr: tl.tensor,
    of_exponents_ptr: tl.tensor,
    num_tokens: tl.tensor,
    chunks_ptr: tl.tensor,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    state_dim: tl.constexpr,
    head_dim: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    chunk, group, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    token = tl.arange(0, LENGTH)
    rows, is_real = _rows(chunks_ptr, chunk, token)  # pyright: ignore[reportGeneralTypeIssues]
    is_last = token == tl.sum(is_real.to(tl.int32)) - 1
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    is_key = is_real[:, None] & (k < state_dim)[None, :]
    key_place = (rows * num_groups + group)[:, None] * state_dim + k[None, :]
    b = tl.load(b_ptr + key_place, mask=is_key, other=0.0)
    c = tl.load(c_ptr + key_place, mask=is_key, other=0.0)
    grad_b = tl.zeros([LENGTH, BLOCK_K], dtype=tl.float32)
    grad_c = tl.zeros([LENGTH, BLOCK_K], dtype=tl.float32)
    for index in range(num_heads // num_groups):
        head = group * (num_heads // num_groups) + index
        dt, sums, last = _sums(dt_ptr, a_ptr, rows, is_real, head, num_heads)
        state = (chunk * num_heads + head) * state_dim * head_dim
        weights = tl.zeros([LENGTH, LENGTH], dtype=tl.float32)
        from_out = tl.zeros([LENGTH, BLOCK_K], dtype=tl.float32)
        for start in range(0, head_dim, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            is_in = is_real[:, None] & (v < head_dim)[None, :]
            place = (rows * num_heads + head)[:, None] * head_dim + v[None, :]
            x = tl.load(x_ptr + place, mask=is_in, other=0.0)
            grad_out = tl.load(grad_out_ptr + place, mask=is_in, other=0.0)
            is_state = (k < state_dim)[:, None] & (v < head_dim)[None, :]
            state_place = state + k[:, None] * head_dim + v[None, :]
            before = tl.load(before_ptr + state_place, mask=is_state, other=0.0)
            weights += tl.dot(grad_out, tl.trans(x), input_precision="ieee")
            from_out += tl.dot(grad_out, tl.trans(before), input_precision="ieee")
        weights = (weights * _between(sums, token, is_real) * dt[None, :]).to(b_ptr.dtype.element_ty)
        from_out = from_out * tl.exp(sums)[:, None] + tl.dot(weights, b, input_precision="ieee")
        grad_c += from_out
        of_sums = tl.sum(c.to(tl.float32) * from_out, 1)
        # Values and states are read twice: all accumulators at once would not fit into the registers.
        from_state = tl.zeros([LENGTH, BLOCK_K], dtype=tl.float32)
        of_states = 0.0
        for start in range(0, head_dim, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            is_in = is_real[:, None] & (v < head_dim)[None, :]
            x = tl.load(x_ptr + (rows * num_heads + head)[:, None] * head_dim + v[None, :], mask=is_in, other=0.0)
            is_state = (k < state_dim)[:, None] & (v < head_dim)[None, :]
            state_place = state + k[:, None] * head_dim + v[None, :]
            before = tl.load(before_ptr + state_place, mask=is_state, other=0.0)
            grad_after = tl.load(grad_after_ptr + state_place, mask=is_state, other=0.0)
            from_state += tl.dot(x, tl.trans(grad_after), input_precision="ieee")
            of_states += tl.sum(before.to(tl.float32) * grad_after.to(tl.float32))
        from_state = from_state * (tl.exp(last - sums) * dt)[:, None]
        kept = tl.sum(b.to(tl.float32) * from_state)
        from_state += tl.dot(tl.trans(weights), c, input_precision="ieee")
        grad_b += from_state
        of_sums -= tl.sum(b.to(tl.float32) * from_state, 1)
        of_sums += tl.where(is_last, of_states * tl.exp(last) + kept, 0.0)
        # A sum depends on the exponents of its own and of all earlier tokens.
        of_exponents = tl.sum(of_sums) - tl.cumsum(of_sums, 0) + of_sums
        place = (block.to(tl.int64) * num_tokens + rows) * num_heads + head
        tl.store(of_exponents_ptr + place, of_exponents, mask=is_real)
    tl.store(grad_b_ptr + key_place, grad_b.to(grad_b_ptr.dtype.element_ty), mask=is_key)
    tl.store(grad_c_ptr + key_place, grad_c.to(grad_c_ptr.dtype.element_ty), mask=is_key)


_scan = define("state_space_triton", _StateSpace(), count_flops)

FUNCTIONS = RecurrenceFns(causal_conv=batched.causal_conv, state_space=state_space)
