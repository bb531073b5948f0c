"""What Correia et al. 2019 say that heads do, judged from the analyses of heads: alphas, densities, diversity, roles.

How many modes alphas have is judged by Sarle's bimodality coefficient

    b = (skewness^2 + 1) / kurtosis,

which is 5/9 for a uniform distribution, smaller for one with one mode (1/3 for a normal one) and larger for one with two, up
to 1. They count as two modes, or as one, where b is more than two standard errors (jackknife over the heads) away from 5/9;
otherwise that many heads do not tell. Of a dozen heads it sees two clear modes mostly, a single one seldom, and it takes a
skewed mode for two. The form with corrections for few values is not used: its 5/9 holds for many values only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_entmax.analysis.reading.trajectory import Trajectory, read_trajectory

from ..rows import SITES, Row, Rows, distinct, grouped, mean, numbers, pick
from .judges import Verdict, entry, found, judge, seeds

#: Analyses of heads, by what trained the models.
STUDIES = {"translation": "head_analysis", "inflection": "head_analysis_inflection"}
#: Runs whose alphas were logged: the group that is judged, and that with alphas learned at ten times the rate.
LOGGED = {
    "translation": ("translation_enja", "translation_enja_fast"),
    "inflection": ("inflection_trajectory", "inflection_trajectory_fast"),
}
#: The analyses of real pretrained models.
SMOLLM2, MINILM = "head_analysis_smollm2", "head_analysis_minilm"
UNIFORM = 5 / 9


@entry
def diversity(rows: Rows, group: str, output: str, kind: str) -> Verdict | None:
    """Sparse heads differ more from one another than softmax's at every site, in models with the same output."""
    whole = [row for row in rows(group, output_alpha=output) if row["js_cross"]]
    soft, sparse = (pick(whole, attention=attention) for attention in ("softmax", kind))
    if not (soft and sparse):
        return None
    gains = {site: (mean(sparse, f"js_{site}"), mean(soft, f"js_{site}")) for site in SITES}
    here = ", ".join(f"{site} {ours:.2f} against {theirs:.2f}" for site, (ours, theirs) in gains.items())
    few = "one seed" if min(len(sparse), len(soft)) == 1 else ""
    return Verdict(here, found(all(ours > theirs for ours, theirs in gains.values()), few))


def surest(heads: Sequence[Row], model: str, name: str) -> Row:
    """The head of a model with the largest value in a column."""
    return max((row for row in pick(heads, model=model) if row.get(name)), key=lambda row: float(row[name]))


@entry
def role(rows: Rows, name: str) -> Verdict | None:
    """The surest head for a role is surer with learned alpha than with softmax."""
    heads, kinds = rows("head_analysis/heads"), ("softmax", "1.5", "learned")
    if not set(kinds) <= set(distinct(heads, "model")):
        return None
    best = {kind: 100 * float(surest(heads, kind, name)[name]) for kind in kinds}
    here = ", ".join(f"{kind} {value:.1f} %" for kind, value in best.items())
    if max(best.values()) > 50:
        return Verdict(here, found(best["learned"] > best["softmax"], "one seed"))
    small = "models of 3 + 3 layers and width 128 on captions; the treebank and Tatoeba's questions as well"
    return Verdict(here, "not found: no such head in any model", small)


def surest_previous(heads: Sequence[Row], model: str, count: int = 1) -> float:
    """Mean over a model's surest heads of the median weight on the previous position, %."""
    name = "confidence_median_previous"
    values = numbers((row for row in pick(heads, model=model) if row.get(name)), name)
    return 100 * statistics.fmean(sorted(values, reverse=True)[:count])


def kinds(rows: Rows, study: str) -> dict[str, list[list[Row]]]:
    """The heads of a study, by attention and model: one model, named KIND-SEED, per seed."""
    models: dict[str, list[list[Row]]] = {}
    for (model,), heads in grouped(rows(f"{STUDIES[study]}/heads"), "model").items():
        models.setdefault(model.rsplit("-", 1)[0], []).append(heads)
    return models


