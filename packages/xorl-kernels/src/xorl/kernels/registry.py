"""Backends by name, and the reasons why a backend cannot run a request.

Independent of kernels; each kind of kernel fills its own registry.
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
        name: what the user writes.
        load: imports what the backend needs and returns its function; called only if there is no refusal.
        refusal: the reason why this backend cannot serve a request, or None if it can. It must not raise.
        missing: the library that is missing, and how to install it, or None if it is installed. It must not import it.
    """

    name: str
    load: Callable[[], FunctionT]
    refusal: Callable[[RequestT], str | None]
    missing: Callable[[], str | None] = lambda: None


class Registry(Generic[RequestT, FunctionT]):
    """The backends of one kind of kernel. A backend requested by name runs or raises; there is no silent fallback.

    A request is written into logs and errors as `str` gives it: in words of the form name=value.

    Args:
        kind: what the backends compute, for messages ("attention").
        preference: names that `auto` tries, best first.
    """

    def __init__(self, kind: str, preference: Sequence[str]) -> None:
        self.kind = kind
        self._preference = tuple(preference)
        self._backends: dict[str, Backend[RequestT, FunctionT]] = {}
        self._announced: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._backends)

    def register(self, backend: Backend[RequestT, FunctionT]) -> None:
        assert backend.name not in self._backends, f"{self.kind} backend {backend.name!r} is registered twice"
        self._backends[backend.name] = backend

    def resolve(self, name: str, request: RequestT) -> FunctionT:
        """The function of backend `name`, or for "auto" that of the first preferred backend that can run.

        Raises:
            ValueError: there is no backend of that name.
            RuntimeError: the backend cannot run this request; the message gives the reason and the backends that can.
        """
        if name == AUTO:
            return self._choose(request)
        self.check(name, request)
        try:
            return self._backends[name].load()
        except ImportError as error:
            raise self._refused(name, request, [_broken(error)]) from error

    def check(self, name: str, request: RequestT) -> None:
        """Raises what `resolve` raises for a name, as far as it can be checked without importing the library."""
        if name == AUTO:
            return
        backend = self._backends.get(name)
        if backend is None:
            known = ", ".join((AUTO, *self.names))
            raise ValueError(f"unknown {self.kind} backend {name!r}; known: {known}")
        if reasons := self._reasons(backend, request):
            raise self._refused(name, request, reasons)

    def runnable(self, request: RequestT) -> tuple[str, ...]:
        """Names of the backends that can serve this request, as far as it can be checked without importing them."""
        return tuple(name for name, backend in self._backends.items() if not self._reasons(backend, request))

    def _refused(self, name: str, request: RequestT, reasons: Sequence[str]) -> RuntimeError:
        instead = ", ".join(other for other in self.runnable(request) if other != name)
        can = f"these can: {instead}" if instead else "no other backend can either"
        return RuntimeError(f"{self.kind} backend {name!r} cannot run here: {'; '.join(reasons)}; {can}")

    def _reasons(self, backend: Backend[RequestT, FunctionT], request: RequestT) -> list[str]:
        return [reason for reason in (backend.refusal(request), backend.missing()) if reason is not None]

    def _choose(self, request: RequestT) -> FunctionT:
        passed_over = []
        for name in self._preference:
            backend = self._backends[name]
            reasons = self._reasons(backend, request)
            if not reasons:
                try:
                    function = backend.load()
                except ImportError as error:
                    reasons = [_broken(error)]
                else:
                    self._announce(name, request, passed_over)
                    return function
            passed_over.append(f"{name} ({reasons[0]})")
        raise RuntimeError(f"no {self.kind} backend can run {request}: {'; '.join(passed_over)}")

    def _announce(self, name: str, request: RequestT, refused: list[str]) -> None:
        if name in self._announced:
            return
        self._announced.add(name)
        passed_over = f" passed_over={'; '.join(refused)!r}" if refused else ""
        logger.info("%s backend=%s chosen_by=auto %s%s", self.kind, name, request, passed_over)


def _broken(error: ImportError) -> str:
    return f"its library is installed but cannot be imported ({error}), so install one built for this torch"
