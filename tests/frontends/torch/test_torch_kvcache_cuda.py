"""The CUDA path of writes into a cache, with CPU tensors in place of CUDA's and the interpreter as the device."""

from __future__ import annotations

import numpy as np
import pytest
import test_torch_varlen_cuda as stand_in
from test_torch_varlen_cuda import Interpreted, in_place_of_cuda

import aule

torch = pytest.importorskip("torch")

from aule.frontends.torch import route as torch_routes  # noqa: E402
from aule.frontends.torch import views  # noqa: E402


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    monkeypatch.setattr(stand_in, "NUMPY", stand_in.NUMPY | {"i8": np.int8, "u8": np.uint8, "u16": np.uint16})
    return in_place_of_cuda(monkeypatch)


def test_layers_of_a_step_are_planned_once(device: Interpreted) -> None:
    options = {"page_size": 4, "layers": 3, "quantize": "int8", "device": "cpu"}
    cache = aule.KVCache(40, 2, 16, **options)
    plain = aule.KVCache(40, 2, 16, **(options | {"device": None}), backend="numpy")
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(32, 8, generator=generator)
    seqs = [cache.allocate() for _ in range(2)]
    assert [plain.allocate() for _ in range(2)] == seqs
    planned = []
    for counts in ([5, 3], [1, 1, 1], [1, 1, 1]):
        if len(seqs) < len(counts):
            seqs.append(cache.fork(seqs[0]))
            assert plain.fork(seqs[0]) == seqs[-1]
        before, places = device.prepared, []
        for layer in range(3):
            k, v = (torch.randn(sum(counts), 2, 16, generator=generator) for _ in range(2))
            cache.append(seqs, k, v, layer, (angles.cos(), angles.sin()), lengths=counts)
            places.append(cache._known["places"][1])
            rope = angles.cos().numpy(), angles.sin().numpy()
            plain.append(seqs, k.numpy(), v.numpy(), layer, rope, lengths=counts)
        assert all(x is places[0] for x in places)  # brought to the device once
        planned.append(device.prepared - before)
    assert planned == [1, 2, 0]  # the second step also copies the page that the fork shares, of all layers at once
    for layer in range(3):
        for found, wanted in zip(cache.pool(layer), plain.pool(layer), strict=True):
            wanted = torch.from_numpy(wanted)
            if found.dtype == torch.int8:
                assert (found.int() - wanted.int()).abs().max() <= 1
            else:
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_devices_that_are_not_driven_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_routes, "home", lambda tensor: torch_routes.STAGED)
    with pytest.raises(aule.AuleError, match="keep it on the CPU"):
        aule.KVCache(2, 1, 8, device="cpu")


def test_addresses_divide_by_what_is_claimed() -> None:
    assert [views.alignment(address) for address in (4096, 4104, 4098, 4099)] == [16, 8, 2, 1]
