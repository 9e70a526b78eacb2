"""From an attention problem to the launches that compute it on a CPU. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from aule.errors import KernelError
from aule.ir.types import SCALARS
from aule.ops.attention.cpu.backward import build_backward
from aule.ops.attention.cpu.backward_sums import build_delta, build_dq_sum
from aule.ops.attention.cpu.config import (
    CpuBackwardConfig,
    CpuConfig,
    CpuDeltaConfig,
    CpuShape,
    DqSumConfig,
    PackConfig,
)
from aule.ops.attention.cpu.forward import build_forward
from aule.ops.attention.cpu.function_tiles import plan_classes
from aule.ops.attention.cpu.pack import build_pack
from aule.ops.attention.cpu.shapes import (
    backward_shape,
    block_shape,
    grouped_shape,
    is_grouped,
    kernel_options,
    most_splits,
    multiplies_in_place,
    wanted_splits,
)
from aule.ops.attention.plan.layout import rope_options, view_scalars
from aule.ops.attention.plan.scalars import problem_scalars, row_scalars, score_options, score_scalars
from aule.ops.attention.precision import refused
from aule.ops.attention.prepass.mask_prepass import lists_function
from aule.ops.attention.problem import AttentionProblem
from aule.ops.combine.cpu import CombineConfig, PartialLayout, build_combine
from aule.ops.scores.config import Columns
from aule.ops.shared.plan import Plan, Step
from aule.target import Target
from aule.tile.vector.engine import VectorUnit, has_pairs, vector_unit, work_type
from aule.view import TensorView


@dataclass(frozen=True)
class _Call:
    """A problem, its operands, and what follows for a CPU.

    Attributes
    ----------
    views : dict
        ``q``, ``k``, ``v``, ``o`` and, if present, ``mask``, ``bias``, ``alibi``, ``sinks``; backward, the gradients.
    """

    problem: AttentionProblem
    views: dict[str, TensorView]
    target: Target

    @property
    def vectors(self) -> VectorUnit:
        """Vector registers for the type that is computed in."""
        return vector_unit(self.target, work_type(SCALARS[self.problem.dtype]))

    @property
    def has_pairs(self) -> bool:
        """Whether products can run on pairs of bf16."""
        return has_pairs(self.target, SCALARS[self.problem.dtype])

    @property
    def grouped(self) -> bool:
        """Whether the forward pass takes the few query rows of all heads that share keys together."""
        return is_grouped(self.problem.seq_q, self.problem.group, self.target)

    def unit(self, names: str | tuple[str, ...]) -> tuple[bool, ...]:
        """For each operand: the head dimension has stride 1."""
        views = [self.views[name] for name in names]
        return tuple(view.strides[3] == 1 or view.shape[3] == 1 for view in views)

    def in_place(self, name: str, cols: int) -> bool:
        """Whether rows of an operand are full vectors of the type that is computed in."""
        work = work_type(SCALARS[self.problem.dtype])
        return self.problem.dtype == work.name and self.unit((name,))[0] and cols % self.vectors.lanes == 0

    def options(self) -> dict[str, Any]:
        """Fields of the configurations of all kernels with scores."""
        columns = {f"{name}_columns": _columns(self.views.get(name)) for name in ("mask", "bias")}
        return score_options(self.problem) | rope_options(self.views) | columns

    def scalars(self) -> dict[str, int | float]:
        natural = score_scalars(self.problem.scale, self.problem.softcap, 1.0)
        return problem_scalars(self.problem, self.target) | natural | view_scalars(self.views)


def plan_forward(problem: AttentionProblem, views: dict[str, TensorView], target: Target) -> Plan:
    """Plan a forward pass over host arrays.

    Parameters
    ----------
    views : dict
        As for the GPU's plan: ``q``, ``k``, ``v``, ``o`` and, if present, ``mask``, ``bias``, ``alibi``, ``sinks``.
    """
    if problem.precision is not None:
        raise refused(problem, target)
    if math.prod(problem.out_shape[:3]) == 0:
        return Plan(())
    call = _Call(problem, views, target)
    return _plan_grouped(call) if call.grouped else _plan_blocks(call)


def _plan_grouped(call: _Call) -> Plan:
    """Plan a forward pass of few query rows: one launch, and one that combines if keys are split."""
    problem, unit = call.problem, call.unit("qkvo")
    shape = grouped_shape(problem.group * problem.seq_q, call.vectors, call.target)
    splits, split_keys = _splits(problem, shape, call.target)
    in_place = multiplies_in_place(shape, unit[1]) and problem.rope is None  # rotated keys are copied anyway
    config = CpuConfig(
        **call.options(),
        **kernel_options(call.target),
        unit=unit,
        shape=shape,
        grouped=True,
        split=splits > 1,
        panels="none" if in_place else "scratch",
        # V is used by few groups of rows, so it is converted as it is read.
        values="direct" if unit[2] and problem.value_dim % shape.lanes == 0 else "scratch",
        key_pairs=in_place and call.has_pairs,
    )
    scalars = call.scalars() | {"splits": splits, "split_keys": split_keys}
    forward = Step(config, build_forward, (problem.batch * problem.heads_kv * splits, 1, 1), scalars)
    if splits == 1:
        return Plan((forward,))
    rows = problem.batch * problem.heads_q * problem.seq_q
    combine = CombineConfig(problem.dtype, problem.value_dim, shape.lanes, problem.return_lse, unit[3])
    steps = (forward, Step(combine, build_combine, (rows, 1, 1), scalars))
    return Plan(steps, {"partial": rows * splits * PartialLayout(problem.value_dim, shape.lanes).size})


def _plan_blocks(call: _Call) -> Plan:
    """Plan a forward pass of many query rows: pack K, and V if needed, then compute blocks of rows."""
    problem, unit, pairs = call.problem, call.unit("qkvo"), call.has_pairs
    heads_q, heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    shape = block_shape(problem.seq_q, heads_q, problem.head_dim, call.vectors, call.target)
    in_place = call.in_place("v", problem.value_dim)
    listed = lists_function(problem)
    config = CpuConfig(
        **call.options(),
        **kernel_options(call.target),
        tiles_listed=listed,
        unit=unit,
        shape=shape,
        values="direct" if in_place else "workspace",
        pairs=pairs,
    )
    pack = PackConfig(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        shape=shape,
        values=not in_place,
        unit=unit[1:3],
        packed=problem.packed is not None,
        pairs=pairs,
        rope=problem.rope,
        rope_unit=config.rope_unit,
    )
    blocks_q, blocks_kv = -(-problem.seq_q // shape.block_q), -(-problem.seq_kv // shape.block_kv)
    scalars = call.scalars() | {"blocks_q": blocks_q, "blocks_kv": blocks_kv}
    keys = heads_kv * blocks_kv * shape.block_kv
    if problem.packed is not None:
        keys = problem.heads_kv * (problem.packed[1] + problem.batch * shape.block_kv)  # see `packed_keys`
    workspace = {"panels": keys * -(-problem.head_dim // config.step)}
    if not in_place:
        workspace["values"] = keys // config.step * shape.padded(problem.value_dim)
    before: tuple[Step, ...] = ()
    if listed:
        classify, space, found = plan_classes(problem, shape, scalars)
        before, workspace, scalars = (classify,), workspace | space, scalars | found
    steps = (
        *before,
        Step(pack, build_pack, (heads_kv * blocks_kv, 1, 1), scalars),
        Step(config, build_forward, (heads_q * blocks_q, 1, 1), scalars),
    )
    return Plan(steps, workspace)


def plan_alone(problem: AttentionProblem, views: dict[str, TensorView], target: Target) -> Step:
    """Plan a forward pass as one launch without a workspace, in which each task packs its keys.

    For kernels that are shown or launched by hand; `plan_forward` is faster if blocks of rows share their keys.
    """
    *_, step = plan_forward(problem, views, target).steps
    if isinstance(step.config, CombineConfig):
        raise KernelError("[flash_attention] expected a problem of more query rows for a kernel of its own")
    values = "scratch" if step.config.values == "workspace" else step.config.values
    config = replace(step.config, panels="scratch", values=values, tiles_listed=False)
    return replace(step, config=config)


def plan_backward(problem: AttentionProblem, views: dict[str, TensorView], target: Target) -> Plan:
    """Plan the gradients of q, k and v, or of the scores alone if there is no view ``dq``.

    Parameters
    ----------
    views : dict
        As for the forward pass, and ``do``, ``dq``, ``dk``, ``dv``. The buffer ``lse`` is the log-sum-exp of the
        forward pass, in the type that is computed in. So is ``ds``, the gradient of what is added to the scores, if
        it is wanted: ``[batch, heads_q, seq_q, seq_kv]``, zero before. ``dlse``, contiguous and in the same type, is
        the gradient of the log-sum-exp, if it has one.
    """
    if math.prod(problem.out_shape[:3]) * problem.key_rows == 0:
        return Plan(())
    call = _Call(problem, views, target)
    # With pairs, rotated rows are rounded, which the forward pass of few rows does not do. Its log-sum-exps would then
    # belong to other scores, and with large scores P would be off by percents.
    pairs = call.has_pairs and not (problem.rope is not None and call.grouped)
    shape = backward_shape(problem, call.vectors, call.target, pairs)
    listed = lists_function(problem)
    config = CpuBackwardConfig(
        **(call.options() | {"lse": False}),
        tiles_listed=listed,
        unit=call.unit(("q", "k", "v", "do")),
        shape=shape,
        scores="ds" in views,
        operands="dq" in views,
        pairs=pairs,
        direct_keys=call.in_place("k", problem.head_dim) and problem.rope is None,
    )
    heads_q, heads_kv = math.prod(problem.out_shape[:2]), problem.batch * problem.heads_kv
    rows = math.prod(problem.out_shape[:3])
    blocks_kv = -(-problem.seq_kv // shape.block_kv)
    # Only as many splits as keep all threads busy, since each needs a partial sum of dQ.
    splits = min(max(blocks_kv, 1), wanted_splits(heads_kv, target))
    scalars = call.scalars() | {
        "splits": splits,
        "blocks_kv": blocks_kv,
        "dq_factor": problem.scale,
        # dK is made with Q', which includes the scale, or the scale over the cap; with pairs, with Q.
        "dk_factor": problem.scale if pairs else problem.softcap if problem.softcap > 0 else 1.0,
    }
    delta = CpuDeltaConfig(problem.dtype, problem.value_dim, shape, call.unit(("o", "do")), "dlse" in views)
    dq_sum = DqSumConfig(problem.dtype, problem.head_dim, shape)
    row_numbers = scalars | row_scalars(problem)
    workspace = {"delta": rows}
    if config.operands:
        workspace["dq_parts"] = rows * splits * shape.padded(problem.head_dim)
    before: tuple[Step, ...] = ()
    if listed:
        classify, space, found = plan_classes(problem, shape, scalars)
        before, workspace, scalars = (classify,), workspace | space, scalars | found
    steps = (
        *before,
        Step(delta, build_delta, (heads_q, 1, 1), row_numbers),
        Step(config, build_backward, (heads_kv * splits, 1, 1), scalars),
    )
    if config.operands:
        steps = (*steps, Step(dq_sum, build_dq_sum, (heads_q, 1, 1), row_numbers))
    return Plan(steps, workspace)


def _columns(view: TensorView | None) -> Columns:
    if view is None or view.strides[3] == 0:
        return "same"
    return "unit" if view.strides[3] == 1 else "any"


def _splits(problem: AttentionProblem, shape: CpuShape, target: Target) -> tuple[int, int]:
    """Splits of the keys of a head, and keys of a split."""
    if problem.packed is not None:  # `build_combine` expects one length for all sequences
        return 1, problem.seq_kv
    blocks = max(1, -(-problem.seq_kv // shape.block_kv))
    wanted = wanted_splits(problem.batch * problem.heads_kv, target)
    per_split = -(-blocks // min(wanted, most_splits(blocks, target)))
    return -(-blocks // per_split), per_split * shape.block_kv
