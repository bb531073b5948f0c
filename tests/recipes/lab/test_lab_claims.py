"""The verdicts on the papers' findings, and the figures, from rows made up for the purpose."""

import csv

import pytest

from recipes.lab import __main__ as program
from recipes.lab.pages import claims, claims_heads, figures, judging, tables
from recipes.lab.pages.page import render
from recipes.lab.rows import CARDS, SITES, Rows, spread


@pytest.fixture
def rows(tmp_path):
    """A folder of results; the function writes a group's rows into it."""

    def write(group, *entries):
        path = tmp_path / f"{group}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, list(entries[0]))
            writer.writeheader()
            writer.writerows(entries)

    write.read = Rows(tmp_path)
    return write


@pytest.mark.parametrize(
    ("better", "worse", "margin", "verdict"),
    [
        ([3.0, 3.1, 2.9], [1.0, 1.1, 0.9], 0.0, "found"),
        ([1.2, 2.0, 0.5], [1.0, 1.9, 0.3], 0.0, "same direction"),
        ([1.0, 1.9, 0.3], [1.2, 2.0, 0.5], 0.0, "not found"),
        ([1.0, 1.1, 0.9], [3.0, 3.1, 2.9], 0.0, "opposite"),
        ([1.0], [0.9], 0.0, "found (one seed)"),
        ([1.0, 1.1], [1.2], 0.0, "not found (one seed)"),
        ([1.0], [1.0], 0.0, "not found (one seed)"),
        ([1.0], [1.2], 0.3, "found (one seed)"),  # as good, within the margin
        ([1.0], [1.4], 0.3, "not found (one seed)"),
        ([1.0, 1.01], [1.2, 1.21], 0.3, "found"),
        ([1.0, 1.01], [1.8, 1.81], 0.3, "opposite"),
    ],
)
def test_the_rule(better, worse, margin, verdict):
    gap, found = judging.judge(better, worse, margin)
    assert found == verdict
    assert gap == pytest.approx(sum(better) / len(better) - sum(worse) / len(worse))


def test_nothing_is_said_without_rows(rows):
    assert claims.verdicts(rows.read) == []
    assert {name for name, (draw, _) in figures.DRAWN.items() if draw(rows.read)} == {
        "controllable_regions",
        "entmax_curves",
    }


def inflection(attention, output, accuracy, ensemble="", exhaustive=0.0, single=0.0):
    return {"attention": attention, "output_alpha": output, "accuracy": accuracy, "ensemble": ensemble,
            "exhaustive": exhaustive, "single": single, "command": "", "hardware": "", "versions": "", **{f"js_{site}": "" for site in SITES}}  # fmt: skip


def test_inflection(rows):
    rows("inflection", inflection("softmax", "1.0", 60.0), inflection("softmax", "1.5", 58.0),
         inflection("1.5", "1.5", 65.0, exhaustive=80.0, single=50.0), inflection("1.5", "1.5", 67.0, exhaustive=80.0, single=50.0),
         inflection("softmax", "1.0", 61.0, ensemble="3"))  # fmt: skip
    sparse_output, both = claims.morphology(rows.read)
    assert (sparse_output.paper, sparse_output.verdict) == ("+2.33 %", "not found (one seed)")
    assert (both.here, both.holds) == ("+6.00 %: 66.00 (2 seeds) against 60.00", True)
    (ensemble,) = claims.ensembles(rows.read)
    assert (ensemble.paper, ensemble.here) == ("+3.13 %", "+1.00 % (1 setting)")
    known, only = claims.certainty(rows.read)
    assert known.verdict == "found" and only.verdict == "not found: fewer"
    rows("inflection_beams", {"command": "python recipes/inflection.py --beams 20", "exhaustive": 90.0, "single": 51.0})
    assert claims.certainty(rows.read)[1].tried == "51.0 % with a beam of 20"
    text = render("results.md.j2", rows.read.folder)
    assert "| **not found (one seed)** |" in text  # what does not hold stands out
    assert "there is only one possible answer*: 51.0 % with a beam of 20." in text


