"""The problems for which `kernel_hashes.py` renders kernels: an op, its shapes and dtypes, and its options, as words.

`problems` lists them for a target. Every target has all of the first list of an op. One target has all of the second,
long list, the others a share, chosen by name alone, so that a new problem moves no other.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

_SHARE = {"h200-cuda": 1, "h200-vulkan": 3, "cpu-avx512": 4, "cpu-bf16": 6, "sm80-cuda": 8, "rdna3-vulkan": 12}
_USUAL_SHARE = 24
"""One in so many problems of the second lists belongs to a target."""


@dataclass(frozen=True)
class Problem:
    """A call of an op, in words.

    Attributes
    ----------
    kind : str
        ``attention``, ``decode``, ``rows``, ``append``, ``copy`` or ``object``; `kernel_hashes.py` has an adapter for
        each.
    op : str
        The op, or the direction of attention.
    sizes : str
        dtype and lengths, such as ``bf16 b2 h8x2 q512 k1024 d64`` or ``f32 37x1000``.
    options : str
        Everything else, separated by spaces.
    """

    kind: str
    op: str
    sizes: str
    options: str = ""

    def name(self, target: str) -> str:
        """The problem's name in the list of hashes."""
        words = [*self.sizes.split(), *self.options.split()]
        return f"{self.kind}/{self.op}/{target}/{'-'.join(words)}"

    @property
    def dtype(self) -> str:
        """Element type of the main operand."""
        return self.sizes.split()[0]

    @property
    def flags(self) -> frozenset[str]:
        """The options."""
        return frozenset(self.options.split())

    def numbers(self, letter: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths behind a letter: ``h8x2`` is (8, 2) for ``h``."""
        found = re.search(rf"(?:^| ){letter}(\d+(?:x\d+)*)(?= |$)", self.sizes)
        return tuple(map(int, found[1].split("x"))) if found else default


def problems(target: str) -> list[Problem]:
    """All problems of a target, each once."""
    cpu = target.startswith("cpu")
    found = dict.fromkeys((*_first(), *_second(target, cpu), *_special(target, cpu)))
    return [problem for problem in found if not _left_out(problem, target)]


def all_of_cpus() -> list[Problem]:
    """All problems of both lists that a CPU has kernels for."""
    lists = (_first(), _more_attention(), _more_decode(), _more_rows(), _float64(), _special("cpu-avx512", True))
    found = dict.fromkeys(problem for some in lists for problem in some)
    return [problem for problem in found if not _left_out(problem, "cpu")]


def _second(target: str, cpu: bool) -> Iterator[Problem]:
    share = _SHARE.get(target, _USUAL_SHARE)
    for problem in (*_more_attention(), *_more_decode(), *_more_rows()):
        if zlib.crc32(problem.name(target).encode()) % share == 0:
            yield problem
    if cpu:
        yield from _float64()


def _special(target: str, cpu: bool) -> Iterator[Problem]:
    """Problems of kernels that the shares of a second list would miss."""
    if target == "h200-vulkan":
        yield from (problem for problem in _more_decode() if problem.dtype != "f32")
        for op, sizes in product(("layer_norm", "residual_layer_norm"), ("2048x16384", "64x16384", "4096x4096")):
            yield from _both(op, f"bf16 {sizes}")
        yield Problem("attention", "forward", "bf16 b2 h16x16 q2048 k2048 d64", "")
        yield Problem("attention", "backward", "bf16 b2 h16x16 q2048 k2048 d64", "")
    if cpu:
        for sizes, options in (("f32 b1 h2x2 q4 k20000 d64", "lse"), ("bf16 b1 h4x2 q2 k9000 d80", "columns")):
            yield Problem("attention", "forward", sizes, options)
        for op in ("swiglu", "softmax_dropout", "cross_entropy"):
            yield from _both(op, "f32 2000x4096")
    if target in ("h200-cuda", "cpu-avx512"):  # indices of 64 bits
        for op in ("rms_norm", "softmax_dropout", "swiglu", "cross_entropy"):
            yield from _both(op, "bf16 2000000x2048")
        yield from _both("rope", "bf16 64x32x16384x128")
        yield from _both("layer_norm_linear", "bf16 1100000x2048x64")
        yield Problem("append", "kvcache", "bf16 b4 h8 t300 d128", "large rope")
        yield Problem("copy", "kvcache", "bf16 n7 e33554432 l4")
    if target == "h200-cuda":  # latents over warpgroups
        yield Problem("decode", "decode", "bf16 b32 h128x1 n4096 d576x512", "page64 latent")
        yield Problem("decode", "decode", "f16 b3 h64x1 n1000 d576x512 t2", "page3 latent lse")
    if target in ("h200-cuda", "sm80-cuda", "rdna3-vulkan"):
        yield Problem("decode", "decode", "f32 b70000 h8x8 n64 d64", "")
    if target in ("h200-cuda", "rdna3-vulkan", "cpu-avx512"):
        for direction, options in product(("forward", "backward"), ("rope-columns", "rope-f16", "mask-odd")):
            yield Problem("attention", direction, "f16 b1 h4x4 q512 k512 d64", options)
        yield Problem("attention", "forward", "f16 b4 h16x16 q1024 k1024 d64", "mask-odd")


def _left_out(problem: Problem, target: str) -> bool:
    """Problems of matrix units alone, those of caches that are longer than a buffer of Vulkan can be, and others that a
    target has no kernel for."""
    if problem.kind == "decode" and "vulkan" in target:
        (batch,), (_, heads), (keys,), (dim, *_) = (problem.numbers(letter, (1, 1)) for letter in "bhnd")
        return batch * heads * keys * dim >= 1 << 31
    units = not target.startswith(("cpu", "lavapipe", "pocl", "portable")) and not target.endswith(("opencl", "webgpu"))
    if "tile-fragment" in problem.flags or any(flag.startswith("precision") for flag in problem.flags):
        return not units
    return "tile-simt" in problem.flags and target.startswith("cpu")


def _first() -> Iterator[Problem]:
    yield from _attention()
    yield from _decode()
    yield from _rows()
    yield from _cache()


# -- attention ---------------------------------------------------------------------------------------------------------

_EVERYTHING = "causal window softcap mask-bool bias alibi sinks lse"


def _attention() -> Iterator[Problem]:
    forward = (
        ("f32 b2 h8x8 q512 k512 d64", ""),
        ("f32 b1 h4x4 q300 k300 d40", "causal lse"),
        ("f16 b2 h8x8 q1024 k1024 d64", "causal"),
        ("f16 b1 h4x2 q256 k256 d96", _EVERYTHING),
        ("bf16 b1 h16x4 q2048 k2048 d128", ""),
        ("bf16 b2 h8x2 q130 k517 d80", "causal window lse"),
        ("bf16 b1 h4x4 q200 k200 d64", "rope causal"),
        ("bf16 b3 h4x4 q256 k256 d64", "packed causal"),
        ("f16 b1 h4x4 q192 k192 d64", "dropout mask-add"),
    )
    backward = (
        ("f32 b1 h4x4 q256 k256 d64", ""),
        ("f16 b1 h4x2 q256 k256 d64", "causal"),
        ("bf16 b1 h4x4 q512 k512 d128", "deterministic"),
        ("bf16 b2 h4x2 q192 k192 d64", "causal window softcap mask-bool bias alibi sinks"),
    )
    for sizes, options in forward:
        yield Problem("attention", "forward", sizes, options)
    for sizes, options in backward:
        yield Problem("attention", "backward", sizes, options)


def _more_attention() -> Iterator[Problem]:
    dims = ("d32", "d64", "d96", "d128", "d192", "d256", "d33", "d72", "d64x128", "d192x128", "d16x200")
    for dtype, dim in product(("f32", "f16", "bf16"), dims):
        yield Problem("attention", "forward", f"{dtype} b2 h4x4 q512 k512 {dim}", "" if dtype == "f16" else "causal")
    options = (
        "window", "window-left", "softcap", "mask-bool", "mask-full", "mask-add", "mask-keys", "bias", "bias-f32",
        "alibi", "alibi-batch causal", "sinks", "dropout", "rope", "rope-interleaved", "rope-part", "rope-batch",
        "lse", "causal top-left", "bshd", "columns", "odd", "base", "packed", "packed alibi-batch softcap lse",
        "packed rope", "mask-bool softcap causal", "dropout alibi causal lse", "bias sinks", _EVERYTHING,
    )  # fmt: skip
    for dtype, option in product(("f32", "f16", "bf16"), options):
        dim = {"f32": "d64", "f16": "d64", "bf16": "d128"}[dtype]
        yield Problem("attention", "forward", f"{dtype} b2 h4x2 q320 k320 {dim}", option)
    shapes = (
        "b1 h32x32 q4096 k4096 d128", "b1 h8x8 q8192 k8192 d64", "b2 h16x16 q2048 k2048 d64", "b1 h8x1 q1 k4096 d128",
        "b2 h8x8 q7 k1000 d64", "b1 h2x2 q16 k16 d64", "b4 h16x16 q1024 k1024 d256", "b1 h64x8 q16384 k16384 d128",
        "b1 h3x3 q64 k2000 d80", "b2 h8x8 q2000 k64 d64",
    )  # fmt: skip
    for dtype, shape, option in product(("f32", "bf16"), shapes, ("", "causal")):
        yield Problem("attention", "forward", f"{dtype} {shape}", option)
    yield Problem("attention", "forward", "bf16 b4 h16x16 q1024 k1024 d64", "mask-full")
    yield Problem("attention", "forward", "bf16 b4 h16x16 q1024 k1024 d128", "mask-bool causal")
    yield Problem("attention", "forward", "f16 b4 h16x16 q1024 k1024 d64", "mask-add")
    yield Problem("attention", "forward", "bf16 b512 h64x64 q2048 k2048 d128", "")  # indices of 64 bits
    yield Problem("attention", "forward", "f32 b512 h64x64 q2048 k2048 d64", "causal")
    for name, dim in product(("fp16", "bf16", "tf32"), ("d64", "d128", "d40")):
        yield Problem("attention", "forward", f"f32 b1 h4x4 q512 k512 {dim}", f"precision-{name}")
    yield Problem("attention", "forward", "f32 b1 h4x4 q512 k512 d64", "precision-tf32 causal mask-bool odd")
    for dtype, option in product(("f16", "bf16"), ("", "causal", "mask-bool")):
        yield Problem("attention", "forward", f"{dtype} b1 h4x4 q512 k512 d64", f"tile-fragment {option}")
    for option in ("", "causal", "mask-bool"):
        yield Problem("attention", "forward", "f32 b1 h4x4 q512 k512 d64", f"tile-simt {option}")

    for dtype, dim in product(("f32", "f16", "bf16"), dims[:6] + dims[7:9]):
        yield Problem("attention", "backward", f"{dtype} b2 h4x4 q384 k384 {dim}", "causal")
    options = (
        "", "window", "softcap", "mask-bool", "mask-add", "bias", "bias ds", "mask-add ds deterministic", "alibi",
        "sinks", "dropout", "rope", "rope-interleaved", "bshd", "odd", "columns", "base", "packed causal",
        "packed rope", "deterministic", "deterministic causal rope", "deterministic softcap dropout",
        "causal top-left", "causal window softcap mask-bool bias alibi sinks dropout",
    )  # fmt: skip
    for dtype, option in product(("f32", "f16", "bf16"), options):
        dim = {"f32": "d64", "f16": "d64", "bf16": "d128"}[dtype]
        yield Problem("attention", "backward", f"{dtype} b1 h4x2 q320 k320 {dim}", option)
    for dtype, shape, option in product(
        ("f32", "bf16"),
        ("b1 h32x32 q4096 k4096 d128", "b2 h16x16 q2048 k2048 d64", "b1 h8x8 q10 k1000 d64", "b4 h8x8 q1000 k64 d128"),
        ("", "causal deterministic"),
    ):
        yield Problem("attention", "backward", f"{dtype} {shape}", option)
    yield Problem("attention", "backward", "bf16 b4 h16x16 q1024 k1024 d64", "mask-full")
    yield Problem("attention", "backward", "bf16 b512 h64x64 q2048 k2048 d128", "causal")  # indices of 64 bits


def _float64() -> Iterator[Problem]:
    """What a processor alone computes."""
    yield Problem("attention", "forward", "f64 b2 h4x4 q128 k128 d64", "causal")
    yield Problem("attention", "forward", "f64 b2 h4x4 q3 k128 d40", _EVERYTHING.replace("bias", "bias-f32"))
    yield Problem("attention", "backward", "f64 b2 h4x4 q128 k128 d64", "causal")
    yield Problem("decode", "decode", "f64 b2 h8x2 n300 d64", "lse")
    for op in ("rms_norm", "layer_norm", "swiglu", "softmax_dropout", "cross_entropy", "layer_norm_linear"):
        for direction in ("", "gradient"):
            yield Problem("rows", op, "f64 37x200", direction)


# -- decoding and caches -----------------------------------------------------------------------------------------------


def _decode() -> Iterator[Problem]:
    for sizes, options in (
        ("bf16 b1 h32x8 n4096 d128", ""),
        ("bf16 b4 h32x8 n1024 d128", "page16"),
        ("f16 b2 h8x8 n512 d64", "lse"),
        ("f32 b3 h6x2 n700 d40", "window softcap alibi sinks lse"),
        ("f16 b2 h32x8 n2048 d128", "page16 i8"),
        ("bf16 b2 h16x2 n2048 d64", "page16 e4m3"),
        ("bf16 b2 h8x2 n512 d64 t100", "page16"),
        ("f16 b4 h8x2 n512 d64 t80", "page16 packed"),
        ("bf16 b2 h16x1 n4096 d576x512", "page64 latent"),
        ("f16 b8 h128x1 n1000 d576x512 t2", "page1 latent window softcap lse"),
        ("bf16 b2 h16x1 n4096 d576x512", "page64 latent e4m3"),
    ):
        yield Problem("decode", "decode", sizes, options)


def _more_decode() -> Iterator[Problem]:
    for dtype, length, batch in product(("bf16", "f16"), (128, 512, 2048, 16384, 131072), (1, 4, 32, 128)):
        yield Problem("decode", "decode", f"{dtype} b{batch} h32x8 n{length} d128", "page16" if dtype == "f16" else "")
    for heads, dim in product(("h8x8", "h16x2", "h64x1", "h12x4", "h128x8"), ("d64", "d80", "d256", "d192x128")):
        yield Problem("decode", "decode", f"bf16 b2 {heads} n3000 {dim}", "page64")
    options = (
        "window", "softcap", "alibi", "sinks", "lse", "no-lens", "page1", "page3", "page256", "page16 hnd",
        "page16 window softcap alibi sinks lse", "columns", "odd", "base", "page16 i8 hnd", "page16 e4m3 lse",
        "page3 i8", "window-left no-causal", "i8", "e4m3 sinks",
    )  # fmt: skip
    for dtype, option in product(("f32", "bf16"), options):
        yield Problem("decode", "decode", f"{dtype} b2 h8x2 n1500 d64", option)
    for tokens, option in product((2, 5, 16, 200), ("", "page16", "page16 packed", "page16 i8", "page16 window lse")):
        yield Problem("decode", "decode", f"f16 b3 h8x2 n1000 d64 t{tokens}", option)
        yield Problem("decode", "decode", f"f32 b3 h4x1 n1000 d32 t{tokens}", option)
    yield Problem("decode", "decode", "bf16 b2 h32x8 n4096 d128 t512", "page16")
    yield Problem("decode", "decode", "bf16 b70000 h8x8 n64 d64", "")  # more sequences than an axis of a grid
    yield Problem("decode", "decode", "bf16 b1024 h32x32 n4096 d128", "")  # indices of 64 bits


def _cache() -> Iterator[Problem]:
    for sizes, options in (
        ("f32 b2 h3 t5 d64", ""),
        ("bf16 b2 h8 t5 d64x32", "rope hnd"),
        ("f16 b2 h3 t5 d64", "rope-interleaved"),
        ("f32 b2 h3 t5 d7x5", "i8"),
        ("bf16 b4 h8 t300 d128", "i8 rope"),
        ("f32 b2 h3 t5 d48x16", "e4m3 rope hnd"),
        ("f16 b2 h3 t5 d64", "e4m3"),
        ("bf16 b2 h3 t5 d64", "odd"),
        ("bf16 b2 h3 t5 d576x0", ""),
    ):
        yield Problem("append", "kvcache", sizes, options)
    for sizes in ("bf16 n7 e2048 l4", "i8 n7 e2048 l4", "f32 n1 e129 l1"):
        yield Problem("copy", "kvcache", sizes)


# -- ops over rows -----------------------------------------------------------------------------------------------------

_NORMS = ("rms_norm", "layer_norm", "residual_rms_norm", "residual_layer_norm")


def _both(op: str, sizes: str, options: str = "") -> Iterator[Problem]:
    yield Problem("rows", op, sizes, options)
    yield Problem("rows", op, sizes, f"{options} gradient".strip())


def _rows() -> Iterator[Problem]:
    for op in _NORMS:
        yield from _both(op, "bf16 2048x1024")
        yield from _both(op, "f32 5x300")
    for op in ("swiglu", "geglu"):
        yield from _both(op, "bf16 512x1536")
        yield from _both(op, "f32 3x66", "one" if op == "swiglu" else "tanh")
    for op in ("rope", "rms_norm_rope"):
        yield from _both(op, "bf16 2x8x128x64", "heads")
        yield from _both(op, "f32 2x3x5x20", "interleaved ids-i64")
    yield from _both("softmax_dropout", "bf16 2x4x64x1024", "dropout")
    yield from _both("softmax_dropout", "f32 2x3x5x200", "mask-f32 causal")
    yield from _both("cross_entropy", "bf16 256x32000")
    yield from _both("cross_entropy", "f32 7x300", "smoothing")
    yield from _both("layer_norm_linear", "bf16 512x512x1024")
    yield from _both("layer_norm_linear", "f32 37x96x51")


def _more_rows() -> Iterator[Problem]:
    lengths = ("16384x512", "16384x1024", "4096x2048", "4096x4096", "128x4096", "4096x8192", "64x8192", "2048x16384",
               "32x16384", "1024x32768", "8x65536", "3x20001", "100x37", "1x4096", "65536x128", "7x1")  # fmt: skip
    for op, dtype, sizes in product(_NORMS, ("bf16", "f32"), lengths):
        yield from _both(op, f"{dtype} {sizes}")
    for op in ("rms_norm", "residual_layer_norm"):
        for sizes, options in (
            ("f16 4096x1024", ""), ("bf16 512x1024", "rows"), ("bf16 512x1024", "columns"), ("f16 512x1024", "odd"),
            ("bf16 512x4096", "weights-f32"), ("bf16 512x4096", "bare"), ("bf16 8x16x1000", "heads"),
        ):  # fmt: skip
            yield from _both(op, sizes, options)
    for sizes in ("bf16 4096x4096", "bf16 64x16384", "f32 4096x1024"):
        yield Problem("rows", "layer_norm", sizes, "kept gradient")
    for op, dtype in product(("swiglu", "geglu"), ("bf16", "f16", "f32")):
        for sizes, options in (("4096x11008", ""), ("16x64", ""), ("300x257", "rows"), ("512x2048", "one")):
            yield from _both(op, f"{dtype} {sizes}", options)
    for op, dtype in product(("rope", "rms_norm_rope"), ("bf16", "f16", "f32")):
        for sizes, options in (
            ("1x32x2048x128", ""), ("4x16x512x64", "interleaved"), ("2x8x100x96", "part heads"),
            ("1x4x33x80", "ids-i32"), ("8x32x4096x128", "heads ids-i64"), ("2x4x64x256", "inplace"),
        ):  # fmt: skip
            if op == "rope" or options != "inplace":
                yield from _both(op, f"{dtype} {sizes}", options)
    for dtype, sizes in product(("bf16", "f32"), ("8x16x512x512", "4096x4096", "512x16384", "8x50000", "3x2x5x61")):
        for options in ("", "dropout", "dropout causal", "mask-bool", "mask-f32 dropout scale"):
            yield from _both("softmax_dropout", f"{dtype} {sizes}", options)
        yield Problem("rows", "softmax_dropout", f"{dtype} {sizes}", "dropout kept gradient")
    for dtype, sizes in product(("bf16", "f32"), ("4096x32000", "16x128256", "512x1000", "8192x50304", "1x7")):
        for options in ("", "sum smoothing", "none wide ids-i32"):
            yield from _both("cross_entropy", f"{dtype} {sizes}", options)
    for dtype, sizes in product(
        ("bf16", "f16", "f32"),
        ("4096x4096x4096", "512x1024x3072", "64x256x256", "130x200x72", "1x512x512", "4096x768x96"),
    ):
        yield from _both("layer_norm_linear", f"{dtype} {sizes}")
    for options in ("rows", "weights-f32", "bare", "odd"):
        yield from _both("layer_norm_linear", "bf16 512x512x768", options)


# -- public kernel objects ---------------------------------------------------------------------------------------------

LANGUAGES = ("ptx", "hip", "spirv", "opencl", "wgsl", "msl", "llvm")

OBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention-f32": ("AttentionKernel", {"seq_len": 512, "head_dim": 64}),
    "attention-causal": ("AttentionKernel", {"seq_len": 512, "head_dim": 64, "causal": True, "dtype": "f16"}),
    "attention-gqa": (
        "AttentionKernel", {"seq_len": 300, "head_dim": 80, "num_heads": 8, "num_kv_heads": 2, "dtype": "bf16"}
    ),
    "attention-tiles": ("AttentionKernel", {"seq_len": 512, "head_dim": 64, "tiles": (32, 32)}),
    "attention-tensor-core": (
        "AttentionKernel", {"seq_len": 512, "head_dim": 128, "dtype": "f16", "use_tensor_cores": True}
    ),
    "incremental": (
        "IncrementalAttentionKernel", {"max_seq_len": 4096, "head_dim": 128, "num_heads": 32, "num_kv_heads": 8}
    ),
    "incremental-bf16": ("IncrementalAttentionKernel", {"max_seq_len": 512, "head_dim": 64, "dtype": "bf16"}),
    "multi-warp": ("MultiWarpIncrementalAttentionKernel", {"max_seq_len": 1024, "head_dim": 64, "num_heads": 8}),
    "batched": (
        "BatchedIncrementalAttentionKernel",
        {"max_seq_len": 1024, "head_dim": 64, "num_heads": 8, "batch_size": 4, "dtype": "f16"},
    ),
    "chunk": (
        "FlashDecodingChunkKernel",
        {"max_seq_len": 8192, "head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "batch_size": 2, "dtype": "f16"},
    ),
    "reduce": ("FlashDecodingReduceKernel", {"head_dim": 128, "num_heads": 32, "num_chunks": 16, "dtype": "f16"}),
    "swiglu": ("SwiGLUKernel", {"rows": 4096, "length": 11008, "dtype": "bf16"}),
    "geglu": ("GeGLUKernel", {"rows": 64, "length": 257, "approximate": "tanh"}),
    "residual-layer-norm": ("ResidualLayerNormKernel", {"rows": 512, "length": 1024, "dtype": "f16"}),
    "layer-norm-linear": ("LayerNormLinearKernel", {"rows": 256, "length": 512, "features": 512, "dtype": "f16"}),
    "rms-norm-rope": ("RMSNormRoPEKernel", {"seq_len": 128, "head_dim": 64, "num_heads": 8, "dtype": "bf16"}),
    "softmax-dropout": ("SoftmaxDropoutKernel", {"rows": 64, "length": 1000, "causal": True}),
}  # fmt: skip
"""Kernels of `aule.kernels`, by a name: the class, and what it is made with."""


def objects(language: str) -> list[Problem]:
    """The public kernel objects in a language."""
    return [Problem("object", name, language) for name in OBJECTS]
