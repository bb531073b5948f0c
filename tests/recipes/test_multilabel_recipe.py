"""The multilabel recipe: its data, its scores against scikit-learn, its training, its results file."""

import csv
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import multilabel as recipe
from common import multilabel_data as data
from common import multilabel_linear as linear
from common import multilabel_scores as results
from common.heads import head_statistics
from common.multilabel_config import METHODS, WITH_THRESHOLD, LinearConfig, TextConfig, build_config

RECIPES = Path(__file__).parents[2] / "recipes"


ARFF = """@relation demo
@attribute height numeric
@attribute place {north,south}
@attribute 'it\\'s red' {0,1}
@attribute blue {0,1}
@data
1.0,north,1,0
3.0,south,0,0
5.0,south,1,1
"""
XML = (
    '<labels xmlns="http://mulan.sourceforge.net/labels"><label name="it\'s red"></label><label name="blue"/></labels>'
)


@pytest.fixture
def mulan(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENTMAX_DATA", str(tmp_path))
    folder = tmp_path / "multilabel" / "demo"
    folder.mkdir(parents=True)
    (folder / "demo-train.arff").write_text(ARFF)
    (folder / "demo-test.arff").write_text(ARFF.replace("5.0,south", "7.0,north"))
    (folder / "demo.xml").write_text(XML)


def test_arff_files_are_read_and_standardised(mulan):
    train, test = data.read_mulan("demo")
    assert train.labels.tolist() == [[1, 0], [0, 0], [1, 1]]
    # One numeric column and one per value of the nominal one.
    assert train.features.shape == (3, 3)
    assert torch.allclose(train.features.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(train.features.std(0, unbiased=False), torch.ones(3), atol=1e-6)
    assert test.features[2, 0] == pytest.approx((7 - 3) / np.std([1, 3, 5]))


def test_missing_data_say_where_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENTMAX_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"HF_ENTMAX_DATA.*scene-train.arff.*mulan"):
        data.read_mulan("scene")


def test_synthetic_documents_have_the_label_counts_asked_for():
    split = data.synthetic_documents((2, 3, 4), mean_labels=3, length=40, seed=1, n_samples=90)
    sizes, counts = split.labels.sum(1).unique(return_counts=True)
    assert sizes.tolist() == [2, 3, 4]
    assert counts.tolist() == [30, 30, 30]
    again = data.synthetic_documents((2, 3, 4), mean_labels=3, length=40, seed=1, n_samples=90)
    assert again.features.equal(split.features)
    assert not data.synthetic_documents((2, 3, 4), mean_labels=3, length=40, seed=2, n_samples=90).features.equal(
        split.features
    )
    with pytest.raises(ValueError, match="between 1 and 10"):
        data.synthetic_documents((0, 1), mean_labels=3, length=40, seed=1)


def test_splits_are_disjoint_and_complete():
    whole = data.Split(torch.arange(50.0)[:, None], torch.ones(50, 2))
    parts = data.split_rows(whole, (0.6, 0.2, 0.2), seed=3)
    assert [len(p) for p in parts] == [30, 10, 10]
    assert sorted(torch.cat([p.features for p in parts]).flatten().tolist()) == list(range(50))


def test_scores_by_hand():
    # 2 hits, 1 prediction too many, 1 label missed; per label 2/3, 1 and 0.
    predicted, labels = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool(), torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert results.f1(predicted, labels) == pytest.approx(2 * 2 / (2 * 2 + 1))
    assert results.f1(predicted, labels, "macro") == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_jensen_shannon_leaves_rows_without_labels_out():
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]])
    labels = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    # Equal distributions have none, those without a common label log 2.
    assert results.jensen_shannon(probs, labels) == pytest.approx(np.log(2) / 2, abs=1e-6)


