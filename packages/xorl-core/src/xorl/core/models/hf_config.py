"""A validating reader for config.json, which also refuses keys that were not read and may change the computation."""

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from xorl.core.nn.layers import ACTIVATIONS

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT", bool, int, float, str)

# Keys that do not affect the computation in training, whatever their values: they concern files, generation, or the
# software that wrote the file. So do all keys that end with `_id`. The loader of quantised weights checks
# quantization_config itself.
_INERT = """
_attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _name_or_path _num_labels
architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens cache_implementation
chunk_size_feed_forward classifier_dropout diversity_penalty do_sample dtype early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task gradient_checkpointing id2label
is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id length_penalty max_length
max_new_tokens max_sequence_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams
num_labels num_return_sequences output_attentions output_hidden_states output_scores prefix pretraining_tp
problem_type quantization_config remove_invalid_values repetition_penalty return_dict return_dict_in_generate
suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
torch_dtype torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16
use_cache use_return_dict
"""
# As transformers 5 writes it, since JSON has none.
_INFINITY = {"__float__": "Infinity"}
_INERT_KEYS = frozenset(_INERT.split())
# The dropout keys of all families.
DROPOUT_KEYS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "residual_dropout",
)


def is_inert(key: str) -> bool:
    """Whether a key of config.json, unless the family reads it, never affects the computation."""
    return key in _INERT_KEYS or key.endswith("_id")


class HFConfig:
    """Reads a config.json's mapping key by key. Errors are ValueErrors that name the architecture and the key.

    defaults: the family's values of keys that are missing; they do not replace null.
    """

    def __init__(self, values: Mapping[str, object], architecture: str, **defaults: object) -> None:
        self._given = values
        self._values = {**defaults, **values}
        self.architecture = architecture
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        self._read.add(key)
        return self._values.get(key) is not None

    def is_text(self, key: str, text: str) -> bool:
        """Whether the key's value, which may be of other types, is this text."""
        return self.has(key) and self._values[key] == text

    def get(self, key: str, kind: type[ValueT], default: ValueT | None = None) -> ValueT:
        """The key's value, or `default` if it is null or missing; raises if there is no default either."""
        if not self.has(key):
            if default is None:
                raise ValueError(f"{self.architecture}: the model's config.json has no {key!r}")
            return default
        return self._typed(key, self._values[key], kind)

    def positive(self, key: str, default: int | None = None) -> int:
        """The key's value, an integer of at least 1."""
        value = self.get(key, int, default)
        if value < 1:
            raise ValueError(f"{self.architecture}: {key} must be at least 1, got {value}")
        return value

    def above_zero(self, key: str, default: float | None = None) -> float:
        """The key's value, a number above 0."""
        value = self.get(key, float, default)
        if not 0 < value < math.inf:
            raise ValueError(f"{self.architecture}: {key} must be a number above 0, got {value}")
        return value

    def cap(self, key: str) -> float | None:
        """The key's value, a number above 0; None if it is null or missing."""
        return self.above_zero(key) if self.has(key) else None

    def activation(self, key: str, default: str) -> str:
        """The key's value, the name of a supported activation function."""
        name = self.get(key, str, default)
        self.expect(key, name, ACTIVATIONS)
        return name

    def items(self, key: str, kind: type[ValueT]) -> list[ValueT]:
        """The key's value, a list; empty if missing."""
        value = self._values.get(key) if self.has(key) else []
        if not isinstance(value, list):
            raise ValueError(f"{self.architecture}: {key} must be a list, got {value!r}")
        return [self._typed(f"each of {key}", item, kind) for item in value]

    def nested(self, key: str) -> "HFConfig":
        """A reader for a nested mapping, which is empty if missing."""
        value = self._values.get(key) if self.has(key) else {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.architecture}: {key} must be a mapping, got {value!r}")
        return HFConfig(value, f"{self.architecture}: {key}")

    def by_layer(self, key: str, num_layers: int) -> list["HFConfig"]:
        """A reader for each layer's entry in a mapping by the number of a layer; empty for layers without one."""
        entries = self.nested(key)
        names = {int(name): name for name in entries._given if name.isdecimal()}
        if len(names) < len(entries._given) or not names.keys() <= set(range(num_layers)):
            given = ", ".join(map(str, entries._given))
            raise ValueError(f"{entries.architecture} must be by numbers of layers, 0 to {num_layers - 1}, got {given}")
        return [entries.nested(names.get(index, str(index))) for index in range(num_layers)]

    def expect(self, key: str, value: ValueT, allowed: Iterable[ValueT]) -> ValueT:
        """Return `value`; raise if it is not one of `allowed`."""
        allowed = list(allowed)
        if value not in allowed:
            known = ", ".join(str(item) for item in allowed)
            raise ValueError(f"{self.architecture}: {key}: {value!r} is not supported; supported: {known}")
        return value

    def refuse(self, key: str, reason: str) -> None:
        """Raise if the key's value is anything but null, false or empty."""
        if self.has(key) and self._values[key]:
            raise ValueError(f"{self.architecture}: {key}: {self._values[key]!r} is not supported: {reason}")

    def warn_about_dropout(self) -> None:
        """Log a warning if the config sets dropout, which is not applied."""
        dropout = ", ".join(
            f"{key}: {self._values[key]}" for key in DROPOUT_KEYS if self.has(key) and self._values[key]
        )
        if dropout:
            message = "%s: config.json sets dropout (%s), which is not applied: models train without dropout"
            logger.warning(message, self.architecture, dropout)

    def finish(self, inert: Collection[str] = (), fixed: Mapping[str, object] = MappingProxyType({})) -> None:
        """Raise if a key that was not read may change the computation. Null, false, 0 and empty do not.

        inert: further keys that do not, whatever their values. fixed: further keys, each with the value that does not.
        """
        unread = {key: value for key, value in self._given.items() if key not in self._read and value is not None}
        unknown = [
            f"{key}: {value!r}"
            for key, value in unread.items()
            if (value != fixed[key] if key in fixed else value and key not in inert and not is_inert(key))
        ]
        if unknown:
            raise ValueError(
                f"{self.architecture}: config.json sets {', '.join(unknown)}, which may change what it computes, "
                "but xorl does not know it; if it changes nothing, set it to null there, or remove it"
            )

    def refuse_unread(self) -> None:
        """Raise if any key was not read. Use it for mappings in which every key changes the computation."""
        unread = [key for key in self._values if key not in self._read and self._values[key] is not None]
        if unread:
            named = ", ".join(f"{key}: {self._values[key]!r}" for key in unread)
            raise ValueError(f"{self.architecture}: {named} is not supported")

    def _typed(self, key: str, value: object, kind: type[ValueT]) -> ValueT:
        if kind is float and value == _INFINITY:
            return kind(math.inf)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.architecture}: {key} must be of type {kind.__name__}, got {value!r}")
        return value
