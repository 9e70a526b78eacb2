"""The CUDA path of decoding, with CPU tensors in place of CUDA's and the interpreter as the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_torch_varlen_cuda import Interpreted, in_place_of_cuda

import aule

torch = pytest.importorskip("torch")

from aule.engine.signatures import Signatures  # noqa: E402
from aule.frontends.torch.devices import base as torch_devices  # noqa: E402
from aule.frontends.torch.devices import scratch as torch_scratch  # noqa: E402


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    return in_place_of_cuda(monkeypatch)


def normal(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def test_a_repeated_call_is_planned_once(device: Interpreted) -> None:
    q, k, v = normal(2, 4, 1, 32), normal(2, 2, 40, 32), normal(2, 2, 40, 32)
    for lens in (integers(40, 7), integers(0, 33)):  # read by the kernel: other lengths are no other signature
        out, lse = aule.decode_attention(q, k, v, context_lens=lens, return_lse=True)
        wanted = aule.decode_attention(q, k, v, context_lens=lens, return_lse=True, backend="numpy")
        torch.testing.assert_close((out, lse), wanted, rtol=1e-4, atol=1e-5)
    assert device.prepared == 1
    target = torch.empty_like(q)
    assert aule.decode_attention(q, k, v, out=target) is target
    torch.testing.assert_close(target, aule.decode_attention(q, k, v, backend="numpy"), rtol=1e-4, atol=1e-5)


def test_parts_of_a_sequence_are_added_up(device: Interpreted) -> None:
    q, k, v = normal(1, 2, 16), normal(1, 1, 1400, 16), normal(1, 1, 1400, 16)
    wanted = aule.decode_attention(q, k, v, sinks=normal(2), window=900, backend="numpy")
    for _ in range(2):  # what counts the parts is left as it was found
        out = aule.decode_attention(q, k, v, sinks=normal(2), window=900)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert device.prepared == 1
    device.target = replace(device.target, device_fence=False)
    torch_devices.signatures.clear()
    out = aule.decode_attention(q, k, v, sinks=normal(2), window=900)
    assert device.prepared == 3
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_streams_and_captures_count_apart(device: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may run at the same time draws its tickets elsewhere; what runs in turn, from the same words."""
    captures = {0: 0, 1: 0, 2: 0}
    monkeypatch.setattr(device, "capture", captures.__getitem__, raising=False)
    monkeypatch.setattr(torch_scratch, "_pieces", Signatures())
    home = torch.device("cpu")
    source = torch_scratch.StreamMemory(device, home)

    def address(stream: int, capture: int = 0, words: int = 8) -> int:
        captures[stream] = capture
        (at,), _ = source.acquire([], [words], stream)
        return at

    apart = [(0, 0), (1, 0), (2, 0), (1, 5), (2, 5), (1, 6)]
    found = [address(*key) for key in apart]
    assert len(set(found)) == len(apart)
    assert found == [address(*key) for key in apart]
    large = address(1, 0, 5000)
    assert large != found[1] and large == address(1)
    assert not torch_scratch._pieces.get((home.index, 1, 0)).any()


def test_packed_queries_on_quantised_pages(device: Interpreted) -> None:
    pool = normal(7, 4, 2, 16)
    scale = pool.abs().amax(-1) / 127
    cache = (pool / scale[..., None]).round().to(torch.int8)
    tables, lens, at = integers([3, 1, 0], [6, 2, 0], [5, 5, 5]), integers(11, 8, 0), integers(0, 3, 4, 4)
    options = {"cu_seqlens_q": at, "k_scale": scale, "v_scale": scale, "alibi_slopes": normal(4).abs()}
    out, lse = aule.flash_attention_paged(normal(5, 4, 16), cache, cache, tables, lens, **options, return_lse=True)
    assert not out[4:].any() and lse.shape == (4, 5)  # a row of no sequence
    options["cu_seqlens_q"] = integers(0, 3, 4, 5)
    wanted = aule.flash_attention_paged(
        normal(5, 4, 16), cache, cache, tables, lens, **options, return_lse=True, backend="numpy"
    )
    torch.testing.assert_close((out[:4], lse[:, :4]), (wanted[0][:4], wanted[1][:, :4]), rtol=1e-4, atol=1e-5)


