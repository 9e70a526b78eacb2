"""Seeds of dropout, with the CPU in place of a GPU and pretended captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aule.engine.signatures import Signatures  # noqa: E402
from aule.frontends.torch import seeds as torch_seeds  # noqa: E402


class Device:
    closed = False


class Gpu:
    """PyTorch's view of a GPU: a current stream, the capture that it takes part in, and a generator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.captures, self.launches = 1, {1: 0}, 0
        self.device = SimpleNamespace(type="cuda", index=0)
        draw = torch.randint

        def randint(*arguments: Any, device: Any, **options: Any) -> Any:
            self.launches += 1
            return draw(*arguments, **options)

        monkeypatch.setattr(torch, "randint", randint)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures[self.stream] > 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream))
        ours = Device()
        ours.capture = lambda stream: self.captures[stream]
        monkeypatch.setattr(torch_seeds.registry, "find", lambda name: ours)
        monkeypatch.setattr(torch_seeds, "_drawn", Signatures(16))

    def seeds(self, count: int) -> list[tuple[int, ...]]:
        found = [torch_seeds.seed_on(None, self.device) for _ in range(count)]
        # A launch that was prepared serves for memory that is aligned alike.
        assert all(x.dtype == torch.int32 and x.shape == (2,) and x.data_ptr() % 16 == 0 for x in found)
        return [tuple(x.tolist()) for x in found]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_one_launch_draws_for_many_calls_of_a_capture(gpu: Gpu) -> None:
    gpu.captures[1] = 7
    found = gpu.seeds(torch_seeds._AT_ONCE + 1)
    assert gpu.launches == 2 and len(set(found)) == len(found)


def test_nobody_gets_the_seeds_of_another_capture_or_stream(gpu: Gpu) -> None:
    gpu.captures |= {1: 7, 2: 7}
    found = gpu.seeds(3)
    gpu.stream = 2
    found += gpu.seeds(3)
    gpu.stream, gpu.captures[1] = 1, 8
    found += gpu.seeds(3)
    assert gpu.launches == 3 and len(set(found)) == 9


def test_forgetting_seeds_is_harmless(gpu: Gpu) -> None:
    found = []
    for number in range(3 * 16):
        gpu.captures[1] = 1 + number
        found += gpu.seeds(2)
    assert len(torch_seeds._drawn) <= 16 and len(set(found)) == len(found)


def test_outside_of_a_capture_a_seed_depends_on_the_generator_alone(gpu: Gpu) -> None:
    """Checkpointing sets the generator back, and is to drop the same again."""
    state = torch.get_rng_state()
    found = gpu.seeds(3)
    torch.set_rng_state(state)
    assert gpu.seeds(3) == found and gpu.launches == 6


def test_a_given_seed_is_its_words() -> None:
    for number, words in ((2**64 - 1, [-1, -1]), (3 << 32 | 5, [5, 3])):
        assert torch_seeds.seed_on(number, torch.device("cpu")).tolist() == words
