"""The kernel of dK and dV over warpgroups, which with ``config.sums`` also sums dQ.

A workgroup owns a block of keys, 64 to a warpgroup, and passes over the query rows:

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ += dS K

Products read everything from shared memory but for P^T and dS^T, which become left factors without leaving registers.
Only dQ needs all keys of the block: dS passes through shared memory, and each warpgroup computes a part of the tile's
rows or of dQ's columns.

Products run while a subgroup does something else. For each tile it computes

    P of the scores           while dP is multiplied
    dS                        while dV is multiplied
    dS to shared memory       while dK is multiplied
    meets the others          while the next scores are multiplied
    dQ, added to its sums
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import PANEL, f32, i32, u32, u64
from aule.ops.attention.config import FragmentBackwardConfig
from aule.ops.attention.fragment.backward_scores import KeysKernel
from aule.ops.attention.prepass.tile_list import TileList, keep, tile_at
from aule.target import Target
from aule.tile.common.matrix import divmod_const, padded
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import FragmentTile
from aule.tile.warpgroup.engine import ROWS, SUBGROUPS, PanelFactor, PanelShape, PanelTransfer, Warpgroups


def build_backward_warpgroup(config: FragmentBackwardConfig, target: Target) -> KernelIR:
    """Trace the kernel of dK and dV."""
    assert config.shape.stages == (4 if config.shape.columns == 1 else 2)
    b = Builder("flash_attention_backward_keys", config.shape.threads, config.shape.lanes, config.shape.registers)
    if target.overlap:
        b.launch_await()
    kernel = (_Narrow if config.shape.columns == 1 else _Wide)(b, config, target)
    with b.if_(kernel.exists):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class _Pass:
    """The pass over the rows of one query head. Tiles are counted in the order in which they are taken."""

    head: Value
    last: Value
    """The number of the tile after the last."""
    tile_list: TileList | None
    """The list of tiles, with a mask."""
    end: Value
    """The key after the block's last."""
    transfers: tuple[PanelTransfer, PanelTransfer]
    """Fetch Q and dO."""
    fetched: list[Var]
    """Prefetched `row_numbers` of a tile."""

    def number(self, tile: Value) -> Value:
        """The number of a tile's rows; past the last tile, any."""
        return tile_at(self.tile_list, tile)


@dataclass(frozen=True)
class _Sites:
    """Query rows of a lane's columns, keys of its rows, and `row_numbers` of the columns."""

    columns: list[Value]
    keys: list[Value]
    base: list[Value]
    delta: list[Value]

    def place(self, r: int, c: int) -> tuple[Value, Value]:
        return self.columns[c], self.keys[r]


