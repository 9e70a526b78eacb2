"""The devices that tests run on: all that are found, the MSL shim, and the stand-in for AMD's libraries."""

from __future__ import annotations

import functools
import os

import pytest

from aule.backends import registry
from aule.errors import BackendUnavailableError, InvalidArgumentError
from aule.runtime.base import Device

FULL = os.environ.get("AULE_FULL_GRID") == "1"
HIP = ("hip-gfx1100", "hip-gfx942")
"""Devices of the stand-in with 32 and 64 lanes to a wave. `test_hip_standin` runs a sample on these and others."""
BACKENDS = ("cuda", "vulkan", "opencl", "webgpu", "msl-shim", *(HIP if FULL else ()), "cpu", "cpu-avx2", "cpu-baseline")
CPUS = ("cpu", "cpu-avx2", "cpu-baseline")
"""The CPU with all of its features, and with fewer."""


@functools.cache
def shim() -> Device:
    import msl_shim

    if not msl_shim.available():
        raise BackendUnavailableError("msl-shim", "[msl-shim] expected g++, got none; install it")
    return msl_shim.ShimDevice()


def stand_in(name: str) -> Device:
    import hip_standin

    if not hip_standin.available():
        raise BackendUnavailableError("hip", "[hip] expected g++ for the stand-in, got none; install it")
    arch = name.removeprefix("hip-")
    return next(device for device in hip_standin.shared()[1] if device.target.arch == arch)


@functools.cache
def lowered(level: str) -> Device:
    """The CPU device with fewer features."""
    from aule.runtime import _cpu_llvm
    from aule.runtime.cpu import CpuDevice

    registry.devices("cpu")  # refuses with the remedy where there is no llvmlite
    try:
        return CpuDevice(_cpu_llvm.machine(level))
    except InvalidArgumentError as error:  # this architecture has no such level
        pytest.skip(error.message)


def device(name: str) -> Device:
    """The first device of a backend; raises `BackendUnavailableError` when there is none."""
    if name == "msl-shim":
        return shim()
    if name.startswith("hip-"):
        return stand_in(name)
    if name in CPUS[1:]:
        return lowered(name.removeprefix("cpu-"))
    found = registry.find(name)
    assert found is not None
    return found


def need(name: str) -> Device:
    """The device, or a skip that says why it is not there."""
    try:
        return device(name)
    except BackendUnavailableError as error:  # nothing else: a device that fails to open is no reason to skip
        pytest.skip(f"{name}: {error.message}")


_PARTS = {"vulkan": 0, "opencl": 1, "webgpu": 2, "metal": 0}


def spare(device: Device, number: int, parts: int = 3, cpu_parts: int = 1) -> None:
    """Skip all but one case in ``parts`` on software devices, the shim, and a CPU with fewer features, since compiling
    takes long. Each of these runs other cases; with three parts, three together run all. The unrestricted CPU runs
    one case in ``cpu_parts``. A GPU runs all cases, and so does every device with ``AULE_FULL_GRID=1``."""
    backend = device.target.backend
    if backend == "cpu":
        mine = 1 if device is lowered("avx2") else 2
        if device is registry.find("cpu"):
            mine, parts = 0, cpu_parts
    else:
        mine = _PARTS.get(backend) if device.target.software else None
    if mine is not None and number % parts != mine and not FULL:
        pytest.skip(f"one case in {parts} is run here; AULE_FULL_GRID=1 runs all")
