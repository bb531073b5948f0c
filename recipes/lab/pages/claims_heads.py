"""What Correia et al. 2019 say that heads do, and whether they do it here: diversity and roles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..rows import SITES, Row, Rows, distinct, mean, numbers, pick
from .judging import Finding, found, judge, seeds

#: Column of the head analysis, what the claim says, the paper's best heads.
ROLES = (
    ("confidence_median_previous", "previous-token heads are surer (figure 7)",
     "softmax 93.5 %, 1.5 94.4 %, learned 95.9 %"),
    ("subword_merging", "heads that merge subwords are surer (figure 8)",
     "softmax below 80 %, 1.5 85.6 %, learned 89.8 %"),
    ("interrogation", "a head finds the question mark, surest with learned alpha (figure 9)",
     "softmax 98.5 %, 1.5 97.0 %, learned 99.5 %"),
)  # fmt: skip
KINDS = ("softmax", "1.5", "learned")


def diversity(rows: Rows) -> list[Finding]:
    """Figure 6: sparse heads differ more from one another. Models with the same output are compared."""
    findings = []
    for group, output in (("translation", "1.0"), ("inflection", "1.5")):
        whole = [row for row in rows(group, output_alpha=output) if row["js_cross"]]
        soft = pick(whole, attention="softmax")
        for kind, what in (("1.5", "alpha 1.5"), ("learned", "learned alpha")):
            sparse = pick(whole, attention=kind)
            if not (soft and sparse):
                continue
            gains = {site: (mean(sparse, f"js_{site}"), mean(soft, f"js_{site}")) for site in SITES}
            here = ", ".join(f"{site} {ours:.2f} against {theirs:.2f}" for site, (ours, theirs) in gains.items())
            reservation = "one seed" if min(len(sparse), len(soft)) == 1 else ""
            verdict = found(all(ours > theirs for ours, theirs in gains.values()), reservation)
            claim = f"Correia et al., figure 6, {group}: heads with {what} are more diverse at every site"
            findings.append(Finding(claim, "in every layer", here, verdict))
    return findings


def roles(rows: Rows) -> list[Finding]:
    """Figures 7 to 9: the best head for a role, softmax against learned alpha."""
    heads = rows("head_analysis/heads")
    if not set(KINDS) <= set(distinct(heads, "model")):
        return []
    small = "models of 3 + 3 layers and width 128 on captions; the treebank and Tatoeba's questions as well"
    findings = []
    for name, what, paper in ROLES:
        best = {kind: 100 * float(surest(heads, kind, name)[name]) for kind in KINDS}
        here = ", ".join(f"{kind} {value:.1f} %" for kind, value in best.items())
        if max(best.values()) > 50:
            verdict, tried = found(best["learned"] > best["softmax"], "one seed"), ""
        else:
            verdict, tried = "not found: no such head in any model", small
        findings.append(Finding(f"Correia et al.: {what}", paper, here, verdict, tried))
    return findings


def surest(heads: Sequence[Row], model: str, name: str) -> Row:
    """The head of a model with the largest value in a column."""
    return max((row for row in pick(heads, model=model) if row.get(name)), key=lambda row: float(row[name]))


def surest_previous(heads: Sequence[Row], model: str, count: int = 1) -> float:
    """Mean over a model's surest heads of the median weight on the previous position, %."""
    name = "confidence_median_previous"
    values = numbers((row for row in pick(heads, model=model) if row.get(name)), name)
    return 100 * statistics.fmean(sorted(values, reverse=True)[:count])


def models_by_kind(heads: Sequence[Row]) -> dict[str, list[str]]:
    """The models of an analysis of several seeds, named KIND-SEED, by kind."""
    kinds: dict[str, list[str]] = {}
    for model in distinct(heads, "model"):
        kinds.setdefault(model.rsplit("-", 1)[0], []).append(model)
    return kinds


def letters(rows: Rows) -> list[Finding]:
    """Figure 7 on the inflection models, where heads for the previous position have formed."""
    heads = rows("head_analysis_inflection/heads")
    models = models_by_kind(heads)
    findings = []
    for kind, best, what in (("1.5", 94.4, "alpha 1.5"), ("learned", 95.9, "learned alpha")):
        if not (models.get(kind) and models.get("softmax")):
            continue
        for count, claim, paper in (
            (1, "the surest previous-token head is surer", f"{best:.1f} % against 93.5 %"),
            (4, "the four surest previous-token heads are surer", ""),
        ):
            ours, theirs = ([surest_previous(heads, model, count) for model in models[k]] for k in (kind, "softmax"))
            claim = f"Correia et al., figure 7, on letters: with {what} {claim}"
            here = f"{seeds(ours, ' %')} against {seeds(theirs, ' %')}"
            findings.append(Finding(claim, paper, here, judge(ours, theirs)[1]))
    return findings
