"""Operands of a product while it is traced: matrices in memory, and factors that may be normalised when loaded."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Value, Var
from aule.ir.types import SCALARS, Scalar, Vector, f32, f64
from aule.ops.linear.config import FactorConfig, StoredConfig
from aule.ops.shared.parameters import Access, Parameters
from aule.tile.common.matrix import divmod_const


class Stored:
    """A matrix in memory, whose rows are found by one or more axes, or a vector."""

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
        """``width`` elements of a row of ``cols``; past its end others of the row. With None all are sure to exist."""
        b, config = self.b, self.config
        most = width if config.unaligned_loads else 16 // self.elem.bytes if config.aligned else 1
        if most < width:
            pieces = [self.load(start, col + i, most, cols) for i in range(0, width, most)]
            return b.vector([x for piece in pieces for x in b.unpack(piece)])
        col = col if cols is None else b.min(col, cols - width)
        return b.load(self.buffer, self.index(start, col), width, align=1 if config.unaligned_loads else width)


@dataclass(frozen=True, eq=False)
class FactorRow:
    """A stored row of a factor: its start, and its normalisation to ``(x - mean) * scale + shift``, in which ``shift``
    includes the mean if that is None."""

    start: Value
    scale: Value | None = None
    shift: Value | None = None
    mean: Value | None = None


class Factor:
    """A factor of a product, as the elements of its stored rows.

    It has ``outer`` rows or columns of the result, and ``summed`` elements along the summed dimension, which needs no
    bounds with ``full_steps``.
    """

    def __init__(
        self, p: Parameters, config: FactorConfig, outer: Value, summed: Value, work: Scalar, full_steps: bool
    ) -> None:
        self.b, self.p, self.work, self.depth_major = p.b, p, work, config.depth_major
        self.stored = Stored(p, config.stored)
        self.rows, self.cols = (summed, outer) if config.depth_major else (outer, summed)
        self._rows_bounded = not (full_steps and config.depth_major)
        self._bound = None if full_steps and not config.depth_major else self.cols
        self.bounded, self.norm = not full_steps, config.norm
        vectors = () if config.norm is None else (config.norm.weight, config.norm.bias)
        self.vectors = [None if x is None else Stored(p, x) for x in vectors]

    @property
    def plain(self) -> bool:
        """Whether elements are multiplied as they are stored."""
        return self.norm is None and not self.bounded

    @property
    def subtracts_mean(self) -> bool:
        """Whether a row's mean is subtracted by itself, so that a large one costs no digits."""
        return self.stored.elem in (f32, f64)

    def row(self, row: Value) -> FactorRow:
        """A row, or the last one for rows past it."""
        b, p = self.b, self.p
        row = self._existing(row)
        start = self.stored.start(row)
        if self.norm is None:
            return FactorRow(start)
        statistics, at, count = p.buffer("statistics", self.work), b.cast(row, p.index), b.cast(self.rows, p.index)
        mean, scale, shift = (b.load(statistics, count * i + at) for i in range(3))
        if self.subtracts_mean:
            return FactorRow(start, scale, shift, mean)
        # If the mean of 16-bit numbers is large against their deviation, their own rounding has lost the same digits.
        return FactorRow(start, scale, b.fma(-mean, scale, shift))

    def row_start(self, row: Value) -> Value:
        return self.stored.start(self._existing(row))

    def _existing(self, row: Value) -> Value:
        return self.b.min(row, self.rows - 1) if self._rows_bounded else row

    def load(self, row: FactorRow, col: Value, width: int) -> Value:
        return self.stored.load(row.start, col, width, self._bound)

    def affine(self, col: Value, width: int) -> list[Value | None]:
        """Weight and bias of the normalisation at some columns."""
        return [None if x is None else x.load(x.start(), col, width, self._bound) for x in self.vectors]

    def value(self, raw: Value, row: FactorRow, affine: list[Value | None]) -> Value:
        """Loaded elements, normalised if need be, in the type computed in."""
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

    def masked(self, value: Value, row: Value, col: Value) -> Value:
        """The value, zero past the end of the summed dimension; ``row`` and ``col`` are the first element's."""
        b = self.b
        if not self.bounded:
            return value
        if not isinstance(value.type, Vector):
            inside = row < self.rows if self.depth_major else col < self.cols
            return b.select(inside, value, b.const(0.0, self.work))
        lanes = value.type.lanes
        zero = b.splat(b.const(0.0, self.work), lanes)
        if self.depth_major or self.stored.config.aligned:
            return b.select(row < self.rows if self.depth_major else col < self.cols, value, zero)
        return b.vector([self.masked(x, row, col + i) for i, x in enumerate(b.unpack(value))])


