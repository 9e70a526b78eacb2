"""Properties and features of a Vulkan device: its Target, and what to enable when opening it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aule.errors import AuleError, BackendUnavailableError, NoComputeQueueError, OutOfMemoryError
from aule.runtime import _vulkan_api as api
from aule.runtime._vulkan_loader import (
    API_VERSION,
    MINIMUM_VERSION,
    Instance,
    chain,
    driver_remedy,
    enumerate_all,
    log,
    version_text,
)
from aule.target import Target

VERSION_1_3 = (1 << 22) | (3 << 12)

_VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x1022: "amd", 0x8086: "intel", 0x106B: "apple"}

_COMPONENTS = {
    api.VK_COMPONENT_TYPE_FLOAT16_KHR: "f16",
    api.VK_COMPONENT_TYPE_FLOAT32_KHR: "f32",
    api.VK_COMPONENT_TYPE_FLOAT64_KHR: "f64",
    api.VK_COMPONENT_TYPE_SINT8_KHR: "i8",
    api.VK_COMPONENT_TYPE_SINT16_KHR: "i16",
    api.VK_COMPONENT_TYPE_SINT32_KHR: "i32",
    api.VK_COMPONENT_TYPE_SINT64_KHR: "i64",
    api.VK_COMPONENT_TYPE_UINT8_KHR: "u8",
    api.VK_COMPONENT_TYPE_UINT16_KHR: "u16",
    api.VK_COMPONENT_TYPE_UINT32_KHR: "u32",
    api.VK_COMPONENT_TYPE_UINT64_KHR: "u64",
    api.VK_COMPONENT_TYPE_BFLOAT16_KHR: "bf16",
}

# Struct, the features wanted from it, the extension that provides it ("" if Vulkan 1.2 does), and whether Vulkan 1.3
# provides it too.
_FEATURES: tuple[tuple[Any, tuple[str, ...], str, bool], ...] = (
    (
        api.VkPhysicalDeviceVulkan11Features,
        (
            "storageBuffer16BitAccess",
            "uniformAndStorageBuffer16BitAccess",
            "variablePointersStorageBuffer",
            "variablePointers",
        ),
        "",
        True,
    ),
    (
        api.VkPhysicalDeviceVulkan12Features,
        (
            "storageBuffer8BitAccess",
            "uniformAndStorageBuffer8BitAccess",
            "shaderFloat16",
            "shaderInt8",
            "scalarBlockLayout",
            "uniformBufferStandardLayout",
            "shaderSubgroupExtendedTypes",
            "timelineSemaphore",
            "vulkanMemoryModel",
            "vulkanMemoryModelDeviceScope",
        ),
        "",
        True,
    ),
    (
        api.VkPhysicalDeviceSubgroupSizeControlFeatures,
        ("subgroupSizeControl", "computeFullSubgroups"),
        "VK_EXT_subgroup_size_control",
        True,
    ),
    (api.VkPhysicalDeviceMaintenance4Features, ("maintenance4",), "VK_KHR_maintenance4", True),
    (
        api.VkPhysicalDeviceShaderIntegerDotProductFeatures,
        ("shaderIntegerDotProduct",),
        "VK_KHR_shader_integer_dot_product",
        True,
    ),
    (
        api.VkPhysicalDeviceShaderAtomicFloatFeaturesEXT,
        (
            "shaderBufferFloat32Atomics",
            "shaderBufferFloat32AtomicAdd",
            "shaderSharedFloat32Atomics",
            "shaderSharedFloat32AtomicAdd",
        ),
        "VK_EXT_shader_atomic_float",
        False,
    ),
    (
        api.VkPhysicalDeviceWorkgroupMemoryExplicitLayoutFeaturesKHR,
        (
            "workgroupMemoryExplicitLayout",
            "workgroupMemoryExplicitLayoutScalarBlockLayout",
            "workgroupMemoryExplicitLayout8BitAccess",
            "workgroupMemoryExplicitLayout16BitAccess",
        ),
        "VK_KHR_workgroup_memory_explicit_layout",
        False,
    ),
    (
        api.VkPhysicalDeviceCooperativeMatrixFeaturesKHR,
        ("cooperativeMatrix",),
        "VK_KHR_cooperative_matrix",
        False,
    ),
    (
        api.VkPhysicalDeviceShaderBfloat16FeaturesKHR,
        ("shaderBFloat16Type", "shaderBFloat16DotProduct", "shaderBFloat16CooperativeMatrix"),
        "VK_KHR_shader_bfloat16",
        False,
    ),
    (
        api.VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR,
        ("pipelineExecutableInfo",),
        "VK_KHR_pipeline_executable_properties",
        False,
    ),
    (
        api.VkPhysicalDevicePipelineRobustnessFeaturesEXT,
        ("pipelineRobustness",),
        "VK_EXT_pipeline_robustness",
        False,
    ),
)

# Names listed in Target.extensions if the feature is enabled, whether it is core or from an extension.
_REPORTED = {
    "VK_KHR_variable_pointers": "variablePointersStorageBuffer",
    "VK_KHR_shader_float16_int8": "shaderInt8",
    "VK_EXT_scalar_block_layout": "scalarBlockLayout",
    "VK_KHR_shader_subgroup_extended_types": "shaderSubgroupExtendedTypes",
    "VK_KHR_vulkan_memory_model": "vulkanMemoryModel",
    "VK_EXT_subgroup_size_control": "subgroupSizeControl",
    "VK_KHR_maintenance4": "maintenance4",
    "VK_KHR_shader_integer_dot_product": "shaderIntegerDotProduct",
    "VK_EXT_shader_atomic_float": "shaderBufferFloat32AtomicAdd",
    "VK_KHR_workgroup_memory_explicit_layout": "workgroupMemoryExplicitLayout",
    "VK_KHR_cooperative_matrix": "cooperativeMatrix",
    "VK_KHR_shader_bfloat16": "shaderBFloat16Type",
    "VK_KHR_pipeline_executable_properties": "pipelineExecutableInfo",
    # Optional parts of an extension, or of Vulkan itself, are listed under the feature's own name.
    "shaderInt16": "shaderInt16",
    "shaderSharedFloat32AtomicAdd": "shaderSharedFloat32AtomicAdd",
    "workgroupMemoryExplicitLayout8BitAccess": "workgroupMemoryExplicitLayout8BitAccess",
    "workgroupMemoryExplicitLayout16BitAccess": "workgroupMemoryExplicitLayout16BitAccess",
}


@dataclass
class Facts:
    """A device's Target and all else that is needed to open and use the device."""

    target: Target
    position: int
    """Index in the instance's list of physical devices."""
    properties: Any
    """VkPhysicalDeviceProperties."""
    memory: Any
    """VkPhysicalDeviceMemoryProperties."""
    queue_family: int
    timestamp_bits: int
    """Valid bits of a timestamp; 0 if the queue has no timestamps."""
    extensions: tuple[str, ...]
    """Extensions to enable."""
    features: frozenset[str]
    """Features to enable, by their field names."""
    max_allocation: int
    """Bytes of the largest single allocation."""
    max_workgroup_subgroups: int
    host_pointer_alignment: int
    """Required alignment of host memory to import; 0 if it cannot be imported."""

    def feature_chain(self) -> Any:
        """Return the features to enable, for ``VkDeviceCreateInfo.pNext``."""
        head = api.VkPhysicalDeviceFeatures2()
        structs: list[Any] = [head]
        for name in ("shaderFloat64", "shaderInt64", "shaderInt16"):
            setattr(head.features, name, int(name in self.features))
        for struct, fields, _extension, _core in _FEATURES:
            enabled = [f for f in fields if f in self.features]
            if enabled:
                structs.append(struct(**dict.fromkeys(enabled, 1)))
        if "VK_KHR_portability_subset" in self.extensions:
            structs.append(api.VkPhysicalDevicePortabilitySubsetFeaturesKHR())
        return chain(*structs)


