"""The ops beside attention, ours and PyTorch's in one run, each result checked against float64 before it is timed.

    python benchmarks/fused.py [--csv FILE] [--ops rms_norm,swiglu] [--lengths 1024,4096] [--mib 64,1024] [--no-compile]
    python benchmarks/fused.py --sweep rms_norm,layer_norm --ways "ahead=1,2 parts=1,2,4"   # fields of SumTuning
    python benchmarks/fused.py --cpu [--one-thread] [--csv FILE]  # PyTorch eager on the CPU, fp32 and bf16

On a CUDA machine, bf16: a plain copy of as many bytes, PyTorch eager, torch.compile, aule on the same tensors, and aule
through Vulkan where it is found. Figures are terabytes a second of what has to be read and written at least. Calls are
timed as CUDA graphs, so that the host's time does not count for anyone.

On the CPU calls alternate, and memory that was freed is kept, so that fresh pages count for nobody. Ratios are medians
over rounds; with ``--one-thread`` all run on one thread and are measured by its own time, the least of all rounds: for
machines that have other work to do.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from result_file import write_csv

import aule
from aule.backends import registry
from aule.engine.fused import prepare, result_views
from aule.errors import AuleError
from aule.frontends import torch_fused
from aule.ops import row_shapes
from aule.ops.catalogue import CATALOGUE
from aule.ops.spec import OpSpec
from aule.view import TensorView, contiguous_strides

ROWS: list[dict[str, Any]] = []
HEAD = 128
"""Columns of a head, for ops that rotate."""
WAYS = "ahead=0 parts=1 most=16 widest=1024 resident=1024|ahead=1,2,3 parts=2,4 resident=512,768"
"""What a sweep tries, backward: changes of what is chosen otherwise."""


@dataclass(frozen=True)
class Case:
    """An op: its tensors, our call, PyTorch's, and how many arrays of the first one's size either direction moves."""

    make: Callable[[int, int, Any, Any], list[torch.Tensor]]
    peer: Callable[..., Any]
    forward: float
    backward: float
    options: tuple[Any, ...] = ()
    differentiable: int = 9
    """Tensors from the start that want gradients."""
    axis: int = 0
    """Of the rows of the first tensor."""
    checked: tuple[Any, ...] | None = None
    """Options with which the result is compared, where those that are timed leave it to chance."""
    checks: Callable[..., Any] | None = None
    """PyTorch's call for the same."""

    @property
    def arrays(self) -> int:
        return int(self.forward)


def rows(count: int, vectors: int) -> Callable[[int, int, Any, Any], list[torch.Tensor]]:
    def make(n: int, length: int, dtype: Any, device: Any) -> list[torch.Tensor]:
        matrices = [torch.randn(n, length, dtype=dtype, device=device) for _ in range(count)]
        return matrices + [torch.randn(length, dtype=dtype, device=device) for _ in range(vectors)]

    return make


