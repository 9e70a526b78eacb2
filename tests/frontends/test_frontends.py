"""NumPy arrays, torch tensors and DLPack arrays give the same numbers, each as the caller's kind of array."""

from __future__ import annotations

import importlib.util
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_arrays import NUMPY, SHAPES, DLPackOnly, inputs

import aule
from aule.errors import DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError

torch = pytest.importorskip("torch")

Array = np.ndarray[Any, Any]
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_BACKEND", "numpy")


def tensor(array: Array) -> Any:
    """The same memory as a torch tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(result: Any) -> Array:
    """The values of a result of any kind, bfloat16 as float32."""
    if isinstance(result, DLPackOnly):
        result = result.array
    if isinstance(result, torch.Tensor):
        result = result.float().numpy() if result.dtype == torch.bfloat16 else result.numpy()
    return result.astype(np.float32) if result.dtype == ml_dtypes.bfloat16 else result


# -- the kinds agree -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_and_torch_agree(rank: int, dtype: str) -> None:
    q, k, v = inputs(rank, dtype)
    out, lse = aule.flash_attention(q, k, v, return_lse=True)
    assert isinstance(out, np.ndarray) and out.dtype == q.dtype and out.shape == q.shape
    assert lse.dtype == np.float32 and lse.shape == q.shape[:-1]
    t_out, t_lse = aule.flash_attention(tensor(q), tensor(k), tensor(v), return_lse=True)
    assert t_out.dtype == TORCH[dtype] and t_out.device.type == "cpu" and tuple(t_out.shape) == q.shape
    assert t_lse.dtype == torch.float32
    np.testing.assert_array_equal(array_of(out), array_of(t_out))
    np.testing.assert_array_equal(lse, t_lse.numpy())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_array_option(kind: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = inputs(heads_kv=2)
    options = {
        "mask": rng.random((2, 1, 9, 9)) < 0.8,
        "bias": rng.standard_normal((4, 9, 9)).astype(np.float32),
        "alibi_slopes": rng.random(4).astype(np.float32),
        "sinks": rng.random(4).astype(np.float32),
    }
    expected = aule.flash_attention(q, k, v, **options, causal=False)
    if kind == "torch":
        got = aule.flash_attention(
            *map(tensor, (q, k, v)), **{n: tensor(x) for n, x in options.items()}, causal=False
        ).numpy()
        np.testing.assert_array_equal(got, expected)
    plain = aule.flash_attention(q, k, v, causal=False)
    for name, array in options.items():
        assert not np.array_equal(aule.flash_attention(q, k, v, causal=False, **{name: array}), plain), name


def test_window_as_a_list_and_scalars_of_numpy() -> None:
    q, k, v = inputs()
    expected = aule.flash_attention(q, k, v, window=(3, 0), scale=0.5, softcap=2.0)
    for convert in (lambda x: x, tensor):
        got = aule.flash_attention(
            convert(q), convert(k), convert(v), window=[np.int64(3), 0], scale=np.float32(0.5), softcap=np.float64(2.0)
        )
        np.testing.assert_array_equal(array_of(got), expected)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rank", SHAPES)
def test_out_of_numpy(dtype: str, rank: int) -> None:
    q, k, v = inputs(rank, dtype)
    expected = aule.flash_attention(q, k, v)
    out = np.full(q.shape, 7, q.dtype)
    assert aule.flash_attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))
    wide = np.full((*q.shape[:-1], 2 * q.shape[-1]), 7, q.dtype)
    result, lse = aule.flash_attention(q, k, v, out=wide[..., ::2], return_lse=True)
    assert result.base is wide and lse.shape == q.shape[:-1]
    np.testing.assert_array_equal(array_of(wide[..., ::2]), array_of(expected))
    assert (array_of(wide[..., 1::2]) == 7).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rank", SHAPES)
def test_out_of_torch(dtype: str, rank: int) -> None:
    q, k, v = map(tensor, inputs(rank, dtype))
    expected = aule.flash_attention(q, k, v)
    out = torch.full(q.shape, 7, dtype=q.dtype)
    before = out.data_ptr()
    assert aule.flash_attention(q, k, v, out=out) is out and out.data_ptr() == before
    assert torch.equal(out, expected)
    wide = torch.full((*q.shape[:-1], 2 * q.shape[-1]), 7, dtype=q.dtype)
    aule.flash_attention(q, k, v, out=wide[..., ::2])
    assert torch.equal(wide[..., ::2], expected) and bool((wide[..., 1::2] == 7).all())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_storages_can_be_resized_afterwards(dtype: str) -> None:
    """As FSDP does with parameters that are in use elsewhere, to free them; `Tensor.numpy` would have forbidden it."""
    q, k, v = (tensor(array).clone() for array in inputs(4, dtype))
    x, weight, target = (y.clone() for y in (q[0, 0], q[0, 0, 0], torch.zeros(q.shape[2], dtype=torch.int64)))
    for backend in (None, "numpy"):
        aule.flash_attention(q, k, v, backend=backend)
        aule.rms_norm(x, weight, backend=backend)
        aule.cross_entropy(x, target, backend=backend)
    for used in (q, k, v, x, weight, target):
        used.untyped_storage().resize_(0)
        assert used.untyped_storage().nbytes() == 0


def test_torch_cpu_memory_is_used_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the engine are views of the tensors' own memory, the result's included."""
    from aule.frontends.torch import attention as front_end

    seen: dict[str, Any] = {}
    compute = front_end.forward_on_host

    def spy(problem: Any, operands: Any, device: Any, out: Array, **options: Any) -> Any:
        seen.update(q=operands.q.storage, k=operands.k.storage, v=operands.v.storage, out=out)
        return compute(problem, operands, device, out, **options)

    monkeypatch.setattr(front_end, "forward_on_host", spy)
    q, k, v = map(tensor, inputs(dtype="bf16"))
    result = aule.flash_attention(q, k, v)
    for name, value in {"q": q, "k": k, "v": v, "out": result}.items():
        assert seen[name].ctypes.data == value.data_ptr(), name


