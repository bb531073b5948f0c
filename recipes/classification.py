"""Text classification with an encoder, BERT-shaped from scratch or pretrained.

    python recipes/classification.py --config recipes/configs/classification.yaml --out runs/cls-softmax
    python recipes/classification.py --config recipes/configs/classification.yaml --out runs/cls-learned \
        --attention learned --output_alpha 1.5
    accelerate launch recipes/classification.py --config ... --out ...                  # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/classification.py --config ... --out ...      # two CPU processes
    python recipes/classification.py --model google-bert/bert-base-uncased --attention learned --alpha_init 1.05 \
        --lr 3e-5 --warmup 100 --epochs 3 --batch_size 32 --train hub:nyu-mll/glue#sst2@train \
        --dev hub:nyu-mll/glue#sst2@validation --test my_reviews.tsv --text sentence --out runs/sst2-sparse
    python recipes/classification.py --config ... --out runs/cls-softmax --resume
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
from accelerate.utils import set_seed
from sklearn.metrics import f1_score
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from common.batches import Batches, answers_of, collated, evenly
from common.finish import check_finish, finish
from common.from_scratch import ShapeSettings, build_bert
from common.heads import head_statistics
from common.pretrained import check_length
from common.results import END, columns
from common.run import Run
from common.sets import MOST, check_sets, measure_labels, report
from common.settings import option, parse
from common.training import Training, make_sparse
from hf_entmax.analysis.reading.tables import read_splits
from hf_entmax.ops import entmax

Texts = list[tuple[str, str]]

FIELDS = columns(
    "attention output_alpha mapping_options seed data classes accuracy macro_f1 dev_accuracy",
    "unseen_accuracy seen test_texts possible_labels certain certain_accuracy",
    "density_encoder_self support_encoder_self js_encoder_self",
    END,
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


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


def read_texts(settings: Settings) -> tuple[Texts, Texts, Texts]:
    """Texts and labels of train, dev and test; a table that holds all of them is read once."""
    columns = [settings.text, settings.label, *([settings.split_column] if settings.split_column else [])]
    tables = read_splits({split: getattr(settings, split) for split in ("train", "dev", "test")}, columns)

    def rows_of(split: str) -> Texts:
        where = getattr(settings, split)
        rows = [(row[0], row[1]) for row in tables[split] if len(row) == 2 or row[2] == split]
        if not rows:
            raise ValueError(f"{where}: no row has {split!r} in its column {settings.split_column}.")
        return rows

    return rows_of("train"), rows_of("dev"), rows_of("test")


def check_labels(train: Texts, **others: Texts) -> list[str]:
    """The classes, sorted.

    Raises:
        ValueError: if there is only one, or a label of another split is not among them.
    """
    classes = sorted({label for _, label in train})
    if len(classes) < 2:
        raise ValueError(f"all training texts have the label {classes[0]!r}: there is nothing to learn.")
    for split, texts in others.items():
        if unknown := sorted({label for _, label in texts} - set(classes)):
            raise ValueError(f"{split} has labels that training does not have: {', '.join(unknown)}.")
    return classes


def train_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """WordPiece of that size, or single characters (0), between ``[CLS]`` and ``[SEP]`` as BERT wants it."""
    if size:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
    else:
        characters = sorted({character for text in texts for character in text})
        vocabulary = {token: place for place, token in enumerate([*SPECIAL, *characters])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        clean_up_tokenization_spaces=False,
    )


def encode(texts: Texts, tokenizer: Any, classes: list[str], longest: int) -> list[dict[str, Any]]:
    """Token ids and class numbers; texts longer than ``longest`` tokens are cut."""
    number = {label: place for place, label in enumerate(classes)}
    ids = tokenizer([text for text, _ in texts], truncation=True, max_length=longest)["input_ids"]
    return [{"input_ids": i, "labels": number[label]} for i, (_, label) in zip(ids, texts, strict=True)]


def build_model(settings: Settings, vocabulary: int, classes: list[str]) -> Any:
    """A pretrained encoder with a new head, or a small BERT from scratch."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {label: i for i, label in enumerate(classes)}}
    if settings.model:
        # A head for other classes is replaced by a new one.
        options = {**names, "problem_type": "single_label_classification", "ignore_mismatched_sizes": True}
        return AutoModelForSequenceClassification.from_pretrained(settings.model, dtype=torch.float32, **options)
    options = {"hidden_dropout_prob": settings.dropout, "attention_probs_dropout_prob": 0.0, **names}
    sizes = (vocabulary, settings.width, settings.layers, settings.heads, settings.max_tokens)
    return build_bert(*sizes, problem_type="single_label_classification", **options)


def logits_of(model: Any, examples: list[dict[str, Any]], collator: Any, run: Run) -> torch.Tensor:
    """Logits of examples, in order, float32 ``[n, classes]``, on the CPU."""
    plain = run.accelerator.unwrap_model(model)

    def answer(part: list[dict[str, Any]]) -> list[torch.Tensor]:
        batch = collator(part).to(run.accelerator.device)
        batch.pop("labels")
        return list(plain(**batch).logits.float().cpu())

    return torch.stack(answers_of(examples, answer, lambda example: len(example["input_ids"]), 256))


