"""Tracing: a user's function is called with symbols, which record what is done to them.

The same `Symbol` serves functions written with Python's operators, with torch and with NumPy: it takes part in the
protocols of both (``__torch_function__``, ``__array_ufunc__``, ``__array_function__``) and looks operations up by name.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, TypeVar

import numpy as np

from aule.errors import InvalidArgumentError
from aule.ops.scores.functions.program import BoundFunction, Graph, is_float

OP = "flex_attention"
_DTYPES = {
    "bool": "bool", "bool_": "bool", "int8": "i32", "uint8": "i32", "int16": "i32", "int32": "i32", "int": "i32",
    "int64": "i64", "long": "i64", "float16": "f32", "half": "f32", "bfloat16": "f32", "float32": "f32", "float": "f32",
    "float64": "f64", "double": "f64",
}  # fmt: skip
"""Types of values by the names that torch and NumPy have for element types."""


class Tracer:
    """Records one function.

    Attributes
    ----------
    graph : Graph
    arrays : list
        Captured arrays in the order of `Graph.arrays`.
    numbers : list of float or int
        Captured numbers.
    dtype_of : callable
        The IR name of a captured array's element type.
    device : object
        What a function sees as the device of its arguments.
    """

    def __init__(self, work: str, dtype_of: Callable[[Any], str], device: Any = None) -> None:
        self.graph, self.dtype_of, self.device = Graph(work), dtype_of, device
        self.arrays: list[Any] = []
        self.numbers: list[float | int] = []

    def array(self, array: Any) -> int:
        """The number of a captured array."""
        for i, known in enumerate(self.arrays):
            if known is array:
                return i
        self.arrays.append(array)
        return self.graph.array(self.dtype_of(array), len(array.shape))

    def node(self, x: Any, *others: Any, divisor: bool = False) -> int:
        """The node of an operand: a symbol, a Python number or a captured array of no axes.

        A Python number takes the type of the ``others``, except that a float beside integers stays a float.
        """
        if isinstance(x, Symbol):
            if x.open_axes:
                fail(f"an array with {x.open_axes} axes that are not indexed", "index every axis of a captured array")
            return x.node
        if isinstance(x, (bool, np.bool_)):
            return self.graph.literal(bool(x))
        if isinstance(x, (int, float, np.number)):
            return self._number(x.item() if isinstance(x, np.number) else x, others, divisor)
        if hasattr(x, "shape") and not len(x.shape):
            return self.graph.load(self.array(x), ())
        what = f"an array of shape {list(x.shape)}" if hasattr(x, "shape") else f"{type(x).__name__} {x!r}"
        fail(what, "index captured arrays down to one number: a function is called for one score at a time")

    def _number(self, x: float | int, others: Sequence[Any], divisor: bool) -> int:
        graph = self.graph
        kinds = [graph.dtype(self.node(y)) for y in others if isinstance(y, Symbol) or hasattr(y, "shape")]
        beside_floats = any(is_float(kind) for kind in kinds)
        dtype = graph.work if beside_floats or isinstance(x, float) else "i64" if "i64" in kinds else "i32"
        if dtype == "i32" and not -(2**31) <= x < 2**31:
            dtype = "i64"
        power = divisor and isinstance(x, int) and x > 0 and x.bit_count() == 1
        if power or not math.isfinite(x) or x in (0, 1):  # worth a kernel of their own
            return graph.literal(x, dtype)
        self.numbers.append(x)
        return graph.number(dtype)

    def symbol(self, node: int) -> Symbol:
        """A symbol for a node."""
        return Symbol(self, node)


class Symbol:
    """A value of the traced function, or a captured array of which some axes are indexed."""

    __slots__ = ("array", "indices", "node", "open_axes", "tracer")

    def __init__(
        self, tracer: Tracer, node: int = -1, array: Any = None, indices: tuple[int, ...] = (), open_axes: int = 0
    ) -> None:
        self.tracer, self.node, self.array, self.indices, self.open_axes = tracer, node, array, indices, open_axes

    def __getitem__(self, index: Any) -> Symbol:
        if not self.open_axes:
            fail("an index into a single number", "only captured arrays can be indexed")
        return load(self.tracer, self.array, index, self.indices)

    def __bool__(self) -> bool:
        fail("a branch on a value that only the kernel knows", "use torch.where, or & and | instead of `and` and `or`")

    def __iter__(self) -> NoReturn:
        fail("a loop over a single number", "a function is called for one score at a time")

    def __index__(self) -> int:
        fail("an index into a list or array that was not captured as a tensor", "index a tensor or a NumPy array")

    __int__ = __float__ = __len__ = __index__
    item = tolist = __index__
    __hash__ = None  # type: ignore[assignment]
    shape: tuple[int, ...] = ()
    ndim = 0

    @property
    def device(self) -> Any:
        """The device of the arrays of the call."""
        return self.tracer.device

    def dim(self) -> int:
        """A symbol is a number."""
        return 0

    def __getattr__(self, name: str) -> Any:
        found = _METHODS.get(name)
        if found is None:
            if name.startswith("__"):
                raise AttributeError(name)
            fail(f"the method or attribute {name}", f"functions may use {known_names()}")
        return lambda *args, **kwargs: found(self.tracer, self, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            fail(f"np.{ufunc.__name__}.{method}", "call the function itself, without options")
        return call(ufunc.__name__, inputs, {})

    def __array_function__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return call(func.__name__, args, kwargs)


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record an operation by its name in torch, NumPy or Python."""
    found = _METHODS.get(name) or _METHODS.get(name.strip("_")) or _METHODS.get(name.strip("_").removeprefix("r"))
    symbol = symbol_in([*args, *kwargs.values()])
    if found is None or symbol is None:
        fail(f"the operation {name}", f"functions may use {known_names()}")
    if name.startswith("__r") and name.strip("_") not in _METHODS:
        args = args[::-1]
    return found(symbol.tracer, *args, **kwargs)


