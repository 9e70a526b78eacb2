"""The forward kernel on matrix units for problems without edges: every row keeps every key, and all tiles are full.

It is the kernel of `fragment.forward` with prefetched scores, less the code for edge tiles, which takes registers and
most of the time to compile. It also divides by multiplying with reciprocals.
"""

from __future__ import annotations

from dataclasses import replace

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import f32, i32
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.fragment.forward import FragmentForward, build_forward_fragment
from aule.ops.attention.fragment.tile_order import TileOrder
from aule.ops.attention.problem import AttentionProblem
from aule.target import Target
from aule.tile.common.matrix import Matrix, divmod_const
from aule.tile.fragment.engine import Fragments, FragmentTile

MOST_BLOCKS = 1 << 20
"""Blocks below which `quotient` is exact."""


def build_forward_full_tiles(config: FragmentConfig, target: Target, name: str) -> KernelIR:
    """Trace the forward kernel of a configuration with ``full_tiles``."""
    return build_forward_fragment(config, target, name, _Forward)


def reciprocals(problem: AttentionProblem, blocks_q: int) -> dict[str, float]:
    """Reciprocals that the kernel divides by, by parameter name."""
    divisors = {"blocks_q": blocks_q, "heads_q": problem.heads_q, "group": problem.group}
    return {f"{name}_reciprocal": 1.0 / max(divisor, 1) for name, divisor in divisors.items()}


def quotient(b: Builder, x: Value, reciprocal: Value) -> Value:
    """``x // n`` for x below `MOST_BLOCKS`, by the f32 reciprocal of n. (x + 0.5) / n is at least 1 / 2n away from any
    integer, more than 2^-21 of it, and two roundings move it by less than 2^-22."""
    return b.cast((b.cast(x, f32) + 0.5) * reciprocal, i32)


class _Forward(FragmentForward):
    values_finite = True

    def _find_block(self, number: Value) -> tuple[Value, Value]:
        head = quotient(self.b, number, self.p.number("blocks_q_reciprocal", f32))
        return head, self.blocks - 1 - (number - head * self.blocks)

    def _find_heads(self) -> tuple[Value, Value, Value]:
        b, p = self.b, self.p
        batch = quotient(b, self.head_number, p.number("heads_q_reciprocal", f32))
        head = self.head_number - batch * self.heads
        return batch, head, quotient(b, head, p.number("group_reciprocal", f32))

    def _lay_out(self, target: Target) -> Fragments:
        self.q, self.k, self.v = (replace(m, in_bounds=True) for m in (self.q, self.k, self.v))
        return super()._lay_out(target)

    def _order_tiles(self) -> None:
        b, piece = self.b, self.piece
        first, last = b.const(0, i32), divmod_const(b, self.scores.seq_kv, self.shape.block_kv)[0]
        if piece is not None:
            first, last = piece.tiles(first, last)
        self.tiles = TileOrder(b, first, first, last, b.const(0, i32))

    def run(self) -> None:
        b = self.b
        O, rows = self._start_output()
        q = self._load_q()
        self._start_tile(self.tiles.first, b.const(0, i32), full=True)
        S = self.engine.tile(self.shape.rows, self.shape.block_kv)
        self._prefetch_scores(S, self.tiles.first, q, full=True)
        with b.loop(self.tiles.inner_first, self.tiles.inner_last, name="tile") as tile:
            at = self.tiles.inside(tile)
            self._add_values(at, S, O, rows, self._await_values(at, full=True), full=True)
            self._prefetch_scores(S, self._following(at), q, full=True)
        self._finish(O, rows)

    def _store(self, O: FragmentTile, values: list[list[Value]], out: Matrix) -> None:
        super()._store(O, values, replace(out, in_bounds=True))
