"""Which tiles the forward kernels get. Every number says where it was measured; docs/performance.md has the
alternatives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from aule.errors import KernelError
from aule.ops.attention.wave import Wave
from aule.target import Target
from aule.tile.arrangement import arrange
from aule.tile.fragment import factor_elem, fitted, multiplies
from aule.tile.fragment_shape import FragmentShape
from aule.tile.matrix import padded
from aule.tile.simt_shape import SimtShape, uses_subgroups
from aule.tile.warpgroup import has_warpgroups


@dataclass(frozen=True)
class Entry:
    """A shape, and where it may be used.

    Attributes
    ----------
    accumulators : tuple of int
        The most registers of S and O that one thread may hold before the kernel spills: without modifiers, with one,
        with several.
    wave : Wave or None
        Through Vulkan, where somebody has looked.
    """

    shape: SimtShape
    accumulators: tuple[int, int, int]
    wave: Wave | None = None


#                       block_q, block_kv, threads_x, threads_y, chunk_k, chunk_v, resident_q
FIRST = Entry(SimtShape(64, 64, 16, 8, 16, 16, True, registers=168), (96, 96, 64))
"""H200, S 2048, full, fp32, TFLOPS. d64: 41.1 through PTX and 38.7 through Vulkan; beat 64x64 over 8x8 threads and Q
not resident. 168 registers let three workgroups reside. NVIDIA has tiles of its own by now."""

ENTRIES: tuple[Entry, ...] = (
    FIRST,
    # By rule, not measured: less shared memory, head dimensions above 128, narrower subgroups.
    Entry(SimtShape(64, 64, 16, 8, 16, 16, False), (96, 96, 64)),
    Entry(SimtShape(32, 64, 16, 8, 16, 16, False), (96, 96, 64)),
    Entry(SimtShape(32, 64, 16, 8, 16, 8, False), (96, 96, 64)),
    Entry(SimtShape(16, 64, 16, 8, 16, 8, False), (96, 96, 64)),
    Entry(SimtShape(64, 64, 8, 16, 16, 16, True), (96, 96, 64)),
    Entry(SimtShape(64, 64, 8, 16, 16, 8, False), (96, 96, 64)),
    Entry(SimtShape(32, 32, 8, 8, 16, 8, False), (160, 160, 106)),
    Entry(SimtShape(32, 32, 8, 8, 8, 4, False), (240, 240, 160)),
)
"""Alternatives in order of preference; the first that fits a device is taken."""

OWN: dict[str, tuple[Entry, ...]] = {
    # H200, d128, S 2048 full and causal, 8192 full and causal, before `apart`: 45.5, 44.5, 46.0, 46.9 TFLOPS. S
    # 2048 full: not late and m in registers 45.2, chunks of 32 43.3, 64x128 45.1 and with Q not resident 43.6, 128x128
    # over 256 threads 42.9. d64, S 2048: 43.2 and 41.9. Apart: d128 S 2048 full 45.5 -> 46.2 and 8192 causal 47.0 ->
    # 47.3, d64 S 2048 full 43.2 -> 44.1. Rows pushed apart: S 2048 full, d128 47.0, d64 45.0.
    "cuda": (replace(FIRST, shape=replace(FIRST.shape, late=True, apart=True)),),
    # Through Vulkan a workgroup has 48 KiB of shared memory and a multiprocessor 100: three reside that have 32 KiB.
    # GPUs whose shared memory is as small come here through CUDA, too, by rule.
    "nvidia": (
        # S 2048 full: 42.2. Before rows were pushed apart (`Pitch`), S 2048 full and 8192 causal: 41.6 and 41.9; all of
        # P at once, so that two reside, 39.1, and not apart 38.2 and 38.2. S 2048 full: late 41.5 to 42.2, not apart
        # 40.0, Q not resident 39.4, and with P by 32 and l in memory 38.7. Steady 42.2 -> 42.9. S 2048 and 8192 full,
        # pieces for the last wave, before it was steady: 42.2 -> 42.5, 42.6 -> 43.1; three for each slot 42.5 and 43.0.
        Entry(
            SimtShape(64, 64, 16, 8, 16, 16, True, block_p=16, apart=True, sums_kept=False, steady=True),
            (64, 64, 64),
            Wave(3, 1, 2),
        ),
        FIRST,
        # The same: 44.7 and 45.0 (and 42.4 and 45.0, S 2048 causal and 8192 full). S 2048 full: nothing ahead 44.2,
        # along rows as well 43.5; 64x64 in 31 KiB 41.3, of which no three reside because the driver takes 181
        # registers; Q resident, in steps of 8 columns and keys, 41.3; 128x128 over 256 threads 39.3. Steady, in
        # the order of docs/performance.md's table: 44.7, 42.2, 45.1, 45.0 -> 45.5, 43.2, 45.9, 46.1. S 2048 and 8192
        # full, pieces for the last wave, before it was steady: 44.7 -> 45.6, 45.0 -> 46.0; one for each slot 45.4 and
        # 45.3, three 45.6 and 45.9, eight - and 46.1; before the whole blocks 42.1 and 43.5.
        Entry(
            SimtShape(
                64, 128, 16, 8, 16, 16, False, block_p=64, apart=True, down=True, ahead_k=1, ahead_v=2, steady=True
            ),
            (128, 0, 0),
            Wave(2, 4, 2),
        ),
    ),
    # A hardware thread has 128 registers of 8 lanes, 256 where the driver is asked for them and the device has them
    # (from DG2 on): the shapes above spill up to 298 of 128, these at most a dozen, and none of 256.
    "intel": (
        Entry(SimtShape(64, 64, 16, 16, 8, 8, False), (32, 32, 32)),
        Entry(SimtShape(64, 32, 16, 16, 8, 8, False), (40, 40, 40)),
        Entry(SimtShape(32, 32, 16, 16, 16, 4, False), (36, 36, 36)),
    ),
    # Four waves of 64, for four SIMDs share 64 KiB (GCN) or 128 KiB (RDNA) of memory and two waves leave half of them
    # idle. Mesa's estimate of the cycles per score at d64 is 0.66 (navi21) and 0.50 (navi31) of that for the first
    # shape above. Also, Mesa 22.3 gives RDNA 3 no more than 128 registers, and the shapes above spill there.
    "amd": (
        Entry(SimtShape(64, 64, 16, 16, 16, 16, False), (48, 48, 48)),
        Entry(SimtShape(64, 64, 16, 16, 16, 8, False), (80, 48, 48)),
        Entry(SimtShape(32, 64, 16, 16, 16, 8, False), (40, 40, 40)),
    ),
}
"""What goes before `ENTRIES` through a backend, and then on a vendor's devices. Intel's and AMD's are by rule, not
measured: from compilers alone (docs/compiled.md)."""

_HIDING = 3
"""Workgroups for which there must be shared memory where they hide each other's latency (`SimtShape.late`)."""

