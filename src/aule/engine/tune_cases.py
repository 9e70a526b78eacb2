"""Problems that `aule tune` measures: plan, arrays, and the conditions under which a winner is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aule import tuning
from aule.engine.memory import STORED
from aule.engine.row_ops import result_views
from aule.ops.attention.plan import tiles, tiles_backward
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.catalogue import CATALOGUE
from aule.ops.decode.config import DecodeShape, FragmentDecodeShape
from aule.ops.decode.plan.decode import decode_views, plan_decode
from aule.ops.decode.validate import decode_problem
from aule.ops.shared.elements import stored
from aule.ops.shared.plan import Plan
from aule.target import Target
from aule.tile.fragment.engine import multiplies
from aule.tile.fragment.shape import FragmentShape
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]
OPS = ("forward", "backward", "decode", "rows")
"""Operations that can be tuned."""
ROW_OPS = ("rms_norm", "layer_norm", "softmax_dropout", "swiglu")
_ROW_BYTES = 64 << 20
"""Bytes of the rows that an operation reads."""


@dataclass(frozen=True)
class Settings:
    """Parameters of the problems: type, head dimension or columns, and lengths."""

    dtype: str
    head_dim: int = 64
    seq_len: int = 2048
    causal: bool = False
    masked: bool = False
    columns: int = 4096


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes
    ----------
    name : str
        Text for the user.
    op : str
        Records to vary.
    when : dict
        Conditions of a saved record.
    plan : callable
        Plans the problem for a target.
    arrays : dict
        Contents of every buffer of the caller, by name; bf16 as its bits.
    results : dict
        Type of each buffer to compare.
    work, unit : float, str
        Work of a call, and the unit of work per second.
    before : Plan or None
        Launches that compute some of the arrays, once.
    """

    name: str
    op: str
    when: Mapping[str, Any]
    plan: Callable[[Target], Plan]
    arrays: Mapping[str, Array]
    results: Mapping[str, str]
    work: float
    unit: str = "TFLOPS"
    before: Plan | None = field(default=None, compare=False)


def cases(op: str, settings: Settings, target: Target) -> Iterator[Case]:
    """Yield the problems of an op, one of `OPS`."""
    yield from {"forward": _forward, "backward": _backward, "decode": _decode, "rows": _rows}[op](settings, target)


def _from_tables(plan: Callable[[Target], Plan], target: Target) -> Plan:
    """Plan without the user's own records."""
    with tuning.trying():
        return plan(target)


# -- attention ---------------------------------------------------------------------------------------------------------


def _heads(target: Target) -> int:
    """Return how many heads fill the device."""
    return 2 if target.software else 64


def _attention(settings: Settings, target: Target) -> tuple[AttentionProblem, dict[str, Array], dict[str, TensorView]]:
    heads, length, dim = _heads(target), settings.seq_len, settings.head_dim
    mask = "bool" if settings.masked else None
    problem = AttentionProblem(
        1, heads, heads, length, length, dim, dim, settings.dtype, dim**-0.5, causal=settings.causal, mask=mask
    )
    arrays = {name: _random(settings.dtype, (1, heads, length, dim), seed) for seed, name in enumerate("qkvo")}
    views = {name: _view(settings.dtype, array.shape) for name, array in arrays.items()}
    if settings.masked:
        arrays["mask"] = np.random.default_rng(9).random((length, length)) < 0.9
        views["mask"] = TensorView("bool", (1, heads, length, length), (0, 0, length, 1), "device", None)
    return problem, arrays, views


