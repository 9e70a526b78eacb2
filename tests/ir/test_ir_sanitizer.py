"""Every finding of the sanitizer: a kernel that has it, and the corrected kernel, which passes.

Reports must name the lines of this file that emitted the operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aule.ir import Builder, Value
from aule.ir.interpret import SanitizerError, interpret, shadow
from aule.ir.types import Fragment, f32, i32
from aule.ir.verify import verify

FILE = "test_ir_sanitizer.py"


def here(offset: int = 1) -> str:
    """The next line, as reports name it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{FILE}:{frame.f_back.f_lineno + offset} "


def passes(b: Builder, args: Sequence[Any], grid: tuple[int, int, int] = (1, 1, 1), **options: Any) -> None:
    kernel = b.finish()
    verify(kernel)
    interpret(kernel, grid, args, **options)


def report(b: Builder, args: Sequence[Any], grid: tuple[int, int, int] = (1, 1, 1), **options: Any) -> str:
    with pytest.raises(SanitizerError) as caught:
        interpret(b.finish(), grid, args, **options)
    return str(caught.value)


def contains(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


# -- (a) races in shared memory ------------------------------------------------------------------------------------


def neighbour(barrier: Callable[[Builder], None] | None, by: int = 1) -> tuple[Builder, str, str]:
    """Every thread writes its element and reads its neighbour's."""
    b = Builder("neighbour", workgroup=64)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 64)
    t = b.thread_id()
    write = here()
    b.store(tile, t, t)
    if barrier:
        barrier(b)
    read = here()
    x = b.load(tile, t ^ by)
    b.store(out, b.group_id() * 64 + t, x)
    return b, write, read


def test_read_after_write() -> None:
    b, write, read = neighbour(None)
    message = report(b, [np.zeros(64, np.int32)])
    contains(message, "kernel neighbour", "race in shared memory on tile[1]", write, read)
    contains(message, "thread 0 of workgroup (0, 0, 0) reads", "thread 1 of workgroup (0, 0, 0) writes")
    contains(message, "load i32 %tile", "store %tile")
    b, _, _ = neighbour(Builder.barrier)
    out = np.zeros(64, np.int32)
    passes(b, [out])
    np.testing.assert_array_equal(out, np.arange(64) ^ 1)


def test_a_subgroup_barrier_orders_its_own_subgroup_only() -> None:
    b, _, _ = neighbour(Builder.subgroup_barrier, by=31)
    passes(b, [np.zeros(64, np.int32)])
    b, write, read = neighbour(Builder.subgroup_barrier, by=32)
    contains(report(b, [np.zeros(64, np.int32)]), "race in shared memory", write, read)
    b, write, read = neighbour(Builder.subgroup_barrier, by=31)
    contains(report(b, [np.zeros(64, np.int32)], subgroup_size=16), "race in shared memory", write, read)


def test_a_race_is_found_in_any_workgroup() -> None:
    b = Builder("late", workgroup=32)
    tile, last = b.shared("tile", i32, 32), b.scalar("last", i32)
    t = b.thread_id()
    b.store(tile, t, t)
    b.barrier()
    with b.if_(b.eq(b.group_id(1), last)):
        write = here()
        b.store(tile, t, t + b.load(tile, 31 - t))
    contains(report(b, [4], (20, 5, 1)), "workgroup (0, 4, 0)", write)
    passes(b, [5], (20, 5, 1))


def rotate(barrier: bool) -> tuple[Builder, str, str]:
    """Every thread reads its neighbour's element, and writes its own."""
    b = Builder("rotate", workgroup=64)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 64)
    t = b.thread_id()
    b.store(tile, t, t)
    b.barrier()
    read = here()
    x = b.load(tile, (t + 1) % 64)
    if barrier:
        b.barrier()
    write = here()
    b.store(tile, t, x)
    b.barrier()
    b.store(out, t, b.load(tile, t))
    return b, write, read


def test_write_after_read() -> None:
    b, write, read = rotate(False)
    contains(report(b, [np.zeros(64, np.int32)]), "race in shared memory on tile", "reads it before", write, read)
    b, _, _ = rotate(True)
    out = np.zeros(64, np.int32)
    passes(b, [out])
    np.testing.assert_array_equal(out, np.roll(np.arange(64), -1))


def test_write_after_read_at_the_end_of_the_kernel() -> None:
    b = Builder("last", workgroup=32)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 32)
    t = b.thread_id()
    b.store(tile, t, t)
    b.barrier()
    read = here()
    b.store(out, t, b.load(tile, 0))
    write = here()
    b.store(tile, t, 0)
    contains(report(b, [np.zeros(32, np.int32)]), "on tile[0]", read, write, "thread 0 of workgroup (0, 0, 0) writes")


