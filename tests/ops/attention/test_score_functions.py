"""Random score functions: kernels against NumPy, and derivative programs against differences.

A mask keeps one key for each row, so that the log-sum-exp of a row is its modified score, and the gradient of q the
derivative by the score times that key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import devices
import grid
import numpy as np
import pytest

from aule.engine.attention import backward_on_host, forward_on_host
from aule.frontends.numpy import view
from aule.ops.attention.validate import attention_problem
from aule.ops.scores.functions.differentiate import derivatives
from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.program import BoundFunction, Graph, is_float
from aule.runtime.base import Device

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 21, 27, 16
STEPS = 14
TABLE, SMALL, FLAGS = (
    np.random.default_rng(5).standard_normal((HEADS, KEYS)),
    np.arange(-13, 14),
    np.arange(KEYS) % 3 > 0,
)
ARRAYS = [TABLE.astype(np.float32), SMALL.astype(np.int64), FLAGS]
NUMBERS = (0.75, -5)
SMOOTH = ("neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos")
FUNCTIONS = (*SMOOTH, "floor", "detach")


class Drawn(NamedTuple):
    """A random function, and the node of the element of `TABLE` that it loads."""

    function: BoundFunction
    load: int


class _Draw:
    def __init__(self, seed: int, functions: tuple[str, ...]) -> None:
        self.rng, self.graph, self.functions = np.random.default_rng(seed), Graph(), functions
        g = self.graph
        inputs = {name: g.input(name) for name in ("score", "batch", "head", "query", "key")}
        table, small, flags = g.array("f32", 2), g.array("i64", 1), g.array("bool", 1)
        distance = g.binary("sub", inputs["query"], inputs["key"])
        self.load = g.load(table, (inputs["head"], inputs["key"]))
        self.pool = [
            *inputs.values(), g.number("f32"), g.number("i32"), distance, self.load, g.load(small, (distance,)),
            g.load(flags, (inputs["key"],)), g.load(table, (g.literal(-1), inputs["query"])),
        ]  # fmt: skip

    def pick(self, floats: bool | None = None) -> int:
        known = [i for i in self.pool if floats is None or is_float(self.graph.dtype(i)) == floats]
        recent = known[-6:] if self.rng.random() < 0.6 else known
        return int(self.rng.choice(recent))

    def step(self) -> int:
        g, x = self.graph, self.pick()
        if self.rng.random() < 0.4:
            return self._function(self.pick(True))
        kind = self.rng.choice(["arithmetic", "divided", "compared", "selected", "bits", "product"])
        y = self.pick()
        if kind == "product":
            product = g.binary("mul", x, y)
            return product if is_float(g.dtype(product)) else g.binary("mod", product, g.literal(997))
        if kind == "arithmetic":
            return g.binary(str(self.rng.choice(["add", "sub", "min", "max"])), x, y)
        if kind == "divided":
            if self.rng.random() < 0.4 or any(is_float(g.dtype(i)) for i in (x, y)):
                return g.binary("div", x, g.binary("add", g.unary("abs", y), g.literal(1.0)))
            divisor = g.literal(int(self.rng.choice([2, 3, 8, -3, -7]))) if self.rng.random() < 0.6 else y
            # Division by zero is undefined: it must not fail, but may give anything.
            divisor = g.where(g.compare("eq", divisor, g.literal(0)), g.literal(5), divisor)
            return g.binary(str(self.rng.choice(["floordiv", "mod"])), x, divisor)
        if kind == "compared":
            return g.compare(str(self.rng.choice(["lt", "le", "gt", "ge", "eq", "ne"])), x, y)
        if kind == "selected":
            return g.where(self.pick(False), x, y)
        x, y = self.pick(False), self.pick(False)
        if self.rng.random() < 0.3:
            x = g.cast(x, "i32") if g.dtype(x) == "bool" else x
            return g.binary(str(self.rng.choice(["shl", "shr"])), g.binary("mod", x, g.literal(99)), g.literal(2))
        if self.rng.random() < 0.3:
            return g.unary("not", x)
        return g.binary(str(self.rng.choice(["and", "or", "xor"])), x, y)

    def _function(self, x: int) -> int:
        g = self.graph
        op = str(self.rng.choice(self.functions))
        if op in ("exp", "exp2", "sin", "cos"):
            x = g.binary("min", g.binary("max", x, g.literal(-6.0)), g.literal(6.0))
        if op in ("log", "log2", "sqrt", "rsqrt"):
            x = g.binary("add", g.unary("abs", x), g.literal(0.5))
        return g.unary(op, x)


def drawn(seed: int, functions: tuple[str, ...] = FUNCTIONS) -> Drawn:
    """A random function of scores."""
    draw = _Draw(seed, functions)
    for _ in range(STEPS):
        draw.pool.append(draw.step())
    g = draw.graph
    root = g.binary("add", g.input("score"), draw.load)
    for part in [i for i in draw.pool if is_float(g.dtype(i))][-5:] + draw.pool[-2:]:
        root = g.binary("add", root, g.to_float(part))
    program = g.finish([root])
    load = next(i for i, n in enumerate(program.nodes) if n.op == "load" and n.value == 0 and
                program.nodes[n.args[1]].op == "key")  # fmt: skip
    return Drawn(BoundFunction(program, NUMBERS), load)


def one_key() -> BoundFunction:
    """Keeps key ``(7 * query + 3 * head) % KEYS``."""
    g = Graph()
    place = g.binary(
        "add", g.binary("mul", g.input("query"), g.literal(7)), g.binary("mul", g.input("head"), g.literal(3))
    )
    return BoundFunction(g.finish([g.compare("eq", g.input("key"), g.binary("mod", place, g.literal(KEYS)))]))


def sites(arrays: dict[str, Any]) -> dict[str, Any]:
    """Inputs of a function at the keys that are kept: each of ``[BATCH, HEADS, QUERIES]``."""
    batch, head, query = np.indices((BATCH, HEADS, QUERIES))
    key = (7 * query + 3 * head) % KEYS
    score = (arrays["q"].astype(np.float64) * arrays["k"][batch, head, key]).sum(-1) / np.sqrt(DIM)
    return {"batch": batch, "head": head, "query": query, "key": key, "score": score}


def near(found: Any, rough: Any, exact: Any) -> None:
    """Few elements may differ from NumPy's by more than some roundings: those beside a jump of the function."""
    tolerance = 8 * np.abs(rough - exact) + 2e-5 * (1 + np.abs(exact))
    wrong = ~(np.abs(found - exact) <= tolerance)
    assert wrong.mean() <= 0.01, (found[wrong][:4], exact[wrong][:4], rough[wrong][:4], wrong.mean())


