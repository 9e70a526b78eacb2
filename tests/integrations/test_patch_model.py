"""Tiny random models of transformers with `aule.patch_model`, against themselves without."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aule

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

from test_integrations_transformers import DECODERS, IDS, decoder  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

MODELS = {name: DECODERS[name] for name in ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2")}
MODELS |= {"qwen2": decoder("Qwen2"), "gemma": decoder("Gemma")}
LAYERS = 2
EXPECTED = {
    "llama": {"rms_norm": 2 * LAYERS + 1, "swiglu": LAYERS},
    "qwen3": {"rms_norm": 4 * LAYERS + 1, "swiglu": LAYERS},
    "gemma": {"rms_norm": 2 * LAYERS + 1, "geglu": LAYERS},
    "gemma2": {"rms_norm": 4 * LAYERS + 1, "geglu": LAYERS},
    "gemma3": {"rms_norm": 6 * LAYERS + 1, "geglu": LAYERS},
    "gpt2": {"layer_norm": 2 * LAYERS + 1},
}
EXPECTED |= {name: EXPECTED["llama"] for name in ("mistral", "qwen2")}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Everything as it was, functions of transformers' modules included."""
    aule.reset_dispatch_stats()
    yield
    aule.reset_dispatch_stats()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            function = getattr(module, "apply_rotary_pos_emb", None)
            if hasattr(function, "_aule_original"):
                module.apply_rotary_pos_emb = function._aule_original


def made(name: str, attention: str = "eager") -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind._from_config(copy.deepcopy(config), attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():  # weights of normalisations, which are all alike, should matter
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def computed(model: Any) -> tuple[Any, list[Any]]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    out = model(IDS, labels=IDS)
    out.loss.backward()
    return out.logits.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_agrees(name: str) -> None:
    model = made(name).eval()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    logits, gradients = computed(model)
    report = aule.patch_model(model)
    rotates = {} if name == "gpt2" else {"rope": LAYERS}
    assert report.swapped == EXPECTED[name] | rotates
    assert not report.skipped
    assert list(model.state_dict()) == keys
    assert all(x is y for x, y in zip(parameters, model.parameters(), strict=True))

    found, theirs = computed(model)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    for x, y in zip(theirs, gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5 * float(y.abs().max()) + 1e-7)
    calls = EXPECTED[name] | ({} if name == "gpt2" else {"rope": 2 * LAYERS})
    assert aule.dispatch_stats()["ops"] == calls


def test_trains_as_the_original() -> None:
    """Llama with aule's attention, normalisations, gated units and rotary embedding: the same losses, step by step."""
    from aule.integrations.transformers import register

    register()
    original, patched = made("llama"), made("llama", "aule")
    curve = [trained(original, 8)]
    print(report := aule.patch_model(patched))
    assert "5 rms_norm, 2 swiglu, 2 rope" in str(report)
    curve.append(trained(patched, 8))
    assert curve[0][-1] < 0.7 * curve[0][0]
    torch.testing.assert_close(torch.tensor(curve[1]), torch.tensor(curve[0]), rtol=1e-4, atol=1e-5)
    assert aule.dispatch_stats()["ops"] == {"rms_norm": 8 * 5, "swiglu": 8 * 2, "rope": 8 * 2 * 2}


def trained(model: Any, steps: int) -> list[float]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_half_precision_and_mixed_dtypes() -> None:
    """The result's dtype is that of the original layer, also where weights are wider than rows."""
    from aule.integrations.patching import _replacement

    for name in ("llama", "gemma"):
        model = made(name)
        norm = model.model.norm
        found = _replacement(norm, model)
        assert found is not None
        ours = found[1]()
        for weight, rows in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
            norm.to(weight)
            x = torch.randn(3, 32).to(rows)
            right = norm(x)
            assert ours(x).dtype == right.dtype
            torch.testing.assert_close(ours(x), right, rtol=2e-2, atol=2e-2)


def test_what_stays() -> None:
    model = made("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    report = aule.patch_model(model, rope=False, rms_norm=False)
    assert not report.swapped
    assert report.skipped == {"LlamaMLP, which has hooks": 1}
    assert "left as they are: 1 x LlamaMLP, which has hooks" in str(report)
    aule.patch_model(model)
    assert aule.patch_model(model).swapped == {}, "once is enough"
    assert aule.patch_model(made("gpt2"), layer_norm=False).swapped == {}, "known, and not wanted"
    with pytest.raises(aule.InvalidArgumentError, match="expected a model of Llama, Mistral"):
        aule.patch_model(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(aule.InvalidArgumentError, match=r"expected a torch\.nn\.Module, got list"):
        aule.patch_model([])


def test_without_memory() -> None:
    """A model on the device ``meta``, patched where that is the default, and filled later."""
    original = made("gemma2")
    with torch.device("meta"):
        model = type(original)._from_config(copy.deepcopy(original.config), attn_implementation="eager")
        assert aule.patch_model(model, rope=False).swapped == EXPECTED["gemma2"]
        assert model(IDS.to("meta")).logits.shape == (*IDS.shape, original.config.vocab_size)
    model.load_state_dict(original.state_dict(), assign=True)
    for name, layer in original.named_modules():
        for buffer, value in layer.named_buffers(recurse=False):  # those of no state dictionary
            setattr(model.get_submodule(name), buffer, value)
    torch.testing.assert_close(model(IDS).logits, original(IDS).logits, rtol=1e-4, atol=1e-5)


def test_nothing_is_asked_for() -> None:
    for name in ("llama", "gpt2"):
        report = aule.patch_model(made(name), rms_norm=False, layer_norm=False, gated=False, rope=False)
        assert not report.swapped and not report.skipped and "nothing" in str(report)


def test_compiled() -> None:
    model = made("llama").eval()
    with torch.no_grad():
        right = model(IDS).logits
        aule.patch_model(model)
        found = torch.compile(model, backend="aot_eager")(IDS).logits
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24,), (4, 6)])
def test_norms_as_pytorch(shape: tuple[int, ...]) -> None:
    x = torch.randn(5, 2, *shape)
    for kind in ("RMSNorm", "LayerNorm"):
        ours, theirs = (getattr(of, kind)(shape) for of in (aule.nn, torch.nn))
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_()
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert aule.dispatch_stats()["ops"] == {"rms_norm": 1, "layer_norm": 1}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_default_eps_is_pytorchs(dtype: Any, compiled: bool) -> None:
    """In 16 bits that of float32, in versions that compute in it: rows of small numbers show the difference."""
    x = (torch.randn(5, 24) / 256).to(dtype)
    ours, theirs = (of.RMSNorm(24, dtype=dtype) for of in (aule.nn, torch.nn))
    found = (torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours)(x)
    torch.testing.assert_close(found, theirs(x))


