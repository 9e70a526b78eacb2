"""Loads, stores and arrays on the stack in LLVM IR."""

from __future__ import annotations

from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.types import Pointer, Vector, element, i32, lanes_of, vector_type
from aule.render._llvm_emitter import Emitter, llvm_type

_CACHE_LINE = 64


class Memory:
    """Emits the memory operations of a kernel. If ``checked``, indices outside of its arrays trap."""

    def __init__(self, emitter: Emitter, kernel: KernelIR, checked: bool) -> None:
        self._emitter, self._checked = emitter, checked
        self._align = kernel.alignments()
        self._narrowest = _narrowest_stores(kernel)
        self._nontemporal: int | None = None

    @property
    def streams(self) -> bool:
        """Whether any store was nontemporal."""
        return self._nontemporal is not None

    def array(self, array: Value, hint: str) -> None:
        assert isinstance(array.type, Pointer) and array.type.length is not None
        elem, length = array.type.elem, array.type.length
        align = max(self._align.get(array, 1) * elem.bytes, _CACHE_LINE if length >= 16 else 1)
        self._emitter.bind(array, self._emitter.alloca(f"[{length} x {llvm_type(elem)}]", align, hint))

    def _address(self, op: Op, inside: bool = True) -> str:
        e, (pointer, index) = self._emitter, op.args[:2]
        place = e.operand(index)
        if index.type.bits == 32 and index.constant is None:  # type: ignore[union-attr]
            extend = "sext" if index.type == i32 else "zext"
            place = e.emit(f"{extend} i32 {place} to i64")
        if self._checked and inside and isinstance(pointer.type, Pointer) and pointer.type.length is not None:
            moved = op.args[2] if len(op.args) > 2 else op.output
            self._check(place, pointer.type.length - lanes_of(moved.type))
        kind = "getelementptr inbounds" if inside else "getelementptr"
        return e.emit(f"{kind} {llvm_type(element(pointer.type))}, {e.typed(pointer)}, i64 {place}")

    def _check(self, place: str, last: int) -> None:
        """Trap unless ``place`` is in 0 .. ``last``."""
        e = self._emitter
        outside, then = e.labels("outside", "inside")
        within = e.emit(f"icmp ule i64 {place}, {last}")
        e.line(f"br i1 {within}, label %{then}, label %{outside}")
        e.start(outside)
        e.line("call void @llvm.trap()")
        e.line("unreachable")
        e.start(then)

    def load(self, op: Op) -> None:
        """Emit a load. From an array on the stack that is stored in narrower vectors, load vectors of that width and
        join them: LLVM 22 joins such stores itself, but before the last of them if they are not in order of address
        (SROA's tree-structured merge), which crashes it or gives wrong code.
        """
        e, address, elem, lanes = self._emitter, self._address(op), element(op.output.type), lanes_of(op.output.type)
        width = min(self._narrowest.get(op.args[0], lanes), lanes)
        align = _bytes(op) if width == lanes else min(_bytes(op), width * elem.bytes)
        parts = []
        for lane in range(0, lanes, width):
            place = e.emit(f"getelementptr inbounds {llvm_type(elem)}, ptr {address}, i64 {lane}") if lane else address
            parts.append(e.emit(f"load {llvm_type(vector_type(elem, width))}, ptr {place}, align {align}"))
        while len(parts) > 1:
            type_, order = llvm_type(vector_type(elem, width)), ", ".join(f"i32 {lane}" for lane in range(2 * width))
            joined = f"shufflevector {type_} {{}}, {type_} {{}}, <{2 * width} x i32> <{order}>"
            parts = [e.emit(joined.format(a, b)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            width *= 2
        e.bind(op.output, parts[0])

    def prefetch(self, op: Op) -> None:
        # Read prefetch into L2 (locality 2). L1 has few slots for pending lines, and filling it from memory is no
        # faster than a load.
        address = self._address(op, inside=False)
        self._emitter.line(f"call void @llvm.prefetch.p0(ptr {address}, i32 0, i32 2, i32 1)")

    def store(self, op: Op) -> None:
        address = self._address(op)
        self._emitter.line(f"store {self._emitter.typed(op.args[2])}, ptr {address}, align {_bytes(op)}")

    def store_streaming(self, op: Op) -> None:
        """Emit a nontemporal store if the address is aligned to the full vector at run time, else a plain store."""
        e, (value, address) = self._emitter, (op.args[2], self._address(op))
        size = value.type.bytes  # type: ignore[union-attr]
        number = e.emit(f"ptrtoint ptr {address} to i64")
        misalignment = e.emit(f"and i64 {number}, {size - 1}")
        aligned = e.emit(f"icmp eq i64 {misalignment}, 0")
        past, plain, end = e.labels("past", "plain", "stored")
        e.line(f"br i1 {aligned}, label %{past}, label %{plain}")
        e.start(past)
        e.line(f"store {e.typed(value)}, ptr {address}, align {size}, !nontemporal !{self._nontemporal_metadata()}")
        e.line(f"br label %{end}")
        e.start(plain)
        e.line(f"store {e.typed(value)}, ptr {address}, align {_bytes(op)}")
        e.line(f"br label %{end}")
        e.start(end)

    def _nontemporal_metadata(self) -> int:
        """The number of the metadata node of nontemporal stores."""
        if self._nontemporal is None:
            self._nontemporal = len(self._emitter.metadata)
            self._emitter.metadata.append(f"!{self._nontemporal} = !{{i32 1}}")
        return self._nontemporal

    def atomic(self, op: Op) -> None:
        elem, kind = element(op.args[2].type), op.attrs["kind"]
        if isinstance(op.args[2].type, Vector):
            raise KernelError(
                f"[llvm] expected an atomic of one element, got {op.args[2].type}; add one by one ({op.where})"
            )
        if kind == "exchange":
            kind = "xchg"
        elif elem.is_float:
            kind = f"f{kind}"
        elif kind in ("min", "max") and not elem.is_signed:
            kind = f"u{kind}"
        address = self._address(op)
        order = "acq_rel" if op.attrs["ordered"] else "monotonic"
        self._emitter.bind(
            op.output, self._emitter.emit(f"atomicrmw {kind} ptr {address}, {self._emitter.typed(op.args[2])} {order}")
        )


def _narrowest_stores(kernel: KernelIR) -> dict[Value, int]:
    """Lanes of the narrowest vector stored into each array on the stack."""
    found: dict[Value, int] = {}
    for op in kernel.walk():
        if op.opcode in ("store", "store_streaming") and isinstance(op.args[2].type, Vector):
            array, lanes = op.args[0], op.args[2].type.lanes
            if isinstance(array.type, Pointer) and array.type.length is not None:
                found[array] = min(found.get(array, lanes), lanes)
    return found


def _bytes(op: Op) -> int:
    """The alignment of a load or store in bytes."""
    return int(op.attrs["align"]) * element(op.args[0].type).bytes
