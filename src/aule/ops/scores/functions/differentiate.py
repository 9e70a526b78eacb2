"""Derivatives of a score function: by the score, and by the elements of captured arrays that it loads."""

from __future__ import annotations

import math

from aule.ops.scores.functions.program import Graph, ScoreFunction, is_float
from aule.tile.common.math import LN2


def derivatives(function: ScoreFunction, loads: tuple[int, ...] = ()) -> ScoreFunction:
    """The program of the derivative of a function's result by the score and by each of some ``load`` nodes.

    A score of exactly -inf drops its key, and then nothing depends on it: where one side of ``where`` is -inf, only the
    derivative of the other side is returned.
    """
    graph = Graph.of(function)
    score = graph.input("score")
    nodes = function.nodes
    wanted = {score, *loads}
    reaching = {i for i in range(len(graph.nodes)) if i in wanted}
    for i, node in enumerate(nodes):
        if any(a in reaching for a in node.args) and is_float(node.dtype):
            reaching.add(i)
    gradients: dict[int, int] = {function.results[0]: graph.literal(1.0, graph.work)}
    for i in reversed(range(len(nodes))):
        if i in gradients and i in reaching and nodes[i].args and i not in loads:
            for argument, part in _parts(graph, i, gradients[i]):
                if argument in reaching:
                    known = gradients.get(argument)
                    gradients[argument] = part if known is None else graph.binary("add", known, part)
    zero = graph.literal(0.0, graph.work)
    return graph.finish(gradients.get(i, zero) for i in (score, *loads))


def _parts(graph: Graph, i: int, g: int) -> list[tuple[int, int]]:
    """What each operand of a node receives of the gradient ``g`` of its result."""
    node = graph.nodes[i]
    binary, unary, args = graph.binary, graph.unary, node.args

    def number(x: float) -> int:
        return graph.literal(x, node.dtype)

    def times(x: int) -> int:
        return binary("mul", g, x)

    if node.op in ("add", "sub"):
        return [(args[0], g), (args[1], g if node.op == "add" else unary("neg", g))]
    if node.op == "mul":
        return [(args[0], times(args[1])), (args[1], times(args[0]))]
    if node.op == "div":
        quotient = binary("div", g, args[1])
        return [(args[0], quotient), (args[1], unary("neg", binary("mul", quotient, i)))]
    if node.op == "mod":  # x - floor(x / y) * y
        return [(args[0], g), (args[1], unary("neg", times(binary("floordiv", *args))))]
    if node.op in ("min", "max"):
        first = graph.compare("le" if node.op == "min" else "ge", *args)
        return [(args[0], graph.where(first, g, number(0.0))), (args[1], graph.where(first, number(0.0), g))]
    if node.op == "where":
        return _of_where(graph, args, g)
    if node.op in ("floordiv", "floor", "detach"):
        return []
    if node.op == "cast":
        return [(args[0], graph.cast(g, graph.dtype(args[0])))]
    return _of_unary(graph, i, g)


def _of_where(graph: Graph, args: tuple[int, ...], g: int) -> list[tuple[int, int]]:
    condition, yes, no = args
    dropped = [graph.nodes[x].op == "literal" and graph.nodes[x].value == float("-inf") for x in (yes, no)]
    if any(dropped):
        return [(no if dropped[0] else yes, g)]
    zero = graph.literal(0.0, graph.dtype(g))
    return [(yes, graph.where(condition, g, zero)), (no, graph.where(condition, zero, g))]


def _of_unary(graph: Graph, i: int, g: int) -> list[tuple[int, int]]:
    node = graph.nodes[i]
    binary, unary, (x,) = graph.binary, graph.unary, node.args

    def number(value: float) -> int:
        return graph.literal(value, node.dtype)

    def one_minus(y: int) -> int:
        return binary("sub", number(1.0), y)

    if node.op == "abs":
        # Zero where x is zero, as in PyTorch.
        sign = graph.where(graph.compare("lt", x, number(0.0)), number(-1.0), number(1.0))
        factor = graph.where(graph.compare("eq", x, number(0.0)), number(0.0), sign)
    elif node.op == "neg":
        factor = number(-1.0)
    elif node.op == "exp":
        factor = i
    elif node.op == "exp2":
        factor = binary("mul", i, number(LN2))
    elif node.op == "log":
        factor = binary("div", number(1.0), x)
    elif node.op == "log2":
        factor = binary("div", number(1.0 / LN2), x)
    elif node.op == "sqrt":
        factor = binary("div", number(0.5), i)
    elif node.op == "rsqrt":
        factor = binary("div", binary("mul", number(-0.5), i), x)
    elif node.op == "tanh":
        factor = one_minus(binary("mul", i, i))
    elif node.op == "sigmoid":
        factor = binary("mul", i, one_minus(i))
    elif node.op == "erf":
        factor = binary("mul", number(2.0 / math.sqrt(math.pi)), unary("exp", unary("neg", binary("mul", x, x))))
    elif node.op == "sin":
        factor = unary("cos", x)
    else:
        assert node.op == "cos", node.op
        factor = unary("neg", unary("sin", x))
    return [(x, binary("mul", g, factor))]
