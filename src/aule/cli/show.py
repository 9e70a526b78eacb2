"""``aule show``: prints the code of a kernel."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from aule.backends import registry
from aule.codegen import TARGETS, target_for
from aule.errors import InvalidArgumentError
from aule.kernels import AttentionKernel
from aule.target import Target

_KERNELS = ("attention", "flash_attention")
_DEFAULT_LANGUAGE = "ptx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("kernel", choices=_KERNELS, help="the kernel")
    parser.add_argument(
        "--language",
        choices=(*TARGETS, "ir"),
        help=f"kernel language, or the IR as text; default: the device's, or {_DEFAULT_LANGUAGE}",
    )
    parser.add_argument("--backend", metavar="SPEC", help="compile for this device, as 'vulkan:0'")
    parser.add_argument("--arch", metavar="SM", help="NVIDIA architecture for PTX, as 'sm_90'")
    parser.add_argument("--seq-len", type=int, default=1024, metavar="N", help="sequence length (default 1024)")
    parser.add_argument("--head-dim", type=int, default=64, metavar="N", help="head dimension (default 64)")
    parser.add_argument("--heads", type=int, default=1, metavar="N", help="query heads (default 1)")
    parser.add_argument("--kv-heads", type=int, metavar="N", help="key and value heads (default: as query heads)")
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), default="f32", help="element type (default f32)")
    parser.add_argument("--causal", action="store_true", help="row i attends to keys 0..i")
    parser.add_argument("--tiles", metavar="QxKV", help="tiles, as '64x32' (default: the target's)")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="write to this file instead of printing")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    kernel = AttentionKernel(
        args.seq_len,
        args.head_dim,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        causal=args.causal,
        dtype=args.dtype,
        tiles=None if args.tiles is None else _tiles(args.tiles),
    )
    target = _target(args)
    if args.language == "ir":
        code: str | bytes = str(kernel.build(target))
    else:
        code = kernel.emit(args.language or registry.backend(target.backend).language, target)
    if args.output is not None:
        args.output.write_bytes(code if isinstance(code, bytes) else code.encode())
    elif isinstance(code, str):
        print(code)
    elif sys.stdout.isatty():
        raise InvalidArgumentError(
            "[show] expected a file for SPIR-V, which is binary, got a terminal; add --output kernel.spv, "
            "and read it with spirv-dis"
        )
    else:
        sys.stdout.buffer.write(code)
    return 0


def _target(args: argparse.Namespace) -> Target:
    if args.backend is None:
        language = args.language if args.language in TARGETS else _DEFAULT_LANGUAGE
        target = target_for(language)
    else:
        device = registry.find(args.backend)
        if device is None:
            raise InvalidArgumentError(
                "[show] expected a backend that compiles kernels, got numpy; leave --backend out"
            )
        target = device.target
    return target if args.arch is None else replace(target, arch=args.arch)


def _tiles(text: str) -> tuple[int, int]:
    q, _, kv = text.partition("x")
    if not (q.isdigit() and kv.isdigit()):
        raise InvalidArgumentError(f"[show] expected --tiles as 64x32, got {text!r}")
    return int(q), int(kv)
