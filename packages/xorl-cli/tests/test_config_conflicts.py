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


def options_of(text: str) -> tuple[str, Options]:
    """Reads `train.lr: 0.1, data.datasets: [{weight: 2}]`: returns the path of the first option, and all by section.

    An entry without a path gets one.
    """
    document = read_document(f"{{{text}}}", "")
    flat = document.root.plain()
    (first, value), *_ = flat.items()
    if first in ("data.datasets", "data.test_datasets"):
        first = f"{first}.0.{next(iter(value[0]))}"
    options: Options = {}
    for path, value in flat.items():
        section, _, name = path.partition(".")
        is_entries = name in ("datasets", "test_datasets")
        options.setdefault(section, {})[name] = [{"path": "a", **entry} for entry in value] if is_entries else value
    return first, options


def test_what_a_type_of_data_takes_is_what_its_format_takes() -> None:
    # Would catch a configuration that is refused for what a format reads, or accepted for what it does not: the tables
    # stand twice, since a configuration is checked without torch.
    assert (FORMAT_TARGETS, FORMAT_COLUMNS) == (TARGETS, COLUMN_KEYS)


def entry(**options: Any) -> dict[str, Any]:
    return {"datasets": [{"path": "a", **options}]}


def swept(*members: dict[str, Any], **lora: Any) -> dict[str, Any]:
    named = [{"name": f"m{index}", **member} for index, member in enumerate(members)]
    return {"lora": {"enable_lora": True, "sweep": named, **lora}}


