"""Writes ``src/aule/render/_spirv_ops.py``: the numbers of SPIR-V that the renderer uses.

They come from Khronos' machine-readable grammar (Debian: ``spirv-headers``). Only the names listed here are taken.

    python tools/generate_spirv.py            write the file
    python tools/generate_spirv.py --check    exit 1 when the file is stale
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

GRAMMAR = Path("/usr/include/spirv/unified1")
OUTPUT = Path(__file__).resolve().parent.parent / "src" / "aule" / "render" / "_spirv_ops.py"

INSTRUCTIONS = """
    Name MemberName ExtInstImport ExtInst Extension MemoryModel EntryPoint ExecutionMode Capability Decorate
    MemberDecorate
    TypeVoid TypeBool TypeInt TypeFloat TypeVector TypeArray TypeRuntimeArray TypeStruct TypePointer TypeFunction
    ConstantTrue ConstantFalse Constant ConstantComposite
    Function FunctionEnd Variable Load Store AccessChain Label Branch BranchConditional Return LoopMerge SelectionMerge
    CompositeConstruct CompositeExtract CompositeInsert VectorShuffle
    ConvertFToU ConvertFToS ConvertSToF ConvertUToF UConvert SConvert FConvert Bitcast
    SNegate FNegate IAdd FAdd ISub FSub IMul FMul UDiv SDiv FDiv UMod SRem UMulExtended
    ShiftRightLogical ShiftRightArithmetic ShiftLeftLogical BitwiseOr BitwiseXor BitwiseAnd Not
    LogicalEqual LogicalNotEqual LogicalOr LogicalAnd LogicalNot Select
    IEqual INotEqual UGreaterThan SGreaterThan UGreaterThanEqual SGreaterThanEqual ULessThan SLessThan ULessThanEqual
    SLessThanEqual FOrdEqual FUnordNotEqual FOrdLessThan FOrdGreaterThan FOrdLessThanEqual FOrdGreaterThanEqual
    ControlBarrier MemoryBarrier AtomicExchange AtomicIAdd AtomicSMin AtomicUMin AtomicSMax AtomicUMax AtomicAnd
    AtomicOr AtomicXor AtomicFAddEXT
    GroupNonUniformAll GroupNonUniformAny GroupNonUniformShuffle GroupNonUniformShuffleXor
    GroupNonUniformIAdd GroupNonUniformFAdd GroupNonUniformSMin GroupNonUniformUMin GroupNonUniformFMin
    GroupNonUniformSMax GroupNonUniformUMax GroupNonUniformFMax
"""

ENUMERANTS = {
    "Capability": """
        Shader Float16 Float64 Int64 Int16 Int8 StorageBuffer16BitAccess StorageBuffer8BitAccess
        GroupNonUniform GroupNonUniformVote GroupNonUniformArithmetic
        GroupNonUniformShuffle VulkanMemoryModel SignedZeroInfNanPreserve RoundingModeRTE AtomicFloat32AddEXT
        WorkgroupMemoryExplicitLayoutKHR WorkgroupMemoryExplicitLayout8BitAccessKHR
        WorkgroupMemoryExplicitLayout16BitAccessKHR
    """,
    "StorageClass": "Input Uniform Workgroup Function StorageBuffer",
    "Decoration": """
        Block ArrayStride BuiltIn Restrict Aliased Coherent NonWritable Binding DescriptorSet Offset
        FPRoundingMode NoContraction
    """,
    "BuiltIn": "NumWorkgroups WorkgroupId LocalInvocationIndex SubgroupId SubgroupLocalInvocationId",
    "ExecutionMode": "LocalSize SignedZeroInfNanPreserve RoundingModeRTE",
    "ExecutionModel": "GLCompute",
    "AddressingModel": "Logical",
    "MemoryModel": "GLSL450 Vulkan",
    "MemorySemantics": "AcquireRelease UniformMemory WorkgroupMemory MakeAvailable MakeVisible",
    "MemoryAccess": "NonPrivatePointer",
    "Scope": "Device Workgroup Subgroup QueueFamily",
    "GroupOperation": "Reduce",
    "LoopControl": "None Unroll DontUnroll PartialCount",
    "SelectionControl": "None",
    "FunctionControl": "None",
    "FPRoundingMode": "RTE",
}

GLSL = """
    FAbs SAbs Floor Sin Cos Exp2 Log2 Sqrt InverseSqrt FMin UMin SMin FMax UMax SMax Fma
