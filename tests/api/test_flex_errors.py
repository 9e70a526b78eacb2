"""`aule.flex_attention`: functions and calls that are refused, with the line and the remedy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import aule
from aule.errors import AuleError

torch = pytest.importorskip("torch")

from flex_cases import BATCH, HEADS, KEYS, QUERIES, causal  # noqa: E402
from torch.nn.attention import flex_attention as peer  # noqa: E402

DIM = 16


def inputs() -> list[Any]:
    shapes = [(BATCH, HEADS, QUERIES), (BATCH, HEADS, KEYS), (BATCH, HEADS, KEYS)]
    return [torch.zeros(*shape, DIM) for shape in shapes]


LEARNED, LONG = torch.zeros(HEADS, 8), torch.zeros(HEADS, 513)
HERE = r"test_flex_errors\.py:\d+\)"
REFUSED: dict[str, tuple[Any, str]] = {
    "arguments": (
        lambda s, b, h: s,
        r"expected score_mod as a function of 5 arguments \(score, batch, head, query, key\), "
        r"got \(s, b, h\) \(too many positional arguments\); give it these arguments",
    ),
    "no function": (3, r"expected score_mod as a function of 5 arguments .*, got int; pass a function"),
    "an array": (
        lambda s, b, h, q, k: LEARNED,
        r"expected score_mod to return one number, got an array of shape \[2, 8\] "
        rf"\(.*{HERE}; it is called for one score at a time",
    ),
    "part of an array": (lambda s, b, h, q, k: LEARNED[h], "got an array with 1 axes that are not indexed"),
    "nothing": (lambda s, b, h, q, k: None, "expected score_mod to return one number, got NoneType None"),
    "a branch": (
        lambda s, b, h, q, k: s if q > k else 0,
        rf"got a branch on a value that only the kernel knows \(.*{HERE}; "
        r"use torch\.where, or & and \| instead of `and` and `or`",
    ),
    "an operator": (
        lambda s, b, h, q, k: torch.lgamma(s),
        rf"got the operation lgamma \(.*{HERE}; functions may use arithmetic, ",
    ),
    "a method": (
        lambda s, b, h, q, k: s.cumsum(0),
        rf"got the method or attribute cumsum \(.*{HERE}; functions may use",
    ),
    "an option": (
        lambda s, b, h, q, k: torch.add(s, 1, out=LEARNED),
        rf"got .* unexpected keyword argument 'out' \(.*{HERE}",
    ),
    "math": (
        lambda s, b, h, q, k: math.exp(s),
        rf"as a Python number \(.*{HERE}; use functions of torch or NumPy, not of math",
    ),
    "a list": (
        lambda s, b, h, q, k: s + [0.1, 0.2][h],
        rf"where Python needs an int, such as the index of a list \(.*{HERE}; index a torch tensor",
    ),
    "divmod": (lambda s, b, h, q, k: divmod(q, 2)[0], rf"unsupported operand type.* divmod.* \(.*{HERE}"),
    "an index": (
        lambda s, b, h, q, k: s + LEARNED[h, 8],
        rf"got index 8 into an axis of length 8 \(.*{HERE}; stay inside",
    ),
    "an index from the end": (
        lambda s, b, h, q, k: s + LEARNED[h, -9],
        rf"got index -9 into an axis of length 8 \(.*{HERE}; stay inside of the captured array",
    ),
    "a head": (
        lambda s, b, h, q, k: s + LEARNED[h + 1, k],
        r"expected indices from -2 to 1 for axis 0 of a captured array of shape \[2, 8\], got 2 in batch 0, head 1; "
        "capture an array with that element",
    ),
    "a slice": (
        lambda s, b, h, q, k: s + LEARNED[h, :2],
        rf"got slice\(None, 2, None\) as an index \(.*{HERE}; index captured",
    ),
    "a float index": (lambda s, b, h, q, k: s + LEARNED[h, q / 8], rf"got a float as an index \(.*{HERE}; convert it"),
    "indices": (
        lambda s, b, h, q, k: LEARNED[h, q, k],
        rf"got 3 indices into an array of 2 axes \(.*{HERE}; give one for each",
    ),
    "an array that is too long": (
        lambda s, b, h, q, k: s + LONG[h].sum(),
        rf"got an operation on an array of shape \[513\] \(.*{HERE}; index captured arrays down to one number, or "
        "to at most 512",
    ),
    "a dot product": (
        lambda s, b, h, q, k: s + torch.dot(LEARNED[h], LONG[h]),
        rf"got a dot product of arrays of shape \[8\] and \[513\] \(.*{HERE}; pass two of one length",
    ),
    "an index into sums": (
        lambda s, b, h, q, k: s + (LEARNED[h] * 2)[k],
        rf"got an index that only the kernel knows into computed values \(.*{HERE}; index captured arrays so",
    ),
    "a device": (
        lambda s, b, h, q, k: s + LEARNED.to("meta")[h, q],
        "expected captured tensors on cpu like query, got meta; move it with .to",
    ),
    "a power": (lambda s, b, h, q, k: s**s, rf"got a power of two values \(.*{HERE}; use a number as the exponent"),
    "complex": (lambda s, b, h, q, k: s + LEARNED.to(torch.complex64)[h, 0], "a tensor captured by score_mod"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_functions(name: str) -> None:
    score_mod, message = REFUSED[name]
    with pytest.raises(AuleError, match=rf"\[flex_attention\] .*{message}"):
        aule.flex_attention(*inputs(), score_mod)


MASKS: dict[str, tuple[Any, str]] = {
    "arguments": (
        lambda b, h, q: q > 0,
        r"expected mask_mod as a function of 4 arguments \(batch, head, query, key\), "
        r"got \(b, h, q\) \(too many positional arguments\); give it these arguments",
    ),
    "an array": (
        lambda b, h, q, k: LEARNED > 0,
        r"expected mask_mod to return one number, got an array of shape \[2, 8\] "
        rf"\(.*{HERE}; it is called for one score at a time: index captured arrays down to one number, and return the ",
    ),
    "a batch": (
        lambda b, h, q, k: LEARNED[h, b * 8] > 0,
        r"expected indices from -8 to 7 for axis 1 of a captured array of shape \[2, 8\], got 8 in batch 1, head 0; "
        "capture an array with that element",
    ),
    "a device": (
        lambda b, h, q, k: LEARNED.to("meta")[h, 0] > 0,
        r"expected captured tensors on cpu like query, got meta; move it with \.to",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_refused_masks(name: str) -> None:
    mask_mod, message = MASKS[name]
    with pytest.raises(AuleError, match=rf"\[(flex_attention|create_block_mask)\] .*{message}"):
        aule.flex_attention(*inputs(), None, aule.create_block_mask(mask_mod, None, None, QUERIES, KEYS))


def test_elements_that_a_function_may_not_use_are_not_checked() -> None:
    q, k, v = inputs()
    chosen = aule.flex_attention(q, k, v, lambda s, b, h, q, k: torch.where(h < 1, LEARNED[h + 1, 0], s))
    keys = aule.flex_attention(q, k, v, lambda s, b, h, q, k: s + LEARNED[h, k])  # of which a mask may drop some
    assert torch.equal(chosen, torch.zeros_like(q)) and torch.equal(keys, chosen)


def test_numpy_arrays_without_a_head_are_refused() -> None:
    slopes = np.zeros(1, np.float32)
    with pytest.raises(AuleError, match=r"axis 0 of a captured array of shape \[1\], got 1 in batch 0, head 1"):
        aule.flex_attention(*(x.numpy() for x in inputs()), lambda s, b, h, q, k: s * slopes[h])


def test_refused_calls() -> None:
    q, k, v = inputs()

    def refused(message: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(AuleError, match=rf"\[flex_attention\] .*{message}"):
            aule.flex_attention(*args, **kwargs)

    refused("got both; leave return_lse out", q, k, v, return_lse=True, return_aux=aule.AuxRequest(lse=True))
    refused(r"got \[2, 36, 16\], \[2, 41, 16\], \[2, 41, 16\]; add axes of length 1", q[:, 0], k[:, 0], v[:, 0])
    refused("got 2 and 1; pass enable_gqa=True", q, k[:, :1], v[:, :1])
    refused("expected block_mask of create_block_mask, aule's or PyTorch's, got Tensor", q, k, v, None, q)
    for make in (aule.create_block_mask, peer.create_block_mask):
        other = make(causal, None, None, 128, 128, device="cpu")
        refused(
            r"expected a block mask for batch 2, 2 heads, 36 queries and 41 keys, got \[1, 1, 128, 128\]",
            q,
            k,
            v,
            None,
            other,
        )
    batches = aule.create_block_mask(causal, 3, None, QUERIES, KEYS)
    refused(r"got \[3, 1, 36, 41\]; make one with create_block_mask", q, k, v, None, batches)
    elsewhere = peer.create_block_mask(causal, None, None, QUERIES, KEYS, device="cpu").to("meta")
    refused("expected block_mask on cpu like query, got meta; move it with .to", q, k, v, None, elsewhere)
    refused("a tensor captured by a mask function", q, k, v, None, aule.create_block_mask(
        lambda b, h, q, k: SOFT[q] > 0, None, None, QUERIES, KEYS))  # fmt: skip
    with pytest.raises(AuleError, match=r"\[create_block_mask\] expected lengths of at least 0"):
        aule.create_block_mask(causal, None, None, -1, 5)


SOFT = torch.zeros(KEYS, requires_grad=True)
