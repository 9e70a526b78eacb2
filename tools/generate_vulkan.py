"""Writes ``src/aule/runtime/_vulkan_api.py``, the ctypes bindings of Vulkan, from Khronos' registry ``vk.xml``.

Usage::

    python tools/generate_vulkan.py [/usr/share/vulkan/registry/vk.xml] [--check]

Only the commands, structs and constants named below are written; their dependencies follow automatically.
``--check`` writes nothing and exits 1 if the committed file is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

REGISTRY = Path("/usr/share/vulkan/registry/vk.xml")
OUTPUT = Path(__file__).resolve().parent.parent / "src" / "aule" / "runtime" / "_vulkan_api.py"
LINE = 120

COMMANDS = """
vkGetInstanceProcAddr vkEnumerateInstanceVersion vkEnumerateInstanceExtensionProperties
vkEnumerateInstanceLayerProperties vkCreateInstance
vkDestroyInstance vkEnumeratePhysicalDevices vkGetPhysicalDeviceProperties2 vkGetPhysicalDeviceFeatures2
vkGetPhysicalDeviceMemoryProperties2 vkGetPhysicalDeviceQueueFamilyProperties vkEnumerateDeviceExtensionProperties
vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR vkCreateDebugUtilsMessengerEXT vkDestroyDebugUtilsMessengerEXT
vkCreateDevice vkGetDeviceProcAddr
vkDestroyDevice vkGetDeviceQueue vkQueueSubmit
vkAllocateMemory vkFreeMemory vkMapMemory vkFlushMappedMemoryRanges vkInvalidateMappedMemoryRanges
vkGetMemoryHostPointerPropertiesEXT
vkCreateBuffer vkDestroyBuffer vkGetBufferMemoryRequirements vkBindBufferMemory
vkCreateShaderModule vkDestroyShaderModule vkCreatePipelineCache vkDestroyPipelineCache vkGetPipelineCacheData
vkCreateComputePipelines vkDestroyPipeline vkCreatePipelineLayout vkDestroyPipelineLayout
vkGetPipelineExecutablePropertiesKHR vkGetPipelineExecutableStatisticsKHR
vkGetPipelineExecutableInternalRepresentationsKHR
vkCreateDescriptorSetLayout vkDestroyDescriptorSetLayout vkCreateDescriptorPool vkDestroyDescriptorPool
vkAllocateDescriptorSets vkUpdateDescriptorSets
vkCreateCommandPool vkDestroyCommandPool vkAllocateCommandBuffers vkBeginCommandBuffer vkEndCommandBuffer
vkCmdBindPipeline vkCmdBindDescriptorSets vkCmdDispatch vkCmdCopyBuffer vkCmdPipelineBarrier
vkCmdResetQueryPool vkCmdWriteTimestamp vkCreateQueryPool vkDestroyQueryPool vkGetQueryPoolResults
vkCreateSemaphore vkDestroySemaphore vkWaitSemaphores vkGetSemaphoreCounterValue
vkCreateFence vkDestroyFence vkResetFences vkWaitForFences vkGetFenceStatus
"""

# Structs that are only ever reached through a pNext chain.
STRUCTS = """
VkPhysicalDeviceVulkan11Features VkPhysicalDeviceVulkan12Features VkPhysicalDeviceVulkan13Features
VkPhysicalDeviceVulkan11Properties VkPhysicalDeviceVulkan12Properties
VkPhysicalDeviceSubgroupSizeControlFeatures VkPhysicalDeviceSubgroupSizeControlProperties
VkPhysicalDeviceMaintenance4Features VkPhysicalDeviceMaintenance4Properties
VkPhysicalDeviceShaderIntegerDotProductFeatures
VkPhysicalDeviceShaderAtomicFloatFeaturesEXT
VkPhysicalDeviceWorkgroupMemoryExplicitLayoutFeaturesKHR
VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR
VkPhysicalDevicePipelineRobustnessFeaturesEXT VkPipelineRobustnessCreateInfoEXT
VkPhysicalDevicePortabilitySubsetFeaturesKHR
VkPhysicalDeviceExternalMemoryHostPropertiesEXT VkImportMemoryHostPointerInfoEXT VkExternalMemoryBufferCreateInfo
VkPhysicalDeviceMemoryBudgetPropertiesEXT
VkPhysicalDeviceShaderCorePropertiesAMD VkPhysicalDeviceShaderSMBuiltinsPropertiesNV
VkPhysicalDeviceCooperativeMatrixFeaturesKHR VkPhysicalDeviceShaderBfloat16FeaturesKHR
VkPipelineShaderStageRequiredSubgroupSizeCreateInfo
VkSemaphoreTypeCreateInfo VkTimelineSemaphoreSubmitInfo
"""

CONSTANTS = """
VK_WHOLE_SIZE VK_TRUE VK_FALSE VK_UUID_SIZE
VK_SUCCESS VK_NOT_READY VK_TIMEOUT VK_INCOMPLETE VK_ERROR_OUT_OF_HOST_MEMORY VK_ERROR_OUT_OF_DEVICE_MEMORY
VK_ERROR_DEVICE_LOST VK_ERROR_INITIALIZATION_FAILED VK_ERROR_INCOMPATIBLE_DRIVER VK_ERROR_LAYER_NOT_PRESENT
VK_ERROR_EXTENSION_NOT_PRESENT VK_ERROR_FEATURE_NOT_PRESENT
VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR
VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU VK_PHYSICAL_DEVICE_TYPE_CPU
VK_QUEUE_COMPUTE_BIT VK_QUEUE_GRAPHICS_BIT
VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
VK_MEMORY_PROPERTY_HOST_CACHED_BIT VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT VK_MEMORY_PROPERTY_PROTECTED_BIT
VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD VK_MEMORY_PROPERTY_DEVICE_UNCACHED_BIT_AMD
VK_BUFFER_USAGE_TRANSFER_SRC_BIT VK_BUFFER_USAGE_TRANSFER_DST_BIT VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT VK_SHARING_MODE_EXCLUSIVE
VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
VK_SHADER_STAGE_COMPUTE_BIT
VK_SUBGROUP_FEATURE_BASIC_BIT VK_SUBGROUP_FEATURE_ARITHMETIC_BIT VK_SUBGROUP_FEATURE_SHUFFLE_BIT
VK_DESCRIPTOR_TYPE_STORAGE_BUFFER VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER
VK_PIPELINE_BIND_POINT_COMPUTE
VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR VK_PIPELINE_CREATE_CAPTURE_INTERNAL_REPRESENTATIONS_BIT_KHR
VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
VK_PIPELINE_CACHE_HEADER_VERSION_ONE
VK_PIPELINE_ROBUSTNESS_BUFFER_BEHAVIOR_DISABLED_EXT VK_PIPELINE_ROBUSTNESS_IMAGE_BEHAVIOR_DISABLED_EXT
VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_BOOL32_KHR VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_INT64_KHR
VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_UINT64_KHR VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_FLOAT64_KHR
VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT VK_COMMAND_BUFFER_LEVEL_PRIMARY
VK_PIPELINE_STAGE_TOP_OF_PIPE_BIT VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
VK_PIPELINE_STAGE_TRANSFER_BIT VK_PIPELINE_STAGE_HOST_BIT
VK_ACCESS_SHADER_READ_BIT VK_ACCESS_SHADER_WRITE_BIT VK_ACCESS_TRANSFER_READ_BIT VK_ACCESS_TRANSFER_WRITE_BIT
VK_ACCESS_HOST_READ_BIT VK_ACCESS_UNIFORM_READ_BIT
VK_QUERY_TYPE_TIMESTAMP VK_QUERY_RESULT_64_BIT VK_QUERY_RESULT_WAIT_BIT
VK_SEMAPHORE_TYPE_TIMELINE
VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT
VK_DEBUG_UTILS_MESSAGE_TYPE_GENERAL_BIT_EXT VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT
VK_DEBUG_UTILS_MESSAGE_TYPE_PERFORMANCE_BIT_EXT
VK_SCOPE_SUBGROUP_KHR
VK_COMPONENT_TYPE_FLOAT16_KHR VK_COMPONENT_TYPE_FLOAT32_KHR VK_COMPONENT_TYPE_FLOAT64_KHR
VK_COMPONENT_TYPE_SINT8_KHR VK_COMPONENT_TYPE_SINT16_KHR VK_COMPONENT_TYPE_SINT32_KHR VK_COMPONENT_TYPE_SINT64_KHR
VK_COMPONENT_TYPE_UINT8_KHR VK_COMPONENT_TYPE_UINT16_KHR VK_COMPONENT_TYPE_UINT32_KHR VK_COMPONENT_TYPE_UINT64_KHR
VK_COMPONENT_TYPE_BFLOAT16_KHR
"""

# Extensions younger than the registry in Debian bookworm (1.3.239). Written in the registry's own form, from the
# specifications of VK_KHR_cooperative_matrix (507) and VK_KHR_shader_bfloat16 (142), and used only for names that the
# registry does not know.
SUPPLEMENT = """
<registry>
  <types>
    <type category="enum" name="VkComponentTypeKHR"/>
    <type category="enum" name="VkScopeKHR"/>
    <type category="struct" name="VkPhysicalDeviceCooperativeMatrixFeaturesKHR">
      <member values="VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR"><type>VkStructureType</type>
        <name>sType</name></member>
      <member><type>void</type>* <name>pNext</name></member>
      <member><type>VkBool32</type> <name>cooperativeMatrix</name></member>
      <member><type>VkBool32</type> <name>cooperativeMatrixRobustBufferAccess</name></member>
    </type>
    <type category="struct" name="VkCooperativeMatrixPropertiesKHR">
      <member values="VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR"><type>VkStructureType</type>
        <name>sType</name></member>
      <member><type>void</type>* <name>pNext</name></member>
      <member><type>uint32_t</type> <name>MSize</name></member>
      <member><type>uint32_t</type> <name>NSize</name></member>
      <member><type>uint32_t</type> <name>KSize</name></member>
      <member><type>VkComponentTypeKHR</type> <name>AType</name></member>
      <member><type>VkComponentTypeKHR</type> <name>BType</name></member>
      <member><type>VkComponentTypeKHR</type> <name>CType</name></member>
      <member><type>VkComponentTypeKHR</type> <name>ResultType</name></member>
      <member><type>VkBool32</type> <name>saturatingAccumulation</name></member>
      <member><type>VkScopeKHR</type> <name>scope</name></member>
    </type>
    <type category="struct" name="VkPhysicalDeviceShaderBfloat16FeaturesKHR">
      <member values="VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR"><type>VkStructureType</type>
        <name>sType</name></member>
      <member><type>void</type>* <name>pNext</name></member>
      <member><type>VkBool32</type> <name>shaderBFloat16Type</name></member>
      <member><type>VkBool32</type> <name>shaderBFloat16DotProduct</name></member>
      <member><type>VkBool32</type> <name>shaderBFloat16CooperativeMatrix</name></member>
    </type>
  </types>
  <enums name="VkStructureType">
    <enum value="1000506000" name="VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR"/>
    <enum value="1000506001" name="VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR"/>
    <enum value="1000141000" name="VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR"/>
  </enums>
  <enums name="VkComponentTypeKHR">
    <enum value="0" name="VK_COMPONENT_TYPE_FLOAT16_KHR"/>
    <enum value="1" name="VK_COMPONENT_TYPE_FLOAT32_KHR"/>
    <enum value="2" name="VK_COMPONENT_TYPE_FLOAT64_KHR"/>
    <enum value="3" name="VK_COMPONENT_TYPE_SINT8_KHR"/>
    <enum value="4" name="VK_COMPONENT_TYPE_SINT16_KHR"/>
    <enum value="5" name="VK_COMPONENT_TYPE_SINT32_KHR"/>
    <enum value="6" name="VK_COMPONENT_TYPE_SINT64_KHR"/>
    <enum value="7" name="VK_COMPONENT_TYPE_UINT8_KHR"/>
    <enum value="8" name="VK_COMPONENT_TYPE_UINT16_KHR"/>
    <enum value="9" name="VK_COMPONENT_TYPE_UINT32_KHR"/>
    <enum value="10" name="VK_COMPONENT_TYPE_UINT64_KHR"/>
    <enum value="1000141000" name="VK_COMPONENT_TYPE_BFLOAT16_KHR"/>
  </enums>
  <enums name="VkScopeKHR">
    <enum value="3" name="VK_SCOPE_SUBGROUP_KHR"/>
  </enums>
  <commands>
    <command>
      <proto><type>VkResult</type> <name>vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR</name></proto>
      <param><type>VkPhysicalDevice</type> <name>physicalDevice</name></param>
      <param><type>uint32_t</type>* <name>pPropertyCount</name></param>
      <param><type>VkCooperativeMatrixPropertiesKHR</type>* <name>pProperties</name></param>
    </command>
  </commands>
