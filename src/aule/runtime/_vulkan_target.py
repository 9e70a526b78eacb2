"""What a Vulkan device can do: properties and features become a Target, and the request that opens the device."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from aule.errors import AuleError, BackendUnavailableError, NoComputeQueueError
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

# Struct, the features wanted from it, the extension that brings it ("" in Vulkan 1.2 itself), and whether Vulkan 1.3
# brings it too.
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

# What Target.extensions says: the name stands when the feature is enabled, be it core or extension.
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
    # Parts that an extension, or Vulkan itself, leaves to the driver go by the feature's own name.
    "shaderInt16": "shaderInt16",
    "shaderSharedFloat32AtomicAdd": "shaderSharedFloat32AtomicAdd",
    "workgroupMemoryExplicitLayout8BitAccess": "workgroupMemoryExplicitLayout8BitAccess",
    "workgroupMemoryExplicitLayout16BitAccess": "workgroupMemoryExplicitLayout16BitAccess",
}


@dataclass
class Facts:
    """What opening and driving a device needs beside its Target."""

    target: Target
    position: int
    """In the instance's list of physical devices."""
    properties: Any
    """VkPhysicalDeviceProperties."""
    memory: Any
    """VkPhysicalDeviceMemoryProperties."""
    queue_family: int
    timestamp_bits: int
    """Valid bits of a timestamp; 0 when the queue has none."""
    extensions: tuple[str, ...]
    """To enable."""
    features: frozenset[str]
    """To enable, by the names of their fields."""
    max_allocation: int
    """Largest piece of memory the driver gives at once."""
    max_workgroup_subgroups: int
    host_pointer_alignment: int
    """Of memory to import; 0 when that cannot be done."""

    def feature_chain(self) -> Any:
        """The features to enable, for ``VkDeviceCreateInfo.pNext``."""
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
    """Index of the best memory type with ``required`` properties: most of ``preferred``, least of ``avoided``, largest
    heap, first in the driver's own order."""
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
    """Memory type of tensors: device-local, and mapped where the device shares the host's memory. None for a device
    that only compiles (Mesa's null device)."""
    local, visible = api.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, api.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT
    host = api.VK_MEMORY_PROPERTY_HOST_CACHED_BIT | api.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
    chosen = choose_memory_type(memory, bits, local | visible, host) if unified else None
    if chosen is None:
        # Without a mapping, host visibility only means a small window or uncached memory.
        chosen = choose_memory_type(memory, bits, local, 0, avoided=visible)
    return chosen if chosen is not None else choose_memory_type(memory, bits, 0, host)


