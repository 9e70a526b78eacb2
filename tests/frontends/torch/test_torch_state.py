"""PyTorch's global state, flipped between two otherwise equal calls: a call that is remembered changes nothing.

Each way to call is made twice, so that it is remembered, then in another state, then as before. All outcomes must be
those of calls that remember nothing. Repeated calls of CUDA tensors run here on CPU tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="these run on the CPU engine")

from torch.autograd import forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from aule.frontends.torch import repeated  # noqa: E402
from aule.integrations import flash_attn  # noqa: E402

Tensors = dict[str, Any]
Way = Callable[[Tensors], Any]

# -- ways to call ------------------------------------------------------------------------------------------------------


def made(dtype: Any = torch.float32, needs_grad: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 2, 4, 16), "k": (2, 2, 8, 16), "v": (2, 2, 8, 16), "x": (6, 64), "weight": (64,), "bias": (64,)}
    shapes |= {"token": (2, 2, 16), "rows": (8, 2, 16), "new": (2, 1, 2, 16)}
    shapes |= {"k_cache": (2, 8, 2, 16), "v_cache": (2, 8, 2, 16)}
    found = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    if needs_grad:
        found = {name: x.requires_grad_() for name, x in found.items()}
    found["lens"] = torch.tensor([3, 7], dtype=torch.int32)
    found["offsets"] = torch.tensor([0, 3, 8], dtype=torch.int32)
    found["table"] = torch.tensor([[0], [1]], dtype=torch.int32)
    found["target"] = torch.arange(6)
    return found


def gradients(x: Any, inputs: list[Any]) -> Any:
    """Results, and their gradients where there are any."""
    x = x if isinstance(x, tuple) else (x,)
    if not x[0].requires_grad:
        return x
    return *x, *torch.autograd.grad(x[0], inputs, torch.ones_like(x[0]))


def attention(at: Tensors) -> Any:
    inputs = [at[name] for name in "qkv"]
    return gradients(aule.flash_attention(*inputs), inputs)


def attention_with_lse(at: Tensors) -> Any:
    inputs = [at[name] for name in "qkv"]
    return gradients(aule.flash_attention(*inputs, return_lse=True, sinks=at["weight"][:2].detach()), inputs)


def packed(at: Tensors) -> Any:
    inputs = [at["rows"]] * 3
    return gradients(aule.flash_attention_varlen(*inputs, at["offsets"], at["offsets"]), inputs[:1])


def decode(at: Tensors) -> Any:
    return aule.decode_attention(at["token"], at["k"], at["v"], context_lens=at["lens"])


def paged(at: Tensors) -> Any:
    return aule.flash_attention_paged(at["token"], at["k_cache"], at["v_cache"], at["table"], at["lens"])


def layer_norm(at: Tensors) -> Any:
    inputs = [at["x"], at["weight"], at["bias"]]
    return gradients(aule.layer_norm(*inputs), inputs)


def cross_entropy(at: Tensors) -> Any:
    return gradients(aule.cross_entropy(at["x"], at["target"]), [at["x"]])


def kv_cache(at: Tensors) -> Any:
    """Writes the same token to the same place every time."""
    return flash_attn.flash_attn_with_kvcache(
        at["new"], at["k_cache"], at["v_cache"], at["new"], at["new"], cache_seqlens=at["lens"], causal=True
    )


WAYS: tuple[Way, ...] = (attention, attention_with_lse, packed, decode, paged, layer_norm, cross_entropy, kv_cache)
NOT_REPEATED = (packed,)
"""Ways that are never repeated, but have signatures."""
WITHOUT_GRADIENTS = (decode, paged, kv_cache)


# -- states ------------------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):  # type: ignore[misc]
    """Notes aule's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aule":
            self.ops.append(func.name())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def within(context: Callable[[], Any]) -> Callable[[Way, Tensors], Any]:
    def run(way: Way, at: Tensors) -> Any:
        with context():
            return outcome(way, at)

    return run


def plain(way: Way, at: Tensors) -> Any:
    return outcome(way, at)


def in_dispatch_mode(way: Way, at: Tensors) -> Any:
    with Seen() as seen:
        return outcome(way, at), seen.ops


def with_hooks(way: Way, at: Tensors) -> Any:
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        return outcome(way, at), saved


