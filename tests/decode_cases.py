"""Decoding calls that every backend is tested on: caches of all kinds, with garbage wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grid
import ml_dtypes
import numpy as np

from aule.frontends.numpy import view
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.sequences import E4M3
from aule.ops.decode.validate import DecodeOperands, decode_problem

NOWHERE = (-7, 10**6)
"""Page numbers in unused entries of block tables."""


@dataclass(frozen=True)
class Case:
    """One call: the keys of each sequence, and the query rows of each, or of all."""

    id: str
    lens: tuple[int, ...]
    rows: int | tuple[int, ...] = 1
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    dtype: str = "f32"
    cache: str = ""
    page: int = 0
    layout: str = "NHD"
    shared: int = 0
    """Pages that all sequences have in common."""
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.id


EVERYTHING = {"window": (40, 3), "softcap": 3.0, "alibi": True, "sinks": True, "scale": 0.4}


def cases() -> Iterator[Case]:
    """Few cases that share kernels where possible, since compiling takes the time."""
    yield Case("contiguous", (70, 1, 0, 33))
    yield Case("pages", (16, 17, 0, 1, 130, 32), heads=(8, 2), dims=(64, 64), dtype="f16", page=16, shared=1)
    yield Case("pages-of-one", (5, 0, 70), heads=(8, 1), dims=(80, 80), dtype="bf16", page=1, layout="HND")
    yield Case("pages-of-256", (256, 300, 255), heads=(1, 1), dims=(128, 128), dtype="bf16", page=256, layout="HND")
    yield Case("tokens", (37, 5, 64, 3), 5, (4, 1), (64, 64), page=16, options={"window": 20, "softcap": 2.0})
    yield Case("ragged", (37, 5, 0, 21, 90), (3, 5, 0, 1, 19), (6, 2), page=3, options=EVERYTHING)
    yield Case("int8", (64, 13, 0, 150), heads=(4, 1), dims=(64, 64), dtype="f16", cache="i8", page=16)
    yield Case("fp8", (64, 13, 7), (2, 9, 0), (2, 2), (48, 48), cache="e4m3", page=3, options={"alibi": True})
    yield Case("fp8-odd", (5, 31), 1, (3, 1), (33, 7), cache="e4m3", page=2)
    yield Case("odd", (41, 17), 2, (3, 3), (33, 21), options={"causal": False, "sinks": True})
    yield Case("everything", (129, 2, 50), 3, (8, 2), (64, 32), "bf16", options=EVERYTHING)
    yield Case("parts", (2100, 700), heads=(4, 1), dims=(16, 16), page=16, options={"sinks": True})
    yield Case("prefill", (90, 5, 70, 0), (80, 1, 66, 2), (2, 1), (32, 32), "f16", page=16, options={"window": 50})
    yield Case("one-sided-window", (60, 9), 1, options={"window": (7, None), "causal": False})
    yield Case("ragged-bf16", (4, 30, 9), (4, 1, 2), (2, 2), (64, 64), "bf16", page=16)


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arrays of a case under the names of the public functions' arguments, and its options."""
    rng = np.random.default_rng(seed)
    batch, (heads, heads_kv) = len(case.lens), case.heads
    options = dict(case.options)
    made: dict[str, Any] = {"context_lens": np.array(case.lens, np.int32)}

    def floats(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(grid.NUMPY_DTYPES[case.dtype])

    if isinstance(case.rows, tuple):
        made["q"] = floats(sum(case.rows), heads, case.dims[0])
        made["cu_seqlens_q"] = np.cumsum((0, *case.rows)).astype(np.int32)
    elif case.rows == 1 and case.page:
        made["q"] = floats(batch, heads, case.dims[0])
    else:
        made["q"] = floats(batch, heads, case.rows, case.dims[0])
    if options.pop("alibi", False):
        made["alibi_slopes"] = rng.uniform(0.01, 0.3, heads).astype(np.float32)
    if options.pop("sinks", False):
        made["sinks"] = rng.standard_normal(heads).astype(np.float32)

    if not case.page:
        longest = max(case.lens) + 3
        for name, dim in zip("kv", case.dims, strict=True):
            cache = floats(batch, longest, heads_kv, dim)  # so that k and v are strided views
            for n, length in enumerate(case.lens):
                cache[n, length:] = np.nan
            made[name] = cache.transpose(0, 2, 1, 3)
        return made | options

    used = [-(-n // case.page) for n in case.lens]
    pages = case.shared + sum(max(n - case.shared, 0) for n in used) + 3
    order = list(rng.permutation(pages))
    common = [order.pop() for _ in range(case.shared)]
    table = rng.choice(NOWHERE, (batch, max(used) + 2)).astype(np.int32)
    covered = np.zeros((pages, case.page), bool)
    for n, count in enumerate(used):
        mine = [*common, *(order.pop() for _ in range(max(count - case.shared, 0)))][:count]
        table[n, :count] = mine
        for i, page in enumerate(mine):
            covered[page, : min(case.lens[n] - i * case.page, case.page)] = True
    made["block_tables"] = table
    for name, dim in zip("kv", case.dims, strict=True):
        pool: Any = rng.standard_normal((pages, case.page, heads_kv, dim)).astype(np.float32)
        if case.cache:
            scale = (np.abs(pool).max(-1) / (127 if case.cache == "i8" else 448)).astype(np.float32)
            pool = _quantised(pool / scale[..., None], case.cache)
            scale[~covered] = np.nan
            made[f"{name}_scale"] = _laid(scale, case)
        else:
            pool = pool.astype(grid.NUMPY_DTYPES[case.dtype])
            pool[~covered] = np.nan
        made[name] = _laid(pool, case)
    return made | {"layout": case.layout} | options


def _quantised(values: Any, cache: str) -> Any:
    if cache == "i8":
        return np.rint(values).astype(np.int8)
    steps = E4M3[:127]  # from 0 up to 448; the code after it is no number
    nearest = np.abs(np.abs(values)[..., None] - steps).argmin(-1).astype(np.uint8)
    return (nearest | np.where(values < 0, 0x80, 0).astype(np.uint8)).view(ml_dtypes.float8_e4m3fn)


def _laid(pool: Any, case: Case) -> Any:
    return np.ascontiguousarray(pool.swapaxes(1, 2)) if case.layout == "HND" else pool


def problem_of(case: Case, given: dict[str, Any]) -> tuple[DecodeProblem, DecodeOperands]:
    """The problem of a case's arrays."""
    views: dict[str, Any] = {n: view(x, n) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    op = "flash_attention_paged" if case.page else "decode_attention"
    return decode_problem(op, **views, return_lse=True)