</registry>
"""

# How C's own types and Vulkan's type categories are said in ctypes.
C_TYPES = {
    "void": "None",
    "char": "ctypes.c_char",
    "float": "ctypes.c_float",
    "double": "ctypes.c_double",
    "int": "ctypes.c_int",
    "int32_t": "ctypes.c_int32",
    "int64_t": "ctypes.c_int64",
    "uint8_t": "ctypes.c_uint8",
    "uint32_t": "ctypes.c_uint32",
    "uint64_t": "ctypes.c_uint64",
    "size_t": "ctypes.c_size_t",
}

HEADER = '''\
# Generated by tools/generate_vulkan.py from vk.xml {version}. Do not edit.
"""ctypes bindings of the part of Vulkan that the runtime uses: constants, structs and prototypes."""

from __future__ import annotations

import ctypes
from typing import Any

# Vulkan functions are __stdcall on Windows, which differs from the default on 32-bit machines only.
FUNCTYPE: Any = getattr(ctypes, "WINFUNCTYPE", ctypes.CFUNCTYPE)


class Chained(ctypes.Structure):
    """A struct that begins with ``sType`` and ``pNext``; the constructor fills the former."""

    STYPE = 0

    def __init__(self, **fields: Any) -> None:
        super().__init__(sType=self.STYPE, **fields)


'''


class Registry:
    """vk.xml, by name."""

    def __init__(self, root: ElementTree.Element) -> None:
        self.types: dict[str, ElementTree.Element] = {}
        self.commands: dict[str, ElementTree.Element] = {}
        self.values: dict[str, str] = {}
        self.results: dict[str, int] = {}
        self._aliases: dict[str, str] = {}
        for tree in (root, ElementTree.fromstring(SUPPLEMENT)):
            self._read(tree)
        version = next(t for t in root.iter("type") if t.findtext("name") == "VK_HEADER_VERSION")
        self.version = "1.3." + "".join(version.itertext()).split()[-1]

    def _read(self, root: ElementTree.Element) -> None:
        for node in root.iterfind("types/type"):
            self.types.setdefault(node.get("name") or node.findtext("name") or "", node)
        for node in root.iterfind("commands/command"):
            self.commands.setdefault(node.get("name") or node.findtext("proto/name") or "", node)
        for group in root.iterfind("enums"):
            for node in group.iterfind("enum"):
                self._enum(node, group.get("name", ""), None)
        for scope in [*root.iterfind("feature"), *root.iterfind("extensions/extension")]:
            if scope.get("supported") == "disabled":
                continue
            for node in scope.iterfind("require/enum"):
                self._enum(node, node.get("extends", ""), scope.get("number"))

    def _enum(self, node: ElementTree.Element, group: str, number: str | None) -> None:
        name = node.get("name", "")
        if alias := node.get("alias"):
            self._aliases[name] = alias
            return
        if (value := node.get("value")) is not None:
            text = value
        elif (bit := node.get("bitpos")) is not None:
            text = hex(1 << int(bit))
        elif (offset := node.get("offset")) is not None:
            extension = int(node.get("extnumber") or number or "0")
            signed = 1000000000 + (extension - 1) * 1000 + int(offset)
            text = str(-signed if node.get("dir") == "-" else signed)
        else:
            return
        self.values.setdefault(name, text)
        if group == "VkResult" and re.fullmatch(r"-?\d+", text):
            self.results.setdefault(name, int(text))

    def constant(self, name: str) -> int:
        text = self.values[self._aliases.get(name, name)].strip("()")
        if found := re.fullmatch(r"~(\d+)U(LL)?", text):
            return (1 << (64 if found[2] else 32)) - 1 - int(found[1])
        return int(text, 0)

    def type_node(self, name: str) -> ElementTree.Element:
        node = self.types[name]
        return self.type_node(node.get("alias", "")) if node.get("alias") else node


class Writer:
    """Collects what the wanted names need, in the order of their dependence."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.done: set[str] = set()
        self.structs: list[str] = []

    def spelling(self, name: str) -> str:
        """The ctypes name of a type that is not a pointer; defines structs on the way."""
        if name in C_TYPES:
            return C_TYPES[name]
        node = self.registry.type_node(name)
        category = node.get("category", "")
        if category == "handle":
            dispatchable = node.findtext("type") == "VK_DEFINE_HANDLE"
            return "ctypes.c_void_p" if dispatchable else "ctypes.c_uint64"
        if category == "enum":
            return "ctypes.c_int32"
        if category == "bitmask":
            return "ctypes.c_uint64" if "VkFlags64" in "".join(node.itertext()) else "ctypes.c_uint32"
        if category == "basetype":
            return self.spelling(node.findtext("type") or "")
        if category == "funcpointer":
            return "ctypes.c_void_p"
        if category in ("struct", "union"):
            self.struct(name, node)
            return name
        raise SystemExit(f"{name}: category {category!r} is not handled")

    def declared(self, node: ElementTree.Element) -> str:
        """The ctypes type of a struct member or of a parameter."""
        base = node.findtext("type") or ""
        before = (node.text or "") + base
        after = node.find("type")
        stars = (before + ((after.tail if after is not None else "") or "")).count("*")
        if base == "char" and stars:
            return "ctypes.POINTER(ctypes.c_char_p)" if stars == 2 else "ctypes.c_char_p"
        # Allocation callbacks are never passed, and untyped chains are plain addresses.
        if stars and (base in ("void", "VkAllocationCallbacks") or stars > 1):
            return "ctypes.POINTER(ctypes.c_void_p)" if stars > 1 else "ctypes.c_void_p"
        inner = self.spelling(base)
        if stars:
            return f"ctypes.POINTER({inner})"
        name = node.find("name")
        tail = (name.tail or "") if name is not None else ""
        if (enum := node.find("enum")) is not None:
            return f"{inner} * {self.registry.constant(enum.text or '')}"
        for length in reversed(re.findall(r"\[(\d+)\]", tail)):
            inner = f"{inner} * {length}"
        return inner

    def struct(self, name: str, node: ElementTree.Element) -> None:
        if name in self.done:
            return
        self.done.add(name)
        members = [m for m in node.iterfind("member") if m.get("api") != "vulkansc"]
        fields = [(m.findtext("name") or "", self.declared(m)) for m in members]
        stype = next((m.get("values") for m in members if m.findtext("name") == "sType"), None)
        base = "ctypes.Union" if node.get("category") == "union" else "Chained" if stype else "ctypes.Structure"
        lines = [f"class {name}({base}):"]
        if stype:
            lines.append(f"    STYPE = {self.registry.constant(stype)}")
        lines.append("    _fields_ = (")
        lines += [f'        ("{field}", {spelled}),' for field, spelled in fields]
        self.structs.append("\n".join([*lines, "    )"]))

    def prototype(self, name: str) -> str:
        node = self.registry.commands[name]
        restype = node.findtext("proto/type") or ""
        result = "ctypes.c_int32" if restype == "VkResult" else self.spelling(restype)
        params = [self.declared(p) for p in node.iterfind("param") if p.get("api") != "vulkansc"]
        one_line = f'    "{name}": ({result}, {", ".join(params)}),'
        if len(one_line) <= LINE:
            return one_line
        return "\n".join([f'    "{name}": (', *(f"        {p}," for p in [result, *params]), "    ),"])

    def callback(self, name: str) -> str:
        text = "".join(self.registry.type_node(name).itertext())
        result, params = re.fullmatch(r"typedef (\w+) \(VKAPI_PTR \*\w+\)\((.*)\);\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
        spelled = []
        for param in params.split(","):
            base = re.sub(r"\bconst\b|\*", " ", param).split()[0]
            pointer = "*" in param
            inner = "ctypes.c_void_p" if base == "void" else self.spelling(base)
            spelled.append(f"ctypes.POINTER({inner})" if pointer and base != "void" else inner)
        head = f"{name}: Any = FUNCTYPE("
        return "\n".join([head, *(f"    {s}," for s in [self.spelling(result), *spelled]), ")"])


def generate(registry: Registry) -> str:
    """The text of ``_vulkan_api.py``."""
    writer = Writer(registry)
    for name in STRUCTS.split():
        writer.spelling(name)
    prototypes = [writer.prototype(name) for name in COMMANDS.split()]
    callback = writer.callback("PFN_vkDebugUtilsMessengerCallbackEXT")
    parts = [HEADER.format(version=registry.version)]
    parts.append("\n".join(f"{name} = {registry.constant(name)}" for name in CONSTANTS.split()) + "\n\n")
    results = sorted(registry.results.items(), key=lambda item: -item[1])
    parts.append("RESULTS: dict[int, str] = {\n" + "".join(f'    {v}: "{n}",\n' for n, v in results) + "}\n\n\n")
    parts.append("\n\n\n".join(writer.structs) + "\n\n\n")
    parts.append("# Result first, then the parameters.\nPROTOTYPES: dict[str, tuple[Any, ...]] = {\n")
    parts.append("\n".join(prototypes) + "\n}\n\n" + callback + "\n")
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("registry", nargs="?", type=Path, default=REGISTRY, help="path of vk.xml")
    parser.add_argument("--check", action="store_true", help="exit 1 when the committed file is not current")
    options = parser.parse_args()
    text = generate(Registry(ElementTree.parse(options.registry).getroot()))
    if options.check:
        current = OUTPUT.read_text(encoding="utf-8") if OUTPUT.exists() else ""
        if current != text:
            print(f"{OUTPUT} is not current; run python tools/generate_vulkan.py", file=sys.stderr)
        return int(current != text)
    OUTPUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
