"""launch: run a kernel of your own on arrays, and a decorator that makes such kernels."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from aule.artifact import SCALAR_FORMATS
from aule.backends import registry
from aule.dtypes import KERNEL_NAMES, dtype_name, either, usual_name
from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.frontends import front_end
from aule.ir import Builder, KernelIR
from aule.ir import types as ir_types

__all__ = ["Kernel", "kernel", "launch"]

_ACCESS = ("read", "write", "readwrite")
_TYPES = tuple(name for name in KERNEL_NAMES if name not in ("bool", "float8_e4m3fn"))
"""Element types of buffers."""


class Kernel:
    """A kernel whose buffers take the element types of the arrays it is launched with; made by `kernel`.

    Parameters
    ----------
    function : callable
        Called with a `aule.ir.Builder` and a value for each parameter to trace the kernel.
    workgroup : int
        Threads per workgroup.
    parameters : dict
        For each parameter ``"read"``, ``"write"`` or ``"readwrite"`` for a buffer, else the type of a scalar.
    subgroup_size : int
        Subgroup size that the kernel relies on; 0 if any will do.
    """

    def __init__(
        self, function: Callable[..., None], workgroup: int, parameters: dict[str, str], subgroup_size: int = 0
    ) -> None:
        self.name = function.__name__
        self.workgroup = workgroup
        self.parameters = parameters
        self._function = function
        self._subgroup_size = subgroup_size
        self._traced: dict[tuple[str, ...], KernelIR] = {}
        self.__doc__ = function.__doc__
        names = list(inspect.signature(function).parameters)[1:]
        if names != list(parameters):
            raise InvalidArgumentError(
                f"[kernel] {self.name} expected parameters {', '.join(names) or 'none'} as in its function, got "
                f"{', '.join(parameters) or 'none'}; name each once, in order"
            )
        for name, kind in parameters.items():
            if kind not in _ACCESS and _kernel_name(kind) not in SCALAR_FORMATS:
                raise InvalidArgumentError(
                    f"[kernel] {self.name} expected {name} to be 'read', 'write', 'readwrite' or the type of a scalar "
                    f"({', '.join(map(usual_name, SCALAR_FORMATS))}), got {kind!r}; choose one"
                )

    def trace(self, *elements: str) -> KernelIR:
        """Trace the kernel for buffers of these element types, one for each in order (``"float32"`` ...)."""
        buffers = [name for name, kind in self.parameters.items() if kind in _ACCESS]
        if len(elements) != len(buffers) or not all(dtype_name(name) in _TYPES for name in elements):
            raise InvalidArgumentError(
                f"[kernel] {self.name} expected the element types of {', '.join(buffers)}, got {elements}; pass names "
                f"such as {', '.join(_TYPES)}"
            )
        key = tuple(map(_kernel_name, elements))
        if key not in self._traced:
            self._traced[key] = self._trace(dict(zip(buffers, key, strict=True)))
        return self._traced[key]

    def _trace(self, elements: dict[str, str]) -> KernelIR:
        b = Builder(self.name, self.workgroup, self._subgroup_size)
        values = []
        for name, kind in self.parameters.items():
            if kind in _ACCESS:
                values.append(b.buffer(name, getattr(ir_types, elements[name]), kind))  # type: ignore[arg-type]
            else:
                values.append(b.scalar(name, getattr(ir_types, _kernel_name(kind))))
        self._function(b, *values)
        return b.finish()

    def __repr__(self) -> str:
        return f"<aule kernel {self.name}({', '.join(f'{n}: {k}' for n, k in self.parameters.items())})>"


def kernel(*, workgroup: int, subgroup_size: int = 0, **parameters: str) -> Callable[[Callable[..., None]], Kernel]:
    """Make a kernel of a function, to be launched with `launch`.

    Parameters
    ----------
    workgroup : int
        Threads per workgroup.
    subgroup_size : int
        Subgroup size that the kernel relies on; 0 if any will do.
    **parameters : str
        For each parameter of the function after the builder, in order: ``"read"``, ``"write"`` or ``"readwrite"`` for a
        buffer, whose element type is that of the array it is launched with, else the type of a scalar (``"int32"``,
        ``"float32"`` ...).

    Returns
    -------
    callable
        A decorator that returns a `Kernel`.

    Examples
    --------
    >>> import numpy as np
    >>> import aule
    >>> @aule.kernel(workgroup=64, source="read", out="write", n="int32")
    ... def double(b, source, out, n):
    ...     i = b.group_id() * 64 + b.thread_id()
    ...     with b.if_(i < n):
    ...         b.store(out, i, b.load(source, i) * 2)
    >>> x = np.arange(100, dtype=np.float32)
    >>> y = np.empty_like(x)
    >>> aule.launch(double, 2, x, y, 100)
    """
    return lambda function: Kernel(function, workgroup, parameters, subgroup_size)


def launch(kernel: KernelIR | Kernel, grid: int | Sequence[int], *args: Any, backend: str | None = None) -> None:
    """Run a kernel on arrays, which it changes in place.

    Parameters
    ----------
    kernel : Kernel or KernelIR
        From the decorator `aule.kernel`, or from ``Builder.finish()``.
    grid : int or sequence of int
        Number of workgroups along up to three axes.
    *args
        One for each parameter: NumPy arrays or torch tensors, C-contiguous and of the buffer's element type, and
        numbers. Arrays must not overlap where one of them is written. Gradients are not recorded.
    backend : str, optional
        As in `aule.flash_attention`; ``"numpy"`` interprets the kernel. CUDA tensors are used in place, on the current
        stream; the call does not wait for them. Arrays in host memory go to the best device, and are finished on
        return.

    Raises
    ------
    KernelError
        The kernel breaks a rule of the language, or needs what the device lacks.
    InvalidArgumentError
        The arguments do not fit the parameters.
    """
    if not isinstance(kernel, KernelIR | Kernel):
        raise InvalidArgumentError(
            f"[launch] expected a kernel, got {type(kernel).__name__}; pass a function with the decorator aule.kernel, "
            "or what Builder.finish() returns"
        )
    names = list(kernel.parameters) if isinstance(kernel, Kernel) else [param.name for param in kernel.params]
    if len(args) != len(names):
        raise InvalidArgumentError(
            f"[launch] {kernel.name} expected {len(names)} arguments ({', '.join(names)}), got {len(args)}; pass one "
            "for each parameter, in order"
        )
    arrays = [arg for arg in args if hasattr(arg, "shape") and hasattr(arg, "dtype") and len(arg.shape)]
    if not arrays:
        raise InvalidArgumentError(f"[launch] {kernel.name} expected an array to write to, got none; pass one")
    axes, wanted = checked_grid(grid), registry.requested_backend(backend)
    if isinstance(kernel, Kernel):
        for (name, kind), arg in zip(kernel.parameters.items(), args, strict=True):
            if kind in _ACCESS and dtype_name(element_name(arg)) not in _TYPES:
                raise InvalidDtypeError(
                    f"[launch] {kernel.name} expected an array of numbers that kernels know for {name}, got "
                    f"{element_name(arg)}; pass one of {either(_TYPES)}"
                )
        kinds = zip(kernel.parameters.values(), args, strict=True)
        kernel = kernel.trace(*(element_name(arg) for kind, arg in kinds if kind in _ACCESS))
    front_end(arrays[0], "launch").launch(kernel, axes, args, wanted)


def checked_grid(grid: int | Sequence[int]) -> tuple[int, int, int]:
    """Return a grid of three axes."""
    try:
        axes = tuple(map(operator.index, grid)) if isinstance(grid, Sequence) else (operator.index(grid),)
    except TypeError:
        axes = ()
    if not 1 <= len(axes) <= 3 or min(axes) < 0:
        raise InvalidArgumentError(
            f"[launch] expected a grid of one to three numbers of workgroups, got {grid!r}; pass 4 or (4, 2)"
        )
    x, y, z = (*axes, 1, 1)[:3]
    return x, y, z


def _kernel_name(dtype: object) -> str:
    return KERNEL_NAMES.get(dtype_name(dtype) or "", "")


def element_name(array: Any) -> str:
    """Return the name of an array's element type, without the framework's own prefix."""
    return str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")
