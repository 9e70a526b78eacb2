"""The forward kernel over warpgroups whose workgroups stay: some subgroups copy, the others compute.

A workgroup takes one block of rows after the other. Its copiers run ahead: while the last tiles of a block are worked
on and its rows are stored, Q and the first keys of the next one arrive in their slots (`forward_slots.py`). Either one
subgroup starts tensor copies (`forward_tensor_copies.py`), or four copy themselves (`forward_copiers.py`).

Rows that drop a key must not see Inf or NaN in its value. V of edge tiles is searched for them; a block that has any is
computed again at the end, in guarded tiles (`forward.py`).
"""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import Role, i32, u32
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.warpgroup.forward import Forward, State
from aule.ops.attention.warpgroup.forward_copiers import copy_by_subgroups
from aule.ops.attention.warpgroup.forward_slots import Place, Slots
from aule.ops.attention.warpgroup.forward_tensor_copies import copy_tensors
from aule.ops.shared.parameters import workgroup_number
from aule.target import Target
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import FragmentShape
from aule.tile.warpgroup.engine import Warpgroups

_COPIER_REGISTERS = {8: 40, 12: 32}
"""Registers of a thread that copies itself, by the number of computing subgroups."""
_STARTER_REGISTERS = 24
"""Registers of a thread that starts tensor copies."""
_BITS = 31
"""Blocks of a workgroup of which it is known which ones to compute again; of later ones, all are if one is."""


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
            (copy_tensors if slots.tensors else copy_by_subgroups)(b, config, target, slots)
    return b.finish()


def _registers(shape: FragmentShape, target: Target) -> tuple[int, int, int]:
    """Registers of a computing and of a copying thread, and of each thread at first."""
    copying = _STARTER_REGISTERS if shape.copies == "tma" else _COPIER_REGISTERS[shape.subgroups]
    file = target.registers_per_unit or 65536
    total = file // shape.lanes
    first = total // (shape.subgroups + shape.copiers) // 8 * 8
    computing = ((shape.subgroups + shape.copiers) * first - shape.copiers * copying) // shape.subgroups // 8 * 8
    return min(computing, 240), copying, first


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

    def _order_tiles(self) -> None:
        super()._order_tiles()
        self.ascending = False  # copiers bring edge tiles first

    def _clear_padding(self) -> None:
        """Do nothing: all slots are clear already."""

    def clear_slots(self) -> None:
        """Set the padding of all slots to zero, which copying subgroups do not touch."""
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
        if self.slots.tensors:
            b.warpgroup_publish()  # O passed through the slot
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
        """Note whether V of an edge tile holds Inf or NaN, which copying subgroups have looked for."""
        with self.b.if_(i < self.edges):
            if self.slots.tensors:
                self._check_own_values(values.start, self.found)
            else:
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
    if not slots.tensors:
        _Block(b, config, target, workgroup_number(b), slots, turn.value).clear_slots()
    with b.loop(*slots.blocks(), name="number") as number:
        block = _Block(b, config, target, number, slots, turn.value)
        found = block.run_roles(done.value)
        with b.if_(b.ne(found, 0)):
            flagged.value = flagged.value | _bit(b, turn.value)
        turn.value, done.value = turn.value + 1, done.value + block.count
    with b.if_(b.workgroup_any(b.ne(flagged.value, 0))):
        again = b.var(b.const(0, i32), "again")
        with b.loop(*slots.blocks(), name="number") as number:
            with b.if_(b.workgroup_any(b.ne(flagged.value & _bit(b, again.value), 0))):
                _Guarded(b, config, target, number, slots, b.const(0, i32)).run()
            again.value = again.value + 1


def _bit(b: Builder, turn: Value) -> Value:
    """The bit of a block; late ones share the last."""
    return b.const(1, u32) << b.cast(b.min(turn, _BITS), u32)
