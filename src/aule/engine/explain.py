"""Explanation: the plan that a call would take, as data and as text; nothing is built, launched or written."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from aule import settings
from aule.backends import registry
from aule.engine import programs
from aule.engine.memory import on_device
from aule.engine.run import workspace_sizes
from aule.ops.shared.plan import Plan, Step
from aule.runtime.base import Device
from aule.target import Target
from aule.tile.fragment.engine import multiplies
from aule.view import TensorView, contiguous_strides

_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch of a plan.

    Attributes
    ----------
    kernel : str
        The kernel's name, as profilers and `aule.dispatch_stats` show it.
    engine : str
        How it computes: warpgroup, fragment, simt, vector or rows.
    grid : tuple of int
        Workgroups along each axis.
    workgroup : int
        Threads of a workgroup.
    shared_bytes : int
        Shared memory of a workgroup.
    state : str
        ``loaded``, ``on disk`` (rendered by an earlier process), or ``not built``.
    tiles : dict
        Tile sizes and schedule; empty for kernels without tiles.
    """

    kernel: str
    engine: str
    grid: tuple[int, int, int]
    workgroup: int
    shared_bytes: int
    state: str
    tiles: dict[str, Any]


@dataclass(frozen=True)
class Explanation:
    """The plan that a call would take; ``print`` shows it as text.

    Attributes
    ----------
    op, direction : str
        The public function, and ``forward`` or ``backward``.
    device, device_name : str
        The device as ``backend=`` takes it, and its own name.
    device_reason : str
        Why this device computes.
    passed_over : dict
        Why backends that come before it in order of preference do not, by name; empty if something else decided.
    kernel, kernel_reason : str
        The engine that takes the time (``numpy`` if no kernel does), and why.
    dtype, computed_in : str
        The type of the operands, and that of products and sums.
    copied : bool
        Operands are copied to the device, and results back.
    launches : tuple of PlannedLaunch
        In order. Empty if NumPy computes, or if there is nothing to compute.
    workspace_bytes, scratch_bytes : int
        Memory for results between launches, and for counters.
    backward : Explanation or None
        The plan of the gradients, if the call records them. That of gradients has one where a score function captured
        tensors that have gradients: the plan of a part of the scores, of which there may be several.
    """

    op: str
    direction: str
    device: str
    device_name: str
    device_reason: str
    passed_over: dict[str, str]
    kernel: str
    kernel_reason: str
    dtype: str
    computed_in: str
    copied: bool
    launches: tuple[PlannedLaunch, ...]
    workspace_bytes: int
    scratch_bytes: int
    backward: Explanation | None = None

    def to_dict(self) -> dict[str, Any]:
        """The explanation as a dict of plain values, for example for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.op}, {self.direction}, on {self.device} ({self.device_name})"]
        lines += [f"  device     {self.device_reason}"]
        lines += [f"             not on {message}" for message in self.passed_over.values()]
        lines += [f"  kernel     {self.kernel}: {self.kernel_reason}"]
        moved = "operands are copied to the device, results back" if self.copied else "used in place, without copies"
        lines += [f"  data       {self.dtype}, computed in {self.computed_in}; {moved}"]
        for i, launch in enumerate(self.launches):
            grid = " x ".join(map(str, launch.grid))
            lines += [
                f"  {'launches' if i == 0 else '':8}   {launch.kernel}: grid {grid}, workgroups of {launch.workgroup}, "
                f"{launch.shared_bytes} bytes shared, {launch.state}"
            ]
            if launch.tiles:
                lines += [f"             {launch.engine}: {_text(launch.tiles)}"]
        if not self.launches and self.kernel != registry.NUMPY:
            lines += ["  launches   none: there is nothing to compute"]
        lines += [f"  memory     {self.workspace_bytes} bytes of workspace, {self.scratch_bytes} bytes of counters"]
        return "\n".join(lines) + (f"\n{self.backward}" if self.backward is not None else "")


class Chosen(NamedTuple):
    """What a front end has decided about a call: its device (None stands for NumPy) and why, and its plan.

    ``by_preference``: nothing but the order of preference decided the device.
    """

    device: Device | None
    reason: str
    plan: Plan
    copied: bool = False
    by_preference: bool = False


def explain(
    op: str, problem: Any, chosen: Chosen, backward: bool = False, gradients: Explanation | None = None
) -> Explanation:
    """Explain a call that a front end has planned.

    Parameters
    ----------
    problem : object
        With ``dtype`` and, for attention, ``precision``.
    backward : bool
        The plan computes gradients.
    gradients : Explanation, optional
        Of the gradients that will follow.
    """
    device, plan = chosen.device, chosen.plan
    target = Target(registry.NUMPY, "NumPy") if device is None else device.target
    kernel = registry.NUMPY if device is None else plan.engine
    work = "float64" if problem.dtype == "f64" else "float32"
    factors = getattr(problem, "precision", None) or problem.dtype
    if kernel in ("fragment", "warpgroup"):
        work = f"{work}, products of {_DTYPES.get(factors, factors)}"
    return Explanation(
        op=op.removesuffix("_backward") if backward else op,
        direction="backward" if backward else "forward",
        device=registry.NUMPY if device is None else f"{target.backend}:{getattr(device, 'index', 0)}",
        device_name=target.name,
        device_reason=chosen.reason,
        passed_over=registry.passed_over(target.backend) if chosen.by_preference else {},
        kernel=kernel,
        kernel_reason=_kernel_reason(kernel, problem.dtype, factors, target),
        dtype=_DTYPES[problem.dtype],
        computed_in=work,
        copied=chosen.copied,
        launches=() if device is None else tuple(_launch(step, device) for step in plan.steps),
        workspace_bytes=sum(workspace_sizes(plan, 8 if problem.dtype == "f64" else 4)),
        scratch_bytes=4 * sum(plan.scratch.values()),
        backward=gradients,
    )


def choose(device: Device | None, backend: str | None, otherwise: str | None, plan: Plan, copied: bool) -> Chosen:
    """What was decided about a call.

    Parameters
    ----------
    otherwise : str or None
        Why the device computes if neither the call nor the environment names one; None for the order of preference.
    """
    if backend is not None:
        return Chosen(device, f"backend={backend!r} asks for it", plan, copied)
    if settings.backend() is not None:
        return Chosen(device, f"AULE_BACKEND={settings.backend()} asks for it", plan, copied)
    if device is None:
        return Chosen(None, "no device is available", plan, by_preference=True)
    if otherwise is not None:
        return Chosen(device, otherwise, plan, copied)
    return Chosen(device, "it is the first hardware device in order of preference", plan, copied, by_preference=True)


def views_on(device: Device, views: Mapping[str, TensorView], outputs: Container[str]) -> dict[str, TensorView]:
    """Views of a call's host arrays as they would be on a device; on the CPU they are used in place."""
    if device.target.backend == "cpu":
        return dict(views)
    found = {name: on_device(view) for name, view in views.items() if name not in outputs}
    for name in views:
        if name in outputs:
            view = views[name]
            found[name] = TensorView(view.dtype, view.shape, contiguous_strides(view.shape), "device", None)
    return found


