"""Validation: every bad call has its own message, every good call a normal form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from grid import view_of

from aule.errors import AuleError, DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.problem import UNBOUNDED
from aule.ops.attention.validate import Operands, attention_problem
from aule.view import TensorView


def f32(*shape: int) -> TensorView:
    return view_of(np.zeros(shape, np.float32))


def typed(dtype: str, *shape: int) -> TensorView:
    """A view of any dtype; the storage does not matter to validation where it fails."""
    return dataclasses.replace(f32(*shape), dtype=dtype)


def bools(*shape: int) -> TensorView:
    return view_of(np.ones(shape, np.bool_))


def call(**changes: Any) -> Any:
    arguments = {"q": f32(2, 4, 5, 8), "k": f32(2, 2, 7, 8), "v": f32(2, 2, 7, 6), **changes}
    return attention_problem(**arguments)


def test_shapes_and_defaults() -> None:
    problem, operands = call()
    assert (problem.batch, problem.heads_q, problem.heads_kv, problem.group) == (2, 4, 2, 2)
    assert (problem.seq_q, problem.seq_kv, problem.head_dim, problem.value_dim) == (5, 7, 8, 6)
    assert problem.scale == pytest.approx(1 / math.sqrt(8))
    assert problem.window == (UNBOUNDED, UNBOUNDED)
    assert (problem.softcap, problem.mask, problem.bias, problem.alibi, problem.sinks) == (
        0.0,
        None,
        None,
        False,
        False,
    )
    assert operands.rank == 4
    assert operands.out_shape == (2, 4, 5, 6)
    assert operands.lse_shape == (2, 4, 5)
    assert hash(problem) == hash(call()[0])


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_missing_axes_have_stride_zero(rank: int) -> None:
    lead = (1, 3)[4 - rank :] if rank < 4 else (1, 3)
    q, k = f32(*lead, 5, 8), f32(*lead, 7, 8)
    problem, operands = attention_problem(q, k, k)
    heads = 1 if rank == 2 else 3
    assert operands.q.shape == (1, heads, 5, 8)
    assert operands.k.storage.shape == (1, heads, 7, 8)
    assert operands.q.strides[: 4 - rank] == (0,) * (4 - rank)
    assert operands.out_shape == (*lead, 5, 8)
    assert operands.lse_shape == (*lead, 5)
    assert problem.batch == 1
    assert np.shares_memory(operands.q.storage, q.storage)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 7), (0, 0, 7, 1)),
        ((1, 7), (0, 0, 0, 1)),
        ((5, 1), (0, 0, 1, 0)),
        ((4, 5, 7), (0, 35, 7, 1)),
        ((2, 1, 1, 7), (7, 0, 0, 1)),
        ((2, 4, 5, 7), (140, 35, 7, 1)),
        ((1, 1, 1, 1), (0, 0, 0, 0)),
    ],
)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_mask_and_bias_broadcast_without_copy(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    problem, operands = call(**{name: view_of(array)})
    view = getattr(operands, name)
    assert getattr(problem, name) == "f32"
    assert view.shape == (2, 4, 5, 7)
    assert view.strides == strides
    assert np.shares_memory(view.storage, array)
    np.testing.assert_array_equal(view.storage, np.broadcast_to(array, (2, 4, 5, 7)))


def test_device_views_keep_storage_and_offset() -> None:
    handle = object()
    views = {n: TensorView("f16", (5, 8), (8, 1), "cuda:0", handle, 16) for n in "qkv"}
    _, operands = attention_problem(**views, mask=TensorView("bool", (1, 5), (5, 1), "cuda:0", handle, 3))
    assert operands.q.storage is handle
    assert operands.q.offset == 16
    assert operands.mask is not None
    assert (operands.mask.strides, operands.mask.offset) == ((0, 0, 0, 1), 3)


def test_alibi_and_sinks() -> None:
    problem, operands = call(alibi_slopes=f32(4), sinks=f32(4))
    assert problem.alibi and problem.sinks
    assert operands.alibi is not None and operands.sinks is not None
    assert (operands.alibi.shape, operands.alibi.strides) == ((2, 4), (0, 1))
    assert operands.sinks.shape == (4,)
    _, operands = call(alibi_slopes=f32(2, 4))
    assert operands.alibi is not None
    assert operands.alibi.strides == (4, 1)


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        (None, True, (-1, -1)),
        (4, True, (3, 0)),
        (4, False, (3, 3)),
        (np.int64(1), False, (0, 0)),
        ((3, 0), False, (3, 0)),
        ((None, 2), False, (-1, 2)),
        ([2, -1], False, (2, -1)),
        ((0, 0), True, (0, 0)),
        (1 << 40, True, (-1, 0)),
        ((1 << 40, 5), False, (-1, 5)),
    ],
)
def test_window(window: Any, causal: bool, expected: tuple[int, int]) -> None:
    assert call(window=window, causal=causal)[0].window == expected


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, np.float32(0.25), 3])
def test_any_finite_scale(scale: Any) -> None:
    assert call(scale=scale)[0].scale == float(scale)


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 4, 5, 8), (0, 2, 7, 8), (0, 2, 7, 8)),
        ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
        ((2, 0, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
        ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((2, 4, 5, 256), (2, 4, 0, 256), (2, 4, 0, 1)),
    ],
)
def test_empty_axes_are_allowed(shapes: tuple[tuple[int, ...], ...]) -> None:
    problem, operands = attention_problem(*(f32(*shape) for shape in shapes), mask=bools(1, 1, 1, 1))
    assert isinstance(operands, Operands)
    assert problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv == 0


def test_f64_is_a_valid_problem() -> None:
    view = view_of(np.zeros((3, 8)))
    assert attention_problem(view, view, view, mask=view_of(np.zeros((3, 3))))[0].dtype == "f64"


BAD: dict[str, tuple[type[AuleError], str, dict[str, Any]]] = {
    "rank 1": (InvalidShapeError, r"expected q of shape \[seq, head_dim\].* got \[8\]", {"q": f32(8)}),
    "rank 5": (InvalidShapeError, r"expected v of shape .* got \[1, 1, 1, 7, 8\]", {"v": f32(1, 1, 1, 7, 8)}),
    "mixed ranks": (InvalidShapeError, r"same number of axes, got q \[2, 4, 5, 8\], k \[7, 8\]", {"k": f32(7, 8)}),
    "batch of k": (InvalidShapeError, "q and k of equal batch, got q 2 and k 3", {"k": f32(3, 2, 7, 8)}),
    "batch of v": (InvalidShapeError, "q and v of equal batch, got q 2 and v 1", {"v": f32(1, 2, 7, 8)}),
    "heads of v": (InvalidShapeError, "k and v of equal heads, got k 2 and v 4", {"v": f32(2, 4, 7, 8)}),
    "seq of v": (InvalidShapeError, "k and v of equal seq, got k 7 and v 6", {"v": f32(2, 2, 6, 8)}),
    "head_dim of k": (InvalidShapeError, "q and k of equal head_dim, got q 8 and k 9", {"k": f32(2, 2, 7, 9)}),
    "head groups": (
        InvalidShapeError,
        "multiple of heads_kv, got heads_q 4 and heads_kv 3",
        {"k": f32(2, 3, 7, 8), "v": f32(2, 3, 7, 8)},
    ),
    "no kv heads": (InvalidShapeError, "heads_kv 0", {"k": f32(2, 0, 7, 8), "v": f32(2, 0, 7, 8)}),
    "head_dim 0": (
        InvalidShapeError,
        r"head_dim of q and k in 1\.\.576, got 0",
        {"q": f32(2, 4, 5, 0), "k": f32(2, 2, 7, 0)},
    ),
    "head_dim 577": (
        InvalidShapeError,
        r"head_dim of q and k in 1\.\.576, got 577",
        {"q": f32(2, 4, 5, 577), "k": f32(2, 2, 7, 577)},
    ),
    "value_dim 0": (InvalidShapeError, r"head_dim of v in 1\.\.576, got 0", {"v": f32(2, 2, 7, 0)}),
    "value_dim 577": (InvalidShapeError, r"head_dim of v in 1\.\.576, got 577", {"v": f32(2, 2, 7, 577)}),
    "integer q": (
        InvalidDtypeError,
        "expected q of float32, float16, bfloat16 or float64, got int32",
        {"q": typed("i32", 5, 8)},
    ),
    "boolean k": (InvalidDtypeError, "expected k of float32, .* got bool", {"k": typed("bool", 2, 2, 7, 8)}),
    "complex v": (InvalidDtypeError, "expected v of float32, .* got complex64", {"v": typed("complex64", 2, 2, 7, 8)}),
    "mixed dtypes": (
        InvalidDtypeError,
        "one dtype, got q float32, k float16, v float32; convert them to float32",
        {"k": typed("f16", 2, 2, 7, 8)},
    ),
    "mixed devices": (
        DeviceMismatchError,
        "one device, got q on host, k on cuda:0, v on host; move them to host",
        {"k": dataclasses.replace(f32(2, 2, 7, 8), device="cuda:0")},
    ),
    "device of mask": (
        DeviceMismatchError,
        "mask on cuda:0",
        {"mask": dataclasses.replace(bools(5, 7), device="cuda:0")},
    ),
    "mask broadcast": (
        InvalidShapeError,
        r"mask broadcastable to .* = \[2, 4, 5, 7\], got \[5, 6\]",
        {"mask": bools(5, 6)},
    ),
    "mask batch": (InvalidShapeError, r"= \[2, 4, 5, 7\], got \[3, 1, 1, 7\]", {"mask": bools(3, 1, 1, 7)}),
    "mask of kv heads": (InvalidShapeError, r"got \[2, 2, 5, 7\]", {"mask": bools(2, 2, 5, 7)}),
    "mask rank 1": (
        InvalidShapeError,
        r"mask broadcastable to .*got \[7\]; pass mask\[None, None, None, :\]",
        {"mask": bools(7)},
    ),
    "mask rank 5": (InvalidShapeError, "mask broadcastable to ", {"mask": bools(1, 1, 1, 5, 7)}),
    "integer mask": (InvalidDtypeError, "got int64; pass mask != 0, in which True", {"mask": typed("i64", 5, 7)}),
    "byte mask": (InvalidDtypeError, "got uint8", {"mask": typed("u8", 5, 7)}),
    "wide mask": (InvalidDtypeError, "got float64; convert mask to float32", {"mask": typed("f64", 5, 7)}),
    "boolean bias": (InvalidDtypeError, "got bool; pass a boolean array as mask", {"bias": bools(5, 7)}),
    "integer bias": (InvalidDtypeError, "bias of floats, got int32", {"bias": typed("i32", 5, 7)}),
    "bias broadcast": (InvalidShapeError, r"bias broadcastable to .* got \[4, 7\]", {"bias": f32(4, 7)}),
    "alibi dtype": (
        InvalidDtypeError,
        "alibi_slopes of float32, got float16; convert alibi_slopes",
        {"alibi_slopes": typed("f16", 4)},
    ),
    "alibi shape": (InvalidShapeError, r"= \[4\] or .* = \[2, 4\], got \[2\]", {"alibi_slopes": f32(2)}),
    "sinks dtype": (InvalidDtypeError, "sinks of float32, got bfloat16", {"sinks": typed("bf16", 4)}),
    "sinks shape": (InvalidShapeError, r"sinks of shape \[heads_q\] = \[4\], got \[2, 4\]", {"sinks": f32(2, 4)}),
    "window 0": (InvalidArgumentError, "int window >= 1, got 0", {"window": 0}),
    "window negative": (InvalidArgumentError, "int window >= 1, got -3", {"window": -3}),
    "window left": (InvalidArgumentError, "left side of window >= 0, got -2", {"window": (-2, 0)}),
    "window right": (InvalidArgumentError, "right side of window >= 0, got -5", {"window": (2, -5)}),
    "window length": (InvalidArgumentError, r"window as \(left, right\), got 3 values", {"window": (1, 2, 3)}),
    "window float": (InvalidArgumentError, "window to be an int or None, got 2.5", {"window": 2.5}),
    "window bool": (InvalidArgumentError, "window to be an int or None, got True", {"window": True}),
    "window side float": (InvalidArgumentError, "left side of window to be an int", {"window": (1.0, 2)}),
    "scale nan": (InvalidArgumentError, "finite scale, got nan", {"scale": math.nan}),
    "scale inf": (InvalidArgumentError, "finite scale, got -inf", {"scale": -math.inf}),
    "scale text": (InvalidArgumentError, "scale to be a number or None, got str", {"scale": "big"}),
    "softcap nan": (InvalidArgumentError, "finite softcap >= 0, got nan", {"softcap": math.nan}),
    "softcap negative": (InvalidArgumentError, r"finite softcap >= 0, got -1\.0", {"softcap": -1}),
    "softcap inf": (InvalidArgumentError, "finite softcap >= 0, got inf", {"softcap": math.inf}),
    "softcap list": (InvalidArgumentError, "softcap to be a number or None, got list", {"softcap": [1.0]}),
    "deterministic": (InvalidArgumentError, "deterministic to be True or False, got 1", {"deterministic": 1}),
    "causal_align": (InvalidArgumentError, "'bottom-right' or 'top-left', got 'middle'", {"causal_align": "middle"}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    kind, message, changes = BAD[name]
    with pytest.raises(kind, match=message) as caught:
        call(**changes)
    assert type(caught.value) is kind
    assert caught.value.message.startswith("[flash_attention] expected ")
    assert ", got " in caught.value.message
    assert "; " in caught.value.message


def test_messages_name_the_operation() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^\[my_op\] expected"):
        call(window=0, op="my_op")
