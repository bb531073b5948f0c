"""A small Transformer, trained from scratch through the plugin, that reads characters and predicts sets of labels."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import BertForSequenceClassification

from common.from_scratch import build_bert
from common.multilabel_data import Split, TextData, english_verb_texts, read_texts
from common.multilabel_scores import MultilabelResults, f1, score
from common.settings import option
from hf_entmax import patch_model
from hf_entmax.integration.observe import AttentionCall, observe_attention
from hf_entmax.losses.multilabel import multilabel_predict, multilabel_probabilities

DENSE = ("softmax", "entmax(alpha=1)")


@dataclasses.dataclass
class TextConfig:
    """The text study."""

    study: str = option("text", "text")
    data: str = option("english_verbs", "english_verbs (built in), or a name for the files below")
    files: dict[str, str] = option({}, "TSV files by split (train, validation, test), relative to the data folder")
    text_column: int = option(0, "column of the text in them, from 0")
    label_column: int = option(1, "column of the semicolon-separated labels, from 0")
    limit: int | None = option(None, "use at most so many rows of each split")
    outputs: list[str] = option(
        ["softmax", "sparsemax", "entmax", "sparsemax_hinge", "sparsehourglass"],
        "multilabel losses by name, perhaps with options: sparsehourglass(q=1)",
    )
    attentions: list[dict[str, Any]] = option([{"alpha": 1.0}], "attention mappings, each with fields of EntmaxConfig")
    seeds: list[int] = option([0, 1, 2], "of initialisation and batches")
    hidden: int = option(64, "width of the model; heads have 16 dimensions")
    layers: int = option(2, "number of layers")
    epochs: int = option(5, "passes over the training rows; the epoch with the best validation micro-F1 is tested")
    batch_size: int = option(64, "rows per step")
    lr: float = option(2e-3, "peak; linear warm-up over a tenth of the steps, then linear decay")
    thresholds: list[float] = option([i / 40 for i in range(25)], "candidates for softmax, chosen on validation rows")

    def __post_init__(self) -> None:
        if self.data != "english_verbs" and set(self.files) != {"train", "validation", "test"}:
            raise ValueError(f"files={self.files} must name the splits train, validation and test of {self.data!r}.")
        if self.hidden % 16:
            raise ValueError(f"hidden={self.hidden} must be a multiple of 16, the width of a head.")


def load(config: TextConfig, data_dir: Path) -> TextData:
    if config.data == "english_verbs":
        return english_verb_texts(config.limit)
    files = {split: data_dir / path for split, path in config.files.items()}
    return read_texts(files, config.text_column, config.label_column, config.limit)


def build(config: TextConfig, data: TextData, output: str, attention: dict[str, Any]) -> BertForSequenceClassification:
    """A BERT with the attention and the multilabel loss asked for."""
    labels = data.splits["train"].labels.shape[1]
    longest = max(part.features.shape[1] for part in data.splits.values())
    sizes = (len(data.characters) + 3, config.hidden, config.layers, config.hidden // 16, longest)
    kind = {"num_labels": labels, "problem_type": "multi_label_classification"}
    model = build_bert(*sizes, intermediate_size=2 * config.hidden, **kind)
    return patch_model(model, **attention, output_mapping=output)


@torch.no_grad()
def predict(model: torch.nn.Module, data: Split, batch_size: int = 256) -> Tensor:
    """Logits of all rows, ``[N, K]``."""
    model.eval()
    parts = [model(input_ids=x, attention_mask=(x != 0).long()).logits for x in data.features.split(batch_size)]
    return torch.cat(parts)


@torch.no_grad()
def attention_support(model: Any, data: Split, rows: int = 256) -> float:
    """Mean number of characters that an attention row spreads over, padding left out."""
    x = data.features[:rows]
    real = x != 0
    total = count = 0.0

    def add(call: AttentionCall) -> None:
        nonlocal total, count
        sizes = (call.weights > 0).sum(-1).double()
        total += float((sizes * real[:, None]).sum())
        count += float(real.sum()) * call.weights.shape[1]

    model.eval()
    with observe_attention(model, add):
        model(input_ids=x, attention_mask=real.long())
    return total / count


def best_threshold(logits: Tensor, labels: Tensor, output: str, candidates: list[float]) -> tuple[float, float | None]:
    """Validation micro-F1 and the threshold that gives it; None, the support, for sparse outputs."""
    options: list[float | None] = list(candidates) if output in DENSE else [None]
    scores = [f1(multilabel_predict(logits, output, threshold=t).cpu(), labels.cpu()) for t in options]
    best = max(range(len(options)), key=scores.__getitem__)
    return scores[best], options[best]


def train(config: TextConfig, data: TextData, output: str, attention: dict[str, Any], seed: int) -> dict[str, Any]:
    """One run: train, keep the best epoch by validation micro-F1, score the test rows."""
    set_seed(seed)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = build(config, data, output, attention)
    rows = torch.utils.data.TensorDataset(data.splits["train"].features, data.splits["train"].labels)
    loader = torch.utils.data.DataLoader(rows, config.batch_size, shuffle=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01)
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    steps = config.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: min((s + 1) / max(1, steps // 10), 1 - s / steps))
    best: dict[str, Any] = {"validation": -1.0}
    device = accelerator.device
    held = {name: Split(part.features.to(device), part.labels.to(device)) for name, part in data.splits.items()}
    for epoch in range(config.epochs):
        model.train()
        for x, y in loader:
            # A batch is as long as its longest text.
            x = x[:, : int((x != 0).sum(1).max())]
            loss = model(input_ids=x, attention_mask=(x != 0).long(), labels=y).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        dev, test = held["validation"], held["test"]
        value, threshold = best_threshold(predict(model, dev), dev.labels, output, config.thresholds)
        if value > best["validation"]:
            best = {"validation": value, "threshold": threshold, "epoch": epoch + 1, "logits": predict(model, test)}
            best["attention"] = attention_support(accelerator.unwrap_model(model), test)
    return best


def run_text(config: TextConfig, data_dir: Path, results: MultilabelResults) -> None:
    """All runs of the study that the results do not hold yet."""
    data = load(config, data_dir)
    test = data.splits["test"]
    for attention, output, seed in itertools.product(config.attentions, config.outputs, config.seeds):
        setting = json.dumps(attention)
        key = {"study": "text", "dataset": config.data, "setting": setting, "method": output, "seed": seed}
        if results.has(**key):
            continue
        start = time.perf_counter()
        best = train(config, data, output, attention, seed)
        logits = best["logits"].cpu()
        predicted = multilabel_predict(logits, output, threshold=best["threshold"])
        scores = score(multilabel_probabilities(logits, output), predicted, test.labels)
        chosen = {name: best[name] for name in ("threshold", "epoch")}
        chosen["attention_support"] = round(best["attention"], 3)
        row = {**key, **scores, "empty_rows": "ignore", "test_rows": "all", "chosen": json.dumps(chosen)}
        row |= {"validation_micro_f1": round(best["validation"], 4), "seconds": round(time.perf_counter() - start, 1)}
        results.add(**row, n_train=len(data.splits["train"]), n_test=len(test))
        print(f"{setting:50} {output:20} seed {seed} {scores} {chosen}", flush=True)
