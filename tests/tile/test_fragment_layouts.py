"""Fragment layouts of many kinds: what the probe finds, and kernels on the interpreter with the sanitizer on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import grid
import numpy as np
import pytest
from op_plans import layouts_of
from test_backward_interpreted import run as backward
from test_forward_interpreted import run

from aule.engine import probe
from aule.errors import InvalidArgumentError
from aule.ir import KernelIR
from aule.ir.interpret import interpret
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.target import NVIDIA_LAYOUT, RDNA3_LAYOUTS, FragmentLayout, Target
from aule.tile.fragment.arrangement import arrange
from aule.tile.fragment.engine import fitted
from aule.tile.fragment.shape import FragmentShape

PERMUTED = FragmentLayout((8, 0, 2, 0, 1), (0, 4, 0, 1, 0), (0, 4, 0), (8, 0, 2))
"""Bits of lane and component in an arbitrary order, which no device has."""
REORDERED = FragmentLayout((8, 0, 2, 0, 1), (0, 4, 0, 1, 0), (4, 0, 0), (0, 2, 8))
"""The lanes of `PERMUTED`, with their elements in other components."""
DPAS8 = (
    FragmentLayout((0, 0, 0), (1, 2, 4), (1, 2, 4), (0, 0, 0)),
    FragmentLayout((0, 0, 0), (2, 4, 8), (0, 1, 2, 4), (1, 0, 0, 0)),
    FragmentLayout((0, 0, 0), (1, 2, 4), (1, 2, 4, 8), (0, 0, 0, 0)),
)
"""8 x 8 x 16 over 8 lanes, one for each column, as Intel's units are described."""
DPAS16 = (
    FragmentLayout((0, 0, 0, 0), (1, 2, 4, 8), (1, 2, 4), (0, 0, 0)),
    FragmentLayout((0, 0, 0, 1), (2, 4, 8, 0), (0, 2, 4), (1, 0, 0)),
    FragmentLayout((0, 0, 0, 0), (1, 2, 4, 8), (1, 2, 4, 8), (0, 0, 0, 0)),
)
"""8 x 16 x 16 over 16 lanes."""


@dataclass(frozen=True)
class LayoutCase:
    """Layouts of accumulators, left and right factors, and the arrangement to expect."""

    layouts: tuple[FragmentLayout, FragmentLayout | None, FragmentLayout | None]
    transposed: bool
    exchanges: int
    staged: bool
    shape: tuple[int, int, int] = (16, 16, 16)

    @property
    def target(self) -> Target:
        results, left, right = self.layouts
        m, n, k = self.shape
        return Target(
            "vulkan", subgroup_size=results.lanes, subgroup_sizes=(results.lanes,), max_threads=1024,
            max_shared_bytes=1 << 20, int64=True, atomic_f32_add=True, matrix_shape=self.shape, matrix_layout=results,
            matrix_units=(f"m{m}n{n}k{k}:f16:f32", f"m{m}n{n}k{k}:bf16:f32"),
            matrix_factors=None if left == results else (left, right), extensions=("VK_EXT_shader_atomic_float",),
        )  # fmt: skip


