"""Do the papers' findings hold here? Each claim, the paper's figure, ours from the rows, and a verdict by one rule.

`results_page.py` puts the table on top of the page; `common/judging.py` has the rule.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path

import yaml

from common.judging import MARGIN, SOFTMAX, Finding, compare
from common.tables import SITES, Row, grouped, read, table
from findings_heads import diversity, letters, roles

#: Peters et al. 2019, table 1, medium setting: mean accuracy and that of ensembles, by output and attention alpha.
MORPHOLOGY_PAPER = {
    ("1.0", "softmax"): (82.55, 85.68),
    ("1.0", "1.5"): (83.20, 85.63),
    ("1.0", "2.0"): (83.13, 85.65),
    ("1.5", "softmax"): (84.88, 86.38),
    ("1.5", "1.5"): (84.93, 86.55),
    ("1.5", "2.0"): (84.93, 86.59),
    ("2.0", "softmax"): (84.95, 86.41),
    ("2.0", "1.5"): (85.03, 86.61),
    ("2.0", "2.0"): (84.96, 86.47),
}

# --- Peters et al. 2019 ------------------------------------------------------------------------------------------------


def morphology() -> list[Finding]:
    """Table 1: sparse outputs and sparse attention inflect better."""
    rows = [row for row in read("inflection") if not row["ensemble"]]
    found = []
    for what, better in (
        ("a sparse output (1.5) inflects better than softmax", ("1.5", "softmax")),
        ("sparse attention (1.5) inflects better than softmax", ("1.0", "1.5")),
        ("so do both together", ("1.5", "1.5")),
        ("a sparsemax output inflects better than softmax", ("2.0", "softmax")),
    ):
        gap = MORPHOLOGY_PAPER[better][0] - MORPHOLOGY_PAPER[SOFTMAX][0]
        claim = f"Peters et al., table 1: {what}"
        found += compare(rows, claim, f"{gap:+.2f} %", better, SOFTMAX, "accuracy", "%")
    return found


def ensembles() -> list[Finding]:
    """Table 1: averaging the probabilities of three models helps, softmax most."""
    rows = read("inflection")
    alone = grouped([row for row in rows if not row["ensemble"]], "output_alpha", "attention")
    gains = {}
    for key, (row, *_) in grouped([row for row in rows if row["ensemble"]], "output_alpha", "attention").items():
        gains[key] = float(row["accuracy"]) - statistics.fmean(float(one["accuracy"]) for one in alone[key])
    if not gains:
        return []
    papers = [MORPHOLOGY_PAPER[key][1] - MORPHOLOGY_PAPER[key][0] for key in gains if key in MORPHOLOGY_PAPER]
    return [
        Finding(
            "Peters et al., table 1: an ensemble of three is better than its members",
            f"{min(papers):+.2f} to {max(papers):+.2f} %",
            f"{min(gains.values()):+.2f} to {max(gains.values()):+.2f} % ({len(gains)} settings)",
            "found" if min(gains.values()) > 0 else "not found",
        )
    ]


def certainty() -> list[Finding]:
    """Section 5.1: how much of the output's tree a beam of 5 holds."""
    rows = [
        row
        for row in read("inflection")
        if not row["ensemble"] and (row["output_alpha"], row["attention"]) == ("1.5", "1.5")
    ]
    if not rows:
        return []
    found = []
    for name, what, theirs in (
        ("exhaustive", "a beam of 5 holds every possible answer", 79.0),
        ("single", "there is only one possible answer", 66.0),
    ):
        ours = statistics.fmean(float(row[name]) for row in rows)
        verdict = "found" if ours >= theirs else "not found: fewer"
        claim = f"Peters et al., section 5.1 (medium): {what}"
        found.append(Finding(claim, f"{theirs:.0f} %", f"{ours:.1f} %", verdict, _more_certain(name)))
    return found


def inflection_epochs() -> int:
    """Of the rows of inflection: what their configuration says."""
    path = Path(__file__).parent / "configs" / "inflection.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))["epochs"]


