"""The tuning tables: records are usable, and planners find the right one."""

from __future__ import annotations

import runpy
from dataclasses import replace
from importlib import resources

import pytest
from repository import ROOT

from aule import tuning
from aule.codegen import target_for
from aule.ir.types import f32
from aule.ops.attention.cpu.shapes import FORWARD, backward_shape, block_shape
from aule.ops.attention.plan import tiles, tiles_backward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.decode.config import FragmentDecodeShape
from aule.ops.decode.plan import latent
from aule.ops.linear.config import DirectBlocks, FragmentBlocks, WarpgroupBlocks
from aule.ops.rows.hints import RowTuning, SumTuning
from aule.target import Target
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.tile.vector.engine import vector_unit
from aule.tuning import model
from aule.tuning.family import GENERIC, families
from aule.tuning.record import Record, parse

TARGETS: dict[str, Target] = runpy.run_path(str(ROOT / "tools" / "kernel_targets.py"))["TARGETS"]
FILES = sorted(file.name for file in resources.files("aule.tuning").iterdir() if file.name.endswith(".jsonl"))
SHAPES = {
    tiles.SIMT: SimtShape,
    tiles.FRAGMENT: FragmentShape,
    tiles.WARPGROUP: FragmentShape,
    tiles_backward.SIMT: SimtShape,
    tiles_backward.FRAGMENT: FragmentShape,
    tiles_backward.WARPGROUP: FragmentShape,
    "decode.fragment": FragmentDecodeShape,
    "linear.direct": DirectBlocks,
    "linear.lines": FragmentBlocks,
    "linear.fragment": FragmentBlocks,
    "linear.warpgroup": WarpgroupBlocks,
    "linear.simt": SimtShape,
}
LAB = ROOT / "docs" / "lab"


def records(file: str) -> tuple[Record, ...]:
    return parse((resources.files("aule.tuning") / file).read_text())


@pytest.mark.parametrize("file", FILES)
def test_records_make_shapes(file: str) -> None:
    for record in records(file):
        if "shape" in record.use:
            shape = latent.SHAPES[record.use["kind"]] if record.op == latent.OP else SHAPES[record.op]
            shape(**record.use["shape"])
        if record.op in ("rows", "rows.norm", "glu"):
            RowTuning(**record.use)
        if record.op == "rows.sums":
            SumTuning(**record.use)
        assert record.use and record == parse(record.line())[0]


@pytest.mark.parametrize("file", FILES)
def test_records_say_where_they_come_from(file: str) -> None:
    for record in records(file):
        assert record.measured == "rule" or set(record.measured) == {"device", "date"}, record
        assert record.measured == "rule" or record.note, record
        assert not record.note or (LAB / record.note).is_file() or (LAB.parent / record.note).is_file(), record


def test_every_number_has_a_generic_record() -> None:
    """A planner asks for numbers on any device; those that only some devices have are asked for with a default."""
    named = {record.op for file in FILES for record in records(file) if "value" in record.use}
    optional = {"attention.cached_bytes", "decode.cached_bytes"}
    cpu = {"glu.row", "rope.heads"}
    generic = {record.op for record in records("generic.jsonl") if "value" in record.use}
    assert named - generic == optional and cpu <= generic


def test_every_file_belongs_to_a_family() -> None:
    known = {family for target in TARGETS.values() for family in families(target)}
    unknown = Target("vulkan", matrix_units=("m16n16k16:f16:f32",))
    assert {file.removesuffix(".jsonl") for file in FILES} <= known | set(families(unknown))


def test_families() -> None:
    assert families(TARGETS["h200-cuda"]) == ("nvidia-sm90", "nvidia", GENERIC)
    assert families(TARGETS["sm80-cuda"]) == ("nvidia-sm80", "nvidia-sm90", "nvidia", GENERIC)
    assert families(TARGETS["h200-vulkan"]) == ("nvidia-vulkan", "nvidia", GENERIC)
    assert families(TARGETS["h200-opencl"]) == ("nvidia", GENERIC)
    assert families(TARGETS["mi300-hip"]) == ("hip-cdna", GENERIC)
    assert families(TARGETS["rdna3-hip"]) == ("hip-rdna", GENERIC)
    assert families(TARGETS["rdna3-vulkan"]) == ("amd", GENERIC)
    assert families(TARGETS["pocl-opencl"]) == ("software", GENERIC)
    assert families(TARGETS["lavapipe-vulkan"]) == ("vulkan", GENERIC)
    assert families(TARGETS["portable-webgpu"]) == (GENERIC,)
    assert families(TARGETS["cpu-avx2"]) == ("cpu", GENERIC)


