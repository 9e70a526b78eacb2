"""Torch tensors in host memory: computed on where they lie by the CPU engine, or brought to another device and back.

On the CPU engine a signature is validated and planned once. Every further call goes from one dictionary look-up to the
launches, with the tensors' addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from aule.backends import registry
from aule.engine import cpu
from aule.engine.attention import (
    backward_on_host,
    forward_on_host,
    host_device_of,
    named,
)
from aule.engine.memory import host_view
from aule.errors import AuleError, DeviceMismatchError
from aule.frontends.torch_views import (
    NAMES,
    by_value,
    checked_out,
    dtype_name,
    extent,
    host_array,
    refuse_tracing,
    require_plain,
    require_tensor,
    written,
)
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands, attention_problem
from aule.options import AttentionOptions
from aule.view import TensorView, contiguous_strides

_MAX_SIGNATURES = 1024
_BUFFERS = {"alibi_slopes": "alibi", "rope_cos": "cos", "rope_sin": "sin"}
"""Names of buffers that are not those of the options."""


def on_host(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention on CPU tensors."""
    device = host_device_of(NAMES.get(q.dtype, ""), options.backend)
    out, lse = _forward(q, k, v, options, device)
    return (out, lse if lse.dtype == torch.float32 else lse.float()) if options.return_lse else out


def host_with_lse(
    q: Any, k: Any, v: Any, options: AttentionOptions, *, training: bool, foreign: bool = False
) -> tuple[Any, Any]:
    """Attention and its log-sum-exp in the type that is computed in; the device is that of `gradient_device`."""
    return _forward(q, k, v, options._replace(return_lse=True), gradient_device(q, options.backend, training, foreign))


def host_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, want_scores: bool,
    foreign: bool = False,
) -> tuple[list[Any], Any]:  # fmt: skip
    """Gradients of q, k and v, and of what is added to the scores where it is wanted."""
    device = gradient_device(q, options.backend, True, foreign)
    options = options._replace(return_lse=True)
    if device.target.backend == "cpu" and out.numel() and k.shape[-2]:
        return _gradients_on_cpu(q, k, v, out, lse, dout, options, want_scores, device)
    problem, operands = host_problem(q, k, v, options)
    results = [_four_axes(host_view_of(x, name).storage) for name, x in (("out", out), ("dout", dout))]
    rows = lse.numpy()
    ds = lse.new_zeros(_scores(problem)) if want_scores else None
    grads = backward_on_host(
        problem,
        operands,
        device,
        results[0],
        rows[(None,) * (3 - rows.ndim)],
        host_view(problem.dtype, results[1]),
        None if ds is None else ds.numpy(),
    )
    return [tensor_like(g, x) for g, x in zip(grads, (q, k, v), strict=True)], ds


def gradient_device(q: Any, spec: str | None, training: bool, foreign: bool) -> Any:
    """The device for a call whose gradients may be asked for.

    CPU tensors stay on the CPU unless there is only another device or one is forced; ``foreign`` ones, which are copied
    anyway, go to the best. NumPy, as None, has no gradients: with ``training`` it is refused.
    """
    spec = registry.asked(spec)
    device: Any = None
    if spec is not None or foreign:
        device = host_device_of(NAMES.get(q.dtype, ""), spec)
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


def no_gradient(got: str, remedy: str) -> AuleError:
    """The error for a gradient that there is not."""
    return AuleError(
        "AULE_ERROR_NO_GRADIENT",
        f"[flash_attention] expected tensors that need no gradient, got requires_grad=True with {got}; {remedy}",
    )


# -- by signature, on the CPU engine -----------------------------------------------------------------------------------


class _Signature(NamedTuple):
    """What is known of a call once it was validated and planned."""

    ready: cpu.Ready
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    score_shape: tuple[int, ...]


def _forward(q: Any, k: Any, v: Any, options: AttentionOptions, device: Any) -> tuple[Any, Any]:
    """The result, and where it is wanted the log-sum-exp in the type that is computed in."""
    out = options.out
    arrays = options.arrays()
    if device is None or device.target.backend != "cpu":
        return _slowly(q, k, v, options, device)
    if out is not None and shares_memory(out, (q, k, v, *arrays.values())):
        return _slowly(q, k, v, options, device)
    known: dict[Any, _Signature] = vars(device).setdefault("_torch_forward", {})
    try:
        key = (_key(q, k, v, options, arrays), None if out is None else layout(out))
        found = known.get(key)
    except (TypeError, RuntimeError):  # an option that is no key, or a tensor without strides
        return _slowly(q, k, v, options, device)  # which says what is wrong, if anything is
    if found is None:
        problem, operands = host_problem(q, k, v, options)
        given = q.new_empty(operands.out_shape) if out is None else out
        target = _four_axes(host_view_of(checked_out(given, operands.out_shape, q), "out").storage)
        ready = cpu.prepare_forward(problem, named(operands, host_view(problem.dtype, target)), device)
        found = _Signature(ready, operands.out_shape, operands.lse_shape, ())
        remember(known, key, found)
    out = q.new_empty(found.out_shape) if out is None else written(out)
    addresses = _addresses(q, k, v, out, arrays)
    lse = None
    if options.return_lse:
        lse = q.new_empty(found.lse_shape, dtype=_work(q))
        addresses["lse"] = lse.data_ptr()
    cpu.run(found.ready, device, addresses)
    return out, lse


