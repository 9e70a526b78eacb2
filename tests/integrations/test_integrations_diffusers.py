"""Small random models of diffusers with aule's attention against their own."""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers", minversion="0.42")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

import diffusers  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from diffusers.models import attention_processor as processors  # noqa: E402

from aule.integrations import diffusers as integration  # noqa: E402

REGISTRY = dispatch._AttentionBackendRegistry


@pytest.fixture
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.unregister()  # another test of this process may have left it, and its counts
    aule.reset_dispatch_stats()
    torch.manual_seed(0)
    # Whatever a test sets a model to becomes the default of all; afterwards it is what it was.
    monkeypatch.setattr(REGISTRY, "_active_backend", REGISTRY._active_backend)


def served(number: int) -> None:
    assert aule.dispatch_stats().items() >= {"served": number, "passed_on": 0, "reasons": {}, "ops": {}}.items()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def noisy(model: Any) -> Any:
    """Weights that matter: some layers start as zero, or as the identity."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def agree(ours: Any, theirs: Any, inputs: dict[str, Any], calls: int) -> None:
    """The outputs, and the gradients of all parameters and of the inputs. ``calls`` of attention, all ours."""
    results = []
    for model in (ours, theirs):
        leaves = {k: x.detach().clone().requires_grad_() for k, x in inputs.items() if _real(x)}
        model.zero_grad()
        out = model(**{**inputs, **leaves})
        out = out if isinstance(out, torch.Tensor) else out[0]
        out.square().mean().backward()
        grads = {n: p.grad for n, p in model.named_parameters()} | {n: x.grad for n, x in leaves.items()}
        results.append((out.detach(), {n: g for n, g in grads.items() if g is not None}))
    served(calls)
    (found, grads), (expected, right) = results
    assert found.abs().max() > 1e-3
    close(found, expected)
    assert grads.keys() == right.keys() and {n for n, x in inputs.items() if _real(x)} <= grads.keys()
    largest = max(g.abs().max().item() for g in right.values())
    for name, grad in grads.items():
        # The gradient of the keys' bias is zero but for rounding, which is that of the other gradients.
        allowed = 2e-4 * right[name].abs().max().item() + 1e-6 * largest
        assert (grad - right[name]).abs().max().item() <= allowed, name


def _real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 1 and x.requires_grad


# -- the dispatcher: Flux ----------------------------------------------------------------------------------------------


def flux(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return noisy(
        diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
        )
    )  # fmt: skip


def flux_inputs(mask: Any = None) -> dict[str, Any]:
    inputs = {
        "hidden_states": torch.randn(2, 16, 4, requires_grad=True),
        "encoder_hidden_states": torch.randn(2, 7, 32, requires_grad=True),
        "pooled_projections": torch.randn(2, 32, requires_grad=True),
        "timestep": torch.tensor([1.0, 0.5]),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(7, 3),
    }
    return inputs if mask is None else {**inputs, "joint_attention_kwargs": {"attention_mask": mask}}


PADDING = torch.ones(2, 23, dtype=torch.bool)
PADDING[1, 4:7] = False
MASKS = {
    "none": None,
    "keys": PADDING,
    "four axes": PADDING[:, None, None].expand(2, 1, 23, 23),
    "two axes": torch.ones(23, 23, dtype=torch.bool).tril(3),
    "added": torch.randn(2, 2, 23, 23, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("mask", MASKS)
def test_flux(mask: str, registered: None) -> None:
    theirs = flux()
    ours = copy.deepcopy(theirs)
    theirs.set_attention_backend("native")
    ours.set_attention_backend("aule")
    agree(ours, theirs, flux_inputs(MASKS[mask]), calls=2)


def test_flux_mask_matters(registered: None) -> None:
    model = flux()
    model.set_attention_backend("aule")
    with torch.no_grad():
        inputs = flux_inputs()
        plain, masked = model(**inputs)[0], model(**inputs, joint_attention_kwargs={"attention_mask": PADDING})[0]
        other = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"].clone()}
        other["encoder_hidden_states"][1, 4:] += 1.0
        again = model(**other, joint_attention_kwargs={"attention_mask": PADDING})[0]
    assert not torch.allclose(plain[1], masked[1], atol=1e-3)
    close(again, masked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flux_in_half_precision(dtype: Any, registered: None) -> None:
    model = flux().to(dtype)
    inputs = {k: x.to(dtype) if x.requires_grad else x for k, x in flux_inputs().items()}
    results = []
    for backend in ("aule", "_native_math"):
        model.set_attention_backend(backend)
        with torch.inference_mode():
            results.append(model(**inputs)[0])
    served(2)
    found, expected = results
    assert found.dtype == dtype
    assert (found.float() - expected.float()).abs().max() <= 0.05 * expected.float().abs().max()


def test_context_manager(registered: None) -> None:
    model, inputs = flux(), flux_inputs()
    with torch.no_grad():
        expected = model(**inputs)[0]
        served(0)
        with diffusers.attention_backend("aule"):
            close(model(**inputs)[0], expected)
    served(2)
    assert REGISTRY._active_backend == dispatch.AttentionBackendName.NATIVE


def qkv(*shape: int) -> Any:
    return torch.randn(3, *(shape or (2, 9, 4, 8))).unbind()


def test_options_reach_aule(registered: None) -> None:
    """Causal, scale and grouped heads, through the dispatcher."""
    q, (k, v) = qkv()[0], torch.randn(2, 2, 9, 2, 8).unbind()
    for options in ({"is_causal": True}, {"scale": 0.7}, {"is_causal": True, "scale": 0.2}):
        found, expected = (
            dispatch.dispatch_attention_fn(q, k, v, enable_gqa=True, backend=backend, **options)
            for backend in ("aule", "_native_math")
        )
        close(found, expected)
    served(3)


# -- what is not served ------------------------------------------------------------------------------------------------


def test_passed_on(registered: None) -> None:
    q, k, v = qkv(1, 5, 2, 640)
    found = dispatch.dispatch_attention_fn(q, k, v, backend="aule")
    assert torch.equal(found, dispatch.dispatch_attention_fn(q, k, v, backend="native"))
    assert dispatch.dispatch_attention_fn(*qkv(), dropout_p=0.5, backend="aule").shape == (2, 9, 4, 8)
    assert (
        aule.dispatch_stats().items()
        >= {"served": 1, "passed_on": 1, "reasons": {"head_dim above 576": 1}, "ops": {}}.items()
    )


def test_context_parallelism_of_uneven_shards_goes_to_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    native = dispatch.AttentionBackendName.NATIVE
    monkeypatch.setitem(REGISTRY._backends, native, lambda *tensors, **options: seen.update(options))
    integration.register()
    try:
        config = SimpleNamespace(context_parallel_config=SimpleNamespace(ulysses_anything=True, ring_anything=False))
        dispatch.dispatch_attention_fn(*qkv(), backend="aule", parallel_config=config)
        assert seen == {"_parallel_config": config}
        assert aule.dispatch_stats()["reasons"] == {"context parallelism": 1}
    finally:
        integration.unregister()


def test_refusals(registered: None) -> None:
    with pytest.raises(aule.AuleError, match=r"^\[diffusers\] expected return_lse=False, got True; call"):
        dispatch.dispatch_attention_fn(*qkv(), backend="aule", attention_kwargs={"return_lse": True})
    for taken in ("native", "flash"):
        with pytest.raises(aule.InvalidArgumentError, match="not taken by a backend of diffusers"):
            integration.register(taken)
    with pytest.raises(aule.InvalidArgumentError, match="in lower case, got 'Aule'"):
        integration.register("Aule")
    for make in (lambda: integration.register(backend="abacus"), lambda: integration.AuleAttnProcessor("abacus")):
        with pytest.raises(aule.BackendUnavailableError, match="abacus"):
            make()
    assert dispatch.dispatch_attention_fn(*qkv(), backend="aule").shape == (2, 9, 4, 8)


def test_a_compiled_model(registered: None) -> None:
    """Compiled graphs hold PyTorch's attention; they are whole, and right."""
    model, inputs = flux(), flux_inputs()
    model.set_attention_backend("aule")
    with torch.no_grad():
        expected = model(**inputs)[0]
        served(2)
        close(torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)[0], expected)
    served(2)


