"""Public functions of attention; each calls the front end of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aule.api.context import Aule
from aule.errors import InvalidArgumentError, InvalidDtypeError, OutOfMemoryError
from aule.frontends import by_type, front_end, maker
from aule.ops.rope.tables import checked_frequencies, frequencies, rope_tables
from aule.options import AttentionOptions


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    rope: tuple[Any, Any] | None = None,
    rope_interleaved: bool = False,
    dropout_p: float = 0.0,
    seed: int | None = None,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Attention, exact, without ever storing the score matrix.

    Parameters
    ----------
    q, k, v : array
        ``[batch, heads, seq, head_dim]``, or ``[heads, seq, head_dim]``, or ``[seq, head_dim]``: NumPy arrays, torch
        tensors or arrays with ``__dlpack__``; float32, float16 or bfloat16 (float64 on the CPU), any strides.
        ``heads_q`` may be a multiple of ``heads_kv``, ``seq_q`` may differ from ``seq_kv``, the head dimension of ``v``
        may differ from that of ``q`` and ``k``; each is at most 256.
    causal : bool
        Row ``i`` attends to keys up to its own position.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    window : int or (left, right), optional
        Keep keys ``i-left .. i+right``; None or -1 leaves a side open. An int means ``(window-1, 0)`` with causal,
        ``(window-1, window-1)`` without.
    softcap : float, optional
        ``softcap * tanh(score / softcap)``.
    mask : array, optional
        Boolean (True attends) or additive; broadcastable to ``[batch, heads_q, seq_q, seq_kv]``.
    bias : array, optional
        Added to the scores; broadcastable like ``mask``.
    alibi_slopes : float32 array, optional
        ``[heads_q]`` or ``[batch, heads_q]``: ``-slope * |i - j|`` is added.
    sinks : float32 array, optional
        ``[heads_q]``: one further logit per head that takes part in softmax and has no value.
    rope : (cos, sin), optional
        Rotate the rows of q and k by their positions, inside the kernel (rotary position embedding); float32 or the
        dtype of q, ``[positions, rotary_dim // 2]`` or ``[batch, positions, rotary_dim // 2]``. The first
        ``rotary_dim`` columns are rotated. Tables of more than ``head_dim // 2`` columns are taken for transformers'
        ``[..., rotary_dim]``, whose second half repeats the first. Key ``j`` has row ``j`` of the tables, and a query
        that of the key it stands at by ``causal_align``, causal or not: the last query that of the last key
        (``"bottom-right"``), or query ``i`` row ``i`` (``"top-left"``). With more queries than keys, bottom-right,
        the queries begin at row 0 and the keys at row ``seq_q - seq_kv``. So ``max(seq_q, seq_kv)`` positions are
        needed. No gradient for cos and sin.
    rope_interleaved : bool
        Columns ``2 i`` and ``2 i + 1`` are a pair (GPT-J); otherwise ``i`` and ``i + rotary_dim // 2`` (Llama).
    dropout_p : float
        Probability of dropping each weight after softmax; the others are multiplied by ``1 / (1 - dropout_p)``. It is
        rounded to a multiple of 2**-16; only 0 drops nothing, and only 1 drops everything.
    seed : int, optional
        0 to 2**64 - 1: decides which weights are dropped, the same ones on every backend. None draws a new seed for
        each call; for torch tensors from PyTorch's generator of their device, which `torch.manual_seed` sets. A CUDA
        graph replays a given seed, and so the same mask, each time.
    causal_align : {"bottom-right", "top-left"}
        Where the diagonal ends when ``seq_q != seq_kv``: FlashAttention's choice or PyTorch's.
    return_lse : bool
        Also return the log-sum-exp of the scores, float32 ``[batch, heads_q, seq_q]``; it has no gradient.
    deterministic : bool
        Gradients with the same bits every time. By default GPUs with atomic float additions (CUDA, most Vulkan
        drivers) sum dQ in any order, which is faster. ``torch.use_deterministic_algorithms(True)`` has the same
        effect for torch tensors. Everything else is always deterministic.
    precision : {"fp16", "bf16", "tf32"}, optional
        Only for float32 inputs: round q, k, v and the weights to this type and multiply them on matrix units; sums,
        softmax, the result and the log-sum-exp stay float32. In fp16, values beyond 65504 become infinite; tf32 has
        the digits of fp16 and the range of float32, and needs CUDA sm_80 or newer. Gradients are computed in float32.
        A device without such units is refused; without this option float32 is never rounded.
    out : array, optional
        Write the result here; it may lie over q, k or v.
    backend : str, optional
        ``"cuda"``, ``"vulkan:1"``, ``"numpy"`` ...; default: where the arrays live, else the best device.

    Returns
    -------
    array or (array, array)
        The kind, dtype and device of ``q``. A row with nothing to attend to is zero, its log-sum-exp -inf. Host arrays
        come back finished; on a GPU the result is ordered after the call like any other work on the stream.
    """
    cos, sin = (None, None) if rope is None else rope_tables("flash_attention", rope)
    options = tuple.__new__(AttentionOptions, (  # skips the slower constructor
        causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, cos, sin, rope_interleaved, dropout_p, seed,
        causal_align, return_lse, deterministic, out, backend, precision,
    ))  # fmt: skip
    found = by_type.get(type(q))  # saves a function call on the path of repeated calls
    return (front_end(q) if found is None else found).flash_attention(q, k, v, options)


