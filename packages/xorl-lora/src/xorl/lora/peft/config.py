"""adapter_config.json: parsing, validation and writing."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from xorl.lora.peft.selection import Selection
from xorl.lora.spec import AdapterSpec, ExpertSharing, ValueT

logger = logging.getLogger(__name__)

# See `xorl.lora.peft.forms`.
ExpertForm: TypeAlias = Literal["per_expert", "peft", "sglang"]
# What PEFT can wrap a base as.
TaskType: TypeAlias = Literal["CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"]

CONFIG_FILE = "adapter_config.json"

# Settings that change an adapter's computation or its base in ways that xorl does not support: key -> reason.
_UNSUPPORTED: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "routed adapters are not supported",
    "kasa_config": "KaSA is not supported",
    "layer_replication": "adapters on replicated layers are not supported",
    "lora_bias": "biases on adapters are not supported",
    "megatron_config": "Megatron layers are not supported",
    "monteclora_config": "sampled adapters are not supported",
    "trainable_token_indices": "training single tokens is not supported",
    "use_bdlora": "block-diagonal adapters are not supported",
    "use_qalora": "QA-LoRA is not supported",
    "velora_config": "VeLoRA is not supported",
}
# Settings about an adapter's origin, or redundant with the names of its tensors.
_IGNORED = frozenset(
    [
        "auto_mapping",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
    ]
)
# The settings that the form `peft` of adapters on experts has instead of those of AdapterSpec, which are under the key
# "xorl" of files that xorl wrote.
_FORM_SETTINGS: Mapping[ExpertForm, Sequence[str]] = {
    "per_expert": ("xorl",),
    "sglang": ("_sglang_lora_format", "moe_hybrid_shared_lora"),
    "peft": (
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "lora_dropout"),
        *("target_modules", "target_parameters", "xorl"),
    ),
}
# Initialisations that change the base's weights, so that the adapter only fits the changed base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# PEFT's defaults.
DEFAULT_RANK, DEFAULT_ALPHA = 8, 8.0


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an adapter_config.json that xorl uses.

    Attributes:
        spec: the adapters. Its targets are "all-linear" if the file has a pattern; the names of the tensors determine
            the adapted modules (`AdapterLayout.spec`).
        base: the base model's Hub id or folder; None if unknown.
        task_type: what PEFT wraps the base as, such as "CAUSAL_LM"; None for modules that are no language models.
        fan_in_fan_out: weights of adapted linear layers are stored as [in, out] in the base's files.
        form: how the file holds adapters on experts; `spec` describes them as in the form per_expert.
        form_settings: the file's settings that are specific to its form; they add to those of `spec` or replace them.
        selection: the layers that the configuration names; each must be in the adapter's file.
    """

    spec: AdapterSpec
    base: str | None = None
    task_type: str | None = None
    fan_in_fan_out: bool = False
    form: ExpertForm = "per_expert"
    form_settings: Mapping[str, object] = field(default_factory=dict)
    selection: Selection = field(default=Selection(), compare=False)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "AdapterConfig":
        """Parse adapter_config.json. Raises ValueError, naming the key, for unsupported or invalid settings."""
        if content.get("peft_type") != "LORA":
            raise ValueError(f"peft_type is {content.get('peft_type')!r}; only LORA is supported")
        for key, reason in _UNSUPPORTED.items():
            if content.get(key):
                raise ValueError(f"{key} is set, but {reason}")
        if content.get("bias", "none") != "none":
            raise ValueError(f"bias is {content['bias']!r}: trained biases are not supported; train with bias none")
        initialisation = str(content.get("init_lora_weights", True)).lower()
        if initialisation.startswith(_CHANGES_BASE):
            raise ValueError(
                f"init_lora_weights is {initialisation}, which changes the base model's weights: convert it to a plain "
                "adapter with PEFT (save_pretrained with path_initial_model_for_weight_conversion)"
            )
        form = _form_of(content)
        form_settings = {key: content[key] for key in _FORM_SETTINGS[form] if key in content}
        content = recorded_settings(content)
        of_forms = {key for keys in _FORM_SETTINGS.values() for key in keys}
        known = {*_UNSUPPORTED, *_IGNORED, *of_forms, "expert_sharing", "gate_up_ranks", *cls(AdapterSpec()).to_json()}
        unknown = sorted(key for key, value in content.items() if key not in known and value)
        if unknown:
            logger.warning(
                "event=adapter_settings_unknown keys=%s (ignored: not known to this version of xorl)", unknown
            )
        targets = content.get("target_modules")
        spec = AdapterSpec(
            rank=_integer("r", content.get("r", DEFAULT_RANK)),
            alpha=_number("lora_alpha", content.get("lora_alpha", DEFAULT_ALPHA)),
            targets="all-linear" if isinstance(targets, str) else _names(content, "target_modules") or "all-linear",
            dropout=_number("lora_dropout", content.get("lora_dropout", 0.0)),
            use_rslora=_flag(content, "use_rslora"),
            use_dora=_flag(content, "use_dora"),
            rank_pattern={key: _integer("rank_pattern", value) for key, value in _pairs(content, "rank_pattern")},
            alpha_pattern={key: _number("alpha_pattern", value) for key, value in _pairs(content, "alpha_pattern")},
            modules_to_save=_names(content, "modules_to_save"),
            expert_sharing="outer" if form == "sglang" else cast(ExpertSharing, content.get("expert_sharing", "none")),
        )
        return cls(
            spec,
            base=str(content.get("base_model_name_or_path") or "") or None,
            task_type=str(content.get("task_type") or "") or None,
            fan_in_fan_out=_flag(content, "fan_in_fan_out"),
            form=form,
            form_settings=form_settings,
            selection=Selection.from_json(content),
        )

    def to_json(self) -> dict[str, object]:
        """The content of adapter_config.json."""
        spec = self.spec
        return {
            "peft_type": "LORA",
            "task_type": self.task_type,
            "base_model_name_or_path": self.base,
            "r": spec.rank,
            "lora_alpha": _compact(spec.alpha),
            "target_modules": spec.targets if isinstance(spec.targets, str) else sorted(spec.targets),
            "use_rslora": spec.use_rslora,
            "use_dora": spec.use_dora,
            "lora_dropout": spec.dropout,
            "rank_pattern": dict(spec.rank_pattern),
            "alpha_pattern": {name: _compact(alpha) for name, alpha in spec.alpha_pattern.items()},
            "modules_to_save": sorted(spec.modules_to_save) or None,
            "fan_in_fan_out": self.fan_in_fan_out,
            "bias": "none",
            "inference_mode": True,
            "init_lora_weights": True,
            **self.form_settings,
        }


