"""The operations of the kernel language: the specification that `verify` enforces.

Notation: T is a scalar or vector; "same" means that all operands and the result have one type. Integer arithmetic
wraps. Vectors are computed lane by lane; comparing vectors gives a vector of bool. ``attrs`` hold what is known while
tracing; an operation has exactly the attributes that its entry names.

Beyond the entries below:

* *Types.* A vector has 2, 4, 8 or 16 lanes. Memory (buffers, shared and private arrays) and fragments hold numbers,
  never bool. Shared and private arrays have a length of at least 1. An index or a stride is an i32, i64 or u32.
* *Values* are defined once and used only after that, in the same block or in a nested one. A loop index is visible only
  in the loop's body. A pointer may only be the first operand of a memory or fragment operation, the third of
  ``async_copy``, ``tensor_copy`` and ``warpgroup_mma``, or an operand of an intrinsic. A variable may only be the first
  operand of ``get``, ``set`` and ``repeat``, or one of the last operands of ``warpgroup_mma``.
* *Names* of the kernel, parameters, shared arrays and private arrays are identifiers (ASCII, no leading ``__``);
  those of parameters, shared arrays and tensor maps are distinct.
* *Tensor maps* name parameters: a buffer of f16 or bf16 with access "read" and scalars of integers. They have 2 to 5
  axes, and as many strides as axes but the first. A box has 1 to 256 elements along each axis and a multiple of 16
  bytes along the first, which is ``swizzle`` unless that is 0.
* *Access.* A buffer with access "read" is not stored to, one with access "write" is not loaded from, an atomic needs
  "readwrite".
* *Constants* lie in the range of their type; a float constant is rounded to its type.
* *Undefined behaviour*: integer division by zero, a shift by the width or more, a float too large for the integer it is
  cast to, a loop index that overflows, reading shared or private memory before it is written (a ``private`` in a loop
  starts undefined in each iteration), and any race.
* *A race* is two unordered accesses of one element by two threads, at least one a plain store, or one plain and one
  atomic. Barriers order the threads that take part in them. Only ``device_fence`` orders workgroups: let thread A have
  a fence followed by an atomic that changes an element, and let thread B read that change (or a later one of the
  element) by an atomic followed by a fence. Then everything that a barrier over global memory ordered before A's fence
  happens before everything that such a barrier orders after B's fence. An ``ordered`` atomic has a fence on either
  side. A ``cluster_post`` counts as an atomic that changes the element.
* *Uniform* control flow is taken alike by all threads of a workgroup. Uniform values are constants, scalar parameters,
  ``group_id``, ``group_count``, results computed from uniform values only, loads at a uniform index from buffers with
  access "read", indices of loops with uniform bounds, variables that are only set to uniform values in uniform control
  flow, and the result of ``workgroup_any``. All other values count as divergent: thread, lane and subgroup numbers, the
  contents of shared, private and writable memory, the results of subgroup operations, fragments, atomics and
  intrinsics.
* *Roles.* A role has one or more crews of consecutive subgroups, and each crew runs the block of its role. In that
  block the crew counts as the workgroup: barriers are those of its threads, asynchronous copies are counted by crew,
  and uniform means alike in all of its threads. Teams wait for each other at mbarriers only, which order their accesses
  to shared memory. Roles are not nested, and a block of a role sets only variables of its own. After ``roles`` a
  barrier must come before shared memory is used again.
* *Fragments.* All lanes of a subgroup work on the same matrix: index, stride and fill value are the same in all lanes.
  The device decides which element a component is. A fragment of n elements has n / subgroup size components per lane; a
  factor has a multiple of that on devices that store several copies. Copies of an element must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Category = Literal[
    "leaf", "unary", "binary", "compare", "ternary", "cast", "vector", "memory", "variable", "control", "sync",
    "subgroup", "fragment", "warpgroup", "target",
]  # fmt: skip


@dataclass(frozen=True)
class OpInfo:
    """Signature of an operation: number of operands (None: any), attributes, number of blocks (None: any), has a
    result."""

    category: Category
    arity: int | None
    doc: str
    attrs: tuple[str, ...] = ()
    blocks: int | None = 0
    result: bool = True


OPS: dict[str, OpInfo] = {
    # -- leaves ------------------------------------------------------------------------------------------------------
    "const": OpInfo("leaf", 0, "a scalar constant; floats may be infinite or NaN", ("value",)),
    "thread_id": OpInfo("leaf", 0, "i32: index of the thread in its workgroup"),
    "lane_id": OpInfo("leaf", 0, "i32: index of the thread in its subgroup"),
    "subgroup_id": OpInfo("leaf", 0, "i32: index of the subgroup in its workgroup"),
    "group_id": OpInfo("leaf", 0, "i32: index of the workgroup along axis 0, 1 or 2", ("axis",)),
    "group_count": OpInfo("leaf", 0, "i32: number of workgroups along an axis", ("axis",)),
    # -- arithmetic --------------------------------------------------------------------------------------------------
    "neg": OpInfo("unary", 1, "same; ints and floats"),
    "abs": OpInfo("unary", 1, "same; ints and floats"),
    "not": OpInfo("unary", 1, "same; logical for bool, bitwise for ints"),
    "exp2": OpInfo("unary", 1, "same; floats; exp2(-inf) is 0; a few ulp"),
    "log2": OpInfo("unary", 1, "same; floats; a few ulp"),
    "sqrt": OpInfo("unary", 1, "same; floats"),
    "rsqrt": OpInfo("unary", 1, "same; floats; a few ulp"),
    "rcp": OpInfo("unary", 1, "same; floats; 1/x within a few ulp"),
    "floor": OpInfo("unary", 1, "same; floats"),
    "small": OpInfo(
        "unary", 1, "same; floats; identity; promises a magnitude below 2**110 or NaN; zero may lose its sign"
    ),
    "sin": OpInfo("unary", 1, "same; floats"),
    "cos": OpInfo("unary", 1, "same; floats"),
    "add": OpInfo("binary", 2, "same; ints and floats"),
    "sub": OpInfo("binary", 2, "same; ints and floats"),
    "mul": OpInfo("binary", 2, "same; ints and floats"),
    "mulhi": OpInfo("binary", 2, "same; u32; the high word of the 64-bit product"),
    "div": OpInfo("binary", 2, "same; truncating for ints; floats within 2.5 ulp"),
    "rem": OpInfo("binary", 2, "same; ints; sign of the dividend"),
    "min": OpInfo("binary", 2, "same; ints and floats; with one NaN operand the result may be either operand"),
    "max": OpInfo("binary", 2, "same; ints and floats; with one NaN operand the result may be either operand"),
    "and": OpInfo("binary", 2, "same; bool or ints"),
    "or": OpInfo("binary", 2, "same; bool or ints"),
    "xor": OpInfo("binary", 2, "same; bool or ints"),
    "shl": OpInfo("binary", 2, "same; ints; the count is below the width"),
    "shr": OpInfo("binary", 2, "same; ints; arithmetic for signed, logical for unsigned"),
    "lt": OpInfo("compare", 2, "T, T -> bool of T's shape; false when unordered"),
    "le": OpInfo("compare", 2, "T, T -> bool of T's shape; false when unordered"),
    "gt": OpInfo("compare", 2, "T, T -> bool of T's shape; false when unordered"),
    "ge": OpInfo("compare", 2, "T, T -> bool of T's shape; false when unordered"),
    "eq": OpInfo("compare", 2, "T, T -> bool of T's shape; bool too"),
    "ne": OpInfo("compare", 2, "T, T -> bool of T's shape; bool too; true when unordered"),
    "fma": OpInfo("ternary", 3, "same; floats; a*b+c, rounded once where the target can"),
    "dot_pairs": OpInfo(
        "ternary",
        3,
        "u32, u32, f32 of one shape -> f32; each u32 holds two bf16, the first in its low half: the two products are "
        "added to the third operand. The target chooses the order of the sum; subnormals may count as zero. Only on "
        "targets with such an instruction",
    ),
    "select": OpInfo("ternary", 3, "bool (scalar, or of T's shape), T, T -> T; both sides are evaluated"),
    # -- conversion --------------------------------------------------------------------------------------------------
    "cast": OpInfo(
        "cast",
        1,
        "number to number, lane by lane; float to int truncates, to float rounds to nearest even; bool to number gives "
        "0 or 1; never to bool. A fragment keeps its shape and use",
    ),
    "bitcast": OpInfo(
        "cast",
        1,
        "the same bits as another scalar or vector of the same size; lane 0 of a vector is the lowest; no bool",
    ),
    "e4m3_halves": OpInfo(
        "cast",
        1,
        "u32 -> vector of four f16: its four bytes converted from e4m3, the lowest first; exact, with NaN for 0x7F "
        "and 0xFF. Only on targets with ``e4m3``",
    ),
    # -- vectors -----------------------------------------------------------------------------------------------------
    "make_vector": OpInfo("vector", None, "n scalars -> vector of n"),
    "splat": OpInfo("vector", 1, "scalar -> vector with it in every lane"),
    "extract": OpInfo("vector", 1, "vector -> scalar", ("lane",)),
    "permute": OpInfo(
        "vector",
        None,
        "one or two vectors of one type -> vector (or scalar, for one lane) whose lane i is lane ``lanes[i]`` of their "
        "concatenation",
        ("lanes",),
    ),
    # -- memory ------------------------------------------------------------------------------------------------------
    "private": OpInfo("memory", 0, "an array per thread; contents undefined until written", ("name",)),
    "load": OpInfo(
        "memory",
        2,
        "pointer, element index -> elem, or vector of consecutive elems. The index is a multiple of ``align``, a power "
        "of two, in elements (and so is the buffer's start)",
        ("align",),
    ),
    "load_streaming": OpInfo(
        "memory",
        2,
        "as load, from global memory, with a hint that the data will not be read again soon (evict first); a plain "
        "load in languages without such a hint",
        ("align",),
    ),
    "store": OpInfo(
        "memory", 3, "pointer, index, value (elem or vector of elem); ``align`` as for load", ("align",), result=False
    ),
    "store_streaming": OpInfo(
        "memory",
        3,
        "as store, to global memory, with a hint that the data will not be read soon (bypass the caches); a plain "
        "store in languages without such a hint",
        ("align",),
        result=False,
    ),
    "prefetch": OpInfo(
        "memory",
        2,
        "pointer (global), index: a hint to fetch a cache line into L2; the index may be out of bounds. Dropped in "
        "languages without such a hint",
        result=False,
    ),
    "atomic": OpInfo(
        "memory",
        3,
        "pointer (global or shared), index, value -> old value; kind: add, min, max, and, or, xor, exchange on "
        "i32/u32; add on f32 if the target can, and on a vector of 2 or 4 f32 in global memory at an index that is a "
        "multiple of the lanes: each lane is a separate atomic (one instruction in PTX). ``ordered``, for one element "
        "of global memory only, implies a ``device_fence`` before and after",
        ("kind", "ordered"),
    ),
    "async_copy": OpInfo(
        "memory",
        4,
        "pointer (shared), index, pointer (global, only read by the kernel), index: start copying ``lanes`` "
        "consecutive elements, 16 bytes in all, to shared memory; both indices are multiples of ``lanes``. The thread "
        "may read them after the ``async_wait`` for their group, other threads after a further barrier",
        ("lanes",),
        result=False,
    ),
    "async_copy_or_zero": OpInfo(
        "memory",
        5,
        "as ``async_copy``, with a bool: where it is false, zeros are stored instead and nothing is read, though the "
        "global index must be valid",
        ("lanes",),
        result=False,
    ),
    "cluster_load": OpInfo(
        "memory",
        3,
        "pointer (shared), index, i32 number -> element or vector from that array of the workgroup with this number in "
        "the cluster. A ``cluster_barrier`` must separate it from the write before it and from the end of the owner",
        ("align",),
    ),
    "cluster_post": OpInfo(
        "memory",
        4,
        "pointer (shared), index, 32-bit element, i32 number: a store to that array of the workgroup with this "
        "number in the cluster, which reads it by an atomic. A ``cluster_barrier`` must separate it from stores before "
        "it and from the end of the owner",
        result=False,
    ),
    "async_commit": OpInfo("sync", 0, "close a group: the thread's copies since the last commit", result=False),
    "async_wait": OpInfo(
        "sync",
        0,
        "wait until at most ``pending`` of the thread's latest groups of copies are unfinished",
        ("pending",),
        result=False,
    ),
    # -- variables ---------------------------------------------------------------------------------------------------
    "var": OpInfo("variable", 1, "initial value -> var"),
    "get": OpInfo("variable", 1, "var -> its value"),
    "set": OpInfo("variable", 2, "var, value", result=False),
    # -- control -----------------------------------------------------------------------------------------------------
    "loop": OpInfo(
        "control",
        3,
        "start, stop, step (one int type of 32 or 64 bits): for (i = start; i < stop; i += step); step > 0; attrs: "
        "index (Value), unroll (a hint: 0 no, -1 fully, n by a factor of n)",
        ("index", "unroll"),
        blocks=1,
        result=False,
    ),
    "if": OpInfo("control", 1, "bool; then-block and else-block (may be empty)", blocks=2, result=False),
    "roles": OpInfo(
        "control",
        0,
        "divide the workgroup among ``roles`` (a tuple of `Role`), in order: each has a block, and they run side by "
        "side. See *Roles*",
        ("roles",),
        blocks=None,
        result=False,
    ),
    "repeat": OpInfo(
        "control",
        1,
        "var of i32: run the block, and repeat it in threads where the variable is 0 afterwards. Only in kernels of "
        "clusters, whose workgroups run at the same time; no other workgroup may be waited for",
        blocks=1,
        result=False,
    ),
    # -- synchronisation ---------------------------------------------------------------------------------------------
    "barrier": OpInfo(
        "sync",
        0,
        "barrier of the workgroup; writes to shared memory (and to global memory, if ``global_memory``) before it are "
        "visible after it; only in uniform control flow",
        ("global_memory",),
        result=False,
    ),
    "device_fence": OpInfo(
        "sync",
        0,
        "by any thread: together with an atomic it orders global memory between workgroups; see *a race*. Only on "
        "targets with ``device_fence``",
        result=False,
    ),
    "cluster_barrier": OpInfo(
        "sync", 0, "barrier of all workgroups of the cluster; includes a barrier of each workgroup", result=False
    ),
    "launch_next": OpInfo(
        "sync",
        0,
        "by any thread: once all workgroups have executed it, or have ended, the next launch may start if it has a "
        "``launch_await``. Dropped in languages without overlapping launches",
        result=False,
    ),
    "launch_await": OpInfo(
        "sync",
        0,
        "wait until all previous launches have finished; must come before any memory access. Dropped in languages "
        "where launches never overlap",
        result=False,
    ),
    "workgroup_any": OpInfo(
        "sync",
        1,
        "bool -> bool: true if it is true in any thread of the workgroup; also a barrier",
        ("global_memory",),
    ),
    "subgroup_barrier": OpInfo("sync", 0, "barrier of the subgroup, for shared memory", result=False),
    # -- subgroups: all lanes of the subgroup take part --------------------------------------------------------------
    "shuffle": OpInfo("subgroup", 2, "T scalar 32 bits, i32 lane -> that lane's value"),
    "shuffle_xor": OpInfo("subgroup", 1, "T scalar 32 bits -> value of lane ^ mask, which must exist", ("mask",)),
    "subgroup_reduce": OpInfo("subgroup", 1, "T scalar 32 bits -> add, min or max over all lanes", ("kind",)),
    "subgroup_any": OpInfo("subgroup", 1, "bool -> bool: true in any lane"),
    "subgroup_all": OpInfo("subgroup", 1, "bool -> bool: true in every lane"),
    # -- matrix fragments: all lanes of the subgroup take part, with the same operands --------------------------------
    "fragment_fill": OpInfo("fragment", 1, "scalar -> fragment with it in every element"),
    "fragment_load": OpInfo(
        "fragment",
        3,
        "pointer (global or shared), index of element (0,0), stride in elements -> fragment; ``layout`` row or column: "
        "the stride is between rows or columns",
        ("layout",),
    ),
    "fragment_store": OpInfo("fragment", 4, "pointer, index, stride, fragment; see load", ("layout",), result=False),
    "fragment_mma": OpInfo(
        "fragment",
        3,
        "a (m x k), b (k x n), accumulator (m x n) -> a @ b + accumulator; a and b have one element type, the "
        "accumulator the same kind (float or int) and at least the same width",
    ),
    "fragment_length": OpInfo("fragment", 1, "fragment -> i32: components per lane"),
    "fragment_get": OpInfo("fragment", 1, "fragment -> the lane's component number ``component``", ("component",)),
    "fragment_set": OpInfo("fragment", 2, "fragment, scalar -> fragment with that component replaced", ("component",)),
    "fragment_pack": OpInfo("fragment", None, "all components of the lane, in order -> fragment"),
    # -- asynchronous products of four subgroups (a warpgroup): all lanes take part, with the same operands ------------
    "warpgroup_mma": OpInfo(
        "warpgroup",
        None,
        "start ``accumulators += left @ right``, or ``=`` if ``fresh``. Operands: pointer (shared), index: the right "
        "factor, 16 x n, n at most 256; then the left factor, 64 x 16, as pointer, index, or as a fragment of use a "
        "(16 x 16: each subgroup has its own 16 rows); then n / 16 variables of accumulators (16 x 16, f32: each "
        "subgroup has its own rows). ``right`` and ``left`` are the `Panels` of the factors, None for a fragment; "
        "indices are multiples of 512. Before the wait for the product's group, the variables must not be read or set "
        "and the memory must not be written; products of one type finish in order",
        ("right", "left", "fresh"),
        result=False,
    ),
    "warpgroup_fence": OpInfo(
        "warpgroup", 0, "needed before a product uses registers that anything else has written", result=False
    ),
    "warpgroup_commit": OpInfo("warpgroup", 0, "close a group: the products since the last commit", result=False),
    "warpgroup_wait": OpInfo(
        "warpgroup", 0, "wait until at most ``pending`` of the latest groups are unfinished", ("pending",), result=False
    ),
    "warpgroup_publish": OpInfo(
        "warpgroup",
        0,
        "make the thread's writes to shared memory readable by products after the next barrier; required for that",
        result=False,
    ),
    "mbarrier_init": OpInfo(
        "warpgroup",
        2,
        "pointer (shared, u64), index: initialise an mbarrier in that element, which nothing else may access: a "
        "barrier in two halves (arrive, later wait) that goes through *phases*. A phase ends when so many ``threads`` "
        "(0: all of the workgroup) have arrived; then the next one begins. Usable after the next barrier",
        ("threads",),
        result=False,
    ),
    "mbarrier_arrive": OpInfo(
        "warpgroup", 2, "pointer, index of an mbarrier: arrive, with all lanes of a subgroup", result=False
    ),
    "mbarrier_wait": OpInfo(
        "warpgroup",
        3,
        "pointer, index of an mbarrier, i32 parity: wait until the phase of this parity has ended; phases have parity "
        "0, 1, 0 ... A thread must wait before the phase after the next one ends. Shared memory written before the "
        "arrivals is visible. While the first phase lasts, the one before it, of parity 1, counts as ended",
        result=False,
    ),
    "mbarrier_expect": OpInfo(
        "warpgroup",
        2,
        "pointer, index of an mbarrier; by one subgroup: one arrival, and so many ``bytes`` that tensor copies must "
        "bring before the phase ends. Only in kernels with ``roles``",
        ("bytes",),
        result=False,
    ),
    "tensor_copy": OpInfo(
        "warpgroup",
        None,
        "pointer (shared), index of a multiple of 128 bytes, pointer, index of an mbarrier, i32 coordinates along the "
        "axes of the tensor ``map``; by one subgroup: start to copy the box at these coordinates, with zeros for what "
        "is outside the tensor. The mbarrier's phase counts all bytes of the box, which ``mbarrier_expect`` announces, "
        "and a wait for the phase makes them visible. Publish (``warpgroup_publish``) new mbarriers, and shared memory "
        "that threads have written before a copy overwrites it. Only in kernels with ``roles``",
        ("map",),
        result=False,
    ),
    # -- specific to one language ------------------------------------------------------------------------------------
    "intrinsic": OpInfo(
        "target",
        None,
        "only the renderer of ``language`` accepts it. ``code`` is a line of that language in which {0} is the result, "
        "if any (lanes of a vector: {0[0]}, {0[1]} ...), and {1}, {2} ... are the operands",
        ("language", "code"),
    ),
    "comment": OpInfo("target", 0, "a comment in the rendered source", ("text",), result=False),
}

SUBGROUP_OPS = frozenset(
    {"lane_id", "subgroup_id", "subgroup_barrier"}
    | {opcode for opcode, info in OPS.items() if info.category == "subgroup"}
)
"""Operations that need subgroups, besides those of matrix units."""
MATRIX_OPS = frozenset(opcode for opcode, info in OPS.items() if info.category in ("fragment", "warpgroup"))
"""Operations of matrix units."""
