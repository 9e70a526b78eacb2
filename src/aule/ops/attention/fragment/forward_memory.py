"""Prefetch of K and V through shared memory in a forward kernel on matrix units, and Inf and NaN in V.

With two stages, K and V of the next tile are fetched while this one is worked on, with one barrier a tile. With one
stage, V is fetched during the first product and the next K during the second.

A dropped key has a weight of zero, and zero times Inf or NaN is NaN. So V of edge tiles is checked when it arrives.
"""

from __future__ import annotations

from aule.ir import Value, Var
from aule.ir.types import u32
from aule.ops.attention.fragment.forward_block import ForwardBlock
from aule.ops.attention.fragment.tile_order import TilePlace
from aule.tile.fragment.nonfinite import check_finite
from aule.tile.fragment.transfer import Transfer


class TileMemory(ForwardBlock):
    """A block with K and V in shared memory, prefetched a tile ahead.

    ``full`` tells that no row drops any key of a tile, so that nothing is checked and no row is past the end.
    """

    memory: Value
    keys: Transfer
    values: Transfer
    k_start: Value
    v_start: Value
    k_size: int
    v_size: int
    values_finite = False
    """V of edge tiles is known to be finite."""

    def _clear_padding(self) -> None:
        self.keys.clear_padding(self.k_start, self.shape.stages)
        self.values.clear_padding(self.v_start, self.shape.stages)

    def _memory_of(self, stage: Value) -> tuple[Value, Value]:
        """Where K and V of a stage lie."""
        if self.shape.stages == 1:
            return self.k_start, self.v_start
        return self.k_start + stage * self.k_size, self.v_start + stage * self.v_size

    def _start_tile(self, tile: Value, stage: Value, full: bool) -> None:
        """Prefetch K of a tile and, with several stages, V."""
        k_at, v_at = self._memory_of(stage)
        self.keys.start(tile * self.shape.block_kv, k_at, full)
        if self.shape.stages > 1:
            self.values.start(tile * self.shape.block_kv, v_at, full)

    def _await_keys(self, at: TilePlace, full: bool) -> Value | None:
        """Wait for K of a tile and prefetch what comes next. Returns whether V holds Inf or NaN, where known."""
        b = self.b
        if self.shape.stages == 1:
            self._await_only_keys(at.tile, full)
            return None
        k_at, v_at = self._memory_of(at.stage)
        self.keys.finish(k_at)
        self.values.finish(v_at)
        nonfinite = self._barrier(v_at, full)
        with b.if_(at.more):
            self._start_tile(at.next, at.stage ^ 1, full)
        return nonfinite

    def _await_only_keys(self, tile: Value, full: bool) -> None:
        """Wait for K of a tile and prefetch its V, with one stage."""
        self.keys.finish(self.k_start)
        self.b.barrier()
        self.values.start(tile * self.shape.block_kv, self.v_start, full)

    def _await_values(self, at: TilePlace, full: bool) -> Value | None:
        """Wait for V of a tile and prefetch K of the next, with one stage. Returns as `_await_keys`."""
        _, v_at = self._memory_of(at.stage)
        self.values.finish(v_at)
        nonfinite = self._barrier(v_at, full)
        if self.shape.prefetch_scores:
            self._start_tile(self._following(at), at.stage, full)
            return nonfinite
        with self.b.if_(at.more):
            self._start_tile(at.next, at.stage, full)
        return nonfinite

    def _following(self, at: TilePlace) -> Value:
        """The next tile, or the last one again: a branch would cost moves of all prefetched registers in every tile."""
        return self.b.select(at.more, at.next, at.tile)

    def _barrier(self, v_at: Value, full: bool) -> Value | None:
        """Wait for all threads. Returns whether V of an edge tile holds Inf or NaN; None where that does not matter."""
        b = self.b
        if full or self.values_finite:
            b.barrier()
            return None
        found = b.var(b.const(0, u32), "found")
        self._check_own_values(v_at, found)
        self._publish()
        return b.workgroup_any(b.ne(found.value, 0))

    def _publish(self) -> None:
        """Make what this thread has stored in shared memory visible; a barrier follows."""

    def _check_own_values(self, v_at: Value, found: Var) -> None:
        """Set bits of ``found`` if V holds Inf or NaN in what this thread has fetched."""
        self.values.own_runs(v_at, lambda run: check_finite(self.b, self.engine.elem, run, found))
