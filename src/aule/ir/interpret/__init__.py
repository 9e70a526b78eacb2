"""Interpreter: runs any kernel on NumPy, with a sanitizer.

It is the reference when a backend disagrees, and reports errors that a device shows only sometimes: races, accesses out
of bounds or misaligned, reads of memory that was never written, barriers that not every thread reaches. Each report
names the line of Python that emitted the operation.

Operations are compiled to closures once. Then workgroups run in batches: all lanes of a batch run in lockstep, each as
one element of a NumPy array. Lanes that do not take a branch are masked: they neither write nor fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret import collective, fragments, roles, steps, tensor_copies, warpgroups
from aule.ir.interpret.lanes import SanitizerError
from aule.ir.interpret.machine import Machine
from aule.ir.kernel import KernelIR
from aule.ir.verify import verify_structure
from aule.target import FragmentLayout

__all__ = ["SanitizerError", "interpret"]

_COMPILERS = steps.COMPILERS | collective.COMPILERS | fragments.COMPILERS | warpgroups.COMPILERS | roles.COMPILERS
_COMPILERS |= tensor_copies.COMPILERS


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
        Must pass `verify`, except that barriers in divergent control flow are checked at run time instead.
    grid : tuple of int
        Workgroups along the three axes.
    args : sequence
        One argument per parameter: contiguous arrays of the buffer's element type (bf16 as ``uint16`` bits or
        ``ml_dtypes.bfloat16``) and numbers.
    subgroup_size : int, optional
        Lanes per subgroup; by default the kernel's own, or 32 if it has none.
    sanitize : bool
        Check for races and for reads of memory that was never written. Bounds, alignment and divergence are always
        checked.
    layouts : mapping, optional
        Layout of fragments over a subgroup by use ("a", "b", "accumulator"); row-major if missing.

    Raises
    ------
    SanitizerError
        The kernel has undefined behaviour; the message names the thread, the operation and the line of Python.
    KernelError
        The kernel breaks a rule, the arguments do not fit, or an operation is an intrinsic of one language.
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