def transformed(transform: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Callable[[Way, Tensors], Any]:
    """Inside a transform of something else, with plain tensors from outside."""

    def run(way: Way, at: Tensors) -> Any:
        found: list[Any] = []

        def body(x: Any) -> Any:
            found.append(outcome(way, at))
            return x.sum()

        transform(body)(torch.ones(3))
        return found

    return run


def traced(way: Way, at: Tensors) -> Any:
    """The tracer calls the function with tensors of its own, and must see the operation or an error."""
    names = [name for name, x in at.items() if x.is_floating_point()]
    others = {name: x for name, x in at.items() if name not in names}

    def function(*tensors: Any) -> Any:
        return way(dict(zip(names, tensors, strict=True)) | others)

    try:
        graph = torch.jit.trace(function, tuple(at[name] for name in names), check_trace=False)
    except Exception as error:
        return type(error).__name__
    return outcome(lambda given: graph(*(2 * given[name] for name in names)), at)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


STATES: dict[str, Callable[[Way, Tensors], Any]] = {
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "deterministic": within(deterministic),
    "autocast to bfloat16": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast to float16": within(lambda: torch.autocast("cpu", torch.float16)),
    "autocast of cuda": within(lambda: torch.autocast("cuda", torch.bfloat16)),
    "default device": within(lambda: torch.device("meta")),
    "default dtype": within(default_dtype),
    "vmap": transformed(torch.func.vmap),
    "func.grad": transformed(torch.func.grad),
    "func.jvp": transformed(lambda f: lambda x: torch.func.jvp(f, (x,), (x,))),
    "functionalize": transformed(torch.func.functionalize),
    "forward AD": within(forward_ad.dual_level),
    "function mode": within(Functions),
    "dispatch mode": in_dispatch_mode,
    "fake tensors": within(lambda: torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)),
    "jit.trace": traced,
    "saved tensor hooks": with_hooks,
    "anomaly mode": within(lambda: torch.autograd.detect_anomaly(check_nan=True)),
    "AULE_BACKEND": within(lambda: environment("AULE_BACKEND", "numpy")),
    "AULE_CHECK_INDICES": within(lambda: environment("AULE_CHECK_INDICES", "1")),
}


def outcome(way: Way, at: Tensors) -> Any:
    """All that a caller can see of a call."""
    try:
        found = way(at)
    except Exception as error:
        return type(error).__name__, str(error)
    found = found if isinstance(found, tuple) else (found,)
    return [
        (
            type(x).__name__, tuple(x.shape), x.stride(), str(x.dtype), str(x.device), x.requires_grad,
            type(x.grad_fn).__name__, x.is_inference(), values(x),
        )
        for x in found
    ]  # fmt: skip


def values(x: Any) -> Any:
    if type(x) is not torch.Tensor or x.is_meta:
        return None
    x = x.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.double().tolist()


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["host", "cuda"])
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each call that was like a remembered one at first sight, whether it was repeated."""
    taken: list[bool] = []
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    kinds = [repeated.OnHost]
    if request.param == "cuda":
        kinds = [repeated.OnCuda, repeated.PlainOnCuda]
        monkeypatch.setattr(repeated, "_empty_cuda", torch._C._dynamo.guards._empty_strided_cpu)
        monkeypatch.setattr(repeated, "_raw_stream", lambda index: None)
        monkeypatch.setattr(repeated, "_current_device", lambda: -1)  # what a CPU tensor says
        monkeypatch.setattr(repeated, "OnHost", repeated.OnCuda)
    for kind in kinds:
        monkeypatch.setattr(kind, "__call__", counted(kind.__call__, taken))
    repeated.forget()
    yield taken
    repeated.forget()


def counted(call: Any, taken: list[bool]) -> Any:
    def again(self: Any, tensors: Any) -> Any:
        found = call(self, tensors)
        taken.append(found is not None)
        return found

    return again


def check(first: Any, second: Any, way: Way, at: Tensors, quick: list[bool]) -> None:
    """Calls in the first state are remembered; then come one in the second and one more in the first."""
    wanted = []
    for state in (first, second):
        repeated.forget()
        wanted.append(state(way, at))
    repeated.forget()
    for _ in range(2):
        assert first(way, at) == wanted[0]
    assert second(way, at) == wanted[1]
    quick.clear()
    assert first(way, at) == wanted[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", STATES)
def test_a_flip_of_state_is_seen(state: str, way: Way, quick: list[bool]) -> None:
    at = made(needs_grad=way not in WITHOUT_GRADIENTS)
    check(plain, STATES[state], way, at, quick)
    assert any(quick) or way in NOT_REPEATED  # as before the flip
    check(STATES[state], plain, way, at, quick)


@pytest.mark.parametrize("way", WAYS)
def test_another_dtype_of_autocast_is_seen(way: Way, quick: list[bool]) -> None:
    wide, narrow = STATES["autocast to bfloat16"], STATES["autocast to float16"]
    for dtype in (torch.float32, torch.bfloat16):
        check(wide, narrow, way, made(dtype), quick)
        check(narrow, wide, way, made(dtype), quick)


def test_autocast_decides_the_dtype(quick: list[bool]) -> None:
    at = made(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            assert attention(at)[0].dtype is dtype


@pytest.mark.parametrize("way", WAYS)
def test_tensors_made_in_inference_mode(way: Way, quick: list[bool]) -> None:
    usual = made()
    with torch.inference_mode():
        others = made()
    for inside in (plain, STATES["inference_mode"]):
        repeated.forget()
        wanted = [inside(way, at) for at in (usual, others)]
        for _ in range(2):
            assert [inside(way, at) for at in (usual, others)] == wanted


@pytest.mark.parametrize("way", [way for way in WAYS if way not in WITHOUT_GRADIENTS])
def test_leaves_that_were_used_without_gradients_have_them_later(way: Way, quick: list[bool]) -> None:
    at = made(needs_grad=True)
    for _ in range(3):
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                assert way(at)[0].grad_fn is None
    out, *grads = way(at)
    assert out.grad_fn is not None and grads
