"""The summarisation recipe, end to end on a few invented abstracts."""

import json
from pathlib import Path

import pytest
import recipe_runs as runs

import summarization
from common.settings import parse

THINGS = ["networks", "trees", "graphs", "kernels"]
DEEDS = ["train", "prune", "sort", "cut"]


@pytest.fixture
def data(tmp_path):
    """The first reference is what training learns; the second is worded otherwise."""
    records = [
        {
            "source": ["It is hard.", f"{thing} {thing} {deed}."],
            "target": [f"All {thing} win.", f"{thing} and how to {deed} them"],
        }
        for thing in THINGS
        for deed in DEEDS
    ]
    path = tmp_path / "abstracts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def settings(data, out, **changes):
    small = runs.SMALL | runs.same(data) | {"vocabulary": 200, "max_summary": 16, "beams": 2}
    return summarization.Settings(out=str(out), **{**small, **changes})


@pytest.mark.slow
def test_it_learns_and_a_finished_model_can_be_made_sparse(data, tmp_path):
    summarization.main(settings(data, tmp_path / "run", epochs=100, lr=0.003, batch_size=4, width=64))
    dense = runs.result(tmp_path / "run")
    # Half of it is had by the words that all summaries share. Four seeds learn which thing wins as well, and reach 100.
    assert dense["rouge1"] > 75 and dense["first_rouge1"] > 75
    model = str(tmp_path / "run" / "model")
    tuned = settings(data, tmp_path / "tuned", model=model, attention="1.2", output_alpha=1.5, epochs=5, lr=0.001)
    summarization.main(tuned)
    sparse = runs.result(tmp_path / "tuned")
    assert sparse["rouge1"] > 75
    stored = runs.config(tmp_path / "tuned")
    assert (stored["entmax_config"]["alpha"], stored["entmax_config"]["output_alpha"]) == (1.2, 1.5)
    kept = (tmp_path / "tuned" / "summaries.txt").read_text(encoding="utf-8").splitlines()
    references = [json.loads(line)["target"] for line in Path(data).read_text().splitlines()]
    assert summarization.rouge(kept, references)["rouge1"] == sparse["rouge1"]
    card = (tmp_path / "tuned" / "model" / "README.md").read_text(encoding="utf-8")
    assert "type: summarization" in card and f"| rougeL | {sparse['rougeL']} |" in card


def test_summaries_may_be_longer_than_texts(data, tmp_path):
    summarization.main(settings(data, tmp_path / "run", smoke=True, max_tokens=6, max_summary=40))
    model = str(tmp_path / "run" / "model")
    stored = runs.config(tmp_path / "run")
    assert stored["max_position_embeddings"] == 48
    with pytest.raises(ValueError, match="max_summary=60 is not allowed: it must be at most 48"):
        summarization.main(settings(data, tmp_path / "on", model=model, max_tokens=6, max_summary=60))


def test_rouge_takes_the_best_reference():
    # rouge1: 2 of 3 and 2 of 2 words; F1 = 2 * 2/2 * 2/3 / (2/2 + 2/3) = 0.8.
    assert summarization.rouge(["sparse attention"], [["sparse attention wins"]])["rouge1"] == 80
    both = summarization.rouge(["sparse attention"], [["sparse attention wins", "attention sparse"]])
    assert (both["rouge1"], both["rouge2"]) == (100, 66.67)
    # Stems count: networks = network. Means are over texts.
    pair = summarization.rouge(["networks", "a"], [["network"], ["b"]])
    assert pair["rougeL"] == 50


def test_leads():
    assert summarization.Article.of(["One.", "Two."], ["x"]) == ("One. Two.", ["x"], "One.")
    assert summarization.Article.of(["One. Two."], ["x"]).lead == "One"


def test_long_texts_are_cut_and_long_summaries_left_out(data, tmp_path, capsys):
    with open(data, "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"source": ["x"], "target": ["much too long " * 10]}) + "\n")
    summarization.main(settings(data, tmp_path / "run", smoke=True, max_tokens=5))
    assert "1 texts left out: summaries over 16 tokens" in capsys.readouterr().out
    found = runs.result(tmp_path / "run")
    assert (found["cut"], found["test_texts"]) == (4, 4)
    assert found["lead_rouge1"] == 0  # "It is hard." has no word of any summary
    with pytest.raises(ValueError, match=r"max_summary=2 is not allowed: .*every summary of training or dev is longer"):
        summarization.main(settings(data, tmp_path / "other", max_summary=2))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"source": ["a"]}', r"abstracts\.jsonl:17: no target"),
        ('{"source": [], "target": ["b"]}', r":17: source is empty"),
    ],
)
def test_bad_data_stop_it_before_it_starts(data, tmp_path, line, message):
    with open(data, "a", encoding="utf-8") as lines:
        lines.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        summarization.main(settings(data, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_settings_are_checked(capsys):
    for option, message in [("--architecture gpt", "bart, marian or t5"), ("--beams 0", "at least 1")]:
        with pytest.raises(SystemExit):
            parse(summarization.Settings, "", ["--train", "a", "--dev", "a", "--test", "a", *option.split()])
        assert message in capsys.readouterr().err
