"""Decoding with NumPy: errors, merging of states, and equality with plain attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aule
from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError

rng = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def paged(**changes: Any) -> Any:
    given = {
        "q": normal(2, 4, 16),
        "k_cache": normal(5, 4, 2, 16),
        "v_cache": normal(5, 4, 2, 16),
        "block_tables": np.array([[0, 1], [4, 99]], np.int32),
        "context_lens": np.array([8, 3], np.int32),
        "backend": "numpy",
    }
    return aule.flash_attention_paged(**(given | changes))


def test_a_contiguous_cache_is_plain_attention() -> None:
    q, k, v = normal(2, 6, 3, 20), normal(2, 2, 30, 20), normal(2, 2, 30, 12)
    out, lse = aule.decode_attention(q, k, v, window=9, return_lse=True, backend="numpy")
    wanted, wanted_lse = aule.flash_attention(q, k, v, window=9, return_lse=True, backend="numpy")
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-6)


def test_float64_and_lists_of_lengths() -> None:
    q, k, v = (x.astype(np.float64) for x in (normal(2, 2, 1, 8), normal(2, 2, 9, 8), normal(2, 2, 9, 8)))
    out = aule.decode_attention(q, k, v, context_lens=[4, 0], backend="numpy")
    wanted = aule.flash_attention(q[:1], k[:1, :, :4], v[:1, :, :4], backend="numpy")
    np.testing.assert_allclose(out[:1], wanted, rtol=1e-13)
    assert not out[1].any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"block_tables": np.array([[0, 5], [4, 0]], np.int32)},
            InvalidArgumentError,
            "pages 0..4, got 5 as page 1 of",
        ),
        (
            {"block_tables": np.array([[0, -1], [4, 0]], np.int32)},
            InvalidArgumentError,
            "got -1 as page 1 of sequence 0",
        ),
        (
            {"context_lens": np.array([9, 1], np.int32)},
            InvalidShapeError,
            "context_lens from 0 to 8, .* got 9 for sequence 0",
        ),
        ({"context_lens": np.array([-1, 1], np.int32)}, InvalidShapeError, "got -1 for sequence 0"),
        ({"context_lens": np.array([1], np.int32)}, InvalidShapeError, r"int32 \[batch = 2\], got int32 \[1\]"),
        ({"context_lens": np.array([1.0, 2.0])}, InvalidDtypeError, "context_lens as int32"),
        ({"block_tables": np.zeros(2, np.int32)}, InvalidShapeError, r"block_tables as int32 \[batch = 2, max_pages\]"),
        (
            {"k_cache": normal(5, 300, 2, 16), "v_cache": normal(5, 300, 2, 16)},
            InvalidShapeError,
            "pages of 1..256 keys",
        ),
        ({"layout": "DHN"}, InvalidArgumentError, "layout 'NHD' or 'HND', got 'DHN'"),
        ({"v_cache": normal(5, 4, 1, 16)}, InvalidShapeError, "k and v alike but for head_dim"),
        ({"k_cache": np.zeros((5, 4, 2, 16), np.int8)}, InvalidDtypeError, "k and v both of q's dtype, int8 or"),
        (
            {"k_cache": np.zeros((5, 4, 2, 16), np.int8), "v_cache": np.zeros((5, 4, 2, 16), np.int8)},
            InvalidArgumentError,
            "k_scale with a cache of int8",
        ),
        ({"k_scale": normal(5, 4, 2)}, InvalidArgumentError, "k_scale only with a cache of int8"),
        ({"q": normal(2, 16)}, InvalidShapeError, r"q of shape \[batch, heads_q, seq_q, head_dim\] or"),
        ({"q": normal(3, 4, 16)}, InvalidShapeError, "batch = 3"),
        ({"max_seqlen_q": 3}, InvalidArgumentError, "max_seqlen_q with cu_seqlens_q only"),
        ({"cu_seqlens_q": np.array([0, 1, 3], np.int32)}, InvalidShapeError, "cu_seqlens_q to rise from 0 to 2"),
        ({"block_tables": None}, InvalidArgumentError, "use aule.decode_attention for a contiguous cache"),
        ({"q": normal(2, 3, 16)}, InvalidShapeError, "heads_q to be a multiple of heads_kv, got heads_q 3"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        paged(**changes)
    assert str(caught.value).startswith("[flash_attention_paged] expected ")


def test_pages_that_nobody_uses_are_not_looked_at() -> None:
    q, k, v = normal(2, 4, 16), normal(5, 4, 2, 16), normal(5, 4, 2, 16)
    clean = paged(q=q, k_cache=k, v_cache=v)
    k[2:4], v[2:4], k[4, 3:], v[4, 3:] = np.nan, np.nan, np.nan, np.nan
    assert clean.shape == (2, 4, 16) and (paged(q=q, k_cache=k, v_cache=v) == clean).all()


def test_states_are_merged() -> None:
    q, k, v = normal(2, 4, 3, 16), normal(2, 2, 20, 16), normal(2, 2, 20, 16)

    def over(keys: slice) -> Any:
        return aule.flash_attention(q, k[:, :, keys], v[:, :, keys], causal=False, return_lse=True, backend="numpy")

    whole, whole_lse = over(slice(None))
    out, lse = aule.merge_states(*over(slice(0, 7)), *over(slice(7, None)))
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)
    nothing = np.full_like(whole, np.nan), np.full_like(whole_lse, -np.inf)
    out, lse = aule.merge_states(*nothing, whole, whole_lse)
    assert (out == whole).all() and (lse == whole_lse).all()
    out, lse = aule.merge_states(*nothing, *nothing)
    assert not out.any() and (lse == -np.inf).all()
    with pytest.raises(InvalidShapeError, match=r"\[merge_states\] expected o_a and o_b of one shape"):
        aule.merge_states(whole, whole_lse[0], whole, whole_lse)


def test_states_of_tensors_are_merged() -> None:
    torch = pytest.importorskip("torch")
    parts = [normal(2, 3, 8), normal(2, 3), normal(2, 3, 8), normal(2, 3)]
    parts[1][0], parts[0][0] = -np.inf, np.nan
    wanted = aule.merge_states(*parts)
    found = aule.merge_states(*(torch.from_numpy(x) for x in parts))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-6)
