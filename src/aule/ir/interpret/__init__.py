"""The interpreter: any kernel on NumPy, with a sanitizer.

It is the oracle when a backend disagrees, and finds what a device would only sometimes stumble over: races, accesses
out of bounds or misaligned, reads of memory that was never written, barriers that not every thread reaches. Each report
names the line of Python that emitted the operation.

Operations are compiled to closures once; then workgroups run in batches, every lane of a batch in lockstep as one
element of a NumPy array. Lanes that do not take a branch are masked: they neither write nor fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret import collective, fragments, steps, warpgroups
from aule.ir.interpret.lanes import SanitizerError
from aule.ir.interpret.machine import Machine
from aule.ir.kernel import KernelIR
from aule.ir.verify import verify_structure
from aule.target import FragmentLayout

__all__ = ["SanitizerError", "interpret"]

_COMPILERS = steps.COMPILERS | collective.COMPILERS | fragments.COMPILERS | warpgroups.COMPILERS


def interpret(
    kernel: KernelIR,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    *,
    subgroup_size: int | None = None,
    sanitize: bool = True,
    layouts: Mapping[str, FragmentLayout] | None = None,
) -> None:
    """Run a kernel on NumPy arrays, which it changes in place.

    Parameters
    ----------
    kernel : KernelIR
        Must pass `verify`; only the rule about barriers in divergent control flow is checked while running instead.
    grid : tuple of int
        Workgroups along the three axes.
    args : sequence
        One argument per parameter: contiguous arrays of the buffer's element type (bf16 as ``uint16`` bits or
        ``ml_dtypes.bfloat16``) and numbers.
    subgroup_size : int, optional
        Lanes of a subgroup; the kernel's own by default, 32 when it has none.
    sanitize : bool
        Look for races and for reads of memory that was never written. Bounds, alignment and divergence are checked
        in any case.
    layouts : mapping, optional
        How fragments lie over a subgroup, by their use ("a", "b", "accumulator"); those that are missing lie row by
        row.

    Raises
    ------
    SanitizerError
        The kernel did something that is not defined; the message says which thread did what in which line.
    KernelError
        The kernel breaks a rule, the arguments do not fit, or an operation exists in one language only.
    """
    verify_structure(kernel)
    size = subgroup_size or kernel.subgroup_size or 32
    if kernel.subgroup_size not in (0, size):
        raise KernelError(f"kernel {kernel.name}: written for subgroups of {kernel.subgroup_size}, got {size}")
    if len(grid) != 3 or any(n < 0 for n in grid):
        raise KernelError(f"kernel {kernel.name}: expected a grid of three numbers, got {grid}")
    if len(args) != len(kernel.params):
        names = ", ".join(p.name for p in kernel.params)
        raise KernelError(f"kernel {kernel.name}: expected {len(kernel.params)} arguments ({names}), got {len(args)}")
    if all(grid):
        with np.errstate(all="ignore"):
            Machine(kernel, grid, size, sanitize, _COMPILERS, layouts or {}).run(args)
