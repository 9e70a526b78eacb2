"""The front end for NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aule.backends import registry
from aule.dtypes import KERNEL_NAMES, dtype_name
from aule.engine.attention import forward_on_host, host_device
from aule.engine.launch import on_host as launch_on_host
from aule.engine.memory import STORED, reports_shortage
from aule.engine.row_ops import host_device as row_op_device
from aule.engine.row_ops import on_host
from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ir import KernelIR
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.attention.varlen import OP, varlen_problem
from aule.ops.shared.checks import FLOAT_DTYPES, FLOATS, checked_dropout, checked_seed, wrong_kind
from aule.ops.shared.spec import Call, OpSpec
from aule.ops.softmax.dropout import fresh_seed, seed_words
from aule.options import AttentionOptions, DecodeOptions
from aule.runtime.base import Grid
from aule.view import ITEMSIZE, TensorView

if TYPE_CHECKING:
    from aule.ops.decode.problem import DecodeProblem
    from aule.ops.decode.validate import DecodeOperands

Array = npt.NDArray[Any]
VarlenFunctions = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
"""Score function and mask function of a packed batch."""

_NAMES = {name: short for name, short in KERNEL_NAMES.items() if short in ITEMSIZE}
_BITS = {"bf16": np.uint16, "e4m3": np.uint8}
"""NumPy's type for the bits of elements of a type that NumPy lacks."""


def accepts(array: object) -> bool:
    """Whether this front end serves an array."""
    return isinstance(array, np.ndarray)


