"""Rules of single operations for `verify`: one function per rule of ``ops.py`` about types and attributes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aule.ir.constants import wrap
from aule.ir.kernel import Op, Value, walk
from aule.ir.ops import OPS
from aule.ir.types import (
    PANEL,
    Fragment,
    Panels,
    Pointer,
    Ref,
    Role,
    Scalar,
    Type,
    Vector,
    bool_,
    element,
    f16,
    f32,
    i32,
    u32,
    with_element,
)  # fmt: skip

if TYPE_CHECKING:
    from aule.ir.verify import Verifier

IDENTIFIER = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
INDEX_TYPES = ("i32", "i64", "u32")

_ELEMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("neg", "abs", "add", "sub", "mul", "div", "min", "max"), ("int", "uint", "float")),
    **dict.fromkeys(("lt", "le", "gt", "ge"), ("int", "uint", "float")),
    **dict.fromkeys(("eq", "ne", "select"), ("bool", "int", "uint", "float")),
    **dict.fromkeys(("not", "and", "or", "xor"), ("bool", "int", "uint")),
    **dict.fromkeys(("rem", "shl", "shr"), ("int", "uint")),
    "mulhi": ("uint",),
    **dict.fromkeys(("exp2", "log2", "sqrt", "rsqrt", "rcp", "floor", "small", "sin", "cos", "fma"), ("float",)),
}
"""Element kinds that each arithmetic operation accepts."""

_COPY_BYTES = 16
_ATOMIC_KINDS = ("add", "min", "max", "and", "or", "xor", "exchange")
_REDUCE_KINDS = ("add", "min", "max")
_CREW_BARRIERS = ("barrier", "workgroup_any", "cluster_barrier")


def is_int(value: Any, low: int) -> bool:
    """True for an int, not a bool, of at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_index(type_: Type) -> bool:
    """True for types that can index memory."""
    return isinstance(type_, Scalar) and type_.name in INDEX_TYPES


def _is_word(type_: Type) -> bool:
    """True for 32-bit scalars, which lanes of a subgroup can exchange."""
    return isinstance(type_, Scalar) and type_.bits == 32


ATTRIBUTES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "axis": ("0, 1 or 2", lambda v: is_int(v, 0) and v <= 2),
    "align": ("a power of two", lambda v: is_int(v, 1) and v & (v - 1) == 0),
    "lane": ("a lane of the vector", lambda v: is_int(v, 0)),
    "pending": ("a count of groups", lambda v: is_int(v, 0)),
    "name": ("an identifier", lambda v: isinstance(v, str) and IDENTIFIER.fullmatch(v) is not None),
    "index": ("a value", lambda v: isinstance(v, Value)),
    "unroll": ("-1, 0 or a count", lambda v: is_int(v, -1)),
    "global_memory": ("a bool", lambda v: isinstance(v, bool)),
    "ordered": ("a bool", lambda v: isinstance(v, bool)),
    "mask": ("a positive integer", lambda v: is_int(v, 1)),
    "threads": ("a count of threads", lambda v: is_int(v, 0)),
    "bytes": (f"a positive count below {1 << 20}", lambda v: is_int(v, 1) and v < 1 << 20),
    "layout": ('"row" or "column"', lambda v: v in ("row", "column")),
    "component": ("a component's number", lambda v: is_int(v, 0)),
    "language": ("a language's name", lambda v: isinstance(v, str) and v != ""),
    "code": ("a line of code", lambda v: isinstance(v, str)),
    "text": ("text", lambda v: isinstance(v, str)),
}
"""Description and check of each attribute whose valid values do not depend on the operation."""


def _const(v: Verifier, op: Op) -> None:
    type_, value = op.output.type, op.attrs["value"]
    v.require(op, isinstance(type_, Scalar), "a scalar")
    assert isinstance(type_, Scalar)
    if type_ == bool_:
        fits = isinstance(value, bool)
    elif type_.is_float:
        fits = isinstance(value, float)
    else:
        fits = isinstance(value, int) and not isinstance(value, bool) and wrap(value, type_) == value
    if not fits:
        v.fail(op, f"a value of type {type_}", repr(value))


def _leaf(v: Verifier, op: Op) -> None:
    v.require(op, op.output.type == i32, "i32 as the result")