def test_repeated_calls_on_the_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of a signature validates nothing again; what is no part of it may differ, what is may not."""
    pytest.importorskip("llvmlite")
    from aule.frontends.torch import attention as torch_attention

    seen: list[str] = []
    checked = torch_attention.attention_problem
    monkeypatch.setattr(
        torch_attention, "attention_problem", lambda **given: (seen.append("checked"), checked(**given))[1]
    )

    def called(*tensors: Any, **options: Any) -> Any:
        seen.clear()
        return aule.flash_attention(*tensors, backend="cpu", **options)

    q, k, v = map(tensor, inputs(dtype="f32", heads_kv=2))
    bias = torch.linspace(-1, 1, 81).reshape(9, 9)
    for options in ({}, {"window": [3, 0]}, {"scale": torch.tensor(0.5)}, {"return_lse": True}, {"bias": bias}):
        first = called(q, k, v, **options)
        again = called(q.clone(), k, v, **options)
        assert not seen, options
        twice = called(2 * q, k, v, **options)
        numpy = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        expected = aule.flash_attention(2 * q.numpy(), k.numpy(), v.numpy(), backend="numpy", **numpy)
        results = ((x if isinstance(x, tuple) else (x,)) for x in (first, again, twice, expected))
        for one, two, three, four in zip(*results, strict=True):
            assert torch.equal(one, two)
            np.testing.assert_allclose(three.numpy(), four, rtol=1e-5, atol=1e-5)
    called(q, k, v, scale=torch.tensor(0.25))
    assert seen, "another scale"
    called(q.transpose(0, 1).contiguous().transpose(0, 1), k, v)
    assert seen, "other strides"
    with pytest.raises(DeviceMismatchError, match="expected k on the CPU"):
        called(q, k.to("meta"), v)
    with pytest.raises(InvalidDtypeError, match="torch tensor like q, got ndarray"):
        called(q, k.numpy(), v)
    with pytest.raises(InvalidDtypeError, match="resolve_neg"):
        called(torch.complex(q, q).conj().imag, k, v)
    out = torch.empty(2, 9, 4, 16).transpose(1, 2)
    assert called(q, k, v, out=out) is out
    assert called(q, k, v, out=out) is out and not seen
    assert torch.equal(out, called(q, k, v))
    with pytest.raises(InvalidShapeError, match="expected out of shape"):
        called(q, k, v, out=torch.empty(2, 4, 9, 8))


def test_another_device_has_its_own_signatures() -> None:
    pytest.importorskip("llvmlite")
    from aule.backends import registry

    q, k, v = map(tensor, inputs())
    first = aule.flash_attention(q, k, v, backend="cpu")
    registry.forget()  # closes it
    assert torch.equal(aule.flash_attention(q, k, v, backend="cpu"), first)


def test_out_may_lie_across_inputs() -> None:
    """Storages that begin elsewhere may be of the same memory."""
    pytest.importorskip("llvmlite")
    memory = np.random.default_rng(0).standard_normal(3 * 9 * 16, dtype=np.float32)
    q, out = (torch.from_numpy(memory[i * 144 : (i + 2) * 144]).view(1, 2, 9, 16) for i in (0, 1))
    for call in (aule.flash_attention, aule.decode_attention):
        expected = call(q.clone(), q.clone(), q.clone(), backend="cpu")
        kept = memory.copy()
        assert torch.equal(call(q, q, q, backend="cpu", out=out), expected)
        memory[:] = kept


@pytest.mark.parametrize("target", ["q", "k", "v"])
def test_out_may_be_an_input(target: str) -> None:
    arrays = dict(zip("qkv", inputs(), strict=True))
    expected = aule.flash_attention(**arrays)
    aule.flash_attention(**arrays, out=arrays[target])
    np.testing.assert_array_equal(arrays[target], expected)
    tensors = {name: tensor(x) for name, x in zip("qkv", inputs(), strict=True)}
    aule.flash_attention(**tensors, out=tensors[target])
    np.testing.assert_array_equal(tensors[target].numpy(), expected)
    if importlib.util.find_spec("llvmlite") is not None:
        tensors = {name: tensor(x) for name, x in zip("qkv", inputs(), strict=True)}
        apart = aule.flash_attention(**tensors, backend="cpu")
        for _ in range(2):  # with a signature that is new, and with one that is known
            tensors = {name: tensor(x) for name, x in zip("qkv", inputs(), strict=True)}
            aule.flash_attention(**tensors, backend="cpu", out=tensors[target])
            assert torch.equal(tensors[target], apart)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
        lambda x: np.asfortranarray(x),
    ],
    ids=["bshd", "step-2", "reversed", "fortran"],
)
def test_strides(layout: Any) -> None:
    q, k, v = inputs()
    expected = aule.flash_attention(q, k, v)
    np.testing.assert_array_equal(aule.flash_attention(layout(q), layout(k), layout(v)), expected)
    if all(step >= 0 for step in layout(q).strides):
        got = aule.flash_attention(*(tensor(layout(x)) for x in (q, k, v)))
        np.testing.assert_array_equal(got.numpy(), expected)


def test_broadcast_and_structured_inputs() -> None:
    q, k, v = inputs()
    shared = np.broadcast_to(k[:1], k.shape)
    expected = aule.flash_attention(q, shared.copy(), v)
    np.testing.assert_array_equal(aule.flash_attention(q, shared, v), expected)
    np.testing.assert_array_equal(aule.flash_attention(*map(tensor, (q, k, v))).numpy(), aule.flash_attention(q, k, v))
    expanded = tensor(k[:1]).expand(k.shape)
    np.testing.assert_array_equal(aule.flash_attention(tensor(q), expanded, tensor(v)).numpy(), expected)
    # Five bytes apart: no stride in elements describes that.
    packed = np.zeros(q.shape, [("x", np.float32), ("tag", np.uint8)])
    packed["x"] = q
    np.testing.assert_array_equal(aule.flash_attention(packed["x"], k, v), aule.flash_attention(q, k, v))


@pytest.mark.parametrize("shape", [(2, 4, 0, 16), (0, 4, 9, 16)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = np.empty(shape, np.float32)
    assert aule.flash_attention(x, x, x).shape == shape
    assert tuple(aule.flash_attention(tensor(x), tensor(x), tensor(x)).shape) == shape


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "f16"), ("bf16", "bf16"), ("fp32", "f32")])
def test_precision_of_attention(precision: str, dtype: str) -> None:
    q, k, v = inputs()
    cast = [x.astype(NUMPY[dtype]) for x in (q, k, v)]
    expected = aule.flash_attention(*cast, causal=False)
    got = aule.attention(q, k, v, input_precision=precision)
    assert got.dtype == NUMPY[dtype]
    np.testing.assert_array_equal(array_of(got), array_of(expected))
    from_torch = aule.attention(*map(tensor, (q, k, v)), input_precision=precision)
    assert from_torch.dtype == TORCH[dtype]
    np.testing.assert_array_equal(array_of(from_torch), array_of(expected))
    back = aule.attention(q, k, v, input_precision=precision, output_precision="fp32")
    assert back.dtype == np.float32
    if dtype != "bf16":
        wrapped = aule.attention(*map(DLPackOnly, (q, k, v)), input_precision=precision)
        np.testing.assert_array_equal(wrapped.array, expected)


def test_precision_leaves_what_is_right_alone() -> None:
    from aule.frontends import numpy as numpy_front_end
    from aule.frontends.torch import entry as torch_front_end

    q, _, _ = inputs()
    assert numpy_front_end.to_precision(q, "float32") is q
    t = tensor(q)
    assert torch_front_end.to_precision(t, "float32") is t


def test_bad_precisions() -> None:
    q, k, v = inputs()
    with pytest.raises(InvalidArgumentError, match="expected input_precision float32, float16 or bfloat16, got 'fp8'"):
        aule.attention(q, k, v, input_precision="fp8")
    with pytest.raises(InvalidArgumentError, match="expected output_precision"):
        aule.attention(q, k, v, output_precision="float64")
    with pytest.raises(InvalidArgumentError, match="intermediate_precision 'float32', got 'fp16'"):
        aule.attention(q, k, v, intermediate_precision="fp16")
    integers = q.astype(np.int32)
    with pytest.raises(InvalidDtypeError, match="arrays of floats to convert to float16, got int32"):
        aule.attention(integers, k, v, input_precision="fp16")
    with pytest.raises(InvalidDtypeError, match="tensors of floats"):
        aule.attention(tensor(integers), tensor(k), tensor(v), input_precision="fp16")
    with pytest.raises(InvalidDtypeError, match="got ndarray"):
        aule.attention(tensor(q), k, v, input_precision="fp16")


# -- other refusals of the front ends --------------------------------------------------------------------------------


def test_out_without_memory_for_every_element() -> None:
    q, k, v = inputs()
    with pytest.raises(InvalidShapeError, match="writable out"):
        aule.flash_attention(q, k, v, out=np.broadcast_to(np.float32(0), q.shape))
    with pytest.raises(InvalidShapeError, match="expanded tensor"):
        aule.flash_attention(*map(tensor, (q, k, v)), out=torch.zeros(1).expand(q.shape))
    none = q[:, :, :0]  # whose strides NumPy and torch choose as they like
    for made in (np.empty_like(none), torch.from_numpy(np.empty_like(none)), torch.zeros(1).expand(none.shape)):
        convert = tensor if isinstance(made, torch.Tensor) else np.asarray
        assert aule.flash_attention(*map(convert, (none, k, v)), out=made) is made


def test_tensors_elsewhere() -> None:
    q, k, v = map(tensor, inputs())
    with pytest.raises(DeviceMismatchError, match="expected k on the CPU like q, got meta"):
        aule.flash_attention(q, k.to("meta"), v)
    with pytest.raises(DeviceMismatchError, match="expected v on meta like q, got cpu"):
        aule.flash_attention(q.to("meta"), k.to("meta"), v)


def test_float64_goes_to_numpy_whatever_device_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from aule.backends import registry

    monkeypatch.delenv("AULE_BACKEND")
    found = [d for group in registry.available().values() for d in group]
    if not found:
        pytest.skip("no device here")
    monkeypatch.setattr(registry, "choose", lambda spec=None: found[0])
    q, k, v = inputs(dtype="f64")
    assert aule.flash_attention(q, k, v).dtype == np.float64
    assert aule.flash_attention(*map(tensor, (q, k, v))).dtype == torch.float64
