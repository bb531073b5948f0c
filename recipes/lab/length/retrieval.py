"""Max retrieval: models of one head that answer the class of the item with the largest priority, all seeds at once.

The models of all seeds are trained side by side, as the heads of one attention call; they share no number. An item is
``(priority in [0, 1], one of 10 classes)``; a layer of ``WIDTH`` rectified units encodes it, one learned query attends to
the items, and two layers read the class off what was attended to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_entmax.alpha import LearnedAlpha
from hf_entmax.length import LogScaling
from hf_entmax.ops import entmax, entmax_attention

CLASSES, WIDTH, TRAINED_AT = 10, 128, 16


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        alpha: of the attention; a pair is the range of a learned alpha.
        scaling: "none"; "log" or "log-paper"; "adaptive" (beta and gamma learned, from the identity) or "gamma1" to
            "gamma4" (beta learned, gamma fixed, delta = 1).
        top: keep so many of the largest scores; 0 keeps all.
    """

    alpha: float | tuple[float, float] = 1.0
    scaling: str = "none"
    top: int = 0


ROWS = {
    "softmax": Row(),
    "entmax 1.5": Row(1.5),
    "ASEntmax, gamma 1": Row(1.5, "gamma1"),
    "SSMax": Row(1.0, "log-paper"),
    "learned alpha in (1, 2)": Row((1.0, 2.0)),
    "learned alpha in (1, 64)": Row((1.0, 64.0)),
    "learned alpha in (1, 64), log scaling": Row((1.0, 64.0), "log"),
    "learned alpha in (1, 64), adaptive scaling": Row((1.0, 64.0), "adaptive"),
    **{f"entmax {alpha}": Row(float(alpha)) for alpha in (2, 4, 16, 32, 64)},
    "top-k, k = 4": Row(top=4),
    **{f"ASEntmax, gamma {power}": Row(1.5, f"gamma{power}") for power in (2, 3, 4)},
    "SSMax from the identity": Row(1.0, "log"),
}


def adaptive_softmax(scores: Tensor) -> Tensor:
    """Apply the adaptive temperature of Velickovic et al. 2024, with their polynomial in the entropy of the row."""
    weights = scores.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1, keepdim=True)
    polynomial = torch.zeros_like(entropy)
    for coefficient in (-0.037, 0.481, -2.3, 4.917, -1.791):
        polynomial = polynomial * entropy + coefficient
    return (scores * torch.where(entropy > 0.5, polynomial.clamp(min=1), 1.0)).softmax(-1)


#: Lines that change the trained softmax models when they are tested.
AT_TEST: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax, adaptive temperature at test": adaptive_softmax,
    "softmax, temperature 0.1 at test": lambda scores: (scores / 0.1).softmax(-1),
    "softmax, temperature 0.0004 at test": lambda scores: (scores / 0.0004).softmax(-1),
}


