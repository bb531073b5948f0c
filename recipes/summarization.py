"""Summarisation of abstracts in one sentence (SciTLDR), from scratch or from a pretrained model.

    python recipes/summarization.py --config recipes/configs/summarization.yaml --out runs/tldr-softmax
    python recipes/summarization.py --config recipes/configs/summarization.yaml --out runs/tldr-learned \
        --attention learned --output_alpha 1.5
    accelerate launch recipes/summarization.py --config ... --out ...                   # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/summarization.py --config ... --out ...       # two CPU processes
    python recipes/summarization.py --config ... --model facebook/bart-base --attention learned --alpha_init 1.05 \
        --lr 3e-5 --warmup 100 --epochs 5 --batch_size 16 --out runs/bart-sparse
    python recipes/summarization.py --config ... --out runs/tldr-softmax --resume

Data: JSON lines (or tables, or data sets of the Hub) with a text and its summary; in JSON both may be lists: of sentences,
and of references. Training learns the first reference. Without ``--model`` the recipe trains a BPE and a BART-, Marian- or
T5-shaped model. ROUGE is the rouge-score package's F1 with stemming, on ``generate()`` with a beam, in %: ``rouge1`` takes
the best of all references of a text, ``first_rouge1`` the first; ``lead_rouge1`` is that of the text's first sentence, which
a summariser has to beat.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from rouge_score.rouge_scorer import RougeScorer
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import translation
from common.batches import Batches
from common.finish import check_finish, finish, name_of
from common.heads import head_statistics
from common.pretrained import check_length
from common.run import Run
from common.settings import RunSettings, option, parse
from common.training import Training, make_sparse
from hf_entmax.analysis.reading.tables import read_lists

KINDS = ("rouge1", "rouge2", "rougeL")
FIELDS = (
    *("attention", "output_alpha", "mapping_options", "seed", "data", *KINDS, *(f"first_{kind}" for kind in KINDS)),
    *(*(f"lead_{kind}" for kind in KINDS), "dev_rouge", "test_texts", "words", "cut"),
    *(
        "density_encoder_self",
        "density_cross",
        "density_decoder_self",
        "js_encoder_self",
        "js_cross",
        "js_decoder_self",
    ),
    *("support_encoder_self", "support_cross", "support_decoder_self"),
    *("steps", "best_step", "train_seconds", "tokens_per_second", "processes", "command", "hardware", "versions"),
)


@dataclasses.dataclass
class Settings(RunSettings):
    """What this recipe can be told beside what all can."""

    train: str = option("", "texts with summaries to train on")
    dev: str = option("", "texts that choose the best epoch")
    test: str = option("", "texts to test on")
    source: str = option("source", "column of the text")
    target: str = option("target", "column of its summaries")
    model: str = option("", "pretrained encoder-decoder, Hub id or folder; default: train one from scratch")
    prefix: str = option("", "what a pretrained model wants before every text, e.g. 'summarize: ' for T5")
    architecture: str = option("bart", "from scratch: bart, marian or t5")
    vocabulary: int = option(4000, "from scratch: size of the BPE")
    width: int = option(128, "from scratch: of the model")
    layers: int = option(2, "from scratch: of encoder and of decoder")
    heads: int = option(4, "from scratch: per layer")
    dropout: float = option(0.1, "from scratch: everywhere but on attention weights")
    max_tokens: int = option(384, "longer texts are cut after so many tokens, and counted")
    max_summary: int = option(64, "longest summary in tokens; texts with a longer one are left out of training")
    dev_texts: int = option(100, "texts of dev that are summarised greedily after each epoch; 0 for all")
    test_texts: int = option(0, "texts to test on; 0 for all")
    beams: int = option(4, "beam width of the test")
    no_repeat: int = option(3, "no so many words in a row come twice in a summary (of tokens); 0 allows it")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("architecture", self.architecture in ("bart", "marian", "t5"), "bart, marian or t5")
        for name in ("train", "dev", "test"):
            self.require(name, bool(getattr(self, name)), "given: a file, or hub:OWNER/NAME@SPLIT")
        for name in ("beams", "width", "layers", "heads"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_tokens", "max_summary"):
            self.require(name, getattr(self, name) >= 2, "at least 2")
        for name in ("dev_texts", "test_texts", "no_repeat"):
            self.require(name, getattr(self, name) >= 0, "at least 0")
        self.require("width", self.width % self.heads == 0, f"a multiple of heads={self.heads}")
        self.require("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")


@dataclasses.dataclass(frozen=True)
class Article:
    """A text and its summaries."""

    sentences: tuple[str, ...]
    references: tuple[str, ...]

    @property
    def text(self) -> str:
        """What is summarised."""
        return " ".join(self.sentences)

    @property
    def lead(self) -> str:
        """The first sentence: a cheap summary."""
        return self.sentences[0] if len(self.sentences) > 1 else self.text.partition(". ")[0]


# --- 1. Data and model -------------------------------------------------------------------------------------------------


def read_articles(settings: Settings, split: str) -> list[Article]:
    """The texts of a split (``train``, ``dev``, ``test``)."""
    rows = read_lists(getattr(settings, split), (settings.source, settings.target))
    return [Article(tuple(sentences), tuple(references)) for sentences, references in rows]


def build_model(settings: Settings, vocabulary: int) -> Any:
    """A model from scratch, as for translation, that reads texts and writes short summaries."""
    longest = max(settings.max_tokens, settings.max_summary)
    model = translation.build_model(settings, vocabulary, longest)  # type: ignore[arg-type] - it has the fields it uses
    model.generation_config.max_new_tokens = settings.max_summary
    return model


def encode_sources(articles: list[Article], tokenizer: Any, settings: Settings) -> list[list[int]]:
    """Token ids of texts, cut at ``max_tokens``."""
    texts = [settings.prefix + article.text for article in articles]
    return tokenizer(texts, truncation=True, max_length=settings.max_tokens)["input_ids"]


def encode(articles: list[Article], tokenizer: Any, settings: Settings) -> list[dict[str, list[int]]]:
    """Token ids of texts and first references, without those whose reference is too long."""
    targets = tokenizer(text_target=[article.references[0] for article in articles])["input_ids"]
    sources = encode_sources(articles, tokenizer, settings)
    pairs = zip(sources, targets, strict=True)
    return [{"input_ids": s, "labels": t} for s, t in pairs if len(t) <= settings.max_summary]


# --- 2. Measures -------------------------------------------------------------------------------------------------------


def rouge(summaries: list[str], references: list[tuple[str, ...]]) -> dict[str, float]:
    """Mean ROUGE F1 in %; of several references the one that matches best, for each kind of ROUGE by itself."""
    scorer = RougeScorer(KINDS, use_stemmer=True)
    found = [scorer.score_multi(list(own), summary) for own, summary in zip(references, summaries, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in found) / len(found) for kind in KINDS}


def summarise(
    model: Any, articles: list[Article], tokenizer: Any, run: Run, settings: Settings, beams: int
) -> list[str]:
    """A summary of every text, in order, on all processes."""
    plain = run.accelerator.unwrap_model(model)

    def collate(part: list[tuple[int, list[int]]]) -> dict[str, Any]:
        inputs = tokenizer.pad({"input_ids": [ids for _, ids in part]}, return_tensors="pt")
        return {name: inputs[name] for name in ("input_ids", "attention_mask")} | {"rows": [row for row, _ in part]}

    numbered = list(enumerate(encode_sources(articles, tokenizer, settings)))
    batches = list(Batches(numbered, collate, lambda example: len(example[1]), run.accelerator, 16).in_order())
    found: list[tuple[int, str]] = []
    for batch in tqdm(batches, disable=not run.main, mininterval=5, unit="batch"):
        rows = batch.pop("rows")
        output = plain.generate(
            **batch, num_beams=beams, max_new_tokens=settings.max_summary, no_repeat_ngram_size=settings.no_repeat
        )
        found += zip(rows, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True)
    return [text for _, text in sorted(gather_object(found))]


# --- 3. One run --------------------------------------------------------------------------------------------------------


def main(settings: Settings) -> None:
    train, dev, test = (read_articles(settings, split) for split in ("train", "dev", "test"))
    dev, test = dev[: settings.dev_texts or None], test[: settings.test_texts or None]
    if settings.smoke:
        train, dev, test = train[:32], dev[:2], test[:4]
    check_finish(settings, FIELDS)
    run = Run(settings, "summarization")
    set_seed(settings.seed)
    if settings.model:
        tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(settings.model, dtype=torch.float32)
        check_length(model, settings.max_tokens, "max_tokens")
        check_length(model, settings.max_summary, "max_summary")
        model.generation_config.max_length, model.generation_config.max_new_tokens = None, settings.max_summary
    else:
        tokenizer = translation.train_tokenizer(
            [(article.text, article.references[0]) for article in train], settings.vocabulary
        )
        model = build_model(settings, len(tokenizer))
    model = make_sparse(model, settings)
    examples, shown = encode(train, tokenizer, settings), encode(dev, tokenizer, settings)[:64]
    for split, kept in (("training", examples), ("dev", shown)):
        if not kept:
            raise ValueError(f"max_summary={settings.max_summary}: every {split} summary is longer; raise it.")
    run.say(
        f"{len(examples)} training texts ({len(train) - len(examples)} with a summary over {settings.max_summary} tokens "
        f"left out), {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    batches = Batches(
        examples,
        collator,
        lambda example: len(example["input_ids"]),
        run.accelerator,
        settings.batch_size,
        settings.gradient_accumulation,
        settings.seed,
    )

    def evaluate(current: Any) -> dict[str, float]:
        measures = rouge(summarise(current, dev, tokenizer, run, settings, 1), [article.references for article in dev])
        return {"score": sum(measures.values()) / len(measures), **measures}

    training = Training(run, model, tokenizer, batches, evaluate)
    training.fit()
    best = AutoModelForSeq2SeqLM.from_pretrained(run.folder / "model").to(run.accelerator.device).eval()
    summaries = summarise(best, test, tokenizer, run, settings, settings.beams)
    run.write("summaries.txt", summaries)
    references = [article.references for article in test]
    found = {
        "": rouge(summaries, references),
        "first_": rouge(summaries, [own[:1] for own in references]),
        "lead_": rouge([article.lead for article in test], references),
    }
    some = [dict(collator(shown[i : i + 16]).to(run.accelerator.device)) for i in range(0, len(shown), 16)]
    lengths = [len(ids) for ids in encode_sources(test, tokenizer, settings)]
    measures: dict[str, Any] = {
        **training.summary(),
        "data": settings.train,
        "mapping_options": settings.mapping_options,
        "dev_rouge": round(training.progress.best, 2),
        **{f"{whose}{kind}": round(value, 2) for whose, own in found.items() for kind, value in own.items()},
        "test_texts": len(test),
        "words": round(sum(len(summary.split()) for summary in summaries) / len(test), 1),
        "cut": sum(length >= settings.max_tokens for length in lengths),
        **{name: value for name, value in head_statistics(best, some).items() if name in FIELDS},
    }
    run.say("  ".join(f"{name} {value}" for name, value in measures.items()))
    run.say(f"For example: {summaries[0]}")
    finish(run, FIELDS, measures, task="summarization", data=name_of(settings.train), main_measures=list(KINDS))


if __name__ == "__main__":
    main(parse(Settings, __doc__))