"""

# Debian bookworm's grammar (1.3.239) is older than SPV_KHR_cooperative_matrix and SPV_KHR_bfloat16. These few numbers
# are copied from the registered extensions; where the installed grammar knows them, it is checked to agree.
NEWER = {
    "Op": {
        "TypeCooperativeMatrixKHR": 4456,
        "CooperativeMatrixLoadKHR": 4457,
        "CooperativeMatrixStoreKHR": 4458,
        "CooperativeMatrixMulAddKHR": 4459,
        "CooperativeMatrixLengthKHR": 4460,
    },
    "Capability": {"CooperativeMatrixKHR": 6022, "BFloat16TypeKHR": 5116, "BFloat16CooperativeMatrixKHR": 5118},
    "CooperativeMatrixLayout": {"RowMajorKHR": 0, "ColumnMajorKHR": 1},
    "CooperativeMatrixUse": {"MatrixAKHR": 0, "MatrixBKHR": 1, "MatrixAccumulatorKHR": 2},
    "CooperativeMatrixOperands": {
        "MatrixASignedComponentsKHR": 1,
        "MatrixBSignedComponentsKHR": 2,
        "MatrixCSignedComponentsKHR": 4,
        "MatrixResultSignedComponentsKHR": 8,
    },
    "FPEncoding": {"BFloat16KHR": 0},
}


def tables(folder: Path) -> dict[str, dict[str, int]]:
    """Every table to write: its name, and its members with their numbers."""
    core = json.loads((folder / "spirv.core.grammar.json").read_text())
    extended = json.loads((folder / "extinst.glsl.std.450.grammar.json").read_text())
    opcodes = {i["opname"].removeprefix("Op"): i["opcode"] for i in core["instructions"]}
    known = {"Op": opcodes}
    for kind in core["operand_kinds"]:
        if "enumerants" in kind:
            known[kind["kind"]] = {e["enumerant"]: _number(e["value"]) for e in kind["enumerants"]}
    result = {"Op": {name: opcodes[name] for name in INSTRUCTIONS.split()}}
    for kind_name, names in ENUMERANTS.items():
        result[kind_name] = {name: known[kind_name][name] for name in names.split()}
    for kind_name, members in NEWER.items():
        for name, number in members.items():
            if known.get(kind_name, {}).get(name, number) != number:
                raise SystemExit(f"{kind_name}.{name}: expected {number}, the grammar says otherwise")
        result.setdefault(kind_name, {}).update(members)
    glsl = {i["opname"]: i["opcode"] for i in extended["instructions"]}
    result["Glsl"] = {name: glsl[name] for name in GLSL.split()}
    return result


def source(folder: Path) -> str:
    """The text of the generated file."""
    lines = [
        '"""Numbers of SPIR-V. Generated by tools/generate_spirv.py from Khronos\' grammar; do not edit."""',
        "",
        "from __future__ import annotations",
        "",
        "MAGIC = 0x07230203",
    ]
    for name, members in tables(folder).items():
        lines += ["", "", f"class {name}:"]
        # ``None`` is a keyword in Python.
        lines += [f"    {'None_' if k == 'None' else k} = {v}" for k, v in sorted(members.items(), key=lambda m: m[1])]
    return "\n".join(lines) + "\n"


def _number(value: Any) -> int:
    return value if isinstance(value, int) else int(value, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when the committed file is stale")
    parser.add_argument("--grammar", type=Path, default=GRAMMAR, help="folder of the grammar's JSON files")
    options = parser.parse_args()
    text = source(options.grammar)
    if not options.check:
        OUTPUT.write_text(text)
    elif not OUTPUT.exists() or OUTPUT.read_text() != text:
        print(f"{OUTPUT} is stale; run python tools/generate_spirv.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