def symbol_in(values: Sequence[Any]) -> Symbol | None:
    """The first symbol among some values and the tuples and lists of them."""
    for x in values:
        found = symbol_in(x) if isinstance(x, (tuple, list)) else x if isinstance(x, Symbol) else None
        if found is not None:
            return found
    return None


def load(tracer: Tracer, array: Any, index: Any, before: tuple[int, ...] = ()) -> Symbol:
    """A captured array at an index of symbols and integers, after those that were given before."""
    given = index if isinstance(index, tuple) else (index,)
    rank = len(array.shape)
    for one in given:
        if not isinstance(one, (Symbol, int, np.integer)) and not (hasattr(one, "shape") and not len(one.shape)):
            fail(f"{one!r} as an index", "index captured arrays with integers only")
    at = (*before, *(tracer.node(i) for i in given))
    if len(at) > rank:
        fail(f"{len(at)} indices into an array of {rank} axes", "give one for each axis")
    if any(is_float(tracer.graph.dtype(i)) for i in at):
        fail("a float as an index", "convert it to an integer")
    for axis, one in enumerate(given, len(before)):
        size = array.shape[axis]
        if isinstance(one, (int, np.integer)) and not -size <= one < size:
            fail(f"index {one} into an axis of length {size}", "stay inside of the captured array")
    if not array.size if isinstance(array.size, int) else 0 in tuple(array.shape):
        fail(f"an empty captured array of shape {list(array.shape)}", "pass one with elements")
    if len(at) < rank:
        return Symbol(tracer, -1, array, at, rank - len(at))
    return tracer.symbol(tracer.graph.load(tracer.array(array), at))


def trace(
    function: Callable[..., Any],
    inputs: Sequence[str],
    work: str,
    dtype_of: Callable[[Any], str],
    name: str,
    device: Any = None,
) -> tuple[BoundFunction, list[Any]]:
    """Call a function with symbols of its ``inputs``. Returns the program, and the arrays that it captured.

    A function of scores gives a float, one without a score (a mask) a bool.
    """
    tracer = Tracer(work, dtype_of, device)
    symbols = [tracer.symbol(tracer.graph.input(x)) for x in inputs]
    _check_arguments(function, inputs, name)
    found = function(*symbols)
    result = tracer.node(found)
    graph = tracer.graph
    result = graph.to_float(result) if "score" in inputs else graph.cast(result, "bool")
    if "score" in inputs:
        result = graph.cast(result, work)
    return BoundFunction(graph.finish([result]), tuple(tracer.numbers)), tracer.arrays


