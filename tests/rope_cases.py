"""Attention with rotated q and k: cases, their inputs, and a rotation that is independent of the package's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import grid
import numpy as np

from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import host_view
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect, to_f64
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import Operands, attention_problem
from aule.runtime.base import Device

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One call. ``rotary`` are the columns that are rotated, ``tables`` how they are given: ``half`` or ``full`` wide,
    or by ``batch``; ``table`` is their type."""

    dtype: str
    dims: tuple[int, int]
    rotary: int
    lengths: tuple[int, int]
    interleaved: bool = False
    causal: bool = True
    heads: tuple[int, int] = (2, 1)
    tables: str = "half"
    table: str = "f32"
    align: str = "bottom-right"

    def __str__(self) -> str:
        order = "interleaved" if self.interleaved else "halves"
        return f"{self.dtype}-{self.dims[0]}-{self.rotary}-{order}-{self.lengths[0]}x{self.lengths[1]}-{self.tables}"


def make_inputs(case: Case, seed: int = 0, positions: int | None = None) -> dict[str, Array]:
    """q, k, v and tables of random angles, by the names of `attention_problem`."""
    rng = np.random.default_rng(seed)
    dtype = grid.NUMPY_DTYPES[case.dtype]
    (seq_q, seq_kv), (dim, value_dim) = case.lengths, case.dims
    shapes = (case.heads[0], seq_q, dim), (case.heads[1], seq_kv, dim), (case.heads[1], seq_kv, value_dim)
    made = {name: rng.standard_normal((2, *shape)).astype(dtype) for name, shape in zip("qkv", shapes, strict=True)}
    rows = (max(case.lengths) + 2 if positions is None else positions, case.rotary // 2)
    angles = rng.uniform(-3.0, 3.0, (2, *rows) if case.tables == "batch" else rows)
    for name, table in (("rope_cos", np.cos(angles)), ("rope_sin", np.sin(angles))):
        wide = np.concatenate([table, table], axis=-1) if case.tables == "full" else table
        made[name] = wide.astype(grid.NUMPY_DTYPES[case.table])
    return made


def case_problem(case: Case, inputs: dict[str, Array], **options: Any) -> tuple[AttentionProblem, Operands]:
    views: dict[str, Any] = {name: grid.view_of(array) for name, array in inputs.items()}
    options = {"causal": case.causal, "causal_align": case.align, "return_lse": True} | options
    return attention_problem(**views, rope_interleaved=case.interleaved, **options)


def reference_arrays(inputs: dict[str, Array], operands: Operands) -> dict[str, Array]:
    """The arrays by the names of `attention_reference`."""
    assert operands.cos is not None and operands.sin is not None
    return {**{name: inputs[name] for name in "qkv"}, "cos": operands.cos.storage, "sin": operands.sin.storage}


def rotated(case: Case, inputs: dict[str, Array], name: str, x: Array, back: bool = False) -> Array:
    """q, k or a gradient of one, rotated in fp64 as complex numbers."""
    shift = case.lengths[1] - case.lengths[0] if case.align == "bottom-right" else 0
    first, half = max(shift if "q" in name else -shift, 0), case.rotary // 2
    cos, sin = (to_f64(inputs[f"rope_{n}"], case.table)[..., first : first + x.shape[2], :half] for n in ("cos", "sin"))
    angle = (cos + 1j * sin)[:, None] if case.tables == "batch" else cos + 1j * sin
    pairs = (slice(0, case.rotary, 2), slice(1, case.rotary, 2))
    if not case.interleaved:
        pairs = (slice(0, half), slice(half, case.rotary))
    result = np.array(x, np.float64)
    product = (result[..., pairs[0]] + 1j * result[..., pairs[1]]) * (angle.conj() if back else angle)
    result[..., pairs[0]], result[..., pairs[1]] = product.real, product.imag
    return result


def unrotated(
    case: Case, problem: AttentionProblem, inputs: dict[str, Array]
) -> tuple[AttentionProblem, dict[str, Array]]:
    """The problem of arrays that are rotated already, in fp64."""
    arrays = {name: to_f64(inputs[name], case.dtype) for name in "qkv"}
    arrays |= {name: rotated(case, inputs, name, arrays[name]) for name in "qk"}
    return replace(problem, rope=None, dtype="f64"), arrays


def judge(case: Case, device: Device, deterministic: bool = False) -> str:
    """Errors of a device's result and gradients; empty if there are none."""
    inputs = make_inputs(case)
    problem, operands = case_problem(case, inputs, deterministic=deterministic)
    arrays = reference_arrays(inputs, operands)
    out, lse = forward_on_host(problem, operands, device, exact_lse=True)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    if not verdict or lse is None:
        return verdict.message
    dout = np.random.default_rng(1).standard_normal(problem.out_shape).astype(inputs["q"].dtype)
    stored = host_view(problem.dtype, dout.view(out.dtype))
    found = dict(zip(("dq", "dk", "dv"), backward_on_host(problem, operands, device, out, lse, stored), strict=True))
    return compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))


CASES = {
    str(case): case
    for case in (
        Case("f32", (40, 24), 40, (17, 33)),
        Case("f32", (24, 24), 10, (33, 17), interleaved=True, causal=False, tables="batch"),
        Case("f32", (9, 8), 6, (19, 7), align="top-left"),
        Case("f16", (64, 32), 64, (20, 20), tables="full"),
        Case("f16", (32, 32), 16, (25, 40), interleaved=True, table="f16"),
        Case("bf16", (48, 24), 16, (40, 25), causal=False, tables="batch", table="bf16"),
        Case("bf16", (128, 128), 128, (5, 37)),
    )
}
