"""AttentionOptions, DecodeOptions: what a call asks for besides q, k and v. Arrays are of the caller's own kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class AttentionOptions(NamedTuple):
    """Options of `aule.flash_attention`, as the user gave them. A tuple, because one is made on every call."""

    causal: bool = True
    scale: float | None = None
    window: int | Sequence[int | None] | None = None
    softcap: float | None = None
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    rope_cos: Any = None
    rope_sin: Any = None
    rope_interleaved: bool = False
    dropout_p: float = 0.0
    seed: Any = None
    causal_align: str = "bottom-right"
    return_lse: bool = False
    deterministic: bool = False
    out: Any = None
    backend: str | None = None
    precision: str | None = None

    def plain(self) -> dict[str, Any]:
        """The options that are not arrays, as `attention_problem` takes them."""
        return {
            "causal": self.causal,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "rope_interleaved": self.rope_interleaved,
            "dropout_p": self.dropout_p,
            "causal_align": self.causal_align,
            "return_lse": self.return_lse,
            "deterministic": self.deterministic,
            "precision": self.precision,
        }

    def arrays(self) -> dict[str, Any]:
        """The options that are arrays and were given, as `attention_problem` names them; a seed once it is one."""
        given = {"mask": self.mask, "bias": self.bias, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        given |= {"rope_cos": self.rope_cos, "rope_sin": self.rope_sin}
        given["seed"] = None if isinstance(self.seed, int) else self.seed
        return {name: array for name, array in given.items() if array is not None}


class DecodeOptions(NamedTuple):
    """What a call of `aule.decode_attention` or, with block tables, of `aule.flash_attention_paged` asks for besides
    queries, keys and values, as the user gave it."""

    context_lens: Any = None
    block_tables: Any = None
    cu_seqlens_q: Any = None
    max_seqlen_q: int | None = None
    k_scale: Any = None
    v_scale: Any = None
    layout: str = "NHD"
    causal: bool = True
    scale: float | None = None
    window: int | Sequence[int | None] | None = None
    softcap: float | None = None
    alibi_slopes: Any = None
    sinks: Any = None
    return_lse: bool = False
    out: Any = None
    backend: str | None = None

    @property
    def op(self) -> str:
        """The public function that was called, for messages."""
        return "decode_attention" if self.block_tables is None else "flash_attention_paged"

    def plain(self) -> dict[str, Any]:
        """The options that are not arrays, as `decode_problem` takes them."""
        names = ("max_seqlen_q", "layout", "causal", "scale", "window", "softcap", "return_lse")
        return {name: getattr(self, name) for name in names}

    def indices(self) -> dict[str, Any]:
        """The arrays of integers that were given."""
        given = {name: getattr(self, name) for name in ("context_lens", "block_tables", "cu_seqlens_q")}
        return {name: array for name, array in given.items() if array is not None}

    def arrays(self) -> dict[str, Any]:
        """The other options that are arrays and were given, as `decode_problem` names them."""
        given = {name: getattr(self, name) for name in ("k_scale", "v_scale", "alibi_slopes", "sinks")}
        return {name: array for name, array in given.items() if array is not None}
