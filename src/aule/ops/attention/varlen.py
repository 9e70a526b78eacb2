"""Packed batches: sequences of different lengths, concatenated, ``[rows of all sequences, heads, dim]``.

Offsets ``cu_seqlens`` of ``[batch + 1]`` say at which row each sequence begins, and at which the last one ends. Kernels
read them: one launch serves all sequences, with as many workgroups for each as the longest needs; those past the end of
a shorter one return at once. NumPy and the reference take the sequences one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.checks import alibi_operand
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import Array, Expected, expect
from aule.ops.attention.reference_backward import NAMES, ExpectedGradients, expect_gradients
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.rope.tables import rope_operands
from aule.view import TensorView

OP = "flash_attention_varlen"


def varlen_problem(
    q: TensorView,
    k: TensorView,
    v: TensorView,
    cu_q: TensorView,
    cu_k: TensorView,
    max_q: int | None,
    max_k: int | None,
    op: str = OP,
    **options: Any,
) -> tuple[AttentionProblem, Operands]:
    """Check one call on packed batches and bring its operands into normal form.

    Parameters
    ----------
    q, k, v : TensorView
        ``[rows, heads, dim]``.
    cu_q, cu_k : TensorView
        i32 ``[batch + 1]``; their contents are checked if they are in host memory.
    max_q, max_k : int, optional
        Lengths of the longest sequences; needed if the offsets are not in host memory.
    op : str
        The public function that was called, for messages.
    **options
        Those of `attention_problem`, as views where they are arrays; neither mask nor bias.

    Returns
    -------
    problem : AttentionProblem
    operands : Operands
        q, k and v as ``[1, heads, rows, dim]``; the result is ``[1, heads_q, rows, value_dim]`` likewise.
    """
    for name in ("mask", "bias"):
        if options.pop(name, None) is not None:
            raise InvalidArgumentError(
                f"[{op}] expected no {name}, got one; packed sequences have no common {name}: pad them into a batch, "
                "and use flash_attention"
            )
    for name, view in (("q", q), ("k", k), ("v", v)):
        if len(view.shape) != 3:
            raise InvalidShapeError(
                f"[{op}] expected {name} of shape [rows of all sequences, heads, head_dim], got {list(view.shape)}; "
                "concatenate the sequences along the first axis"
            )
    batch = _check_offsets(op, cu_q, cu_k)
    slopes: TensorView | None = options.pop("alibi_slopes", None)
    tables = options.pop("rope_cos", None), options.pop("rope_sin", None), options.pop("rope_interleaved", False)
    problem, operands = attention_problem(heads_first(q), heads_first(k), heads_first(v), op=op, **options)
    alibi = None if slopes is None else _slopes(op, slopes, batch, problem.heads_q)
    longest_q = longest_sequence(op, "q", cu_q, q.shape[0], max_q)
    longest_k = longest_sequence(op, "k", cu_k, k.shape[0], max_k)
    rope, cos, sin = rope_operands(op, *tables, (problem.dtype, problem.head_dim, batch), (longest_q, longest_k))
    problem = replace(
        problem,
        batch=batch,
        seq_q=longest_q,
        seq_kv=longest_k,
        packed=(q.shape[0], k.shape[0]),
        alibi=alibi is not None,
        rope=rope,
    )
    return problem, replace(operands, alibi=alibi, cos=cos, sin=sin, cu_q=cu_q, cu_k=cu_k)


def heads_first(view: TensorView) -> TensorView:
    """``[rows, heads, dim]`` as ``[1, heads, rows, dim]``."""
    rows, heads, dim = view.shape
    storage = view.storage.transpose(1, 0, 2)[None] if view.is_host else view.storage
    strides = (0, view.strides[1], view.strides[0], view.strides[2])
    return TensorView(view.dtype, (1, heads, rows, dim), strides, view.device, storage, view.offset)


def _check_offsets(op: str, cu_q: TensorView, cu_k: TensorView) -> int:
    for name, view in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if view.dtype != "i32" or len(view.shape) != 1 or view.shape[0] < 1:
            raise InvalidDtypeError(
                f"[{op}] expected {name} as int32 [batch + 1], got {view.dtype_name} {list(view.shape)}; convert it"
            )
    if cu_q.shape != cu_k.shape:
        raise InvalidShapeError(
            f"[{op}] expected as many sequences of keys as of queries, got {cu_q.shape[0] - 1} in cu_seqlens_q and "
            f"{cu_k.shape[0] - 1} in cu_seqlens_k; give both the same number"
        )
    return cu_q.shape[0] - 1


def longest_sequence(op: str, name: str, offsets: TensorView, total: int, given: int | None) -> int:
    """The length of the longest sequence, checked against the offsets if these are in host memory."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, (int, np.integer)) or given < 0):
        raise InvalidArgumentError(f"[{op}] expected max_seqlen_{name} as an int >= 0 or None, got {given!r}")
    if not offsets.is_host:
        if given is None:
            raise InvalidArgumentError(f"[{op}] expected max_seqlen_{name} with offsets on a device, got None; give it")
        return min(int(given), total)
    at: Array = offsets.storage
    lengths = np.diff(at.astype(np.int64))
    if at[0] != 0 or at[-1] != total or (lengths < 0).any():
        raise InvalidShapeError(
            f"[{op}] expected cu_seqlens_{name} to rise from 0 to {total}, the number of rows, got {at.tolist()[:8]}"
            f"{'...' if len(at) > 8 else ''}; pass cumulative lengths"
        )
    longest = int(lengths.max(initial=0))
    if given is not None and given < longest:
        raise InvalidArgumentError(
            f"[{op}] expected max_seqlen_{name} of at least {longest}, the longest sequence, got {given}; pass None"
        )
    return longest


