"""Adds the adapters of the lora section to a model, and merges them into it while training."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

import torch

from xorl.config.local import LoraConfig
from xorl.core.models import Decoder, DecoderConfig, ModelSpec, training_flops
from xorl.core.models.flops import matmul_parameters
from xorl.core.nn import Embedding, Linear
from xorl.core.parallel import ParallelModel
from xorl.lora import Adapter, AdapterSpec, adapter_parameters, adapters, init_adapters, inject
from xorl.lora.experts import ExpertLowRank
from xorl.lora.merge import fold_
from xorl.lora.peft import config_of
from xorl.lora.spec import ExpertSharing
from xorl.train.adapters.folder import AdapterFolder, open_adapter

logger = logging.getLogger(__name__)

# Fields of AdapterSpec and their options, if the names differ: its error messages begin with the field.
OPTIONS = {
    "targets": "lora_target_modules",
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "form": "moe_lora_format",
}


# The options that make the experts of a layer share factors.
SHARING_OPTIONS: Mapping[ExpertSharing, str] = MappingProxyType(
    {"all": "moe_shared_lora", "outer": "moe_hybrid_shared_lora"}
)


def starting_adapter(lora: LoraConfig, family: ModelSpec) -> AdapterFolder | None:
    """The adapter that `lora.adapter_path` names, for a model of this family, or None."""
    if lora.adapter_path is None:
        return None
    return open_adapter("lora.adapter_path", lora.adapter_path, family.checkpoint_names.experts)


def adapter_spec(lora: LoraConfig, family: ModelSpec, config: DecoderConfig) -> AdapterSpec | None:
    """The adapters of the lora section, on the family's targets if it names none; None without adapters.

    If training starts from an existing adapter, its files determine everything but the dropout.
    """
    if not lora.enable_lora:
        return None
    start = starting_adapter(lora, family)
    if start is not None:
        return replace(start.layout.spec, dropout=lora.lora_dropout)
    targets = lora.lora_target_modules
    if targets is None:
        targets = family.default_targets(config)
    return AdapterSpec(
        rank=lora.lora_rank,
        alpha=lora.lora_alpha,
        targets=targets if isinstance(targets, str) else tuple(targets),
        dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        rank_pattern=lora.rank_pattern,
        alpha_pattern=lora.alpha_pattern,
        modules_to_save=tuple(lora.modules_to_save),
        expert_sharing=expert_sharing(lora),
    )


def expert_sharing(lora: LoraConfig) -> ExpertSharing:
    """The factors that the options share between the experts of a layer."""
    if lora.moe_shared_lora:
        return "all"
    return "outer" if lora.moe_hybrid_shared_lora else "none"


def add_adapters(module: Decoder, lora: LoraConfig, family: ModelSpec) -> None:
    """Add the adapters of the lora section, if any, to a model that is not parallelized yet, and freeze the rest.

    For a sweep this only freezes the base: its adapters are in a bank, which is made after the model is parallelized.

    Raises ValueError that begins with the option at fault.
    """
    if lora.sweep:
        module.requires_grad_(False)
        return
    try:
        spec = adapter_spec(lora, family, module.config)
        if spec is not None:
            inject(module, spec)
            config_of(module, spec, base=None, form=lora.moe_lora_format)  # refuses a form before anything is trained
    except ValueError as error:
        if str(error).startswith("lora.adapter_path"):
            raise
        if lora.adapter_path is not None and not str(error).startswith("form: "):
            # The field at fault is from the adapter's files, not from an option.
            raise ValueError(f"lora.adapter_path: {lora.adapter_path}: {error}") from error
        message = str(error)
        field = re.split(r"\W", message, maxsplit=1)[0]
        options = {**OPTIONS, "expert_sharing": SHARING_OPTIONS.get(expert_sharing(lora), "")}
        raise ValueError(f"lora.{options.get(field, field)}: {message.removeprefix(f'{field}: ')}") from error


def flops_of(config: DecoderConfig, module: Decoder) -> Callable[[Sequence[int]], int]:
    """Returns a function from lengths of documents to the floating-point operations of a step on them.

    See `training_flops`; those of images are apart.
    """
    linear_adapters = [adapter for adapter in adapters(module).values() if not adapter.is_embedding]
    num_added = sum(map(num_used, linear_adapters))
    trained = sum(
        _num_elements(layer)
        for layer in chain(module.model.modules(), [] if module.lm_head is None else module.lm_head.modules())
        if isinstance(layer, Linear) and any(weight.requires_grad for weight in layer.parameters(recurse=False))
    )
    if module.lm_head is None and module.head_weight.requires_grad:
        assert module.model.embed_tokens is not None, "of the whole model"
        trained += _num_elements(module.model.embed_tokens)
    num_frozen = matmul_parameters(config) - trained

    def flops(lengths: Sequence[int]) -> int:
        return training_flops(config, lengths, num_frozen=num_frozen, num_added=num_added)

    return flops


def _num_elements(layer: Linear | Embedding) -> int:
    """The number of elements of its weight, with those that other ranks hold."""
    shape = layer.weight.shape
    return math.prod(layer.shares["weight"].whole(shape) if "weight" in layer.shares else shape)


def num_used(adapter: Adapter) -> int:
    """The elements of an adapter that a token is multiplied with."""
    pair = adapter.pair
    if not isinstance(pair, ExpertLowRank):
        return math.prod(adapter.shape("A")) + math.prod(adapter.shape("B"))
    # An outer factor that experts share is applied once, before the token goes to experts or after it comes back.
    outer = "B" if pair.projection == "down_proj" else "A"
    return sum(
        pair.factor(leaf).numel() // pair.count(leaf) * (1 if is_early else pair.num_active)
        for leaf in ("A", "B")
        for is_early in [leaf == outer and leaf in pair.shared]
    )


class AdapterMerging:
    """Merges adapters into the base every `interval` steps and reinitialises them (ReLoRA, arXiv:2307.05695).

    It merges before the next step rather than after the last one, so a checkpoint in between holds trained adapters,
    and a run resumed from it merges at the same step.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        *,
        interval: int,
        seed: int,
        resets_optimizer: bool,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._interval = interval
        self._seed = seed
        self._resets_optimizer = resets_optimizer

    def before(self, step: int) -> None:
        """Merge if step `step`, counted from 1, is the first after an interval. Collective."""
        generation, is_later = divmod(step - 1, self._interval)
        if is_later or generation == 0:
            return
        self._model.drop_gathered()
        fold_(self._model.module)
        init_adapters(self._model.module, seed=self._seed, generation=generation)
        self._model.drop_gathered()
        if self._resets_optimizer:
            for parameter in adapter_parameters(self._model.module).values():
                for value in self._optimizer.state.get(parameter, {}).values():
                    value.zero_()
        logger.info("adapters=merged after_step=%d reset_optimizer=%s", step - 1, self._resets_optimizer)
