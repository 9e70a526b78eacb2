"""The forward grid: attention cases that together cover every pair of option values, with inputs and expectations.

Every backend is tested on the same cases, so a failure names the same case everywhere.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import ml_dtypes
import numpy as np

from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import Expected, expect
from aule.ops.attention.validate import Operands, attention_problem
from aule.view import TensorView

Array = np.ndarray[Any, Any]

NUMPY_DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f64": np.float64,
    "bool": np.bool_,
    "u32": np.uint32,
}

AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("f32", "f16", "bf16"),
    "head_dim": (64, 1, 8, 40, 80, 96, 128, 192, 256),
    "value_dim": ("same", 64, 24),
    "seqs": ((65, 129), (1, 1), (1, 77), (17, 33), (64, 64), (127, 63), (200, 200), (3, 300)),
    "heads": ((2, 4, 2), (1, 1, 1), (2, 4, 4), (1, 6, 1)),
    "causal": (None, "bottom-right", "top-left"),
    "window": (None, (16, 0), (5, 9), 33),
    "softcap": (0.0, 20.0),
    "mask": (None, "full", "over-heads", "key-padding", "additive-f32", "additive-inf"),
    "bias": (False, True),
    "alibi": (False, True),
    "sinks": (False, True),
    "return_lse": (True, False),
    "strides": ("contiguous", "bshd", "gap", "step-2"),
    "scale": (None, 0.3),
    "large": (False, True),
}
"""Every axis of the full grid with its values."""

EMPTY_AXES: dict[str, tuple[Any, ...]] = {
    **{name: values[:2] for name, values in AXES.items()},
    "dtype": AXES["dtype"],
    "seqs": ((0, 5), (5, 0)),
    "mask": (None, "over-heads", "key-padding", "additive-inf"),
}
"""Axes of cases with empty sequences, which cover pairs of other options by name only."""

SMALL_AXES: dict[str, tuple[Any, ...]] = {
    **AXES,
    "head_dim": (8, 40, 64),
    "value_dim": ("same", 24),
    "seqs": ((17, 33), (1, 21), (16, 16), (19, 7)),
    "heads": ((1, 2, 1), (2, 1, 1)),
    "window": (None, (5, 9), 7),
    "mask": (None, "over-heads", "additive-inf"),
    "strides": ("contiguous", "bshd", "step-2"),
}
"""Short sequences and fewer values, for the interpreter."""


WIDE_AXES: dict[str, tuple[Any, ...]] = {
    **AXES,
    "head_dim": (512, 288, 320, 384, 576),
    "value_dim": ("same", 512, 320, 128),
    "seqs": ((33, 65), (1, 77), (40, 40), (35, 19)),
    "heads": ((1, 2, 1), (1, 2, 2)),
    "window": (None, (16, 0), (5, 9)),
    "mask": (None, "over-heads", "key-padding", "additive-inf"),
    "dropout": (0.0, 0.25),
}
"""Heads above 256."""

DROPOUT_AXES: dict[str, tuple[Any, ...]] = {
    **{name: values[:2] for name, values in AXES.items()},
    "dtype": AXES["dtype"],
    "head_dim": (64, 40, 128),
    "seqs": ((65, 129), (3, 300), (127, 63)),
    "window": (None, (16, 0), (5, 9)),
    "mask": (None, "over-heads", "additive-inf"),
    "dropout": (0.25, 0.9),
}
"""Axes of cases with dropout, separate so that none of the other cases is lost."""

SMALL_DROPOUT_AXES: dict[str, tuple[Any, ...]] = {
    **{name: values[:2] for name, values in SMALL_AXES.items()},
    "dropout": (0.25, 0.9),
}


@dataclass(frozen=True)
class Case:
    """One attention call of the grid."""

    id: str
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    value_dim: int
    causal: bool
    causal_align: str
    window: tuple[int, int] | int | None
    softcap: float
    mask: str | None
    """``full``, ``over-heads``, ``key-padding`` (boolean), ``additive-f32``, ``additive-inf`` (q's dtype) or None."""
    bias: bool
    alibi: bool
    sinks: bool
    return_lse: bool
    strides: str
    """``contiguous``, ``bshd`` (transposed), ``gap`` (sliced out of a larger array) or ``step-2`` (head_dim)."""
    scale: float | None
    large: bool
    """Scores with a standard deviation of 6, so that the running maximum moves and old sums are rescaled."""
    dropout_p: float = 0.0

    def __str__(self) -> str:
        return self.id

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `aule.flash_attention` that are not arrays."""
        return {
            "causal": self.causal,
            "causal_align": self.causal_align,
            "window": self.window,
            "softcap": self.softcap,
            "scale": self.scale,
            "return_lse": self.return_lse,
            "dropout_p": self.dropout_p,
        }


def forward_grid(size: Literal["full", "small", "wide"] = "full") -> list[Case]:
    """The cases of the grid, the same ones in the same order every time.

    Parameters
    ----------
    size : str
        ``"full"`` covers every pair of values of `AXES`, `EMPTY_AXES` and `DROPOUT_AXES`; ``"small"`` of `SMALL_AXES`
        and `SMALL_DROPOUT_AXES`; ``"wide"`` of `WIDE_AXES`.
    """
    sizes = {
        "full": (AXES, EMPTY_AXES, DROPOUT_AXES),
        "small": (SMALL_AXES, SMALL_DROPOUT_AXES),
        "wide": (WIDE_AXES,),
    }
    rows = [row for axes in sizes[size] for row in pairwise(axes)]
    return [_case(index, row) for index, row in enumerate(rows)]


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Few combinations that contain every pair of values of every two axes.

    Greedy: each combination starts from a pair that is still missing and gives every further axis the value that
    covers most missing pairs; the best of a few such attempts is taken.

    Parameters
    ----------
    axes : mapping of str to sequence
    seed : int
        Order of the attempts; the same seed gives the same combinations.
    """
    names = list(axes)
    missing = {
        (a, i, b, j)
        for a, b in combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    rng = random.Random(seed)
    rows: list[list[int]] = []
    while missing:
        attempts = [_attempt([len(axes[name]) for name in names], missing, rng) for _ in range(6)]
        best = max(attempts, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append(best)
    return [{name: axes[name][i] for name, i in zip(names, row, strict=True)} for row in rows]


def _attempt(sizes: list[int], missing: set[tuple[int, int, int, int]], rng: random.Random) -> list[int]:
    a, i, b, j = rng.choice(sorted(missing))
    chosen = {a: i, b: j}
    rest = [axis for axis in range(len(sizes)) if axis not in chosen]
    rng.shuffle(rest)
    for axis in rest:

        def gain(value: int, axis: int = axis) -> int:
            pairs = ((o, w, axis, value) if o < axis else (axis, value, o, w) for o, w in chosen.items())
            return sum(pair in missing for pair in pairs)

        start = rng.randrange(sizes[axis])
        chosen[axis] = max(((start + n) % sizes[axis] for n in range(sizes[axis])), key=gain)
    return [chosen[axis] for axis in range(len(sizes))]


def _pairs(row: list[int]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}


def _case(index: int, row: dict[str, Any]) -> Case:
    batch, heads_q, heads_kv = row["heads"]
    seq_q, seq_kv = row["seqs"]
    head_dim = row["head_dim"]
    value_dim = head_dim if row["value_dim"] == "same" else row["value_dim"]
    causal = row["causal"] is not None
    flags = [name for name in ("bias", "alibi", "sinks", "large") if row[name]]
    parts = [
        f"{index:03d}",
        row["dtype"],
        f"b{batch}h{heads_q}x{heads_kv}",
        f"s{seq_q}x{seq_kv}",
        f"d{head_dim}x{value_dim}",
        *([row["causal"]] if causal else []),
        *([f"window{row['window']}".replace(" ", "")] if row["window"] is not None else []),
        *(["softcap"] if row["softcap"] else []),
        *([row["mask"]] if row["mask"] else []),
        *flags,
        *([f"dropout{row['dropout']}"] if row.get("dropout") else []),
        row["strides"],
    ]
    return Case(
        id="-".join(parts),
        dtype=row["dtype"],
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=causal,
        causal_align=row["causal"] or "bottom-right",
        window=row["window"],
        softcap=row["softcap"],
        mask=row["mask"],
        bias=row["bias"],
        alibi=row["alibi"],
        sinks=row["sinks"],
        return_lse=row["return_lse"],
        strides=row["strides"],
        scale=row["scale"],
        large=row["large"],
        dropout_p=row.get("dropout", 0.0),
    )


def make_inputs(case: Case, seed: int = 0) -> dict[str, Array]:
    """Random arrays of a case, under the names of `aule.flash_attention`'s arguments; absent ones are left out."""
    rng = np.random.default_rng([seed, zlib.crc32(case.id.encode())])
    c = case
    q = rng.standard_normal((c.batch, c.heads_q, c.seq_q, c.head_dim))
    if c.large:
        scale = c.head_dim**-0.5 if c.scale is None else c.scale
        q *= 6.0 / (scale * c.head_dim**0.5)
    k = rng.standard_normal((c.batch, c.heads_kv, c.seq_kv, c.head_dim))
    v = rng.standard_normal((c.batch, c.heads_kv, c.seq_kv, c.value_dim))
    inputs = {name: lay_out(x.astype(NUMPY_DTYPES[c.dtype]), c.strides) for name, x in (("q", q), ("k", k), ("v", v))}
    if c.mask is not None:
        inputs["mask"] = _mask(case, rng)
    if c.bias:
        inputs["bias"] = rng.standard_normal((1, c.heads_q, c.seq_q, c.seq_kv)).astype(np.float32)
    if c.alibi:
        shape = (c.heads_q,) if c.batch == 1 else (c.batch, c.heads_q)
        inputs["alibi_slopes"] = rng.uniform(0.01, 0.5, shape).astype(np.float32)
    if c.sinks:
        inputs["sinks"] = rng.standard_normal(c.heads_q).astype(np.float32)
    if c.dropout_p:
        inputs["seed"] = rng.integers(2**32, size=2, dtype=np.uint32)
    return inputs


def _mask(case: Case, rng: np.random.Generator) -> Array:
    c = case
    if c.mask in ("additive-f32", "additive-inf"):
        values = rng.standard_normal((c.batch, 1, c.seq_q, c.seq_kv))
        if c.mask == "additive-f32":
            return values.astype(np.float32)
        values[rng.random(values.shape) < 0.3] = -np.inf
        return values.astype(NUMPY_DTYPES[c.dtype])
    shapes = {
        "full": (c.batch, c.heads_q, c.seq_q, c.seq_kv),
        "over-heads": (c.batch, 1, c.seq_q, c.seq_kv),
        "key-padding": (c.batch, 1, 1, c.seq_kv),
    }
    if c.mask == "key-padding":
        lengths = rng.integers(c.seq_kv // 2, c.seq_kv + 1, (c.batch, 1, 1, 1))
        return np.arange(c.seq_kv) < lengths
    return rng.random(shapes[str(c.mask)]) < 0.7


def lay_out(array: Array, strides: str) -> Array:
    """The same ``[batch, heads, seq, dim]`` values in another memory layout (`Case.strides`)."""
    batch, heads, seq, dim = array.shape
    if strides == "contiguous":
        return np.ascontiguousarray(array)
    if strides == "bshd":
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if strides == "gap":
        # The gaps hold NaN: reading one shows.
        room = np.full((batch, heads + 1, seq + 3, dim + 8), np.nan, dtype=array.dtype)
        view = room[:, :heads, 1 : 1 + seq, 8:]
    else:
        room = np.full((batch, heads, seq, 2 * dim), np.nan, dtype=array.dtype)
        view = room[..., ::2]
    view[...] = array
    return view


def view_of(array: Array) -> TensorView:
    """A host `TensorView` of a NumPy array."""
    dtype = next(name for name, known in NUMPY_DTYPES.items() if array.dtype == known)
    storage = array.view(np.uint16) if dtype == "bf16" else array
    strides = tuple(step // array.itemsize for step in array.strides)
    return TensorView(dtype, array.shape, strides, "host", storage)


def case_problem(case: Case, inputs: Mapping[str, Array]) -> tuple[AttentionProblem, Operands]:
    """Problem and operands of a case, through the validation that users pass."""
    return attention_problem(**{name: view_of(array) for name, array in inputs.items()}, **case.options)


def rounded_to(x: Array, factor: str) -> Array:
    """Inputs as ``precision`` rounds them for matrix units; tf32 in fp32."""
    if factor != "tf32":
        return x.astype(NUMPY_DTYPES[factor])
    words = (np.ascontiguousarray(x).view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), words.view(np.float32), x)


def expected(case: Case, inputs: Mapping[str, Array]) -> Expected:
    """Expected results, for `aule.ops.attention.reference.compare`."""
    problem, _ = case_problem(case, inputs)
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    return expect(problem, **arrays)
