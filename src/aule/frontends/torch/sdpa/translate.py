"""Translates a call of PyTorch's attention function into one of `aule.frontends.torch.entry`, or refuses it.

The result has four axes, the causal flag aligned top-left and a mask with four axes. Axes are merged and expanded by
stride where the strides allow it. A refusal has a short reason, which `aule.install` counts, and an error, which a
direct call raises.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from aule.errors import AuleError, DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends.torch import entry, route
from aule.frontends.torch.modes import autocast, dispatch_modes, dispatches, forward_ad, in_onnx_export, transform
from aule.ops.attention.checks import MAX_HEAD_DIM
from aule.ops.shared.checks import checked_flag, checked_number
from aule.options import AttentionOptions

Mask: TypeAlias = "Tensor | None"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_OP = "scaled_dot_product_attention"
_FUSED = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)
"""Whether ``torch.nn.attention.sdpa_kernel`` allows each fused kernel, on any device."""
NESTED = "a nested tensor"
_INSTALL = 'pip install "aule-attention[cpu]"'


class Arguments(NamedTuple):
    """Arguments of PyTorch's function, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Mask = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class Refused(Exception):
    """A call that is not served.

    Attributes
    ----------
    reason : str
        A few words, the same for all calls that are refused alike.
    error : AuleError
        What a direct call raises.
    """

    def __init__(self, reason: str, error: AuleError) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


class Band(NamedTuple):
    """A CausalBias as plain values.

    In this form it passes through a compiled graph, where its class would be lost, and its tensor has no elements.
    """

    lower_right: bool
    seq_q: int
    seq_kv: int

    def mask(self, device: torch.device) -> Tensor:
        """The band as a boolean mask."""
        shift = self.seq_kv - self.seq_q if self.lower_right else 0
        return torch.ones(self.seq_q, self.seq_kv, dtype=torch.bool, device=device).tril(shift)


class Translated(NamedTuple):
    """Arguments of `entry.flash_attention`.

    Attributes
    ----------
    q, k, v : Tensor
        ``[batch, heads, seq, dim]``.
    out_shape : tuple of int
        The shape that PyTorch promises for the result.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: AttentionOptions
    out_shape: tuple[int, ...]

    def run(self) -> Tensor:
        """Compute the call."""
        out = entry.flash_attention(self.q, self.k, self.v, self.options)
        assert not isinstance(out, tuple)
        if out.shape[-1] != self.out_shape[-1]:  # a value dimension of 0, which was padded to 1
            out = out[..., : self.out_shape[-1]]
        return out if out.shape == self.out_shape else out.reshape(self.out_shape)


def translate(
    given: Arguments, backend: str | None = None, installed: bool = False, compiled: bool = False
) -> Translated:
    """Translate a call, or raise `Refused`.

    A call of the ``installed`` function is also refused for what a direct call may intend: tensors that would be copied
    through the host or computed by NumPy, PyTorch's choice of kernels (``sdpa_kernel``), transforms, and modes (other
    than the compiler's, if the call is ``compiled``).
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = given
    align = "top-left"
    attn_mask = band(attn_mask)
    if isinstance(attn_mask, Band):
        is_causal, align = _from_band(query, key, attn_mask, is_causal)
        attn_mask = None
    _check_tensors(query, key, value, attn_mask)
    _check_transforms(installed, compiled, query, key, value, attn_mask)
    if installed and not any(enabled() for enabled in _FUSED):
        expected = "expected a context that allows FLASH_ATTENTION, EFFICIENT_ATTENTION or CUDNN_ATTENTION"
        _refuse("sdpa_kernel allows no fused kernel", _unsupported, expected, "none of them")
    given_tensors = (query, key, value, attn_mask)
    resolved = (x if x is None or not x.is_neg() else x.resolve_neg() for x in given_tensors)
    query, key, value, attn_mask = autocast(*resolved)
    _check_kinds(query, key, value, attn_mask)
    if installed and backend is None and query.device.type != "meta":
        _check_speed(query)
    _check_numbers(dropout_p, scale)
    is_causal, enable_gqa = _flag("is_causal", is_causal), _flag("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        _refuse(
            "attn_mask with is_causal",
            InvalidArgumentError,
            "expected either attn_mask or is_causal=True",
            "both",
            "put the causal band into the mask",
        )
    _check_sizes(query, key, value)

    key, value = _grouped(query, key, value) if enable_gqa else (key, value)
    heads = query.shape[-3] if query.dim() > 2 else 1
    outer, heads, score_lead = _leading(query, key, value, heads, enable_gqa)
    mask = None if attn_mask is None else _mask(attn_mask, score_lead, query.shape[-2], key.shape[-2], outer)

    if query.shape[-1] == 0:  # every score is 0, whatever the scale: pad with one zero
        query, key = (functional.pad(x, (0, 1)) for x in (query, key))
        scale = 1.0
    value_dim = value.shape[-1]
    if value_dim == 0:
        value = functional.pad(value, (0, 1))
    out_shape = (*outer, heads, query.shape[-2], value_dim)
    rank = max(query.dim(), key.dim(), value.dim())
    kv_heads = {_heads(key), _heads(value)}
    together = kv_heads.pop() if len(kv_heads) == 1 else heads
    options = AttentionOptions(
        causal=is_causal,
        scale=scale,
        mask=mask,
        dropout_p=float(dropout_p),
        causal_align=align,
        backend=backend or route.host_backend(query),
    )
    return Translated(
        _four_axes(query, outer, heads),
        _four_axes(key, outer, together),
        _four_axes(value, outer, together),
        options,
        out_shape[-rank:] if rank > 2 else out_shape[-2:],
    )


