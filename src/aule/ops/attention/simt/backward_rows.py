"""GPU kernels before and after the products of the backward pass: delta, and dQ from its sums."""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, f32, i32, i64
from aule.ops.attention.config import DeltaConfig, RoundConfig
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.parameters import Parameters
from aule.ops.scores.rotated_operands import rotary_of
from aule.ops.shared.parameters import workgroup_number
from aule.target import Target
from aule.tile.common.matrix import QUAD, divmod_const, padded
from aule.tile.fragment.arrangement import SIZE, added_together, arrange, place_in_block
from aule.tile.simt.atomic_sums import TileSums


def build_delta(config: DeltaConfig, target: Target) -> KernelIR:
    """Trace the kernel of delta: some lanes of a subgroup, or one thread, to a row."""
    b = Builder("attention_delta", config.threads, arithmetic="quick")
    b.launch_next()
    index: Scalar = i64 if config.index64 else i32
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=1, value_dim=config.value_dim), index)
    heads, seq_q, rows = p.number("heads_q"), p.number("seq_q"), p.number("rows")
    thread = workgroup_number(b) * config.threads + b.thread_id()
    number, lane = divmod_const(b, thread, config.lanes)
    inside = b.min(number, rows - 1)  # all lanes take part in a shuffle
    head_number, row = inside // seq_q, inside % seq_q
    batch, head = head_number // heads, head_number % heads
    names = zip(("o", "do"), config.unit, config.aligned, strict=True)
    o, do = (
        p.matrix(name, batch, head, seq_q, config.value_dim, unit, aligned=aligned) for name, unit, aligned in names
    )
    run = config.run
    cols = padded(config.value_dim, run)
    starts = o.row_start(b, row), do.row_start(b, row)
    partial = b.var(b.const(0.0, f32), "delta")
    with b.loop(lane * run, cols, config.lanes * run, name="col") as col:
        x = b.cast(o.load_quad(b, starts[0], col, cols, run), f32)
        y = b.cast(do.load_quad(b, starts[1], col, cols, run), f32)
        for a, c in zip(b.unpack(x), b.unpack(y), strict=True):
            partial.value = b.fma(a, c, partial.value)
    result = partial.value
    step = 1
    while step < config.lanes:
        result = result + b.shuffle_xor(result, step)
        step *= 2
    with b.if_((number < rows) & b.eq(lane, 0)):
        if config.lse_gradient:
            result = result - b.load(p.buffer("dlse", f32), number)
        b.store(p.buffer("delta", f32, "write"), number, result)
    if config.clear:
        total = p.number("clear", index)
        first = b.cast(thread, index) * QUAD
        threads = b.cast(b.group_count(0) * b.group_count(1) * config.threads, index)
        with b.loop(first, total, threads * QUAD, name="at") as at:
            b.store(p.buffer("dq_sum", f32, "write"), at, b.splat(b.const(0.0, f32), QUAD))
    # A driver takes the last condition of a kernel for uniform unless a barrier follows.
    b.barrier()
    return b.finish()


def _await(b: Builder, target: Target) -> None:
    """Wait for the launches before, if this one may have started before they ended."""
    if target.overlap:
        b.launch_await()


