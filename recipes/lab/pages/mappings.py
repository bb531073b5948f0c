"""The tables of model_cards/controllable_mappings.md: mappings as attention, and the rows of ``multilabel.py``."""

from __future__ import annotations

import json

from hf_entmax.ops import controllable

from ..rows import Rows, grouped, mean, numbers, spread, table
from .judges import judge_settings

#: Laha et al. 2018, table 3: micro-F1.
PAPER = {
    "emotions": {"softmax+log": 0.65, "sparsemax+huber": 0.63, "sparsemax+hinge": 0.65, "sparsehg+hinge": 0.65},
    "scene": {"softmax+log": 0.71, "sparsemax+huber": 0.70, "sparsemax+hinge": 0.68, "sparsehg+hinge": 0.69},
    "birds": {"softmax+log": 0.43, "sparsemax+huber": 0.42, "sparsemax+hinge": 0.41, "sparsehg+hinge": 0.41},
}
#: That the first method has at least the score of the second (at most, of a divergence), up to a margin of ties.
CLAIMS = (
    ("sparsemax+hinge reaches at least the F1 of sparsemax+huber, whose threshold is tuned",
     "micro_f1", "sparsemax+hinge", "sparsemax+huber", 0.005),
    ("sparsemax+hinge reaches at least the F1 of sparsemax+huber, both predicting their support",
     "micro_f1", "sparsemax+hinge", "sparsemax+huber support", 0.005),
    ("sparsehg+hinge reaches at least the F1 of sparsemax+hinge",
     "micro_f1", "sparsehg+hinge", "sparsemax+hinge", 0.005),
    ("sparsehg+hinge comes within 0.02 F1 of softmax+log", "micro_f1", "sparsehg+hinge", "softmax+log", 0.02),
    ("sparsehg+hinge with a tuned threshold comes within 0.02 F1 of softmax+log",
     "micro_f1", "sparsehg+hinge threshold", "softmax+log", 0.02),
    ("sparsehg+hinge has a lower JSD than softmax+log", "jsd", "sparsehg+hinge", "softmax+log", 0.0),
)  # fmt: skip
AXES = ("mean_labels", "label_range", "length")


def options(rows: Rows) -> str:
    """Which mappings serve as attention, with their options."""
    lines = []
    for spec in controllable.ATTENTION_MAPPINGS.values():
        for name, option in spec.options.items():
            formula, (low, high) = spec.description.replace("|", "\\|"), option.learned_range
            default, learned = f"{option.default:g}", f"({low:g}, {high:g})"
            lines.append((f"`{spec.name}`", formula, f"`{name}`", option, default, learned))
    return table(("`mapping`", "formula", "option", "allowed", "default", "learned within"), lines)


def refused(rows: Rows) -> str:
    """Which mappings do not serve as attention, and why."""
    return "".join(f"- `{name}`: {reason}.\n" for name, reason in controllable.REFUSED_AS_ATTENTION.items())


def mulan(rows: Rows) -> str:
    """Micro-F1 on the Mulan data sets beside the paper's, with the protocol of each line."""
    head = ["data", "regularisation", "training", "test rows", "method", "micro-F1", "paper", "difference", "macro-F1"]
    lines = []
    for dataset, papers in PAPER.items():
        groups = grouped(rows("multilabel/mulan", dataset=dataset), "setting", "empty_rows", "test_rows", "method")
        for key in sorted(groups, key=lambda key: (key[0] != "l2 tuned", *key[1:3])):
            (setting, empty, subset, method), runs = key, groups[key]
            paper = papers.get(method.removesuffix(" support").removesuffix(" threshold"))
            difference = ["", ""] if paper is None else [f"{paper:.2f}", f"{mean(runs, 'micro_f1') - paper:+.3f}"]
            trained = {"ignore": "labelled rows", "extra_label": "all rows, extra label"}[empty]
            cells = [dataset, setting, trained if dataset == "birds" else "all rows", f"{subset} ({runs[0]['n_test']})"]
            cells += [method, spread(numbers(runs, "micro_f1"), 3), *difference]
            cells += [f"{mean(runs, 'macro_f1'):.3f}", f"{mean(runs, 'jsd'):.3f}", f"{mean(runs, 'support'):.2f}"]
            lines.append([*cells, len(runs)])
    return table([*head, "JSD", "nonzeros", "seeds"], lines)


def claims(rows: Rows) -> str:
    """For each claim about an order, at how many settings of each axis the means over seeds show it."""
    lines = []
    for claim, metric, first, second, margin in CLAIMS:
        gaps: dict[str, list[float]] = {}
        for axis in AXES:
            ones, others = (
                grouped(rows("multilabel/synthetic", dataset=axis, method=m), "setting") for m in (first, second)
            )
            both = [(mean(ones[s], metric), mean(others[s], metric)) for s in ones if s in others]
            gaps[axis] = [two - one if metric == "jsd" else one - two for one, two in both]
        if every := [gap for own in gaps.values() for gap in own]:
            counts = [f"{judge_settings(own, margin)[0]} of {len(own)}" for own in gaps.values()]
            lines.append([claim, *counts, f"**{judge_settings(every, margin)[1]}**"])
    return table(["claim", "mean labels", "label range", "length", ""], lines)


def losses(rows: Rows) -> str:
    """The losses of the text study with softmax attention."""
    groups = grouped(rows("multilabel/text", setting='{"alpha": 1.0}'), "method")
    lines = []
    for (method,), runs in groups.items():
        others = [f"{mean(runs, name):.3f}" for name in ("macro_f1", "jsd", "support")]
        lines.append([f"`{method}`", spread(numbers(runs, "micro_f1"), 3), *others, len(runs)])
    head = ["output", "micro-F1", "macro-F1", "JSD", "nonzeros of the output", "seeds"]
    return table(head, lines) if lines else ""


def attentions(rows: Rows) -> str:
    """Attention of the text study that is no softmax: how many characters it spreads over."""
    lines = []
    for (setting,), runs in grouped(rows("multilabel/text"), "setting").items():
        if setting == '{"alpha": 1.0}':
            continue
        fields = json.loads(setting)
        name = ", ".join([fields["mapping"], *(f"{key} = {value}" for key, value in fields["mapping_options"].items())])
        sizes = [json.loads(run["chosen"])["attention_support"] for run in runs]
        lines.append([name, f"{sum(sizes) / len(sizes):.2f}", spread(numbers(runs, "micro_f1"), 3), len(runs)])
    return table(["attention", "nonzero weights per query", "micro-F1", "seeds"], lines) if lines else ""