def predict(model: Any, examples: list[dict[str, Any]], collator: Any, run: Run) -> list[tuple[int, int, int]]:
    """For every example, in order: the right class, the most probable one, how many have a probability above 0."""
    logits, alpha = logits_of(model, examples, collator, run), run.settings.output_alpha
    possible = (entmax(logits, alpha) > 0).sum(-1).tolist() if alpha > 1 else [logits.shape[-1]] * len(logits)
    return list(zip((row["labels"] for row in examples), logits.argmax(-1).tolist(), possible, strict=True))


def percent(flags: list[bool]) -> float | str:
    """Share of true ones, %; nothing where there are none."""
    return round(100 * sum(flags) / len(flags), 2) if flags else ""


def scores(found: list[tuple[int, int, int]], classes: int, seen: list[bool]) -> dict[str, Any]:
    """Accuracy, macro-F1 and, for sparse outputs, what is said with certainty; in % but ``possible_labels``.

    Args:
        found: by `predict`.
        classes: how many there are; those that occur neither as label nor as prediction do not count in macro-F1.
        seen: whether a text occurs in the training set.
    """
    right = [label == guess for label, guess, _ in found]
    occurring = sorted({number for label, guess, _ in found for number in (label, guess)})
    labels, guesses, _ = zip(*found, strict=True)
    f1 = f1_score(labels, guesses, labels=occurring, average="macro", zero_division=0)
    certain = [possible == 1 for *_, possible in found]
    return {
        "classes": classes,
        "accuracy": percent(right),
        "macro_f1": round(100 * float(f1), 2),
        "unseen_accuracy": percent([flag for flag, before in zip(right, seen, strict=True) if not before]),
        "seen": percent(seen),
        "test_texts": len(found),
        "possible_labels": round(sum(row[2] for row in found) / len(found), 3),
        "certain": percent(certain),
        "certain_accuracy": percent([flag for flag, sure in zip(right, certain, strict=True) if sure]),
    }


def main(settings: Settings) -> None:
    train, dev, test = read_texts(settings)
    classes = check_labels(train, dev=dev, test=test)
    if settings.dev_texts:
        dev = evenly(dev, settings.dev_texts)  # files are sorted by language, by class, ...
    if settings.smoke:
        train, dev, test = (evenly(texts, 64) for texts in (train, dev, test))
    fields = () if settings.coverage else FIELDS
    check_finish(settings, fields)
    check_sets(settings)
    run = Run(settings, "classification")
    set_seed(settings.seed)
    if settings.model:
        tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
    else:
        tokenizer = train_tokenizer([text for text, _ in train], settings.vocabulary)
    model = build_model(settings, len(tokenizer), classes)
    check_length(model, settings.max_tokens, "max_tokens")
    model = make_sparse(model, settings)
    examples, held, tested = (encode(part, tokenizer, classes, settings.max_tokens) for part in (train, dev, test))
    run.say(
        f"{len(examples)} training texts of {len(classes)} classes, "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    )
    collator = DataCollatorWithPadding(tokenizer)
    collate, length = lambda part: dict(collator(part)), lambda example: len(example["input_ids"])
    batches = Batches.for_training(run, examples, collate, length)

    def evaluate(current: Any) -> dict[str, float]:
        measures = scores(predict(current, held, collator, run), len(classes), [False] * len(held))
        return {"score": measures["accuracy"], "macro_f1": measures["macro_f1"]}

    training = Training(run, model, tokenizer, batches, evaluate)
    training.fit()
    best = AutoModelForSequenceClassification.from_pretrained(run.folder / "model").to(run.accelerator.device).eval()
    answers = predict(best, tested, collator, run)
    rows = zip(test, answers, strict=True)
    run.write("predictions.tsv", (f"{text}\t{label}\t{classes[answer[1]]}" for (text, label), answer in rows))
    known = {text for text, _ in train}
    measures: dict[str, Any] = {
        **training.summary(),
        "data": settings.train,
        "mapping_options": settings.mapping_options,
        "dev_accuracy": round(training.progress.best, 2),
        **scores(answers, len(classes), [text in known for text, _ in test]),
        **head_statistics(best, collated(tested[:512], collator, 64, run.accelerator.device), FIELDS),
    }
    data = Path(settings.train).name.split(".")[0]
    if settings.coverage:
        part = evenly(tested, sum(MOST))
        labels = torch.tensor([example["labels"] for example in part])
        logits = logits_of(best, part, collator, run)
        records = measure_labels(logits, labels, settings.output_alpha, settings.coverage, settings.seed)
        report(run, records, data=settings.train, unit="label", train_steps=training.progress.best_step)
    finish(run, fields, measures, task="text-classification", data=data, main_measures=["accuracy", "macro_f1"])


if __name__ == "__main__":
    main(parse(Settings, __doc__))
