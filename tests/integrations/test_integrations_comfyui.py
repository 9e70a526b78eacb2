"""The ComfyUI node against a stand-in for what ComfyUI does with it: its patcher, its wrapper, its attention."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="CPU tensors go to the CPU engine")

from aule.integrations import comfyui as integration  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> None:
    aule.reset_dispatch_stats()
    integration._logged.clear()
    torch.manual_seed(0)


def stats(served: int, **reasons: int) -> None:
    assert (
        aule.dispatch_stats().items()
        >= {
            "served": served,
            "passed_on": sum(reasons.values()),
            "reasons": reasons,
            "ops": {},
        }.items()
    )


# -- the stand-in ------------------------------------------------------------------------------------------------------


class Patcher:
    """A ModelPatcher as far as the node knows it."""

    def __init__(self, options: dict[str, Any] | None = None, shares: bool = False) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": options or {}}
        self.shares = shares

    def clone(self) -> Patcher:
        other = Patcher(shares=self.shares)
        # Today the options are copied through and through; a clone that shares them must stay unchanged as well.
        other.model_options = self.model_options if self.shares else copy.deepcopy(self.model_options)
        return other

    def attention(self, *arguments: Any, **options: Any) -> Any:
        return optimized_attention(*arguments, **options, transformer_options=self.model_options["transformer_options"])


own_calls: list[dict[str, Any]] = []


def own_attention(
    q: Any, k: Any, v: Any, heads: int, mask: Any = None, attn_precision: Any = None, skip_reshape: bool = False,
    skip_output_reshape: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """What ComfyUI's attention with PyTorch means, naively."""
    own_calls.append(options)
    batch = q.shape[0]
    dim = q.shape[-1] if skip_reshape else q.shape[-1] // heads
    if not skip_reshape:
        q, k, v = (x.reshape(batch, x.shape[1], -1, dim).transpose(1, 2) for x in (q, k, v))
    if options.get("enable_gqa"):
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = (q.double() @ k.double().transpose(-1, -2)) * options.get("scale", dim**-0.5)
    if mask is not None:
        mask = mask.reshape(1, 1, *mask.shape) if mask.dim() == 2 else mask.unsqueeze(1) if mask.dim() == 3 else mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    out = (scores.softmax(-1) @ v.double()).to(q.dtype)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(batch, -1, heads * dim)


def optimized_attention(*arguments: Any, **options: Any) -> Any:
    """The wrapper around every attention function: it hands the bare function to the override."""
    if "_inside_attn_wrapper" not in options:
        options["_inside_attn_wrapper"] = True
        override = options.get("transformer_options", {}).get("optimized_attention_override")
        if override is not None:
            return override(own_attention, *arguments, **options)
    return own_attention(*arguments, **options)


def patched(backend: str = "auto", model: Patcher | None = None) -> Patcher:
    node = integration.NODE_CLASS_MAPPINGS["AuleAttention"]()
    (result,) = getattr(node, node.FUNCTION)(model=model or Patcher(), enabled=True, backend=backend)
    assert isinstance(result, Patcher)
    return result


def close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 11, 13, 16


