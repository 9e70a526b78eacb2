"""`aule.install`: PyTorch's modules keep working with aule in their attention, and every call is accounted for."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

from aule.frontends.torch import route  # noqa: E402
from aule.frontends.torch.sdpa import translate  # noqa: E402

F = torch.nn.functional
ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    aule.reset_dispatch_stats()
    yield
    aule.uninstall()
    aule.reset_dispatch_stats()
    assert F.scaled_dot_product_attention is ORIGINAL


def tensors(*shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def served() -> int:
    stats = aule.dispatch_stats()
    assert stats["passed_on"] == 0, stats
    return int(stats["served"])


# -- in and out --------------------------------------------------------------------------------------------------------


def test_importing_aule_neither_imports_torch_nor_replaces_anything() -> None:
    code = """
import sys, aule
assert "torch" not in sys.modules
aule.uninstall()
assert aule.dispatch_stats() == {"served": 0, "passed_on": 0, "reasons": {}, "ops": {}, "calls": []}
assert "torch" not in sys.modules
import torch
assert torch.nn.functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_install_and_uninstall() -> None:
    aule.uninstall()
    aule.install()
    ours = F.scaled_dot_product_attention
    assert ours is not ORIGINAL
    aule.install()
    assert F.scaled_dot_product_attention is ours
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), ORIGINAL(q, k, v))
    assert aule.dispatch_stats().items() >= {"served": 1, "passed_on": 0, "reasons": {}, "ops": {}}.items()
    aule.uninstall()
    aule.uninstall()
    assert F.scaled_dot_product_attention is ORIGINAL
    torch.testing.assert_close(ours(q, k, v), ORIGINAL(q, k, v))
    assert served() == 1, "who kept our function is passed on, uncounted"


def test_context_manager_leaves_things_as_they_were() -> None:
    with aule.installed():
        inner = F.scaled_dot_product_attention
        assert inner is not ORIGINAL
        with pytest.raises(KeyError), aule.installed(backend="numpy"):
            F.scaled_dot_product_attention(*tensors((1, 1, 2, 8), (1, 1, 2, 8), (1, 1, 2, 8)))
            raise KeyError
        assert F.scaled_dot_product_attention is inner
    assert F.scaled_dot_product_attention is ORIGINAL and served() == 1


def test_a_function_put_over_ours_stays() -> None:
    aule.install()
    ours = F.scaled_dot_product_attention
    try:
        F.scaled_dot_product_attention = other = lambda *a, **k: ours(*a, **k)
        aule.uninstall()
        assert F.scaled_dot_product_attention is other
        q, k, v = tensors((1, 1, 2, 8), (1, 1, 2, 8), (1, 1, 2, 8))
        assert torch.equal(other(q, k, v), ORIGINAL(q, k, v)) and served() == 0
    finally:
        F.scaled_dot_product_attention = ORIGINAL


def test_a_missing_backend_raises_at_once() -> None:
    with pytest.raises(aule.BackendUnavailableError):
        aule.install(backend="no such thing")
    assert F.scaled_dot_product_attention is ORIGINAL


def test_verbose_says_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = tensors((1, 1, 2, 8), (1, 1, 2, 8), (1, 1, 2, 8))
    with aule.installed(verbose=True):
        for _ in range(2):
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v, scale=float("nan"))
    said = capsys.readouterr().out.splitlines()
    assert "aule: test_install.ORIGINAL is still PyTorch's own function" in said
    said = [line for line in said if not line.endswith("own function")]
    assert said == ["aule: serving attention", "aule: passed on to PyTorch: scale"]


# -- what is passed on -------------------------------------------------------------------------------------------------


