"""Attention as operators of PyTorch: `opcheck`, compiled and exported code, fake and meta tensors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

from torch._dynamo.utils import counters  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from aule.frontends.torch import entry as front_end  # noqa: E402
from aule.frontends.torch.compile import operators as torch_ops  # noqa: E402

F = torch.nn.functional
Q, K, V = (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 12)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    aule.reset_dispatch_stats()
    yield
    aule.uninstall()
    aule.reset_dispatch_stats()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return str(request.param)


def made(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def wanting(*tensors: Any) -> list[Any]:
    """Fresh leaves with the same layout that want a gradient."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x).requires_grad_() for x in tensors]


def arguments(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ...]:
    """The operator's arguments for a call."""
    return (q, k, v, *torch_ops._arguments(aule.options.AttentionOptions(**options)))


# -- opcheck -----------------------------------------------------------------------------------------------------------


def spread() -> dict[str, Any]:
    """Calls that show every kind of argument."""
    double = [x.double() for x in (made(*Q[1:]), made(*K[1:]), made(*V[1:]))]
    packed = made(2, 5, 3, 4, 8).unbind(2)
    return {
        "causal": arguments(*wanting(made(*Q), made(*K), made(*V))),
        "every option": arguments(
            *wanting(made(*Q), made(*K), made(*V)),
            mask=made(5, 6).requires_grad_(),
            bias=made(2, 1, 5, 6).requires_grad_(),
            alibi_slopes=made(4).abs(),
            sinks=made(4).requires_grad_(),
            causal=False,
            scale=0.3,
            window=(3, 2),
            softcap=2.0,
        ),
        "dropout": arguments(
            *wanting(made(*Q), made(*K), made(*V)),
            sinks=made(4).requires_grad_(),
            dropout_p=0.3,
            seed=torch.tensor([5, -7], dtype=torch.int32),
            deterministic=True,
        ),
        "float64, three axes": arguments(*wanting(*double), causal_align="top-left"),
        "bfloat16, two axes": arguments(*wanting(*(made(5, 8, dtype=torch.bfloat16) for _ in range(3))), window=2),
        "boolean mask": arguments(*wanting(made(*Q), made(*K), made(*V)), mask=made(2, 1, 1, 6) > 0, causal=False),
        "only k": arguments(made(*Q), *wanting(made(*K)), made(*V)),
        "only bias": arguments(made(*Q), made(*K), made(*V), bias=made(4, 1, 6).requires_grad_()),
        "only sinks": arguments(made(*Q), made(*K), made(*V), sinks=made(4).requires_grad_()),
        "no gradient": arguments(made(*Q), made(*K), made(*V)),
        "packed": arguments(*(x.transpose(1, 2).detach().requires_grad_() for x in packed)),
        "expanded": arguments(made(*Q), made(1, 2, 6, 8).expand(K).detach(), made(2, 1, 6, 8).expand(K).detach()),
        "no rows": arguments(*wanting(made(2, 4, 0, 8), made(*K), made(*V))),
        "no keys": arguments(*wanting(made(*Q), made(2, 2, 0, 8), made(2, 2, 0, 8))),
    }


@pytest.mark.parametrize("case", spread())
def test_opcheck(case: str) -> None:
    torch.library.opcheck(torch.ops.aule.attention.default, spread()[case])


@pytest.mark.parametrize("case", ["causal", "every option", "dropout", "float64, three axes", "no keys"])
def test_opcheck_of_the_backward_operator(case: str) -> None:
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in spread()[case]]
    out, lse = torch.ops.aule.attention(*given)
    wanted = [given[3] is not None, given[4] is not None, given[6] is not None]
    found = torch.ops.aule.attention_backward(out, out, lse, *given, wanted)
    assert [x.shape for x in found[:3]] == [x.shape for x in given[:3]]
    torch.library.opcheck(torch.ops.aule.attention_backward.default, (out, out, lse, *given, wanted))


