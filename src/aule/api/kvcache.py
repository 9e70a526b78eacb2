"""KVCache: keys and values of many sequences in pages of one pool, for decoding."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import numpy as np
import numpy.typing as npt

from aule import settings
from aule.api.decode import cascade_attention, flash_attention_paged
from aule.api.mla import mla_decode
from aule.api.names import refuses_unknown, unknown_option
from aule.api.types import A, Array, CacheKeywords, Tables
from aule.backends import registry
from aule.dtypes import KERNEL_NAMES, dtype_name, either
from aule.engine.kvcache import writer
from aule.engine.memory import reports_shortage
from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends import without_torch
from aule.ops.attention.checks import MAX_HEAD_DIM
from aule.ops.decode.validate import LAYOUTS, MAX_PAGE
from aule.ops.kvcache.pages import Append, PageTable
from aule.ops.kvcache.problem import QUANTISED
from aule.ops.rope.tables import rope_tables
from aule.ops.shared.checks import checked_choice, checked_flag, checked_integer
from aule.view import ITEMSIZE

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DTYPES = ("float32", "float16", "bfloat16")
_NAMES = ("k_cache", "v_cache", "k_scale", "v_scale")
_LATENT_OPTIONS = {"scale", "causal", "k_scale", "v_scale", "return_lse", "out", "backend"}
"""Options of `attend` that `mla_decode` serves."""
_DERIVED = ("_front", "_pools", "_written", "_lock", "_known")


class Pool(NamedTuple):
    """The arrays of one layer, as `aule.flash_attention_paged` takes them; scales are None unless it is quantised."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class KVCache:
    """Keys and values of many sequences, in pages.

    A sequence is a number, which `allocate` and `fork` return. Its tokens lie in pages of ``page_size`` from one pool,
    taken as tokens are appended and returned when no sequence uses them any more. Forked sequences share their common
    pages; the first of them to write into a shared page gets a copy of it (copy-on-write).

    With several layers, the pages of a token are taken once, when the first layer appends it. Each layer has its own
    arrays and its own count of tokens, so layers may be appended to one after the other.

    Methods are thread-safe and atomic, except for the attention of `attend`: sequences that it reads must not be
    truncated or freed before it is done. On a GPU, work goes to the current stream; the caller orders several streams.
    A copy (`copy.deepcopy`, or pickled) has its own arrays and the same sequences.

    Parameters
    ----------
    num_pages : int
        Pages of the pool, which is allocated at once.
    heads_kv, head_dim : int
        Shape of a token's keys.
    page_size : int
        Tokens of a page, 1 to 256.
    dtype : str or dtype
        float32, float16 or bfloat16, in any spelling: that of the keys and values, and of the queries.
    layers : int
        Layers of the model.
    value_dim : int, optional
        Dimension of the values; default ``head_dim``.
    latent : bool
        The values are the first ``value_dim`` columns of the keys, as in multi-head latent attention: only keys are
        stored, of one head, and `append` takes no values.
    layout : {"NHD", "HND"}
        ``[pages, page, heads_kv, dim]`` or ``[pages, heads_kv, page, dim]``.
    quantize : {"int8", "fp8"}, optional
        Store bytes (fp8 is float8_e4m3fn), and a float32 scale per token and head; attention applies the scales as it
        reads.
    device : torch device, optional
        Where the pool's tensors are: the CPU, a CUDA device or Apple's GPU. None: NumPy arrays.
    backend : str, optional
        Backend of attention, as for `aule.flash_attention`; default: the device of the tensors, and the CPU for those
        in host memory.

    Attributes
    ----------
    page_bytes : int
        Bytes of a page in all layers.

    Examples
    --------
    >>> cache = KVCache(256, heads_kv=8, head_dim=64)  # dtype="bfloat16", device="cuda" ...
    >>> seq = cache.allocate()
    >>> k = v = np.ones((5, 8, 64), np.float32)  # [tokens, heads_kv, head_dim]
    >>> cache.append(seq, k, v)
    >>> q = np.ones((1, 32, 1, 64), np.float32)  # [sequences, heads_q, tokens, head_dim]
    >>> out = cache.attend(q, [seq])  # as q
    """

    @refuses_unknown
    def __init__(
        self,
        num_pages: int,
        heads_kv: int,
        head_dim: int,
        *,
        page_size: int = 16,
        dtype: object = "float32",
        layers: int = 1,
        value_dim: int | None = None,
        latent: bool = False,
        layout: Literal["NHD", "HND"] = "NHD",
        quantize: object = None,
        device: Any = None,
        backend: str | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            raise unknown_option(KVCache.__init__, unknown, "KVCache")
        value_dim = head_dim if value_dim is None else value_dim
        limits = {
            "num_pages": (num_pages, 1 << 31),
            "heads_kv": (heads_kv, 1 << 16),
            "head_dim": (head_dim, MAX_HEAD_DIM),
            "value_dim": (value_dim, MAX_HEAD_DIM),
            "page_size": (page_size, MAX_PAGE),
            "layers": (layers, 1 << 16),
        }
        for name, (number, most) in limits.items():
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not 1 <= number <= most:
                raise InvalidArgumentError(
                    f"[KVCache] expected {name} as an int from 1 to {most}, got {number!r}; pass one of these"
                )
        num_pages, heads_kv, head_dim, value_dim, page_size, layers = (int(number) for number, _ in limits.values())
        if num_pages * page_size >= 1 << 31:
            raise InvalidArgumentError(
                f"[KVCache] expected less than 2**31 tokens, got {num_pages} pages of {page_size}; make several caches"
            )
        self.latent = checked_flag("KVCache", "latent", latent)
        if self.latent and (heads_kv != 1 or value_dim > head_dim):
            raise InvalidArgumentError(
                f"[KVCache] expected one key head and value_dim of at most head_dim with latent=True, got {heads_kv} "
                f"heads and {value_dim} of {head_dim}; the values are the first columns of the keys"
            )
        name = dtype_name(dtype) or ""
        if name not in _DTYPES:
            raise InvalidDtypeError(f"[KVCache] expected dtype {either(_DTYPES)}, got {dtype!r}; choose one")
        checked_choice("KVCache", "layout", layout, tuple(LAYOUTS), "it is the order of the pool's axes")
        if quantize is not None:
            quantize = _quantisation(quantize)
        self.num_pages, self.page_size, self.layers = num_pages, page_size, layers
        self.heads_kv, self.head_dim, self.value_dim = heads_kv, head_dim, value_dim
        self.dtype, self.layout, self.quantize, self.device, self.backend = name, layout, quantize, device, backend
        self._front = _front(device)
        if backend is not None and (device is None or str(device) == "cpu"):
            registry.find(backend)  # a missing backend is refused now
        stored = KERNEL_NAMES[name] if quantize is None else QUANTISED[quantize][0]
        order = (page_size, heads_kv) if layout == "NHD" else (heads_kv, page_size)
        rows = (layers, num_pages, *order)
        dims = {"k": head_dim} if self.latent else {"k": head_dim, "v": value_dim}
        self._arrays = {f"{x}_cache": self._front.empty((*rows, dim), stored, device) for x, dim in dims.items()}
        if device is not None:
            self.device = self._arrays["k_cache"].device  # with its index, even if the current device changes
        if quantize is not None:
            self._arrays |= {f"{x}_scale": self._front.empty(rows, "f32", device) for x in dims}
        scale_bytes = 0 if quantize is None else 4 * len(dims)
        token_bytes = layers * heads_kv * (sum(dims.values()) * ITEMSIZE[stored] + scale_bytes)
        self.page_bytes = page_size * token_bytes
        self._pages = PageTable(num_pages, page_size, layers, self.page_bytes)
        self._derive()

    def _derive(self) -> None:
        """Make what a copy does not take along: views, the lock, and arrays that the layers of a step share."""
        stored = [{name: array[layer] for name, array in self._arrays.items()} for layer in range(self.layers)]
        self._written = [_pages_first(arrays, self.layout) for arrays in stored]
        for arrays in stored if self.latent else ():
            arrays["v_cache"] = arrays["k_cache"][..., : self.value_dim]
            if self.quantize is not None:
                arrays["v_scale"] = arrays["k_scale"]
        self._pools = [Pool(*(arrays.get(name) for name in _NAMES)) for arrays in stored]
        self._lock = threading.RLock()
        self._known: dict[str, tuple[Any, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: x for name, x in vars(self).items() if name not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._front = _front(self.device)
        self._derive()

    # -- sequences ---------------------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """A new, empty sequence; it takes no page before its first token."""
        with self._lock:
            return self._pages.allocate()

    def fork(self, seq: int) -> int:
        """A new sequence with the tokens of another, on the same pages; nothing is copied."""
        with self._lock:
            return self._pages.fork(seq)

    def free(self, seq: int) -> None:
        """Forget a sequence, and return the pages that no other sequence has. Its number is never reused."""
        with self._lock:
            self._pages.free(seq)

    def truncate(self, seq: int, length: int) -> None:
        """Forget the tokens from ``length`` on, in all layers, as after a wrong guess in speculative decoding."""
        with self._lock:
            self._pages.truncate(seq, length)

    def length(self, seq: int, layer: int = 0) -> int:
        """The number of tokens of a sequence in a layer."""
        with self._lock:
            return self._pages.length(seq, self._layer("length", layer))

    @property
    def sequences(self) -> tuple[int, ...]:
        """All sequences that are not freed."""
        with self._lock:
            return self._pages.sequences

    @property
    def pages_free(self) -> int:
        """Number of unused pages."""
        with self._lock:
            return self._pages.pages_free

    @property
    def pages_in_use(self) -> int:
        """Number of pages in use; shared pages count once."""
        return self.num_pages - self.pages_free

    # -- arrays ------------------------------------------------------------------------------------------------------

    def pool(self, layer: int = 0) -> Pool:
        """The arrays of a layer, not copies: writing to them changes the cache."""
        return self._pools[self._layer("pool", layer)]

    @reports_shortage
    def block_tables(self, seqs: int | Sequence[int]) -> Any:
        """Pages of each sequence in order: int32 ``[len(seqs), pages of the longest]``, on the pool's device.

        The result must not be written to.
        """
        wanted = _sequences(seqs)
        with self._lock:
            key = (wanted, self._pages.version)
            return self._remembered("tables", key, lambda: self._pages.table(wanted))

    @reports_shortage
    def context_lens(self, seqs: int | Sequence[int], layer: int = 0) -> Any:
        """Tokens of each sequence: int32 ``[len(seqs)]``, on the pool's device. Must not be written to."""
        with self._lock:
            lengths = self._pages.lengths(_sequences(seqs), self._layer("context_lens", layer))
            return self._remembered("lens", lengths, lambda: np.array(lengths, np.int32))

    def shared_pages(self, seqs: int | Sequence[int], layer: int = 0) -> int:
        """The number of full pages that all of the sequences share at their start."""
        with self._lock:
            return self._pages.shared(_sequences(seqs), self._layer("shared_pages", layer))

    # -- tokens ------------------------------------------------------------------------------------------------------

    @reports_shortage
    def append(
        self,
        seqs: int | Sequence[int],
        k: Array,
        v: Array | None = None,
        layer: int = 0,
        rope: Tables | None = None,
        *,
        lengths: Sequence[int] | None = None,
        interleaved: bool = False,
    ) -> None:
        """Append tokens to sequences: one launch for all of them, and one before it where shared pages are copied.

        Parameters
        ----------
        seqs : int or sequence of int
            Each once.
        k, v : array
            ``[tokens, heads_kv, dim]``: the new tokens of all sequences, concatenated; or ``[len(seqs), heads_kv,
            tokens, dim]``. Any strides, on the pool's device. No ``v`` if the cache is latent.
        layer : int
            The layer that they belong to.
        rope : (cos, sin), optional
            ``[positions, rotary_dim / 2]`` each: rotate k by the angles of each token's position in its sequence.
            ``rotary_dim`` may be less than ``head_dim``; the rest of a row stays.
        lengths : sequence of int, optional
            New tokens of each sequence. Not needed for one sequence or one token each. Of ``[len(seqs), heads_kv,
            tokens, dim]`` the last ones count; those before are padding.
        interleaved : bool
            Rotate elements 2i and 2i + 1 together, instead of i and i + rotary_dim / 2.

        Raises
        ------
        CacheFullError
            There are not enough pages. After any error the cache is unchanged.
        """
        wanted, at = _sequences(seqs), self._layer("append", layer)
        interleaved = checked_flag("KVCache.append", "interleaved", interleaved)
        if (v is None) != self.latent:
            raise InvalidArgumentError(
                "[KVCache.append] expected no v for a latent cache, got one; its values are the first columns of k"
                if self.latent
                else "[KVCache.append] expected v, got none; only a cache with latent=True has no values of its own"
            )
        rows_k, rows_v, counts = self._rows(wanted, k, k if v is None else v, lengths)
        arrays = {"k": rows_k, **self._written[at], **_angles(rope)}
        if v is not None:
            arrays["v"] = rows_v
        with self._lock:
            planned = self._pages.plan_append(wanted, counts, at)
            _check_positions("append", rope, max(map(sum, zip(planned.starts, counts, strict=True)), default=0))
            each = rows_k.shape[1]
            key = (wanted, planned.starts, planned.counts, planned.version, each)
            arrays["places"] = self._remembered("places", key, lambda: self._places(planned, rows_k.shape[0], each))
            try:
                if planned.copies:
                    pairs = np.array(planned.copies, np.int32)
                    self._front.copy_pages(self._arrays, pairs, backend=self.backend)
                self._front.write("KVCache.append", arrays, interleaved=interleaved, backend=self.backend)
            except BaseException:
                del self._known["places"]  # the version of the failed append is reused
                raise
            self._pages.commit(planned)

    @overload
    def attend(
        self,
        q: A,
        seqs: int | Sequence[int],
        layer: int = ...,
        rope: Tables | None = ...,
        *,
        interleaved: bool = ...,
        cascade: bool = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[CacheKeywords],
    ) -> A: ...
    @overload
    def attend(
        self,
        q: A,
        seqs: int | Sequence[int],
        layer: int = ...,
        rope: Tables | None = ...,
        *,
        interleaved: bool = ...,
        cascade: bool = ...,
        return_lse: Literal[True],
        **options: Unpack[CacheKeywords],
    ) -> tuple[A, A]: ...
    @overload
    def attend(
        self,
        q: A,
        seqs: int | Sequence[int],
        layer: int = ...,
        rope: Tables | None = ...,
        *,
        interleaved: bool = ...,
        cascade: bool = ...,
        return_lse: bool,
        **options: Unpack[CacheKeywords],
    ) -> A | tuple[A, A]: ...
    @reports_shortage
    def attend(
        self,
        q: Any,
        seqs: int | Sequence[int],
        layer: int = 0,
        rope: Tables | None = None,
        *,
        interleaved: bool = False,
        cascade: bool = False,
        **options: Any,
    ) -> Any:
        """Attention of the newest tokens, which were appended before, over their sequences.

        Parameters
        ----------
        q : array
            ``[len(seqs), heads_q, tokens, head_dim]``, ``[len(seqs), heads_q, head_dim]``, or packed with
            ``cu_seqlens_q``, as for `aule.flash_attention_paged`.
        rope : (cos, sin), optional
            Rotate q as `append` rotates k; not for packed queries.
        cascade : bool
            Read the pages that all sequences share at their start only once: see `aule.cascade_attention`.
        **options
            Every other option of `aule.flash_attention_paged`.

        Returns
        -------
        array or (array, array)
            As `aule.flash_attention_paged` returns it.
        """
        wanted, at = _sequences(seqs), self._layer("attend", layer)
        cascade = checked_flag("KVCache.attend", "cascade", cascade)
        interleaved = checked_flag("KVCache.attend", "interleaved", interleaved)
        self._check_queries(q, wanted, options)
        options.setdefault("backend", self.backend or self._host_backend())
        with self._lock:
            lengths = self._pages.lengths(wanted, at, "attend")
            tables, lens = self.block_tables(wanted), self.context_lens(wanted, at)
            shared = self._pages.shared(wanted, at) if cascade else 0
        # Other threads may write from here on, but never to a page of these sequences.
        if rope is not None:
            q = self._rotated(q, lengths, rope, interleaved, options)
        pool = self.pool(at)
        if self.quantize is not None:
            options |= {"k_scale": pool.k_scale, "v_scale": pool.v_scale}
        if self.latent and not cascade and options.keys() <= _LATENT_OPTIONS:
            return self._attend_latent(q, pool, tables, lens, options)
        options["layout"] = self.layout
        if cascade:
            before = self._before_all(q, lengths, options)
            return cascade_attention(q, pool.k, pool.v, tables, lens, shared_pages=min(shared, before), **options)
        return flash_attention_paged(q, pool.k, pool.v, tables, lens, **options)

    def _attend_latent(self, q: Any, pool: Pool, tables: Any, lens: Any, options: dict[str, Any]) -> Any:
        """`aule.mla_decode`, which reads the cache once for keys and values."""
        head = (slice(None), slice(None), 0) if self.layout == "NHD" else (slice(None), 0)
        options = {name: x for name, x in options.items() if name not in ("k_scale", "v_scale")}
        scale, kv_scale = options.pop("scale", None), None if pool.k_scale is None else pool.k_scale[head]
        given = {"scale": scale, "kv_scale": kv_scale, "value_dim": self.value_dim, **options}
        return mla_decode(q, pool.k[head], tables, lens, **given)

    # -- checks and helpers ------------------------------------------------------------------------------------------

    def _layer(self, op: str, layer: int) -> int:
        number = layer if type(layer) is int else checked_integer(f"KVCache.{op}", "layer", layer, "count from 0")
        if not 0 <= number < self.layers:
            raise InvalidArgumentError(
                f"[KVCache.{op}] expected a layer from 0 to {self.layers - 1}, got {layer!r}; layers= of the cache is "
                "their number"
            )
        return number

    def _check_queries(self, q: Any, seqs: tuple[int, ...], options: dict[str, Any]) -> None:
        for name in ("block_tables", "context_lens", "layout", "k_scale", "v_scale"):
            if name in options:
                raise InvalidArgumentError(f"[KVCache.attend] expected no {name}, got one; the cache has its own")
        self._require_own_kind("attend", "q", q)
        packed = options.get("cu_seqlens_q") is not None
        if q.ndim not in ((3,) if packed else (3, 4)) or not (packed or q.shape[0] == len(seqs)):
            form = "[tokens, heads_q, head_dim]" if packed else f"[{len(seqs)}, heads_q, tokens or none, head_dim]"
            raise InvalidShapeError(
                f"[KVCache.attend] expected q of {form} for {len(seqs)} sequences, got {list(q.shape)}; give each "
                "sequence its queries"
            )

    def _require_own_kind(self, op: str, name: str, array: Any) -> None:
        if not self._front.accepts(array):
            raise InvalidDtypeError(
                f"[KVCache.{op}] expected {name} to be an array like those of the cache, got {type(array).__name__}; "
                "convert it, or make the cache with another device="
            )

    def _rows(
        self, seqs: tuple[int, ...], k: Any, v: Any, lengths: Sequence[int] | None
    ) -> tuple[Any, Any, tuple[int, ...]]:
        """New tokens as ``[batch, tokens, heads, dim]``, and how many each sequence gets."""
        for name, array in (("k", k), ("v", v)):
            self._require_own_kind("append", name, array)
            if array.ndim not in (3, 4) or array.ndim != k.ndim:
                names, shapes = ("k", [k]) if self.latent else ("k and v", [k, v])
                raise InvalidShapeError(
                    f"[KVCache.append] expected {names} of [tokens, heads_kv, dim] or [sequences, heads_kv, tokens, "
                    f"dim], got {' and '.join(str(list(x.shape)) for x in shapes)}; add the missing axes of length 1"
                )
        given = None if lengths is None else _integers("append", "lengths", lengths)
        if k.ndim == 4:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            each = k.shape[1]
            counts = (each,) * len(seqs) if given is None else given
            fits = k.shape[0] == len(seqs) and min(counts, default=0) >= 0 and max(counts, default=0) <= each
        else:
            k, v = k[None], v[None]
            tokens = k.shape[1]
            counts = given if given is not None else (tokens,) if len(seqs) == 1 else (1,) * len(seqs)
            fits = sum(counts) == tokens and min(counts, default=0) >= 0
        if not fits or len(counts) != len(seqs):
            raise InvalidShapeError(
                f"[KVCache.append] expected new tokens of {len(seqs)} sequences with lengths {list(counts)}, got k of "
                f"{list(k.shape)} as [sequences, tokens, heads_kv, dim]; give each sequence's number as lengths="
            )
        return k, v, counts

    def _places(self, planned: Append, batch: int, each: int) -> npt.NDArray[np.int32]:
        places = self._pages.places(planned)
        if places.shape[1] == batch * each:
            return places
        padded = np.full((2, batch, each), -1, np.int32)  # -1: tokens that are not stored
        done = 0
        for row, count in enumerate(planned.counts):
            padded[:, row, each - count :] = places[:, done : done + count]
            done += count
        return padded.reshape(2, -1)

    def _remembered(self, name: str, key: Any, make: Any) -> Any:
        """An array that all layers of a step use: made and copied to the device once."""
        known = self._known.get(name)
        if known is None or known[0] != key:
            known = self._known[name] = (key, self._front.integers(make(), self.device))
        return known[1]

    def _host_backend(self) -> str | None:
        """The CPU for a pool in host memory: any other device would need a copy of it for each call."""
        if settings.backend() or str(self.device or "cpu") != "cpu":
            return None
        return "numpy" if writer(None) is None else "cpu"

    def _rotated(
        self, q: Any, lengths: tuple[int, ...], rope: tuple[Any, Any], interleaved: bool, options: dict[str, Any]
    ) -> Any:
        if options.get("cu_seqlens_q") is not None:
            raise InvalidArgumentError(
                "[KVCache.attend] expected no rope with packed queries, got one; rotate q before"
            )
        batch, rows = q.shape[0], 1 if q.ndim == 3 else q.shape[2]
        _check_positions("attend", rope, max(lengths, default=0))
        positions = np.array(lengths, np.int32)[:, None] - rows + np.arange(rows, dtype=np.int32)
        places = np.stack([np.arange(batch * rows, dtype=np.int32), positions.reshape(-1)])
        return rotate("KVCache.attend", q, self._front.integers(places, self.device), rope, interleaved, self.backend)

    def _before_all(self, q: Any, lengths: tuple[int, ...], options: dict[str, Any]) -> int:
        """How many pages are before the first query of every sequence."""
        offsets = options.get("cu_seqlens_q")
        if offsets is None:
            rows = [1 if q.ndim == 3 else q.shape[2]] * len(lengths)
        elif getattr(offsets, "shape", None) == (len(lengths) + 1,):
            rows = np.diff(offsets.tolist()).tolist()
        else:
            return 0  # attention refuses it
        first = min((length - n for length, n in zip(lengths, rows, strict=True)), default=0)
        return max(first // self.page_size, 0)

    def __repr__(self) -> str:
        return (
            f"KVCache({self.pages_in_use} of {self.num_pages} pages of {self.page_size}, {len(self.sequences)} "
            f"sequences, {self.layers} layers, {self.quantize or self.dtype}, {self.device or 'host'})"
        )


def rotate(op: str, x: Any, places: Any, rope: tuple[Any, Any], interleaved: bool, backend: str | None = None) -> Any:
    """Rotate rows ``[batch, heads, tokens, dim]``, or ``[batch, heads, dim]``, by the angles of their positions.

    Parameters
    ----------
    op : str
        The public function, for messages.
    places : int32 array
        ``[2, batch * tokens]``: the numbers from 0 on, and the position of each token.
    """
    front = _front(None if isinstance(x, np.ndarray) else x.device)
    four = x[:, :, None] if x.ndim == 3 else x
    out = front.new(four)
    arrays = {"k": four.swapaxes(1, 2), "k_cache": out.swapaxes(1, 2), "places": places, **_angles(rope)}
    front.write(op, arrays, interleaved=interleaved, backend=backend)
    return out[:, :, 0] if x.ndim == 3 else out


def _pages_first(arrays: dict[str, Any], layout: str) -> dict[str, Any]:
    """The arrays of a layer by name, as ``[pages, page, heads, ...]``."""
    return {name: array if layout == "NHD" else array.swapaxes(1, 2) for name, array in arrays.items()}


def _check_positions(op: str, rope: tuple[Any, Any] | None, needed: int) -> None:
    """Refuse tables with too few positions; kernels would use the last angle instead."""
    if rope is None:
        return
    cos, _ = rope_tables(f"KVCache.{op}", rope)
    shape = getattr(cos, "shape", ())
    if not shape or shape[0] < needed:
        got = f"shape {list(shape)}" if shape else type(cos).__name__
        raise InvalidShapeError(
            f"[KVCache.{op}] expected cos and sin of at least {needed} positions, got {got}; compute more"
        )


def _angles(rope: tuple[Any, Any] | None) -> dict[str, Any]:
    if rope is None:
        return {}
    cos, sin = rope_tables("KVCache", rope)
    return {"cos": cos, "sin": sin}


def _sequences(seqs: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seqs, int | np.integer) and not isinstance(seqs, bool):
        return (int(seqs),)
    return _integers("append, attend ...", "seqs", seqs)


def _integers(op: str, name: str, given: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise InvalidArgumentError(
            f"[KVCache.{op}] expected {name} as a sequence of integers, got {given!r}; pass a list"
        ) from None


def _quantisation(given: object) -> str:
    """Return the name of a quantised cache's elements."""
    name = dtype_name(given)
    found = next((known for known in QUANTISED if dtype_name(known) == name), None)
    if found is None:
        raise InvalidArgumentError(
            f"[KVCache] expected quantize 'int8' or 'fp8', got {given!r}; pass None to store as dtype says"
        )
    return found


def _front(device: Any) -> ModuleType:
    if device is None:
        from aule.frontends import numpy_kvcache

        return numpy_kvcache
    try:
        from aule.frontends.torch import kvcache
    except ModuleNotFoundError as error:
        raise without_torch("KVCache", error) from None
    return kvcache
