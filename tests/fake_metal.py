"""A stand-in for PyObjC's `Metal` module.

Like a slow GPU it runs nothing until a wait, so that a missing wait shows.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import struct
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

MIB = 1 << 20


class MTLSize(NamedTuple):
    width: int
    height: int
    depth: int


class FakeError:
    def __init__(self, code: int, text: str) -> None:
        self._code, self._text = code, text

    def code(self) -> int:
        return self._code

    def localizedDescription(self) -> str:
        return self._text


class FakeVarlist:
    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def as_buffer(self, count: int) -> memoryview:
        return self._memory[:count]


class FakeBuffer:
    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def contents(self) -> FakeVarlist:
        return FakeVarlist(self.memory)


class FakeCompileOptions:
    fast = True

    @classmethod
    def alloc(cls) -> FakeCompileOptions:
        return cls()

    def init(self) -> FakeCompileOptions:
        return self

    def setFastMathEnabled_(self, value: bool) -> None:
        self.fast = value


class FakeFunction(NamedTuple):
    name: str
    source: str


class FakeLibrary:
    def __init__(self, source: str) -> None:
        self.source = source

    def newFunctionWithName_(self, name: str) -> FakeFunction | None:
        return FakeFunction(name, self.source) if name in self.source else None


class FakePipeline:
    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def threadExecutionWidth(self) -> int:
        return 16 if self.name == "trivial" else 32

    def maxTotalThreadsPerThreadgroup(self) -> int:
        return 64 if self.name == "fat" else 1024

    def staticThreadgroupMemoryLength(self) -> int:
        return 512


class FakeEncoder:
    def __init__(self, command: FakeCommand) -> None:
        self.command = command
        self.buffers: dict[int, FakeBuffer] = {}
        self.bytes: dict[int, bytes] = {}

    def setComputePipelineState_(self, pipeline: FakePipeline) -> None:
        self.command.pipeline = pipeline

    def setBuffer_offset_atIndex_(self, buffer: FakeBuffer, offset: int, index: int) -> None:
        assert isinstance(buffer, FakeBuffer) and offset == 0
        self.buffers[index] = buffer

    def setBytes_length_atIndex_(self, data: bytes, length: int, index: int) -> None:
        assert len(data) == length <= 4096
        self.bytes[index] = bytes(data)

    def dispatchThreadgroups_threadsPerThreadgroup_(self, grid: MTLSize, threads: MTLSize) -> None:
        assert isinstance(grid, MTLSize) and isinstance(threads, MTLSize)
        self.command.dispatched = (tuple(grid), tuple(threads))

    def endEncoding(self) -> None:
        self.command.encoded = self


class FakeCommand:
    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue
        self.pipeline: FakePipeline | None = None
        self.encoded: FakeEncoder | None = None
        self.dispatched: Any = None
        self._status = 0
        self._error: FakeError | None = None

    def computeCommandEncoder(self) -> FakeEncoder:
        return FakeEncoder(self)

    def commit(self) -> None:
        assert self.encoded is not None and self._status == 0
        self._status = 2
        self.queue.committed.append(self)

    def status(self) -> int:
        return self._status

    def error(self) -> FakeError | None:
        return self._error

    def waitUntilCompleted(self) -> None:
        while self._status < 4:
            self.queue.committed.pop(0).run()

    def run(self) -> None:
        assert self.encoded is not None and self.pipeline is not None
        self.queue.ran.append(self)
        if self.queue.fail_with is not None:
            self._status, self._error = 5, FakeError(self.queue.fail_with, "the GPU gave up")
            self.queue.fail_with = None
            return
        self.queue.execute(self)
        self._status = 4

    def GPUStartTime(self) -> float:
        return 10.0

    def GPUEndTime(self) -> float:
        assert self._status == 4
        return 10.25


def increment(command: FakeCommand) -> None:
    """The only kernel that the tests of the runtime need."""
    assert command.encoded is not None and command.pipeline is not None
    if command.pipeline.name == "increment":
        count, by = struct.unpack_from("<ii", command.encoded.bytes[1])
        data = np.frombuffer(command.encoded.buffers[0].memory, np.int32)
        data[:count] += by


class FakeQueue:
    def __init__(self, execute: Callable[[FakeCommand], None]) -> None:
        self.execute = execute
        self.committed: list[FakeCommand] = []
        self.ran: list[FakeCommand] = []
        self.fail_with: int | None = None

    def commandBuffer(self) -> FakeCommand:
        return FakeCommand(self)


class FakeNative:
    def __init__(self, name: str, number: int, families: tuple[int, ...]) -> None:
        self._name, self._number, self._families = name, number, families
        self.created = 0
        self.limit = 256 * MIB
        self.options: FakeCompileOptions | None = None
        self.queue: FakeQueue | None = None
        self.execute: Callable[[FakeCommand], None] = increment
        """What a command does when it runs."""

    def name(self) -> str:
        return self._name

    def registryID(self) -> int:
        return self._number

    def supportsFamily_(self, family: int) -> bool:
        return family in self._families

    def hasUnifiedMemory(self) -> bool:
        return "Apple" in self._name

    def maxThreadsPerThreadgroup(self) -> MTLSize:
        return MTLSize(1024, 1024, 1024)

    def maxThreadgroupMemoryLength(self) -> int:
        return 32768

    def maxBufferLength(self) -> int:
        return 128 * MIB

    def recommendedMaxWorkingSetSize(self) -> int:
        return 256 * MIB

    def currentAllocatedSize(self) -> int:
        return 0

    def newCommandQueue(self) -> FakeQueue:
        assert self.queue is None
        self.queue = FakeQueue(self.execute)
        return self.queue

    def newBufferWithLength_options_(self, length: int, options: int) -> FakeBuffer | None:
        assert options == 0
        if length > min(self.limit, self.maxBufferLength()):
            return None
        self.created += 1
        return FakeBuffer(memoryview(bytearray(length)))

    def newBufferWithBytesNoCopy_length_options_deallocator_(
        self, memory: memoryview, length: int, options: int, deallocator: None
    ) -> FakeBuffer:
        assert not memory.readonly and memory.nbytes == length
        assert np.frombuffer(memory, np.uint8).ctypes.data % mmap.PAGESIZE == 0 == length % mmap.PAGESIZE
        return FakeBuffer(memory)

    def newLibraryWithSource_options_error_(
        self, source: str, options: FakeCompileOptions, error: None
    ) -> tuple[FakeLibrary | None, FakeError | None]:
        self.options = options
        if "BAD" in source:
            return None, FakeError(3, "program_source:7: error: unknown type name 'BAD'")
        return FakeLibrary(source), FakeError(0, "a warning only")

    def newComputePipelineStateWithFunction_error_(
        self, function: FakeFunction, error: None
    ) -> tuple[FakePipeline | None, FakeError | None]:
        return (None, FakeError(1, "no pipeline")) if function.name == "hopeless" else (FakePipeline(*function), None)


def install(monkeypatch: pytest.MonkeyPatch) -> list[FakeNative]:
    """Put the stand-in where the runtime looks for Metal; returns its GPUs, of which the second is the default."""
    found = [FakeNative("AMD Radeon Pro 5500M", 7, (2002,)), FakeNative("Apple M3 Max", 9, (1006, 1007, 1009, 5001))]
    module: Any = types.ModuleType("Metal")
    module.MTLCreateSystemDefaultDevice = lambda: found[1] if len(found) > 1 else None
    module.MTLCopyAllDevices = lambda: found
    module.MTLCompileOptions = FakeCompileOptions
    module.MTLResourceStorageModeShared = 0
    module.MTLSize = MTLSize
    objc: Any = types.ModuleType("objc")
    objc.autorelease_pool = contextlib.nullcontext
    monkeypatch.setitem(sys.modules, "Metal", module)
    monkeypatch.setitem(sys.modules, "objc", objc)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.5", ("", "", ""), "arm64"))
    return found
