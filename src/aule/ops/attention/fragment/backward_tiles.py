"""Shared memory of a backward kernel on matrix units, the products of a tile, and the pass over tiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from aule.ir import Builder, Value
from aule.ir.types import i32
from aule.ops.attention.config import FragmentBackwardConfig
from aule.ops.attention.fragment.backward_scores import GradientKernel
from aule.ops.attention.prepass.tile_list import TileList, tile_at
from aule.target import Target
from aule.tile.common.matrix import Matrix
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments, FragmentTile
from aule.tile.fragment.partial_sums import PartialSums
from aule.tile.fragment.rope import exchange_bytes, transfer_of
from aule.tile.fragment.shape import RUN, row_stride
from aule.tile.fragment.transfer import Transfer

Body = Callable[[Value, tuple[Value, Value], Callable[[], None], Callable[[], None]], None]
"""Takes a tile, where its two matrices lie, and the two calls of `TileKernel.pass_over`."""


class TileKernel(GradientKernel):
    """Shared memory, and the pass of the workgroup's own rows over the others."""

    def __init__(self, b: Builder, config: FragmentBackwardConfig, target: Target) -> None:
        super().__init__(b, config, target, Fragments(b, target, config.shape, config.dtype))
        dims = config.head_dim, config.value_dim
        self.strides = tuple(row_stride(width) for width in self.widths)
        rows, width = self.shape.block_q, self.shape.block_kv
        self.own_start = (b.const(0, i32), b.const(rows * self.strides[0], i32))
        in_memory = 0 if self.shape.owns_in_registers else 1 if self.shape.resident_q else 2
        self.other_start = rows * sum(self.strides[:in_memory])
        self.resident: tuple[list[list[Value]], list[list[Value]]] = ([], [])
        # The first owned matrix as right factors, by row and column of blocks, if it is in no memory.
        self.right_factors: list[list[Value]] = []
        self.stage_size = width * sum(self.strides)
        # dS and P, by key, where they pass through shared memory.
        self.scores_stride = row_stride(width)
        self.ds_start = self.other_start + self.shape.stages * self.stage_size
        self.p_start = self.ds_start + rows * self.scores_stride
        self.size = self.shape.backward_elements(*dims, config.sums)
        if config.rope is not None:
            self.size = max(self.size, exchange_bytes(rows, self.widths[0]) // 2)
        self.memory = b.shared("tiles", self.engine.elem, self.size)
        self.partial_sums = PartialSums(self.engine) if self.shape.depth_parts > 1 else None

    def transfer(self, matrix: Matrix) -> Transfer:
        """A transfer of the others' rows. With one stage they wait in registers until everyone has read the last."""
        copies, width = self.shape.stages == 2, self.shape.result_columns(matrix.cols)
        return transfer_of(self.engine, matrix, self.shape.block_kv, self.memory, copies, width)

    # -- memory --------------------------------------------------------------------------------------------------------

    def load_own(self) -> None:
        """Load the rows that the workgroup owns; the first barrier of the loop makes them visible."""
        b, (first, second) = self.b, self.own
        if self.shape.owns_in_registers:
            for which in range(2):
                self._load_columns(which)
            return
        transfer = self._bring(first, self.own_start[0], self.widths[0])
        if self.config.sums:
            transfer.rewrite_own(self.own_start[0], self.finite)
        if self.shape.resident_q:
            self._load_resident(second, self.own_start[1])
        else:
            self._bring(second, self.own_start[1], self.widths[1])
        if self.shape.register_columns:
            if not self.shape.resident_q:
                b.barrier()
            count = min(self.shape.register_columns // SIZE, self.depths[0])
            self.resident[0].extend([self.left(0, k) for k in range(count)])

    def _bring(self, matrix: Matrix, start: Value, width: int = 0) -> Transfer:
        transfer = transfer_of(self.engine, matrix, self.shape.block_q, self.memory, width=width)
        transfer.clear_padding(start, 1)
        transfer.start(self.row0, start)
        transfer.finish(start)
        return transfer

    def _load_columns(self, which: int) -> None:
        """Load the subgroup's columns of an owned matrix into registers, through memory that later holds the others."""
        b, engine, shape = self.b, self.engine, self.shape
        assert shape.subgroups == shape.columns == shape.depth_parts, shape
        start, stride, width = b.const(0, i32), self.strides[which], self.result_width(which)
        transfer = self._bring(self.own[which], start, self.widths[which])
        if which == 0 and self.config.sums:
            transfer.rewrite_own(start, self.finite)
        b.barrier()
        at, rows = start + self._depth_start(which), range(0, shape.rows, engine.arrangement.height)
        for col in range(0, width, SIZE):
            self.resident[which].append([engine.load_left(self.memory, at, stride, row, col) for row in rows])
        if which == 0 and self.config.sums:
            cols = range(0, width, engine.arrangement.width)
            for row in range(0, shape.rows, SIZE):
                self.right_factors.append([engine.load_right(self.memory, at, stride, row, col) for col in cols])
        b.barrier()  # everyone has read it: the memory is free again

    def _load_resident(self, matrix: Matrix, start: Value) -> None:
        """Load rows into registers, through memory that later holds the others; as many columns at a time as fit."""
        b, engine, shape = self.b, self.engine, self.shape
        room = self.size - shape.block_q * self.strides[0]
        piece = (room // shape.block_q - RUN) // SIZE * SIZE
        for first in range(0, matrix.cols, piece):
            transfer = self._bring(matrix.columns(b, first, min(first + piece, matrix.cols)), start)
            own = start + self.score_row * transfer.stride
            b.barrier()
            for col in range(0, transfer.source.cols, SIZE):
                rows = range(0, self.score_rows, engine.arrangement.height)
                self.resident[1].append([engine.load_left(self.memory, own, transfer.stride, r, col) for r in rows])
            b.barrier()

    def stage(self, i: Value) -> tuple[Value, Value]:
        """Where the two other matrices lie for tile number ``i``."""
        start = self.b.const(self.other_start, i32)
        if self.shape.stages == 2:
            start = start + (i & 1) * self.stage_size
        return start, start + self.shape.block_kv * self.strides[0]

    def left(self, which: int, k: int) -> list[Value]:
        """Fragments of 16 columns of an owned matrix, one for each 16 rows of the subgroup."""
        if k < len(self.resident[which]):
            return self.resident[which][k]
        stride = self.strides[which]
        start = self.own_start[which] + self.score_row * stride + self._depth_start(which)
        rows = range(0, self.score_rows, self.engine.arrangement.height)
        return [self.engine.load_left(self.memory, start, stride, row, k * SIZE) for row in rows]

    # -- one tile ------------------------------------------------------------------------------------------------------

    def scores_of(self, which: int, at: Value, start: list[Value] | None = None) -> FragmentTile:
        """``own other^T``, this subgroup's part; sums start at ``start`` of a lane's columns, or 0."""
        b, engine, stride, cols = self.b, self.engine, self.strides[which], self.engine.arrangement.width
        tile = engine.tile(self.score_rows, self.own_width)
        if start is not None:
            tile.map(lambda _, r, c: start[c])
        at = at + self.score_col * stride + self._depth_start(which)
        parts = self.shape.depth_parts
        engine.multiply(
            tile,
            lambda k: self.left(which, k),
            lambda k, j: engine.load_right(self.memory, at, stride, k * SIZE, j * cols, transposed=True),
            self.depths[which] if parts == 1 else self.widths[which] // (SIZE * parts),
        )
        if self.partial_sums is not None:
            if which == 1:
                b.barrier()  # everyone has read the parts of S
            self.partial_sums.put(tile)
            b.barrier()
            self.partial_sums.add(tile)
        return tile

    def _depth_start(self, which: int) -> Value | int:
        """The first column of the subgroup's part of a product's depth."""
        parts = self.shape.depth_parts
        return 0 if parts == 1 else self.depth_part * (self.widths[which] // parts)

    def accumulate(self, result: FragmentTile, left: Callable[[int], list[Value]], which: int, at: Value) -> None:
        """``result += left other``, this subgroup's columns; ``left`` gives a column of fragments."""
        engine, stride, cols = self.engine, self.strides[which], self.engine.arrangement.width
        at = at + self.part * self.result_width(which)
        engine.multiply(
            result,
            left,
            lambda k, j: engine.load_right(self.memory, at, stride, k * SIZE, j * cols),
            self.shape.block_kv // SIZE,
        )

    def packed(self, values: list[list[Value]]) -> Callable[[int], list[Value]]:
        """This lane's elements as left factors, a column of fragments at a time."""
        factors = self.engine.pack(values, self.engine.left, "enlarged")
        return lambda k: [row[k] for row in factors]

    def share(self, values: list[list[Value]], start: int, exist: list[Value] | None = None, by: int = 0) -> None:
        """Store P^T or dS^T (or dS) for all subgroups, with zeros for keys that do not ``exist``; of the subgroups that
        have the same scores, the one whose part of the depth is number ``by``. The barrier before this tile's scores
        came after its last readers."""
        own = start + self.score_row * self.scores_stride + self.score_col
        with self.b.if_(self.b.eq(self.depth_part, by)) if self.shape.depth_parts > 1 else nullcontext():
            self.engine.put(self.memory, own, self.scores_stride, values, "enlarged", exist)

    def shared_factors(self, start: int, values: list[list[Value]]) -> Callable[[int], list[Value]]:
        """The subgroup's rows of what `share` stored, as left factors. Rows that it has computed entirely come first,
        from registers."""
        stride, height = self.scores_stride, self.engine.arrangement.height
        if self.score_rows == self.shape.rows:
            own, rows = start + self.subgroup_row * stride, range(0, self.shape.rows, height)
            return lambda k: [self.engine.load_left(self.memory, own, stride, row, k * SIZE) for row in rows]
        mine, parts = self.packed(values), range(1, self.shape.columns)
        others = [start + (self.subgroup_row + self.result_block(i)) * stride for i in parts]
        return lambda k: mine(k) + [
            self.engine.load_left(self.memory, at, stride, row, k * SIZE)
            for at in others for row in range(0, self.score_rows, height)
        ]  # fmt: skip

    # -- the pass over tiles -------------------------------------------------------------------------------------------

    def pass_over(
        self,
        transfers: tuple[Transfer, Transfer],
        limits: tuple[Value, ...],
        bodies: tuple[Body, ...],
        arrive: Callable[[Value, tuple[Value, Value]], None],
        start: Callable[[Value], None] | None = None,
        tiles: TileList | None = None,
    ) -> None:
        """Pass over all tiles, whose rows ``transfers`` fetch. What is called with a tile gets its place in the list of
        ``tiles``, if there is one.

        Parameters
        ----------
        limits, bodies : tuple
            Each body takes the tiles between two limits. It calls its third argument when there are registers for the
            next tile's rows, and its last when this tile's rows have been read (no-ops unless ``shape.late_fetch``).
        arrive : callable
            May change the rows that a thread has fetched before others see them.
        start : callable, optional
            Fetches more for a tile.
        """
        b, width, late = self.b, self.shape.block_kv, self.shape.late_fetch
        first, last = limits[0], limits[-1]

        def fetch(tile: Value) -> None:
            at = self.stage(tile)
            for transfer, place in zip(transfers, at, strict=True):
                transfer.start(tile_at(tiles, tile) * width, place)
            if start is not None:
                start(tile)

        def put(tile: Value) -> None:
            at = self.stage(tile)
            for transfer, place in zip(transfers, at, strict=True):
                transfer.finish(place)
            arrive(tile, at)

        for stage in range(self.shape.stages):
            for transfer, place in zip(transfers, self.stage(b.const(stage, i32)), strict=True):
                transfer.clear_padding(place, 1)
        with b.if_(first < last):
            fetch(first)
            if late:
                put(first)
        for low, high, body in zip(limits, limits[1:], bodies, strict=False):
            with b.loop(low, high, name="tile") as tile:

                def fetch_next(tile: Value = tile) -> None:
                    # The last tile is fetched again; a branch would cost moves of all prefetched registers.
                    fetch(b.min(tile + 1, last - 1))

                def put_next(tile: Value = tile) -> None:
                    b.barrier()  # everyone has read this one's
                    put(tile)  # the one stage that there is

                if late:
                    b.barrier()
                    body(tile, self.stage(tile), fetch_next, put_next)
                else:
                    if self.shape.stages == 1:
                        b.barrier()  # everyone is done with the tile before
                    put(tile)
                    b.barrier()
                    with b.if_(tile + 1 < last):
                        fetch(tile + 1)
                    body(tile, self.stage(tile), lambda: None, lambda: None)
        b.barrier()  # the next passage begins with the same memory
