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
from accelerate.utils import set_seed
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from common.batches import Batches, collated
from common.finish import check_finish, finish
from common.from_scratch import Seq2SeqSettings, build_seq2seq, train_bpe, write_at_most
from common.heads import head_statistics
from common.pretrained import check_length
from common.results import END, columns, name_of
from common.run import Run
from common.seq2seq import generate
from common.settings import option, parse
from common.training import Training, make_sparse
from hf_entmax.analysis.reading.tables import read_lists, read_splits

KINDS = ("rouge1", "rouge2", "rougeL")
FIELDS = columns(
    "attention output_alpha mapping_options seed data rouge1 rouge2 rougeL first_rouge1 first_rouge2 first_rougeL",
    "lead_rouge1 lead_rouge2 lead_rougeL dev_rouge test_texts words cut",
    "density_encoder_self density_cross density_decoder_self js_encoder_self js_cross js_decoder_self",
    "support_encoder_self support_cross support_decoder_self",
    END,
)


@dataclasses.dataclass
class Settings(Seq2SeqSettings):
    """Settings of this recipe, beside those that all share."""

    test: str = option("", "texts to test on")
    source: str = option("source", "column of the text")
    target: str = option("target", "column of its summaries")
    prefix: str = option("", "what a pretrained model wants before every text, e.g. 'summarize: ' for T5")
    max_tokens: int = option(384, "longer texts are cut after so many tokens, and counted")
    max_summary: int = option(64, "longest summary in tokens; texts with a longer one are left out of training")
    dev_texts: int = option(100, "texts of dev that are summarised greedily after each epoch; 0 for all")
    test_texts: int = option(0, "texts to test on; 0 for all")
    beams: int = option(4, "beam width of the test")
    no_repeat: int = option(3, "no so many words in a row come twice in a summary (of tokens); 0 allows it")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(beams=1, max_tokens=2, max_summary=2, dev_texts=0, test_texts=0, no_repeat=0)


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


def read_articles(settings: Settings) -> tuple[list[Article], list[Article], list[Article]]:
    wheres = {split: getattr(settings, split) for split in ("train", "dev", "test")}
    splits = read_splits(wheres, (settings.source, settings.target), read_lists)
    train, dev, test = ([Article(*map(tuple, row)) for row in rows] for rows in splits.values())
    return train, dev, test


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


def rouge(summaries: list[str], references: list[tuple[str, ...]]) -> dict[str, float]:
    """Mean ROUGE F1 in %; of several references the one that matches best, for each kind of ROUGE by itself."""
    scorer = RougeScorer(KINDS, use_stemmer=True)
    found = [scorer.score_multi(list(own), summary) for own, summary in zip(references, summaries, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in found) / len(found) for kind in KINDS}


def summarise(model: Any, articles: list[Article], tokenizer: Any, run: Run, beams: int) -> list[str]:
    """A summary of every text, in order, on all processes."""
    settings, sources = run.settings, encode_sources(articles, tokenizer, run.settings)
    options = {"max_new_tokens": settings.max_summary, "no_repeat_ngram_size": settings.no_repeat, "num_beams": beams}
    return generate(model, sources, tokenizer, run, 16, **options)


def main(settings: Settings) -> None:
    train, dev, test = read_articles(settings)
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
    else:
        texts = (text for article in train for text in (article.text, article.references[0]))
        tokenizer = train_bpe(texts, settings.vocabulary)
        longest = max(settings.max_tokens, settings.max_summary)
        model = build_seq2seq(settings, len(tokenizer), longest, settings.architecture)
    model = make_sparse(write_at_most(model, settings.max_summary), settings)
    examples, shown = encode(train, tokenizer, settings), encode(dev, tokenizer, settings)[:64]
    for split, kept in (("training", examples), ("dev", shown)):
        if not kept:
            raise ValueError(f"max_summary={settings.max_summary}: every {split} summary is longer; raise it.")
    run.say(
        f"{len(examples)} training texts ({len(train) - len(examples)} with a summary over {settings.max_summary} tokens "
        f"left out), {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    batches = Batches.for_training(run, examples, collator, lambda example: len(example["input_ids"]))

    def evaluate(current: Any) -> dict[str, float]:
        measures = rouge(summarise(current, dev, tokenizer, run, 1), [article.references for article in dev])
        return {"score": sum(measures.values()) / len(measures), **measures}

    training = Training(run, model, tokenizer, batches, evaluate)
    training.fit()
    best = AutoModelForSeq2SeqLM.from_pretrained(run.folder / "model").to(run.accelerator.device).eval()
    summaries = summarise(best, test, tokenizer, run, settings.beams)
    run.write("summaries.txt", summaries)
    references = [article.references for article in test]
    found = {
        "": rouge(summaries, references),
        "first_": rouge(summaries, [own[:1] for own in references]),
        "lead_": rouge([article.lead for article in test], references),
    }
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
        **head_statistics(best, collated(shown, collator, 16, run.accelerator.device), FIELDS),
    }
    run.say(f"For example: {summaries[0]}")
    finish(run, FIELDS, measures, task="summarization", data=name_of(settings.train), main_measures=list(KINDS))


if __name__ == "__main__":
    main(parse(Settings, __doc__))
