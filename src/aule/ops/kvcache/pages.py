"""Which sequence has which pages, on the host and without any array: allocation, sharing and copy-on-write.

A page holds ``page_size`` tokens of every layer. Sequences that were forked share pages, each of which counts how many
have it; a page is written to only by a sequence that has it alone. An append is planned first and committed when the
arrays are written, so that one which fails, because pages run out or a launch does, has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.errors import CacheFullError, ClosedError, InvalidArgumentError
from aule.ops.checked import checked_integer


class _Tokens:
    """A sequence: its pages in order, and how many tokens each layer has."""

    __slots__ = ("lengths", "pages")

    def __init__(self, pages: list[int], lengths: list[int]) -> None:
        self.pages = pages
        self.lengths = lengths


@dataclass(frozen=True, eq=False)
class Append:
    """An append that is possible.

    Attributes
    ----------
    starts, counts : tuple of int
        Of each sequence: the tokens it has, and how many it gets.
    pages : list of (int, int, int)
        Pages that sequences get: the sequence, the number of the page in it, and the page.
    copies : list of (int, int)
        Pages to copy before, from and to.
    version : int
        That of the table once this is done.
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
    """The pages of a cache. It takes no lock: whoever shares one between threads does.

    Parameters
    ----------
    num_pages, page_size, layers : int
        Pages, tokens of a page, and layers whose tokens are counted apart.
    page_bytes : int
        What a page takes, for the error when there is none left.
    """

    def __init__(self, num_pages: int, page_size: int, layers: int = 1, page_bytes: int = 0) -> None:
        self.num_pages, self.page_size, self.layers, self.page_bytes = num_pages, page_size, layers, page_bytes
        self.version = 0
        """Changes whenever a sequence gets or loses pages, or shares them."""
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
        """All that live, in the order in which they were made."""
        return tuple(self._sequences)

    def allocate(self) -> int:
        """A new, empty sequence. Its number is never used again."""
        return self._add(_Tokens([], [0] * self.layers))

    def fork(self, seq: int) -> int:
        """A sequence with the same tokens, on the same pages."""
        found = self._find("fork", seq)
        for page in found.pages:
            self._references[page] += 1
        self.version += 1
        return self._add(_Tokens(list(found.pages), list(found.lengths)))

    def free(self, seq: int) -> None:
        """Forget a sequence, and give back the pages that nobody else has."""
        found = self._find("free", seq)
        del self._sequences[seq]
        self._release(found.pages)

    def truncate(self, seq: int, length: int) -> None:
        """Forget the tokens from ``length`` on."""
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
        """How many tokens a layer has of a sequence."""
        return self._find("length", seq).lengths[layer]

    def lengths(self, seqs: Sequence[int], layer: int, op: str = "context_lens") -> tuple[int, ...]:
        """The same of several; ``op`` is the method that asks, for messages."""
        return tuple([self._find(op, seq).lengths[layer] for seq in seqs])

    def pages(self, seq: int) -> tuple[int, ...]:
        """The pages of a sequence."""
        return tuple(self._find("pages", seq).pages)

    def references(self, page: int) -> int:
        """How many sequences have a page."""
        return self._references[page]

    def plan_append(self, seqs: tuple[int, ...], counts: tuple[int, ...], layer: int) -> Append:
        """Find a place for ``counts`` new tokens of each sequence; changes nothing.

        Raises
        ------
        CacheFullError
            There are not enough pages for all of them.
        """
        last = self._last
        if (
            last is not None
            and (last.version, last.seqs, last.counts) == (self.version, seqs, counts)
            and last.starts == tuple([found.lengths[layer] for found in last.found])
        ):  # what another layer got just now, as a model's layers follow each other: the pages are there
            return replace(last, layer=layer, pages=[], copies=[])
        if len(set(seqs)) != len(seqs):
            raise InvalidArgumentError(
                f"[KVCache.append] expected every sequence once, got {list(seqs)}; give all its tokens in one piece"
            )
        size = self.page_size
        wanted: list[tuple[int, int, int | None]] = []  # the sequence, the number of the page in it, what it replaces
        left: dict[int, int] = {}  # how many leave a page that was shared: the last one has it alone
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
        """int32 ``[2, tokens]``: the slot of each new token, ``page * page_size`` and its place in the page, and its
        position in the sequence. Before it is committed."""
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
        """Carry out what `plan_append` planned, with nothing done to the table in between."""
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
        """int32 ``[len(seqs), pages of the longest]``; what a sequence has no page for is 0, a page that exists."""
        rows = [self._find("block_tables", seq).pages for seq in seqs]
        result = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
        for row, pages in zip(result, rows, strict=True):
            row[: len(pages)] = pages
        return result

    def shared(self, seqs: Sequence[int], layer: int = 0) -> int:
        """How many whole pages all of the sequences begin with."""
        rows = [self._find("shared_pages", seq) for seq in seqs]
        whole = min((found.lengths[layer] // self.page_size for found in rows), default=0)
        for i in range(whole):
            if len({found.pages[i] for found in rows}) > 1:
                return i
        return whole

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
