"""The operands of a product while it is traced: matrices in memory, and their way in, where they are normalised."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Value, Var
from aule.ir.types import SCALARS, Scalar, Vector, f32, f64
from aule.ops.linear.config import FactorConfig, StoredConfig
from aule.ops.parameters import Access, Parameters
from aule.tile.matrix import divmod_const


class Stored:
    """A matrix in memory, of rows that are found by one or more axes, or a vector."""

    def __init__(self, p: Parameters, config: StoredConfig, access: Access = "read") -> None:
        self.b, self.p, self.config = p.b, p, config
        self.elem = SCALARS[config.dtype]
        self.buffer = p.buffer(config.name, self.elem, access)
        self.col_stride = None if config.unit else p.number(f"{config.name}_col_stride", p.index)

    def start(self, row: Value | None = None) -> Value:
        """Index of a row's first element."""
        if row is None:
            return self.p.strided(self.config.name)
        rest, found = row, []
        for axis in range(self.config.axes - 1, 0, -1):
            size = self.p.number(f"{self.config.name}_axis{axis}")
            found.append(rest % size)
            rest = rest // size
        return self.p.strided(self.config.name, rest, *reversed(found))

    def index(self, start: Value, col: Value) -> Value:
        """Index of a column of the row that begins at ``start``."""
        at = self.b.cast(col, self.p.index)
        return start + (at if self.col_stride is None else at * self.col_stride)

    def load(self, start: Value, col: Value, width: int, cols: Value | None) -> Value:
        """``width`` elements of a row of ``cols``, in the place of those behind its end some others of it; or of one in
        which they are sure to be, with None."""
        b, most = self.b, width if self.config.loose else 16 // self.elem.bytes if self.config.aligned else 1
        if most < width:
            pieces = [self.load(start, col + i, most, cols) for i in range(0, width, most)]
            return b.vector([x for piece in pieces for x in b.unpack(piece)])
        col = col if cols is None else b.min(col, cols - width)
        return b.load(self.buffer, self.index(start, col), width, align=1 if self.config.loose else width)


@dataclass(frozen=True, eq=False)
class RowAt:
    """A row of a factor: where it begins, and what normalises it: ``x`` becomes ``(x - mean) * scale + shift``, where
    no mean means that ``shift`` has it."""

    start: Value
    scale: Value | None = None
    shift: Value | None = None
    mean: Value | None = None


class Factor:
    """A factor of a product, as the elements of its stored rows.

    Parameters
    ----------
    outer, summed : Value
        How many rows or columns of the result it has, and the length of the summed dimension.
    whole : bool
        The summed dimension needs no bounds.
    """

    def __init__(
        self, p: Parameters, config: FactorConfig, outer: Value, summed: Value, work: Scalar, whole: bool
    ) -> None:
        self.b, self.p, self.work, self.across = p.b, p, work, config.across
        self.stored = Stored(p, config.stored)
        self.rows, self.cols = (summed, outer) if config.across else (outer, summed)
        self._may_miss = not (whole and config.across)
        self._bound = None if whole and not config.across else self.cols
        self.bounded, self.norm = not whole, config.norm
        told = () if config.norm is None else (config.norm.weight, config.norm.bias)
        self.vectors = [None if x is None else Stored(p, x) for x in told]

    @property
    def changes(self) -> bool:
        """Whether elements are not taken as they are."""
        return self.norm is not None or self.bounded

    @property
    def keeps_mean(self) -> bool:
        """Whether a row's mean is taken off by itself, so that a large one costs no digits."""
        return self.stored.elem in (f32, f64)

    def row(self, row: Value) -> RowAt:
        """A row, or the last one in the place of those behind it."""
        b, p = self.b, self.p
        row = self._existing(row)
        start = self.stored.start(row)
        if self.norm is None:
            return RowAt(start)
        statistics, at, count = p.buffer("statistics", self.work), b.cast(row, p.index), b.cast(self.rows, p.index)
        mean, scale, shift = (b.load(statistics, count * i + at) for i in range(3))
        if self.keeps_mean:
            return RowAt(start, scale, shift, mean)
        # Of 16-bit numbers a mean that is large against the deviation has left nothing that could be lost here.
        return RowAt(start, scale, b.fma(-mean, scale, shift))

    def place(self, row: Value) -> Value:
        """Where such a row begins."""
        return self.stored.start(self._existing(row))

    def _existing(self, row: Value) -> Value:
        return self.b.min(row, self.rows - 1) if self._may_miss else row

    def load(self, row: RowAt, col: Value, width: int) -> Value:
        """Elements of a row."""
        return self.stored.load(row.start, col, width, self._bound)

    def affine(self, col: Value, width: int) -> list[Value | None]:
        """Weight and bias of the normalisation at some columns."""
        return [None if x is None else x.load(x.start(), col, width, self._bound) for x in self.vectors]

    def value(self, raw: Value, row: RowAt, affine: list[Value | None]) -> Value:
        """Loaded elements as the numbers that are multiplied, in the type that is computed in."""
        b = self.b
        x = b.cast(raw, self.work)
        if row.scale is None or row.shift is None:
            return x
        lanes = x.type.lanes if isinstance(x.type, Vector) else 1
        if row.mean is not None:
            x = x - row.mean
        x = b.fma(x, b.splat(row.scale, lanes), b.splat(row.shift, lanes))
        weight, bias = (None if y is None else b.cast(y, self.work) for y in affine)
        if weight is not None:
            return x * weight if bias is None else b.fma(x, weight, bias)
        return x if bias is None else x + bias

    def kept(self, value: Value, row: Value, col: Value) -> Value:
        """Zeros behind the end of the summed dimension; ``row`` and ``col`` are the first element's."""
        b = self.b
        if not self.bounded:
            return value
        if not isinstance(value.type, Vector):
            inside = row < self.rows if self.across else col < self.cols
            return b.select(inside, value, b.const(0.0, self.work))
        lanes = value.type.lanes
        zero = b.splat(b.const(0.0, self.work), lanes)
        if self.across or self.stored.config.aligned:
            return b.select(row < self.rows if self.across else col < self.cols, value, zero)
        return b.vector([self.kept(x, row, col + i) for i, x in enumerate(b.unpack(value))])