SMALL = Entry(SimtShape(32, 32, 8, 8, 8, 4, False), (240, 240, 160))
"""For OpenCL and WebGPU on a CPU, where compiling takes longer than computing (PoCL 3.1: 3 s instead of 6). Software
Vulkan keeps the tiles of real devices, so that tests without one run those too."""


def choose_shape(target: Target, head_dim: int, value_dim: int, dtype: str = "f32", modifiers: int = 0) -> SimtShape:
    """The first entry, of the backend's and the vendor's own and then of `ENTRIES`, that fits the device and the head
    dimensions.

    The ``registers`` of an entry are enough for fp32 without modifiers; anything more takes all there are, so that
    fewer workgroups reside.
    """
    entries = (*OWN.get(target.backend, ()), *OWN.get(target.vendor, ()), *ENTRIES)
    if target.software and target.backend in ("opencl", "webgpu"):
        entries = (SMALL,)
    entries = tuple(replace(entry, shape=narrowed(entry.shape, head_dim)) for entry in entries)
    fitting = [entry.shape for entry in entries if _fits(entry, target, head_dim, value_dim, min(modifiers, 2))]
    if not fitting:
        need = min(e.shape.shared_bytes(head_dim, value_dim, uses_subgroups(target, e.shape)) for e in entries)
        raise KernelError(
            f"[flash_attention] expected a device with {need} bytes of shared memory and workgroups of 64, got "
            f"{target.max_shared_bytes} bytes and {target.max_threads} on {target.name}; use another backend"
        )
    # Shuffles spare two barriers per tile: a shape whose rows fit into a subgroup goes before one whose rows do not.
    # Not so on Intel, where such a shape spills.
    shuffling = (shape for shape in fitting if uses_subgroups(target, shape) and target.vendor != "intel")
    chosen = next(shuffling, fitting[0])
    return chosen if dtype == "f32" and not modifiers else replace(chosen, registers=255, late=False)


