"""The forward kernel over warpgroups whose workgroups stay: some subgroups copy, the others compute.

A workgroup takes one block of rows after the other. Its copiers run ahead: while the last tiles of a block are worked
on and its rows are stored, Q and the first keys of the next one arrive. Q has ``q_stages`` slots, K and V ``stages``
each; two copiers take turns with K and two with V, so that each has a tile under way. Every slot has two mbarriers:
copiers arrive at one when it is full, computing threads at the other when they have read it.

Rows that drop a key must not see Inf or NaN in its value. Copiers look for them in V of edge tiles; a block that has
any is computed again at the end, in guarded tiles (`forward.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import PANEL, Role, i32, i64, u32, u64
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.fragment.forward_block import ForwardBlock
from aule.ops.attention.warpgroup.forward import Forward, State
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.parameters import workgroup_number
from aule.target import Target
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments, factor_elem
from aule.tile.fragment.nonfinite import check_finite
from aule.tile.fragment.shape import FragmentShape
from aule.tile.warpgroup.copier import Copier, CopierTransfer
from aule.tile.warpgroup.engine import Warpgroups

COPIERS = 4
_COPIER_REGISTERS = {8: 40, 12: 32}
"""Registers of a copying thread, by the number of computing subgroups."""
_BITS = 31
"""Blocks of a workgroup of which it is known which ones to compute again; of later ones, all are if one is."""


def stays(config: FragmentConfig) -> bool:
    """Whether the kernel serves a configuration: nothing is added to scores, no weight is dropped, and operands are
    neither packed nor paged."""
    plain = config.packed is False and config.paging == "none" and not config.everywhere and not config.tiles_listed
    return plain and not config.dropout and config.value_dim <= config.head_dim


def build_forward_roles(config: FragmentConfig, target: Target, name: str) -> KernelIR:
    """Trace the kernel of a configuration whose shape has copiers."""
    shape = config.shape
    computing, copying, launched = _registers(shape, target)
    b = Builder(name, shape.threads + shape.copiers * shape.lanes, shape.lanes, launched)
    slots = Slots(b, config)
    b.barrier()
    roles = Role(shape.subgroups, computing), Role(1, copying, crews=shape.copiers)
    with b.roles(*roles) as (compute, copy):
        with compute:
            _compute(b, config, target, slots)
        with copy:
            _copy(b, config, target, slots)
    return b.finish()


def _registers(shape: FragmentShape, target: Target) -> tuple[int, int, int]:
    """Registers of a computing and of a copying thread, and of each thread at first."""
    copying = _COPIER_REGISTERS[shape.subgroups]
    file = target.registers_per_unit or 65536
    total = file // shape.lanes
    first = total // (shape.subgroups + shape.copiers) // 8 * 8
    computing = ((shape.subgroups + shape.copiers) * first - shape.copiers * copying) // shape.subgroups // 8 * 8
    return min(computing, 240), copying, first


class Slots:
    """The slots of shared memory and their mbarriers, and the numbers of a role that goes through them in order."""

    def __init__(self, b: Builder, config: FragmentConfig) -> None:
        self.b, self.shape = b, config.shape
        self.parameters = Parameters(b, config, i64 if config.index64 else i32)
        shape, stages = config.shape, config.shape.stages
        assert shape.copiers == COPIERS and stages in (2, 4) and stays(config)
        q, k, v = shape.shared_elements(config.head_dim, config.value_dim)
        self.elem = factor_elem(config.factor or config.dtype)
        self.memory = b.shared("tiles", self.elem, shape.tile_elements(config.head_dim, config.value_dim))
        self.mbarriers = b.shared("mbarriers", u64, 2 * (shape.q_stages + 2 * stages))
        self.nonfinite = b.shared("nonfinite", u32, stages)
        self.sizes = {"q": q, "k": k, "v": v}
        self.counts = {"q": shape.q_stages, "k": stages, "v": stages}
        self.starts = {"q": 0, "k": shape.q_stages * q, "v": shape.q_stages * q + stages * k}
        self.first = {"q": 0, "k": 2 * shape.q_stages, "v": 2 * (shape.q_stages + stages)}
        for kind, count in self.counts.items():
            copying = shape.copiers * shape.lanes if kind == "q" else shape.lanes
            for slot in range(count):
                b.mbarrier_init(self.mbarriers, self.first[kind] + slot, threads=copying)
                b.mbarrier_init(self.mbarriers, self.first[kind] + count + slot, threads=shape.threads)


@dataclass(frozen=True)
class Place:
    """A slot of Q, K or V for the ``number``-th block or tile of a workgroup."""

    slots: Slots
    kind: str
    number: Value

    @property
    def slot(self) -> Value:
        return self.number & (self.slots.counts[self.kind] - 1)

    @property
    def start(self) -> Value:
        """Its first element."""
        return self.slot * self.slots.sizes[self.kind] + self.slots.starts[self.kind]

    @property
    def _parity(self) -> Value:
        return self.number >> self.slots.counts[self.kind].bit_length() - 1 & 1

    def await_full(self) -> None:
        """Wait until its copies have arrived."""
        at = self.slot + self.slots.first[self.kind]
        self.slots.b.mbarrier_wait(self.slots.mbarriers, at, self._parity)

    def await_empty(self) -> None:
        """Wait until nobody reads what it held before."""
        at = self.slot + (self.slots.first[self.kind] + self.slots.counts[self.kind])
        self.slots.b.mbarrier_wait(self.slots.mbarriers, at, self._parity ^ 1)

    def filled(self) -> None:
        """Tell that this thread's copies have arrived."""
        self.slots.b.mbarrier_arrive(self.slots.mbarriers, self.slot + self.slots.first[self.kind])

    def emptied(self) -> None:
        """Tell that this thread has read it."""
        at = self.slot + (self.slots.first[self.kind] + self.slots.counts[self.kind])
        self.slots.b.mbarrier_arrive(self.slots.mbarriers, at)


