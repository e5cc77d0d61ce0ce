"""Bodies of calls that create, save, load and unload models, and their conversion to operations."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from xorl.server.api.parameters import read_parameters
from xorl.server.identifiers import (
    CheckpointRef,
    SeqId,
    check_model_id,
    check_name,
    model_id_of,
    parse_uri,
    sampling_session_id_of,
    session_of,
)
from xorl.server.operations import (
    CreateModel,
    LoadWeights,
    LoraSpec,
    SaveFullWeights,
    SaveWeights,
    SaveWeightsForSampler,
)

MAX_METADATA_BYTES = 16384
_MAX_RANK = 2**16
# A hundred years. For longer, leave the TTL out.
MAX_TTL_S = 100 * 365 * 24 * 3600.0


class ModelBody(msgspec.Struct, frozen=True):
    """The body of calls that need only a model: its id and the call's sequence number."""

    model_id: str = "default"
    seq_id: SeqId | None = None


class LoraJson(msgspec.Struct, frozen=True):
    """The configuration of an adapter. Each client has its own names for rank and alpha."""

    rank: int | None = None
    lora_rank: int | None = None
    alpha: float | None = None
    lora_alpha: float | None = None
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    dropout: float = 0.0
    target_modules: list[str] | None = None

    def spec(self) -> LoraSpec:
        """The spec, validated; raises ValueError."""
        if self.dropout:
            raise ValueError(f"lora_config.dropout must be 0, dropout is not supported; got {self.dropout}")
        rank = self.lora_rank if self.rank is None else self.rank
        if rank is not None and not 0 <= rank <= _MAX_RANK:
            raise ValueError(f"lora_config.rank must be 0 (full weights) to {_MAX_RANK}, got {rank}")
        return LoraSpec(
            rank=rank,
            alpha=self.lora_alpha if self.alpha is None else self.alpha,
            seed=self.seed,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
            target_modules=None if self.target_modules is None else tuple(self.target_modules),
        )


class OptimizerJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimizer's type. Its parameters come with each step, so other fields are rejected here."""

    type: str = "adamw"
    version: int | None = None


class CreateModelBody(msgspec.Struct, frozen=True):
    """The body of /create_model. tinker sends a session and the model's number in it, xorl-client the model's id."""

    base_model: str
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    model_id: str | None = None
    lora_config: dict[str, Any] | None = None
    optimizer_config: OptimizerJson = OptimizerJson()
    user_metadata: dict[str, Any] | None = None

    def operation(self) -> CreateModel:
        """The operation, validated; raises ValueError."""
        check_optimizer(self.optimizer_config)
        return CreateModel(
            new_model_id(self.session_id, self.model_seq_id, self.model_id),
            base_model=self.base_model,
            lora=read_parameters(self.lora_config or {}, LoraJson, "lora_config").spec(),
            user_metadata=metadata(self.user_metadata),
        )


class LoadWeightsBody(msgspec.Struct, frozen=True):
    """The body of /load_weights: loads into a model, or with model_seq_id creates a model from the checkpoint."""

    path: str
    optimizer: bool = True
    model_id: str | None = None
    seq_id: SeqId | None = None
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerJson = OptimizerJson()
    weights_access_token: str | None = None

    def operation(self) -> CreateModel | LoadWeights:
        """The operation, validated; raises ValueError."""
        check_optimizer(self.optimizer_config)
        if self.weights_access_token is not None:
            raise ValueError(
                "weights_access_token is not supported, checkpoints are shared by all clients: leave it out"
            )
        checkpoint = checkpoint_of(self.path, self.model_id)
        if self.model_seq_id is None:
            return LoadWeights(check_model_id(self.model_id or "default"), checkpoint, self.optimizer)
        return CreateModel(
            new_model_id(self.session_id, self.model_seq_id, self.model_id),
            base_model=self.base_model,
            checkpoint=checkpoint,
            with_optimizer=self.optimizer,
            user_metadata=metadata(self.user_metadata),
        )


class SaveWeightsBody(msgspec.Struct, frozen=True):
    """The body of /save_weights. path is the checkpoint's name."""

    model_id: str = "default"
    path: str | None = None
    seq_id: SeqId | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None

    def operation(self) -> SaveWeights:
        """The operation, validated; raises ValueError."""
        name = f"checkpoint-{self.seq_id or int(time.time())}" if self.path is None else self.path
        return SaveWeights(
            check_model_id(self.model_id),
            check_name(name),
            overwrite=self.overwrite,
            user_metadata=metadata(self.user_metadata),
            ttl_s=ttl(self.ttl_seconds),
        )


