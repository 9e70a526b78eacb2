"""Passes keep a kernel's results: the interpreter runs every case before and after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from render_cases import DTYPES, Case, cases, differences, thread, trace

from aule.artifact import scalar_offsets
from aule.errors import KernelError
from aule.ir.builder import Builder
from aule.ir.interpret import interpret
from aule.ir.kernel import KernelIR, Op
from aule.ir.ops import OPS
from aule.ir.passes import (
    Legal,
    dead_code,
    int64,
    legalise,
    multiply_high,
    narrow_vectors,
    pack_memory,
    round_half,
    soft_half,
    widen_int,
)
from aule.ir.passes.rewrite import Lowered, Rewriter
from aule.ir.passes.round_half import casts_used_in_registers
from aule.ir.types import (
    Scalar,
    Vector,
    bf16,
    element,
    f16,
    f32,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from aule.ir.verify import verify

SMALL = frozenset({i8, u8, i16, u16})
WGSL = Legal(frozenset({f16, bf16}), SMALL, SMALL, int64=False, mulhi=False, max_lanes=4)
PASSES: dict[str, tuple[Callable[[KernelIR], KernelIR], Callable[[KernelIR], bool]]] = {
    "soft_bf16": (lambda k: soft_half(k, {bf16}), lambda k: uses(k, bf16)),
    "soft_bf16_pairs": (lambda k: soft_half(k, {bf16}, pairs=True), lambda k: uses(k, bf16)),
    "soft_f16": (lambda k: soft_half(k, {f16}), lambda k: uses(k, f16)),
    "pack": (lambda k: pack_memory(k, SMALL | {f16, bf16}), lambda k: uses(k, *SMALL, f16, bf16)),
    "round_half": (round_half, lambda k: uses(k, f16)),
    "widen": (lambda k: widen_int(k, SMALL), lambda k: uses(k, *SMALL)),
    "int64": (int64, lambda k: uses(k, i64, u64)),
    "multiply_high": (multiply_high, lambda k: uses(k, u32)),
    "narrow_4": (lambda k: narrow_vectors(k, 4), lambda k: widest(k) > 4),
    "narrow_8": (lambda k: narrow_vectors(k, 8), lambda k: widest(k) > 8),
    "dead_code": (dead_code, lambda k: True),
    "wgsl": (lambda k: legalise(k, WGSL), lambda k: True),
}
"""Each pass, and which kernels it has something to do in."""
CASES = {case.name: case for case in cases()}


def uses(kernel: KernelIR, *elems: Scalar) -> bool:
    types = [v.type for v in (*kernel.values.values(), *kernel.shared)]
    types += [op.result.type for op in kernel.walk() if op.result is not None]
    return any(element(t) in elems for t in types)


def widest(kernel: KernelIR) -> int:
    return max((t.lanes for t in result_types(kernel) if isinstance(t, Vector)), default=1)


def result_types(kernel: KernelIR) -> list[Any]:
    return [op.result.type for op in kernel.walk() if op.result is not None]


def run(case: Case, kernel: KernelIR, args: list[Any], sanitize: bool = True) -> None:
    interpret(kernel, case.grid, args, subgroup_size=case.kernel.subgroup_size or 8, sanitize=sanitize)


def run_after(case: Case, kernel: KernelIR) -> list[Any]:
    """Run a rewritten kernel on the same bytes, and give the buffers back as the case declares them."""
    given = dict(zip((p.name for p in case.kernel.params), case.copies(), strict=True))
    args: list[Any] = []
    kept: dict[str, Any] = {}
    for param in kernel.params:
        if param.kind == "buffer":
            data = given[param.name]
            padded = np.zeros(-(-data.nbytes // 4) * 4, np.uint8)
            padded[: data.nbytes] = data.view(np.uint8)
            args.append(padded.view(DTYPES[param.dtype]))
            kept[param.name] = args[-1]
        elif param.name in given:
            args.append(given[param.name])
        else:
            # Half of a 64-bit scalar, or the padding before it.
            name, half = param.name.rsplit("_", 1)
            args.append(0 if half == "padding" else (given[name] >> (32 if half == "high" else 0)) & 0xFFFFFFFF)
    # Words that two threads share through atomics and plain loads of other elements look like races.
    run(case, kernel, args, sanitize=False)
    result = []
    for param in case.kernel.params:
        old = given[param.name]
        result.append(kept[param.name].view(np.uint8)[: old.nbytes].view(old.dtype) if param.kind == "buffer" else old)
    return result


@pytest.fixture(scope="module")
def expected() -> Callable[[Case], list[Any]]:
    known: dict[str, list[Any]] = {}

    def get(case: Case) -> list[Any]:
        if case.name not in known:
            args = case.copies()
            run(case, case.kernel, args)
            known[case.name] = args
        return known[case.name]

    return get


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_changes_nothing_that_can_be_seen(name: str, expected: Callable[[Case], list[Any]]) -> None:
    rewrite, applies = PASSES[name]
    wrong, count = [], 0
    for case in CASES.values():
        if not applies(case.kernel) or ("fragments" in case.needs and name != "dead_code"):
            continue
        count += 1
        kernel = rewrite(case.kernel)
        verify(kernel)
        difference = differences(case, expected(case), run_after(case, kernel))
        if difference:
            wrong.append(difference)
    assert count > 5
    assert not wrong, "\n".join(wrong)


def test_legalised_kernels_have_only_what_is_legal() -> None:
    for case in CASES.values():
        if "fragments" in case.needs:
            continue
        kernel = legalise(case.kernel, WGSL)
        assert not uses(kernel, f16, bf16, i64, u64, *SMALL), case.name
        assert widest(kernel) <= 4, case.name


def test_a_pass_leaves_its_input_alone() -> None:
    kernel = CASES["copy_bf16x8"].kernel
    before = str(kernel)
    legalise(kernel, WGSL)
    assert str(kernel) == before


def test_new_operations_keep_the_line_that_emitted_the_old_ones() -> None:
    kernel = legalise(CASES["copy_bf16x8"].kernel, WGSL)
    lines = {op.where.line for op in CASES["copy_bf16x8"].kernel.walk() if op.where is not None}
    assert {op.where.line for op in kernel.walk() if op.where is not None} <= lines
    assert all(op.where is not None and op.where.file.endswith("render_cases.py") for op in kernel.walk())


def test_reading_bf16_costs_one_shift() -> None:
    @trace("read")
    def kernel(b: Builder) -> None:
        x, out = b.buffer("x", bf16), b.buffer("result", f32, "write")
        b.store(out, thread(b), b.cast(b.load(x, thread(b)), f32))

    between = [op.opcode for op in soft_half(kernel, {bf16}).walk() if element_of(op) in (u16, u32, f32)]
    assert between == ["load", "cast", "const", "shl", "bitcast"]


def test_eight_halves_are_one_load_of_four_words() -> None:
    kernel = legalise(CASES["copy_f16x8"].kernel, WGSL)
    loads = [op for op in kernel.walk() if op.opcode == "load"]
    assert [op.result.type for op in loads if op.result is not None] == [Vector(u32, 4)] * 2
    assert all(op.attrs["align"] == 4 for op in loads)


def test_eight_halves_are_two_aligned_loads_of_four() -> None:
    loads = [op for op in narrow_vectors(CASES["copy_f16x8"].kernel, 4).walk() if op.opcode == "load"]
    assert [op.result.type for op in loads if op.result is not None] == [Vector(f16, 4)] * 4
    assert all(op.attrs["align"] == 4 for op in loads)


def test_permutations_become_the_lanes_they_take() -> None:
    b = Builder("pick", 64)
    x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
    whole = b.load(x, 0, 16)
    b.store(out, 0, b.permute(whole, None, [9, 9, 3, 9]))
    b.store(out, 0, b.permute(whole, None, range(4, 8)))
    left = list(dead_code(narrow_vectors(b.finish(), 4)).walk())
    # Each lane is extracted once, and a piece that is taken whole stays as it is.
    assert [op.attrs["lane"] for op in left if op.opcode == "extract"] == [3, 1]
    assert [op.opcode for op in left].count("make_vector") == 1
    assert not [op for op in left if op.opcode == "permute"]


def test_partial_words_are_stored_atomically_and_whole_words_plainly() -> None:
    scalar = pack_memory(CASES["neighbours_u8"].kernel, SMALL)
    assert [op.attrs["kind"] for op in scalar.walk() if op.opcode == "atomic"] == ["and", "or"] * 2
    assert not [op for op in scalar.walk() if op.opcode == "store"]
    assert scalar.params[1].access == "readwrite"
    vector = pack_memory(CASES["copy_u8x4"].kernel, SMALL)
    assert not [op for op in vector.walk() if op.opcode == "atomic"]


def test_the_parameter_block_keeps_its_offsets() -> None:
    before = CASES["scalars"].kernel
    after = int64(before)
    offsets, size = scalar_offsets([p for p in before.params if p.kind == "scalar"])
    new, new_size = scalar_offsets([p for p in after.params if p.kind == "scalar"])
    names = [p.name for p in after.params if p.kind == "scalar"]
    assert names == ["n", "big_padding", "big_low", "big_high", "scale", "mask", "huge_low", "huge_high", "last"]
    place = dict(zip(names, new, strict=True))
    assert size == new_size
    assert offsets == [place[n] for n in ("n", "big_low", "scale", "mask", "huge_low", "last")]


def test_an_index_of_64_bits_keeps_only_what_it_needs() -> None:
    kernel = legalise(CASES["long_index"].kernel, WGSL)
    # The high words of the products are gone, and with them the multiplications of half words.
    assert [op.opcode for op in kernel.walk()].count("mul") < 12


@pytest.mark.parametrize(("behind", "turns", "barriers"), [(True, 1, 2), (False, 1, 3), (True, 2, 4)])
def test_a_single_vote_takes_one_barrier(behind: bool, turns: int, barriers: int) -> None:
    """Where another one is behind the beginning of the kernel, at which the word that is voted with is cleared."""
    b = Builder("vote", workgroup=64)
    out, t = b.buffer("out", i32, "write"), b.thread_id()
    votes = b.var(b.const(0, i32))
    if behind:
        b.barrier()
    with b.loop(0, turns) if turns > 1 else nullcontext(b.const(0, i32)) as turn:
        found = b.workgroup_any(b.eq(t, 40) & b.eq(b.group_id() + turn, 1))
        votes.value = votes.value * 2 + b.select(found, b.const(1, i32), b.const(0, i32))
    b.store(out, b.group_id() * 64 + t, votes.value)
    kernel = legalise(b.finish(), WGSL)
    verify(kernel)
    assert sum(op.opcode == "barrier" for op in kernel.walk()) == barriers
    result = np.full(128, -1, np.int32)
    interpret(kernel, (2, 1, 1), [result])
    np.testing.assert_array_equal(result, np.repeat([0, 1] if turns == 1 else [1, 2], 64))


def test_dead_code_drops_variables_that_nobody_reads() -> None:
    @trace("waste")
    def kernel(b: Builder) -> None:
        out = b.buffer("result", i32, "write")
        unread = b.var(b.const(0, i32), "unread")
        with b.loop(0, 4) as k:
            unread.value = k * 3
        b.private("unused", f32, 8)
        b.shuffle_xor(b.subgroup_reduce("add", thread(b)), 1)
        b.store(out, thread(b), 1)

    left = {op.opcode for op in dead_code(kernel).walk()}
    assert not left & {"var", "set", "private", "shuffle_xor", "subgroup_reduce"}


def test_atomics_on_elements_below_a_word_are_refused() -> None:
    b = Builder("atomic", 64)
    x = b.buffer("x", u16, "readwrite")
    b.emit("atomic", (x, b.const(0, i32), b.const(1, u16)), u16, kind="add")
    with pytest.raises(KernelError, match="32-bit"):
        pack_memory(b.finish(), SMALL)


class _LeavesOut(Rewriter):
    """What NVIDIA's compiler makes of conversions to f16 and back."""

    def __init__(self, kernel: KernelIR) -> None:
        super().__init__(kernel)
        self.hooks["cast"] = self._cast

    def _cast(self, op: Op) -> Lowered | None:
        made = self.value(op.args[0]).op
        back = made is not None and made.opcode == "cast" and op.result is not None and element(op.result.type) == f32
        return made.args[0] if made is not None and back and element(made.args[0].type) == f32 else self.clone(op)