def choose_memory_type(memory: Any, bits: int, required: int, preferred: int, avoided: int = 0) -> int | None:
    """Return the index of the best memory type that has all ``required`` properties; None if there is none.

    The best has the most ``preferred`` and fewest ``avoided`` properties, then the largest heap, then comes first in
    the driver's order.
    """
    never = (
        api.VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT
        | api.VK_MEMORY_PROPERTY_PROTECTED_BIT
        | api.VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD
        | api.VK_MEMORY_PROPERTY_DEVICE_UNCACHED_BIT_AMD
    )
    best: tuple[int, int] | None = None
    chosen = None
    for index in range(memory.memoryTypeCount):
        flags = memory.memoryTypes[index].propertyFlags
        if not bits >> index & 1 or flags & required != required or flags & never:
            continue
        score = (
            bin(flags & preferred).count("1") - bin(flags & avoided).count("1"),
            memory.memoryHeaps[memory.memoryTypes[index].heapIndex].size,
        )
        if best is None or score > best:
            best, chosen = score, index
    return chosen


def tensor_memory_type(memory: Any, bits: int, unified: bool) -> int | None:
    """Return the memory type for tensors: device-local, and mapped if the device shares the host's memory.

    None for a device that only compiles (Mesa's null device).
    """
    local, visible = api.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, api.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT
    host = api.VK_MEMORY_PROPERTY_HOST_CACHED_BIT | api.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
    chosen = choose_memory_type(memory, bits, local | visible, host) if unified else None
    if chosen is None:
        # Tensors are not mapped here, and host-visible memory would be a small window or uncached.
        chosen = choose_memory_type(memory, bits, local, 0, avoided=visible)
    return chosen if chosen is not None else choose_memory_type(memory, bits, 0, host)


