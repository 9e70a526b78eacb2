"""CUDA tensors, used in place on the current stream.

The first call of a signature plans and builds; every further one goes from one dictionary look-up to the launch, and
one like the call before it from `repeated` alone. What a signature needs once, and the way of gradients, serve tensors
of Apple's GPUs as well (`torch_mps`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aule import settings
from aule.backends import registry
from aule.engine.attention import named, prepare_backward, prepare_forward
from aule.errors import DeviceMismatchError
from aule.frontends.torch_launches import extras_aligned, in_steps, prepared_steps
from aule.frontends.torch_repeated import Repeated
from aule.frontends.torch_stage import staged
from aule.frontends.torch_views import (
    by_value,
    checked_out,
    dtype_name,
    extent,
    refuse_tracing,
    require_plain,
    written,
)
from aule.ops.attention.validate import attention_problem
from aule.options import AttentionOptions
from aule.view import TensorView, contiguous_strides

_empty_like = torch.empty_like
_MAX_LAUNCHES = 4096
_launches: dict[Any, PreparedLaunch] = {}
repeated: dict[AttentionOptions, Repeated] = {}
"""The quickest way of calls with these options, and tensors like those of the last of them."""


class PreparedLaunch:
    """One signature: the launch with everything fixed but memory and stream. ``launch`` is None for an empty one.

    ``repeated`` is the quickest way to it, made when the signature comes a second time, or None where there is none.
    """

    __slots__ = ("extra", "launch", "like_q", "lse_shape", "out_shape", "repeated")

    def __init__(self, launch: Any, like_q: bool, out_shape: Any, lse_shape: Any, extra: tuple[str, ...]) -> None:
        self.launch = launch
        self.like_q = like_q
        self.out_shape = out_shape
        self.lse_shape = lse_shape
        self.extra = extra
        self.repeated: Any = ...


def on_cuda(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """From one dictionary look-up to the launch. Calls like the one before do not come here: `Repeated` has them."""
    (
        causal, scale, window, softcap, mask, bias, alibi, sinks, cos, sin, interleaved, dropout_p, _, align, want_lse,
        _, out, backend, precision,
    ) = options  # fmt: skip
    changed = by_value("flash_attention", options)
    if changed:
        return on_cuda(q, k, v, options._replace(**changed))
    try:
        qp, kp, vp, index = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.get_device()
        key: Any = (
            q.shape, q.stride(), q.dtype, index, k.shape, k.stride(), k.dtype, k.get_device(), v.shape, v.stride(),
            v.dtype, v.get_device(), (qp | kp | vp) & 15, q.is_neg() or k.is_neg() or v.is_neg(), causal, scale, window,
            softcap, align, want_lse, backend, dropout_p, precision,
        )  # fmt: skip
        if mask is not None or bias is not None or alibi is not None or sinks is not None or out is not None:
            key += tuple(signature(x) for x in (mask, bias, alibi, sinks, out))
        if cos is not None or sin is not None:
            key += (signature(cos), signature(sin), interleaved)
        found = _launches.get(key)
    except (AttributeError, RuntimeError):  # no tensor, or one without strides
        for name, x in (("q", q), ("k", k), ("v", v)):
            require_plain(x, name)
        raise
    except TypeError:  # an option that is no key
        _prepare(q, k, v, options)  # which says what is wrong
        raise
    if found is None:
        # Looked up here and not on every call: reading the environment costs 1.3 us.
        if backend is None and not (settings.backend() or "cuda").startswith("cuda"):
            return staged(q, k, v, options)
        found = _prepare(q, k, v, options)
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = found
    elif out is None and not (found.extra or want_lse or (qp | kp | vp) & 15):
        _remember(found, q, k, v, options)
    if out is None:  # empty_like is the quicker way to an output, by 3 us
        out = _empty_like(q) if found.like_q else q.new_empty(found.out_shape)
    elif lies_over(out, q, k, v):
        return copied(out, on_cuda(q, k, v, options._replace(out=None)))
    else:
        written(out)
    lse = q.new_empty(found.lse_shape, dtype=torch.float32) if want_lse else None
    if found.launch is not None:
        pointers = [qp, kp, vp, out.data_ptr()]
        if found.extra:
            pointers += [getattr(options, name).data_ptr() for name in found.extra]
        if lse is not None:
            pointers.append(lse.data_ptr())
        found.launch(pointers, raw_stream(index))
    return (out, lse) if want_lse else out


def _remember(found: PreparedLaunch, q: Any, k: Any, v: Any, options: AttentionOptions) -> None:
    """Let the next call with these options and tensors like these take the quickest way."""
    if found.repeated is ...:
        found.repeated = Repeated.of(found.launch, q, k, v, found.out_shape)
    if found.repeated is not None:
        if len(repeated) >= _MAX_LAUNCHES:
            repeated.clear()
        repeated[options] = found.repeated


def lies_over(out: Any, q: Any, k: Any, v: Any) -> bool:
    """Whether rows would be written that others have still to read. Rows of q are read by those alone who write the
    same rows of ``out``."""
    home = out.untyped_storage().data_ptr()
    beside = [x for x in (q, k, v) if x.untyped_storage().data_ptr() == home]
    first, end = extent(out) if beside else (0, 0)
    for x in beside:
        start, stop = extent(x)
        same = x is q and start == first and x.shape == out.shape and x.stride() == out.stride()
        if start < end and first < stop and not same:
            return True
    return False


def copied(out: Any, made: Any) -> Any:
    """A result, perhaps with its log-sum-exp, where it was wanted."""
    return (out.copy_(made[0]), made[1]) if isinstance(made, tuple) else out.copy_(made)


def raw_stream(index: int) -> int:
    """Native handle of the current stream; replaced by PyTorch's own quick look-up where there is one."""
    return int(torch.cuda.current_stream(index).cuda_stream)


raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", raw_stream)


def signature(tensor: Any) -> Any:
    """All that a plan, and the check before it, have to know of a tensor."""
    if tensor is None or not isinstance(tensor, torch.Tensor):
        return type(tensor)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15, tensor.is_neg())


def _prepare(q: Any, k: Any, v: Any, options: AttentionOptions) -> PreparedLaunch:
    device: Any = registry.find(options.backend or f"cuda:{q.device.index}")
    if device is None or device.index != q.device.index:
        raise DeviceMismatchError(
            f"[flash_attention] expected tensors on {options.backend}, got {q.device}; move them or drop backend="
        )
    return prepare_launch(q, k, v, options, device)


def prepare_launch(q: Any, k: Any, v: Any, options: AttentionOptions, device: Any) -> PreparedLaunch:
    """Validate, plan and build; what a signature needs once."""
    refuse_tracing()
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    views: dict[str, Any] = {name: device_view(tensor, name) for name, tensor in tensors.items()}
    problem, operands = attention_problem(**views, **options.plain())
    if options.out is None:
        strides = torch.empty(operands.out_shape, device="meta").stride()
        out = TensorView(problem.dtype, operands.out_shape, tuple(strides), "cuda", None)
    else:
        out = device_view(checked_out(options.out, operands.out_shape, q), "out")
    memory = named(operands, _lifted(out))
    aligned = {name: tensor.data_ptr() % 16 == 0 for name, tensor in (("q", q), ("k", k), ("v", v))}
    if options.out is not None:
        aligned["o"] = options.out.data_ptr() % 16 == 0
    aligned |= extras_aligned(options)
    launch = prepare_forward(problem, memory, device, aligned)
    fields = {"mask": "mask", "bias": "bias", "alibi": "alibi_slopes", "sinks": "sinks", "seed": "seed"}
    fields |= {"cos": "rope_cos", "sin": "rope_sin"}
    ends = ["lse"] if options.return_lse else []
    names, start = list(launch.buffers), None
    if launch.plan.grid[0]:
        scalars = launch.arguments(dict.fromkeys((*memory, *launch.before.workspace, "lse")))
        start = device.prepare(launch.program, launch.plan.grid, scalars).launch
        if launch.before.steps:
            launches = [*prepared_steps(launch.before, device), (start, launch.buffers)]
            used = {name for _, buffers in launches for name in buffers}
            names = ["q", "k", "v", "o", *(name for name in fields if name in used), *ends]
            start = in_steps(names, launches, launch.before.workspace, q.device)
    extra = tuple(fields[name] for name in names if name in fields)
    # `on_cuda` puts pointers together without looking at names.
    assert names == ["q", "k", "v", "o", *(n for n in names if n in fields), *ends], names
    like_q = tuple(q.shape) == operands.out_shape and q.is_contiguous()
    return PreparedLaunch(start, like_q, operands.out_shape, operands.lse_shape, extra)


