"""What trained models make of a word and of a sentence: how these are chosen, and that what is shown is what the model says."""

import json
import math
from pathlib import Path

import pytest
import torch

import inflection
from recipes.lab import mapping_views, views
from recipes.lab.jobs import Job, read_jobs
from recipes.lab.pages.page import render
from recipes.lab.rows import Rows

RECIPES = Path(__file__).parents[3] / "recipes"

#: A lemma with one form, and one with three.
WORDS = [
    inflection.Word("german", lemma, form, ("V",))
    for lemma, form in [("leben", "lebte"), ("gehen", "ging"), ("gehen", "gang"), ("gehen", "gehte")]
]


@pytest.fixture(scope="module")
def learned():
    """A tiny model that has learned the words by heart."""
    torch.manual_seed(0)
    tokenizer = inflection.build_tokenizer(WORDS)
    settings = inflection.Settings(attention="1.5", output_alpha=1.5, width=32, layers=1, heads=2, dropout=0.0)
    model = inflection.build_model(settings, tokenizer, 20)
    batch = tokenizer([word.source for word in WORDS], padding=True, return_tensors="pt")
    targets = tokenizer(text_target=[word.form for word in WORDS], padding=True, return_tensors="pt")
    labels = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    return model.eval(), tokenizer


@pytest.mark.slow
def test_the_first_word_that_fits(learned):
    pairs = [(WORDS[0].source, "lebte"), (WORDS[1].source, "geht"), *((word.source, word.form) for word in WORDS[1:])]
    found = views.look(*learned, pairs)
    # Not the first, which has one answer, nor the second, whose right form is not among them.
    assert (found["place"], found["source"], found["form"]) == (3, "<german><V>gehen", "ging")
    answers = {"".join(tokens): math.exp(value) for tokens, value in found["hypotheses"]}
    # Next to nothing may be left to others.
    assert {name for name, p in answers.items() if p > 0.01} == {"ging</s>", "gang</s>", "gehte</s>"}
    assert sum(answers.values()) == pytest.approx(1, abs=1e-5)
    assert math.prod(step["probability"] for step in found["forced"]) == pytest.approx(answers["ging</s>"], abs=1e-5)
    weights = torch.tensor(found["weights"])
    assert weights.shape == (2, 5, len(found["keys"])) and found["queries"] == ["</s>", *"ging"]
    assert found["keys"] == ["<german>", "<V>", *"gehen", "</s>"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5), atol=1e-3, rtol=0)


@pytest.mark.slow
def test_no_word_fits(learned):
    with pytest.raises(ValueError, match="none of 1 words has 3 to 10 answers, the right one among them"):
        views.look(*learned, [(WORDS[0].source, "lebte")])


@pytest.mark.slow
def test_what_is_written_is_shown(learned, tmp_path, monkeypatch):
    job = Job(views.GROUP, "inflection", ("--attention", "1.5", "--output_alpha", "1.5", "--seed", "1"))
    results, folder = tmp_path / "results", tmp_path / "runs"
    with pytest.raises(FileNotFoundError, match="--only inflection_epochs"):
        views.collect([job], results, folder)
    for part in learned:
        part.save_pretrained(folder / job.name / "model")
    asked = []
    monkeypatch.setattr(views, "words", lambda *which: asked.append(which) or [(w.source, w.form) for w in WORDS])
    assert views.collect([job], results, folder) == "<german><V>gehen"
    assert asked == [(0, "test", ["german"])]
    rows = Rows(results)
    tree, forced = views.tree(rows), views.forced(rows)
    assert all(line in tree for line in ("├─ ", "└─ ", "a n g </s>", "e h t e </s>", "i n g </s>")) and tree[0] == "g"
    assert forced.splitlines()[0].split() == ["g", "certain"] and "also" in forced
    assert forced.splitlines()[-1].split() == ["n", "g", "</s>", "certain"]
    page = render("results.md.j2", results)
    assert "    g\n    ├─ " in page and job.command in page and "test word 2, `<german><V>gehen`" in page
    drawn = views.draw(rows).axes
    assert [axis.get_title("left") for axis in drawn[:2]] == ["Head 0", "Head 1"]


