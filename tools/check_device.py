"""Checks the library on a machine with a GPU, in parallel and within a time limit.

    python tools/check_device.py --limit 130                      everything
    python tools/check_device.py --limit 60 --only grids,big      some parts
    python tools/check_device.py --limit 60 --backends vulkan --out FOLDER

Parts: ``grids`` are the pairwise grids of attention, forward, gradients and deterministic gradients; ``tests`` all
other tests marked `device` for these backends, except those of runtimes; ``big`` long sequences against PyTorch;
``sanitize`` a problem for each kind of kernel under compute-sanitizer. The most important tests run first. When time is
up everything is stopped, and the summary lists what was not run. The exit status is 1 if a test failed, 2 if none
failed but some were not run, otherwise 0.

``--out`` saves the summary, the text of every failure, a line for each test and the sanitizer's reports.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("grids", "tests", "big", "sanitize")
BACKENDS = ("cuda", "vulkan", "opencl", "webgpu")
TOOLS = {"racecheck": 3, "memcheck": 2, "initcheck": 2}
"""The sanitizer's, and the processes that share the kinds of kernels under each: the first is the slowest."""
SANITIZER = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
LAST_START = 4.0
"""Seconds before the end in which nothing is begun."""
SUMMING_UP = 1.5
"""Seconds before the end at which everything is stopped."""
OUTCOMES = ("passed", "failed", "skipped", "cut off", "not run")
MOST_LISTED = 40
"""Lines of the summary for failures; all of them are in a file."""


@dataclass
class Result:
    """What became of one test."""

    outcome: str = "not run"
    text: str = ""
    took: float = 0.0


@dataclass
class Pool:
    """Processes that take tests from one list."""

    name: str
    folder: Path
    command: list[str]
    count: int
    processes: dict[subprocess.Popen[bytes], Path] = field(default_factory=dict)
    """Those that run, with their output."""
    spare: int = 0
    """How many more may be started in the place of ones that a device was lost to."""
    crashed: dict[int, str] = field(default_factory=dict)
    """How processes ended that did not come to their end, by process id."""

    def start(self) -> None:
        path = self.folder / f"output{len(list(self.folder.glob('output*')))}.txt"
        with path.open("ab") as output:
            process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes[process] = path

    def look(self) -> None:
        """Take note of processes that have ended, and replace those that did so before their time."""
        for process in [process for process in self.processes if process.poll() is not None]:
            path = self.processes.pop(process)
            ends = [line["outcome"] for line in self.lines() if not line["test"] and line["session"] == process.pid]
            if not ends or process.returncode < 0:
                self.crashed[process.pid] = f"the process ended with {ending(process.returncode)}\n{tail(path)}"
            if "finished" not in ends and self.spare and (self.folder / "list.json").exists():
                self.spare -= 1
                self.start()

    def lines(self) -> Iterator[dict[str, Any]]:
        """What the processes wrote down."""
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:  # it was killed while it wrote
                    continue

    def stop(self) -> None:
        """They need not be waited for: a driver may take seconds to clear up behind one, which writes no more."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def results(self) -> dict[tuple[str, str, str], dict[str, Result]]:
        """By part, group and backend, of each test."""
        found: dict[str, Result] = {}
        worse = ("started", "passed", "skipped", "failed")
        by_process: dict[int, str] = {}
        for line in self.lines():
            test, outcome = line["test"], line["outcome"]
            if not test:
                by_process.pop(line["session"], None)
                continue
            known = found.setdefault(test, Result("started"))
            if outcome == "started":
                by_process[line["session"]] = test
            elif worse.index(outcome) >= worse.index(known.outcome):
                found[test] = Result(outcome, line["text"], line["took"])
        for process, test in by_process.items():
            if process in self.crashed and found[test].outcome == "started":
                found[test] = Result("failed", self.crashed.pop(process))
        for result in found.values():
            result.outcome = "cut off" if result.outcome == "started" else result.outcome
        groups: dict[tuple[str, str, str], dict[str, Result]] = collections.defaultdict(dict)
        listed = self.folder / "list.json"
        for test, *place in json.loads(listed.read_text()) if listed.exists() else ():
            part, group, backend = place
            groups[part, group, backend][test] = found.pop(test, Result())
        for number, text in enumerate(self.crashed.values()):
            found[f"{self.name}, process {number}"] = Result("failed", text)
        if found:  # files that were not collected, and processes that came to nothing
            groups[self.name, "before the tests", ""] = found
        elif not listed.exists():
            groups[self.name, "before the tests", ""] = {"collecting": Result("cut off")}
        return groups


def environment() -> dict[str, str]:
    """One thread for each process, since they are as many as there are cores, and kernels of this check alone."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = [str(ROOT / "src"), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | single | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def pools(args: argparse.Namespace, work: Path, until: float) -> list[Pool]:
    """Everything that is to run at the same time."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "shared_tests"]
    pytest += ["--capture=sys", "--tb=short", f"--until={until}"]
    made = []
    parts = [part for part in args.only if part != "sanitize"]
    if parts:
        marked = [path for path in args.folder.rglob("test_*.py") if "pytest.mark.device" in path.read_text()]
        asked = [f"--backends={','.join(args.backends)}", f"--parts={','.join(parts)}", *map(str, sorted(marked))]
        made.append(Pool("tests", work / "tests", [*pytest, *asked], args.workers, spare=args.workers))
    sanitizer = next(filter(None, map(shutil.which, SANITIZER)), None)
    if "sanitize" in args.only and sanitizer and "cuda" in args.backends:
        for tool, count in TOOLS.items():
            asked = ["--backends=cuda", "--parts=sanitize", *map(str, args.folder.rglob("test_kinds.py"))]
            made.append(Pool(tool, work / tool, [sanitizer, "--tool", tool, *pytest, *asked], count))
    for pool in made:
        pool.folder.mkdir()
        pool.command.append(f"--shared={pool.folder}")
    return made


def reports(pool: Pool) -> dict[str, list[str]]:
    """What a sanitizer reported, by the test that ran then."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for path in sorted(pool.folder.glob("output*.txt")):
        test = ""
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("-- "):
                test = line[3:]
            elif re.match(r"========= (?! |COMPUTE-SANITIZER|.*SUMMARY)", line):
                found[test].append(line)
    return found


