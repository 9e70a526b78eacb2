"""Checks a kernel against every rule of ``ops.py``.

`verify` runs at both ends of the pass list and before every rendering, so renderers may rely on the rules. An error
names the operation, its types and the line of Python that emitted it.
"""

from __future__ import annotations

from typing import NoReturn, get_args

from aule.artifact import SCALAR_FORMATS, TensorMap
from aule.errors import KernelError
from aule.ir._rules import ATTRIBUTES, IDENTIFIER, INDEX_TYPES, RULES, is_index, is_int
from aule.ir._uniform import divergent_barriers
from aule.ir.kernel import Arithmetic, KernelIR, Op, Value
from aule.ir.ops import OPS, OpInfo
from aule.ir.text import line
from aule.ir.types import SCALARS, Fragment, Pointer, Ref, Scalar, Type, Vector, bool_, element, u16

_VECTOR_LANES = (2, 4, 8, 16)


def verify(kernel: KernelIR) -> None:
    """Raise a KernelError if a kernel breaks a rule of ``ops.py``."""
    verify_structure(kernel)
    for barrier, cause in divergent_barriers(kernel):
        raise KernelError(
            f"kernel {kernel.name}: barrier: expected uniform control flow, got `{line(kernel, cause)}` at "
            f"{cause.where}, which threads of a workgroup may decide differently; the barrier is at {barrier.where}"
        )


def verify_structure(kernel: KernelIR, soft: frozenset[Scalar] = frozenset()) -> None:
    """Check everything that `verify` does, except barriers in divergent control flow.

    ``soft`` are types that, after legalisation, exist only in fragments: memory and registers hold their bits as u16.
    """
    Verifier(kernel, soft).run()


