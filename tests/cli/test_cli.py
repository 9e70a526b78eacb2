"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aule
from aule import store
from aule.backends import registry
from aule.cli import COMMANDS, main
from aule.cli import check as check_command
from aule.cli._cases import CASES, QUICK
from aule.cli._progress import Progress


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AULE_BACKEND", raising=False)


# -- info ------------------------------------------------------------------------------------------------------------


def test_backends_of_this_machine() -> None:
    names = aule.get_available_backends()
    assert names[-1] == "numpy" and len(set(names)) == len(names)
    errors = aule.get_backend_errors()
    assert not set(names) & set(errors)
    assert all(message.startswith(f"[{name}]") and ";" in message for name, message in errors.items())
    info = aule.get_backend_info()
    assert set(info["backends"]) == {*names, *errors}
    assert info["version"] == aule.__version__
    for name, backend in info["backends"].items():
        assert backend["available"] == (name in names)
        assert all(device["backend"] == name for device in backend["devices"])


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert aule.__version__ in text and "numpy" in text and "Host arrays go to" in text
    for name, message in aule.get_backend_errors().items():
        assert name in text and message in text


@pytest.mark.parametrize("command", ["info", "doctor"])
def test_lines_fit_the_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command])
    whole = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    main([command])
    said = capsys.readouterr().out
    longest = max(len(word) for word in whole.split())  # a path
    assert max(map(len, said.splitlines())) <= max(80, longest + 20) < max(map(len, whole.splitlines()))


def test_info_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["backends"]["numpy"]["devices"][0]["device"] == "numpy"
    default = info["default_device"]
    assert default in [d["device"] for b in info["backends"].values() for d in b["devices"]]


def test_info_with_a_forced_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AULE_BACKEND", "numpy")
    assert aule.get_backend_info()["default_device"] == "numpy"
    monkeypatch.setenv("AULE_BACKEND", "nonsense")
    info = aule.get_backend_info()
    assert info["default_device"] is None and "nonsense" in info["default_error"]
    assert main(["info"]) == 0
    assert "AULE_BACKEND=nonsense cannot be served" in capsys.readouterr().out


def test_info_says_how_torch_tensors_are_computed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aule.api import info

    build: dict[str, Any] = {"version": "2.9.0+mine", "cuda": "13.0", "hip": None, "xpu": "2025", "mps": None}
    monkeypatch.setattr(info, "torch_build", lambda: build)
    found = aule.get_backend_info()
    routes, default = found["torch"], found["default_device"]
    assert found["torch_version"] == "2.9.0+mine" and list(routes) == ["cpu", "cuda", "xpu"]
    assert routes["cuda"].startswith("in place") and f"computed by {default}" in routes["xpu"]
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert f"  xpu   {routes['xpu']}\n" in said and "PyTorch 2.9.0+mine" in said.splitlines()[0] and "rocm" not in said

    build |= {"hip": "6.4", "mps": "yes"}
    assert aule.get_backend_info()["torch"]["mps"] == "in place, by torch.mps.compile_shader"
    monkeypatch.setenv("AULE_BACKEND", "numpy")
    routes = aule.get_backend_info()["torch"]
    assert routes["cpu"] == "in place, by numpy, without gradients"
    assert routes["cuda"] == routes["mps"] == routes["rocm"] and routes["rocm"].endswith("numpy, without gradients")
    monkeypatch.delenv("AULE_BACKEND")
    monkeypatch.setattr(info, "_default_device", lambda: ("vulkan:0", None))
    routes = aule.get_backend_info()["torch"]
    cpu = "cpu" in aule.get_available_backends()
    assert routes["cpu"] == ("in place, by cpu:0" if cpu else "copied to vulkan:0 and back")
    assert routes["rocm"].endswith("computed by vulkan:0")
    available = registry.available()
    monkeypatch.setattr(registry, "available", lambda: available | {"hip": []})
    assert aule.get_backend_info()["torch"]["rocm"] == "in place, on PyTorch's current stream"
    monkeypatch.setattr(info, "torch_build", lambda: None)
    assert aule.get_backend_info()["torch"] is None and aule.get_backend_info()["torch_version"] is None


