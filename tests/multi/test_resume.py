"""A run that was killed and resumed ends where the run that was not stopped ends."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_models import hf_config, write_config
from tiny_runs import QUICKSTART, Tensors, metrics_of, write_pairs, write_rows, write_run
from xorl.ckpt import Checkpointer, CheckpointFailure, read_manifest
from xorl.ckpt.files import HashedFile
from xorl.config import LoadedConfig, load_config
from xorl.core.parallel.collectives import keep_choices
from xorl.train.checkpoints import Checkpoints
from xorl.train.run import run_training
from xorl.train.transports import FSDP_COLLECTIVES

NUM_STEPS = 8
KILLED_AT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_rows(folder / "train.jsonl", 300)
    write_config(folder / "model", hf_config(tie_word_embeddings=True, initializer_range=0.02))
    write_config(folder / "deep", hf_config(tie_word_embeddings=True, num_hidden_layers=4, initializer_range=0.02))
    experts = {"mlp_only_layers": [0], "moe_intermediate_size": 32}
    write_config(folder / "scalars", hf_config("apertus", initializer_range=0.02))
    write_pairs(folder / "pairs.jsonl", 120)
    # The same weights for either kind of reference.
    shape = json.loads((QUICKSTART / "config.json").read_text())
    write_config(folder / "pairs", {**shape, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64})
    write_config(folder / "experts", hf_config("qwen3_moe", **experts, initializer_range=0.02))
    return folder


def run(
    folder: Path,
    output: Path,
    *,
    mode: str,
    accumulation: int,
    killed_at: int | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """What one rank does; with `killed_at`, every rank dies when the checkpoint of that step has been published."""
    overrides = [part.format(folder=folder) for part in overrides]
    if killed_at is not None:
        save = Checkpoints.save

        def save_and_die(checkpoints: Checkpoints, step: int, *, is_final: bool) -> None:
            save(checkpoints, step, is_final=is_final)
            if step == killed_at:
                checkpoints.saves.finish()
                os.kill(os.getpid(), signal.SIGKILL)

        Checkpoints.save = save_and_die
    return run_training(loaded(folder, output, mode, accumulation, overrides))


def loaded(folder: Path, output: Path, mode: str, accumulation: int, overrides: Sequence[str]) -> LoadedConfig:
    options = {
        "data": {"sample_packing_method": "multipack", "pad_to_multiple_of": 16},
        "data_parallel_mode": mode,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "max_steps": NUM_STEPS,
        "lr_warmup_ratio": 0.2,
        "lr_decay_style": "cosine",
        "weight_decay": 0.1,
        "save_steps": KILLED_AT,
        "load_checkpoint_path": "auto",
    }
    path = output.parent / f"{output.name}_{os.environ['RANK']}.yaml"
    return load_config(write_run(path, folder, output, **options), overrides)


def losses(output: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by step."""
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in metrics_of(output) if "loss" in record}


def final_state(output: Path) -> dict[str, Tensor]:
    checkpoint = output / "checkpoints" / f"global_step_{NUM_STEPS}"
    parts: dict[str, Tensors] = {}
    for name, record in read_manifest(checkpoint).tensors.items():
        part, _, key = name.partition(".")
        parts.setdefault(part, Tensors())[key] = torch.zeros(record.shape, dtype=record.torch_dtype)
    Checkpointer(output / "checkpoints").load(checkpoint, parts)
    return {f"{part}.{key}": tensor for part, tensors in parts.items() for key, tensor in tensors.items()}


