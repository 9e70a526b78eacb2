"""The ops of the catalogue on torch tensors: eager calls, with gradients, on whatever device the tensors are.

As in attention, a repeated call on CUDA tensors or on the CPU engine goes from one dictionary look-up to the launches.
Where PyTorch traces, transforms or intercepts operators, a call becomes an operator of `torch_fused_ops`, which comes
back to `compute` here when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from aule import settings
from aule.backends import registry
from aule.engine import cpu
from aule.engine.fused import host_device, on_host, prepare, prepare_cpu, result_views
from aule.errors import AuleError, DeviceMismatchError, InvalidArgumentError
from aule.frontends.torch_cuda import raw_stream
from aule.frontends.torch_gradients import last
from aule.frontends.torch_launches import prepared_steps
from aule.frontends.torch_repeated_host import remember, repeated
from aule.frontends.torch_routes import dispatches, mps, route, wrapped
from aule.frontends.torch_seeds import seed_on
from aule.frontends.torch_views import (
    NAMES,
    dtype_name,
    host_array,
    refuse_tracing,
    require_dense,
    require_tensor,
    written,
)
from aule.frontends.torch_vmap import one_by_one
from aule.ops.attention.validate import checked_dropout, checked_seed
from aule.ops.catalogue import CATALOGUE
from aule.ops.checked import checked_flag, checked_integer, checked_number, not_plain
from aule.ops.spec import Call, OpSpec, Option, Result
from aule.view import TensorView

_Tensor = torch.Tensor
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_forward_ad = torch.autograd.forward_ad
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_CPU = torch.device("cpu")  # said, for what PyTorch makes by default may be elsewhere
_MAX_SIGNATURES = 4096
_PLAIN = frozenset((float, int, bool, str, type(None)))
"""Types of options that are keys by value."""
_KEPT_FROM = {"host": 1 << 14, "cuda": 1 << 22}
"""Elements from which on something is kept for a gradient: one more result takes PyTorch 10 us."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def fused(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Any:
    """An op of the catalogue; ``tensors`` and ``options`` in the order of its spec."""
    spec = CATALOGUE[name]
    if not _PLAIN.issuperset(map(type, options)):
        options = tuple(_by_value(name, *given) for given in zip(spec.options, options, strict=True))
    again = repeated(name, spec.outputs, options, backend, tensors)
    if again is not None:
        return _seen(spec, again)
    if spec.seed is not None:
        p, number = checked_dropout(name, spec.option("dropout_p", options)), checked_seed(name, tensors[spec.seed])
        words = None if p == 0.0 else seed_on(number, tensors[0].device)
        tensors = (*tensors[: spec.seed], words, *tensors[spec.seed + 1 :])
    for operand, x in zip(spec.operands, tensors, strict=True):
        if x is not None or not operand.optional:
            require_tensor(x, operand.name, name, spec.operands[0].name)
    if _any_autocast():
        if spec.products:
            tensors = _autocast(spec, tensors)
        options = _widened(spec, options, tensors[0])
    if traced(tensors):
        where = place(spec, options)
        if where is None:
            return _operator(spec, tensors, options, backend)
        # Operators change nothing in place; what traces them makes that of the copy where it can.
        fresh = _operator(spec, tensors, _not_in_place(spec, options), backend)
        return tensors[where].copy_(fresh)
    if _grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _apply(spec, tensors, options, backend)
    return _seen(spec, compute(spec, tensors, options, backend, spec.outputs))


def _by_value(op: str, option: Option, value: Any) -> Any:
    """A tensor or an array in the place of a number or a flag as what it holds now: calls are known by their options.
    What has no such value stays as it is, for the check of the op to refuse."""
    check = {"float": checked_number, "bool": checked_flag, "int": _whole, "int?": _whole}.get(option.kind)
    if type(value) in _PLAIN or check is None:
        return value
    try:
        return check(op, option.name, value)
    except InvalidArgumentError:
        return value


def _whole(op: str, name: str, value: Any) -> int:
    return checked_integer(op, name, value, "pass a Python int")