@dataclass(frozen=True)
class FragmentEntry:
    """Tiles on matrix units, for head dimensions up to ``dim``.

    Attributes
    ----------
    plain : FragmentShape
        Where a row is whole runs of eight and tiles without dropped keys have no mask or bias to read.
    masked : FragmentShape
        With a mask or a bias, whose indices take registers.
    strided : FragmentShape
        Where rows pass through registers on their way, element by element.
    wave : Wave or None
        Of ``plain`` through Vulkan, where somebody has looked.
    full : FragmentShape or None
        Instead of ``plain``, of the same blocks and tiles, where all of these are full (`FragmentConfig.whole`).
    """

    dim: int
    plain: FragmentShape
    masked: FragmentShape
    strided: FragmentShape
    wave: Wave | None = None
    full: FragmentShape | None = None


_Numbers = tuple[int, int, int, int, int]


def _entry(
    dim: int,
    plain: _Numbers | FragmentShape,
    masked: _Numbers,
    strided: _Numbers,
    wave: Wave | None = None,
    full: FragmentShape | None = None,
) -> FragmentEntry:
    """An entry out of block_q, block_kv, subgroups, stages and resident_q, or of a shape that has more to say."""
    shape = plain if isinstance(plain, FragmentShape) else _shape(*plain)
    return FragmentEntry(dim, shape, _shape(*masked), _shape(*strided), wave, full)


def _shape(block_q: int, block_kv: int, subgroups: int, stages: int, resident_q: int) -> FragmentShape:
    return FragmentShape(block_q, block_kv, subgroups, stages, bool(resident_q))


