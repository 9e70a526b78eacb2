"""The fragment engine: products on matrix units, softmax in registers.

A subgroup works on ``rows`` rows of a block alone. Its tiles are fragments (`aule.ir`), whose components a lane may
read and write. The target's layouts say which elements those are, so that a few shuffles reduce rows, and P goes from
accumulators to the next product without passing through memory where the layouts allow it (`arrangement`).

K and V lie in shared memory row by row with 16 bytes of padding: eight rows then start in eight different groups of
banks, and loading a fragment has no conflicts. They are prefetched a tile ahead, either by asynchronous copies or
through registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import Literal

from aule.ir import Builder, Value, Var
from aule.ir.types import SCALARS, Fragment, Scalar, Vector, bf16, f32, u16, u32
from aule.target import FragmentLayout, Target
from aule.tile.common.math import is_finite
from aule.tile.common.matrix import Matrix, padded
from aule.tile.common.variables import assign_vars, read_vars
from aule.tile.fragment.arrangement import SIZE, arrange, weigh_bits
from aule.tile.fragment.shape import FragmentShape, row_stride
from aule.tile.fragment.transfer import Transfer

Place = tuple[int, int]
"""Row and column in a block, relative to the lane's first."""

Rounding = Literal["nearest", "weights", "enlarged"]
"""How results become factors: rounded to nearest; as weights, where NaN may be lost because their sum has it, too; or
"enlarged", cut off from numbers that are larger by `Components.excess`."""

EXCESS = 1.0 + 2.0**-8 * 0.5 / log(2.0)
"""Factor that makes cutting off a number's last 16 bits as good as rounding.

With m the significand, in [1, 2), and a cut-off part uniform in [0, 2^-7), cutting m (1 + c) errs by c - 2^-8 / m on
average, relative to m. Significands are distributed as 1 / m, so that 1 / m is 0.5 / log(2) on average; hence c. The
rms error is 0.00175 where rounding has 0.00166, the largest 0.0050 instead of 0.0039. A number that is a bf16 keeps its
value, as m c < 2^-7.
"""


def factor_elem(dtype: str) -> Scalar:
    """The element type of factors in shared memory: tf32 is f32 with the last bits zero."""
    return f32 if dtype == "tf32" else SCALARS[dtype]


def has_units(target: Target, dtype: str) -> bool:
    """Whether a device multiplies fragments of an element type in a shape that the engine supports."""
    shapes = ("m{}n{}k{}".format(*target.matrix_shape), *target.composed_units)
    return dtype in ("f16", "bf16", "tf32") and any(f"{shape}:{dtype}:f32" in target.matrix_units for shape in shapes)


def multiplies(target: Target, dtype: str) -> bool:
    """Whether a device multiplies fragments of an element type and their layout is known."""
    return target.matrix_layout is not None and has_units(target, dtype)


def fitted(shape: FragmentShape, target: Target) -> FragmentShape:
    """A shape with the lanes and the staging that a target's fragments need."""
    arrangement = arrange(target)
    return replace(shape, lanes=arrangement.lanes, staged=arrangement.factors is None)


