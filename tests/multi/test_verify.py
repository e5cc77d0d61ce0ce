"""`xorl verify`: equal layouts pass, and each planted fault is found."""

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from image_models import IMAGE_MODELS
from layouts import run_config, steps
from ranks import Launch, Launches
from tiny_models import hf_config, write_config
from xorl.config import Config
from xorl.core.nn import dispatch
from xorl.core.nn.rotary import Rotary
from xorl.core.optim import clip
from xorl.core.optim.clip import Rest
from xorl.core.parallel import activations
from xorl.core.parallel.shares import Shares
from xorl.core.shards import local
from xorl.kernels.attention import ring
from xorl.kernels.layout import SequenceLayout, ShardedLayout
from xorl.train import engine as engine_module
from xorl.train import model_passes, verify
from xorl.train import rows as rows_module
from xorl.train.engine import Engine
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims

NUM_EXPERTS = 4
LARGE = {"hidden_size": 1152, "intermediate_size": 4304}
FSDP = {"data_parallel_mode": "fsdp2"}
DROPOUT = {"enable_lora": True, "lora_dropout": 0.2}
RECOMPUTE = {**FSDP, "enable_gradient_checkpointing": True}
# As large as those of real models, with their decoders narrow.
LARGE_ENCODERS = {
    name: {**values, "vision_config": {**values["vision_config"], **LARGE, **own}}
    for name, values, own in (
        ("images", IMAGE_MODELS["images"], {"depth": 27, "num_heads": 16, "deepstack_visual_indexes": [8, 16]}),
        ("composed", IMAGE_MODELS["composed"], {"num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336}),
    )
}
# A model of more layers than a verification computes, and those for planted faults, which show in two.
MODELS = {
    "deep": hf_config("qwen3", num_hidden_layers=6),
    "qwen3": hf_config("qwen3"),
    "qwen3_moe": hf_config("qwen3_moe", num_experts=NUM_EXPERTS),
}

Fault = Callable[[pytest.MonkeyPatch], Callable[[Engine], None] | None]


def wrong_divisor(patch: pytest.MonkeyPatch) -> None:
    divide = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: divide(self, 2 * factor))


def missing_all_reduce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "dist", SimpleNamespace(all_reduce=lambda tensor, group: None))


def norm_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clip, "_sharding_groups", lambda mesh, placements: ())


def ignored_document_border(patch: pytest.MonkeyPatch) -> None:
    def merged(cu_seqlens: torch.Tensor, positions: torch.Tensor, lengths: tuple, **others: object) -> SequenceLayout:
        first, second, *rest = lengths
        plain = SequenceLayout.from_lengths((first + second, *rest))
        layout = SequenceLayout(plain.cu_seqlens, plain.positions, plain.lengths, **others)
        layout.positions = positions
        return layout

    patch.setattr(model_passes, "SequenceLayout", merged)


