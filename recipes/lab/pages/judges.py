"""How a claim is judged from rows: one rule for differences between settings, and a function for each other kind of claim.

That one setting is better than another counts as *found* when the difference of the means has the paper's sign and is more than
twice its standard error over seeds, as *same direction* when it is smaller, as *opposite* when it is as far on the other side, and
otherwise as *not found*; that it is as good counts as found when it loses at most a margin. Where a side has one seed only, the
verdict says so and rests on the difference alone. Runs with less than half of the median score had not begun to learn: they say
nothing about the claim.

A judge returns a `Verdict`, or nothing where the rows do not speak to its claim. What it is given after the rows stands in the
table of claims (`entry`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Concatenate, NamedTuple, ParamSpec

from ..rows import SITES, Row, Rows, by_setting, column, grouped, mean, numbers, pick, spread

#: Output and attention alpha of a model; those of the softmax model.
Key = tuple[str, str]
SOFTMAX = ("1.0", "softmax")
#: What a setting that is "as good" as another may lose: BLEU, or % of accuracy.
MARGIN = 0.3


class Verdict(NamedTuple):
    """What rows say of a claim: our figure, the verdict, and what was looked at where it does not hold."""

    here: str
    verdict: str
    tried: str = ""


Judge = Callable[[Rows], "Verdict | None"]
P = ParamSpec("P")


def entry(judge: Callable[Concatenate[Rows, P], Verdict | None]) -> Callable[P, Judge]:
    """Let a judge be written into the table of claims as a call without the rows, for which it waits."""
    return lambda *given, **named: lambda rows: judge(rows, *given, **named)


def found(holds: bool, reservation: str = "") -> str:
    """The verdict on what is plainly so or not, e.g. *not found (one seed)*."""
    return ("found" if holds else "not found") + (f" ({reservation})" if reservation else "")


def judge(better: Sequence[float], worse: Sequence[float], margin: float = 0.0) -> tuple[float, str]:
    """Difference of two means, and what it says about the claim that it is positive (or, with a margin, not below it)."""
    gap = statistics.fmean(better) - statistics.fmean(worse)
    above = gap >= -margin if margin else gap > 0
    if min(len(better), len(worse)) == 1:
        return gap, found(above, "one seed")
    error = math.sqrt(sum(statistics.variance(side) / len(side) for side in (better, worse)))
    if above:
        return gap, "found" if margin or gap > 2 * error else "same direction"
    return gap, "opposite" if gap < -2 * error else "not found"


def judge_settings(gaps: Sequence[float], margin: float) -> tuple[int, str]:
    """At how many settings a difference is at least ``-margin`` (above 0 without one), and what that says of the claim."""
    shown = sum(gap >= -margin if margin else gap > 0 for gap in gaps)
    return shown, "found" if shown == len(gaps) else "not found" if shown < len(gaps) / 2 else "found in part"


def seeds(values: Sequence[float], unit: str = "") -> str:
    """A mean, with the number of seeds behind it where there are several."""
    many = f" ({len(values)} seeds)" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{unit}{many}"


@entry
def better(
    rows: Rows, group: str, one: Key, other: Key, measure: str = "accuracy", unit: str = "%", margin: float = 0.0
) -> Verdict | None:
    """One setting (output and attention alpha) has more of a measure than another, or loses at most a margin."""
    every = [row for row in rows(group) if not row.get("ensemble")]
    return _compared(every, one, other, measure, unit, margin)


def _compared(every: list[Row], one: Key, other: Key, measure: str, unit: str, margin: float) -> Verdict | None:
    groups = grouped(every, "output_alpha", "attention")
    if not (groups.get(one) and groups.get(other)):
        return None
    ours, theirs = (numbers(groups[key], measure) for key in (one, other))
    gap, verdict = judge(ours, theirs, margin)
    here = f"{gap:+.2f} {unit}: {seeds(ours)} against {seeds(theirs)}"
    half = statistics.median(numbers(every, measure)) / 2
    late = [row for key in (one, other) for row in groups[key] if float(row[measure]) < half]
    if not late:
        return Verdict(here, verdict)
    which = ", ".join(f"{row['attention']} with seed {row['seed']} ({row[measure]})" for row in late)
    left = [row for row in every if row["seed"] not in {other["seed"] for other in late}]
    without = _compared(left, one, other, measure, unit, margin)
    tried = f"without that seed {without.here}: {without.verdict}" if without else ""
    return Verdict(here, f"not to be told: {which} had not begun to learn", tried)


@entry
def ensembles(rows: Rows, group: str) -> Verdict | None:
    """Averaging the probabilities of three models helps at every setting."""
    alone = grouped(rows(group, ensemble=""), "output_alpha", "attention")
    together = grouped([row for row in rows(group) if row["ensemble"]], "output_alpha", "attention")
    gains = [float(row["accuracy"]) - mean(alone[key], "accuracy") for key, (row, *_) in together.items()]
    if not gains:
        return None
    here = f"{min(gains):+.2f} to {max(gains):+.2f} % ({len(gains)} settings)"
    return Verdict(here, found(min(gains) > 0))


@entry
def certainty(rows: Rows, name: str, paper: float) -> Verdict | None:
    """How many words have all their answers known, or one alone; models that learned for longer speak where there are several."""
    both = {"ensemble": "", "output_alpha": "1.5", "attention": "1.5"}
    longer = rows("inflection_epochs", **both)
    if len(longer) < 2:
        return None
    tried = [(row, f"with a beam of {row['command'].split('--beams ')[1]}") for row in rows("inflection_beams")]
    for group, output, how in (
        ("inflection", "2.0", "with an output alpha of 2"),
        ("inflection_alpha", "1.5", "for German alone with 10,000 words to learn from"),
    ):
        sparser = [row for row in rows(group, output_alpha=output, attention="1.5") if not row.get("ensemble")]
        tried += [(row, how) for row in sparser]
    looked = "; ".join(f"{float(row[name]):.1f} % {how}" for row, how in tried)
    verdict = "found" if mean(longer, name) >= paper else "not found: fewer"
    return Verdict(f"{column(longer, name, 1)} % after 72 epochs", verdict, looked)


def best_alpha(rows: Rows) -> Verdict | None:
    """The best output alpha of the grid lies near 1.33."""
    by_alpha = _grid(rows)
    best = max(by_alpha, key=lambda alpha: by_alpha[alpha], default=0.0)
    shown = ", ".join(f"{alpha:g}: {accuracy:.1f}" for alpha, accuracy in sorted(by_alpha.items()))
    verdict = Verdict(f"{best:g} ({shown}; one seed)", found(1.25 <= best <= 1.5, "one seed"))
    return verdict if by_alpha else None


def worst_alpha(rows: Rows) -> Verdict | None:
    """An output alpha of 2.25 is worse than 1.25 to 1.5."""
    by_alpha = _grid(rows)
    between = [by_alpha[alpha] for alpha in (1.25, 1.33, 1.5) if by_alpha]
    if not between:
        return None
    gap = f"{by_alpha[2.25] - max(between):+.1f} % at 2.25"
    return Verdict(gap, found(by_alpha[2.25] < min(between), "one seed"))


def _grid(rows: Rows) -> dict[float, float]:
    return {float(row["output_alpha"]): float(row["accuracy"]) for row in rows("inflection_alpha", attention="1.5")}


def words_with_weight(rows: Rows) -> Verdict | None:
    """Fewer than half of the source words and a twentieth of the target words have weight."""
    sparse = rows("translation", output_alpha="1.5", attention="1.5")
    full = rows("translation", output_alpha="1.0", attention="softmax")
    if not (sparse and full):
        return None
    words, all_words = mean(sparse, "output_support"), mean(full, "output_support")
    sources, all_sources = mean(sparse, "support_cross"), mean(full, "support_cross")
    here = f"{sources:.2f} of {all_sources:.2f} source, {words:.2f} of {all_words:.0f} target words"
    return Verdict(here, found(sources < all_sources / 2 and words < all_words / 20))


@entry
def speed(rows: Rows, attention: str, paper: float) -> Verdict | None:
    """Training is at least as fast, of softmax's speed, as the paper says."""
    ratios = numbers(rows("training_speed", attention=attention, output_alpha="1.0"), "time_ratio")
    if not ratios:
        return None
    here = f"{100 / max(ratios):.0f} to {100 / min(ratios):.0f} % (CPU)"
    return Verdict(here, "found" if 1 / max(ratios) >= paper else "not found: slower")


