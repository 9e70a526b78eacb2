"""Configuration of the decoding kernel for CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir.types import SCALARS, Scalar, u8
from aule.ops.attention.cpu.config import CpuConfig
from aule.ops.decode.problem import QUANTISED


@dataclass(frozen=True, kw_only=True)
class CpuDecodeConfig(CpuConfig):
    """The decoding kernel for CPUs.

    Attributes
    ----------
    cache : str
        Element type of keys and values.
    group : int
        Query heads that share a key head.
    page : int
        Keys of a page; 0 if the cache is contiguous.
    interleave : int
        Runs of keys that are read in turns; 1 for keys in order.
    heads : int
        Key heads of a task, which takes some keys of each in turn. If several, each has ``shape.rows`` rows.
    heads_outermost : bool
        A page has all keys of a head before those of the next head; otherwise all heads of a key.
    ragged : bool
        Sequences are packed: each has its own number of query rows.
    head_keys, some_keys : int
        Keys whose values one of several neighbouring heads takes before the next head does, and keys that it takes at a
        time. A piece of O is half as wide as a row of V, so the other half is read again soon.
    """

    head_keys: int
    some_keys: int
    cache: str
    group: int
    page: int = 0
    interleave: int = 1
    heads: int = 1
    heads_outermost: bool = False
    ragged: bool = False

    @property
    def quantised(self) -> bool:
        """Whether keys and values have scales."""
        return self.cache in QUANTISED

    @property
    def stored(self) -> Scalar:
        """Type of the cache's elements in memory; fp8 is stored as bytes."""
        return u8 if self.cache == "e4m3" else SCALARS[self.cache]
