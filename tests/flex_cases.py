"""Score and mask functions of many kinds, each with the tensors that it captured and that have gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import aule

BATCH, HEADS, QUERIES, KEYS = 2, 2, 36, 41
WIDTH = 6
"""Columns of the picture that two-dimensional functions see in a sequence."""


class Case(NamedTuple):
    """A function of scores, one of masks, the captured tensors with gradients, and the plain formula's functions if
    traced ones cannot be called with whole tensors."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None = None
    captured: tuple[Tensor, ...] = ()
    plain: Callable[..., Any] | None = None
    plain_mask: Callable[..., Any] | None = None


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def learned(*shape: int, dtype: torch.dtype = torch.float32, low: float = -1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator) * (1 - low) + low).to(dtype).requires_grad_()


def sliding_alibi() -> Case:
    slopes, window = learned(HEADS), 9
    return Case(
        lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),
        lambda b, h, q, k: (q - k <= window) & (q >= k),
        (slopes,),
    )


def prefix_softcap() -> Case:
    prefix = torch.tensor([5, 17])
    return Case(lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5), lambda b, h, q, k: (k < prefix[b]) | (q >= k))


def document_relative() -> Case:
    table, document = learned(HEADS, QUERIES + KEYS), torch.arange(KEYS) // 11

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[h, q - k + KEYS]

    return Case(score_mod, lambda b, h, q, k: (document[q] == document[k]) & (q >= k), (table,))


def dilated_temperature() -> Case:
    temperature = torch.tensor(0.7, requires_grad=True)
    return Case(
        lambda s, b, h, q, k: s / temperature,
        lambda b, h, q, k: ((q - k) % 3 == 0) & ((q - k).abs() < 20),
        (temperature,),
    )


