"""Compares row operations of two source trees on a GPU, for rows of many lengths, in one run.

    python benchmarks/row_lengths.py --before OTHER_CHECKOUT [--csv FILE] [--ops rms_norm,layer_norm]
        [--lengths 128,768,1024,5120,50257] [--mib 64,1024] [--backward] [--vulkan]

Each tree has a process of its own, with its ``src`` on the path. They hold the same tensors, and take turns on the GPU,
as CUDA graphs of some 400 us of calls; medians of the rounds count. Results of both are compared before timing: through
CUDA against float64, as in `fused.py`. Figures are terabytes per second, and the time after over that before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OPS = "rms_norm,layer_norm,residual_rms_norm,residual_layer_norm,softmax_dropout,swiglu"
LENGTHS = "64,128,512,768,1000,1024,1536,2048,2560,3072,4096,5120,6144,8192,12288,16384,32768,1001,4097,50257"
ROUNDS = 11


# -- one tree ----------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer a parent's cases, one JSON line each: prepare a call, then time it as often as asked."""
    import torch
    from fused import calls_of, no_grad, on_vulkan, rows_of, vulkan_run
    from row_cases import CASES, error_of, gradient_error, gradients, ours, right_gradients
    from turns import GraphRun, warm_up

    with contextlib.ExitStack() as opened, torch.cuda.stream(torch.cuda.Stream()):
        run: Any = None
        for line in sys.stdin:
            asked = json.loads(line)
            if asked.get("time"):
                print(json.dumps({"seconds": run()}), flush=True)
                continue
            opened.close()
            run = None
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            name, length, backward = asked["op"], asked["length"], asked["backward"]
            case, tensors = CASES[name], rows_of(name, length, asked["mib"])
            moved = tensors[0].numel() * 2 * (case.backward if backward else case.forward)
            if backward and asked["mib"] <= 64:  # in float64, over all rows
                error = gradient_error(name, case, tensors, right_gradients(case, tensors))
            else:
                error = error_of(name, case, tensors)
            call, calls = ours(name, case.options), calls_of(moved)
            if asked["vulkan"]:
                run = opened.enter_context(vulkan_run(*on_vulkan(name, tensors)[backward], calls))
            elif backward:
                run = GraphRun(gradients(call, tensors, case), calls)
            else:
                run = GraphRun(partial(no_grad, call, tensors), calls)
            warm_up(0.1)
            print(json.dumps({"error": error, "moved": moved, "rows": tensors[0].numel() // length}), flush=True)


class Tree:
    """A process of one source tree."""

    def __init__(self, root: Path) -> None:
        path = os.pathsep.join([str(root / "src"), str(root / "benchmarks")])
        # The script is this tree's own; its cases and peers are those of the tree that is timed.
        command = [sys.executable, str(HERE / "row_lengths.py"), "--serve"]
        environment = {**os.environ, "PYTHONPATH": path, "AULE_BENCHMARK_TREE": str(root)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root / "benchmarks"
        )

    def ask(self, **case: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a tree's process ended at {case}")
        found: dict[str, Any] = json.loads(line)
        return found


# -- both --------------------------------------------------------------------------------------------------------------


def compare(trees: dict[str, Tree], rounds: int, **case: Any) -> dict[str, Any]:
    """One case, in turns."""
    made = {name: tree.ask(**case) for name, tree in trees.items()}
    for name, found in made.items():
        if not found["error"] < 0.02:
            raise SystemExit(f"{case}: error {found['error']} in the tree {name}")
    times: dict[str, list[float]] = {name: [] for name in trees}
    for number in range(rounds + 1):
        for name, tree in trees.items():
            seconds = tree.ask(time=True)["seconds"]
            if number:
                times[name].append(seconds)
    median = {name: statistics.median(found) for name, found in times.items()}
    moved = made["after"]["moved"]
    return {
        **case,
        "rows": made["after"]["rows"],
        **{f"{name}_us": round(1e6 * seconds, 2) for name, seconds in median.items()},
        **{f"{name}_tbs": round(moved / seconds / 1e12, 3) for name, seconds in median.items()},
        "ratio": round(median["after"] / median["before"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="root of the other source tree")
    parser.add_argument("--ops", default=OPS)
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--mib", default="64")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--backward", action="store_true", help="gradients instead")
    parser.add_argument("--vulkan", action="store_true", help="through Vulkan instead of CUDA")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        sys.path[:0] = [str(Path(os.environ["AULE_BENCHMARK_TREE"]) / "benchmarks")]
        serve()
        return
    if asked.before is None:
        parser.error("--before is needed: the root of the tree to compare with")
    trees = {"before": Tree(asked.before.resolve()), "after": Tree(HERE.parent)}
    found = []
    for op in asked.ops.split(","):
        for mib in map(int, asked.mib.split(",")):
            for length in map(int, asked.lengths.split(",")):
                row = compare(
                    trees, asked.rounds, op=op, length=length, mib=mib, backward=asked.backward, vulkan=asked.vulkan
                )
                found.append(row)
                print(
                    f"{op:20} {mib:5} MiB {length:6} columns  {row['before_tbs']:.2f} -> {row['after_tbs']:.2f} TB/s  "
                    f"{row['before_us']:.2f} -> {row['after_us']:.2f} us  x{row['ratio']:.3f}",
                    flush=True,
                )
                if asked.csv is not None:  # what is there counts if the run is cut short
                    lines = [",".join(row), *(",".join(str(x) for x in r.values()) for r in found)]
                    asked.csv.write_text("\n".join(lines) + "\n")
    worst = sorted(found, key=lambda r: -r["ratio"])[:8]
    print(
        "slowest against before:",
        *(f"{r['op']} {r['mib']} MiB {r['length']}: x{r['ratio']}" for r in worst),
        sep="\n  ",
    )


if __name__ == "__main__":
    main()
