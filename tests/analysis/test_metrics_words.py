"""Word-level metrics: subword merging, interrogation, sinks, dependencies, alignments."""

from __future__ import annotations

import math

import pytest
import torch

from hf_entmax.analysis import metrics
from hf_entmax.analysis.metrics.annotation import alignment_links


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    weights = weights * (torch.rand(shape, generator=generator) < 0.6)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)


def merging_by_loops(weights, word_ids, min_pieces):
    scores = []
    for h in range(weights.shape[1]):
        per_word = []
        for b in range(len(weights)):
            for word in sorted(set(word_ids[b].tolist()) - {-1}):
                tokens = [t for t, w in enumerate(word_ids[b].tolist()) if w == word]
                if len(tokens) < min_pieces:
                    continue
                if len(tokens) == 1:
                    per_word.append(float(weights[b, h, tokens[0], tokens[0]]))
                else:
                    per_word.append(max(sum(float(weights[b, h, i, j]) for j in tokens if j != i) for i in tokens))
        scores.append(sum(per_word) / len(per_word) if per_word else math.nan)
    return torch.tensor(scores, dtype=torch.float64)


WORD_IDS = torch.tensor([[-1, 0, 0, 1, 2, 2, 2, -1], [-1, 0, 1, 1, -1, -1, -1, -1], [-1, 0, 1, 2, 3, 4, 5, -1]])


@pytest.mark.parametrize("min_pieces", [1, 2])
def test_merging_against_loops(min_pieces):
    weights = random_rows(3, 4, 8, 8)
    result = metrics.subword_merging(weights, WORD_IDS, min_pieces=min_pieces)
    torch.testing.assert_close(result, merging_by_loops(weights, WORD_IDS, min_pieces), rtol=1e-12, atol=0)


def test_merging_by_hand():
    # One word of two tokens and one of one: max(0.7, 0.2) and 0.4.
    weights = torch.tensor([[[[0.2, 0.7, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]]]])
    words = torch.tensor([[0, 0, 1]])
    torch.testing.assert_close(metrics.subword_merging(weights, words), torch.tensor([(0.7 + 0.4) / 2]))
    torch.testing.assert_close(metrics.subword_merging(weights, words, min_pieces=2), torch.tensor([0.7]))
    masked = metrics.subword_merging(weights, words, torch.tensor([[True, True, False]]))
    torch.testing.assert_close(masked, torch.tensor([0.7]))


def test_merging_ignores_padding_and_reports_absence():
    weights = random_rows(3, 2, 8, 8)
    outside = (WORD_IDS < 0).unsqueeze(1)
    poisoned = weights.masked_fill(outside.unsqueeze(-1) | outside.unsqueeze(-2), float("nan"))
    torch.testing.assert_close(metrics.subword_merging(poisoned, WORD_IDS), metrics.subword_merging(weights, WORD_IDS))
    assert metrics.subword_merging(weights, torch.full_like(WORD_IDS, -1)).isnan().all()
    with pytest.raises(ValueError, match="self-attention"):
        metrics.subword_merging(torch.ones(1, 1, 2, 3), torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="min_pieces"):
        metrics.subword_merging(weights, WORD_IDS, min_pieces=3)


def test_interrogation_by_hand():
    weights = torch.zeros(2, 1, 4, 4)
    weights[0, 0, 0, 3], weights[0, 0, 1, 3], weights[1, 0, 0, 3] = 0.8, 0.4, 1.0
    asks = torch.tensor([[True, True, False, False], [True, False, False, False]])
    mark = torch.tensor([[False, False, False, True], [False, False, False, False]])  # the second is no question
    torch.testing.assert_close(metrics.interrogation(weights, asks, mark), torch.tensor([0.6]))
    assert metrics.interrogation(weights, asks, torch.zeros_like(mark)).isnan().all()


def test_sink_mass_by_hand():
    weights = torch.tensor([[[[0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [1.0, 0.0, 0.0]]]])
    sinks = torch.tensor([[True, False, True]])
    torch.testing.assert_close(metrics.sink_mass(weights, sinks), torch.tensor([(0.5 + 0.8 + 1.0) / 3]))
    mask = torch.tensor([[True, True, False]])
    torch.testing.assert_close(metrics.sink_mass(weights, sinks, mask), torch.tensor([(0.5 + 0.2) / 2]))


def test_word_attention_sums_keys_and_averages_queries():
    weights = random_rows(1, 2, 4, 5)
    rows, columns = torch.tensor([[0, 0, -1, 1]]), torch.tensor([[-1, 0, 1, 1, 2]])
    result = metrics.word_attention(weights, rows, columns)
    assert result.shape == (1, 2, 2, 3)
    expected = (weights[0, :, 0, 2:4] + weights[0, :, 1, 2:4]).sum(-1) / 2
    torch.testing.assert_close(result[0, :, 0, 1], expected)
    torch.testing.assert_close(result[0, :, 1, 2], weights[0, :, 3, 4])
    with pytest.raises(ValueError, match="pass key_words"):
        metrics.word_attention(weights, rows)


def dependency_by_loops(weights, heads, word_ids, direction):
    accuracies = []
    for h in range(weights.shape[1]):
        right = total = 0
        for b in range(len(weights)):
            words = sorted(set(word_ids[b].tolist()) - {-1})
            tokens = {w: [t for t, v in enumerate(word_ids[b].tolist()) if v == w] for w in words}
            between = {
                (v, w): sum(float(weights[b, h, i, j]) for i in tokens[v] for j in tokens[w]) / len(tokens[v])
                for v in words
                for w in words
            }
            for word in words:
                head = int(heads[b, word])
                if head < 0:
                    continue
                total += 1
                row = {w: between[(word, w) if direction == "to_head" else (w, word)] for w in words}
                best = max(row, key=row.__getitem__)
                right += row[best] > 0 and best == head
        accuracies.append(right / total if total else math.nan)
    return torch.tensor(accuracies, dtype=torch.float64)


@pytest.mark.parametrize("direction", ["to_head", "to_dependent"])
def test_dependency_accuracy_against_loops(direction):
    weights = random_rows(3, 5, 8, 8, seed=3)
    heads = torch.tensor([[1, -1, 1, -1, -1, -1], [-1, 0, -1, -1, -1, -1], [1, 2, -1, 2, 3, 4]])
    result = metrics.dependency_accuracy(weights, heads, WORD_IDS, direction=direction)
    torch.testing.assert_close(result, dependency_by_loops(weights, heads, WORD_IDS, direction), rtol=1e-12, atol=0)


def test_dependency_accuracy_by_hand():
    heads = torch.tensor([[1, -1, 1]])
    right = torch.tensor([[[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.1, 0.8, 0.1]]]])
    assert metrics.dependency_accuracy(right, heads).tolist() == [1.0]
    half = torch.tensor([[[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.1, 0.8, 0.1]]]])
    assert metrics.dependency_accuracy(half, heads).tolist() == [0.5]
    # A head without any weight on words is wrong even where word 0 is the answer.
    empty = torch.zeros(1, 1, 3, 3)
    assert metrics.dependency_accuracy(empty, torch.tensor([[1, 0, 0]])).tolist() == [0.0]


