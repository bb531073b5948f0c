"""Several labels at once by sparse mappings: a small Transformer on text, and the linear models of Laha et al. 2018.

    python recipes/multilabel.py --config recipes/configs/multilabel_text.yaml
    python recipes/multilabel.py --config recipes/configs/multilabel_mulan.yaml
    python recipes/multilabel.py --config recipes/configs/multilabel_synthetic.yaml
    python recipes/multilabel.py --smoke

Any value of the configuration can be changed on the command line: ``seeds='[0,1,2]' epochs=3``. Runs are appended to the CSV file
``--out`` as they finish; started again, the recipe goes on where it stopped.

The Transformer reads characters and is trained from scratch; its attention and its multilabel loss are any that `patch_model` knows.
The epoch with the best micro-F1 on validation rows is tested; sparse outputs predict their support, for softmax the probability from
which on a label is predicted is chosen on validation rows. `common.multilabel_linear` has the linear models.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments, set_seed

from common.folder import say_processes
from common.from_scratch import build_bert
from common.heads import head_statistics
from common.multilabel_config import TextConfig, read_arguments
from common.multilabel_data import Split, TextData, load_texts
from common.multilabel_linear import run_linear
from common.multilabel_scores import MultilabelResults, best_threshold, score
from hf_entmax import patch_model
from hf_entmax.losses.multilabel import multilabel_predict, multilabel_probabilities


def build(config: TextConfig, data: TextData, output: str, attention: dict[str, Any]) -> Any:
    """Return a BERT with the attention and the multilabel loss asked for."""
    labels = data.splits["train"].labels.shape[1]
    longest = max(part.features.shape[1] for part in data.splits.values())
    sizes = (len(data.characters) + 3, config.hidden, config.layers, config.hidden // 16, longest)
    kind = {"num_labels": labels, "problem_type": "multi_label_classification"}
    model = build_bert(*sizes, intermediate_size=2 * config.hidden, **kind)
    return patch_model(model, **attention, output_mapping=output)


def examples(part: Split) -> list[dict[str, Tensor]]:
    """Return rows without their padding, which is 0."""
    return [
        {"input_ids": ids[ids != 0], "labels": labels} for ids, labels in zip(part.features, part.labels, strict=True)
    ]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch that is as long as its longest text."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.stack([row["labels"] for row in rows]),
    }


def train(config: TextConfig, data: TextData, output: str, attention: dict[str, Any], seed: int) -> dict[str, Any]:
    """Do one run: train, keep the best epoch by validation micro-F1, answer the test rows."""
    set_seed(seed)
    parts = {name: examples(part) for name, part in data.splits.items()}

    def choose(answers: Any) -> dict[str, Any]:
        logits, labels = torch.tensor(answers.predictions), torch.tensor(answers.label_ids)
        value, threshold = best_threshold(logits, labels, output, config.thresholds)
        return {"micro_f1": value, "threshold": threshold}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=config.epochs,
            per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=256,
            learning_rate=config.lr,
            weight_decay=0.01,
            warmup_steps=0.1,  # of all steps; then linear decay
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="micro_f1",
            report_to="none",
            seed=seed,
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.accelerator.is_available(),
        )
        model = build(config, data, output, attention)
        trainer = Trainer(model, arguments, collate, parts["train"], parts["validation"], compute_metrics=choose)
        trainer.train()
    found = trainer.evaluate()  # of the best epoch
    probe = {name: values.to(model.device) for name, values in collate(parts["test"][:256]).items()}
    return {
        "validation": found["eval_micro_f1"],
        "threshold": found["eval_threshold"],
        "epoch": round(trainer.state.best_global_step / trainer.state.max_steps * config.epochs),
        "logits": torch.tensor(trainer.predict(parts["test"]).predictions),
        "attention_support": head_statistics(model, [probe])["support_encoder_self"],
    }


def run_text(config: TextConfig, results: MultilabelResults) -> None:
    """Do all runs of the study that the results do not hold yet."""
    data = load_texts(config)
    test = data.splits["test"]
    for attention, output, seed in itertools.product(config.attentions, config.outputs, config.seeds):
        key = {
            "study": "text",
            "dataset": config.data,
            "setting": json.dumps(attention),
            "method": output,
            "seed": seed,
        }
        if results.has(**key):
            continue
        start = time.perf_counter()
        best = train(config, data, output, attention, seed)
        predicted = multilabel_predict(best["logits"], output, threshold=best["threshold"])
        scores = score(multilabel_probabilities(best["logits"], output), predicted, test.labels)
        chosen = {name: best[name] for name in ("threshold", "epoch", "attention_support")}
        row = {**key, **scores, "empty_rows": "ignore", "test_rows": "all", "chosen": json.dumps(chosen)}
        row |= {"validation_micro_f1": round(best["validation"], 4), "seconds": round(time.perf_counter() - start, 1)}
        results.add(**row, n_train=len(data.splits["train"]), n_test=len(test))
        print(f"{key['setting']:50} {output:20} seed {seed} {scores} {chosen}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    studies = read_arguments(__doc__, arguments)
    say_processes("multilabel")
    for config, file in studies:
        study: Any = run_text if isinstance(config, TextConfig) else run_linear
        study(config, MultilabelResults(file))


if __name__ == "__main__":
    main()
