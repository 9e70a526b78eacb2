"""A cache for transformers that stores keys and values in the pages of an `aule.KVCache`.

With ``attn_implementation="aule"`` a model attends to the pages themselves: nothing is concatenated as a sequence
grows, padding uses no memory, and beams share their common tokens. Pass it to
``generate(past_key_values=AuleCache(config, num_pages=256))``. A program that schedules batches itself creates an
`AuleCache` over a pool and the sequences of a step, which may mix prompts and single tokens of different lengths: see
``examples/serve_tiny.py``.

transformers passes a layer's new keys first to the cache and then to attention, and only attention knows which of them
are padding. So `update` marks the keys, and `attention_forward` calls `AuleCache.attend` for marked keys, which appends
them and attends. If another attention function was chosen, or the model changes keys in between, the next layer raises
an error. Layers other than full and sliding attention (Llama 4's chunks, Mamba, linear attention) are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from aule.api.kvcache import KVCache
from aule.errors import AuleError, InvalidArgumentError, InvalidShapeError
from aule.frontends.torch.route import host_backend
from aule.integrations import _transformers_models as models
from aule.integrations._transformers_latent import Latents

__all__ = ["AuleCache"]


class AuleCache(Cache):  # type: ignore[misc]
    """A model's keys and values in pages.

    Parameters
    ----------
    config : PreTrainedConfig
        Configuration of the model or of its text part; determines the number of layers.
    num_pages : int
        Pages of the pool. The first step creates it on the device and in the dtype of the model's keys.
    page_size : int
        Tokens per page, 1 to 256.
    quantize : {"int8", "fp8"}, optional
        Store bytes, and a scale per token and head.

    Attributes
    ----------
    pool : KVCache or None
        The pages; None before the first step.
    sequences : list of int
        The pool's sequence of each row of the batch.
    """

    def __init__(self, config: Any, num_pages: int, *, page_size: int = 16, quantize: str | None = None) -> None:
        self._options = {"num_pages": num_pages, "page_size": page_size, "quantize": quantize}
        text = config.get_text_config(decoder=True)
        kinds = _layer_kinds(text)
        self._start(text.num_hidden_layers)
        self.rank = getattr(text, "kv_lora_rank", None) or 0
        self._windows.update(number for number, kind in enumerate(kinds) if kind == "sliding_attention")

    @classmethod
    def over(cls, pool: KVCache, sequences: Sequence[int], lengths: Sequence[int] | None = None) -> AuleCache:
        """Make a cache of sequences that a pool already has, for one or more steps.

        Parameters
        ----------
        pool : KVCache
            The pages.
        sequences : sequence of int
            The pool's sequence of each row of the batch.
        lengths : sequence of int, optional
            Number of new tokens of each sequence. With it the step is packed: the batch has one row, which holds the
            new tokens of all sequences one after the other. The caller passes their ``position_ids`` to the model.
        """
        if lengths is not None and len(lengths) != len(sequences):
            raise InvalidArgumentError(
                f"[AuleCache] expected a length for each of {len(sequences)} sequences, got {len(lengths)}; 0 for none"
            )
        made = cls.__new__(cls)
        made._start(pool.layers)
        made.pool, made.sequences = pool, list(sequences)
        made.rank = pool.value_dim if pool.latent else 0
        made._pads = [0] * len(made.sequences)
        made._lengths = None if lengths is None else tuple(int(n) for n in lengths)
        if lengths is None:
            for number, layer in enumerate(made.layers):
                layer.seen = max((pool.length(seq, number) for seq in sequences), default=0)
        return made

    def _start(self, layers: int) -> None:
        super().__init__(layers=[_Layer(self, number) for number in range(layers)])
        self.pool: KVCache | None = None
        self.sequences: list[int] = []
        self.rank = 0  # columns of compressed keys, if the model caches these
        self._pads: list[int] = []  # padding before each sequence, which is not stored in the pages
        self._lengths: tuple[int, ...] | None = None
        self._offsets: Any = None
        self._windows: set[int] = set()  # layers with a window by the model's configuration
        self._checked: list[Any] = []
        self.marked: tuple[int, int] | None = None  # the layer whose keys were marked and not taken, and calls before

    # -- attention ---------------------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        *,
        scale: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Any,
    ) -> Any:
        """Append a layer's new keys and values, and attend to all of its keys.

        Parameters
        ----------
        layer : int
            Index of the layer.
        query, key, value : Tensor
            ``[batch, heads, seq, head_dim]`` of the new tokens.
        mask : Tensor, optional
            ``[batch, 1, seq_q, seq_kv]``, boolean or additive, as transformers makes it from padding. Other masks raise
            an error.
        scale, sliding_window, softcap, sinks
            Options of attention; see `attention_forward`.

        Returns
        -------
        Tensor
            ``[batch, seq, heads, head_dim]``.
        """
        self._take(layer)
        if layer in self._windows and sliding_window is None:
            raise AuleError(
                "AULE_ERROR_UNSUPPORTED",
                f"[AuleCache] expected layer {layer} to pass on its sliding window, got none; a model whose window is "
                "only in transformers' own cache needs a DynamicCache",
            )
        pool = self._pool(key, value)
        window = None if sliding_window is None else (sliding_window - 1, 0)
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        options["backend"] = host_backend(query)
        batch, heads, rows, _ = query.shape
        out = query.new_empty(batch, rows, heads, value.shape[3])
        if self._lengths is not None:
            self._attend_packed(pool, layer, (query, key, value), self._lengths, out, options)
            return out
        self._append(pool, layer, (key, value), mask, sliding_window)
        pool.attend(query, self.sequences, layer, out=out.transpose(1, 2), **options)
        return out

    def append_latents(self, latents: Latents, mask: Any) -> bool:
        """Append compressed keys of a layer; returns whether they are a prompt, with nothing before them."""
        layer, compressed = latents.layer, latents.compressed
        self._take(layer)
        keys = torch.cat((compressed, latents.rotated), -1)
        pool = self._pool(keys, compressed, latent=True)
        if self._lengths is not None:
            pool.append(self.sequences, keys[0].transpose(0, 1), layer=layer, lengths=self._lengths)
            return False
        prompt = bool(self.layers[layer].seen == 0)
        self._append(pool, layer, (keys, None), mask, None)
        return prompt

    def attend_latents(self, layer: int, query: Any, options: dict[str, Any]) -> Any:
        """Attend to a layer's compressed keys with absorbed queries ``[batch, heads, seq, dim]``."""
        assert self.pool is not None
        options = options | {"backend": host_backend(query)}
        if self._lengths is None:
            return self.pool.attend(query, self.sequences, layer, **options)
        packed = self._packed(self._lengths, query.device)
        found = self.pool.attend(query[0].transpose(0, 1), self.sequences, layer, **options, **packed)
        return found.transpose(0, 1)[None]

    def _take(self, layer: int) -> None:
        """Note that attention got the keys of a layer."""
        if self.marked is None or self.marked[0] != layer:
            raise AuleError(
                "AULE_ERROR_UNSUPPORTED",
                f"[AuleCache] expected the keys of layer {layer} once, got them again; a model that attends to them "
                "several times, or shares them between layers, needs a DynamicCache",
            )
        self.marked = None

    def _append(self, pool: KVCache, layer: int, tensors: tuple[Any, Any], mask: Any, window: int | None) -> None:
        """Append the keys and values of a step that is not packed, without padding."""
        (key, value), found = tensors, self.layers[layer]
        seen, rows = found.seen, key.shape[2]
        if mask is not None:
            self._check(mask, seen, window)
        # Padding comes before a sequence, in the first step or the first few. Only tokens after it are stored.
        counts = [max(rows - max(pad - seen, 0), 0) for pad in self._pads]
        pool.append(self.sequences, key, value, layer, lengths=counts)
        found.seen += rows  # after the append: a step that found no room can be repeated

    def _packed(self, lengths: tuple[int, ...], device: Any) -> dict[str, Any]:
        """Options of attention for a packed step."""
        if self._offsets is None:
            self._offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return {"cu_seqlens_q": self._offsets, "max_seqlen_q": max(lengths, default=0)}

    def _attend_packed(
        self,
        pool: KVCache,
        layer: int,
        tensors: tuple[Any, Any, Any],
        lengths: tuple[int, ...],
        out: Any,
        options: dict[str, Any],
    ) -> None:
        """Append and attend for a packed step, a batch of one row with the new tokens of all sequences."""
        batch, _, rows, _ = tensors[0].shape
        if batch != 1 or rows != sum(lengths):
            raise InvalidShapeError(
                f"[AuleCache] expected one row of {sum(lengths)} tokens, got {batch} of {rows}; put the "
                "sequences behind each other"
            )
        q, k, v = (x[0].transpose(0, 1) for x in tensors)
        pool.append(self.sequences, k, v, layer, lengths=lengths)
        pool.attend(q, self.sequences, layer, out=out[0], **options, **self._packed(lengths, q.device))

    def _pool(self, key: Any, value: Any, latent: bool = False) -> KVCache:
        """Return the pool, created for the first keys, with one sequence per row of the batch."""
        if self.pool is None:
            self.pool = KVCache(
                heads_kv=key.shape[1],
                head_dim=key.shape[3],
                value_dim=value.shape[3],
                dtype=key.dtype,
                layers=len(self.layers),
                latent=latent,
                device=key.device,
                **self._options,  # type: ignore[arg-type]
            )
        if not self.sequences:
            self.sequences = [self.pool.allocate() for _ in range(key.shape[0])]
            self._pads = [0] * len(self.sequences)
        return self.pool

    def _check(self, mask: Any, seen: int, sliding_window: int | None) -> None:
        """Read the padding from the first mask, and refuse masks other than padding, causality and a window."""
        if any(known is mask for known in self._checked):  # the layers of a step share one mask, or one per kind
            return
        given = mask
        if mask.is_floating_point():
            keeps, drops = mask == 0, mask == torch.finfo(mask.dtype).min
            mask = keeps if bool((keeps | drops).all()) else mask
        rows, keys = mask.shape[-2:]
        at = torch.arange(seen, seen + rows, device=mask.device)[:, None]
        column = torch.arange(keys, device=mask.device)
        fits = mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1 and keys == seen + rows
        pads = self._pads
        if fits and seen == 0:
            pads = (~mask[:, 0].diagonal(dim1=-2, dim2=-1)).sum(-1).tolist()
            pads = pads if len(pads) == len(self.sequences) else pads * len(self.sequences)
        if fits:
            first = torch.tensor(pads, device=mask.device)[:, None, None, None]
            expected = (column <= at) & (column >= first)
            if sliding_window is not None:
                expected = expected & (column > at - sliding_window)
            fits = bool((expected == mask).all())
        if not fits:
            raise AuleError(
                "AULE_ERROR_UNSUPPORTED",
                "[AuleCache] expected a causal mask with padding on the left, got another; pad on the left, or use a "
                "DynamicCache for packed, chunked or bidirectional attention",
            )
        self._pads = pads
        self._checked = [*self._checked[-1:], given]

    # -- the interface of a transformers cache -----------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has seen, including padding; 0 if steps are packed."""
        return int(self.layers[layer_idx].get_seq_length())

    def reorder_cache(self, beam_idx: Any) -> None:
        """Replace each row by that of another beam. Rows are copied only when one of them is written."""
        self._select_rows([int(i) for i in beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._select_rows([i for i in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only some of the rows."""
        self._select_rows(torch.arange(len(self.sequences), device="cpu")[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise InvalidArgumentError(
                f"[AuleCache.crop] expected a number of tokens below 0, which are removed, got {tokens_to_remove}"
            )
        if self.pool is None:
            return
        for seq in self.sequences:
            self.pool.truncate(seq, max(self.pool.length(seq) + tokens_to_remove, 0))
        for layer in self.layers:
            layer.seen = max(layer.seen + tokens_to_remove, 0)
        self._checked = []

    def reset(self) -> None:
        """Free all sequences and keep the pool."""
        self._select_rows([])
        self.marked = None
        for layer in self.layers:
            layer.seen = 0

    def _select_rows(self, rows: list[int]) -> None:
        if self.pool is None:
            return
        old = self.sequences
        if any(not 0 <= i < len(old) for i in rows):
            raise InvalidArgumentError(
                f"[AuleCache] expected rows from 0 to {len(old) - 1}, got {rows}; there are {len(old)} in the batch"
            )
        self.sequences = [self.pool.fork(old[i]) for i in rows]
        self._pads = [self._pads[i] for i in rows]
        self._checked = []
        for seq in old:
            self.pool.free(seq)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """The interface of one layer of a transformers cache; its keys and values are in the pool."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: AuleCache, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number
        self.seen = 0

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing: `AuleCache.attend` creates the pool."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Mark new keys, so that attention appends them."""
        if self.cache.marked is not None:
            raise _not_taken(*self.cache.marked)
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise AuleError(
                "AULE_ERROR_NO_GRADIENT",
                "[AuleCache] expected keys that need no gradient, got some; use torch.no_grad(), or train without it",
            )
        self.cache.marked = self.number, models.calls()
        if self.cache.rank and key_states.shape[1::2] == (1, self.cache.rank) and value_states.shape[1] == 1:
            models.expect_latents(Latents(self.cache, self.number, key_states, value_states))
            return key_states, value_states
        marked = key_states.view_as(key_states)  # a new object, so that only it is marked
        marked.aule_pages = (self.cache, self.number)
        return marked, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name in earlier versions


def _layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer; refuse layers that keep something else than keys of all tokens or of a window."""
    try:
        from transformers.cache_utils import get_layer_types_and_kwargs
    except ImportError:  # earlier versions
        kinds = getattr(config, "layer_types", None) or []
    else:
        kinds = get_layer_types_and_kwargs(config)[0]
    other = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if other:
        names = ", ".join("shared or no keys" if kind == "dummy" else kind for kind in other)
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[AuleCache] expected layers of full or sliding attention, got {type(config).__name__} with layers of "
            f"{names}; use a DynamicCache",
        )
    return list(kinds)


def _not_taken(layer: int, calls: int) -> AuleError:
    """Return the error for keys of a layer that attention did not take; ``calls`` of it were made before."""
    if models.calls() > calls:
        return AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[AuleCache] expected attention to get the keys of layer {layer} as they were cached, got others; a model "
            "that changes them after it has cached them needs a DynamicCache",
        )
    return AuleError(
        "AULE_ERROR_UNSUPPORTED",
        f"[AuleCache] expected aule's attention to take the keys of layer {layer}, got none; load the model with "
        "attn_implementation='aule' and call aule.integrations.transformers.register()",
    )
