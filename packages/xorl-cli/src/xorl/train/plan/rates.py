"""How fast a kind of GPU computes and communicates: the measured rates that plans are made from.

`rates/NAME.json` has those of one card, as tools/measure_rates.py writes them. Shapes: a product multiplies [M, K] by
[K, N].
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import product
from typing import cast

FOLDER = resources.files("xorl.train.plan") / "rates"
MIB, GIB = 2**20, 2**30

Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | None


def cards() -> tuple[str, ...]:
    """The names of the cards whose rates were measured."""
    return tuple(sorted(file.name.removesuffix(".json") for file in FOLDER.iterdir() if file.name.endswith(".json")))


@cache
def rates_of(card: str) -> Rates:
    """The rates of a card by its name, such as h100. Raises ValueError for an unknown one."""
    if card.lower() not in cards():
        raise ValueError(
            f"--gpu {card}: its rates have not been measured; known: {', '.join(cards())}. "
            "tools/measure_rates.py measures another card"
        )
    return Rates.of(json.loads((FOLDER / f"{card.lower()}.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Curve:
    """Values at increasing points. Between them, the logarithms are interpolated; beyond them, the nearest holds."""

    points: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Json, values: Json) -> Curve:
        return cls(_numbers(points), _numbers(values))

    def at(self, point: float) -> float:
        """The value at a point above 0."""
        (first, left), (second, right) = _neighbours(self.points, point)
        return math.exp(left * math.log(self.values[first]) + right * math.log(self.values[second]))


@dataclass(frozen=True)
class Attention:
    """TFLOP/s of attention by the length of a document; the backward pass counts as twice the forward pass."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class Host:
    """Microseconds that the host takes: to launch an operation, called from Python or compiled, or to exchange a unit.

    operation_us, compiled_us: for each operation of a layer as it runs uncompiled, forward or backward.
    unit_us: what FSDP2 adds for each unit, forward and backward pass together.
    """

    operation_us: float
    compiled_us: float
    unit_us: float


@dataclass(frozen=True)
class Links:
    """GB/s that reach a rank in a collective of several ranks of one host, by its size in MiB.

    by_ranks: for each collective, by the number of ranks.
    beside_products: the share of the time of FSDP2's collectives that products beside them lose, by transport.
    """

    by_ranks: Mapping[str, Mapping[int, Curve]]
    beside_products: Mapping[str, float]

    def seconds(self, collective: str, num_ranks: int, num_bytes: float) -> float:
        """The time of a collective whose whole, over all ranks, has so many bytes."""
        if num_ranks == 1 or not num_bytes:
            return 0.0
        measured = self.by_ranks[collective]
        nearest = min(measured, key=lambda size: (abs(math.log(size / num_ranks)), size))
        received = num_bytes * (num_ranks - 1) / num_ranks
        return received / (measured[nearest].at(num_bytes / MIB) * 1e9)


