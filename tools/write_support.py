"""Writes docs/support.md, and the short table in the README, from docs/support.json and docs/models.json.

    python tools/write_support.py           # both
    python tools/write_support.py --check   # are they what the files give?

The README's table stands between the lines ``<!-- support -->`` and ``<!-- /support -->``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "support.md", ROOT / "README.md"
BEGIN, END = "<!-- support -->", "<!-- /support -->"
SHOWN = {"run": "✓", "part": "partly", "stand-in": "○", "no": "–"}
MODEL_WAYS = {
    "aule": '`attn_implementation="aule"`',
    "cache": "`AuleCache`",
    "install": "`aule.install()`",
}
"""Keys of docs/models.json, and what they stand for."""

INTRODUCTION = """\
---
hide: [toc]
---

<!-- Written by tools/write_support.py from docs/support.json and docs/models.json. -->

# Features and devices

How far each feature was checked on each backend, as of {date}.

- **✓**: executed on a device of this kind, and compared with the float64 reference.
- **○**: compiled and executed on a stand-in, which runs the same source on the CPU. Results are compared in the same
  way. No AMD device (HIP) and no Apple device (Metal) has run it.
- **–**: not supported. The call raises an error, or works without it: on other arithmetic units, or with a copy.

The tests allow an error of 1e-5 of the largest output in float32. In float16 and bfloat16 they allow twice the error of
the same attention computed naively in that precision. More: [numerical contract](numerics.md).
"""

HOW = """\
## How it was checked

"The grid" is a list of test cases (`tests/grid.py`) that covers every pair of options.

- **NVIDIA H200**: all 110 cases of the grid, forward and gradients, through CUDA, Vulkan, OpenCL and WebGPU, with
  `tools/check_device.py`. CUDA and Vulkan also ran the gradients with `deterministic=True` and 96 random problems of
  2048 to 8192 rows. Every kind of CUDA kernel ran under compute-sanitizer.
- **Random calls**: `tools/fuzz.py` made 36,000 calls through CUDA and Vulkan. Every fault it found is fixed or
  described in the [numerical contract](numerics.md).
- **lavapipe, PoCL, wgpu**: the whole grid has passed on each. Each run of the tests takes a fifth of the forward
  cases per device, and a fourteenth of the gradients; `AULE_FULL_GRID=1` runs all.
- **AMD through HIP**: compiled and executed on a stand-in; no AMD device has run it. The whole grid has passed there
  for waves of 32 and 64 lanes; each run of the tests takes samples, on seven instruction sets. Matrix instructions are
  emulated as AMD's manuals describe them: [AMD GPUs](amd.md).
- **AMD through Vulkan, Intel**: their kernels have their own tile sizes, which no such device has run.
- **Apple**: the float16 and bfloat16 cases up to head dimension 128 passed through the shim, with simdgroup matrices.
  The layout of a matrix over a simdgroup is taken from others' reports.
"""


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    support, models = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("support.json", "models.json"))
    return json.loads(support), json.loads(models)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(data: dict[str, Any], models: dict[str, Any]) -> str:
    parts = [
        INTRODUCTION.format(date=data["date"]),
        "## Features\n\n" + features(data),
        "## Backends\n\n" + backends(data),
        "## Integrations\n\n" + integrations(data),
        "## Model families\n\n" + families(models),
        HOW,
    ]
    return "\n".join(parts)


def features(data: dict[str, Any]) -> str:
    names = [backend["name"] for backend in data["backends"]]
    rows = []
    for feature in data["features"]:
        notes = "; ".join(f"{name}: {note}" for name, note in feature.get("notes", {}).items())
        rows.append([feature["feature"], *(SHOWN[mark] for mark in feature["marks"]), notes])
    return table(["feature", *names, "notes"], rows)


def backends(data: dict[str, Any]) -> str:
    keys = ("name", "language", "run", "compiled")
    rows = [[backend[key] or "–" for key in keys] for backend in data["backends"]]
    return table(["backend", "language", "run on", "compiled for"], rows)


def integrations(data: dict[str, Any]) -> str:
    rows = [[one["name"], one["serves"], one["checked"]] for one in data["integrations"]]
    return table(["integration", "serves", "how far it was checked"], rows)


def families(models: dict[str, Any]) -> str:
    made = [result for result in models["results"]["transformers"].values() if "not made" not in result]
    versions = ", ".join(f"{name} {version}" for name, version in models["versions"].items())
    text = (
        "A tiny random model of each family of transformers, on the CPU in float32: outputs with and without\n"
        f"padding, gradients, and `generate`. {len(made)} families were checked on {models['date']} with\n"
        f"{versions}. All of them: [model families](models.md).\n\n"
    )
    verdicts = ("served", "handed on", "refused", "wrong")
    rows = []
    for way, name in MODEL_WAYS.items():
        found = [result.get(way, {}).get("verdict") for result in made]
        rows.append([name, *(str(found.count(verdict)) for verdict in verdicts)])
    head = ["used through", "served by aule", "does not reach aule", "refused with an error", "wrong"]
    return text + table(head, rows)


# -- the README --------------------------------------------------------------------------------------------------------


def readme_table(data: dict[str, Any]) -> str:
    """One line for each group of features: ✓ only where all of its features are."""
    names = [backend["name"] for backend in data["backends"]]
    rows = []
    for group, text in data["groups"].items():
        marks = [feature["marks"] for feature in data["features"] if feature["group"] == group]
        together = [set(column) for column in zip(*marks, strict=True)]
        rows.append([text, *(SHOWN[column.pop() if len(column) == 1 else "part"] for column in together)])
    rows.append(["*run on*", *(f"*{backend['short']}*" for backend in data["backends"])])
    legend = (
        "✓ executed and compared with float64; ○ compiled and executed on a stand-in; no AMD or Apple device\n"
        "has run it; – not supported\n"
    )
    return table(["", *names], rows) + "\n" + legend


def readme_with(table: str, text: str) -> str:
    """The README with the table between its two markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the support page and the README's support table.")
    parser.add_argument("--check", action="store_true", help="only say whether they are what the files give")
    args = parser.parse_args(argv)
    data, models = read()
    readme = README.read_text(encoding="utf-8")
    if BEGIN not in readme or END not in readme:
        sys.exit(f"{README.name} needs the lines {BEGIN} and {END}, with the table between them")
    wanted = {PAGE: page(data, models), README: readme_with(readme_table(data), readme)}
    differ = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in differ:
        if args.check:
            print(f"{path.name} differs; run python tools/write_support.py")
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if args.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
