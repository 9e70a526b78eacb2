"""What is fixed about the kernels of a cache while they are traced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AppendConfig:
    """The kernel that writes rows of new tokens into a cache.

    Attributes
    ----------
    operands : tuple of str
        ``("k", "v")``, or one of them, where a device cannot bind all buffers at once.
    dims : tuple of int
        Elements of a row of each.
    unit : tuple of bool
        For each operand: its rows and those of its cache have stride 1.
    align : tuple of (int, int)
        For each operand: what divides the index of every vector of its rows, and of its cache.
    rope : str or None
        Element type of cos and sin, by which rows of k are rotated.
    rope_align : int
        What divides the index of every first angle of a vector.
    lanes : int
        Threads that share a row.
    width : int
        Elements that travel together; divides the rows, and what of them is rotated.
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
        Bits of an element of each, 8, 16 or 32.
    width : tuple of int
        Elements of each that travel together.
    """

    operands: tuple[str, ...]
    bits: tuple[int, ...]
    width: tuple[int, ...]
    threads: int
    index64: bool
