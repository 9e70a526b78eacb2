"""Tiny random models of transformers with aule's attention against their own eager attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

from aule.integrations import transformers as integration  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def decoder(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options})
    architecture = "Gemma3ForCausalLM" if name == "Gemma3Text" else f"{name}ForCausalLM"
    return getattr(transformers, architecture), config


MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
DECODERS: dict[str, Any] = {
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral", sliding_window=4),
    "qwen3": decoder("Qwen3"),
    "gemma2": decoder("Gemma2", sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8, **LAYERS),
    "gemma3": decoder("Gemma3Text", sliding_window=4, query_pre_attn_scalar=8, **LAYERS),
    "gpt_oss": decoder("GptOss", sliding_window=4, **MOE, **LAYERS),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0,
            embd_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        ),
    ),
}  # fmt: skip

IDS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones(2, 9, dtype=torch.int64)
LEFT[1, :3] = 0


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()
    integration.register()


def pair(kind: Any, config: Any) -> tuple[Any, Any]:
    """The same model twice: with aule's attention and with its own."""
    torch.manual_seed(0)
    theirs = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="aule").eval()
    for name, parameter in theirs.named_parameters():
        if "sinks" in name or "relative_attention_bias" in name:  # zero, or nearly: they should matter here
            torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    assert ours.config._attn_implementation == "aule"
    return ours, theirs


class Calls:
    """Counts the calls of aule.flash_attention, and keeps their options."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: list[dict[str, Any]] = []
        self.heads: list[tuple[int, int]] = []
        monkeypatch.setattr(integration, "flash_attention", self)

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.options.append(options)
        self.heads.append((q.shape[1], k.shape[1]))
        return aule.flash_attention(q, k, v, **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def agree(models: tuple[Any, Any], real: Any, **inputs: Any) -> None:
    """Outputs at positions that are no padding, and the gradients of all parameters from them."""
    results = []
    for model in models:
        model.zero_grad()
        out = model(**inputs)
        out = out.logits if hasattr(out, "logits") else out.last_hidden_state
        chosen = out if real is None else out[real.bool()]
        chosen.square().mean().backward()
        results.append(
            (chosen.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
    (found, grads), (expected, right) = results
    close(found, expected)
    assert grads.keys() == right.keys() == dict(models[0].named_parameters()).keys()
    for name, grad in grads.items():
        scale = max(right[name].abs().max().item(), 1e-6)
        assert (grad - right[name]).abs().max().item() <= 2e-4 * scale + 1e-7, name


# -- decoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("mask", ["none", "left padding"])
def test_decoder(name: str, mask: str, calls: Calls) -> None:
    models = pair(*DECODERS[name])
    given = None if mask == "none" else LEFT
    agree(models, given, input_ids=IDS, attention_mask=given)
    assert len(calls.options) == 2
    if name != "gpt2":
        assert calls.heads == [(4, 2)] * 2, "grouped heads are not repeated"
    masked = [options["mask"] is not None for options in calls.options]
    assert any(masked) or mask == "none"
    if name == "gemma2":
        assert all(options["softcap"] == 2.0 for options in calls.options)
    if name == "gpt_oss":
        assert all(options["sinks"].shape == (4,) for options in calls.options)


@pytest.mark.parametrize("name", DECODERS)
def test_compiled_decoder(name: str) -> None:
    """In one graph, with the same numbers."""
    torch._dynamo.reset()
    ours, _ = pair(*DECODERS[name])
    inputs = {"input_ids": torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0)), "use_cache": False}
    results = []
    for model in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        ours.zero_grad()
        # The experts of gpt-oss, transformers' own, cannot be compiled with gradients on the CPU.
        with torch.set_grad_enabled(name != "gpt_oss"):
            out = model(**inputs).logits
        if out.requires_grad:
            out.square().mean().backward()
        results.append((out.detach(), *(p.grad.clone() for p in ours.parameters() if p.grad is not None)))
    for found, expected in zip(*results, strict=True):
        close(found, expected)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name: str, cache: str, calls: Calls) -> None:
    ours, theirs = pair(*DECODERS[name])
    options = {
        "attention_mask": LEFT,
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "output_logits": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
    }
    found, expected = ours.generate(IDS, **options), theirs.generate(IDS, **options)
    assert torch.equal(found.sequences, expected.sequences)
    close(torch.stack(found.logits), torch.stack(expected.logits))
    assert len(calls.options) == 12, "two layers, six steps"


def test_static_cache_prefill_without_a_mask(calls: Calls) -> None:
    """The empty rest of a static cache lies behind the keys: causal must be counted from the first key."""
    ours, theirs = pair(*DECODERS["llama"])
    results = []
    for model in (ours, theirs):
        cache = transformers.StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            results.append(model(IDS, past_key_values=cache).logits)
    close(*results)
    assert all(options["mask"] is None and options["causal"] for options in calls.options)


def test_a_window_without_a_mask() -> None:
    """Whoever calls a layer without a mask still gets its window."""
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    module = torch.nn.Module()
    out, weights = integration.attention_forward(module, q, k, v, None, sliding_window=3)
    band = torch.ones(9, 9, dtype=torch.bool).tril().triu(-2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band)
    close(out, expected.transpose(1, 2))
    assert weights is None and out.is_contiguous()


def test_an_additive_mask_of_four_axes() -> None:
    ours, theirs = pair(*DECODERS["llama"])
    mask = torch.randn(2, 1, 9, 9).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    agree((ours, theirs), None, input_ids=IDS, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: Any) -> None:
    ours, theirs = (model.to(dtype) for model in pair(*DECODERS["gpt_oss"]))
    with torch.no_grad():
        found, expected = (model(IDS, attention_mask=LEFT).logits[LEFT.bool()] for model in (ours, theirs))
    assert found.dtype == dtype
    assert (found.float() - expected.float()).abs().max() <= 0.05 * expected.float().abs().max()


# -- encoders ----------------------------------------------------------------------------------------------------------


def test_bert(calls: Calls) -> None:
    config = transformers.BertConfig(
        **{k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    models = pair(transformers.BertForMaskedLM, config)
    right = LEFT.flip(1)
    agree(models, None, input_ids=IDS)
    assert not any(options["causal"] or options["mask"] is not None for options in calls.options)
    agree(models, right, input_ids=IDS, attention_mask=right)


def test_vit(calls: Calls) -> None:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    agree(pair(transformers.ViTForImageClassification, config), None, pixel_values=torch.randn(2, 3, 8, 8))
    assert len(calls.options) == 2 and not any(options["causal"] for options in calls.options)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration, config


def test_t5(calls: Calls) -> None:
    models = pair(*t5())
    agree(models, None, input_ids=IDS, attention_mask=LEFT, decoder_input_ids=IDS[:, :5])
    assert sum(options["bias"] is not None for options in calls.options) >= 4, "encoder and decoder"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_t5_generate(cache: str) -> None:
    ours, theirs = pair(*t5())
    options = {
        "attention_mask": LEFT,
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    assert torch.equal(ours.generate(IDS, **options), theirs.generate(IDS, **options))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_dropout() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()
    module = torch.nn.Module()
    torch.manual_seed(1)
    found, _ = integration.attention_forward(module, q, k, v, None, dropout=0.4)
    torch.manual_seed(1)
    again, _ = integration.attention_forward(module, q, k, v, None, dropout=0.4)
    plain, _ = integration.attention_forward(module, q, k, v, None)
    assert torch.equal(found, again) and not torch.equal(found, plain)


def test_refusals() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    module = torch.nn.Module()
    with pytest.raises(aule.AuleError, match="continuous batching"):
        integration.attention_forward(module, q, k, v, None, cache=object())
    with pytest.raises(aule.AuleError, match=r"output_attentions=False, got True in Module; .*eager"):
        integration.attention_forward(module, q, k, v, None, output_attentions=True)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_weights_are_refused(name: str) -> None:
    """They would be missing from the output without an error."""
    ours, theirs = pair(*DECODERS[name])
    with pytest.raises(aule.AuleError, match=r"output_attentions=False, got True in \w+; .*eager"):
        ours(IDS, output_attentions=True)
    with pytest.raises(aule.AuleError, match="output_attentions"):
        ours.generate(IDS, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    ours.set_attn_implementation("eager")
    found, expected = ours(IDS, output_attentions=True), theirs(IDS, output_attentions=True)
    assert len(found.attentions) == 2
    close(found.attentions[1], expected.attentions[1])


# -- models with attention of their own --------------------------------------------------------------------------------


def bloom() -> Any:
    return transformers.BloomForCausalLM, transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)


def test_a_model_with_its_own_attention_is_refused() -> None:
    kind, config = bloom()
    expected = r"got BloomForCausalLM, which computes attention in code of its own; use attn_implementation='eager', or"
    with pytest.raises(aule.AuleError, match=expected + r" aule\.install\(\)"):
        kind._from_config(copy.deepcopy(config), attn_implementation="aule")

    class Mine(kind):  # type: ignore[misc, valid-type]
        """A user's subclass, in a module without attention layers."""

    with pytest.raises(aule.AuleError, match="got Mine, which computes"):
        Mine._from_config(copy.deepcopy(config), attn_implementation="aule")