def neighbourhood_2d() -> Case:
    rows, columns = learned(HEADS, 15), learned(HEADS, 11)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + rows[h, q // WIDTH - k // WIDTH + 7] + columns[h, q % WIDTH - k % WIDTH + 5]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q // WIDTH - k // WIDTH).abs() <= 2) & ((q % WIDTH - k % WIDTH).abs() <= 1)

    return Case(score_mod, mask_mod, (rows, columns))


def block_sparse_gate() -> Case:
    kept = torch.rand(HEADS, 5, 6, generator=torch.Generator().manual_seed(2)) < 0.6
    gate = learned(HEADS, KEYS, dtype=torch.bfloat16)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * torch.sigmoid(gate[h, q].float() + gate[h, k].float())

    return Case(score_mod, lambda b, h, q, k: kept[h, q // 8, k // 8], (gate,))


def tree_cosine() -> Case:
    parents = [-1, *((i - 1) // 2 for i in range(1, KEYS))]
    ancestors = [0] * KEYS
    for i, parent in enumerate(parents):
        ancestors[i] = (ancestors[parent] if parent >= 0 else 0) | 1 << i
    bits = torch.tensor(ancestors)  # int64

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.cos((q - k) * (math.pi / KEYS)) * s.abs()

    return Case(score_mod, lambda b, h, q, k: (bits[q] >> k) & 1 == 1)


def local_global_chained() -> Case:
    bias, is_global = learned(BATCH, HEADS, QUERIES), torch.arange(KEYS) % 10 == 3

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + bias[b][h][q] * torch.exp2(-(k - q).abs() / 4.0)

    def plain(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + bias[b, h, q] * torch.exp2(-(k - q).abs() / 4.0)

    near = aule.and_masks(causal, lambda b, h, q, k: q - k < 6)
    return Case(score_mod, aule.or_masks(near, lambda b, h, q, k: is_global[k]), (bias,), plain)


def negative_indices() -> Case:
    table, lengths = learned(KEYS, HEADS), torch.tensor([KEYS, 30], dtype=torch.int32)
    # Not contiguous, and with negative indices, which count from the end.
    transposed = table.T
    return Case(
        lambda s, b, h, q, k: s + transposed[h, -1 - k] - transposed[-1, q],
        lambda b, h, q, k: k < lengths[b],
        (table,),
    )


def integers() -> Case:
    step, seven = torch.tensor(-4), 7
    small = torch.arange(-5, 6, dtype=torch.int16)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        d = q - k
        down, rest = torch.floor_divide(d, seven), torch.remainder(d, seven)
        other = d // step + d % step + torch.div(d, seven, rounding_mode="trunc")
        return (
            s + (down + rest) * 0.1 + other / 16 + small[rest] * 0.125 + (q ^ k) * 0.01 - ((q << 1) | (k >> 1)) * 0.02
        )

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ~((q & k) == 0) | torch.logical_not(q) | (k == 0)

    return Case(score_mod, mask_mod)


def powers() -> Case:
    base = learned(HEADS, low=0.5)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = 1.0 / (1 + (q - k).abs()) ** 0.5
        return s + 0.1 * s**3 - (1 + s.square()) ** -2 + base[h] ** 1.5 * near + 2.0 ** (-h - 1) * near**5

    return Case(score_mod, None, (base,))


def branches() -> Case:
    low = learned(1)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        inner = torch.where(q > k, torch.clamp(s, -0.5, 1.0), torch.relu(s) - 0.3)
        outer = torch.where((k % 4 == 0) & (h == 0), inner * 2, torch.maximum(torch.nn.functional.silu(s), low[0]))
        return torch.where(k > q + 20, float("-inf"), outer) + torch.sign(s) * 0.1

    return Case(score_mod, None, (low,))


def functions(dtype: torch.dtype = torch.float32) -> Case:
    scale = learned(HEADS, KEYS, low=0.2, dtype=dtype)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        smooth = torch.log(1 + torch.exp(s)) + torch.sin(s) * torch.tan(s / 8) + torch.rsqrt(1 + s * s)
        return smooth * scale[h, k] + torch.sqrt(scale[h, q]) - s.detach() * torch.floor(s) - torch.log2(scale[h, k])

    return Case(score_mod, causal, (scale,))


def several_times() -> Case:
    table = learned(KEYS)
    expanded = table.expand(HEADS, KEYS)
    return Case(
        lambda s, b, h, q, k: torch.add(s * expanded[h, k], expanded[h, q] * expanded[h, k], alpha=3) + expanded[h, -1],
        causal,
        (table,),
    )


def several_loads() -> Case:
    """Elements by head, by row, by key, by the difference of both, and by both; factors of each kind."""
    slopes, by_key, table = learned(HEADS), learned(HEADS, KEYS), learned(QUERIES + KEYS)
    by_row, pairs, buckets = learned(BATCH, QUERIES), learned(6, 7), torch.arange(QUERIES + KEYS) // 5

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s = s - slopes[h] * (2 * q - 2 * k).abs() + by_row[b, q] * by_key[h, k] + pairs[q // 6, k // 6]
        return s * torch.sigmoid(table[k - q + QUERIES]) + table[buckets[q - k + KEYS]]

    return Case(score_mod, None, (slopes, by_key, table, by_row, pairs))


def positions_by_dot_product() -> Case:
    """Rows of captured tensors, summed inside of the function; blocks that are listed for each row of blocks."""
    of_query, of_key = learned(BATCH, HEADS, QUERIES, 4), learned(BATCH, 1, KEYS, 4)
    weights, listed = learned(4, low=0.1), torch.tensor([[0, 3], [1, 0], [2, 4], [5, 1], [4, 4]])

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = ((of_query[b, h, q] - of_key[b, 0, k]) * weights).pow(2).sum(-1)
        return s + 0.5 * torch.dot(of_query[b, h, q], of_key[b, h // HEADS, k]) - near / 4

    def plain(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = ((of_query[b, h, q] - of_key[b, 0, k]) * weights).pow(2).sum(-1)
        return s + 0.5 * (of_query[b, h, q] * of_key[b, h // HEADS, k]).sum(-1) - near / 4

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (listed[q // 8] == (k // 8).unsqueeze(-1)).any(dim=-1)

    return Case(score_mod, mask_mod, (of_query, of_key, weights), plain)


def block_diffusion_activation() -> Case:
    """Noised tokens in blocks before clean ones; an activation in the place of exp."""
    clean = QUERIES // 2

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_noised, k_noised = q < clean, k < clean
        q_block, k_block = q % clean // 6, k % clean // 6
        own = (q_block == k_block) & (q_noised == k_noised)
        return own | ((q_block > k_block) & q_noised & ~k_noised) | ((q_block >= k_block) & ~q_noised & ~k_noised)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.log(torch.nn.functional.gelu(s) + 1 + 0.1 * torch.erf(s - 0.1 * h))

    return Case(score_mod, mask_mod)


def morton_graph() -> Case:
    """A neighbourhood on a canvas in Morton order; biases by the distance of two nodes of a graph."""
    apart = torch.randint(0, 7, (BATCH, QUERIES, KEYS), generator=torch.Generator().manual_seed(4))
    table = learned(HEADS, 7)

    def place(i: Any) -> tuple[Any, Any]:
        def even_bits(x: Any) -> Any:
            x = x & 0x55555555
            x = (x | (x >> 1)) & 0x33333333
            x = (x | (x >> 2)) & 0x0F0F0F0F
            return (x | (x >> 4)) & 0x00FF00FF

        return even_bits(i), even_bits(i >> 1)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        (q_x, q_y), (k_x, k_y) = place(q), place(k)
        x, y = q_x.clamp(1, 6), q_y.clamp(1, 6)
        return ((x - k_x).abs() <= 1) & ((y - k_y).abs() <= 2)

    return Case(lambda s, b, h, q, k: s + table[h, apart[b, q, k]], mask_mod, (table,))


def images_and_tiles() -> Case:
    """Text that sees the images of its interval; tiles of a canvas whose last ones are padded."""
    interval, image = torch.tensor([[0, 9], [4, 36], [20, 30]]), torch.arange(KEYS) // 14
    sizes, chosen = torch.tensor([8, 8, 5, 8, 8, 1]), torch.rand(BATCH, HEADS, 5, 6) < 0.7

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        own = interval[image[k]]
        seen = (q >= own[0]) & (q < own[1])
        return seen | (chosen[b, h, q // 8, k // 8] & (k % 8 < sizes[k // 8]))

    def plain_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        own = interval[image[k]]
        seen = (q >= own[..., 0]) & (q < own[..., 1])
        return seen | (chosen[b, h, q // 8, k // 8] & (k % 8 < sizes[k // 8]))

    return Case(None, mask_mod, plain_mask=plain_mask)


CASES = (
    sliding_alibi, prefix_softcap, document_relative, dilated_temperature, neighbourhood_2d, block_sparse_gate,
    tree_cosine, local_global_chained, negative_indices, integers, powers, branches, functions, several_times,
    positions_by_dot_product, block_diffusion_activation, morton_graph, images_and_tiles,
)  # fmt: skip