def test_layers_are_imported_where_tensors_are_fake() -> None:
    lines = (
        "import torch, aule",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "with torch.device('meta'), FakeTensorMode(), torch.inference_mode():",
        "    assert aule.nn.RMSNorm(8)(torch.ones(2, 8)).shape == (2, 8)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_offset_of_fresh_weights() -> None:
    norm = aule.nn.RMSNorm(8, weight_offset=1.0)
    x = torch.randn(3, 8)
    assert "weight_offset=1.0" in repr(norm)
    torch.testing.assert_close(norm(x), torch.nn.RMSNorm(8)(x))


def test_gated_units() -> None:
    x = torch.randn(3, 8)
    for unit, activation in (
        (aule.nn.SwiGLU(8, 12, 5), torch.nn.functional.silu),
        (aule.nn.GeGLU(8, 12, bias=True), torch.nn.functional.gelu),
        (aule.nn.GeGLU(8, 12, approximate="tanh"), lambda y: torch.nn.functional.gelu(y, approximate="tanh")),
    ):
        right = unit.down_proj(activation(unit.gate_proj(x)) * unit.up_proj(x))
        torch.testing.assert_close(unit(x), right, rtol=1e-5, atol=1e-5)
    assert aule.dispatch_stats()["ops"] == {"swiglu": 1, "geglu": 2}


def test_rotary_embedding() -> None:
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8)
    from transformers.models.llama import modeling_llama as llama

    q, k, ids = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.tensor([[3, 0, 7, 1, 2, 8, 5, 4, 6]] * 2)
    rotary = aule.nn.RotaryEmbedding(8, max_positions=4)
    for positions in (torch.arange(9)[None], ids):
        right = llama.apply_rotary_pos_emb(q, k, *llama.LlamaRotaryEmbedding(config)(q, positions))
        found = rotary(q, k, None if positions is not ids else ids)
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotary(q), rotary(q, k)[0])
    cos, sin = aule.precompute_rope_frequencies(9, 8, device="cpu")
    assert torch.equal(rotary.cos[:9], cos) and torch.equal(rotary.sin[:9], sin)


