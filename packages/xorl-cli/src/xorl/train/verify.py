"""Verifies that a layout computes what one process computes: losses, every gradient, and the norm of the gradient.

The layout's ranks and one process take the same steps in fp32 from the same random weights, and each writes a `Result`
into a folder. `compare` gives the errors by group of parameters.

Dropout is left out of this comparison, because each rank draws masks for its own tokens. But a layer that is recomputed
must draw the same masks again: the layout also takes the steps with dropout, once with recomputation and once without.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from xorl.ckpt.layout import JSON
from xorl.config import Config
from xorl.config.local import TrainConfig
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import AXES, Mesh
from xorl.core.models import Decoder
from xorl.core.models.composite import with_entries
from xorl.core.models.initial import fill_normal_, key_of
from xorl.core.nn.share import pieces, shares_of
from xorl.data import PackedBatch
from xorl.data.batch import IGNORE, PREFERENCE, Column, Document, collate
from xorl.data.images import ImageSettings
from xorl.data.pairs import CROSSED, REFERENCE
from xorl.lora import adapters
from xorl.train.architecture import Architecture
from xorl.train.build import build_engine
from xorl.train.cut_down import cut_down
from xorl.train.data import padding_multiple
from xorl.train.engine import Engine
from xorl.train.model import sketch_model
from xorl.train.model_source import read_architecture
from xorl.train.parallel_sizes import chunks_of
from xorl.train.preference import Preference, preference_loss
from xorl.train.startup import parallel_dims
from xorl.train.verify_images import cut_images, with_images, with_random_images

ValueT = TypeVar("ValueT")
# Relative to the norm. AdamW's steps depend on the signs of tiny gradients, so later losses differ more.
TOLERANCE = 1e-5
LATER_TOLERANCE = 1e-4
NUM_STEPS = 3
# Large enough that a wrong update shows in the next loss.
LR = 1e-3
NUM_MICRO_BATCHES = 2
# Where the results with dropout are, below the folder of the layout's result.
RECOMPUTED, KEPT = "recomputed", "kept"
SIZE_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "dp_replicate": "data_parallel_replicate_size",
        "dp_shard": "data_parallel_shard_size",
        "ulysses": "ulysses_parallel_size",
        "ring": "ringattn_parallel_size",
        "ep": "expert_parallel_size",
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
    }
)


@dataclass(frozen=True)
class Result:
    """The results of a layout. `gradients` are of the first step, divided as the optimizer divides them."""

    losses: list[float]
    grad_norm: float
    gradients: Mapping[str, Tensor]
    groups: Mapping[str, str]
    sizes: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Read what `measure` wrote."""
        values = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return cls(gradients=load_file(folder / "gradients.safetensors"), **values)

    def write(self, folder: Path) -> None:
        """Write the files that `read` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: gradient.contiguous() for name, gradient in self.gradients.items()}, folder / "gradients.safetensors"
        )
        values = {key: value for key, value in vars(self).items() if key != "gradients"}
        (folder / "result.json").write_text(json.dumps(values), encoding="utf-8")


@dataclass(frozen=True)
class Difference:
    """The largest relative error of one kind of value, and where it is."""

    error: float
    tolerance: float
    where: str

    @property
    def is_within(self) -> bool:
        # False for NaN.
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """The configuration whose layout is compared with one process.

    Everything is computed in fp32, with random weights. Unless `is_full`, the model has few layers and narrow widths.

    Attributes:
        architecture: the name of the model's class.
        dropout: of the adapters; 0 if nothing is recomputed, because then nothing draws its masks twice.
        left_out: what of the given configuration is not compared, as "option: value".
    """

    config: Config
    architecture: str
    dropout: float
    is_full: bool
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, *, is_full: bool) -> Verification:
        """Derive the configuration from that of a run. Raises ValueError if its model does not fit its options."""
        train, lora, model = config.train, config.lora, config.model
        architecture = read_architecture(model, train.load_weights_mode)
        sketch_model(architecture, model, train, lora)
        cut = {} if is_full else _cut(architecture, train)
        attention = "auto" if model.attn_implementation.startswith("flash_attention") else model.attn_implementation
        replaced: dict[str, dict[str, object]] = {
            "train": {"enable_mixed_precision": False, "fp8": "none", "enable_cuda_graphs": False},
            "lora": {"lora_dropout": 0.0, "sweep": [], "enable_aqn": False},
            "model": {"attn_implementation": attention, "recurrence_implementation": "auto"},
        }
        dropout = lora.lora_dropout if lora.enable_lora and train.enable_gradient_checkpointing else 0.0
        left_out = tuple(
            f"{section}.{name}: {given}"
            for section, options in replaced.items()
            for name, value in options.items()
            if (given := getattr(getattr(config, section), name)) != value and not (name == "lora_dropout" and dropout)
        )
        replaced["train"] |= {
            "param_dtype": "fp32",
            "optimizer_dtype": "fp32",
            "load_weights_mode": "broadcast",
            "recompute_policy": "module" if train.recompute_policy == "auto" else train.recompute_policy,
        }
        replaced["lora"] |= {"adapter_path": None}
        replaced["model"] |= {
            "config_path": model.config_path or model.model_path,
            "model_path": None,
            "encoders": {
                kind: encoder.model_copy(
                    update={"model_path": None, "config_path": encoder.config_path or encoder.model_path}
                )
                for kind, encoder in model.encoders.items()
            },
            "foundation": {**model.foundation, **cut},
        }
        sections = {"train": train, "lora": lora, "model": model}
        update = {name: section.model_copy(update=replaced[name]) for name, section in sections.items()}
        return cls(config.model_copy(update=update), architecture.spec.architecture, dropout, is_full, left_out)


def without_recomputation(config: Config) -> Config:
    """The configuration in which the backward pass finds all activations."""
    kept = {
        "enable_gradient_checkpointing": False,
        "moe_checkpoint_method": None,
        "recompute_modules": type(config.train).model_fields["recompute_modules"].default,
    }
    return config.model_copy(update={"train": config.train.model_copy(update=kept)})


def with_dropout(config: Config, dropout: float) -> Config:
    """The configuration with this dropout in its adapters."""
    return config.model_copy(update={"lora": config.lora.model_copy(update={"lora_dropout": dropout})})


def one_process(config: Config) -> Config:
    """The configuration of the process that the layout is compared with: no parallelism, and nothing saves memory."""
    plain = {
        "data_parallel_mode": "none",
        **dict.fromkeys(SIZE_OPTIONS.values(), 1),
        "data_parallel_shard_size": -1,
        "data_parallel_replicate_size": -1,
        "pipeline_parallel_schedule": "1F1B",
        "ep_outside": False,
        "enable_activation_offload": False,
        "enable_cpu_offload": False,
        "enable_compile": False,
        "init_device": "auto",
    }
    return without_recomputation(config.model_copy(update={"train": config.train.model_copy(update=plain)}))


def one_axis(config: Config, axis: str, size: int) -> Config:
    """The configuration with one axis of its layout alone, on `size` ranks."""
    sizes = dict.fromkeys(SIZE_OPTIONS.values(), 1) | {SIZE_OPTIONS[axis]: size}
    if axis == "ep":  # its ranks also shard the other parameters
        sizes["data_parallel_shard_size"] = size
    return config.model_copy(update={"train": config.train.model_copy(update=sizes)})


def measure(config: Config, folder: Path, num_bins: int, dropout: float = 0.0) -> None:
    """Take the steps of this process's part of a layout; rank 0 writes the `Result` into `folder`. Collective.

    With `dropout`, also those with dropout, with and without recomputation, into the folders RECOMPUTED and KEPT.
    """
    joined = runtime.init()
    architecture = read_verified(config)
    variants = {folder: config}
    if dropout:
        dropped = with_dropout(config, dropout)
        variants |= {folder / RECOMPUTED: dropped, folder / KEPT: without_recomputation(dropped)}
    for target, variant in variants.items():
        gc.collect()  # the former model: the modules and states of FSDP2 refer to each other
        mesh = Mesh(parallel_dims(variant, joined.world_size), joined.device.type)
        runtime.seed_everything(variant.train.seed, mesh.losses.rank)
        result = take_steps(build_engine(variant, architecture, mesh, joined.device), variant, architecture, num_bins)
        if joined.is_main:
            result.write(target)
    runtime.shutdown()


def read_verified(config: Config) -> Architecture:
    """The architecture, with random images for a model that reads images, unless the run is on pairs of answers."""
    architecture = read_architecture(config.model)
    return architecture if preference_loss(config) is not None else with_random_images(architecture)


def take_steps(engine: Engine, config: Config, architecture: Architecture, num_bins: int) -> Result:
    """Train for a few steps of `num_bins` bins. Collective."""
    module, mesh = engine.model.module, engine.model.mesh
    assert isinstance(module, Decoder)
    _draw(module)
    preference = Preference.of(config, engine)
    loss_fn = cross_entropy if preference is None else preference.loss
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    grad_norm = 0.0
    for step in range(NUM_STEPS):
        vocab_size, images = architecture.config.vocab_size, architecture.images
        batches: Sequence[PackedBatch] = batches_of(step, num_bins, vocab_size, config, mesh, images)
        if preference is not None:
            batches = preference.prepare(batches)
        summed = engine.forward_backward(batches, loss_fn)
        divisor = summed.num_terms
        losses.append(float(summed.loss_sum / divisor))
        if step == 0:
            gradients = {
                name: engine.model.shares.gather_gradient(name, parameter).float().cpu().clone() / divisor.cpu().float()
                for name, parameter in module.named_parameters()
                if parameter.requires_grad and (parameter.grad is not None or name in engine.model.shares)
            }
        update = engine.optim_step(LR, divisor)
        if step == 0:
            grad_norm = float(update.grad_norm)
    roles = module.parameter_roles()
    return Result(
        losses,
        grad_norm,
        of_all_stages(gradients, mesh),
        of_all_stages({name: roles[name] for name in gradients}, mesh),
        {axis: size for axis in (*AXES, "ep") if (size := getattr(mesh.dims, axis)) > 1},
    )


def of_all_stages(own: Mapping[str, ValueT], mesh: Mesh) -> dict[str, ValueT]:
    """The tensors of all stages of a pipeline, by name. Collective among its ranks."""
    by_stage = [own] * mesh.pp.size
    if mesh.pp.size > 1:
        dist.all_gather_object(by_stage, own, group=mesh.pp.group)
    return {name: value for one in by_stage for name, value in one.items()}


def _cut(architecture: Architecture, train: TrainConfig) -> dict[str, object]:
    """The entries of a config.json that make the model small."""
    cut = cut_down(
        architecture.text_values,
        train.ulysses_parallel_size,
        train.tensor_parallel_size,
        train.pipeline_parallel_size * chunks_of(train),
    )
    if architecture.config.images is not None:
        vocab_size = cut.get("vocab_size", architecture.config.vocab_size)
        assert isinstance(vocab_size, int), "a number of rows"
        cut |= cut_images(architecture.hf_config, cut, vocab_size)
    others = {key: value for key, value in cut.items() if key != "pad_token_id"}
    if cut.get("pad_token_id") is None:
        # It matters only in families with a padding id that the small vocabulary lacks.
        with suppress(ValueError):
            architecture.spec.config_from_hf(with_entries(architecture.hf_config, others))
            return others
    return cut


@torch.no_grad()
def _draw(module: Decoder) -> None:
    """Draw what starts at zero or one, alike on all layouts.

    Zeros hide a bias that every rank adds, and let no gradient reach the other factors of adapters.
    """
    shares, roles = shares_of(module), module.parameter_roles()
    for name, parameter in module.named_parameters():
        if roles[name] in ("bias", "norm", "correction", "recurrence"):
            share = shares.get(name)
            shape = tuple(parameter.shape) if share is None else share.whole(parameter.shape)
            for box, part in pieces(parameter, share):
                fill_normal_(part, std=0.1, key=key_of(1, name, shape), shape=shape, offset=box.offset)
                part.add_(1.0 if roles[name] == "norm" else 0.0)
    for adapter in adapters(module).values():
        shape, held = adapter.place(adapter.zero)
        for box, part in held:
            fill_normal_(part, std=0.1, key=key_of(0, adapter.name, shape), shape=shape, offset=box.offset)


def batches_of(
    step: int, num_bins: int, vocab_size: int, config: Config, mesh: Mesh, images: ImageSettings | None = None
) -> list[PackedBatch]:
    """This rank's micro-batches of a step: rows of uneven documents, of which some tokens are not trained.

    images: with which most documents have a random image.
    For losses of pairs, each document is a pair of answers, with random scores of an initial model.
    """
    loss = preference_loss(config)
    bins = [_bin(step * num_bins + index, vocab_size, images) for index in range(num_bins)]
    bins = bins if loss is None else [[_pair(document) for document in documents] for documents in bins]
    own = bins[mesh.data.rank :: mesh.data.size]
    # More than stages, so that several are in flight.
    size = -(-len(own) // (NUM_MICRO_BATCHES * mesh.dims.pp))
    if loss is not None and loss.needs_baseline:
        size = 1  # as in a run, where the pairs of other bins are not compared
    multiple = padding_multiple(config)
    columns = {} if loss is None else {name: Column() for name in (PREFERENCE, REFERENCE, CROSSED)}
    return [
        collate(
            list(chain.from_iterable(own[start : start + size])),
            pad_to_multiple_of=multiple,
            columns=columns,
            images=images,
        )
        for start in range(0, len(own), size)
    ]


def _bin(index: int, vocab_size: int, images: ImageSettings | None) -> list[Document]:
    generator = torch.Generator().manual_seed(index)
    documents: list[Document] = []
    for length in (3 + index % 7, 17, 40 + index % 5):
        ids = torch.randint(vocab_size, (length,), generator=generator)
        is_trained = torch.rand(length, generator=generator) < 0.2 + 0.1 * (index % 8)
        documents.append(Document(ids.numpy(), torch.where(is_trained, ids, IGNORE).numpy()))
    if images is not None:
        documents = [with_images(each, images, 3 * index + number) for number, each in enumerate(documents)]
    return documents


def _pair(document: Document) -> Document:
    """A document as a pair: the rejected answer is the chosen one backwards, without its last tokens."""
    ids, labels = document.input_ids, document.labels.copy()
    labels[-1] = ids[-1]  # every answer has a trained token
    cut = len(ids) // 3
    backwards = ids[::-1][cut:]
    other = np.where(labels[cut:] == IGNORE, labels[cut:], backwards)
    scores = np.sin(np.arange(len(ids) + len(other), dtype=np.float32)) - 2
    return Document(
        np.concatenate([ids, backwards]),
        np.concatenate([labels, other]),
        {
            PREFERENCE: np.repeat(np.array([1, -1], np.float32), [len(ids), len(other)]),
            REFERENCE: scores,
            CROSSED: scores * 2,
        },
    )


def compare(layout: Result, whole: Result) -> dict[str, Difference]:
    """The largest relative errors of the layout, by kind: losses, the norm, and gradients by group of parameters.

    The terms of a scalar's gradient may cancel to almost 0, so its error is relative to the norm of all scalars.
    """
    found = {
        "loss": Difference(_error(layout.losses[0], whole.losses[0]), TOLERANCE, "first step"),
        "later losses": max(
            (
                Difference(_error(mine, theirs), LATER_TOLERANCE, f"step {step}")
                for step, (mine, theirs) in enumerate(zip(layout.losses[1:], whole.losses[1:], strict=True), 2)
            ),
            key=_size,
            default=Difference(0.0, LATER_TOLERANCE, "no later step"),
        ),
        "gradient norm": Difference(_error(layout.grad_norm, whole.grad_norm), TOLERANCE, "first step"),
    }
    of_scalars = math.hypot(*(_norm(one) for name, one in whole.gradients.items() if whole.groups[name] == "scalar"))
    for name, theirs in whole.gradients.items():
        mine, norm = layout.gradients.get(name), of_scalars if whole.groups[name] == "scalar" else _norm(theirs)
        error = float("inf") if mine is None or mine.shape != theirs.shape else _tensor_error(mine, theirs, norm)
        group = f"gradients: {whole.groups[name]}"
        difference = Difference(error, TOLERANCE, name)
        found[group] = max(found.get(group, difference), difference, key=_size)
    for name in layout.gradients.keys() - whole.gradients.keys():
        found[f"gradients: {layout.groups[name]}"] = Difference(float("inf"), TOLERANCE, name)
    return found


def compare_dropout(recomputed: Result, kept: Result) -> Difference:
    """The largest difference that recomputation makes with dropout, of all that `compare` finds."""
    return max(compare(recomputed, kept).values(), key=lambda one: _size(one) / one.tolerance)


def is_equal(differences: Mapping[str, Difference]) -> bool:
    """Whether all differences are within what is allowed."""
    return all(difference.is_within for difference in differences.values())


@dataclass(frozen=True)
class Report:
    """The outcome of a verification.

    differing_axes: the axes of the layout that differ from one process even if they are used alone.
    """

    verification: Verification
    layout: Result
    differences: Mapping[str, Difference]
    differing_axes: Sequence[str]

    def certificate(self, world_size: int) -> dict[str, JSON]:
        """The contents of certificate.json."""
        return {
            "passed": is_equal(self.differences),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "xorl": version("xorl-cli"),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "world_size": world_size,
            "layout": dict(self.layout.sizes),
            "architecture": self.verification.architecture,
            "is_full": self.verification.is_full,
            "left_out": list(self.verification.left_out),
            "differing_axes": list(self.differing_axes),
            "differences": {kind: asdict(difference) for kind, difference in self.differences.items()},
        }

    def text(self) -> str:
        """The outcome as a table in Markdown, and what was left out."""
        axes = " x ".join(f"{axis} {n}" for axis, n in self.layout.sizes.items()) or "one process (--nproc-per-node 1)"
        size = "the whole model" if self.verification.is_full else "few layers and narrow widths"
        lines = [
            f"{self.verification.architecture} ({size}): {axes} compared with one process, in fp32",
            "",
            "| compared | largest relative error | allowed | where | |",
            "|---|---|---|---|---|",
        ]
        for kind, one in self.differences.items():
            verdict = "" if one.is_within else "**differs**"
            lines.append(f"| {kind} | {one.error:.1e} | {one.tolerance:.0e} | {one.where} | {verdict} |")
        if self.verification.left_out:
            lines += ["", f"not compared: {', '.join(self.verification.left_out)}"]
        if not is_equal(self.differences) and len(self.layout.sizes) > 1:
            alone = ", ".join(self.differing_axes) or "none: only several axes together differ"
            lines += ["", f"axes that differ on their own: {alone}"]
        return "\n".join(lines)


def _size(difference: Difference) -> float:
    """The key for a maximum, in which NaN is the largest error."""
    return float("inf") if difference.error != difference.error else difference.error


def _error(mine: float, theirs: float) -> float:
    return abs(mine - theirs) / max(abs(theirs), 1e-30)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _tensor_error(mine: Tensor, theirs: Tensor, norm: float) -> float:
    return _norm(mine.double() - theirs.double()) / (norm or 1.0)
