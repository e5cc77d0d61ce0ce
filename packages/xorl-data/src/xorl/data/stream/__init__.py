"""Streaming: reads, tokenizes and packs rows during training, without a cache on disk."""

from xorl.data.stream.files import Stream, StreamOptions, open_stream
from xorl.data.stream.loader import StreamLoader, StreamPlan, stream_bins
from xorl.data.stream.sample import StreamSample, check_first_samples, read_sample
from xorl.data.stream.tally import StreamTally

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
