"""Types of the kernel language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Space = Literal["global", "shared", "private"]


@dataclass(frozen=True)
class Scalar:
    """A number in a register, or an element of memory."""

    name: str
    kind: Literal["bool", "int", "uint", "float"]
    bits: int

    @property
    def bytes(self) -> int:
        """Bytes in memory; 1 for bool."""
        return max(self.bits // 8, 1)

    @property
    def is_float(self) -> bool:
        """True for floating-point types."""
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        """True for signed and unsigned integers."""
        return self.kind in ("int", "uint")

    @property
    def is_signed(self) -> bool:
        """True for signed integers and floats."""
        return self.kind != "uint" and self.kind != "bool"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Vector:
    """2, 4, 8 or 16 numbers that are loaded, stored and computed on together."""

    elem: Scalar
    lanes: int

    @property
    def bytes(self) -> int:
        """Bytes of all lanes."""
        return self.elem.bytes * self.lanes

    def __str__(self) -> str:
        return f"{self.elem}x{self.lanes}"


@dataclass(frozen=True)
class Fragment:
    """A matrix distributed over the lanes of a subgroup; ``use`` is its role in ``accumulator += a @ b``."""

    elem: Scalar
    rows: int
    cols: int
    use: Literal["a", "b", "accumulator"]

    def __str__(self) -> str:
        return f"fragment<{self.elem},{self.rows}x{self.cols},{self.use}>"


@dataclass(frozen=True)
class Pointer:
    """Memory that can be indexed by element. ``length`` counts elements; None for a buffer of unknown length."""

    elem: Scalar
    space: Space
    length: int | None = None

    def __str__(self) -> str:
        return f"{self.space}<{self.elem}{'' if self.length is None else f'[{self.length}]'}>"


PANEL = 64
"""Columns of a panel: 128 bytes of 16-bit elements."""


@dataclass(frozen=True)
class Panels:
    """Location of a factor of a warpgroup product in shared memory.

    The memory holds a matrix of 16-bit elements in panels of 64 columns. A panel stores its rows one after the other.
    Within a row, the eight runs of eight elements are swizzled, so that neither rows nor columns have bank conflicts:
    element (r, c) is ``offset(r, c)`` elements after the start.

    Attributes
    ----------
    layout : str
        "row": the memory holds the factor; "column": it holds the transpose.
    stride : int
        Elements from one panel to the next; a multiple of 512.
    row, col : int
        Start of the factor, or of its transpose, in the matrix. The row is a multiple of 8. The column is a multiple of
        16, or of 64 if the product does not sum over the columns.
    """

    layout: Literal["row", "column"]
    stride: int
    row: int = 0
    col: int = 0

    def offset(self, row: Any, col: Any) -> Any:
        """Offset of an element from the start of the matrix; takes numbers or arrays."""
        run = (col // 8 % 8) ^ (row % 8)
        return col // PANEL * self.stride + row * PANEL + run * 8 + col % 8


@dataclass(frozen=True)
class Role:
    """Subgroups of a workgroup with a task of their own, in ``crews`` of so many ``subgroups``.

    All crews together are whole warpgroups. ``registers`` is the number of registers of a thread in this role, a
    multiple of 8 from 24 to 240; at first each thread has the kernel's ``max_registers``.
    """

    subgroups: int
    registers: int
    crews: int = 1

    @property
    def total(self) -> int:
        """Subgroups of all crews."""
        return self.subgroups * self.crews


@dataclass(frozen=True)
class Ref:
    """A mutable variable that holds a ``target``."""

    target: Scalar | Vector | Fragment

    def __str__(self) -> str:
        return f"var<{self.target}>"


ValueType = Scalar | Vector | Fragment
"""Types that a register can hold."""
Type = ValueType | Pointer | Ref

bool_ = Scalar("bool", "bool", 1)
i8 = Scalar("i8", "int", 8)
i16 = Scalar("i16", "int", 16)
i32 = Scalar("i32", "int", 32)
i64 = Scalar("i64", "int", 64)
u8 = Scalar("u8", "uint", 8)
u16 = Scalar("u16", "uint", 16)
u32 = Scalar("u32", "uint", 32)
u64 = Scalar("u64", "uint", 64)
f16 = Scalar("f16", "float", 16)
bf16 = Scalar("bf16", "float", 16)
f32 = Scalar("f32", "float", 32)
f64 = Scalar("f64", "float", 64)

SCALARS: dict[str, Scalar] = {t.name: t for t in (bool_, i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64)}
"""Every scalar type by its name."""


def element(type_: Type) -> Scalar:
    """The element type of any type."""
    if isinstance(type_, Scalar):
        return type_
    if isinstance(type_, Ref):
        return element(type_.target)
    return type_.elem


def with_element(type_: ValueType, elem: Scalar) -> ValueType:
    """Replace the element type and keep the shape."""
    if isinstance(type_, Vector):
        return Vector(elem, type_.lanes)
    if isinstance(type_, Fragment):
        return Fragment(elem, type_.rows, type_.cols, type_.use)
    return elem


def lanes_of(type_: Type) -> int:
    """Lanes of a vector; 1 for any other type."""
    return type_.lanes if isinstance(type_, Vector) else 1


def vector_type(elem: Scalar, lanes: int) -> Scalar | Vector:
    """A vector type of ``lanes``, or the scalar type for one lane."""
    return elem if lanes == 1 else Vector(elem, lanes)
