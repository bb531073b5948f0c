"""The classification recipe, end to end on a few invented words."""

from pathlib import Path

import pytest
import recipe_runs as runs
import torch

import classification
from common import classes
from common.settings import parse

STEMS = ["lar", "mir", "tol", "sen", "ruk", "pim", "dov", "gal", "hem", "bis"]
ENDINGS = {"upper": "xyx", "lower": "wqww", "middle": "jcj"}


@pytest.fixture
def data(tmp_path):
    """The ending tells the class; one stem in five is only tested."""
    lines = ["split\tform\tlang"]
    for place, stem in enumerate(STEMS):
        split = "test" if place % 5 == 4 else "dev" if place % 5 == 3 else "train"
        lines += [f"{split}\t{stem}{ending}\t{label}" for label, ending in ENDINGS.items()]
    lines.append("test\tlarxyx\tupper")  # in training too
    path = tmp_path / "words.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def settings(data, out, **changes):
    small = runs.SMALL | runs.same(data) | {"width": 16, "batch_size": 6, "epochs": 2}
    small |= {"split_column": "split", "text": "form", "label": "lang"}
    return classification.Settings(out=str(out), **{**small, **changes})


@pytest.mark.slow
def test_it_learns_and_a_finished_model_can_be_made_sparse(data, tmp_path):
    results = str(tmp_path / "rows.csv")
    same = {"split_column": "", "results": results, "lr": 0.003, "width": 32}  # all words are learned and tested
    classification.main(settings(data, tmp_path / "run", epochs=20, **same))
    model = str(tmp_path / "run" / "model")
    options = {"model": model, "attention": "learned", "alpha_init": "1.2", "output_alpha": 1.5, "lr": 0.01}
    classification.main(settings(data, tmp_path / "tuned", **same | options | {"epochs": 5}))
    dense, sparse = runs.rows(results)
    for row in (dense, sparse):
        assert row["accuracy"] == row["macro_f1"] == "100.0"
        assert (row["seen"], row["unseen_accuracy"]) == ("100.0", "")
    assert dense["certain_accuracy"] == ""
    assert float(sparse["possible_labels"]) < 3
    kept = [line.split("\t") for line in (tmp_path / "tuned" / "predictions.tsv").read_text().splitlines()]
    assert len(kept) == int(sparse["test_texts"]) and all(label == guess for _, label, guess in kept)
    card = (tmp_path / "tuned" / "model" / "README.md").read_text(encoding="utf-8")
    assert "type: text-classification" in card and "| accuracy | 100.0 |" in card


def test_long_texts_need_a_model_that_sees_them(data, tmp_path):
    classification.main(settings(data, tmp_path / "run", smoke=True, max_tokens=16))
    found = runs.result(tmp_path / "run")
    assert (found["classes"], found["test_texts"], found["certain"]) == (3, 7, 0)
    assert found["seen"] == pytest.approx(100 / 7, abs=0.01)
    labels = runs.config(tmp_path / "run")["id2label"]
    assert list(labels.values()) == ["lower", "middle", "upper"]
    with pytest.raises(ValueError, match="max_tokens=128 is not allowed: it must be at most 16"):
        classification.main(settings(data, tmp_path / "on", model=str(tmp_path / "run" / "model")))


def test_measures_by_hand():
    # Two of three classes occur; at alpha = 2 a class is certain from a gap of 1 on.
    logits = torch.tensor([[2.0, 0, 0], [0.1, 0.5, -3], [0, 3, 0], [0.2, 0.5, 0.4]])
    labels = torch.tensor([0, 0, 1, 1])
    found = classes.scores(logits, labels, 2.0)
    assert (found["accuracy"], found["possible_labels"], found["certain"]) == (75, 1.75, 50)
    assert found["certain_accuracy"] == 100
    assert found["macro_f1"] == pytest.approx(100 * (2 / 3 + 4 / 5) / 2, abs=0.01)
    dense = classes.scores(logits, labels, 1.0)
    assert (dense["possible_labels"], dense["certain"], dense["certain_accuracy"]) == (3, 0, "")


