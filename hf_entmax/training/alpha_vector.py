"""All learned alphas of a model, and the temperatures of its heads, as one vector that a search can move."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_entmax.alpha import LearnedAlpha, TiedAlpha
from hf_entmax.integration.attach import heads_of
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.patching import entmax_config
from hf_entmax.integration.scaled_query import length_scaling_of
from hf_entmax.length import SOFTENING, ConstantScaling

#: Shares of the range of alpha: the lowest stands for softmax, and the highest.
LOWEST, HIGHEST = 1e-6, 0.9999


class AlphaVector:
    """``a`` of every learned alpha (``alpha = lo + (hi - lo) sigmoid(a)``), then the logarithm of every temperature's factor.

    There are temperatures where a model was patched with ``length_scaling="constant"``.

    Attributes:
        count: how many alphas there are.
        places: name of an attention module -> which alpha each of its heads has, long ``[heads]``.
        scaled: bool ``[count]``, which alphas are of heads with a temperature.
        bottom: lowest value of ``a``: alpha at the lower end of its range, give or take a millionth of it.
        top: and the highest.

    Raises:
        ValueError: if the model is not patched or learns no alpha.
    """

    bottom, top = (math.log(share / (1 - share)) for share in (LOWEST, HIGHEST))

    def __init__(self, model: PreTrainedModel) -> None:
        config = entmax_config(model)
        if config.mapping != "entmax" or config.alpha != "learned":
            raise ValueError(
                f"This model has mapping={config.mapping!r} and alpha={config.alpha!r}; learned alphas are needed: patch it "
                "with hf_entmax.patch_model(model)."
            )
        self.range = config.alpha_range
        self.places: dict[str, Tensor] = {}
        self._alphas: list[nn.Parameter] = []
        self._scales: list[tuple[nn.Parameter, Tensor]] = []
        first: dict[int, int] = {}
        for site in attention_sites(model):
            heads = heads_of(site)
            owner = heads.owner if isinstance(heads, TiedAlpha) else heads
            if not isinstance(owner, LearnedAlpha):
                continue  # left alone
            if id(owner) not in first:
                first[id(owner)] = sum(map(len, self._alphas))
                self._alphas.append(owner.a)
            each = torch.arange(site.num_heads)
            self.places[site.name] = first[id(owner)] + (each if len(owner.a) == site.num_heads else 0 * each)
            scaling = length_scaling_of(heads)
            if isinstance(scaling, ConstantScaling) and not any(scaling.s is s for s, _ in self._scales):
                self._scales.append((scaling.s, self.places[site.name][scaling.heads]))
        self.parameters = [*self._alphas, *(s for s, _ in self._scales)]
        self.count = sum(map(len, self._alphas))
        self.scaled = torch.zeros(self.count, dtype=torch.bool)
        for _, places in self._scales:
            self.scaled[places] = True

    def softened(self, a: Tensor, softening: Tensor) -> Tensor:
        """Join these ``a`` ``[count]`` and factors ``1 / (1 + r (alpha - 1))`` with the ``r`` of each, ``[count]``."""
        lo, hi = self.range
        factors = -(softening * (lo - 1 + (hi - lo) * a.sigmoid())).log1p()
        return torch.cat([a, *(factors[places] for _, places in self._scales)])

    def even(self, share: float) -> Tensor:
        """Return one alpha for all, at ``share`` of the range, and temperatures that make entmax about as sharp as softmax.

        See `hf_entmax.length.ConstantScaling.soften`.
        """
        a = torch.full((self.count,), share, dtype=torch.float64).logit().clamp(self.bottom, self.top)
        return self.softened(a, torch.full_like(a, SOFTENING))

    def between(self, start: Tensor, end: Tensor, share: float) -> Tensor:
        """Return the point at ``share`` of the straight line of alphas, and of logarithms of the factors.

        A line of ``a`` would fall to softmax at once: its lowest values are far below.
        """
        alpha = torch.lerp(start[: self.count].sigmoid(), end[: self.count].sigmoid(), share).clamp(0, 1).logit()
        return self.clamp(torch.cat([alpha, torch.lerp(start[self.count :], end[self.count :], share)]))

    def clamp(self, values: Tensor, least: float = LOWEST) -> Tensor:
        """Keep alphas from ``least`` of their range on, and factors within 1/20 and 20."""
        bound, bottom = math.log(20), math.log(least / (1 - least))
        return torch.cat([values[: self.count].clamp(bottom, self.top), values[self.count :].clamp(-bound, bound)])

    @torch.no_grad()
    def set_(self, values: Tensor) -> None:
        """Give the model these values, ``[N]``."""
        parts = values.split([len(p) for p in self.parameters])
        for place, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            parameter.copy_(part if place < len(self._alphas) else part.exp() - 1)

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return what the model has, float64 ``[N]`` on the CPU."""
        own = [parameter.detach().double().cpu() for parameter in self.parameters]
        return torch.cat([part if place < len(self._alphas) else (1 + part).log() for place, part in enumerate(own)])

    def slope(self, loss: Tensor) -> Tensor:
        """Return the derivative of a loss in the values: float64 ``[N]`` on the CPU, 0 where there is none."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        parts = []
        for place, (parameter, gradient) in enumerate(zip(self.parameters, found, strict=True)):
            by_value = 1.0 if place < len(self._alphas) else 1.0 + parameter.detach().double().cpu()
            own = torch.zeros(len(parameter)) if gradient is None else gradient.detach()
            parts.append(own.double().cpu() * by_value)
        return torch.cat(parts)
