"""Every bad input raises an error of its own class, leaves inputs untouched and the library usable."""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import aule
from aule.artifact import Artifact, Param
from aule.backends import registry
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    ClosedError,
    DeviceMismatchError,
    InvalidArgumentError,
    InvalidDtypeError,
    InvalidShapeError,
    OutOfMemoryError,
    ShaderCompileError,
)

try:
    import torch
except ImportError:
    torch = None

Array = np.ndarray[Any, Any]


def device_names() -> list[str]:
    return [f"{d.target.backend}:{d.index}" for group in registry.available().values() for d in group]


DEVICES = device_names()
needs_device = pytest.mark.skipif(not DEVICES, reason="no device here")

KINDS: dict[str, Callable[[Array], Any]] = {"numpy": lambda x: x}
if torch is not None:
    KINDS["torch"] = lambda x: torch.from_numpy(x)


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))


def arrays(q: Any = (2, 4, 9, 16), k: Any = None, v: Any = None, dtype: Any = np.float32) -> dict[str, Array]:
    """Arrays of the given shapes; k defaults to q's shape and v to k's."""
    rng = np.random.default_rng(0)
    k = q if k is None else k
    shapes = {"q": q, "k": k, "v": k if v is None else v}
    return {name: (8 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}


GOOD = arrays((2, 5, 8))


def good_call(convert: Callable[[Array], Any] = lambda x: x, backend: str | None = "numpy") -> None:
    """The library is usable: a correct call gives the correct answer."""
    q, k, v = (convert(x) for x in GOOD.values())
    out = np.asarray(aule.flash_attention(q, k, v, causal=False, backend=backend))
    s = np.einsum("hid,hjd->hij", GOOD["q"], GOOD["k"]) / math.sqrt(8)
    p = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(out, (p / p.sum(-1, keepdims=True)) @ GOOD["v"], rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Bad:
    """A call that must be refused."""

    name: str
    error: type[AuleError]
    message: str
    inputs: Callable[[], dict[str, Any]] = arrays
    options: dict[str, Any] = field(default_factory=dict)
    also: type[Exception] | None = None
    """What else the error must be for callers that know nothing of aule."""


def changed(name: str, change: Callable[[Array], Array]) -> Callable[[], dict[str, Array]]:
    return lambda: {**arrays(), name: change(arrays()[name])}


SHAPE, DTYPE, ARGUMENT = InvalidShapeError, InvalidDtypeError, InvalidArgumentError

BAD = [
    Bad("rank 1", SHAPE, r"expected q of shape \[seq, head_dim\]", lambda: arrays((16,)), also=ValueError),
    Bad("rank 5", SHAPE, "expected q of shape", lambda: arrays((1, 1, 2, 4, 8))),
    Bad("ranks differ", SHAPE, "same number of axes", lambda: arrays((2, 4, 9, 16), (4, 9, 16))),
    Bad("batch", SHAPE, "q and k of equal batch, got q 2 and k 3", lambda: arrays((2, 4, 9, 16), (3, 4, 9, 16))),
    Bad("batch of v", SHAPE, "q and v of equal batch", lambda: arrays(v=(1, 4, 9, 16))),
    Bad("heads of k and v", SHAPE, "k and v of equal heads, got k 4 and v 2", lambda: arrays(v=(2, 2, 9, 16))),
    Bad("keys and values", SHAPE, "k and v of equal seq, got k 9 and v 8", lambda: arrays(v=(2, 4, 8, 16))),
    Bad("head_dim differs", SHAPE, "q and k of equal head_dim", lambda: arrays((2, 4, 9, 16), (2, 4, 9, 8))),
    Bad(
        "heads_q no multiple",
        SHAPE,
        "heads_q to be a multiple of heads_kv, got heads_q 4 and heads_kv 3",
        lambda: arrays((2, 4, 9, 16), (2, 3, 9, 16)),
    ),
    Bad("head_dim 0", SHAPE, r"head_dim of q and k in 1\.\.576, got 0; pad", lambda: arrays((2, 4, 9, 0))),
    Bad("head_dim 577", SHAPE, r"head_dim of q and k in 1\.\.576, got 577; split", lambda: arrays((2, 4, 9, 577))),
    Bad("value_dim 577", SHAPE, r"head_dim of v in 1\.\.576, got 577", lambda: arrays(v=(2, 4, 9, 577))),
    Bad(
        "integers",
        DTYPE,
        "expected q of float32, float16, bfloat16 or float64, got int32",
        lambda: arrays(dtype=np.int32),
        also=TypeError,
    ),
    Bad("complex", DTYPE, "got .*complex64; convert", lambda: arrays(dtype=np.complex64)),
    Bad(
        "mixed dtypes",
        DTYPE,
        "one dtype, got q float32, k float16, v float32",
        changed("k", lambda x: x.astype(np.float16)),
    ),
    Bad(
        "mask does not broadcast",
        SHAPE,
        r"mask broadcastable to \[batch, heads_q, seq_q, seq_kv\] = \[2, 4, 9, 9\], got \[3, 9, 9\]",
        options={"mask": np.ones((3, 9, 9), np.bool_)},
    ),
    Bad("mask of rank 1", SHAPE, r"pass mask\[None, None, None, :\]", options={"mask": np.ones(9, np.bool_)}),
    Bad(
        "mask of integers",
        DTYPE,
        "mask of bool or floats, got int32; pass mask != 0,",
        options={"mask": np.ones((9, 9), np.int32)},
    ),
    Bad("bias of the wrong shape", SHAPE, "bias broadcastable", options={"bias": np.ones((9, 7), np.float32)}),
    Bad(
        "alibi_slopes of the wrong shape",
        SHAPE,
        "alibi_slopes of shape",
        options={"alibi_slopes": np.ones(3, np.float32)},
    ),
    Bad("sinks of float64", DTYPE, "sinks of float32, got float64", options={"sinks": np.ones(4)}),
    Bad("window of 0", ARGUMENT, "int window >= 1, got 0", options={"window": 0}, also=ValueError),
    Bad("negative window", ARGUMENT, "int window >= 1, got -4", options={"window": -4}),
    Bad("negative side of window", ARGUMENT, "left side of window >= 0, got -2", options={"window": (-2, 0)}),
    Bad("window of three", ARGUMENT, r"window as \(left, right\), got 3 values", options={"window": (1, 2, 3)}),
    Bad("window of a float", ARGUMENT, "expected window to be an int or None, got 1.5", options={"window": 1.5}),
    Bad("NaN scale", ARGUMENT, "finite scale, got nan", options={"scale": math.nan}),
    Bad("infinite scale", ARGUMENT, "finite scale, got inf", options={"scale": math.inf}),
    Bad("scale of text", ARGUMENT, "scale to be a number or None, got str", options={"scale": "big"}),
    Bad("scale of several", ARGUMENT, "scale to be a number or None, got", options={"scale": np.ones(3)}),
    Bad("scale beyond float32", ARGUMENT, r"scale of at most 1e\+38, .*got 1e\+39; ", options={"scale": 1e39}),
    Bad("softcap of text", ARGUMENT, "softcap to be a number or None, got str", options={"softcap": "1"}),
    Bad("softcap below float32", ARGUMENT, "softcap from 2.5e-39 to 1e.38, .*got 1e-45", options={"softcap": 1e-45}),
    Bad("dropout_p of text", ARGUMENT, "dropout_p to be a number or None, got str", options={"dropout_p": "0.1"}),
    Bad("causal of text", ARGUMENT, "causal to be True or False, got str", options={"causal": "no"}),
    Bad("a mask as causal", ARGUMENT, "causal to be True or False, .*mask=", options={"causal": np.ones((9, 9))}),
    Bad(
        "window of lists",
        ARGUMENT,
        r"left side of window to be an int or None, got \[3\]",
        options={"window": [[3], 0]},
    ),
    Bad("negative softcap", ARGUMENT, "finite softcap >= 0, got -1", options={"softcap": -1.0}),
    Bad("causal_align", ARGUMENT, "'bottom-right' or 'top-left', got 'middle'", options={"causal_align": "middle"}),
    Bad(
        "unknown backend",
        BackendUnavailableError,
        "expected one of cuda, .*numpy, got 'nonsense'",
        options={"backend": "nonsense"},
    ),
    Bad("device number too large", BackendUnavailableError, "vulkan", options={"backend": "vulkan:99"}),
    Bad("backend of another type", ARGUMENT, "expected a name such as", options={"backend": 3}),
]


def snapshot(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_input(bad: Bad, kind: str) -> None:
    convert = KINDS[kind]
    plain = {**bad.inputs(), **bad.options}
    before = {name: snapshot(value) for name, value in plain.items()}
    given = {name: convert(value) if isinstance(value, np.ndarray) else value for name, value in plain.items()}
    with pytest.raises(bad.error, match=bad.message) as caught:
        aule.flash_attention(**given)
    error = caught.value
    assert type(error) is bad.error
    assert (
        isinstance(error, AuleError) and error.code.startswith("AULE_ERROR_") and str(error).endswith(f"[{error.code}]")
    )
    assert re.match(r"\[\w+\] expected .*, got ", error.message), error.message
    if bad.also is not None:
        assert isinstance(error, bad.also)
    for name, value in before.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(plain[name], value)
    good_call(convert)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (
            InvalidShapeError,
            r"out of shape \(2, 4, 9, 16\), got \(2, 4, 8, 16\)",
            lambda: np.ones((2, 4, 8, 16), np.float32),
        ),
        (InvalidShapeError, "out of shape", lambda: np.ones((4, 9, 16), np.float32)),
        (InvalidDtypeError, "out of q's dtype, got .*float16", lambda: np.ones((2, 4, 9, 16), np.float16)),
        (InvalidDtypeError, "out of q's dtype", lambda: np.ones((2, 4, 9, 16), np.int32)),
    ],
)
def test_bad_out(kind: str, error: type[AuleError], message: str, make: Callable[[], Array]) -> None:
    convert, out = KINDS[kind], make()
    given = {name: convert(x) for name, x in arrays().items()}
    with pytest.raises(error, match=message):
        aule.flash_attention(**given, out=convert(out))
    assert (out == 1).all()
    good_call(convert)


def test_read_only_out() -> None:
    out = np.ones((2, 4, 9, 16), np.float32)
    out.flags.writeable = False
    with pytest.raises(InvalidShapeError, match="writable out"):
        aule.flash_attention(**arrays(), out=out)
    good_call()


@pytest.mark.skipif(torch is None, reason="no torch here")
@pytest.mark.parametrize("position", ["q", "k", "v", "mask", "out"])
def test_mixed_kinds(position: str) -> None:
    given: dict[str, Any] = {**arrays(), "mask": np.ones((9, 9), np.bool_), "out": np.ones((2, 4, 9, 16), np.float32)}
    one_torch = {**given, position: torch.from_numpy(given[position])}
    one_numpy = {name: x if name == position else torch.from_numpy(x) for name, x in given.items()}
    for mixed in (one_torch, one_numpy):
        with pytest.raises((InvalidDtypeError, InvalidShapeError), match=r"got (Tensor|ndarray); "):
            aule.flash_attention(**mixed)
    assert (given["out"] == 1).all()
    good_call()


@pytest.mark.skipif(torch is None, reason="no torch here")
@pytest.mark.parametrize("position", ["q", "k", "v", "alibi_slopes", "out"])
def test_tensors_that_need_a_gradient_that_is_not_there(position: str) -> None:
    given = {name: torch.from_numpy(x) for name, x in arrays().items()}
    given |= {"alibi_slopes": torch.zeros(4), "out": torch.empty(2, 4, 9, 16)}
    given[position].requires_grad_()
    with pytest.raises(AuleError, match=r"detach alibi_slopes|leave out= out|detach out") as caught:
        aule.flash_attention(**given)
    assert caught.value.code == "AULE_ERROR_NO_GRADIENT"
    with torch.no_grad():
        assert aule.flash_attention(**given) is given["out"]
    good_call(KINDS["torch"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["cuda", "metal", "vulkan", "opencl", "webgpu"])
def test_a_forced_backend_that_is_missing(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = BackendUnavailableError(name, f"[{name}] expected a driver, got none; install one")
    monkeypatch.setattr(registry, "_errors", {**registry._errors, name: reason})
    given = {key: KINDS[kind](x) for key, x in arrays().items()}
    for spec in (name, f"{name}:0"):
        with pytest.raises(BackendUnavailableError, match="install one") as caught:
            aule.flash_attention(**given, backend=spec)
        assert caught.value.code == f"AULE_ERROR_{name.upper()}_INIT"
    monkeypatch.setenv("AULE_BACKEND", name)
    with pytest.raises(BackendUnavailableError, match="install one"):
        aule.flash_attention(**given)
    with pytest.raises(BackendUnavailableError, match="install one"):
        aule.Aule()
    good_call(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["numpy:0", "numpy:", "cpu:", "cpu:-1", "cpu:²", "cpu:x", "cpu:99"])
def test_a_number_that_is_no_device(kind: str, spec: str) -> None:
    given = {key: KINDS[kind](x) for key, x in arrays().items()}
    with pytest.raises(BackendUnavailableError, match=re.escape(repr(spec)) + "|llvmlite"):
        aule.flash_attention(**given, backend=spec)
    good_call(KINDS[kind])


@pytest.mark.skipif("cpu:0" not in DEVICES, reason="its settings are those of the CPU engine")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "value"), [("AULE_NUM_THREADS", "two"), ("AULE_CPU_FEATURES", "sse"), ("AULE_DISK_CACHE", "off")]
)
def test_a_wrong_setting_is_not_passed_over(kind: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who mistypes one gets NumPy's speed, and no gradients, without a word."""
    monkeypatch.setattr(registry, "_found", {})
    monkeypatch.setattr(registry, "_errors", {n: registry._errors.get(n) or no_such(n) for n in registry.NAMES[:-2]})
    monkeypatch.setenv(name, value)
    given = {key: KINDS[kind](x) for key, x in arrays().items()}
    with pytest.raises(InvalidArgumentError, match=f"expected {name} to be .*, got '{value}'; change or unset it"):
        aule.flash_attention(**given)
    assert name in aule.get_backend_errors().get("cpu", name)
    monkeypatch.delenv(name)
    assert registry.choose() is not None, "a setting that was corrected is"
    good_call(KINDS[kind])


def no_such(name: str) -> BackendUnavailableError:
    return BackendUnavailableError(name, f"[{name}] expected a driver, got none; install one")


@pytest.mark.skipif("cuda" in {name.split(":")[0] for name in DEVICES}, reason="there is CUDA here")
def test_cuda_is_missing_here() -> None:
    with pytest.raises(BackendUnavailableError, match=r"\[cuda\] expected .* install the NVIDIA driver") as caught:
        aule.flash_attention(**arrays(), backend="cuda")
    assert caught.value.code == "AULE_ERROR_CUDA_INIT"
    good_call()


def test_a_forced_numpy_is_no_device() -> None:
    with pytest.raises(BackendUnavailableError, match=r"got numpy, which has none; .*takes NumPy arrays without one"):
        aule.Aule("numpy")
    good_call()


def test_what_was_typed_is_in_no_code() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        aule.flash_attention(**arrays(), backend="my machine")
    assert caught.value.code == "AULE_ERROR_UNKNOWN_BACKEND" and caught.value.backend == "my machine"


def test_a_masked_array() -> None:
    given = {**arrays(), "k": np.ma.masked_array(arrays()["k"], arrays()["k"] > 0)}
    with pytest.raises(InvalidDtypeError, match=r"k without a mask of its own, got a masked array.*filled\(\)"):
        aule.flash_attention(**given)
    good_call()


@pytest.mark.skipif(torch is None, reason="no torch here")
@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.to_sparse(), "as a dense tensor, got torch.sparse_coo; use .to_dense"),
        (
            lambda x: torch.nested.nested_tensor(list(x)),
            "as a plain tensor, got a nested one; .*flash_attention_varlen",
        ),
        (lambda x: torch.complex(x, x).conj().imag, r"a view that PyTorch negates .*resolve_neg"),
    ],
    ids=["sparse", "nested", "negative"],
)
def test_tensors_that_are_not_simply_in_memory(
    change: Callable[[Any], Any], message: str, wants_gradient: bool
) -> None:
    q, k, v = (torch.from_numpy(x) for x in arrays().values())
    if wants_gradient:
        pytest.importorskip("llvmlite", reason="gradients need the CPU engine")
    with pytest.raises(InvalidDtypeError, match=message):
        aule.flash_attention(change(q).detach().requires_grad_(wants_gradient), k, v)
    good_call(KINDS["torch"])


