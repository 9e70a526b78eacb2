"""Attention on tensors as calls: its forward pass and its gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aule.backends import registry
from aule.engine.attention import (
    backward_on_host,
    forward_on_host,
    host_device,
    named,
    prepare_backward,
    prepare_forward,
)
from aule.engine.memory import MemorySource
from aule.engine.run import PreparedCall
from aule.errors import AuleError
from aule.frontends.torch.calls import Bound, Call, Output, Overlap, Results
from aule.frontends.torch.checks import NAMES, checked_out, keyed, no_gradient
from aule.frontends.torch.modes import refuse_tracing
from aule.frontends.torch.views import (
    ViewOf,
    four_axes,
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


def aligned_among(aligned: Mapping[str, bool]) -> dict[str, bool]:
    """The alignment of those buffers that plans of attention depend on."""
    return {name: aligned[name] for name in _ALIGNED if name in aligned}


def problem_of(
    tensors: Mapping[str, Tensor], options: AttentionOptions, view: ViewOf
) -> tuple[AttentionProblem, Operands]:
    """Check a call; ``tensors`` by buffer name."""
    refuse_tracing()
    names = {"q": "q", "k": "k", "v": "v"} | ARRAYS
    views: dict[str, Any] = {name: view(tensors[at], name, OP, "q") for name, at in names.items() if at in tensors}
    return attention_problem(**views, **options.plain())


class Forward(Call):
    """Attention; its results are the output and, with ``return_lse``, the log-sum-exp in the type computed in.

    Parameters
    ----------
    training : bool or None
        Whether gradients will follow, which NumPy does not have; None if they cannot.
    key : hashable, optional
        Its `repeat_key`, if the caller has it.
    """

    __slots__ = ("options", "training")

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
        self.given = {} if options.out is None else {"o": options.out}
        self.option_key = ("attention", *_forward_key(options))
        self.results = ("o", "lse")[: 1 + options.return_lse]
        self.repeat_key = None if "seed" in self.tensors else key or repeat_key(q, k, v, options, training)[0]

    def bind(self, view: ViewOf) -> Bound:
        problem, found = problem_of(self.tensors, self.options, view)
        q = self.tensors["q"]
        out = fresh_view(problem.dtype, found.out_shape)
        if self.given:
            out = view(checked_out(self.given["o"], found.out_shape, q), "out", OP, "q")
        outputs = [Output("o", q.dtype, found.out_shape)]
        if self.options.return_lse:
            outputs.append(Output("lse", work_dtype(q), found.lse_shape))
        return Bound(problem, named(found, four_axes(out)), tuple(outputs))

    def prepare(
        self, bound: Bound, device: Device, memory: MemorySource | None, aligned: Mapping[str, bool]
    ) -> PreparedCall:
        problem = cast(AttentionProblem, bound.problem)
        return prepare_forward(problem, dict(bound.views), device, aligned_among(aligned), memory)

    def host_device(self, foreign: bool) -> Device | None:
        q = self.tensors["q"]
        if self.training is None:
            return host_device(NAMES.get(q.dtype, ""), self.backend)
        return gradient_device(q, self.backend, self.training, foreign)

    def through_host(self, device: Device | None) -> Results:
        problem, found = problem_of(self.tensors, self.options, view_on_host)
        q = self.tensors["q"]
        out = self.given.get("o")
        out = q.new_empty(found.out_shape) if out is None else written(checked_out(out, found.out_shape, q))
        target = four_axes(view_on_host(out, "out")).storage
        _, lse = forward_on_host(problem, found, device, target, exact_lse=True)
        return (out,) if lse is None else (out, torch.from_numpy(lse).reshape(found.lse_shape))

    def overlap(self, on_host: bool) -> Overlap | None:
        return (shares_memory if on_host else lies_over) if self.given else None

    def moved(self, tensors: dict[str, Tensor]) -> Forward:
        return Forward(tensors["q"], tensors["k"], tensors["v"], on_copies(self.options, tensors), self.training)


def on_copies(options: AttentionOptions, tensors: Mapping[str, Tensor]) -> AttentionOptions:
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


class Backward(Call):
    """Gradients of q, k and v and, where they are wanted, of what is added to the scores (``ds``)."""

    __slots__ = ("options", "scores")

    def __init__(self, saved: Saved, options: AttentionOptions, scores: bool) -> None:
        options = keyed(OP, options)._replace(return_lse=True, out=None)
        self.op, self.options, self.scores, self.backend = OP, options, scores, options.backend
        self.tensors = operands(saved.q, saved.k, saved.v, options)
        self.tensors |= {"o": saved.out, "lse": saved.lse, "do": saved.dout}
        self.given = {}
        self.option_key = ("attention gradients", *_backward_key(options), scores)
        self.repeat_key = (self.option_key, self.backend, tuple(self.tensors))
        self.results = ("dq", "dk", "dv", "ds")[: 3 + scores]

    def bind(self, view: ViewOf) -> Bound:
        problem, found = problem_of(self.tensors, self.options, view)
        results = {name: four_axes(view(self.tensors[name], name, OP, "q")) for name in ("o", "do")}
        views: dict[str, TensorView] = named(found, results["o"]) | {"do": results["do"]}
        outputs = []
        for name, x in (("dq", found.q), ("dk", found.k), ("dv", found.v)):
            views[name] = fresh_view(problem.dtype, x.shape)
            like = self.tensors[name[1:]]
            outputs.append(Output(name, like.dtype, tuple(like.shape)))
        if self.scores:
            work = work_dtype(self.tensors["q"])
            shape = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
            views["ds"] = fresh_view(NAMES[work], shape)
            outputs.append(Output("ds", work, shape, fill=0.0))
        return Bound(problem, views, tuple(outputs))

    def prepare(
        self, bound: Bound, device: Device, memory: MemorySource | None, aligned: Mapping[str, bool]
    ) -> PreparedCall | None:
        if not self.tensors["o"].numel() or not self.tensors["k"].shape[-2]:
            return None
        problem = cast(AttentionProblem, bound.problem)
        return prepare_backward(problem, dict(bound.views), device, aligned_among(aligned), memory)

    def host_device(self, foreign: bool) -> Device | None:
        return gradient_device(self.tensors["q"], self.backend, True, foreign)

    def through_host(self, device: Device | None) -> Results:
        assert device is not None  # NumPy is refused by `gradient_device`
        problem, found = problem_of(self.tensors, self.options, view_on_host)
        out, dout = (four_axes(view_on_host(self.tensors[name], name)) for name in ("o", "do"))
        lse = self.tensors["lse"]
        ds = None
        if self.scores:
            ds = lse.new_zeros((problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv))
        rows = lse.numpy()
        scores = None if ds is None else ds.numpy()
        grads = backward_on_host(
            problem, found, device, out.storage, rows[(None,) * (3 - rows.ndim)], dout, scores
        )  # fmt: skip
        made = [tensor_like(grad, self.tensors[name]) for grad, name in zip(grads, "qkv", strict=True)]
        return (*made,) if ds is None else (*made, ds)

    def moved(self, tensors: dict[str, Tensor]) -> Backward:
        saved = Saved(*(tensors[name] for name in ("q", "k", "v", "o", "lse", "do")))
        return Backward(saved, on_copies(self.options, tensors), self.scores)


def gradient_device(q: Tensor, spec: str | None, training: bool, foreign: bool) -> Device | None:
    """The device for CPU tensors whose gradients may be asked for; None stands for NumPy.

    Tensors stay on the CPU unless there is only another device or one is forced; ``foreign`` ones, which are copied
    anyway, go to the best. NumPy has no gradients: it is refused if ``training``.
    """
    spec = registry.asked(spec)
    device: Device | None
    if spec is not None or foreign:
        device = host_device(NAMES.get(q.dtype, ""), spec)
    else:
        try:
            device = registry.find("cpu")
        except AuleError:
            device = registry.choose(None)
    if device is None and training:
        raise no_gradient(
            "NumPy", 'NumPy alone computes none: pip install "aule-attention[cpu]", or choose a device with backend='
        )
    return device
