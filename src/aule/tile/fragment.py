"""The fragment engine: products on matrix units, softmax in registers.

A subgroup works on ``rows`` rows of a block alone. Its tiles are fragments (`aule.ir`), whose components a lane may
read and write: the target's layouts say which elements those are, so that rows are reduced by a few shuffles, and P
goes from accumulators to the next product without passing through memory where they allow it (`arrangement`). The same
code serves mma.sync in PTX, cooperative matrices in SPIR-V and simdgroup matrices in MSL.

K and V lie in shared memory row by row, 16 bytes apart beyond their columns: eight rows then start in eight different
groups of banks, and a load of a fragment has no conflicts. They are brought in a tile ahead, either by asynchronous
copies or through registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import Literal

from aule.ir import Builder, Value, Var
from aule.ir.types import SCALARS, Fragment, Scalar, Vector, bf16, f32, u16, u32
from aule.target import FragmentLayout, Target
from aule.tile.arrangement import SIZE, arrange, weigh_bits
from aule.tile.fragment_shape import FragmentShape, row_stride
from aule.tile.math import is_finite
from aule.tile.matrix import Matrix, padded
from aule.tile.stages import copies_past_registers
from aule.tile.transfer import Transfer

Place = tuple[int, int]
"""Row and column in a block, of a lane whose own are the first."""

Rounding = Literal["nearest", "weights", "enlarged"]
"""How results become factors: to nearest; so, but NaN may be lost, because the sum of such weights has it, too; or they
are larger than they should be by `Components.excess`, and whatever follows knows."""

EXCESS = 1.0 + 2.0**-8 * 0.5 / log(2.0)
"""What makes cutting off a number's last 16 bits as good as rounding them away.

With m the significand, in [1, 2), and what is cut off uniform in [0, 2^-7), cutting m (1 + c) errs by c - 2^-8 / m on
average, relative to m. Significands are distributed as 1 / m, so that 1 / m is 0.5 / log(2) on average; hence c. What
is left is an rms error of 0.00175 where rounding has 0.00166, and one of at most 0.0050 instead of 0.0039. A number
that bf16 has stays what it is, as when it is rounded, since m c < 2^-7.
"""


def factor_elem(dtype: str) -> Scalar:
    """The element type of factors in shared memory: tf32 is f32 with the last bits zero."""
    return f32 if dtype == "tf32" else SCALARS[dtype]


_COMPOSED = {"cuda": ("m16n8k16", "m16n8k8"), "metal": ("m8n8k8",)}
"""What PTX and MSL put fragments of 16 x 16 together from."""


def has_units(target: Target, dtype: str) -> bool:
    """Whether a device multiplies fragments of a type that the engine has."""
    shapes = ("m{}n{}k{}".format(*target.matrix_shape), *_COMPOSED.get(target.backend, ()))
    return dtype in ("f16", "bf16", "tf32") and any(f"{shape}:{dtype}:f32" in target.matrix_units for shape in shapes)


def multiplies(target: Target, dtype: str) -> bool:
    """Whether a device multiplies fragments of a type, and how they lie is known."""
    return target.matrix_layout is not None and has_units(target, dtype)


def fitted(shape: FragmentShape, target: Target) -> FragmentShape:
    """A shape with the lanes and the memory that a target's fragments want."""
    way = arrange(target)
    return replace(shape, lanes=way.lanes, staged=way.factors is None)


