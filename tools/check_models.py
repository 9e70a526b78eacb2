"""Checks every model of transformers and diffusers with aule against its own attention, and writes the table.

    python tools/check_models.py                     all families: docs/models.json, docs/models.md
    python tools/check_models.py --library transformers --only llama,bloom  some of them, printed
    python tools/check_models.py --resume            only those that docs/models.json has no result of
    python tools/check_models.py --table             docs/models.md from docs/models.json

Models are tiny and random (``model_configs.py``, ``diffusers_configs.py``) and run on the CPU in a child process, which
is started again after a crash or a family that takes too long. The exit status is 1 if a family is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "models.json"
TABLE = ROOT / "docs" / "models.md"
SECONDS = 180
"""What a family may take."""

LIBRARIES = {
    "transformers": ("aule", "cache", "install"),
    "diffusers": ("backend", "processor", "install"),
}
"""The ways in which each library is checked."""
MODULES = {"transformers": "model_checks", "diffusers": "diffusers_checks"}


def main() -> int:
    """Run the checks and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="families or classes, separated by commas; prints their results")
    parser.add_argument("--library", choices=LIBRARIES, help="check one library only")
    parser.add_argument("--resume", action="store_true", help="keep the results that there are")
    parser.add_argument("--table", action="store_true", help="write the table only")
    parser.add_argument("--worker", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return _work(arguments.worker)
    data = _read() if arguments.resume or arguments.table else _empty()
    if arguments.only:
        data = _empty()
    if not arguments.table:
        for library in [arguments.library] if arguments.library else LIBRARIES:
            known = data["results"].setdefault(library, {})
            wanted = arguments.only.split(",") if arguments.only else _names(library)
            for name, result in _results(library, [n for n in wanted if n not in known]):
                known[name] = _short(result)
                if arguments.only:
                    print(name, json.dumps(result))
                else:
                    _write(data)
    if not arguments.only:
        TABLE.write_text(table(data))
    return 1 if wrong(data) else 0


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the inputs and without the remedies of errors, which are always the same."""
    kept = {name: value for name, value in result.items() if name != "inputs"}
    for name, found in kept.items():
        if isinstance(found, dict) and "message" in found:
            kept[name] = {**found, "message": found["message"].split(";")[0]}
    return kept


def _write(data: dict[str, Any]) -> None:
    """Write the results, one family a line."""
    text = json.dumps(data, indent=1, sort_keys=True)
    text = re.sub(r"\n {4,}", " ", text)  # what is inside of a family
    DATA.write_text(re.sub(r"\n {3}\}", " }", text) + "\n")


def _empty() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", *LIBRARIES)}
    return {"date": datetime.date.today().isoformat(), "versions": versions, "results": {}}


def _read() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else _empty()
    return data


# -- child processes ---------------------------------------------------------------------------------------------------


def _checks(library: str) -> Any:
    return importlib.import_module(MODULES[library])


def _names(library: str) -> list[str]:
    names: list[str] = _checks(library).families()
    return names


def _work(library: str) -> int:
    """Check the names that come in line by line, and write a result for each; other output goes to stderr."""
    import torch

    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr
    checks = _checks(library)
    for line in sys.stdin:
        try:
            result = checks.check(line.strip())
        except Exception as error:
            result = {"class": line.strip(), "not made": f"the check failed: {type(error).__name__}: {error}"}
        out.write(json.dumps(result) + "\n")
        out.flush()
    return 0


def _results(library: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    worker = None
    for name in names:
        if worker is None:
            command = [sys.executable, __file__, "--worker", library]
            pipe = subprocess.PIPE
            worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(name + "\n")
        worker.stdin.flush()
        ready = select.select([worker.stdout], [], [], SECONDS)[0]
        line = worker.stdout.readline() if ready else ""
        if line:
            yield name, json.loads(line)
            continue
        worker.kill()
        status = worker.wait()
        why = f"took more than {SECONDS} s" if not ready else f"ended its process with status {status}"
        verdict = {"not made": why} if not ready else {LIBRARIES[library][0]: {"verdict": "wrong", "message": why}}
        worker = None
        yield name, {"class": name, **verdict}
    if worker is not None and worker.stdin is not None:
        worker.stdin.close()
        worker.wait()


# -- the table ---------------------------------------------------------------------------------------------------------


def wrong(data: dict[str, Any]) -> list[str]:
    """Return the families with a wrong result."""
    found = []
    for library, ways in LIBRARIES.items():
        for name, result in data["results"].get(library, {}).items():
            if any(result.get(way, {}).get("verdict") == "wrong" for way in ways):
                found.append(name)
    return found


INTRODUCTION = """# Models

Which models work with aule: every family of transformers and every model class of diffusers of which a tiny random
model could be made. Each is run with aule's attention and with its own; outputs with and without padding, gradients,
and `generate` (where the class has it) are compared. Written by `tools/check_models.py` on {date}, on the CPU in
float32, with {versions}.

- **served**: aule computed attention, and the results agree (relative error below 1e-3).
- **handed on**: no call reached aule, and the results agree: the model has no attention, or code of its own for it.
  `set_attention_backend("aule")` says so in a warning, also if it reaches only some layers (served in part).
- **refused**: an error names the reason and what to use instead.
- **wrong**: the results differ, or attention is not served without a word. There must be none.

Gradients of audio models are compared without padding. If every key of a row is padding, its result is undefined: such
rows are left out if the output has the length of the input; otherwise PyTorch's attention is the reference (*).
"""

COLUMNS = {
    "aule": '`attn_implementation="aule"`',
    "cache": "`AuleCache`",
    "install": "`aule.install()`",
    "backend": '`set_attention_backend("aule")`',
    "processor": "`AuleAttnProcessor`",
}


def table(data: dict[str, Any]) -> str:
    """Return the page of all results."""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [INTRODUCTION.format(date=data["date"], versions=versions)]
    for library, ways in LIBRARIES.items():
        results = data["results"].get(library, {})
        made = {name: result for name, result in results.items() if "not made" not in result}
        lines += [f"## {library}", "", _counts(made, ways, len(results) - len(made)), ""]
        first = ["class"] if library == "diffusers" else ["family", "class"]
        lines += [f"| {' | '.join([*first, *(COLUMNS[way] for way in ways), 'compared'])} |"]
        lines += ["|---" * (len(first) + len(ways) + 1) + "|"]
        for name, result in sorted(made.items()):
            cells = [name, result["class"]][-len(first) :] + [_cell(result.get(way, {})) for way in ways]
            lines += [f"| {' | '.join(cells)} | {', '.join(result.get('compared', ()))} |"]
        lines += ["", f"### Not made ({library})", "", f"| {first[0]} | reason |", "|---|---|"]
        for name, result in sorted(results.items()):
            if "not made" in result:
                lines += [f"| {name} | {result['not made'][:150].replace('|', '/')} |"]
        lines += [""]
    return "\n".join(lines)


def _counts(made: dict[str, Any], ways: tuple[str, ...], missing: int) -> str:
    parts = []
    for way in ways:
        verdicts = [result.get(way, {}).get("verdict") for result in made.values()]
        counted = {v: verdicts.count(v) for v in ("served", "handed on", "refused", "wrong")}
        parts.append(f"{COLUMNS[way]}: " + ", ".join(f"{number} {verdict}" for verdict, number in counted.items()))
    return f"{len(made)} checked, {missing} not made. " + "; ".join(parts) + "."


def _cell(found: dict[str, Any]) -> str:
    star = " (*)" if found.get("reference") == "sdpa" else ""
    part = " in part" if found.get("verdict") == "served" and found.get("others") else ""
    return f"{found.get('verdict', '')}{part}{star}"


if __name__ == "__main__":
    sys.exit(main())