def test_write_after_read_hidden_by_a_later_ordered_write() -> None:
    """The subgroup barrier orders the second write behind the read, but not the first."""
    b = Builder("hidden", workgroup=32)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 32)
    t = b.thread_id()
    b.store(tile, t, t)
    b.barrier()
    read = here()
    b.store(out, t, b.load(tile, 31 - t))
    first = here()
    b.store(tile, t, 1)
    b.subgroup_barrier()
    b.store(tile, t, 2)
    contains(report(b, [np.zeros(32, np.int32)]), read, first)


def test_readers_of_two_subgroups_are_both_remembered() -> None:
    b = Builder("readers", workgroup=64)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 1)
    t = b.thread_id()
    with b.if_(b.eq(t, 0)):
        b.store(tile, 0, 7)
    b.barrier()
    read = here()
    b.store(out, t, b.load(tile, 0))
    b.subgroup_barrier()
    with b.if_(b.eq(t, 0)):
        write = here()
        b.store(tile, 0, 8)
    contains(report(b, [np.zeros(64, np.int32)]), read, write, "thread 32 of workgroup (0, 0, 0) reads")


def test_many_reads_without_a_barrier_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "_PENDING_LIMIT", 500)
    b = Builder("long", workgroup=32)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 64)
    t, total = b.thread_id(), b.var(b.const(0, i32))
    b.store(tile, t, t)
    b.store(tile, t + 32, t)
    b.barrier()
    with b.loop(0, 40) as i:
        read = here()
        total.value = total.value + b.load(tile, (t + i) % 64)
    b.store(out, t, total.value)
    passes(b, [np.zeros(32, np.int32)])
    with b.if_(b.eq(t, 31)):
        write = here()
        b.store(tile, 5, 0)
    contains(report(b, [np.zeros(32, np.int32)]), "tile[5]", read, write)


def test_write_write_even_of_equal_values() -> None:
    b = Builder("same", workgroup=32)
    tile = b.shared("tile", i32, 4)
    write = here()
    b.store(tile, 2, 5)
    message = report(b, [])
    contains(message, "race in shared memory on tile[2]", "writes")
    assert message.count(write) == 2


def test_write_write_by_two_operations() -> None:
    def kernel(barrier: bool) -> tuple[Builder, str, str]:
        b = Builder("twice", workgroup=32)
        tile = b.shared("tile", i32, 32)
        t = b.thread_id()
        first = here()
        b.store(tile, t, t)
        if barrier:
            b.barrier()
        second = here()
        b.store(tile, 31 - t, t)
        return b, first, second

    b, first, second = kernel(False)
    contains(report(b, []), first, second)
    passes(kernel(True)[0], [])


def test_vector_accesses_race_element_by_element() -> None:
    b = Builder("overlap", workgroup=16)
    tile = b.shared("tile", f32, 32)
    t = b.thread_id()
    write = here()
    b.store(tile, t, b.splat(b.const(0.0, f32), 4), align=1)
    contains(report(b, []), "race in shared memory on tile", write)
    b = Builder("apart", workgroup=8)
    tile = b.shared("tile", f32, 32)
    b.store(tile, b.thread_id() * 4, b.splat(b.const(0.0, f32), 4))
    passes(b, [])


def test_a_barrier_of_other_workgroups_does_not_help() -> None:
    """The workgroups of a launch run side by side here; each has its own barriers."""
    b = Builder("uneven", workgroup=32)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 32)
    t, g = b.thread_id(), b.group_id()
    b.store(tile, t, t)
    with b.if_(b.ne(g, 3)):
        b.barrier()
    b.store(out, g * 32 + t, b.load(tile, 31 - t))
    contains(report(b, [np.zeros(160, np.int32)], (5, 1, 1)), "workgroup (3, 0, 0)")


def test_uneven_loops_with_barriers_pass() -> None:
    b = Builder("uneven", workgroup=32)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 32)
    t, g, total = b.thread_id(), b.group_id(), b.var(b.const(0, i32))
    with b.loop(0, g + 1) as i:
        b.store(tile, t, t + i)
        b.barrier()
        total.value = total.value + b.load(tile, 31 - t)
        b.barrier()
    b.store(out, g * 32 + t, total.value)
    got = np.zeros((5, 32), np.int32)
    passes(b, [got], (5, 1, 1))
    np.testing.assert_array_equal(got[2], 3 * (31 - np.arange(32)) + 3)


# -- races, compared with a search over all pairs of accesses --------------------------------------------------------

LANES, SUBGROUP = 8, 4
Step = tuple[str, int, int, int]
"""Kind, and for accesses: stride and offset of the index, and how many lanes take part."""

accesses = st.tuples(
    st.sampled_from(["load", "store", "atomic"]), st.integers(0, 3), st.integers(0, 7), st.sampled_from([1, 3, 8, 8])
)
barriers = st.sampled_from([("barrier", 0, 0, 0), ("subgroup_barrier", 0, 0, 0)])


