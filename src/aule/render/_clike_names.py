"""Identifiers that are valid in every C-like language."""

from __future__ import annotations

import re

_RESERVED = frozenset(
    """
    abs active alignas alignof all and any array as asm atomic attribute auto await barrier become bfloat bitcast bool
    break case cast catch ceil char clamp class column common compile complex concept const const_assert constant
    constexpr continue continuing convert cos crate debugger decltype default delete demote device diagnostic discard
    do dot double else enable enum event exp exp2 explicit export extends extern external false fallthrough fast filter
    final finally float floor fma fn for fragment friend from function get global goto half handle i32 if image2d_t impl
    implements import inline int interface kernel layout let local log log2 long loop mad macro main match max meta
    metal min mod module move mut mutable namespace new nil not null nullptr of operator or override package params
    partial pass pipe pixel pow precise private protected ptr ptrdiff_t pub public queue read read_only read_write
    readonly ref register require requires resource restrict return round rsqrt sampler select self set shared short
    signed sin size_t sizeof smooth splat sqrt static std step storage struct super switch target template texture this
    thread threadgroup throw trait true try type typedef typename typeof u32 uchar uint uint2 uint3 uint4 ulong uniform
    union unsigned use ushort using var vec vec2 vec3 vec4 vector vertex virtual void volatile where while with
    workgroup write write_only writeonly xor yield f16 f32 i64 u64 f64 float2 float4 half2 half4 int2 int4
    FMA INFINITY NAN Params infinity local_invocation_index minus_infinity not_a_number num_workgroups
    simdgroup_index_in_threadgroup subgroup_invocation_id subgroup_size thread_index_in_simdgroup
    thread_index_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid workgroup_id
    """.split()
)
"""Reserved words of any of the languages, and names that the printers use."""


class Names:
    """The identifiers of one kernel, other than those already ``taken``."""

    def __init__(self, taken: frozenset[str] = frozenset()) -> None:
        self._taken = set(taken)
        self._count = 0

    def new(self, hint: str = "") -> str:
        """A new identifier, like the hint if possible."""
        if not hint:
            self._count += 1
            hint = f"v{self._count - 1}"
        base = re.sub(r"\W", "_", hint, flags=re.ASCII)
        if base in _RESERVED or not base[0].isalpha() or "__" in base:
            base = f"{re.sub('__+', '_', base.strip('_'))}_" if base[0].isalpha() else f"v{base.strip('_')}"
        unique, count = base, 1
        while unique in self._taken:
            count += 1
            unique = f"{base}{count}" if base.endswith("_") else f"{base}_{count}"
        self._taken.add(unique)
        return unique
