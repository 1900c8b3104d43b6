"""Packed attention on a GPU: flash kernels, or one call of plain torch over padded rows.

Flash kernels for rows of any length (Dao 2023) take memory that is linear in the tokens. Rows are padded if none of
them can run: the reference (`attention_spec.py`) computes row by row and reads the row boundaries back from the GPU,
padded rows need no number from there. Their dropout masks are the same as on every other path of whet.
"""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from whet.errors import ConfigError
from whet.kernels.attention_spec import AttentionSpec, Bias, products_by_distance, unseen_at
from whet.kernels.batch_position import Drop, Kernel, kept_in_pass
from whet.kernels.dropout import drawing_from
from whet.kernels.operator import rounded, wide
from whet.kernels.random import attention_bits_of_rows, keep_threshold
from whet.log import logger
from whet.on_host import sent
from whet.optional import require

Path = Literal["torch", "package", "padded"]
"""torch: torch's flash kernels. package: flash-attn's. padded: rows padded for one call of plain torch."""
_HALF = (torch.float16, torch.bfloat16)
_WIDEST, _WIDTH_STEP = 256, 8
_AMPERE = (8, 0)
_NAMES: dict[Path, str] = {
    "torch": "torch's flash kernels for rows of any length",
    "package": "the flash-attn package's kernels for rows of any length",
    "padded": "rows padded for one call of torch",
}
_MOST_WEIGHTS = 1 << 25
"""Attention weights computed at a time under dropout: their random words take 8 bytes each."""


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return softmax(q k^T scale + b) v (N, H, K) within each row; k and v (N, G, K) may have fewer heads.

    `bias` is b, as in `packed_attention.attend`; flash kernels have none.
    Under autocast, float32 is computed in autocast's format, as in torch's own attention. Raises ConfigError if
    flash_attention_2 was requested and its kernels cannot run.
    """
    q, k, v = (_as_in_autocast(tensor) for tensor in (q, k, v))
    dropping = spec.drop is not None and spec.drop.p > 0.0
    asked = Call(q.dtype, q.shape[-1], dropping, biased=bias is not None)
    path = choose(spec.kernel, asked, have(q.device))
    tell(path, dropping=dropping)
    if path == "padded":
        return attend_padded(q, k, v, spec, bias)
    return attend_flash(q, k, v, spec, package=path == "package")


def _as_in_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if x.dtype != torch.float32 or not torch.amp.is_autocast_available(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@dataclass(frozen=True)
class Have:
    """The flash kernels that a device can run."""

    torch: bool = False
    package: bool = False


@dataclass(frozen=True)
class Call:
    """The properties of a call of attention that decide."""

    dtype: torch.dtype
    width: int
    """Width of a head."""
    dropping: bool
    """Whether attention weights are dropped."""
    biased: bool = False
    """Whether a bias by distance is added to the scores."""

    @property
    def fits(self) -> bool:
        """Whether flash kernels support it."""
        return not self.biased and self.dtype in _HALF and self.width % _WIDTH_STEP == 0 and self.width <= _WIDEST


def choose(kernel: Kernel, call: Call, have: Have) -> Path:
    """Return the path of this call; ConfigError if flash_attention_2 was requested and cannot run.

    whet's dropout masks are a function of every weight's position, and no flash kernel takes a mask: with whet's masks,
    rows are padded. flash_attention_2 runs the flash-attn package if it is installed.
    """
    if kernel == "flash_attention_2" and not (call.fits and (have.torch or have.package)):
        raise _no_flash(call)
    if not call.fits or (kernel == "whet" and call.dropping):
        return "padded"
    if have.package and (kernel == "flash_attention_2" or not have.torch):
        return "package"
    return "torch" if have.torch else "padded"


@cache
def have(device: torch.device) -> Have:
    """Return what this device can run: NVIDIA GPUs since Ampere, depending on torch's build and installed packages."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < _AMPERE:
        return Have()
    package = importlib.util.find_spec("flash_attn") is not None
    return Have(torch.backends.cuda.is_flash_attention_available(), package)


@cache
def tell(path: Path, *, dropping: bool) -> None:
    """Log once which code computes attention, and what that means for its dropout."""
    if not dropping:
        logger.info("attention: %s", _NAMES[path])
    elif path != "padded":
        logger.info(
            "attention: %s draw their own dropout masks, which depend on the split into micro-batches "
            "(--attn_implementation whet keeps whet's masks, which no split changes, and is slower)",
            _NAMES[path],
        )


