"""Make the file of the small pretrained model that the quickstart patches: ``python -m hf_entmax.quickstart.make_base``.

It is a softmax BART of characters, trained on the inflection table of this package for some three minutes on two cores. The
quickstart would otherwise spend most of its time on this before it could show anything.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch.optim import AdamW
from transformers import set_seed

from hf_entmax.quickstart import data, models
from hf_entmax.quickstart.workflow import BETAS, training_questions

#: Peak learning rate, optimiser steps and pairs per step.
LR, STEPS, BATCH = 3e-3, 2000, 64


def make(path: Path, steps: int = STEPS) -> None:
    """Train the model and write its weights in half precision, which is all that they need."""
    set_seed(0)
    torch.set_num_threads(1)
    verbs = data.read_verbs()
    known, _ = data.split_verbs(verbs)
    tokenizer = data.build_tokenizer(verbs)
    model = models.small_bart(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        models.train(
            model, tokenizer, data.training_set(training_questions(known), tokenizer),
            AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0), title="training with softmax",
            out_dir=Path(folder), steps=steps, max_seconds=3600.0, batch_size=BATCH, seed=0, console=Console(),
        )  # fmt: skip
    tied = {name for name, _ in model.named_parameters()}
    save_file({n: p.half().contiguous() for n, p in model.state_dict().items() if n in tied}, path)


if __name__ == "__main__":
    make(models.BASE_FILE)