# -- registering, and back ---------------------------------------------------------------------------------------------


def state() -> list[Any]:
    names = dispatch.AttentionBackendName
    tables = (REGISTRY._backends, REGISTRY._constraints, REGISTRY._supported_arg_names)
    return [
        *(dict(table) for table in tables),
        set(REGISTRY._supports_context_parallel),
        REGISTRY._active_backend,
        list(names),
        dict(names.__members__),
        dict(names._value2member_map_),
        list(getattr(names, "_hashable_values_", [])),
        set(vars(names)),
    ]


def test_unregister_puts_everything_back() -> None:
    before = state()
    integration.register()
    model = flux()
    model.set_attention_backend("aule")
    assert REGISTRY._active_backend.value == "aule"
    model.reset_attention_backend()
    integration.unregister()
    assert state() == before and "AULE" not in vars(dispatch.AttentionBackendName)
    with torch.no_grad():
        model(**flux_inputs())
    served(0)
    with pytest.raises(ValueError, match="must be one of the following"):
        model.set_attention_backend("aule")
    integration.unregister()
    assert state() == before


def test_unregister_leaves_another_active_backend(registered: None) -> None:
    math = dispatch.AttentionBackendName._NATIVE_MATH
    with diffusers.attention_backend("_native_math"):
        integration.unregister()
        assert REGISTRY._active_backend == math


