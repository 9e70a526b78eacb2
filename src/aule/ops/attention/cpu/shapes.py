"""Block sizes of the CPU's kernels, from the vector registers, the shapes of a problem and tuned records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from aule import tuning
from aule.ops.attention.cpu.config import CpuShape
from aule.ops.attention.problem import AttentionProblem
from aule.target import Target
from aule.tile.vector.engine import VectorUnit
from aule.tuning import model

FORWARD = "attention.forward.cpu"
BACKWARD = "attention.backward.cpu"


def block_shape(count: int, heads: int, head_dim: int, unit: VectorUnit, target: Target) -> CpuShape:
    """Shape for ``count`` rows of each head, if these are many. Smaller blocks shorten the wait for the last task, if
    there are few."""
    panel = 2 * unit.lanes
    use = _find(target, FORWARD, unit, lambda use: heads * -(-count // use["block_q"]), head_dim=head_dim)
    return CpuShape(unit, most_rows(unit), panel, use["block_q"], _rounded(use["block_kv"], panel))


def backward_shape(problem: AttentionProblem, unit: VectorUnit, target: Target, pairs: bool) -> CpuShape:
    """Shape for the gradients. Blocks of keys are multiples of panels and of groups of rows: dK and dV are divided like
    rows."""
    rows, panel = most_rows(unit), 2 * unit.lanes
    step, heads = math.lcm(rows, panel), problem.batch * problem.heads_kv

    def blocks(use: Any) -> int:
        return heads * -(-problem.seq_kv // _rounded(use["block_kv"], step))

    use = _find(target, BACKWARD, unit, blocks, head_dim=max(problem.head_dim, problem.value_dim), pairs=pairs)
    return CpuShape(unit, rows, panel, use["block_q"], _rounded(use["block_kv"], step))


def grouped_shape(count: int, unit: VectorUnit, target: Target) -> CpuShape:
    """Shape for ``count`` rows of a key head, if these are few: as many vectors of keys as registers allow."""
    keys = tuning.use(target, "attention.cpu.grouped")
    if count <= most_rows_in_place(unit, target):
        rows = 1 << (count - 1).bit_length()
        return CpuShape(unit, rows, unit.lanes, rows, keys["in_place_keys"])
    groups = -(-count // most_rows(unit))
    rows = -(-count // groups)
    vectors = max(n for n in (1, 2, 4) if n == 1 or n * (rows + 1) + 1 <= unit.registers)
    panel = vectors * unit.lanes
    return CpuShape(unit, rows, panel, groups * rows, max(panel, keys["packed_keys"]))


def is_grouped(seq_q: int, group: int, target: Target) -> bool:
    """Whether the query heads that share K and V are computed together, and tasks share the keys."""
    few = seq_q <= tuning.use(target, "attention.cpu.grouped")["query_rows"]
    return few and group * seq_q <= most_grouped_rows(target)


def most_grouped_rows(target: Target) -> int:
    """Rows of all query heads that share K and V, up to which `grouped_shape` serves."""
    return int(tuning.use(target, "attention.cpu.grouped")["rows"])


def most_rows(unit: VectorUnit) -> int:
    """Rows that are multiplied with a panel of two vectors at a time.

    This follows from the registers: twelve rows of accumulators use 27 of 32 with the vectors of both factors, six rows
    15 of 16.
    """
    return 12 if unit.registers >= 32 else 6


def most_rows_in_place(unit: VectorUnit, target: Target) -> int:
    """Rows up to which K is multiplied in place rather than packed; a vector of dot products has two keys at least."""
    return min(int(tuning.use(target, "attention.cpu.grouped")["in_place_rows"]), unit.lanes // 2)


def multiplies_in_place(shape: CpuShape, unit_keys: bool) -> bool:
    """Whether a shape of `grouped_shape` multiplies K in place; ``unit_keys`` if rows of K have stride 1."""
    return shape.panel == shape.lanes and unit_keys


def kernel_options(target: Target) -> Mapping[str, Any]:
    """Tuned fields of `CpuConfig`."""
    return tuning.use(target, "attention.forward.cpu.kernel")


def wanted_splits(tasks: int, target: Target) -> int:
    """Parts into which to split each of ``tasks`` tasks, so that every thread has work and the last has little left."""
    wanted = model.tasks(target)
    return 1 if tasks >= wanted or target.compute_units <= 1 else -(-wanted // tasks)


def most_splits(blocks: int, target: Target) -> int:
    """Most splits of ``blocks`` blocks of keys."""
    return max(1, blocks // int(tuning.use(target, "attention.cpu.splits")["blocks"]))


def _find(target: Target, op: str, unit: VectorUnit, tasks: Callable[[Any], int], **facts: Any) -> Mapping[str, Any]:
    """The first record whose blocks leave every thread as many tasks as it asks for; ``tasks`` counts them."""
    threads = max(target.compute_units, 1)

    def fits(record: tuning.Record) -> bool:
        return bool(tasks(record.use) >= record.use["tasks"] * threads)

    record = tuning.find(target, op, facts | {"lanes": unit.lanes, "registers": unit.registers}, fits)
    assert record is not None  # the table ends with records that ask for no tasks
    return record.use


def _rounded(keys: int, step: int) -> int:
    """``keys`` rounded down to a multiple of ``step``, one step at least."""
    return step * max(1, keys // step)
