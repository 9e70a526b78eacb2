"""Arithmetic, comparison and selection in PTX, one lane at a time.

Accuracy of f32: add, sub, mul, fma and sqrt round correctly; div is within 2 ulp, rcp 1, rsqrt 2, exp2 2 (results below
2**-126 become 0), log2 within 2**-22 (absolute between 0.5 and 2, relative elsewhere), sin and cos 2 ulp for
|x| <= 1e6. f16 is added and multiplied natively, in vectors two lanes at a time; everything else in f16 and all of bf16
is computed in f32 and rounded. f64 has no exp2, log2, sin and cos.
"""

from __future__ import annotations

from aule.ir.constants import COMPARE, computed, wrap
from aule.ir.kernel import Op
from aule.ir.types import SCALARS, Scalar, element, f32, lanes_of
from aule.render._circular import COS, HALF_PI, SIN
from aule.render._ptx_convert import extend_byte, from_f32, integer_type, split, to_f32
from aule.render._ptx_emitter import Emitter, f32_text, move_type, refuse, register_class

_PAIRED = {"add", "sub", "mul", "fma"}
"""Operations with an instruction for two f16."""
_EXTREMES = {"min", "max"}
"""Operations with an instruction for two f16 or two bf16, from sm_80 on."""
WORD_PAIRS = {"add", "min", "max"}
"""Operations with an instruction for two u16, from sm_90 on."""
_LOGIC = {"or": "0xEA", "xor": "0x6A"}
"""lop3 lookup tables of ``(a & b) | c`` and ``(a & b) ^ c``."""
_OVERFLOWING = {"add", "sub", "mul", "div", "neg", "abs", "not", "shl"}
"""Operations whose 16-bit result can leave the range of 8-bit operands."""


def _instructions() -> dict[tuple[str, str], str]:
    """Table of operations that are one instruction, by opcode and element type."""
    table = {}
    for elem in SCALARS.values():
        if elem.is_int:
            kind, bits = integer_type(elem), max(elem.bits, 16)
            for opcode in ("div", "rem", "min", "max"):
                table[opcode, elem.name] = f"{opcode}.{kind}"
            for opcode in ("add", "sub", "neg"):
                table[opcode, elem.name] = f"{opcode}.s{bits}"
            for opcode in ("and", "or", "xor", "not"):
                table[opcode, elem.name] = f"{opcode}.b{bits}"
            table["mul", elem.name] = f"mul.lo.{kind}"
            if elem.is_signed:
                table["abs", elem.name] = f"abs.s{bits}"
            for opcode in COMPARE:
                table[opcode, elem.name] = f"setp.{opcode}.{kind}"
        elif elem.is_float and elem.name != "bf16":
            for opcode in ("add", "sub", "mul", "fma"):
                table[opcode, elem.name] = f"{opcode}.rn.{elem}"
            for opcode in COMPARE:  # ne is true if unordered, the others are false
                table[opcode, elem.name] = f"setp.{'neu' if opcode == 'ne' else opcode}.{elem}"
        if elem.name in ("f32", "f64"):
            for opcode in ("neg", "abs", "min", "max"):
                table[opcode, elem.name] = f"{opcode}.{elem}"
            table["floor", elem.name] = f"cvt.rmi.{elem}.{elem}"
            table["sqrt", elem.name] = f"sqrt.rn.{elem}"
    table["mulhi", "u32"] = "mul.wide.u32"
    for opcode in ("and", "or", "xor", "not"):
        table[opcode, "bool"] = f"{opcode}.pred"
    table |= {
        # Without ftz, ptxas adds scaling for inputs below -126, for results that are negligible in a softmax.
        ("exp2", "f32"): "ex2.approx.ftz.f32",
        ("log2", "f32"): "lg2.approx.f32",
        ("rcp", "f32"): "rcp.approx.f32",
        ("rsqrt", "f32"): "rsqrt.approx.f32",
        ("div", "f32"): "div.full.f32",
        ("div", "f64"): "div.rn.f64",
        ("rcp", "f64"): "rcp.rn.f64",
    }
    return table


_INSTRUCTIONS = _instructions()


def lanewise(e: Emitter, op: Op) -> None:
    """Emit a unary, binary, compare or fused operation: one instruction per lane, or per pair of 16-bit lanes."""
    elem = element(op.args[0].type)
    if elem.is_int and lanes_of(op.output.type) == 1 and _fold(e, op, elem):
        return
    if op.opcode == "small":
        e.bind(op.output, e.registers(op.args[0]))
        return
    paired = _pair_instruction(e, op.opcode, elem.name) if lanes_of(op.output.type) > 1 else None
    if paired is not None:
        e.bind(op.output, _in_pairs(e, paired, [e.registers(x) for x in op.args]))
        return
    instruction = _INSTRUCTIONS.get((op.opcode, elem.name))
    if instruction is not None and elem.bits != 8:
        cls = "p" if op.opcode in COMPARE else register_class(elem)
        lanes = zip(*[e.operands(x) for x in op.args], strict=True)
        if elem.is_int:  # kernels trace equal indices many times; sharing them also shares their addresses
            e.bind(op.output, tuple([_shared(e, op.opcode, instruction, cls, *lane) for lane in lanes]))
        else:
            e.bind(op.output, tuple([e.emit(instruction, cls, *lane) for lane in lanes]))
        return
    lanes = zip(*[e.operands(x) for x in op.args], strict=True)
    e.bind(op.output, tuple([compute(e, op, elem, *lane) for lane in lanes]))


