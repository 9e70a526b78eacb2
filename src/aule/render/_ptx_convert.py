"""Casts and bitcasts in PTX."""

from __future__ import annotations

from collections.abc import Sequence

from aule.ir.constants import float_bits
from aule.ir.kernel import Op
from aule.ir.types import Scalar, element, f32, lanes_of, u32
from aule.render._ptx_emitter import Emitter, refuse, register_class


def integer_type(elem: Scalar) -> str:
    """The type that arithmetic uses for an integer; bytes are computed in 16 bits."""
    return f"{'s' if elem.is_signed else 'u'}{max(elem.bits, 16)}"


def extend_byte(e: Emitter, elem: Scalar, register: str) -> str:
    """The low byte of a 16-bit register, sign- or zero-extended: the form in which registers hold 8-bit integers."""
    return e.emit("cvt.s16.s8" if elem.is_signed else "cvt.u16.u8", "h", register)


def to_f32(e: Emitter, elem: Scalar, x: str) -> str:
    """A 16-bit float as f32."""
    if elem.name == "f16":
        return e.emit("cvt.f32.f16", "f", x)
    return e.emit("mov.b32", "f", f"{{{e.half(0)}, {x}}}")


def from_f32(e: Emitter, elem: Scalar, x: str) -> str:
    """An f32 rounded to a 16-bit float."""
    if elem.name == "f16":
        return e.emit("cvt.rn.f16.f32", "h", x)
    if e.arch.number >= 80:
        return e.emit("cvt.rn.bf16.f32", "h", x)
    # No such conversion before sm_80: round to nearest even in integers, and keep NaN.
    bits = e.emit("mov.b32", "r", x)
    odd = e.emit("bfe.u32", "r", bits, "16", "1")
    rounded = e.emit("add.s32", "r", bits, e.emit("add.s32", "r", odd, "32767"))
    low, high = e.new("h"), e.new("h")
    e.line(f"mov.b32 {{{low}, {high}}}, {rounded};")
    nan = e.emit("setp.nan.f32", "p", x, x)
    return e.emit("selp.b16", "h", "0x7FFF", high, nan)


def cast_lanes(e: Emitter, source: Scalar, target: Scalar, lanes: Sequence[str]) -> tuple[str, ...]:
    """Convert every lane; from sm_80 on, pairs of f32 are converted to 16-bit floats by one instruction."""
    if source.name == "f32" and target.bits == 16 and target.is_float and len(lanes) > 1 and e.arch.number >= 80:
        halves: list[str] = []
        for low, high in zip(lanes[::2], lanes[1::2], strict=True):
            pair = e.emit(f"cvt.rn.{target.name}x2.f32", "r", high, low)  # the first source is the upper half
            halves += split(e, pair, 32, 16)
        return tuple(halves)
    return tuple(_cast(e, source, target, x) for x in lanes)


def _cast(e: Emitter, source: Scalar, target: Scalar, x: str) -> str:
    if source.kind == "bool":
        return _cast_bool(e, target, x)
    if source.is_int:
        return _cast_int(e, source, target, x) if target.is_int else _int_to_float(e, source, target, x)
    if source.name == "bf16":
        x = to_f32(e, source, x)
        return x if target.name == "f32" else _cast(e, f32, target, x)
    if target.is_int:
        # Through 32 bits, so that bytes and shorts wrap instead of saturating.
        wide = f"{'s' if target.is_signed else 'u'}{max(target.bits, 32)}"
        result = e.emit(f"cvt.rzi.{wide}.{source.name}", "rd" if target.bits == 64 else "r", x)
        return result if target.bits >= 32 else _cast_int(e, u32, target, result)
    if target.name == "bf16":
        return from_f32(e, target, x if source.name == "f32" else _cast(e, source, f32, x))
    rounding = ".rn" if target.bits < source.bits else ""
    return e.emit(f"cvt{rounding}.{target.name}.{source.name}", register_class(target), x)


def _cast_bool(e: Emitter, target: Scalar, x: str) -> str:
    if target.is_int:
        return e.emit(f"selp.b{max(target.bits, 16)}", register_class(target), "1", "0", x)
    digits = target.bits // 4
    prefix = {16: "0x", 32: "0f", 64: "0d"}[target.bits]
    one = f"{prefix}{float_bits(1.0, target):0{digits}X}"
    kind = {16: "b16", 32: "f32", 64: "f64"}[target.bits]
    return e.emit(f"selp.{kind}", register_class(target), one, prefix + "0" * digits, x)


