"""DecodeProblem: attention of a few query rows to a cache of keys and values; framework-free and hashable."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ops.attention.problem import UNBOUNDED, AttentionProblem
from aule.ops.scores.functions.program import BoundFunction

QUANTISED = ("i8", "e4m3")
"""Element types of caches with a scale for each token and head; e4m3 is fp8 without infinities."""


@dataclass(frozen=True)
class DecodeProblem:
    """A decoding call. Shapes and options are valid by construction (`validate.py` makes it from views).

    Sequence ``n`` has ``lens[n]`` keys, or all ``seq_kv`` without lengths, and its own number of query rows, at most
    ``seq_q``. Row ``i`` of ``rows`` stands at key ``lens[n] - rows + i``: the last query stands at the last key. The
    rest is attention as `AttentionProblem` defines it, with ``causal_align`` "bottom-right".

    Attributes
    ----------
    seq_q : int
        Query rows of a sequence; of the longest if sequences are packed.
    seq_kv : int
        Most keys of a sequence: the length of a contiguous cache, or of all its pages.
    cache : str
        Element type of keys and values: ``dtype``, or one of `QUANTISED`.
    page : int
        Keys of a page; 0 if the cache is contiguous.
    pages : int
        Pages of the pool; 0 if the cache is contiguous.
    total_q : int or None
        Query rows of all sequences if they are packed.
    lens : bool
        The number of keys of each sequence is an operand.
    latent : bool
        The values are the first columns of the keys, in the same memory.
    score_mod, mask_mod : BoundFunction or None
        Functions of the user; the arrays that they captured are operands.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    value_dim: int
    dtype: str
    cache: str
    scale: float
    causal: bool = True
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    return_lse: bool = False
    lens: bool = True
    page: int = 0
    pages: int = 0
    total_q: int | None = None
    latent: bool = False
    score_mod: BoundFunction | None = None
    mask_mod: BoundFunction | None = None

    @property
    def quantised(self) -> bool:
        """Whether keys and values have scales."""
        return self.cache in QUANTISED

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // max(self.heads_kv, 1)

    @property
    def limits(self) -> tuple[int, int]:
        """Band of kept keys around a row's position, (left, right), from causal and window."""
        return self.alone(self.seq_q, self.seq_kv).limits

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """``[batch, heads_q, seq_q, value_dim]``, or ``[1, heads_q, total_q, value_dim]``."""
        if self.total_q is not None:
            return 1, self.heads_q, self.total_q, self.value_dim
        return self.batch, self.heads_q, self.seq_q, self.value_dim

    def alone(self, seq_q: int, seq_kv: int, dtype: str | None = None) -> AttentionProblem:
        """One sequence as an attention problem, in its own or another element type."""
        return AttentionProblem(
            batch=1,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            seq_q=seq_q,
            seq_kv=seq_kv,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=dtype or self.dtype,
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            alibi=self.alibi,
            sinks=self.sinks,
            return_lse=self.return_lse,
            score_mod=self.score_mod,
            mask_mod=self.mask_mod,
        )