def by_lambda(rows: Rows) -> list[Row]:
    """The runs of sparsegen-lin attention, lambda growing."""
    return sorted(rows("translation_lambda"), key=lambda row: float(re.sub(r"[^\d.-]", "", row["mapping_options"])))


def lambdas(rows: Rows) -> Verdict | None:
    """Supports shrink at every site as lambda grows."""
    if len(by_lambda(rows)) < 3:
        return None
    series = {site: numbers(by_lambda(rows), f"support_{site}") for site in SITES}
    here = "; ".join(f"{site} {values[0]:.1f} to {values[-1]:.1f} words" for site, values in series.items())
    shrinks = all(values == sorted(values, reverse=True) for values in series.values())
    return Verdict(here, found(shrinks, "one seed"))


@entry
def conversion(rows: Rows, group: str, unit: str, aim: float) -> Verdict | None:
    """The best conversion with at most 20 % of its weights left loses at most ``aim`` to the control.

    A setting of one seed may be lucky: of several, those with the most seeds are compared.
    """
    control = rows(group, attention="softmax")
    sparse = [own for own in by_setting(rows(group)) if own[0]["density"] and mean(own, "density") <= 0.2]
    if not (control and sparse):
        return None
    sparse = [own for own in sparse if len(own) == max(map(len, sparse))]
    best = min(sparse, key=lambda own: price(own, control))
    lost, paid = mean(best, "lost"), price(best, control)
    which = f"best of {len(sparse)} such conversions: " if len(sparse) > 1 else ""
    before, beside = (f"{abs(value):.2f} {unit} {'lost' if value > 0 else 'gained'}" for value in (lost, paid))
    here = f"{which}{column(best, 'density', 1, 100)} % left; {before} against the model before, "
    here += f"{beside} against a softmax that was trained on for as long"
    verdict = "found" if paid <= aim else "not found against the control" if lost <= aim else "not found"
    behind = min(len(best), len(control))
    return Verdict(here, f"{verdict} ({'one seed' if behind == 1 else f'{behind} seeds'})")


