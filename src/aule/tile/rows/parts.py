"""Operands of row kernels, and `Part`: a few neighbouring columns of a row, as a kernel sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aule.ir import Value
from aule.ir.types import element

if TYPE_CHECKING:
    from aule.tile.rows.passes import Passes


@dataclass(frozen=True)
class RowArray:
    """An array of rows in memory.

    Attributes
    ----------
    start : callable
        Maps a row number to the index of the row's first element.
    stride : Value or None
        Elements from one column to the next; None means 1.
    aligned : bool
        Every part of a row starts at a multiple of its width, or of 16 bytes if it is wider.
    stream : bool
        Stores bypass the caches.
    """

    buffer: Value
    start: Callable[[Value], Value]
    stride: Value | None = None
    aligned: bool = False
    stream: bool = False


@dataclass(frozen=True, eq=False)
class Source:
    """This thread's rows of an array, or a range of their columns: the index at which each begins."""

    array: RowArray
    starts: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Columns:
    """An array with one number per column, the same for every row."""

    array: RowArray
    start: Value


@dataclass(frozen=True, eq=False)
class PerRow:
    """A value for each of this thread's rows."""

    values: tuple[Value, ...]

    def map(self, f: Callable[..., Value], *others: PerRow) -> PerRow:
        """Apply ``f`` row by row to these values and those of ``others``."""
        return PerRow(tuple(f(*row) for row in zip(self.values, *(x.values for x in others), strict=True)))


@dataclass(frozen=True, eq=False)
class Derived:
    """A value computed from a part: once if rows are in registers, else once in each pass that uses it.

    With ``costly`` the first pass keeps it in registers, or in the thread's scratch memory if there is some. With
    ``narrow`` it has an array's element type, and `Part.raw` returns it as it is.
    """

    f: Callable[[Part], Value]
    costly: bool = False
    narrow: bool = False


@dataclass(frozen=True, eq=False)
class Product:
    """A product that is added to a sum: one fused operation."""

    x: Value
    y: Value


Term = Value | Product
"""A term of a sum."""


class PartGroup:
    """``count`` consecutive parts of a row, from column ``col`` on, that are visited together; ``cache`` holds values
    that they share."""

    def __init__(self, col: Value, count: int) -> None:
        self.col, self.count = col, count
        self.cache: dict[object, Any] = {}


class Part:
    """Some neighbouring columns of one row, as a kernel sees them: ``p[x]`` is the value of ``x`` there.

    Attributes
    ----------
    row : int
        Which of the thread's rows.
    col : Value
        The first column.
    number : int or None
        Which of the thread's parts, if rows are in registers.
    inside : Value or None
        Which columns exist, and were not visited before; None if all.
    shift : Value or None
        Of the last part of a row that is not in registers (`PassShape.tail`): so many columns were visited before.
    group : (PartGroup, int) or None
        The group of consecutive parts it is visited with, and its place there.
    """

    def __init__(
        self,
        passes: Passes,
        row: int,
        col: Value,
        number: int | None,
        inside: Value | None,
        shift: Value | None = None,
    ) -> None:
        self.passes, self.row, self.col = passes, row, col
        self.group: tuple[PartGroup, int] | None = None
        self.number, self.inside, self.shift = number, inside, shift
        self.cache: dict[Derived, Value] = {}
        """Values derived in this pass."""

    @property
    def may_end(self) -> bool:
        """Whether all of its columns may be past the row's end."""
        return self.inside is not None and self.shift is None

    def __getitem__(self, what: Source | Columns | PerRow | Derived) -> Value:
        """Elements of an array, a derived value, or this row's value, in the type computed in."""
        if isinstance(what, PerRow):
            return what.values[self.row]
        if isinstance(what, Derived):
            return self.passes.derived(self, what)
        return self.passes.rows.b.cast(self.raw(what), self.passes.rows.work)

    def raw(self, what: Source | Columns | Derived) -> Value:
        """Elements of an array, or a narrow derived value, in their own type."""
        if isinstance(what, Derived):
            return self.passes.derived_narrow(self, what)
        return self.passes.elements(self, what)

    def columns(self) -> Value:
        """Column numbers, as a vector."""
        b, elem = self.passes.rows.b, element(self.col.type)
        return b.vector([b.const(i, elem) for i in range(self.passes.shape.width)]) + self.col

    def store(self, to: Source, value: Value) -> None:
        """Store a value, rounded to the array's type, where the row and the columns exist."""
        with self.passes.where_exists(self):
            self.passes.store_run(to.array, to.starts[self.row], self.col, value)

    def masked(self, value: Value, otherwise: float) -> Value:
        """The value, with ``otherwise`` in lanes past the row's end."""
        b = self.passes.rows.b
        if self.inside is None or (self.may_end and self.passes.kernel_masks):
            return value
        return b.select(self.inside, value, b.const(otherwise, element(value.type)))

    def masked_term(self, term: Term, otherwise: float) -> Term:
        """A term of a sum with ``otherwise`` in lanes past the row's end; both factors of a product become zero."""
        if isinstance(term, Product):
            return Product(self.masked(term.x, 0.0), self.masked(term.y, 0.0))
        return self.masked(term, otherwise)
