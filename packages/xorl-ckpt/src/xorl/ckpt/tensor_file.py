"""Writes a safetensors file while its tensors are computed: the header first, then the values, group by group.

No process ever holds the whole file. The caller defines the tensors and how to compute them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from xorl.ckpt.files import FileRecord, HashedFile
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.ranks import fail_together, this_rank
from xorl.ckpt.reader import STORED_DTYPES

_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
# Readers of safetensors expect this in files with torch tensors.
_METADATA = {"format": "pt"}
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are computed together, such as those that one parameter splits into.

    `records` describes them before they are computed. `make` returns the values on rank 0. Every rank calls it, since
    it may be collective; its result on other ranks is ignored.
    """

    records: Mapping[str, TensorRecord]
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.records.values())

    def renamed(self, rename: Callable[[str], str]) -> "TensorGroup":
        """The same tensors under other names."""
        records = {rename(name): record for name, record in self.records.items()}
        return TensorGroup(records, lambda: {rename(name): tensor for name, tensor in self.make().items()})


def write_tensor_file(
    path: Path | str, groups: Sequence[TensorGroup], metadata: Mapping[str, str] = MappingProxyType({})
) -> FileRecord | None:
    """Collective: rank 0 writes a new, durable file and returns its record; other ranks return None.

    `metadata` is recorded in the file's header. The bytes depend only on it and on the names, values and order of the
    groups, not on the number of ranks.
    """
    path = Path(path).expanduser()
    # Wide dtypes first, as safetensors' own writer does: readers map the values in place, which requires alignment.
    ordered = sorted(groups, key=lambda group: -max(record.torch_dtype.itemsize for record in group.records.values()))
    stream: HashedFile | None = None
    with fail_together(f"write {path}"):
        if this_rank() == 0:
            stream = HashedFile(path)
            stream.write(_header(ordered, metadata))
    try:
        for group in ordered:
            tensors = group.make()
            with fail_together(f"write {path}"):
                if stream is not None:
                    for name, record in group.records.items():
                        stream.write(_to_bytes(name, tensors[name], record))
            del tensors
        with fail_together(f"write {path}"):
            if stream is not None:
                stream.close()
    finally:
        if stream is not None:
            stream.abort()
    return None if stream is None else stream.record


def _header(groups: Sequence[TensorGroup], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, object] = {"__metadata__": {**_METADATA, **metadata}}
    end = 0
    for group in groups:
        for name, record in group.records.items():
            assert name not in content, f"two groups contain {name}"
            start, end = end, end + record.num_bytes
            content[name] = {
                "dtype": _NAMES[record.torch_dtype],
                "shape": list(record.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _to_bytes(name: str, tensor: torch.Tensor, record: TensorRecord) -> memoryview | bytes:
    tensor = tensor.detach().cpu().contiguous()
    found = TensorRecord.of(tensor)
    assert found == record, f"{name} was described as {record}, but its values are {found}"
    # An empty tensor cannot be cast to bytes.
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
