"""What the heads of the trained models do, as sections of the page of results (Correia et al. 2019, section 5)."""

from __future__ import annotations

import findings_heads
from common.tables import Row, order, read, spread, table


def heads() -> list[str]:
    """Section 5 of Correia et al. 2019: what `hf-entmax analyze` wrote about the translation models."""
    sites, single = read("head_analysis/sites"), read("head_analysis/heads")
    if not sites:
        return []
    lines = [
        [
            row["model"],
            row["site"],
            _alphas(row),
            f"{100 * float(row['density']):.1f}",
            f"{float(row['mean_support']):.2f}",
            f"{float(row['head_diversity']):.3f}",
        ]
        for row in sites
    ]
    roles = [
        ("confidence_median_previous", "previous token, median confidence", 100, max),
        ("confidence_median_next", "next token, median confidence", 100, max),
        ("subword_merging", "other subwords of the word, mean score", 100, max),
        ("interrogation", "question mark, share of attention", 100, max),
        ("dependency_accuracy", "syntactic head (German PUD), accuracy", 100, max),
        ("aer_argmax_input", "alignment error rate, largest weight", 100, min),
        ("aer_support_input", "alignment error rate, nonzero weights", 100, min),
    ]
    models = list(dict.fromkeys(row["model"] for row in sites))
    best = []
    for name, title, factor, choose in roles:
        cells = [title]
        for model in models:
            found = [row for row in single if row["model"] == model and row.get(name)]
            if not found:
                cells.append("")
                continue
            row = choose(found, key=lambda row, name=name: float(row[name]))
            cells.append(f"{factor * float(row[name]):.1f} ({row['site']} {row['layer']}.{row['head']})")
        best.append(cells)
    return [
        "## What the heads of the translation models do (Correia et al. 2019, section 5)",
        "",
        "The models of the translation table with a softmax output and attention of softmax, 1.5 and learned alpha (seed 0), on "
        "800 captions of Multi30k's test set of 2016 and 600 German questions of Tatoeba's dev and test sets, which these models "
        "were not trained for; syntax on the German PUD treebank, alignment on 100 gold-aligned sentences of Europarl, far from "
        "captions: compare the models, not with other work. In brackets the layer and head. Correia et al. report, for models "
        "ten times as large, previous-token heads of 93.5 (softmax) to 95.9 % (learned), subword-merging heads of 83 to 90 % and "
        "a question-mark head of 97 to 99.5 %.",
        "",
        *table(["model", "site", "alpha", "density, %", "nonzeros", "JS diversity"], lines),
        *table(["best head for, %", *models], best),
        "![Density of every head](figures/heads_density.png)",
        "",
        "![Diversity of the heads](figures/heads_diversity.png)",
        "",
        "    python recipes/head_evidence.py translation",
        "",
    ]


def _alphas(row: Row) -> str:
    """Mean and range of the heads of a site."""
    if not row["alpha_mean"]:
        return "1"
    mean, least, most = (float(row[f"alpha_{name}"]) for name in ("mean", "min", "max"))
    return f"{mean:g}" if least == most else f"{mean:.2f} ({least:.2f} to {most:.2f})"


def positional() -> list[str]:
    """Figure 7 of Correia et al. 2019, on the inflection models: heads that look at the letter before."""
    heads, counts = read("head_analysis_inflection/heads"), read("head_analysis_inflection/positions")
    if not heads:
        return []
    lines = []
    for kind in sorted({row["model"].rsplit("-", 1)[0] for row in heads}, key=lambda kind: order((kind, "1.5"))):
        seeds = sorted({row["model"] for row in heads if row["model"].rsplit("-", 1)[0] == kind})
        best = [findings_heads.surest(heads, seed, "confidence_median_previous") for seed in seeds]
        found = [
            sum(int(row["positional_heads"]) for row in counts if row["model"] == seed and row["offset"] == "-1")
            for seed in seeds
        ]
        where = ", ".join(f"{row['site'].split('_')[0]} {row['layer']}.{row['head']}" for row in best)
        alphas = [float(row["alpha"]) for row in best if row["alpha"]]
        lines.append(
            [
                kind,
                len(seeds),
                spread([float(count) for count in found], 1),
                spread([100 * float(row["confidence_median_previous"]) for row in best], 1),
                where,
                f"{min(alphas):.2f} to {max(alphas):.2f}" if kind == "learned" else kind,
                spread([findings_heads.positional_confidence(heads, seed) for seed in seeds], 1),
            ]
        )
    head = [
        "attention alpha",
        "seeds",
        "positional heads of 16",
        "surest head, %",
        "which",
        "its alpha",
        "four surest, %",
    ]
    return [
        "### Positional heads of the inflection models (figure 7)",
        "",
        "In these models heads for the previous letter have formed. Models with output alpha 1.5, on 1,200 words of dev; a "
        "head's confidence is the median over words of the weight that it gives to the previous letter, averaged over the "
        "word; a head is positional as `hf_entmax.analysis` decides it. In the last column the mean of the four surest heads, "
        "encoder and decoder together.",
        "",
        *table(head, lines),
        "    python recipes/head_evidence.py inflection",
        "",
    ]
