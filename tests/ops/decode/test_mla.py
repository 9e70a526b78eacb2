"""Multi-head latent attention: FlashMLA's cases of dense decoding at small size, sparse decoding, and latent caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import decode_cases
import devices
import grid
import ml_dtypes
import numpy as np
import pytest

import aule

pytestmark = pytest.mark.device

DIM, VALUES, PAGE = 576, 512, 64
SCALE = 192**-0.5
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One call: keys of each sequence, query heads, query tokens (0: no token axis)."""

    lens: tuple[int, ...]
    heads: int
    tokens: int
    dtype: str = "bf16"
    causal: bool = True
    page: int = PAGE

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.dtype}-h{self.heads}-t{self.tokens}-{kind}-page{self.page}"


CASES = (
    Case((140, 20, 0, 65), 16, 1),
    Case((70, 130), 128, 0),
    Case((33, 140, 4), 16, 2, causal=False),
    Case((90, 64), 64, 2, dtype="f16", page=16),
    Case((40, 3, 17), 5, 4, dtype="f32", page=3),
)


def make(case: Case, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """q, pool, tables and lengths, of FlashMLA's magnitudes; unused entries of tables are no pages, and unused keys are
    NaN."""
    rng = np.random.default_rng(seed)
    used = [-(-n // case.page) for n in case.lens]
    pages = sum(used) + 2
    dtype = grid.NUMPY_DTYPES[case.dtype]
    pool = np.full((pages, case.page, DIM), np.nan, dtype)
    table = rng.choice(decode_cases.NOWHERE, (len(case.lens), max(used) + 1)).astype(np.int32)
    order = list(rng.permutation(pages))
    for n, (length, count) in enumerate(zip(case.lens, used, strict=True)):
        table[n, :count] = mine = [order.pop() for _ in range(count)]
        for i, page in enumerate(mine):
            keys = min(length - i * case.page, case.page)
            pool[page, :keys] = np.clip(rng.standard_normal((keys, DIM)) / 10, -1, 1)
    shape = (len(case.lens), case.heads, *([case.tokens] if case.tokens else []), DIM)
    q = np.clip(rng.standard_normal(shape), -1, 1).astype(dtype)
    return q, pool, table, np.array(case.lens, np.int32)


def expected_row(q: Array, keys: Array) -> tuple[Array, Array]:
    """Rows of q over some keys, in float64, and their log-sum-exps."""
    if len(keys) == 0:
        return np.zeros((len(q), VALUES)), np.full(len(q), -np.inf)
    s = q.astype(np.float64) @ keys.T * SCALE
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    return p / total @ keys[:, :VALUES], (m + np.log(total))[:, 0]


def expected(case: Case, q: Array, pool: Array, table: Array) -> tuple[Array, Array]:
    tokens = max(case.tokens, 1)
    q4 = q.reshape(len(case.lens), case.heads, tokens, DIM)
    out, lse = np.zeros((*q4.shape[:3], VALUES)), np.zeros(q4.shape[:3])
    for n, length in enumerate(case.lens):
        keys = pool[table[n, : -(-length // case.page)]].reshape(-1, DIM)[:length].astype(np.float64)
        for t in range(tokens):
            end = max(length - tokens + t + 1, 0) if case.causal else length
            out[n, :, t], lse[n, :, t] = expected_row(q4[n, :, t], keys[:end])
    return out.reshape(*q.shape[:-1], VALUES), lse.reshape(q.shape[:-1])


def close(found: Array, wanted: Array) -> None:
    """FlashMLA's tolerance: 8e-4 absolute or 2.01 / 128 relative, and the directions agree."""
    x, y = found.astype(np.float64), wanted
    assert np.isfinite(x).all()
    np.testing.assert_array_less(np.abs(x - y), np.maximum(8e-4, 2.01 / 128 * np.abs(y)) + 1e-30)
    assert 1 - 2 * (x * y).sum() / max((x * x + y * y).sum(), 1e-12) < 5e-6 or not y.any()


@pytest.fixture(params=("numpy", "cuda", "vulkan", "opencl", "webgpu", "cpu"), scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "numpy":
        devices.need(name)
    return name


def spare(backend: str, number: int) -> None:
    if backend != "numpy":
        devices.spare(devices.device(backend), number)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense(backend: str, case: Case) -> None:
    spare(backend, CASES.index(case))
    q, pool, table, lens = make(case)
    out, lse = aule.mla_decode(q, pool, table, lens, scale=SCALE, causal=case.causal, return_lse=True, backend=backend)
    wanted, wanted_lse = expected(case, q, pool, table)
    close(out, wanted)
    known = np.isfinite(wanted_lse)
    assert (np.isneginf(lse) == ~known).all()
    np.testing.assert_allclose(lse[known], wanted_lse[known], rtol=2.01 / 65536, atol=1e-4)


def test_sparse(backend: str) -> None:
    """Every token has its own keys, in any order, with holes; one token has none."""
    spare(backend, 0)
    case = CASES[1]
    _, pool, _, _ = make(case)
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 16, 3, DIM)).astype(pool.dtype)
    places = np.flatnonzero(np.isfinite(pool.reshape(-1, DIM).astype(np.float32)).all(-1))
    indices = np.full((2, 3, 70), -1, np.int32)
    for row in indices.reshape(-1, 70)[:-1]:
        count = rng.integers(1, 70)
        row[rng.permutation(70)[:count]] = rng.choice(places, count, replace=False)
    out = aule.mla_decode(q, pool, indices=indices, scale=SCALE, backend=backend)
    keys = pool.reshape(-1, DIM).astype(np.float64)
    for n, t in np.ndindex(2, 3):
        chosen = indices[n, t][indices[n, t] >= 0]
        close(out[n, :, t], expected_row(q[n, :, t], keys[chosen])[0])
    single = aule.mla_decode(
        np.ascontiguousarray(q[:, :, 0]), pool, indices=indices[:, 0].astype(np.int64), scale=SCALE, backend=backend
    )
    np.testing.assert_array_equal(single.view(np.uint16), out[:, :, 0].view(np.uint16))


def test_fp8(backend: str) -> None:
    spare(backend, 1)
    q, pool, table, lens = make(CASES[3])
    values = np.nan_to_num(pool.astype(np.float32))
    scale = np.abs(values).max(-1) / 448
    coded = (values / np.maximum(scale, 1e-9)[..., None]).astype(ml_dtypes.float8_e4m3fn)
    scale[~np.isfinite(pool.astype(np.float32)).all(-1)] = np.nan
    out = aule.mla_decode(q, coded, table, lens, scale=SCALE, kv_scale=scale.astype(np.float32), backend=backend)
    rounded = coded.astype(np.float32) * np.nan_to_num(scale)[..., None]
    close(out, expected(CASES[3], q, rounded, table)[0])


@pytest.mark.parametrize(("layout", "quantize"), [("NHD", None), ("HND", "fp8")])
def test_latent_cache(layout: Any, quantize: Any) -> None:
    """The cache keeps one array, serves `attend` with any option, and copies pages of forked sequences."""
    rng = np.random.default_rng(1)
    cache = aule.KVCache(8, 1, DIM, page_size=16, value_dim=VALUES, latent=True, layout=layout, quantize=quantize)
    other = aule.KVCache(8, 1, DIM, page_size=16, value_dim=VALUES, layout=layout, quantize=quantize)
    assert cache.page_bytes < 0.55 * other.page_bytes
    seqs = [[x.allocate(), x.allocate()] for x in (cache, other)]
    k = rng.standard_normal((2, 1, 20, DIM)).astype(np.float32)
    q = rng.standard_normal((2, 8, 2, DIM)).astype(np.float32)
    for x, own, extra in ((cache, seqs[0], ()), (other, seqs[1], (k[..., :VALUES],))):
        x.append(own, k, *extra)
        x.free(own[1])
        own[1] = x.fork(own[0])
        x.append(own[1], k[1, :, :3].swapaxes(0, 1), *(e[1, :, :3].swapaxes(0, 1) for e in extra))
    tolerance = 0.06 if quantize else 2e-6  # the other cache has a scale for the values alone
    for options in ({}, {"scale": SCALE}, {"softcap": 5.0}, {"cascade": True}):
        found, wanted = (x.attend(q, own, **options) for x, own in ((cache, seqs[0]), (other, seqs[1])))
        np.testing.assert_allclose(found, wanted, atol=tolerance)
    with pytest.raises(aule.InvalidArgumentError, match="no v for a latent cache"):
        cache.append(seqs[0], k, k[..., :VALUES])
    with pytest.raises(aule.InvalidArgumentError, match="expected v, got none"):
        other.append(seqs[1], k)
    with pytest.raises(aule.InvalidArgumentError, match="one key head"):
        aule.KVCache(8, 2, DIM, latent=True)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    q, pool, table, lens = make(CASES[3])
    wanted = aule.mla_decode(q, pool, table, lens, scale=SCALE, backend="cpu")
    given = [torch.from_numpy(x) for x in (q, pool, table, lens)]
    out = torch.empty(*q.shape[:-1], VALUES, dtype=torch.float16)
    assert aule.mla_decode(*given, scale=SCALE, backend="cpu", out=out) is out
    np.testing.assert_array_equal(out.numpy(), wanted)
    indices = torch.tensor([[[3, -1, 0], [1, 2, 3]], [[-1, -1, -1], [0, 5, -1]]])
    pool = torch.randn(3, 4, DIM)
    queries = torch.randn(2, 4, 2, DIM)
    found = aule.mla_decode(queries, pool, indices=indices, scale=SCALE, backend="cpu")
    again = aule.mla_decode(queries.numpy(), pool.numpy(), indices=indices.numpy(), scale=SCALE, backend="numpy")
    np.testing.assert_allclose(found.numpy(), again, atol=1e-5)
    assert (found[1, :, 0] == 0).all()
    with pytest.raises(aule.InvalidArgumentError, match="expected indices below 12"):
        aule.mla_decode(queries, pool, indices=indices + 2**32, scale=SCALE, backend="cpu")
    assert aule.explain(aule.mla_decode, *given, scale=SCALE, backend="cpu").op == "mla_decode"
    for x in (queries, queries[:, :, 0]):  # with and without the axis of tokens
        chosen = indices if x.ndim == 4 else indices[:, 0]
        found = aule.explain(aule.mla_decode, x, pool, indices=chosen, scale=SCALE, backend="cpu")
        assert found.op == "mla_decode" and found.launches


WRONG = {
    "neither": (aule.InvalidArgumentError, "block_tables and context_lens, or indices", {"block_tables": None}),
    "both": (
        aule.InvalidArgumentError,
        "got block_tables and context_lens and indices",
        {"indices": np.zeros((2, 64), np.int32)},
    ),
    "pool": (aule.InvalidShapeError, r"kv_cache of \[pages, page, dim\]", {"kv_cache": np.zeros((2, 3), np.float16)}),
    "value_dim": (aule.InvalidShapeError, "value_dim from 1 to the 576", {"value_dim": 600}),
    "q": (aule.InvalidShapeError, "q and kv_cache of equal dim, got q", {"q": np.zeros((2, 4, 64), np.float16)}),
    "dtype": (
        aule.InvalidDtypeError,
        "kv_cache of q's dtype, or int8 or float8_e4m3fn with kv_scale, got float32 without",
        {"kv_cache": np.zeros((4, 16, DIM), np.float32)},
    ),
    "scales": (aule.InvalidArgumentError, "kv_scale only with", {"kv_scale": np.ones((4, 16), np.float32)}),
    "some scales": (
        aule.InvalidShapeError,
        r"kv_scale of \[pages, page\] = \[4, 16\], got \[4\]",
        {"kv_cache": np.zeros((4, 16, DIM), np.int8), "kv_scale": np.ones(4, np.float32)},
    ),
    "option": (TypeError, "mla_decode", {"window": 3}),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    kind, message, changed = WRONG[name]
    q, pool, table, lens = make(CASES[3])
    given = {"q": q, "kv_cache": pool, "block_tables": table, "context_lens": lens, "scale": SCALE} | changed
    with pytest.raises(kind, match=message):
        aule.mla_decode(**given)


def test_indices_are_refused() -> None:
    q, pool, _, _ = make(CASES[1])
    for indices, message in (
        (np.zeros((2, 3, 4), np.int32), r"indices of \[2, topk\]"),
        (np.zeros((2, 4), np.float32), "indices of integers"),
        (np.full((2, 4), 2**32 + 1), "got 4294967297"),  # no place of the pool, though its low half is
    ):
        with pytest.raises(aule.AuleError, match=message):
            aule.mla_decode(q, pool, indices=indices, scale=SCALE)
    with pytest.raises(aule.InvalidShapeError, match="without gaps"):
        aule.mla_decode(q, pool[:, :48], indices=np.zeros((2, 4), np.int32), scale=SCALE)
