"""Density, support, entropy, diversity: hand-computed examples and plain loops."""

from __future__ import annotations

import math

import brute_force
import pytest
import torch

from hf_entmax.analysis import metrics

ALL = (metrics.density, metrics.mean_support, metrics.entropy, metrics.max_weight, metrics.head_diversity)
SHAPES = [
    # batch, heads, queries, keys, causal, self-attention, left padding
    (3, 4, 6, 6, False, True, False),
    (3, 4, 6, 6, True, True, False),
    (3, 4, 6, 6, True, True, True),
    (3, 2, 5, 7, False, False, False),
    (3, 2, 5, 5, False, False, False),
    (2, 3, 4, 9, True, False, False),
    (1, 1, 1, 1, False, True, False),
]


@pytest.fixture(params=SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def case(request):
    batch, heads, queries, keys, causal, self_attention, left = request.param
    weights, key_mask, query_mask = brute_force.random_weights(
        batch, heads, queries, keys, causal=causal, self_attention=self_attention, left=left, seed=queries * keys
    )
    return weights, key_mask, query_mask, causal


def close(actual: torch.Tensor, expected) -> None:
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12, equal_nan=True
    )


def test_density_by_hand():
    # Two heads, three real tokens of four: 9 possible pairs.
    weights = torch.zeros(1, 2, 4, 4)
    weights[0, 0, :3, 0] = 1.0  # every query looks at the first key: 3 of 9
    weights[0, 1, 0, :2] = 0.5
    weights[0, 1, 1, :3] = 1 / 3
    weights[0, 1, 2, 2] = 1.0  # 2 + 3 + 1 of 9
    weights[0, :, 3] = 0.25  # the padded query must not count
    mask = torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(metrics.density(weights, mask), torch.tensor([3 / 9, 6 / 9]))
    torch.testing.assert_close(metrics.mean_support(weights, mask), torch.tensor([1.0, 2.0]))


def test_causal_density_counts_the_triangle():
    weights = torch.eye(4).expand(1, 1, 4, 4)
    mask = torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(metrics.density(weights, mask, causal=True), torch.tensor([3 / 6]))
    left = mask.flip(1)
    torch.testing.assert_close(metrics.density(weights, left, causal=True), torch.tensor([3 / 6]))


def test_density_against_loops(case):
    weights, key_mask, query_mask, causal = case
    close(
        metrics.density(weights, key_mask, query_mask, causal),
        brute_force.density(weights, key_mask, query_mask, causal),
    )


def test_row_statistics_against_loops(case):
    weights, key_mask, query_mask, causal = case
    for function, of_row in (
        (metrics.mean_support, lambda row: sum(value != 0 for value in row.values())),
        (metrics.entropy, lambda row: brute_force.entropy_of(row.values())),
        (metrics.max_weight, lambda row: max(row.values())),
    ):
        expected = brute_force.row_means(weights, key_mask, query_mask, causal, of_row)
        close(function(weights, key_mask, query_mask, causal), expected)


def test_diversity_against_loops(case):
    weights, key_mask, query_mask, causal = case
    expected = brute_force.diversity(weights, key_mask, query_mask, causal)
    heads = weights.shape[1]
    close(metrics.head_diversity(weights, key_mask, query_mask, causal, normalize=False), max(expected, 0.0))
    close(
        metrics.head_diversity(weights, key_mask, query_mask, causal),
        max(expected, 0.0) / math.log(heads) if heads > 1 else 0.0,
    )


def test_diversity_by_hand():
    mask = torch.ones(1, 2, dtype=torch.bool)
    apart = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]])
    torch.testing.assert_close(metrics.head_diversity(apart, mask), torch.tensor(1.0))
    torch.testing.assert_close(metrics.head_diversity(apart, mask, normalize=False), torch.tensor(math.log(2)))
    alike = apart[:, :1].expand(1, 2, 2, 2)
    assert metrics.head_diversity(alike, mask).item() == 0.0
    # (1, 0) and (1/2, 1/2): H(3/4, 1/4) - log(2) / 2.
    mixed = torch.tensor([[[[1.0, 0.0]], [[0.5, 0.5]]]])
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) - 0.5 * math.log(2)
    torch.testing.assert_close(metrics.head_diversity(mixed, mask, normalize=False), torch.tensor(expected))


def test_sentence_density_and_ambiguity(case):
    weights, key_mask, query_mask, causal = case
    alone = [
        brute_force.density(weights[b : b + 1], key_mask[b : b + 1], query_mask[b : b + 1], causal)
        for b in range(len(weights))
    ]
    close(metrics.sentence_density(weights, key_mask, query_mask, causal), alone)
    mean = [sum(row[h] for row in alone) / len(alone) for h in range(weights.shape[1])]
    expected = [[value - mean[h] for h, value in enumerate(row)] for row in alone]
    close(metrics.ambiguity(weights, key_mask, query_mask, causal), expected)
    usual = torch.full((weights.shape[1],), 0.25, dtype=torch.float64)
    close(
        metrics.ambiguity(weights, key_mask, query_mask, causal, mean=usual), [[v - 0.25 for v in row] for row in alone]
    )


def test_nan_in_padded_rows_does_not_spread(case):
    weights, key_mask, query_mask, causal = case
    pairs = metrics.possible_pairs(weights, key_mask, query_mask, causal)
    poisoned = weights.masked_fill(~pairs.unsqueeze(1), float("nan"))
    for function in ALL:
        close(function(poisoned, key_mask, query_mask, causal), function(weights, key_mask, query_mask, causal))


def test_softmax_has_full_density_and_threshold_counts_less():
    weights = torch.randn(2, 3, 5, 5).softmax(-1)
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert metrics.density(weights, mask).tolist() == [1.0, 1.0, 1.0]
    expected = (weights > 0.2).double().mean(dim=(0, 2, 3))
    torch.testing.assert_close(metrics.density(weights, mask, threshold=0.2).double(), expected, rtol=1e-6, atol=0)


def test_half_precision_and_integer_masks():
    weights = torch.tensor([[[[0.5, 0.5, 0.0]] * 3]], dtype=torch.bfloat16)
    mask = torch.tensor([[1, 1, 0]])
    result = metrics.density(weights, mask)
    assert result.dtype == torch.float32 and result.tolist() == [1.0]


def test_nothing_to_count_is_nan():
    weights = torch.ones(1, 2, 3, 3) / 3
    nobody = torch.zeros(1, 3, dtype=torch.bool)
    for function in ALL:
        assert function(weights, nobody).isnan().all(), function.__name__


@pytest.mark.parametrize(
    ("weights", "mask", "error", "message"),
    [
        (torch.ones(2, 3, 3), torch.ones(2, 3, dtype=torch.bool), ValueError, r"\[B, H, T_q, T_k\]"),
        (torch.ones(2, 1, 3, 3), torch.ones(2, 4, dtype=torch.bool), ValueError, "key_mask has shape"),
        (torch.ones(2, 1, 3, 3), torch.zeros(2, 3), TypeError, "bool mask"),
        (torch.ones(2, 1, 3, 3), torch.full((2, 3), 2), ValueError, "other than 0 and 1"),
        (torch.ones(2, 1, 3, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), TypeError, "floating"),
        ([[1.0]], torch.ones(2, 3, dtype=torch.bool), TypeError, "list"),
    ],
)
def test_bad_input(weights, mask, error, message):
    for function in (metrics.density, metrics.head_diversity, metrics.positional_confidence):
        with pytest.raises(error, match=message):
            function(weights, mask)