@pytest.mark.parametrize("size", [0, 40])
def test_the_tokenizer(size):
    tokenizer = classes.train_tokenizer(["ab ba", "abba\nab"], size)
    ids = tokenizer(["ab ba", "abX"], padding=True)
    assert [tokenizer.decode(row)[:5] for row in ids["input_ids"]] == ["[CLS]"] * 2
    assert ids["input_ids"][0][-1] == tokenizer.sep_token_id == 3
    if not size:
        assert ids["input_ids"][0][1:-1] == tokenizer.convert_tokens_to_ids(list("ab ba"))
        assert ids["input_ids"][1][3] == tokenizer.unk_token_id
    assert torch.tensor(ids["attention_mask"]).sum() < 2 * len(ids["input_ids"][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split_column": "lang"}, "no row has 'train' in its column lang"),
        ({"label": "split", "split_column": ""}, "all right"),
        ({"text": "word"}, "words.tsv:1: no column word; it has split, form, lang"),
        ({"results": "old.csv"}, "use another file"),
    ],
)
def test_bad_data_stop_it_before_it_starts(data, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("old.csv").write_text("a,b\n")
    if message == "all right":
        classification.main(settings(data, tmp_path / "run", smoke=True, **changes))
        return
    with pytest.raises(ValueError, match=message):
        classification.main(settings(data, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_header_of_other_names_is_no_text(data, tmp_path):
    rows = [f"{stem}{ending}\t{label}\n" for stem in STEMS for label, ending in ENDINGS.items()]
    files = {}
    for split, own in (("train", rows), ("dev", rows[::-1]), ("test", rows[::3])):
        files[split] = str(tmp_path / f"{split}.tsv")
        Path(files[split]).write_text("Wort\tTongue\n" + "".join(own), encoding="utf-8")
    with pytest.raises(ValueError, match=r"both begin with Wort / Tongue, .* looks like a header"):
        classification.main(settings(data, tmp_path / "run", **files, split_column=""))
    assert not (tmp_path / "run").exists()


def test_labels_must_be_known(tmp_path):
    with pytest.raises(ValueError, match="test has labels that training does not have: c"):
        classes.check_labels([("x", "a"), ("y", "b")], dev=[("x", "a")], test=[("z", "c")])
    with pytest.raises(ValueError, match="all training texts have the label 'a'"):
        classes.check_labels([("x", "a")])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--heads 3", "width=128 is not allowed: it must be a multiple of heads=3"),
        ("--dev ''", "dev='' is not allowed"),
    ],
)
def test_settings_are_checked(option, message, capsys):
    given = ["--train", "a.tsv", "--dev", "a.tsv", "--test", "a.tsv", *option.replace("''", "").split(" ")]
    with pytest.raises(SystemExit):
        parse(classification.Settings, classification.__doc__, given)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("output_alpha", [1.0, 1.5])
def test_coverage_of_sets_is_measured_on_a_finished_run(data, tmp_path, output_alpha, forget_processes):
    if output_alpha == 1.0:
        pytest.importorskip("mapie", reason="conformal sets of a softmax come from MAPIE")
    many = Path(data).read_text().splitlines()
    many += [
        f"test\t{stem}{stem2}{end}\t{label}" for stem in STEMS for stem2 in STEMS for label, end in ENDINGS.items()
    ]
    Path(data).write_text("\n".join(many) + "\n")
    results = tmp_path / "sets.csv"
    classification.main(settings(data, tmp_path / "run", output_alpha=output_alpha))
    before = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    forget_processes()
    changes = {"coverage": [80.0, 90.0], "results": str(results), "output_alpha": output_alpha, "resume": True}
    classification.main(settings(data, tmp_path / "run", **changes))
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == before
    rows = runs.rows(results)
    names = ["entmax 1.5", "entmax, alpha chosen", *(["APS", "RAPS"] if output_alpha == 1.0 else [])]
    assert [(row["method"], row["coverage_wanted"]) for row in rows] == [
        (n, c) for c in ("80.0", "90.0") for n in names
    ]
    for row in rows:
        # 153 calibrate and 154 test, ten times: six standard errors of one split.
        assert abs(float(row["coverage"]) - float(row["coverage_wanted"])) < 14 and 0 < float(row["size"]) <= 3
        assert (row["splits"], row["calibration"], row["test"], row["unit"]) == ("10", "153", "154", "label")
