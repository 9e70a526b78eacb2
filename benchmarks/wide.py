"""Compares wide heads and latent attention on a GPU with their peers, in one run; results are checked before timing.

    python benchmarks/wide.py [--csv FILE] [--backend vulkan] [--peers FOLDER] [--latents] [--tune]

bf16. ``--latents`` runs latent attention alone, and ``--tune`` also times other shapes of its kernel. Through CUDA:
`aule.mla_decode` beside FlashMLA (one query token, pages of 64 keys), as planned and with each kernel of latents;
forward and backward of 512 columns beside PyTorch's EFFICIENT_ATTENTION; and DeepSeek's prefill (192 columns, values of
128) beside cuDNN. Through Vulkan: latent attention and the 512 columns, by device timestamps; the peers run on CUDA.
FlashMLA comes from ``--peers``, the folder that `shared/tools/peers-bundle` makes; its schedule is made before it is
timed, as one schedule serves all layers of a model. Shares of float64 are checked first: our error may be twice the
peer's. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import backward
import forward
import torch
import torch.nn.functional as F
from forward import timed
from result_file import written
from row_cases import forget
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import aule
from aule import tuning
from aule.backends import registry
from aule.engine.memory import device_scratch
from aule.engine.probe import find_layout
from aule.engine.run import prepare
from aule.ops.decode.config import LatentShape
from aule.ops.decode.plan.decode import decode_views, plan_decode
from aule.ops.decode.validate import decode_problem
from aule.tuning.record import every
from aule.view import TensorView, contiguous_strides

ROWS: list[dict[str, object]] = []
DTYPE = torch.bfloat16
LATENT, VALUES, PAGE, SCALE = 576, 512, 64, 192**-0.5
MLA = ((32, 4096, 128), (64, 8192, 128), (128, 4096, 16))
"""Batch, keys and query heads."""
WIDE, PREFILL = ((2048, False), (2048, True), (8192, False), (8192, True)), ((2048, True), (8192, True), (8192, False))
"""Lengths, and whether the mask is causal; 16384 rows in all."""
FLOOR = 4e-3
"""Errors, relative to the largest value, that are right whatever the peer's: half of bf16's last place."""
REPEATS = 9
KERNELS = ("fragment", "warpgroup")
"""Kernels of latents that are timed beside the planned one, by their engines."""
SHAPES = tuple(
    LatentShape(rows, keys, subgroups, parts, stages, registers)
    for rows, keys, subgroups, parts, stages, registers in (
        (16, 32, 4, 4, 2, 160), (16, 32, 8, 4, 2, 128), (16, 64, 8, 4, 2, 0), (16, 32, 4, 2, 2, 0),
        (32, 32, 4, 4, 2, 255), (32, 32, 8, 4, 2, 0), (32, 64, 8, 4, 2, 0),
        (64, 32, 8, 4, 2, 255), (64, 64, 8, 4, 1, 255), (64, 32, 16, 4, 2, 0),
    )
)  # fmt: skip
"""What ``--tune`` tries; those that do not fit a device give the planner's choice."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--backend", choices=("cuda", "vulkan"), default="cuda")
    parser.add_argument("--peers", default=".gpu/peers")
    parser.add_argument("--latents", action="store_true")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}")
    torch.manual_seed(0)
    with written(args.csv, ROWS, device, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version()):
        sys.path.insert(0, str(Path(args.peers).resolve()))
        for batch, keys, heads in MLA:
            decode(batch, keys, heads, args.backend, args.tune)
        if args.latents:
            return
        if args.backend == "cuda":
            for seq, causal in PREFILL:
                prefill(seq, causal)
        for seq, causal in WIDE:
            wide(seq, causal, args.backend)


def add(name: str, work: float, unit: str, ours: tuple[float, float], peer: str, theirs: tuple[float, float]) -> None:
    """Add a row: rates and errors. ``ours`` and ``theirs`` are seconds and errors."""
    row: dict[str, object] = {"case": name, "unit": unit, "peer": peer}
    for label, (seconds, error) in (("our", ours), ("peer", theirs)):
        row[f"{label}_rate"] = round(work / seconds / 1e12, 2)
        row[f"{label}_us"], row[f"{label}_error"] = round(1e6 * seconds, 1), f"{error:.1e}"
    row["ratio"] = round(theirs[0] / ours[0], 3)
    ROWS.append(row)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def check(name: str, error: float, theirs: float) -> None:
    if not error <= max(2 * theirs, FLOOR):
        raise SystemExit(f"{name}: wrong result, error {error:.1e} where the peer has {theirs:.1e}")