def _slopes(op: str, view: TensorView, batch: int, heads: int) -> TensorView:
    if view.dtype != "f32" or view.shape not in ((heads,), (batch, heads)):
        raise InvalidShapeError(
            f"[{op}] expected alibi_slopes as float32 [heads_q] = [{heads}] or [batch, heads_q] = [{batch}, {heads}], "
            f"got {view.dtype_name} {list(view.shape)}; give one slope per query head"
        )
    return alibi_operand(op, view, batch, heads)


# -- one by one --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """One sequence of a packed batch: its number, its problem and operands, and its rows and keys in the batch."""

    number: int
    problem: AttentionProblem
    operands: Operands
    rows: slice
    keys: slice


def sequences(problem: AttentionProblem, operands: Operands) -> Iterator[PackedSequence]:
    """The sequences of a packed batch in host memory."""
    assert operands.cu_q is not None and operands.cu_k is not None
    at_q, at_k = operands.cu_q.storage.tolist(), operands.cu_k.storage.tolist()
    for i in range(problem.batch):
        rows, keys = slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])
        own = replace(problem, batch=1, seq_q=rows.stop - rows.start, seq_kv=keys.stop - keys.start, packed=None)
        own_operands = replace(
            operands,
            q=_cut(operands.q, rows, 2),
            k=_cut(operands.k, keys, 2),
            v=_cut(operands.v, keys, 2),
            alibi=_of_sequence(operands.alibi, i),
            cos=_of_sequence(operands.cos, i),
            sin=_of_sequence(operands.sin, i),
            cu_q=None,
            cu_k=None,
        )
        yield PackedSequence(i, own, own_operands, rows, keys)


def _of_sequence(view: TensorView | None, number: int) -> TensorView | None:
    return None if view is None else _cut(view, slice(number, number + 1), 0)


def _cut(view: TensorView, part: slice, axis: int) -> TensorView:
    storage = view.storage[(slice(None),) * axis + (part,)]
    return TensorView(view.dtype, storage.shape, view.strides, view.device, storage)


def expect_varlen(problem: AttentionProblem, operands: Operands) -> Expected:
    """What a backend must come close to: `aule.ops.attention.reference.expect`, sequence by sequence."""
    out, lse = np.zeros(problem.out_shape), np.full(problem.out_shape[:3], -np.inf)
    twin = np.zeros(problem.out_shape) if problem.dtype in ("f16", "bf16") else None
    for one in sequences(problem, operands):
        found = expect(one.problem, **_arrays(one.operands), first_batch=one.number)
        where = (slice(None), slice(None), one.rows)
        out[where], lse[where] = found.out, found.lse
        if twin is not None:
            twin[where] = found.twin
    return Expected(out, lse, twin)


def expect_varlen_gradients(problem: AttentionProblem, operands: Operands, dout: Array) -> ExpectedGradients:
    """Gradients that a backend must come close to; ``dout`` as ``problem.out_shape``."""
    shapes = dict(zip(NAMES, (operands.q.shape, operands.k.shape, operands.v.shape), strict=True))
    reference = {name: np.zeros(shape) for name, shape in shapes.items()}
    half = problem.dtype in ("f16", "bf16")
    twin = {name: np.zeros(shape) for name, shape in shapes.items()} if half else None
    magnitude = dict.fromkeys(NAMES, 0.0)
    for one in sequences(problem, operands):
        part = dout[:, :, one.rows]
        found = expect_gradients(one.problem, part, **_arrays(one.operands), first_batch=one.number)
        for name in NAMES:
            where = (slice(None), slice(None), one.rows if name == "dq" else one.keys)
            reference[name][where] = found.reference[name]
            if twin is not None and found.twin is not None:
                twin[name][where] = found.twin[name]
            magnitude[name] = max(magnitude[name], found.magnitude[name])
    return ExpectedGradients(reference, twin, magnitude)


def _arrays(operands: Operands) -> dict[str, Any]:
    names = ("q", "k", "v", "alibi", "sinks", "seed", "cos", "sin")
    found = {name: getattr(operands, name).storage for name in names if getattr(operands, name) is not None}
    return found | {"captured": {name: view.storage for name, view in operands.captured.items()}}
