"""Compiles kernels for AMD GPUs with the clang of the PyPI package ``ziglang`` and writes ``docs/compiled_amd.md``.

Neither a GPU nor ROCm is needed. What was compiled once is kept in a folder, so that a run can be continued.

    python tools/compile_hip.py                      write docs/compiled_amd.md
    python tools/compile_hip.py --arch gfx942 --stdout
    python tools/compile_hip.py --problem forward    only problems whose names contain a text
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), *([str(ROOT / "src")] if __name__ == "__main__" else [])]

from kernel_hashes import ADAPTERS, render  # noqa: E402
from kernel_problems import Problem  # noqa: E402

from aule.artifact import Artifact  # noqa: E402
from aule.runtime._hip_chips import chip  # noqa: E402

OUTPUT = ROOT / "docs" / "compiled_amd.md"
KEPT = Path(tempfile.gettempdir(), "aule-hip-compiled")
CHIPS = {
    "gfx906": "Radeon VII", "gfx908": "MI100", "gfx90a": "MI200", "gfx942": "MI300", "gfx950": "MI350",
    "gfx1030": "RX 6000", "gfx1100": "RX 7900", "gfx1151": "Strix Halo", "gfx1201": "RX 9070",
}  # fmt: skip
"""Instruction sets, with a product of each."""
_EVERYTHING = "causal window softcap mask-bool bias alibi sinks lse"
_NUMBERS = {
    "vgprs": "vgpr_count", "agprs": "agpr_count", "sgprs": "sgpr_count", "lds": "group_segment_fixed_size",
    "spills": "vgpr_spill_count", "scratch": "private_segment_fixed_size",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a kernel."""

    vgprs: int
    """Vector registers of a lane, with those for matrices (AGPRs)."""
    agprs: int
    sgprs: int
    lds: int
    """Bytes of shared memory."""
    spills: int
    """Vector registers that were spilled."""
    scratch: int
    """Bytes of a lane in memory."""
    occupancy: int
    """Waves that a SIMD can hold."""
    products: int
    """Instructions of matrix units."""


def available() -> bool:
    """Whether there is a compiler."""
    return importlib.util.find_spec("ziglang") is not None


