"""The model of a service that trains full weights: there is one at a time, and it trains the base's parameters."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from xorl.ckpt import Stateful
from xorl.ckpt.layout import JSON
from xorl.core.loss import LossFn
from xorl.core.shards import local
from xorl.lora import Adam
from xorl.server.operations import LoraSpec
from xorl.server.worker.base import Base
from xorl.server.worker.models import UnknownName
from xorl.server.worker.passes import Row
from xorl.train.build import engine_over
from xorl.train.engine import Engine, OnOutput, StepLosses, Update

logger = logging.getLogger(__name__)

# The maximum number of sources. Each takes this rank's part of the model in host memory once the model has changed.
NUM_SOURCES = 2
# The number of rows of a rank after which gradients are reduced. More would make other work wait longer; fewer would
# reduce more often. A call with at most this many rows on each rank is reduced once.
ROWS_PER_REDUCTION = 16


class WholeRows:
    """Runs rows with the whole model (see `passes.RowEngine`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def rows_per_block(self, *, forward_only: bool) -> int:
        """More than one for gradients, which are reduced at the end of each block whether or not other work waits."""
        return 1 if forward_only else ROWS_PER_REDUCTION

    @contextmanager
    def gradients_kept(self, model_ids: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        with self._engine.gradients_kept():
            yield {}

    def forward_backward(
        self,
        rows: Sequence[Row],
        loss_fn: LossFn,
        model_ids: Sequence[str],
        on_output: OnOutput,
        whole: AbstractContextManager[None],
    ) -> Mapping[str, StepLosses]:
        (model_id,) = model_ids
        with whole:
            losses = self._engine.forward_backward([batch for ((_, batch),) in rows], loss_fn, on_output)
        # Discard the timings: the service does not report them, and they would pile up without optimizer steps.
        self._engine.timer.take()
        return {model_id: losses}

    def forward(self, rows: Sequence[Row], loss_fn: LossFn, on_output: OnOutput) -> None:
        try:
            for index, ((_, batch),) in enumerate(rows):
                output = self._engine.forward(batch, loss_fn)
                if output is not None:
                    on_output(index, output)
        except BaseException:
            self._engine.model.recover()
            raise


class WholeModel:
    """One client's model (see `models.Models`). Sources to sample from are copies of its weights in host memory.

    A source that was saved from the model is copied only when the model changes; until then it shares its weights.
    """

    max_per_pass = 1
    samples_together = False

    def __init__(self, base: Base) -> None:
        self._base = base
        self._engine = engine_over(base.model, base.local, base.architecture, base.device)
        self.engine = WholeRows(self._engine)
        self._model_id: str | None = None
        # Sources by name: their weights, or None while these are the model's current weights.
        self._sources: OrderedDict[str, dict[str, Tensor] | None] = OrderedDict()
        self._is_base = True  # the weights are still the base's

    @property
    def names(self) -> Sequence[str]:
        return () if self._model_id is None else (self._model_id,)

    def create(self, model_id: str, lora: LoraSpec | None, saved: Mapping[str, JSON] | None) -> None:
        if saved is not None and saved.get("lora") is not None:
            raise ValueError("the checkpoint holds an adapter, but this service trains full weights")
        if self._model_id is not None:
            raise ValueError(
                f"this service trains full weights of one model at a time, currently {self._model_id!r}: unload it, or "
                "start the service with enable_lora: true"
            )
        if not self._is_base:
            self._before_change()
            self._base.fill()
            self._is_base = True
        self._model_id = model_id
        self._reset_optimizer()

    def remove(self, model_id: str) -> None:
        """Remove the model, and all sources, which may share its weights; the next model starts from the base's."""
        self._require(model_id)
        self._engine.zero_grad()
        self._model_id = None
        self._sources.clear()

    def describe(self, model_id: str) -> dict[str, JSON]:
        self._require(model_id)
        return {"lora": None}

    def lora(self, model_id: str) -> tuple[int, float] | None:
        self._require(model_id)
        return None

    def step(self, model_id: str, adam: Adam, divisor: float, max_norm: float | None, *, with_norms: bool) -> Update:
        """Take a step of the service's optimizer; norms are grouped by the names of the parameters' modules."""
        self._require(model_id)
        self._before_change()
        self._is_base = False
        return self._engine.optim_step_with(adam, divisor, max_norm, _kind_of if with_norms else None)

    def zero_grad(self, model_id: str) -> None:
        self._require(model_id)
        self._engine.zero_grad()

    def state(self, model_id: str, *, with_optimizer: bool) -> Mapping[str, Stateful]:
        self._require(model_id)
        state = self._engine.state()
        return state if with_optimizer else {"model": state["model"]}

    def after_loading(self, model_id: str, *, keeps_optimizer: bool) -> None:
        self._require(model_id)
        self._base.model.drop_gathered()
        self._engine.zero_grad()
        if not keeps_optimizer:
            self._reset_optimizer()

    def before_loading(self, model_id: str) -> None:
        """Copy the weights for sources that share them."""
        self._require(model_id)
        # Set even if the load fails later on some ranks, so that all ranks agree.
        self._is_base = False
        self._before_change()

    def adapter_files(self, model_id: str) -> None:
        self._require(model_id)

    def snapshot(self, model_id: str, source: str) -> None:
        """Keep the current weights; copied when the model changes."""
        self._require(model_id)
        self.release_source(source)
        self._make_room()
        self._sources[source] = None

    def has_source(self, source: str) -> bool:
        return source in self._sources

    def load_source(
        self,
        source: str,
        saved: Mapping[str, JSON],
        read: Callable[[Mapping[str, Stateful]], None],
        *,
        has_optimizer: bool,
    ) -> None:
        del has_optimizer  # the optimizer's state is a separate part of the checkpoint, which is not read
        if saved.get("lora") is not None:
            raise ValueError("the checkpoint holds an adapter, but this service trains full weights")
        # Evict before reading, so that a rank that fails to read has evicted the same sources as the others.
        self._make_room()
        current = self._copy()
        try:
            read({"model": self._engine.state()["model"]})
            loaded = self._copy()
        finally:
            self._put(current)
        self._sources[source] = loaded

    def release_source(self, source: str) -> None:
        self._sources.pop(source, None)

    def release_idle_sources(self, needed: Collection[str | None]) -> None:
        """Has nothing to do: a new source replaces an old one, since each may take as much memory as the model."""

    @contextmanager
    def sampling_from(self, sources: Sequence[str | None]) -> Iterator[Sequence[str | None]]:
        """Put the weights of the source, the same for all, into the model; restore the model's own on exit."""
        (source,) = set(sources)
        if source is not None:
            self._sources.move_to_end(source)
        weights = None if source is None else self._sources[source]
        if weights is None and (source is not None or self._is_base):
            yield [None] * len(sources)
            return
        current = self._copy()
        try:
            if weights is None:
                self._base.fill()
            else:
                self._put(weights)
            yield [None] * len(sources)
        finally:
            self._put(current)

    def _require(self, model_id: str) -> None:
        if model_id != self._model_id:
            raise UnknownName(f"there is no model {model_id!r} on the workers")

    def _make_room(self) -> None:
        while len(self._sources) >= NUM_SOURCES:
            evicted, _ = self._sources.popitem(last=False)
            logger.info("event=source_dropped source=%s", evicted)

    def _before_change(self) -> None:
        """Copy the weights for the sources that share the model's."""
        sharing = [source for source, weights in self._sources.items() if weights is None]
        if sharing:
            copied = self._copy()
            self._sources.update(dict.fromkeys(sharing, copied))

    @torch.no_grad()
    def _copy(self) -> dict[str, Tensor]:
        """This rank's part of the weights, in host memory."""
        self._base.model.drop_gathered()
        return {name: local(weight).cpu().clone() for name, weight in self._base.module.named_parameters()}

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        self._base.model.drop_gathered()
        for name, weight in self._base.module.named_parameters():
            local(weight).copy_(weights[name])
        self._base.model.drop_gathered()

    def _reset_optimizer(self) -> None:
        for values in self._engine.optimizer.state.values():
            for value in values.values():
                if isinstance(value, Tensor):
                    value.zero_()


def _kind_of(name: str) -> str:
    return name.split(".")[-2]
