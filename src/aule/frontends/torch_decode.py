"""Decoding with PyTorch tensors. CUDA tensors are used in place on the current stream.

The first call of a signature plans and builds; every further one goes from one dictionary look-up to the launches.
Nothing waits for the device, so a CUDA graph can hold a call: lengths and block tables on the device are read there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from aule import settings
from aule.backends import registry
from aule.engine.decode import prepare_decode
from aule.errors import AuleError, DeviceMismatchError, InvalidShapeError
from aule.frontends.numpy import states_message
from aule.frontends.torch_cuda import device_view, raw_stream, signature
from aule.frontends.torch_decode_host import host_problem, on_host, staged
from aule.frontends.torch_host import host_view_of
from aule.frontends.torch_launches import prepared_steps
from aule.frontends.torch_routes import CUDA_BUILD, refuse_transforms
from aule.frontends.torch_views import by_value, checked_out, integers, refuse_tracing, require_tensor, written
from aule.frontends.torch_zeroed import zeroed
from aule.ops.decode.plan import decode_views
from aule.ops.decode.validate import DecodeOperands, check_contents, decode_problem
from aule.options import DecodeOptions
from aule.view import TensorView

_grad_enabled = torch.is_grad_enabled
_empty_like = torch.empty_like
_MAX_SIGNATURES = 4096


def decode(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """As `aule.decode_attention` and `aule.flash_attention_paged`."""
    try:
        wants_gradient = _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    except AttributeError:
        _explain(q, k, v, options)
        raise
    if wants_gradient:
        raise AuleError(
            "AULE_ERROR_NO_GRADIENT",
            f"[{options.op}] expected tensors that need no gradient, got requires_grad=True; call it under "
            "torch.no_grad(), or use aule.flash_attention, which has gradients",
        )
    try:
        if _driven(q, options.backend):
            return _on_cuda(q, k, v, options)
        if q.is_cpu:
            return on_host(q, k, v, options)
        return staged(q, k, v, options)
    except RuntimeError:  # asked when it matters: it would be asked for nothing on every call
        given = (q, k, v, *options.arrays().values(), *options.indices().values())
        refuse_transforms(options.op, given, "call it outside of them, on all that is mapped at once")
        raise


def check_decode(op: str, q: Any, k: Any, v: Any, options: DecodeOptions) -> None:
    """Raise what is wrong with a call, in the name of ``op``, without making it."""
    if q.is_cpu:
        host_problem(op, q, k, v, options)
    else:
        decode_problem(op, **_views(q, k, v, options), **options.plain())


def _driven(q: Any, backend: str | None) -> bool:
    """Whether a tensor is computed on in place by the CUDA driver."""
    return q.is_cuda and CUDA_BUILD and (backend is None or backend.startswith("cuda"))


# -- CUDA --------------------------------------------------------------------------------------------------------------


class _Ready:
    """One signature planned and built: the launches, each with the names of its buffers; the elements of the parts that
    they share and of the log-sum-exps behind these; and the words that they find and leave zero."""

    __slots__ = ("device", "launches", "like_q", "lse_shape", "out_shape", "parts", "tickets", "workspace")

    def __init__(
        self, operands: DecodeOperands, device: Any, launches: Any, parts: int, workspace: int, tickets: int,
        like_q: bool,
    ) -> None:  # fmt: skip
        self.device, self.launches = device, launches
        self.parts, self.workspace, self.tickets = parts, workspace, tickets
        self.like_q = like_q
        self.out_shape, self.lse_shape = operands.out_shape, operands.lse_shape


_known: dict[Any, _Ready] = {}


def _on_cuda(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """From one dictionary look-up to the launches: what stands here is the cost of a repeated call."""
    (
        lens, tables, cu_q, max_q, k_scale, v_scale, layout, causal, scale, window, softcap, alibi, sinks, want_lse,
        out, backend,
    ) = options  # fmt: skip
    changed = by_value(options.op, options)
    if changed:
        return _on_cuda(q, k, v, options._replace(**changed))
    if cu_q is not None and max_q is None and isinstance(cu_q, torch.Tensor) and len(cu_q) > 1:
        max_q = int(cu_q.diff().max())
        options = options._replace(max_seqlen_q=max_q)
    try:
        index = q.get_device()
        pointers = {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr()}
        key: Any = (
            q.shape, q.stride(), q.dtype, index, k.shape, k.stride(), k.dtype, k.get_device(), v.shape, v.stride(),
            v.dtype, v.get_device(), (pointers["q"] | pointers["k"] | pointers["v"]) & 15,
            q.is_neg() or k.is_neg() or v.is_neg(), layout, causal, scale, window, softcap, want_lse, backend, max_q,
        )  # fmt: skip
        for name, x in (("lens", lens), ("tables", tables), ("cu_q", cu_q)):
            if x is not None:
                if x.dtype is not torch.int32 or x.get_device() != index:
                    return _on_cuda(q, k, v, _brought(q, k, v, options))
                pointers[name] = x.data_ptr()
                key += (x.shape, x.stride())
        if not (k_scale is None and v_scale is None and alibi is None and sinks is None and out is None):
            for name, x in (
                ("k_scale", k_scale), ("v_scale", v_scale), ("alibi", alibi), ("sinks", sinks), ("o", out),
            ):  # fmt: skip
                key += (signature(x),)
                if x is not None:
                    pointers[name] = x.data_ptr()
        found = _known.get(key)
    except (AttributeError, TypeError):
        _explain(q, k, v, options)
        raise
    if found is None:
        if backend is None and not (settings.backend() or "cuda").startswith("cuda"):
            return staged(q, k, v, options)
        found = _prepare(q, k, v, options)
        if len(_known) >= _MAX_SIGNATURES:
            _known.clear()
        _known[key] = found
    if out is None:
        if cu_q is not None:  # rows that no sequence has are zero
            out = q.new_zeros(found.out_shape)
        else:
            out = _empty_like(q) if found.like_q else q.new_empty(found.out_shape)
        pointers["o"] = out.data_ptr()
    else:
        written(out)
    lse = None
    if want_lse:
        lse = q.new_empty(found.lse_shape, dtype=torch.float32)
        if cu_q is not None or not found.launches:
            lse.fill_(-torch.inf)
        pointers["lse"] = lse.data_ptr()
    if found.workspace:
        memory = torch.empty(found.workspace, dtype=torch.float32, device=q.device)
        pointers["part"] = memory.data_ptr()
        pointers["part_lse"] = pointers["part"] + 4 * found.parts
    stream = raw_stream(index)
    if found.tickets:
        pointers["tickets"] = zeroed(found.device, q.device, stream, found.tickets)
    for launch, buffers in found.launches:
        launch([pointers[name] for name in buffers], stream)
    return (out, lse) if want_lse else out


def _explain(q: Any, k: Any, v: Any, options: DecodeOptions) -> None:
    """Raise what is wrong with a call whose arrays are not all tensors."""
    for name, x in {"k": k, "v": v, **options.arrays()}.items():
        require_tensor(x, name, options.op)
    for name, x in options.indices().items():
        integers(options.op, name, x)


def _brought(q: Any, k: Any, v: Any, options: DecodeOptions) -> DecodeOptions:
    """The options with lengths and tables as int32 on the device of ``q``; those from the host are checked first."""
    op = options.op
    moved = {name: integers(op, name, x) for name, x in options.indices().items()}
    host = {name: host_view_of(x, name, op) for name, x in moved.items() if x.device.type == "cpu"}
    if "context_lens" in host:
        problem, _ = decode_problem(op, **_views(q, k, v, options._replace(**moved)), **options.plain())
        check_contents(op, problem, host["context_lens"], host.get("block_tables"))
    there = {name: x.to(q.device, non_blocking=True) for name, x in moved.items()}
    return options._replace(**there)


def _views(q: Any, k: Any, v: Any, options: DecodeOptions) -> dict[str, Any]:
    refuse_tracing(options.op)
    tensors = {"q": q, "k": k, "v": v, **options.arrays(), **options.indices()}
    return {name: device_view(tensor, name, options.op) for name, tensor in tensors.items()}


def _prepare(q: Any, k: Any, v: Any, options: DecodeOptions) -> _Ready:
    """Validate, plan and build; what a signature needs once."""
    op = options.op
    device: Any = registry.find(options.backend or f"cuda:{q.device.index}")
    if device is None or device.index != q.device.index:
        raise DeviceMismatchError(
            f"[{op}] expected tensors on {options.backend}, got {q.device}; move them or drop backend="
        )
    problem, operands = decode_problem(op, **_views(q, k, v, options), **options.plain())
    if options.out is None:
        strides = torch.empty(operands.out_shape, device="meta").stride()
        out = TensorView(problem.dtype, operands.out_shape, tuple(strides), "cuda", None)
    else:
        out = device_view(checked_out(options.out, operands.out_shape, q, op), "out", op)
    views = decode_views(operands, _lifted(out, operands.form))
    aligned = {
        name: x.data_ptr() % 16 == 0 for name, x in (("q", q), ("k", k), ("v", v), ("o", options.out)) if x is not None
    }
    ready = prepare_decode(op, problem, views, device, aligned)
    like_q = tuple(q.shape) == operands.out_shape and q.is_contiguous()
    parts, workspace = ready.workspace.get("part", 0), sum(ready.workspace.values())
    launches, tickets = prepared_steps(ready, device), ready.zeroed.get("tickets", 0)
    return _Ready(operands, device, launches, parts, workspace, tickets, like_q)


def _lifted(view: TensorView, form: str) -> TensorView:
    """A view of the caller's shape with the four axes of the normal form."""
    shape, strides = view.shape, view.strides
    if form == "packed":
        return replace(view, shape=(1, shape[1], shape[0], shape[2]), strides=(0, strides[1], strides[0], strides[2]))
    if form == "token":
        return replace(view, shape=(*shape[:2], 1, shape[2]), strides=(*strides[:2], 0, strides[2]))
    return view


# -- merging -----------------------------------------------------------------------------------------------------------


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """As `aule.merge_states`; of tensors on any device, by PyTorch's own operators."""
    for name, tensor in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        require_tensor(tensor, name, "merge_states", "o_a")
    if not (o_a.shape == o_b.shape and lse_a.shape == lse_b.shape == o_a.shape[:-1]):
        raise InvalidShapeError(states_message(o_a, lse_a, o_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    level = torch.where(lse == -torch.inf, 0, lse)  # nothing on either side: exp(-inf + inf) would be NaN
    work = torch.float64 if o_a.dtype == torch.float64 else torch.float32
    parts = []
    for o, own in ((o_a, lse_a), (o_b, lse_b)):
        weight = torch.exp(own - level).to(work)[..., None]
        # Selected, not multiplied by 0: a side without keys may hold anything.
        parts.append(torch.where(weight != 0, o.to(work) * weight, 0))
    return (parts[0] + parts[1]).to(o_a.dtype), lse