def test_the_operator_is_differentiated_once() -> None:
    q, k, v = wanting(made(*Q), made(*K), made(*V))
    out, lse = torch.ops.aule.attention(*arguments(q, k, v))
    assert out.requires_grad and not lse.requires_grad
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(aule.AuleError, match="expected one derivative"):
        torch.autograd.grad(grad.sum(), q)
    slopes = torch.zeros(4, requires_grad=True)
    out, _ = torch.ops.aule.attention(*arguments(q, k, v, alibi_slopes=slopes))
    with pytest.raises(aule.AuleError, match="detach alibi_slopes"):
        out.sum().backward()


def test_plain_calls_do_not_pass_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def passed(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(front_end, "_attention_operator", passed)
    q, k, v = wanting(made(*Q), made(*K), made(*V))
    aule.flash_attention(q, k, v).sum().backward()
    aule.scaled_dot_product_attention(torch.nn.Parameter(q), k, v, enable_gqa=True).sum().backward()
    with torch.no_grad():
        aule.flash_attention(q, k, v)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def flash(q: Any, k: Any, v: Any, *added: Any) -> Any:
    bias, sinks = added or (None, None)
    return aule.flash_attention(q * 2, k, v, window=4, softcap=3.0, bias=bias, sinks=sinks) + 1


def sdpa(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    return aule.scaled_dot_product_attention(q * 2, k, v, mask, is_causal=mask is None, enable_gqa=True) + 1


def installed(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    return F.scaled_dot_product_attention(q * 2, k, v, mask, is_causal=mask is None, enable_gqa=True) + 1


def results(function: Any, *inputs: Any) -> list[Any]:
    """The output, and the gradients of those inputs that want one."""
    given = [y if x.requires_grad else x for x, y in zip(inputs, wanting(*inputs), strict=True)]
    out = function(*given)
    wanted = [x for x in given if x.requires_grad]
    grads = torch.autograd.grad(out.float().square().sum(), wanted) if wanted else ()
    return [out.detach(), *grads]


def same(function: Any, *inputs: Any, backend: Any = "aot_eager", **options: Any) -> None:
    """Compiled code computes the same bits as the call, and its gradients the same."""
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    for mine, theirs in zip(results(compiled, *inputs), results(function, *inputs), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_compiled_flash_attention(backend: str, dtype: Any) -> None:
    same(flash, *wanting(made(*Q, dtype=dtype), made(*K, dtype=dtype), made(*V, dtype=dtype)), backend=backend)


def test_compiled_bias_and_sinks(backend: str) -> None:
    same(flash, *wanting(made(*Q), made(*K), made(*V), made(2, 1, 5, 6), made(4)), backend=backend)


@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "bias", "sinks"])
def test_compiled_gradient_of_one_alone(which: int) -> None:
    inputs = [made(*Q), made(*K), made(*V), made(2, 1, 5, 6), made(4)]
    inputs[which].requires_grad_()
    same(flash, *inputs)


def test_gradients_of_some_are_those_of_all() -> None:
    inputs = [made(*Q), made(*K), made(*V), made(2, 1, 5, 6), made(4)]
    _, *together = results(flash, *wanting(*inputs))
    for chosen in [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 4), (2, 3, 4)]:
        given = [x.clone().requires_grad_(i in chosen) for i, x in enumerate(inputs)]
        _, *found = results(flash, *given)
        assert all(torch.equal(grad, together[i]) for i, grad in zip(chosen, found, strict=True))


@pytest.mark.parametrize("mask", [False, True])
def test_compiled_sdpa(backend: str, mask: bool) -> None:
    inputs = wanting(made(*Q), made(*K), made(*V), *([made(5, 6)] if mask else []))
    same(sdpa, *inputs, backend=backend)
    assert aule.dispatch_stats().items() >= {"served": 0, "passed_on": 0, "reasons": {}, "ops": {}}.items()


def test_compiled_layouts() -> None:
    """Packed, expanded and empty tensors."""
    same(lambda x: flash(*(part.transpose(1, 2) for part in x.unbind(2))), *wanting(made(2, 5, 3, 4, 8)))
    same(lambda q, k, v: flash(q, k.expand(K), v.expand(V)), *wanting(made(*Q), made(1, 2, 6, 8), made(2, 1, 6, 12)))
    same(flash, *wanting(made(2, 4, 0, 8), made(*K), made(*V)))
    same(flash, *wanting(made(*Q), made(2, 2, 0, 8), made(2, 2, 0, 12)))
    same(sdpa, *wanting(made(2, 2, 3, 5, 8), made(3, 6, 8), made(1, 3, 6, 8)))


def test_compiled_results_beside_the_output() -> None:
    q, k, v = made(*Q), made(*K), made(*V)

    def both(q: Any, k: Any, v: Any) -> Any:
        out, lse = aule.flash_attention(q, k, v, return_lse=True)
        into = torch.empty_like(out)
        return out, lse, aule.flash_attention(q, k, v, causal=False, out=into), into

    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype) for x in (q, k, v)]
        for mine, theirs in zip(
            torch.compile(both, backend="aot_eager", fullgraph=True)(*given), both(*given), strict=True
        ):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_compiled_with_the_eager_backend_is_the_plain_call() -> None:
    same(flash, *wanting(made(*Q), made(*K), made(*V)), backend="eager")


