"""One sentence read with two lambdas: figures 8 and 9 of Laha et al. 2018, from models of their table 2.

The models differ in lambda alone; sparsegen-lin with lambda 0 is sparsemax. Of each model's last layer stands the head that is
surest on the sentence; the weights are in recipes/lab/results/mapping_views.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from hf_entmax.analysis import plots
from hf_entmax.analysis.collecting.examples import collect_examples
from hf_entmax.analysis.reading.tables import read_pairs

from .heads import job_of
from .jobs import Job
from .rows import Rows
from .views import load, read, rounded, write

FILE = "mapping_views.json"
GROUP = "translation_mappings"
#: What the figure calls the models, and the options that tell their jobs apart.
MODELS = {
    "sparsegen-lin, λ = −2": {"attention": "sparsegen_lin", "seed": "2"},
    "sparsemax (λ = 0)": {"attention": "2.0", "seed": "2"},
}
#: The sentence and its translation are at most so long, in tokens.
LONGEST = 14


def sentences() -> list[tuple[str, str]]:
    """The captions of Multi30k's test set of 2016."""
    return read_pairs("mt/multi30k_task1_raw/test_2016_flickr.{lang}.gz", "de", "en")


def collect(jobs: Sequence[Job], results: Path, folder: Path) -> str:
    """Write down how the models attend in the first sentence that is short enough; returns it.

    Raises:
        FileNotFoundError: if one of the models has not been trained.
        ValueError: if no sentence is short enough.
    """
    chosen = {title: job_of(list(jobs), GROUP, wanted) for title, wanted in MODELS.items()}
    models = {title: load(job, folder) for title, job in chosen.items()}
    tokenizer = next(iter(models.values()))[1]
    for source, target in sentences():
        if max(len(tokenizer(source)["input_ids"]), len(tokenizer(text_target=target)["input_ids"])) <= LONGEST:
            break
    else:
        raise ValueError(f"no sentence has at most {LONGEST} tokens in both languages.")
    shown = {"source": source, "target": target}
    shown |= {title: {"command": chosen[title].command, **look(*models[title], source, target)} for title in chosen}
    write(results / FILE, shown)
    return source


def look(model: Any, tokenizer: Any, source: str, target: str) -> dict[str, Any]:
    """Cross-attention of the surest head of the last layer while a translation is read."""
    batch = dict(tokenizer([source], return_tensors="pt"))
    batch["labels"] = torch.tensor([tokenizer(text_target=target)["input_ids"]])
    (example,) = collect_examples(model, [batch], tokenizer, 1, 1000)
    cross = example.sites["cross"]
    heads = cross.weights[-1]
    surest = int(heads.amax(-1).mean(-1).argmax())
    return {
        "head": surest,
        "queries": [token.text for token in cross.queries],
        "keys": [token.text for token in cross.keys],
        "weights": rounded(heads[surest]),
    }


def view(rows: Rows) -> dict[str, Any]:
    """What `collect` wrote; nothing if it did not."""
    return read(rows.folder / FILE)


def attended(rows: Rows) -> str:
    """How many source tokens these heads give weight to, per token that is written."""
    found = view(rows)
    counts = {title: (torch.tensor(found[title]["weights"]) > 0).sum(-1).float().mean() for title in MODELS}
    return "; ".join(f"{title}: {count:.1f}" for title, count in counts.items())


def draw(rows: Rows) -> Figure | None:
    """The maps side by side; nonzero weights are outlined."""
    found = view(rows)
    if not found:
        return None
    models = {title: found[title] for title in MODELS}
    return plots.attention_maps(
        [(title, torch.tensor(own["weights"]), own["queries"], own["keys"]) for title, own in models.items()]
    )
