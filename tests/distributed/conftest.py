"""Worlds of processes for the tests of this folder, each started when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

from world import World


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """A function that gives the world with a number of ranks."""
    made: dict[int, World] = {}

    def get(ranks: int) -> World:
        if ranks not in made:
            made[ranks] = World(ranks)
        return made[ranks]

    yield get
    for world in made.values():
        world.close()