def test_conditions() -> None:
    record = Record("op", {"n": {"min": 2, "max": 4}, "kind": ["a", "b"], "flag": True}, {"value": 1})
    facts = {"n": 3, "kind": "a", "flag": True, "more": 1}
    assert record.applies(facts)
    for other in ({"n": 1}, {"n": 5}, {"kind": "c"}, {"flag": False}):
        assert not record.applies(facts | other)
    assert not record.applies({"n": 3, "kind": "a"})  # a fact that nobody states
    assert Record("op", {}, {"value": 1}).applies({})


def test_the_first_record_that_applies_and_fits_wins() -> None:
    target = target_for("spirv")
    tried = [Record("op", {"n": {"max": n}}, {"value": n}) for n in (2, 4, 8)]
    with tuning.trying(*tried):
        assert tuning.number(target, "op", n=3) == 4
        assert [record.use["value"] for record in tuning.matching(target, "op", {"n": 3})] == [4, 8]
        found = tuning.find(target, "op", {"n": 3}, lambda record: record.use["value"] > 4)
        assert found is not None and found.use == {"value": 8}
        assert tuning.find(target, "op", {"n": 9}) is None and tuning.use(target, "op", n=9) == {}
    assert tuning.records(target, "op") == ()


def test_own_records_go_before_the_tables() -> None:
    target = TARGETS["h200-cuda"]
    own = Record("rows.overlap_threads", {}, {"value": 512})
    assert tuning.number(target, own.op) != 512
    with tuning.trying(own):
        assert tuning.number(target, own.op) == 512


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.host])
def test_blocks_of_a_cpu(name: str) -> None:
    """Fewer tasks get smaller blocks, down to a record for any number of them; the user's own records come first."""
    target = TARGETS[name]
    unit = vector_unit(target, f32)
    for dim in (64, 256):
        sizes = [block_shape(rows, 8, dim, unit, target).block_q for rows in (1, 96, 1024, 65536)]
        assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
        problem = AttentionProblem(1, 8, 8, 1, 1, dim, dim, "f32", 0.1)
        large = replace(problem, seq_kv=65536)
        small, wide = (backward_shape(x, unit, target, pairs=False) for x in (problem, large))
        assert small.block_kv <= wide.block_kv and small.block_kv % small.panel == 0
    with tuning.trying(Record(FORWARD, {"head_dim": 64}, {"block_q": 72, "block_kv": 64, "tasks": 0})):
        assert block_shape(65536, 8, 64, unit, target).block_q == 72
        assert block_shape(65536, 8, 128, unit, target).block_q != 72


def test_the_model() -> None:
    unknown, known = (
        Target("vulkan"),
        replace(TARGETS["h200-cuda"], registers_per_unit=1 << 16, shared_per_unit=228 << 10),
    )
    assert model.resident(unknown, 256, 128) == 2 and model.resident(unknown, 1024) == 1
    assert model.resident(known, 128, 128) == 4 and model.resident(known, 128, 128, 100 << 10) == 2
    assert model.fits(known, 1024, 113 << 10, 2) and not model.fits(known, 1024, 114 << 10, 2)
    assert model.units(unknown) > 0 and model.units(known) == 132
    assert model.tasks(TARGETS["cpu-avx2"]) == 32 and model.tasks(TARGETS["cpu-avx2"], rows=True) == 64
    assert model.cached_bytes(replace(unknown, l2_bytes=96 << 20), "attention") == 64 << 20
    assert model.cached_bytes(replace(known, l2_bytes=1), "attention") == 32 << 20  # measured
