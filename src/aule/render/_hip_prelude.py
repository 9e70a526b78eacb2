"""Device functions of rendered HIP kernels, in a namespace ``aule``: the only text that names AMD's builtins.

A kernel gets the functions it uses, between ``#ifndef AULE_STAND_IN`` and ``#endif``. A program that runs the kernel
without such a GPU defines that macro, and all of them itself, with the types and the macros `ATTRIBUTES`. HIP's headers
and its device library are not needed.
"""

from __future__ import annotations

from collections.abc import Iterable

from aule.ir.types import Scalar, Vector
from aule.render._circular import COS, HALF_PI, SIN

STAND_IN = "AULE_STAND_IN"
SCALARS = {
    "i8": "signed char", "i16": "short", "i32": "int", "i64": "long long", "u8": "unsigned char",
    "u16": "unsigned short", "u32": "unsigned int", "u64": "unsigned long long", "f16": "_Float16", "f32": "float",
    "f64": "double",
}  # fmt: skip
_ALIGNMENT = 16
"""Largest alignment of a vector, in bytes: a lane accesses no more at a time."""

ATTRIBUTES = (
    "#define AULE_KERNEL(threads) \\\n"
    '    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads)))\n'
    "#define AULE_SHARED(bytes) __attribute__((shared)) __attribute__((aligned(bytes)))\n"
    '#define AULE_HERE(registers) asm volatile("" : "+v"(registers))\n'
    "#define AULE_DEVICE static inline __attribute__((device)) __attribute__((always_inline))"
)


def type_name(type_: Scalar | Vector) -> str:
    """The name of a type in HIP source: as in the IR, which HIP's headers do not use."""
    return f"{type_.elem}x{type_.lanes}" if isinstance(type_, Vector) else str(type_)


def type_definitions(types: Iterable[Vector]) -> list[str]:
    """Definitions of all scalars, which functions use, and of some vectors."""
    lines = [f"typedef {text} {name};" for name, text in SCALARS.items()]
    for type_ in sorted(types, key=str):
        align = f", aligned({_ALIGNMENT})" if type_.bytes > _ALIGNMENT else ""
        lines.append(f"typedef {type_.elem} {type_name(type_)} __attribute__((vector_size({type_.bytes}){align}));")
    return lines


def functions(names: Iterable[str], wave: int, arch: str) -> list[str]:
    """The text of functions, each after those that it calls.

    Parameters
    ----------
    names : iterable of str
        As in the kernel; ``shuffle_xor`` with its mask (``shuffle_xor<4>``), an atomic with the space of its memory
        (``atomic_add_global``).
    wave : int
        Lanes of a wave.
    arch : str
        As ``gfx942``.
    """
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in texts:
            return
        for other in _needs(name, wave):
            add(other)
        texts[name] = _text(name, wave, arch)

    for name in sorted(names):
        add(name)
    return list(texts.values())


def _needs(name: str, wave: int) -> tuple[str, ...]:
    """Functions that a function calls."""
    kind = name.partition("<")[0]
    if kind == "shuffle_xor":
        return ("bits", "shuffle", "exchange") if _mask(name) >= 32 else ("bits", "exchange")
    if kind.startswith("subgroup_reduce_"):
        other = kind.removeprefix("subgroup_reduce_")
        return (*(() if other == "add" else (other,)), *(f"shuffle_xor<{mask}>" for mask in _masks(wave)))
    if kind in _FACTORS:
        return ("bits",)
    return _NEEDS.get(kind, ())


def _text(name: str, wave: int, arch: str) -> str:
    kind = name.partition("<")[0]
    if kind in _FACTORS:
        return _product(kind)
    if kind == "shuffle_xor":
        return f"AULE_DEVICE i32 exchange(i32 word, Mask<{_mask(name)}>) {{ return {_exchange(_mask(name), arch)}; }}"
    if kind == "shuffle":
        return _shuffle(wave, arch)
    if kind.startswith("subgroup_reduce_"):
        return _reduce(kind.removeprefix("subgroup_reduce_"), wave)
    if kind.startswith("atomic_"):
        _, operation, space = kind.split("_")
        return _atomic(operation, space, arch)
    return _FUNCTIONS[kind].strip("\n").replace("{wave}", str(wave))


