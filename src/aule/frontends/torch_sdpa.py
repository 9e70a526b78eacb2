"""PyTorch's ``scaled_dot_product_attention`` on the attention of `aule.frontends.torch`, with PyTorch's meaning.

A call is brought into one form first: four axes, the causal flag aligned top-left, a mask with four axes. Axes are
merged and expanded by stride where the strides allow it. What cannot be served is *refused* with a short reason, which
`aule.install` counts, and an error, which a direct call raises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional

from aule import settings
from aule._version import __version__
from aule.backends import registry
from aule.errors import AuleError, DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends import torch as front_end
from aule.frontends.torch_routes import autocast, dispatches, in_place
from aule.ops.attention.validate import MAX_HEAD_DIM
from aule.ops.checked import checked_flag, checked_number
from aule.options import AttentionOptions

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_OP = "[scaled_dot_product_attention]"
_TAG = " aule "


_serving: list[Callable[..., Any]] = []
"""What `replacement` made, which compiled graphs know by number."""


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
    """What a CausalBias says.

    In this form it goes through a compiled graph, where its class would be lost, and the tensor below has no elements.
    """

    lower_right: bool
    seq_q: int
    seq_kv: int

    def mask(self, device: Any) -> Any:
        """The same as a boolean mask."""
        shift = self.seq_kv - self.seq_q if self.lower_right else 0
        return torch.ones(self.seq_q, self.seq_kv, dtype=torch.bool, device=device).tril(shift)


class Call(NamedTuple):
    """A call in the form that `flash_attention` takes.

    Attributes
    ----------
    q, k, v : Tensor
        ``[batch, heads, seq, dim]``.
    out_shape : tuple of int
        The shape that PyTorch promises for the result.
    """

    q: Any
    k: Any
    v: Any
    options: AttentionOptions
    out_shape: tuple[int, ...]

    def run(self) -> Any:
        """Compute it."""
        out = front_end.flash_attention(self.q, self.k, self.v, self.options)
        if out.shape[-1] != self.out_shape[-1]:  # a value dimension of 0, which was padded to 1
            out = out[..., : self.out_shape[-1]]
        return out if out.shape == self.out_shape else out.reshape(self.out_shape)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
) -> Any:
    """As `aule.scaled_dot_product_attention`; ``backend`` as in `aule.flash_attention`."""
    if torch.compiler.is_compiling():
        from aule.frontends import torch_traced  # which imports the compiler

        mask = band(attn_mask)
        return torch_traced.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, backend
        )
    return compute(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend)


def compute(*arguments: Any) -> Any:
    """The same with the arguments in a row, unless PyTorch's compiler reads along."""
    try:
        call = prepare(*arguments)
    except Refused as refused:
        raise refused.error from None
    return call.run()


