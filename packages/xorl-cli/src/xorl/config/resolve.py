"""Defaults that follow another option or the machine, filled in once a configuration is known to be valid."""

from xorl.config.environment import dataset_num_proc
from xorl.config.local import Config

GROUP_SIZES = {"nvfp4": 16, "block_fp8": 128, "nf4": 64}


def resolve(config: Config) -> tuple[Config, dict[str, str]]:
    """Returns the configuration with these defaults filled in, and for each of them why it is what it is.

    Raises ValueError when the environment names something that cannot be.
    """
    model, data, train, lora = config.model, config.data, config.train, config.lora
    values: dict[str, object] = {}
    reasons: dict[str, str] = {}

    def follow(path: str, value: object, reason: str) -> None:
        values[path] = value
        reasons[path] = reason

    # A checkpoint has neither file, and says itself what its model is and where its tokenizer was.
    folder = None if train.load_weights_mode == "dcp" else model.model_path
    if model.config_path is None and folder is not None:
        follow("model.config_path", folder, "default, model.model_path")
    if model.tokenizer_path is None and (model.config_path or folder) is not None:
        follow("model.tokenizer_path", model.config_path or folder, "default, model.config_path")
    if data.dataset_num_proc is None:
        follow("data.dataset_num_proc", *dataset_num_proc())
    if data.dataloader_num_workers == 0 and data.dataloader_prefetch_factor is not None:
        follow("data.dataloader_prefetch_factor", None, "default, data.dataloader_num_workers is 0")
    if train.reshard_after_forward is None and train.data_parallel_mode == "fsdp2":
        follow("train.reshard_after_forward", train.enable_full_shard, "default, train.enable_full_shard")
    if train.param_dtype is None:
        is_frozen_in_half = (lora.enable_lora or lora.enable_qlora) and train.enable_mixed_precision
        reason = "default, lora.enable_lora" if lora.enable_lora or lora.enable_qlora else ""
        follow("train.param_dtype", "bf16" if is_frozen_in_half else "fp32", reason)
    if train.load_checkpoint_path == "":
        follow("train.load_checkpoint_path", None, "")
    if train.load_weights_mode in ("auto", "safetensors"):
        follow("train.load_weights_mode", "broadcast", "")
    if lora.enable_qlora and not lora.enable_lora:
        follow("lora.enable_lora", True, "default, lora.enable_qlora")
    if lora.enable_qlora and lora.quant_group_size is None:
        follow(
            "lora.quant_group_size", GROUP_SIZES[lora.quant_format], f"default, lora.quant_format {lora.quant_format}"
        )

    sections = {
        name: section.model_copy(
            update={path.split(".")[1]: value for path, value in values.items() if path.startswith(f"{name}.")}
        )
        for name, section in (("model", model), ("data", data), ("train", train), ("lora", lora))
    }
    return config.model_copy(update=sections), {path: reason for path, reason in reasons.items() if reason}
