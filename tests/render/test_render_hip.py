"""HIP: the source, its exchanges between lanes, its matrix layouts, and what a compiler for AMD GPUs makes of it.

No test here runs a kernel; `test_hip_*` of the runtime execute the same source on a stand-in.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from types import ModuleType

import devices
import numpy as np
import pytest
from render_cases import cases
from repository import ROOT

from aule.codegen import target_for
from aule.errors import InvalidArgumentError, KernelError
from aule.ir.builder import Builder
from aule.ir.types import Fragment, Vector, f16, f32, i32, u32
from aule.kernels import AttentionKernel
from aule.render import _hip_prelude as prelude
from aule.render import hip
from aule.render._hip_fragment import unit_of
from aule.runtime._hip_chips import chip
from aule.target import FragmentLayout, Target
from aule.tile.fragment.arrangement import arrange


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_hip", ROOT / "tools" / "compile_hip.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compile_hip = _load()
Problem = compile_hip.Problem

MATRIX = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")
RDNA3_WIDE = replace(chip("gfx1100"), subgroup_size=64, subgroup_sizes=(64,))


def needs_compiler() -> None:
    if not compile_hip.available():
        pytest.skip("no clang for AMD GPUs: pip install ziglang")


# -- the source --------------------------------------------------------------------------------------------------------


def test_amds_builtins_are_in_the_part_that_a_stand_in_replaces() -> None:
    for arch in ("gfx950", "gfx1100"):
        source = AttentionKernel.tensor_core(2048, 128).emit("hip", arch=arch)
        assert isinstance(source, str)
        head, _, kernel = source.partition("#endif\n\n")
        assert "__builtin_amdgcn_" in head and "__attribute__" in head and "#include" not in source
        assert "amdgcn" not in kernel and "__hip" not in kernel and "__clang" not in kernel
        assert {"mfma" in kernel, "wmma" in kernel} == {True, False}


def test_an_instruction_set_is_chosen_by_its_name() -> None:
    kernel = AttentionKernel.tensor_core(2048, 128)
    sources = {arch: kernel.emit("hip", arch=arch) for arch in ("gfx908", "gfx942", "gfx950", "gfx1100", "gfx1201")}
    assert len(set(sources.values())) == len(sources)
    assert kernel.emit("hip") == sources["gfx942"] == kernel.emit_hip()
    assert chip("gfx90a:sramecc+:xnack-").arch == "gfx90a"
    assert target_for("ptx", "sm_90").arch == "sm_90"
    for language, arch in (("hip", "sm_90"), ("hip", "gfx803"), ("hip", "gfx"), ("ptx", "gfx942"), ("wgsl", "gfx942")):
        with pytest.raises(InvalidArgumentError, match="expected an arch as sm_90"):
            kernel.emit(language, arch=arch)
    with pytest.raises(InvalidArgumentError, match="got both"):
        kernel.emit("hip", chip("gfx942"), arch="gfx942")
    with pytest.raises(KernelError, match="architecture as gfx942"):
        hip.render(next(cases()).kernel, Target("hip"))


def test_waves_of_64_lanes_are_an_option_of_the_compiler_where_they_are_not_usual() -> None:
    kernel = next(case.kernel for case in cases() if "subgroups" in case.needs and not case.kernel.subgroup_size)
    assert hip.render(kernel, RDNA3_WIDE).extensions == (hip.WAVE64,)
    assert hip.render(kernel, chip("gfx1100")).extensions == hip.render(kernel, chip("gfx942")).extensions == ()


# -- exchanges between lanes -------------------------------------------------------------------------------------------


def lane_read(text: str, lane: int) -> int:
    """The lane from which an exchange reads, by AMD's description of DPP controls and of swizzles."""
    if found := re.search(r"update_dpp\(0, word, (0x[0-9a-f]+), 15, 15, true\)", text):
        control, row = int(found[1], 16), lane & ~15
        if control < 0x100:  # a permutation of each four lanes
            return lane & ~3 | control >> 2 * (lane & 3) & 3
        if control >= 0x160:
            return lane ^ (control & 15)
        places = {0x128: (lane - 8) % 16, 0x140: 15 - lane % 16, 0x141: lane & 8 | 7 - lane % 8}
        return row + places[control]
    found = re.search(r"ds_swizzle\(word, (0x[0-9a-f]+)\)", text)
    if found is None:
        return lane ^ int(re.fullmatch(r"shuffle\(word, lane_id\(\) \^ (\d+)\)", text)[1])  # type: ignore[index]
    pattern = int(found[1], 16)
    assert pattern < 1 << 15  # the mode with three masks
    inside = (lane & 31 & pattern | pattern >> 5 & 31) ^ (pattern >> 10 & 31)
    return lane & 32 | inside