@pytest.mark.parametrize("mask", [False, True])
def test_compiled_under_install(backend: str, mask: bool) -> None:
    inputs = wanting(made(*Q), made(*K), made(*V), *([made(5, 6)] if mask else []))
    with aule.installed():
        compiled = results(torch.compile(installed, backend=backend, fullgraph=True), *inputs)
        assert aule.dispatch_stats().items() >= {"served": 1, "passed_on": 0, "reasons": {}, "ops": {}}.items(), (
            "counted when it is compiled"
        )
        plain = results(installed, *inputs)
    assert all(map(torch.equal, compiled, plain))


def test_compiled_model_under_install(backend: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True

    def run(function: Any) -> list[Any]:
        x = made(2, 5, 16).requires_grad_()
        model.zero_grad()
        out = function(x, src_key_padding_mask=padding)
        out.square().sum().backward()
        return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]

    expected = run(model)
    with aule.installed():
        found = run(torch.compile(model, backend=backend, fullgraph=True))
    assert aule.dispatch_stats().items() >= {"served": 2, "passed_on": 0, "reasons": {}, "ops": {}}.items()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_compiled_under_install_passes_on() -> None:
    (q,) = wanting(made(2, 4, 5, 640))
    with aule.installed():
        compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="aot_eager", fullgraph=True)
        compiled(q).sum().backward()
    assert (
        aule.dispatch_stats().items()
        >= {"served": 0, "passed_on": 1, "reasons": {"head_dim above 576": 1}, "ops": {}}.items()
    )
    found = compiled(q)  # compiled again, since PyTorch's function is another one now
    assert found.shape == q.shape and aule.dispatch_stats()["passed_on"] == 1