def _same(v: Verifier, op: Op) -> None:
    """Check arithmetic, where all operands and the result have one type."""
    type_, kinds = op.output.type, _ELEMENTS[op.opcode]
    v.require(op, isinstance(type_, Scalar | Vector) and all(arg.type == type_ for arg in op.args),
              "scalars or vectors of one type")  # fmt: skip
    v.require(op, element(type_).kind in kinds, f"elements of kind {', '.join(kinds)}")
    v.require(op, op.opcode != "mulhi" or element(type_) == u32, "elements of type u32")


def _compare(v: Verifier, op: Op) -> None:
    type_, kinds = op.args[0].type, _ELEMENTS[op.opcode]
    v.require(op, isinstance(type_, Scalar | Vector) and op.args[1].type == type_, "scalars or vectors of one type")
    assert isinstance(type_, Scalar | Vector)
    v.require(op, element(type_).kind in kinds, f"elements of kind {', '.join(kinds)}")
    v.require(op, op.output.type == with_element(type_, bool_), f"{with_element(type_, bool_)} as the result")


def _dot_pairs(v: Verifier, op: Op) -> None:
    type_ = op.output.type
    v.require(op, isinstance(type_, Scalar | Vector) and element(type_) == f32, "f32 or a vector of it as the result")
    assert isinstance(type_, Scalar | Vector)
    pair = with_element(type_, u32)
    expected = f"two operands of {pair} and one of {type_}"
    v.require(op, [arg.type for arg in op.args] == [pair, pair, type_], expected)


def _e4m3_halves(v: Verifier, op: Op) -> None:
    v.require(op, op.args[0].type == u32 and op.output.type == Vector(f16, 4), "u32, and f16x4 as the result")


def _select(v: Verifier, op: Op) -> None:
    condition, type_ = op.args[0].type, op.output.type
    v.require(op, isinstance(type_, Scalar | Vector) and op.args[1].type == type_ and op.args[2].type == type_,
              "two scalars or vectors of the result's type")  # fmt: skip
    assert isinstance(type_, Scalar | Vector)
    shaped = with_element(type_, bool_)
    v.require(op, condition in (bool_, shaped), f"bool or {shaped} as the condition")


def _cast(v: Verifier, op: Op) -> None:
    source, target = op.args[0].type, op.output.type
    v.require(op, isinstance(source, Scalar | Vector | Fragment), "a scalar, vector or fragment")
    assert isinstance(source, Scalar | Vector | Fragment)
    v.require(op, target == with_element(source, element(target)), "a result of the operand's shape")
    v.require(op, element(target) != bool_, "a result that is not bool (compare with zero instead)")


def _bitcast(v: Verifier, op: Op) -> None:
    source, target = op.args[0].type, op.output.type
    numbers = isinstance(source, Scalar | Vector) and isinstance(target, Scalar | Vector)
    v.require(op, numbers and bool_ not in (element(source), element(target)), "scalars or vectors of numbers")
    assert isinstance(source, Scalar | Vector) and isinstance(target, Scalar | Vector)
    v.require(op, source.bytes == target.bytes, "types of one size")


def _make_vector(v: Verifier, op: Op) -> None:
    type_ = op.output.type
    v.require(op, isinstance(type_, Vector) and type_.lanes == len(op.args) and
              all(arg.type == type_.elem for arg in op.args), "as many scalars as the vector has lanes")  # fmt: skip


def _splat(v: Verifier, op: Op) -> None:
    v.require(op, isinstance(op.output.type, Vector) and op.args[0].type == op.output.type.elem,
              "a scalar, and a vector of it as the result")  # fmt: skip


def _extract(v: Verifier, op: Op) -> None:
    type_ = op.args[0].type
    v.require(op, isinstance(type_, Vector) and op.output.type == type_.elem, "a vector, and its element as the result")
    assert isinstance(type_, Vector)
    if op.attrs["lane"] >= type_.lanes:
        v.fail(op, f"a lane below {type_.lanes}", str(op.attrs["lane"]))


def _permute(v: Verifier, op: Op) -> None:
    if len(op.args) not in (1, 2):
        v.fail(op, "1 or 2 operands", f"{len(op.args)}")
    type_, lanes = op.args[0].type, op.attrs["lanes"]
    if not isinstance(lanes, tuple) or not all(is_int(lane, 0) for lane in lanes):
        v.fail(op, "lanes to be a tuple of lanes", repr(lanes))
    v.require(op, isinstance(type_, Vector) and all(arg.type == type_ for arg in op.args), "vectors of one type")
    assert isinstance(type_, Vector)
    wanted = type_.elem if len(lanes) == 1 else Vector(type_.elem, len(lanes))
    v.require(op, op.output.type == wanted, f"{wanted} as the result of {len(lanes)} lanes")
    total = type_.lanes * len(op.args)
    if max(lanes) >= total:
        v.fail(op, f"lanes below {total}", str(max(lanes)))


