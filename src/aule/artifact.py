"""Artifact: a rendered kernel, and how its parameters are laid out. It knows neither the IR nor a driver.

Parameters are buffers and scalars, in one order. Two conventions carry them to a kernel:

* *args* (PTX, OpenCL C): one kernel argument per parameter, in order.
* *block* (SPIR-V, WGSL, MSL): buffers at bindings ``0, 1, ...`` in their own order, and one read-only block at the
  binding after them that holds all scalars in order at their natural alignment (`pack_scalars`). A kernel without
  scalars has no block.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

SCALAR_FORMATS = {"i32": "i", "u32": "I", "f32": "f", "i64": "q", "u64": "Q", "f64": "d"}
"""Types a scalar parameter may have, with their `struct` codes."""


@dataclass(frozen=True)
class Param:
    """One kernel parameter."""

    name: str
    kind: Literal["buffer", "scalar"]
    dtype: str
    """Element type of a buffer, or type of a scalar, by its IR name (``f16``, ``i32`` ...)."""
    access: Literal["read", "write", "readwrite"] = "read"
    """What the kernel does with a buffer."""
    lasting: bool = False
    """A hint: what is read of a buffer is the last that the second-level cache gives up."""


@dataclass(frozen=True)
class Artifact:
    """A kernel in the language of a driver."""

    language: Literal["ptx", "spirv", "opencl", "wgsl", "msl", "llvm"]
    code: bytes
    """Source text in UTF-8, or binary words for SPIR-V."""
    entry: str
    params: tuple[Param, ...]
    workgroup: int
    """Threads of a workgroup; workgroups are one-dimensional."""
    shared_bytes: int = 0
    """Shared memory that the kernel uses."""
    dynamic_shared: bool = False
    """The shared memory is to be given at launch (PTX above 48 KiB) and is not declared in the code."""
    subgroup_size: int = 0
    """Subgroup size that must be in force; 0 when the kernel does not care."""
    uses_subgroups: bool = False
    """The kernel uses subgroup operations and wants full subgroups."""
    awaits: bool = False
    """The kernel waits itself for the launch before it, and may be started while that ends."""
    extensions: tuple[str, ...] = ()
    """Device features the code needs, by their names in the language (``shader-f16``, ``cl_khr_fp16`` ...)."""

    @property
    def text(self) -> str:
        """The source as text; SPIR-V has none."""
        return self.code.decode()

    @property
    def buffers(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if p.kind == "buffer")

    @property
    def scalars(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if p.kind == "scalar")

    @cached_property
    def scalar_struct(self) -> struct.Struct:
        """Packs the scalars into the block of the *block* convention."""
        return scalar_struct(self.scalars)

    @cached_property
    def hash(self) -> str:
        """Digest of everything a driver sees."""
        head = repr((self.language, self.entry, self.params, self.workgroup, self.shared_bytes, self.subgroup_size))
        return hashlib.sha256(head.encode() + self.code).hexdigest()


def scalar_offsets(scalars: Sequence[Param]) -> tuple[list[int], int]:
    """Byte offset of each scalar in the parameter block, and the block's size (a multiple of 16)."""
    offsets, end = [], 0
    for p in scalars:
        size = struct.calcsize(SCALAR_FORMATS[p.dtype])
        start = -(-end // size) * size
        offsets.append(start)
        end = start + size
    return offsets, -(-end // 16) * 16


def scalar_struct(scalars: Sequence[Param]) -> struct.Struct:
    offsets, size = scalar_offsets(scalars)
    fmt, end = "<", 0
    for p, start in zip(scalars, offsets, strict=True):
        code = SCALAR_FORMATS[p.dtype]
        fmt += f"{start - end}x{code}" if start > end else code
        end = start + struct.calcsize(code)
    return struct.Struct(fmt + (f"{size - end}x" if size > end else ""))
