"""Compiles kernels at their default tiles with every offline compiler found and writes ``docs/compiled.md``.

No GPU is needed (`compilers.py`).

    python tools/compile_table.py                    write docs/compiled.md
    python tools/compile_table.py --stdout           print it instead
    python tools/compile_table.py --only nvidia,amd  some vendors only
    python tools/compile_table.py --mesa FOLDER      a second Mesa, unpacked there (``dpkg -x`` of mesa-vulkan-drivers,
                                                     libdrm2 and libdrm-amdgpu1)
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compile_hip import label, problems
from compilers import (
    DTYPES,
    HEAD_DIMS,
    INTEL_DEVICES,
    KINDS,
    LARGE_REGISTERS,
    NEWER_FAMILIES,
    NEWER_MESA,
    RADEON_ICD,
    SYSTEM_FAMILIES,
    Case,
    MatrixCase,
    Result,
    compile_amd,
    compile_intel,
    ptxas,
    said,
    unpacked_icd,
)
from kernel_hashes import ADAPTERS, render
from kernel_problems import Problem
from kernel_targets import CUDA

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "compiled.md"
MATRIX_FAMILIES = ("navi31", "gfx1151")


# -- the table ---------------------------------------------------------------------------------------------------------


def all_cases() -> list[Case]:
    """Everything for the common head dimensions, fp32 alone for the odd ones."""
    return [
        Case(dtype, head_dim, kind)
        for head_dim in HEAD_DIMS
        for dtype in (DTYPES if head_dim in (64, 128, 256) else DTYPES[:1])
        for kind in KINDS
    ]


def nvidia_section() -> list[str]:
    """The kernels that calls get on each generation, those on matrix units included."""
    # Wider and odd heads, which other vendors' table lacks.
    sizes = [f"bf16 b1 h8x8 q2048 k2048 d{dim}" for dim in (96, 192, 512)]
    more = [Problem("attention", direction, size, "causal") for size in sizes for direction in ("forward", "backward")]
    jobs = [
        (arch, target, label(problem), render(launch, target))
        for arch, target in CUDA.items()
        for problem in (*problems(), *more)
        for launch in ADAPTERS[problem.kind](problem, target).launches
    ]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    spilling = dict.fromkeys(CUDA, 0)
    found = _parallel(ptxas, [(artifact, arch) for arch, _, _, artifact in jobs])
    for (arch, target, name, artifact), (registers, spills) in zip(jobs, found, strict=True):
        assert artifact.shared_bytes <= target.max_shared_bytes, (arch, name, artifact.entry)
        shown = f"{registers} / {artifact.shared_bytes / 1024:.0f}{f' + {spills}' if spills else ''}"
        cells.setdefault((name, artifact.entry), {})[arch] = shown
        spilling[arch] += spills > 0
    lines = [
        "## NVIDIA",
        "",
        f"{_version(['ptxas', '--version'], r'V[0-9.]+')}. Registers per thread / KiB of shared memory, + bytes of "
        "spills if there are any. An empty cell: that generation takes another kernel. Tiles were chosen on an "
        "H200, for sm_80 with Hopper's instructions switched off; the others follow by rules.",
        "",
        _head(["problem", "kernel", *CUDA]),
        *(_row([*key, *(row.get(arch, "") for arch in CUDA)]) for key, row in cells.items()),
        "",
        f"Kernels that spill: {', '.join(f'{arch} {count}' for arch, count in spilling.items())}; {len(cells)} rows.",
    ]
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


def matrix_section(icd: Path) -> list[str]:
    """The kernels on matrix units, in both sizes of waves."""
    cases = [
        MatrixCase(dtype, dim, kind, of)
        for of in ("forward", "dQ", "dK dV", "dK dV dQ")
        for dtype in ("f16", "bf16")
        for dim in ((64, 128, 256) if of == "forward" else (64, 128))
        for kind in ("plain", "causal", "all")
        if of == "forward" or kind != "all"
    ]
    rows = [r for found in _parallel(compile_amd, [(icd, f, cases, (32, 64)) for f in MATRIX_FAMILIES]) for r in found]
    lines = [
        "## AMD, matrix units",
        "",
        "Kernels with cooperative matrices, forward and backward (*dK dV dQ* adds dQ up with atomics; the other two "
        "are the deterministic pair), for the layouts that AMD documents. Tiles: block_q x block_kv over subgroups, Q "
        "resident. VGPRs / waves that a SIMD can hold / latency / inverse throughput (both as above, the latter of 64 "
        "lanes), + spilled registers and bytes of scratch where there are any. WMMA counts the instructions of the "
        "matrix units in the assembly. Forward estimates include the product for Inf and NaN among dropped keys, which "
        "seldom runs and is guessed to run often. bf16 is missing where the driver does not offer it.",
    ]
    for wave in (32, 64):
        cells = {(r.case, r.device): r for r in rows if r.wave == wave}
        head = _head(["kernel", "tiles", "LDS", "WMMA", *MATRIX_FAMILIES])
        lines += ["", f"### {rows[0].compiler}, {wave} lanes", "", head]
        for case in dict.fromkeys(r.case for r in rows):
            found = [cells[case, family] for family in MATRIX_FAMILIES]
            shown = [
                f"{r.registers} / {r.occupancy} / {r.latency} / {r.throughput}{f' + {r.spills}' if r.spills else ''}"
                for r in found
            ]
            lines.append(_row([case, found[0].tiles, found[0].shared, found[0].products, *shown]))
    return lines


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


def _parallel(function: Any, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: function(*job), jobs))


def _head(titles: Sequence[str]) -> str:
    return _row(titles) + "\n" + _row(["---"] * len(titles))


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _version(command: list[str], pattern: str) -> str:
    found = re.search(pattern, said(command))
    return f"{command[0]} {found[0] if found else ''}".strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdout", action="store_true")
    parser.add_argument("--only", default="nvidia,amd,intel")
    parser.add_argument("--mesa", type=Path, default=NEWER_MESA)
    options = parser.parse_args()
    wanted, cases = options.only.split(","), all_cases()
    lines = [
        "# Compiled kernels",
        "",
        "Registers, spills and shared memory of the kernels, as the vendors' offline compilers report them. No GPU is "
        "involved: a kernel in this table is known to compile, not to run. Kernels are named by dtype, head dimension "
        "and options (*all*: causal, window, softcap, mask, bias, alibi, sinks and lse at once); they are forward "
        "kernels unless the name says otherwise, with default tiles and contiguous arrays. Written by "
        "`tools/compile_table.py`.",
    ]
    if "nvidia" in wanted:
        lines += ["", *(nvidia_section() if shutil.which("ptxas") else ["## NVIDIA", "", "ptxas was not found."])]
    if "amd" in wanted:
        newer = unpacked_icd(options.mesa)
        drivers: list[tuple[Path, Sequence[str]]] = [(newer, NEWER_FAMILIES)] if newer else []
        drivers += [(RADEON_ICD, SYSTEM_FAMILIES)] if RADEON_ICD.exists() else []
        lines += ["", *(amd_section(cases, drivers) if drivers else ["## AMD", "", "Mesa's RADV was not found."])]
        lines += ["", *matrix_section(newer)] if newer else []
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
