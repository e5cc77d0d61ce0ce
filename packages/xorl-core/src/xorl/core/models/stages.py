"""Divides the layers of a model into the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.flops import forward_costs


@dataclass(frozen=True)
class Stage:
    """The part of a model that a rank of a pipeline has.

    Attributes:
        chunks: for each part of it, the numbers of its layers; the outputs of a part are the inputs of the first part
            of the next stage, and those of the last stage are the inputs of the next part of the first one.
        is_first: whether it has the embedding, with which the first chunk begins.
        is_last: whether it has the last norm and the head, with which the last chunk ends.
    """

    chunks: tuple[range, ...]
    is_first: bool = True
    is_last: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole model."""
        return self.is_first and self.is_last

    def begins(self, chunk: int) -> bool:
        """Whether the inputs of a chunk are token ids."""
        return self.is_first and chunk == 0

    def ends(self, chunk: int) -> bool:
        """Whether a chunk ends with the head."""
        return self.is_last and chunk == len(self.chunks) - 1


def layers_needed(config: DecoderConfig, num_parts: int) -> int:
    """The fewest layers that can be divided into so many parts.

    The layers after which features of images are added are all in the first part, which has the image encoder.
    """
    taps = () if config.images is None else config.images.taps
    return max(1, len(taps)) + num_parts - 1


def stages_of(config: DecoderConfig, num_stages: int, length: int, num_chunks: int = 1) -> list[Stage]:
    """The stages of a pipeline, each with `num_chunks` chunks.

    No other division into consecutive layers makes the slowest chunk faster, by the forward FLOPs of a document of
    `length` tokens; the head counts, and the embedding and image encoders do not.

    Raises ValueError if there are fewer layers than `layers_needed`.
    """
    layers, head = forward_costs(config, length)
    num_parts, in_first = num_stages * num_chunks, layers_needed(config, 1)
    if len(layers) < layers_needed(config, num_parts):
        raise ValueError(f"num_stages: {len(layers)} layers cannot be divided into {num_parts} parts")
    before = [0.0, *accumulate(layers)]
    # By the number of layers divided so far: the cost of the slowest part, and where the parts end.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(float("inf"), ())] * len(layers)]
    for part in range(num_parts):
        extra = head if part == num_parts - 1 else 0.0
        best = [
            min(
                (
                    (max(best[start][0], before[stop] - before[start] + extra), (*best[start][1], stop))
                    for start in range(stop)
                    if part or stop >= in_first
                ),
                default=(float("inf"), ()),
            )
            for stop in range(len(layers) + 1)
        ]
    stops = best[-1][1]
    parts = [range(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]
    return [Stage(tuple(parts[index::num_stages]), index == 0, index == num_stages - 1) for index in range(num_stages)]
