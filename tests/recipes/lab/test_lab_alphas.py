"""Figures 2 to 5 of Correia et al. 2019 from made-up heads: the verdicts both ways, and what is drawn."""

import csv
import json
import math

import pytest
from scipy import stats

from recipes.lab.jobs import Job
from recipes.lab.pages import head_alphas
from recipes.lab.pages.page import render
from recipes.lab.rows import SITES, Rows

#: Alphas of a site with two modes, with one, and such that nobody can tell.
TWO = [1.1, 1.12, 1.14, 1.11, 1.13, 1.1, 1.88, 1.9, 1.92, 1.91, 1.89, 1.9]
ONE = [float(1.5 + 0.1 * stats.norm.ppf((i + 0.5) / 40)) for i in range(40)]
FEW = [1.0, 1.2, 1.4, 1.6, 1.8]


@pytest.fixture
def rows(tmp_path):
    """A folder of results; the function writes the heads of the models of a study into it."""

    def write(study, models):
        lines = [
            {"model": model, "site": site, "layer": place % 2, "head": place // 2, "alpha": alpha, "density": density}
            for model, sites in models.items()
            for site, (alphas, densities) in sites.items()
            for place, (alpha, density) in enumerate(zip(alphas, densities, strict=True))
        ]
        path = tmp_path / f"{head_alphas.STUDIES[study]}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)

    write.read = Rows(tmp_path)
    return write


def everywhere(alphas, densities=None):
    return dict.fromkeys(SITES, (alphas, densities or [0.5] * len(alphas)))


def sites(*alphas):
    return {site: (own, [0.5] * len(own)) for site, own in zip(SITES, alphas, strict=True)}


class TestModes:
    @pytest.mark.parametrize("values", [TWO, ONE, FEW, [1.0, 1.1, 1.1, 1.2, 1.9, 1.3]])
    def test_the_coefficient_is_sarles(self, values):
        wanted = (stats.skew(values) ** 2 + 1) / stats.kurtosis(values, fisher=False)
        assert head_alphas.bimodality(values)[0] == pytest.approx(wanted)

    def test_its_limits(self):
        many = [i / 4000 for i in range(4000)]
        assert head_alphas.bimodality(many[::10])[0] == pytest.approx(head_alphas.UNIFORM, abs=0.01)
        assert head_alphas.bimodality([0.0] * 300 + [1.0] * 300)[0] == pytest.approx(1, abs=0.01)
        normal = [float(stats.norm.ppf((i + 0.5) / 400)) for i in range(400)]
        assert head_alphas.bimodality(normal)[0] == pytest.approx(1 / 3, abs=0.02)

    def test_few_values_do_not_tell(self):
        assert [head_alphas.modes(values) for values in (TWO, ONE, FEW, TWO[:4])] == [2, 1, None, None]


@pytest.mark.parametrize(
    ("encoder", "others", "verdicts"),
    [
        (TWO, ONE, ["found", "found"]),
        (ONE, TWO, ["not found", "not found"]),
        (FEW, FEW, ["not to be told from 10 heads"] * 2),
    ],
)
def test_modes_of_alpha_by_site(rows, encoder, others, verdicts):
    rows("inflection", {f"learned-{seed}": sites(encoder, others, others) for seed in (0, 1)})
    found = head_alphas.alphas(rows.read, "inflection")
    assert [finding.verdict for finding in found] == verdicts
    assert f"{2 * len(encoder)} heads a site" in found[0].here


def test_one_site_with_two_modes_is_enough_against_one_mode(rows):
    rows("translation", {"learned": sites(TWO, FEW, TWO)})
    encoder, others = head_alphas.alphas(rows.read, "translation")
    assert (encoder.verdict, others.verdict) == ("found (one seed)", "not found (one seed)")
    rows("translation", {"learned": sites(TWO, FEW, ONE)})
    assert head_alphas.alphas(rows.read, "translation")[1].verdict == "not to be told from 5 heads"
    rows("translation", {"1.5": sites(TWO, FEW, ONE)})
    assert head_alphas.findings(rows.read) == []  # there is no model with learned alpha


def test_densities(rows):
    flat = [0.05, 0.25, 0.45, 0.65, 0.85, 0.99]
    alike = [0.5, 0.5, 0.5, 0.5, 0.6, 0.4]
    models = {"1.5-0": everywhere([*FEW, 1.5], alike), "1.5-1": everywhere([*FEW, 1.5], alike)}
    rows("inflection", {**models, "learned-0": everywhere(ONE[:6], flat), "learned-1": everywhere(ONE[:6], flat)})
    even, full, layers = head_alphas.densities(rows.read, "inflection")
    assert [finding.verdict for finding in (even, full, layers)] == ["found"] * 3
    assert even.here == f"{math.log10(6):.2f} (2 seeds) against 0.38 (2 seeds)"
    assert full.here == "16.67 % (2 seeds) against 0.00 % (2 seeds)"
    # Of layer 0 the densities .05 .45 .85, of layer 1 .25 .65 .99; .5 .5 .6 and .5 .5 .4.
    assert layers.here == "31.45 % (2 seeds) against 4.71 % (2 seeds)"
    rows("translation", {"1.5": everywhere([*FEW, 1.5], flat), "learned": everywhere(ONE[:6], alike)})
    found = head_alphas.densities(rows.read, "translation")
    assert [finding.verdict for finding in found] == ["not found (one seed)"] * 3


def test_figures_hold_every_head(rows):
    heads = everywhere([*FEW, 1.5], [0.1, 0.3, 0.5, 0.7, 1.0, 0.9])
    rows("inflection", {f"{kind}-{seed}": heads for kind in ("softmax", "1.5", "learned") for seed in (0, 1)})
    rows("translation", {"softmax": everywhere(ONE), "learned": everywhere(TWO)})
    drawn = head_alphas.draw_alphas(rows.read)
    assert [sum(bar.get_height() for bar in axis.patches) for axis in drawn.axes] == [12] * 6
    drawn = head_alphas.draw_densities(rows.read)
    assert [sum(bar.get_height() for bar in axis.patches) for axis in drawn.axes] == [12] * 9
    assert [axis.get_ylabel() for axis in drawn.axes[::3]] == [
        "translation\nlearned alpha\nnumber of heads",
        "inflection, 2 seeds\nalpha 1.5\nnumber of heads",
        "inflection, 2 seeds\nlearned alpha\nnumber of heads",
    ]
    lines = head_alphas.draw_sorted(rows.read).axes[3].lines
    assert [list(line.get_ydata()) for line in lines] == [[10, 10, 50, 50, 100, 100], [30, 30, 70, 70, 90, 90]]
    assert head_alphas.draw_training(rows.read, "inflection") is None


def log(folder, *means, spread=0.1, name="inflection_trajectory.jsonl"):
    """A log of two heads per site, ``spread`` apart (a number, or one per step), around these means, every 10 steps."""
    spreads = spread if isinstance(spread, list) else [spread] * len(means)
    lines = [
        json.dumps({"step": 10 * place, "alpha": {site: [[mean - apart / 2, mean + apart / 2]] for site in SITES}})
        for place, (mean, apart) in enumerate(zip(means, spreads, strict=True))
    ]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


class TestOverTraining:
    @pytest.mark.parametrize(
        ("means", "verdict"),
        [
            ([1.5, 1.3, 1.2, 1.25, 1.4], "found (one seed)"),
            ([1.5, 1.4, 1.3, 1.2, 1.1], "not found: they fall to the end (one seed)"),
            ([1.5, 1.4, 1.3, 1.2, 1.205], "not found: they fall to the end (one seed)"),
            ([1.2, 1.3, 1.4, 1.45, 1.5], "not found (one seed)"),
            ([1.5, 1.495, 1.5, 1.5, 1.5], "not found (one seed)"),
        ],
    )
    def test_the_dip(self, rows, means, verdict):
        log(rows.read.folder, *means)
        assert head_alphas.findings(rows.read)[0].verdict == verdict

    def test_only_some_heads_fall(self, rows):
        log(rows.read.folder, 1.5, 1.3, 1.4, spread=[0.1, 0.6, 0.1])  # one head of a pair falls far, the other rises
        dip, _ = head_alphas.findings(rows.read)
        assert "3 of 6 heads" in dip.here and dip.verdict == "not found (one seed)"

    @pytest.mark.parametrize(
        ("spread", "verdict"), [([0.4, 0.1, 0.3], "found (one seed)"), ([0.4, 0.3, 0.1], "not found (one seed)")]
    )
    def test_heads_part_ways(self, rows, spread, verdict):
        log(rows.read.folder, 1.5, 1.2, 1.4, spread=spread)
        _, parted = head_alphas.findings(rows.read)
        assert parted.verdict == verdict
        assert "6 of 6 heads end at least 0.05 above" in parted.here

    def test_heads_that_never_turn_do_not_part_ways(self, rows):
        log(rows.read.folder, 1.5, 1.4, 1.4, spread=[0.1, 0.1, 0.12])
        assert head_alphas.findings(rows.read)[1].verdict == "not found (one seed)"

    def test_what_was_looked_at_beside(self, rows):
        log(rows.read.folder, 1.5, 1.4, 1.3, spread=[0.1, 0.1, 0.2])
        dip, _ = head_alphas.findings(rows.read)
        assert dip.tried == "alphas at the end correlate 1.00 with those that the heads were started with"
        log(rows.read.folder, 1.5, 1.3, 1.4, spread=[0.1, 0.1, 0.2], name="inflection_trajectory_fast.jsonl")
        dip, parted = head_alphas.findings(rows.read)
        assert dip.verdict == "not found: they fall to the end (one seed)"
        assert "at ten times the rate: mean 1.50 at the start, lowest at step 10 of 20 with 1.30" in dip.tried
        assert dip.tried.endswith("1.40 at the end: found")
        assert parted.tried.endswith("3 of 6 heads end at least 0.05 above their lowest: found")
        assert len(head_alphas.draw_training(rows.read, "inflection", faster=True).axes) == 3

    def test_a_translation_model_is_judged_by_its_own_log(self, rows):
        log(rows.read.folder, 1.5, 1.4, 1.3)
        log(rows.read.folder, 1.5, 1.3, 1.4, name="translation_enja.jsonl")
        found = {finding.claim: finding for finding in head_alphas.findings(rows.read)}
        dips = [
            found[f"Correia et al., figure 2, {study}: alphas fall first and rise later"]
            for study in head_alphas.STUDIES
        ]
        assert [dip.verdict for dip in dips] == ["found (one seed)", "not found: they fall to the end (one seed)"]
        shown = render("results.md.j2", rows.read.folder)
        assert "Japanese-English translation model with learned alpha (one seed, 20 steps)" in shown
        log(rows.read.folder, 1.5, 1.3, 1.45, name="translation_enja_fast.jsonl")
        tried = [finding.tried for finding in head_alphas.findings(rows.read) if "translation: alphas" in finding.claim]
        assert "at ten times the rate" in tried[0] and tried[0].endswith("1.45 at the end: found")

    def test_the_figure_and_the_page(self, rows):
        log(rows.read.folder, 1.5, 1.3, 1.4)
        axes = head_alphas.draw_training(rows.read, "inflection").axes
        assert [len(axis.lines) for axis in axes] == [2, 2, 2]
        assert "figure 2, inflection: alphas fall first" in render("results.md.j2", rows.read.folder)

    def test_the_log_of_the_run_is_thinned(self, tmp_path):
        job = Job("inflection_trajectory", "inflection", ("--seed", "0"))
        (tmp_path / "runs" / job.name).mkdir(parents=True)
        (tmp_path / "results").mkdir()
        log(tmp_path / "runs" / job.name, *[1.5] * 151, 1.25, name="alphas.jsonl")
        collect = lambda: head_alphas.collect([job], tmp_path / "results", tmp_path / "runs")  # noqa: E731
        assert collect() == {}  # the run has no row yet
        (tmp_path / "results" / "inflection_trajectory.csv").write_text(f"command\n{job.command}\n")
        assert collect() == {job.group: 107}
        kept = head_alphas.trajectory(Rows(tmp_path / "results"), job.group)
        assert kept.steps == [*range(0, 1001, 10), *range(1100, 1501, 100), 1510]
        assert kept.alpha["cross"][-1].mean() == pytest.approx(1.25)
