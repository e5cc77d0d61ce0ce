"""What the worker's operations ask of the models that clients train: adapters over one base, or the whole model."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from xorl.ckpt import JSON, Stateful
from xorl.lora import Adam
from xorl.server.operations import LoraSpec
from xorl.server.worker.passes import RowEngine
from xorl.train.adapters.files import AdapterFiles
from xorl.train.engine import Update

# In a checkpoint's manifest, beside what local training writes: what makes such a model anew.
SERVICE = "service"


class UnknownName(ValueError):
    """There is no such model, snapshot or checkpoint."""


class Models(Protocol):
    """The models of a worker by their ids. What changes or reads one is collective.

    Raises UnknownName for an id that does not exist and ValueError for what a client can correct, alike on all ranks.
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
        """Make a model as `lora` says, or if that is None, as `described` recorded it in a checkpoint."""
        ...

    def remove(self, model_id: str) -> None:
        """Forget a model."""
        ...

    def described(self, model_id: str) -> dict[str, JSON]:
        """What `create` needs to make such a model again; goes into its checkpoints."""
        ...

    def lora(self, model_id: str) -> tuple[int, float] | None:
        """(rank, alpha); None of full weights."""
        ...

    def step(self, model_id: str, adam: Adam, divisor: float, max_norm: float | None, *, with_norms: bool) -> Update:
        """Take an optimizer step with the accumulated gradient, and clear it. with_norms: by kind of layer."""
        ...

    def zero_grad(self, model_id: str) -> None:
        """Drop the accumulated gradient."""
        ...

    def state(self, model_id: str, *, with_optimizer: bool) -> Mapping[str, Stateful]:
        """The state that a checkpoint holds. To load the model, load into it and then call `loaded`."""
        ...

    def before_loading(self, model_id: str) -> None:
        """Called before its weights are replaced."""
        ...

    def loaded(self, model_id: str, *, keeps_optimizer: bool) -> None:
        """Called after its weights were replaced: drop gradients and, unless told to keep it, optimizer state."""
        ...

    def adapter_files(self, model_id: str) -> AdapterFiles | None:
        """The adapter, to be written or merged into the base; None for full weights."""
        ...

    def keep(self, model_id: str, sampler_id: str) -> None:
        """Keep its weights, as they are now, to sample from."""
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
        """Let `source` be the weights in a checkpoint, which `read` loads into the state that it is passed."""
        ...

    def release(self, source: str) -> None:
        """Forget a source, if it is there."""
        ...

    def sampling(self, sources: Sequence[str | None]) -> AbstractContextManager[Sequence[str | None]]:
        """While entered, forward passes compute with these sources (None: the base); yields the adapter of each."""
        ...


def source_name(model_id: str, sampler_id: str) -> str:
    """The name of the source that holds a model's weights for a sampler in memory."""
    return f"{model_id}#{sampler_id}"


def kept_source(model_id: str, sampler_id: str, held: Container[str], num_held: int) -> str:
    """The `source_name`. Raises UnknownName if it is not among `held` any more, which has at most `num_held`."""
    source = source_name(model_id, sampler_id)
    if source not in held:
        raise UnknownName(
            f"sampler {sampler_id!r} is not in the workers' memory any more, which holds the newest {num_held}: "
            "save the weights again, under a name if they are to stay"
        )
    return source
