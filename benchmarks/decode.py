"""Compares decoding with PyTorch: one query token for each sequence, long caches, contiguous, paged and quantised.

    python benchmarks/decode.py [--cases a,b] [--no-flex] [--no-vulkan] [--csv FILE]
    python benchmarks/decode.py --tune CASE[,CASE] [--backend B] ALTERNATIVE ...

bf16, 32 query and 8 key heads, d128. Peers in the same run: `F.scaled_dot_product_attention(enable_gqa=True)` with its
best backend, and FlexAttention compiled (FlexDecoding), both on contiguous bf16, timed once for all cases that share
it. Device times are those of a CUDA graph of many calls; through Vulkan, timestamps around many calls in one command
buffer, each waiting for the one before. "host" is the time of a call, Python and launches included, when many are
queued. GB/s counts the bytes of K and V (and scales) once. Every result is checked against float64 first. Before the
first case, one process per case compiles its kernels into the caches on disk, all at the same time.

An alternative for ``--tune`` is ``keys:subgroups:registers:splits`` of the simt kernel, with ``-`` for the table's
value, optionally followed by rows and run: ``4:8:128:-:4:8``. ``m:blocks:subgroups:registers:splits`` is one of the
kernel on matrix units. The planner's choice comes first. If sequences are split, each alternative is timed with the
parts combined by the last workgroup, by a second launch, and by a cluster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from result_file import written
from torch.nn.attention import SDPBackend, sdpa_kernel

import aule
from aule.backends import registry
from aule.engine.memory import device_scratch
from aule.engine.probe import find_layout
from aule.engine.run import prepare
from aule.errors import AuleError
from aule.ops.decode.config import FragmentDecodeShape
from aule.ops.decode.plan.decode import decode_views, plan_decode
from aule.ops.decode.plan.shapes import choose_decode_shape
from aule.ops.decode.validate import decode_problem
from aule.runtime.cuda import CudaDevice
from aule.view import TensorView, contiguous_strides

HEADS_Q, HEADS_KV, DIM = 32, 8, 128
WARM = 0.1
"""Seconds of work before each measurement; `main` has the clocks up before the first."""
NAMES = {
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "e4m3",
    torch.float32: "f32",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class Case:
    """A batch of sequences of one length; ``page`` 0 is a contiguous cache."""

    batch: int
    keys: int
    page: int = 0
    cache: torch.dtype = torch.bfloat16
    rows: int = 1

    @property
    def small(self) -> bool:
        """Whether the host takes longer than the device."""
        return self.bytes < 1 << 24

    @property
    def bytes(self) -> int:
        per_key = 2 * DIM * self.cache.itemsize + (0 if self.cache == torch.bfloat16 else 8)
        return self.batch * self.keys * HEADS_KV * per_key


CASES = {
    "batch32": Case(32, 4096),
    "batch32-paged": Case(32, 4096, 16),
    "long": Case(1, 65536),
    "long-paged": Case(1, 65536, 16),
    "short": Case(1, 512),
    "1k": Case(1, 1024),
    "4k": Case(1, 4096),
    "32k": Case(4, 32768, 16),
    "32k-int8": Case(4, 32768, 16, torch.int8),
    "32k-fp8": Case(4, 32768, 16, torch.float8_e4m3fn),
    "32k-1": Case(1, 32768, 16),
    "32k-1-int8": Case(1, 32768, 16, torch.int8),
    "32k-1-fp8": Case(1, 32768, 16, torch.float8_e4m3fn),
    "four-tokens": Case(32, 4096, 16, torch.bfloat16, 4),
    "prefill": Case(4, 8192, 16, torch.bfloat16, 512),
}


class Inputs:
    """Tensors of a case, the call of aule on them, and the right answer."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        batch, keys = case.batch, case.keys
        self.q = torch.randn(batch, HEADS_Q, case.rows, DIM, device="cuda", dtype=torch.bfloat16)
        self.lens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        plain = [torch.randn(batch, HEADS_KV, keys, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        self.k, self.v = plain
        self.arguments: dict[str, Any] = {"context_lens": self.lens}
        if not case.page:
            self.stored = plain
            return
        pages = batch * keys // case.page
        order = torch.randperm(pages, device="cuda")
        self.arguments["block_tables"] = order.view(batch, -1).to(torch.int32).contiguous()
        self.stored = []
        for name, x in zip("kv", plain, strict=True):
            # Of one sequence the transposed view could be reshaped without a copy, and would keep its order in memory.
            tokens = x.transpose(1, 2).contiguous().view(pages, case.page, HEADS_KV, DIM)
            scale = None
            if case.cache != torch.bfloat16:
                limit = 127.0 if case.cache == torch.int8 else 448.0
                scale = tokens.float().abs().amax(-1).clamp(min=1e-6) / limit
                wide = tokens.float() / scale[..., None]
                tokens = wide.round().to(torch.int8) if case.cache == torch.int8 else wide.to(case.cache)
                pool_scale = torch.empty_like(scale)
                pool_scale[order] = scale
                self.arguments[f"{name}_scale"] = pool_scale
                rounded = (tokens.float() * scale[..., None]).view(batch, keys, HEADS_KV, DIM).transpose(1, 2)
                setattr(self, name, rounded)
            pool = torch.empty_like(tokens)
            pool.view(torch.uint8)[order] = tokens.view(torch.uint8)
            self.stored.append(pool)

    def ours(self) -> Any:
        if self.case.page:
            return aule.flash_attention_paged(self.q, *self.stored, **self.arguments)
        return aule.decode_attention(self.q, *self.stored, **self.arguments)

    def error(self, out: Any) -> float:
        """Largest error of the last sequence's last key head against float64, relative to the largest output."""
        group = HEADS_Q // HEADS_KV
        q = self.q[-1, -group:].double()
        k, v = self.k[-1, -1].double(), self.v[-1, -1].double()
        s = q @ k.T * DIM**-0.5
        rows = self.case.rows
        mask = torch.ones(rows, s.shape[-1], device="cuda", dtype=torch.bool).tril(s.shape[-1] - rows)
        want = F.softmax(s.masked_fill(~mask, float("-inf")), -1) @ v
        return float((out[-1, -group:].double() - want).abs().max() / want.abs().max())


def graph_seconds(call: Callable[[], Any], calls: int, seconds: float = WARM) -> float:
    """Median device seconds of a call, by replays of a CUDA graph of many, after a warm-up of the clocks."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(11):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(times)


def warm_up(seconds: float = 0.7) -> None:
    """Have the clocks up."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        x @ x
        torch.cuda.synchronize()


def host_seconds(call: Callable[[], Any], calls: int = 300) -> float:
    """Median seconds of a call when many are queued one after the other and waited for at the end."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def sdpa(inputs: Inputs, calls: int) -> dict[str, Any]:
    """PyTorch's attention on the contiguous, unquantised cache, with its best backend."""
    k, v = (x.to(torch.bfloat16).contiguous() for x in (inputs.k, inputs.v))
    mask = None
    if inputs.case.rows > 1:
        rows, keys = inputs.case.rows, inputs.case.keys
        mask = torch.ones(rows, keys, device="cuda", dtype=torch.bool).tril(keys - rows)

    def call() -> Any:
        return F.scaled_dot_product_attention(inputs.q, k, v, attn_mask=mask, enable_gqa=True)

    found: dict[str, Any] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            try:
                error = inputs.error(call())
                seconds = graph_seconds(call, calls)
            except RuntimeError:  # which does not serve it
                continue
            if not found or seconds < found["seconds"]:
                found = {"seconds": seconds, "backend": backend.name.split("_")[0].lower(), "error": error}
                if inputs.case.small:
                    found["host"] = host_seconds(call)
    return found


def flex(inputs: Inputs) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    torch._dynamo.config.recompile_limit = 32  # one for each shape, of which there are more than eight
    k, v = (x.to(torch.bfloat16).contiguous() for x in (inputs.k, inputs.v))
    rows, keys = inputs.case.rows, inputs.case.keys
    block_mask = None
    if rows > 1:
        block_mask = create_block_mask(lambda b, h, i, j: i + (keys - rows) >= j, None, None, rows, keys, device="cuda")
    return lambda: compiled(inputs.q, k, v, block_mask=block_mask, enable_gqa=True)


def flex_result(inputs: Inputs, calls: int) -> tuple[float, float] | str:
    """Seconds and error of FlexDecoding, or why there are none."""
    try:
        call = flex(inputs)
        error = inputs.error(call())
        return graph_seconds(call, calls), error
    except RuntimeError as problem:  # what Dynamo and Inductor raise, too
        return str(problem).strip().splitlines()[0]


class Engine:
    """The same problem through the engine on any device, for alternatives and for Vulkan."""

    def __init__(self, inputs: Inputs, backend: str) -> None:
        self.inputs, self.device = inputs, registry.find(backend)
        assert self.device is not None
        find_layout(self.device)
        op = "flash_attention_paged" if inputs.case.page else "decode_attention"
        tensors = {"q": inputs.q, "k": inputs.stored[0], "v": inputs.stored[1], **inputs.arguments}
        views: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        for name, x in tensors.items():
            assert x.is_contiguous()
            nbytes = x.numel() * x.element_size()
            if isinstance(self.device, CudaDevice):
                allocation = self.device.wrap(x.data_ptr(), nbytes, x)
            else:
                allocation = self.device.alloc(nbytes)
                self.device.upload(allocation, x.detach().cpu().view(torch.uint8).numpy())
            views[name] = TensorView(NAMES[x.dtype], tuple(x.shape), tuple(x.stride()), backend, allocation)
        self.problem, operands = decode_problem(op, **views)
        out = TensorView("bf16", self.problem.out_shape, contiguous_strides(self.problem.out_shape), backend, None)
        self.views = decode_views(operands, out)
        self.memory = {name: view.storage for name, view in self.views.items()}
        self.memory["o"] = self.device.alloc(2 * int(np.prod(self.problem.out_shape)))

    def run(
        self, shape: Any = None, splits: int | None = None, combine: Any = None,
    ) -> tuple[float, float, str]:  # fmt: skip
        """Median seconds, error, and what was planned."""
        target = self.device.target
        plan = plan_decode(self.problem, self.views, target, None, shape, splits, combine)
        memory = self.memory | {name: self.device.alloc(4 * n) for name, n in plan.workspace.items()}
        memory |= {name: device_scratch(self.device, words) for name, words in plan.scratch.items()}
        launches = prepare(plan, self.device).launches(memory)
        calls = 50 if self.inputs.case.small else 20
        if self.device.target.backend == "cuda":
            seconds = graph_seconds(lambda: self._launch(launches, torch.cuda.current_stream().cuda_stream), calls)
        else:
            start = time.perf_counter()
            while time.perf_counter() - start < WARM:
                self.device.time_launches(launches, calls)
            seconds = statistics.median(self.device.time_launches(launches, calls) for _ in range(11))
        found = np.empty(self.problem.out_shape, np.uint16)
        self.device.download(memory["o"], found)
        error = self.inputs.error(torch.from_numpy(found).view(torch.bfloat16).cuda())
        for name in plan.workspace:
            self.device.free(memory[name])
        config, count = plan.steps[0].config, plan.steps[0].scalars.get("splits", 1)
        return seconds, error, f"{config.shape} splits {count} launches {len(launches)}"

    def _launch(self, launches: list[Any], stream: int | None = None) -> None:
        for launch in launches:
            self.device.launch(*launch, stream=stream)

    def close(self) -> None:
        for allocation in self.memory.values():
            self.device.free(allocation)


PEERS: dict[tuple[int, int, int], dict[str, Any]] = {}
"""What peers took, by batch, keys and rows."""


def compare(name: str, args: argparse.Namespace) -> dict[str, object]:
    case = CASES[name]
    inputs = Inputs(case)
    error = inputs.error(inputs.ours())
    calls = 50 if case.small else 20
    seconds = graph_seconds(inputs.ours, calls)
    row: dict[str, object] = {
        "case": name, "aule_us": round(1e6 * seconds, 1), "aule_gb_s": round(case.bytes / seconds / 1e9),
        "aule_error": f"{error:.1e}",
    }  # fmt: skip
    peer = PEERS.setdefault((case.batch, case.keys, case.rows), {})
    peer.update(peer or sdpa(inputs, calls))
    row |= {
        "sdpa_us": round(1e6 * peer["seconds"], 1), "sdpa_backend": peer["backend"],
        "sdpa_error": f"{peer['error']:.1e}", "sdpa_over_aule": round(peer["seconds"] / seconds, 2),
    }  # fmt: skip
    if case.small:
        row |= {"aule_host_us": round(1e6 * host_seconds(inputs.ours), 1), "sdpa_host_us": round(1e6 * peer["host"], 1)}
    if not args.no_flex:
        if "flex" not in peer:
            peer["flex"] = flex_result(inputs, calls)
        found = peer["flex"]
        if isinstance(found, str):
            row |= {"flex_us": "not compiled", "flex_error": "", "flex_over_aule": ""}
            print(f"flex {name}: {found}")
        else:
            row |= {
                "flex_us": round(1e6 * found[0], 1), "flex_error": f"{found[1]:.1e}",
                "flex_over_aule": round(found[0] / seconds, 2),
            }  # fmt: skip
    if not args.no_vulkan:
        try:
            engine = Engine(inputs, "vulkan")
            vulkan, vulkan_error, _ = engine.run()
            engine.close()
            row |= {
                "vulkan_us": round(1e6 * vulkan, 1), "vulkan_gb_s": round(case.bytes / vulkan / 1e9),
                "vulkan_error": f"{vulkan_error:.1e}", "vulkan_over_cuda": round(seconds / vulkan, 2),
            }  # fmt: skip
        except AuleError as problem:
            print(f"vulkan: {problem}")
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def compile_case(name: str, args: argparse.Namespace) -> None:
    """Call everything once, for what it leaves on disk."""
    inputs = Inputs(CASES[name])
    inputs.ours()
    # What does not work `compare` will say.
    if not args.no_vulkan:
        with suppress(AuleError):
            engine = Engine(inputs, "vulkan")
            prepare(plan_decode(engine.problem, engine.views, engine.device.target), engine.device)
    if not args.no_flex:
        with suppress(RuntimeError):
            flex(inputs)()
    torch.cuda.synchronize()


def compile_cases(names: list[str], args: argparse.Namespace) -> None:
    """The same of several cases, each in a process of its own."""
    options = [flag for flag, given in (("--no-flex", args.no_flex), ("--no-vulkan", args.no_vulkan)) if given]
    alone = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def run(name: str) -> None:
        command = [sys.executable, __file__, "--compile", "--cases", name, *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, env=alone, check=False)

    with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
        list(pool.map(run, names))


PLAIN = ("keys", "subgroups", "registers", "splits", "rows", "run")
FRAGMENT = ("blocks", "subgroups", "registers", "splits")
FORMS: dict[str, dict[str, Any]] = {
    "as planned": {},
    "one launch": {"combine": "last_workgroup"},
    "two launches": {"combine": "second_launch"},
    "a cluster": {"combine": "cluster"},
}


def alternative(text: str, problem: Any, target: Any) -> tuple[Any, int | None]:
    """The shape and the number of parts that an alternative means."""
    fragment = text.startswith("m:")
    fields = zip(FRAGMENT if fragment else PLAIN, text.removeprefix("m:").split(":"), strict=False)
    given = {field: int(value) for field, value in fields if value != "-"}
    splits = given.pop("splits", None)
    if fragment:
        rows = 8 if problem.group * problem.seq_q <= 8 else 16
        return replace(FragmentDecodeShape(rows, 1, 4), **given), splits
    shape = replace(choose_decode_shape(problem, target, 16), **given)
    if "run" in given:
        shape = replace(shape, lanes=min(max(DIM // given["run"], 1), shape.subgroup))
    return shape, splits


def tune(names: str, alternatives: list[str], backend: str) -> None:
    for name in names.split(","):
        inputs = Inputs(CASES[name])
        engine = Engine(inputs, backend)
        for text in ["", *alternatives]:
            shape, splits = alternative(text, engine.problem, engine.device.target) if text else (None, None)
            for form, how in FORMS.items():
                try:
                    seconds, error, planned = engine.run(shape, splits, **how)
                except AuleError as problem:
                    print(f"{name} {backend} {text}, {form}: {problem}", flush=True)
                    continue
                print(
                    f"{name} {backend} {text or 'plan'}, {form}: {1e6 * seconds:.1f} us, "
                    f"{inputs.case.bytes / seconds / 1e9:.0f} GB/s, error {error:.1e}; {planned}",
                    flush=True,
                )
                if "splits 1 " in planned:
                    break
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--no-vulkan", action="store_true")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--csv")
    parser.add_argument("--tune")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("alternatives", nargs="*")
    args = parser.parse_args()
    names = args.cases.split(",")
    if args.compile:
        with torch.no_grad():
            for name in names:
                compile_case(name, args)
        return
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}")
    if args.tune:
        warm_up()
        tune(args.tune, args.alternatives, args.backend)
        return
    compile_cases(names, args)
    warm_up()
    rows: list[dict[str, object]] = []
    with torch.no_grad(), written(args.csv, rows, device):
        for name in names:
            rows.append(compare(name, args))


if __name__ == "__main__":
    main()
