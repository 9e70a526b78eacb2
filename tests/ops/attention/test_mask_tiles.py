"""Masks over warpgroups on the interpreter: the prepass that lists tiles, and attention with its list."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grid
import numpy as np
import pytest
from test_backward_interpreted import run as backward
from test_backward_warpgroup import ONE, ROWS, WIDE, device
from test_forward_interpreted import run
from test_fragment_compiles import assemble
from test_fragment_interpreted import target

from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.ops.scores.functions.program import BoundFunction, Graph
from aule.target import NVIDIA_LAYOUT
from aule.tile.fragment.shape import FragmentShape
from aule.view import TensorView, contiguous_strides

SHAPE = FragmentShape(64, 80, 4, 2, False, warpgroups=True)
"""80 columns: a word and a quarter of a lane's bits."""
AHEAD = {kind: replace(SHAPE, stages=3) for kind in ("documents", "columns", "additive")}


def documents(length: int, ends: list[int]) -> np.ndarray:
    """Each position sees what is before it in its document."""
    number = np.searchsorted(ends, np.arange(length), side="right")
    return (number[:, None] == number[None, :]) & np.tri(length, dtype=bool)


def mask_of(kind: str) -> tuple[np.ndarray, dict[str, Any]]:
    rng = np.random.default_rng(5)
    if kind == "documents":
        return documents(300, [90, 100, 250]), {}
    if kind == "padding":
        return (np.arange(300) < np.array([170, 300])[:, None])[:, None, None], {"causal": True}
    if kind == "by-head":
        return (rng.random((2, 2, 300, 300)) < 0.5) & documents(300, [64, 128]), {"softcap": 5.0}
    if kind == "columns":
        return rng.random((2, 1, 300, 1)) < 0.9, {"window": (50, 20)}
    additive = np.where(documents(300, [90, 230]), 0.0, -np.inf).astype(np.float16)
    if kind == "additive":
        additive[280:] += 0.5
    return additive, {}


@pytest.mark.parametrize("kind", ["documents", "padding", "by-head", "columns", "additive", "minus-infinity"])
def test_forward(kind: str) -> None:
    mask, options = mask_of(kind)
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((2, 2, 300, 24)).astype(np.float16) for name in "qkv"} | {"mask": mask}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **options, return_lse=True)
    out, lse = run(problem, operands, AHEAD.get(kind, SHAPE), replace(target(), matrix_layout=NVIDIA_LAYOUT))
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


BACKWARD = {"documents": WIDE, "padding": ONE}


@pytest.mark.parametrize("kind", ["documents", "padding", "by-head", "columns", "additive"])
def test_gradients(kind: str) -> None:
    mask, options = mask_of(kind)
    rng = np.random.default_rng(2)
    shape = BACKWARD.get(kind, ROWS)
    arrays = {name: rng.standard_normal((2, 2, 300, 128 if shape is WIDE else 24)).astype(np.float16) for name in "qkv"}
    arrays["mask"] = mask
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **options)
    found, dout = backward(problem, operands, arrays, shape, target=replace(target(), matrix_layout=NVIDIA_LAYOUT))
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def planned(problem: AttentionProblem) -> Any:
    """The plan on a device like the H200, whose mask is the same for all batches and heads."""
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)
    views = {name: TensorView(problem.dtype, shape, contiguous_strides(shape), "device", None) for name in "qkvo"}
    scores = (*shape[:3], problem.seq_kv)
    for name in ("mask", "bias"):
        if getattr(problem, name) is not None:
            strides = (0, 0, problem.seq_kv, 1)
            views[name] = TensorView(getattr(problem, name), scores, strides, "device", None)
    return plan_forward(problem, views, device())