class RegisterPanel:
    """A factor's steps in the registers of a workgroup: each thread loads some runs of ``width`` elements of a step's
    ``rows`` × ``cols``, and later asks for their `value`. The steps are for rows or columns of the result from
    ``first`` on."""

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
        # Statistics of rows, weight and bias are loaded once if they belong to the result's side, else with each step.
        self._row_vars: list[list[Var]] = []
        self._rows: list[FactorRow] = []
        self._affine: list[Value | Var | None] = []
        if not factor.depth_major:
            self._rows = [factor.row(first + self.place(i)[0]) for i in range(self.count)]
            self._affine = [None if x is None else b.var(b.splat(b.const(0, x.elem), width)) for x in factor.vectors]
        elif factor.norm is not None:
            self._affine = list(factor.affine(first + self.own_col, width))
            nothing = b.const(0.0, factor.work)
            numbers = 3 if factor.subtracts_mean else 2
            self._row_vars = [[b.var(nothing) for _ in range(numbers)] for _ in range(self.count)]

    def place(self, i: int) -> tuple[Value, Value]:
        """Row and column in the step of this thread's ``i``-th run."""
        return self.own_row + i * self.step, self.own_col

    def index(self, i: int, start: Value) -> Value:
        """Index in memory of the ``i``-th run of the step that begins at ``start``; for factors without norm."""
        row, col = self._at(i, start)
        at = self.factor.row(row) if self.factor.depth_major else self._rows[i]
        return self.factor.stored.index(at.start, col)

    def fetch(self, i: int, start: Value) -> None:
        """Start to load the ``i``-th run of the step that begins at ``start``. The last run also loads weight and bias,
        which all runs share."""
        factor = self.factor
        row, col = self._at(i, start)
        if factor.depth_major:
            at = factor.row(row)
            if factor.norm is not None:
                for variable, x in zip(self._row_vars[i], (at.scale, at.shift, at.mean), strict=False):
                    variable.value = x
        else:
            at = self._rows[i]
            if factor.norm is not None and i == self.count - 1:
                for vector, x in zip(self._affine, factor.affine(col, self.width), strict=True):
                    if isinstance(vector, Var):
                        vector.value = x
        self.raw[i].value = factor.load(at, col, self.width)

    def fetch_all(self, start: Value) -> None:
        for i in range(self.count):
            self.fetch(i, start)

    def value(self, i: int, start: Value) -> Value:
        """The numbers of the ``i``-th run, fetched for the step that begins at ``start``."""
        factor = self.factor
        row, col = self._at(i, start)
        if factor.depth_major:
            at = FactorRow(start, *(x.value for x in self._row_vars[i])) if self._row_vars else FactorRow(start)
        else:
            at = self._rows[i]
        affine = [x.value if isinstance(x, Var) else x for x in self._affine]
        return factor.masked(factor.value(self.raw[i].value, at, affine), row, col)

    def factor_value(self, i: int, start: Value) -> Value:
        """The numbers of the ``i``-th run in the factor's own type: as loaded, if nothing changes them."""
        if self.factor.plain:
            return self.raw[i].value
        return self.b.cast(self.value(i, start), self.factor.stored.elem)

    def _at(self, i: int, start: Value) -> tuple[Value, Value]:
        row, col = self.place(i)
        return (start + row, self.first + col) if self.factor.depth_major else (self.first + row, start + col)
