"""Morphological inflection in many languages at once (Peters et al. 2019, sec. 5.1, table 1).

    python recipes/inflection.py --config recipes/configs/inflection.yaml --out runs/infl-softmax
    python recipes/inflection.py --config recipes/configs/inflection.yaml --out runs/infl-learned \
        --attention learned --output_alpha 1.5
    accelerate launch recipes/inflection.py --config ... --out ...                      # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/inflection.py --config ... --out ...          # two CPU processes
    python recipes/inflection.py --config ... --out runs/ensemble --ensemble runs/a/model runs/b/model runs/c/model
    python recipes/inflection.py --config ... --out runs/infl-softmax --resume                    # add --coverage 90 95 for sets
    python recipes/pretrained_folders.py g2p models/g2p                                           # letters to sounds, and words
    python recipes/inflection.py --config recipes/configs/inflection_pronunciation.yaml --attention learned --output_alpha 1.5 --out runs/p

The encoder reads language, tags and lemma (``<german><V><PST>gehen``), the decoder writes the form letter by letter. Data: files
of lemma, form and tags as in the CoNLL-SIGMORPHON 2018 shared task, ``{language}`` and ``{split}`` standing for both in ``--data``;
or one table (or Hub data set) that has a column ``lang`` and, if all splits are in it, ``split``. Accuracy is the share of words
that are wholly right, averaged over languages. The test set is searched with a beam that keeps account of what it drops; with
``--budget``, words whose answer it does not certify are searched exactly. With ``--coverage`` the results take rows of sets.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import DataCollatorForSeq2Seq

from common.batches import answers_of, collated
from common.folder import open_folder, write_lines
from common.from_scratch import ShapeSettings, load_ensemble
from common.heads import head_statistics, output_support
from common.results import END, columns, finish, name_of
from common.seq2seq import decode
from common.sets import check_sets, measure_sequences, report
from common.settings import option, parse
from common.trainer import RecipeTrainer, training_arguments
from common.words import Word, accuracy, accuracy_per_language, encode, first_of_each, load_or_build, read_words
from hf_entmax.generation import beam_search, exact_map

SHARES = ("optimal", "exhaustive", "single")
FIELDS = columns(
    "attention output_alpha seed data languages ensemble accuracy accuracy_per_language dev_accuracy",
    "optimal exhaustive single test_words output_support",
    "density_encoder_self support_encoder_self js_encoder_self density_cross support_cross js_cross",
    "density_decoder_self support_decoder_self js_decoder_self",
    END,
)


@dataclasses.dataclass
class Settings(ShapeSettings):
    """Settings of this recipe, beside those that all share."""

    model: str = option("", "pretrained encoder-decoder that reads a lemma without tags; default: one from scratch")
    data: str = option("morph/typology12/{language}/{split}.tsv.gz", "where the data are")
    train_split: str = option("train-medium", "what {split} is for training")
    languages: list[str] = option([], "languages to use; default: all there are")
    dev_words: int = option(100, "words per language that choose the best epoch (greedy); 0 for all")
    test_words: int = option(0, "words per language to test on; 0 for all")
    beams: int = option(5, "beam width of the test")
    budget: int = option(0, "prefixes to expand best first for a word whose answer the beam does not certify")
    dropout: float = option(0.2, "everywhere but on attention weights")
    ensemble: list[str] = option([], "folders of finished models: test their averaged probabilities, train nothing")
    coverage: list[float] = option([], "measure sets that hold the answer so often, %, e.g. 90 95; default: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("data", bool(self.data), "given: a file, or hub:OWNER/NAME@SPLIT")
        self.require_at_least(beams=1, budget=0, dev_words=0, test_words=0)
        self.require("coverage", all(0 < share < 100 for share in self.coverage), "between 0 and 100")
        self.require("coverage", not (self.coverage and self.ensemble), "left out with ensemble: sets are one model's")


def search_test(members: list[Any], words: list[Word], tokenizer: Any, settings: Settings) -> dict[str, Any]:
    """Beam search with a certificate over the test words, then exact search if it has a budget; several models are averaged."""
    search = functools.partial(exact_map, budget=settings.budget) if settings.budget else beam_search

    def answer(part: list[Word]) -> list[tuple[Any, bool, bool, bool, str]]:
        batch = tokenizer([w.source for w in part], padding=True, return_tensors="pt").to(members[0].device)
        found = search(members, dict(batch), num_beams=settings.beams)
        return [(r.best or [], r.optimal, r.exhaustive, r.exhaustive and len(r) == 1, r.reason) for r in found]

    rows = answers_of(words, answer, lambda word: len(word.lemma) + len(word.tags), 200)
    answers = tokenizer.batch_decode([row[0] for row in rows], skip_special_tokens=True)
    lines = ((w.language, w.lemma, w.form, ";".join(w.tags), a) for w, a in zip(words, answers, strict=True))
    write_lines(Path(settings.out) / "answers.tsv", map("\t".join, sorted(lines)))
    for why, count in Counter(row[4] for row in rows if not row[1]).most_common():
        PartialState().print(f"not proved to be the most probable: {count} of {len(rows)}, {why}")
    return {
        "test_words": len(rows),
        "accuracy": round(accuracy(words, answers), 2),
        "accuracy_per_language": " ".join(f"{own}={v:.1f}" for own, v in accuracy_per_language(words, answers).items()),
        **{name: round(100 * statistics.fmean(row[place] for row in rows), 2) for place, name in enumerate(SHARES, 1)},
    }


def main(settings: Settings) -> None:
    train, dev, test = (read_words(settings, split) for split in ("train", "dev", "test"))
    dev, test = first_of_each(dev, settings.dev_words), first_of_each(test, settings.test_words)
    if settings.smoke:
        train, dev, test = (first_of_each(words, 4) for words in (train, dev, test))
    dev.sort(key=lambda word: len(word.lemma))  # those that are answered together are similarly long
    check_sets(settings)
    if settings.ensemble:
        tokenizer, members, measures = load_ensemble(settings.ensemble)
    fields = () if settings.coverage else FIELDS
    open_folder(settings, "inflection", fields)
    if not settings.ensemble:
        set_seed(settings.seed)
        tokenizer, model = load_or_build(settings, train, dev + test)
        examples, held = (encode(words, tokenizer, model) for words in (train, dev))
        trainer = RecipeTrainer(
            settings,
            model,
            args=training_arguments(settings, predict_with_generate=True, per_device_eval_batch_size=200),
            train_dataset=examples,
            eval_dataset=held,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            processing_class=tokenizer,
            compute_metrics=lambda found: {"score": accuracy(dev, decode(found.predictions, tokenizer))},
        )
        members = [trainer.fit()]
        measures = trainer.summary() | {"dev_accuracy": round(trainer.best, 2)}
    members = [member.to(PartialState().device).eval() for member in members]
    measures |= {"data": settings.train_split, "languages": len({word.language for word in test})}
    measures |= search_test(members, test, tokenizer, settings)
    best, device = members[0], PartialState().device
    shown = collated(encode(dev, tokenizer, best), DataCollatorForSeq2Seq(tokenizer, model=best), 100, device)
    measures |= {"output_support": output_support(members, shown), "ensemble": len(settings.ensemble) or ""}
    if not settings.ensemble:  # its heads have nothing to do with one another
        measures |= head_statistics(best, shown, FIELDS)
    if settings.coverage:
        sets = measure_sequences(best, encode(test, tokenizer, best), tokenizer, settings)
        report(settings, sets, data=settings.train_split, train_steps=measures["best_step"])
    card = {"task": "text2text-generation", "data": name_of(settings.data), "main_measures": ["accuracy"]}
    finish(settings, "inflection", fields, measures, **card)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