def test_compiled_transforms_under_install_are_pytorchs() -> None:
    """Which has second derivatives."""
    q = made(2, 4, 5, 8)

    def penalty(q: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q).square().sum()

    def twice(q: Any) -> Any:
        return torch.func.grad(lambda q: torch.func.grad(penalty)(q).square().sum())(q)

    expected = twice(q)
    with aule.installed():
        found = torch.compile(twice, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert set(aule.dispatch_stats()["reasons"]) == {"a functorch transform"}


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compiled_causal_bias(variant: str, dropout: float) -> None:
    from torch.nn.attention import bias

    mask = getattr(bias, variant)(3, 5)
    q, k, v = made(2, 2, 3, 8), made(2, 2, 5, 8), made(2, 2, 5, 8)

    def run(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)

    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with aule.installed():
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
    assert aule.dispatch_stats().items() >= {"served": 1, "passed_on": 0, "reasons": {}, "ops": {}}.items()
    assert found.shape == expected.shape
    if not dropout:
        torch.testing.assert_close(found, expected)
        direct = torch.compile(aule.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(direct(q, k, v, mask), expected)


def test_compiled_dropout(backend: str) -> None:
    """Every call drops other weights, and its gradients are those of the same ones."""
    q, k, v = made(*Q), made(*K), made(*V)

    def drop(q: Any, k: Any, v: Any, seed: int | None = None) -> Any:
        return aule.flash_attention(q * 2, k, v, causal=False, dropout_p=0.5, seed=seed)

    compiled = torch.compile(drop, backend=backend, fullgraph=True)
    seen = []
    for _ in range(3):
        given = wanting(q, k, v)
        out = compiled(*given)
        dout = made(*out.shape, seed=1)
        out.backward(dout)
        # The result is linear in v: only with the same weights dropped do these agree.
        torch.testing.assert_close((given[2].grad * v).sum(), (dout * out).sum(), rtol=1e-4, atol=1e-4)
        seen.append(out.detach())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    torch.manual_seed(3)
    first = compiled(q, k, v)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(q, k, v), first, rtol=0, atol=0)
    for seed in (5, 6, 2**64 - 1):
        found = results(lambda q, k, v, seed=seed: compiled(q, k, v, seed), *wanting(q, k, v))
        expected = results(lambda q, k, v, seed=seed: drop(q, k, v, seed), *wanting(q, k, v))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_exported_dropout_draws_anew() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return aule.flash_attention(q, k, v, causal=False, dropout_p=0.5)

    given = (made(*Q), made(*K), made(*V))
    exported = torch.export.export(Model(), given).module()
    assert not torch.equal(exported(*given), exported(*given))


def test_packed_batches_are_left_out_of_compiled_code() -> None:
    at, x = torch.tensor([0, 3, 7], dtype=torch.int32), made(7, 2, 8)

    def run(x: Any, at: Any) -> Any:
        return aule.flash_attention_varlen(x * 2, x, x, at, at) + 1

    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(x, at), run(x, at))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="flash_attention_varlen"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x, at)
    with pytest.raises(aule.AuleError, match="got a functorch transform"):
        torch.vmap(lambda x: run(x, at))(x[None])
    with FakeTensorMode() as mode, pytest.raises(aule.AuleError, match="got FakeTensor"):
        run(mode.from_tensor(x), mode.from_tensor(at))


def test_compiled_errors_keep_their_words() -> None:
    q, k, v = made(*Q), made(*K), made(*V)
    cases: list[Any] = [
        (lambda q, k, v: aule.flash_attention(q, k, v, window=-5), r"expected an int window >= 1, got -5"),
        (lambda q, k, v: aule.flash_attention(q, k, v, scale="a"), r"expected scale to be a number"),
        (lambda q, k, v: aule.flash_attention(q, k, v[..., :3, :]), r"expected k and v of equal seq"),
        (lambda q, k, v: aule.scaled_dot_product_attention(q, k, v), r"expected leading axes that broadcast"),
        (lambda q, k, v: aule.flash_attention(q, k, v, dropout_p=2.0), r"expected dropout_p in 0..1, got 2.0"),
        (lambda q, k, v: aule.flash_attention(q, k, v, dropout_p=0.1, seed=-1), r"expected a seed in 0..2\*\*64-1"),
        (lambda q, k, v: aule.flash_attention(q, k, v, deterministic=1), r"expected deterministic to be True or False"),
    ]
    for function, message in cases:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(function, backend="aot_eager", fullgraph=True)(q, k, v)


# -- aule_attention ----------------------------------------------------------------------------------------------------


