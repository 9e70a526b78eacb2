"""A call of an op like one before, on CPU tensors: from one look-up and one question of PyTorch's to the launches.

Behind another operator, which has used the caches for its tensors, a call of ours finds none of its Python there: 120
functions of it took a quarter of a millisecond where they take 0.02 if repeated at once (Zen 4). What is left here are
some twenty. `aule.frontends.torch_repeated` says how PyTorch is asked whether a call is like another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aule import settings
from aule.engine import cpu
from aule.frontends.torch_repeated import reliable, same_as
from aule.view import contiguous_strides

_dispatch_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty: Any = getattr(_guards, "_empty_strided_cpu", None)
_MOST = 4096
_PATIENCE = 8
"""Other calls with the same key after which the last of them is remembered instead, which takes as long as many."""

_calls: dict[Any, RepeatedOnHost] = {}


class RepeatedOnHost:
    """Launches with everything fixed but memory, for operands like these.

    Parameters
    ----------
    tensors : sequence
        The operands, with None for those that are not there.
    names : sequence of str
        Of the operands.
    ready : Ready
        The launches.
    device : Device
        The CPU.
    outputs : sequence of tuple
        Name, dtype, shape and strides of each result, which goes to fresh memory.
    results : sequence of str
        Names of all that is returned; what is not among the outputs is None.
    check : callable, optional
        Called with the operands of every call: raises where they hold what they must not.
    """

    __slots__ = (
        "_absent", "_check", "_device", "_differentiable", "_outputs", "_ready", "_results", "_same", "others",
    )  # fmt: skip

    def __init__(
        self,
        tensors: Sequence[Any],
        names: Sequence[str],
        ready: cpu.Ready,
        device: Any,
        outputs: Sequence[tuple[str, Any, tuple[int, ...], tuple[int, ...] | None]],
        results: Sequence[str],
        check: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        self._device, self._check, self.others = device, check, 0
        self._absent = [x is None for x in tensors]
        self._differentiable = any(x is not None and x.requires_grad for x in tensors)
        given = [name for name, x in zip(names, tensors, strict=True) if x is not None]
        self._ready = cpu.Ordered(ready, device, (*given, *(name for name, *_ in outputs)))
        self._same = same_as(*(x for x in tensors if x is not None))
        self._outputs = [(shape, strides or contiguous_strides(shape), dtype) for _, dtype, shape, strides in outputs]
        places = {name: len(given) + i for i, (name, *_) in enumerate(outputs)}
        self._results = [places.get(name) for name in results]

    @property
    def closed(self) -> bool:
        """Whether it will never run again."""
        return bool(self._device.closed)

    def __call__(self, tensors: Sequence[Any]) -> tuple[Any, ...] | None:
        """The results, or None if this is another call: nothing has been done then. There are no modes (`repeated`)."""
        memory = [x for x in tensors if x is not None]
        if (
            [x is None for x in tensors] != self._absent
            or not self._same(*memory)
            or _forward_ad._current_level >= 0
            or (self._differentiable and _grad_enabled())
            or self._device.closed
        ):
            return None
        if self._check is not None:
            self._check(tensors)
        self.others = 0
        for output in self._outputs:
            memory.append(_empty(*output))
        self._ready.run([x.data_ptr() for x in memory])
        return tuple([None if i is None else memory[i] for i in self._results])


def repeated(
    name: str, wanted: tuple[str, ...], options: Sequence[Any], backend: str | None, tensors: Sequence[Any]
) -> tuple[Any, ...] | None:
    """The results of a call that is like a remembered one, and None for any other."""
    # Others have their own ways, and are not to pay for a look-up that finds nothing; with modes sizes may be unknown.
    if not tensors[0].is_cpu or _dispatch_modes():
        return None
    try:
        found = _calls.get(_key(name, wanted, options, backend, tensors[0]))
    except (TypeError, ValueError, RuntimeError):  # no key; the longer way says what is wrong
        return None
    return None if found is None else found(tensors)


def remember(
    name: str, wanted: tuple[str, ...], options: Sequence[Any], backend: str | None, tensors: Sequence[Any], *call: Any
) -> None:
    """Remember a call; what else is told of it are the further parameters of `RepeatedOnHost`."""
    key = _key(name, wanted, options, backend, tensors[0])
    found = _calls.get(key)
    if found is not None and found.others < _PATIENCE and not found.closed:
        found.others += 1
        return
    given = [id(x) for x in tensors if x is not None]
    if _empty is None or not reliable() or len(set(given)) < len(given):  # PyTorch refuses the same tensor twice
        return
    if len(_calls) >= _MOST:
        _calls.clear()
    _calls[key] = RepeatedOnHost(tensors, *call)


def _key(name: str, wanted: tuple[str, ...], options: Sequence[Any], backend: str | None, first: Any) -> Any:
    return name, wanted, options, backend or settings.backend(), first.shape, first.dtype


def forget() -> None:
    """Let all calls be new ones."""
    _calls.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)  # a forked child finds its own devices
