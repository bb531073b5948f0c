"""Slow and obvious ways to project onto the simplex, for the tests."""

import itertools

import numpy as np
import scipy.optimize


def project_by_enumeration(y):
    """The projection of one vector: the KKT conditions tried on every support."""
    best = None
    for size in range(1, len(y) + 1):
        for support in itertools.combinations(range(len(y)), size):
            support = list(support)
            p = np.zeros(len(y))
            p[support] = y[support] - (y[support].sum() - 1) / size
            if (p[support] >= 0).all() and (best is None or ((p - y) ** 2).sum() < ((best - y) ** 2).sum()):
                best = p
    return best


def minimise_on_simplex(objective, k):
    return scipy.optimize.minimize(
        objective,
        np.full(k, 1 / k),
        method="SLSQP",
        bounds=[(0, 1)] * k,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    ).x
