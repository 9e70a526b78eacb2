"""Points in each driver, and what an open device holds."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from injector import Injector

from aule.backends import registry
from aule.errors import AuleError
from aule.runtime import _cpu_pool, vulkan
from aule.runtime import _vulkan_api as api
from aule.runtime import _vulkan_loader as loader
from aule.runtime.base import Device

_MADE = {"vkCreateComputePipelines": "vkDestroyPipeline", "vkAllocateMemory": "vkFreeMemory"}
_CL_ERRORS = {"memory": ("MemoryError", -6), "resources": ("RuntimeError", -5), "refused": ("LogicError", -59)}
_VK_CODES = {"memory": -2, "lost": -4, "refused": -13}


class Driver:
    """A backend whose calls are points.

    Attributes
    ----------
    kinds : tuple of str
        The errors that its calls give.
    also : tuple of type
        Errors that fit every fault, since the driver gives no reason.
    computes : bool
        Whether kernels run; if not, results are not compared.
    """

    backend = ""
    kinds: tuple[str, ...] = ()
    also: tuple[type[AuleError], ...] = ()
    computes = True

    def __init__(self, injector: Injector) -> None:
        self.injector = injector

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Put the points in place."""

    def renew(self) -> None:
        """Close the device and forget it: the next call finds and opens it again."""
        registry.forget()
        gc.collect()

    def device(self) -> Device:
        found = registry.find(self.backend)
        assert found is not None
        return found

    def held(self) -> Counter[str]:
        """What calls must give back: bytes and objects."""
        return Counter()


class Vulkan(Driver):
    backend, kinds = "vulkan", ("memory", "lost", "refused")

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self.live: Counter[str] = Counter()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        original = loader.Functions.__getattr__

        def find(functions: Any, name: str) -> Any:
            made = self._wrapped(name, original(functions, name))
            setattr(functions, name, made)
            return made

        patch.setattr(loader.Functions, "__getattr__", find)

    def _wrapped(self, name: str, function: Any) -> Any:
        result = api.PROTOTYPES[name][0]
        ends = re.match(r"vk(Destroy|Free)", name)
        begins = name in _MADE or (re.match(r"vkCreate", name) and name.replace("Create", "Destroy") in api.PROTOTYPES)
        ending = _MADE.get(name, name.replace("Create", "Destroy"))

        def call(*args: Any) -> Any:
            if result is ctypes.c_int32 and self.injector.fails("driver", name):
                raise loader.error_of(name, _VK_CODES[self.injector.kind])
            found = function(*args)
            if begins:
                self.live[ending] += 1
            elif ends:
                handle = args[1] if len(args) > 2 else args[0]
                self.live[name] -= bool(handle)
            return found

        return call

    def renew(self) -> None:
        super().renew()
        vulkan._devices = []
        loader.close_instance()
        assert not +self.live, f"not destroyed: {+self.live}"

    def held(self) -> Counter[str]:
        device: Any = self.device()
        return Counter({"used": device.memory_info()["used"], **self.live})


class DiscreteVulkan(Vulkan):
    """Without mapped or imported memory, and without timeline semaphores: copies by staging memory, and fences."""

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        super().patch(patch)
        inspect_all = vulkan.inspect_all

        def inspect(instance: Any) -> tuple[list[Any], list[Any]]:
            usable, refused = inspect_all(instance)
            return [_discrete(facts) for facts in usable], refused

        patch.setattr(vulkan, "inspect_all", inspect)

    def held(self) -> Counter[str]:
        found = super().held()
        del found["vkDestroyFence"]  # kept for reuse: as many as submissions were in progress at once
        return found


def _discrete(facts: Any) -> Any:
    target = replace(facts.target, unified_memory=False)
    features = facts.features - {"timelineSemaphore"}
    return replace(facts, target=target, features=features, host_pointer_alignment=0)


class OpenCL(Driver):
    backend, kinds = "opencl", ("memory", "resources", "refused")
    calls = "Buffer CommandQueue Context Kernel Program enqueue_copy enqueue_fill_buffer enqueue_marker".split()
    methods = "CommandQueue.finish CommandQueue.flush Kernel.__call__ Program.build Event.wait".split()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        import pyopencl as cl

        for method in self.methods:
            owner, name = method.split(".")
            patch.setattr(getattr(cl, owner), name, self._wrapped(method, getattr(getattr(cl, owner), name)))
        wrapped = {name: self._wrapped(name, getattr(cl, name)) for name in self.calls}

        class Proxy:
            """pyopencl with points; the classes themselves must stay, since pyopencl compares types with them."""

            def __getattr__(self, name: str) -> Any:
                return wrapped.get(name) or getattr(cl, name)

        patch.setitem(sys.modules, "pyopencl", Proxy())  # type: ignore[misc]

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        import pyopencl as cl

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.injector.fails("driver", name):
                kind, code = _CL_ERRORS[self.injector.kind]
                raise getattr(cl, kind)(cl._cl._ErrorRecord("injected", code, name))
            return function(*args, **kwargs)

        return call

    def held(self) -> Counter[str]:
        device: Any = self.device()
        return Counter({"bytes": sum(a.handle.size for a in device._live), "allocations": len(device._live)})


class Cpu(Driver):
    backend, kinds = "cpu", ("refused",)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        import llvmlite.binding as llvm

        owners = (
            (llvm, "parse_assembly create_mcjit_compiler create_context create_pass_builder"),
            (llvm.Target, "create_target_machine"),
            (llvm.TargetMachine, "emit_object"),
            (llvm.ModuleRef, "verify"),
            (llvm.ExecutionEngine, "add_object_file finalize_object get_function_address"),
        )
        for owner, names in owners:
            for name in names.split():
                patch.setattr(owner, name, self._wrapped(name, getattr(owner, name)))
        patch.setattr(threading.Thread, "start", self._wrapped("Thread.start", threading.Thread.start))

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.injector.fails("driver", name):
                raise RuntimeError(f"injected in {name}")
            return function(*args, **kwargs)

        return call

    def renew(self) -> None:
        super().renew()
        # The code of the threads is built again, too; its threads stay, asleep.
        _cpu_pool._code = _cpu_pool._pool = None

    def held(self) -> Counter[str]:
        device: Any = self.device()
        return Counter({"bytes": sum(a.nbytes for a in device._live if a is not vars(device).get("_workspace"))})