def test_rotary_embedding_on_a_device_without_float64() -> None:
    """Apple's GPUs are such; the meta device stands for one."""

    class WithoutFloat64(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.is_meta and found.dtype == torch.float64:
                raise TypeError("this device has no float64")
            return found

    with WithoutFloat64():
        rotary = aule.nn.RotaryEmbedding(8, max_positions=4, device="meta")
        assert rotary(torch.empty(1, 2, 9, 8, device="meta")).shape == (1, 2, 9, 8)
    assert rotary.cos.is_meta and rotary.cos.shape == (9, 4)


def test_a_rotary_embedding_of_keys_that_are_more() -> None:
    rotary = aule.nn.RotaryEmbedding(8, max_positions=4)
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    found = rotary(q, k)
    assert torch.equal(found[0], rotary(q)) and torch.equal(found[1], rotary(k))
    assert not torch.equal(found[1][:, :, 8], k[:, :, 8])


def test_a_rotary_embedding_grows_in_inference_and_trains_later() -> None:
    rotary, q = aule.nn.RotaryEmbedding(8, max_positions=2), torch.randn(1, 1, 5, 8, requires_grad=True)
    with torch.inference_mode():
        right = rotary(q)
    found = rotary(q)
    found.sum().backward()
    assert torch.equal(found, right) and q.grad is not None


def test_tables_of_converted_rotary_embeddings() -> None:
    """In float64 they have its digits, also behind 16 bits, which they do not have; a module without memory gets it
    filled."""
    q, angles = (
        torch.randn(1, 2, 9, 8).double(),
        torch.arange(9.0).double()[:, None] * 10000.0 ** -torch.arange(0, 1, 0.25).double(),
    )
    right = aule.rope(q, angles.cos(), angles.sin())
    rotary = aule.nn.RotaryEmbedding(8, max_positions=9)
    table = rotary.cos
    assert torch.equal(rotary.bfloat16().cos, table)
    torch.testing.assert_close(rotary.double()(q), right, rtol=1e-13, atol=1e-13)
    assert torch.equal(rotary.half().cos, table)
    empty = aule.nn.RotaryEmbedding(8, max_positions=9, device="meta").to_empty(device="cpu")
    assert torch.equal(empty.cos, table)
    empty.sin.zero_()
    empty.reset_parameters()
    assert torch.equal(empty.sin, rotary.sin)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_refuse_what_pytorchs_refuse(kind: str) -> None:
    norm = getattr(aule.nn, kind)((4, 6))
    for shape in ((2, 6, 4), (24,), (2, 24), (2, 4, 7)):
        with pytest.raises(aule.InvalidShapeError, match=r"expected x of \[\.\.\., 4, 6\], got"):
            norm(torch.ones(shape))
    for wrong in (np.ones((2, 4, 6), np.float32), None, torch.ones(2, 4, 6, dtype=torch.int32)):
        with pytest.raises(aule.InvalidDtypeError, match="expected x"):
            norm(wrong)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dim": 7}, "an even dim"), ({"dim": 0}, "an even dim"), ({"dim": 8.0}, "dim to be an int"),
        ({"max_positions": -1}, "max_positions from 0"), ({"base": -5.0}, "finite base > 0, got -5"),
        ({"base": float("nan")}, "finite base"), ({"base": "x"}, "base to be a number"),
    ],
)  # fmt: skip
def test_a_rotary_embedding_of_nothing(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(aule.InvalidArgumentError, match=rf"\[nn.RotaryEmbedding\] expected .*{words}"):
        aule.nn.RotaryEmbedding(**{"dim": 8, **arguments})


def test_what_is_replaced_is_said_by_bools() -> None:
    with pytest.raises(aule.InvalidArgumentError, match="rope to be True or False"):
        aule.patch_model(torch.nn.Linear(2, 2), rope="no")
