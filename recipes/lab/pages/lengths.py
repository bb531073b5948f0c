"""Long inputs: the tables of models tested at more than their length of training, and of decoding with long caches."""

from __future__ import annotations

import re

from ..rows import Row, Rows, distinct, grouped, numbers, row_table, spread, table
from .judges import judge

COMPARED = ("softmax", "entmax 1.5", "ASEntmax")
#: Exact match in percent of those three: Vasylenko et al. 2025, and an independent rerun of one seed.
PAPERS = {
    ("sort", 4): ((0.0, 57.8, 79.7), (4.0, 53.0, 81.0)),
    ("reverse", 4): ((0.0, 28.5, 96.4), (0.0, 61.0, 53.0)),
    ("copy", 64): ((85.5, 0.0, 86.6), (63.0, 50.0, 76.0)),
}


def accuracies(row: Row) -> dict[int, float]:
    """By length, in percent."""
    return {int(length): float(value) for length, value in re.findall(r"(\d+)=([\d.]+)", row["accuracies"])}


def lines(found: list[Row]) -> dict[str, list[Row]]:
    """The rows of each attention; where it was measured with several settings, those of each, named after them."""
    made: dict[str, list[Row]] = {}
    for (name,), own in grouped(found, "row").items():
        by = grouped(({**row, "of": re.sub(r" --(seeds|only)( (?!--)\S+)*", "", row["command"])} for row in own), "of")
        for (setting,), rows in by.items():
            made[name if len(by) == 1 else f"{name} (`{setting.partition('.length ')[2]}`)"] = rows
    return made


def lengths(rows: Rows, task: str) -> str:
    """A line for each attention: mean and spread over its seeds at every length."""
    found, text = rows("length", task=task), task == "text"
    at, trained_at = sorted(accuracies(found[0])), int(found[0]["train_length"])
    head = ["attention", "seeds", *([] if text else ["trained"]), "alpha"]
    listed = []
    for name, own in lines(found).items():
        values = [accuracies(row) for row in own]
        alpha = column_of_alphas(own) if "learned" in name else ""
        trained = [] if text else [sum(row["trained"] == "True" for row in own)]
        listed.append([name, len(own), *trained, alpha, *(spread([v[n] for v in values], 1) for n in at)])
    return table([*head, *(f"to {n}" if text else f"{n // trained_at}x" for n in at)], listed)


def pretrained(rows: Rows) -> str:
    """Pretrained models side by side on texts and lengths: perplexity, weights left, planted facts."""
    listed = []
    for row in rows("length_pretrained"):
        shares = [f"{100 * float(row[name]):.2f}" for name in ("density", "density_beyond_first")]
        by_position = [f"{float(value):.1f}" for _, value in re.findall(r"(\d+)=([\d.]+)", row["perplexities"])]
        facts = [f"{float(row[name]) * int(row['facts']):.0f} of {row['facts']}" for name in ("found", "choice")]
        places = [row["text"], row["length"], row["samples"], row["model"], f"{float(row['perplexity']):.2f}"]
        listed.append([*places, *shares, ", ".join(by_position), *facts, f"{float(row['nats']):.1f}"])
    head = ["text", "tokens", "blocks", "model", "perplexity", "nonzero weights, %", "beyond the first token, %"]
    head += ["perplexity by 512 positions", "facts found", "chosen among four", "nats of a fact"]
    return table(head, sorted(listed, key=lambda line: (str(line[0]), int(line[1]), -float(line[5]))))


def column_of_alphas(own: list[Row]) -> str:
    """Mean and spread of the learned alphas."""
    alphas = [float(row["alpha"]) for row in own if row["alpha"]]
    return spread(alphas) if alphas else ""


def at_length(rows: Rows, task: str, name: str, factor: int) -> list[float]:
    """Exact match of every seed at ``factor`` times the length of training, of the runs with the most steps."""
    own = rows("length", task=task, row=name)
    most = max((int(row["steps"]) for row in own), default=0)
    return [accuracies(row)[factor * int(row["train_length"])] for row in own if int(row["steps"]) == most]


def beside_the_papers(rows: Rows) -> str:
    """Which attention is better at copy, reverse and sort: the paper's numbers, the rerun's, ours, and whether it holds.

    At the length that the paper reports and, as that may be too long for models as small as ours, at twice that of training.
    """
    listed = []
    for (task, factor), (paper, rerun) in PAPERS.items():
        for pair in ((0, 1), (1, 2)):
            worse, better = sorted(pair, key=lambda place: paper[place])
            for at in (2, factor):
                ours, theirs = (at_length(rows, task, COMPARED[place], at) for place in (better, worse))
                if not ours or not theirs:
                    continue
                there = [f"{found[better]:g} / {found[worse]:g}" if at == factor else "" for found in (paper, rerun)]
                here = " / ".join(spread(values, 1) for values in (ours, theirs))
                verdict = judge(ours, theirs)[1] if max(ours + theirs) > 0 else "not found: nobody solves it"
                listed.append([f"{task}, {at}x: {COMPARED[better]} above {COMPARED[worse]}", *there, here, verdict])
    return table(["exact match, %", "paper", "rerun", "here", "verdict"], listed)


def alpha_of(row: Row) -> str:
    """Of every head, or learned."""
    return "learned" if row["alpha"] == "own" else row["alpha"]


def _ratio(row: Row, name: str, digits: int = 2) -> str:
    middle, low, high = (f"{float(row[name + end]):.{digits}f}" for end in ("", "_25", "_75"))
    return f"{middle} ({low} to {high})"


