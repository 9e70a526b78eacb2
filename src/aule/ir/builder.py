"""Builder: traces a kernel by running plain Python.

A Python loop unrolls, ``b.loop(...)`` loops at run time; a Python ``if`` decides while tracing, ``b.if_(...)`` on the
device. Python numbers become constants of the other operand's type.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from aule.artifact import SCALAR_FORMATS, Param, Swizzle, TensorMap
from aule.errors import KernelError
from aule.ir.constants import computed, exact
from aule.ir.kernel import Arithmetic, KernelIR, Location, Op, Value
from aule.ir.types import (
    Fragment,
    Panels,
    Pointer,
    Ref,
    Role,
    Scalar,
    Type,
    ValueType,
    Vector,
    bool_,
    element,
    f16,
    i32,
    lanes_of,
    vector_type,
    with_element,
)

_HERE = os.path.dirname(sys._getframe().f_code.co_filename)
"""This folder as frames name it: bytecode without source keeps the path that it was compiled from."""
_FOLDED = frozenset({"add", "sub", "mul", "min", "max", "and", "or", "shl"})
"""Operations folded on integer constants while tracing: those of index arithmetic."""


class Var:
    """A mutable variable of a kernel: read ``x.value``, assign ``x.value = ...``."""

    __slots__ = ("_builder", "ref")

    def __init__(self, builder: Builder, ref: Value) -> None:
        self._builder = builder
        self.ref = ref

    @property
    def value(self) -> Value:
        """The current value."""
        return self._builder.get(self.ref)

    @value.setter
    def value(self, new: Any) -> None:
        self._builder.set(self.ref, new)


class Builder:
    """Collects the operations of a kernel; ``ops.py`` specifies them.

    Parameters
    ----------
    name : str
        Entry point.
    workgroup : int
        Threads per workgroup.
    subgroup_size, max_registers, cluster, arithmetic : optional
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
        self._maps: list[TensorMap] = []
        self._body: list[Op] = []
        self._block = self._body

    @property
    def block(self) -> object:
        """The block that operations are appended to: values of one block can be used again in it, as its key says."""
        return self._block

    def finish(self) -> KernelIR:
        """The kernel traced so far."""
        return KernelIR(
            self.name, tuple(self._params), dict(self._values), tuple(self._shared), self.workgroup, self._body,
            self.subgroup_size, self.max_registers, self.cluster, self.arithmetic, tuple(self._maps),
        )  # fmt: skip

    # -- parameters and memory -------------------------------------------------------------------------------------

    def buffer(
        self, name: str, elem: Scalar, access: Literal["read", "write", "readwrite"] = "read", evict_last: bool = False
    ) -> Value:
        """Declare a buffer parameter; for ``evict_last`` see `Param`."""
        return self._param(Param(name, "buffer", self._scalar(elem).name, access, evict_last), Pointer(elem, "global"))

    def scalar(self, name: str, type_: Scalar) -> Value:
        """Declare a scalar parameter."""
        if self._scalar(type_).name not in SCALAR_FORMATS:
            raise self._error(f"scalar parameter {name}: expected one of {', '.join(SCALAR_FORMATS)}, got {type_}")
        return self._param(Param(name, "scalar", type_.name), type_)

    def tensor_map(
        self, name: str, buffer: Value, offset: Value, sizes: Sequence[int | Value], strides: Sequence[Value],
        box: Sequence[int], swizzle: Swizzle = 128,
    ) -> TensorMap:  # fmt: skip
        """Declare a buffer as a tensor for `tensor_copy`; buffer and numbers are parameters. See `TensorMap`."""
        named = tuple(x.hint if isinstance(x, Value) else x for x in sizes)
        strided = tuple(x.hint for x in strides)
        made = TensorMap(name, buffer.hint, offset.hint, named, strided, tuple(box), swizzle)
        self._maps.append(made)
        return made

    def shared(self, name: str, elem: Scalar, length: int) -> Value:
        """Declare an array shared by the workgroup; its contents are undefined until written."""
        value = Value(Pointer(self._scalar(elem), "shared", length), None, name, self)
        self._shared.append(value)
        return value

    def private(self, name: str, elem: Scalar, length: int) -> Value:
        """Declare an array per thread, which may be indexed by run-time values."""
        return self.emit("private", (), Pointer(self._scalar(elem), "private", length), name=name)

    def load(self, pointer: Value, index: Any, lanes: int = 1, align: int | None = None) -> Value:
        """Load one element, or ``lanes`` of them as a vector. ``align`` (default ``lanes``) divides the index."""
        return self._load("load", pointer, index, lanes, align)

    def load_streaming(self, pointer: Value, index: Any, lanes: int = 1, align: int | None = None) -> Value:
        """Load from a buffer with a hint that the data will not be read again soon."""
        return self._load("load_streaming", pointer, index, lanes, align)

    def _load(self, opcode: str, pointer: Value, index: Any, lanes: int, align: int | None) -> Value:
        type_ = vector_type(element(self._type(opcode, pointer)), lanes)
        return self.emit(opcode, (pointer, self._index(index)), type_, align=lanes if align is None else align)

    def prefetch(self, pointer: Value, index: Any) -> None:
        """Hint that a buffer will be read soon at an index."""
        self.emit("prefetch", (pointer, self._index(index)), None)

    def store(self, pointer: Value, index: Any, value: Any, align: int | None = None) -> None:
        """Store a scalar, or a vector over consecutive elements."""
        self._store("store", pointer, index, value, align)

    def store_streaming(self, pointer: Value, index: Any, value: Any, align: int | None = None) -> None:
        """Store to a buffer with a hint that the data will not be read soon."""
        self._store("store_streaming", pointer, index, value, align)

    def _store(self, opcode: str, pointer: Value, index: Any, value: Any, align: int | None) -> None:
        value = self.coerce(value, element(self._type(opcode, pointer)))
        lanes = lanes_of(value.type)
        self.emit(opcode, (pointer, self._index(index), value), None, align=lanes if align is None else align)

    def atomic(self, kind: str, pointer: Value, index: Any, value: Any, ordered: bool = False) -> Value:
        """Atomic read-modify-write; returns the old value. ``ordered`` adds a `device_fence` on either side."""
        value = self.coerce(value, element(self._type("atomic", pointer)))
        return self.emit("atomic", (pointer, self._index(index), value), value.type, kind=kind, ordered=ordered)

    # -- leaves ----------------------------------------------------------------------------------------------------

    def const(self, value: float | int | bool, type_: Scalar) -> Value:
        """A constant."""
        if not hasattr(value, "__float__"):
            raise self._error(f"const: expected a number or a value of the kernel, got {value!r}")
        if type_.is_int:
            if not math.isfinite(value) or int(value) != value:
                raise self._error(f"const: expected a whole number for {type_}, got {value}; cast the other operand")
            value = int(value)
        else:
            value = float(value) if type_.is_float else bool(value)
        return self.emit("const", (), type_, value=value)

    def thread_id(self) -> Value:
        """Index of the thread in its workgroup."""
        return self.emit("thread_id", (), i32)

    def lane_id(self) -> Value:
        """Index of the thread in its subgroup."""
        return self.emit("lane_id", (), i32)

    def subgroup_id(self) -> Value:
        """Index of the subgroup in its workgroup."""
        return self.emit("subgroup_id", (), i32)

    def group_id(self, axis: int = 0) -> Value:
        """Index of the workgroup along an axis of the grid."""
        return self.emit("group_id", (), i32, axis=axis)

    def group_count(self, axis: int = 0) -> Value:
        """Number of workgroups along an axis of the grid."""
        return self.emit("group_count", (), i32, axis=axis)

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def binary(self, opcode: str, left: Any, right: Any) -> Value:
        """Emit any operation with two operands, including comparisons; one operand may be a Python number."""
        if not isinstance(left, Value):
            left = self.coerce(left, element(self._type(opcode, right)))
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
        """Emit any operation with one operand."""
        return self.emit(opcode, (value,), self._type(opcode, value))

    def eq(self, left: Any, right: Any) -> Value:
        """``left == right``."""
        return self.binary("eq", left, right)

    def ne(self, left: Any, right: Any) -> Value:
        """``left != right``."""
        return self.binary("ne", left, right)

    def min(self, left: Any, right: Any) -> Value:
        """Minimum of two values, lane by lane."""
        return self.binary("min", left, right)

    def max(self, left: Any, right: Any) -> Value:
        """Maximum of two values, lane by lane."""
        return self.binary("max", left, right)

    def small(self, value: Value) -> Value:
        """Promise that a number is small; see ``ops.OPS["small"]``."""
        return self.unary("small", value)

    def mulhi(self, left: Any, right: Any) -> Value:
        """High 32 bits of the product of two u32."""
        return self.binary("mulhi", left, right)

    def fma(self, a: Value, b: Any, c: Any) -> Value:
        """``a * b + c``."""
        type_ = self._type("fma", a)
        return self.emit("fma", (a, self._like(b, a), self._like(c, a)), type_)

    def dot_pairs(self, a: Value, b: Value, c: Value) -> Value:
        """``c`` plus the dot product of two bf16 pairs, each pair in a u32; see ``ops.OPS["dot_pairs"]``."""
        return self.emit("dot_pairs", (a, b, c), c.type)

    def select(self, condition: Value, yes: Any, no: Any) -> Value:
        """``yes`` where the condition holds, else ``no``."""
        if not isinstance(yes, Value):
            yes = self._like(yes, no)
        no = self._like(no, yes)
        yes = self._like(yes, no)
        return self.emit("select", (condition, yes, no), yes.type)

    def exp2(self, x: Value) -> Value:
        """``2 ** x``."""
        return self.unary("exp2", x)

    def log2(self, x: Value) -> Value:
        """Logarithm to base 2."""
        return self.unary("log2", x)

    def rcp(self, x: Value) -> Value:
        """``1 / x``."""
        return self.unary("rcp", x)

    def abs(self, x: Value) -> Value:
        """Absolute value."""
        return self.unary("abs", x)

    def cast(self, value: Value, elem: Scalar) -> Value:
        """Convert to another element type; emits nothing if the value already has it."""
        if element(self._type("cast", value)) == self._scalar(elem):
            return value
        if elem == bool_:
            raise self._error(f"cast: expected a number as the result, got bool from {value.type}; use b.ne(value, 0)")
        if value.constant is not None and exact(value.constant, element(value.type)) and exact(value.constant, elem):
            return self.const(value.constant, elem)  # the device converts constants that are not exact
        assert isinstance(value.type, Scalar | Vector | Fragment)
        return self.emit("cast", (value,), with_element(value.type, elem))

    def bitcast(self, value: Value, type_: ValueType) -> Value:
        """Reinterpret the bits as another type of the same size."""
        return value if value.type == type_ else self.emit("bitcast", (value,), type_)

    def e4m3_halves(self, word: Value) -> Value:
        """Convert the four e4m3 numbers of a u32 to a vector of f16; see ``ops.OPS["e4m3_halves"]``."""
        return self.emit("e4m3_halves", (word,), Vector(f16, 4))

    # -- vectors ---------------------------------------------------------------------------------------------------

    def vector(self, values: Sequence[Value]) -> Value:
        """Make a vector of scalars; a single scalar is returned unchanged."""
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
        return [self.extract(vector, i) for i in range(lanes_of(vector.type))]

    def permute(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        """Select 1 (a scalar), 2, 4, 8 or 16 lanes of the concatenation of ``a`` and ``b``, in any order."""
        type_ = vector_type(element(a.type), len(lanes))
        return self.emit("permute", (a,) if b is None else (a, b), type_, lanes=tuple(lanes))

    # -- asynchronous copies and clusters --------------------------------------------------------------------------

    def async_copy(
        self, shared: Value, to: Any, source: Value, index: Any, lanes: int, exists: Value | None = None
    ) -> None:
        """Start an asynchronous copy of 16 bytes from global to shared memory; of zeros if they do not exist."""
        args = (shared, self._index(to), source, self._index(index))
        if exists is None:
            self.emit("async_copy", args, None, lanes=lanes)
        else:
            self.emit("async_copy_or_zero", (*args, exists), None, lanes=lanes)

    def cluster_load(self, shared: Value, index: Any, number: Value, lanes: int = 1) -> Value:
        """Load from shared memory of the workgroup with this number in the cluster."""
        type_ = vector_type(element(shared.type), lanes)
        return self.emit("cluster_load", (shared, self._index(index), number), type_, align=lanes)

    def cluster_post(self, shared: Value, index: Any, number: Value, value: Any) -> None:
        """Store to shared memory of the workgroup with this number in the cluster, which reads it by an `atomic`."""
        self.emit("cluster_post", (shared, self._index(index), self.coerce(value, element(shared.type)), number), None)

    def async_commit(self) -> None:
        """Close a group: this thread's copies since the last commit."""
        self.emit("async_commit", (), None)

    def async_wait(self, pending: int = 0) -> None:
        """Wait for all of this thread's groups of copies except the latest ``pending``."""
        self.emit("async_wait", (), None, pending=pending)

    # -- variables -------------------------------------------------------------------------------------------------

    def var(self, init: Value, name: str = "") -> Var:
        """Declare a mutable variable with an initial value."""
        type_ = self._type("var", init)
        assert isinstance(type_, Scalar | Vector | Fragment)
        ref = self.emit("var", (init,), Ref(type_))
        ref.hint = name
        return Var(self, ref)

    def get(self, ref: Value) -> Value:
        """Read a variable; kernels use `Var.value`."""
        assert isinstance(ref.type, Ref)
        return self.emit("get", (ref,), ref.type.target)

    def set(self, ref: Value, value: Any) -> None:
        """Write a variable; kernels assign `Var.value`."""
        assert isinstance(ref.type, Ref)
        value = self.coerce(value, element(ref.type))
        if isinstance(ref.type.target, Vector) and isinstance(value.type, Scalar):
            value = self.splat(value, ref.type.target.lanes)
        self.emit("set", (ref, value), None)

    # -- control ---------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1, *, unroll: int = 0, name: str = "i") -> Iterator[Value]:
        """Loop from ``start`` up to, but excluding, ``stop``. ``unroll`` is a hint: -1 fully, n by a factor of n."""
        elem = next((element(v.type) for v in (start, stop, step) if isinstance(v, Value)), i32)
        index = Value(elem, None, name, self)
        block: list[Op] = []
        args = tuple(self.coerce(v, elem) for v in (start, stop, step))
        self.emit("loop", args, None, (block,), index=index, unroll=unroll)
        with self._into(block):
            yield index

    @contextmanager
    def repeat(self, done: Var) -> Iterator[None]:
        """Run the body until a variable is nonzero at its end; see ``ops.OPS["repeat"]``."""
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
        """Run the body in the threads where the condition of the preceding ``if_`` does not hold."""
        if not self._block or self._block[-1].opcode != "if":
            raise self._error("else_() must follow if_() directly")
        with self._into(self._block[-1].blocks[1]):
            yield

    @contextmanager
    def roles(self, *roles: Role) -> Iterator[list[AbstractContextManager[None]]]:
        """Divide the workgroup; see *Roles* in ``ops.py``. Gives a context for the block of each role.

        Examples
        --------
        >>> b = Builder("copy_and_compute", workgroup=384, subgroup_size=32, max_registers=168)
        >>> with b.roles(Role(8, registers=240), Role(1, crews=4, registers=24)) as (compute, copy):
        ...     with compute:
        ...         b.comment("256 threads")
        ...     with copy:
        ...         b.comment("four times 32 threads")
        >>> kernel = b.finish()
        """
        blocks: tuple[list[Op], ...] = tuple([] for _ in roles)
        self.emit("roles", (), None, blocks, roles=roles)
        yield [self._into(block) for block in blocks]

    # -- synchronisation and subgroups -----------------------------------------------------------------------------

    def barrier(self, global_memory: bool = False) -> None:
        """Wait for all threads of the workgroup."""
        self.emit("barrier", (), None, global_memory=global_memory)

    def launch_next(self) -> None:
        """Allow the next launch to start; see ``ops.OPS["launch_next"]``."""
        self.emit("launch_next", (), None)

    def launch_await(self) -> None:
        """Wait for previous launches, at the start of a kernel; see ``ops.OPS["launch_await"]``."""
        self.emit("launch_await", (), None)

    def cluster_barrier(self) -> None:
        """Wait for all workgroups of the cluster."""
        self.emit("cluster_barrier", (), None)

    def device_fence(self) -> None:
        """Order global memory between workgroups, together with atomics; see *a race* in ``ops.py``."""
        self.emit("device_fence", (), None)

    def workgroup_any(self, value: Value, global_memory: bool = False) -> Value:
        """True if a bool is true in any thread of the workgroup; also a `barrier`."""
        return self.emit("workgroup_any", (value,), bool_, global_memory=global_memory)

    def subgroup_barrier(self) -> None:
        """Wait for all lanes of the subgroup; orders shared memory between them."""
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
        """True if a bool is true in any lane of the subgroup."""
        return self.emit("subgroup_any", (value,), bool_)

    def subgroup_all(self, value: Value) -> Value:
        """True if a bool is true in all lanes of the subgroup."""
        return self.emit("subgroup_all", (value,), bool_)

    # -- matrix fragments ------------------------------------------------------------------------------------------

    def fragment_fill(self, type_: Fragment, value: Any) -> Value:
        """A fragment with ``value`` in every element."""
        return self.emit("fragment_fill", (self.coerce(value, type_.elem),), type_)

    def fragment_load(self, type_: Fragment, pointer: Value, index: Any, stride: Any, layout: str = "row") -> Value:
        """Load a matrix; ``layout`` is "row" or "column" major."""
        return self.emit("fragment_load", (pointer, self._index(index), self._index(stride)), type_, layout=layout)

    def fragment_store(self, pointer: Value, index: Any, stride: Any, value: Value, layout: str = "row") -> None:
        """Store a matrix; ``layout`` is "row" or "column" major."""
        self.emit("fragment_store", (pointer, self._index(index), self._index(stride), value), None, layout=layout)

    def fragment_mma(self, a: Value, b: Value, accumulator: Value) -> Value:
        """``a @ b + accumulator``."""
        return self.emit("fragment_mma", (a, b, accumulator), accumulator.type)

    def fragment_length(self, value: Value) -> Value:
        """Number of components of a fragment per lane."""
        return self.emit("fragment_length", (value,), i32)

    def fragment_get(self, value: Value, component: int) -> Value:
        """One component of this lane."""
        return self.emit("fragment_get", (value,), element(value.type), component=component)

    def fragment_set(self, value: Value, component: int, new: Any) -> Value:
        """A copy of a fragment with one component of this lane replaced."""
        new = self.coerce(new, element(value.type))
        return self.emit("fragment_set", (value, new), value.type, component=component)

    def fragment_pack(self, type_: Fragment, components: Sequence[Value]) -> Value:
        """Make a fragment from all components of this lane."""
        return self.emit("fragment_pack", tuple(components), type_)

    # -- warpgroups: asynchronous products of four subgroups -------------------------------------------------------

    def warpgroup_mma(
        self, accumulators: Sequence[Var], left: Value | tuple[Value, Any, Panels], right: tuple[Value, Any, Panels],
        fresh: bool = False,
    ) -> None:  # fmt: skip
        """Start ``accumulators += left @ right``, or ``=`` if ``fresh``: 64 x n over four subgroups, 16 deep.

        ``right`` is (pointer, index where its matrix starts, `Panels`); ``left`` is the same, or a fragment.
        """
        memory, index, panels = right
        args: tuple[Value, ...] = (memory, self._index(index))
        left_panels = None
        if isinstance(left, Value):
            args += (left,)
        else:
            args += (left[0], self._index(left[1]))
            left_panels = left[2]
        args += tuple(variable.ref for variable in accumulators)
        self.emit("warpgroup_mma", args, None, right=panels, left=left_panels, fresh=fresh)

    def warpgroup_fence(self) -> None:
        """Required before products that use registers which anything else wrote."""
        self.emit("warpgroup_fence", (), None)

    def warpgroup_commit(self) -> None:
        """Close a group: the products since the last commit."""
        self.emit("warpgroup_commit", (), None)

    def warpgroup_wait(self, pending: int = 0) -> None:
        """Wait for all groups of products except the latest ``pending``."""
        self.emit("warpgroup_wait", (), None, pending=pending)

    def warpgroup_publish(self) -> None:
        """Make this thread's writes to shared memory readable by products after the next barrier."""
        self.emit("warpgroup_publish", (), None)

    def mbarrier_init(self, pointer: Value, index: Any = 0, threads: int = 0) -> None:
        """Initialise an mbarrier of so many threads (0: all of the workgroup); usable after the next barrier."""
        self.emit("mbarrier_init", (pointer, self._index(index)), None, threads=threads)

    def mbarrier_arrive(self, pointer: Value, index: Any = 0) -> None:
        """Arrive at an mbarrier without waiting."""
        self.emit("mbarrier_arrive", (pointer, self._index(index)), None)

    def mbarrier_wait(self, pointer: Value, index: Any, parity: Value) -> None:
        """Wait until a phase of an mbarrier has ended; ``parity`` is 0 for the first phase, then alternates."""
        self.emit("mbarrier_wait", (pointer, self._index(index), parity), None)

    def mbarrier_expect(self, pointer: Value, index: Any, bytes_: int) -> None:
        """Arrive at an mbarrier as one thread, and let its phase last until copies have brought so many bytes."""
        self.emit("mbarrier_expect", (pointer, self._index(index)), None, bytes=bytes_)

    def tensor_copy(
        self, shared: Value, to: Any, mbarrier: tuple[Value, Any], source: TensorMap, first: Sequence[Any]
    ) -> None:
        """Start to copy the box that begins at ``first`` to shared memory; it arrives at an mbarrier, which is given as
        pointer and index."""
        place = (shared, self._index(to), mbarrier[0], self._index(mbarrier[1]))
        self.emit("tensor_copy", (*place, *(self._index(x) for x in first)), None, map=source.name)

    # -- specific to one language ----------------------------------------------------------------------------------

    def intrinsic(self, language: str, code: str, args: Sequence[Value], type_: ValueType | None) -> Value | None:
        """Emit a line of one target language; see ``ops.OPS["intrinsic"]``."""
        op = self._append("intrinsic", tuple(args), type_, (), {"language": language, "code": code})
        return op.result

    def comment(self, text: str) -> None:
        """Write a comment into the rendered source."""
        self.emit("comment", (), None, text=text)

    # -- internals -------------------------------------------------------------------------------------------------

    def emit(
        self, opcode: str, args: tuple[Value, ...], type_: Type | None, blocks: tuple[list[Op], ...] = (), **attrs: Any
    ) -> Value:
        """Append an operation. The returned value is meaningless for operations without a result."""
        result = self._append(opcode, args, type_, blocks, attrs).result
        return _NOTHING if result is None else result

    def _append(
        self, opcode: str, args: tuple[Value, ...], type_: Type | None, blocks: tuple[list[Op], ...],
        attrs: dict[str, Any],
    ) -> Op:  # fmt: skip
        op = Op(opcode, args, attrs, None, blocks, self.location())
        if type_ is not None:
            op.result = Value(type_, op, "", self)
        self._block.append(op)
        return op

    def coerce(self, value: Any, elem: Scalar) -> Value:
        """Turn a Python number into a constant of type ``elem``; a value is returned unchanged."""
        if isinstance(value, Value):
            return value
        return self.const(value, elem)

    def _type(self, opcode: str, value: Any) -> Type:
        if not isinstance(value, Value):
            raise self._error(
                f"{opcode}: expected a value of the kernel, got {value!r}; write b.const({value!r}, f32), or the type "
                "that you need"
            )
        return value.type

    def _scalar(self, elem: Any) -> Scalar:
        if not isinstance(elem, Scalar):
            raise self._error(f"expected a type of aule.ir.types such as f32, got {elem!r}; import it from there")
        return elem

    def _error(self, message: str) -> KernelError:
        return KernelError(f"kernel {self.name}: {message} (at {self.location()})")

    def _like(self, value: Any, other: Value) -> Value:
        result = self.coerce(value, element(other.type))
        if isinstance(other.type, Vector) and isinstance(result.type, Scalar):
            return self.splat(result, other.type.lanes)
        return result

    def _index(self, index: Any) -> Value:
        return self.coerce(index, i32)

    def _param(self, param: Param, type_: Type) -> Value:
        if param.name in self._values:
            raise self._error(f"parameter {param.name} is declared twice")
        value = Value(type_, None, param.name, self)
        self._params.append(param)
        self._values[param.name] = value
        return value

    def _fold(self, opcode: str, left: Value, right: Value) -> Value | None:
        """Fold integer constants, so that index arithmetic does not bloat the kernel."""
        type_ = left.type
        if not (isinstance(type_, Scalar) and type_.is_int) or right.type != type_:
            return None
        x, y = left.constant, right.constant
        if x is not None and y is not None and opcode in _FOLDED:
            result = computed(opcode, x, y, type_)
            if result is not None:
                return self.const(result, type_) if exact(result, type_) else None  # the device wraps
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

    def location(self) -> Location | None:
        """Find the line of the kernel: the innermost caller outside this package's ``ir`` folder and contextlib."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            name = frame.f_code.co_filename
            if not name.startswith(_HERE) and not name.endswith("contextlib.py"):
                break
            frame = frame.f_back
        return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


_NOTHING = Value(bool_)
