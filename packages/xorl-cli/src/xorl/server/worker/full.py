"""The one client's model where the whole model is trained: its weights are those of the base, until it is removed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from xorl.ckpt import JSON, Stateful
from xorl.core.loss import LossFn
from xorl.core.parallel import local_part
from xorl.lora import Adam
from xorl.server.operations import LoraSpec
from xorl.server.worker.base import Base
from xorl.server.worker.models import UnknownName, kept_source, source_name
from xorl.server.worker.passes import Row
from xorl.train.build import engine_over
from xorl.train.engine import Engine, OnOutput, Update

logger = logging.getLogger(__name__)

# Each takes this rank's part of the model in host memory, once the model has changed.
NUM_SOURCES = 2


class WholeRows:
    """Runs rows with the whole model (see `passes.RowEngine`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def gradients_kept(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """The model's, whatever the rows."""
        return self._engine.gradients_kept()

    def forward_backward(
        self,
        rows: Sequence[Row],
        loss_fn: LossFn,
        model_ids: Sequence[str],
        on_output: OnOutput,
        whole: AbstractContextManager[None],
    ) -> None:
        """Add the gradient."""
        assert len(model_ids) == 1, "one model"
        with whole:
            self._engine.forward_backward([batch for ((_, batch),) in rows], loss_fn, on_output)
        # Nobody reads them here, and a client may never step.
        self._engine.timer.take()

    def forward(self, rows: Sequence[Row], loss_fn: LossFn, on_output: OnOutput) -> None:
        """The losses alone."""
        try:
            for index, ((_, batch),) in enumerate(rows):
                on_output(index, self._engine.forward(batch, loss_fn))
        except BaseException:
            self._engine.model.recover()
            raise


class WholeModel:
    """One client's model (see `models.Models`); sources to sample from are copies of its weights in host memory.

    A copy is made when the model changes, and not before.
    """

    max_per_pass = 1
    samples_together = False

    def __init__(self, base: Base) -> None:
        self._base = base
        self._train = engine_over(base.model, base.local, base.architecture, base.device)
        self.engine = WholeRows(self._train)
        self._model_id: str | None = None
        # Sources by name: weights, or None while the model has these itself.
        self._sources: OrderedDict[str, dict[str, Tensor] | None] = OrderedDict()
        self._is_base = True

    @property
    def names(self) -> Sequence[str]:
        """The model, if there is one."""
        return () if self._model_id is None else (self._model_id,)

    def create(self, model_id: str, lora: LoraSpec | None, saved: Mapping[str, JSON] | None) -> None:
        """The base's weights, from the beginning."""
        if saved is not None and saved.get("lora") is not None:
            raise ValueError("the checkpoint is of an adapter, and this service trains full weights")
        if self._model_id is not None:
            raise ValueError(
                f"this service trains full weights, of one model at a time, which is {self._model_id!r}: unload it, or "
                "start the service with enable_lora: true"
            )
        if not self._is_base:
            self._before_change()
            self._base.fill()
            self._is_base = True
        self._model_id = model_id
        self._forget_optimizer()

    def remove(self, model_id: str) -> None:
        """Forget it; the next one begins with the base's weights."""
        self._require(model_id)
        self._train.zero_grad()
        self._model_id = None
        self._sources.clear()

    def described(self, model_id: str) -> dict[str, JSON]:
        """Full weights need nothing else."""
        self._require(model_id)
        return {"lora": None}

    def lora(self, model_id: str) -> tuple[int, float] | None:
        """None."""
        self._require(model_id)
        return None

    def step(self, model_id: str, adam: Adam, divisor: float, max_norm: float | None, *, with_norms: bool) -> Update:
        """One step of the service's optimizer; norms are by the names of the modules that have the parameters."""
        self._require(model_id)
        self._before_change()
        self._is_base = False
        return self._train.optim_step_with(adam, divisor, max_norm, _kind_of if with_norms else None)

    def zero_grad(self, model_id: str) -> None:
        """Forget what was accumulated."""
        self._require(model_id)
        self._train.zero_grad()

    def state(self, model_id: str, *, with_optimizer: bool) -> Mapping[str, Stateful]:
        """What local training saves."""
        self._require(model_id)
        state = self._train.state()
        return state if with_optimizer else {"model": state["model"]}

    def loaded(self, model_id: str, *, keeps_optimizer: bool) -> None:
        """Its weights are others now."""
        self._require(model_id)
        self._base.model.drop_gathered()
        self._train.zero_grad()
        if not keeps_optimizer:
            self._forget_optimizer()

    def before_loading(self, model_id: str) -> None:
        """Its weights are about to be others."""
        self._require(model_id)
        # Whatever comes of it, so that all ranks know the same.
        self._is_base = False
        self._before_change()

    def adapter_files(self, model_id: str) -> None:
        """None: the weights are its own."""
        self._require(model_id)

    def keep(self, model_id: str, sampler_id: str) -> None:
        """Its weights as they are now, which the model has until it changes."""
        self._require(model_id)
        source = source_name(model_id, sampler_id)
        self.release(source)
        self._make_room()
        self._sources[source] = None

    def kept(self, model_id: str, sampler_id: str) -> str:
        """The source that `keep` made."""
        return kept_source(model_id, sampler_id, self._sources, NUM_SOURCES)

    def is_held(self, source: str) -> bool:
        """Whether its weights are in memory."""
        return source in self._sources

    def hold(
        self,
        source: str,
        saved: Mapping[str, JSON],
        read: Callable[[Mapping[str, Stateful]], None],
        *,
        has_optimizer: bool,
    ) -> None:
        """A checkpoint's weights in host memory."""
        del has_optimizer  # it is a part of its own, which is not read
        if saved.get("lora") is not None:
            raise ValueError("the checkpoint is of an adapter, and this service trains full weights")
        # Checkpoints can be read again, so one makes room for the next; what a client keeps is nowhere else.
        checkpoints = [held for held in self._sources if not held.startswith(source_name(self._model_id or "", ""))]
        if checkpoints and len(self._sources) >= NUM_SOURCES:
            self.release(checkpoints[0])
        # Before it is read, as a rank that cannot read it has to forget the same as the others.
        self._make_room()
        current = self._copy()
        try:
            read({"model": self._train.state()["model"]})
            loaded = self._copy()
        finally:
            self._put(current)
        self._sources[source] = loaded

    def release(self, source: str) -> None:
        """Forget a copy."""
        self._sources.pop(source, None)

    @contextmanager
    def sampling(self, sources: Sequence[str | None]) -> Iterator[Sequence[str | None]]:
        """All sources are one. Where the model has other weights, these take their place for so long."""
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
            gone, _ = self._sources.popitem(last=False)
            logger.info("event=source_dropped source=%s", gone)

    def _before_change(self) -> None:
        """Copy the weights for the sources that rely on the model's."""
        waiting = [source for source, weights in self._sources.items() if weights is None]
        if waiting:
            copied = self._copy()
            self._sources.update(dict.fromkeys(waiting, copied))

    @torch.no_grad()
    def _copy(self) -> dict[str, Tensor]:
        """This rank's part of the weights, in host memory."""
        self._base.model.drop_gathered()
        return {name: local_part(weight)[0].cpu().clone() for name, weight in self._base.module.named_parameters()}

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        self._base.model.drop_gathered()
        for name, weight in self._base.module.named_parameters():
            local_part(weight)[0].copy_(weights[name])
        self._base.model.drop_gathered()

    def _forget_optimizer(self) -> None:
        for values in self._train.optimizer.state.values():
            for value in values.values():
                if isinstance(value, Tensor):
                    value.zero_()


def _kind_of(name: str) -> str:
    return name.split(".")[-2]
