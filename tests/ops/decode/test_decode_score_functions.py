"""Functions of the user in decoding, on the interpreter with the sanitizer on: simt, matrix units and prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decode_cases
import numpy as np
import test_decode_fragment as matrix
import test_decode_interpreted as plain

from aule.frontends.functions import UserFunctions
from aule.frontends.numpy_flex import with_functions
from aule.ops.attention.reference import compare
from aule.ops.decode.sequences import expect_decode
from aule.target import Target

SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
CASE = decode_cases.Case("functions", (70, 33, 5), 3, (4, 2), (32, 32), "bf16", "", 16)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[h] * abs(q_idx - kv_idx)


def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx + b + h) % 3 != 1


def check(
    case: decode_cases.Case, target: Target, kind: str, tree: int = 0, poison: bool = False, **shape: int
) -> None:
    given = decode_cases.make(case)
    if poison:
        given["v"][:, :, 7] = np.asarray(np.inf, given["v"].dtype)
    problem, operands = decode_cases.problem_of(case, given)
    grown = np.tril(np.random.default_rng(0).random((tree, tree)) < 0.6) | np.eye(tree, dtype=np.bool_)
    functions = UserFunctions("decode_attention", alibi, odd, True, grown if tree else None)
    problem, operands = with_functions(replace(problem, causal=not tree), operands, functions)
    if tree:  # the interpreter takes bools as bytes, as kernels do
        as_bytes = replace(operands.captured["keep0"], storage=grown.view(np.uint8))
        operands = replace(operands, captured={**operands.captured, "keep0": as_bytes})
    plan = plain.plan_decode(problem, plain.decode_views(operands, operands.q), target)
    assert kind in [type(step.config).__name__ for step in plan.steps]
    out, lse = plain.run(problem, operands, target, **shape)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


def test_simt() -> None:
    check(replace(CASE, dtype="f32"), plain.PTX, "DecodeConfig", tree=3, subgroups=2)
    check(replace(CASE, dtype="f32", page=0, rows=1), plain.WGSL, "DecodeConfig")


def test_matrix_units() -> None:
    check(CASE, matrix.NVIDIA, "FragmentDecodeConfig", tree=3, subgroups=2)
    check(replace(CASE, cache="i8"), matrix.NVIDIA, "FragmentDecodeConfig", subgroups=2)


def test_infinite_values_reach_only_the_rows_that_keep_them() -> None:
    check(replace(CASE, page=0), matrix.NVIDIA, "FragmentDecodeConfig", poison=True, subgroups=2)


def test_prefill() -> None:
    check(replace(CASE, lens=(90, 75), rows=70), matrix.fragments.target(), "FragmentConfig", tree=70)
