"""Long sequences through CUDA and Vulkan, outputs and gradients: random problems with lengths near multiples of tiles.

PyTorch computes the expected results on its GPU in fp64, and the naive twin in half precision that gives the tolerance.
Without such a GPU a few of the problems run at a fraction of their lengths.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import devices
import numpy as np
import pytest

import aule
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import Expected, compare
from aule.ops.attention.reference_backward import ExpectedGradients, compare_gradients
from aule.ops.attention.validate import attention_problem
from aule.view import TensorView

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.device

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
EACH, SHRUNK = 96, 32


@dataclass(frozen=True)
class Problem:
    dtype: str
    head_dim: int
    causal: bool
    deterministic: bool
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]

    def __str__(self) -> str:
        kind = f"{'causal' if self.causal else 'full'}{'-deterministic' if self.deterministic else ''}"
        sizes = f"b{self.batch}h{self.heads[0]}x{self.heads[1]}-s{self.lengths[0]}x{self.lengths[1]}"
        return f"{self.dtype}-d{self.head_dim}-{kind}-{sizes}"


def problems(count: int, seed: int) -> list[Problem]:
    """Random ones, of which those with the same kernels follow one another."""
    rng = random.Random(seed)
    found = set()
    while len(found) < count:
        head_dim = rng.choice((64, 128, 256))
        tile = rng.choice((64, 96, 128, 144, 192, 256))
        first = rng.randint(2048 // tile, 8192 // tile) * tile + rng.choice((-1, 0, 0, 1, tile // 2))
        other = first if rng.random() < 0.7 else rng.randint(2048, 8192)
        # As many as leave a last wave of blocks that is not whole, or just one; few where the rows are wide.
        batch, heads = rng.choice(((1, (8, 8)), (1, (8, 2)), (1, (6, 1)), (2, (3, 3)), (1, (5, 5)), (3, (4, 2))))
        if batch * heads[0] * max(first, other) * head_dim > 1 << 23:
            batch, heads = 1, (3, 1)
        kind = rng.choice(("f32", "f16", "f16", "bf16", "bf16")), head_dim, rng.random() < 0.5, rng.random() < 0.2
        found.add(Problem(*kind, batch, heads, (first, other)))
    return sorted(found, key=str)


CASES = [*(("cuda", p) for p in problems(EACH, 1)), *(("vulkan", p) for p in problems(EACH, 2))]


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    """What PyTorch keeps of a reference, gigabytes, others may need: many processes test on one GPU."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize(("name", "problem"), CASES, ids=lambda value: str(value))
def test_output_and_gradients(name: str, problem: Problem) -> None:
    device = devices.need(name)
    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = problem.lengths
    if gpu == "cpu" or device.target.software:
        if CASES.index((name, problem)) % EACH not in (0, EACH // 2, EACH - 1):
            pytest.skip("a few are run without a GPU")
        lengths = lengths[0] // SHRUNK, lengths[1] // SHRUNK
    q, k, v, dout = made(problem, lengths, gpu)
    given = [x.to("cuda" if name == "cuda" else "cpu").requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {"causal": problem.causal, "deterministic": problem.deterministic}
    out, lse = aule.flash_attention(*given, **options, return_lse=True, backend=name)
    found = torch.autograd.grad(out, given, dout.to(out.device))

    views = [view(problem.dtype, x) for x in (q, k, v)]
    asked, _ = attention_problem(*views, **options, return_lse=True)
    outputs, gradients = expected(asked, q, k, v, dout)
    verdict = compare(asked, numbers(out), numbers(lse), outputs)
    assert verdict, verdict.message
    named = dict(zip(("dq", "dk", "dv"), map(numbers, found), strict=True))
    wrong = compare_gradients(asked, named, gradients)
    assert not wrong, wrong


def made(problem: Problem, lengths: tuple[int, int], where: str) -> tuple[Any, ...]:
    generator = torch.Generator(where).manual_seed(sum(lengths) * problem.head_dim)
    (heads, heads_kv), (rows, keys), dim = problem.heads, lengths, problem.head_dim
    shapes = ((heads, rows, dim), (heads_kv, keys, dim), (heads_kv, keys, dim), (heads, rows, dim))
    dtype = DTYPES[problem.dtype]
    return tuple(torch.randn(problem.batch, *shape, generator=generator, device=where).to(dtype) for shape in shapes)


def view(dtype: str, x: Any) -> TensorView:
    return TensorView(dtype, tuple(x.shape), x.stride(), "host", None)


def numbers(x: Any) -> np.ndarray:
    x = x.detach()
    return np.asarray((x.float() if x.dtype == torch.bfloat16 else x).cpu())


def expected(problem: AttentionProblem, q: Any, k: Any, v: Any, dout: Any) -> tuple[Expected, ExpectedGradients]:
    """As `aule.ops.attention.reference` and `reference_backward` have it, for what these tests ask."""
    exact, magnitude = computed(problem, q, k, v, dout, torch.float64)
    naive = computed(problem, q, k, v, dout, q.dtype)[0] if problem.dtype != "f32" else None
    twin = None if naive is None else {name: naive[name] for name in ("dq", "dk", "dv")}
    outputs = Expected(exact["out"], exact["lse"], None if naive is None else naive["out"])
    return outputs, ExpectedGradients({name: exact[name] for name in ("dq", "dk", "dv")}, twin, magnitude)


@torch.no_grad()
def computed(
    problem: AttentionProblem, q: Any, k: Any, v: Any, dout: Any, dtype: Any
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Attention and its gradients step by step in one precision, and the largest sums of absolute terms."""
    exact = dtype == torch.float64
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    wide = torch.float64 if exact else torch.float32
    found = {name: torch.zeros_like(x, dtype=wide) for name, x in (("out", dout), ("dq", q), ("dk", k), ("dv", v))}
    found["lse"] = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    magnitude = dict.fromkeys(("dq", "dk", "dv"), 0.0)
    rows, keys = q.shape[2], k.shape[2]
    kept = None
    if problem.causal:
        kept = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // problem.group
            s = (q[b, h] @ k[b, g].T) * problem.scale
            if kept is not None:
                s.masked_fill_(~kept, -torch.inf)
            lse = torch.logsumexp(s.to(wide), -1)
            p = torch.nan_to_num(torch.softmax(s.to(wide), -1)).to(dtype)  # rows without keys are zero
            out = p @ v[b, g]
            dp = dout[b, h] @ v[b, g].T
            delta = (dout[b, h].to(wide) * out.to(wide)).sum(-1, keepdim=True)
            ds = (p.to(wide) * (dp.to(wide) - delta)).to(dtype)
            found["out"][b, h], found["lse"][b, h] = out, lse
            found["dq"][b, h] = (ds @ k[b, g]) * problem.scale
            found["dk"][b, g] += (ds.T @ q[b, h]) * problem.scale
            found["dv"][b, g] += p.T @ dout[b, h]
            if exact:
                terms = p * (dp.abs() + delta.abs()) * abs(problem.scale)
                sums = {"dq": terms @ k[b, g].abs(), "dk": terms.T @ q[b, h].abs(), "dv": p.T @ dout[b, h].abs()}
                for name, each in sums.items():
                    magnitude[name] = max(magnitude[name], problem.group * float(each.max()))
    rounded = {name: x if exact else x.to(dtype) for name, x in found.items() if name != "lse"}
    return {name: numbers(x.double()) for name, x in (rounded | {"lse": found["lse"]}).items()}, magnitude
