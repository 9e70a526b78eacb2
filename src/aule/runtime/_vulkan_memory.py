"""Memory of a Vulkan device: large blocks, ranges allocated from them, the staging ring, and imported host memory.

A block is one driver allocation with one buffer over all of it. A tensor is an offset in a block and needs neither
``vkAllocateMemory`` nor ``vkCreateBuffer``. All work of a device runs in order on one queue, with barriers between
submissions, so a freed range can be reused at once. Only the host, which writes mapped memory outside the queue, has to
wait for the range's last use.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections import deque
from typing import Any

from aule.errors import AuleError, DeviceLostError, LaunchError, OutOfMemoryError
from aule.runtime import _vulkan_api as api
from aule.runtime._vulkan_loader import chain, log
from aule.runtime._vulkan_queue import FenceTimeline, Timeline
from aule.runtime._vulkan_target import Facts, choose_memory_type, tensor_memory_type

MIB = 1 << 20
BLOCK_BYTES = 64 * MIB
LARGEST_BLOCK_BYTES = 512 * MIB
STAGING_BYTES = 32 * MIB
_TENSOR_USAGE = (
    api.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | api.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | api.VK_BUFFER_USAGE_TRANSFER_DST_BIT
)
_HOST_TYPE = api.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def size_text(nbytes: int) -> str:
    """Format a size for an error message."""
    return f"{nbytes} bytes ({nbytes / MIB:.1f} MiB)"


class Block:
    """One driver allocation, the buffer over it, and its free ranges in order of offset."""

    __slots__ = ("address", "buffer", "coherent", "ends", "memory", "size", "starts", "uses")

    def __init__(self, memory: Any, buffer: Any, size: int, address: int, coherent: bool) -> None:
        self.memory = memory
        self.buffer = buffer
        self.size = size
        self.address = address
        """Host address of the mapping; 0 if not mapped."""
        self.coherent = coherent
        # Free range i is [starts[i], ends[i]), last used by submission uses[i].
        self.starts = [0]
        self.ends = [size]
        self.uses = [0]

    @property
    def empty(self) -> bool:
        """Whether all of the block is free."""
        return self.starts == [0] and self.ends == [self.size]

    def best_fit(self, size: int) -> tuple[int, int] | None:
        """Find the smallest free range that holds ``size`` bytes; return (waste, index)."""
        fits = [(e - s - size, i) for i, (s, e) in enumerate(zip(self.starts, self.ends, strict=True)) if e - s >= size]
        return min(fits) if fits else None

    def take(self, index: int, size: int) -> tuple[int, int]:
        """Take ``size`` bytes from the front of a free range; return their offset and last use."""
        offset, use = self.starts[index], self.uses[index]
        if self.ends[index] - offset == size:
            del self.starts[index], self.ends[index], self.uses[index]
        else:
            self.starts[index] += size
        return offset, use

    def give(self, start: int, end: int, use: int) -> None:
        """Return a range to the block and merge it with free neighbours."""
        i = bisect.bisect_left(self.starts, start)
        if i < len(self.starts) and self.starts[i] == end:
            end, use = self.ends[i], max(use, self.uses[i])
            del self.starts[i], self.ends[i], self.uses[i]
        if i > 0 and self.ends[i - 1] == start:
            self.ends[i - 1], self.uses[i - 1] = end, max(use, self.uses[i - 1])
            return
        self.starts.insert(i, start)
        self.ends.insert(i, end)
        self.uses.insert(i, use)


class Region:
    """A range of a block; the `Allocation.handle` of this runtime.

    Attributes
    ----------
    buffer, offset : int
        The VkBuffer and the byte offset of the range in it.
    size : int
        Bytes of the range, including padding.
    key : tuple of int
        Buffer, offset and size, as written into a descriptor.
    address : int
        Host address of the range; 0 if not mapped.
    last_use : int
        Number of the last submission that uses it.
    """

    __slots__ = ("_freed", "address", "block", "buffer", "imported", "key", "last_use", "offset", "released", "size")

    def __init__(self, block: Block, offset: int, size: int, last_use: int, freed: deque[Region]) -> None:
        self.block = block
        self.buffer = block.buffer.value
        self.offset = offset
        self.size = size
        self.key = (self.buffer, offset, size)
        self.address = block.address + offset if block.address else 0
        self.last_use = last_use
        self.released = False
        self.imported: object = None
        self._freed = freed

    def give_up(self) -> None:
        """Queue the range for `Memory.collect`.

        Safe in a finaliser, which may run in any thread and in the middle of anything.
        """
        self._freed.append(self)

    def __del__(self) -> None:
        if not self.released:
            self.give_up()


class Memory:
    """All memory of one open device. The caller holds the device's lock."""

    def __init__(
        self, vk: Any, instance_vk: Any, physical: int, device: Any, facts: Facts, timeline: Timeline | FenceTimeline
    ) -> None:
        self._vk, self._instance_vk, self._physical, self._device = vk, instance_vk, physical, device
        self._facts, self._timeline = facts, timeline
        self.blocks: list[Block] = []
        self._imports: set[Block] = set()
        self._others: list[Block] = []
        self.freed: deque[Region] = deque()
        """Regions to free; any thread may append without the lock."""
        self.driver_allocations = 0
        """Number of vkAllocateMemory calls so far."""
        self.used = 0
        self.generation = 0
        """Changes when a buffer is destroyed, which invalidates earlier recordings."""
        limits = facts.properties.limits
        # Offsets that are multiples of this suit descriptors, flushed ranges and vector loads.
        self.quantum = max(facts.target.offset_alignment, limits.nonCoherentAtomSize, 256)
        self._atom = max(limits.nonCoherentAtomSize, 1)
        self._type = tensor_memory_type(facts.memory, self._type_bits(), facts.target.unified_memory)
        self._heap = 0
        if self._type is not None:
            self._heap = facts.memory.memoryHeaps[facts.memory.memoryTypes[self._type].heapIndex].size
        # Empty blocks are kept for reuse, up to a limit that leaves memory for other programs.
        self._keep = min(1024 * MIB, self._heap // 8)

    @property
    def reserved(self) -> int:
        """Bytes allocated from the driver for tensors."""
        return sum(block.size for block in self.blocks)

    def alloc(self, nbytes: int) -> Region:
        """Allocate a range of at least ``nbytes``.

        Raises
        ------
        OutOfMemoryError
            If there is no room even after all free blocks were returned to the driver.
        """
        self.collect()
        size = _round_up(max(nbytes, 1), self.quantum)
        if self._type is None:
            raise OutOfMemoryError("[vulkan] the device has no memory: it can only compile", nbytes)
        if size > self._facts.max_allocation:
            raise OutOfMemoryError(
                f"[vulkan] expected at most {size_text(self._facts.max_allocation)} in one tensor (the driver's "
                f"limit), got {size_text(nbytes)} with {size_text(self.used)} in use; split it",
                nbytes,
            )
        region = self._find(size) or self._grow(size)
        if region is None:
            # Work in progress may still use free blocks; wait for it, then return them to the driver.
            self._timeline.wait(self._timeline.submitted)
            self._trim(0)
            region = self._find(size) or self._grow(size)
        if region is None:
            raise OutOfMemoryError(self._out_of_memory_text(nbytes), nbytes)
        self.used += size
        return region

    def collect(self) -> None:
        """Reclaim regions freed since the last call."""
        while self.freed:
            region = self.freed.popleft()
            if region.released:
                continue
            region.released = True
            if region.imported is None:
                region.block.give(region.offset, region.offset + region.size, region.last_use)
                self.used -= region.size
                if region.block.empty:
                    self._trim(self._keep)
            else:
                self._timeline.wait(region.last_use)
                self._imports.discard(region.block)
                self._destroy(region.block)
                region.imported = None

    def _find(self, size: int) -> Region | None:
        fits = [(fit[0], n, fit[1]) for n, block in enumerate(self.blocks) if (fit := block.best_fit(size))]
        if not fits:
            return None
        _waste, n, index = min(fits)
        offset, use = self.blocks[n].take(index, size)
        return Region(self.blocks[n], offset, size, use, self.freed)

    def _grow(self, size: int) -> Region | None:
        """Allocate a range in a new block; return None if the device has no room for one."""
        reserved = self.reserved
        usual = max(BLOCK_BYTES, min(reserved // 2, LARGEST_BLOCK_BYTES))
        usual = _round_up(min(usual, self._heap // 8, self._facts.max_allocation), self.quantum)
        # A tensor that would fill most of a block gets one of its own size.
        for wanted in (usual, size) if size <= usual // 2 else (size,):
            if reserved + wanted > self._heap:
                continue
            try:
                block = self._create(wanted, self._type, _TENSOR_USAGE, mapped=self._facts.target.unified_memory)
            except OutOfMemoryError:
                continue
            self.blocks.append(block)
            return self._find(size)
        return None

    def _trim(self, keep: int) -> None:
        """Return empty blocks to the driver until at most ``keep`` bytes of them are left."""
        empty = [block for block in self.blocks if block.empty and self._timeline.reached(block.uses[0])]
        spare = sum(block.size for block in empty)
        for block in sorted(empty, key=lambda b: b.size):
            if spare <= keep:
                break
            self.blocks.remove(block)
            self._destroy(block)
            spare -= block.size

    def _out_of_memory_text(self, nbytes: int) -> str:
        text = (
            f"[vulkan] out of memory: {size_text(nbytes)} requested, {size_text(self.used)} in use by tensors, "
            f"{size_text(self.reserved)} reserved of {size_text(self._heap)}"
        )
        if "VK_EXT_memory_budget" in self._facts.extensions and self._type is not None:
            budget = api.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
            head = chain(api.VkPhysicalDeviceMemoryProperties2(), budget)
            self._instance_vk.vkGetPhysicalDeviceMemoryProperties2(self._physical, ctypes.byref(head))
            heap = self._facts.memory.memoryTypes[self._type].heapIndex
            text += f"; the driver's budget for this process is {size_text(budget.heapBudget[heap])}"
        return f"{text}; free tensors or use smaller ones"

    def _type_bits(self) -> int:
        """Return the memory types that a tensor's buffer may use, as a bit mask."""
        buffer = self._create_buffer(65536, _TENSOR_USAGE)
        need = api.VkMemoryRequirements()
        self._vk.vkGetBufferMemoryRequirements(self._device, buffer, ctypes.byref(need))
        self._vk.vkDestroyBuffer(self._device, buffer, None)
        return int(need.memoryTypeBits)

    def _create_buffer(self, size: int, usage: int, external: bool = False) -> Any:
        buffer = ctypes.c_uint64()
        structs: list[Any] = [api.VkBufferCreateInfo(size=size, usage=usage, sharingMode=api.VK_SHARING_MODE_EXCLUSIVE)]
        if external:
            structs.append(api.VkExternalMemoryBufferCreateInfo(handleTypes=_HOST_TYPE))
        info = chain(*structs)
        self._vk.vkCreateBuffer(self._device, ctypes.byref(info), None, ctypes.byref(buffer))
        return buffer

    def _create(
        self, size: int, type_index: int | None, usage: int, *, mapped: bool, pointer: int = 0, external_bits: int = ~0
    ) -> Block:
        """Create a block: buffer, memory, binding and mapping. If a step fails, everything is destroyed again."""
        vk, device = self._vk, self._device
        buffer, memory = self._create_buffer(size, usage, external=pointer != 0), ctypes.c_uint64()
        try:
            need = api.VkMemoryRequirements()
            vk.vkGetBufferMemoryRequirements(device, buffer, ctypes.byref(need))
            if pointer:
                visible = api.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | api.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
                bits = need.memoryTypeBits & external_bits
                preferred = api.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
                type_index = choose_memory_type(self._facts.memory, bits, visible, preferred)
            if type_index is None or not need.memoryTypeBits >> type_index & 1:
                raise LaunchError("[vulkan] no memory type of the device fits the buffer")
            # Imported memory has a fixed size; for its own memory the driver may require more.
            structs: list[Any] = [
                api.VkMemoryAllocateInfo(allocationSize=size if pointer else need.size, memoryTypeIndex=type_index)
            ]
            if pointer:
                structs.append(api.VkImportMemoryHostPointerInfoEXT(handleType=_HOST_TYPE, pHostPointer=pointer))
            info = chain(*structs)
            vk.vkAllocateMemory(device, ctypes.byref(info), None, ctypes.byref(memory))
            self.driver_allocations += 1
            vk.vkBindBufferMemory(device, buffer, memory, 0)
            flags = self._facts.memory.memoryTypes[type_index].propertyFlags
            address = ctypes.c_void_p(pointer)
            if mapped and not pointer and flags & api.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT:
                vk.vkMapMemory(device, memory, 0, api.VK_WHOLE_SIZE, 0, ctypes.byref(address))
        except BaseException:
            vk.vkDestroyBuffer(device, buffer, None)
            if memory:
                vk.vkFreeMemory(device, memory, None)
            raise
        coherent = bool(flags & api.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT)
        return Block(memory, buffer, size, address.value or 0, coherent)

    def _destroy(self, block: Block) -> None:
        self.generation += 1
        self._vk.vkDestroyBuffer(self._device, block.buffer, None)
        self._vk.vkFreeMemory(self._device, block.memory, None)

    def host_block(self, size: int, usage: int, *, device_local: bool) -> Block:
        """Create a mapped, coherent block that lives as long as the device (for parameters and staging)."""
        preferred = api.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
        if device_local:
            preferred = api.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
        visible = api.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | api.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
        type_index = choose_memory_type(self._facts.memory, ~0, visible, preferred)
        block = self._create(size, type_index, usage, mapped=True)
        self._others.append(block)
        return block

    def import_host(self, address: int, nbytes: int, owner: object) -> Region | None:
        """Import host memory as a region; return None if the driver or the alignment does not allow it."""
        align = self._facts.host_pointer_alignment
        if not align or not nbytes:
            return None
        start = address // align * align
        size = _round_up(address + nbytes, align) - start
        exact = start == address and size == nbytes
        # Rounding to the alignment imports bytes around the array. Within its pages these are at least mapped.
        if (not exact and align > mmap.PAGESIZE) or (address - start) % self._facts.target.offset_alignment:
            return None
        if size > self._facts.max_allocation:
            return None
        try:
            found = api.VkMemoryHostPointerPropertiesEXT()
            self._vk.vkGetMemoryHostPointerPropertiesEXT(self._device, _HOST_TYPE, start, ctypes.byref(found))
            block = self._create(
                size, None, _TENSOR_USAGE, mapped=False, pointer=start, external_bits=found.memoryTypeBits
            )
        except DeviceLostError:
            raise
        except AuleError as error:
            log.debug("host memory not imported: %s", error)
            return None
        self._imports.add(block)
        # Kernels may load full 4-byte words at the end of an array of smaller elements.
        region = Region(block, address - start, min(_round_up(nbytes, 4), size - (address - start)), 0, self.freed)
        region.imported = owner
        return region

    def flush(self, region: Region, offset: int, nbytes: int) -> None:
        """Make the host's writes to mapped memory visible to the device."""
        if not region.block.coherent:
            self._vk.vkFlushMappedMemoryRanges(self._device, 1, ctypes.byref(self._atoms(region, offset, nbytes)))

    def invalidate(self, region: Region, offset: int, nbytes: int) -> None:
        """Make the device's writes to mapped memory visible to the host."""
        if not region.block.coherent:
            self._vk.vkInvalidateMappedMemoryRanges(self._device, 1, ctypes.byref(self._atoms(region, offset, nbytes)))

    def _atoms(self, region: Region, offset: int, nbytes: int) -> Any:
        start = (region.offset + offset) // self._atom * self._atom
        end = _round_up(region.offset + offset + nbytes, self._atom)
        return api.VkMappedMemoryRange(memory=region.block.memory, offset=start, size=end - start)

    def close(self) -> None:
        """Free everything; the device must be idle."""
        for block in [*self.blocks, *self._imports, *self._others]:
            self._destroy(block)
        self.blocks, self._imports, self._others = [], set(), []


class Staging:
    """A mapped ring buffer for copies to and from memory that the host cannot see."""

    CHUNK = STAGING_BYTES // 4
    """Most bytes per reservation, so that the host's and the device's copies can overlap."""

    def __init__(self, memory: Memory, timeline: Timeline | FenceTimeline) -> None:
        usage = api.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | api.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        self.block = memory.host_block(STAGING_BYTES, usage, device_local=False)
        self._timeline = timeline
        self._head = 0
        self._busy: deque[tuple[int, int, int]] = deque()

    def reserve(self, nbytes: int) -> int:
        """Wait until ``nbytes`` of the ring are unused, and return their offset."""
        if self._head + nbytes > STAGING_BYTES:
            self._head = 0
        start, end = self._head, self._head + nbytes
        # Reservations are in order, so those that overlap are the oldest.
        while any(s < end and start < e for s, e, _value in self._busy):
            self._timeline.wait(self._busy.popleft()[2])
        self._head = _round_up(end, 64)
        return start

    def use(self, start: int, nbytes: int, value: int) -> None:
        """Mark a reservation as in use until submission ``value`` is done."""
        self._busy.append((start, start + nbytes, value))
