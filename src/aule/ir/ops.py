"""The operations of the kernel language: the written specification that `verify` enforces.

Notation: T a scalar or vector; "same" means that all operands and the result have one type. Integer arithmetic wraps.
Vectors are computed on lane by lane; a comparison of vectors gives a vector of bool. ``attrs`` hold what is known
while tracing; an operation has exactly those that its entry names.

Beyond the entries below:

* *Types.* A vector has 2, 4, 8 or 16 lanes. Memory (buffers, shared and private arrays) and fragments hold numbers,
  never bool. Shared and private arrays have a length of at least 1. An index or a stride is an i32, i64 or u32.
* *Values* are defined once and used only after that, in the same block or in a block inside it. The index of a loop is
  visible in its body only. A pointer is the first operand of a memory or fragment operation (the third of
  ``async_copy`` and of ``warpgroup_mma``, or an operand of an intrinsic) and nothing else; a variable is the first
  operand of ``get``, ``set`` and ``repeat`` or one of the last of ``warpgroup_mma`` and nothing else.
* *Names* of the kernel, of parameters, of shared and of private arrays are identifiers (ASCII, no leading ``__``);
  those of parameters and shared arrays differ.
* *Access.* A buffer with access "read" is not stored to, one with access "write" is not loaded from, an atomic needs
  "readwrite".
* *Constants* lie in the range of their type; a float constant is rounded to its type.
* *Undefined* are: integer division by zero, a shift by the width or more, a float too large for the integer it is cast
  to, a loop whose index passes the largest number of its type, the contents of shared and private memory before they
  are written (a ``private`` in a loop starts undefined in each round), and whatever a race leaves behind.
* *A race* is two accesses of one element by two threads, at least one a plain store, or one plain and one atomic, that
  nothing orders. Barriers order the threads that take part in them. Workgroups are ordered by ``device_fence`` alone:
  *what came before* a fence is what a barrier over global memory had ordered before the thread, and *what comes after*
  one is what such a barrier orders behind it. What came before a fence of one thread, which then changes an element by
  an atomic, comes before all that comes after a fence of another thread, which has found that change, or a later one of
  the same element, by an atomic. An ``ordered`` atomic is one between two fences. A ``post``, also by
  way of a cluster, counts as an atomic that changes an element, a ``peek`` as one that leaves it as it is.
* *Uniform* is control flow that all threads of a workgroup take alike. Uniform are constants, scalar parameters,
  ``group_id``, ``group_count``, what is computed from uniform values alone, loads at a uniform index from buffers with
  access "read", indices of loops with uniform bounds, variables that are only ever set to uniform values in uniform
  control flow, and what ``workgroup_any`` returns. Everything else counts as divergent: what threads, lanes and
  subgroups are called, what shared, private and writable memory holds, what subgroup operations, fragments, atomics
  and intrinsics return.
* *Fragments.* All lanes of a subgroup name the same matrix: index, stride and fill value are the same in all of them.
  Which element a component is depends on the device; a fragment of n elements has n / subgroup size components, and
  a factor several times as many where a device keeps it several times. Copies of an element must be the same.
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
    """How an operation is formed: number of operands (None: any), attributes, number of blocks, has a result."""

    category: Category
    arity: int | None
    doc: str
    attrs: tuple[str, ...] = ()
    blocks: int = 0
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
        "unary", 1, "same; floats; the number itself, below 2**110 for sure or NaN; rounded, zero may lose its sign"
    ),
    "sin": OpInfo("unary", 1, "same; floats"),
    "cos": OpInfo("unary", 1, "same; floats"),
    "add": OpInfo("binary", 2, "same; ints and floats"),
    "sub": OpInfo("binary", 2, "same; ints and floats"),
    "mul": OpInfo("binary", 2, "same; ints and floats"),
    "mulhi": OpInfo("binary", 2, "same; u32; the high word of the product of 64 bits"),
    "div": OpInfo("binary", 2, "same; truncating for ints; floats within 2.5 ulp"),
    "rem": OpInfo("binary", 2, "same; ints; sign of the dividend"),
    "min": OpInfo("binary", 2, "same; ints and floats; with one NaN operand either may come out"),
    "max": OpInfo("binary", 2, "same; ints and floats; with one NaN operand either may come out"),
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
        "u32, u32, f32 of one shape -> f32; each u32 holds two bf16, the first in its low half: the products of the "
        "firsts and of the seconds are added to the third operand. The order of the sum is the target's, and "
        "subnormals may count as zero. Only targets with such an instruction have it",
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
        "u32 -> vector of four f16: the numbers that its bytes are as e4m3, the lowest first; exact, with NaN for 0x7F "
        "and 0xFF. Only targets with ``e4m3`` have it",
    ),
    # -- vectors -----------------------------------------------------------------------------------------------------
    "make_vector": OpInfo("vector", None, "n scalars -> vector of n"),
    "splat": OpInfo("vector", 1, "scalar -> vector with it in every lane"),
    "extract": OpInfo("vector", 1, "vector -> scalar", ("lane",)),
    "permute": OpInfo(
        "vector",
        None,
        "one or two vectors of one type -> vector (or scalar, for one lane) whose lane i is lane ``lanes[i]`` of the "
        "first followed by the second",
        ("lanes",),
    ),
    # -- memory ------------------------------------------------------------------------------------------------------
    "private": OpInfo("memory", 0, "an array of its own for each thread; contents undefined until written", ("name",)),
    "load": OpInfo(
        "memory",
        2,
        "pointer, element index -> elem, or vector of consecutive elems. The index is a multiple of ``align``, a power "
        "of two, in elements (and so is the buffer's start)",
        ("align",),
    ),
    "load_once": OpInfo(
        "memory",
        2,
        "as load, from global memory, with a hint that nobody will read it again soon: the first to leave the caches, "
        "where a language has such a thing",
        ("align",),
    ),
    "store": OpInfo(
        "memory", 3, "pointer, index, value (elem or vector of elem); ``align`` as for load", ("align",), result=False
    ),
    "stream": OpInfo(
        "memory",
        3,
        "as store, to global memory, with a hint that nobody will read it soon: past the caches, where a language has "
        "such a thing",
        ("align",),
        result=False,
    ),
    "post": OpInfo(
        "memory",
        3,
        "as store, to 32-bit elements of global memory, for a ``peek`` of another workgroup: each element for itself, "
        "at once or not",
        ("align",),
        result=False,
    ),
    "peek": OpInfo(
        "memory",
        2,
        "as load, of what is in memory now: each element is what was there at the beginning or what some ``post`` has "
        "left since, the latest one that comes before",
        ("align",),
    ),
    "prefetch": OpInfo(
        "memory",
        2,
        "pointer (global), index: a hint that what is there, if anything is, will be read soon: a line for the "
        "second-level cache. Left out by languages that have no such thing",
        result=False,
    ),
    "atomic": OpInfo(
        "memory",
        3,
        "pointer (global or shared), index, value -> old value; kind: add, min, max, and, or, xor, exchange on "
        "i32/u32; add on f32 where the target can, and on a vector of 2 or 4 f32 in global memory, at a multiple of "
        "their number: each for itself, but PTX says it in one instruction. An ``ordered`` one, of one element of "
        "global memory, has a ``device_fence`` before it and one behind it",
        ("kind", "ordered"),
    ),
    "async_copy": OpInfo(
        "memory",
        4,
        "pointer (shared), index, pointer (global, only read by the kernel), index: start to copy ``lanes`` "
        "consecutive elements, 16 bytes in all; both indices are multiples of ``lanes``. The thread sees them there "
        "after the ``async_wait`` for their group, other threads after a barrier behind that",
        ("lanes",),
        result=False,
    ),
    "cluster_load": OpInfo(
        "memory",
        3,
        "pointer (shared), index, i32 -> element or vector of elements of that array of the workgroup with this number "
        "in the cluster; what that wrote is seen behind a ``cluster_barrier``, and it may end behind another",
        ("align",),
    ),
    "cluster_post": OpInfo(
        "memory",
        4,
        "pointer (shared), index, element of 32 bits, i32: a ``post`` to that array of the workgroup with this number "
        "in the cluster, behind a ``cluster_barrier``; that one finds it there by an atomic, and may end behind "
        "another",
        result=False,
    ),
    "async_commit": OpInfo("sync", 0, "the thread's copies since the last one become a group", result=False),
    "async_wait": OpInfo(
        "sync",
        0,
        "wait until at most ``pending`` of the thread's latest groups are unfinished",
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
        "index (Value), unroll (0 leave, -1 fully, n by n)",
        ("index", "unroll"),
        blocks=1,
        result=False,
    ),
    "if": OpInfo("control", 1, "bool; then-block and else-block (may be empty)", blocks=2, result=False),
    "repeat": OpInfo(
        "control",
        1,
        "var of i32: run the block, and again in threads in which it leaves 0 there. What it waits for is to come from "
        "workgroups that have begun, or for which there is room: others may not begin before this one ends",
        blocks=1,
        result=False,
    ),
    # -- synchronisation ---------------------------------------------------------------------------------------------
    "barrier": OpInfo(
        "sync",
        0,
        "every thread of the workgroup arrives; shared memory (and global, if so said) written before is seen after; "
        "only in uniform control flow",
        ("global_memory",),
        result=False,
    ),
    "device_fence": OpInfo(
        "sync",
        0,
        "by any thread: with an atomic it orders what workgroups do to global memory; see *a race*. Only targets with "
        "``device_fence`` have it",
        result=False,
    ),
    "cluster_barrier": OpInfo(
        "sync", 0, "every thread of every workgroup of the cluster arrives; a barrier of each, too", result=False
    ),
    "launch_next": OpInfo(
        "sync",
        0,
        "by any thread: when all workgroups have had it, or have ended, the next launch may start if it has a "
        "``launch_await``. Left out by languages that have no such thing",
        result=False,
    ),
    "launch_await": OpInfo(
        "sync",
        0,
        "wait until the launches before this one are over, which may have been started earlier; before any access of "
        "memory. Left out likewise: launches follow each other",
        result=False,
    ),
    "workgroup_any": OpInfo(
        "sync",
        1,
        "bool -> bool: true in any thread of the workgroup, and the same in all of them; a barrier, too",
        ("global_memory",),
    ),
    "subgroup_barrier": OpInfo("sync", 0, "the same for the threads of a subgroup and shared memory", result=False),
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
        "pointer (global or shared), index of element (0,0), stride in elements -> fragment; layout: row or column, "
        "between which the stride lies",
        ("layout",),
    ),
    "fragment_store": OpInfo("fragment", 4, "pointer, index, stride, fragment; see load", ("layout",), result=False),
    "fragment_mma": OpInfo(
        "fragment",
        3,
        "a (m x k), b (k x n), accumulator (m x n) -> a @ b + accumulator; a and b of one element type, the "
        "accumulator float or int as they are, and no narrower",
    ),
    "fragment_length": OpInfo("fragment", 1, "fragment -> i32: how many components the lane holds of it"),
    "fragment_get": OpInfo("fragment", 1, "fragment -> the lane's component number ``component``", ("component",)),
    "fragment_set": OpInfo("fragment", 2, "fragment, scalar -> fragment with that component replaced", ("component",)),
    "fragment_pack": OpInfo("fragment", None, "all components of the lane, in order -> fragment"),
    # -- products of four subgroups, which run on their own: all their lanes take part, with the same operands ---------
    "warpgroup_mma": OpInfo(
        "warpgroup",
        None,
        "pointer (shared), index: the right factor, 16 x n; then a fragment of use a (16 x 16, of each of the four "
        "subgroups its own 16 rows of the left factor), or pointer, index: the left factor, 64 x 16; then n / 16 "
        "variables of accumulators (16 x 16, f32: of each subgroup its rows of the result), n at most 256: start to "
        "add the product to them, or to fill them with it where ``fresh``. ``right`` and ``left`` are the `Panels` the "
        "factors lie in, None for fragments; indices are multiples of 512. Variables are neither read nor set, and "
        "memory is not written, before the wait for the product's group; products of one type follow each other in "
        "order",
        ("right", "left", "fresh"),
        result=False,
    ),
    "warpgroup_fence": OpInfo(
        "warpgroup", 0, "before the first product that uses registers which anything but products wrote", result=False
    ),
    "warpgroup_commit": OpInfo("warpgroup", 0, "the products since the last one become a group", result=False),
    "warpgroup_wait": OpInfo(
        "warpgroup", 0, "wait until at most ``pending`` of the latest groups are unfinished", ("pending",), result=False
    ),
    "warpgroup_publish": OpInfo(
        "warpgroup",
        0,
        "what the thread wrote to shared memory can be read by products behind the next barrier, and only then",
        result=False,
    ),
    "warpgroup_meeting": OpInfo(
        "warpgroup",
        2,
        "pointer (shared, u64), index: a barrier of the workgroup in two halves, which lives there; the first half may "
        "come behind the next barrier. Nothing else touches that element",
        result=False,
    ),
    "warpgroup_arrive": OpInfo(
        "warpgroup", 2, "pointer, index of a meeting: the first half, by all lanes of a subgroup", result=False
    ),
    "warpgroup_await": OpInfo(
        "warpgroup",
        3,
        "pointer, index of a meeting, i32 parity: the second half. All threads go on when all have arrived as often as "
        "this one has; shared memory that was written before the arrivals is seen. ``parity`` is 0 for the first time "
        "and then alternates",
        result=False,
    ),
    # -- what only one language has ----------------------------------------------------------------------------------
    "intrinsic": OpInfo(
        "target",
        None,
        "only the renderer ``language`` accepts it. ``code`` is a line of that language in which {0} is the result (a "
        "vector: {0[0]}, {0[1]} ...; there may be none) and {1}, {2} ... are the operands",
        ("language", "code"),
    ),
    "comment": OpInfo("target", 0, "a line for the reader of the rendered source", ("text",), result=False),
}
