"""The offline compilers, run on kernels at their default tiles. No GPU is needed.

ptxas compiles for NVIDIA, Mesa's null device (``RADV_FORCE_FAMILY``) for AMD, ocloc for Intel. `compile_table.py`
writes their reports to ``docs/compiled.md``; tests check parts of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aule.artifact import Artifact
from aule.ir import KernelIR
from aule.ops.attention.build import build_forward
from aule.ops.attention.config import ForwardConfig, FragmentBackwardConfig, FragmentConfig
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.render import opencl, ptx, spirv
from aule.runtime.opencl import LARGE_REGISTERS
from aule.target import RDNA3_LAYOUTS, Target
from aule.tile.fragment.engine import has_units
from aule.tile.fragment.shape import FragmentShape
from aule.view import TensorView

ROOT = Path(__file__).resolve().parent.parent

SHARED_LIMITS = {
    "sm_75": 65536, "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448,
    "sm_120": 101376,
}  # fmt: skip
"""Shared memory of a workgroup, by architecture."""

RADEON_ICD = Path("/usr/share/vulkan/icd.d/radeon_icd.x86_64.json")
NEWER_MESA = Path("/tmp/mesa25")
"""Where a second Mesa may be unpacked; Debian bookworm's own knows no cooperative matrices on AMD."""
SYSTEM_FAMILIES = ("vega10", "navi10", "navi21", "gfx1100")
"""What Mesa 22.3.6 knows; it calls navi31 by its instruction set."""
NEWER_FAMILIES = ("vega10", "navi10", "navi21", "navi31", "gfx1201")

INTEL_DEVICES = ("dg2", "tgllp", "skl")
INTEL_EXTENSIONS = (
    "cl_intel_required_subgroup_size",
    "cl_intel_subgroups",
    "cl_intel_subgroups_short",
    "cl_khr_fp16",
    "cl_khr_subgroup_shuffle",
    "cl_khr_subgroups",
)

DTYPES = ("f32", "f16", "bf16")
HEAD_DIMS = (40, 64, 96, 128, 256)
KINDS = ("plain", "causal", "all")
"""Options of a call: none; ``causal``; causal, window, softcap, mask, bias, alibi, sinks and lse at once."""


@dataclass(frozen=True)
class Case:
    """One configuration of the forward kernel."""

    dtype: str
    head_dim: int
    kind: str

    def __str__(self) -> str:
        return f"{self.dtype} d{self.head_dim} {self.kind}"

    def problem(self) -> AttentionProblem:
        plain = AttentionProblem(1, 8, 8, 2048, 2048, self.head_dim, self.head_dim, self.dtype, 0.125)
        if self.kind == "plain":
            return plain
        if self.kind == "causal":
            return replace(plain, causal=True)
        if self.kind == "dropout":  # this and the next in the tests, not in the table
            return replace(plain, causal=True, dropout_p=0.1)
        if self.kind == "packed":
            return replace(plain, causal=True, packed=(plain.seq_q, plain.seq_kv))
        return replace(
            plain, causal=True, window=(512, 0), softcap=30.0, mask="bool", bias=self.dtype, alibi=True, sinks=True,
            return_lse=True,
        )  # fmt: skip

    def config(self, target: Target) -> ForwardConfig | FragmentConfig:
        """The kernel that a call on contiguous arrays gets, tiles and all."""
        return plan_forward(self.problem(), self.views(), target).steps[-1].config

    def views(self) -> dict[str, TensorView]:
        """Contiguous operands, results and their gradients."""
        p = self.problem()
        rows = {"q": p.seq_q, "k": p.seq_kv, "v": p.seq_kv, "o": p.seq_q}
        rows |= {"do": p.seq_q, "dq": p.seq_q, "dk": p.seq_kv, "dv": p.seq_kv}
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (p.dtype, (p.batch, p.heads_q, n, p.head_dim)) for name, n in rows.items()
        }
        if p.mask:
            shapes["mask"] = (p.mask, (p.batch, p.heads_q, p.seq_q, p.seq_kv))
        if p.bias:
            shapes["bias"] = (p.bias, (p.batch, p.heads_q, p.seq_q, p.seq_kv))
        if p.alibi:
            shapes["alibi"] = ("f32", (p.batch, p.heads_q))
        if p.sinks:
            shapes["sinks"] = ("f32", (p.heads_q,))
        return {name: _view(*spec) for name, spec in shapes.items()}


@dataclass(frozen=True)
class MatrixCase(Case):
    """One of the kernels on matrix units."""

    of: str = "forward"
    """``forward``; ``dQ`` and ``dK dV``, the deterministic pair; ``dK dV dQ``, which adds dQ up."""

    def __str__(self) -> str:
        return f"{super().__str__()} {self.of}"

    def build(self, target: Target) -> tuple[FragmentShape, KernelIR]:
        """The tiles that a call gets, and the kernel."""
        if self.of == "forward":
            config = self.config(target)
            assert isinstance(config, FragmentConfig), config
            return config.shape, build_forward(config, target)
        problem = replace(self.problem(), deterministic=self.of != "dK dV dQ")
        steps = [
            s
            for s in plan_backward(problem, self.views(), target).steps
            if isinstance(s.config, FragmentBackwardConfig)
        ]
        step = steps[0 if self.of == "dQ" else -1]
        return step.config.shape, step.build(step.config, target)


