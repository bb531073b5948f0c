"""The tables of model_cards/RESULTS.md."""

from __future__ import annotations

import math
import re

from ..rows import (
    SITES,
    Row,
    Rows,
    by_setting,
    column,
    data,
    distinct,
    grouped,
    machines,
    mean,
    order,
    pick,
    row_table,
    settings_table,
    spread,
    table,
)
from . import claims, pretrained
from .claims_heads import models_by_kind, surest, surest_previous


def morphology(rows: Rows, group: str = "inflection") -> str:
    """Table 1 of Peters et al. 2019."""
    groups = grouped(rows(group, ensemble=""), "attention", "output_alpha")
    ensembles = grouped([row for row in rows(group) if row["ensemble"]], "attention", "output_alpha")
    head = ["output / attention alpha", "accuracy, %", "seeds", "ensemble", "paper: mean / ensemble"]
    head += ["certified best, %", "all known, %", "only one, %", "symbols possible", "cross-attention not zero, %"]
    lines = []
    for key in sorted(groups, key=order):
        own, paper = groups[key], claims.MORPHOLOGY_PAPER.get((key[1], key[0]))
        cells = [f"{key[1]} / {key[0]}", column(own, "accuracy"), len(own), column(ensembles.get(key, []), "accuracy")]
        cells += [f"{paper[0]} / {paper[1]}" if paper else "", *(column(own, n, 1) for n in CERTIFICATES)]
        lines.append([*cells, column(own, "output_support"), column(own, "density_cross", 1, 100)])
    return table(head, lines)


CERTIFICATES = ("optimal", "exhaustive", "single")


def alpha_grid(rows: Rows) -> str:
    """Figure 4 of Peters et al. 2019."""
    found = rows("inflection_alpha")
    by = {(float(row["attention"]), float(row["output_alpha"])): row["accuracy"] for row in found}
    alphas = sorted({alpha for pair in by for alpha in pair})
    lines = [[alpha, by.get((1.5, alpha), ""), by.get((alpha, 1.5), "")] for alpha in alphas]
    return table(["alpha", "accuracy, % (output)", "accuracy, % (attention)"], lines)


def standard_error(rows: list[Row]) -> str:
    """Of a share of so many test words, %."""
    share = mean(rows, "accuracy") / 100
    return f"{100 * math.sqrt(share * (1 - share) / int(rows[0]['test_words'])):.1f}"


def translation(rows: Rows) -> str:
    """Table 2 of Peters et al. 2019 and table 1 of Correia et al. 2019, on other data."""
    found = []
    for row in rows("translation"):
        second = re.search(r"test_2017_flickr:bleu=([\d.]+),", row["tests"])
        found.append({**row, "bleu_2017": second[1] if second else ""})
    scores = {"BLEU 2016": ("bleu",), "chrF 2016": ("chrf",), "BLEU 2017": ("bleu_2017",)}
    return settings_table(found, {**scores, **TRANSLATION})


def second_pair(rows: Rows, group: str = "translation_enja") -> str:
    """The same of Japanese to English."""
    return settings_table(rows(group), {"BLEU": ("bleu",), "chrF": ("chrf",), **TRANSLATION})


TRANSLATION: dict[str, tuple[str | int | float, ...]] = {
    "density enc, %": ("density_encoder_self", 1, 100), "cross": ("density_cross", 1, 100),
    "dec": ("density_decoder_self", 1, 100),
    "JS enc": ("js_encoder_self",), "cross ": ("js_cross",), "dec ": ("js_decoder_self",),
    "certified best, %": ("optimal", 1), "words possible": ("output_support", 1),
}  # fmt: skip


def speeds(rows: Rows) -> str:
    """Figure 6 of Peters et al. 2019: what sparsity costs in training."""
    stretches = grouped(rows("training_speed"), "recipe", "from_step", "to_step")
    by = {key: {(row["attention"], row["output_alpha"]): row for row in own} for key, own in stretches.items()}
    lines = []
    for setting in sorted(next(iter(by.values())), key=order):
        cells = [f"{setting[1]} / {setting[0]}"]
        for own in by.values():
            row = own[setting]
            cells.append(f"{row['time_ratio']} ({row['time_ratio_20']} to {row['time_ratio_80']})")
        lines.append(cells)
    head = [f"{recipe}, steps {first} to {last}" for recipe, first, last in by]
    return table(["output / attention alpha", *head], lines)


def speed_commands(rows: Rows) -> str:
    """How the speeds were measured."""
    return "".join(f"    {command}\n" for command in sorted(distinct(rows("training_speed"), "command")))


def measured(found: list[Row], *sets: str) -> str:
    """How rows were measured, where, and with which public data."""
    commands = "".join(f"    {command}\n" for command in distinct(found, "command"))
    return f"{commands}\n{machines(found)}. {data(*sets)}\n"


def sites(rows: Rows) -> str:
    """What `hf-entmax analyze` wrote about the translation models."""
    lines = []
    for row in rows("head_analysis/sites"):
        mean, least, most = (float(row[f"alpha_{name}"] or 1) for name in ("mean", "min", "max"))
        alpha = f"{mean:g}" if least == most else f"{mean:.2f} ({least:.2f} to {most:.2f})"
        shown = (f"{100 * float(row['density']):.1f}", f"{float(row['mean_support']):.2f}")
        lines.append([row["model"], row["site"], alpha, *shown, f"{float(row['head_diversity']):.3f}"])
    return table(["model", "site", "alpha", "density, %", "nonzeros", "JS diversity"], lines)


