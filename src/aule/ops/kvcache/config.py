"""Configurations of the kernels that write into a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AppendConfig:
    """The kernel that writes rows of new tokens into a cache.

    Attributes
    ----------
    operands : tuple of str
        ``("k", "v")``, or one of them if the device cannot bind all buffers at once.
    dims : tuple of int
        Elements of a row of each.
    unit : tuple of bool
        For each operand: rows of it and of its cache have stride 1.
    align : tuple of (int, int)
        For each operand: elements to a multiple of which every vector of its rows, and of its cache, is aligned.
    rope : str or None
        Element type of cos and sin; None if k is not rotated.
    rope_align : int
        Elements to a multiple of which a vector's first angle is aligned.
    lanes : int
        Threads that share a row.
    width : int
        Elements of a vector; divides the rows and their rotated part.
    """

    operands: tuple[str, ...]
    dims: tuple[int, ...]
    unit: tuple[bool, ...]
    align: tuple[tuple[int, int], ...]
    dtype: str
    quantize: str | None
    rope: str | None
    rotary_dim: int
    interleaved: bool
    rope_align: int
    threads: int
    lanes: int
    width: int
    index64: bool


@dataclass(frozen=True, kw_only=True)
class CopyConfig:
    """The kernel that copies pages.

    Attributes
    ----------
    operands : tuple of str
        The arrays whose pages are copied.
    bits : tuple of int
        Bits of an element of each: 8, 16 or 32.
    width : tuple of int
        Elements of a vector of each.
    """

    operands: tuple[str, ...]
    bits: tuple[int, ...]
    width: tuple[int, ...]
    threads: int
    index64: bool
