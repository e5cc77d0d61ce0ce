"""Verifies an exported folder by loading it with other tools: transformers, and PEFT for adapters.

Checks that the tensor names match theirs, that no adapter is zero, and that the logits match xorl's own model.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from xorl.ckpt import SafetensorsSource, WeightSource, load_weights
from xorl.core.models import ModelSpec
from xorl.core.models.stacks import ExpertNames, cuts_of
from xorl.kernels.layout import SequenceLayout
from xorl.lora import inject
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE
from xorl.lora.peft.forms import readers_of
from xorl.lora.peft.layout import PREFIX, InMemoryTensors
from xorl.lora.prequantized import QUANTIZATION_KEY
from xorl.train.adapters.folder import AdapterFolder, load_adapter, open_adapter
from xorl.train.export.card import READER_NAMES, Figures, auto_class
from xorl.train.export.source import SavedModel, weights_at

logger = logging.getLogger(__name__)

NUM_ROWS, ROW_LEN = 4, 48
# The largest difference of logits, relative to the largest logit, that rounding of the weights can explain.
LIMITS: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2})

# The name of this entry in the model card.
ADAPTED_MODULES = "adapted modules, none of them zero"
EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)$")


class VerificationError(RuntimeError):
    """The exported files are wrong, because of a bug in xorl or in a library that it uses."""


def require_peft(purpose: str) -> ModuleType:
    """Import PEFT, an optional dependency. Raises ValueError, naming the `purpose`, if it is not installed."""
    try:
        import peft  # noqa: PLC0415  (an optional dependency)
    except ImportError as error:
        raise ValueError(f"{purpose} needs peft, which is not installed: pip install peft") from error
    return peft


@torch.no_grad()
def verify_model(folder: Path, saved: SavedModel, dtype: torch.dtype) -> Figures:
    """Load a full model in transformers and compare it with xorl's. `dtype`: the narrowest dtype of the weights.

    Returns the results for the model card. Raises VerificationError if the models differ or a merged adapter is zero.
    """
    merged: Figures = {}
    if saved.adapter is not None:
        merged = {ADAPTED_MODULES: _check_nonzero(saved.adapter)}
    ids, expected = _xorl_logits(saved)
    spec, config = saved.architecture.spec, saved.architecture.config
    with _quiet_transformers():
        loaded: object = _opener(spec).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = cast("tuple[nn.Module, Mapping[str, Collection[object]]]", loaded)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise VerificationError(f"transformers reports {kind} for {folder}: {sorted(map(str, info[kind]))[:5]}")
    # Under the names of checkpoints, since transformers stacks experts, and without the head of a tied model.
    theirs = spec.checkpoint_view(config, InMemoryTensors(model.state_dict())).names()
    with SafetensorsSource(folder) as source:
        num_keys = _check_keys(set(spec.checkpoint_view(config, source).names()), set(theirs))
    return {
        "transformers": transformers.__version__,
        "tensors, named as in transformers": num_keys,
        **merged,
        **_compare(_logits_of(model, ids), expected, dtype),
    }


@torch.no_grad()
def verify_adapter(folder: Path, saved: SavedModel, dtype: torch.dtype) -> Figures:
    """Load an adapter on its base in transformers, and compare with xorl's model. See `verify_model`.

    PEFT loads the adapter if `readers_of` lists PEFT. Otherwise, the adapter is merged by the names of its tensors, and
    the results say which programs were not tried.

    Raises VerificationError if they differ, ValueError if the base model or PEFT is not available.
    """
    if saved.base_path is None:
        raise ValueError(
            f"--verify: an adapter is compared on its base model, but only the checkpoint {saved.folder} contains it; "
            "use --merge"
        )
    assert saved.adapter is not None, "the caller checked it"
    architecture = saved.architecture
    names = architecture.spec.checkpoint_names.experts
    written = open_adapter(str(folder), str(folder), names)
    layout, has_experts = written.layout, architecture.config.has_experts
    is_stacked = names is not None and names.stack is not None
    readers = readers_of(layout.config, layout.modules, is_mixture=has_experts, is_stacked=is_stacked)
    peft = require_peft("--verify of an adapter") if "peft" in readers else None
    num_modules = _check_nonzero(written)
    _check_values(written, saved.adapter)
    # Compare on the base that the adapter names; the one in the checkpoint may be quantised.
    named_base = weights_at("--base", saved.base_path, architecture)
    ids, expected = _xorl_logits(replace(saved, base=named_base))
    with _quiet_transformers():
        base = _model_of(saved.base_path, named_base, _opener(architecture.spec))
        if peft is None:
            read_by: Figures = {
                "transformers, with the adapter merged by the names of its tensors": transformers.__version__,
                "not tried": " and ".join(READER_NAMES[reader] for reader in readers) or "no other program",
                "modules merged, experts included": _merge_by_names(base, folder, saved),
            }
            model: nn.Module = base
        else:
            model = peft.PeftModel.from_pretrained(base, folder)
            num_keys = _check_loaded(peft, model, folder)
            read_by = {
                "transformers": transformers.__version__,
                "peft": peft.__version__,
                "keys, the same as PEFT's": num_keys,
            }
    return {**read_by, ADAPTED_MODULES: num_modules, **_compare(_logits_of(model, ids), expected, dtype)}


def _opener(spec: ModelSpec) -> type[_BaseAutoModelClass]:
    return getattr(transformers, auto_class(spec))


def _model_of(path: str, weights: WeightSource, opener: type[_BaseAutoModelClass]) -> nn.Module:
    """Load the transformers model in `path` in fp32. If it is quantised, fill it with the dequantised `weights`.

    The products of quantised layers would not be exact: bitsandbytes rounds them on CPUs.
    """
    config = AutoConfig.from_pretrained(path)
    if getattr(config, QUANTIZATION_KEY, None) is None:
        return opener.from_pretrained(path, dtype=torch.float32)
    delattr(config, QUANTIZATION_KEY)
    tensors = {name: weights.read(name).float() for name in weights.names()}
    with torch.device("meta"):
        family = type(opener.from_config(config))
    return family.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)


def _check_loaded(peft: ModuleType, model: nn.Module, folder: Path) -> int:
    """The number of tensors in the file. Raises VerificationError unless PEFT's model has the same ones."""
    loaded = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    with SafetensorsSource(folder, single_file=WEIGHTS_FILE) as source:
        # Without PEFT's copies of the base's weights.
        names = {name for name in source.names() if ".lora_" in name or ".base_layer." not in name}
        num_keys = _check_keys(names, set(loaded))
        for name in sorted(names):
            if not torch.equal(loaded[name].cpu().float(), source.read(name).float()):
                raise VerificationError(f"{name} in PEFT differs from {folder / WEIGHTS_FILE}")
    return num_keys