def _refuse(reason: str, kind: Callable[[str], AuleError], expected: str, got: object, remedy: str = "") -> NoReturn:
    message = f"[{_OP}] {expected}, got {got}; {remedy or 'use torch.nn.functional.scaled_dot_product_attention'}"
    raise Refused(reason, kind(message))


def _unsupported(message: str) -> AuleError:
    return AuleError("AULE_ERROR_UNSUPPORTED", message)


def _check_tensors(query: object, key: object, value: object, mask: object) -> None:
    given = {"query": query, "key": key, "value": value} | ({} if mask is None else {"attn_mask": mask})
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            expected, remedy = f"expected {name} to be a torch tensor", "use aule.flash_attention for other arrays"
            _refuse("not a tensor", InvalidDtypeError, expected, type(tensor).__name__, remedy)


def _check_transforms(installed: bool, compiled: bool, *tensors: Mask) -> None:
    """Refuse calls that our operator cannot serve, or whose derivatives PyTorch's own function has and ours lacks."""
    got = None
    if torch._C._get_tracing_state() is not None:
        got = "torch.jit.trace"
    elif forward_ad._current_level >= 0:
        got = "forward-mode differentiation"
    elif installed and transform() is not None:
        got = "a functorch transform"
    elif installed and compiled and in_onnx_export():
        got = "torch.onnx.export"
    elif installed and not compiled and dispatch_modes() > 0:
        got = "a torch dispatch mode"
    elif installed and not compiled and any(map(dispatches, tensors)):
        got = "a tensor subclass with __torch_dispatch__"
    if got is not None:
        _refuse(got, _unsupported, "expected plain tensors outside of transforms", got)


def _check_speed(query: Tensor) -> None:
    """Refuse tensors that PyTorch computes faster."""
    if not route.home(query).in_place:
        expected = "expected tensors that aule computes on in place"
        _refuse(f"device {query.device.type}", DeviceMismatchError, expected, query.device)
    if not route.has_fast_engine(query):
        warn_without_engine()
        _refuse("no CPU engine", _unsupported, "expected the CPU engine for CPU tensors", "none", _INSTALL)


