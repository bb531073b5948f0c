"""Positional confidence, distance profile and census: hand-computed examples and plain loops."""

from __future__ import annotations

import math

import brute_force
import pytest
import torch

from hf_entmax.analysis import metrics
from hf_entmax.analysis.metrics.weights import diagonal_sums

CASES = [
    (6, 6, False, True, False),
    (6, 6, True, True, True),
    (5, 8, False, False, False),
    (8, 3, False, False, False),
    (1, 1, True, True, False),
]


def weights_for(queries, keys, causal, self_attention, left):
    return brute_force.random_weights(
        3, 4, queries, keys, causal=causal, self_attention=self_attention, left=left, seed=7
    )


def close(actual, expected) -> None:
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12, equal_nan=True
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("offset", [-3, -1, 0, 1, 2])
def test_confidence_against_loops(case, offset):
    weights, key_mask, query_mask = weights_for(*case)
    expected = brute_force.confidence(weights, key_mask, query_mask, case[2], offset)
    close(metrics.positional_confidence(weights, key_mask, offset, query_mask, case[2]), expected)


def test_confidence_by_hand():
    weights = torch.tensor([[[[1.0, 0, 0], [0.9, 0.1, 0], [0.2, 0.6, 0.2]]]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    torch.testing.assert_close(metrics.positional_confidence(weights, mask), torch.tensor([(0.9 + 0.6) / 2]))
    torch.testing.assert_close(
        metrics.positional_confidence(weights, mask, offset=0), torch.tensor([(1.0 + 0.1 + 0.2) / 3])
    )
    torch.testing.assert_close(metrics.positional_confidence(weights, mask, offset=1), torch.tensor([0.0]))
    # Without its third token only one query has a previous token.
    torch.testing.assert_close(
        metrics.positional_confidence(weights, torch.tensor([[True, True, False]])), torch.tensor([0.9])
    )
    assert metrics.positional_confidence(weights, mask, offset=1, causal=True).isnan().all()
    assert metrics.positional_confidence(weights, mask, offset=5).isnan().all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_share_against_loops(case, offset):
    weights, key_mask, query_mask = weights_for(*case)
    hits, count = [0] * 4, [0] * 4
    for _, h, i, row in brute_force.rows(weights, key_mask, query_mask, case[2]):
        if i + offset in row:
            count[h] += 1
            best = max(row, key=row.__getitem__)
            hits[h] += row[best] > 0 and best == i + offset
    expected = [a / b if b else math.nan for a, b in zip(hits, count, strict=True)]
    close(metrics.positional_share(weights, key_mask, offset, query_mask, case[2]), expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("distance", [1, 4])
def test_profile_against_loops(case, distance):
    weights, key_mask, query_mask = weights_for(*case)
    expected = [[0.0] * (2 * distance + 3) for _ in range(4)]
    for _, h, i, row in brute_force.rows(weights, key_mask, query_mask, case[2]):
        for j, value in row.items():
            expected[h][min(max(j - i, -distance - 1), distance + 1) + distance + 1] += value
    expected = [[value / sum(row) if sum(row) else math.nan for value in row] for row in expected]
    profile = metrics.distance_profile(weights, key_mask, distance, query_mask, case[2])
    close(profile, expected)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (5, 1), (4, 4), (3, 7), (7, 3)])
def test_diagonal_sums(queries, keys):
    matrix = torch.randn(2, queries, keys, dtype=torch.float64)
    expected = torch.stack([matrix.diagonal(o, dim1=-2, dim2=-1).sum(-1) for o in range(-queries + 1, keys)], dim=-1)
    torch.testing.assert_close(diagonal_sums(matrix), expected)


def test_census():
    confidence = torch.tensor([[0.95, 0.10], [0.60, float("nan")]])
    share = torch.tensor([[0.99, 0.05], [0.70, float("nan")]])
    census = metrics.positional_census(confidence, share)
    assert census["heads"] == [(0, 0), (1, 0)]
    assert census["confidences"] == pytest.approx([0.95, 0.60])
    assert census["median"] == pytest.approx(0.775)
    assert census["median_all"] == pytest.approx(0.60)
    assert metrics.positional_census(confidence[:, 1:], share[:, 1:])["heads"] == []
    with pytest.raises(ValueError, match="agree"):
        metrics.positional_census(confidence, share[:1])


def test_bad_options():
    weights, mask = torch.ones(1, 1, 2, 2) / 2, torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(TypeError, match="integer"):
        metrics.positional_confidence(weights, mask, offset=0.5)
    with pytest.raises(ValueError, match="at least 1"):
        metrics.distance_profile(weights, mask, max_distance=0)
