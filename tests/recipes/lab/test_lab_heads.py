"""The head analysis behind the results: which models, which text, and what is written."""

import csv
from pathlib import Path

import pytest

import inflection
from recipes.lab import heads
from recipes.lab.jobs import Job, read_jobs
from recipes.lab.rows import Rows

RECIPES = Path(__file__).parents[3] / "recipes"

JOBS = read_jobs(RECIPES / "lab" / "jobs.yaml")
WORDS = [
    inflection.Word("german", lemma, form, ("V", "PST"))
    for lemma, form in [("gehen", "ging"), ("sehen", "sah"), ("stehen", "stand"), ("leben", "lebte")]
]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Two models in the folders of their jobs, and a study of them."""
    jobs = [Job("toys", "inflection", ("--seed", "0", "--attention", kind)) for kind in ("softmax", "1.5")]
    tokenizer = inflection.build_tokenizer(WORDS)
    for job in jobs:
        settings = inflection.Settings(attention=job.options[-1], width=16, layers=1, heads=2)
        folder = tmp_path / "runs" / job.name / "model"
        inflection.build_model(settings, tokenizer, 20).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    study = heads.Study(
        "heads",
        "toys",
        {"plain": {"attention": "softmax"}, "sparse": {"attention": "1.5", "seed": "0"}},
        lambda: [(word.source, word.form) for word in WORDS],
        lambda: {"batch_size": 2, "importance": "none", "device": "cpu"},
        {"drawn": heads.plots.head_diversity},
    )
    monkeypatch.setitem(heads.STUDIES, "toys", study)
    return jobs


@pytest.mark.slow
def test_tables_and_figures_are_written(trained, tmp_path):
    (tmp_path / "figures").mkdir()
    heads.study("toys", trained, tmp_path / "results", tmp_path / "runs", tmp_path / "figures")
    assert {file.name for file in (tmp_path / "results" / "heads").iterdir()} == set(heads.TABLES)
    with (tmp_path / "results" / "heads" / "sites.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["model"] for row in rows] == ["plain"] * 3 + ["sparse"] * 3
    assert all(float(row["density"]) == 1 for row in rows[:3])
    # One weight per letter of the questions, end symbols included: the whole text has been read.
    sources = sum(len(word.lemma) + 4 for word in WORDS)
    assert {int(row["tokens"]) for row in rows if row["site"] == "encoder_self"} == {sources}
    assert (tmp_path / "figures" / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "runs" / "heads" / "sentences.tsv").read_text().splitlines()[0] == "<german><V><PST>gehen\tging"


def test_a_model_that_is_not_there_is_named(trained, tmp_path):
    (tmp_path / "runs" / trained[1].name).rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"attention-1\.5.*--only toys"):
        heads.study("toys", trained, tmp_path / "results", tmp_path / "runs")
    assert not (tmp_path / "results").exists()


def test_a_job_must_be_the_only_one(trained):
    with pytest.raises(ValueError, match="2 jobs of the group toys"):
        heads.job_of(trained, "toys", {"seed": "0"})
    with pytest.raises(ValueError, match="0 jobs of the group toys"):
        heads.job_of(trained, "toys", {"seed": "7"})


@pytest.mark.parametrize("name", ["translation", "inflection"])
def test_the_committed_tables_are_of_the_models_of_the_list(name):
    study = heads.STUDIES[name]
    assert all(heads.job_of(JOBS, study.group, wanted) for wanted in study.models.values())
    rows = Rows()(f"{study.folder}/sites")
    assert list(dict.fromkeys(row["model"] for row in rows)) == list(study.models)
