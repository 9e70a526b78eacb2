"""The kernels of cross entropy: loss per row, its gradient, and the reduction over rows.

A row's log-sum-exp is stored as two numbers, ``most``, its largest logit, and ``above``, the rest. Added up, they would
lose digits of the second if logits have a large common offset, and so would the probabilities of the backward pass. An
ignored row has the largest finite number for ``above``, which makes all its probabilities zero and marks it for the
backward pass. If a workgroup has one row at a time, it does not read ignored rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aule.ir import KernelIR, Value
from aule.ir.types import i32, i64
from aule.ops.rows.kernel import RowConfig, RowKernel
from aule.target import Target
from aule.tile.common.math import LN2, LOG2E, lowest
from aule.tile.rows.parts import Part, PerRow, RowArray

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig(RowConfig):
    """Configuration of a cross entropy kernel; operands say what else it does."""

    smooth: bool = False


class _Targets:
    """The targets of a thread's rows."""

    def __init__(self, k: RowKernel, array: RowArray) -> None:
        b = k.b
        ignored, length = k.p.number("ignore_index", i64), b.cast(k.passes.length, i64)
        found = k.rows.per_row(lambda row: b.cast(b.load(array.buffer, array.start(row)), i64))
        self.counts = found.map(lambda t: b.ne(t, ignored))
        self.inside = found.map(lambda t: (t >= 0) & (t < length))
        self.column = found.map(lambda t, inside: b.cast(b.select(inside, t, 0), i32), self.inside)
        """The target, or 0 if that is no column."""


def build_cross_entropy(config: CrossEntropyConfig, target: Target) -> KernelIR:
    """Trace the forward kernel: ``most``, ``above`` and the row's loss, ``loss`` or ``row_loss``."""
    k = RowKernel(config, target)
    b, passes, rows = k.b, k.passes, k.rows
    logits, targets = k.array("logits"), k.array("target")
    losses = k.array("loss" if config.has("loss") else "row_loss", "write")
    largest, sums_above = k.array("most", "write"), k.array("above", "write")

    def body() -> None:
        given = _Targets(k, targets)

        def compute() -> None:
            x = rows.source(logits)
            passes.preload(x)
            picked = PerRow(
                tuple(
                    b.cast(b.load(logits.buffer, start + _along(k, logits, column)), k.work)
                    for start, column in zip(x.starts, given.column.values, strict=True)
                )
            )
            # Sums of differences from the target's logit, if that is finite: a common offset then costs no digits.
            origin = picked.map(lambda t: b.select((t >= lowest(k.work)) & (t <= -lowest(k.work)), t, 0.0))
            differences = [lambda p: p[x] - p[origin]] if config.smooth else []
            most, total, sums = passes.exp_sums(lambda p: p[x], *differences)
            above = total.map(lambda s: b.log2(s) * LN2)
            loss = most.map(lambda m, t: m - t, picked)
            if config.smooth:
                share, smoothing, inverse = (k.number(n) for n in ("picked_share", "smoothing", "inverse_length"))
                loss = loss.map(lambda d, m, n, s: d * share + ((m - n) - s * inverse) * smoothing, most, origin, *sums)
            loss = loss.map(lambda d, a: d + a, above)
            loss = _where(k, given.inside, loss, NAN)
            rows.put(losses, _where(k, given.counts, loss, 0.0))
            rows.put(largest, _where(k, given.counts, most, 0.0))
            rows.put(sums_above, _where(k, given.counts, above, -lowest(k.work)))

        def skip() -> None:
            rows.put(losses, rows.per_row(lambda _: b.const(0.0, k.work)))
            rows.put(largest, rows.per_row(lambda _: b.const(0.0, k.work)))
            rows.put(sums_above, rows.per_row(lambda _: _ignored(k)))

        _skip_ignored(k, given, compute, skip)

    return k.trace(body)


