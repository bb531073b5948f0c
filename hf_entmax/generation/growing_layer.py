"""Keys and values of one attention layer in buffers with room to grow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_entmax.integration.interface import hand_out

# Room of the first buffer beyond its keys; after that, half as many again as there are.
_ROOM = 64


class GrowingLayer(DynamicLayer):
    """Keys ``[B, H_kv, T, D]`` and values ``[B, H_kv, T, D_v]`` of one attention layer.

    Appending copies the new keys alone; the buffers grow by half, so that a token costs constant time on the average.
    The keys that `update` returns are views of the buffer that name this layer.

    Args:
        name: for errors.
        max_cache_len: tokens to make room for once and for all, or None.
        sliding_window: keys that a query of this layer sees at most, None for all; only these are kept.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, name: str, max_cache_len: int | None = None, sliding_window: int | None = None) -> None:
        self.name, self.max_cache_len, self.sliding_window = name, max_cache_len, sliding_window
        self.is_sliding = sliding_window is not None
        self.reset()

    def reset(self) -> None:
        """Forget all keys, and that past ones were to be kept."""
        self.is_initialized = self.record_past = False
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        # Of the buffer, the keys from `_first` to `_end` are handed out. `_total` tokens were seen, `_before` the last ones.
        self._first = self._end = self._total = self._before = 0
        # Where the past is recorded: the first key of the buffer that `crop` may need.
        self._recorded = 0

    def _restarted(self) -> None:
        """Take note that keys were moved to other places of the buffer."""

    # Transformers' layers hold these as attributes; models read them (cross-attention, once it is filled).
    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """``[B, H_kv, T, D]``, a view, or None before the first `update`."""
        return None if self._key is None else hand_out(self._key[:, :, self._first : self._end], self)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """``[B, H_kv, T, D_v]``, a view, or None before the first `update`."""
        return None if self._value is None else self._value[:, :, self._first : self._end]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the first buffers, of the shape, dtype and device of what is to be stored."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        length = key_states.shape[-2] if self.max_cache_len is None else self.max_cache_len
        self._allocate(key_states, value_states, min(length, self.sliding_window or length))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys ``[B, H_kv, T, D]`` and values ``[B, H_kv, T, D_v]``; return all that the new queries may see.

        Raises:
            ValueError: if they do not fit what is stored, exceed ``max_cache_len``, or carry gradients.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        new = key_states.shape[-2]
        self._before = self._total
        window = self.sliding_window
        if window is not None and new >= window and not self.record_past:
            return self._pass_by(key_states, value_states)
        self._reserve(new)
        assert self._key is not None and self._value is not None
        self._key[:, :, self._end : self._end + new] = key_states.detach()
        self._value[:, :, self._end : self._end + new] = value_states.detach()
        self._end += new
        self._total += new
        if window is not None:
            self._first = max(0, self._end - (window - 1 + new))
        return self.keys, self.values  # type: ignore[return-value]

    def _pass_by(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append a prompt longer than the window: its queries need all of it, later ones only its end."""
        kept = min(self._end, self.sliding_window - 1)  # type: ignore[operator]
        span = slice(self._end - kept, self._end)
        key = torch.cat([self._key[:, :, span], key_states.detach()], -2)  # type: ignore[index]
        value = torch.cat([self._value[:, :, span], value_states.detach()], -2)  # type: ignore[index]
        self._total += key_states.shape[-2]
        self._first, self._end = 0, min(key.shape[-2], self.sliding_window - 1)  # type: ignore[operator]
        self._restarted()
        self._allocate(key, value, self._end)
        if self._end:
            self._key[:, :, : self._end] = key[:, :, -self._end :]  # type: ignore[index]
            self._value[:, :, : self._end] = value[:, :, -self._end :]  # type: ignore[index]
        return hand_out(key, self), value

    def _check(self, key: Tensor, value: Tensor) -> None:
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError(
                f"Layer {self.name} of ExactSparseCache was given keys that carry gradients, which it does not keep: call "
                "the model under torch.no_grad(), or train without a cache (use_cache=False)."
            )
        for kind, given, held in (("keys", key, self._key), ("values", value, self._value)):
            assert held is not None
            if (given.dtype, given.device) != (held.dtype, held.device):
                raise ValueError(
                    f"Layer {self.name} of ExactSparseCache holds {kind} of {held.dtype} on {held.device} and was given "
                    f"{given.dtype} on {given.device}: a cache goes with one model of one dtype. Make a new one, or "
                    "call cache.reset()."
                )
            if (*given.shape[:2], given.shape[3]) != (*held.shape[:2], held.shape[3]):
                raise ValueError(
                    f"Layer {self.name} of ExactSparseCache holds {kind} of [B, H_kv, D] = "
                    f"{[*held.shape[:2], held.shape[3]]} and was given {[*given.shape[:2], given.shape[3]]}: the cache "
                    "was filled by another model or batch. Make a new one, or call cache.reset()."
                )

    def _reserve(self, new: int) -> None:
        """Make room for ``new`` more keys."""
        limit = self.max_cache_len
        if limit is not None and self.sliding_window is None and self._end + new > limit:
            raise ValueError(
                f"Layer {self.name} of ExactSparseCache holds {self._end} keys and was given {new} more, but was made with "
                f"max_cache_len={limit}: give a larger one, or None to let it grow."
            )
        key, value = self._key, self._value
        assert key is not None and value is not None
        if self._end + new <= key.shape[2]:
            return
        start = self._window_start()
        if self.record_past:
            start = min(start, self._recorded)
        kept = self._end - start
        self._allocate(key, value, kept + new)
        self._key[:, :, :kept] = key[:, :, start : self._end]  # type: ignore[index]
        self._value[:, :, :kept] = value[:, :, start : self._end]  # type: ignore[index]
        if start:
            self._end, self._recorded = kept, 0
            self._restarted()

    def _window_start(self) -> int:
        """Return the first key of the buffer that the next token may see."""
        return 0 if self.sliding_window is None else max(0, self._end - self.sliding_window + 1)

    def _allocate(self, key: Tensor, value: Tensor, length: int) -> None:
        room = 0 if self.max_cache_len and not self.is_sliding else max(_ROOM, length // 2)
        # Ordinary tensors even under inference mode: generation may go on without it.
        with torch.inference_mode(False):
            self._key, self._value = (
                torch.empty((*t.shape[:2], length + room, t.shape[3]), dtype=t.dtype, device=t.device)
                for t in (key, value)
            )

    def holds(self, key: Tensor) -> bool:
        """Check whether these are the keys that the buffer handed out last."""
        held = self._key
        return (
            held is not None
            and key.shape[2] == self._end - self._first
            and key.data_ptr() == held[:, :, self._first :].data_ptr()
            and key.stride() == held.stride()
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number and first position of the keys that the next ``query_length`` queries are given."""
        window = self._total if self.sliding_window is None else self.sliding_window - 1
        kept = min(self._total, window)
        return kept + query_length, self._total - kept

    def get_seq_length(self) -> int:
        """Count the tokens seen so far."""
        return self._total

    def get_max_length(self) -> int:
        """Return ``max_cache_len``, the window of a sliding layer, or -1 where there is no limit."""
        return self.sliding_window or self.max_cache_len or -1

    def activate_past_recording(self) -> None:
        """Keep what has left the window from one `crop` to the next, so that tokens can be taken back (assisted decoding)."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens, at any place of a page; all others are there to stay."""
        left = self._total + tokens_to_remove
        if tokens_to_remove > 0 or left < 0:
            raise ValueError(
                f"crop({tokens_to_remove}) on layer {self.name} of ExactSparseCache, which holds {self._total} tokens: give "
                f"minus the number of tokens to take back, from -{self._total} to 0."
            )
        if not self.is_initialized:
            return
        end = self._end + tokens_to_remove
        if self.sliding_window is not None and end < min(left, self.sliding_window - 1):
            raise RuntimeError(
                f"crop({tokens_to_remove}) on layer {self.name} of ExactSparseCache needs keys that have left its window of "
                f"{self.sliding_window}: call cache.activate_past_recording() before they do."
            )
        self._end, self._total = end, left
        self._first = self._recorded = self._window_start()
        self._before = min(self._before, left)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``b`` become what row ``beam_idx[b]`` was; rows that stay are not touched."""
        if not self._total:
            return
        index = beam_idx.to(self.device)
        if len(index) == self._key.shape[0]:  # type: ignore[union-attr]
            moved = (index != torch.arange(len(index), device=self.device)).nonzero().flatten()
            for buffer in (self._key, self._value):
                buffer[moved, :, : self._end] = buffer[index[moved], :, : self._end]  # type: ignore[index]
        else:
            with torch.inference_mode(False):
                self._key, self._value = self._key[index], self._value[index]  # type: ignore[index]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, one after the other."""
        if self._total:
            self.reorder_cache(torch.arange(self._key.shape[0]).repeat_interleave(repeats))  # type: ignore[union-attr]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, given by number or as bool ``[B]``."""
        if self._total:
            self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)
