"""Runs the forward grid on chosen devices without pytest, for machines that have none.

python tests/run_grid.py [full|small|wide][:COUNT] [gradients] cuda vulkan opencl webgpu cpu
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import grid
import numpy as np

from aule.backends import registry
from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import host_view
from aule.ops.attention.reference import compare
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients


def gradients(cases: list[grid.Case], names: list[str]) -> int:
    """The same grid for the backward pass."""
    prepared = []
    for case in cases:
        inputs = grid.make_inputs(case, seed=1)
        problem, operands = grid.case_problem(case, inputs)
        shape = (case.batch, case.heads_q, case.seq_q, case.value_dim)
        dout = np.random.default_rng(7).standard_normal(shape).astype(grid.NUMPY_DTYPES[case.dtype])
        arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
        prepared.append(
            (case, replace(problem, return_lse=True), operands, dout, expect_gradients(problem, dout, **arrays))
        )
    wrong = 0
    for name in names:
        device = registry.find(name)
        assert device is not None
        start, bad = time.perf_counter(), []
        for case, problem, operands, dout, expected in prepared:
            out, lse = forward_on_host(problem, operands, device, exact_lse=True)
            assert lse is not None
            stored = dout.view(np.uint16) if case.dtype == "bf16" else dout
            found = backward_on_host(problem, operands, device, out, lse, host_view(problem.dtype, stored))
            message = compare_gradients(problem, dict(zip(("dq", "dk", "dv"), found, strict=True)), expected)
            if message:
                bad.append(f"  {case}: {message}")
        seconds = time.perf_counter() - start
        right = f"{len(cases) - len(bad)} of {len(cases)}"
        print(f"{name} ({device.target.name}): gradients of {right} right in {seconds:.1f} s")
        print("\n".join(bad), flush=True)
        wrong += len(bad)
    return 1 if wrong else 0


def main(size: str, names: list[str]) -> int:
    size, _, count = size.partition(":")
    cases = grid.forward_grid(size)[: int(count) if count else None]  # type: ignore[arg-type]
    if "gradients" in names:
        return gradients(cases, [name for name in names if name != "gradients"])
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
    chosen = arguments.pop(0) if arguments and arguments[0].startswith(("full", "small", "wide")) else "full"
    sys.exit(main(chosen, arguments))
