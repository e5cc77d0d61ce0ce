"""What the tests of checkpoints and weights share: a small training state and recipes of every kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tiny_runs import Tensors
from xorl.ckpt import SafetensorsSource, WeightSource, load_weights


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
    join_dim: int | None = None
    keeps_dtype: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        return source.read(self.source).T[start:stop]

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return {self.source: tensor.T}


@dataclass(frozen=True)
class Column(Transposed):
    """A parameter that is some columns, turned into rows, of a source tensor that others share."""

    join_dim: int | None = 1
    first: int = 0

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        return super().read(source, self.first + start, self.first + stop)


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


@pytest.fixture(params=["dcp", "torch"])
def manager(request: pytest.FixtureRequest) -> str:
    """Every way to store a checkpoint."""
    return request.param


@pytest.fixture
def make_state() -> Callable[..., dict[str, Tensors]]:
    return _make_state


@pytest.fixture
def assert_same() -> Callable[..., None]:
    return _assert_same


@pytest.fixture
def recipes() -> dict[str, Rows | Transposed]:
    return {
        "embed": Rows(("wte",), (11,), (4,)),
        "qkv": Rows(("q", "k", "v"), (4, 2, 2), (4,)),
        "bias": Rows(("b",), (5,)),
        "conv": Transposed("c", (5, 4)),
        "left": Column("s", (3, 4)),
        "right": Column("s", (2, 4), first=3),
    }


@pytest.fixture
def hf_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"wte": (11, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "b": (5,), "c": (4, 5), "s": (4, 5)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def params(tmp_path: Path, recipes: dict, hf_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the recipes make of the tensors, read from a file."""
    (tmp_path / "from").mkdir()
    save_file(hf_tensors, tmp_path / "from" / "model.safetensors")
    params = {name: torch.empty(recipe.shape, dtype=torch.bfloat16) for name, recipe in recipes.items()}
    load_weights(params, recipes, SafetensorsSource(tmp_path / "from"), mode="all_ranks")
    return params
