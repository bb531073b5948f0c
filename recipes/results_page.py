"""Write model_cards/RESULTS.md from the rows that the recipes left in recipes/results: no number is typed by hand.

python recipes/results_page.py
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import findings
import findings_heads
from common.tables import SITES, Row, column, grouped, order, origin, read, spread, table
from results_figures import shown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "model_cards" / "RESULTS.md"

# --- Sections ----------------------------------------------------------------------------------------------------------


def morphology() -> list[str]:
    """Table 1 of Peters et al. 2019."""
    every = read("inflection")
    rows = [row for row in every if not row["ensemble"]]
    if not rows:
        return []
    groups = grouped(rows, "attention", "output_alpha")
    together = grouped([row for row in every if row["ensemble"]], "attention", "output_alpha")
    lines = []
    for key in sorted(groups, key=order):
        own = groups[key]
        paper = findings.MORPHOLOGY_PAPER.get((key[1], key[0]))
        lines.append(
            [
                f"{key[1]} / {key[0]}",
                column(own, "accuracy"),
                len(own),
                column(together.get(key, []), "accuracy") if key in together else "",
                f"{paper[0]} / {paper[1]}" if paper else "",
                column(own, "optimal", 1),
                column(own, "exhaustive", 1),
                column(own, "single", 1),
                column(own, "output_support", 2),
                column(own, "density_cross", 1, 100),
            ]
        )
    head = ["output / attention alpha", "accuracy, %", "seeds", "ensemble", "paper: mean / ensemble"]
    head += ["certified best, %", "all known, %", "only one, %", "symbols possible", "cross-attention not zero, %"]
    return [
        "## Morphological inflection (Peters et al. 2019, table 1)",
        "",
        "CoNLL-SIGMORPHON 2018 task 1, medium setting (1,000 words a language), 12 languages trained together (the paper: all "
        "of the task), word accuracy averaged over languages, 1,000 test words each, beam 5. The paper's numbers are those of "
        "its recurrent models on its languages: they show its differences, not a target. *Certified best*: the search proved "
        "that its answer is the model's most probable, which sharp softmax models often allow too. *All known*: it holds every "
        "answer with a probability above 0; the paper's search is exact in this sense for 79 % of the validation words. *Only "
        "one*: one answer has all the probability; the paper has 66 %. *Symbols possible*: with a probability above 0, mean over the "
        "letters of dev's answers.",
        "",
        *table(head, lines),
        *origin(every),
    ]


def translation() -> list[str]:
    """Table 2 of Peters et al. 2019 and table 1 of Correia et al. 2019, on other data."""
    rows = read("translation")
    if not rows:
        return []
    groups = grouped(rows, "attention", "output_alpha")
    lines = []
    for key in sorted(groups, key=order):
        own = groups[key]
        second = [re.search(r"test_2017_flickr:bleu=([\d.]+),chrf=([\d.]+)", row["tests"]) for row in own]
        lines.append(
            [
                f"{key[1]} / {key[0]}",
                len(own),
                column(own, "bleu"),
                column(own, "chrf"),
                spread([float(found[1]) for found in second if found]) if all(second) else "",
                *(column(own, f"density_{site}", 1, 100) for site in SITES),
                *(column(own, f"js_{site}") for site in SITES),
                column(own, "optimal", 1),
                column(own, "output_support", 1),
            ]
        )
    head = [
        "output / attention alpha",
        "seeds",
        "BLEU 2016",
        "chrF 2016",
        "BLEU 2017",
        "density enc, %",
        "cross",
        "dec",
    ]
    head += ["JS enc", "cross", "dec", "certified best, %", "words possible"]
    return [
        "## Translation, Multi30k German to English",
        "",
        "A Transformer of 3 + 3 layers, width 128, trained from scratch on 29,000 captions; all settings alike. BLEU and chrF "
        "by sacrebleu on `generate()` with a beam of 5; density and Jensen-Shannon diversity (in units of log heads) of all heads "
        "on dev; certificates for the first 200 sentences of test 2016; *words possible* is the mean number of subwords with a "
        "probability above 0 where dev's references stand. Correia et al. 2019 have on IWSLT de-en 29.79 "
        "(softmax), 29.83 (1.5), 29.90 (learned).",
        "",
        *table(head, lines),
        *origin(rows),
    ]


def lambdas() -> list[str]:
    """Figures 8 and 9 of Laha et al. 2018, in numbers."""
    rows = read("translation_lambda")
    if not rows:
        return []
    lines = [
        [
            row["mapping_options"].strip("{}"),
            row["bleu"],
            *(row[f"support_{site}"] for site in SITES),
            *(f"{100 * float(row[f'density_{site}']):.1f}" for site in SITES),
        ]
        for row in sorted(rows, key=lambda row: float(re.sub(r"[^\d.-]", "", row["mapping_options"])))
    ]
    head = ["lambda", "BLEU 2016", "nonzeros enc", "cross", "dec", "density enc, %", "cross", "dec"]
    return [
        "## Attention by sparsegen-lin as lambda grows (Laha et al. 2018, figures 8 and 9)",
        "",
        "The same translation model, 2 epochs, one seed: the number of source and target words that a head attends to.",
        "",
        *table(head, lines),
        *origin(rows),
    ]


def alpha_grid() -> list[str]:
    """Figure 4 of Peters et al. 2019."""
    rows = read("inflection_alpha")
    if not rows:
        return []
    by = {(row["attention"], row["output_alpha"]): row for row in rows}
    alphas = sorted({float(row["output_alpha"]) for row in rows} | {float(row["attention"]) for row in rows})
    lines = []
    for alpha in alphas:
        outputs, attentions = by.get(("1.5", str(alpha))), by.get((str(alpha), "1.5"))
        lines.append([alpha, outputs["accuracy"] if outputs else "", attentions["accuracy"] if attentions else ""])
    share = statistics.fmean(float(row["accuracy"]) for row in rows) / 100
    noise = 100 * math.sqrt(share * (1 - share) / int(rows[0]["test_words"]))
    return [
        "## A grid of alphas (Peters et al. 2019, figure 4)",
        "",
        "German inflection, 10,000 words, one seed; the other alpha is 1.5. The paper finds the best output near 1.33 and poor "
        f"results above 2. {rows[0]['test_words']} test words leave each figure with a standard error of {noise:.1f} %.",
        "",
        *table(["alpha", "accuracy, % (output)", "accuracy, % (attention)"], lines),
        *shown("inflection_alpha", "Accuracy by alpha"),
        *origin(rows),
    ]


def language_models() -> list[str]:
    """Measures of Martins et al. 2020, and conversions of the softmax model."""
    rows = read("language_modeling")
    if not rows:
        return []
    groups = grouped(rows, "attention", "output_alpha")
    names = ("word_epsilon_perplexity", "sparsemax_score", "jensen_shannon", "support_size", "density", "rep_16")
    lines = [
        [
            f"{key[1]} / {key[0]}",
            len(groups[key]),
            *(column(groups[key], name, 3) for name in names),
        ]
        for key in sorted(groups, key=order)
    ]
    head = [
        "output / attention alpha",
        "seeds",
        "epsilon-perplexity per word",
        "sparsemax score",
        "JS",
        "words possible",
    ]
    head += ["attention density", "rep-16"]
    return ["## Language modelling, WikiText-2", "", *table(head, lines), *origin(rows)]


def conversions() -> list[str]:
    """What a finished softmax model loses when it is made sparse."""
    lines: list[str] = []
    for group, what, measure, title, unit in (
        ("convert_lm", "the language model", "perplexity", "perplexity", "%"),
        ("convert_mt", "the translation model", "bleu", "BLEU", "BLEU"),
    ):
        rows = read(group)
        if not rows:
            continue
        control = next((row for row in rows if row["attention"] == "softmax"), None)
        cells = [
            [
                row["attention"],
                row["schedule"],
                row["density_target"],
                row["distill_logits"],
                f"{float(row[f'{measure}_before']):.2f}",
                f"{float(row[measure]):.2f}",
                row["lost"],
                f"{findings.price(row, control):.2f}" if control else "",
                column([row], "density", 1, 100),
            ]
            for row in rows
        ]
        head = ["attention", "schedule", "density target", "distilled", f"{title} before", "after"]
        head += [f"lost, {unit}", f"lost to the control, {unit}", "density, %"]
        lines += [f"### From {what}", "", *table(head, cells), *origin(rows)]
    about = (
        "A finished softmax model trains on while alpha goes from 1 to its value (*anneal*) or has it from the start "
        "(*abrupt*); a density target is a regulariser. *Lost* is against the model before; the softmax row is the control, "
        "which trains on for as long without becoming sparse, so that the price of sparsity is what is lost to it. The figure "
        "follows every conversion over its evaluations."
    )
    picture = shown("conversion", "Quality against density during conversion")
    return ["## Conversion of softmax models", "", about, "", *picture, *lines] if lines else []


def speeds() -> list[str]:
    """Figure 6 of Peters et al. 2019: what sparsity costs in training."""
    rows = read("training_speed")
    if not rows:
        return []
    steps = list(dict.fromkeys((row["recipe"], row["from_step"], row["to_step"]) for row in rows))
    by = {(row["recipe"], row["from_step"], row["attention"], row["output_alpha"]): row for row in rows}
    settings = sorted({(row["attention"], row["output_alpha"]) for row in rows}, key=order)
    lines = []
    for attention, output in settings:
        cells = [f"{output} / {attention}"]
        for recipe, first, _ in steps:
            row = by[recipe, first, attention, output]
            cells.append(f"{row['time_ratio']} ({row['time_ratio_20']} to {row['time_ratio_80']})")
        lines.append(cells)
    head = [f"{recipe}, steps {first} to {last}" for recipe, first, last in steps]
    where = "; ".join(sorted({f"{row['clock']}; {row['hardware']}; {row['versions']}" for row in rows}))
    return [
        "## Training time (Peters et al. 2019, figure 6)",
        "",
        "Time of a training step over that of the softmax model on the same batch, median (20 to 80 % quantile), models of all "
        "settings trained side by side from scratch. The softmax model uses PyTorch's fused attention (SDPA). Correia et al. "
        "report 90 % (1.5) and 75 % (learned) of softmax's training speed on GPUs.",
        "",
        *table(["output / attention alpha", *head], lines),
        *(f"    {command}" for command in sorted({row["command"] for row in rows})),
        "",
        f"{where}.",
        "",
        *shown("inflection_time", "Accuracy on dev against training time"),
    ]


def other_tasks() -> list[str]:
    """Classification and summarisation."""
    lines: list[str] = []
    for group, title, names in (
        (
            "classification",
            "Classification: which of 94 languages is a word form from",
            ("accuracy", "macro_f1", "unseen_accuracy"),
        ),
        ("summarization", "Summarisation: SciTLDR, from scratch", ("rouge1", "rouge2", "rougeL", "lead_rouge1")),
    ):
        rows = read(group)
        if rows:
            groups = grouped(rows, "attention", "output_alpha")
            cells = [
                [
                    f"{key[1]} / {key[0]}",
                    len(groups[key]),
                    *(column(groups[key], name) for name in names),
                    column(groups[key], "density_encoder_self", 1, 100),
                ]
                for key in sorted(groups, key=order)
            ]
            head = ["output / attention alpha", "seeds", *names, "density, %"]
            lines += [f"## {title}", "", *table(head, cells), *origin(rows)]
    return lines


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


SECTIONS: tuple[Callable[[], list[str]], ...] = (
    findings.section,
    morphology,
    alpha_grid,
    translation,
    speeds,
    heads,
    positional,
    lambdas,
    conversions,
    language_models,
    other_tasks,
)


def page() -> str:
    """The whole page."""
    head = [
        "# Results",
        "",
        "What the recipes measured on real data. Generated by `python recipes/results_page.py` from `recipes/results/*.csv`; "
        "`python recipes/evidence.py recipes/configs/evidence.yaml` runs what has no row yet. ± is the standard deviation over "
        "seeds.",
        "",
    ]
    return "\n".join([*head, *(line for section in SECTIONS for line in section())]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
