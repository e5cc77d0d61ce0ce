"""Backends of recurrent layers: their norms, what is refused, and what a certificate notices."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from xorl.kernels.recurrent import PLAIN_RECURRENCE, RECURRENCES, RecurrenceFns, RecurrenceRequest, resolve_recurrence
from xorl.kernels.recurrent import certify as certify_module
from xorl.kernels.recurrent.certify import certify
from xorl.kernels.recurrent.norms import gated_norm, norm_of_gated, unit_norm
from xorl.kernels.registry import Backend, Registry

REQUEST = RecurrenceRequest("cpu", torch.float32, (8, 12))
OF_STATE_SPACE = RecurrenceRequest("cpu", torch.float32, states=(8, 12))


def test_norms_have_the_gradients_of_their_formulas() -> None:
    # Catches a gradient without the part along the vector, and a gate's without its weight.
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 3, 8, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    weight = torch.randn(8, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unit_norm(x, 0.3), x)
    assert torch.autograd.gradcheck(lambda *inputs: gated_norm(*inputs, 1e-3), (x, weight, gate))
    torch.testing.assert_close(unit_norm(x, 0.3), 0.3 * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight * torch.nn.functional.silu(gate)
    torch.testing.assert_close(gated_norm(x, weight, gate, 1e-3), wanted)
    weights = torch.randn(3, 8, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: norm_of_gated(*inputs, 1e-3), (x, weights, gate))
    gated = x * torch.nn.functional.silu(gate)
    wanted = gated / (gated.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weights
    torch.testing.assert_close(norm_of_gated(x, weights, gate, 1e-3), wanted)


def test_half_precision_is_rounded_once() -> None:
    # Catches norms that are rounded before the weight or the gate.
    x, gate = (torch.randn(7, 2, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    weight = torch.full((16,), 0.7)
    assert torch.equal(unit_norm(x, 0.3), unit_norm(x.float(), 0.3).bfloat16())
    assert torch.equal(gated_norm(x, weight, gate, 1e-3), gated_norm(x.float(), weight, gate.float(), 1e-3).bfloat16())


def test_auto_takes_what_can_run_here_and_a_name_is_never_replaced() -> None:
    # Catches a silent fallback.
    assert resolve_recurrence("auto", REQUEST) is PLAIN_RECURRENCE
    with pytest.raises(RuntimeError, match=r"recurrence backend 'fla' cannot run here: .*CUDA.*these can: plain"):
        RECURRENCES.check("fla", REQUEST)


def copied(function: Callable[..., Tensor], change: Callable[[Tensor], Tensor] = torch.clone) -> Callable[..., Tensor]:
    return lambda *inputs: change(function(*inputs))


def test_other_functions_with_the_same_results_are_certified() -> None:
    # Catches a certificate that refuses everything.
    certify(replace(PLAIN_RECURRENCE, gated_delta=copied(PLAIN_RECURRENCE.gated_delta)), REQUEST)


def wrong_gradient(x: Tensor) -> Tensor:
    return x * 1.5 - 0.5 * x.detach()


def from_other_documents(x: Tensor) -> Tensor:
    return x + 1e-6 * x.mean(0).detach()


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        *((REQUEST, name) for name in ("gated_delta", "causal_conv", "unit_norm", "gated_norm")),
        *((OF_STATE_SPACE, name) for name in ("state_space", "causal_conv", "norm_of_gated")),
    ],
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * 1.05, "is not what plain torch computes on this device"),
        (wrong_gradient, "is not what plain torch computes on this device"),
        (lambda x: x * float("nan"), "is not what plain torch computes on this device"),
        (from_other_documents, "computes another result for a document alone than in a packed row"),
    ],
    ids=["scaled", "wrong gradient", "nan", "leaks"],
)
def test_wrong_functions_are_not_certified(
    request_: RecurrenceRequest, name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    # Catches a run on kernels that are wrong on a device.
    functions: RecurrenceFns = replace(PLAIN_RECURRENCE, **{name: copied(getattr(PLAIN_RECURRENCE, name), change)})
    with pytest.raises(RuntimeError, match=f"^{name} {message}"):
        certify(functions, request_)


def test_auto_passes_over_what_is_not_certified_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Catches a run that stops, on a device where a backend that nobody asked for is wrong.
    wrong = replace(PLAIN_RECURRENCE, gated_delta=copied(PLAIN_RECURRENCE.gated_delta, wrong_gradient))
    backend = Backend("wrong", load=lambda: wrong, refusal=lambda request: None)
    registry = Registry("recurrence", RecurrenceRequest, preference=("wrong",))
    registry.register(backend)
    monkeypatch.setattr(certify_module, "RECURRENCES", registry)
    assert resolve_recurrence("auto", REQUEST) is PLAIN_RECURRENCE
    assert "plain is used, which is slower, not wrong: gated_delta is not what" in caplog.text
    with pytest.raises(RuntimeError, match=r"^gated_delta is not what"):
        resolve_recurrence("wrong", REQUEST)
