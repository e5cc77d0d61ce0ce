"""counted_reads: how many bytes of experts are read from a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from xorl.ckpt import SafetensorsSource


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The bytes of each read of an expert's tensor inside the context."""
    sizes: list[int] = []
    read = SafetensorsSource.read

    def counted(source: SafetensorsSource, name: str, *rows: int) -> Tensor:
        values = read(source, name, *rows)
        if ".experts." in name:
            sizes.append(values.nbytes)
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "read", counted)
        yield sizes
