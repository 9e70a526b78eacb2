"""A linear layer after a normalisation: its errors, and its GPU kernels in the interpreter."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from op_plans import bound, error, interpreted, reference
from test_fragment_compiles import SPILLED, assemble
from test_fragment_compiles import target as nvidia
from test_fragment_interpreted import target as fragment_target
from tuned import replace_records

import aule
from aule import tuning
from aule.codegen import TARGETS
from aule.engine.row_ops import result_views
from aule.ops.catalogue import CATALOGUE
from aule.ops.linear import blocks
from aule.ops.linear.config import Blocks, DirectBlocks, FragmentBlocks, ProductConfig, WarpgroupBlocks
from aule.ops.linear.product import FactorView, product_step
from aule.target import NVIDIA_LAYOUT, Target
from aule.view import TensorView, contiguous_strides

SPEC = CATALOGUE["layer_norm_linear"]
NAMES = [operand.name for operand in SPEC.operands]
TINY = FragmentBlocks(32, 32, 32, down=2, along=1, stages=3)
VULKAN = replace(
    fragment_target(""), backend="vulkan", vendor="nvidia", matrix_units=("m16n16k16:f16:f32", "m16n16k16:bf16:f32")
)
LINES = FragmentBlocks(128, 128, 64, down=2, along=2, stages=1)
"""Tiles in lines of 128 bytes."""
TARGETS_OF = {
    "copied": fragment_target(),
    "carried": VULKAN,
    "simt": replace(TARGETS["wgsl"], max_shared_bytes=12 << 10),
}


def arrays(dtype: Any, rows: int, length: int, features: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows + length)
    shapes = {"x": (rows, length), "weight_norm": (length,), "bias_norm": (length,), "weight": (features, length)}
    made = {name: rng.normal(0, 1, shape).astype(dtype) for name, shape in shapes.items()}
    return {
        **made,
        "bias": rng.normal(0, 1, features).astype(dtype),
        "dy": rng.normal(0, 1, (rows, features)).astype(dtype),
    }


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_records(monkeypatch, {"linear.fragment": [{"shape": asdict(TINY)}]})


@pytest.mark.parametrize("sizes", [(40, 96, 48), (33, 51, 37)], ids=["whole", "ragged"])
@pytest.mark.parametrize("way", TARGETS_OF)
def test_interpreted(tiny: None, way: str, sizes: tuple[int, int, int]) -> None:
    """Whole steps and rows that can be copied, and neither."""
    given = arrays(np.float32 if way == "simt" else np.float16, *sizes)
    if way == "copied":  # of a wider dtype, as in mixed precision
        given |= {name: given[name].astype(np.float32) for name in ("weight_norm", "bias_norm", "bias")}
    allowed = 2e-6 if way == "simt" else 2e-3
    dy = given.pop("dy")
    found, right = interpreted(SPEC, given, {}, TARGETS_OF[way]), reference(SPEC, given, {})
    assert error(found["y"], right["y"]) < allowed
    assert SPEC.gradient is not None
    given["dy"] = dy
    found, right = interpreted(SPEC.gradient, given, {}, TARGETS_OF[way]), reference(SPEC.gradient, given, {})
    for name, gradient in right.items():
        assert error(found[name], gradient) < allowed, name


@pytest.mark.parametrize(
    ("rows", "sizes", "made"),
    [(128, (384, 192, 136), {"layer_norm_linear", "linear_weight_backward"}),
     (64, (150, 256, 128), {"layer_norm_linear", "linear_backward"})],
    ids=["two", "one"],
)  # fmt: skip
def test_warpgroups(rows: int, sizes: tuple[int, int, int], made: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two warpgroups, several tiles for each workgroup, some of them at the edges; ``made`` are the products
    that they make."""
    replace_records(monkeypatch, {"linear.warpgroup": [{"shape": {"rows": rows, "cols": 64, "group": 2}, "time": 1.0}]})
    device = replace(fragment_target(), matrix_layout=NVIDIA_LAYOUT, compute_units=3)
    given = arrays(np.float16, *sizes)
    if rows == 128:  # of a wider dtype, as in mixed precision
        given |= {name: given[name].astype(np.float32) for name in ("weight_norm", "bias_norm", "bias")}
    else:
        given = {name: given[name] for name in ("x", "weight", "dy")}
    assert SPEC.gradient is not None
    seen = set()
    for spec, operands in ((SPEC, {n: x for n, x in given.items() if n != "dy"}), (SPEC.gradient, given)):
        call = bound(spec, operands, {})
        configs = [step.config for step in spec.plan(call.problem, call.views | result_views(call), device).steps]
        seen |= {config.name for config in configs if isinstance(getattr(config, "blocks", None), WarpgroupBlocks)}
        found, right = interpreted(spec, operands, {}, device), reference(spec, operands, {})
        for name, values in right.items():
            assert error(found[name], values) < 1e-3, name
    assert seen == made


