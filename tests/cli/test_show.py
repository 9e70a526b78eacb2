"""aule show: every operation, direction and language, and its mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import need

from aule.cli import main
from aule.cli._launches import OPS, directions, sizes_of
from aule.cli.show import LANGUAGES
from aule.ops.catalogue import CATALOGUE

SIGNS = {
    "ptx": ".visible .entry",
    "hip": "AULE_KERNEL(",
    "spirv": "",
    "opencl": "__kernel",
    "wgsl": "@compute",
    "msl": "kernel void",
    "llvm": "define ",
    "native": "",
    "ir": "kernel ",
}
SMALL = {"rows": "8", "columns": "64", "seq_len": "64", "head_dim": "32"}
SHOWN = [(op, direction) for op in OPS for direction in directions(op)]


def small(op: str) -> list[str]:
    """Arguments for small arrays of an op."""
    used = [(f"--{name.replace('_', '-')}", size) for name, size in SMALL.items() if name in sizes_of(op)]
    return [word for pair in used for word in pair]


def test_everything_can_be_shown() -> None:
    assert set(CATALOGUE) < set(OPS) and set(LANGUAGES) == set(SIGNS)
    assert len(SHOWN) == 2 * len(OPS) - 2, "decoding and caches alone have no gradient"


@pytest.mark.parametrize(("number", "op", "direction"), [(i, *shown) for i, shown in enumerate(SHOWN)])
def test_every_op_and_direction(number: int, op: str, direction: str, tmp_path: Path) -> None:
    """Two languages of each: all together, every language several times."""
    names = [name for name in SIGNS if name != "native"]  # compiling takes longer
    for name in (names[number % len(names)], names[(3 * number + 1) % len(names)]):
        file = tmp_path / name
        arguments = ["show", op, "--language", name, "-o", str(file), *small(op)]
        arguments += ["--launch", "1"] * (name == "spirv")
        assert main([*arguments, *(["--backward"] if direction == "backward" else [])]) == 0
        code = file.read_bytes()
        assert code[:4] == b"\x03\x02\x23\x07" if name == "spirv" else SIGNS[name].encode() in code
        assert name == "spirv" or f"{op} {direction}, launch 1 of ".encode() in code.splitlines()[0]


def test_assembly_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    need("cpu")
    assert main(["show", "rms_norm", "--language", "native", *small("rms_norm")]) == 0
    said = capsys.readouterr().out
    assert "\nrms_norm:" in said and "define " not in said


def test_launches(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["show", "attention", "--backward", "--language", "wgsl", *small("flash_attention")]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    count = said.count("// flash_attention backward, launch ")
    assert count > 1 and said.count("@compute") == count
    assert main([*arguments, "--launch", "2"]) == 0
    one = capsys.readouterr().out
    assert one.count("@compute") == 1 and one in said


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*OPS, *LANGUAGES):
        (line,) = [line for line in lines if line.split(" ")[0] == name]
        assert len(line.split()) > 1, "with what it is"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected an operation, as flash_attention, got none; --list names them all"),
        (["rmsnorm"], "got 'rmsnorm'; did you mean rms_norm?"),
        (["attention", "--language", "spir-v"], "got 'spir-v'; did you mean spirv?"),
        (
            ["attention", "--language", "cobol"],
            "expected --language of ptx, hip, spirv, opencl, wgsl, msl, llvm, native, ir",
        ),
        (["decode", "--backward"], "expected an op with a gradient, got decode_attention"),
        (["attention", "--backward", "--tiles", "32x32"], "expected --tiles with flash_attention forward"),
        (["rope", "--tiles", "32x32"], "expected options of rope, got --tiles; leave it out"),
        (["rms_norm", "--causal"], "expected options of rms_norm, got --causal; leave it out"),
        (["decode", "--rows", "8"], "expected options of decode_attention, got --rows"),
        (["attention", "--arch", "90"], "expected --arch as sm_90, from sm_60 on, got '90'"),
        (["attention", "--arch", "gfx803", "--language", "hip"], "expected --arch as gfx942, from gfx900 to gfx12"),
        (["attention", "--arch", "sm_90", "--language", "wgsl"], "expected --arch with --language ptx or hip, got"),
        (["attention", "--language", "spirv", "--backward"], "because flash_attention backward has as many launches"),
        (["swiglu", "--launch", "5"], "expected --launch from 1 to 1"),
        (["swiglu", "--columns", "0"], "expected --columns of at least 1, got 0"),
        (["attention", "-o", "no/such/folder/a.ptx"], "no/such/folder/a.ptx, got: No such file"),
        (["attention", "--backend", "cpu", "--language", "ptx"], "expected --language llvm for cpu, got ptx"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--backend" in arguments:
        need("cpu")
    assert main(["show", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and shown.err.count("\n") == 1
