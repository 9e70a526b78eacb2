"""Submission to a Vulkan queue: completion tracking, and a ring of recorded command buffers.

Each launch is submitted separately. An attention call has few launches, so batching would save little and would delay
the first launch until a flush. The saving is in recording: a slot keeps its command buffer and descriptor set, and a
launch with the same pipeline, grid and buffers only rewrites the slot's scalars and submits it again.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any, NamedTuple

from aule.runtime import _vulkan_api as api
from aule.runtime._vulkan_loader import chain

SLOTS = 64
"""Most submissions that can be in progress at once."""
PARAMETER_BYTES = 1024
"""Bytes for the scalars of one launch."""
# Waits are split into slices so that Ctrl-C works between them.
_SLICE_NS = 100_000_000


class Timeline:
    """Numbers a queue's submissions 1, 2, ... and tracks which are done, with a timeline semaphore."""

    def __init__(self, vk: Any, device: Any, queue: Any) -> None:
        self._vk, self._device, self._queue = vk, device, queue
        self.submitted = 0
        self.completed = 0
        self._semaphore = ctypes.c_uint64()
        kind = api.VkSemaphoreTypeCreateInfo(semaphoreType=api.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0)
        info = chain(api.VkSemaphoreCreateInfo(), kind)
        vk.vkCreateSemaphore(device, ctypes.byref(info), None, ctypes.byref(self._semaphore))
        self._counter = ctypes.c_uint64()
        self._target = ctypes.c_uint64()
        self._wait_info = api.VkSemaphoreWaitInfo(
            semaphoreCount=1, pSemaphores=ctypes.pointer(self._semaphore), pValues=ctypes.pointer(self._target)
        )
        self._command = ctypes.c_void_p()
        self._signal = ctypes.c_uint64()
        values = api.VkTimelineSemaphoreSubmitInfo(
            signalSemaphoreValueCount=1, pSignalSemaphoreValues=ctypes.pointer(self._signal)
        )
        self._submit_info = chain(
            api.VkSubmitInfo(
                commandBufferCount=1,
                pCommandBuffers=ctypes.pointer(self._command),
                signalSemaphoreCount=1,
                pSignalSemaphores=ctypes.pointer(self._semaphore),
            ),
            values,
        )

    def submit(self, command: int) -> int:
        """Submit a command buffer and return the submission's number."""
        self._command.value = command
        self._signal.value = self.submitted + 1
        self._vk.vkQueueSubmit(self._queue, 1, ctypes.byref(self._submit_info), 0)
        self.submitted += 1
        return self.submitted

    def reached(self, value: int) -> bool:
        """Return whether a submission is done, without waiting."""
        if value > self.completed:
            self._vk.vkGetSemaphoreCounterValue(self._device, self._semaphore, ctypes.byref(self._counter))
            self.completed = self._counter.value
        return value <= self.completed

    def wait(self, value: int) -> None:
        """Wait until a submission and all earlier ones are done."""
        if value <= self.completed:
            return
        self._target.value = value
        while self._vk.vkWaitSemaphores(self._device, ctypes.byref(self._wait_info), _SLICE_NS) == api.VK_TIMEOUT:
            pass
        self.completed = max(self.completed, value)

    def close(self) -> None:
        self._vk.vkDestroySemaphore(self._device, self._semaphore, None)


class FenceTimeline:
    """A `Timeline` made of fences, for drivers without timeline semaphores."""

    def __init__(self, vk: Any, device: Any, queue: Any) -> None:
        self._vk, self._device, self._queue = vk, device, queue
        self.submitted = 0
        self.completed = 0
        self._pending: deque[tuple[int, Any]] = deque()
        self._idle: list[Any] = []
        self._command = ctypes.c_void_p()
        self._submit_info = api.VkSubmitInfo(commandBufferCount=1, pCommandBuffers=ctypes.pointer(self._command))

    def submit(self, command: int) -> int:
        if self._idle:
            fence = self._idle.pop()
        else:
            fence = ctypes.c_uint64()
            info = api.VkFenceCreateInfo()
            self._vk.vkCreateFence(self._device, ctypes.byref(info), None, ctypes.byref(fence))
        self._command.value = command
        try:
            self._vk.vkQueueSubmit(self._queue, 1, ctypes.byref(self._submit_info), fence)
        except BaseException:
            self._idle.append(fence)
            raise
        self.submitted += 1
        self._pending.append((self.submitted, fence))
        return self.submitted

    def reached(self, value: int) -> bool:
        while self._pending and self._vk.vkGetFenceStatus(self._device, self._pending[0][1]) == api.VK_SUCCESS:
            self._retire()
        return value <= self.completed

    def wait(self, value: int) -> None:
        while value > self.completed:
            fence = self._pending[0][1]
            result = self._vk.vkWaitForFences(self._device, 1, ctypes.byref(fence), api.VK_TRUE, _SLICE_NS)
            if result != api.VK_TIMEOUT:
                self._retire()

    def _retire(self) -> None:
        value, fence = self._pending[0]
        self._vk.vkResetFences(self._device, 1, ctypes.byref(fence))
        self._pending.popleft()
        self._idle.append(fence)
        self.completed = value

    def close(self) -> None:
        for fence in [*self._idle, *(fence for _value, fence in self._pending)]:
            self._vk.vkDestroyFence(self._device, fence, None)
        self._idle, self._pending = [], deque()