# -- subgroups ---------------------------------------------------------------------------------------------------------


def generation(arch: str) -> int:
    """Major version of an instruction set: 9, 10, 11 or 12."""
    return int(arch.removeprefix("gfx")[:-2])


def _masks(wave: int) -> list[int]:
    """Exchanges by which all lanes get the sum of all."""
    return [1 << i for i in range(wave.bit_length() - 1)]


def _mask(name: str) -> int:
    return int(name.partition("<")[2].rstrip(">"))


def _shuffle(wave: int, arch: str) -> str:
    words, result = "word = bits<i32>(x), near = __builtin_amdgcn_ds_bpermute(lane * 4, word)", "near"
    if wave == 64 and generation(arch) > 9:
        # The crossbar stays within 32 lanes there. The other half comes by a swap of both. All lanes read both: in a
        # branch, lanes could not read from those that take the other one.
        words += ",\n        far = __builtin_amdgcn_ds_bpermute(lane * 4, __builtin_amdgcn_permlane64(word))"
        result = "(lane ^ lane_id()) & 32 ? far : near"
    return (
        "template <class T> AULE_DEVICE T shuffle(T x, i32 lane)\n"
        f"{{\n    i32 {words};\n    return bits<T>({result});\n}}"
    )


def _exchange(mask: int, arch: str) -> str:
    """The word of lane ^ mask: by a permutation inside of an instruction (DPP) if there is one, else the crossbar."""
    control = None
    if mask < 4:
        control = sum((lane ^ mask) << 2 * lane for lane in range(4))
    elif mask < 16 and generation(arch) >= 10:
        control = 0x160 + mask
    elif mask in (7, 8, 15):
        control = {7: 0x141, 8: 0x128, 15: 0x140}[mask]  # mirror half a row, rotate a row by 8, mirror a row
    if control is not None:
        return f"__builtin_amdgcn_update_dpp(0, word, {control:#x}, 15, 15, true)"
    if mask < 32:
        return f"__builtin_amdgcn_ds_swizzle(word, {mask << 10 | 0x1F:#x})"
    return f"shuffle(word, lane_id() ^ {mask})"


def _reduce(kind: str, wave: int) -> str:
    step = "x + {}" if kind == "add" else kind + "(x, {})"
    body = "\n".join(f"    x = {step.format(f'shuffle_xor<{mask}>(x)')};" for mask in _masks(wave))
    return f"template <class T> AULE_DEVICE T subgroup_reduce_{kind}(T x)\n{{\n{body}\n    return x;\n}}"


# -- what only some chips have -----------------------------------------------------------------------------------------


def multiplies_pairs(arch: str) -> bool:
    """Whether an instruction multiplies two pairs of bf16 and adds both products to an fp32 number."""
    return arch == "gfx950" or generation(arch) >= 11


def converts_e4m3(arch: str) -> bool:
    """Whether instructions convert e4m3; before gfx950 they are for another format of this name."""
    return arch == "gfx950" or generation(arch) >= 12


# -- atomics -----------------------------------------------------------------------------------------------------------


def adds_floats(arch: str) -> bool:
    """Whether an instruction adds fp32 numbers in global memory atomically and returns the old one."""
    return arch in ("gfx90a", "gfx942", "gfx950") or generation(arch) >= 11


def _atomic(kind: str, space: str, arch: str) -> str:
    scope = "AGENT" if space == "global" else "WORKGROUP"
    builtin = "__hip_atomic_exchange" if kind == "exchange" else f"__hip_atomic_fetch_{kind}"
    name = f"atomic_{kind}_{space}"
    text = (
        f"template <class T> AULE_DEVICE T {name}(T* place, T x)\n"
        f"{{\n    return {builtin}(place, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_{scope});\n}}"
    )
    if kind == "add" and space == "global" and adds_floats(arch):
        # The general function would be a loop of compare and swap, in case the memory is another device's.
        text += (
            f"\nAULE_DEVICE f32 {name}(f32* place, f32 x)\n{{\n"
            "    return __builtin_amdgcn_global_atomic_fadd_f32((__attribute__((address_space(1))) f32*)place, x);\n}"
        )
    return text


