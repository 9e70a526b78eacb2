"""PyTorch's attention function: aule's own with the same meaning, and how it is put in PyTorch's place.

Nothing here imports torch before it is called, and nothing is replaced before `install` is.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from aule.backends import registry
from aule.errors import AuleError, BackendUnavailableError
from aule.frontends import without_torch


@dataclass(frozen=True)
class _Installed:
    """What stands in PyTorch's place, and what stood there."""

    original: Any
    ours: Any
    backend: str | None
    verbose: bool


_lock = threading.RLock()
_now: _Installed | None = None
_made: dict[Any, Any] = {}
"""Our function for each one whose place it took; never dropped, see `torch_sdpa.replacement`."""
_served = 0
_passed_on: Counter[str] = Counter()
_ops: Counter[str] = Counter()


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
    """Attention on torch tensors with the signature and meaning of PyTorch's function of this name.

    Parameters
    ----------
    query, key, value : Tensor
        ``[..., seq, head_dim]`` with any number of leading axes, which broadcast; of one dtype.
    attn_mask : Tensor or CausalBias, optional
        Boolean (True attends) or added to the scores (float32, or the dtype of ``query``); two axes or more,
        broadcastable to the scores. Not together with ``is_causal``.
    dropout_p : float
        Chance of each weight to be dropped, applied whenever it is above 0. `torch.manual_seed` makes it repeatable;
        which weights are dropped is not what PyTorch's own function would choose.
    is_causal : bool
        Row ``i`` attends to keys up to ``i``, counted from the first of each.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        ``query`` may have a multiple of the heads of ``key``, and of those of ``value``. These need not agree with
        each other; where they do not, the fewer are repeated in memory.

    Returns
    -------
    Tensor
        ``[..., seq, head_dim of value]``. A row with nothing to attend to is zero, and so are its gradients.

    Notes
    -----
    Gradients of query, key, value and a float mask are there once: they cannot be differentiated again. Autocast is
    followed. CPU tensors are computed by the CPU engine (extra ``cpu``) where there is one.
    """
    function = _front_end("scaled_dot_product_attention").scaled_dot_product_attention
    return function(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def install(backend: str | None = None, verbose: bool = False) -> None:
    """Put aule in the place of ``torch.nn.functional.scaled_dot_product_attention``.

    What aule cannot serve goes to PyTorch's own function and is counted with its reason: see `dispatch_stats`. A call
    in code that ``torch.compile`` or ``torch.export`` trace becomes the operator ``aule::attention``, and is counted
    when it is traced, not when it runs. Under functorch transforms and dispatch modes PyTorch's own is called, since it
    has second derivatives and forward mode, which aule has not. Whoever imported PyTorch's function by name before
    keeps that one, and modules in evaluation mode with gradients switched off may use PyTorch's fused encoder instead
    of any attention function (``torch.backends.mha.set_fastpath_enabled(False)`` prevents it).

    Parameters
    ----------
    backend : str, optional
        As in `flash_attention`; one that is missing raises here. Default: CPU tensors on the CPU engine, CUDA and MPS
        tensors where they are; tensors of other devices are passed on.
    verbose : bool
        Print a line for the first call that is served, and for every new reason why one is not.
    """
    global _now
    front_end = _front_end("install")
    if backend is not None:
        registry.find(backend)
    with _lock:
        original = front_end.get_function()
        if _now is not None and original is _now.ours:
            _now = _Installed(_now.original, _now.ours, backend, verbose)
            front_end.tag_graphs(True, backend)
            return
        ours = _made.get(original)
        if ours is None:
            ours = _made[original] = front_end.replacement(original, _settings, _count)
        _now = _Installed(original, ours, backend, verbose)
        front_end.set_function(ours)
        front_end.tag_graphs(True, backend)


def uninstall() -> None:
    """Put PyTorch's own function back, the very same object. Nothing happens when aule is not installed."""
    global _now
    with _lock:
        if _now is None:
            return
        front_end = _front_end("uninstall")
        # Somebody may have put a function of their own over ours since; theirs stays, and ours passes everything on.
        if front_end.get_function() is _now.ours:
            front_end.set_function(_now.original)
        front_end.tag_graphs(False)
        _now = None


@contextlib.contextmanager
def installed(backend: str | None = None, verbose: bool = False) -> Iterator[None]:
    """`install` for the length of a ``with`` block; afterwards all is as it was before."""
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
    """Offer aule through PyTorch's own registry of flash-attention implementations, for CPU tensors.

    Nothing changes before ``torch.nn.attention.activate_flash_attention_impl(name)``. From then on, until
    ``torch.nn.attention.restore_flash_attention_impl()``, what PyTorch sends to its flash kernel on the CPU (four axes,
    no dropout, no gradient of a mask) is computed by aule, forward and backward, in compiled graphs too. Calls are
    counted in `dispatch_stats`. CUDA tensors are not touched.

    Needs a PyTorch with that registry (2.13 has it) and the CPU engine (extra ``cpu``).
    """
    _front_end("register_flash_attention_impl")
    from aule.frontends import torch_flash

    missing = torch_flash.available()
    if missing is not None:
        raise BackendUnavailableError(
            "torch", f"[register_flash_attention_impl] expected PyTorch with {missing}, got none; update PyTorch"
        )
    torch_flash.register(name, _count)


def attempt(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
) -> tuple[Any, str | None]:
    """`scaled_dot_product_attention` for an integration that has its framework's own function to turn to.

    The call is counted in `dispatch_stats`. As with `install`, tensors are copied through the host only for a backend
    that was named.

    Returns
    -------
    out : Tensor or None
        The result, None where the call is to be passed on.
    reason : str or None
        Why it is; None where it was served.
    """
    front_end = _front_end("attempt")
    try:
        call = front_end.prepare(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend, installed=True
        )
        out, reason = call.run(), None
    except front_end.Refused as refused:
        out, reason = None, refused.reason
    except AuleError as error:
        out, reason = None, error.code
    _count(reason)
    return out, reason


def pass_on(reason: str) -> None:
    """Count a call that an integration gives to its framework's own function without an `attempt`."""
    _count(reason)


def count_op(name: str) -> None:
    """Count a call of an op by a layer."""
    with _lock:
        _ops[name] += 1


def dispatch_stats() -> dict[str, Any]:
    """How many calls aule served and passed on since it was loaded or `reset_dispatch_stats` was called.

    Returns
    -------
    dict
        ``served`` and ``passed_on``, both numbers, and ``reasons``, with a number for every reason to pass a call on:
        of PyTorch's attention function. ``ops`` has a number for every op that layers of `aule.nn` have called, those
        that `patch_model` has put into a model included; calls within compiled code are not counted there.
    """
    with _lock:
        return {"served": _served, "passed_on": _passed_on.total(), "reasons": dict(_passed_on), "ops": dict(_ops)}


def reset_dispatch_stats() -> None:
    """Set all counts of `dispatch_stats` to zero."""
    global _served
    with _lock:
        _served = 0
        _passed_on.clear()
        _ops.clear()


def _front_end(function: str) -> ModuleType:
    try:
        from aule.frontends import torch_sdpa
    except ModuleNotFoundError as error:
        raise without_torch(function, error) from None
    return torch_sdpa


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
    if speak:
        print("aule: serving attention" if reason is None else f"aule: passed on to PyTorch: {reason}")