class Order(NamedTuple):
    """One side of a barrier: pipeline stages, the writes made there, and all memory accesses made there."""

    stages: int
    writes: int
    accesses: int

    def __or__(self, other: Order) -> Order:
        """Combine two kinds of work."""
        return Order(*(x | y for x, y in zip(self, other, strict=True)))


KERNELS = Order(
    api.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
    api.VK_ACCESS_SHADER_WRITE_BIT,
    api.VK_ACCESS_SHADER_READ_BIT | api.VK_ACCESS_SHADER_WRITE_BIT,
)
COPIES = Order(
    api.VK_PIPELINE_STAGE_TRANSFER_BIT,
    api.VK_ACCESS_TRANSFER_WRITE_BIT,
    api.VK_ACCESS_TRANSFER_READ_BIT | api.VK_ACCESS_TRANSFER_WRITE_BIT,
)
HOST = Order(api.VK_PIPELINE_STAGE_HOST_BIT, 0, api.VK_ACCESS_HOST_READ_BIT)
"""Reads by the host. Barriers that include it are slow, so it is used only for memory that the host can see."""


class Slot:
    """One command buffer, its place in the ring, and what is recorded in it."""

    __slots__ = ("command", "index", "key", "value")

    def __init__(self, index: int, command: int) -> None:
        self.index = index
        self.command = command
        self.key: Hashable = None
        self.value = 0
        """Number of its last submission."""


class Ring:
    """The slots of a queue, least recently used first."""

    def __init__(self, vk: Any, device: Any, queue_family: int, timeline: Timeline | FenceTimeline) -> None:
        self._vk, self._device, self._timeline = vk, device, timeline
        self._pool = ctypes.c_uint64()
        info = api.VkCommandPoolCreateInfo(
            flags=api.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT, queueFamilyIndex=queue_family
        )
        vk.vkCreateCommandPool(device, ctypes.byref(info), None, ctypes.byref(self._pool))
        commands = (ctypes.c_void_p * SLOTS)()
        allocate = api.VkCommandBufferAllocateInfo(
            commandPool=self._pool, level=api.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=SLOTS
        )
        try:
            vk.vkAllocateCommandBuffers(device, ctypes.byref(allocate), commands)
        except BaseException:
            self.close()
            raise
        self._slots = OrderedDict((i, Slot(i, commands[i] or 0)) for i in range(SLOTS))
        self._recorded: dict[Hashable, deque[Slot]] = {}
        self._begin = api.VkCommandBufferBeginInfo()

    def acquire(self, key: Hashable) -> tuple[Slot, bool]:
        """Return an idle slot, and whether ``key`` is already recorded in it. Waits if all slots are busy.

        Commands with the key ``None`` are recorded for one use only.
        """
        found = self._recorded.get(key)
        if found and self._timeline.reached(found[0].value):
            slot = found[0]
            found.rotate(-1)
            self._slots.move_to_end(slot.index)
            return slot, True
        slot = next(iter(self._slots.values()))
        self._timeline.wait(slot.value)
        self.forget(slot)
        self._slots.move_to_end(slot.index)
        return slot, False

    def begin(self, slot: Slot) -> int:
        """Start recording into a slot and return its command buffer."""
        self._vk.vkBeginCommandBuffer(slot.command, ctypes.byref(self._begin))
        return slot.command

    def order(self, slot: Slot, before: Order, after: Order) -> None:
        """Record a barrier: work of kind ``before``, also from earlier submissions, precedes later work ``after``."""
        one = api.VkMemoryBarrier(srcAccessMask=before.writes, dstAccessMask=after.accesses)
        self._vk.vkCmdPipelineBarrier(
            slot.command, before.stages, after.stages, 0, 1, ctypes.byref(one), 0, None, 0, None
        )

    def end(self, slot: Slot, key: Hashable) -> None:
        """Finish a recording, and keep it for reuse if it has a key.

        The recording must end with the barrier for later work. The host's writes before a submission need none: they
        are always visible to it.
        """
        self._vk.vkEndCommandBuffer(slot.command)
        if key is not None:
            slot.key = key
            self._recorded.setdefault(key, deque()).append(slot)

    def submit(self, slot: Slot) -> int:
        """Submit a recorded slot and return the submission's number."""
        slot.value = self._timeline.submit(slot.command)
        return slot.value

    def forget(self, slot: Slot) -> None:
        """Drop a slot's recording."""
        if slot.key is not None:
            sharing = self._recorded[slot.key]
            sharing.remove(slot)
            if not sharing:
                del self._recorded[slot.key]
            slot.key = None

    def forget_all(self) -> None:
        """Drop all recordings, because a buffer or pipeline that they may use is destroyed."""
        for slot in self._slots.values():
            slot.key = None
        self._recorded.clear()

    def close(self) -> None:
        self._vk.vkDestroyCommandPool(self._device, self._pool, None)
