"""Compares layer_norm_linear and cross_entropy with PyTorch's, in one run; results are checked against float64 first.

    python benchmarks/linear.py [--csv FILE] [--ops layer_norm_linear,cross_entropy] [--no-compile]
    python benchmarks/linear.py --sweep          # tiles of the product on mma.sync, ours alone
    python benchmarks/linear.py --launches       # each launch of both directions, for tiles of warpgroups
    python benchmarks/linear.py --cpu            # PyTorch eager on the CPU, fp32 and bf16

On a CUDA machine, bf16, beside PyTorch eager and torch.compile (LayerNorm, then cuBLAS), and through Vulkan where it is
found. layer_norm_linear is given in TFLOPS of its products, forward 2 m n k and backward twice that; cross_entropy in
terabytes per second of the logits that must be read and written, beside a copy of as many bytes. Memory is the MiB that
a forward call adds to the inputs, with the tensors saved for its gradient. Calls are timed as CUDA graphs.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from fused import copy_run, vulkan_run
from result_file import written
from row_cases import forget, gradient_tensors
from turns import GraphRun, in_turns, warm_up

import aule
from aule import tuning
from aule.backends import registry
from aule.engine.run import prepare
from aule.errors import AuleError
from aule.frontends.torch.devices.scratch import StreamMemory
from aule.frontends.torch.passes import compute
from aule.frontends.torch.row_ops import RowOp
from aule.frontends.torch.views import view_on_device
from aule.ops.catalogue import CATALOGUE
from aule.ops.linear import blocks
from aule.ops.linear.config import FragmentBlocks, WarpgroupBlocks
from aule.ops.shared.plan import Plan
from aule.ops.shared.spec import OpSpec

ROWS: list[dict[str, Any]] = []
PRODUCTS = [(4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 4096), (4096, 12288, 4096), (2048, 2048, 8192)]
"""Rows, features, columns of a row."""
LOGITS = [(8192, 32000), (4096, 128256), (2048, 262144)]
"""Rows, vocabulary."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def eager_linear(x: Any, weight_norm: Any, bias_norm: Any, weight: Any, bias: Any) -> Any:
    return F.linear(F.layer_norm(x, x.shape[-1:], weight_norm, bias_norm), weight, bias)


def linear_operands(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    shapes = ((m, k), (k,), (k,), (n, k), (n,))
    made = [torch.randn(shape, device=device) for shape in shapes]
    made[3] *= k**-0.5
    return [x.to(dtype) for x in made]


def logits_and_target(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    logits = (torch.randn(rows, vocabulary, device=device) * 2).to(dtype)
    return [logits, torch.randint(0, vocabulary, (rows,), device=device)]


def check(name: str, call: Callable[..., Any], peer: Callable[..., Any], tensors: list[torch.Tensor]) -> float:
    """The largest error over the largest number, of the result and of its gradients; of 256 rows of logits."""
    if name == "cross_entropy":
        tensors = [x[:256] for x in tensors]
    found, right = (
        result_and_gradients(f, [x.to(dtype) if x.is_floating_point() else x for x in tensors])
        for f, dtype in ((call, tensors[0].dtype), (peer, torch.float64))
    )
    errors = [float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(found, right, strict=True)]
    assert max(errors) < TOLERANCE[tensors[0].dtype], f"{name}: errors {errors}"
    return max(errors)


def result_and_gradients(call: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    wanted = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    out = call(*wanted)
    torch.manual_seed(5)
    grad = torch.randn(out.shape, device=out.device).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x for x in wanted if x.requires_grad], grad)]


def graph_seconds(call: Callable[[], Any], rounds: int = 15) -> float:
    """Median seconds of a call as a CUDA graph."""
    return in_turns({"call": GraphRun(call, 1)}, rounds)["call"]


def vulkan_seconds(spec: OpSpec, tensors: list[Any], options: tuple[Any, ...]) -> float:
    """The same of a call through Vulkan."""
    with vulkan_run(spec, tensors, options, 1) as run:
        return in_turns({"call": run})["call"]


def times(call: Callable[..., Any], tensors: list[torch.Tensor]) -> tuple[float, float, float]:
    """Seconds of a call and of its gradient, and MiB that a call adds when its gradient is wanted."""
    with torch.no_grad():
        forward = graph_seconds(lambda: call(*tensors))
    wanted = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    leaves = [x for x in wanted if x.requires_grad]
    call(*wanted)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    out = call(*wanted)
    torch.cuda.synchronize()
    held = (torch.cuda.memory_allocated() - before) / 2**20
    grad = torch.randn_like(out)
    backward = graph_seconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
    return forward, backward, held


