"""Backends by name: what can run a request, what cannot and why.

Knows no kernel; each kind of kernel fills a registry of its own.
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
    """One way to compute something.

    Attributes:
        name: what the user writes.
        load: imports what the backend needs and returns its function; called only when nothing refuses.
        refusal: why this backend cannot serve a request, or None when it can. It must not raise.
    """

    name: str
    load: Callable[[], FunctionT]
    refusal: Callable[[RequestT], str | None]


class Registry(Generic[RequestT, FunctionT]):
    """The backends of one kind of kernel. A name asked for runs or says why not; nothing falls back silently.

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
            RuntimeError: the backend cannot run this request; the message says why and which can.
        """
        if name == AUTO:
            name = self._choose(request)
        backend = self._backends.get(name)
        if backend is None:
            known = ", ".join((AUTO, *self.names))
            raise ValueError(f"unknown {self.kind} backend {name!r}; known: {known}")
        reason = backend.refusal(request)
        if reason is not None:
            runnable = self.runnable(request)
            instead = f"these can: {', '.join(runnable)}" if runnable else "no other backend can either"
            raise RuntimeError(f"{self.kind} backend {name!r} cannot run here: {reason}; {instead}")
        return backend.load()

    def runnable(self, request: RequestT) -> tuple[str, ...]:
        """Names of the backends that can serve this request."""
        return tuple(name for name, backend in self._backends.items() if backend.refusal(request) is None)

    def _choose(self, request: RequestT) -> str:
        refusals = []
        for name in self._preference:
            reason = self._backends[name].refusal(request)
            if reason is None:
                self._announce(name, request, refusals)
                return name
            refusals.append(f"{name} ({reason})")
        raise RuntimeError(f"no {self.kind} backend can run {request}: {'; '.join(refusals)}")

    def _announce(self, name: str, request: RequestT, refusals: list[str]) -> None:
        if name in self._announced:
            return
        self._announced.add(name)
        passed_over = f" passed_over={'; '.join(refusals)!r}" if refusals else ""
        logger.info("%s backend=%s chosen_by=auto request=%s%s", self.kind, name, request, passed_over)
