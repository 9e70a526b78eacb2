"""Which devices the tests run on: every one found, and the MSL shim."""

from __future__ import annotations

import functools
import os

import pytest

from aule.backends import registry
from aule.errors import AuleError, InvalidArgumentError
from aule.runtime.base import Device

BACKENDS = ("cuda", "vulkan", "opencl", "webgpu", "msl-shim", "cpu", "cpu-avx2", "cpu-baseline")
CPUS = ("cpu", "cpu-avx2", "cpu-baseline")
"""The processor, with all of its features and with fewer."""


@functools.cache
def shim() -> Device:
    from msl_shim import ShimDevice

    return ShimDevice()


@functools.cache
def lowered(level: str) -> Device:
    """The processor as if it had fewer features."""
    from aule.runtime import _cpu_llvm
    from aule.runtime.cpu import CpuDevice

    registry.devices("cpu")  # refuses with the remedy where there is no llvmlite
    try:
        return CpuDevice(_cpu_llvm.machine(level))
    except InvalidArgumentError as error:  # this architecture has no such level
        pytest.skip(error.message)


def device(name: str) -> Device:
    """The first device of a backend; raises `AuleError` when there is none."""
    if name == "msl-shim":
        return shim()
    if name in CPUS[1:]:
        return lowered(name.removeprefix("cpu-"))
    found = registry.find(name)
    assert found is not None
    return found


def need(name: str) -> Device:
    """The device, or a skip that says why it is not there."""
    try:
        return device(name)
    except AuleError as error:
        pytest.skip(f"{name}: {error.message}")


def spare(device: Device, number: int, software: bool = False) -> None:
    """Skip two of three cases on a processor of fewer features, and on a software device where that is wanted, to spare
    time: compiling is most of it. All of them run with ``AULE_FULL_GRID=1``."""
    lowered_cpu = device.target.backend == "cpu" and device is not registry.find("cpu")
    shimmed = device.target.backend == "metal" and device is shim() if software else False
    slow = lowered_cpu or (software and (device.target.software or shimmed))
    if slow and number % 3 and os.environ.get("AULE_FULL_GRID") != "1":
        pytest.skip("one case in three is run here; AULE_FULL_GRID=1 runs all")
