"""Target: what a device can do, resolved once, frozen, and passed down. It holds no handle."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class FragmentLayout:
    """Which element of a matrix a lane holds in which component of a fragment.

    Row and column are sums over the bits of the lane's and of the component's number: bit i of the lane adds
    ``lane_rows[i]`` and ``lane_cols[i]``, bit i of the component ``part_rows[i]`` and ``part_cols[i]``. A bit of the
    lane that adds nothing stands for a second copy of the matrix.
    """

    lane_rows: tuple[int, ...]
    lane_cols: tuple[int, ...]
    part_rows: tuple[int, ...]
    part_cols: tuple[int, ...]

    @property
    def lanes(self) -> int:
        """Lanes of a subgroup."""
        return 1 << len(self.lane_rows)

    @property
    def parts(self) -> int:
        """Components of a lane."""
        return 1 << len(self.part_rows)

    @property
    def lane_bits(self) -> tuple[tuple[int, int], ...]:
        """Row and column that each bit of the lane adds."""
        return tuple(zip(self.lane_rows, self.lane_cols, strict=True))

    @property
    def part_bits(self) -> tuple[tuple[int, int], ...]:
        """Row and column that each bit of the component adds."""
        return tuple(zip(self.part_rows, self.part_cols, strict=True))

    @property
    def transposed(self) -> FragmentLayout:
        """The same of the transpose."""
        return FragmentLayout(self.lane_cols, self.lane_rows, self.part_cols, self.part_rows)

    def place(self, lane: int, part: int) -> tuple[int, int]:
        """Row and column of an element."""
        bits = [bit for i, bit in enumerate(self.lane_bits) if lane >> i & 1]
        bits += [bit for i, bit in enumerate(self.part_bits) if part >> i & 1]
        return sum(row for row, _ in bits), sum(col for _, col in bits)


NVIDIA_LAYOUT = FragmentLayout((0, 0, 1, 2, 4), (2, 4, 0, 0, 0), (0, 8, 0), (1, 0, 8))
"""Of mma.sync, and so of fragments in PTX: accumulators, and left factors alike."""

WARPGROUP_UNITS = ("m64n256k16:f16:f32", "m64n256k16:bf16:f32")
"""Products of four subgroups (wgmma), among the matrix units of those NVIDIA GPUs that have them."""

APPLE_LAYOUT = FragmentLayout((0, 1, 2, 0, 4), (2, 0, 0, 4, 0), (0, 0, 8), (1, 8, 0))
"""Of fragments in MSL, four blocks of 8x8. Apple does not document it: code is shown with it, but a device is asked."""

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
"""Of AMD's v_wmma by lanes of a wave: accumulators, left and right factors (RDNA 3 ISA guide, 7.9). Factors are there
once in every 16 lanes. For compilers without a device; a device is asked."""


@dataclass(frozen=True)
class Target:
    """Capabilities of one device, as kernels and renderers need them.

    A Target can be made by hand to compile for hardware that is not present.
    """

    backend: str
    """``cuda``, ``vulkan``, ``opencl``, ``webgpu``, ``metal``, ``cpu`` or ``numpy``."""
    name: str = "generic"
    """The driver's name of the device."""
    vendor: str = "unknown"
    """``nvidia``, ``amd``, ``intel``, ``apple``, ``software`` or ``unknown``."""
    driver: str = ""
    """The driver's own version text; part of the cache key."""
    arch: str = ""
    """Instruction set where the language needs one: ``sm_90`` for PTX, empty elsewhere."""
    software: bool = False
    """True for a software rasteriser: never preferred over the CPU."""
    subgroup_size: int = 0
    """Lanes that run together and can shuffle; 0 when the device offers no subgroup operations."""
    subgroup_sizes: tuple[int, ...] = ()
    """Sizes that a kernel may require explicitly (empty: only ``subgroup_size``, not controllable)."""
    max_threads: int = 256
    """Largest workgroup, in threads."""
    max_shared_bytes: int = 16384
    """Shared (workgroup) memory one workgroup may use."""
    max_grid: tuple[int, int, int] = (65535, 65535, 65535)
    """Largest number of workgroups along each axis."""
    max_buffers: int = 8
    """Storage buffers one kernel may bind."""
    max_buffer_bytes: int = 1 << 30
    """Largest range of one buffer that a kernel can address."""
    offset_alignment: int = 256
    """Bytes to which an offset into a bound buffer must be aligned."""
    memory_bytes: int = 0
    """Device memory (host memory for a CPU); 0 when unknown."""
    cache_bytes: int = 0
    """Last-level cache of a CPU; 0 when unknown."""
    compute_units: int = 0
    """Multiprocessors, compute units or cores; 0 when unknown."""
    unified_memory: bool = False
    """Device memory is host memory."""
    f16: bool = False
    """fp16 arithmetic in registers."""
    f64: bool = False
    """fp64 arithmetic."""
    int64: bool = False
    """64-bit integers."""
    storage16: bool = False
    """16-bit elements in buffers can be read and written directly."""
    storage8: bool = False
    """8-bit elements in buffers can be read and written directly."""
    bf16: bool = False
    """bf16 conversion in hardware."""
    e4m3: bool = False
    """Conversion of four e4m3 numbers to fp16 in hardware."""
    device_fence: bool = False
    """Workgroups of a launch can order what they do to buffers: the language has fences of the whole device."""
    overlap: bool = False
    """A launch can begin while the one before ends, and wait for it in the kernel."""
    max_cluster: int = 1
    """Workgroups that can run together and read each other's shared memory."""
    matrix_units: tuple[str, ...] = ()
    """Matrix shapes that the device multiplies natively, as ``m16n16k16:f16:f32``; empty when none."""
    matrix_shape: tuple[int, int, int] = (16, 16, 16)
    """Rows, columns and depth of the product of fragments of which the layouts tell."""
    matrix_layout: FragmentLayout | None = None
    """How accumulators lie over a subgroup; None when it is not known."""
    matrix_right: FragmentLayout | None = None
    """How right factors lie over a subgroup, where a device was asked."""
    matrix_factors: tuple[FragmentLayout | None, FragmentLayout | None] | None = None
    """How left and right factors lie, each None when it is not known; None when left factors lie as accumulators do."""
    language_version: int = 0
    """Of the kernel language: 12, 13 for Vulkan 1.2, 1.3; 120, 300 for OpenCL C; 0 when it does not matter."""
    extensions: tuple[str, ...] = ()
    """Extensions that renderers use, by their official names."""

    @property
    def vulkan_on_nvidia(self) -> bool:
        """NVIDIA's GPU through its Vulkan driver, whose compiler has habits of its own."""
        return self.backend == "vulkan" and self.vendor == "nvidia"

    def to_dict(self) -> dict[str, object]:
        """Plain dictionary, for JSON."""
        return asdict(self)