def price(own: Sequence[Row], control: Sequence[Row]) -> float:
    """What a converted model has lost against the control, mean over the seeds: BLEU, or % of its perplexity.

    Where the same model was converted that a control trained on, the row is compared with that control.
    """
    measure = "bleu" if own[0]["bleu"] else "perplexity"
    prices = []
    for row in own:
        same = [one for one in control if one[f"{measure}_before"] == row[f"{measure}_before"]]
        after, beside = float(row[measure]), mean(same or control, measure)
        prices.append(beside - after if measure == "bleu" else 100 * (after / beside - 1))
    return statistics.fmean(prices)


def settings_of(rows: Rows, group: str) -> list[list[Row]]:
    """The rows of each setting, its seeds together, softmax first; what was measured before training begins with ``start_``."""
    starts = {
        row["command"]: {f"start_{k}": v for k, v in row.items()} for row in rows(f"{group}_curve", stage="patched")
    }
    groups = by_setting({**row, **starts.get(row["command"], {})} for row in rows(group))
    return sorted(groups, key=lambda own: (own[0]["attention"] != "softmax", -mean(own, "density")))


def label(row: Row) -> str:
    """What was trained and what held it back."""
    parts = [row["attention"]]
    for name, text in (("loss_budget", "budget {}"), ("density_target", "density target {}")):
        if row.get(name) not in ("", "None", None):
            parts.append(text.format(row[name]))
    for option, text in (("train_tokens", "{:,.0f} tokens"), ("lr", "learning rate {:g}")):
        if given := re.search(rf"--{option} (\S+)", row["command"]):
            parts.append(text.format(float(given[1])))
    if "--softened true" in row["command"].lower():
        parts.append(f"softened at {_option(row, 'release') or 1.5}")
    return ", ".join([*parts, *(["alphas alone"] if row.get("freeze_weights") == "True" else [])])


