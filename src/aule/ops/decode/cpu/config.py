"""Configurations of the CPU kernels for decoding."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir.types import SCALARS, Scalar, u8
from aule.ops.attention.cpu.config import CpuConfig
from aule.ops.decode.problem import QUANTISED


@dataclass(frozen=True, kw_only=True)
class CpuDecodeConfig(CpuConfig):
    """A kernel of some query rows of each sequence against its cache.

    Attributes
    ----------
    cache : str
        Element type of keys and values.
    group : int
        Query heads that share a key head.
    page : int
        Keys of a page; 0 when the cache is contiguous.
    ways : int
        Runs of keys that are read in turns; 1 where their order matters, or nothing is gained.
    heads : int
        Key heads of a task, which takes them in turns, a few keys at a time. With several, each has as many rows as are
        multiplied at a time.
    piled : bool
        What a page has of one of several heads is in one piece, and the next head's behind it; else their rows of a key
        are neighbours.
    ragged : bool
        Sequences have their own numbers of query rows, one behind the other.
    """

    cache: str
    group: int
    page: int = 0
    ways: int = 1
    heads: int = 1
    piled: bool = False
    ragged: bool = False

    @property
    def quantised(self) -> bool:
        return self.cache in QUANTISED

    @property
    def stored(self) -> Scalar:
        """The type of a cache's elements in memory; fp8 is bytes."""
        return u8 if self.cache == "e4m3" else SCALARS[self.cache]