def aule_attention(q: Any, k: Any, v: Any, causal: bool = True, scale: float | None = None, **options: Any) -> Any:
    """Attention on torch tensors, with gradients.

    It is `flash_attention` for torch tensors alone, with ``causal`` and ``scale`` by position too.

    Parameters
    ----------
    q, k, v : Tensor
        As for `flash_attention`.
    causal : bool
        Row ``i`` attends to keys up to its own position.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    **options
        Every other option of `flash_attention`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        As `flash_attention` returns it. q, k, v, an additive mask, a bias and sinks have gradients; second
        derivatives are not supported.
    """
    if front_end(q, "aule_attention").__name__ != "aule.frontends.torch.entry":
        raise InvalidDtypeError(
            f"[aule_attention] expected torch tensors, got {type(q).__name__}; use aule.flash_attention for others"
        )
    return flash_attention(q, k, v, causal=causal, scale=scale, **options)


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: None = None,
    bias: None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    rope: tuple[Any, Any] | None = None,
    rope_interleaved: bool = False,
    dropout_p: float = 0.0,
    seed: int | None = None,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
    deterministic: bool = False,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Attention within each sequence of a packed batch, all of them in one launch.

    Parameters
    ----------
    q : array
        ``[total_q, heads_q, head_dim]``: the sequences of the batch, concatenated.
    k, v : array
        ``[total_k, heads_kv, head_dim]``.
    cu_seqlens_q, cu_seqlens_k : int32 array
        ``[batch + 1]``: where each sequence begins, and where the last one ends; from 0 up to ``total_q`` and
        ``total_k``. A sequence may be empty, and have another length in k than in q. In host memory they are checked;
        on a GPU they are taken as they are.
    max_seqlen_q, max_seqlen_k : int, optional
        Lengths of the longest sequences. Where they are not given and the offsets are on a GPU, the call waits for it
        to read them.
    mask, bias : None
        Not for packed batches.
    alibi_slopes : float32 array, optional
        ``[heads_q]`` or ``[batch, heads_q]``.
    causal, scale, window, softcap, sinks, rope, rope_interleaved, dropout_p, seed, causal_align
        As in `flash_attention`. Positions count within each sequence; for dropout and rope sequence ``i`` is batch
        ``i``.
    return_lse, deterministic, out, backend
        As in `flash_attention`.

    Returns
    -------
    array or (array, array)
        ``[total_q, heads_q, value_dim]`` and, with ``return_lse``, float32 ``[heads_q, total_q]``.
    """
    cos, sin = (None, None) if rope is None else rope_tables("flash_attention_varlen", rope)
    options = AttentionOptions(
        causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, cos, sin, rope_interleaved, dropout_p, seed,
        causal_align, return_lse, deterministic, out, backend,
    )  # fmt: skip
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return front_end(q, "flash_attention_varlen").flash_attention_varlen(q, k, v, *offsets, options)


def flash_attention_rope(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, causal: bool = True, scale: float | None = None, **options: Any
) -> Any:
    """Attention with rotary position embeddings of q and k.

    It is ``flash_attention(rope=(cos, sin))``.

    Parameters
    ----------
    q, k, v : array
        As for `flash_attention`.
    cos, sin : array
        ``[positions, rotary_dim // 2]``, as `precompute_rope_frequencies` gives them; more in `flash_attention`.
    causal : bool
        Row ``i`` attends to keys up to its own position.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    **options
        Every other option of `flash_attention`.

    Returns
    -------
    array or (array, array)
        As `flash_attention` returns it.
    """
    return flash_attention(q, k, v, causal=causal, scale=scale, rope=(cos, sin), **options)


def precompute_rope_frequencies(
    seq_len: int, head_dim: int, base: float = 10000.0, device: Any = None, dtype: Any = None
) -> tuple[Any, Any]:
    """Cosines and sines of rotary position embeddings.

    Parameters
    ----------
    seq_len : int
        Positions, from 0 on.
    head_dim : int
        Columns to rotate; even.
    base : float
        Pair ``i`` is rotated by ``base ** (-2 i / head_dim)`` per position.
    device : torch.device or str, optional
        Give torch tensors there; otherwise, unless ``dtype`` is one of torch, NumPy arrays.
    dtype : dtype, optional
        Default float32. They are computed in float64 and rounded once.

    Returns
    -------
    cos, sin : array
        ``[seq_len, head_dim // 2]``.
    """
    op = "precompute_rope_frequencies"
    seq_len, head_dim, base = checked_frequencies(op, seq_len, head_dim, base, ("seq_len", "head_dim"))
    end = maker(device, dtype, op)
    try:
        cos, sin = frequencies(seq_len, head_dim, base)
    except MemoryError as error:
        nbytes = 8 * seq_len * (head_dim // 2)
        raise OutOfMemoryError(f"[{op}] expected {nbytes} bytes, got none ({error}); take less", nbytes) from error
    return end.make(cos, device, dtype, op), end.make(sin, device, dtype, op)


_PRECISIONS = ("fp16", "bf16", "fp32")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    context: Aule | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    input_precision: str | None = None,
    intermediate_precision: str = "fp32",
    output_precision: str | None = None,
) -> Any:
    """Attention with chosen precisions.

    Parameters
    ----------
    q, k, v : array
        As for `flash_attention`.
    context : Aule, optional
        Compute on this context's device.
    input_precision, output_precision : {"fp16", "bf16", "fp32"}, optional
        Convert the inputs before, or the result after. Default: leave them.
    intermediate_precision : {"fp32"}
        Scores and sums are always accumulated in fp32.
    """
    for name, value in (("input_precision", input_precision), ("output_precision", output_precision)):
        if value is not None and not (isinstance(value, str) and value in _PRECISIONS):
            raise InvalidArgumentError(
                f"[attention] expected {name} of {', '.join(_PRECISIONS)}, got {value!r}; pass None to leave it"
            )
    if not isinstance(intermediate_precision, str) or intermediate_precision != "fp32":
        raise InvalidArgumentError(
            f"[attention] expected intermediate_precision 'fp32', got {intermediate_precision!r}; sums in half "
            "precision are not offered because they lose digits without being faster"
        )
    if context is not None and not isinstance(context, Aule):
        raise InvalidArgumentError(
            f"[attention] expected an aule.Aule as context, got {type(context).__name__}; pass None for the best device"
        )
    end = front_end(q, "attention")
    if input_precision is not None:
        q, k, v = (end.to_precision(x, input_precision) for x in (q, k, v))
    backend = None if context is None else context.device_name
    result = flash_attention(q, k, v, causal=causal, scale=softmax_scale, backend=backend)
    return result if output_precision is None else end.to_precision(result, output_precision)
