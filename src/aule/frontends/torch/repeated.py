"""Repeated calls: one look-up and one comparison in C++, then the launches.

Checking every tensor and PyTorch's state in Python takes longer than the launch. The guards of PyTorch's compiler
compare most of it with an earlier call in one C++ function: type, dtype, device, shape, strides, requires_grad, and
every transform, autocast or mode that handles operators. What they do not see is compared here. They are private to
PyTorch, so `reliable` tests them first; without them no call is repeated.

Attention, decoding and row operations come here first, with the key under which their route remembered a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from aule import settings
from aule.engine import observe
from aule.engine.signatures import Signatures
from aule.frontends.torch.calls import Call, Ready, Results
from aule.frontends.torch.modes import profiler
from aule.frontends.torch.views import written

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)
_empty_cpu: Any = getattr(_guards, "_empty_strided_cpu", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
_autocast_dtype = torch.get_autocast_dtype
_forward_ad = torch.autograd.forward_ad
_chosen, _checks_indices = settings.backend, settings.check_indices
_caller = observe.caller.get
_MISSES_BEFORE_REPLACEMENT = 8
"""Misses of a remembered call before another call with its key and shapes replaces it: preparing one takes long."""

_calls = Signatures()
"""Repeated calls by key and shapes."""
_groups = Signatures()
"""The last repeated call by key."""


class _Group:
    """Repeated calls with one key, of which the last is tried first."""

    __slots__ = ("last",)

    def __init__(self, last: Repeated) -> None:
        self.last = last

    def other(self, key: Hashable, tensors: Sequence[Tensor]) -> Results | None:
        """The results of a call like a remembered one other than the last."""
        try:
            found: Repeated | None = _calls.get(_with_shapes(key, tensors))
        except (TypeError, ValueError, RuntimeError):  # sizes that are unknown, or of a nested tensor
            return None
        results = None if found is None or found is self.last else found(tensors)
        if found is not None and results is not None:
            self.last = found
        return results


class Repeated(ABC):
    """A call with everything fixed but memory and stream.

    Its parameters are an earlier call, the launches of that call and all its tensors.
    """

    __slots__ = (
        "_autocast", "_backend", "_check", "_count", "_differentiable", "_in_order", "_launch", "_outputs", "_overlap",
        "_ranged", "_results", "_same", "_sources", "_tally", "misses",
    )  # fmt: skip

    def __init__(self, call: Call, ready: Ready, tensors: Sequence[Tensor]) -> None:
        assert ready.launch is not None
        self._launch, self._ranged, self._tally = ready.launch.start, ready.launch, ready.launch.tally
        if settings.nvtx():
            self._launch = ready.launch
        self._check, self._overlap = ready.check, ready.overlap
        self._in_order, self._results = ready.places is None, ready.results
        self._count, self.misses = len(call.tensors), 0
        self._same = same_as(*tensors)
        self._differentiable = any(x.requires_grad for x in tensors)
        self._backend = _chosen()
        kind = tensors[0].device.type
        self._autocast = (kind, _autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self._outputs = [(x.shape, x.strides, x.dtype) for x in ready.outputs]
        # For each output the number of the caller's tensor that it goes to, or None, and the value that fills it first.
        self._sources: list[tuple[int | None, float | None]] | None = None
        if call.destinations or any(x.fill is not None for x in ready.outputs):
            places = {id(x): i for i, x in enumerate(tensors)}
            given = (call.destinations.get(x.name) for x in ready.outputs)
            homes = [None if x is None else places[id(x)] for x in given]
            self._sources = [(home, x.fill) for home, x in zip(homes, ready.outputs, strict=True)]

    @abstractmethod
    def __call__(self, tensors: Sequence[Tensor]) -> Results | None:
        """The results; None, without side effects, if the call differs from the earlier one."""

    def _other_state(self) -> bool:
        """Whether state differs from that of the earlier call and PyTorch's guards do not see it.

        It is forward-mode differentiation, gradients that were off, another dtype of autocast, another backend in the
        environment. `repeat` has excluded dispatch modes.
        """
        return (
            _forward_ad._current_level >= 0
            or (self._differentiable and _grad_enabled())
            or _chosen() != self._backend
            or (self._autocast is not None and _autocast_dtype(self._autocast[0]) is not self._autocast[1])
        )

    def _result_memory(self, tensors: Sequence[Tensor], empty: Callable[..., Tensor]) -> list[Tensor]:
        """Memory of the results, if some is the caller's or must be filled before the launches."""
        assert self._sources is not None
        made = []
        for (home, fill), output in zip(self._sources, self._outputs, strict=True):
            if home is not None:
                made.append(written(tensors[home]))
            else:
                made.append(empty(*output) if fill is None else empty(*output).fill_(fill))
        return made


