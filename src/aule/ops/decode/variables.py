"""Lists of a kernel's variables."""

from __future__ import annotations

from collections.abc import Sequence

from aule.ir import Value, Var


def values(variables: Sequence[Var]) -> list[Value]:
    """Current values of variables."""
    return [x.value for x in variables]


def assign(variables: Sequence[Var], values: Sequence[Value]) -> None:
    """Set variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.value = value
