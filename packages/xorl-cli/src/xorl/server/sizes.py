"""Formats sizes for display."""

from __future__ import annotations


def readable_size(num_bytes: float) -> str:
    """A size in powers of 1000, as in `storage_limit`: `1.5 MB`."""
    size = num_bytes
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
