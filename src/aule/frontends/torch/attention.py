"""Attention on tensors as calls: its forward pass and its gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aule.backends import registry
from aule.engine.attention import (
    attention_views,
    backward_on_host,
    backward_plan,
    forward_on_host,
    forward_plan,
    host_device,
)
from aule.errors import AuleError
from aule.frontends.torch.calls import Bound, Call, Output, Overlap, Results
from aule.frontends.torch.checks import NAMES, checked_out, keyed, no_gradient
from aule.frontends.torch.modes import refuse_tracing
from aule.frontends.torch.views import (
    Array,
    ViewOf,
    four_axes,
    fresh,
    fresh_view,
    lies_over,
    shares_memory,
    tensor_like,
    view_on_host,
    work_dtype,
    written,
)
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.shared.plan import Plan
from aule.options import AttentionOptions
from aule.runtime.base import Device
from aule.view import TensorView

OP = "flash_attention"
ARRAYS = {
    "mask": "mask",
    "bias": "bias",
    "alibi_slopes": "alibi",
    "sinks": "sinks",
    "rope_cos": "cos",
    "rope_sin": "sin",
    "seed": "seed",
}
"""Options that are tensors, with the names of their buffers."""
_ALIGNED = ("q", "k", "v", "o", "do", "mask", "bias", "cos", "sin")
"""Buffers whose alignment plans depend on."""


def _fields(*names: str) -> itemgetter[tuple[Hashable, ...]]:
    return itemgetter(*(AttentionOptions._fields.index(name) for name in names))


_arrays, _extras = _fields(*ARRAYS), _fields(*ARRAYS, "out")
_non_tensors = _fields(*(name for name in AttentionOptions._fields if name not in (*ARRAYS, "out")))
_PLAIN = ("causal", "scale", "window", "softcap", "rope_interleaved", "dropout_p", "causal_align", "precision")
_forward_key = _fields(*_PLAIN, "return_lse")
_backward_key = _fields(*_PLAIN, "deterministic")


def operands(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> dict[str, Tensor]:
    """All tensors of a call by buffer name."""
    tensors = {"q": q, "k": k, "v": v}
    for name, x in zip(ARRAYS.values(), _arrays(options), strict=True):
        if x is not None:
            tensors[name] = x
    return tensors


class AttentionCall(Call):
    """What the forward and the backward pass share. `varlen` overrides what differs for packed batches."""

    __slots__ = ("options",)

    options: AttentionOptions
    inputs = {"q": "q", "k": "k", "v": "v"} | ARRAYS
    """Tensors that the check takes, with the names of their buffers."""
    lift = staticmethod(four_axes)
    """Brings a view of q, k, v or a result into the four axes of kernels."""

    def views(self, view: ViewOf) -> dict[str, Any]:
        """Views of the inputs, by the names that the check takes."""
        refuse_tracing(self.op)
        given = self.tensors
        return {name: view(given[at], name, self.op, "q") for name, at in self.inputs.items() if at in given}

    def problem(self, view: ViewOf) -> tuple[AttentionProblem, Operands]:
        """Check the call."""
        return attention_problem(**self.views(view), **self.options.plain(), op=self.op)


def _alignment_for_plans(aligned: Mapping[str, bool]) -> dict[str, bool]:
    return {name: aligned[name] for name in _ALIGNED if name in aligned}


class Forward(AttentionCall):
    """Attention; its results are the output and, with ``return_lse``, the log-sum-exp in the type computed in.

    Parameters
    ----------
    training : bool or None
        Whether gradients will follow, which NumPy does not have; None if they cannot.
    key : hashable, optional
        Its `repeat_key`, if the caller has it.
    """

    __slots__ = ("training",)

    training: bool | None
    unwritten_rows = False
    """Whether the result may have rows that no kernel writes: they are zero, their log-sum-exp -inf."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        training: bool | None = None,
        key: Hashable | None = None,
    ) -> None:
        options = keyed(OP, options)
        self.op, self.options, self.training, self.backend = OP, options, training, options.backend
        self.tensors = operands(q, k, v, options)
        self.destinations = {} if options.out is None else {"o": options.out}
        self.option_key = ("attention", *_forward_key(options))
        self.results = ("o", "lse")[: 1 + options.return_lse]
        self.repeat_key = None if "seed" in self.tensors else key or repeat_key(q, k, v, options, training)[0]

    def result_shapes(self, found: Operands) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the output and of the log-sum-exp, as the caller gets them."""
        return found.out_shape, found.lse_shape

    def result_strides(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Strides of an output of a shape; None if it is contiguous."""
        return None

    def bind(self, view: ViewOf) -> Bound:
        problem, found = self.problem(view)
        q = self.tensors["q"]
        shape, lse_shape = self.result_shapes(found)
        strides = self.result_strides(shape)
        out = fresh_view(problem.dtype, shape, strides)
        if self.destinations:
            out = view(checked_out(self.destinations["o"], shape, q, self.op), "out", self.op, "q")
        fill, lse_fill = (0.0, -torch.inf) if self.unwritten_rows else (None, None)
        outputs = [Output("o", q.dtype, shape, strides, fill=fill)]
        if self.options.return_lse:
            outputs.append(Output("lse", work_dtype(q), lse_shape, fill=lse_fill, empty=-torch.inf))
        return Bound(problem, attention_views(found, self.lift(out)), tuple(outputs))

    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        problem = cast(AttentionProblem, bound.problem)
        return forward_plan(problem, dict(bound.views), device, _alignment_for_plans(aligned))

    def host_device(self, foreign: bool) -> Device | None:
        q = self.tensors["q"]
        if self.training is None:
            return tensor_device(q, self.backend, foreign)
        return gradient_device(q, self.backend, self.training, foreign)

    def through_host(self, device: Device | None) -> Results:
        problem, found = self.problem(view_on_host)
        shape, lse_shape = self.result_shapes(found)
        q, out = self.tensors["q"], self.destinations.get("o")
        if out is None:
            out = fresh(shape, self.result_strides(shape), q.dtype, q.device)
        else:
            out = written(checked_out(out, shape, q, self.op))
        target = self.lift(view_on_host(out, "out", self.op)).storage
        _, lse = forward_on_host(problem, found, device, target, exact_lse=True)
        return (out,) if lse is None else (out, torch.from_numpy(lse).reshape(lse_shape))

    def overlap(self, on_host: bool) -> Overlap | None:
        return (shares_memory if on_host else lies_over) if self.destinations else None

    def with_tensors(self, tensors: dict[str, Tensor]) -> Forward:
        options = options_with_tensors(self.options, tensors)
        return Forward(tensors["q"], tensors["k"], tensors["v"], options, self.training)


