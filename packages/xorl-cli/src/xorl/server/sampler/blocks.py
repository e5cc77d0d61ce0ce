"""The blocks of the KV cache: reference counts, prefix sharing by content keys, least recently used reuse."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class BlockPool:
    """Blocks by number. A full block may have a key, which identifies its tokens and all tokens before them.

    An unused block keeps its key until it is allocated again; until then, requests with the same tokens can share it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._num_users = [0] * num_blocks
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_unused(self) -> int:
        """The number of blocks that can be allocated."""
        return len(self._unused)

    def allocate(self) -> int:
        """Allocate the least recently used block for new tokens. There must be an unused block."""
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        self._num_users[block] = 1
        return block

    def set_key(self, block: int, key: bytes) -> None:
        """Set the key of a full block. If another block has this key already, `find` keeps returning that one."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of `keys` that is known; does not mark them as used."""
        found: list[int] = []
        for key in keys:
            if key not in self._block_of:
                break
            found.append(self._block_of[key])
        return found

    def is_unused(self, block: int) -> bool:
        return block in self._unused

    def share(self, blocks: Iterable[int]) -> None:
        """Mark found blocks as used."""
        for block in blocks:
            self._unused.pop(block, None)
            self._num_users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Release blocks, given in token order. The last is reused first, since the fewest requests can share it."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._unused[block] = None

    def forget_keys(self) -> None:
        """Delete all keys so that no block is found again; blocks in use stay in use."""
        for block in list(self._key_of):
            self._forget(block)

    def _forget(self, block: int) -> None:
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]


def block_keys(tokens: Sequence[int], block_size: int, root: bytes) -> Iterator[bytes]:
    """The key of each full block of `tokens`, computed with the weights that `root` identifies."""
    key = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = next_key(key, tokens[start : start + block_size])
        yield key


def next_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block of `tokens` that follows the block with the key `previous`."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()