class OnHost(Repeated):
    """A repeated call on CPU tensors."""

    __slots__ = ()

    @staticmethod
    def possible(tensors: Sequence[Tensor]) -> bool:
        return _empty_cpu is not None

    def __call__(self, tensors: Sequence[Tensor]) -> Results | None:
        if (
            _nested(tensors)
            or not self._same(*tensors)
            or self._other_state()
            or (self._overlap is not None and self._overlap(tensors))
        ):
            return None
        if self._check is not None:
            self._check(tensors)
        self.misses = 0
        try:
            if self._sources is None:
                made = [_empty_cpu(*output) for output in self._outputs]
            else:
                made = self._result_memory(tensors, _empty_cpu)
                tensors = tensors[: self._count]
        except RuntimeError:  # no memory: the route says how much
            return None
        launch = self._ranged if profiler._is_profiler_enabled else self._launch
        launch([x.data_ptr() for x in (*tensors, *made)], None)
        self._tally[_caller()] += 1
        return tuple(made) if self._in_order else self._results(made)


class OnCuda(Repeated):
    """A repeated call on CUDA tensors that start at multiples of 16 bytes, on the current device and stream."""

    __slots__ = ("_alone", "_index")

    def __init__(self, call: Call, ready: Ready, tensors: Sequence[Tensor]) -> None:
        super().__init__(call, ready, tensors)
        self._index = tensors[0].get_device()
        self._alone = torch.cuda.device_count() == 1

    @staticmethod
    def possible(tensors: Sequence[Tensor]) -> bool:
        there = _empty_cuda is not None and _current_device is not None and _raw_stream is not None
        return there and not reduce(or_, [x.data_ptr() for x in tensors]) & 15

    def __call__(self, tensors: Sequence[Tensor]) -> Results | None:
        if (
            _nested(tensors)
            or not self._same(*tensors)
            or self._other_state()
            or (self._check is not None and _checks_indices())
            or (self._overlap is not None and self._overlap(tensors))
        ):
            return None
        memory = [x.data_ptr() for x in tensors]
        if reduce(or_, memory) & 15 or not (self._alone or _current_device() == self._index):
            return None
        self.misses = 0
        if self._sources is None:
            made = [_empty_cuda(*output) for output in self._outputs]  # on the current device
        else:
            made = self._result_memory(tensors, _empty_cuda)
            del memory[self._count :]
        for x in made:
            memory.append(x.data_ptr())
        (self._ranged if profiler._is_profiler_enabled else self._launch)(memory, _raw_stream(self._index))
        self._tally[_caller()] += 1
        return tuple(made) if self._in_order else self._results(made)


class PlainOnCuda(OnCuda):
    """A repeated call with three operands of floats and one result, as most calls of attention, without loops."""

    __slots__ = ()

    def __call__(self, tensors: Sequence[Tensor]) -> Results | None:
        q, k, v = tensors
        try:
            nested = q.is_nested or k.is_nested or v.is_nested
        except AttributeError:  # not a tensor
            return None
        if nested or not self._same(q, k, v) or self._other_state():
            return None
        memory = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (memory[0] | memory[1] | memory[2]) & 15 or not (self._alone or _current_device() == self._index):
            return None
        self.misses = 0
        out = _empty_cuda(*self._outputs[0])
        launch = self._ranged if profiler._is_profiler_enabled else self._launch
        launch((*memory, out.data_ptr()), _raw_stream(self._index))
        self._tally[_caller()] += 1
        return (out,)