@cache
def warn_without_engine() -> None:
    """Say once that PyTorch computes attention on CPU tensors, which the user has asked aule for."""
    text = f"aule passes attention on CPU tensors on to PyTorch, because there is no CPU engine: {_INSTALL}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _check_kinds(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", mask)):
        if tensor is None:
            continue
        if tensor.layout != torch.strided or tensor.is_nested:
            expected = f"expected {name} to be a dense, strided tensor"
            if tensor.is_nested:
                _refuse(NESTED, _unsupported, expected, "a nested tensor")
            _refuse("layout", _unsupported, expected, f"the layout {tensor.layout}")
        if tensor.device.type == "meta":
            _refuse("device meta", DeviceMismatchError, f"expected {name} in memory", "a meta tensor")
        if tensor.device != query.device:
            got = f"{name} on {tensor.device} and query on {query.device}"
            _refuse("devices differ", DeviceMismatchError, "expected all tensors on one device", got, "move them")
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        _refuse(
            "dtype",
            InvalidDtypeError,
            "expected query, key and value of one dtype of float32, float16, bfloat16 and float64",
            f"{query.dtype}, {key.dtype} and {value.dtype}",
            "convert with .to",
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        expected = f"expected attn_mask of torch.bool, torch.float32 or {query.dtype}"
        _refuse("dtype of attn_mask", InvalidDtypeError, expected, mask.dtype, "convert with .to")


def _check_numbers(dropout_p: float, scale: float | None) -> None:
    if type(dropout_p) is not float or (scale is not None and type(scale) is not float):
        dropout_p = _checked(checked_number, "dropout_p", dropout_p)
        scale = None if scale is None else _checked(checked_number, "scale", scale)
    if not 0.0 <= dropout_p <= 1.0:
        _refuse("dropout_p", InvalidArgumentError, "expected dropout_p in 0..1", dropout_p, "pass 0.0 for none")
    if scale is not None and not math.isfinite(scale):
        remedy = "pass None for 1/sqrt(head_dim)"
        _refuse("scale", InvalidArgumentError, "expected a finite scale or None", scale, remedy)


def _checked(check: Callable[[str, str, object], Any], name: str, value: object) -> Any:
    try:
        return check(_OP, name, value)
    except InvalidArgumentError as error:
        raise Refused(name, error) from None


def _flag(name: str, value: object) -> bool:
    return value if type(value) is bool else bool(_checked(checked_flag, name, value))


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if min(query.dim(), key.dim(), value.dim()) < 2:
        _refuse_shapes((query, key, value), "expected tensors [..., seq, head_dim]", "add the missing axes")
    if query.shape[-1] != key.shape[-1]:
        _refuse_shapes((query, key, value), "expected query and key of one head_dim", "make them equal")
    if key.shape[-2] != value.shape[-2]:
        _refuse_shapes((query, key, value), "expected key and value of one length", "make them equal")
    largest = max(query.shape[-1], value.shape[-1])
    if largest > MAX_HEAD_DIM:
        expected = f"expected a head_dim of at most {MAX_HEAD_DIM}"
        _refuse(f"head_dim above {MAX_HEAD_DIM}", InvalidShapeError, expected, largest)


def _refuse_shapes(tensors: tuple[Tensor, Tensor, Tensor], expected: str, remedy: str) -> NoReturn:
    query, key, value = (list(x.shape) for x in tensors)
    _refuse("shapes", InvalidShapeError, expected, f"query {query}, key {key} and value {value}", remedy)


def _heads(tensor: Tensor) -> int:
    return int(tensor.shape[-3]) if tensor.dim() > 2 else 1


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with the same number of heads, which divides the query's; repeated only if they differ."""
    if min(query.dim(), key.dim(), value.dim()) < 3:
        expected = "expected [..., heads, seq, head_dim] with enable_gqa"
        _refuse("shapes", InvalidShapeError, expected, "two axes", "add the axis of heads")
    heads, heads_k, heads_v = _heads(query), _heads(key), _heads(value)
    if any(heads % n if n else heads for n in (heads_k, heads_v)):
        _refuse(
            "shapes",
            InvalidShapeError,
            "expected the query's heads to be a multiple of key's and of value's",
            f"{heads}, {heads_k} and {heads_v}",
            "repeat or drop heads",
        )
    if heads_k == heads_v:
        return key, value
    common = math.lcm(heads_k, heads_v)
    return _repeated(key, common), _repeated(value, common)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    if tensor.shape[-3] == 1:
        return tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])
    return tensor if tensor.shape[-3] == heads else tensor.repeat_interleave(heads // tensor.shape[-3], -3)


def _leading(
    query: Tensor, key: Tensor, value: Tensor, heads: int, grouped: bool
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Broadcast the leading axes: all but the heads, the heads, and the leading axes of the scores."""
    lead_q, lead_k, lead_v = (tuple(x.shape[:-2]) for x in (query, key, value))
    if grouped:  # key and value have fewer heads, but no axis that broadcasts there
        lead_k, lead_v = (*lead_k[:-1], heads), (*lead_v[:-1], heads)
    if lead_q == lead_k == lead_v:  # the usual case; broadcasting is slow
        return (lead_q[:-1], heads, lead_q) if lead_q else ((), 1, ())
    try:
        scores = tuple(torch.broadcast_shapes(lead_q, lead_k))
        lead = tuple(torch.broadcast_shapes(scores, lead_v))
    except RuntimeError:
        remedy = "give each axis its full length or 1, or pass enable_gqa=True"
        _refuse_shapes((query, key, value), "expected leading axes that broadcast", remedy)
    return (lead[:-1], lead[-1], scores) if lead else ((), 1, scores)


def _four_axes(tensor: Tensor, outer: tuple[int, ...], heads: int) -> Tensor:
    """``[batch, heads, seq, dim]``: broadcast by stride, leading axes merged (a copy only where strides forbid it)."""
    rows, dim = tensor.shape[-2:]
    if len(outer) != 1 or tuple(tensor.shape) != (*outer, heads, rows, dim):
        tensor = tensor.expand(*outer, heads, rows, dim).reshape(math.prod(outer), heads, rows, dim)
    return tensor


def _mask(mask: Tensor, lead: tuple[int, ...], rows: int, columns: int, outer: tuple[int, ...]) -> Tensor:
    """The mask with four axes; broadcast axes keep length 1 where four axes can express that."""
    full = (*lead, rows, columns)
    fits = 2 <= mask.dim() <= len(full) and all(
        n in (1, size) for n, size in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        _refuse(
            "shape of attn_mask",
            InvalidShapeError,
            f"expected attn_mask with two axes or more that broadcasts to {list(full)}",
            list(mask.shape),
            "give each axis its full length or 1",
        )
    mask = mask[(None,) * (max(len(outer), 1) + 3 - mask.dim())]
    if len(outer) > 1:
        if any(n != 1 for n in mask.shape[:-3]):
            mask = mask.expand(*outer, *mask.shape[-3:])
        mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
    return mask


# -- torch.nn.attention.bias -------------------------------------------------------------------------------------------


def is_causal_bias(mask: object) -> bool:
    """Whether a mask is PyTorch's `CausalBias`."""
    # An object of that class exists only when its module was imported.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def band(mask: Any) -> Any:
    """A CausalBias as a `Band`; anything else unchanged."""
    if not is_causal_bias(mask):
        return mask
    upper_left = mask.variant == type(mask.variant).UPPER_LEFT
    return Band(not upper_left, mask.seq_len_q, mask.seq_len_kv)


def _from_band(query: Tensor, key: Tensor, said: Band, is_causal: bool) -> tuple[bool, str]:
    """The causal flag and its alignment."""
    if is_causal:
        expected = "expected either a CausalBias or is_causal=True"
        _refuse("attn_mask with is_causal", InvalidArgumentError, expected, "both", "drop is_causal")
    lower_right, seq_q, seq_kv = said
    if not lower_right or seq_q == seq_kv:
        return True, "top-left"
    _check_tensors(query, key, key, None)
    lengths = (query.shape[-2], key.shape[-2]) if min(query.dim(), key.dim()) >= 2 else ()
    if lengths != (seq_q, seq_kv):
        expected = f"expected a bias of lengths {lengths}"
        _refuse("shape of attn_mask", InvalidShapeError, expected, (seq_q, seq_kv), "make it for these lengths")
    return True, "bottom-right"
