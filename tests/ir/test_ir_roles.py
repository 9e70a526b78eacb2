"""Roles: crews of a workgroup that run side by side, and mbarriers at which they wait."""

from __future__ import annotations

import numpy as np
import pytest

from aule.errors import KernelError
from aule.ir import Builder, KernelIR, Var
from aule.ir.interpret import SanitizerError, interpret
from aule.ir.types import Role, f32, i32, u64
from aule.ir.verify import verify

STAGES, LENGTH = 4, 128
FULL, EMPTY = 0, STAGES


def pipeline(
    *, wait_empty: bool = True, wait_full: bool = True, arrive_full: bool = True, arrivals: int = 32, phase: int = 0,
    shift: int = 0,
) -> KernelIR:  # fmt: skip
    """Four crews copy rows into a slot of shared memory each; four subgroups add them up."""
    b = Builder("pipeline", 256, 32, 128)
    source, out, count = b.buffer("source", f32), b.buffer("out", f32, "write"), b.scalar("count", i32)
    slots, barriers = b.shared("slots", f32, STAGES * LENGTH), b.shared("barriers", u64, 2 * STAGES)
    for stage in range(STAGES):
        b.mbarrier_init(barriers, FULL + stage, threads=arrivals)
        b.mbarrier_init(barriers, EMPTY + stage, threads=128)
    b.barrier()
    with b.roles(Role(4, registers=200), Role(1, crews=4, registers=24)) as (compute, copy):
        with compute:
            total = b.var(b.const(0.0, f32))
            with b.loop(0, count) as i:
                slot, parity = i % STAGES, i // STAGES % 2
                if wait_full:
                    b.mbarrier_wait(barriers, slot + FULL, parity)
                total.value = total.value + b.load(slots, slot * LENGTH + b.thread_id())
                b.mbarrier_arrive(barriers, slot + EMPTY)
            b.barrier()
            b.store(out, b.thread_id(), total.value)
        with copy:
            me = b.subgroup_id() - 4
            with b.loop(me, count, 4) as i:
                slot, parity = i % STAGES, i // STAGES % 2
                if wait_empty:
                    b.mbarrier_wait(barriers, slot + EMPTY, (parity ^ 1) ^ phase)
                for part in range(LENGTH // 32):
                    at = b.lane_id() + 32 * part
                    b.store(slots, (slot + shift) % STAGES * LENGTH + at, b.load(source, i * LENGTH + at))
                if arrive_full:
                    b.mbarrier_arrive(barriers, slot + FULL)
    return b.finish()


def run(kernel: KernelIR, count: int = 9, groups: int = 2) -> np.ndarray:
    source = np.random.default_rng(0).standard_normal((count, LENGTH), np.float32)
    out = np.zeros(LENGTH, np.float32)
    interpret(kernel, (groups, 1, 1), [source.reshape(-1), out, count])
    np.testing.assert_allclose(out, source.sum(0), rtol=1e-5, atol=1e-5)
    return out


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_crews_pass_rows_on(count: int) -> None:
    kernel = pipeline()
    verify(kernel)
    run(kernel, count, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"wait_full": False}, "read of shared memory that was never written"),
        ({"wait_empty": False}, "a wait for the wrong phase of an mbarrier: 2 has ended last"),
        ({"shift": 1}, "race in shared memory"),
        ({"arrive_full": False}, "no thread can go on: .*phase 0 of an mbarrier, at which 0 of 32 threads have"),
        ({"arrivals": 64}, "no thread can go on: .*at which 32 of 64 threads have"),
        ({"arrivals": 16}, "more arrivals at an mbarrier than it has threads"),
        ({"phase": 1}, "no thread can go on"),
    ],
)
def test_sanitizer_finds_mistakes(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(SanitizerError, match=message):
        run(pipeline(**wrong))


def roles(*given: Role, registers: int = 128) -> KernelIR:
    b = Builder("roles", 256, 32, registers)
    with b.roles(*given) as blocks:
        for block in blocks:
            with block:
                b.comment("nothing")
    return b.finish()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((Role(8, registers=128),), "two roles or more"),
        ((Role(4, registers=128), Role(3, registers=128)), "subgroups of all 256 threads"),
        ((Role(5, registers=128), Role(3, registers=128)), "roles of whole warpgroups"),
        ((Role(4, registers=100), Role(4, registers=128)), "a multiple of 8"),
        ((Role(4, registers=240), Role(4, registers=24)), "at most 32768 registers"),
    ],
)
def test_rules_of_roles(given: tuple[Role, ...], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        verify(roles(*given))


def test_rules_of_blocks() -> None:
    def checked(inside: object) -> None:
        b = Builder("roles", 256, 32, 128)
        outer = b.var(b.const(0, i32))
        with b.roles(Role(4, registers=128), Role(1, crews=4, registers=128)) as (_, several), several:
            inside(b, outer)  # type: ignore[operator]
        verify(b.finish())

    def set_outer(b: Builder, outer: Var) -> None:
        outer.value = outer.value + 1

    with pytest.raises(KernelError, match="set only variables of its own"):
        checked(set_outer)
    with pytest.raises(KernelError, match="no barrier in a role of several crews"):
        checked(lambda b, outer: b.barrier())
