"""Any value for any argument of a public function gives a result or an aule error that says what was wrong; the library
stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aule

try:
    import torch
except ImportError:
    torch = None

Array = np.ndarray[Any, Any]
KINDS: dict[str, Callable[[Array], Any]] = {"numpy": lambda x: x}
if torch is not None:
    KINDS["torch"] = torch.from_numpy


def anything() -> dict[str, Any]:
    values = {
        "none": None, "text": "x", "negative": -1, "huge": 2**70, "number": 1.5, "nan": float("nan"), "list": [],
        "lists": [[1], [2, 3]], "object": object(), "vector": np.ones(3, np.float32), "nothing": np.ones(0, np.float32),
        "bool": True, "pair": (1, 2), "dictionary": {}, "complex": 1j, "bytes": np.ones((2, 2), np.int8),
        "double": np.ones((2, 4, 8, 16)), "beyond floats": 10**400, "beyond float32": 1e60,
    }  # fmt: skip
    if torch is not None:
        values |= {"tensor": torch.ones(3), "elsewhere": torch.ones(2, 4, 8, 16, device="meta")}
        values["sparse"] = torch.eye(3).to_sparse()
    return values


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def ints(*numbers: Any) -> Array:
    return np.array(numbers, np.int32)


QKV = {"q": ones(2, 4, 8, 16), "k": ones(2, 4, 8, 16), "v": ones(2, 4, 8, 16)}
PACKED = {name: ones(8, 4, 16) for name in "qkv"} | {"cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 3, 8)}
TABLES = {"block_tables": ints([7, 3, 12], [7, 0, 0]), "context_lens": ints(41, 29)}
PAGED = {"q": ones(2, 8, 64), "k_cache": ones(16, 16, 2, 64), "v_cache": ones(16, 16, 2, 64)} | TABLES
NORMED = {"x": ones(4, 64), "weight": ones(64)}
SCORES = "causal scale window softcap alibi_slopes sinks return_lse out backend"
ATTENTION = f"{SCORES} rope rope_interleaved dropout_p seed causal_align deterministic mask bias"
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "flash_attention": (QKV, f"{ATTENTION} precision"),
    "flash_attention_varlen": (PACKED, f"{ATTENTION} max_seqlen_q max_seqlen_k"),
    "flash_attention_paged": (PAGED, f"{SCORES} cu_seqlens_q max_seqlen_q k_scale v_scale layout"),
    "decode_attention": (
        {"q": ones(2, 8, 64), "k": ones(2, 2, 9, 64), "v": ones(2, 2, 9, 64)}, f"{SCORES} context_lens",
    ),
    "cascade_attention": ({**PAGED, "shared_pages": 1}, "sinks cu_seqlens_q max_seqlen_q causal return_lse"),
    "merge_states": ({"o_a": ones(2, 8, 64), "lse_a": ones(2, 8), "o_b": ones(2, 8, 64), "lse_b": ones(2, 8)}, ""),
    "attention": (QKV, "context causal softmax_scale input_precision intermediate_precision output_precision"),
    "rms_norm": (NORMED, "eps backend"),
    "layer_norm": ({**NORMED, "bias": ones(64)}, "eps backend"),
    "residual_rms_norm": ({**NORMED, "residual": ones(4, 64)}, "eps backend"),
    "residual_layer_norm": ({**NORMED, "residual": ones(4, 64), "bias": ones(64)}, "eps backend"),
    "rms_norm_rope": (
        {"x": ones(1, 2, 8, 16), "weight": ones(16), "cos": ones(8, 8), "sin": ones(8, 8)},
        "eps interleaved position_ids rotary_dim backend",
    ),
    "swiglu": ({"gate": ones(4, 8), "up": ones(4, 8)}, "backend"),
    "precompute_rope_frequencies": ({"seq_len": 4, "head_dim": 8}, "base device dtype"),
    "layer_norm_linear": (
        {"x": ones(4, 64), "weight_norm": ones(64), "bias_norm": ones(64), "weight": ones(8, 64), "bias": ones(8)},
        "eps",
    ),
    "rope": (
        {"x": ones(1, 2, 8, 16), "cos": ones(8, 8), "sin": ones(8, 8)}, "interleaved position_ids rotary_dim backend",
    ),
    "geglu": ({"gate": ones(4, 8), "up": ones(4, 8)}, "approximate"),
    "softmax_dropout": ({"x": ones(4, 8)}, "dropout_p seed mask causal scale"),
    "cross_entropy": ({"logits": ones(4, 8), "target": ints(0, 1, 2, 3)}, "ignore_index label_smoothing reduction"),
    "KVCache": (
        {"num_pages": 4, "heads_kv": 2, "head_dim": 16},
        "page_size dtype layers value_dim layout quantize device backend",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", CALLS)
def test_any_argument(function: str, kind: str) -> None:
    good, options = CALLS[function]
    given = {name: KINDS[kind](x) if isinstance(x, np.ndarray) else x for name, x in good.items()}
    check(getattr(aule, function), given, options)


HEADS_LAST = {name: ones(2, 8, 4, 16) for name in "qkv"}
CACHED = {"q": ones(2, 1, 4, 16), "k": ones(2, 1, 2, 16), "v": ones(2, 1, 2, 16), "cache_seqlens": ints(3, 4)}
ROWS = {"k_cache": ones(2, 8, 2, 16), "v_cache": ones(2, 8, 2, 16), "cache_batch_idx": ints(1, 0)}
ANGLES = {"rotary_cos": ones(9, 8), "rotary_sin": ones(9, 8)}
PAGES = {"k_cache": ones(8, 4, 2, 16), "v_cache": ones(8, 4, 2, 16), "block_table": ints([0, 1], [2, 3])}
IN_PAGES = {"k": ones(8, 4, 2, 16), "v": ones(8, 4, 2, 16), "block_table": ints([0, 1], [2, 3])}
SOFTMAX = "softmax_scale causal window_size softcap alibi_slopes"
FLASH_ATTN: dict[str, tuple[str, dict[str, Any], str]] = {
    "func": ("flash_attn_func", HEADS_LAST, f"{SOFTMAX} dropout_p deterministic return_attn_probs"),
    "packed": ("flash_attn_varlen_func", {**PACKED, "max_seqlen_q": 5, "max_seqlen_k": 5}, f"{SOFTMAX} dropout_p"),
    "packed, in pages": (
        "flash_attn_varlen_func", {**PACKED, **IN_PAGES, "max_seqlen_q": 5, "max_seqlen_k": 5}, f"{SOFTMAX} dropout_p",
    ),
    "cache": (
        "flash_attn_with_kvcache", {**CACHED, **ROWS, **ANGLES},
        f"{SOFTMAX} cache_leftpad rotary_interleaved num_splits return_softmax_lse",
    ),
    "cache in pages": ("flash_attn_with_kvcache", {**CACHED, **PAGES}, "cache_leftpad cache_batch_idx"),
}  # fmt: skip


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
@pytest.mark.parametrize("name", FLASH_ATTN)
def test_any_argument_of_flash_attn(name: str) -> None:
    from aule.integrations import flash_attn

    function, good, options = FLASH_ATTN[name]
    given = {name: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for name, x in good.items()}
    check(getattr(flash_attn, function), given, options)


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
def test_any_argument_of_pytorchs_function() -> None:
    given = dict(zip(("query", "key", "value"), (torch.ones(2, 4, 8, 16) for _ in range(3)), strict=True))
    check(aule.scaled_dot_product_attention, given, "attn_mask dropout_p is_causal scale enable_gqa")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["append", "attend", "fork", "free", "truncate", "length", "block_tables"])
def test_any_argument_of_a_cache(method: str, kind: str) -> None:
    """And what is in it stays."""
    angles = (KINDS[kind](ones(9, 8)), KINDS[kind](ones(9, 8)))
    new = {"k": KINDS[kind](ones(2, 2, 16)), "v": KINDS[kind](ones(2, 2, 16)), "rope": angles}
    good: dict[str, Any] = {
        "append": {"seqs": 0, **new, "layer": 0, "lengths": [2], "interleaved": False},
        "attend": {"q": KINDS[kind](ones(1, 4, 2, 16)), "seqs": [0], "layer": 0, "rope": angles, "cascade": False},
        "truncate": {"seq": 0, "length": 2},
        "length": {"seq": 0, "layer": 0},
        "block_tables": {"seqs": [0]},
    }.get(method, {"seq": 0})

    def call(**given: Any) -> None:
        cache = aule.KVCache(8, 2, 16, page_size=4, device=None if kind == "numpy" else "cpu")
        seq = cache.allocate()
        cache.append(seq, KINDS[kind](2 * ones(5, 2, 16)), KINDS[kind](2 * ones(5, 2, 16)))
        try:
            getattr(cache, method)(**given)
        except BaseException:
            kept = cache.pool().k[cache.block_tables(seq)[0].tolist()].reshape(-1, 2, 16)[:5]
            assert (cache.sequences, cache.length(seq), cache.pages_in_use) == ((seq,), 5, 2) and bool(
                (kept == 2).all()
            )
            raise

    check(call, good, "return_lse window out" if method == "attend" else "")


def check(call: Callable[..., Any], given: dict[str, Any], options: str) -> None:
    call(**given)
    wrong = []
    for name in (*given, *options.split()):
        for what, value in anything().items():
            try:
                call(**{**given, name: value})
            except aule.AuleError as error:
                if " expected " not in error.message:
                    wrong.append(f"{name}={what}: {error.message}")
            except Exception as error:
                wrong.append(f"{name}={what}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    call(**given)


KERNELS: dict[str, tuple[dict[str, Any], str]] = {
    "AttentionKernel": ({"seq_len": 256, "head_dim": 64}, "num_heads num_kv_heads scale causal dtype tiles"),
    "IncrementalAttentionKernel": (
        {"max_seq_len": 256, "head_dim": 64},
        "num_heads num_kv_heads batch_size scale dtype",
    ),
    "FlashDecodingReduceKernel": ({"head_dim": 64}, "num_heads batch_size num_chunks dtype"),
    "SoftmaxDropoutKernel": ({"rows": 8, "length": 64}, "dtype dropout_p causal"),
    "SwiGLUKernel": ({"rows": 8, "length": 64}, "dtype"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_any_argument_of_a_kernel(name: str) -> None:
    good, options = KERNELS[name]
    kind = getattr(aule.kernels, name)
    check(lambda **given: kind(**given).build(), good, options)
    kernel = kind(**good)
    check(kernel.emit, {"language": "ptx"}, "")
    check(lambda **given: aule.codegen.generate(**given), {"kernel": kernel.build("ptx"), "target": "ptx"}, "")


def test_any_argument_of_shared_memory() -> None:
    given = {"config": aule.kernels.AttentionKernel(256, 64), "limit": 1 << 20}
    check(aule.kernels.validate_config, given, "")