def replacement(
    original: Callable[..., Any],
    settings_now: Callable[[], tuple[bool, str | None]],
    count: Callable[[str | None], None],
) -> Callable[..., Any]:
    """A function to stand in the place of ``torch.nn.functional.scaled_dot_product_attention``.

    It must be kept for ever: TorchScript knows it by its address.

    Parameters
    ----------
    original : callable
        Gets what is not served.
    settings_now : callable
        Says whether to serve at all, and on which backend.
    count : callable
        Told of every call: None when it was served, else the reason.
    """

    def serve(
        query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: Any, gqa: bool,
        compiled: bool = False,
    ) -> Any:  # fmt: skip
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        active, backend = settings_now()
        if active:
            # A graph is traced several times; the first of them, with fake tensors, is where a call is counted.
            counts = not (compiled and type(query) is FunctionalTensor)
            try:
                result = prepare(*arguments, scale, gqa, backend, True, compiled).run()
            except Refused as refused:
                reason: str | None = refused.reason
            except AuleError as error:
                reason = error.code
            else:
                if counts:
                    count(None)
                return result
            if counts:
                count(reason)
        if isinstance(attn_mask, Band):
            arguments = (query, key, value, attn_mask.mask(query.device), dropout_p, is_causal)
        if _causal_bias(attn_mask):  # which knows what to do, but not where the builtin function is
            return torch.overrides.handle_torch_function(
                scaled_dot_product_attention, (attn_mask,), *arguments, scale=scale, enable_gqa=gqa
            )
        return original(*arguments, scale=scale, enable_gqa=gqa)

    number = len(_serving)
    _serving.append(serve)

    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if torch.compiler.is_compiling():
            from aule.frontends import torch_traced  # which imports the compiler

            mask = band(attn_mask)
            return torch_traced.installed(number, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        tensors = (query, key, value, attn_mask)
        if torch.overrides.has_torch_function(tensors) and not (settings_now()[0] and _is_causal_bias_alone(tensors)):
            # A subclass or a mode has its say first, with this very function, as with the builtin one.
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return torch.overrides.handle_torch_function(scaled_dot_product_attention, tensors, *arguments, **options)
        return serve(*arguments, scale, enable_gqa)

    scaled_dot_product_attention.__doc__ = original.__doc__
    # TorchScript takes it for PyTorch's operator, as it does the builtin function.
    torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
    return scaled_dot_product_attention


def serve(number: int, *arguments: Any) -> Any:
    """A call of a replacement out of compiled code."""
    return _serving[number](*arguments, compiled=True)


def get_function() -> Any:
    """What stands as ``torch.nn.functional.scaled_dot_product_attention``."""
    return functional.scaled_dot_product_attention


def set_function(function: Any) -> None:
    """Put a function there."""
    functional.scaled_dot_product_attention = function


def tag_graphs(serving: bool, backend: str | None = None) -> None:
    """Keep apart, on disk, compiled graphs in which aule stands in the place of PyTorch's function, and its own.

    PyTorch finds a stored graph by what its compiler saw, and of ``torch.nn.MultiheadAttention`` that is one call,
    whatever is called inside. Like all settings of PyTorch's compiler this one is the calling thread's.
    """
    from torch.compiler import config

    from aule.frontends import torch_ops  # of which a stored graph may be the first to speak

    own = config.cache_key_tag.partition(_TAG)[0]
    config.cache_key_tag = f"{own}{_TAG}{__version__} {backend} {torch_ops.SCHEMA}" if serving else own


def host_backend(tensor: Any) -> str | None:
    """The backend for a tensor when nobody named one: the CPU engine for CPU tensors, where it can be had.

    None in compiled code, where the operator takes the CPU engine by itself.
    """
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or settings.backend():
        return None
    try:
        registry.devices("cpu")
    except AuleError:
        return None
    return "cpu"


# -- one call ----------------------------------------------------------------------------------------------------------


def prepare(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: str | None = None,
    installed: bool = False,
    compiled: bool = False,
) -> Call:
    """Bring a call into the form that `flash_attention` takes, or raise `Refused`.

    ``installed`` refuses further what a direct call means on purpose: tensors that would be copied through the host,
    transforms, and modes but for those of the compiler when the call is ``compiled``.
    """
    align = "top-left"
    attn_mask = band(attn_mask)
    if isinstance(attn_mask, Band):
        is_causal, align = _from_band(query, key, attn_mask, is_causal)
        attn_mask = None
    _check_tensors(query, key, value, attn_mask)
    _check_transforms(installed, compiled, query, key, value, attn_mask)
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    _check_kinds(query, key, value, attn_mask)
    if installed and backend is None and query.device.type != "meta" and not in_place(query):
        expected = "expected tensors that aule computes on in place"
        _refuse(f"device {query.device.type}", DeviceMismatchError, expected, query.device)
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

    if query.shape[-1] == 0:  # every score is 0, whatever the scale: a dimension of one zero says the same
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
        backend=backend or host_backend(query),
    )
    return Call(
        _four_axes(query, outer, heads),
        _four_axes(key, outer, together),
        _four_axes(value, outer, together),
        options,
        out_shape[-rank:] if rank > 2 else out_shape[-2:],
    )


def _refuse(reason: str, kind: Any, expected: str, got: Any, remedy: str = "") -> NoReturn:
    message = f"{_OP} {expected}, got {got}; {remedy or 'use torch.nn.functional.scaled_dot_product_attention'}"
    raise Refused(reason, kind(message))


def _unsupported(message: str) -> AuleError:
    return AuleError("AULE_ERROR_UNSUPPORTED", message)


def _check_tensors(query: Any, key: Any, value: Any, mask: Any) -> None:
    given = {"query": query, "key": key, "value": value} | ({} if mask is None else {"attn_mask": mask})
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            expected, remedy = f"expected {name} to be a torch tensor", "use aule.flash_attention for other arrays"
            _refuse("not a tensor", InvalidDtypeError, expected, type(tensor).__name__, remedy)


def _check_transforms(installed: bool, compiled: bool, *tensors: Any) -> None:
    """Refuse where our operator would not do, or where PyTorch may want more of its own than ours has."""
    got = None
    if torch._C._get_tracing_state() is not None:
        got = "torch.jit.trace"
    elif torch.autograd.forward_ad._current_level >= 0:
        got = "forward-mode differentiation"
    elif installed and torch._C._functorch.peek_interpreter_stack() is not None:
        got = "a functorch transform"
    elif installed and not compiled and torch._C._len_torch_dispatch_stack() > 0:
        got = "a torch dispatch mode"
    elif installed and not compiled and any(map(dispatches, tensors)):
        got = "a tensor subclass with __torch_dispatch__"
    if got is not None:
        _refuse(got, _unsupported, "expected plain tensors outside of transforms", got)


def _autocast(query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, ...]:
    """What autocast does to the arguments of PyTorch's function."""
    resolved = (x if x is None or not x.is_neg() else x.resolve_neg() for x in (query, key, value, mask))
    return autocast(*resolved)


def _check_kinds(query: Any, key: Any, value: Any, mask: Any) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", mask)):
        if tensor is None:
            continue
        if tensor.layout != torch.strided or tensor.is_nested:
            got = "a nested tensor" if tensor.is_nested else f"the layout {tensor.layout}"
            _refuse("layout", _unsupported, f"expected {name} to be a dense, strided tensor", got)
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


