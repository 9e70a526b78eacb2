"""`aule.flex_attention` inside graphs: torch.compile with fullgraph=True, torch.export and dispatch modes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="training needs the CPU engine")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import aule  # noqa: E402

documents = torch.arange(200) // 30
table = torch.linspace(-1.0, 1.0, 2 * 4 * 200).reshape(2, 4, 200)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    aule.reset_dispatch_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch would rather be compiled
        yield
    aule.uninstall()


def tensors(seq: int = 70, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, seq, 16, **options) for _ in range(3)]


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return documents[q_idx] == documents[kv_idx]


class Model(torch.nn.Module):
    """A parameter, a computed tensor and a number, captured in all the usual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(4))

    def alibi(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score - self.slopes[h] * (q_idx - kv_idx).abs()) + table[b][h, q_idx]

    def forward(self, q: Any, k: Any, v: Any, mask: Any, window: int) -> Any:
        means = q.mean((0, 2, 3))

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            near = q_idx - kv_idx < window
            return torch.where(near, self.alibi(score, b, h, q_idx, kv_idx) + means[h], -float("inf"))

        return aule.flex_attention(q * 2, k, v, score_mod, mask, return_lse=True)


def test_a_full_graph_follows_new_values_and_lengths() -> None:
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # From the second call on lengths and the window are dynamic.
    for seq, window in ((70, 30), (64, 20), (33, 7)):
        given = tensors(seq, requires_grad=True)
        causal = aule.and_masks(same_document, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
        mask = aule.create_block_mask(causal, None, None, seq, seq)
        results = []
        for call in (compiled, model):
            out, lse = call(*given, mask, window)
            gradients = torch.autograd.grad(out.sin().sum() + lse.sum(), [*given, model.slopes])
            results.append([out, lse, *gradients])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
        documents.copy_(torch.arange(200) // (seq // 3))
    callers = {(row["caller"], row["direction"]): row["count"] for row in aule.dispatch_stats()["calls"]}
    assert callers[("compiled", "forward")] == callers[("compiled", "backward")] == 3


def in_place(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    score += 1.5
    score *= 2
    return score.masked_fill(q_idx < kv_idx, -1e4)


FUNCTIONS = [
    lambda s, b, h, q, k: 2 - s % 3 + 2 / (s * s + 1) + 100 // (q + 1) - 2 ** (0.01 * k) + s**2,
    lambda s, b, h, q, k: torch.where((q >= k) | ((k < 5) & ~(q == 3)), -s, torch.tensor(-5.0, device=s.device)),
    lambda s, b, h, q, k: torch.nn.functional.relu(s).clamp(min=-1).clamp_max(1.0) + (q << 1) + q.to(s.dtype) * 0.1,
    lambda s, b, h, q, k: torch.maximum(s, (table * 2)[b, h][q]) + torch.ones_like(s) * 3,
    in_place,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_operations_are_recorded_as_they_are_traced(function: Any) -> None:
    given = tensors()
    compiled = torch.compile(lambda q, k, v: aule.flex_attention(q, k, v, function), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), aule.flex_attention(*given, function))


def test_the_installed_function_is_part_of_larger_graphs() -> None:
    def model(q: Any, k: Any, v: Any, window: int) -> Any:
        mask = flex.create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j < window), None, None, q.shape[2], k.shape[2], device="cpu"
        )
        out, aux = flex.flex_attention(q.sin(), k, v, FUNCTIONS[0], mask, return_aux=flex.AuxRequest(lse=True))
        return out.cos() + aux.lse[..., None]

    expected = model(*tensors(), 10)
    aule.install()
    given = tensors(requires_grad=True)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(*given, 10)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.sum().backward()  # PyTorch's own does not train on CPUs
    assert given[0].grad.abs().sum() > 0
    assert {row["caller"] for row in aule.dispatch_stats()["calls"]} == {"compiled"}


def test_what_aule_cannot_trace_is_pytorch_s_in_graphs() -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return flex.flex_attention(q, k, v, lambda s, b, h, i, j: torch.lgamma(s))

    given = tensors()
    expected = model(*given)
    aule.install()
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(found, expected)
    assert aule.dispatch_stats()["reasons"] == {"a function that aule cannot trace": 1}


def branching(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score if q_idx > kv_idx else -score


def unknown(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.lgamma(score)


@pytest.mark.parametrize("function, words", [(branching, "a branch"), (unknown, "operation lgamma")])
def test_a_graph_ends_before_what_cannot_be_traced(function: Any, words: str) -> None:
    given = tensors()
    compiled = torch.compile(lambda q, k, v: aule.flex_attention(q, k, v, function), backend="eager")
    with pytest.raises(aule.InvalidArgumentError, match=rf"{words} .*test_flex_compile\.py:\d+"):
        compiled(*given)


def test_a_mask_of_another_shape_and_one_with_gradients_are_refused() -> None:
    given = tensors()
    mask = aule.create_block_mask(same_document, None, None, 60, 70)
    compiled = torch.compile(lambda q, k, v, m: aule.flex_attention(q, k, v, None, m), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"70 queries and 70 keys, got \[1, 1, 60, 70\]"):
        compiled(*given, mask)
    limits = torch.rand(70, requires_grad=True)
    mask = aule.create_block_mask(lambda b, h, q, k: limits[q] < limits[k], None, None, 70, 70)
    with pytest.raises(Exception, match="a mask has no gradient"):
        compiled(*given, mask)


def test_export_and_dispatch_modes_hold_the_operator() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    class Exported(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            mask = aule.create_block_mask(same_document, None, None, 70, 70)
            return aule.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[b, h, i], mask)

    given = tensors()
    exported = torch.export.export(Exported(), tuple(given), strict=False)
    torch.testing.assert_close(exported.module()(*given), Exported()(*given))
    with FlopCounterMode(display=False) as counter:
        aule.flex_attention(*(x.requires_grad_() for x in given), FUNCTIONS[0]).sum().backward()
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 4 * 70 * 70 * 16
    assert aule.flex_attention(*(x.to("meta") for x in given)).shape == (2, 4, 70, 16)
