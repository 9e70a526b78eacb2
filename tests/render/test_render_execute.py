"""Every renderer with its runtime, on every device of this machine: the cases of ``render_cases`` against the
interpreter. A renderer that refuses a case, or a device that computes another result, fails."""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import devices
import msl_shim
import numpy as np
import pytest
from render_cases import Case, cases, differences

from aule.artifact import Artifact
from aule.errors import BackendUnavailableError, KernelError
from aule.ir.interpret import interpret
from aule.ir.kernel import KernelIR
from aule.runtime.base import Device
from aule.target import Target

pytestmark = pytest.mark.device

Render = Callable[[KernelIR, Target], Artifact]


@dataclass(frozen=True)
class Pair:
    """A renderer and a runtime, with what is changed of the device's Target to force a legalisation."""

    render: str
    runtime: str
    changes: tuple[tuple[str, Any], ...] = ()


PAIRS = {
    "opencl": Pair("opencl", "opencl"),
    "webgpu": Pair("wgsl", "webgpu"),
    "webgpu-without-f16": Pair("wgsl", "webgpu", (("f16", False), ("storage16", False))),
    "webgpu-packed-f16": Pair("wgsl", "webgpu", (("storage16", False),)),
    "msl-shim": Pair("msl", "msl_shim"),
    "vulkan": Pair("spirv", "vulkan"),
    "vulkan-plain": Pair(
        "spirv",
        "vulkan",
        (("f16", False), ("storage16", False), ("storage8", False), ("int64", False), ("matrix_units", ())),
    ),
    "cuda": Pair("ptx", "cuda"),
    "hip-gfx1100": Pair("hip", "hip-gfx1100"),
    "hip-gfx942": Pair("hip", "hip-gfx942"),
    "hip-gfx1201": Pair("hip", "hip-gfx1201"),
}
CASES = {case.name: case for case in cases()}


@functools.cache
def opened(runtime: str) -> Device | str:
    """The first device of a runtime, or why there is none."""
    if runtime == "msl_shim":
        return msl_shim.ShimDevice() if msl_shim.available() else "the MSL shim needs g++"
    try:
        if runtime.startswith("hip-"):
            return devices.stand_in(runtime)
        found: list[Device] = importlib.import_module(f"aule.runtime.{runtime}").devices()
        return found[0] if found else f"no {runtime} device on this machine"
    except BackendUnavailableError as error:
        return str(error)


@functools.cache
def expectation(name: str, subgroup_size: int) -> tuple[Any, ...]:
    case = CASES[name]
    args = case.copies()
    interpret(case.kernel, case.grid, args, subgroup_size=case.kernel.subgroup_size or subgroup_size or None)
    return tuple(args)


def execute(device: Device, artifact: Artifact, case: Case) -> list[Any]:
    """The arguments after a launch."""
    program = device.load(artifact)
    given = case.copies()
    args: list[Any] = []
    for value in given:
        if isinstance(value, np.ndarray):
            args.append(device.alloc(value.nbytes))
            device.upload(args[-1], value)
        else:
            args.append(value)
    device.launch(program, case.grid, args)
    for value, arg in zip(given, args, strict=True):
        if isinstance(value, np.ndarray):
            device.download(arg, value)
            device.free(arg)
    return given


def spare_stand_in(pair: str, case: Case) -> None:
    """Skip most cases, since g++ compiles each. Those of fragments have the components of RDNA 4's in 32 lanes."""
    if "fragments" in case.needs:
        if pair != "hip-gfx1201":
            pytest.skip("its fragments have other components than this case's; gfx1201 runs it")
    elif pair == "hip-gfx1201":
        pytest.skip("gfx1100 and gfx942 run it")
    elif not (devices.FULL or case.needs or zlib.crc32(f"{pair} {case.name}".encode()) % 8 == 0):
        pytest.skip("one case in 8 is run here, and all of subgroups; AULE_FULL_GRID=1 runs all")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_device_computes_what_the_interpreter_does(pair: str, name: str) -> None:
    device, case = opened(PAIRS[pair].runtime), CASES[name]
    if pair.startswith("hip"):
        spare_stand_in(pair, case)
    if isinstance(device, str):
        pytest.skip(device)
    target = replace(device.target, **dict(PAIRS[pair].changes))
    if "subgroups" in case.needs and not target.subgroup_size:
        pytest.skip(f"{target.name} has no subgroups through {target.backend}")
    if "fragments" in case.needs and pair != "msl-shim" and case.needs.isdisjoint(target.matrix_units):
        pytest.skip(f"{target.name} has no units for such fragments through {target.backend}")
    render: Render = importlib.import_module(f"aule.render.{PAIRS[pair].render}").render
    try:
        artifact = render(case.kernel, target)
    except KernelError as error:
        # What a device may lack; everything else is to be rendered.
        if case.needs & {"float_atomics", "subgroup_barrier"} and (
            "not possible" in str(error) or "has no" in str(error)
        ):
            pytest.skip(str(error))
        raise
    assert artifact.params == case.kernel.params
    got = execute(device, artifact, case)
    difference = differences(case, list(expectation(name, target.subgroup_size)), got)
    assert not difference, difference