def compare(name: str, sizes: tuple[int, ...], compiles: bool) -> None:
    tensors = OPERANDS[name](*sizes, torch.bfloat16, "cuda")
    call, peer = getattr(aule, name), PEERS[name]
    row: dict[str, Any] = {"op": name, "sizes": "x".join(map(str, sizes)), "error": check(name, call, peer, tensors)}
    forward_work, backward_work = WORK[name](*sizes)
    if name == "cross_entropy":
        row["copy"] = forward_work / in_turns({"copy": copy_run(int(forward_work * 1e12))})["copy"]
    peers = {"aule": call, "eager": peer}
    if compiles:
        torch._dynamo.reset()
        peers["compile"] = torch.compile(peer, dynamic=False)
    for title, function in peers.items():
        forward, backward, held = times(function, tensors)
        row[f"{title}_forward"], row[f"{title}_backward"] = forward_work / forward, backward_work / backward
        row[f"{title}_mib"] = held
    if compiles:
        for direction in ("forward", "backward"):
            row[f"ratio_{direction}"] = row[f"aule_{direction}"] / row[f"compile_{direction}"]
    try:
        spec = CATALOGUE[name]
        options = tuple(option.default for option in spec.options)
        row["vulkan_forward"] = forward_work / vulkan_seconds(spec, list(tensors), options)
        assert spec.gradient is not None
        outs = compute(spec, tensors, options, None, spec.outputs)
        row["vulkan_backward"] = backward_work / vulkan_seconds(
            spec.gradient, gradient_tensors(name, tensors, outs), options
        )
    except AuleError as failed:
        print(f"vulkan: {failed}")
    ROWS.append(row)
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


OPERANDS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "layer_norm_linear": linear_operands,
    "cross_entropy": logits_and_target,
}
PEERS: dict[str, Callable[..., Any]] = {"layer_norm_linear": eager_linear, "cross_entropy": F.cross_entropy}
SIZES: dict[str, list[tuple[int, ...]]] = {"layer_norm_linear": list(PRODUCTS), "cross_entropy": list(LOGITS)}
WORK: dict[str, Callable[..., tuple[float, float]]] = {
    "layer_norm_linear": lambda m, n, k: (2e-12 * m * n * k, 4e-12 * m * n * k),
    "cross_entropy": lambda rows, vocabulary: (2e-12 * rows * vocabulary, 4e-12 * rows * vocabulary),
}
"""Tera-operations, or terabytes, of either direction."""


def sweep(sizes: tuple[int, int, int]) -> None:
    """Tiles of the product: TFLOPS of both directions, best first."""
    tensors = linear_operands(*sizes, torch.bfloat16, "cuda")
    forward_work, backward_work = WORK["layer_norm_linear"](*sizes)
    found: list[tuple[float, FragmentBlocks]] = []
    warpgroups, blocks._choose_warpgroups = blocks._choose_warpgroups, lambda *_: None
    shapes = [
        (rows, cols, down, along)
        for rows, cols, down, along in itertools.product((64, 128, 256), (64, 128, 256), (1, 2, 4), (1, 2, 4))
        if 32 <= rows // down <= 64 and 32 <= cols // along <= 64 and 4 <= down * along <= 8 and rows * cols >= 2**14
    ]
    for (rows, cols, down, along), depth, stages, group in itertools.product(shapes, (32, 64), (2, 3, 4), (4, 8, 16)):
        tile = FragmentBlocks(rows, cols, depth, down, along, stages, group=group)
        if 2 * max(tile.shared_elements(*x) for x in ((False, False), (True, True))) > 227 << 10:
            continue
        if group != 8 and (depth, stages) != (64, 3):
            continue
        forget()
        try:
            with tuning.trying(tuning.Record("linear.fragment", {}, {"shape": asdict(tile)})):
                check("layer_norm_linear", aule.layer_norm_linear, eager_linear, tensors)
                with torch.no_grad():
                    forward = graph_seconds(lambda: aule.layer_norm_linear(*tensors), 7)
        except (AuleError, RuntimeError, AssertionError) as failed:
            print(f"{tile}: {failed}")
            continue
        found.append((forward_work / forward, tile))
    for speed, tile in sorted(found, key=lambda entry: -entry[0])[:12]:
        forget()
        with tuning.trying(tuning.Record("linear.fragment", {}, {"shape": asdict(tile)})):
            _, backward, _ = times(aule.layer_norm_linear, tensors)
        print(f"{speed:.0f} TFLOPS forward, {backward_work / backward:.0f} backward: {tile}", flush=True)
    blocks._choose_warpgroups = warpgroups


