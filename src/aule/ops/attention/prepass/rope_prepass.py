"""Launches before the warpgroup kernels that rotate Q and K, as those kernels copy rows past registers.

One launch for each, by the kernel of `aule.rope`, costs less than rotating rows in the attention kernel. The rotated
rows take as much memory as q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from aule.ops.attention.problem import AttentionProblem
from aule.ops.rope.plan import plan_rope
from aule.ops.rope.problem import RopeProblem
from aule.ops.shared.plan import Step
from aule.target import Target
from aule.tile.fragment.shape import RUN
from aule.view import ITEMSIZE, TensorView, contiguous_strides

ROTATED = {"q": "q_rotated", "k": "k_rotated"}
"""Names of the memory that holds rotated rows."""


def can_rotate_before(problem: AttentionProblem) -> bool:
    """Whether rows can be rotated beforehand. Not for packed sequences, each of which has its own positions."""
    return problem.rope is not None and problem.packed is None and problem.head_dim % RUN == 0


def rope_prepass(
    problem: AttentionProblem, views: Mapping[str, TensorView], target: Target, aligned_base: Mapping[str, bool]
) -> tuple[tuple[Step, ...], dict[str, int], dict[str, TensorView]]:
    """Steps that rotate q and k, the 32-bit words of memory for their results, and views of the results named q and
    k."""
    rope = problem.rope
    assert rope is not None and problem.packed is None
    steps: list[Step] = []
    workspace: dict[str, int] = {}
    found: dict[str, TensorView] = {}

    def known(name: str, view: TensorView) -> TensorView:
        return view if aligned_base.get(name, True) else replace(view, alignment=view.itemsize)

    for (name, memory), first in zip(ROTATED.items(), problem.rope_starts, strict=True):
        x = known(name, views[name])
        y = TensorView(x.dtype, x.shape, contiguous_strides(x.shape), x.device, None)
        tables = {}
        for table in ("cos", "sin"):
            view = known(table, views[table])
            tables[table] = replace(
                view,
                shape=(*x.shape[:3], rope.half),
                strides=(view.strides[0], 0, *view.strides[2:]),
                offset=view.offset + first * view.strides[2],
            )
        rotation = RopeProblem(problem.dtype, x.shape, rope.half, rope.interleaved, 0, False, None)
        plan = plan_rope(rotation, {"x": x, "y": y} | tables, target)
        steps += [replace(step, renamed={"x": name, "y": memory}) for step in plan.steps]
        workspace[memory] = -(-prod(x.shape) * ITEMSIZE[x.dtype] // 4)
        found[name] = y
    return tuple(steps), workspace, found