def tensors(skip_reshape: bool, kv_heads: int = HEADS, dtype: Any = torch.float32) -> Any:
    shapes = ((HEADS, ROWS), (kv_heads, KEYS), (kv_heads, KEYS))
    made = [torch.randn(BATCH, heads, rows, DIM, dtype=dtype) for heads, rows in shapes]
    return made if skip_reshape else [x.transpose(1, 2).flatten(2) for x in made]


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("skip_reshape", "skip_output_reshape"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("options", [{}, {"scale": 0.6}, {"attn_precision": torch.float32}], ids=str)
def test_layouts(options: dict[str, Any], skip_reshape: bool, skip_output_reshape: bool) -> None:
    options = {**options, "skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    given = (*tensors(skip_reshape), HEADS)
    with torch.inference_mode():
        close(patched().attention(*given, **options), own_attention(*given, **options))
    stats(1)


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_grouped_heads(skip_reshape: bool) -> None:
    q, k, v = tensors(skip_reshape, kv_heads=2)
    options = {"skip_reshape": skip_reshape, "enable_gqa": True}
    close(patched().attention(q, k, v, heads=HEADS, **options), own_attention(q, k, v, HEADS, **options))
    stats(1)


MASKS = {
    "2 axes": (ROWS, KEYS),
    "2 axes, one row": (1, KEYS),
    "3 axes": (BATCH, ROWS, KEYS),
    "3 axes, one row": (BATCH, 1, KEYS),
    "3 axes, one batch": (1, ROWS, KEYS),
    "4 axes": (BATCH, HEADS, ROWS, KEYS),
    "4 axes, keys alone": (BATCH, 1, 1, KEYS),
}


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("shape", MASKS)
def test_masks(shape: str, kind: str, skip_reshape: bool) -> None:
    mask = torch.randn(MASKS[shape])
    if kind == "bool":
        mask = mask > -0.5
    given = (*tensors(skip_reshape), HEADS)
    found = patched().attention(*given, mask=mask, skip_reshape=skip_reshape)
    close(found, own_attention(*given, mask=mask, skip_reshape=skip_reshape))
    assert not torch.allclose(found, own_attention(*given, skip_reshape=skip_reshape), atol=1e-2)
    close(patched().attention(*given, mask, skip_reshape=skip_reshape), found)  # by position
    stats(2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: Any) -> None:
    given = (*tensors(False, dtype=dtype), HEADS)
    mask = torch.randn(ROWS, KEYS)  # float32, as ComfyUI may leave it
    found, expected = patched().attention(*given, mask=mask), own_attention(*given, mask=mask)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    stats(1)


def test_gradients() -> None:
    """For whoever trains inside of ComfyUI."""
    results = []
    for function in (patched().attention, own_attention):
        torch.manual_seed(1)
        q, k, v = (x.requires_grad_() for x in tensors(False))
        function(q, k, v, HEADS).square().sum().backward()
        results.append((q.grad, k.grad, v.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    stats(1)


# -- what is passed on -------------------------------------------------------------------------------------------------


def test_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (torch.randn(1, 5, 640) for _ in range(3))
    own_calls.clear()
    for _ in range(2):
        found = patched().attention(q, k, v, 1, low_precision_attention=False)
    assert torch.equal(found, own_attention(q, k, v, 1))
    assert own_calls[0]["low_precision_attention"] is False and "transformer_options" in own_calls[0]
    stats(0, **{"head_dim above 576": 2})
    assert caplog.text.count("head_dim above 576") == 1


def test_a_mask_of_another_meaning_is_passed_on() -> None:
    """ComfyUI's basic attention takes a boolean ``[batch, keys]``, which PyTorch does not."""
    seen = []
    mask = torch.ones(BATCH, KEYS, dtype=torch.bool)
    given = (*tensors(False), HEADS)
    integration.attention_override()(lambda *a, **options: seen.append(options["mask"]), *given, mask=mask)
    assert seen[0] is mask
    stats(0, **{"shape of attn_mask": 1})


def test_tensors_of_other_devices_are_passed_on() -> None:
    given = [x.to("meta") for x in tensors(True)]
    function = integration.attention_override()
    assert function(lambda *a, **options: "theirs", *given, HEADS, skip_reshape=True) == "theirs"
    stats(0, **{"device meta": 1})


def test_a_compiled_model() -> None:
    """Compiled graphs hold ComfyUI's own attention."""
    given = (*tensors(False), HEADS)
    compiled = torch.compile(patched().attention, backend="aot_eager")
    close(compiled(*given), own_attention(*given))
    stats(0)


# -- the node ----------------------------------------------------------------------------------------------------------


def test_the_node_is_what_comfyui_wants() -> None:
    assert set(integration.NODE_DISPLAY_NAME_MAPPINGS) == set(integration.NODE_CLASS_MAPPINGS) == {"AuleAttention"}
    node = integration.NODE_CLASS_MAPPINGS["AuleAttention"]
    required = node.INPUT_TYPES()["required"]
    assert list(required) == ["model", "enabled", "backend"]
    assert required["model"] == ("MODEL",) and node.RETURN_TYPES == ("MODEL",)
    assert required["enabled"][0] == "BOOLEAN"
    choices, options = required["backend"]
    assert choices[0] == options["default"] == "auto" and set(aule.get_available_backends()) <= set(choices)
    assert callable(getattr(node(), node.FUNCTION)) and isinstance(node.CATEGORY, str)


@pytest.mark.parametrize("shares", [False, True])
def test_the_model_itself_is_left_as_it_was(shares: bool) -> None:
    model = Patcher({"patches": {"a": [1]}}, shares=shares)
    other = patched(model=model)
    assert model.model_options == {"transformer_options": {"patches": {"a": [1]}}}
    assert other.model_options["transformer_options"]["patches"] == {"a": [1]}
    again = other.clone()  # ComfyUI clones it for the next node
    again.attention(*tensors(False), HEADS)
    stats(1)
    model.attention(*tensors(False), HEADS)
    stats(1)


def test_not_enabled() -> None:
    model = Patcher()
    assert integration.AuleAttention().patch(model, False, "auto") == (model,)
    assert model.model_options == {"transformer_options": {}}


def test_a_named_backend() -> None:
    given = (*tensors(False), HEADS)
    close(patched("numpy").attention(*given), own_attention(*given))
    stats(1)
    with pytest.raises(aule.BackendUnavailableError, match="abacus"):
        patched("abacus")


def test_an_override_that_was_there_before() -> None:
    """It gets what is not served; and the node twice is the node once."""
    seen = []

    def before(function: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(function)
        return function(*arguments, **options)

    model = patched(model=patched(model=Patcher({"optimized_attention_override": before})))
    model.attention(*tensors(False), HEADS)
    assert not seen
    wide = [torch.randn(1, 5, 640) for _ in range(3)]
    assert torch.equal(model.attention(*wide, 1), own_attention(*wide, 1))
    assert seen == [own_attention]
    stats(1, **{"head_dim above 576": 1})


# -- python -m aule.integrations.comfyui -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    attention = tmp_path / "comfy" / "ldm" / "modules" / "attention.py"
    attention.parent.mkdir(parents=True)
    attention.write_text('transformer_options["optimized_attention_override"]')
    (tmp_path / "custom_nodes").mkdir()
    return tmp_path


def test_command(folder: Path) -> None:
    """Written as a user does it, and loaded as ComfyUI does it."""
    command = [sys.executable, "-m", "aule.integrations.comfyui", str(folder)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "restart ComfyUI" in done.stdout
    package = folder / "custom_nodes" / "aule_attention"
    spec = importlib.util.spec_from_file_location("custom_nodes_aule_attention", package / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS["AuleAttention"] is integration.AuleAttention


def test_command_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(path: Path, match: str) -> None:
        assert integration.main([str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("aule: [comfyui] expected ") and match in error

    refused(folder / "comfy", f"the folder of ComfyUI, got {folder / 'comfy'} without custom_nodes; give the one")
    package = folder / "custom_nodes" / "aule_attention"
    package.mkdir()
    (package / "__init__.py").write_text("print('mine')")
    refused(folder, "got one that differs; remove it first")
    assert (package / "__init__.py").read_text() == "print('mine')"
    attention = folder / "comfy" / "ldm" / "modules" / "attention.py"
    attention.write_text("def optimized_attention(): ...")
    refused(folder, "without; update ComfyUI")
    attention.unlink()
    refused(folder, "without comfy")


def test_needs_no_torch_to_be_listed() -> None:
    code = (
        "import sys, aule.integrations.comfyui as c; c.AuleAttention.INPUT_TYPES(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
