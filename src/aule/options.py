"""AttentionOptions, DecodeOptions: all arguments of a call besides q, k and v. Arrays are still the caller's type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class AttentionOptions(NamedTuple):
    """Options of `aule.flash_attention` as given by the user. A tuple, because every call makes one."""

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
        """Options that are not arrays, named as in `attention_problem`."""
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
        """Array options that were given, named as in `attention_problem`; includes the seed if it is an array."""
        given = {"mask": self.mask, "bias": self.bias, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        given |= {"rope_cos": self.rope_cos, "rope_sin": self.rope_sin}
        given["seed"] = None if isinstance(self.seed, int) else self.seed
        return {name: array for name, array in given.items() if array is not None}


class DecodeOptions(NamedTuple):
    """Options of `aule.decode_attention` or, with block tables, `aule.flash_attention_paged`, as given by the user.

    With ``latent``, of `aule.mla_decode`: the values are the first columns of the keys.
    """

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
    score_mod: Any = None
    mask_mod: Any = None
    tree_mask: Any = None
    latent: bool = False

    @property
    def has_functions(self) -> bool:
        """Whether functions of the user, or a tree mask, modify or drop scores."""
        return self.score_mod is not None or self.mask_mod is not None or self.tree_mask is not None

    @property
    def op(self) -> str:
        """Name of the public function that was called, for error messages."""
        if self.latent:
            return "mla_decode"
        return "decode_attention" if self.block_tables is None else "flash_attention_paged"

    def plain(self) -> dict[str, Any]:
        """Options that are not arrays, named as in `decode_problem`."""
        names = ("max_seqlen_q", "layout", "causal", "scale", "window", "softcap", "return_lse", "latent")
        return {name: getattr(self, name) for name in names}

    def indices(self) -> dict[str, Any]:
        """Integer array options that were given."""
        given = {name: getattr(self, name) for name in ("context_lens", "block_tables", "cu_seqlens_q")}
        return {name: array for name, array in given.items() if array is not None}

    def arrays(self) -> dict[str, Any]:
        """Other array options that were given, named as in `decode_problem`."""
        given = {name: getattr(self, name) for name in ("k_scale", "v_scale", "alibi_slopes", "sinks")}
        return {name: array for name, array in given.items() if array is not None}
