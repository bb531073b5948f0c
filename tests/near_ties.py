"""Rows of scores for alpha above 2: ties and near ties, where a weight near the threshold rises like a root."""

import torch


def scores_of(kind, keys):
    noise = torch.randn(keys, generator=torch.Generator().manual_seed(keys))
    if kind == "equal":
        return torch.full((keys,), 0.25)
    if kind == "two values":
        return torch.where(torch.arange(keys) % 2 == 0, 0.5, 0.499)
    if kind == "one float apart":
        return torch.where(torch.arange(keys) % 3 == 0, 1.0, 1.0 - 2.0**-24)
    if kind == "one above equal ones":
        return torch.where(torch.arange(keys) == keys // 2, 1e-3, 0.0)
    return noise * {"random": 1.0, "close": 1e-3, "large": 100.0}[kind]