def _check_arguments(function: Any, inputs: Sequence[str], name: str) -> None:
    expected = f"a function of {len(inputs)} arguments ({', '.join(inputs)})"
    if not callable(function):
        got = type(function).__name__
        raise InvalidArgumentError(f"[{OP}] expected {name} as {expected}, got {got}; pass a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise InvalidArgumentError(
            f"[{OP}] expected {name} as {expected}, got {signature} ({error}); give it these arguments"
        ) from None


def fail(what: str, remedy: str) -> NoReturn:
    """Refuse what a function does, with the line of the user's code that does it."""
    raise InvalidArgumentError(f"[{OP}] expected a function that can be traced, got {what}{_line()}; {remedy}")


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("aule", "torch", "numpy"):
            return f" ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def known_names() -> str:
    """Operations that functions may use, for messages."""
    return "arithmetic, comparisons, & | ^ ~ << >>, indexing of captured arrays and " + ", ".join(
        name for name in sorted(_METHODS) if not name.startswith("_") and name not in _OPERATORS
    )


# -- operations by name ------------------------------------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])
_METHODS: dict[str, Callable[..., Any]] = {}
_OPERATORS: set[str] = set()


def _register(*names: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        for name in names:
            _METHODS[name] = function
        return function

    return register


def _binary(op: str, compare: bool = False) -> Callable[..., Symbol]:
    def apply(t: Tracer, x: Any, y: Any, **kwargs: Any) -> Symbol:
        divisor = op in ("floordiv", "mod", "shl", "shr")
        a, b = t.node(x, y), t.node(y, x, divisor=divisor)
        return t.symbol(t.graph.compare(op, a, b) if compare else t.graph.binary(op, a, b))

    return apply


def _unary(op: str) -> Callable[..., Symbol]:
    return lambda t, x, **kwargs: t.symbol(t.graph.unary(op, t.node(x)))


_BINARY = {
    "add": ("add",), "sub": ("sub", "subtract"), "mul": ("mul", "multiply"), "floordiv": ("floordiv", "floor_divide"),
    "mod": ("mod", "remainder"), "min": ("minimum",), "max": ("maximum",), "and": ("and", "bitwise_and"),
    "or": ("or", "bitwise_or"), "xor": ("xor", "bitwise_xor"), "shl": ("lshift", "bitwise_left_shift", "left_shift"),
    "shr": ("rshift", "bitwise_right_shift", "right_shift"),
}  # fmt: skip
_COMPARED = {
    "lt": ("lt", "less"), "le": ("le", "less_equal"), "gt": ("gt", "greater"), "ge": ("ge", "greater_equal"),
    "eq": ("eq", "equal"), "ne": ("ne", "not_equal"),
}  # fmt: skip
_UNARY = {
    "neg": ("neg", "negative"), "abs": ("abs", "absolute", "fabs"), "exp": ("exp",), "exp2": ("exp2",),
    "log": ("log",), "log2": ("log2",), "sqrt": ("sqrt",), "rsqrt": ("rsqrt",), "tanh": ("tanh",),
    "sigmoid": ("sigmoid",), "sin": ("sin",), "cos": ("cos",), "floor": ("floor",),
}  # fmt: skip
for _op, _names in _BINARY.items():
    _register(*_names)(_binary(_op))
for _op, _names in _COMPARED.items():
    _register(*_names)(_binary(_op, compare=True))
for _op, _names in _UNARY.items():
    _register(*_names)(_unary(_op))
_OPERATORS |= {"add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "neg", *_COMPARED}


@_register("truediv", "div", "divide", "true_divide")
def _divide(t: Tracer, x: Any, y: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return _binary("floordiv")(t, x, y)
    quotient = t.graph.binary("div", t.node(x, y), t.node(y, x))
    if rounding_mode == "trunc":
        return _truncate(t, t.symbol(quotient))
    return t.symbol(quotient)


@_register("invert", "bitwise_not", "logical_not", "not")
def _not(t: Tracer, x: Any) -> Symbol:
    return t.symbol(t.graph.unary("not", t.node(x)))


@_register("logical_and")
def _logical_and(t: Tracer, x: Any, y: Any) -> Symbol:
    return t.symbol(t.graph.binary("and", *(t.graph.cast(t.node(z), "bool") for z in (x, y))))


@_register("logical_or")
def _logical_or(t: Tracer, x: Any, y: Any) -> Symbol:
    return t.symbol(t.graph.binary("or", *(t.graph.cast(t.node(z), "bool") for z in (x, y))))


@_register("logical_xor")
def _logical_xor(t: Tracer, x: Any, y: Any) -> Symbol:
    return t.symbol(t.graph.binary("xor", *(t.graph.cast(t.node(z), "bool") for z in (x, y))))


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
    return _clamp(t, x, 0)


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
    if isinstance(y, (int, float)) and float(y).is_integer() and 0 <= y <= 16:
        result: Any = None
        base, count = x, int(y)
        while count:
            if count & 1:
                result = base if result is None else _binary("mul")(t, result, base)
            base, count = _square(t, base), count >> 1
        return t.symbol(t.graph.literal(1, t.graph.dtype(t.node(x)))) if result is None else result
    if isinstance(y, (int, float)) and y in (0.5, -0.5, -1):
        named = {0.5: "sqrt", -0.5: "rsqrt"}
        return _unary(named[y])(t, x) if y in named else _reciprocal(t, x)
    if isinstance(x, (int, float)) and x > 0:
        exponent = t.graph.to_float(t.node(y))
        return t.symbol(t.graph.unary("exp2", t.graph.binary("mul", exponent, t.node(math.log2(x), y))))
    fail("a power of two values", "use an integer exponent up to 16, 0.5, -0.5, -1, or a positive number as the base")


@_register("to", "type", "astype", "view")
def _to(t: Tracer, x: Symbol, *args: Any, dtype: Any = None, **kwargs: Any) -> Symbol:
    for given in (dtype, *args):
        name = getattr(given, "name", None) or getattr(given, "__name__", None) or str(given)
        found = _DTYPES.get(name.removeprefix("torch.") if isinstance(name, str) else "")
        if found is not None:
            return t.symbol(t.graph.cast(t.node(x), "f32" if found == "f64" and t.graph.work == "f32" else found))
    return x


for _name in ("float", "double", "half", "bfloat16", "int", "long", "bool"):
    _register(_name)(lambda t, x, _name=_name: _to(t, x, _name))


@_register("clone", "contiguous", "detach", "cpu", "cuda", "squeeze", "reshape", "positive", "type_as", "nan_to_num")
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


@_register("full_like")
def _full(t: Tracer, x: Symbol, value: Any, dtype: Any = None, **kwargs: Any) -> Symbol:
    node = t.node(value, x)
    made = t.symbol(node)
    return _to(t, made, dtype) if dtype is not None else t.symbol(t.graph.cast(node, t.graph.dtype(t.node(x))))


def _operator(name: str, reflected: bool) -> Callable[[Symbol, Any], Any]:
    def apply(x: Symbol, y: Any) -> Any:
        operands = (y, x) if reflected else (x, y)
        return _METHODS[name](x.tracer, *operands)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Symbol, f"__{_name}__", _operator(_name, False))
    setattr(Symbol, f"__r{_name}__", _operator(_name, True))
for _name in _COMPARED:
    setattr(Symbol, f"__{_name}__", _operator(_name, False))
for _name, _method in (("neg", "neg"), ("abs", "abs"), ("invert", "invert"), ("pos", "positive")):
    setattr(Symbol, f"__{_name}__", lambda x, _method=_method: _METHODS[_method](x.tracer, x))
