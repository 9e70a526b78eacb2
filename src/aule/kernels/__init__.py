"""The kernel library: kernels as objects, to inspect and compile without a device.

>>> from aule.kernels import AttentionKernel
>>> kernel = AttentionKernel(2048, 64).with_causal()
>>> kernel.name
'flash_attention_causal'
>>> ptx = kernel.emit("ptx")
"""

from __future__ import annotations

from aule.kernels.attention import AttentionKernel
from aule.kernels.decode import (
    FLASH_DECODE_CHUNK_SIZE,
    BatchedIncrementalAttentionKernel,
    FlashDecodingChunkKernel,
    FlashDecodingReduceKernel,
    IncrementalAttentionKernel,
    MultiWarpIncrementalAttentionKernel,
)
from aule.kernels.fused import (
    FusedKernel,
    GeGLUKernel,
    LayerNormLinearKernel,
    ResidualLayerNormKernel,
    RMSNormRoPEKernel,
    SoftmaxDropoutKernel,
    SwiGLUKernel,
)
from aule.kernels.tiles import TileConfig, required_shared_memory, tuned_configs, validate_config

__all__ = [
    "FLASH_DECODE_CHUNK_SIZE",
    "AttentionKernel",
    "BatchedIncrementalAttentionKernel",
    "FlashDecodingChunkKernel",
    "FlashDecodingReduceKernel",
    "FusedKernel",
    "GeGLUKernel",
    "IncrementalAttentionKernel",
    "LayerNormLinearKernel",
    "MultiWarpIncrementalAttentionKernel",
    "RMSNormRoPEKernel",
    "ResidualLayerNormKernel",
    "SoftmaxDropoutKernel",
    "SwiGLUKernel",
    "TileConfig",
    "required_shared_memory",
    "tuned_configs",
    "validate_config",
]
