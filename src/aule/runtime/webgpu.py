"""The WebGPU runtime, through wgpu-py.

Kernels follow the *block* convention: storage buffers at bindings ``0..n-1`` of group 0, and all scalars in one uniform
buffer at binding ``n``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aule.artifact import Artifact
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    DeviceLostError,
    LaunchError,
    OutOfMemoryError,
)
from aule.runtime._pooled import Block, PooledDevice, claim_driver, size_class
from aule.runtime._quiet import without_lines
from aule.runtime._webgpu_target import FEATURES, read_target
from aule.runtime.base import Allocation, Arguments, Device, Grid, Program, as_bytes

_T = TypeVar("_T")

_BACKENDS = ("Vulkan", "Metal", "D3D12")
"""APIs under WebGPU, the preferred ones first if several reach the same device. OpenGL lacks compute features."""
_KINDS = {"DiscreteGPU": 0, "IntegratedGPU": 1, "CPU": 3}
_LIMITS = (
    "max-bindings-per-bind-group",
    "max-buffer-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-storage-size",
    "max-compute-workgroups-per-dimension",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
)
_CHUNK = 64 << 20
"""Copies go through staging memory in pieces of this many bytes."""
_POOL_LIMIT = 1 << 30
"""Freed bytes kept for reuse. WebGPU does not report a device's memory size; running out of memory empties the pool."""
_STAGING_LIMIT = 2 * _CHUNK
_BIND_GROUPS = 64
"""Bind groups cached per program. A model repeats its launches with few sets of buffers and scalars."""
_ENABLE_SUBGROUPS = re.compile(r"^[ \t]*enable[ \t]+subgroups[ \t]*;", re.MULTILINE)
_SUBGROUP_PROBE = """
@group(0) @binding(0) var<storage, read_write> size: array<u32>;
@compute @workgroup_size(128)
fn main(@builtin(subgroup_size) lanes: u32) { size[0] = lanes; }
"""


def devices() -> list[Device]:
    """List the WebGPU adapters over Vulkan, Metal or Direct3D 12: discrete GPUs first, software last.

    A GPU that several of these APIs reach is listed once.

    Raises
    ------
    BackendUnavailableError
        wgpu is missing, finds no adapter, or was started before a fork.
    """
    try:
        wgpu: Any = importlib.import_module("wgpu")
    except Exception as error:  # a wgpu whose native library is missing raises RuntimeError or OSError
        raise BackendUnavailableError(
            "webgpu", f'[webgpu] expected the package wgpu, got {error!r}; pip install "aule-attention[webgpu]"'
        ) from error
    claim_driver("webgpu")
    try:
        # Mesa's layer for the choice of a device looks for a Wayland display, and complains of headless machines.
        with without_lines(b"XDG_RUNTIME_DIR is invalid or not set"):
            adapters = list(wgpu.gpu.enumerate_adapters_sync())
    except Exception as error:
        raise BackendUnavailableError(
            "webgpu", f"[webgpu] expected a list of adapters, got {error}; check the GPU's driver"
        ) from error
    usable = [a for a in adapters if a.info["backend_type"] in _BACKENDS]
    if not usable:
        raise BackendUnavailableError(
            "webgpu",
            f"[webgpu] expected an adapter over {', '.join(_BACKENDS)}, got "
            f"{[a.info['backend_type'] for a in adapters] or 'none'}; install the GPU's Vulkan driver "
            "(or Mesa's lavapipe for the CPU: mesa-vulkan-drivers)",
        )
    best: dict[tuple[int, int], str] = {}
    for adapter in sorted(usable, key=lambda a: _BACKENDS.index(a.info["backend_type"])):
        best.setdefault(_identity(adapter), adapter.info["backend_type"])
    chosen = [a for a in usable if a.info["backend_type"] == best[_identity(a)]]
    chosen.sort(key=lambda a: _KINDS.get(a.info["adapter_type"], 2))
    return [WebGPUDevice(wgpu, adapter, index) for index, adapter in enumerate(chosen)]


