"""Attention of a few rows to many keys, planned as decoding: when, and with the same results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import devices
import grid
import numpy as np
import pytest
from test_fragment_interpreted import target

import aule
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.ops.decode.plan.few_rows import plan_few_rows
from aule.target import NVIDIA_LAYOUT
from aule.view import TensorView, contiguous_strides


def planned(problem: AttentionProblem, units: int = 132) -> bool:
    p = problem
    shapes = {
        "q": (p.heads_q, p.seq_q),
        "k": (p.heads_kv, p.seq_kv),
        "v": (p.heads_kv, p.seq_kv),
        "o": (p.heads_q, p.seq_q),
    }
    views = {}
    for name, (heads, rows) in shapes.items():
        shape = (p.batch, heads, rows, p.head_dim)
        views[name] = TensorView(p.dtype, shape, contiguous_strides(shape), "device", None)
    return plan_few_rows(p, views, replace(target(), compute_units=units, matrix_layout=NVIDIA_LAYOUT)) is not None


def test_when_rows_are_few() -> None:
    one = AttentionProblem(2, 8, 2, 4, 4096, 64, 64, "f16", 0.125)
    assert planned(one) and planned(replace(one, causal=True)) and planned(replace(one, softcap=5.0))
    more = replace(one, seq_q=16)
    assert planned(more), "64 rows of a key head, and idle units"
    assert not planned(replace(more, batch=64)), "the device is full"
    assert not planned(replace(one, seq_q=17))
    assert not planned(replace(one, seq_kv=255))
    assert not planned(replace(one, causal=True, causal_align="top-left"))
    for other in ({"mask": "bool"}, {"bias": "f32"}, {"alibi": True}, {"sinks": True}, {"dropout_p": 0.5}):
        assert not planned(replace(one, **other)), other


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 4, 2, 3, 300, 40), {"causal": False}),
    ((1, 2, 2, 4, 513, 64), {"causal": True, "return_lse": True}),
    ((2, 8, 1, 2, 700, 72), {"window": (50, 20), "causal": False}),
    ((2, 2, 2, 5, 300, 128), {"softcap": 3.0, "causal": True}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", devices.BACKENDS[:4])
def test_results(backend: str, case: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    devices.spare(devices.need(backend), CASES.index(case), parts=2)
    (batch, heads, heads_kv, rows, keys, dim), options = case
    rng = np.random.default_rng(0)
    shapes = {"q": (batch, heads, rows, dim), "k": (batch, heads_kv, keys, dim), "v": (batch, heads_kv, keys, dim)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    found = aule.flash_attention(**arrays, **options, backend=backend)
    out, lse = found if isinstance(found, tuple) else (found, None)
    problem, _ = attention_problem(**{name: grid.view_of(array) for name, array in arrays.items()}, **options)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
