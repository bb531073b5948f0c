"""What the heads of real pretrained models do before and after they were made sparse."""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure

from ..rows import Rows, distinct, numbers, pick, table
from .claims_heads import surest
from .judging import Finding, found

GROUP = "head_analysis_smollm2"
ENCODER = "head_analysis_minilm"
#: The analyses, and how the findings call their models.
ANALYSED = {GROUP: "SmolLM2", ENCODER: "MiniLM"}

#: Densities of two sentences that are that far apart are sparse here and dense there, points.
CONTRAST = 50

#: Column of the head analysis, what it says about a head, and the figure of Correia et al. 2019 that looks at it.
MEASURES = {
    "confidence_previous": ("previous token", "7"),
    "subword_merging_multi": ("subwords of the same word", "8"),
    "first_mass": ("first token", ""),
    "confidence_current": ("the token itself", ""),
    "punctuation_mass": ("punctuation", ""),
    "dependency_accuracy": ("syntactic head of the word, accuracy", ""),
    "interrogation": ("question mark", "9"),  # encoders only: a decoder's words do not see the end of their sentence
}


def _models(rows: Rows, group: str) -> list[str]:
    """The names of the model as it came and of those made from it."""
    return distinct(rows(f"{group}/sites"), "model")


def _seen(rows: Rows, group: str) -> dict[str, tuple[str, str]]:
    """The measures that the analysis has of any head."""
    heads = rows(f"{group}/heads")
    return {name: entry for name, entry in MEASURES.items() if any(row.get(name) for row in heads)}


def summary(rows: Rows, group: str = GROUP) -> str:
    """Density, diversity and roles of all heads, and the surest head for each role."""
    models = _models(rows, group)
    sites = [pick(rows(f"{group}/sites"), model=model)[0] for model in models]
    heads = [pick(rows(f"{group}/heads"), model=model) for model in models]
    previous = [pick(rows(f"{group}/positions"), model=model, offset="-1")[0] for model in models]
    lines: list[list[object]] = [
        ["nonzero weights, %", *(f"{100 * float(site['density']):.1f}" for site in sites)],
        ["keys with weight per query", *(f"{float(site['mean_support']):.1f}" for site in sites)],
        ["largest weight of a query, mean", *(f"{float(site['max_weight']):.3f}" for site in sites)],
        ["diversity of the heads (JS)", *(f"{float(site['head_diversity']):.3f}" for site in sites)],
        ["heads that look at the previous token", *(row["positional_heads"] for row in previous)],
    ]
    roles = {"first": "the first token", "subword": "other subwords of the word", "": "no single role"}
    for role, title in roles.items():
        lines.append([f"heads by role: {title}", *(len(pick(own, role=role)) for own in heads)])
    resting = [sum(float(row["first_mass"]) > 0.9 for row in own) for own in heads]
    lines.append(["heads that give the first token more than 90 %", *resting])
    for name, (title, _) in _seen(rows, group).items():
        best = [surest(own, model, name) for own, model in zip(heads, models, strict=True)]
        shown = (f"{100 * float(row[name]):.1f} ({row['layer']}.{row['head']})" for row in best)
        lines.append([f"surest head, {title}, %", *shown])
    if found_roles := rows(f"{group}/roles", role="induction"):
        best = [surest(found_roles, model, "score") for model in models]
        shown = (f"{100 * float(row['score']):.1f} ({row['layer']}.{row['head']})" for row in best)
        chance = f"{100 * float(best[0]['chance']):.1f}"
        lines.append([f"surest head, what followed the same token before (induction; by chance {chance}), %", *shown])
    return table([f"{len(heads[0])} heads", *models], lines)


def findings(rows: Rows) -> list[Finding]:
    """Figures 6 to 9 of Correia et al. 2019 on models that had their heads before they were made sparse."""
    return [
        finding
        for group, name in ANALYSED.items()
        if rows(f"{group}/sites")
        for finding in _findings(rows, group, name)
    ]