def decode(batch: int, keys: int, heads: int, backend: str, tune: bool) -> None:
    """One token of multi-head latent attention; FLOPS, or bytes of the cache where reading it takes longest."""
    import peers

    name = f"mla {batch} x {keys}, {heads} heads" + (", vulkan" if backend == "vulkan" else "")
    pages = batch * keys // PAGE
    q = torch.randn(batch, heads, LATENT, device="cuda", dtype=DTYPE)
    cache = torch.randn(pages, PAGE, LATENT, device="cuda", dtype=DTYPE)
    tables = torch.randperm(pages, device="cuda").view(batch, -1).int()
    lens = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    single = q[:, None].contiguous()
    found = peers.flashmla(single, cache[:, :, None], tables, lens, SCALE)  # loads the library, too
    space = torch.ops._flashmla_C if hasattr(torch.ops._flashmla_C, "dense_decode_fwd") else torch.ops.flash_mla

    def flashmla(schedule: Any = None, splits: Any = None) -> Any:
        pool = cache[:, :, None]
        return space.dense_decode_fwd(single, pool, VALUES, lens, tables, SCALE, True, schedule, splits, None)

    own = cache[tables[-1].long()].reshape(keys, LATENT).double()
    weights = torch.softmax(q[-1].double() @ own.T * SCALE, -1)
    wanted = weights @ own[:, :VALUES]
    del own, weights

    def error_of(last: Tensor) -> float:
        return float((last.double() - wanted).abs().max() / wanted.abs().max())

    def cuda() -> tuple[float, float]:
        def call() -> Tensor:
            return aule.mla_decode(q, cache, tables, lens, scale=SCALE, value_dim=VALUES)

        error = error_of(call()[-1])
        check(name, error, peer_error)
        return timed(call, REPEATS), error

    def vulkan() -> tuple[float, float]:
        seconds, last = latents_on("vulkan", {"q": q, "k": cache[:, :, None], "lens": lens, "tables": tables})
        check(name, error_of(last), peer_error)
        return seconds, error_of(last)

    peer_error = error_of(found[-1, 0])
    schedule, splits = flashmla()[2:4]
    theirs = timed(lambda: flashmla(schedule, splits), REPEATS), peer_error
    few = heads < 64
    work = float(cache.nbytes) if few else 2.0 * batch * heads * keys * (LATENT + VALUES)
    measure, unit = cuda if backend == "cuda" else vulkan, "TB/s" if few else "TFLOPS"
    add(name, work, unit, measure(), "FlashMLA", theirs)
    for kernel in KERNELS if backend == "cuda" else ():
        forget()
        with tuning.trying(*records_of(kernel)):
            if aule.explain(aule.mla_decode, q, cache, tables, lens, scale=SCALE, value_dim=VALUES).kernel == kernel:
                add(f"{name}, {kernel} kernel", work, unit, measure(), "FlashMLA", theirs)
            else:
                print(f"{name}: the {kernel} kernel does not serve this", flush=True)
    for shape in SHAPES if tune else ():
        forget()
        try:
            with tuning.trying(tuning.Record("decode.latent", {}, {"kind": "fragment", "shape": asdict(shape)})):
                add(f"{name}, {shape}", work, unit, measure(), "FlashMLA", theirs)
        except aule.AuleError as failed:
            print(f"{name}, {shape}: {failed}", flush=True)
    forget()


def records_of(kernel: str) -> list[tuning.Record]:
    """The tables' records of a kernel of latents, and the first of them without conditions."""
    found = [record for record in every("decode.latent") if record.use["kind"] == kernel]
    return [*found, *(replace(record, when={}) for record in found[:1])]


