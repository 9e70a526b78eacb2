"""aule's backend for vLLM without vLLM: slots, layouts and mixed batches against float64.

`tests/serving/` runs it inside vLLM. A few empty base classes stand in for vLLM's here, so that builder and layer are
the real ones; the metadata have the fields and types that vLLM 0.32 passes.
"""

from __future__ import annotations

import enum
import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

LAYOUTS = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3), "LHBNC": (1, 0, 2, 3)}
"""vLLM's names, and the order of blocks, heads, rows and elements in memory."""
MIXED = [(1, 33), (5, 5), (1, 1), (18, 40), (3, 70)]
"""New tokens and all keys of each sequence: decoding, prefill from the start and of a later chunk."""


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`aule.integrations._vllm_attention`, on stand-ins for vLLM's base classes."""

    class AttentionType(str, enum.Enum):
        DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder", "encoder_only", "encoder_decoder"

    class Builder:
        def __init__(self, *args: Any) -> None: ...

    module = ModuleType("vllm.v1.attention.backend")
    for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadata"):
        setattr(module, name, type(name, (), {}))
    module.AttentionType, module.AttentionMetadataBuilder = AttentionType, Builder  # type: ignore[attr-defined]
    module.AttentionCGSupport = SimpleNamespace(NEVER=0)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "aule.integrations._vllm_attention"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


class Step:
    """A step of vLLM: sequences in shuffled blocks, the older keys in the cache, the new ones beside it."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        layout: str = "LBHNC",
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (32, 32),
        block: int = 16,
        dtype: Any = torch.float32,
    ) -> None:
        rng = np.random.default_rng(3)
        self.sequences, self.heads, (dim, value_dim) = sequences, heads, dims
        counts = [-(-keys // block) for _, keys in sequences]
        order, shape = LAYOUTS[layout], (sum(counts) + 3, heads[1], block, dim + value_dim)
        memory = torch.zeros([shape[i] for i in order], dtype=dtype)
        self.cache = memory.permute([order.index(i) for i in range(4)])
        numbers = iter(rng.permutation(np.arange(1, sum(counts) + 1)).tolist())
        self.tables = torch.zeros(len(sequences), max(counts) + 2, dtype=torch.int32)
        self.k, self.v, self.q, slots = [], [], [], []
        for i, (new, keys) in enumerate(sequences):
            self.tables[i, : counts[i]] = torch.tensor([next(numbers) for _ in range(counts[i])])
            k, v, q = (rng.standard_normal((n, h, d)) for n, h, d in self._shapes(new, keys, dim, value_dim))
            self.k.append(k), self.v.append(v), self.q.append(q)
            at = torch.arange(keys)
            slots.append(self.tables[i, at // block].long() * block + at % block)
            old, both = slots[i][: keys - new], np.concatenate([k, v], axis=2)[: keys - new]
            self.cache[old // block, :, old % block] = torch.from_numpy(both).to(dtype)
        news = [new for new, _ in sequences]
        self.slots = torch.cat([x[len(x) - new :] for x, new in zip(slots, news, strict=True)])
        self.starts = torch.tensor([0, *np.cumsum(news)], dtype=torch.int32)
        self.lens = torch.tensor([keys for _, keys in sequences], dtype=torch.int32)

    def _shapes(self, new: int, keys: int, dim: int, value_dim: int) -> list[tuple[int, int, int]]:
        return [(keys, self.heads[1], dim), (keys, self.heads[1], value_dim), (new, self.heads[0], dim)]

    def rows(self, name: str, dtype: Any = torch.float32) -> Any:
        """New rows of q, k or v of all sequences."""
        arrays = getattr(self, name)
        parts = [x[len(x) - new :] for x, (new, _) in zip(arrays, self.sequences, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    def metadata(self, causal: bool = True) -> SimpleNamespace:
        """vLLM's CommonAttentionMetadata, with block tables of more rows than there are sequences."""
        return SimpleNamespace(
            num_reqs=len(self.sequences), query_start_loc=self.starts, query_start_loc_cpu=self.starts,
            seq_lens=self.lens, block_table_tensor=torch.cat([self.tables, self.tables]), slot_mapping=self.slots,
            causal=causal,
        )  # fmt: skip

    def expected(self, attend: Any) -> Any:
        """Attention of every sequence in float64, by a function of q, k and v of one sequence."""
        group = self.heads[0] // self.heads[1]
        done = [
            attend(q, *(np.repeat(x, group, axis=1) for x in (k, v)))
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]
        return torch.from_numpy(np.concatenate(done))


