"""Recurrence: applies a function of one chunk of tokens and a state to packed rows, as two torch operators.

This file knows no formula: the other modules of this folder pass in a step and its gradient.

The chunks of a document begin at its first token, and each is computed separately, on copies. The outputs of a document
and the gradients of its tokens therefore have the same bits in any row.

Memory is linear in the number of tokens. Autograd keeps only the inputs. The backward pass recomputes the rest: it
holds the states between the chunks of one document, and the intermediate results of one chunk.

The arithmetic is fp32, or fp64 for fp64 inputs; as elsewhere, torch's fp32 matrix products use TF32 only if told to.

Shapes: T tokens, N documents, L tokens of a chunk; "..." are the other dimensions of a tensor of tokens or of states.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from xorl.kernels.arguments import check_one_device
from xorl.kernels.layout import SequenceLayout

Tensors = tuple[Tensor, ...]


class Step(Protocol):
    """Maps tokens [L, ...], parameters and a state [...] to an output [L, ...] and the next state, all in one dtype."""

    def __call__(self, tokens: Tensors, parameters: Tensors, state: Tensor, /) -> tuple[Tensor, Tensor]: ...


class StepGradient(Protocol):
    """Returns the gradients of a step's tokens, parameters and state, given those of its two results."""

    def __call__(
        self, grad_out: Tensor, grad_next: Tensor, tokens: Tensors, parameters: Tensors, state: Tensor, /
    ) -> tuple[Tensors, Tensors, Tensor]: ...


Shapes = Sequence[torch.Size]
# The FLOPs of the forward pass, from the shapes of the tokens and of the parameters.
CountFlops = Callable[[Shapes, Shapes], int]


class Scan(Protocol):
    """Computes packed rows, as `Recurrence` does."""

    def forward(
        self,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
        *,
        returns_states: bool,
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad_out: Tensor,
        grad_finals: Tensor,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
    ) -> list[Tensor]: ...


