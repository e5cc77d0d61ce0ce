"""Streaming: reads, tokenizes and packs rows during training, in an order that needs neither buffer nor cache."""

from xorl.data.stream.files import Stream, StreamOptions, open_stream
from xorl.data.stream.loader import StreamLoader, StreamPlan, stream_bins
from xorl.data.stream.sample import StreamSample, judge_beginning, read_sample
from xorl.data.stream.tally import Tally

__all__ = [
    "Stream",
    "StreamLoader",
    "StreamOptions",
    "StreamPlan",
    "StreamSample",
    "Tally",
    "judge_beginning",
    "open_stream",
    "read_sample",
    "stream_bins",
]
