"""RowProblem: the base class of the problems of row operations."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RowProblem:
    """An operation on rows along the last axis of ``shape``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def length(self) -> int:
        """Columns of a row. Norms and softmax take rows without any: their results have no elements, or are zero."""
        return self.shape[-1]

    @property
    def work(self) -> str:
        """The dtype computed in."""
        return "f64" if self.dtype == "f64" else "f32"