def _private(v: Verifier, op: Op) -> None:
    type_ = op.output.type
    v.require(op, isinstance(type_, Pointer) and type_.space == "private" and type_.elem != bool_,
              "a private array of numbers")  # fmt: skip
    v.require(op, isinstance(type_, Pointer) and is_int(type_.length, 1), "an array with a length")


def _spaces(op: Op) -> tuple[str, ...]:
    return ("global",) if op.opcode.endswith("streaming") else ("global", "shared", "private")


def _load(v: Verifier, op: Op) -> None:
    pointer, type_ = v.memory(op, _spaces(op), reads=True, writes=False), op.output.type
    v.require(op, isinstance(type_, Scalar | Vector) and element(type_) == pointer.elem,
              f"{pointer.elem}, or a vector of it, as the result")  # fmt: skip


def _cluster_load(v: Verifier, op: Op) -> None:
    pointer, type_ = v.memory(op, ("shared",), reads=True, writes=False), op.output.type
    v.require(op, isinstance(type_, Scalar | Vector) and element(type_) == pointer.elem and op.args[2].type == i32,
              f"an i32, and {pointer.elem} or a vector of it as the result")  # fmt: skip


def _cluster_post(v: Verifier, op: Op) -> None:
    pointer = v.memory(op, ("shared",), reads=True, writes=True)
    v.require(op, pointer.elem.bits == 32, "elements of 32 bits")
    v.require(
        op, op.args[2].type == pointer.elem and op.args[3].type == i32, f"{pointer.elem} as the value, and an i32"
    )


def _prefetch(v: Verifier, op: Op) -> None:
    v.memory(op, ("global",), reads=True, writes=False)


def _store(v: Verifier, op: Op) -> None:
    pointer, type_ = v.memory(op, _spaces(op), reads=False, writes=True), op.args[2].type
    v.require(op, isinstance(type_, Scalar | Vector) and element(type_) == pointer.elem,
              f"{pointer.elem}, or a vector of it, as the value")  # fmt: skip


def _atomic(v: Verifier, op: Op) -> None:
    pointer = v.memory(op, ("global", "shared"), reads=True, writes=True)
    type_ = op.args[2].type
    together = isinstance(type_, Vector) and type_.lanes in (2, 4) and type_.elem == pointer.elem == f32
    v.require(op, type_ == pointer.elem or (together and pointer.space == "global"),
              f"{pointer.elem}, or two or four f32 of global memory, as the value")  # fmt: skip
    v.require(op, op.output.type == type_, "the value's type as the result's")
    v.require(op, not op.attrs["ordered"] or (pointer.space == "global" and not together),
              "one element of global memory where it is ordered")  # fmt: skip
    kinds = ("add",) if pointer.elem.name == "f32" else _ATOMIC_KINDS
    v.require(op, pointer.elem.name in ("i32", "u32", "f32"), "i32, u32 or f32 in memory")
    if op.attrs["kind"] not in kinds:
        v.fail(op, f"one of {', '.join(kinds)} on {pointer.elem}", repr(op.attrs["kind"]))


def _async_copy(v: Verifier, op: Op) -> None:
    target = v.memory(op, ("shared",), reads=False, writes=True)
    source = v.memory(op, ("global",), reads=True, writes=False, at=2)
    v.require(op, source.elem == target.elem, "memory of one element type")
    if v.access.get(op.args[2]) != "read":
        v.fail(op, "a buffer that the kernel only reads", f"{op.args[2].hint}")
    if not is_int(op.attrs["lanes"], 1) or op.attrs["lanes"] * target.elem.bytes != _COPY_BYTES:
        v.fail(op, f"{_COPY_BYTES} bytes", f"{op.attrs['lanes']} elements of {target.elem}")
    v.require(op, len(op.args) == 4 or op.args[4].type == bool_, "a bool that says whether to copy")


def _launch_await(v: Verifier, op: Op) -> None:
    before = itertools.takewhile(lambda other: other is not op, v.kernel.walk())
    kinds = {OPS[other.opcode].category for other in before if other.opcode in OPS}
    v.require(op, op in v.kernel.body and kinds <= {"leaf", "unary", "binary", "compare", "cast"},
              "the beginning of the kernel, behind nothing but arithmetic")  # fmt: skip


