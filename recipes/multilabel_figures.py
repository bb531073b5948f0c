"""Figures and the written account of the controllable mappings, from the code and the results of ``multilabel.py``.

    python recipes/multilabel_figures.py        # rewrites model_cards/controllable_mappings.md and its figures

Region plots: which scores ``(z_1, z_2)`` get a distribution with both entries, and which a one-hot one (figures 1 to 3 of
Laha et al. 2018). Curves: F1 and Jensen-Shannon divergence on synthetic documents (figures 4 to 6).
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from hf_entmax.ops import controllable as C
from hf_entmax.ops.controllable.properties import markdown_table

Row = dict[str, str]
ROOT = Path(__file__).parents[1]

# Laha et al. 2018, table 3.
PAPER = {
    "scene": {"softmax+log": 0.71, "sparsemax+huber": 0.70, "sparsemax+hinge": 0.68, "sparsehg+hinge": 0.69},
    "emotions": {"softmax+log": 0.65, "sparsemax+huber": 0.63, "sparsemax+hinge": 0.65, "sparsehg+hinge": 0.65},
    "birds": {"softmax+log": 0.43, "sparsemax+huber": 0.42, "sparsemax+hinge": 0.41, "sparsehg+hinge": 0.41},
}
REGIONS = [
    ("softmax", lambda z: C.softmax(z)),
    ("sparsegen-lin, λ = −1", lambda z: C.sparsegen_lin(z, -1.0)),
    ("sparsemax (λ = 0)", lambda z: C.sparsegen_lin(z, 0.0)),
    ("sparsegen-lin, λ = 0.75", lambda z: C.sparsegen_lin(z, 0.75)),
    ("sparsehourglass, q = 0.1", lambda z: C.sparsehourglass(z, 0.1)),
    ("sparsehourglass, q = 0.5", lambda z: C.sparsehourglass(z, 0.5)),
    ("sparsehourglass, q = 5", lambda z: C.sparsehourglass(z, 5.0)),
    ("sparsegen-sq", lambda z: C.sparsegen_sq(z)),
]


def read(folder: Path, study: str) -> list[Row]:
    """The rows of one study, none if it has not been run."""
    path = folder / f"{study}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def mean_spread(rows: list[Row], column: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds (0 for a single one)."""
    values = [float(row[column]) for row in rows]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def with_spread(rows: list[Row], column: str) -> str:
    """Mean and standard deviation over seeds, the mean alone for a single seed."""
    mean, spread = mean_spread(rows, column)
    return f"{mean:.3f} ± {spread:.3f}" if len(rows) > 1 else f"{mean:.3f}"


def pick(rows: list[Row], **wanted: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[k] == str(v) for k, v in wanted.items())]


def distinct(rows: list[Row], column: str) -> list[str]:
    """The values of a column, in order of appearance."""
    return list(dict.fromkeys(row[column] for row in rows))


def region_figure() -> Any:
    """First probability over the plane of two scores; black lines bound the region where both entries are nonzero."""
    from matplotlib.figure import Figure

    axis = torch.linspace(-2, 2, 401)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    image = None
    for axes, (name, mapping) in zip(figure.subplots(2, 4, sharex=True, sharey=True).flat, REGIONS, strict=True):
        probs = mapping(grid)
        image = axes.imshow(probs[..., 0], origin="lower", extent=(-2, 2, -2, 2), cmap="RdBu_r", vmin=0, vmax=1)
        dense = ((probs > 0).sum(-1) == 2).float()
        if bool((dense == 0).any()):
            axes.contour(axis, axis, dense, levels=[0.5], colors="black", linewidths=1)
        axes.set_title(name, fontsize=9)
    figure.supxlabel("$z_1$")
    figure.supylabel("$z_2$")
    figure.colorbar(image, ax=figure.axes, label="$p_1$")  # type: ignore[arg-type]
    return figure


def curves_figure(rows: list[Row]) -> Any:
    """Micro-F1 and Jensen-Shannon divergence of every method along the three axes of the synthetic study.

    Raises:
        ValueError: if there are no rows.
    """
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError(
            "no synthetic results: run recipes/multilabel.py with configs/multilabel_synthetic.yaml first."
        )
    panels = {"mean_labels": "mean number of labels", "label_range": "range of labels r", "length": "document length"}
    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.subplots(2, 3, sharey="row")
    for column, (dataset, label) in enumerate(panels.items()):
        for line, metric in enumerate(("micro_f1", "jsd")):
            axes = grid[line, column]
            for method in distinct(rows, "method"):
                part = pick(rows, dataset=dataset, method=method)
                settings = sorted({float(row["setting"]) for row in part})
                points = [mean_spread([r for r in part if float(r["setting"]) == s], metric) for s in settings]
                axes.errorbar(settings, [m for m, _ in points], [s for _, s in points], label=method, lw=1.2, capsize=2)
            axes.set_xlabel(label)
    grid[0, 0].set_ylabel("micro-F1")
    grid[1, 0].set_ylabel("Jensen-Shannon divergence (nats)")
    grid[0, 0].legend(fontsize=7)
    return figure