FRAGMENTS: dict[str, tuple[FragmentEntry, ...]] = {
    # H200, bf16, B*S 16384, H*D 2048, TFLOPS at S 2048 / 8192 full / 8192 causal; the alternatives were timed before
    # the last changes to the kernel, which brought all of them 2 to 5% (docs/performance.md).
    "cuda": (
        # 340 / 342 / 318. Before: 323 / 333 / 306 against one stage (308 / 321 / 307), keys by 96 (326 / 306 / 300) and
        # 128 (293 / 306 / 269), Q in memory (315 / 318 / 299), 16 rows a subgroup (268 / 255 / 208), eight subgroups
        # (294 / 304 / 273).
        _entry(64, (128, 64, 4, 2, 1), (128, 32, 4, 2, 1), (128, 32, 4, 2, 1)),
        # 375 / 374 / 334; two stages 373 / 345 / 321. Before: 365 / 359 / 322 against keys by 48 (350 / 358 / 302) and
        # 32 (350 / 343 / 311), Q in registers (307 / 303 / 268), eight subgroups (339 / 357 / 303), 16 rows a subgroup
        # (272 / 251 / 247).
        _entry(128, (128, 64, 4, 1, 0), (64, 64, 4, 1, 0), (64, 32, 4, 1, 0)),
        # 295 / - / 271. Before: 287 / - / 267 against eight subgroups (283 / - / 258), keys by 48 (278 / - / 266) and
        # 32 in two stages (250 / - / 232), Q in registers (244 / - / 238).
        _entry(256, (64, 64, 4, 1, 0), (64, 64, 4, 1, 0), (64, 16, 4, 1, 0)),
        # By rule, for less shared memory (99 KiB on sm_86, sm_89 and sm_120, 64 KiB on sm_75).
        _entry(256, (64, 32, 4, 1, 0), (64, 32, 4, 1, 0), (64, 16, 4, 1, 0)),
        _entry(256, (64, 16, 4, 1, 0), (64, 16, 4, 1, 0), (64, 16, 4, 1, 0)),
    ),
    # H200, bf16, S 2048 full / 2048 causal / 8192 full / 8192 causal; 48 KiB of shared memory is all there is. "Before"
    # is with code for values that are not finite between the products and with the heads of a causal mask all together.
    # In brackets S 2048 full / 8192 causal, f16: before scores were made ahead, accesses no longer checked and bf16 cut
    # off (docs/performance.md, steps 14 to 18 and 22 to 24). Pieces for the last wave: S 2048 / 8192 full.
    "vulkan": (
        # Full tiles (`forward_whole`) 348 / - / 368 / -, paced by 2 306 / - / - / -. Q by rows and O in runs, causal:
        # 271 -> 275 and 338 -> 342.
        # 326 / 270 / - / -; before 328 / 252 / - / -, two stages and not ahead 306 / - / - / -. (317 / 304; keys by 32
        # 312 / 283, by 96 in one stage 273 at S 8192 full, where this had 309; 16 rows a subgroup and unrolled loops
        # 249 / 232.) Pieces: 329 -> 333, 345 -> 353; behind the whole blocks 331, 349.
        _entry(
            64,
            FragmentShape(128, 64, 4, 1, True, ahead=True),
            (128, 32, 4, 2, 1),
            (128, 32, 4, 2, 1),
            Wave(2, 1, 14, leading=True),
        ),
        # Full tiles, S 2048 in bf16 and f16: 361.7 and 358.2; 16 columns of Q in registers 351.5 and 346.4, 32 355.9
        # and 352.0, 64 360.0 and 358.7; 16, paced by 4 285. Q by rows and O in runs, causal: 283 -> 294, 347 -> 353.
        # 332 / 280 / 357 / 351, f16 333 / - / - / -; paced by 2 312 / 265 / - / -; before 325 / 250 / 352 / 332, not
        # ahead 305 / - / - / 316; in f16 332, 32 columns of Q in registers 326; not ahead and Q in private memory, keys
        # by 64 257, by 48 266, by 32 in two stages 225, 256 rows 236 to 257. (309 / 293; 48 columns and keys by 48 271
        # / -, three subgroups and none 187 / -; 16 rows a subgroup, eight of them, 285 / 262; four 258 / 236, keys by
        # 48 252 / 244, by 32 in two stages 255 / 240.) Pieces: 333 -> 335, 354 -> 366; before the whole blocks 335,
        # 363; two for each slot 325, 365.
        _entry(
            128,
            FragmentShape(128, 32, 4, 1, False, held=16, ahead=True),
            (128, 64, 8, 1, 1),
            (128, 64, 8, 1, 1),
            Wave(2, 1, 14),
            FragmentShape(128, 32, 4, 1, False, held=48, ahead=True),
        ),
        # Full tiles, S 2048 in bf16 and f16: 292.8 and 298.3; 224 columns of Q in registers 295.4 and 289.4, 240 274.4
        # and 278.8, all 286.2 and 287.3; 224, paced by 4 276.9 and 272.7, by 12 278.4 and 274.5, not 282.4 and 286.5.
        # Q by rows and O in runs, causal: 239 -> 251 and 297 -> 299.
        # 273 / 238 / 297 / -; paced by 4 267 / - / - / -, not 260 / 234 / - / -; all of Q in registers 264 / 236 / - /
        # -, not paced 260 / 236 / 280 / -; before 245 / 201 / 269 / 257, 64 rows over four subgroups with 96 columns of
        # Q in memory 233 / - / - / -, not ahead 203 / - / - / -. (198 / -; keys by 16 in two stages 195 / -, with all
        # of Q in registers 191 / - and in one stage 183 / -, with 96 columns of it 176 / -; 32 rows a subgroup 119 /
        # -.) Pieces: 274 -> 279, 298 -> 308; behind the whole blocks 278, 306; two for each slot, behind, 271, 304.
        _entry(
            256,
            FragmentShape(128, 32, 8, 1, False, held=224, ahead=True, paced=8),
            (64, 16, 4, 1, 1),
            (64, 16, 4, 1, 1),
            Wave(1, 1, 8, leading=True),
            FragmentShape(128, 32, 8, 1, False, held=208, ahead=True, paced=8),
        ),
    ),
    # Not measured, only compiled: Mesa 25.0.7 for navi31, 32 lanes (docs/compiled.md). The numbers are its estimate of
    # cycles per score without the guarded product, whose trips it overrates; WMMA alone would be 0.5 at d64.
    "amd": (
        # 0.62 with 144 registers; Q in registers 0.62 with 192, keys by 64 0.60 with 216, four subgroups of 32 rows
        # 0.60 with 192 and half the waves, of 16 rows 0.65.
        _entry(64, (128, 32, 8, 1, 0), (128, 32, 8, 1, 0), (128, 32, 8, 1, 0)),
        # 1.10; four subgroups with keys by 64 1.14, by 32 1.16, by 16 1.20, of 32 rows 1.12 with 240 registers.
        _entry(128, (128, 32, 8, 1, 0), (128, 32, 8, 1, 0), (128, 32, 8, 1, 0)),
        # 2.35; two subgroups spill.
        _entry(256, (64, 16, 4, 1, 0), (64, 16, 4, 1, 0), (64, 16, 4, 1, 0)),
    ),
    # No compiler for Intel's units was at hand: `aule tune` may find tiles.
    "intel": (),
    # By rule, not measured: no Apple machine. 32 KiB of memory, and 128 registers a thread: 16 rows a subgroup, of
    # which O takes half a register a column. Q stays in registers where they are left. O of 256 columns would be all.
    "metal": (
        _entry(64, (64, 32, 4, 1, 1), (64, 32, 4, 1, 1), (64, 32, 4, 1, 1)),
        _entry(96, (64, 32, 4, 1, 0), (64, 32, 4, 1, 0), (64, 32, 4, 1, 0)),
        _entry(128, (64, 16, 4, 1, 0), (64, 16, 4, 1, 0), (64, 16, 4, 1, 0)),
    ),
}
"""Tiles on matrix units by vendor, or else by backend; the first that is wide enough and fits is taken."""

