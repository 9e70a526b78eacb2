"""Block sizes of the CPU's kernels, from the vector registers and the shapes of a problem."""

from __future__ import annotations

import math

from aule.ops.attention.cpu.config import CpuShape
from aule.ops.attention.problem import AttentionProblem
from aule.tile.vector.engine import VectorUnit


def block_shape(count: int, heads: int, head_dim: int, unit: VectorUnit, threads: int) -> CpuShape:
    """Shape for ``count`` rows of each head, if these are many.

    Twelve rows by two vectors of accumulators use 27 of 32 registers, six rows by two vectors 15 of 16.
    """
    rows = 12 if unit.registers >= 32 else 6
    panel = 2 * unit.lanes
    block_kv = panel * max(1, (256 if head_dim <= 128 else 128) // panel)
    # If tasks are few, smaller blocks shorten the wait for the last one.
    least = {192: 32, 96: 8, 48: 8} if head_dim <= 128 else {96: 8, 48: 8}
    block_q = next((n for n in least if heads * -(-count // n) >= least[n] * threads), 24)
    return CpuShape(unit, rows, panel, block_q, block_kv)


def backward_shape(problem: AttentionProblem, unit: VectorUnit, threads: int, pairs: bool) -> CpuShape:
    """Shape for the gradients. Blocks of keys are multiples of panels and of groups of rows: dK and dV are divided like
    rows."""
    rows = 12 if unit.registers >= 32 else 6
    panel = 2 * unit.lanes
    step = math.lcm(rows, panel)
    narrow = max(problem.head_dim, problem.value_dim) <= 128
    block_kv = step * max(1, (96 if narrow else 48) // step)
    block_q = 4 * rows if unit.registers >= 32 else 8 * rows
    # Larger blocks if there are enough of them for the threads; more rows only for pairs, which take half the bytes.
    blocks = problem.batch * problem.heads_kv * -(-problem.seq_kv // (2 * block_kv))
    if narrow and unit.lanes * unit.registers >= 512 and blocks >= 8 * threads:
        block_q, block_kv = (2 if pairs else 1) * block_q, 2 * block_kv
    return CpuShape(unit, rows, panel, block_q, block_kv)


def grouped_shape(count: int, unit: VectorUnit) -> CpuShape:
    """Shape for ``count`` rows of a key head, if these are few: as many vectors of keys as registers allow."""
    most = 12 if unit.registers >= 32 else 6
    if count <= most_rows_in_place(unit):
        rows = 1 << (count - 1).bit_length()
        return CpuShape(unit, rows, unit.lanes, rows, 256)
    groups = -(-count // most)
    rows = -(-count // groups)
    vectors = max(n for n in (1, 2, 4) if n == 1 or n * (rows + 1) + 1 <= unit.registers)
    panel = vectors * unit.lanes
    return CpuShape(unit, rows, panel, groups * rows, max(panel, 64))


def most_rows_in_place(unit: VectorUnit) -> int:
    """Rows up to which K is multiplied in place rather than packed."""
    return min(8, unit.lanes // 2)


def multiplies_in_place(shape: CpuShape, unit_keys: bool) -> bool:
    """Whether a shape of `grouped_shape` multiplies K in place; ``unit_keys`` if rows of K have stride 1."""
    return shape.panel == shape.lanes and unit_keys