def races(steps: Sequence[Step], shared: bool) -> bool:
    """Two lanes, one element, not both reading, not both atomic, and no barrier between that both take part in."""
    events = [
        (time, kind, lane, (lane * stride + offset) % LANES)
        for time, (kind, stride, offset, count) in enumerate(steps)
        for lane in range(count)
    ]
    for n, (then, first, one, element) in enumerate(events):
        for now, second, other, same in events[n + 1 :]:
            if one == other or element != same or {first, second} in ({"load"}, {"atomic"}):
                continue
            between = {kind for kind, *_ in steps[then:now]}
            together = one // SUBGROUP == other // SUBGROUP
            if "barrier" not in between and not (shared and together and "subgroup_barrier" in between):
                return True
    return False


@pytest.mark.parametrize("shared", [True, False])
@given(steps=st.lists(st.one_of(accesses, accesses, barriers), min_size=2, max_size=9))
@example(steps=[("store", 0, 1, 1), ("atomic", 0, 1, 1), ("atomic", 0, 1, 3)])  # an atomic does not hide a store
@settings(max_examples=400, deadline=None)
def test_races_are_found_and_none_invented(shared: bool, steps: list[Step]) -> None:
    b = Builder("random", workgroup=LANES)
    buffer, tile = b.buffer("data", i32, "readwrite"), b.shared("tile", i32, LANES)
    data = tile if shared else buffer
    t = b.thread_id()
    b.store(tile, t, t)
    b.barrier()
    for kind, stride, offset, count in steps:
        if kind == "barrier":
            b.barrier(global_memory=True)
        elif kind == "subgroup_barrier":
            b.subgroup_barrier()
        else:
            index = (t * stride + offset) % LANES
            with b.if_(t < count):
                if kind == "load":
                    b.load(data, index)
                elif kind == "store":
                    b.store(data, index, t)
                else:
                    b.atomic("add", data, index, t)
    args = [np.zeros(LANES, np.int32)]
    if races(steps, shared):
        contains(report(b, args, subgroup_size=SUBGROUP), f"race in {'shared' if shared else 'global'} memory")
    else:
        interpret(b.finish(), (1, 1, 1), args, subgroup_size=SUBGROUP)


# -- atomics -------------------------------------------------------------------------------------------------------


def counted(order: Callable[[Builder], None] | None, *, workgroup: int = 64) -> tuple[Builder, str, str]:
    b = Builder("counted", workgroup)
    out, count = b.buffer("out", i32, "write"), b.shared("count", i32, 1)
    t = b.thread_id()
    with b.if_(b.eq(t, 0)):
        b.store(count, 0, 0)
    b.barrier()
    update = here()
    b.atomic("add", count, 0, 1)
    b.atomic("max", count, 0, 3)
    if order:
        order(b)
    read = here()
    b.store(out, t, b.load(count, 0))
    return b, update, read


def test_atomics_do_not_race_with_each_other_but_with_plain_accesses() -> None:
    out = np.zeros(64, np.int32)
    passes(counted(Builder.barrier)[0], [out])
    np.testing.assert_array_equal(out, 64)
    b, _, read = counted(None)
    contains(report(b, [out]), "several threads", read)
    contains(report(counted(Builder.subgroup_barrier)[0], [out]), "several threads")
    passes(counted(Builder.subgroup_barrier, workgroup=32)[0], [out])
    contains(report(counted(None, workgroup=32)[0], [out]), "a thread of subgroup 0 of workgroup (0, 0, 0)")


def test_an_atomic_races_with_a_plain_store_before_it() -> None:
    b = Builder("early", workgroup=32)
    count = b.shared("count", i32, 32)
    t = b.thread_id()
    write = here()
    b.store(count, t, 0)
    update = here()
    b.atomic("add", count, 0, 1)
    contains(report(b, []), "updates it", write, update)


def test_an_atomic_of_memory_never_written() -> None:
    b = Builder("blank", workgroup=32)
    update = here()
    b.atomic("add", b.shared("count", i32, 1), 0, 1)
    contains(report(b, []), "never written: count[0]", update)


# -- (b) bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["global", "shared", "private"])
@pytest.mark.parametrize("sanitize", [True, False])
def test_out_of_bounds(space: str, sanitize: bool) -> None:
    def kernel(offset: int) -> tuple[Builder, str]:
        b = Builder("bounds", workgroup=32)
        buffer = b.buffer("data", i32, "write")
        pointer = {"global": lambda: buffer, "shared": lambda: b.shared("data_shared", i32, 64),
                   "private": lambda: b.private("data_private", i32, 64)}[space]()  # fmt: skip
        line = here()
        b.store(pointer, (b.thread_id() + offset) * 2, b.vector([b.const(0, i32)] * 2))
        return b, line

    data = np.zeros(64, np.int32)
    passes(kernel(0)[0], [data], sanitize=sanitize)
    b, line = kernel(2)
    message = report(b, [data], sanitize=sanitize)
    contains(message, "out of bounds: index 64 and the 1 after it of data", "64 elements", line)
    contains(message, "thread 30 of workgroup (0, 0, 0)", "store %data")
    contains(report(kernel(-1)[0], [data], sanitize=sanitize), "index -2", "thread 0 of workgroup")