@pytest.mark.parametrize("arch", ["gfx906", "gfx1100"])
def test_exchanges_read_the_right_lane(arch: str) -> None:
    for mask in range(1, 64):
        text = prelude._exchange(mask, arch)
        assert [lane_read(text, lane) for lane in range(64)] == [lane ^ mask for lane in range(64)], (mask, text)
    for mask in (1, 2, 8):  # sums of rows use these
        assert "dpp" in prelude._exchange(mask, arch)


# -- matrices ----------------------------------------------------------------------------------------------------------


def placed(layout: FragmentLayout) -> np.ndarray:
    return np.array([[layout.place(lane, part) for part in range(layout.parts)] for lane in range(layout.lanes)])


def multiplied(layouts: tuple[FragmentLayout, ...]) -> None:
    """Every element of every matrix is somewhere, copies are complete, results are held once."""
    for layout, copies in zip(layouts, (1, None, None), strict=True):
        count = np.zeros((16, 16), int)
        np.add.at(count, tuple(placed(layout).reshape(-1, 2).T), 1)
        assert len(np.unique(count)) == 1 and count[0, 0] == (copies or count[0, 0])


@pytest.mark.parametrize("arch", MATRIX)
def test_targets_have_the_layouts_that_are_rendered(arch: str) -> None:
    target = chip(arch)
    unit = unit_of(arch, target.subgroup_size)
    assert unit is not None and target.matrix_factors is not None
    assert (target.matrix_layout, *target.matrix_factors) == unit.layouts
    multiplied(unit.layouts)
    found = arrange(target)
    # S^T = K Q^T: a column of an accumulator is a row of S. Only RDNA 3 must exchange to make it a factor.
    assert found.transposed and found.factors is not None
    assert len(found.exchanges) == (1 if arch.startswith("gfx11") else 0)


def test_chips_without_matrix_units() -> None:
    for arch in ("gfx906", "gfx1030"):
        assert not chip(arch).matrix_units and unit_of(arch, chip(arch).subgroup_size) is None
    assert unit_of("gfx942", 32) is None and unit_of("gfx1201", 64) is None
    b = Builder("product", 64, 64)
    out = b.buffer("out", f32, "write")
    b.store(out, b.thread_id(), b.fragment_get(b.fragment_fill(Fragment(f32, 16, 16, "accumulator"), 1.0), 0))
    with pytest.raises(KernelError, match="expected a target with matrix units"):
        hip.render(b.finish(), chip("gfx906"))


def load_kernel(target: Target, use: str, order: str) -> str:
    b = Builder("loads", target.subgroup_size, target.subgroup_size)
    tile, out = b.shared("tile", f16, 512), b.buffer("out", f16, "write")
    b.store(tile, b.thread_id(), b.const(0.0, f16))
    b.barrier()
    fragment = b.fragment_load(Fragment(f16, 16, 16, use), tile, 0, 32, order)  # type: ignore[arg-type]
    b.store(out, b.thread_id(), b.fragment_get(fragment, 0))
    return hip.render(b.finish(), target).text


def test_factors_are_loaded_in_one_access_along_the_sum() -> None:
    for arch, vector in (("gfx942", "f16x4"), ("gfx1100", "f16x16"), ("gfx1201", "f16x8")):
        for use, order in (("a", "row"), ("b", "column")):
            assert f"return *(const {vector}*)(p + 0);" in load_kernel(chip(arch), use, order)
        assert "p[1 * stride + 0]" in load_kernel(chip(arch), "b", "row")


# -- compiled ----------------------------------------------------------------------------------------------------------

