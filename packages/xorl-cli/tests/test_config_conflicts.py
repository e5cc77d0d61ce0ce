"""Options that cannot stand together, and numbers of processes that cannot be arranged."""

from typing import Any

import pytest

from xorl.config import Config, ConfigError, LoadedConfig, config_from_mapping
from xorl.config.conflicts import check_world_size
from xorl.config.data_conflicts import FORMAT_COLUMNS, FORMAT_TARGETS
from xorl.config.document import read_document
from xorl.config.options import ENTRIES, all_options
from xorl.config.show import show
from xorl.data.choose import COLUMN_KEYS, TARGETS

Options = dict[str, dict[str, Any]]


def loaded_with(**changes: dict[str, Any]) -> LoadedConfig:
    """Loads a sound configuration with some options set."""
    data: Options = {
        "model": {"model_path": "m"},
        "data": {"datasets": [{"path": "a"}]},
        "train": {"output_dir": "o"},
        "lora": {},
    }
    for section, options in changes.items():
        data[section] |= options
    return config_from_mapping(data)


def test_what_a_type_of_data_takes_is_what_its_format_takes() -> None:
    # Would catch a configuration that is refused for what a format reads, or accepted for what it does not: the tables
    # stand twice, since a configuration is checked without torch.
    assert (FORMAT_TARGETS, FORMAT_COLUMNS) == (TARGETS, COLUMN_KEYS)


def entry(**options: Any) -> dict[str, Any]:
    return {"datasets": [{"path": "a", **options}]}


