"""Tile lists that a mask keeps for its next use."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="lists are kept by the CPU engine and on CUDA")

import aule  # noqa: E402

SEQ = 150


def launched() -> dict[str, int]:
    """How often the tiles of a mask were listed, by direction."""
    calls = aule.dispatch_stats()["calls"]
    return {
        way: sum(
            row["count"] for row in calls if row["direction"] == way and any("tiles" in x for x in row["launches"])
        )
        for way in ("forward", "backward")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mask_is_listed_again_only_if_it_changed(dtype: Any) -> None:
    documents = torch.arange(SEQ) // 40
    given = [torch.randn(1, 2, SEQ, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    mask = aule.create_block_mask(lambda b, h, q, kv: documents[q] == documents[kv], None, None, SEQ, SEQ)
    aule.reset_dispatch_stats()
    for length, listed in ((None, 1), (None, 1), (60, 2), (None, 2)):
        if length is not None:
            documents.copy_(torch.arange(SEQ) // length)
        out = aule.flex_attention(*given, block_mask=mask)
        same = documents[:, None] == documents
        expected = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=same)
        torch.testing.assert_close(out, expected)
        gradients = [torch.autograd.grad(x.sin().sum(), given) for x in (out, expected)]
        for found, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(found, theirs)
        assert launched() == {"forward": listed, "backward": listed}


def test_a_mask_keeps_lists_for_few_kinds_of_calls() -> None:
    mask = aule.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, SEQ, SEQ)
    for heads in range(1, 13):
        aule.flex_attention(*(torch.randn(1, heads, SEQ, 16) for _ in range(3)), block_mask=mask)
    assert 1 <= len(mask.lists) <= 8


def test_tensors_whose_changes_are_not_counted_are_listed_each_time() -> None:
    with torch.inference_mode():
        limits = torch.full((SEQ,), 40)
    mask = aule.create_block_mask(lambda b, h, q, kv: kv < limits[q], None, None, SEQ, SEQ)
    given = [torch.randn(1, 2, SEQ, 16) for _ in range(3)]
    for limit in (40, 90):
        with torch.inference_mode():
            limits.fill_(limit)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *given, attn_mask=(torch.arange(SEQ) < limit).expand(SEQ, SEQ)
        )
        torch.testing.assert_close(aule.flex_attention(*given, block_mask=mask), expected)
    assert not mask.lists
