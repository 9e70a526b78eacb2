"""``aule tune``: measures the fastest shapes on a device and stores them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from aule.backends import registry
from aule.engine.tune import Measured, Outcome, tune
from aule.engine.tune_cases import OPS, Settings
from aule.errors import InvalidArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--backend", metavar="SPEC", help="the device, as 'vulkan:0'; default: the one that calls use")
    parser.add_argument("--op", nargs="+", choices=(*OPS, "all"), default=["forward"], help="default: forward")
    parser.add_argument("--dtype", nargs="+", choices=("f32", "f16", "bf16"), default=["f16", "bf16", "f32"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128], metavar="N")
    parser.add_argument("--seq-len", type=int, default=2048, metavar="N", help="sequence length (default 2048)")
    parser.add_argument("--columns", nargs="+", type=int, default=[4096], metavar="N", help="of rows (default 4096)")
    parser.add_argument("--causal", action="store_true", help="row i attends to keys 0..i")
    parser.add_argument("--mask", action="store_true", help="with a boolean mask")
    parser.add_argument("--seconds", type=float, default=0.2, help="warm-up of each candidate (default 0.2)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    device = registry.find(args.backend) if args.backend else registry.choose()
    if device is None:
        raise InvalidArgumentError(
            "[tune] expected a GPU, got NumPy, which has no tiles to choose; name another device with --backend"
        )
    sizes = [("--seq-len", args.seq_len), *(("--head-dim", n) for n in args.head_dim)]
    for name, value in (*sizes, *(("--columns", n) for n in args.columns)):
        if value < 1 or (name == "--head-dim" and value > 256):
            raise InvalidArgumentError(f"[tune] expected {name} of at least 1 (head dimensions to 256), got {value}")
    print(f"{device.target.backend}:{device.index} {device.target.name}")
    for op in OPS if "all" in args.op else args.op:
        for wanted in _settings(op, args):
            for outcome in tune(device, op, wanted, args.seconds):
                _show(outcome)
    return 0


def _settings(op: str, args: argparse.Namespace) -> Iterator[Settings]:
    for dtype in args.dtype:
        if op == "rows":
            yield from (Settings(dtype, columns=columns) for columns in args.columns)
        else:
            for head_dim in args.head_dim:
                yield Settings(dtype, head_dim, args.seq_len, args.causal, args.mask)


def _show(outcome: Outcome) -> None:
    print(f"\n{outcome.case.name}")
    for one in outcome.measured:
        marks = (
            f"{'  (the table)' if one.use is None else ''}{'  <- kept' if one.use and one.use == outcome.saved else ''}"
        )
        print(f"  {_line(one, outcome.case.unit)}{marks}")
    if outcome.saved is None:
        print("  the table's choice stays")


def _line(measured: Measured, unit: str) -> str:
    what = f"{measured.speed:8.3f} {unit}" if not measured.refused else f"refused: {measured.refused[:60]}"
    return f"{_text(measured.use):60} {what}"


def _text(use: Mapping[str, Any] | None) -> str:
    """The fields of a choice that are not false."""
    if use is None:
        return "as it is"
    fields = {name: value for name, value in use.get("shape", use).items() if value is not False}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in fields.items()) or "the default"
