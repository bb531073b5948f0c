r"""A few bits of every key: what bounds on its scores are computed from.

Keys are cut into pages. Every channel ``d`` of a page is quantised between its smallest and its largest value,

.. math:: k_{id} \approx \mathrm{low}_d + \mathrm{code}_{id} \, \mathrm{step}_d, \qquad
          |k_{id} - \mathrm{low}_d - \mathrm{code}_{id} \, \mathrm{step}_d| \le \mathrm{step}_d / 2.

``low`` and ``step`` are kept in float16, rounded outward, so that this holds for the numbers that are stored.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from hf_entmax.ops.sketch_format import LANES, PLANES
from hf_entmax.ops.solve import compute_dtype

_LARGEST_PAGE = 128
# Relative and absolute rounding of float16, twice.
_COARSE, _TINY = 2.0**-10, 6e-8
# Entries of keys that are quantised at a time, so that temporaries stay small.
_CHUNK = 1 << 18


@dataclasses.dataclass(eq=False)
class KeySketch:
    """Codes of the keys of one attention layer, for whole pages of keys; it grows beside the cache of the keys.

    Make one by `allocate` or `sketch_keys`. Within a page codes lie as ``[planes][P / 16, chunks, 16 keys, 4]`` bytes: a chunk
    holds ``32 / bits`` channels of sixteen keys, and bits ``bits * f`` onwards of byte ``j`` belong to channel
    ``4 (f + fields * chunk) + j`` of it, with ``fields = 8 / bits``. A code of 6 bits is one of 4 (a first plane) times
    4, plus one of 2 (a second plane).

    Attributes:
        codes: uint8 ``[B, H_kv, pages, P * D16 * bits / 8]``; ``D16`` is the head dimension rounded up to 16.
        low: float16 ``[B, H_kv, pages, D16]``: the value of code 0, at or below the smallest of its channel and page.
        step: float16 ``[B, H_kv, pages, D16]``: what a code is multiplied by, above 0.
        norm: float32 ``[B, H_kv, pages]``: at least the Euclidean norm of the channels' largest magnitudes; ``inf`` for a
            page that float16 cannot hold, or with NaN or infinite keys: nothing can be proved of it.
        bits: per channel, 2, 4, 6 or 8.
        page_size: keys of a page, P: a multiple of 16 from 16 to 128.
        head_dim: D.
        dtype: of the keys.
        length: number of keys in the sketch, whole pages.
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    norm: Tensor
    bits: int
    page_size: int
    head_dim: int
    dtype: torch.dtype
    length: int = 0

    @classmethod
    def allocate(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        bits: int = 4,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> KeySketch:
        """Make an empty sketch.

        Args:
            batch: B.
            kv_heads: H_kv.
            head_dim: D.
            capacity: number of keys there is room for at first; the room doubles when it is used up.
            bits: per channel, 2, 4, 6 or 8.
            page_size: keys of a page, a multiple of 16 from 16 to 128.
            dtype: of the keys that are going to be sketched.
            device: where they are.

        Raises:
            TypeError: if ``dtype`` is no floating type.
            ValueError: if a number is not allowed.
        """
        if not hasattr(bits, "__index__") or bits not in PLANES:
            raise ValueError(f"bits is {bits!r}, but must be one of {', '.join(map(str, PLANES))}.")
        if not hasattr(page_size, "__index__") or page_size not in range(LANES, _LARGEST_PAGE + 1, LANES):
            raise ValueError(f"page_size is {page_size!r}, but must be a multiple of {LANES} up to {_LARGEST_PAGE}.")
        if not dtype.is_floating_point:
            raise TypeError(f"dtype is {dtype}, but keys are floating tensors.")
        sizes = {"batch": (batch, 0), "kv_heads": (kv_heads, 1), "head_dim": (head_dim, 1), "capacity": (capacity, 0)}
        for name, (size, least) in sizes.items():
            if size < least:
                raise ValueError(f"{name} is {size}, but must be at least {least}.")
        depth = -(-head_dim // LANES) * LANES
        shape = (batch, kv_heads, max(1, -(-capacity // page_size)))
        # Ordinary tensors even under inference mode, here and below: it may grow without it.
        with torch.inference_mode(False):
            return cls(
                torch.empty(*shape, page_size * depth * bits // 8, dtype=torch.uint8, device=device),
                torch.empty(*shape, depth, dtype=torch.float16, device=device),
                torch.empty(*shape, depth, dtype=torch.float16, device=device),
                torch.empty(shape, dtype=torch.float32, device=device),
                bits,
                page_size,
                head_dim,
                dtype,
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is held, room for further keys included."""
        return sum(t.nbytes for t in self._tensors())

    @property
    def pages(self) -> int:
        """The number of pages in the sketch."""
        return self.length // self.page_size

    def extend(self, key: Tensor, length: int) -> None:
        """Sketch the whole pages among the first ``length`` keys that are not sketched yet.

        Time is constant per key: nothing that was sketched before is looked at, and the room doubles when it is used up.

        Args:
            key: ``[B, H_kv, T, D]`` with ``T >= length``, any strides: all keys, those sketched before included.
            length: number of keys in use.

        Raises:
            TypeError: if ``key`` has another dtype than the keys before.
            ValueError: if it has another shape or is on another device, or ``length`` does not fit.
        """
        self.check(key)
        if not self.length <= length <= key.shape[2]:
            raise ValueError(
                f"length is {length}, but must lie between the {self.length} keys that are sketched already (crop the "
                f"sketch first if keys were dropped) and the {key.shape[2]} that key holds."
            )
        pages = length // self.page_size
        if pages > self.norm.shape[2]:
            self._grow(max(pages, 2 * self.norm.shape[2]))
        at_once = self.pages_at_once
        for first in range(self.pages, pages, at_once):
            last = min(first + at_once, pages)
            self.put(key[:, :, first * self.page_size : last * self.page_size], slice(first, last))
        self.length = pages * self.page_size

    @property
    def pages_at_once(self) -> int:
        """How many pages to quantise at a time, so that temporaries stay small."""
        return max(1, _CHUNK // max(1, self.norm.shape[0] * self.norm.shape[1] * self.page_size * self.head_dim))

    def put(self, key: Tensor, places: slice | Tensor) -> None:
        """Sketch whole pages of keys ``[B, H_kv, n * P, D]``, in any ``n`` places that there is room for; the length stays."""
        for kept, fresh in zip(self._tensors(), self._quantise(key.detach()), strict=True):
            kept[:, :, places] = fresh

    def select(self, places: Tensor) -> KeySketch:
        """Make a sketch of the pages in some places, int64 ``[n]``, one after the other."""
        parts = [t.index_select(2, places) for t in self._tensors()]
        return dataclasses.replace(
            self, **dict(zip(("codes", "low", "step", "norm"), parts, strict=True)), length=len(places) * self.page_size
        )

    def reorder(self, index: Tensor) -> None:
        """Take the sequences ``index``, int64 ``[n]``, in the place of the present ones, as a beam search does."""
        with torch.inference_mode(False):
            kept = [t.index_select(0, index.to(t.device)) for t in self._tensors()]
        self.codes, self.low, self.step, self.norm = kept

    def crop(self, length: int) -> None:
        """Forget all keys from ``length`` on; a page that is cut is forgotten wholly, to be sketched again once it is full.

        Raises:
            ValueError: if ``length`` is negative.
        """
        if length < 0:
            raise ValueError(f"length is {length}, but must be at least 0.")
        self.length = min(self.length, length // self.page_size * self.page_size)

    def check(self, key: Tensor) -> None:
        """Raise TypeError or ValueError if ``key`` cannot be what is sketched here: its shape, dtype, device and length."""
        if key.dim() != 4:
            raise ValueError(f"key has shape {tuple(key.shape)}, but must have four dimensions [B, H_kv, T, D].")
        mine, given = (*self.norm.shape[:2], self.head_dim), (*key.shape[:2], key.shape[3])
        if mine != given:
            raise ValueError(f"key has [B, H_kv, D] = {given}, but the sketch was made for {mine}.")
        if key.dtype != self.dtype:
            raise TypeError(f"key is {key.dtype}, but the sketch was made for {self.dtype}.")
        if key.device != self.norm.device:
            raise ValueError(f"key is on {key.device}, but the sketch is on {self.norm.device}.")
        if key.shape[2] < self.length:
            raise ValueError(f"key holds {key.shape[2]} keys, but the sketch {self.length}; crop the sketch as well.")

    def unpack(self) -> Tensor:
        """Return the codes ``[B, H_kv, pages, P, D16]``, uint8."""
        batch, kv_heads, _, _ = self.codes.shape
        depth, pages, size = self.low.shape[-1], self.pages, self.page_size
        code, start = self.codes.new_zeros(batch, kv_heads, pages, size, depth), 0
        for width, shift in PLANES[self.bits]:
            stop = start + size * depth * width // 8
            plane = self.codes[:, :, :pages, start:stop]
            plane = plane.reshape(batch, kv_heads, pages, size // LANES, depth * width // 32, LANES, 1, 4)
            moves = torch.arange(0, 8, width, dtype=torch.uint8, device=code.device)[:, None]
            plane = (plane >> moves) & (2**width - 1)  # [..., blocks, chunks, lanes, fields, 4]
            code += plane.transpose(-4, -3).reshape(code.shape) << shift
            start = stop
        return code

    def _quantise(self, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute codes, low, step and norm of whole pages of keys ``[B, H_kv, n * P, D]``."""
        levels = 2**self.bits - 1
        key = key.to(compute_dtype(key.dtype)).unflatten(2, (-1, self.page_size))
        key = torch.nn.functional.pad(key, (0, self.low.shape[-1] - self.head_dim))
        smallest, largest = key.amin(-2), key.amax(-2)
        low = (smallest - smallest.abs() * _COARSE - _TINY).half()
        step = ((largest - low) * ((1 + _COARSE) / levels) + _TINY).half()
        # NaN and infinity spoil both, as does what float16 cannot hold.
        good = (low.isfinite() & step.isfinite()).all(-1)
        low, step = (torch.where(good[..., None], t, 1).half() for t in (low, step))
        code = (key - low[..., None, :].to(key.dtype)).div_(step[..., None, :].to(key.dtype)).round_().clamp_(0, levels)
        code = code.masked_fill_(~good[..., None, None], 0).to(torch.uint8)
        extreme = torch.maximum(low.float().abs(), (low.float() + levels * step.float()).abs())
        norm = torch.where(good, torch.linalg.vector_norm(extreme, dim=-1) * (1 + 1e-5), math.inf)
        return self._pack(code), low, step, norm

    def _pack(self, code: Tensor) -> Tensor:
        parts = []
        for width, shift in PLANES[self.bits]:
            fields = 8 // width
            plane = (code >> shift) & (2**width - 1)
            plane = plane.unflatten(-1, (-1, fields, 4)).unflatten(
                -4, (-1, LANES)
            )  # [..., blocks, lanes, chunks, fields, 4]
            packed = plane[..., 0, :]
            for field in range(1, fields):
                packed = packed.add(plane[..., field, :], alpha=2 ** (width * field))
            parts.append(packed.transpose(-3, -2).flatten(-4))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.codes, self.low, self.step, self.norm

    def _grow(self, pages: int) -> None:
        used, grown = self.pages, []
        with torch.inference_mode(False):
            for old in self._tensors():
                new = old.new_empty(*old.shape[:2], pages, *old.shape[3:])
                new[:, :, :used] = old[:, :, :used]
                grown.append(new)
        self.codes, self.low, self.step, self.norm = grown


def sketch_keys(key: Tensor, bits: int = 4, page_size: int = 64) -> KeySketch:
    """Sketch all whole pages of ``key`` ``[B, H_kv, T, D]``; arguments and errors as of `KeySketch.allocate`."""
    if key.dim() != 4:
        raise ValueError(f"key has shape {tuple(key.shape)}, but must have four dimensions [B, H_kv, T, D].")
    batch, kv_heads, length, head_dim = key.shape
    sketch = KeySketch.allocate(
        batch, kv_heads, head_dim, length, bits=bits, page_size=page_size, dtype=key.dtype, device=key.device
    )
    sketch.extend(key, length)
    return sketch


def suggested_bits(alpha: float | Tensor) -> int:
    """Return the number of bits with which least is read: the nearer alpha comes to 1, the more keys lie close to the threshold.

    Args:
        alpha: of all heads that share a sketch.
    """
    return 4 if float(torch.as_tensor(alpha).double().mean()) >= 1.12 else 6
