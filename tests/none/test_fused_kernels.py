"""The ops beside attention in the kernel library: every language, and NVIDIA's assembler without spills."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import aule
from aule.codegen import generate, target_for
from aule.kernels import (
    FusedKernel,
    GeGLUKernel,
    LayerNormLinearKernel,
    ResidualLayerNormKernel,
    RMSNormRoPEKernel,
    SoftmaxDropoutKernel,
    SwiGLUKernel,
)

KERNELS: dict[str, FusedKernel] = {
    "swiglu": SwiGLUKernel(4096, 4096, dtype="bf16"),
    "geglu": GeGLUKernel(4096, 11008, dtype="f16"),
    "geglu_tanh": GeGLUKernel(64, 300, approximate="tanh"),
    "residual_layer_norm": ResidualLayerNormKernel(4096, 8192, dtype="bf16"),
    "layer_norm_linear": LayerNormLinearKernel(4096, 4096, 4096, dtype="bf16"),
    "rms_norm_rope": RMSNormRoPEKernel(2048, 128, num_heads=8, dtype="bf16"),
    "softmax_dropout": SoftmaxDropoutKernel(2048, 4096, dtype="bf16"),
}
HOPPER = replace(target_for("ptx"), arch="sm_90", compute_units=132)


@pytest.mark.parametrize("name", KERNELS)
def test_every_language(name: str) -> None:
    kernel = KERNELS[name]
    assert kernel.name == name
    for language in ("ptx", "spirv", "opencl", "wgsl", "msl", "llvm"):
        artifact = kernel.artifact(language)
        names = [p.name for p in artifact.buffers]
        assert {f"{operand}_ptr" for operand in kernel.operands()} < set(names) and "y_ptr" in names
        assert set(p.name for p in artifact.scalars) <= set(kernel.plan(language).scalars)
        assert len(artifact.code) > 500
    assert kernel.emit("ptx") == kernel.emit_ptx()


def test_refused() -> None:
    with pytest.raises(aule.InvalidShapeError, match=r"\[SwiGLUKernel\] expected rows >= 1"):
        SwiGLUKernel(0, 4)
    with pytest.raises(aule.InvalidDtypeError, match="expected dtype f32, f16, bf16"):
        GeGLUKernel(1, 4, dtype="f64")


def test_shared_memory() -> None:
    assert SwiGLUKernel(4, 4096).shared_memory_bytes == 0
    assert ResidualLayerNormKernel(4, 4096).shared_memory_bytes > 0


@pytest.mark.parametrize("name", KERNELS)
def test_assembled_without_spills(name: str, tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    kernel = KERNELS[name]
    artifact = generate(kernel.build(HOPPER), HOPPER)
    if kernel.dtype == "bf16":
        rows = [line for line in artifact.text.splitlines() if re.search(r"(ld|st)\.global", line)]
        if name == "layer_norm_linear":  # beside numbers of each row and column
            rows = [line for line in rows if not re.search(r"\.f32|\.b16", line)]
        assert rows and all(re.search(r"\.v4\.(b32|f32)|seed|\.b32\s", line) for line in rows)
    (tmp_path / "kernel.ptx").write_bytes(artifact.code)
    command = [ptxas, "-arch=sm_90", "-v", "-o", str(tmp_path / "kernel.cubin"), str(tmp_path / "kernel.ptx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "0 bytes spill stores" in done.stderr