def test_out_of_bounds_in_a_branch_names_the_right_thread() -> None:
    b = Builder("branch", workgroup=32)
    source = b.buffer("source", f32)
    out = b.buffer("out", f32, "write")
    t = b.thread_id()
    with b.if_(t > 20):
        line = here()
        b.store(out, t, b.load(source, t))
    message = report(b, [np.zeros(25, np.float32), np.zeros(32, np.float32)])
    contains(message, "thread 25 of", "index 25 of source", line)


# -- (c) memory never written --------------------------------------------------------------------------------------


def test_read_of_shared_memory_never_written() -> None:
    def kernel(written: int) -> tuple[Builder, str]:
        b = Builder("blank", workgroup=32)
        out, tile = b.buffer("out", f32, "write"), b.shared("tile", f32, 32)
        t = b.thread_id()
        with b.if_(t < written):
            b.store(tile, t, 1.0)
        b.barrier()
        line = here()
        b.store(out, b.group_id() * 32 + t, b.load(tile, t))
        return b, line

    data = np.zeros(64, np.float32)
    passes(kernel(32)[0], [data], (2, 1, 1))
    b, line = kernel(20)
    contains(report(b, [data], (2, 1, 1)), "read of shared memory that was never written: tile[20]", "thread 20", line)
    interpret(b.finish(), (2, 1, 1), [data], sanitize=False)
    assert np.isnan(data[20])


def test_shared_memory_does_not_survive_its_workgroup() -> None:
    b = Builder("stale", workgroup=1024)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 1)
    with b.if_(b.eq(b.thread_id() + b.group_id(), 0)):
        b.store(tile, 0, 1)
    b.barrier()
    with b.if_(b.eq(b.thread_id(), 0)):
        b.store(out, b.group_id(), b.load(tile, 0))
    contains(report(b, [np.zeros(2, np.int32)], (2, 1, 1)), "never written: tile[0]", "workgroup (1, 0, 0)")


def test_read_of_private_memory_never_written() -> None:
    def kernel(inside: bool) -> tuple[Builder, str]:
        b = Builder("own", workgroup=8)
        out = b.buffer("out", i32, "write")
        t, total = b.thread_id(), b.var(b.const(0, i32))
        mine = b.private("mine", i32, 2)
        with b.loop(0, 3) as i:
            if inside:
                mine = b.private("fresh", i32, 2)
            with b.if_(b.eq(i, 0)):
                b.store(mine, 0, t)
            line = here()
            total.value = total.value + b.load(mine, 0)
        b.store(out, t, total.value)
        return b, line

    passes(kernel(False)[0], [np.zeros(8, np.int32)])
    b, line = kernel(True)
    contains(report(b, [np.zeros(8, np.int32)]), "read of private memory that was never written: fresh[0]", line)


# -- (d) divergent barriers and subgroup operations ----------------------------------------------------------------


def test_barrier_in_divergent_control_flow() -> None:
    b = Builder("split", workgroup=64)
    with b.if_(b.thread_id() < 40):
        line = here()
        b.barrier()
    message = report(b, [], (2, 1, 1))
    contains(message, "barrier in divergent control flow", "thread 40 of workgroup (0, 0, 0)", line)
    b = Builder("together", workgroup=64)
    with b.if_(b.group_id() < 1):
        b.barrier()
    passes(b, [], (2, 1, 1))


def test_barrier_in_a_loop_that_threads_leave_one_by_one() -> None:
    b = Builder("leaving", workgroup=4)
    with b.loop(0, b.thread_id() + 1):
        line = here()
        b.barrier()
    contains(report(b, []), "barrier in divergent control flow", "thread 0 of", line)


@pytest.mark.parametrize(
    "operation",
    [
        lambda b, x: b.subgroup_barrier(),
        lambda b, x: b.subgroup_reduce("add", x),
        lambda b, x: b.subgroup_any(x > 3),
        lambda b, x: b.shuffle(x, 0),
        lambda b, x: b.shuffle_xor(x, 1),
    ],
)
def test_subgroup_operation_in_divergent_control_flow(operation: Callable[[Builder, Value], None]) -> None:
    def kernel(limit: int) -> Builder:
        b = Builder("part", workgroup=64)
        x = b.thread_id()
        with b.if_(x < limit):
            operation(b, x)
        return b

    passes(kernel(32), [])
    line = f"{FILE}:{operation.__code__.co_firstlineno} "
    contains(report(kernel(33), []), "subgroup operation in divergent control flow", "thread 33 of workgroup", line)


def test_shuffle_from_a_lane_that_does_not_exist() -> None:
    b = Builder("beyond", workgroup=32)
    line = here()
    b.shuffle(b.thread_id(), b.lane_id() + 1)
    contains(report(b, []), "shuffle from lane 32, which does not exist", "thread 31", line)
    b = Builder("partial", workgroup=40)
    line = here()
    b.shuffle_xor(b.thread_id(), 8)
    contains(report(b, []), "which does not exist", line)