# Options that others are refused or ignored beside.
LORA = "lora.enable_lora: true"
QLORA = "lora.enable_qlora: true"  # implies enable_lora
STREAM = "data.streaming: true, train.max_steps: 3"
RANDOM = "model.model_path: null, model.config_path: c"
PLAIN = "train.enable_gradient_checkpointing: false"
GRAPHS = "train.enable_cuda_graphs: true, train.data_parallel_mode: ddp, train.enable_compile: true"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("model.model_path: null", "both are null"),
        ("data.datasets: [{data_files: x.json}]", "needs ds_type"),
        ("data.datasets: [{shards: 2}]", "needs shards_idx, the part to use (0 to 1)"),
        ("data.datasets: [{shards_idx: 1}]", "needs shards, the number"),
        ("data.datasets: [{shards_idx: 2, shards: 2}]", "use 0 to 1"),
        ("data.datasets: [{preprocess_shards: 2, shards: 2, shards_idx: 0}]", "not both"),
        ("data.datasets: [{num_epochs: 2.0, weight: 1.0}]", "not both"),
        ("data.datasets: [{weight: 1.0}, {path: b}]", "set them on every entry, or on none"),
        ("data.streaming: true", "has no known length: set train.max_steps"),
        (f"data.val_set_size: 5, {STREAM}", "has no effect unless data.streaming is false"),
        ("data.push_dataset_to_hub: a/b", "needs hf_use_auth_token: true"),
        ("data.dataset_shard_num: 3", "needs dataset_shard_idx"),
        ("data.dataset_shard_idx: 0", "needs dataset_shard_num"),
        ("data.dataset_shard_idx: 3, data.dataset_shard_num: 3", "use 0 to 2"),
        ("data.datasets: [{max_seq_len: 32001}]", "documents must fit into a bin"),
        ("data.val_set_size: 5, data.test_datasets: [{path: b}]", "a single source"),
        (f"lora.lora_dropout: 0.1, {LORA}, train.enable_compile: true", "draw random numbers"),
        (f"lora.use_dora: true, {LORA}, train.fp8: tensorwise", "needs their norms"),
        (
            "train.profile_start_step: 6, train.enable_profiling: true, train.profile_end_step: 8, train.max_steps: 5",
            "max_steps ends the run at 5",
        ),
        ("train.lr: 0.0, train.optimizer: muon", "set lr above 0"),
        ("train.param_dtype: bf16, train.enable_mixed_precision: false", "set enable_mixed_precision to true"),
        ("train.enable_activation_offload: true, train.recompute_policy: operation", "cannot be offloaded"),
        ("train.enable_reentrant: true, train.enable_compile: true", "cannot be compiled"),
        ("train.fp8: rowwise, train.enable_mixed_precision: false", "enable_mixed_precision is true"),
        ("train.fp8: tensorwise, train.enable_cpu_offload: true", "casts the gathered weights"),
        ("model.moe_implementation: native, train.fp8: rowwise", "only one fp8 kernel for experts"),
        (f"train.load_weights_mode: dcp, {RANDOM}", "unless model.model_path is set"),
        (f"train.load_weights_mode: dcp, {LORA}, lora.save_lora_only: true", "convert it with `xorl export`"),
        ("train.reshard_after_forward: true, train.enable_full_shard: false", "remove one of the two"),
        ("train.router_correction_rate: 1e-3, train.freeze_router: true", "set one of the two alone"),
        (f"train.router_correction_rate: 1e-3, {LORA}", "corrections belong to it"),
        (f"train.router_correction_rate: 1e-3, {QLORA}", "corrections belong to it"),
        (f"model.encoders: {{image: {{config_path: c}}}}, {LORA}", "need a base in one folder"),
        (f"model.encoders: {{image: {{config_path: c}}}}, {QLORA}", "need a base in one folder"),
        ("train.data_parallel_shard_size: 2, train.data_parallel_mode: none", "none does not divide"),
        ("train.data_parallel_replicate_size: 2, train.data_parallel_mode: none", "none does not divide"),
        ("train.data_parallel_shard_size: 2, train.data_parallel_mode: ddp", "ddp does not shard"),
        (f"train.tensor_parallel_size: 2, {LORA}, lora.use_dora: true", "with use_dora yet"),
        (
            "train.tensor_parallel_size: 2, train.enable_gradient_checkpointing: true, train.recompute_policy: auto",
            "auto measures the layers on one GPU",
        ),
        ("train.lr_start: 0.0001, train.lr: 1e-5, train.lr_warmup_ratio: 0.1", "is above lr"),
        (f"data.datasets: [{{shards: 2, shards_idx: 0}}], {STREAM}", "a stream is not split"),
        ("train.lr_min: 0.0001, train.lr: 1e-5, train.lr_decay_style: linear", "is above lr"),
        (
            "train.lr_decay_ratio: 0.4, train.lr_decay_style: linear, train.lr_warmup_ratio: 0.5",
            "would end before the warm-up",
        ),
        ("train.enable_full_determinism: true", "allow_cuda_launch_blocking"),
        ("train.profile_end_step: 1, train.enable_profiling: true", "must be greater than profile_start_step"),
        (f"model.foundation: {{rope_theta: 5.0}}, {LORA}, lora.save_lora_only: true", "with its own config.json"),
        (f"lora.lora_target_modules: [], {LORA}", "the list is empty"),
        (f"lora.lora_target_modules: all, {LORA}", "did you mean all-linear"),
        (f"lora.lora_target_modules: .*q_proj, {LORA}", "[q_proj, v_proj]; regular expressions are not supported"),
        (f"lora.lora_target_modules: 'q_proj,v_proj', {LORA}", "write [q_proj, v_proj]"),
        (f"lora.moe_shared_lora: true, lora.moe_hybrid_shared_lora: true, {LORA}", "set one to false"),
        (f"lora.moe_lora_format: sglang, lora.moe_shared_lora: true, {LORA}", "whose outer factors are shared"),
        (f"lora.save_lora_only: true, {RANDOM}, {LORA}", "would not be saved anywhere"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: str, message: str) -> None:
    # Would catch a run in which one of two options silently wins.
    path, changes = options_of(options)
    with pytest.raises(ConfigError) as caught:
        loaded_with(**changes)
    found = [(problem.path, problem.message) for problem in caught.value.problems]
    assert [at for at, text in found if message in text] == [path], found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"train.save_epochs: 0.5, {STREAM}", "use train.save_steps"),
        (f"data.datasets: [{{preprocess_shards: 2}}], {STREAM}", "data.streaming is false"),
        ("data.num_dataset_shards_to_save: 2, data.skip_prepare_dataset: true", "skip_prepare_dataset is false"),
        ("data.hf_use_auth_token: true", "is a Hub id"),
        ("model.lm_head_fp32: false, train.enable_mixed_precision: false", "enable_mixed_precision is true"),
        ("model.attention_cast_bf16: true", "enable_mixed_precision is false"),
        ("train.eval_steps: 5", "data.val_set_size is set, or data.test_datasets"),
        ("data.eval_sample_packing: false", "unless data.val_set_size is set"),
        ("data.datasets: [{split: test, path: dummy}]", "rows of dummy are synthetic"),
        ("data.sample_packing_group_size: 9", "is multipack"),
        ("data.sample_packing_mp_start_method: spawn", "is multipack"),
        ("train.reshard_after_forward: true, train.data_parallel_mode: ddp", "data_parallel_mode is fsdp2"),
        ("train.enable_full_shard: false, train.data_parallel_mode: ddp", "data_parallel_mode is fsdp2"),
        (
            "train.ep_outside: true, train.expert_parallel_size: 2, train.data_parallel_mode: ddp",
            "data_parallel_mode is fsdp2",
        ),
        ("train.fsdp_collectives: nccl, train.data_parallel_mode: ddp", "data_parallel_mode is fsdp2"),
        ("train.enable_forward_prefetch: false, train.data_parallel_mode: none", "data_parallel_mode is fsdp2"),
        ("model.basic_modules: [mlp], train.data_parallel_mode: none", "data_parallel_mode is fsdp2"),
        (f"train.enable_reentrant: true, {PLAIN}", "enable_gradient_checkpointing is true"),
        (f"train.recompute_policy: operation, {PLAIN}", "enable_gradient_checkpointing is true"),
        ("train.recompute_modules: [mlp], train.recompute_policy: operation", "recompute_policy is module"),
        ("train.enable_reentrant: true, train.recompute_policy: operation", "recompute_policy is module"),
        ("train.enable_cpu_offload: true, train.data_parallel_mode: ddp", "data_parallel_mode is fsdp2"),
        ("train.optimizer_dtype: fp32", "is anyprecision_adamw or muon"),
        ("train.muon_momentum: 0.5, train.optimizer: sgd", "optimizer is muon"),
        ("train.activation_gpu_limit: 2.0", "enable_activation_offload is true"),
        ("train.enable_cuda_graphs: true, train.enable_compile: true", "data_parallel_mode is ddp or none"),
        ("train.enable_cuda_graphs: true, train.data_parallel_mode: ddp", "enable_compile is true"),
        (f"{GRAPHS}, train.recompute_policy: operation", "is true, for whole layers and for all of them"),
        (f"{GRAPHS}, train.recompute_num_layers: 1", "is true, for whole layers and for all of them"),
        (f"{GRAPHS}, train.fp8: rowwise", "train.fp8 is none"),
        (f"{GRAPHS}, train.enable_activation_offload: true", "enable_activation_offload is false"),
        (f"{GRAPHS}, train.ringattn_parallel_size: 2", "ringattn_parallel_size is 1"),
        (f"{GRAPHS}, model.attn_implementation: sdpa", "attn_implementation is auto, flash_attention_2"),
        (f"{GRAPHS}, model.moe_implementation: eager", "moe_implementation is null, quack"),
        (f"{GRAPHS}, train.enable_mixed_precision: false", "enable_mixed_precision is true"),
        (f"{GRAPHS}, {LORA}", "lora.enable_lora is false"),
        (f"{GRAPHS}, {QLORA}", "lora.enable_qlora is false"),
        ("train.enable_activation_offload: true, train.recompute_policy: auto", "auto chooses it"),
        ("train.recompute_num_layers: 2, train.recompute_policy: auto", "auto chooses it"),
        (f"train.recompute_num_layers: 2, {PLAIN}", "enable_gradient_checkpointing is true"),
        ("train.lr_min: 1e-6", "is linear or cosine"),
        ("train.lr_decay_ratio: 0.5", "is linear or cosine"),
        ("train.lr_start: 1e-6", "lr_warmup_ratio is above 0"),
        ("train.no_decay_modules: [norm]", "weight_decay is above 0"),
        ("train.no_decay_params: [bias]", "weight_decay is above 0"),
        (f"train.load_weights_mode: all_ranks, {RANDOM}", "random weights are not read"),
        ("train.profile_rank0_only: false", "enable_profiling is true"),
        ("train.lr_start: 0.0001, train.lr: 1e-5", "lr_warmup_ratio is above 0"),
        (f"train.recompute_modules: [mlp], {PLAIN}", "enable_gradient_checkpointing is true"),
        ("lora.save_lora_only: true", "enable_lora is true"),
        ("lora.reset_optimizer_on_merge: true", "merge_lora_interval is above 0"),
        ("lora.use_dora: true", "enable_lora is true"),
        ("lora.moe_shared_lora: true", "enable_lora is true"),
        ("lora.moe_lora_format: peft", "enable_lora is true"),
        ("lora.adapter_path: a", "enable_lora is true"),
        ("lora.sweep: [{name: a}]", "enable_lora is true"),
        (f"lora.sweep_members_per_pass: 2, {LORA}", "lora.sweep is"),
        (f"lora.quant_group_size: 16, {LORA}", "enable_qlora is true"),
        (f"train.projector_lr: 1e-3, {LORA}", "freeze_projectors is false (without adapters)"),
        (f"train.projector_lr: 1e-3, {QLORA}", "freeze_projectors is false (without adapters)"),
        ("lora.aqn_alpha: 0.5", "enable_aqn is true"),
        (f"lora.save_lora_only: true, {LORA}, lora.sweep: [{{name: m0}}]", "only saves adapters"),
        ("data.datasets: [{chat_template: a.jinja, type: text}]", "type is chat"),
        ("data.datasets: [{overflow_limit: 0.1, overflow: error}]", "truncate"),
        ("data.select_columns: [a], data.datasets: [{type: text}]", "tokenized or auto"),
        ("train.wandb_name: a, train.use_wandb: false", "use_wandb is true"),
        ("train.lr_min: 0.0001, train.lr: 1e-5", "is linear or cosine"),
        ("data.dataloader_prefetch_factor: 4, data.dataloader_num_workers: 0", "dataloader_num_workers is above 0"),
        (f"lora.lora_rank: 8, {LORA}, lora.adapter_path: a", "determine it"),
    ],
)
def test_an_option_without_effect_is_listed_and_reset(options: str, message: str) -> None:
    # Would catch an option that ends a run which it does not concern, or one that is ignored in silence.
    path, changes = options_of(options)
    loaded = loaded_with(**changes)
    assert [option.path for option in loaded.without_effect] == [path]
    assert message in loaded.without_effect[0].condition
    assert path in (loaded.without_effect_line() or "")
    assert f"no effect {loaded.without_effect[0].condition}" in show(loaded)


