"""Alphas and densities of heads: figures 2 to 5 of Correia et al. 2019, drawn from the rows, and whether they show the same.

How many modes alphas have is judged by Sarle's bimodality coefficient

    b = (skewness^2 + 1) / kurtosis,

which is 5/9 for a uniform distribution, smaller for one with one mode (1/3 for a normal one) and larger for one with two, up
to 1. They count as two modes, or as one, where b is more than two standard errors (jackknife over the heads) away from 5/9;
otherwise that many heads do not tell. Of a dozen heads it sees two clear modes mostly, a single one seldom, and it takes a
skewed mode for two. The form with corrections for few values is not used: its 5/9 holds for many values only.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from hf_entmax.analysis import plots
from hf_entmax.analysis.reading.trajectory import Trajectory, read_trajectory

from ..jobs import Job
from ..rows import SITES, Row, Rows, grouped, numbers, pick
from .claims_heads import models_by_kind
from .judging import Finding, found, judge, seeds

#: Analyses of heads, by what trained the models.
STUDIES = {"translation": "head_analysis/heads", "inflection": "head_analysis_inflection/heads"}
#: Runs whose alphas were logged, by what they train: the group that is judged, and that with alphas learned at ten times the
#: rate, which was looked at beside.
LOGGED = {
    "translation": ("translation_enja", "translation_enja_fast"),
    "inflection": ("inflection_trajectory", "inflection_trajectory_fast"),
}

UNIFORM = 5 / 9
#: A head that keeps so many of its weights counts as dense.
DENSE = 0.95
#: By how much the mean alpha has to fall and to rise for a dip.
DIP = 0.01
#: By how much a head has to rise to count as one that turned.
RISE = 0.05


def kinds(rows: Rows, study: str) -> dict[str, list[list[Row]]]:
    """The heads of a study, by attention and model: one model per seed."""
    heads = rows(STUDIES[study])
    return {kind: [pick(heads, model=model) for model in names] for kind, names in models_by_kind(heads).items()}


def bimodality(values: Sequence[float]) -> tuple[float, float]:
    """Sarle's coefficient of at least five values that are not all alike, and its standard error."""
    n = len(values)
    without = [_sarle([*values[:i], *values[i + 1 :]]) for i in range(n)]
    middle = statistics.fmean(without)
    return _sarle(values), math.sqrt((n - 1) / n * sum((value - middle) ** 2 for value in without))


def _sarle(values: Sequence[float]) -> float:
    middle = statistics.fmean(values)
    second, third, fourth = (statistics.fmean((value - middle) ** power for value in values) for power in (2, 3, 4))
    return (third**2 / second**3 + 1) / (fourth / second**2)


def modes(values: Sequence[float]) -> int | None:
    """One or two; None where there are too few values to tell."""
    if len(values) < 5:
        return None
    coefficient, error = bimodality(values)
    return None if abs(coefficient - UNIFORM) <= 2 * error else 2 if coefficient > UNIFORM else 1


def findings(rows: Rows) -> list[Finding]:
    """Figures 2 to 5."""
    return [
        *(finding for study, groups in LOGGED.items() for finding in over_training(rows, study, *groups)),
        *(finding for study in STUDIES for figure in (alphas, densities) for finding in figure(rows, study)),
    ]


def alphas(rows: Rows, study: str) -> list[Finding]:
    """Figure 3: two modes in the encoder, one elsewhere."""
    models = kinds(rows, study).get("learned", [])
    learned, several = [head for model in models for head in model], len(models) > 1
    by_site = {site: numbers(pick(learned, site=site), "alpha") for site in SITES}
    if min(map(len, by_site.values())) < 5:
        return []
    result = []
    for what, sites, wanted in (
        ("the learned alphas of encoder self-attention have two modes", SITES[:1], 2),
        ("those of cross- and decoder self-attention have one mode", SITES[1:], 1),
    ):
        told = [modes(by_site[site]) for site in sites]
        shown = []
        for site in sites:
            coefficient, error = bimodality(by_site[site])
            shown.append(f"{site} {coefficient:.2f} ± {error:.2f}")
        here = f"bimodality coefficient {', '.join(shown)} (uniform 0.56; {len(by_site[sites[0]])} heads a site)"
        unsure = any(number is None for number in told) and all(number in (None, wanted) for number in told)
        few = f"not to be told from {len(by_site[sites[0]])} heads"
        verdict = few if unsure else found(all(number == wanted for number in told), "" if several else "one seed")
        result.append(Finding(f"Correia et al., figure 3, {study}: {what}", "shown", here, verdict))
    return result


