"""Runs rendered MSL on the CPU: ``metal_stdlib`` beside this file lets g++ compile it, ctypes loads and calls it.

`ShimDevice` keeps the contract of every device, so the tests of all backends run on it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aule.artifact import Artifact
from aule.errors import ClosedError, InvalidArgumentError, LaunchError, OutOfMemoryError, ShaderCompileError
from aule.runtime.base import Allocation, Device, Program
from aule.target import Target

_HERE = Path(__file__).parent
_THREADGROUP_ARRAY = re.compile(r"^    threadgroup (\w+ \w+\[\d+\];)$", re.MULTILINE)
_BUFFER = re.compile(r"^ +device .*\[\[buffer\(\d+\)\]\]", re.MULTILINE)
_INPUT = re.compile(r"(\w+) (\w+) \[\[(thread\w+|simd\w+)\]\]")
_INPUTS = {
    "thread_index_in_threadgroup": "uint(lane)",
    "threadgroup_position_in_grid": "position",
    "threadgroups_per_grid": "count",
    "thread_index_in_simdgroup": "uint(lane % shim::kSimd)",
    "simdgroup_index_in_threadgroup": "uint(lane / shim::kSimd)",
}
_FLAGS = ("-std=c++17", "-O1", "-fwrapv", "-fno-strict-aliasing", "-fPIC", "-w", "-U_FORTIFY_SOURCE")
_GUARD = 64
"""Bytes after each allocation that no kernel may touch."""
_FILL = 0xA5


def available() -> bool:
    """True when there is a g++ that can build the shim."""
    return shutil.which("g++") is not None


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where kernels are built, beside the precompiled header, which saves a third of the time."""
    folder = tempfile.TemporaryDirectory(prefix="aule-msl-shim-")
    header = Path(folder.name) / "metal_stdlib"
    shutil.copy(_HERE / "metal_stdlib", header)
    shutil.copy(_HERE.parent / "shim_fibers.h", folder.name)
    subprocess.run(["g++", *_FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    return folder


class ShimDevice(Device):
    """MSL on the CPU; as on a GPU without matrix units, unless ``matrices`` says otherwise."""

    index = 0
    target = Target(
        backend="metal", name="msl-shim", vendor="software", software=True, subgroup_size=32, f16=True, bf16=True,
        int64=True, storage16=True, storage8=True, max_threads=1024, max_shared_bytes=32768, max_buffers=30,
    )  # fmt: skip

    def __init__(self, matrices: bool = False) -> None:
        if matrices:
            units = ("m8n8k8:f16:f32", "m8n8k8:bf16:f32", "m8n8k8:f32:f32")
            self.target = replace(self.target, name="msl-shim with matrices", matrix_units=units)
        # The fibers of a launch share static memory: one launch at a time.
        self._lock = threading.Lock()
        self._closed = False

    def alloc(self, nbytes: int) -> Allocation:
        self._check()
        if nbytes < 0 or nbytes > 1 << 40:
            raise OutOfMemoryError(f"[msl-shim] expected a size that fits, got {nbytes}", nbytes)
        memory = np.full(-(-nbytes // 16) * 16 + _GUARD + 64, _FILL, np.uint8)
        start = -memory.ctypes.data % 64
        view = memory[start : start + -(-nbytes // 16) * 16 + _GUARD]
        return Allocation(self, nbytes, view, view.ctypes.data)

    def free(self, allocation: Allocation) -> None:
        if not allocation.freed:
            self._check_guard(allocation)
            allocation.freed = True
            allocation.handle = None

    def upload(self, allocation: Allocation, data: np.ndarray[Any, Any], offset: int = 0) -> None:
        flat = self._range(allocation, data, offset)
        allocation.handle[offset : offset + data.nbytes] = flat

    def download(self, allocation: Allocation, out: np.ndarray[Any, Any], offset: int = 0) -> None:
        flat = self._range(allocation, out, offset)
        self._check_guard(allocation)
        flat[:] = allocation.handle[offset : offset + out.nbytes]

    def load(self, artifact: Artifact) -> Program:
        self._check()
        if artifact.language != "msl":
            raise ShaderCompileError(f"[msl-shim] expected a kernel in msl, got {artifact.language}")
        return Program(self, artifact, compile_kernel(artifact.text, artifact.entry, artifact.workgroup))

    def launch(
        self,
        program: Program,
        grid: tuple[int, int, int],
        args: Sequence[Allocation | int | float],
        stream: int | None = None,
    ) -> None:
        self._check()
        artifact = program.artifact
        if len(args) != len(artifact.params):
            raise LaunchError(f"[msl-shim] expected {len(artifact.params)} arguments, got {len(args)}")
        buffers, scalars = [], []
        for arg in args:
            if isinstance(arg, Allocation):
                if arg.freed:
                    raise ClosedError("[msl-shim] the allocation was freed")
                buffers.append(arg)
            else:
                scalars.append(arg)
        block = artifact.scalar_struct.pack(*scalars)
        pointers = (ctypes.c_void_p * max(len(buffers), 1))(*(b.address for b in buffers))
        with self._lock:
            program.handle(pointers, block, *(ctypes.c_uint(n) for n in grid))
        for buffer in buffers:
            self._check_guard(buffer)

    def synchronize(self) -> None:
        self._check()

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("[msl-shim] the device was closed")

    def _check_guard(self, allocation: Allocation) -> None:
        # Up to the next 16 bytes a vector store of the last elements may reach, as on every device.
        if (allocation.handle[-_GUARD:] != _FILL).any():
            raise LaunchError("[msl-shim] a kernel wrote behind its buffer")

    def _range(self, allocation: Allocation, data: np.ndarray[Any, Any], offset: int) -> np.ndarray[Any, Any]:
        self._check()
        if allocation.freed:
            raise ClosedError("[msl-shim] the allocation was freed")
        if not data.flags.c_contiguous or offset < 0 or offset + data.nbytes > allocation.nbytes:
            raise InvalidArgumentError("[msl-shim] expected a contiguous array within the allocation")
        return data.reshape(-1).view(np.uint8)


def compile_kernel(source: str, entry: str, workgroup: int) -> Any:
    """A kernel as a C function of the addresses of its buffers, its block of scalars, and the grid."""
    stem = Path(_folder().name) / hashlib.sha256(f"{workgroup} {source}".encode()).hexdigest()[:16]
    library = stem.with_suffix(".so")
    if not library.exists():
        stem.with_suffix(".cpp").write_text(_source(source, entry, workgroup))
        command = ["g++", *_FLAGS, "-shared", f"-I{stem.parent}", "-o", library, stem.with_suffix(".cpp")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ShaderCompileError(f"[msl-shim] g++ refused {entry}:\n{done.stderr[:4000]}", done.stderr)
    function = ctypes.CDLL(str(library)).shim_launch
    function.restype = None
    return function


def buffers_of(source: str) -> int:
    """How many buffers a kernel has before its block of scalars."""
    return len(_BUFFER.findall(source))


def execute(command: Any) -> None:
    """Run what was encoded into a command of `fake_metal`."""
    assert command.encoded is not None and command.pipeline is not None
    size, (threads, _, _) = command.dispatched
    source, buffers = command.pipeline.source, command.encoded.buffers
    count = buffers_of(source)
    function = compile_kernel(source, command.pipeline.name, threads)
    memory = [np.frombuffer(buffers[i].memory, np.uint8).ctypes.data for i in range(count)]
    block = command.encoded.bytes.get(count, b"")
    function((ctypes.c_void_p * count)(*memory), block, *map(ctypes.c_uint, size))


def _source(source: str, entry: str, workgroup: int) -> str:
    """The kernel, and a C function that runs its grid."""
    text = _THREADGROUP_ARRAY.sub(r"    static \1", source)
    buffers = [f"(decltype(shim_argument<{i}>({entry})))buffers[{i}]" for i in range(buffers_of(source))]
    block = ["*(const Params*)block"] if "constant Params& params" in source else []
    inputs = [_INPUTS[name] for _, _, name in _INPUT.findall(text)]
    arguments = ", ".join([*buffers, *block, *inputs])
    return f"""{text}
#include <tuple>
template <int I, class... A> std::tuple_element_t<I, std::tuple<A...>> shim_argument(void (*)(A...));
static void** buffers;
static const void* block;
static uint3 position, count;
extern "C" void shim_launch(void** buffers_, const void* block_, uint x, uint y, uint z)
{{
    buffers = buffers_, block = block_, count = uint3(x, y, z);
    for (uint k = 0; k < z; k++)
        for (uint j = 0; j < y; j++)
            for (uint i = 0; i < x; i++) {{
                position = uint3(i, j, k);
                shim::run({workgroup}, [](int lane) {{ {entry}({arguments}); }});
            }}
}}
"""
