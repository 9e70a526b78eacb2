"""Tensors of devices that aule does not drive: through the host and back, forward and backward.

CPU tensors stand in for them: the front end is told that they are elsewhere. ``to`` and ``cpu`` then copy nothing, but
the path is the same.
"""

from __future__ import annotations

from typing import Any

import pytest

import aule
from aule.backends import registry

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

from aule.frontends.torch import route as torch_routes  # noqa: E402

ROUTE, HOME = torch_routes.route, torch_routes.home


class Elsewhere:
    """What is asked of a tensor to find its route."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)
        self.is_cuda, self.is_cpu = kind == "cuda", kind == "cpu"


@pytest.fixture(autouse=True)
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    monkeypatch.setattr(torch_routes, "route", lambda tensor, backend: torch_routes.STAGED)
    monkeypatch.setattr(torch_routes, "home", lambda tensor: torch_routes.STAGED)


def made(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def run(dtype: Any, **given: Any) -> list[Any]:
    """Output and gradients of a call with a bias and sinks."""
    leaves = [made(2, 4, 9, 16, dtype=dtype), made(2, 2, 11, 16, dtype=dtype), made(2, 2, 11, 8, dtype=dtype)]
    leaves = [x.requires_grad_() for x in (*leaves, made(2, 1, 9, 11), made(4))]
    q, k, v, bias, sinks = leaves
    out, lse = aule.flash_attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, **given)
    assert out.dtype == dtype and lse.dtype == torch.float32 and not lse.requires_grad
    return [out, lse, *torch.autograd.grad(out.double().square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(dtype, backend="cpu")
    monkeypatch.setattr(torch_routes, "route", ROUTE)
    for mine, theirs in zip(found, run(dtype, backend="cpu"), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_the_best_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are copied anyway go where host arrays go; those in host memory stay on the CPU for gradients."""
    cpu, asked = registry.find("cpu"), []

    def choose(spec: str | None = None) -> Any:
        asked.append(spec)
        return cpu

    monkeypatch.setattr(registry, "choose", choose)
    run(torch.float32)
    assert asked == [None, None], "once for each direction"
    asked.clear()
    run(torch.float64)
    assert not asked, "float64 is the CPU's"
    monkeypatch.setattr(torch_routes, "route", ROUTE)
    run(torch.float32)
    assert not asked


def test_through_a_forced_device(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        registry.find("vulkan")
    except aule.BackendUnavailableError as error:
        pytest.skip(error.message)
    expected = run(torch.float32, backend="cpu")
    named = run(torch.float32, backend="vulkan")
    monkeypatch.setenv("AULE_BACKEND", "vulkan")
    for found in (named, run(torch.float32)):
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def test_without_gradients() -> None:
    q, k, v = made(2, 4, 9, 16), made(2, 2, 11, 16), made(2, 2, 11, 8)
    out = torch.empty(2, 4, 9, 8)
    assert aule.flash_attention(q, k, v, out=out) is out
    plain, lse = aule.flash_attention(q, k, v, return_lse=True)
    assert torch.equal(out, plain) and lse.shape == (2, 4, 9)
    with pytest.raises(aule.InvalidShapeError, match="expected out of shape"):
        aule.flash_attention(q, k, v, out=torch.empty(2, 4, 9, 16))


def test_numpy_alone_has_no_gradients() -> None:
    q = made(1, 2, 4, 8).requires_grad_()
    with pytest.raises(aule.AuleError, match="NumPy has no gradients"):
        aule.flash_attention(q, q, q, backend="numpy")
    with torch.no_grad():
        assert aule.flash_attention(q, q, q, backend="numpy").shape == q.shape


def test_compiled() -> None:
    def step(q: Any, k: Any, v: Any) -> Any:
        return aule.flash_attention(q * 2, k, v)

    leaves = [made(2, 4, 9, 16).requires_grad_(), made(2, 2, 11, 16), made(2, 2, 11, 8).requires_grad_()]
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves[::2])))
    assert all(map(torch.equal, *results))


def test_install_passes_such_tensors_on() -> None:
    aule.reset_dispatch_stats()
    q = made(1, 2, 4, 8)
    with aule.installed():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert (
        aule.dispatch_stats().items() >= {"served": 0, "passed_on": 1, "reasons": {"device cpu": 1}, "ops": {}}.items()
    )
    with aule.installed(backend="cpu"):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert aule.dispatch_stats()["served"] == 1
    aule.reset_dispatch_stats()


@pytest.mark.parametrize("cuda_build", [True, False])
def test_routes(cuda_build: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_routes.cuda, "BUILD", cuda_build)
    host, staged = torch_routes.HOST, torch_routes.STAGED
    assert ROUTE(Elsewhere("cpu"), None) is host
    assert ROUTE(Elsewhere("xpu"), None) is staged
    cuda = torch_routes.CUDA if cuda_build else staged
    assert ROUTE(Elsewhere("cuda"), None) is cuda, "ROCm calls its tensors cuda, too"
    assert ROUTE(Elsewhere("cuda"), "vulkan") is staged
    assert HOME(Elsewhere("cuda")) is cuda
    monkeypatch.setenv("AULE_BACKEND", "vulkan")
    assert ROUTE(Elsewhere("cuda"), None) is staged
    assert ROUTE(Elsewhere("cuda"), "cuda") is cuda
    assert HOME(Elsewhere("cuda")) is cuda
