"""Matrix fragments in Metal, made of 8x8 blocks: the only size that a simdgroup multiplies.

A 16 x 16 fragment is a struct of four such blocks, row-major, and a lane holds two elements of each block: its
component c is element c % 2 of block c // 2. Every operation becomes a function before the kernel, so that the kernel
has one line for it.

bf16 exists only in matrices (``bfloat``, Metal 3.1). Memory and registers hold its bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from aule.errors import KernelError
from aule.ir.kernel import Op, Value
from aule.ir.types import Fragment, Pointer, Scalar, ValueType, bf16, f16, f32
from aule.render.clike import Expr, is_name
from aule.render.clike_c import CPrinter

_SIDE = 8
_PER_LANE = 2
"""Elements of a block per lane."""
_ELEMENTS = {f16: "half", f32: "float", bf16: "bfloat"}
_SPACES = {"global": "device", "shared": "threadgroup", "private": "thread"}


class FragmentPrinter(CPrinter):
    """Adds simdgroup matrices to the C printer."""

    def space(self, pointer: Value) -> str:
        """Metal's address space of a pointer."""
        assert isinstance(pointer.type, Pointer)
        return _SPACES[pointer.type.space]

    # -- types -----------------------------------------------------------------------------------------------------

    def type_name(self, type_: ValueType) -> str:
        if not isinstance(type_, Fragment):
            return super().type_name(type_)
        if type_.rows % _SIDE or type_.cols % _SIDE or type_.elem not in _ELEMENTS:
            raise KernelError(
                f"{self.kernel.name}: expected matrices of f16, bf16 or f32 in blocks of 8x8, got {type_}; plan the "
                "kernel for such fragments"
            )
        if type_.elem == bf16 and not self.target.bf16:
            raise KernelError(
                f"{self.kernel.name}: expected a target with bfloat (Metal 3.1), got {self.target.name} without; "
                "plan the kernel for f16 fragments"
            )
        shape = _shape(type_)
        if _count(type_) == 1:
            return f"simdgroup_{shape}"
        block = f"simdgroup_{_ELEMENTS[type_.elem]}8x8"
        self.helpers[shape] = f"struct {shape} {{\n    {block} block[{_count(type_)}];\n}};"
        return shape

    def declare(self, type_: ValueType, name: str, init: str | None, mutable: bool = False) -> str:
        # Metal's matrix functions take their destination by reference, so a fragment is never const.
        return super().declare(type_, name, init, mutable or isinstance(type_, Fragment))

    # -- operations ------------------------------------------------------------------------------------------------

    def fragment(self, op: Op) -> Expr:
        if op.opcode == "fragment_get":
            source, component = op.args[0], op.attrs["component"]
            assert isinstance(source.type, Fragment)
            place = _component(source.type, self._matrix(source), component)
            return Expr(f"as_type<ushort>({place})" if source.type.elem == bf16 else place)
        if op.opcode == "fragment_length":
            source = op.args[0]
            assert isinstance(source.type, Fragment)
            return Expr(str(_count(source.type) * _PER_LANE))
        type_ = op.output.type
        assert isinstance(type_, Fragment)
        if op.opcode == "fragment_fill":
            return Expr(f"{self._fill(type_)}({self._scalar(op.args[0], type_.elem)})")
        if op.opcode == "fragment_load":
            return Expr(f"{self._load(op, type_)}({self._place(op, type_.elem, 'const ')})")
        if op.opcode == "fragment_mma":
            return Expr(f"{self._multiply(op)}({', '.join(self._matrix(value) for value in op.args)})")
        name, changed = self.name(op.output.hint), op.opcode == "fragment_set"
        self.emit(self.declare(type_, name, self._matrix(op.args[0]) if changed else None))
        parts = [(op.attrs["component"], op.args[1])] if changed else enumerate(op.args)
        for component, value in parts:
            self.emit(f"{_component(type_, name, component)} = {self._scalar(value, type_.elem)};")
        return Expr(name)

    def fragment_store(self, op: Op) -> list[str]:
        value = op.args[3]
        assert isinstance(value.type, Fragment)
        return [f"{self._store(op, value.type)}({self._matrix(value)}, {self._place(op, value.type.elem)});"]

    def cast(self, value: Value, type_: ValueType, result: Value) -> Expr:
        if not isinstance(type_, Fragment):
            return super().cast(value, type_, result)
        assert isinstance(value.type, Fragment)
        name, elem = self.name(result.hint), _ELEMENTS[type_.elem]
        self.emit(self.declare(type_, name, None))
        for i in range(_count(type_) * _PER_LANE):
            source = _component(value.type, self._matrix(value), i)
            self.emit(f"{_component(type_, name, i)} = {elem}({source});")
        return Expr(name)

    def _matrix(self, value: Value) -> str:
        assert is_name(self._text[value])
        return self.bare(value)

    def _scalar(self, value: Value, elem: Scalar) -> str:
        """A register as an element of a matrix."""
        return f"as_type<bfloat>({self.bare(value)})" if elem == bf16 else self.bare(value)

    def _place(self, op: Op, elem: Scalar, const: str = "") -> str:
        """Pointer and stride arguments of a matrix in memory."""
        place = self.address(op.args[0], op.args[1])
        if elem == bf16:
            place = f"({self.space(op.args[0])} {const}bfloat*)({place})"
        return f"{place}, ulong({self.bare(op.args[2])})"

    # -- functions before the kernel -------------------------------------------------------------------------------

    def _fill(self, type_: Fragment) -> str:
        shape, elem = self.type_name(type_), _ELEMENTS[type_.elem]
        lines = [f"{block} = make_filled_simdgroup_matrix<{elem}, 8, 8>(x);" for block in _blocks(type_)]
        return self._function(f"fill_{_shape(type_)}", shape, f"{elem} x", [f"{shape} m;", *lines, "return m;"])

    def _load(self, op: Op, type_: Fragment) -> str:
        name, space, lines = self._transfer("load", op, type_)
        shape, arguments = self.type_name(type_), f"{space} const {_ELEMENTS[type_.elem]}* p, ulong stride"
        return self._function(name, shape, arguments, [f"{shape} m;", *lines, "return m;"])

    def _store(self, op: Op, type_: Fragment) -> str:
        name, space, lines = self._transfer("store", op, type_)
        arguments = f"{self.type_name(type_)} m, {space} {_ELEMENTS[type_.elem]}* p, ulong stride"
        return self._function(name, "void", arguments, lines)

    def _transfer(self, verb: str, op: Op, type_: Fragment) -> tuple[str, str, list[str]]:
        """Name, address space and statements of a function that loads or stores the blocks of a matrix."""
        space, transposed = self.space(op.args[0]), op.attrs["layout"] == "column"
        lines = [f"simdgroup_{verb}({block}, {place});" for block, place in _block_places(type_, transposed)]
        return f"{verb}{'_transposed' if transposed else ''}_{_shape(type_)}_{space}", space, lines

    def _multiply(self, op: Op) -> str:
        """``c + a b`` by blocks, with k as the outer loop, so that consecutive products add to different sums."""
        types = [value.type for value in op.args]
        a, b, c = (type_ for type_ in types if isinstance(type_, Fragment))
        left, right, total = _blocks(a, "a"), _blocks(b, "b"), _blocks(c, "c")
        rows, cols, depth = c.rows // _SIDE, c.cols // _SIDE, a.cols // _SIDE
        lines = []
        for k in range(depth):
            for i in range(rows):
                for j in range(cols):
                    sums = total[i * cols + j]
                    factors = f"{left[i * depth + k]}, {right[k * cols + j]}"
                    lines.append(f"simdgroup_multiply_accumulate({sums}, {factors}, {sums});")
        arguments = ", ".join(f"{self.type_name(type_)} {name}" for type_, name in ((a, "a"), (b, "b"), (c, "c")))
        name = f"multiply_{_shape(a)}_{_shape(b)}_{_ELEMENTS[c.elem]}"
        return self._function(name, self.type_name(c), arguments, [*lines, "return c;"])

    def _function(self, name: str, result: str, arguments: str, lines: list[str]) -> str:
        body = "".join(f"    {line}\n" for line in lines)
        self.helpers[name] = f"{result} {name}({arguments})\n{{\n{body}}}"
        return name