def _no_flash(call: Call) -> ConfigError:
    dtype = str(call.dtype).removeprefix("torch.")
    return ConfigError(
        what="flash_attention_2 cannot compute this model's attention",
        got=f"{dtype}, heads of width {call.width}{', a bias by distance' if call.biased else ''}",
        why=f"its kernels take float16 and bfloat16, and widths that are multiples of {_WIDTH_STEP} up to {_WIDEST}, "
        "and add no bias to the scores",
        fix="leave --attn_implementation out" + ("" if call.biased else ", or use --bf16 if the dtype is float32"),
    )


@dataclass(frozen=True)
class _FlashRows:
    starts: Tensor
    key_starts: Tensor
    max_seqlen: int
    p: float


def attend_flash(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, package: bool = False) -> Tensor:
    """Return softmax(q k^T scale) v (N, H, K) within each row, in float16 or bfloat16.

    The kernel draws its dropout mask from the device's generator, which is set for this call from (seed, step, site,
    first row) and restored afterwards. A recomputation or a resumed run gets the same mask; another split into
    micro-batches does not. The kernels store p in 8 bits: the kept part differs from 1 - p by up to 1/256.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    drop = spec.drop if spec.drop is not None and spec.drop.p > 0.0 else None
    max_seqlen = spec.cu_seqlens.diff().max() if spec.max_seqlen is None else spec.max_seqlen
    starts = spec.cu_seqlens.to(q.device)
    key_starts = starts
    if (counts := spec.key_counts) is not None:
        keys = kept_in_pass(counts, lambda: _Keys.of(starts, counts, len(q)))
        (k, v), key_starts = _KeysAlone.apply(k, v, keys), keys.starts  # pyright: ignore[reportGeneralTypeIssues]
    rows = _FlashRows(starts, key_starts, int(max_seqlen), 0.0 if drop is None else drop.p)
    with drawing_from(drop, q.device):
        return (_by_package if package else _by_torch)(q, k, v, rows, spec)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, rows: _FlashRows, spec: AttentionSpec) -> Tensor:
    # torch.nn.attention.varlen runs this operator too, but has no dropout; it has a gradient of its own.
    forward = torch.ops.aten._flash_attention_forward
    lengths = (rows.starts, rows.key_starts, rows.max_seqlen, rows.max_seqlen)
    reach = -1 if spec.window is None else spec.window
    window = {"window_size_left": reach, "window_size_right": 0 if spec.causal else reach}
    options = {} if spec.window is None else window
    return forward(q, k, v, *lengths, rows.p, spec.causal, False, scale=spec.scale, **options)[0]


def _by_package(q: Tensor, k: Tensor, v: Tensor, rows: _FlashRows, spec: AttentionSpec) -> Tensor:
    found = require("flash_attn", needed_for="--attn_implementation flash_attention_2", install="flash-attn")
    return found.flash_attn_varlen_func(
        q,
        k,
        v,
        rows.starts,
        rows.key_starts,
        rows.max_seqlen,
        rows.max_seqlen,
        dropout_p=rows.p,
        softmax_scale=spec.scale,
        causal=spec.causal,
        window_size=(-1, -1) if spec.window is None else (spec.window, spec.window),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


@dataclass(frozen=True)
class _Keys:
    """Which tokens are keys, those of all rows end to end; the others are only queries."""

    places: Tensor
    """(M,) int64: the token of each key. Behind the last key, where the GPU alone knows how many there are, any."""
    numbers: Tensor
    """(N,) int64: the key of each token; 0 for a token that is none."""
    is_key: Tensor
    """(N, 1, 1) bool."""
    starts: Tensor
    """(rows + 1,) int32: where the keys of each row begin."""

    @classmethod
    def of(cls, starts: Tensor, counts: Tensor, n_tokens: int) -> "_Keys":
        n_keys = int(counts.sum()) if _is_on_host(counts) else n_tokens
        counts = sent(counts, starts.device) if _is_on_host(counts) else counts
        key_starts = functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        token = torch.arange(n_tokens, device=starts.device, dtype=torch.int32)
        key = token[:n_keys]
        row = torch.searchsorted(key_starts[1:], key, right=True).clamp_max(len(counts) - 1)
        places = (key + (starts[:-1] - key_starts[:-1])[row]).clamp_max(n_tokens - 1)
        row = torch.searchsorted(starts[1:], token, right=True).clamp_max(len(counts) - 1)
        rank = token - starts[row]
        is_key = rank < counts[row]
        numbers = torch.where(is_key, key_starts[row] + rank, 0)
        return cls(places.long(), numbers.long(), is_key[:, None, None], key_starts)


def _is_on_host(counts: Tensor) -> bool:
    return counts.device.type == "cpu"


class _KeysAlone(Function):
    """Keys and values (N, G, K) without the tokens that are only queries; each token is at most one key."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, keys: _Keys) -> tuple[Tensor, Tensor]:
        ctx.keys = keys
        return k.index_select(0, keys.places), v.index_select(0, keys.places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Flash kernels leave the gradients behind the last key unwritten: they may be anything."""
        keys: _Keys = ctx.keys
        return (*(torch.where(keys.is_key, one.index_select(0, keys.numbers), 0) for one in grads), None)


@dataclass(frozen=True)
class _PaddedRows:
    """The positions of the tokens (N,) in the padded form (rows, T)."""

    lengths: Tensor
    key_counts: Tensor
    max_seqlen: int
    places: Tensor

    def padded(self, x: Tensor) -> Tensor:
        """Return (N, H, K) as (rows, H, T, K), with zeros in the padding."""
        n_rows = len(self.lengths)
        flat = x.new_zeros(n_rows * self.max_seqlen, *x.shape[1:]).index_copy(0, self.places, x)
        return flat.unflatten(0, (n_rows, self.max_seqlen)).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """Return (rows, H, T, K) as (N, H, K)."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)

    def seen(self, spec: AttentionSpec) -> Tensor:
        """Return the keys that a query attends to, (rows, 1, 1 or T, T).

        Without a window, padded queries have some too.
        """
        at = torch.arange(self.max_seqlen, device=self.lengths.device)
        own = (at < self.key_counts[:, None])[:, None, None]
        limited = spec.causal or spec.window is not None
        return own & ~unseen_at(at - at[:, None], spec) if limited else own

    def biases(self, bias: Bias, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the biases (1 or rows, H, T, T) of padded queries and keys (rows, H, T, K)."""
        at = torch.arange(self.max_seqlen, device=q.device)
        distance = at - at[:, None]
        if isinstance(bias, Tensor):
            return wide(bias)[None, :, distance + bias.shape[1] // 2]
        with _without_autocast(q.device.type):  # as for the scores
            return products_by_distance(q, k, bias, distance) * scale


def attend_padded(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return softmax(q k^T scale + b) v (N, H, K) within each row; k and v (N, G, K) may have fewer heads.

    `bias` is b, as in `packed_attention.attend`; memory then grows with the square of the longest
    row. With dropout, memory grows with rows times that square; without either, as in torch's own attention.
    """
    rows = _rows_of(spec, len(q), q.device)
    group = q.shape[1] // k.shape[1]
    padded = [rows.padded(t) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    seen = rows.seen(spec)
    blind = ~seen.any(-1, keepdim=True)  # such a query sees all keys at first: a softmax over none has no gradient
    mask = seen | blind
    if bias is not None:
        mask = torch.where(mask, rows.biases(bias, padded[0], padded[1], spec.scale), -torch.inf)
    if spec.drop is None or spec.drop.p == 0.0:
        mask = mask.to(q.dtype) if mask.is_floating_point() else mask
        found = functional.scaled_dot_product_attention(*padded, attn_mask=mask, scale=spec.scale)
    else:
        found = _dropped(padded, mask, spec.scale, spec.drop)
    return rows.packed(found if spec.window is None else found.masked_fill(blind, 0.0))


def _rows_of(spec: AttentionSpec, n_tokens: int, device: torch.device) -> _PaddedRows:
    starts = spec.cu_seqlens.to(device).long()
    lengths = starts.diff()
    max_seqlen = int(lengths.max() if spec.max_seqlen is None else spec.max_seqlen)
    row = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=n_tokens)
    places = torch.arange(n_tokens, device=device) - starts[row] + row * max_seqlen
    counts = lengths if spec.key_counts is None else spec.key_counts.to(device, non_blocking=True)
    return _PaddedRows(lengths, counts, max_seqlen, places)


def _dropped(qkv: list[Tensor], mask: Tensor, scale: float, drop: Drop) -> Tensor:
    """Return the attention of padded rows with whet's masks, some rows at a time.

    `mask` is true where a key is seen, or what to add to the scores.
    """
    n_heads, max_seqlen = qkv[0].shape[1:3]
    n_rows = max(1, _MOST_WEIGHTS // (n_heads * max_seqlen * max_seqlen))
    slots = drop.position.row_slots.to(mask.device, non_blocking=True)[: len(mask)]
    parts = zip(*(t.split(n_rows) for t in (*qkv, mask, slots)), strict=True)
    return torch.cat([_textbook(part, scale, drop) for part in parts])


def _textbook(part: tuple[Tensor, ...], scale: float, drop: Drop) -> Tensor:
    q, k, v, mask, slots = part
    with _without_autocast(q.device.type):  # scores in half precision would be too inexact
        scores = wide(q) @ wide(k).transpose(-1, -2) * scale
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        bits = attention_bits_of_rows(drop.key, slots, *weights.shape[1:])
        kept = weights * (bits >= keep_threshold(drop.p)) * rounded(drop.keep_scale)
        return (kept @ wide(v)).to(q.dtype)


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
