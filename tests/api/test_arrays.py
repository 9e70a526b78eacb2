"""NumPy and DLPack arrays, without a framework."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aule
from aule.errors import DeviceMismatchError, InvalidDtypeError

Array = np.ndarray[Any, Any]
NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f64": np.float64}
SHAPES = {2: (9, 16), 3: (4, 9, 16), 4: (2, 4, 9, 16)}


class DLPackOnly:
    """An array that speaks DLPack and nothing else of NumPy, with a namespace of its own."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array_namespace__(self) -> Any:
        return Namespace


class Namespace:
    """What an array library calls its module."""

    @staticmethod
    def from_dlpack(array: Any) -> DLPackOnly:
        return DLPackOnly(np.from_dlpack(array))

    @staticmethod
    def asarray(array: Any) -> DLPackOnly:
        return DLPackOnly(np.asarray(array))


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_BACKEND", "numpy")


def inputs(rank: int = 4, dtype: str = "f32", heads_kv: int | None = None) -> list[Array]:
    rng = np.random.default_rng(rank)
    made = [rng.standard_normal(SHAPES[rank]).astype(NUMPY[dtype]) for _ in range(3)]
    if heads_kv is not None:
        made[1:] = [x[..., :heads_kv, :, :] for x in made[1:]]
    return made


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_dlpack_agrees(rank: int, dtype: str) -> None:
    q, k, v = inputs(rank, dtype)
    expected = aule.flash_attention(q, k, v, return_lse=True)
    got = aule.flash_attention(DLPackOnly(q), DLPackOnly(k), DLPackOnly(v), return_lse=True)
    for mine, theirs in zip(got, expected, strict=True):
        assert isinstance(mine, DLPackOnly)
        np.testing.assert_array_equal(mine.array, theirs)


def test_dlpack_options_and_arrays_of_either_kind() -> None:
    q, k, v = inputs()
    mask = np.random.default_rng(0).random((9, 9)) < 0.5
    expected = aule.flash_attention(q, k, v, mask=mask)
    got = aule.flash_attention(DLPackOnly(q), DLPackOnly(k), DLPackOnly(v), mask=mask)
    np.testing.assert_array_equal(got.array, expected)


def test_dlpack_of_a_type_that_numpy_lacks() -> None:
    class Bfloat16(DLPackOnly):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("no bfloat16")

    q, k, v = inputs()
    with pytest.raises(
        InvalidDtypeError, match=r"k of a type that NumPy takes from DLPack, got another \(no bfloat16\)"
    ):
        aule.flash_attention(DLPackOnly(q), Bfloat16(k), DLPackOnly(v))
    with pytest.raises(InvalidDtypeError, match=r"\[decode_attention\] expected q of a type .*torch.from_dlpack\(q\)"):
        aule.decode_attention(Bfloat16(q), DLPackOnly(k), DLPackOnly(v))


def test_dlpack_on_another_device_is_refused() -> None:
    class Elsewhere(DLPackOnly):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    q, k, v = inputs()
    with pytest.raises(DeviceMismatchError, match=r"device type 2; pass torch.from_dlpack"):
        aule.flash_attention(Elsewhere(q), DLPackOnly(k), DLPackOnly(v))
    with pytest.raises(InvalidDtypeError, match="expected k to be an array with __dlpack__ like q, got list"):
        aule.flash_attention(DLPackOnly(q), k.tolist(), DLPackOnly(v))
    with pytest.raises(InvalidDtypeError, match="expected no out with DLPack"):
        aule.flash_attention(DLPackOnly(q), DLPackOnly(k), DLPackOnly(v), out=np.empty_like(q))


def test_read_only_inputs_are_accepted_and_untouched() -> None:
    q, k, v = inputs()
    copies = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    aule.flash_attention(q, k, v)
    for x, before in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, before)


def test_precision_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    from aule.frontends import numpy as numpy_front_end

    monkeypatch.setattr(numpy_front_end, "bfloat16", lambda: None)
    q, k, v = inputs()
    with pytest.raises(InvalidDtypeError, match="pip install ml_dtypes"):
        aule.attention(q, k, v, input_precision="bf16")
    aule.attention(q, k, v, input_precision="fp16")


def test_kinds_that_nobody_serves() -> None:
    q, k, v = inputs(2)
    for wrong in (q.tolist(), None, "text", 3.0):
        with pytest.raises(InvalidDtypeError, match=r"expected NumPy arrays, torch tensors .* convert with"):
            aule.flash_attention(wrong, k, v)


def test_foreign_byte_order() -> None:
    q, k, v = inputs()
    with pytest.raises(InvalidDtypeError, match="native byte order"):
        aule.flash_attention(q.astype(q.dtype.newbyteorder()), k, v)


FIELDS = {"bytes apart": np.dtype([("pad", "u1"), ("x", "f4")]), "another order": np.dtype([("x", ">f4")])}


@pytest.mark.parametrize("kind", FIELDS.values(), ids=FIELDS)
def test_results_that_no_kernel_can_write_where_they_belong(kind: Any) -> None:
    """Elements five bytes apart, or of another byte order: a kernel would write over what lies beside them."""
    q, k, v = inputs()
    out = np.zeros(q.shape, kind)["x"]
    for call in (aule.flash_attention, aule.decode_attention):
        with pytest.raises(InvalidDtypeError, match="native byte order with strides of whole elements"):
            call(q, k, v, out=out)
    assert not out.any()


def test_a_field_is_rotated_in_place() -> None:
    field = np.zeros((1, 2, 5, 8), np.dtype([("pad", "u1"), ("x", "f4")]))["x"]
    field[...] = np.random.default_rng(0).standard_normal(field.shape)
    angles = np.linspace(0, 3, 20, dtype=np.float32).reshape(5, 4)
    expected = aule.rope(field.copy(), np.cos(angles), np.sin(angles))
    assert aule.rope(field, np.cos(angles), np.sin(angles), inplace=True) is field
    bits = expected.astype(ml_dtypes.bfloat16)  # viewed by its bits on the way
    assert aule.rope(bits, np.cos(angles), np.sin(angles), inplace=True) is bits
    np.testing.assert_array_equal(field, expected)