def wrong_rotary_offset(patch: pytest.MonkeyPatch) -> None:
    tables = Rotary.tables

    def shifted(self: Rotary, layout: SequenceLayout, device: torch.device, *others: object) -> object:
        moved = layout.positions + (torch.arange(layout.num_tokens) >= layout.num_tokens // 2)
        shifted_layout = SequenceLayout.from_lengths(layout.lengths)
        shifted_layout.positions = moved
        return tables(self, shifted_layout, device, *others)

    patch.setattr(Rotary, "tables", shifted)


def swapped_shards_of_a_stack(patch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    @torch.no_grad()
    def swap(engine: Engine) -> None:
        weight = dict(engine.model.module.named_parameters())["model.layers.0.mlp.gate_up_proj.weight"]
        part = local(weight)
        part.copy_(part.flip(0))

    return swap


def counts_over_the_data_axis(patch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    def narrow(engine: Engine) -> None:
        patch.setattr(engine.model.mesh, "losses", engine.model.mesh.data)

    return narrow


def positions_of_the_part(patch: pytest.MonkeyPatch) -> None:
    def numbered_from_zero(whole: SequenceLayout, *others: object) -> ShardedLayout:
        layout = ShardedLayout(whole, *others)
        layout.positions = whole.positions[: layout.num_tokens]
        return layout

    patch.setattr(rows_module, "ShardedLayout", numbered_from_zero)


def gradients_that_do_not_return(patch: pytest.MonkeyPatch) -> None:
    start = ring._start_return

    def without_others(plan: ring.RingPlan, group_name: str, *grads: torch.Tensor) -> object:
        sizes = [piece.rows.stop - piece.rows.start for piece in plan.pieces]
        for (is_received, *_), *parts in zip(plan.pieces, *(grad.split(sizes) for grad in grads), strict=True):
            for part in parts:
                part.mul_(not is_received)
        return start(plan, group_name, *grads)

    patch.setattr(ring, "_start_return", without_others)


def keys_of_others_are_missing(patch: pytest.MonkeyPatch) -> None:
    ring.plan_ring.cache_clear()
    patch.setattr(ring, "_first_key", lambda offsets, start, window: start)


def expert_gradients_times_ranks(patch: pytest.MonkeyPatch) -> None:
    combine = dispatch._Combine.backward

    def doubled(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, *others = combine(ctx, grad)
        return 2 * first, *others

    patch.setattr(dispatch._Combine, "backward", staticmethod(doubled))


def norm_without_other_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shares, "divided", lambda self, model: {})


def norm_of_whole_parameters_twice(patch: pytest.MonkeyPatch) -> None:
    def all_of_them(self: Shares, model: torch.nn.Module) -> dict:
        return {parameter: Rest((self._mesh.axis("ep").group,)) for parameter in model.parameters()}

    patch.setattr(Shares, "divided", all_of_them)


def tokens_that_do_not_return(patch: pytest.MonkeyPatch) -> None:
    summed = dispatch._Plan.summed

    def of_the_first_rank(self: dispatch._Plan, values: torch.Tensor) -> torch.Tensor:
        self.rows[:, 1:] = len(values)
        return summed(self, values)

    patch.setattr(dispatch._Plan, "summed", of_the_first_rank)


def routers_without_gradients(patch: pytest.MonkeyPatch) -> None:
    backward = dispatch._Dispatch.backward

    def without(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_weights, *others = backward(ctx, *grads)
        assert grad_weights is not None
        return grad_x, torch.zeros_like(grad_weights), *others

    patch.setattr(dispatch._Dispatch, "backward", staticmethod(without))


def experts_under_other_numbers(patch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    @torch.no_grad()
    def swap(engine: Engine) -> None:
        for name, parameter in engine.model.module.named_parameters():
            if name in engine.model.shares and engine.model.mesh.axis("ep").rank == 1:
                part = local(parameter)
                part.copy_(
                    part.unflatten(0, (engine.model.module.config.layers[0].ffn.num_experts // 2, -1))
                    .flip(0)
                    .flatten(0, 1)
                )

    return swap


def masks_that_differ_when_recomputed(patch: pytest.MonkeyPatch) -> None:
    checkpoint = activations.checkpoint

    def without_state(*arguments: object, **options: object) -> object:
        return checkpoint(*arguments, **{**options, "preserve_rng_state": False})

    patch.setattr(activations, "checkpoint", without_state)


NO_FAULT: dict[str, tuple[Fault, str]] = {"none": (lambda patch: None, "")}
# Faults of ranks that share rows.
SHARING_FAULTS: dict[str, tuple[Fault, str]] = {
    **NO_FAULT,
    "counts over the data axis": (counts_over_the_data_axis, "loss"),
    "positions of the part": (positions_of_the_part, "gradients: dense"),
}
# By the model and the axis that has both ranks: faults, and what shows each.
FAULTS: dict[tuple[str, str], dict[str, tuple[Fault, str]]] = {
    ("qwen3", "dp_shard"): {
        **NO_FAULT,
        "wrong divisor": (wrong_divisor, "gradients: dense"),
        "missing all-reduce": (missing_all_reduce, "loss"),
        "norm of one rank": (norm_of_one_rank, "gradient norm"),
        "ignored document border": (ignored_document_border, "gradients: dense"),
        "wrong rotary offset": (wrong_rotary_offset, "gradients: dense"),
        "swapped shards of a stack": (swapped_shards_of_a_stack, "gradients: dense"),
    },
    ("qwen3", "ulysses"): SHARING_FAULTS,
    ("qwen3", "ring"): {
        **SHARING_FAULTS,
        "keys of others without gradients": (gradients_that_do_not_return, "gradients: dense"),
        "keys of others are missing": (keys_of_others_are_missing, "loss"),
    },
    ("qwen3_moe", "ep"): {
        **NO_FAULT,
        "gradients of experts times the ranks": (expert_gradients_times_ranks, "gradients: expert"),
        "norm without other experts": (norm_without_other_experts, "gradient norm"),
        "norm of whole parameters twice": (norm_of_whole_parameters_twice, "gradient norm"),
        "tokens that do not return": (tokens_that_do_not_return, "loss"),
        "routers without gradients": (routers_without_gradients, "gradients: router"),
        "experts under other numbers": (experts_under_other_numbers, "loss"),
    },
}
PLANTED = [(model, axis, name) for (model, axis), faults in FAULTS.items() for name in faults]


def faulty(config: Config, fault: Fault = NO_FAULT["none"][0]) -> verify.Result:
    with pytest.MonkeyPatch.context() as patch:
        found = steps(config, change=fault(patch))
    ring.plan_ring.cache_clear()
    return found


def models_before_each(config: Config, dropout: float, folder: Path) -> list[int]:
    """How many former models are in memory each time that a verification builds one."""
    build, made, found = verify.build_engine, list[weakref.ref[nn.Module]](), list[int]()

    def build_counted(*arguments: Any) -> Engine:
        found.append(sum(one() is not None for one in made))
        engine = build(*arguments)
        made.append(weakref.ref(engine.model.module))
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "build_engine", build_counted)
        patch.setattr(verify.runtime, "shutdown", lambda: None)
        verify.measure(config, folder, verify.NUM_MICRO_BATCHES, dropout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, shape in MODELS.items():
        write_config(folder / name, shape)
    return folder


@pytest.fixture(scope="module")
def found(launch: Launch, folder: Path) -> Launches:
    """Steps by model, axis and fault, or with dropout by model and whether, and how, layers are recomputed."""
    cells: dict[tuple, tuple[int, Callable[[], object]]] = {}
    for model, axis, name in PLANTED:
        config = verify.Verification.of(run_config(folder, model, FSDP), is_full=False).config
        cells[model, "one process"] = (1, partial(faulty, verify.one_process(config)))
        # The faults of experts are planted in the exact exchange.
        exact = config.model_copy(update={"model": config.model.model_copy(update={"ep_dispatch": "alltoall"})})
        cells[model, axis, name] = (2, partial(faulty, verify.one_axis(exact, axis, 2), FAULTS[model, axis][name][0]))
    for model in ("qwen3", "qwen3_moe"):
        verification = verify.Verification.of(run_config(folder, model, RECOMPUTE, DROPOUT), is_full=False)
        assert verification.dropout == 0.2
        dropped = verify.one_axis(verify.with_dropout(verification.config, verification.dropout), "dp_shard", 2)
        cells[model, "kept"] = (2, partial(faulty, verify.without_recomputation(dropped)))
        cells[model, "recomputed"] = (2, partial(faulty, dropped))
        cells[model, "recomputed with other masks"] = (2, partial(faulty, dropped, masks_that_differ_when_recomputed))
        measured = partial(models_before_each, verification.config, verification.dropout, folder / "results")
        cells[model, "measured"] = (1, measured)
    return launch(cells)


@pytest.mark.parametrize(("model", "axis", "name"), PLANTED)
def test_every_planted_fault_is_found(model: str, axis: str, name: str, found: Launches) -> None:
    # Catches a comparison that is blind to a fault, or to what only ranks with different experts can get wrong, and one
    # that finds a fault where there is none.
    result = found(model, axis, name)[0]
    differences = verify.compare(result, found(model, "one process")[0])
    assert verify.is_equal(differences) == (name == "none"), differences
    shown = FAULTS[model, axis][name][1]
    assert not shown or not differences[shown].is_within, differences
    assert result.sizes == ({"dp_shard": 2, "ep": 2} if axis == "ep" else {axis: 2})


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_masks_that_differ_where_they_must_agree_are_found(model: str, found: Launches) -> None:
    # Catches gradients of other masks than those of the forward pass.
    kept = found(model, "kept")[0]
    assert verify.compare_dropout(found(model, "recomputed")[0], kept).is_within
    assert not verify.compare_dropout(found(model, "recomputed with other masks")[0], kept).is_within


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_the_variants_of_a_verification_are_in_memory_one_at_a_time(model: str, found: Launches) -> None:
    # Catches a layout that fits on its devices and whose verification does not.
    assert found(model, "measured") == [[0, 0, 0]]


def test_scalars_are_compared_relative_to_all_of_them() -> None:
    # Catches a difference where the terms of a scalar's gradient cancel, and one that is lost among others.
    def result(small: float) -> verify.Result:
        gradients = {"large": torch.tensor([0.5]), "small": torch.tensor([small])}
        return verify.Result([1.0], 1.0, gradients, dict.fromkeys(gradients, "scalar"), {})

    assert verify.is_equal(verify.compare(result(1.001e-6), result(1e-6)))
    assert verify.compare(result(0.0), result(1e-5))["gradients: scalar"].where == "small"
    assert not verify.is_equal(verify.compare(result(0.0), result(1e-5)))


def test_one_process_is_not_presented_as_a_layout(folder: Path) -> None:
    # Catches a table that shows equality where nothing but one process was started.
    verification = verify.Verification.of(run_config(folder, "qwen3", FSDP), is_full=False)
    for sizes, is_alone in (({}, True), ({"dp_shard": 2}, False)):
        text = verify.Report(verification, verify.Result([1.0], 1.0, {}, {}, sizes), {}, ()).text()
        assert ("one process (--nproc-per-node 1) compared with" in text) == is_alone


def test_dropout_is_compared_only_where_layers_are_recomputed(folder: Path) -> None:
    # Catches an option that is left out in silence.
    for recompute, left_out in ((True, ()), (False, ("lora.lora_dropout: 0.2",))):
        config = run_config(folder, "qwen3", {**FSDP, "enable_gradient_checkpointing": recompute}, DROPOUT)
        assert verify.Verification.of(config, is_full=False).left_out == left_out


def test_a_verification_is_cut_down_and_says_what_it_leaves_out(folder: Path) -> None:
    # Catches a model that stays as large as it is, and options that are left out in silence.
    config = run_config(folder, "deep", {**FSDP, "fp8": "tensorwise", "enable_mixed_precision": True})
    cut = verify.Verification.of(config, is_full=False)
    assert cut.left_out == ("train.enable_mixed_precision: True", "train.fp8: tensorwise")
    assert read_architecture(cut.config.model).config.num_layers == 4
    whole = verify.Verification.of(config, is_full=True)
    assert read_architecture(whole.config.model).config.num_layers == 6


@pytest.mark.parametrize("model", ["images", "composed"])
def test_a_model_with_an_image_encoder_is_cut_down_and_gets_images(model: str, tmp_path: Path) -> None:
    # Catches an encoder that stays as large as it is, and a verification on text alone.
    write_config(tmp_path / model, LARGE_ENCODERS[model])
    cut = verify.Verification.of(run_config(tmp_path, model, FSDP), is_full=False)
    architecture = verify.read_verified(cut.config)
    images = architecture.config.images
    assert images is not None
    assert architecture.images is not None
    assert (images.num_blocks <= 4, images.width) == (True, 64)
    mesh = SimpleNamespace(data=SimpleNamespace(rank=0, size=1), dims=SimpleNamespace(pp=1))
    batches = verify.batches_of(0, 8, 384, cut.config, mesh, architecture.images)
    assert sum(batch.images.num_images for batch in batches) == 18


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "ulysses", "ring"])
def test_an_axis_alone_has_all_ranks(axis: str, folder: Path) -> None:
    # Catches a fault that is attributed to an axis, found with another one.
    options = {"data_parallel_shard_size": 4, "data_parallel_replicate_size": 2}
    options |= {"ulysses_parallel_size": 2, "ringattn_parallel_size": 2}
    dims = parallel_dims(verify.one_axis(run_config(folder, "qwen3", {**FSDP, **options}), axis, 2), 2)
    assert getattr(dims, axis) == dims.world_size == 2


def test_the_command_writes_a_certificate_that_checkpoints_carry(run_command, tmp_path: Path) -> None:
    # Catches ranks that are not started, an exit code that hides a difference, and a certificate that is lost.
    output = tmp_path / "out"
    arguments = [
        "configs/local/qwen3_moe_tiny.yaml",
        *("--train.output_dir", str(output), "--data.dataset_prepared_path", str(tmp_path / "prepared")),
    ]
    command = [sys.executable, "-m", "xorl.cli.verify", *arguments, "--nproc-per-node", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    certificate = json.loads((output / "certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["layout"] == {"dp_replicate": 2}
    assert "gradients: router" in certificate["differences"]
    trained = run_command(*arguments, "--train.max_steps", "1", "--train.eval_steps", "null")
    assert trained.returncode == 0, trained.stderr
    carried = output / "checkpoints" / "global_step_1" / "certificate.json"
    assert json.loads(carried.read_text()) == certificate
