"""The launches of every op, for ``aule show``: contiguous arrays of the sizes that were asked for, without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from aule.engine.row_ops import result_views
from aule.errors import InvalidArgumentError
from aule.ir import KernelIR
from aule.kernels import AttentionKernel
from aule.ops.attention.validate import attention_problem
from aule.ops.catalogue import CATALOGUE
from aule.ops.decode.validate import decode_problem
from aule.ops.kvcache.plan import plan_append
from aule.ops.kvcache.problem import append_problem
from aule.ops.shared.plan import Plan
from aule.ops.shared.spec import OpSpec
from aule.target import Target
from aule.tile.fragment.engine import multiplies
from aule.view import TensorView, contiguous_strides

ATTENTION, DECODE, APPEND = "flash_attention", "decode_attention", "kvcache_append"
ALIASES = {"attention": ATTENTION, "decode": DECODE}

_MORE = {
    ATTENTION: "attention of many queries",
    DECODE: "attention of one new token over a cache of keys and values",
    APPEND: "KVCache.append: keys and values of new tokens into pages of a cache",
    "rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "residual_rms_norm": "adds a residual, then RMSNorm",
    "residual_layer_norm": "adds a residual, then LayerNorm",
    "layer_norm_linear": "LayerNorm and a linear layer in one kernel",
    "cross_entropy": "the loss of logits",
    "swiglu": "SiLU(gate) * up",
    "geglu": "GELU(gate) * up",
    "rope": "rotary position embedding",
    "rms_norm_rope": "RMSNorm of each head, then rotary position embedding",
    "softmax_dropout": "softmax and dropout",
}
"""What an op does, for ``--list``."""

_HEADS = frozenset({"seq_len", "head_dim", "heads"})
OPS: tuple[str, ...] = (ATTENTION, DECODE, APPEND, *CATALOGUE)
"""All ops that can be shown."""


@dataclass(frozen=True)
class Sizes:
    """Sizes and options of the arrays; `sizes_of` says which ones an op has."""

    dtype: str
    seq_len: int = 1024
    head_dim: int = 64
    heads: int = 1
    kv_heads: int | None = None
    causal: bool = False
    tiles: tuple[int, int] | None = None
    rows: int = 1024
    columns: int = 4096


def directions(op: str) -> tuple[str, ...]:
    """``forward``, and ``backward`` if the op has a gradient."""
    if op == ATTENTION or (op in CATALOGUE and CATALOGUE[op].gradient is not None):
        return ("forward", "backward")
    return ("forward",)


def sizes_of(op: str) -> frozenset[str]:
    """The fields of `Sizes` that an op has."""
    if op == ATTENTION:
        return _HEADS | {"kv_heads", "causal", "tiles"}
    if op == DECODE:
        return _HEADS | {"kv_heads"}
    if op == APPEND or "rope" in op:
        return _HEADS
    return frozenset({"rows", "columns"} | ({"causal"} if op == "softmax_dropout" else set()))


def about(op: str) -> str:
    """What an op does."""
    return _MORE.get(op, "")


@dataclass(frozen=True)
class Launch:
    """A kernel, traced when it is asked for, and its grid."""

    build: Callable[[], KernelIR]
    grid: tuple[int, int, int]


def launches(op: str, direction: str, sizes: Sizes, target: Target) -> list[Launch]:
    """Plan a call of an op on a target."""
    if direction not in directions(op):
        raise InvalidArgumentError(f"[show] expected an op with a gradient, got {op}; leave --backward out")
    if sizes.tiles is not None and (op, direction) != (ATTENTION, "forward"):
        raise InvalidArgumentError(
            f"[show] expected --tiles with {ATTENTION} forward, got {op} {direction}; leave --tiles out"
        )
    if op in CATALOGUE:
        return _of(_rows(CATALOGUE[op], direction, sizes, target), target)
    if op in (DECODE, APPEND):
        return _of((_decode if op == DECODE else _append)(sizes, target), target)
    # The kernel object checks the sizes of both directions. As in a call, half precision takes matrix units.
    kernel = AttentionKernel(
        sizes.seq_len, sizes.head_dim, num_heads=sizes.heads, num_kv_heads=sizes.kv_heads, causal=sizes.causal,
        dtype=sizes.dtype, tiles=sizes.tiles,
        use_tensor_cores=sizes.dtype in ("f16", "bf16") and multiplies(target, sizes.dtype),
    )  # fmt: skip
    if direction == "backward":
        return _of(_attention_backward(sizes, target), target)
    return [Launch(partial(kernel.build, target), kernel.plan(target).grid)]


def _of(plan: Plan, target: Target) -> list[Launch]:
    return [Launch(partial(step.build, step.config, target), step.grid) for step in plan.steps]


def _attention_backward(sizes: Sizes, target: Target) -> Plan:
    q, kv = _heads(sizes, sizes.seq_len)
    problem, operands = attention_problem(q, kv, kv, causal=sizes.causal)
    views = {"q": operands.q, "k": operands.k, "v": operands.v, "o": q, "do": q, "dq": q, "dk": kv, "dv": kv}
    if target.backend == "cpu":
        from aule.ops.attention.cpu import plan as cpu

        return cpu.plan_backward(problem, views, target)
    from aule.ops.attention.plan.backward import plan_backward

    return plan_backward(problem, views, target)


def _decode(sizes: Sizes, target: Target) -> Plan:
    from aule.ops.decode.cpu import plan as cpu
    from aule.ops.decode.plan.decode import decode_views, plan_decode

    q, kv = _heads(sizes, 1)
    problem, operands = decode_problem(DECODE, q, kv, kv)
    views = decode_views(operands, q)
    return cpu.plan_decode(problem, views, target) if target.backend == "cpu" else plan_decode(problem, views, target)


def _append(sizes: Sizes, target: Target) -> Plan:
    """The launch that appends ``seq_len`` tokens to pages of 16."""
    rows = _view(sizes.dtype, 1, sizes.seq_len, sizes.heads, sizes.head_dim)
    pages = _view(sizes.dtype, -(-sizes.seq_len // 16), 16, sizes.heads, sizes.head_dim)
    views = {"k": rows, "v": rows, "k_cache": pages, "v_cache": pages, "places": _view("i32", 2, sizes.seq_len)}
    return plan_append(append_problem(APPEND, views), views, target)


def _heads(sizes: Sizes, queries: int) -> tuple[TensorView, TensorView]:
    q = _view(sizes.dtype, 1, sizes.heads, queries, sizes.head_dim)
    return q, _view(sizes.dtype, 1, sizes.kv_heads or sizes.heads, sizes.seq_len, sizes.head_dim)


# -- row operations ----------------------------------------------------------------------------------------------------


def _rows(spec: OpSpec, direction: str, sizes: Sizes, target: Target) -> Plan:
    options = {option.name: option.default for option in spec.options}
    if spec.name == "softmax_dropout":
        options["causal"] = sizes.causal
    operands = _operands(spec, sizes)
    call = spec.call(operands, options)
    if direction == "backward":
        assert spec.gradient is not None
        results = result_views(call)
        known = operands | results | {f"d{name}": view for name, view in results.items()}
        needed = {operand.name for operand in spec.gradient.operands if not (operand.spares or operand.stands_for)}
        spec = spec.gradient
        call = spec.call({name: view for name, view in known.items() if name in needed}, options)
    return spec.plan(call.problem, {**call.views, **result_views(call)}, target)


def _operands(spec: OpSpec, sizes: Sizes) -> dict[str, TensorView]:
    """Every operand that is not an extra: no mask, no seed, no position ids."""
    if "rope" in spec.name:
        shapes: Mapping[str, tuple[int, ...]] = {
            "x": (1, sizes.heads, sizes.seq_len, sizes.head_dim),
            "weight": (sizes.head_dim,),
            "cos": (sizes.seq_len, sizes.head_dim // 2),
            "sin": (sizes.seq_len, sizes.head_dim // 2),
        }
    else:
        rows, vector = (sizes.rows, sizes.columns), (sizes.columns,)
        square = spec.name == "layer_norm_linear"
        shapes = dict.fromkeys(("x", "residual", "gate", "up", "logits"), rows)
        shapes |= dict.fromkeys(("weight_norm", "bias_norm", "bias"), vector)
        shapes |= {"weight": (sizes.columns, sizes.columns) if square else vector, "target": (sizes.rows,)}
    kinds = {"cos": "f32", "sin": "f32", "target": "i64"}
    return {
        operand.name: _view(kinds.get(operand.name, sizes.dtype), *shapes[operand.name])
        for operand in spec.operands
        if operand.name in shapes
    }


def _view(dtype: str, *shape: int) -> TensorView:
    return TensorView(dtype, shape, contiguous_strides(shape), "device", None)
