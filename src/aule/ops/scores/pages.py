"""Keys and values in pages of a pool: a table lists the pages of each sequence."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import i32
from aule.ops.scores.parameters import Parameters
from aule.tile.common.matrix import Matrix


class Pages:
    """The pages of one sequence."""

    def __init__(self, parameters: Parameters, batch: Value) -> None:
        self.p, self.b = parameters, parameters.b
        self.table = parameters.buffer("tables", i32)
        self.row = parameters.strided("tables", batch)

    def split(self, key: Value) -> tuple[Value, Value]:
        """The page of a key in its sequence, and its place in the page."""
        number = self.p.number
        if self.p.config.paging == "shift":
            return key >> number("page_shift"), key & (number("page") - 1)
        which = key // number("page")
        return which, key - which * number("page")

    def number(self, which: Value) -> Value:
        """The number in the pool of a sequence's page, clamped to the pool whatever the table holds."""
        b, p = self.b, self.p
        place = b.cast(which, p.index) * p.number("tables_stride1", p.index)
        return b.min(b.max(b.load(self.table, self.row + place), 0), p.number("pages") - 1)


@dataclass(frozen=True)
class PagedMatrix(Matrix):
    """One head of K or V in pages; ``base`` is in page 0, and pages lie ``page_stride`` apart."""

    pages: Pages
    page_stride: Value

    @property
    def even(self) -> bool:
        return False

    def row_start(self, b: Builder, row: Value) -> Value:
        which, where = self.pages.split(b.min(row, self.rows - 1))
        page = self.index(b, self.pages.number(which)) * self.page_stride
        return self.base + page + self.index(b, where) * self.row_stride