def test_dependency_bad_input():
    weights = random_rows(1, 1, 3, 3)
    with pytest.raises(ValueError, match="pass word_ids"):
        metrics.dependency_accuracy(weights, torch.tensor([[1, -1]]))
    with pytest.raises(ValueError, match="names word 7"):
        metrics.dependency_accuracy(weights, torch.tensor([[7, -1, 0]]))
    with pytest.raises(ValueError, match="direction"):
        metrics.dependency_accuracy(weights, torch.tensor([[1, -1, 0]]), direction="up")


def test_alignment_error_rate_by_hand():
    # Two target words, three source words; sure (0,0) (1,2); possible (1,1).
    weights = torch.tensor([[[[0.9, 0.1, 0.0], [0.0, 0.6, 0.4]]]])
    sure = torch.tensor([[[True, False, False], [False, False, True]]])
    possible = torch.tensor([[[False, False, False], [False, True, False]]])
    # argmax: (0,0) sure, (1,1) possible -> 1 - (1 + 2) / (2 + 2)
    torch.testing.assert_close(metrics.alignment_error_rate(weights, sure, possible), torch.tensor([0.25]))
    # support: (0,0) (0,1) (1,1) (1,2) -> 1 - (2 + 3) / (4 + 2)
    torch.testing.assert_close(
        metrics.alignment_error_rate(weights, sure, possible, method="support"), torch.tensor([1 / 6])
    )
    # threshold 0.5: (0,0) (1,1) as the argmax; without possible links 1 - (1 + 1) / (2 + 2)
    result = metrics.alignment_error_rate(weights, sure, method="threshold", threshold=0.5)
    torch.testing.assert_close(result, torch.tensor([0.5]))
    perfect = torch.tensor([[[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]])
    assert metrics.alignment_error_rate(perfect, sure, possible).tolist() == [0.0]


@pytest.mark.parametrize(("method", "threshold"), [("argmax", None), ("threshold", 0.2), ("support", None)])
def test_alignment_error_rate_against_sets(method, threshold):
    weights = random_rows(3, 4, 5, 6, seed=5)
    generator = torch.Generator().manual_seed(1)
    sure = torch.rand(3, 5, 6, generator=generator) < 0.2
    possible = torch.rand(3, 5, 6, generator=generator) < 0.3
    key_mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True] * 5 + [False]])
    query_mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 5])
    result = metrics.alignment_error_rate(weights, sure, possible, method, threshold, key_mask, query_mask)
    for h in range(4):
        links, gold_sure, gold_possible = set(), set(), set()
        for b in range(3):
            for i in range(5):
                if not query_mask[b, i]:
                    continue
                row = {j: float(weights[b, h, i, j]) for j in range(6) if key_mask[b, j]}
                if method == "argmax":
                    best = max(row, key=row.__getitem__)
                    chosen = {best} if row[best] > 0 else set()
                else:
                    chosen = {j for j, value in row.items() if value > (threshold or 0.0)}
                links |= {(b, i, j) for j in chosen}
                gold_sure |= {(b, i, j) for j in row if sure[b, i, j]}
                gold_possible |= {(b, i, j) for j in row if sure[b, i, j] or possible[b, i, j]}
        expected = 1 - (len(links & gold_sure) + len(links & gold_possible)) / (len(links) + len(gold_sure))
        assert float(result[h]) == pytest.approx(expected, abs=1e-12)


def test_alignment_bad_input():
    weights, sure = torch.rand(1, 1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="method"):
        metrics.alignment_error_rate(weights, sure, method="best")
    with pytest.raises(ValueError, match="threshold must"):
        alignment_links(weights, "threshold")
    with pytest.raises(ValueError, match="threshold must"):
        alignment_links(weights, "argmax", 0.5)
    with pytest.raises(ValueError, match="sure has shape"):
        metrics.alignment_error_rate(weights, sure[:, :1])