class FragmentTile:
    """A tile of accumulators. Like `aule.tile.simt.RegisterTile`, a lane sees its elements as rows and
    columns: ``row(r)`` and ``col(c)`` say which ones of the subgroup's tile they are."""

    def __init__(self, engine: Fragments, rows: int, cols: int) -> None:
        self.engine = engine
        zero = engine.b.fragment_fill(engine.accumulator, 0.0)
        way = engine.way
        self.vars: list[list[Var]] = [
            [engine.b.var(zero) for _ in range(cols // way.width)] for _ in range(rows // way.height)
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
        for block, fragments in zip(self.vars, self.engine.pack(values, self.engine.accumulator), strict=True):
            for variable, fragment in zip(block, fragments, strict=True):
                variable.value = fragment

    def map(self, f: Callable[[Value, int, int], Value]) -> None:
        """Replace each element by ``f(value, r, c)``; ``r`` and ``c`` count this lane's rows and columns."""
        self.assign([[f(x, r, c) for c, x in enumerate(row)] for r, row in enumerate(self.values())])


class Components:
    """Fragments as a lane sees them: which elements its components are, and factors out of such elements."""

    def __init__(self, b: Builder, target: Target, elem: Scalar) -> None:
        way = self.way = arrange(target)
        self.b, self.elem = b, elem
        self.layout: FragmentLayout = way.results
        self.right_layout = target.matrix_right
        self.converts, self.e4m3 = target.backend == "cuda", target.e4m3
        rows, cols, _ = target.matrix_shape
        self.accumulator = Fragment(f32, rows, cols, "accumulator")
        self.left, self.right = Fragment(elem, rows, SIZE, "a"), Fragment(elem, SIZE, cols, "b")
        if way.transposed:
            self.left, self.right = self.right, self.left
        self.thread, self.subgroup, self.lane = b.thread_id(), b.subgroup_id(), b.lane_id()
        self.lane_row = weigh_bits(b, self.lane, way.results.lane_rows)
        self.lane_col = weigh_bits(b, self.lane, way.results.lane_cols)
        self.places = [way.results.place(0, part) for part in range(way.results.parts)]
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
        """What results are to be too large by that are "enlarged" when they become factors."""
        return EXCESS if self.elem == bf16 and not self.converts else 1.0

    def rounded(self, parts: list[Value], rounding: Rounding) -> list[Value]:
        """Results as they are multiplied."""
        if self.elem == f32:
            return [self._to_tf32(x) for x in parts]
        return [half for pair in self.pairs(parts, rounding) for half in self.b.unpack(pair)]

    def pairs(self, parts: list[Value], rounding: Rounding) -> list[Value]:
        """The same two at a time, which some devices convert in one instruction."""
        b, elem = self.b, self.elem
        if elem != bf16 or self.converts:
            return [b.cast(b.vector([x, y]), elem) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        halves = [b.bitcast(self._upper_half(x, rounding), bf16) for x in parts]
        return [b.vector([x, y]) for x, y in zip(halves[::2], halves[1::2], strict=True)]

    def _upper_half(self, x: Value, rounding: Rounding) -> Value:
        """bf16 by integers: half a unit upwards, right but for ties. It would carry NVIDIA's NaN, all ones, to -0."""
        b = self.b
        bits = b.bitcast(x, u32)
        raised = bits if rounding == "enlarged" else bits + 0x8000
        if rounding == "nearest":
            raised = b.select(b.ne(x, x), bits, raised)
        return b.unpack(b.bitcast(raised, Vector(u16, 2)))[1]

    def _to_tf32(self, x: Value) -> Value:
        """To nearest, ties away from zero: thirteen bits go."""
        return self.b.bitcast((self.b.bitcast(x, u32) + 0x1000) & 0xFFFFE000, f32)

    def load_right(
        self, memory: Value, start: Value, stride: int, row: int, col: int, transposed: bool = False
    ) -> Value:
        """A block of a matrix in shared memory, as a right factor; or of its transpose, whose element (i, j) lies in
        row ``col + j``, column ``row + i``."""
        return self._load(self.right, memory, start, stride, row, col, transposed)

    def _load(
        self, type_: Fragment, memory: Value, start: Value, stride: int, row: int, col: int, transposed: bool
    ) -> Value:
        at = start + (col * stride + row if transposed else row * stride + col)
        return self.b.fragment_load(type_, memory, at, stride, "column" if transposed != self.way.transposed else "row")


class Fragments(Components):
    """The engine: lane coordinates, row reductions, memory and the two products."""

    def __init__(self, b: Builder, target: Target, shape: FragmentShape, dtype: str) -> None:
        """``dtype`` is what is multiplied: f16, bf16 or tf32."""
        super().__init__(b, target, factor_elem(dtype))
        assert shape == fitted(shape, target), f"{shape} is not for {target.name}"
        self.shape = shape
        self.copies = copies_past_registers(target)
        self.factor_cols = len(self.part_cols) * SIZE // self.way.width
        """Columns of a tile that a lane holds of the 16 of a left factor."""
        self._stage = b.shared("results", self.elem, shape.staged_elements) if shape.staged_elements else None
        self._upper = [b.ne(self.lane & exchange.mask, 0) for exchange in self.way.exchanges]

    @property
    def rows_held(self) -> int:
        """Rows of a tile that this lane works on."""
        return self.shape.rows // self.way.height * len(self.part_rows)

    def row(self, r: int) -> Value:
        """The row of a tile that is this lane's ``r``-th."""
        return self.lane_row + self.below(r)

    def below(self, r: int) -> int:
        """How far that is below the lane's first row."""
        block, part = divmod(r, len(self.part_rows))
        return block * self.way.height + self.part_rows[part]

    def col(self, c: int) -> Value:
        """The column of a tile that is this lane's ``c``-th."""
        return self.lane_col + self.behind(c)

    def behind(self, c: int) -> int:
        """How far that is behind the lane's first column."""
        block, part = divmod(c, len(self.part_cols))
        return block * self.way.width + self.part_cols[part]

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def tile(self, rows: int, cols: int) -> FragmentTile:
        """A tile of zeros."""
        return FragmentTile(self, rows, padded(cols, SIZE))

    def row_vars(self, init: Value) -> list[Var]:
        """A variable for each row this lane works on."""
        return [self.b.var(init) for _ in range(self.rows_held)]

    def reduce_rows(self, kind: str, partial: list[Value]) -> list[Value]:
        """Combine the lanes of each row; every one of them gets the result."""
        for mask in self.way.across:
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
        """This lane's elements of each block of so many columns (by default an accumulator's), by their places."""
        cols = [c + at for c in range(0, width or self.way.width, self.way.width) for at in self.part_cols]
        blocks = []
        for r in range(0, len(values), len(self.part_rows)):
            rows = list(zip(self.part_rows, values[r:], strict=False))
            starts = range(0, len(values[0]), len(cols))
            blocks.append([{(y, x): row[c + i] for y, row in rows for i, x in enumerate(cols)} for c in starts])
        return blocks

    def _factor(self, elements: dict[Place, Value], rounding: Rounding) -> Value:
        """A left factor out of this lane's elements of it and, where the others of its copies have the rest, theirs."""
        b, way = self.b, self.way
        assert way.factors is not None
        order = [way.factors.place(0, part) for part in range(way.factors.parts)]
        if not way.exchanges:
            return b.fragment_pack(self.left, self.rounded([elements[at] for at in order], rounding))
        assert self.elem.bits == 16, "tf32 is for devices whose results are factors"
        places = zip(*[iter(elements)] * 2, strict=True)  # two of them in a word
        pairs = self.pairs(list(elements.values()), rounding)
        words = {at: b.bitcast(pair, u32) for at, pair in zip(places, pairs, strict=True)}
        for exchange, upper in zip(way.exchanges, self._upper, strict=True):
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
        """The same by way of the subgroup's part of shared memory."""
        b, stride = self.b, row_stride(self.shape.block_kv)
        own = self.subgroup * (self.shape.rows * stride)
        b.subgroup_barrier()  # everyone has read what was there before
        self.put(stage, own, stride, values, rounding)
        b.subgroup_barrier()
        cols = len(values[0]) // self.factor_cols * SIZE
        return [
            [self.load_left(stage, own, stride, row, col) for col in range(0, cols, SIZE)]
            for row in range(0, self.shape.rows, self.way.height)
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
        """Store this lane's elements of a tile, rounded, in shared memory; ``start`` is where the tile begins. Rows
        that do not ``exist`` are zeros."""
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
        """A strip of `put` under a mask of 32 bits, which are two elements."""
        b = self.b
        if isinstance(strip.type, Vector):
            return b.bitcast(b.bitcast(strip, u32) & mask, strip.type)
        return b.select(b.ne(mask, 0), strip, b.const(0, self.elem))

    def _strip(self, parts: list[Value], rounding: Rounding) -> Value:
        """Neighbours of a row as they are multiplied."""
        if self.elem != f32 and len(parts) == 2:
            return self.pairs(parts, rounding)[0]
        if rounding == "enlarged" and self.excess > 1.0:
            return self.b.bitcast(self._upper_half(parts[0], rounding), self.elem)
        return self.incoming(self.b.vector(parts))

    def incoming(self, values: Value) -> Value:
        """Elements of a matrix as they are multiplied: rounded where that is another type. NaN and Inf stay."""
        b = self.b
        if self.elem != f32:
            return b.cast(values, self.elem)
        return b.vector([b.select(is_finite(b, x), self._to_tf32(x), x) for x in b.unpack(values)])

    # -- products ------------------------------------------------------------------------------------------------------

    def load_left(
        self, memory: Value, start: Value, stride: int, row: int, col: int, transposed: bool = False
    ) -> Value:
        """A block of a matrix in shared memory, as a left factor; or of its transpose, as in `load_right`."""
        return self._load(self.left, memory, start, stride, row, col, transposed)

    def multiply(
        self,
        tile: FragmentTile,
        left: Callable[[int], list[Value]],
        right: Callable[[int, int], Value],
        depth: int,
        paced: int = 0,
    ) -> None:
        """``tile += left @ right``; ``left`` gives a column of fragments, ``right`` the fragment at a row and a column.
        Waits for the subgroup after each ``paced`` of them, or never (0)."""
        acc = [[variable.value for variable in row] for row in tile.vars]
        for k in range(depth):
            if paced and k and k % paced == 0:
                self.b.subgroup_barrier()
            a = left(k)
            for j in range(len(acc[0])):
                factor = right(k, j)
                for i, row in enumerate(acc):
                    row[j] = self.multiply_add(a[i], factor, row[j])
        for variables, row in zip(tile.vars, acc, strict=True):
            for variable, value in zip(variables, row, strict=True):
                variable.value = value

    def multiply_add(self, left: Value, right: Value, total: Value) -> Value:
        """``left @ right + total`` of one block."""
        return self.b.fragment_mma(*((right, left) if self.way.transposed else (left, right)), total)

    # -- memory --------------------------------------------------------------------------------------------------------

    def transfer(self, source: Matrix, rows: int, memory: Value, copies: bool = True) -> Transfer:
        """Brings ``rows`` rows of a matrix at a time into shared memory; by asynchronous copies where they are allowed
        and there are any."""
        return Transfer(self, source, rows, memory, copies and self.copies)