class Retrieval(nn.Module):
    """One model for each seed.

    Args:
        row: its attention.
        seeds: of initialisation and data.
    """

    def __init__(self, row: Row, seeds: Sequence[int]) -> None:
        super().__init__()
        self.row, self.count = row, len(seeds)
        self.draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.item = self._drawn(CLASSES + 2, WIDTH)
        self.query = self._drawn(WIDTH)
        self.hidden, self.hidden_bias = self._drawn(WIDTH, WIDTH), self._drawn(1, WIDTH, fan=WIDTH)
        self.out, self.out_bias = self._drawn(WIDTH, CLASSES), self._drawn(1, CLASSES, fan=WIDTH)
        if isinstance(row.alpha, tuple):
            self.alpha = LearnedAlpha(self.count, 1.5, row.alpha)
        if row.scaling.startswith("log"):
            self.log = LogScaling(self.count, init="paper" if row.scaling == "log-paper" else "identity")
        elif row.scaling != "none":
            self.beta = nn.Parameter(torch.zeros(self.count))
            self.gamma = nn.Parameter(torch.zeros(self.count))

    def _drawn(self, *shape: int, fan: int = 0) -> nn.Parameter:
        bound = (fan or shape[0]) ** -0.5
        return nn.Parameter(torch.stack([(torch.rand(shape, generator=g) * 2 - 1) * bound for g in self.draws]))

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw items ``[S, size, length, CLASSES + 2]`` (priority, class, 1) and answers ``[S, size]``."""
        priority = torch.stack([torch.rand(size, length, generator=g) for g in self.draws])
        kinds = torch.stack([torch.randint(CLASSES, (size, length), generator=g) for g in self.draws])
        items = torch.ones(*kinds.shape, CLASSES + 2)
        items[..., 0] = priority
        items[..., 1:-1] = F.one_hot(kinds, CLASSES)
        return items, kinds.gather(-1, priority.argmax(-1, keepdim=True))[..., 0]

    def encoded(self, items: Tensor) -> Tensor:
        """Encode items to ``[S, size, length, WIDTH]``."""
        pairs = zip(items, self.item, strict=True)
        return torch.stack([F.relu(own.flatten(0, 1) @ w).view(*own.shape[:2], WIDTH) for own, w in pairs])

    def alphas(self) -> float | Tensor:
        """Return the alpha of each model ``[S]``, or one number."""
        return self.alpha() if isinstance(self.row.alpha, tuple) else self.row.alpha

    def factor(self, length: int) -> Tensor:
        """Return the factor of the scores of each model, ``[S]``."""
        scaling = self.row.scaling
        if scaling == "none":
            return torch.ones(self.count)
        if scaling.startswith("log"):
            return self.log(torch.tensor([[[length]]]))[0, :, 0]
        # The query is the same in every row, so its hidden state makes one beta and one gamma.
        beta, log_n = F.softplus(self.beta), math.log(length + 1)
        if scaling == "adaptive":
            return 1 - math.log(2) + beta * log_n ** (2 * self.gamma.tanh())
        return 1 + beta * log_n ** int(scaling[-1])

    def answers(self, attended: Tensor) -> Tensor:
        """Logits ``[S, size, CLASSES]`` from ``[S, size, WIDTH]``."""
        return F.relu(attended @ self.hidden + self.hidden_bias) @ self.out + self.out_bias

    def scores(self, encoded: Tensor) -> Tensor:
        """``[S, size, length]``."""
        query = self.query * self.factor(encoded.shape[2])[:, None] * WIDTH**-0.5
        return torch.stack([own @ one for own, one in zip(encoded, query, strict=True)])

    def weights(self, scores: Tensor) -> Tensor:
        """``[S, size, length]``."""
        if self.row.top:
            floor = scores.topk(self.row.top).values[..., -1:]
            return scores.masked_fill(scores < floor, -torch.inf).softmax(-1)
        alpha = self.alphas()
        return entmax(scores, alpha[:, None, None] if isinstance(alpha, Tensor) else alpha)

    def forward(self, items: Tensor) -> Tensor:
        """Logits ``[S, size, CLASSES]``."""
        encoded = self.encoded(items)
        if self.row.top:
            pairs = zip(self.weights(self.scores(encoded)), encoded, strict=True)
            return self.answers(torch.stack([(w[:, None] @ own)[:, 0] for w, own in pairs]))
        keys = encoded.transpose(0, 1)
        query = (self.query * self.factor(keys.shape[2])[:, None])[None, :, None].expand(len(keys), -1, 1, -1)
        return self.answers(entmax_attention(query, keys, keys, self.alphas())[0][:, :, 0].transpose(0, 1))

    @torch.no_grad()
    def accuracy(self, length: int, samples: int, mapping: Callable[[Tensor], Tensor] | None = None) -> list[float]:
        """Measure the share of right answers at a length, in percent, for each seed; ``mapping`` stands in for the attention's."""
        right, size = torch.zeros(self.count), max(1, 2**15 // length)
        for start in range(0, samples, size):
            items, wanted = self.batch(min(size, samples - start), length)
            encoded = self.encoded(items)
            weights = (mapping or self.weights)(self.scores(encoded))
            found = self.answers((weights[..., None, :] @ encoded)[..., 0, :]).argmax(-1)
            right += (found == wanted).sum(-1)
        return (100 * right / samples).tolist()


def train(model: Retrieval, steps: int, batch: int, lr: float) -> Tensor:
    """AdamW at a constant rate; returns the mean loss of the last tenth of the steps, for each seed.

    Learned alphas and scaling have no weight decay.
    """
    attention = ("alpha", "log", "beta", "gamma")
    groups: list[dict] = [{"params": [], "weight_decay": 0.01}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        groups[name.startswith(attention)]["params"].append(parameter)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, fused=True)
    last = torch.zeros(model.count)
    for step in range(steps):
        items, wanted = model.batch(batch, TRAINED_AT)
        each = F.cross_entropy(model(items).flatten(0, 1), wanted.flatten(), reduction="none")
        losses = each.view(wanted.shape).mean(-1)
        optimizer.zero_grad()
        losses.sum().backward()  # no seed reaches another's numbers
        optimizer.step()
        if step >= steps - steps // 10:
            last += losses.detach() / (steps // 10)
    return last
