"""Compiles the forward kernel at its default tiles with every offline compiler found and writes ``docs/compiled.md``.

No GPU is needed: ptxas compiles for NVIDIA, Mesa's null device (``RADV_FORCE_FAMILY``) for AMD, ocloc for Intel.

    python tools/compile_table.py                    write docs/compiled.md
    python tools/compile_table.py --stdout           print it instead
    python tools/compile_table.py --only nvidia,amd  some vendors only
    python tools/compile_table.py --mesa FOLDER      a second Mesa, unpacked there (``dpkg -x`` of mesa-vulkan-drivers,
                                                     libdrm2 and libdrm-amdgpu1)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aule.ops.attention.config import ForwardConfig
from aule.ops.attention.forward import build_forward
from aule.ops.attention.plan import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.render import opencl, ptx, spirv
from aule.runtime.opencl import LARGE_REGISTERS
from aule.target import Target
from aule.view import TensorView

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "compiled.md"

SHARED_LIMITS = {
    "sm_75": 65536, "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448,
    "sm_120": 101376,
}  # fmt: skip
"""Shared memory of a workgroup, by architecture."""

RADEON_ICD = Path("/usr/share/vulkan/icd.d/radeon_icd.x86_64.json")
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

    def config(self, target: Target) -> ForwardConfig:
        """The kernel that a call on contiguous arrays gets, tiles and all."""
        p = self.problem()
        rows = {"q": p.seq_q, "k": p.seq_kv, "v": p.seq_kv, "o": p.seq_q}
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
        return plan_forward(p, {name: _view(*spec) for name, spec in shapes.items()}, target).config


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
    """Estimated cycles from one wave to the next at the possible occupancy (AMD)."""


def _view(dtype: str, shape: tuple[int, ...]) -> TensorView:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return TensorView(dtype, shape, tuple(reversed(strides)), "host", None)


def tiles(config: ForwardConfig) -> str:
    s = config.shape
    parts = [f"{s.block_q}x{s.block_kv}", f"{s.threads_x}x{s.threads_y}", f"{s.chunk_k}/{s.chunk_v}"]
    parts += ["Q"] if s.resident_q else []
    parts += [f"P{s.block_p}"] if s.block_p else []
    return " ".join(parts)


# -- NVIDIA ------------------------------------------------------------------------------------------------------------


def nvidia_target(arch: str) -> Target:
    return Target(
        "cuda", arch, "nvidia", arch=arch, subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
        max_shared_bytes=SHARED_LIMITS[arch], max_grid=(2**31 - 1, 65535, 65535), max_buffers=256,
        max_buffer_bytes=1 << 40, f16=True, f64=True, int64=True, storage16=True, storage8=True,
        bf16=arch != "sm_75",
    )  # fmt: skip


def compile_nvidia(arch: str, case: Case) -> Result:
    """Through ptxas; raises CalledProcessError when it refuses the code."""
    target = nvidia_target(arch)
    config = case.config(target)
    artifact = ptx.render(build_forward(config, target), target)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_bytes(artifact.code)
        command = ["ptxas", "-v", f"-arch={arch}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        said = _said(command)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    used = re.search(r"Used (\d+) registers", said)
    assert spilled and used, said
    shared = artifact.shared_bytes
    if shared > SHARED_LIMITS[arch]:
        raise ValueError(f"{arch} {case}: {shared} bytes of shared memory")
    return Result(
        "ptxas", arch, str(case), tiles(config), 32, int(used[1]), None, max(int(spilled[1]), int(spilled[2])), shared
    )


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
    waves : sequence of int
        Subgroup sizes to ask for; 0 for the kernel's own choice. Sizes that the family does not have are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = {"cases": [asdict(case) for case in cases], "waves": list(waves)}
        command = [sys.executable, __file__, "--radv-worker", json.dumps(order)]
        environment = radv_environment(icd, family) | {"AULE_CACHE_DIR": folder}
        said = subprocess.run(command, env=environment, capture_output=True, text=True)
    if said.returncode:
        raise RuntimeError(f"{family} with {icd}: {said.stderr[-2000:]}")
    return [Result(device=family, **row) for row in json.loads(said.stdout.splitlines()[-1])]


def _radv_worker(order: str) -> None:
    from aule.runtime import vulkan

    wanted = json.loads(order)
    device = vulkan.devices()[0]
    assert isinstance(device, vulkan.VulkanDevice)
    if "RADV" not in device.target.name:
        raise RuntimeError(f"expected Mesa's null device, got {device.target.name}")
    rows = []
    for case in (Case(**fields) for fields in wanted["cases"]):
        for wave in wanted["waves"]:
            if wave and wave not in device.target.subgroup_sizes:
                continue
            target = device.target
            config = case.config(target)
            kernel = build_forward(config, target)
            artifact = spirv.render(kernel, target)
            if wave:
                artifact = replace(artifact, subgroup_size=wave)
            told = device.statistics(device.load(artifact))
            rows.append(_radv_row(target.driver, str(case), tiles(config), told))
    print(json.dumps(rows))


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
        said = _said(command)
        binary = next(path.read_bytes() for path in Path(folder).glob("*.bin"))
    spilled = re.search(r"spilled around (\d+)", said)

    # The notes are YAML, in some builds with an entry for a table of symbols before the kernel's.
    notes = binary[re.search(rb"name: +" + artifact.entry.encode() + rb"\n", binary).end() :]  # type: ignore[union-attr]

    def noted(key: bytes) -> int:
        found = re.search(key + rb": *(\d+)", notes)
        return int(found[1]) if found else 0

    return Result(
        "ocloc", device, str(case), tiles(config), noted(b"simd_size"), noted(b"grf_count"), None,
        int(spilled[1]) if spilled else 0, artifact.shared_bytes,
    )  # fmt: skip


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout + done.stderr


# -- the table ---------------------------------------------------------------------------------------------------------


def all_cases() -> list[Case]:
    """Everything for the common head dimensions, fp32 alone for the odd ones."""
    return [
        Case(dtype, head_dim, kind)
        for head_dim in HEAD_DIMS
        for dtype in (DTYPES if head_dim in (64, 128, 256) else DTYPES[:1])
        for kind in KINDS
    ]


def nvidia_section(cases: Sequence[Case]) -> list[str]:
    rows = _parallel(compile_nvidia, [(arch, case) for case in cases for arch in SHARED_LIMITS])
    by_case: dict[str, list[Result]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    lines = [
        "## NVIDIA",
        "",
        f"{_version(['ptxas', '--version'], r'V[0-9.]+')}. Registers a thread, + bytes of spills where there are any / "
        "KiB of shared memory.",
        "",
        _head(["kernel", *SHARED_LIMITS]),
    ]
    for case, found in by_case.items():
        shown = [f"{r.registers}{f' + {r.spills}' if r.spills else ''} / {r.shared / 1024:.0f}" for r in found]
        lines.append(_row([case, *shown]))
    lines += ["", "Tiles (block_q x block_kv, threads_x x threads_y, chunk_k/chunk_v, Q resident, P in parts):", ""]
    lines += _tile_lines(rows)
    return lines


def amd_section(cases: Sequence[Case], drivers: Sequence[tuple[Path, Sequence[str]]]) -> list[str]:
    lines = [
        "## AMD",
        "",
        "Mesa's RADV with its null device: VGPRs / SGPRs / latency / inverse throughput, + spilled registers and bytes "
        "of scratch where there are any. The last two are ACO's estimates in cycles of a wave for guessed trip counts "
        "(8 tiles, 4 steps each): they compare kernels of the same loops. The kernel asks for 64 lanes; 32, where the "
        "family has them, stand beside it.",
    ]
    for icd, families in drivers:
        rows = [r for found in _parallel(compile_amd, [(icd, f, cases, (0, 32)) for f in families]) for r in found]
        for wave in (64, 32):
            cells = {(r.case, r.device): _amd_cell(r) for r in rows if r.wave == wave}
            shown = [f for f in families if any(device == f for _, device in cells)]
            head = _head(["kernel", "tiles", "LDS", *shown])
            lines += ["", f"### {rows[0].compiler}, {wave} lanes", "", head]
            for case in map(str, cases):
                one = next(r for r in rows if r.case == case)
                lines.append(_row([case, one.tiles, one.shared, *(cells[case, f] for f in shown)]))
    return lines


def _amd_cell(r: Result) -> str:
    text = f"{r.registers} / {r.scalars} / {r.latency} / {r.throughput}"
    return f"{text} + {r.spills}" if r.spills else text


def intel_section(cases: Sequence[Case]) -> list[str]:
    rows = _parallel(compile_intel, [(device, case) for case in cases for device in INTEL_DEVICES])
    lines = [
        "## Intel",
        "",
        f"ocloc on the OpenCL C with the runtime's `{LARGE_REGISTERS}`, which only dg2 heeds. Registers are those of a "
        "hardware thread, 32 bytes each: one for a value of 8 lanes.",
        "",
        _head(["kernel", "tiles", "shared", *INTEL_DEVICES]),
    ]
    for i in range(0, len(rows), len(INTEL_DEVICES)):
        found = rows[i : i + len(INTEL_DEVICES)]
        shown = [f"SIMD{r.wave}, {r.registers} registers, {r.spills} spilled" for r in found]
        lines.append(_row([found[0].case, found[0].tiles, found[0].shared, *shown]))
    return lines


def _tile_lines(rows: Iterable[Result]) -> list[str]:
    groups: dict[str, dict[str, list[str]]] = {}
    for r in rows:
        groups.setdefault(r.tiles, {}).setdefault(r.case, []).append(r.device)
    lines = []
    for shape, by_case in groups.items():
        used = [c if len(a) == len(SHARED_LIMITS) else f"{c} ({', '.join(a)})" for c, a in by_case.items()]
        lines.append(f"- `{shape}`: {'; '.join(used)}")
    return lines


def _parallel(function: Any, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: function(*job), jobs))


def _head(titles: Sequence[str]) -> str:
    return _row(titles) + "\n" + _row(["---"] * len(titles))


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _version(command: list[str], pattern: str) -> str:
    found = re.search(pattern, _said(command))
    return f"{command[0]} {found[0] if found else ''}".strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdout", action="store_true")
    parser.add_argument("--only", default="nvidia,amd,intel")
    parser.add_argument("--mesa", type=Path, default=Path("/tmp/mesa25"))
    parser.add_argument("--radv-worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.radv_worker:
        _radv_worker(options.radv_worker)
        return 0
    wanted, cases = options.only.split(","), all_cases()
    lines = [
        "# What the compilers make of the forward kernel",
        "",
        "Written by `tools/compile_table.py`: the default tiles, contiguous arrays, no GPU involved. Kernels are named "
        "by dtype, head dimension and options (*all*: causal, window, softcap, mask, bias, alibi, sinks and lse at "
        "once).",
    ]
    if "nvidia" in wanted:
        lines += ["", *(nvidia_section(cases) if shutil.which("ptxas") else ["## NVIDIA", "", "ptxas was not found."])]
    if "amd" in wanted:
        newer = unpacked_icd(options.mesa)
        drivers: list[tuple[Path, Sequence[str]]] = [(newer, NEWER_FAMILIES)] if newer else []
        drivers += [(RADEON_ICD, SYSTEM_FAMILIES)] if RADEON_ICD.exists() else []
        lines += ["", *(amd_section(cases, drivers) if drivers else ["## AMD", "", "Mesa's RADV was not found."])]
    if "intel" in wanted:
        lines += ["", *(intel_section(cases) if shutil.which("ocloc") else ["## Intel", "", "ocloc was not found."])]
    text = "\n".join(lines) + "\n"
    if options.stdout:
        print(text, end="")
    else:
        OUTPUT.write_text(text)
        print(f"wrote {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
