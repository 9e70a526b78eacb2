"""The pages of each sequence, on the host: allocation, sharing and copy-on-write.

A page holds ``page_size`` tokens of every layer. Forked sequences share pages, which are reference-counted; a sequence
writes only to pages that it alone has. An append is planned first and committed after the arrays are written, so one
that fails, because pages run out or a launch fails, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.errors import CacheFullError, ClosedError, InvalidArgumentError
from aule.ops.shared.checks import checked_integer


@dataclass(slots=True, eq=False)
class _Tokens:
    """A sequence: its pages in order, and its number of tokens in each layer."""

    pages: list[int]
    lengths: list[int]


@dataclass(frozen=True, eq=False)
class Append:
    """A planned append.

    Attributes
    ----------
    starts, counts : tuple of int
        For each sequence: tokens before the append, and new tokens.
    pages : list of (int, int, int)
        New pages of sequences: sequence, number of the page in it, and page.
    copies : list of (int, int)
        Pages to copy before writing: from and to.
    version : int
        The table's version after the append.
    """

    layer: int
    seqs: tuple[int, ...]
    found: tuple[_Tokens, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    pages: list[tuple[int, int, int]]
    copies: list[tuple[int, int]]
    version: int


class PageTable:
    """The pages of a cache. Not thread-safe.

    Parameters
    ----------
    num_pages, page_size, layers : int
        Pages, tokens of a page, and layers, whose tokens are counted separately.
    page_bytes : int
        Bytes of a page, for the error when none is free.
    """

    def __init__(self, num_pages: int, page_size: int, layers: int = 1, page_bytes: int = 0) -> None:
        self.num_pages, self.page_size, self.layers, self.page_bytes = num_pages, page_size, layers, page_bytes
        self.version = 0
        """Changes whenever a sequence gets, loses or shares pages."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._sequences: dict[int, _Tokens] = {}
        self._next = 0
        self._last: Append | None = None

    @property
    def pages_free(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Live sequences in the order of their creation."""
        return tuple(self._sequences)

    def allocate(self) -> int:
        """Make an empty sequence; numbers are never reused."""
        return self._add(_Tokens([], [0] * self.layers))

    def fork(self, seq: int) -> int:
        """Make a sequence with the same tokens, sharing the pages."""
        found = self._find("fork", seq)
        for page in found.pages:
            self._references[page] += 1
        self.version += 1
        return self._add(_Tokens(list(found.pages), list(found.lengths)))

    def free(self, seq: int) -> None:
        """Remove a sequence and free the pages that no other sequence has."""
        found = self._find("free", seq)
        del self._sequences[seq]
        self._release(found.pages)

    def truncate(self, seq: int, length: int) -> None:
        """Remove the tokens from ``length`` on."""
        found = self._find("truncate", seq)
        longest = max(found.lengths)
        length = checked_integer("KVCache.truncate", "length", length, "pass the tokens that are to stay")
        if not 0 <= length <= longest:
            raise InvalidArgumentError(
                f"[KVCache.truncate] expected a length from 0 to the sequence's {longest}, got {length}; append to grow"
            )
        found.lengths[:] = [min(tokens, length) for tokens in found.lengths]
        keep = -(-length // self.page_size)
        self._release(found.pages[keep:])
        del found.pages[keep:]

    def length(self, seq: int, layer: int = 0) -> int:
        return self._find("length", seq).lengths[layer]

    def lengths(self, seqs: Sequence[int], layer: int, op: str = "context_lens") -> tuple[int, ...]:
        """Lengths of several sequences; ``op`` is the caller's name, for messages."""
        return tuple([self._find(op, seq).lengths[layer] for seq in seqs])

    def references(self, page: int) -> int:
        """Number of sequences that have a page."""
        return self._references[page]

    def plan_append(self, seqs: tuple[int, ...], counts: tuple[int, ...], layer: int) -> Append:
        """Plan an append of ``counts`` new tokens to each sequence; changes nothing.

        Raises
        ------
        CacheFullError
            Not enough pages are free.
        """
        last = self._last
        if (
            last is not None
            and (last.version, last.seqs, last.counts) == (self.version, seqs, counts)
            and last.starts == tuple([found.lengths[layer] for found in last.found])
        ):  # layers of a model follow each other: another layer got these tokens just now, and the pages are there
            return replace(last, layer=layer, pages=[], copies=[])
        if len(set(seqs)) != len(seqs):
            raise InvalidArgumentError(
                f"[KVCache.append] expected every sequence once, got {list(seqs)}; give all its tokens in one piece"
            )
        size = self.page_size
        wanted: list[tuple[int, int, int | None]] = []  # sequence, number of the page in it, page that it replaces
        left: dict[int, int] = {}  # sequences that leave a shared page; the last one keeps it
        tokens = [self._find("append", seq) for seq in seqs]
        starts = [found.lengths[layer] for found in tokens]
        for seq, found, start, count in zip(seqs, tokens, starts, counts, strict=True):
            end = start + count
            if count == 0:
                continue
            there = len(found.pages)
            for i in range(start // size, min(-(-end // size), there)):
                page = found.pages[i]
                if self._references[page] - left.get(page, 0) > 1:
                    left[page] = left.get(page, 0) + 1
                    wanted.append((seq, i, page))
            wanted += [(seq, i, None) for i in range(there, -(-end // size))]
        if len(wanted) > len(self._free):
            raise CacheFullError(
                f"[KVCache.append] expected {len(wanted)} free pages of {size} tokens, got {len(self._free)} of "
                f"{self.num_pages}; free or truncate sequences, or make the cache larger",
                len(wanted),
                len(self._free),
                len(wanted) * self.page_bytes,
            )
        taken = self._free[len(self._free) - len(wanted) :][::-1]
        pages = [(seq, i, page) for (seq, i, _), page in zip(wanted, taken, strict=True)]
        copies = [(old, page) for (_, _, old), page in zip(wanted, taken, strict=True) if old is not None]
        version = self.version + bool(pages)
        return Append(layer, seqs, tuple(tokens), tuple(starts), counts, pages, copies, version)

    def places(self, append: Append) -> npt.NDArray[np.int32]:
        """Slots and positions of the new tokens, int32 ``[2, tokens]``, before the append is committed.

        A slot is ``page * page_size`` plus the token's place in the page.
        """
        size = self.page_size
        new: dict[int, dict[int, int]] = {}
        for seq, i, page in append.pages:
            new.setdefault(seq, {})[i] = page
        none: dict[int, int] = {}
        slots: list[int] = []
        positions: list[int] = []
        for seq, found, start, count in zip(append.seqs, append.found, append.starts, append.counts, strict=True):
            added, end = new.get(seq, none), start + count
            positions += range(start, end)
            while start < end:  # page by page
                i, at = divmod(start, size)
                stop = min(end, start - at + size)
                first = (added[i] if i in added else found.pages[i]) * size + at
                slots += range(first, first + stop - start)
                start = stop
        return np.array([slots, positions], np.int32).reshape(2, -1)

    def commit(self, append: Append) -> None:
        """Carry out a planned append. The table must not have changed since."""
        del self._free[len(self._free) - len(append.pages) :]
        for seq, i, page in append.pages:
            found = self._sequences[seq]
            self._references[page] = 1
            if i < len(found.pages):
                self._references[found.pages[i]] -= 1
                found.pages[i] = page
            else:
                found.pages.append(page)
        for found, count in zip(append.found, append.counts, strict=True):
            found.lengths[append.layer] += count
        self.version = append.version
        self._last = append

    def table(self, seqs: Sequence[int]) -> npt.NDArray[np.int32]:
        """Page table, int32 ``[len(seqs), pages of the longest]``; unused entries are 0, a valid page."""
        rows = [self._find("block_tables", seq).pages for seq in seqs]
        result = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
        for row, pages in zip(result, rows, strict=True):
            row[: len(pages)] = pages
        return result

    def shared(self, seqs: Sequence[int], layer: int = 0) -> int:
        """Number of full pages that all of the sequences begin with."""
        rows = [self._find("shared_pages", seq) for seq in seqs]
        full = min((found.lengths[layer] // self.page_size for found in rows), default=0)
        for i in range(full):
            if len({found.pages[i] for found in rows}) > 1:
                return i
        return full

    def _add(self, tokens: _Tokens) -> int:
        seq, self._next = self._next, self._next + 1
        self._sequences[seq] = tokens
        return seq

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
        self.version += 1

    def _find(self, op: str, seq: Any) -> _Tokens:
        number = int(seq) if isinstance(seq, (int, np.integer)) and not isinstance(seq, bool) else -1
        found = self._sequences.get(number)
        if found is not None:
            return found
        if 0 <= number < self._next:
            raise ClosedError(
                f"[KVCache.{op}] expected a live sequence, got {seq}, which was freed; allocate a new one"
            )
        raise InvalidArgumentError(
            f"[KVCache.{op}] expected a sequence that allocate() or fork() gave, got {seq!r}; allocate one first"
        )
