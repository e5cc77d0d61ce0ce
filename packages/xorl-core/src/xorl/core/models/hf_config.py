"""Reading a config.json: every key that is asked for is checked, and every key that nobody asked for is reported."""

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from xorl.core.nn import ACTIVATIONS

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT", bool, int, float, str)

# Describe files, tokens, generation or the writing software; none changes what a trained model computes. Whether
# quantised weights can be read is for their loader to say.
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
# What asks for dropout, under the names of all families.
DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")


class HFConfig:
    """A config.json's mapping, read key by key. Every error is a ValueError that names the architecture and the key."""

    def __init__(self, values: Mapping[str, object], architecture: str) -> None:
        self._values = values
        self._architecture = architecture
        self._read: set[str] = set()

    def names(self, key: str) -> bool:
        """Whether the key is there, be it null: some families take null for something else than its absence."""
        self._read.add(key)
        return key in self._values

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        self._read.add(key)
        return self._values.get(key) is not None

    def get(self, key: str, kind: type[ValueT], default: ValueT | None = None) -> ValueT:
        """The key's value; a null or missing one is `default`, or an error when there is none."""
        if not self.has(key):
            if default is None:
                raise ValueError(f"{self._architecture}: the model's config.json has no {key!r}")
            return default
        return self._typed(key, self._values[key], kind)

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.get(key, int, default)
        if value < 1:
            raise ValueError(f"{self._architecture}: {key} must be at least 1, got {value}")
        return value

    def activation(self, key: str, default: str) -> str:
        """The name of an activation function that exists here."""
        name = self.get(key, str, default)
        self.expect(key, name, ACTIVATIONS)
        return name

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._values.get(key) if self.has(key) else []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{self._architecture}: {key} must be a list of strings, got {value!r}")
        return value

    def nested(self, key: str) -> "HFConfig":
        """A nested mapping, empty when missing, to be read in the same way."""
        value = self._values.get(key) if self.has(key) else {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._architecture}: {key} must be a mapping, got {value!r}")
        return HFConfig(value, f"{self._architecture}: {key}")

    def expect(self, key: str, value: ValueT, allowed: Iterable[ValueT]) -> ValueT:
        """Refuse a value that is not one of `allowed`."""
        allowed = list(allowed)
        if value not in allowed:
            known = ", ".join(str(item) for item in allowed)
            raise ValueError(f"{self._architecture}: {key}: {value!r} is not supported; supported: {known}")
        return value

    def refuse(self, key: str, reason: str) -> None:
        """Refuse any value but null, false and an empty one."""
        if self.has(key) and self._values[key]:
            raise ValueError(f"{self._architecture}: {key}: {self._values[key]!r} is not supported: {reason}")

    def warn_of_dropout(self) -> None:
        """Training runs without dropout; say so where the config asks for some."""
        asked = ", ".join(f"{key}: {self._values[key]}" for key in DROPOUT_KEYS if self.has(key) and self._values[key])
        if asked:
            told = "%s: config.json asks for dropout (%s), which is not applied: models train without it here"
            logger.warning(told, self._architecture, asked)

    def finish(self, inert: Collection[str] = ()) -> None:
        """Warn of keys that nobody read and that are not known to be harmless."""
        unread = sorted(set(self._values) - self._read - INERT_KEYS - set(inert))
        unread = [key for key in unread if self._values[key] is not None]
        if unread:
            logger.warning("%s: config.json keys that change nothing here: %s", self._architecture, ", ".join(unread))

    def refuse_unread(self) -> None:
        """Refuse every key that nobody read: for mappings in which each key changes the computation."""
        unread = [key for key in self._values if key not in self._read and self._values[key] is not None]
        if unread:
            named = ", ".join(f"{key}: {self._values[key]!r}" for key in unread)
            raise ValueError(f"{self._architecture}: {named} is not supported")

    def _typed(self, key: str, value: object, kind: type[ValueT]) -> ValueT:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self._architecture}: {key} must be of type {kind.__name__}, got {value!r}")
        return value
