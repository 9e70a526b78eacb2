"""PyTorch tensors. Imported only when torch is loaded already.

CPU tensors are used in place. CUDA tensors are used in place on the current stream: the first call of a signature
plans and builds, every further one goes from one dictionary look-up to the launch. MPS tensors are used in place too
(`torch_mps`), and tensors elsewhere (ROCm, XPU) are staged through the host (`torch_stage`).

All that holds for calls which compute at once. Where PyTorch traces, transforms or intercepts operators, the call
becomes the operator of `torch_ops`, which comes back to `with_lse` and `gradients` here when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aule import settings
from aule.backends import registry
from aule.engine.attention import (
    named,
    prepare_backward,
    prepare_forward,
)
from aule.errors import AuleError, BackendUnavailableError, DeviceMismatchError, InvalidDtypeError
from aule.frontends.torch_host import host_gradients, host_with_lse, no_gradient, on_host
from aule.frontends.torch_launches import extras_aligned, in_steps, prepared_steps
from aule.frontends.torch_repeated import Repeated
from aule.frontends.torch_seeds import seed_on
from aule.frontends.torch_stage import staged, staged_gradients, staged_with_lse
from aule.frontends.torch_views import (
    NAMES,
    by_value,
    checked_out,
    dtype_name,
    refuse_tracing,
    require_plain,
    require_tensor,
)
from aule.ops.attention.precision import checked_precision
from aule.ops.attention.validate import (
    FLOAT_DTYPES,
    attention_problem,
    checked_deterministic,
    checked_dropout,
    checked_seed,
)
from aule.ops.checked import checked_flag
from aule.options import AttentionOptions, DecodeOptions
from aule.view import TensorView, contiguous_strides

_Tensor = torch.Tensor
# By names of this module: what is asked on every call, each a few dozen nanoseconds, would take as long to be found.
_read_by_dynamo = torch.compiler.is_dynamo_compiling  # only while it reads this code, not while a graph is traced
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_forward_ad = torch.autograd.forward_ad
_any_autocast = torch._C._is_any_autocast_enabled
_cuda_autocast = torch.is_autocast_enabled  # half the price of the one above
_grad_enabled = torch.is_grad_enabled
_empty_like = torch.empty_like
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_CUDA_BUILD = torch.version.cuda is not None
_launches: dict[Any, PreparedLaunch] = {}
_repeated: dict[AttentionOptions, Repeated] = {}
_MAX_LAUNCHES = 4096


def accepts(array: object) -> bool:
    return isinstance(array, torch.Tensor)


def flash_attention(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention on torch tensors.

    PyTorch must see an operator where the elements are not simply in memory, or others watch the call: inside of
    dispatch modes (fake tensors, with which graphs are traced, among them), functorch transforms and forward-mode
    differentiation, and for subclasses with ``__torch_dispatch__``. An operator costs tens of microseconds, so it is
    asked for on every call, in line, at a third of one.
    """
    if _read_by_dynamo():
        from aule.frontends import torch_traced  # which imports the compiler

        return torch_traced.flash_attention(q, k, v, *options)
    try:
        again = _repeated.get(options)
    except TypeError:  # a window given as a list, or an array of NumPy
        again = None
    if again is not None:
        out = again(q, k, v)
        if out is not None:
            return out
    if (
        type(options.dropout_p) is not float
        or options.dropout_p != 0.0
        or options.seed is not None
        or options.deterministic is not False
        or options.precision is not None
    ):
        options = _completed("flash_attention", q, options)
    if (
        _dispatch_modes()
        or _transform() is not None
        or _forward_ad._current_level >= 0
        or (type(q) is not _Tensor and dispatches(q))
        or (type(k) is not _Tensor and dispatches(k))
        or (type(v) is not _Tensor and dispatches(v))
    ):
        return _operator(q, k, v, options)
    cuda = q.is_cuda
    if _cuda_autocast() if cuda else _any_autocast():
        q, k, v = autocast(q, k, v)
    if _grad_enabled() and needs_gradient(q, k, v, options):
        return _with_gradient(q, k, v, options)
    if cuda and _CUDA_BUILD and options.backend is None:  # the way that counts, without a further question
        return _on_cuda(q, k, v, options)
    where = route(q, options)
    if where == "cuda":
        return _on_cuda(q, k, v, options)
    if where == "host":
        return on_host(q, k, v, options)
    if where == "mps":
        return _mps().on_mps(q, k, v, options)
    if q.is_meta and getattr(k, "is_meta", False) and getattr(v, "is_meta", False):
        return _operator(q, k, v, options)
    return staged(q, k, v, options)


