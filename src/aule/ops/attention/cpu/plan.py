"""From a problem to the launches that compute it on a CPU. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from aule.errors import KernelError
from aule.ir.types import SCALARS
from aule.ops.attention.config import Columns
from aule.ops.attention.cpu.backward import build_backward, build_delta, build_gather
from aule.ops.attention.cpu.combine import build_combine
from aule.ops.attention.cpu.config import (
    CombineConfig,
    CpuBackwardConfig,
    CpuConfig,
    CpuDeltaConfig,
    CpuShape,
    GatherConfig,
    PackConfig,
)
from aule.ops.attention.cpu.forward import build_forward
from aule.ops.attention.cpu.pack import build_pack
from aule.ops.attention.plan import problem_scalars, rope_options, row_scalars, score_options, view_scalars
from aule.ops.attention.precision import refused
from aule.ops.attention.problem import AttentionProblem
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.tile.math import LN2
from aule.tile.vector import VectorUnit, has_pairs, vector_unit, work_type
from aule.view import TensorView

GROUPED_ROWS = 16
"""Up to so many query rows, the heads that share K and V are taken together, and the keys are shared by tasks."""


def plan_forward(problem: AttentionProblem, views: dict[str, TensorView], target: Target) -> StepPlan:
    """Plan a forward pass over host arrays.

    Parameters
    ----------
    views : dict
        As for the GPU's plan: ``q``, ``k``, ``v``, ``o`` and, where present, ``mask``, ``bias``, ``alibi``, ``sinks``.
    """
    if problem.precision is not None:
        raise refused(problem, target)
    if math.prod(problem.out_shape[:3]) == 0:
        return StepPlan(())
    work = work_type(SCALARS[problem.dtype])
    unit = vector_unit(target, work)
    grouped = _grouped(problem)
    unit_strides = tuple(v.strides[3] == 1 or v.shape[3] == 1 for v in (views[n] for n in "qkvo"))
    pairs = not grouped and has_pairs(target, SCALARS[problem.dtype])
    in_place = problem.dtype == work.name and unit_strides[2] and problem.value_dim % unit.lanes == 0
    threads = max(target.compute_units, 1)
    scalars = problem_scalars(problem) | view_scalars(views)
    values: Any = "direct" if in_place else "workspace"
    if grouped:
        # Read once or a few times, V is converted as it is read.
        values = "direct" if unit_strides[2] and problem.value_dim % unit.lanes == 0 else "scratch"
        shape = grouped_shape(problem.group * problem.seq_q, unit)
        splits, split_keys = _splits(problem, shape, threads)
    else:
        shape = block_shape(problem.seq_q, problem.batch * problem.heads_q, problem.head_dim, unit, threads)
        splits, split_keys = 1, problem.seq_kv
    in_rows = dotted(shape, unit_strides) and problem.rope is None  # one that is rotated is copied anyway
    config = CpuConfig(
        **score_options(problem),
        **rope_options(views),
        unit=unit_strides,
        shape=shape,
        grouped=grouped,
        split=splits > 1,
        panels=("none" if in_rows else "scratch") if grouped else "workspace",
        values=values,
        pairs=pairs,
        key_pairs=grouped and in_rows and has_pairs(target, SCALARS[problem.dtype]),
        mask_columns=_columns(views.get("mask")),
        bias_columns=_columns(views.get("bias")),
    )
    heads_kv = problem.batch * problem.heads_kv
    if grouped:
        numbers = scalars | {"splits": splits, "split_keys": split_keys}
        steps = [Step(config, build_forward, (heads_kv * splits, 1, 1), numbers)]
        if splits == 1:
            return StepPlan(tuple(steps))
        combine = CombineConfig(problem.dtype, problem.value_dim, shape, problem.return_lse, unit_strides[3])
        rows = problem.batch * problem.heads_q * problem.seq_q
        steps.append(Step(combine, build_combine, (rows, 1, 1), numbers))
        return StepPlan(tuple(steps), {"partial": rows * splits * (shape.padded(problem.value_dim) + shape.lanes)})

    blocks_q, blocks_kv = -(-problem.seq_q // shape.block_q), -(-problem.seq_kv // shape.block_kv)
    numbers = scalars | {"blocks_q": blocks_q, "blocks_kv": blocks_kv}
    keys = heads_kv * blocks_kv * shape.block_kv
    if problem.packed is not None:
        keys = problem.heads_kv * (problem.packed[1] + problem.batch * shape.block_kv)  # `packed_keys` says where
    workspace = {"panels": keys * -(-problem.head_dim // config.step)}
    if not in_place:
        workspace["values"] = keys // config.step * shape.padded(problem.value_dim)
    pack = PackConfig(
        problem.dtype,
        problem.head_dim,
        problem.value_dim,
        shape,
        not in_place,
        unit_strides[1:3],
        problem.packed is not None,
        pairs,
        problem.rope,
        config.rope_unit,
    )
    forward = Step(config, build_forward, (problem.batch * problem.heads_q * blocks_q, 1, 1), numbers)
    return StepPlan((Step(pack, build_pack, (heads_kv * blocks_kv, 1, 1), numbers), forward), workspace)


def _grouped(problem: AttentionProblem) -> bool:
    """Whether the forward pass takes the few query rows of all heads that share keys together, and none is rounded."""
    return problem.seq_q <= GROUPED_ROWS and problem.group * problem.seq_q <= 8 * GROUPED_ROWS


def plan_alone(problem: AttentionProblem, views: dict[str, TensorView], target: Target) -> Step:
    """The forward pass as one launch without a workspace: each task packs what it needs. For looking at and for kernels
    that somebody launches by hand; `plan_forward` is faster where several blocks of rows share their keys."""
    *_, step = plan_forward(problem, views, target).steps
    if isinstance(step.config, CombineConfig):
        raise KernelError("[flash_attention] expected a problem of more query rows for a kernel of its own")
    values = "scratch" if step.config.values == "workspace" else step.config.values
    return replace(step, config=replace(step.config, panels="scratch", values=values))


def plan_backward(problem: AttentionProblem, views: dict[str, TensorView], target: Target) -> StepPlan:
    """Plan the gradients of q, k and v.

    Parameters
    ----------
    views : dict
        As for the forward pass, and ``do``, ``dq``, ``dk``, ``dv``. The log-sum-exp of the forward pass is the buffer
        ``lse``, in the type that is computed in; so is ``ds``, where the gradient of what is added to the scores is
        wanted: ``[batch, heads_q, seq_q, seq_kv]``, zero before.
    """
    if math.prod(problem.out_shape[:3]) * problem.key_rows == 0:
        return StepPlan(())
    work = work_type(SCALARS[problem.dtype])
    unit = vector_unit(target, work)
    strides = {
        name: view.strides[3] == 1 or view.shape[3] == 1 for name, view in views.items() if len(view.strides) == 4
    }
    heads_kv = problem.batch * problem.heads_kv
    # Pairs are of rotated rows that were rounded, which the forward pass over few rows does not do: its log-sum-exps
    # are those of other scores, and with large ones P would be off by percents.
    pairs = has_pairs(target, SCALARS[problem.dtype]) and not (problem.rope is not None and _grouped(problem))
    threads = max(target.compute_units, 1)
    shape = _backward_shape(problem, unit, threads, pairs)
    blocks_kv = -(-problem.seq_kv // shape.block_kv)
    # Each further task to a head costs a part of dQ; as many as keep every thread busy to the end are enough.
    splits = 1 if heads_kv >= 4 * threads or threads == 1 else min(blocks_kv, -(-4 * threads // heads_kv))
    numbers = (
        problem_scalars(problem)
        | view_scalars(views)
        | {
            "splits": splits,
            "blocks_kv": blocks_kv,
            "dq_factor": problem.scale,
            # dK is made with Q', which holds the scale and log2(e), or the scale over the cap; with pairs, with Q.
            "dk_factor": problem.scale if pairs else problem.softcap if problem.softcap > 0 else LN2,
        }
    )
    direct_keys = problem.dtype == work.name and strides["k"] and problem.head_dim % unit.lanes == 0
    config = CpuBackwardConfig(
        **(score_options(problem) | {"lse": False}),
        **rope_options(views),
        unit=(strides["q"], strides["k"], strides["v"], strides["do"]),
        shape=shape,
        scores="ds" in views,
        pairs=pairs,
        direct_keys=direct_keys and problem.rope is None,
        mask_columns=_columns(views.get("mask")),
        bias_columns=_columns(views.get("bias")),
    )
    delta = CpuDeltaConfig(problem.dtype, problem.value_dim, shape, (strides["o"], strides["do"]))
    rows = math.prod(problem.out_shape[:3])
    each, heads_q = numbers | row_scalars(problem), math.prod(problem.out_shape[:2])
    steps = (
        Step(delta, build_delta, (heads_q, 1, 1), each),
        Step(config, build_backward, (heads_kv * splits, 1, 1), numbers),
        Step(GatherConfig(problem.dtype, problem.head_dim, shape), build_gather, (heads_q, 1, 1), each),
    )
    return StepPlan(steps, {"delta": rows, "dq_parts": rows * splits * shape.padded(problem.head_dim)})


def _columns(view: TensorView | None) -> Columns:
    if view is None or view.strides[3] == 0:
        return "same"
    return "unit" if view.strides[3] == 1 else "any"


def block_shape(count: int, heads: int, head_dim: int, unit: VectorUnit, threads: int) -> CpuShape:
    """Many rows, ``count`` to a head. Twelve rows by two vectors fill 27 of 32 registers, six by two 15 of 16."""
    rows = 12 if unit.registers >= 32 else 6
    panel = 2 * unit.lanes
    block_kv = panel * max(1, (256 if head_dim <= 128 else 128) // panel)
    # Few tasks: smaller blocks, so that no thread waits long for the last.
    least = {192: 32, 96: 8, 48: 8} if head_dim <= 128 else {96: 8, 48: 8}
    block_q = next((n for n in least if heads * -(-count // n) >= least[n] * threads), 24)
    return CpuShape(unit, rows, panel, block_q, block_kv)


def _backward_shape(problem: AttentionProblem, unit: VectorUnit, threads: int, pairs: bool) -> CpuShape:
    """Blocks of keys are whole panels and whole groups of rows both: dK and dV are cut like rows."""
    rows = 12 if unit.registers >= 32 else 6
    panel = 2 * unit.lanes
    step = math.lcm(rows, panel)
    narrow = max(problem.head_dim, problem.value_dim) <= 128
    block_kv = step * max(1, (96 if narrow else 48) // step)
    block_q = 4 * rows if unit.registers >= 32 else 8 * rows
    # Larger blocks, unless they were too few for the threads (Zen 4: 1% in fp32; more rows lose there, but pairs take
    # half the bytes and gain 2% with both).
    blocks = problem.batch * problem.heads_kv * -(-problem.seq_kv // (2 * block_kv))
    if narrow and unit.lanes * unit.registers >= 512 and blocks >= 8 * threads:
        block_q, block_kv = (2 if pairs else 1) * block_q, 2 * block_kv
    return CpuShape(unit, rows, panel, block_q, block_kv)


def most_dotted(unit: VectorUnit) -> int:
    """Up to so many rows K is better not packed."""
    return min(8, unit.lanes // 2)


def grouped_shape(count: int, unit: VectorUnit) -> CpuShape:
    """Few rows: as many vectors of keys at a time as registers allow."""
    most = 12 if unit.registers >= 32 else 6
    if count <= most_dotted(unit):
        rows = 1 << (count - 1).bit_length()
        return CpuShape(unit, rows, unit.lanes, rows, 256)
    groups = -(-count // most)
    rows = -(-count // groups)
    vectors = max(n for n in (1, 2, 4) if n == 1 or n * (rows + 1) + 1 <= unit.registers)
    panel = vectors * unit.lanes
    return CpuShape(unit, rows, panel, groups * rows, max(panel, 64))


def dotted(shape: CpuShape, unit_strides: tuple[bool, ...]) -> bool:
    """So few rows that K is better not packed."""
    return shape.panel == shape.lanes and unit_strides[1]


def _splits(problem: AttentionProblem, shape: CpuShape, threads: int) -> tuple[int, int]:
    """Into how many parts the keys of a head go, and how many keys a part has: so many that every thread has work, and
    that the last to finish has little left."""
    heads = problem.batch * problem.heads_kv
    blocks = max(1, -(-problem.seq_kv // shape.block_kv))
    if problem.packed is not None:  # `build_combine` knows of one length only
        return 1, problem.seq_kv
    wanted = 1 if heads >= 4 * threads or threads == 1 else -(-4 * threads // heads)
    per_split = -(-blocks // min(wanted, max(1, blocks // 4)))
    return -(-blocks // per_split), per_split * shape.block_kv