def options_table() -> str:
    """Which mappings serve as attention, with their options, and why the others do not."""
    lines = ["| `mapping` | formula | option | allowed | default | learned within |", "|---|---|---|---|---|---|"]
    for spec in C.ATTENTION_MAPPINGS.values():
        for name, option in spec.options.items():
            formula = spec.description.replace("|", "\\|")
            lines.append(
                f"| `{spec.name}` | {formula} | `{name}` | {option.interval} | {option.default:g} | "
                f"({option.learned_range[0]:g}, {option.learned_range[1]:g}) |"
            )
    refused = [f"- `{name}`: {reason}." for name, reason in C.REFUSED_AS_ATTENTION.items()]
    return "\n".join([*lines, "", "Not offered as attention:", "", *refused]) + "\n"


def mulan_table(rows: list[Row]) -> str:
    """Micro-F1 on the Mulan data sets beside the paper's, with the protocol of each line."""
    lines = [
        "| data | regularisation | training | test rows | method | micro-F1 | paper | difference | macro-F1 | JSD | "
        "nonzeros | seeds |",
        "|" + "---|" * 12,
    ]
    for dataset in ("emotions", "scene", "birds"):
        part = pick(rows, dataset=dataset)
        groups = dict.fromkeys((r["setting"], r["empty_rows"], r["test_rows"], r["method"]) for r in part)
        for setting, empty, subset, method in sorted(groups, key=lambda g: (g[0] != "l2 tuned", *g[1:3])):
            runs = pick(part, setting=setting, empty_rows=empty, test_rows=subset, method=method)
            micro, _ = mean_spread(runs, "micro_f1")
            paper = PAPER[dataset].get(method.removesuffix(" support").removesuffix(" threshold"))
            compared = "| | |" if paper is None else f"| {paper:.2f} | {micro - paper:+.3f} |"
            empties = {"ignore": "labelled rows", "extra_label": "all rows, extra label"}[empty]
            lines.append(
                f"| {dataset} | {setting} | {empties if dataset == 'birds' else 'all rows'} | {subset} ({runs[0]['n_test']}) "
                f"| {method} | {with_spread(runs, 'micro_f1')} {compared} {mean_spread(runs, 'macro_f1')[0]:.3f} | "
                f"{mean_spread(runs, 'jsd')[0]:.3f} | {mean_spread(runs, 'support')[0]:.2f} | {len(runs)} |"
            )
    return "\n".join(lines) + "\n"


CLAIMS = (
    (
        "sparsemax+hinge reaches at least the F1 of sparsemax+huber, whose threshold is tuned",
        "micro_f1",
        "sparsemax+hinge",
        "sparsemax+huber",
    ),
    (
        "sparsemax+hinge reaches at least the F1 of sparsemax+huber, both predicting their support",
        "micro_f1",
        "sparsemax+hinge",
        "sparsemax+huber support",
    ),
    ("sparsehg+hinge reaches at least the F1 of sparsemax+hinge", "micro_f1", "sparsehg+hinge", "sparsemax+hinge"),
    ("sparsehg+hinge comes within 0.02 F1 of softmax+log", "micro_f1", "sparsehg+hinge", "softmax+log"),
    (
        "sparsehg+hinge with a tuned threshold comes within 0.02 F1 of softmax+log",
        "micro_f1",
        "sparsehg+hinge threshold",
        "softmax+log",
    ),
    ("sparsehg+hinge has a lower JSD than softmax+log", "jsd", "sparsehg+hinge", "softmax+log"),
)


def claims_table(rows: list[Row]) -> str:
    """For each claim about an order, at how many settings of each axis the means over seeds show it."""
    lines = ["| claim | mean labels | label range | length | |", "|---|---|---|---|---|"]
    for words, metric, first, second in CLAIMS:
        cells, found, total = [], 0, 0
        for dataset in ("mean_labels", "label_range", "length"):
            part = pick(rows, dataset=dataset)
            both = [distinct(pick(part, method=m), "setting") for m in (first, second)]
            settings = [setting for setting in both[0] if setting in both[1]]
            shown = 0
            for setting in settings:
                one, two = (mean_spread(pick(part, setting=setting, method=m), metric)[0] for m in (first, second))
                shown += one < two if metric == "jsd" else one >= two - (0.02 if "within" in words else 0.005)
            cells.append(f"{shown} of {len(settings)}")
            found, total = found + shown, total + len(settings)
        verdict = "found" if found == total else "not found" if found < total / 2 else "found in part"
        if total:
            lines.append(f"| {words} | {' | '.join(cells)} | **{verdict}** |")
    return "\n".join(lines) + "\n"


