"""Calls that exchange messages, outside of the graphs of torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from aule.frontends.torch.modes import read_by_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark a function that no graph may hold, because it exchanges messages with other processes."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if read_by_dynamo():
            from aule.frontends.torch.compile import dynamo  # imports the compiler

            found: _T = dynamo.call_outside(function, *args, **kwargs)
            return found
        return function(*args, **kwargs)

    return call