def test_the_new_member(registered: None) -> None:
    names = dispatch.AttentionBackendName
    member = names("aule")
    assert member is names["AULE"] is names.AULE and isinstance(member, names) and isinstance(member, enum.Enum)
    assert (member.name, member.value, str.__str__(member)) == ("AULE", "aule", "aule")
    assert list(names)[-1] is member and member in names and len(names) == len(set(names))
    assert copy.deepcopy(member) is member and "aule" in repr(member)
    if sys.version_info >= (3, 12):  # before, only members may be asked for
        assert "aule" in names and "abacus" not in names
    before = state()
    integration.register()
    assert [type(part) for part in before] == [type(part) for part in state()] and state()[5:] == before[5:]


def test_a_name_and_a_backend_of_ones_own() -> None:
    integration.register("aule_numpy", backend="numpy")
    try:
        q, k, v = qkv()
        close(
            dispatch.dispatch_attention_fn(q, k, v, backend="aule_numpy"),
            dispatch.dispatch_attention_fn(q, k, v, backend="_native_math"),
        )
        served(1)
    finally:
        integration.unregister("aule_numpy")


# -- UNets and VAEs ----------------------------------------------------------------------------------------------------


def unet(**options: Any) -> Any:
    given: dict[str, Any] = {
        "sample_size": 8,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 2,
        "cross_attention_dim": 12,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return noisy(diffusers.UNet2DConditionModel(**{**given, **options}))


def unet_inputs(**more: Any) -> dict[str, Any]:
    return {
        "sample": torch.randn(2, 4, 8, 8, requires_grad=True),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 6, 12, requires_grad=True),
        **more,
    }


def with_processors(model: Any, reference: Any) -> tuple[Any, Any]:
    theirs = copy.deepcopy(model)
    model.set_attn_processor(integration.AuleAttnProcessor())
    theirs.set_attn_processor(reference)
    return model, theirs


TEXT = torch.ones(2, 6, dtype=torch.bool)
TEXT[0, 4:] = False


@pytest.mark.parametrize(("reference", "masks"), [("2_0", {}), ("", {"encoder_attention_mask": TEXT})])
def test_unet(reference: str, masks: dict[str, Any]) -> None:
    models = with_processors(unet(), getattr(processors, f"AttnProcessor{reference}")())
    agree(*models, unet_inputs(**masks), calls=8)  # four blocks with attention to itself and to the text


