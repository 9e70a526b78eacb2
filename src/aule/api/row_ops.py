"""The row operations of the public API: norms, gated units, rotary embedding, softmax, cross entropy."""

from __future__ import annotations

from typing import Any, NoReturn

from aule.api.names import refuses_unknown, unknown_option
from aule.api.types import A, Array
from aule.frontends import by_type, front_end


def _call(name: str, arrays: tuple[object, ...], options: tuple[object, ...], backend: str | None) -> Any:
    found = by_type.get(type(arrays[0]))
    return (front_end(arrays[0], name) if found is None else found).row_op(name, arrays, options, backend)


@refuses_unknown
def rms_norm(
    x: A, weight: Array | None = None, *, eps: float = 1e-6, backend: str | None = None, **unknown: NoReturn
) -> A:
    """Divide rows by the root of their mean square: ``x / sqrt(mean(x**2) + eps) * weight``.

    Parameters
    ----------
    x : array
        ``[..., length]``, of any strides: NumPy, PyTorch, or anything with ``__dlpack__``; float32, float16, bfloat16,
        and float64 on the CPU. The mean is taken along the last axis, in float32 at least.
    weight : array, optional
        ``[length]``, of any of these types.
    eps : float
        Added to the mean square, inside of the root, as in ONNX's RMSNormalization.
    backend : str, optional
        ``"cuda"``, ``"vulkan:1"``, ``"numpy"`` ...; default: where the array is.

    Returns
    -------
    array
        The kind, shape, dtype and device of ``x``. Torch tensors have gradients of ``x`` and ``weight``.
    """
    if unknown:
        raise unknown_option(rms_norm, unknown)
    result: A = _call("rms_norm", (x, weight), (eps,), backend)
    return result


@refuses_unknown
def layer_norm(
    x: A,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
    **unknown: NoReturn,
) -> A:
    """Normalise rows to mean 0 and variance 1: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    Parameters
    ----------
    x : array
        ``[..., length]``, as for `rms_norm`. A large common offset costs no digits.
    weight, bias : array, optional
        ``[length]``.
    eps : float
        Added to the variance, inside of the root, as in ONNX's LayerNormalization.
    backend : str, optional
        As for `rms_norm`.

    Returns
    -------
    array
        As `rms_norm` returns it.
    """
    if unknown:
        raise unknown_option(layer_norm, unknown)
    result: A = _call("layer_norm", (x, weight, bias), (eps,), backend)
    return result


@refuses_unknown
def residual_rms_norm(
    x: A,
    residual: A,
    weight: Array | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
    **unknown: NoReturn,
) -> tuple[A, A]:
    """`rms_norm` of ``x + residual``, and that sum, in one pass over memory.

    Parameters
    ----------
    x, residual : array
        ``[..., length]``, of one shape and dtype.
    weight, eps, backend
        As for `rms_norm`.

    Returns
    -------
    (array, array)
        The normalised rows, and the new residual ``x + residual``.
    """
    if unknown:
        raise unknown_option(residual_rms_norm, unknown)
    result: tuple[A, A] = _call("residual_rms_norm", (x, residual, weight), (eps,), backend)
    return result


@refuses_unknown
def residual_layer_norm(
    x: A,
    residual: A,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
    **unknown: NoReturn,
) -> tuple[A, A]:
    """`layer_norm` of ``x + residual``, and that sum, in one pass over memory.

    Parameters
    ----------
    x, residual : array
        ``[..., length]``, of one shape and dtype.
    weight, bias, eps, backend
        As for `layer_norm`.

    Returns
    -------
    (array, array)
        The normalised rows, and the new residual ``x + residual``.
    """
    if unknown:
        raise unknown_option(residual_layer_norm, unknown)
    result: tuple[A, A] = _call("residual_layer_norm", (x, residual, weight, bias), (eps,), backend)
    return result


