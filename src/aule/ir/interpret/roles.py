"""Interpreted roles: crews of a workgroup that run side by side, and the mbarriers at which they wait.

Each crew runs in a thread of its own, but only one at a time: a crew goes on until it waits for an mbarrier whose phase
lasts, and then the next one has its turn. If none can go on, the kernel would hang on a device, which is reported.
"""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret.machine import Compiler, Machine, Step, run
from aule.ir.interpret.numbers import Array
from aule.ir.interpret.order import Phases
from aule.ir.kernel import Op


class _Ended(BaseException):
    """Ends the thread of a crew after an error of another one."""


class Crew:
    """A crew: its threads, and its state while another one runs."""

    def __init__(self, m: Machine, op: Op, members: Array, body: list[Step]) -> None:
        self.m, self.members, self.body = m, members, body
        self.registers = list(m.registers)
        self.copies: list[list[Step]] = [[]]
        self.products: list[list[Any]] = [[]]
        self.mask: Array | None = members
        self.turn, self.yields = threading.Semaphore(0), threading.Semaphore(0)
        self.waiting: tuple[Op, Phases, int] | None = None
        self.error: BaseException | None = None
        self.ended = self.cancelled = False
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.cancelled:
                self._enter()
                run(self.body)
        except _Ended:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self.yields.release()

    def _enter(self) -> None:
        m = self.m
        m.registers[:] = self.registers
        m.copies, m.products, m.crew = self.copies, self.products, self
        m.lanes.crew = self.members
        m.lanes.enter(self.mask)

    def wait(self, op: Op, barrier: Phases, parity: int) -> None:
        """Let other crews run until a phase of an mbarrier has ended."""
        m = self.m
        while not barrier.has_ended(parity):
            self.registers, self.copies, self.products = list(m.registers), m.copies, m.products
            self.mask = m.lanes.mask
            self.waiting = op, barrier, parity
            self.yields.release()
            self.turn.acquire()
            if self.cancelled:
                raise _Ended
            self._enter()
        self.waiting = None

    @property
    def ready(self) -> bool:
        """Whether the crew can go on."""
        return self.waiting is None or self.waiting[1].has_ended(self.waiting[2])

    def go(self) -> None:
        """Run until the crew waits or ends."""
        self.turn.release()
        self.yields.acquire()

    def cancel(self) -> None:
        """End the crew's thread."""
        if not self.ended:
            self.cancelled = True
            self.go()
        self.thread.join()


def _roles(m: Machine, op: Op) -> Step:
    lanes = m.lanes
    if lanes.groups != 1 or lanes.workgroup % lanes.subgroup_size:
        raise KernelError(f"kernel {m.kernel.name}: expected one workgroup of full subgroups at a time ({op.where})")
    bodies = [m.block(block) for block in op.blocks]
    places: list[tuple[Array, list[Step]]] = []
    first = 0
    for role, body in zip(op.attrs["roles"], bodies, strict=True):
        for _ in range(role.crews):
            subgroup = np.arange(lanes.workgroup) // lanes.subgroup_size
            places.append(((subgroup >= first) & (subgroup < first + role.subgroups), body))
            first += role.subgroups

    def step() -> None:
        lanes.full_groups(op)
        outer, registers = lanes.mask, list(m.registers)
        copies, products = m.copies, m.products
        crews = [Crew(m, op, members, body) for members, body in places]
        for crew in crews:
            crew.thread.start()
        try:
            while running := [crew for crew in crews if not crew.ended]:
                ready = [crew for crew in running if crew.ready]
                if not ready:
                    raise _hangs(m, running)
                for crew in ready:
                    crew.go()
                    if crew.error is not None:
                        raise crew.error
        finally:
            for crew in crews:
                crew.cancel()
            m.registers[:] = registers
            m.copies, m.products, m.crew, lanes.crew = copies, products, None, None
            lanes.enter(outer)

    return step


def _hangs(m: Machine, crews: list[Crew]) -> Exception:
    """The error for crews that all wait."""
    parts = []
    for crew in crews:
        assert crew.waiting is not None
        op, barrier, _ = crew.waiting
        who = m.lanes.who(int(np.flatnonzero(crew.members)[0]))
        parts.append(f"{who} waits for {barrier.missing()} in {m.lanes.site(op)}")
    return m.lanes.hang("; ".join(parts))


COMPILERS: dict[str, Compiler] = {"roles": _roles}