# -- (e) alignment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sanitize", [True, False])
def test_misaligned_vector_access(sanitize: bool) -> None:
    def kernel(offset: int, align: int) -> tuple[Builder, str]:
        b = Builder("vectors", workgroup=4)
        source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
        t = b.thread_id()
        line = here()
        x = b.load(source, t * 4 + offset, 4, align=align)
        b.store(out, t * 4, x)
        return b, line

    args = [np.zeros(20, np.float32), np.zeros(16, np.float32)]
    passes(kernel(2, 2)[0], args, sanitize=sanitize)
    passes(kernel(4, 4)[0], args, sanitize=sanitize)
    b, line = kernel(2, 4)
    contains(report(b, args, sanitize=sanitize), "misaligned access: index 2 of source is not a multiple of 4", line)


# -- (f) races in global memory ------------------------------------------------------------------------------------


def test_two_workgroups_write_one_element() -> None:
    def kernel(workgroup: int) -> tuple[Builder, str]:
        b = Builder("collide", workgroup)
        out = b.buffer("out", i32, "write")
        line = here()
        b.store(out, b.group_id() * 16 + b.thread_id(), 1)
        return b, line

    data = np.zeros(16 * 300 + 1024, np.int32)
    passes(kernel(16)[0], [data], (300, 1, 1))
    for workgroup in (17, 1024):  # in one batch of the interpreter, and in two
        b, line = kernel(workgroup)
        message = report(b, [data], (300, 1, 1))
        contains(message, "race in global memory on out[16]", "thread 0 of workgroup (1, 0, 0)", "workgroup (0, 0, 0)")
        assert message.count(line) == 2


def test_reading_what_another_thread_wrote() -> None:
    def kernel(order: Callable[[Builder], None]) -> tuple[Builder, str, str]:
        b = Builder("mailbox", workgroup=32)
        box = b.buffer("box", i32, "readwrite")
        own = b.group_id() * 64
        t = b.thread_id()
        write = here()
        b.store(box, own + t, t)
        order(b)
        read = here()
        b.store(box, own + 32 + t, b.load(box, own + 31 - t))
        return b, write, read

    data = np.zeros(128, np.int32)
    passes(kernel(lambda b: b.barrier(global_memory=True))[0], [data], (2, 1, 1))
    np.testing.assert_array_equal(data[96:], 31 - np.arange(32))
    b, write, read = kernel(Builder.barrier)  # orders shared memory only
    contains(report(b, [data], (2, 1, 1)), "race in global memory on box[31]", write, read)


def test_writing_what_another_workgroup_read() -> None:
    for workgroup in (32, 1024):
        b = Builder("inplace", workgroup)
        data = b.buffer("data", f32, "readwrite")
        i = b.group_id() * workgroup + b.thread_id()
        read = here()
        x = b.load(data, (i + 1) % (2 * workgroup))
        b.barrier(global_memory=True)
        write = here()
        b.store(data, i, x)
        message = report(b, [np.zeros(2 * workgroup, np.float32)], (2, 1, 1))
        contains(message, "race in global memory", read, write)
    b = Builder("own", workgroup=32)
    data = b.buffer("data", f32, "readwrite")
    i = b.group_id() * 32 + b.thread_id()
    b.store(data, i, b.load(data, i) + 1.0)
    b.barrier(global_memory=True)
    neighbour_of = b.group_id() * 32 + (b.thread_id() ^ 1)
    b.store(data, neighbour_of, b.load(data, neighbour_of) + 1.0)
    values = np.zeros(3200, np.float32)
    passes(b, [values], (100, 1, 1))
    np.testing.assert_array_equal(values, 2)


@pytest.mark.parametrize("missing", ["", "nothing", "barrier before", "release", "ticket", "acquire", "barrier after"])
def test_the_last_workgroup_reads_what_all_have_written(missing: str) -> None:
    """A ticket and two fences, or one that is ordered, order workgroups; whatever is left out, the race is seen."""
    b = Builder("last", workgroup=32)
    data, out, tickets = (
        b.buffer("data", i32, "readwrite"),
        b.buffer("out", i32, "write"),
        b.buffer("tickets", i32, "readwrite"),
    )
    t, group, groups = b.thread_id(), b.group_id(), b.group_count()
    write = here()
    b.store(data, group * 32 + t, group + t)
    b.barrier(global_memory=missing != "barrier before")
    drawn = b.var(b.const(-1, i32))
    with b.if_(b.eq(t, 0)):
        if missing not in ("release", "nothing"):
            b.device_fence()
        drawn.value = b.atomic("add", tickets, group if missing == "ticket" else 0, 1, ordered=missing == "nothing")
        if missing not in ("acquire", "nothing"):
            b.device_fence()
    last = b.eq(group, groups - 1) if missing == "ticket" else b.workgroup_any(b.eq(drawn.value, groups - 1))
    with b.if_(last):
        b.barrier(global_memory=missing != "barrier after")
        total = b.var(b.const(0, i32))
        with b.loop(0, groups) as i:
            read = here()
            total.value = total.value + b.load(data, i * 32 + (t ^ 1))
        b.store(out, t, total.value)
        with b.if_(b.eq(t, 0)):
            b.atomic("exchange", tickets, 0, 0)
    grid = (70, 1, 1)  # several batches of lanes
    arrays = [np.zeros(70 * 32, np.int32), np.zeros(32, np.int32), np.zeros(70, np.int32)]
    if missing not in ("", "nothing"):
        contains(report(b, arrays, grid), "race in global memory on data[", write, read)
        return
    passes(b, arrays, grid)
    np.testing.assert_array_equal(arrays[1], 70 * (np.arange(32) ^ 1) + 69 * 35)
    assert not arrays[2].any()