@refuses_unknown
def cross_entropy(
    logits: A,
    target: Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
    **unknown: NoReturn,
) -> A:
    """``log(sum(exp(logits))) - logits[target]`` of each row: PyTorch's ``F.cross_entropy`` for large vocabularies.

    Logits are read once and probabilities are never stored: besides the loss, the forward pass saves two numbers per
    row, from which the backward pass computes the gradient.

    Parameters
    ----------
    logits : array
        ``[..., vocabulary]``, as for `rms_norm`: the vocabulary is always the last axis.
    target : array
        ``[...]``, the correct column of each row; int32 or int64.
    ignore_index : int
        Rows with this target are left out, and their gradient is zero.
    label_smoothing : float
        The share of the weight, 0 to 1, that is spread over all columns.
    reduction : {"mean", "sum", "none"}
        Over the rows that are not ignored; ``"none"`` gives the loss of each row, 0 for ignored ones.
    backend : str, optional
        As for `rms_norm`.

    Returns
    -------
    array
        The loss, a number or ``[...]``, of the kind, dtype and device of ``logits``. Sums are float32 or wider; under
        PyTorch's autocast the loss is float32, like that of ``F.cross_entropy``. Torch tensors have gradients of
        ``logits``.

    Raises
    ------
    InvalidArgumentError
        A target in host memory is neither a column nor ``ignore_index``. On a device such a row's loss and gradient
        are NaN.
    """
    if unknown:
        raise unknown_option(cross_entropy, unknown)
    found: tuple[A, A, A] = _call(
        "cross_entropy", (logits, target), (ignore_index, label_smoothing, reduction, False), backend
    )
    return found[0]


@refuses_unknown
def layer_norm_linear(
    x: A,
    weight_norm: Array | None,
    bias_norm: Array | None,
    weight: Array,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
    **unknown: NoReturn,
) -> A:
    """``layer_norm(x, weight_norm, bias_norm) @ weight.T + bias``; the normalised rows never reach memory.

    Parameters
    ----------
    x : array
        ``[..., length]``, as for `rms_norm`.
    weight_norm, bias_norm : array or None
        ``[length]``, of the normalisation.
    weight : array
        ``[features, length]``, of x's dtype: as in ``torch.nn.Linear``.
    bias : array, optional
        ``[features]``.
    eps, backend
        As for `layer_norm`.

    Returns
    -------
    array
        ``[..., features]``, of the kind, dtype and device of ``x``. Torch tensors have gradients of all five.

    Notes
    -----
    Products of float16 and bfloat16 use matrix units if the device has them and their layout is known. Their operands
    are rounded to the dtype of ``x``, as when the two ops are computed one after the other. Under PyTorch's autocast,
    if ``x`` has its dtype, a float32 ``weight`` is converted to it.
    """
    if unknown:
        raise unknown_option(layer_norm_linear, unknown)
    result: A = _call("layer_norm_linear", (x, weight_norm, bias_norm, weight, bias), (eps,), backend)
    return result


@refuses_unknown
def swiglu(gate: A, up: A | None = None, *, backend: str | None = None, **unknown: NoReturn) -> A:
    """``silu(gate) * up``, where ``silu(x) = x / (1 + exp(-x))``, which ONNX calls Swish.

    Parameters
    ----------
    gate : array
        ``[..., length]``, as for `rms_norm`; or, without ``up``, ``[..., 2 * length]``, gate and up one after the
        other: ``swiglu(x)`` is ``swiglu(*x.chunk(2, -1))``, and its gradient is one array.
    up : array, optional
        Of gate's shape and dtype. The two may be halves of one array.
    backend : str, optional
        As for `rms_norm`.

    Returns
    -------
    array
        ``[..., length]``, of the kind, dtype and device of ``gate``. Torch tensors have gradients.
    """
    if unknown:
        raise unknown_option(swiglu, unknown)
    result: A = _call("swiglu", (gate, up), (), backend)
    return result


@refuses_unknown
def geglu(
    gate: A,
    up: A | None = None,
    *,
    approximate: str = "none",
    backend: str | None = None,
    **unknown: NoReturn,
) -> A:
    """``gelu(gate) * up``.

    Parameters
    ----------
    gate, up, backend
        As for `swiglu`.
    approximate : {"none", "tanh"}
        GELU by the normal distribution, ``x * (1 + erf(x / sqrt(2))) / 2``, or by a hyperbolic tangent,
        ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``, as PyTorch and ONNX define both.

    Returns
    -------
    array
        As `swiglu` returns it.
    """
    if unknown:
        raise unknown_option(geglu, unknown)
    result: A = _call("geglu", (gate, up), (approximate,), backend)
    return result


