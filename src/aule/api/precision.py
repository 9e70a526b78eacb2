"""attention: `flash_attention` between conversions of the arrays to chosen dtypes."""

from __future__ import annotations

from typing import NoReturn

from aule.api.attention import flash_attention
from aule.api.context import Aule
from aule.api.names import refuses_unknown, unknown_option
from aule.api.types import A
from aule.dtypes import dtype_name, either
from aule.errors import InvalidArgumentError
from aule.frontends import front_end

_PRECISIONS = ("float32", "float16", "bfloat16")


@refuses_unknown
def attention(
    q: A,
    k: A,
    v: A,
    *,
    context: Aule | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    input_precision: object = None,
    intermediate_precision: object = "float32",
    output_precision: object = None,
    **unknown: NoReturn,
) -> A:
    """Attention with chosen precisions.

    Parameters
    ----------
    q, k, v : array
        As for `flash_attention`.
    context : Aule, optional
        Compute on this context's device.
    causal : bool
        Row ``i`` attends to keys up to its own position. False by default, other than in `flash_attention`.
    softmax_scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    input_precision, output_precision : {"float32", "float16", "bfloat16"}, optional
        Convert the inputs before, or the result after. Default: leave them. Other spellings (``"fp16"``,
        ``torch.float16`` ...) are understood.
    intermediate_precision : {"float32"}
        Scores and sums are always accumulated in float32.
    """
    if unknown:
        raise unknown_option(attention, unknown)
    converted = _precision("input_precision", input_precision)
    returned = _precision("output_precision", output_precision)
    if dtype_name(intermediate_precision) != "float32":
        raise InvalidArgumentError(
            f"[attention] expected intermediate_precision 'float32', got {intermediate_precision!r}; sums in half "
            "precision are not offered because they lose digits without being faster"
        )
    if context is not None and not isinstance(context, Aule):
        raise InvalidArgumentError(
            f"[attention] expected an aule.Aule as context, got {type(context).__name__}; pass None for the best device"
        )
    end = front_end(q, "attention")
    if converted is not None:
        q, k, v = (end.to_precision(x, converted) for x in (q, k, v))
    backend = None if context is None else context.device_name
    result = flash_attention(q, k, v, causal=causal, scale=softmax_scale, backend=backend)
    if returned is not None:
        result = end.to_precision(result, returned)
    return result


def _precision(option: str, value: object) -> str | None:
    if value is None:
        return None
    name = dtype_name(value)
    if name not in _PRECISIONS:
        raise InvalidArgumentError(
            f"[attention] expected {option} {either(_PRECISIONS)}, got {value!r}; pass None to leave the dtype as it is"
        )
    return name
