"""The main job on embedded data: train, patch, fine-tune, save, reload in a fresh process, measure, draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run"]


def run(
    out_dir: str | Path = "quickstart-output",
    model: str | None = None,
    *,
    output_alpha: float | None = 1.5,
    seed: int = 0,
    max_minutes: float = 30.0,
    base_steps: int = 1600,
    steps: int = 1600,
    batch_size: int | None = None,
    questions: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Make a softmax model of English verbs adaptively sparse, and look at what became of it.

    A small character-level BART is trained from scratch with softmax (it stands in for a pretrained model), patched with
    one call, fine-tuned with the Seq2SeqTrainer, saved, and loaded in a fresh process that must give the same logits.
    Verbs are held out by lemma. Prints tables and writes, into ``out_dir``: ``model/`` (the patched model with its
    tokenizer), ``base/`` (the softmax model), ``figures/``, ``report.html`` with the numbers of every head, and
    ``results.json``. Needs no network.

    Args:
        out_dir: created; files of an earlier run are overwritten.
        model: an encoder-decoder on the Hub or in a directory that is used, with its own tokenizer, in place of the
            small one. It is not trained with softmax first: its accuracy before is that of the checkpoint as it is.
        output_alpha: alpha of the output loss and of ``generate()``, >= 1; ``None`` keeps the output a softmax.
        seed: of the split, the weights and the order of the batches.
        max_minutes: an emergency brake, > 0: a training that is not over by its share of this time is stopped, which is
            said. Otherwise the steps alone decide, and two runs on one machine give the same numbers.
        base_steps: optimiser steps of the softmax stage, >= 1.
        steps: optimiser steps after patching, >= 1.
        batch_size: pairs per step; by default 64 for the small model, 32 for a given one.
        questions: measure on so many held-out questions at most; by default all for the small model, 200 for a given
            one.
        console: of ``rich``, where everything is printed.

    Returns:
        What ``results.json`` holds.

    Raises:
        ValueError: if an argument is out of range, or ``model`` is no encoder-decoder or cannot be patched.
        RuntimeError: if the reloaded model does not give the same logits.
    """
    from hf_entmax.quickstart.workflow import Settings, run_workflow

    small = model is None
    settings = Settings(
        out_dir=Path(out_dir),
        model=model,
        output_alpha=output_alpha,
        seed=seed,
        max_minutes=max_minutes,
        base_steps=base_steps,
        steps=steps,
        batch_size=(64 if small else 32) if batch_size is None else batch_size,
        questions=(None if small else 200) if questions is None else questions,
    )
    return run_workflow(settings, console)
