"""`aule.explain`: the plan that a call would take, without the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aule.api import attention, decode, flex, mla, row_ops
from aule.engine.explain import Explanation
from aule.errors import InvalidArgumentError
from aule.ops.catalogue import CATALOGUE

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    attention.flash_attention,
    attention.flash_attention_rope,
    attention.flash_attention_varlen,
    flex.flex_attention,
    decode.decode_attention,
    decode.flash_attention_paged,
    mla.mla_decode,
    *(getattr(row_ops, name) for name in CATALOGUE),
)


def explain(*arguments: Any, **options: Any) -> Explanation:
    """The plan that a call would take: its device, kernels, tiles, launches and memory, and why.

    ``aule.explain(q, k, v, causal=True)`` explains `flash_attention`. For another function, put it first:
    ``aule.explain(aule.decode_attention, q, k, v, context_lens=lens)``.

    Nothing is computed, launched, compiled or written, and no random numbers are drawn. Arguments are checked as in the
    call itself. Kernels that were never built are traced, which takes a moment; on a device with matrix units whose
    layout is unknown, the first explanation for 16-bit types finds it out, as the first call would.

    Parameters
    ----------
    *arguments
        Arguments of the function, after the function itself if it is not `flash_attention`: `flash_attention_rope`,
        `flash_attention_varlen`, `flex_attention`, `decode_attention`, `flash_attention_paged`, `mla_decode` or a row
        operation (`rms_norm` ...).
    **options
        Options of the function.

    Returns
    -------
    Explanation
        Prints as text; `Explanation.to_dict` gives plain data. If torch tensors need gradients, ``backward`` explains
        them, for contiguous gradients of the result.

    Examples
    --------
    >>> import aule
    >>> import numpy as np
    >>> q = np.ones((1, 8, 256, 64), np.float32)
    >>> plan = aule.explain(q, q, q, backend="numpy")
    >>> plan.device, plan.device_reason
    ('numpy', "backend='numpy' asks for it")
    """
    from aule.frontends.explain import Explained, Found, on_host  # imported late: few programs use it

    function, given = attention.flash_attention, arguments
    if arguments and callable(arguments[0]):
        function, *rest = arguments
        given = tuple(rest)
    if function not in _FUNCTIONS or not given:
        known = ", ".join(each.__name__ for each in _FUNCTIONS)
        got = f"{getattr(function, '__name__', function)} with {len(given)} arguments by position"
        raise InvalidArgumentError(
            f"[explain] expected arrays, or one of {known} followed by its arguments, got {got}; pass the first array "
            "by position"
        )
    first, *others = map(on_host, given)
    try:
        function(Explained(first), *others, **{name: on_host(x) for name, x in options.items()})
    except Found as found:
        return found.explanation
    raise AssertionError("every function of the list ends in its front end")
