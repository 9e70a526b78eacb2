"""Rows of variables that are read and assigned together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aule.ir import Value, Var


def read_vars(variables: Iterable[Sequence[Var]]) -> list[list[Value]]:
    """The values of variables, row by row."""
    return [[variable.value for variable in row] for row in variables]


def assign_vars(variables: Sequence[Sequence[Var]], values: Sequence[Sequence[Value]]) -> None:
    """Assign values to variables, row by row."""
    for row, new in zip(variables, values, strict=True):
        for variable, value in zip(row, new, strict=True):
            variable.value = value
