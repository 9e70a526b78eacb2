"""Small random models in folders, for vLLM: no download. Weights are large enough that attention decides the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHARED: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 2048,
    "initializer_range": 0.12, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHARED},
    "mistral": {"model_type": "mistral", **SHARED, "sliding_window": 40},
    "gemma2": {
        "model_type": "gemma2", **SHARED, "sliding_window": 40, "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", **SHARED, "sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "bloom": {
        "model_type": "bloom", "hidden_size": 128, "n_layer": 3, "n_head": 4, "vocab_size": 1024, "seq_length": 2048,
        "initializer_range": 0.12, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
}  # fmt: skip


def write_model(folder: Path, name: str, **changes: Any) -> str:
    """Write the configuration and random weights of a model; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    given = MODELS[name] | changes
    config = AutoConfig.for_model(**given)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if name == "gpt_oss":
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks.data.normal_(1.0, 1.0)
    if name == "bloom":
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.12)
    model.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    stored.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(stored))
    return str(folder)


def requests(count: int = 64, vocabulary: int = 1024) -> list[list[int]]:
    """Prompts of 1 to 500 tokens; most share a beginning, for prefix caching."""
    import random

    draw = random.Random(11)
    shared = [draw.randrange(3, vocabulary) for _ in range(300)]
    prompts = []
    for _ in range(count):
        start = shared[: draw.choice((0, 130, 300))]
        prompts.append(start + [draw.randrange(3, vocabulary) for _ in range(draw.choice((1, 7, 40, 200)))])
    return prompts