def test_warpgroups_of_a_device_of_unknown_size() -> None:
    given = arrays(np.float16, 256, 128, 256)
    call = bound(SPEC, {name: x for name, x in given.items() if name != "dy"}, {})
    device = replace(fragment_target(), matrix_layout=NVIDIA_LAYOUT, compute_units=0, max_shared_bytes=227 << 10)
    *_, step = SPEC.plan(call.problem, call.views | result_views(call), device).steps
    assert isinstance(step.config.blocks, WarpgroupBlocks) and step.grid == (1, 1, 1)


@pytest.mark.parametrize("sizes", [(150, 128, 64), (64, 64, 200)], ids=["rows", "columns"])
def test_lines(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows normalised before, and products through registers in lines, with tiles that are moved back at the ends."""
    tile = replace(LINES, rows=64, cols=64)
    replace_records(
        monkeypatch,
        {
            "linear.direct": [],
            "linear.lines": [{"shape": asdict(tile)}],
            "linear.fragment": [{"shape": asdict(replace(tile, depth=32, stages=2))}],
            "linear.normalise_first": [{"value": True}],
        },
    )
    given = arrays(np.float16, *sizes)
    assert SPEC.gradient is not None
    seen = {}
    for spec, operands in ((SPEC, {n: x for n, x in given.items() if n != "dy"}), (SPEC.gradient, given)):
        call = bound(spec, operands, {})
        configs = [step.config for step in spec.plan(call.problem, call.views | result_views(call), VULKAN).steps]
        seen |= {config.name: config for config in configs if isinstance(config, ProductConfig)}
        found, right = interpreted(spec, operands, {}, VULKAN), reference(spec, operands, {})
        for name, values in right.items():
            assert error(found[name], values) < 1e-3, name
    assert not any(config.left.norm or config.right.norm for config in seen.values())
    stages = {name: config.blocks.stages for name, config in seen.items() if isinstance(config.blocks, FragmentBlocks)}
    # The depth of dX is the number of features.
    features = 1 if sizes[2] % tile.depth == 0 else 2
    assert stages == {"layer_norm_linear": 1, "linear_backward": features, "linear_weight_backward": 2}


@pytest.mark.parametrize(
    ("sizes", "made"),
    [((150, 128, 64), {"layer_norm_linear", "linear_backward"}),
     ((128, 64, 136), {"layer_norm_linear", "linear_weight_backward"}),
     ((64, 200, 128), {"linear_backward", "linear_weight_backward"}),
     ((64, 64, 64), {"layer_norm_linear", "linear_backward", "linear_weight_backward"})],
    ids=["rows", "features", "columns", "whole"],
)  # fmt: skip
@pytest.mark.parametrize("tile", [64, 128])
def test_direct(sizes: tuple[int, int, int], made: set[str], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The left factor in the order of fragments: tiles of ``tile`` rows that are cut off at the last row and moved back
    at the last column; ``made`` are the products that are made so. Where lanes hold rows as NVIDIA's do, results leave
    in whole runs."""
    device = VULKAN if tile == 64 else replace(VULKAN, matrix_layout=NVIDIA_LAYOUT)
    direct = replace(LINES, rows=tile, cols=64, down=tile // 64, along=1)
    replace_records(
        monkeypatch,
        {
            "linear.direct": [{"shape": asdict(direct), "sharing": 1}],
            "linear.lines": [{"shape": asdict(replace(LINES, rows=64, cols=64))}],
            "linear.normalise_first": [{"value": True}],
        },
    )
    given = arrays(np.float16, *sizes)
    assert SPEC.gradient is not None
    seen = set()
    for spec, operands in ((SPEC, {n: x for n, x in given.items() if n != "dy"}), (SPEC.gradient, given)):
        call = bound(spec, operands, {})
        configs = [step.config for step in spec.plan(call.problem, call.views | result_views(call), device).steps]
        made_so = [config for config in configs if isinstance(getattr(config, "blocks", None), DirectBlocks)]
        assert all(config.runs == (config.out.dtype == "f16") for config in made_so)
        seen |= {config.name for config in made_so}
        found, right = interpreted(spec, operands, {}, device), reference(spec, operands, {})
        for name, values in right.items():
            assert error(found[name], values) < 1e-3, name
    assert seen == made


def uses_of(target: Target, op: str, **facts: Any) -> list[Any]:
    return [record.use for record in tuning.matching(target, op, facts)]


def test_plain_products_through_vulkan() -> None:
    """Rows that more than one stride finds, few columns that share a row, depths that are not whole lines, and a grid
    that would have to be cut."""
    wide = replace(VULKAN, compute_units=4)

    def chosen(left: TensorView, n: int, k: int, device: Target = wide) -> Blocks:
        weight, out = (TensorView("f16", shape, contiguous_strides(shape), "d", None) for shape in ((n, k), (1024, n)))
        config = product_step(
            "y", "f16", FactorView("x", left), FactorView("weight", weight), ("y", out), device
        ).config
        assert isinstance(config.blocks, FragmentBlocks)
        assert blocks.normalises_before(device, config.blocks, n) == (n >= 512)
        return replace(config.blocks, lanes=LINES.lanes)

    direct = [DirectBlocks(**use["shape"]) for use in uses_of(wide, "linear.direct")]
    carried = [FragmentBlocks(**use["shape"]) for use in uses_of(wide, "linear.fragment", copies=False, aligned=True)]
    rows = TensorView("f16", (1024, 64), (64, 1), "d", None)
    assert chosen(rows, 1024, 64) == direct[0]
    assert chosen(rows, 1024, 64, replace(wide, compute_units=64)) == direct[1]
    assert chosen(rows, 1024, 64, replace(wide, max_grid=(31, 1 << 16, 1))) == LINES
    assert chosen(rows, 512, 64) == LINES
    assert chosen(rows, 256, 64) == LINES
    assert chosen(replace(rows, shape=(4, 256, 64), strides=(64 * 257, 64, 1)), 512, 64) == carried[0]
    assert chosen(replace(rows, shape=(1024, 96), strides=(96, 1)), 512, 96) == carried[0]


@pytest.mark.parametrize("sizes", [(40, 96, 48), (512, 1024, 1024)])
def test_gradients_have_all_memory_that_their_launches_name(sizes: tuple[int, int, int]) -> None:
    target = replace(VULKAN, compute_units=132, device_fence=True, max_threads=1024)
    rows, length, features = sizes
    shapes = {name: array.shape for name, array in arrays(np.float16, rows, length, features).items()}
    views = {name: TensorView("f16", shape, contiguous_strides(shape), "d", None) for name, shape in shapes.items()}
    spec = SPEC.gradient
    assert spec is not None
    call = spec.call({operand.name: views[operand.name] for operand in spec.operands}, {"eps": 1e-5})
    plan = spec.plan(call.problem, {**call.views, **result_views(call)}, target)
    known = {*call.views, *call.outputs, *plan.workspace, *plan.scratch}
    for step in plan.steps:
        buffers = [p.name for p in step.build(step.config, target).params if p.kind == "buffer"]
        assert {step.memory_of(name) for name in buffers} <= known


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_tiles_fit(dtype: str) -> None:
    """Every tile in the tables fits the devices that it is for, whichever way its factors lie."""
    copied = [FragmentBlocks(**use["shape"]) for use in uses_of(VULKAN, "linear.fragment", copies=True)]
    carried = [
        FragmentBlocks(**use["shape"])
        for op in ("linear.lines", "linear.fragment")
        for use in uses_of(VULKAN, op, copies=False, aligned=True)
    ]
    carried += [DirectBlocks(**use["shape"]) for use in uses_of(VULKAN, "linear.direct")]
    assert len(copied) == 4 and len(carried) == 5
    for left, right in ((False, False), (False, True), (True, True)):
        for table, room in ((copied, 227 << 10), (carried, 48 << 10)):
            assert all(2 * tile.shared_elements(left, right) <= room for tile in table)
    hopper = replace(TARGETS["ptx"], arch="sm_90a")
    warpgroups = [WarpgroupBlocks(**use["shape"]) for use in uses_of(hopper, "linear.warpgroup")]
    assert warpgroups and all(tile.shared_bytes <= 227 << 10 for tile in warpgroups)
    chosen = blocks.choose_blocks(replace(TARGETS["ptx"], compute_units=132), dtype, (4096,) * 3, False, False, True)
    assert chosen == copied[2]  # 99 KiB: what consumer cards have
    assert blocks.choose_blocks(TARGETS["ptx"], "f32", (4096,) * 3, False, False, True).threads == 256


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize(
    ("arch", "length"), [("sm_75", 1024), ("sm_86", 1024), ("sm_90", 4096), ("sm_90", 4072), ("sm_90", 1031)]
)
def test_assembled(arch: str, length: int, tmp_path: Path) -> None:
    """Without spills, on matrix units, and with asynchronous copies where rows allow them."""
    device = replace(nvidia(arch), compute_units=132)
    shapes = {"x": (4096, length), "weight_norm": (length,), "bias_norm": (length,), "weight": (4096, length)}
    views = {
        name: TensorView("f16", shape, contiguous_strides(shape), "device", None)
        for name, shape in (shapes | {"dy": (4096, 4096)}).items()
    }
    assert SPEC.gradient is not None
    for spec, given in ((SPEC, {n: view for n, view in views.items() if n != "dy"}), (SPEC.gradient, views)):
        call = spec.call(given, {"eps": 1e-5})
        steps = spec.plan(call.problem, given | result_views(call), device).steps
        for step in steps:
            if isinstance(step.config, ProductConfig):
                text, spilled = assemble(step.build(step.config, device), device, tmp_path)
                if isinstance(step.config.blocks, WarpgroupBlocks):
                    assert "wgmma.mma_async" in text
                else:
                    assert "mma.sync" in text and "ldmatrix" in text
                if spec is SPEC:
                    assert ("wgmma" in text) == (arch == "sm_90" and length % 64 == 0)
                    assert ("cp.async.cg" in text) == (arch != "sm_75" and length % 64 == 0)
                assert spilled <= (SPILLED if arch == "sm_75" else 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weight": (5, 7)}, r"expected weight of shape \[features, 8\], got \[5, 7\]"),
        ({"weight_norm": (7,)}, r"expected weight_norm of shape \[8\], got \[7\]"),
        ({"bias": (8,)}, r"expected bias of shape \[5\], got \[8\]"),
    ],
)
def test_errors(changed: dict[str, tuple[int, ...]], said: str) -> None:
    given = arrays(np.float32, 3, 8, 5) | {name: np.zeros(shape, np.float32) for name, shape in changed.items()}
    with pytest.raises(aule.InvalidShapeError, match=said):
        aule.layer_norm_linear(*(given[name] for name in NAMES))