def models(rows: Rows, group: str = "long_context") -> str:
    """Whole models, entmax against softmax."""
    return row_table(rows(group), {
        "alpha": alpha_of, "batch": "batch", "tokens": "length", "bits": "bits",
        "keys read, %": ("read", 2, 100), "nonzero, %": ("nonzero", 2, 100),
        "K and V read, MiB a step": ("key_value_mib_per_step", 0), "softmax reads": ("softmax_key_value_mib_per_step", 0),
        "extra memory, %": ("extra_memory", 2, 100), "tokens/s": "tokens_per_second",
        "softmax, tokens/s": "softmax_tokens_per_second", "its cache": "softmax_cache",
        "ratio (quartiles)": lambda row: _ratio(row, "ratio"),
    })  # fmt: skip


def operator(rows: Rows) -> str:
    """Attention alone over repeated keys."""
    return row_table(rows("long_context_operator"), {
        "alpha": alpha_of, "dtype": "dtype", "layers": "layers", "keys": "length", "bits": "bits",
        "keys read, %": ("read", 2, 100), "nonzero, %": ("nonzero", 2, 100), "extra memory, %": ("extra_memory", 2, 100),
        "ms a layer": "exact_ms",
        "of dense entmax (quartiles)": lambda row: _ratio(row, "ratio_to_dense", 3),
        "of SDPA (quartiles)": lambda row: _ratio(row, "ratio_to_softmax", 3),
        "of SDPA on groups (quartiles)": lambda row: _ratio(row, "ratio_to_grouped_softmax", 3),
    })  # fmt: skip


def limits(rows: Rows) -> str:
    """What was read at 8,192 tokens by whole models and at 32,768 keys by the operator, beside the speed of memory."""
    cases = []
    for row in rows("long_context", length=8192):
        weights = float(row["weights_mib"])
        mib = [weights + float(row[f"{name}key_value_mib_per_step"]) for name in ("", "softmax_")]
        ms = [1000 * int(row["batch"]) / float(row[f"{name}tokens_per_second"]) for name in ("", "softmax_")]
        cases.append((row, f"model, batch {row['batch']}, {row['softmax_cache']} cache", mib, ms))
    for (_, dtype), (row, *_) in grouped(rows("long_context_operator", length=32768, bits=4), "alpha", "dtype").items():
        mib = [float(row[f"{name}key_value_mib"]) for name in ("", "softmax_")]
        cases.append((row, f"attention, {dtype}", mib, [float(row[f"{name}_ms"]) for name in ("exact", "softmax")]))
    listed = []
    for row, what, mib, ms in cases:
        least = [1000 * amount / 1024 / float(row["bandwidth_gib_s"]) for amount in mib]
        sides = [n for side in zip(mib, least, ms, strict=True) for n in side]
        cells = [f"{n:.3g}" if n < 1000 else f"{n:.0f}" for n in sides]
        listed.append([what, alpha_of(row), *cells, f"{least[1] / least[0]:.1f}", f"{ms[1] / ms[0]:.1f}"])
    times = ["ms at the speed of memory", "ms"]
    head = ["what", "alpha", "MiB", *times, "softmax: MiB", *times]
    return table([*head, "its time over ours, if memory were all", "as measured"], listed)


def memory_speed(rows: Rows) -> str:
    """The lowest and highest that was measured."""
    found = numbers([*rows("long_context"), *rows("long_context_operator")], "bandwidth_gib_s")
    return f"{min(found):.0f} to {max(found):.0f}"


def verified(rows: Rows) -> str:
    """Generations with and without the cache, and steps compared with dense weights."""
    return row_table(rows("long_context_verified"), {
        "alpha": alpha_of, "generating": "way", "batch": "batch", "prompt": "prompt", "tokens": "tokens",
        "the same without the cache": "same_tokens", "steps of a layer compared": lambda row: f"{int(row['layer_steps']):,}",
        "pairs of a query and a key": lambda row: f"{int(row['pairs']):,}",
        "proved zero, %": lambda row: f"{100 * (1 - float(row['read'])):.2f}", "of these with weight": "violations",
    })  # fmt: skip


def attention(rows: Rows) -> str:
    """Every case of the attention benchmark that has a limit, with what was measured."""
    found = rows("bench/targets-cpu")
    density = {row["case"]: float(row["density"]) for row in found if row["density"]}
    return row_table([row for row in found if row["target"]], {
        "case": lambda row: f"{row['case']}, {row['mode']}",
        "density": lambda row: f"{100 * density[row['case']]:.1f} %" if row["case"] in density else "dense",
        "against": lambda row: f"`{row['implementation']}`",
        "at most": lambda row: f"{float(row['target']):g}",
        "measured": lambda row: f"{float(row['ratio']):{'.2g' if float(row['ratio']) < 0.1 else '.2f'}}",
        "": lambda row: "**missed**" if float(row["ratio"]) > float(row["target"]) else "",
    })  # fmt: skip


def losses(rows: Rows, name: str, implementation: str, mode: str) -> str:
    """Ratios of the losses' benchmark by alpha and kind of logits."""
    found = [r for r in rows(f"bench/{name}", mode=mode) if r["implementation"].startswith(implementation)]
    kinds = distinct(found, "case")
    by = {(float(row["implementation"].partition("=")[2]), row["case"]): row for row in found}

    def cell(alpha: float, kind: str) -> str:
        row = by.get((alpha, kind))
        if row is None:
            return ""
        missed = row["target"] and float(row["ratio"]) > float(row["target"])
        return f"**{float(row['ratio']):.2f}**" if missed else f"{float(row['ratio']):.2f}"

    alphas = sorted({alpha for alpha, _ in by}, reverse=True)
    return table(("alpha", *kinds), [(f"{alpha:g}", *(cell(alpha, kind) for kind in kinds)) for alpha in alphas])
