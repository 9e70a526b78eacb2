"""Configuration of scores: what is fixed about every kernel of attention and decoding while it is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aule.ops.rope.tables import Rope
from aule.ops.scores.functions.program import ScoreFunction
from aule.ops.scores.modifiers import Add
from aule.tile.common.math import LOG2E

Columns = Literal["unit", "same", "any"]
"""How a mask or bias lies along a row: consecutive elements, one element for all keys, or any stride."""

Paging = Literal["none", "shift", "divide"]
"""How keys are stored: contiguous, in pages whose size is a power of two, or in pages of another size."""


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """What every attention kernel must know: types, dimensions, and the modifiers of scores.

    Attributes
    ----------
    left, right : bool
        The band of kept keys has this side.
    mask, bias : str or None
        Element type; "bits" for a boolean mask as `mask_prepass` leaves it.
    score_function, mask_function : ScoreFunction or None
        Functions of the user.
    tiles_listed : bool
        `mask_prepass` has listed the tiles in which the mask keeps anything; it is applied to those partly dropped. The
        mask is the array or, without one, the function.
    dropout_origin : bool
        Rows, keys and heads of dropout count from those of a larger problem.
    packed : bool
        Sequences of different lengths are concatenated; buffers hold where each begins.
    lens : bool
        A buffer holds the number of keys of each sequence, and keys are not packed: decoding.
    paging : {"none", "shift", "divide"}
        How keys lie; pages need ``lens``.
    unit : tuple of bool
        For q, k, v, o: the head dimension has stride 1.
    rope : Rope or None
        q and k are rotated, and their gradients rotated back.
    rope_prepass : bool
        An earlier launch has rotated q and k.
    rope_unit, rope_aligned : bool
        Rows of the tables have stride 1, and can be read in vectors as wide as those of q, k, v.
    """

    dtype: str
    head_dim: int
    value_dim: int
    left: bool = False
    right: bool = False
    softcap: bool = False
    mask: str | None = None
    bias: str | None = None
    score_function: ScoreFunction | None = None
    mask_function: ScoreFunction | None = None
    tiles_listed: bool = False
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    dropout: bool = False
    dropout_origin: bool = False
    packed: bool = False
    lens: bool = False
    paging: Paging = "none"
    unit: tuple[bool, ...] = (True, True, True, True)
    rope: Rope | None = None
    rope_prepass: bool = False
    rope_unit: bool = True
    rope_aligned: bool = False

    @property
    def score_unit(self) -> float:
        """What scores come multiplied by: log2(e), so that a weight takes one subtraction and ``exp2``."""
        return LOG2E

    @property
    def add(self) -> Add:
        """Adds a mask or bias to scores."""
        return Add(self.score_unit, self.bias is not None and self.mask not in (None, "bool", "bits"))

    @property
    def everywhere(self) -> bool:
        """Every tile is an edge tile."""
        drops = self.score_function is not None and self.score_function.may_drop
        return (self.mask is not None and not self.tiles_listed) or self.calls_mask or self.bias is not None or drops

    @property
    def calls_mask(self) -> bool:
        """The mask function is evaluated for every score."""
        return self.mask_function is not None and not (self.tiles_listed and self.mask is None)

    @property
    def may_drop(self) -> bool:
        """Some key of some row may be dropped, other than keys past the end."""
        return self.everywhere or self.left or self.right or self.tiles_listed

    @property
    def keeps_all(self) -> bool:
        """No modifier changes scores, and every row keeps every key."""
        return not (self.left or self.right or self._modified)

    @property
    def drops_later(self) -> bool:
        """No modifier changes scores, and rows drop only keys to the right."""
        return self.right and not (self.left or self._modified)

    @property
    def _modified(self) -> bool:
        functions = self.score_function is not None or self.mask_function is not None
        return self.softcap or self.mask is not None or self.bias is not None or self.alibi or functions
