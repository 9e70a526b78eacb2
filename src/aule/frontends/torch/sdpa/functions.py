"""aule's ``scaled_dot_product_attention``, and the replacement that `aule.install` sets for PyTorch's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional

from aule._version import __version__
from aule.errors import AuleError
from aule.frontends.torch.modes import called_by
from aule.frontends.torch.sdpa.translate import NESTED, Arguments, Band, Mask, Refused, band, is_causal_bias, translate

_NAME = "scaled_dot_product_attention"
_TAG = " aule "

_serving: list[Callable[..., Tensor]] = []
"""Functions made by `replacement`, which compiled graphs know by number."""


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, *rest: Any) -> Tensor:
    """`aule.scaled_dot_product_attention`, all of whose arguments it takes by position."""
    if torch.compiler.is_compiling():
        from aule.frontends.torch.compile import dynamo  # imports the compiler

        return dynamo.scaled_dot_product_attention(query, key, value, band(mask), *rest)
    return compute(query, key, value, mask, *rest)


def compute(*arguments: Any) -> Tensor:
    """`scaled_dot_product_attention` outside of PyTorch's compiler."""
    try:
        call = translate(Arguments(*arguments))
    except Refused as refused:
        raise refused.error from None
    return call.run()


def attempt(given: Arguments, backend: str | None, compiled: bool = False) -> tuple[Tensor | None, str | None]:
    """The result of a call, and None; or None, and the reason why the call must be passed on."""
    try:
        return translate(given, backend, True, compiled).run(), None
    except Refused as refused:
        return None, refused.reason
    except AuleError as error:
        return None, error.code


installed = called_by("install")(attempt)


def replacement(
    original: Callable[..., Tensor],
    settings_now: Callable[[], tuple[bool, str | None]],
    count: Callable[[str | None], None],
) -> Callable[..., Tensor]:
    """A function to replace ``torch.nn.functional.scaled_dot_product_attention``.

    The function must never be freed: TorchScript knows it by its address.

    Parameters
    ----------
    original : callable
        Gets the calls that are not served.
    settings_now : callable
        Says whether to serve at all, and on which backend.
    count : callable
        Called with None for every call that was served, else with the reason.
    """

    def serve(given: Arguments, compiled: bool = False) -> Tensor:
        active, backend = settings_now()
        if active:
            # A graph is traced several times; a call is counted in the first, with fake tensors.
            counts = not (compiled and type(given.query) is FunctionalTensor)
            result, reason = installed(given, backend, compiled)
            if counts:
                count(reason)
            if result is not None:
                return result
        mask = given.attn_mask
        if isinstance(mask, Band):
            given = given._replace(attn_mask=mask.mask(given.query.device))
        *arguments, scale, gqa = given
        if is_causal_bias(mask):  # it handles the call, but does not know where the builtin function is
            return torch.overrides.handle_torch_function(
                scaled_dot_product_attention, (mask,), *arguments, scale=scale, enable_gqa=gqa
            )
        return original(*arguments, scale=scale, enable_gqa=gqa)

    number = len(_serving)
    _serving.append(serve)

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Mask = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if getattr(query, "is_nested", False):
            # PyTorch's jagged tensors handle a call of the builtin function only.
            pass_nested_on(settings_now, count)
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.compiler.is_compiling():
            from aule.frontends.torch.compile import dynamo  # imports the compiler

            mask = band(attn_mask)
            return dynamo.installed(number, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        tensors = (query, key, value, attn_mask)
        if torch.overrides.has_torch_function(tensors) and not (settings_now()[0] and _is_causal_bias_alone(tensors)):
            # A subclass or a mode handles the call first, with this very function, as with the builtin one.
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return torch.overrides.handle_torch_function(scaled_dot_product_attention, tensors, *arguments, **options)
        return serve(Arguments(*arguments, scale, enable_gqa))

    scaled_dot_product_attention.__doc__ = original.__doc__
    # TorchScript takes it for PyTorch's operator, as it does the builtin function.
    torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
    return scaled_dot_product_attention


def serve(number: int, *arguments: Any) -> Tensor:
    """A call of a replacement from compiled code."""
    return _serving[number](Arguments(*arguments), compiled=True)


def pass_nested_on(settings_now: Callable[[], tuple[bool, str | None]], count: Callable[[str | None], None]) -> None:
    """Count a call with nested tensors, if aule is installed; while a graph is traced, uncounted."""
    if not torch.compiler.is_compiling() and settings_now()[0]:
        count(NESTED)


def get_function() -> Callable[..., Tensor]:
    """The present ``torch.nn.functional.scaled_dot_product_attention``."""
    return functional.scaled_dot_product_attention


def set_function(function: Callable[..., Tensor]) -> None:
    """Replace ``torch.nn.functional.scaled_dot_product_attention``."""
    functional.scaled_dot_product_attention = function


def replace_imports(old: Callable[..., Any], new: Callable[..., Any], name: str = _NAME) -> None:
    """Replace a function in all modules but PyTorch's own that imported it by its name."""
    for module in _foreign_modules():
        if vars(module).get(name) is old:
            vars(module)[name] = new


def kept_references(function: Callable[..., Tensor]) -> list[str]:
    """Where modules hold a function under another name than its own, which `replace_imports` leaves alone."""
    return sorted(
        f"{module.__name__}.{name}"
        for module in _foreign_modules()
        for name, value in list(vars(module).items())
        if value is function
    )


def _foreign_modules() -> list[ModuleType]:
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] != "torch"]
    return [module for _, module in modules if isinstance(module, ModuleType)]


def tag_graphs(serving: bool, backend: str | None = None) -> None:
    """Give compiled graphs that use aule's function another key in PyTorch's cache on disk.

    The key depends on what the compiler saw, and it sees ``torch.nn.MultiheadAttention`` as one call, whatever that
    calls. Like all settings of PyTorch's compiler, the tag applies to the calling thread.
    """
    from torch.compiler import config

    from aule.frontends.torch.compile import operators  # registers them, since a stored graph may be the first user

    own = config.cache_key_tag.partition(_TAG)[0]
    config.cache_key_tag = f"{own}{_TAG}{__version__} {backend} {operators.SCHEMA}" if serving else own


def _is_causal_bias_alone(tensors: tuple[Mask, ...]) -> bool:
    return is_causal_bias(tensors[3]) and not torch.overrides.has_torch_function(tensors[:3])