def _var(v: Verifier, op: Op) -> None:
    type_ = op.args[0].type
    v.require(op, isinstance(type_, Scalar | Vector | Fragment) and op.output.type == Ref(type_),
              "an initial value, and a variable of its type as the result")  # fmt: skip


def _get(v: Verifier, op: Op) -> None:
    type_ = op.args[0].type
    v.require(op, isinstance(type_, Ref) and op.output.type == type_.target, "a variable, and its value as the result")


def _set(v: Verifier, op: Op) -> None:
    type_ = op.args[0].type
    v.require(op, isinstance(type_, Ref) and op.args[1].type == type_.target, "a variable and a value of its type")


def _loop(v: Verifier, op: Op) -> None:
    type_, step = op.attrs["index"].type, op.args[2].constant
    integer = isinstance(type_, Scalar) and type_.is_int and type_.bits >= 32
    if not integer or any(arg.type != type_ for arg in op.args):
        got = ", ".join(str(arg.type) for arg in op.args)
        v.fail(op, "start, stop, step and index of one integer type of 32 or 64 bits", f"{got} and index {type_}")
    if step is not None and step <= 0:
        v.fail(op, "a positive step", str(step))


def _repeat(v: Verifier, op: Op) -> None:
    v.require(op, op.args[0].type == Ref(i32), "a variable of i32")
    if v.kernel.cluster == 1:
        v.fail(op, "a cluster, whose workgroups run at the same time", "none")


def _roles(v: Verifier, op: Op) -> None:
    roles, size = op.attrs["roles"], v.kernel.subgroup_size
    known = isinstance(roles, tuple) and len(roles) > 1 and all(
        isinstance(role, Role) and is_int(role.subgroups, 1) and is_int(role.crews, 1) for role in roles
    )  # fmt: skip
    if not known or len(op.blocks) != len(roles):
        v.fail(op, "two roles or more, and a block for each", f"{roles!r} and {len(op.blocks)} blocks")
    if size * sum(role.total for role in roles) != v.kernel.workgroup:
        v.fail(op, f"subgroups of all {v.kernel.workgroup} threads of the workgroup, and their size",
               f"{sum(role.total for role in roles)} subgroups of {size}")  # fmt: skip
    if any(role.registers % 8 or not 24 <= role.registers <= 240 for role in roles):
        v.fail(op, "24 to 240 registers, a multiple of 8", ", ".join(str(role.registers) for role in roles))
    threads = sum(role.registers * role.total * size for role in roles)
    if threads > v.kernel.max_registers * v.kernel.workgroup:
        v.fail(op, f"at most {v.kernel.max_registers * v.kernel.workgroup} registers, as many as the workgroup has",
               f"{threads}")  # fmt: skip
    if any(role.total % 4 for role in roles):
        v.fail(op, "roles of whole warpgroups, which exchange registers", f"{[role.total for role in roles]} subgroups")
    for block, role in zip(op.blocks, roles, strict=True):
        own: set[Value] = set()
        for inner in walk(block):
            if inner.opcode == "roles":
                v.fail(inner, "no roles within roles", "some")
            if inner.opcode == "var":
                own.add(inner.output)
            written = [x for x in inner.args if isinstance(x.type, Ref)] if inner.opcode != "get" else []
            if not own.issuperset(written):
                v.fail(inner, "a role to set only variables of its own", "one from outside of its block")
            if inner.opcode in _CREW_BARRIERS and role.crews > 1:
                v.fail(inner, "no barrier in a role of several crews", f"{role.crews} crews")


def _if(v: Verifier, op: Op) -> None:
    v.require(op, op.args[0].type == bool_, "a bool")


def _shuffle(v: Verifier, op: Op) -> None:
    type_ = op.output.type
    v.require(op, _is_word(type_) and op.args[0].type == type_, "a scalar of 32 bits, and the same as the result")
    if len(op.args) == 2:
        v.require(op, op.args[1].type == i32, "an i32 as the lane")
    mask, size = op.attrs.get("mask", 0), v.kernel.subgroup_size
    if size and mask >= size:
        v.fail(op, f"a mask below the subgroup size {size}", str(mask))
    if op.opcode == "subgroup_reduce" and op.attrs["kind"] not in _REDUCE_KINDS:
        v.fail(op, f"one of {', '.join(_REDUCE_KINDS)}", repr(op.attrs["kind"]))