def _launch(step: Step, device: Device) -> PlannedLaunch:
    known = programs.known(device, step.config)
    if known is None:
        traced = step.build(step.config, device.target)
        name, workgroup, shared, state = traced.name, traced.workgroup, traced.shared_bytes, "not built"
    else:
        artifact, state = known
        name, workgroup, shared = artifact.entry, artifact.workgroup, artifact.shared_bytes
    tiles = {} if step.tiles is None else asdict(step.tiles)
    return PlannedLaunch(name, step.engine, step.grid, workgroup, shared, state, tiles)


def _text(tiles: Mapping[str, Any]) -> str:
    """Tile sizes as text: numbers that are not 0, and switches that are on."""
    parts = []
    for name, value in tiles.items():
        if isinstance(value, dict):
            parts.append(_text(value))
        elif value is True or isinstance(value, str):
            parts.append(name if value is True else f"{name} {value}")
        elif value:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _kernel_reason(kernel: str, dtype: str, factors: str, target: Target) -> str:
    """Why an engine computes; ``factors`` is the type that it multiplies."""
    name, units = _DTYPES[dtype], _DTYPES.get(factors, factors)
    if kernel == "simt":
        if dtype == "f32":
            return "float32 is multiplied exactly, not on matrix units, unless precision= allows rounding"
        if not multiplies(target, dtype):
            return f"the device has no matrix units for {name} that kernels can use"
        return f"the kernels on matrix units for {name} do not fit the options or the layout of this call"
    return {
        registry.NUMPY: "NumPy computes, no kernel is launched",
        "warpgroup": f"the device has matrix units for {units} that four subgroups use together",
        "fragment": f"the device has matrix units for {units}",
        "vector": "the CPU's kernels use its vector registers",
    }.get(kernel, "rows are read, reduced and written; no matrices are multiplied")