@dataclass(frozen=True)
class Result:
    """What a compiler says of a kernel. Counts that it does not tell are None."""

    compiler: str
    device: str
    case: str
    tiles: str
    wave: int
    """Lanes that run together."""
    registers: int | None
    """Per lane (NVIDIA, AMD) or per hardware thread (Intel)."""
    scalars: int | None
    """Scalar registers (AMD)."""
    spills: int
    """Spilled registers; bytes for NVIDIA. Scratch memory counts."""
    shared: int
    latency: int | None = None
    """Estimated cycles of a wave with guessed trip counts (AMD): comparable between kernels of the same loops."""
    throughput: int | None = None
    """Estimated cycles from 64 lanes to the next at the possible occupancy (AMD)."""
    occupancy: int | None = None
    """Waves that a SIMD can hold (AMD)."""
    products: int = 0
    """Instructions of matrix units (AMD)."""


def _view(dtype: str, shape: tuple[int, ...]) -> TensorView:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return TensorView(dtype, shape, tuple(reversed(strides)), "host", None)


def tiles(config: ForwardConfig | FragmentConfig) -> str:
    s = config.shape
    if isinstance(s, FragmentShape):
        return matrix_tiles(s)
    parts = [f"{s.block_q}x{s.block_kv}", f"{s.threads_x}x{s.threads_y}", f"{s.chunk_k}/{s.chunk_v}"]
    parts += ["Q"] if s.resident_q else []
    parts += [f"P{s.block_p}"] if s.block_p else []
    return " ".join(parts)


def matrix_tiles(s: FragmentShape) -> str:
    return f"{s.block_q}x{s.block_kv} over {s.subgroups}{' Q' if s.resident_q else ''}"


# -- NVIDIA ------------------------------------------------------------------------------------------------------------


def nvidia_target(arch: str) -> Target:
    return Target(
        "cuda", arch, "nvidia", arch=arch, subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
        max_shared_bytes=SHARED_LIMITS[arch], max_grid=(2**31 - 1, 65535, 65535), max_buffers=256,
        max_buffer_bytes=1 << 40, f16=True, f64=True, int64=True, storage16=True, storage8=True,
        bf16=arch != "sm_75", e4m3=int(arch.removeprefix("sm_")) >= 90, device_fence=True,
        atomic_f32_add=True,
    )  # fmt: skip


def compile_nvidia(arch: str, case: Case) -> Result:
    """Through ptxas; raises CalledProcessError when it refuses the code."""
    target = nvidia_target(arch)
    config = case.config(target)
    artifact = ptx.render(build_forward(config, target), target)
    registers, spills = ptxas(artifact, arch)
    shared = artifact.shared_bytes
    if shared > SHARED_LIMITS[arch]:
        raise ValueError(f"{arch} {case}: {shared} bytes of shared memory")
    return Result("ptxas", arch, str(case), tiles(config), 32, registers, None, spills, shared)


def ptxas(artifact: Artifact, arch: str) -> tuple[int, int]:
    """Registers per thread and bytes of spills of a kernel; raises CalledProcessError when ptxas refuses the code."""
    if b".target sm_90a" in artifact.code:
        arch = "sm_90a"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_bytes(artifact.code)
        output = said(["ptxas", "-v", f"-arch={arch}", str(source), "-o", str(Path(folder, "kernel.cubin"))])
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    used = re.search(r"Used (\d+) registers", output)
    assert spilled and used, output
    return int(used[1]), max(int(spilled[1]), int(spilled[2]))


# -- AMD ---------------------------------------------------------------------------------------------------------------


