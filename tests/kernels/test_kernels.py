"""The kernel library: objects that build, emit and refuse without a device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from grid import view_of

import aule
from aule import codegen
from aule.artifact import Artifact
from aule.codegen import TARGETS, target_for
from aule.errors import BackendUnavailableError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ir import Builder, KernelIR
from aule.ir.interpret import interpret
from aule.ir.types import f32, i32
from aule.ir.verify import verify
from aule.kernels import (
    FLASH_DECODE_CHUNK_SIZE,
    AttentionKernel,
    BatchedIncrementalAttentionKernel,
    FlashDecodingChunkKernel,
    FlashDecodingReduceKernel,
    IncrementalAttentionKernel,
    MultiWarpIncrementalAttentionKernel,
    TileConfig,
    required_shared_memory,
    tuned_configs,
    validate_config,
)
from aule.kernels.tiles import BY_RULE
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.target import Target


def test_attributes_and_defaults() -> None:
    kernel = AttentionKernel(2048, 64)
    assert (kernel.seq_len, kernel.head_dim, kernel.num_heads, kernel.num_kv_heads, kernel.batch_size) == (
        2048,
        64,
        1,
        1,
        1,
    )
    assert kernel.scale == 1 / math.sqrt(64)
    assert not kernel.causal and not kernel.use_tensor_cores
    assert AttentionKernel(8, 16, num_heads=8).num_kv_heads == 8
    assert AttentionKernel(8, 16, num_heads=8, num_kv_heads=2).num_kv_heads == 2


def test_variants_are_copies() -> None:
    kernel = AttentionKernel(2048, 64, num_heads=4)
    causal = kernel.with_causal()
    assert (kernel.name, causal.name) == ("flash_attention", "flash_attention_causal")
    assert causal.with_causal(False) == kernel
    assert (causal.with_scale(0.5).scale, causal.scale) == (0.5, 0.125)
    tiled = kernel.with_tiles(32, 64)
    assert (tiled.tile_q, tiled.tile_kv) == (32, 64) and kernel.tiles is None
    assert tiled.with_causal().tile_kv == 64 and tiled.num_heads == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.scale = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("language", TARGETS)
@pytest.mark.parametrize("causal", [False, True])
def test_emits_every_language(language: str, causal: bool) -> None:
    kernel = AttentionKernel(512, 64).with_causal(causal)
    code = kernel.emit(language)
    raw = code if isinstance(code, bytes) else code.encode()
    assert isinstance(code, bytes) == (language == "spirv")
    for name in (kernel.name, "q_ptr", "k_ptr", "v_ptr", "o_ptr"):
        assert name.encode() in raw
    assert getattr(kernel, f"emit_{language}")() == code


@pytest.mark.parametrize("language", TARGETS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_emits_half_precision(language: str, dtype: str) -> None:
    artifact = AttentionKernel(128, 32, dtype=dtype).artifact(language)
    assert [p.dtype for p in artifact.buffers] == [dtype] * 4


def test_emits_for_a_given_target() -> None:
    hopper = tuned_configs["hopper"].target
    assert ".target sm_90" in AttentionKernel(512, 128).emit_ptx(hopper)
    with pytest.raises(InvalidArgumentError, match="expected a webgpu target for wgsl, got one of cuda"):
        AttentionKernel(512, 128).emit("wgsl", hopper)
    with pytest.raises(BackendUnavailableError, match="kernel language of ptx"):
        AttentionKernel(512, 128).emit("fortran")


GPU_LANGUAGES = [language for language in TARGETS if language != "llvm"]


@pytest.mark.parametrize("language", [None, *GPU_LANGUAGES])
@pytest.mark.parametrize("tiles", [None, (16, 32), (32, 32)])
def test_shared_memory_is_what_the_kernel_declares(language: str | None, tiles: tuple[int, int] | None) -> None:
    kernel = AttentionKernel(300, 72, tiles=tiles)
    built = kernel.build(language)
    assert isinstance(built, KernelIR)
    verify(built)
    need = kernel.config(language).shared_memory_bytes
    assert 0 < built.shared_bytes == need
    if language is None:
        assert kernel.shared_memory_bytes == need
    elif language != "spirv":
        assert kernel.artifact(language).shared_bytes == need


def test_the_cpu_has_no_shared_memory_and_no_tiles() -> None:
    kernel = AttentionKernel(300, 72)
    assert kernel.build("llvm").shared_bytes == 0
    assert kernel.plan("llvm").grid[0] > 0
    with pytest.raises(InvalidArgumentError, match="expected a GPU"):
        kernel.config("llvm")
    with pytest.raises(InvalidArgumentError, match="expected no tiles"):
        kernel.with_tiles(16, 32).build("llvm")


@pytest.mark.parametrize("tiles", [(8, 8), (16, 24), (40, 8), (32, 64), (64, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_chosen_tiles_compute_attention(tiles: tuple[int, int], causal: bool) -> None:
    """Tiles that the table does not have, run by the interpreter with all its checks."""
    batch, heads_q, heads_kv, seq, dim = 1, 2, 1, 37, 20
    kernel = AttentionKernel(seq, dim, num_heads=heads_q, num_kv_heads=heads_kv, causal=causal, tiles=tiles)
    target = target_for("ptx")
    plan = kernel.plan(target)
    assert (plan.config.shape.block_q, plan.config.shape.block_kv) == tiles
    rng = np.random.default_rng(0)
    q = rng.standard_normal((batch, heads_q, seq, dim)).astype(np.float32)
    k, v = rng.standard_normal((2, batch, heads_kv, seq, dim)).astype(np.float32)
    out = np.zeros_like(q)
    built = kernel.build(target)
    memory = {"q_ptr": q.ravel(), "k_ptr": k.ravel(), "v_ptr": v.ravel(), "o_ptr": out.reshape(-1)}
    arguments = [memory[p.name] if p.kind == "buffer" else plan.scalars[p.name] for p in built.params]
    interpret(built, plan.grid, arguments, subgroup_size=32)
    problem, _ = attention_problem(view_of(q), view_of(k), view_of(v), causal=causal)
    verdict = compare(problem, out, None, expect(problem, q, k, v))
    assert verdict, verdict.message


@pytest.mark.parametrize(
    ("q", "kv", "match"),
    [
        (7, 64, "multiple of 8, got 7; take 8"),
        (64, 0, "multiple of 8, got 0; take 8"),
        (-8, 64, "multiple of 8"),
        (256, 256, r"fit 232448 bytes .* need 262144; take smaller tiles"),
    ],
)
def test_impossible_tiles_are_refused_at_once(q: int, kv: int, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        AttentionKernel(2048, 64).with_tiles(q, kv)


def test_tiles_that_do_not_fit_a_target_are_refused_there() -> None:
    kernel = AttentionKernel(2048, 128).with_tiles(128, 64)
    assert kernel.emit("ptx")
    with pytest.raises(InvalidArgumentError, match=r"fit 16384 bytes of shared memory .* which need \d+; take smaller"):
        kernel.emit("wgsl")
    with pytest.raises(InvalidArgumentError, match=r"holds at most \d+ sums, got 256 x 64 .* take a smaller tile_q"):
        AttentionKernel(2048, 256).with_tiles(256, 64).emit("ptx")


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (InvalidShapeError, {"seq_len": 0}),
        (InvalidShapeError, {"head_dim": 0}),
        (InvalidShapeError, {"head_dim": 577}),
        (InvalidShapeError, {"num_heads": 6, "num_kv_heads": 4}),
        (InvalidShapeError, {"num_kv_heads": 0}),
        (InvalidShapeError, {"batch_size": 0}),
        (InvalidArgumentError, {"scale": math.nan}),
        (InvalidDtypeError, {"dtype": "f64"}),
    ],
)
def test_bad_arguments(error: type[Exception], arguments: dict[str, object]) -> None:
    with pytest.raises(error, match=r"\[AttentionKernel\] expected"):
        AttentionKernel(**{"seq_len": 64, "head_dim": 64, **arguments})  # type: ignore[arg-type]


def test_emitted_code_takes_other_lengths_than_its_example() -> None:
    """A call may use a kernel that relies on whole tiles (`ForwardConfig.full_tiles`); what is emitted may not."""
    nvidia = Target("vulkan", vendor="nvidia", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
                    max_shared_bytes=48 << 10)  # fmt: skip
    kernel = AttentionKernel(2048, 128)
    assert kernel.config(nvidia).shape.full_tiles
    assert {"k_row_stride", "v_row_stride"} <= {p.name for p in kernel.build(nvidia).params}


def test_large_arrays_get_wide_indices() -> None:
    assert not AttentionKernel(4096, 128).plan("ptx").config.index64
    assert AttentionKernel(65536, 128, num_heads=64, batch_size=8).plan("ptx").config.index64


# -- configurations --------------------------------------------------------------------------------------------------


def test_tuned_configs() -> None:
    assert list(tuned_configs) == ["ampere", "hopper", "rdna3", "apple", "fallback"]
    for name, config in tuned_configs.items():
        assert isinstance(config, TileConfig) and config.name == name
        assert 0 < required_shared_memory(config) <= config.target.max_shared_bytes
        assert config.threads <= config.target.max_threads
        assert config.origin == ("measured on NVIDIA H200 (docs/lab/simt.md)" if name == "hopper" else BY_RULE)
        validate_config(config, config.target)
    with pytest.raises(TypeError):
        tuned_configs["mine"] = tuned_configs["ampere"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        tuned_configs["ampere"].name = "mine"  # type: ignore[misc]


@pytest.mark.parametrize("head_dim", [1, 40, 64, 128, 192, 256])
@pytest.mark.parametrize("name", tuned_configs)
def test_tuned_configs_are_what_a_call_uses(name: str, head_dim: int) -> None:
    config = tuned_configs[name].for_head_dim(head_dim)
    kernel = AttentionKernel(1024, head_dim)
    assert kernel.plan(config.target).config.shape == config.shape
    assert required_shared_memory(config) == kernel.config(config.target).shared_memory_bytes


def test_validate_config_names_need_limit_and_remedy() -> None:
    config = tuned_configs["ampere"]
    need = required_shared_memory(config)
    validate_config(config, need)
    with pytest.raises(InvalidArgumentError, match=rf"at most {need - 1} bytes .* need of {need}; take smaller tiles"):
        validate_config(config, need - 1)
    with pytest.raises(InvalidArgumentError, match=r"at most 32 threads, got 128; take smaller tiles"):
        validate_config(config, Target("cuda", max_threads=32, max_shared_bytes=1 << 20))
    kernel = AttentionKernel(128, 64)
    validate_config(kernel, 16384)
    with pytest.raises(InvalidArgumentError):
        validate_config(kernel, 1024)


# -- a user's own kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", TARGETS)
def test_codegen_of_a_users_kernel(language: str) -> None:
    b = Builder("double", workgroup=64)
    source, out, n = b.buffer("source", f32), b.buffer("out", f32, "write"), b.scalar("n", i32)
    i = b.group_id() * 64 + b.thread_id()
    with b.if_(i < n):
        b.store(out, i, b.load(source, i) * 2.0)
    artifact = codegen.generate(b.finish(), language)
    assert isinstance(artifact, Artifact)
    assert artifact.entry.startswith("double")  # a keyword of some languages gets an underscore
    assert artifact.workgroup == 64
    assert [p.name for p in artifact.params] == ["source", "out", "n"]


DECODING = {
    "incremental_attention": IncrementalAttentionKernel(2048, 64, 8, 2, dtype="bf16"),
    "multi_warp_incremental_attention": MultiWarpIncrementalAttentionKernel(2048, 64, 8, 8, 4),
    "batched_incremental_attention": BatchedIncrementalAttentionKernel(4096, 128, 32, 8, 8),
    "flash_decoding_chunk": FlashDecodingChunkKernel(8192, 128, 32, 8, 8),
    "flash_decoding_reduce": FlashDecodingReduceKernel(128, 32, 8, num_chunks=16),
}


@pytest.mark.parametrize("name", DECODING)
def test_decoding_kernels_emit_every_language(name: str) -> None:
    kernel = DECODING[name]
    assert kernel.name == name
    for language in codegen.TARGETS:
        artifact = kernel.artifact(language)
        assert artifact.entry == name and artifact.code
        buffers = {p.name for p in artifact.buffers}
        wanted = {"part_ptr", "part_lse_ptr"} if name.startswith("flash") else {"q_ptr", "k_ptr", "v_ptr", "o_ptr"}
        assert wanted <= buffers
        if name == "incremental_attention":
            assert artifact.shared_bytes == 0
    assert (kernel.shared_memory_bytes == 0) == (name == "incremental_attention")
    assert kernel.shared_memory_bytes == kernel.artifact("ptx").shared_bytes


def test_a_decoding_kernel_decodes() -> None:
    """The objects' kernels, interpreted: one subgroup, and parts that are added up."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, n, 16)).astype(np.float32) for heads, n in ((4, 1), (2, 1200), (2, 1200)))
    lens = np.array([1200, 77], np.int32)
    wanted = aule.decode_attention(q, k, v, context_lens=lens, scale=0.5, backend="numpy")
    one = IncrementalAttentionKernel(1200, 16, 4, 2, batch_size=2).with_scale(0.5)
    assert one.is_gqa and one.scale == 0.5 and FlashDecodingChunkKernel(1, 1).chunk_size == FLASH_DECODE_CHUNK_SIZE
    chunk = FlashDecodingChunkKernel(1200, 16, 4, 2, 2, scale=0.5)
    reduce = FlashDecodingReduceKernel(16, 4, 2, num_chunks=chunk.num_chunks)
    for steps in ((one,), (chunk, reduce)):
        out = np.zeros_like(q)
        parts = np.full((2, 4, 3, 16), np.nan, np.float32)
        memory = {"q": q, "k": k, "v": v, "lens": lens, "o": out, "part": parts, "part_lse": parts[..., 0].copy()}
        for kernel in steps:
            plan, ir = kernel.plan(), kernel.build()
            values = {f"{name}_ptr": array for name, array in memory.items()} | dict(plan.scalars)
            interpret(ir, plan.grid, [values[p.name] for p in ir.params])
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-6)


