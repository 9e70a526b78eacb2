"""Arithmetic and conversions in LLVM IR, for scalars and vectors alike.

NaN and infinities are preserved: the only fast-math flag allows LLVM to fuse a product with a sum (``contract``).
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir.builder import Builder
from aule.ir.kernel import Op, Value
from aule.ir.ops import OPS
from aule.ir.types import Scalar, Vector, element, f16, f32, lanes_of, u16, u64, vector_type
from aule.render._llvm_emitter import Emitter, constant, llvm_type, refuse, suffix
from aule.render._llvm_exp2 import AVX512, condition, exp2

_FLOAT_BINARY = {"add": "fadd contract", "sub": "fsub contract", "mul": "fmul contract", "div": "fdiv"}
_INT_BINARY = {
    "add": ("add", "add"), "sub": ("sub", "sub"), "mul": ("mul", "mul"), "div": ("sdiv", "udiv"),
    "rem": ("srem", "urem"), "and": ("and", "and"), "or": ("or", "or"), "xor": ("xor", "xor"), "shl": ("shl", "shl"),
    "shr": ("ashr", "lshr"),
}  # fmt: skip
"""Instructions for signed and unsigned operands."""
_INTRINSICS = {"log2": "log2", "sqrt": "sqrt", "floor": "floor", "sin": "sin", "cos": "cos", "abs": "fabs"}
_FLOAT_COMPARE = {"lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "eq": "oeq", "ne": "une"}

Shape = Scalar | Vector


@dataclass(frozen=True)
class Processor:
    """The processor features that arithmetic depends on."""

    arch: str
    features: frozenset[str]

    @property
    def halves(self) -> bool:
        """True if instructions convert fp16. Without them LLVM would call functions that a JIT does not have."""
        return "f16c" in self.features or self.arch == "aarch64"

    @property
    def fma(self) -> str:
        """The intrinsic for a*b+c: ``fma`` would be a slow function call without the instruction."""
        return "fma" if "fma" in self.features or self.arch == "aarch64" else "fmuladd"

    @property
    def bfloats(self) -> bool:
        """True if instructions round to bf16 and multiply pairs of bf16 (AVX512_BF16)."""
        return self.features.issuperset((*AVX512, "avx512bf16"))

    @property
    def avx512(self) -> bool:
        """True if the processor has the AVX-512 features used by `exp2`."""
        return self.features.issuperset(AVX512)


def arithmetic(e: Emitter, op: Op, processor: Processor) -> None:
    """Emit a unary or binary operation, a comparison or fma."""
    type_, texts = _shape(op.args[0]), [e.operand(a) for a in op.args]
    elem = element(type_)
    if elem == f16:
        # Computed in f32: it has more than twice the precision, so rounding twice equals rounding once.
        wide = vector_type(f32, lanes_of(type_))
        texts = [cast(e, text, type_, f32, processor) for text in texts]
        result = _compute(e, op.opcode, texts, wide, processor)
        if OPS[op.opcode].category != "compare":
            result = cast(e, result, wide, f16, processor)
    else:
        result = _compute(e, op.opcode, texts, type_, processor)
    e.bind(op.output, result)


def _compute(e: Emitter, opcode: str, args: list[str], type_: Shape, processor: Processor) -> str:
    if OPS[opcode].category == "compare":
        return _compare(e, opcode, args, type_)
    if element(type_).is_float:
        return _float(e, opcode, args, type_, processor)
    return _integer(e, opcode, args, type_)


def _compare(e: Emitter, opcode: str, args: list[str], type_: Shape) -> str:
    elem = element(type_)
    operands = f"{llvm_type(type_)} {args[0]}, {args[1]}"
    if elem.is_float:
        return e.emit(f"fcmp {_FLOAT_COMPARE[opcode]} {operands}")
    sign = "" if opcode in ("eq", "ne") else "s" if elem.is_signed else "u"
    return e.emit(f"icmp {sign}{opcode} {operands}")


def _float(e: Emitter, opcode: str, args: list[str], type_: Shape, processor: Processor) -> str:
    t = llvm_type(type_)
    if opcode in _FLOAT_BINARY:
        return e.emit(f"{_FLOAT_BINARY[opcode]} {t} {args[0]}, {args[1]}")
    if opcode in _INTRINSICS:
        return _call(e, _INTRINSICS[opcode], type_, args)
    match opcode:
        case "small":
            return args[0]
        case "neg":
            return e.emit(f"fneg {t} {args[0]}")
        case "fma":
            e.needs.update(processor.features & {"fma"})
            return _call(e, processor.fma, type_, args)
        case "exp2":
            e.needs.update(processor.features & {"fma"})
            return exp2(e, args[0], type_, processor.fma, processor.avx512)
        case "rcp":
            return e.emit(f"fdiv {t} {constant(1.0, type_)}, {args[0]}")
        case "rsqrt":
            return e.emit(f"fdiv {t} {constant(1.0, type_)}, {_call(e, 'sqrt', type_, args)}")
        case "min" | "max":
            return _extreme(e, opcode, args, type_, processor)
    raise AssertionError(opcode)


def _extreme(e: Emitter, opcode: str, args: list[str], type_: Shape, processor: Processor) -> str:
    """Minimum or maximum in one instruction; returns a NaN in the first operand."""
    if processor.arch == "aarch64":
        return _call(e, f"{opcode}imum", type_, args)
    a, b = args
    t = llvm_type(type_)
    other = e.emit(f"fcmp {'olt' if opcode == 'min' else 'ogt'} {t} {b}, {a}")
    return e.emit(f"select {condition(type_)} {other}, {t} {b}, {t} {a}")


def _integer(e: Emitter, opcode: str, args: list[str], type_: Shape) -> str:
    t, elem = llvm_type(type_), element(type_)
    if opcode in _INT_BINARY:
        return e.emit(f"{_INT_BINARY[opcode][not elem.is_signed]} {t} {args[0]}, {args[1]}")
    match opcode:
        case "neg":
            return e.emit(f"sub {t} {constant(0, type_)}, {args[0]}")
        case "not":
            return e.emit(f"xor {t} {args[0]}, {constant(True if elem.kind == 'bool' else -1, type_)}")
        case "abs":
            if not elem.is_signed:
                return args[0]
            return e.emit(f"call {t} @llvm.abs.{suffix(type_)}({t} {args[0]}, i1 false)")
        case "mulhi":
            words = vector_type(u64, lanes_of(type_))
            wide = llvm_type(words)
            a, b = (e.emit(f"zext {t} {x} to {wide}") for x in args)
            high = e.emit(f"lshr {wide} {e.emit(f'mul {wide} {a}, {b}')}, {constant(32, words)}")
            return e.emit(f"trunc {wide} {high} to {t}")
        case "min" | "max":
            return _call(e, f"{'s' if elem.is_signed else 'u'}{opcode}", type_, args)
    raise AssertionError(opcode)


def _call(e: Emitter, name: str, type_: Shape, args: list[str]) -> str:
    t = llvm_type(type_)
    return e.emit(f"call {t} @llvm.{name}.{suffix(type_)}({', '.join(f'{t} {a}' for a in args)})")


def dot_pairs(e: Emitter, op: Op, processor: Processor) -> None:
    """Emit the AVX512_BF16 instruction, in vectors of any of its lengths."""
    lanes = lanes_of(op.output.type)
    if not processor.bfloats or lanes not in (4, 8, 16):
        got = f"{lanes} lanes" if processor.bfloats else f"a target for {processor.arch} without them"
        raise refuse(op, "vectors of 4, 8 or 16 lanes and AVX512_BF16 instructions", got, "multiply in f32")
    e.needs.update((*AVX512, "avx512bf16"))
    t, pairs = llvm_type(op.output.type), f"<{2 * lanes} x bfloat>"
    left, right = (f"{pairs} {e.emit(f'bitcast {e.typed(x)} to {pairs}')}" for x in op.args[:2])
    intrinsic = f"@llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    e.bind(op.output, e.emit(f"call {t} {intrinsic}({e.typed(op.args[2])}, {left}, {right})"))


def float_to_bfloat(b: Builder, value: Value) -> Value:
    """f32 to bf16 bits in a u16 of the same shape by instructions: nearest, ties to even; subnormals become zero."""
    source, bits = llvm_type(value.type), vector_type(u16, lanes_of(value.type))
    bfloat = source.replace("float", "bfloat")
    code = f"{{0}}.b = fptrunc {source} {{1}} to {bfloat}\n  {{0}} = bitcast {bfloat} {{0}}.b to {llvm_type(bits)}"
    result = b.intrinsic("llvm", code, [value], bits)
    assert result is not None
    return result


def select(e: Emitter, op: Op) -> None:
    e.bind(op.output, e.emit(f"select {', '.join(e.typed(a) for a in op.args)}"))


def cast_op(e: Emitter, op: Op, processor: Processor) -> None:
    e.bind(op.output, cast(e, e.operand(op.args[0]), _shape(op.args[0]), element(op.output.type), processor))


def cast(e: Emitter, text: str, type_: Shape, target: Scalar, processor: Processor) -> str:
    """Convert lane by lane.

    fp16 has instructions to and from f32 only. Other types are rounded twice, since a function call would be slow.
    """
    source = element(type_)
    if f16 in (source, target):
        e.needs.update(processor.features & {"f16c"})
        if f32 not in (source, target):
            text = cast(e, text, type_, f32, processor)
            type_, source = vector_type(f32, lanes_of(type_)), f32
    if source.is_float and target.is_float:
        name = "fpext" if source.bits < target.bits else "fptrunc"
    elif source.is_float:
        name = "fptosi" if target.is_signed else "fptoui"
    elif target.is_float:
        name = "sitofp" if source.is_signed else "uitofp"
    elif source.bits < target.bits:
        name = "sext" if source.is_signed else "zext"
    else:
        name = "trunc"
    if source.bits == target.bits and source.is_float == target.is_float:
        return text  # LLVM's integers have no sign
    return e.emit(f"{name} {llvm_type(type_)} {text} to {llvm_type(vector_type(target, lanes_of(type_)))}")


def bitcast(e: Emitter, op: Op) -> None:
    source, target = llvm_type(op.args[0].type), llvm_type(op.output.type)
    text = e.operand(op.args[0])
    e.bind(op.output, text if source == target else e.emit(f"bitcast {source} {text} to {target}"))


def _shape(value: Value) -> Shape:
    assert isinstance(value.type, Scalar | Vector)
    return value.type
