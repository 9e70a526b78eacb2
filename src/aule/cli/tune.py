"""``aule tune``: measures the fastest shapes on a device and stores them; lists and removes what it stored."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from aule.api.info import table
from aule.backends import registry
from aule.cli._figures import counted, speed
from aule.engine.tune import Measured, Outcome, tune
from aule.engine.tune_cases import OPS, Settings
from aule.errors import InvalidArgumentError
from aule.ops.attention.checks import MAX_HEAD_DIM
from aule.runtime.base import Device
from aule.store.folder import Untrusted
from aule.tuning import Record, own

_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "f16": "f16", "bf16": "bf16", "f32": "f32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--backend", metavar="SPEC", help="the device, as 'vulkan:0'; default: the one that calls use")
    known = parser.add_mutually_exclusive_group()
    known.add_argument("--list", action="store_true", help="list what was measured before, without measuring")
    known.add_argument("--reset", action="store_true", help="remove that: of one device with --backend, else of all")
    parser.add_argument("--json", action="store_true", help="print the results, or the list, as JSON")
    parser.add_argument("--op", nargs="+", choices=(*OPS, "all"), default=["forward"], help="default: forward")
    parser.add_argument(
        "--dtype", nargs="+", choices=tuple(_DTYPES), default=["f16", "bf16", "f32"], help="default: all three"
    )
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128], metavar="N", help="default: 64 128")
    parser.add_argument("--seq-len", type=int, default=2048, metavar="N", help="sequence length (default 2048)")
    parser.add_argument("--columns", nargs="+", type=int, default=[4096], metavar="N", help="of rows (default 4096)")
    parser.add_argument("--causal", action="store_true", help="row i attends to keys 0..i")
    parser.add_argument("--mask", action="store_true", help="with a boolean mask")
    parser.add_argument("--seconds", type=float, default=0.2, help="warm-up of each candidate (default 0.2)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.list or args.reset:
        return _known(args)
    device = registry.find(args.backend) if args.backend else registry.choose()
    if device is None:
        raise InvalidArgumentError(
            "[tune] expected a GPU, got NumPy, which has no tiles to choose; name another device with --backend"
        )
    _check(args)
    if not args.json:
        print(f"{device.target.backend}:{device.index} {device.target.name}", flush=True)
    outcomes = []
    for outcome in _outcomes(device, args):
        outcomes.append(outcome)
        if not args.json:
            _show(outcome)
    if args.json:
        where = {"device": f"{device.target.backend}:{device.index}", "name": device.target.name}
        print(json.dumps(where | {"cases": [_as_dict(outcome) for outcome in outcomes]}, indent=2))
    return 0


def _check(args: argparse.Namespace) -> None:
    sizes = [("--seq-len", args.seq_len), *(("--head-dim", n) for n in args.head_dim)]
    for name, value in (*sizes, *(("--columns", n) for n in args.columns)):
        if value < 1 or (name == "--head-dim" and value > MAX_HEAD_DIM):
            raise InvalidArgumentError(
                f"[tune] expected {name} of {f'1 to {MAX_HEAD_DIM}' if name == '--head-dim' else 'at least 1'}, got "
                f"{value}; change it"
            )
    if not (math.isfinite(args.seconds) and args.seconds >= 0):
        raise InvalidArgumentError(f"[tune] expected --seconds of 0 or more, got {args.seconds}; change it")


def _outcomes(device: Device, args: argparse.Namespace) -> Iterator[Outcome]:
    for op in OPS if "all" in args.op else args.op:
        for wanted in _settings(op, args):
            yield from tune(device, op, wanted, args.seconds)


def _settings(op: str, args: argparse.Namespace) -> Iterator[Settings]:
    for dtype in dict.fromkeys(_DTYPES[name] for name in args.dtype):
        if op == "rows":
            yield from (Settings(dtype, columns=columns) for columns in args.columns)
        else:
            for head_dim in args.head_dim:
                yield Settings(dtype, head_dim, args.seq_len, args.causal, args.mask)


# -- what was measured before ------------------------------------------------------------------------------------------


def _known(args: argparse.Namespace) -> int:
    """List or remove the records on disk."""
    device = registry.find(args.backend) if args.backend else None
    if args.backend and device is None:
        raise InvalidArgumentError("[tune] expected a device, got numpy, which has no records; leave --backend out")
    try:
        found = own.saved()
    except Untrusted as error:
        raise InvalidArgumentError(
            f"[tune] expected a cache of your own, got: {error}; change AULE_CACHE_DIR"
        ) from None
    if device is not None:
        name = own.file_name(device.target)
        found = {name: found[name]} if name in found else {}
    if args.reset:
        for name in found:
            own.remove(name)
    records = [record for group in found.values() for record in group]
    if args.json:
        print(json.dumps({"removed" if args.reset else "records": [json.loads(r.line()) for r in records]}, indent=2))
    elif args.reset:
        print(f"{counted(len(records), 'record')} removed; the tables that came with aule apply again")
    else:
        print("\n".join(_listed(records)))
    return 0


def _listed(records: list[Record]) -> list[str]:
    if not records:
        return ["Nothing was measured yet: the tables that came with aule apply. Run aule tune to measure."]
    rows: list[tuple[str, ...]] = [("device", "date", "operation", "when", "choice")]
    for record in records:
        where: Mapping[str, Any] = record.measured if isinstance(record.measured, dict) else {}
        when = ", ".join(f"{name} {_condition(value)}" for name, value in record.when.items())
        rows.append((where.get("device", "-"), where.get("date", "-"), record.op, when, _text(record.use)))
    return table(rows)


def _condition(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value.get('min', '')}..{value.get('max', '')}"
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


# -- output ------------------------------------------------------------------------------------------------------------


def _show(outcome: Outcome) -> None:
    print(f"\n{outcome.case.name}")
    for one in outcome.measured:
        marks = (
            f"{'  (the table)' if one.use is None else ''}{'  <- kept' if one.use and one.use == outcome.saved else ''}"
        )
        print(f"  {_line(one, outcome.case.unit)}{marks}", flush=True)
    if outcome.saved is None:
        print("  the table's choice stays")


def _line(measured: Measured, unit: str) -> str:
    what = speed(measured.speed, unit) if not measured.refused else f"refused: {measured.refused[:60]}"
    return f"{what:>12}  {_text(measured.use)}"


def _text(use: Mapping[str, Any] | None) -> str:
    """The fields of a choice that are not false."""
    if use is None:
        return "as it is"
    fields = {name: value for name, value in use.get("shape", use).items() if value is not False}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in fields.items()) or "the default"


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    measured = [{"use": m.use, "speed": m.speed, "refused": m.refused or None} for m in outcome.measured]
    case = outcome.case
    return {"case": case.name, "op": case.op, "unit": case.unit, "measured": measured, "saved": outcome.saved}
