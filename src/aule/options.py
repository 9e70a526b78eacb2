"""AttentionOptions: what a call of attention asks for besides q, k and v. Arrays are of the caller's own kind."""

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
        }

    def arrays(self) -> dict[str, Any]:
        """The options that are arrays and were given, as `attention_problem` names them; a seed once it is one."""
        given = {"mask": self.mask, "bias": self.bias, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        given |= {"rope_cos": self.rope_cos, "rope_sin": self.rope_sin}
        given["seed"] = None if isinstance(self.seed, int) else self.seed
        return {name: array for name, array in given.items() if array is not None}
