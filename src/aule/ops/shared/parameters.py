"""Parameters of a kernel, declared when first used; plans set them by name."""

from __future__ import annotations

from typing import Literal

from aule.ir import Builder, Value
from aule.ir.types import Scalar, i32, i64

Access = Literal["read", "write", "readwrite"]


def workgroup_number(b: Builder) -> Value:
    """The workgroup's number, counted along x and then y: a driver may allow no more than 65535 along one axis."""
    return b.group_id(0) + b.group_id(1) * b.group_count(0)


class Parameters:
    """The parameters of one kernel.

    ``index`` is the type of indices into memory.
    """

    def __init__(self, b: Builder, index: Scalar = i64) -> None:
        self.b, self.index = b, index
        self._known: dict[str, Value] = {}

    def number(self, name: str, type_: Scalar = i32) -> Value:
        """A scalar parameter, declared once."""
        if name not in self._known:
            self._known[name] = self.b.scalar(name, type_)
        return self._known[name]

    def buffer(self, name: str, elem: Scalar, access: Access = "read", evict_last: bool = False) -> Value:
        """A buffer parameter; for ``evict_last`` see `aule.artifact.Param`."""
        key = f"{name}_ptr"
        if key not in self._known:
            self._known[key] = self.b.buffer(key, elem, access, evict_last)
        return self._known[key]

    def strided(self, name: str, *indices: Value) -> Value:
        """The offset of an operand plus indices times the strides of its leading axes."""
        total = self.number(f"{name}_offset", self.index)
        for axis, index in enumerate(indices):
            total = total + self.b.cast(index, self.index) * self.number(f"{name}_stride{axis}", self.index)
        return total