def reference(
    q: Any, k: Any, v: Any, *, scale: float, causal: bool = True, window: int | None = None, softcap: float = 0.0,
    slopes: Any = None, sinks: Any = None,
) -> Any:  # fmt: skip
    """Attention of one sequence, as vLLM defines its options; ``[tokens, heads, dim]``."""
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    at = np.arange(len(q))[:, None] + len(k) - len(q)
    key = np.arange(len(k))[None]
    if slopes is not None:
        scores = scores + np.asarray(slopes)[:, None, None] * (key - at)
    kept = np.ones(scores.shape[1:], bool)
    if causal:
        kept &= key <= at
    if window is not None:
        kept &= np.abs(at - key) < window
    scores = np.where(kept, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(np.asarray(sinks)[:, None, None], (*scores.shape[:2], 1))], 2)
    p = np.exp(scores - scores.max(axis=2, keepdims=True))
    p = (p / p.sum(axis=2, keepdims=True))[..., : len(k)]
    return np.einsum("hqk,khd->qhd", p, v)


LAYER = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)


def run(attention: Any, step: Step, layer: Any = LAYER, *, causal: bool = True, **options: Any) -> Any:
    """Write and attend as vLLM does: rows of padding follow the step's tokens, and must stay as they are."""
    options = {"num_heads": step.heads[0], "num_kv_heads": step.heads[1]} | options
    impl = attention.AuleAttentionImpl(head_size=step.q[0].shape[2], **options)
    dtype = options.get("dtype", torch.float32)
    q, k, v = (torch.cat([x, torch.full_like(x[:2], torch.nan)]) for x in (step.rows(n, dtype) for n in "qkv"))
    out = torch.full((*q.shape[:2], v.shape[2]), 7.0)
    metadata = attention.AuleMetadataBuilder(None, [], None, None).build(0, step.metadata(causal))
    impl.do_kv_cache_update(layer, k, v, step.cache, step.slots)
    found = impl.forward(layer, q, k, v, step.cache, metadata, out)
    assert found is out
    assert bool((out[-2:] == 7.0).all())
    return out[:-2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_batch_in_every_layout(attention: Any, layout: str) -> None:
    step = Step(MIXED, layout)
    found = run(attention, step, scale=0.2)
    torch.testing.assert_close(found.double(), step.expected(lambda *x: reference(*x, scale=0.2)), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "sequences", [[(1, 9), (1, 50)], [(3, 9), (3, 50)], [(40, 40)]], ids=["decode", "draft", "one"]
)
def test_sequences_of_one_length(attention: Any, sequences: list[tuple[int, int]]) -> None:
    step = Step(sequences)
    found = run(attention, step, scale=0.2)
    torch.testing.assert_close(found.double(), step.expected(lambda *x: reference(*x, scale=0.2)), atol=2e-6, rtol=0)


def test_options(attention: Any) -> None:
    step, slopes, sinks = Step(MIXED, "LBNHC"), [0.5, 0.25, 0.1, 0.05], [0.3, -1.0, 2.0, 0.0]
    given = {"sliding_window": 11, "logits_soft_cap": 3.0, "alibi_slopes": slopes, "sinks": torch.tensor(sinks)}
    found = run(attention, step, scale=0.3, **given)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return reference(q, k, v, scale=0.3, window=11, softcap=3.0, slopes=slopes, sinks=sinks)

    torch.testing.assert_close(found.double(), step.expected(attend), atol=3e-6, rtol=0)


def test_values_of_another_dimension_and_pages_that_are_no_power_of_two(attention: Any) -> None:
    step = Step(MIXED, "LBNHC", heads=(3, 1), dims=(24, 40), block=48)
    found = run(attention, step, scale=0.2)
    torch.testing.assert_close(found.double(), step.expected(lambda *x: reference(*x, scale=0.2)), atol=2e-6, rtol=0)


def test_both_directions(attention: Any) -> None:
    step = Step(MIXED)
    found = run(attention, step, causal=False, scale=0.2)
    wanted = step.expected(lambda *x: reference(*x, scale=0.2, causal=False))
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=0)