def _pair_instruction(e: Emitter, opcode: str, elem: str) -> str | None:
    """The instruction for two 16-bit lanes at a time; None if there is none."""
    if elem == "f16" and opcode in _PAIRED:
        return f"{opcode}.rn.f16x2"
    if elem in ("f16", "bf16") and opcode in _EXTREMES and e.arch.number >= 80:
        return f"{opcode}.{elem}x2"
    if elem == "u16" and opcode in WORD_PAIRS and e.arch.number >= 90:
        return f"{opcode}.u16x2"
    return None


def _shared(e: Emitter, opcode: str, instruction: str, cls: str, *x: str) -> str:
    """Emit an integer instruction, once per scope for the same operands."""
    if opcode == "mulhi":
        # Kernels that use the high word also use the low one: one instruction gives both; ptxas does not merge two.
        low, high = split(e, e.once(("mul.wide.u32", *x), "mul.wide.u32", "rd", *x), 64, 32)
        e.scopes[-1].setdefault(("mul.lo.u32", *x), low)
        return high
    if opcode in _LOGIC and cls == "r" and x[1][0] != "%":
        masked = e.masked.get(x[0])
        if masked is not None:  # one lop3; ptxas does not merge two operations with different constants
            return e.once((opcode, *masked, x[1]), "lop3.b32", cls, *masked, x[1], _LOGIC[opcode])
    result = e.once((instruction, *x), instruction, cls, *x)
    if opcode == "and" and cls == "r" and x[0][0] == "%" and x[1][0] != "%":
        e.masked[result] = (x[0], x[1])
    return result