def _check_numbers(dropout_p: Any, scale: Any) -> None:
    if type(dropout_p) is not float or (scale is not None and type(scale) is not float):
        dropout_p, scale = _number("dropout_p", dropout_p), None if scale is None else _number("scale", scale)
    if not 0.0 <= dropout_p <= 1.0:
        _refuse("dropout_p", InvalidArgumentError, "expected dropout_p in 0..1", dropout_p, "pass 0.0 for none")
    if scale is not None and not math.isfinite(scale):
        remedy = "pass None for 1/sqrt(head_dim)"
        _refuse("scale", InvalidArgumentError, "expected a finite scale or None", scale, remedy)


def _number(name: str, value: Any) -> float:
    try:
        return checked_number(_OP[1:-1], name, value)
    except InvalidArgumentError as error:
        raise Refused(name, error) from None


def _flag(name: str, value: Any) -> bool:
    if type(value) is bool:
        return value
    try:
        return checked_flag(_OP[1:-1], name, value)
    except InvalidArgumentError as error:
        raise Refused(name, error) from None


def _check_sizes(query: Any, key: Any, value: Any) -> None:
    if min(query.dim(), key.dim(), value.dim()) < 2:
        got = _shapes(query, key, value)
        _refuse("shapes", InvalidShapeError, "expected tensors [..., seq, head_dim]", got, "add the missing axes")
    if query.shape[-1] != key.shape[-1]:
        got = _shapes(query, key, value)
        _refuse("shapes", InvalidShapeError, "expected query and key of one head_dim", got, "make them equal")
    if key.shape[-2] != value.shape[-2]:
        got = _shapes(query, key, value)
        _refuse("shapes", InvalidShapeError, "expected key and value of one length", got, "make them equal")
    largest = max(query.shape[-1], value.shape[-1])
    if largest > MAX_HEAD_DIM:
        expected = f"expected a head_dim of at most {MAX_HEAD_DIM}"
        _refuse(f"head_dim above {MAX_HEAD_DIM}", InvalidShapeError, expected, largest)


def _shapes(query: Any, key: Any, value: Any) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"


def _heads(tensor: Any) -> int:
    return int(tensor.shape[-3]) if tensor.dim() > 2 else 1


def _grouped(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Key and value with one number of heads, which divides the query's. Heads are repeated only where they differ."""
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


def _repeated(tensor: Any, heads: int) -> Any:
    if tensor.shape[-3] == 1:
        return tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])
    return tensor if tensor.shape[-3] == heads else tensor.repeat_interleave(heads // tensor.shape[-3], -3)


def _leading(
    query: Any, key: Any, value: Any, heads: int, grouped: bool
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """What the leading axes broadcast to: all but the heads, the heads, and those of the scores alone."""
    lead_q, lead_k, lead_v = (tuple(x.shape[:-2]) for x in (query, key, value))
    if grouped:  # key and value have fewer heads, but no axis that broadcasts there
        lead_k, lead_v = (*lead_k[:-1], heads), (*lead_v[:-1], heads)
    if lead_q == lead_k == lead_v:  # as nearly always; to broadcast costs microseconds
        return (lead_q[:-1], heads, lead_q) if lead_q else ((), 1, ())
    try:
        scores = tuple(torch.broadcast_shapes(lead_q, lead_k))
        lead = tuple(torch.broadcast_shapes(scores, lead_v))
    except RuntimeError:
        remedy = "give each axis its full length or 1, or pass enable_gqa=True"
        got = _shapes(query, key, value)
        _refuse("shapes", InvalidShapeError, "expected leading axes that broadcast", got, remedy)
    return (lead[:-1], lead[-1], scores) if lead else ((), 1, scores)


def _four_axes(tensor: Any, outer: tuple[int, ...], heads: int) -> Any:
    """``[batch, heads, seq, dim]``: broadcast by stride, leading axes merged (a copy only where strides forbid it)."""
    rows, dim = tensor.shape[-2:]
    if len(outer) != 1 or tuple(tensor.shape) != (*outer, heads, rows, dim):
        tensor = tensor.expand(*outer, heads, rows, dim).reshape(math.prod(outer), heads, rows, dim)
    return tensor


def _mask(mask: Any, lead: tuple[int, ...], rows: int, columns: int, outer: tuple[int, ...]) -> Any:
    """The mask with four axes, broadcast axes still of length 1 where that can be said with four."""
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


def _causal_bias(mask: Any) -> bool:
    # An object of that class exists only when its module was imported.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _is_causal_bias_alone(tensors: tuple[Any, ...]) -> bool:
    return _causal_bias(tensors[3]) and not torch.overrides.has_torch_function(tensors[:3])


def band(mask: Any) -> Any:
    """A CausalBias as what it says; anything else as it is."""
    if not _causal_bias(mask):
        return mask
    upper_left = mask.variant == type(mask.variant).UPPER_LEFT
    return Band(not upper_left, mask.seq_len_q, mask.seq_len_kv)


def _from_band(query: Any, key: Any, said: Band, is_causal: bool) -> tuple[bool, str]:
    """The causal flag and its alignment; nothing is materialised."""
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
