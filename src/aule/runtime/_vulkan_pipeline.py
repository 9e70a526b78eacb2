"""Vulkan compute pipelines: SPIR-V checks, layouts with descriptor sets, the pipeline cache, and statistics."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from aule import settings, store
from aule.artifact import Artifact, scalar_offsets
from aule.errors import AuleError, DeviceLostError, OutOfMemoryError, ShaderCompileError
from aule.runtime import _vulkan_api as api
from aule.runtime._refused import save_refused
from aule.runtime._vulkan_loader import enumerate_all, log, validation_messages
from aule.runtime._vulkan_memory import Block
from aule.runtime._vulkan_queue import PARAMETER_BYTES, SLOTS
from aule.runtime._vulkan_target import Facts

_SPIRV_MAGIC = 0x07230203
_OP_ENTRY_POINT, _OP_FUNCTION, _OP_FUNCTION_END = 15, 54, 56
_GL_COMPUTE = 5


def spirv_fault(code: bytes, entry: str) -> str:
    """Check the form of a SPIR-V module; return what is wrong with it, or an empty string.

    Drivers trust their input: several crash on data that is not SPIR-V. The driver may still refuse a module that
    passes.
    """
    if len(code) % 4 or len(code) < 20:
        return f"expected whole words and a header of five, got {len(code)} bytes"
    words = memoryview(code).cast("I")
    if words[0] != _SPIRV_MAGIC:
        return f"expected the magic number {_SPIRV_MAGIC:#x}, got {words[0]:#x}"
    position, entries, depth = 5, [], 0
    while position < len(words):
        count, opcode = words[position] >> 16, words[position] & 0xFFFF
        if count == 0 or position + count > len(words):
            return f"instruction at word {position} (opcode {opcode}) claims {count} words of {len(words) - position}"
        if opcode == _OP_ENTRY_POINT and count > 3 and words[position + 1] == _GL_COMPUTE:
            name = bytes(words[position + 3 : position + count])
            entries.append(name.split(b"\0")[0].decode(errors="replace"))
        depth += (opcode == _OP_FUNCTION) - (opcode == _OP_FUNCTION_END)
        position += count
    if depth:
        return "a function has no end"
    return "" if entry in entries else f"expected a compute entry point {entry!r}, got {entries}"


class Layout:
    """A pipeline layout for ``buffers`` storage buffers and optionally scalars, with one descriptor set per slot."""

    def __init__(self, vk: Any, device: Any, buffers: int, has_block: bool) -> None:
        self._vk, self._device = vk, device
        self.buffers, self.has_block = buffers, has_block
        self.set_layout, self.pipeline_layout, self._pool = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        self.sets: Any = (ctypes.c_uint64 * SLOTS)()
        """One descriptor set per slot, empty for a kernel without parameters."""
        self._infos = (api.VkDescriptorBufferInfo * max(buffers, 1))()
        self._write = api.VkWriteDescriptorSet(
            descriptorCount=buffers, descriptorType=api.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, pBufferInfo=self._infos
        )
        try:
            self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        vk, device, count = self._vk, self._device, self.buffers + self.has_block
        storage, uniform = api.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, api.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER
        bindings = (api.VkDescriptorSetLayoutBinding * max(count, 1))()
        for i in range(count):
            bindings[i].binding = i
            bindings[i].descriptorType = storage if i < self.buffers else uniform
            bindings[i].descriptorCount = 1
            bindings[i].stageFlags = api.VK_SHADER_STAGE_COMPUTE_BIT
        info = api.VkDescriptorSetLayoutCreateInfo(bindingCount=count, pBindings=bindings)
        vk.vkCreateDescriptorSetLayout(device, ctypes.byref(info), None, ctypes.byref(self.set_layout))
        pipeline = api.VkPipelineLayoutCreateInfo(setLayoutCount=1, pSetLayouts=ctypes.pointer(self.set_layout))
        vk.vkCreatePipelineLayout(device, ctypes.byref(pipeline), None, ctypes.byref(self.pipeline_layout))

    def create_sets(self, parameters: Block) -> None:
        """Create the descriptor sets, before the first launch."""
        if self._pool:
            return
        vk, device = self._vk, self._device
        sizes = (api.VkDescriptorPoolSize * 2)()
        sizes[0].type, sizes[0].descriptorCount = api.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, max(self.buffers, 1) * SLOTS
        sizes[1].type, sizes[1].descriptorCount = api.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER, SLOTS
        info = api.VkDescriptorPoolCreateInfo(maxSets=SLOTS, poolSizeCount=2, pPoolSizes=sizes)
        pool = ctypes.c_uint64()
        vk.vkCreateDescriptorPool(device, ctypes.byref(info), None, ctypes.byref(pool))
        layouts = (ctypes.c_uint64 * SLOTS)(*[self.set_layout.value] * SLOTS)
        allocate = api.VkDescriptorSetAllocateInfo(descriptorPool=pool, descriptorSetCount=SLOTS, pSetLayouts=layouts)
        try:
            vk.vkAllocateDescriptorSets(device, ctypes.byref(allocate), self.sets)
        except BaseException:
            vk.vkDestroyDescriptorPool(device, pool, None)
            raise
        self._pool = pool
        if self.has_block:
            for slot in range(SLOTS):
                # A slot's scalars stay at the same place, so their descriptor is written once.
                scalars = api.VkDescriptorBufferInfo(
                    buffer=parameters.buffer, offset=slot * PARAMETER_BYTES, range=PARAMETER_BYTES
                )
                write = api.VkWriteDescriptorSet(
                    dstSet=self.sets[slot],
                    dstBinding=self.buffers,
                    descriptorCount=1,
                    descriptorType=api.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER,
                    pBufferInfo=ctypes.pointer(scalars),
                )
                vk.vkUpdateDescriptorSets(device, 1, ctypes.byref(write), 0, None)

    def bind(self, slot: int, keys: list[tuple[int, int, int]]) -> None:
        """Write buffers, each a (buffer, offset, size), into a slot's descriptor set."""
        if keys:
            for info, key in zip(self._infos, keys, strict=True):
                info.buffer, info.offset, info.range = key
            self._write.dstSet = self.sets[slot]
            # One write covers consecutive bindings of the same type.
            self._vk.vkUpdateDescriptorSets(self._device, 1, ctypes.byref(self._write), 0, None)

    def close(self) -> None:
        self._vk.vkDestroyDescriptorPool(self._device, self._pool, None)
        self._vk.vkDestroyPipelineLayout(self._device, self.pipeline_layout, None)
        self._vk.vkDestroyDescriptorSetLayout(self._device, self.set_layout, None)