class Panel:
    """The way of a factor's steps through the registers of a workgroup: each thread has some runs of ``width``
    elements of a step's ``rows`` × ``cols``, fetches them while something else is worked on, and later asks for their
    `value`.

    Parameters
    ----------
    first : Value
        The first row or column of the result that the step belongs to.
    """

    def __init__(
        self, factor: Factor, thread: Value, threads: int, rows: int, cols: int, width: int, first: Value
    ) -> None:
        b = self.b = factor.b
        self.factor, self.width, self.first = factor, width, first
        self.step, rest = divmod(threads * width, cols)
        self.count, left = divmod(rows * cols, threads * width)
        assert rest == 0 and left == 0, "a round of the workgroup is some whole rows"
        self.own_row, run = divmod_const(b, thread, cols // width)
        self.own_col = run * width
        zero = b.splat(b.const(0, factor.stored.elem), width)
        self.raw = [b.var(zero, "fetched") for _ in range(self.count)]
        # What belongs to rows or to columns is there once where those are the result's, and else comes with each step.
        self._rows: list[list[Var]] = []
        self._fixed: list[RowAt] = []
        self._affine: list[Value | Var | None] = []
        if not factor.across:
            self._fixed = [factor.row(first + self.place(i)[0]) for i in range(self.count)]
            self._affine = [None if x is None else b.var(b.splat(b.const(0, x.elem), width)) for x in factor.vectors]
        elif factor.norm is not None:
            self._affine = list(factor.affine(first + self.own_col, width))
            nothing = b.const(0.0, factor.work)
            numbers = 3 if factor.keeps_mean else 2
            self._rows = [[b.var(nothing) for _ in range(numbers)] for _ in range(self.count)]

    def place(self, i: int) -> tuple[Value, Value]:
        """Row and column in the step of this thread's ``i``-th run."""
        return self.own_row + i * self.step, self.own_col

    def index(self, i: int, start: Value) -> Value:
        """Where the ``i``-th run of the step that begins at ``start`` is in memory; for factors without norm."""
        row, col = self._at(i, start)
        at = self.factor.row(row) if self.factor.across else self._fixed[i]
        return self.factor.stored.index(at.start, col)

    def fetch(self, i: int, start: Value) -> None:
        """Start to load the ``i``-th run of the step that begins at ``start``. The last one brings what belongs to the
        columns, which all runs share."""
        factor = self.factor
        row, col = self._at(i, start)
        if factor.across:
            at = factor.row(row)
            if factor.norm is not None:
                for variable, x in zip(self._rows[i], (at.scale, at.shift, at.mean), strict=False):
                    variable.value = x
        else:
            at = self._fixed[i]
            if factor.norm is not None and i == self.count - 1:
                for held, x in zip(self._affine, factor.affine(col, self.width), strict=True):
                    if isinstance(held, Var):
                        held.value = x
        self.raw[i].value = factor.load(at, col, self.width)

    def value(self, i: int, start: Value) -> Value:
        """The numbers of the ``i``-th run, which was fetched for the step that begins at ``start``."""
        factor = self.factor
        row, col = self._at(i, start)
        if factor.across:
            at = RowAt(start, *(x.value for x in self._rows[i])) if self._rows else RowAt(start)
        else:
            at = self._fixed[i]
        affine = [x.value if isinstance(x, Var) else x for x in self._affine]
        return factor.kept(factor.value(self.raw[i].value, at, affine), row, col)

    def _at(self, i: int, start: Value) -> tuple[Value, Value]:
        row, col = self.place(i)
        return (start + row, self.first + col) if self.factor.across else (self.first + row, start + col)
