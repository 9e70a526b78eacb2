"""Rounds f32 to f16 precision before it is cast to f16 in registers.

NVIDIA's Vulkan compiler drops a cast to f16 and back, even through bitcasts, variables and decorations. If the number
is rounded before, dropping the casts changes nothing.
"""

from __future__ import annotations

from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes.rewrite import Lowered, Rewriter
from aule.ir.passes.soft_half import Convert, float_to_half, half_to_float
from aule.ir.types import Fragment, Pointer, bool_, element, f16, f32


def round_half(kernel: KernelIR, widen: Convert | None = None) -> KernelIR:
    """Round numbers by integer arithmetic before casts to f16, unless the result is only stored to buffers.

    ``widen`` is the language's own exact conversion of fp16 bits, as in `soft_half`.
    """
    return _RoundHalf(kernel, widen).run()


def casts_used_in_registers(kernel: KernelIR) -> dict[Op, Value]:
    """Casts to f16 whose results are used for more than stores to buffers, with these results."""
    used = {
        value
        for op in kernel.walk()
        for position, value in enumerate(op.args)
        if not (op.opcode == "store" and position == 2 and _is_buffer(op.args[0]))
    }
    return {
        op: op.result
        for op in kernel.walk()
        if op.opcode == "cast" and op.result in used and element(op.result.type) == f16
        and not isinstance(op.result.type, Fragment) and element(op.args[0].type) not in (f16, bool_)
    }  # fmt: skip


def _is_buffer(value: Value) -> bool:
    return isinstance(value.type, Pointer) and value.type.space == "global"


class _RoundHalf(Rewriter):
    def __init__(self, kernel: KernelIR, widen: Convert | None) -> None:
        super().__init__(kernel)
        self._widen = widen
        self._casts = casts_used_in_registers(kernel)
        self.hooks["cast"] = self._cast

    def _cast(self, op: Op) -> Lowered | None:
        if op not in self._casts:
            return self.clone(op)
        bits = float_to_half(self.b, self.b.cast(self.value(op.args[0]), f32))
        if self._widen is None:
            return self.b.cast(half_to_float(self.b, bits), f16)
        return self.b.cast(self.b.vector([self._widen(self.b, lane) for lane in self.b.unpack(bits)]), f16)