def _operator(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    from aule.frontends import torch_ops  # which needs this module

    return torch_ops.flash_attention(q, k, v, options)


def flash_attention_varlen(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int | None, max_k: int | None, options: AttentionOptions
) -> Any:
    """Attention on packed batches of torch tensors."""
    if _read_by_dynamo():
        from aule.frontends import torch_traced  # which imports the compiler

        return torch_traced.flash_attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, options)
    from aule.frontends import torch_varlen  # which needs this module

    seeded = type(options.dropout_p) is not float or options.dropout_p != 0.0 or options.seed is not None
    if seeded or options.deterministic is not False:
        options = _completed("flash_attention_varlen", q, options)
    return torch_varlen.flash_attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, options)


def fused(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Any:
    """An op of the catalogue on torch tensors."""
    if _read_by_dynamo():
        from aule.frontends import torch_traced  # which imports the compiler

        return torch_traced.fused(name, tensors, options, backend)
    from aule.frontends import torch_fused  # which needs this module

    return torch_fused.fused(name, tensors, options, backend)


def decode(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """Attention over a cache of keys and values, of torch tensors."""
    if _read_by_dynamo():
        from aule.frontends import torch_traced  # which imports the compiler

        return torch_traced.decode(q, k, v, options)
    from aule.frontends import torch_decode  # which needs this module

    return torch_decode.decode(q, k, v, options)


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Results over disjoint keys put together, of torch tensors."""
    from aule.frontends import torch_decode  # which needs this module

    return torch_decode.merge_states(o_a, lse_a, o_b, lse_b)


def _completed(op: str, q: Any, options: AttentionOptions) -> AttentionOptions:
    """The options with a seed on the device of ``q`` where weights are dropped: the given one, or one drawn there from
    PyTorch's generator, which `torch.manual_seed` sets. Nothing waits for the device, and a CUDA graph can hold it; a
    compiled one draws anew each time, since this is traced."""
    exactly = checked_deterministic(op, options.deterministic)
    checked_precision(op, options.precision)
    p = checked_dropout(op, options.dropout_p)
    number = checked_seed(op, options.seed)
    if p == 0.0:
        return options._replace(dropout_p=p, seed=None, deterministic=exactly)
    return options._replace(dropout_p=p, seed=seed_on(number, q.device), deterministic=exactly)


def dispatches(x: Any) -> bool:
    """Whether it is a tensor that handles operators itself."""
    return isinstance(x, torch.Tensor) and type(x).__torch_dispatch__ is not _PLAIN_DISPATCH


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """What autocast does to tensors, the first of which says where: floats but float64 become the chosen type."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def route(q: Any, options: AttentionOptions) -> str:
    """Where a tensor is computed on, as `route_of` says."""
    return route_of(q, options.backend)


def route_of(q: Any, backend: str | None) -> str:
    """Where a tensor is computed on: in place as ``"cuda"``, ``"host"`` or ``"mps"``, or ``"staged"`` through the host.

    ``backend=`` may take a tensor of a GPU elsewhere.
    """
    if q.is_cuda:
        return "cuda" if _CUDA_BUILD and (backend is None or backend.startswith("cuda")) else "staged"
    kind = q.device.type
    if kind == "cpu":
        return "host"
    wanted = backend or settings.backend() or "metal"
    return "mps" if kind == "mps" and wanted.startswith("metal") and _mps().available() else "staged"


def in_place(q: Any) -> bool:
    """Whether a tensor is computed on where it lies, when nothing is forced."""
    return route(q, AttentionOptions()) != "staged"


def _mps() -> Any:
    from aule.frontends import torch_mps  # which needs this module

    return torch_mps


_PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def to_precision(tensor: Any, precision: str) -> Any:
    """Convert floats to ``"fp16"``, ``"bf16"`` or ``"fp32"``; without a copy when they are that already."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidDtypeError(
            f"[attention] expected torch tensors of floats to convert to {precision}, got {got}; convert with .to"
        )
    return tensor.to(_PRECISIONS[precision])


def make(array: Any, device: Any, dtype: Any, op: str) -> Any:
    """A NumPy array of float64 as a tensor on a device, by default the CPU, in a dtype, by default float32."""
    kind = torch.float32 if dtype is None else dtype
    if not isinstance(kind, torch.dtype) or NAMES.get(kind) not in FLOAT_DTYPES:
        raise InvalidDtypeError(f"[{op}] expected dtype as a float type of torch, got {dtype!r}; such as torch.float32")
    made = torch.from_numpy(array).to(kind)
    try:
        return made if device is None else made.to(device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise BackendUnavailableError(
            "torch", f"[{op}] expected a device that PyTorch has, got {device!r} ({error}); pass device='cpu'"
        ) from error


# -- gradients ---------------------------------------------------------------------------------------------------------


def needs_gradient(q: Any, k: Any, v: Any, options: AttentionOptions) -> bool:
    """Asked on every call: a loop over all of them would cost more than the rest of a repeated one."""
    if q.requires_grad or getattr(k, "requires_grad", False) or getattr(v, "requires_grad", False):
        return True
    mask, bias, slopes, sinks, out = options.mask, options.bias, options.alibi_slopes, options.sinks, options.out
    cos = options.rope_cos
    if mask is None and bias is None and slopes is None and sinks is None and cos is None and out is None:
        return False
    return any(getattr(x, "requires_grad", False) for x in (mask, bias, slopes, sinks, cos, options.rope_sin, out))


CONSTANT = ("alibi_slopes", "rope_cos", "rope_sin")
"""Options that are tensors of floats and have no gradient."""


def check_gradients(q: Any, k: Any, v: Any, options: AttentionOptions) -> None:
    """Refuse what has no gradient but wants one."""
    for name in (*CONSTANT, "out"):
        if getattr(getattr(options, name), "requires_grad", False):
            raise no_gradient(name, f"detach {name}, which has no gradient here")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(tensor, name)
    if options.out is not None:
        raise no_gradient("out=", "leave out= away, or call it under torch.no_grad()")


def _with_gradient(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention whose result can be differentiated with respect to q, k, v, additive masks, bias and sinks."""
    check_gradients(q, k, v, options)
    options = keyed(options)
    # As arguments of their own, so that autograd sees them.
    out, lse = _Attention.apply(q, k, v, options.mask, options.bias, options.sinks, options)
    return (out, lse) if options.return_lse else out


def keyed(options: AttentionOptions) -> AttentionOptions:
    """The options with flags, numbers and a window that are keys by value, not by identity."""
    changed = by_value("flash_attention", options)
    causal: Any = options.causal
    shown: Any = options.return_lse
    if type(causal) is not bool or type(shown) is not bool:
        flags = {"causal": causal, "return_lse": shown}
        changed = changed | {name: checked_flag("flash_attention", name, flag) for name, flag in flags.items()}
    return options._replace(**changed) if changed else options


def with_lse(q: Any, k: Any, v: Any, options: AttentionOptions, *, training: bool) -> tuple[Any, Any]:
    """Attention and its log-sum-exp in the type that is computed in, both fresh and contiguous, for `gradients`.

    Where nothing but NumPy is there, which has no gradients, ``training`` refuses.
    """
    options = options._replace(return_lse=True, out=None)
    where = route(q, options)
    if where == "cuda":
        return _on_cuda(q, k, v, options)  # type: ignore[no-any-return]
    if where == "host":
        return host_with_lse(q, k, v, options, training=training)
    if where == "mps":
        return _mps().on_mps(q, k, v, options)  # type: ignore[no-any-return]
    return staged_with_lse(q, k, v, options, training=training)


def gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, wanted: Sequence[bool]
) -> tuple[Any, ...]:
    """Gradients of q, k and v, and of mask, bias and sinks where they are wanted, else None, from what `with_lse` gave.

    Parameters
    ----------
    wanted : sequence of bool
        Whether for mask, bias and sinks.
    """
    if not options.deterministic and torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    scores = any(wanted[:2])
    lse = lse.contiguous()  # kernels take it so; a mapped call may have expanded it
    where = route(q, options)
    if where == "cuda":
        grads, ds = _cuda_gradients(q, k, v, out, lse, dout, options, scores)
    elif where == "mps":
        grads, ds = _mps().mps_gradients(q, k, v, out, lse, dout, options, scores)
    elif where == "host":
        grads, ds = host_gradients(q, k, v, out, lse, dout, options, scores)
    else:
        grads, ds = staged_gradients(q, k, v, out, lse, dout, options, scores)
    added: list[Any] = []
    for want, tensor in zip(wanted, (options.mask, options.bias), strict=False):
        # What was broadcast is summed over.
        added.append(ds.sum_to_size(tensor.shape).to(tensor.dtype) if want else None)
    if not wanted[2]:
        return (*grads, *added, None)
    work, sinks = lse.dtype, options.sinks
    delta = (dout.to(work) * out.to(work)).sum(-1)
    weight = torch.exp(sinks.to(work)[:, None] - lse)  # of the sink, in every row
    return (*grads, *added, -(weight * delta).reshape(-1, *lse.shape[-2:]).sum((0, 2)).to(sinks.dtype))


def no_second_derivative(op: str = "flash_attention") -> AuleError:
    """The error for a gradient of a gradient."""
    theirs = "PyTorch's own operators"
    if op == "flash_attention":
        theirs = "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    return AuleError(
        "AULE_ERROR_NO_GRADIENT",
        f"[{op}] expected one derivative, got a second; use {theirs} where you need it",
    )


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Attention with its gradient, on whatever device."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, options: AttentionOptions) -> Any:
        out, lse = with_lse(q, k, v, options, training=True)
        # Tensors are kept as such.
        ctx.options = options._replace(mask=None, bias=None, sinks=None, rope_cos=None, rope_sin=None, seed=None)
        tables = options.rope_cos, options.rope_sin
        ctx.save_for_backward(q, k, v, out, lse, mask, bias, sinks, *tables, options.seed)
        shown = lse.to(torch.float32)
        ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        # Raises when one of them was changed in place since.
        q, k, v, out, lse, mask, bias, sinks, cos, sin, seed = ctx.saved_tensors
        options = ctx.options._replace(mask=mask, bias=bias, sinks=sinks, rope_cos=cos, rope_sin=sin, seed=seed)
        with torch.no_grad():
            found = gradients(q, k, v, out, lse, dout, options, ctx.needs_input_grad[3:6])
        return (*last(found, dout, *ctx.saved_tensors), None)


