"""``aule bench``: measures attention, decoding and row operations on a device, beside PyTorch."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from aule._version import __version__
from aule.api.info import table
from aule.backends import registry
from aule.cli._figures import duration, speed
from aule.cli._measure import QUICK_ROUNDS, ROUNDS, Result
from aule.cli._progress import Progress
from aule.errors import BackendUnavailableError, InvalidArgumentError

_GROUPS = ("forward", "backward", "decode", "rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--backend", metavar="SPEC", help="a backend ('vulkan') or a device ('vulkan:1')")
    parser.add_argument("--quick", action="store_true", help="fewer cases, in less than a minute")
    parser.add_argument("--only", metavar="GROUPS", help=f"some of {', '.join(_GROUPS)}, separated by commas")
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON; '-' prints them instead of the table"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the results as CSV")
    parser.add_argument("--plot", metavar="FILE", help="draw them as .svg, .png or .pdf; needs matplotlib")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="compare two JSON files, without measuring")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.compare:
        print("\n".join(_compared(*map(_read, args.compare))))
        return 0
    groups = _GROUPS if args.only is None else tuple(args.only.split(","))
    if not set(groups) <= set(_GROUPS):
        raise InvalidArgumentError(
            f"[bench] expected --only with some of {', '.join(_GROUPS)}, got {args.only!r}; choose from these"
        )
    for path in (args.json, args.csv, args.plot):
        _check_path(path)
    draw = _plotter(args.plot) if args.plot else None
    document = _measured(args.backend, args.quick, groups, quiet=args.json == "-")
    if args.json == "-":
        print(json.dumps(document, indent=2))
    elif args.json:
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    if args.csv:
        Path(args.csv).write_text(_as_csv(document))
    if draw:
        draw(document, args.plot)
    return 0


def _measured(backend: str | None, quick: bool, groups: tuple[str, ...], quiet: bool) -> dict[str, Any]:
    """Measure all cases and return the document that ``--json`` writes."""
    found = registry.choose(backend)
    if found is None:
        raise BackendUnavailableError(
            registry.NUMPY,
            '[bench] expected a device to measure, got NumPy alone; pip install "aule-attention[cpu]" for the CPU',
        )
    device = f"{found.target.backend}:{found.index}"
    bench, torch_version = _bench(device, quick)
    document: dict[str, Any] = {
        "date": date.today().isoformat(),
        "aule": __version__,
        "device": device,
        "name": found.target.name,
        "driver": found.target.driver,
        "torch": torch_version,
        "python": platform.python_version(),
        "busy": _busy(),
    }
    results: list[Result] = []
    work = [(label, measure) for label, measure in bench.cases() if label.split()[0] in groups]
    with Progress(len(work)) as progress:
        if not quiet:
            progress.line(_headline(document))
            if document["busy"]:
                progress.line("Other programs keep this machine busy: times are longer than they should be, and vary.")
        for label, measure in work:
            progress.step(label)
            results.append(measure())
    document["results"] = [asdict(result) for result in results]
    if not quiet:
        print("\n".join(["", *_rows(results)]))
    return document


def _busy() -> bool:
    """Whether other programs use more than half of the processors; unknown, and so False, on Windows."""
    try:
        return os.getloadavg()[0] > (os.cpu_count() or 1) / 2
    except (AttributeError, OSError):
        return False


def _bench(device: str, quick: bool) -> tuple[Any, str | None]:
    """Return what measures on a device, and PyTorch's version if it takes part."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    backend = device.partition(":")[0]
    if backend in ("cpu", "cuda", "hip") and importlib.util.find_spec("torch") is not None:
        from aule.cli import _measure_torch

        place = "cpu" if backend == "cpu" else device.replace("hip", "cuda")  # ROCm's tensors are called so, too
        if place == "cpu" or _measure_torch.has_gpu(backend):
            return _measure_torch.TorchBench(place, quick, rounds), _measure_torch.VERSION
    from aule.cli._measure_device import DeviceBench

    return DeviceBench(device, quick, rounds), None


# -- output ------------------------------------------------------------------------------------------------------------


def _headline(document: dict[str, Any]) -> str:
    beside = f"beside PyTorch {document['torch']}" if document["torch"] else "PyTorch has no tensors there"
    return f"aule {document['aule']} on {document['device']} ({document['name']}), {beside}"


def _rows(results: list[Result]) -> list[str]:
    rows: list[tuple[str, ...]] = [("", "case", "dtype", "time", "speed", "times PyTorch", "fastest of PyTorch's")]
    for result in results:
        rows.append(
            (
                result.group,
                result.name,
                result.dtype,
                duration(result.seconds),
                speed(result.rate, result.unit),
                "-" if result.ratio is None else f"{result.ratio:.2f}x",
                "-" if result.peer_seconds is None else f"{result.peer}, {duration(result.peer_seconds)}",
            )
        )
    return table(rows)


def _as_csv(document: dict[str, Any]) -> str:
    out = io.StringIO()
    about = {"device_name" if k == "name" else k: value for k, value in document.items() if k != "results"}
    rows = [about | row for row in document["results"]]
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


_ABOUT = ("date", "aule", "device", "name", "torch")
_CASE = ("group", "name", "dtype", "seconds")


def _read(path: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        for name in _ABOUT:
            document[name]
        for result in document["results"]:
            for name in _CASE:
                result[name]
            if not result["seconds"] > 0:
                raise ValueError(f"a time of {result['seconds']}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, LookupError) else getattr(error, "strerror", None) or error
        raise InvalidArgumentError(
            f"[bench] expected a file written by `aule bench --json`, got {path} ({reason}); pass two of them to "
            "--compare"
        ) from None
    return document


def _compared(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lines with the speed of each case in both files."""
    lines = [f"old: {old['date']} {_headline(old)}", f"new: {new['date']} {_headline(new)}", ""]
    before = {(r["group"], r["name"], r["dtype"]): r for r in old["results"]}
    rows: list[tuple[str, ...]] = [("", "case", "dtype", "old", "new", "new is")]
    for result in new["results"]:
        known = before.get((result["group"], result["name"], result["dtype"]))
        if known is not None:
            times = (duration(known["seconds"]), duration(result["seconds"]))
            faster = f"{known['seconds'] / result['seconds']:.2f}x as fast"
            rows.append((result["group"], result["name"], result["dtype"], *times, faster))
    return [*lines, *(table(rows) if len(rows) > 1 else ["The two have no case in common."])]


def _check_path(path: str | None) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if path is None or path == "-":
        return
    file = Path(path)
    there = file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"[bench] expected a file that can be written, got {path} ({error.strerror or error}); choose another path"
        ) from None
    if not there:
        file.unlink()


def _plotter(path: str) -> Callable[[dict[str, Any], str], None]:
    from aule.cli._bench_plot import SUFFIXES, plot

    if Path(path).suffix not in SUFFIXES:
        raise InvalidArgumentError(f"[bench] expected --plot with {', '.join(SUFFIXES)}, got {path}; rename it")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            '[bench] expected matplotlib for --plot, got none; pip install "aule-attention[bench]"'
        )
    return plot
