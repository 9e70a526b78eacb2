"""``aule doctor``: what is installed, what is missing, and the commands that install it."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from aule import settings
from aule._version import __version__
from aule.api.attention import flash_attention
from aule.api.info import folded
from aule.cli._diagnosis import MISSING, OK, PACKAGES, PROBLEM, Finding, diagnose
from aule.cli._facts import Facts, gather
from aule.cli._figures import counted
from aule.errors import AuleError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.epilog = "Exit status: 0 if a fast device works, that is a GPU or the CPU engine, else 1."


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    facts = gather(tuple(package.name for package in PACKAGES))
    findings = [*diagnose(facts), _attention(facts)]
    works = findings[-1].status == OK
    if args.json:
        answer = {"version": __version__, "works": works, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join(_report(findings)))
    return int(not works)


def _attention(facts: Facts) -> Finding:
    """Compute a little on the device that calls use, and compare it with NumPy."""
    if facts.default is None:
        if facts.default_error:
            return Finding("result", "attention", PROBLEM, "no device, for the reason above")
        forced = settings.backend()
        text = f"AULE_BACKEND={forced} is used" if forced else "there is no GPU and no CPU engine"
        remedy = "unset AULE_BACKEND" if forced else 'pip install "aule-attention[cpu]"'
        return Finding("result", "attention", PROBLEM, f"{text}: NumPy is slow, without gradients", remedy)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 64), np.float32)
    try:
        found = flash_attention(q, k, v, backend=facts.default)
        error = float(np.abs(found - flash_attention(q, k, v, backend="numpy")).max())
    except AuleError as problem:
        return Finding("result", "attention", PROBLEM, problem.message)  # with its remedy
    if not error < 1e-4:
        text = f"{facts.default} is off by {error:.1e}"
        return Finding("result", "attention", PROBLEM, text, "run `aule check`, and report its output")
    slow = "" if facts.hardware.keys() - {"cpu"} or not facts.gpus else ", without the GPU"
    return Finding("result", "attention", OK, f"right on {facts.default}, which calls on host arrays use{slow}")


def _report(findings: list[Finding]) -> Iterator[str]:
    version = f"Python {platform.python_version()} ({sys.executable})"
    yield folded(f"aule {__version__}, {version}, {platform.platform()}", 5)
    area = ""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        if finding.area != area:
            area = finding.area
            yield f"\n{area[0].upper()}{area[1:]}"
        yield folded(f"  {finding.status:8} {finding.name:{width}}  {finding.text}".rstrip(), width + 13)
        if finding.remedy:
            yield folded(f"  {'':8} {'':{width}}  -> {finding.remedy}", width + 16)
    counts = {status: sum(finding.status == status for finding in findings) for status in (PROBLEM, MISSING)}
    yield f"\n{counted(counts[PROBLEM], 'problem')}; {counted(counts[MISSING], 'optional part')} missing"