# Merges happen on both sides of the step that is resumed from.
LORA = ["--lora.enable_lora=true", "--lora.lora_rank=4", "--lora.lora_dropout=0.2", "--lora.use_dora=true"]
LORA += ["--lora.merge_lora_interval=3", "--lora.reset_optimizer_on_merge=true"]
QLORA = ["--lora.enable_qlora=true", "--lora.lora_rank=4", "--lora.enable_aqn=true", "--lora.merge_lora_interval=3"]
EXPERTS = ["--model.config_path", "{folder}/experts", "--train.router_aux_loss_coef", "0.1"]
EXPERTS += ["--train.enable_gradient_checkpointing", "true", "--train.moe_checkpoint_method", "moe_act"]
ULYSSES = ["--train.ulysses_parallel_size", "2"]
MUON = ["--train.optimizer", "muon"]
# Rounding momentum to bf16 would make a large difference of a small one.
EXACT_MUON = [*MUON, "--train.optimizer_dtype", "fp32"]
EP = ["--train.expert_parallel_size", "2"]
TP = ["--train.tensor_parallel_size", "2"]
PP = ["--train.pipeline_parallel_size", "2"]
ALONE = ["--train.data_parallel_mode", "none"]
EXPERT_QLORA = [*QLORA, *EXPERTS, "--lora.lora_target_modules", '["q_proj","up_proj","down_proj"]']
HALF = ["--train.param_dtype", "bf16", "--train.enable_mixed_precision", "true", "--train.lr", "3e-3"]
PAIRS = ["--data.datasets", '[{{"path": "{folder}/pairs.jsonl", "type": "preference"}}]', "--data.val_set_size", "20"]
PAIRS += ["--model.config_path", "{folder}/pairs", "--model.tokenizer_path", str(QUICKSTART)]
# By name: the mode, the number of ranks, the overrides.
RUNS: dict[str, tuple[str, int, list[str]]] = {
    "none-adamw": ("none", 1, []),
    "fsdp2-adamw": ("fsdp2", 2, []),
    "ddp-adamw": ("ddp", 4, []),
    "none-anyprecision": ("none", 1, [*HALF, "--train.optimizer", "anyprecision_adamw"]),
    "fsdp2-muon": ("fsdp2", 2, [*HALF, *MUON]),
    "fsdp2-lora": ("fsdp2", 2, LORA),
    "fsdp2-qlora": ("fsdp2", 2, QLORA),
    # Parameters of one value, of which the second rank has nothing.
    "fsdp2-scalars": ("fsdp2", 2, [*HALF, *MUON, "--model.config_path", "{folder}/scalars"]),
    "fsdp2-experts": ("fsdp2", 2, [*EXPERTS, *EXACT_MUON]),
    "fsdp2-ulysses": ("fsdp2", 2, ULYSSES),
    "fsdp2-ep": ("fsdp2", 2, [*EXPERTS, *MUON, *EP]),
    "fsdp2-qlora-ep": ("fsdp2", 2, [*EXPERT_QLORA, *EP]),
    # Scored by the initial model before the first step, and by the base without its adapters in each step.
    "fsdp2-dpo": ("fsdp2", 2, [*PAIRS, "--train.loss", "dpo"]),
    "none-kto": ("none", 1, [*PAIRS, *LORA[:3], "--train.loss", "kto"]),
    # For CHAINS.
    "fsdp2-merged": ("fsdp2", 2, [*QLORA[:2], QLORA[-1], '--lora.exclude_modules=["down_proj"]']),
    "fsdp2-deep": ("fsdp2", 2, ["--model.config_path", "{folder}/deep"]),
}


@pytest.fixture
def straight(folder: Path, run_ranks) -> Callable[[str], Path]:
    """(name of a run) -> its output; tests of the module share it."""

    def output(name: str) -> Path:
        output, num_ranks = folder / name / "straight", RUNS[name][1]
        if not output.exists():
            output.parent.mkdir(exist_ok=True)
            assert run_ranks(lambda: run_of(name, folder, output), num_ranks) == [0] * num_ranks
        return output

    return output


@pytest.fixture
def killed(straight, tmp_path: Path) -> Callable[[str], Path]:
    """(name of a run) -> a copy of its output without what it wrote after its first checkpoint, but for some losses."""

    def output(name: str) -> Path:
        output = shutil.copytree(straight(name), tmp_path / "resumed", symlinks=True)
        checkpoints, metrics = output / "checkpoints", output / "metrics.jsonl"
        shutil.rmtree(checkpoints / f"global_step_{NUM_STEPS}")
        (checkpoints / "latest").write_text(f"global_step_{KILLED_AT}")
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= KILLED_AT + 2))
        return output

    return output