def _vote(v: Verifier, op: Op) -> None:
    v.require(op, op.args[0].type == bool_ and op.output.type == bool_, "a bool")


def _fragment_fill(v: Verifier, op: Op) -> None:
    v.require(op, isinstance(op.output.type, Fragment) and op.args[0].type == v.storage_type(op.output.type),
              "a scalar, and a fragment of it as the result")  # fmt: skip


def _fragment_memory(v: Verifier, op: Op) -> None:
    loads = op.opcode == "fragment_load"
    type_ = op.output.type if loads else op.args[3].type
    pointer = v.memory(op, ("global", "shared"), reads=loads, writes=not loads)
    v.require(op, is_index(op.args[2].type), f"a stride of type {', '.join(INDEX_TYPES)}")
    fits = isinstance(type_, Fragment) and v.storage_type(type_) == pointer.elem
    v.require(op, fits, f"a fragment of {pointer.elem}{' as the result' if loads else ''}")


def _fragment_mma(v: Verifier, op: Op) -> None:
    a, b, c = (arg.type for arg in op.args)
    fragments = isinstance(a, Fragment) and isinstance(b, Fragment) and isinstance(c, Fragment)
    v.require(op, fragments and op.output.type == c, "three fragments, and the type of the accumulator as the result")
    assert isinstance(a, Fragment) and isinstance(b, Fragment) and isinstance(c, Fragment)
    v.require(op, (a.use, b.use, c.use) == ("a", "b", "accumulator"), "fragments of use a, b and accumulator")
    v.require(op, a.cols == b.rows and (a.rows, b.cols) == (c.rows, c.cols), "shapes m x k, k x n and m x n")
    v.require(op, a.elem == b.elem and a.elem.is_float == c.elem.is_float and c.elem.bits >= a.elem.bits,
              "a and b of one element type, and an accumulator of the same kind and at least its size")  # fmt: skip


def _fragment_length(v: Verifier, op: Op) -> None:
    v.require(op, isinstance(op.args[0].type, Fragment) and op.output.type == i32, "a fragment, and i32 as the result")


def _component(v: Verifier, op: Op) -> None:
    type_ = op.args[0].type
    v.require(op, isinstance(type_, Fragment), "a fragment")
    assert isinstance(type_, Fragment)
    if op.opcode == "fragment_get":
        v.require(op, op.output.type == v.storage_type(type_), f"{v.storage_type(type_)} as the result")
    else:
        v.require(op, op.args[1].type == v.storage_type(type_) and op.output.type == type_,
                  f"{v.storage_type(type_)}, and {type_} as the result")  # fmt: skip
    lanes = v.kernel.subgroup_size if type_.use == "accumulator" else 1  # a factor may have several copies
    components = type_.rows * type_.cols // max(lanes, 1)
    if op.attrs["component"] >= components:
        v.fail(op, f"a component below {components}", str(op.attrs["component"]))


def _fragment_pack(v: Verifier, op: Op) -> None:
    type_ = op.output.type
    v.require(op, isinstance(type_, Fragment) and all(arg.type == v.storage_type(type_) for arg in op.args),
              "scalars, and a fragment of them as the result")  # fmt: skip
    assert isinstance(type_, Fragment)
    size = v.kernel.subgroup_size
    elements, given = type_.rows * type_.cols, len(op.args) * size
    factor = type_.use != "accumulator" and given > 0 and given % elements == 0
    if size and given != elements and not factor:
        v.fail(op, f"{elements // size} components", f"{len(op.args)}")


def _warpgroup_mma(v: Verifier, op: Op) -> None:
    v.require(op, len(op.args) >= 4, "a right factor, a left factor and accumulators")
    rest, elem = list(op.args[2:]), v.memory(op, ("shared",), reads=True, writes=False).elem
    v.require(op, elem.is_float and elem.bits == 16, "factors of 16-bit floats")
    if op.attrs["left"] is None:
        left = rest.pop(0).type
        v.require(op, left == Fragment(elem, 16, 16, "a"), f"a fragment of {elem}, 16x16, of use a as the left factor")
    else:
        v.require(op, v.memory(op, ("shared",), reads=True, writes=False, at=2).elem == elem, "factors of one type")
        del rest[:2]
    type_ = Ref(Fragment(f32, 16, 16, "accumulator"))
    v.require(op, 0 < len(rest) <= 16 and all(x.type == type_ for x in rest), f"1 to 16 of {type_} as accumulators")
    v.require(op, len(set(rest)) == len(rest), "accumulators that differ")
    if v.kernel.workgroup % 128 or v.kernel.subgroup_size not in (0, 32):
        v.fail(op, "workgroups of whole warpgroups", f"{v.kernel.workgroup} threads")
    for name, direct in (("right", "column"), ("left", "row")):
        panels = op.attrs[name]
        if panels is None and name == "left":
            continue
        fits = isinstance(panels, Panels) and panels.layout in ("row", "column")
        fits = fits and panels.stride % 512 == 0 and panels.row % 8 == 0
        if not fits or panels.col % (16 if panels.layout == direct else PANEL):
            v.fail(op, "panels as `Panels` says", repr(panels))