def launches(sizes: tuple[int, int, int]) -> None:
    """Microseconds of every launch of both directions, for some tiles of warpgroups, beside PyTorch's product."""
    tensors = linear_operands(*sizes, torch.bfloat16, "cuda")
    m, n, k = sizes
    x, weight = tensors[0], tensors[3]
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    peers = {"x w^T": lambda: x @ weight.T, "dy w": lambda: dy @ weight, "dy^T x": lambda: dy.T @ x}
    for name, call in peers.items():
        print(f"PyTorch {name}: {1e6 * repeated_seconds(call):.1f} us", flush=True)
    spec = CATALOGUE["layer_norm_linear"]
    assert spec.gradient is not None
    options = tuple(option.default for option in spec.options)
    default = blocks._choose_warpgroups
    for tile in [WarpgroupBlocks(128, 256, group=group) for group in (8, 16)]:
        blocks._choose_warpgroups = lambda *_, tile=tile: tile
        forget()
        error = check("layer_norm_linear", aule.layer_norm_linear, eager_linear, tensors)
        line = []
        for made, given in ((spec, tensors), (spec.gradient, gradient_tensors("layer_norm_linear", tensors, [dy]))):
            for name, seconds in launch_seconds(made, given, options):
                speed = f" ({2e-12 * m * n * k / seconds:.0f})" if "linear" in name else ""
                line.append(f"{name} {1e6 * seconds:.1f}{speed}")
        print(f"{tile} error {error:.1e}: {', '.join(line)}", flush=True)
    blocks._choose_warpgroups = default


def launch_seconds(spec: OpSpec, tensors: list[Any], options: tuple[Any, ...]) -> list[tuple[str, float]]:
    """Seconds of each launch of a call, with the name of its kernel."""
    device = registry.find("cuda")
    source = StreamMemory(device, torch.device("cuda", 0))
    call = RowOp(spec, tensors, options, None, spec.outputs)
    bound = call.bind(view_on_device)
    plan = call.prepare(bound, device, source, {}).plan
    memory = call.tensors | {x.name: torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in bound.outputs}
    memory |= {name: torch.randn(count, device="cuda") for name, count in plan.workspace.items()}
    memory |= {name: torch.zeros(words, device="cuda", dtype=torch.int32) for name, words in plan.scratch.items()}
    times = []
    for step in plan.steps:
        launch = prepare(Plan((step,)), device, memory=source).bind(tuple(memory))
        pointers = [x.data_ptr() for x in memory.values()]

        def run(launch: Any = launch, pointers: list[int] = pointers) -> None:
            launch(pointers, torch.cuda.current_stream().cuda_stream)

        name = getattr(step.config, "name", type(step.config).__name__)
        times.append((name, repeated_seconds(run)))
    return times


def repeated_seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call among others of its kind: the first launch of a graph takes longer."""
    return graph_seconds(lambda: [call() for _ in range(8)]) / 8


def compare_cpu(name: str, sizes: tuple[int, ...], dtype: torch.dtype, rounds: int) -> None:
    tensors = OPERANDS[name](*sizes, dtype, "cpu")
    call, peer = getattr(aule, name), PEERS[name]
    row: dict[str, Any] = {"op": name, "sizes": "x".join(map(str, sizes)), "dtype": str(dtype).removeprefix("torch.")}
    row["error"] = check(name, call, peer, tensors)
    runs: dict[str, Callable[[], Any]] = {}
    for title, function in (("aule", call), ("eager", peer)):
        wanted = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        out = function(*wanted)
        leaves, grad = [x for x in wanted if x.requires_grad], torch.randn_like(out)
        runs[f"{title}_forward"] = lambda function=function: function(*tensors)
        runs[f"{title}_backward"] = lambda out=out, leaves=leaves, grad=grad: torch.autograd.grad(
            out, leaves, grad, retain_graph=True
        )
    taken: dict[str, list[float]] = {key: [] for key in runs}
    for number in range(rounds + 1):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                taken[key].append(time.perf_counter() - start)
    for direction in ("forward", "backward"):
        pairs = zip(taken[f"eager_{direction}"], taken[f"aule_{direction}"], strict=True)
        row[f"{direction}_ratio"] = statistics.median(theirs / mine for theirs, mine in pairs)
        row[f"{direction}_ms"] = 1e3 * statistics.median(taken[f"aule_{direction}"])
    ROWS.append(row)
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--ops", default="layer_norm_linear,cross_entropy")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.cpu:
        device = platform.processor() or platform.machine()
        small = {"layer_norm_linear": (512, 1024, 1024), "cross_entropy": (256, 32000)}
        with written(args.csv, ROWS, device):
            for name, dtype in itertools.product(args.ops.split(","), (torch.float32, torch.bfloat16)):
                compare_cpu(name, small[name], dtype, args.rounds)
    else:
        device = torch.cuda.get_device_name()
        print(f"{device}, torch {torch.__version__}, aule {aule.__version__}, Python {platform.python_version()}")
        warm_up(0.7)
        with torch.cuda.stream(torch.cuda.Stream()), written(args.csv, ROWS, device):
            if args.sweep:
                sweep(PRODUCTS[0])
            if args.launches:
                launches(PRODUCTS[0])
            for name in [] if args.sweep or args.launches else args.ops.split(","):
                for sizes in SIZES[name]:
                    compare(name, sizes, not args.no_compile)


if __name__ == "__main__":
    main()