def test_a_model_that_was_not_asked_gets_masks_that_are_right() -> None:
    """The implementation written into a configuration by hand: it was not checked."""
    kind, config = bloom()
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(IDS, attention_mask=LEFT).logits[LEFT.bool()]
        model.config._attn_implementation = "aule"
        found = model(IDS, attention_mask=LEFT).logits[LEFT.bool()]
    assert torch.equal(found, expected)


def test_masks_without_a_call_of_attention_are_an_error() -> None:
    """Attention that the check of the class does not recognise as such."""
    kind, config = DECODERS["llama"]
    model = kind._from_config(copy.deepcopy(config), attn_implementation="aule").eval()
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(aule.AuleError, match="LlamaModel, which built masks and called none"):
        model(IDS, attention_mask=LEFT)


def test_a_part_can_be_chosen() -> None:
    """A model of which one part has attention of its own."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SMALL).to_dict(),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
        ).to_dict(),
    )
    choice = {"text_config": "aule", "vision_config": "eager"}
    model = transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation=choice)
    assert model.config.text_config._attn_implementation == "aule"
    assert model.config.vision_config._attn_implementation == "eager"


def test_a_checked_model_is_copied_and_saved(tmp_path: Any) -> None:
    ours, _ = pair(*DECODERS["gpt_oss"])
    again = copy.deepcopy(ours)
    with torch.no_grad():
        close(again(IDS, attention_mask=LEFT).logits, ours(IDS, attention_mask=LEFT).logits)
    ours.config.save_pretrained(tmp_path)
    assert "aule" not in (tmp_path / "config.json").read_text()


def test_padding_is_not_lost() -> None:
    """What would happen without the registration of masks: the padding would change the result."""
    from transformers import AttentionMaskInterface

    assert "aule" in AttentionMaskInterface._global_mapping
    ours, _ = pair(*DECODERS["llama"])
    other = IDS.masked_fill(LEFT == 0, 7)
    with torch.no_grad():
        first, second = (ours(ids, attention_mask=LEFT).logits[LEFT.bool()] for ids in (IDS, other))
    close(first, second)
