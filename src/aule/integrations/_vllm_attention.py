"""aule's attention backend as vLLM's classes: backend, metadata of a step, its builder, and the layer's implementation.

vLLM imports this file when a user chooses the backend, so an unsuitable version of vLLM fails here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from aule.errors import AuleError
from aule.frontends.torch.modes import called_by
from aule.integrations import _vllm_pages as pages
from aule.ops.attention.checks import MAX_HEAD_DIM
from aule.ops.decode.validate import MAX_PAGE

_ENCODER = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_FP8 = ("fp8", "fp8_e4m3")
_SAME_DTYPE = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def _refuse(expected: str, got: object, remedy: str) -> AuleError:
    return AuleError("AULE_ERROR_UNSUPPORTED", f"[{pages.OP}] expected {expected}, got {got}; {remedy}")


class AuleAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What aule's backend can do, in vLLM's terms."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *_SAME_DTYPE, *_FP8]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM has reserved for backends like this one."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AuleAttentionImpl]:
        """Return the class of a layer's implementation."""
        return AuleAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AuleMetadataBuilder]:
        """Return the class that builds a step's metadata."""
        return AuleMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Return the block sizes; vLLM splits larger blocks."""
        return list(range(16, MAX_PAGE + 1, 16))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether aule has kernels for a head dimension."""
        return 0 < head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """Return whether attention sinks are supported."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return whether sliding windows are supported."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return whether a decoder may attend in both directions."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return whether a kind of attention is supported: decoder, encoder and cross-attention are."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODER)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return whether query lengths on the device may differ from those on the host, by which aule plans."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return why a combination of options is not supported; None if it is."""
        if kv_cache_dtype in _SAME_DTYPE and _SAME_DTYPE[kv_cache_dtype] is not dtype:
            return f"a cache of {kv_cache_dtype} needs a model of {kv_cache_dtype}, got {dtype}"
        return None


@dataclass
class AuleMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step's batch, and the slots of its new tokens."""

    batch: pages.Batch
    slot_mapping: torch.Tensor


class AuleMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the metadata that all layers of a group share in a step."""

    _cudagraph_support = AttentionCGSupport.NEVER  # vLLM captures what is between attention layers

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AuleMetadata:
        """Build the metadata of a step."""
        given = common_attn_metadata
        if isinstance(given.causal, torch.Tensor):
            raise _refuse("one direction for all sequences", "a causal flag for each", "use another attention backend")
        n = given.num_reqs
        batch = pages.make_batch(
            given.query_start_loc[: n + 1],
            given.query_start_loc_cpu[: n + 1],
            given.seq_lens[:n],
            given.block_table_tensor[:n],
            bool(given.causal),
        )
        return AuleMetadata(batch, given.slot_mapping)


class AuleAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """A layer's attention. The parameters are vLLM's."""

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._scoring = pages.Scoring(self.scale, logits_soft_cap or None, sliding_window, slopes)
        self._ready: pages.Scoring | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take sinks that were loaded again."""
        self._ready = None

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write new keys and values into the cache."""
        if self.attn_type not in _ENCODER:
            scales = layer._k_scale_float, layer._v_scale_float
            pages.store(kv_cache, key, value, slot_mapping, scales)

    @called_by("vllm")
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AuleMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of a step's tokens into ``output`` and return it."""
        if output_scale is not None or output_block_scale is not None:
            raise _refuse("results in the model's dtype", "a scale to quantise them", "disable fused quantisation")
        if attn_metadata is None:  # vLLM measures memory
            return output
        batch, scoring = attn_metadata.batch, self._on_device(query)
        if self.attn_type in _ENCODER:
            pages.attend_without_cache(query, key, value, batch, scoring, output)
        else:
            cache = pages.layer_cache(kv_cache, self.head_size)
            scales = layer._k_scale_float, layer._v_scale_float
            pages.attend(query, cache, batch, scoring, output, scales)
        return output

    def _on_device(self, query: torch.Tensor) -> pages.Scoring:
        """Return the options with slopes and sinks, whose values are loaded by now, as float32 on the device."""
        if self._ready is None:
            given = self._scoring
            slopes, sinks = (
                None if x is None else x.detach().to(query.device, torch.float32)
                for x in (given.alibi_slopes, self.sinks)
            )
            self._ready = pages.Scoring(given.scale, given.softcap, given.window, slopes, sinks)
        return self._ready