def recorded_settings(content: Mapping[str, object]) -> Mapping[str, object]:
    """The settings of an adapter_config.json as in the form per_expert, if xorl recorded them."""
    own = content.get("xorl") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"xorl must be a mapping of settings, got {own!r}")
    return {**content, **own}


def gate_up_ranks(form_settings: Mapping[str, object]) -> dict[str, dict[Literal["gate", "up"], int]] | None:
    """By name of PEFT's parameter, the ranks of the two adapters that xorl joined in one; None in files of others."""
    own = form_settings.get("xorl")
    if not isinstance(own, Mapping):
        return None
    found: dict[str, dict[Literal["gate", "up"], int]] = {}
    for name, ranks in _pairs(own, "gate_up_ranks"):
        if not isinstance(ranks, (list, tuple)) or len(ranks) != 2:
            raise ValueError(f"gate_up_ranks must have the ranks of gate and up, got {ranks!r} for {name}")
        found[name] = {"gate": _integer(name, ranks[0]), "up": _integer(name, ranks[1])}
    return found


def _form_of(content: Mapping[str, object]) -> ExpertForm:
    sglang = content.get("_sglang_lora_format")
    if sglang not in (None, "shared_outer"):
        raise ValueError(f"_sglang_lora_format is {sglang!r}; only shared_outer is supported")
    if _names(content, "target_parameters"):
        return "peft"
    return "sglang" if sglang is not None else "per_expert"


def shortest_names(chosen: Collection[str], all_names: Iterable[str]) -> tuple[str, ...]:
    """Names that select exactly the chosen modules: the last part of each name if unambiguous, else the whole."""
    known = set(chosen)
    others = {name.rpartition(".")[2] for name in all_names if name not in known}
    ends = {name: name.rpartition(".")[2] for name in chosen}
    return tuple(sorted({name if end in others else end for name, end in ends.items()}))


def shared_value(values: Mapping[str, ValueT]) -> tuple[ValueT, dict[str, ValueT]]:
    """The most common value of the modules, and a pattern for modules with another value."""
    counts = Counter(values.values())
    common = max(counts, key=lambda value: (counts[value], -value))
    pattern: dict[str, ValueT] = {}
    for value in sorted(counts.keys() - {common}):
        named = [name for name, other in values.items() if other == value]
        pattern |= dict.fromkeys(shortest_names(named, values), value)
    return common, pattern


def _compact(number: float) -> float:
    """An int if the number is integral, as is common in these files."""
    return int(number) if number == int(number) else number


def _integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be an integer, got {value!r}")
    return value


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def _flag(content: Mapping[str, object], key: str) -> bool:
    value = content.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return bool(value)


def _names(content: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = content.get(key) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} must be a list of names, got {value!r}")
    return tuple(str(name) for name in value)


def _pairs(content: Mapping[str, object], key: str) -> Iterable[tuple[str, object]]:
    value = content.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping of names to numbers, got {value!r}")
    return [(str(name), number) for name, number in value.items()]
