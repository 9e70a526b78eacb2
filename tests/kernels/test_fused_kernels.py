"""Row operations in the kernel library: every language, and NVIDIA's assembler without spills."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import aule
from aule.artifact import Artifact
from aule.codegen import generate, target_for
from aule.engine.row_ops import result_views
from aule.kernels import (
    FusedKernel,
    GeGLUKernel,
    LayerNormLinearKernel,
    ResidualLayerNormKernel,
    RMSNormRoPEKernel,
    SoftmaxDropoutKernel,
    SwiGLUKernel,
)
from aule.ops.catalogue import CATALOGUE
from aule.ops.rows.hints import Work
from aule.ops.rows.layout import (
    choose_rows,
    choose_sums,
    has_moments,
    rounds_fused,
    row_grid,
    sums_layout,
    usual_sums,
)
from aule.target import Target
from aule.tile.rows.shape import PassShape, RowShape
from aule.view import TensorView, contiguous_strides

KERNELS: dict[str, FusedKernel] = {
    "swiglu": SwiGLUKernel(4096, 4096, dtype="bf16"),
    "geglu": GeGLUKernel(4096, 11008, dtype="f16"),
    "geglu_tanh": GeGLUKernel(64, 300, approximate="tanh"),
    "residual_layer_norm": ResidualLayerNormKernel(4096, 8192, dtype="bf16"),
    "layer_norm_linear": LayerNormLinearKernel(4096, 4096, 4096, dtype="bf16"),
    "rms_norm_rope": RMSNormRoPEKernel(2048, 128, num_heads=8, dtype="bf16"),
    "softmax_dropout": SoftmaxDropoutKernel(2048, 4096, dtype="bf16"),
}
HOPPER = replace(target_for("ptx"), arch="sm_90", compute_units=132)


@pytest.mark.parametrize("name", KERNELS)
def test_every_language(name: str) -> None:
    kernel = KERNELS[name]
    assert kernel.name == name
    for language in ("ptx", "hip", "spirv", "opencl", "wgsl", "msl", "llvm"):
        artifact = kernel.artifact(language)
        names = [p.name for p in artifact.buffers]
        needed = set(kernel.operands())
        if "packed_ptr" in names:  # by the launch before
            assert (name, language) == ("layer_norm_linear", "llvm") and len(kernel.steps(language)) == 3
            needed.remove("weight")
        assert {f"{operand}_ptr" for operand in needed} < set(names) and "y_ptr" in names
        assert set(p.name for p in artifact.scalars) <= set(kernel.plan(language).scalars)
        assert len(artifact.code) > 500
    assert kernel.emit("ptx") == kernel.emit_ptx()


def test_refused() -> None:
    with pytest.raises(aule.InvalidShapeError, match=r"\[SwiGLUKernel\] expected rows >= 1"):
        SwiGLUKernel(0, 4)
    with pytest.raises(aule.InvalidDtypeError, match="expected dtype float32, float16 or bfloat16"):
        GeGLUKernel(1, 4, dtype="f64")


def test_shared_memory() -> None:
    assert SwiGLUKernel(4, 4096).shared_memory_bytes == 0
    assert ResidualLayerNormKernel(4, 4096).shared_memory_bytes > 0


@pytest.mark.parametrize("name", KERNELS)
def test_assembled_without_spills(name: str, tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    kernel = KERNELS[name]
    artifact = generate(kernel.build(HOPPER), HOPPER)
    if kernel.dtype == "bf16":
        rows = [line for line in artifact.text.splitlines() if re.search(r"(ld|st)\.global", line)]
        if name == "layer_norm_linear":  # beside numbers of each row and column
            rows = [line for line in rows if not re.search(r"\.f32|\.b16", line)]
        assert rows and all(re.search(r"\.v4\.(b32|f32)|seed|\.b32\s", line) for line in rows)
    assert "0 bytes spill stores" in assembled(ptxas, artifact, tmp_path)


@pytest.mark.parametrize("length", [256, 512, 768, 1024, 4096, 8192, 16384])
@pytest.mark.parametrize(
    ("name", "kept"),
    [("rms_norm", False), ("layer_norm", False), ("layer_norm", True), ("residual_layer_norm", True)],
)
def test_gradients_read_ahead(name: str, kept: bool, length: int, tmp_path: Path) -> None:
    """Rows of norms' gradients come ahead of their turn, sums of columns find room in registers, and as many workgroups
    fit a multiprocessor as there are: what is chosen counts on that."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    spec = CATALOGUE[name].gradient
    assert spec is not None
    needed = [operand.name for operand in spec.operands if operand.spares is None or kept]
    shapes = {name: (1024, length) for name in needed} | {"weight": (length,), "bias": (length,)}
    views = {n: TensorView("bf16", shape, contiguous_strides(shape), "cuda", None) for n, shape in shapes.items()}
    views["statistics"] = TensorView("f32", (3, 1024), (1024, 1), "cuda", None)
    call = spec.call({name: views[name] for name in needed}, {o.name: o.default for o in spec.options})
    target = replace(HOPPER, max_shared_bytes=232448, max_cluster=8)
    step = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0]
    artifact = generate(step.build(step.config, target), target)
    shape, loads = step.config.shape, [line for line in artifact.text.splitlines() if "ld.global" in line]
    assert shape.prefetch
    if shape.prefetch_to == "shared":
        rows = [line for line in loads if "v4" in line]
        assert len(rows) == step.config.passes[0].parts  # of the weight; all else comes by copies
        assert artifact.text.count("cp.async.cg") > len(rows)
        assert len(loads) - len(rows) == 4 * shape.batch * kept  # numbers of the first rows, and of the next
    assert shape.resident * (artifact.shared_bytes + 1024) <= target.max_shared_bytes + 1024
    said = assembled(ptxas, artifact, tmp_path)
    assert "0 bytes spill stores" in said
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None
    each = -(-int(registers[1]) // 8) * 8
    assert shape.resident * shape.workgroup * each <= 1 << 16


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_long_softmax_keeps_all_in_registers(causal: bool, tmp_path: Path) -> None:
    """Two workgroups of 512 threads fit a multiprocessor: with weights, and with what comes for them as narrow as it
    is, which is masked by bits."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    target = replace(HOPPER, max_shared_bytes=232448, max_cluster=8, overlap=True)
    spec = CATALOGUE["softmax_dropout"].gradient
    assert spec is not None
    shapes = {"dy": (1024, 16384), "x": (1024, 16384)}
    views = {n: TensorView("bf16", shape, contiguous_strides(shape), "cuda", None) for n, shape in shapes.items()}
    views["statistics"] = TensorView("f32", (2, 1024), (1024, 1), "cuda", None)
    views["seed"] = TensorView("i32", (2,), (1,), "cuda", None)
    call = spec.call(views, {"dropout_p": 0.1, "causal": causal, "scale": 1.0})
    step = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0]
    assert step.config.shape.workgroup == 512 and step.config.awaits
    said = assembled(ptxas, generate(step.build(step.config, target), target), tmp_path)
    registers = re.search(r"Used (\d+) registers", said)
    assert "0 bytes spill stores" in said and registers is not None and int(registers[1]) <= 64


def test_long_rows_that_lose_their_mean_land_in_shared_memory(tmp_path: Path) -> None:
    """Three workgroups of 512 threads fit a multiprocessor. They begin while the launch before ends; small ones, of
    which there are more than a multiprocessor takes at once, do not."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    target = replace(HOPPER, max_shared_bytes=232448, overlap=True)
    spec = CATALOGUE["layer_norm"]
    begun = {}
    for rows, length in ((1024, 16384), (1 << 20, 1024), (1 << 14, 1024)):
        shapes = {"x": (rows, length), "weight": (length,), "bias": (length,)}
        views = {n: TensorView("bf16", shape, contiguous_strides(shape), "cuda", None) for n, shape in shapes.items()}
        call = spec.call(views, {o.name: o.default for o in spec.options})
        step = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0]
        artifact = generate(step.build(step.config, target), target)
        begun[rows] = step.config.shape.workgroup, artifact.dependent_launch
        if length == 16384:
            said = assembled(ptxas, artifact, tmp_path)
            registers = re.search(r"Used (\d+) registers", said)
            assert "0 bytes spill stores" in said and registers is not None and int(registers[1]) <= 40
            assert artifact.text.count("cp.async.cg") == 4 and 3 * (artifact.shared_bytes + 1024) <= 228 << 10
            assert artifact.text.count("bar.sync") == 1
    assert begun == {1024: (512, True), 1 << 20: (32, False), 1 << 14: (128, True)}


