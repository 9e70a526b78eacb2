"""aule as a replacement for PyTorch's ``scaled_dot_product_attention``: the function, `install`, and call counts.

Nothing here imports torch before it is called, and nothing is replaced before `install` is called.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from aule.api.names import refuses_unknown, unknown_option
from aule.api.stats import DispatchStats
from aule.api.types import A
from aule.backends import registry
from aule.engine import observe
from aule.errors import BackendUnavailableError, InvalidArgumentError
from aule.frontends import without_torch


@dataclass(frozen=True)
class _Installed:
    """PyTorch's function, and the one that replaced it."""

    original: Any
    ours: Any
    backend: str | None
    verbose: bool


log = logging.getLogger("aule")
_lock = threading.RLock()
_now: _Installed | None = None
_made: dict[Any, Any] = {}
"""Our function by the one that it replaced; never dropped, see `aule.frontends.torch.sdpa.functions.replacement`."""
_served = 0
_passed_on: Counter[str] = Counter()
_ops: Counter[str] = Counter()


@refuses_unknown
def scaled_dot_product_attention(
    query: A,
    key: A,
    value: A,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: NoReturn,
) -> A:
    """Compute attention on torch tensors, with the signature and meaning of PyTorch's function of this name.

    Parameters
    ----------
    query, key, value : Tensor
        ``[..., seq, head_dim]`` with any number of leading axes, which broadcast; of one dtype.
    attn_mask : Tensor or CausalBias, optional
        Boolean (True attends) or added to the scores (float32, or the dtype of ``query``); two axes or more,
        broadcastable to the scores. Not together with ``is_causal``.
    dropout_p : float
        Probability with which each weight is dropped. `torch.manual_seed` makes it repeatable; other weights are
        dropped than by PyTorch's own function.
    is_causal : bool
        Row ``i`` attends to keys up to ``i``, counted from the first of each. False by default as in PyTorch, whereas
        ``causal`` of `flash_attention` is True by default.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        ``query`` may have a multiple of the heads of ``key``, and of those of ``value``. If these two differ, the
        fewer are repeated in memory.

    Returns
    -------
    Tensor
        ``[..., seq, head_dim of value]``. A row with nothing to attend to is zero, and so are its gradients.

    Notes
    -----
    Query, key, value and a float mask have gradients; second derivatives are not supported. Autocast applies. CPU
    tensors are computed by the CPU engine (extra ``cpu``) if it is installed.
    """
    if unknown:
        raise unknown_option(scaled_dot_product_attention, unknown)
    function = _front_end("scaled_dot_product_attention").scaled_dot_product_attention
    result: A = function(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return result


def install(backend: str | None = None, verbose: bool = False) -> None:
    """Replace PyTorch's ``scaled_dot_product_attention``, and its ``flex_attention``, with aule.

    Calls that aule cannot serve go to PyTorch's own function and are counted with their reason: see `dispatch_stats`. A
    call in code that ``torch.compile`` or ``torch.export`` trace becomes an operator, ``aule::attention``, and is
    counted when it is traced, not when it runs. Functorch transforms and dispatch modes get PyTorch's own function,
    which has second derivatives and forward mode; aule has neither. So do calls under
    ``torch.nn.attention.sdpa_kernel`` without a fused kernel (``SDPBackend.MATH`` alone), nested tensors, and CPU
    tensors without the CPU engine (extra ``cpu``), which NumPy would compute more slowly than PyTorch.

    ``flex_attention`` is served in compiled code too, by itself or in a larger graph, as ``aule::flex_attention``; a
    function that aule cannot trace gets PyTorch's own there.

    Modules that imported the function by its name before get aule's, too. References under other names, in closures,
    default arguments or attributes of objects, and calls of ``torch._C._nn`` or ``torch.ops.aten`` stay PyTorch's.
    Modules in evaluation mode with gradients switched off may use PyTorch's fused encoder instead of any attention
    function (``torch.backends.mha.set_fastpath_enabled(False)`` prevents it).

    Parameters
    ----------
    backend : str, optional
        As in `flash_attention`; a missing one raises here. Default: CPU tensors on the CPU engine, CUDA and MPS
        tensors in place; tensors of other devices are passed on.
    verbose : bool
        Print a line for the first call that is served, for every new reason to pass one on, and for modules that keep
        PyTorch's function under another name.
    """
    global _now
    front_end = _front_end("install")
    if backend is not None:
        registry.find(backend)
    with _lock:
        original = front_end.get_function()
        if getattr(original, "__module__", None) == "aule.distributed.context":
            raise InvalidArgumentError(
                "[install] expected to be called outside of aule.distributed.context_parallel, got a call inside; "
                "install before the context is entered, or not at all: inside aule computes all attention"
            )
        if _now is not None and original is _now.ours:
            _now = _Installed(_now.original, _now.ours, backend, verbose)
            front_end.tag_graphs(True, backend)
            return
        ours = _made.get(original)
        if ours is None:
            ours = _made[original] = front_end.replacement(original, _settings, _count)
        _now = _Installed(original, ours, backend, verbose)
        front_end.set_function(ours)
        front_end.replace_imports(original, ours)
        front_end.tag_graphs(True, backend)
        _flex().put(_settings, _count)
    for kept in front_end.kept_references(original) if verbose else ():
        print(f"aule: {kept} is still PyTorch's own function")


def uninstall() -> None:
    """Restore PyTorch's own function, the very same object. Does nothing if aule is not installed."""
    global _now
    with _lock:
        if _now is None:
            return
        front_end = _front_end("uninstall")
        # Somebody may have replaced our function since; theirs stays, and ours passes every call on.
        if front_end.get_function() is _now.ours:
            front_end.set_function(_now.original)
        front_end.replace_imports(_now.ours, _now.original)
        front_end.tag_graphs(False)
        _flex().take_out()
        _now = None


@contextlib.contextmanager
def installed(backend: str | None = None, verbose: bool = False) -> Iterator[None]:
    """`install` for a ``with`` block, and restore the state before it.

    Parameters
    ----------
    backend, verbose
        As for `install`.
    """
    before = _now
    install(backend, verbose)
    try:
        yield
    finally:
        if before is None:
            uninstall()
        else:
            install(before.backend, before.verbose)


def register_flash_attention_impl(name: str = "aule") -> None:
    """Register aule with PyTorch's registry of flash-attention implementations, for CPU tensors.

    Nothing changes before ``torch.nn.attention.activate_flash_attention_impl(name)``. From then on, until
    ``torch.nn.attention.restore_flash_attention_impl()``, aule computes the calls that PyTorch sends to its flash
    kernel on the CPU (four axes, no dropout, no gradient of a mask), forward and backward, in compiled graphs too.
    Calls are counted in `dispatch_stats`. CUDA tensors are not affected.

    Needs a PyTorch with that registry (2.13 has it) and the CPU engine (extra ``cpu``).

    Parameters
    ----------
    name : str
        The name to activate it by.
    """
    _front_end("register_flash_attention_impl")
    from aule.frontends.torch.sdpa import flash

    missing = flash.available()
    if missing is not None:
        raise BackendUnavailableError(
            "torch", f"[register_flash_attention_impl] expected PyTorch with {missing}, got none; update PyTorch"
        )
    flash.register(name, _count)


def attempt(*given: Any, backend: str | None = None, caller: str, **named: Any) -> tuple[Any, str | None]:
    """`scaled_dot_product_attention`, whose arguments it takes, for an integration that can fall back to another.

    The call is counted in `dispatch_stats` under the name of its ``caller``. As with `install`, tensors are copied
    through the host only for a named backend.

    Returns
    -------
    out : Tensor or None
        The result; None if the call must be passed on.
    reason : str or None
        Why it must; None if it was served.
    """
    front_end = _front_end("attempt")
    with observe.called_by(caller):
        out, reason = front_end.attempt(front_end.Arguments(*given, **named), backend)
    _count(reason)
    return out, reason


def pass_on(reason: str) -> None:
    """Count a call that an integration passes to its framework's own function without an `attempt`."""
    _count(reason)


def count_op(name: str) -> None:
    """Count a call of an op by a layer."""
    with _lock:
        _ops[name] += 1


def dispatch_stats() -> DispatchStats:
    """Counts of calls since aule was loaded or `reset_dispatch_stats` was called.

    Returns
    -------
    DispatchStats
        A dict that prints as a table.

        ``calls`` is a list with a dict for every kind of call that ran, most frequent first: ``op``, ``direction``
        (forward or backward), ``backend``, ``kernel`` (the engine: warpgroup, fragment, simt, vector or rows; numpy;
        ``own`` for `launch`), ``launches`` (names of the kernels), ``caller`` and ``count``.

        ``served`` and ``passed_on`` count calls of PyTorch's attention function, ``reasons`` has a count for every
        reason to pass one on. ``ops`` has a count for every op that layers of `aule.nn` called, including those that
        `patch_model` put into a model; calls within compiled code are not counted there.

    Notes
    -----
    Callers are ``direct`` (your own code), ``install``, ``flash_attention_impl``, ``transformers``, ``diffusers``,
    ``comfyui``, ``flash_attn``, ``nn`` (layers, also those of `patch_model`) and ``compiled`` (operators such as
    ``aule::attention``, which compiled and exported programs and transforms run). Gradients have the caller of their
    forward pass. A call is counted in ``calls`` when it has been launched; a replayed CUDA graph and a call with
    nothing to compute are not. Counting takes no lock, so two threads that finish the same kind of call at the same
    moment may lose one count.

    Examples
    --------
    >>> import aule
    >>> import numpy as np
    >>> aule.reset_dispatch_stats()
    >>> x = np.ones((2, 64), np.float32)
    >>> y = aule.swiglu(x)
    >>> [(row["op"], row["caller"], row["count"]) for row in aule.dispatch_stats()["calls"]]
    [('swiglu', 'direct', 1)]
    """
    with _lock:
        now = {"served": _served, "passed_on": _passed_on.total(), "reasons": dict(_passed_on), "ops": dict(_ops)}
    return DispatchStats(now | {"calls": observe.counts()})


def reset_dispatch_stats() -> None:
    """Set all counts of `dispatch_stats` to zero."""
    global _served
    with _lock:
        _served = 0
        _passed_on.clear()
        _ops.clear()
    observe.reset()


def _front_end(function: str) -> ModuleType:
    try:
        from aule.frontends.torch.sdpa import functions
    except ModuleNotFoundError as error:
        raise without_torch(function, error) from None
    return functions


def _flex() -> ModuleType:
    from aule.frontends.torch.flex import install as flex_front_end

    return flex_front_end


def _settings() -> tuple[bool, str | None]:
    now = _now
    return now is not None, None if now is None else now.backend


def _count(reason: str | None) -> None:
    global _served
    with _lock:
        if reason is None:
            _served += 1
            first = _served == 1
        else:
            _passed_on[reason] += 1
            first = _passed_on[reason] == 1
        speak = first and _now is not None and _now.verbose
    if first:
        log.info("serving PyTorch's attention" if reason is None else f"passed on to PyTorch: {reason}")
    if speak:
        print("aule: serving attention" if reason is None else f"aule: passed on to PyTorch: {reason}")