def gathered(made: list[Pool]) -> dict[tuple[str, str, str], dict[str, Result]]:
    """The results of all pools; under a sanitizer a test passes when nothing was reported."""
    groups: dict[tuple[str, str, str], dict[str, Result]] = {}
    for pool in made:
        found = pool.results()
        if pool.name in TOOLS:
            found = {("sanitize", pool.name, backend): group for (_, _, backend), group in found.items()}
            for test, lines in reports(pool).items():
                group = next((group for group in found.values() if test in group), None)
                if group is None:
                    group, test = found.setdefault(("sanitize", pool.name, ""), {}), "between the tests"
                group[test] = Result("failed", "\n".join(lines))
        groups |= found
    return groups


def summary(groups: dict[tuple[str, str, str], dict[str, Result]], seconds: float, limit: float) -> str:
    """A row for each group of tests and a column for each backend; what did not go well, one by one."""
    total = collections.Counter(result.outcome for group in groups.values() for result in group.values())
    order = sorted(groups, key=lambda place: (PARTS.index(place[0]) if place[0] in PARTS else -1, place))
    columns = [backend for backend in (*BACKENDS, "") if any(place[2] == backend for place in order)]
    lines = [f"{'what passed, and what not':32}" + "".join(f"{backend:20}" for backend in columns) + "seconds of all"]
    for row in dict.fromkeys(place[:2] for place in order):
        cells = [groups.get((*row, backend), {}).values() for backend in columns]
        took = sum(result.took for cell in cells for result in cell)
        lines.append(f"{' '.join(row):32}" + "".join(f"{counted(cell):20}" for cell in cells) + f"{took:.0f}")
    reasons = collections.Counter(
        (place[2], shortened(r.text)) for place in order for r in groups[place].values() if r.outcome == "skipped"
    )
    lines += [f"skipped {count:4} {backend}: {reason}" for (backend, reason), count in reasons.most_common(12)]
    for word in ("cut off", "failed"):
        listed = [(place, t, r) for place in order for t, r in groups[place].items() if r.outcome == word]
        for place, test, result in listed[:MOST_LISTED]:
            said = f": {shortened(last(result.text))}" if result.text else ""
            lines.append(f"{word.upper()} {place[0]} {place[1]} {test.removeprefix('tests/')}{said}")
        if len(listed) > MOST_LISTED:
            lines.append(f"and {len(listed) - MOST_LISTED} more {word}")
    lines.append(f"{seconds:.0f} of {limit:.0f} s; " + ", ".join(f"{total[name]} {name}" for name in OUTCOMES))
    return "\n".join(lines)