@pytest.mark.parametrize("lanes", [1, 4])
def test_what_is_rounded_before_may_be_left_unrounded(lanes: int, expected: Callable[[Case], list[Any]]) -> None:
    case = CASES[f"round_to_f16_{lanes}"]
    right, exact = expected(case), round_half(case.kernel)
    assert differences(case, right, run_after(case, _LeavesOut(case.kernel).run()))
    assert not differences(case, right, run_after(case, _LeavesOut(exact).run()))
    # What only goes to a buffer is left to the conversion.
    assert not casts_used_in_registers(CASES["f16_exact_4"].kernel)
    near = CASES["f16_near_4"].kernel
    assert str(round_half(near)) == str(near)


def test_soft_halves_through_a_languages_own_conversion() -> None:
    seen = []

    def convert(b: Builder, bits: Any) -> Any:
        seen.append(bits.type)
        value = b.intrinsic("wgsl", "{0} = unpack2x16float({1}).x;", [bits], f32)
        assert value is not None
        return value

    kernel = soft_half(CASES["read_every_f16"].kernel, {f16}, convert)
    assert seen == [u32] * 4
    assert [op.opcode for op in kernel.walk()].count("intrinsic") == 4


def element_of(op: Op) -> Scalar | None:
    return None if op.result is None else element(op.result.type)


def test_the_cases_use_every_operation() -> None:
    used = {op.opcode for case in CASES.values() for op in case.kernel.walk()}
    # Copies past the registers are NVIDIA's alone, pairs some processors', and how much a lane holds of a fragment is
    # asked by the probe alone; the kernels that need them have them. Few languages have fences of the device, and one
    # device in two converts e4m3.
    hoppers = {name for name in OPS if name.startswith(("warpgroup", "mbarrier", "tensor", "cluster", "launch"))}
    assert set(OPS) - used - hoppers == {
        "intrinsic", "async_copy", "async_copy_or_zero", "async_commit", "async_wait", "dot_pairs", "fragment_length",
        "device_fence", "e4m3_halves", "repeat", "roles",
    }  # fmt: skip