@entry
def letters(rows: Rows, kind: str, count: int) -> Verdict | None:
    """In the inflection models, where such heads have formed, the surest for the previous letter are surer."""
    models = kinds(rows, "inflection")
    if not (models.get(kind) and models.get("softmax")):
        return None
    ours, theirs = (
        [surest_previous(own, own[0]["model"], count) for own in models[each]] for each in (kind, "softmax")
    )
    return Verdict(f"{seeds(ours, ' %')} against {seeds(theirs, ' %')}", judge(ours, theirs)[1])


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


@entry
def modes(rows: Rows, study: str, sites: Sequence[str], wanted: int) -> Verdict | None:
    """The learned alphas of these sites have so many modes; 1 or 2 are told apart where there are enough heads."""
    models = kinds(rows, study).get("learned", [])
    learned = [head for model in models for head in model]
    values = {site: numbers(pick(learned, site=site), "alpha") for site in sites}
    count = min(map(len, values.values()))
    if count < 5:
        return None
    told, shown = [], []
    for site, own in values.items():
        coefficient, error = bimodality(own)
        unsure = abs(coefficient - UNIFORM) <= 2 * error
        told.append(wanted if unsure else 2 if coefficient > UNIFORM else 1)
        shown.append((f"{site} {coefficient:.2f} ± {error:.2f}", unsure))
    words = ", ".join(text for text, _ in shown)
    here = f"bimodality coefficient {words} (uniform 0.56; {count} heads a site)"
    holds = all(number == wanted for number in told)
    if holds and any(unsure for _, unsure in shown):
        return Verdict(here, f"not to be told from {count} heads")
    return Verdict(here, found(holds, "" if len(models) > 1 else "one seed"))


def evenness(heads: Sequence[Row], bins: int = 10) -> float:
    """How evenly the densities of heads lie between 0 and 1: the entropy of their histogram over that of a flat one."""
    places = [min(int(bins * density), bins - 1) for density in numbers(heads, "density")]
    shares = [places.count(place) / len(places) for place in set(places)]
    return -sum(share * math.log(share) for share in shares) / math.log(bins)


def dense(heads: Sequence[Row]) -> float:
    """Share of heads that keep at least 95 % of their weights, %."""
    return 100 * statistics.fmean(density >= 0.95 for density in numbers(heads, "density"))


def variation(heads: Sequence[Row]) -> float:
    """Standard deviation of the densities of a layer's heads, mean over the layers of all sites, %."""
    layers = grouped(heads, "site", "layer").values()
    return 100 * statistics.fmean(statistics.pstdev(numbers(layer, "density")) for layer in layers)


@entry
def densities(rows: Rows, study: str, measure: Callable[[Sequence[Row]], float], unit: str = " %") -> Verdict | None:
    """A measure of the heads' densities is larger with learned alpha than with 1.5."""
    of = kinds(rows, study)
    if not (of.get("learned") and of.get("1.5")):
        return None
    ours, theirs = ([measure(model) for model in of[kind]] for kind in ("learned", "1.5"))
    return Verdict(f"{seeds(ours, unit)} against {seeds(theirs, unit)}", judge(ours, theirs)[1])


def trajectory(rows: Rows, group: str) -> Trajectory | None:
    """Alpha of every head over the training of one model."""
    path = rows.folder / f"{group}.jsonl"
    return read_trajectory(path) if path.exists() else None


@entry
def over_training(rows: Rows, study: str, look: Callable[[list[int], Tensor], tuple[str, str]]) -> Verdict | None:
    """What `dip` or `parting` says of the alphas over training; beside it, of alphas that were learned at a higher rate."""
    log, faster = (trajectory(rows, group) for group in LOGGED[study])
    if log is None:
        return None
    heads = _heads(log)
    correlation = float(heads[[0, -1]].corrcoef()[0, 1])
    tried = f"alphas at the end correlate {correlation:.2f} with those that the heads were started with"
    if faster is not None:
        there, so = look(faster.steps, _heads(faster))
        tried += f"; with alphas learned at ten times the rate: {there}: {so}"
    here, verdict = look(log.steps, heads)
    return Verdict(here, f"{verdict} (one seed)", tried)