@pytest.mark.parametrize("kept", [False, True])
def test_two_workgroups_of_long_rows_with_a_residual_fit(kept: bool, tmp_path: Path) -> None:
    """Also where the gradient's numbers are stored, at the price of one that is spilled."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    target = replace(HOPPER, max_shared_bytes=232448, overlap=True)
    spec, shape = CATALOGUE["residual_layer_norm"], (512, 16384)
    shapes = {"x": shape, "residual": shape, "weight": shape[1:], "bias": shape[1:]}
    views = {n: TensorView("bf16", x, contiguous_strides(x), "cuda", None) for n, x in shapes.items()}
    wanted = (*spec.outputs, *spec.saved_outputs) if kept else spec.outputs
    call = spec.call(views, {o.name: o.default for o in spec.options}, wanted)
    step = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0]
    said = assembled(ptxas, generate(step.build(step.config, target), target), tmp_path)
    registers, spilled = (re.search(words, said) for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    assert registers is not None and spilled is not None
    assert step.config.shape.workgroup * 2 * int(registers[1]) <= 1 << 16 and int(spilled[1]) <= 4 * kept


def test_long_arrays_of_rows_are_given_up_last() -> None:
    """Rows that are read, but not weights, where arrays are larger than the cache, and without a residual several times
    as large."""
    target = replace(HOPPER, max_shared_bytes=232448)
    found = {}
    for op, rows in (("residual_rms_norm", 1024), ("residual_rms_norm", 2048), ("rms_norm", 8192), ("rms_norm", 32768)):
        spec = CATALOGUE[op]
        shapes = {"x": (rows, 4096), "weight": (4096,)} | ({"residual": (rows, 4096)} if "residual" in op else {})
        views = {n: TensorView("bf16", shape, contiguous_strides(shape), "cuda", None) for n, shape in shapes.items()}
        call = spec.call(views, {o.name: o.default for o in spec.options})
        step = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0]
        lines = generate(step.build(step.config, target), target).text.splitlines()
        loads = [line for line in lines if "ld.global" in line]
        hinted = [line for line in loads if "L2::cache_hint" in line]
        found[op, rows] = len(hinted) / (len(loads) - step.config.passes[0].parts)
    assert list(found.values()) == [0.0, 1.0, 0.0, 1.0]


def test_gated_units_and_rotations_begin_early_and_long_arrays_last() -> None:
    """On a Hopper, while the launch before ends; gradients that stay for their sums of columns do not. Arrays that are
    several times as large as the cache are given up last, and then rows of norms and rotations have small workgroups,
    which wait."""
    target = replace(HOPPER, max_shared_bytes=232448, overlap=True)
    found = {}
    for op, last in (("swiglu", "up"), ("rope", None), ("rms_norm_rope", "weight")):
        spec = CATALOGUE[op]
        for rows in (1 << 11, 1 << 17):
            shapes: dict[str, tuple[int, ...]] = {"gate": (rows, 4096), "up": (rows, 4096)}
            if op != "swiglu":
                shapes = {"x": (1, 8, rows, 128), "cos": (rows, 64), "sin": (rows, 64)}
                shapes |= {"weight": (128,)} if last else {}
            views = {n: TensorView("bf16", x, contiguous_strides(x), "cuda", None) for n, x in shapes.items()}
            call = spec.call(views, {o.name: o.default for o in spec.options})
            step = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0]
            artifact = generate(step.build(step.config, target), target)
            found[op, rows] = artifact.dependent_launch, "L2::cache_hint" in artifact.text
    small, large = ([found[op, rows] for op in ("swiglu", "rope", "rms_norm_rope")] for rows in (1 << 11, 1 << 17))
    assert small == [(True, False)] * 3
    assert large == [(True, True), (True, True), (False, True)]


def test_devices_that_nobody_has_measured_read_no_rows_ahead() -> None:
    work = Work(sums=2, columns=True, copied=(2, 2))
    for language in ("spirv", "opencl", "wgsl", "msl"):
        assert choose_sums(target_for(language), 4096, work) == usual_sums()
    assert choose_sums(replace(target_for("spirv"), vendor="nvidia"), 4096, work).prefetch_to == "registers"
    assert choose_sums(replace(HOPPER, arch="sm_75"), 4096, work) == usual_sums()


def test_which_rows_lie_over_clusters() -> None:
    """Gradients that exchange all numbers of a row at once, on devices with clusters and room for two blocks, of rows
    of any length of a class; others are laid out as ever."""
    hopper = replace(HOPPER, max_shared_bytes=232448, max_cluster=8)
    small = replace(hopper, max_shared_bytes=65536)
    before = replace(hopper, max_cluster=1)
    work = Work(sums=2, columns=True, copied=(2, 2, 2), centred=True, exchanged=2)

    def shape_of(target: Target, length: int, work: Work = work, rows: int = 4096) -> RowShape:
        size = max(work.copied)
        return choose_rows(target, "bf16" if size == 2 else "f32", length, 16 // size, rows, work)[0]

    clusters = {n: shape_of(hopper, n).cluster for n in (2048, 4096, 7168, 8192, 12288, 16384, 20480)}
    assert clusters == {2048: 1, 4096: 2, 7168: 8, 8192: 8, 12288: 8, 16384: 8, 20480: 1}
    assert row_grid("layer_norm_backward", shape_of(hopper, 16384), 4096, hopper) == (120, 1, 1)
    for length in (4096, 8192, 16384):
        assert shape_of(hopper, length).cluster_exchange == 2
        for target, other in ((small, work), (before, work), (hopper, replace(work, exchanged=0))):
            shape = shape_of(target, length, other)
            assert shape.cluster == 1 and shape.cluster_exchange == 0
            assert shape == shape_of(target, length, replace(work, exchanged=0))
    wide = replace(work, copied=(4, 4, 4))
    assert [shape_of(hopper, n, wide).cluster for n in (4096, 8192, 16384)] == [1, 1, 8]
    alone = Work(sums=1, columns=True, copied=(2, 2), exchanged=2)
    assert [shape_of(hopper, 8192, alone, rows).cluster for rows in (4096, 1 << 16)] == [8, 1]


def test_norms_through_vulkan_on_nvidia() -> None:
    """Long rows are rounded by a fused operation, LayerNorm's are packed, and of shorter ones the first weights come
    before the exchange; with a residual those are rounded so, too, and short ones have many threads; three of these are
    side by side in its gradient."""
    target = replace(target_for("spirv"), vendor="nvidia", max_threads=1024, subgroup_sizes=(32,))
    assert rounds_fused(target, 16384) and not rounds_fused(target, 4096) and not rounds_fused(HOPPER, 16384)
    residual = Work(columns=True, written=2, centred=True)
    assert rounds_fused(target, 4096, residual) and has_moments(target, "bf16", 4096, residual)
    assert not has_moments(target, "bf16", 4096) and not has_moments(target, "bf16", 8192, residual)
    shape, passes = choose_rows(target, "bf16", 4096, 8, 2048, residual)
    assert (shape.threads, passes.parts, passes.columns) == (256, 2, "row_start")
    shape, passes = choose_rows(target, "bf16", 1024, 8, 8192, residual)
    assert (shape.threads, shape.slots, passes.parts) == (128, 1, 1)
    _, passes = choose_rows(target, "bf16", 16384, 8, 1024, Work(columns=True, centred=True))
    assert (passes.columns, passes.narrow) == ("first_use", True)
    _, passes = choose_rows(target, "bf16", 4096, 8, 4096, Work(columns=True, centred=True))
    assert (passes.columns, passes.narrow) == ("first_part", False)
    _, passes = choose_rows(target, "bf16", 16384, 8, 1024, Work(columns=True))
    assert (passes.columns, passes.narrow) == ("first_use", False)
    shape, _ = choose_rows(target, "bf16", 1024, 8, 8192, Work(sums=2, columns=True, copied=(2, 2, 2), centred=True))
    assert (shape.threads, shape.slots, shape.resident) == (128, 3, 2)


def test_which_partial_sums_are_in_halves() -> None:
    """Through Vulkan on NVIDIA's GPUs, of parts of eight columns."""
    target = replace(target_for("spirv"), vendor="nvidia", max_threads=1024, max_shared_bytes=48 << 10)
    eight = PassShape(8, 4)
    assert sums_layout(target, eight) == "deinterleaved"
    assert sums_layout(target, PassShape(4, 4)) == "in_order"
    assert sums_layout(target, PassShape(8)) == "in_order"  # not in registers
    for other in (HOPPER, replace(target, vendor="amd", device_fence=True, compute_units=132)):
        assert sums_layout(other, eight) == "in_order"


