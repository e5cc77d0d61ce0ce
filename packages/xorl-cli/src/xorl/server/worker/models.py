"""What the worker's operations ask of the models that clients train: adapters over one base, or the whole model."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from xorl.ckpt import JSON, Stateful
from xorl.lora import Adam
from xorl.server.operations import LoraSpec
from xorl.server.worker.passes import RowEngine
from xorl.train.adapter_files import AdapterFiles
from xorl.train.engine import Update

# In a checkpoint's manifest, beside what local training writes: what makes such a model anew.
SERVICE = "service"


class UnknownName(ValueError):
    """There is no such model, snapshot or checkpoint."""


class Models(Protocol):
    """The models of a worker by their ids. What changes or reads one is collective.

    Raises UnknownName for an id that is not there and ValueError for what a client can mend, on every rank alike.
    """

    @property
    def engine(self) -> RowEngine:
        """Runs passes of these models."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """All models."""
        ...

    @property
    def max_per_pass(self) -> int:
        """How many models one pass can have."""
        ...

    @property
    def samples_together(self) -> bool:
        """Whether one pass of generation can have several of the sources."""
        ...

    def create(self, model_id: str, lora: LoraSpec | None, saved: Mapping[str, JSON] | None) -> None:
        """A new model, by `lora`, or where that is None by what `described` said of the one that a checkpoint holds."""
        ...

    def remove(self, model_id: str) -> None:
        """Forget a model."""
        ...

    def described(self, model_id: str) -> dict[str, JSON]:
        """What makes such a model anew: for checkpoints."""
        ...

    def lora(self, model_id: str) -> tuple[int, float] | None:
        """(rank, alpha); None of full weights."""
        ...

    def step(self, model_id: str, adam: Adam, divisor: float, max_norm: float | None, *, with_norms: bool) -> Update:
        """One optimizer step on the accumulated gradient, which is then zero; with norms by kind of layer."""
        ...

    def zero_grad(self, model_id: str) -> None:
        """Forget what was accumulated."""
        ...

    def state(self, model_id: str, *, with_optimizer: bool) -> Mapping[str, Stateful]:
        """What a checkpoint holds; loading into it, and `loaded` after it, loads the model."""
        ...

    def before_loading(self, model_id: str) -> None:
        """Its weights are about to be others."""
        ...

    def loaded(self, model_id: str, *, keeps_optimizer: bool) -> None:
        """Its weights are others now; without `keeps_optimizer` its optimizer begins anew. Gradients are forgotten."""
        ...

    def adapter_files(self, model_id: str) -> AdapterFiles | None:
        """The adapter that stands on the base, to be written or folded in; None where the weights are its own."""
        ...

    def keep(self, model_id: str, sampler_id: str) -> None:
        """Hold its weights, as they are now, to sample from."""
        ...

    def kept(self, model_id: str, sampler_id: str) -> str:
        """The source for `sampling` that `keep` made."""
        ...

    def is_held(self, source: str) -> bool:
        """Whether `sampling` knows this source."""
        ...

    def hold(
        self,
        source: str,
        saved: Mapping[str, JSON],
        read: Callable[[Mapping[str, Stateful]], None],
        *,
        has_optimizer: bool,
    ) -> None:
        """Let `source` be what a checkpoint holds; `read` loads it into the state that it is given."""
        ...

    def release(self, source: str) -> None:
        """Forget a source, if it is there."""
        ...

    def sampling(self, sources: Sequence[str | None]) -> AbstractContextManager[Sequence[str | None]]:
        """Within, forward passes compute with these (None: the base); gives the adapter of each, None for none."""
        ...


def source_name(model_id: str, sampler_id: str) -> str:
    """The source of a model's weights as a sampler has them in memory."""
    return f"{model_id}#{sampler_id}"


def kept_source(model_id: str, sampler_id: str, held: Container[str], num_held: int) -> str:
    """The `source_name`; raises UnknownName where it is not `held` any more, of which there are `num_held` at most."""
    source = source_name(model_id, sampler_id)
    if source not in held:
        raise UnknownName(
            f"sampler {sampler_id!r} is not in the workers' memory any more, which holds the newest {num_held}: "
            "save the weights again, under a name if they are to stay"
        )
    return source
