"""ONNX export of models with aule's operators, computed by ONNX's own reference evaluator."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="these compare with the CPU engine")
onnx = pytest.importorskip("onnx", reason="pip install onnx onnxscript")
pytest.importorskip("onnxscript", reason="pip install onnx onnxscript")

from onnx.reference import ReferenceEvaluator  # noqa: E402

from aule.frontends.torch.compile import formulas  # noqa: E402
from aule.ops.catalogue import CATALOGUE  # noqa: E402

F = torch.nn.functional
ORIGINAL = F.scaled_dot_product_attention
Case = tuple[Callable[..., Any], list[Any], set[str]]
"""A function, its tensors, and some operators of ONNX that it becomes."""


def made(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


QKV = [made(2, 4, 5, 16), made(2, 2, 7, 16, seed=1), made(2, 2, 7, 12, seed=2)]
ALIKE = [made(1, 2, 5, 8, seed=i) for i in range(3)]
ROWS = made(3, 4, 8)
WEIGHT, BIAS = made(8, seed=1), made(8, seed=2)
ANGLES = torch.linspace(0, 3, 36).reshape(9, 4)
COS, SIN = ANGLES.cos(), ANGLES.sin()
MASK = torch.ones(5, 7, dtype=torch.bool).tril(1)
MASK[2] = False  # a row that keeps no key
SLOPES = made(4).abs()
TARGET = torch.tensor([[1, 0, -100, 7], [3, 3, 3, 3], [0, 1, 2, 4]])


def flash(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: aule.flash_attention(q, k, v, **options)


ATTENTION: dict[str, Case] = {
    "plain": (flash(causal=False), QKV, {"Attention"}),
    "causal": (flash(), ALIKE, {"Attention"}),
    "causal from the end": (flash(scale=0.3), QKV, {"Attention"}),
    "causal from the start": (flash(causal_align="top-left"), QKV, {"Attention"}),
    "more queries than keys": (flash(), [QKV[0][:, :2], QKV[1][:, :, :3], QKV[2][:, :, :3]], {"Attention"}),
    "window": (flash(window=(2, 1), causal=False), QKV, {"Attention"}),
    "mask": (lambda q, k, v, mask: aule.flash_attention(q, k, v, mask=mask), [*QKV, MASK], {"Attention"}),
    "bias and alibi": (
        lambda q, k, v, bias: aule.flash_attention(q, k, v, bias=bias, mask=MASK, alibi_slopes=SLOPES),
        [*QKV, made(4, 5, 7)],
        {"Attention"},
    ),
    "softcap, sinks and log-sum-exp": (flash(softcap=3.0, sinks=made(4), return_lse=True), QKV, {"Tanh"}),
    "log-sum-exp": (flash(return_lse=True, mask=MASK), QKV, {"Attention", "Log"}),
    "rope": (flash(rope=(COS, SIN)), QKV, {"Attention"}),
    "three axes": (flash(rope=(COS[None], SIN[None]), rope_interleaved=True), [x[0] for x in ALIKE], {"Attention"}),
    "PyTorch's signature": (
        lambda q, k, v: aule.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2),
        QKV,
        {"Attention"},
    ),
}
ROW_OPS: dict[str, Case] = {
    "rms_norm": (lambda x, w: (aule.rms_norm(x, w), aule.rms_norm(x)), [ROWS, WEIGHT], {"RMSNormalization"}),
    "layer_norm": (aule.layer_norm, [ROWS, WEIGHT, BIAS], {"LayerNormalization"}),
    "residual_rms_norm": (aule.residual_rms_norm, [ROWS, ROWS + 1, WEIGHT], {"RMSNormalization"}),
    "residual_layer_norm": (aule.residual_layer_norm, [ROWS, ROWS * 2, WEIGHT, BIAS], {"LayerNormalization"}),
    "layer_norm_linear": (
        aule.layer_norm_linear,
        [ROWS, WEIGHT, BIAS, made(5, 8), made(5)],
        {"LayerNormalization"},
    ),
    "cross_entropy": (lambda x: aule.cross_entropy(x, TARGET), [ROWS], {"SoftmaxCrossEntropyLoss"}),
    "swiglu": (lambda x: (aule.swiglu(x), aule.swiglu(x, x + 1)), [ROWS], {"Mul"}),
    "geglu": (lambda x: (aule.geglu(x), aule.geglu(x, x + 1, approximate="tanh")), [ROWS], {"Gelu"}),
    "rope": (
        lambda x, ids: (
            aule.rope(x, COS[:5], SIN[:5]),
            aule.rope(x, COS, SIN, position_ids=ids, interleaved=True),
            aule.rope(x, torch.cat([COS[:5]] * 2, -1), torch.cat([SIN[:5]] * 2, -1), rotary_dim=8),
        ),
        [QKV[0], torch.arange(10).reshape(2, 5) % 9],
        {"Concat"},
    ),
    "rms_norm_rope": (
        lambda x, w: aule.rms_norm_rope(x, w, COS[:5], SIN[:5]),
        [QKV[0], made(16)],
        {"RMSNormalization"},
    ),
    "softmax_dropout": (
        lambda x, mask: (aule.softmax_dropout(x, mask=mask), aule.softmax_dropout(x, causal=True, scale=0.5)),
        [made(2, 5, 7), MASK],
        {"Softmax"},
    ),
}


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Any) -> Any:
        return self.function(*tensors)


def exported(function: Callable[..., Any], tensors: list[Any], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"dynamo": True, "opset_version": 23, "verbose": False} | options
        return torch.onnx.export(Model(function), tuple(tensors), **options).model_proto


def agree(model: Any, function: Callable[..., Any], tensors: list[Any], limit: float = 2e-6) -> None:
    names = [x.name for x in model.graph.input]
    found = ReferenceEvaluator(model).run(None, dict(zip(names, (x.numpy() for x in tensors), strict=True)))
    wanted = function(*tensors)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for i, (got, right) in enumerate(zip(found, wanted, strict=True)):
        assert got.shape == tuple(right.shape), i
        torch.testing.assert_close(torch.from_numpy(got), right, rtol=limit, atol=limit, msg=lambda m, i=i: f"{i}: {m}")


def test_all_row_operations_are_here() -> None:
    assert set(ROW_OPS) == set(CATALOGUE) == set(formulas._ROW_OPS)


@pytest.mark.parametrize("cases", [ATTENTION, ROW_OPS], ids=["attention", "row operations"])
def test_export(cases: dict[str, Case]) -> None:
    """All cases in one model: an export takes seconds."""
    tensors = [x for _, given, _ in cases.values() for x in given]

    def every(*tensors: Any) -> Any:
        found, at = [], 0
        for function, given, _ in cases.values():
            result = function(*tensors[at : at + len(given)])
            found += result if isinstance(result, tuple) else [result]
            at += len(given)
        return tuple(found)

    model = exported(every, tensors)
    found = {(node.domain, node.op_type) for node in model.graph.node}
    assert all(domain == "" for domain, _ in found)
    assert set().union(*(operators for _, _, operators in cases.values())) <= {kind for _, kind in found}, found
    fused = sum(node.op_type == "Attention" for node in model.graph.node)
    assert fused == sum("Attention" in operators for _, _, operators in cases.values())
    agree(model, every, tensors)


def test_half_precision_and_an_older_opset() -> None:
    tensors = [x.half() for x in QKV]
    agree(exported(flash(), tensors), flash(), tensors, 2e-3)
    rows = [x.half() for x in (ROWS, WEIGHT, BIAS)]
    agree(exported(aule.layer_norm, rows), aule.layer_norm, rows, 2e-3)
    agree(exported(flash(), QKV, opset_version=18), flash(), QKV)


def test_lengths_may_change() -> None:
    length = torch.export.Dim("length", min=2, max=64)
    model = exported(lambda q: aule.flash_attention(q, q, q), ALIKE[:1], dynamic_shapes=(({2: length},),))
    agree(model, lambda q: aule.flash_attention(q, q, q), [made(1, 2, 9, 8)])
    assert "Attention" in {node.op_type for node in model.graph.node}


def test_installed_attention_is_pytorchs_in_an_export() -> None:
    aule.reset_dispatch_stats()
    with aule.installed():
        model = exported(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ALIKE)
    agree(model, ORIGINAL, ALIKE)
    stats = aule.dispatch_stats()
    aule.reset_dispatch_stats()
    assert stats["served"] == 0 and set(stats["reasons"]) == {"torch.onnx.export"}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (flash(dropout_p=0.5), "expected no dropout in ONNX export"),
        (lambda q, k, v: aule.softmax_dropout(q, dropout_p=0.5), "expected no dropout in ONNX export"),
        (lambda q, k, v: aule.decode_attention(q[:, :, 0], k, v), r"\[decode_attention\] expected plain tensors"),
        (flash(scale=float("nan")), r"\[flash_attention\] expected"),
    ],
)
def test_what_has_no_form_in_onnx_is_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(Exception) as caught:
        exported(function, ALIKE)
    error: BaseException | None = caught.value
    said = []
    while error is not None:
        said.append(str(error))
        error = error.__cause__
    assert any(re.search(words, text) for text in said), said