class FragmentTile:
    """A tile of accumulators. A lane sees its elements as rows and columns; ``row(r)`` and ``col(c)`` are their numbers
    in the subgroup's tile."""

    def __init__(self, engine: Fragments, rows: int, cols: int) -> None:
        self.engine = engine
        zero = engine.b.fragment_fill(engine.accumulator, 0.0)
        arrangement = engine.arrangement
        self.vars: list[list[Var]] = [
            [engine.b.var(zero) for _ in range(cols // arrangement.width)] for _ in range(rows // arrangement.height)
        ]

    def row(self, r: int) -> Value:
        return self.engine.row(r)

    def col(self, c: int) -> Value:
        return self.engine.col(c)

    def values(self) -> list[list[Value]]:
        """This lane's elements, by row and column."""
        b, engine = self.engine.b, self.engine
        result = []
        for block in self.vars:
            fragments = [variable.value for variable in block]
            for row in engine.part_rows:
                columns = [engine.component(row, col) for col in engine.part_cols]
                result.append([b.fragment_get(fragment, c) for fragment in fragments for c in columns])
        return result

    def assign(self, values: Sequence[Sequence[Value]]) -> None:
        assign_vars(self.vars, self.engine.pack(values, self.engine.accumulator))

    def map(self, f: Callable[[Value, int, int], Value]) -> None:
        """Replace each element by ``f(value, r, c)``; ``r`` and ``c`` count this lane's rows and columns."""
        self.assign([[f(x, r, c) for c, x in enumerate(row)] for r, row in enumerate(self.values())])


class Components:
    """A lane's view of fragments: which elements its components are, and how elements become factors."""

    def __init__(self, b: Builder, target: Target, elem: Scalar) -> None:
        arrangement = self.arrangement = arrange(target)
        self.b, self.elem = b, elem
        self.layout: FragmentLayout = arrangement.results
        self.right_layout = target.matrix_right
        self.converts, self.e4m3 = target.converts_factors, target.e4m3
        rows, cols, _ = target.matrix_shape
        self.accumulator = Fragment(f32, rows, cols, "accumulator")
        self.left, self.right = Fragment(elem, rows, SIZE, "a"), Fragment(elem, SIZE, cols, "b")
        if arrangement.transposed:
            self.left, self.right = self.right, self.left
        self.thread, self.subgroup, self.lane = b.thread_id(), b.subgroup_id(), b.lane_id()
        self.lane_row = weigh_bits(b, self.lane, arrangement.results.lane_rows)
        self.lane_col = weigh_bits(b, self.lane, arrangement.results.lane_cols)
        self.places = [arrangement.results.place(0, part) for part in range(arrangement.results.parts)]
        """Row and column of each component of a result, from those of the lane."""
        self.part_rows = sorted({row for row, _ in self.places})
        self.part_cols = sorted({col for _, col in self.places})
        self.run = 2 if self.part_cols[1:2] == [1] else 1
        """Neighbouring columns that a lane holds."""

    def component(self, row: int, col: int) -> int:
        """The component that holds a lane's element of a part's row and column."""
        return self.places.index((row, col))

    @property
    def excess(self) -> float:
        """The factor by which "enlarged" results must be too large (see `Rounding`)."""
        return EXCESS if self.elem == bf16 and not self.converts else 1.0

    def rounded(self, parts: list[Value], rounding: Rounding) -> list[Value]:
        if self.elem == f32:
            return [self._to_tf32(x) for x in parts]
        return [half for pair in self.pairs(parts, rounding) for half in self.b.unpack(pair)]

    def pairs(self, parts: list[Value], rounding: Rounding) -> list[Value]:
        """Results rounded to the factors' type in pairs, which some devices convert in one instruction."""
        b, elem = self.b, self.elem
        if elem != bf16 or self.converts:
            return [b.cast(b.vector([x, y]), elem) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        halves = [b.bitcast(self._upper_half(x, rounding), bf16) for x in parts]
        return [b.vector([x, y]) for x, y in zip(halves[::2], halves[1::2], strict=True)]

    def _upper_half(self, x: Value, rounding: Rounding) -> Value:
        """bf16 by integer arithmetic: half a unit is added, right but for ties. A NaN of all ones would overflow to -0
        and is kept."""
        b = self.b
        bits = b.bitcast(x, u32)
        raised = bits if rounding == "enlarged" else bits + 0x8000
        if rounding == "nearest":
            raised = b.select(b.ne(x, x), bits, raised)
        return b.unpack(b.bitcast(raised, Vector(u16, 2)))[1]

    def _to_tf32(self, x: Value) -> Value:
        """Round to nearest, ties away from zero, dropping thirteen bits."""
        return self.b.bitcast((self.b.bitcast(x, u32) + 0x1000) & 0xFFFFE000, f32)

    def load_right(
        self, memory: Value, start: Value, stride: int, row: int, col: int, transposed: bool = False
    ) -> Value:
        """A block of a matrix in shared memory as a right factor; ``transposed``, of its transpose, whose element (i,
        j) lies in row ``col + j``, column ``row + i``."""
        return self._load(self.right, memory, start, stride, row, col, transposed)

    def _load(
        self, type_: Fragment, memory: Value, start: Value, stride: int, row: int, col: int, transposed: bool
    ) -> Value:
        at = start + (col * stride + row if transposed else row * stride + col)
        order: Literal["column", "row"] = "column" if transposed != self.arrangement.transposed else "row"
        return self.b.fragment_load(type_, memory, at, stride, order)


class Fragments(Components):
    """The engine: lane coordinates, row reductions, memory and the two products."""

    def __init__(self, b: Builder, target: Target, shape: FragmentShape, dtype: str) -> None:
        """``dtype`` is the type of the factors: f16, bf16 or tf32."""
        super().__init__(b, target, factor_elem(dtype))
        assert shape == fitted(shape, target), f"{shape} is not for {target.name}"
        self.shape = shape
        self.copies = target.async_copies
        self.factor_cols = len(self.part_cols) * SIZE // self.arrangement.width
        """Columns that a lane holds of the 16 of a left factor."""
        self._stage = b.shared("results", self.elem, shape.staged_elements) if shape.staged_elements else None
        self._upper = [b.ne(self.lane & exchange.mask, 0) for exchange in self.arrangement.exchanges]

    @property
    def rows_held(self) -> int:
        """Rows of a tile that this lane works on."""
        return self.shape.rows // self.arrangement.height * len(self.part_rows)

    def row(self, r: int) -> Value:
        """This lane's ``r``-th row of a tile."""
        return self.lane_row + self.below(r)

    def below(self, r: int) -> int:
        """How far this lane's ``r``-th row is below its first."""
        block, part = divmod(r, len(self.part_rows))
        return block * self.arrangement.height + self.part_rows[part]

    def col(self, c: int) -> Value:
        """This lane's ``c``-th column of a tile."""
        return self.lane_col + self.behind(c)

    def behind(self, c: int) -> int:
        """How far this lane's ``c``-th column is behind its first."""
        block, part = divmod(c, len(self.part_cols))
        return block * self.arrangement.width + self.part_cols[part]

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def tile(self, rows: int, cols: int) -> FragmentTile:
        return FragmentTile(self, rows, padded(cols, SIZE))

    def row_vars(self, init: Value) -> list[Var]:
        """A variable for each row this lane works on."""
        return [self.b.var(init) for _ in range(self.rows_held)]

    def any_of_rows(self, condition: Value) -> Value:
        """Whether a condition holds in any lane of the subgroup, which works on the same rows."""
        return self.b.subgroup_any(condition)

    def reduce_rows(self, kind: str, partial: list[Value]) -> list[Value]:
        """Combine a value for each row over the lanes of the row; each of them gets the result."""
        for mask in self.arrangement.across:
            partial = [self.b.binary(kind, x, self.b.shuffle_xor(x, mask)) for x in partial]
        return partial

    def pack(
        self, values: Sequence[Sequence[Value]], type_: Fragment, rounding: Rounding = "nearest"
    ) -> list[list[Value]]:
        """Fragments out of this lane's elements by row and column, rounded to the fragments' type."""
        if type_ == self.accumulator:
            order = self.places
            return [[self.b.fragment_pack(type_, [x[at] for at in order]) for x in row] for row in self._blocks(values)]
        if self._stage is not None:
            return self._pack_staged(self._stage, values, rounding)
        return [[self._factor(x, rounding) for x in row] for row in self._blocks(values, SIZE)]

    def _blocks(self, values: Sequence[Sequence[Value]], width: int = 0) -> list[list[dict[Place, Value]]]:
        """This lane's elements of each block of ``width`` columns (by default an accumulator's), by their places."""
        step = self.arrangement.width
        cols = [c + at for c in range(0, width or step, step) for at in self.part_cols]
        blocks = []
        for r in range(0, len(values), len(self.part_rows)):
            rows = list(zip(self.part_rows, values[r:], strict=False))
            starts = range(0, len(values[0]), len(cols))
            blocks.append([{(y, x): row[c + i] for y, row in rows for i, x in enumerate(cols)} for c in starts])
        return blocks

    def _factor(self, elements: dict[Place, Value], rounding: Rounding) -> Value:
        """A left factor of this lane's elements and of those that it exchanges with lanes that hold copies."""
        b, arrangement = self.b, self.arrangement
        assert arrangement.factors is not None
        order = [arrangement.factors.place(0, part) for part in range(arrangement.factors.parts)]
        if not arrangement.exchanges:
            return b.fragment_pack(self.left, self.rounded([elements[at] for at in order], rounding))
        assert self.elem.bits == 16, "tf32 is for devices whose results are factors"
        places = zip(*[iter(elements)] * 2, strict=True)  # two elements to a word
        pairs = self.pairs(list(elements.values()), rounding)
        words = {at: b.bitcast(pair, u32) for at, pair in zip(places, pairs, strict=True)}
        for exchange, upper in zip(arrangement.exchanges, self._upper, strict=True):
            more = {}
            for at, word in words.items():
                other = b.shuffle_xor(word, exchange.mask)
                words[at] = b.select(upper, other, word)
                (y, x), (v, u) = at
                row, col = exchange.row, exchange.col
                more[(y + row, x + col), (v + row, u + col)] = b.select(upper, word, other)
            words |= more
        halves: dict[Place, Value] = {}
        for at, word in words.items():
            halves |= dict(zip(at, b.unpack(b.bitcast(word, Vector(self.elem, 2))), strict=True))
        return b.fragment_pack(self.left, [halves[at] for at in order])

    def _pack_staged(self, stage: Value, values: Sequence[Sequence[Value]], rounding: Rounding) -> list[list[Value]]:
        """Left factors of this lane's elements, through the subgroup's part of shared memory."""
        b, stride = self.b, row_stride(self.shape.block_kv)
        own = self.subgroup * (self.shape.rows * stride)
        b.subgroup_barrier()  # everyone has read what was there before
        self.put(stage, own, stride, values, rounding)
        b.subgroup_barrier()
        cols = len(values[0]) // self.factor_cols * SIZE
        return [
            [self.load_left(stage, own, stride, row, col) for col in range(0, cols, SIZE)]
            for row in range(0, self.shape.rows, self.arrangement.height)
        ]

    def put(
        self,
        memory: Value,
        start: Value,
        stride: int,
        values: Sequence[Sequence[Value]],
        rounding: Rounding = "nearest",
        exist: Sequence[Value] | None = None,
    ) -> None:
        """Store this lane's elements of a tile, rounded, in shared memory from ``start`` on. Rows that do not ``exist``
        become zeros."""
        b = self.b
        zero, one = b.const(0, u32), b.const(0xFFFFFFFF, u32)
        masks = [] if exist is None else [b.select(x, one, zero) for x in exist]
        for r, row in enumerate(values):
            line = start + self.row(r) * stride
            for c in range(0, len(row), self.run):
                strip = self._strip(list(row[c : c + self.run]), rounding)
                if masks:
                    strip = self._masked(strip, masks[r])
                b.store(memory, line + self.col(c), strip)

    def _masked(self, strip: Value, mask: Value) -> Value:
        """A strip of `put` under a mask of 32 bits, two elements wide."""
        b = self.b
        if isinstance(strip.type, Vector):
            return b.bitcast(b.bitcast(strip, u32) & mask, strip.type)
        return b.select(b.ne(mask, 0), strip, b.const(0, self.elem))

    def _strip(self, parts: list[Value], rounding: Rounding) -> Value:
        """Neighbours of a row, rounded to the factors' type."""
        if self.elem != f32 and len(parts) == 2:
            return self.pairs(parts, rounding)[0]
        if rounding == "enlarged" and self.excess > 1.0:
            return self.b.bitcast(self._upper_half(parts[0], rounding), self.elem)
        return self.incoming(self.b.vector(parts))

    def incoming(self, values: Value) -> Value:
        """Elements of a matrix, rounded to the factors' type. NaN and Inf stay."""
        b = self.b
        if self.elem != f32:
            return b.cast(values, self.elem)
        return b.vector([b.select(is_finite(b, x), self._to_tf32(x), x) for x in b.unpack(values)])

    # -- products ------------------------------------------------------------------------------------------------------

    def load_left(
        self, memory: Value, start: Value, stride: int, row: int, col: int, transposed: bool = False
    ) -> Value:
        """A block of a matrix in shared memory as a left factor; otherwise as `load_right`."""
        return self._load(self.left, memory, start, stride, row, col, transposed)

    def multiply(
        self,
        tile: FragmentTile,
        left: Callable[[int], list[Value]],
        right: Callable[[int, int], Value],
        depth: int,
        sync_every: int = 0,
    ) -> None:
        """``tile += left @ right``; ``left`` gives a column of fragments, ``right`` the fragment at a row and a column.
        With ``sync_every``, a subgroup barrier after so many columns limits the fragments a compiler loads ahead."""
        acc = read_vars(tile.vars)
        for k in range(depth):
            if sync_every and k and k % sync_every == 0:
                self.b.subgroup_barrier()
            a = left(k)
            for j in range(len(acc[0])):
                factor = right(k, j)
                for i, row in enumerate(acc):
                    row[j] = self.multiply_add(a[i], factor, row[j])
        assign_vars(tile.vars, acc)

    def multiply_add(self, left: Value, right: Value, total: Value) -> Value:
        """``left @ right + total`` of one block."""
        return self.b.fragment_mma(*((right, left) if self.arrangement.transposed else (left, right)), total)

    # -- memory --------------------------------------------------------------------------------------------------------

    def transfer(self, source: Matrix, rows: int, memory: Value, copies: bool = True, width: int = 0) -> Transfer:
        """A transfer of ``rows`` rows of a matrix at a time into shared memory, by asynchronous copies if allowed and
        supported. Rows have ``width`` columns there, or as many as fragments need."""
        return Transfer(self, source, rows, memory, copies and self.copies, width)