def latents_on(backend: str, tensors: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Latent attention through the engine: seconds, and the result of the last sequence."""
    device = registry.find(backend)
    assert device is not None
    find_layout(device)
    views, memory = {}, {}
    for name, x in tensors.items():
        memory[name] = device.alloc(x.nbytes)
        device.upload(memory[name], x.cpu().contiguous().view(torch.uint8).numpy())
        dtype = "bf16" if x.dtype == DTYPE else "i32"
        views[name] = TensorView(dtype, tuple(x.shape), contiguous_strides(tuple(x.shape)), backend, memory[name])
    v = replace(views["k"], shape=(*views["k"].shape[:3], VALUES))
    problem, operands = decode_problem(
        "mla_decode", views["q"], views["k"], v, block_tables=views["tables"], context_lens=views["lens"],
        scale=SCALE, latent=True,
    )  # fmt: skip
    memory["o"] = device.alloc(2 * math.prod(problem.out_shape))
    out = TensorView("bf16", problem.out_shape, contiguous_strides(problem.out_shape), backend, memory["o"])
    planned = plan_decode(problem, decode_views(operands, out), device.target)
    memory |= {"v": memory["k"]} | {name: device.alloc(4 * count) for name, count in planned.workspace.items()}
    shared = {name: device_scratch(device, words) for name, words in planned.scratch.items()}
    launches = prepare(planned, device).launches(memory | shared)
    seconds = statistics.median([device.time_launches(launches, 1) for _ in range(REPEATS + 3)][3:])
    host = torch.empty(problem.out_shape, dtype=DTYPE)
    device.download(memory["o"], host.view(torch.uint16).numpy())
    for name, allocation in memory.items():
        if name != "v":
            device.free(allocation)
    return seconds, host[-1, :, 0].cuda()


def prefill(seq: int, causal: bool) -> None:
    """DeepSeek's heads before absorption."""
    batch, heads, dim, value_dim = 16384 // seq, 16, 192, 128
    name = f"prefill d{dim}/{value_dim} {batch} x {seq}" + (", causal" if causal else "")
    q, k = (torch.randn(batch, heads, seq, dim, device="cuda", dtype=DTYPE) for _ in range(2))
    v = torch.randn(batch, heads, seq, value_dim, device="cuda", dtype=DTYPE)

    def theirs() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def ours() -> Tensor:
        return aule.flash_attention(q, k, v, causal=causal)

    errors = [forward.error_of(call(), q, k, v, causal) for call in (ours, theirs)]
    check(name, *errors)
    flops = 2.0 * batch * heads * seq * seq * (dim + value_dim) / (2 if causal else 1)
    add(name, flops, "TFLOPS", (timed(ours, REPEATS), errors[0]), "cuDNN", (timed(theirs, REPEATS), errors[1]))


def wide(seq: int, causal: bool, backend: str) -> None:
    """Forward and backward of 512 columns."""
    batch, heads, dim = 16384 // seq, 4, 512
    name = f"d{dim} {batch} x {seq}" + (", causal" if causal else "") + (", vulkan" if backend == "vulkan" else "")
    q, k, v = (torch.randn(batch, heads, seq, dim, device="cuda", dtype=DTYPE, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def theirs() -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    peer_out, (out, lse) = theirs(), aule.flash_attention(q, k, v, causal=causal, return_lse=True)

    def gradients(result: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, (q, k, v), dout, retain_graph=True)

    flops = 4.0 * batch * heads * seq * seq * dim / (2 if causal else 1)
    with torch.no_grad():
        error = forward.error_of(peer_out, q, k, v, causal)
        if backend == "vulkan":
            mine = forward.vulkan_run(q, k, v, causal, REPEATS)
            check(f"{name}, forward", mine[1], error)
        else:
            own_error = forward.error_of(out, q, k, v, causal)
            check(f"{name}, forward", own_error, error)
            mine = timed(lambda: aule.flash_attention(q, k, v, causal=causal), REPEATS), own_error
        add(f"{name}, forward", flops, "TFLOPS", mine, "EFFICIENT_ATTENTION", (timed(theirs, REPEATS), error))
    last = [x.detach()[-1:, -1:].double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(*last, is_causal=causal)
    wanted = torch.autograd.grad(exact, last, dout[-1:, -1:].double())
    del exact
    error = backward.error_of(gradients(peer_out), wanted)
    if backend == "vulkan":
        tensors = {"q": q, "k": k, "v": v, "o": out, "do": dout, "lse": lse}
        mine = backward.vulkan_run(tensors, causal, REPEATS, wanted)
        check(f"{name}, backward", mine[1], error)
    else:
        own_error = backward.error_of(gradients(out), wanted)
        check(f"{name}, backward", own_error, error)
        mine = timed(lambda: gradients(out), REPEATS), own_error
    peer = timed(lambda: gradients(peer_out), REPEATS), error
    add(f"{name}, backward", 2.5 * flops, "TFLOPS", mine, "EFFICIENT_ATTENTION", peer)


if __name__ == "__main__":
    main()
