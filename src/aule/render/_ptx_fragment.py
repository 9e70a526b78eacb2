"""Matrix fragments in PTX: 16 x 16 matrices over a warp, by ldmatrix and mma.sync.

A fragment of use "a" or "b" is four registers of two 16-bit floats each; an accumulator is eight registers of f32. They
have the layout of mma.sync: two m16n8k16 products (four m16n8k8 on sm_75) make one of 16 x 16 x 16, and the components
of an accumulator are those of an "a" fragment (`aule.target.NVIDIA_LAYOUT`).

Factors of f32 are eight registers, multiplied as tf32 by four m16n8k8 products. The hardware ignores the last 13 bits,
so a kernel that wants them rounded must do so before. For tf32 the instruction expects columns t and t + 4 of a left
factor in a lane that holds columns 2t and 2t + 1 of an accumulator. Since the order of a sum is free, both factors are
permuted: column t of the instruction is our 2t, and t + 4 is our 2t + 1. So components match the accumulator's again.
"""

from __future__ import annotations

from aule.ir.kernel import Op, Value
from aule.ir.types import Fragment, element
from aule.render._ptx_convert import join, split
from aule.render._ptx_emitter import Emitter, refuse
from aule.render._ptx_memory import Addresses, at

_SIZE = 16
_COMPONENTS = 8
"""Components per lane."""


def registers_of(op: Op, type_: Fragment) -> int:
    """Number of registers of a fragment; an error for those that mma.sync does not support."""
    half = type_.elem.name in ("f16", "bf16") and type_.use != "accumulator"
    if (type_.rows, type_.cols) != (_SIZE, _SIZE) or not (half or type_.elem.name == "f32"):
        expected = "16 x 16 of f16, bf16 or f32 as factors and of f32 as accumulator"
        raise refuse(op, expected, type_, "plan for such fragments")
    return 4 if half else 8