def text_tables(rows: list[Row]) -> str:
    """The losses of the text study with softmax attention, and the support of other attentions."""
    plain = pick(rows, setting='{"alpha": 1.0}')
    lines = ["| output | micro-F1 | macro-F1 | JSD | nonzeros of the output | seeds |", "|---|---|---|---|---|---|"]
    for method in distinct(plain, "method"):
        runs = pick(plain, method=method)
        others = " | ".join(f"{mean_spread(runs, c)[0]:.3f}" for c in ("macro_f1", "jsd", "support"))
        lines.append(f"| `{method}` | {with_spread(runs, 'micro_f1')} | {others} | {len(runs)} |")
    other = [row for row in rows if row not in plain]
    supports = ["| attention | nonzero weights per query | micro-F1 | seeds |", "|---|---|---|---|"]
    for setting in distinct(other, "setting"):
        runs = pick(other, setting=setting)
        sizes = [json.loads(run["chosen"])["attention_support"] for run in runs]
        fields = json.loads(setting)
        name = f"{fields['mapping']}, " + ", ".join(f"{k} = {v}" for k, v in fields["mapping_options"].items())
        supports.append(f"| {name} | {statistics.mean(sizes):.2f} | {with_spread(runs, 'micro_f1')} | {len(runs)} |")
    return "\n".join([*(lines if plain else []), "", *(supports if other else []), ""])


def provenance(rows: list[Row]) -> str:
    """Commands, hardware and versions behind some rows."""
    commands = [f"    {command}" for command in distinct(rows, "command")]
    machines = "; ".join(distinct(rows, "hardware")), "; ".join(distinct(rows, "versions"))
    return "\n".join([*commands, "", f"({machines[0]}; {machines[1]})", ""])


def card(folder: Path) -> str:
    """The whole account in Markdown."""
    mulan, synthetic, text = (read(folder, study) for study in ("mulan", "synthetic", "text"))
    parts = [
        "# Controllable sparse mappings\n\n"
        "The mappings and multilabel losses of Laha et al. 2018, *On Controllable Sparse Alternatives to Softmax*, as "
        "`hf_entmax.ops.controllable` and `hf_entmax.losses.multilabel`. This page is generated by "
        "`python recipes/multilabel_figures.py` from the code and from `recipes/results/multilabel/*.csv`.\n",
        "## Properties\n\n✓ holds, ✗ does not, ◐ holds under the condition named. `tests/ops/test_l18_properties.py` shows "
        "every ✓ on random scores and every ✗ by a counter-example.\n\n" + markdown_table(),
        "The probability of the first of two scores; the lines bound the scores that keep both entries.\n\n"
        "![region plots](figures/controllable_regions.png)\n",
        "## As attention\n\n" + options_table(),
    ]
    if mulan:
        parts.append(
            "## Linear models on Mulan data\n\nPublished training and test rows, features standardised, hyper-parameters "
            "chosen by micro-F1 in five-fold cross-validation of the training rows. The two Fenchel-Young losses and the "
            "log loss predict what exceeds a threshold tuned the same way; lines named *support*, and all hinge losses but "
            "the line named *threshold*, predict the support. *l2 tuned*, with the strength of the regularisation among "
            "what is tuned, is the protocol. The lines *l2=0.01* are no independent evidence: that strength was picked "
            "after the test scores of Scene had been seen, to find out whether weaker regularisation accounts for the "
            "difference to the paper. In Birds 143 of 322 training and 151 of 323 test rows have no label; a distribution cannot "
            "express that. *Labelled rows* trains on the 179 others, *extra label* gives empty rows a label of their own; "
            "scores are on all test rows or on the labelled ones, as stated.\n\n"
            + mulan_table(mulan)
            + "\n"
            + provenance(mulan)
        )
    if synthetic:
        parts.append(
            "## Synthetic documents\n\n5,000 documents by scikit-learn with a vocabulary of 10 and 10 topics; the "
            "number of settings at which the means over seeds show each order. The orders are what the paper's claims "
            "(improved performance by the hinge losses, control over sparsity) lead one to expect of its figures 4 to 6; "
            "the values in those figures were not available for comparison. Differences in F1 up to 0.005 count as "
            "equal.\n\n![curves](figures/multilabel_synthetic.png)\n\n"
            + claims_table(synthetic)
            + "\n"
            + provenance(synthetic)
        )
    if text:
        parts.append(
            "## A Transformer on text\n\nA two-layer character BERT from scratch, patched by `patch_model(..., "
            "output_mapping=...)`, predicts the morphological features of Spanish word forms (SIGMORPHON 2018, 10,000 / "
            "1,000 / 1,000 rows).\n\n" + text_tables(text) + "\n" + provenance(text)
        )
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "recipes" / "results" / "multilabel")
    parser.add_argument("--card", type=Path, default=ROOT / "model_cards" / "controllable_mappings.md")
    parser.add_argument(
        "--figures", type=Path, default=ROOT / "model_cards" / "figures", help="folder of the PNG files"
    )
    options = parser.parse_args(arguments)
    options.card.parent.mkdir(parents=True, exist_ok=True)
    options.card.write_text(card(options.results), encoding="utf-8")
    options.figures.mkdir(parents=True, exist_ok=True)
    region_figure().savefig(options.figures / "controllable_regions.png", dpi=90)
    if synthetic := read(options.results, "synthetic"):
        curves_figure(synthetic).savefig(options.figures / "multilabel_synthetic.png", dpi=90)


if __name__ == "__main__":
    main()
