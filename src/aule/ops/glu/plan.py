"""From a gated unit to the launch that computes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aule import tuning
from aule.ops.glu.kernels import GluConfig, build_glu, build_glu_gradient
from aule.ops.glu.problem import GluProblem
from aule.ops.rows.hints import NO_SUMS, RowTuning, Work
from aule.ops.rows.layout import choose_rows, evicts_last, overlaps_launch, row_grid, streams
from aule.ops.rows.views import needs_index64, row_layout, row_operands, view_scalars, view_width
from aule.ops.shared.plan import Plan, Step
from aule.target import Target
from aule.view import TensorView, contiguous_strides

_NAMES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}


def plan_glu(problem: GluProblem, views: Mapping[str, TensorView], target: Target) -> Plan:
    """Plan a gated unit (``gate``, ``y`` and, unless packed, ``up``) or its gradient (``dy``, ``dgate``, ``dup``)."""
    if not problem.rows:
        return Plan(())
    count, length = problem.rows, problem.length
    row = tuning.number(target, "glu.row")
    if count * length % row == 0 and all(view.strides == contiguous_strides(problem.shape) for view in views.values()):
        # Elements are independent: rows of one length serve all shapes, and spread a single long row over a device.
        count, length = count * length // row, row
        rows: Mapping[str, TensorView] = {n: replace(v, shape=(count, row), strides=(row, 1)) for n, v in views.items()}
        layout, width = row_layout((count, row), rows), min(view_width(view) for view in rows.values())
    else:
        layout, width = row_layout(problem.shape, views), min(view_width(view, length) for view in views.values())
    hints = RowTuning(**tuning.use(target, "glu"))
    shape, passes = choose_rows(target, problem.dtype, length, width, count, Work(elements=True), hints)
    name, backward = _NAMES[problem.activation], "dy" in views
    grid = row_grid(name, shape, count, target)
    config = GluConfig(
        name=f"{name}_backward" if backward else name,
        activation=problem.activation,
        packed=problem.packed,
        dtype=problem.dtype,
        shape=shape,
        passes=(passes,),
        axes=len(layout.sizes),
        index64=needs_index64(views.values()),
        operands=row_operands(views, passes.width, target, length),
        stream=streams(views, target),
        evict_last=evicts_last(views, target, NO_SUMS, passes.width),
        awaits=overlaps_launch(target, shape),
    )
    scalars = layout.scalars | view_scalars(views) | {"length": length}
    return Plan((Step(config, build_glu_gradient if backward else build_glu, grid, scalars),))