class _Properties:
    """A device's properties, as the driver's structs. A struct that the device does not support stays zero."""

    def __init__(self, vk: Any, physical: int, has: Callable[..., bool]) -> None:
        self.v11 = api.VkPhysicalDeviceVulkan11Properties()
        self.v12 = api.VkPhysicalDeviceVulkan12Properties()
        self.subgroup_sizes = api.VkPhysicalDeviceSubgroupSizeControlProperties()
        self.maintenance = api.VkPhysicalDeviceMaintenance4Properties()
        self.host_memory = api.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
        self.amd = api.VkPhysicalDeviceShaderCorePropertiesAMD()
        self.nvidia = api.VkPhysicalDeviceShaderSMBuiltinsPropertiesNV()
        optional = (
            (self.subgroup_sizes, has("VK_EXT_subgroup_size_control", True)),
            (self.maintenance, has("VK_KHR_maintenance4", True)),
            (self.host_memory, has("VK_EXT_external_memory_host")),
            (self.amd, has("VK_AMD_shader_core_properties")),
            (self.nvidia, has("VK_NV_shader_sm_builtins")),
        )
        supported = (struct for struct, present in optional if present)
        queried = chain(api.VkPhysicalDeviceProperties2(), self.v11, self.v12, *supported)
        vk.vkGetPhysicalDeviceProperties2(physical, ctypes.byref(queried))

    def max_allocation(self) -> int:
        """Return the bytes of the largest single allocation."""
        largest = self.v11.maxMemoryAllocationSize
        return int(min(largest, self.maintenance.maxBufferSize or largest))

    def compute_units(self) -> int:
        """Return the number of compute units; 0 if unknown."""
        amd = self.amd
        engines = amd.shaderEngineCount * amd.shaderArraysPerEngineCount
        return int(self.nvidia.shaderSMCount or engines * amd.computeUnitsPerShaderArray)

    def subgroups(self, features: set[str]) -> tuple[int, tuple[int, ...]]:
        """Return the subgroup size (0 if kernels cannot use subgroups) and the sizes that a kernel may require."""
        wanted = (
            api.VK_SUBGROUP_FEATURE_BASIC_BIT
            | api.VK_SUBGROUP_FEATURE_ARITHMETIC_BIT
            | api.VK_SUBGROUP_FEATURE_SHUFFLE_BIT
        )
        compute = api.VK_SHADER_STAGE_COMPUTE_BIT
        v11, control = self.v11, self.subgroup_sizes
        if not v11.subgroupSupportedStages & compute or v11.subgroupSupportedOperations & wanted != wanted:
            return 0, ()
        sizes: tuple[int, ...] = ()
        if "subgroupSizeControl" in features and control.requiredSubgroupSizeStages & compute:
            powers = (1 << n for n in range(8))
            sizes = tuple(size for size in powers if control.minSubgroupSize <= size <= control.maxSubgroupSize)
        return v11.subgroupSize, sizes

    def reported(self, features: set[str]) -> tuple[str, ...]:
        """Return the names for `Target.extensions`."""
        names = [extension for extension, feature in _REPORTED.items() if feature in features]
        if self.v12.shaderSignedZeroInfNanPreserveFloat32:
            names.append("VK_KHR_shader_float_controls")
        if self.v12.shaderRoundingModeRTEFloat16:
            names.append("shaderRoundingModeRTEFloat16")
        if self.host_memory.minImportedHostPointerAlignment:
            names.append("VK_EXT_external_memory_host")
        return tuple(sorted(names))