# -- copying -----------------------------------------------------------------------------------------------------------


class _Copies(ForwardBlock):
    """The copies of a block."""

    def __init__(self, b: Builder, config: FragmentConfig, target: Target, number: Value, slots: Slots) -> None:
        self.slots = slots
        super().__init__(b, config, target, number=number, parameters=slots.parameters)

    def _lay_out(self, target: Target) -> Fragments:
        """Copiers need no engine but for where rows are."""
        engine = Warpgroups(self.b, target, self.shape, self.config.factor or self.config.dtype)
        self.copier = Copier(self.b, self.shape, engine.elem)
        return engine

    def run(self, turn: Value, done: Value) -> None:
        """Copy this subgroup's part of Q, and its share of the tiles of K or of V, every other one."""
        b, slots, shape = self.b, self.slots, self.shape
        me = b.subgroup_id() - shape.subgroups
        part = shape.block_q // COPIERS
        place = Place(slots, "q", turn)
        place.await_empty()
        queries = self.copier.panels(self.q, part, slots.memory, panel_rows=shape.block_q)
        first = me * part
        queries.start(self.row0 + first, place.start + first * PANEL)
        self._finish_copies()
        place.filled()
        with b.loop((me ^ done) & 1, self.tiles.count, 2, name="tile") as i:
            tile = self.tiles.tile(i)
            with b.if_(me < 2):
                place = Place(slots, "k", done + i)
                self._copy(place, self.copier.panels(self.k, shape.block_kv, slots.memory), tile)
                place.filled()
            with b.else_():
                place = Place(slots, "v", done + i)
                values = self.copier.panels(self.v, shape.block_kv, slots.memory)
                self._copy(place, values, tile)
                with b.if_(i < self.tiles.edges):
                    self._look(place, values)
                place.filled()

    def _copy(self, place: Place, rows: CopierTransfer, tile: Value) -> None:
        b, block = self.b, self.shape.block_kv
        place.await_empty()
        first = tile * block
        with b.if_(first + block > self.scores.seq_kv):
            rows.start(first, place.start)
        with b.else_():
            rows.start(first, place.start, full=True)
        self._finish_copies()

    def _finish_copies(self) -> None:
        self.b.async_wait(0)
        self.b.warpgroup_publish()

    def _look(self, place: Place, values: CopierTransfer) -> None:
        """Note whether V of an edge tile holds Inf or NaN."""
        b = self.b
        found = b.var(b.const(0, u32), "found")
        values.own_runs(place.start, lambda run: check_finite(b, self.slots.elem, run, found))
        bad = b.subgroup_any(b.ne(found.value, 0))
        with b.if_(b.eq(b.lane_id(), 0)):
            b.store(self.slots.nonfinite, place.slot, b.select(bad, b.const(1, u32), b.const(0, u32)))