def _autocast(spec: OpSpec, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under autocast what rows of its type are multiplied by takes that type. Rows of float32 stay what they are:
    rounded before they are normalised, they would lose what a large mean leaves of them."""
    x = tensors[0]
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind) or x.dtype != torch.get_autocast_dtype(kind):
        return tensors
    given = zip(spec.operands, tensors, strict=True)
    return tuple(y.to(x.dtype) if operand.name == "weight" and y.dtype == torch.float32 else y for operand, y in given)


def _widened(spec: OpSpec, options: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
    """Under autocast losses have 32 bits, as PyTorch's own: what scales gradients up does so by the loss."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return options
    return tuple(True if option.name == "wide" else y for option, y in zip(spec.options, options, strict=True))


def place(spec: OpSpec, options: Sequence[Any]) -> int | None:
    """The operand, by its number, in whose place the result of a call goes; None when it is fresh."""
    number = _inplace(spec)
    return 0 if number is not None and options[number] else None


@cache
def _inplace(spec: OpSpec) -> int | None:
    """The number of the option that says so; None where there is none, and of gradients, which are always fresh."""
    names = [option.name for option in spec.options] if spec.name in CATALOGUE else []
    return names.index("inplace") if "inplace" in names else None


def _not_in_place(spec: OpSpec, options: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(False if option.name == "inplace" else x for option, x in zip(spec.options, options, strict=True))


def traced(tensors: Sequence[Any]) -> bool:
    """Whether PyTorch must see an operator: where the elements are not simply in memory, or others watch the call."""
    return bool(
        _dispatch_modes()
        or _transform() is not None
        or _forward_ad._current_level >= 0
        or any(x is not None and (wrapped(x) or (type(x) is not _Tensor and dispatches(x))) for x in tensors)
        or tensors[0].is_meta
    )


def _operator(spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None) -> Any:
    refuse_tracing(spec.name)
    from aule.frontends import torch_fused_ops  # which needs this module

    if _transform() is not None or _forward_ad._current_level >= 0:
        return _apply(spec, tensors, options, backend)
    return torch_fused_ops.operator(spec)(*tensors, *options, backend)


def _seen(spec: OpSpec, found: tuple[Any, ...]) -> Any:
    """What a caller gets of the results of an op."""
    return found[0] if len(spec.outputs) == 1 else found[: len(spec.outputs)]


# -- gradients ---------------------------------------------------------------------------------------------------------


def _apply(spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None) -> Any:
    where = place(spec, options)
    if where is not None and _grad_enabled() and tensors[where].requires_grad:
        _require_no_leaf(spec, where, tensors[where])
    found = _Fused.apply(spec, options, backend, *tensors)
    return _seen(spec, found) if isinstance(found, tuple) else found


def _require_no_leaf(spec: OpSpec, number: int, x: Any) -> None:
    """Refuse to write over what autograd could not go back from: it would say so, but when it has been written over."""
    got = None
    if x.is_leaf:
        got = "a leaf"
    elif x._is_view() and x._base.is_leaf and x._base.requires_grad:
        got = "a view of a leaf"
    elif x._is_view() and torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT:
        got = "one of several views that were made at once"
    if got is not None:
        raise InvalidArgumentError(
            f"[{spec.name}] expected {spec.operands[number].name} that can be written over and needs a gradient, got "
            f"{got}; clone it first, or leave inplace out"
        )


class _Fused(torch.autograd.Function):  # type: ignore[misc]
    """An op with its gradient. Its inputs are the spec, the options, the backend and the tensors."""

    @staticmethod
    def forward(spec: OpSpec, options: Any, backend: str | None, *tensors: Any) -> Any:
        found = _run(spec, tensors, options, backend, (*spec.outputs, *_kept(spec, tensors, backend)))
        found = tuple(x for x in found if x is not None)
        return found[0] if len(found) == 1 else found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        spec, ctx.options, ctx.backend, *tensors = inputs
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        where = place(spec, ctx.options)
        if where is not None:
            ctx.mark_dirty(tensors[where])
        kept: tuple[str, ...] = ()
        if isinstance(output, tuple) and len(output) > len(spec.outputs):
            ctx.mark_non_differentiable(*output[len(spec.outputs) :])
            kept = _kept(spec, tensors, ctx.backend)
        ctx.save_for_backward(*saved(spec, tensors, output, kept))

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        spec: OpSpec = ctx.spec
        inputs = ctx.saved_tensors
        known = spec, douts[: len(spec.outputs)], inputs, ctx.options, ctx.backend, ctx.needs_input_grad[3:], _run
        if not _grad_enabled():  # as always, unless somebody wants second derivatives
            return (None, None, None, *gradients(*known))
        with torch.no_grad():
            found = gradients(*known)
        return (None, None, None, *last(found, *douts, *inputs, op=spec.name))

    @staticmethod
    def vmap(info: Any, dims: Any, spec: OpSpec, options: Any, backend: str | None, *tensors: Any) -> Any:
        def call(*mapped: Any) -> tuple[Any, ...]:
            found = _apply(spec, mapped, options, backend)
            return found if isinstance(found, tuple) else (found,)

        found, out_dims = one_by_one(call, info.batch_size, dims[3:], tensors)
        return (found, out_dims) if len(found) > 1 else (found[0], out_dims[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise AuleError(
            "AULE_ERROR_NO_GRADIENT",
            f"[{ctx.spec.name}] expected reverse-mode differentiation, got forward mode (jvp); use torch.func.vjp",
        )


@cache
def saved_names(spec: OpSpec) -> tuple[str, ...]:
    """What of an op's operands and outputs its gradient needs."""
    gradient = required_gradient(spec)
    theirs = {f"d{name}" for name in spec.outputs}
    return tuple(operand.name for operand in gradient.operands if operand.name not in theirs)


def saved(spec: OpSpec, tensors: Sequence[Any], output: Any, kept: tuple[str, ...] = ()) -> list[Any]:
    """Those of a call, in the order of their names; None for what is of no use, or was not made. ``kept`` are the
    results of it that callers do not see."""
    known = dict(zip((operand.name for operand in spec.operands), tensors, strict=True))
    useless = _useless(spec, tensors)
    known |= dict.fromkeys(spec.kept)
    known |= dict(zip((*spec.outputs, *kept), output if isinstance(output, tuple) else (output,), strict=True))
    for operand in required_gradient(spec).operands:
        if operand.stands_for is not None and operand.name in kept:
            useless |= {name for name, _, _ in _spared(spec)} - {operand.name}
            known[operand.stands_for] = known[operand.name]
    return [None if name in useless else known[name] for name in saved_names(spec)]


def _useless(spec: OpSpec, tensors: Sequence[Any]) -> set[str]:
    """Results of an op that would spare its gradient no work."""
    host = tensors[0].is_cpu
    return {name for name, number, small in _spared(spec) if tensors[number] is None or not (host or small)}


@cache
def _spared(spec: OpSpec) -> tuple[tuple[str, int, bool], ...]:
    """Results that spare the gradient work, each with the number of the operand whose work it is, and whether that is
    so on GPUs."""
    numbers = {operand.name: i for i, operand in enumerate(spec.operands)}
    operands = required_gradient(spec).operands
    return tuple((x.name, numbers[x.spares], x.small) for x in operands if x.spares is not None)


def _kept(spec: OpSpec, tensors: Sequence[Any], backend: str | None) -> tuple[str, ...]:
    """What a call is to make for its gradient."""
    if not spec.kept:
        return ()
    where = route(tensors[0], backend)
    if where not in _KEPT_FROM or tensors[0].numel() < _KEPT_FROM[where]:
        return ()
    on_cpu = False
    if where == "host":
        device = host_device(backend)
        on_cpu = device is not None and device.target.backend == "cpu"
        if device is None or not (on_cpu or device.target.vulkan_on_nvidia):
            return ()
    elif not (backend or settings.backend() or "cuda").startswith("cuda"):
        return ()
    useless = _useless(spec, tensors)
    wholly = _wholly(spec) - useless
    if wholly and on_cpu and tensors[0].dtype == torch.bfloat16:
        return tuple(wholly)
    return tuple(name for name in spec.kept if name not in useless | _wholly(spec))


@cache
def _wholly(spec: OpSpec) -> frozenset[str]:
    """Results that stand for all that the gradient would need else."""
    return frozenset(x.name for x in required_gradient(spec).operands if x.stands_for is not None)


def required_gradient(spec: OpSpec) -> OpSpec:
    """The gradient of an op that has one, as all of the catalogue do."""
    assert spec.gradient is not None and spec.gradients is not None
    return spec.gradient


def gradients(
    spec: OpSpec,
    douts: Sequence[Any],
    saved: Sequence[Any],
    options: Sequence[Any],
    backend: str | None,
    needs: Sequence[bool],
    run: Any,
) -> tuple[Any, ...]:
    """The gradient of each operand that needs one, else None; ``run`` computes a spec."""
    gradient = required_gradient(spec)
    assert spec.gradients is not None
    known = dict(zip(saved_names(spec), saved, strict=True))
    known |= {f"d{name}": dout for name, dout in zip(spec.outputs, douts, strict=True)}
    for operand in gradient.operands:
        if known[operand.name] is None and not operand.optional:
            like = next(x for x in known.values() if x is not None)  # an output that nobody used
            known[operand.name] = torch.zeros_like(like)
    owned = [
        spec.gradients.get(operand.name) if need else None for operand, need in zip(spec.operands, needs, strict=True)
    ]
    for operand, need, name in zip(spec.operands, needs, owned, strict=True):
        if need and name is None:
            raise AuleError(
                "AULE_ERROR_NO_GRADIENT",
                f"[{spec.name}] expected {operand.name} to need no gradient, got requires_grad=True; detach it",
            )
    wanted = tuple(name for name in gradient.outputs if name in owned)
    results = run(gradient, [known[operand.name] for operand in gradient.operands], options, backend, wanted)
    by_name = dict(zip(gradient.outputs, results, strict=True))
    return tuple(None if name is None else by_name[name] for name in owned)


def _run(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    """`compute`, or the operator where a transform is still under way."""
    again = repeated(spec.name, wanted, options, backend, tensors)
    if again is not None:
        return again
    if not traced(tensors):
        return compute(spec, tensors, options, backend, wanted)
    from aule.frontends import torch_fused_ops  # which needs this module

    return torch_fused_ops.run(spec, tensors, options, backend, wanted)


# -- computing ---------------------------------------------------------------------------------------------------------


Output = tuple[str, Any, tuple[int, ...], tuple[int, ...] | None, str | None]


class Prepared(NamedTuple):
    """A signature: the problem, the launches with the names of their buffers, workspaces, and outputs by name, dtype,
    shape, strides and the operand in whose place they go, if any."""

    problem: Any
    launches: Any
    workspace: dict[str, int]
    outputs: tuple[Output, ...]


_cuda_launches: dict[Any, Prepared] = {}


def compute(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    """All results of an op in order, None for those that are not wanted."""
    if True in [x is not None and x.is_neg() for x in tensors]:
        return _of_negated(spec, tensors, options, backend, wanted)
    where = route(tensors[0], backend)
    if where == "cuda":
        return _on_cuda(spec, tensors, options, backend, wanted)
    if where == "mps":
        found: tuple[Any, ...] = mps().fused_on_mps(spec, tensors, options, backend, wanted)
        return found
    if where == "host":
        return _on_host(spec, tensors, options, backend, wanted)
    return _staged(spec, tensors, options, backend, wanted)


def _of_negated(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    """`compute` of tensors some of which PyTorch negates when they are read: what lies in memory is something else."""
    plain = [None if x is None else x.resolve_neg() for x in tensors]
    return _brought(spec, tensors, options, compute(spec, plain, options, backend, wanted))


def _staged(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    """`compute` of tensors that go through the host and come back."""
    home = tensors[0].device
    for operand, x in zip(spec.operands, tensors, strict=True):
        if x is not None and x.device != home:
            raise _elsewhere(spec, operand.name, x, home)
    found = _on_host(spec, [None if x is None else x.cpu() for x in tensors], options, backend, wanted)
    return _brought(spec, tensors, options, tuple(None if x is None else x.to(home) for x in found))


def _brought(spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], found: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a call that was computed on copies of its tensors, in the place where the call wants them."""
    where = place(spec, options)
    return found if where is None else (tensors[where].copy_(found[0]),)


def _elsewhere(spec: OpSpec, name: str, x: Any, home: Any) -> DeviceMismatchError:
    first = spec.operands[0].name
    return DeviceMismatchError(
        f"[{spec.name}] expected {name} on {home} like {first}, got {x.device}; move it with .to"
    )


def _on_cuda(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    first = tensors[0]
    key = (
        spec.name, wanted, options, backend,
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15) for x in tensors],
    )  # fmt: skip
    try:
        found = _cuda_launches.get(key)
    except TypeError:
        raise no_key(spec, tensors, options, wanted) from None
    if found is None:
        # Looked up here and not on every call: reading the environment costs 1.3 us.
        if backend is None and not (settings.backend() or "cuda").startswith("cuda"):
            return _staged(spec, tensors, options, None, wanted)
        device: Any = registry.find(backend or f"cuda:{first.device.index}")
        if device is None or device.index != first.device.index:
            raise DeviceMismatchError(
                f"[{spec.name}] expected tensors on {backend}, got {first.device}; move them or drop backend="
            )
        found = prepare_on(spec, tensors, options, wanted, device)
        if len(_cuda_launches) >= _MAX_SIGNATURES:
            _cuda_launches.clear()
        _cuda_launches[key] = found
    stream = raw_stream(first.get_device())
    return launch_on(spec, tensors, found, lambda launch, memory: launch([x.data_ptr() for x in memory], stream))


def no_key(spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], wanted: tuple[str, ...]) -> AuleError:
    """The error for options that cannot be looked up, such as lists, and tensors that have no strides."""
    _bound(spec, tensors, options, wanted)  # which refuses most of them by their names
    return not_plain(spec.name, options)


def prepare_on(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], wanted: tuple[str, ...], device: Any
) -> Prepared:
    """Validate, plan and build for a device that has the tensors; what a signature needs once."""
    call = _bound(spec, tensors, options, wanted)
    ready = prepare(spec, call, dict(call.views) | result_views(call), device)
    return Prepared(call.problem, prepared_steps(ready, device), dict(ready.workspace), _described(call))


def launch_on(spec: OpSpec, tensors: Sequence[Any], found: Prepared, run: Any) -> tuple[Any, ...]:
    """The launches of a signature on tensors of it; ``run`` gives a prepared launch its tensors."""
    first = tensors[0]
    memory = {operand.name: x for operand, x in zip(spec.operands, tensors, strict=True)}
    results = {
        name: fresh(shape, strides, dtype=dtype, device=first.device) if place is None else written(memory[place])
        for name, dtype, shape, strides, place in found.outputs
    }
    memory |= results
    for name, count in found.workspace.items():
        memory[name] = torch.empty(count, dtype=torch.float32, device=first.device)
    for launch, buffers in found.launches:
        run(launch, [memory[name] for name in buffers])
    if not found.launches:
        for x in results.values():
            x.zero_()
    return tuple(results.get(name) for name in spec.results)


def _on_host(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    device: Any = host_device(backend)
    if device is None or device.target.backend != "cpu":
        call = _bound(spec, tensors, options, wanted, arrays=True)
        arrays = on_host(spec, call, device)
        memory = {operand.name: x for operand, x in zip(spec.operands, tensors, strict=True)}
        found = {
            name: _arranged(arrays[name], result) if result.place is None else written(memory[result.place])
            for name, result in call.outputs.items()
        }
        return tuple(found.get(name) for name in spec.results)
    known: dict[Any, Prepared] = vars(device).setdefault("_torch_fused", {})
    try:
        key = (spec.name, wanted, options, *(_layout(x) for x in tensors))
        ready = known.get(key)
    except (TypeError, RuntimeError):
        raise no_key(spec, tensors, options, wanted) from None
    if ready is None:
        call = _bound(spec, tensors, options, wanted, arrays=True)
        views = dict(call.views) | result_views(call)
        ready = Prepared(call.problem, prepare_cpu(spec, call, views, device), {}, _described(call))
        if len(known) >= _MAX_SIGNATURES:
            known.clear()
        known[key] = ready
    if spec.check is not None:
        given = zip(spec.operands, tensors, strict=True)
        whole = [(o.name, x) for o, x in given if x is not None and not x.is_floating_point()]
        plain = {name: host_array(x, dtype_name(x, name, spec.name)) for name, x in whole}
        spec.check(spec.name, ready.problem, plain)
    memory = {operand.name: x for operand, x in zip(spec.operands, tensors, strict=True) if x is not None}
    results = {
        name: fresh(shape, strides, dtype=dtype, device=_CPU) if place is None else written(memory[place])
        for name, dtype, shape, strides, place in ready.outputs
    }
    if not ready.launches.buffers:
        for x in results.values():
            x.zero_()
    if spec.check is None and ready.launches.buffers and all(place is None for *_, place in ready.outputs):
        names, outputs = [operand.name for operand in spec.operands], [output[:4] for output in ready.outputs]
        made = names, ready.launches, device, outputs, spec.results
        remember(spec.name, wanted, options, backend, tensors, *made)
    addresses = {name: x.data_ptr() for name, x in memory.items()}
    addresses |= {name: x.data_ptr() for name, x in results.items()}
    cpu.run(ready.launches, device, addresses)
    return tuple(results.get(name) for name in spec.results)


def _layout(x: Any) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.is_cpu)


def fresh(shape: tuple[int, ...], strides: tuple[int, ...] | None, **kind: Any) -> Any:
    """A tensor in fresh memory; None for strides means contiguous."""
    return torch.empty(shape, **kind) if strides is None else torch.empty_strided(shape, strides, **kind)


def _arranged(array: Any, result: Result) -> Any:
    """A contiguous array, in host memory, as a tensor that `fresh` could have made."""
    x = torch.from_numpy(array).view(DTYPES[result.dtype])
    if result.strides in (None, x.stride()):
        return x
    return fresh(result.shape, result.strides, dtype=x.dtype, device=_CPU).copy_(x)


def _described(call: Call) -> tuple[Output, ...]:
    return tuple((name, DTYPES[x.dtype], x.shape, x.strides, x.place) for name, x in call.outputs.items())


def _bound(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], wanted: tuple[str, ...], arrays: bool = False
) -> Call:
    """A call that was found to be valid; asked where a signature is new."""
    refuse_tracing(spec.name)
    views = {
        operand.name: view_of(spec, operand.name, x, arrays)
        for operand, x in zip(spec.operands, tensors, strict=True)
        if x is not None
    }
    return spec.call(views, named_options(spec, options), wanted)


def named_options(spec: OpSpec, options: Sequence[Any]) -> dict[str, Any]:
    """Options by name."""
    return {option.name: value for option, value in zip(spec.options, options, strict=True)}


def view_of(spec: OpSpec, name: str, x: Any, arrays: bool = False) -> TensorView:
    """A view of a tensor; with ``arrays`` one of host memory, whose storage is a NumPy array."""
    require_dense(x, name, spec.name)
    dtype = dtype_name(x, name, spec.name)
    if arrays:
        if not x.is_cpu:
            raise _elsewhere(spec, name, x, "the CPU")
        return TensorView(dtype, tuple(x.shape), x.stride(), "host", host_array(x.detach(), dtype))
    at = x.data_ptr()
    return TensorView(dtype, tuple(x.shape), x.stride(), str(x.device), at, alignment=min(at & -at, 16) if at else 16)