def test_models_that_learned_longer_speak_once_there_are_several(rows):
    def longer(attention, output, *accuracies, **shares):
        command = "python recipes/inflection.py --seed 0 --epochs 72"
        return [inflection(attention, output, accuracy, **shares) | {"command": command} for accuracy in accuracies]

    usual = [inflection("1.5", "1.5", 65.0, exhaustive=40.0, single=20.0) for _ in range(3)]
    rows("inflection", *usual)
    rows("inflection_epochs", *longer("1.5", "1.5", 73.0, exhaustive=71.0, single=45.0))
    known, _ = claims.certainty(rows.read)
    assert known.here == "40.0 ± 0.0 %" and known.tried == "71.0 % after 72 epochs instead of 24"
    rows(
        "inflection_epochs",
        *longer("1.5", "1.5", 73.0, 74.0, 75.0, exhaustive=80.0, single=45.0),
        *longer("softmax", "1.0", 70.0, 71.0, 72.0),
        {**inflection("1.5", "1.5", 76.0, ensemble="3"), "command": "python recipes/inflection.py --ensemble a b c"},
    )
    known, only = claims.certainty(rows.read)
    assert (known.here, known.verdict, known.tried) == ("80.0 ± 0.0 % after 72 epochs", "found", "")
    assert only.verdict == "not found: fewer"
    (ensemble,) = claims.ensembles(rows.read)
    assert ensemble.claim.endswith("its members (after 72 epochs)") and ensemble.here == "+2.00 % (1 setting)"
    (both,) = claims.morphology(rows.read)
    assert both.claim.endswith("better than softmax (after 72 epochs)") and both.verdict == "found"
    text = render("results.md.j2", rows.read.folder)
    assert "After 72 epochs:" in text and "| 1.5 / 1.5 | 74.00 ± 1.00 | 3 | 76.00 |" in text


def test_a_second_pair_of_languages_has_claims_and_a_table_of_its_own(rows):
    def row(attention, output, bleu):
        command = f"python recipes/translation.py --config recipes/configs/translation_enja.yaml --seed 0 --attention {attention}"
        return {"attention": attention, "output_alpha": output, "bleu": bleu, "command": command, "tests": "test:bleu=1",
                "output_support": 9, "density_cross": 0.25, "support_cross": 2.0,
                "js_cross": "", "train_seconds": 60, "hardware": "a CPU", "versions": "1"}  # fmt: skip

    rows("translation", row("softmax", "1.0", 30.0), row("2.0", "2.0", 31.0))
    rows(
        "translation_enja", row("softmax", "1.0", 20.0), row("1.5", "1.5", 19.0), row("2.0", "2.0", 18.0),
        row("1.5", "1.0", 19.8), row("learned", "1.0", 19.6),
    )  # fmt: skip
    german, *japanese = claims.translation(rows.read)
    assert (
        "(de-en): softmax translates better than sparsemax" in german.claim and german.verdict == "not found (one seed)"
    )
    assert [(finding.paper, finding.holds) for finding in japanese] == [
        ("+0.33 BLEU", False), ("+1.68 BLEU", True), ("+0.56 BLEU", True), ("+0.17 BLEU", False),
    ]  # fmt: skip
    text = render("results.md.j2", rows.read.folder)
    assert "Translation, Japanese to English" in text and "English words each, Japanese in pieces), 4 epochs" in text
    assert "| 1.0 / learned | 1 | 19.60 |" in text


def test_encoders_and_seeds_whose_perplexity_is_infinite(rows):
    def row(attention, output, accuracy):
        return {"attention": attention, "output_alpha": output, "accuracy": accuracy}

    rows("classification", *(row("softmax", "1.0", 60.0 + seed) for seed in (0, 0.2)),
         *(row("softmax", "1.5", 62.0 + seed) for seed in (0, 0.2)), row("learned", "1.0", 59.7))  # fmt: skip
    output, learned = claims.encoders(rows.read)
    assert output.here == "+2.00 %: 62.10 (2 seeds) against 60.10 (2 seeds)" and output.verdict == "found"
    assert learned.verdict == "not found (one seed)"
    assert spread([float("inf"), float("inf")]) == "inf" and spread([1.0, 3.0]) == "2.00 ± 1.41"


