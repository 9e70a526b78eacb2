"""Builder: kernels are traced by running plain Python against it.

A Python loop unrolls, ``b.loop(...)`` loops at run time; a Python ``if`` decides while tracing, ``b.if_(...)`` on the
device. Python numbers stand for constants of the other operand's type.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from aule.artifact import SCALAR_FORMATS, Param
from aule.errors import KernelError
from aule.ir.constants import computed, exact
from aule.ir.kernel import Arithmetic, KernelIR, Location, Op, Value
from aule.ir.types import (
    Fragment,
    Panels,
    Pointer,
    Ref,
    Scalar,
    Type,
    ValueType,
    Vector,
    bool_,
    element,
    f16,
    i32,
    with_element,
)

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDED = frozenset({"add", "sub", "mul", "min", "max", "and", "or", "shl"})
"""Operations on integer constants that are done while tracing: what index arithmetic is made of."""


class Var:
    """A mutable variable of a kernel: read ``x.value``, assign ``x.value = ...``."""

    __slots__ = ("_builder", "ref")

    def __init__(self, builder: Builder, ref: Value) -> None:
        self._builder = builder
        self.ref = ref

    @property
    def value(self) -> Value:
        return self._builder.get(self.ref)

    @value.setter
    def value(self, new: Any) -> None:
        self._builder.set(self.ref, new)


class Builder:
    """Collects the operations of one kernel.

    Parameters
    ----------
    name : str
        Entry point.
    workgroup : int
        Threads of a workgroup.
    subgroup_size : int, optional
        The subgroup size the kernel relies on; 0 when it uses none or any will do.
    max_registers : int, optional
        Registers a thread may use, for languages that can say so; 0 leaves it to the driver.
    cluster : int, optional
        Workgroups, neighbours along the first axis, that run together; see ``cluster_load``.
    arithmetic : {"exact", "quick", "fused"}, optional
        As in `KernelIR`.

    Examples
    --------
    >>> from aule.ir.types import f32, i32
    >>> b = Builder("double", workgroup=64)
    >>> source, out, n = b.buffer("source", f32), b.buffer("out", f32, "write"), b.scalar("n", i32)
    >>> i = b.group_id() * 64 + b.thread_id()
    >>> with b.if_(i < n):
    ...     b.store(out, i, b.load(source, i) * 2.0)
    >>> kernel = b.finish()
    """

    def __init__(
        self,
        name: str,
        workgroup: int,
        subgroup_size: int = 0,
        max_registers: int = 0,
        cluster: int = 1,
        arithmetic: Arithmetic = "exact",
    ) -> None:
        self.name = name
        self.workgroup = workgroup
        self.subgroup_size = subgroup_size
        self.max_registers = max_registers
        self.cluster = cluster
        self.arithmetic = arithmetic
        self._params: list[Param] = []
        self._values: dict[str, Value] = {}
        self._shared: list[Value] = []
        self._body: list[Op] = []
        self._block = self._body

    def finish(self) -> KernelIR:
        """The kernel traced so far."""
        return KernelIR(
            self.name, tuple(self._params), dict(self._values), tuple(self._shared), self.workgroup, self._body,
            self.subgroup_size, self.max_registers, self.cluster, self.arithmetic,
        )  # fmt: skip

    # -- parameters and memory -------------------------------------------------------------------------------------

    def buffer(
        self, name: str, elem: Scalar, access: Literal["read", "write", "readwrite"] = "read", lasting: bool = False
    ) -> Value:
        """A buffer parameter; for ``lasting`` see `Param`."""
        return self._param(Param(name, "buffer", elem.name, access, lasting), Pointer(elem, "global"))

    def scalar(self, name: str, type_: Scalar) -> Value:
        """A scalar parameter, the same for every thread."""
        if type_.name not in SCALAR_FORMATS:
            raise KernelError(f"scalar parameter {name}: expected one of {', '.join(SCALAR_FORMATS)}, got {type_}")
        return self._param(Param(name, "scalar", type_.name), type_)

    def shared(self, name: str, elem: Scalar, length: int) -> Value:
        """An array shared by the workgroup; its contents are undefined until written."""
        value = Value(Pointer(elem, "shared", length), None, name, self)
        self._shared.append(value)
        return value

    def private(self, name: str, elem: Scalar, length: int) -> Value:
        """An array of each thread's own, which may be indexed by values known only at run time."""
        return self.emit("private", (), Pointer(elem, "private", length), name=name)

    def load(self, pointer: Value, index: Any, lanes: int = 1, align: int | None = None) -> Value:
        """One element, or ``lanes`` consecutive ones as a vector. ``align`` (default ``lanes``) divides the index."""
        return self._load("load", pointer, index, lanes, align)

    def load_once(self, pointer: Value, index: Any, lanes: int = 1, align: int | None = None) -> Value:
        """Load from a buffer what nobody will read again soon; see ``ops.OPS["load_once"]``."""
        return self._load("load_once", pointer, index, lanes, align)

    def _load(self, opcode: str, pointer: Value, index: Any, lanes: int, align: int | None) -> Value:
        elem = element(pointer.type)
        type_: ValueType = elem if lanes == 1 else Vector(elem, lanes)
        return self.emit(opcode, (pointer, self._index(index)), type_, align=lanes if align is None else align)

    def prefetch(self, pointer: Value, index: Any) -> None:
        """A hint that memory at an index of a buffer will be read soon; see ``ops.OPS["prefetch"]``."""
        self.emit("prefetch", (pointer, self._index(index)), None)

    def store(self, pointer: Value, index: Any, value: Any, align: int | None = None) -> None:
        """Store a scalar, or a vector over consecutive elements."""
        self._store("store", pointer, index, value, align)

    def stream(self, pointer: Value, index: Any, value: Any, align: int | None = None) -> None:
        """Store what nobody will read soon; see ``ops.OPS["stream"]``."""
        self._store("stream", pointer, index, value, align)

    def peek(self, pointer: Value, index: Any, lanes: int = 1) -> Value:
        """Load what workgroups have left in memory by now; see ``ops.OPS["peek"]``."""
        return self._load("peek", pointer, index, lanes, None)

    def post(self, pointer: Value, index: Any, value: Any) -> None:
        """Store for a `peek` of other workgroups; see ``ops.OPS["post"]``."""
        self._store("post", pointer, index, value, None)

    def _store(self, opcode: str, pointer: Value, index: Any, value: Any, align: int | None) -> None:
        value = self.coerce(value, element(pointer.type))
        lanes = value.type.lanes if isinstance(value.type, Vector) else 1
        self.emit(opcode, (pointer, self._index(index), value), None, align=lanes if align is None else align)

    def atomic(self, kind: str, pointer: Value, index: Any, value: Any, ordered: bool = False) -> Value:
        """Read-modify-write; returns what was there before. ``ordered``: with a `device_fence` on either side."""
        value = self.coerce(value, element(pointer.type))
        return self.emit("atomic", (pointer, self._index(index), value), value.type, kind=kind, ordered=ordered)

    # -- leaves ----------------------------------------------------------------------------------------------------

    def const(self, value: float | int | bool, type_: Scalar) -> Value:
        """A constant."""
        if type_.is_int:
            if not math.isfinite(value) or int(value) != value:
                raise KernelError(f"const: expected a whole number for {type_}, got {value}; cast the other operand")
            value = int(value)
        else:
            value = float(value) if type_.is_float else bool(value)
        return self.emit("const", (), type_, value=value)

    def thread_id(self) -> Value:
        return self.emit("thread_id", (), i32)

    def lane_id(self) -> Value:
        return self.emit("lane_id", (), i32)

    def subgroup_id(self) -> Value:
        return self.emit("subgroup_id", (), i32)

    def group_id(self, axis: int = 0) -> Value:
        return self.emit("group_id", (), i32, axis=axis)

    def group_count(self, axis: int = 0) -> Value:
        return self.emit("group_count", (), i32, axis=axis)

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def binary(self, opcode: str, left: Any, right: Any) -> Value:
        """Any operation of two operands, comparisons included; one of them may be a Python number."""
        if not isinstance(left, Value):
            left = self.coerce(left, element(right.type))
        right = self.coerce(right, element(left.type))
        if isinstance(left.type, Vector) and isinstance(right.type, Scalar):
            right = self.splat(right, left.type.lanes)
        elif isinstance(right.type, Vector) and isinstance(left.type, Scalar):
            left = self.splat(left, right.type.lanes)
        folded = self._fold(opcode, left, right)
        if folded is not None:
            return folded
        type_ = left.type
        if opcode in ("lt", "le", "gt", "ge", "eq", "ne"):
            type_ = with_element(left.type, bool_)
        return self.emit(opcode, (left, right), type_)

    def unary(self, opcode: str, value: Value) -> Value:
        """Any operation of one operand."""
        return self.emit(opcode, (value,), value.type)

    def eq(self, left: Any, right: Any) -> Value:
        return self.binary("eq", left, right)

    def ne(self, left: Any, right: Any) -> Value:
        return self.binary("ne", left, right)

    def min(self, left: Any, right: Any) -> Value:
        return self.binary("min", left, right)

    def max(self, left: Any, right: Any) -> Value:
        return self.binary("max", left, right)

    def small(self, value: Value) -> Value:
        """A number that is known to be small; see ``ops.OPS["small"]``."""
        return self.unary("small", value)

    def mulhi(self, left: Any, right: Any) -> Value:
        """The high 32 bits of the product of two u32."""
        return self.binary("mulhi", left, right)

    def fma(self, a: Value, b: Any, c: Any) -> Value:
        """``a * b + c``."""
        return self.emit("fma", (a, self._like(b, a), self._like(c, a)), a.type)

    def dot_pairs(self, a: Value, b: Value, c: Value) -> Value:
        """``c`` and the products of two pairs of bf16, each pair in a u32; see ``ops.OPS["dot_pairs"]``."""
        return self.emit("dot_pairs", (a, b, c), c.type)

    def select(self, condition: Value, yes: Any, no: Any) -> Value:
        """``yes`` where the condition holds, else ``no``."""
        if not isinstance(yes, Value):
            yes = self._like(yes, no)
        no = self._like(no, yes)
        yes = self._like(yes, no)
        return self.emit("select", (condition, yes, no), yes.type)

    def exp2(self, x: Value) -> Value:
        return self.unary("exp2", x)

    def log2(self, x: Value) -> Value:
        return self.unary("log2", x)

    def rcp(self, x: Value) -> Value:
        return self.unary("rcp", x)

    def abs(self, x: Value) -> Value:
        return self.unary("abs", x)

    def cast(self, value: Value, elem: Scalar) -> Value:
        """Convert to another element type; nothing is emitted when it has that type already."""
        if element(value.type) == elem:
            return value
        if elem == bool_:
            raise KernelError(f"cast: expected a number as the result, got bool from {value.type}; use b.ne(value, 0)")
        if value.constant is not None and exact(value.constant, element(value.type)) and exact(value.constant, elem):
            return self.const(value.constant, elem)  # casts of other constants are left to the device
        assert isinstance(value.type, Scalar | Vector | Fragment)
        return self.emit("cast", (value,), with_element(value.type, elem))

    def bitcast(self, value: Value, type_: ValueType) -> Value:
        """The same bits as another type of the same size."""
        return value if value.type == type_ else self.emit("bitcast", (value,), type_)

    def e4m3_halves(self, word: Value) -> Value:
        """The four e4m3 numbers of a u32 as a vector of f16; see ``ops.OPS["e4m3_halves"]``."""
        return self.emit("e4m3_halves", (word,), Vector(f16, 4))

    # -- vectors ---------------------------------------------------------------------------------------------------

    def vector(self, values: Sequence[Value]) -> Value:
        """A vector of scalars; one scalar stays itself."""
        if len(values) == 1:
            return values[0]
        return self.emit("make_vector", tuple(values), Vector(element(values[0].type), len(values)))

    def splat(self, value: Value, lanes: int) -> Value:
        """A vector with ``value`` in every lane."""
        return value if lanes == 1 else self.emit("splat", (value,), Vector(element(value.type), lanes))

    def extract(self, vector: Value, lane: int) -> Value:
        """One lane of a vector; lane 0 of a scalar is the scalar."""
        if isinstance(vector.type, Scalar):
            return vector
        return self.emit("extract", (vector,), element(vector.type), lane=lane)

    def unpack(self, vector: Value) -> list[Value]:
        """All lanes of a vector; a scalar gives a list of one."""
        lanes = vector.type.lanes if isinstance(vector.type, Vector) else 1
        return [self.extract(vector, i) for i in range(lanes)]

    def permute(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        """Any lanes of ``a`` followed by ``b``, in any order and as often as wanted: 1 (a scalar), 2, 4, 8 or 16."""
        elem = element(a.type)
        type_: ValueType = elem if len(lanes) == 1 else Vector(elem, len(lanes))
        return self.emit("permute", (a,) if b is None else (a, b), type_, lanes=tuple(lanes))

    # -- copies that the hardware makes ----------------------------------------------------------------------------

    def async_copy(self, shared: Value, to: Any, source: Value, index: Any, lanes: int) -> None:
        """Start to copy 16 bytes from global to shared memory, past the registers."""
        self.emit("async_copy", (shared, self._index(to), source, self._index(index)), None, lanes=lanes)

    def cluster_load(self, shared: Value, index: Any, number: Value, lanes: int = 1) -> Value:
        """Read from shared memory of the workgroup with this number in the cluster."""
        elem = element(shared.type)
        type_: ValueType = elem if lanes == 1 else Vector(elem, lanes)
        return self.emit("cluster_load", (shared, self._index(index), number), type_, align=lanes)

    def cluster_post(self, shared: Value, index: Any, number: Value, value: Any) -> None:
        """Store to shared memory of the workgroup with this number in the cluster, for an `atomic` there."""
        self.emit("cluster_post", (shared, self._index(index), self.coerce(value, element(shared.type)), number), None)

    def async_commit(self) -> None:
        """The copies since the last one become a group."""
        self.emit("async_commit", (), None)

    def async_wait(self, pending: int = 0) -> None:
        """Wait for all of this thread's groups but the latest ``pending``."""
        self.emit("async_wait", (), None, pending=pending)

    # -- variables -------------------------------------------------------------------------------------------------

    def var(self, init: Value, name: str = "") -> Var:
        """A mutable variable with an initial value."""
        assert isinstance(init.type, Scalar | Vector | Fragment)
        ref = self.emit("var", (init,), Ref(init.type))
        ref.hint = name
        return Var(self, ref)

    def get(self, ref: Value) -> Value:
        assert isinstance(ref.type, Ref)
        return self.emit("get", (ref,), ref.type.target)

    def set(self, ref: Value, value: Any) -> None:
        assert isinstance(ref.type, Ref)
        value = self.coerce(value, element(ref.type))
        if isinstance(ref.type.target, Vector) and isinstance(value.type, Scalar):
            value = self.splat(value, ref.type.target.lanes)
        self.emit("set", (ref, value), None)

    # -- control ---------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1, *, unroll: int = 0, name: str = "i") -> Iterator[Value]:
        """Count from ``start`` up to, not including, ``stop``. ``unroll`` is a hint: -1 fully, n by n."""
        elem = next((element(v.type) for v in (start, stop, step) if isinstance(v, Value)), i32)
        index = Value(elem, None, name, self)
        block: list[Op] = []
        args = tuple(self.coerce(v, elem) for v in (start, stop, step))
        self.emit("loop", args, None, (block,), index=index, unroll=unroll)
        with self._into(block):
            yield index

    @contextmanager
    def repeat(self, done: Var) -> Iterator[None]:
        """Run the body, and again for as long as it leaves 0 in a variable; see ``ops.OPS["repeat"]``."""
        block: list[Op] = []
        self.emit("repeat", (done.ref,), None, (block,))
        with self._into(block):
            yield

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        """Run the body only in threads where the condition holds."""
        then: list[Op] = []
        self.emit("if", (condition,), None, (then, []))
        with self._into(then):
            yield

    @contextmanager
    def else_(self) -> Iterator[None]:
        """The other side of the ``if_`` just before."""
        if not self._block or self._block[-1].opcode != "if":
            raise KernelError("else_() must follow if_() directly")
        with self._into(self._block[-1].blocks[1]):
            yield

    # -- synchronisation and subgroups -----------------------------------------------------------------------------

    def barrier(self, global_memory: bool = False) -> None:
        """Wait for the whole workgroup."""
        self.emit("barrier", (), None, global_memory=global_memory)

    def launch_next(self) -> None:
        """The next launch may start as far as it does not depend on this one; see ``ops.OPS["launch_next"]``."""
        self.emit("launch_next", (), None)

    def launch_await(self) -> None:
        """Wait for the launches before, at the beginning of a kernel; see ``ops.OPS["launch_await"]``."""
        self.emit("launch_await", (), None)

    def cluster_barrier(self) -> None:
        """Wait for all workgroups of the cluster."""
        self.emit("cluster_barrier", (), None)

    def device_fence(self) -> None:
        """Order global memory between workgroups, together with atomics; see ``ops.OPS["device_fence"]``."""
        self.emit("device_fence", (), None)

    def workgroup_any(self, value: Value, global_memory: bool = False) -> Value:
        """Whether a bool is true in any thread of the workgroup; a barrier, too, of global memory if so said."""
        return self.emit("workgroup_any", (value,), bool_, global_memory=global_memory)

    def subgroup_barrier(self) -> None:
        self.emit("subgroup_barrier", (), None)

    def shuffle(self, value: Value, lane: Any) -> Value:
        """The value of another lane."""
        return self.emit("shuffle", (value, self._index(lane)), value.type)

    def shuffle_xor(self, value: Value, mask: int) -> Value:
        """The value of the lane whose index differs by ``mask``."""
        return self.emit("shuffle_xor", (value,), value.type, mask=mask)

    def subgroup_reduce(self, kind: str, value: Value) -> Value:
        """``add``, ``min`` or ``max`` over the subgroup."""
        return self.emit("subgroup_reduce", (value,), value.type, kind=kind)

    def subgroup_any(self, value: Value) -> Value:
        return self.emit("subgroup_any", (value,), bool_)

    def subgroup_all(self, value: Value) -> Value:
        return self.emit("subgroup_all", (value,), bool_)

    # -- matrix fragments ------------------------------------------------------------------------------------------

    def fragment_fill(self, type_: Fragment, value: Any) -> Value:
        return self.emit("fragment_fill", (self.coerce(value, type_.elem),), type_)

    def fragment_load(self, type_: Fragment, pointer: Value, index: Any, stride: Any, layout: str = "row") -> Value:
        """A matrix from memory, ``layout`` "row" or "column" major."""
        return self.emit("fragment_load", (pointer, self._index(index), self._index(stride)), type_, layout=layout)

    def fragment_store(self, pointer: Value, index: Any, stride: Any, value: Value, layout: str = "row") -> None:
        self.emit("fragment_store", (pointer, self._index(index), self._index(stride), value), None, layout=layout)

    def fragment_mma(self, a: Value, b: Value, accumulator: Value) -> Value:
        """``a @ b + accumulator``."""
        return self.emit("fragment_mma", (a, b, accumulator), accumulator.type)

    def fragment_length(self, value: Value) -> Value:
        """How many components of a fragment this lane holds."""
        return self.emit("fragment_length", (value,), i32)

    def fragment_get(self, value: Value, component: int) -> Value:
        """One of the elements this lane holds."""
        return self.emit("fragment_get", (value,), element(value.type), component=component)

    def fragment_set(self, value: Value, component: int, new: Any) -> Value:
        new = self.coerce(new, element(value.type))
        return self.emit("fragment_set", (value, new), value.type, component=component)

    def fragment_pack(self, type_: Fragment, components: Sequence[Value]) -> Value:
        """A fragment out of all the components that this lane holds of it."""
        return self.emit("fragment_pack", tuple(components), type_)

    # -- products of four subgroups --------------------------------------------------------------------------------

    def warpgroup_mma(
        self, accumulators: Sequence[Var], left: Value | tuple[Value, Any, Panels], right: tuple[Value, Any, Panels],
        fresh: bool = False,
    ) -> None:  # fmt: skip
        """Start ``accumulators += left @ right``, or ``=`` where ``fresh``: 64 x n over four subgroups, 16 deep.

        ``left`` is a fragment, or like ``right`` memory, the index where its matrix starts, and what of it is meant.
        """
        memory, index, panels = right
        args: tuple[Value, ...] = (memory, self._index(index))
        of_left = None
        if isinstance(left, Value):
            args += (left,)
        else:
            args += (left[0], self._index(left[1]))
            of_left = left[2]
        args += tuple(variable.ref for variable in accumulators)
        self.emit("warpgroup_mma", args, None, right=panels, left=of_left, fresh=fresh)

    def warpgroup_fence(self) -> None:
        """Before products that use registers which anything else wrote."""
        self.emit("warpgroup_fence", (), None)

    def warpgroup_commit(self) -> None:
        """The products since the last one become a group."""
        self.emit("warpgroup_commit", (), None)

    def warpgroup_wait(self, pending: int = 0) -> None:
        """Wait for all groups of products but the latest ``pending``."""
        self.emit("warpgroup_wait", (), None, pending=pending)

    def warpgroup_publish(self) -> None:
        """What this thread wrote to shared memory can be read by products behind the next barrier."""
        self.emit("warpgroup_publish", (), None)

    def warpgroup_meeting(self, pointer: Value, index: Any = 0) -> None:
        """A barrier of the workgroup in two halves, for use behind the next barrier."""
        self.emit("warpgroup_meeting", (pointer, self._index(index)), None)

    def warpgroup_arrive(self, pointer: Value, index: Any = 0) -> None:
        """The first half: this thread has done what others wait for."""
        self.emit("warpgroup_arrive", (pointer, self._index(index)), None)

    def warpgroup_await(self, pointer: Value, index: Any, parity: Value) -> None:
        """The second half: wait until all have arrived; ``parity`` is 0 for the first time and then alternates."""
        self.emit("warpgroup_await", (pointer, self._index(index), parity), None)

    # -- what only one language has --------------------------------------------------------------------------------

    def intrinsic(self, language: str, code: str, args: Sequence[Value], type_: ValueType | None) -> Value | None:
        """A line of one target language; see ``ops.OPS["intrinsic"]``."""
        op = self._append("intrinsic", tuple(args), type_, (), {"language": language, "code": code})
        return op.result

    def comment(self, text: str) -> None:
        """A line for the reader of the rendered source."""
        self.emit("comment", (), None, text=text)

    # -- how it works ----------------------------------------------------------------------------------------------

    def emit(
        self, opcode: str, args: tuple[Value, ...], type_: Type | None, blocks: tuple[list[Op], ...] = (), **attrs: Any
    ) -> Value:
        """Append an operation. For operations without a result the returned value is meaningless."""
        result = self._append(opcode, args, type_, blocks, attrs).result
        return _NOTHING if result is None else result

    def _append(
        self, opcode: str, args: tuple[Value, ...], type_: Type | None, blocks: tuple[list[Op], ...],
        attrs: dict[str, Any],
    ) -> Op:  # fmt: skip
        op = Op(opcode, args, attrs, None, blocks, _location())
        if type_ is not None:
            op.result = Value(type_, op, "", self)
        self._block.append(op)
        return op

    def coerce(self, value: Any, elem: Scalar) -> Value:
        """A Python number becomes a constant of type ``elem``; a value stays."""
        if isinstance(value, Value):
            return value
        return self.const(value, elem)

    def _like(self, value: Any, other: Value) -> Value:
        result = self.coerce(value, element(other.type))
        if isinstance(other.type, Vector) and isinstance(result.type, Scalar):
            return self.splat(result, other.type.lanes)
        return result

    def _index(self, index: Any) -> Value:
        return self.coerce(index, i32)

    def _param(self, param: Param, type_: Type) -> Value:
        if param.name in self._values:
            raise KernelError(f"kernel {self.name}: parameter {param.name} is declared twice")
        value = Value(type_, None, param.name, self)
        self._params.append(param)
        self._values[param.name] = value
        return value

    def _fold(self, opcode: str, left: Value, right: Value) -> Value | None:
        """Integer constants are folded here, so that index arithmetic does not swell the kernel."""
        type_ = left.type
        if not (isinstance(type_, Scalar) and type_.is_int) or right.type != type_:
            return None
        x, y = left.constant, right.constant
        if x is not None and y is not None and opcode in _FOLDED:
            result = computed(opcode, x, y, type_)
            if result is not None:
                return self.const(result, type_) if exact(result, type_) else None  # what wraps is left to the device
        if (opcode in ("add", "or", "xor", "shl", "shr", "sub") and y == 0) or (opcode in ("mul", "div") and y == 1):
            return left
        if (opcode in ("add", "or", "xor") and x == 0) or (opcode == "mul" and x == 1):
            return right
        if opcode == "mul" and (x == 0 or y == 0):
            return self.const(0, type_)
        return None

    @contextmanager
    def _into(self, block: list[Op]) -> Iterator[None]:
        outer, self._block = self._block, block
        try:
            yield
        finally:
            self._block = outer


_NOTHING = Value(bool_)


def _location() -> Location:
    """The innermost caller that is not part of this package's ``ir`` folder (or contextlib)."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) and not name.endswith("contextlib.py"):
            break
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
