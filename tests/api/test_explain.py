"""aule.explain: what it says is what a call does, and it does nothing itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import need

import aule
from aule.engine import run
from aule.engine.explain import Explanation
from aule.errors import InvalidArgumentError, InvalidShapeError

DEVICES = ("cpu", "vulkan", "opencl")


def arrays(*shape: int, count: int = 3, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(count)]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that calls run, gradients after their forward passes; each signature is prepared again."""
    seen: list[Any] = []
    plain = run.PreparedCall.__init__

    def prepared(self: Any, plan: Any, *rest: Any) -> None:
        plain(self, plan, *rest)
        seen.append((plan, self.kernels, [program.artifact for program in self.programs]))

    monkeypatch.setattr(run.PreparedCall, "__init__", prepared)
    from aule.engine.signatures import signatures

    signatures.clear()
    return seen


def check(found: Explanation, plan: Any) -> None:
    """An explanation says what a plan launches."""
    steps, kernels, artifacts = plan[0].steps, plan[1], plan[2]
    assert [x.kernel for x in found.launches] == kernels
    assert [x.grid for x in found.launches] == [step.grid for step in steps]
    assert [(x.workgroup, x.shared_bytes) for x in found.launches] == [(x.workgroup, x.shared_bytes) for x in artifacts]
    assert found.kernel == plan[0].engine
    assert (found.workspace_bytes > 0) == bool(plan[0].workspace)
    assert found.scratch_bytes == 4 * sum(plan[0].scratch.values())


def explained(plans: list[Any], function: Callable[..., Any], *given: Any, **options: Any) -> Explanation:
    """The explanation of a call, compared with the call."""
    found = aule.explain(function, *given, **options)
    assert not plans, "nothing is prepared"
    aule.reset_dispatch_stats()
    function(*given, **options)
    rows = aule.dispatch_stats()["calls"]
    aule.reset_dispatch_stats()
    assert [(x["op"], x["direction"], x["backend"], x["kernel"], x["launches"]) for x in rows] == [
        (found.op, found.direction, found.device.partition(":")[0], found.kernel, [x.kernel for x in found.launches])
    ]
    if plans:
        check(found, plans.pop())
    return found


@pytest.mark.parametrize("backend", ["numpy", *(pytest.param(x, marks=pytest.mark.device) for x in DEVICES)])
def test_arrays(backend: str, plans: list[Any]) -> None:
    if backend != "numpy":
        need(backend)
    dtype = np.float16 if backend == "vulkan" else np.float32
    q, k, v = arrays(2, 4, 70, 32, dtype=dtype)
    mask = np.ones((1, 1, 70, 70), bool)
    found = explained(
        plans, aule.flash_attention, q, k, v.swapaxes(0, 1).copy().swapaxes(0, 1), mask=mask, backend=backend
    )
    assert found.device_reason == f"backend={backend!r} asks for it" and not found.passed_over
    assert found.copied == (backend in ("vulkan", "opencl"))
    assert found.dtype == np.dtype(dtype).name and found.backward is None
    offsets = np.array([0, 30, 70], np.int32)
    packed = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v)]
    explained(plans, aule.flash_attention_varlen, *packed, offsets, offsets, backend=backend)
    slopes, causal = np.ones(4, np.float32), aule.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 70, 70)
    if backend in ("numpy", "cpu"):  # renderers for GPUs add shared memory to the kernel that lists tiles
        explained(
            plans, aule.flex_attention, q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), causal, backend=backend
        )
    lens = np.array([60, 70], np.int32)
    explained(plans, aule.decode_attention, q[:, :, 0], k, v, context_lens=lens, backend=backend)
    pages = arrays(6, 32, 4, 32, count=2, dtype=dtype)
    tables = np.array([[0, 2, 4], [1, 3, 5]], np.int32)
    explained(plans, aule.flash_attention_paged, q[:, :, 0], *pages, tables, lens, backend=backend)
    explained(plans, aule.rms_norm, q, np.ones(32, dtype), backend=backend)
    explained(plans, aule.swiglu, q, backend=backend)


def test_tensors_and_their_gradients(plans: list[Any]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("llvmlite")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays(1, 4, 50, 24))
    bias = torch.randn(1, 4, 50, 50, requires_grad=True)
    weight = torch.ones(24, requires_grad=True)
    at = torch.tensor([0, 20, 50], dtype=torch.int32)
    packed = [x[0].transpose(0, 1).contiguous().detach().requires_grad_() for x in (q, k, v)]
    mask = aule.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 50, 50)
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (aule.flash_attention, (q, k, v), {}),
        (aule.flash_attention, (q, k, v), {"bias": bias, "dropout_p": 0.25, "seed": 3, "causal": False}),
        (aule.flash_attention_varlen, (*packed, at, at), {}),
        (aule.flex_attention, (q, k, v, lambda s, b, h, i, j: s + bias[0, h, i, j]), {}),
        (aule.flex_attention, (q, k, v), {"block_mask": mask}),
        (aule.rms_norm, (q, weight), {}),
        (aule.residual_rms_norm, (q, k, weight), {}),
        (aule.cross_entropy, (torch.randn(9, 33, requires_grad=True), torch.zeros(9, dtype=torch.int64)), {}),
    ]
    for function, given, options in cases:
        found = aule.explain(function, *given, **options)
        assert not plans and found.backward is not None
        results = function(*given, **options)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
        forward, backward, *parts = plans
        check(found, forward)
        check(found.backward, backward)
        captured = function is aule.flex_attention and len(given) == 4
        assert len(parts) == (found.backward.backward is not None) == captured
        if parts:
            check(found.backward.backward, *parts)
        assert (found.backward.op, found.backward.direction) == (found.op, "backward")
        plans.clear()
    with torch.no_grad():
        assert aule.explain(q, k, v).backward is None


