"""float32 inputs on matrix units: only on request, rounded on the way into shared memory."""

from __future__ import annotations

from typing import Any

from aule.dtypes import dtype_name, either, usual_name
from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.ops.attention.problem import AttentionProblem
from aule.target import Target
from aule.tile.fragment.engine import multiplies

PRECISIONS = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}
"""Values of ``precision``, and the type that each multiplies."""


def checked_precision(op: str, precision: Any) -> str | None:
    """Return the option in its usual spelling, if it is valid."""
    if precision is None:
        return None
    name = "tf32" if str(precision).strip().lower() == "tf32" else dtype_name(precision)
    if name in PRECISIONS:
        return name
    names = either(tuple(map(repr, PRECISIONS)))
    raise InvalidArgumentError(f"[{op}] expected precision {names}, got {precision!r}; pass None to compute in float32")


def factor_type(op: str, precision: Any, dtype: str) -> str | None:
    """The type in which float32 inputs are multiplied; None for their own."""
    name = checked_precision(op, precision)
    if name is None:
        return None
    if dtype != "f32":
        raise InvalidDtypeError(
            f"[{op}] expected q, k and v of float32 with precision={name!r}, got {usual_name(dtype)}; leave precision "
            "out, or convert them to float32"
        )
    return PRECISIONS[name]


def refused(problem: AttentionProblem, target: Target) -> InvalidArgumentError:
    """The error for a device that cannot compute in the requested precision; there is no fallback."""
    asked = next(name for name, type_ in PRECISIONS.items() if type_ == problem.precision)
    if multiplies(target, PRECISIONS[asked]):
        return InvalidArgumentError(
            f"[flash_attention] expected a smaller head_dim for precision={asked!r} on {target.name} "
            f"({target.backend}), got {max(problem.head_dim, problem.value_dim)}; precision=None computes in float32"
        )
    offered = [repr(name) for name, type_ in PRECISIONS.items() if multiplies(target, type_)]
    others = f"only {', '.join(offered)}" if offered else "none"
    return InvalidArgumentError(
        f"[flash_attention] expected a device with matrix units for precision={asked!r}, got {target.name} "
        f"({target.backend}), which offers {others}; precision=None computes in float32, backend= chooses another "
        "device"
    )
