"""Index analysis: remainders of indices, and their quotients by the width of a vector.

Memory that is accessed as vectors is declared as an array of vectors, so an access needs ``index / lanes``. A right
shift at the access would hide the constant part of an address from drivers (``(i + 64) >> 2`` is not ``(i >> 2) + 16``
for a compiler that must allow overflow), so they could not use the offset field of load instructions. Instead, the
quotient is computed along with the index arithmetic, where each value is defined: ``(x * 8 + 64) / 4`` becomes
``x * 2 + 16``.
"""

from __future__ import annotations

from math import gcd

from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.types import Scalar

_LIMIT = 64
"""Largest power of two that is tracked as a modulus."""


class Indices:
    """Congruences of a kernel's integers, and the quotients to compute.

    Attributes
    ----------
    wanted : dict
        For each value, the divisors of the quotients to compute where it is defined.
    """

    def __init__(self, kernel: KernelIR) -> None:
        self._ops = list(kernel.walk())
        self._known: dict[Value, tuple[int, int]] = {}
        for op in self._ops:
            if op.opcode == "loop":
                start, _stop, step = op.args
                self._known[op.attrs["index"]] = self._add(self.congruence(start), (self._multiple(step), 0))
            elif op.result is not None and isinstance(op.result.type, Scalar) and op.result.type.is_int:
                self._known[op.result] = self._of(op)
        self.wanted: dict[Value, list[int]] = {}

    def congruence(self, value: Value) -> tuple[int, int]:
        """``(m, r)``: the value is ``r`` modulo ``m``, a power of two."""
        return self._known.get(value, (1, 0))

    def remainder(self, value: Value, divisor: int) -> int | None:
        """The value modulo a power of two; None if unknown."""
        m, r = self.congruence(value)
        return r % divisor if m % divisor == 0 else None

    def remainder_source(self, value: Value, divisor: int) -> Value:
        """A simpler value with the same remainder: added multiples of the divisor are removed."""
        while (op := value.op) is not None and op.opcode in ("add", "sub"):
            a, b = op.args
            if self.remainder(b, divisor) == 0:
                value = a
            elif self.remainder(a, divisor) == 0 and op.opcode == "add":
                value = b
            else:
                break
        return value

    def want(self, value: Value, divisor: int) -> None:
        """Request a quotient; all requests must come before `spread`."""
        divisors = self.wanted.setdefault(value, [])
        if divisor not in divisors:
            divisors.append(divisor)

    def spread(self) -> None:
        """Request the quotients that the requested ones are computed from."""
        for op in reversed(self._ops):
            if op.result is not None:
                for divisor in self.wanted.get(op.result, ()):
                    for operand in self.parts(op, divisor) or ():
                        self.want(operand, divisor)

    def parts(self, op: Op, divisor: int) -> tuple[Value, ...] | None:
        """Operands whose quotients give the quotient of ``op``; None if its result must be shifted."""
        if op.opcode in ("add", "sub"):
            a, b = op.args
            known_a, known_b = self.remainder(a, divisor), self.remainder(b, divisor)
            if known_b == 0 or (known_a == 0 and op.opcode == "add") or None not in (known_a, known_b):
                return (a, b)
        elif op.opcode == "mul":
            a, b = op.args
            # Prefer a constant factor, whose quotient is free.
            for factor in (b, a) if b.constant is not None else (a, b):
                if self.remainder(factor, divisor) == 0:
                    return (factor,)
        elif op.opcode == "shl":
            count = op.args[1].constant
            if count is not None and 1 << count >= divisor:
                return ()
        elif op.opcode == "cast":
            source = op.args[0]
            assert isinstance(op.output.type, Scalar) and isinstance(source.type, Scalar)
            if source.type.is_int and source.type.bits <= op.output.type.bits and source.type.is_signed:
                return (source,)
        return None

    def carry(self, op: Op, divisor: int) -> int:
        """The carry of the operands' remainders into the quotient of an addition or subtraction."""
        a, b = (self.remainder(v, divisor) for v in op.args)
        if a is None or b is None:
            return 0
        return (a + b if op.opcode == "add" else a - b) // divisor

    def _multiple(self, value: Value) -> int:
        """The largest power of two known to divide the value."""
        m, r = self.congruence(value)
        return gcd(m, r) if r else m

    def _of(self, op: Op) -> tuple[int, int]:
        if op.opcode == "const":
            return (_LIMIT, op.attrs["value"] % _LIMIT)
        if op.opcode in ("add", "sub"):
            return self._add(self.congruence(op.args[0]), self.congruence(op.args[1]), -1 if op.opcode == "sub" else 1)
        if op.opcode == "mul":
            (m, r), (n, s) = self.congruence(op.args[0]), self.congruence(op.args[1])
            modulus = gcd(_LIMIT, m * n, m * s, n * r)
            return (modulus, r * s % modulus)
        if op.opcode == "shl" and op.args[1].constant is not None:
            m, r = self.congruence(op.args[0])
            modulus = min(_LIMIT, m << op.args[1].constant)
            return (modulus, (r << op.args[1].constant) % modulus)
        if op.opcode == "cast":
            source = op.args[0].type
            return self.congruence(op.args[0]) if isinstance(source, Scalar) and source.is_int else (1, 0)
        if op.opcode == "and":
            # Low bits that are zero in one operand are zero in the result.
            return (max(self._multiple(op.args[0]), self._multiple(op.args[1])), 0)
        if op.opcode in ("min", "max", "select"):
            (m, r), (n, s) = (self.congruence(v) for v in op.args[-2:])
            modulus = gcd(m, n, r - s)
            return (modulus, r % modulus)
        return (1, 0)

    @staticmethod
    def _add(left: tuple[int, int], right: tuple[int, int], sign: int = 1) -> tuple[int, int]:
        modulus = gcd(left[0], right[0])
        return (modulus, (left[1] + sign * right[1]) % modulus)