class Pipeline:
    """A compiled kernel; the `Program.handle` of this runtime."""

    __slots__ = ("_garbage", "buffers", "handle", "last_use", "layout", "names", "pack", "scalars")

    def __init__(self, handle: int, layout: Layout, artifact: Artifact, garbage: deque[tuple[int, int]]) -> None:
        self.handle = handle
        self.layout = layout
        self.names = tuple(p.name for p in artifact.params)
        self.buffers = tuple(i for i, p in enumerate(artifact.params) if p.kind == "buffer")
        self.scalars = tuple(i for i, p in enumerate(artifact.params) if p.kind == "scalar")
        self.pack = artifact.scalar_struct.pack_into
        self.last_use = 0
        self._garbage = garbage

    def __del__(self) -> None:
        # A finaliser may run in the middle of anything, so it only queues the pipeline for destruction.
        self._garbage.append((self.handle, self.last_use))


class Pipelines:
    """All pipelines of an open device, their layouts and their cache. The caller holds the device's lock."""

    def __init__(self, vk: Any, device: Any, facts: Facts) -> None:
        self._vk, self._device, self._facts = vk, device, facts
        self._layouts: dict[tuple[int, bool], Layout] = {}
        self._live: set[int] = set()
        self.garbage: deque[tuple[int, int]] = deque()
        """Unused pipelines as (pipeline, last use); any thread may append without the lock."""
        self._cache = ctypes.c_uint64()
        self._saved = b""
        p = facts.properties
        self._file = f"vulkan/{p.vendorID:04x}-{p.deviceID:04x}-{bytes(p.pipelineCacheUUID).hex()}.bin"
        self._create_cache()

    def _create_cache(self) -> None:
        data = store.read(self._file) or b""
        if not self._cache_fits(data):
            data = b""
        info = api.VkPipelineCacheCreateInfo(
            initialDataSize=len(data), pInitialData=ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)
        )
        self._vk.vkCreatePipelineCache(self._device, ctypes.byref(info), None, ctypes.byref(self._cache))
        self._saved = data

    def _cache_fits(self, data: bytes) -> bool:
        """Check that cached data came from this driver and device; some drivers do not check it themselves."""
        properties = self._facts.properties
        expected = struct.pack(
            "<III", api.VK_PIPELINE_CACHE_HEADER_VERSION_ONE, properties.vendorID, properties.deviceID
        ) + bytes(properties.pipelineCacheUUID)
        return len(data) >= 32 and struct.unpack_from("<I", data)[0] == 32 and data[4:32] == expected

    def cache_data(self) -> bytes:
        """Return the driver's pipeline cache."""
        size = ctypes.c_size_t()
        self._vk.vkGetPipelineCacheData(self._device, self._cache, ctypes.byref(size), None)
        data = ctypes.create_string_buffer(max(size.value, 1))
        self._vk.vkGetPipelineCacheData(self._device, self._cache, ctypes.byref(size), data)
        return data.raw[: size.value]

    def save_cache(self) -> None:
        """Write the cache to disk if it changed. A failed write is only logged."""
        try:
            if not settings.disk_cache():
                return
            data = self.cache_data()
            if data != self._saved and self._cache_fits(data):
                store.write(self._file, data)
                self._saved = data
        except AuleError as error:
            log.debug("pipeline cache not saved: %s", error)

    def layout(self, artifact: Artifact) -> Layout:
        """Return the layout for a kernel's parameters. Kernels with equal parameter counts share one."""
        key = (len(artifact.buffers), bool(artifact.scalars))
        if key not in self._layouts:
            self._layouts[key] = Layout(self._vk, self._device, *key)
        return self._layouts[key]

    def load(self, artifact: Artifact) -> Pipeline:
        """Compile a kernel; raises `ShaderCompileError`."""
        self._check(artifact)
        layout = self.layout(artifact)
        handle = self._compile(artifact, layout, flags=0)
        self._live.add(handle)
        return Pipeline(handle, layout, artifact, self.garbage)

    def _check(self, artifact: Artifact) -> None:
        """Check what drivers leave to the validation layer and would otherwise crash or miscompute on."""
        target = self._facts.target
        fault = spirv_fault(artifact.code, artifact.entry)
        if fault:
            self._refuse(artifact, fault, "the words are not a SPIR-V kernel")
        for what, need, limit in (
            ("threads in a workgroup", artifact.workgroup, target.max_threads),
            ("bytes of shared memory", artifact.shared_bytes, target.max_shared_bytes),
            ("storage buffers", len(artifact.buffers), target.max_buffers),
            ("bytes of scalars", scalar_offsets(artifact.scalars)[1], PARAMETER_BYTES),
        ):
            if need > limit:
                self._refuse(artifact, "", f"expected at most {limit} {what}, got {need}; use a smaller configuration")
        size = artifact.subgroup_size
        if size and size != target.subgroup_size and size not in target.subgroup_sizes:
            offered = target.subgroup_sizes or (target.subgroup_size,)
            self._refuse(artifact, "", f"expected a subgroup size of {offered}, got {size}; build for this target")
        if artifact.uses_subgroups and not target.subgroup_size:
            self._refuse(artifact, "", "the kernel uses subgroup operations, which the device does not offer")

    def _compile(self, artifact: Artifact, layout: Layout, flags: int) -> int:
        vk, device, module, pipeline = self._vk, self._device, ctypes.c_uint64(), ctypes.c_uint64()
        messages_before = len(validation_messages())
        code = (ctypes.c_uint32 * (len(artifact.code) // 4)).from_buffer_copy(artifact.code)
        try:
            module_info = api.VkShaderModuleCreateInfo(codeSize=len(artifact.code), pCode=code)
            vk.vkCreateShaderModule(device, ctypes.byref(module_info), None, ctypes.byref(module))
            stage = api.VkPipelineShaderStageCreateInfo(
                stage=api.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName=artifact.entry.encode()
            )
            self._control_subgroups(artifact, stage)
            robustness = self._robustness_off()
            info = api.VkComputePipelineCreateInfo(
                pNext=None if robustness is None else ctypes.addressof(robustness),
                flags=flags,
                stage=stage,
                layout=layout.pipeline_layout,
                basePipelineIndex=-1,
            )
            # A build for statistics must neither come from the cache nor fill it.
            cache = ctypes.c_uint64() if flags else self._cache
            vk.vkCreateComputePipelines(device, cache, 1, ctypes.byref(info), None, ctypes.byref(pipeline))
        except (DeviceLostError, OutOfMemoryError):
            raise
        except AuleError as error:
            messages = "\n".join([error.message, *validation_messages()[messages_before:]])
            self._refuse(artifact, messages, f"the driver refused it ({error.message})")
        finally:
            if module:
                vk.vkDestroyShaderModule(device, module, None)
        return pipeline.value

    def _robustness_off(self) -> Any:
        """Return the struct that turns the driver's bounds checks off; None if the driver has no such option.

        Kernels stay in bounds themselves. NVIDIA's driver checks every buffer address without this struct, even though
        robustBufferAccess is off.
        """
        if "pipelineRobustness" not in self._facts.features:
            return None
        off = api.VK_PIPELINE_ROBUSTNESS_BUFFER_BEHAVIOR_DISABLED_EXT
        return api.VkPipelineRobustnessCreateInfoEXT(
            storageBuffers=off,
            uniformBuffers=off,
            vertexInputs=off,
            images=api.VK_PIPELINE_ROBUSTNESS_IMAGE_BEHAVIOR_DISABLED_EXT,
        )

    def _control_subgroups(self, artifact: Artifact, stage: Any) -> None:
        """Require the subgroup size the kernel was built for, and full subgroups if the kernel uses subgroups."""
        facts, size = self._facts, artifact.subgroup_size
        if size in facts.target.subgroup_sizes and artifact.workgroup <= size * facts.max_workgroup_subgroups:
            required = api.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo(requiredSubgroupSize=size)
            stage.pNext = ctypes.addressof(required)
            stage.required = required
        else:
            size = facts.target.subgroup_size
        full = "computeFullSubgroups" in facts.features and size and artifact.workgroup % size == 0
        if artifact.uses_subgroups and full:
            stage.flags = api.VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT

    def _refuse(self, artifact: Artifact, driver_log: str, why: str) -> NoReturn:
        message = f"[vulkan] kernel {artifact.entry!r} on {self._facts.target.name}: {why}"
        path = save_refused("spirv", artifact.code)
        saved = "" if path is None else f"; the code was saved to {path}"
        raise ShaderCompileError(f"{message}{saved}", log=driver_log, source_path=path)

    def statistics(self, artifact: Artifact) -> dict[str, int | float | bool]:
        """Return the driver's statistics of a kernel's machine code, under the driver's names."""
        vk, found = self._vk, dict[str, int | float | bool]()
        # Collecting statistics can bypass the cache and slow the driver down, so a second build does it.
        for executable, one in self._executables(artifact, api.VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR):
            found.setdefault("Subgroup Size", executable.subgroupSize)
            ask = partial(vk.vkGetPipelineExecutableStatisticsKHR, self._device, ctypes.byref(one))
            for s in enumerate_all(ask, api.VkPipelineExecutableStatisticKHR):
                found.setdefault(s.name.decode(errors="replace"), _statistic(s))
        return found

    def representations(self, artifact: Artifact) -> dict[str, str]:
        """Return a kernel's texts in the driver, from its intermediate code to assembly, under the driver's names."""
        vk, found = self._vk, dict[str, str]()
        type_ = api.VkPipelineExecutableInternalRepresentationKHR
        for _, one in self._executables(artifact, api.VK_PIPELINE_CREATE_CAPTURE_INTERNAL_REPRESENTATIONS_BIT_KHR):
            ask = partial(vk.vkGetPipelineExecutableInternalRepresentationsKHR, self._device, ctypes.byref(one))
            texts = [r for r in enumerate_all(ask, type_) if r.isText]
            if not texts:
                continue
            items = (type_ * len(texts))(*texts)
            memory = [ctypes.create_string_buffer(item.dataSize) for item in items]
            for item, text in zip(items, memory, strict=True):
                item.pData = ctypes.addressof(text)
            ask(ctypes.byref(ctypes.c_uint32(len(items))), items)
            for item, text in zip(items, memory, strict=True):
                found.setdefault(item.name.decode(errors="replace"), text.value.decode(errors="replace"))
        return found

    def _executables(self, artifact: Artifact, flag: int) -> Iterator[tuple[Any, Any]]:
        """Compile a kernel with ``flag`` and yield the properties and the query struct of each executable in it."""
        if "pipelineExecutableInfo" not in self._facts.features:
            return
        handle = self._compile(artifact, self.layout(artifact), flag)
        try:
            info = api.VkPipelineInfoKHR(pipeline=handle)
            ask = partial(self._vk.vkGetPipelineExecutablePropertiesKHR, self._device, ctypes.byref(info))
            for index, executable in enumerate(enumerate_all(ask, api.VkPipelineExecutablePropertiesKHR)):
                yield executable, api.VkPipelineExecutableInfoKHR(pipeline=handle, executableIndex=index)
        finally:
            self._vk.vkDestroyPipeline(self._device, handle, None)

    def destroy(self, handle: int) -> None:
        """Destroy a pipeline that no submission uses."""
        if handle in self._live:
            self._live.remove(handle)
            self._vk.vkDestroyPipeline(self._device, handle, None)

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        for handle in list(self._live):
            self.destroy(handle)
        for layout in self._layouts.values():
            layout.close()
        self._layouts = {}
        self._vk.vkDestroyPipelineCache(self._device, self._cache, None)


def _statistic(s: Any) -> int | float | bool:
    if s.format == api.VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_BOOL32_KHR:
        return bool(s.value.b32)
    if s.format == api.VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_FLOAT64_KHR:
        return float(s.value.f64)
    return int(s.value.i64 if s.format == api.VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_INT64_KHR else s.value.u64)