def test_decoding_kernels_refuse() -> None:
    for change, error in (
        ({"head_dim": 577}, InvalidShapeError),
        ({"max_seq_len": 0}, InvalidShapeError),
        ({"num_heads": 3, "num_kv_heads": 2}, InvalidShapeError),
        ({"dtype": "f64"}, InvalidDtypeError),
        ({"scale": math.inf}, InvalidArgumentError),
    ):
        with pytest.raises(error, match=r"\[IncrementalAttentionKernel\] expected"):
            IncrementalAttentionKernel(**({"max_seq_len": 8, "head_dim": 8} | change))
    with pytest.raises(InvalidArgumentError, match="take fewer warps"):
        MultiWarpIncrementalAttentionKernel(64, 64, 8, 8, 64).build("ptx")
    with pytest.raises(InvalidShapeError, match="num_chunks >= 2"):
        FlashDecodingReduceKernel(64, num_chunks=1)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4", None, True])
def test_sizes_of_decoding_kernels(wrong: Any) -> None:
    for make in (
        lambda: IncrementalAttentionKernel(wrong, 16),
        lambda: FlashDecodingChunkKernel(64, 16, chunk_size=wrong),
        lambda: MultiWarpIncrementalAttentionKernel(64, 16, num_warps_per_head=wrong),
        lambda: FlashDecodingReduceKernel(16, num_chunks=wrong),
        lambda: AttentionKernel(wrong, 16),
    ):
        with pytest.raises(InvalidShapeError, match=" >= 1, got "):
            make()


def test_a_scale_that_is_no_number_is_not_the_default() -> None:
    kernel = IncrementalAttentionKernel(64, 16)
    assert kernel.scale == IncrementalAttentionKernel(64, 16, scale=None).scale == 0.25
    with pytest.raises(InvalidArgumentError, match="finite scale, got nan"):
        kernel.with_scale(float("nan"))
