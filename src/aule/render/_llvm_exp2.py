"""2**x by a polynomial. libm has no vector version and would dominate the time of a softmax.

x is split into an integer and a fraction; the fraction goes through a polynomial, and the result is scaled by a power
of two. There is one function per type, which LLVM inlines.

The coefficients are minimax fits (Remez exchange on the error in ulp, with the constant term fixed at 1, so that
integer powers are exact). Those of f32 were then varied by a few units in the last place to minimise the total error,
including rounding: over every f32 in [-126, -2**-26] it is 1.52 ulp for ``floor`` and 0.83 for ``nearest`` (1.10
without fma); with degree 5 it would be 2.04 and 1.95. The fits for f64 are 0.04 ulp off before rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir.types import Scalar, Vector, element, f32, f64, i32, i64, lanes_of
from aule.render._llvm_emitter import Emitter, constant, llvm_type, suffix

AVX512 = ("avx512f", "avx512dq", "avx512vl")
"""Features for single instructions that scale by a power of two, in vectors of any length."""
_FLOOR = 9
"""Immediate of VREDUCE: subtract the floor, suppress exceptions."""
_CURRENT = 4
"""Rounding mode of AVX-512 instructions: the thread's current one."""


@dataclass(frozen=True)
class _Float:
    """Constants of a floating-point type."""

    bits: Scalar
    mantissa: int
    low: float
    """At and below this x the result is 0."""
    high: float
    """At and above this x the result is infinite."""
    floor: tuple[float, ...]
    """Coefficients for a fraction in [0, 1], lowest first."""
    nearest: tuple[float, ...]
    """Coefficients for a fraction in [-0.5, 0.5], lowest first."""
    letters: str
    """Suffix of x86 intrinsics."""


_FLOATS = {
    f32: _Float(
        i32, 23, -150.0, 128.0,
        (1.0, 0.693147, 0.24022992, 0.055482455, 0.009681186, 0.0012414926, 0.00021794626),
        (1.0, 0.69314724, 0.24022649, 0.05550319, 0.009618468, 0.00133989, 0.00015353304),
        "ps",
    ),
    f64: _Float(
        i64, 52, -1076.0, 1024.0,
        (1.0, 0.6931471805599458, 0.24022650695906728, 0.05550410866554433, 0.009618129099983575,
         0.0013333558610462736, 0.00015403512842551202, 1.5253165388812435e-05, 1.3208481147104154e-06,
         1.0252372155340091e-07, 6.563060013046103e-09, 6.257020918257691e-10),
        (1.0, 0.6931471805599453, 0.2402265069591013, 0.055504108664820084, 0.00961812910759412,
         0.0013333558146774612, 0.0001540353045711196, 1.5252733493135923e-05, 1.321543528237656e-06,
         1.0178199568393278e-07, 7.073783236522761e-09, 4.434771805086885e-10),
        "pd",
    ),
}  # fmt: skip


def exp2(e: Emitter, x: str, type_: Scalar | Vector, fma: str, avx512: bool) -> str:
    """Call the function for a type (f32 or f64), and add it to the helpers if it is missing."""
    name = f"exp2.{element(type_)}" + (f"x{lanes_of(type_)}" if isinstance(type_, Vector) else "")
    if avx512:
        e.needs.update(AVX512)
    if name not in e.helpers:
        body = Emitter()
        result = _avx512(body, type_, fma) if avx512 else _portable(body, type_, fma)
        t = llvm_type(type_)
        e.helpers[name] = [
            f"define internal {t} @{name}({t} %x) #1 {{", *body.lines, f"  ret {t} {result}", "}"
        ]  # fmt: skip
    return e.emit(f"call {llvm_type(type_)} @{name}({llvm_type(type_)} {x})")


def _avx512(e: Emitter, type_: Scalar | Vector, fma: str) -> str:
    """2**x with AVX-512.

    VREDUCE gives x - floor(x), and 0 for infinities; VSCALEF takes the floor of x itself and handles 0, infinities, NaN
    and subnormal results. No clamping is needed.
    """
    elem, lanes = element(type_), lanes_of(type_)
    number = _FLOATS[elem]
    least, most = 128 // elem.bits, 512 // elem.bits
    width = min(max(lanes, least), most)
    piece = Vector(elem, width)
    results = []
    for start in range(0, lanes, width):
        x = _slice(e, "%x", type_, piece, start)
        fraction = _x86(e, "reduce", number, piece, x, f"i32 {_FLOOR}")
        scaled = _polynomial(e, fraction, piece, number.floor, fma)
        results.append(_x86(e, "scalef", number, piece, scaled, f"{llvm_type(piece)} {x}"))
    return _joined(e, results, piece, type_)


