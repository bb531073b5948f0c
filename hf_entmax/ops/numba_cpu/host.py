"""From tensors to argument records: layout of the work, storage for the support, and the launches."""

from __future__ import annotations

import math
import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_entmax.config import check_alphas
from hf_entmax.ops.sparse_rows import SparseRows

from . import layout
from .kernels import attention_solvers, kernel
from .layout import RECORD, structure
from .runtime import launch, storage
from .support import Support
from .tiles import PANEL

_Record = structure(RECORD)
# Bytes of scores that a thread holds at a time; with a panel of K and the rows' scratch this fits a 1 MiB L2 cache.
_SCORES_BYTES = 256 * 1024
_MAX_BLOCK_ROWS = 64
# With this many query rows per key head or fewer, K is read in place: packing it would cost more than it saves.
_DIRECT_ROWS = 8
# Work items per thread to aim for when there are few (batch, key head) pairs.
_ITEMS_PER_THREAD = 4
# Share of nonzero weights above which a block is kept densely and multiplied densely.
_DENSE_ABOVE = 0.3
# Support storage of the first launch: all that could be needed up to this size, else this share of it.
_SMALL_STORAGE = 4 << 20
_FIRST_SHARE = 0.04
# Share of nonzero weights up to which going through sparse rows takes less time than through dense ones.
_SPARSE_UP_TO = 0.15


class Inputs(NamedTuple):
    """The tensors of one call; the last three may be None."""

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor
    mask: Tensor | None
    bias: Tensor | None
    real_keys: Tensor | None


@dataclass(frozen=True)
class Options:
    """The arguments of attention that are not tensors."""

    is_causal: bool
    window: int  # 0: none
    softcap: float  # 0: none
    scaling: float
    dropout: float
    need_weights: bool


