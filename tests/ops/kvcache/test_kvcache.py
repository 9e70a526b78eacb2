"""The kernels of a cache on every device, and `KVCache` on the CPU and through torch."""

from __future__ import annotations

from typing import Any

import devices
import kvcache_cases as cases
import numpy as np
import pytest

import aule
from aule.engine.kvcache import words
from aule.engine.run import prepare
from aule.ops.kvcache import numpy_append
from aule.ops.kvcache.plan import plan_append, plan_copy
from aule.ops.shared.plan import Plan
from aule.runtime.base import Device

pytestmark = pytest.mark.device


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


def run(plan: Plan, device: Device, arrays: dict[str, np.ndarray], back: list[str]) -> None:
    """Launch on copies in device memory, and bring some of them back."""
    memory = {name: device.alloc(max(array.nbytes, 16)) for name, array in arrays.items()}
    try:
        for name, array in arrays.items():
            device.upload(memory[name], array)
        prepare(plan, device).run(memory)
        for name in back:
            device.download(memory[name], arrays[name])
    finally:
        for held in memory.values():
            device.free(held)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_append(device: Device, case: cases.Case) -> None:
    devices.spare(device, cases.CASES.index(case), parts=6)
    problem, views = cases.make(case)
    wanted = cases.expected(problem, views)
    written = [name for name in views if cases.written(name)]
    arrays = {name: v.storage.swapaxes(1, 2) if _turned(v) else v.storage for name, v in views.items()}
    run(plan_append(problem, views, device.target), device, arrays, written)
    cases.compare(case, {name: views[name].storage for name in written}, wanted)


def _turned(view: cases.TensorView) -> bool:
    return not view.storage.flags.c_contiguous


def test_copy(device: Device) -> None:
    rng = np.random.default_rng(2)
    shapes = {"k_cache": (np.uint8, 2 * 3 * 5), "v_cache": (np.uint16, 4096 * 3), "v_scale": (np.uint32, 6)}
    arrays = {name: rng.integers(0, 255, (3, 5, n)).astype(kind) for name, (kind, n) in shapes.items()}
    pairs = np.array([[0, 3], [0, 4], [2, 1]], np.int32)
    wanted = {name: array.copy() for name, array in arrays.items()}
    numpy_append.copy_pages(pairs, wanted)
    plan = plan_copy(len(pairs), {name: words(array) for name, array in arrays.items()}, device.target)
    run(plan, device, {"pairs": pairs, **arrays}, list(arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name])


