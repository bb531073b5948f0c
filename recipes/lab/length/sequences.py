"""Copy, reverse, sort and retrieval: decoders from scratch without positions in half of their heads and ALiBi in the others.

A sequence is what is given, a separator and the answer; the loss is that of the answer. An answer counts when all of it is
right: the greedy answer then, since each symbol is judged after the right ones before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hf_entmax.alpha import FixedAlpha, LearnedAlpha
from hf_entmax.length import AdaptiveScaling, LogScaling
from hf_entmax.ops import entmax_attention

SYMBOLS, QUERIES = 32, 4
#: Keys of retrieval, each with one of SYMBOLS values: enough for the longest test.
KEYS = 1024
SEPARATOR = SYMBOLS
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        alpha: of the attention; "learned" in (1, 2).
        scaling: "none", "log" or "adaptive", for the heads without positions.
        init: "identity" or "paper".
    """

    alpha: float | str = 1.0
    scaling: str = "none"
    init: str = "identity"


ROWS = {
    "softmax": Row(),
    "entmax 1.5": Row(1.5),
    "ASEntmax": Row(1.5, "adaptive", "paper"),
    "ASEntmax from the identity": Row(1.5, "adaptive"),
    "SSMax": Row(1.0, "log", "paper"),
    "learned alpha": Row("learned"),
    "learned alpha, log scaling": Row("learned", "log"),
    "learned alpha, adaptive scaling": Row("learned", "adaptive"),
}


def batch(task: str, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and next symbols ``[size, T]``, IGNORED where nothing is asked.

    Args:
        task: copy, reverse, sort or retrieval (pairs of key and value, then QUERIES keys, each with its value after it).
        size: B.
        length: symbols, or pairs.
        generator: of the random numbers.
    """
    values = torch.randint(SYMBOLS, (size, length), generator=generator)
    separator = torch.full((size, 1), SEPARATOR)
    if task == "retrieval":
        keys = torch.rand(size, KEYS, generator=generator).argsort(-1)[:, :length]
        asked = torch.randint(length, (size, QUERIES), generator=generator)
        given = torch.stack([keys + SEPARATOR + 1, values], -1).flatten(1)
        answer = torch.stack([keys.gather(1, asked) + SEPARATOR + 1, values.gather(1, asked)], -1).flatten(1)
    else:
        given = values
        answer = {"copy": values, "reverse": values.flip(1), "sort": values.sort(1).values}[task]
    row = torch.cat([given, separator, answer], 1)
    wanted = row[:, 1:].clone()
    wanted[:, : given.shape[1]] = IGNORED
    if task == "retrieval":
        wanted[:, given.shape[1] :: 2] = IGNORED  # which keys are asked cannot be known
    return row[:, :-1], wanted


class Attention(nn.Module):
    """Causal attention: the first half of the heads has ALiBi with slopes 1, 1/2, 1/3, ..., the others no positions."""

    def __init__(self, width: int, heads: int, row: Row) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.join = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.alpha = LearnedAlpha(heads, 1.5) if row.alpha == "learned" else FixedAlpha(heads, float(row.alpha))
        slopes = [1 / (head + 1) if head < heads // 2 else 0.0 for head in range(heads)]
        self.register_buffer("slopes", torch.tensor(slopes)[None, :, None, None])
        self.scaling: nn.Module | None = None
        free = range(heads // 2, heads)
        if row.scaling == "log":
            self.scaling = LogScaling(heads, free, row.init)
        elif row.scaling == "adaptive":
            self.scaling = AdaptiveScaling(heads, width, free, row.init)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[B, T, width]`` to the same."""
        size, length, width = hidden.shape
        query, key, value = self.project(hidden).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        place = torch.arange(length, device=hidden.device)
        if self.scaling is not None:
            query = query * self.scaling((place + 1)[None, None], hidden)[..., None]
        bias = -self.slopes * (place[:, None] - place).clamp(min=0)
        out, _ = entmax_attention(query, key, value, self.alpha(), position_bias=bias, is_causal=True)
        return self.join(out.transpose(1, 2).reshape(size, length, width))


class Decoder(nn.Module):
    """Pre-norm layers of `Attention` and a perceptron of four times the width."""

    def __init__(self, row: Row, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SEPARATOR + 1 + KEYS, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, row))
            perceptron = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
            self.layers.append(nn.ModuleDict({"attention": attention, "perceptron": nn.Sequential(*perceptron)}))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, SYMBOLS))
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, SYMBOLS]``."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer["attention"](hidden)
            hidden = hidden + layer["perceptron"](hidden)
        return self.out(hidden)

    def alphas(self) -> list[float]:
        """List the alphas of all heads."""
        with torch.no_grad():
            attentions = [layer["attention"][1] for layer in self.layers]
            return torch.cat([torch.as_tensor(own.alpha()).expand(own.heads) for own in attentions]).tolist()


def train(model: Decoder, task: str, seed: int, steps: int, size: int, longest: int, lr: float) -> float:
    """AdamW with warm-up over a tenth of the steps and a cosine to 0, lengths drawn from 1 to the longest.

    Learned alphas and scaling have no weight decay. Returns the mean loss of the last tenth of the steps.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = [p for name, p in model.named_parameters() if ".alpha." in name or ".scaling." in name]
    own = {id(p) for p in numbers}
    groups = [{"params": [p for p in model.parameters() if id(p) not in own], "weight_decay": 0.01}]
    optimizer = torch.optim.AdamW([*groups, {"params": numbers, "weight_decay": 0.0}] if numbers else groups, lr=lr)
    rises = {"total_steps": steps, "pct_start": 0.1, "anneal_strategy": "cos"}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, **rises)

    def loss() -> Tensor:
        length = int(torch.randint(2 if task == "retrieval" else 1, longest + 1, (), generator=generator))
        ids, wanted = batch(task, size, length, generator)
        return F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)

    return descend(optimizer, schedule, loss, steps)


def descend(optimizer: Optimizer, schedule: LRScheduler, loss: Callable[[], Tensor], steps: int) -> float:
    """Steps with gradients clipped to norm 1; returns the mean loss of the last tenth of them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    last = []
    for step in range(steps):
        found = loss()
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step >= steps - max(1, steps // 10):
            last.append(found.item())
    return sum(last) / len(last)


@torch.no_grad()
def exact_match(model: Decoder, task: str, length: int, samples: int, seed: int) -> float:
    """Answers that are right in every symbol, in percent."""
    generator, right, size = torch.Generator().manual_seed(2**20 + seed), 0, max(1, 2**12 // length)
    for start in range(0, samples, size):
        ids, wanted = batch(task, min(size, samples - start), length, generator)
        hits = (model(ids).argmax(-1) == wanted) | (wanted == IGNORED)
        right += int(hits.all(-1).sum())
    return 100 * right / samples
