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
from typing import Any, NamedTuple

from accelerate import PartialState
from accelerate.utils import set_seed
from rouge_score.rouge_scorer import RougeScorer
from transformers import DataCollatorForSeq2Seq

from common.batches import collated
from common.folder import open_folder, write_lines
from common.from_scratch import Seq2SeqSettings, load_or_build
from common.heads import head_statistics
from common.results import END, columns, finish, name_of
from common.seq2seq import cut_pairs, decode
from common.settings import option, parse
from common.trainer import RecipeTrainer, training_arguments
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


class Article(NamedTuple):
    """A text, its summaries, and its first sentence: a cheap summary."""

    text: str
    references: list[str]
    lead: str

    @classmethod
    def of(cls, sentences: list[str], references: list[str]) -> Article:
        """Join the sentences of a text."""
        text = " ".join(sentences)
        return cls(text, references, sentences[0] if len(sentences) > 1 else text.partition(". ")[0])


def rouge(summaries: list[str], references: list[list[str]], prefix: str = "") -> dict[str, float]:
    """Compute the mean ROUGE F1 in %; of several references the one that matches best, for each kind of ROUGE by itself."""
    scorer = RougeScorer(KINDS, use_stemmer=True)
    found = [scorer.score_multi(own, summary) for own, summary in zip(references, summaries, strict=True)]
    means = {kind: 100 * sum(score[kind].fmeasure for score in found) / len(found) for kind in KINDS}
    return {prefix + kind: round(mean, 2) for kind, mean in means.items()}


def main(settings: Settings) -> None:
    wheres = {split: getattr(settings, split) for split in ("train", "dev", "test")}
    splits = read_splits(wheres, (settings.source, settings.target), read_lists)
    train, dev, test = ([Article.of(*row) for row in rows] for rows in splits.values())
    dev, test = dev[: settings.dev_texts or None], test[: settings.test_texts or None]
    if settings.smoke:
        train, dev, test = train[:32], dev[:2], test[:4]
    folder = open_folder(settings, "summarization", FIELDS)
    set_seed(settings.seed)
    texts = (text for article in train for text in (article.text, article.references[0]))
    tokenizer, model = load_or_build(settings, texts, "max_tokens", "max_summary")
    model.generation_config.no_repeat_ngram_size = settings.no_repeat

    def encode(articles: list[Article], written: int | None = None) -> list[dict[str, list[int]]]:
        pairs = [(settings.prefix + article.text, article.references[0]) for article in articles]
        return cut_pairs(pairs, tokenizer, settings.max_tokens, written)

    examples, shown = ([r for r in encode(part) if len(r["labels"]) <= settings.max_summary] for part in (train, dev))
    settings.require("max_summary", bool(examples and shown), "larger: every summary of training or dev is longer")
    PartialState().print(f"{len(train) - len(examples)} texts left out: summaries over {settings.max_summary} tokens.")
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)

    def measure(answers: Any) -> dict[str, float]:
        measures = rouge(decode(answers.predictions, tokenizer), [article.references for article in dev])
        return {"score": sum(measures.values()) / len(measures), **measures}

    trainer = RecipeTrainer(
        settings,
        model,
        args=training_arguments(settings, predict_with_generate=True, per_device_eval_batch_size=16),
        train_dataset=examples,
        eval_dataset=encode(dev, settings.max_summary),
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=measure,
    )
    best = trainer.fit()
    trainer.compute_metrics = None  # it knows the references of dev
    tested = encode(test, settings.max_summary)
    summaries = decode(trainer.predict(tested, num_beams=settings.beams).predictions, tokenizer)
    write_lines(folder / "summaries.txt", summaries)
    references = [article.references for article in test]
    measures = {
        **trainer.summary(),
        "data": settings.train,
        "dev_rouge": round(trainer.best, 2),
        **rouge(summaries, references),
        **rouge(summaries, [own[:1] for own in references], "first_"),
        **rouge([article.lead for article in test], references, "lead_"),
        "test_texts": len(test),
        "words": round(sum(len(summary.split()) for summary in summaries) / len(test), 1),
        "cut": sum(len(row["input_ids"]) >= settings.max_tokens for row in tested),
        **head_statistics(best, collated(shown[:64], collator, 16, best.device), FIELDS),
    }
    card = {"task": "summarization", "data": name_of(settings.train), "main_measures": list(KINDS)}
    finish(settings, "summarization", FIELDS, measures, **card)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