def learnable(n=240, k=4):
    """Rows whose labels are linear in the features; some have none."""
    x = torch.randn(n, 6)
    y = (x @ torch.randn(6, k) > 0.8).float()
    return data.Split(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method):
    torch.manual_seed(5)
    rows = learnable()
    train, test = data.split_rows(rows, (0.7, 0.3), seed=0)
    test = test.rows(test.labels.sum(1) > 0)
    config = LinearConfig(study="mulan", folds=3, steps=120, l2=[1e-3, 1e-1], lams=[0.0, 0.5], qs=[0.5, 2.0])
    probs, predicted, chosen, validation = linear.tune_and_test(train, test, method, config, 0, 4)
    micro = results.f1(predicted, test.labels)
    everything = results.f1(torch.ones_like(predicted), test.labels)
    assert micro > everything + 0.04
    assert 0 < validation <= 1
    assert torch.allclose(probs.sum(-1), torch.ones(len(test)), atol=1e-5)
    assert (chosen["threshold"] is not None) == (method in WITH_THRESHOLD)
    assert chosen["mapping"] in linear.mappings_of(method, config)


def test_test_labels_are_not_looked_at():
    train, test = data.split_rows(learnable(), (0.7, 0.3), seed=0)
    config = LinearConfig(folds=2, steps=20, l2=[1e-2])
    one = linear.tune_and_test(train, test, "softmax+log", config, 0, 4)
    two = linear.tune_and_test(train, data.Split(test.features, 1 - test.labels), "softmax+log", config, 0, 4)
    assert one[0].equal(two[0]) and one[1].equal(two[1]) and one[2:] == two[2:]


def test_models_trained_together_do_not_touch_each_other():
    rows = learnable(60)
    config = LinearConfig(steps=15)
    included = torch.rand(3, 60) < 0.7
    l2 = torch.tensor([1e-3, 1e-2, 1.0])
    together = linear.fit(rows, included, l2, "sparsehourglass", config, seed=0)
    changed = included.clone()
    changed[1] = ~changed[1]
    again = linear.fit(rows, changed, l2, "sparsehourglass", config, seed=0)
    assert together[[0, 2]].equal(again[[0, 2]])
    assert not together[1].equal(again[1])
    # Rows that are left out have no influence.
    other = data.Split(torch.where(included[0][:, None], rows.features, 9.0), rows.labels)
    assert torch.allclose(linear.fit(other, included, l2, "sparsehourglass", config, seed=0)[0], together[0], atol=1e-6)


def test_results_resume_and_hold_no_folders(tmp_path, monkeypatch):
    path = tmp_path / "out" / "a.csv"
    book = results.MultilabelResults(path)
    book.add(study="mulan", dataset="d", setting="", method="m", seed=0, micro_f1=0.5)
    again = results.MultilabelResults(path)
    assert again.has(dataset="d", seed=0) and not again.has(dataset="d", seed=1)
    with pytest.raises(ValueError, match="no columns"):
        again.add(accuracy=1)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="use another file"):
        results.MultilabelResults(path)
    words = ["--config", "c.yaml", "seeds=[0, 1]", "--out=/elsewhere"]
    monkeypatch.setattr(sys, "argv", ["somewhere/multilabel.py", *words])
    book.add(study="mulan")
    assert book.rows[-1]["command"] == "python recipes/multilabel.py --config c.yaml 'seeds=[0, 1]'"
    assert "scikit-learn" in book.rows[-1]["versions"]


def test_mulan_study_with_empty_rows(mulan, tmp_path):
    config = LinearConfig(
        datasets=["demo"], methods=["softmax+log", "sparsehg+hinge"], seeds=[0], folds=1, steps=3, l2=[0.1], qs=[1.0],
        thresholds=[0.2], empty_rows=["ignore", "extra_label"],
    )  # fmt: skip
    book = results.MultilabelResults(tmp_path / "m.csv")
    linear.run_linear(config, book)
    # Two methods, two treatments of empty rows, all test rows and the labelled ones.
    assert len(book.rows) == 8
    assert {(r["test_rows"], r["n_test"]) for r in book.rows} == {("all", "3"), ("labelled", "2")}
    linear.run_linear(config, book)
    assert len(book.rows) == 8


