"""What Correia et al. 2019 say that heads do, and whether they do it here: diversity and roles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from common.judging import Finding, judge, mean
from common.tables import SITES, Row, grouped, read


def diversity() -> list[Finding]:
    """Figure 6: sparse heads differ more from one another. Models with the same output are compared."""
    found = []
    for group, output in (("translation", "1.0"), ("inflection", "1.5")):
        rows = [row for row in read(group) if row["output_alpha"] == output and row["js_cross"]]
        groups = grouped(rows, "attention")
        soft = groups.get(("softmax",), [])
        for kind, what in (("1.5", "alpha 1.5"), ("learned", "learned alpha")):
            sparse = groups.get((kind,), [])
            if not (soft and sparse):
                continue
            gains = {site: (_site(sparse, site), _site(soft, site)) for site in SITES}
            here = ", ".join(f"{site} {ours:.2f} against {theirs:.2f}" for site, (ours, theirs) in gains.items())
            verdict = "found" if all(ours > theirs for ours, theirs in gains.values()) else "not found"
            if min(len(sparse), len(soft)) == 1:
                verdict += " (one seed)"
            claim = f"Correia et al., figure 6, {group}: heads with {what} are more diverse at every site"
            found.append(Finding(claim, "in every layer", here, verdict))
    return found


def _site(rows: Sequence[Row], site: str) -> float:
    return statistics.fmean(float(row[f"js_{site}"]) for row in rows)


#: Column of the head analysis, what the claim says, the paper's best heads.
ROLES = (
    (
        "confidence_median_previous",
        "previous-token heads are surer (figure 7)",
        "softmax 93.5 %, 1.5 94.4 %, learned 95.9 %",
    ),
    (
        "subword_merging",
        "heads that merge subwords are surer (figure 8)",
        "softmax below 80 %, 1.5 85.6 %, learned 89.8 %",
    ),
    (
        "interrogation",
        "a head finds the question mark, surest with learned alpha (figure 9)",
        "softmax 98.5 %, 1.5 97.0 %, learned 99.5 %",
    ),
)
KINDS = ("softmax", "1.5", "learned")


def roles() -> list[Finding]:
    """Figures 7 to 9: the best head for a role, softmax against learned alpha."""
    heads = read("head_analysis/heads")
    if not set(KINDS) <= {row["model"] for row in heads}:
        return []
    found = []
    for name, what, paper in ROLES:
        best = {kind: 100 * float(surest(heads, kind, name)[name]) for kind in KINDS}
        formed = max(best.values()) > 50
        verdict = "found (one seed)" if best["learned"] > best["softmax"] else "not found (one seed)"
        found.append(
            Finding(
                f"Correia et al.: {what}",
                paper,
                ", ".join(f"{kind} {value:.1f} %" for kind, value in best.items()),
                verdict if formed else "not found: no such head in any model",
                ""
                if formed
                else "models of 3 + 3 layers and width 128 on captions; the treebank and Tatoeba's questions as well",
            )
        )
    return found


def surest(heads: Sequence[Row], model: str, name: str) -> Row:
    """The head of a model with the largest value in a column."""
    return max((row for row in heads if row["model"] == model and row.get(name)), key=lambda row: float(row[name]))


def positional_confidence(heads: Sequence[Row], model: str, count: int = 4) -> float:
    """Mean over a model's surest heads of the median weight on the previous position, %."""
    name = "confidence_median_previous"
    values = sorted((float(row[name]) for row in heads if row["model"] == model and row.get(name)), reverse=True)
    return 100 * statistics.fmean(values[:count])


def letters() -> list[Finding]:
    """Figure 7 on the inflection models, where heads for the previous position have formed."""
    heads = read("head_analysis_inflection/heads")
    seeds: dict[str, list[str]] = {}
    for model in dict.fromkeys(row["model"] for row in heads):
        seeds.setdefault(model.rsplit("-", 1)[0], []).append(model)
    found = []
    for kind, best, what in (("1.5", 94.4, "alpha 1.5"), ("learned", 95.9, "learned alpha")):
        if not (seeds.get(kind) and seeds.get("softmax")):
            continue
        for measure, claim, paper in (
            (_surest_previous, "the surest previous-token head is surer", f"{best:.1f} % against 93.5 %"),
            (positional_confidence, "the four surest previous-token heads are surer", ""),
        ):
            ours, theirs = ([measure(heads, model) for model in seeds[side]] for side in (kind, "softmax"))
            _, verdict = judge(ours, theirs)
            here = f"{mean(ours, ' %')} against {mean(theirs, ' %')}"
            found.append(Finding(f"Correia et al., figure 7, on letters: with {what} {claim}", paper, here, verdict))
    return found


def _surest_previous(heads: Sequence[Row], model: str) -> float:
    return 100 * float(surest(heads, model, "confidence_median_previous")["confidence_median_previous"])