# -- matrices ----------------------------------------------------------------------------------------------------------

_FACTORS = {
    "mfma_f32_16x16x16_f16": ("f16x4", "mfma_f32_16x16x16f16"),
    "mfma_f32_16x16x16_bf16": ("u16x4", "mfma_f32_16x16x16bf16_1k"),
    "mfma_f32_16x16x8_bf16": ("u16x4", "mfma_f32_16x16x8bf16"),
    "mfma_f32_16x16x32_f16": ("f16x8", "mfma_f32_16x16x32_f16"),
    "mfma_f32_16x16x32_bf16": ("u16x8", "mfma_f32_16x16x32_bf16"),
    "wmma_f32_16x16x16_f16_w32": ("f16x16", "wmma_f32_16x16x16_f16_w32"),
    "wmma_f32_16x16x16_bf16_w32": ("u16x16", "wmma_f32_16x16x16_bf16_w32"),
    "wmma_f32_16x16x16_f16_w64": ("f16x16", "wmma_f32_16x16x16_f16_w64"),
    "wmma_f32_16x16x16_bf16_w64": ("u16x16", "wmma_f32_16x16x16_bf16_w64"),
    "wmma_f32_16x16x16_f16_w32_gfx12": ("f16x8", "wmma_f32_16x16x16_f16_w32_gfx12"),
    "wmma_f32_16x16x16_bf16_w32_gfx12": ("u16x8", "wmma_f32_16x16x16_bf16_w32_gfx12"),
}
"""Products: the type of both factors in a kernel, and the name of the builtin."""


def _product(name: str) -> str:
    """A product ``a @ b + c`` of matrices; lanes and components are those of the instruction."""
    kind, builtin = _FACTORS[name]
    total = "f32x4" if name.startswith("mfma") or "_w64" in name else "f32x8"
    flags = ", 0, 0, 0" if name.startswith("mfma") else ""
    call = f"__builtin_amdgcn_{builtin}({{}}, {{}}, {{}}{flags})"
    elem, lanes = "__bf16" if "16x16x32" in name else "short", int(kind.partition("x")[2])
    if name == "mfma_f32_16x16x8_bf16":  # a product of depth 16 is two of depth 8
        lanes = 2
        parts = [[f"Factor{{(short){x}[{i}], (short){x}[{i + 1}]}}" for x in "ab"] for i in (0, 2)]
        result = call.format(*parts[1], call.format(*parts[0], "c"))
    else:
        result = call.format(*("ab" if kind.startswith("f16") else ("bits<Factor>(a)", "bits<Factor>(b)")), "c")
    factor = f"    typedef {elem} Factor __attribute__((vector_size({2 * lanes})));\n" if "Factor" in result else ""
    return f"AULE_DEVICE {total} {name}({kind} a, {kind} b, {total} c)\n{{\n{factor}    return {result};\n}}"


# -- the others --------------------------------------------------------------------------------------------------------


def _each_lane(name: str) -> str:
    """A function of a vector, out of that of a scalar."""
    return (
        f"template <class V> AULE_DEVICE V {name}(V x)\n{{\n"
        f"    for (u32 i = 0; i < sizeof(x) / sizeof(x[0]); i++)\n        x[i] = {name}(x[i]);\n    return x;\n}}"
    )


def _scalars(name: str, f32: str) -> str:
    """A function of f32, and through it of f16 and of vectors."""
    return (
        f"AULE_DEVICE f32 {name}(f32 x) {{ return {f32}; }}\n"
        f"AULE_DEVICE f16 {name}(f16 x) {{ return (f16){name}((f32)x); }}\n{_each_lane(name)}"
    )