def test_reasons() -> None:
    q, k, v = tensors((2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8))
    big = tensors((1, 1, 2, 640))[0]
    mask = torch.zeros(4, 4)
    with aule.installed():
        sdpa = F.scaled_dot_product_attention
        assert sdpa(big, big, big).shape == big.shape
        assert sdpa(q, k, v, scale=float("nan")).shape == q.shape
        assert sdpa(*(x.to("meta") for x in (q, k, v))).device.type == "meta"
        torch.testing.assert_close(torch.vmap(sdpa)(q, k, v), ORIGINAL(q, k, v))
        sdpa(q, k, v, mask, is_causal=True)  # PyTorch computes it or raises, as it likes
        with pytest.raises(RuntimeError, match="same dtype"):
            sdpa(q, k.half(), v)
        with pytest.raises(RuntimeError):
            sdpa(q, k, v[..., :2, :1, 1])
    assert (
        aule.dispatch_stats().items()
        >= {
            "served": 0,
            "passed_on": 7,
            "reasons": {
                "head_dim above 576": 1,
                "scale": 1,
                "device meta": 1,
                "a functorch transform": 1,
                "attn_mask with is_causal": 1,
                "dtype": 1,
                "shapes": 1,
            },
            "ops": {},
        }.items()
    )


def test_a_backend_that_cannot_is_counted_by_its_code() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8)))
    with aule.installed(backend="numpy"):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None
    assert aule.dispatch_stats()["reasons"] == {"AULE_ERROR_NO_GRADIENT": 1}


def test_torchscript_sees_pytorchs_own() -> None:
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    (x,) = tensors((1, 3, 16))
    with aule.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(module)
        torch.testing.assert_close(scripted(x, x, x, need_weights=False), module(x, x, x, need_weights=False))
        traced = torch.jit.trace(lambda x: F.scaled_dot_product_attention(x, x, x), x, check_trace=False)
    torch.testing.assert_close(traced(x), ORIGINAL(x, x, x))
    stats = aule.dispatch_stats()
    assert stats["served"] == 1 and set(stats["reasons"]) == {"torch.jit.trace"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_reaches_the_installed_function(dtype: Any) -> None:
    q, k, v = (x.requires_grad_() for x in tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)))
    with torch.autocast("cpu", dtype):
        expected = F.scaled_dot_product_attention(q, k, v)
        with aule.installed():
            out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == expected.dtype == dtype and served() == 1
    assert torch.equal(out, aule.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v))))
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert grad.dtype == torch.float32


# -- PyTorch's modules -------------------------------------------------------------------------------------------------


def agree(module: Any, *inputs: Any, calls: int, **options: Any) -> None:
    """Output and all gradients of a module, with and without aule."""

    def run() -> list[Any]:
        given = [x.detach().clone().requires_grad_() for x in inputs]
        module.zero_grad()
        out = module(*given, **options)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in given), *(p.grad.clone() for p in module.parameters())]

    expected = run()
    aule.reset_dispatch_stats()
    with aule.installed():
        found = run()
    assert served() == calls
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both"])
def test_multihead_attention(train: bool, masks: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True).train(train)
    (x,) = tensors((2, 5, 16))
    options: dict[str, Any] = {"need_weights": False}
    if masks in ("causal", "both"):
        options |= {"attn_mask": torch.nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True}
    if masks in ("padding", "both"):
        padding = torch.zeros(2, 5)
        padding[1, 3:] = -torch.inf
        options["key_padding_mask"] = padding
    agree(lambda_module(module, options), x, calls=1)


def lambda_module(module: Any, options: dict[str, Any]) -> Any:
    """Self-attention of one input, as a module."""

    class Self(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Any) -> Any:
            return self.inner(x, x, x, **options)

    return Self()