def test_unet_encoder_mask_hides_the_text() -> None:
    model = unet()
    model.set_attn_processor(integration.AuleAttnProcessor())
    inputs = unet_inputs(encoder_attention_mask=TEXT)
    with torch.inference_mode():
        first = model(**inputs)[0]
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].clone()
        inputs["encoder_hidden_states"][0, 4:] += 1.0
        close(model(**inputs)[0], first)
        inputs["encoder_hidden_states"][0, :4] += 1.0
        assert not torch.allclose(model(**inputs)[0], first, atol=1e-3)


@pytest.mark.parametrize("only_cross", [False, True])
def test_unet_with_added_projections(only_cross: bool) -> None:
    model = unet(
        down_block_types=("SimpleCrossAttnDownBlock2D", "DownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("UpBlock2D", "SimpleCrossAttnUpBlock2D"),
        attention_head_dim=4,
        only_cross_attention=only_cross,
    )
    models = with_processors(model, processors.AttnAddedKVProcessor())
    agree(*models, unet_inputs(), calls=4)
    if not only_cross:  # where diffusers makes the mask longer than the text, its own processors fail as well
        aule.reset_dispatch_stats()
        agree(*models, unet_inputs(encoder_attention_mask=TEXT), calls=4)


def test_vae() -> None:
    """An image in, a residual connection, and one head as wide as the image has channels."""
    vae = noisy(
        diffusers.AutoencoderKL(
            block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )
    )  # fmt: skip
    ours, theirs = with_processors(vae, processors.AttnProcessor())
    agree(ours, theirs, {"sample": torch.randn(2, 3, 8, 8, requires_grad=True)}, calls=2)


def test_unet_restored() -> None:
    model, inputs = unet(), unet_inputs()
    before = model.attn_processors
    with torch.no_grad():
        expected = model(**inputs)[0]
        model.set_attn_processor(integration.AuleAttnProcessor())
        close(model(**inputs)[0], expected)
        served(8)
        model.set_attn_processor(dict(before))
        assert model.attn_processors == before
        assert torch.equal(model(**inputs)[0], expected)
    served(8)


ADDED = {"added_kv_proj_dim": 12, "norm_num_groups": 4}
TEXT_NORM = {"cross_attention_norm": "group_norm", "cross_attention_norm_num_groups": 3}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_q and norm_k": {"qk_norm": "layer_norm"},
    "rms norm": {"qk_norm": "rms_norm"},
    "group norm": {"norm_num_groups": 4},
    "spatial norm": {"spatial_norm_dim": 4, "residual_connection": True, "norm_num_groups": 4},
    "residual and rescale": {"residual_connection": True, "rescale_output_factor": 1.7},
    "cross": {"cross_attention_dim": 12},
    "cross, layer norm": {"cross_attention_dim": 12, "cross_attention_norm": "layer_norm"},
    "cross, group norm": {"cross_attention_dim": 12, **TEXT_NORM},
    "another width": {"out_dim": 64},
    "unscaled scores": {"scale_qk": False},
    "added": ADDED,
    "added, normed": {**ADDED, **TEXT_NORM},
    "added alone": {**ADDED, **TEXT_NORM, "only_cross_attention": True},
}


def layer_inputs(options: dict[str, Any], shape: str) -> dict[str, Any]:
    sizes = (2, 32, 3, 4) if shape == "image" else (2, 12, 32)
    inputs = {"hidden_states": torch.randn(*sizes, requires_grad=True)}
    if "spatial_norm_dim" in options:
        inputs["temb"] = torch.randn(2, 4, 3, 4, requires_grad=True)
    if "cross_attention_dim" in options or "added_kv_proj_dim" in options:
        inputs["encoder_hidden_states"] = torch.randn(2, 7, 12, requires_grad=True)
    return inputs


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name in LAYERS
        for shape in ("sequence", "image")
        if not (shape == "sequence" and (name == "spatial norm" or "added" in name))  # these are for images
        and not (shape == "image" and name == "another width")  # an image keeps its channels
    ],
)
def test_layer(name: str, shape: str) -> None:
    options = LAYERS[name]
    theirs = noisy(processors.Attention(32, heads=2, dim_head=16, bias=True, **options))
    ours = copy.deepcopy(theirs)
    kind = processors.AttnAddedKVProcessor if "added" in name else processors.AttnProcessor
    if "qk_norm" in options:  # which the eager processor leaves out
        kind = processors.AttnProcessor2_0
    theirs.set_processor(kind())
    ours.set_processor(integration.AuleAttnProcessor())
    inputs = layer_inputs(options, shape)
    agree(ours, theirs, inputs, calls=1)
    if name == "added alone":  # diffusers makes the mask longer than the text: its own processors fail as well
        return
    aule.reset_dispatch_stats()
    keys = 7 if "encoder_hidden_states" in inputs else 12
    inputs["attention_mask"] = torch.where(torch.rand(2, 1, keys) < 0.3, -1e4, 0.0)
    agree(ours, theirs, inputs, calls=1)


