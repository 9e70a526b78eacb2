"""Applies the score modifiers to vectors of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from aule.ir import Value, Var
from aule.ops.scores import modifiers as mod
from aule.ops.scores.band import Scores
from aule.ops.scores.config import Columns
from aule.tile.vector.engine import Vectors


def modify(
    scores: Scores,
    engine: Vectors,
    c: list[list[Var]],
    queries: Sequence[tuple[Value, Value]],
    key: Value,
    partial: Value,
    kinds: dict[str, Columns],
    after_softcap: Callable[[list[list[Var]]], None] | None = None,
) -> None:
    """Apply the modifiers to vectors of scores ``c`` of some rows with the keys from ``key`` on, in place.

    ``queries`` are query head and query row of each row, ``kinds`` the layouts of mask and bias along a row. Keys may
    be outside of some row's band only if ``partial``. ``after_softcap`` is called with the scores after the softcap.
    """
    b = scores.b
    columns = [engine.lane_numbers(key + j * engine.lanes) for j in range(len(c[0]))]
    chains = [scores.modifiers(head, kinds) for head, _ in queries]

    def apply(number: int) -> None:
        for (head, row), chain, variables in zip(queries, chains, c, strict=True):
            for variable, column in zip(variables, columns, strict=True):
                site = mod.Site(scores.batch, head, row, column, row + scores.shift)
                variable.value = chain[number].apply(b, variable.value, site)

    for number, modifier in enumerate(chains[0]):
        with nullcontext() if modifier.everywhere else b.if_(partial):
            apply(number)
        if number == 0 and scores.config.softcap and after_softcap is not None:
            after_softcap(c)
