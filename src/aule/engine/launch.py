"""Launches of single kernels, such as a user's own, on arrays in host memory."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aule.artifact import Param
from aule.engine import observe
from aule.engine.memory import Arena
from aule.engine.programs import program
from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.ir import KernelIR
from aule.ir.interpret import interpret
from aule.runtime.base import Device, Grid, Program

Array = npt.NDArray[Any]
OP = "launch"

ELEMENTS = {
    "f16": ("float16",), "bf16": ("bfloat16", "uint16"), "f32": ("float32",), "f64": ("float64",), "i8": ("int8",),
    "i16": ("int16",), "i32": ("int32",), "i64": ("int64",), "u8": ("uint8", "bool"), "u16": ("uint16",),
    "u32": ("uint32",), "u64": ("uint64",),
}  # fmt: skip
"""For each element type of the kernel language, the array types that it reads, its usual name first."""
FLOATS = ("f16", "f32", "f64")
_lock = threading.Lock()
_keys: weakref.WeakKeyDictionary[KernelIR, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""For each kernel, what determines its program: its text and the limits that the text does not show."""


def loaded(kernel: KernelIR, device: Device) -> Program:
    """Return the program of a kernel on a device; loaded once, and rendered once per machine."""
    with _lock:
        key = _keys.get(kernel)
    if key is None:
        key = ("launch", str(kernel), kernel.subgroup_size, kernel.max_registers, kernel.cluster, kernel.arithmetic)
        with _lock:
            _keys[kernel] = key
    return program(device, key, lambda: kernel)


class Buffer(NamedTuple):
    """An array as an argument of a launch."""

    elements: str
    """Element type by its usual name (``float32``)."""
    contiguous: bool
    writable: bool
    start: int
    nbytes: int


def check_arguments(kernel: KernelIR, args: Sequence[Buffer | object]) -> None:
    """Check the arguments of a launch against its kernel's parameters; the device checks the ranges of numbers."""
    ends: list[tuple[int, int, str, bool]] = []
    for param, arg in zip(kernel.params, args, strict=True):
        if isinstance(arg, Buffer) != (param.kind == "buffer"):
            wanted = f"an array of {ELEMENTS[param.dtype][0]}" if param.kind == "buffer" else "a number"
            got = f"an array of {arg.elements}" if isinstance(arg, Buffer) else type(arg).__name__
            raise InvalidArgumentError(
                f"[launch] {kernel.name} expected {wanted} for {param.name}, got {got}; pass one for each parameter, "
                "in order, and all arrays of one kind"
            )
        if not isinstance(arg, Buffer):
            _check_number(kernel.name, param, arg)
        else:
            _check_buffer(kernel.name, param, arg)
            ends.append((arg.start, arg.start + arg.nbytes, param.name, param.access != "read"))
    ends.sort()
    for (_, end, first, writes), (start, last, second, also) in itertools.combinations(ends, 2):
        if start < min(end, last) and (writes or also):
            raise InvalidArgumentError(
                f"[launch] {kernel.name} expected arrays that do not overlap where one is written, got {first} and "
                f"{second} in the same memory; copy one, or use one readwrite buffer for both"
            )


def _check_number(name: str, param: Param, arg: object) -> None:
    try:
        if isinstance(arg, str):  # which Python's float takes
            raise TypeError
        _ = float(arg) if param.dtype in FLOATS else operator.index(arg)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        wanted = "a number" if param.dtype in FLOATS else f"a whole number, {ELEMENTS[param.dtype][0]},"
        raise InvalidArgumentError(
            f"[launch] {name} expected {wanted} for {param.name}, got {arg!r}; convert it"
        ) from None


def _check_buffer(name: str, param: Param, arg: Buffer) -> None:
    expected = ELEMENTS[param.dtype]
    if arg.elements not in expected:
        raise InvalidDtypeError(
            f"[launch] {name} expected {param.name} of {expected[0]}, got {arg.elements}; convert it, or trace the "
            "kernel for its type"
        )
    if not arg.contiguous:
        raise InvalidArgumentError(
            f"[launch] {name} expected {param.name} to be C-contiguous, got a strided array; copy it first"
        )
    if param.access != "read" and not arg.writable:
        raise InvalidArgumentError(
            f"[launch] {name} expected {param.name} to be writable, got a read-only array; copy it first"
        )


def described(array: Array) -> Buffer:
    """Describe a NumPy array."""
    start = int(array.__array_interface__["data"][0])
    return Buffer(array.dtype.name, array.flags.c_contiguous, array.flags.writeable, start, array.nbytes)


def on_host(kernel: KernelIR, grid: Grid, args: Sequence[Array | int | float], device: Device | None) -> None:
    """Launch a kernel on arrays in host memory and numbers; the results are finished on return.

    ``device`` None interprets the kernel with NumPy.
    """
    check_arguments(kernel, [described(x) if isinstance(x, np.ndarray) else x for x in args])
    if not all(grid):
        return
    args = [_bits(x) if isinstance(x, np.ndarray) else x for x in args]
    if device is None:
        with observe.on_numpy(OP):
            interpret(kernel, grid, args, sanitize=False)
        return
    ready = loaded(kernel, device)
    with seen(kernel, device):
        _on_device(kernel, grid, args, ready)


@contextlib.contextmanager
def seen(kernel: KernelIR, device: Device) -> Iterator[None]:
    """Count a launch of a kernel, and show it in profilers."""
    found = observe.tally(OP, device.target, "own", (kernel.name,))
    ranges = observe.wanted()
    with observe.named(ranges, found.range_name), observe.named(ranges, kernel.name):
        yield
    found[observe.caller.get()] += 1


def _on_device(kernel: KernelIR, grid: Grid, args: Sequence[Array | int | float], ready: Program) -> None:
    device = ready.device
    with Arena(device) as arena:
        memory: list[Any] = []
        downloads = []
        for param, arg in zip(kernel.params, args, strict=True):
            if not isinstance(arg, np.ndarray):
                memory.append(arg)
                continue
            imported = device.import_host(arg) if arg.size else None
            if imported is not None:
                arena.owned.append(imported)
                memory.append(imported)
                continue
            memory.append(arena.alloc(arg.nbytes))
            if arg.size:
                # Also if the kernel only writes: it may leave elements as they are.
                device.upload(memory[-1], arg)
                if param.access != "read":
                    downloads.append((memory[-1], arg))
        device.launch(ready, grid, memory)
        device.synchronize()
        for allocation, array in downloads:
            device.download(allocation, array)


def _bits(array: Array) -> Array:
    """An array of a type that drivers take: bfloat16 as its bits."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array
