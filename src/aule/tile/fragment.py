"""The fragment engine: products on matrix units, softmax in registers.

A subgroup works on ``rows`` rows of a block alone. Its tiles are 16 x 16 fragments (`aule.ir`), whose components a lane
may read and write: the target's `FragmentLayout` says which elements those are, so that rows are reduced by a few
shuffles and P goes from accumulators to the next product without passing through memory. The same code serves
mma.sync in PTX, cooperative matrices in SPIR-V and simdgroup matrices in MSL.

K and V lie in shared memory row by row, 16 bytes apart beyond their columns: eight rows then start in eight different
groups of banks, and a load of a fragment has no conflicts. They are brought in a tile ahead, either by asynchronous
copies or through registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aule.ir import Builder, Value, Var
from aule.ir.types import SCALARS, Fragment, Scalar, Vector, bf16, f32, i32, u32
from aule.target import FragmentLayout, Target
from aule.tile.math import is_finite
from aule.tile.matrix import Matrix, divmod_const
from aule.tile.simt import padded

SIZE = 16
"""Rows and columns of a fragment."""
RUN = 8
"""Elements that travel together."""


@dataclass(frozen=True)
class FragmentShape:
    """How a kernel on matrix units is cut up.

    Attributes
    ----------
    block_q, block_kv : int
        Rows and columns of the score tile.
    subgroups : int
        Subgroups of a workgroup; each has its own part of the rows.
    stages : int
        2: K and V of the next tile come in while this one is worked on, with one barrier a tile. 1: V comes in under
        the first product, the next K under the second, with two barriers and half the memory.
    resident_q : bool
        Q stays in registers; otherwise it is read from shared memory again for every tile.
    registers : int
        Registers a thread may use, where the language can say so.
    lanes : int
        Lanes of a subgroup.
    columns : int
        Subgroups that share their rows, in the kernel of dK and dV. Each makes some columns of the scores, which then
        pass through shared memory, and some columns of the results: more rows of its own, and fewer reads in all.
    """

    block_q: int
    block_kv: int
    subgroups: int
    stages: int
    resident_q: bool
    registers: int = 255
    lanes: int = 32
    columns: int = 1

    @property
    def threads(self) -> int:
        return self.subgroups * self.lanes

    @property
    def rows(self) -> int:
        """Rows of one subgroup."""
        return self.block_q * self.columns // self.subgroups

    def shared_elements(self, head_dim: int, value_dim: int) -> tuple[int, int, int]:
        """Elements of Q, and of one stage of K and of V."""
        k_row, v_row = row_stride(head_dim), row_stride(value_dim)
        return self.block_q * k_row, self.block_kv * k_row, self.block_kv * v_row

    def shared_bytes(self, head_dim: int, value_dim: int, itemsize: int = 2) -> int:
        """Shared memory of a forward kernel. Q that stays in registers passes through the memory of K and V."""
        q, k, v = self.shared_elements(head_dim, value_dim)
        stages = self.stages * (k + v)
        return itemsize * (max(q, stages) if self.resident_q else q + stages)

    def backward_bytes(self, head_dim: int, value_dim: int, sums: bool = False) -> int:
        """Shared memory of a backward kernel: the rows that it owns and some of the others, of two matrices each; dS
        where it also adds up dQ; and dS and P where subgroups share rows."""
        rows = (self.block_q + self.stages * self.block_kv) * (row_stride(head_dim) + row_stride(value_dim))
        tiles = 2 if self.columns > 1 else int(sums)
        return 2 * (rows + tiles * self.block_q * row_stride(self.block_kv))


def row_stride(dim: int) -> int:
    """Elements from one row to the next in shared memory."""
    return padded(dim, SIZE) + RUN


def factor_elem(dtype: str) -> Scalar:
    """The element type of factors in shared memory: tf32 is f32 with the last bits zero."""
    return f32 if dtype == "tf32" else SCALARS[dtype]


_COMPOSED = {"cuda": ("m16n8k16", "m16n8k8"), "metal": ("m8n8k8",)}
"""What PTX and MSL put fragments of 16 x 16 together from."""


def has_units(target: Target, dtype: str) -> bool:
    """Whether a device multiplies 16 x 16 fragments of a type that the engine has."""
    shapes = ("m16n16k16", *_COMPOSED.get(target.backend, ()))
    return dtype in ("f16", "bf16", "tf32") and any(f"{shape}:{dtype}:f32" in target.matrix_units for shape in shapes)


def multiplies(target: Target, dtype: str) -> bool:
    """Whether a device multiplies 16 x 16 fragments of a type, and how they lie is known."""
    return target.matrix_layout is not None and has_units(target, dtype)


class FragmentTile:
    """A tile of 16 x 16 accumulators. Like `aule.tile.simt.RegisterTile`, a lane sees its elements as rows and
    columns: ``row(r)`` and ``col(c)`` say which ones of the subgroup's tile they are."""

    def __init__(self, engine: Fragments, rows: int, cols: int) -> None:
        self.engine = engine
        zero = engine.b.fragment_fill(engine.accumulator, 0.0)
        self.vars: list[list[Var]] = [[engine.b.var(zero) for _ in range(cols // SIZE)] for _ in range(rows // SIZE)]

    def row(self, r: int) -> Value:
        block, part = divmod(r, len(self.engine.part_rows))
        return self.engine.lane_row + (block * SIZE + self.engine.part_rows[part])

    def col(self, c: int) -> Value:
        block, part = divmod(c, len(self.engine.part_cols))
        return self.engine.lane_col + (block * SIZE + self.engine.part_cols[part])

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
    """Fragments as a lane sees them: which elements its components are, and fragments out of such elements."""

    def __init__(self, b: Builder, target: Target, elem: Scalar) -> None:
        assert target.matrix_layout is not None
        self.b, self.elem = b, elem
        self.layout: FragmentLayout = target.matrix_layout
        self.converts = target.backend == "cuda"
        self.accumulator = Fragment(f32, SIZE, SIZE, "accumulator")
        self.left, self.right = Fragment(elem, SIZE, SIZE, "a"), Fragment(elem, SIZE, SIZE, "b")
        self.thread, self.subgroup, self.lane = b.thread_id(), b.subgroup_id(), b.lane_id()
        self.lane_row = weigh_bits(b, self.lane, self.layout.lane_rows)
        self.lane_col = weigh_bits(b, self.lane, self.layout.lane_cols)
        count = 1 << len(self.layout.part_rows)
        self.places = [
            (_sum_bits(part, self.layout.part_rows), _sum_bits(part, self.layout.part_cols)) for part in range(count)
        ]
        """Row and column of each component, from those of the lane."""
        self.part_rows = sorted({row for row, _ in self.places})
        self.part_cols = sorted({col for _, col in self.places})
        self.run = 2 if self.part_cols[1:2] == [1] else 1
        """Neighbouring columns that a lane holds."""

    def component(self, row: int, col: int) -> int:
        """The component that holds a lane's element of a part's row and column."""
        return self.places.index((row, col))

    def rounded(self, parts: list[Value], type_: Fragment, weights: bool) -> list[Value]:
        """Converted two at a time, which some devices do in one instruction."""
        b, elem = self.b, type_.elem
        if elem == f32:
            return parts if type_.use == "accumulator" else [self._to_tf32(x) for x in parts]
        pairs = []
        for x, y in zip(parts[::2], parts[1::2], strict=True):
            if elem == bf16 and weights and not self.converts:
                # Half a unit upwards: right but for ties, and for NVIDIA's NaN, all ones, which becomes -0.
                low, high = (b.bitcast(v, u32) + 0x8000 for v in (x, y))
                pairs.append(b.bitcast((low >> 16) | (high & 0xFFFF0000), Vector(bf16, 2)))
            else:
                pairs.append(b.cast(b.vector([x, y]), elem))
        return [half for pair in pairs for half in b.unpack(pair)]

    def _to_tf32(self, x: Value) -> Value:
        """To nearest, ties away from zero: thirteen bits go."""
        return self.b.bitcast((self.b.bitcast(x, u32) + 0x1000) & 0xFFFFE000, f32)

    def load_right(
        self, memory: Value, start: Value, stride: int, row: int, col: int, transposed: bool = False
    ) -> Value:
        """16 x 16 of a matrix in shared memory, as a right factor; or of its transpose, whose element (i, j) lies in
        row ``col + j``, column ``row + i``."""
        if transposed:
            return self.b.fragment_load(self.right, memory, start + (col * stride + row), stride, "column")
        return self.b.fragment_load(self.right, memory, start + (row * stride + col), stride, "row")


class Fragments(Components):
    """The engine: lane coordinates, row reductions, memory and the two products."""

    def __init__(self, b: Builder, target: Target, shape: FragmentShape, dtype: str) -> None:
        """``dtype`` is what is multiplied: f16, bf16 or tf32."""
        super().__init__(b, target, factor_elem(dtype))
        self.shape = shape
        self.copies = target.backend == "cuda" and target.arch != "sm_75"
        # Lanes that share their rows differ in these bits.
        self._across = [1 << i for i, weight in enumerate(self.layout.lane_rows) if weight == 0]

    @property
    def rows_held(self) -> int:
        """Rows of a tile that this lane works on."""
        return self.shape.rows // SIZE * len(self.part_rows)

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def tile(self, rows: int, cols: int) -> FragmentTile:
        """A tile of zeros."""
        return FragmentTile(self, rows, padded(cols, SIZE))

    def row_vars(self, init: Value) -> list[Var]:
        """A variable for each row this lane works on."""
        return [self.b.var(init) for _ in range(self.rows_held)]

    def reduce_rows(self, kind: str, partial: list[Value]) -> list[Value]:
        """Combine the lanes of each row; every one of them gets the result."""
        for mask in self._across:
            partial = [self.b.binary(kind, x, self.b.shuffle_xor(x, mask)) for x in partial]
        return partial

    def pack(self, values: Sequence[Sequence[Value]], type_: Fragment, weights: bool = False) -> list[list[Value]]:
        """Fragments out of this lane's elements by row and column, rounded to the fragments' type. ``weights`` says
        that NaN among them may be lost, because their sum has it, too."""
        b, heights, widths = self.b, len(self.part_rows), len(self.part_cols)
        result = []
        for r in range(0, len(values), heights):
            blocks = []
            for c in range(0, len(values[0]), widths):
                parts = [
                    values[r + self.part_rows.index(row)][c + self.part_cols.index(col)] for row, col in self.places
                ]
                blocks.append(b.fragment_pack(type_, self.rounded(parts, type_, weights)))
            result.append(blocks)
        return result

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
        """16 x 16 of a matrix in shared memory, as a left factor; or of its transpose, as in `load_right`."""
        if transposed:
            return self.b.fragment_load(self.left, memory, start + (col * stride + row), stride, "column")
        return self.b.fragment_load(self.left, memory, start + (row * stride + col), stride, "row")

    def multiply(
        self,
        tile: FragmentTile,
        left: Callable[[int], list[Value]],
        right: Callable[[int, int], Value],
        depth: int,
    ) -> None:
        """``tile += left @ right``; ``left`` gives a column of fragments, ``right`` the fragment at a row and a
        column."""
        b = self.b
        acc = [[variable.value for variable in row] for row in tile.vars]
        for k in range(depth):
            a = left(k)
            for j in range(len(acc[0])):
                factor = right(k, j)
                for i, row in enumerate(acc):
                    row[j] = b.fragment_mma(a[i], factor, row[j])
        for variables, row in zip(tile.vars, acc, strict=True):
            for variable, value in zip(variables, row, strict=True):
                variable.value = value

    # -- memory --------------------------------------------------------------------------------------------------------

    def transfer(self, source: Matrix, rows: int, memory: Value, copies: bool = True) -> Transfer:
        """Brings ``rows`` rows of a matrix at a time into shared memory; by asynchronous copies where they are allowed
        and there are any."""
        return Transfer(self, source, rows, memory, copies and self.copies)


class Transfer:
    """The way of one matrix into shared memory, some rows at a time.

    ``start`` begins to fetch, ``finish`` makes what was fetched visible to the thread itself; a barrier behind that
    shows it to all. With asynchronous copies the fetched rows go to ``target`` directly, otherwise they wait in
    registers until ``finish`` stores them, rounded where the engine multiplies another type.
    """

    def __init__(self, engine: Fragments, source: Matrix, rows: int, memory: Value, copies: bool) -> None:
        self.engine, self.b, self.source, self.rows, self.memory = engine, engine.b, source, rows, memory
        self.stride = row_stride(source.cols)
        # What is rounded passes through registers.
        copied = copies and source.elem == engine.elem != f32
        self.direct = copied and source.aligned and source.col_stride is None
        self.cols = source.cols if self.direct else padded(source.cols, SIZE)
        self.runs = rows * self.cols // RUN
        b, threads = self.b, engine.shape.threads
        self.count = -(-self.runs // threads)
        # Where a round of the workgroup is some whole rows, all of a thread's runs lie in one column.
        self.step, rest = divmod(threads * RUN, self.cols)
        self.regular = rest == 0 and self.runs % threads == 0
        self.row, run = divmod_const(b, engine.thread, self.cols // RUN)
        self.col = run * RUN
        self.own = self.row * self.stride + self.col
        self.offset = source.index(b, self.row) * source.row_stride + source.index(b, self.col)
        zero = b.splat(b.const(0, source.elem), RUN)
        self.registers: list[Var] = [] if self.direct else [b.var(zero, "fetched") for _ in range(self.count)]

    def place(self, i: int | Value) -> tuple[Value, Value, Value]:
        """Row and column of this thread's ``i``-th run, and its number."""
        number = self.engine.thread + i * self.engine.shape.threads
        if self.regular:
            return self.row + i * self.step, self.col, number
        row, run = divmod_const(self.b, number, self.cols // RUN)
        return row, run * RUN, number

    def clear_padding(self, target: Value, times: int) -> None:
        """Zeros behind the columns of ``times`` stages, which asynchronous copies leave as they are."""
        b, engine = self.b, self.engine
        gap = padded(self.source.cols, SIZE) - self.cols
        if gap == 0:
            return
        zero = b.splat(b.const(0, engine.elem), RUN)  # the columns are whole runs, so the gap is one
        with b.loop(0, -(-self.rows * times // engine.shape.threads), name="row") as i:
            row = engine.thread + i * engine.shape.threads
            with b.if_(row < self.rows * times):
                b.store(self.memory, target + row * self.stride + self.cols, zero)

    def start(self, first: Value, target: Value, whole: bool = False) -> None:
        """Fetch the rows from ``first`` on; ``target`` is where their memory starts. ``whole`` promises that all of
        them exist; otherwise those past the end are replaced by the last one."""
        b, source = self.b, self.source
        whole = whole and self.regular and self.direct and source.even
        base = source.base + source.index(b, first) * source.row_stride + self.offset if whole else None
        own = target + self.own
        for i in range(self.count):

            def fetch(row: Value, col: Value, i: int = i) -> None:
                if base is not None:
                    index = base + source.row_stride * (i * self.step)
                else:
                    index = source.row_start(b, first + row)
                if not self.direct:
                    self.registers[i].value = source.load_quad(b, index, col, self.cols, RUN)
                    return
                index = index if base is not None else index + source.index(b, col)
                to = own + i * self.step * self.stride if self.regular else target + row * self.stride + col
                b.async_copy(self.memory, to, source.buffer, index, RUN)

            self._each(i, fetch)
        if self.direct:
            b.async_commit()

    def finish(self, target: Value) -> None:
        """Wait for what was fetched and store it where it did not go by itself."""
        b = self.b
        if self.direct:
            b.async_wait(0)
            return
        for i, register in enumerate(self.registers):
            value = self.engine.incoming(register.value)
            self._each(i, lambda row, col: b.store(self.memory, target + row * self.stride + col, value))  # noqa: B023

    def own_runs(self, target: Value, f: Callable[[Value], None]) -> None:
        """Call ``f`` with each run of elements in shared memory that this thread brought in."""
        for i in range(self.count):
            self._each(i, lambda row, col: f(self.b.load(self.memory, target + row * self.stride + col, RUN)))

    def rewrite_own(self, target: Value, f: Callable[[Value], Value]) -> None:
        """Replace each run of elements in shared memory that this thread brought in by what ``f`` makes of it."""
        b = self.b

        def each(row: Value, col: Value) -> None:
            at = target + row * self.stride + col
            b.store(self.memory, at, f(b.load(self.memory, at, RUN)))

        for i in range(self.count):
            self._each(i, each)

    def rewrite(self, first: Value, target: Value, f: Callable[[Value], Value]) -> None:
        """Fetch the rows from ``first`` on again and store what ``f`` makes of each run. Slow."""
        b = self.b
        with b.loop(0, self.count, name="run") as i:
            row, col, number = self.place(i)
            with b.if_(number < self.runs):
                start = self.source.row_start(b, first + row)
                run = self.source.load_quad(b, start, col, self.cols, RUN)
                b.store(self.memory, target + row * self.stride + col, f(self.engine.incoming(run)))

    def _each(self, i: int, f: Callable[[Value, Value], None]) -> None:
        row, col, number = self.place(i)
        if self.runs % self.engine.shape.threads and i == self.count - 1:
            with self.b.if_(number < self.runs):
                f(row, col)
        else:
            f(row, col)


def weigh_bits(b: Builder, x: Value, weights: Sequence[int]) -> Value:
    """The sum of the weights of the bits that are set in ``x``."""
    total = b.const(0, i32)
    i = 0
    while i < len(weights):
        width = 1
        while i + width < len(weights) and weights[i] and weights[i + width] == weights[i] << width:
            width += 1
        if weights[i]:
            bits = x >> i
            if i + width < len(weights):
                bits = bits & ((1 << width) - 1)
            total = total + bits * weights[i]
        i += width
    return total


def place_of(b: Builder, layout: FragmentLayout, row: Value, col: Value) -> tuple[Value, Value]:
    """Lane and component of an element of a fragment."""
    places = []
    for rows, cols in ((layout.lane_rows, layout.lane_cols), (layout.part_rows, layout.part_cols)):
        # Every bit of row and column is a bit of either lane or component.
        weights = [
            [1 << table.index(1 << bit) if 1 << bit in table else 0 for bit in range(4)] for table in (rows, cols)
        ]
        places.append(weigh_bits(b, row, weights[0]) + weigh_bits(b, col, weights[1]))
    return places[0], places[1]


def _sum_bits(x: int, weights: Sequence[int]) -> int:
    return sum(weight for i, weight in enumerate(weights) if x >> i & 1)
