"""Operations of torch, NumPy and Python by name: what a traced function may do with symbols."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from aule.ops.scores.functions.symbols import Symbol, Tracer, fail
from aule.tile.common.math import ROOT_HALF

_Function = TypeVar("_Function", bound=Callable[..., Any])
METHODS: dict[str, Callable[..., Any]] = {}
_DTYPES = {
    "bool": "bool", "bool_": "bool", "int8": "i32", "uint8": "i32", "int16": "i32", "int32": "i32", "int": "i32",
    "int64": "i64", "long": "i64", "float16": "f32", "half": "f32", "bfloat16": "f32", "float32": "f32", "float": "f32",
    "float64": "f64", "double": "f64",
}  # fmt: skip
"""Types of values by the names that torch and NumPy have for element types."""


def _register(*names: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        for name in names:
            METHODS[name] = function
        return function

    return register


def _binary(op: str, compare: bool = False) -> Callable[..., Symbol]:
    def apply(t: Tracer, x: Any, y: Any) -> Symbol:
        divisor = op in ("floordiv", "mod", "shl", "shr")
        a, b = t.node(x, y), t.node(y, x, divisor=divisor)
        return t.symbol(t.graph.compare(op, a, b) if compare else t.graph.binary(op, a, b))

    return apply


def _unary(op: str) -> Callable[..., Symbol]:
    return lambda t, x: t.symbol(t.graph.unary(op, t.node(x)))


_BINARY = {
    "mul": ("mul", "multiply"), "floordiv": ("floordiv", "floor_divide"), "mod": ("mod", "remainder"),
    "min": ("minimum",), "max": ("maximum",), "and": ("and", "bitwise_and"), "or": ("or", "bitwise_or"),
    "xor": ("xor", "bitwise_xor"), "shl": ("lshift", "bitwise_left_shift", "left_shift"),
    "shr": ("rshift", "bitwise_right_shift", "right_shift"),
}  # fmt: skip
_COMPARED = {
    "lt": ("lt", "less"), "le": ("le", "less_equal"), "gt": ("gt", "greater"), "ge": ("ge", "greater_equal"),
    "eq": ("eq", "equal"), "ne": ("ne", "not_equal"),
}  # fmt: skip
_UNARY = {
    "neg": ("neg", "negative"), "abs": ("abs", "absolute", "fabs"), "exp": ("exp",), "exp2": ("exp2",),
    "log": ("log",), "log2": ("log2",), "sqrt": ("sqrt",), "rsqrt": ("rsqrt",), "tanh": ("tanh",),
    "sigmoid": ("sigmoid",), "erf": ("erf",), "sin": ("sin",), "cos": ("cos",), "floor": ("floor",),
    "detach": ("detach",), "not": ("not", "invert", "bitwise_not"),
}  # fmt: skip
for _op, _names in _BINARY.items():
    _register(*_names)(_binary(_op))
for _op, _names in _COMPARED.items():
    _register(*_names)(_binary(_op, compare=True))
for _op, _names in _UNARY.items():
    _register(*_names)(_unary(_op))


@_register("add")
def _add(t: Tracer, x: Any, y: Any, alpha: Any = 1) -> Symbol:
    return _binary("add")(t, x, _scaled(t, y, alpha))


@_register("sub", "subtract")
def _subtract(t: Tracer, x: Any, y: Any, alpha: Any = 1) -> Symbol:
    return _binary("sub")(t, x, _scaled(t, y, alpha))


@_register("rsub")
def _reversed_subtract(t: Tracer, x: Any, y: Any, alpha: Any = 1) -> Symbol:
    return _subtract(t, y, x, alpha)


def _scaled(t: Tracer, x: Any, alpha: Any) -> Any:
    return x if isinstance(alpha, int) and alpha == 1 else _binary("mul")(t, x, alpha)


@_register("truediv", "div", "divide", "true_divide")
def _divide(t: Tracer, x: Any, y: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return _binary("floordiv")(t, x, y)
    if rounding_mode == "trunc":
        # Down for a positive quotient, up for a negative one; integers stay integers.
        down, up = _binary("floordiv")(t, x, y), _unary("neg")(t, _binary("floordiv")(t, _unary("neg")(t, x), y))
        return _where(t, _binary("lt", compare=True)(t, down, 0), up, down)
    return t.symbol(t.graph.binary("div", t.node(x, y), t.node(y, x)))


@_register("logical_not")
def _logical_not(t: Tracer, x: Any) -> Symbol:
    return t.symbol(t.graph.unary("not", t.graph.cast(t.node(x), "bool")))


def _logical(op: str) -> Callable[..., Symbol]:
    return lambda t, x, y: t.symbol(t.graph.binary(op, *(t.graph.cast(t.node(z), "bool") for z in (x, y))))


for _op in ("and", "or", "xor"):
    _register(f"logical_{_op}")(_logical(_op))


@_register("where")
def _where(t: Tracer, condition: Any, yes: Any, no: Any) -> Symbol:
    return t.symbol(t.graph.where(t.node(condition), t.node(yes, no), t.node(no, yes)))


@_register("masked_fill")
def _masked_fill(t: Tracer, x: Any, mask: Any, value: Any) -> Symbol:
    return _where(t, mask, value, x)


@_register("clamp", "clip")
def _clamp(t: Tracer, x: Any, min: Any = None, max: Any = None, **names: Any) -> Symbol:
    low, high = names.get("a_min", min), names.get("a_max", max)
    if low is not None:
        x = _binary("max")(t, x, low)
    return x if high is None else _binary("min")(t, x, high)


@_register("clamp_min")
def _clamp_min(t: Tracer, x: Any, min: Any) -> Symbol:
    return _clamp(t, x, min)


@_register("clamp_max")
def _clamp_max(t: Tracer, x: Any, max: Any) -> Symbol:
    return _clamp(t, x, None, max)


@_register("relu")
def _relu(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    # In this order its derivative at 0 is 0, as in PyTorch.
    return _binary("max")(t, 0, x)


@_register("silu")
def _silu(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    return _binary("mul")(t, x, _unary("sigmoid")(t, x))


@_register("gelu")
def _gelu(t: Tracer, x: Any, approximate: str = "none") -> Symbol:
    half, one, factor = (t.symbol(t.graph.literal(n)) for n in (0.5, 1.0, ROOT_HALF))
    if approximate == "none":
        return half * x * (one + _unary("erf")(t, x * factor))  # type: ignore[no-any-return, operator]
    cube, slope = (t.symbol(t.graph.literal(n)) for n in (0.044715, math.sqrt(2.0 / math.pi)))
    return half * x * (one + _unary("tanh")(t, slope * (x + cube * x * x * x)))  # type: ignore[no-any-return, operator]


@_register("square")
def _square(t: Tracer, x: Any) -> Symbol:
    return _binary("mul")(t, x, x)


@_register("tan")
def _tan(t: Tracer, x: Any) -> Symbol:
    return _divide(t, _unary("sin")(t, x), _unary("cos")(t, x))


@_register("reciprocal")
def _reciprocal(t: Tracer, x: Any) -> Symbol:
    return _divide(t, 1.0, x)


@_register("sign", "sgn")
def _sign(t: Tracer, x: Any) -> Symbol:
    node = t.node(x)
    zero = t.graph.literal(0, t.graph.dtype(node))
    one, minus = (t.graph.literal(n, t.graph.dtype(node)) for n in (1, -1))
    below, above = t.graph.compare("lt", node, zero), t.graph.compare("gt", node, zero)
    return t.symbol(t.graph.where(above, one, t.graph.where(below, minus, zero)))


@_register("ceil")
def _ceil(t: Tracer, x: Any) -> Symbol:
    graph = t.graph
    return t.symbol(graph.unary("neg", graph.unary("floor", graph.unary("neg", t.node(x)))))


@_register("trunc", "fix")
def _truncate(t: Tracer, x: Any) -> Symbol:
    node = t.node(x)
    below = t.graph.compare("lt", node, t.graph.literal(0, t.graph.dtype(node)))
    return t.symbol(t.graph.where(below, _ceil(t, x).node, t.graph.unary("floor", node)))


@_register("pow", "power", "float_power")
def _power(t: Tracer, x: Any, y: Any) -> Symbol:
    graph = t.graph
    if isinstance(y, (int, float)) and float(y).is_integer() and abs(y) <= 16:
        return _whole_power(t, x, int(y)) if y >= 0 else _reciprocal(t, _whole_power(t, x, -int(y)))
    if isinstance(y, (int, float)) and y in (0.5, -0.5):
        return _unary("sqrt" if y > 0 else "rsqrt")(t, x)
    if isinstance(y, float) and not y.is_integer():
        return t.symbol(graph.unary("exp2", graph.binary("mul", graph.unary("log2", t.node(x)), t.node(y))))
    if isinstance(x, (int, float)) and x > 0:
        exponent = graph.to_float(t.node(y))
        return t.symbol(graph.unary("exp2", graph.binary("mul", exponent, t.node(math.log2(x), y))))
    fail("a power of two values", "use a number as the exponent (integers up to 16), or a positive number as the base")


def _whole_power(t: Tracer, x: Any, count: int) -> Symbol:
    if count == 0:
        return t.symbol(t.graph.literal(1, t.graph.dtype(t.node(x))))
    half = x if count == 1 else _whole_power(t, _square(t, x), count // 2)
    return half if count == 1 or count % 2 == 0 else _binary("mul")(t, half, x)


@_register("to", "type", "astype", "type_as")
def _to(t: Tracer, x: Symbol, *args: Any, dtype: Any = None, **kwargs: Any) -> Symbol:
    for given in (dtype, *args):
        found = t.graph.dtype(given.node) if isinstance(given, Symbol) else _DTYPES.get(_dtype_name(given))
        if found is not None:
            return t.symbol(t.graph.cast(t.node(x), "f32" if found == "f64" and t.graph.work == "f32" else found))
    return x


def _dtype_name(given: Any) -> str:
    if not isinstance(given, type):
        given = getattr(given, "dtype", given)  # of an array that is to be followed
    name = getattr(given, "name", None) or getattr(given, "__name__", None) or str(given)
    return name.removeprefix("torch.") if isinstance(name, str) else ""


for _name in ("float", "double", "half", "bfloat16", "int", "long", "bool"):
    _register(_name)(lambda t, x, _name=_name: _to(t, x, _name))


@_register("clone", "contiguous", "cpu", "cuda", "positive")
def _same(t: Tracer, x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    return x


@_register("new_ones", "ones_like")
def _ones(t: Tracer, x: Symbol, *size: Any, dtype: Any = None, **kwargs: Any) -> Symbol:
    return _full(t, x, 1, dtype)


@_register("new_zeros", "zeros_like")
def _zeros(t: Tracer, x: Symbol, *size: Any, dtype: Any = None, **kwargs: Any) -> Symbol:
    return _full(t, x, 0, dtype)


@_register("new_tensor")
def _new_tensor(t: Tracer, x: Symbol, value: Any, *, dtype: Any = None, **kwargs: Any) -> Symbol:
    return _full(t, x, value, dtype)


@_register("new_full")
def _new_full(t: Tracer, x: Symbol, size: Any, fill_value: Any, *, dtype: Any = None, **kwargs: Any) -> Symbol:
    return _full(t, x, fill_value, dtype)


@_register("full_like")
def _full(t: Tracer, x: Symbol, fill_value: Any, dtype: Any = None, **kwargs: Any) -> Symbol:
    node = t.node(fill_value, x)
    made = t.symbol(node)
    return _to(t, made, dtype) if dtype is not None else t.symbol(t.graph.cast(node, t.graph.dtype(t.node(x))))


def operation(name: str) -> str | None:
    """The name by which `symbols.call` finds an operation of torch or Python; None if functions may not use it.

    Of an operation in place (``add_``, ``__iadd__``) only the result counts.
    """
    plain = name.strip("_")
    if plain == "getitem" or plain in METHODS:
        return plain
    if plain.startswith("i") and plain[1:] in METHODS:
        return plain[1:]
    return name if name.startswith("__r") and plain[1:] in METHODS else None