def test_writing_what_another_workgroup_has_read_before_a_fence() -> None:
    def kernel(fences: bool) -> Builder:
        b = Builder("turns", workgroup=32)
        data, ticket = b.buffer("data", i32, "readwrite"), b.buffer("ticket", i32, "readwrite")
        out = b.buffer("out", i32, "write")
        t = b.thread_id()
        b.store(out, b.group_id() * 32 + t, b.load(data, t))
        b.barrier(global_memory=True)
        drawn = b.var(b.const(-1, i32))
        with b.if_(b.eq(t, 0)):
            if fences:
                b.device_fence()
            drawn.value = b.atomic("add", ticket, 0, 1)
            if fences:
                b.device_fence()
        with b.if_(b.workgroup_any(b.eq(drawn.value, b.group_count() - 1))):
            b.barrier(global_memory=True)
            b.store(data, t, t)
        return b

    def arrays() -> list[Any]:
        return [np.zeros(32, np.int32), np.zeros(1, np.int32), np.zeros(96, np.int32)]

    passes(kernel(True), arrays(), (3, 1, 1))
    contains(report(kernel(False), arrays(), (3, 1, 1)), "race in global memory on data[")


# -- fragments -----------------------------------------------------------------------------------------------------


def test_fragments_in_shared_memory() -> None:
    type_ = Fragment(f32, 8, 8, "accumulator")

    def kernel(order: Callable[[Builder], None] | None, rows: int = 16) -> tuple[Builder, str, str]:
        b = Builder("stage", workgroup=64, subgroup_size=32)
        out, tile = b.buffer("out", f32, "write"), b.shared("tile", f32, rows * 8)
        part = b.subgroup_id()
        write = here()
        b.fragment_store(tile, part * 64, 8, b.fragment_fill(type_, 2.0))
        if order:
            order(b)
        read = here()
        b.store(out, b.thread_id(), b.load(tile, b.thread_id() + part * 32))
        return b, write, read

    out = np.zeros(64, np.float32)
    passes(kernel(Builder.subgroup_barrier)[0], [out])
    np.testing.assert_array_equal(out, 2)
    b, write, read = kernel(None)
    contains(report(b, [out]), "a thread of subgroup 0 of workgroup (0, 0, 0) writes", write, read)
    b, write, _ = kernel(None, rows=12)
    contains(report(b, [out]), "out of bounds: index 96 of tile", write, "thread 32")


def test_fragment_operands_must_agree() -> None:
    b = Builder("disagree", workgroup=32, subgroup_size=32)
    source = b.buffer("source", f32)
    line = here()
    b.fragment_load(Fragment(f32, 8, 8, "a"), source, b.thread_id(), 8)
    contains(report(b, [np.zeros(100, np.float32)]), "differs between the lanes", "thread 1 of", line)


def test_two_subgroups_store_fragments_over_each_other() -> None:
    b = Builder("over", workgroup=64, subgroup_size=32)
    tile = b.shared("tile", f32, 64)
    write = here()
    b.fragment_store(tile, 0, 8, b.fragment_fill(Fragment(f32, 8, 8, "accumulator"), 0.0))
    message = report(b, [])
    contains(message, "race in shared memory on tile[0]", "subgroup 0", "subgroup 1", write)


# -- asynchronous copies -------------------------------------------------------------------------------------------


def test_copies_are_there_after_the_wait_and_not_before() -> None:
    def kernel(wait: int | None) -> tuple[Builder, str]:
        b = Builder("copies", workgroup=32)
        source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
        tile = b.shared("tile", f32, 256)
        t = b.thread_id() * 4
        for half in range(2):
            b.async_copy(tile, t + half * 128, source, t + half * 128, 4)
            b.async_commit()
        if wait is not None:
            b.async_wait(wait)
        read = here()
        b.store(out, t, b.load(tile, t + 128, 4))
        return b, read

    x, out = np.arange(256, dtype=np.float32), np.zeros(128, np.float32)
    passes(kernel(0)[0], [x, out])
    np.testing.assert_array_equal(out, x[128:])
    for wait in (None, 1):  # one group may still be on its way, and it is the one that is read
        b, read = kernel(wait)
        contains(report(b, [x, out]), "never written", read)


