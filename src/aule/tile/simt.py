"""The simt engine: register-blocked products out of shared memory, for any GPU.

A workgroup is a grid of ``threads_y`` × ``threads_x`` threads. A tile lies over them in strips of up to four rows and
columns, so that a thread's part of either operand of a product is read sixteen bytes at a time. Both operands lie in
shared memory with the dimension that is summed over outermost: Q, K and P are transposed on their way in, V is so
already. Where rows lie there (`Pitch`) keeps lanes off each other's banks.

Two habits of NVIDIA's hardware decide the order of things; neither costs anything elsewhere.

* Shared memory serves a 16-byte read of a whole warp in two cycles, instead of four, only when each lane's address
  equals that of the lane that differs in bit 0, or in bit 1 (benchmarks/shared_reads.py). So neighbouring lanes
  (2n, 2n+1) differ in ``ty`` and share ``tx``, and lanes that differ in bit 1 share ``ty``.
* An FFMA issues every cycle only if it reads at most one register from each of two banks (even and odd numbers): a
  model that fits the dispatch stalls ncu shows, not NVIDIA's word. Going along a row, the left element stays in the
  operand cache, and the right one, whose register is as odd as its column, meets an accumulator that can be given the
  other bank. Rows are gone along forth and back, so that at the turn the right element stays.

Global memory is read one step ahead into registers (`Stager`) and written to one of two shared stages: one barrier
per step, and the memory's latency passes under the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aule.ir import Builder, Value, Var
from aule.ir.types import Scalar, bool_, f32, i32
from aule.target import Target
from aule.tile.kept import KeptRows, RowVariables
from aule.tile.math import is_finite
from aule.tile.matrix import QUAD, Matrix, divmod_const, padded
from aule.tile.pitch import Pitch
from aule.tile.rotary import Angles, Rotary
from aule.tile.simt_shape import LANES_PER_COLUMN, SimtShape, uses_subgroups

LINE_QUADS = 8
"""In a line of the cache, which lanes side by side read together."""


class RegisterTile:
    """A tile spread over the registers of a workgroup: each thread holds ``rows`` × ``cols`` variables."""

    def __init__(
        self, engine: Simt, rows: int, cols: int, strip: int, init: Value, row_strip: int | None = None
    ) -> None:
        """``strip`` columns and ``row_strip`` rows (the shape's, when None) that follow each other are one thread's."""
        self.engine = engine
        self.strip = strip
        self.row_strip = engine.shape.row_strip if row_strip is None else row_strip
        self.vars = [[engine.b.var(init) for _ in range(cols)] for _ in range(rows)]

    def row(self, r: int) -> Value:
        """Row in the tile of this thread's register row ``r``."""
        return self.engine.row(r, self.row_strip)

    def col(self, c: int) -> Value:
        """Column in the tile of this thread's register column ``c``."""
        strip, lane = divmod(c, self.strip)
        return self.engine.tx * self.strip + (strip * self.engine.shape.threads_x * self.strip + lane)

    def values(self) -> list[list[Value]]:
        return [[v.value for v in row] for row in self.vars]

    def assign(self, values: Sequence[Sequence[Value]]) -> None:
        for variables, row in zip(self.vars, values, strict=True):
            for variable, value in zip(variables, row, strict=True):
                variable.value = value

    def fill(self, value: Value) -> None:
        self.assign([[value] * len(row) for row in self.vars])

    def map(self, f: Callable[[Value, int, int], Value]) -> None:
        """Replace each element by ``f(value, r, c)``; ``r`` and ``c`` count registers (see `row`, `col`)."""
        self.assign([[f(x, r, c) for c, x in enumerate(row)] for r, row in enumerate(self.values())])


class Stager:
    """Carries quads from global memory through registers into one of two shared stages.

    ``prefetch`` starts the loads of the next step, ``commit`` writes what was fetched into the next stage; the caller
    puts a barrier after it. Two stages suffice with one barrier a step: a stage is written again only after the
    barrier that follows its last readers.
    """

    def __init__(
        self,
        engine: Simt,
        elem: Scalar,
        quads: int,
        stage: Value,
        stage_size: int,
        angles: tuple[Scalar, int] | None = None,
    ) -> None:
        """``angles``, where quads are rotated on their way: the type of the tables, and how many angles a quad has."""
        b = engine.b
        zero = b.splat(b.const(0, elem), QUAD)
        self.registers: list[Var] = [b.var(zero, "fetched") for _ in range(quads)]
        # What it takes to rotate each quad: cosines, sines and, where they are not in it, the partners.
        self.turns: list[list[Var]] = [[] for _ in range(quads)]
        if angles is not None:
            angle = b.splat(b.const(0, angles[0]), angles[1])
            kinds = [angle, angle, zero] if angles[1] == QUAD else [angle, angle]
            self.turns = [[b.var(kind, "turn") for kind in kinds] for _ in range(quads)]
        self.stage = stage
        self.stage_size = stage_size
        self.step = b.var(b.const(0, i32), "step")
        self.offset = b.var(b.const(0, i32), "stage_offset")

    def advance(self) -> None:
        """Turn to the other stage."""
        step = self.step.value + 1
        self.step.value = step
        self.offset.value = (step & 1) * self.stage_size


@dataclass(frozen=True)
class Row:
    """Where a row begins in memory, and its angles where it is rotated."""

    start: Value
    angles: Angles | None = None


@dataclass(frozen=True)
class Chunk:
    """``rows`` × ``cols`` elements of a matrix that one step brings into shared memory."""

    rows: int
    cols: int
    start: int
    """Where the chunk begins in its stage, in elements."""
    pitch: Pitch
    """Of its rows in shared memory, or of its columns when transposed."""
    transposed: bool = False
    by_row: bool = False
    """A thread's quads are all of one row, which needs one address, where that goes even and lanes still read whole
    lines of the cache."""

    @property
    def quads(self) -> int:
        return self.rows * self.cols // QUAD

    def per_thread(self, threads: int) -> int:
        return -(-self.quads // threads)


@dataclass(frozen=True)
class Operand:
    """A factor of a product in shared memory: where it begins, and how its rows lie."""

    memory: Value
    start: Value
    pitch: Pitch


class Simt:
    """The engine: thread coordinates, row reductions, staging and the products."""

    def __init__(
        self, b: Builder, target: Target, shape: SimtShape, head_dim: int, value_dim: int,
        sizes: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """``sizes`` are those of the shared arrays, where they are not the forward pass's."""
        self.b = b
        self.target = target
        self.shape = shape
        self.thread = b.thread_id()
        pair, parity = divmod_const(b, self.thread, LANES_PER_COLUMN)
        row_pair, self.tx = divmod_const(b, pair, shape.threads_x)
        self.ty = row_pair * LANES_PER_COLUMN + parity
        self.value_cols = shape.value_cols(value_dim)
        self.head_cols = padded(head_dim, shape.chunk_k)
        sizes = sizes or shape.shared_elements(head_dim, value_dim, uses_subgroups(target, shape))
        self.stage_size = sizes["stage"] // 2
        self.stage = b.shared("stage", f32, sizes["stage"])
        self.p = b.shared("p", f32, sizes["p"])
        self.q = b.shared("q", f32, sizes["q"]) if shape.resident_q else None
        self.own = b.shared("own", f32, sizes["own"]) if "own" in sizes else None
        self.rows_scratch = b.shared("rows", f32, sizes["rows"]) if "rows" in sizes else None
        of_q, of_k = shape.chunk_pitch(shape.block_q), shape.chunk_pitch(shape.block_kv)
        self.q_chunk = Chunk(shape.block_q, shape.chunk_k, 0, of_q, transposed=True)
        k_start = 0 if shape.resident_q else of_q.at(shape.chunk_k)
        self.k_chunk = Chunk(shape.block_kv, shape.chunk_k, k_start, of_k, transposed=True)
        self.v_chunk = replace(self.row_chunk(value_dim), by_row=True)

    def row_chunk(self, value_dim: int) -> Chunk:
        """What one step of a product of ``P V``'s form brings in: whole rows of a matrix of ``value_dim`` columns."""
        cols = self.shape.value_cols(value_dim)
        return Chunk(self.shape.chunk_v, cols, 0, Pitch(cols))

    # -- tiles -----------------------------------------------------------------------------------------------------

    def row(self, r: int, strip: int | None = None) -> Value:
        """Row in the block of this thread's ``r``-th row, of ``strip`` (the shape's, when None) that follow each
        other."""
        width = self.shape.row_strip if strip is None else strip
        number, within = divmod(r, width)
        return self.ty * width + (number * self.shape.threads_y * width + within)

    def score_tile(self, init: Value) -> RegisterTile:
        """S: one thread holds strips of consecutive columns."""
        shape = self.shape
        return RegisterTile(self, shape.rows, shape.block_kv // shape.threads_x, shape.strip(shape.block_kv), init)

    def output_tile(self, value_dim: int, init: Value) -> RegisterTile:
        """O, or another result of ``P V``'s form: one thread holds strips of consecutive columns."""
        shape = self.shape
        cols = shape.value_cols(value_dim) // shape.threads_x
        strip = shape.strip(value_dim)
        return RegisterTile(self, shape.rows, cols, strip if cols % strip == 0 else 1, init)

    def common_rows(self, name: str, init: Value) -> KeptRows | RowVariables:
        """A number for each row that all its threads agree on. WGSL has no barrier of subgroups, without which it could
        not be kept in shared memory."""
        if self.rows_scratch is None and self.target.backend == "webgpu":
            return RowVariables(self, init)
        return KeptRows(self, name, init, common=True)

    def own_rows(self, name: str, init: Value) -> KeptRows | RowVariables:
        """A number for each row that is each thread's own."""
        return KeptRows(self, name, init, common=False) if self.shape.sums_kept else RowVariables(self, init)

    def reduce_rows(self, kind: str, partial: list[Value]) -> list[Value]:
        """Combine the threads of each row; every one of them gets the result."""
        b, width = self.b, self.shape.threads_x
        if self.rows_scratch is None:
            mask = LANES_PER_COLUMN
            while mask < width * LANES_PER_COLUMN:
                partial = [b.binary(kind, x, b.shuffle_xor(x, mask)) for x in partial]
                mask *= 2
            return partial
        b.barrier()  # the scratch may still be read from the reduction before
        for r, x in enumerate(partial):
            b.store(self.rows_scratch, self.row(r) * (width + 1) + self.tx, x)
        b.barrier()
        result = []
        for r in range(len(partial)):
            base = self.row(r) * (width + 1)
            total = b.load(self.rows_scratch, base)
            for i in range(1, width):
                total = b.binary(kind, total, b.load(self.rows_scratch, base + i))
            result.append(total)
        return result

    def any_of_rows(self, condition: Value) -> Value:
        """Whether a condition holds in any thread of those that reduce their rows together: a subgroup. Where there
        are none it may hold, without asking."""
        return self.b.subgroup_any(condition) if self.rows_scratch is None else self.b.const(True, bool_)

    def rows_barrier(self) -> None:
        """Wait for the threads that share this thread's rows: its subgroup, where rows fit into one. WGSL has no
        barrier of subgroups."""
        if self.rows_scratch is None and self.target.backend != "webgpu":
            self.b.subgroup_barrier()
        else:
            self.b.barrier()

    # -- staging ---------------------------------------------------------------------------------------------------

    def stager(self, elem: Scalar, angles: tuple[Scalar, int] | None = None) -> Stager:
        """The pipeline through which Q, K and V come in."""
        first = self.k_chunk.per_thread(self.shape.threads)
        if not self.shape.resident_q:
            first += self.q_chunk.per_thread(self.shape.threads)
        quads = max(first, self.v_chunk.per_thread(self.shape.threads))
        return Stager(self, elem, quads, self.stage, self.stage_size, angles)

    def _place(self, chunk: Chunk, i: int) -> tuple[Value, Value, Value]:
        """Which row and column of a chunk this thread's ``i``-th quad is, and its number. Neighbouring lanes go along a
        row: eight lanes in eight rows would spare bank conflicts on the way in, but reading eight cache lines at a time
        costs more than that (H200, d128: 30.8 instead of 35.2 TFLOPS)."""
        b, threads, per_row = self.b, self.shape.threads, chunk.cols // QUAD
        number, steps = self.thread + i * threads, self._steps(chunk)
        if steps is None:
            row, quad = divmod_const(b, number, per_row)
            return row, quad * QUAD, number
        rows, quads = steps
        row, quad = divmod_const(b, self.thread, quads or per_row)
        return row + i * rows, (quad + i * quads) * QUAD, number

    def _steps(self, chunk: Chunk) -> tuple[int, int] | None:
        """Rows and quads from one of a thread's quads to its next, so that addresses differ by constants: all in one
        row, or in one column. None where they are neither."""
        threads, per_row, count = self.shape.threads, chunk.cols // QUAD, chunk.per_thread(self.shape.threads)
        lanes = per_row // count
        even = lanes * count == per_row and chunk.quads == count * threads
        if chunk.by_row and even and lanes >= LINE_QUADS:
            return 0, lanes
        return (threads // per_row, 0) if threads % per_row == 0 else None

    def row_starts(
        self, chunk: Chunk, source: Matrix, row: Value, order: Callable[[Value], Value] | None = None
    ) -> list[Row]:
        """Where the rows that this thread fetches of a chunk begin in memory; to be kept while only columns change.
        ``order`` tells which row from ``row`` on the chunk's r-th is, where that is not the r-th."""
        b, starts = self.b, []
        for i in range(chunk.per_thread(self.shape.threads)):
            r, _, _ = self._place(chunk, i)
            if chunk.quads % self.shape.threads:
                r = b.min(r, chunk.rows - 1)
            if order is not None:
                r = order(r)
            rotary = source.rotary
            angles = None if rotary is None else rotary.angles(b, row + r)
            starts.append(Row(source.row_start(b, row + r), angles))
        return starts

    def fetch(
        self, stager: Stager, first: int, chunk: Chunk, source: Matrix, starts: list[Row], col: Value, cols: int
    ) -> None:
        """Start loading the chunk whose rows begin at ``starts``, from column ``col`` on, into the stager's registers
        from number ``first`` on."""
        b, far = self.b, self._distance(chunk, source, cols)
        if far is not None:
            _, c, _ = self._place(chunk, 0)
            quad = starts[0].start + source.index(b, col + c)
            for i in range(len(starts)):
                stager.registers[first + i].value = b.load(source.buffer, quad + i * far, QUAD)
            return
        for i, row in enumerate(starts):
            _, c, _ = self._place(chunk, i)
            stager.registers[first + i].value = source.load_quad(b, row.start, col + c, cols)
            if source.rotary is not None and row.angles is not None:
                found = [*source.rotary.fetch_angles(b, row.angles, col + c, QUAD)]
                partners = source.rotary.fetch_partners(b, source, row.start, col + c, cols, QUAD)
                found += [] if partners is None else [partners]
                for variable, value in zip(stager.turns[first + i], found, strict=True):
                    variable.value = value

    def _distance(self, chunk: Chunk, source: Matrix, cols: int) -> int | None:
        """Elements in memory from one of a thread's quads to its next, where that is known while tracing."""
        steps = self._steps(chunk)
        if steps is None or cols != source.cols:
            return None
        rows, quads = steps
        # Rows of V may come in another order (`value_order`).
        return source.distance(rows, quads * QUAD) if chunk.transposed or rows == 0 else None

    def commit(
        self,
        stager: Stager,
        first: int,
        chunk: Chunk,
        scale: Value | None = None,
        finite: bool = False,
        rotated: tuple[Rotary, Value, int] | None = None,
    ) -> list[tuple[Value, Value | None]]:
        """Write a fetched chunk into the current stage, as fp32 and scaled, and with zeros for Inf and NaN where
        ``finite`` asks for it. Returns the quads, each with the condition under which it belongs to the chunk (None:
        always). ``rotated`` says how, from which column on it was fetched, and how many there are with padding."""
        b = self.b
        written: list[tuple[Value, Value | None]] = []
        for i in range(chunk.per_thread(self.shape.threads)):
            r, c, number = self._place(chunk, i)
            quad = b.cast(stager.registers[first + i].value, f32)
            if rotated is not None:
                rotary, col, cols = rotated
                cos, sin, *others = (variable.value for variable in stager.turns[first + i])
                partners = [x for other in others for x in b.unpack(b.cast(other, f32))]
                quad = b.vector(rotary.turn(b, b.unpack(quad), partners, (cos, sin), col + c, cols))
            if scale is not None:
                quad = quad * scale
            if finite:
                quad = b.vector([b.select(is_finite(b, x), x, b.const(0.0, f32)) for x in b.unpack(quad)])
            place = chunk.pitch.at(c) + r if chunk.transposed else chunk.pitch.at(r) + c
            index = stager.offset.value + place + chunk.start
            if (i + 1) * self.shape.threads > chunk.quads:
                inside = number < chunk.quads
                with b.if_(inside):
                    self._put(chunk, index, quad)
                written.append((quad, inside))
            else:
                self._put(chunk, index, quad)
                written.append((quad, None))
        return written

    def _put(self, chunk: Chunk, index: Value, quad: Value) -> None:
        if not chunk.transposed:
            self.b.store(self.stage, index, quad)
            return
        for e, x in enumerate(self.b.unpack(quad)):
            self.b.store(self.stage, index + e * chunk.pitch.stride, x)

    def load_resident(self, memory: Value, source: Matrix, row: Value, scale: Value | None = None) -> None:
        """Bring all of a block of rows into shared memory, scaled and transposed."""
        b, quads = self.b, self.shape.block_q * self.head_cols // QUAD
        with b.loop(0, -(-quads // self.shape.threads), name="quad") as i:
            number = self.thread + i * self.shape.threads
            r, quad = divmod_const(b, number, self.head_cols // QUAD)
            with b.if_(number < quads):
                start, col = source.row_start(b, row + r), quad * QUAD
                value = b.cast(source.load_quad(b, start, col, self.head_cols), f32)
                if source.rotary is not None:
                    value = b.vector(self._turned(source, row + r, start, col, b.unpack(value)))
                quad_values = value if scale is None else value * scale
                pitch = self.shape.resident_pitch
                for e, x in enumerate(b.unpack(quad_values)):
                    b.store(memory, pitch.at(quad * QUAD) + (e * pitch.stride + r), x)

    def _turned(self, source: Matrix, row: Value, start: Value, col: Value, x: list[Value]) -> list[Value]:
        """A quad of Q, rotated."""
        b, rotary = self.b, source.rotary
        assert rotary is not None
        angles = rotary.fetch_angles(b, rotary.angles(b, row), col, QUAD)
        other = rotary.fetch_partners(b, source, start, col, self.head_cols, QUAD)
        partners = [] if other is None else b.unpack(b.cast(other, f32))
        return rotary.turn(b, x, partners, angles, col, self.head_cols)

    # -- products --------------------------------------------------------------------------------------------------

    def multiply_scores(
        self, S: RegisterTile, offset: Value, chunk: Value, fetch: Callable[[], None] | None = None
    ) -> None:
        """``S += Q_chunk @ K_chunk^T`` out of the stage at ``offset``; ``fetch`` starts to fetch the next chunk."""
        self.multiply_chunks(S, self.q, offset, chunk, fetch)

    def multiply_chunks(
        self, tile: RegisterTile, resident: Value | None, offset: Value, chunk: Value,
        fetch: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """The same for any tile: the left factor is ``resident``, or a chunk of it in the stage as well."""
        left = Operand(self.stage, offset, self.q_chunk.pitch)
        if resident is not None:
            pitch = self.shape.resident_pitch
            left = Operand(resident, chunk * pitch.at(self.shape.chunk_k), pitch)
        right = Operand(self.stage, offset + self.k_chunk.start, self.k_chunk.pitch)
        self.multiply(tile, left, right, self.shape.chunk_k, self.shape.ahead_k, fetch)

    def store_p(self, S: RegisterTile, values: Sequence[Sequence[Value]]) -> None:
        """Put a part of P where all threads of a row can read it; the next commit's barrier makes it visible. Columns
        lie there thread by thread, of each as many as a strip has, or all there are."""
        strip, width = self.shape.row_strip, min(len(values[0]), S.strip)
        for c in range(len(values[0])):
            start = c // width * self.shape.threads_x * width + c % width
            for r in range(0, len(values), strip):
                column = self.b.vector([row[c] for row in values[r : r + strip]])
                self.b.store(self.p, self.shape.p_pitch.at(self.tx * width + start) + self.row(r), column)

    def store_p_transposed(self, S: RegisterTile, values: Sequence[Sequence[Value]]) -> None:
        """Put all of P there row by row: the left factor of ``P^T @ right``."""
        for r, row in enumerate(values):
            for c in range(0, len(row), S.strip):
                place = self.shape.turned_pitch.at(self.row(r)) + S.col(c)
                self.b.store(self.p, place, self.b.vector(list(row[c : c + S.strip])))

    def value_order(self, number: Value) -> Callable[[Value], Value] | None:
        """Which key of its tile each row of the ``number``-th chunk of V is, so that V meets P's columns as `store_p`
        put them. None where parts of P are whole strips: their keys follow each other."""
        b, shape = self.b, self.shape
        width, strip = shape.part_cols, shape.strip(shape.block_kv)
        if width >= strip:
            return None
        part, chunk = divmod_const(b, number, shape.part // shape.chunk_v)
        strips, first = divmod_const(b, part, strip // width)
        start = strips * (shape.threads_x * strip) + first * width

        def key(row: Value) -> Value:
            owner, within = divmod_const(b, chunk * shape.chunk_v + row, width)
            return start + owner * strip + within

        return key

    def multiply_values(
        self, O: RegisterTile, offset: Value, chunk: Value, fetch: Callable[[], None] | None = None
    ) -> None:
        """``O += P_chunk @ V_chunk`` out of the stage at ``offset``; ``fetch`` starts to fetch the next chunk."""
        self.multiply_rows(O, self.shape.p_pitch, offset, self.value_cols, chunk, fetch)

    def multiply_rows(
        self, tile: RegisterTile, pitch: Pitch, offset: Value, cols: int, chunk: Value,
        fetch: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """The same for any tile, of ``cols`` columns with padding, P lying as ``pitch`` says."""
        left = Operand(self.p, chunk * pitch.at(self.shape.chunk_v), pitch)
        right = Operand(self.stage, offset, Pitch(cols))
        self.multiply(tile, left, right, self.shape.chunk_v, self.shape.ahead_v, fetch)

    def multiply(
        self, tile: RegisterTile, left: Operand, right: Operand, depth: int, ahead: int,
        fetch: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        """``tile += left^T @ right``: both have ``depth`` rows, the left one those of Q or P, the right one those of K
        or V. Operands are read ``ahead`` rows before their turn, the first of them before what is to be fetched."""
        b, shape, strip = self.b, self.shape, tile.row_strip
        acc = tile.values()
        rows, cols = range(0, len(acc), strip), range(0, len(acc[0]), tile.strip)
        left_base, right_base = left.start + self.ty * strip, right.start + self.tx * tile.strip

        def read(k: int) -> tuple[list[Value], list[Value]]:
            x: list[Value] = []
            for r in rows:
                x += b.unpack(b.load(left.memory, left_base + (left.pitch.at(k) + r * shape.threads_y), strip))
            y: list[Value] = []
            for c in cols:
                place = right_base + (right.pitch.at(k) + c * shape.threads_x)
                y += b.unpack(b.load(right.memory, place, tile.strip))
            return x, y

        waiting = [read(k) for k in range(ahead)]
        if fetch is not None:
            fetch()
        for k in range(depth):
            if k + ahead < depth:
                waiting.append(read(k + ahead))
            x, y = waiting.pop(0)
            if shape.down:
                for c, r in _serpentine(len(y), len(x)):
                    acc[r][c] = b.fma(y[c], x[r], acc[r][c])
            else:
                for r, c in _serpentine(len(x), len(y)):
                    acc[r][c] = b.fma(x[r], y[c], acc[r][c])
        tile.assign(acc)

    def multiply_values_guarded(self, O: RegisterTile, offset: Value, chunk: Value) -> None:
        """The same product, in which a key of weight zero adds nothing even when its value is Inf or NaN. Slow."""
        b, shape = self.b, self.shape
        with b.loop(0, shape.chunk_v, name="j") as j:
            for r in range(len(O.vars)):
                p = b.load(self.p, shape.p_pitch.at(chunk * shape.chunk_v + j) + O.row(r))
                with b.if_(b.ne(p, 0.0)):
                    for c, variable in enumerate(O.vars[r]):
                        v = b.load(self.stage, offset + j * self.value_cols + O.col(c))
                        variable.value = b.fma(p, v, variable.value)


def _serpentine(rows: int, cols: int) -> list[tuple[int, int]]:
    """The places of a tile row by row, forth and back."""
    return [(r, c if r % 2 == 0 else cols - 1 - c) for r in range(rows) for c in range(cols)]