def test_the_build_of_pytorch_is_read_without_importing_it() -> None:
    torch = pytest.importorskip("torch")
    from aule.api import info

    build = info.torch_build()
    assert build is not None
    assert (build["version"], build["cuda"]) == (torch.__version__, torch.version.cuda)
    assert build["hip"] == torch.version.hip


def test_info_names_the_extras_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aule.api import info

    monkeypatch.setattr(info, "_installed", lambda module: False)
    aule.print_backend_info()
    text = capsys.readouterr().out
    assert 'pip install "aule-attention[opencl]"' in text and 'pip install "aule-attention[webgpu]"' in text


def test_importing_probes_nothing_and_needs_numpy_alone() -> None:
    script = """
import sys
import aule
from aule.backends import registry
assert not registry._found and not registry._errors
late = {"torch", "pyopencl", "wgpu", "ml_dtypes", "aule.runtime.vulkan", "aule.runtime.cuda", "aule.cli"}
assert not late & set(sys.modules), late & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# -- check -----------------------------------------------------------------------------------------------------------


def test_check_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--backend", "numpy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("attention [1, 8, 1024, 64] float32 causal on numpy") and ": ok," in lines[0]
    rows = [line for line in lines if line.startswith("numpy  ")]
    assert len(rows) == len(CASES) and all(row.endswith("ok") for row in rows)
    assert lines[-1] == f"{len(CASES) + 1} of {len(CASES) + 1} checks right"


def test_check_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--backend", "numpy", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["headline"]["status"] == "ok"
    assert {r["case"] for r in answer["results"]} == {c.name for c in CASES}
    assert all(r["error"] <= r["tolerance"] and r["seconds"] > 0 for r in answer["results"])


def test_check_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--backend", "numpy", "--quick", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {r["case"] for r in results} == {c.name for c in QUICK} < {c.name for c in CASES}
    assert len({c.dtype for c in QUICK}) > 1


def test_check_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check_command, "bfloat16", lambda: None)
    assert main(["check", "--backend", "numpy"]) == 0
    text = capsys.readouterr().out
    assert "skipped NumPy needs ml_dtypes" in text and "1 skipped" in text


def test_check_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = check_command.flash_attention

    def wrong(**arguments: Any) -> Any:
        if arguments.get("window"):
            raise RuntimeError("boom")
        out, lse = right(**arguments)
        if arguments.get("softcap"):
            out = out + np.float32(1e-3)
        return out, lse

    monkeypatch.setattr(check_command, "flash_attention", wrong)
    assert main(["check", "--backend", "numpy"]) == 1
    text = capsys.readouterr().out
    assert text.count("WRONG") == 3 and "WRONG RuntimeError: boom" in text and "worst at" in text
    assert main(["check", "--backend", "numpy", "--json"]) == 1


@pytest.mark.parametrize("spec", ["nonsense", "vulkan:99", "numpyy"])
def test_check_of_a_backend_that_is_missing(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--backend", spec]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("aule: [") and captured.err.count("\n") == 1


def test_progress_draws_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2) as progress:
        progress.step("first")
        progress.line("row")
    assert capsys.readouterr() == ("row\n", "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(2) as progress:
        progress.step("first")
        progress.step("second")
        progress.line("row")
    captured = capsys.readouterr()
    assert captured.out == "row\n"
    assert "1/2 second" in captured.err and captured.err.endswith("\r\x1b[K")


# -- show ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "sign"),
    [
        ("ptx", ".visible .entry"),
        ("opencl", "__kernel"),
        ("wgsl", "@compute"),
        ("msl", "kernel void"),
        ("ir", "kernel "),
    ],
)
def test_show(language: str, sign: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "attention", "--language", language, "--causal", "--head-dim", "32"]) == 0
    text = capsys.readouterr().out
    assert sign in text and "flash_attention_causal" in text and "q_ptr" in text


def test_show_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", "attention", "--arch", "sm_90", "--dtype", "f16", "--tiles", "32x64", "--heads", "4"]) == 0
    assert ".target sm_90" in capsys.readouterr().out
    file = tmp_path / "kernel.spv"
    assert main(["show", "flash_attention", "--language", "spirv", "-o", str(file)]) == 0
    assert file.read_bytes()[:4] == b"\x03\x02\x23\x07"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--head-dim", "600"],
        ["--tiles", "64"],
        ["--tiles", "63x64"],
        ["--tiles", "128x128", "--language", "wgsl"],
        ["--backend", "numpy"],
        ["--backend", "nonsense"],
        ["--heads", "3", "--kv-heads", "2"],
    ],
)
def test_show_refuses_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "attention", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("aule: [") and captured.err.count("\n") == 1


def test_spirv_goes_to_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["show", "attention", "--language", "spirv"]) == 2
    assert "--output" in capsys.readouterr().err


# -- the program -----------------------------------------------------------------------------------------------------


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "aule", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"aule {aule.__version__}"


def test_a_reader_that_leaves_early() -> None:
    """``aule show | head -1`` says nothing about a broken pipe."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "aule", "show", "attention"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.readline()
    writer.stdout.close()
    errors = writer.stderr.read()
    assert writer.wait(60) == 0
    assert b"Broken" not in errors and b"Traceback" not in errors


