"""A score function inside a kernel.

Scores come in a unit (`ScoreConfig.score_unit`), which a user's function does not know. Where the result is linear in
the score (added to, scaled, selected) the score stays in its unit and the other terms are brought to it; only other
functions of the score get it in natural units.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from aule.ir import Value
from aule.ir.types import SCALARS, Scalar, Vector, bool_, element, f32, i32, u8
from aule.ops.scores.functions.program import COMPARISONS, INPUTS, MOST_ROWS, Node, ScoreFunction
from aule.ops.scores.modifiers import Site
from aule.ops.scores.parameters import Parameters
from aule.tile.common.math import LN2, LOG2E, erf, lowest, sigmoid, tanh

SCORE_FUNCTION, MASK_FUNCTION = "score", "keep"
"""Names of the two functions in a kernel: captured arrays are the buffers ``score0``, ``score1`` ..., ``keep0`` ..."""
_DIRECT = {"add", "sub", "mul", "div", "min", "max", "and", "or", "xor", "shl", "shr", *COMPARISONS}
"""Operations that the kernel language has under the same name; ``div`` of floats."""


class Emitter:
    """Emits a function at sites of a kernel.

    Parameters
    ----------
    name : str
        Captured arrays are the buffers ``{name}0``, ``{name}1`` ...; captured numbers ``{name}_number0`` ...
    unit : float
        Unit of the scores that come in and go out.
    """

    def __init__(self, p: Parameters, function: ScoreFunction, name: str, unit: float) -> None:
        self.p, self.b, self.function, self.name, self.unit = p, p.b, function, name, unit
        self._known: dict[tuple[object, ...], tuple[Value, object]] = {}
        """Values of nodes by what they depend on of a site, in one block; with what keeps the keys alive."""

    def known(self, i: int, site: Site, score: Value | None, compute: Callable[[], Value], kind: str = "") -> Value:
        """A value of a node, computed once for sites that it cannot tell apart: sites of a tile share rows and columns.
        ``kind`` tells values of one node apart."""
        given = {**_places(site), "score": score}
        used = [given[name] for name in self.inputs[i]]
        key = (i, kind, id(self.b.block), *map(id, used))
        if key not in self._known:
            self._known[key] = compute(), (self.b.block, used)
        return self._known[key][0]

    @cached_property
    def inputs(self) -> list[list[str]]:
        """The inputs that each node depends on."""
        found: list[list[str]] = []
        for node in self.function.nodes:
            names = {name for a in node.args for name in found[a]} | ({node.op} & INPUTS.keys())
            found.append(sorted(names))
        return found

    def results(self, site: Site, score: Value | None = None) -> list[Value]:
        """The results at a site, in natural units; ``score`` is in its unit."""
        at = _At(self, site, score)
        return [at.value(i) for i in self.function.results]

    def score(self, site: Site, score: Value) -> Value:
        """The modified score, in its unit."""
        return _At(self, site, score).scaled(self.function.results[0])

    def keeps(self, site: Site) -> Value:
        """Whether a mask function keeps a site."""
        return self.results(site)[0]


class _At:
    """The values of a function at one site; computed when they are first needed."""

    def __init__(self, emitter: Emitter, site: Site, score: Value | None) -> None:
        self.e, self.p, self.b, self.site, self.given = emitter, emitter.p, emitter.b, site, score
        self.nodes = emitter.function.nodes
        self.lanes = site.column.type.lanes if isinstance(site.column.type, Vector) else 1

    # -- in the unit of scores -----------------------------------------------------------------------------------------

    def scaled(self, i: int) -> Value:
        """A node times the unit of scores."""
        node, b = self.nodes[i], self.b
        if node.op == "score":
            assert self.given is not None
            return self.given
        if self.e.unit != 1.0 and self._linear(i):
            args = node.args
            if node.op in ("add", "sub"):
                return b.binary(node.op, self.scaled(args[0]), self.scaled(args[1]))
            if node.op == "neg":
                return -self.scaled(args[0])
            if node.op == "where":
                return self._select(self.value(args[0]), self.scaled(args[1]), self.scaled(args[2]))
            if node.op in ("mul", "div"):
                first = self._depends(args[0])
                sides = (
                    self.scaled(args[0]) if first else self.value(args[0]),
                    (self.value(args[1]) if first else self.scaled(args[1])),
                )
                return b.binary(node.op, *sides)
        if node.op == "literal":
            return b.const(
                _in_unit(float(node.value or 0.0), self.e.unit, element(self._score_type)), element(self._score_type)
            )
        if self.e.unit == 1.0:
            return self.value(i)
        if node.op == "mul":
            # The factor that fewer sites differ in is brought to the unit.
            fewer, more = sorted(node.args, key=lambda a: len(self.e.inputs[a]))
            return self._scaled_once(fewer) * self.value(more)
        return self._finite(i, self.value(i)) * self.e.unit

    def _scaled_once(self, i: int) -> Value:
        return self.e.known(i, self.site, self.given, lambda: self.scaled(i), "scaled")

    @property
    def _score_type(self) -> Scalar | Vector:
        assert self.given is not None and isinstance(self.given.type, Scalar | Vector)
        return self.given.type

    def _depends(self, i: int) -> bool:
        return self.e.function.depends_on(i, "score")

    def _linear(self, i: int) -> bool:
        """Whether a node is linear in the score, or selects between such nodes and ones that do not depend on it."""
        node = self.nodes[i]
        if node.op == "score":
            return True
        if not self._depends(i):
            return False
        if node.op in ("add", "sub", "neg"):
            return all(self._linear(a) or not self._depends(a) for a in node.args)
        if node.op == "where":
            return not self._depends(node.args[0]) and all(
                self._linear(a) or not self._depends(a) for a in node.args[1:]
            )
        if node.op == "mul":
            return sum(self._depends(a) for a in node.args) == 1 and all(
                self._linear(a) or not self._depends(a) for a in node.args
            )
        return node.op == "div" and self._linear(node.args[0]) and not self._depends(node.args[1])

    def _finite(self, i: int, value: Value) -> Value:
        """A finite number so low that it would be infinite in the unit of scores, as the lowest that is not."""
        if not _may_be_low(self.e.function, i):
            return value
        least = lowest(element(value.type)) / self.e.unit * (1 - 2**-20)
        low = (value < least) & (value >= lowest(element(value.type)))
        return self._select(low, self.b.const(least, element(value.type)), value)

    # -- in natural units ----------------------------------------------------------------------------------------------

    def value(self, i: int) -> Value:
        """The value of a node."""
        return self.e.known(i, self.site, self.given, lambda: self._compute(self.nodes[i]))

    def _compute(self, node: Node) -> Value:
        b, site = self.b, self.site
        if node.op == "score":
            assert self.given is not None
            return self.given if self.e.unit == 1.0 else self.given * (1.0 / self.e.unit)
        places = _places(site)
        if node.op in places:
            return places[node.op]
        type_ = bool_ if node.dtype == "bool" else SCALARS[node.dtype]
        if node.op == "literal":
            value = node.value
            assert value is not None
            return b.eq(b.const(int(value), i32), 1) if node.dtype == "bool" else b.const(value, type_)
        if node.op == "number":
            return self.p.number(f"{self.e.name}_number{node.value}", type_)
        if node.op == "load":
            return self._load(node)
        if node.op == "cast" and node.dtype == "f32" and 0 < self._terms(node.args[0]) <= 4:
            return self._as_float(node.args[0])
        args = [self.value(a) for a in node.args]
        if node.op == "where":
            return self._select(*args)
        if node.op == "cast":
            return b.cast(args[0], type_)
        if self.e.function.divides_by_constant(node):
            return args[0] * (1.0 / float(self.nodes[node.args[1]].value or 1.0))
        return self._operation(node, args)

    def _terms(self, i: int) -> int:
        """Count the rows, keys and constants whose sum or difference an integer is; 0 if it is something else."""
        node = self.nodes[i]
        if node.op in ("add", "sub", "neg", "abs"):
            parts = [self._terms(a) for a in node.args]
            return sum(parts) if all(parts) else 0
        constant = node.op == "literal" and abs(int(node.value or 0)) <= MOST_ROWS
        return int(constant or node.op in ("query", "position", "key"))

    def _as_float(self, i: int) -> Value:
        """The float32 of such an integer, exactly: rows and keys are converted, and not each of their differences."""
        node = self.nodes[i]

        def convert() -> Value:
            args = [self._as_float(a) for a in node.args]
            if not args:
                return self.b.cast(self.value(i), f32)
            return self.b.binary(node.op, *args) if len(args) == 2 else self.b.unary(node.op, *args)

        return self.e.known(i, self.site, self.given, convert, "float")

    def _operation(self, node: Node, args: list[Value]) -> Value:
        b = self.b
        if node.op in _DIRECT:
            return b.binary(node.op, *args)
        if node.op in ("floordiv", "mod"):
            return self._divided(node, *args)
        (x,) = args
        if node.op == "detach":
            return x
        functions: dict[str, Callable[[], Value]] = {
            "exp": lambda: b.exp2(x * LOG2E),
            "log": lambda: b.log2(x) * LN2,
            "tanh": lambda: tanh(b, x),
            "sigmoid": lambda: sigmoid(b, x),
            "erf": lambda: erf(b, x),
        }
        return functions[node.op]() if node.op in functions else b.unary(node.op, x)

    def _divided(self, node: Node, x: Value, y: Value) -> Value:
        """Division that rounds down, or what it leaves: the remainder has the sign of the divisor."""
        b, divisor = self.b, self.nodes[node.args[1]]
        if node.dtype in ("f32", "f64"):
            down = b.unary("floor", x / y)
            return down if node.op == "floordiv" else x - down * y
        power = divisor.op == "literal" and int(divisor.value or 0) > 0 and int(divisor.value or 0).bit_count() == 1
        if power:
            size = int(divisor.value or 0)
            return x >> (size.bit_length() - 1) if node.op == "floordiv" else x & (size - 1)
        if divisor.op != "literal" or not divisor.value:
            y = self._select(b.eq(y, 0), b.const(1, element(y.type)), y)  # undefined in kernels
        if _not_negative(self.e.function, node.args[0]) and _not_negative(self.e.function, node.args[1]):
            return b.binary("div" if node.op == "floordiv" else "rem", x, y)
        # Kernels may divide numbers as if they had no sign.
        ax, ay = b.abs(x), b.abs(y)
        quotient = b.binary("div", ax, ay)
        more = self._select(b.ne(ax - quotient * ay, 0), quotient + 1, quotient)
        quotient = self._select((x ^ y) < 0, -more, quotient)
        return quotient if node.op == "floordiv" else x - quotient * y

    def _load(self, node: Node) -> Value:
        """An element of a captured array. Indices are clamped to it; negative ones count from its end."""
        b, p, number = self.b, self.p, int(node.value or 0)
        name, array = f"{self.e.name}{number}", self.e.function.arrays[number]
        buffer = p.buffer(name, u8 if array.dtype == "bool" else SCALARS[array.dtype])
        place = p.number(f"{name}_offset", p.index)
        for axis, argument in enumerate(node.args):
            at, size = self.value(argument), p.number(f"{name}_size{axis}")
            size = b.cast(size, element(at.type))
            if not _not_negative(self.e.function, argument):
                at = self._select(at < 0, at + size, at)
            if not _not_negative(self.e.function, argument, safe=True):
                at = b.max(at, 0)
            at = b.cast(b.min(at, size - 1), p.index)
            place = at * p.number(f"{name}_stride{axis}", p.index) + place
        found = b.load(buffer, place) if isinstance(place.type, Scalar) else self._gathered(buffer, place)
        if array.dtype == "bool":
            return b.ne(found, 0)
        wanted = SCALARS[node.dtype]
        return found if element(found.type) == wanted else b.cast(found, wanted)

    def _gathered(self, buffer: Value, places: Value) -> Value:
        return self.b.vector([self.b.load(buffer, at) for at in self.b.unpack(places)])

    def _select(self, condition: Value, yes: Value, no: Value) -> Value:
        if isinstance(condition.type, Vector):
            yes, no = (self._spread(x) for x in (yes, no))
        return self.b.select(condition, yes, no)

    def _spread(self, x: Value) -> Value:
        return x if isinstance(x.type, Vector) else self.b.splat(x, self.lanes)


def _places(site: Site) -> dict[str, Value]:
    """Inputs of a function by name, besides the score."""
    return {
        "batch": site.batch, "head": site.head, "query": site.row, "position": site.position, "key": site.column,
    }  # fmt: skip


def _in_unit(value: float, unit: float, elem: Scalar) -> float:
    """A constant in the unit of scores: finite if it was."""
    least = lowest(elem)
    return value if value == float("-inf") else max(value * unit, least) if value >= least else value * unit


def _may_be_low(function: ScoreFunction, i: int) -> bool:
    """Whether a node may be near the lowest float32: not if it is made of integers and factors known while tracing."""
    node = function.nodes[i]
    if node.dtype not in ("f32", "f64"):
        return False
    if node.op == "cast":
        return _may_be_low(function, node.args[0])
    if node.op == "literal":
        return abs(float(node.value or 0.0)) > 1e19
    return node.op not in ("tanh", "sigmoid", "erf", "sin", "cos") and (
        node.op not in ("add", "sub", "mul", "neg", "abs", "min", "max")
        or any(_may_be_low(function, a) for a in node.args)
    )


def _not_negative(function: ScoreFunction, i: int, safe: bool = False) -> bool:
    """Whether an integer is known to be at least 0; ``safe``: even if an operation overflows."""
    node = function.nodes[i]
    if safe and node.op in ("mul", "abs", "cast"):
        return False
    if node.op in ("batch", "head", "query", "key", "abs") or node.dtype == "bool":
        return True
    if node.op == "literal":
        return float(node.value or 0) >= 0
    if node.op in ("floordiv", "add", "mul", "min", "mod", "shr", "cast", "and"):
        return all(_not_negative(function, a, safe) for a in node.args)
    return node.op == "max" and any(_not_negative(function, a, safe) for a in node.args)
