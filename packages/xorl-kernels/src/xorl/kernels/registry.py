"""A registry of backends by name, which explains why a backend cannot run a request.

It does not depend on any kernel; each kind of kernel has its own registry.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
FunctionT = TypeVar("FunctionT")

AUTO = "auto"


@dataclass(frozen=True)
class Backend(Generic[RequestT, FunctionT]):
    """One implementation of an operation.

    Attributes:
        name: the name that the user writes.
        load: imports the backend's dependencies and returns its function; called only if there is no refusal.
        refusal: returns the reason why this backend cannot serve a request, or None if it can. Anything else that it
            returns or raises counts as a refusal, and the message says so.
        missing: returns which library is missing and how to install it, or None. Must not import the library.
    """

    name: str
    load: Callable[[], FunctionT]
    refusal: Callable[[RequestT], str | None]
    missing: Callable[[], str | None] = lambda: None


class Registry(Generic[RequestT, FunctionT]):
    """The backends of one kind of kernel. A backend requested by name runs or raises; there is no silent fallback.

    Log and error messages contain `str(request)`, which should have the form "name=value name=value".

    Args:
        kind: the name of the operation in messages ("attention").
        request_type: what describes a call of it.
        preference: names that `auto` tries, best first.
    """

    def __init__(self, kind: str, request_type: type[RequestT], preference: Sequence[str]) -> None:
        self.kind = kind
        self._request_type = request_type
        self._preference = tuple(preference)
        self._backends: dict[str, Backend[RequestT, FunctionT]] = {}
        self._logged: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._backends)

    def register(self, backend: Backend[RequestT, FunctionT]) -> None:
        """Add a backend. Raises ValueError for a name that is taken or is not a non-empty string."""
        if not isinstance(backend.name, str) or not backend.name:
            raise ValueError(f"name must be the {self.kind} backend's name, a non-empty string; got {backend.name!r}")
        if backend.name in (AUTO, *self._backends):
            raise ValueError(f"name: there is already the {self.kind} backend {backend.name!r}; choose another name")
        self._backends[backend.name] = backend

    def resolve(self, name: str, request: RequestT) -> FunctionT:
        """The function of backend `name`. For "auto", that of the first backend in `preference` that can run.

        Raises:
            ValueError: there is no backend of that name, or the request is one of another operation.
            RuntimeError: the backend cannot run this request; the message gives the reason and the backends that can.
        """
        self.check(name, request)
        if name == AUTO:
            return self._resolve_auto(request)[1]
        try:
            return self._backends[name].load()
        except ImportError as error:
            raise self._refusal_error(name, request, [_import_failure(error)]) from error

    def resolved_name(self, name: str, request: RequestT) -> str:
        """The name of the backend whose function `resolve` returns; raises its errors for "auto"."""
        return self._resolve_auto(request)[0] if name == AUTO else name

    def missing(self, request: RequestT) -> list[str]:
        """What keeps "auto" from backends that it prefers to the one it takes: the libraries that are not installed."""
        chosen = self.resolved_name(AUTO, request)
        preferred = [self._backends[name] for name in self._preference[: self._preference.index(chosen)]]
        lacking = [(backend.name, backend.missing()) for backend in preferred if _reason(backend, request) is None]
        return [f"{name}: {reason}" for name, reason in lacking if reason is not None]

    def check(self, name: str, request: RequestT) -> None:
        """Raise the errors of `resolve` for a name, as far as they can be found without importing the library."""
        self._check_request(request)
        if name == AUTO:
            return
        backend = self._backends.get(name)
        if backend is None:
            known = ", ".join((AUTO, *self.names))
            raise ValueError(f"unknown {self.kind} backend {name!r}; known: {known}")
        if reasons := self._reasons(backend, request):
            raise self._refusal_error(name, request, reasons)

    def runnable(self, request: RequestT) -> tuple[str, ...]:
        """Names of the backends that can serve this request, as far as is known without importing their libraries."""
        self._check_request(request)
        return tuple(name for name, backend in self._backends.items() if not self._reasons(backend, request))

    def _check_request(self, request: RequestT) -> None:
        if not isinstance(request, self._request_type):
            wanted, given = self._request_type.__name__, type(request).__name__
            raise ValueError(f"request: {self.kind} backends take a request of type {wanted}, got {given}")

    def _refusal_error(self, name: str, request: RequestT, reasons: Sequence[str]) -> RuntimeError:
        others = ", ".join(other for other in self.runnable(request) if other != name)
        alternatives = f"these can: {others}" if others else "no other backend can either"
        return RuntimeError(f"{self.kind} backend {name!r} cannot run here: {'; '.join(reasons)}; {alternatives}")

    def _reasons(self, backend: Backend[RequestT, FunctionT], request: RequestT) -> list[str]:
        return [reason for reason in (_reason(backend, request), backend.missing()) if reason is not None]

    def _resolve_auto(self, request: RequestT) -> tuple[str, FunctionT]:
        passed_over: list[str] = []
        broken: list[str] = []
        for name in self._preference:
            backend = self._backends[name]
            reasons = self._reasons(backend, request)
            if not reasons:
                try:
                    function = backend.load()
                except ImportError as error:
                    reasons = [_import_failure(error)]
                    broken.append(f"{name}: {reasons[0]}")
                else:
                    self._log_once(name, request, passed_over, broken)
                    return name, function
            passed_over.append(f"{name} ({reasons[0]})")
        raise RuntimeError(f"no {self.kind} backend can run {request}: {'; '.join(passed_over)}")

    def _log_once(self, name: str, request: RequestT, refused: list[str], broken: list[str]) -> None:
        if name in self._logged:
            return
        self._logged.add(name)
        if broken:
            logger.warning("%s backend %s is used, not %s", self.kind, name, "; ".join(broken))
        passed_over = f" passed_over={'; '.join(refused)!r}" if refused else ""
        logger.debug("%s backend=%s chosen_by=auto %s%s", self.kind, name, request, passed_over)


def _reason(backend: Backend[RequestT, FunctionT], request: RequestT) -> str | None:
    """The refusal of `backend`, or None."""
    try:
        reason = backend.refusal(request)
    except Exception as error:  # noqa: BLE001  (a defect of one backend must not hide the others)
        return f"its refusal function raised {type(error).__name__}: {error}"
    if reason is None or isinstance(reason, str):
        return reason
    return f"its refusal function returned {reason!r}, which is neither a reason (str) nor None"


def _import_failure(error: ImportError) -> str:
    return f"its library is installed but cannot be imported ({error}); install a build for this version of torch"
