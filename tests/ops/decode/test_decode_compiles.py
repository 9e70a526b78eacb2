"""The decoding kernels go through ptxas for every architecture and through spirv-val. No GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_forward_compiles import ARCHS, VULKAN_TARGETS, table

from aule.codegen import TARGETS, generate
from aule.ops.combine.second_launch import build_combine
from aule.ops.decode.config import FragmentDecodeShape
from aule.ops.decode.plan.decode import plan_decode
from aule.ops.decode.plan.shapes import choose_decode_shape, choose_splits, combines_in_last_workgroup
from aule.ops.decode.problem import DecodeProblem
from aule.ops.shared.plan import Plan
from aule.target import NVIDIA_LAYOUT, Target
from aule.view import TensorView, contiguous_strides

CASES = {
    "contiguous": {"batch": 32},
    "short": {"keys": 1024},
    "long": {"keys": 65536},
    "pages": {"batch": 32, "page": 16},
    "int8": {"page": 16, "cache": "i8"},
    "fp8": {"page": 16, "cache": "e4m3"},
    "prefill": {"page": 16, "rows": 512},
}
PLAIN = ("contiguous", "long")
"""Those that are compiled without matrix units: with 128 registers, so that two workgroups share a multiprocessor."""


def problem(batch: int = 1, keys: int = 4096, page: int = 0, cache: str = "f16", rows: int = 1) -> DecodeProblem:
    """32 query and 8 key heads of 128."""
    pages = batch * keys // page if page else 0
    return DecodeProblem(batch, 32, 8, rows, keys, 128, 128, "f16", cache, 128**-0.5, page=page, pages=pages)


def views_of(given: DecodeProblem) -> dict[str, TensorView]:
    """Views for such a problem, the pool as [pages, page, heads, dim]."""

    def view(dtype: str, *shape: int) -> TensorView:
        return TensorView(dtype, shape, contiguous_strides(shape), "device", None)

    def heads_first(view: TensorView) -> TensorView:
        shape, strides = view.shape, view.strides
        return replace(
            view, shape=(shape[0], shape[2], shape[1], shape[3]), strides=(strides[0], strides[2], strides[1], 1)
        )

    batch, keys, page, pages = given.batch, given.seq_kv, given.page, given.pages
    queries = view(given.dtype, batch, 32, given.seq_q, 128)
    pool = heads_first(view(given.cache, pages, page, 8, 128)) if page else view(given.cache, batch, 8, keys, 128)
    views = {"q": queries, "k": pool, "v": pool, "o": queries, "lens": view("i32", batch)}
    if page:
        views["tables"] = view("i32", batch, keys // page)
    if given.quantised:
        views["k_scale"] = views["v_scale"] = heads_first(view("f32", pages, page, 8, 1))
    return views


def plan_of(target: Target, batch: int = 1, keys: int = 4096, page: int = 0, cache: str = "f16", rows: int = 1) -> Plan:
    given = problem(batch, keys, page, cache, rows)
    return plan_decode(given, views_of(given), target)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas (CUDA toolkit) is not installed")
@pytest.mark.parametrize("arch", ARCHS)
def test_nvidia(arch: str, tmp_path: Path) -> None:
    target = replace(table.nvidia_target(arch), compute_units=132)
    if arch == "sm_90":
        units = TARGETS["ptx"].matrix_units
        target = replace(target, matrix_units=units, matrix_layout=NVIDIA_LAYOUT, overlap=True, max_cluster=8)
    for name in CASES if arch == "sm_90" else PLAIN:
        for step in plan_of(target, **CASES[name]).steps:  # type: ignore[arg-type]
            path = tmp_path / "kernel.ptx"
            text = generate(step.build(step.config, target), target).text
            path.write_text(text)
            named = text.split(".target ")[1].split()[0]  # products of warpgroups are sm_90a's
            assert named.removesuffix("a") == arch
            command = ["ptxas", f"-arch={named}", "-v", str(path), "-o", str(tmp_path / "kernel.cubin")]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, (name, done.stderr)
            spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
            assert name == "prefill" or max(spilled) <= 16, (name, done.stderr)
            if name != "prefill":  # ptxas makes 25 instructions of each, by powers of two, too
                assert not re.search(r"\b(div|rem)\.[su]\d+", text), name
            units = arch == "sm_90" and step.build is not build_combine
            assert units == ("mma.sync" in text or "wgmma" in text), name


@pytest.mark.skipif(shutil.which("spirv-val") is None, reason="spirv-val (Debian: spirv-tools) is not installed")
@pytest.mark.parametrize("name", ["everything", "no storage16", "no subgroups", "waves of 64"])
def test_spirv_is_valid(name: str, tmp_path: Path) -> None:
    target = VULKAN_TARGETS[name]
    version = f"vulkan{target.language_version // 10}.{target.language_version % 10}"
    for case in ("long", "pages", "fp8"):
        for step in plan_of(target, **CASES[case]).steps:  # type: ignore[arg-type]
            path = tmp_path / "kernel.spv"
            path.write_bytes(generate(step.build(step.config, target), target).code)
            command = ["spirv-val", "--target-env", version, "--scalar-block-layout", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, (case, done.stdout + done.stderr)


def test_parts_are_added_up_by_the_last_workgroup_where_that_can_be_and_is_quick() -> None:
    target = replace(table.nvidia_target("sm_90"), compute_units=132)
    few, fragments = choose_decode_shape(problem(), target, 8), FragmentDecodeShape(16, 1, 4)
    assert combines_in_last_workgroup(few, 4, 32, (128, 128), 8, target)
    assert not combines_in_last_workgroup(few, 4, 32, (128, 128), 8, replace(target, overlap=True))
    assert not combines_in_last_workgroup(few, 4, 32, (128, 128), 8, replace(target, device_fence=False))
    assert combines_in_last_workgroup(fragments, 16, 4, (128, 128), 8, target)
    assert not combines_in_last_workgroup(
        fragments, 16, 8, (128, 128), 8, target
    )  # a second launch reads these with more workgroups
    assert not combines_in_last_workgroup(few, 4, 32, (128, 128), 9, replace(target, max_buffers=8))
    full = replace(target, max_shared_bytes=few.shared_bytes(128))
    assert not combines_in_last_workgroup(few, 4, 32, (128, 128), 8, full)


@pytest.mark.parametrize(
    ("blocks", "keys", "parts"),
    [
        (256, 4096, 1),  # batch 32, 8 key heads: full
        (8, 65536, 32),  # batch 1: as many as run at a time, with an even number of steps each
        (8, 512, 8),
        (8, 4096, 16),  # a workgroup for each multiprocessor
        (8, 8192, 32),
        (32, 1024, 4),
        (32, 32768, 8),
        (100, 65536, 5),  # two waves, well filled, instead of one that is not
        (256, 131072, 8),  # for one long sequence among short ones
        (0, 4096, 1),
    ],
)
def test_parts_of_a_sequence(blocks: int, keys: int, parts: int) -> None:
    target = replace(TARGETS["ptx"], compute_units=132)
    assert choose_splits(blocks, keys, 64, 2, target, uneven=True)[0] == parts