def test_copies_of_what_does_not_exist_are_zeros() -> None:
    b = Builder("zeros", workgroup=32)
    source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
    tile = b.shared("tile", f32, 128)
    t = b.thread_id() * 4
    b.async_copy(tile, t, source, b.min(t, 76), 4, t < 80)
    b.async_commit()
    b.async_wait()
    b.store(out, t, b.load(tile, t, 4))
    x, out_array = np.arange(1, 81, dtype=np.float32), np.full(128, 7, np.float32)
    passes(b, [x, out_array])
    np.testing.assert_array_equal(out_array, np.pad(x, (0, 48)))


def test_two_copies_to_one_place_do_not_meet() -> None:
    def kernel(wait: bool) -> tuple[Builder, str]:
        b = Builder("twice", workgroup=32)
        source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
        tile = b.shared("tile", f32, 128)
        t = b.thread_id() * 4
        b.async_copy(tile, t, source, t, 4)
        b.async_commit()
        if wait:
            b.async_wait()
        again = here()
        b.async_copy(tile, t, source, t + 128, 4)
        b.async_commit()
        b.async_wait()
        b.store(out, t, b.load(tile, t, 4))
        return b, again

    x, out = np.arange(256, dtype=np.float32), np.zeros(128, np.float32)
    passes(kernel(True)[0], [x, out])
    np.testing.assert_array_equal(out, x[128:])
    b, again = kernel(False)
    contains(report(b, [x, out]), "another copy is under way to: tile[0]", again)


def test_copies_are_seen_by_others_after_a_barrier() -> None:
    def kernel(order: bool) -> tuple[Builder, str, str]:
        b = Builder("handed", workgroup=32)
        source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
        tile = b.shared("tile", f32, 128)
        t = b.thread_id() * 4
        copy = here()
        b.async_copy(tile, t, source, t, 4)
        b.async_commit()
        b.async_wait()
        if order:
            b.barrier()
        read = here()
        b.store(out, t, b.load(tile, 124 - t, 4))
        return b, copy, read

    x, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    passes(kernel(True)[0], [x, out])
    np.testing.assert_array_equal(out.reshape(32, 4), x.reshape(32, 4)[::-1])
    b, copy, read = kernel(False)
    contains(report(b, [x, out]), "race in shared memory", copy, read)


# -- clusters ------------------------------------------------------------------------------------------------------


def of_neighbours(*, before: bool = True, after: bool = True, again: bool = False, of: int = 3) -> tuple[Builder, str]:
    """Workgroups by fours, each of which reads what the next of its cluster has written; and where it is read."""
    b = Builder("neighbours", workgroup=32, cluster=4)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 32)
    t, group = b.thread_id(), b.group_id()
    b.store(tile, t, group * 100 + t)
    if before:
        b.cluster_barrier()
    else:
        b.barrier()
    read = here()
    found = b.cluster_load(tile, 31 - t, (group + 1) & of)
    if again:
        b.store(tile, t, t)
    b.store(out, group * 32 + t, found)
    if after:
        b.cluster_barrier()
    return b, read


def test_workgroups_of_a_cluster_read_each_others_memory() -> None:
    out = np.zeros(256, np.int32)
    passes(of_neighbours()[0], [out], (8, 1, 1))
    groups = np.arange(8)
    whose = groups // 4 * 4 + (groups + 1) % 4
    np.testing.assert_array_equal(out.reshape(8, 32), whose[:, None] * 100 + np.arange(31, -1, -1))


@pytest.mark.parametrize(
    ("left_out", "what"),
    [
        ({"before": False}, "no barrier orders the two"),
        ({"after": False}, "it ends, and"),
        ({"again": True}, "it is written in"),
        ({"of": 7}, "no workgroup 4 in a cluster of 4"),
    ],
    ids=["before", "after", "again", "number"],
)
def test_only_barriers_of_clusters_order_their_workgroups(left_out: dict[str, Any], what: str) -> None:
    b, read = of_neighbours(**left_out)
    contains(report(b, [np.zeros(256, np.int32)], (8, 1, 1)), what, read)


def of_mail(*, before: bool = True, after: bool = True, plain: bool = False, of: int = 3) -> tuple[Builder, str]:
    """Workgroups by fours, each of which posts a word to each thread of the next of its cluster, which takes it."""
    b = Builder("mail", workgroup=32, cluster=4)
    out, tile = b.buffer("out", i32, "write"), b.shared("tile", i32, 32)
    t, group = b.thread_id(), b.group_id()
    b.store(tile, t, 0)
    if before:
        b.cluster_barrier()
    else:
        b.barrier()
    posted = here()
    b.cluster_post(tile, 31 - t, (group + 1) & of, group * 100 + t + 1)
    word, done = b.var(b.const(0, i32)), b.var(b.const(0, i32))
    with b.repeat(done):
        word.value = b.load(tile, t) if plain else b.atomic("exchange", tile, t, 0)
        done.value = word.value
    b.store(out, group * 32 + t, word.value)
    if after:
        b.cluster_barrier()
    return b, posted


