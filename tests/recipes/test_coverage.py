"""Coverage and sizes of sets, as the recipes report them."""

import pytest
import torch

from common import sets


def test_measures_by_hand():
    hits = [torch.tensor([True, True, False, True]), torch.tensor([True, True, True, True])]
    sizes = [torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 11, 12])]
    found = sets.measure(hits, sizes)
    assert (found["coverage"], found["size"], found["splits"], found["test"]) == (87.5, 4.375, 2, 4)
    assert found["coverage_sd"] == pytest.approx(25 / 2**0.5, abs=0.01)
    assert found["strata"] == "<=1:100.0 (37.5), <=3:50.0 (25.0), <=10:100.0 (12.5), >10:100.0 (25.0)"
    assert found["worst_stratum"] == 50


def test_splits_are_disjoint_and_random():
    first, second = sets.splits(101, 0)[:2]
    assert len(first[0]) == 50 and len(first[1]) == 51 and not set(first[0].tolist()) & set(first[1].tolist())
    assert not torch.equal(first[0], second[0]) and torch.equal(first[0], sets.splits(101, 0)[0][0])


def test_all_methods_cover_what_was_asked_for():
    pytest.importorskip("mapie", reason="conformal sets of a softmax come from MAPIE")
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 8, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    records = sets.measure_labels(logits, labels, 1.0, [90.0], 0)
    assert [record["method"] for record in records] == ["entmax 1.5", "entmax, alpha chosen", "APS", "RAPS"]
    for record in records:
        # 2,000 calibrate and 2,000 test: one split has a standard deviation of 0.95, the splits share their data.
        assert abs(record["coverage"] - 90) < 3 and 1 < record["size"] < 8


def test_raps_takes_classes_of_which_there_is_one_example():
    pytest.importorskip("mapie", reason="conformal sets of a softmax come from MAPIE")
    generator = torch.Generator().manual_seed(0)
    logits, labels = 2 * torch.randn(300, 5, generator=generator), torch.randint(4, (300,), generator=generator)
    labels[0] = 4
    inside = sets.mapie_sets("raps")(logits[:150], labels[:150], logits[150:], 0.1)
    assert inside.shape == (150, 5) and 0 < inside.sum() < inside.numel()


def test_sets_of_inputs_with_several_answers():
    scores = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    inputs = [[place if place < 1500 else place - 1500, 1] for place in range(3000)]  # two answers each
    asked = []

    def listed(places, threshold):
        asked.append((places, threshold))
        return [(1, True)] * len(places)

    records = list(sets.measure_variants(scores, inputs, [90.0], 0, listed))
    found = dict(records)
    assert list(found) == ["any answer", "every answer", "every of several"]
    # 750 inputs calibrate: one split has a standard deviation of 1.1 or less, the splits share their data.
    assert abs(found["any answer"]["coverage"] - 90) < 3 and abs(found["every answer"]["coverage"] - 90) < 3
    # The lower of two uniform numbers is below t with 1 - (1 - t)^2 = 0.9, both then with t^2 = 0.468.
    assert abs(found["every of several"]["coverage"] - 46.8) < 6
    assert found["any answer"]["test"] == 750 and found["every of several"]["test"] == 1500
    (places, low), (_, high) = asked
    assert abs(low - 0.684) < 0.04 and abs(high - 0.949) < 0.02  # these very thresholds
    assert len(places) == sets.LISTED and max(places) < 1500  # an input is listed once
    assert not list(sets.measure_variants(scores, [[place] for place in range(3000)], [90.0], 0, listed))
