"""Artifact: a rendered kernel and the layout of its parameters. Independent of the IR and of any driver.

Parameters are buffers and scalars, in one order. Two calling conventions pass them to a kernel:

* *args* (PTX, HIP, OpenCL C): one kernel argument per parameter, in order.
* *block* (SPIR-V, WGSL, MSL): buffers at bindings ``0, 1, ...`` in their own order, and one read-only block at the
  binding after them that holds all scalars in order at their natural alignment (`pack_scalars`). A kernel without
  scalars has no block.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

SCALAR_FORMATS = {"i32": "i", "u32": "I", "f32": "f", "i64": "q", "u64": "Q", "f64": "d"}
"""Types of scalar parameters, with their `struct` codes."""


@dataclass(frozen=True)
class Param:
    """One kernel parameter."""

    name: str
    kind: Literal["buffer", "scalar"]
    dtype: str
    """Element type of a buffer, or type of a scalar, by its IR name (``f16``, ``i32`` ...)."""
    access: Literal["read", "write", "readwrite"] = "read"
    """Accesses of the kernel to a buffer."""
    evict_last: bool = False
    """Hint: keep data read from this buffer in the L2 cache as long as possible."""


Swizzle = Literal[0, 32, 64, 128]


@dataclass(frozen=True)
class TensorMap:
    """A buffer as a tensor, of which a kernel copies boxes to shared memory (``tensor_copy`` of the kernel language).

    It is no argument of a launch: the runtime makes it from the buffer's address and some scalars. CUDA passes it by
    value after all parameters, as a ``CUtensorMap`` of 128 bytes. Axes are counted from the one whose elements are
    neighbours in memory.
    """

    name: str
    buffer: str
    """The buffer, which the kernel only reads."""
    offset: str
    """The scalar with the index of the tensor's first element."""
    sizes: tuple[int | str, ...]
    """The size of each axis: a number, or the scalar that has it."""
    strides: tuple[str, ...]
    """The scalars with the strides of all axes but the first, in elements."""
    box: tuple[int, ...]
    """The size of a box along each axis."""
    swizzle: Swizzle
    """How runs of 16 bytes are ordered in shared memory. Where this is not 0, a box is so many bytes wide, and the
    number of a run within them is changed by exclusive or with the lowest bits of address / 128."""

    @property
    def box_elements(self) -> int:
        """Elements of a box."""
        return math.prod(self.box)

    def described(self, scalars: Mapping[str, int | float]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Offset, sizes and strides in elements, for some values of the scalars."""
        sizes = (scalars[x] if isinstance(x, str) else x for x in self.sizes)
        strides = (scalars[x] for x in self.strides)
        return int(scalars[self.offset]), tuple(map(int, sizes)), (1, *map(int, strides))


@dataclass(frozen=True)
class Artifact:
    """A kernel rendered in a language that a driver compiles."""

    language: str
    """``ptx``, ``spirv`` ...: as in the list of backends."""
    code: bytes
    """Source text in UTF-8, or binary words for SPIR-V."""
    entry: str
    params: tuple[Param, ...]
    workgroup: int
    """Threads per workgroup; workgroups are one-dimensional."""
    shared_bytes: int = 0
    """Shared memory that the kernel uses, in bytes."""
    dynamic_shared: bool = False
    """Shared memory must be requested at launch (PTX above 48 KiB); the code does not declare its size."""
    subgroup_size: int = 0
    """Required subgroup size; 0 if any will do."""
    uses_subgroups: bool = False
    """The kernel uses subgroup operations and needs full subgroups."""
    dependent_launch: bool = False
    """The kernel waits for the previous launch itself and may start before it ends (programmatic dependent launch)."""
    extensions: tuple[str, ...] = ()
    """Device features that the code needs, named as in the language (``shader-f16``, ``cl_khr_fp16`` ...)."""
    maps: tuple[TensorMap, ...] = ()
    """Tensor maps, which follow the parameters in PTX."""

    @property
    def text(self) -> str:
        """The source as text; not for SPIR-V."""
        return self.code.decode()

    @property
    def buffers(self) -> tuple[Param, ...]:
        """Buffer parameters, in order."""
        return tuple(p for p in self.params if p.kind == "buffer")

    @property
    def scalars(self) -> tuple[Param, ...]:
        """Scalar parameters, in order."""
        return tuple(p for p in self.params if p.kind == "scalar")

    @cached_property
    def scalar_struct(self) -> struct.Struct:
        """Packs the scalars into the block of the *block* convention."""
        return scalar_struct(self.scalars)

    @cached_property
    def hash(self) -> str:
        """Digest of everything a driver sees."""
        head = repr((self.language, self.entry, self.params, self.workgroup, self.shared_bytes, self.subgroup_size))
        head += repr(self.maps) if self.maps else ""
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
    """Packer for the parameter block of some scalars."""
    offsets, size = scalar_offsets(scalars)
    fmt, end = "<", 0
    for p, start in zip(scalars, offsets, strict=True):
        code = SCALAR_FORMATS[p.dtype]
        fmt += f"{start - end}x{code}" if start > end else code
        end = start + struct.calcsize(code)
    return struct.Struct(fmt + (f"{size - end}x" if size > end else ""))