SAMPLE = {
    "gfx906": ("forward", "f32 b1 h8x8 q2048 k2048 d64", "causal"),
    "gfx908": ("forward", "bf16 b1 h8x8 q2048 k2048 d64", "causal"),
    "gfx90a": ("backward", "bf16 b1 h8x8 q2048 k2048 d64", "causal"),
    "gfx942": ("forward", "bf16 b1 h8x8 q2048 k2048 d128", "causal"),
    "gfx950": ("forward", "f16 b1 h8x8 q2048 k2048 d128", ""),
    "gfx1030": ("forward", "f16 b1 h8x8 q2048 k2048 d64", ""),
    "gfx1100": ("forward", "bf16 b1 h8x8 q2048 k2048 d128", "causal"),
    "gfx1151": ("backward", "f16 b1 h8x8 q2048 k2048 d64", "causal"),
    "gfx1201": ("forward", "bf16 b1 h8x8 q2048 k2048 d128", ""),
}
INSTRUCTIONS = {
    "gfx908": "v_mfma_f32_16x16x8bf16", "gfx90a": "v_mfma_f32_16x16x16bf16_1k", "gfx942": "v_mfma_f32_16x16x16_bf16",
    "gfx950": "v_mfma_f32_16x16x32_f16", "gfx1100": "v_wmma_f32_16x16x16_bf16", "gfx1151": "v_wmma_f32_16x16x16_f16",
    "gfx1201": "v_wmma_f32_16x16x16_bf16",
}  # fmt: skip


@pytest.mark.parametrize("arch", compile_hip.CHIPS)
def test_attention_compiles_without_spills_and_multiplies_matrices(arch: str) -> None:
    needs_compiler()
    artifacts = compile_hip.kernels(Problem("attention", *SAMPLE[arch]), arch)
    artifact = max(artifacts, key=lambda found: len(found.code))
    text = compile_hip.assembly(artifact, arch)
    found = compile_hip.read(text)
    assert not found.spills and not found.scratch and 0 <= artifact.shared_bytes - found.lds < 16
    assert (arch in INSTRUCTIONS) == (found.products > 0) == compile_hip.wanted_products(artifact)
    assert INSTRUCTIONS.get(arch, "") in text


@pytest.mark.parametrize(("arch", "kind"), [("gfx942", "decode"), ("gfx1100", "rows"), ("gfx906", "rows")])
def test_other_operations_compile_without_spills(arch: str, kind: str) -> None:
    needs_compiler()
    for problem in [problem for problem in compile_hip.problems() if problem.kind == kind][::4]:
        for artifact in compile_hip.kernels(problem, arch):
            found = compile_hip.read(compile_hip.assembly(artifact, arch))
            assert not found.spills and not found.scratch, (problem, artifact.entry)


SPILLS = {("gfx1030", "backward bf16 b1 h8x8 q2048 k2048 d128 ds causal", "flash_attention_backward_queries"): 6}
"""Registers that kernels of the table spill."""


@pytest.mark.skipif(not devices.FULL, reason="takes half a minute for each chip; AULE_FULL_GRID=1 runs it")
@pytest.mark.parametrize("arch", compile_hip.CHIPS)
def test_every_kernel_of_the_table_compiles_without_spills(arch: str) -> None:
    needs_compiler()
    count = 0
    for problem in compile_hip.problems():
        for artifact in compile_hip.kernels(problem, arch):
            found = compile_hip.read(compile_hip.assembly(artifact, arch))
            known = SPILLS.get((arch, compile_hip.label(problem), artifact.entry), 0)
            assert found.spills == known and bool(found.scratch) == bool(known), (problem, artifact.entry)
            assert (found.products > 0) == compile_hip.wanted_products(artifact), (problem, artifact.entry)
            count += 1
    assert count > 90


def test_small_kernels_compile() -> None:
    """A share of the kernels that together use every operation, for each chip in turn."""
    needs_compiler()
    targets = [*map(chip, compile_hip.CHIPS), RDNA3_WIDE]
    count = 0
    for number, case in enumerate(cases()):
        target = targets[number % len(targets)]
        asked = case.kernel.subgroup_size
        if number % 6 or "fragments" in case.needs or (asked and asked not in target.subgroup_sizes):
            continue
        compile_hip.assembly(hip.render(case.kernel, target), target.arch)
        count += 1
    assert count > 30


