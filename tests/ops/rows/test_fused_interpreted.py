"""Row operations on the interpreter with the sanitizer on: kernels of GPUs with and without subgroups, and of CPUs."""

from __future__ import annotations

from dataclasses import replace

import fused_cases
import numpy as np
import pytest
from interpreted_rows import judged, run
from tuned import replace_records

from aule.codegen import TARGETS as GENERIC
from aule.engine.memory import host_view
from aule.engine.row_ops import result_views
from aule.ops.catalogue import CATALOGUE
from aule.ops.norm import plan as norm_plan
from aule.ops.rows import layout as row_shapes
from aule.ops.rows.column_sum import ColumnSumConfig
from aule.ops.rows.hints import RowTuning, SumTuning
from aule.ops.shared.elements import stored
from aule.ops.softmax_dropout import plan as softmax_plan
from aule.target import Target
from aule.tile.rows.shape import PassShape

TARGETS = {
    "subgroups": replace(GENERIC["ptx"], compute_units=2),
    "narrow": replace(GENERIC["spirv"], compute_units=2, subgroup_size=8, max_threads=1024),
    "barriers": replace(GENERIC["wgsl"], compute_units=2),
    "avx512": Target("cpu", arch="x86_64", extensions=("avx2", "avx512f", "fma"), compute_units=2),
    "baseline": Target("cpu", arch="x86_64", compute_units=2),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("case", fused_cases.CASES, ids=str)
def test_cases(case: fused_cases.Case, target: Target) -> None:
    number = fused_cases.CASES.index(case)
    if number > 8 and number % len(TARGETS) != list(TARGETS.values()).index(target):
        pytest.skip("spared: the row engine does the same for every op")
    judged(case, target)


@pytest.mark.parametrize(
    "case",
    [
        fused_cases.Case("layer_norm", (9, 1600)),  # four rows at once
        fused_cases.Case("residual_layer_norm", (5, 40), "bf16", layout="rows"),
        fused_cases.Case("softmax_dropout", (2, 5, 200), "f32", {"dropout_p": 0.3, "causal": True, "scale": -1.5}),
        fused_cases.Case("softmax_dropout", (2, 3, 100), "bf16", {"dropout_p": 0.3}),  # sums by pairs
        fused_cases.Case("layer_norm", (37, 1024), "bf16"),  # one block of rows ahead
        fused_cases.Case("layer_norm", (9, 512), "bf16", without=("weight", "bias")),  # no sums of columns
        fused_cases.Case("softmax_dropout", (1, 2, 3, 70), "f16", {"dropout_p": 0.5}, mask="bool"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["avx512", "subgroups", "narrow"])
def test_what_is_kept_for_the_gradient(case: fused_cases.Case, name: str) -> None:
    """Statistics of rows; and, on CPUs, results that go past the caches, which are small here."""
    features = ("avx2", "avx512f", "avx512bf16", "avx512dq", "avx512vl", "fma")
    target = TARGETS[name]
    if name == "avx512":
        target = replace(target, extensions=features, cache_bytes=1)
    spec = CATALOGUE[case.op]
    assert spec.gradient is not None and spec.saved_outputs[0] == "statistics"
    arrays, options = fused_cases.operands(case), fused_cases.options(spec, case)
    plain = fused_cases.bound(spec, arrays, options)
    for kept in (spec.saved_outputs[:1], spec.saved_outputs) if len(spec.saved_outputs) > 1 else (spec.saved_outputs,):
        call = spec.call(plain.views, options, (*spec.outputs, *kept))
        found = run(spec, call, target)
        fused_cases.judge(plain, found, fused_cases.right(spec, plain), gradient=False)
        backward = fused_cases.gradient_call(spec, arrays, call, found, case)
        assert set(kept) <= set(backward.views)
        expected = fused_cases.right(spec.gradient, backward)
        fused_cases.judge(backward, run(spec.gradient, backward, target), expected, gradient=True)


NVIDIA = replace(GENERIC["spirv"], compute_units=2, subgroup_size=32, max_threads=1024, vendor="nvidia")


@pytest.mark.parametrize(
    "case",
    [fused_cases.Case("rms_norm", (5, 1024), "bf16"), fused_cases.Case("residual_layer_norm", (3, 2, 1024), "bf16")],
    ids=str,
)
@pytest.mark.parametrize("backend", ["vulkan", "cuda"])
def test_lengths_and_strides_are_parameters(case: fused_cases.Case, backend: str) -> None:
    """More rows need no other kernel, and strides are read."""
    target = {"vulkan": NVIDIA, "cuda": TARGETS["subgroups"]}[backend]
    more = replace(case, shape=(*case.shape[:-2], 3 * case.shape[-2], case.shape[-1]))
    gaps = replace(case, layout="rows") if case.layout == "" else replace(case, layout="")
    configs = []
    for calls in (judged(case, target), judged(more, target), judged(gaps, target)):
        spec, call = calls[0]
        step = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0]
        kernel = step.build(step.config, target)
        configs.append((step.config, {p.name for p in kernel.params if p.kind == "scalar"}))
    (config, scalars), (other, _), (_, read) = configs
    assert replace(config, shape=other.shape) == other
    assert "x_stride0" in scalars and "x_stride0" in read


@pytest.mark.parametrize(
    "hints",
    [
        SumTuning(parts=1, batch=2, prefetch=0),
        SumTuning(parts=2, most=8, prefetch=0),
        SumTuning(batch=2, resident=128),
        SumTuning(parts=1, resident=128, prefetch=3),
        SumTuning(threads=256, batch=2, resident=256, prefetch=2),
        SumTuning(resident=128, prefetch_to="registers"),
        SumTuning(resident=128, prefetch_to="staged", reload=True),
        SumTuning(resident=128, prefetch=0, columns="every_pass", reload=True),
    ],
    ids=str,
)
def test_other_layouts(hints: SumTuning, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of columns with several rows at once, rows that do not stay in registers, and prefetched rows."""
    monkeypatch.setattr(row_shapes, "choose_sums", lambda *_: hints)
    for shape in ((9, 520), (33, 40), (5, 1003)):
        case = fused_cases.Case("layer_norm", shape)
        for target in (TARGETS["subgroups"], TARGETS["barriers"])[: 1 if hints.prefetch else 2]:
            judged(case, target)


@pytest.mark.parametrize("columns", [1024, 520, 1003])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "residual_layer_norm"])
@pytest.mark.parametrize(
    "hints",
    [
        RowTuning(parts=2, in_shared=True, columns="first_use"),
        RowTuning(parts=4, narrow=True),
        RowTuning(parts=1, threads=32),
        RowTuning(parts=1, narrow=True, in_shared=True),
        RowTuning(parts=4, narrow=True, columns="first_part"),
    ],
    ids=["in shared", "narrow", "one part", "both", "first part"],
)
def test_other_norms(hints: RowTuning, op: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in shared memory, and narrow rows in registers; numbers of columns that are powers of two or not."""
    monkeypatch.setattr(row_shapes, "_norm_hints", lambda *_: hints)
    target = replace(TARGETS["subgroups"], arch="sm_90", overlap=True)
    case = fused_cases.Case(op, (5, columns), "bf16")
    spec = CATALOGUE[op]
    call = fused_cases.bound(spec, fused_cases.operands(case), fused_cases.options(spec, case))
    config = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0].config
    assert (config.shape.in_shared, config.passes[0].narrow) == (
        hints.in_shared and columns % 8 == 0,
        hints.narrow and columns % 8 == 0,
    )
    fused_cases.judge(call, run(spec, call, target), fused_cases.right(spec, call), gradient=False)


@pytest.mark.parametrize("columns", [64, 256, 2048])
def test_a_large_mean_costs_no_digits(columns: int) -> None:
    """Rows whose means are some hundred times larger than their deviations, and a row of equal columns."""
    spec = CATALOGUE["layer_norm"]
    rng = np.random.default_rng(7)
    x = stored((300 + 2 * rng.standard_normal((4, columns))).astype(np.float32), "bf16")
    x[3] = x[3, 0]
    options = {option.name: option.default for option in spec.options}
    call = spec.call({"x": host_view("bf16", x)}, options, spec.outputs)
    for target in (TARGETS["subgroups"], TARGETS["narrow"]):
        found = run(spec, call, target)
        fused_cases.judge(call, found, fused_cases.right(spec, call), gradient=False)
        assert not found["y"][3].any()


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "residual_layer_norm"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_workgroups_that_add_up_their_sums(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of two workgroups store one row of sums each, unless there are fewer rows than workgroups."""
    hints = SumTuning(parts=2, threads=64, resident=128, batch=2, prefetch=1, sums_cluster=2)
    monkeypatch.setattr(row_shapes, "choose_sums", lambda *_: hints)
    target = replace(TARGETS["subgroups"], arch="sm_90", max_cluster=8, max_shared_bytes=232448)
    spec = CATALOGUE[op]
    assert spec.gradient is not None
    for rows, sums_cluster in ((19, 2), (6, 1)):
        case = fused_cases.Case(op, (rows, 1024), dtype)
        arrays = fused_cases.operands(case)
        call = fused_cases.bound(spec, arrays, fused_cases.options(spec, case))
        backward = fused_cases.gradient_call(spec, arrays, call, run(spec, call, target), case)
        expected = fused_cases.right(spec.gradient, backward)
        fused_cases.judge(backward, run(spec.gradient, backward, target), expected, gradient=True)
        plan = spec.gradient.plan(backward.problem, {**backward.views, **result_views(backward)}, target)
        step = plan.steps[0]
        assert step.config.shape.sums_cluster == sums_cluster
        assert step.scalars["partials"] * sums_cluster == step.grid[0]


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "residual_layer_norm"])
@pytest.mark.parametrize(("columns", "dtype"), [(1024, "bf16"), (304, "f16"), (40, "bf16"), (64, "f32")])
def test_how_partial_sums_lie(op: str, columns: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deinterleaved sums have the same bits; parts of fewer than eight columns stay in order."""
    spec = CATALOGUE[op]
    assert spec.gradient is not None
    case = fused_cases.Case(op, (37, columns), dtype)
    arrays = fused_cases.operands(case)
    call = fused_cases.bound(spec, arrays, fused_cases.options(spec, case))
    target = replace(NVIDIA, device_fence=True, compute_units=9)
    backward = fused_cases.gradient_call(spec, arrays, call, run(spec, call, target), case)
    backward.views["dy"].storage[:, 3] = 0  # whose sums are zero
    expected = fused_cases.right(spec.gradient, backward)
    found = {}
    for layout in ("in_order", "deinterleaved"):

        def choose(t: Target, passes: PassShape, wanted: str = layout) -> str:
            return wanted if passes.width == 8 else "in_order"

        monkeypatch.setattr(norm_plan, "sums_layout", choose)
        plan = spec.gradient.plan(backward.problem, {**backward.views, **result_views(backward)}, target)
        first, second = plan.steps
        assert first.config.sums == (layout if dtype != "f32" else "in_order")
        assert isinstance(second.config, ColumnSumConfig)
        words = columns * first.grid[0] * (1 if op == "rms_norm" else 2)
        assert (plan.workspace, plan.scratch) == ({"partial": words}, {})
        found[layout] = run(spec.gradient, backward, target)
        fused_cases.judge(backward, found[layout], expected, gradient=True)
    for name, array in found["in_order"].items():
        np.testing.assert_array_equal(array, found["deinterleaved"][name])


@pytest.mark.parametrize(("units", "lanes"), [(5, 8), (5, 2), (24, 4)])
def test_sums_of_columns(units: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many partial sums there are: fewer than threads, as many as one round takes, or more."""
    target = replace(TARGETS["subgroups"], compute_units=units)
    choice = {"columns": 8, "lanes": lanes, "at_once": 2}
    replace_records(monkeypatch, {"column_sum": [{"short": choice, "long": choice}]})
    monkeypatch.setattr(row_shapes, "choose_sums", lambda *_: SumTuning(parts=1, resident=128))
    kernels = set()
    for rows in (3 * units, units - 1):
        _, (spec, call) = judged(fused_cases.Case("layer_norm", (rows, 1024), "bf16"), target)
        step = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[1]
        assert step.scalars["partials"] == min(units, rows)
        kernels.add(step.config)
    assert len(kernels) == 1


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (RowTuning(parts=1, threads=32, cluster=4), SumTuning(parts=1, threads=32, resident=64, cluster=8, prefetch=0)),
        (RowTuning(parts=2, threads=32, cluster=2), SumTuning(parts=1, resident=128, batch=2, prefetch=2, cluster=2)),
    ],
    ids=["few columns each", "rows at once"],
)
def test_rows_of_a_cluster(forward: RowTuning, backward: SumTuning, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workgroups that share a row, more of them with sums of columns than there are rows; softmax with one exchange and
    early drawn dropout."""
    monkeypatch.setattr(row_shapes, "_norm_hints", lambda *_: forward)
    monkeypatch.setattr(row_shapes, "overlap_threads", lambda _: forward.threads)
    choice = softmax_plan._Choice(forward, one_exchange=True, early_draw="masks")
    monkeypatch.setattr(softmax_plan, "_choose", lambda *_: choice)
    monkeypatch.setattr(row_shapes, "choose_sums", lambda *_: backward)
    target = replace(TARGETS["subgroups"], max_cluster=8, overlap=True, compute_units=16)
    for case in (
        fused_cases.Case("layer_norm", (9, 2048), "bf16"),
        fused_cases.Case("softmax_dropout", (1, 5, 2048), "bf16", {"dropout_p": 0.3, "causal": True}),
    ):
        for one, known in judged(case, target):
            step = one.plan(known.problem, {**known.views, **result_views(known)}, target).steps[0]
            assert step.config.shape.cluster > 1 and step.grid[0] % step.config.shape.cluster == 0


@pytest.mark.parametrize(
    "hints",
    [
        SumTuning(
            parts=4, threads=96, widest=512, resident=96, prefetch=2, columns="resident", cluster=4, cluster_exchange=2
        ),
        SumTuning(
            parts=2,
            threads=256,
            widest=512,
            resident=256,
            prefetch=1,
            columns="resident",
            cluster=2,
            cluster_exchange=2,
        ),
        SumTuning(parts=1, threads=64, widest=512, resident=64, prefetch=3, cluster=8, cluster_exchange=2),
    ],
    ids=["one subgroup each", "several", "few columns"],
)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "residual_layer_norm"])
def test_rows_exchanged_in_clusters(op: str, dtype: str, hints: SumTuning, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows over clusters, some of them all zero, so that exchanged values are zero; more rows than slots."""
    monkeypatch.setattr(row_shapes, "choose_sums", lambda *_: hints)
    target = replace(TARGETS["subgroups"], arch="sm_90", max_cluster=8, max_shared_bytes=232448, compute_units=18)
    case = fused_cases.Case(op, (23, 4096 if hints.parts > 1 else 2048), dtype)
    gradient, backward = fused_cases.kept_gradient(case, lambda spec, call: run(spec, call, target))
    plan = gradient.plan(backward.problem, {**backward.views, **result_views(backward)}, target)
    shape = plan.steps[0].config.shape
    assert shape.cluster_exchange == 2 and shape.cluster == hints.cluster and shape.slots > 1
    assert plan.steps[0].scalars["partials"] * shape.cluster == plan.steps[0].grid[0] <= 18
    expected = fused_cases.right(gradient, backward)
    fused_cases.judge(backward, run(gradient, backward, target), expected, gradient=True)


@pytest.mark.parametrize("columns", [1024, 4096, 9216])
def test_softmax_as_on_hopper(columns: int) -> None:
    """Early drawn dropout, one exchange, and fetches of later rows, with more rows than a wave has and a partial last
    block."""
    spec, target = CATALOGUE["softmax_dropout"], replace(TARGETS["subgroups"], max_cluster=8, compute_units=1)
    case = fused_cases.Case("softmax_dropout", (1, 3 if columns > 4096 else 9, columns), "bf16", {"dropout_p": 0.3})
    arrays = fused_cases.operands(case)
    call = fused_cases.bound(spec, arrays, fused_cases.options(spec, case))
    fused_cases.judge(call, run(spec, call, target), fused_cases.right(spec, call), gradient=False)
    config = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0].config
    assert (config.early_draw, config.one_exchange) == ("masks", columns > 1024)
    assert config.fetches and config.narrow


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_gradients_of_long_rows_mask_what_comes(dtype: str, causal: bool) -> None:
    """On Hopper, with saved statistics: gradients of weights that are dropped or do not count are zero, even for Inf
    and NaN; the others stay narrow."""
    spec, target = CATALOGUE["softmax_dropout"], replace(TARGETS["subgroups"], max_cluster=8, compute_units=1)
    assert spec.gradient is not None
    case = fused_cases.Case("softmax_dropout", (2, 3, 9216), dtype, {"dropout_p": 0.3, "causal": causal})
    arrays, options = fused_cases.operands(case), fused_cases.options(spec, case)
    call = spec.call(fused_cases.bound(spec, arrays, options).views, options, ("y", "statistics"))
    found = run(spec, call, target)
    backward = fused_cases.gradient_call(spec, arrays, call, found, case)
    dy, nothing = backward.views["dy"].storage, found["y"] == 0
    if causal:
        dy[0, 0, np.flatnonzero(nothing[0, 0])[:2]] = (0x7FC0, 0x7F80) if dtype == "bf16" else (np.nan, np.inf)
    given = {name: view for name, view in backward.views.items() if name != "y"}
    backward = spec.gradient.call(given, options)
    expected = fused_cases.right(spec.gradient, backward)
    fused_cases.judge(backward, run(spec.gradient, backward, target), expected, gradient=True)
    step = spec.gradient.plan(backward.problem, {**backward.views, **result_views(backward)}, target).steps[0]
    assert (step.config.early_draw, step.config.passes[0].narrow, step.config.shape.registers) == ("masks", True, 64)


@pytest.mark.parametrize("early", ["words", "masks"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("chance", [1e-9, 0.3, 0.75, 1.0])
def test_weights_that_are_drawn_early(early: str, dtype: str, chance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As words or masks; with heads of other numbers of rows than powers of two, and scores that do not count."""
    monkeypatch.setattr(softmax_plan, "_choose", lambda *_: softmax_plan._Choice(early_draw=early, small=True))
    spec, target = CATALOGUE["softmax_dropout"], TARGETS["subgroups"]
    case = fused_cases.Case("softmax_dropout", (3, 5, 1024), dtype, {"dropout_p": chance, "causal": True})
    arrays = fused_cases.operands(case)
    arrays["x"][0][1, 2, 3] = float("nan") if dtype == "f16" else 0x7FC0
    call = fused_cases.bound(spec, arrays, fused_cases.options(spec, case))
    found, expected = run(spec, call, target), fused_cases.right(spec, call)
    fused_cases.judge(call, found, expected, gradient=False)
    np.testing.assert_array_equal(found["y"] == 0, expected["y"] == 0)
    config = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0].config
    assert config.early_draw == early


def test_subgroups_that_meet_once_forward() -> None:
    """Rows as in the next test, in half precision, for which the forward kernel exchanges once."""
    spec, target = CATALOGUE["softmax_dropout"], replace(TARGETS["subgroups"], max_cluster=8, compute_units=1)
    x = np.random.default_rng(0).standard_normal((4, 9216)).astype(np.float16)
    x[0] += np.repeat([300.0, -300.0, 0.0], 3072).astype(np.float16)
    x[1, :8192] = -np.inf
    x[2] = -np.inf
    x[3] = np.finfo(np.float16).min
    options = {option.name: option.default for option in spec.options}
    call = spec.call({"x": host_view("f16", x)}, options)
    fused_cases.judge(call, run(spec, call, target), fused_cases.right(spec, call), gradient=False)
    config = spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps[0].config
    assert config.one_exchange


@pytest.mark.parametrize("target", ["subgroups", "narrow"])
def test_subgroups_that_meet_once(target: str) -> None:
    """Rows whose scores differ by more than the range of exponentials, or do not count, in one subgroup or in all."""
    spec = CATALOGUE["softmax_dropout"]
    assert spec.gradient is not None
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3072)).astype(np.float32)  # three subgroups of 32 lanes
    x[0] += np.repeat([300.0, -300.0, 0.0], 1024)
    x[1, :2048] = -np.inf
    x[2] = -np.inf
    x[3] = np.finfo(np.float32).min
    dy = rng.standard_normal(x.shape).astype(np.float32)
    options = {option.name: option.default for option in spec.options}
    call = spec.gradient.call({"dy": host_view("f32", dy), "x": host_view("f32", x)}, options)
    found = run(spec.gradient, call, TARGETS[target])
    fused_cases.judge(call, found, fused_cases.right(spec.gradient, call), gradient=True)