def test_encoder_uses_no_cache(attention: Any) -> None:
    step = Step([(9, 9), (30, 30)])
    step.cache.fill_(torch.nan)
    found = run(attention, step, causal=False, scale=0.2, sliding_window=6, attn_type="encoder_only")
    wanted = step.expected(lambda *x: reference(*x, scale=0.2, causal=False, window=6))
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=0)


def test_fp8_cache_holds_rounded_and_scaled_keys(attention: Any) -> None:
    if not hasattr(torch, "float8_e4m3fn"):
        pytest.skip("this PyTorch has no float8")
    layer = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=0.25)
    step = Step([(6, 6), (1, 1), (17, 17)], dtype=torch.uint8)
    found = run(attention, step, layer, scale=0.2, kv_cache_dtype="fp8")

    def rounded(x: Any, scale: float) -> Any:
        return (torch.from_numpy(x).float() / scale).to(torch.float8_e4m3fn).double().numpy() * scale

    def attend(q: Any, k: Any, v: Any) -> Any:
        return reference(q, rounded(k, 0.5), rounded(v, 0.25), scale=0.2)

    torch.testing.assert_close(found.double(), step.expected(attend), atol=3e-6, rtol=0)


def test_padding_is_not_written() -> None:
    from aule.integrations import _vllm_pages as pages

    memory = torch.full((3, 2, 16, 8), 5.0)
    new = torch.arange(3.0)[:, None, None].expand(3, 2, 4)
    pages.store(memory, new, -new, torch.tensor([-1, 37, -1]))
    wanted = torch.full_like(memory, 5.0)
    wanted[2, :, 5] = torch.tensor([1.0] * 4 + [-1.0] * 4)
    assert torch.equal(memory, wanted)
    pages.store(memory, *(torch.cat([x, x]) for x in (new, -new)), torch.tensor([-1, 37, -1]))  # rows without a slot
    assert torch.equal(memory, wanted)


def test_refusals(attention: Any) -> None:
    from aule.errors import AuleError, InvalidShapeError
    from aule.integrations import _vllm_pages as pages

    step = Step([(1, 4)])
    metadata = step.metadata()
    metadata.causal = torch.tensor([True])
    with pytest.raises(AuleError, match="one direction for all sequences"):
        attention.AuleMetadataBuilder(None, [], None, None).build(0, metadata)
    with pytest.raises(InvalidShapeError, match=r"expected a cache \[blocks, heads_kv, block, head_dim \+ value_dim\]"):
        pages.layer_cache(torch.zeros(2, 3, 16, 2, 32), 32)  # vLLM before 0.29: keys and values apart
    backend = attention.AuleAttentionBackend
    assert backend.supports_combination(64, torch.float32, "bfloat16", None) is not None
    assert backend.supports_combination(64, torch.bfloat16, "bfloat16", None) is None
    assert backend.supports_head_size(256)
    assert not backend.supports_head_size(4096)


def test_register_without_a_suitable_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM calls `register` wherever aule is installed, so an old vLLM must still start."""
    from aule.integrations import vllm

    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(logging.getLogger("aule"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert "needs vLLM 0.32" in caplog.text
