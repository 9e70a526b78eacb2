"""AttentionProblem: the maths of one attention call, framework-free, device-free and hashable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from aule.ops.rope.tables import Rope
from aule.ops.scores.functions.program import BoundFunction

UNBOUNDED = -1
"""A window side without a limit."""
FAR = 1 << 30
"""Farther than any sequence is long; sums with positions fit 32 bits."""


class Origin(NamedTuple):
    """Where a problem begins within a larger one of which it computes a part (`aule.distributed`).

    Attributes
    ----------
    shift : int
        Key position of query row 0, counted from key 0 of the part.
    row, key, head : int
        Query row 0, key 0 and head 0 of the part, as dropout numbers them in the larger problem. ``key`` is a multiple
        of 8, the keys that dropout draws for at a time; ``head`` counts ``batch * heads_q + head``.
    """

    shift: int
    row: int = 0
    key: int = 0
    head: int = 0


@dataclass(frozen=True)
class AttentionProblem:
    """What is to be computed. Shapes and options are valid by construction (`validate.py` makes it from views).

    For query row ``i`` and key ``j`` of one head, with ``shift = seq_kv - seq_q`` when ``causal_align`` is
    ``"bottom-right"`` and 0 when it is ``"top-left"``, and ``t = i + shift`` the key that row ``i`` stands at:

    1. ``s = scale * dot(q[i], k[j])``; where ``rope``, q and k are rotated before, by the angles of positions that
       differ by ``t - j`` (`rope_starts`)
    2. ``s = softcap * tanh(s / softcap)`` when ``softcap > 0``
    3. ``s += mask[i, j]`` (additive) ``+ bias[i, j] - slope * |t - j|``, each where present
    4. ``s = score_mod(s, batch, head, i, j)``
    5. kept only when ``j <= t`` (causal), ``t - left <= j <= t + right`` (window), ``mask[i, j]`` (boolean) and
       ``mask_mod(batch, head, i, j)``; an additive mask or bias of exactly -inf also drops the key
    6. softmax over the kept keys and, where ``sinks``, one further logit per head that has no value
    7. weights are dropped where ``dropout_p > 0``, the others multiplied by ``1 / (1 - dropout_p)``, with the chance as
       `dropout` rounds it
    """

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    value_dim: int
    dtype: str
    scale: float
    causal: bool = False
    causal_align: Literal["bottom-right", "top-left"] = "bottom-right"
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    softcap: float = 0.0
    mask: str | None = None
    """dtype of the mask array (``"bool"``: True keeps; else additive), or None."""
    bias: str | None = None
    """dtype of the additive bias, or None."""
    alibi: bool = False
    score_mod: BoundFunction | None = None
    """A user's function of the scores; its captured arrays are operands."""
    mask_mod: BoundFunction | None = None
    """A user's function that says which keys are kept."""
    sinks: bool = False
    return_lse: bool = False
    deterministic: bool = False
    """Gradients have the same bits in every run; otherwise dQ may be summed in any order."""
    dropout_p: float = 0.0
    """Chance that a weight is dropped after softmax (`dropout.py`); the seed is an operand."""
    precision: str | None = None
    """Type to which fp32 inputs are rounded for a forward pass on matrix units; None to compute in fp32."""
    packed: tuple[int, int] | None = None
    """Query rows and keys of all sequences, if they are packed (`varlen.py`). ``batch`` then counts sequences, and
    ``seq_q`` and ``seq_kv`` are the longest lengths; the offsets of all are operands."""
    rope: Rope | None = None
    origin: Origin | None = None
    """Set if this is a part of a larger problem; its ``shift`` then replaces that of ``causal_align``."""

    @property
    def shift(self) -> int:
        """Key position of query row 0."""
        if self.origin is not None:
            return self.origin.shift
        return self.seq_kv - self.seq_q if self.causal_align == "bottom-right" else 0

    def dropout_places(self, heads: Any, rows: slice, keys: slice) -> tuple[Any, slice, slice]:
        """Heads (``batch * heads_q + head``), rows and keys of this problem as dropout numbers them."""
        at = self.origin or Origin(0)
        return heads + at.head, *(slice(x.start + y, x.stop + y) for x, y in ((rows, at.row), (keys, at.key)))

    @property
    def rope_starts(self) -> tuple[int, int]:
        """Positions of query row 0 and of key 0: the one that stands further to the left is at 0."""
        return max(self.shift, 0), max(-self.shift, 0)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """``[batch, heads_q, seq_q, value_dim]``, or ``[1, heads_q, rows of all sequences, value_dim]``."""
        if self.packed is not None:
            return 1, self.heads_q, self.packed[0], self.value_dim
        return self.batch, self.heads_q, self.seq_q, self.value_dim

    @property
    def key_rows(self) -> int:
        """Keys of all batches and heads."""
        return self.heads_kv * (self.batch * self.seq_kv if self.packed is None else self.packed[1])

    @property
    def limits(self) -> tuple[int, int]:
        """The band of kept keys around ``t``: causal and window folded into one (left, right)."""
        left, right = self.window
        if self.causal:
            right = 0 if right == UNBOUNDED else min(right, 0)
        return left, right

    @property
    def band(self) -> tuple[int, int]:
        """`limits` with `FAR` for an unbounded side."""
        left, right = (FAR if side == UNBOUNDED else side for side in self.limits)
        return left, right

    @property
    def has_functions(self) -> bool:
        """Whether functions of the user modify or drop scores."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def modifiers(self) -> int:
        """Steps beside the products, band and softmax: each costs a kernel registers."""
        functions = self.score_mod, self.mask_mod
        given = (self.mask, self.bias, self.alibi, self.softcap, self.dropout_p, self.rope, *functions)
        return sum(map(bool, given))

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // max(self.heads_kv, 1)

    @property
    def scores(self) -> int:
        """Scores of all heads, dropped ones included."""
        return self.batch * self.heads_q * self.seq_q * self.seq_kv

    @property
    def flops(self) -> int:
        """Multiply-adds times two, with the causal half left out, as the literature counts."""
        full = 2 * self.scores * (self.head_dim + self.value_dim)
        return full // 2 if self.causal else full