def evenness(heads: Sequence[Row], bins: int = 10) -> float:
    """How evenly the densities of heads lie between 0 and 1: the entropy of their histogram over that of a flat one."""
    places = [min(int(bins * density), bins - 1) for density in numbers(heads, "density")]
    shares = [places.count(place) / len(places) for place in set(places)]
    return -sum(share * math.log(share) for share in shares) / math.log(bins)


def dense(heads: Sequence[Row]) -> float:
    """Share of heads that keep nearly all of their weights, %."""
    return 100 * statistics.fmean(density >= DENSE for density in numbers(heads, "density"))


def variation(heads: Sequence[Row]) -> float:
    """Standard deviation of the densities of a layer's heads, mean over the layers of all sites, %."""
    layers = grouped(heads, "site", "layer").values()
    return 100 * statistics.fmean(statistics.pstdev(numbers(layer, "density")) for layer in layers)


def densities(rows: Rows, study: str) -> list[Finding]:
    """Figures 4 and 5: with learned alpha densities are spread more evenly, more heads are dense, and layers vary more."""
    of = kinds(rows, study)
    if not (of.get("learned") and of.get("1.5")):
        return []
    result = []
    for what, measure, unit in (
        ("figure 4, {}: learned alpha spreads the densities of heads more evenly than 1.5 (entropy of a histogram of ten "
         "bins, 1 if flat)", evenness, ""),
        (f"figure 4, {{}}: with learned alpha more heads keep at least {100 * DENSE:.0f} % of their weights", dense, " %"),
        ("figure 5, {}: the heads of a layer differ more in density with learned alpha than with 1.5 (standard deviation)",
         variation, " %"),
    ):  # fmt: skip
        ours, theirs = ([measure(model) for model in of[kind]] for kind in ("learned", "1.5"))
        here = f"{seeds(ours, unit)} against {seeds(theirs, unit)}"
        result.append(Finding(f"Correia et al., {what.format(study)}", "shown", here, judge(ours, theirs)[1]))
    return result


def trajectory(rows: Rows, group: str) -> Trajectory | None:
    """Alpha of every head over the training of one model."""
    path = rows.folder / f"{group}.jsonl"
    return read_trajectory(path) if path.exists() else None


def over_training(rows: Rows, study: str, group: str, beside: str) -> list[Finding]:
    """Figure 2: alphas fall first, then heads part ways; ``beside``: alphas learned at a higher rate."""
    log, faster = trajectory(rows, group), trajectory(rows, beside)
    if log is None:
        return []
    heads = _heads(log)
    start_and_end = float(heads[[0, -1]].corrcoef()[0, 1])
    tried = [f"alphas at the end correlate {start_and_end:.2f} with those that the heads were started with"]
    result = []
    for claim, paper, judged in (
        ("alphas fall first and rise later", "for about 1,000 steps", dip),
        ("after the dip heads part ways", "shown", parting),
    ):
        here, verdict = judged(log)
        looked = tried
        if faster is not None:
            there, so = judged(faster)
            looked = [*tried, f"with alphas learned at ten times the rate: {there}: {so}"]
        claim = f"Correia et al., figure 2, {study}: {claim}"
        result.append(Finding(claim, paper, here, f"{verdict} (one seed)", "; ".join(looked)))
    return result


def _heads(log: Trajectory) -> Tensor:
    """``[steps, heads]``, of all sites."""
    return torch.cat([values.flatten(1) for values in log.alpha.values()], dim=1)