def _merge_by_names(model: nn.Module, folder: Path, saved: SavedModel) -> int:
    """Merge an adapter's file into a model of transformers, which keeps all experts of a layer in one tensor.

    PEFT has no name for an adapter on a single expert, so this reads the file as inference engines do, by the names of
    the checkpoint, or by those of SGLang's stacks. Returns the number of modules.
    """
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    architecture = saved.architecture
    names = architecture.spec.checkpoint_names.experts
    assert names is not None, "only a mixture of experts has adapters on experts"
    num_modules = 0
    with SafetensorsSource(folder, single_file=WEIGHTS_FILE) as source:
        for key in sorted(source.names()):
            name = key.removeprefix(PREFIX)
            if ".lora_" not in name:  # a module that was trained whole
                model.get_parameter(name).data.copy_(source.read(key))
            if not name.endswith(".lora_A.weight"):
                continue
            module = name.removesuffix(".lora_A.weight")
            a, b = source.read(key).float(), source.read(key.replace(".lora_A.", ".lora_B.")).float()
            patterns = config["alpha_pattern"].items()
            matching = (value for end, value in patterns if re.fullmatch(rf"(.*\.)?({end})", module))
            alpha = next(matching, config["lora_alpha"])
            rank = a.shape[-2]
            scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
            if a.dim() == 3:  # [E or 1, rank, inputs] and [E or 1, outputs, rank]
                deltas = list((b @ a).unbind())
                of_stack = _members_of(module, len(deltas), names)
            else:
                deltas, of_stack = [b @ a], [module]
            for member, delta in zip(of_stack, deltas, strict=True):
                _weight_of(model, member, names).data.add_(delta, alpha=scale)
            num_modules += len(deltas)
    return num_modules


def _members_of(module: str, num_experts: int, names: ExpertNames) -> list[str]:
    """The experts' layers whose adapters SGLang stacks under the name `module`."""
    experts, _, projection = module.rpartition(".")
    leaf = {"w1": names.gate, "w3": names.up, "w2": names.down}.get(projection, projection)
    return [f"{experts}.{expert}.{leaf}" for expert in range(num_experts)]


def _weight_of(model: nn.Module, module: str, names: ExpertNames) -> Tensor:
    """The weight of a module of the checkpoint in a model of transformers, sharing its memory."""
    if (found := EXPERT.search(module)) is None:
        return model.get_parameter(f"{module}.weight")
    layer, projection = module[: found.start()].rpartition(".")[0], found[2]
    stack = f"{layer}.mlp.experts.{'down_proj' if projection == names.down else 'gate_up_proj'}"
    parameter = model.get_parameter(stack)
    cut = cuts_of(stack, parameter.shape, names)[f"{module}.weight"]
    return cut.of(parameter[cut.expert])