def test_long_rows_through_vulkan_park_one_array_where_there_is_room() -> None:
    work = Work(sums=2, columns=True, copied=(2, 2))
    spirv = target_for("spirv")
    target = replace(spirv, vendor="nvidia", max_threads=1024, max_shared_bytes=48 << 10, compute_units=132)
    shape, passes = choose_rows(target, "bf16", 16384, 8, 1 << 10, work)
    assert (shape.prefetch_to, shape.prefetch, shape.threads, passes.columns) == (
        "staged",
        1,
        512,
        "every_pass",
    ) and passes.reload
    shape, passes = choose_rows(replace(target, max_shared_bytes=32 << 10), "bf16", 16384, 8, 1 << 10, work)
    assert (shape.prefetch, passes.columns, passes.reload) == (0, "row_start", False)
    shape, passes = choose_rows(target, "bf16", 16384, 8, 1 << 14, work)  # so many that nothing is to come ahead
    assert (shape.prefetch, shape.threads, passes.columns) == (0, 512, "every_pass") and passes.reload
    shape, passes = choose_rows(target, "bf16", 16384, 8, 1 << 14, replace(work, sums=1))
    assert (shape.prefetch_to, shape.prefetch) == ("staged", 1) and passes.reload
    shape, passes = choose_rows(target, "bf16", 16384, 8, 1 << 9, replace(work, copied=(2, 2, 2)))
    assert (shape.prefetch_to, shape.prefetch) == ("staged_alone", 1) and passes.reload


@pytest.mark.parametrize(
    ("rows", "sums_cluster", "groups"),
    [(1024, 1, 128), (1056, 1, 132), (645, 1, 129), (645, 2, 130), (140, 1, 132), (7, 1, 7)],
)
def test_workgroups_that_stay_share_rows_evenly(rows: int, sums_cluster: int, groups: int) -> None:
    """As many as are done with their rows no later than all would be that there is room for; at most a tenth fewer."""
    shape = RowShape(512, loops=True, resident=1, sums_cluster=sums_cluster)
    assert row_grid("layer_norm_backward", shape, rows, HOPPER) == (groups, 1, 1)


def assembled(ptxas: str, artifact: Artifact, folder: Path) -> str:
    """What NVIDIA's assembler says of a kernel."""
    (folder / "kernel.ptx").write_bytes(artifact.code)
    command = [ptxas, "-arch=sm_90", "-v", "-o", str(folder / "kernel.cubin"), str(folder / "kernel.ptx")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