def _nested(tensors: Sequence[Tensor]) -> bool:
    """Whether an argument is a nested tensor, for which PyTorch's guards would end the process, or no tensor."""
    try:
        for x in tensors:
            if x.is_nested:
                return True
    except AttributeError:
        return True
    return False


def repeat(key: Hashable, tensors: Sequence[Tensor]) -> Results | None:
    """The results of a call like a remembered one; None, without side effects, for any other."""
    if _dispatch_modes():  # sizes may be unknown
        return None
    try:
        group: _Group | None = _groups.get(key)
    except TypeError:  # not hashable; the check of the call says what is wrong
        return None
    if group is None:
        return None
    found = group.last(tensors)
    return group.other(key, tensors) if found is None else found


def remember(kind: type[OnHost | OnCuda], call: Call, ready: Ready, tensors: Sequence[Tensor]) -> None:
    """Remember a call, unless another with its key and shapes is repeated more often."""
    key = _with_shapes(call.repeat_key, tensors)
    found: Repeated | None = _calls.get(key)
    if found is not None and found.misses < _MISSES_BEFORE_REPLACEMENT:
        found.misses += 1
        return
    if kind.possible(tensors) and reliable():
        plain = len(tensors) == 3 and len(call.results) == len(ready.outputs) == 1
        plain = plain and not call.destinations and ready.check is None
        if plain and kind is OnCuda:
            kind = PlainOnCuda
        made = _calls.put(key, kind(call, ready, tensors), ready.device)
        _groups.put(call.repeat_key, _Group(made), ready.device)


def _with_shapes(key: Hashable, tensors: Sequence[Tensor]) -> Hashable:
    return (key, getattr(tensors[0], "dtype", None), *[getattr(x, "shape", None) for x in tensors])


def forget() -> None:
    """Forget all remembered calls."""
    _calls.clear()
    _groups.clear()


# -- PyTorch's guards --------------------------------------------------------------------------------------------------


def same_as(*tensors: Tensor) -> Callable[..., bool]:
    """A function that compares other tensors and PyTorch's state with these tensors and the present state."""
    first = {id(x): i for i, x in reversed(list(enumerate(tensors)))}
    if len(first) < len(tensors):  # PyTorch's guards refuse a tensor that is given twice
        firsts = [first[id(x)] for x in tensors]
        distinct = same_as(*(x for i, x in enumerate(tensors) if firsts[i] == i))

        def same(*others: Tensor) -> bool:
            one = all(x is others[i] for x, i in zip(others, firsts, strict=True))
            return one and distinct(*(x for i, x in enumerate(others) if firsts[i] == i))

        return same
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guards = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check  # type: ignore[no-any-return]


@cache
def reliable() -> bool:
    """Whether PyTorch's guards distinguish all that matters here.

    They are tested in a thread of their own, where PyTorch's state is the usual one: the first call of a process may be
    made in inference mode or under autocast.
    """
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_distinguish).result()
    except RuntimeError:  # the interpreter ends, and starts no threads
        return False


def _distinguish() -> bool:
    x = torch.empty(2, 3, dtype=torch.float32, device="cpu")  # PyTorch's defaults may be others
    y, transposed = torch.empty_like(x), x.new_empty(3, 2).T
    others = [x[:1], x[None], transposed, x.double(), x.to("meta"), x.numpy(), None, torch._neg_view(x)]
    others += [x.clone().requires_grad_(), torch.nn.Parameter(x, requires_grad=False)]
    try:
        same = same_as(x, y)
        told = same(x, y) and same(y, x) and not any(same(x, other) or same(other, y) for other in others)
        with torch.inference_mode():
            told = told and not same(x, y) and not same(x.clone(), y)
        with torch.autocast("cpu", torch.bfloat16):
            told = told and not same(x, y)
    except Exception:  # the guards have another signature, or are missing
        return False
    return told
