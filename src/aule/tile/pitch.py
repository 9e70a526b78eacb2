"""Where rows begin in shared memory, so that lanes that write into several of them at a time meet no bank twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from aule.ir import Value

_Number = TypeVar("_Number", int, Value)

BANKS = 32
"""Of shared memory, each four bytes wide."""


@dataclass(frozen=True)
class Pitch:
    """Rows begin ``stride`` elements apart, and after every ``every`` of them, a power of two, ``push`` further. Where
    rows are counted while tracing, as in the products, both are constants of an address."""

    stride: int
    every: int = 1
    push: int = 0

    def at(self, row: _Number) -> _Number:
        """Where a row begins; where so many end, if they are a multiple of ``every``."""
        if not self.push:
            return row * self.stride
        pushed = row >> (self.every.bit_length() - 1)
        return row * self.stride + pushed * self.push