def run_of(name: str, folder: Path, output: Path) -> int:
    """What a rank does in one of RUNS. Its ranks save in the background if they are two."""
    mode, own_ranks, overrides = RUNS[name]
    if own_ranks == 2:
        overrides = [*overrides, "--train.save_async", "true"]
    if output.name == "straight":
        keep_choices({os.environ["RANK"]: "nccl"})  # stands for a measurement on GPUs
    return run(folder, output, mode=mode, accumulation=4 // own_ranks, overrides=overrides)


@pytest.mark.parametrize("name", list(RUNS)[:-2])
def test_killed_and_resumed_run_is_the_same_to_the_bit(name: str, straight, killed, folder: Path, run_ranks) -> None:
    # Catches anything that a checkpoint forgets: a moment, a step count, a place in the data, a schedule, the bits by
    # which weights in bf16 are rounded, where a gradient lies when four ranks are added to it. Two ranks save in the
    # background while the next steps train: catches a copy that these have changed, and one that disturbs them. Also
    # catches a resumed run that measures again how its GPUs should communicate, or knows only the choice of rank 0.
    whole, resumed, num_ranks = straight(name), killed(name), RUNS[name][1]
    assert run_ranks(lambda: run_of(name, folder, resumed), num_ranks) == [0] * num_ranks
    assert losses(resumed) == losses(whole)
    assert len(losses(resumed)) == NUM_STEPS
    info = read_manifest(resumed / "checkpoints" / f"global_step_{NUM_STEPS}").info
    assert info[FSDP_COLLECTIVES] == {str(rank): "nccl" for rank in range(num_ranks)}
    expected, state = final_state(whole), final_state(resumed)
    assert any(name.startswith("optimizer.") for name in expected)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("fsdp2-adamw", 1), ("fsdp2-adamw", 4), ("fsdp2-experts", 4), ("fsdp2-ulysses", 4)],
)
def test_run_of_two_ranks_resumes_on_another_number(
    name: str, num_ranks: int, straight, killed, folder: Path, run_ranks
) -> None:
    # Catches a data order, or a number of bins per step, that depends on how many ranks read it.
    resumed = killed(name)
    assert run_ranks(lambda: run_of(name, folder, resumed), num_ranks) == [0] * num_ranks
    assert_alike(straight(name), resumed)


def assert_alike(whole: Path, resumed: Path) -> None:
    """Fail where losses or norms differ by more than rounding, as those of other numbers of ranks do."""
    expected, measured = losses(whole), losses(resumed)
    assert expected.keys() == measured.keys()
    for step, (loss, norm) in expected.items():
        assert measured[step] == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-4))


