"""Run PyTorch's own tests of FlexAttention on a CPU with aule where they compile it.

    python tools/flex_own_tests.py test_flex_attention.py [--graphs] [--skipped] [pytest arguments]

The file is ``test/inductor/test_flex_attention.py`` of the PyTorch release that is installed; it is in no package and
nothing of it is kept here. What the tests run without the compiler stays PyTorch's and is the reference, gradients
included, which PyTorch has on CPUs for such calls alone. Functions that they compile run uncompiled, on
`aule.flex_attention`; with ``--graphs`` they are compiled with the backend aot_eager, aule's operator in the graph;
``--skipped`` also runs those that PyTorch skips on CPUs. The summary counts tests that reached aule and lists the
failures by their first line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PLUGIN = '''
"""Puts aule in the place of compiled FlexAttention. Written by tools/flex_own_tests.py."""
import collections
import contextvars
import functools
import os
import unittest

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.testing._internal import common_device_type

import aule

GRAPHS = os.environ["FLEX_GRAPHS"] == "1"
original, real_compile = theirs.flex_attention, torch.compile
in_aule = contextvars.ContextVar("in_aule", default=False)
reached = []
counts, failures = collections.Counter(), collections.defaultdict(list)


@torch.compiler.assume_constant_result
def reach():
    reached.append(1)


def through_aule(*args, return_aux=None, **options):
    if return_aux is None:
        return aule.flex_attention(*args, **options)
    out, aux = aule.flex_attention(*args, return_aux=return_aux, **options)
    return out, theirs.AuxOutput(lse=aux.lse, max_scores=aux.max_scores)


@functools.wraps(original)
def flex_attention(*args, **options):
    if torch.compiler.is_compiling():
        reach()
        return through_aule(*args, **options)
    if in_aule.get():
        reached.append(1)
        return through_aule(*args, **options)
    return original(*args, **options)


def compile(function=None, **options):
    if function is None:
        return lambda f: compile(f, **options)
    if getattr(function, "__module__", "").startswith("torch.") and function is not flex_attention:
        return real_compile(function, **options)  # PyTorch's own use of it: its reference needs Dynamo
    if GRAPHS:
        if options.get("backend", "inductor") in ("inductor", None):
            options["backend"] = "aot_eager"
        options.pop("mode", None)
        return real_compile(function, **options)

    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        before = in_aule.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            in_aule.reset(before)

    return call


theirs.flex_attention = flex_attention
theirs._validate_device = lambda *args: None  # it refuses gradients on CPUs
if os.environ["FLEX_SKIPPED"] == "1":
    skip_cpu, skip_unless, instantiate = common_device_type.skipCPUIf, unittest.skipUnless, (
        common_device_type.instantiate_device_type_tests
    )

    def on_cpu(tests, scope, only_for=None, **options):
        instantiate(tests, scope, only_for="cpu", **options)

    common_device_type.skipCPUIf = lambda dep, reason: (lambda f: f) if dep is True else skip_cpu(dep, reason)
    common_device_type.instantiate_device_type_tests = on_cpu
    unittest.skipUnless = lambda met, reason: skip_unless(met or "Triton + A100" in reason, reason)
common_device_type._has_sufficient_memory = lambda *args: True  # asks psutil, for the shapes of GPUs
torch.compile = compile


def pytest_collection_finish(session):
    for module in {item.module for item in session.items}:
        module.DEVICE_SUPPORTS_BACKWARDS.items.add("cpu")


def pytest_runtest_setup():
    reached.clear()


def pytest_runtest_logreport(report):
    if report.when != "call" and not (report.when == "setup" and report.skipped):
        return
    kind = report.outcome if report.skipped or reached else report.outcome + ", without aule"
    counts[kind] += 1
    if report.failed:
        lines = [x[1:].strip() for x in report.longreprtext.splitlines() if x.startswith("E ")]
        failures[(lines or ["?"])[0][:110]].append(report.nodeid.rpartition("::")[2])


def pytest_terminal_summary(terminalreporter):
    write = terminalreporter.write_line
    for line, names in sorted(failures.items(), key=lambda x: -len(x[1])):
        write(f"{len(names):4} {line}")
        for name in names:
            write(f"       {name}")
    write(f"with aule in the place of compiled FlexAttention: {dict(sorted(counts.items()))}")
'''


def main() -> int:
    options, arguments = _parser().parse_known_args()
    with tempfile.TemporaryDirectory(prefix="flex-tests-") as folder:
        Path(folder, "with_aule.py").write_text(PLUGIN)
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        tests = Path(folder, "test_flex_attention.py")
        tests.write_bytes(Path(options.file).read_bytes())
        env = os.environ | {"FLEX_GRAPHS": str(int(options.graphs)), "FLEX_SKIPPED": str(int(options.skipped))}
        env["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "pytest", "-p", "with_aule", "--noconftest", "-c", "pytest.ini", "--tb=short"]
        return subprocess.run([*command, tests.name, *arguments], cwd=folder, env=env, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="test_flex_attention.py of PyTorch")
    parser.add_argument("--graphs", action="store_true", help="compile, with aule's operator in the graph")
    parser.add_argument("--skipped", action="store_true", help="also run what PyTorch skips on CPUs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