def test_every_site_has_to_be_more_diverse_and_is_read_by_itself(rows):
    def row(attention, *js):
        return {"attention": attention, "output_alpha": "1.0", "bleu": 30.0, "output_support": 9,
                **{f"js_{site}": value for site, value in zip(SITES, js, strict=True)}}  # fmt: skip

    rows("inflection", inflection("1.5", "1.5", 60.0, ensemble="3"))
    rows("translation", row("softmax", 0.1, 0.2, 0.3), row("1.5", 0.2, 0.3, 0.4), row("learned", 0.2, 0.1, 0.4))
    fixed, learned = claims_heads.diversity(rows.read)
    assert fixed.here == "encoder_self 0.20 against 0.10, cross 0.30 against 0.20, decoder_self 0.40 against 0.30"
    assert fixed.holds and not learned.holds
    assert [finding.verdict for finding in claims.translation(rows.read)] == ["found (one seed)"] * 3


def test_roles_need_a_head_that_plays_them(rows):
    def heads(previous, merging):
        return [
            {"model": kind, "confidence_median_previous": value, "subword_merging": other, "interrogation": ""}
            | ({"interrogation": 0.1} if place else {})
            for kind, values, others in zip(claims_heads.KINDS, previous, merging, strict=True)
            for place, (value, other) in enumerate(zip(values, others, strict=True))
        ]

    rows("head_analysis/heads", *heads([(0.6, 0.1), (0.1, 0.7), (0.2, 0.8)], [(0.3, 0.1), (0.1, 0.7), (0.2, 0.2)]))
    previous, merging, question = claims_heads.roles(rows.read)
    assert previous.here == "softmax 60.0 %, 1.5 70.0 %, learned 80.0 %" and previous.verdict == "found (one seed)"
    assert merging.verdict == "not found (one seed)"
    assert question.verdict == "not found: no such head in any model" and question.tried
    rows("head_analysis/heads", *heads([(0.6, 0.1), (0.1, 0.7), (0.2, 0.8)], [(0.3, 0.1), (0.1, 0.7), (0.2, 0.2)])[:4])
    assert claims_heads.roles(rows.read) == []  # the learned model has not been looked at


def test_heads_of_several_seeds(rows):
    def head(model, *confidences):
        return [{"model": model, "site": "decoder_self", "layer": 0, "head": place, "alpha": 1.5,
                 "confidence_median_previous": value} for place, value in enumerate([*confidences, ""])]  # fmt: skip

    rows("head_analysis_inflection/heads", *head("softmax-0", 0.9, 0.1, 0.1, 0.1), *head("softmax-1", 0.7, 0.1, 0.1, 0.1),
         *head("learned-0", 0.7, 0.6, 0.6, 0.6, 0.0), *head("learned-1", 0.71, 0.6, 0.6, 0.6, 0.0))  # fmt: skip
    surest, four = claims_heads.letters(rows.read)
    assert surest.here == "70.50 % (2 seeds) against 80.00 % (2 seeds)" and surest.verdict == "not found"
    assert four.here == "62.62 % (2 seeds) against 27.50 % (2 seeds)" and four.verdict == "found"


def conversion(attention, density, lost, perplexity):
    return {"command": attention + str(density), "attention": attention, "density": density, "lost": lost, "bleu": "",
            "perplexity": perplexity, "perplexity_before": 100.0, "schedule": "anneal", "density_target": "None", "distill_logits": "0.0"}  # fmt: skip


def test_conversion_is_judged_against_the_control(rows):
    rows("convert_lm", conversion("softmax", 1.0, -10.0, 90.0), conversion("1.5", 0.3, -9.9, 90.1),
         conversion("learned", 0.1, -8.0, 93.6))  # fmt: skip
    (found,) = claims.conversions(rows.read)
    assert (
        found.verdict == "not found against the control (one seed)"
    )  # 4 % above it, though 8 % below the model before
    assert "10.0 % left; 8.00 % perplexity gained against the model before, 4.00 % perplexity lost" in found.here
    rows("convert_lm", conversion("softmax", 1.0, -10.0, 90.0), conversion("learned", 0.1, -9.0, 90.9))
    assert claims.conversions(rows.read)[0].verdict == "found (one seed)"


