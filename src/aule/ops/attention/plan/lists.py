"""Lists of the tiles of a mask function that outlive a call: a mask that is used again need not be looked at again."""

from __future__ import annotations

from dataclasses import replace

from aule.ops.attention.cpu.function_tiles import build_classes
from aule.ops.attention.prepass.function_tiles import build_function_tiles
from aule.ops.attention.prepass.mask_kernels import build_order
from aule.ops.shared.plan import Plan, Step

LISTS = ("mask_tiles", "mask_order")
"""Buffers of the lists."""


def lists_of(plan: Plan) -> dict[str, int]:
    """Sizes of the lists of a plan by name, as in its workspace; empty if it has none, or several that share memory."""
    classified = [step for step in plan.steps if step.build in (build_classes, build_function_tiles)]
    return {name: plan.workspace[name] for name in LISTS if name in plan.workspace} if len(classified) == 1 else {}


def with_lists(plan: Plan, made: bool) -> Plan:
    """The plan with lists in memory of the caller, who keeps them; without the steps that make them if they are."""
    lists = lists_of(plan)
    steps = tuple(step for step in plan.steps if not (made and lists and _lists(step)))
    return replace(plan, steps=steps, workspace={name: n for name, n in plan.workspace.items() if name not in lists})


def _lists(step: Step) -> bool:
    return step.build in (build_classes, build_function_tiles, build_order)