class _Keys(KeysKernel, ABC):
    """Shared memory, products, and the pass over the query rows."""

    engine: Warpgroups

    def __init__(self, b: Builder, config: FragmentBackwardConfig, target: Target) -> None:
        super().__init__(b, config, target, Warpgroups(b, target, config.shape, config.dtype))
        shape, engine = self.shape, self.engine
        rows, width = shape.block_q, shape.block_kv
        self.own_shapes = [PanelShape(rows, cols) for cols in self.widths]
        self.other_shapes = [PanelShape(width, cols) for cols in self.widths]
        self.ds_shape = PanelShape(rows, width)
        self.own_start = (b.const(0, i32), b.const(self.own_shapes[0].elements, i32))
        self.other_start = sum(panels.elements for panels in self.own_shapes)
        self.stage_size = sum(panels.elements for panels in self.other_shapes)
        self.ds_start = self.other_start + shape.stages * self.stage_size
        self.memory = b.shared("tiles", engine.elem, shape.backward_elements(config.head_dim, config.value_dim))
        self.open_block()
        self.mbarrier = b.shared("mbarrier", u64, 1)
        b.mbarrier_init(self.mbarrier)
        self.parity = b.var(b.const(0, i32), "parity")
        # The warpgroup's keys, and its number among those that share them.
        down, self.part = divmod_const(b, engine.group, shape.columns)
        self.subgroup_row = down * ROWS + (engine.subgroup & 3) * SIZE
        self.group_row = down * ROWS
        # A warpgroup computes 64 rows of dQ, all columns or some panels of them.
        blocks = width // ROWS
        across = shape.subgroups // SUBGROUPS // blocks
        self.dq_cols = self.depths[0] * SIZE
        if across > 1:
            self.dq_cols = -(-self.dq_cols // (across * PANEL)) * PANEL
        right, self.dq_panel = divmod_const(b, engine.group, blocks)
        self.dq_row, self.dq_col = self.dq_panel * ROWS, right * self.dq_cols
        self.k_panel = right * (self.dq_cols // PANEL)
        self.limited = config.sums and across * self.dq_cols != self.depths[0] * SIZE
        self.S = [engine.tile(shape.rows, ROWS // shape.columns) for _ in range(blocks)]
        self.dP = engine.tile(shape.rows, ROWS // shape.columns)
        self.dQ = engine.tile(shape.rows, self.dq_cols)
        self.dK, self.dV = (engine.tile(shape.rows, self.result_width(which)) for which in (0, 1))

    def run(self) -> None:
        b = self.b
        first, last, end = self.row_tiles()
        self._load_own()
        with b.loop(*self.members(), name="member") as member:
            head = self.kv_head * self.group + member
            tile_list = self.listed(head)
            if tile_list is not None:
                first, last = b.const(0, i32), tile_list.count
            own_first, own_last = self.own_tiles(member, first, last)
            with b.if_(own_first < own_last):
                self._pass(head, own_first, own_last, end, tile_list)
        self.finish(self.dK, self.dV)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _load_own(self) -> None:
        """Load K and V; the first barrier of a pass makes them visible."""
        engine, shape = self.engine, self.shape
        # dQ may be computed from entire panels of K.
        widths = padded(self.widths[0], PANEL) if self.limited else self.widths[0], self.widths[1]
        for which, (matrix, start, width) in enumerate(zip(self.own, self.own_start, widths, strict=True)):
            transfer = engine.panels(matrix, shape.block_q, self.memory, width)
            transfer.clear_padding(start, 1)
            transfer.start(self.row0, start)
            transfer.finish(start)
            if which == 0:
                transfer.rewrite_own(start, self.finite)

    def _stage(self, tile: Value) -> tuple[Value, Value]:
        """Where Q and dO of a tile lie."""
        start = (tile & (self.shape.stages - 1)) * self.stage_size + self.other_start
        return start, start + self.other_shapes[0].elements

    def _fetch(self, head_pass: _Pass, tile: Value) -> None:
        b, row0, at = self.b, head_pass.number(tile) * self.shape.block_kv, self._stage(tile)

        def start(full: bool) -> None:
            for transfer, place in zip(head_pass.transfers, at, strict=True):
                transfer.start(row0, place, full)

        with b.if_(row0 + self.shape.block_kv <= self.scores.seq_q):
            start(full=True)
        with b.else_():
            start(full=False)

    def _land(self, head_pass: _Pass, tile: Value, numbers: Value) -> None:
        """Wait for a tile's rows and the row numbers of tile ``numbers``; the next barrier makes them visible."""
        for transfer, place in zip(head_pass.transfers, self._stage(tile), strict=True):
            transfer.finish(place)
        self.put_numbers(numbers, head_pass.fetched)
        self.b.warpgroup_publish()

    # -- products ------------------------------------------------------------------------------------------------------

    def _start(
        self, tile: FragmentTile, left: PanelFactor | list[Value], right: PanelFactor, depth: int, fresh: bool
    ) -> None:
        """Start a product in a group of its own."""
        b = self.b
        b.warpgroup_fence()
        self.engine.start_product(tile.vars[0], left, right, depth, fresh)
        b.warpgroup_commit()

    def _start_scores(self, tile: Value, which: int, part: int) -> None:
        """``K Q^T``, or ``V dO^T``, of 64 of a tile's rows."""
        own = PanelFactor(self.memory, self.own_start[which] + self.group_row * PANEL, self.own_shapes[which])
        start = self._stage(tile)[which] + self.part * (ROWS // self.shape.columns * PANEL)
        other = PanelFactor(self.memory, start, self.other_shapes[which], True, part * ROWS)
        self._start((self.S[part], self.dP)[which], own, other, self.depths[which], fresh=True)

    def _start_result(self, tile: Value, which: int, part: int, left: PanelFactor | list[Value]) -> None:
        """``dK += dS^T Q``, or ``dV += P^T dO``, of 64 of a tile's rows."""
        panels = self.other_shapes[which]
        first = self.part * (self.result_width(which) // PANEL * panels.stride)
        other = PanelFactor(self.memory, self._stage(tile)[which] + first, panels, row=part * ROWS)
        self._start((self.dK, self.dV)[which], left, other, ROWS // SIZE, fresh=False)

    def _start_queries(self, ds_at: Value) -> None:
        left = PanelFactor(self.memory, ds_at + self.dq_panel * self.ds_shape.stride, self.ds_shape, transposed=True)
        k_at = self.own_start[0] + self.k_panel * self.own_shapes[0].stride
        right = PanelFactor(self.memory, k_at, self.own_shapes[0])
        self._start(self.dQ, left, right, self.shape.block_q // SIZE, fresh=True)

    # -- the pass over tiles -------------------------------------------------------------------------------------------

    def _pass(self, head: Value, first: Value, last: Value, end: Value, tile_list: TileList | None) -> None:
        """Add the share of one query head's rows to the block's dK and dV, and the block's share to their dQ."""
        b, engine, scores, config = self.b, self.engine, self.scores, self.config
        width = self.shape.block_kv
        queries = self.matrix("q", head, scores.seq_q, config.head_dim, 0)
        results = self.matrix("do", head, scores.seq_q, config.value_dim, 3)
        transfers = (
            engine.panels(queries, width, self.memory, self.widths[0]),
            engine.panels(results, width, self.memory, self.widths[1]),
        )
        head_pass = _Pass(head, last, tile_list, end, transfers, [b.var(b.const(0.0, f32)) for _ in range(2)])
        for stage in range(self.shape.stages):
            for transfer, place in zip(transfers, self._stage(b.const(stage, i32)), strict=True):
                transfer.clear_padding(place, 1)
        self._pass_over(head_pass, first)
        b.barrier()  # the next pass uses the same memory

    def _pass_over(self, head_pass: _Pass, first: Value) -> None:
        """Pass over all tiles from the first on."""
        b, last, prefetch = self.b, head_pass.last, self.shape.stages // 2
        self.fetch_numbers(head_pass.head, head_pass.number(first), head_pass.fetched)
        self._fetch(head_pass, first)
        self._land(head_pass, first, first)
        for further in range(1, prefetch):
            with b.if_(first + further < last):
                self._fetch(head_pass, first + further)
                self._land(head_pass, first + further, first)
        b.barrier()
        self.fetch_numbers(head_pass.head, head_pass.number(first + 1), head_pass.fetched)
        with b.if_(first + prefetch < last):
            self._fetch(head_pass, first + prefetch)
        self._start_scores(first, 0, 0)
        b.warpgroup_wait(0)
        with b.loop(first, last - 1, name="tile") as tile:
            self._tile(head_pass, tile, more=True)
        self._tile(head_pass, last - 1, more=False)

    @abstractmethod
    def _tile(self, head_pass: _Pass, tile: Value, more: bool) -> None:
        """Take one tile, the first scores of which are there; ``more`` if another follows. No product is left running:
        the compiler would not track it into the next iteration, and wait for each."""

    def _sites(self, head_pass: _Pass, tile: Value, part: int) -> _Sites:
        """Rows, keys and row numbers of this lane's elements of 64 rows of a tile."""
        shape, S = self.shape, self.S[part]
        col = self.part * (ROWS // shape.columns) + part * ROWS
        base, delta = (self.columns(S, self.numbers_at(tile) + (col + i * shape.block_kv)) for i in range(2))
        columns = [head_pass.number(tile) * shape.block_kv + col + S.col(c) for c in range(len(base))]
        keys = [self.row0 + self.subgroup_row + S.row(r) for r in range(self.engine.rows_held)]
        return _Sites(columns, keys, base, delta)

    def _partial(self, head_pass: _Pass, tile: Value) -> Value:
        if head_pass.tile_list is not None:
            return tile < head_pass.tile_list.partial
        return self.partial(tile * self.shape.block_kv, self.row0 + self.group_row, ROWS, head_pass.end)

    def _bits(self, head_pass: _Pass, tile: Value, partial: Value) -> list[Var]:
        """The keys that a boolean mask keeps of each 64 rows of a tile, as bits; fetched only if it is ``partial``."""
        b = self.b
        if head_pass.tile_list is None or self.config.mask != "bits":
            return []
        found = [b.var(b.const(0, u32), "bits") for _ in self.S]
        with b.if_(partial):
            for variable, word in zip(
                found, head_pass.tile_list.bits(head_pass.number(tile), self.subgroup_row >> 4), strict=True
            ):
                variable.value = word
        return found

    def _weigh(
        self, head_pass: _Pass, S: FragmentTile, at: _Sites, partial: Value, bits: Var | None
    ) -> list[list[Value]] | None:
        """Replace S by P as `weigh`. Weights that dropout drops become negative, which takes no registers."""
        b = self.b
        slope = self.weigh(S, head_pass.head, at.place, partial, lambda r, c: at.base[c])
        if bits is not None:
            with b.if_(partial):
                # The bits of this warpgroup's columns.
                keep(S, [bits.value >> b.cast(self.part * (32 // self.shape.columns), u32)], 0.0)
        kept = self.kept(head_pass.head, at.place, len(at.keys), len(at.columns), "rows")
        if kept is not None:
            S.map(lambda x, r, c: b.select(kept[r][c], x, -x))
        return slope

    def _applied(self, p: list[list[Value]]) -> list[list[Value]]:
        """P with zeros for weights that dropout drops. NaN stays."""
        if not self.config.dropout:
            return p
        zero = self.b.const(0.0, f32)
        return [[self.b.select(x < 0.0, zero, x) for x in row] for row in p]

    def _gradients(
        self, p: list[list[Value]], at: _Sites, slope: list[list[Value]] | None, partial: Value
    ) -> list[list[Value]]:
        """dS, after the product for dP; guarded only if keys may be dropped."""
        b, dP, everywhere = self.b, self.dP, self.config.everywhere
        kept = None
        if self.config.dropout:
            kept = [[x >= 0.0 for x in row] for row in p]
            p = [[b.abs(x) for x in row] for row in p]
        ds = self.differentiate(p, dP.values(), lambda r, c: at.delta[c], slope, kept, guarded=everywhere)
        if everywhere:
            return ds
        dP.assign(ds)
        zero = b.const(0.0, f32)
        with b.if_(partial):
            dP.map(lambda x, r, c: b.select(b.eq(p[r][c], 0.0), zero, x))
        return dP.values()

    def _add_queries(self, head_pass: _Pass, tile: Value) -> None:
        row = head_pass.number(tile) * self.shape.block_kv + self.dq_row + (self.engine.subgroup & 3) * SIZE
        self.put_queries(self.dQ, head_pass.head, row, self.dq_col, self.limited)


class _Narrow(_Keys):
    """Every warpgroup has its own keys, and P and dS become left factors in registers.

    Warpgroups meet once a tile, in two halves. A thread arrives when its dS and the rows that it has fetched for the
    tile after the next are in shared memory. It starts the next scores, whose rows were there a tile ago, and only then
    waits for the others' dS.

    What this orders: a thread that has waited in tile n knows that all have arrived there. They have written dS of tile
    n, numbers of tile n + 1 and rows of tile n + 2, and no product of tile n - 1 is running, so that tile's memory is
    free. Hence four stages of rows (n and n + 1, which may be read, n + 2, and n + 3, which is being fetched) and two
    of dS. Numbers have two places, too: those of n + 1, stored in tile n, overwrite those of n - 1, which everybody
    read before arriving in tile n - 1, where the writer has waited.
    """

    def _tile(self, head_pass: _Pass, tile: Value, more: bool) -> None:
        b, parts = self.b, len(self.S)
        partial = self._partial(head_pass, tile)
        bits = self._bits(head_pass, tile, partial)
        for part in range(parts):
            further = part + 1 < parts
            self._start_scores(tile, 1, part)
            if further:
                self._start_scores(tile, 0, part + 1)
            self._part(head_pass, tile, part, partial, bits[part] if bits else None, further)
            if further:
                b.warpgroup_wait(2)
        if more:
            self._land(head_pass, tile + 2, tile + 1)
        else:
            b.warpgroup_publish()
        b.mbarrier_arrive(self.mbarrier)
        if more:
            self._start_scores(tile + 1, 0, 0)
        b.mbarrier_wait(self.mbarrier, 0, self.parity.value)
        self.parity.value = self.parity.value ^ 1
        if more:
            self.fetch_numbers(head_pass.head, head_pass.number(tile + 2), head_pass.fetched)
            with b.if_(tile + 3 < head_pass.last):
                self._fetch(head_pass, tile + 3)
        if self.config.sums:
            b.comment("dQ = dQ + dS K")
            self._start_queries(self._ds_at(tile))
        b.warpgroup_wait(0)
        if self.config.sums:
            self._add_queries(head_pass, tile)

    def _part(self, head_pass: _Pass, tile: Value, part: int, partial: Value, bits: Var | None, further: bool) -> None:
        """Add the share of 64 rows to dK and dV, and store their dS; ``further`` if the next scores are running."""
        b, engine, S, at = self.b, self.engine, self.S[part], self._sites(head_pass, tile, part)
        b.comment("P^T = exp2(K Q^T - lse)")
        slope = self._weigh(head_pass, S, at, partial, bits)
        p = S.values()
        b.comment("dV = dV + P^T dO")
        self._start_result(tile, 1, part, engine.pack(self._applied(p), engine.left)[0])
        b.comment("dS^T = P^T * (V dO^T - delta)")
        b.warpgroup_wait(1 + further)
        factors = engine.pack(self._gradients(p, at, slope, partial), engine.left)[0]
        b.comment("dK = dK + dS^T Q")
        self._start_result(tile, 0, part, factors)
        if self.config.sums:
            start = self._ds_at(tile) + part * self.ds_shape.stride
            engine.put_factors(self.memory, start, self.ds_shape, self.subgroup_row, b.const(0, i32), factors)

    def _ds_at(self, tile: Value) -> Value:
        """Where dS of a tile lies. The next is written while products read the last."""
        return (tile & 1) * self.ds_shape.elements + self.ds_start


class _Wide(_Keys):
    """Two warpgroups have the same keys. Each computes half of a tile's scores, by rows, and half of the results, by
    columns, as one alone has too few registers. P and dS pass through shared memory."""

    def _tile(self, head_pass: _Pass, tile: Value, more: bool) -> None:
        b, engine, S, at = self.b, self.engine, self.S[0], self._sites(head_pass, tile, 0)
        partial = self._partial(head_pass, tile)
        bits = self._bits(head_pass, tile, partial)
        ds_at, p_at = self.ds_start, self.ds_start + self.ds_shape.elements
        col = self.part * (ROWS // 2)
        self._start_scores(tile, 1, 0)
        b.comment("P^T = exp2(K Q^T - lse)")
        slope = self._weigh(head_pass, S, at, partial, bits[0] if bits else None)
        p = S.values()
        factors = engine.pack(self._applied(p), engine.left)[0]
        engine.put_factors(self.memory, b.const(p_at, i32), self.ds_shape, self.subgroup_row, col, factors)
        b.comment("dS^T = P^T * (V dO^T - delta)")
        b.warpgroup_wait(0)
        factors = engine.pack(self._gradients(p, at, slope, partial), engine.left)[0]
        engine.put_factors(self.memory, b.const(ds_at, i32), self.ds_shape, self.subgroup_row, col, factors)
        if more:
            self._land(head_pass, tile + 1, tile + 1)
        else:
            b.warpgroup_publish()
        b.barrier()
        p_factor, ds_factor = (PanelFactor(self.memory, b.const(start, i32), self.ds_shape) for start in (p_at, ds_at))
        b.comment("dV = dV + P^T dO, dK = dK + dS^T Q, dQ = dQ + dS K")
        self._start_result(tile, 1, 0, p_factor)
        self._start_result(tile, 0, 0, ds_factor)
        if self.config.sums:
            self._start_queries(b.const(ds_at, i32))
        if more:
            self._start_scores(tile + 1, 0, 0)
        b.warpgroup_wait(int(more))
        if more:
            b.mbarrier_arrive(self.mbarrier)  # this tile's rows are read
        if self.config.sums:
            self._add_queries(head_pass, tile)
        if more:
            b.mbarrier_wait(self.mbarrier, 0, self.parity.value)
            self.parity.value = self.parity.value ^ 1
            self.fetch_numbers(head_pass.head, head_pass.number(tile + 2), head_pass.fetched)
            with b.if_(tile + 2 < head_pass.last):
                self._fetch(head_pass, tile + 2)
            b.warpgroup_wait(0)
