"""The plans of writes into a cache: new rows, and copies of pages. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aule import tuning
from aule.ops.kvcache.append import build_append
from aule.ops.kvcache.config import AppendConfig, CopyConfig
from aule.ops.kvcache.copy import build_copy
from aule.ops.kvcache.problem import AppendProblem, strides_of
from aule.ops.shared.plan import Plan, Step
from aule.target import Target
from aule.tuning import model
from aule.view import TensorView


def plan_append(
    problem: AppendProblem, views: Mapping[str, TensorView], target: Target, alignment: Mapping[str, int] | None = None
) -> Plan:
    """Plan an append: one launch, or one for k and one for v where the device cannot bind all buffers.

    Parameters
    ----------
    views : mapping
        As for `append_problem`, with device strides and offsets.
    alignment : mapping, optional
        Bytes that divide the address of each array's memory; 16 by default.
    """
    if problem.tokens == 0 or problem.heads == 0:
        return Plan(())
    operands = ("k", "v") if problem.value_dim else ("k",)
    buffers = 1 + (2 if problem.quantize is None else 3) * len(operands) + (2 if problem.rotary_dim else 0)
    split = [operands] if buffers <= target.max_buffers else [(name,) for name in operands]
    return Plan(tuple(_append_step(problem, views, target, alignment or {}, names) for names in split))


def _append_step(
    problem: AppendProblem,
    views: Mapping[str, TensorView],
    target: Target,
    alignment: Mapping[str, int],
    operands: tuple[str, ...],
) -> Step:
    cpu, limits = target.host, tuning.use(target, "kvcache.append")
    dims = tuple(problem.head_dim if name == "k" else problem.value_dim for name in operands)
    unit = tuple(views[n].strides[3] == 1 == views[f"{n}_cache"].strides[3] for n in operands)
    rotary = problem.rotary_dim if operands[0] == "k" else 0
    must_divide = [*dims, rotary if problem.interleaved else rotary // 2]
    width = 16 if cpu else 16 // views["k"].itemsize
    width = math.gcd(width, *must_divide) if all(unit) else 1

    def align(name: str) -> int:
        # A CPU reads vectors from any address and needs no kernel for each alignment.
        view = views[name]
        steps = (s for n, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if n > 1)
        return 1 if cpu else math.gcd(width, view.offset, alignment.get(name, 16) // view.itemsize, *steps)

    lanes = 1
    while not cpu and lanes < limits["lanes"] and lanes * width < max(dims):
        lanes *= 2
    if problem.quantize is not None:
        lanes = min(lanes, max(min(target.subgroup_sizes, default=target.subgroup_size), 1))
    threads = 1 if cpu else min(limits["threads"], target.max_threads)
    rows, together = problem.tokens * problem.heads, threads // lanes
    groups = min(-(-rows // together), target.max_grid[0])
    if cpu:
        # Copying fewer rows takes no longer than waking a thread.
        groups = min(-(-rows // limits["task_rows"]), model.tasks(target))
    config = AppendConfig(
        operands=operands,
        dims=dims,
        unit=unit,
        align=tuple((align(name), align(f"{name}_cache")) for name in operands),
        dtype=problem.dtype,
        quantize=problem.quantize,
        rope=views["cos"].dtype if rotary else None,
        rotary_dim=rotary,
        interleaved=problem.interleaved and rotary > 0,
        rope_align=min(align("cos"), align("sin")) if rotary else 1,
        threads=threads,
        lanes=lanes,
        width=width,
        index64=any(view.last_index > 2**31 - 1 for view in views.values()),
    )
    pages, page = views["k_cache"].shape[:2]
    scalars = strides_of(views) | {
        "rows": rows,
        "heads": problem.heads,
        "each": views["k"].shape[1],
        "page": page,
        "slots": pages * page,
        "turns": -(-rows // (groups * together)),
        "workers": groups * together,
        "positions": views["cos"].shape[0] if rotary else 0,
    }
    return Step(config, build_append, (groups, 1, 1), scalars)


def plan_copy(
    copies: int, views: Mapping[str, TensorView], target: Target, alignment: Mapping[str, int] | None = None
) -> Plan:
    """Plan the copy of ``copies`` pages, whose numbers are the buffer ``pairs``, int32 ``[copies, 2]``.

    Parameters
    ----------
    views : mapping
        Arrays of ``[layers, pages, elements of a page]``, contiguous.
    """
    if copies == 0:
        return Plan(())
    cpu, limits = target.host, tuning.use(target, "kvcache.copy")
    layers = next(iter(views.values())).shape[0]
    threads = 1 if cpu else min(limits["threads"], target.max_threads)
    width = {
        name: math.gcd(16 // view.itemsize, view.shape[2], (alignment or {}).get(name, 16) // view.itemsize)
        for name, view in views.items()
    }
    parts = max(-(-view.shape[2] * view.itemsize // limits["part_bytes"]) for view in views.values())
    tasks = copies * layers * parts
    config = CopyConfig(
        operands=tuple(views),
        bits=tuple(8 * view.itemsize for view in views.values()),
        width=tuple(width.values()),
        threads=threads,
        index64=any(math.prod(view.shape) > 2**31 - 1 for view in views.values()),
    )
    scalars = {"tasks": tasks, "parts": parts, "layers": layers}
    for name, view in views.items():
        scalars |= {f"{name}_page": view.shape[2], f"{name}_layer": view.shape[1] * view.shape[2]}
    return Plan((Step(config, build_copy, (min(tasks, target.max_grid[0]), 1, 1), scalars),))