def test_the_committed_word_is_whole():
    text = (RECIPES / "lab" / "results" / views.FILE).read_text(encoding="utf-8")
    found = json.loads(text)
    job = next(job for job in read_jobs() if job.command == found["command"])
    assert job.group == views.GROUP and job.done(RECIPES / "lab" / "results")
    answers = {"".join(tokens): math.exp(value) for tokens, value in found["hypotheses"]}
    assert views.FEWEST <= len(answers) <= views.MOST and sum(answers.values()) == pytest.approx(1, abs=1e-4)
    right = math.prod(step["probability"] for step in found["forced"])
    assert right == pytest.approx(answers[found["form"] + "</s>"], abs=1e-5)
    assert text == text.strip() + "\n" and all(line.count("\n") == 0 for line in text.splitlines())


@pytest.fixture
def mappings(tmp_path, monkeypatch):
    """Folders of models with the mappings of the figure; what they were told to read."""
    torch.manual_seed(0)
    tokenizer = inflection.build_tokenizer(WORDS)
    jobs = []
    for wanted in mapping_views.MODELS.values():
        options = [part for name, value in wanted.items() for part in (f"--{name}", value)]
        jobs.append(Job(mapping_views.GROUP, "translation", tuple(options)))
        own = inflection.Settings(attention=wanted["attention"], output_alpha=1.0, width=32, layers=2, heads=2)
        for part in (inflection.build_model(own, tokenizer, 20), tokenizer):
            part.save_pretrained(tmp_path / "runs" / jobs[-1].name / "model")
    pairs = [(WORDS[1].source * 9, "ging"), (WORDS[1].source, "ging"), (WORDS[0].source, "lebte")]
    monkeypatch.setattr(mapping_views, "sentences", lambda: pairs)
    return jobs, tmp_path


@pytest.mark.slow
def test_one_sentence_under_several_mappings(mappings):
    jobs, folder = mappings
    # The first sentence is too long.
    assert mapping_views.collect(jobs, folder / "results", folder / "runs") == WORDS[1].source
    rows = Rows(folder / "results")
    counts = []
    for job, title in zip(jobs, mapping_views.MODELS, strict=True):
        found = mapping_views.view(rows)[title]
        model, tokenizer = views.load(job, folder / "runs")
        batch = tokenizer([WORDS[1].source], return_tensors="pt")
        labels = torch.tensor([tokenizer(text_target="ging")["input_ids"]])
        with torch.no_grad():
            given = model(**batch, labels=labels, output_attentions=True).cross_attentions[-1][0]
        counts.append(f"{title}: {int((given[found['head']] > 0).sum()) / 5:.1f}")
        assert found["head"] == given.max(-1).values.mean(-1).argmax() and found["command"] == job.command
        torch.testing.assert_close(torch.tensor(found["weights"]), given[found["head"]], atol=1e-3, rtol=0)
        assert found["queries"] == ["</s>", *"ging"] and found["keys"] == ["<german>", "<V>", *"gehen", "</s>"]
    assert mapping_views.attended(rows) == "; ".join(counts)
    titles = [axis.get_title("left") for axis in mapping_views.draw(rows).axes]
    assert titles[: len(jobs)] == list(mapping_views.MODELS)


@pytest.mark.slow
def test_a_sentence_that_cannot_be_shown(mappings, monkeypatch):
    jobs, folder = mappings
    with pytest.raises(FileNotFoundError, match=f"--only {mapping_views.GROUP}"):
        mapping_views.collect(jobs, folder / "results", folder / "elsewhere")
    monkeypatch.setattr(mapping_views, "LONGEST", 3)
    with pytest.raises(ValueError, match="no sentence has at most 3 tokens"):
        mapping_views.collect(jobs, folder / "results", folder / "runs")
    assert mapping_views.draw(Rows(folder / "results")) is None


def test_the_committed_sentence_is_whole():
    found = json.loads((RECIPES / "lab" / "results" / mapping_views.FILE).read_text(encoding="utf-8"))
    jobs = {job.command: job for job in read_jobs()}
    for title in mapping_views.MODELS:
        assert jobs[found[title]["command"]].done(RECIPES / "lab" / "results")
        weights = torch.tensor(found[title]["weights"])
        assert weights.shape == (len(found[title]["queries"]), len(found[title]["keys"]))
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)), atol=2e-3, rtol=0)