def _x86(e: Emitter, name: str, number: _Float, type_: Vector, x: str, second: str) -> str:
    t, bits = llvm_type(type_), type_.bytes * 8
    mask = "i16 -1" if type_.lanes == 16 else "i8 -1"
    rounding = f", i32 {_CURRENT}" if bits == 512 else ""
    intrinsic = f"@llvm.x86.avx512.mask.{name}.{number.letters}.{bits}"
    return e.emit(f"call {t} {intrinsic}({t} {x}, {second}, {t} zeroinitializer, {mask}{rounding})")


def _slice(e: Emitter, x: str, type_: Scalar | Vector, piece: Vector, start: int) -> str:
    """Lanes from ``start`` on as a vector of a width that the instructions support."""
    if type_ == piece:
        return x
    if isinstance(type_, Scalar):
        return e.emit(f"insertelement {llvm_type(piece)} zeroinitializer, {llvm_type(type_)} {x}, i32 0")
    t = llvm_type(type_)
    lanes = ", ".join(f"i32 {start + i if i < type_.lanes else type_.lanes}" for i in range(piece.lanes))
    return e.emit(f"shufflevector {t} {x}, {t} zeroinitializer, <{piece.lanes} x i32> <{lanes}>")


def _joined(e: Emitter, parts: list[str], piece: Vector, type_: Scalar | Vector) -> str:
    """Join pieces: the inverse of `_slice`."""
    t = llvm_type(piece)
    if type_ == piece:
        return parts[0]
    if isinstance(type_, Scalar):
        return e.emit(f"extractelement {t} {parts[0]}, i32 0")
    lanes = ", ".join(f"i32 {i}" for i in range(type_.lanes))
    other = f"{t} {parts[1]}" if len(parts) == 2 else f"{t} poison"
    return e.emit(f"shufflevector {t} {parts[0]}, {other}, <{type_.lanes} x i32> <{lanes}>")


def _portable(e: Emitter, type_: Scalar | Vector, fma: str) -> str:
    """2**x with portable instructions.

    Adding 1.5 * 2**mantissa rounds x to an integer n and leaves it in the low bits. The power 2**n is applied in two
    halves, so that neither overflows and a subnormal result is rounded once. NaN passes both clamps and stays NaN in
    the products.
    """
    elem = element(type_)
    number = _FLOATS[elem]
    t = llvm_type(type_)
    bits = Vector(number.bits, type_.lanes) if isinstance(type_, Vector) else number.bits
    b = llvm_type(bits)
    low, high = constant(number.low, type_), constant(number.high, type_)
    magic = constant(1.5 * 2.0**number.mantissa, type_)
    below = e.emit(f"fcmp ogt {t} {low}, %x")
    bounded = e.emit(f"select {condition(type_)} {below}, {t} {low}, {t} %x")
    above = e.emit(f"fcmp olt {t} {high}, {bounded}")
    x = e.emit(f"select {condition(type_)} {above}, {t} {high}, {t} {bounded}")
    shifted = e.emit(f"fadd {t} {x}, {magic}")
    integer = e.emit(f"fsub {t} {shifted}, {magic}")
    fraction = e.emit(f"fsub {t} {x}, {integer}")
    result = _polynomial(e, fraction, type_, number.nearest, fma)
    n = e.emit(f"bitcast {t} {shifted} to {b}")
    exponent = e.emit(f"shl {b} {n}, {constant(number.mantissa, bits)}")
    halved = e.emit(f"ashr {b} {exponent}, {constant(1, bits)}")
    first = e.emit(f"and {b} {halved}, {constant(-1 << number.mantissa, bits)}")
    second = e.emit(f"sub {b} {exponent}, {first}")
    one = ((1 << (elem.bits - 2 - number.mantissa)) - 1) << number.mantissa
    for half in (first, second):
        biased = e.emit(f"add {b} {half}, {constant(one, bits)}")
        power = e.emit(f"bitcast {b} {biased} to {t}")
        result = e.emit(f"fmul {t} {result}, {power}")
    return result


def _polynomial(e: Emitter, r: str, type_: Scalar | Vector, coefficients: tuple[float, ...], fma: str) -> str:
    """Horner's rule: fewest instructions; other vectors of a row hide its latency."""
    t = llvm_type(type_)
    result = constant(coefficients[-1], type_)
    for c in coefficients[-2::-1]:
        result = e.emit(f"call {t} @llvm.{fma}.{suffix(type_)}({t} {result}, {t} {r}, {t} {constant(c, type_)})")
    return result


def condition(type_: Scalar | Vector) -> str:
    """The result type of comparing two values of a type."""
    return f"<{type_.lanes} x i1>" if isinstance(type_, Vector) else "i1"