def as_rows(tensor: Tensor) -> Tensor:
    """Return float32 [B, heads, T, D] with a contiguous last dimension, a multiple of sixteen; copy it only where it is not that."""
    tensor = tensor.float()
    short = -tensor.shape[-1] % layout.LANES
    if short:
        return torch.nn.functional.pad(tensor, (0, short))
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def as_term(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Broadcast a mask or bias to [B, H, T_q, T_k] by zero strides, the keys contiguous."""
    if tensor.dtype != torch.bool:
        tensor = tensor.float()
    if tensor.dim() == 0 or (tensor.shape[-1] != shape[-1]):
        tensor = tensor.expand(*tensor.shape[:-1], shape[-1])
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor.expand(shape)


def key_limits(real: Tensor) -> tuple[np.ndarray, bool]:
    """Return the first and one past the last real key of every sequence, and whether every key in between is real."""
    flags = real.numpy()
    keys = flags.shape[1]
    some = flags.any(axis=1)
    low = np.where(some, flags.argmax(axis=1), 0)
    high = np.where(some, keys - flags[:, ::-1].argmax(axis=1), 0)
    limits = np.stack([low, high], axis=1).astype(np.int32)
    return limits, bool((flags.sum(axis=1) == high - low).all())


def limits_and_mask(mask: Tensor | None, real_keys: Tensor | None) -> tuple[Tensor | None, np.ndarray | None]:
    """Return the mask, with the padding where that has holes, and the limits of the real keys [B, 2], None without padding."""
    if real_keys is None:
        return mask, None
    limits, contiguous = key_limits(real_keys)
    if not contiguous:
        holes = real_keys[:, None, None, :]
        if mask is None:
            mask = holes
        elif mask.dtype == torch.bool:
            mask = mask & holes
        else:
            mask = mask.masked_fill(~holes, -torch.inf)
    return mask, limits


def set_rows(record: Any, name: str, tensor: Tensor, axes: str = "bht") -> None:
    """Write the address of a tensor and its byte strides over the first axes to a record."""
    size, stride = tensor.element_size(), tensor.stride()
    setattr(record, name, tensor.data_ptr())
    for axis, step in zip(axes, stride, strict=False):
        setattr(record, f"{name}_{axis}", size * step)


def describe(
    r: Any, tensors: tuple[Tensor, Tensor, Tensor], terms: list[Tensor | None], limits: np.ndarray | None
) -> None:
    """Write query, key and value, mask and bias as `as_term` makes them, and the limits of real keys to a record."""
    query, key, value = tensors
    for name, tensor in zip(("q", "k", "v", "mask", "bias"), (*tensors, *terms), strict=True):
        if tensor is not None:
            set_rows(r, name, tensor)
    if terms[0] is not None:
        r.mask_kind = 1 if terms[0].dtype == torch.bool else 2
    if limits is not None:
        r.key_limits = limits.ctypes.data
    r.batch, r.heads, r.queries = query.shape[:3]
    r.kv_heads, r.keys = key.shape[1:3]
    r.groups = r.heads // r.kv_heads
    r.depth_vectors, r.value_vectors = layout.vectors(query.shape[-1]), layout.vectors(value.shape[-1])


def empty_rows(like: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make an empty tensor [B, heads, T, width] that lies in memory as [B, T, heads, width], as models use it."""
    batch, heads, length = like.shape[:3]
    return like.new_empty((batch, length, heads, width), dtype=dtype).transpose(1, 2)


def _gradient_of(tensor: Tensor) -> Tensor:
    """Make an empty float32 tensor that lies in memory as ``tensor`` does: autograd copies the gradient of a leaf otherwise."""
    return torch.empty(tensor.shape) if tensor.is_contiguous() else empty_rows(tensor, tensor.shape[-1])


class Call:
    """One attention problem: the record all its kernels share."""

    def __init__(self, inputs: Inputs, seed: int, options: Options) -> None:
        batch, heads, queries, _ = inputs.query.shape
        kv_heads, keys = inputs.key.shape[1:3]
        self.query, self.key, self.value = (as_rows(tensor) for tensor in inputs[:3])
        self.options, self.threads = options, torch.get_num_threads()
        self.shape = (batch, heads, queries, keys)
        self.groups, self.kv_heads = heads // kv_heads, kv_heads
        # Everything the record points to must live as long as the launches.
        self.alpha = np.ascontiguousarray(inputs.alpha.detach().double().expand(heads).numpy())
        check_alphas(self.alpha)
        mask, self.limits = limits_and_mask(inputs.mask, inputs.real_keys)
        self.terms = [None if t is None else as_term(t.detach(), self.shape) for t in (mask, inputs.bias)]
        self.record = _Record()
        r = self.record
        describe(r, (self.query, self.key, self.value), self.terms, self.limits)
        r.alpha = self.alpha.ctypes.data
        r.causal, r.window = int(options.is_causal), options.window
        r.softcap, r.scaling = options.softcap, options.scaling
        if options.dropout > 0:
            r.seed, r.dropout_scale = seed, 1.0 / (1.0 - options.dropout)
            r.dropout_limit = max(1, round(options.dropout * 2**32))

    def _lay_out(self, chunks: int | None, block_rows: int | None) -> None:
        """Cut the rows into blocks and the blocks into items."""
        r = self.record
        batch, _, queries, keys = self.shape
        padded = -(-keys // PANEL) * PANEL
        stacked = queries < 4
        span = padded
        if self.options.window and self.options.is_causal and not stacked:
            span = min(padded, (self.options.window + _MAX_BLOCK_ROWS) // PANEL * PANEL + 2 * PANEL)
        # A spare vector, because the last store of a row may run over its end.
        span += layout.LANES
        if block_rows is None:
            rows = min(_MAX_BLOCK_ROWS, max(4, _SCORES_BYTES // (4 * span) // 4 * 4))
            block_rows = min(rows, self.groups * queries if stacked else queries)
        if stacked:
            blocks = -(-self.groups * queries // block_rows)
        else:
            blocks = self.groups * -(-queries // block_rows)
        pairs = batch * self.kv_heads
        if chunks is None:
            wanted = 1 if self.threads == 1 else -(-_ITEMS_PER_THREAD * self.threads // pairs)
            chunks = max(1, min(wanted, blocks))
        r.chunks, r.block_rows, r.blocks, r.stacked = chunks, block_rows, blocks, int(stacked)
        r.direct = int(self.groups * queries <= _DIRECT_ROWS)
        r.span, r.padded_keys = span, padded
        r.dense_above = np.inf if self.options.softcap else _DENSE_ABOVE
        self.chunks, self.block_rows, self.items = chunks, block_rows, pairs * chunks
        self.span, self.padded = span, padded

    def _launch(self, name: str, items: int, scratch: dict[str, int] | None = None) -> ctypes.Array[ctypes.c_int64]:
        return launch(kernel(name), self.record, items, self.threads, scratch)

    def forward(self, keep: bool, store_gradient: bool) -> tuple[Tensor, Tensor | None, Support | None]:
        """Return output [B, H, T_q, D_v padded] and weights in float32, and the support if it is to be kept."""
        self._lay_out(None, None)
        r = self.record
        batch, heads, queries, keys = self.shape
        out = empty_rows(self.query, self.value.shape[-1])
        weights = torch.empty(self.shape) if self.options.need_weights else None
        rows = batch * heads * queries
        row_address = torch.empty(rows, dtype=torch.int64)
        row_size, row_start = torch.empty((2, rows), dtype=torch.int32)
        progress = np.zeros(self.items, np.int64)
        solve = attention_solvers((self.alpha - 1.0).tobytes(), keep)
        r.solvers, r.solve_short_rows, r.solve_full_rows = solve.table, solve.short_rows, solve.full_rows
        set_rows(r, "out", out)
        r.weights = 0 if weights is None else weights.data_ptr()
        r.row_address, r.row_size = row_address.data_ptr(), row_size.data_ptr()
        r.row_start = row_start.data_ptr()
        r.progress = progress.ctypes.data
        r.keep, r.store_gradient = int(keep), int(store_gradient)

        block_rows = self.block_rows
        scratch = layout.forward_scratch(r.depth_vectors, self.padded, block_rows, self.span, bool(r.direct))
        r.block_bytes = block_bytes = layout.block_bytes(block_rows, keys, store_gradient)
        threads = max(1, min(self.threads, self.items))
        most = rows * keys * layout.entry_bytes(store_gradient)
        slabs: list[Tensor] = []
        if not keep:
            slab_bytes, count = block_bytes, threads
        else:
            slab_bytes = max(4 * block_bytes, min(most // threads, 1 << 18))
            first = most if most <= _SMALL_STORAGE else int(most * _FIRST_SHARE)
            # A slab is left when less than the largest possible block fits, hence the usable part.
            count = -(-first // (slab_bytes - block_bytes)) + threads
        while True:
            slabs.append(storage(count * slab_bytes))
            places = slabs[-1].data_ptr() + slab_bytes * np.arange(count, dtype=np.int64)
            r.slabs, r.n_slabs, r.slab_bytes = places.ctypes.data, count, slab_bytes
            counters = self._launch("forward", self.items, scratch)
            if not counters[3]:
                break
            count *= 2
        if not keep:
            return out, weights, None
        bases = torch.tensor([slab.data_ptr() for slab in slabs])
        support = Support(slabs, bases, row_address, row_size, row_start, self.chunks, block_rows, store_gradient)
        return out, weights, support

    def weights_of(self, support: Support) -> SparseRows | Tensor:
        """Return the weights of a forward pass without dropout, in float32, from what it kept.

        Sparse rows where few weights are nonzero, else ``[B, H, T_q, T_k]``: every entry of a sparse row costs its
        reader several times as much as one of a dense row.
        """
        r = self.record
        batch, heads, _, _ = self.shape
        r.row_address, r.row_size = support.row_address.data_ptr(), support.row_size.data_ptr()
        r.row_start = support.row_start.data_ptr()
        offsets = torch.zeros(support.row_size.shape[0] + 1, dtype=torch.int64)
        # Sizes go one place further on, so that their running sum is where each row begins.
        r.row_offsets, r.weights, r.columns = offsets[1:].data_ptr(), 0, 0
        self._launch("support_rows", batch * heads)
        torch.cumsum(offsets, 0, out=offsets)
        count = int(offsets[-1])
        if count > _SPARSE_UP_TO * math.prod(self.shape):
            weights = torch.empty(self.shape)
            r.weights = weights.data_ptr()
            self._launch("support_rows", batch * heads)
            return weights
        columns, values = torch.empty(count, dtype=torch.int32), torch.empty(count)
        r.row_offsets, r.columns, r.values = offsets.data_ptr(), columns.data_ptr(), values.data_ptr()
        if count:
            self._launch("support_rows", batch * heads)
        return SparseRows(offsets, columns, values, self.shape)

    def backward(
        self, support: Support, dout: Tensor, dweights: Tensor | None, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients wanted of query, key and value [.., D padded], float32, and of alpha [H], float64."""
        self._lay_out(support.chunks, support.block_rows)
        r = self.record
        r.store_gradient = int(support.store_gradient)
        batch, heads, _queries, _keys = self.shape
        dout = as_rows(dout)
        set_rows(r, "dout", dout)
        if dweights is not None:
            dweights = dweights.float().contiguous()
            r.dweights = dweights.data_ptr()
        r.row_address, r.row_size = support.row_address.data_ptr(), support.row_size.data_ptr()
        r.row_start = support.row_start.data_ptr()
        want_q, want_k, want_v, want_alpha = wanted[:4]
        dq = dk = dv = None
        if want_q:
            dq = _gradient_of(self.query)
            set_rows(r, "dq", dq)
        if want_k:
            dk = self._key_gradient("dk", self.key)
        if want_v:
            dv = self._key_gradient("dv", self.value)
        dalpha = np.zeros((self.chunks, batch, heads))
        r.dalpha = dalpha.ctypes.data if want_alpha else 0
        scratch = layout.backward_scratch(r.value_vectors, self.padded, self.block_rows, self.span)
        self._launch("backward", self.items, scratch)
        if self.chunks > 1:
            dk = None if dk is None else dk.sum(0)
            dv = None if dv is None else dv.sum(0)
        return dq, dk, dv, torch.from_numpy(dalpha.sum((0, 1))) if want_alpha else None

    def _key_gradient(self, name: str, tensor: Tensor) -> Tensor:
        """Make room for the gradient of keys or values, one copy for each slice of a head."""
        if self.chunks == 1:
            target = _gradient_of(tensor)
            set_rows(self.record, name, target)
            return target
        batch, kv_heads, keys, width = tensor.shape
        target = torch.empty((self.chunks, batch, kv_heads, keys, width))
        set_rows(self.record, name, target[0])
        return target

    def bias_gradient(self, support: Support, shape: tuple[int, ...]) -> Tensor:
        """Return the gradient of a term whose shape broadcasts to [B, H, T_q, T_k], from the stored gradients of the scores."""
        r = self.record
        full = (1,) * (4 - len(shape)) + tuple(shape)
        target = torch.empty(full)
        r.dbias = target.data_ptr()
        r.dbias_b, r.dbias_h, r.dbias_q, r.dbias_k = full
        self._launch("bias_gradient", full[0] * full[1] * full[2])
        return target.reshape(shape)
