"""An open Vulkan device: its queue, memory and pipelines. The caller holds the device's lock."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from aule.errors import AuleError, LaunchError
from aule.runtime import _vulkan_api as api
from aule.runtime._vulkan_loader import Functions, Instance, log, strings
from aule.runtime._vulkan_memory import Block, Memory, Region, Staging
from aule.runtime._vulkan_pipeline import Pipeline, Pipelines
from aule.runtime._vulkan_queue import (
    COPIES,
    HOST,
    KERNELS,
    PARAMETER_BYTES,
    SLOTS,
    FenceTimeline,
    Ring,
    Slot,
    Timeline,
)
from aule.runtime._vulkan_target import Facts
from aule.runtime.base import Grid


class Dispatch(NamedTuple):
    """One dispatch, ready to be recorded."""

    pipeline: Pipeline
    grid: Grid
    regions: list[Region]
    scalars: Sequence[int | float]


class Context:
    """Everything that exists between opening and closing a device."""

    def __init__(self, instance: Instance, facts: Facts) -> None:
        self.facts = facts
        self._physical = instance.physical[facts.position]
        self._device = ctypes.c_void_p()
        self._create_device(instance)
        get, device = instance.vk.vkGetDeviceProcAddr, self._device
        self.vk = Functions(lambda name: get(device, name.encode()))
        queue = ctypes.c_void_p()
        self.vk.vkGetDeviceQueue(device, facts.queue_family, 0, ctypes.byref(queue))
        # Mesa's null device compiles, but has neither memory nor semaphores. Fences are only created on submission.
        semaphores = "timelineSemaphore" in facts.features and facts.target.memory_bytes > 0
        kind = Timeline if semaphores else FenceTimeline
        self._queries = ctypes.c_uint64()
        # Created on first use, which never happens on a null device.
        self._parameters: Block | None = None
        self._parameter_views: list[Any] = []
        self._staging: Staging | None = None
        self._closers: list[Any] = []
        try:
            self.timeline = kind(self.vk, device, queue)
            self._closers.append(self.timeline)
            self.ring = Ring(self.vk, device, facts.queue_family, self.timeline)
            self._closers.append(self.ring)
            self.memory = Memory(self.vk, instance.vk, self._physical, device, facts, self.timeline)
            self._closers.append(self.memory)
            self.pipelines = Pipelines(self.vk, device, facts)
            self._closers.append(self.pipelines)
        except BaseException:
            self.close()
            raise
        self._generation = 0

    def _create_device(self, instance: Instance) -> None:
        priority = ctypes.c_float(1.0)
        queue = api.VkDeviceQueueCreateInfo(
            queueFamilyIndex=self.facts.queue_family, queueCount=1, pQueuePriorities=ctypes.pointer(priority)
        )
        names = [name.encode() for name in self.facts.extensions]
        features = self.facts.feature_chain()
        info = api.VkDeviceCreateInfo(
            pNext=ctypes.addressof(features),
            queueCreateInfoCount=1,
            pQueueCreateInfos=ctypes.pointer(queue),
            enabledExtensionCount=len(names),
            ppEnabledExtensionNames=strings(names),
        )
        instance.vk.vkCreateDevice(self._physical, ctypes.byref(info), None, ctypes.byref(self._device))

    def tidy(self) -> None:
        """Destroy what finalisers and `free` have queued, and drop recordings that refer to destroyed objects."""
        if self.memory.freed:
            self.memory.collect()
        garbage = self.pipelines.garbage
        for _ in range(len(garbage)):
            handle, last_use = garbage.popleft()
            if self.timeline.reached(last_use):
                self.pipelines.destroy(handle)
                self.memory.generation += 1
            else:
                garbage.append((handle, last_use))
        if self.memory.generation != self._generation:
            self.ring.forget_all()
            self._generation = self.memory.generation

    def upload(self, region: Region, offset: int, source: int, nbytes: int) -> None:
        """Copy from a host address; the source may be changed after the return."""
        if region.address:
            # The host writes outside the queue, so it must wait for work that still reads the old bytes.
            self.timeline.wait(region.last_use)
            ctypes.memmove(region.address + offset, source, nbytes)
            self.memory.flush(region, offset, nbytes)
            return
        staging = self._get_staging()
        for done in range(0, nbytes, staging.CHUNK):
            part = min(staging.CHUNK, nbytes - done)
            start = staging.reserve(part)
            ctypes.memmove(staging.block.address + start, source + done, part)
            value = self._copy(staging.block.buffer, start, region.block.buffer, region.offset + offset + done, part)
            staging.use(start, part, value)
            region.last_use = value

    def download(self, region: Region, offset: int, destination: int, nbytes: int) -> None:
        """Copy to a host address, after all earlier work."""
        if region.address:
            self.timeline.wait(region.last_use)
            self.memory.invalidate(region, offset, nbytes)
            ctypes.memmove(destination, region.address + offset, nbytes)
            return
        staging = self._get_staging()
        # The device copies the next part while the host reads the previous one.
        pending: tuple[int, int, int, int] | None = None
        for done in range(0, nbytes, staging.CHUNK):
            part = min(staging.CHUNK, nbytes - done)
            start = staging.reserve(part)
            value = self._copy(region.block.buffer, region.offset + offset + done, staging.block.buffer, start, part)
            staging.use(start, part, value)
            region.last_use = value
            if pending is not None:
                self._receive(staging, destination, *pending)
            pending = (done, start, part, value)
        if pending is not None:
            self._receive(staging, destination, *pending)

    def _receive(self, staging: Staging, destination: int, done: int, start: int, part: int, value: int) -> None:
        self.timeline.wait(value)
        ctypes.memmove(destination + done, staging.block.address + start, part)

    def _get_staging(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self.memory, self.timeline)
        return self._staging

    def _copy(self, source: Any, source_offset: int, destination: Any, destination_offset: int, nbytes: int) -> int:
        slot, _ = self.ring.acquire(None)
        command = self.ring.begin(slot)
        piece = api.VkBufferCopy(srcOffset=source_offset, dstOffset=destination_offset, size=nbytes)
        self.ring.order(slot, KERNELS | COPIES, COPIES)
        self.vk.vkCmdCopyBuffer(command, source, destination, 1, ctypes.byref(piece))
        self.ring.order(slot, COPIES, KERNELS | HOST)
        self.ring.end(slot, None)
        return self.ring.submit(slot)

    def launch(self, pipeline: Pipeline, grid: Grid, regions: list[Region], scalars: Sequence[int | float]) -> None:
        """Submit one dispatch."""
        keys = [region.key for region in regions]
        key = (pipeline.handle, grid, *keys)
        slot, recorded = self.ring.acquire(key)
        self._write_scalars(slot, pipeline, scalars)
        if not recorded:
            self._describe(slot, pipeline, keys)
            command = self.ring.begin(slot)
            self._bind(command, slot, pipeline)
            self.vk.vkCmdDispatch(command, *grid)
            # Copies record their own barrier after kernels.
            self.ring.order(slot, KERNELS, KERNELS | HOST if any(region.address for region in regions) else KERNELS)
            self.ring.end(slot, key)
        self._used(self.ring.submit(slot), pipeline, regions)

    def time_launches(self, launches: Sequence[Dispatch], rounds: int) -> float:
        """Measure a round of dispatches in seconds, with the device's clock.

        All rounds are one submission, in which each dispatch waits for the one before.
        """
        vk = self.vk
        if not self._queries:
            info = api.VkQueryPoolCreateInfo(queryType=api.VK_QUERY_TYPE_TIMESTAMP, queryCount=2)
            vk.vkCreateQueryPool(self._device, ctypes.byref(info), None, ctypes.byref(self._queries))
        # The first slot holds the commands; the others only provide descriptors and scalars.
        slots = [self.ring.acquire(None)[0] for _ in launches]
        for slot, launch in zip(slots, launches, strict=True):
            self._write_scalars(slot, launch.pipeline, launch.scalars)
            self._describe(slot, launch.pipeline, [region.key for region in launch.regions])
        command = self.ring.begin(slots[0])
        vk.vkCmdResetQueryPool(command, self._queries, 0, 2)
        # At the top of the pipe the clock could be read while earlier work is still running.
        vk.vkCmdWriteTimestamp(command, api.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, self._queries, 0)
        for number in range(rounds * len(launches)):
            if number:
                self.ring.order(slots[0], KERNELS, KERNELS)
            launch, slot = launches[number % len(launches)], slots[number % len(launches)]
            self._bind(command, slot, launch.pipeline)
            vk.vkCmdDispatch(command, *launch.grid)
        vk.vkCmdWriteTimestamp(command, api.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, self._queries, 1)
        self.ring.order(slots[0], KERNELS, KERNELS | HOST)
        self.ring.end(slots[0], None)
        value = self.ring.submit(slots[0])
        for slot, launch in zip(slots, launches, strict=True):
            slot.value = value
            self._used(value, launch.pipeline, launch.regions)
        self.timeline.wait(value)
        ticks = (ctypes.c_uint64 * 2)()
        flags = api.VK_QUERY_RESULT_64_BIT | api.VK_QUERY_RESULT_WAIT_BIT
        vk.vkGetQueryPoolResults(self._device, self._queries, 0, 2, 16, ticks, 8, flags)
        passed = (ticks[1] - ticks[0]) & ((1 << self.facts.timestamp_bits) - 1)
        return float(passed * self.facts.properties.limits.timestampPeriod * 1e-9) / rounds

    def _write_scalars(self, slot: Slot, pipeline: Pipeline, scalars: Sequence[int | float]) -> None:
        if scalars:
            if not self._parameter_views:
                self._get_parameters()
            try:
                pipeline.pack(self._parameter_views[slot.index], 0, *scalars)
            except struct.error as error:
                named = ", ".join(pipeline.names[i] for i in pipeline.scalars)
                raise LaunchError(f"[vulkan] expected numbers that fit {named}, got {scalars}: {error}") from None

    def _get_parameters(self) -> Block:
        """Return the memory for the slots' scalars, created on first use."""
        if self._parameters is None:
            usage = api.VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT
            self._parameters = self.memory.host_block(SLOTS * PARAMETER_BYTES, usage, device_local=True)
            starts = (self._parameters.address + i * PARAMETER_BYTES for i in range(SLOTS))
            piece = ctypes.c_char * PARAMETER_BYTES
            self._parameter_views = [memoryview(piece.from_address(start)).cast("B") for start in starts]
        return self._parameters

    def _describe(self, slot: Slot, pipeline: Pipeline, keys: list[tuple[int, int, int]]) -> None:
        """Write a slot's descriptors."""
        pipeline.layout.create_sets(self._get_parameters())
        pipeline.layout.bind(slot.index, keys)

    def _bind(self, command: int, slot: Slot, pipeline: Pipeline) -> None:
        """Record the binding of a pipeline and of a slot's descriptors."""
        point, layout = api.VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout
        self.vk.vkCmdBindPipeline(command, point, pipeline.handle)
        chosen = ctypes.c_uint64(layout.sets[slot.index])
        self.vk.vkCmdBindDescriptorSets(command, point, layout.pipeline_layout, 0, 1, ctypes.byref(chosen), 0, None)

    def _used(self, value: int, pipeline: Pipeline, regions: list[Region]) -> None:
        """Record that a submission uses a pipeline and regions."""
        pipeline.last_use = value
        for region in regions:
            region.last_use = value

    def synchronize(self) -> None:
        """Wait for all submissions."""
        self.timeline.wait(self.timeline.submitted)

    def close(self) -> None:
        """Wait for the device and destroy everything."""
        try:
            if self._closers:
                self.synchronize()
        except AuleError as error:
            log.debug("closing a device that does not answer: %s", error)
        self._parameter_views = []
        if self._queries:
            self.vk.vkDestroyQueryPool(self._device, self._queries, None)
        for part in reversed(self._closers):
            if isinstance(part, Pipelines):
                part.save_cache()
            part.close()
        self._closers = []
        self.vk.vkDestroyDevice(self._device, None)