def _identity(adapter: Any) -> tuple[int, int]:
    return int(adapter.info["vendor_id"]), int(adapter.info["device_id"])


class _Block(Block):
    """One GPUBuffer. ``serial`` identifies it in the keys of bind groups; an ``id()`` may be reused."""

    __slots__ = ("serial",)
    _serials = itertools.count()

    def __init__(self, buffer: Any, size: int) -> None:
        super().__init__(buffer, size)
        self.serial = next(self._serials)


class _Pipeline:
    """A compute pipeline and its most recent bind groups, each with its uniform buffer."""

    __slots__ = ("groups", "layout", "pipeline")

    def __init__(self, pipeline: Any, layout: Any) -> None:
        self.pipeline = pipeline
        self.layout = layout
        self.groups: OrderedDict[tuple[Any, ...], tuple[Any, Any]] = OrderedDict()


class WebGPUDevice(PooledDevice[_Block]):
    """One WebGPU device and its queue.

    wgpu-py's objects keep state in Python, so all use of shared ones happens under the device's lock.
    """

    def __init__(self, wgpu: Any, adapter: Any, index: int) -> None:
        largest = int(adapter.limits["max-buffer-size"]) & ~15
        super().__init__(read_target(wgpu, adapter), index, largest, _POOL_LIMIT)
        self._wgpu = wgpu
        self._adapter = adapter
        self._device: Any = None
        self._uniforms: dict[int, list[Any]] = {}
        self._staging: dict[int, list[Any]] = {}
        self._staging_bytes = 0
        self._fence: _Block | None = None
        self._timestamps: tuple[Any, Any, float] | None = None
        self._knows_enable_subgroups: bool | None = None
        self._measured_subgroup = 0

    def upload(self, allocation: Allocation, data: npt.NDArray[Any], offset: int = 0) -> None:
        self._check()
        self.check_copy(allocation, data, offset)
        flat = as_bytes(data)
        with self._lock, self._translated("upload", flat.nbytes):
            device = self._open()
            block = self._block(allocation)
            if flat.nbytes == 0:
                return
            end = offset + flat.nbytes
            # The queue writes 4-byte words. Words that the data fills only in part keep their other bytes, except for
            # bytes past the end of the allocation, which are unused.
            last = end & ~3
            for at in sorted({edge & ~3 for edge in (offset, end) if edge & 3}):
                word = np.zeros(4, np.uint8)
                if at < offset or end < min(at + 4, allocation.nbytes):
                    self._read(device, block, at, word)
                begin, stop = max(at, offset), min(at + 4, end)
                word[begin - at : stop - at] = flat[begin - offset : stop - offset]
                device.queue.write_buffer(block.buffer, at, word)
            begin = -(-offset // 4) * 4
            for at in range(begin, last, _CHUNK):
                if at > begin:
                    device.queue.submit([])  # releases the staging memory of the previous piece
                size = min(_CHUNK, last - at)
                self._with_memory(
                    device, functools.partial(device.queue.write_buffer, block.buffer, at, flat, at - offset, size)
                )

    def download(self, allocation: Allocation, out: npt.NDArray[Any], offset: int = 0) -> None:
        self._check()
        self.check_copy(allocation, out, offset, into=True)
        flat = as_bytes(out)
        with self._lock:
            device = self._open()
            block = self._block(allocation)
        if flat.nbytes == 0:
            self.synchronize()
            return
        with self._translated("download", flat.nbytes):
            for at in range(0, flat.nbytes, _CHUNK):
                self._read(device, block, offset + at, flat[at : at + _CHUNK])

    def load(self, artifact: Artifact) -> Program:
        self._check()
        target, wgpu = self.target, self._wgpu
        self.check_language(artifact, "wgsl")
        # naga does not check these, and the driver then misbehaves.
        for what, used, most in (
            ("threads in a workgroup", artifact.workgroup, target.max_threads),
            ("bytes of workgroup memory", artifact.shared_bytes, target.max_shared_bytes),
            ("storage buffers", len(artifact.buffers), target.max_buffers),
        ):
            if used > most:
                raise self.refused_error(artifact, f"it uses {used} {what}, the device has {most}")
        with self._lock:
            device = self._open()
            if artifact.uses_subgroups or artifact.subgroup_size:
                self._check_subgroups(device, artifact)
            text = artifact.text
            if _ENABLE_SUBGROUPS.search(text) and not self._accepts_enable_subgroups(device):
                text = _ENABLE_SUBGROUPS.sub("", text)
            kinds = ["read-only-storage" if p.access == "read" else "storage" for p in artifact.buffers]
            kinds += ["uniform"] if artifact.scalars else []
            try:
                handle = self._pipeline(device, text, artifact.entry, kinds)
            except (wgpu.GPUError, wgpu.GPUPipelineError) as error:
                if self._is_memory(error):
                    raise self._translate(error, f"loading '{artifact.entry}'", None) from error
                raise self.refused_error(artifact, f"{target.name} refused it", str(error)) from error
        return Program(self, artifact, handle)

    def launch(self, program: Program, grid: Grid, args: Arguments, stream: int | None = None) -> None:
        if stream is not None:
            raise LaunchError("[webgpu] expected stream=None, got a native stream; WebGPU devices have one queue")
        self._check()
        with self._lock, self._translated(f"launch of '{program.artifact.entry}'", None):
            device = self._open()
            group = self._bind(device, program, grid, args)
            if 0 in grid:
                return
            encoder = device.create_command_encoder()
            self._dispatch(encoder.begin_compute_pass(), program.handle, group, grid)
            device.queue.submit([encoder.finish()])

    def synchronize(self) -> None:
        self._check()
        with self._translated("synchronize", None):
            with self._lock:
                device = self._open()
            self._wait(device)

    def time_launch(self, program: Program, grid: Grid, args: Arguments) -> float:
        self.synchronize()
        with self._lock, self._translated(f"launch of '{program.artifact.entry}'", None):
            device = self._open()
            queries, resolved, period = self._timestamp_queries(device)
            if period:
                group = self._bind(device, program, grid, args)
                writes = {"query_set": queries, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
                encoder = device.create_command_encoder()
                self._dispatch(encoder.begin_compute_pass(timestamp_writes=writes), program.handle, group, grid)
                encoder.resolve_query_set(queries, 0, 2, resolved.buffer, 0)
                device.queue.submit([encoder.finish()])
                ticks = np.zeros(2, np.uint64)
                self._read(device, resolved, 0, ticks.view(np.uint8))
                return float(ticks[1] - ticks[0]) * period * 1e-9
        return super().time_launch(program, grid, args)

    def _open(self) -> Any:
        """Return the GPUDevice, opened on first use. The caller holds the lock."""
        self._check()
        if self._device is None:
            features, limits = self._adapter.features, self._adapter.limits
            try:
                self._device = self._adapter.request_device_sync(
                    label="aule",
                    required_features=[f for f in FEATURES if f in features],
                    required_limits={name: limits[name] for name in _LIMITS if name in limits},
                )
            except Exception as error:
                raise BackendUnavailableError(
                    "webgpu", f"[webgpu] expected a device on {self.target.name}, got {error}; check the driver"
                ) from error
        return self._device

    def _new_block(self, size: int, nbytes: int) -> _Block:
        usage = self._wgpu.BufferUsage
        flags = usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
        with self._translated("allocation", nbytes):
            return _Block(self._new_buffer(self._device, size, flags), size)

    def _destroy(self, block: _Block) -> None:
        block.buffer.destroy()  # takes effect once the work that uses it is done

    def _wait_idle(self) -> None:
        if self._device is not None:
            # The driver may be gone by now, and its memory with it.
            with contextlib.suppress(Exception):
                self._wait(self._device)

    def _release(self) -> None:
        for buffer in itertools.chain(*self._uniforms.values(), *self._staging.values()):
            buffer.destroy()
        self._uniforms.clear()
        self._staging.clear()
        self._staging_bytes = 0
        self._device = self._fence = self._timestamps = None

    def _with_memory(self, device: Any, action: Callable[[], _T]) -> _T:
        """Run a wgpu call; if it runs out of memory, empty the pools and try once more. The caller holds the lock."""
        try:
            return action()
        except self._wgpu.GPUError as error:
            if not self._is_memory(error) or not self._trim(device):
                raise
        return action()

    def _is_memory(self, error: Exception) -> bool:
        # wgpu-native 29 reports a failed allocation as a validation error with wgpu-core's text.
        return isinstance(error, self._wgpu.GPUOutOfMemoryError) or bool(
            re.search(r"not enough memory left|out of memory", str(error), re.IGNORECASE)
        )

    def _new_buffer(self, device: Any, size: int, usage: int) -> Any:
        return self._with_memory(device, lambda: device.create_buffer(size=size, usage=usage))

    def _trim(self, device: Any) -> bool:
        """Return pooled memory to the driver; True if there was any. The caller holds the lock."""
        staging = list(itertools.chain(*self._staging.values()))
        had = any(self._pool.values()) or bool(staging)
        self._empty_pool()
        for buffer in staging:
            buffer.destroy()
        self._staging.clear()
        self._staging_bytes = 0
        if not had:
            return False
        # The driver frees memory once the work that uses it is done.
        self._wait(device)
        return True

    def _read(self, device: Any, block: _Block, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy bytes out of a buffer through mapped staging memory, and wait for them."""
        first = start & ~3
        size = -(-(start + out.nbytes) // 4) * 4 - first
        capacity = max(size_class(size), 4096)
        with self._lock:
            pooled = self._staging.get(capacity)
            if pooled:
                staging = pooled.pop()
                self._staging_bytes -= capacity
            else:
                usage = self._wgpu.BufferUsage
                staging = self._new_buffer(device, capacity, usage.MAP_READ | usage.COPY_DST)
            encoder = device.create_command_encoder()
            encoder.copy_buffer_to_buffer(block.buffer, first, staging, 0, size)
            device.queue.submit([encoder.finish()])
        try:
            staging.map_sync("READ", 0, size)
            mapped = np.frombuffer(staging.read_mapped(0, size, copy=False), np.uint8)
            out[:] = mapped[start - first : start - first + out.nbytes]
            del mapped  # a view must not outlive the mapping
            staging.unmap()
        except BaseException:
            staging.destroy()
            raise
        with self._lock:
            if not self._closed and self._staging_bytes + capacity <= _STAGING_LIMIT:
                self._staging.setdefault(capacity, []).append(staging)
                self._staging_bytes += capacity
            else:
                staging.destroy()

    def _wait(self, device: Any) -> None:
        """Wait for all submitted work, by reading back a word that the queue copies after it."""
        # on_submitted_work_done would do this, but wgpu-py 0.32 declares its callback wrongly and raises.
        with self._lock:
            if self._fence is None:
                usage = self._wgpu.BufferUsage
                self._fence = _Block(device.create_buffer(size=16, usage=usage.COPY_SRC), 16)
            fence = self._fence
        self._read(device, fence, 0, np.empty(4, np.uint8))

    def _pipeline(self, device: Any, text: str, entry: str, kinds: Sequence[str]) -> _Pipeline:
        module = device.create_shader_module(label=entry, code=text)
        visible = self._wgpu.ShaderStage.COMPUTE
        entries = [{"binding": i, "visibility": visible, "buffer": {"type": kind}} for i, kind in enumerate(kinds)]
        layout = device.create_bind_group_layout(entries=entries)
        pipeline = device.create_compute_pipeline(
            layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
            compute={"module": module, "entry_point": entry},
        )
        return _Pipeline(pipeline, layout)

    def _bind(self, device: Any, program: Program, grid: Grid, args: Arguments) -> Any:
        """Check a launch and return the bind group for its arguments, from an earlier launch if possible."""
        self.check_launch(program, grid, args)
        artifact = program.artifact
        buffers = [arg for arg in args if isinstance(arg, Allocation)]
        scalars = [arg for arg in args if not isinstance(arg, Allocation)]
        blocks = [self._block(buffer) for buffer in buffers]
        # Rounded up to vectors of four words, so that a kernel may read its last elements as a vector.
        ranges = [max(-(-buffer.nbytes // 16) * 16, 16) for buffer in buffers]
        try:
            packed = artifact.scalar_struct.pack(*scalars) if scalars else b""
        except (struct.error, OverflowError, TypeError) as error:
            raise self.argument_error(artifact, error) from None
        handle: _Pipeline = program.handle
        key = (packed, *(b.serial for b in blocks), *ranges)
        found = handle.groups.get(key)
        if found is not None:
            handle.groups.move_to_end(key)
            return found[0]
        self._check_bindings(artifact, blocks, ranges)
        while len(handle.groups) >= _BIND_GROUPS:
            _, (_, uniform) = handle.groups.popitem(last=False)
            if uniform is not None:
                self._uniforms.setdefault(uniform.size, []).append(uniform)
        bound = [(b.buffer, size) for b, size in zip(blocks, ranges, strict=True)]
        uniform = None
        if packed:
            uniform = self._uniform(device, packed)
            bound.append((uniform, len(packed)))
        group = device.create_bind_group(
            layout=handle.layout,
            entries=[
                {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": size}}
                for i, (buffer, size) in enumerate(bound)
            ],
        )
        handle.groups[key] = group, uniform
        return group

    def _check_bindings(self, artifact: Artifact, blocks: Sequence[_Block], ranges: Sequence[int]) -> None:
        uses = Counter(b.serial for b in blocks)
        for param, block, size in zip(artifact.buffers, blocks, ranges, strict=True):
            if uses[block.serial] > 1 and param.access != "read":
                aliases = [p.name for p, b in zip(artifact.buffers, blocks, strict=True) if b is block]
                raise LaunchError(
                    f"[webgpu] '{artifact.entry}' expected memory of its own for '{param.name}', which it writes, got "
                    f"one allocation for {', '.join(aliases)}; WebGPU forbids such aliases, pass a copy"
                )
            if size > self.target.max_buffer_bytes:
                raise LaunchError(
                    f"[webgpu] '{artifact.entry}' expected at most {self.target.max_buffer_bytes} bytes for "
                    f"'{param.name}', got {size}; {self.target.name} binds no more, split the batch"
                )

    def _uniform(self, device: Any, packed: bytes) -> Any:
        """Return a uniform buffer with these contents, if possible one that was evicted.

        Writes are ordered like launches, so a buffer can be rewritten while earlier launches that read it still run.
        """
        evicted = self._uniforms.get(len(packed))
        if evicted:
            buffer = evicted.pop()
        else:
            usage = self._wgpu.BufferUsage
            buffer = self._new_buffer(device, len(packed), usage.UNIFORM | usage.COPY_DST)
        device.queue.write_buffer(buffer, 0, packed)
        return buffer

    @staticmethod
    def _dispatch(compute_pass: Any, handle: _Pipeline, group: Any, grid: Grid) -> None:
        compute_pass.set_pipeline(handle.pipeline)
        compute_pass.set_bind_group(0, group)
        compute_pass.dispatch_workgroups(*grid)
        compute_pass.end()

    def _timestamp_queries(self, device: Any) -> tuple[Any, Any, float]:
        """Return a query set, a buffer for its values and the nanoseconds per tick; 0 without timestamps."""
        if self._timestamps is None:
            self._timestamps = (None, None, 0.0)
            if "timestamp-query" in device.features:
                # wgpu-native counts in ticks; wgpu-py 0.32 exposes their length only through the native library.
                with contextlib.suppress(Exception):
                    native: Any = importlib.import_module("wgpu.backends.wgpu_native")
                    period = float(native.lib.wgpuQueueGetTimestampPeriod(device.queue._internal))
                    usage = self._wgpu.BufferUsage
                    buffer = device.create_buffer(size=256, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
                    queries = device.create_query_set(type="timestamp", count=2)
                    self._timestamps = (queries, _Block(buffer, 256), period)
        return self._timestamps

    def _accepts_enable_subgroups(self, device: Any) -> bool:
        """Find out whether the compiler accepts ``enable subgroups;``.

        Standard WGSL requires the directive, but the naga in wgpu 0.32 supports the operations without it.
        """
        if self._knows_enable_subgroups is None:
            try:
                device.create_shader_module(code="enable subgroups;\n@compute @workgroup_size(1) fn main() {}")
                self._knows_enable_subgroups = True
            except self._wgpu.GPUError:
                self._knows_enable_subgroups = False
        return self._knows_enable_subgroups

    def _check_subgroups(self, device: Any, artifact: Artifact) -> None:
        """Check that the device's subgroup size is the kernel's; WebGPU cannot require one, so it is measured once."""
        wanted = artifact.subgroup_size or self.target.subgroup_size
        if not self.target.subgroup_size:
            raise self.refused_error(artifact, "it uses subgroups and the device's subgroup size is not known")
        if not self._measured_subgroup:
            with self._translated("measuring the subgroup size", None):
                probe = self._pipeline(device, _SUBGROUP_PROBE, "main", ["storage"])
                usage = self._wgpu.BufferUsage
                block = _Block(self._new_buffer(device, 256, usage.STORAGE | usage.COPY_SRC), 256)
                entry = {"binding": 0, "resource": {"buffer": block.buffer, "offset": 0, "size": 256}}
                group = device.create_bind_group(layout=probe.layout, entries=[entry])
                encoder = device.create_command_encoder()
                self._dispatch(encoder.begin_compute_pass(), probe, group, (1, 1, 1))
                device.queue.submit([encoder.finish()])
                size = np.zeros(1, np.uint32)
                self._read(device, block, 0, size.view(np.uint8))
                block.buffer.destroy()
                self._measured_subgroup = int(size[0])
        if self._measured_subgroup != wanted:
            raise self.refused_error(
                artifact, f"it wants subgroups of {wanted} lanes, the device has {self._measured_subgroup}"
            )

    @contextlib.contextmanager
    def _translated(self, what: str, nbytes: int | None) -> Iterator[None]:
        try:
            yield
        except AuleError:
            raise
        # wgpu-py raises GPUError for driver errors, RuntimeError for promises, ValueError for its own checks.
        except (self._wgpu.GPUError, self._wgpu.GPUPipelineError, RuntimeError, ValueError) as error:
            raise self._translate(error, what, nbytes) from error

    def _translate(self, error: Exception, what: str, nbytes: int | None) -> AuleError:
        name, text = self.target.name, str(error)
        if self._is_memory(error):
            return OutOfMemoryError(
                f"[webgpu] {what} ran out of memory on {name} ({text}); free tensors or split the batch", nbytes
            )
        if re.search(r"\bdevice (is |was )?lost\b", text, re.IGNORECASE):
            self._lost = f"[webgpu] {name} stopped answering ({what}: {text}); get a new device"
            return DeviceLostError(self._lost)
        return LaunchError(f"[webgpu] {what} failed on {name}: {text}")