@dataclass(frozen=True)
class Rates:
    """Measurements of one kind of GPU.

    device: its name. memory_gib: of the device, as torch sees it. records: where the numbers come from.
    products: TFLOP/s by dtype ("bf16", "fp8", "fp32"), then by M, N and K, each at the same `sizes`.
    attention: by the channels of a head. experts: TFLOP/s of grouped products by the rows of an expert, in the passes.
    memory: GB/s read and written by operations on elements, by their MiB. adamw_gbps: by the optimizer's step.
    """

    card: str
    device: str
    memory_gib: float
    records: Mapping[str, str]
    sizes: Mapping[str, tuple[float, ...]]
    products: Mapping[str, Sequence[Sequence[Sequence[float]]]]
    attention: Mapping[int, Attention]
    experts: Attention
    memory: Curve
    adamw_gbps: float
    host: Host
    links: Links

    @classmethod
    def of(cls, table: Mapping[str, Json]) -> Rates:
        """From the content of a file."""
        products = _mapping(table["products"])
        attention = _mapping(table["attention"])
        links = _mapping(table["links"])
        memory = _mapping(table["memory"])
        return cls(
            card=str(table["card"]),
            device=str(table["device"]),
            memory_gib=_number(table["memory_gib"]),
            records={name: str(text) for name, text in _mapping(table["records"]).items()},
            sizes={dtype: _numbers(_mapping(grid)["sizes"]) for dtype, grid in products.items()},
            products={
                dtype: cast("Sequence[Sequence[Sequence[float]]]", _mapping(grid)["tflops"])
                for dtype, grid in products.items()
            },
            attention={int(channels): _passes(curves, "lengths") for channels, curves in attention.items()},
            experts=_passes(table["experts"], "rows"),
            memory=Curve.of(memory["mib"], memory["gbps"]),
            adamw_gbps=_number(table["adamw_gbps"]),
            host=Host(**{name: _number(value) for name, value in _mapping(table["host"]).items()}),
            links=Links(
                {
                    collective: {
                        int(size): Curve.of(_mapping(curve)["mib"], _mapping(curve)["gbps"])
                        for size, curve in _mapping(by_ranks).items()
                    }
                    for collective, by_ranks in _mapping(links["by_ranks"]).items()
                },
                {name: _number(value) for name, value in _mapping(links["beside_products"]).items()},
            ),
        )

    def product_s(self, m: int, n: int, k: int, dtype: str) -> float:
        """Seconds of a product of these sizes, if it is not limited by memory."""
        sizes, tflops = self.sizes[dtype], self.products[dtype]
        around = ([*_neighbours(sizes, size)] for size in (m, n, k))
        logarithm = sum(
            weight_m * weight_n * weight_k * math.log(tflops[i][j][index])
            for (i, weight_m), (j, weight_n), (index, weight_k) in product(*around)
        )
        return 2 * m * n * k / (math.exp(logarithm) * 1e12)

    def attention_s(self, flops: float, channels: int, length: float, *, backward: bool) -> float:
        """Seconds of attention over documents of `length` tokens on average (by their pairs)."""
        nearest = min(self.attention, key=lambda each: (abs(math.log(each / channels)), each))
        curves = self.attention[nearest]
        return flops / ((curves.backward if backward else curves.forward).at(length) * 1e12)

    def experts_s(self, flops: float, rows: float, *, backward: bool) -> float:
        """Seconds of the grouped products of experts that have `rows` rows each."""
        return flops / ((self.experts.backward if backward else self.experts.forward).at(rows) * 1e12)

    def memory_s(self, num_bytes: float) -> float:
        """Seconds to read and write so many bytes in one operation."""
        return num_bytes / (self.memory.at(max(num_bytes, 1) / MIB) * 1e9)


def _neighbours(points: Sequence[float], point: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """The two measured points around `point` by their indices, with their weights on a logarithmic scale."""
    if point <= points[0]:
        return (0, 1.0), (0, 0.0)
    if point >= points[-1]:
        return (len(points) - 1, 1.0), (len(points) - 1, 0.0)
    second = bisect_right(points, point)
    below, above = points[second - 1], points[second]
    weight = math.log(point / below) / math.log(above / below)
    return (second - 1, 1 - weight), (second, weight)


def _passes(table: Json, points: str) -> Attention:
    curves = _mapping(table)
    return Attention(*(Curve.of(curves[points], curves[name]) for name in ("forward", "backward")))


def _mapping(value: Json) -> Mapping[str, Json]:
    assert isinstance(value, Mapping), f"rates: {value!r} should be a mapping"
    return value


def _numbers(value: Json) -> tuple[float, ...]:
    assert isinstance(value, list | tuple), f"rates: {value!r} should be a list"
    return tuple(_number(each) for each in value)


def _number(value: Json) -> float:
    assert isinstance(value, int | float), f"rates: {value!r} should be a number"
    return float(value)