def radv_environment(icd: Path, family: str) -> dict[str, str]:
    """What makes Mesa's AMD driver a compiler for a family that is not there."""
    environment = os.environ | {
        "RADV_FORCE_FAMILY": family, "VK_DRIVER_FILES": str(icd), "VK_ICD_FILENAMES": str(icd),
        "AULE_DISK_CACHE": "0", "MESA_SHADER_CACHE_DISABLE": "true", "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    library = json.loads(icd.read_text())["ICD"]["library_path"]
    if not library.startswith("/usr/lib/"):
        environment["LD_LIBRARY_PATH"] = str(Path(library).parent)  # its libdrm lies beside it
    return environment


def compile_amd(icd: Path, family: str, cases: Sequence[Case], waves: Sequence[int] = (0,)) -> list[Result]:
    """Through Mesa, in a process of its own: a driver reads the family once.

    Parameters
    ----------
    icd : Path
        The manifest of the driver.
    cases : sequence of Case
        Or of MatrixCase; those whose type the driver has no matrix units for are left out.
    waves : sequence of int
        Subgroup sizes to ask for; 0 for the kernel's own choice. Sizes that the family does not have are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        matrix = any(isinstance(case, MatrixCase) for case in cases)
        order = {"matrix": matrix, "cases": [asdict(case) for case in cases], "waves": list(waves)}
        command = [sys.executable, __file__, json.dumps(order)]
        environment = radv_environment(icd, family) | {"AULE_CACHE_DIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{family} with {icd}: {done.stderr[-2000:]}")
    return [Result(device=family, **row) for row in json.loads(done.stdout.splitlines()[-1])]


def _radv_worker(order: str) -> None:
    from aule.runtime import vulkan

    wanted = json.loads(order)
    device = vulkan.devices()[0]
    assert isinstance(device, vulkan.VulkanDevice)
    if "RADV" not in device.target.name:
        raise RuntimeError(f"expected Mesa's null device, got {device.target.name}")
    sizes = [wave for wave in wanted["waves"] if not wave or wave in device.target.subgroup_sizes]
    build = _radv_matrix if wanted["matrix"] else _radv_plain
    rows = [row for fields in wanted["cases"] for wave in sizes for row in build(device, fields, wave)]
    print(json.dumps(rows))


def _radv_plain(device: Any, fields: dict[str, Any], wave: int) -> list[dict[str, Any]]:
    case, target = Case(**fields), device.target
    config = case.config(target)
    artifact = spirv.render(build_forward(config, target), target)
    if wave:
        artifact = replace(artifact, subgroup_size=wave)
    return [_radv_row(target.driver, str(case), tiles(config), device.statistics(device.load(artifact)))]


def _radv_matrix(device: Any, fields: dict[str, Any], wave: int) -> list[dict[str, Any]]:
    """With the layouts that AMD documents: a null device cannot be asked."""
    case = MatrixCase(**fields)
    results, left, right = RDNA3_LAYOUTS[wave]
    target = replace(device.target, matrix_layout=results, matrix_factors=(left, right))
    if not has_units(target, case.dtype):
        return []
    shape, kernel = case.build(target)
    loaded = device.load(spirv.render(kernel, target))
    row = _radv_row(target.driver, str(case), matrix_tiles(shape), device.statistics(loaded))
    return [row | {"products": device.representations(loaded)["Assembly"].count("v_wmma_")}]


def _radv_row(driver: str, case: str, shape: str, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "compiler": driver.split("-")[0].replace("radv ", ""),
        "case": case,
        "tiles": shape,
        "wave": told["Subgroup Size"],
        "registers": told["VGPRs"],
        "scalars": told["SGPRs"],
        "spills": told["Spilled VGPRs"] + told["Spilled SGPRs"] + told["Scratch size"],
        "shared": told["LDS size"],
        "latency": told.get("Latency"),
        "throughput": told.get("Inverse Throughput"),
        "occupancy": told.get("Subgroups per SIMD"),
    }


def unpacked_icd(folder: Path) -> Path | None:
    """The manifest of the AMD driver of a Mesa unpacked in a folder, with the library's real place in it."""
    libraries = sorted(folder.glob("usr/lib/*/libvulkan_radeon.so"))
    if not libraries:
        return None
    manifest = {"file_format_version": "1.0.0", "ICD": {"library_path": str(libraries[0]), "api_version": "1.4.305"}}
    path = Path(tempfile.mkdtemp(), "radeon_icd.json")
    path.write_text(json.dumps(manifest))
    return path


# -- Intel -------------------------------------------------------------------------------------------------------------


def intel_target(name: str = "dg2") -> Target:
    return Target(
        "opencl", name, "intel", subgroup_size=16, subgroup_sizes=(8, 16, 32), max_threads=256,
        max_shared_bytes=65536, max_grid=(2**31 - 1, 65535, 65535), max_buffers=128, max_buffer_bytes=1 << 32, f16=True,
        int64=True, storage16=True, storage8=True, language_version=300, extensions=INTEL_EXTENSIONS,
    )  # fmt: skip


def compile_intel(device: str, case: Case) -> Result:
    """Through ocloc; raises CalledProcessError when it refuses the code."""
    target = intel_target(device)
    config = case.config(target)
    artifact = opencl.render(build_forward(config, target), target)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cl")
        source.write_bytes(artifact.code)
        command = ["ocloc", "compile", "-file", str(source), "-device", device, "-out_dir", folder, "--format", "zebin"]
        command += ["-options", LARGE_REGISTERS]
        output = said(command)
        binary = next(path.read_bytes() for path in Path(folder).glob("*.bin"))
    spilled = re.search(r"spilled around (\d+)", output)

    # The notes are YAML, in some builds with an entry for a table of symbols before the kernel's.
    notes = binary[re.search(rb"name: +" + artifact.entry.encode() + rb"\n", binary).end() :]  # type: ignore[union-attr]

    def noted(key: bytes) -> int:
        found = re.search(key + rb": *(\d+)", notes)
        return int(found[1]) if found else 0

    return Result(
        "ocloc", device, str(case), tiles(config), noted(b"simd_size"), noted(b"grf_count"), None,
        int(spilled[1]) if spilled else 0, artifact.shared_bytes,
    )  # fmt: skip


def said(command: list[str]) -> str:
    """What a compiler says; raises CalledProcessError when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout + done.stderr


if __name__ == "__main__":
    _radv_worker(sys.argv[1])