WARPGROUPS: tuple[tuple[int, FragmentShape], ...] = (
    # Two of these share a multiprocessor. H200, bf16, batch 4, 16 heads, S 4096, ms: a window of 512 / causal / masks
    # of eight documents / padding / random bits: 0.117 / 0.340 / 0.138 / 0.423 / 0.807; in two stages 0.128 / - / 0.144
    # / 0.451 / 0.814. 64 rows over one warpgroup in two stages 0.113 / - / 0.132 / 0.455 / 0.868, in three 0.115 /
    # 0.355. In three stages, 192 x 96 0.155 / 0.361 / 0.162 / 0.421 / 0.794, 192 x 144 0.171 / 0.368, 128 x 128 0.152 /
    # 0.419 / 0.169 / 0.488 / 0.923; 192 x 144 in two 0.189 / 0.380. B*S 16384, H*D 2048, S 2048 full / 8192 causal:
    # 0.596 / 1.201; 192 x 144 in three stages 0.644 / 1.207, in two 0.741 / 1.256. (Before O was stored in whole rows.)
    (64, FragmentShape(128, 64, 8, 3, False, 128, warpgroups=True)),
    # B*S 16384, H*D 2048, TFLOPS at S 2048 full / 8192 causal: 534 / 566; keys by 96 475 / 531. With whole barriers 465
    # / 401, keys by 160 454 / 396.
    (128, FragmentShape(128, 128, 8, 2, False, warpgroups=True)),
    # 561 / 577. With whole barriers 552 / 447, keys by 48 509 / 436, by 32 417 / 375.
    (256, FragmentShape(128, 64, 8, 2, False, warpgroups=True)),
)
"""Tiles for products of warpgroups by the widest head dimension that they are for."""


