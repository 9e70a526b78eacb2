"""Products of warpgroups: in the interpreter, mistakes that it reports, and PTX that ptxas accepts."""

from __future__ import annotations

import numpy as np
import pytest

from aule.errors import KernelError
from aule.ir import Builder, KernelIR, Value
from aule.ir.interpret import SanitizerError, interpret
from aule.ir.types import Fragment, Panels, f16, f32, i32, u64
from aule.target import NVIDIA_LAYOUT, Target


def product(
    cols: int, depth: int, left: str, right: str, elem: object = f16, publish: bool = True, early: bool = False,
    overwrite: bool = False,
) -> KernelIR:  # fmt: skip
    """C = A B of one warpgroup, 64 x cols; ``left`` is "row", "column" or "fragment", how A reaches the product."""
    b = Builder("product", 128, 32, 255)
    a, bb = b.buffer("a", elem, "read"), b.buffer("b", elem, "read")
    c = b.buffer("c", f32, "write")
    a_rows, a_cols = (depth, 64) if left == "column" else (64, depth)
    b_rows, b_cols = (depth, cols) if right == "row" else (cols, depth)
    a_size, b_size = (-(-n // 64) * rows * 64 for rows, n in ((a_rows, a_cols), (b_rows, b_cols)))
    memory = b.shared("memory", elem, a_size + b_size)
    thread = b.thread_id()

    def fill(source: Value, start: int, rows: int, columns: int) -> None:
        with b.loop(0, rows * columns // 128) as i:
            at = i * 128 + thread
            row, col = at // columns, at % columns
            run = ((col >> 3) & 7) ^ (row & 7)
            to = start + (col >> 6) * (rows * 64) + row * 64 + run * 8 + (col & 7)
            b.store(memory, to, b.load(source, at))

    fill(a, 0, a_rows, a_cols)
    fill(bb, a_size, b_rows, b_cols)
    b.warpgroup_publish()
    b.barrier()
    zero = b.fragment_fill(Fragment(f32, 16, 16, "accumulator"), 0.0)
    total = [b.var(zero) for _ in range(cols // 16)]
    factors = []
    lane, subgroup = b.lane_id(), b.subgroup_id()
    if left == "fragment":
        for k in range(0, depth, 16):
            parts = []
            for part in range(8):
                r, col = NVIDIA_LAYOUT.place(0, part)
                row = subgroup * 16 + (lane >> 2) + r
                parts.append(b.load(a, row * depth + (lane & 3) * 2 + (k + col)))
            factors.append(b.fragment_pack(Fragment(elem, 16, 16, "a"), parts))
    b.warpgroup_fence()
    for k in range(0, depth, 16):
        at_b = Panels(right, b_rows * 64, *((k, 0) if right == "row" else (0, k)))
        factor = factors[k // 16] if factors else (
            memory, 0, Panels(left, a_rows * 64, *((k, 0) if left == "column" else (0, k)))
        )  # fmt: skip
        b.warpgroup_mma(total, factor, (memory, a_size, at_b), fresh=k == 0)
    b.warpgroup_commit()
    if early:
        total[0].value = total[0].value
    if overwrite:
        b.store(memory, thread + a_size, b.const(3.0, elem))
    b.warpgroup_wait()
    for j, variable in enumerate(total):
        for part in range(8):
            r, col = NVIDIA_LAYOUT.place(0, part)
            row = subgroup * 16 + (lane >> 2) + r
            b.store(c, row * cols + (lane & 3) * 2 + (16 * j + col), b.fragment_get(variable.value, part))
    return b.finish()


def operands(cols: int, depth: int, left: str, right: str, dtype: type = np.float16) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((64, depth)).astype(dtype), rng.standard_normal((depth, cols)).astype(dtype)
    want = x.astype(np.float32) @ y.astype(np.float32)
    a = x.T if left == "column" else x
    b = y if right == "row" else y.T
    return np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1), want


CASES = [(64, 64, "row", "column"), (128, 128, "row", "row"), (80, 64, "column", "row"), (256, 32, "fragment", "row"),
         (128, 96, "fragment", "column")]  # fmt: skip
LAYOUTS = {use: NVIDIA_LAYOUT for use in ("a", "accumulator")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(case: tuple[int, int, str, str]) -> None:
    cols = case[0]
    a, b, want = operands(*case)
    out = np.zeros(64 * cols, np.float32)
    interpret(product(*case), (1, 1, 1), [a, b, out], layouts=LAYOUTS)
    np.testing.assert_allclose(out.reshape(64, cols), want, atol=1e-4)


def test_variables_in_flight_are_not_read() -> None:
    a, b, _ = operands(64, 64, "row", "column")
    with pytest.raises(SanitizerError, match="still computing"):
        interpret(product(64, 64, "row", "column", early=True), (1, 1, 1), [a, b, np.zeros(4096, np.float32)])


def test_memory_in_flight_is_not_written() -> None:
    a, b, _ = operands(64, 64, "row", "column")
    with pytest.raises(SanitizerError):
        interpret(product(64, 64, "row", "column", overwrite=True), (1, 1, 1), [a, b, np.zeros(4096, np.float32)])


def mbarrier_kernel(early: bool = False, parity: int = 0) -> KernelIR:
    """Threads write, arrive, and read what another one wrote behind the wait, or before it."""
    b = Builder("mbarrier", 128, 32)
    out = b.buffer("out", f32, "write")
    memory, place = b.shared("memory", f32, 128), b.shared("place", u64, 1)
    thread = b.thread_id()
    b.mbarrier_init(place)
    b.barrier()
    b.store(memory, thread, b.cast(thread, f32))
    b.mbarrier_arrive(place)
    if early:
        b.store(out, thread, b.load(memory, 127 - thread))
    b.mbarrier_wait(place, 0, b.const(parity, i32))
    b.store(out, thread, b.load(memory, 127 - thread))
    return b.finish()


def test_a_barrier_in_two_halves() -> None:
    out = np.zeros(128, np.float32)
    interpret(mbarrier_kernel(), (1, 1, 1), [out])
    np.testing.assert_array_equal(out, np.arange(127, -1, -1))
    with pytest.raises(SanitizerError, match="race"):
        interpret(mbarrier_kernel(early=True), (1, 1, 1), [out])
    with pytest.raises(SanitizerError, match="parity"):
        interpret(mbarrier_kernel(parity=1), (1, 1, 1), [out])


def test_panels() -> None:
    """Every element has a place of its own, and eight rows of one column lie in different groups of banks."""
    rows, cols = np.indices((16, 128))
    panels = Panels("row", 16 * 64)
    places = panels.offset(rows, cols)
    assert sorted(places.ravel()) == list(range(16 * 128))
    assert len({int(panels.offset(r, 0)) * 2 % 128 // 16 for r in range(8)}) == 8


def test_other_architectures_refuse() -> None:
    from aule.render import ptx

    with pytest.raises(KernelError, match="sm_90"):
        ptx.render(product(64, 64, "row", "column"), Target("cuda", arch="sm_80"))
