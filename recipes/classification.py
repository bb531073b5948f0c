"""Text classification with an encoder, BERT-shaped from scratch or pretrained.

    python recipes/classification.py --config recipes/configs/classification.yaml --out runs/cls-learned \
        --attention learned --output_alpha 1.5
    accelerate launch recipes/classification.py --config ... --out ...                  # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/classification.py --config ... --out ...      # two CPU processes
    python recipes/classification.py --model google-bert/bert-base-uncased --attention learned --alpha_init 1.05 \
        --lr 3e-5 --warmup 100 --epochs 3 --batch_size 32 --train hub:nyu-mll/glue#sst2@train \
        --dev hub:nyu-mll/glue#sst2@validation --test my_reviews.tsv --text sentence --out runs/sst2-sparse
    python recipes/classification.py --config ... --out runs/cls-softmax --resume --coverage 90 95 --results sets.csv

Data: tables or JSON lines with a column for the text and one for the label, or data sets of the Hub; one table for all
splits has a column that names them (``--split_column``). The task of the configuration is to tell from a single word form
which of 94 languages it belongs to (CoNLL-SIGMORPHON 2018, medium setting); the model reads characters. Accuracy counts all
texts alike, macro-F1 all classes. Texts of the test set that occur in the training set are counted, and left out of
``unseen_accuracy``. ``--coverage`` measures conformal sets on random splits of the test set; the results then take its rows.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from common.batches import collated
from common.classes import percent, read_texts, scores, train_tokenizer
from common.folder import open_folder, write_lines
from common.from_scratch import ShapeSettings, build_bert
from common.heads import head_statistics
from common.pretrained import check_length
from common.results import END, columns, finish
from common.sets import check_sets, report_labels
from common.settings import make_sparse, option, parse
from common.trainer import RecipeTrainer

FIELDS = columns(
    "attention output_alpha mapping_options seed data classes accuracy macro_f1 dev_accuracy",
    "unseen_accuracy seen test_texts possible_labels certain certain_accuracy",
    "density_encoder_self support_encoder_self js_encoder_self",
    END,
)


@dataclasses.dataclass
class Settings(ShapeSettings):
    """Settings of this recipe, beside those that all share."""

    train: str = option("", "labelled texts to train on")
    dev: str = option("", "texts that choose the best epoch")
    test: str = option("", "texts to test on")
    text: str = option("text", "column of the text")
    label: str = option("label", "column of the label")
    split_column: str = option("", "column that says train, dev or test, where one table holds all; default: none")
    model: str = option("", "pretrained encoder, Hub id or folder; default: train a BERT from scratch")
    vocabulary: int = option(0, "from scratch: size of the WordPiece vocabulary; 0 reads single characters")
    max_tokens: int = option(128, "longer texts are cut")
    dev_texts: int = option(0, "texts of dev that choose the best epoch; 0 for all")
    coverage: list[float] = option([], "measure sets that hold the class so often, %, e.g. 90 95; default: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train", "dev", "test"):
            self.require(name, bool(getattr(self, name)), "given: a file, or hub:OWNER/NAME@SPLIT")
        self.require_at_least(max_tokens=3, vocabulary=0, dev_texts=0)
        self.require("coverage", all(0 < share < 100 for share in self.coverage), "between 0 and 100")


def build(settings: Settings, texts: list[str], classes: list[str]) -> tuple[Any, Any]:
    """Return a model and its tokenizer: a pretrained encoder with a new head, or a small BERT from scratch."""
    config: dict[str, Any] = {"id2label": dict(enumerate(classes)), "problem_type": "single_label_classification"}
    config["label2id"] = {label: number for number, label in enumerate(classes)}
    if settings.model:
        config |= {"dtype": torch.float32, "ignore_mismatched_sizes": True}  # a head for other classes is replaced
        model = AutoModelForSequenceClassification.from_pretrained(settings.model, **config)
        return model, AutoTokenizer.from_pretrained(settings.model)
    tokenizer = train_tokenizer(texts, settings.vocabulary)
    config |= {"hidden_dropout_prob": settings.dropout, "attention_probs_dropout_prob": 0.0}
    sizes = (len(tokenizer), settings.width, settings.layers, settings.heads, settings.max_tokens)
    return build_bert(*sizes, **config), tokenizer


def main(settings: Settings) -> None:
    texts, classes = read_texts(settings)
    fields = () if settings.coverage else FIELDS
    check_sets(settings)
    folder = open_folder(settings, "classification", fields)
    set_seed(settings.seed)
    model, tokenizer = build(settings, [text for text, _ in texts["train"]], classes)
    check_length(model, settings.max_tokens, "max_tokens")
    model, data = make_sparse(model, settings), {}
    for split, rows in texts.items():
        ids = tokenizer([text for text, _ in rows], truncation=True, max_length=settings.max_tokens)["input_ids"]
        numbers = [classes.index(label) for _, label in rows]
        data[split] = [{"input_ids": i, "labels": n} for i, n in zip(ids, numbers, strict=True)]
    size = sum(p.numel() for p in model.parameters()) / 1e6
    PartialState().print(f"{len(data['train'])} training texts of {len(classes)} classes, {size:.2f} M parameters")

    def measure(answers: Any) -> dict[str, Any]:
        found = scores(torch.tensor(answers.predictions), torch.tensor(answers.label_ids), settings.output_alpha)
        return {"score": found["accuracy"], "macro_f1": found["macro_f1"]}

    collator = DataCollatorWithPadding(tokenizer)
    trainer = RecipeTrainer(
        settings,
        model,
        train_dataset=data["train"],
        eval_dataset=data["dev"],
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=measure,
    )
    best = trainer.fit()
    answers = trainer.predict(data["test"])
    logits, labels = torch.tensor(answers.predictions), torch.tensor(answers.label_ids)
    rows = zip(texts["test"], logits.argmax(-1).tolist(), strict=True)
    write_lines(folder / "predictions.tsv", (f"{text}\t{label}\t{classes[guess]}" for (text, label), guess in rows))
    known = {text for text, _ in texts["train"]}
    seen = torch.tensor([text in known for text, _ in texts["test"]])
    measures: dict[str, Any] = {
        **trainer.summary(),
        **{"data": settings.train, "mapping_options": settings.mapping_options, "dev_accuracy": round(trainer.best, 2)},
        **{"classes": len(classes), "test_texts": len(labels)},
        **scores(logits, labels, settings.output_alpha),
        **{"seen": percent(seen), "unseen_accuracy": percent((logits.argmax(-1) == labels)[~seen])},
        **head_statistics(best, collated(data["test"][:512], collator, 64, best.device), FIELDS),
    }
    if settings.coverage:
        report_labels(settings, logits, labels, train_steps=measures["best_step"])
    card = {"data": Path(settings.train).name.split(".")[0], "main_measures": ["accuracy", "macro_f1"]}
    finish(settings, "classification", fields, measures, task="text-classification", **card)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
