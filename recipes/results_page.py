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
import results_heads
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
        f"letters of dev's answers. {_longer(groups)}",
        "",
        *table(head, lines),
        *origin([*every, *read("inflection_epochs")]),
    ]


def _longer(groups: dict[tuple[str, ...], list[Row]]) -> str:
    """What more epochs would change, as far as it has been tried."""
    said = f"All models learned for {findings.inflection_epochs()} epochs."
    for row in read("inflection_epochs"):
        (same,) = [one for one in groups[row["attention"], row["output_alpha"]] if one["seed"] == row["seed"]]
        what = (("is right for", "accuracy"), ("knows all answers for", "exhaustive"), ("only one for", "single"))
        shares = ", ".join(f"{does} {row[name]} % (before {same[name]} %)" for does, name in what)
        said += (
            f" They have not learned all they can: after {row['command'].split('--epochs ')[1]} epochs the model of "
            f"{row['output_alpha']} / {row['attention']}, seed {row['seed']}, {shares}."
        )
    return said


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
    columns = {
        "perplexity per word": ("word_perplexity", 1),
        "epsilon-perplexity per word": ("word_epsilon_perplexity", 1),
        "sparsemax score": ("sparsemax_score", 3),
        "JS": ("jensen_shannon", 3),
        "symbols possible": ("support_size", 1),
        "attention density": ("density", 3),
        "rep-16": ("rep_16", 3),
    }
    lines = [
        [f"{key[1]} / {key[0]}", len(groups[key]), *(column(groups[key], *chosen) for chosen in columns.values())]
        for key in sorted(groups, key=order)
    ]
    about = (
        "A GPT-2 of 3 layers and width 128 from scratch, 4,000 subwords, one pass over 2 of WikiText-2's 2.9 million tokens, all "
        "settings alike; blocks of 128 tokens without a memory of earlier ones, so that perplexities are high. A sparse output "
        "gives some words that occur the probability 0: its perplexity is infinite, and epsilon-perplexity adds 1e-6 to every "
        "probability. The sparsemax score (higher is better) and JS, the Jensen-Shannon divergence from the word that occurs "
        "(lower is better), are those of Martins et al. 2020; rep-16 is the share of sampled tokens that occur among the 16 "
        f"before (in the text itself: {column(rows[:1], 'human_rep_16', 3)})."
    )
    return ["## Language modelling, WikiText-2", "", about, "", *table(["output / attention alpha", "seeds", *columns], lines),
            *origin(rows)]  # fmt: skip


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
                "" if row["density_target"] == "None" else row["density_target"],
                "yes" if float(row["distill_logits"]) else "",
                f"{float(row[f'{measure}_before']):.2f}",
                f"{float(row[measure]):.2f}",
                f"{float(row['lost']):.2f}",
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
    for group, title, about, names in (
        (
            "classification",
            "Classification: which of 94 languages is a word form from",
            "A BERT of 2 layers and width 128 from scratch that reads the letters of one word form (CoNLL-SIGMORPHON 2018, medium "
            "setting). *Unseen* are forms that no training language has; *certain*, where one language has all the probability.",
            {
                "accuracy, %": "accuracy",
                "macro-F1, %": "macro_f1",
                "on unseen, %": "unseen_accuracy",
                "languages possible": "possible_labels",
                "certain, %": "certain",
                "accuracy where certain, %": "certain_accuracy",
                "attention density": "density_encoder_self",
            },
        ),
        (
            "summarization",
            "Summarisation: SciTLDR",
            "A BART of 2 + 2 layers and width 128 from scratch on 1,992 abstracts: far too few to learn to summarise, the first "
            "sentence is better (*lead*); a comparison of settings. ROUGE against the best of several references.",
            {
                "ROUGE-1": "rouge1",
                "ROUGE-2": "rouge2",
                "ROUGE-L": "rougeL",
                "lead, ROUGE-1": "lead_rouge1",
                "lead, ROUGE-L": "lead_rougeL",
                "density, encoder": "density_encoder_self",
                "cross": "density_cross",
                "decoder": "density_decoder_self",
            },
        ),
    ):
        rows = read(group)
        if rows:
            groups = grouped(rows, "attention", "output_alpha")
            cells = [
                [
                    f"{key[1]} / {key[0]}",
                    len(groups[key]),
                    *(column(groups[key], name) for name in names.values()),
                ]
                for key in sorted(groups, key=order)
            ]
            lines += [f"## {title}", "", about, "", *table(["output / attention alpha", "seeds", *names], cells)]
            lines += origin(rows)
    return lines


SECTIONS: tuple[Callable[[], list[str]], ...] = (
    findings.section,
    morphology,
    alpha_grid,
    translation,
    speeds,
    results_heads.heads,
    results_heads.positional,
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
