"""The cases of ``aule check``: few and small, and together they cover every option of the forward pass."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.frontends import numpy as numpy_front_end
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import Expected, expect
from aule.ops.attention.validate import attention_problem
from aule.view import TensorView

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes
    ----------
    heads : tuple of int
        Number of query heads, and of key and value heads.
    seqs : tuple of int
        Number of queries and of keys.
    dims : tuple of int
        Head dimension and value dimension.
    options : dict
        Options that are not arrays.
    arrays : tuple of str
        Options that are arrays, which are filled with random values.
    """

    name: str
    dtype: str = "f32"
    heads: tuple[int, int] = (2, 2)
    seqs: tuple[int, int] = (96, 96)
    dims: tuple[int, int] = (64, 64)
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    transposed: bool = False

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """Input arrays by the names of `aule.flash_attention`'s arguments; bfloat16 as bits in uint16."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        (heads_q, heads_kv), (seq_q, seq_kv), (head_dim, value_dim) = self.heads, self.seqs, self.dims
        scores = (self.batch, heads_q, seq_q, seq_kv)
        made = {
            "q": self._floats(rng, (self.batch, heads_q, seq_q, head_dim)),
            "k": self._floats(rng, (self.batch, heads_kv, seq_kv, head_dim)),
            "v": self._floats(rng, (self.batch, heads_kv, seq_kv, value_dim)),
        }
        for name in self.arrays:
            if name == "mask":
                mask = rng.random((self.batch, 1, seq_q, seq_kv)) < 0.7
                mask[:, :, 0] = False  # a row with nothing to attend to gives zeros
                made["mask"] = mask
            elif name == "bias":
                made["bias"] = rng.standard_normal((1, *scores[1:])).astype(np.float32)
            elif name == "alibi_slopes":
                made["alibi_slopes"] = rng.uniform(0.01, 0.5, heads_q).astype(np.float32)
            elif name == "sinks":
                made["sinks"] = rng.standard_normal(heads_q).astype(np.float32)
            elif name == "seed":
                made["seed"] = rng.integers(2**32, size=2, dtype=np.uint32)
        return made

    def _floats(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        values: Array = rng.standard_normal(shape)
        if self.transposed:
            values = np.ascontiguousarray(values.swapaxes(1, 2)).swapaxes(1, 2)
        if self.dtype == "bf16":  # truncated, not rounded: any values will do
            return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return values.astype({"f32": np.float32, "f16": np.float16, "f64": np.float64}[self.dtype])

    @cached_property
    def problem(self) -> AttentionProblem:
        """The problem, validated like a user's call."""
        views: dict[str, Any] = {name: self._view(name, array) for name, array in self.inputs.items()}
        return attention_problem(**views, **self.options, return_lse=True)[0]

    def _view(self, name: str, array: Array) -> TensorView:
        if array.dtype != np.uint16:
            return numpy_front_end.view(array, name)
        return replace(numpy_front_end.view(array.view(np.float16), name), dtype="bf16", storage=array)

    @cached_property
    def expected(self) -> Expected:
        """The reference result and its tolerance."""
        arrays: dict[str, Any] = dict(self.inputs)
        if "alibi_slopes" in arrays:
            arrays["alibi"] = arrays.pop("alibi_slopes")
        return expect(self.problem, **arrays)


CAUSAL = {"causal": True}
PLAIN = {"causal": False}

CASES: tuple[Case, ...] = (
    Case("fp32", options=PLAIN),
    Case("fp32 causal", options=CAUSAL, seqs=(129, 129)),
    Case("fp16 causal", "f16", options=CAUSAL, dims=(128, 128)),
    Case("bf16 causal", "bf16", options=CAUSAL),
    Case("grouped heads", "f16", heads=(8, 2), batch=2, options=CAUSAL),
    Case("odd lengths", seqs=(17, 133), dims=(40, 24), options=PLAIN),
    Case("decoding", "f16", heads=(8, 1), seqs=(1, 300), options=CAUSAL),
    Case("top-left, transposed", seqs=(70, 50), options={"causal": True, "causal_align": "top-left"}, transposed=True),
    Case("boolean mask", options=PLAIN, arrays=("mask",), batch=2),
    Case("additive bias", "f16", options=PLAIN, arrays=("bias",), dims=(80, 80)),
    Case("window", options={"causal": True, "window": (20, 0)}, seqs=(200, 200)),
    Case("softcap, alibi, sinks", options={"causal": True, "softcap": 15.0}, arrays=("alibi_slopes", "sinks")),
    Case("dropout", options={"causal": True, "dropout_p": 0.2}, arrays=("seed",), batch=2),
    Case("head_dim 256", dims=(256, 256), seqs=(33, 65), options=CAUSAL),
    Case("fp64", "f64", options=CAUSAL),
)
"""Cases in the order of the printed table. fp64 runs only with NumPy and on the CPU."""

QUICK: tuple[Case, ...] = tuple(c for c in CASES if c.name in ("fp32 causal", "bf16 causal", "boolean mask"))
"""The cases of ``aule check --quick``."""

HEADLINE = Case("headline", heads=(8, 8), seqs=(1024, 1024), dims=(64, 64), options=CAUSAL)
"""The case that the first line of ``aule check`` reports."""