def test_without_a_command_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert not shown.out and all(f"\n    {name} " in shown.err for name in ("info", "check", "tune", "show"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["unknown"], "aule: argument command: invalid choice: 'unknown'"),
        (["check", "--nothing"], "aule: unrecognized arguments: --nothing"),
        (["show", "rope", "--heads", "two"], "aule show: argument --heads: invalid int value: 'two'"),
        (["bench", "--json"], "aule bench: argument --json: expected one argument"),
        (["tune", "--dtype", "f8"], "aule tune: argument --dtype: invalid choice: 'f8'"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(message) and said.count("\n") == 1 and "--help" in said


def test_help_has_one_line_for_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, _, summary in COMMANDS:
        assert f"    {name:<8}  {summary}" in lines


@pytest.mark.parametrize("name", [name for name, _, _ in COMMANDS])
def test_help_of_each_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0 and f"usage: aule {name}" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
def test_ctrl_c_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(check_command, "_check", interrupted)
    assert main(["check", "--backend", "numpy"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device", "/full/disk")

    monkeypatch.setattr(check_command, "_devices", full)
    assert main(["check"]) == 2
    said = "aule: expected to read or write /full/disk, got: No space left on device; choose another path\n"
    assert capsys.readouterr().err == said


def test_help_into_a_closed_pipe() -> None:
    """Python writes a short text at its end only, where nobody would catch the error."""
    script = "import sys; from aule.cli import main; sys.stdin.read(); sys.exit(main(['show', '--list']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    errors = process.stderr.read()
    assert (process.wait(60), errors) == (0, b"")


# -- cache -----------------------------------------------------------------------------------------------------------


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["cache"]) == 0
    assert "empty" in capsys.readouterr().out
    names = ("kernels/ab/ab" + 62 * "0", "tuned/abc.jsonl", "refused/" + 16 * "0" + ".ptx")
    for name in names:
        store.write(name, b"x" * 2**20)
    (tmp_path / "cache" / "mine.txt").write_text("a file of the user's")
    assert main(["cache", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["path"] == str(tmp_path / "cache") and 3 * 2**20 < answer["bytes"] < answer["limit"]
    assert {name: folder["files"] for name, folder in answer["folders"].items()} == dict.fromkeys(
        ("kernels", "tuned", "refused"), 1
    )
    assert main(["cache", "--clear"]) == 0
    said = capsys.readouterr().out
    assert "1 file  1.0 MiB  what `aule tune` measured" in said and "generated kernels" not in said
    assert main(["cache", "--clear-tuned"]) == 0
    assert [x.name for x in (tmp_path / "cache").rglob("*") if x.is_file() and x.stat().st_size] == ["mine.txt"]


def test_a_cache_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("AULE_CACHE_DIR", str(file))
    assert main(["cache"]) == 2
    assert "expected a folder, got the file" in capsys.readouterr().err
    monkeypatch.setenv("AULE_CACHE_SIZE", "large")
    assert main(["cache"]) == 2
    assert "expected AULE_CACHE_SIZE to be 1 or more" in capsys.readouterr().err


def test_a_cache_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if sys.platform == "win32":
        pytest.skip("Python cannot ask who may write to a folder on Windows")
    tmp_path.chmod(0o777)
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    assert main(["cache"]) == 1
    assert "can be written by others" in capsys.readouterr().out