def view(array: Array, name: str = "array", op: str = "flash_attention", like: str = "q") -> TensorView:
    """View a NumPy array. bfloat16 and float8_e4m3fn (ml_dtypes) are viewed by their bits."""
    if not isinstance(array, np.ndarray):
        raise wrong_kind(op, name, "a NumPy array", like, array)
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidDtypeError(
            f"[{op}] expected {name} without a mask of its own, got a masked array, whose mask kernels do not know; "
            "use .filled(), and mask= if the function has it"
        )
    dtype = _NAMES.get(array.dtype.name)
    if dtype is None or not array.dtype.isnative:
        whole = "int32 or int64 for indices, else " if array.dtype.kind in "iu" else ""
        raise InvalidDtypeError(
            f"[{op}] expected {name} of {whole}float32, float16, bfloat16 or float64 in native byte order, got "
            f"{array.dtype}; convert with .astype"
        )
    size = array.itemsize
    if any(step % size for step in array.strides):
        array = array.copy()  # a field of a structured array: no element stride describes it
    bits = array.view(_BITS[dtype]) if dtype in _BITS else array
    return TensorView(dtype, array.shape, tuple(step // size for step in array.strides), "host", bits)


def bfloat16() -> Any:
    """ml_dtypes' bfloat16; None if the package is missing."""
    return ml_dtype("bfloat16")


def ml_dtype(name: str) -> Any:
    """A type that NumPy lacks; None if ml_dtypes is missing."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return getattr(ml_dtypes, name)


@reports_shortage
def to_precision(array: Array, precision: str) -> Array:
    """Convert floats to a dtype (``"float16"`` ...); without a copy if they are that already."""
    if not isinstance(array, np.ndarray) or _NAMES.get(array.dtype.name) not in FLOAT_DTYPES:
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidDtypeError(
            f"[attention] expected NumPy arrays of floats to convert to {precision}, got {got}; convert with .astype"
        )
    dtype = bfloat16() if precision == "bfloat16" else np.dtype(precision)
    if dtype is None:
        raise InvalidDtypeError(
            "[attention] expected ml_dtypes for bfloat16, which NumPy lacks, got no such package; "
            "pip install ml_dtypes, or use float16 or float32"
        )
    with np.errstate(over="ignore"):  # values beyond the precision become infinite, as on every device
        return array.astype(dtype, copy=False)


@reports_shortage
def make(array: Array, device: None, dtype: Any, op: str) -> Array:
    """Convert a float64 result to a dtype, by default float32."""
    name = "float32" if dtype is None else dtype_name(dtype)
    if _NAMES.get(str(name)) not in FLOAT_DTYPES:
        raise InvalidDtypeError(f"[{op}] expected dtype {FLOATS}, got {dtype!r}; choose one")
    kind = bfloat16() if name == "bfloat16" else np.dtype(name)
    if kind is None:
        raise InvalidDtypeError(
            f"[{op}] expected ml_dtypes for bfloat16, which NumPy lacks, got no such package; pip install ml_dtypes, "
            "or use float16 or float32"
        )
    return array.astype(kind)


def seeded(options: AttentionOptions) -> AttentionOptions:
    """The options with the words of a seed, given or drawn, if weights are dropped."""
    if isinstance(options.seed, np.ndarray):
        return options
    words = _seed_words("flash_attention", options.dropout_p, options.seed)
    return options._replace(dropout_p=float(options.dropout_p), seed=words)


def _seed_words(op: str, dropout_p: Any, seed: Any) -> Array | None:
    """The words of the given seed or of a new one; None if nothing is dropped."""
    p, number = checked_dropout(op, dropout_p), checked_seed(op, seed)
    if p == 0.0:
        return None
    return seed_words(fresh_seed() if number is None else number)


def attention_call(q: Array, k: Array, v: Array, options: AttentionOptions) -> tuple[AttentionProblem, Operands]:
    """Check a call of attention."""
    if type(options.dropout_p) is not float or options.dropout_p != 0.0 or options.seed is not None:
        options = seeded(options)
    views: dict[str, Any] = {
        name: view(array, name) for name, array in {"q": q, "k": k, "v": v, **options.arrays()}.items()
    }
    return attention_problem(**views, **options.plain())


@reports_shortage
def flash_attention(q: Array, k: Array, v: Array, options: AttentionOptions) -> Any:
    """Attention on NumPy arrays; the result is finished on return."""
    problem, operands = attention_call(q, k, v, options)
    device = host_device(problem.dtype, options.backend)
    target = None
    if options.out is not None:
        target = checked_out(options.out, operands.out_shape, problem.dtype)
        target = target[(None,) * (4 - target.ndim)]
    out, lse = forward_on_host(problem, operands, device, target)
    result = options.out
    if result is None:
        result = out.reshape(operands.out_shape).view(q.dtype)
    return (result, _required(lse).reshape(operands.lse_shape)) if options.return_lse else result


def flex_attention(
    q: Array, k: Array, v: Array, score_mod: Any, block_mask: Any, scale: float | None, backend: str | None
) -> tuple[Array, Array]:
    """Attention with functions of the user, and its log-sum-exp."""
    from aule.frontends import numpy_flex  # few programs use it

    return numpy_flex.flex_attention(q, k, v, score_mod, block_mask, scale, backend)


def max_scores(q: Array, k: Array, score_mod: Any, block_mask: Any, scale: float | None) -> Array:
    """The largest score of each row, after the functions of the user."""
    from aule.frontends import numpy_flex  # few programs use it

    return numpy_flex.max_scores(q, k, score_mod, block_mask, scale)


def varlen_call(
    q: Array,
    k: Array,
    v: Array,
    offsets: tuple[Any, Any],
    longest: tuple[int | None, int | None],
    options: AttentionOptions,
    functions: VarlenFunctions = (None, None),
) -> tuple[AttentionProblem, Operands]:
    """Check a call of attention on packed batches."""
    if type(options.dropout_p) is not float or options.dropout_p != 0.0 or options.seed is not None:
        options = seeded(options)
    arrays = {"q": q, "k": k, "v": v, **options.arrays()}
    arrays |= {f"cu_{name}": _offsets(x, f"cu_seqlens_{name}", OP) for name, x in zip("qk", offsets, strict=True)}
    views: dict[str, Any] = {name: view(array, name, OP) for name, array in arrays.items()}
    problem, operands = varlen_problem(**views, max_q=longest[0], max_k=longest[1], **options.plain())
    if functions == (None, None):
        return problem, operands
    from aule.frontends import numpy_flex
    from aule.frontends.functions import UserFunctions

    return numpy_flex.with_functions(problem, operands, UserFunctions(OP, *functions))


@reports_shortage
def flash_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    offsets: tuple[Any, Any],
    longest: tuple[int | None, int | None],
    options: AttentionOptions,
    functions: VarlenFunctions = (None, None),
) -> Any:
    """Attention on packed batches of NumPy arrays; the result is finished on return."""
    problem, operands = varlen_call(q, k, v, offsets, longest, options, functions)
    _, heads, rows, dim = problem.out_shape
    result = np.empty((rows, heads, dim), q.dtype) if options.out is None else options.out
    target = checked_out(result, (rows, heads, dim), problem.dtype, OP).transpose(1, 0, 2)[None]
    _, lse = forward_on_host(problem, operands, host_device(problem.dtype, options.backend), target)
    return (result, _required(lse)[0]) if options.return_lse else result


def row_call(spec: OpSpec, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Call:
    """Check a call of a row operation; arrays and options are in the order of its spec."""
    name, first = spec.name, spec.operands[0].name
    if spec.seed is not None:
        words = _seed_words(name, spec.option("dropout_p", options), arrays[spec.seed])
        arrays = (*arrays[: spec.seed], words, *arrays[spec.seed + 1 :])
    views = {
        operand.name: view(array, operand.name, name, first)
        for operand, array in zip(spec.operands, arrays, strict=True)
        if array is not None or not operand.optional
    }
    return spec.call(views, dict(zip((option.name for option in spec.options), options, strict=True)))


@reports_shortage
def row_op(name: str, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Any:
    """A row operation on NumPy arrays, finished on return; arrays and options are in the order of its spec."""
    from aule.ops.catalogue import CATALOGUE  # imported late: attention needs none of these kernels

    spec = CATALOGUE[name]
    call = row_call(spec, arrays, options)
    found = on_host(spec, call, row_op_device(backend))
    results = [found[n].view(bfloat16()) if call.outputs[n].dtype == "bf16" else found[n] for n in spec.outputs]
    given = dict(zip((operand.name for operand in spec.operands), arrays, strict=True))
    for i, output in enumerate(spec.outputs):
        place = call.outputs[output].place
        if place is not None:
            if not np.may_share_memory(results[i], given[place]):  # `view` had to make a copy
                given[place][...] = results[i]
            results[i] = given[place]
    return results[0] if len(results) == 1 else tuple(results)


def decode_call(q: Array, k: Array, v: Array, options: DecodeOptions) -> tuple[DecodeProblem, DecodeOperands]:
    """Check a call of attention over a cache."""
    arrays = {"q": q, "k": k, "v": v, **options.arrays()}
    arrays |= {name: _offsets(array, name, options.op) for name, array in options.indices().items()}
    views: dict[str, Any] = {name: view(array, name, options.op) for name, array in arrays.items()}
    from aule.ops.decode.validate import decode_problem  # imported late: `import aule` is to be quick

    problem, operands = decode_problem(options.op, **views, **options.plain())
    if not options.has_functions:
        return problem, operands
    from aule.frontends import functions, numpy_flex  # few programs use them

    tree = options.tree_mask
    if tree is not None:
        is_bool = isinstance(tree, np.ndarray) and tree.dtype == np.bool_
        options = functions.with_tree(options, problem.batch, problem.seq_q, is_bool)
        problem, operands = decode_problem(options.op, **views, **options.plain())
    return numpy_flex.with_functions(problem, operands, functions.UserFunctions.of_decoding(options))


@reports_shortage
def decode(q: Array, k: Array, v: Array, options: DecodeOptions) -> Any:
    """Attention over a cache of keys and values, of NumPy arrays; the result is finished on return."""
    from aule.engine.decode import decode_on_host

    problem, operands = decode_call(q, k, v, options)
    result = np.empty(operands.out_shape, q.dtype) if options.out is None else options.out
    target = operands.lifted(checked_out(result, operands.out_shape, problem.dtype, options.op))
    _, lse = decode_on_host(options.op, problem, operands, host_device(problem.dtype, options.backend), target)
    return (result, _required(lse).reshape(operands.lse_shape)) if options.return_lse else result


@reports_shortage
def merge_states(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Combine two attention results over disjoint keys."""
    for name, array in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        view(array, name, "merge_states", "o_a")
    if not (o_a.shape == o_b.shape and lse_a.shape == lse_b.shape == o_a.shape[:-1]):
        raise InvalidShapeError(states_message(o_a, lse_a, o_b, lse_b))
    work = np.float64 if o_a.dtype == np.float64 else np.float32
    from aule.ops.combine.numpy_merge import merge

    out, lse = merge(o_a.astype(work), lse_a, o_b.astype(work), lse_b)
    return out.astype(o_a.dtype), lse.astype(lse_a.dtype)


def states_message(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> str:
    """The message for states whose shapes do not fit."""
    found = ", ".join(str(list(x.shape)) for x in (o_a, lse_a, o_b, lse_b))
    return (
        "[merge_states] expected o_a and o_b of one shape, and lse_a and lse_b of that shape without its last axis, "
        f"got {found}; swap the axes of a packed batch's lse"
    )


def _offsets(array: Any, name: str, op: str) -> Array:
    """Convert integers, and lists of them, to int32."""
    try:
        given = np.asarray(array)
    except (TypeError, ValueError) as error:  # a list of lists of different lengths, a tensor on a device
        raise InvalidDtypeError(f"[{op}] expected {name} as int32 in host memory, got {error}; convert it") from None
    if given.dtype.kind not in "iu":
        return given
    if given.size and not -(2**31) <= given.min() <= given.max() < 2**31:
        raise InvalidArgumentError(
            f"[{op}] expected {name} of int32's range, got numbers from {given.min()} to {given.max()}; correct them"
        )
    return given.astype(np.int32)


def checked_out(out: object, shape: tuple[int, ...], dtype: str, op: str = "flash_attention") -> Array:
    """Check an ``out`` argument and view its stored elements."""
    if not isinstance(out, np.ndarray) or out.shape != shape:
        got = out.shape if isinstance(out, np.ndarray) else type(out).__name__
        raise InvalidShapeError(f"[{op}] expected out of shape {shape}, got {got}; allocate it like q")
    if _NAMES.get(out.dtype.name) != dtype:
        raise InvalidDtypeError(f"[{op}] expected out of q's dtype, got {out.dtype}; allocate it like q")
    if not out.dtype.isnative or any(step % out.itemsize for step in out.strides):
        raise InvalidDtypeError(
            f"[{op}] expected out in native byte order with strides of whole elements, got {out.dtype} with "
            f"strides of {out.strides} bytes; leave out= out, and copy the result there"
        )
    spread = out.size and any(step == 0 and n > 1 for n, step in zip(out.shape, out.strides, strict=True))
    if spread or not out.flags.writeable:
        raise InvalidShapeError(
            f"[{op}] expected a writable out with memory for every element, got a read-only or broadcast array; "
            "copy it first"
        )
    return out.view(STORED[dtype]) if dtype == "bf16" else out


def _required(lse: Array | None) -> Array:
    assert lse is not None
    return lse


# -- kernels of the user's own -----------------------------------------------------------------------------------------


def launch(kernel: KernelIR, grid: Grid, args: Sequence[Any], backend: str | None) -> None:
    """Launch a kernel on NumPy arrays and numbers."""
    launch_on_host(kernel, grid, args, registry.choose(backend))