@pytest.mark.slow
def test_smoke_writes_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe.main(["--smoke"])
    for study, count in (("synthetic", 3 * len(METHODS)), ("text", 5)):
        with (tmp_path / "smoke" / "multilabel" / f"{study}.csv").open(newline="", encoding="utf-8") as lines:
            assert len(list(csv.DictReader(lines))) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stps=3"], "unknown configuration keys"),
        (["steps=0"], "at least 1"),
        (["methods=[softmax]"], "are unknown"),
        (["study=image"], "choose mulan, synthetic or text"),
        (["steps"], "key=value"),
    ],
)
def test_bad_configurations(tmp_path, arguments, message, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("study: mulan\n")
    with pytest.raises(SystemExit):
        recipe.main(["--config", str(path), *arguments])
    assert message in capsys.readouterr().err


def test_all_configurations_are_valid():
    import yaml

    paths = sorted((RECIPES / "configs").glob("multilabel*.yaml"))
    assert len(paths) == 4
    for path in paths:
        build_config(yaml.safe_load(path.read_text()))


class TestText:
    def test_files_become_ids_and_labels(self, tmp_path):
        (tmp_path / "train.tsv").write_text("x\tab\tN;SG\nx\tba\tV\n")
        (tmp_path / "test.tsv").write_text("x\tac\tN;PL\n")
        files = {split: str(tmp_path / f"{split}.tsv") for split in ("train", "test")}
        texts = data.read_texts(files, 1, 2, None)
        assert texts.label_names == ["N", "SG", "V"]
        assert texts.splits["train"].features.tolist() == [[1, 3, 4], [1, 4, 3]]
        # A character and a label that training has not seen: the unknown id, and nothing.
        assert texts.splits["test"].features.tolist() == [[1, 3, 2]]
        assert texts.splits["test"].labels.tolist() == [[1, 0, 0]]
        with pytest.raises(ValueError, match="there is no column 5"):
            data.read_texts(files, 1, 5, None)

    @pytest.mark.slow
    @pytest.mark.parametrize("output", ["softmax", "sparsehourglass(q=1)"])
    def test_a_transformer_learns(self, output):
        config = TextConfig(limit=600, epochs=6, hidden=32, layers=1, lr=5e-3, batch_size=16)
        texts = data.load_texts(config)
        best = recipe.train(config, texts, output, {"mapping": "sparsegen_lin", "mapping_options": {"lam": 0.5}}, 0)
        test = texts.splits["test"].labels
        everything = results.f1(torch.ones_like(test, dtype=torch.bool), test)
        assert best["validation"] > everything + 0.1
        assert best["attention_support"] < 8

    def test_attention_support_shrinks_as_lambda_grows(self):
        config = TextConfig(limit=60, hidden=16, layers=1)
        texts = data.load_texts(config)
        supports = []
        for lam in (-20.0, 0.0, 0.9):
            torch.manual_seed(0)
            options = {"mapping": "sparsegen_lin", "mapping_options": {"lam": lam}}
            model = recipe.build(config, texts, "sparsemax", options)
            for parameter in model.bert.encoder.parameters():
                parameter.data.mul_(20)
            batch = recipe.collate(recipe.examples(texts.splits["train"]))
            supports.append(head_statistics(model, [batch])["support_encoder_self"])
        assert supports[0] > supports[1] > supports[2] >= 1

    def test_settings_are_checked(self):
        with pytest.raises(ValueError, match="must name the splits"):
            TextConfig(data="mine")
        with pytest.raises(ValueError, match="multiple of 16"):
            TextConfig(hidden=20)


def test_committed_results_have_their_columns_and_no_duplicates():
    for path in sorted((RECIPES / "lab" / "results" / "multilabel").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        keys = [tuple(row[name] for name in results.KEY) for row in rows]
        assert len(set(keys)) == len(keys) > 0
        for row in rows:
            assert 0 <= float(row["micro_f1"]) <= 1 and row["hardware"] and row["command"]
            json.loads(row["chosen"])
    assert dataclasses.is_dataclass(LinearConfig)
