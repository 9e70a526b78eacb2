"""Pairs of columns for the row engine, as rotations take them: ``i`` and ``i + half`` of a row, or neighbours."""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import element
from aule.tile.rows import Columns, Source
from aule.tile.spans import Derived, Part, Span


class Pairs:
    """The pairs of a row; a `Span` counts them.

    Parameters
    ----------
    what : Source or Columns
        The first column of the first pair.
    interleaved : bool
        Pairs are neighbours; else the second ones follow behind all first ones.

    Attributes
    ----------
    first, second
        For ``p[pairs.first]``.
    """

    def __init__(self, span: Span, what: Source | Columns, interleaved: bool) -> None:
        self.span, self.what, self.interleaved = span, what, interleaved
        self.first: Source | Columns | Derived
        self.second: Source | Columns | Derived
        if interleaved:
            low, high = (Derived(lambda p, half=half: self._run(p, half)) for half in range(2))  # type: ignore[misc]
            self.first = Derived(lambda p: self._lanes(p, low, high, 0))
            self.second = Derived(lambda p: self._lanes(p, low, high, 1))
            return
        self.first = what
        shift, rows = span.length, span.rows
        if isinstance(what, Columns):
            self.second = Columns(what.array, rows.shifted(what.array, what.start, shift))
        else:
            self.second = Source(what.array, tuple(rows.shifted(what.array, start, shift) for start in what.starts))

    def hold(self) -> None:
        """Start to read the whole row, as `Span.hold`."""
        if not self.interleaved:
            self.span.hold(*(x for x in (self.first, self.second) if not isinstance(x, Derived)))

    def store(self, p: Part, first: Value, second: Value) -> None:
        """Store a part of both."""
        assert isinstance(self.what, Source)
        if not self.interleaved:
            assert isinstance(self.first, Source) and isinstance(self.second, Source)
            p.store(self.first, first)
            p.store(self.second, second)
            return
        b, width, array = self.span.rows.b, self.span.shape.width, self.what.array
        with self.span.where_there(p):
            for half, count in enumerate(self._counts(p)):
                at = range(half * width, half * width + width)
                lanes = tuple(i // 2 + (width if i % 2 else 0) for i in at)
                value = (first, second)[half] if width == 1 else b.permute(first, second, lanes)
                if count:
                    self.span.store_run(array, self.what.starts[p.row], p.col * 2 + half * width, value, count)

    def _counts(self, p: Part) -> tuple[int, int]:
        """Columns that count in either half of a part of interleaved pairs."""
        first = min(2 * p.count, self.span.shape.width)
        return first, 2 * p.count - first

    def _run(self, p: Part, half: int) -> Value:
        what, span = self.what, self.span
        start = what.start if isinstance(what, Columns) else what.starts[p.row]
        count = self._counts(p)[half]
        b = span.rows.b
        if not count:
            return b.splat(b.const(0.0, span.rows.work), span.shape.width)
        col = span.safe_column(p) * 2 + half * span.shape.width
        return b.cast(span.load_run(what.array, start, col, count), span.rows.work)

    def _lanes(self, p: Part, low: Derived, high: Derived, which: int) -> Value:
        width = self.span.shape.width
        if width == 1:
            return p[(low, high)[which]]
        assert element(p[low].type) == self.span.rows.work
        return self.span.rows.b.permute(p[low], p[high], tuple(range(which, 2 * width, 2)))