def _xorl_logits(saved: SavedModel) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length] and their logits in fp32 from xorl's own model, with adapters that are not merged."""
    config = saved.architecture.config
    device = _device()
    with torch.device("meta"):
        decoder = saved.architecture.spec.build(config)
    decoder = decoder.to_empty(device=device)
    recipes = saved.architecture.recipes(merge_qkv=True)
    load_weights(dict(decoder.named_parameters()), recipes, _Fp32Source(saved.base), mode="all_ranks")
    if saved.adapter is not None:
        try:
            inject(decoder, saved.adapter.layout.spec)
        except ValueError as error:
            raise ValueError(
                f"--verify: xorl's model cannot have this adapter, so nothing can be compared with it: {error}. "
                "Without --verify, the adapter is exported or merged as it is"
            ) from error
        load_adapter(decoder, saved.adapter, recipes)
    generator = torch.Generator().manual_seed(0)
    length = min(ROW_LEN, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (NUM_ROWS, length), generator=generator)
    layout = SequenceLayout.from_lengths([length] * NUM_ROWS, device=device)
    logits = decoder.eval()(ids.flatten().to(device), layout)
    return ids, logits.float().cpu().unflatten(0, ids.shape)


class _Fp32Source:
    """Reports fp32 for every tensor of a source, so that no value is rounded, including dequantised ones."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        return self._source.read(name, start, stop)


def _logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    device = _device()
    return model.eval().to(device)(ids.to(device)).logits.float().cpu()


def _compare(found: Tensor, expected: Tensor, dtype: torch.dtype) -> Figures:
    """Raises VerificationError if the logits differ by more than rounding weights to `dtype` explains."""
    difference = float((found - expected).abs().max())
    share = difference / float(expected.abs().max())
    agreement = float((found.argmax(-1) == expected.argmax(-1)).double().mean())
    # "not <=" also fails for NaN.
    if not share <= LIMITS[dtype]:
        raise VerificationError(
            f"the logits differ from xorl's by up to {difference:.3g}, {share:.2%} of the largest logit; rounding to "
            f"{str(dtype).removeprefix('torch.')} explains at most {LIMITS[dtype]:.2%}"
        )
    return {
        "tokens compared": expected.shape[0] * expected.shape[1],
        "largest difference from the trainer's logits": difference,
        "as a share of the largest logit": share,
        "same most likely token": f"{agreement:.1%}",
    }


def _check_keys(written: set[str], expected: set[str]) -> int:
    if written != expected:
        raise VerificationError(
            f"the tensor names do not match: {sorted(written - expected)[:3]} are unexpected, "
            f"{sorted(expected - written)[:3]} are missing"
        )
    return len(written)


def _check_nonzero(adapter: AdapterFolder) -> int:
    """The number of adapted modules. Raises VerificationError if either matrix of an adapter is zero.

    The adapter of an expert that no token chose is zero, so those of a layer's experts count together.
    """
    modules, source = adapter.layout.modules, adapter.source
    trained: dict[str, bool] = {}
    for name, module in modules.items():
        together = EXPERT.sub(r".experts.\2", name)
        is_nonzero = bool(source.read(module.a).any() and source.read(module.b).any())
        trained[together] = trained.get(together, False) or is_nonzero
    zero = [name for name, is_trained in trained.items() if not is_trained]
    if zero:
        raise VerificationError(
            f"{len(zero)} of {len(modules)} adapters are zero and have no effect: {', '.join(zero[:3])}; check that "
            "they were trained"
        )
    return len(modules)


def _check_values(written: AdapterFolder, saved: AdapterFolder) -> None:
    """Raise VerificationError unless the file has the values of the saved adapter, and so gives the same logits.

    The logits show an error of a small adapter only if it is large.
    """
    for name, module in saved.layout.modules.items():
        other = written.layout.modules.get(name)
        if other is None or written.layout.config.spec.scale_of(name) != saved.layout.config.spec.scale_of(name):
            raise VerificationError(f"{name}: {written.folder} has no adapter with this name and scale")
        for mine, theirs in ((module.a, other.a), (module.b, other.b)):
            expected, found = saved.source.read(mine), written.source.read(theirs)
            if expected.shape != found.shape or not torch.equal(expected.to(found.dtype), found):
                raise VerificationError(f"{theirs} in {written.folder / WEIGHTS_FILE} differs from {saved.folder}")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppresses transformers' progress bars and warnings."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