def build_cross_entropy_gradient(config: CrossEntropyConfig, target: Target) -> KernelIR:
    """Trace the backward kernel: ``dlogits`` from ``most``, ``above`` and the gradient of the row's loss: ``dloss``,
    times ``scale`` if given."""
    k = RowKernel(config, target)
    b, passes, rows = k.b, k.passes, k.rows
    dlosses, logits, targets = (k.array(name) for name in ("dloss", "logits", "target"))
    saved = [k.array(name) for name in ("most", "above")]
    scale = k.p.buffer("scale", k.work) if config.has("scale") else None
    dlogits = k.array("dlogits", "write")
    picked_share = k.number("picked_share") if config.smooth else 1.0
    each_share = k.number("each_share") if config.smooth else None
    places = b.vector([b.const(i, i32) for i in range(passes.shape.width)])

    def body() -> None:
        given = _Targets(k, targets)
        to = rows.source(dlogits)

        def compute() -> None:
            x = rows.source(logits)
            passes.preload(x)
            most, above = (rows.get(array) for array in saved)
            slope = rows.per_row(lambda row: b.cast(b.load(dlosses.buffer, dlosses.start(row)), k.work))
            if scale is not None:
                slope = slope.map(lambda s: s * b.load(scale, 0))
            slope = _where(k, given.counts, _where(k, given.inside, slope, NAN), 0.0)
            hot = slope.map(lambda s: s * picked_share)

            def write(p: Part) -> None:
                value = b.exp2((p[x] - p[most] - p[above]) * LOG2E)
                if each_share is not None:
                    value = value - each_share
                value = value * p[slope]
                place = b.cast(b.cast(p[given.column], k.column) - p.col, i32)
                p.store(to, b.select(b.eq(places, place), value - p[hot], value))

            passes.each(write)

        def skip() -> None:
            zero = b.splat(b.const(0.0, k.work), passes.shape.width)
            passes.each(lambda p: p.store(to, zero))

        _skip_ignored(k, given, compute, skip)

    return k.trace(body)


def build_reduction(config: CrossEntropyConfig, target: Target) -> KernelIR:
    """Trace the reduction over rows, which are the columns of its only row: ``loss`` from ``row_loss``, with ``above``
    divided by the number of rows that count; or ``scale``, one over that number."""
    k = RowKernel(config, target)
    b, passes, rows = k.b, k.passes, k.rows
    arrays = {name: k.array(name) for name in ("row_loss", "above") if config.has(name)}
    result = k.array("loss" if config.has("loss") else "scale", "write")

    def body() -> None:
        given = {name: rows.source(array) for name, array in arrays.items()}

        def counted(p: Part) -> Value:
            one, zero = (b.splat(b.const(x, k.work), passes.shape.width) for x in (1.0, 0.0))
            return b.select(b.ne(p[given["above"]], _ignored(k)), one, zero)

        wanted: list[Callable[[Part], Value]] = []
        if "row_loss" in given:
            wanted.append(lambda p: p[given["row_loss"]])
        if "above" in given:
            wanted.append(counted)
        found = passes.sums(*wanted)
        value = found[0] if "row_loss" in given else rows.per_row(lambda _: b.const(1.0, k.work))
        if "above" in given:
            value = value.map(lambda x, n: x / n, found[-1])
        rows.put(result, value)

    return k.trace(body)


def _skip_ignored(k: RowKernel, given: _Targets, compute: Callable[[], None], skip: Callable[[], None]) -> None:
    """Skip an ignored row, if the workgroup has one row at a time."""
    if k.config.shape.block > 1:
        compute()
        return
    with k.b.if_(given.counts.values[0]):
        compute()
    with k.b.else_():
        skip()


def _where(k: RowKernel, flags: PerRow, values: PerRow, otherwise: float) -> PerRow:
    """Each row's value, or ``otherwise`` where its flag is false."""
    return values.map(lambda x, flag: k.b.select(flag, x, k.b.const(otherwise, k.work)), flags)


def _along(k: RowKernel, array: RowArray, column: Value) -> Value:
    """The offset of a column from a row's start."""
    index = k.b.cast(column, k.p.index)
    return index if array.stride is None else index * array.stride


def _ignored(k: RowKernel) -> Value:
    """The value of ``above`` that marks an ignored row."""
    return k.b.const(-lowest(k.work), k.work)
