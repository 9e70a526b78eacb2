"""The simt engine: register-blocked products out of shared memory, for any GPU.

A workgroup is a grid of ``threads_y`` × ``threads_x`` threads. A tile is spread over them in strips of up to four rows
and columns, so a thread reads its part of either operand of a product sixteen bytes at a time. Both operands lie in
shared memory with the summed dimension outermost: Q, K and P are transposed when they are stored there, V needs no
transposition. Rows are padded (`BankPadding`) to avoid bank conflicts.

Two properties of some GPUs decide the order of lanes and operations; neither costs anything elsewhere.

* Shared memory serves a 16-byte read of 32 lanes in two cycles, instead of four, only if each lane's address equals
  that of the lane that differs in bit 0, or in bit 1 (benchmarks/shared_reads.py). So neighbouring lanes (2n, 2n+1)
  differ in ``ty`` and share ``tx``, and lanes that differ in bit 1 share ``ty``.
* A multiply-add issues every cycle only if it reads at most one register from each of two banks, even and odd numbers
  (inferred from stall counters). Along a row the left element stays in the operand cache, and the right one, whose
  register is as odd as its column, meets an accumulator that can be given the other bank. Rows are walked back and
  forth, so that the right element stays at the end of a row.

Global memory is prefetched one step ahead into registers (`Stager`) and stored to one of two shared stages: one barrier
a step, and the products hide the latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from aule.ir import Builder, Value
from aule.ir.types import Scalar, bool_, f32
from aule.target import Target
from aule.tile.common.math import is_finite
from aule.tile.common.matrix import QUAD, Matrix, divmod_const, padded
from aule.tile.common.rotary import Rotary
from aule.tile.simt.bank_padding import BankPadding
from aule.tile.simt.register_tile import RegisterTile
from aule.tile.simt.row_state import RegisterRowState, RowState, SharedRowState
from aule.tile.simt.shape import LANES_PER_COLUMN, SimtShape, uses_subgroups
from aule.tile.simt.staging import Chunk, Operand, Row, Stager

LINE_QUADS = 8
"""Quads in a cache line, which neighbouring lanes read together."""


class Simt:
    """The engine: thread coordinates, row reductions, staging and the products."""

    def __init__(
        self, b: Builder, target: Target, shape: SimtShape, head_dim: int, value_dim: int,
        sizes: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """``sizes`` are those of the shared arrays (default: of a forward kernel)."""
        self.b, self.target, self.shape = b, target, shape
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
        of_q, of_k = shape.chunk_padding(shape.block_q), shape.chunk_padding(shape.block_kv)
        self.q_chunk = Chunk(shape.block_q, shape.chunk_k, 0, of_q, transposed=True)
        k_start = 0 if shape.resident_q else of_q.at(shape.chunk_k)
        self.k_chunk = Chunk(shape.block_kv, shape.chunk_k, k_start, of_k, transposed=True)
        self.v_chunk = replace(self.row_chunk(value_dim), by_row=True)

    def row_chunk(self, value_dim: int) -> Chunk:
        """The chunk of one step of a product like ``P V``: entire rows of a matrix of ``value_dim`` columns."""
        cols = self.shape.value_cols(value_dim)
        return Chunk(self.shape.chunk_v, cols, 0, BankPadding(cols))

    # -- tiles -----------------------------------------------------------------------------------------------------

    def row(self, r: int, strip: int | None = None) -> Value:
        """Row in the block of this thread's ``r``-th row, with ``strip`` (by default the shape's) consecutive rows to a
        thread."""
        width = self.shape.row_strip if strip is None else strip
        number, within = divmod(r, width)
        return self.ty * width + (number * self.shape.threads_y * width + within)

    def score_tile(self, init: Value) -> RegisterTile:
        """S: one thread holds strips of consecutive columns."""
        shape = self.shape
        return RegisterTile(self, shape.rows, shape.block_kv // shape.threads_x, shape.strip(shape.block_kv), init)

    def output_tile(self, value_dim: int, init: Value) -> RegisterTile:
        """O, or another result of a product like ``P V``: one thread holds strips of consecutive columns."""
        shape = self.shape
        cols = shape.value_cols(value_dim) // shape.threads_x
        strip = shape.strip(value_dim)
        return RegisterTile(self, shape.rows, cols, strip if cols % strip == 0 else 1, init)

    def common_rows(self, name: str, init: Value) -> RowState:
        """A number for each row that all threads of the row share: in shared memory, unless the language lacks a
        subgroup barrier."""
        if self.rows_scratch is None and not self.target.subgroup_barriers:
            return RegisterRowState(self, init)
        return SharedRowState(self, name, init, common=True)

    def own_rows(self, name: str, init: Value) -> RowState:
        """A number for each row and thread."""
        if self.shape.sums_in_shared:
            return SharedRowState(self, name, init, common=False)
        return RegisterRowState(self, init)

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
        """Whether a condition holds in any thread of the subgroup, which reduces its rows together; without subgroups
        always true."""
        return self.b.subgroup_any(condition) if self.rows_scratch is None else self.b.const(True, bool_)

    def rows_barrier(self) -> None:
        """Wait for the threads that share this thread's rows: its subgroup if rows fit into one and the language has a
        subgroup barrier."""
        if self.rows_scratch is None and self.target.subgroup_barriers:
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
        """Row and column in a chunk of this thread's ``i``-th quad, and its number. Neighbouring lanes go along a row:
        eight lanes in eight rows would avoid bank conflicts of the stores, but reading eight cache lines at a time
        costs more."""
        b, threads, per_row = self.b, self.shape.threads, chunk.cols // QUAD
        number, steps = self.thread + i * threads, self._steps(chunk)
        if steps is None:
            row, quad = divmod_const(b, number, per_row)
            return row, quad * QUAD, number
        rows, quads = steps
        row, quad = divmod_const(b, self.thread, quads or per_row)
        return row + i * rows, (quad + i * quads) * QUAD, number

    def _steps(self, chunk: Chunk) -> tuple[int, int] | None:
        """Rows and quads from one of a thread's quads to its next, if they lie in one row or in one column, so that
        addresses differ by constants; else None."""
        threads, per_row, count = self.shape.threads, chunk.cols // QUAD, chunk.per_thread(self.shape.threads)
        lanes = per_row // count
        even = lanes * count == per_row and chunk.quads == count * threads
        if chunk.by_row and even and lanes >= LINE_QUADS:
            return 0, lanes
        return (threads // per_row, 0) if threads % per_row == 0 else None

    def row_starts(
        self, chunk: Chunk, source: Matrix, row: Value, order: Callable[[Value], Value] | None = None
    ) -> list[Row]:
        """Where the rows of a chunk that this thread fetches begin in memory; valid while only columns change.
        ``order`` maps a row of the chunk to a row from ``row`` on (default: the same)."""
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
                for variable, value in zip(stager.rotations[first + i], found, strict=True):
                    variable.value = value

    def _distance(self, chunk: Chunk, source: Matrix, cols: int) -> int | None:
        """Elements in memory from one of a thread's quads to its next, if known while tracing."""
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
        """Store a fetched chunk to the current stage, in fp32, multiplied by ``scale``.

        With ``finite``, Inf and NaN become zero. ``rotated`` is a rotation, the first column of the chunk, and the
        number of columns with padding. Returns the quads, each with the condition under which it belongs to the chunk
        (None: always).
        """
        b = self.b
        written: list[tuple[Value, Value | None]] = []
        for i in range(chunk.per_thread(self.shape.threads)):
            r, c, number = self._place(chunk, i)
            quad = b.cast(stager.registers[first + i].value, f32)
            if rotated is not None:
                rotary, col, cols = rotated
                cos, sin, *others = (variable.value for variable in stager.rotations[first + i])
                partners = [x for other in others for x in b.unpack(b.cast(other, f32))]
                quad = b.vector(rotary.rotate(b, b.unpack(quad), partners, (cos, sin), col + c, cols))
            if scale is not None:
                quad = quad * scale
            if finite:
                quad = b.vector([b.select(is_finite(b, x), x, b.const(0.0, f32)) for x in b.unpack(quad)])
            place = chunk.padding.at(c) + r if chunk.transposed else chunk.padding.at(r) + c
            index = stager.offset.value + place + chunk.start
            inside = number < chunk.quads if (i + 1) * self.shape.threads > chunk.quads else None
            with nullcontext() if inside is None else b.if_(inside):
                self._put(chunk, index, quad)
            written.append((quad, inside))
        return written

    def _put(self, chunk: Chunk, index: Value, quad: Value) -> None:
        if not chunk.transposed:
            self.b.store(self.stage, index, quad)
            return
        for e, x in enumerate(self.b.unpack(quad)):
            self.b.store(self.stage, index + e * chunk.padding.stride, x)

    def load_resident(self, memory: Value, source: Matrix, row: Value, scale: Value | None = None) -> None:
        """Bring a block of rows into shared memory, scaled and transposed."""
        b, quads = self.b, self.shape.block_q * self.head_cols // QUAD
        with b.loop(0, -(-quads // self.shape.threads), name="quad") as i:
            number = self.thread + i * self.shape.threads
            r, quad = divmod_const(b, number, self.head_cols // QUAD)
            with b.if_(number < quads):
                start, col = source.row_start(b, row + r), quad * QUAD
                value = b.cast(source.load_quad(b, start, col, self.head_cols), f32)
                if source.rotary is not None:
                    value = b.vector(self._rotated(source, row + r, start, col, b.unpack(value)))
                quad_values = value if scale is None else value * scale
                padding = self.shape.resident_padding
                for e, x in enumerate(b.unpack(quad_values)):
                    b.store(memory, padding.at(quad * QUAD) + (e * padding.stride + r), x)

    def _rotated(self, source: Matrix, row: Value, start: Value, col: Value, x: list[Value]) -> list[Value]:
        """A quad of Q, rotated."""
        b, rotary = self.b, source.rotary
        assert rotary is not None
        angles = rotary.fetch_angles(b, rotary.angles(b, row), col, QUAD)
        other = rotary.fetch_partners(b, source, start, col, self.head_cols, QUAD)
        partners = [] if other is None else b.unpack(b.cast(other, f32))
        return rotary.rotate(b, x, partners, angles, col, self.head_cols)

    # -- products --------------------------------------------------------------------------------------------------

    def multiply_scores(
        self, S: RegisterTile, offset: Value, chunk: Value, fetch: Callable[[], None] | None = None
    ) -> None:
        """``S += Q_chunk @ K_chunk^T`` out of the stage at ``offset``; ``fetch`` starts loading the next chunk."""
        self.multiply_chunks(S, self.q, offset, chunk, fetch)

    def multiply_chunks(
        self, tile: RegisterTile, resident: Value | None, offset: Value, chunk: Value,
        fetch: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """``tile += left_chunk @ right_chunk^T``; the left factor is ``resident`` or a chunk in the stage, too."""
        left = Operand(self.stage, offset, self.q_chunk.padding)
        if resident is not None:
            padding = self.shape.resident_padding
            left = Operand(resident, chunk * padding.at(self.shape.chunk_k), padding)
        right = Operand(self.stage, offset + self.k_chunk.start, self.k_chunk.padding)
        self.multiply(tile, left, right, self.shape.chunk_k, self.shape.prefetch_k, fetch)

    def store_p(self, S: RegisterTile, values: Sequence[Sequence[Value]]) -> None:
        """Store a part of P for all threads of its rows; the barrier of the next commit makes it visible. Columns lie
        thread by thread, a strip of each or all that there are."""
        strip, width = self.shape.row_strip, min(len(values[0]), S.strip)
        for c in range(len(values[0])):
            start = c // width * self.shape.threads_x * width + c % width
            for r in range(0, len(values), strip):
                column = self.b.vector([row[c] for row in values[r : r + strip]])
                self.b.store(self.p, self.shape.p_padding.at(self.tx * width + start) + self.row(r), column)

    def store_p_transposed(self, S: RegisterTile, values: Sequence[Sequence[Value]]) -> None:
        """Store P row by row, as the left factor of ``P^T @ right``."""
        for r, row in enumerate(values):
            for c in range(0, len(row), S.strip):
                place = self.shape.transposed_padding.at(self.row(r)) + S.col(c)
                self.b.store(self.p, place, self.b.vector(list(row[c : c + S.strip])))

    def value_order(self, number: Value) -> Callable[[Value], Value] | None:
        """Maps a row of the ``number``-th chunk of V to a key of the tile, in the order in which `store_p` stores P's
        columns. None if parts of P are entire strips, whose keys are consecutive."""
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
        """``O += P_chunk @ V_chunk`` out of the stage at ``offset``; ``fetch`` starts loading the next chunk."""
        self.multiply_rows(O, self.shape.p_padding, offset, self.value_cols, chunk, fetch)

    def multiply_rows(
        self, tile: RegisterTile, padding: BankPadding, offset: Value, cols: int, chunk: Value,
        fetch: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """``tile += P_chunk @ rows_chunk``, the rows having ``cols`` columns with padding."""
        left = Operand(self.p, chunk * padding.at(self.shape.chunk_v), padding)
        right = Operand(self.stage, offset, BankPadding(cols))
        self.multiply(tile, left, right, self.shape.chunk_v, self.shape.prefetch_v, fetch)

    def multiply(
        self, tile: RegisterTile, left: Operand, right: Operand, depth: int, prefetch: int,
        fetch: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        """``tile += left^T @ right``, of ``depth`` rows each. Operands are read ``prefetch`` rows ahead, the first of
        them before ``fetch`` is called."""
        b, shape, strip = self.b, self.shape, tile.row_strip
        acc = tile.values()
        rows, cols = range(0, len(acc), strip), range(0, len(acc[0]), tile.strip)
        left_base, right_base = left.start + self.ty * strip, right.start + self.tx * tile.strip

        def read(k: int) -> tuple[list[Value], list[Value]]:
            x: list[Value] = []
            for r in rows:
                x += b.unpack(b.load(left.memory, left_base + (left.padding.at(k) + r * shape.threads_y), strip))
            y: list[Value] = []
            for c in cols:
                place = right_base + (right.padding.at(k) + c * shape.threads_x)
                y += b.unpack(b.load(right.memory, place, tile.strip))
            return x, y

        waiting = [read(k) for k in range(prefetch)]
        if fetch is not None:
            fetch()
        for k in range(depth):
            if k + prefetch < depth:
                waiting.append(read(k + prefetch))
            x, y = waiting.pop(0)
            if shape.by_columns:
                for c, r in _serpentine(len(y), len(x)):
                    acc[r][c] = b.fma(y[c], x[r], acc[r][c])
            else:
                for r, c in _serpentine(len(x), len(y)):
                    acc[r][c] = b.fma(x[r], y[c], acc[r][c])
        tile.assign(acc)

    def multiply_values_guarded(self, O: RegisterTile, offset: Value, chunk: Value) -> None:
        """``O += P_chunk @ V_chunk`` where a key of weight zero adds nothing even if its value is Inf or NaN. Slow."""
        b, shape = self.b, self.shape
        with b.loop(0, shape.chunk_v, name="j") as j:
            for r in range(len(O.vars)):
                p = b.load(self.p, shape.p_padding.at(chunk * shape.chunk_v + j) + O.row(r))
                with b.if_(b.ne(p, 0.0)):
                    for c, variable in enumerate(O.vars[r]):
                        v = b.load(self.stage, offset + j * self.value_cols + O.col(c))
                        variable.value = b.fma(p, v, variable.value)


def _serpentine(rows: int, cols: int) -> list[tuple[int, int]]:
    """Row and column numbers of a tile, row by row, back and forth."""
    return [(r, c if r % 2 == 0 else cols - 1 - c) for r in range(rows) for c in range(cols)]