def _gradients_on_cpu(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, want_scores: bool, device: Any
) -> tuple[list[Any], Any]:
    arrays = options.arrays()
    key = (_key(q, k, v, options, arrays), layout(out), layout(dout), want_scores)
    known: dict[Any, _Signature] = vars(device).setdefault("_torch_backward", {})
    found = known.get(key)
    if found is None:
        problem, operands = host_problem(q, k, v, options)
        results = [_four_axes(host_view_of(x, name).storage) for name, x in (("out", out), ("dout", dout))]
        views = named(operands, host_view(problem.dtype, results[0])) | {"do": host_view(problem.dtype, results[1])}
        for name, view in (("dq", operands.q), ("dk", operands.k), ("dv", operands.v)):
            views[name] = TensorView(problem.dtype, view.shape, contiguous_strides(view.shape), "host", None)
        if want_scores:
            work = "f64" if problem.dtype == "f64" else "f32"
            views["ds"] = TensorView(work, _scores(problem), contiguous_strides(_scores(problem)), "host", None)
        ready = cpu.prepare_backward(problem, views, device)
        found = _Signature(ready, operands.out_shape, operands.lse_shape, _scores(problem))
        remember(known, key, found)
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    addresses = _addresses(q, k, v, out, arrays)
    addresses |= {name: x.data_ptr() for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}
    addresses |= {"do": dout.data_ptr(), "lse": lse.data_ptr()}
    ds = None
    if want_scores:
        ds = lse.new_zeros(found.score_shape)
        addresses["ds"] = ds.data_ptr()
    cpu.run(found.ready, device, addresses)
    return grads, ds


def _key(q: Any, k: Any, v: Any, options: AttentionOptions, arrays: dict[str, Any]) -> Any:
    for name, x in (("k", k), ("v", v)):
        require_tensor(x, name)
    plain = options.plain() | by_value("flash_attention", options)
    key = (layout(q), layout(k), layout(v), *plain.values())
    return (key, *((name, layout(x)) for name, x in arrays.items())) if arrays else key


def layout(x: Any) -> Any:
    """All of a tensor but its address, and what says that it is no plain memory of the host."""
    if not isinstance(x, torch.Tensor):
        return type(x)
    return x.shape, x.stride(), x.dtype, x.is_cpu, x.is_neg()


def remember(known: dict[Any, Any], key: Any, found: Any) -> None:
    """Keep what is known of a signature; all of it is forgotten when there is too much."""
    if len(known) >= _MAX_SIGNATURES:
        known.clear()
    known[key] = found


def _addresses(q: Any, k: Any, v: Any, out: Any, arrays: dict[str, Any]) -> dict[str, int]:
    addresses = {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(), "o": out.data_ptr()}
    for name, x in arrays.items():
        addresses[_BUFFERS.get(name, name)] = x.data_ptr()
    return addresses


def _work(q: Any) -> Any:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def shares_memory(out: Any, inputs: Iterable[Any]) -> bool:
    """Rows are written while others are still to be read: what shares memory with ``out`` takes the slow way. Two
    storages may be of the same memory, as those are that PyTorch makes of views of a NumPy array."""
    if not _has_storage(out):
        return False  # which is refused later
    first, end = extent(out)
    others = (extent(x) for x in inputs if _has_storage(x))
    return any(start < end and first < stop for start, stop in others)


def _has_storage(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_cpu and x.layout is torch.strided


# -- by views, on any device -------------------------------------------------------------------------------------------


def _slowly(q: Any, k: Any, v: Any, options: AttentionOptions, device: Any) -> tuple[Any, Any]:
    """CPU tensors are NumPy arrays over the same memory; bfloat16 goes by its bits."""
    problem, operands = host_problem(q, k, v, options)
    out = options.out
    if out is None:
        out = q.new_empty(operands.out_shape)
    else:
        written(checked_out(out, operands.out_shape, q))
    target = _four_axes(host_view_of(out, "out").storage)
    _, lse = forward_on_host(problem, operands, device, target, exact_lse=True)
    return out, None if lse is None else torch.from_numpy(lse).reshape(operands.lse_shape)


def host_problem(q: Any, k: Any, v: Any, options: AttentionOptions) -> tuple[AttentionProblem, Operands]:
    """The problem of a call on CPU tensors, and views of their memory."""
    refuse_tracing()
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    views: dict[str, Any] = {name: host_view_of(tensor, name) for name, tensor in tensors.items()}
    return attention_problem(**views, **options.plain())


def host_view_of(tensor: Any, name: str, op: str = "flash_attention") -> TensorView:
    """A view of a CPU tensor's memory."""
    require_plain(tensor, name, op)
    if tensor.device.type != "cpu":
        raise DeviceMismatchError(f"[{op}] expected {name} on the CPU like q, got {tensor.device}; move it with .to")
    dtype = dtype_name(tensor, name, op)
    return TensorView(dtype, tuple(tensor.shape), tensor.stride(), "host", host_array(tensor.detach(), dtype))


def _four_axes(array: Any) -> Any:
    return array[(None,) * (4 - array.ndim)]


def _scores(problem: AttentionProblem) -> tuple[int, int, int, int]:
    return (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)


def tensor_like(array: Any, like: Any) -> Any:
    """An array of stored elements as a tensor of another's dtype and shape."""
    return torch.from_numpy(array).view(like.dtype).reshape(like.shape)
