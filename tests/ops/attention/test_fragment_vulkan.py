"""Tiles for NVIDIA through Vulkan, where a workgroup has 48 KiB: parts that do not fit stay in registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grid
import numpy as np
import pytest
from test_backward_interpreted import run as backward
from test_forward_interpreted import run

from aule.ops.attention.build import build_forward
from aule.ops.attention.config import FragmentBackwardConfig, FragmentConfig
from aule.ops.attention.fragment.backward import build_backward_fragment
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.plan.scalars import problem_scalars
from aule.ops.attention.plan.split import SplitLastWave, Wave, split_last_wave
from aule.ops.attention.plan.tiles import choose_fragments
from aule.ops.attention.plan.tiles_backward import choose_backward_fragments, choose_backward_wave
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.ops.rope.tables import Rope
from aule.render import spirv
from aule.target import NVIDIA_LAYOUT, Target
from aule.tuning import model

TARGET = Target(
    "vulkan", vendor="nvidia", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024, max_shared_bytes=48 << 10,
    f16=True, int64=True, storage16=True, matrix_units=("m16n16k16:f16:f32", "m16n16k16:bf16:f32"), atomic_f32_add=True,
    matrix_layout=NVIDIA_LAYOUT, extensions=("VK_EXT_shader_atomic_float", "VK_KHR_shader_bfloat16"),
)  # fmt: skip
VOTE = 16
"""Bytes of shared memory in which a workgroup votes."""


def planned(dims: tuple[int, int], **options: Any) -> tuple[AttentionProblem, dict[str, Any]]:
    problem = AttentionProblem(1, 1, 1, 200, 200, *dims, "f16", 0.1, **options)
    widths = {"q": dims[0], "k": dims[0], "v": dims[1], "o": dims[1]}
    widths |= {f"d{name}": width for name, width in widths.items()}
    return problem, {name: grid.view_of(np.zeros((1, 1, 200, width), np.float16)) for name, width in widths.items()}


@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (128, 128), (40, 128), (256, 256), (200, 16)], ids=str)
def test_tiles_fit(dims: tuple[int, int]) -> None:
    problem, views = planned(dims, return_lse=True)
    forward = plan_forward(problem, {name: views[name] for name in "qkvo"}, TARGET).steps[-1].config
    assert isinstance(forward, FragmentConfig)
    assert build_forward(forward, TARGET).shared_bytes + VOTE <= TARGET.max_shared_bytes
    for deterministic in (False, True) if max(dims) <= 128 else ():
        plan = plan_backward(replace(problem, deterministic=deterministic), views, TARGET)
        kernels = [step.config for step in plan.steps if isinstance(step.config, FragmentBackwardConfig)]
        assert [kernel.of for kernel in kernels] == (["queries", "keys"] if deterministic else ["keys"])
        for kernel in kernels:
            built = build_backward_fragment(kernel, TARGET)
            assert built.shared_bytes <= TARGET.max_shared_bytes, kernel.shape


@pytest.mark.parametrize("dims", [(320, 320), (576, 512)], ids=str)
def test_wide_tiles_fit(dims: tuple[int, int]) -> None:
    """Q, or both matrices that a workgroup of a backward kernel owns, is in registers; the kernels are SPIR-V, too."""
    problem, views = planned(dims, return_lse=True)
    (step,) = plan_forward(problem, {name: views[name] for name in "qkvo"}, TARGET).steps
    assert isinstance(step.config, FragmentConfig) and step.config.shape.depth_parts == 2
    forward = build_forward(step.config, TARGET)
    assert forward.shared_bytes + VOTE <= TARGET.max_shared_bytes and spirv.render(forward, TARGET).code
    for deterministic in (False, True):
        plan = plan_backward(replace(problem, deterministic=deterministic), views, TARGET)
        kernels = [step.config for step in plan.steps if isinstance(step.config, FragmentBackwardConfig)]
        assert [kernel.of for kernel in kernels] == (["queries", "keys"] if deterministic else ["keys"])
        for kernel in kernels:
            assert kernel.shape.owns_in_registers
            built = build_backward_fragment(kernel, TARGET)
            assert built.shared_bytes <= TARGET.max_shared_bytes, kernel.shape
            assert spirv.render(built, TARGET).code


@pytest.mark.parametrize("dims", [(512, 512), (576, 512)], ids=str)
def test_wide_gradients_that_are_rotated_fit(dims: tuple[int, int]) -> None:
    """Gradients are rotated back through shared memory; what is left to add up scores decides."""
    problem, views = planned(dims, rope=Rope("f32", dims[0], False))
    tables = {name: grid.view_of(np.zeros((1, 1, 200, dims[0] // 2), np.float32)) for name in ("cos", "sin")}
    (keys,) = (step for step in plan_backward(problem, views | tables, TARGET).steps if hasattr(step.config, "of"))
    assert isinstance(keys.config, FragmentBackwardConfig) == (dims[0] == 512)
    assert keys.build(keys.config, TARGET).shared_bytes <= TARGET.max_shared_bytes


def test_columns_that_are_rotated_stay_together() -> None:
    problem, views = planned((128, 128), rope=Rope("f32", 128, False))
    tables = {name: grid.view_of(np.zeros((1, 1, 200, 64), np.float32)) for name in ("cos", "sin")}
    views = {name: views[name] for name in "qkvo"}
    config = plan_forward(problem, views | tables, TARGET).steps[-1].config
    assert isinstance(config, FragmentConfig) and config.shape.register_columns == 0
    build_forward(config, TARGET)
    assert plan_forward(replace(problem, rope=None), views, TARGET).steps[-1].config.shape.register_columns == 16  # type: ignore[union-attr]


def test_columns_that_are_rotated_pass_together() -> None:
    problem, views = planned((256, 256), rope=Rope("f32", 256, False))
    tables = {name: grid.view_of(np.zeros((1, 1, 200, 128), np.float32)) for name in ("cos", "sin")}
    views = {name: views[name] for name in "qkvo"}
    config = plan_forward(problem, views | tables, TARGET).steps[-1].config
    assert isinstance(config, FragmentConfig) and not config.shape.in_pieces(256)
    build_forward(config, TARGET)
    assert plan_forward(replace(problem, rope=None), views, TARGET).steps[-1].config.shape.in_pieces(256)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rows_that_pass_in_pieces(dtype: str) -> None:
    """Forward with all of Q in registers, which comes 112 columns at a time, and scores ahead of each tile."""
    rng = np.random.default_rng(2)
    arrays = {
        name: rng.standard_normal((1, 1, length, 256)).astype(np.float32).astype(grid.NUMPY_DTYPES[dtype])
        for name, length in (("q", 140), ("k", 75), ("v", 75))
    }
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    shape = choose_fragments(TARGET, dtype, 256, 256, False, False)
    assert shape is not None and shape.prefetch_scores and shape.piece(256, 256) == 112
    out, lse = run(problem, operands, shape, TARGET)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


@pytest.mark.parametrize("dims", [(128, 128), (72, 80)], ids=str)
def test_results(dims: tuple[int, int]) -> None:
    """Forward with a part of Q in registers, and gradients by sums with V there; rows that fill no tile."""
    rng = np.random.default_rng(2)
    lengths = {"q": (2, 70, dims[0]), "k": (1, 50, dims[0]), "v": (1, 50, dims[1])}
    arrays = {name: rng.standard_normal((1, *shape)).astype(np.float16) for name, shape in lengths.items()}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    shape = choose_fragments(TARGET, "f16", *dims, False, False)
    assert shape is not None and shape.register_columns == 16
    out, lse = run(problem, operands, shape, TARGET)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
    keys = choose_backward_fragments(TARGET, "f16", *dims, "sums")
    assert keys is not None and keys.resident_q
    found, dout = backward(problem, operands, arrays, (keys, keys), True, TARGET)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (40, 128)], ids=str)
def test_gradients_where_every_key_is_kept(dims: tuple[int, int], full: bool) -> None:
    """Rows that fill no tile, and those that do; subgroups that share rows, with as many columns each or not."""
    rng = np.random.default_rng(4)
    rows, keys_ = (96, 128) if full else (70, 50)
    lengths = {"q": (2, rows, dims[0]), "k": (1, keys_, dims[0]), "v": (1, keys_, dims[1])}
    arrays = {name: rng.standard_normal((1, *shape)).astype(np.float16) for name, shape in lengths.items()}
    problem, operands = attention_problem(**{name: grid.view_of(array) for name, array in arrays.items()})
    keys = choose_backward_fragments(TARGET, "f16", *dims, "sums")
    assert keys is not None and keys.columns == 2
    found, dout = backward(problem, operands, arrays, (keys, keys), True, TARGET)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def test_heads_come_in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a causal mask two of five heads come together, and the last alone."""
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal((1, 5, 140, 16)).astype(np.float16) for name in "qkv"}
    monkeypatch.setattr(model, "cached_bytes", lambda *_: 2 * 140 * 32 * 2)
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    shape = choose_fragments(TARGET, "f16", 16, 16, False, False)
    assert shape is not None and problem_scalars(problem, TARGET)["heads_together"] == 2
    out, lse = run(problem, operands, shape, TARGET)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_heads_in_sections(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of dK and dV, two of three key heads together; with ``deterministic`` of dQ, too."""
    rng = np.random.default_rng(3)
    heads = {"q": 6, "k": 3, "v": 3}
    arrays = {name: rng.standard_normal((1, n, 140, 16)).astype(np.float16) for name, n in heads.items()}
    monkeypatch.setattr(model, "cached_bytes", lambda *_: 2 * 2 * 140 * (32 * 2 + 16 * 4))
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=True)
    problem = replace(problem, deterministic=deterministic)
    scalars = problem_scalars(problem, TARGET)
    assert scalars["key_heads_together"] == 2 and scalars["heads_together"] > 1
    shapes = [choose_backward_fragments(TARGET, "f16", 16, 16, of) for of in ("queries", "keys")]
    found, dout = backward(problem, operands, arrays, tuple(shapes), True, TARGET)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


LENGTHS = {"full": (128, 128), "more keys": (100, 150), "more rows": (150, 100), "more rows, full": (160, 128)}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
def test_gradients_of_tiles_of_which_nothing_is_dropped(lengths: tuple[int, int], align: str) -> None:
    """They have a loop of their own under a causal mask, but for keys past the end."""
    rng = np.random.default_rng(4)
    shapes = {"q": (2, lengths[0], 128), "k": (1, lengths[1], 128), "v": (1, lengths[1], 128)}
    arrays = {name: rng.standard_normal((1, *shape)).astype(np.float16) for name, shape in shapes.items()}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=True, causal_align=align)
    keys = choose_backward_fragments(TARGET, "f16", 128, 128, "sums")
    assert keys is not None and keys.edge_loop
    found, dout = backward(problem, operands, arrays, (keys, keys), True, TARGET)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("lengths", [(256, 320), (300, 310)], ids=["full", "not full"])
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_gradients_of_blocks_that_are_cut(lengths: tuple[int, int], dim: int) -> None:
    """The last of five blocks of keys, or of three, on a device that has two at a time; rows of two heads for it."""
    small = replace(TARGET, compute_units=1, device_fence=True)
    rng = np.random.default_rng(4)
    shapes = {"q": (2, lengths[0], dim), "k": (1, lengths[1], dim), "v": (1, lengths[1], dim)}
    arrays = {name: rng.standard_normal((1, *shape)).astype(np.float16) for name, shape in shapes.items()}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views)
    keys = choose_backward_fragments(small, "f16", dim, dim, "sums")
    assert keys is not None
    blocks, tiles = -(-lengths[1] // keys.block_q), -(-lengths[0] // keys.block_kv) * 2
    wave = choose_backward_wave(small, keys)
    assert wave is not None
    split = split_last_wave(blocks, tiles, small.compute_units, wave)
    assert split is not None and (split.blocks, split.pieces) == (1, 2)
    found, dout = backward(problem, operands, arrays, (keys, keys), True, small)
    assert found["part"].any() and not found["tickets"].any()
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def test_when_the_last_wave_is_split() -> None:
    wave = Wave(2, 8, 6, 0.8)
    assert split_last_wave(4096, 256, 132, wave) == SplitLastWave(3960, 136, 7)
    assert split_last_wave(4096, 64, 132, wave) == SplitLastWave(3960, 136, 3)
    assert split_last_wave(3960, 256, 132, wave) is None, "whole waves"
    assert split_last_wave(256, 128, 132, wave) is None, "hardly any slot is idle"
    assert split_last_wave(4096, 256, 0, wave) is None, "nobody knows how many there are"
    assert split_last_wave(64, 128, 132, wave) == SplitLastWave(0, 64, 4), "less than a wave"
    assert split_last_wave(64, 4, 132, wave) is None, "pieces cost more than they save"


@pytest.mark.parametrize("dim", [64, 128])
def test_wild_values_take_another_way(dim: int) -> None:
    """Inf and NaN of keys that some rows of a tile drop, and others do not, send a block over its tiles another way."""
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal((1, 1, 150, dim)).astype(np.float16) for name in "qkv"}
    arrays["v"][0, 0, 100, 3], arrays["v"][0, 0, 140, 5] = np.inf, np.nan
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    shape = choose_fragments(TARGET, "f16", dim, dim, False, False)
    assert shape is not None and shape.prefetch_scores
    out, lse = run(problem, operands, shape, TARGET)
    assert np.isposinf(out[0, 0, 100:, 3]).all() and np.isnan(out[0, 0, 140:, 5]).all()
    out[0, 0, 100:, 3] = out[0, 0, 140:, 5] = 0
    arrays["v"][0, 0, 100, 3] = arrays["v"][0, 0, 140, 5] = 0
    wanted = expect(problem, **arrays)
    wanted.out[0, 0, 100:, 3] = wanted.out[0, 0, 140:, 5] = 0
    verdict = compare(problem, out, lse, wanted)
    assert verdict, verdict.message
