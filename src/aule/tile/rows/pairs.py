"""Pairs of columns of a row, for rotations: columns ``i`` and ``i + half``, or neighbours."""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import element
from aule.tile.rows.parts import Columns, Derived, Part, Source
from aule.tile.rows.passes import Passes


class Pairs:
    """The pairs of columns of ``what``, from its first column on; ``passes`` counts pairs.

    ``interleaved`` pairs are neighbours; else the second columns of all pairs follow the first ones. A kernel reads
    them as ``p[pairs.first]`` and ``p[pairs.second]``.
    """

    def __init__(self, passes: Passes, what: Source | Columns, interleaved: bool) -> None:
        self.passes, self.what, self.interleaved = passes, what, interleaved
        self.first: Source | Columns | Derived
        self.second: Source | Columns | Derived
        if interleaved:
            low, high = (Derived(lambda p, half=half: self._run(p, half)) for half in range(2))  # type: ignore[misc]
            self.first = Derived(lambda p: self._lanes(p, low, high, 0))
            self.second = Derived(lambda p: self._lanes(p, low, high, 1))
            return
        self.first = what
        shift, rows = passes.length, passes.rows
        if isinstance(what, Columns):
            self.second = Columns(what.array, rows.shifted(what.array, what.start, shift))
        else:
            self.second = Source(what.array, tuple(rows.shifted(what.array, start, shift) for start in what.starts))

    def preload(self) -> None:
        """Start to load the row (`Passes.preload`)."""
        if not self.interleaved:
            self.passes.preload(*(x for x in (self.first, self.second) if not isinstance(x, Derived)))

    def store(self, p: Part, first: Value, second: Value) -> None:
        """Store both columns of a part's pairs."""
        assert isinstance(self.what, Source)
        if not self.interleaved:
            assert isinstance(self.first, Source) and isinstance(self.second, Source)
            p.store(self.first, first)
            p.store(self.second, second)
            return
        b, width, array = self.passes.rows.b, self.passes.shape.width, self.what.array
        with self.passes.where_exists(p):
            for half in range(2):
                at = range(half * width, half * width + width)
                lanes = tuple(i // 2 + (width if i % 2 else 0) for i in at)
                value = (first, second)[half] if width == 1 else b.permute(first, second, lanes)
                self.passes.store_run(array, self.what.starts[p.row], p.col * 2 + half * width, value)

    def _run(self, p: Part, half: int) -> Value:
        """Half of the columns of a part's interleaved pairs."""
        what, passes = self.what, self.passes
        start = what.start if isinstance(what, Columns) else what.starts[p.row]
        b = passes.rows.b
        col = passes.existing_column(p) * 2 + half * passes.shape.width
        return b.cast(passes.load_run(what.array, start, col), passes.rows.work)

    def _lanes(self, p: Part, low: Derived, high: Derived, which: int) -> Value:
        """The first or the second columns of a part's interleaved pairs."""
        width = self.passes.shape.width
        if width == 1:
            return p[(low, high)[which]]
        assert element(p[low].type) == self.passes.rows.work
        return self.passes.rows.b.permute(p[low], p[high], tuple(range(which, 2 * width, 2)))
