"""Runs the forward grid on chosen devices without pytest, for machines that have none.

python tests/run_grid.py [full|small][:COUNT] cuda vulkan opencl webgpu
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import grid

from aule.backends import registry
from aule.engine.attention import forward_on_host
from aule.ops.attention.reference import compare


def main(size: str, names: list[str]) -> int:
    size, _, count = size.partition(":")
    cases = grid.forward_grid(size)[: int(count) if count else None]  # type: ignore[arg-type]
    prepared = []
    for case in cases:
        inputs = grid.make_inputs(case, seed=1)
        prepared.append((case, inputs, grid.expected(case, inputs)))
    wrong = 0
    for name in names:
        device = registry.find(name)
        assert device is not None
        start, worst, bad, done = time.perf_counter(), 0.0, [], 0
        try:
            for case, inputs, expected in prepared:
                problem, operands = grid.case_problem(case, inputs)
                out, lse = forward_on_host(problem, operands, device)
                verdict = compare(problem, out, lse, expected)
                worst = max(worst, verdict.error / verdict.tolerance if verdict.tolerance else 0.0)
                done += 1
                if not verdict.ok:
                    bad.append(f"  {case}: {verdict.message}")
        except KeyboardInterrupt:
            print(f"interrupted after {done} of {len(cases)} cases")
        seconds = time.perf_counter() - start
        print(f"{name} ({device.target.name}): {done - len(bad)} of {done} right in {seconds:.1f} s, "
              f"worst error {worst:.2f} of its tolerance")  # fmt: skip
        print("\n".join(bad), flush=True)
        wrong += len(bad)
    return 1 if wrong else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    chosen = arguments.pop(0) if arguments and arguments[0].startswith(("full", "small")) else "full"
    sys.exit(main(chosen, arguments))
