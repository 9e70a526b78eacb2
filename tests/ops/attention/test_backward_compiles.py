"""The GPU's backward kernels at their default tiles go through ptxas without spills, and through spirv-val."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_forward_compiles import SIMPLE, VULKAN_TARGETS, Case, table

from aule.ir import KernelIR
from aule.ops.attention.plan.backward import plan_backward
from aule.render import ptx, spirv
from aule.target import Target
from aule.view import TensorView

CASES = (
    ("f32", 64, "plain"),
    ("f32", 128, "causal"),
    ("f16", 256, "plain"),
    ("f32", 64, "dropout"),
    ("f16", 128, "packed"),
    ("bf16", 40, "all"),
)


ADDING = replace(VULKAN_TARGETS["everything"], extensions=(*SIMPLE, "VK_EXT_shader_atomic_float"), atomic_f32_add=True)
TARGETS = VULKAN_TARGETS | {"everything": ADDING}


def kernels(fields: tuple[Any, ...], target: Target, deterministic: bool, alone: bool = False) -> list[KernelIR]:
    """The three kernels of the gradients of one of the table's cases; with ``alone`` those of the scores' gradient."""
    p = replace(Case(*fields).problem(), deterministic=deterministic)
    shapes = {
        **dict.fromkeys(("q", "dq"), (p.batch, p.heads_q, p.seq_q, p.head_dim)),
        "k": (p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        "dk": (p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        **dict.fromkeys(("v", "dv"), (p.batch, p.heads_kv, p.seq_kv, p.value_dim)),
        **dict.fromkeys(("o", "do"), (p.batch, p.heads_q, p.seq_q, p.value_dim)),
    }
    views = {name: table._view(p.dtype, shape) for name, shape in shapes.items()}
    scores = (p.batch, p.heads_q, p.seq_q, p.seq_kv)
    for name, dtype in (("mask", p.mask), ("bias", p.bias)):
        if dtype is not None:
            views[name] = table._view(dtype, scores)
    if p.alibi:
        views["alibi"] = TensorView("f32", (p.batch, p.heads_q), (p.heads_q, 1), "device", None)
    if alone:
        views = {name: view for name, view in views.items() if name not in ("dq", "dk", "dv")}
        views["ds"] = table._view("f32", scores)
    return [step.build(step.config, target) for step in plan_backward(p, views, target).steps]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas (CUDA toolkit) is not installed")
@pytest.mark.parametrize(
    ("arch", "deterministic"), [*((arch, False) for arch in table.SHARED_LIMITS), ("sm_75", True), ("sm_90", True)]
)
def test_nvidia_does_not_spill(arch: str, deterministic: bool, tmp_path: Path) -> None:
    target = table.nvidia_target(arch)
    for fields in CASES[:5]:
        alone = kernels(fields, target, True, True) if deterministic else []
        for kernel in [*kernels(fields, target, deterministic), *alone]:
            artifact = ptx.render(kernel, target)
            assert artifact.shared_bytes <= table.SHARED_LIMITS[arch]
            source = tmp_path / "kernel.ptx"
            source.write_bytes(artifact.code)
            command = ["ptxas", "-v", f"-arch={arch}", str(source), "-o", str(tmp_path / "kernel.cubin")]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout + done.stderr)
            assert spilled is not None and spilled.groups() == ("0", "0"), (fields, kernel.name, spilled)


@pytest.mark.skipif(shutil.which("spirv-val") is None, reason="spirv-val (Debian: spirv-tools) is not installed")
@pytest.mark.parametrize("name", TARGETS)
def test_spirv_is_valid(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    version = f"vulkan{target.language_version // 10}.{target.language_version % 10}"
    for fields in CASES:
        for kernel in kernels(fields, target, deterministic=False):
            path = tmp_path / "kernel.spv"
            path.write_bytes(spirv.render(kernel, target).code)
            command = ["spirv-val", "--target-env", version, "--scalar-block-layout", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, (name, fields, kernel.name, done.stdout + done.stderr)
