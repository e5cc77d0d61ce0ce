"""What the tests of checkpoints and weights share: a small training state and recipes of every kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from xorl.ckpt import WeightSource


class Tensors(dict):
    """Named tensors as a part of a training state."""

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        assert state_dict.keys() == self.keys()


@dataclass(frozen=True)
class Rows:
    """A parameter that is source tensors on top of each other."""

    sources: tuple[str, ...]
    heights: tuple[int, ...]
    width: tuple[int, ...] = ()
    join_dim: None = None
    keeps_dtype: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.heights), *self.width)

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        pieces, first = [], 0
        for name, height in zip(self.sources, self.heights, strict=True):
            low, high = max(start - first, 0), min(stop - first, height)
            if low < high:
                pieces.append(source.read(name, low, high))
            first += height
        return torch.cat(pieces)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.sources, tensor.split(self.heights), strict=True))


@dataclass(frozen=True)
class Transposed:
    """A parameter whose source tensor lies the other way."""

    source: str
    shape: tuple[int, int]
    join_dim: None = None
    keeps_dtype: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        return source.read(self.source).T[start:stop]

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return {self.source: tensor.T}


@dataclass(frozen=True)
class Column:
    """A parameter that is some columns, turned into rows, of a source tensor that others share."""

    source: str
    first: int
    shape: tuple[int, int]
    join_dim: int = 1
    keeps_dtype: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        return source.read(self.source)[:, self.first + start : self.first + stop].T

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return {self.source: tensor.T}


def _make_state(seed: int = 0) -> dict[str, Tensors]:
    """Dtypes, ranks and odd sizes that a training state has."""
    generator = torch.Generator().manual_seed(seed)
    model = Tensors(
        {
            "layers.0.weight": torch.randn(7, 5, generator=generator),
            "layers.0.bias": torch.randn(7, generator=generator).bfloat16(),
            "experts": torch.randn(3, 2, 4, generator=generator),
        }
    )
    optimizer = Tensors(
        {
            "step": torch.tensor(float(seed)),
            "empty": torch.zeros(0, 4),
            "ids": torch.randint(0, 9, (5,), generator=generator),
            "mask": torch.randint(0, 2, (5,), generator=generator).bool(),
        }
    )
    return {"model": model, "optimizer": optimizer}


def _assert_same(state: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Mapping[str, Tensor]]) -> None:
    for part in expected:
        torch.testing.assert_close(dict(state[part]), dict(expected[part]), rtol=0, atol=0)


@pytest.fixture
def make_part() -> Callable[..., Tensors]:
    return Tensors


@pytest.fixture
def make_state() -> Callable[..., dict[str, Tensors]]:
    return _make_state


@pytest.fixture
def assert_same() -> Callable[..., None]:
    return _assert_same


@pytest.fixture
def recipes() -> dict[str, Rows | Transposed | Column]:
    return {
        "embed": Rows(("wte",), (11,), (4,)),
        "qkv": Rows(("q", "k", "v"), (4, 2, 2), (4,)),
        "bias": Rows(("b",), (5,)),
        "conv": Transposed("c", (5, 4)),
        "left": Column("s", 0, (3, 4)),
        "right": Column("s", 3, (2, 4)),
    }


@pytest.fixture
def hf_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"wte": (11, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "b": (5,), "c": (4, 5), "s": (4, 5)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