def test_seeds_of_a_conversion_are_one_setting(rows):
    def seeds(command, *made):
        return [row | {"command": f"{command} --seed {seed} --x"} for seed, row in enumerate(made)]

    control = seeds("soft", conversion("softmax", 1.0, -10.0, 90.0), conversion("softmax", 1.0, -9.0, 91.0))
    lucky = seeds("learned", conversion("learned", 0.1, -9.9, 90.1), conversion("learned", 0.2, -4.0, 96.0))
    steady = seeds("1.5", conversion("1.5", 0.1, -9.0, 91.2), conversion("1.5", 0.12, -8.0, 91.4))
    rows("convert_lm", *control, *lucky, *steady)
    (found,) = claims.conversions(rows.read)
    assert found.verdict == "found (2 seeds)"
    assert found.here.startswith("best of 2 such conversions: 11.0 ± 1.4 % left; 8.50 % perplexity gained")
    assert "0.88 % perplexity lost against" in found.here  # 91.3 beside 90.5
    rows("convert_lm", *control, *steady[:1])
    assert claims.conversions(rows.read)[0].verdict == "found (one seed)"
    made = [{k: str(v) for k, v in row.items()} for row in (*control, *steady)]
    table = tables.conversions(made, "perplexity", "perplexity", "%")
    assert "| 1.5, anneal | 2 | 100.00 ± 0.00 | 91.30 ± 0.14 | -8.50 ± 0.71 | 0.88 | 11.0 ± 1.4 |" in table
    # One seed, however good, does not stand for a setting beside those of several.
    rows("convert_lm", *control, *steady, conversion("learned", 0.15, -10.0, 90.0))
    assert claims.conversions(rows.read)[0].here.startswith("11.0 ± 1.4 % left")


def test_a_conversion_is_compared_with_the_control_of_its_own_model(rows):
    older = {"perplexity_before": 110.0}
    rows("convert_lm", conversion("softmax", 1.0, -10.0, 90.0), conversion("softmax", 0.999, -10.0, 100.0) | older,
         conversion("learned", 0.1, -8.0, 101.0) | older)  # fmt: skip
    assert "1.00 % perplexity lost against" in claims.conversions(rows.read)[0].here


def test_conversions_are_told_apart_by_name():
    def named(options, **more):
        made = conversion("learned", 0.1, -8.0, 90.0) | {"command": f"python recipes/convert.py {options}", **more}
        return tables.conversion_name({k: str(v) for k, v in made.items()})

    assert named("", distill_logits=1.0) == "learned, anneal, distilled"
    softened = "--release 1.5 --softened true --density_rate 0.05"
    assert named(softened, schedule="abrupt", density_target=0.2) == (
        "learned, density target 0.2, softened at 1.5, abrupt, density rate 0.05"
    )


@pytest.mark.slow
def test_the_committed_rows_draw_figures(tmp_path):
    program.main(["figures", "--cards", str(tmp_path)])
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert {"inflection_time", "conversion"} <= drawn <= set(figures.DRAWN)
    committed = {path.stem for path in (CARDS / "figures").glob("*.png")}
    assert drawn <= committed


def test_a_model_that_has_not_begun_to_learn_decides_nothing(rows):
    def runs(attention, *scores):
        same = {"attention": attention, "output_alpha": "1.0", "hardware": "", "versions": "", "command": ""}
        return [{**same, "seed": seed, "bleu": score} for seed, score in enumerate(scores)]

    rows("translation_mappings", *runs("softmax", 20.0, 19.0, 5.0), *runs("2.0", 18.0, 18.5, 17.0))
    (finding,) = claims.alternatives(rows.read)
    assert finding.here == "+3.17 BLEU: 17.83 (3 seeds) against 14.67 (3 seeds)" and not finding.holds
    assert finding.verdict == "not to be told: softmax with seed 2 (5.0) had not begun to learn"
    assert finding.tried == "without that seed -1.25 BLEU: 18.25 (2 seeds) against 19.50 (2 seeds): opposite"
    rows("translation_mappings", *runs("softmax", 20.0, 19.0, 16.0), *runs("2.0", 18.0, 18.5, 17.0))
    assert claims.alternatives(rows.read)[0].verdict == "not found"
