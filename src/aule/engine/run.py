"""Runs plans: loads their kernels, fixes everything that repeats, and launches them on any device.

`prepare` does the work that a signature needs once. A `PreparedCall` then lacks only memory and a stream; a `BoundCall`
takes memory in a fixed order, for repeated calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from aule.engine import observe
from aule.engine.memory import DeviceMemory, HostMemory, MemorySource, address
from aule.engine.programs import program
from aule.errors import InvalidArgumentError, LaunchError
from aule.ops.shared.plan import Plan, Step
from aule.runtime.base import Device, Launch, Program

_ALIGNMENT = 256
"""Sizes of workspaces are multiples of this many bytes, which aligns those in one block of memory."""

_Start = Callable[[Sequence[Any], int | None], None]


def prepare(
    plan: Plan,
    device: Device,
    *,
    op: str | None = None,
    backward: bool = False,
    memory: MemorySource | None = None,
    itemsize: int = 4,
) -> PreparedCall:
    """Load the kernels of a plan on a device and fix everything but memory and stream.

    Parameters
    ----------
    op : str, optional
        The public function under which calls are counted and shown in profilers; None for neither.
    backward : bool
        The plan computes gradients.
    memory : MemorySource, optional
        Source of workspace and scratch; by default the device itself.
    itemsize : int
        Bytes per element of a workspace.

    Raises
    ------
    LaunchError
        The device or the memory source cannot run the plan.
    """
    if memory is None:
        memory = HostMemory(device) if device.target.backend == "cpu" else DeviceMemory(device)
    name = device.target.name
    if plan.scratch and not memory.has_scratch:
        raise LaunchError(
            f"[run] expected memory that is zero for {', '.join(plan.scratch)} on {name}, got a source without such; "
            "choose a plan without scratch, or a source that has it"
        )
    if memory.raw and not hasattr(device, "prepare"):
        raise LaunchError(
            f"[run] expected a device that takes memory of others, got {name}; use the device's own allocations"
        )
    call = PreparedCall(plan, device, memory, itemsize)
    if op is not None and not call.empty:
        call.tally = observe.tally(op, device.target, plan.engine, call.kernels, backward)
    return call


class PreparedCall:
    """A plan on a device with loaded kernels, fixed grids and fixed scalars; lacks only memory and a stream.

    Attributes
    ----------
    names : tuple of str
        Buffer names of the memory that the caller passes, in order of first use.
    empty : bool
        Whether there is nothing to launch.
    programs : tuple of Program
        The kernel of each step.
    tally : Tally
        Where calls are counted.
    """

    __slots__ = (
        "_bound", "_itemsize", "_memory", "_on_host", "_sequence", "_starts", "device", "empty", "names", "plan",
        "programs", "tally",
    )  # fmt: skip

    def __init__(self, plan: Plan, device: Device, memory: MemorySource, itemsize: int) -> None:
        self.plan, self.device, self.empty = plan, device, not plan.steps
        self._memory, self._itemsize = memory, itemsize
        self._on_host = device.target.backend == "cpu"
        self.programs = tuple(_load(step, device) for step in plan.steps)
        own = {*plan.workspace, *plan.scratch}
        used = (name for buffers in self._buffers() for name in buffers)
        self.names = tuple(dict.fromkeys(name for name in used if name not in own))
        self._starts = [self._start(step, loaded) for step, loaded in zip(plan.steps, self.programs, strict=True)]
        # The CPU chooses one set of threads for all launches of a call.
        on_host: Any = device if self._on_host and not self.empty else None
        self._sequence = None if on_host is None else on_host.prepare_sequence(self._starts)
        self._bound: dict[tuple[str, ...], BoundCall] = {}
        self.tally = observe.UNCOUNTED

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels, in order."""
        return [loaded.artifact.entry for loaded in self.programs]

    def run(self, memory: Mapping[str, Any], stream: int | None = None) -> None:
        """Launch on memory by buffer name; asynchronous if the device is.

        Parameters
        ----------
        memory : mapping
            Allocations of the device, or memory of its source (addresses, tensors); on the CPU also arrays. Names that
            no kernel uses are ignored. The caller keeps the memory alive.
        stream : int, optional
            Native handle, if the device has streams.
        """
        names = tuple(memory)
        bound = self._bound.get(names)
        if bound is None:
            bound = self._bound[names] = self.bind(names)
        given = memory.values()
        bound([address(x) for x in given] if self._on_host else list(given), stream)
        self.tally[observe.caller.get()] += 1

    def bind(self, names: Sequence[str]) -> BoundCall:
        """Fix the order of memory; ``names`` must include `names` and may have more."""
        missing = [name for name in self.names if name not in names]
        if missing:
            raise InvalidArgumentError(
                f"[run] expected memory for {', '.join(missing)}, got it for {', '.join(names) or 'nothing'}; give "
                "every buffer of the plan its memory"
            )
        plan = self.plan
        places = {name: i for i, name in enumerate((*names, *plan.workspace, *plan.scratch))}
        launches = [[places[name] for name in buffers] for buffers in self._buffers()]
        sizes = workspace_sizes(plan, self._itemsize)
        shared = (self._memory, sizes, list(plan.scratch.values())) if plan.workspace or plan.scratch else None
        return BoundCall(self, self._starts, launches, len(names), shared)

    def launches(self, memory: Mapping[str, Any]) -> list[Launch]:
        """Return the arguments of each `Device.launch`, for timing; ``memory`` includes workspace and scratch."""
        found: list[Launch] = []
        for step, loaded, buffers in zip(self.plan.steps, self.programs, self._buffers(), strict=True):
            given = (memory[name] for name in buffers)
            arguments = [next(given) if x is None else x for x in _scalars(step, loaded)]
            found.append((loaded, step.grid, arguments))
        return found

    def _buffers(self) -> list[list[str]]:
        """Return the names of each launch's memory, in the order of its kernel's buffers."""
        return [
            [step.memory_of(p.name) for p in loaded.artifact.buffers]
            for step, loaded in zip(self.plan.steps, self.programs, strict=True)
        ]

    def _start(self, step: Step, loaded: Program) -> Any:
        device: Any = self.device
        scalars = _scalars(step, loaded)
        if self._on_host:
            return device.prepare(loaded, step.grid, [x for x in scalars if x is not None])
        if self._memory.raw:
            return device.prepare(loaded, step.grid, scalars).launch
        return _on_allocations(device, loaded, step.grid, scalars)