def render(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Emit an operation on fragments."""
    if op.opcode == "fragment_load":
        _load(e, addresses, op)
    elif op.opcode in _IN_REGISTERS:
        _IN_REGISTERS[op.opcode](e, op)
    else:
        raise refuse(op, "fragments that stay in registers", op.opcode, "store their components")


def _type(value: Value) -> Fragment:
    assert isinstance(value.type, Fragment)
    return value.type


def _load(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Load a fragment by ldmatrix: each lane passes the address of one row of eight elements."""
    type_, memory = _type(op.output), addresses.memory(op.args[0])
    if type_.use == "accumulator" or memory.space != "shared":
        raise refuse(op, "a factor from shared memory", f"{type_} from {memory.space}", "load the components")
    if registers_of(op, type_) == 8:
        _load_words(e, addresses, op)
        return
    # Blocks of 8 x 8: lanes 0-15 address the rows of blocks 0 and 1, lanes 16-31 those of 2 and 3.
    lane = e.once("%laneid", "mov.u32", "r", "%laneid")
    low = e.once("lane & 15", "and.b32", "r", lane, "15")
    far = e.once("lane >> 4", "shr.u32", "r", lane, "4")
    straight = type_.use == "a"
    if op.attrs["layout"] == ("row" if straight else "column"):
        suffix = ""
    else:
        suffix, straight = ".trans", not straight
    if straight:  # blocks go down the rows first
        row, column = low, e.once("(lane >> 4) * 8", "shl.b32", "r", far, "3")
    else:
        eight = e.once("lane & 8", "and.b32", "r", lane, "8")
        seven = e.once("lane & 7", "and.b32", "r", lane, "7")
        row = e.once("(lane & 7) + (lane >> 4) * 8", "mad.lo.s32", "r", far, "8", seven)
        column = eight
    stride = e.operands(op.args[2])[0]
    own = e.once(("own", row, column, stride), "mad.lo.s32", "r", row, stride, column)
    bytes_ = e.once(("own bytes", own), "shl.b32", "r", own, "1")
    base, offset = addresses.locate_register(memory, op.args[1])
    place = e.once(("ldmatrix", base, bytes_), "add.s32", "r", base, bytes_)
    out = [e.new("r") for _ in range(4)]
    e.line(f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{{', '.join(out)}}}, {at(place, offset)};")
    e.bind(op.output, tuple(out))


def _load_words(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Load a fragment of 32-bit elements by plain loads.

    Along the dimension that is summed over, a lane holds 2t, 2t + 1 and both plus 8; along the other, g and g + 8. Two
    elements are loaded at a time if neighbours along the sum are neighbours in memory.
    """
    type_, memory = _type(op.output), addresses.memory(op.args[0])
    lane = e.once("%laneid", "mov.u32", "r", "%laneid")
    group = e.once("lane >> 2", "shr.u32", "r", lane, "2")
    quarter = e.once("lane & 3", "and.b32", "r", lane, "3")
    pair = e.once("(lane & 3) * 2", "shl.b32", "r", quarter, "1")
    neighbours = op.attrs["layout"] == ("row" if type_.use == "a" else "column")
    row, column = (group, pair) if neighbours else (pair, group)
    stride = e.operands(op.args[2])[0]
    base, offset = addresses.locate_register(memory, op.args[1])

    def place(line: int, further: int) -> str:
        """Address ``line`` lines below the lane's first element and ``further`` elements on."""
        start, inside = ("0", line * int(stride)) if not stride.startswith("%") else (str(line), 0)
        first = e.once(("line", row, start), "add.s32", "r", row, start)
        own = e.once(("own", first, column, stride), "mad.lo.s32", "r", first, stride, column)
        bytes_ = e.once(("own words", own), "shl.b32", "r", own, "2")
        address = e.once(("word", base, bytes_), "add.s32", "r", base, bytes_)
        return at(address, offset + 4 * (inside + further))

    loaded: dict[tuple[int, int], tuple[str, str]] = {}
    for g in range(2):
        for k in range(2):
            low, high = loaded[g, k] = e.new("f"), e.new("f")
            if neighbours:
                e.line(f"ld.shared.v2.f32 {{{low}, {high}}}, {place(8 * g, 8 * k)};")
            else:
                e.line(f"ld.shared.f32 {low}, {place(8 * k, 8 * g)};")
                e.line(f"ld.shared.f32 {high}, {place(8 * k + 1, 8 * g)};")
    # "a" has the component order of an accumulator, "b" the operand order of the instruction.
    order = [(0, 0), (1, 0), (0, 1), (1, 1)] if type_.use == "a" else [(0, 0), (0, 1), (1, 0), (1, 1)]
    e.bind(op.output, tuple(x for which in order for x in loaded[which]))


def _mma(e: Emitter, op: Op) -> None:
    for value in op.args:
        registers_of(op, _type(value))
    kind = element(op.args[0].type).name
    a, b, c = (e.registers(value) for value in op.args)
    if kind == "f32":
        _mma_tf32(e, op, a, b, c)
        return
    if kind == "bf16" and e.arch.number < 80:
        raise refuse(op, "f16 before sm_80", kind, "convert to f16, or plan without fragments")
    out: list[str] = []
    for n in range(2):
        right, total = b[2 * n : 2 * n + 2], c[4 * n : 4 * n + 4]
        if e.arch.number >= 80:
            total = _multiply(e, f"m16n8k16.row.col.f32.{kind}.{kind}.f32", a, right, total)
        else:
            for k in range(2):
                total = _multiply(e, "m16n8k8.row.col.f32.f16.f16.f32", a[2 * k : 2 * k + 2], right[k : k + 1], total)
        out += total
    e.bind(op.output, tuple(out))


def _mma_tf32(e: Emitter, op: Op, a: tuple[str, ...], b: tuple[str, ...], c: tuple[str, ...]) -> None:
    if e.arch.number < 80:
        raise refuse(op, "f16 before sm_80", "f32", "convert to f16, or plan without fragments")
    # PTX takes tf32 operands in .b32 registers.
    left, right = ([e.emit("mov.b32", "r", x) for x in registers] for registers in (a, b))
    out: list[str] = []
    for n in range(2):
        total = c[4 * n : 4 * n + 4]
        for k in range(2):
            x, y = left[4 * k : 4 * k + 4], right[4 * n + 2 * k : 4 * n + 2 * k + 2]
            shape = "m16n8k8.row.col.f32.tf32.tf32.f32"
            total = _multiply(e, shape, (x[0], x[2], x[1], x[3]), tuple(y), total)
        out += total
    e.bind(op.output, tuple(out))


def _multiply(e: Emitter, shape: str, a: tuple[str, ...], b: tuple[str, ...], c: tuple[str, ...]) -> tuple[str, ...]:
    result = tuple(e.new("f") for _ in c)
    operands = ", ".join("{" + ", ".join(x) + "}" for x in (result, a, b, c))
    e.line(f"mma.sync.aligned.{shape} {operands};")
    return result


def _fill(e: Emitter, op: Op) -> None:
    count, value = registers_of(op, _type(op.output)), e.registers(op.args[0])[0]
    if count == 4:
        value = join(e, (value, value), 16, 32, "r")
    e.bind(op.output, (value,) * count)


def _pack(e: Emitter, op: Op) -> None:
    _check_components(op, len(op.args))
    parts = [e.registers(value)[0] for value in op.args]
    if registers_of(op, _type(op.output)) == 4:
        parts = [e.joined(low, high) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    e.bind(op.output, tuple(parts))


def _check_components(op: Op, count: int) -> None:
    """Reject components of a second copy, which other devices have."""
    if count > _COMPONENTS:
        raise refuse(op, f"{_COMPONENTS} components", str(count), "trace the kernel for this target")


def _get(e: Emitter, op: Op) -> None:
    registers, component = e.registers(op.args[0]), op.attrs["component"]
    _check_components(op, component + 1)
    if registers_of(op, _type(op.args[0])) == 4:
        e.bind(op.output, (split(e, registers[component // 2], 32, 16)[component % 2],))
    else:
        e.bind(op.output, (registers[component],))


def _set(e: Emitter, op: Op) -> None:
    registers, component = list(e.registers(op.args[0])), op.attrs["component"]
    _check_components(op, component + 1)
    new = e.registers(op.args[1])[0]
    if registers_of(op, _type(op.args[0])) == 4:
        halves = split(e, registers[component // 2], 32, 16)
        halves[component % 2] = new
        registers[component // 2] = e.joined(*halves)
    else:
        registers[component] = new
    e.bind(op.output, tuple(registers))


def _length(e: Emitter, op: Op) -> None:
    registers_of(op, _type(op.args[0]))
    e.bind_integer(op.output, _COMPONENTS)


_IN_REGISTERS = {
    "fragment_mma": _mma, "fragment_fill": _fill, "fragment_pack": _pack, "fragment_length": _length,
    "fragment_get": _get, "fragment_set": _set,
}  # fmt: skip