def counted(results: Iterable[Result]) -> str:
    """``107 1F 2C``: how many passed, and how many did not, by the first letter of what became of them."""
    counts = collections.Counter(result.outcome for result in results)
    rest = [f"{counts[name]}{name[0].upper()}" for name in OUTCOMES[1:] if counts[name]]
    return " ".join([str(counts["passed"]), *rest]) if counts else ""


def last(text: str) -> str:
    """The line of a failure that says most: the error itself, where pytest has marked it."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return marked[0] if marked else text.strip().splitlines()[0]


def shortened(text: str, length: int = 160) -> str:
    text = " ".join(text.split()).removeprefix("Skipped: ")
    return text if len(text) <= length else text[: length - 1] + "…"


def keep(out: Path, said: str, groups: dict[tuple[str, str, str], dict[str, Result]], made: list[Pool]) -> None:
    """Few files, whatever was run."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.txt").write_text(said + "\n")
    listed = [(place, test, result) for place, group in groups.items() for test, result in group.items()]
    with (out / "results.tsv").open("w") as file:
        for place, test, result in listed:
            print(*place, test, result.outcome, f"{result.took:.2f}", sep="\t", file=file)
    failed = [f"{' '.join(place)} {test}\n{r.text}\n" for place, test, r in listed if r.outcome == "failed"]
    (out / "failures.txt").write_text("\n".join(failed))
    with (out / "output.txt").open("w") as file:
        for pool in made:
            for path in sorted(pool.folder.glob("output*.txt")):
                print(f"\n== {pool.name} {path.stem}\n{path.read_text(errors='replace')[-20000:]}", file=file)


def names(known: tuple[str, ...]) -> Any:
    def parsed(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        return chosen

    return parsed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, required=True, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="folder to keep results in")
    parser.add_argument("--only", type=names(PARTS), default=list(PARTS), help="parts, separated by commas")
    parser.add_argument("--backends", type=names(BACKENDS), default=list(BACKENDS), help="likewise")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that run tests")
    parser.add_argument("--folder", type=Path, default=ROOT / "tests", help="where the tests are")
    args = parser.parse_args()
    began, now = time.monotonic(), time.time()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped from outside"))
    with tempfile.TemporaryDirectory(prefix="check-device-", ignore_cleanup_errors=True) as name:
        os.environ["AULE_CACHE_DIR"] = str(Path(name, "cache"))
        made = pools(args, Path(name), now + args.limit - LAST_START)
        try:
            for pool in made:
                for _ in range(pool.count):
                    pool.start()
            while any(pool.processes for pool in made) and time.monotonic() < began + args.limit - SUMMING_UP:
                time.sleep(0.1)
                for pool in made:
                    pool.look()
        finally:
            for pool in made:
                pool.stop()
        groups = gathered(made)
        if "sanitize" in args.only and not any(pool.name in TOOLS for pool in made):
            groups["sanitize", "without its tool", "cuda"] = {"all kinds of kernels": Result()}
        said = summary(groups, time.monotonic() - began, args.limit)
        print(said, flush=True)
        if args.out:
            keep(args.out, said, groups, made)
    outcomes = {result.outcome for group in groups.values() for result in group.values()}
    return 1 if "failed" in outcomes else 2 if outcomes & {"cut off", "not run"} else 0


if __name__ == "__main__":
    sys.exit(main())
