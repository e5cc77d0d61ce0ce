"""Conflicts between options of preference losses, and the losses for which each option matters."""

from collections.abc import Iterator

from xorl.config.local import Config
from xorl.config.problems import Conflict
from xorl.config.requirement import Requirement

# The losses with a reference model.
WITH_REFERENCE = ("dpo", "kto")
# The losses that each option belongs to.
_LOSSES_OF: dict[str, tuple[str, ...]] = {
    "preference_beta": ("dpo", "orpo", "kto", "simpo"),
    "preference_reference": WITH_REFERENCE,
    "preference_label_smoothing": ("dpo", "simpo"),
    "dpo_length_normalized": ("dpo",),
    "simpo_gamma": ("simpo",),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
}


def _requirement(option: str, losses: tuple[str, ...]) -> Requirement:
    return Requirement(
        (f"train.{option}",), "train.loss", " or ".join(losses), lambda config: config.train.loss in losses
    )


PREFERENCE_REQUIREMENTS = tuple(_requirement(option, losses) for option, losses in _LOSSES_OF.items())


def prefers(config: Config) -> bool:
    """Whether the loss is of pairs of answers."""
    return config.train.loss != "cross_entropy"


def base_changes(config: Config) -> str | None:
    """The option with which a model without its adapters is not the one that the run starts from; None: there is none.

    Without adapters at all, that is lora.enable_lora.
    """
    lora = config.lora
    if not lora.has_adapters:
        return "lora.enable_lora"
    options = ("modules_to_save", "merge_lora_interval", "adapter_path")
    return next((f"lora.{option}" for option in options if getattr(lora, option)), None)


def preference_conflicts(config: Config) -> Iterator[Conflict]:
    """Yields conflicts of preference losses with the data and with what trains."""
    train, loss = config.train, "train.loss"
    for name in ("datasets", "test_datasets"):
        for index, entry in enumerate(getattr(config.data, name)):
            # The rows of auto and of prepared folders are known only when they are read.
            if entry.type == "preference" and not prefers(config):
                yield Conflict(
                    (f"data.{name}.{index}.type", loss),
                    "pairs of answers need a loss of pairs: set train.loss to dpo, orpo, kto or simpo",
                )
            if prefers(config) and (entry.path == "dummy" or entry.type not in ("preference", "auto")):
                yield Conflict(
                    (f"data.{name}.{index}.type", loss),
                    f"loss {train.loss} compares pairs of answers: set the type to preference (columns prompt, chosen "
                    "and rejected), or the loss to cross_entropy",
                )
    if not prefers(config):
        return
    if config.lora.sweep:
        yield Conflict((loss, "lora.sweep"), "a sweep trains with cross_entropy: train the members one by one")
    if train.loss in WITH_REFERENCE:
        yield from _reference_conflicts(config)
    if train.loss == "kto" and train.micro_batch_size > 1:
        yield Conflict(
            ("train.micro_batch_size", loss),
            "kto compares the pairs of one bin: set micro_batch_size to 1, and sample_packing_sequence_len to as many "
            "tokens",
        )


def _reference_conflicts(config: Config) -> Iterator[Conflict]:
    option, reference = "train.preference_reference", config.train.preference_reference
    changed = base_changes(config)
    reasons = {
        "lora.enable_lora": "there are no adapters to switch off",
        "lora.modules_to_save": "modules_to_save trains other weights beside the adapters",
        "lora.merge_lora_interval": "merge_lora_interval changes the base",
    }
    if reference == "base" and changed in reasons:
        yield Conflict((option, changed), f"{reasons[changed]}, so the base is no reference: set it to initial")
    is_initial = reference == "initial" or (reference is None and changed is not None)
    if is_initial and config.data.streaming:
        yield Conflict(
            (option, "data.streaming"),
            "the initial model scores all pairs before the first step, but a stream is read only once: set streaming "
            "to false, or train adapters with preference_reference: base",
        )
