"""Which tiles the backward kernels get. Every number says where it was measured, as in `tiles.py`."""

from __future__ import annotations

from dataclasses import dataclass

from aule.errors import KernelError
from aule.ir.types import PANEL
from aule.ops.attention.tiles import narrowed, runs
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment import fitted, multiplies
from aule.tile.fragment_shape import FragmentShape
from aule.tile.simt_shape import SimtShape
from aule.tile.warpgroup import has_warpgroups


@dataclass(frozen=True)
class FragmentBackwardEntry:
    """Tiles of the backward kernels on matrix units, for head dimensions up to ``dim``: of dQ, of dK and dV, of the
    latter where dQ is added up there, if those are something else."""

    dim: int
    queries: FragmentShape
    keys: FragmentShape
    sums: FragmentShape | None = None


FRAGMENTS_BACKWARD: dict[str, tuple[FragmentBackwardEntry, ...]] = {
    # H200, bf16, S 2048 full / 8192 causal, TFLOPS of the kernel's own products: three for dQ, four for dK and dV. With
    # sums the latter has five, counted as the literature does.
    "cuda": (
        # dQ 375 / 347; keys by 32 343 / 323, 16 rows a subgroup 325 / 275. dK and dV 328 / 313; 16 rows a subgroup
        # 284 / 279 and, with eight subgroups, 273 / 270. With sums 267 / 271 against 218 / 226 and 218 / 215.
        FragmentBackwardEntry(64, FragmentShape(128, 64, 4, 2, False), FragmentShape(128, 32, 4, 2, False)),
        # dQ 386 / 340; 16 rows a subgroup 303 / 284, keys by 32 300 / 250. All by sums: 283 / 278; four subgroups to
        # their rows 277 / 279, each its own rows 256 / 259, half the keys and subgroups 209 / 208.
        FragmentBackwardEntry(128, FragmentShape(128, 32, 4, 2, False), FragmentShape(128, 64, 8, 2, False, columns=2)),
        # Where 16 columns do not come in pairs.
        FragmentBackwardEntry(128, FragmentShape(128, 32, 4, 2, False), FragmentShape(128, 64, 8, 2, False)),
        # By rule, for less shared memory.
        FragmentBackwardEntry(128, FragmentShape(64, 32, 4, 2, False), FragmentShape(64, 32, 4, 2, False)),
        # All by sums: 217 / -.
        FragmentBackwardEntry(256, FragmentShape(64, 32, 4, 2, False), FragmentShape(64, 64, 8, 2, False, columns=4)),
    ),
    # H200, 48 KiB, S 2048 full / 8192 full / 8192 causal, all launches, five products counted.
    "vulkan": (
        # Sums, bf16: 296 / 325 / 303, f16 - / 327 / 303; not cut 289 / 316, f16 - / 324; a loop for full tiles - / - /
        # 299, where head by head had 293. Before, 286 / 317 / 295, f16 - / 304 / -; 32 columns of K in registers 273 /
        # 299 / 279, all 261 / 281 / 254; delta subtracted 268 / 301 / 275, and rows stored behind dQ's product 265 /
        # 289 / 267. Before: rows fetched early 253 of 285, bf16 rounded instead of cut off 261, both 232 / 247 / 232;
        # rows by 48 269, V in private memory 248. Before accesses were no longer checked: f16 dQ 313; 16 rows a
        # subgroup 254. dK and dV 312; 16 rows a subgroup 256, 64 keys 187. Both together count as 220; sums of 64 keys,
        # V in memory, 183 to 195.
        FragmentBackwardEntry(
            64,
            FragmentShape(128, 32, 4, 1, False),
            FragmentShape(128, 32, 4, 1, False),
            FragmentShape(128, 32, 4, 1, True, ahead=True, offset=True),
        ),
        # Sums, f16 263 / 287 / 274, bf16 257 / 280 / 272; not cut f16 259 / 276, bf16 261 / 281. 64 columns of K in
        # registers, not cut - / 276 / 275, bf16 - / 261 / 264; 32 - / - / 269, bf16 - / - / 253. Each subgroup its own
        # rows, 64 columns, not cut 259 / 271 / 273, bf16 259 / 277 / 268. One loop, head by head, P and dS from memory,
        # 64 columns f16 247 / 267 / 246, bf16 251 / 271 / 261; none of K 233 / 245 / 249, 32 240 / 253 / 243, 96 249 /
        # 264 / 240, all 228 / 241 / 245; rows stored behind dQ's product 232 / 250 / 239, f16 - / 239 / 237.
        # Before: early and rounded 218 / 233 / 223, V in private memory 229 / 247 / 234; both together 179; rows by 16
        # and V in memory 162, of 128 keys over eight subgroups 155, of 96 over six in two stages 117.
        FragmentBackwardEntry(
            128,
            FragmentShape(64, 32, 4, 1, True),
            FragmentShape(64, 32, 4, 1, True, ahead=True),
            FragmentShape(64, 32, 4, 1, True, columns=2, held=48, ahead=True, apart=True),
        ),
        # Where 16 columns do not come in pairs.
        FragmentBackwardEntry(
            128,
            FragmentShape(64, 32, 4, 1, True),
            FragmentShape(64, 32, 4, 1, True, ahead=True),
            FragmentShape(64, 32, 4, 1, True, held=64, ahead=True, apart=True),
        ),
    ),
    # Not measured, only compiled, as above. None of them spills, with any modifiers.
    "amd": (
        # dQ 0.99; four subgroups 1.04, keys by 16 1.05. With sums 0.72; four subgroups 0.72, two that share rows 0.70.
        FragmentBackwardEntry(64, FragmentShape(128, 32, 8, 1, False), FragmentShape(128, 32, 8, 1, False)),
        # dQ 1.86; keys by 16 1.91. With sums 1.35; two subgroups that share rows 1.33, rows by 32 without that spill.
        FragmentBackwardEntry(128, FragmentShape(64, 32, 4, 1, False), FragmentShape(64, 16, 4, 1, False)),
    ),
    "intel": (),
    # By rule, not measured: no Apple machine. As for the forward pass; dK and dV of 128 columns take all 128 registers,
    # and subgroups that share 32 keys, which would halve that, need 40 KiB.
    "metal": (
        FragmentBackwardEntry(64, FragmentShape(64, 32, 4, 1, False), FragmentShape(64, 16, 4, 1, False)),
        FragmentBackwardEntry(128, FragmentShape(32, 16, 2, 1, False), FragmentShape(32, 16, 2, 1, False)),
    ),
}
"""By vendor or backend; the first that is wide enough and fits is taken. Heads that none fits have no matrix units in
the backward pass."""


