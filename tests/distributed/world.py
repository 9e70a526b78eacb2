"""Groups of gloo processes for tests: started once for each number of ranks, then given one task after the other."""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from aule.distributed import compute, decode

TIME_LIMIT = 60.0
"""Seconds after which a group gives up."""
PATIENCE = 120.0
"""Seconds in which all processes must have started, which takes longest on a busy machine."""


def _serve(rank: int, ranks: int, store: str, limit: float, pipe: Any, lock: Any, started: Any) -> None:
    torch.set_num_threads(1)
    _compile_once(lock)
    started.wait(PATIENCE)  # the group's time limit begins when all are here
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=limit)
    )
    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionError):  # the test has ended
            return
        if task is None:
            break
        function, args = task
        try:
            pipe.send((True, function(*args)))
        except Exception as error:
            pipe.send((False, (error, traceback.format_exc())))
    dist.destroy_process_group()


_turn: Any = contextlib.nullcontext()


def in_turn() -> Any:
    """Ranks do what is inside one after the other: the first one compiles kernels, the others find them on the disk."""
    return _turn


def _compile_once(lock: Any) -> None:
    global _turn
    _turn = lock
    for place, name in ((compute, "_run"), (decode, "decode_here")):
        setattr(place, name, _taking_turns(getattr(place, name)))


def _taking_turns(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with in_turn():
            return function(*args, **kwargs)

    return call


class Failed(Exception):
    """A task raised an error on a rank."""


class World:
    """A group of processes. A task is a function of a module, called on every rank with the same arguments."""

    def __init__(self, ranks: int, limit: float = TIME_LIMIT) -> None:
        self.ranks, self._limit = ranks, limit
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        self._processes, self._pipes, self._lock = [], [], context.Lock()
        self._started, self._patience = context.Barrier(ranks), PATIENCE  # processes need the barrier while they start
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            shared = ranks, store, limit, theirs, self._lock, self._started
            process = context.Process(target=_serve, args=(rank, *shared), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """For each rank whether the task succeeded, and its result or (error, traceback)."""
        for pipe in self._pipes:
            pipe.send((function, args))
        found: list[tuple[bool, Any]] = []
        for pipe in self._pipes:
            try:
                alive = pipe.poll(self._patience + 2 * self._limit)
                found.append(pipe.recv() if alive else (False, (TimeoutError("no answer"), "")))
            except (EOFError, ConnectionError):
                found.append((False, (EOFError("the process has ended"), "")))
        self._patience = 0.0
        return found

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The task's result on each rank."""
        outcomes = self.outcomes(function, *args)
        for rank, (fine, found) in enumerate(outcomes):
            if not fine:
                raise Failed(f"rank {rank}: {found[0]}\n{found[1]}")
        return [found for _, found in outcomes]

    def errors(self, function: Callable[..., Any], *args: Any) -> list[Exception]:
        """The error of each rank, all of which must fail."""
        outcomes = self.outcomes(function, *args)
        assert not any(fine for fine, _ in outcomes), outcomes
        return [found[0] for _, found in outcomes]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(2)
            if process.is_alive():  # it waits for a rank that is lost
                process.kill()
        self._folder.cleanup()