def test_what_is_refused_is_so_behind_a_call_that_is_not(device: Interpreted) -> None:
    q, k, v = normal(2, 4, 1, 32), normal(2, 2, 40, 32), normal(2, 2, 40, 32)
    aule.decode_attention(q, k, v)
    with pytest.raises(aule.InvalidDtypeError, match="resolve_neg"):
        aule.decode_attention(torch._neg_view(q), k, v)
    pages, tables, lens = normal(3, 16, 2, 32), integers([0, 1], [2, 0]), integers(20, 9)
    aule.flash_attention_paged(q[:, :, 0], pages, pages, tables, lens)
    with pytest.raises(aule.AuleError, match="v_scale"):
        aule.flash_attention_paged(q[:, :, 0], pages, pages, tables, lens, v_scale=torch.ones(3, 16, 2))


def test_other_kinds_of_options(device: Interpreted) -> None:
    q, k, v = normal(2, 4, 1, 32), normal(2, 2, 40, 32), normal(2, 2, 40, 32)
    lens = torch.tensor([40, 7])  # int64, which the kernel does not take
    for _ in range(2):
        out = aule.decode_attention(q, k, v, context_lens=lens, scale=torch.tensor(0.5), window=[9, 0])
    wanted = aule.decode_attention(q, k, v, context_lens=lens, scale=0.5, window=(9, 0), backend="numpy")
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert device.prepared == 1
    with pytest.raises(aule.InvalidShapeError, match=r"context_lens from 0 to 40"):  # host arrays are looked into
        aule.decode_attention(q, k, v, context_lens=torch.tensor([41, 7]))


def test_indices_on_the_device_are_checked_on_request(device: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    q, pool, table = normal(2, 4, 32), normal(3, 16, 2, 32), integers([0, 1], [2, 0])
    keys = normal(2, 2, 40, 32)
    limited = aule.decode_attention(q, keys, keys, context_lens=integers(99, 7))  # without a word
    torch.testing.assert_close(limited, aule.decode_attention(q, keys, keys, context_lens=integers(40, 7)))
    for _ in range(2):
        right = aule.flash_attention_paged(q, pool, pool, table, integers(20, 9))
    monkeypatch.setenv("AULE_CHECK_INDICES", "1")
    with pytest.raises(aule.InvalidShapeError, match=r"context_lens from 0 to 40"):
        aule.decode_attention(q, keys, keys, context_lens=integers(99, 7))
    with pytest.raises(aule.InvalidArgumentError, match="block_tables of pages"):
        aule.flash_attention_paged(q, pool, pool, integers([0, 3], [2, 0]), integers(20, 9))
    assert torch.equal(aule.flash_attention_paged(q, pool, pool, table, integers(20, 9)), right)
    monkeypatch.setenv("AULE_CHECK_INDICES", "yes")
    with pytest.raises(aule.InvalidArgumentError, match="expected AULE_CHECK_INDICES to be 0 or 1"):
        aule.flash_attention_paged(q, pool, pool, table, integers(20, 9))


def test_gradients_are_refused(device: Interpreted) -> None:
    q = normal(1, 2, 1, 16).requires_grad_()
    with pytest.raises(aule.AuleError, match="no gradient"):
        aule.decode_attention(q, normal(1, 2, 5, 16), normal(1, 2, 5, 16))
    with torch.no_grad():
        aule.decode_attention(q, normal(1, 2, 5, 16), normal(1, 2, 5, 16))


def test_what_is_no_tensor_is_named(device: Interpreted) -> None:
    with pytest.raises(aule.InvalidDtypeError, match="context_lens"):
        aule.decode_attention(normal(1, 2, 1, 16), normal(1, 2, 5, 16), normal(1, 2, 5, 16), context_lens=[5])


def test_a_compiled_function_may_decode() -> None:
    """The compiler's graph ends before the call, and the next begins behind it."""
    q, k, v = normal(1, 2, 1, 16), normal(1, 2, 9, 16), normal(1, 2, 9, 16)

    def step(q: Any) -> Any:
        return aule.decode_attention(q * 2.0, k, v, backend="numpy") + 1.0

    torch.testing.assert_close(torch.compile(step, backend="eager")(q), step(q))
