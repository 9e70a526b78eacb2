"""Compiles CPU kernels with LLVM for every feature level of this machine, in child processes: LLVM may end its process.

python tools/compile_cpu.py                  all kernels of `kernel_problems.py`, and of every pair of dtypes
python tools/compile_cpu.py --share 50       one problem in 50
python tools/compile_cpu.py --unoptimised    as a process compiles after LLVM failed to optimise a kernel
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import product

from kernel_hashes import ADAPTERS, render
from kernel_problems import Problem, all_of_cpus

from aule.artifact import Artifact
from aule.errors import AuleError, InvalidArgumentError
from aule.runtime import _cpu_llvm, _cpu_pool, _cpu_target

LEVELS = ("native", "avx2", "baseline")


def levels() -> list[str]:
    """The feature levels that this machine has."""
    found = []
    for level in LEVELS:
        try:
            _cpu_llvm.machine(level)
        except InvalidArgumentError:
            continue
        found.append(level)
    return found


def problems(share: int = 1) -> list[Problem]:
    """One problem in ``share``, chosen by its name, and those that LLVM once failed to compile."""
    found = [*all_of_cpus(), *_dtype_pairs()]
    some = [problem for problem in found if zlib.crc32(problem.name("").encode()) % share == 0]
    return list(dict.fromkeys((*_once_failed(), *some)))


def _dtype_pairs() -> Iterator[Problem]:
    """Caches of every dtype and kind, read by queries of every dtype."""
    for dtype, stored in product(("f32", "f16", "bf16"), ("", "i8", "e4m3")):
        for heads, dim, kind in product(("h2x2", "h8x2"), ("d64", "d72", "d80", "d128"), ("", "page16")):
            yield Problem("decode", "decode", f"{dtype} b2 {heads} n600 {dim}", f"{kind} {stored}".strip())
            yield Problem("decode", "decode", f"{dtype} b2 {heads} n600 {dim} t4", f"page16 packed {stored}".strip())
        yield Problem("append", "kvcache", f"{dtype} b2 h3 t5 d64", f"rope {stored}".strip())


def _once_failed() -> Iterator[Problem]:
    for dim in ("d64", "d80"):
        yield Problem("decode", "decode", f"bf16 b2 h2x2 n600 {dim} t4", "page16 packed")


def artifacts(problem: Problem, level: str) -> Iterator[Artifact]:
    """The rendered kernels of a problem; none if the problem is refused."""
    target = _cpu_target.read_target(_cpu_llvm.machine(level), threads=8)
    try:
        plan = ADAPTERS[problem.kind](problem, target)
        yield from [render(launch, target) for launch in plan.launches]
    except AuleError:
        return


def compile_all(level: str, share: int = 1, optimise: bool = True, part: tuple[int, int] = (0, 1)) -> Counter[str]:
    """Compile the kernels of a level, or every n-th of them from ``part`` on; count them and name the failures."""
    machine, seen, found = _cpu_llvm.machine(level), set(), Counter[str]()
    for problem in problems(share)[part[0] :: part[1]]:
        for artifact in artifacts(problem, level):
            if artifact.text in seen:
                continue
            seen.add(artifact.text)
            entries = {artifact.entry: _cpu_pool.KERNEL_TYPES}
            try:
                _cpu_llvm._compile_safely(machine, artifact.text, entries, optimise)
                found["compiled"] += 1
            except (_cpu_llvm.Failed, _cpu_llvm.Refused) as error:
                found[f"{problem.name(level)} {artifact.entry}: {error}"] += 1
    return found


def _job(task: tuple[str, int, bool, tuple[int, int]]) -> tuple[str, Counter[str]]:
    return task[0], compile_all(*task)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=1, help="compile one problem in so many")
    parser.add_argument("--unoptimised", action="store_true", help="without LLVM's passes")
    parser.add_argument("--level", choices=LEVELS, action="append", help="only this level")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    parts = 4 * chosen.processes
    totals = {level: Counter[str]() for level in chosen.level or levels()}
    tasks = [(level, chosen.share, not chosen.unoptimised, (i, parts)) for level in totals for i in range(parts)]
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        for level, found in pool.imap_unordered(_job, tasks):
            totals[level] += found
    for level, total in totals.items():
        failed = total.total() - total["compiled"]
        print(f"{level}: {total['compiled']} kernels compiled, {failed} failed")
        print("".join(f"  {name}\n" for name in total if name != "compiled"), end="", flush=True)
    return int(any(total.keys() - {"compiled"} for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