def _heads(log: Trajectory) -> Tensor:
    """``[steps, heads]``, of all sites."""
    return torch.cat([values.flatten(1) for values in log.alpha.values()], dim=1)


def dip(steps: list[int], heads: Tensor) -> tuple[str, str]:
    """How the mean over the heads moved, and whether it fell by 0.01, with most heads, and rose by that again."""
    means, count = heads.mean(1), heads.shape[1]
    low = int(means.argmin())
    start, lowest, end = (float(means[place]) for place in (0, low, -1))
    lower = int((heads[low] < heads[0]).sum())
    here = (
        f"mean {start:.2f} at the start, lowest at step {steps[low]} of {steps[-1]} with {lowest:.2f} (there {lower} "
    )
    here += f"of {count} heads are below their start), {end:.2f} at the end"
    if start - lowest >= 0.01 > end - lowest:
        return here, "not found: they fall to the end"
    return here, found(min(start, end) - lowest >= 0.01 and lower > count / 2)


def parting(steps: list[int], heads: Tensor) -> tuple[str, str]:
    """How far heads are apart, and whether that is more at the end than where their mean is lowest, with some that rose by 0.05."""
    low, spreads = int(heads.mean(1).argmin()), heads.std(1).tolist()
    rose = int((heads[-1] > heads.min(0).values + 0.05).sum())
    here = f"standard deviation of alpha over the heads {spreads[0]:.2f} at the start, {spreads[low]:.2f} where their mean is "
    here += (
        f"lowest, {spreads[-1]:.2f} at the end; {rose} of {heads.shape[1]} heads end at least 0.05 above their lowest"
    )
    return here, found(rose > 0 and spreads[-1] > spreads[low])


@entry
def made_sparse(rows: Rows, group: str, name: str, table: str = "heads", unit: str = " %") -> Verdict | None:
    """A pretrained model's largest value in a column of the analysis grows when the model is made sparse."""
    found_rows = rows(f"{group}/{table}")
    if not found_rows:
        return None
    scale = 100 if unit else 1
    before, *after = models = distinct(found_rows, "model")
    values = {model: scale * float(surest(found_rows, model, name)[name]) for model in models}
    higher = [model for model in after if values[model] > values[before]]
    agree = len(higher) in (0, len(after))
    verdict = found(bool(higher), "one seed") if agree else f"found for {higher[0]} only (one seed)"
    if unit and max(values.values()) <= 50:
        verdict = "not found: no such head in any model"
    elif unit and values[before] > 99.5:
        verdict = "not to be told: sure before"
    return Verdict(", ".join(f"{m} {value:.{1 if unit else 3}f}{unit}" for m, value in values.items()), verdict)


@entry
def contrasts(rows: Rows, group: str) -> Verdict | None:
    """Some heads are sparse in one sentence and at least 50 points denser in another of the same class of length."""
    pairs = [row for row in rows(f"{group}/sentences") if row["longest"]]  # the longest class has no bound
    if not pairs:
        return None
    few, many = (lambda row: 100 * float(row["sparse_density"])), (lambda row: 100 * float(row["dense_density"]))
    apart = {(row["layer"], row["head"]) for row in pairs if many(row) - few(row) >= 50}
    widest = max(pairs, key=lambda row: many(row) - few(row))
    of = len(pick(rows(f"{group}/heads"), model=pairs[0]["model"]))
    here = f"{len(apart)} of {of} heads differ by 50 points and more; head {widest['layer']}.{widest['head']} keeps "
    here += f"{few(widest):.1f} % of its weights in one sentence and {many(widest):.1f} % in another, neither longer "
    return Verdict(f"{here}than {widest['longest']} tokens", found(bool(apart), "one seed"))