def test_cuda_tensors_in_place(plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("llvmlite")
    from test_torch_varlen_cuda import in_place_of_cuda

    in_place_of_cuda(monkeypatch)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays(1, 2, 20, 16))
    found = aule.explain(q, k, v)
    assert found.device_reason == "tensors on cpu are used in place" and not found.copied
    assert found.kernel == "simt" and found.backward is not None and found.backward.kernel == "simt"
    assert [x.kernel for x in found.launches] == ["flash_attention"]
    half = aule.explain(*(x.half() for x in (q, k, v)))
    assert half.kernel == "fragment" and half.kernel_reason == "the device has matrix units for float16"
    assert half.computed_in == "float32, products of float16"
    with torch.autocast("cpu", torch.bfloat16):
        assert aule.explain(q, k, v).dtype == "bfloat16"
    assert not plans


def test_it_writes_and_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("llvmlite")
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    device = need("cpu")
    monkeypatch.setitem(vars(device), "_engine_programs", {})
    q, k, v = (torch.from_numpy(x) for x in arrays(1, 2, 33, 40))
    out = torch.full_like(q, 7.0)
    before = torch.get_rng_state()
    aule.reset_dispatch_stats()
    found = aule.explain(q, k, v, dropout_p=0.5, out=out)
    assert {x.state for x in found.launches} == {"not built"}
    assert torch.equal(torch.get_rng_state(), before) and (out == 7.0).all()
    assert not (tmp_path / "cache").exists() and not vars(device)["_engine_programs"]
    assert aule.dispatch_stats()["calls"] == []
    aule.flash_attention(q, k, v, dropout_p=0.5, out=out)
    assert {x.state for x in aule.explain(q, k, v, dropout_p=0.5, out=out).launches} == {"loaded"}
    vars(device)["_engine_programs"].clear()
    again = aule.explain(q, k, v, dropout_p=0.5, out=out)
    assert {x.state for x in again.launches} == {"on disk"}
    assert [(x.kernel, x.workgroup, x.shared_bytes) for x in again.launches] == [
        (x.kernel, x.workgroup, x.shared_bytes) for x in found.launches
    ]


def test_text_and_data() -> None:
    pytest.importorskip("llvmlite")
    q, k, v = arrays(1, 2, 33, 40)
    found = aule.explain(q, k, v, backend="cpu")
    lines = str(found).splitlines()
    assert lines[0].startswith("flash_attention, forward, on cpu:0 (")
    assert lines[1] == "  device     backend='cpu' asks for it"
    assert any(line.strip().startswith("flash_attention_cpu: grid") or "launches" in line for line in lines)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["op"] == "flash_attention" and data["launches"][-1]["tiles"]["block_kv"] > 0
    assert str(aule.explain(q[:, :, :0], k, v, backend="cpu")).count("there is nothing to compute") == 1


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    q, k, v = arrays(1, 2, 8, 16)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    assert aule.explain(*wide).device_reason == "only the CPU computes in float64"
    assert aule.explain(*wide).computed_in == "float64"
    assert aule.explain(aule.rms_norm, q).device_reason.startswith("row operations stay on the CPU")
    found = aule.explain(q, k, v)
    assert found.device_reason == "it is the first hardware device in order of preference"
    assert set(found.passed_over) <= {"cuda", "hip", "metal", "vulkan", "opencl", "webgpu"}
    monkeypatch.setenv("AULE_BACKEND", "numpy")
    assert aule.explain(q, k, v).device_reason == "AULE_BACKEND=numpy asks for it"


def test_wrong_arguments() -> None:
    q, k, v = arrays(1, 2, 8, 16)
    with pytest.raises(
        InvalidArgumentError, match=r"\[explain\] expected arrays, or one of flash_attention, .* got pr"
    ):
        aule.explain(print, q)
    with pytest.raises(InvalidArgumentError, match="got flash_attention with 0 arguments"):
        aule.explain()
    with pytest.raises(InvalidShapeError, match=r"\[flash_attention\] expected"):
        aule.explain(q, k[..., :8], v)
    with pytest.raises(TypeError, match="expected one of its options, got `no_such_option`"):
        aule.explain(q, k, v, no_such_option=1)