def best_heads(rows: Rows) -> str:
    """The best head of each translation model for each role."""
    heads = rows("head_analysis/heads")
    models = distinct(rows("head_analysis/sites"), "model")
    lines = []
    for name, title, choose in (
        ("confidence_median_previous", "previous token, median confidence", max),
        ("confidence_median_next", "next token, median confidence", max),
        ("subword_merging", "other subwords of the word, mean score", max),
        ("interrogation", "question mark, share of attention", max),
        ("dependency_accuracy", "syntactic head (German PUD), accuracy", max),
        ("aer_argmax_input", "alignment error rate, largest weight", min),
        ("aer_support_input", "alignment error rate, nonzero weights", min),
    ):
        cells = [title]
        for model in models:
            found = [row for row in pick(heads, model=model) if row.get(name)]
            row = choose(found, key=lambda row, name=name: float(row[name])) if found else None
            cells.append(f"{100 * float(row[name]):.1f} ({row['site']} {row['layer']}.{row['head']})" if row else "")
        lines.append(cells)
    return table(["best head for, %", *models], lines)


def positional(rows: Rows) -> str:
    """Figure 7 of Correia et al. 2019, on the inflection models: heads that look at the letter before."""
    heads, counts = rows("head_analysis_inflection/heads"), rows("head_analysis_inflection/positions", offset="-1")
    models = models_by_kind(heads)
    lines = []
    for kind in sorted(models, key=lambda kind: order((kind, "1.5"))):
        best = [surest(heads, seed, "confidence_median_previous") for seed in sorted(models[kind])]
        found = [sum(int(row["positional_heads"]) for row in pick(counts, model=seed)) for seed in sorted(models[kind])]
        alphas = [float(row["alpha"]) for row in best if row["alpha"]]
        which = ", ".join(f"{row['site'].split('_')[0]} {row['layer']}.{row['head']}" for row in best)
        four = spread([surest_previous(heads, seed, 4) for seed in sorted(models[kind])], 1)
        alpha = f"{min(alphas):.2f} to {max(alphas):.2f}" if kind == "learned" else kind
        sure = column(best, "confidence_median_previous", 1, 100)
        lines.append([kind, len(best), spread(found, 1), sure, which, alpha, four])
    head = ["attention alpha", "seeds", "positional heads of 16", "surest head, %", "which", "its alpha"]
    return table([*head, "four surest, %"], lines)


def lambdas(rows: Rows) -> str:
    """Figures 8 and 9 of Laha et al. 2018, in numbers."""
    head = ["lambda", "BLEU 2016", "nonzeros enc", "cross", "dec", "density enc, %", "cross", "dec"]
    lines = []
    for row in claims.by_lambda(rows):
        densities = [f"{100 * float(row[f'density_{site}']):.1f}" for site in SITES]
        supports = [row[f"support_{site}"] for site in SITES]
        lines.append([row["mapping_options"].strip("{}"), row["bleu"], *supports, *densities])
    return table(head, lines)


def conformal(rows: Rows) -> str:
    """Sets with a promise: coverage and size over the splits."""

    def size(row: Row) -> str:
        found = f"{row['size']} ± {row['size_sd']}" if row["size_sd"] else row["size"]
        partly = row["whole"] and float(row["whole"]) < 100
        return f">= {found} ({row['whole']} % of {row['listed']} listed whole)" if partly else found

    return row_table(rows("conformal"), {
        "data": lambda row: "94 languages" if row["unit"] == "label" else "inflection",
        "set of": lambda row: f"{row['unit']}s", "output": "output_alpha", "method": "method",
        "promised, %": "coverage_wanted", "held, %": lambda row: f"{row['coverage']} ± {row['coverage_sd']}",
        "labels or answers in a set": size, "held in the worst stratum, %": "worst_stratum",
        "by size of the set: held, % (share of sets, %)": "strata",
    })  # fmt: skip


def conversion_name(row: Row) -> str:
    """What was trained, how it became sparse and what pushed it."""
    parts = [pretrained.label(row), *([] if row["attention"] == "softmax" else [row["schedule"]])]
    if rate := re.search(r"--density_rate (\S+)", row["command"]):
        parts.append(f"density rate {rate[1]}")
    if float(row["distill_logits"]):
        parts.append("distilled")
    return ", ".join(parts)


def conversions(found: list[Row], measure: str, title: str, unit: str) -> str:
    """What a finished softmax model loses when it is made sparse: a line for each setting, mean and spread over its seeds."""
    control = pick(found, attention="softmax")
    head = ["conversion", "seeds", f"{title} before", "after", f"lost, {unit}", f"lost to the control, {unit}"]
    lines = []
    for own in by_setting(found):
        cells = [column(own, name) for name in (f"{measure}_before", measure, "lost")]
        cells += [f"{claims.price(own, control):.2f}" if control else "", column(own, "density", 1, 100)]
        lines.append([conversion_name(own[0]), len(own), *cells])
    return table([*head, "density, %"], lines)
