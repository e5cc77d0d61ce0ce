"""Identifiers of checkpoints, models and samplers: validation, URIs, and the folders and seeds derived from them.

Clients send names, never paths. Names may contain only the characters below, so a name is always a single path
component that is not hidden and cannot leave its folder. `checkpoint_folder` checks this again after resolving links.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
Dialect = Literal["tinker", "xorl"]
# The number of a request in its model's order. Every JSON parser can represent it; the journal stores 64 bits.
SeqId = Annotated[int, msgspec.Meta(le=2**53 - 1)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# A model's id is either the session's id and the model's number in it, joined by colons, or a name from the client.
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,191}")
_URI = re.compile(r"(?:tinker|xorl)://([^/]*)/([^/]*)/([^/]*)")


class CheckpointRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reference to a checkpoint: its model, its kind (to train on, to sample from, or exported) and its name.

    Raises ValueError, on construction and on decoding, for invalid names.
    """

    model_id: str
    kind: CheckpointKind
    name: str

    def __post_init__(self) -> None:
        check_model_id(self.model_id)
        check_name(self.name)

    def uri(self, dialect: Dialect) -> str:
        """The URI that the dialect's client uses: `tinker://{model_id}/{kind}/{name}`, or `xorl://...`."""
        return f"{dialect}://{self.model_id}/{self.kind}/{self.name}"


def parse_uri(uri: str) -> CheckpointRef:
    """Parse a checkpoint URI of either dialect. Raises ValueError for anything else."""
    match = _URI.fullmatch(uri)
    kinds: dict[str, CheckpointKind] = {kind: kind for kind in get_args(CheckpointKind)}
    if match is None or match[2] not in kinds:
        raise ValueError(
            f"a checkpoint URI must be tinker://MODEL/KIND/NAME or xorl://MODEL/KIND/NAME, with KIND one of "
            f"{', '.join(kinds)}; got {uri[:300]!r}"
        )
    return CheckpointRef(match[1], kinds[match[2]], match[3])


def check_name(name: str) -> str:
    """Return `name`. Raises ValueError if it is not a valid checkpoint name."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a checkpoint name must have 1 to 128 of the characters A-Z a-z 0-9 . _ - and begin with a letter or "
            f"digit, got {name[:300]!r}"
        )
    return name


def check_model_id(model_id: str) -> str:
    """Return `model_id`. Raises ValueError if it is not a valid model id."""
    if not _MODEL_ID.fullmatch(model_id):
        raise ValueError(
            "a model id must have 1 to 192 of the characters A-Z a-z 0-9 . _ : - and begin with a letter or digit, "
            f"got {model_id[:300]!r}"
        )
    return model_id


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The id of a session's model. One of the clients also builds it, in the same way."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id_of(session_id: str, sampling_session_seq_id: int) -> str:
    """The id of a session's sampler."""
    return f"{session_id}:sample:{sampling_session_seq_id}"


def session_of(id_in_session: str) -> str:
    """The session id in a model's or sampler's id: the part before the first colon."""
    return id_in_session.partition(":")[0]


def model_folder(output_dir: Path, model_id: str, kind: CheckpointKind) -> Path:
    """The folder of a model's checkpoints: `{output_dir}/{kind}/{model_id}`, with tildes in place of colons.

    Some file systems do not allow colons. Ids contain no tildes, so `model_id_in_folder` can recover the id.
    """
    return output_dir / kind / check_model_id(model_id).replace(":", "~")


def model_id_in_folder(folder_name: str) -> str:
    """The id of the model whose folder has this name. Raises ValueError if it is not a model's folder."""
    return check_model_id(folder_name.replace("~", ":"))


def checkpoint_folder(output_dir: Path, ref: CheckpointRef) -> Path:
    """The folder of a checkpoint, whether or not it exists: `{output_dir}/{kind}/{model_id}/{name}`.

    `{output_dir}/{kind}` may be a link, for example to a larger disk. Raises ValueError if a link below it leads out
    of it.
    """
    folder = model_folder(output_dir, ref.model_id, ref.kind) / ref.name
    if not folder.resolve().is_relative_to((output_dir / ref.kind).resolve()):
        raise ValueError(f"checkpoint {ref.kind}/{ref.name} of model {ref.model_id} leads out of the output folder")
    return folder


def base_refusal(base_model: str | None, base_names: Sequence[str], does: str) -> str | None:
    """Why `base_model` is refused: it is given, and not a name of the served base. does: what a service does with it.

    base_names: the names of the served base, the one to show first.
    """
    if base_model is None or base_model in base_names:
        return None
    return f"base_model: this service {does} {base_names[0]}, got {base_model[:300]!r}"


def seed_of(model_id: str, seed: int) -> int:
    """The default seed of a model: derived from its id and the service's seed, so that models differ."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{model_id}".encode(), digest_size=6).digest(), "big")
