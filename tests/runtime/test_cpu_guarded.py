"""CPU kernels touch no memory outside of their buffers and arrays: a sample of the tests on guarded memory.

`guarded.py` says how to run all of them so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pages are protected by mprotect")

SHARE = 40
"""One test in so many runs here."""

TESTS = (
    "attention/test_forward.py", "attention/test_backward.py", "attention/test_varlen.py", "attention/test_rope.py",
    "decode/test_decode_cpu.py", "kvcache/test_kvcache.py", "rows/test_fused.py", "linear/test_linear_devices.py",
    "cross_entropy/test_cross_entropy_devices.py",
)  # fmt: skip

FAULTS = """
import sys
sys.path.insert(0, "tests")
import ctypes, functools
import numpy as np
import aule, guarded

side, what = sys.argv[1:]
guarded.install(side)
if what == "byte":
    region = guarded.Region(5000, side)
    region.bytes[:] = 1
    ctypes.string_at(region.address + (5000 if side == "end" else -1), 1)
if what == "buffer":  # the kernel reads one element more than there is
    make = guarded.Region.__init__
    def shrunk(self, nbytes, side):
        make(self, nbytes, side)
        self.address += 4 if side == "end" else -4
    guarded.Region.__init__ = shrunk
if what == "array":  # the kernel has smaller arrays
    from aule.render import _llvm_memory
    check = _llvm_memory.Memory._check
    _llvm_memory.Memory._check = lambda self, place, last: check(self, place, last - 1)
x = np.linspace(0, 1, 2 * 40 * 64, dtype=np.float32).reshape(1, 2, 40, 64)
found = aule.flash_attention(x, x, x, backend="cpu")
assert np.allclose(found, aule.flash_attention(x, x, x, backend="numpy"), atol=1e-5)
print("right")
"""

GRADIENTS = """
import sys
sys.path.insert(0, "tests")
import conftest  # guards memory, and finds test modules
import devices, fused_cases, test_backward, test_cross_entropy_devices, test_fused, test_linear_devices, test_varlen
from aule.ops.catalogue import CATALOGUE

device, done = devices.need("cpu"), set()
for case in fused_cases.CASES:
    if case.op not in done:
        test_fused.check(case, device)
        done.add(case.op)
test_cross_entropy_devices.test_loss_and_gradient("cpu", 0)
test_linear_devices.test_result_and_gradients("cpu", 0)
assert {*CATALOGUE} == done | {"cross_entropy", "layer_norm_linear"}, done
for case in test_backward.CASES[:: len(test_backward.CASES) // 2]:
    test_backward.judge(device, case)
test_varlen.test_cases(device, test_varlen.CASES[0])
print("right")
"""


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("what", ["nothing", "byte", "buffer", "array"])
def test_guards_notice(side: str, what: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, side, what],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if what == "nothing":
        assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    else:
        signals = ("SIGILL", "SIGTRAP") if what == "array" else ("SIGSEGV", "SIGBUS")
        assert signal.Signals(-done.returncode).name in signals and done.stdout == "", done.stderr


@pytest.mark.slow
def test_gradients_of_every_op_stay_inside() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GRADIENTS],
        cwd=ROOT, env=os.environ | {"AULE_TEST_GUARD": "end"}, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["end", "start"])
def test_kernels_stay_inside(side: str) -> None:
    share = SHARE if side == "end" else 3 * SHARE
    chosen = {"AULE_TEST_GUARD": side, "AULE_TEST_SHARE": str(share), "AULE_FULL_GRID": "1"}
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "cpu"]
    done = subprocess.run(
        [sys.executable, *command, *(f"tests/ops/{name}" for name in TESTS)],
        cwd=ROOT, env=os.environ | chosen, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