LAYOUTS = {
    "nvidia": LayoutCase((NVIDIA_LAYOUT, NVIDIA_LAYOUT, None), False, 0, False),
    "permuted": LayoutCase((PERMUTED, PERMUTED, None), False, 0, False),
    "reordered": LayoutCase((PERMUTED, REORDERED, NVIDIA_LAYOUT), False, 0, False),
    "reordered right": LayoutCase((PERMUTED, NVIDIA_LAYOUT, REORDERED), True, 0, False),
    "rdna3": LayoutCase(RDNA3_LAYOUTS[32], True, 1, False),
    "rdna3 wave64": LayoutCase(RDNA3_LAYOUTS[64], True, 2, False),
    "through memory": LayoutCase((PERMUTED, NVIDIA_LAYOUT, NVIDIA_LAYOUT), False, 0, True),
    "wave64 through memory": LayoutCase((RDNA3_LAYOUTS[64][0], None, None), True, 0, True),
    "dpas 8": LayoutCase(DPAS8, True, 0, False, (8, 8, 16)),
    "dpas 16": LayoutCase(DPAS16, True, 0, False, (8, 16, 16)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_arrangement_follows_the_layouts(name: str) -> None:
    wanted = LAYOUTS[name]
    made = arrange(wanted.target)
    assert (made.transposed, len(made.exchanges), made.factors is None) == (
        wanted.transposed, wanted.exchanges, wanted.staged,
    )  # fmt: skip
    rows, cols, _ = wanted.shape
    assert (made.height, made.width) == ((cols, rows) if made.transposed else (rows, cols))


# -- kernels -----------------------------------------------------------------------------------------------------------

CASES = [case for case in grid.forward_grid("small") if case.dtype in ("f16", "bf16")]
SHAPE = FragmentShape(32, 32, 2, 1, True)


def backward_shape(target: Target, shared: bool) -> FragmentShape:
    """As many threads as columns, in blocks that give a subgroup 32 rows; ``shared`` by two, for dK and dV."""
    subgroups = (4 if target.subgroup_size < 32 else 1) * (2 if shared else 1)
    columns = 2 if shared else 1
    return fitted(FragmentShape(32 * subgroups // columns, 32, subgroups, 1, False, columns=columns), target)


@pytest.mark.parametrize("name", LAYOUTS)
def test_forward(name: str) -> None:
    """Lengths that fill no tile, every modifier, dropout: a different part of the small grid for each layout."""
    target, first = LAYOUTS[name].target, list(LAYOUTS).index(name)
    for case in CASES[first % 3 :: 3]:
        inputs = grid.make_inputs(case, seed=3)
        problem, operands = grid.case_problem(case, inputs)
        out, lse = run(problem, operands, fitted(SHAPE, target), target)
        verdict = compare(problem, out, lse if case.return_lse else None, grid.expected(case, inputs))
        assert verdict, f"{case}: {verdict.message}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_where_no_key_is_dropped(name: str) -> None:
    """The last tile has keys past the end, which add nothing to dQ."""
    target, rng = LAYOUTS[name].target, np.random.default_rng(5)
    arrays = {name: rng.standard_normal((1, 1, 41, 16)).astype(np.float16) for name in "qkv"}
    problem, operands = attention_problem(**{name: grid.view_of(array) for name, array in arrays.items()})
    shape = backward_shape(target, shared=False)
    found, dout = backward(problem, operands, arrays, (shape, shape), target=target)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients(name: str) -> None:
    target, first = LAYOUTS[name].target, list(LAYOUTS).index(name)
    for number, case in enumerate(CASES[first % 4 :: 4]):
        inputs = grid.make_inputs(case, seed=3)
        problem, operands = grid.case_problem(case, inputs)
        problem = replace(problem, deterministic=number % 2 == 1)
        shared = all(-(-dim // 16) % 2 == 0 for dim in (problem.head_dim, problem.value_dim))
        shapes = backward_shape(target, shared=False), backward_shape(target, shared)
        found, dout = backward(problem, operands, inputs, shapes, target=target)
        arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
        wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
        assert not wrong, f"{case}: {wrong}"


@pytest.mark.parametrize("name", ["rdna3", "through memory", "dpas 8"])
def test_dropped_infinities_do_not_leak(name: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 40, 16)).astype(np.float16) for _ in range(3))
    v[:, :, 20, 3] = np.inf
    problem, operands = attention_problem(
        **{n: grid.view_of(x) for n, x in zip("qkv", (q, k, v), strict=True)}, causal=True
    )
    out, _ = run(problem, operands, fitted(SHAPE, LAYOUTS[name].target), LAYOUTS[name].target)
    assert np.isfinite(out[:, :, :20]).all() and np.isfinite(np.delete(out[:, :, 20:], 3, axis=3)).all()
    assert (out[0, 0, 20:, 3] == np.inf).all()


@pytest.mark.parametrize("name", ["reordered right", "rdna3", "rdna3 wave64", "through memory", "dpas 16"])
@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_float32_rounded_on_its_way_in(name: str, precision: str) -> None:
    """Inputs of another type than what lanes exchange and shared memory holds; the result is in the inputs' type."""
    case = next(case for case in grid.forward_grid("small") if case.dtype == "f32" and case.causal)
    inputs, target = grid.make_inputs(case, seed=3), LAYOUTS[name].target
    problem, operands = grid.case_problem(case, inputs)
    out, lse = run(replace(problem, precision=precision), operands, fitted(SHAPE, target), target)
    assert out.dtype == np.float32
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    rounded = {name: grid.rounded_to(arrays[name], precision) for name in "qkv"}
    half = replace(problem, dtype=precision)
    verdict = compare(half, out, lse if case.return_lse else None, expect(half, **(arrays | rounded)))
    assert verdict, verdict.message


def test_tf32_is_not_cooperative_matrices() -> None:
    device = replace(LAYOUTS["rdna3"].target, vendor="amd")
    problem = AttentionProblem(1, 1, 1, 64, 64, 64, 64, "f32", 0.125, precision="f16")
    views = {name: grid.view_of(np.zeros((1, 1, 64, 64), np.float32)) for name in "qkvo"}
    config = plan_forward(problem, views, device).steps[-1].config
    assert isinstance(config, FragmentConfig) and config.factor == "f16"
    with pytest.raises(InvalidArgumentError, match="only 'float16', 'bfloat16'"):
        plan_forward(replace(problem, precision="tf32"), views, device)


# -- the probe ---------------------------------------------------------------------------------------------------------


class Secret:
    """A device that runs kernels on the interpreter; its Target does not tell the layouts of its fragments."""

    def __init__(self, case: LayoutCase, **known: Any) -> None:
        self.layouts = layouts_of(case.target)
        self.target = replace(case.target, matrix_layout=None, matrix_factors=None, matrix_shape=(16, 16, 16), **known)
        self.launched: list[KernelIR] = []

    def alloc(self, nbytes: int) -> Any:
        return SimpleNamespace(array=None)

    def upload(self, memory: Any, array: Any) -> None:
        memory.array = array.copy()

    def launch(self, kernel: KernelIR, grid: tuple[int, int, int], args: list[Any]) -> None:
        self.launched.append(kernel)
        interpret(kernel, grid, [arg.array.reshape(-1) for arg in args], layouts=self.layouts)

    def download(self, memory: Any, out: Any) -> None:
        out[...] = memory.array.reshape(out.shape)

    def free(self, memory: Any) -> None:
        pass


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "program", lambda device, key, build: build())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_probe_finds_it(name: str) -> None:
    wanted = LAYOUTS[name]
    vendor = "intel" if name.startswith("dpas") else "amd"
    device: Any = Secret(wanted, vendor=vendor, subgroup_size=64, subgroup_sizes=(wanted.layouts[0].lanes,))
    if wanted.layouts[0].lanes != 64:
        assert device.target.subgroup_size == 64  # a size that must be asked for
    probe.find_layout(device)
    found: Target = device.target
    assert found.matrix_shape == wanted.shape and found.matrix_layout == wanted.layouts[0]
    assert arrange(found) == arrange(wanted.target) or wanted.layouts[1] is None
    assert wanted.layouts[2] in (found.matrix_right, None)
    assert [kernel.name for kernel in device.launched][-1] == "fragment_check"
    launches = len(device.launched)
    probe.find_layout(device)
    assert len(device.launched) == launches


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("left", [PERMUTED, NVIDIA_LAYOUT], ids=["results alone", "all"])
def test_a_layout_that_does_not_hold_is_not_used(caplog: pytest.LogCaptureFixture, left: FragmentLayout) -> None:
    """The check notices fragments that have another layout in products than in the probe."""
    device: Any = Secret(LAYOUTS["permuted"])
    launch = device.launch

    def launch_otherwise(kernel: KernelIR, grid: tuple[int, int, int], args: list[Any]) -> None:
        if kernel.name == "fragment_check":
            device.layouts = {"accumulator": NVIDIA_LAYOUT, "a": left}
        launch(kernel, grid, args)

    device.launch = launch_otherwise
    probe.find_layout(device)
    assert device.target.matrix_layout is None and "wrong products" in caplog.text


@pytest.mark.usefixtures("interpreted")
def test_a_right_layout_that_does_not_hold_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    device: Any = Secret(LAYOUTS["nvidia"])
    launch = device.launch

    def launch_otherwise(kernel: KernelIR, grid: tuple[int, int, int], args: list[Any]) -> None:
        if kernel.name == "fragment_check":
            device.layouts |= {"b": NVIDIA_LAYOUT}
        launch(kernel, grid, args)

    device.launch = launch_otherwise
    probe.find_layout(device)
    assert device.target.matrix_layout is None and "wrong products" in caplog.text


def table(layout: FragmentLayout, cols: int = 16) -> Any:
    """What a device with a layout would answer: each lane's elements, numbered row by row."""
    places = [[layout.place(lane, part) for part in range(layout.parts)] for lane in range(layout.lanes)]
    return (np.array(places) @ [cols, 1]).astype(np.float32)


def test_nvidias_through_vulkan() -> None:
    layout = FragmentLayout((0, 0, 1, 2, 4), (2, 4, 0, 0, 0), (0, 0, 8), (1, 8, 0))
    assert probe.decode(table(layout), 16, 16, "accumulator") == layout


def test_what_is_no_layout_is_refused() -> None:
    swapped = table(NVIDIA_LAYOUT)
    swapped[3, 2], swapped[9, 5] = swapped[9, 5], swapped[3, 2]
    assert probe.decode(swapped, 16, 16, "accumulator") is None
    doubled = table(NVIDIA_LAYOUT)
    doubled[16:] = doubled[:16]
    assert probe.decode(doubled, 16, 16, "accumulator") is None
    copies = table(RDNA3_LAYOUTS[32][1])
    assert probe.decode(copies, 16, 16, "accumulator") is None
    assert probe.decode(copies, 16, 16, "a") == RDNA3_LAYOUTS[32][1]
