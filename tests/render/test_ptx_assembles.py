"""Kernels that calls get on each generation of NVIDIA's GPUs go through ptxas, which checks the declared version of PTX
as a driver does. No GPU is needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from repository import ROOT

sys.path.append(str(ROOT / "tools"))

from kernel_hashes import ADAPTERS, render
from kernel_problems import Problem, problems
from kernel_targets import CUDA

PTXAS = shutil.which("ptxas")


@pytest.mark.parametrize("arch", CUDA)
def test_gradients_fit_shared_memory(arch: str) -> None:
    """With the row numbers, which are all that is left over at 64 columns on sm_75."""
    for dim, keys in product((40, 64, 96, 128, 192, 256, 512), (2048, 60)):
        problem = Problem("attention", "backward", f"f16 b1 h8x2 q2048 k{keys} d{dim}", "causal")
        kernels = [launch.build() for launch in ADAPTERS["attention"](problem, CUDA[arch]).launches]
        assert max(kernel.shared_bytes for kernel in kernels) <= CUDA[arch].max_shared_bytes, problem


@pytest.mark.skipif(PTXAS is None, reason="ptxas (CUDA toolkit) is not installed")
@pytest.mark.parametrize("arch", CUDA)
def test_sample(tmp_path: Path, arch: str) -> None:
    found = [problem for problem in problems("sm80-cuda") if problem.kind in ("rows", "decode", "append")]
    chosen = [*found[::16], Problem("rows", "residual_layer_norm", "bf16 2048x4096")]  # the last with a cache policy
    codes = {render(launch, CUDA[arch]).code for p in chosen for launch in ADAPTERS[p.kind](p, CUDA[arch]).launches}
    assert len(codes) > 10
    for number, code in enumerate(sorted(codes)):
        source = tmp_path / f"{number}.ptx"
        source.write_bytes(code)
        suffix = "a" if b".target sm_90a" in code else ""
        command = [str(PTXAS), "-O0", f"-arch={arch}{suffix}", str(source), "-o", str(tmp_path / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (arch, done.stderr[:2000], code[:400])