def check(device: Device, seed: int, gradients: bool = True) -> None:
    drawing, rng = drawn(seed), np.random.default_rng(seed)
    shapes = {"q": (BATCH, HEADS, QUERIES, DIM), "k": (BATCH, HEADS, KEYS, DIM), "v": (BATCH, HEADS, KEYS, DIM)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    problem, operands = attention_problem(**{n: grid.view_of(x) for n, x in arrays.items()}, return_lse=True)
    problem = replace(problem, score_mod=drawing.function, mask_mod=one_key())
    operands = replace(operands, captured={f"score{i}": view(x, "captured", "test") for i, x in enumerate(ARRAYS)})
    out, lse = forward_on_host(problem, operands, device, exact_lse=True)
    at = sites(arrays)
    rough, exact = (Evaluator(drawing.function, ARRAYS, exact=e)(**at) for e in (False, True))
    near(lse, rough, exact)
    assert np.allclose(out, arrays["v"][at["batch"], at["head"], at["key"]], atol=1e-6)
    if not gradients:
        return
    slope = replace(drawing.function, program=derivatives(drawing.function.program))
    ones = grid.view_of(np.ones_like(lse))
    dq, _, _ = backward_on_host(problem, operands, device, out, lse, grid.view_of(np.zeros_like(out)), dlse=ones)
    keys = arrays["k"][at["batch"], at["head"], at["key"]] / np.sqrt(DIM)
    found = (dq * keys).sum(-1) / (keys * keys).sum(-1)
    near(found, *(Evaluator(slope, ARRAYS, exact=e)(**at) for e in (False, True)))


@pytest.mark.device
@pytest.mark.parametrize(("name", "seed"), [("cpu", 1), ("cpu", 2), ("cpu", 3), ("vulkan", 4), ("opencl", 5),
                                            ("webgpu", 6), ("msl-shim", 7)])  # fmt: skip
def test_kernels_compute_the_function_and_its_slope(name: str, seed: int) -> None:
    check(devices.need(name), seed)


@pytest.mark.parametrize("seed", range(40))
def test_derivatives_against_differences(seed: int) -> None:
    drawing, step = drawn(seed, SMOOTH), 1e-6
    program = derivatives(drawing.function.program, (drawing.load,))
    rng = np.random.default_rng(seed)
    at = {"batch": 1, "head": 2, "query": np.arange(QUERIES)[:, None], "key": np.arange(KEYS),
          "score": rng.standard_normal((QUERIES, KEYS))}  # fmt: skip
    arrays = [TABLE, *ARRAYS[1:]]
    by_score, by_table = Evaluator(replace(drawing.function, program=program), arrays, exact=True).results(at)

    def value(offset: float, moved: float = 0.0) -> Any:
        given = [TABLE + moved, *arrays[1:]]
        return Evaluator(drawing.function, given, exact=True)(**at | {"score": at["score"] + offset})

    agrees((value(step) - value(-step)) / (2 * step), by_score)
    loads = [n for n in drawing.function.program.nodes if n.op == "load" and n.value == 0]
    if len(loads) == 1:  # all elements of the table are moved at once
        agrees((value(0.0, step) - value(0.0, -step)) / (2 * step), by_table)


def agrees(difference: Any, derivative: Any) -> None:
    derivative = np.broadcast_to(derivative, difference.shape)
    wrong = ~(np.abs(difference - derivative) <= 1e-4 * (1 + np.abs(derivative)))
    assert wrong.mean() <= 0.02, (difference[wrong][:4], derivative[wrong][:4])
