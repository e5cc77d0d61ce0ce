"""Compares the functions of a backend with the plain ones, on the device and for the sizes of a run.

Libraries are compiled for the device when they are first called, and their gradients have been wrong on some.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent.backends import PLAIN_RECURRENCE, RECURRENCES, RecurrenceFns, RecurrenceRequest
from xorl.kernels.registry import AUTO

logger = logging.getLogger(__name__)

# Documents of one token, shorter than a convolution, and longer than chunks of 64.
LENGTHS = (200, 1, 3, 70)
NUM_KEY_HEADS, NUM_VALUE_HEADS, NUM_CHANNELS, NUM_TAPS = 2, 4, 256, 4
# So that states last as long as a document.
MEAN_STEP = 0.05
# Relative, in norm. Rounding to bf16 gives 5e-3, and one wrong element in a hundred 1e-1.
TOLERANCE = 2e-2
_certified: set[tuple[RecurrenceFns, RecurrenceRequest]] = set()

Compute = Callable[[RecurrenceFns, Sequence[Tensor], SequenceLayout], Tensor]


def resolve_recurrence(name: str, request: RecurrenceRequest) -> RecurrenceFns:
    """The functions of the backend `name`; "auto" takes the first of fla, triton, batched and plain that can run.

    All but the plain functions are certified first. If that fails, "auto" takes the plain ones, with a warning.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: the backend cannot run the request, or computes something else than the plain functions.
    """
    functions = RECURRENCES.resolve(name, request)
    if functions is PLAIN_RECURRENCE:
        return functions
    try:
        certify(functions, request)
    except RuntimeError as error:
        if name != AUTO:
            raise
        chosen = RECURRENCES.resolved_name(AUTO, request)
        logger.warning("recurrence backend plain is used, which is slower, not %s: %s", chosen, error)
        return PLAIN_RECURRENCE
    return functions


def certify(functions: RecurrenceFns, request: RecurrenceRequest) -> None:
    """Raises RuntimeError unless outputs and gradients are those of the plain functions, once for each request.

    A document alone must also have the same bits as in a packed row.
    """
    if (functions, request) in _certified:
        return
    for name, (compute, inputs) in _cases(request).items():
        wanted = _with_gradients(compute, PLAIN_RECURRENCE, [x.float() for x in inputs], LENGTHS)
        found = _with_gradients(compute, functions, inputs, LENGTHS)
        errors = [_error(*pair) for pair in zip(found, wanted, strict=True)]
        if not max(errors) <= TOLERANCE:
            shown = ", ".join(f"{error:.1e}" for error in errors)
            raise RuntimeError(
                f"{name} is not what plain torch computes on this device: its output and gradients are off by {shown}; "
                f"at most {TOLERANCE:g} is rounding. Choose the backend 'plain'"
            )
        first = LENGTHS[0]
        alone = _with_gradients(
            compute, functions, [x[:first] if len(x) == sum(LENGTHS) else x for x in inputs], [first]
        )
        for packed, single in zip(found, alone, strict=True):
            if len(packed) == sum(LENGTHS) and not torch.equal(packed[:first], single):
                raise RuntimeError(
                    f"{name} computes another result for a document alone than in a packed row. Choose the backend "
                    "'plain'"
                )
    _certified.add((functions, request))


def _cases(request: RecurrenceRequest) -> dict[str, tuple[Compute, list[Tensor]]]:
    """For each function, a call of it, and its inputs in the dtypes of a run."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, device = sum(LENGTHS), torch.device(request.device_type)

    def draw(*shape: int, dtype: torch.dtype = request.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    conv = (
        lambda f, x, layout: f.causal_conv(x[0], x[1], None, "silu", layout),
        [draw(num_tokens, NUM_CHANNELS), draw(NUM_CHANNELS, NUM_TAPS)],
    )
    if request.states is not None:
        head_dim, state_dim = request.states
        x, gate = (draw(num_tokens, NUM_VALUE_HEADS, head_dim) for _ in range(2))
        b, c = (draw(num_tokens, NUM_KEY_HEADS, state_dim) for _ in range(2))
        dt = draw(num_tokens, NUM_VALUE_HEADS, dtype=torch.float32).exp() * MEAN_STEP
        a, d = -draw(NUM_VALUE_HEADS, dtype=torch.float32).exp(), draw(NUM_VALUE_HEADS, dtype=torch.float32)
        return {
            "state_space": (
                lambda f, x, layout: f.state_space(x[0], x[1], x[2], x[3], x[4], x[5], layout),
                [x, dt, a, b, c, d],
            ),
            "causal_conv": conv,
            "norm_of_gated": (
                lambda f, x, layout: f.norm_of_gated(x[0], x[1], x[2], 1e-6),
                [x, draw(NUM_VALUE_HEADS, head_dim), gate],
            ),
        }
    if request.heads is None:
        return {"causal_conv": conv}
    key_dim, value_dim = request.heads
    q, k = (
        PLAIN_RECURRENCE.unit_norm(draw(num_tokens, NUM_KEY_HEADS, key_dim), scale) for scale in (key_dim**-0.5, 1.0)
    )
    v, gate = (draw(num_tokens, NUM_VALUE_HEADS, value_dim) for _ in range(2))
    g = -draw(num_tokens, NUM_VALUE_HEADS, dtype=torch.float32).exp()
    beta = draw(num_tokens, NUM_VALUE_HEADS, dtype=torch.float32).sigmoid()
    return {
        "gated_delta": (lambda f, x, layout: f.gated_delta(x[0], x[1], x[2], x[3], x[4], layout), [q, k, v, g, beta]),
        "causal_conv": conv,
        "unit_norm": (lambda f, x, layout: f.unit_norm(x[0], 0.5), [draw(num_tokens, NUM_KEY_HEADS, key_dim)]),
        "gated_norm": (lambda f, x, layout: f.gated_norm(x[0], x[1], x[2], 1e-6), [v, draw(value_dim), gate]),
    }


def _with_gradients(
    compute: Compute, functions: RecurrenceFns, inputs: Sequence[Tensor], lengths: Sequence[int]
) -> list[Tensor]:
    """The output, and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    layout = SequenceLayout.from_lengths(lengths, device=leaves[0].device)
    with torch.enable_grad():
        out = compute(functions, leaves, layout)
        # Of the first tokens, the same in a longer row.
        gradient = torch.arange(out.numel(), device=out.device, dtype=torch.float64).mul(0.37).sin()
        out.backward(gradient.view(out.shape).to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())
