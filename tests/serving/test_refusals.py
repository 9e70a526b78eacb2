"""What aule's backend says to vLLM when a model is loaded: what it serves, and why it refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "MLA": ({"use_mla": True, "head_size": 576}, "MLA not supported"),
    "sparse": ({"use_sparse": True}, "sparse not supported"),
    "image tokens": ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
    "scales of heads": ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
    "batch invariance": ({"use_batch_invariant": True}, "batch invariance not supported"),
    "decode context parallelism": ({"use_dcp": True}, "DCP not supported"),
    "prefill context parallelism": ({"use_pcp": True}, "PCP not supported"),
    "adaptive verification": ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
    "R-SWA": ({"use_rswa": True}, "R-SWA not supported"),
    "head size": ({"head_size": 1024}, "head_size not supported"),
    "e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
    "int8": ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported"),
    "another dtype": ({"kv_cache_dtype": "bfloat16"}, "a cache of bfloat16 needs a model of bfloat16"),
    "block size": ({"block_size": 24}, "block_size not supported"),
}
SERVED: tuple[dict[str, Any], ...] = (
    {}, {"has_sink": True, "has_sliding_window": True}, {"use_non_causal": True}, {"attn_type": "encoder_only"},
    {"attn_type": "encoder_decoder"}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"block_size": 512},
    {"head_size": 256},
)  # fmt: skip


def chosen(**changes: Any) -> str:
    """The class that vLLM's CPU platform takes for ``CUSTOM``."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from aule.integrations import vllm

    vllm.register()
    given = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16} | changes
    return str(current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, AttentionSelectorConfig(**given)))


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused(name: str) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"expected a model that aule's attention backend supports.*{reason}"):
        chosen(**changes)


@pytest.mark.parametrize("changes", SERVED, ids=str)
def test_supported_models_are_served(changes: dict[str, Any]) -> None:
    assert chosen(**changes).endswith("AuleAttentionBackend")
