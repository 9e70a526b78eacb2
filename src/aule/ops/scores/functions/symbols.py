"""Symbols: what a user's function is called with; they record what is done to them.

The same `Symbol` serves functions written with Python's operators, with torch and with NumPy: it takes part in the
protocols of both (``__torch_function__``, ``__array_ufunc__``, ``__array_function__``) and looks operations up by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn

import numpy as np

from aule.errors import InvalidArgumentError
from aule.ops.scores.functions.program import Graph, calling, is_float

OP = "flex_attention"
KNOWN = (
    "arithmetic, comparisons, & | ^ ~ << >>, indexing of captured arrays, where, and functions of single numbers such "
    "as abs, clamp, cos, exp, exp2, floor, log, maximum, minimum, pow, relu, remainder, rsqrt, sigmoid, sign, sin, "
    "sqrt, tanh"
)
"""What functions may use, for messages."""
MOST_ELEMENTS = 512
"""Elements of an array that a function computes with; each is an operation of its own in the kernel."""


@dataclass(frozen=True)
class Framework:
    """What a front end knows about its arrays.

    Attributes
    ----------
    dtype_of : callable
        The IR name of a captured array's element type.
    attributes : callable
        Attributes such as ``dtype`` and ``device`` that values of an IR type have in the framework.
    """

    dtype_of: Callable[[Any], str]
    attributes: Callable[[str], Mapping[str, Any]]


class Tracer:
    """Records one function.

    Attributes
    ----------
    graph : Graph
    arrays : list
        Captured arrays in the order of `Graph.arrays`.
    numbers : list of float or int
        Captured numbers.
    methods : mapping
        Operations by name.
    of_arrays : collection
        Those of them that take arrays as they are, such as sums.
    """

    def __init__(
        self,
        work: str,
        framework: Framework,
        methods: Mapping[str, Callable[..., Any]],
        of_arrays: Collection[Callable[..., Any]],
    ) -> None:
        self.graph, self.framework, self.methods, self.of_arrays = Graph(work), framework, methods, of_arrays
        self.arrays: list[Any] = []
        self.numbers: list[float | int] = []
        self.shared: dict[tuple[float | int, str], int] | None = None
        """Numbers of an operation that is done for each element of an array: one operand serves all."""

    def array(self, array: Any) -> int:
        """The number of a captured array."""
        for i, known in enumerate(self.arrays):
            if known is array:
                return i
        self.arrays.append(array)
        return self.graph.array(self.framework.dtype_of(array), len(array.shape))

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
        fail(described(x), "index captured arrays down to one number: a function is called for one score at a time")

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
        if self.shared is not None and (x, dtype) in self.shared:
            return self.shared[x, dtype]
        self.numbers.append(x)
        number = graph.number(dtype)
        if self.shared is not None:
            self.shared[x, dtype] = number
        return number

    def symbol(self, node: int) -> Symbol:
        """A symbol for a node."""
        return Symbol(self, node)


class Symbol:
    """A value of the traced function.

    One with ``open_axes`` is an array: the rest of a captured array of which some axes are indexed, or what was
    computed of such arrays, element by element (``elements``, the nodes).
    """

    __slots__ = ("array", "elements", "indices", "node", "open_axes", "tracer")

    def __init__(
        self,
        tracer: Tracer,
        node: int = -1,
        array: Any = None,
        indices: tuple[int, ...] = (),
        open_axes: int = 0,
        elements: Any = None,
    ) -> None:
        self.tracer, self.node, self.array, self.indices, self.open_axes = tracer, node, array, indices, open_axes
        self.elements = elements

    def __getitem__(self, index: Any) -> Symbol:
        if not self.open_axes:
            fail("an index into a single number", "only captured arrays can be indexed")
        if self.elements is not None:
            if symbol_in(index if isinstance(index, tuple) else (index,)) is not None:
                fail("an index that only the kernel knows into computed values", "index captured arrays so")
            return symbol_of(self.tracer, self.elements[index])
        return load(self.tracer, self.array, index, self.indices)

    def __bool__(self) -> bool:
        fail(
            "a branch on a value that only the kernel knows",
            "use torch.where, or & and | instead of `and` and `or`; a <= b < c is (a <= b) & (b < c)",
        )

    def __iter__(self) -> Iterator[Symbol]:
        if not self.open_axes:
            fail("a loop over a single number", "a function is called for one score at a time")
        return (self[i] for i in range(len(self)))

    def __index__(self) -> int:
        fail(
            "a value that only the kernel knows where Python needs an int, such as the index of a list",
            "index a torch tensor, or a NumPy array that is a variable of the function or of its module",
        )

    def __float__(self) -> float:
        fail("a value that only the kernel knows as a Python number", "use functions of torch or NumPy, not of math")

    __int__ = item = tolist = __round__ = __float__

    def __len__(self) -> int:
        if not self.open_axes:
            fail("the length of a single number", "a function is called for one score at a time")
        return int(self.shape[0])

    __hash__ = None  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes that are not indexed; empty for a number."""
        if self.elements is not None:
            return tuple(self.elements.shape)
        return tuple(self.array.shape[len(self.indices) :]) if self.open_axes else ()

    @property
    def ndim(self) -> int:
        """Number of axes that are not indexed."""
        return self.open_axes

    def dim(self) -> int:
        """Number of axes that are not indexed."""
        return self.open_axes

    def __getattr__(self, name: str) -> Any:
        found = self.tracer.methods.get(name)
        if found is not None:
            return lambda *args, **kwargs: applied(found, self.tracer, (self, *args), kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        if not self.open_axes:
            given = self.tracer.framework.attributes(self.tracer.graph.dtype(self.node))
            if name in given:
                return given[name]
        fail(f"the method or attribute {name}", f"functions may use {KNOWN}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            fail(f"np.{ufunc.__name__}.{method} with options", "call the function itself, without options")
        return call(ufunc.__name__, inputs, {})

    def __array_function__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return call(func.__name__, args, kwargs)


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record an operation by its name in torch, NumPy or Python."""
    symbol = symbol_in([*args, *kwargs.values()])
    assert symbol is not None
    methods = symbol.tracer.methods
    found = methods.get(name)
    if found is None and name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        found = methods.get(name)
        if found is None and name.startswith("r"):
            found, args = methods.get(name[1:]), args[::-1]
    if found is None:
        fail(f"the operation {name}", f"functions may use {KNOWN}")
    return applied(found, symbol.tracer, args, kwargs)


def applied(method: Callable[..., Any], tracer: Tracer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a method; of each element if there are arrays among its arguments and it is one of numbers."""
    if method in tracer.of_arrays or not any(_axes(x) for x in args):
        return method(tracer, *args, **kwargs)
    arrays = np.broadcast_arrays(*(_cells(tracer, x) for x in args))
    check_unrolled(arrays[0].shape)
    found = np.empty(arrays[0].shape, object)
    tracer.shared = {}
    for at in np.ndindex(found.shape):
        found[at] = method(tracer, *(x[at] for x in arrays), **kwargs).node
    tracer.shared = None
    return symbol_of(tracer, found)


def _axes(x: Any) -> int:
    shape = getattr(x, "shape", ())
    return len(shape) if isinstance(shape, tuple) else 0  # a class of arrays has a descriptor there


def _cells(tracer: Tracer, x: Any) -> Any:
    """An argument as an array of numbers and symbols of numbers."""
    if _axes(x):
        nodes = unrolled(tracer, x)
        found = np.empty(nodes.shape, object)
        for at in np.ndindex(nodes.shape):
            found[at] = tracer.symbol(nodes[at])
        return found
    found = np.empty((), object)
    found[()] = x
    return found


def unrolled(tracer: Tracer, x: Any) -> Any:
    """The nodes of all elements of an array: a symbol with open axes, or a captured array."""
    if isinstance(x, Symbol) and x.elements is not None:
        return x.elements
    if isinstance(x, Symbol) and not x.open_axes:
        return np.array(x.node, object)
    array, before = (x.array, x.indices) if isinstance(x, Symbol) else (x, ())
    shape = tuple(array.shape[len(before) :])
    check_unrolled(shape)
    found = np.empty(shape, object)
    for at in np.ndindex(shape):
        found[at] = load(tracer, array, at, before).node
    return found


def symbol_of(tracer: Tracer, nodes: Any) -> Symbol:
    """The symbol of an array of nodes, or of one."""
    axes = np.ndim(nodes)
    return Symbol(tracer, open_axes=axes, elements=nodes) if axes else tracer.symbol(int(np.asarray(nodes).item()))


def check_unrolled(shape: Sequence[int]) -> None:
    """Refuse arrays whose elements are too many for a kernel, which does each operation on its own."""
    if math.prod(shape) > MOST_ELEMENTS:
        fail(
            f"an operation on an array of shape {list(shape)}",
            f"index captured arrays down to one number, or to at most {MOST_ELEMENTS}",
        )


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
    if 0 in tuple(array.shape):
        fail(f"an empty captured array of shape {list(array.shape)}", "pass one with elements")
    if len(at) < rank:
        return Symbol(tracer, -1, array, at, rank - len(at))
    return tracer.symbol(tracer.graph.load(tracer.array(array), at))


def described(x: Any) -> str:
    """A value that is not a number, for messages."""
    if isinstance(x, Symbol) and x.open_axes:
        return f"an array with {x.open_axes} axes that are not indexed"
    return f"an array of shape {list(x.shape)}" if hasattr(x, "shape") else f"{type(x).__name__} {x!r}"


def fail(what: str, remedy: str, line: str | None = None) -> NoReturn:
    """Refuse what a function does, with the line of the user's code that does it."""
    line = _line_of(_frames()) if line is None else line
    raise InvalidArgumentError(f"[{calling.get()}] expected a function that can be traced, got {what}{line}; {remedy}")


def line_of_error(traceback: TracebackType | None) -> str:
    """The innermost line of the user's code that an error came from."""
    found: list[tuple[FrameType, int]] = []
    while traceback is not None:
        found.insert(0, (traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _line_of(found)


def _frames() -> list[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found


def _line_of(frames: Sequence[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("aule", "torch", "numpy"):
            return f" ({frame.f_code.co_filename}:{line})"
    return ""


def _operator(name: str, reflected: bool) -> Callable[[Symbol, Any], Any]:
    def apply(x: Symbol, y: Any) -> Any:
        operands = (y, x) if reflected else (x, y)
        return applied(x.tracer.methods[name], x.tracer, operands, {})

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Symbol, f"__{_name}__", _operator(_name, False))
    setattr(Symbol, f"__r{_name}__", _operator(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Symbol, f"__{_name}__", _operator(_name, False))
for _name, _method in (("neg", "neg"), ("abs", "abs"), ("invert", "invert"), ("pos", "positive")):
    setattr(Symbol, f"__{_name}__", lambda x, _method=_method: applied(x.tracer.methods[_method], x.tracer, (x,), {}))
