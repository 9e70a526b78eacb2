"""What shows that aule is at work: counts of calls, ranges in profilers, and log lines."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import need

import aule
from aule.backends import registry
from aule.engine import observe
from aule.ir import Builder

SHAPE = (1, 2, 40, 16)
DEVICES = ("cpu", "vulkan", "opencl")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    aule.reset_dispatch_stats()
    yield
    aule.reset_dispatch_stats()


def arrays(*shape: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape or SHAPE, np.float32) for _ in range(3)]


def counted() -> dict[tuple[str, str, str, str, str], int]:
    """Calls by op, direction, backend, kernel and caller."""
    found: dict[tuple[str, str, str, str, str], int] = {}
    for row in aule.dispatch_stats()["calls"]:
        key = tuple(row[name] for name in ("op", "direction", "backend", "kernel", "caller"))
        found[key] = found.get(key, 0) + row["count"]  # type: ignore[index, arg-type]
    return found


@pytest.mark.parametrize("backend", ["numpy", *(pytest.param(x, marks=pytest.mark.device) for x in DEVICES)])
def test_every_op_on_arrays(backend: str) -> None:
    if backend != "numpy":
        need(backend)
    q, k, v = arrays()
    multiplies = {"numpy": "numpy", "cpu": "vector"}.get(backend, "simt")
    moves = "numpy" if backend == "numpy" else "rows"
    writer = "numpy" if backend == "numpy" else "cpu"  # caches in host memory are written where they are
    for _ in range(2):
        aule.flash_attention(q, k, v, backend=backend)
    offsets = np.array([0, 15, 40], np.int32)
    packed = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v)]
    aule.flash_attention_varlen(*packed, offsets, offsets, backend=backend)
    aule.decode_attention(q[:, :, :1], k, v, backend=backend)
    aule.rms_norm(q, backend=backend)
    cache = aule.KVCache(4, 2, 16, backend=backend)
    seq = cache.allocate()
    cache.append(seq, packed[1], packed[2])
    cache.attend(q[:, :, :1], [seq])
    expected = {
        ("flash_attention", "forward", backend, multiplies, "direct"): 2,
        ("flash_attention_varlen", "forward", backend, multiplies, "direct"): 1,
        ("decode_attention", "forward", backend, multiplies, "direct"): 1,
        ("flash_attention_paged", "forward", backend, multiplies, "direct"): 1,
        ("rms_norm", "forward", backend, moves, "direct"): 1,
        ("KVCache.append", "forward", writer, moves, "direct"): 1,
    }
    assert counted() == expected
    aule.reset_dispatch_stats()
    assert aule.dispatch_stats()["calls"] == []
    aule.flash_attention(q, k, v, backend=backend)
    assert counted() == {("flash_attention", "forward", backend, multiplies, "direct"): 1}


@aule.kernel(workgroup=4, x="readwrite")
def doubled(b: Builder, x: Any) -> None:
    b.store(x, b.thread_id(), b.load(x, b.thread_id()) * 2.0)


def test_launches_of_own_kernels() -> None:
    pytest.importorskip("llvmlite")
    x = np.ones(4, np.float32)
    for backend in ("numpy", "cpu"):
        aule.launch(doubled, 1, x, backend=backend)
    assert (x == 4).all()
    assert counted() == {
        ("launch", "forward", "numpy", "numpy", "direct"): 1,
        ("launch", "forward", "cpu", "own", "direct"): 1,
    }


def test_it_prints_as_a_table() -> None:
    assert str(aule.dispatch_stats()).splitlines()[0] == "no calls"
    aule.flash_attention(*arrays(), backend="numpy")
    first, second, last = str(aule.dispatch_stats()).splitlines()
    assert first.split() == ["op", "direction", "backend", "kernel", "caller", "count", "launches"]
    assert second.split() == ["flash_attention", "forward", "numpy", "numpy", "direct", "1"]
    assert last == "PyTorch's attention: 0 calls served, 0 passed on"


def test_calls_with_nothing_to_compute_are_not_counted() -> None:
    pytest.importorskip("llvmlite")
    aule.flash_attention(*arrays(1, 2, 0, 16), backend="cpu")
    assert counted() == {}


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def tensors(requires_grad: bool = False) -> list[Any]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("llvmlite")
    return [torch.from_numpy(x).requires_grad_(requires_grad) for x in arrays()]


def test_gradients_and_repeated_calls() -> None:
    q, k, v = tensors(requires_grad=True)
    for _ in range(3):
        aule.flash_attention(q, k, v).sum().backward()
        aule.rms_norm(q).sum().backward()
    for _ in range(3):
        aule.flash_attention(q.detach(), k.detach(), v.detach())
    assert counted() == {
        ("flash_attention", "forward", "cpu", "vector", "direct"): 6,
        ("flash_attention", "backward", "cpu", "vector", "direct"): 3,
        ("rms_norm", "forward", "cpu", "rows", "direct"): 3,
        ("rms_norm", "backward", "cpu", "rows", "direct"): 3,
    }


def test_callers() -> None:
    q, k, v = tensors(requires_grad=True)
    import torch

    from aule import nn
    from aule.api.sdpa import attempt
    from aule.integrations import flash_attn

    with aule.installed():
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    attempt(q.detach(), k.detach(), v.detach(), caller="diffusers")
    flash_attn.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).sum().backward()
    nn.RMSNorm(16)(q).sum().backward()

    def graph(q: Any) -> Any:
        # The caller of a graph is unknown when it runs.
        return flash_attn.flash_attn_func(q, q, q)

    torch.compile(graph, backend="aot_eager", fullgraph=True)(q.transpose(1, 2)).sum().backward()
    aule.flash_attention(q, k, v)
    calls = counted()
    for caller in ("install", "flash_attn", "compiled"):
        assert calls["flash_attention", "forward", "cpu", "vector", caller] == 1, caller
        assert calls["flash_attention", "backward", "cpu", "vector", caller] == 1, caller
    for direction in ("forward", "backward"):
        assert calls["rms_norm", direction, "cpu", "rows", "nn"] == 1
    assert calls["flash_attention", "forward", "cpu", "vector", "diffusers"] == 1
    assert calls["flash_attention", "forward", "cpu", "vector", "direct"] == 1


# -- profilers ---------------------------------------------------------------------------------------------------------


def test_profiler_shows_calls_and_their_kernels() -> None:
    q, k, v = tensors(requires_grad=True)
    import torch

    def calls() -> None:
        aule.flash_attention(q, k, v).sum().backward()
        with torch.no_grad():
            aule.flash_attention(q, k, v)  # the second time by the quick path
            aule.rms_norm(q)

    calls()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        calls()
    events = {event.name: event for event in profile.events()}
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aule::flash_attention"] == 2
    rows = {
        "aule::" + row["op"] + ("_backward" if row["direction"] == "backward" else ""): row["launches"]
        for row in aule.dispatch_stats()["calls"]
    }
    assert set(rows) == {"aule::flash_attention", "aule::flash_attention_backward", "aule::rms_norm"}
    for name, launches in rows.items():
        assert [child.name for child in events[name].cpu_children] == launches, name
    calls()  # without ranges again
    assert counted()["flash_attention", "forward", "cpu", "vector", "direct"] == 6


MARKERS = """
#include <string.h>
char seen[4096];
int nvtxRangePushA(const char *name) { strcat(seen, "<"); strcat(seen, name); return 0; }
int nvtxRangePop(void) { strcat(seen, ">"); return 0; }
"""


def test_nvtx_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a stand-in of NVIDIA's library")
    (tmp_path / "markers.c").write_text(MARKERS)
    library = str(tmp_path / "libmarkers.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "markers.c")], check=True)
    q, k, v = tensors()
    monkeypatch.setattr(observe, "_LIBRARIES", ((library, "nvtxRangePushA", "nvtxRangePop"),))
    observe.markers.cache_clear()
    try:
        aule.flash_attention(q, k, v)
        monkeypatch.setenv("AULE_NVTX", "1")
        aule.rms_norm(q, eps=0.125)  # a call that was not made before
        aule.rms_norm(q, eps=0.125)
    finally:
        observe.markers.cache_clear()
    seen = (ctypes.c_char * 4096).in_dll(ctypes.CDLL(library), "seen")
    assert seen.value == b"<aule::rms_norm<rms_norm>>" * 2


def test_nvtx_without_a_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(observe, "_LIBRARIES", ())
    monkeypatch.setattr(observe, "other_markers", [])
    monkeypatch.setenv("AULE_NVTX", "1")
    observe.markers.cache_clear()
    try:
        for _ in range(2):
            aule.flash_attention(*arrays(), backend="numpy")
    finally:
        observe.markers.cache_clear()
    assert [x.getMessage() for x in caplog.records] == [
        "AULE_NVTX=1 has no effect: expected libnvToolsExt or libroctx64, found neither"
    ]


# -- log lines ---------------------------------------------------------------------------------------------------------


def test_log_says_once_which_device_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(observe, "_said", set())
    error = aule.BackendUnavailableError("cuda", "[cuda] expected a driver, got none; install one")
    monkeypatch.setattr(registry, "_errors", {"cuda": error})
    monkeypatch.setattr(registry, "_found", {})
    with caplog.at_level(logging.INFO, logger="aule"):
        for _ in range(2):
            aule.flash_attention(*arrays(), backend="numpy")
            aule.rms_norm(arrays()[0], backend="numpy")
    assert [x.getMessage() for x in caplog.records] == [
        "serving on numpy (NumPy); not on [cuda] expected a driver, got none; install one"
    ]


def test_log_says_once_why_calls_are_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    big = torch.ones(1, 1, 2, 640)
    with aule.installed(), caplog.at_level(logging.INFO, logger="aule"):
        for _ in range(2):
            torch.nn.functional.scaled_dot_product_attention(big, big, big)
    assert [x.getMessage() for x in caplog.records] == ["passed on to PyTorch: head_dim above 576"]


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    aule.flash_attention(*arrays(), backend="numpy")
    assert capfd.readouterr() == ("", "")
