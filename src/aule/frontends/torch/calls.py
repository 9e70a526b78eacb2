"""Call: one call of an op on tensors, in the form that every route computes.

An op's file (`attention`, `varlen`, `decode`, `row_ops`, `kvcache`) makes a call of its arguments; the route of the
call's first tensor computes it. A new op needs a new call and no change to a route.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aule.engine.memory import MemorySource
from aule.engine.run import BoundCall, PreparedCall, prepare
from aule.frontends.torch.views import ViewOf
from aule.ops.shared.plan import Plan
from aule.runtime.base import Device
from aule.view import TensorView

Results = tuple[Tensor | None, ...]
ContentsCheck = Callable[[Sequence[Tensor]], None]
"""Raises if operands hold invalid numbers; takes a call's tensors in order."""
Overlap = Callable[[Sequence[Tensor]], bool]
"""Whether writing the result would overwrite operands; takes all tensors of a call in order."""


class Output(NamedTuple):
    """One result of a call.

    Attributes
    ----------
    strides : tuple of int or None
        None for a contiguous tensor.
    fill : float or None
        Value of all elements before the launches; None where kernels write every element.
    empty : float
        Value of all elements where there is nothing to launch.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    fill: float | None = None
    empty: float = 0.0


class Bound(NamedTuple):
    """A call that was checked: a problem, views of operands and results by buffer name, and the results."""

    problem: Hashable
    views: Mapping[str, TensorView]
    outputs: tuple[Output, ...]


class Call(ABC):
    """One call of an op.

    Attributes
    ----------
    op : str
        The public function, for messages.
    tensors : dict
        Operands by buffer name, the one that decides the route first.
    destinations : dict
        The caller's memory for results (``out=``, ``inplace=True``), by buffer name.
    option_key : tuple
        Everything else that decides the result, hashable.
    backend : str or None
        The backend that the caller asked for.
    results : tuple of str
        Buffer names of what `Route.compute` returns, in order; None is returned for those that are not made.
    repeat_key : hashable or None
        Key under which `repeated` remembers the call; None if it must not.
    """

    indices: tuple[str, ...] = ()
    """Operands that may be on the host while the others are on a device."""
    backward = False
    """Whether it computes gradients."""
    counted_as: str | None = None
    """The name in `aule.dispatch_stats`, if it is not that of the op."""

    __slots__ = ("backend", "destinations", "op", "option_key", "repeat_key", "results", "tensors")

    op: str
    tensors: dict[str, Tensor]
    destinations: dict[str, Tensor]
    option_key: tuple[Hashable, ...]
    backend: str | None
    results: tuple[str, ...]
    repeat_key: Hashable | None

    @property
    def first(self) -> Tensor:
        """The operand that decides the route."""
        return next(iter(self.tensors.values()))

    @abstractmethod
    def bind(self, view: ViewOf) -> Bound:
        """Check the call; done once per signature."""

    @abstractmethod
    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        """Plan for a device.

        Parameters
        ----------
        aligned : mapping
            Whether each tensor starts at a multiple of 16 bytes, by buffer name.
        """

    def prepare(
        self, bound: Bound, device: Device, memory: MemorySource | None, aligned: Mapping[str, bool]
    ) -> PreparedCall:
        """Plan and build for a device; ``memory`` is the source of workspace and scratch, None for the device."""
        plan = self.plan(bound, device, aligned)
        op, size = self.counted_as or self.op, 8 if getattr(bound.problem, "dtype", None) == "f64" else 4
        return prepare(plan, device, op=op, backward=self.backward, memory=memory, itemsize=size)

    def further_outputs(self) -> tuple[Output, ...]:
        """Results that are known only when the call is planned."""
        return ()

    @abstractmethod
    def host_device(self, foreign: bool) -> Device | None:
        """The device for tensors in host memory; None stands for NumPy. ``foreign`` ones were copied there."""

    @abstractmethod
    def through_host(self, device: Device | None) -> Results:
        """Compute CPU tensors by views: on NumPy, or on a device that the arrays are copied to."""

    @abstractmethod
    def with_tensors(self, tensors: dict[str, Tensor]) -> Call:
        """This call on other tensors, with results in fresh memory."""

    def placed(self, on_host: bool) -> Call:
        """The call with indices as int32 where kernels read them, and with the lengths that only the device knows."""
        return self

    def all_tensors(self) -> list[Tensor]:
        """The operands, then results in the caller's memory."""
        return [*self.tensors.values(), *self.destinations.values()]

    def overlap(self, on_host: bool) -> Overlap | None:
        """The check whether a result in the caller's memory would overwrite operands; None if it cannot."""
        return None

    def has_signature(self) -> bool:
        """Whether the CPU engine may reuse a plan for tensors of the same layout."""
        return True

    def contents_check(self, problem: Hashable) -> ContentsCheck | None:
        """The check of the contents of integer operands, made on every call in host memory; None if there is none.

        It takes tensors in host memory; those of a device are copied there if `settings.check_indices` asks for it.
        """
        return None


class Ready(NamedTuple):
    """A signature that was planned and loaded.

    Attributes
    ----------
    launch : BoundCall or None
        Takes the memory of operands, then of outputs; None if there is nothing to launch.
    outputs : tuple of Output
        All with strides.
    places : list or None
        Which output each result is, None for those that are not made; None if results are the outputs in order.
    check : callable or None
        The check of the contents of integer operands.
    """

    launch: BoundCall | None
    outputs: tuple[Output, ...]
    places: list[int | None] | None
    device: Device
    check: ContentsCheck | None = None
    overlap: Overlap | None = None

    def results(self, made: list[Tensor]) -> Results:
        """A call's outputs in the order in which it returns them."""
        if self.places is None:
            return tuple(made)
        return tuple([None if i is None else made[i] for i in self.places])