def _cast_int(e: Emitter, source: Scalar, target: Scalar, x: str) -> str:
    from_bits, to_bits = max(source.bits, 16), max(target.bits, 16)
    if to_bits > from_bits:
        sign = "s" if source.is_signed else "u"
        return e.emit(f"cvt.{sign}{to_bits}.{sign}{from_bits}", register_class(target), x)
    if to_bits < from_bits:
        x = e.emit(f"cvt.u{to_bits}.u{from_bits}", register_class(target), x)
    if target.bits == 8 and source != target:
        return extend_byte(e, target, x)
    return x


def _int_to_float(e: Emitter, source: Scalar, target: Scalar, x: str) -> str:
    kind = integer_type(source)
    if target.name == "bf16":  # rounded twice above 2**24: there is no single instruction before sm_90
        return from_f32(e, target, e.emit(f"cvt.rn.f32.{kind}", "f", x))
    return e.emit(f"cvt.rn.{target.name}.{kind}", register_class(target), x)


def split(e: Emitter, x: str, from_bits: int, to_bits: int) -> list[str]:
    """Split a register into narrower ones, the lowest first; bytes are zero-extended."""
    if to_bits == 8:
        halves = [x] if from_bits == 16 else split(e, x, from_bits, 16)
        out = []
        for half in halves:
            out += [e.emit("and.b16", "h", half, "0x00FF"), e.emit("shr.u16", "h", half, "8")]
        return out
    parts = [e.new("h" if to_bits == 16 else "r") for _ in range(from_bits // to_bits)]
    e.line(f"mov.b{from_bits} {{{', '.join(parts)}}}, {x};")
    if to_bits == 16 and from_bits == 32:
        e.pairs[parts[0], parts[1]] = x
    return parts


def join(e: Emitter, parts: Sequence[str], from_bits: int, to_bits: int, result_class: str) -> str:
    """Join registers: the inverse of `split`. Bytes may be sign- or zero-extended."""
    if from_bits == 8:
        shorts = []
        for low, high in zip(parts[::2], parts[1::2], strict=True):
            masked = e.emit("and.b16", "h", low, "0x00FF")
            shorts.append(e.emit("or.b16", "h", masked, e.emit("shl.b16", "h", high, "8")))
        return shorts[0] if to_bits == 16 else join(e, shorts, 16, to_bits, result_class)
    return e.emit(f"mov.b{to_bits}", result_class, f"{{{', '.join(parts)}}}")


def e4m3_halves(e: Emitter, op: Op) -> None:
    """Emit ``e4m3_halves``, converting two numbers at a time."""
    if e.arch.number < 90:
        raise refuse(op, "sm_90 or newer", e.arch.name, "shift the bits into place")
    halves = split(e, e.registers(op.args[0])[0], 32, 16)
    pairs = [e.emit("cvt.rn.f16x2.e4m3x2", "r", half) for half in halves]
    e.bind(op.output, tuple(part for pair in pairs for part in split(e, pair, 32, 16)))


def bitcast(e: Emitter, op: Op) -> None:
    """Emit a bitcast; lanes keep their order, the lowest first, as in memory."""
    source, target = element(op.args[0].type), element(op.output.type)
    if "bool" in (source.kind, target.kind):
        raise refuse(op, "numbers of the same size", f"{source} and {target}", "compare or select instead")
    lanes = e.registers(op.args[0])
    if len(lanes) * source.bits != lanes_of(op.output.type) * target.bits:
        raise refuse(op, "types of the same size", f"{op.args[0].type} and {op.output.type}", "check the lanes")
    cls = register_class(target)
    if source.bits == target.bits:
        if target.bits == 8:
            e.bind(op.output, tuple(extend_byte(e, target, x) for x in lanes))
        elif cls == register_class(source):
            e.bind(op.output, lanes)
        else:
            e.bind(op.output, tuple(e.emit(f"mov.b{target.bits}", cls, x) for x in lanes))
    elif source.bits < target.bits:
        n = target.bits // source.bits
        groups = [lanes[i : i + n] for i in range(0, len(lanes), n)]
        e.bind(op.output, tuple(join(e, g, source.bits, target.bits, cls) for g in groups))
    else:
        parts = [part for x in lanes for part in split(e, x, source.bits, target.bits)]
        if target.name == "i8":
            parts = [extend_byte(e, target, x) for x in parts]
        elif cls == "f":
            parts = [e.emit("mov.b32", "f", x) for x in parts]
        e.bind(op.output, tuple(parts))
