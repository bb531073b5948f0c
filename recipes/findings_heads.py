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


#: Column of the head analysis, what the claim says, the paper's best head of the softmax and the learned model.
ROLES = (
    ("confidence_median_previous", "previous-token heads are surer (figure 7)", 93.5, 95.9, max),
    ("subword_merging", "heads that merge subwords are surer (figure 8)", 80.0, 89.8, max),
    ("interrogation", "a head finds the question mark (figure 9)", 98.5, 99.5, max),
)


def roles() -> list[Finding]:
    """Figures 7 to 9: the best head for a role, softmax against learned alpha."""
    single = read("head_analysis/heads")
    found = []
    for name, what, soft, learned, choose in ROLES:
        best = {}
        for (model,), rows in grouped(single, "model").items():
            values = [100 * float(row[name]) for row in rows if row.get(name)]
            if values:
                best[model] = choose(values)
        if not {"softmax", "learned"} <= set(best):
            continue
        formed = best["learned"] > 50
        verdict = "found (one seed)" if best["learned"] > best["softmax"] else "not found (one seed)"
        found.append(
            Finding(
                f"Correia et al.: {what}",
                f"{learned:.1f} % against {soft:.1f} %",
                f"{best['learned']:.1f} % against {best['softmax']:.1f} %",
                verdict if formed else "not found: no such head in either model",
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
