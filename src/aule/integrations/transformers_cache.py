"""A cache for transformers whose keys and values lie in the pages of an `aule.KVCache`.

With ``attn_implementation="aule"`` a model attends to the pages themselves: nothing is concatenated as a sequence
grows, padding takes no room, and beams share what they have in common. ``generate(past_key_values=AuleCache(config,
num_pages=256))`` is all it takes. Whoever schedules batches themselves puts an `AuleCache` over a pool and whatever
sequences a step has, of different lengths, prompts and single tokens mixed: see ``examples/serve_tiny.py``.

transformers hands a layer's new keys to the cache first and to attention then, and only attention knows which of them
are padding. So `update` marks them, and `AuleCache.attend`, which `attention_forward` calls for marked keys, appends
them and attends. Keys that never get there, because another attention function was chosen, are an error at the next
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from aule.errors import AuleError, InvalidArgumentError, InvalidShapeError
from aule.frontends.torch_sdpa import host_backend
from aule.kvcache import KVCache

__all__ = ["AuleCache"]


class AuleCache(Cache):  # type: ignore[misc]
    """Keys and values of a model in pages.

    Parameters
    ----------
    config : PreTrainedConfig
        The model's, or that of its text part; it says how many layers there are.
    num_pages : int
        Pages of the pool. It is made at the first step, where the model's keys are and of their type.
    page_size : int
        Tokens of a page, 1 to 256.
    quantize : {"int8", "fp8"}, optional
        Store bytes, and a scale for each token and head.

    Attributes
    ----------
    pool : KVCache or None
        The pages, once there are any.
    sequences : list of int
        Which sequence of the pool each row of the batch is.
    """

    def __init__(self, config: Any, num_pages: int, *, page_size: int = 16, quantize: str | None = None) -> None:
        self._options = {"num_pages": num_pages, "page_size": page_size, "quantize": quantize}
        self._start(config.get_text_config(decoder=True).num_hidden_layers)

    @classmethod
    def over(cls, pool: KVCache, sequences: Sequence[int], lengths: Sequence[int] | None = None) -> AuleCache:
        """A cache of sequences that a pool has already, for one step or many.

        Parameters
        ----------
        lengths : sequence of int, optional
            With these the step is packed: the batch has one row, in which the new tokens of all sequences, so many of
            each, follow each other. The caller gives the model their ``position_ids``.
        """
        if lengths is not None and len(lengths) != len(sequences):
            raise InvalidArgumentError(
                f"[AuleCache] expected a length for each of {len(sequences)} sequences, got {len(lengths)}; 0 for none"
            )
        made = cls.__new__(cls)
        made._start(pool.layers)
        made.pool, made.sequences = pool, list(sequences)
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
        self._pads: list[int] = []  # padding before each sequence, which is not in the pages
        self._lengths: tuple[int, ...] | None = None
        self._offsets: Any = None
        self._checked: list[Any] = []

    # -- what attention does -----------------------------------------------------------------------------------------

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
        """Append a layer's new keys and values, and attend to all there are.

        Parameters
        ----------
        query, key, value : Tensor
            ``[batch, heads, seq, head_dim]``, of the new tokens.
        mask : Tensor, optional
            What transformers made of padding: boolean ``[batch, 1, seq_q, seq_kv]``. Any other is refused.

        Returns
        -------
        Tensor
            ``[batch, seq, heads, head_dim]``.
        """
        found = self.layers[layer]
        found.waiting = False
        pool = self._pool(key, value)
        window = None if sliding_window is None else (sliding_window - 1, 0)
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        options["backend"] = host_backend(query)
        batch, heads, rows, _ = query.shape
        out = query.new_empty(batch, rows, heads, value.shape[3])
        if self._lengths is not None:
            if batch != 1 or rows != sum(self._lengths):
                raise InvalidShapeError(
                    f"[AuleCache] expected one row of {sum(self._lengths)} tokens, got {batch} of {rows}; put the "
                    "sequences behind each other"
                )
            rows_k, rows_v = key[0].transpose(0, 1), value[0].transpose(0, 1)
            pool.append(self.sequences, rows_k, rows_v, layer, lengths=self._lengths)
            if self._offsets is None:
                self._offsets = torch.tensor([0, *accumulate(self._lengths)], dtype=torch.int32, device=query.device)
            options |= {"cu_seqlens_q": self._offsets, "max_seqlen_q": max(self._lengths, default=0)}
            pool.attend(query[0].transpose(0, 1), self.sequences, layer, out=out[0], **options)
            return out
        seen = found.seen
        if mask is not None:
            self._check(mask, seen, sliding_window)
        # Padding is before a sequence: of the first step, or of the first few, only what is behind it is kept.
        counts = [max(rows - max(pad - seen, 0), 0) for pad in self._pads]
        pool.append(self.sequences, key, value, layer, lengths=counts)
        found.seen += rows  # only now: a step for which there was no room can be made again
        pool.attend(query, self.sequences, layer, out=out.transpose(1, 2), **options)
        return out

    def _pool(self, key: Any, value: Any) -> KVCache:
        """The pool, made for the first keys; each row of the batch is a sequence of its own."""
        if self.pool is None:
            self.pool = KVCache(
                heads_kv=key.shape[1],
                head_dim=key.shape[3],
                value_dim=value.shape[3],
                dtype=key.dtype,
                layers=len(self.layers),
                device=key.device,
                **self._options,  # type: ignore[arg-type]
            )
        if not self.sequences:
            self.sequences = [self.pool.allocate() for _ in range(key.shape[0])]
            self._pads = [0] * len(self.sequences)
        return self.pool

    def _check(self, mask: Any, seen: int, sliding_window: int | None) -> None:
        """Learn the padding from a first mask, and refuse masks that say more than padding, causality and a window."""
        if any(known is mask for known in self._checked):  # the layers of a step have one, or one of each kind
            return
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
                "DynamicCache",
            )
        self._pads = pads
        self._checked = [*self._checked[-1:], mask]

    # -- what transformers asks of a cache ---------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen, padding included; 0 where a step is packed: its positions are given."""
        return int(self.layers[layer_idx].get_seq_length())

    def reorder_cache(self, beam_idx: Any) -> None:
        """Each row becomes that of another beam. Nothing is copied before one of them writes."""
        self._become([int(i) for i in beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row several times."""
        self._become([i for i in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """Only some of the rows."""
        self._become(torch.arange(len(self.sequences), device="cpu")[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
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
        """Free all sequences; the pool stays."""
        self._become([])
        for layer in self.layers:
            layer.seen, layer.waiting = 0, False

    def _become(self, rows: list[int]) -> None:
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
    """What transformers asks one layer; its keys and values are in the pool."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: AuleCache, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number
        self.seen = 0
        self.waiting = False

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing: `AuleCache.attend` makes the pool."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Mark new keys, so that attention appends them."""
        if self.waiting:
            raise AuleError(
                "AULE_ERROR_UNSUPPORTED",
                "[AuleCache] expected attention to take the keys of the step before, got none; load the model with "
                "attn_implementation='aule' and call aule.integrations.transformers.register()",
            )
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise AuleError(
                "AULE_ERROR_NO_GRADIENT",
                "[AuleCache] expected keys that need no gradient, got some; use torch.no_grad(), or train without it",
            )
        self.waiting = True
        marked = key_states.view_as(key_states)  # the mark is this object's alone
        marked.aule_pages = (self.cache, self.number)
        return marked, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name that earlier versions ask for
