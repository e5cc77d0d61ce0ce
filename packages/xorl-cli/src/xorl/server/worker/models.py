"""The interface between the worker's operations and clients' models: adapters over one base, or the whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from xorl.ckpt import Stateful
from xorl.ckpt.layout import JSON
from xorl.lora import Adam
from xorl.server.operations import LoraSpec
from xorl.server.worker.passes import RowEngine
from xorl.train.adapters.files import AdapterFiles
from xorl.train.engine import Update

# The key in a checkpoint's manifest under which the service records how to recreate the model.
SERVICE = "service"


class UnknownName(ValueError):
    """The model or checkpoint does not exist."""


class Models(Protocol):
    """The models of a worker, by id. Methods that change or read a model are collective.

    A source is a set of weights to sample from: a checkpoint's, in memory, under the checkpoint's URI.

    Methods raise UnknownName for an id that does not exist and ValueError for the client's errors, on all ranks.
    """

    @property
    def engine(self) -> RowEngine:
        """Runs forward and backward passes of these models."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The ids of all models."""
        ...

    @property
    def max_per_pass(self) -> int:
        """The maximum number of models in one pass."""
        ...

    @property
    def samples_together(self) -> bool:
        """Whether one pass of the sampler can use several sources."""
        ...

    def create(self, model_id: str, lora: LoraSpec | None, saved: Mapping[str, JSON] | None) -> None:
        """Create a model as `lora` specifies or, if `lora` is None, as `describe` recorded it in a checkpoint."""
        ...

    def remove(self, model_id: str) -> None:
        """Remove a model."""
        ...

    def describe(self, model_id: str) -> dict[str, JSON]:
        """The description from which `create` recreates the model; recorded in its checkpoints."""
        ...

    def lora(self, model_id: str) -> tuple[int, float] | None:
        """(rank, alpha); None for full weights."""
        ...

    def step(self, model_id: str, adam: Adam, divisor: float, max_norm: float | None, *, with_norms: bool) -> Update:
        """Take an optimizer step with the accumulated gradient and clear it. with_norms: norms by kind of layer."""
        ...

    def zero_grad(self, model_id: str) -> None:
        """Drop the accumulated gradient."""
        ...

    def state(self, model_id: str, *, with_optimizer: bool) -> Mapping[str, Stateful]:
        """The state that a checkpoint holds. To load a model: `before_loading`, load this state, `after_loading`."""
        ...

    def before_loading(self, model_id: str) -> None:
        """Called before the model's weights are replaced."""
        ...

    def after_loading(self, model_id: str, *, keeps_optimizer: bool) -> None:
        """Called after the model's weights were replaced: drop gradients and, unless it is kept, optimizer state."""
        ...

    def adapter_files(self, model_id: str) -> AdapterFiles | None:
        """The adapter, for writing it or merging it into the base; None for full weights."""
        ...

    def snapshot(self, model_id: str, source: str) -> None:
        """Keep the model's current weights in memory as a source, as if they had been loaded from its checkpoint."""
        ...

    def has_source(self, source: str) -> bool:
        """Whether a source is in memory."""
        ...

    def load_source(
        self,
        source: str,
        saved: Mapping[str, JSON],
        read: Callable[[Mapping[str, Stateful]], None],
        *,
        has_optimizer: bool,
    ) -> None:
        """Add a source with the weights of a checkpoint. `read` loads them into the state that it is passed."""
        ...

    def release_source(self, source: str) -> None:
        """Drop a source if it is in memory."""
        ...

    def release_idle_sources(self, needed: Collection[str | None]) -> None:
        """Drop the least recently used sources, if there are too many; never those that unfinished samples need."""
        ...

    def sampling_from(self, sources: Sequence[str | None]) -> AbstractContextManager[Sequence[str | None]]:
        """Within the context, forward passes use these sources (None: the base); yields the adapter of each."""
        ...
