"""Decoding of latents on matrix units: on the interpreter with the sanitizer on, in the layouts of all vendors, and
through compilers."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_cases
import devices
import msl_shim
import numpy as np
import pytest
import test_decode_interpreted as plain
import test_decode_score_functions as functions
from repository import ROOT

from aule.codegen import generate
from aule.engine.decode import decode_on_host
from aule.engine.probe import find_layout
from aule.frontends.functions import UserFunctions
from aule.frontends.numpy_flex import with_functions
from aule.ops.attention.reference import compare
from aule.ops.decode.config import AnyShape, LatentConfig, LatentShape
from aule.ops.decode.plan.decode import Combine, decode_views, plan_decode
from aule.ops.decode.plan.latent import OP
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.sequences import expect_decode
from aule.ops.decode.validate import DecodeOperands
from aule.ops.shared.elements import as_float
from aule.ops.shared.plan import Plan
from aule.target import Target
from aule.tile.fragment.arrangement import arrange
from aule.tuning.record import every
from aule.view import TensorView, contiguous_strides

TARGETS: dict[str, Target] = runpy.run_path(str(ROOT / "tools" / "kernel_targets.py"))["TARGETS"]
H200, VULKAN, HIP, METAL = (TARGETS[n] for n in ("h200-cuda", "h200-vulkan", "rdna3-hip", "apple-metal"))
MATRICES = (
    "h200-cuda", "sm120-cuda", "h200-vulkan", "rdna3-vulkan", "rdna3-staged", "rdna3-hip", "mi300-hip", "dg2-vulkan",
    "apple-metal",
)  # fmt: skip
Case = decode_cases.Case
EVERYTHING = decode_cases.EVERYTHING
LATENT = Case("latent", (70, 0, 33, 5), 1, (16, 1), (80, 64), "bf16", page=16)
SHAPES = {
    "one-subgroup": LatentShape(16, 32, 1, 1, 2),
    "keys-divided": LatentShape(16, 64, 4, 1, 2),
    "rows-and-keys-divided": LatentShape(32, 32, 8, 2, 1),
    "depth-divided": LatentShape(64, 16, 8, 8, 2),
}
CASES = (
    replace(LATENT, id="pages-of-one", page=1),
    replace(LATENT, id="pages-of-three", page=3, rows=2, dtype="f16"),
    replace(LATENT, id="larger-pages", page=128, lens=(130, 7, 128)),
    replace(LATENT, id="contiguous", page=0, rows=4, heads=(5, 1)),
    replace(LATENT, id="everything", rows=3, options=EVERYTHING),
    replace(LATENT, id="packed", rows=(3, 0, 7, 1), options={"sinks": True}),
    replace(LATENT, id="not-causal", rows=3, dims=(48, 48), options={"causal": False, "window": (9, None)}),
    replace(LATENT, id="two-key-heads", heads=(6, 2), page=0, dims=(33, 7)),
)


def given_of(case: Case) -> dict[str, Any]:
    """A case whose values are the first columns of its keys."""
    given = decode_cases.make(case)
    scales = {"v_scale": given["k_scale"]} if case.cache else {}
    return given | scales | {"v": given["k"][..., : case.dims[1]], "latent": True}


def run(
    problem: DecodeProblem, operands: DecodeOperands, target: Target, shape: AnyShape | None = None,
    splits: int | None = None, combine: Combine | None = None,
) -> None:  # fmt: skip
    """Interpret the plan, whose first kernel is that of latents, and compare; the values are never read."""
    garbage = np.nan if operands.v.storage.dtype.kind not in "iu" else 1
    hidden = replace(operands, v=replace(operands.v, storage=np.full_like(operands.v.storage, garbage)))
    if shape is None:
        config = plan_decode(problem, decode_views(operands, operands.q), target).steps[0].config
        assert isinstance(config, LatentConfig)
        shape = config.shape
    out, lse = plain.run(problem, hidden, target, splits, combine, chosen=shape)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


def check(case: Case, target: Target, shape: AnyShape | None = None, **divided: Any) -> None:
    run(*decode_cases.problem_of(case, given_of(case)), target, shape, **divided)


@pytest.mark.parametrize("name", MATRICES)
def test_deepseeks_dimensions(name: str) -> None:
    """576 and 512 columns with the shapes of the tables."""
    case = replace(LATENT, dims=(576, 512), lens=(37, 0, 18), rows=2)
    check(case, TARGETS[name], splits=2)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["h200-cuda", "rdna3-staged"])
def test_cases(name: str, case: Case) -> None:
    target = TARGETS[name]
    odd = LatentShape(16, 32, 2, 2, 1, lanes=arrange(target).lanes)  # which the planner does not choose
    check(case, target, odd if case.dims == (33, 7) else None)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    case = replace(LATENT, rows=5, options=EVERYTHING, lens=(133, 40))
    check(case, H200, SHAPES[shape])
    check(replace(case, page=1), VULKAN, SHAPES[shape], splits=3)


@pytest.mark.parametrize("combine", ["last_workgroup", "second_launch"])
@pytest.mark.parametrize("name", ["sm120-cuda", "apple-metal"])
def test_splits(name: str, combine: Combine) -> None:
    case = replace(LATENT, rows=3, lens=(150, 17, 64, 0), options={"sinks": True, "window": 70})
    check(case, TARGETS[name], splits=3, combine=combine)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("cache", ["i8", "e4m3"])
@pytest.mark.parametrize("name", ["h200-cuda", "apple-metal"])
def test_quantised_caches(name: str, cache: str, dtype: str) -> None:
    case = replace(LATENT, dtype=dtype, cache=cache, rows=2, options={"softcap": 4.0})
    check(case, TARGETS[name])
    check(replace(case, page=3, options={}), TARGETS[name], splits=2)


@pytest.mark.parametrize(("low", "high"), [(-30, -10), (-16, 8)])
def test_scales_of_any_size(low: int, high: int) -> None:
    """Weights in fp16 neither vanish nor overflow; K has scales of its own here."""
    case = replace(LATENT, dtype="f16", cache="i8")
    given = given_of(case)
    factor = np.exp2(np.random.default_rng(5).uniform(low, high, given["v_scale"].shape)).astype(np.float32)
    run(*decode_cases.problem_of(case, given | {"v_scale": given["v_scale"] * factor}), H200)


def test_flat_grids_and_long_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    check(replace(LATENT, rows=3), replace(H200, max_grid=(1 << 20, 2, 2)), splits=3)
    monkeypatch.setattr("aule.view.TensorView.last_index", property(lambda view: 1 << 32))
    check(LATENT, H200, splits=2)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("value", "options"), [(np.nan, {}), (np.nan, {"window": (20, 0)}), (np.inf, {"softcap": 3.0})], ids=str
)
def test_nonfinite_values_reach_only_rows_that_keep_them(value: float, options: dict[str, Any], stages: int) -> None:
    """The last token alone keeps the last key, and with a window it drops another. Softcap makes scores
    finite again, so that one column alone is infinite."""
    case = replace(LATENT, lens=(70, 33), rows=3, options=options)
    given = given_of(case)
    for n, length in enumerate(case.lens):
        for key in (length - 22,) if "window" in options else (length - 1,):
            page = given["block_tables"][n, key // case.page]
            given["k"][page, key % case.page, :, 5] = value
    problem, operands = decode_cases.problem_of(case, given)
    _, expected = expect_decode(problem, operands)
    finite = np.isfinite(expected.out)
    assert 0 < finite.mean() < 1
    for target in (H200, VULKAN):
        out, lse = plain.run(problem, operands, target, chosen=LatentShape(16, 32, 2, 2, stages))
        found = as_float(out, "bf16")
        np.testing.assert_array_equal(np.isfinite(found), finite)
        np.testing.assert_allclose(found[finite], expected.out[finite], atol=0.02)
        known = np.isfinite(expected.lse)
        np.testing.assert_allclose(lse[known], expected.lse[known], atol=1e-4)


def test_functions_and_trees() -> None:
    case = replace(LATENT, rows=3, heads=(4, 1))
    problem, operands = decode_cases.problem_of(case, given_of(case))
    tree = np.tril(np.random.default_rng(0).random((3, 3)) < 0.6) | np.eye(3, dtype=np.bool_)
    user = UserFunctions("decode_attention", functions.alibi, functions.odd, True, tree)
    problem, operands = with_functions(replace(problem, causal=False), operands, user)
    as_bytes = replace(operands.captured["keep0"], storage=tree.view(np.uint8))
    operands = replace(operands, captured={**operands.captured, "keep0": as_bytes})
    run(problem, operands, H200)


def test_what_other_kernels_serve() -> None:
    """fp32, rows that are not aligned, and values that are not latent."""
    others = {
        "fp32": replace(LATENT, dtype="f32"),
        "odd": replace(LATENT, dims=(33, 7)),
    }
    for name, case in others.items():
        problem, operands = decode_cases.problem_of(case, given_of(case))
        config = plan_decode(problem, decode_views(operands, operands.q), H200).steps[0].config
        assert not isinstance(config, LatentConfig), name
    problem, operands = decode_cases.problem_of(LATENT, decode_cases.make(LATENT))
    config = plan_decode(problem, decode_views(operands, operands.q), H200).steps[0].config
    assert not isinstance(config, LatentConfig)


def test_many_tokens_take_one_launch_without_splits() -> None:
    """A long prompt would need too much memory for partial results."""
    plan = plan_of(H200, 4, 65536, 128, tokens=256)
    assert len(plan.steps) == 1 and not plan.workspace
    assert isinstance(plan.steps[0].config, LatentConfig)


def plan_of(target: Target, batch: int, keys: int, heads: int, tokens: int = 1, cache: str = "bf16") -> Plan:
    """The plan of a call as the benchmarks have it."""

    def view(dtype: str, *shape: int) -> TensorView:
        return TensorView(dtype, shape, contiguous_strides(shape), "device", None)

    pages = batch * keys // 64
    given = DecodeProblem(
        batch, heads, 1, tokens, keys, 576, 512, "bf16", cache, 192**-0.5, page=64, pages=pages, latent=True
    )
    pool = view(cache, pages, 1, 64, 576)
    views = {"q": view("bf16", batch, heads, tokens, 576), "k": pool, "v": replace(pool, shape=(pages, 1, 64, 512))}
    views |= {"o": view("bf16", batch, heads, tokens, 512), "lens": view("i32", batch)}
    if cache != "bf16":
        views |= dict.fromkeys(("k_scale", "v_scale"), view("f32", pages, 1, 64, 1))
    return plan_decode(given, views | {"tables": view("i32", batch, keys // 64)}, target)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas (CUDA toolkit) is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_nvidia_does_not_spill(arch: str, tmp_path: Path) -> None:
    base = H200 if arch == "sm_90" else replace(TARGETS["sm80-cuda"], arch=arch)
    base = replace(base, matrix_units=TARGETS["sm80-cuda"].matrix_units)  # without products of warpgroups
    shared = {"sm_80": 163, "sm_90": 227}.get(arch, 99)
    target, shapes = replace(base, max_shared_bytes=shared << 10), set()
    sizes = [(32, 4096, 16), (32, 4096, 32), (32, 4096, 128), (32, 4096, 16, 4), (256, 256, 128)]  # the last: no splits
    sizes += [(32, 4096, 16, 1, "e4m3"), (32, 4096, 128, 1, "i8")]
    for name in sizes:
        plan = plan_of(target, *name)
        config, path = plan.steps[0].config, tmp_path / "kernel.ptx"
        if config in shapes:
            continue
        shapes.add(config)
        text = generate(plan.steps[0].build(config, target), target).text
        path.write_text(text)
        named = text.split(".target ")[1].split()[0]
        command = ["ptxas", f"-arch={named}", "-v", str(path), "-o", str(tmp_path / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (name, done.stderr)
        assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"], (name, done.stderr)
        assert "mma.sync" in text and "cp.async" in text


@pytest.mark.parametrize("name", ["msl-shim", *devices.HIP])
def test_stand_ins(name: str) -> None:
    """The code for Metal and HIP, compiled for the CPU."""
    device = devices.need(name)
    if name == "msl-shim":
        device = msl_shim.ShimDevice(matrices=True)
    find_layout(device)
    case = replace(LATENT, dims=(576, 512), lens=(37, 0, 18), rows=2, dtype="f16", options={"softcap": 4.0})
    problem, operands = decode_cases.problem_of(case, given_of(case))
    config = plan_decode(problem, decode_views(operands, operands.q), device.target).steps[0].config
    assert isinstance(config, LatentConfig)
    out, lse = decode_on_host("mla_decode", problem, operands, device)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


def test_records_divide_work_evenly() -> None:
    for record in (record for record in every(OP) if record.use["kind"] == "fragment"):
        shape = LatentShape(**record.use["shape"])
        assert any(replace(shape, lanes=lanes).possible for lanes in (32, 64)), record