def dip(log: Trajectory) -> tuple[str, str]:
    """How the mean over the heads moved, and whether it fell, with most heads, and rose again."""
    heads = _heads(log)
    means, count = heads.mean(1), heads.shape[1]
    low = int(means.argmin())
    start, lowest, end = (float(means[place]) for place in (0, low, -1))
    lower = int((heads[low] < heads[0]).sum())
    here = f"mean {start:.2f} at the start, lowest at step {log.steps[low]} of {log.steps[-1]} with {lowest:.2f} (there {lower} "
    here += f"of {count} heads are below their start), {end:.2f} at the end"
    if start - lowest >= DIP > end - lowest:
        return here, "not found: they fall to the end"
    return here, found(min(start, end) - lowest >= DIP and lower > count / 2)


def parting(log: Trajectory) -> tuple[str, str]:
    """How far heads are apart, and whether that is more at the end than where their mean is lowest, with some that rose."""
    heads = _heads(log)
    low, spreads = int(heads.mean(1).argmin()), heads.std(1).tolist()
    rose = int((heads[-1] > heads.min(0).values + RISE).sum())
    here = f"standard deviation of alpha over the heads {spreads[0]:.2f} at the start, {spreads[low]:.2f} where their mean is "
    here += (
        f"lowest, {spreads[-1]:.2f} at the end; {rose} of {heads.shape[1]} heads end at least {RISE} above their lowest"
    )
    return here, found(rose > 0 and spreads[-1] > spreads[low])


def thin(steps: Sequence[int], dense_until: int = 1000, every: int = 100) -> list[int]:
    """Steps to keep of a long log: all at first, then fewer, and the last."""
    return [step for step in steps if step <= dense_until or step % every == 0 or step == steps[-1]]


def collect(jobs: Sequence[Job], results: Path, folder: Path) -> dict[str, int]:
    """Write the logged alphas of the runs behind figure 2, thinned, beside their rows; how many steps, by group."""
    kept = {}
    for job in jobs:
        log = folder / job.name / "alphas.jsonl"
        if not (any(job.group in groups for groups in LOGGED.values()) and job.done(results) and log.exists()):
            continue
        lines = {json.loads(line)["step"]: line + "\n" for line in log.read_text(encoding="utf-8").splitlines()}
        steps = thin(sorted(lines))
        (results / f"{job.group}.jsonl").write_text("".join(lines[step] for step in steps), encoding="utf-8")
        kept[job.group] = len(steps)
    return kept


def _tensors(heads: Sequence[Row], name: str) -> dict[str, Tensor]:
    """By site, ``[layers, heads]``; the heads of several seeds beside one another."""
    return {
        site: torch.tensor([numbers(layer, name) for layer in grouped(own, "layer").values()], dtype=torch.float64)
        for (site,), own in grouped(heads, "site").items()
    }


def _named(rows: Rows, name: str, wanted: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """By study and attention, what figures are drawn from."""
    drawn = {}
    for study in STUDIES:
        for kind, models in kinds(rows, study).items():
            if kind in wanted and models:
                called = study + (f", {len(models)} seeds" if len(models) > 1 else "")
                label = called if len(wanted) == 1 else f"{called}\n{'alpha 1.5' if kind == '1.5' else kind + ' alpha'}"
                drawn[label] = _tensors([head for model in models for head in model], name)
    return drawn


def draw_alphas(rows: Rows) -> Figure | None:
    """Figure 3."""
    named = _named(rows, "alpha", ["learned"])
    return plots.alpha_histograms(named, bins=10) if named else None


def draw_densities(rows: Rows) -> Figure | None:
    """Figure 4."""
    named = _named(rows, "density", ["1.5", "learned"])
    return plots.density_histograms(named) if named else None


def draw_sorted(rows: Rows) -> Figure | None:
    """Figure 5."""
    named = _named(rows, "density", ["1.5", "learned"])
    return plots.sorted_density(named) if named else None


def draw_training(rows: Rows, study: str, faster: bool = False) -> Figure | None:
    """Figure 2."""
    log = trajectory(rows, LOGGED[study][faster])
    return None if log is None else plots.alpha_trajectories(log)