def options_with_tensors(options: AttentionOptions, tensors: Mapping[str, Tensor]) -> AttentionOptions:
    """Options with other tensors, by buffer name, and a result in fresh memory."""
    arrays: dict[str, Any] = {name: tensors.get(buffer) for name, buffer in ARRAYS.items()}
    return options._replace(out=None, **arrays)


def repeat_key(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, training: bool | None = None
) -> tuple[Hashable, Sequence[Tensor]]:
    """Key and tensors under which a forward pass may be repeated: the options themselves if they hold no tensors."""
    extras = _extras(options)
    given = [x for x in extras if x is not None]
    if not given and training is None:
        return options, (q, k, v)
    return (training, tuple([x is None for x in extras]), _non_tensors(options)), [q, k, v, *given]


class Saved(NamedTuple):
    """Inputs of the gradients: operands, results and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor


class Backward(AttentionCall):
    """Gradients of q, k and v and, where they are wanted, of what is added to the scores (``ds``).

    A tensor ``dlse`` is the gradient of the log-sum-exp, contiguous, in the type computed in.
    """

    __slots__ = ("scores",)
    backward = True

    scores: bool

    def __init__(self, saved: Saved, options: AttentionOptions, scores: bool) -> None:
        options = keyed(OP, options)._replace(return_lse=True, out=None)
        self.op, self.options, self.scores, self.backend = OP, options, scores, options.backend
        self.tensors = self.inputs_of(saved, options)
        self.destinations = {}
        self.option_key = ("attention gradients", *_backward_key(options), scores)
        self.repeat_key = (self.option_key, self.backend, tuple(self.tensors))
        self.results = ("dq", "dk", "dv", "ds")[: 3 + scores]

    @staticmethod
    def inputs_of(saved: Saved, options: AttentionOptions) -> dict[str, Tensor]:
        """All tensors of a call by buffer name."""
        return operands(saved.q, saved.k, saved.v, options) | {"o": saved.out, "lse": saved.lse, "do": saved.dout}

    def gradient_output(self, name: str, like: Tensor) -> Output:
        """The gradient of q, k or v, as the caller gets it."""
        return Output(name, like.dtype, tuple(like.shape))

    def gradient_tensor(self, grad: Array, like: Tensor) -> Tensor:
        """A gradient with the four axes of kernels, as the caller gets it."""
        return tensor_like(grad, like)

    def bind(self, view: ViewOf) -> Bound:
        problem, found = self.problem(view)
        results = {name: self.lift(view(self.tensors[name], name, self.op, "q")) for name in ("o", "do")}
        views: dict[str, TensorView] = attention_views(found, results["o"]) | {"do": results["do"]}
        outputs = []
        for name, x in (("dq", found.q), ("dk", found.k), ("dv", found.v)):
            views[name] = fresh_view(problem.dtype, x.shape)
            outputs.append(self.gradient_output(name, self.tensors[name[1:]]))
        if self.scores:
            work = work_dtype(self.tensors["q"])
            shape = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
            views["ds"] = fresh_view(NAMES[work], shape)
            outputs.append(Output("ds", work, shape, fill=0.0))
        if "dlse" in self.tensors:
            views["dlse"] = view(self.tensors["dlse"], "dlse", self.op, "q")
        return Bound(problem, views, tuple(outputs))

    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        problem = cast(AttentionProblem, bound.problem)
        return backward_plan(problem, dict(bound.views), device, _alignment_for_plans(aligned))

    def host_device(self, foreign: bool) -> Device | None:
        return gradient_device(self.tensors["q"], self.backend, True, foreign)

    def through_host(self, device: Device | None) -> Results:
        assert device is not None  # NumPy is refused by `gradient_device`
        problem, found = self.problem(view_on_host)
        out, dout = (self.lift(view_on_host(self.tensors[name], name, self.op)) for name in ("o", "do"))
        lse, ds = self.tensors["lse"], None
        if self.scores:
            ds = lse.new_zeros((problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv))
        rows = lse.numpy()[(None,) * (3 - lse.dim())]
        given, of_scores = self.tensors.get("dlse"), None if ds is None else ds.numpy()
        dlse = None if given is None else view_on_host(given, "dlse", self.op)
        grads = backward_on_host(problem, found, device, out.storage, rows, dout, of_scores, dlse)
        made = [self.gradient_tensor(grad, self.tensors[name]) for grad, name in zip(grads, "qkv", strict=True)]
        return (*made,) if ds is None else (*made, ds)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Backward:
        return Backward(saved_of(tensors), options_with_tensors(self.options, tensors), self.scores)


def saved_of(tensors: Mapping[str, Tensor]) -> Saved:
    """Inputs of the gradients from tensors by buffer name."""
    return Saved(*(tensors[name] for name in ("q", "k", "v", "o", "lse", "do")))


def tensor_device(q: Tensor, spec: str | None, foreign: bool) -> Device | None:
    """The device for CPU tensors; None stands for NumPy.

    Tensors stay on the CPU, without a question to any GPU's driver, unless the CPU engine is missing or a backend is
    forced; ``foreign`` ones, which are copied anyway, go to the best device.
    """
    spec = registry.requested_backend(spec)
    if spec is None and not foreign:
        with suppress(AuleError):
            return registry.find("cpu")
    return host_device(NAMES.get(q.dtype, ""), spec)


def gradient_device(q: Tensor, spec: str | None, training: bool, foreign: bool) -> Device | None:
    """Choose the device of tensors that may need gradients. NumPy has none: it is refused if ``training``."""
    device = tensor_device(q, spec, foreign)
    if device is None and training:
        raise no_gradient(
            "NumPy", 'NumPy has no gradients: pip install "aule-attention[cpu]", or choose a device with backend='
        )
    return device
