"""Tracing: a user's function is called once with symbols, and becomes a program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from aule.errors import InvalidArgumentError
from aule.ops.scores.functions.arrays import OF_ARRAYS
from aule.ops.scores.functions.operations import METHODS
from aule.ops.scores.functions.program import BoundFunction, calling
from aule.ops.scores.functions.symbols import (
    KNOWN,
    OP,
    Framework,
    Symbol,
    Tracer,
    described,
    fail,
    line_of_error,
    load,
    symbol_in,
)

__all__ = ["OP", "Framework", "Symbol", "check_arguments", "load", "symbol_in", "trace"]


def trace(
    function: Callable[..., Any], inputs: Sequence[str], work: str, framework: Framework, name: str, op: str = OP
) -> tuple[BoundFunction, list[Any]]:
    """Call a function with symbols of its ``inputs``. Returns the program, and the arrays that it captured.

    A function of scores gives a float, one without a score (a mask) a bool. Errors name ``op``.
    """
    before = calling.set(op)
    try:
        return _traced(Tracer(work, framework, METHODS, OF_ARRAYS), function, inputs, name)
    finally:
        calling.reset(before)


def _traced(
    tracer: Tracer, function: Callable[..., Any], inputs: Sequence[str], name: str
) -> tuple[BoundFunction, list[Any]]:
    graph = tracer.graph
    check_arguments(function, inputs, name, calling.get())
    try:
        found = function(*(tracer.symbol(graph.input(x)) for x in inputs))
    except TypeError as error:  # an operation that symbols do not have, or other arguments of one that they have
        fail(str(error), f"functions may use {KNOWN}", line_of_error(error.__traceback__))
    _check_result(found, function, name)
    result = tracer.node(found)
    result = graph.cast(result, graph.work if "score" in inputs else "bool")
    return BoundFunction(graph.finish([result]), tuple(tracer.numbers)), tracer.arrays


def check_arguments(function: Any, inputs: Sequence[str], name: str, op: str) -> None:
    """Refuse what is no function of as many arguments as there are ``inputs``."""
    expected = f"a function of {len(inputs)} arguments ({', '.join(inputs)})"
    if not callable(function):
        got, remedy = type(function).__name__, "pass a function"
        if hasattr(function, "mask_mod"):
            remedy = "pass it as block_mask="
        raise InvalidArgumentError(f"[{op}] expected {name} as {expected}, got {got}; {remedy}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise InvalidArgumentError(
            f"[{op}] expected {name} as {expected}, got {signature} ({error}); give it these arguments"
        ) from None


def _check_result(found: Any, function: Any, name: str) -> None:
    single = isinstance(found, (bool, int, float)) or (hasattr(found, "shape") and not len(found.shape))
    if single:
        return
    code = getattr(function, "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    raise InvalidArgumentError(
        f"[{calling.get()}] expected {name} to return one number, got {described(found)}{line}; it is called for one "
        "score at a time: index captured arrays down to one number, and return the result"
    )
