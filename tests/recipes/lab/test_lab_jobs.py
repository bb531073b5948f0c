"""The queue of experiments: what it runs, once, and what it says of failures."""

import csv
import dataclasses
import importlib
import json
import shutil
import textwrap
from pathlib import Path

import pytest
import yaml

from recipes.lab import __main__ as program
from recipes.lab import heads, jobs, views
from recipes.lab.jobs import read_jobs

RECIPES = Path(__file__).parents[3] / "recipes"

COMMITTED = read_jobs(RECIPES / "lab" / "jobs.yaml")
WITH_A_GPU = read_jobs(RECIPES / "lab" / "jobs_gpu.yaml")

#: A recipe that appends its row as the real ones do, and notes in calls.txt that it was called.
TOY = """
import csv, os, shlex, sys
from pathlib import Path
words = sys.argv[1:]
kept = words[: words.index("--out")]
results = Path(words[words.index("--results") + 1])
with open("calls.txt", "a") as calls:
    calls.write(f"{kept[1]} {os.environ['OMP_NUM_THREADS']} {words[words.index('--resume') + 1]}\\n")
if kept[1] == "bad":
    sys.exit("out of luck")
new = not results.exists()
results.parent.mkdir(exist_ok=True)
with results.open("a", newline="") as lines:
    writer = csv.writer(lines)
    if new:
        writer.writerow(["command"])
    writer.writerow([shlex.join(["python", "recipes/toy.py", *kept])])
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A folder with the toy recipe; the function runs a list of its options."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "toy.py").write_text(textwrap.dedent(TOY), encoding="utf-8")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)

    def run(*names, what="run", more=()):
        listed = [{"group": "toys", "recipe": "toy", "vary": [[{"kind": name} for name in names]]}]
        (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(listed), encoding="utf-8")
        places = ["--results", str(tmp_path / "results"), "--folder", str(tmp_path / "runs")]
        program.main([what, "--jobs", str(tmp_path / "jobs.yaml"), *places, *more])

    def calls():
        path = tmp_path / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    run.calls = calls
    return run


def test_a_job_runs_once_and_a_longer_list_only_what_is_new(queue):
    queue("a", "b", more=["--threads", "3"])
    assert queue.calls() == ["a 3 True", "b 3 True"]
    queue("a", "b", "c", more=["--workers", "2"])
    assert queue.calls() == ["a 3 True", "b 3 True", "c 1 True"]


def test_a_failure_is_reported_with_its_output_and_stops_nothing(queue, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"1 of 3 jobs failed:\npython recipes/toy.py --kind bad"):
        queue("a", "bad", "b")
    assert [call.split()[0] for call in queue.calls()] == ["a", "bad", "b"]
    assert "FAILED  python recipes/toy.py --kind bad  see " in capsys.readouterr().out
    assert (tmp_path / "runs" / "toys-kind-bad.txt").read_text().strip() == "out of luck"
    with pytest.raises(SystemExit):  # and is tried again
        queue("a", "bad", "b")
    assert [call.split()[0] for call in queue.calls()] == ["a", "bad", "b", "bad"]


def test_the_list_says_what_is_open_and_runs_nothing(queue, capsys):
    queue("a")
    capsys.readouterr()
    queue("a", "b", what="list")
    assert capsys.readouterr().out.splitlines() == [
        "done  python recipes/toy.py --kind a",
        "open  python recipes/toy.py --kind b",
    ]
    queue("b", more=["--only", "others"])
    assert len(queue.calls()) == 1


def test_dev_scores_are_kept_when_the_runs_are_gone(queue, tmp_path):
    queue("a", "b", "c")
    logs = {"a": [(1, 0.5), (2, 0.70004)], "b": [(1, 0.1)]}
    for name, scores in logs.items():
        folder = tmp_path / "runs" / f"toys-kind-{name}"
        folder.mkdir(parents=True)
        entries = [{"step": 1, "loss": 2.0}, *({"step": step, "eval_score": score} for step, score in scores)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": entries}), encoding="utf-8")
    queue("a", "b", "c", what="curves")
    shutil.rmtree(tmp_path / "runs" / "toys-kind-a")
    queue("a", "b", "c", what="curves")
    with (tmp_path / "results" / "dev_curves.csv").open(newline="", encoding="utf-8") as lines:
        found = [(row["command"][-1], row["step"], row["dev_score"]) for row in csv.DictReader(lines)]
    assert found == [("a", "1", "0.5"), ("a", "2", "0.7"), ("b", "1", "0.1")]


class TestTheCommittedList:
    @pytest.mark.parametrize(("listed", "least"), [(COMMITTED, 60), (WITH_A_GPU, 10)])
    def test_no_two_jobs_share_a_command_or_a_folder(self, listed, least):
        assert len({job.command for job in listed}) == len({job.name for job in listed}) == len(listed) >= least
        assert max(len(job.name) for job in listed) < 200  # file names have an end

    def test_every_job_is_one_that_its_recipe_accepts(self):
        for job in COMMITTED + WITH_A_GPU:
            known = {field.name for field in dataclasses.fields(importlib.import_module(job.recipe).Settings)}
            assert {word[2:] for word in job.options if word.startswith("--")} <= known | {"config"}
            assert all((RECIPES.parent / word).exists() for word in job.options if word.endswith(".yaml"))

    def test_models_of_views_and_studies_are_those_of_one_job(self):
        wanted = [(study.group, options) for study in heads.STUDIES.values() for options in study.models.values()]
        for group, options in [*wanted, views.WORD, *((views.LAMBDA_GROUP, own) for own in views.LAMBDAS.values())]:
            assert heads.job_of(COMMITTED, group, options).done(RECIPES / "lab" / "results")
        with pytest.raises(ValueError, match="0 jobs of the group inflection"):
            heads.job_of(COMMITTED, "inflection", {"seed": "7"})

    def test_a_model_that_was_not_trained_is_named_with_what_trains_it(self, tmp_path):
        job = heads.job_of(COMMITTED, *views.WORD)
        with pytest.raises(FileNotFoundError, match=r"there is no .*/model: train first, .* --only inflection_epochs"):
            heads.trained(job, tmp_path)
        (tmp_path / job.name / "model").mkdir(parents=True)
        assert heads.trained(job, tmp_path) == tmp_path / job.name / "model"

    def test_models_that_a_job_starts_from_are_made_by_another(self):
        folders = {f"runs/{job.name}/model" for job in COMMITTED}
        used = {word for job in COMMITTED for word in job.options if word.endswith("/model")}
        assert used and used <= folders

    def test_the_committed_rows_belong_to_listed_jobs(self):
        for group in {job.group for job in COMMITTED}:
            path = RECIPES / "lab" / "results" / f"{group}.csv"
            if path.exists():
                listed = [job.command for job in COMMITTED if job.group == group]
                with path.open(newline="", encoding="utf-8") as lines:
                    found = [row["command"] for row in csv.DictReader(lines)]
                assert all(job.done(RECIPES / "lab" / "results") for job in COMMITTED if job.command in found)
                assert set(found) <= set(listed), group
                assert len(set(found)) == len(found), group