@refuses_unknown
def rope(
    x: A,
    cos: Array,
    sin: Array,
    *,
    interleaved: bool = False,
    position_ids: Array | None = None,
    rotary_dim: int | None = None,
    inplace: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> A:
    """Rotary position embedding: pairs of columns are rotated by the angles of their position.

    ``(a, b) -> (a * cos - b * sin, b * cos + a * sin)``.

    Parameters
    ----------
    x : array
        ``[batch, heads, seq, dim]``, or with fewer axes in front, of any strides; kinds and dtypes as for `rms_norm`.
    cos, sin : array
        ``[seq, pairs]`` or ``[batch, seq, pairs]``, or any shape that broadcasts to the first axes of ``x``: one
        number per pair of columns, as in ONNX and flash-attn. Tables of twice that width, as in transformers, repeat
        the number for both columns of a pair. Further columns of ``x`` are not rotated.
    interleaved : bool
        Pairs are neighbouring columns ``2i`` and ``2i + 1``; else ``i`` and ``i + pairs`` (rotate-half).
    position_ids : int32 or int64 array, optional
        ``[seq]`` or ``[batch, seq]``: rows of ``cos`` and ``sin``, which are then ``[positions, pairs]``. Numbers
        outside of the table are refused in host memory; on a device they select its first or last row.
    rotary_dim : int, optional
        Columns to rotate. Default: twice the width of ``cos`` if ``x`` has so many, else its width. Needed for a table
        that repeats its numbers and is narrower than half of ``x``.
    inplace : bool
        Write the result over ``x``.
    backend : str, optional
        As for `rms_norm`.

    Returns
    -------
    array
        The kind, shape, dtype and device of ``x``; ``x`` itself with ``inplace``. Torch tensors have a gradient, and
        the memory layout of ``x``.
    """
    if unknown:
        raise unknown_option(rope, unknown)
    result: A = _call("rope", (x, cos, sin, position_ids), (interleaved, rotary_dim, inplace), backend)
    return result


@refuses_unknown
def rms_norm_rope(
    x: A,
    weight: Array | None,
    cos: Array,
    sin: Array,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    position_ids: Array | None = None,
    rotary_dim: int | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> A:
    """`rope` of `rms_norm` of the heads of ``x``, in one pass over memory.

    Parameters
    ----------
    x, cos, sin, interleaved, position_ids, rotary_dim
        As for `rope`.
    weight : array or None
        ``[dim]``.
    eps, backend
        As for `rms_norm`.

    Returns
    -------
    array
        The kind, shape, dtype and device of ``x``. Torch tensors have gradients of ``x`` and ``weight``.
    """
    if unknown:
        raise unknown_option(rms_norm_rope, unknown)
    result: A = _call("rms_norm_rope", (x, weight, cos, sin, position_ids), (interleaved, rotary_dim, eps), backend)
    return result


@refuses_unknown
def softmax_dropout(
    x: A,
    *,
    dropout_p: float = 0.0,
    seed: int | None = None,
    mask: Array | None = None,
    causal: bool = False,
    scale: float = 1.0,
    backend: str | None = None,
    **unknown: NoReturn,
) -> A:
    """``dropout(softmax(scale * x + mask))`` along the last axis.

    Parameters
    ----------
    x : array
        ``[..., rows, columns]``, kinds and dtypes as for `rms_norm`.
    dropout_p : float
        Probability of dropping each weight, rounded to a multiple of 2**-16 as for `flash_attention`; the others are
        divided by ``1 - dropout_p``.
    seed : int, optional
        Decides which weights are dropped, the same on every backend, and the same that `flash_attention` drops with it.
        Default: a new one each time, for torch tensors from PyTorch's generator of their device.
    mask : array, optional
        Boolean, True where a column counts, or floats that are added; broadcastable to the shape of ``x``, without a
        copy. It has no gradient.
    causal : bool
        Row ``i`` of n counts columns up to ``i + columns - n``.
    scale : float
        Factor of ``x``.
    backend : str, optional
        As for `rms_norm`.

    Returns
    -------
    array
        The kind, shape, dtype and device of ``x``. A row without columns that count is zero. Torch tensors have a
        gradient of ``x``.
    """
    if unknown:
        raise unknown_option(softmax_dropout, unknown)
    result: A = _call("softmax_dropout", (x, mask, seed), (dropout_p, causal, scale), backend)
    return result
