"""Compares row operations with PyTorch's, in one run; results are checked against float64 before timing.

    python benchmarks/fused.py [--csv FILE] [--ops rms_norm,swiglu] [--lengths 1024,4096] [--mib 64,1024] [--no-compile]
    python benchmarks/fused.py --sweep rms_norm,layer_norm --ways "prefetch=1,2 parts=1,2,4"   # fields of SumTuning
    python benchmarks/fused.py --cpu [--one-thread] [--csv FILE]  # PyTorch eager on the CPU, fp32 and bf16

On a CUDA machine, bf16: a plain copy of as many bytes, PyTorch eager, torch.compile, aule on the same tensors, and aule
through Vulkan where it is found. Figures are terabytes per second of the bytes that must be read and written. A CUDA
graph holds enough calls for about 400 us, so that host time and the graph's launch do not count; through Vulkan as many
calls are in one command buffer, each waiting for the one before. Candidates alternate for fifteen rounds; the median
counts. Each op and length has its own process: all compile at the same time, then use the GPU one after the other.

On the CPU calls alternate, and freed memory is reused, so that page faults do not count. Ratios are medians over
rounds; with ``--one-thread`` all run on one thread and its CPU time is measured, the least of all rounds: for machines
with other load.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from result_file import written
from row_cases import (
    CASES,
    error_of,
    forget,
    gradient_error,
    gradient_tensors,
    gradients,
    ours,
    padded,
    right_gradients,
    seeded,
)
from turns import GraphRun, Run, in_turns, launches_run, warm_up

import aule
from aule.backends import registry
from aule.engine.memory import device_scratch
from aule.engine.row_ops import prepare_row_op, result_views
from aule.errors import AuleError
from aule.frontends.torch.checks import NAMES
from aule.frontends.torch.passes import compute
from aule.ops.catalogue import CATALOGUE
from aule.ops.rows import layout as row_shapes
from aule.ops.shared.spec import OpSpec
from aule.view import TensorView, contiguous_strides

ROWS: list[dict[str, Any]] = []
READY = "ready"
"""What a worker says when it has compiled."""
WAYS = "prefetch=0 parts=1 most=16 widest=1024 resident=1024|prefetch=1,2,3 parts=2,4 resident=512,768"
"""What a sweep tries, backward: changes of what is chosen otherwise."""
_GRAPH_BYTES = 1.6e9
"""Moved by all calls of a graph: some 400 us."""
_WARM = 0.25
"""Seconds of warm-up before calls take turns: the card has rested while results were checked and graphs made."""


# -- CUDA --------------------------------------------------------------------------------------------------------------


def calls_of(moved: float) -> int:
    """Calls of a graph: what comes between graphs is not to count."""
    return math.ceil(_GRAPH_BYTES / moved)


def vulkan_call(spec: OpSpec, tensors: list[torch.Tensor | None], options: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """What a call takes on a Vulkan device: views of its operands and results, and the launches, compiled."""
    device = registry.find("vulkan")
    assert device is not None
    views = {
        operand.name: TensorView(NAMES[x.dtype], tuple(x.shape), x.stride(), "vulkan", None)
        for operand, x in zip(spec.operands, tensors, strict=True)
        if x is not None
    }
    call = spec.call(views, dict(zip((o.name for o in spec.options), options, strict=True)))
    results = result_views(call)
    return views, results, prepare_row_op(spec, call, dict(call.views) | results, device)


@functools.cache
def some_numbers(count: int) -> Any:
    """So many numbers of bf16, over and over the same."""
    few = torch.randn(min(count, 1 << 20)).bfloat16().view(torch.uint16).numpy()
    return np.resize(few, count)


@contextlib.contextmanager
def vulkan_run(spec: OpSpec, tensors: list[torch.Tensor | None], options: tuple[Any, ...], calls: int) -> Iterator[Run]:
    """The same on a Vulkan device, as long as its memory is there. What rows hold does not matter for the time."""
    device = registry.find("vulkan")
    assert device is not None
    _, results, ready = vulkan_call(spec, tensors, options)
    memory: dict[str, Any] = {}
    try:
        for operand, x in zip(spec.operands, tensors, strict=True):
            if x is None:
                continue
            memory[operand.name] = device.alloc(x.numel() * x.element_size())
            if x.dtype == torch.bfloat16:
                host = some_numbers(1 << (x.numel() - 1).bit_length())[: x.numel()]
            else:
                host = x.as_strided((x.numel(),), (1,)).cpu().numpy()  # as it lies in memory
            device.upload(memory[operand.name], host)
        for name, view in results.items():
            count = contiguous_strides((1, *view.shape))[0]
            memory[name] = device.alloc(count * view.itemsize)
        memory |= {name: device.alloc(4 * count) for name, count in ready.plan.workspace.items()}
        shared = {name: device_scratch(device, words) for name, words in ready.plan.scratch.items()}  # the device's own
        launches = ready.launches(memory | shared)
        yield launches_run(device, launches, calls)
    finally:
        for allocation in memory.values():
            device.free(allocation)


def copy_run(moved: int) -> Run:
    """What reads and writes so many bytes in all and does nothing else: a kernel. The driver's own copy has 2.7 TB/s in
    graphs where arrays have a power of two of bytes, and the same 4.2 elsewhere."""
    source = torch.empty(moved // 8, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return GraphRun(lambda: torch.bitwise_not(source, out=target), calls_of(moved))


def rows_of(name: str, length: int, mib: int) -> list[torch.Tensor]:
    """Tensors of which a forward call reads and writes so much."""
    case = CASES[name]
    return case.make(mib * 2**20 // (2 * length * case.arrays), length, torch.bfloat16, "cuda")


def on_vulkan(name: str, tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    """What either direction is on Vulkan: spec, operands and options."""
    case, spec = CASES[name], CATALOGUE[name]
    given = seeded(name, padded(name, tensors))
    assert spec.gradient is not None
    on_device = [x if x is None else x.to(tensors[0].device) for x in given]
    made = compute(spec, on_device, case.options, None, spec.results)
    backward = gradient_tensors(name, given, made)
    return [(spec, given, case.options), (spec.gradient, backward, case.options)]


def compile_all(name: str, length: int, sizes: list[int], compiled: Callable[..., Any] | None) -> None:
    """Call everyone once, in both directions: what a kernel takes to be compiled is not to be waited for later."""
    case = CASES[name]
    call = ours(name, case.options)
    for mib in sizes:
        tensors = rows_of(name, length, mib)
        for function in (call, *([compiled] if compiled is not None else [])):
            no_grad(function, tensors)
            gradients(function, tensors, case)()
        with contextlib.suppress(AuleError):
            for arguments in on_vulkan(name, tensors):
                vulkan_call(*arguments)
        some_numbers(1 << (tensors[0].numel() - 1).bit_length())
        del tensors
        torch.cuda.empty_cache()


def compare(name: str, length: int, mib: int, compiled: Callable[..., Any] | None, rounds: int) -> dict[str, Any]:
    case = CASES[name]
    tensors = rows_of(name, length, mib)
    size = tensors[0].numel() * tensors[0].element_size()
    call = ours(name, case.options)
    error = max(error_of(name, case, tensors), gradient_error(name, case, tensors, right_gradients(case, tensors)))
    assert error < 2e-2, f"{name}: error {error}"
    row: dict[str, Any] = {"op": name, "length": length, "rows": tensors[0].numel() // length, "mib": mib}
    moved = {"forward": size * case.forward, "backward": size * case.backward}
    runs = {"copy": copy_run(int(moved["forward"]))}
    peers = {"aule": call, "eager": case.peer}
    if compiled is not None:
        peers["compile"] = compiled
    for peer, function in peers.items():
        ways = {"forward": partial(no_grad, function, tensors), "backward": gradients(function, tensors, case)}
        for direction, way in ways.items():
            calls = calls_of(moved[direction])
            runs[f"{peer}_{direction}"] = GraphRun(way, -(-calls // 4) if peer == "eager" else calls)
    with contextlib.ExitStack() as stack:
        try:
            for (direction, count), arguments in zip(moved.items(), on_vulkan(name, tensors), strict=True):
                run = stack.enter_context(vulkan_run(*arguments, calls_of(count)))
                runs[f"vulkan_{direction}"] = run
        except AuleError as failed:
            print(f"vulkan: {failed}", flush=True)
        warm_up(_WARM)
        for key, seconds in in_turns(runs, rounds).items():
            row[key] = moved["backward" if key.endswith("_backward") else "forward"] / seconds / 1e12
    return row | {"error": error}


def worker(name: str, length: int, sizes: list[int], compiles: bool, rounds: int) -> None:
    """Compile, wait for a line, and print a row for each size."""
    with torch.cuda.stream(torch.cuda.Stream()):
        compiled = torch.compile(CASES[name].peer, dynamic=False) if compiles else None
        compile_all(name, length, sizes, compiled)
        print(READY, flush=True)
        sys.stdin.readline()
        for mib in sizes:
            print(json.dumps(compare(name, length, mib, compiled, rounds)), flush=True)
            torch.cuda.empty_cache()


def compare_all(names: list[str], lengths: list[int], sizes: list[int], compiles: bool, rounds: int) -> None:
    """Workers for every op and length; rows come as they are done."""
    environment = dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1")
    running = []
    for name, length in itertools.product(names, lengths):
        command = [sys.executable, "-W", "ignore", __file__, "--ops", name, "--lengths", str(length), "--worker"]
        command += ["--mib", ",".join(map(str, sizes)), "--rounds", str(rounds)]
        command += [] if compiles else ["--no-compile"]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))
    try:
        for process in running:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == READY:
                    break
                print(line, end="", flush=True)
        for process in running:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it has said why
                process.stdin.write("\n")
                process.stdin.flush()
            for line in process.stdout:
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                    continue
                row = json.loads(line)
                ROWS.append(row)
                shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                print("  ".join(shown), flush=True)
    finally:
        for process in running:
            process.kill()


def grid_of_ways(text: str) -> list[dict[str, Any]]:
    """From ``prefetch=1,2 parts=4`` to all choices of values for fields of `SumTuning`, or forward of `RowTuning`;
    ``|`` parts several such."""
    ways = []
    for grid in text.split("|"):
        fields = [field.split("=") for field in grid.split()]
        values = [[int(x) if x.isdigit() else x for x in numbers.split(",")] for _, numbers in fields]
        ways += [dict(zip((name for name, _ in fields), way, strict=True)) for way in itertools.product(*values)]
    return ways


@contextlib.contextmanager
def tuned(way: dict[str, Any], direction: str) -> Iterator[None]:
    """Rows laid over threads in another way than usual."""
    over, choose = row_shapes._over_cluster, row_shapes.choose_sums
    if direction == "backward":
        row_shapes.choose_sums = lambda *args: replace(choose(*args), **way)
    else:
        row_shapes._over_cluster = lambda *args: over(*args[:-1], replace(args[-1], **way))
    forget()
    try:
        yield
    finally:
        row_shapes._over_cluster, row_shapes.choose_sums = over, choose
        forget()


def sweep(name: str, lengths: list[int], mib: int, ways: list[dict[str, Any]], direction: str) -> None:
    """Ways to lay rows over threads: terabytes a second, best first, of results that are right."""
    case = CASES[name]
    for length in lengths:
        n = mib * 2**20 // (2 * length * case.arrays)
        tensors = case.make(n, length, torch.bfloat16, "cuda")
        size = tensors[0].numel() * tensors[0].element_size()
        right = right_gradients(case, tensors) if direction == "backward" else []
        moved = size * (case.backward if direction == "backward" else case.forward)
        runs: dict[str, Run] = {"copy": copy_run(int(moved))}
        for way in [{}, *ways]:
            call = ours(name, case.options)
            try:
                with tuned(way, direction):
                    if direction == "backward":
                        error = gradient_error(name, case, tensors, right)
                        timed = gradients(call, tensors, case)
                    else:
                        error, timed = error_of(name, case, tensors), partial(no_grad, call, tensors)
                    if error < 2e-2:
                        runs[str(way or "as it is")] = GraphRun(timed, calls_of(moved))
                    else:
                        print(f"{name} {length} {way}: error {error}")
            except (AuleError, RuntimeError) as failed:
                print(f"{way}: {failed}")
        warm_up(_WARM)
        for text, seconds in sorted(in_turns(runs).items(), key=lambda entry: entry[1]):
            print(f"{name} {length} {mib} MiB {direction} {moved / seconds / 1e12:.3f} TB/s {text}", flush=True)


# -- CPU ---------------------------------------------------------------------------------------------------------------


def keep_memory() -> None:
    """Let malloc keep what is freed (glibc). First touches of fresh memory take as long as these ops, and whether they
    happen depends on what else is on the heap: residual_layer_norm took 1.8 or 12 ms."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its largest value
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def compare_cpu(name: str, n: int, length: int, dtype: torch.dtype, rounds: int, one_thread: bool) -> None:
    case = CASES[name]
    tensors = case.make(n, length, dtype, "cpu")
    call = ours(name, case.options)
    error = error_of(name, case, tensors)
    runs: dict[str, Callable[[], Any]] = {}
    for peer, function in (("aule", call), ("eager", case.peer)):
        runs[f"{peer}_forward"] = partial(no_grad, function, tensors)
        runs[f"{peer}_backward"] = gradients(function, tensors, case)
    times: dict[str, list[float]] = {key: [] for key in runs}
    for run in runs.values():
        run()
        run()
    clock = time.thread_time if one_thread else time.perf_counter
    for _ in range(rounds):
        for key, run in runs.items():
            start = clock()
            run()
            times[key].append(clock() - start)
    row: dict[str, Any] = {"op": name, "rows": n, "length": length, "dtype": str(dtype).removeprefix("torch.")}
    for direction in ("forward", "backward"):
        theirs, mine = times[f"eager_{direction}"], times[f"aule_{direction}"]
        if one_thread:
            row[f"{direction}_ratio"], row[f"{direction}_ms"] = min(theirs) / min(mine), 1e3 * min(mine)
        else:
            row[f"{direction}_ratio"] = statistics.median(x / y for x, y in zip(theirs, mine, strict=True))
            row[f"{direction}_ms"] = 1e3 * statistics.median(mine)
    row["error"] = error
    ROWS.append(row)
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def no_grad(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    with torch.no_grad():
        return function(*tensors)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--ops", default=",".join(CASES))
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--mib", default="64,1024", help="bytes that a forward call moves, in MiB")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--sweep", help="ops whose layouts are tried")
    parser.add_argument("--ways", default=WAYS, help="fields of SumTuning, or forward of RowTuning, and their values")
    parser.add_argument("--direction", choices=("forward", "backward"), default="backward")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = [int(x) for x in args.lengths.split(",")]
    if args.worker:
        worker(args.ops, lengths[0], [int(x) for x in args.mib.split(",")], not args.no_compile, args.rounds)
        return
    if args.cpu:
        device = platform.processor() or platform.machine()
        keep_memory()
        if args.one_thread:
            os.environ["AULE_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        with written(args.csv, ROWS, device):
            for name, dtype, length in itertools.product(args.ops.split(","), (torch.float32, torch.bfloat16), lengths):
                compare_cpu(name, max(2**22 // length, 1), length, dtype, args.rounds, args.one_thread)
    else:
        device = torch.cuda.get_device_name()
        print(f"{device}, torch {torch.__version__}, aule {aule.__version__}, Python {platform.python_version()}")
        sizes = [int(x) for x in args.mib.split(",")]
        if args.sweep:
            with torch.cuda.stream(torch.cuda.Stream()):
                for name, mib in itertools.product(args.sweep.split(","), sizes):
                    sweep(name, lengths, mib, grid_of_ways(args.ways), args.direction)
        else:
            with written(args.csv, ROWS, device):
                compare_all(args.ops.split(","), lengths, sizes, not args.no_compile, args.rounds)


if __name__ == "__main__":
    main()