def _option(row: Row, name: str) -> str:
    given = re.search(rf"--{name} (\S+)", row["command"])
    return given[1] if given else ""


def calibrated(row: Row) -> str:
    """What `calibrate_alphas` set for each head."""
    return "alpha, temperature" if row["temperature"] == "True" else "alpha"


def zeros_for_free(rows: Rows) -> Verdict | None:
    """The sparsest causal model within 1 % of perplexity on other text, of which no weight was trained, is half zeros."""
    made = [
        ([row], numbers([row], "heldout_percent"), f"{calibrated(row)}, budget {float(row['budget']):g} %", "")
        for row in rows("calibration", model="smollm2")
    ]
    for own in settings_of(rows, "convert_smollm2"):
        if own[0]["freeze_weights"] == "True":
            prices = [100 * (float(row["perplexity"]) / float(row["perplexity_before"]) - 1) for row in own]
            made.append((own, prices, label(own[0]), "one seed, " if len(own) == 1 else ""))
    within = [entry for entry in made if statistics.fmean(entry[1]) <= 1]
    if not within:
        return None
    own, prices, what, reservation = min(within, key=lambda entry: mean(entry[0], "density"))
    zeros = spread([100 - value for value in numbers(own, "density", 100)], 1)
    here = f"{what}: {zeros} % zeros at {'+' if statistics.fmean(prices) > 0 else ''}{spread(prices)} %"
    return Verdict(here, found(mean(own, "density") <= 0.5, f"{reservation}one set of texts"))


def encoder_aim(rows: Rows) -> Verdict | None:
    """Similarities correlate at 0.995 with those of the model before, with a tenth of the weights left."""

    def miss(own: list[Row], controls: list[list[Row]]) -> tuple[float, str]:
        gap = 100 * (mean(own, "accuracy") - mean(own, "accuracy_before"))
        here = f"similarity correlation {column(own, 'spearman', 4)}, partners found {gap:+.1f} points against the model before"
        return max(0.0, 0.995 - mean(own, "spearman")), here

    return _nearest(rows, "convert_encoder", 0.1, miss)


def causal_aim(rows: Rows) -> Verdict | None:
    """No more loss than the softmax control, with a twentieth of the weights left."""

    def miss(own: list[Row], controls: list[list[Row]]) -> tuple[float, str]:
        reference = min((mean(control, "perplexity") for control in controls), default=mean(own, "perplexity_before"))
        loss = 100 * (mean(own, "perplexity") / reference - 1)
        here = f"perplexity {loss:+.1f} % against {'the control' if controls else 'the model before'}"
        return max(0.0, loss) if controls else math.inf, here

    return _nearest(rows, "convert_smollm2", 0.05, miss)


def _nearest(
    rows: Rows, group: str, density: float, miss: Callable[[list[Row], list[list[Row]]], tuple[float, str]]
) -> Verdict | None:
    """Of the settings that are sparse enough, the one that misses the aim by least; controls trained as long, with softmax."""
    settings = settings_of(rows, group)
    tried = []
    for own in settings:
        if own[0]["attention"] != "softmax" and own[0]["freeze_weights"] != "True":
            controls = [other for other in settings if pick(other, attention="softmax", steps=own[0]["steps"])]
            far, here = miss(own, controls)
            few = min(len(each) for each in (own, *controls)) == 1
            tried.append((mean(own, "density") > density, far, mean(own, "density"), own, here, few))
    if not tried:
        return None
    dense, far, _, own, here, few = min(tried, key=lambda entry: entry[:3])
    here = f"{label(own[0])}: {column(own, 'density', 1, 100)} % left, {here}"
    return Verdict(here, found(not dense and not far, "one seed" if few else ""))