def _copy(b: Builder, config: FragmentConfig, target: Target, slots: Slots) -> None:
    """The copiers: all blocks of the workgroup."""
    turn, done = b.var(b.const(0, i32), "turn"), b.var(b.const(0, i32), "done")
    with b.loop(*_blocks(b, slots), name="number") as number:
        block = _Copies(b, config, target, number, slots)
        block.run(turn.value, done.value)
        turn.value, done.value = turn.value + 1, done.value + block.tiles.count


# -- computing ---------------------------------------------------------------------------------------------------------


class _Block(Forward):
    """A block of rows, whose Q, K and V copiers put into slots."""

    def __init__(
        self, b: Builder, config: FragmentConfig, target: Target, number: Value, slots: Slots, turn: Value
    ) -> None:
        self.slots, self.queries = slots, Place(slots, "q", turn)
        super().__init__(b, config, target, number=number, parameters=slots.parameters)

    def _make_memory(self, engine: Warpgroups) -> None:
        self.memory, self.q_start = self.slots.memory, self.queries.start
        self.k_start, self.v_start = (self.b.const(self.slots.starts[kind], i32) for kind in "kv")

    def _clear_padding(self) -> None:
        """Do nothing: all slots are clear already."""

    def clear_slots(self) -> None:
        """Set the padding of all slots to zero, which copies do not touch."""
        b, slots = self.b, self.slots
        queries = self.engine.panels(self.q, self.shape.block_q, self.memory)
        for transfer, kind in ((queries, "q"), (self.keys, "k"), (self.values, "v")):
            transfer.clear_padding(b.const(slots.starts[kind], i32), slots.counts[kind])
        b.warpgroup_publish()
        b.barrier()

    def run_roles(self, done: Value) -> Value:
        """Pass over the keys and store the block's rows. Returns bits that are not zero if V of a tile in which rows
        drop keys holds Inf or NaN; then the rows are not right yet."""
        b, engine, config, shape = self.b, self.engine, self.config, self.shape
        rows = self._start_rows()
        O, S = engine.tile(SIZE, config.value_dim), engine.tile(SIZE, shape.block_kv)
        empty = b.fragment_fill(engine.left, 0.0)
        P = [b.var(empty) for _ in range(shape.block_kv // SIZE)]
        state = State(S, O, P, rows)
        if config.sinks:
            self._start_from_sink(rows)
        self.found = b.var(b.const(0, u32), "found")
        self.queries.await_full()
        with b.if_(self.count > 0):
            self._pass_over_slots(state, done)
        self._finish(O, rows)
        b.subgroup_barrier()
        self.queries.emptied()
        return self.found.value

    def _pass_over_slots(self, state: State, done: Value) -> None:
        """All tiles: scores of one while O's share of the one before is added."""
        b, zero = self.b, self.b.const(0, i32)
        b.comment("S = Q K^T of the first tile")
        self._await_scores(state, done, None)
        with b.if_(self.edges > 0):
            row_terms = self._modify_slot(state, zero, edge=True)
            self._softmax(state, self._tile(zero), row_terms)
        with b.else_():
            row_terms = self._modify_slot(state, zero, edge=False)
            self._softmax(state, self._tile(zero), row_terms)
        one = b.const(1, i32)
        with b.loop(one, self.edges, name="edge") as i:
            self._step(state, i, done, edge=True)
        with b.loop(b.max(one, self.edges), self.count, name="tile") as i:
            self._step(state, i, done, edge=False)
        last = Place(self.slots, "v", done + (self.count - 1))
        last.await_full()
        b.warpgroup_fence()
        self._start_values(state, last.start)
        b.warpgroup_wait()
        self._look(last, self.count - 1)
        last.emptied()

    def _step(self, state: State, i: Value, done: Value, edge: bool) -> None:
        b = self.b
        b.comment("S = Q K^T, and O = O + P V of the tile before")
        before = Place(self.slots, "v", done + (i - 1))
        self._await_scores(state, done + i, before)
        row_terms = self._modify_slot(state, i, edge)
        self._softmax(state, self._tile(i), row_terms, running=True)
        self._look(before, i - 1)
        before.emptied()

    def _await_scores(self, state: State, number: Value, before: Place | None) -> None:
        """Compute the scores of a tile, and start to add O's share of the one ``before``."""
        b, keys = self.b, Place(self.slots, "k", number)
        keys.await_full()
        b.warpgroup_fence()
        self._start_scores(state.S, keys.slot)
        if before is not None:
            before.await_full()
            b.warpgroup_fence()
            self._start_values(state, before.start)
        b.warpgroup_wait(int(before is not None))
        keys.emptied()

    def _modify_slot(self, state: State, i: Value, edge: bool) -> list[Value]:
        key0 = self._tile(i) * self.shape.block_kv
        row_terms = self._modify_everywhere(state.S, key0)
        if edge:
            self._modify_edge(state.S, key0, [])
        return row_terms

    def _look(self, values: Place, i: Value) -> None:
        """Note what the copiers have found in V of an edge tile."""
        with self.b.if_(i < self.edges):
            self.found.value = self.found.value | self.b.load(self.slots.nonfinite, values.slot)


class _Guarded(_Block):
    """A block that is computed again, with all of the memory, after the copiers have ended."""

    def run(self) -> None:
        """Copy and pass over the keys in guarded tiles, and store the block's rows."""
        b, engine, shape = self.b, self.engine, self.shape
        O, rows = self._start_output()
        S = engine.tile(SIZE, shape.block_kv)
        empty = b.fragment_fill(engine.left, 0.0)
        state = State(S, O, [b.var(empty) for _ in range(shape.block_kv // SIZE)], rows)
        zero = b.const(0, i32)
        b.barrier()  # nobody reads the block before any more
        self._load_queries()
        self._start_tile(self._tile(zero), zero, full=False)
        self._pass_guarded(state, self.count)
        self._finish(O, rows)


def _compute(b: Builder, config: FragmentConfig, target: Target, slots: Slots) -> None:
    """The computing subgroups: all blocks of the workgroup."""
    turn, done = b.var(b.const(0, i32), "turn"), b.var(b.const(0, i32), "done")
    flagged = b.var(b.const(0, u32), "flagged")
    _Block(b, config, target, workgroup_number(b), slots, turn.value).clear_slots()
    with b.loop(*_blocks(b, slots), name="number") as number:
        block = _Block(b, config, target, number, slots, turn.value)
        found = block.run_roles(done.value)
        with b.if_(b.ne(found, 0)):
            flagged.value = flagged.value | _bit(b, turn.value)
        turn.value, done.value = turn.value + 1, done.value + block.count
    with b.if_(b.workgroup_any(b.ne(flagged.value, 0))):
        again = b.var(b.const(0, i32), "again")
        with b.loop(*_blocks(b, slots), name="number") as number:
            with b.if_(b.workgroup_any(b.ne(flagged.value & _bit(b, again.value), 0))):
                _Guarded(b, config, target, number, slots, b.const(0, i32)).run()
            again.value = again.value + 1


def _bit(b: Builder, turn: Value) -> Value:
    """The bit of a block; late ones share the last."""
    return b.const(1, u32) << b.cast(b.min(turn, _BITS), u32)


def _blocks(b: Builder, slots: Slots) -> tuple[Value, Value, Value]:
    """First, end and step of the blocks of this workgroup."""
    return workgroup_number(b), slots.parameters.number("blocks"), b.group_count(0) * b.group_count(1)
