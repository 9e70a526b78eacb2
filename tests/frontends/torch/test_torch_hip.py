"""The route of ROCm tensors on CPU tensors: stand-ins for AMD's libraries compile the kernels with g++ and run them on
the tensors' own memory. AMD's compiler and hardware are not tested."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import devices
import hip_standin
import pytest

import aule
from aule.backends import registry
from aule.engine.signatures import Signatures
from aule.errors import BackendUnavailableError
from aule.runtime.base import Device

torch = pytest.importorskip("torch")

from aule.frontends.torch import repeated  # noqa: E402
from aule.frontends.torch import route as routes  # noqa: E402
from aule.frontends.torch.devices import base, hip, streams  # noqa: E402

pytestmark = pytest.mark.device


Use = Callable[[str], Device]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Lets CPU tensors take the route of ROCm's, unless a backend is named, to a device with an instruction set."""
    return lambda arch: in_place_of_rocm(monkeypatch, devices.need(f"hip-{arch}"))


def in_place_of_rocm(monkeypatch: pytest.MonkeyPatch, found: Device) -> Device:
    find = registry.find
    monkeypatch.setattr(found, "index", None)  # as a CPU tensor's device has it
    monkeypatch.setattr(registry, "find", lambda spec: found if spec == "hip:None" else find(spec))
    monkeypatch.setattr(routes, "route", lambda tensor, backend: routes.HOST if backend else routes.HIP)
    monkeypatch.setattr(routes, "home", lambda tensor: routes.HIP)
    monkeypatch.setattr(streams, "raw_stream", lambda index: 0)
    # What repeats calls on cuda tensors, for CPU tensors.
    monkeypatch.setattr(repeated, "_empty_cuda", repeated._empty_cpu)
    monkeypatch.setattr(repeated, "_current_device", lambda: 0)
    monkeypatch.setattr(repeated, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(aule.KVCache, "_host_backend", lambda cache: None)  # which names the CPU for CPU tensors
    monkeypatch.setattr(base, "signatures", Signatures())
    repeated.forget()
    launched()
    return found


def made(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def launched() -> int:
    """Launches since the last look."""
    return hip_standin.shared()[0].calls().count("hipModuleLaunchKernel")


@pytest.mark.parametrize(
    ("arch", "dtype", "allowed"), [("gfx942", torch.float16, 2e-3), ("gfx1201", torch.bfloat16, 1.6e-2)], ids=str
)
def test_forward_and_gradients(
    use: Use, arch: str, dtype: Any, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = use(arch)
    leaves = [made(1, heads, 33, 64, dtype=dtype) for heads in (4, 2, 2)]
    mine = [x.clone().requires_grad_() for x in leaves]
    exact = [x.double().requires_grad_() for x in leaves]
    dout = made(1, 4, 33, 64, dtype=dtype)
    out = aule.flash_attention(*mine, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    assert (out.double() - expected).abs().max() <= allowed * expected.abs().max()
    found = torch.autograd.grad(out, mine, dout)
    for f, e in zip(found, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert (f.double() - e).abs().max() <= allowed * e.abs().max()
    assert device.target.matrix_layout is not None and launched()
    with torch.no_grad():
        assert torch.equal(aule.flash_attention(*leaves, causal=True), out)
        launched()
        monkeypatch.setattr(routes.HIP, "launch", None)  # a repeated call needs it no more
        again = aule.flash_attention(*leaves, causal=True)
    assert torch.equal(again, out) and launched() == 1


def test_decoding_from_a_cache(use: Use) -> None:
    use("gfx1100")
    cache = aule.KVCache(8, 2, 16, page_size=4, device="cpu")
    seqs = [cache.allocate(), cache.allocate()]
    k, v, q = made(9, 2, 16), made(9, 2, 16, seed=1), made(2, 4, 16)
    cache.append(seqs, k, v, lengths=[6, 3])
    cache.append(cache.fork(seqs[0]), k[:1], v[:1])  # copies the page that both have
    found = cache.attend(q, seqs)
    for row, keys in ((0, slice(0, 6)), (1, slice(6, 9))):
        scores = torch.einsum("hd,khd->hk", q[row], k[keys].repeat_interleave(2, 1)) / 4
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v[keys].repeat_interleave(2, 1))
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)
    assert launched() >= 4


def test_attention_compiled(use: Use) -> None:
    use("gfx1100")

    def step(q: Any, k: Any, v: Any) -> Any:
        return aule.flash_attention(q * 1.5, k, v, causal=True)

    leaves = [made(1, heads, 20, 16, dtype=torch.float16, seed=heads).requires_grad_() for heads in (4, 2, 2)]
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        launched()
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        assert launched() >= 3
    assert all(map(torch.equal, *results))
    q, k, v = (x.detach() for x in leaves)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float() * 1.5, k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.detach().float(), expected, rtol=2e-3, atol=2e-3)
    # Decoding breaks a graph, on every device.
    token = torch.compile(lambda q: aule.decode_attention(q * 1.5, k, v), backend="aot_eager")(q[:, :, -1:])
    torch.testing.assert_close(token.float(), expected[:, :, -1:], rtol=2e-3, atol=2e-3)
    assert launched() >= 1


def test_row_operations_compiled(use: Use) -> None:
    use("gfx942")

    def step(x: Any, weight: Any) -> Any:
        return aule.rms_norm(x * 2, weight)

    x, weight = made(5, 64).requires_grad_(), made(64).requires_grad_()
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        y = function(x, weight)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    assert all(map(torch.equal, *results)) and launched() >= 6
    expected = torch.nn.functional.rms_norm(x * 2, (64,), weight, 1e-6)
    torch.testing.assert_close(results[0][0], expected, rtol=1e-5, atol=1e-5)


def test_own_kernels(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    from aule.frontends.torch import launch
    from aule.ir import Builder
    from aule.ir.types import f32, i32

    device = use("gfx942")
    b = Builder("double", workgroup=64)
    source, out, n = b.buffer("source", f32), b.buffer("out", f32, "write"), b.scalar("n", i32)
    i = b.group_id() * 64 + b.thread_id()
    with b.if_(i < n):
        b.store(out, i, b.load(source, i) * 2.0)
    x, y = made(100), torch.zeros(100)
    launch._on_stream(b.finish(), (2, 1, 1), [x, y, 100], "hip:None", x.device)
    assert torch.equal(y, x * 2) and launched() == 1
    with pytest.raises(aule.DeviceMismatchError, match="move them or drop backend="):
        monkeypatch.setattr(device, "index", 1)
        launch._on_stream(b.finish(), (2, 1, 1), [x, y, 100], "hip:None", x.device)


@pytest.mark.parametrize("there", [True, False])
def test_which_tensors_take_the_route(
    there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def probe(name: str) -> list[Device]:
        if there:
            return []
        raise BackendUnavailableError("hip", "[hip] expected AMD's HIP library, got none; install it")

    monkeypatch.delenv("AULE_BACKEND", raising=False)
    monkeypatch.setattr(registry, "devices", probe)
    monkeypatch.setattr(routes.cuda, "BUILD", False)
    rocm = SimpleNamespace(is_cuda=True, is_cpu=False, device=torch.device("cuda", 0))
    assert routes.route(rocm, None) is routes.STAGED  # another build of PyTorch, or none of a GPU
    monkeypatch.setattr(hip, "BUILD", True)
    hip._found.cache_clear()
    with caplog.at_level(logging.WARNING, "aule"):
        for _ in range(2):
            assert routes.route(rocm, None) is (routes.HIP if there else routes.STAGED)
            assert routes.route(rocm, "hip:0") is (routes.HIP if there else routes.STAGED)
            assert routes.route(rocm, "vulkan") is routes.STAGED
            assert routes.home(rocm) is (routes.HIP if there else routes.STAGED)
    hip._found.cache_clear()
    said = ["ROCm tensors are copied through the host: [hip] expected AMD's HIP library, got none; install it"]
    assert [record.message for record in caplog.records] == ([] if there else said)
