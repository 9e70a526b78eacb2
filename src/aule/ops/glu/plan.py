"""From a gated unit to the launch that computes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from aule.ops.glu.kernels import GluConfig, build_glu, build_glu_gradient
from aule.ops.glu.problem import GluProblem
from aule.ops.row_shapes import begins_early, choose_rows, lasts, row_grid, streams
from aule.ops.row_tuning import NO_SUMS, RowTuning
from aule.ops.rowwise import extent, lay_out, operand, view_numbers, view_width
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.view import TensorView, contiguous_strides

_ROW, _CPU_ROW, _TUNING = 2048, 4096, RowTuning(parts=1)
"""Columns of a row where arrays are contiguous. On GPUs a thread has 16 bytes of each array. H200, bf16, TB/s with one,
two and four such parts, 64 MiB and 1 GiB: swiglu of 4096 columns 4.11, 3.93, 3.49 and 4.37, 4.36, 4.22, its gradient
3.97, 3.92, 3.85 and 4.29, 4.27, 4.22; geglu 3.93, 3.94, 3.56 and 4.35, 4.36, 4.23. Rows of 1024 to 8192 are alike.
Through Vulkan swiglu has 3.81, 3.74, 3.59 and 4.32, 4.31, 4.27. 64 MiB, in four arrays of memory each, where it waits
for the launch before and where it begins while that ends: swiglu 4.11 to 4.26 and 4.16 to 4.34, its gradient 4.01 to
4.17 and 4.02 to 4.20, geglu 3.93 to 4.19 and 3.97 to 4.26; of two calls on the same memory the latter has 1 to 2%
more."""


def plan_glu(problem: GluProblem, views: Mapping[str, TensorView], target: Target) -> StepPlan:
    """Plan a gated unit (``gate``, ``y`` and, unless packed, ``up``) or its gradient (``dy``, ``dgate``, ``dup``)."""
    count, length = math.prod(problem.shape[:-1]), problem.length
    layout = lay_out(problem.shape[:-1], {name: view.strides[:-1] for name, view in views.items()})
    width = min(view_width(view, length) for view in views.values())
    row = _CPU_ROW if target.backend == "cpu" else _ROW
    if count * length % row == 0 and all(view.strides == contiguous_strides(problem.shape) for view in views.values()):
        # Elements know nothing of rows: those of one length serve all, and a single long one is spread over a device.
        count, length = count * length // row, row
        layout = lay_out((count,), {name: (row,) for name in views})
        width = min(view_width(replace(view, shape=(count, row), strides=(row, 1))) for view in views.values())
    shape, span = choose_rows(target, problem.dtype, length, width, count, NO_SUMS, _TUNING)
    name = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}[problem.activation]
    backward = "dy" in views
    grid = row_grid(name, shape, count, target)
    if not grid[0]:
        return StepPlan(())
    config = GluConfig(
        name=f"{name}_backward" if backward else name,
        activation=problem.activation,
        packed=problem.packed,
        dtype=problem.dtype,
        shape=shape,
        spans=(span,),
        axes=len(layout.sizes),
        index64=max(extent(view) for view in views.values()) > 2**31 - 1,
        operands=tuple((n, operand(view, span.width, length)) for n, view in views.items()),
        stream=streams(views, target),
        lasting=lasts(views, target, NO_SUMS),
        awaits=begins_early(target, shape),
    )
    scalars = layout.scalars | view_numbers(views) | {"length": length}
    return StepPlan((Step(config, build_glu_gradient if backward else build_glu, grid, scalars),))
