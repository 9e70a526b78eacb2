"""`aule.install` puts aule in the place of PyTorch's ``flex_attention``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="training needs the CPU engine")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import aule  # noqa: E402

THEIRS = flex.flex_attention


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch would rather be compiled
        aule.reset_dispatch_stats()
        yield
    aule.uninstall()


def tensors() -> tuple[Any, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, 2, 100, 32) for _ in range(3))


def test_eager_calls_are_served_and_the_function_comes_back() -> None:
    q, k, v = tensors()
    mask = flex.create_block_mask(causal, None, None, 100, 100, device="cpu")
    expected = THEIRS(q, k, v, block_mask=mask)
    with aule.installed():
        assert flex.flex_attention is not THEIRS
        torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=mask), expected)
    assert flex.flex_attention is THEIRS
    stats = aule.dispatch_stats()
    assert (stats["served"], stats["passed_on"]) == (1, 0)
    assert [(row["op"], row["caller"]) for row in stats["calls"]] == [("flex_attention", "install")]


def test_it_trains_where_pytorch_does_not() -> None:
    q, k, v = tensors()
    q.requires_grad_()
    aule.install()
    out, aux = flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True))
    assert isinstance(aux, flex.AuxOutput) and aux.lse.shape == (1, 2, 100) and aux.max_scores is None
    (out.sum() + aux.lse.sum()).backward()
    _, aux = flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(max_scores=True))
    expected = (q @ k.transpose(2, 3) * 32**-0.5).amax(-1)
    torch.testing.assert_close(aux.max_scores, expected.detach())
    assert q.grad is not None and {row["caller"] for row in aule.dispatch_stats()["calls"]} == {"install"}


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_the_function_itself_calls_aule(fullgraph: bool) -> None:
    q, k, v = tensors()
    expected = THEIRS(q, k, v)
    aule.install()
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, backend="eager", fullgraph=fullgraph)
    torch.testing.assert_close(compiled(q, k, v), expected)
    assert aule.dispatch_stats()["served"] == 1


def test_what_cannot_be_served_is_passed_on() -> None:
    q, k, v = tensors()

    def summed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.lgamma(score.abs() + 1)  # not among the operations that can be traced

    expected = THEIRS(q, k, v, summed)
    aule.install()
    torch.testing.assert_close(flex.flex_attention(q, k, v, summed), expected)
    assert aule.dispatch_stats()["reasons"] == {"AULE_ERROR_INVALID_ARGUMENT": 1}
    with pytest.raises(ValueError, match="enable_gqa"):  # PyTorch's own message
        flex.flex_attention(q, k[:, :1], v[:, :1])


def test_transformers_flex_attention_is_served() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flex_attention")
    model.load_state_dict(eager.state_dict())
    ids = torch.randint(0, 50, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with aule.installed():
        found = model(ids, attention_mask=mask).logits
        found.sum().backward()
    expected = eager(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-4)
    assert aule.dispatch_stats()["served"] == 1
