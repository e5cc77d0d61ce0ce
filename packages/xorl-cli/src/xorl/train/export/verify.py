"""An exported folder, loaded by other tools before it counts: transformers, and PEFT for adapters.

The names of its tensors must be theirs, no adapter may be nothing, and the logits must be the trainer's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from xorl.ckpt import SafetensorsSource, WeightSource, load_weights
from xorl.kernels.layout import SequenceLayout
from xorl.lora import inject
from xorl.lora.peft import WEIGHTS_FILE
from xorl.train.adapters.folder import AdapterFolder, load_adapter
from xorl.train.export.card import Figures
from xorl.train.export.source import SavedModel, weights_at

logger = logging.getLogger(__name__)

NUM_ROWS, ROW_LEN = 4, 48
# The largest difference of logits, as a share of the largest logit, that the precision of the weights explains.
LIMITS: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2})


# What a model's card says of adapters that were looked at.
ADAPTED = "adapted modules, none of them zero"


class VerificationError(RuntimeError):
    """An export is not what it should be: a fault of xorl, or of a library under it."""


def require_peft(purpose: str) -> ModuleType:
    """PEFT, which xorl itself does not need. Raises ValueError, saying what for, where it is not installed."""
    try:
        import peft  # noqa: PLC0415  (an optional dependency)
    except ImportError as error:
        raise ValueError(f"{purpose} needs peft, which is not installed: pip install peft") from error
    return peft


@torch.no_grad()
def verify_model(folder: Path, saved: SavedModel, dtype: torch.dtype) -> Figures:
    """Load a folder with a whole model of these weights' `dtype` in transformers and compare it with the trainer's.

    Raises VerificationError that says what differs, or which of the adapters that were folded in add nothing.
    """
    folded: Figures = {}
    if saved.adapter is not None:
        folded = {ADAPTED: _nothing_is_zero(saved.adapter.source, saved.adapter)}
    ids, wanted = _trainer_logits(saved)
    with _quiet():
        loaded: object = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = cast("tuple[nn.Module, Mapping[str, Collection[object]]]", loaded)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise VerificationError(f"transformers has {kind} for {folder}: {sorted(map(str, info[kind]))[:5]}")
    with SafetensorsSource(folder) as source:
        num_keys = _same_keys(set(source.names()), _untied_keys(model, set(source.names())))
    return {
        "transformers": transformers.__version__,
        "keys, the same as transformers'": num_keys,
        **folded,
        **_compare(_logits_of(model, ids), wanted, dtype),
    }


@torch.no_grad()
def verify_adapter(folder: Path, saved: SavedModel, dtype: torch.dtype) -> Figures:
    """Load a folder with an adapter in PEFT, on the base in transformers, and compare with the trainer's.

    Raises VerificationError that says what differs, ValueError where there is no base or no PEFT to load it with.
    """
    peft = require_peft("--verify of an adapter")
    if saved.base_path is None:
        raise ValueError(
            f"--verify: PEFT needs the base model, and that of {saved.folder} is in the checkpoint alone: use --merge"
        )
    assert saved.adapter is not None, "an adapter is verified"
    with SafetensorsSource(folder, single_file=WEIGHTS_FILE) as source:
        num_modules = _nothing_is_zero(source, saved.adapter)
    # An adapter is for the base that it names, whatever a checkpoint holds, such as a quantised one.
    named = weights_at("--base", saved.base_path, saved.architecture)
    ids, wanted = _trainer_logits(replace(saved, base=named))
    with _quiet():
        base = AutoModelForCausalLM.from_pretrained(saved.base_path, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, folder)
    held = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    with SafetensorsSource(folder, single_file=WEIGHTS_FILE) as source:
        written = {name for name in source.names() if ".base_layer." not in name}
        num_keys = _same_keys(written, set(held))
        for name in sorted(written):
            if not torch.equal(held[name].cpu().float(), source.read(name).float()):
                raise VerificationError(f"PEFT has other values than {folder / WEIGHTS_FILE} for {name}")
    return {
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "keys, the same as PEFT's": num_keys,
        ADAPTED: num_modules,
        **_compare(_logits_of(model, ids), wanted, dtype),
    }


def _trainer_logits(saved: SavedModel) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length] and the logits that xorl's own model gives, in fp32, its adapters beside the weights."""
    config = saved.architecture.config
    device = _device()
    with torch.device("meta"):
        decoder = saved.architecture.spec.build(config)
    decoder = decoder.to_empty(device=device)
    recipes = saved.architecture.recipes(merge_qkv=True)
    load_weights(dict(decoder.named_parameters()), recipes, _InFp32(saved.base), mode="all_ranks")
    if saved.adapter is not None:
        inject(decoder, saved.adapter.layout.spec)
        load_adapter(decoder, saved.adapter, recipes)
    generator = torch.Generator().manual_seed(0)
    length = min(ROW_LEN, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (NUM_ROWS, length), generator=generator)
    layout = SequenceLayout.from_lengths([length] * NUM_ROWS, device=device)
    logits = decoder.eval()(ids.flatten().to(device), layout)
    return ids, logits.float().cpu().unflatten(0, ids.shape)


class _InFp32:
    """A source whose values are not rounded on their way, also where they are made, as those of quantised weights."""

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


def _compare(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> Figures:
    """Raises VerificationError for logits that differ by more than weights of `dtype` explain."""
    difference = float((found - wanted).abs().max())
    share = difference / float(wanted.abs().max())
    agreement = float((found.argmax(-1) == wanted.argmax(-1)).double().mean())
    # Written so that a difference that is no number fails.
    if not share <= LIMITS[dtype]:
        raise VerificationError(
            f"the logits are not the trainer's: they differ by up to {difference:.3g}, {share:.2%} of the largest; "
            f"weights in {str(dtype).removeprefix('torch.')} explain {LIMITS[dtype]:.2%}"
        )
    return {
        "tokens compared": wanted.shape[0] * wanted.shape[1],
        "largest difference of logits from the trainer's": difference,
        "as a share of the largest logit": share,
        "same most likely token": f"{agreement:.1%}",
    }


def _same_keys(written: set[str], theirs: set[str]) -> int:
    if written != theirs:
        raise VerificationError(
            f"the names of the tensors are not theirs: {sorted(written - theirs)[:3]} are ours alone, "
            f"{sorted(theirs - written)[:3]} theirs alone"
        )
    return len(written)


def _untied_keys(model: nn.Module, written: set[str]) -> set[str]:
    """The names in a model's state, without those that are another name for a tensor that is written."""
    state = model.state_dict()
    places = {state[name].data_ptr() for name in written if name in state}
    return {name for name, tensor in state.items() if name in written or tensor.data_ptr() not in places}


def _nothing_is_zero(source: WeightSource, adapter: AdapterFolder) -> int:
    """How many modules are adapted, by tensors in `source`. Raises VerificationError for one that adds nothing."""
    modules = adapter.layout.modules
    idle = [
        name for name, module in modules.items() if not (source.read(module.a).any() and source.read(module.b).any())
    ]
    if idle:
        raise VerificationError(
            f"{len(idle)} of {len(modules)} adapters are zero, and change nothing: {', '.join(idle[:3])}. Was anything "
            "trained?"
        )
    return len(modules)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and notes of the libraries while they load."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
