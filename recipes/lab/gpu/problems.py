"""Queries, keys and values whose share of empty tiles is known, and how large that share is."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_entmax.ops.triton_gpu.blocks import Arguments, attention_blocks, on_support

from .setting import Setting

#: Tokens of a batch, and model width: as in training.
TOKENS, WIDTH = 32768, 1024


def make(batch: int, heads: int, length: int, head_dim: int, sharpness: float, device: str) -> list[Tensor]:
    """Scores that vary slowly along the sequence, so that whole tiles fall off the support: bfloat16, with gradients."""
    generator = torch.Generator(device).manual_seed(0)
    position = torch.arange(length, device=device)[:, None] / 512

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    frequency, phase = draw(batch, heads, 1, head_dim), 6.2832 * draw(batch, heads, 1, head_dim)
    wave = 1.4142 * torch.cos(frequency * position + phase)
    query, key = (wave + 0.5 * draw(*wave.shape) for _ in range(2))
    return [t.to(torch.bfloat16).requires_grad_() for t in (query * sharpness, key, draw(*wave.shape))]


def random(batch: int, heads: int, length: int, head_dim: int, device: str) -> list[Tensor]:
    """Scores like those of random weights, deviation 0.3: rows are dense."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, heads, length, head_dim)
    query, key, value = (torch.randn(shape, generator=generator, device=device) for _ in range(3))
    return [t.to(torch.bfloat16).requires_grad_() for t in (query * 0.3, key, value)]


def empty_share(tensors: list[Tensor], alpha: Tensor) -> float:
    """Share of the tiles within the causal limit that carry no weight."""
    from hf_entmax.ops.triton_gpu.launch import attention_forward

    query = tensors[0]
    scale = query.shape[-1] ** -0.5
    arguments = Arguments(*tensors, alpha, None, None, None, None, 0.0, True, 0, 0.0, scale, 0.0)
    with torch.no_grad():
        flags = attention_forward(arguments, False, True, False)[4]
    blocks = attention_blocks(query.shape[2], query.shape[3], query.shape[3], query.dtype)
    tiles = on_support(flags, -(-query.shape[2] // blocks.cols))
    row, col = (torch.arange(n, device=query.device) for n in tiles.shape[2:])
    reachable = col[None] * blocks.cols <= row[:, None] * blocks.rows + blocks.rows - 1
    return 1 - float(tiles.sum() / (reachable.sum() * tiles.shape[0] * tiles.shape[1]))


def problem(
    length: int, head_dim: int, wanted: float | None, setting: Setting
) -> tuple[tuple[int, int, int, int], list[Tensor], Tensor, float]:
    """Shape (B, H, length, D), tensors, alphas and share of empty tiles of a problem.

    Args:
        length: of the sequences.
        head_dim: D.
        wanted: share of empty tiles to come close to, by bisection; None for rows as from random weights.
        setting: tiny or not.
    """
    heads = 1 if setting.tiny else WIDTH // head_dim
    shape = (1 if setting.tiny else max(1, TOKENS // length), heads, length, head_dim)
    alpha = torch.linspace(1.3, 1.9, heads, device=setting.device).requires_grad_()
    tensors = random(*shape, setting.device)
    if wanted is not None:
        low, high = 0.0, 64.0
        for _ in range(8 if length > 64 else 0):
            middle = (low + high) / 2
            if empty_share(make(*shape, middle, setting.device), alpha) < wanted:
                low = middle
            else:
                high = middle
        tensors = make(*shape, high, setting.device)
    return shape, tensors, alpha, empty_share(tensors, alpha)