def inspect(instance: Instance, position: int) -> Facts:
    """Read everything about one physical device.

    Raises
    ------
    NoComputeQueueError
        The device cannot compute.
    BackendUnavailableError
        The device's driver is older than Vulkan 1.2.
    """
    vk, physical = instance.vk, instance.physical[position]
    available = {
        e.extensionName.decode()
        for e in enumerate_all(
            lambda n, p: vk.vkEnumerateDeviceExtensionProperties(physical, None, n, p), api.VkExtensionProperties
        )
    }
    basic = api.VkPhysicalDeviceProperties2()
    vk.vkGetPhysicalDeviceProperties2(physical, ctypes.byref(basic))
    properties = basic.properties
    name = properties.deviceName.decode(errors="replace")
    version = min(properties.apiVersion, instance.version, API_VERSION | 0xFFF)
    if version < MINIMUM_VERSION:
        raise BackendUnavailableError(
            "vulkan", f"[vulkan] expected Vulkan 1.2 or newer, {name} has {version_text(version)}; {driver_remedy()}"
        )
    queue_family, timestamp_bits = _compute_queue(vk, physical, name)

    def has(extension: str, core_in_1_3: bool = False) -> bool:
        return extension in available or (core_in_1_3 and version >= VERSION_1_3)

    found = _Properties(vk, physical, has)
    features, extensions = _features(vk, physical, has)
    if found.host_memory.minImportedHostPointerAlignment:
        extensions.append("VK_EXT_external_memory_host")
    extensions += [e for e in ("VK_EXT_memory_budget", "VK_KHR_portability_subset") if e in available]

    memory = api.VkPhysicalDeviceMemoryProperties2()
    vk.vkGetPhysicalDeviceMemoryProperties2(physical, ctypes.byref(memory))
    memory = memory.memoryProperties

    limits = properties.limits
    software = properties.deviceType == api.VK_PHYSICAL_DEVICE_TYPE_CPU
    unified = software or properties.deviceType == api.VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU
    tensor_type = tensor_memory_type(memory, ~0, unified)
    subgroup_size, subgroup_sizes = found.subgroups(features)
    max_allocation = found.max_allocation()
    driver = b" ".join((found.v12.driverName, found.v12.driverInfo)).decode(errors="replace").strip()
    target = Target(
        backend="vulkan",
        name=name,
        vendor="software" if software else _VENDORS.get(properties.vendorID, "unknown"),
        driver=driver or f"version {properties.driverVersion}",
        software=software,
        subgroup_size=subgroup_size,
        subgroup_sizes=subgroup_sizes,
        # Workgroups are one-dimensional.
        max_threads=min(limits.maxComputeWorkGroupInvocations, limits.maxComputeWorkGroupSize[0]),
        max_shared_bytes=limits.maxComputeSharedMemorySize,
        max_grid=tuple(limits.maxComputeWorkGroupCount),
        max_buffers=min(
            limits.maxPerStageDescriptorStorageBuffers,
            limits.maxDescriptorSetStorageBuffers,
            limits.maxPerStageResources - 1,
        ),
        max_buffer_bytes=min(limits.maxStorageBufferRange, max_allocation),
        offset_alignment=max(limits.minStorageBufferOffsetAlignment, 1),
        memory_bytes=0 if tensor_type is None else memory.memoryHeaps[memory.memoryTypes[tensor_type].heapIndex].size,
        compute_units=found.compute_units() or ((os.cpu_count() or 0) if software else 0),
        unified_memory=unified,
        f16="shaderFloat16" in features,
        f64="shaderFloat64" in features,
        int64="shaderInt64" in features,
        storage16="storageBuffer16BitAccess" in features,
        storage8="storageBuffer8BitAccess" in features,
        bf16="shaderBFloat16Type" in features,
        # A driver on top of another API may turn the fence into a barrier, which a single thread must not reach.
        device_fence="VK_KHR_portability_subset" not in available,
        atomic_f32_add="shaderBufferFloat32AtomicAdd" in features,
        matrix_units=_matrix_units(vk, physical, features) if "cooperativeMatrix" in features else (),
        language_version=(version >> 22) * 10 + (version >> 12 & 0x3FF),
        extensions=found.reported(features),
    )
    return Facts(
        target=target,
        position=position,
        properties=properties,
        memory=memory,
        queue_family=queue_family,
        timestamp_bits=timestamp_bits if limits.timestampPeriod > 0 else 0,
        extensions=tuple(extensions),
        features=frozenset(features),
        max_allocation=max_allocation,
        max_workgroup_subgroups=found.subgroup_sizes.maxComputeWorkgroupSubgroups,
        host_pointer_alignment=found.host_memory.minImportedHostPointerAlignment,
    )