def _elementwise(name: str, count: int) -> str:
    letters = "abc"[:count]
    arguments = ", ".join(f"T {x}" for x in letters)
    call = f"__builtin_elementwise_{name}({', '.join(letters)})"
    return f"template <class T> AULE_DEVICE T {name}({arguments}) {{ return {call}; }}"


def _horner(coefficients: tuple[float, ...]) -> str:
    text = f"{coefficients[-1]!r}f"
    for c in reversed(coefficients[:-1]):
        text = f"__builtin_fmaf(square, {text}, {c!r}f)"
    return text


def _circular() -> str:
    reduced = "\n".join(f"    t = __builtin_fmaf(quarters, {-part!r}f, t);" for part in HALF_PI)
    return f"""
// sin(x + quarter * pi/2) by a polynomial: the instruction is inaccurate away from 0.
AULE_DEVICE f32 circular(f32 x, i32 quarter)
{{
    f32 quarters = __builtin_rintf(x * 0.6366197723675814f), t = x;
{reduced}
    f32 square = t * t;
    f32 sine = __builtin_fmaf(t * square, {_horner(SIN)}, t);
    f32 cosine = __builtin_fmaf(square, {_horner(COS)}, 1.0f);
    i32 quadrant = (i32)quarters + quarter;
    f32 result = quadrant & 1 ? cosine : sine;
    return quadrant & 2 ? -result : result;
}}"""


_FENCE = '__builtin_amdgcn_fence({}, "{}"{});'


def _barrier(name: str, before: str, after: str, space: str = "") -> str:
    return f"""
AULE_DEVICE void {name}()
{{
    {_FENCE.format("__ATOMIC_RELEASE", before, space)}
    __builtin_amdgcn_s_barrier();
    {_FENCE.format("__ATOMIC_ACQUIRE", after, space)}
}}"""