class SaveForSamplerBody(msgspec.Struct, frozen=True):
    """The body of /save_weights_for_sampler. path and name are synonyms; without them, it begins a sampling session."""

    model_id: str = "default"
    path: str | None = None
    name: str | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: SeqId | None = None
    ttl_seconds: float | None = None
    user_metadata: dict[str, Any] | None = None

    def operation(self) -> SaveWeightsForSampler:
        """The operation, validated; raises ValueError."""
        if self.kind == "inflight":
            raise ValueError(
                "kind: inflight samplers, whose weights change while they run, are not supported: use snapshot"
            )
        name = self.path if self.name is None else self.name
        sampler_id = None
        if name is None:
            if self.sampling_session_seq_id is None:
                raise ValueError(
                    "name is missing: set it, or sampling_session_seq_id for a sampling session with the weights"
                )
            sampler_id = sampling_session_id_of(session_of(self.model_id), self.sampling_session_seq_id)
        return SaveWeightsForSampler(
            check_model_id(self.model_id),
            None if name is None else check_name(name),
            sampler_id=sampler_id,
            user_metadata=metadata(self.user_metadata),
            ttl_s=ttl(self.ttl_seconds),
        )


class SaveExternalBody(msgspec.Struct, frozen=True):
    """The body of /save_weights_external, and of /save_full_weights_safetensors, which merges an adapter."""

    model_id: str = "default"
    path: str | None = None
    name: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    seq_id: SeqId | None = None
    ttl_seconds: float | None = None
    age_encryption_recipients: list[str] | None = None
    base_model_path: str | None = None

    def operation(self, *, is_merged: bool = False) -> SaveFullWeights:
        """The operation, validated; raises ValueError."""
        if self.age_encryption_recipients:
            raise ValueError("age_encryption_recipients: encryption of exports is not supported, leave it out")
        if self.base_model_path is not None:
            raise ValueError("base_model_path: adapters are merged into this service's base, leave it out")
        name = self.path if self.name is None else self.name
        if name is None:
            raise ValueError("name is missing")
        return SaveFullWeights(
            check_model_id(self.model_id),
            check_name(name),
            dtype=self.dtype,
            is_merged=is_merged,
            ttl_s=ttl(self.ttl_seconds),
        )


def new_model_id(session_id: str | None, model_seq_id: int | None, model_id: str | None) -> str:
    """The id of a new model: built from a session and the model's number in it, or else the given id or `default`."""
    if session_id is not None and model_seq_id is not None:
        return check_model_id(model_id_of(session_id, model_seq_id))
    return check_model_id(model_id or "default")


def checkpoint_of(path: str, model_id: str | None) -> CheckpointRef:
    """Parse a checkpoint's URI, or xorl-client's short forms: KIND/MODEL/NAME, KIND/NAME or NAME."""
    if "://" in path:
        return parse_uri(path)
    parts = path.split("/")
    if len(parts) == 1:
        parts = ["weights", *parts]
    if len(parts) == 2:
        parts = [parts[0], model_id or "default", parts[1]]
    if len(parts) != 3:
        raise ValueError(f"a checkpoint must be a URI, KIND/MODEL/NAME, KIND/NAME or NAME; got {path[:300]!r}")
    return parse_uri(f"xorl://{parts[1]}/{parts[0]}/{parts[2]}")


def metadata(given: dict[str, Any] | None) -> dict[str, str]:
    """A client's metadata with all values as text. Raises ValueError if it is too long."""
    notes = {key: value if isinstance(value, str) else str(value) for key, value in (given or {}).items()}
    if sum(len(key) + len(value) for key, value in notes.items()) > MAX_METADATA_BYTES:
        raise ValueError(f"user_metadata has more than {MAX_METADATA_BYTES} characters")
    return notes


def ttl(seconds: float | None) -> float | None:
    """The time to live, validated; raises ValueError. None: never expires."""
    if seconds is not None and not 0 < seconds <= MAX_TTL_S:
        raise ValueError(
            f"ttl_seconds must be above 0 and at most {MAX_TTL_S:.0f}, or left out to keep it forever; got {seconds:g}"
        )
    return seconds


def check_optimizer(config: OptimizerJson) -> None:
    """Raise ValueError unless the optimizer is AdamW, whose parameters optim_step passes."""
    if config.type not in ("adamw", "adam"):
        raise ValueError(
            f"optimizer_config.type must be adamw, whose parameters come with each step; got {config.type!r}"
        )
