"""Padding of rows in shared memory that avoids bank conflicts between lanes that write into several rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from aule.ir import Value

_Number = TypeVar("_Number", int, Value)

BANKS = 32
"""Banks of shared memory, each four bytes wide."""


@dataclass(frozen=True)
class BankPadding:
    """Where rows begin: ``stride`` elements apart, and ``push`` further after every ``every`` rows, a power of two.

    Products count rows while tracing, so that both are constants of an address.
    """

    stride: int
    every: int = 1
    push: int = 0

    def at(self, row: _Number) -> _Number:
        """Where a row begins; also where the row before it ends, if ``every`` divides ``row``."""
        if not self.push:
            return row * self.stride
        pushed = row >> (self.every.bit_length() - 1)
        return row * self.stride + pushed * self.push
