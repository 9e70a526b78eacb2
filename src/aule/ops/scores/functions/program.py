"""A user's function as a small typed program without loops: hashable, free of frameworks and devices.

Captured arrays and numbers are operands of the kernel, so new values of them need no new kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

from aule.errors import InvalidArgumentError

calling: ContextVar[str] = ContextVar("calling", default="flex_attention")
"""The public function whose arguments are being traced, for messages."""
INPUTS = {"score": "f32", "batch": "i32", "head": "i32", "query": "i32", "position": "i32", "key": "i32"}
"""What a function is called with. A score has the type that is computed in: f32, or f64 for arrays of f64. ``query``
counts the rows of a call, and ``position`` is the key that a row stands at."""
MOST_ROWS = 1 << 22
"""Most rows or keys of a call with functions: float32 holds sums of four such numbers exactly."""
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
BITWISE = ("and", "or", "xor")
SHIFTS = ("shl", "shr")
ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "mod", "min", "max")
FLOAT_UNARY = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos", "floor")
UNARY = ("neg", "abs", "not", "detach", *FLOAT_UNARY)
"""``detach`` is its operand, without a derivative."""

_RANK = {"bool": 0, "i32": 1, "i64": 2, "f32": 3, "f64": 4}
"""Types of values, in the order of promotion."""
_LOADED = {"bool": "bool", "u8": "i32", "i8": "i32", "i32": "i32", "i64": "i64", "f16": "f32", "bf16": "f32"}
_LOADED |= {"f32": "f32", "f64": "f64"}
"""Types of values by the types of captured arrays: half precision is computed in f32."""


def is_float(dtype: str) -> bool:
    """Whether a type of values is a floating-point type."""
    return dtype in ("f32", "f64")


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes
    ----------
    op : str
        A name of `INPUTS`, `COMPARISONS`, `BITWISE`, `SHIFTS`, `ARITHMETIC` or `UNARY`; ``where`` (condition, yes, no);
        ``cast``; ``literal``; ``number`` (a captured number) or ``load`` (an element of a captured array).
    args : tuple of int
        Numbers of earlier nodes. Operands of one operation have one type, but for the condition of ``where`` and the
        indices of ``load``.
    dtype : str
        bool, i32, i64, f32 or f64.
    value : int, float or bool, optional
        The literal, or the number of the captured number or array.
    """

    op: str
    args: tuple[int, ...]
    dtype: str
    value: float | int | bool | None = None


@dataclass(frozen=True)
class Captured:
    """A captured array: its element type, and its number of axes."""

    dtype: str
    rank: int


@dataclass(frozen=True)
class ScoreFunction:
    """A traced function.

    Attributes
    ----------
    nodes : tuple of Node
        In an order in which each can be computed.
    results : tuple of int
        Nodes that are returned.
    arrays : tuple of Captured
        Captured arrays, in the order of the numbers that ``load`` refers to.
    numbers : tuple of str
        Types of captured numbers.
    """

    nodes: tuple[Node, ...]
    results: tuple[int, ...]
    arrays: tuple[Captured, ...] = ()
    numbers: tuple[str, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.results, self.arrays, self.numbers))

    def __hash__(self) -> int:
        return self._hash

    def inputs_of(self, *roots: int) -> set[int]:
        """All nodes that some nodes are computed from, themselves included."""
        found, waiting = set(), list(roots)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += self.nodes[node].args
        return found

    def depends_on(self, root: int, op: str) -> bool:
        """Whether a node is computed from an input of a name."""
        return any(self.nodes[i].op == op for i in self.inputs_of(root))

    @cached_property
    def may_drop(self) -> bool:
        """Whether a result may be infinite or NaN: not if it is made of scores, integers and finite constants."""
        risky = ("div", "log", "log2", "exp", "exp2", "sqrt", "rsqrt", "floordiv", "mod", "load", "number")
        used = [self.nodes[i] for i in self.inputs_of(*self.results)]
        return any(
            is_float(node.dtype)
            and (
                (node.op in risky and not self.divides_by_constant(node))
                or (node.op == "literal" and not math.isfinite(node.value or 0))
            )
            for node in used
        )

    def divides_by_constant(self, node: Node) -> bool:
        """Whether a node is a division of floats by a constant that is neither 0 nor so small that it may overflow."""
        divisor = self.nodes[node.args[1]] if node.op == "div" else None
        return divisor is not None and divisor.op == "literal" and abs(float(divisor.value or 0)) >= 2.0**-20

    @property
    def work(self) -> str:
        """The type of scores."""
        return next((node.dtype for node in self.nodes if node.op == "score"), "f32")

    @property
    def is_one(self) -> bool:
        """Whether the first result is the number 1."""
        first = self.nodes[self.results[0]]
        return first.op == "literal" and first.value == 1.0


