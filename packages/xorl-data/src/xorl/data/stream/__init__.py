"""Streaming: reads, tokenizes and packs rows during training, without a cache on disk."""

from xorl.data.stream.files import Stream, StreamOptions, open_stream
from xorl.data.stream.loader import StreamLoader, StreamPlan, StreamTally, stream_bins
from xorl.data.stream.sample import StreamSample, check_first_samples, read_sample

__all__ = [
    "Stream",
    "StreamLoader",
    "StreamOptions",
    "StreamPlan",
    "StreamSample",
    "StreamTally",
    "check_first_samples",
    "open_stream",
    "read_sample",
    "stream_bins",
]