def test_aule_attention(backend: str) -> None:
    q, k, v = wanting(made(*Q), made(*K), made(*V))
    expected = results(lambda *x: aule.flash_attention(*x, causal=False, scale=0.3, window=3), q, k, v)
    found = results(lambda *x: aule.aule_attention(*x, False, 0.3, window=3), q, k, v)
    assert all(map(torch.equal, found, expected))
    same(lambda *x: aule.aule_attention(*x), q, k, v, backend=backend)
    out, lse = aule.aule_attention(q, k, v, return_lse=True)
    assert torch.equal(out, aule.flash_attention(q, k, v)) and lse.shape == Q[:3]
    with pytest.raises(aule.InvalidDtypeError, match="expected torch tensors, got ndarray"):
        aule.aule_attention(*(x.detach().numpy() for x in (q, k, v)))


# -- dynamic shapes ----------------------------------------------------------------------------------------------------


def graphs() -> int:
    """How many were compiled since the last reset."""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("function", [flash, sdpa, installed])
def test_one_graph_for_all_lengths(function: Any) -> None:
    if function is installed:
        aule.install()
    elif function is flash:
        function(made(*Q), made(*K), made(*V))  # a first call in the process adds to a cache, which graphs watch
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, seq_q, seq_kv in ((3, 5, 7), (5, 9, 17), (6, 10, 33)):
        q, k, v = wanting(made(batch, 4, seq_q, 8), made(batch, 2, seq_kv, 8), made(batch, 2, seq_kv, 8))
        for mine, theirs in zip(results(compiled, q, k, v), results(function, q, k, v), strict=True):
            assert torch.equal(mine, theirs)
    assert graphs() == 1


def test_marked_dimensions() -> None:
    aule.flash_attention(made(*Q), made(*K), made(*V))
    compiled = torch.compile(aule.flash_attention, backend="aot_eager", fullgraph=True)
    q, k, v = made(3, 4, 5, 8), made(3, 2, 7, 8), made(3, 2, 7, 8)
    for x in (q, k, v):
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
    compiled(q, k, v)
    q, k, v = made(5, 4, 11, 8), made(5, 2, 20, 8), made(5, 2, 20, 8)
    assert torch.equal(compiled(q, k, v), aule.flash_attention(q, k, v))
    assert graphs() == 1