def inspect(instance: Instance, position: int) -> Facts:
    """Everything about one physical device.

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

    # Properties.
    v11, v12 = api.VkPhysicalDeviceVulkan11Properties(), api.VkPhysicalDeviceVulkan12Properties()
    sizes = api.VkPhysicalDeviceSubgroupSizeControlProperties()
    maintenance = api.VkPhysicalDeviceMaintenance4Properties()
    host = api.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
    amd = api.VkPhysicalDeviceShaderCorePropertiesAMD()
    nvidia = api.VkPhysicalDeviceShaderSMBuiltinsPropertiesNV()
    optional = (
        (sizes, has("VK_EXT_subgroup_size_control", True)),
        (maintenance, has("VK_KHR_maintenance4", True)),
        (host, has("VK_EXT_external_memory_host")),
        (amd, has("VK_AMD_shader_core_properties")),
        (nvidia, has("VK_NV_shader_sm_builtins")),
    )
    queried = chain(api.VkPhysicalDeviceProperties2(), v11, v12, *(struct for struct, there in optional if there))
    vk.vkGetPhysicalDeviceProperties2(physical, ctypes.byref(queried))

    features, extensions = _features(vk, physical, has)
    if host.minImportedHostPointerAlignment:
        extensions.append("VK_EXT_external_memory_host")
    if "VK_EXT_memory_budget" in available:
        extensions.append("VK_EXT_memory_budget")
    if "VK_KHR_portability_subset" in available:
        extensions.append("VK_KHR_portability_subset")

    memory = api.VkPhysicalDeviceMemoryProperties2()
    vk.vkGetPhysicalDeviceMemoryProperties2(physical, ctypes.byref(memory))
    memory = memory.memoryProperties

    limits = properties.limits
    software = properties.deviceType == api.VK_PHYSICAL_DEVICE_TYPE_CPU
    unified = software or properties.deviceType == api.VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU
    tensor_type = tensor_memory_type(memory, ~0, unified)
    wanted_operations = (
        api.VK_SUBGROUP_FEATURE_BASIC_BIT | api.VK_SUBGROUP_FEATURE_ARITHMETIC_BIT | api.VK_SUBGROUP_FEATURE_SHUFFLE_BIT
    )
    compute = api.VK_SHADER_STAGE_COMPUTE_BIT
    subgroups = (
        v11.subgroupSupportedStages & compute
        and v11.subgroupSupportedOperations & wanted_operations == wanted_operations
    )
    subgroup_sizes: tuple[int, ...] = ()
    if subgroups and "subgroupSizeControl" in features and sizes.requiredSubgroupSizeStages & compute:
        powers = (1 << n for n in range(8))
        subgroup_sizes = tuple(s for s in powers if sizes.minSubgroupSize <= s <= sizes.maxSubgroupSize)
    max_allocation = min(v11.maxMemoryAllocationSize, maintenance.maxBufferSize or v11.maxMemoryAllocationSize)
    units = nvidia.shaderSMCount
    units = units or amd.shaderEngineCount * amd.shaderArraysPerEngineCount * amd.computeUnitsPerShaderArray
    reported = [extension for extension, feature in _REPORTED.items() if feature in features]
    if v12.shaderSignedZeroInfNanPreserveFloat32:
        reported.append("VK_KHR_shader_float_controls")
    if v12.shaderRoundingModeRTEFloat16:
        reported.append("shaderRoundingModeRTEFloat16")
    if host.minImportedHostPointerAlignment:
        reported.append("VK_EXT_external_memory_host")
    driver = f"{v12.driverName.decode(errors='replace')} {v12.driverInfo.decode(errors='replace')}".strip()
    target = Target(
        backend="vulkan",
        name=name,
        vendor="software" if software else _VENDORS.get(properties.vendorID, "unknown"),
        driver=driver or f"version {properties.driverVersion}",
        software=software,
        subgroup_size=v11.subgroupSize if subgroups else 0,
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
        compute_units=units or ((os.cpu_count() or 0) if software else 0),
        unified_memory=unified,
        f16="shaderFloat16" in features,
        f64="shaderFloat64" in features,
        int64="shaderInt64" in features,
        storage16="storageBuffer16BitAccess" in features,
        storage8="storageBuffer8BitAccess" in features,
        bf16="shaderBFloat16Type" in features,
        # On top of another driver's language the fence may become a barrier, which one thread alone must not reach.
        device_fence="VK_KHR_portability_subset" not in available,
        matrix_units=_matrix_units(vk, physical, features) if "cooperativeMatrix" in features else (),
        language_version=(version >> 22) * 10 + (version >> 12 & 0x3FF),
        extensions=tuple(sorted(reported)),
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
        max_workgroup_subgroups=sizes.maxComputeWorkgroupSubgroups,
        host_pointer_alignment=host.minImportedHostPointerAlignment,
    )


def inspect_all(instance: Instance) -> tuple[list[Facts], list[AuleError]]:
    """The usable devices in the driver's order, and why the others are not."""
    usable: list[Facts] = []
    refused: list[AuleError] = []
    for position in range(len(instance.physical)):
        try:
            usable.append(inspect(instance, position))
        except AuleError as error:
            log.info("device skipped: %s", error)
            refused.append(error)
    return usable, refused


def _compute_queue(vk: Any, physical: int, name: str) -> tuple[int, int]:
    """Queue family to compute on, and its timestamp bits."""

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


def _features(vk: Any, physical: int, has: Any) -> tuple[set[str], list[str]]:
    """Features to enable, and the extensions that bring them."""
    head = api.VkPhysicalDeviceFeatures2()
    asked = [(s(), fields, ext) for s, fields, ext, core in _FEATURES if not ext or has(ext, core)]
    chain(head, *(struct for struct, _fields, _extension in asked))
    vk.vkGetPhysicalDeviceFeatures2(physical, ctypes.byref(head))
    features = {f for f in ("shaderFloat64", "shaderInt64", "shaderInt16") if getattr(head.features, f)}
    extensions: list[str] = []
    for struct, fields, extension in asked:
        there = {f for f in fields if getattr(struct, f)}
        features |= there
        if there and extension and has(extension):
            extensions.append(extension)
    return features, extensions


def _matrix_units(vk: Any, physical: int, features: set[str]) -> tuple[str, ...]:
    """Shapes that one subgroup multiplies: ``m16n16k16:f16:f32`` is A and B in f16, accumulated in f32."""
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