def _more_certain(name: str) -> str:
    """The same share under wider beams, after longer training, with a sparser output and with more training data."""
    parts = [
        f"{float(row[name]):.1f} % with a beam of {row['command'].split('--beams ')[1]}"
        for row in read("inflection_beams")
    ]
    parts += [
        f"{float(row[name]):.1f} % after {row['command'].split('--epochs ')[1]} epochs instead of {inflection_epochs()}"
        for row in read("inflection_epochs")
    ]
    sparser = [row for row in read("inflection") if (row["output_alpha"], row["attention"]) == ("2.0", "1.5")]
    parts += [f"{float(row[name]):.1f} % with an output alpha of 2" for row in sparser if not row["ensemble"]]
    german = [row for row in read("inflection_alpha") if (row["output_alpha"], row["attention"]) == ("1.5", "1.5")]
    parts += [f"{float(row[name]):.1f} % for German alone with 10,000 words to learn from" for row in german]
    return "; ".join(parts)


def grid() -> list[Finding]:
    """Figure 4: which output alpha is best."""
    rows = read("inflection_alpha")
    outputs = {float(row["output_alpha"]): float(row["accuracy"]) for row in rows if row["attention"] == "1.5"}
    if len(outputs) < 8:
        return []
    best = max(outputs, key=lambda alpha: outputs[alpha])
    shown = ", ".join(f"{alpha:g}: {accuracy:.1f}" for alpha, accuracy in sorted(outputs.items()))
    top = Finding(
        "Peters et al., figure 4: the best output alpha is near 1.33",
        "1.33",
        f"{best:g} ({shown}; one seed)",
        "found (one seed)" if 1.25 <= best <= 1.5 else "not found (one seed)",
    )
    above = Finding(
        "Peters et al., figure 4: an output alpha above 2 is worse than one between",
        "far below",
        f"{outputs[2.25] - max(outputs[alpha] for alpha in (1.25, 1.33, 1.5)):+.1f} % at 2.25",
        "found (one seed)"
        if outputs[2.25] < min(outputs[alpha] for alpha in (1.25, 1.33, 1.5))
        else "not found (one seed)",
    )
    return [top, above]


def translation() -> list[Finding]:
    """Table 2 of Peters et al. 2019 and table 1 of Correia et al. 2019, on other data."""
    rows = read("translation")
    de_en = "Peters et al., table 2 (de-en): 1.5 for output and attention translates better than softmax"
    found = compare(rows, de_en, "+0.47 BLEU", ("1.5", "1.5"), SOFTMAX, "bleu", "BLEU")
    fixed = "Correia et al., table 1 (de-en): attention with alpha 1.5 is as good as softmax"
    found += compare(rows, fixed, "+0.04 BLEU", ("1.0", "1.5"), SOFTMAX, "bleu", "BLEU", MARGIN)
    learned = "Correia et al., table 1 (de-en): attention with learned alpha is as good as softmax"
    found += compare(rows, learned, "+0.11 BLEU", ("1.0", "learned"), SOFTMAX, "bleu", "BLEU", MARGIN)
    between = "Correia et al., table 1 (de-en): learned alpha is as good as 1.5"
    found += compare(rows, between, "+0.07 BLEU", ("1.0", "learned"), ("1.0", "1.5"), "bleu", "BLEU", MARGIN)
    sparse = [row for row in rows if (row["output_alpha"], row["attention"]) == ("1.5", "1.5")]
    full = [row for row in rows if (row["output_alpha"], row["attention"]) == SOFTMAX]
    if sparse and full:
        words, every = (statistics.fmean(float(row["output_support"]) for row in side) for side in (sparse, full))
        sources, all_sources = (
            statistics.fmean(float(row["support_cross"]) for row in side) for side in (sparse, full)
        )
        found.append(
            Finding(
                "Peters et al., table 3: most source words and nearly all target words get no weight (1.5)",
                "5.55 of 24.25 source, 16.13 of 17,993 target words have some",
                f"{sources:.2f} of {all_sources:.2f} source, {words:.2f} of {every:.0f} target words",
                "found" if sources < all_sources / 2 and words < every / 20 else "not found",
            )
        )
    return found


# --- Correia et al. 2019 -----------------------------------------------------------------------------------------------


