"""One self-contained HTML file that shows what the heads of a model do, with all numbers beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_entmax.analysis.report.html import render
from hf_entmax.analysis.report.rows import write_tables
from hf_entmax.analysis.statistics.result import AttentionStatistics

__all__ = ["write_report"]


def write_report(
    statistics: AttentionStatistics | Sequence[AttentionStatistics],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    scores: Mapping[str, Sequence[float]] | None = None,
    figures: bool = True,
    max_bytes: int = 5_000_000,
) -> Path:
    """Write the report: an HTML file without any outside reference, and every number as JSON and CSV beside it.

    The file opens from disk in any current browser, needs no network and no server: a summary in words, a map and a
    sortable table of all heads, figures, a viewer of the nonzero attention of single sentences, and, for several
    models, all of it side by side.

    Args:
        statistics: of one model, or of several to compare; the first is the main one.
        path: the HTML file, or a folder (then ``report.html`` in it). Folders are created; files are overwritten.
        title: heading; default: the names of the models.
        scores: how good the models are, to stand beside their density: ``{"accuracy": [0.91, 0.90]}``, one number per
            model; added to what stands in ``statistics.scores``.
        figures: draw the figures (needs matplotlib; without it the report says so and has none).
        max_bytes: size the HTML file should not exceed; sentences are left out of the viewer until it fits.

    Returns:
        Path of the HTML file.

    Raises:
        TypeError: not statistics. ValueError: an empty sequence, statistics without any site, or a score that is not one
            number per model.

    Examples:
        >>> import tempfile, torch
        >>> from transformers import GPT2Config, GPT2Model
        >>> from hf_entmax.analysis import collect, write_report
        >>> model = GPT2Model(GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2))
        >>> statistics = collect(model, [{"input_ids": torch.randint(20, (3, 7))}], name="small GPT-2")
        >>> folder = tempfile.mkdtemp()
        >>> write_report(statistics, folder, scores={"perplexity": [21.3]}, figures=False).name
        'report.html'
    """
    models = [statistics] if isinstance(statistics, AttentionStatistics) else list(statistics)
    for model in models:
        if not isinstance(model, AttentionStatistics):
            raise TypeError(f"write_report needs AttentionStatistics, as collect returns, got {type(model).__name__}.")
        if not model.sites:
            raise ValueError(f"the statistics of {model.name!r} are empty: no attention site was measured.")
    if not models:
        raise ValueError("write_report needs the statistics of at least one model, got an empty sequence.")
    for name, values in (scores or {}).items():
        if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence) or len(values) != len(models):
            raise ValueError(f"scores[{name!r}] is {values!r}; give one number for each of the {len(models)} model(s).")
        for model, value in zip(models, values, strict=True):
            model.scores[name] = float(value)
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    files = write_tables(models, path.parent, path.stem)
    path.write_text(render(models, title, figures, max_bytes, [file.name for file in files]), encoding="utf-8")
    return path