# -- gradients ---------------------------------------------------------------------------------------------------------


_gradient_launches: dict[Any, Any] = {}


def cuda_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, want_scores: bool
) -> tuple[list[Any], Any]:
    """Gradients of q, k and v on the current stream, and of what is added to the scores where it is wanted."""
    stream = raw_stream(q.get_device())

    def run(launch: Any, tensors: list[Any]) -> None:
        launch([x.data_ptr() for x in tensors], stream)

    spec = options.backend or f"cuda:{q.device.index}"
    return device_gradients(q, k, v, out, lse, dout, options, want_scores, lambda: registry.find(spec), run)


def device_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, want_scores: bool,
    find: Callable[[], Any], run: Callable[[Any, list[Any]], None],
) -> tuple[list[Any], Any]:  # fmt: skip
    """The same on any device: ``find`` says which, and ``run`` gives a prepared launch its tensors."""
    given = {"q": q, "k": k, "v": v, "o": out, "do": dout}
    arrays = options.arrays()
    # Planned once per signature, like the forward pass.
    key = (
        *(signature(x) for x in (*given.values(), *arrays.values())), *arrays, options.causal, options.scale,
        options.window, options.softcap, options.causal_align, options.backend, want_scores, options.dropout_p,
        options.deterministic, options.rope_interleaved,
    )  # fmt: skip
    ready = _gradient_launches.get(key)
    if ready is None:
        ready = _prepare_gradients(given, arrays, options, want_scores, find())
        if len(_gradient_launches) >= _MAX_LAUNCHES:
            _gradient_launches.clear()
        _gradient_launches[key] = ready
    launches, workspace, score_shape = ready
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    ds = torch.zeros(score_shape, dtype=torch.float32, device=q.device) if want_scores else None
    if not launches:
        return [grad.zero_() for grad in grads], ds
    memory = given | arrays | {"lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
    memory |= {name: torch.empty(count, dtype=torch.float32, device=q.device) for name, count in workspace.items()}
    memory |= {"alibi": options.alibi_slopes, "cos": options.rope_cos, "sin": options.rope_sin, "ds": ds}
    for launch, buffers in launches:
        run(launch, [memory[name] for name in buffers])
    return grads, ds


def _prepare_gradients(
    given: dict[str, Any], arrays: dict[str, Any], options: AttentionOptions, want_scores: bool, device: Any
) -> Any:
    views: dict[str, Any] = {name: device_view(x, name) for name, x in (given | arrays).items()}
    results = {name: _lifted(views.pop(name)) for name in ("o", "do")}
    problem, operands = attention_problem(**views, **options.plain())
    memory = named(operands, results["o"]) | {"do": results["do"]}
    for name, view in (("dq", operands.q), ("dk", operands.k), ("dv", operands.v)):
        memory[name] = TensorView(problem.dtype, view.shape, contiguous_strides(view.shape), "cuda", None)
    score_shape = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    if want_scores:
        memory["ds"] = TensorView("f32", score_shape, contiguous_strides(score_shape), "cuda", None)
    aligned = {name: x.data_ptr() % 16 == 0 for name, x in given.items()}
    aligned |= extras_aligned(options)
    ready = prepare_backward(problem, memory, device, aligned)
    return prepared_steps(ready, device), ready.workspace, score_shape


def _lifted(view: TensorView) -> TensorView:
    """The same view with four axes."""
    lead = 4 - len(view.shape)
    return TensorView(view.dtype, (1,) * lead + view.shape, (0,) * lead + view.strides, view.device, view.storage)


def device_view(tensor: Any, name: str, op: str = "flash_attention") -> TensorView:
    """A view of a tensor in the memory of its device."""
    require_plain(tensor, name, op)
    return TensorView(
        dtype_name(tensor, name, op), tuple(tensor.shape), tensor.stride(), str(tensor.device), tensor.data_ptr()
    )