def _forward(settings: Settings, target: Target) -> Iterator[Case]:
    problem, arrays, views = _attention(settings, target)
    plan = partial(plan_forward, problem, views)
    shape = _from_tables(plan, target).steps[-1].config.shape
    dims = tiles.dims_facts(problem.head_dim, problem.value_dim)
    when: dict[str, Any] = {"dtype": settings.dtype, **dims}
    if isinstance(shape, FragmentShape) and shape.warpgroups:
        full = not (settings.causal or settings.masked)
        # Tiles depend on the length only where every row attends to every key.
        length: Any = {"min": settings.seq_len // 2, "max": 2 * settings.seq_len} if full else 0
        op, when = tiles.WARPGROUP, when | {"modifier": "nothing", "length": length}
    elif isinstance(shape, FragmentShape) or multiplies(target, settings.dtype):
        op, when = tiles.FRAGMENT, when | {"rows": "masked" if settings.masked else "plain"}
    else:
        op, when = tiles.SIMT, when | {"modifiers": problem.modifiers}
    yield Case(
        f"{settings.dtype}, head dimension {settings.head_dim}, {settings.seq_len} keys{_said(settings)}",
        op, when, plan, arrays, {"o": settings.dtype}, problem.flops / 1e12,
    )  # fmt: skip


def _backward(settings: Settings, target: Target) -> Iterator[Case]:
    problem, arrays, views = _attention(settings, target)
    forward = _from_tables(partial(plan_forward, replace(problem, return_lse=True), dict(views)), target)
    shape = arrays["q"].shape
    arrays |= {"do": _random(settings.dtype, shape, 5), "lse": np.zeros(shape[:3], np.float32)}
    arrays |= {f"d{name}": np.zeros_like(arrays[name]) for name in "qkv"}
    views |= {name: _view(settings.dtype, shape) for name in ("do", "dq", "dk", "dv")}
    plan = partial(plan_backward, problem, views)
    keys = next(step.config for step in _from_tables(plan, target).steps if getattr(step.config, "of", "") == "keys")
    dims = tiles.dims_facts(problem.head_dim, problem.value_dim)
    when: dict[str, Any] = {"dtype": settings.dtype, **dims}
    if not isinstance(keys.shape, FragmentShape):
        columns = problem.head_dim + problem.value_dim
        op = tiles_backward.SIMT
        when = {
            "sums": keys.sums, "head_dim": dims["head_dim"], "columns": columns, "modifiers": problem.modifiers
        }  # fmt: skip
    elif keys.shape.warpgroups:
        op = tiles_backward.WARPGROUP
    else:
        op, when = tiles_backward.FRAGMENT, when | {"of": "sums" if keys.sums else "keys"}
    yield Case(
        f"gradients, {settings.dtype}, head dimension {settings.head_dim}, {settings.seq_len} keys{_said(settings)}",
        op, when, plan, arrays, dict.fromkeys(("dq", "dk", "dv"), settings.dtype), 2.5 * problem.flops / 1e12,
        before=forward,
    )  # fmt: skip


def _said(settings: Settings) -> str:
    return f"{', causal' if settings.causal else ''}{', mask' if settings.masked else ''}"


# -- decoding ----------------------------------------------------------------------------------------------------------


def _decode(settings: Settings, target: Target) -> Iterator[Case]:
    """One token of one sequence, four query heads to a key head."""
    dtype, dim, keys = settings.dtype, settings.head_dim, settings.seq_len
    heads = 1 if target.software else 8
    arrays = {
        "q": _random(dtype, (1, 4 * heads, 1, dim), 0),
        "k": _random(dtype, (1, heads, keys, dim), 1),
        "v": _random(dtype, (1, heads, keys, dim), 2),
    }
    views = {name: _view(dtype, array.shape) for name, array in arrays.items()}
    problem, operands = decode_problem("decode_attention", views["q"], views["k"], views["v"])
    arrays["o"] = np.zeros(problem.out_shape, STORED[dtype])
    plan = partial(plan_decode, problem, decode_views(operands, _view(dtype, problem.out_shape)))
    shape = _from_tables(plan, target).steps[0].config.shape
    if isinstance(shape, FragmentDecodeShape):
        op, when = "decode.fragment", {"cache": problem.cache, "head_dim": dim, "narrow_dim": dim, "rows": 4}
        when["keys"] = {"min": keys // 2, "max": 2 * keys}
    else:
        op, when = "decode.simt.keys", _simt_decode_facts(shape, dim)
    moved = arrays["k"].nbytes + arrays["v"].nbytes
    name = f"decoding, {dtype}, head dimension {dim}, {keys} keys"
    yield Case(name, op, when, plan, arrays, {"o": dtype}, moved / 1e12, "TB/s")


def _simt_decode_facts(shape: DecodeShape, dim: int) -> dict[str, Any]:
    held = shape.rows * shape.pieces(dim) * shape.run
    return {"subgroups": shape.subgroup > 0, "held": held, "quantised": False}


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(settings: Settings, target: Target) -> Iterator[Case]:
    for name in ROW_OPS:
        yield _row_case(name, settings, target)
        if "norm" in name:
            yield _row_case(name, settings, target, gradient=True)


def _row_case(name: str, settings: Settings, target: Target, gradient: bool = False) -> Case:
    spec, dtype, columns = CATALOGUE[name], settings.dtype, settings.columns
    size = np.dtype(STORED[dtype]).itemsize
    count = 64 if target.software else max(_ROW_BYTES // (columns * size), 64)
    shapes: dict[str, tuple[int, ...]] = {"x": (count, columns)}
    if name == "swiglu":
        shapes = {"gate": (count, columns), "up": (count, columns)}
    elif "norm" in name:
        vectors = ("weight", "bias") if name == "layer_norm" else ("weight",)
        shapes |= dict.fromkeys(vectors, (columns,))
    views = {n: _view(dtype, shape) for n, shape in shapes.items()}
    options = {option.name: option.default for option in spec.options}
    call = spec.call(views, options)
    if gradient:
        assert spec.gradient is not None
        results = result_views(call)
        known = views | results | {f"d{n}": view for n, view in results.items()}
        needed = {o.name for o in spec.gradient.operands if not (o.spares or o.stands_for)}
        spec = spec.gradient
        call = spec.call({n: view for n, view in known.items() if n in needed}, options)
    made = result_views(call)
    given = {**call.views, **made}
    arrays = {n: _random(view.dtype, view.shape, i) for i, (n, view) in enumerate(given.items())}
    moved = sum(array.nbytes for array in arrays.values())
    centred, narrow = name == "layer_norm", size == 2
    op = {"swiglu": "glu", "softmax_dropout": "softmax"}.get(name, "rows.sums" if gradient else "rows.norm")
    when: dict[str, Any] = {"length": columns}
    if op == "rows.norm":
        when |= {"residual": False, "centred": centred, "narrow": narrow}
    elif op == "rows.sums":
        when |= {"sums": 1 + centred, "arrays": 2, "bytes": size}
    elif op == "softmax":
        when |= {"backward": False, "drops": False}
    else:
        when = {}
    label = f"{name}{', gradient' if gradient else ''}, {dtype}, {columns} columns"
    plan = partial(spec.plan, call.problem, given)
    return Case(label, op, when, plan, arrays, {n: v.dtype for n, v in made.items()}, moved / 1e12, "TB/s")


def _view(dtype: str, shape: tuple[int, ...]) -> TensorView:
    return TensorView(dtype, shape, contiguous_strides(shape), "device", None)


def _random(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return stored(values, dtype).astype(STORED[dtype], copy=False)