def _mbarrier(v: Verifier, op: Op) -> None:
    pointer = v.memory(op, ("shared",), reads=True, writes=True)
    v.require(op, pointer.elem.name == "u64", "shared memory of u64")
    v.require(op, all(arg.type == i32 for arg in op.args[2:]), "an i32 as the parity")


def _mbarrier_expect(v: Verifier, op: Op) -> None:
    _mbarrier(v, op)
    _in_roles(v, op)


def _tensor_copy(v: Verifier, op: Op) -> None:
    if len(op.args) < 4:
        v.fail(op, "shared memory, an mbarrier and coordinates", f"{len(op.args)} operands")
    elem = v.memory(op, ("shared",), reads=False, writes=True).elem
    barriers = v.memory(op, ("shared",), reads=True, writes=True, at=2).elem
    v.require(op, barriers.name == "u64", "shared memory of u64 for the mbarrier")
    source = next((x for x in v.kernel.maps if x.name == op.attrs["map"]), None)
    if source is None:
        v.fail(op, "a tensor map of the kernel", repr(op.attrs["map"]))
    coordinates = [arg.type for arg in op.args[4:]]
    v.require(op, coordinates == [i32] * len(source.box), f"{len(source.box)} coordinates of i32")
    v.require(op, elem == element(v.kernel.values[source.buffer].type), "memory of one element type")
    _in_roles(v, op)


def _in_roles(v: Verifier, op: Op) -> None:
    if all(other.opcode != "roles" for other in v.kernel.body):
        v.fail(op, "a kernel with roles", "one without")


def _intrinsic(v: Verifier, op: Op) -> None:
    v.require(op, not any(isinstance(arg.type, Ref) for arg in op.args), "no variables as operands")
    v.require(op, op.result is None or isinstance(op.result.type, Scalar | Vector | Fragment), "a value as the result")


def _form_only(v: Verifier, op: Op) -> None:
    """Check nothing beyond the number of operands, attributes and blocks, which `Verifier` has checked."""


RULES: dict[str, Callable[[Verifier, Op], None]] = {
    "const": _const, "leaf": _leaf,
    "unary": _same, "binary": _same, "fma": _same, "compare": _compare, "dot_pairs": _dot_pairs, "select": _select,
    "cast": _cast, "bitcast": _bitcast, "e4m3_halves": _e4m3_halves,
    "make_vector": _make_vector, "splat": _splat, "extract": _extract, "permute": _permute,
    "private": _private, "load": _load, "load_streaming": _load, "prefetch": _prefetch,
    "store": _store, "store_streaming": _store, "atomic": _atomic,
    "async_copy": _async_copy, "async_copy_or_zero": _async_copy,
    "cluster_load": _cluster_load, "cluster_post": _cluster_post,
    "var": _var, "get": _get, "set": _set,
    "loop": _loop, "repeat": _repeat, "if": _if, "roles": _roles,
    "sync": _form_only, "launch_await": _launch_await,
    "workgroup_any": _vote,
    "subgroup": _shuffle, "subgroup_any": _vote, "subgroup_all": _vote,
    "fragment_fill": _fragment_fill, "fragment_load": _fragment_memory, "fragment_store": _fragment_memory,
    "fragment_mma": _fragment_mma, "fragment_length": _fragment_length, "fragment_get": _component,
    "fragment_set": _component, "fragment_pack": _fragment_pack,
    "warpgroup": _form_only, "warpgroup_mma": _warpgroup_mma,
    **dict.fromkeys(("mbarrier_init", "mbarrier_arrive", "mbarrier_wait"), _mbarrier),
    "mbarrier_expect": _mbarrier_expect, "tensor_copy": _tensor_copy,
    "intrinsic": _intrinsic, "comment": _form_only,
}  # fmt: skip
"""Rule of each operation, by opcode or else by category."""
