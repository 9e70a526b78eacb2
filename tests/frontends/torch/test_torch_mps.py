"""The complete MPS path on CPU tensors: a stand-in for ``torch.mps.compile_shader`` compiles the same source with g++
and calls the kernel as PyTorch would. Apple's compiler and hardware are not tested."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace
from typing import Any, ClassVar

import devices
import msl_shim
import pytest

import aule
from aule.runtime.base import Device

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.device


class Library:
    """What ``compile_shader`` gives back: kernels by name."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __getattr__(self, entry: str) -> Kernel:
        return Kernel(self.source, entry)


class Kernel:
    """A kernel, called as ``kernel(*arguments, threads=, group_size=)``: each argument is bound at its own index."""

    max_threads_per_threadgroup = 1024
    launched: ClassVar[list[Kernel]] = []

    def __init__(self, source: str, entry: str) -> None:
        assert f"kernel void {entry}(" in source
        self.source, self.entry = source, entry
        self.buffers = msl_shim.buffers_of(source)
        self.block = "constant Params& params" in source

    def __call__(self, *arguments: Any, threads: list[int], group_size: list[int]) -> None:
        assert len(arguments) == self.buffers + self.block and all(isinstance(x, torch.Tensor) for x in arguments)
        assert group_size[1:] == [1, 1] and threads[0] % group_size[0] == 0
        function = msl_shim.compile_kernel(self.source, self.entry, group_size[0])
        pointers = (ctypes.c_void_p * self.buffers)(*(x.data_ptr() for x in arguments[: self.buffers]))
        block = bytes(arguments[-1].numpy().tobytes()) if self.block else b""
        function(pointers, block, ctypes.c_uint(threads[0] // group_size[0]), *map(ctypes.c_uint, threads[1:]))
        Kernel.launched.append(self)

    @property
    def multiplies_matrices(self) -> bool:
        return "simdgroup_multiply_accumulate" in self.source


@pytest.fixture
def shader(monkeypatch: pytest.MonkeyPatch) -> Device:
    """CPU tensors take the route of MPS tensors."""
    from aule.engine.signatures import Signatures
    from aule.frontends.torch import repeated
    from aule.frontends.torch import route as torch_routes
    from aule.frontends.torch.devices import base, mps

    device = devices.need("msl-shim")
    monkeypatch.setattr(torch_routes, "route", lambda tensor, backend: torch_routes.MPS)
    monkeypatch.setattr(torch_routes, "home", lambda tensor: torch_routes.MPS)
    monkeypatch.setattr(torch.mps, "compile_shader", Library, raising=False)
    monkeypatch.setattr(mps, "_devices", {})
    monkeypatch.setattr(base, "signatures", Signatures())
    repeated.forget()  # calls on CPU tensors
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.5", ("", "", ""), "arm64"))
    Kernel.launched.clear()
    return device


def made(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def reference(q: Any, k: Any, v: Any, **options: Any) -> Any:
    q, k, v = (x.double() for x in (q, k, v))
    if options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
        options["attn_mask"] = options["attn_mask"].double()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_forward(shader: Device, dtype: Any) -> None:
    q, k, v = (made(*shape, dtype=dtype) for shape in ((2, 4, 33, 32), (2, 2, 40, 32), (2, 2, 40, 16)))
    out, lse = aule.flash_attention(q, k, v, causal=False, return_lse=True)
    expected = reference(q, k, v)
    allowed = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert (out.double() - expected).abs().max() <= allowed * expected.abs().max()
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 32**-0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    half = dtype != torch.float32
    probe = ["fragment_lengths", "fragment_places", "fragment_check"] if half else []
    assert [kernel.entry for kernel in Kernel.launched] == [*probe, "flash_attention"]
    assert Kernel.launched[-1].multiplies_matrices == half
    again = torch.empty(2, 33, 4, 16, dtype=dtype).transpose(1, 2)
    assert aule.flash_attention(q, k, v, causal=False, out=again) is again
    assert torch.equal(again, out) and len(Kernel.launched) == len(probe) + 2


def test_layouts_and_options(shader: Device) -> None:
    packed = made(2, 20, 3, 4, 16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    mask = made(2, 1, 1, 20) > -1
    sinks, slopes = made(4), made(4).abs()
    given = {
        "mask": mask,
        "bias": made(20, 20),
        "alibi_slopes": slopes,
        "sinks": sinks,
        "window": [5, 3],
        "softcap": 2.0,
    }
    found = aule.flash_attention(q, k, v, causal=False, scale=torch.tensor(0.3), **given)
    with pytest.MonkeyPatch.context() as plain:
        from aule.frontends.torch import route as torch_routes

        plain.setattr(torch_routes, "route", lambda tensor, backend: torch_routes.HOST)
        expected = aule.flash_attention(q, k, v, causal=False, scale=0.3, backend="numpy", **given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    odd = made(1, 2, 9, 17)[..., 1:]  # starts 4 bytes into a row
    torch.testing.assert_close(
        aule.flash_attention(odd, odd, odd), reference(odd, odd, odd, is_causal=True).float(), rtol=1e-5, atol=1e-5
    )
    for seq_q, seq_kv in ((0, 4), (4, 0)):
        out = aule.flash_attention(made(1, 2, seq_q, 16), made(1, 2, seq_kv, 16), made(1, 2, seq_kv, 16))
        assert out.shape == (1, 2, seq_q, 16) and not out.any()


def test_gradients(shader: Device) -> None:
    leaves = [made(2, 4, 33, 16), made(2, 2, 33, 16), made(2, 2, 33, 16), made(2, 1, 33, 33)]
    mine = [x.clone().requires_grad_() for x in leaves]
    exact = [x.double().requires_grad_() for x in leaves]
    out = aule.scaled_dot_product_attention(*mine, enable_gqa=True)
    dout = made(2, 4, 33, 16)
    found = torch.autograd.grad(out, mine, dout)
    expected = torch.autograd.grad(reference(*exact[:3], attn_mask=exact[3]), exact, dout.double())
    for f, e in zip(found, expected, strict=True):
        assert (f.double() - e).abs().max() <= 2e-5 * e.abs().max()
    assert len(Kernel.launched) == 4  # forward, and three of the backward pass


def test_gradients_on_matrix_units(shader: Device) -> None:
    leaves = [made(1, heads, 66, 64, dtype=torch.float16) for heads in (4, 2, 2)]
    mine = [x.clone().requires_grad_() for x in leaves]
    exact = [x.double().requires_grad_() for x in leaves]
    dout = made(1, 4, 66, 64, dtype=torch.float16)
    found = torch.autograd.grad(aule.flash_attention(*mine, causal=True), mine, dout)
    expected = torch.autograd.grad(reference(*exact, is_causal=True), exact, dout.double())
    for f, e in zip(found, expected, strict=True):
        assert (f.double() - e).abs().max() <= 2e-3 * e.abs().max()
    used = [kernel.entry for kernel in Kernel.launched if kernel.multiplies_matrices]
    assert used[-3:] == ["flash_attention", "flash_attention_backward_queries", "flash_attention_backward_keys"]


def test_dropout(shader: Device) -> None:
    q, k, v = (made(2, 2, 33, 16).requires_grad_() for _ in range(3))
    dout = made(2, 2, 33, 16)

    def run(seed: int, **options: Any) -> list[Any]:
        out = aule.flash_attention(q, k, v, dropout_p=0.3, seed=seed, **options)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    for seed in (3, 4):
        found = run(seed)
        with pytest.MonkeyPatch.context() as plain:
            from aule.frontends.torch import route as torch_routes

            plain.setattr(torch_routes, "route", lambda tensor, backend: torch_routes.HOST)
            expected = run(seed, backend="cpu")
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert len(Kernel.launched) == 8


def test_compiled(shader: Device) -> None:
    def step(q: Any) -> Any:
        return aule.flash_attention(q * 2, q, q)

    q = made(1, 2, 9, 16).requires_grad_()
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out = function(q)
        results.append((out, *torch.autograd.grad(out.sum(), q)))
    assert all(map(torch.equal, *results))


def test_refusals(shader: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    q = made(1, 1, 4, 16)
    with pytest.raises(aule.InvalidDtypeError, match="got float64"):
        aule.flash_attention(q.double(), q.double(), q.double())
    monkeypatch.setattr(Kernel, "max_threads_per_threadgroup", 32)
    with pytest.raises(aule.ShaderCompileError, match="got room for 32"):
        aule.flash_attention(made(1, 1, 200, 64), made(1, 1, 200, 64), made(1, 1, 200, 64))

    def refuse(source: str) -> Any:
        raise SyntaxError("program_source:3: error")

    monkeypatch.setattr(torch.mps, "compile_shader", refuse)
    with pytest.raises(aule.ShaderCompileError, match="program_source:3") as caught:
        aule.flash_attention(made(1, 1, 8, 48), made(1, 1, 8, 48), made(1, 1, 8, 48))
    assert caught.value.source_path is None or caught.value.source_path.endswith(".metal")


def test_which_tensors_take_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    from aule.frontends.torch import route as torch_routes

    monkeypatch.delenv("AULE_BACKEND", raising=False)
    mps = SimpleNamespace(is_cuda=False, is_cpu=False, device=torch.device("mps"))
    assert torch_routes.route(mps, None) is torch_routes.MPS
    assert torch_routes.route(mps, "metal") is torch_routes.MPS
    assert torch_routes.route(mps, "cpu") is torch_routes.STAGED
    monkeypatch.setenv("AULE_BACKEND", "cpu")
    assert torch_routes.route(mps, None) is torch_routes.STAGED
    monkeypatch.delenv("AULE_BACKEND")
    monkeypatch.delattr(torch.mps, "compile_shader")  # as before PyTorch 2.7
    assert torch_routes.route(mps, None) is torch_routes.STAGED


def test_a_cache_is_written_where_it_lies(shader: Device) -> None:
    angles = made(16, 4)
    options = {"page_size": 4, "layers": 2, "quantize": "int8"}
    cache = aule.KVCache(6, 2, 8, **options, device="cpu")
    plain = aule.KVCache(6, 2, 8, **options, backend="numpy")
    for pool, kind in ((cache, lambda x: x), (plain, lambda x: x.numpy())):
        seq = pool.allocate()
        pool.append(seq, kind(made(6, 2, 8)), kind(made(6, 2, 8)), 1, (kind(angles.cos()), kind(angles.sin())))
        pool.append(pool.fork(seq), kind(made(3, 2, 8)), kind(made(3, 2, 8)), 1)  # copies the page that both have
    assert len(Kernel.launched) == 3
    for found, wanted in zip(cache.pool(1), plain.pool(1), strict=True):
        torch.testing.assert_close(
            found, torch.from_numpy(wanted), rtol=1e-6, atol=1 if found.dtype == torch.int8 else 0
        )
    assert cache.pool(1).k.any()


def test_ops_of_the_catalogue(shader: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from aule.frontends.torch import route as routes

    monkeypatch.setattr(routes, "route", lambda x, backend: routes.HOST if backend else routes.MPS)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 64), (64,)))
    results = []
    for backend in (None, "numpy"):
        y = aule.rms_norm(x, weight, backend=backend)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)
    assert [kernel.entry for kernel in Kernel.launched[-3:]] == ["rms_norm", "rms_norm_backward", "column_sum"]
    with pytest.raises(aule.InvalidArgumentError, match=r"expected approximate 'none' or 'tanh', got \['tanh'\]"):
        aule.geglu(x, approximate=["tanh"])
