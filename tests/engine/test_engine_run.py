"""Plans run in order on named memory; a plan that a device or memory source cannot honour is refused when prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_engine_programs import FakeDevice

import aule
from aule.backends import registry
from aule.engine.memory import DeviceMemory, HostMemory
from aule.engine.run import prepare
from aule.engine.signatures import Signatures
from aule.ir import Builder, KernelIR
from aule.ir.types import f32, i32
from aule.ops.shared.plan import Plan, Step
from aule.runtime.base import Allocation, Program
from aule.target import Target


def build(config: Any, target: Target) -> KernelIR:
    """Adds ``step`` to ``x`` and stores it in ``y``, after a ticket if there is one."""
    b = Builder(f"add_{len(config)}", 1)
    x, y, step = b.buffer("x_ptr", f32), b.buffer("y_ptr", f32, "write"), b.scalar("step", f32)
    at = b.group_id()
    value = b.load(x, at) + step
    if "tickets" in config:
        tickets = b.buffer("tickets_ptr", i32, "readwrite")
        value = value + b.cast(b.load(tickets, at), f32)
    b.store(y, at, value)
    return b.finish()


def step(number: float, *config: str, blocks: int = 4, **renamed: str) -> Step:
    return Step(config, build, (blocks, 1, 1), {"step": number, "more": 3}, renamed)


TWO = Plan((step(1.0, y="between"), step(10.0, x="between")), {"between": 4})


class Noting(FakeDevice):
    """Notes what is launched and what memory it had then."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[int, list[Any]]] = []
        self.allocated: list[Allocation] = []
        self.uploaded: list[Any] = []

    def alloc(self, nbytes: int) -> Allocation:
        self.allocated.append(Allocation(self, nbytes))
        return self.allocated[-1]

    def upload(self, allocation: Allocation, data: Any, offset: int = 0) -> None:
        self.uploaded.append(data)

    def launch(self, program: Program, grid: Any, args: Sequence[Any], stream: int | None = None) -> None:
        assert not any(isinstance(x, Allocation) and x.freed for x in args)
        self.launched.append((grid[0], list(args)))


class NoScratch(DeviceMemory):
    has_scratch = False


def test_steps_follow_each_other_with_their_own_workspace() -> None:
    device = Noting()
    call = prepare(TWO, device)
    assert call.names == ("x", "y") and not call.empty and len(call.programs) == 2
    x, y = device.alloc(16), device.alloc(16)
    call.run({"y": y, "x": x, "unused": None})
    (_, first), (_, second) = device.launched
    between = device.allocated[-1]
    assert first == [x, between, 1.0] and second == [between, y, 10.0]
    assert between.nbytes >= 16 and between.freed and not x.freed
    call.bind(("x", "y"))([x, y])
    assert len(device.launched) == 4
    one = prepare(Plan((step(5.0),)), device)
    one.bind(("x", "y"))((x, y))  # in the order of the kernel's buffers, and in another
    one.bind(("y", "x"))((y, x))
    assert [args for _, args in device.launched[4:]] == 2 * [[x, y, 5.0]]


def test_scratch_is_zero_and_each_has_its_own() -> None:
    device = Noting()
    plan = Plan((step(1.0, "tickets"), step(2.0, "tickets", tickets="others")), {}, {"tickets": 5, "others": 7})
    call, memory = prepare(plan, device), {"x": device.alloc(16), "y": device.alloc(16)}
    call.run(memory)
    call.run(memory)
    used = [args[3] if isinstance(args[3], Allocation) else args[2] for _, args in device.launched]
    assert used[0] is used[2] and used[1] is used[3] and used[0] is not used[1]
    assert len(device.uploaded) == 2 and not any(zeros.any() for zeros in device.uploaded)
    assert not any(allocation.freed for allocation in device.allocated)


def test_the_launches_for_measuring() -> None:
    device = Noting()
    memory = {name: device.alloc(16) for name in ("x", "between", "y")}
    (first, grid, arguments), (second, _, _) = prepare(TWO, device).launches(memory)
    assert (first, second) == prepare(TWO, device).programs and grid == (4, 1, 1)
    assert arguments == [memory["x"], memory["between"], 1.0]


def test_nothing_to_launch() -> None:
    call = prepare(Plan(()), Noting())
    assert call.empty and call.names == ()
    call.run({"x": None})
    call.bind(())([])


def test_what_cannot_be_honoured_is_refused() -> None:
    device = Noting()
    with pytest.raises(aule.AuleError, match="expected memory that is zero for tickets"):
        prepare(Plan((step(1.0, "tickets"),), {}, {"tickets": 1}), device, memory=NoScratch(device))
    prepare(TWO, device, memory=NoScratch(device))
    with pytest.raises(aule.AuleError, match="expected a device that takes memory of others"):
        prepare(TWO, device, memory=HostMemory(device))
    with pytest.raises(aule.AuleError, match="expected step, got a plan without"):
        prepare(Plan((replace(step(1.0), scalars={}),)), device)
    with pytest.raises(aule.AuleError, match="expected memory for y, got it for x"):
        prepare(TWO, device).bind(["x"])
    with pytest.raises(aule.AuleError, match="expected memory for x"):
        prepare(TWO, device).run({"y": None})
    assert not device.launched


def test_memory_is_given_back_when_there_is_not_enough() -> None:
    class Small(Noting):
        def alloc(self, nbytes: int) -> Allocation:
            if len(self.allocated) == 3:
                raise aule.OutOfMemoryError("[fake] expected memory, got none; free some")
            return super().alloc(nbytes)

    device = Small()
    plan = replace(TWO, workspace={"between": 4, "more": 4})
    memory = {"x": device.alloc(16), "y": device.alloc(16)}
    with pytest.raises(aule.OutOfMemoryError):
        prepare(plan, device).run(memory)
    assert device.allocated[2].freed and not device.launched


def test_on_the_cpu() -> None:
    pytest.importorskip("llvmlite")
    device: Any = registry.find("cpu")
    x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    call = prepare(TWO, device)
    call.run({"x": x, "y": y})
    np.testing.assert_array_equal(y, x + 11)
    call.bind(("y", "x"))([x.ctypes.data, y.ctypes.data])
    np.testing.assert_array_equal(x, y + 11)
    tickets = prepare(Plan((step(1.0, "tickets"),), {"unused": 3}, {"tickets": 4}), device)
    for _ in range(2):
        tickets.run({"x": x, "y": y})
        np.testing.assert_array_equal(y, x + 1)


# -- signatures --------------------------------------------------------------------------------------------------------


def test_signatures_are_bounded() -> None:
    known, device = Signatures(3), Noting()
    for i in range(5):
        assert known.put(("test", i), i, device) == i
    assert [known.get(("test", i)) for i in range(5)] == [None, None, 2, 3, 4]
    known.put(("test", 2), "new", device)
    known.put(("test", 5), 5, device)
    assert known.get(("test", 2)) == "new" and known.get(("test", 3)) is None and len(known) == 3
    with pytest.raises(TypeError):
        known.get(("test", []))
    known.clear()
    assert not len(known)


def test_entries_of_a_closed_device_are_let_go() -> None:
    known, device, other = Signatures(), Noting(), Noting()
    known.put("a", 1, device)
    known.put("b", 2, other)
    device._closed = True
    assert known.get("a") is None and known.get("b") == 2
    known.put("c", 3, other)
    assert len(known) == 2
