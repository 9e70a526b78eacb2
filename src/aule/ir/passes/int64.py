"""64-bit integers as pairs of u32 words, low word first, for languages without them.

Arithmetic works on single words or lane by lane on vectors of words. An index keeps only its low word: such languages
can only address buffers below 4 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast as typed

from aule.artifact import Param
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.ops import OPS
from aule.ir.passes.multiply_high import high_product
from aule.ir.passes.rewrite import Lowered, Rewriter
from aule.ir.types import Pointer, Ref, Scalar, Type, Vector, element, f32, i32, i64, lanes_of, u32, u64, vector_type

Pair = tuple[Value, Value]
"""Low word, high word."""
_WIDE = (i64, u64)


def int64(kernel: KernelIR) -> KernelIR:
    """Replace i64 and u64, in registers, memory and parameters, by pairs of u32.

    A scalar parameter ``n`` becomes ``n_low`` and ``n_high``. Padding of the parameter block becomes a parameter too,
    so that the block's bytes do not change.
    """
    return _Int64(kernel).run()


class _Int64(Rewriter):
    def __init__(self, kernel: KernelIR) -> None:
        super().__init__(kernel)
        self._offset = 0
        self._binary: dict[str, Callable[[Op, Pair, Pair], Lowered]] = {
            "add": lambda op, a, b: self._sum(a, b), "sub": lambda op, a, b: self._difference(a, b),
            "mul": self._mul, "div": lambda op, a, b: self._divided(op, a, b)[0],
            "rem": lambda op, a, b: self._divided(op, a, b)[1], "shl": self._shl, "shr": self._shr,
            "min": self._extreme, "max": self._extreme,
        }  # fmt: skip
        self.hooks = {opcode: self._two for opcode, info in OPS.items() if info.category in ("binary", "compare")}
        self.hooks |= {
            "const": self._const, "neg": self._one, "abs": self._one, "not": self._one, "select": self._select,
            "cast": self._cast, "bitcast": self._bitcast, "make_vector": self._each, "splat": self._each,
            "extract": self._each, "permute": self._each, "load": self._load, "store": self._store,
            "atomic": self._atomic, "var": self._var, "get": self._get, "set": self._set, "loop": self._loop,
        }  # fmt: skip

    # -- parameters and memory -------------------------------------------------------------------------------------

    def parameter(self, param: Param) -> None:
        old = self.kernel.values[param.name]
        if isinstance(old.type, Pointer):
            super().parameter(param)
            return
        elem = element(old.type)
        if elem not in _WIDE:
            super().parameter(param)
            self._offset += elem.bytes
            return
        if self._offset % 8:
            self.b.scalar(f"{param.name}_padding", u32)
            self._offset += 4
        self.values[old] = self.b.scalar(f"{param.name}_low", u32), self.b.scalar(f"{param.name}_high", u32)
        self._offset += 8

    def memory(self, pointer: Pointer) -> Pointer:
        if pointer.elem not in _WIDE:
            return pointer
        return Pointer(u32, pointer.space, None if pointer.length is None else 2 * pointer.length)

    def value(self, old: Value) -> Value:
        # Operations copied by the generic clone use 64-bit integers only as an index.
        new = self.values[old]
        return new[0] if isinstance(new, tuple) and old.type == i64 else super().value(old)

    def _pair(self, old: Value) -> Pair:
        return typed(Pair, self.values[old])

    def _words(self, old: Value) -> list[Value]:
        """The words of all lanes, as in memory."""
        low, high = (self.b.unpack(word) for word in self._pair(old))
        return [word for pair in zip(low, high, strict=True) for word in pair]

    def _load(self, op: Op) -> Lowered | None:
        if element(op.output.type) not in _WIDE:
            return self.clone(op)
        count = 2 * lanes_of(op.output.type)
        pointer, index = self.value(op.args[0]), self.value(op.args[1]) * 2
        step, align = _pieces(count, op.attrs["align"])
        loads = [self.b.load(pointer, index + i, step, align) for i in range(0, count, step)]
        words = [word for load in loads for word in self.b.unpack(load)]
        return self.b.vector(words[0::2]), self.b.vector(words[1::2])

    def _store(self, op: Op) -> None:
        if not _is_wide(op.args[2].type):
            self.clone(op)
            return
        words = self._words(op.args[2])
        pointer, index = self.value(op.args[0]), self.value(op.args[1]) * 2
        step, align = _pieces(len(words), op.attrs["align"])
        for i in range(0, len(words), step):
            self.b.store(pointer, index + i, self.b.vector(words[i : i + step]), align)

    def _atomic(self, op: Op) -> Lowered | None:
        if _is_wide(op.args[2].type):
            raise KernelError(f"int64: expected atomics on 32 bits, got {op.args[2].type} ({op.where})")
        return self.clone(op)

    # -- operations on each word separately ------------------------------------------------------------------------

    def _const(self, op: Op) -> Lowered | None:
        if element(op.output.type) not in _WIDE:
            return self.clone(op)
        return self._constant(int(op.attrs["value"]))

    def _constant(self, value: int, lanes: int = 1) -> Pair:
        low, high = self.b.const(value, u32), self.b.const(value >> 32, u32)
        return self.b.splat(low, lanes), self.b.splat(high, lanes)

    def _each(self, op: Op) -> Lowered | None:
        if not _is_wide(op.args[0].type):
            return self.clone(op)
        words: list[Value] = []
        for i in range(2):
            args = [self._pair(a)[i] for a in op.args]
            if op.opcode == "make_vector":
                words.append(self.b.vector(args))
            elif op.opcode == "splat":
                words.append(self.b.splat(args[0], lanes_of(op.output.type)))
            elif op.opcode == "permute":
                words.append(self.b.permute(args[0], args[1] if len(args) == 2 else None, op.attrs["lanes"]))
            else:
                words.append(self.b.extract(args[0], op.attrs["lane"]))
        return tuple(words)

    def _select(self, op: Op) -> Lowered | None:
        if not _is_wide(op.args[1].type):
            return self.clone(op)
        return self._choose(self.value(op.args[0]), self._pair(op.args[1]), self._pair(op.args[2]))

    def _choose(self, condition: Value, yes: Pair, no: Pair) -> Pair:
        return self.b.select(condition, yes[0], no[0]), self.b.select(condition, yes[1], no[1])

    def _var(self, op: Op) -> Lowered | None:
        assert isinstance(op.output.type, Ref)
        if not _is_wide(op.output.type.target):
            return self.clone(op)
        names = [f"{op.output.hint}_{half}" if op.output.hint else "" for half in ("low", "high")]
        return tuple(self.b.var(w, name).ref for w, name in zip(self._pair(op.args[0]), names, strict=True))

    def _get(self, op: Op) -> Lowered | None:
        return tuple(self.b.get(r) for r in self._pair(op.args[0])) if _is_wide(op.output.type) else self.clone(op)

    def _set(self, op: Op) -> None:
        if not _is_wide(op.args[1].type):
            self.clone(op)
            return
        for ref, word in zip(self._pair(op.args[0]), self._pair(op.args[1]), strict=True):
            self.b.set(ref, word)

    def _loop(self, op: Op) -> None:
        """Rewrite a loop with a 64-bit index to count iterations in 32 bits, which is enough for any kernel."""
        index: Value = op.attrs["index"]
        if not _is_wide(index.type):
            self.clone_loop(op)
            return
        start, stop, step = (self._pair(a) for a in op.args)
        signed = element(index.type).is_signed
        span = self._sum(self._difference(stop, start), self._difference(step, self._constant(1)))
        trips = span[0] if step[0].constant == 1 and step[1].constant == 0 else self._quotient(span, step)[0][0]
        trips = self.b.select(self._less(start, stop, signed), trips, self.b.const(0, u32))
        low, high = self.b.var(start[0], f"{index.hint}_low"), self.b.var(start[1], f"{index.hint}_high")
        with self.b.loop(self.b.const(0, u32), trips, unroll=op.attrs["unroll"], name="turn"):
            now = low.value, high.value
            self.values[index] = now
            self.block(op.blocks[0])
            low.value, high.value = self._sum(now, step)

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def _two(self, op: Op) -> Lowered | None:
        type_ = op.args[0].type
        if not _is_wide(type_):
            return self.clone(op)
        a, b = self._pair(op.args[0]), self._pair(op.args[1])
        if op.opcode in self._binary:
            return self._binary[op.opcode](op, a, b)
        if op.opcode in ("and", "or", "xor"):
            return tuple(self.b.binary(op.opcode, x, y) for x, y in zip(a, b, strict=True))
        if op.opcode in ("eq", "ne"):
            differs = (a[0] ^ b[0]) | (a[1] ^ b[1])
            return self.b.binary(op.opcode, differs, 0)
        less = self._less(b, a, _signed(type_)) if op.opcode in ("gt", "le") else self._less(a, b, _signed(type_))
        return ~less if op.opcode in ("le", "ge") else less

    def _less(self, a: Pair, b: Pair, signed: bool) -> Value:
        high, other = a[1], b[1]
        if signed:
            high, other = self._as_signed(high), self._as_signed(other)
        return (high < other) | (self.b.eq(a[1], b[1]) & (a[0] < b[0]))

    def _as_signed(self, word: Value) -> Value:
        return self.b.bitcast(word, vector_type(i32, lanes_of(word.type)))

    def _sum(self, a: Pair, b: Pair) -> Pair:
        low = a[0] + b[0]
        return low, a[1] + b[1] + self.b.cast(low < a[0], u32)

    def _difference(self, a: Pair, b: Pair) -> Pair:
        return a[0] - b[0], a[1] - b[1] - self.b.cast(a[0] < b[0], u32)

    def _mul(self, op: Op, a: Pair, b: Pair) -> Lowered:
        return a[0] * b[0], high_product(a[0], b[0]) + a[0] * b[1] + a[1] * b[0]

    def _one(self, op: Op) -> Lowered | None:
        if not _is_wide(op.args[0].type):
            return self.clone(op)
        a = self._pair(op.args[0])
        if op.opcode == "not":
            return ~a[0], ~a[1]
        if op.opcode == "neg":
            return self._negative(a)
        return self._magnitude(a) if _signed(op.args[0].type) else a

    def _negative(self, a: Pair) -> Pair:
        return self._difference(self._constant(0, lanes_of(a[0].type)), a)

    def _magnitude(self, a: Pair) -> Pair:
        return self._choose(self._as_signed(a[1]) < 0, self._negative(a), a)

    def _extreme(self, op: Op, a: Pair, b: Pair) -> Lowered:
        less = self._less(a, b, _signed(op.args[0].type))
        return self._choose(less, a, b) if op.opcode == "min" else self._choose(less, b, a)

    # -- shifts: the count is below 64, so it is its low word ------------------------------------------------------

    def _shl(self, op: Op, a: Pair, count: Pair) -> Lowered:
        n = count[0] & 31
        # Two shifts, because one by 32 (for a count of 0) is not defined.
        spill = (a[0] >> 1) >> (n ^ 31)
        near = a[0] << n, (a[1] << n) | spill
        return self._choose(count[0] < 32, near, (self._constant(0, lanes_of(n.type))[0], a[0] << n))

    def _shr(self, op: Op, a: Pair, count: Pair) -> Lowered:
        n = count[0] & 31
        spill = (a[1] << 1) << (n ^ 31)
        if _signed(op.args[0].type):
            high = self._as_signed(a[1])
            type_ = typed(Scalar | Vector, n.type)
            shifted = self.b.bitcast(high >> self._as_signed(n), type_)
            fill = self.b.bitcast(high >> 31, type_)
        else:
            shifted, fill = a[1] >> n, self._constant(0, lanes_of(n.type))[0]
        return self._choose(count[0] < 32, ((a[0] >> n) | spill, shifted), (shifted, fill))

    # -- division --------------------------------------------------------------------------------------------------

    def _divided(self, op: Op, a: Pair, b: Pair) -> tuple[Pair, Pair]:
        signed, lanes = _signed(op.args[0].type), lanes_of(op.args[0].type)
        results = []
        for i in range(lanes):
            x, y = ((self.b.extract(p[0], i), self.b.extract(p[1], i)) for p in (a, b))
            results.append(self._signed_quotient(x, y) if signed else self._quotient(x, y))
        quotient, rest = (
            tuple(self.b.vector([r[kind][half] for r in results]) for half in range(2)) for kind in range(2)
        )  # fmt: skip
        return typed(Pair, quotient), typed(Pair, rest)

    def _signed_quotient(self, x: Pair, y: Pair) -> tuple[Pair, Pair]:
        quotient, rest = self._quotient(self._magnitude(x), self._magnitude(y))
        opposite = self._as_signed(x[1] ^ y[1]) < 0
        negative = self._as_signed(x[1]) < 0
        return (
            self._choose(opposite, self._negative(quotient), quotient),
            self._choose(negative, self._negative(rest), rest),
        )

    def _quotient(self, x: Pair, y: Pair) -> tuple[Pair, Pair]:
        """Unsigned quotient and remainder: one division if both fit a word, else 64 steps of shift and subtract."""
        zero = self.b.const(0, u32)
        low, high = self.b.var(x[0], "quotient_low"), self.b.var(x[1], "quotient_high")
        rest_low, rest_high = self.b.var(zero, "rest_low"), self.b.var(zero, "rest_high")
        small = self.b.eq(x[1] | y[1], 0)
        with self.b.if_(small):
            low.value, rest_low.value = x[0] / y[0], x[0] % y[0]
        with self.b.else_(), self.b.loop(0, 64, name="bit"):
            # One register pair is shifted: the dividend leaves at the top while the quotient enters at the bottom. A
            # remainder that overflows 64 bits when shifted is larger than any divisor.
            now, rest = (low.value, high.value), (rest_low.value, rest_high.value)
            carry = rest[1] >> 31
            grown = (rest[0] << 1) | (now[1] >> 31), (rest[1] << 1) | (rest[0] >> 31)
            fits = self.b.ne(carry, 0) | ~self._less(grown, y, False)
            left = self._choose(fits, self._difference(grown, y), grown)
            rest_low.value, rest_high.value = left
            low.value = (now[0] << 1) | self.b.cast(fits, u32)
            high.value = (now[1] << 1) | (now[0] >> 31)
        return (low.value, high.value), (rest_low.value, rest_high.value)

    # -- conversion ------------------------------------------------------------------------------------------------

    def _cast(self, op: Op) -> Lowered | None:
        source, target = element(op.args[0].type), element(op.output.type)
        if source in _WIDE and target in _WIDE:
            return self._pair(op.args[0])
        if source in _WIDE:
            pair = self._pair(op.args[0])
            return self.b.cast(self._to_float(pair, source.is_signed) if target.is_float else pair[0], target)
        if target not in _WIDE:
            return self.clone(op)
        value = self.value(op.args[0])
        if source.is_float:
            return self._from_float(self.b.cast(value, f32), target.is_signed)
        zero = self._constant(0, lanes_of(value.type))[0]
        if not source.is_signed:
            return self.b.cast(value, u32), zero
        word = self.b.cast(value, i32)
        type_ = vector_type(u32, lanes_of(word.type))
        return self.b.bitcast(word, type_), self.b.bitcast(word >> 31, type_)

    def _from_float(self, value: Value, signed: bool) -> Pair:
        """Truncate a float to 64 bits. Both words are exact: the high one by scaling, the low one is the remainder."""
        magnitude = self.b.abs(value)
        high = self.b.unary("floor", magnitude * 2.0**-32)
        # Correct with and without fma, since the product is exact.
        low = self.b.unary("floor", magnitude - high * 2.0**32)
        pair = self.b.cast(low, u32), self.b.cast(high, u32)
        return self._choose(value < 0.0, self._negative(pair), pair) if signed else pair

    def _to_float(self, pair: Pair, signed: bool) -> Value:
        """Round to nearest even: convert the leading 32 bits, the last one set if any lower bit is (sticky bit)."""
        low, high = self._magnitude(pair) if signed else pair
        lanes = lanes_of(low.type)
        lifted = low, high
        exponent = self.b.splat(self.b.const(127 + 32, u32), lanes)
        for step in (32, 16, 8, 4, 2, 1):
            if step == 32:
                empty = self.b.eq(lifted[1], 0)
                moved = self._constant(0, lanes)[0], lifted[0]
            else:
                empty = lifted[1] < (1 << (32 - step))
                moved = lifted[0] << step, (lifted[1] << step) | (lifted[0] >> (32 - step))
            lifted = self._choose(empty, moved, lifted)
            exponent = self.b.select(empty, exponent - step, exponent)
        leading = lifted[1] | self.b.cast(self.b.ne(lifted[0], 0), u32)
        scale = self.b.bitcast(exponent << 23, vector_type(f32, lanes))
        number = self.b.cast(leading, f32) * scale
        return self.b.select(self._as_signed(pair[1]) < 0, -number, number) if signed else number

    def _bitcast(self, op: Op) -> Lowered | None:
        assert isinstance(op.output.type, Scalar | Vector)
        source, target = op.args[0], op.output.type
        if _is_wide(source.type) and _is_wide(target):
            return self._pair(source)
        if _is_wide(source.type):
            return self.b.bitcast(self.b.vector(self._words(source)), target)
        if not _is_wide(target):
            return self.clone(op)
        words = self.b.unpack(self.b.bitcast(self.value(source), Vector(u32, 2 * lanes_of(target))))
        return self.b.vector(words[0::2]), self.b.vector(words[1::2])


def _pieces(words: int, align: int) -> tuple[int, int]:
    """Words per access, since no vector is wider than 16, and their alignment."""
    return min(words, 16), min(2 * align, 16)


def _is_wide(type_: Type) -> bool:
    return isinstance(type_, Scalar | Vector) and element(type_) in _WIDE


def _signed(type_: Type) -> bool:
    return element(type_).is_signed
