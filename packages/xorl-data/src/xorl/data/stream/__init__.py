"""Streaming: rows read, tokenised and packed while training runs, in an order that needs neither buffer nor cache."""

from xorl.data.stream.files import Stream, StreamOptions, open_stream
from xorl.data.stream.loader import StreamLoader, StreamPlan, stream_bins

__all__ = ["Stream", "StreamLoader", "StreamOptions", "StreamPlan", "open_stream", "stream_bins"]