@pytest.mark.parametrize("train", [True, False])
def test_transformer_encoder(train: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(train)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    agree(encoder, *tensors((2, 5, 16)), calls=2, src_key_padding_mask=padding)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
    agree(encoder, *tensors((2, 5, 16)), calls=2, mask=mask, is_causal=True)


def test_encoder_without_gradients() -> None:
    """PyTorch has a fused layer of its own there, which calls no attention function; without that, ours is called."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    (x,) = tensors((2, 5, 16))
    with torch.no_grad():
        expected = layer(x)
        with aule.installed():
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
            assert served() == 0
            fused = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
            finally:
                torch.backends.mha.set_fastpath_enabled(fused)
    assert served() == 1


def test_dropout_in_training_is_served() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
    (x,) = tensors((2, 5, 16))
    with aule.installed():
        torch.manual_seed(0)
        first = layer(x)
        first.sum().backward()
        torch.manual_seed(0)
        assert torch.equal(layer(x), first) and not torch.equal(layer(x), first)
    assert aule.dispatch_stats().items() >= {"served": 3, "passed_on": 0, "reasons": {}, "ops": {}}.items()


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(4, 4), (3, 5)])
def test_causal_bias(variant: str, seq_q: int, seq_kv: int) -> None:
    from torch.nn.attention import bias

    mask = getattr(bias, variant)(seq_q, seq_kv)
    q, k, v = tensors((2, 2, seq_q, 8), (2, 2, seq_kv, 8), (2, 2, seq_kv, 8))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with aule.installed():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), expected)
        assert served() == 1
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=float("nan"))
    stats = aule.dispatch_stats()
    assert stats["served"] == 1 and set(stats["reasons"]) == {"scale"}


def test_subclasses_and_modes_see_the_call() -> None:
    class Marked(torch.Tensor):  # type: ignore[misc]
        pass

    seen = []

    class Watch(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    with aule.installed():
        out = F.scaled_dot_product_attention(q.as_subclass(Marked), k, v)
        with Watch():
            F.scaled_dot_product_attention(q, k, v)
        with torch.device("cpu"):
            F.scaled_dot_product_attention(q, k, v)
        assert F.scaled_dot_product_attention in seen
    assert type(out) is Marked and served() == 3


# -- PyTorch's own registry --------------------------------------------------------------------------------------------


@pytest.fixture
def flash() -> Iterator[Any]:
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry of flash-attention implementations")
    aule.register_flash_attention_impl()
    assert "aule" in attention.list_flash_attention_impls() and attention.current_flash_attention_impl() is None
    with warnings.catch_warnings():  # PyTorch warns of the first kernel in a process that is replaced
        warnings.simplefilter("ignore")
        attention.activate_flash_attention_impl("aule")
    yield attention
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", ["plain", "causal", "mask", "grouped"])
def test_registered_implementation(flash: Any, dtype: Any, options: str) -> None:
    given: dict[str, Any] = {
        "plain": {"scale": 0.3},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": torch.ones(5, 6, dtype=torch.bool).tril()},
        "grouped": {"enable_gqa": True},
    }[options]
    heads = 2 if options == "grouped" else 4
    inputs = [x.to(dtype) for x in tensors((2, 5, 4, 8), (2, 6, heads, 8), (2, 6, heads, 8))]
    results = []
    for _ in range(2):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **given)
        out.square().sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
        if flash.current_flash_attention_impl() is not None:
            assert served() == 1
            flash.restore_flash_attention_impl()
    assert served() == 1, "PyTorch's kernel is back"
    for mine, theirs in zip(*results, strict=True):
        allowed = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype] * theirs.abs().max()
        assert (mine - theirs).abs().max() <= allowed


def test_registered_implementation_refuses(flash: Any) -> None:
    (x,) = tensors((1, 1, 4, 640))
    x.requires_grad_()
    F.scaled_dot_product_attention(x, x, x).sum().backward()
    assert x.grad is not None
    assert aule.dispatch_stats()["reasons"] == {"AULE_ERROR_INVALID_SHAPE": 1}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_registered_implementation_in_compiled_graphs(flash: Any, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    inputs = tensors((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8))

    def f(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    results = []
    for function in (torch.compile(f, backend=backend, fullgraph=True), f):
        given = [x.clone().requires_grad_() for x in inputs]
        out = function(*given)
        out.square().sum().backward()
        results.append((out.detach(), *(x.grad for x in given)))
        if function is not f:
            assert served() == 1
            flash.restore_flash_attention_impl()
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_stored_graphs_are_kept_apart() -> None:
    """PyTorch stores compiled graphs by what its compiler saw, which is not always whose attention it was."""
    from torch.compiler import config

    own = config.cache_key_tag
    tags = {own}
    with aule.installed():
        tags.add(config.cache_key_tag)
        with aule.installed("numpy"):
            tags.add(config.cache_key_tag)
        assert config.cache_key_tag in tags
    assert len(tags) == 3 and config.cache_key_tag == own


# -- who is asked first ------------------------------------------------------------------------------------------------


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    monkeypatch.setattr(route, "_cpu_engine", lambda: False)
    translate.warn_without_engine.cache_clear()


def test_without_the_cpu_engine_calls_are_passed_on(without_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    with aule.installed(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), ORIGINAL(q, k, v))
        compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, k, v), backend="eager", fullgraph=True)
        assert torch.equal(compiled(q), ORIGINAL(q, k, v))
    assert [str(x.message) for x in said if issubclass(x.category, RuntimeWarning)] == [
        "aule passes attention on CPU tensors on to PyTorch, because there is no CPU engine: pip install "
        '"aule-attention[cpu]"'
    ]
    stats = aule.dispatch_stats()
    assert stats["served"] == 0 and set(stats["reasons"]) == {"no CPU engine"} and stats["passed_on"] >= 3
    aule.reset_dispatch_stats()
    with aule.installed("numpy"):  # who names a backend gets it
        F.scaled_dot_product_attention(q, k, v)
    monkeypatch.setenv("AULE_BACKEND", "numpy")
    with aule.installed():
        F.scaled_dot_product_attention(q, k, v)
    assert served() == 2


def test_pytorchs_choice_of_kernels_is_honoured() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)))
    reason = "sdpa_kernel allows no fused kernel"
    with aule.installed():
        for allowed in (SDPBackend.FLASH_ATTENTION, [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
            with sdpa_kernel(allowed):
                F.scaled_dot_product_attention(q, k, v)
        assert served() == 2
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v)
            (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            assert torch.autograd.grad(grad.sum(), k)[0].isfinite().all()  # as our error of a second derivative says
        assert aule.dispatch_stats()["reasons"] == {reason: 1}

        def f(q: Any) -> Any:
            with sdpa_kernel(SDPBackend.MATH):
                out = F.scaled_dot_product_attention(q, k, v)
            return out + F.scaled_dot_product_attention(q, k, v)

        aule.reset_dispatch_stats()
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(q.detach())
        torch.testing.assert_close(compiled, 2 * ORIGINAL(q, k, v))
        stats = aule.dispatch_stats()
    assert stats["served"] == 1 and set(stats["reasons"]) == {reason}


def test_functions_that_were_imported_before(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    early = types.ModuleType("early")
    exec(
        "from torch.nn.functional import scaled_dot_product_attention\nkept = scaled_dot_product_attention", vars(early)
    )
    monkeypatch.setitem(sys.modules, "early", early)
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    with aule.installed(verbose=True):
        assert early.scaled_dot_product_attention is F.scaled_dot_product_attention is not ORIGINAL
        early.scaled_dot_product_attention(q, k, v)
        assert served() == 1
        late = types.ModuleType("late")
        exec("from torch.nn.functional import scaled_dot_product_attention", vars(late))
        monkeypatch.setitem(sys.modules, "late", late)
        assert early.kept is ORIGINAL is torch._C._nn.scaled_dot_product_attention
    assert "aule: early.kept is still PyTorch's own function\n" in capsys.readouterr().out
    assert early.scaled_dot_product_attention is late.scaled_dot_product_attention is ORIGINAL


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_passed_on(layout: Any) -> None:
    rows = [x.requires_grad_() for x in tensors((3, 2, 8), (5, 2, 8))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layout is a prototype
        nested = torch.nested.as_nested_tensor(rows, layout=layout)
        nested = nested.transpose(1, 2) if layout is torch.jagged else nested.transpose(1, 2).contiguous()
    results = []
    for context in (contextlib.nullcontext(), aule.installed()):
        with context:
            out = F.scaled_dot_product_attention(nested, nested, nested)
        grads = torch.autograd.grad(sum(x.square().sum() for x in out.unbind()), rows, retain_graph=True)
        results.append([*out.unbind(), *grads])
    assert aule.dispatch_stats()["reasons"] == {"a nested tensor": 1}
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    for call in (aule.flash_attention, aule.scaled_dot_product_attention, aule.residual_rms_norm):
        with pytest.raises(aule.AuleError, match="got a nested"):
            call(nested, nested, nested)