def _in_pairs(e: Emitter, instruction: str, operands: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Apply an instruction to 16-bit lanes two by two."""
    out: list[str] = []
    for i in range(0, len(operands[0]), 2):
        out += split(e, e.emit(instruction, "r", *(e.joined(*x[i : i + 2]) for x in operands)), 32, 16)
    return tuple(out)


def compute(e: Emitter, op: Op, elem: Scalar, *x: str) -> str:
    """Emit one lane of an operation, by as many instructions as its type needs."""
    opcode = op.opcode
    if elem.name in ("f16", "bf16"):
        if opcode == "neg":
            return e.emit("xor.b16", "h", x[0], "0x8000")
        if opcode == "abs":
            return e.emit("and.b16", "h", x[0], "0x7FFF")
        if opcode in ("min", "max") and elem.name == "f16" and e.arch.number >= 80:
            return e.emit(f"{opcode}.f16", "h", *x)
        if (opcode, elem.name) not in _INSTRUCTIONS:
            wide = compute(e, op, f32, *[to_f32(e, elem, a) for a in x])
            return wide if opcode in COMPARE else from_f32(e, elem, wide)
    instruction = _INSTRUCTIONS.get((opcode, elem.name))
    if instruction is not None:
        result = e.emit(instruction, "p" if opcode in COMPARE else register_class(elem), *x)
    elif opcode in ("shl", "shr") and elem.is_int:
        result = _shift(e, opcode, elem, *x)
    elif opcode in ("sin", "cos") and elem.name == "f32":
        return _circular(e, x[0], 0 if opcode == "sin" else 1)
    elif opcode == "rsqrt" and elem.name == "f64":
        return e.emit("rcp.rn.f64", "fd", e.emit("sqrt.rn.f64", "fd", x[0]))
    elif opcode == "abs" and elem.is_int:
        return x[0]
    elif opcode in ("eq", "ne") and elem.kind == "bool":
        different = e.emit("xor.pred", "p", *x)
        return different if opcode == "ne" else e.emit("not.pred", "p", different)
    elif elem.name == "f64":
        raise refuse(op, "f32, f16 or bf16", elem, "PTX has no such f64 instruction: cast to f32")
    else:
        raise refuse(op, "a type that the operation is defined for", elem, "see aule.ir.ops")
    return extend_byte(e, elem, result) if elem.bits == 8 and opcode in _OVERFLOWING else result


def _shift(e: Emitter, opcode: str, elem: Scalar, x: str, count: str) -> str:
    if elem.bits != 32 and count[0] == "%":  # PTX shift counts are 32 bits wide
        count = e.emit(f"cvt.u32.u{max(elem.bits, 16)}", "r", count)
    kind = f"b{max(elem.bits, 16)}" if opcode == "shl" else integer_type(elem)
    return e.emit(f"{opcode}.{kind}", register_class(elem), x, count)


# -- sine and cosine ---------------------------------------------------------------------------------------------------


def _circular(e: Emitter, x: str, quarter: int) -> str:
    """sin(x + quarter * pi/2) by a polynomial: sin.approx is inaccurate away from 0."""
    scaled = e.emit("mul.rn.f32", "f", x, f32_text(0.6366197723675814))
    quarters = e.emit("cvt.rni.f32.f32", "f", scaled)
    t = x
    for part in HALF_PI:
        t = e.emit("fma.rn.f32", "f", quarters, f32_text(-part), t)
    square = e.emit("mul.rn.f32", "f", t, t)
    sine = _polynomial(e, square, SIN)
    sine = e.emit("fma.rn.f32", "f", e.emit("mul.rn.f32", "f", t, square), sine, t)
    cosine = e.emit("fma.rn.f32", "f", square, _polynomial(e, square, COS), f32_text(1.0))
    quadrant = e.emit("cvt.rzi.s32.f32", "r", quarters)
    if quarter:
        quadrant = e.emit("add.s32", "r", quadrant, str(quarter))
    odd = e.emit("setp.ne.s32", "p", e.emit("and.b32", "r", quadrant, "1"), "0")
    lower = e.emit("setp.ne.s32", "p", e.emit("and.b32", "r", quadrant, "2"), "0")
    result = e.emit("selp.f32", "f", cosine, sine, odd)
    return e.emit("selp.f32", "f", e.emit("neg.f32", "f", result), result, lower)


def _polynomial(e: Emitter, x: str, coefficients: tuple[float, ...]) -> str:
    result = f32_text(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = e.emit("fma.rn.f32", "f", x, result, f32_text(c))
    return result


# -- selection ---------------------------------------------------------------------------------------------------------


def select(e: Emitter, op: Op) -> None:
    """Emit ``select`` by selp, or by logic for predicates, which selp does not take."""
    condition, yes, no = op.args
    known = e.truth.get(condition)
    if known is not None:
        e.bind_same(op.output, yes if known else no)
        return
    n, elem = lanes_of(op.output.type), element(op.output.type)
    conditions = e.operands(condition)
    if len(conditions) < n:
        conditions = conditions * n
    cls, kind = register_class(elem), move_type(elem)
    lanes = []
    for c, a, b in zip(conditions, e.operands(yes), e.operands(no), strict=True):
        if cls == "p":
            chosen = e.emit("and.pred", "p", c, a)
            other = e.emit("and.pred", "p", e.emit("not.pred", "p", c), b)
            lanes.append(e.emit("or.pred", "p", chosen, other))
        else:
            lanes.append(e.emit(f"selp.{kind}", cls, a, b, c))
    e.bind(op.output, tuple(lanes))


# -- constant folding --------------------------------------------------------------------------------------------------


def _fold(e: Emitter, op: Op, elem: Scalar) -> bool:
    """Fold integer constants (unrolled loops have many), and defer the addition of constants; True if done."""
    if len(op.args) != 2:
        return False
    a, b = e.integer(op.args[0]), e.integer(op.args[1])
    if a is not None and b is not None:
        if op.opcode in COMPARE:
            e.bind_truth(op.output, COMPARE[op.opcode](a, b))
            return True
        folded = computed(op.opcode, a, b, elem)
        if folded is not None:
            e.bind_integer(op.output, folded)
            return True
    return elem.name in ("i32", "i64") and _defer_constant(e, op, elem)


def _defer_constant(e: Emitter, op: Op, elem: Scalar) -> bool:
    """Propagate ``register + constant`` through add, sub, mul and shl without adding; True if done.

    Constants stay non-negative and factors positive: if the index does not wrap, the register alone does not wrap
    either, so the constant may become the immediate offset of a 64-bit address.
    """
    (x, c), (y, d) = e.sum(op.args[0]), e.sum(op.args[1])
    bits, cls = elem.bits, register_class(elem)
    if op.opcode == "add" and x is not None and y is not None:
        offset = c + d
        if offset == 0 or offset >= 2**31:
            return False
        e.bind_sum(op.output, e.once((f"add.s{bits}", x, y), f"add.s{bits}", cls, x, y), offset)
        return True
    if op.opcode == "add" or (op.opcode == "sub" and y is None):
        register, offset = (x if x is not None else y), (c + d if op.opcode == "add" else c - d)
        if register is None or not 0 <= offset < 2**31:
            return False
        e.bind_sum(op.output, register, offset)
        return True
    if op.opcode in ("mul", "shl"):
        if x is None and op.opcode == "mul":
            x, c, y, d = y, d, x, c
        if x is None or y is not None or c == 0 or (op.opcode == "shl" and not 0 <= d < bits):
            return False
        factor = d if op.opcode == "mul" else 1 << d
        if factor <= 0 or c * factor >= 2**31:
            return False
        instruction, by = f"mul.lo.s{bits}", str(wrap(factor, elem))
        e.bind_sum(op.output, e.once((instruction, x, by), instruction, cls, x, by), c * factor)
        return True
    return False
