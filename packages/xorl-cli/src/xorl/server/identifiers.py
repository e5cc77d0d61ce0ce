"""Names that clients give and what they stand for: checkpoints as URIs, their folders, models, samplers, seeds.

A client sends names, never paths. What is not made of the characters below is refused, so a name is always one part
of a path that neither climbs nor hides; `checkpoint_folder` looks once more, after links are resolved.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
Dialect = Literal["tinker", "xorl"]
# A number that a client counts in the order of its model, as far as every reader of JSON can. The journal has 64 bits.
SeqId = Annotated[int, msgspec.Meta(le=2**53 - 1)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# A model's id is made of a session's and its number in it, joined by colons, or is a name that the client chose.
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,191}")
_URI = re.compile(r"(?:tinker|xorl)://([^/]*)/([^/]*)/([^/]*)")


class CheckpointRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which checkpoint: of whose model, for what (to train on, to sample from, or exported), under which name.

    Raises ValueError, also while it is decoded, for names that no checkpoint can have.
    """

    model_id: str
    kind: CheckpointKind
    name: str

    def __post_init__(self) -> None:
        check_model_id(self.model_id)
        check_name(self.name)

    def uri(self, dialect: Dialect) -> str:
        """As that dialect's client writes it: `tinker://{model_id}/{kind}/{name}`, or `xorl://...`."""
        return f"{dialect}://{self.model_id}/{self.kind}/{self.name}"


def parse_uri(uri: str) -> CheckpointRef:
    """The checkpoint that a URI of either dialect names; ValueError for anything else."""
    match = _URI.fullmatch(uri)
    kinds: dict[str, CheckpointKind] = {kind: kind for kind in get_args(CheckpointKind)}
    if match is None or match[2] not in kinds:
        raise ValueError(
            f"a checkpoint is tinker://MODEL/KIND/NAME or xorl://MODEL/KIND/NAME, KIND one of {', '.join(kinds)}; "
            f"got {uri[:300]!r}"
        )
    return CheckpointRef(match[1], kinds[match[2]], match[3])


def check_name(name: str) -> str:
    """Returns `name`; ValueError where it cannot be a checkpoint's."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a checkpoint's name has 1 to 128 of the characters A-Z a-z 0-9 . _ - and begins with a letter or digit, "
            f"got {name[:300]!r}"
        )
    return name


def check_model_id(model_id: str) -> str:
    """Returns `model_id`; ValueError where it cannot be a model's."""
    if not _MODEL_ID.fullmatch(model_id):
        raise ValueError(
            "a model's id has 1 to 192 of the characters A-Z a-z 0-9 . _ : - and begins with a letter or digit, "
            f"got {model_id[:300]!r}"
        )
    return model_id


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The id of a session's model; one of the clients makes it by the same rule."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id_of(session_id: str, sampling_session_seq_id: int) -> str:
    """The id of a session's sampler."""
    return f"{session_id}:sample:{sampling_session_seq_id}"


def session_of(some_id: str) -> str:
    """The session of a model or sampler of it: what is before the first colon."""
    return some_id.partition(":")[0]


def model_folder(output_dir: Path, model_id: str, kind: CheckpointKind) -> Path:
    """`{output_dir}/{kind}/{model_id}`, in which the checkpoints are; a colon of the id is a tilde there.

    No id has a tilde, so `model_id_in_folder` finds the id again, and some file systems take no colon.
    """
    return output_dir / kind / check_model_id(model_id).replace(":", "~")


def model_id_in_folder(folder_name: str) -> str:
    """The id of the model whose folder has that name; ValueError for a folder of something else."""
    return check_model_id(folder_name.replace("~", ":"))


def checkpoint_folder(output_dir: Path, ref: CheckpointRef) -> Path:
    """Where a checkpoint is, or would be: `{output_dir}/{kind}/{model_id}/{name}`.

    `{output_dir}/{kind}` may be a link, as to a larger disk; raises ValueError where links below lead out of it.
    """
    folder = model_folder(output_dir, ref.model_id, ref.kind) / ref.name
    if not folder.resolve().is_relative_to((output_dir / ref.kind).resolve()):
        raise ValueError(f"checkpoint {ref.kind}/{ref.name} of model {ref.model_id} leads out of the output folder")
    return folder


def seed_of(model_id: str, seed: int) -> int:
    """Of a model whose client names none, under the service's seed: no other model has it."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{model_id}".encode(), digest_size=6).digest(), "big")
