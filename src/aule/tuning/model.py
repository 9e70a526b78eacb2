"""A model of what fits on a device and how much runs at a time, for devices that were not measured."""

from __future__ import annotations

from aule.target import Target
from aule.tuning.lookup import number, use

REGISTERS = 1 << 16
"""32-bit registers of a compute unit that does not say how many it has."""
MOST_REGISTERS = 255
"""Registers of a thread at most."""


def fits(target: Target, threads: int, shared_bytes: int, resident: int = 1) -> bool:
    """Whether the device has such workgroups, and shared memory for ``resident`` of them."""
    return threads <= target.max_threads and resident * shared_bytes <= target.max_shared_bytes


def resident(target: Target, threads: int, registers: int = 0, shared_bytes: int = 0) -> int:
    """Workgroups that a compute unit runs at a time, at least one.

    Parameters
    ----------
    registers : int
        Registers of a thread; 0 stands for the most that it can have.
    shared_bytes : int
        Shared memory of a workgroup; counts where the unit's is known.
    """
    held = (target.registers_per_unit or REGISTERS) // (threads * (registers or MOST_REGISTERS))
    if shared_bytes and target.shared_per_unit:
        held = min(held, target.shared_per_unit // shared_bytes)
    return max(held, 1)


def units(target: Target) -> int:
    """Compute units; a guess where the device does not say how many it has."""
    return target.compute_units or int(number(target, "usual_units"))


def tasks(target: Target, rows: bool = False) -> int:
    """Tasks of a launch on a CPU at which all threads have work, and the last to finish has little left; of row
    operations if ``rows``."""
    return int(use(target, "cpu.tasks", rows=rows)["per_thread"]) * max(target.compute_units, 1)


def cached_bytes(target: Target, op: str) -> int:
    """Bytes that workgroups running at the same time may read and still find in the second-level cache: the measured
    number, or two thirds of the cache, or a guess where the device does not say how large it is."""
    measured = use(target, f"{op}.cached_bytes").get("value", 0)
    return int(measured or 2 * target.l2_bytes // 3 or number(target, f"{op}.usual_cached_bytes"))
