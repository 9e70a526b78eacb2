"""The host runs out of memory: `aule.OutOfMemoryError` that says how much was asked for, and the next call is right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

import aule
from aule.engine.memory import reports_shortage

CHILD = """
import resource, sys
import numpy as np
import aule

kind, backend = sys.argv[1], sys.argv[2]
small = np.random.default_rng(0).standard_normal((1, 8, 16, 64)).astype(np.float32)
weight = np.ones(64, np.float32)
large = np.broadcast_to(small[:, :, :1], (1, 8, 1 << 20, 64))  # the results have 2 GiB
if kind == "torch":
    import torch

    small, weight = torch.from_numpy(small), torch.from_numpy(weight)
    large = small[:, :, :1].expand(1, 8, 1 << 20, 64)
    torch.set_num_threads(2)


def offsets(rows):
    found = np.array([0, rows], np.int32)
    return found if kind == "numpy" else torch.from_numpy(found)


def gradient(q):
    q, k = q.detach().requires_grad_(), small.detach().requires_grad_()
    return torch.autograd.grad(aule.flash_attention(q, k, small, backend=backend).sum(), (k, q))[0]


calls = {
    "attention": lambda q: aule.flash_attention(q, small, small, backend=backend),
    "packed": lambda q: aule.flash_attention_varlen(
        q[0].swapaxes(0, 1), small[0].swapaxes(0, 1), small[0].swapaxes(0, 1), offsets(q.shape[2]), offsets(16),
        q.shape[2], 16, backend=backend,
    ),
    "decode": lambda q: aule.decode_attention(q, small, small, backend=backend),
    "rms_norm": lambda q: aule.rms_norm(q, weight, backend=backend),
    "swiglu": lambda q: aule.swiglu(q, q, backend=backend),
}
if (kind, backend) == ("torch", "cpu"):
    calls["gradient"] = gradient
expected = {name: call(small) for name, call in calls.items()}
for call in calls.values():
    call(small)  # a repeated call, which PyTorch's front end recognises
untouched = small.copy() if kind == "numpy" else small.clone()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), resource.RLIM_INFINITY))
for name, call in calls.items():
    try:
        call(large)
    except aule.OutOfMemoryError as error:
        asked = error.requested_bytes
        assert asked is not None and asked >= 1 << 30 and str(asked) in error.message, (name, asked, error)
    else:
        raise AssertionError(f"{name}: 2 GiB were allocated")
    assert (call(small) == expected[name]).all(), name
    assert (small == untouched).all(), name
try:
    aule.KVCache(1 << 20, heads_kv=8, head_dim=64, page_size=16, device="cpu" if kind == "torch" else None)
except aule.OutOfMemoryError as error:
    assert error.requested_bytes > 1 << 30
else:
    raise AssertionError("the pool was allocated")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space and reads /proc")
@pytest.mark.parametrize("backend", ["cpu", "numpy"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_results_do_not_fit(kind: str, backend: str) -> None:
    if kind == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("no torch")
    if backend == "cpu" and importlib.util.find_spec("llvmlite") is None:
        pytest.skip("no llvmlite")
    # One arena: otherwise malloc reserves 128 MiB of addresses for every thread.
    environment = {**os.environ, "AULE_BACKEND": "", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", CHILD, kind, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


def test_other_errors_stay() -> None:
    def raising(error: Exception) -> None:
        raise error

    reported = reports_shortage(raising)
    full = aule.OutOfMemoryError("[cpu] expected 5 bytes, got none", 5)
    for error in (full, RuntimeError("something else"), ValueError("no")):
        with pytest.raises(type(error)) as caught:
            reported(error)
        assert caught.value is error
    with pytest.raises(aule.OutOfMemoryError, match="enough memory") as told:
        reported(MemoryError())
    assert told.value.requested_bytes is None
    text = "[enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    with pytest.raises(aule.OutOfMemoryError, match="expected 4096 bytes") as told:
        reported(RuntimeError(text + "allocate 4096 bytes. Error code 12 (Cannot allocate memory)"))
    assert told.value.requested_bytes == 4096
    with pytest.raises(MemoryError):  # programs that catch Python's own error work
        reported(full)