@pytest.mark.skipif(torch is None, reason="no torch here")
def test_numbers_of_other_kinds_count_by_their_value() -> None:
    q, k, v = (torch.from_numpy(x) for x in arrays().values())
    expected = aule.flash_attention(q, k, v, scale=0.3, softcap=2.0, window=(3, 0))
    for number in (torch.tensor, np.array, np.float32):
        found = aule.flash_attention(q, k, v, scale=number(0.3), softcap=number(2.0), window=[3, 0])
        torch.testing.assert_close(found, expected)
    assert not torch.equal(aule.flash_attention(q, k, v, scale=torch.tensor(0.1), softcap=2.0, window=(3, 0)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["context_lens", "block_tables"])
def test_integers_beyond_32_bits(kind: str, name: str) -> None:
    """They would be other numbers if they were cut off."""
    rng = np.random.default_rng(0)
    given = {
        "q": rng.standard_normal((1, 2, 8), dtype=np.float32),
        "k_cache": rng.standard_normal((4, 2, 2, 8), dtype=np.float32),
        "v_cache": rng.standard_normal((4, 2, 2, 8), dtype=np.float32),
        "block_tables": np.array([[1, 2]]),
        "context_lens": np.array([3]),
    }
    aule.flash_attention_paged(**{n: KINDS[kind](x) for n, x in given.items()})
    given[name] = given[name] + 2**32
    with pytest.raises(InvalidArgumentError, match=f"expected {name} of int32's range"):
        aule.flash_attention_paged(**{n: KINDS[kind](x) for n, x in given.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_messages_name_the_function_that_was_called(kind: str) -> None:
    q = KINDS[kind](np.ones((6, 2, 8), np.float32))
    offsets = KINDS[kind](np.array([0, 6], np.int32))
    for call in (
        lambda x: aule.flash_attention_varlen(q, x, q, offsets, offsets),
        lambda x: aule.decode_attention(q, x, q),
        lambda x: aule.flash_attention_paged(q, x, q, offsets, offsets),
        lambda x: aule.merge_states(q, q[..., 0], x, q[..., 0]),
    ):
        with pytest.raises(InvalidDtypeError) as caught:
            call([1.0])
        assert re.match(
            r"\[(flash_attention_(varlen|paged)|decode_attention|merge_states)\] expected", str(caught.value)
        )
    for function in (
        "flash_attention_varlen",
        "decode_attention",
        "flash_attention_paged",
        "merge_states",
        "attention",
    ):
        empty = [1.0] * {"attention": 3, "decode_attention": 3, "merge_states": 4}.get(function, 5)
        with pytest.raises(InvalidDtypeError, match=rf"^\[{function}\] expected NumPy arrays"):
            getattr(aule, function)(*([x] for x in empty))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_batch_of_nothing(kind: str) -> None:
    q, offsets = KINDS[kind](np.ones((0, 2, 8), np.float32)), KINDS[kind](np.zeros(1, np.int32))
    out, lse = aule.flash_attention_varlen(q, q, q, offsets, offsets, return_lse=True)
    assert tuple(out.shape) == (0, 2, 8) and tuple(lse.shape) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8.0, 8), "expected seq_len to be an int"), ((8, "8"), "expected head_dim to be an int"),
        ((8, 7), "even head_dim"), ((2**70, 8), "seq_len from 0 to"), ((8, 8, -1), "finite base > 0, got -1"),
        ((8, 8, 10**400), "finite base > 0"),
    ],
)  # fmt: skip
def test_bad_rope_frequencies(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        aule.precompute_rope_frequencies(*arguments)


@pytest.mark.parametrize("dtype", ["x", -1, np.int32, np.complex64, np.ones(3)])
def test_rope_frequencies_of_no_float_type(dtype: Any) -> None:
    with pytest.raises(InvalidDtypeError, match="expected dtype float32, float16, bfloat16 or float64, got"):
        aule.precompute_rope_frequencies(4, 8, dtype=dtype)


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
def test_rope_frequencies_where_pytorch_has_nothing() -> None:
    with pytest.raises(BackendUnavailableError, match="a device that PyTorch has, got 'x'"):
        aule.precompute_rope_frequencies(4, 8, device="x")
    with pytest.raises(InvalidDtypeError, match="expected dtype float32, float16, bfloat16 or float64, got 'int8'"):
        aule.precompute_rope_frequencies(4, 8, device="cpu", dtype="int8")


def test_rope_frequencies_that_memory_has_no_room_for() -> None:
    with pytest.raises(aule.OutOfMemoryError, match="expected 1152921504069976064 bytes"):
        aule.precompute_rope_frequencies(2**31 - 1, 2**27)


@pytest.mark.parametrize("pages", [-1, 3, 0.5, True, None])
def test_bad_shared_pages(pages: Any) -> None:
    pool, table, lens = np.ones((4, 2, 2, 8), np.float32), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    with pytest.raises(InvalidArgumentError, match="expected shared_pages"):
        aule.cascade_attention(pool[0, :1], pool, pool, table, lens, shared_pages=pages)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_are_not_shared(kind: str) -> None:
    """Anything else would be attention to keys of others, or to keys behind a query, without a word."""
    make = KINDS[kind]
    pool = make(np.random.default_rng(0).standard_normal((8, 4, 2, 16), np.float32))
    q = make(np.ones((2, 2, 3, 16), np.float32))
    table, other = (make(np.array(x, np.int32)) for x in ([[0, 1, 2], [0, 1, 3]], [[0, 1, 2], [0, 4, 3]]))
    lens = make(np.array([12, 10], np.int32))
    aule.cascade_attention(q, pool, pool, table, lens, shared_pages=2)
    with pytest.raises(InvalidArgumentError, match=r"got page 4 for sequence 1 and 1 for the first in column 1; pass"):
        aule.cascade_attention(q, pool, pool, other, lens, shared_pages=2)
    offsets = make(np.array([0, 2, 6], np.int32))
    packed = make(np.ones((6, 2, 16), np.float32))
    short = make(np.array([12, 7], np.int32))
    for rows, given in ((q, lens - 1), (q[:, :, 0], short), (packed, lens)):
        options = {"cu_seqlens_q": offsets} if rows is packed else {}
        with pytest.raises(InvalidArgumentError, match=r"behind the 8 keys .* got \d of them in sequence 1"):
            aule.cascade_attention(rows, pool, pool, table, given, shared_pages=2, **options)
    aule.cascade_attention(packed, pool, pool, table, lens, shared_pages=2, cu_seqlens_q=offsets, causal=False)


def test_a_context_that_is_none() -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected an aule\.Aule as context, got str"):
        aule.attention(**arrays(), context="cuda")


@pytest.mark.skipif(torch is None or torch.cuda.is_available(), reason="needs PyTorch without CUDA")
def test_a_cache_on_a_device_that_is_missing() -> None:
    with pytest.raises(BackendUnavailableError, match=r"a device that PyTorch has, got 'cuda'.*device='cpu'"):
        aule.KVCache(4, 2, 16, device="cuda")


# -- with a device ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=DEVICES or [pytest.param("", marks=pytest.mark.skip(reason="no device here"))])
def spec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gpu(spec: str) -> Iterator[aule.Aule]:
    with aule.Aule(spec) as context:
        yield context


def tensors(gpu: aule.Aule) -> tuple[aule.Tensor, ...]:
    q, k, v = (gpu.tensor(x.shape).upload(x) for x in GOOD.values())
    return q, k, v, gpu.tensor(GOOD["q"].shape)


def good_gpu_call(gpu: aule.Aule) -> None:
    q, k, v, out = tensors(gpu)
    gpu.attention_gpu(q, k, v, out)
    expected = aule.flash_attention(**GOOD, causal=False, backend="numpy")
    np.testing.assert_allclose(out.download(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_on_a_device(spec: str, kind: str) -> None:
    if spec.startswith("cpu"):
        pytest.skip("the CPU computes in float64")
    given = {name: KINDS[kind](x) for name, x in arrays(dtype=np.float64).items()}
    with pytest.raises(InvalidDtypeError, match=r"got float64; use backend='cpu' or 'numpy'"):
        aule.flash_attention(**given, backend=spec)
    good_call(KINDS[kind], spec)


def test_a_tensor_after_free_and_close(spec: str) -> None:
    context = aule.Aule(spec)
    q, k, v, out = tensors(context)
    q.free()
    q.free()
    for use in (q.download, q.view, lambda: q.upload(GOOD["q"]), lambda: context.attention_gpu(q, k, v, out)):
        with pytest.raises(ClosedError, match="that was freed; make a new one"):
            use()
    good_gpu_call(context)
    context.close()
    context.close()
    for use in (
        k.download,
        k.view,
        lambda: k.upload(GOOD["k"]),
        lambda: context.attention_gpu(q, k, v, out),
        lambda: context.tensor((4,)),
        context.synchronize,
        context.get_device_info,
        context.__enter__,
        lambda: aule.attention(**GOOD, context=context),
    ):
        with pytest.raises(ClosedError, match=r"that was closed; make a new one|that was freed"):
            use()
    with aule.Aule(spec) as again:
        with pytest.raises(ClosedError):
            again.attention_gpu(*tensors(again)[:3], out)
        good_gpu_call(again)


def test_tensors_of_the_wrong_kind(gpu: aule.Aule) -> None:
    q, k, v, out = tensors(gpu)
    mask = np.ones((5, 5), np.bool_)
    for use, name, got in (
        (lambda: gpu.attention_gpu(GOOD["q"], k, v, out), "q", "ndarray"),
        (lambda: gpu.attention_gpu(q, k, None, out), "v", "NoneType"),
        (lambda: gpu.attention_gpu(q, k, v, None), "out", "NoneType"),
        (lambda: gpu.attention_gpu(q, k, v, out, mask=mask), "mask", "ndarray"),
    ):
        with pytest.raises(DeviceMismatchError, match=f"expected {name} to be a tensor of this context, got {got}"):
            use()  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidShapeError, match=r"expected out of shape \(2, 5, 8\)"):
        gpu.attention_gpu(q, k, v, gpu.tensor((2, 5, 4)))
    with pytest.raises(InvalidShapeError, match="expected out of shape"):
        gpu.attention_gpu(q, k, v, gpu.tensor((2, 5, 8), "float16"))
    with pytest.raises(InvalidShapeError, match=r"expected lse of shape \(2, 5\)"):
        gpu.attention_forward_with_lse(q, k, v, out, gpu.tensor((2, 4)))
    with pytest.raises(InvalidArgumentError, match="finite scale"):
        gpu.attention_gpu(q, k, v, out, scale=math.nan)
    with pytest.raises(aule.UnknownOptionError, match="one of its options, got `return_lse`; it has causal, scale, "):
        gpu.attention_gpu(q, k, v, out, return_lse=True)
    with pytest.raises(InvalidDtypeError, match="one dtype"):
        gpu.attention_gpu(q, gpu.tensor((2, 5, 8), "float16"), v, out)
    with pytest.raises(InvalidDtypeError, match="expected dtype float32, float16, bfloat16 or bool, got 'int32'"):
        gpu.tensor((3,), "int32")
    with pytest.raises(InvalidShapeError, match="negative"):
        gpu.tensor((3, -1))
    with pytest.raises(InvalidShapeError, match=r"expected shape \(2, 5, 8\), got \(2, 5\)"):
        q.upload(GOOD["q"][..., 0])
    with pytest.raises(InvalidDtypeError, match=r"\[upload\] expected an array in host memory, got list .* to NumPy"):
        q.upload([[1], [2, 3]])
    with pytest.raises(InvalidDtypeError, match=r"\[upload\] expected an array of numbers, got <U1"):
        q.upload(np.full(q.shape, "x"))
    good_gpu_call(gpu)


@pytest.mark.parametrize("shape", [(1 << 44,), (1 << 40, 1 << 40), (1 << 62, 4)])
def test_out_of_device_memory(gpu: aule.Aule, shape: tuple[int, ...]) -> None:
    """More than any device has, also where a count of 64 bits would come round to nothing."""
    with pytest.raises(OutOfMemoryError) as caught:
        gpu.tensor(shape)
    assert caught.value.code == "AULE_ERROR_OUT_OF_MEMORY"
    assert re.match(r"\[\w+\] expected ", caught.value.message), caught.value.message
    good_gpu_call(gpu)


def test_dropped_tensors_give_their_memory_back(gpu: aule.Aule) -> None:
    """Without it this would be some 100 GiB."""
    for _ in range(2000):
        gpu.tensor((1 << 24,), "float32" if gpu.get_device_info()["memory_bytes"] else "bool")
    good_gpu_call(gpu)


def test_an_array_larger_than_a_device_takes(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if spec.startswith("cpu"):
        pytest.skip("an array that is in memory is not too large for the CPU")
    device: Any = registry.find(spec)
    monkeypatch.setattr(device, "target", replace(device.target, max_buffer_bytes=64))
    given = arrays()
    before = {name: x.copy() for name, x in given.items()}
    with pytest.raises(InvalidShapeError, match=r"at most 64 bytes .* split the batch or use another backend"):
        aule.flash_attention(**given, backend=spec)
    for name, x in before.items():
        np.testing.assert_array_equal(given[name], x)
    monkeypatch.undo()
    good_call(backend=spec)


GARBAGE = {
    "ptx": b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry broken(nonsense\n",
    "spirv": b"\x03\x02\x23\x07" + b"\xff" * 60,
    "opencl": b"__kernel void broken(__global float *out) { this is no C; }",
    "wgsl": b"@compute @workgroup_size(32) fn broken( { this is no WGSL }",
    "msl": b"kernel void broken( { this is no MSL }",
    "llvm": b"define void @broken( { this is no LLVM IR }",
}


def garbage(language: Any) -> Artifact:
    return Artifact(language, GARBAGE[language], "broken", (Param("out", "buffer", "f32", "write"),), 32)


def test_a_driver_refuses_a_shader(spec: str) -> None:
    device: Any = registry.find(spec)
    language = registry.backend(device.target.backend).language
    with pytest.raises(ShaderCompileError) as caught:
        device.load(garbage(language))
    error = caught.value
    assert error.code == "AULE_ERROR_SHADER_COMPILE" and error.log
    assert error.source_path is not None
    with open(error.source_path, "rb") as file:
        assert file.read() == GARBAGE[language]
    good_call(backend=spec)


def test_a_kernel_that_a_driver_refuses(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public API: the renderer writes what the driver does not take."""
    device: Any = registry.find(spec)
    backend = registry.backend(device.target.backend)
    renderer = importlib.import_module(backend.render_module)
    render = renderer.render
    given = arrays((1, 1, 11, 12))  # of a head_dim that no other test has loaded
    before = {name: x.copy() for name, x in given.items()}
    with monkeypatch.context() as patch:
        patch.setenv("AULE_DISK_CACHE", "0")
        patch.setattr(renderer, "render", lambda k, t: replace(render(k, t), code=GARBAGE[backend.language]))
        with pytest.raises(ShaderCompileError):
            aule.flash_attention(**given, backend=spec)
    for name, x in before.items():
        np.testing.assert_array_equal(given[name], x)
    got = aule.flash_attention(**given, backend=spec)
    np.testing.assert_allclose(got, aule.flash_attention(**given, backend="numpy"), rtol=1e-4, atol=1e-4)


# -- errors themselves -----------------------------------------------------------------------------------------------


def test_errors_survive_pickling() -> None:
    import pickle

    try:
        aule.flash_attention(**arrays(), backend="nonsense")
    except AuleError as error:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and (copy.code, copy.message) == (error.code, error.message)


def test_the_library_says_nothing_unasked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aule"):
        with pytest.raises(InvalidShapeError):
            aule.flash_attention(**arrays((16,)))
        good_call()
    assert not caplog.records