_FUNCTIONS: dict[str, str] = {
    "bits": "template <class T, class S> AULE_DEVICE T bits(S x) { return __builtin_bit_cast(T, x); }",
    "convert": "template <class T, class S> AULE_DEVICE T convert(S x) { return __builtin_convertvector(x, T); }",
    "e4m3_halves": """
AULE_DEVICE f16x4 e4m3_halves(u32 x)
{
    auto low = __builtin_amdgcn_cvt_pk_f32_fp8(x, false), high = __builtin_amdgcn_cvt_pk_f32_fp8(x, true);
    return f16x4{(f16)low[0], (f16)low[1], (f16)high[0], (f16)high[1]};
}""",
    "dot_pairs": """
AULE_DEVICE f32 dot_pairs(u32 a, u32 b, f32 c)
{
    typedef __bf16 Pair __attribute__((vector_size(4)));
    return __builtin_amdgcn_fdot2_f32_bf16(bits<Pair>(a), bits<Pair>(b), c, false);
}""",
    "join": """
template <class W, class V> AULE_DEVICE W join(V low, V high)
{
    W both;
    for (u32 i = 0; i < sizeof(both) / sizeof(both[0]); i++)
        both[i] = i < sizeof(low) / sizeof(low[0]) ? low[i] : high[i - sizeof(low) / sizeof(low[0])];
    return both;
}""",
    "select": """
template <class M, class V> AULE_DEVICE V select(M mask, V yes, V no)
{
    for (u32 i = 0; i < sizeof(no) / sizeof(no[0]); i++)
        no[i] = mask[i] ? yes[i] : no[i];
    return no;
}""",
    "min": _elementwise("min", 2),
    "max": _elementwise("max", 2),
    "abs": _elementwise("abs", 1),
    "floor": _elementwise("floor", 1),
    "sqrt": _elementwise("sqrt", 1),
    "log2": _elementwise("log2", 1),
    "fma": _elementwise("fma", 3),
    "exp2": _scalars("exp2", "__builtin_amdgcn_exp2f(x)"),
    "rsqrt": _scalars("rsqrt", "__builtin_amdgcn_rsqf(x)"),
    "rcp": _scalars("rcp", "__builtin_amdgcn_rcpf(x)"),
    "round_bf16": """
AULE_DEVICE u16 round_bf16(f32 x)
{
    u32 word = bits<u32>(x);
    return x != x ? (word >> 16) | 64 : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}""",
    "circular": _circular(),
    "sin": _scalars("sin", "circular(x, 0)"),
    "cos": _scalars("cos", "circular(x, 1)"),
    "mulhi": """
AULE_DEVICE u32 mulhi(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }
template <class V> AULE_DEVICE V mulhi(V a, V b)
{
    for (u32 i = 0; i < sizeof(a) / sizeof(a[0]); i++)
        a[i] = mulhi(a[i], b[i]);
    return a;
}""",
    "thread_id": "AULE_DEVICE i32 thread_id() { return __builtin_amdgcn_workitem_id_x(); }",
    "lane_id": "AULE_DEVICE i32 lane_id() { return thread_id() & ({wave} - 1); }",
    # Read from one lane, so that the compiler knows that all lanes have the same number.
    "subgroup_id": "AULE_DEVICE i32 subgroup_id() { return __builtin_amdgcn_readfirstlane(thread_id() / {wave}); }",
    "group_id": """
AULE_DEVICE i32 group_id_x() { return __builtin_amdgcn_workgroup_id_x(); }
AULE_DEVICE i32 group_id_y() { return __builtin_amdgcn_workgroup_id_y(); }
AULE_DEVICE i32 group_id_z() { return __builtin_amdgcn_workgroup_id_z(); }""",
    "group_count": """
AULE_DEVICE i32 group_count_x(u32 threads) { return __builtin_amdgcn_grid_size_x() / threads; }
AULE_DEVICE i32 group_count_y(u32 threads) { return __builtin_amdgcn_grid_size_y(); }
AULE_DEVICE i32 group_count_z(u32 threads) { return __builtin_amdgcn_grid_size_z(); }""",
    # Each wave waits for its own stores. A fence of the workgroup would not on gfx9, so that another wave, which
    # releases them to the device behind the barrier, could be too early (github.com/llvm/llvm-project/pull/161638).
    "barrier_global": _barrier("barrier_global", "agent", "workgroup"),
    # Of shared memory alone: loads from global memory stay in flight. Compilers before 20 cannot say that.
    "barrier": f"""
#if __clang_major__ >= 20{_barrier("barrier", "workgroup", "workgroup", ', "local"')}
#else{_barrier("barrier", "workgroup", "workgroup")}
#endif""",
    "subgroup_barrier": f"""
AULE_DEVICE void subgroup_barrier()
{{
    {_FENCE.format("__ATOMIC_RELEASE", "wavefront", "")}
    __builtin_amdgcn_wave_barrier();
    {_FENCE.format("__ATOMIC_ACQUIRE", "wavefront", "")}
}}""",
    "device_fence": f"AULE_DEVICE void device_fence() {{ {_FENCE.format('__ATOMIC_ACQ_REL', 'agent', '')} }}",
    "subgroup_any": "AULE_DEVICE bool subgroup_any(bool x) { return __builtin_amdgcn_ballot_w{wave}(x) != 0; }",
    "subgroup_all": "AULE_DEVICE bool subgroup_all(bool x) { return __builtin_amdgcn_ballot_w{wave}(!x) == 0; }",
    "exchange": """
template <i32 mask> struct Mask {};
template <i32 mask, class T> AULE_DEVICE T shuffle_xor(T x)
{
    return bits<T>(exchange(bits<i32>(x), Mask<mask>()));
}""",
}
_NEEDS: dict[str, tuple[str, ...]] = {
    "shuffle": ("bits", "lane_id"), "sin": ("circular",), "cos": ("circular",), "lane_id": ("thread_id",),
    "subgroup_id": ("thread_id",), "exchange": ("bits",), "round_bf16": ("bits",), "dot_pairs": ("bits",),
}  # fmt: skip