def inspect_all(instance: Instance) -> tuple[list[Facts], list[AuleError]]:
    """Return the usable devices in the driver's order, and the errors that exclude the others."""
    usable: list[Facts] = []
    refused: list[AuleError] = []
    for position in range(len(instance.physical)):
        try:
            usable.append(inspect(instance, position))
        except OutOfMemoryError:  # passes, and a device that is skipped would change the others' numbers
            raise
        except AuleError as error:
            log.info("device skipped: %s", error)
            refused.append(error)
    return usable, refused


def _compute_queue(vk: Any, physical: int, name: str) -> tuple[int, int]:
    """Return the queue family to compute on, and its timestamp bits."""

    def call(count: Any, items: Any) -> int:
        vk.vkGetPhysicalDeviceQueueFamilyProperties(physical, count, items)
        return api.VK_SUCCESS

    families = enumerate_all(call, api.VkQueueFamilyProperties)
    found = [i for i, f in enumerate(families) if f.queueFlags & api.VK_QUEUE_COMPUTE_BIT and f.queueCount]
    if not found:
        raise NoComputeQueueError(
            "vulkan", f"[vulkan] expected a compute queue, {name} has none; choose another device (`aule info`)"
        )
    # A family without graphics does not share its queue with the desktop.
    chosen = min(found, key=lambda i: (families[i].queueFlags & api.VK_QUEUE_GRAPHICS_BIT != 0, i))
    return chosen, families[chosen].timestampValidBits


def _features(vk: Any, physical: int, has: Callable[..., bool]) -> tuple[set[str], list[str]]:
    """Return the features to enable, and the extensions that provide them."""
    head = api.VkPhysicalDeviceFeatures2()
    queried = [(s(), fields, ext) for s, fields, ext, core in _FEATURES if not ext or has(ext, core)]
    chain(head, *(struct for struct, _fields, _extension in queried))
    vk.vkGetPhysicalDeviceFeatures2(physical, ctypes.byref(head))
    features = {f for f in ("shaderFloat64", "shaderInt64", "shaderInt16") if getattr(head.features, f)}
    extensions: list[str] = []
    for struct, fields, extension in queried:
        supported = {f for f in fields if getattr(struct, f)}
        features |= supported
        if supported and extension and has(extension):
            extensions.append(extension)
    return features, extensions


def _matrix_units(vk: Any, physical: int, features: set[str]) -> tuple[str, ...]:
    """Return the matrix shapes of one subgroup: ``m16n16k16:f16:f32`` is A and B in f16, accumulated in f32."""
    listed = enumerate_all(
        lambda n, p: vk.vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR(physical, n, p),
        api.VkCooperativeMatrixPropertiesKHR,
    )
    units: list[str] = []
    for p in listed:
        same = p.AType == p.BType and p.CType == p.ResultType and not p.saturatingAccumulation
        if p.scope != api.VK_SCOPE_SUBGROUP_KHR or not same or not {p.AType, p.CType} <= _COMPONENTS.keys():
            continue
        a, c = _COMPONENTS[p.AType], _COMPONENTS[p.CType]
        if "bf16" in (a, c) and "shaderBFloat16CooperativeMatrix" not in features:
            continue
        unit = f"m{p.MSize}n{p.NSize}k{p.KSize}:{a}:{c}"
        if unit not in units:
            units.append(unit)
    return tuple(units)