TENSOR: dict[str, tuple[int, int, list[str]]] = {
    "fsdp 4": (4, 1, []),
    "tp 2, fsdp 2": (4, 2, TP),
    "tp 2": (2, 2, [*TP, *ALONE]),
    "none": (1, 1, ALONE),
}
PIPELINE: dict[str, tuple[int, int, list[str]]] = {
    "pp 2, fsdp 2": (4, 2, PP),
    "fsdp 4": (4, 1, []),
    "pp 4": (4, 4, [PP[0], "4", *ALONE]),
    "tp 2, pp 2": (4, 4, [*TP, *PP, *ALONE]),
}
EXPERT: dict[str, tuple[int, int, list[str]]] = {
    "ep 4, ddp": (4, 1, ["--train.expert_parallel_size", "4", "--train.data_parallel_mode", "ddp"]),
    "none": (1, 1, ALONE),
    "ep 2, fsdp 2": (4, 1, EP),
    "fsdp 4": (4, 1, []),
}
# Runs that go on in one layout after the other, and then in the first again: the name of one of RUNS, and by layout,
# the number of ranks, how many of these read the same batches, and the overrides.
CHAINS = {
    "experts": ("fsdp2-experts", EXPERT),
    "tensor": ("fsdp2-adamw", TENSOR),
    "tensor, merged": ("fsdp2-merged", TENSOR),
    "pipeline": ("fsdp2-deep", PIPELINE),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_parameters_that_ranks_divide_resume_on_any_layout(
    chain: str, straight, folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches experts under the numbers of other ones, columns of other ranks, moments that stay with a rank, and
    # exports that depend on who held what.
    name, layouts = CHAINS[chain]
    whole, resumed = straight(name), tmp_path / "resumed"

    def run_on(output: Path, layout: str, *more: str, killed_at: int | None = None) -> None:
        num_ranks, sharing, own = layouts[layout]
        options = [*RUNS[name][2], "--train.save_steps", str(killed_at or NUM_STEPS), *own, *more]
        split = {"mode": "fsdp2", "accumulation": 4 * sharing // num_ranks, "overrides": options}
        ended = run_ranks(lambda: run(folder, output, **split, killed_at=killed_at), num_ranks)
        assert ended == ["no result" if killed_at else 0] * num_ranks

    def export_on(output: Path, layout: str) -> bytes:
        run_on(output, layout, "--train.save_hf_weights", "true")
        [file] = output.rglob("model.safetensors")
        return file.read_bytes()

    for layout, killed_at in zip(layouts, (1, 3, 5, 7), strict=True):
        run_on(resumed, layout, killed_at=killed_at)
    first, *others = layouts
    exported = {first: export_on(resumed, first)}
    assert_alike(whole, resumed)
    states = list((resumed / "checkpoints" / f"global_step_{NUM_STEPS}").glob("training_state/rng_rank*"))
    assert len({state.read_bytes() for state in states}) == len(states), "ranks draw the same random numbers"
    shutil.rmtree(resumed / "checkpoints" / f"global_step_{NUM_STEPS}-export")
    for layout in others:
        exported[layout] = export_on(shutil.copytree(resumed, tmp_path / layout), layout)
    assert len(set(exported.values())) == 1, list(exported)


def test_a_run_goes_back_and_the_same_command_resumes_it(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a damaged newest checkpoint from which no message leads on, a later checkpoint that is lost, and a command
    # that goes back once more after its run was killed.
    output = tmp_path / "output"
    split = {"mode": "fsdp2", "accumulation": 2}
    options = ["--train.save_steps", "2", "--train.keep_last", "3"]
    run_ranks(lambda: run(folder, output, **split, overrides=options), 2)
    straight, checkpoints = losses(output), output / "checkpoints"
    names = [path.name for path in Checkpointer(checkpoints).checkpoints()]
    assert names == ["global_step_4", "global_step_6", "global_step_8"]
    for file in ("metadata.json", "training_state/scalars.json", "__1_0.distcp"):
        damaged = checkpoints / "global_step_8" / file
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        for error in run_ranks(lambda: error_of(folder, output, *options, "--train.max_steps", "10"), 2):
            assert file in error
            assert f"{checkpoints}/global_step_6, the checkpoint before it" in error
        damaged.write_bytes(content)
    options += ["--train.load_checkpoint_path", str(checkpoints / "global_step_4")]
    run_ranks(lambda: run(folder, output, **split, overrides=options, killed_at=6), 2)
    assert sorted(path.name for path in (checkpoints / "set_aside_1").iterdir()) == names[1:]
    assert max(losses(output)) == 6
    assert run_ranks(lambda: run(folder, output, **split, overrides=options), 2) == [0, 0]
    assert losses(output) == straight
    assert not (checkpoints / "set_aside_2").exists()


@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_failed_save_ends_the_run_or_not_as_configured(
    in_background: str, folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches a failure that only one rank notices, that is forgotten, or that ends a run which was to continue.
    options = ["--train.save_async", in_background, "--train.save_steps", "2"]

    def failing(output: Path, at: int, outcome: str) -> str:
        write = HashedFile.write

        def fails(file: HashedFile, data: bytes) -> int:
            if f"global_step_{at}_" in str(file._file.name):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, data)

        if os.environ["RANK"] == "1":
            HashedFile.write = fails
        try:
            return error_of(folder, output, *options, "--train.on_save_failure", outcome)
        except CheckpointFailure as failure:
            return str(failure)

    for error in run_ranks(lambda: failing(tmp_path / "stop", 4, "stop"), 2):
        assert error.startswith("step 4: could not save a checkpoint on 1 of 2 ranks")
        assert "rank 1: OSError: [Errno 28] No space left on device" in error
        assert "global_step_2 is complete" in error
    # On the CPU it is noticed within two steps.
    assert max(losses(tmp_path / "stop")) in range(4, 7)
    assert run_ranks(lambda: failing(tmp_path / "continue", 4, "continue"), 2) == ["no error"] * 2
    names = [path.name for path in Checkpointer(tmp_path / "continue" / "checkpoints").checkpoints()]
    assert names == ["global_step_2", "global_step_6", "global_step_8"]
    assert len(losses(tmp_path / "continue")) == NUM_STEPS
    for error in run_ranks(lambda: failing(tmp_path / "last", 8, "continue"), 2):
        assert error.startswith("step 8: could not save a checkpoint on 1 of 2 ranks")


def test_automatic_recomputation_leaves_no_trace(straight, folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a probe that draws random numbers, takes data, or leaves gradients behind. On a CPU it decides for none.
    whole, chosen = straight("fsdp2-adamw"), tmp_path / "chosen"
    overrides = ["--train.enable_gradient_checkpointing", "true", "--train.recompute_policy", "auto"]
    run_ranks(lambda: run(folder, chosen, mode="fsdp2", accumulation=2, overrides=overrides), 2)
    assert losses(chosen) == losses(whole)


def error_of(folder: Path, output: Path, *overrides: str) -> str:
    """What a run with these overrides is refused with."""
    try:
        run_training(loaded(folder, output, "fsdp2", 1, overrides))
    except ValueError as error:
        return str(error)
    return "no error"


def test_order_of_the_data_that_changed_is_refused(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a resumed run that trains on some rows again and never on others, because the seed is another one.
    output = tmp_path / "output"
    kept = ["--data.shuffle_before_merging_datasets", "false", "--data.sample_packing_method", "sequential"]
    assert run_ranks(lambda: error_of(folder, output, *kept, "--train.max_steps", "2"), 1) == ["no error"]
    [error] = run_ranks(lambda: error_of(folder, output, *kept, "--train.seed", "7"), 1)
    assert "comes in another order" in error


def test_options_that_changed_are_named_before_tensors(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a list of tensors in place of the option that the user changed, and ranks that are told different things.
    output = tmp_path / "output"
    assert run_ranks(lambda: error_of(folder, output, "--train.max_steps", "2"), 2) == ["no error"] * 2
    others = ["--train.optimizer", "muon", "--model.merge_qkv", "false", *HALF[:4]]
    for error in run_ranks(lambda: error_of(folder, output, *others), 2):
        first, *more = error.splitlines()
        assert first == (
            f"train.load_checkpoint_path: {output}/checkpoints/global_step_2 was saved with model.merge_qkv: true, now "
            'false; train.optimizer: "adamw", now "muon"; train.param_dtype: "fp32", now "bf16"'
        )
        assert "another model or training set-up" in more[0]


def test_ranks_that_see_other_files_are_told_so(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches nodes with folders of their own that hang in different collectives, or train on a mixture.
    def with_own_data() -> str:
        own = tmp_path / f"own_{os.environ['RANK']}"
        own.mkdir()
        rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
        (own / "train.jsonl").write_text("".join(rows[int(os.environ["RANK"]) :]))
        return error_of(folder, tmp_path / "output", "--data.datasets", f"[{{path: {own}/train.jsonl}}]")

    def with_own_output() -> str:
        return error_of(folder, tmp_path / f"output_{os.environ['RANK']}")

    assert all("data: not every node" in error for error in run_ranks(with_own_data, 2))
    assert run_ranks(lambda: error_of(folder, tmp_path / "output_1", "--train.max_steps", "2"), 1) == ["no error"]
    assert all("load_checkpoint_path: not every node" in error for error in run_ranks(with_own_output, 2))


@pytest.mark.parametrize("option", ["enable_cpu_offload", "enable_activation_offload"])
def test_what_moves_memory_to_the_host_is_refused_on_the_cpu(
    option: str, folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches an option that is accepted where it can do nothing.
    [error] = run_ranks(lambda: error_of(folder, tmp_path / "output", f"--train.{option}", "true"), 1)
    assert error.startswith(f"train.{option}: ")


def test_export_that_a_kill_prevented_is_made_up_for(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a run that calls itself complete and has no model for other tools.
    output = tmp_path / "output"
    assert run_ranks(lambda: error_of(folder, output, "--train.max_steps", "2"), 2) == ["no error"] * 2
    exported = output / "checkpoints" / "global_step_2-export" / "model.safetensors"
    assert not exported.exists()
    again = ["--train.max_steps", "2", "--train.save_hf_weights", "true"]
    for _ in range(2):
        assert run_ranks(lambda: error_of(folder, output, *again), 2) == ["no error"] * 2
        assert exported.exists()
    assert len(losses(output)) == 2
    # Catches one that is taken for whole by its folder alone, and a file of the user's that making it again removes.
    weights = exported.read_bytes()
    exported.unlink()
    (exported.parent / "notes.txt").write_text("kept")
    for _ in range(2):
        assert run_ranks(lambda: error_of(folder, output, *again), 2) == ["no error"] * 2
        assert exported.read_bytes() == weights
    [aside] = exported.parent.parent.glob("global_step_2-export_damaged_*")
    assert (aside / "notes.txt").read_text() == "kept"
    assert len(losses(output)) == 2


@pytest.mark.parametrize(
    ("model", "layout"), [([], []), (EXPERTS, []), ([], ULYSSES)], ids=["dense", "experts", "ulysses"]
)
def test_evaluation_of_fewer_bins_than_ranks(
    model: list[str], layout: list[str], folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches a rank without held-out data that leaves the others alone in a collective, or counts its padding, and
    # ranks that share rows and all count them.
    results = []
    for world_size in (1, 4):
        output = tmp_path / f"on_{world_size}"
        options = ["--data.val_set_size", "2", "--train.max_steps", "1", "--train.gradient_accumulation_steps", "4"]
        options += [part.format(folder=folder) for part in (*model, *(layout if world_size > 1 else []))]
        run_ranks(lambda output=output, options=options: error_of(folder, output, *options), world_size)
        results.append([record for record in metrics_of(output) if record["step"] == 0])
    [[alone], [together]] = results
    assert together == pytest.approx(alone, rel=1e-6)
    assert together["eval_num_tokens"] > 0
