"""vLLM: attention backend ``CUSTOM``, on the CPU in place of ``CPU_ATTN``, on CUDA beside vLLM's own.

vLLM finds `register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. Nothing changes
until a user chooses the backend: ``vllm serve --attention-backend CUSTOM`` or ``LLM(attention_backend="CUSTOM")``.

Supported: paged caches in any of vLLM's layouts, read in place; prefill and decoding in one batch; grouped heads,
sliding windows, softcap, ALiBi, sinks; prefix caching, chunked prefill, speculative decoding, tensor parallelism;
caches of fp8 (e4m3); encoder models and cross-attention. Anything else is refused when the model is loaded.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["register"]

_PATH = "aule.integrations._vllm_attention.AuleAttentionBackend"
log = logging.getLogger("aule")


def register() -> None:
    """Register aule as vLLM's attention backend ``CUSTOM``. Calling it again is harmless.

    Another plugin that has taken the name keeps it; ``VLLM_PLUGINS=aule`` loads aule's alone.
    """
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:  # this runs in every process of vLLM, also where nobody uses aule
        log.warning("vllm: aule is not available as an attention backend, which needs vLLM 0.32 or later: %s", error)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != _PATH:
        log.warning("vllm: %s is attention backend CUSTOM already; VLLM_PLUGINS=aule loads aule's", custom.get_path())
        return
    register_backend(custom, _PATH)
    if current_platform.is_cpu():
        _let_cpu_choose(type(current_platform), custom)


def _let_cpu_choose(platform: Any, custom: Any) -> None:
    """Let vLLM's CPU platform, which answers every request with ``CPU_ATTN``, return the backend that was chosen."""
    original = platform.get_attn_backend_cls.__func__
    if hasattr(original, "without_aule"):
        return

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kw: Any) -> str:
        if selected_backend is not custom:
            return str(original(cls, selected_backend, attn_selector_config, *args, **kw))
        wanted = attn_selector_config._asdict()
        reasons = custom.get_class().validate_configuration(device_capability=None, **wanted)
        if reasons:
            raise ValueError(
                f"[vllm] expected a model that aule's attention backend supports, got one with: {'; '.join(reasons)}; "
                "choose --attention-backend CPU_ATTN"
            )
        return str(custom.get_path())

    get_attn_backend_cls.without_aule = original  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