def swept(*members: dict[str, Any], **lora: Any) -> dict[str, Any]:
    named = [{"name": f"m{index}", **member} for index, member in enumerate(members)]
    return {"lora": {"enable_lora": True, "sweep": named, **lora}}


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"model": {"model_path": None}}, "model.model_path", "both are null"),
        ({"data": entry(data_files="x.json")}, "data.datasets.0.data_files", "needs ds_type"),
        ({"data": entry(shards=2)}, "data.datasets.0.shards", "needs shards_idx, the part to use (0 to 1)"),
        ({"data": entry(shards_idx=1)}, "data.datasets.0.shards_idx", "needs shards, the number"),
        ({"data": entry(shards=2, shards_idx=2)}, "data.datasets.0.shards_idx", "use 0 to 1"),
        ({"data": entry(shards=2, shards_idx=0, preprocess_shards=2)}, "data.datasets.0.preprocess_shards", "not both"),
        ({"data": entry(weight=1.0, num_epochs=2.0)}, "data.datasets.0.num_epochs", "not both"),
        (
            {"data": {"datasets": [{"path": "a", "weight": 1.0}, {"path": "b"}]}},
            "data.datasets.0.weight",
            "set them on every entry, or on none",
        ),
        ({"data": {"streaming": True}}, "data.streaming", "has no known length: set train.max_steps"),
        (
            {"data": {"streaming": True, "val_set_size": 5}, "train": {"max_steps": 3}},
            "data.val_set_size",
            "has no effect unless data.streaming is false",
        ),
        ({"data": {"push_dataset_to_hub": "a/b"}}, "data.push_dataset_to_hub", "needs hf_use_auth_token: true"),
        ({"data": {"dataset_shard_num": 3}}, "data.dataset_shard_num", "needs dataset_shard_idx"),
        ({"data": {"dataset_shard_idx": 0}}, "data.dataset_shard_idx", "needs dataset_shard_num"),
        ({"data": {"dataset_shard_num": 3, "dataset_shard_idx": 3}}, "data.dataset_shard_idx", "use 0 to 2"),
        ({"data": entry(max_seq_len=32001)}, "data.datasets.0.max_seq_len", "documents must fit into a bin"),
        ({"data": {"test_datasets": [{"path": "b"}], "val_set_size": 5}}, "data.val_set_size", "a single source"),
        (
            {"lora": {"enable_lora": True, "lora_dropout": 0.1}, "train": {"enable_compile": True}},
            "lora.lora_dropout",
            "draw random numbers",
        ),
        (
            {"lora": {"enable_lora": True, "use_dora": True}, "train": {"fp8": "tensorwise"}},
            "lora.use_dora",
            "needs their norms",
        ),
        (
            {"train": {"enable_profiling": True, "profile_start_step": 6, "profile_end_step": 8, "max_steps": 5}},
            "train.profile_start_step",
            "max_steps ends the run at 5",
        ),
        ({"train": {"optimizer": "muon", "lr": 0.0}}, "train.lr", "set lr above 0"),
        (
            {"train": {"param_dtype": "bf16", "enable_mixed_precision": False}},
            "train.param_dtype",
            "set enable_mixed_precision to true",
        ),
        (
            {"train": {"recompute_policy": "operation", "enable_activation_offload": True}},
            "train.enable_activation_offload",
            "cannot be offloaded",
        ),
        (
            {"train": {"enable_compile": True, "enable_reentrant": True}},
            "train.enable_reentrant",
            "cannot be compiled",
        ),
        (
            {"train": {"fp8": "rowwise", "enable_mixed_precision": False}},
            "train.fp8",
            "enable_mixed_precision is true",
        ),
        ({"train": {"fp8": "tensorwise", "enable_cpu_offload": True}}, "train.fp8", "casts the gathered weights"),
        (
            {"model": {"model_path": None, "config_path": "c"}, "train": {"load_weights_mode": "dcp"}},
            "train.load_weights_mode",
            "unless model.model_path is set",
        ),
        (
            {"train": {"load_weights_mode": "dcp"}, "lora": {"enable_lora": True, "save_lora_only": True}},
            "train.load_weights_mode",
            "convert it with `xorl export`",
        ),
        (
            {"train": {"reshard_after_forward": True, "enable_full_shard": False}},
            "train.reshard_after_forward",
            "remove one of the two",
        ),
        (
            {"train": {"data_parallel_mode": "none", "data_parallel_shard_size": 2}},
            "train.data_parallel_shard_size",
            "none uses a single process",
        ),
        (
            {"train": {"data_parallel_mode": "none", "data_parallel_replicate_size": 2}},
            "train.data_parallel_replicate_size",
            "none uses a single process",
        ),
        (
            {"train": {"data_parallel_mode": "ddp", "data_parallel_shard_size": 2}},
            "train.data_parallel_shard_size",
            "ddp does not shard",
        ),
        ({"train": {"tensor_parallel_size": 2}}, "train.tensor_parallel_size", "model.merge_qkv: false"),
        (
            {"train": {"lr": 1e-5, "lr_start": 1e-4, "lr_warmup_ratio": 0.1}},
            "train.lr_start",
            "is above lr",
        ),
        (
            {"data": {"streaming": True, **entry(shards=2, shards_idx=0)}, "train": {"max_steps": 3}},
            "data.datasets.0.shards",
            "a stream is not split",
        ),
        ({"train": {"lr": 1e-5, "lr_min": 1e-4, "lr_decay_style": "linear"}}, "train.lr_min", "is above lr"),
        (
            {"train": {"lr_decay_style": "linear", "lr_warmup_ratio": 0.5, "lr_decay_ratio": 0.4}},
            "train.lr_decay_ratio",
            "would end before the warm-up",
        ),
        ({"train": {"enable_full_determinism": True}}, "train.enable_full_determinism", "allow_cuda_launch_blocking"),
        (
            {"train": {"enable_profiling": True, "profile_end_step": 1}},
            "train.profile_end_step",
            "must be greater than profile_start_step",
        ),
        (
            {"model": {"foundation": {"rope_theta": 5.0}}, "lora": {"enable_lora": True, "save_lora_only": True}},
            "model.foundation",
            "with its own config.json",
        ),
        ({"lora": {"enable_lora": True, "lora_target_modules": []}}, "lora.lora_target_modules", "the list is empty"),
        (
            {"model": {"config_path": "c", "model_path": None}, "lora": {"enable_lora": True, "save_lora_only": True}},
            "lora.save_lora_only",
            "would not be saved anywhere",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes: Options, path: str, message: str) -> None:
    # Would catch a run in which one of two options silently wins.
    with pytest.raises(ConfigError) as caught:
        loaded_with(**changes)
    found = [(problem.path, problem.message) for problem in caught.value.problems]
    assert [at for at, text in found if message in text] == [path], found


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        (
            {"data": {"streaming": True}, "train": {"max_steps": 3, "save_epochs": 0.5}},
            "train.save_epochs",
            "use train.save_steps",
        ),
        (
            {"data": {"streaming": True, **entry(preprocess_shards=2)}, "train": {"max_steps": 3}},
            "data.datasets.0.preprocess_shards",
            "data.streaming is false",
        ),
        (
            {"data": {"num_dataset_shards_to_save": 2, "skip_prepare_dataset": True}},
            "data.num_dataset_shards_to_save",
            "skip_prepare_dataset is false",
        ),
        ({"data": {"hf_use_auth_token": True}}, "data.hf_use_auth_token", "is a Hub id"),
        (
            {"model": {"lm_head_fp32": False}, "train": {"enable_mixed_precision": False}},
            "model.lm_head_fp32",
            "enable_mixed_precision is true",
        ),
        ({"model": {"attention_cast_bf16": True}}, "model.attention_cast_bf16", "enable_mixed_precision is false"),
        ({"train": {"eval_steps": 5}}, "train.eval_steps", "data.val_set_size is set, or data.test_datasets"),
        ({"data": {"eval_sample_packing": False}}, "data.eval_sample_packing", "unless data.val_set_size is set"),
        (
            {"data": {"datasets": [{"path": "dummy", "split": "test"}]}},
            "data.datasets.0.split",
            "rows of dummy are synthetic",
        ),
        ({"data": {"sample_packing_group_size": 9}}, "data.sample_packing_group_size", "is multipack"),
        ({"data": {"sample_packing_mp_start_method": "spawn"}}, "data.sample_packing_mp_start_method", "is multipack"),
        (
            {"train": {"data_parallel_mode": "ddp", "reshard_after_forward": True}},
            "train.reshard_after_forward",
            "data_parallel_mode is fsdp2",
        ),
        (
            {"train": {"data_parallel_mode": "ddp", "enable_full_shard": False}},
            "train.enable_full_shard",
            "data_parallel_mode is fsdp2",
        ),
        (
            {"train": {"data_parallel_mode": "ddp", "fsdp_collectives": "nccl"}},
            "train.fsdp_collectives",
            "data_parallel_mode is fsdp2",
        ),
        (
            {"train": {"data_parallel_mode": "none", "enable_forward_prefetch": False}},
            "train.enable_forward_prefetch",
            "data_parallel_mode is fsdp2",
        ),
        (
            {"model": {"basic_modules": ["mlp"]}, "train": {"data_parallel_mode": "none"}},
            "model.basic_modules",
            "data_parallel_mode is fsdp2",
        ),
        (
            {"train": {"enable_gradient_checkpointing": False, "enable_reentrant": True}},
            "train.enable_reentrant",
            "enable_gradient_checkpointing is true",
        ),
        (
            {"train": {"enable_gradient_checkpointing": False, "recompute_policy": "operation"}},
            "train.recompute_policy",
            "enable_gradient_checkpointing is true",
        ),
        (
            {"train": {"recompute_policy": "operation", "recompute_modules": ["mlp"]}},
            "train.recompute_modules",
            "recompute_policy is module",
        ),
        (
            {"train": {"recompute_policy": "operation", "enable_reentrant": True}},
            "train.enable_reentrant",
            "recompute_policy is module",
        ),
        (
            {"train": {"data_parallel_mode": "ddp", "enable_cpu_offload": True}},
            "train.enable_cpu_offload",
            "data_parallel_mode is fsdp2",
        ),
        ({"train": {"optimizer_dtype": "fp32"}}, "train.optimizer_dtype", "is anyprecision_adamw or muon"),
        ({"train": {"optimizer": "sgd", "muon_momentum": 0.5}}, "train.muon_momentum", "optimizer is muon"),
        ({"train": {"activation_gpu_limit": 2.0}}, "train.activation_gpu_limit", "enable_activation_offload is true"),
        (
            {"train": {"recompute_policy": "auto", "enable_activation_offload": True}},
            "train.enable_activation_offload",
            "auto chooses it",
        ),
        (
            {"train": {"recompute_policy": "auto", "recompute_num_layers": 2}},
            "train.recompute_num_layers",
            "auto chooses it",
        ),
        (
            {"train": {"recompute_num_layers": 2, "enable_gradient_checkpointing": False}},
            "train.recompute_num_layers",
            "enable_gradient_checkpointing is true",
        ),
        ({"train": {"lr_min": 1e-6}}, "train.lr_min", "is linear or cosine"),
        ({"train": {"lr_decay_ratio": 0.5}}, "train.lr_decay_ratio", "is linear or cosine"),
        ({"train": {"lr_start": 1e-6}}, "train.lr_start", "lr_warmup_ratio is above 0"),
        ({"train": {"no_decay_modules": ["norm"]}}, "train.no_decay_modules", "weight_decay is above 0"),
        ({"train": {"no_decay_params": ["bias"]}}, "train.no_decay_params", "weight_decay is above 0"),
        (
            {"model": {"model_path": None, "config_path": "c"}, "train": {"load_weights_mode": "all_ranks"}},
            "train.load_weights_mode",
            "random weights are not read",
        ),
        ({"train": {"profile_rank0_only": False}}, "train.profile_rank0_only", "enable_profiling is true"),
        ({"train": {"lr": 1e-5, "lr_start": 1e-4}}, "train.lr_start", "lr_warmup_ratio is above 0"),
        (
            {"train": {"recompute_modules": ["mlp"], "enable_gradient_checkpointing": False}},
            "train.recompute_modules",
            "enable_gradient_checkpointing is true",
        ),
        ({"lora": {"save_lora_only": True}}, "lora.save_lora_only", "enable_lora is true"),
        (
            {"lora": {"reset_optimizer_on_merge": True}},
            "lora.reset_optimizer_on_merge",
            "merge_lora_interval is above 0",
        ),
        ({"lora": {"use_dora": True}}, "lora.use_dora", "enable_lora is true"),
        ({"lora": {"moe_shared_lora": True}}, "lora.moe_shared_lora", "enable_lora is true"),
        ({"lora": {"moe_lora_format": "peft"}}, "lora.moe_lora_format", "enable_lora is true"),
        ({"lora": {"adapter_path": "a"}}, "lora.adapter_path", "enable_lora is true"),
        ({"lora": {"sweep": [{"name": "a"}]}}, "lora.sweep", "enable_lora is true"),
        ({"lora": {"enable_lora": True, "sweep_members_per_pass": 2}}, "lora.sweep_members_per_pass", "lora.sweep is"),
        ({"lora": {"enable_lora": True, "quant_group_size": 16}}, "lora.quant_group_size", "enable_qlora is true"),
        ({"lora": {"aqn_alpha": 0.5}}, "lora.aqn_alpha", "enable_aqn is true"),
        (swept({}, save_lora_only=True), "lora.save_lora_only", "only saves adapters"),
        ({"data": entry(type="text", chat_template="a.jinja")}, "data.datasets.0.chat_template", "type is chat"),
        ({"data": entry(overflow="error", overflow_limit=0.1)}, "data.datasets.0.overflow_limit", "truncate"),
        ({"data": {"select_columns": ["a"], **entry(type="text")}}, "data.select_columns", "tokenized or auto"),
        ({"train": {"use_wandb": False, "wandb_name": "a"}}, "train.wandb_name", "use_wandb is true"),
        ({"train": {"lr_min": 1e-4, "lr": 1e-5}}, "train.lr_min", "is linear or cosine"),
        (
            {"data": {"dataloader_num_workers": 0, "dataloader_prefetch_factor": 4}},
            "data.dataloader_prefetch_factor",
            "dataloader_num_workers is above 0",
        ),
        ({"lora": {"enable_lora": True, "adapter_path": "a", "lora_rank": 8}}, "lora.lora_rank", "determine it"),
    ],
)
def test_an_option_without_effect_is_listed_and_reset(changes: Options, path: str, message: str) -> None:
    # Would catch an option that ends a run which it does not concern, or one that is ignored in silence.
    loaded = loaded_with(**changes)
    assert [option.path for option in loaded.without_effect] == [path]
    assert message in loaded.without_effect[0].condition
    assert path in (loaded.without_effect_line() or "")
    assert f"no effect {loaded.without_effect[0].condition}" in show(loaded)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"model_path": None, "config_path": "c"}},
        {"data": entry(data_files=["x.json"], ds_type="json")},
        {"data": entry(shards=2, shards_idx=1)},
        {"data": {"dataset_shard_num": 3, "dataset_shard_idx": 2}},
        {"data": {"streaming": True}, "train": {"max_steps": 3, "save_epochs": 0}},
        {"data": entry(max_seq_len=32000)},
        {"data": {"val_set_size": 0.05}, "train": {"eval_steps": 5}},
        {"data": {"test_datasets": [{"path": "b"}]}, "train": {"eval_steps": 5}},
        {"data": {"dataloader_num_workers": 0}},
        {"data": {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None}},
        {"train": {"reshard_after_forward": False, "enable_full_shard": False}},
        {"train": {"data_parallel_mode": "none", "data_parallel_shard_size": 1, "data_parallel_replicate_size": -1}},
        {"train": {"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2}},
        {"train": {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2}},
        {"train": {"lr": 1e-8}},
        {"train": {"load_weights_mode": "all_ranks"}},
        {"train": {"load_weights_mode": "dcp"}, "lora": {"enable_lora": True}},
        {"train": {"lr_warmup_ratio": 0.5, "lr_start": 1e-6}},
        {"train": {"data_parallel_mode": "ddp", "enable_full_shard": True, "enable_forward_prefetch": True}},
        {"train": {"enable_profiling": False, "profile_start_step": 1, "profile_end_step": 9}},
        {"train": {"enable_full_determinism": True, "allow_cuda_launch_blocking": True}},
        {"train": {"enable_profiling": True, "profile_start_step": 5, "profile_end_step": 6}},
        {"train": {"enable_gradient_checkpointing": False}},
        {"train": {"enable_activation_offload": True, "activation_gpu_limit": 2.0}},
        {"train": {"enable_activation_offload": True, "recompute_policy": "operation", "enable_compile": True}},
    ],
)
def test_options_that_agree_are_accepted(changes: Options) -> None:
    # Would catch a rule that refuses more than it says.
    loaded_with(**changes)


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        (swept({}, {"name": "m0"}), "lora.sweep.1.name", "there is already a member m0"),
        (swept({"name": "../up"}), "lora.sweep.0.name", "expected string"),
        (swept({"rank": 3}), "lora.sweep.0.rank", "unknown option"),
        (swept({"datasets": []}), "lora.sweep.0.datasets", "the list is empty"),
        (swept({"datasets": [{"path": "b", "shards": 2}]}), "lora.sweep.0.datasets.0.shards", "needs shards_idx"),
        (swept({"datasets": [{"path": "b", "typ": "chat"}]}), "lora.sweep.0.datasets.0.typ", "did you mean"),
        (swept({"lora_target_modules": []}), "lora.sweep.0.lora_target_modules", "the list is empty"),
        (
            swept({"lr": 1e-6}) | {"train": {"lr_min": 1e-5, "lr_decay_style": "cosine"}},
            "lora.sweep.0.lr",
            "above the lr of this member",
        ),
        (swept({}, use_dora=True), "lora.use_dora", "lora.sweep is empty: the members of a sweep are plain adapters"),
        (swept({}) | {"train": {"optimizer": "muon"}}, "train.optimizer", "trained by AdamW"),
        (
            swept({}) | {"train": {"recompute_policy": "auto"}},
            "train.recompute_policy",
            "choose module or operation",
        ),
    ],
)
def test_members_of_a_sweep_are_checked_as_runs_of_their_own(
    changes: dict[str, dict[str, Any]], path: str, message: str
) -> None:
    # Would catch a member whose options are accepted where the same options of a run would not be, or one that is told
    # the same thing twice.
    with pytest.raises(ConfigError) as caught:
        loaded_with(**changes)
    found = [problem for problem in caught.value.problems if problem.path == path]
    assert len([problem for problem in found if message in problem.message]) == 1, caught.value


