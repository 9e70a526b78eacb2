"""Which devices the tests run on: every one found, and the MSL shim."""

from __future__ import annotations

import functools

import pytest

from aule.backends import registry
from aule.errors import AuleError
from aule.runtime.base import Device

BACKENDS = ("cuda", "vulkan", "opencl", "webgpu", "cpu", "msl-shim")


@functools.cache
def shim() -> Device:
    from msl_shim import ShimDevice

    return ShimDevice()


def device(name: str) -> Device:
    """The first device of a backend; raises `AuleError` when there is none."""
    if name == "msl-shim":
        return shim()
    found = registry.find(name)
    assert found is not None
    return found


def need(name: str) -> Device:
    """The device, or a skip that says why it is not there."""
    try:
        return device(name)
    except AuleError as error:
        pytest.skip(f"{name}: {error.message}")
