"""``aule check``: compares every device with the fp64 reference."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aule._version import __version__
from aule.api.attention import flash_attention
from aule.api.context import Aule
from aule.backends import registry
from aule.cli._cases import CASES, HEADLINE, QUICK, Case
from aule.cli._figures import duration, speed
from aule.cli._progress import Progress
from aule.frontends.numpy import bfloat16
from aule.ops.attention.reference import compare

Array = npt.NDArray[Any]

_OK, _WRONG, _SKIPPED = "ok", "WRONG", "skipped"


@dataclass(frozen=True)
class Result:
    """The result of one case on one device.

    Attributes
    ----------
    error, tolerance : float or None
        Largest error of the output, and the allowed error; None without an output.
    first_seconds, seconds : float or None
        Times of the first call, which builds the kernel or loads it from disk, and of the second. Both include the
        copies of host arrays to the device and back.
    """

    device: str
    case: str
    status: str
    error: float | None = None
    tolerance: float | None = None
    first_seconds: float | None = None
    seconds: float | None = None
    message: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--backend", metavar="SPEC", help="check only this backend ('vulkan') or device ('vulkan:1')")
    parser.add_argument("--quick", action="store_true", help="a few cases on each device, in seconds")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    devices = _devices(args.backend)
    refused = {} if args.backend else registry.errors()
    best, cases = _best(args.backend), QUICK if args.quick else CASES
    work = [(device, case) for device in devices for case in cases if _applies(device, case)]
    if args.json:
        headline = _check(best, HEADLINE)
        results = [_check(device, case) for device, case in work]
        answer = {
            "version": __version__,
            "headline": asdict(headline),
            "results": [asdict(r) for r in results],
            "refused": refused,
        }
        print(json.dumps(answer, indent=2))
    else:
        headline, results = _run_printing(best, devices, refused, work)
    return int(any(r.status == _WRONG for r in (headline, *results)))


def _run_printing(
    best: str, devices: dict[str, str], refused: dict[str, str], work: list[tuple[str, Case]]
) -> tuple[Result, list[Result]]:
    with Progress(len(work) + 1) as progress:
        progress.step(f"{best} {HEADLINE.name}")
        headline = _check(best, HEADLINE)
        progress.line(_headline(headline, devices[best]))
        for device, name in devices.items():
            progress.line(f"  {device:9} {name}")
        progress.line("")
        widths = (max(len(d) for d in ("device", *devices)), max(len(c.name) for c in CASES))
        progress.line(_row(("device", "case", "max error", "allowed", "first call", "again", ""), widths))
        results = []
        for device, case in work:
            progress.step(f"{device} {case.name}")
            results.append(_check(device, case))
            progress.line(_row(_cells(results[-1]), widths))
    wrong = [r for r in (headline, *results) if r.status == _WRONG]
    skipped = sum(r.status == _SKIPPED for r in results)
    print()
    for name, reason in refused.items():
        print(f"{name} was not checked: {reason}")
    done = f"{len(results) + 1 - len(wrong) - skipped} of {len(results) + 1} checks right"
    print(done + (f", {skipped} skipped" if skipped else "") + (f", {len(wrong)} WRONG" if wrong else ""))
    return headline, results


def _devices(spec: str | None) -> dict[str, str]:
    """Return the devices to check: their names for ``backend=``, and the driver's names."""
    chosen = None if spec is None else registry.find(spec)
    if spec is None:
        found = [d for group in registry.available().values() for d in group]
    elif chosen is None:  # NumPy
        found = []
    else:
        found = [chosen] if ":" in spec else registry.devices(chosen.target.backend)
    named = {f"{d.target.backend}:{d.index}": d.target.name for d in found}
    if spec is None or not found:
        named[registry.NUMPY] = f"NumPy {np.__version__}"
    return named


def _best(spec: str | None) -> str:
    device = registry.choose(spec)
    return registry.NUMPY if device is None else f"{device.target.backend}:{device.index}"


def _applies(device: str, case: Case) -> bool:
    return case.dtype != "f64" or device.partition(":")[0] in (registry.NUMPY, "cpu")


def _check(device: str, case: Case) -> Result:
    """Run a case twice and compare it with the reference. Any exception counts as a failed case."""
    if case.dtype == "bf16" and device == registry.NUMPY and bfloat16() is None:
        return Result(device, case.name, _SKIPPED, message="NumPy needs ml_dtypes for bfloat16")
    try:
        expected = case.expected
        start = time.perf_counter()
        _compute(device, case)
        middle = time.perf_counter()
        out, lse = _compute(device, case)
        end = time.perf_counter()
        verdict = compare(case.problem, out, lse, expected)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return Result(device, case.name, _WRONG, message=message)
    return Result(
        device,
        case.name,
        _OK if verdict else _WRONG,
        verdict.error,
        verdict.tolerance,
        middle - start,
        end - middle,
        "" if verdict else verdict.message,
    )


def _compute(device: str, case: Case) -> tuple[Array, Array]:
    if case.dtype == "bf16":
        return _bf16(device, case)
    arguments: dict[str, Any] = {**case.inputs, **case.options}
    out, lse = flash_attention(**arguments, return_lse=True, backend=device)
    return out, lse


def _bf16(device: str, case: Case) -> tuple[Array, Array]:
    """Compute a bfloat16 case. Device tensors take the bits, so ml_dtypes is not needed, and are tested this way."""
    if device == registry.NUMPY:
        arrays: dict[str, Any] = {name: array.view(bfloat16()) for name, array in case.inputs.items()}
        out, lse = flash_attention(**arrays, **case.options, return_lse=True, backend=device)
        return out, lse
    with Aule(device) as gpu:
        q, k, v = (gpu.tensor(case.inputs[n].shape, "bfloat16").upload(case.inputs[n]) for n in ("q", "k", "v"))
        shape = (*q.shape[:3], v.shape[3])
        result, sums = gpu.tensor(shape, "bfloat16"), gpu.tensor(shape[:3])
        gpu.attention_forward_with_lse(q, k, v, result, sums, **case.options)
        return result.download(), sums.download()


# -- output ------------------------------------------------------------------------------------------------------------


def _headline(result: Result, name: str) -> str:
    p = HEADLINE.problem
    what = f"attention [{p.batch}, {p.heads_q}, {p.seq_q}, {p.head_dim}] float32 causal on {result.device} ({name})"
    if result.seconds is None:
        return f"{what}: {result.status}, {result.message}"
    verdict = f"error {result.error:.1e} of {result.tolerance:.1e} allowed"
    took = f"{duration(result.seconds)}, {speed(p.flops / result.seconds / 1e9, 'GFLOP/s')} with copies"
    return f"{what}: {result.status}, {verdict}, {took}{result.message and f'; {result.message}'}"


def _cells(result: Result) -> tuple[str, ...]:
    def number(x: float | None) -> str:
        return "-" if x is None else f"{x:.1e}"

    def time_taken(x: float | None) -> str:
        return "-" if x is None else duration(x)

    return (
        result.device,
        result.case,
        number(result.error),
        number(result.tolerance),
        time_taken(result.first_seconds),
        time_taken(result.seconds),
        f"{result.status} {result.message}".rstrip(),
    )


def _row(cells: tuple[str, ...], widths: tuple[int, int]) -> str:
    device, case, error, allowed, first, again, status = cells
    columns = f"{device:{widths[0]}}  {case:{widths[1]}}  {error:>9}  {allowed:>9}  {first:>11}  {again:>10}  {status}"
    return columns.rstrip()