def last(found: tuple[Any, ...], *inputs: Any, op: str = "flash_attention") -> tuple[Any, ...]:
    """Gradients that say clearly that they cannot be differentiated again, instead of being taken for constants."""
    if not torch.is_grad_enabled():
        return found
    given = [x for x in inputs if x is not None]
    return tuple(None if grad is None else _Last.apply(op, grad, *given) for grad in found)


class _Last(torch.autograd.Function):  # type: ignore[misc]
    """A gradient on whose own gradient there is nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, grad: Any, *inputs: Any) -> Any:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise no_second_derivative(ctx.op)


# -- CUDA ------------------------------------------------------------------------------------------------------------


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


def _on_cuda(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """From one dictionary look-up to the launch. Calls like the one before do not come here: `Repeated` has them."""
    (
        causal, scale, window, softcap, mask, bias, alibi, sinks, cos, sin, interleaved, dropout_p, _, align, want_lse,
        _, out, backend, precision,
    ) = options  # fmt: skip
    if scale is not None and isinstance(scale, torch.Tensor):
        return _on_cuda(q, k, v, keyed(options))
    try:
        qp, kp, vp, index = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.get_device()
        key: Any = (
            q.shape, q.stride(), q.dtype, index, k.shape, k.stride(), k.dtype, k.get_device(), v.shape, v.stride(),
            v.dtype, v.get_device(), (qp | kp | vp) & 15, causal, scale, window, softcap, align, want_lse, backend,
            dropout_p, precision,
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
    except TypeError:  # a window given as a list, a number as an array of NumPy
        again = keyed(options)
        if again is options:
            _prepare(q, k, v, options)  # which says what is wrong
            raise
        return _on_cuda(q, k, v, again)
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
        if len(_repeated) >= _MAX_LAUNCHES:
            _repeated.clear()
        _repeated[options] = found.repeated


def raw_stream(index: int) -> int:
    """Native handle of the current stream; replaced by PyTorch's own quick look-up where there is one."""
    return int(torch.cuda.current_stream(index).cuda_stream)


raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", raw_stream)


def signature(tensor: Any) -> Any:
    if tensor is None or not isinstance(tensor, torch.Tensor):
        return type(tensor)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15)


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
    # `_on_cuda` puts pointers together without looking at names.
    assert names == ["q", "k", "v", "o", *(n for n in names if n in fields), *ends], names
    like_q = tuple(q.shape) == operands.out_shape and q.is_contiguous()
    return PreparedLaunch(start, like_q, operands.out_shape, operands.lse_shape, extra)


_gradient_launches: dict[Any, Any] = {}


def _cuda_gradients(
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