def test_a_wide_head_is_passed_on() -> None:
    layer = processors.Attention(640, heads=1, dim_head=640)
    x = torch.randn(1, 5, 640)
    expected = layer(x)
    layer.set_processor(integration.AuleAttnProcessor())
    assert torch.equal(layer(x), expected)
    assert aule.dispatch_stats()["reasons"] == {"head_dim above 576": 1}


def test_layers_of_other_models_are_refused() -> None:
    model = flux()
    with pytest.raises(aule.AuleError, match=r"^\[diffusers\] expected .* got FluxAttention .*set_attention_backend"):
        model.set_attn_processor(integration.AuleAttnProcessor())
    model(**flux_inputs())  # unchanged
    joint = processors.Attention(16, heads=2, dim_head=8, added_kv_proj_dim=16, context_pre_only=False)
    joint.set_processor(integration.AuleAttnProcessor())
    with pytest.raises(aule.AuleError, match="of a UNet or a VAE"):
        joint(torch.randn(1, 5, 16), encoder_hidden_states=torch.randn(1, 3, 16))


def sana() -> Any:
    return diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=16,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32,
        sample_size=8, patch_size=1,
    )  # fmt: skip


def cogvideox() -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=8, num_layers=1, sample_width=8, sample_height=8, sample_frames=5, max_text_seq_length=7,
    )  # fmt: skip


@pytest.mark.parametrize("make", [sana, cogvideox])
def test_processors_of_another_kind_are_not_replaced(make: Any) -> None:
    """Sana's linear attention became softmax attention, and CogVideoX failed to unpack the result."""
    model = make()
    before = {name: type(processor) for name, processor in model.attn_processors.items()}
    with pytest.raises(aule.AuleError, match=r"with an AttnProcessor2_0, got Attention with (Sana|CogVideoX).*install"):
        model.set_attn_processor(integration.AuleAttnProcessor())
    assert {name: type(processor) for name, processor in model.attn_processors.items()} == before


def test_a_processor_that_was_not_set_by_the_model_is_refused() -> None:
    layer = processors.Attention(32, heads=2, dim_head=16)
    layer.processor = integration.AuleAttnProcessor()
    with pytest.raises(aule.AuleError, match="not set by set_attn_processor"):
        layer(torch.randn(1, 5, 32))


def test_the_older_processor_leaves_out_norms() -> None:
    layer = processors.Attention(32, heads=2, dim_head=16, qk_norm="rms_norm")
    layer.set_processor(processors.AttnProcessor())
    with pytest.raises(aule.AuleError, match="got Attention with AttnProcessor"):
        layer.set_processor(integration.AuleAttnProcessor())


@pytest.mark.parametrize(
    ("make", "remedy"),
    [(sana, "aule.install"), (cogvideox, "aule.install"), (lambda: unet(), "set_attn_processor")],
)
def test_a_backend_that_reaches_no_layer_says_so(make: Any, remedy: str, registered: None) -> None:
    model = make()
    with pytest.warns(UserWarning, match=rf"got {type(model).__name__} with (\d+) of \1 that do not.*{remedy}"):
        model.set_attention_backend("aule")


def test_a_backend_that_reaches_all_layers_says_nothing(registered: None, recwarn: pytest.WarningsRecorder) -> None:
    flux().set_attention_backend("aule")
    unet().set_attention_backend("native")
    assert not [warning for warning in recwarn if "[diffusers]" in str(warning.message)]
