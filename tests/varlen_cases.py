"""Packed batches that every backend is tested on: lengths of all kinds, and the options they go with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grid
import numpy as np

from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.attention.varlen import varlen_problem
from aule.ops.softmax.dropout import seed_words
from aule.view import TensorView


@dataclass(frozen=True)
class Case:
    """One packed call."""

    id: str
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    dtype: str = "f32"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.id


MIXED = (5, 0, 70, 33, 9, 0, 130), (7, 3, 70, 129, 0, 0, 64)
SMALL = (5, 0, 19, 3, 16), (7, 3, 20, 0, 33)
EVERYTHING = {
    "causal": True, "window": (9, 3), "softcap": 3.0, "alibi": True, "sinks": True, "dropout_p": 0.3, "scale": 0.4,
}  # fmt: skip


def cases(lengths: tuple[tuple[int, ...], tuple[int, ...]] = MIXED) -> Iterator[Case]:
    """Cases of mixed lengths, then of special ones: no keys, no rows, no sequences, one sequence."""
    yield Case("plain", *lengths)
    yield Case("causal", *lengths, options={"causal": True})
    yield Case("top-left", *lengths, dims=(40, 24), options={"causal": True, "causal_align": "top-left"})
    yield Case("window-f16", *lengths, dtype="f16", heads=(6, 1), options={"causal": True, "window": (6, 0)})
    yield Case("everything", *lengths, dims=(64, 32), options=EVERYTHING)
    yield Case("everything-bf16", *lengths, dtype="bf16", heads=(2, 2), options=EVERYTHING)
    yield Case("slopes-of-each", *lengths, options={"alibi": "each", "dropout_p": 0.5})
    yield Case("decoding", (1, 1, 0, 1), (9, 40, 3, 21), options={"causal": True})
    yield Case("no-keys", (3, 2), (0, 0))
    yield Case("no-rows", (0, 0), (3, 2))
    yield Case("no-sequences", (), ())
    yield Case("one", (21,), (21,), options={"causal": True})


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arrays of a case under the names of `aule.flash_attention_varlen`'s arguments, and its options."""
    rng = np.random.default_rng(seed)
    dtype, (heads_q, heads_kv), (dim, value_dim) = grid.NUMPY_DTYPES[case.dtype], case.heads, case.dims

    def values(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    at_q, at_k = (np.cumsum([0, *n], dtype=np.int32) for n in (case.lengths_q, case.lengths_kv))
    # k lies in a larger array: strides of packed rows are their own.
    wide = values(int(at_k[-1]), 2, heads_kv, dim)
    given: dict[str, Any] = {
        "q": values(int(at_q[-1]), heads_q, dim),
        "k": wide[:, 1],
        "v": values(int(at_k[-1]), heads_kv, value_dim),
        "cu_seqlens_q": at_q,
        "cu_seqlens_k": at_k,
        "causal": False,
    }
    given |= case.options
    alibi = given.pop("alibi", None)
    if alibi:
        shape = (len(case.lengths_q), heads_q) if alibi == "each" else (heads_q,)
        given["alibi_slopes"] = rng.uniform(0.01, 0.5, shape).astype(np.float32)
    if given.get("sinks"):
        given["sinks"] = rng.standard_normal(heads_q).astype(np.float32)
    if given.get("dropout_p"):
        given["seed"] = 0x123456789
    return given


def problem_of(given: dict[str, Any]) -> tuple[AttentionProblem, Operands]:
    """Problem and operands of a case's arrays, with the log-sum-exp."""
    given = dict(given)
    options: dict[str, Any] = {"cu_q": given.pop("cu_seqlens_q"), "cu_k": given.pop("cu_seqlens_k")}
    if "seed" in given:
        given["seed"] = seed_words(given["seed"])
    views = {}
    for name, value in (given | options).items():
        if isinstance(value, np.ndarray):
            views[name] = _int32(value) if value.dtype == np.int32 else grid.view_of(value)
    plain = {name: value for name, value in given.items() if name not in views}
    return varlen_problem(**views, max_q=None, max_k=None, **plain, return_lse=True)  # type: ignore[arg-type]


def _int32(array: Any) -> TensorView:
    return TensorView("i32", array.shape, (1,), "host", array)