def test_a_sweep_beside_what_it_can_stand_with_is_accepted() -> None:
    # Would catch a default that conflicts with a sweep, and members that are compared with another's data.
    loaded = loaded_with(**swept({"lr": 1e-3, "seed": 4}, {"datasets": [{"path": "b", "weight": 1.0}]}, lora_rank=4))
    assert [member.name for member in loaded.config.lora.sweep] == ["m0", "m1"]
    assert loaded.origins["lora.sweep.0.lr"] != "default"
    assert loaded.origins["lora.sweep.1.datasets.0.type"] == "default"


def config_with(**train: Any) -> Config:
    """A configuration whose sizes may be refused elsewhere."""
    options: Any = {"data": {"datasets": [{"path": "a"}]}, "train": {"output_dir": "o", **train}}
    return Config.model_validate(options)


@pytest.mark.parametrize(
    ("train", "world_size", "message"),
    [
        ({}, 1, None),
        ({}, 8, None),
        ({"data_parallel_mode": "none"}, 1, None),
        ({"data_parallel_mode": "none"}, 2, "none uses a single process, got 2 processes"),
        ({"data_parallel_mode": "ddp"}, 3, None),
        ({"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2}, 2, None),
        ({"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2}, 3, "start 2"),
        ({"data_parallel_shard_size": 2}, 4, None),
        ({"data_parallel_shard_size": 2}, 3, "train.data_parallel_shard_size 2: start a multiple of 2"),
        ({"data_parallel_shard_size": 8}, 1, "1 process cannot be arranged"),
        ({"data_parallel_replicate_size": 2}, 4, None),
        ({"data_parallel_replicate_size": 4}, 6, "a multiple of 4"),
        ({"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2}, 4, None),
        ({"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2}, 8, "start 4, or set"),
        ({"data_parallel_shard_size": 1, "data_parallel_replicate_size": 1}, 2, "_replicate_size 1 x .* 1: start 1"),
        ({"tensor_parallel_size": 2, "ulysses_parallel_size": 2}, 8, None),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 8, "a multiple of 6"),
    ],
)
def test_a_number_of_processes_has_to_fit_the_sizes(
    train: dict[str, Any], world_size: int, message: str | None
) -> None:
    # Would catch a job that starts on 8 GPUs and fails in a reshape, or leaves some idle.
    config = config_with(**train)
    if message is None:
        check_world_size(config, world_size)
    else:
        with pytest.raises(ValueError, match=rf"^train\.\w+: .*{message}"):
            check_world_size(config, world_size)


@pytest.mark.parametrize(
    ("changes", "resolved"),
    [
        ({"train": {"reshard_after_forward": False}}, {"enable_full_shard": False, "reshard_after_forward": False}),
        ({"train": {"enable_full_shard": False}}, {"enable_full_shard": False, "reshard_after_forward": False}),
        ({"train": {"lr": 1e-8, "lr_decay_style": "cosine"}}, {"lr_min": 1e-8}),
        ({"train": {"enable_profiling": True, "profile_start_step": 5}}, {"profile_end_step": 6}),
        ({"train": {"max_grad_norm": 0}}, {"max_grad_norm": None}),
        ({"train": {"max_grad_norm": 0.5}}, {"max_grad_norm": 0.5}),
    ],
)
def test_an_explicit_value_wins_over_a_default(changes: Options, resolved: dict[str, Any]) -> None:
    # Would catch a default of one option that ends a run, or that undoes what was asked for.
    loaded = loaded_with(**changes)
    assert {name: getattr(loaded.config.train, name) for name in resolved} == resolved
    assert loaded.without_effect == ()


def test_every_default_is_accepted_where_it_is_spelled_out() -> None:
    # Would catch a documented default that is refused, or listed as without effect, when somebody writes it down.
    sections = {"model": {"model_path": "m"}, "data": entry(), "train": {"output_dir": "o"}, "lora": {}}
    for option in all_options().values():
        if option.default is not None:
            owner = sections["data"]["datasets"][0] if option.section == ENTRIES else sections.get(option.section)
            if owner is not None:
                document = read_document(f"x: {option.default}", "")
                assert document.root is not None
                owner.setdefault(option.name, document.root.plain()["x"])
    loaded = config_from_mapping(sections)
    assert loaded.without_effect == ()
    assert loaded.config == loaded_with().config


def test_one_line_lists_the_options_without_effect_by_what_they_need() -> None:
    # Would catch a file for several kinds of runs that fills the screen, and a file written by `show` that differs.
    loaded = loaded_with(train={"muon_lr": 0.1, "muon_momentum": 0.5}, lora={"lora_rank": 8})
    assert loaded.without_effect_line() == (
        "options without effect: train.muon_lr, train.muon_momentum (unless train.optimizer is muon); "
        "lora.lora_rank (unless lora.enable_lora is true)"
    )
    assert "muon_lr: 0.1" in show(loaded)
    assert (loaded.config.train.muon_lr, loaded.config.lora.lora_rank) == (0.02, 16)
    assert loaded_with(train={"optimizer": "muon", "muon_lr": 0.1}).without_effect_line() is None