@dataclass(frozen=True)
class BoundFunction:
    """A function with the values of its captured numbers; captured arrays are operands of the call."""

    program: ScoreFunction
    numbers: tuple[float | int, ...] = ()


@dataclass
class Graph:
    """A program in the making: equal operations are recorded once, and those of literals are computed.

    ``work`` is the type of scores.
    """

    work: str = "f32"
    nodes: list[Node] = field(default_factory=list)
    arrays: list[Captured] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict)

    @staticmethod
    def of(function: ScoreFunction) -> Graph:
        """A graph that begins with a function's nodes, under their numbers."""
        graph = Graph(nodes=list(function.nodes), arrays=list(function.arrays), numbers=list(function.numbers))
        graph._known = {_key(node): i for i, node in enumerate(function.nodes)}
        graph.work = function.work
        return graph

    def finish(self, results: Iterable[int]) -> ScoreFunction:
        """The program of some results, without nodes that none of them needs."""
        roots = tuple(results)
        draft = ScoreFunction(tuple(self.nodes), roots, tuple(self.arrays), tuple(self.numbers))
        kept = sorted(draft.inputs_of(*roots))
        place = {old: new for new, old in enumerate(kept)}
        nodes = tuple(
            Node(n.op, tuple(place[i] for i in n.args), n.dtype, n.value) for n in (self.nodes[i] for i in kept)
        )
        return ScoreFunction(nodes, tuple(place[i] for i in roots), draft.arrays, draft.numbers)

    def dtype(self, node: int) -> str:
        """The type of a node."""
        return self.nodes[node].dtype

    # -- leaves --------------------------------------------------------------------------------------------------------

    def input(self, name: str) -> int:
        """One of the values that the function is called with."""
        return self.add(name, (), self.work if name == "score" else INPUTS[name])

    def literal(self, value: float | int | bool, dtype: str | None = None) -> int:
        """A constant of the kernel."""
        if dtype is None:
            dtype = "bool" if isinstance(value, bool) else "i32" if isinstance(value, int) else self.work
        if is_float(dtype):
            return self.add("literal", (), dtype, float(value))
        if dtype != "bool" and not -(2**31) <= value < 2**31:
            dtype = "i64"
        return self.add("literal", (), dtype, bool(value) if dtype == "bool" else int(value))

    def number(self, dtype: str) -> int:
        """A further captured number, whose value is an operand of the kernel."""
        self.numbers.append(dtype)
        return self.add("number", (), dtype, len(self.numbers) - 1)

    def array(self, dtype: str, rank: int) -> int:
        """Declare a captured array; returns the number that `load` takes."""
        if dtype not in _LOADED or (dtype == "f64" and self.work != "f64"):
            raise InvalidArgumentError(
                f"[{calling.get()}] expected captured arrays of float32, float16, bfloat16, bool or integers, got "
                f"{dtype}; convert it"
            )
        self.arrays.append(Captured(dtype, rank))
        return len(self.arrays) - 1

    def load(self, array: int, indices: Iterable[int]) -> int:
        """An element of a captured array, one index for each axis."""
        at = tuple(self.cast(i, "i32") if self.dtype(i) == "bool" else i for i in indices)
        assert len(at) == self.arrays[array].rank and not any(is_float(self.dtype(i)) for i in at)
        return self.add("load", at, _LOADED[self.arrays[array].dtype], array)

    # -- operations ----------------------------------------------------------------------------------------------------

    def cast(self, x: int, dtype: str) -> int:
        """Convert a value; to bool: whether it is not zero. Float to integer truncates."""
        node = self.nodes[x]
        if node.dtype == dtype:
            return x
        whole = dtype in ("i32", "i64")
        if node.op == "literal" and node.value is not None and not (whole and not math.isfinite(node.value)):
            return self.literal(
                node.value if is_float(dtype) else int(node.value) if dtype != "bool" else node.value != 0, dtype
            )
        if dtype == "bool":
            return self.compare("ne", x, self.literal(0, node.dtype))
        return self.add("cast", (x,), dtype)

    def together(self, *values: int) -> tuple[int, ...]:
        """Values converted to one type, that of highest rank."""
        dtype = max((self.dtype(x) for x in values), key=_RANK.__getitem__)
        return tuple(self.cast(x, dtype) for x in values)

    def to_float(self, x: int) -> int:
        """A value as a float: integers in the type of scores."""
        return x if is_float(self.dtype(x)) else self.cast(x, self.work)

    def compare(self, op: str, x: int, y: int) -> int:
        """One of `COMPARISONS`."""
        x, y = self.together(x, y)
        return self._folded(op, (x, y), "bool")

    def binary(self, op: str, x: int, y: int) -> int:
        """One of `ARITHMETIC`, `BITWISE` or `SHIFTS`, with promotion; ``div`` is of floats."""
        if op == "div":
            x, y = self.to_float(x), self.to_float(y)
        x, y = self.together(x, y)
        if self.dtype(x) == "bool" and op not in BITWISE:
            x, y = self.cast(x, "i32"), self.cast(y, "i32")
        dtype = self.dtype(x)
        if op in (*BITWISE, *SHIFTS) and is_float(dtype):
            raise InvalidArgumentError(f"[{calling.get()}] expected integers or bools for {op}, got floats; cast them")
        found = self._simplified(op, x, y)
        return self._folded(op, (x, y), dtype) if found is None else found

    def unary(self, op: str, x: int) -> int:
        """One of `UNARY`, with integers as floats where the function is of floats."""
        if op in FLOAT_UNARY:
            x = self.to_float(x)
        elif op != "not" and self.dtype(x) == "bool":
            x = self.cast(x, "i32")
        return self._folded(op, (x,), self.dtype(x))

    def where(self, condition: int, yes: int, no: int) -> int:
        """``yes`` where the condition holds, else ``no``."""
        condition = self.cast(condition, "bool")
        yes, no = self.together(yes, no)
        known = self.nodes[condition]
        if known.op == "literal" or yes == no:
            return yes if known.value or yes == no else no
        return self.add("where", (condition, yes, no), self.dtype(yes))

    def _simplified(self, op: str, x: int, y: int) -> int | None:
        """The result of an operation with 0 or 1, where it is one of its operands."""
        a, b = (self.nodes[i].value if self.nodes[i].op == "literal" else None for i in (x, y))
        if op in ("add", "sub", "or", "xor", "shl", "shr") and _is(b, 0):
            return x
        if op in ("mul", "div", "floordiv") and _is(b, 1):
            return x
        if (op == "add" and _is(a, 0)) or (op == "mul" and _is(a, 1)):
            return y
        if op == "and" and self.dtype(x) == "bool" and True in (a, b):
            return y if a is True else x
        return None

    def _folded(self, op: str, args: tuple[int, ...], dtype: str) -> int:
        known = [self.nodes[i] for i in args]
        if all(node.op == "literal" for node in known):
            from aule.ops.scores.functions.evaluate import apply  # NumPy only where it is needed

            found = apply(op, [node.value for node in known], [node.dtype for node in known]).item()
            return self.literal(found, dtype)
        return self.add(op, args, dtype)

    def add(self, op: str, args: tuple[int, ...], dtype: str, value: float | int | bool | None = None) -> int:
        """A node as it stands, without promotion or simplification."""
        node = Node(op, args, dtype, value)
        found = self._known.setdefault(_key(node), len(self.nodes))
        if found == len(self.nodes):
            self.nodes.append(node)
        return found


def _key(node: Node) -> tuple[object, ...]:
    """What equal nodes have in common. Literals go by their text: -0.0 equals 0.0, and NaN differs from itself."""
    return node.op, node.args, node.dtype, repr(node.value)


def _is(value: float | int | bool | None, wanted: int) -> bool:
    return value is not None and not isinstance(value, bool) and value == wanted
