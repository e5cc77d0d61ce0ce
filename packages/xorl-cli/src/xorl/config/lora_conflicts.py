"""Conflicts between options of adapters and of quantised bases; the rest are in conflicts.py."""

from collections.abc import Callable, Iterator

from xorl.config.local import Config
from xorl.config.problems import Conflict


def _adapters_are_on(config: Config) -> Iterator[Conflict]:
    lora = config.lora
    if lora.save_lora_only and not (lora.enable_lora or lora.enable_qlora):
        yield Conflict(
            ("lora.save_lora_only", "lora.enable_lora"), "there is no adapter to save: set enable_lora or enable_qlora"
        )
    if lora.reset_optimizer_on_merge and lora.merge_lora_interval == 0:
        yield Conflict(
            ("lora.reset_optimizer_on_merge", "lora.merge_lora_interval"),
            "reset_optimizer_on_merge needs merge_lora_interval > 0",
        )
    if lora.save_lora_only and config.model.model_path is None:
        yield Conflict(
            ("lora.save_lora_only", "model.model_path"),
            "model_path is null, so the base has random weights that would be nowhere: set save_lora_only to false",
        )
    if lora.save_lora_only and lora.merge_lora_interval:
        yield Conflict(
            ("lora.save_lora_only", "lora.merge_lora_interval"),
            "merging changes the base weights, without which adapters saved alone mean nothing: set save_lora_only to "
            "false, or merge_lora_interval to 0",
        )
    if lora.lora_target_modules == []:
        yield Conflict(
            ("lora.lora_target_modules",),
            "the list is empty: name layers, or leave the option out for those that the architecture names",
        )


def _adapters_alone_stand_on_their_base_as_it_is(config: Config) -> Iterator[Conflict]:
    for name in _writers_of_adapters_alone(config) if config.model.foundation else ():
        yield Conflict(
            ("model.foundation", f"lora.{name}"),
            f"{name} writes adapters alone, and whoever puts them on their base reads its own config.json: edit a "
            "copy of that and set model.config_path to its folder",
        )


def _adapters_alone_stand_on_a_base_that_others_read(config: Config) -> Iterator[Conflict]:
    for name in _writers_of_adapters_alone(config) if config.train.load_weights_mode == "dcp" else ():
        yield Conflict(
            ("train.load_weights_mode", f"lora.{name}"),
            f"{name} writes adapters alone, and nobody else reads a checkpoint as their base: make a model of it "
            "with `xorl export`, set model.model_path to that, and leave load_weights_mode at broadcast",
        )


def _writers_of_adapters_alone(config: Config) -> list[str]:
    options = {"save_lora_only": config.lora.save_lora_only, "sweep": bool(config.lora.sweep)}
    return [name for name, is_set in options.items() if is_set]


def _quantized_weights_stay_as_they_are(config: Config) -> Iterator[Conflict]:
    if not config.lora.enable_qlora:
        return
    if config.train.fp8 != "none":
        yield Conflict(
            ("train.fp8", "lora.enable_qlora"),
            "quantized layers multiply with their dequantized weights, in the compute dtype: leave train.fp8 at none",
        )
    if config.train.enable_cpu_offload:
        yield Conflict(
            ("train.enable_cpu_offload", "lora.enable_qlora"),
            "quantized weights are kept on the device, where they take little: leave enable_cpu_offload at false",
        )


LORA_CHECKS: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    _adapters_are_on,
    _adapters_alone_stand_on_their_base_as_it_is,
    _adapters_alone_stand_on_a_base_that_others_read,
    _quantized_weights_stay_as_they_are,
)
