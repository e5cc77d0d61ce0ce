"""A validating reader for config.json, which also reports keys that were not read."""

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from xorl.core.nn.layers import ACTIVATIONS

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT", bool, int, float, str)

# Keys that do not affect the computation in training: they concern files, special tokens, generation, or the software
# that wrote the file. The loader of quantised weights checks quantization_config itself.
_INERT = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures auto_map bos_token_id
chunk_size_feed_forward decoder_start_token_id dtype eos_token_id finetuning_task forced_bos_token_id
forced_eos_token_id gradient_checkpointing id2label is_decoder is_encoder_decoder keys_to_ignore_at_inference
label2id max_length model_type n_ctx output_attentions output_hidden_states pad_token_id pretraining_tp
problem_type quantization_config return_dict
sep_token_id task_specific_params tokenizer_class torch_dtype transformers_version
use_cache use_return_dict
"""
INERT_KEYS = frozenset(_INERT.split())
# The dropout keys of all families.
DROPOUT_KEYS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "embedding_dropout",
    "resid_pdrop",
    "residual_dropout",
)


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

    def strings(self, key: str) -> list[str]:
        """The key's value, a list of strings; empty if missing."""
        value = self._values.get(key) if self.has(key) else []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{self.architecture}: {key} must be a list of strings, got {value!r}")
        return value

    def integers(self, key: str) -> list[int]:
        """The key's value, a list of integers; empty if missing."""
        value = self._values.get(key) if self.has(key) else []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ValueError(f"{self.architecture}: {key} must be a list of integers, got {value!r}")
        return value

    def numbers(self, key: str) -> list[float]:
        """The key's value, a list of numbers; empty if missing."""
        value = self._values.get(key) if self.has(key) else []
        if not isinstance(value, list):
            raise ValueError(f"{self.architecture}: {key} must be a list of numbers, got {value!r}")
        return [self._typed(key, item, float) for item in value]

    def nested(self, key: str) -> "HFConfig":
        """A reader for a nested mapping, which is empty if missing."""
        value = self._values.get(key) if self.has(key) else {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.architecture}: {key} must be a mapping, got {value!r}")
        return HFConfig(value, f"{self.architecture}: {key}")

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

    def finish(self, inert: Collection[str] = ()) -> None:
        """Warn about keys that were not read and are not known to be harmless."""
        unread = sorted(set(self._given) - self._read - INERT_KEYS - set(inert))
        unread = [key for key in unread if self._values[key] is not None]
        if unread:
            logger.warning("%s: config.json keys that are ignored: %s", self.architecture, ", ".join(unread))

    def refuse_unread(self) -> None:
        """Raise if any key was not read. Use it for mappings in which every key changes the computation."""
        unread = [key for key in self._values if key not in self._read and self._values[key] is not None]
        if unread:
            named = ", ".join(f"{key}: {self._values[key]!r}" for key in unread)
            raise ValueError(f"{self.architecture}: {named} is not supported")

    def _typed(self, key: str, value: object, kind: type[ValueT]) -> ValueT:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.architecture}: {key} must be of type {kind.__name__}, got {value!r}")
        return value
