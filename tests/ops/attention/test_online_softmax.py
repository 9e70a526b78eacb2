"""Online softmax on the interpreter: states that follow, weigh, merge and finish give the softmax of all their keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aule.ir import Builder, Value
from aule.ir.interpret import interpret
from aule.ir.types import f32
from aule.ops.softmax.online_softmax import (
    Maximum,
    NegatedMaximum,
    SoftmaxState,
    finish,
    follow,
    from_sink,
    merge_maxima,
)
from aule.tile.common.math import LOG2E, LOWEST, fold

ROWS, TILE, LAG = 4, 8, 8.0
Array = np.ndarray[Any, Any]


class Alone:
    """An engine whose rows each belong to one thread."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def any_of_rows(self, condition: Value) -> Value:
        return condition

    def reduce_rows(self, kind: str, partial: list[Value]) -> list[Value]:
        return partial


def state_of(form: Maximum) -> SoftmaxState:
    b = form.b
    lowest = b.const(-LOWEST if isinstance(form, NegatedMaximum) else LOWEST, f32)
    return SoftmaxState(form, b.var(lowest), b.var(b.const(0.0, f32)))


def add_tiles(state: SoftmaxState, O: Any, scores: Value, values: Value, first: int, tiles: int, keys: int) -> None:
    """``O += P V`` over some tiles of a row of scores and values."""
    b = state.form.b
    row = b.thread_id() * keys
    for tile in range(first, first + tiles):
        s = [b.load(scores, row + (tile * TILE + i)) for i in range(TILE)]
        v = [b.load(values, row + (tile * TILE + i)) for i in range(TILE)]

        def rescale(alpha: list[Value]) -> None:
            O.value = O.value * alpha[0]

        follow(Alone(b), [state], [fold(b, "max", s)], LAG, rescale)
        for p, x in zip(state.weigh(s), v, strict=True):
            O.value = b.fma(p, x, O.value)


def run(form: str, tiles: int, split: int = 0, sink: bool = False, scores: Array | None = None) -> tuple[Array, Array]:
    """O and log-sum-exp of `ROWS` rows of one column, in one state or merged from two at a tile."""
    keys = tiles * TILE
    b = Builder("softmax", workgroup=ROWS)
    kind = NegatedMaximum(b) if form == "negated" else Maximum(b)
    s, v, sinks = b.buffer("s", f32), b.buffer("v", f32), b.buffer("sinks", f32)
    o, lse = b.buffer("o", f32, "write"), b.buffer("lse", f32, "write")
    state, O = state_of(kind), b.var(b.const(0.0, f32))
    if sink:
        m, l = from_sink(kind, b.load(sinks, b.thread_id()), b.thread_id() * 0)
        state.m.value, state.l.value = m, l
    add_tiles(state, O, s, v, 0, split or tiles, keys)
    if split:
        other, O_other = state_of(kind), b.var(b.const(0.0, f32))
        add_tiles(other, O_other, s, v, split, tiles - split, keys)
        own, theirs = state.merge(other.m.value, other.l.value)
        O.value = b.fma(O.value, own, O_other.value * theirs)
    end = finish(kind, state.l.value)
    b.store(o, b.thread_id(), O.value * end.inverse)
    b.store(lse, b.thread_id(), end.log_sum_exp(state.m))
    rng = np.random.default_rng(0)
    given = rng.standard_normal((ROWS, keys)).astype(np.float32) * 20 if scores is None else scores
    values, sink_values = (rng.standard_normal(n).astype(np.float32) for n in ((ROWS, keys), ROWS))
    out, out_lse = np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32)
    arrays = [(given * LOG2E).astype(np.float32).ravel(), values.ravel(), sink_values, out, out_lse]
    interpret(b.finish(), (1, 1, 1), arrays)
    exact = given.astype(np.float64)
    if sink:
        exact = np.concatenate([exact, sink_values[:, None].astype(np.float64)], 1)
        values = np.concatenate([values, np.zeros((ROWS, 1), np.float32)], 1)
    with np.errstate(all="ignore"):
        want_lse = np.logaddexp.reduce(exact, axis=1)
        want = np.where(np.isneginf(want_lse), 0, (np.exp(exact - want_lse[:, None]) * values).sum(1))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out_lse, want_lse, rtol=1e-5, atol=1e-5)
    return out, out_lse


@pytest.mark.parametrize("form", ["plain", "negated"])
@pytest.mark.parametrize("split", [0, 1, 3])
def test_a_row_in_tiles_is_the_row_at_once(form: str, split: int) -> None:
    run(form, 4, split)


@pytest.mark.parametrize("form", ["plain", "negated"])
def test_the_sink_is_a_key_without_a_value(form: str) -> None:
    run(form, 2, sink=True)


@pytest.mark.parametrize("form", ["plain", "negated"])
def test_a_row_without_keys_is_zero(form: str) -> None:
    scores = np.full((ROWS, TILE), -np.inf, np.float32)
    scores[1] = 1.0
    out, lse = run(form, 1, scores=scores)
    assert out[0] == 0.0 and np.isneginf(lse[0])


def test_maxima_of_several_states() -> None:
    b = Builder("merge", workgroup=1)
    x, out = b.buffer("x", f32), b.buffer("out", f32, "write")
    for i, form in enumerate((Maximum(b), NegatedMaximum(b))):
        highest, factors = merge_maxima(form, [b.load(x, 3 * i + n) for n in range(3)])
        for n, value in enumerate((highest, *factors)):
            b.store(out, 4 * i + n, value)
    found = np.zeros(8, np.float32)
    interpret(b.finish(), (1, 1, 1), [np.array([1, 3, 2, -1, -3, -2], np.float32), found])
    np.testing.assert_allclose(found, [3, 0.25, 1, 0.5, -3, 0.25, 1, 0.5])
