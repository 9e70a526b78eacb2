"""Target: a device's capabilities, resolved once, frozen and passed down. It holds no driver handle."""

from __future__ import annotations

from dataclasses import asdict, dataclass

_BEFORE_AMPERE = ("sm_60", "sm_61", "sm_62", "sm_70", "sm_72", "sm_75")


@dataclass(frozen=True)
class FragmentLayout:
    """Maps each lane and component of a fragment to a row and column of the matrix.

    Row and column are sums over the set bits of the lane number and the component number: bit i of the lane adds
    ``lane_rows[i]`` and ``lane_cols[i]``, bit i of the component ``part_rows[i]`` and ``part_cols[i]``. A lane bit
    that adds nothing means a second copy of the matrix.
    """

    lane_rows: tuple[int, ...]
    lane_cols: tuple[int, ...]
    part_rows: tuple[int, ...]
    part_cols: tuple[int, ...]

    @property
    def lanes(self) -> int:
        """Lanes per subgroup."""
        return 1 << len(self.lane_rows)

    @property
    def parts(self) -> int:
        """Components per lane."""
        return 1 << len(self.part_rows)

    @property
    def lane_bits(self) -> tuple[tuple[int, int], ...]:
        """(row, column) added by each bit of the lane number."""
        return tuple(zip(self.lane_rows, self.lane_cols, strict=True))

    @property
    def part_bits(self) -> tuple[tuple[int, int], ...]:
        """(row, column) added by each bit of the component number."""
        return tuple(zip(self.part_rows, self.part_cols, strict=True))

    @property
    def transposed(self) -> FragmentLayout:
        """Layout of the transposed matrix."""
        return FragmentLayout(self.lane_cols, self.lane_rows, self.part_cols, self.part_rows)

    def place(self, lane: int, part: int) -> tuple[int, int]:
        """Row and column of a lane's component."""
        bits = [bit for i, bit in enumerate(self.lane_bits) if lane >> i & 1]
        bits += [bit for i, bit in enumerate(self.part_bits) if part >> i & 1]
        return sum(row for row, _ in bits), sum(col for _, col in bits)


NVIDIA_LAYOUT = FragmentLayout((0, 0, 1, 2, 4), (2, 4, 0, 0, 0), (0, 8, 0), (1, 0, 8))
"""Layout of mma.sync accumulators and left factors, used by fragments in PTX."""

WARPGROUP_UNITS = ("m64n256k16:f16:f32", "m64n256k16:bf16:f32")
"""Entries of ``matrix_units`` for products of four subgroups (wgmma)."""

APPLE_LAYOUT = FragmentLayout((0, 1, 2, 0, 4), (2, 0, 0, 4, 0), (0, 0, 8), (1, 8, 0))
"""Layout of fragments in MSL: four 8x8 blocks. Apple does not document it; real devices are probed instead."""

RDNA3_LAYOUTS: dict[int, tuple[FragmentLayout, FragmentLayout, FragmentLayout]] = {
    32: (
        FragmentLayout((0, 0, 0, 0, 1), (1, 2, 4, 8, 0), (2, 4, 8), (0, 0, 0)),
        FragmentLayout((1, 2, 4, 8, 0), (0, 0, 0, 0, 0), (0, 0, 0, 0), (1, 2, 4, 8)),
        FragmentLayout((0, 0, 0, 0, 0), (1, 2, 4, 8, 0), (1, 2, 4, 8), (0, 0, 0, 0)),
    ),
    64: (
        FragmentLayout((0, 0, 0, 0, 1, 2), (1, 2, 4, 8, 0, 0), (4, 8), (0, 0)),
        FragmentLayout((1, 2, 4, 8, 0, 0), (0, 0, 0, 0, 0, 0), (0, 0, 0, 0), (1, 2, 4, 8)),
        FragmentLayout((0, 0, 0, 0, 0, 0), (1, 2, 4, 8, 0, 0), (1, 2, 4, 8), (0, 0, 0, 0)),
    ),
}
"""Layouts of v_wmma by wave size: accumulator, left factor, right factor (RDNA 3 ISA guide, 7.9; docs/lab/hip.md).

Every 16 lanes hold a full copy of a factor. Used when compiling without a device; real devices are probed instead."""