def test_a_stream_keeps_the_zero_that_silences_its_warning() -> None:
    # Catches advice that has no effect: the default, which warns, in place of train.save_epochs: 0.
    loaded = loaded_with(**options_of(f"train.save_epochs: 0, {STREAM}")[1])
    assert loaded.config.train.save_epochs == 0
    assert loaded.without_effect == ()


@pytest.mark.parametrize(
    "options",
    [
        "model.model_path: null, model.config_path: c",
        "data.datasets: [{data_files: [x.json], ds_type: json}]",
        "data.datasets: [{shards: 2, shards_idx: 1}]",
        "data.dataset_shard_num: 3, data.dataset_shard_idx: 2",
        "data.streaming: true, train.max_steps: 3, train.save_epochs: 0",
        "data.datasets: [{max_seq_len: 32000}]",
        "data.val_set_size: 0.05, train.eval_steps: 5",
        "data.test_datasets: [{path: b}], train.eval_steps: 5",
        "data.dataloader_num_workers: 0",
        "data.dataloader_num_workers: 0, data.dataloader_prefetch_factor: null",
        "train.reshard_after_forward: false, train.enable_full_shard: false",
        "train.data_parallel_mode: none, train.data_parallel_shard_size: 1, train.data_parallel_replicate_size: -1",
        "train.data_parallel_mode: ddp, train.data_parallel_replicate_size: 2",
        "train.data_parallel_shard_size: 2, train.data_parallel_replicate_size: 2",
        "train.lr: 1e-8",
        "train.load_weights_mode: all_ranks",
        f"train.load_weights_mode: dcp, {LORA}",
        "train.lr_warmup_ratio: 0.5, train.lr_start: 1e-6",
        "train.data_parallel_mode: ddp, train.enable_full_shard: true, train.enable_forward_prefetch: true",
        "train.enable_profiling: false, train.profile_start_step: 1, train.profile_end_step: 9",
        "train.enable_full_determinism: true, train.allow_cuda_launch_blocking: true",
        "train.enable_profiling: true, train.profile_start_step: 5, train.profile_end_step: 6",
        "train.enable_gradient_checkpointing: false",
        "train.enable_activation_offload: true, train.activation_gpu_limit: 2.0",
        "train.enable_activation_offload: true, train.recompute_policy: operation, train.enable_compile: true",
    ],
)
def test_options_that_agree_are_accepted(options: str) -> None:
    # Would catch a rule that refuses more than it says.
    loaded_with(**options_of(options)[1])


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
        (swept({}) | {"train": {"recompute_policy": "auto"}}, "train.recompute_policy", "choose module or operation"),
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
