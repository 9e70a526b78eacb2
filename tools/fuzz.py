"""Random calls of every operation, compared with the oracle.

    python tools/fuzz.py --seed 7 --cases 1000 --backend cpu --ops attention --out /tmp/failures
    python tools/fuzz.py --seconds 300 --backend vulkan --ops all --isolate
    python tools/fuzz.py --hypothesis --cases 500 --ops rows
    python tools/fuzz.py --case failures/3.json

Case ``n`` of a seed is the same on every machine and in every run with the same ``--together``. A failure is made
smaller and written to ``--out`` as a case (``.json``) and as a script (``.py``) that needs only NumPy, torch and aule.
With ``--isolate`` cases run in a child process, which is started again if a case ends it or takes longer than two
minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing import attention, decode, report, rows, space
from fuzzing.trial import Trial, verdict

Case = dict[str, Any]
GROUPS = tuple(space.GROUPS)
MAKERS: dict[str, Callable[[Case], Trial]] = {
    "flash_attention": attention.flash_attention, "sdpa": attention.flash_attention, "varlen": attention.varlen,
    "decode": decode.decode, "paged": decode.decode, "cache": decode.cache,
    **dict.fromkeys(space.ROW_OPS, rows.rows),
}  # fmt: skip
HANG = 120.0
"""Seconds after which a case is taken for one that hangs."""


def trial_of(case: Case) -> Trial:
    return MAKERS[case["op"]](case)


def judge(case: Case) -> str:
    """What is wrong with a case; empty if nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return verdict(trial_of(case), case["twice"])
        except Exception as error:  # a mistake of the fuzzer's, which must not end a run
            return f"the oracle raised {type(error).__name__}: {error}"


def judge_apart(case: Case) -> str:
    """The same in a process of its own, which the case may end."""
    command = [sys.executable, __file__, "--case", "-"]
    try:
        done = subprocess.run(command, input=json.dumps(case), capture_output=True, text=True, timeout=HANG)
    except subprocess.TimeoutExpired:
        return f"took longer than {HANG:.0f} s"
    if done.returncode < 0:
        return f"ended its process with signal {-done.returncode}"
    return done.stdout.strip() if done.returncode else ""


def save(
    folder: Path, name: str, case: Case, said: str, judged: Callable[[Case], str] = judge, seconds: float = 30.0
) -> Case:
    """Make a failure smaller, in at most some seconds, and write it down."""
    smaller, said = report.reduced(case, said, judged, seconds)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(smaller) + "\n")
    (folder / f"{name}.py").write_text(report.script(trial_of(smaller), smaller, said))
    print(f"FAILED {name}: {said}" + (f"\n  {json.dumps(smaller)}" if seconds else ""), flush=True)
    return smaller


