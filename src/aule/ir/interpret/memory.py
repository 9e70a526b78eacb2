"""Memory of the interpreter: a flat NumPy array per buffer, shared array or private array, with checked accesses."""

from __future__ import annotations

from typing import Any

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret.lanes import Lanes
from aule.ir.interpret.numbers import Array, Function, from_memory, memory_dtype, to_memory
from aule.ir.interpret.shadow import Shadow
from aule.ir.kernel import Op
from aule.ir.types import Scalar


class Memory:
    """Memory that a pointer points to.

    Parameters
    ----------
    data : ndarray
        All elements, flat; bf16 as bits.
    length : int
        Elements that one lane can index.
    base : ndarray, optional
        Start of each lane's elements: its workgroup's copy of a shared array, or its own private array.
    shadow : Shadow, optional
        Checks for races and, in shared memory, for reads before the first write.
    private : bool
        Check for reads before the first write, without a shadow.
    """

    def __init__(
        self, lanes: Lanes, name: str, elem: Scalar, data: Array, length: int, *,
        base: Array | None = None, shadow: Shadow | None = None, private: bool = False,
    ) -> None:  # fmt: skip
        self.lanes = lanes
        self.name = name
        self.elem = elem
        self.data = data
        self.length = length
        self.base = base
        self.shadow = shadow
        self.written = np.zeros(data.size, np.bool_) if private else None
        self.expected: Array | None = None  # elements that unfinished copies will write

    def begin(self) -> None:
        """Make the contents undefined: NaN, or -1 for integers, so that a kernel that relies on them fails."""
        self.expected = None
        if self.base is not None:
            self.data.view(np.uint8).fill(1 if self.elem.name == "bool" else 0xFF)

    def forget(self, active: Array | None) -> None:
        """Make a private array undefined in the active lanes, where it is declared again."""
        if self.written is not None:
            rows = self.written.reshape(-1, self.length)
            rows[slice(None) if active is None else active] = False

    # -- accesses --------------------------------------------------------------------------------------------------

    def addresses(self, op: Op, index: Array, active: Array | None, lanes: int, align: int) -> Array:
        """Addresses of an access to ``lanes`` consecutive elements; one row per vector lane."""
        index = index.astype(np.int64) if active is None else index.take(active).astype(np.int64)
        if index.size and (int(index.min()) < 0 or int(index.max()) > self.length - lanes):
            self._out_of_bounds(op, index, active, lanes)
        if align > 1 and (index & (align - 1)).any():
            where = int(np.flatnonzero(index & (align - 1))[0])
            message = f"misaligned access: index {int(index[where])} of {self.name} is not a multiple of {align}"
            raise self.lanes.error(op, self._lane(where, active), message)
        if self.base is not None:
            index = index + (self.base if active is None else self.base.take(active))
        return index if lanes == 1 else index + np.arange(lanes)[:, None]

    def matrix_addresses(self, op: Op, offsets: Array, active: Array) -> Array:
        """Addresses of a fragment's elements; ``offsets`` has a column per subgroup, ``active`` its first lane."""
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) >= self.length):
            bad = (offsets < 0) | (offsets >= self.length)
            self._out_of_bounds(op, offsets[np.argwhere(bad)[0][0]], active, 1)
        return offsets if self.base is None else offsets + self.base.take(active)

    def read(self, op: Op, address: Array, active: Array | None, collective: bool = False) -> Array:
        """Load into the active lanes."""
        if self.shadow is not None:
            self.shadow.read(op, address, active, collective)
        elif self.written is not None and not self.written.take(address).all():
            where = np.argwhere(~self.written.take(address))[0]
            place = f"{self.name}[{int(address[tuple(where)]) % self.length}]"
            message = f"read of private memory that was never written: {place}"
            raise self.lanes.error(op, self._lane(int(where[-1]), active), message)
        return from_memory(self.elem, self.data.take(address))

    def cluster_read(self, op: Op, address: Array, active: Array | None) -> Array:
        """Load into the active lanes from other workgroups of the cluster."""
        if self.shadow is not None:
            self.shadow.cluster_read(op, address, active)
        return from_memory(self.elem, self.data.take(address))

    def write(self, op: Op, address: Array, value: Array, active: Array | None, collective: bool = False) -> None:
        """Store from the active lanes."""
        if self.shadow is not None:
            self.shadow.write(op, address, active, collective)
        elif self.written is not None:
            self.written[address] = True
        self.data[address] = to_memory(self.elem, value)

    def cluster_post(self, op: Op, address: Array, value: Array, active: Array | None) -> None:
        """Store from the active lanes to other workgroups of the cluster, which may be reading."""
        if self.shadow is not None:
            self.shadow.cluster_update(op, address, active)
        self.data[address] = to_memory(self.elem, value)

    def start_copy(self, op: Op, address: Array, active: Array | None) -> None:
        """Record an unfinished copy; an error if another one has the same destination, since either may finish last."""
        if self.expected is None:
            self.expected = np.zeros(self.data.size, np.bool_)
        if self.expected.take(address).any():
            where = np.argwhere(self.expected.take(address))[0]
            place = f"{self.name}[{int(address[tuple(where)]) % self.length}]"
            message = f"copy to shared memory that another copy is under way to: {place}"
            raise self.lanes.error(op, self._lane(int(where[-1]), active), message)
        self.expected[address] = True

    def finish_copy(self, op: Op, address: Array, value: Array, active: Array | None) -> None:
        """Finish a copy: write its data."""
        assert self.expected is not None
        self.expected[address] = False
        self.write(op, address, value, active)

    def copy(self, op: Op, address: Array, value: Array, active: Array, copies: int) -> None:
        """Store what a tensor copy brings; ``copies`` as in `Shadow.copy`."""
        if self.shadow is not None:
            self.shadow.copy(op, address, active, copies)
        self.data[address] = to_memory(self.elem, value)

    def atomic(self, op: Op, address: Array, value: Array, active: Array | None, function: Function) -> Array:
        """Read-modify-write; lanes with the same element take turns, lower lanes first."""
        if self.shadow is not None:
            self.shadow.update(op, address, active)
        order = np.argsort(address, kind="stable")
        _, starts, counts = np.unique(address[order], return_index=True, return_counts=True)
        old = np.empty_like(value)
        for turn in range(int(counts.max(initial=0))):
            now = order[starts[counts > turn] + turn]
            old[now] = self.data[address[now]]
            self.data[address[now]] = function(old[now], value[now])
        return old

    def _lane(self, where: int, active: Array | None) -> int:
        return where if active is None else int(active[where])

    def _out_of_bounds(self, op: Op, index: Array, active: Array | None, lanes: int) -> None:
        where = int(np.flatnonzero((index < 0) | (index > self.length - lanes))[0])
        what = f"index {int(index[where])}" if lanes == 1 else f"index {int(index[where])} and the {lanes - 1} after it"
        message = f"out of bounds: {what} of {self.name}, which has {self.length} elements"
        raise self.lanes.error(op, self._lane(where, active), message)


def flat_buffer(kernel: str, name: str, elem: Scalar, array: Any) -> Array:
    """Flatten a caller's array to the elements of a buffer, sharing its memory."""
    expected = "uint16 bits or ml_dtypes.bfloat16" if elem.name == "bf16" else str(memory_dtype(elem))
    if not isinstance(array, np.ndarray):
        got = type(array).__name__
        raise KernelError(f"kernel {kernel}: buffer {name}: expected an array of {expected}, got {got}")
    if not array.flags.c_contiguous:
        raise KernelError(f"kernel {kernel}: buffer {name}: expected a contiguous array, got strides {array.strides}")
    if elem.name == "bf16" and array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    if array.dtype != memory_dtype(elem):
        raise KernelError(f"kernel {kernel}: buffer {name}: expected an array of {expected}, got {array.dtype}")
    flat: Array = array.reshape(-1)
    return flat
