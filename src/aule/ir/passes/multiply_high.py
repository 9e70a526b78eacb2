"""``mulhi`` from products of half words, for languages with neither that function nor 64-bit integers."""

from __future__ import annotations

from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes.rewrite import Lowered, Rewriter


def multiply_high(kernel: KernelIR) -> KernelIR:
    """Replace every ``mulhi``."""
    return _MultiplyHigh(kernel).run()


def high_product(x: Value, y: Value) -> Value:
    """High word of the product of two u32, from products of half words."""
    x0, x1, y0, y1 = x & 0xFFFF, x >> 16, y & 0xFFFF, y >> 16
    middle = x1 * y0 + ((x0 * y0) >> 16)
    other = x0 * y1 + (middle & 0xFFFF)
    return x1 * y1 + (middle >> 16) + (other >> 16)


class _MultiplyHigh(Rewriter):
    def __init__(self, kernel: KernelIR) -> None:
        super().__init__(kernel)
        self.hooks = {"mulhi": self._mulhi}

    def _mulhi(self, op: Op) -> Lowered | None:
        return high_product(self.value(op.args[0]), self.value(op.args[1]))
