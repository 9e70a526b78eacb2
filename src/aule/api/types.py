"""Types of the public functions' arguments and results, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar


class Array(Protocol):
    """An array of NumPy, PyTorch or another library with DLPack."""

    @property
    def shape(self) -> Any:
        """Lengths of the axes."""

    @property
    def dtype(self) -> Any:
        """Type of the elements."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...


A = TypeVar("A", bound=Array)
"""The kind of array that a function takes, and returns."""
B = TypeVar("B", bound=Array)
"""A second kind, for arrays of another dtype."""

Integers: TypeAlias = "Array | Sequence[int]"
Window: TypeAlias = "int | Sequence[int | None] | None"
Tables: TypeAlias = "tuple[Array, Array]"
"""Cosines and sines of rotary embeddings."""


ScoreMod: TypeAlias = "Callable[[Any, Any, Any, Any, Any], Any]"
MaskMod: TypeAlias = "Callable[[Any, Any, Any, Any], Any]"


class ScoreKeywords(TypedDict, total=False):
    """Options of every attention function."""

    causal: bool
    scale: float | None
    window: Window
    softcap: float | None
    alibi_slopes: Array | None
    sinks: Array | None
    out: Array | None
    backend: str | None


class TrainedKeywords(ScoreKeywords, total=False):
    """Options that `aule.flash_attention` and `aule.flash_attention_varlen` share."""

    rope: Tables | None
    rope_interleaved: bool
    dropout_p: float
    seed: int | None
    causal_align: Literal["bottom-right", "top-left"]
    deterministic: bool


class PackedKeywords(TrainedKeywords, total=False):
    """Options of `aule.flash_attention_varlen` besides ``return_lse``."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None


class AttentionKeywords(TrainedKeywords, total=False):
    """Options of `aule.flash_attention` besides ``return_lse``."""

    mask: Array | None
    bias: Array | None
    precision: object


class RopeKeywords(TypedDict, total=False):
    """Options of `aule.flash_attention_rope` besides ``return_lse``, ``causal`` and ``scale``."""

    window: Window
    softcap: float | None
    mask: Array | None
    bias: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    rope_interleaved: bool
    dropout_p: float
    seed: int | None
    causal_align: Literal["bottom-right", "top-left"]
    deterministic: bool
    precision: object
    out: Array | None
    backend: str | None


class TensorKeywords(RopeKeywords, total=False):
    """Options of `aule.aule_attention` besides ``return_lse``, ``causal`` and ``scale``."""

    rope: Tables | None


class NewestKeywords(ScoreKeywords, total=False):
    """Options of every function of decoding."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    tree_mask: Array | None


class DecodeKeywords(NewestKeywords, total=False):
    """Options of `aule.decode_attention` besides ``return_lse``."""

    context_lens: Integers | None


class CacheKeywords(NewestKeywords, total=False):
    """Options of `aule.KVCache.attend` that it hands to `aule.flash_attention_paged`, besides ``return_lse``."""

    cu_seqlens_q: Integers | None
    max_seqlen_q: int | None


class PagedKeywords(CacheKeywords, total=False):
    """Options of `aule.flash_attention_paged` besides ``return_lse``."""

    k_scale: Array | None
    v_scale: Array | None
    layout: Literal["NHD", "HND"]


class _LatentScale(TypedDict):
    scale: float | None


class LatentKeywords(_LatentScale, total=False):
    """Options of `aule.mla_decode` besides ``return_lse``."""

    value_dim: int
    indices: Array | None
    causal: bool
    kv_scale: Array | None
    out: Array | None
    backend: str | None


class CascadeKeywords(TypedDict, total=False):
    """Options of `aule.cascade_attention` besides ``return_lse`` and ``shared_pages``."""

    causal: bool
    scale: float | None
    softcap: float | None
    sinks: Array | None
    cu_seqlens_q: Array | None
    max_seqlen_q: int | None
    k_scale: Array | None
    v_scale: Array | None
    layout: Literal["NHD", "HND"]
    backend: str | None