def build_round(config: RoundConfig, target: Target) -> KernelIR:
    """Trace the kernel that rounds the sums of dQ: one thread to two neighbouring elements of a row, or to one if rows
    have an odd number."""
    if config.quads:
        return _build_round_quads(config, target)
    if config.octets:
        return _build_round_octets(config, target)
    b = Builder("attention_round", config.threads, arithmetic="quick")
    _await(b, target)
    index: Scalar = i64 if config.index64 else i32
    elem, dim, run = SCALARS[config.dtype], config.head_dim, config.run
    scores = ScoreConfig(dtype=config.dtype, head_dim=dim, value_dim=dim, rope=config.rope, rope_unit=config.rope_unit)
    p = Parameters(b, scores, index)
    sums, out = p.buffer("dq_sum", f32), p.buffer("dq", elem, "write")
    factor, seq_q = p.number("dq_factor", f32), p.number("seq_q")
    number = workgroup_number(b) * config.threads + b.thread_id()
    line, strip = divmod_const(b, number, dim // run)
    with b.if_(line < p.number("rows")):
        head_number, row = line // seq_q, line % seq_q
        col = strip * run
        above = head_number * p.number("row_tiles")

        def read(columns: list[Value]) -> list[Value]:
            places = [_place_in_sums(b, config, target, above, row, column) for column in columns]
            return [b.load(sums, place) * factor for place in places]

        values = read([col + i for i in range(run)])
        if config.rope is not None:
            rotary = rotary_of(p, "dq", head_number // p.number("heads_q"), p.number("shift"))
            elsewhere = not rotary.interleaved or run == 1
            partners = read([rotary.partner(b, col + i) for i in range(run)]) if elsewhere else []
            angles = rotary.fetch_angles(b, rotary.angles(b, row), col, run)
            values = rotary.rotate(b, values, partners, angles, col, dim, back=True)
        b.store(out, b.cast(line, index) * dim + b.cast(col, index), b.cast(b.vector(values), elem))
    return b.finish()


def _build_round_quads(config: RoundConfig, target: Target) -> KernelIR:
    """Trace the kernel for sums in groups of four, two neighbours in each of two rows; a thread takes two groups."""
    b = Builder("attention_round", config.threads, arithmetic="quick")
    _await(b, target)
    index: Scalar = i64 if config.index64 else i32
    elem, dim = SCALARS[config.dtype], config.head_dim
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=dim, value_dim=dim), index)
    sums, out = p.buffer("dq_sum", f32), p.buffer("dq", elem, "write")
    factor, seq_q, tiles = p.number("dq_factor", f32), p.number("seq_q"), p.number("row_tiles")
    rows, each = arrange(target).results.part_rows, 2
    distance = next(row for row in rows if row)
    group = workgroup_number(b) * (config.threads * each)
    # Rows of a head come in blocks of 16, of which the first eight stand for all.
    numbers = [group + (i * config.threads) + b.thread_id() for i in range(each)]
    found = []
    for number in numbers:
        line, strip = divmod_const(b, number, dim // 2)
        block, row = line // distance, line % distance
        at = block * (dim // SIZE) + (strip >> 3)
        place = place_in_block(b, arrange(target), row, (strip & 7) * 2, added_together(target))
        quad = b.var(b.splat(b.const(0.0, f32), QUAD))
        with b.if_(number < p.number("round_quads")):
            quad.value = b.load(sums, b.cast(at, index) * (SIZE * SIZE) + b.cast(place, index), QUAD)
        found.append((block, row, strip * 2, quad.value))
    for number, (block, row, col, quad) in zip(numbers, found, strict=True):
        head_number, tile = block // tiles, block % tiles
        first = tile * SIZE + row
        parts = [x * factor for x in b.unpack(quad)]
        for i in range(2):
            inside = (first + i * distance < seq_q) & (number < p.number("round_quads"))
            with b.if_(inside):
                to = b.cast(head_number * seq_q + first + i * distance, index) * dim + b.cast(col, index)
                b.store(out, to, b.cast(b.vector(parts[2 * i : 2 * i + 2]), elem))
    return b.finish()


def _build_round_octets(config: RoundConfig, target: Target) -> KernelIR:
    """Trace the kernel for sums of which eight neighbours of a row lie as four even and four odd columns. A thread
    takes two groups of eight, and eight threads have consecutive rows."""
    b = Builder("attention_round", config.threads, arithmetic="quick")
    _await(b, target)
    index: Scalar = i64 if config.index64 else i32
    elem, dim = SCALARS[config.dtype], config.head_dim
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=dim, value_dim=dim), index)
    sums, out = p.buffer("dq_sum", f32), p.buffer("dq", elem, "write")
    factor, seq_q, tiles, total = (
        p.number("dq_factor", f32), p.number("seq_q"), p.number("row_tiles"), p.number("round_octets"),
    )  # fmt: skip
    arrangement, each = arrange(target), 2
    odd = arrangement.lanes << arrangement.results.part_cols.index(1)  # distance from the even to the odd columns
    group = workgroup_number(b) * (config.threads * each)
    numbers = [group + (i * config.threads) + b.thread_id() for i in range(each)]
    found = []
    for number in numbers:
        eight, within = divmod_const(b, number, dim)
        octet, low = within >> 3, within & 7
        row, col = (eight & 1) * 8 + low, octet * 8
        at = (eight >> 1) * (dim // SIZE) + (octet >> 1)
        place = b.cast(at, index) * (SIZE * SIZE) + b.cast(place_in_block(b, arrangement, row, col & 15), index)
        halves = [b.var(b.splat(b.const(0.0, f32), QUAD)) for _ in range(2)]
        with b.if_(number < total):
            for half, variable in enumerate(halves):
                variable.value = b.load(sums, place + half * odd, QUAD)
        found.append((eight >> 1, row, col, halves))
    for number, (block, row, col, halves) in zip(numbers, found, strict=True):
        head_number, tile = block // tiles, block % tiles
        line = tile * SIZE + row
        pairs = zip(*(b.unpack(half.value) for half in halves), strict=True)
        values = [x * factor for pair in pairs for x in pair]
        with b.if_((line < seq_q) & (number < total)):
            to = b.cast(head_number * seq_q + line, index) * dim + b.cast(col, index)
            b.store(out, to, b.cast(b.vector(values), elem))
    return b.finish()


def _place_in_sums(b: Builder, config: RoundConfig, target: Target, above: Value, row: Value, col: Value) -> Value:
    """Index of an element of dQ in its sums, after ``above`` tiles of rows of other heads."""
    index: Scalar = i64 if config.index64 else i32
    if config.shape is not None:
        layout = TileSums(config.shape, config.head_dim)
        tile, within = divmod_const(b, row, config.shape.block_kv)
        place = layout.place(b, within, col)
        return b.cast(above + tile, index) * layout.tile_size + b.cast(place, index)
    block = (above + (row >> 4)) * -(-config.head_dim // SIZE) + (col >> 4)
    start = b.cast(block, index) * (SIZE * SIZE)
    place = place_in_block(b, arrange(target), row & 15, col & 15, added_together(target))
    return start + b.cast(place, index)