Doing = Literal["nothing", "mask", "bias", "dropout"]
"""What costs a kernel many registers between its products: nothing, a mask to be added, a bias, or dropout."""

WARPGROUPS_DOING: dict[Doing, tuple[tuple[int, FragmentShape], ...]] = {
    # H200, batch 4, 16 heads, S 4096, ms, none of which spills.
    "nothing": (),
    # Eight documents as numbers: 0.165; plain tiles, which spill, 0.180, 192 x 96 in three stages 0.211, 128 x 128 in
    # two 0.251.
    "mask": ((64, FragmentShape(64, 64, 4, 3, False, 168, warpgroups=True)),),
    # One for each score: 1.202; plain tiles 1.309, 192 x 112 in two stages 1.474, 128 x 128 in three 1.485.
    "bias": ((64, FragmentShape(192, 96, 12, 3, False, 168, warpgroups=True)),),
    # B*S 16384, H*D 2048, S 4096, full and causal: 2.388 and 1.328; 128 x 96 2.405 and 1.418, plain tiles 2.544 and
    # 1.440, 192 x 96 2.471 and 1.456. At d128 plain tiles 1.653 and 0.931; 128 x 96 1.739 and 1.034, 192 x 96, which
    # spills, 1.831 and 1.102.
    "dropout": ((64, FragmentShape(128, 128, 8, 3, False, warpgroups=True)),),
}
"""What goes before those then."""


WARPGROUPS_LONG: tuple[tuple[int, int, FragmentShape], ...] = (
    # H200, bf16, B*S 16384, H*D 2048, full, ms, and the plain tiles: S 16384 3.82 and 4.49, 8192 2.02 and 2.24, but
    # 4096 1.16 and 1.11, 2048 0.644 and 0.596. In two stages 4.55, 2.27, 1.33 and 0.741.
    (64, 8192, FragmentShape(192, 144, 12, 3, False, 168, warpgroups=True)),
    # S 8192 1.74 and 1.86, 2048 0.515 and 0.530. 192 x 64 in three stages, which spills, 1.92 and 0.515. Causal, S 4096
    # 0.543 and 0.545, 2048 0.342 and 0.319.
    (128, 2048, FragmentShape(192, 96, 12, 2, False, 168, warpgroups=True)),
)
"""The same where all rows keep all keys, and there are so many of both."""


def choose_warpgroups(
    target: Target, dtype: str, head_dim: int, value_dim: int, doing: Doing = "nothing", length: int = 0
) -> FragmentShape | None:
    """Tiles for products of warpgroups, whose factors are copied to shared memory as they are; None where there are no
    such products. ``length`` are rows and keys where all of these keep all of those."""
    if not has_warpgroups(target, dtype) or not multiplies(target, dtype):
        return None
    long = next((entry for entry in WARPGROUPS_LONG if max(head_dim, value_dim) <= entry[0]), None)
    further = [(long[0], long[2])] if long is not None and length >= long[1] else []
    for dim, shape in (*further, *WARPGROUPS_DOING[doing], *WARPGROUPS):
        fits = shape.shared_bytes(head_dim, value_dim) <= target.max_shared_bytes
        if max(head_dim, value_dim) <= dim and fits:
            return shape
    return None