def test_instructions_that_some_chips_have() -> None:
    b = Builder("special", 64)
    x, sums, halves = b.buffer("x", u32), b.buffer("sums", f32, "write"), b.buffer("halves", f16, "write")
    word = b.load(x, b.thread_id())
    b.store(sums, b.thread_id(), b.dot_pairs(word, word, b.const(0.0, f32)))
    b.store(halves, b.thread_id() * 4, b.emit("e4m3_halves", (word,), Vector(f16, 4)))
    kernel = b.finish()
    for arch in ("gfx942", "gfx1100", "gfx1030"):
        with pytest.raises(KernelError, match=f"has no (dot_pairs|e4m3_halves) for {arch}"):
            hip.render(kernel, chip(arch))
        assert not chip(arch).e4m3
    needs_compiler()
    text = compile_hip.assembly(hip.render(kernel, chip("gfx1201")), "gfx1201")
    assert "v_dot2_f32_bf16" in text and "v_cvt_pk_f32_fp8" in text and chip("gfx1201").e4m3


@pytest.mark.parametrize(
    ("arch", "options"), [("gfx906", ()), ("gfx942", ()), ("gfx1100", ("-mcumode",)), ("gfx1201", ())]
)
def test_stores_are_complete_before_a_ticket_is_drawn(arch: str, options: tuple[str, ...]) -> None:
    """Every wave waits for its own stores in front of the barrier: the wave that draws waits for none but its own."""
    needs_compiler()
    (artifact,) = compile_hip.kernels(Problem("decode", "decode", "bf16 b1 h32x8 n8192 d128"), arch)
    lines = compile_hip.assembly(artifact, arch, options).splitlines()
    (ticket,) = [i for i, line in enumerate(lines) if "global_atomic_add" in line]
    barrier = max(i for i in range(ticket) if "s_barrier" in lines[i] and "wait" not in lines[i])
    store = max(i for i in range(barrier) if "global_store" in lines[i])
    waits = re.compile(r"s_waitcnt vmcnt\(0\)|s_waitcnt_vscnt null, 0x0|s_wait_storecnt 0x0")
    assert any(waits.search(line) for line in lines[store:barrier]), lines[store : barrier + 1]


def test_mi200_multiplies_fp16_without_matrix_units() -> None:
    """They set subnormal numbers to zero; so does v_dot2."""
    assert chip("gfx90a").matrix_units == ("m16n16k16:bf16:f32",)
    assert chip("gfx942").matrix_units == ("m16n16k16:f16:f32", "m16n16k16:bf16:f32")
    needs_compiler()
    for sizes, wanted in (("f16 b1 h8x8 q2048 k2048 d64", False), ("bf16 b1 h8x8 q2048 k2048 d64", True)):
        (artifact,) = compile_hip.kernels(Problem("attention", "forward", sizes), "gfx90a")
        text = compile_hip.assembly(artifact, "gfx90a")
        assert ("v_mfma" in text) == wanted and "v_dot2" not in text


def test_shuffles_of_64_lanes_read_both_halves_in_all_lanes() -> None:
    needs_compiler()
    b = Builder("turned", 64, 64)
    out = b.buffer("out", f32, "write")
    lane = b.lane_id()
    b.store(out, lane, b.shuffle(b.cast(lane, f32), b.cast((lane * 37) % 64, i32)))
    text = compile_hip.assembly(hip.render(b.finish(), RDNA3_WIDE), "gfx1100")
    assert text.count("\tds_bpermute_b32") == 2 and "\tv_permlane64_b32" in text and "s_cbranch" not in text


def test_atomic_additions_are_one_instruction_where_the_chip_has_it() -> None:
    b = Builder("adds", 64)
    sums, counts = b.buffer("sums", f32, "readwrite"), b.buffer("counts", i32, "readwrite")
    b.atomic("add", sums, b.group_id(), 1.0)
    b.atomic("add", counts, 0, 1)
    kernel = b.finish()
    needs_compiler()
    for arch in ("gfx90a", "gfx1100", "gfx906"):
        text = compile_hip.assembly(hip.render(kernel, chip(arch)), arch)
        assert ("global_atomic_add_f32" in text) == chip(arch).atomic_f32_add == (arch != "gfx906")