def test_workgroups_of_a_cluster_post_to_each_other() -> None:
    out = np.zeros(256, np.int32)
    passes(of_mail()[0], [out], (8, 1, 1))
    groups = np.arange(8)
    whose = groups // 4 * 4 + (groups + 3) % 4
    np.testing.assert_array_equal(out.reshape(8, 32), whose[:, None] * 100 + np.arange(32, 0, -1))


@pytest.mark.parametrize(
    ("left_out", "what"),
    [
        ({"before": False}, "no barrier orders the two"),
        ({"after": False}, "it ends, and"),
        ({"plain": True}, "no barrier orders the two"),
        ({"of": 7}, "no workgroup 4 in a cluster of 4"),
    ],
    ids=["before", "after", "plain", "number"],
)
def test_mail_comes_behind_a_barrier_and_is_taken_by_atomics(left_out: dict[str, Any], what: str) -> None:
    b, posted = of_mail(**left_out)
    contains(report(b, [np.zeros(256, np.int32)], (8, 1, 1)), what, posted)


def test_waiting_for_what_nobody_posts() -> None:
    b = Builder("idle", workgroup=32, cluster=2)
    tile, done = b.shared("tile", i32, 32), b.var(b.const(0, i32))
    b.store(tile, b.thread_id(), 0)
    b.cluster_barrier()
    with b.repeat(done):
        done.value = b.atomic("exchange", tile, b.thread_id(), 0)
    contains(report(b, [], (2, 1, 1)), "wait for what no workgroup of the cluster leaves")


def test_all_workgroups_of_a_cluster_arrive() -> None:
    b = Builder("alone", workgroup=32, cluster=2)
    b.buffer("out", f32, "write")
    with b.if_(b.eq(b.group_id(), 0)):
        b.cluster_barrier()
    contains(report(b, [np.zeros(1, np.float32)], (2, 1, 1)), "this workgroup does not arrive, others do")


def test_a_vote_of_the_workgroup_orders_as_a_barrier() -> None:
    b = Builder("vote", workgroup=64)
    out, tile = b.buffer("out", f32, "write"), b.shared("tile", f32, 64)
    t = b.thread_id()
    b.store(tile, t, b.cast(t, f32))
    found = b.workgroup_any(b.eq(t, 40) & b.eq(b.group_id(), 1))
    b.store(out, b.group_id() * 64 + t, b.select(found, b.load(tile, 63 - t), 0.0))
    result = np.ones(128, np.float32)
    verify(b.finish())
    interpret(b.finish(), (2, 1, 1), [result])
    np.testing.assert_array_equal(result, [*[0] * 64, *range(63, -1, -1)])


# -- arithmetic that is not defined --------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), [(-7, 3), (7, -3), (7, 3)])
def test_remainders_of_negative_numbers_in_a_quick_kernel(left: int, right: int) -> None:
    """They are what a device makes of them; an exact kernel has them."""
    for arithmetic in ("exact", "quick"):
        b = Builder("rest", 1, arithmetic=arithmetic)  # type: ignore[arg-type]
        x, out = b.buffer("x", i32), b.buffer("out", i32, "write")
        b.store(out, 0, b.load(x, 0) % b.load(x, 1))
        result = np.zeros(1, np.int32)
        fails = arithmetic == "quick" and min(left, right) < 0
        with pytest.raises(SanitizerError, match="remainder of negative numbers") if fails else nullcontext():
            interpret(b.finish(), (1, 1, 1), [np.array([left, right], np.int32), result])
        assert result[0] == (0 if fails else int(np.fmod(left, right)))


def test_division_by_zero_and_wide_shifts() -> None:
    for symbol, message in (("div", "division by zero"), ("rem", "division by zero"), ("shl", "shift by 32 bits")):
        b = Builder("undefined", workgroup=40)
        t = b.thread_id()
        line = here()
        b.binary(symbol, t, t - 7 if symbol != "shl" else t)
        contains(report(b, []), message, "thread 7 of" if symbol != "shl" else "thread 32 of", line)


def test_loops_that_would_not_end() -> None:
    b = Builder("still", workgroup=4)
    step = b.scalar("step", i32)
    line = here()
    with b.loop(0, 10, step):
        pass
    passes(b, [3])
    contains(report(b, [0]), "step that is not positive", line)
    b = Builder("over", workgroup=4)
    stop = b.scalar("stop", i32)
    with b.loop(0, stop, 1 << 30):
        pass
    passes(b, [1 << 30])
    contains(report(b, [2**31 - 1]), "index overflows")