class Recurrence:
    """The operators `xorl::{name}` and `xorl::{name}_backward` of a recurrence.

    Args:
        name: an identifier that no other operator has.
        step, gradient: compute a chunk. They change no argument.
        chunk_tokens: the number of tokens of a chunk; the last one of a document may have fewer.
        count_flops: returns what torch's FLOP counter reports for the forward pass. The backward pass counts as twice
            that; recomputation does not count.
    """

    def __init__(
        self, name: str, step: Step, gradient: StepGradient, *, chunk_tokens: int, count_flops: CountFlops
    ) -> None:
        self._step, self._gradient, self._chunk_tokens = step, gradient, chunk_tokens
        self._operator = define(name, self, count_flops)

    def __call__(
        self, tokens: Tensors, parameters: Tensors, states: Tensor, layout: SequenceLayout, *, returns_states: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs, and the states after the last token of each document.

        Args:
            tokens: [T, ...] each; the output has the shape and dtype of the first.
            parameters: tensors that all tokens share.
            states: [N, ...], before the first token of each document, in the dtype of the step; [0, ...] means zeros.
            layout: of T tokens in N documents.
            returns_states: without it, the second result is [0, ...].
        """
        return self._operator(list(tokens), list(parameters), states, layout.offsets, returns_states)

    def forward(
        self,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
        *,
        returns_states: bool,
    ) -> tuple[Tensor, Tensor]:
        """Computes the results of `__call__`, without autograd."""
        out = torch.empty_like(tokens[0], memory_format=torch.contiguous_format)
        finals = states.new_empty((len(offsets) - 1 if returns_states else 0, *states.shape[1:]))
        parameters = _copies(parameters, ..., states.dtype)
        for document, (begin, end) in enumerate(pairwise(offsets.tolist())):
            state = _of_document(states, document)
            for rows in self._chunks(begin, end):
                out[rows], state = self._step(_copies(tokens, rows, states.dtype), parameters, state)
            if returns_states:
                finals[document] = state
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
        """Returns the gradients of the tokens, of the parameters and of `states`, in the dtypes of these.

        `grad_finals` is [0, ...] if the states after the documents have no gradient.
        """
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens]
        parameters_wide = _copies(parameters, ..., states.dtype)
        parameter_grads = [torch.zeros_like(x) for x in parameters_wide]
        grad_states = torch.empty_like(states, memory_format=torch.contiguous_format)
        for document, (begin, end) in enumerate(pairwise(offsets.tolist())):
            chunks = list(self._chunks(begin, end))
            before = self._states_before(chunks, tokens, parameters_wide, _of_document(states, document))
            grad_state = _of_document(grad_finals, document)
            for rows in reversed(chunks):
                grad_chunk, *chunk = _copies((grad_out, *tokens), rows, states.dtype)
                of_tokens, of_parameters, grad_state = self._gradient(
                    grad_chunk, grad_state, tuple(chunk), parameters_wide, before.pop()
                )
                for grad, of_chunk in zip(grads, of_tokens, strict=True):
                    grad[rows] = of_chunk
                for grad, of_chunk in zip(parameter_grads, of_parameters, strict=True):
                    grad += of_chunk
            if len(states):
                grad_states[document] = grad_state
        narrow = (grad.to(x.dtype, copy=True) for grad, x in zip(parameter_grads, parameters, strict=True))
        return [*grads, *narrow, grad_states]

    def _chunks(self, begin: int, end: int) -> Iterator[slice]:
        return (slice(at, min(at + self._chunk_tokens, end)) for at in range(begin, end, self._chunk_tokens))

    def _states_before(
        self, chunks: list[slice], tokens: Sequence[Tensor], parameters: Tensors, state: Tensor
    ) -> list[Tensor]:
        """Returns the state before each chunk of a document."""
        states = [state]
        for rows in chunks[:-1]:
            states.append(self._step(_copies(tokens, rows, state.dtype), parameters, states[-1])[1])
        return states


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and of the arithmetic for tokens of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def check_layout(layout: object, num_tokens: int, of_tokens: str) -> None:
    """Raises ValueError unless `layout` is that of `num_tokens` tokens in whole documents."""
    # The subclasses are for ranks that share a row and for caches, where a document may have begun earlier.
    if type(layout) is not SequenceLayout:
        raise ValueError(
            "layout must be of whole documents, such as SequenceLayout.from_lengths([5, 3]); got a "
            f"{type(layout).__name__}"
        )
    if layout.num_tokens != num_tokens:
        raise ValueError(f"{of_tokens} must have the {layout.num_tokens} tokens of the layout; got {num_tokens}")


def check_wide(like: Tensor, of_like: str, **tensors: Tensor) -> None:
    """Raises ValueError unless `like` is floating-point and `tensors` are on its device, in its `state_dtype`."""
    if not like.is_floating_point():
        raise ValueError(f"{of_like} must be of floating point; got {like.dtype}")
    wide = state_dtype(like.dtype)
    for name, tensor in tensors.items():
        if tensor.dtype != wide:
            raise ValueError(f"{name} must be in {wide} where {of_like} is in {like.dtype}; got {tensor.dtype}")
    check_one_device(**{of_like: like, **tensors})


def checked_states(states: Tensor | None, shape: tuple[int, ...], like: Tensor, layout: SequenceLayout) -> Tensor:
    """Returns `states`, or [0, *shape] for None. Raises ValueError unless they are [N, *shape] in the step's dtype."""
    wide = state_dtype(like.dtype)
    if states is None:
        return like.new_empty((0, *shape), dtype=wide)
    if torch.compiler.is_compiling():
        return states
    expected = (len(layout.lengths), *shape)
    if states.shape != expected or states.dtype != wide:
        raise ValueError(f"states must be {list(expected)} in {wide}; got {list(states.shape)} in {states.dtype}")
    check_one_device(states=states, tokens=like)
    return states


def _of_document(states: Tensor, document: int) -> Tensor:
    """Returns a copy of a document's state [...], or zeros if there are no states."""
    return states[document].clone() if len(states) else states.new_zeros(states.shape[1:])


def _copies(tensors: Iterable[Tensor], rows: slice | EllipsisType, dtype: torch.dtype) -> Tensors:
    """Copies some rows. Without copies, rounding could depend on where the rows begin in memory."""
    return tuple(x[rows].to(dtype, copy=True, memory_format=torch.contiguous_format) for x in tensors)


class _Context(FunctionCtx):
    saved_tensors: Tensors
    num_tokens: int


def define(name: str, recurrence: Scan, count_flops: CountFlops) -> Callable[..., tuple[Tensor, Tensor]]:
    """Registers both operators of a scan, and returns the forward operator."""

    @torch.library.custom_op(f"xorl::{name}", mutates_args=())
    def scan(
        tokens: Sequence[Tensor], parameters: Sequence[Tensor], states: Tensor, offsets: Tensor, returns_states: bool
    ) -> tuple[Tensor, Tensor]:
        return recurrence.forward(tokens, parameters, states, offsets, returns_states=returns_states)

    @torch.library.custom_op(f"xorl::{name}_backward", mutates_args=())
    def scan_backward(
        grad_out: Tensor,
        grad_finals: Tensor,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
    ) -> list[Tensor]:
        return recurrence.backward(grad_out, grad_finals, tokens, parameters, states, offsets)

    @scan.register_fake
    def _(
        tokens: Sequence[Tensor], parameters: Sequence[Tensor], states: Tensor, offsets: Tensor, returns_states: bool
    ) -> tuple[Tensor, Tensor]:
        num_finals = offsets.shape[0] - 1 if returns_states else 0
        return tokens[0].new_empty(tokens[0].shape), states.new_empty((num_finals, *states.shape[1:]))

    @scan_backward.register_fake
    def _(
        grad_out: Tensor,
        grad_finals: Tensor,
        tokens: Sequence[Tensor],
        parameters: Sequence[Tensor],
        states: Tensor,
        offsets: Tensor,
    ) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in (*tokens, *parameters, states)]

    def save(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        tokens, parameters, states, offsets, _ = inputs
        ctx.save_for_backward(*tokens, *parameters, states, offsets)
        ctx.num_tokens = len(tokens)

    def differentiate(ctx: _Context, grad_out: Tensor, grad_finals: Tensor) -> tuple[object, ...]:
        *inputs, states, offsets = ctx.saved_tensors
        tokens, parameters = inputs[: ctx.num_tokens], inputs[ctx.num_tokens :]
        *grads, grad_states = scan_backward(grad_out, grad_finals, tokens, parameters, states, offsets)
        return grads[: ctx.num_tokens], grads[ctx.num_tokens :], grad_states, None, None

    scan.register_autograd(differentiate, setup_context=save)
    _register_flops(name, count_flops)
    return scan


def _register_flops(name: str, count_flops: CountFlops) -> None:
    def forward(tokens: Shapes, parameters: Shapes, *_: object, **__: object) -> int:
        return count_flops(tokens, parameters)

    def backward(
        grad_out: torch.Size, grad_finals: torch.Size, tokens: Shapes, parameters: Shapes, *_: object, **__: object
    ) -> int:
        return 2 * count_flops(tokens, parameters)

    register_flop_formula(getattr(torch.ops.xorl, name))(forward)
    register_flop_formula(getattr(torch.ops.xorl, f"{name}_backward"))(backward)
