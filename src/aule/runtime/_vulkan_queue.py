"""Work on a Vulkan queue: completion, and a ring of recorded command buffers.

Each launch is submitted by itself. An attention call is one or two launches, so a batch would save little and would
delay the first one until a flush. What is saved instead is the recording: a slot keeps its command buffer with the
descriptor set it refers to, and a launch with the same pipeline, grid and buffers only rewrites the slot's scalars and
submits again. Launches that go together are one recording, in the first of as many slots.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from aule.runtime import _vulkan_api as api
from aule.runtime._vulkan_loader import chain

SLOTS = 64
"""Submissions that may be under way at once."""
PARAMETER_BYTES = 1024
"""Room for the scalars of one launch."""
# Waits are cut into slices so that Ctrl-C is seen between them.
_SLICE_NS = 100_000_000


class Timeline:
    """Numbers the submissions of a queue 1, 2, ... and tells which are done, by a timeline semaphore."""

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
        """Give a command buffer to the queue; returns its number."""
        self._command.value = command
        self._signal.value = self.submitted + 1
        self._vk.vkQueueSubmit(self._queue, 1, ctypes.byref(self._submit_info), 0)
        self.submitted += 1
        return self.submitted

    def reached(self, value: int) -> bool:
        """Whether a submission is done, without waiting."""
        if value > self.completed:
            self._vk.vkGetSemaphoreCounterValue(self._device, self._semaphore, ctypes.byref(self._counter))
            self.completed = self._counter.value
        return value <= self.completed

    def wait(self, value: int) -> None:
        """Wait until a submission and all before it are done."""
        if value <= self.completed:
            return
        self._target.value = value
        while self._vk.vkWaitSemaphores(self._device, ctypes.byref(self._wait_info), _SLICE_NS) == api.VK_TIMEOUT:
            pass
        self.completed = max(self.completed, value)

    def close(self) -> None:
        self._vk.vkDestroySemaphore(self._device, self._semaphore, None)


class FenceTimeline:
    """The same by fences, for a driver without timeline semaphores."""

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
            answer = self._vk.vkWaitForFences(self._device, 1, ctypes.byref(fence), api.VK_TRUE, _SLICE_NS)
            if answer != api.VK_TIMEOUT:
                self._retire()

    def _retire(self) -> None:
        self.completed, fence = self._pending.popleft()
        self._vk.vkResetFences(self._device, 1, ctypes.byref(fence))
        self._idle.append(fence)

    def close(self) -> None:
        for fence in [*self._idle, *(fence for _value, fence in self._pending)]:
            self._vk.vkDestroyFence(self._device, fence, None)
        self._idle, self._pending = [], deque()


class Order(NamedTuple):
    """Work that a barrier orders: its stages, what it may have written, and how it may access memory."""

    stages: int
    writes: int
    accesses: int

    def __or__(self, other: Order) -> Order:
        """Work of either kind."""
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
"""The host's reading. It costs: on an H200 a kernel that does nothing, with the barrier behind it, takes 3.0 us for
kernels, copies and the host, 1.9 for kernels and copies, 1.8 for kernels alone."""


class Slot:
    """One command buffer, its place in the ring, and what is recorded in it."""

    __slots__ = ("command", "helped", "helpers", "index", "key", "value")

    def __init__(self, index: int, command: int) -> None:
        self.index = index
        self.command = command
        self.key: Hashable = None
        self.value = 0
        """Number of its last submission."""
        self.helpers: tuple[Slot, ...] = ()
        """Whose descriptors and scalars the recording takes beside its own."""
        self.helped: Slot | None = None
        """Whose recording takes this one's."""


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
        """An idle slot, and whether ``key`` is already recorded in it. Waits when all are busy.

        ``None`` is the key of commands that are not to be found again.
        """
        (slot,), recorded = self.acquire_several(key, 1)
        return slot, recorded

    def acquire_several(self, key: Hashable, count: int) -> tuple[list[Slot], bool]:
        """The same of several, for as many dispatches in the commands of the first."""
        found = self._recorded.get(key)
        if found and self._timeline.reached(found[0].value):
            slots = [found[0], *found[0].helpers]
            found.rotate(-1)
            for slot in slots:
                self._slots.move_to_end(slot.index)
            return slots, True
        slots = []
        for _ in range(count):
            slot = next(iter(self._slots.values()))
            self._timeline.wait(slot.value)
            self.forget(slot)
            self._slots.move_to_end(slot.index)
            slots.append(slot)
        return slots, False

    def begin(self, slot: Slot) -> int:
        """Start recording into a slot; returns its command buffer."""
        self._vk.vkBeginCommandBuffer(slot.command, ctypes.byref(self._begin))
        return slot.command

    def order(self, slot: Slot, before: Order, after: Order) -> None:
        """Order all work of a kind so far, of this recording and of earlier submissions, before that of another kind
        that follows."""
        one = api.VkMemoryBarrier(srcAccessMask=before.writes, dstAccessMask=after.accesses)
        self._vk.vkCmdPipelineBarrier(
            slot.command, before.stages, after.stages, 0, 1, ctypes.byref(one), 0, None, 0, None
        )

    def end(self, slot: Slot, key: Hashable, helpers: Sequence[Slot] = ()) -> None:
        """Finish a recording. What it leaves for others is ordered by then; what the host wrote before a submission is
        visible to it anyway."""
        self._vk.vkEndCommandBuffer(slot.command)
        if key is not None:
            slot.key, slot.helpers = key, tuple(helpers)
            for other in helpers:
                other.helped = slot
            self._recorded.setdefault(key, deque()).append(slot)

    def submit(self, slot: Slot) -> int:
        """Give a recorded slot to the queue; returns the number of the submission."""
        slot.value = self._timeline.submit(slot.command)
        return slot.value

    def forget(self, slot: Slot) -> None:
        """A slot's recording, or that which it helps, is not to be used again."""
        slot = slot.helped or slot
        if slot.key is not None:
            sharing = self._recorded[slot.key]
            sharing.remove(slot)
            if not sharing:
                del self._recorded[slot.key]
            self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        for other in slot.helpers:
            other.helped = None
        slot.key, slot.helpers = None, ()

    def forget_all(self) -> None:
        """A buffer or pipeline is about to be destroyed: no recording may be submitted again."""
        for slot in self._slots.values():
            self._clear(slot)
        self._recorded.clear()

    def close(self) -> None:
        self._vk.vkDestroyCommandPool(self._device, self._pool, None)
