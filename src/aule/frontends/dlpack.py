"""The front end for DLPack arrays in host memory, of any framework (JAX, CuPy's host arrays, array-api-strict ...)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aule.errors import DeviceMismatchError, InvalidDtypeError
from aule.frontends import numpy as numpy_front_end
from aule.ir import KernelIR
from aule.ops.attention.varlen import OP
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared.checks import wrong_kind
from aule.options import AttentionOptions, DecodeOptions
from aule.runtime.base import Grid

_HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost


def accepts(array: object) -> bool:
    """Whether this front end serves an array."""
    return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")


def flash_attention(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention on DLPack arrays; the result comes from the namespace of ``q``."""
    changed = _on_host(options, "flash_attention")
    return _back(numpy_front_end.flash_attention(host(q, "q"), host(k, "k"), host(v, "v"), changed), q)


def flex_attention(
    q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any, scale: float | None, backend: str | None
) -> Any:
    """Attention with functions of the user, and its log-sum-exp, on DLPack arrays."""
    given = [host(x, name, "flex_attention") for name, x in (("query", q), ("key", k), ("value", v))]
    found = numpy_front_end.flex_attention(given[0], given[1], given[2], score_mod, block_mask, scale, backend)
    return _back(found, q)


def max_scores(q: Any, k: Any, score_mod: Any, block_mask: Any, scale: float | None) -> Any:
    """The largest score of each row, after the functions of the user, of DLPack arrays."""
    given = [host(x, name, "flex_attention") for name, x in (("query", q), ("key", k))]
    return _back(numpy_front_end.max_scores(given[0], given[1], score_mod, block_mask, scale), q)


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    offsets: tuple[Any, Any],
    longest: tuple[int | None, int | None],
    options: AttentionOptions,
    functions: numpy_front_end.VarlenFunctions = (None, None),
) -> Any:
    """Attention on packed batches of DLPack arrays; the result comes from the namespace of ``q``."""
    changed = _on_host(options, OP)
    at_q, at_k = (host(x, "cu_seqlens", OP) if accepts(x) else x for x in offsets)
    given = (host(q, "q", OP), host(k, "k", OP), host(v, "v", OP), (at_q, at_k), longest)
    return _back(numpy_front_end.flash_attention_varlen(*given, changed, functions), q)


def row_op(name: str, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Any:
    """A row operation on DLPack arrays; the result comes from the namespace of the first."""
    operands = CATALOGUE[name].operands
    first = operands[0].name
    given = tuple(
        array if array is None or operand.name == "seed" else host(array, operand.name, name, first)
        for operand, array in zip(operands, arrays, strict=True)
    )
    return _back(numpy_front_end.row_op(name, given, options, backend), arrays[0])


def decode(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """Attention over a cache of DLPack arrays; the result comes from the namespace of ``q``."""
    op = options.op
    _refuse_out(options.out, op)
    arrays = {name: host(array, name, op) for name, array in options.arrays().items()}
    arrays |= {name: host(x, name, op) if accepts(x) else x for name, x in options.indices().items()}
    if options.tree_mask is not None:
        arrays["tree_mask"] = host(options.tree_mask, "tree_mask", op)
    given = (host(q, "q", op), host(k, "k", op), host(v, "v", op))
    return _back(numpy_front_end.decode(*given, options._replace(**arrays)), q)


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Combine two attention results over disjoint keys."""
    named = ((o_a, "o_a"), (lse_a, "lse_a"), (o_b, "o_b"), (lse_b, "lse_b"))
    given = (host(x, name, "merge_states", "o_a") for x, name in named)
    merged: tuple[Any, Any] = _back(numpy_front_end.merge_states(*given), o_a)
    return merged


def launch(kernel: KernelIR, grid: Grid, args: Sequence[Any], backend: str | None) -> None:
    """Launch a kernel on DLPack arrays and numbers; arrays that it writes must be writable through DLPack."""
    given = [host(x, param.name, "launch") if accepts(x) else x for param, x in zip(kernel.params, args, strict=True)]
    numpy_front_end.launch(kernel, grid, given, backend)


def to_precision(array: Any, precision: str) -> Any:
    """Convert floats to a dtype (``"float16"`` ...); the result comes from the array's namespace."""
    return _back(numpy_front_end.to_precision(host(array, "array"), precision), array)


def _refuse_out(out: object, op: str) -> None:
    if out is not None:
        raise InvalidDtypeError(f"[{op}] expected no out with DLPack arrays, got one; use the return value")


def _on_host(options: AttentionOptions, op: str) -> AttentionOptions:
    """The options with the words of a seed, and with NumPy arrays."""
    _refuse_out(options.out, op)
    options = numpy_front_end.seeded(options)
    return options._replace(**{name: host(array, name, op) for name, array in options.arrays().items()})


def _back(result: Any, like: Any) -> Any:
    """Convert a NumPy result, or a tuple of them, to arrays of the caller's namespace, if it has one."""
    if isinstance(result, tuple):
        return tuple(_back(part, like) for part in result)
    if not hasattr(like, "__array_namespace__"):
        return np.asarray(result)
    namespace = like.__array_namespace__()
    try:
        return namespace.from_dlpack(result)
    except (BufferError, RuntimeError, TypeError):
        return namespace.asarray(result)  # dtypes that NumPy's DLPack lacks (bfloat16)


def host(array: Any, name: str, op: str = "flash_attention", like: str = "q") -> Any:
    """A DLPack array in host memory as a NumPy array, without a copy where NumPy has its type."""
    if isinstance(array, np.ndarray):
        return array
    if not accepts(array):
        raise wrong_kind(op, name, "an array with __dlpack__", like, array)
    kind = int(array.__dlpack_device__()[0])
    if kind not in _HOST_DEVICES:
        raise DeviceMismatchError(
            f"[{op}] expected {name} in host memory or as a torch tensor, got a DLPack array on device type "
            f"{kind}; pass torch.from_dlpack({name}), which copies nothing"
        )
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        found = np.asarray(array)  # dtypes that NumPy's DLPack lacks (bfloat16) come through the array protocol
        if found.dtype == object:  # the array has no such protocol
            raise InvalidDtypeError(
                f"[{op}] expected {name} of a type that NumPy takes from DLPack, got another ({error}); pass "
                f"torch.from_dlpack({name}), which takes bfloat16"
            ) from None
        return found
