"""Runs the score modifiers over vectors of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aule.ir import Value, Var
from aule.ops.attention import modifiers as mod
from aule.ops.attention.config import Columns
from aule.ops.attention.scores import Scores
from aule.tile.vector import Vectors


def modify(
    scores: Scores,
    engine: Vectors,
    c: list[list[Var]],
    places: Sequence[tuple[Value, Value]],
    key: Value,
    partial: Value,
    kinds: dict[str, Columns],
    after_softcap: Callable[[list[list[Var]]], None] | None = None,
) -> None:
    """Run the modifiers over the scores of some rows with the keys from ``key`` on.

    Parameters
    ----------
    c : list of list of Var
        Vectors of scores, row by row; changed in place.
    places : sequence
        Query head and query row of each row.
    partial : Value
        Whether some of the keys are out of the band for some row.
    kinds : dict
        How mask and bias run along a row.
    after_softcap : callable, optional
        Sees the scores as the softcap leaves them.
    """
    b = scores.b
    columns = [engine.count(key + j * engine.lanes) for j in range(len(c[0]))]
    chains = [scores.modifiers(head, kinds) for head, _ in places]

    def apply(number: int) -> None:
        for (head, row), chain, variables in zip(places, chains, c, strict=True):
            for variable, column in zip(variables, columns, strict=True):
                site = mod.Site(scores.batch, head, row, column, row + scores.shift)
                variable.value = chain[number].apply(b, variable.value, site)

    for number, modifier in enumerate(chains[0]):
        if modifier.everywhere:
            apply(number)
        else:
            with b.if_(partial):
                apply(number)
        if number == 0 and scores.config.softcap and after_softcap is not None:
            after_softcap(c)
