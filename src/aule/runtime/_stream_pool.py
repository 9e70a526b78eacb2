"""Bookkeeping for a pool of device memory. The device that owns the pool makes the driver calls."""

from __future__ import annotations

import bisect

_MIB = 1 << 20


class Block:
    """A part of a segment, linked to its neighbours in the segment so that free ones can be merged."""

    __slots__ = ("address", "following", "free", "previous", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = True
        self.previous: Block | None = None
        self.following: Block | None = None


class Pool:
    """Segments of device memory, divided into blocks. Makes no driver call; the device holds a lock around each call.

    Requests up to 1 MiB share segments of 2 MiB, so that small blocks never fragment large segments. A request takes
    the smallest free block that fits; the rest becomes a free block if it is large enough.
    """

    GRAIN = 512
    SMALL = _MIB
    SEGMENT = 2 * _MIB
    # A large block serves no request smaller than an eighth of it: a small one would block its use for large requests.
    SPLIT_RATIO = 8
    SPLIT_ALWAYS = 32 * _MIB

    def __init__(self) -> None:
        self.segments: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}  # free blocks by address
        self._sizes: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), sorted, by smallness

    @classmethod
    def segment_size(cls, nbytes: int) -> int:
        """Return how many bytes to allocate from the driver when a request finds no block."""
        return cls.SEGMENT if nbytes <= cls.SMALL else -(-nbytes // cls.SEGMENT) * cls.SEGMENT

    def add(self, address: int, size: int, nbytes: int) -> None:
        """Add a new segment, allocated for a request of ``nbytes``."""
        self.segments[address] = size
        self._insert(Block(address, size, nbytes <= self.SMALL))

    def take(self, nbytes: int) -> Block | None:
        """Take a free block of at least ``nbytes``; None if there is none."""
        size = max(1, -(-nbytes // self.GRAIN)) * self.GRAIN
        small = size <= self.SMALL
        sizes = self._sizes[small]
        at = bisect.bisect_left(sizes, (size, 0))
        if at == len(sizes) or (not small and sizes[at][0] > max(size * self.SPLIT_RATIO, self.SPLIT_ALWAYS)):
            return None
        block = self._blocks.pop(sizes.pop(at)[1])
        block.free = False
        if block.size - size >= (self.GRAIN if small else self.SMALL):
            rest = Block(block.address + size, block.size - size, small)
            rest.previous, rest.following = block, block.following
            if block.following is not None:
                block.following.previous = rest
            block.following, block.size = rest, size
            self._insert(rest)
        return block

    def give(self, block: Block) -> None:
        """Take a block back and merge it with free neighbours."""
        following, previous = block.following, block.previous
        if following is not None and following.free:
            self._remove(following)
            self._absorb(block, following)
        if previous is not None and previous.free:
            self._remove(previous)
            self._absorb(previous, block)
            block = previous
        self._insert(block)

    def drop_free_segments(self) -> list[int]:
        """Remove every fully free segment from the pool and return their addresses."""
        unused = [b for b in self._blocks.values() if b.previous is None and b.following is None]
        for block in unused:
            self._remove(block)
            del self.segments[block.address]
        return [block.address for block in unused]

    @staticmethod
    def _absorb(block: Block, following: Block) -> None:
        block.size += following.size
        block.following = following.following
        if block.following is not None:
            block.following.previous = block

    def _insert(self, block: Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        bisect.insort(self._sizes[block.small], (block.size, block.address))

    def _remove(self, block: Block) -> None:
        sizes = self._sizes[block.small]
        sizes.pop(bisect.bisect_left(sizes, (block.size, block.address)))
        del self._blocks[block.address]