TF32: tuple[FragmentEntry, ...] = (
    # By what ptxas keeps in registers (sm_90), not measured yet: factors are twice as long as in half precision.
    _entry(64, (128, 32, 4, 2, 0), (64, 32, 4, 2, 0), (64, 32, 4, 2, 0)),
    _entry(128, (128, 32, 4, 1, 0), (64, 32, 4, 1, 0), (64, 32, 4, 1, 0)),
    _entry(128, (64, 32, 4, 1, 0), (64, 32, 4, 1, 0), (64, 32, 4, 1, 0)),
    _entry(256, (64, 16, 4, 1, 0), (64, 16, 4, 1, 0), (64, 16, 4, 1, 0)),
)
"""The same for fp32 multiplied as tf32, through CUDA."""


def choose_fragments(
    target: Target, dtype: str, head_dim: int, value_dim: int, masked: bool, strided: bool, rotated: bool = False
) -> FragmentShape | None:
    """Tiles on matrix units; None where there are none for the type, or not known how they hold a matrix. Columns that
    are ``rotated`` on their way in stay together."""
    if not multiplies(target, dtype):
        return None
    itemsize = factor_elem(dtype).bits // 8
    for entry in TF32 if dtype == "tf32" else FRAGMENTS.get(target.vendor, FRAGMENTS.get(target.backend, ())):
        apart = entry.plain.held > 0 or entry.plain.in_pieces(head_dim)
        plain = entry.masked if rotated and apart else entry.plain
        shape = fitted(entry.strided if strided else entry.masked if masked else plain, target)
        if max(head_dim, value_dim) > entry.dim or not runs(shape, target):
            continue
        if shape.shared_bytes(head_dim, value_dim, itemsize) <= target.max_shared_bytes:
            return shape
    return None


def choose_full(target: Target, shape: FragmentShape) -> FragmentShape:
    """What takes the place of a shape of the table where all tiles are full."""
    if not target.vulkan_on_nvidia:
        return shape
    return {entry.plain: entry.full for entry in FRAGMENTS["vulkan"]}.get(shape) or shape


def choose_wave(target: Target, shape: SimtShape | FragmentShape) -> Wave | None:
    """What is known of the tiles of a forward kernel; None where nobody has looked."""
    if not target.vulkan_on_nvidia:
        return None
    plain = [(entry.plain, entry.wave) for entry in FRAGMENTS["vulkan"]]
    return dict([*((entry.shape, entry.wave) for entry in OWN["nvidia"]), *plain]).get(shape)


def runs(shape: FragmentShape, target: Target) -> bool:
    """Whether a device has such workgroups, and fragments that cut such rows evenly."""
    rows = shape.rows // shape.score_cut[0]
    return shape.threads <= target.max_threads and rows % arrange(target).height == 0


def narrowed(shape: SimtShape, head_dim: int) -> SimtShape:
    """Steps of 8 columns where 16 would compute on more padding (8 and 16 both keep rows off each other's banks)."""
    return replace(shape, chunk_k=8) if padded(head_dim, 8) < padded(head_dim, shape.chunk_k) else shape


def _fits(entry: Entry, target: Target, head_dim: int, value_dim: int, modifiers: int) -> bool:
    shape = entry.shape
    workgroups = _HIDING if shape.late else 1
    shared = shape.shared_bytes(head_dim, value_dim, uses_subgroups(target, shape))
    return (
        shape.threads <= target.max_threads
        and workgroups * shared <= target.max_shared_bytes
        and shape.accumulators(value_dim) <= entry.accumulators[modifiers]
    )
