"""Tiny models of transformers with heads above 256, and with latent attention, against their own eager attention."""

from __future__ import annotations

from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

from test_integrations_transformers import IDS, LAYERS, LEFT, SMALL, agree, close, pair  # noqa: E402

from aule.integrations import transformers as integration  # noqa: E402
from aule.integrations.transformers_cache import AuleCache  # noqa: E402

LATENT: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")},
    "moe_intermediate_size": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 512, "q_lora_rank": 8, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "first_k_dense_replace": 1,
}  # fmt: skip
"""The head dimensions of DeepSeek V3."""
GLOBAL = {
    "sliding_window": 4, "global_head_dim": 512, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 4,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


def model(name: str) -> tuple[Any, Any]:
    """Class and configuration; skips what this version of transformers does not have."""
    kind = {"gemma4": "Gemma4", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[name]
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    if name == "gemma4":
        return transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**SMALL, **GLOBAL, **LAYERS)
    return getattr(transformers, f"{kind}ForCausalLM"), getattr(transformers, f"{kind}Config")(**LATENT)


@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3"])
def test_logits_gradients_and_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = []

    def recorded(q: Any, k: Any, v: Any, **options: Any) -> Any:
        dims.append((q.shape[3], v.shape[3]))
        return aule.flash_attention(q, k, v, **options)

    monkeypatch.setattr(integration, "flash_attention", recorded)
    models = pair(*model(name))
    agree(models, LEFT, input_ids=IDS, attention_mask=LEFT)
    assert set(dims) == {"gemma4": {(8, 8), (512, 512)}, "deepseek_v3": {(192, 128)}}[name]
    found, expected = (generated(x) for x in models)
    assert torch.equal(found.sequences, expected.sequences)
    close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_over_pages(name: str) -> None:
    """The pages hold the compressed vectors, and decoding is absorbed; padding and beams as in any model."""
    ours, theirs = pair(*model(name))
    cache = AuleCache(ours.config, 48, page_size=4)
    found, expected = generated(ours, past_key_values=cache), generated(theirs)
    assert torch.equal(found.sequences, expected.sequences)
    close(torch.stack(found.logits), torch.stack(expected.logits))
    assert cache.pool is not None and cache.pool.latent
    assert (cache.pool.head_dim, cache.pool.value_dim, cache.pool.heads_kv) == (576, 512, 1)
    # 9 tokens, of which the second row pads 3, and 5 of the 6 new ones.
    assert [cache.pool.length(seq) for seq in cache.sequences] == [14, 11]
    beams = {"num_beams": 2, "past_key_values": AuleCache(ours.config, 48, page_size=4)}
    assert torch.equal(generated(ours, **beams).sequences, generated(theirs, num_beams=2).sequences)


def test_latent_steps_may_be_packed() -> None:
    """Sequences of different lengths in one row, over a pool of compressed vectors."""
    ours, theirs = pair(*model("deepseek_v3"))
    pool = aule.KVCache(16, 1, 576, value_dim=512, latent=True, layers=2, page_size=4, device="cpu")
    sequences, prompts = [pool.allocate(), pool.allocate()], [IDS[0, :5], IDS[1, :8]]
    for step in (slice(0, 3), slice(3, None)):
        parts = [prompt[step] for prompt in prompts]
        cache = AuleCache.over(pool, sequences, [len(part) for part in parts])
        positions = torch.cat([torch.arange(len(prompt))[step] for prompt in prompts])
        with torch.no_grad():
            found = ours(torch.cat(parts)[None], position_ids=positions[None], past_key_values=cache).logits[0]
    with torch.no_grad():
        expected = torch.cat([theirs(prompt[None]).logits[0, 3:] for prompt in prompts])
    close(found, expected)


def generated(model: Any, **options: Any) -> Any:
    given = {"attention_mask": LEFT, "max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    return model.generate(IDS, **given, output_logits=True, return_dict_in_generate=True, **options)
