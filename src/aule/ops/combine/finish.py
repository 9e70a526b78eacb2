"""The end of a query row: its sink, its denominator and its log-sum-exp."""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import f32
from aule.ops.softmax.online_softmax import Maximum, finish
from aule.tile.common.math import LOG2E


def finish_row(b: Builder, m: Value, l: Value, sink: Value | None = None) -> tuple[Value, Value]:
    """The factor for O, and the base-2 log-sum-exp, of a row with maximum ``m`` and sum of weights ``l``.

    A sink counts as a key without a value.
    """
    form, rescale = Maximum(b), b.const(1.0, f32)
    if sink is not None:
        new = form.larger(m, sink * LOG2E)
        rescale = form.factor(m, new)
        l = b.fma(l, rescale, b.exp2(sink * LOG2E - new))
        m = new
    end = finish(form, l)
    return end.inverse * rescale, end.log2_sum(m)