def assembly(artifact: Artifact, arch: str, options: Sequence[str] = ()) -> str:
    """The machine code of a kernel as text; a RuntimeError if the compiler refuses the source."""
    command = [sys.executable, "-m", "ziglang", "clang", "-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc"]
    command += [f"--offload-arch={arch}", "-O3", "-w", "-S", "-o", "-", "-"]
    command += [*(f"-m{extension}" for extension in artifact.extensions), *options]
    done = subprocess.run(command, input=artifact.text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{artifact.entry} for {arch}: {done.stderr[:4000]}")
    return done.stdout


def read(text: str) -> Compiled:
    """The numbers in an assembly."""
    found = {name: re.search(rf"\.{key}: +(\d+)", text) for name, key in _NUMBERS.items()}
    occupancy = re.search(r"; Occupancy: (\d+)", text)
    assert occupancy, text[-2000:]
    numbers = {name: int(match[1]) if match else 0 for name, match in found.items()}
    return Compiled(**numbers, occupancy=int(occupancy[1]), products=len(re.findall(r"\tv_(?:mfma|wmma)_", text)))


def compiled(artifact: Artifact, arch: str) -> Compiled:
    """Compile a kernel, or read what an earlier run found."""
    key = hashlib.sha256(repr((arch, artifact.extensions, _compiler())).encode() + artifact.code).hexdigest()
    place = KEPT / f"{key}.json"
    if place.exists():
        return Compiled(**json.loads(place.read_text()))
    result = read(assembly(artifact, arch))
    KEPT.mkdir(exist_ok=True)
    place.write_text(json.dumps(asdict(result)))
    return result


@functools.cache
def _compiler() -> str:
    done = subprocess.run([sys.executable, "-m", "ziglang", "clang", "--version"], capture_output=True, text=True)
    return done.stdout.splitlines()[0]


# -- kernels -----------------------------------------------------------------------------------------------------------


def problems() -> Iterator[Problem]:
    """The kernels of the table: those of `compile_table.py`, and of every other operation."""
    for dim, dtype in product((40, 64, 96, 128, 256), ("f32", "f16", "bf16")):
        if dim in (64, 128, 256) or dtype == "f32":
            for options in ("", "causal", _EVERYTHING):
                yield Problem("attention", "forward", f"{dtype} b1 h8x8 q2048 k2048 d{dim}", options)
    for dtype, dim, options in product(("f32", "f16", "bf16"), (64, 128), ("causal", "causal deterministic")):
        yield Problem("attention", "backward", f"{dtype} b1 h8x8 q2048 k2048 d{dim}", options)
    yield Problem("attention", "backward", "bf16 b1 h8x8 q2048 k2048 d256", "causal")
    for op, options in (("forward", "causal"), ("backward", "causal")):
        yield Problem("attention", op, "bf16 b1 h8x8 q2048 k2048 d512", options)
    yield Problem("attention", "forward", "f16 b1 h8x8 q2048 k2048 d576x512", "")
    for sizes in ("bf16 b1 h8x8 q2048 k2048 d64", "bf16 b1 h8x8 q2048 k2048 d128", "f32 b1 h8x8 q2048 k2048 d64"):
        yield Problem("attention", "backward", sizes, "ds causal")
    yield Problem("attention", "forward", "bf16 b1 h8x8 q2048 k2048 d128", "rope causal")
    yield Problem("attention", "forward", "bf16 b2 h8x8 q2048 k2048 d128", "packed causal dropout")
    for options in ("", "page16", "page16 i8", "page16 e4m3"):
        yield Problem("decode", "decode", "bf16 b4 h32x8 n4096 d128", options)
    yield Problem("decode", "decode", "f32 b3 h6x2 n700 d40", "window softcap alibi sinks lse")
    yield Problem("decode", "decode", "f16 b2 h8x2 n512 d64 t100", "page16")
    for options in ("page16", "page16 i8"):
        yield Problem("decode", "decode", "bf16 b4 h16x1 n4096 d576x512", options)
    yield Problem("append", "kvcache", "bf16 b4 h8 t300 d128", "i8 rope")
    for op, sizes in (
        ("rms_norm", "2048x4096"), ("residual_layer_norm", "2048x4096"), ("swiglu", "512x11008"),
        ("rope", "2x8x128x64"), ("softmax_dropout", "2x4x64x1024"), ("cross_entropy", "256x32000"),
        ("layer_norm_linear", "512x512x1024"),
    ):  # fmt: skip
        for options in ("", "gradient"):
            yield Problem("rows", op, f"bf16 {sizes}", ("dropout " if "dropout" in op else "") + options)


def kernels(problem: Problem, arch: str) -> list[Artifact]:
    """The kernels of a problem."""
    target = chip(arch)
    return [render(launch, target) for launch in ADAPTERS[problem.kind](problem, target).launches]


def label(problem: Problem) -> str:
    """A problem in the table."""
    options = "all" if problem.options == _EVERYTHING else problem.options.strip()
    return " ".join(word for word in (problem.op, problem.sizes, options) if word)


def wanted_products(artifact: Artifact) -> bool:
    """Whether a kernel's source multiplies matrices."""
    return "aule::mfma_" in artifact.text or "aule::wmma_" in artifact.text


# -- the table ---------------------------------------------------------------------------------------------------------


def table(archs: Sequence[str], chosen: Sequence[Problem]) -> list[str]:
    cells: dict[tuple[str, str], dict[str, str]] = {}
    bad = []
    for arch in archs:
        found = [(problem, artifact) for problem in chosen for artifact in kernels(problem, arch)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(lambda pair: compiled(pair[1], arch), found))  # noqa: B023
        for (problem, artifact), result in zip(found, results, strict=True):
            cells.setdefault((label(problem), artifact.entry), {})[arch] = _cell(result)
            if result.spills or result.scratch:
                bad.append(f"{arch}: {label(problem)}, {artifact.entry}")
            assert result.products or not wanted_products(artifact), f"{arch}: no matrix instructions, {artifact.entry}"
    head = ["problem", "kernel", *(f"{arch} ({CHIPS[arch]})" for arch in archs)]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head))]
    order = [label(problem) for problem in chosen]
    for (name, entry), row in sorted(cells.items(), key=lambda cell: order.index(cell[0][0])):
        lines.append("| " + " | ".join([name, f"`{entry}`", *(row.get(arch, "") for arch in archs)]) + " |")
    lines += ["", f"{len(bad)} kernels spill." if bad else "No kernel spills.", *(f"\n- {name}" for name in bad)]
    return lines


def _cell(result: Compiled) -> str:
    text = f"{result.vgprs} / {result.lds / 1024:.0f} / {result.occupancy}"
    text += f" / {result.products}" if result.products else ""
    return f"{text} + {result.spills} spilled, {result.scratch} B" if result.spills or result.scratch else text


def page(archs: Sequence[str], chosen: Sequence[Problem]) -> str:
    about = (
        f"Kernels as {_compiler()} compiles them (`-O3`), without a GPU and without ROCm: they are known to compile, "
        "not to run on hardware. Tiles are those that a call gets, chosen by rules and not by measurement. A cell has "
        "vector registers of a lane / KiB of LDS / waves that a SIMD can hold / instructions of matrix units, if the "
        "kernel has any, + spilled registers and bytes of scratch memory, if there are any. An empty cell: that chip "
        "takes another kernel. *all*: causal, window, softcap, mask, bias, alibi, sinks and lse at once. Written by "
        "`tools/compile_hip.py`."
    )
    title = "# Compiled kernels for AMD's HIP"
    return "\n".join([title, "", *textwrap.wrap(about, 120), "", *table(archs, chosen), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default=",".join(CHIPS), help="instruction sets, separated by commas")
    parser.add_argument("--problem", default="", help="only problems whose names contain this")
    parser.add_argument("--stdout", action="store_true", help="print the page instead of writing it")
    args = parser.parse_args()
    if not available():
        sys.exit("expected the package ziglang, which contains the compiler; pip install ziglang")
    text = page(args.arch.split(","), [p for p in problems() if args.problem in label(p)])
    if args.stdout:
        print(text)
    else:
        OUTPUT.write_text(text)


if __name__ == "__main__":
    main()