def heads(weight: bool) -> Callable[[int, int, Any, Any], list[torch.Tensor]]:
    """Heads of positions as projections leave them, ``[1, positions, heads, HEAD]``, and tables as transformers makes
    them."""

    def make(n: int, length: int, dtype: Any, device: Any) -> list[torch.Tensor]:
        x = torch.randn(1, n, max(length // HEAD, 1), HEAD, dtype=dtype, device=device).transpose(1, 2)
        angles = torch.randn(n, HEAD // 2, device=device).repeat(1, 2)
        more = [torch.randn(HEAD, dtype=dtype, device=device)] if weight else []
        return [x, *more, angles.cos().to(dtype), angles.sin().to(dtype)]

    return make


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers writes it."""
    half = torch.cat((-x[..., HEAD // 2 :], x[..., : HEAD // 2]), dim=-1)
    return x * cos + half * sin


CASES: dict[str, Case] = {
    "rms_norm": Case(rows(1, 1), lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), 2, 3, (1e-6,)),
    "layer_norm": Case(rows(1, 2), lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5), 2, 3, (1e-5,)),
    "residual_rms_norm": Case(
        rows(2, 1), lambda x, r, w: (F.rms_norm(x + r, x.shape[-1:], w, 1e-6), x + r), 4, 4, (1e-6,)
    ),
    "residual_layer_norm": Case(
        rows(2, 2), lambda x, r, w, b: (F.layer_norm(x + r, x.shape[-1:], w, b, 1e-5), x + r), 4, 4, (1e-5,)
    ),
    "swiglu": Case(rows(2, 0), lambda g, u: F.silu(g) * u, 3, 5),
    "geglu": Case(rows(2, 0), lambda g, u: F.gelu(g) * u, 3, 5, ("none",)),
    "rope": Case(heads(False), rotated, 2, 2, (False, HEAD, False), 1, 2),
    "rms_norm_rope": Case(
        heads(True),
        lambda x, w, cos, sin: rotated(F.rms_norm(x, (HEAD,), w, 1e-6), cos, sin),
        2,
        3,
        (False, HEAD, 1e-6),
        2,
        2,
    ),
    "softmax_dropout": Case(
        rows(1, 0),
        lambda x: F.dropout(torch.softmax(x, -1), 0.1),
        2,
        3,
        (0.1, False, 1.0),
        checked=(0.0, False, 1.0),
        checks=lambda x: torch.softmax(x, -1),
    ),
}


def ours(name: str, options: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda *tensors: torch_fused.fused(name, tuple(padded(name, list(tensors))), options, None)


def flat(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def error_of(name: str, case: Case, tensors: list[torch.Tensor]) -> float:
    """Largest error against float64, relative to the largest value, over the last rows."""

    def last(x: torch.Tensor) -> torch.Tensor:
        axis = case.axis if x.dim() == tensors[0].dim() else 0
        return x.narrow(axis, x.shape[axis] - 4, 4) if x.dim() > 1 else x

    found = flat(ours(name, case.options if case.checked is None else case.checked)(*tensors))
    want = flat((case.checks or case.peer)(*(last(x).double() for x in tensors)))
    pairs = zip(found, want, strict=True)
    return max(float((last(got).double() - right).abs().max() / right.abs().max()) for got, right in pairs)


def gradients(call: Callable[..., Any], tensors: list[torch.Tensor], case: Case) -> Callable[[], tuple[Any, ...]]:
    """A call whose gradients can be asked for again and again; outputs weigh the same for everyone who is called."""
    wanted = [
        x.detach().requires_grad_(i < case.differentiable and x.is_floating_point()) for i, x in enumerate(tensors)
    ]
    outs = flat(call(*wanted))
    torch.manual_seed(1)
    weights = [torch.randn(out.shape, device=out.device).bfloat16() for out in outs]
    grads = [torch.empty_like(out).copy_(weight) for out, weight in zip(outs, weights, strict=True)]
    leaves = [x for x in wanted if x.requires_grad]
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def right_gradients(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """PyTorch's in float64, over all rows, since those of weights are sums of them."""
    double = [x.double() if x.is_floating_point() else x for x in tensors]
    return [x.float() for x in gradients(case.checks or case.peer, double, case)()]


def gradient_error(name: str, case: Case, tensors: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Largest error, relative to the largest number of its kind."""
    found = gradients(ours(name, case.options if case.checked is None else case.checked), tensors, case)()
    return max(
        float((got.float() - want).abs().max() / want.abs().max()) for got, want in zip(found, right, strict=True)
    )


# -- CUDA --------------------------------------------------------------------------------------------------------------


def warm_up(seconds: float = 0.6) -> None:
    x = torch.randn(4096, 4096, device="cuda")
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            x = x @ x
            x = x / x.norm()
        torch.cuda.synchronize()


def graph_seconds(call: Callable[[], Any], repeats: int = 15) -> float:
    """Median seconds of what a call launches, replayed as a CUDA graph on the current stream."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kept = call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    del kept
    return statistics.median(times)


def directions(call: Callable[..., Any], tensors: list[torch.Tensor], case: Case) -> tuple[float, float]:
    """Seconds of a call, and of its gradient."""
    forward = graph_seconds(partial(no_grad, call, tensors))
    return forward, graph_seconds(gradients(call, tensors, case))


def vulkan_seconds(spec: OpSpec, tensors: list[torch.Tensor | None], options: tuple[Any, ...]) -> float:
    """The same on a Vulkan device: seconds by its own clock. What memory holds does not matter for the time."""
    device = registry.find("vulkan")
    assert device is not None
    views = {}
    memory: dict[str, Any] = {}
    try:
        for operand, x in zip(spec.operands, tensors, strict=True):
            if x is None:
                continue
            memory[operand.name] = device.alloc(x.numel() * x.element_size())
            dtype = torch_fused.NAMES[x.dtype]
            views[operand.name] = TensorView(dtype, tuple(x.shape), x.stride(), "vulkan", memory[operand.name])
            host = x.as_strided((x.numel(),), (1,)).cpu()  # as it lies in memory
            device.upload(memory[operand.name], (host.view(torch.uint16) if dtype == "bf16" else host).numpy())
        call = spec.call(views, dict(zip((o.name for o in spec.options), options, strict=True)))
        results = result_views(call)
        for name, view in results.items():
            count = contiguous_strides((1, *view.shape))[0]
            memory[name] = device.alloc(count * view.itemsize)
        ready = prepare(spec, call, dict(call.views) | results, device)
        memory |= {name: device.alloc(4 * count) for name, count in ready.workspace.items()}
        times = []
        for _ in range(18):
            total = 0.0
            for step, loaded in ready.steps:
                arguments = [
                    step.scalars.get(p.name, memory.get(step.memory_of(p.name))) for p in loaded.artifact.params
                ]
                total += device.time_launch(loaded, step.grid, arguments)
            times.append(total)
        return statistics.median(times[3:])
    finally:
        for allocation in memory.values():
            device.free(allocation)


def gradient_tensors(name: str, tensors: list[Any], outs: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """Operands of an op's gradient; any values will do."""
    spec = CATALOGUE[name]
    assert spec.gradient is not None
    known: dict[str, Any] = dict(zip((operand.name for operand in spec.operands), tensors, strict=True))
    known |= dict(zip(spec.outputs, outs, strict=True))
    known |= {f"d{n}": x for n, x in zip(spec.outputs, outs, strict=True)}
    return [known.get(operand.name) for operand in spec.gradient.operands]


def copy_speed(moved: int) -> float:
    """Terabytes a second of a plain copy that reads and writes so many bytes in all."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return moved / graph_seconds(lambda: target.copy_(source)) / 1e12


def compare(name: str, length: int, mib: int, compiles: bool) -> None:
    case = CASES[name]
    n = mib * 2**20 // (2 * length * case.arrays)
    tensors = case.make(n, length, torch.bfloat16, "cuda")
    size = tensors[0].numel() * tensors[0].element_size()
    call = ours(name, case.options)
    error = max(error_of(name, case, tensors), gradient_error(name, case, tensors, right_gradients(case, tensors)))
    assert error < 2e-2, f"{name}: error {error}"
    row: dict[str, Any] = {"op": name, "length": length, "rows": tensors[0].numel() // length, "mib": mib}
    row["copy"] = copy_speed(int(size * case.forward))
    peers = {"aule": call, "eager": case.peer}
    if compiles:
        torch._dynamo.reset()
        peers["compile"] = torch.compile(case.peer, dynamic=False)
    for peer, function in peers.items():
        forward, backward = directions(function, tensors, case)
        row[f"{peer}_forward"], row[f"{peer}_backward"] = (
            size * case.forward / forward / 1e12,
            size * case.backward / backward / 1e12,
        )
    try:
        given, gradient = seeded(name, padded(name, tensors)), CATALOGUE[name].gradient
        assert gradient is not None
        outs = flat(call(*tensors))
        seconds = vulkan_seconds(CATALOGUE[name], given, case.options)
        row["vulkan_forward"] = size * case.forward / seconds / 1e12
        seconds = vulkan_seconds(gradient, gradient_tensors(name, given, outs), case.options)
        row["vulkan_backward"] = size * case.backward / seconds / 1e12
    except AuleError as failed:
        print(f"vulkan: {failed}")
    row["error"] = error
    ROWS.append(row)
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def padded(name: str, tensors: list[torch.Tensor]) -> list[Any]:
    """Tensors with None for optional operands that were left out."""
    return [*tensors, *(None for _ in range(len(CATALOGUE[name].operands) - len(tensors)))]


def seeded(name: str, tensors: list[Any]) -> list[Any]:
    """The same with the words of a seed where there is to be one."""
    number = CATALOGUE[name].seed
    if number is not None:
        tensors[number] = torch.tensor([1, 2], dtype=torch.int32)
    return tensors


def grid_of_ways(text: str) -> list[dict[str, Any]]:
    """From ``ahead=1,2 parts=4`` to all choices of values for fields of `SumTuning`, or forward of `RowTuning`; ``|``
    parts several such."""
    ways = []
    for grid in text.split("|"):
        fields = [field.split("=") for field in grid.split()]
        values = [[int(x) if x.isdigit() else x for x in numbers.split(",")] for _, numbers in fields]
        ways += [dict(zip((name for name, _ in fields), way, strict=True)) for way in itertools.product(*values)]
    return ways


@contextlib.contextmanager
def tuned(way: dict[str, Any], direction: str) -> Iterator[None]:
    """Rows laid over threads in another way than usual."""
    tuning, choose = row_shapes.TUNING, row_shapes.choose_sums
    if direction == "backward":
        row_shapes.choose_sums = lambda *args: replace(choose(*args), **way)
    else:
        row_shapes.TUNING = replace(tuning, **way)
    torch_fused._cuda_launches.clear()
    try:
        yield
    finally:
        row_shapes.TUNING, row_shapes.choose_sums = tuning, choose
        torch_fused._cuda_launches.clear()


def sweep(name: str, lengths: list[int], mib: int, ways: list[dict[str, Any]], direction: str) -> None:
    """Ways to lay rows over threads: terabytes a second, best first, of results that are right."""
    case = CASES[name]
    for length in lengths:
        n = mib * 2**20 // (2 * length * case.arrays)
        tensors = case.make(n, length, torch.bfloat16, "cuda")
        size = tensors[0].numel() * tensors[0].element_size()
        right = right_gradients(case, tensors) if direction == "backward" else []
        found: list[tuple[float, dict[str, Any]]] = []
        for way in [{}, *ways]:
            call = ours(name, case.options)
            try:
                with tuned(way, direction):
                    if direction == "backward":
                        error = gradient_error(name, case, tensors, right)
                        speed = size * case.backward / graph_seconds(gradients(call, tensors, case)) / 1e12
                    else:
                        error = error_of(name, case, tensors)
                        forward = graph_seconds(partial(no_grad, call, tensors))
                        speed = size * case.forward / forward / 1e12
            except (AuleError, RuntimeError) as failed:
                print(f"{way}: {failed}")
                continue
            if error < 2e-2:
                found.append((speed, way))
            else:
                print(f"{name} {length} {way}: error {error}")
        for speed, way in sorted(found, key=lambda entry: -entry[0]):
            print(f"{name} {length} {direction} {speed:.3f} TB/s {way or 'as it is'}", flush=True)


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
    args = parser.parse_args()
    lengths = [int(x) for x in args.lengths.split(",")]
    if args.cpu:
        device = platform.processor() or platform.machine()
        keep_memory()
        if args.one_thread:
            os.environ["AULE_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        for name in args.ops.split(","):
            for dtype in (torch.float32, torch.bfloat16):
                for length in lengths:
                    compare_cpu(name, max(2**22 // length, 1), length, dtype, args.rounds, args.one_thread)
    else:
        device = torch.cuda.get_device_name()
        print(f"{device}, torch {torch.__version__}, aule {aule.__version__}, Python {platform.python_version()}")
        warm_up()
        with torch.cuda.stream(torch.cuda.Stream()):
            for name in (args.sweep or args.ops).split(","):
                for mib in [int(x) for x in args.mib.split(",")]:
                    if args.sweep:
                        sweep(name, lengths, mib, grid_of_ways(args.ways), args.direction)
                        continue
                    for length in lengths:
                        compare(name, length, mib, not args.no_compile)
    if args.csv and ROWS:
        write_csv(args.csv, ROWS, device)


if __name__ == "__main__":
    main()
