"""The forward kernel at its default tiles goes through every vendor's compiler, without spills. No GPU is needed.

`tools/compilers.py` has the compilers, `tools/compile_table.py` writes the full table; here is a quick part of it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT

from aule.ops.attention.build import build_forward
from aule.render.spirv import render
from aule.target import RDNA3_LAYOUTS, Target


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compilers", ROOT / "tools" / "compilers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


table = _load()
Case = table.Case

ARCHS = tuple(table.SHARED_LIMITS)
FAMILIES = tuple(table.SYSTEM_FAMILIES)
SIMPLE = "VK_KHR_shader_float16_int8", "shaderInt16"

# Shared memory decides the tiles: Turing has least, sm_86, sm_89 and sm_120 the same, sm_90 and sm_100 most.
NVIDIA_CASES = [
    ("f32", 128, "plain"),
    ("f16", 64, "all"),
    ("bf16", 256, "causal"),
    ("f32", 64, "dropout"),
    ("f16", 128, "packed"),
]
INTEL_CASES = [
    ("f32", 64, "causal"),
    ("f16", 128, "plain"),
    ("f32", 128, "all"),
    ("bf16", 256, "all"),
    ("f16", 64, "dropout"),
    ("f32", 64, "packed"),
]
AMD_CASES = [
    ("f32", 64, "plain"),
    ("f16", 64, "all"),
    ("f32", 128, "causal"),
    ("bf16", 128, "all"),
    ("f16", 256, "all"),
    ("f32", 64, "dropout"),
    ("f16", 128, "packed"),
]

MATRIX_CASES = [
    (64, "causal", "forward"),
    (128, "all", "forward"),
    (64, "plain", "dQ"),
    (128, "causal", "dK dV"),
    (64, "causal", "dK dV dQ"),
]

VULKAN = Target(
    "vulkan", "plain", subgroup_size=32, max_threads=1024, max_shared_bytes=49152, f16=True, int64=True, storage16=True,
    storage8=True, device_fence=True, language_version=13, extensions=SIMPLE,
)  # fmt: skip
VULKAN_TARGETS = {
    "everything": VULKAN,
    "no f16": Target(
        "vulkan", "no f16", subgroup_size=32, max_shared_bytes=32768, int64=True, storage16=True, storage8=True,
        language_version=12,
    ),
    "no storage16": Target("vulkan", "no storage16", subgroup_size=32, max_shared_bytes=32768, language_version=12),
    "no subgroups": Target(
        "vulkan", "no subgroups", max_shared_bytes=32768, f16=True, storage16=True, storage8=True, language_version=12,
        extensions=SIMPLE,
    ),
    "no int64": Target(
        "vulkan", "no int64", subgroup_size=8, max_shared_bytes=16384, f16=True, storage16=True, language_version=12,
        extensions=SIMPLE,
    ),
    "waves of 64": Target(
        "vulkan", "waves of 64", "amd", subgroup_size=64, subgroup_sizes=(32, 64), max_threads=1024,
        max_shared_bytes=65536, f16=True, int64=True, storage16=True, storage8=True, device_fence=True,
        language_version=13,
        extensions=(*SIMPLE, "VK_KHR_vulkan_memory_model", "VK_KHR_shader_float_controls"),
    ),
}  # fmt: skip


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas (CUDA toolkit) is not installed")
@pytest.mark.parametrize("arch", ARCHS)
def test_nvidia_does_not_spill(arch: str) -> None:
    for fields in NVIDIA_CASES:
        result = table.compile_nvidia(arch, Case(*fields))
        assert result.spills == 0, result
        assert result.shared <= table.SHARED_LIMITS[arch], result


@pytest.mark.skipif(shutil.which("ocloc") is None, reason="ocloc (Debian: intel-opencl-icd) is not installed")
@pytest.mark.parametrize("fields", INTEL_CASES, ids=str)
def test_intel_does_not_spill(fields: tuple[str, int, str]) -> None:
    result = table.compile_intel("dg2", Case(*fields))
    assert result.spills == 0, result


@pytest.mark.skipif(
    not table.RADEON_ICD.exists(), reason=f"{table.RADEON_ICD} (Debian: mesa-vulkan-drivers) is not there"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_amd_does_not_spill(family: str) -> None:
    results = table.compile_amd(table.RADEON_ICD, family, [Case(*fields) for fields in AMD_CASES])
    assert [str(Case(*fields)) for fields in AMD_CASES] == [r.case for r in results]
    for result in results:
        assert result.spills == 0, result
        assert result.wave == 64, result
        assert 0 < result.registers <= 256 and 0 < result.shared <= 65536, result


@pytest.mark.skipif(
    not table.RADEON_ICD.exists(), reason=f"{table.RADEON_ICD} (Debian: mesa-vulkan-drivers) is not there"
)
def test_matrix_units_of_amd() -> None:
    """The kernels on cooperative matrices, in both sizes of waves, where Mesa has them."""
    newer = table.unpacked_icd(table.NEWER_MESA)
    icd, family = (newer, "navi31") if newer else (table.RADEON_ICD, table.SYSTEM_FAMILIES[-1])
    cases = [table.MatrixCase("f16", *fields) for fields in MATRIX_CASES]
    results = table.compile_amd(icd, family, cases, (32, 64))
    if not results:
        pytest.skip("this Mesa has no cooperative matrices for AMD (25.0 has: see tools/compile_table.py)")
    assert [(r.case, r.wave) for r in results] == [(str(case), wave) for case in cases for wave in (32, 64)]
    for result in results:
        assert result.spills == 0 and result.products >= 24, result
        assert 0 < result.registers <= 256 and 0 < result.shared <= 65536, result


@pytest.mark.skipif(shutil.which("spirv-val") is None, reason="spirv-val (Debian: spirv-tools) is not installed")
@pytest.mark.parametrize("name", VULKAN_TARGETS)
def test_spirv_is_valid(name: str, tmp_path: Path) -> None:
    target = VULKAN_TARGETS[name]
    cases = (("f32", 64, "plain"), ("f16", 128, "all"), ("bf16", 40, "causal"), ("f16", 256, "all"))
    for fields in (*cases, ("f32", 64, "dropout"), ("f16", 64, "packed")):
        artifact = render(build_forward(Case(*fields).config(target), target), target)
        path = tmp_path / "kernel.spv"
        path.write_bytes(artifact.code)
        version = f"vulkan{target.language_version // 10}.{target.language_version % 10}"
        command = ["spirv-val", "--target-env", version, "--scalar-block-layout", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (name, fields, done.stdout + done.stderr)


def test_results_become_factors_without_memory_where_they_can() -> None:
    """Fragments of either orientation, the exchange, and the memory that a device without an exchange needs."""
    results, left, right = RDNA3_LAYOUTS[32]
    device = replace(
        VULKAN_TARGETS["waves of 64"], matrix_units=("m16n16k16:f16:f32",), matrix_layout=results,
        matrix_factors=(left, right),
    )  # fmt: skip
    case = table.MatrixCase("f16", 64, "causal", "forward")
    staged = replace(device, matrix_factors=(None, None))
    shapes = [case.build(target)[0] for target in (device, staged)]
    assert [shape.staged for shape in shapes] == [False, True] and shapes[0].lanes == 32
    texts = [str(case.build(target)[1]) for target in (device, staged)]
    assert "shuffle_xor u32" in texts[0] and "subgroup_barrier" not in texts[0]
    assert "shuffle_xor u32" not in texts[1] and "subgroup_barrier" in texts[1]
    for target in (device, staged):
        assert render(case.build(target)[1], target).subgroup_size == 32
