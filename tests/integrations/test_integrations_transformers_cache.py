"""`AuleCache` in transformers' own generation against their attention and their cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("llvmlite", reason="the models beside this file need the CPU engine")

from test_integrations_transformers import DECODERS, IDS, LEFT, SMALL, pair  # noqa: E402

from aule.integrations import transformers as integration  # noqa: E402
from aule.integrations.transformers_cache import AuleCache  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])  # plain, windows, softcap, sinks
def test_generate_with_padding(name: str) -> None:
    ours, theirs = pair(*DECODERS[name])
    given = {"attention_mask": LEFT, "max_new_tokens": 8, "do_sample": False}
    cache = AuleCache(ours.config, 32, page_size=4)
    found = ours.generate(IDS, past_key_values=cache, **given)
    assert torch.equal(found, theirs.generate(IDS, **given))
    assert cache.pool is not None
    # 9 tokens, of which the second row pads 3, and 7 of the 8 new ones: padding is not in the pages.
    assert [cache.pool.length(seq, layer) for layer in (0, 1) for seq in cache.sequences] == [16, 13] * 2
    assert cache.get_seq_length() == 16
    cache.reset()
    assert cache.pool.pages_in_use == 0


def test_beams_share_pages() -> None:
    ours, theirs = pair(*DECODERS["llama"])
    given = {"attention_mask": LEFT, "max_new_tokens": 8, "do_sample": False, "num_beams": 4, "num_return_sequences": 2}
    cache = AuleCache(ours.config, 64, page_size=4)
    found = ours.generate(IDS, past_key_values=cache, **given)
    assert torch.equal(found, theirs.generate(IDS, **given))
    assert cache.pool is not None and len(cache.sequences) == 8
    apart = sum(-(-cache.pool.length(seq) // 4) for seq in cache.sequences)
    assert cache.pool.pages_in_use < apart  # beams have most of their pages in common


def test_crop_and_select() -> None:
    ours, theirs = pair(*DECODERS["llama"])
    ids = IDS[:, :6]
    cache, plain = AuleCache(ours.config, 32, page_size=4), transformers.DynamicCache(config=theirs.config)
    with torch.no_grad():
        for model, kept in ((ours, cache), (theirs, plain)):
            model(ids, past_key_values=kept)
            kept.crop(-2)
            kept.batch_repeat_interleave(2)
            kept.batch_select_indices(torch.tensor([3, 0, 1]))
            assert kept.get_seq_length() == 4
        next_ids = IDS[:1, 6:8].expand(3, 2)
        found, wanted = ours(next_ids, past_key_values=cache).logits, theirs(next_ids, past_key_values=plain).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(aule.InvalidArgumentError, match="below 0"):
        cache.crop(3)


def test_packed_steps_over_one_pool() -> None:
    """Prompts and single tokens of several sequences in one row, as a scheduler puts them together."""
    ours, theirs = pair(*DECODERS["qwen3"])
    pool = aule.KVCache(32, 2, 8, page_size=4, layers=2, device="cpu")
    prompts = [IDS[0, :7], IDS[1, :3]]
    seqs = [pool.allocate() for _ in prompts]
    with torch.no_grad():
        for step in ([7, 0], [1, 3], [1, 1]):
            starts = [pool.length(seq) for seq in seqs]
            rows = [IDS[i, start : start + n] for i, (start, n) in enumerate(zip(starts, step, strict=True))]
            places = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, step, strict=True)])
            cache = AuleCache.over(pool, seqs, step)
            logits = ours(torch.cat(rows)[None], position_ids=places[None], past_key_values=cache).logits[0]
            done = 0
            for i, n in enumerate(step):
                if n:
                    wanted = theirs(IDS[i : i + 1, : starts[i] + n]).logits[0, -n:]
                    torch.testing.assert_close(logits[done : done + n], wanted, rtol=1e-4, atol=1e-4)
                done += n
    assert [pool.length(seq) for seq in seqs] == [9, 4]


def test_refusals() -> None:
    ours, theirs = pair(*DECODERS["llama"])
    given: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with pytest.raises(aule.AuleError, match="attn_implementation='aule'"):
        theirs.generate(IDS, past_key_values=AuleCache(theirs.config, 32), **given)
    right = LEFT.flip(1)
    with pytest.raises(aule.AuleError, match="padding on the left"), torch.no_grad():
        ours(IDS, attention_mask=right, past_key_values=AuleCache(ours.config, 32))
    with pytest.raises(aule.AuleError, match="no gradient"):
        ours(IDS, past_key_values=AuleCache(ours.config, 32))
    with pytest.raises(aule.CacheFullError):
        ours.generate(IDS, past_key_values=AuleCache(ours.config, 2, page_size=4), **given)
    with pytest.raises(aule.InvalidArgumentError, match="a length for each"):
        AuleCache.over(aule.KVCache(2, 2, 8, layers=2, device="cpu"), [0], [1, 2])


def test_keys_that_are_changed_after_the_cache_are_blamed() -> None:
    """A model that caches compressed keys of a kind that the cache does not know; attention is not to blame."""
    options = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    }  # fmt: skip
    ours, _ = pair(transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(**options))
    cache = AuleCache(ours.config, 32)
    cache.rank = 0
    with pytest.raises(aule.AuleError, match=r"keys of layer 0 as they were cached, .* DynamicCache"):
        ours.generate(IDS, past_key_values=cache, max_new_tokens=2)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: transformers.Llama4TextConfig(num_hidden_layers=4), "chunked_attention"),
        (lambda: transformers.JambaConfig(), "linear_attention"),
        (lambda: transformers.Gemma3nTextConfig(), "shared or no keys"),
    ],
)
def test_layers_of_another_kind_are_refused(make: Any, kind: str) -> None:
    config = make()
    with pytest.raises(aule.AuleError, match=rf"got {type(config).__name__} with layers of .*{kind}.*DynamicCache"):
        AuleCache(config, 32)


def test_a_window_that_only_the_cache_knows_is_refused() -> None:
    """Moshi's layers do not pass on their window: without transformers' own cache they would have none."""
    config = transformers.MistralConfig(**{**SMALL, "sliding_window": 4})
    cache = AuleCache(config, 32)
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    marked, _ = cache.update(k, v, 0)
    with pytest.raises(aule.AuleError, match="layer 0 to pass on its sliding window"):
        integration.attention_forward(torch.nn.Module(), q, marked, v, None)


def test_keys_shared_by_two_layers_are_refused() -> None:
    ours, _ = pair(*DECODERS["llama"])
    cache = AuleCache(ours.config, 32)
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    marked, _ = cache.update(k, v, 0)
    integration.attention_forward(torch.nn.Module(), q, marked, v, None)
    with pytest.raises(aule.AuleError, match="keys of layer 0 once"):
        integration.attention_forward(torch.nn.Module(), q, marked, v, None)


def test_a_step_without_room_can_be_made_again() -> None:
    ours, _ = pair(*DECODERS["llama"])
    cache = AuleCache(ours.config, 3, page_size=8)
    with torch.no_grad():
        ours(IDS[:, :8], past_key_values=cache)
        with pytest.raises(aule.CacheFullError):
            ours(IDS[:, 8:9], past_key_values=cache)
        assert [cache.get_seq_length(layer) for layer in (0, 1)] == [8, 8]
        cache.batch_select_indices(torch.tensor([0]))
        found = ours(IDS[:1, 8:9], past_key_values=cache).logits
        wanted = ours(IDS[:1, :9]).logits[:, -1:]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_refused_mask_leaves_no_padding_behind() -> None:
    ours, _ = pair(*DECODERS["llama"])
    cache = AuleCache(ours.config, 32, page_size=8)
    with torch.no_grad():
        with pytest.raises(aule.AuleError, match="padding on the left"):
            ours(IDS, attention_mask=LEFT.flip(1), past_key_values=cache)
        found, wanted = ours(IDS, past_key_values=cache).logits, ours(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_rows_that_do_not_exist_take_no_pages() -> None:
    ours, _ = pair(*DECODERS["llama"])
    cache = AuleCache(ours.config, 32, page_size=8)
    with torch.no_grad():
        ours(IDS, past_key_values=cache)
    assert cache.pool is not None
    with pytest.raises(aule.InvalidArgumentError, match=r"rows from 0 to 1, got \[0, 9\]"):
        cache.reorder_cache(torch.tensor([0, 9]))
    assert cache.pool.sequences == tuple(cache.sequences) and len(cache.sequences) == 2


def test_a_prompt_is_kept_and_copied() -> None:
    """transformers' own recipe for a prompt that many texts begin with."""
    ours, theirs = pair(*DECODERS["llama"])
    prompt = AuleCache(ours.config, 32, page_size=4)
    with torch.no_grad():
        ours(IDS[:1, :5], past_key_values=prompt)
    for row in range(2):
        ids = torch.cat([IDS[:1, :5], IDS[row : row + 1, 5:]], 1)
        found = ours.generate(ids, past_key_values=copy.deepcopy(prompt), max_new_tokens=4, do_sample=False)
        assert torch.equal(found, theirs.generate(ids, max_new_tokens=4, do_sample=False))
    assert prompt.get_seq_length() == 5