class BoundCall:
    """A prepared call for memory in a fixed order; made by `PreparedCall.bind`. Threads may share it.

    Attributes
    ----------
    start : callable
        Does what calling this object does, without ranges for profilers; the launch itself if it is the only one and
        takes memory in this order.
    tally : Tally
        Where the caller counts the call.
    """

    __slots__ = ("_call", "_picks", "_sequence", "_shared", "_starts", "start", "tally")

    def __init__(
        self,
        call: PreparedCall,
        starts: Sequence[Any],
        places: list[list[int]],
        count: int,
        shared: tuple[MemorySource, list[int], list[int]] | None,
    ) -> None:
        picks = [_picker(each) for each in places]
        self._starts, self._picks = list(zip(starts, picks, strict=True)), picks
        self._call, self._sequence, self._shared, self.tally = call, call._sequence, shared, call.tally
        alone = self._sequence is None and shared is None and len(starts) == 1
        self.start: _Start = starts[0] if alone and places[0] == list(range(count)) else self._plain

    def __call__(self, memory: Sequence[Any], stream: int | None = None) -> None:
        """Launch with memory of the memory source, in the order of the names. The caller keeps it alive."""
        ranges = observe.wanted()
        if ranges and self.tally is not observe.UNCOUNTED:
            with observe.named(ranges, self.tally.range_name):
                self._plain(memory, stream, ranges)
        else:
            self._plain(memory, stream)

    def _plain(self, memory: Sequence[Any], stream: int | None = None, ranges: Sequence[observe.Range] = ()) -> None:
        if self._shared is None:
            self._launch(memory, stream, ranges)
            return
        source, workspace, scratch = self._shared
        own, block = source.acquire(workspace, scratch, stream)
        try:
            self._launch([*memory, *own], stream, ranges)
        finally:
            source.release(block)

    def _launch(self, memory: Sequence[Any], stream: int | None, ranges: Sequence[observe.Range]) -> None:
        if ranges:
            for (start, pick), name in zip(self._starts, self._call.kernels, strict=True):
                with observe.named(ranges, name):
                    if self._sequence is None:
                        start(pick(memory), stream)
                    else:
                        start.launch(pick(memory))
        elif self._sequence is not None:
            self._sequence.launch([pick(memory) for pick in self._picks])
        else:
            for start, pick in self._starts:
                start(pick(memory), stream)


def workspace_sizes(plan: Plan, itemsize: int) -> list[int]:
    """Bytes of each workspace of a plan."""
    return [-(-max(count, 1) * itemsize // _ALIGNMENT) * _ALIGNMENT for count in plan.workspace.values()]


def _picker(places: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks the memory of one launch from that of a call."""
    return itemgetter(*places) if len(places) > 1 else lambda memory: [memory[i] for i in places]


def _load(step: Step, device: Device) -> Program:
    return program(device, step.config, lambda: step.build(step.config, device.target))


def _scalars(step: Step, loaded: Program) -> list[int | float | None]:
    """Return a step's scalars in the order of its kernel's parameters, with None for each buffer."""
    params = loaded.artifact.params
    missing = [p.name for p in params if p.kind == "scalar" and p.name not in step.scalars]
    if missing:
        raise LaunchError(f"[run] {loaded.artifact.entry} expected {', '.join(missing)}, got a plan without; add them")
    return [None if p.kind == "buffer" else step.scalars[p.name] for p in params]


def _on_allocations(
    device: Device, loaded: Program, grid: tuple[int, int, int], scalars: list[int | float | None]
) -> _Start:
    """Return a launch through `Device.launch`, for devices that take only their own allocations."""
    places = [i for i, x in enumerate(scalars) if x is None]

    def start(memory: Sequence[Any], stream: int | None) -> None:
        arguments: list[Any] = scalars.copy()
        for i, allocation in zip(places, memory, strict=True):
            arguments[i] = allocation
        device.launch(loaded, grid, arguments, stream)

    return start