def _findings(rows: Rows, group: str, called: str) -> list[Finding]:
    before, *after = _models(rows, group)
    heads, sites = rows(f"{group}/heads"), rows(f"{group}/sites")
    made = []

    def judge(figure: str, claim: str, paper: str, values: dict[str, float], unit: str) -> None:
        higher = [name for name in after if values[name] > values[before]]
        agree = len(higher) in (0, len(after))
        verdict = found(bool(higher), "one seed") if agree else f"found for {higher[0]} only (one seed)"
        if unit and max(values.values()) <= 50:
            verdict = "not found: no such head in any model"
        elif unit and values[before] > 99.5:
            verdict = "not to be told: sure before"
        here = ", ".join(f"{name} {value:.1f} %" if unit else f"{name} {value:.3f}" for name, value in values.items())
        made.append(Finding(f"Correia et al., figure {figure}, {called}: {claim}", paper, here, verdict))

    for name, (title, figure) in _seen(rows, group).items():
        if figure:
            values = {model: 100 * float(surest(heads, model, name)[name]) for model in (before, *after)}
            claim = f"the surest head for the {title} gets surer when it is sparse"
            judge(figure, claim, "surer with learned alpha", values, "%")
    js = {model: float(pick(sites, model=model)[0]["head_diversity"]) for model in (before, *after)}
    judge("6", "sparse heads are more diverse", "in every layer", js, "")
    return made + _contrasts(rows, group, called)


def _contrasts(rows: Rows, group: str, called: str) -> list[Finding]:
    """Figure 10: pairs of sentences of similar length, by the classes of `hf_entmax.analysis.statistics.sentences`."""
    pairs = [row for row in rows(f"{group}/sentences") if row["longest"]]  # the longest class has no bound
    if not pairs:
        return []
    few, many = (lambda row: 100 * float(row["sparse_density"])), (lambda row: 100 * float(row["dense_density"]))
    apart = {(row["layer"], row["head"]) for row in pairs if many(row) - few(row) >= CONTRAST}
    widest = max(pairs, key=lambda row: many(row) - few(row))
    of = len(pick(rows(f"{group}/heads"), model=pairs[0]["model"]))
    here = f"{len(apart)} of {of} heads differ by {CONTRAST} points and more; head {widest['layer']}.{widest['head']} keeps "
    here += (
        f"{few(widest):.1f} % of its weights in one sentence and {many(widest):.1f} % in another, neither longer than "
    )
    here += f"{widest['longest']} tokens"
    claim = (
        f"Correia et al., figure 10, {called}: a head is sparse in one sentence and dense in another of similar length"
    )
    return [Finding(claim, "shown", here, found(bool(apart), "one seed"))]


def figure(rows: Rows) -> Figure | None:
    """Every head before and after: its largest weight, its weight on the previous and on the first token."""
    if not rows(f"{GROUP}/sites"):
        return None
    before, after = (pick(rows(f"{GROUP}/heads"), model=model) for model in _models(rows, GROUP)[:2])
    drawn = Figure(figsize=(11, 3.9), layout="constrained")
    shown = {"max_weight": "largest weight", "confidence_previous": "on the previous token"}
    shown["first_mass"] = "on the first token"
    *axes, last = drawn.subplots(1, len(shown) + 1)
    layers = [int(row["layer"]) for row in before]
    for axis, (name, title) in zip(axes, shown.items(), strict=True):
        axis.plot((0, 1), (0, 1), color="grey", lw=0.8, ls=":")
        dots = axis.scatter(numbers(before, name), numbers(after, name), c=layers, cmap="viridis", s=14, alpha=0.85)
        axis.set(title=title, xlabel="softmax, as it came", ylabel="made sparse", aspect="equal")
    drawn.colorbar(dots, ax=axes, label="layer", shrink=0.8, pad=0.01)
    densities = [
        [100 * float(row["density"]) for row in after if int(row["layer"]) == layer] for layer in sorted(set(layers))
    ]
    last.plot([statistics.mean(own) for own in densities], color="C3", label="mean of the layer")
    last.plot(layers, numbers(after, "density", 100), ".", color="C0", alpha=0.6, label="head")
    last.set(title="nonzero weights, %", xlabel="layer", ylim=(0, None))
    last.legend(fontsize="small")
    drawn.suptitle(f"The {len(before)} heads of SmolLM2-135M before and after, 1,000 sentences of English-PUD")
    return drawn
