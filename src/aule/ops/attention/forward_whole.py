"""The forward kernel for matrix units where every row keeps every key and all tiles are full.

It is that of `forward_fragment` with scores ahead, without the code for edges, which takes registers and most of the
time to compile; and it divides by multiplying.
"""

from __future__ import annotations

from dataclasses import replace

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import f32, i32
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.forward_fragment import FragmentForward, traced
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.tile_order import TileOrder
from aule.target import Target
from aule.tile.fragment import Fragments, FragmentTile
from aule.tile.matrix import Matrix, divmod_const

MOST_BLOCKS = 1 << 20
"""Below this, `quotient` is exact."""


def build_forward_whole(config: FragmentConfig, target: Target, name: str) -> KernelIR:
    """Trace the forward kernel of a configuration that is ``whole``."""
    return traced(_Forward, config, target, name)


def reciprocals(problem: AttentionProblem, blocks_q: int) -> dict[str, float]:
    """Parameters of the kernel, by name."""
    divisors = {"blocks_q": blocks_q, "heads_q": problem.heads_q, "group": problem.group}
    return {f"{name}_reciprocal": 1.0 / max(divisor, 1) for name, divisor in divisors.items()}


def quotient(b: Builder, x: Value, reciprocal: Value) -> Value:
    """``x // n`` of a number below `MOST_BLOCKS`, by the reciprocal of n in f32. With the half, x / n is at least
    1 / 2n away from a whole number, which is more than 2^-21 of it; two roundings take it by less than 2^-22."""
    return b.cast((b.cast(x, f32) + 0.5) * reciprocal, i32)


class _Forward(FragmentForward):
    trusting = True

    def _place(self, number: Value) -> tuple[Value, Value]:
        head = quotient(self.b, number, self.p.number("blocks_q_reciprocal", f32))
        return head, self.blocks - 1 - (number - head * self.blocks)

    def _heads(self) -> tuple[Value, Value, Value]:
        b, p = self.b, self.p
        batch = quotient(b, self.head_number, p.number("heads_q_reciprocal", f32))
        head = self.head_number - batch * self.heads
        return batch, head, quotient(b, head, p.number("group_reciprocal", f32))

    def _lay_out(self, target: Target) -> Fragments:
        self.q, self.k, self.v = (replace(m, whole=True) for m in (self.q, self.k, self.v))
        return super()._lay_out(target)

    def _order_tiles(self) -> None:
        b, piece = self.b, self.piece
        first = b.const(0, i32) if piece is None else piece.first
        last = divmod_const(b, self.scores.seq_kv, self.shape.block_kv)[0] if piece is None else piece.last
        self.tiles = TileOrder(b, first, first, last, b.const(0, i32))

    def run(self) -> None:
        b = self.b
        O, base, l = self._nothing()
        if self.config.sinks and self.piece is None:
            self._start_from_sink(base, l)
        q = self._load_q()
        self._start_tile(self.tiles.first, b.const(0, i32), whole=True)
        S = self.engine.tile(self.shape.rows, self.shape.block_kv)
        self._score_ahead(S, self.tiles.first, q, whole=True)
        with b.loop(self.tiles.inner_first, self.tiles.inner_last, name="tile") as tile:
            at = self.tiles.inside(tile)
            self._add_values(at, S, O, base, l, self._arrive_values(at, whole=True), whole=True)
            self._score_ahead(S, self._following(at), q, whole=True)
        self._finish(O, base, l)

    def _store(self, O: FragmentTile, values: list[list[Value]], out: Matrix) -> None:
        super()._store(O, values, replace(out, whole=True))
