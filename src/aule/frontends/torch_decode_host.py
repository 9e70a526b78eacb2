"""Decoding with PyTorch tensors in host memory, and with those of devices that go through it.

On the CPU engine a signature is validated and planned once; every further call checks what lengths and tables hold and
goes to the launches, with the tensors' addresses; one that is like the last takes the short way of
`aule.frontends.torch_repeated_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from aule.engine import cpu
from aule.engine.attention import host_device_of
from aule.engine.decode import decode_on_host
from aule.engine.memory import host_view
from aule.errors import DeviceMismatchError
from aule.frontends import torch_repeated_host as again
from aule.frontends.torch_host import host_view_of, layout, remember, shares_memory
from aule.frontends.torch_views import NAMES, by_value, checked_out, integers, refuse_tracing, require_tensor, written
from aule.ops.decode.plan import decode_views
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands, check_contents, check_numbers, decode_problem
from aule.options import DecodeOptions

_BUFFERS = {"context_lens": "lens", "block_tables": "tables", "cu_seqlens_q": "cu_q", "alibi_slopes": "alibi"}
"""Names of buffers that are not those of the options."""
_OPERANDS = ("q", "k", "v", "lens", "tables", "k_scale", "v_scale", "alibi", "sinks")
"""Names of buffers, in the order in which `_alike` has the tensors."""


def on_host(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """Decoding on CPU tensors."""
    alike = _alike(q, k, v, options)
    if alike is not None:
        found = again.repeated(*alike)
        if found is not None:
            return found if options.return_lse else found[0]
    device: Any = host_device_of(NAMES.get(q.dtype, ""), options.backend)
    if device is not None and device.target.backend == "cpu" and options.cu_seqlens_q is None:
        given = {"q": q, "k": k, "v": v, **options.arrays(), **options.indices()}
        if options.out is None or not shares_memory(options.out, given.values()):
            try:
                return _on_engine(given, options, device, alike)
            except _NoKey:
                pass
    problem, operands = host_problem(options.op, q, k, v, options)
    out = options.out
    if out is None:
        out = torch.empty(operands.out_shape, dtype=q.dtype)
    else:
        written(checked_out(out, operands.out_shape, q, options.op))
    target = operands.lifted(host_view_of(out, "out").storage)
    _, lse = decode_on_host(options.op, problem, operands, device, target)
    return (out, torch.from_numpy(lse).reshape(operands.lse_shape)) if options.return_lse else out


def host_problem(op: str, q: Any, k: Any, v: Any, options: DecodeOptions) -> tuple[DecodeProblem, DecodeOperands]:
    """`decode_problem` of CPU tensors."""
    refuse_tracing(op)
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    tensors |= {name: integers(op, name, array) for name, array in options.indices().items()}
    views: dict[str, Any] = {name: host_view_of(tensor, name, op) for name, tensor in tensors.items()}
    return decode_problem(op, **views, **options.plain())


# -- by signature, on the CPU engine -----------------------------------------------------------------------------------


class _Signature(NamedTuple):
    """What is known of a call once it was validated and planned."""

    ready: cpu.Ready
    problem: DecodeProblem
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


class _NoKey(Exception):
    """A call without a signature."""


_Alike = tuple[str, tuple[str, ...], tuple[Any, ...], str | None, tuple[Any, ...]]


def _alike(q: Any, k: Any, v: Any, options: DecodeOptions) -> _Alike | None:
    """What tells whether a call is like another one, as `torch_repeated_host` takes it; None where that takes the
    longer way: packed sequences, results that are given, indices that are converted first, and options that are no keys
    by their value."""
    (
        lens, tables, cu_q, _, k_scale, v_scale, order, causal, scale, window, softcap, alibi, sinks, lse, out, backend,
    ) = options  # fmt: skip
    if cu_q is not None or out is not None or by_value(options.op, options):
        return None
    if any(x is not None and getattr(x, "dtype", None) is not torch.int32 for x in (lens, tables)):
        return None
    tensors = (q, k, v, lens, tables, k_scale, v_scale, alibi, sinks)
    return options.op, (), (order, causal, scale, window, softcap, lse), backend, tensors


def _checks(op: str, problem: DecodeProblem) -> Callable[[Sequence[Any]], None]:
    """The check of what lengths and tables hold, for the tensors of `_alike`."""

    def check(tensors: Sequence[Any]) -> None:
        lens, tables = tensors[3:5]
        if lens is not None:
            check_numbers(op, problem, lens.numpy(), None if tables is None else tables.numpy())

    return check


def _on_engine(given: dict[str, Any], options: DecodeOptions, device: Any, alike: _Alike | None) -> Any:
    """Of sequences that are not packed: with their offsets the problem would change."""
    lens, tables = options.context_lens, options.block_tables
    for name, x in (("context_lens", lens), ("block_tables", tables)):
        if x is not None and getattr(x, "dtype", None) is not torch.int32:
            given[name] = integers(options.op, name, x)
    plain = options.plain() | by_value(options.op, options)
    out = options.out
    known: dict[Any, _Signature] = vars(device).setdefault("_torch_decode", {})
    try:
        key = (*plain.values(), *((name, layout(x)) for name, x in given.items()), None if out is None else layout(out))
        found = known.get(key)
    except (TypeError, RuntimeError) as error:  # an option that is no key, or a tensor without strides
        raise _NoKey from error
    if found is None:
        found = _prepared(given, options, device)
        remember(known, key, found)
    elif lens is not None:
        contents = (host_view_of(given[name], name) if x is not None else None for name, x in
                    (("context_lens", lens), ("block_tables", tables)))  # fmt: skip
        check_contents(options.op, found.problem, *contents)
    dtype = given["q"].dtype
    out = torch.empty(found.out_shape, dtype=dtype) if out is None else written(out)
    addresses = {_BUFFERS.get(name, name): x.data_ptr() for name, x in given.items()}
    addresses["o"] = out.data_ptr()
    lse = None
    if options.return_lse:
        lse = torch.empty(found.lse_shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        addresses["lse"] = lse.data_ptr()
    if alike is not None and found.ready.buffers and dtype != torch.float64:  # whose log-sum-exp is converted
        outputs = [("o", dtype, found.out_shape, None)]
        if lse is not None:
            outputs.append(("lse", lse.dtype, found.lse_shape, None))
        results = [name for name, *_ in outputs]
        check = _checks(options.op, found.problem)
        again.remember(*alike, _OPERANDS, found.ready, device, outputs, results, check)
    cpu.run(found.ready, device, addresses)
    return out if lse is None else (out, lse.float())


def _prepared(given: dict[str, Any], options: DecodeOptions, device: Any) -> _Signature:
    q, k, v = (given[name] for name in "qkv")
    problem, operands = host_problem(options.op, q, k, v, options)
    out = torch.empty(operands.out_shape, dtype=q.dtype) if options.out is None else options.out
    target = operands.lifted(host_view_of(checked_out(out, operands.out_shape, q, options.op), "out").storage)
    ready = cpu.prepare_decode(problem, decode_views(operands, host_view(problem.dtype, target)), device)
    return _Signature(ready, problem, operands.out_shape, operands.lse_shape)


# -- through the host --------------------------------------------------------------------------------------------------


def staged(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """Tensors on a device that aule does not drive directly go through the host and come back."""
    for name, tensor in {"k": k, "v": v, **options.arrays()}.items():
        require_tensor(tensor, name, options.op)
        if tensor.device != q.device:
            raise DeviceMismatchError(
                f"[{options.op}] expected {name} on {q.device} like q, got {tensor.device}; move it with .to"
            )
    moved = {name: array.cpu() for name, array in (options.arrays() | options.indices()).items()}
    result = on_host(q.cpu(), k.cpu(), v.cpu(), options._replace(out=None, **moved))
    out, lse = result if options.return_lse else (result, None)
    if options.out is not None:
        out = checked_out(options.out, tuple(out.shape), q, options.op).copy_(out)
    out = out.to(q.device)
    return out if lse is None else (out, lse.to(q.device))