class Run:
    """The cases of a run, in the order of their numbers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.groups = GROUPS if options.ops == "all" else (options.ops,)
        self.ends = time.monotonic() + options.seconds if options.seconds else float("inf")
        self.counts: Counter[str] = Counter()
        self.failures = 0
        self.known: Counter[tuple[str, str]] = Counter()
        """Failures alike: only the first is made smaller."""

    def numbered(self) -> Iterator[tuple[str, int]]:
        """Groups take turns, a family of cases each."""
        o, number = self.options, self.options.start
        while number < o.start + o.cases and time.monotonic() < self.ends:
            group = self.groups[number // o.together % len(self.groups)]
            yield group, number
            number += 1

    def case(self, group: str, number: int) -> Case:
        o = self.options
        return space.numbered(o.seed, group, number, o.backend, o.together)

    def all(self) -> int:
        """Run all cases; the number of failures."""
        for group, number in self.numbered():
            case = self.case(group, number)
            self.note(number, case)
            said = judge(case)
            self.counts[case["op"]] += 1
            if said:
                self.failures += 1
                name = f"{self.options.backend}-{group}-{self.options.seed}-{number}"
                alike = case["op"], report.kind_of(said)
                self.known[alike] += 1
                seconds = self.options.shrink if self.known[alike] == 1 else 0.0
                save(self.options.out, name, case, said, seconds=seconds)
        self.note(None, dict(self.counts))
        self.tell()
        return self.failures

    def note(self, number: int | None, case: Case) -> None:
        """Write down the case that is about to run, so that it is known if it ends the process."""
        if self.options.current:
            fresh = Path(f"{self.options.current}.new")
            fresh.write_text(json.dumps([number, case]))
            fresh.replace(self.options.current)

    def tell(self) -> None:
        done = ", ".join(f"{op} {count}" for op, count in sorted(self.counts.items()))
        print(f"{self.counts.total()} cases on {self.options.backend}, seed {self.options.seed}, from "
              f"{self.options.start}: {self.failures} failed ({done})", flush=True)  # fmt: skip


def isolated(options: argparse.Namespace) -> int:
    """Run the cases in child processes, each up to the case that ends it."""
    options.out.mkdir(parents=True, exist_ok=True)
    current = options.out / "current.json"
    ends = time.monotonic() + options.seconds if options.seconds else float("inf")
    start, last, failed = options.start, options.start + options.cases, 0
    while start < last and time.monotonic() < ends:
        current.unlink(missing_ok=True)
        given = {
            "--seed": options.seed, "--backend": options.backend, "--ops": options.ops, "--together": options.together,
            "--out": options.out, "--current": current, "--start": start, "--cases": last - start,
        }  # fmt: skip
        if options.seconds:
            given["--seconds"] = max(ends - time.monotonic(), 1.0)
        child = subprocess.Popen([sys.executable, __file__, *(str(x) for pair in given.items() for x in pair)])
        status = wait(child, current)
        if not current.exists():
            print(f"the process ended with {status} before its first case", flush=True)
            return failed + 1
        number, case = json.loads(current.read_text())
        if number is None:
            return failed + (status != 0)
        failed += 1
        said = f"took longer than {HANG:.0f} s" if status is None else f"ended its process with status {status}"
        save(options.out, f"{options.backend}-{options.seed}-{number}", case, said, judge_apart, 4 * options.shrink)
        start = number + 1
    return failed


def wait(child: subprocess.Popen[bytes], current: Path) -> int | None:
    """The status with which a child ended; None if it hung and was killed."""
    started = time.time()
    while True:
        try:
            return child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            last = current.stat().st_mtime if current.exists() else started
            if time.time() - last > HANG:
                child.kill()
                child.wait()
                return None


def with_hypothesis(options: argparse.Namespace) -> int:
    """Let hypothesis draw cases and make failures smaller."""
    failed = 0
    for group in GROUPS if options.ops == "all" else (options.ops,):
        found = drawn_failure(group, options)
        if found is not None:
            failed += 1
            save(options.out, f"{options.backend}-{group}-hypothesis-{options.seed}", *found, seconds=options.shrink)
        print(f"{options.cases} cases of {group} by hypothesis: {'a failure' if found else 'no failure'}", flush=True)
    return failed


def drawn_failure(group: str, options: argparse.Namespace) -> tuple[Case, str] | None:
    """The smallest case of a group that hypothesis finds to fail, and what is wrong with it."""
    import hypothesis
    from hypothesis import strategies

    last: list[tuple[Case, str]] = []
    unchecked = list(hypothesis.HealthCheck)  # compiling a kernel is slow

    @hypothesis.seed(options.seed)
    @hypothesis.settings(
        max_examples=options.cases, deadline=None, database=None, print_blob=False, suppress_health_check=unchecked
    )
    @hypothesis.given(strategies.data())
    def check(data: Any) -> None:
        case = space.drawn(space.HypothesisDraw(data.draw), group, options.backend)
        said = judge(case)
        if said:
            last[:] = [(case, said)]
            raise AssertionError(said)

    try:
        check()
    except AssertionError:
        return last[0]
    return None


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1 << 30, help="how many; default: until --seconds have passed")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no case after this time; 0: no limit")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--together", type=int, default=60, help="neighbouring cases that share kernels")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--ops", choices=(*GROUPS, "all"), default="all")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="folder for failures")
    parser.add_argument("--shrink", type=float, default=30.0, help="seconds for making a failure smaller")
    parser.add_argument("--current", help="file in which to keep the case that runs")
    parser.add_argument("--isolate", action="store_true", help="run cases in a child process")
    parser.add_argument("--hypothesis", action="store_true", help="let hypothesis draw the cases")
    parser.add_argument("--case", help="run one case from a file; - reads standard input")
    options = parser.parse_args(arguments)
    if options.cases == 1 << 30 and not (options.seconds or options.case):
        parser.error("expected --cases, --seconds or --case")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.case:
        text = sys.stdin.read() if options.case == "-" else Path(options.case).read_text()
        said = judge(json.loads(text))
        print(said or "right")
        return 1 if said else 0
    if options.isolate:
        return 1 if isolated(options) else 0
    if options.hypothesis:
        return 1 if with_hypothesis(options) else 0
    return 1 if Run(options).all() else 0


if __name__ == "__main__":
    sys.exit(main())