_RESIDENT = 2
"""Workgroups that a multiprocessor holds, of 128 threads that have all registers."""


def choose_backward_fragments(
    target: Target, dtype: str, head_dim: int, value_dim: int, of: str
) -> FragmentShape | None:
    """Tiles of a backward kernel on matrix units, of "queries", of "keys", or of the latter with "sums"; None where
    there are none."""
    if not multiplies(target, dtype):
        return None
    for entry in FRAGMENTS_BACKWARD.get(target.vendor, FRAGMENTS_BACKWARD.get(target.backend, ())):
        keys = (of == "sums" and entry.sums) or entry.keys
        shape = fitted(entry.queries if of == "queries" else keys, target)
        # A thread brings in what belongs to a row of the others.
        if max(head_dim, value_dim) > entry.dim or not runs(shape, target) or shape.threads < shape.block_kv:
            continue
        if any(-(-dim // SIZE) % shape.columns for dim in (head_dim, value_dim)):
            continue
        if shape.backward_bytes(head_dim, value_dim) <= target.max_shared_bytes:
            return shape
    return None


def choose_backward_slots(target: Target, shape: FragmentShape) -> int:
    """Workgroups with sums that a device works on at a time; 0 where nobody has looked, or their parts could not be
    added up."""
    known = target.vulkan_on_nvidia and target.device_fence and shape.ahead
    return _RESIDENT * target.compute_units if known else 0


WARPGROUPS_BACKWARD: tuple[tuple[int, FragmentShape], ...] = (
    # H200, bf16, B*S 16384, H*D 2048, TFLOPS at S 2048 full / 8192 causal, all launches; "before" is with a barrier in
    # the place of the meeting, and slower passes before and after.
    # 400 / 422; before, three stages 376 / 395, two 372 / 397. Fragments 267 / 271.
    (64, FragmentShape(128, 128, 8, 4, False, warpgroups=True)),
    # 457 / 487; before, three stages 422 / 448, two 428 / 452. Fragments 283 / 278.
    (128, FragmentShape(128, 64, 8, 4, False, warpgroups=True)),
    # 313 / -; before, 294 / 327. Fragments 220 / 231.
    (256, FragmentShape(64, 64, 8, 2, False, columns=2, warpgroups=True)),
)
"""Tiles of dK and dV with sums over warpgroups, for head dimensions up to the number before them."""


def choose_backward_warpgroups(target: Target, dtype: str, head_dim: int, value_dim: int) -> FragmentShape | None:
    """Tiles of the kernel of dK and dV over warpgroups; None where there are none."""
    if not (multiplies(target, dtype) and has_warpgroups(target, dtype)):
        return None
    for dim, shape in WARPGROUPS_BACKWARD:
        if max(head_dim, value_dim) > dim:
            continue
        # Warpgroups share dQ by panels of columns, of which each has at least one, and where they have the same keys
        # dK and dV as well, by whole ones.
        enough = -(-head_dim // PANEL) >= shape.threads // 2 // shape.block_kv
        whole = shape.columns == 1 or all(d % (shape.columns * PANEL) == 0 for d in (head_dim, value_dim))
        if enough and whole and shape.backward_bytes(head_dim, value_dim, sums=True) <= target.max_shared_bytes:
            return shape
    return None


@dataclass(frozen=True)
class BackwardEntry:
    """A shape of the plain backward kernels.

    Attributes
    ----------
    accumulators : tuple of int
        The most registers of S, dP and the gradients (dQ's sums apart) that one thread may hold before the kernel
        spills: without modifiers, and with any.
    """

    shape: SimtShape
    accumulators: tuple[int, int] = (136, 136)


BACKWARD: tuple[BackwardEntry, ...] = (
    BackwardEntry(SimtShape(64, 64, 16, 8, 16, 16, False)),
    BackwardEntry(SimtShape(32, 64, 16, 8, 16, 16, False)),
    BackwardEntry(SimtShape(32, 64, 16, 8, 16, 8, False)),
    BackwardEntry(SimtShape(32, 32, 16, 8, 16, 8, False)),
    BackwardEntry(SimtShape(16, 64, 16, 8, 16, 8, False)),
    BackwardEntry(SimtShape(16, 32, 16, 8, 8, 4, False)),
    BackwardEntry(SimtShape(32, 32, 8, 8, 16, 8, False)),
    BackwardEntry(SimtShape(32, 32, 8, 8, 8, 4, False)),
    BackwardEntry(SimtShape(16, 16, 8, 8, 8, 4, False)),
)
"""Tiles of the backward kernels; the first that fits a device and its registers is taken. The first was measured on an
H200 (S 2048, full, fp32, TFLOPS of the kernel's own products), the others follow by rule. d64: dQ 39.4 through PTX and
33.6 through Vulkan, dK and dV 39.8 and 35.0; beat 256 threads (35.4, 36.1), 128x64 (37.2, 37.7) and keys by 32 (35.6).
d128: dQ 40.4 and 33.6; beat 256 threads (36.9) and 32x64 (34.7). 64x128 makes dQ at d64 2 to 4% faster and spills."""

OWN_BACKWARD: dict[str, tuple[BackwardEntry, ...]] = {
    # H200, d128, dK and dV: 37.9 through PTX; beat 32x64 (34.3), 64x64 over 256 threads (35.6). Through Vulkan with
    # chunks of 8 31.6; beat 32x64 (29.2).
    "nvidia": (BACKWARD[0], BackwardEntry(SimtShape(32, 128, 16, 8, 16, 16, False))),
}
"""What goes before `BACKWARD` on a vendor's devices."""

SUMS: dict[str, tuple[BackwardEntry, ...]] = {
    # H200, S 2048, full, fp32, TFLOPS of five products. d64: 40.2; not resident 39.5, 128x64 38.0, chunks of 8 38.3,
    # 64x128 35.6. d128: 41.1; V by chunks of 8 40.5, K's too 37.8, 64x128 over 256 threads 38.9. Through
    # Vulkan, where 48 KiB hold no resident rows: d64 35.3; chunks of 8 30.8. d128: 35.1; 64x64 35.3 (all registers).
    # The others by what ptxas keeps in registers (sm_90: 240 at d256, no spills).
    "nvidia": (
        BackwardEntry(SimtShape(64, 64, 16, 8, 16, 16, True), (192, 128)),
        BackwardEntry(SimtShape(64, 64, 16, 8, 16, 8, True), (192, 160)),
        BackwardEntry(SimtShape(64, 64, 16, 8, 16, 16, False), (128, 128)),
        BackwardEntry(SimtShape(32, 128, 16, 8, 16, 16, False), (128, 80)),
        BackwardEntry(SimtShape(64, 64, 16, 16, 16, 16, True), (160, 160)),
        BackwardEntry(SimtShape(64, 64, 16, 16, 16, 16, False), (160, 160)),
        BackwardEntry(SimtShape(64, 64, 16, 16, 8, 8, False), (160, 160)),
    ),
}
"""What goes before `BACKWARD` on a vendor's devices where dQ is added up."""

_BUSY = 256
"""Threads that a multiprocessor should have: a shape with resident rows is taken only where so many fit."""


def choose_backward_shape(
    target: Target, inner: int, results: tuple[int, ...], sums: bool = False, modifiers: int = 0
) -> SimtShape:
    """Tiles of a backward kernel.

    Parameters
    ----------
    inner : int
        The wider of the head dimensions.
    results : tuple of int
        Columns of each gradient that the kernel makes.
    sums : bool
        It adds up dQ, too.
    modifiers : int
        Steps between scores and softmax.
    """
    own = SUMS if sums else OWN_BACKWARD
    small = target.software and target.backend in ("opencl", "webgpu")
    for entry in BACKWARD[6:] if small else (*own.get(target.vendor, ()), *BACKWARD):
        shape = narrowed(entry.shape, inner)
        held = shape.rows * (2 * shape.block_kv + sum(shape.value_cols(dim) for dim in results)) // shape.threads_x
        workgroups = max(_BUSY // shape.threads, 1) if shape.resident_q else 1
        fits = workgroups * shape.backward_bytes(inner, sums) <= target.max_shared_bytes
        fits = fits and shape.threads <= target.max_threads
        if fits and (held <= entry.accumulators[bool(modifiers)] or entry is BACKWARD[-1]):
            return shape
    raise KernelError(
        f"[flash_attention] expected a device with workgroups of 64 and 16 KiB of shared memory for gradients, got "
        f"{target.max_shared_bytes} bytes and {target.max_threads} on {target.name}; use another backend"
    )
