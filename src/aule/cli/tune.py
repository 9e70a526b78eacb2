"""``aule tune``: the fastest tiles on this machine's device."""

from __future__ import annotations

import argparse

from aule.backends import registry
from aule.engine.tuning import Measured, Shape, tune
from aule.errors import InvalidArgumentError
from aule.tile.fragment_shape import FragmentShape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--backend", metavar="SPEC", help="the device, as 'vulkan:0'; default: the one that calls use")
    parser.add_argument("--dtype", nargs="+", choices=("f32", "f16", "bf16"), default=["f16", "bf16", "f32"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128], metavar="N")
    parser.add_argument("--seq-len", type=int, default=2048, metavar="N", help="sequence length (default 2048)")
    parser.add_argument("--causal", action="store_true", help="row i attends to keys 0..i")
    parser.add_argument("--seconds", type=float, default=0.2, help="warm-up of each way (default 0.2)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    device = registry.find(args.backend) if args.backend else registry.choose()
    if device is None:
        raise InvalidArgumentError(
            "[tune] expected a GPU, got NumPy, which has no tiles to choose; name another device with --backend"
        )
    for name, value in (("--seq-len", args.seq_len), *(("--head-dim", dim) for dim in args.head_dim)):
        if value < 1 or (name == "--head-dim" and value > 256):
            raise InvalidArgumentError(f"[tune] expected {name} of at least 1 (head dimensions to 256), got {value}")
    print(f"{device.target.backend}:{device.index} {device.target.name}")
    for dtype in args.dtype:
        for head_dim in args.head_dim:
            measured, kept = tune(device, dtype, head_dim, args.seq_len, args.causal, args.seconds)
            print(f"\n{dtype}, head dimension {head_dim}, {args.seq_len} keys{', causal' if args.causal else ''}")
            for number, one in enumerate(measured):
                print(
                    f"  {_line(one)}{'  (the table)' if number == 0 else ''}{'  <- kept' if one.shape == kept else ''}"
                )
            if kept is None:
                print("  the table's tiles stay")
    return 0


def _line(measured: Measured) -> str:
    what = f"{measured.tflops:8.2f} TFLOPS" if not measured.refused else f"refused: {measured.refused[:60]}"
    return f"{_text(measured.shape):40} {what}"


def _text(shape: Shape) -> str:
    if isinstance(shape, FragmentShape):
        where = "registers" if shape.resident_q else "registers and memory" if shape.held else "memory"
        return f"{shape.block_q}x{shape.block_kv}, {shape.subgroups} subgroups, {shape.stages} stages, Q in {where}"
    return f"{shape.block_q}x{shape.block_kv}, {shape.threads_x}x{shape.threads_y} threads, by {shape.chunk_k}"