def speed() -> list[Finding]:
    """Section 4: what sparsity costs in training."""
    rows = read("training_speed")
    found = []
    for kind, theirs in (("1.5", 0.90), ("learned", 0.75)):
        ratios = [float(row["time_ratio"]) for row in rows if (row["attention"], row["output_alpha"]) == (kind, "1.0")]
        if ratios:
            slowest = 1 / max(ratios)
            found.append(
                Finding(
                    f"Correia et al., section 4: training speed with {'learned alpha' if kind == 'learned' else kind}, of softmax's",
                    f"{100 * theirs:.0f} % (GPUs)",
                    f"{100 / max(ratios):.0f} to {100 / min(ratios):.0f} % (CPU)",
                    "found" if slowest >= theirs else "not found: slower",
                )
            )
    return found


# --- Laha et al. 2018, and conversion ----------------------------------------------------------------------------------


def lambdas() -> list[Finding]:
    """Figures 8 and 9: lambda makes attention sparser."""
    rows = sorted(read("translation_lambda"), key=lambda row: float(re.sub(r"[^\d.-]", "", row["mapping_options"])))
    if len(rows) < 3:
        return []
    series = {site: [float(row[f"support_{site}"]) for row in rows] for site in SITES}
    shrinks = all(values == sorted(values, reverse=True) for values in series.values())
    here = "; ".join(f"{site} {values[0]:.1f} to {values[-1]:.1f} words" for site, values in series.items())
    return [
        Finding(
            "Laha et al., figures 8 and 9: attention becomes sparser as lambda grows",
            "shown",
            here,
            "found (one seed)" if shrinks else "not found (one seed)",
        )
    ]


def conversions() -> list[Finding]:
    """Our own aim: at most 20 % of the weights left, at most 0.3 BLEU or 2 % perplexity lost."""
    found = []
    for group, amount, unit, aim in (("convert_mt", "0.3", "BLEU", 0.3), ("convert_lm", "2 %", "% perplexity", 2.0)):
        rows = read(group)
        control = [row for row in rows if row["attention"] == "softmax"]
        sparse = [row for row in rows if row["density"] and float(row["density"]) <= 0.2]
        if not (control and sparse):
            continue
        best = min(sparse, key=lambda row: float(row["lost"]))
        lost, paid = float(best["lost"]), price(best, control[0])
        which = f"best of {len(sparse)} such conversions: " if len(sparse) > 1 else ""
        here = (
            f"{which}{100 * float(best['density']):.1f} % left; {_loss(lost, unit)} against the model before, "
            f"{_loss(paid, unit)} against a softmax that was trained on for as long"
        )
        verdict = "found" if paid <= aim else "not found against the control" if lost <= aim else "not found"
        claim = f"Our aim: a finished softmax model with at most 20 % of its weights left loses at most {amount}"
        claim += " BLEU" if unit == "BLEU" else " perplexity"
        found.append(Finding(claim, "", here, f"{verdict} (one seed)"))
    return found


def price(row: Row, control: Row) -> float:
    """What a converted model has lost against the control: BLEU, or % of its perplexity."""
    if row["bleu"]:
        return float(control["bleu"]) - float(row["bleu"])
    return 100 * (float(row["perplexity"]) / float(control["perplexity"]) - 1)


def _loss(value: float, unit: str) -> str:
    return f"{abs(value):.2f} {unit} {'lost' if value > 0 else 'gained'}"


CLAIMS: tuple[Callable[[], list[Finding]], ...] = (
    morphology,
    ensembles,
    certainty,
    grid,
    translation,
    diversity,
    roles,
    letters,
    speed,
    lambdas,
    conversions,
)


def section() -> list[str]:
    """Lines of the page: the table, then what was tried where a finding does not hold."""
    found = [finding for claim in CLAIMS for finding in claim()]
    if not found:
        return []
    lines = [[f.claim, f.paper, f.here, f.verdict if f.holds else f"**{f.verdict}**"] for f in found]
    tried = [f"- *{f.claim}*: {f.tried}." for f in found if f.tried and not f.holds]
    return [
        "## Do the papers' findings hold here?",
        "",
        "*Found*: the paper's sign, by more than two standard errors over the seeds; *same direction*: by less; *opposite*: as "
        "far on the other side. With one seed on a side the verdict rests on the sign. The models and data are smaller than "
        "the papers'; the tables below have the numbers.",
        "",
        *table(["claim", "paper", "here", "verdict"], lines),
        *(["Looked at where a finding does not hold:", "", *tried, ""] if tried else []),
    ]