RDNA4_LAYOUTS = (
    FragmentLayout((0, 0, 0, 0, 8), (1, 2, 4, 8, 0), (1, 2, 4), (0, 0, 0)),
    FragmentLayout((1, 2, 4, 8, 0), (0, 0, 0, 0, 8), (0, 0, 0), (1, 2, 4)),
    FragmentLayout((0, 0, 0, 0, 8), (1, 2, 4, 8, 0), (1, 2, 4), (0, 0, 0)),
)
"""As `RDNA3_LAYOUTS`, for the v_wmma of RDNA 4 in waves of 32, whose factors have no copies."""

CDNA_LAYOUTS = (
    FragmentLayout((0, 0, 0, 0, 4, 8), (1, 2, 4, 8, 0, 0), (1, 2), (0, 0)),
    FragmentLayout((1, 2, 4, 8, 0, 0), (0, 0, 0, 0, 4, 8), (0, 0), (1, 2)),
    FragmentLayout((0, 0, 0, 0, 4, 8), (1, 2, 4, 8, 0, 0), (1, 2), (0, 0)),
)
"""The same for v_mfma_f32_16x16x16 (CDNA ISA guides)."""


@dataclass(frozen=True)
class Target:
    """Capabilities of one device that kernels and renderers depend on.

    Construct one by hand to compile for hardware that is not present.
    """

    backend: str
    """``cuda``, ``hip``, ``vulkan``, ``opencl``, ``webgpu``, ``metal``, ``cpu`` or ``numpy``."""
    name: str = "generic"
    """Device name reported by the driver."""
    vendor: str = "unknown"
    """``nvidia``, ``amd``, ``intel``, ``apple``, ``software`` or ``unknown``."""
    driver: str = ""
    """Version text reported by the driver; part of the cache key."""
    arch: str = ""
    """Instruction set, if the language needs one (``sm_90`` for PTX, ``gfx942`` for HIP); else empty."""
    software: bool = False
    """True for a software rasteriser: never preferred over the CPU."""
    subgroup_size: int = 0
    """Lanes per subgroup (warp, wave, simdgroup); 0 if the device has no subgroup operations."""
    subgroup_sizes: tuple[int, ...] = ()
    """Subgroup sizes a kernel may request; empty if the size cannot be chosen."""
    max_threads: int = 256
    """Maximum threads per workgroup."""
    max_shared_bytes: int = 16384
    """Maximum shared memory per workgroup, in bytes."""
    max_grid: tuple[int, int, int] = (65535, 65535, 65535)
    """Maximum workgroups along each axis."""
    max_buffers: int = 8
    """Maximum storage buffers per kernel."""
    max_buffer_bytes: int = 1 << 30
    """Maximum bytes of one buffer that a kernel can address."""
    offset_alignment: int = 256
    """Required alignment, in bytes, of an offset into a bound buffer."""
    memory_bytes: int = 0
    """Device memory (host memory for a CPU), in bytes; 0 if unknown."""
    cache_bytes: int = 0
    """Last-level cache of a CPU, in bytes; 0 if unknown."""
    l2_bytes: int = 0
    """Second-level cache of a GPU, in bytes; 0 if unknown."""
    compute_units: int = 0
    """Multiprocessors, compute units or cores; 0 if unknown."""
    shared_per_unit: int = 0
    """Shared memory of a compute unit, in bytes; 0 if unknown."""
    registers_per_unit: int = 0
    """32-bit registers of a compute unit; 0 if unknown."""
    unified_memory: bool = False
    """Device and host share one memory."""
    f16: bool = False
    """fp16 arithmetic in registers."""
    f64: bool = False
    """fp64 arithmetic."""
    int64: bool = False
    """64-bit integer arithmetic."""
    storage16: bool = False
    """Kernels can read and write 16-bit buffer elements directly."""
    storage8: bool = False
    """Kernels can read and write 8-bit buffer elements directly."""
    bf16: bool = False
    """bf16 conversion in hardware."""
    e4m3: bool = False
    """e4m3 to fp16 conversion in hardware."""
    device_fence: bool = False
    """The language has device-wide memory fences, which order buffer accesses between workgroups of a launch."""
    atomic_f32_add: bool = False
    """Atomic fp32 addition in buffers."""
    overlap: bool = False
    """A launch can start before the previous one has finished and wait for it inside the kernel (``launch_await``)."""
    max_cluster: int = 1
    """Maximum workgroups per cluster, which run at the same time and can access each other's shared memory."""
    tensor_maps: bool = False
    """One thread can copy boxes of a tensor to shared memory (``tensor_copy``), and the driver encodes tensor maps."""
    matrix_units: tuple[str, ...] = ()
    """Matrix products in hardware, as ``m16n16k16:f16:f32`` (shape, factors, accumulator); empty if none."""
    matrix_shape: tuple[int, int, int] = (16, 16, 16)
    """Rows, columns and depth of the fragment product that the layouts below describe."""
    matrix_layout: FragmentLayout | None = None
    """Layout of accumulators over a subgroup; None if unknown."""
    matrix_right: FragmentLayout | None = None
    """Layout of right factors over a subgroup; None if the device was not probed."""
    matrix_factors: tuple[FragmentLayout | None, FragmentLayout | None] | None = None
    """Layouts of left and right factors, each None if unknown; None if left factors use the accumulator layout."""
    language_version: int = 0
    """Version of the kernel language: 12, 13 for Vulkan 1.2, 1.3; 120, 300 for OpenCL C; 0 if it does not matter."""
    extensions: tuple[str, ...] = ()
    """Language extensions and device features that renderers may use, by their official names."""

    @property
    def vulkan_on_nvidia(self) -> bool:
        """True for NVIDIA's Vulkan driver, whose compiler needs workarounds."""
        return self.backend == "vulkan" and self.vendor == "nvidia"

    @property
    def host(self) -> bool:
        """True for the processor that runs Python: kernels are its machine code, and arrays are in host memory."""
        return self.backend == "cpu"

    @property
    def sure_subgroup(self) -> int:
        """Smallest subgroup size of a kernel that does not request one.

        Intel's compilers choose a size for each kernel, at least 8.
        """
        return min(self.subgroup_size, 8) if self.vendor == "intel" else self.subgroup_size

    @property
    def subgroup_barriers(self) -> bool:
        """The language has subgroup barriers and allows branches around them; WGSL does not."""
        return self.backend != "webgpu"

    @property
    def async_copies(self) -> bool:
        """Copies to shared memory bypass the registers (cp.async, from sm_80 on)."""
        return self.backend == "cuda" and self.arch not in _BEFORE_AMPERE

    @property
    def compares_pairs(self) -> bool:
        """One instruction compares two 16-bit floats (from sm_80 on)."""
        return self.backend == "cuda" and self.arch not in _BEFORE_AMPERE

    @property
    def converts_factors(self) -> bool:
        """One instruction rounds two fp32 numbers to matrix factors."""
        return self.backend == "cuda"

    @property
    def exact_fma(self) -> bool:
        """Multiply-add is guaranteed to round once."""
        if self.host:
            return "fma" in self.extensions or self.arch == "aarch64"
        return self.backend in ("cuda", "hip") or self.vulkan_on_nvidia

    @property
    def vector_registers(self) -> tuple[int, int]:
        """Bytes of a CPU's vector register, and the number of registers."""
        if "avx512f" in self.extensions:
            return 64, 32
        if "avx2" in self.extensions:
            return 32, 16
        return 16, 32 if self.arch == "aarch64" else 16

    @property
    def multiplies_pairs(self) -> bool:
        """A CPU's instruction multiplies pairs of bf16 and adds both products to an fp32 number."""
        return {"avx512bf16", "avx512dq", "avx512vl"} <= set(self.extensions)

    @property
    def atomic_f32_width(self) -> int:
        """Consecutive fp32 numbers per atomic addition: four from sm_90 on."""
        return 4 if self.backend == "cuda" and int(self.arch.removeprefix("sm_").rstrip("af") or 0) >= 90 else 1

    @property
    def composed_units(self) -> tuple[str, ...]:
        """Shapes of matrix units from which the renderer composes fragments of 16 x 16."""
        return {"cuda": ("m16n8k16", "m16n8k8"), "metal": ("m8n8k8",)}.get(self.backend, ())

    @property
    def ends_with_barrier(self) -> bool:
        """Kernels must end with a barrier.

        PoCL 3.1 assumes that the last condition of a kernel is uniform unless a barrier follows.
        """
        return self.backend == "opencl"

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a plain dictionary, for JSON."""
        return asdict(self)