# -- torch.export ------------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):  # type: ignore[misc]
    """A module around a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return self.function(q, k, v)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("function", [flash, sdpa, installed])
def test_exported(function: Any, strict: bool, tmp_path: Any) -> None:
    if function is installed:
        aule.install()
    batch, seq_q, seq_kv = (torch.export.Dim(name, min=2, max=512) for name in ("batch", "seq_q", "seq_kv"))
    shapes = ({0: batch, 2: seq_q}, {0: batch, 2: seq_kv}, {0: batch, 2: seq_kv})
    program = torch.export.export(
        Module(function), (made(*Q), made(*K), made(*V)), dynamic_shapes=shapes, strict=strict
    )
    assert "aule.attention.default" in [str(node.target) for node in program.graph.nodes]
    torch.export.save(program, tmp_path / "program.pt2")
    for run in (program.module(), torch.export.load(tmp_path / "program.pt2").module()):
        for inputs in ((made(*Q), made(*K), made(*V)), (made(3, 4, 9, 8), made(3, 2, 17, 8), made(3, 2, 17, 12))):
            assert torch.equal(run(*inputs), function(*inputs))


@pytest.mark.parametrize("first", ["aule, torch", "torch, aule", "torch._export.serde, aule, torch"])
def test_exported_programs_load_with_aule_imported(first: str, tmp_path: Any) -> None:
    """In a new process, in which nothing else has registered the operators, whichever is imported first."""
    q = made(1, 2, 5, 8)
    program = torch.export.export(Module(lambda *x: aule.rms_norm(aule.flash_attention(*x))), (q, q, q))
    torch.export.save(program, tmp_path / "program.pt2")
    code = f"import {first}; print(len(list(torch.export.load({str(tmp_path / 'program.pt2')!r}).graph.nodes)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-1:] == [str(len(list(program.graph.nodes)))], done.stderr


# -- fake tensors, meta tensors, modes ---------------------------------------------------------------------------------


def test_fake_and_meta_tensors() -> None:
    real = made(*Q), made(*K), made(*V)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in real]
        out, lse = aule.flash_attention(*fake, return_lse=True)
        assert isinstance(out, FakeTensor) and out.shape == (2, 4, 5, 12) and out.device.type == "cpu"
        assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
        assert aule.scaled_dot_product_attention(*fake, enable_gqa=True).shape == out.shape
    out = aule.flash_attention(*(x.to("meta") for x in real))
    assert out.is_meta and out.shape == (2, 4, 5, 12)
    with pytest.raises(aule.InvalidShapeError, match="of equal seq"):
        aule.flash_attention(*(x.to("meta") for x in (made(*Q), made(*K), made(2, 2, 7, 8))))


def test_modes_see_the_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    seen = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = wanting(made(*Q), made(*K), made(*V))
    expected = aule.flash_attention(q, k, v)
    with Watch():
        out = aule.flash_attention(q, k, v)
    assert torch.equal(out, expected) and seen[0] == "aule.attention.default"

    q, k, v = wanting(made(2, 4, 5, 8), made(2, 4, 6, 8), made(2, 4, 6, 8))
    counts = []
    for function in (aule.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with FlopCounterMode(display=False) as mode, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            function(q, k, v).sum().backward()
        counts.append(mode.get_total_flops())
    mine, theirs = counts
    assert mine == theirs * 7 // 6, "PyTorch's formula keeps the scores; ours makes them again, one product of six more"


def test_torchscript_tracing_is_refused() -> None:
    """Also behind a call that was planned: with tensors for lengths kernels would write where nothing is."""
    q, k, v = made(*Q), made(*K), made(*V)
    at = torch.tensor([0, 3, len(q[0, 0])], dtype=torch.int32)
    calls = {
        "flash_attention": lambda q: aule.flash_attention(q, k, v),
        "flash_attention_varlen": lambda q: aule.flash_attention_varlen(*[q[0].transpose(0, 1)] * 3, at, at),
        "decode_attention": lambda q: aule.decode_attention(q, k, v),
        "rms_norm": aule.rms_norm,
    }
    for name, call in calls.items():
        call(q)
        with pytest.raises(aule.AuleError, match=rf"\[{name}\] expected no torch.jit.trace.*use torch.export"):
            torch.jit.trace(call, q)


def test_transforms_of_what_has_no_operator_are_refused() -> None:
    q, k, v = made(*Q), made(*K), made(*V)
    with pytest.raises(aule.AuleError, match=r"\[decode_attention\] expected plain tensors.*got a functorch transform"):
        torch.vmap(lambda q: aule.decode_attention(q, k, v))(q[None])


# -- autocast ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_follows_autocast(dtype: Any, compiled: bool) -> None:
    def cast(q: Any, k: Any, v: Any, bias: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return aule.flash_attention(q, k, v, bias=bias)

    function = torch.compile(cast, backend="aot_eager", fullgraph=True) if compiled else cast
    inputs = wanting(made(*Q), made(*K), made(*V), made(5, 6))
    out, *grads = results(function, *inputs)
    assert out.dtype == dtype and all(grad.dtype == torch.float32 for grad in grads)
    bias = inputs[3]
    expected = results(
        lambda q, k, v: aule.flash_attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias), *inputs[:3]
    )
    assert torch.equal(out, expected[0]), "a bias keeps its precision"
    assert all(map(torch.equal, grads[:3], expected[1:]))


def test_autocast_leaves_what_pytorch_leaves() -> None:
    q, k, v = made(*Q), made(*K), made(*V)
    with torch.autocast("cpu", torch.bfloat16):
        assert aule.flash_attention(q, k.bfloat16(), v.half()).dtype == torch.bfloat16
        assert aule.flash_attention(q.double(), k.double(), v.double()).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert aule.flash_attention(q, k, v).dtype == torch.float32
    with torch.autocast("cuda", torch.float16, enabled=torch.cuda.is_available()):
        assert aule.flash_attention(q, k, v).dtype == torch.float32, "that of another device"
