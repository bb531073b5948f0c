"""The tables of the pages. Each function takes the rows and the words of its mark; a group may carry conditions: ``length?task=sort``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import yaml

from hf_entmax.generation import hypothesis_tree
from hf_entmax.generation.forced import ForcedDecoding, ForcedStep
from hf_entmax.generation.results import SearchResult

from .. import views
from ..public_data import SETS
from ..rows import (
    ROOT,
    SITES,
    Row,
    Rows,
    by_setting,
    column,
    distinct,
    grouped,
    machines,
    mean,
    numbers,
    order,
    pick,
    row_table,
    spread,
    table,
)
from .judges import by_lambda, calibrated, label, price, settings_of
from .judges_heads import kinds, surest, surest_previous

#: Peters et al. 2019, table 1, medium setting: mean accuracy and that of ensembles, by output and attention alpha.
MORPHOLOGY_PAPER = {
    ("1.0", "softmax"): (82.55, 85.68), ("1.0", "1.5"): (83.20, 85.63), ("1.0", "2.0"): (83.13, 85.65),
    ("1.5", "softmax"): (84.88, 86.38), ("1.5", "1.5"): (84.93, 86.55), ("1.5", "2.0"): (84.93, 86.59),
    ("2.0", "softmax"): (84.95, 86.41), ("2.0", "1.5"): (85.03, 86.61), ("2.0", "2.0"): (84.96, 86.47),
}  # fmt: skip
_TRANSLATION = {
    "BLEU": ("bleu",), "chrF": ("chrf",),
    "density enc, %": ("density_encoder_self", 1, 100), "cross": ("density_cross", 1, 100),
    "dec": ("density_decoder_self", 1, 100),
    "JS enc": ("js_encoder_self",), "cross ": ("js_cross",), "dec ": ("js_decoder_self",),
    "certified best, %": ("optimal", 1), "words possible": ("output_support", 1),
}  # fmt: skip
#: Tables with a line for every output and attention alpha: columns by group and title, what `column` takes after the rows.
SETTINGS: dict[str, dict[str, tuple[str | int | float, ...]]] = {
    "translation": {"BLEU 2016": ("bleu",), "chrF 2016": ("chrf",), "BLEU 2017": ("bleu_2017",),
                    **{title: shown for title, shown in _TRANSLATION.items() if title not in ("BLEU", "chrF")}},
    "translation_enja": _TRANSLATION,
    "translation_enja_rate": _TRANSLATION,
    "translation_mappings": {
        "BLEU 2016": ("bleu",), "chrF": ("chrf",), "density, encoder, %": ("density_encoder_self", 1, 100),
        "cross, %": ("density_cross", 1, 100), "decoder, %": ("density_decoder_self", 1, 100)},
    "language_modeling": {
        "perplexity per word": ("word_perplexity", 1), "epsilon-perplexity per word": ("word_epsilon_perplexity", 1),
        "sparsemax score": ("sparsemax_score", 3), "JS": ("jensen_shannon", 3), "symbols possible": ("support_size", 1),
        "attention density": ("density", 3), "rep-16": ("rep_16", 3)},
    "classification": {
        "accuracy, %": ("accuracy",), "macro-F1, %": ("macro_f1",), "on unseen, %": ("unseen_accuracy",),
        "languages possible": ("possible_labels",), "certain, %": ("certain",), "accuracy where certain, %": ("certain_accuracy",),
        "attention density": ("density_encoder_self",)},
    "summarization": {
        "ROUGE-1": ("rouge1",), "ROUGE-2": ("rouge2",), "ROUGE-L": ("rougeL",),
        "lead, ROUGE-1": ("lead_rouge1",), "lead, ROUGE-L": ("lead_rougeL",),
        "density, encoder": ("density_encoder_self",), "cross": ("density_cross",), "decoder": ("density_decoder_self",)},
}  # fmt: skip
#: Columns of a table of conversions, likewise. One that no row has is left out.
_CONVERTED: dict[str, tuple[str | int, ...]] = {
    "patched, Spearman": ("start_spearman", 3), "patched, perplexity": ("start_perplexity", 1),
    "patched, %": ("start_density", 1, 100), "steps": ("steps", 0), "nonzero weights, %": ("density", 2, 100),
    "keys with weight": ("support_encoder_self",), "of keys": ("keys",), "keys with weight ": ("support_decoder_self",),
    "Spearman": ("spearman", 4), "Pearson": ("pearson", 4),
    "partner found before, %": ("accuracy_before", 1, 100), "after, %": ("accuracy", 1, 100), "MRR": ("mrr", 4),
    "perplexity before": ("perplexity_before",), "after": ("perplexity",),
}  # fmt: skip


def value(rows: Rows, group: str, name: str, digits: str = "") -> str:
    """One column of the first row of a group."""
    cell = rows(group)[0][name]
    return f"{float(cell):.{digits}f}" if digits else cell


def epochs(rows: Rows, group: str) -> int:
    """How long the models of a group learned: as the command says, else its configuration."""
    command = rows(group)[0]["command"]
    if given := re.search(r"--epochs (\d+)", command):
        return int(given[1])
    (path,) = re.findall(r"--config (\S+)", command)
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))["epochs"]


def origin(rows: Rows, *words: str) -> str:
    """How the rows of groups were made and where; words with a plus sign name public data sets."""
    found = [row for word in words if word[0] != "+" for row in rows(word)]
    data = [f"{word[1:]} {SETS[word[1:]].fingerprint}" for word in words if word[0] == "+"]
    text, trained = "", [float(row["train_seconds"]) for row in found if row.get("train_seconds")]
    if found:
        commands = sorted({re.sub(r"--seed \d+", "--seed SEED", row["command"]) for row in found})
        lines = "".join(f"    {command}\n" for command in commands)
        text = f"<details><summary>Commands</summary>\n\n{lines}\n</details>\n\n"
    if trained:
        runs = "One run" if len(trained) == 1 else f"{len(trained)} runs"
        text += f"{runs}, {sum(trained) / 3600:.1f} hours of training beside other work on the same two cores. "
    text += f"{machines(found)}. " if found else ""
    return text + (f"Data ([recipes/data](../recipes/data/README.md)): {', '.join(data)}." if data else "")


def settings(rows: Rows, group: str) -> str:
    """A line for every output and attention alpha: mean and spread over the seeds."""
    found = rows(group)
    for row in found:
        if second := re.search(r"test_2017_flickr:bleu=([\d.]+),", row.get("tests", "")):
            row["bleu_2017"] = second[1]
    groups, columns = grouped(found, "attention", "output_alpha"), SETTINGS[group]
    lines = [
        [f"{key[1]} / {key[0]}", len(groups[key]), *(column(groups[key], *shown) for shown in columns.values())]  # type: ignore[arg-type]
        for key in sorted(groups, key=order)
    ]
    return table(["output / attention alpha", "seeds", *(title.strip() for title in columns)], lines)


def morphology(rows: Rows, group: str) -> str:
    """Table 1 of Peters et al. 2019."""
    groups = grouped(rows(group, ensemble=""), "attention", "output_alpha")
    ensembles = grouped([row for row in rows(group) if row["ensemble"]], "attention", "output_alpha")
    head = ["output / attention alpha", "accuracy, %", "seeds", "ensemble", "paper: mean / ensemble"]
    head += ["certified best, %", "all known, %", "only one, %", "symbols possible", "cross-attention not zero, %"]
    lines = []
    for key in sorted(groups, key=order):
        own, paper = groups[key], MORPHOLOGY_PAPER.get((key[1], key[0]))
        cells = [f"{key[1]} / {key[0]}", column(own, "accuracy"), len(own), column(ensembles.get(key, []), "accuracy")]
        cells += [f"{paper[0]} / {paper[1]}" if paper else ""]
        cells += [column(own, name, 1) for name in ("optimal", "exhaustive", "single")]
        lines.append([*cells, column(own, "output_support"), column(own, "density_cross", 1, 100)])
    return table(head, lines)


def elsewhere(rows: Rows) -> str:
    """The same job on another machine."""
    (row,) = rows("inflection_epochs_elsewhere")
    return (
        f"On another machine ({row['hardware'].partition(',')[0]}) seed {row['seed']} of {row['output_alpha']} / "
        f"{row['attention']} came to {row['accuracy']} %, with all answers known for {row['exhaustive']} % and only one for "
        f"{row['single']} % of the words; the members of the ensembles are the models of the table."
    )


def word(rows: Rows, part: str) -> str:
    """Of the one word that is shown in full: a field of its file, ``tree`` (figure 1) or ``forced`` (figure 2)."""
    view = views.read(rows.folder / views.FILE)
    if part == "tree":
        names, log_probabilities = zip(*view["hypotheses"], strict=True)
        ids: dict[str, int] = {}
        sequences = [[ids.setdefault(token, len(ids)) for token in tokens] for tokens in names]
        known = [True] * len(sequences)
        result = SearchResult(sequences, list(log_probabilities), known, True, True, 0.0, -math.inf, 0)
        text = hypothesis_tree(result, list(ids).__getitem__).to_text()
    elif part == "forced":
        steps = [ForcedStep(**{**step, "support": list(map(tuple, step["support"]))}) for step in view["forced"]]
        text = ForcedDecoding(steps).to_text()
    else:
        return str(view[part])
    return "```\n" + text.rstrip("\n") + "\n```"


def alpha_grid(rows: Rows) -> str:
    """Figure 4 of Peters et al. 2019."""
    found = rows("inflection_alpha")
    by = {(float(row["attention"]), float(row["output_alpha"])): row["accuracy"] for row in found}
    alphas = sorted({alpha for pair in by for alpha in pair})
    lines = [[alpha, by.get((1.5, alpha), ""), by.get((alpha, 1.5), "")] for alpha in alphas]
    return table(["alpha", "accuracy, % (output)", "accuracy, % (attention)"], lines)


def standard_error(rows: Rows, group: str) -> str:
    """Of a share of so many test words, %."""
    share = mean(rows(group), "accuracy") / 100
    return f"{100 * math.sqrt(share * (1 - share) / int(rows(group)[0]['test_words'])):.1f}"


def speeds(rows: Rows) -> str:
    """Figure 6 of Peters et al. 2019: what sparsity costs in training."""
    stretches = grouped(rows("training_speed"), "recipe", "from_step", "to_step")
    by = {key: {(row["attention"], row["output_alpha"]): row for row in own} for key, own in stretches.items()}
    lines = []
    for setting in sorted(next(iter(by.values())), key=order):
        own = [found[setting] for found in by.values()]
        cells = [f"{row['time_ratio']} ({row['time_ratio_20']} to {row['time_ratio_80']})" for row in own]
        lines.append([f"{setting[1]} / {setting[0]}", *cells])
    return table(
        ["output / attention alpha", *(f"{recipe}, steps {first} to {last}" for recipe, first, last in by)], lines
    )


def sites(rows: Rows) -> str:
    """What `hf-entmax analyze` wrote about the translation models."""
    lines = []
    for row in rows("head_analysis/sites"):
        middle, least, most = (float(row[f"alpha_{name}"] or 1) for name in ("mean", "min", "max"))
        alpha = f"{middle:g}" if least == most else f"{middle:.2f} ({least:.2f} to {most:.2f})"
        shown = (f"{100 * float(row['density']):.1f}", f"{float(row['mean_support']):.2f}")
        lines.append([row["model"], row["site"], alpha, *shown, f"{float(row['head_diversity']):.3f}"])
    return table(["model", "site", "alpha", "density, %", "nonzeros", "JS diversity"], lines)


def best_heads(rows: Rows) -> str:
    """The best head of each translation model for each role."""
    heads = rows("head_analysis/heads")
    models = distinct(rows("head_analysis/sites"), "model")
    lines = []
    for name, title in {
        "confidence_median_previous": "previous token, median confidence",
        "confidence_median_next": "next token, median confidence",
        "subword_merging": "other subwords of the word, mean score",
        "interrogation": "question mark, share of attention",
        "dependency_accuracy": "syntactic head (German PUD), accuracy",
        "aer_argmax_input": "alignment error rate, largest weight",
        "aer_support_input": "alignment error rate, nonzero weights",
    }.items():
        choose = min if name.startswith("aer") else max
        cells = [title]
        for model in models:
            found = [row for row in pick(heads, model=model) if row.get(name)]
            row = choose(found, key=lambda row, name=name: float(row[name])) if found else None
            cells.append(f"{100 * float(row[name]):.1f} ({row['site']} {row['layer']}.{row['head']})" if row else "")
        lines.append(cells)
    return table(["best head for, %", *models], lines)


def positional(rows: Rows) -> str:
    """Figure 7 of Correia et al. 2019, on the inflection models: heads that look at the letter before."""
    counts = rows("head_analysis_inflection/positions", offset="-1")
    lines = []
    for kind, models in sorted(kinds(rows, "inflection").items(), key=lambda entry: order((entry[0], "1.5"))):
        named = {own[0]["model"]: own for own in models}
        best = [surest(own, model, "confidence_median_previous") for model, own in sorted(named.items())]
        found = [sum(numbers(pick(counts, model=model), "positional_heads")) for model in sorted(named)]
        alphas = [float(row["alpha"]) for row in best if row["alpha"]]
        which = ", ".join(f"{row['site'].split('_')[0]} {row['layer']}.{row['head']}" for row in best)
        four = spread([surest_previous(own, model, 4) for model, own in sorted(named.items())], 1)
        alpha = f"{min(alphas):.2f} to {max(alphas):.2f}" if kind == "learned" else kind
        sure = column(best, "confidence_median_previous", 1, 100)
        lines.append([kind, len(best), spread(found, 1), sure, which, alpha, four])
    head = ["attention alpha", "seeds", "positional heads of 16", "surest head, %", "which", "its alpha"]
    return table([*head, "four surest, %"], lines)


def lambdas(rows: Rows) -> str:
    """Figures 8 and 9 of Laha et al. 2018, in numbers."""
    head = ["lambda", "BLEU 2016", "nonzeros enc", "cross", "dec", "density enc, %", "cross", "dec"]
    lines = []
    for row in by_lambda(rows):
        densities = [f"{100 * float(row[f'density_{site}']):.1f}" for site in SITES]
        supports = [row[f"support_{site}"] for site in SITES]
        lines.append([row["mapping_options"].strip("{}"), row["bleu"], *supports, *densities])
    return table(head, lines)


def attended(rows: Rows, part: str = "") -> str:
    """How many source tokens the heads of the maps by lambda give weight to, per token that is written; or a field of their file."""
    found = views.read(rows.folder / views.LAMBDA_FILE)
    if part:
        return found[part]
    maps = {title: found[title]["weights"] for title in views.LAMBDAS}
    counts = {title: sum(weight > 0 for row in own for weight in row) / len(own) for title, own in maps.items()}
    return "; ".join(f"{title}: {count:.1f}" for title, count in counts.items())


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
    parts = [label(row), *([] if row["attention"] == "softmax" else [row["schedule"]])]
    if rate := re.search(r"--density_rate (\S+)", row["command"]):
        parts.append(f"density rate {rate[1]}")
    return ", ".join([*parts, *(["distilled"] if float(row["distill_logits"]) else [])])


def conversions(rows: Rows, group: str, measure: str, title: str, unit: str) -> str:
    """What a finished softmax model loses when it is made sparse: a line for each setting, mean and spread over its seeds."""
    found = rows(group)
    control = pick(found, attention="softmax")
    head = ["conversion", "seeds", f"{title} before", "after", f"lost, {unit}", f"lost to the control, {unit}"]
    lines = []
    for own in by_setting(found):
        cells = [column(own, name) for name in (f"{measure}_before", measure, "lost")]
        cells += [f"{price(own, control):.2f}" if control else "", column(own, "density", 1, 100)]
        lines.append([conversion_name(own[0]), len(own), *cells])
    return table([*head, "density, %"], lines)


def pretrained(rows: Rows, group: str) -> str:
    """Conversions of a real model: a line for each setting, mean and spread over its seeds."""
    found = settings_of(rows, group)
    shown = {title: chosen for title, chosen in _CONVERTED.items() if any(own[0].get(str(chosen[0])) for own in found)}
    lines = []
    for own in found:
        cells = [column(own, *chosen) for chosen in shown.values()]  # type: ignore[arg-type]
        lines.append([label(own[0]), len(own), *cells, f"{mean(own, 'train_seconds') / 60:.0f}"])
    return table(["attention", "seeds", *(title.strip() for title in shown), "minutes"], lines)


def calibrations(rows: Rows) -> str:
    """What zeros cost without training a weight, budget by budget."""

    def zeros(name: str) -> Callable[[Row], str]:
        return lambda row: f"{100 * (1 - float(row[name])):.1f}"

    found = sorted(rows("calibration"), key=lambda row: (row["model"], row["temperature"], float(row["budget"])))
    return row_table(found, {
        "model": "model", "set for each head": calibrated, "budget, %": lambda row: f"{float(row['budget']):g}",
        "zeros on calibration text, %": zeros("density_calibration"),
        "heads with less than 10 %": lambda row: f"{row['heads_sparse']} of {row['heads']}", "with at least 95 %": "heads_full",
        "loss on other text, %": lambda row: f"{float(row['heldout_percent']):+.2f}", "zeros there, %": zeros("density"),
        "similarity correlation": ("similarity_correlation", 4),
        "partner found before, %": ("accuracy_before", 1, 100), "after, %": ("accuracy", 1, 100),
        "median alpha": ("alpha_median",), "largest": ("alpha_max",), "minutes": ("seconds", 0, 1 / 60),
    })  # fmt: skip


def tasks(rows: Rows) -> str:
    """What else is lost, with 95 % intervals of the difference; rows of several seeds follow each other."""
    return row_table(rows("pretrained_tasks"), {
        "model": "model", "task": "task", "measure": "measure", "units": "units", "original": ("before", 4), "here": ("after", 4),
        "difference (95 %)": lambda r: f"{float(r['difference']):+.4f} ({float(r['low']):+.4f} to {float(r['high']):+.4f})",
    })  # fmt: skip


#: Column of the analysis of a pretrained model's heads, and what it says about a head.
_MEASURES = {
    "confidence_previous": "previous token", "subword_merging_multi": "subwords of the same word",
    "first_mass": "first token", "confidence_current": "the token itself", "punctuation_mass": "punctuation",
    "dependency_accuracy": "syntactic head of the word, accuracy", "interrogation": "question mark",
}  # fmt: skip


def pretrained_heads(rows: Rows, group: str) -> str:
    """Density, diversity and roles of all heads of a model and of those made from it, and the surest head for each role."""
    models = distinct(rows(f"{group}/sites"), "model")
    sites, heads, previous = ([pick(rows(f"{group}/{name}", **wanted), model=model) for model in models]
                              for name, wanted in (("sites", {}), ("heads", {}), ("positions", {"offset": "-1"})))  # fmt: skip
    lines: list[list[object]] = [
        ["nonzero weights, %", *(column(own, "density", 1, 100) for own in sites)],
        ["keys with weight per query", *(column(own, "mean_support", 1) for own in sites)],
        ["largest weight of a query, mean", *(column(own, "max_weight", 3) for own in sites)],
        ["diversity of the heads (JS)", *(column(own, "head_diversity", 3) for own in sites)],
        ["heads that look at the previous token", *(own[0]["positional_heads"] for own in previous)],
    ]
    for role, title in {
        "first": "the first token",
        "subword": "other subwords of the word",
        "": "no single role",
    }.items():
        lines.append([f"heads by role: {title}", *(len(pick(own, role=role)) for own in heads)])
    resting = [sum(float(row["first_mass"]) > 0.9 for row in own) for own in heads]
    lines.append(["heads that give the first token more than 90 %", *resting])

    def best(title: str, found: list[Row], name: str) -> None:
        rows_of = [surest(found, model, name) for model in models]
        lines.append([title, *(f"{100 * float(row[name]):.1f} ({row['layer']}.{row['head']})" for row in rows_of)])

    for name, title in _MEASURES.items():
        if any(row.get(name) for row in heads[0]):
            best(f"surest head, {title}, %", rows(f"{group}/heads"), name)
    if induction := rows(f"{group}/roles", role="induction"):
        chance = 100 * float(surest(induction, models[0], "score")["chance"])
        title = f"surest head, what followed the same token before (induction; by chance {chance:.1f}), %"
        best(title, induction, "score")
    return table([f"{len(heads[0])} heads", *models], lines)