class Verifier:
    """Walks a kernel and applies the rule of each operation, which calls back into this class."""

    def __init__(self, kernel: KernelIR, soft: frozenset[Scalar] = frozenset()) -> None:
        self.kernel, self.soft = kernel, soft
        self.visible: set[Value] = set(kernel.values.values()) | set(kernel.shared)
        self.defined: set[Value] = set(self.visible)
        self.access = {kernel.values[p.name]: p.access for p in kernel.params if p.name in kernel.values}

    def run(self) -> None:
        self._header()
        self._block(self.kernel.body)

    # -- kernel header ---------------------------------------------------------------------------------------------

    def _header(self) -> None:
        kernel = self.kernel
        if not IDENTIFIER.fullmatch(kernel.name):
            raise KernelError(f"kernel: expected a name that is an identifier, got {kernel.name!r}")
        self._expect(is_int(kernel.workgroup, 1), f"a workgroup of at least 1 thread, got {kernel.workgroup!r}")
        size = kernel.subgroup_size
        power = is_int(size, 0) and size & (size - 1) == 0
        self._expect(power, f"a subgroup size that is 0 or a power of two, got {size!r}")
        self._expect(is_int(kernel.max_registers, 0), f"max_registers of at least 0, got {kernel.max_registers!r}")
        self._expect(is_int(kernel.cluster, 1), f"a cluster of at least 1 workgroup, got {kernel.cluster!r}")
        known = kernel.arithmetic in get_args(Arithmetic)
        self._expect(known, f"arithmetic of a kind there is, got {kernel.arithmetic!r}")
        names: set[str] = set()
        for name in (
            [p.name for p in kernel.params]
            + [array.hint for array in kernel.shared]
            + [tensor.name for tensor in kernel.maps]
        ):
            self._expect(IDENTIFIER.fullmatch(name) is not None, f"names that are identifiers, got {name!r}")
            self._expect(name not in names, f"names that differ, got {name!r} twice")
            names.add(name)
        self._expect(set(kernel.values) == {p.name for p in kernel.params}, "one value for each parameter")
        for param in kernel.params:
            type_, elem = kernel.values[param.name].type, SCALARS.get(param.dtype)
            if param.kind == "scalar":
                self._expect(param.dtype in SCALAR_FORMATS, f"a scalar of {', '.join(SCALAR_FORMATS)}, got {param}")
                self._expect(type_ == elem, f"{param.dtype} as the type of {param.name}, got {type_}")
            else:
                self._expect(elem not in (None, bool_), f"a buffer of numbers, got {param}")
                self._expect(param.access in ("read", "write", "readwrite"), f"a known access, got {param}")
                fits = isinstance(type_, Pointer) and type_.space == "global" and type_.elem == elem
                self._expect(fits, f"global<{param.dtype}> as the type of {param.name}, got {type_}")
        for tensor in kernel.maps:
            self._tensor_map(tensor)
        for array in kernel.shared:
            type_ = array.type
            fits = isinstance(type_, Pointer) and type_.space == "shared" and type_.elem != bool_
            self._expect(fits, f"shared arrays of numbers, got {type_}")
            self._expect(isinstance(type_, Pointer) and is_int(type_.length, 1), f"a length for shared {array.hint}")

    def _tensor_map(self, tensor: TensorMap) -> None:
        params = {p.name: p for p in self.kernel.params}
        buffer = params.get(tensor.buffer)
        fits = buffer is not None and (buffer.kind, buffer.access) == ("buffer", "read")
        self._expect(fits and buffer is not None and buffer.dtype in ("f16", "bf16"),
                     f"tensor maps of buffers of f16 or bf16 that are only read, got {tensor}")  # fmt: skip
        for name in (tensor.offset, *tensor.sizes, *tensor.strides):
            known = params.get(name) if isinstance(name, str) else None
            integer = known is not None and known.kind == "scalar" and SCALARS[known.dtype].is_int
            self._expect(is_int(name, 1) or integer, f"numbers or scalars of integers in a tensor map, got {name!r}")
        rank, box = len(tensor.sizes), tensor.box
        ranks = 2 <= rank <= 5 and len(tensor.strides) == rank - 1 and len(box) == rank
        self._expect(ranks, f"2 to 5 axes of a tensor map, one stride less and a box, got {tensor}")
        fits = all(is_int(n, 1) and n <= 256 for n in box) and 2 * box[0] % 16 == 0
        self._expect(fits, f"a box of 1 to 256 elements along each axis, in multiples of 16 bytes, got {box}")
        fits = tensor.swizzle == 0 or tensor.swizzle == 2 * box[0] in (32, 64, 128)
        self._expect(fits, f"a swizzle of 0, 32, 64 or 128 bytes, as wide as the box, got {tensor.swizzle}")

    def _expect(self, holds: bool, expected: str) -> None:
        if not holds:
            raise KernelError(f"kernel {self.kernel.name}: expected {expected}")

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _block(self, block: list[Op]) -> None:
        for op in block:
            info = self._form(op)
            RULES[op.opcode if op.opcode in RULES else info.category](self, op)
            if op.result is not None:
                self._define(op, op.result)
            for nested in op.blocks:
                if op.opcode == "loop":
                    self._define(op, op.attrs["index"])
                self._block(nested)
                if op.opcode == "loop":
                    self.visible.remove(op.attrs["index"])
        if block is not self.kernel.body:
            self.visible.difference_update(op.result for op in block if op.result is not None)

    def _define(self, op: Op, value: Value) -> None:
        if value in self.defined:
            self.fail(op, "a value that is defined once", "one that exists already")
        self.defined.add(value)
        self.visible.add(value)

    def _form(self, op: Op) -> OpInfo:
        """Check opcode, arity, attributes, blocks, result and scope."""
        info = OPS.get(op.opcode)
        if info is None:
            raise KernelError(f"kernel {self.kernel.name}: expected an operation of the language, got {op.opcode!r} "
                              f"at {op.where}")  # fmt: skip
        if info.arity is not None and len(op.args) != info.arity:
            self.fail(op, f"{info.arity} operands", f"{len(op.args)}")
        for arg in op.args:
            if arg not in self.visible:
                state = "one that is defined elsewhere" if arg in self.defined else "one that nothing defines"
                self.fail(op, "operands that are defined before, in this block or around it", f"{state} ({arg!r})")
        if set(op.attrs) != set(info.attrs):
            self.fail(op, f"the attributes ({', '.join(info.attrs)})", f"({', '.join(op.attrs)})")
        for name, value in op.attrs.items():
            if name in ATTRIBUTES:
                described, holds = ATTRIBUTES[name]
                if not holds(value):
                    self.fail(op, f"{name} to be {described}", repr(value))
        if info.blocks is not None and len(op.blocks) != info.blocks:
            self.fail(op, f"{info.blocks} blocks", f"{len(op.blocks)}")
        if op.opcode != "intrinsic" and (op.result is not None) != info.result:
            self.fail(op, "a result" if info.result else "no result", "none" if info.result else "one")
        if op.result is not None:
            self._well_formed(op, op.result.type)
        return info

    def _well_formed(self, op: Op, type_: Type) -> None:
        inner = type_.target if isinstance(type_, Ref) else type_
        if isinstance(inner, Vector) and inner.lanes not in _VECTOR_LANES:
            self.fail(op, "a vector of 2, 4, 8 or 16", str(type_))
        if isinstance(inner, Fragment):
            known = inner.use in ("a", "b", "accumulator") and is_int(inner.rows, 1) and is_int(inner.cols, 1)
            if not known or inner.elem == bool_:
                self.fail(op, "a fragment of numbers with rows, columns and a use", str(type_))
        if element(type_) != SCALARS.get(element(type_).name):
            self.fail(op, "a type of the language", str(type_))

    # -- helpers for the rules -------------------------------------------------------------------------------------

    def fail(self, op: Op, expected: str, got: str) -> NoReturn:
        """Raise the error for an operation."""
        raise KernelError(f"kernel {self.kernel.name}: {op.opcode}: expected {expected}, got {got}; "
                          f"`{line(self.kernel, op)}` at {op.where}")  # fmt: skip

    def require(self, op: Op, holds: bool, expected: str) -> None:
        """Raise an error that shows the types of operands and result, unless a condition holds."""
        if not holds:
            got = ", ".join(str(arg.type) for arg in op.args) or "no operands"
            self.fail(op, expected, got if op.result is None else f"{got} -> {op.result.type}")

    def storage_type(self, fragment: Fragment) -> Scalar:
        """Type that memory and registers use for a fragment's elements."""
        return u16 if fragment.elem in self.soft else fragment.elem

    def memory(self, op: Op, spaces: tuple[str, ...], *, reads: bool, writes: bool, at: int = 0) -> Pointer:
        """Check the pointer at operand ``at`` and the index after it; returns the pointer's type."""
        pointer, index = op.args[at].type, op.args[at + 1].type
        self.require(
            op,
            isinstance(pointer, Pointer),
            "a pointer as the first operand" if at == 0 else f"a pointer as operand {at + 1}",
        )
        assert isinstance(pointer, Pointer)
        self.require(op, pointer.space in spaces, f"{' or '.join(spaces)} memory")
        self.require(op, is_index(index), f"an index of type {', '.join(INDEX_TYPES)}")
        access = self.access.get(op.args[at], "readwrite")
        if reads and access == "write":
            self.fail(op, "a buffer that may be read", f'{op.args[at].hint} with access "write"')
        if writes and access == "read":
            self.fail(op, "a buffer that may be written", f'{op.args[at].hint} with access "read"')
        return pointer