def test_which_kernel() -> None:
    """Few scores are not worth two launches more; where many tiles have dropped keys, one loop has all."""
    problem = AttentionProblem(4, 16, 16, 4096, 4096, 64, 64, "bf16", 0.125, mask="bool")
    plan = planned(problem)
    config = plan.steps[-1].config
    assert config.shape.warpgroups and config.mask == "bits" and config.one_loop
    assert set(plan.workspace) == {"mask_tiles", "mask_order", "mask_bits"} and len(plan.steps) == 3
    assert plan.workspace["mask_bits"] * 4 <= 4096 * 4096 / 8 * 1.5  # bits, and what tiles have past the end
    assert not planned(replace(problem, seq_q=256, seq_kv=256)).steps[-1].config.shape.warpgroups
    for other in (replace(problem, mask="f16"), replace(problem, mask=None, bias="f32")):
        plan = planned(other)
        config = plan.steps[-1].config
        assert config.shape.warpgroups and config.one_loop and "mask_bits" not in plan.workspace
    plain = replace(problem, mask=None, causal=True, alibi=True)
    for other, linear in ((plain, True), (replace(plain, causal=False), False), (replace(plain, softcap=5.0), False)):
        assert planned(other).steps[-1].config.linear == linear
    for seq, one_loop in ((2048, True), (4096, False)):
        plan = planned(replace(problem, mask=None, seq_q=seq, seq_kv=seq, causal=True))
        assert plan.steps[-1].config.one_loop == one_loop


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": "bool"}, {"mask": "bf16"}, {"window": (511, 0)}, {"alibi": True}, {"bias": "bf16"}, {"softcap": 9.0}],
    ids=str,
)
def test_nothing_is_spilled(dim: int, options: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(AttentionProblem(4, 16, 16, 4096, 4096, dim, dim, "bf16", 0.125, causal=True, **options))
    for step in plan.steps:
        text, spilled = assemble(step.build(step.config, device()), device(), tmp_path)
    assert spilled == 0 and text.count("wgmma.mma_async") > 20


def test_two_workgroups_share_a_multiprocessor() -> None:
    """With the plain tiles up to 64 columns, which has 64 Ki registers and 228 KiB; 1 KiB is taken for each."""
    problem = AttentionProblem(4, 16, 16, 4096, 4096, 64, 64, "bf16", 0.125)
    shape = planned(problem).steps[-1].config.shape
    assert 2 * shape.threads * shape.registers <= 1 << 16
    assert 2 * (shape.shared_bytes(64, 64) + 1024) <= 228 << 10
    long = replace(problem, seq_q=8192, seq_kv=8192)
    assert planned(long).steps[-1].config.shape != shape
    for other in (replace(long, seq_q=4096), replace(long, causal=True), replace(long, softcap=5.0)):
        assert planned(other).steps[-1].config.shape == shape


def test_memory_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's route puts several launches together as one, with memory of their own."""
    torch = pytest.importorskip("torch")
    from aule.frontends.torch.attention import Forward
    from aule.frontends.torch.devices.scratch import StreamMemory
    from aule.frontends.torch.views import aligned, view_on_device
    from aule.options import AttentionOptions

    started: list[dict[str, Any]] = []

    class Stub:
        target, index = device(), 0

        def load(self, artifact: Any) -> Any:
            return SimpleNamespace(artifact=artifact)

        def prepare(self, program: Any, blocks: Any, scalars: Any) -> Any:
            params = program.artifact.params
            assert all((x is None) == (p.kind == "buffer") for p, x in zip(params, scalars, strict=True))
            names = [p.name for p in program.artifact.buffers]
            return SimpleNamespace(launch=lambda pointers, _: started.append(dict(zip(names, pointers, strict=True))))

    monkeypatch.setattr("aule.engine.attention.find_layout", lambda device: None)
    q = torch.zeros(2, 8, 1024, 64, dtype=torch.bfloat16)
    fields: dict[str, Any] = dict.fromkeys(AttentionOptions._fields)
    fields |= {"causal": True, "softcap": 0.0, "dropout_p": 0.0, "causal_align": "bottom-right", "return_lse": True}
    fields |= {"mask": torch.ones(1024, 1024, dtype=torch.bool), "rope_interleaved": False, "deterministic": False}
    fields |= {"rope_cos": torch.zeros(1024, 32), "rope_sin": torch.zeros(1024, 32)}
    call = Forward(q, q, q, AttentionOptions(**fields))
    memory = StreamMemory(None, q.device)
    prepared = call.prepare(call.bind(view_on_device), Stub(), memory, aligned(call.tensors))
    names = ("q", "k", "v", "mask", "cos", "sin", "o", "lse")
    assert (*call.tensors, *call.results) == names
    prepared.bind(names)(names, 0)
    turn_q, turn_k, tiles, order, attention = started
    assert (turn_q["x_ptr"], turn_k["x_ptr"], turn_k["cos_ptr"], tiles["mask_ptr"]) == ("q", "k", "cos", "mask")
    assert (attention["q_ptr"], attention["k_ptr"]) == (turn_q["y_ptr"], turn_k["y_ptr"])
    assert (attention["v_ptr"], attention["o_ptr"], attention["lse_ptr"]) == ("v", "o", "lse")
    assert attention["mask_order_ptr"] == order["mask_order_ptr"] and order["mask_tiles_ptr"] == tiles["mask_tiles_ptr"]
    own = [turn_q["y_ptr"], turn_k["y_ptr"], tiles["mask_tiles_ptr"], order["mask_order_ptr"], tiles["mask_bits_ptr"]]
    assert len(set(own)) == 5 and all(pointer % 16 == own[0] % 16 for pointer in own)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("by_head", [False, True])
def test_lists_of_long_sequences_take_little_memory(arch: str, by_head: bool) -> None:
    """A byte for some hundreds of scores of a map, where a bool mask has one for each."""
    rows, heads = 131072, 4
    g = Graph()
    kept = g.compare("ge", g.input("query"), g.input("key"))
    if by_head:
        kept = g.binary("or", kept, g.compare("eq", g.input("head"), g.literal(1)))
    mask_mod = BoundFunction(g.finish([kept]))
    problem = AttentionProblem(1, heads, heads, rows, rows, 128, 128, "bf16", 0.1, mask_mod=mask_mod)
    shape = (1, heads, rows, 128)
    view = TensorView("bf16", shape, contiguous_strides(shape), "device", None)
    forward = plan_forward(problem, dict.fromkeys("qkvo", view), target(arch))
    gradients = plan_backward(problem, dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv"), view), target(arch))
    for plan in (forward, gradients):
        lists = 4 * (plan.workspace["mask_tiles"] + plan.workspace["mask_order"])
        others = 4 * sum(plan.workspace.values()) - lists
        assert 0 < lists < rows * rows * heads // 300 and others <= 1024 * heads * rows