def _shape(type_: Fragment) -> str:
    return f"{_ELEMENTS[type_.elem]}{type_.rows}x{type_.cols}"


def _count(type_: Fragment) -> int:
    """Number of blocks of a fragment."""
    return type_.rows * type_.cols // _SIDE**2


def _blocks(type_: Fragment, name: str = "m") -> list[str]:
    """The blocks of a fragment, row-major."""
    return [name] if _count(type_) == 1 else [f"{name}.block[{i}]" for i in range(_count(type_))]


def _component(type_: Fragment, name: str, number: int) -> str:
    block, own = divmod(number, _PER_LANE)
    return f"{_blocks(type_, name)[block]}.thread_elements()[{own}]"


def _block_places(type_: Fragment, transposed: bool) -> Iterator[tuple[str, str]]:
    """Each block with its location: the pointer relative to ``p``, the stride, and the transpose flag."""
    across = type_.cols // _SIDE
    for number, block in enumerate(_blocks(type_)):
        row, col = divmod(number, across)
        down, along = (col, row) if transposed else (row, col)
        terms = ["p", *([f"{down * _SIDE} * stride"] if down else []), *([str(along * _SIDE)] if along else [])]
        yield block, f"{' + '.join(terms)}, stride{', ulong2(0, 0), true' if transposed else ''}"