def tokens(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_attend_over_what_was_appended(backend: str, layout: str) -> None:
    """Ragged prompts, forks, single tokens of several layers, rotated: the same as attention on each sequence."""
    if backend != "numpy":
        devices.need(backend)
    rng = np.random.default_rng(3)
    cache = aule.KVCache(12, 2, 16, page_size=4, layers=2, value_dim=8, layout=layout, backend=backend)
    angles = rng.standard_normal((32, 8))
    rope = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = cache.allocate(), cache.allocate()
    written: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    for layer in range(2):
        k, v = tokens(rng, 11, 2, 16), tokens(rng, 11, 2, 8)
        cache.append([first, second], k, v, layer, rope, lengths=[9, 2])
        written[first, layer], written[second, layer] = [(k[:9], v[:9])], [(k[9:], v[9:])]
    third = cache.fork(first)
    seqs = [third, second, first]
    for layer in range(2):
        written[third, layer] = list(written[first, layer])
        k, v, q = tokens(rng, 3, 2, 2, 16), tokens(rng, 3, 2, 2, 8), tokens(rng, 3, 4, 2, 16)
        cache.append(seqs, k, v, layer, rope)
        out, lse = cache.attend(q, seqs, layer, rope, return_lse=True, softcap=4.0)
        for row, seq in enumerate(seqs):
            written[seq, layer].append((k[row].swapaxes(0, 1), v[row].swapaxes(0, 1)))
            keys, values = (np.concatenate(parts) for parts in zip(*written[seq, layer], strict=True))
            keys = rotated(keys, rope, np.arange(len(keys)))
            query = rotated(q[row].swapaxes(0, 1), rope, np.arange(len(keys) - 2, len(keys)))
            given = (x.swapaxes(0, 1)[None] for x in (query, keys, values))
            wanted, wanted_lse = aule.flash_attention(*given, softcap=4.0, return_lse=True, backend="numpy")
            np.testing.assert_allclose(out[row], wanted[0], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(lse[row], wanted_lse[0], rtol=1e-5, atol=1e-5)
    assert cache.pages_in_use == 3 + 1 + 1  # the last page of the fork was copied
    cache.truncate(third, 9)
    assert cache.length(third, 1) == 9 and cache.pages_in_use == 3 + 1 + 1


def rotated(x: np.ndarray, rope: tuple[np.ndarray, np.ndarray], positions: np.ndarray) -> np.ndarray:
    cos, sin = (angle[positions][:, None] for angle in rope)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(np.float32)


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_attend_over_a_quantised_cache(quantize: str) -> None:
    """Attention over bytes is attention over the numbers that they stand for."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    k, v, q = tokens(rng, 21, 2, 32), tokens(rng, 21, 2, 32), tokens(rng, 1, 4, 3, 32)
    found = {}
    for kind, like in (("numpy", np.asarray), ("torch", torch.from_numpy)):
        cache = aule.KVCache(6, 2, 32, page_size=4, quantize=quantize, device=None if kind == "numpy" else "cpu")
        seq = cache.allocate()
        cache.append(seq, like(k), like(v))
        found[kind] = np.asarray(cache.attend(like(q), [seq]))
        table, pool = cache.block_tables(seq)[0], cache.pool()
        numbers = [
            np.asarray((pool[i] if kind == "numpy" else pool[i].float())[table]).astype(np.float32)
            * np.asarray(pool[i + 2][table])[..., None]
            for i in range(2)
        ]
        assert pool.k.itemsize == 1 and cache.page_bytes == 4 * 2 * (32 + 32 + 8)
        keys, values = (x.reshape(-1, 2, 32)[:21].swapaxes(0, 1)[None] for x in numbers)
        wanted = aule.flash_attention(q, keys, values, backend="numpy")
        np.testing.assert_allclose(found[kind], wanted, rtol=1e-5, atol=1e-5)
        step = {"int8": 0.5 / 127, "fp8": 2.0**-4}[quantize]
        assert np.abs(keys[0] - k.swapaxes(0, 1)).max() <= 1.001 * step * np.abs(k).max()
    np.testing.assert_allclose(found["torch"], found["numpy"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["rows", "token", "packed"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_cascade_is_the_same_as_all_at_once(form: str, kind: str) -> None:
    torch = pytest.importorskip("torch") if kind == "torch" else None
    like: Any = np.asarray if torch is None else torch.from_numpy
    rng = np.random.default_rng(5)
    cache = aule.KVCache(40, 2, 16, page_size=4, device=None if torch is None else "cpu")
    prefix = cache.allocate()
    cache.append(prefix, like(tokens(rng, 14, 2, 16)), like(tokens(rng, 14, 2, 16)))
    seqs = [cache.fork(prefix) for _ in range(3)]
    counts = [5, 3, 6]
    cache.append(seqs, like(tokens(rng, 14, 2, 16)), like(tokens(rng, 14, 2, 16)), lengths=counts)
    assert cache.shared_pages(seqs) == 3  # the fourth page is half the prefix's and half each one's own
    shape = {"rows": (3, 4, 2, 16), "token": (3, 4, 16), "packed": (6, 4, 16)}[form]
    options: dict[str, Any] = {"sinks": like(tokens(rng, 4)), "scale": 0.3, "return_lse": True}
    if form == "packed":
        options |= {"cu_seqlens_q": like(np.array([0, 3, 4, 6], np.int32)), "max_seqlen_q": 3}
    q = like(tokens(rng, *shape))
    plain, plain_lse = cache.attend(q, seqs, **options)
    out, lse = cache.attend(q, seqs, **options, cascade=True)
    assert out.shape == plain.shape and lse.shape == plain_lse.shape
    np.testing.assert_allclose(np.asarray(out), np.asarray(plain), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(plain_lse), rtol=1e-5, atol=1e-5)
    with pytest.raises(aule.InvalidArgumentError, match="no window"):
        cache.attend(q, seqs, **options, window=4, cascade=True)


@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_torch_tensors_where_they_are(where: str, quantize: str | None) -> None:
    """The same as a cache in NumPy arrays: written, copied on write, read with and without a cascade."""
    torch = pytest.importorskip("torch")
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rng = np.random.default_rng(6)
    options: dict[str, Any] = {"page_size": 4, "layers": 2, "layout": "HND", "quantize": quantize}
    plain = aule.KVCache(24, 2, 32, **options, backend="numpy")
    cache = aule.KVCache(24, 2, 32, **options, device=where)
    angles = rng.standard_normal((32, 16))
    rope = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    there = tuple(torch.from_numpy(x).to(where) for x in rope)
    prompt = [pool.allocate() for pool in (plain, cache)]
    assert prompt[0] == prompt[1]
    given = tokens(rng, 10, 2, 32), tokens(rng, 10, 2, 32)
    for layer in range(2):
        plain.append(prompt[0], *given, layer, rope)
        cache.append(prompt[0], *(torch.from_numpy(x).to(where) for x in given), layer, there)
    seqs = [prompt[0], *(plain.fork(prompt[0]) for _ in range(2))]
    assert [cache.fork(prompt[0]) for _ in range(2)] == seqs[1:]
    step = tokens(rng, 3, 2, 3, 32), tokens(rng, 3, 2, 3, 32)
    q = tokens(rng, 3, 4, 3, 32)
    for layer in range(2):
        plain.append(seqs, *step, layer, rope, lengths=[3, 1, 2])
        cache.append(seqs, *(torch.from_numpy(x).to(where) for x in step), layer, there, lengths=[3, 1, 2])
        for cascade in (False, True):
            wanted = plain.attend(q, seqs, layer, rope)
            found = cache.attend(torch.from_numpy(q).to(where), seqs, layer, there, cascade=cascade)
            assert found.device.type == where
            # One number that falls on a tie may be rounded the other way, and count a step of its type.
            atol = 1e-5 if quantize is None else 2e-2
            np.testing.assert_allclose(found.cpu().numpy(), wanted, rtol=1e-5, atol=atol)
    assert cache.pages_in_use == plain.pages_in_use
