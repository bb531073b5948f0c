"""A loop of your own: sparse attention with learned alphas and an entmax output, without a Trainer.

    python recipes/pytorch_loop.py --model distilbert/distilgpt2 --data train.txt --out runs/loop

The loss to minimise is the model's, ``model(**batch).loss``, or `entmax_loss` of its logits, which is the same. A cross-entropy of
these logits (``F.cross_entropy``) is another loss: it trains a softmax over the vocabulary, which never gives a word the
probability 0, while generation takes the entmax of the same logits. The last table has both numbers side by side.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import rich
import torch
from rich.table import Table
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from common.folder import say_processes
from hf_entmax import EntmaxConfig, alphas, patch_model
from hf_entmax.losses import entmax_loss
from hf_entmax.training import alpha_parameter_groups


@dataclasses.dataclass
class Arguments:
    """What to train on what."""

    model: str = dataclasses.field(metadata={"help": "causal model, Hub id or folder"})
    data: str = dataclasses.field(metadata={"help": "text file"})
    out: str = dataclasses.field(metadata={"help": "folder for the trained model"})
    alpha_init: float = dataclasses.field(
        default=1.05, metadata={"help": "where the heads' alphas start; 1 is softmax"}
    )
    output_alpha: float = dataclasses.field(default=1.5, metadata={"help": "alpha of the output and of its loss"})
    lr: float = dataclasses.field(default=5e-5, metadata={"help": "learning rate of the weights"})
    alpha_lr: float = dataclasses.field(default=1e-2, metadata={"help": "learning rate of the alphas"})
    block: int = dataclasses.field(default=128, metadata={"help": "tokens in a row"})
    batch_size: int = dataclasses.field(default=8, metadata={"help": "rows in a step"})
    epochs: int = dataclasses.field(default=1, metadata={"help": "passes over the text"})
    seed: int = dataclasses.field(default=0, metadata={"help": "of the order and of dropout"})


def own_losses(logits: torch.Tensor, labels: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss that the model reports and the cross-entropy of the same logits, nats per token."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()  # position t predicts token t + 1
    return entmax_loss(logits, labels, alpha), F.cross_entropy(logits.float(), labels)


def main(args: Arguments) -> None:
    say_processes("pytorch_loop")
    torch.manual_seed(args.seed)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    patch_model(model, EntmaxConfig(alpha="learned", alpha_init=args.alpha_init, output_alpha=args.output_alpha))

    ids = torch.tensor(tokenizer(Path(args.data).read_text(encoding="utf-8"))["input_ids"])
    rows = ids[: len(ids) // args.block * args.block].view(-1, args.block)
    if not len(rows):
        raise ValueError(f"--data {args.data} has {len(ids)} tokens: give more, or a --block of at most as many.")
    optimizer = torch.optim.AdamW(alpha_parameter_groups(model, lr=args.lr, alpha_lr=args.alpha_lr, weight_decay=0.01))

    model.train()
    table = Table("epoch", "training loss", "cross-entropy of the logits", "alpha, mean of all heads")
    for epoch in range(args.epochs):
        seen = []
        for batch in rows[torch.randperm(len(rows))].split(args.batch_size):
            batch = batch.to(device)
            output = model(input_ids=batch, labels=batch)
            output.loss.backward()  # `own_losses(...)[0].backward()` gives the same gradients, `[1]` does not
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append([float(output.loss), float(own_losses(output.logits, batch, args.output_alpha)[1])])
        loss, other = torch.tensor(seen).mean(0).tolist()
        mean = torch.cat([values.flatten() for values in alphas(model).values()]).nanmean()
        table.add_row(str(epoch + 1), f"{loss:.4f}", f"{other:.4f}", f"{float(mean):.4f}")

    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    rich.print(table)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
