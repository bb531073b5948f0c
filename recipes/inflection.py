"""Morphological inflection in many languages at once (Peters et al. 2019, sec. 5.1, table 1).

    python recipes/inflection.py --config recipes/configs/inflection.yaml --out runs/infl-softmax
    python recipes/inflection.py --config recipes/configs/inflection.yaml --out runs/infl-learned \
        --attention learned --output_alpha 1.5
    accelerate launch recipes/inflection.py --config ... --out ...                      # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/inflection.py --config ... --out ...          # two CPU processes
    python recipes/inflection.py --config ... --out runs/ensemble --ensemble runs/a/model runs/b/model runs/c/model
    python recipes/inflection.py --config ... --out runs/infl-softmax --resume
    python recipes/inflection.py --config ... --out runs/infl-softmax --resume --coverage 90 95 --results sets.csv

The encoder reads language, tags and lemma (``<german><V><PST>gehen``), the decoder writes the form letter by letter.
Attention is softmax, a fixed alpha or learned; so is the output. Data: files of lemma, form and tags as in the CoNLL-SIGMORPHON
2018 shared task, ``{language}`` and ``{split}`` standing for both in ``--data``; or one table (or Hub data set) that has a
column ``lang`` and, if all splits are in it, ``split``. Accuracy is the share of words that are wholly right, averaged over
languages. The test set is searched with a beam that keeps account of what it drops; with ``--budget``, words whose answer it does
not certify are searched exactly. ``--coverage`` measures conformal sets, of one step and of the whole answer, on random splits of
the test set; the results then take its rows.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import set_seed
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers import DataCollatorForSeq2Seq as Collator

from common.batches import Batches, answers_of, collated
from common.finish import check_finish, finish
from common.from_scratch import ShapeSettings, build_seq2seq, seq2seq_tokenizer
from common.heads import head_statistics, output_support
from common.results import END, columns, name_of
from common.run import Run, check_model
from common.sets import check_sets, measure_answers, measure_labels, report
from common.settings import option, parse
from common.training import Training, attention_and_output, make_sparse
from hf_entmax.analysis.reading.tables import languages_of, read_lists
from hf_entmax.generation import EntmaxLogitsProcessor, beam_search, enumerate_hypotheses, exact_map
from hf_entmax.ops import support_temperature

FIELDS = columns(
    "attention output_alpha seed data languages ensemble accuracy accuracy_per_language dev_accuracy",
    "optimal exhaustive single test_words output_support",
    "density_encoder_self support_encoder_self js_encoder_self density_cross support_cross js_cross",
    "density_decoder_self support_decoder_self js_decoder_self",
    END,
)

#: How many answers of a set are listed at most, and prefixes expanded for it.
MOST_ANSWERS, MOST_PREFIXES = 200, 1000


@dataclasses.dataclass
class Settings(ShapeSettings):
    """Settings of this recipe, beside those that all share."""

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


@dataclasses.dataclass(frozen=True)
class Word:
    """One question: the form of a lemma."""

    language: str
    lemma: str
    form: str
    tags: tuple[str, ...]

    @property
    def source(self) -> str:
        """What the encoder reads."""
        return f"<{self.language}>" + "".join(f"<{tag}>" for tag in self.tags) + self.lemma


def read_words(settings: Settings, split: str) -> list[Word]:
    """All words of a split (``train``, ``dev``, ``test``) in the chosen languages."""
    where = settings.data
    named = settings.train_split if split == "train" else split
    if "{language}" in where:
        rows = [
            (language, *row)
            for language in settings.languages or languages_of(where)
            for row in read_fields(where.format(language=language, split=named), ("lemma", "form", "tags"))
        ]
    else:
        # One table for all languages; with a column `split` where {split} does not name files of their own.
        columns = ["lang", "lemma", "form", "tags", *([] if "{split}" in where else ["split"])]
        table = read_fields(where.replace("{split}", named), columns)
        rows = [row[:4] for row in table if len(row) == 4 or row[4] == split]
        rows = [row for row in rows if not settings.languages or row[0] in settings.languages]
    words = [Word(language, lemma, form, tuple(tags.split(";"))) for language, lemma, form, tags in rows]
    if missing := sorted(set(settings.languages) - {word.language for word in words}):
        raise ValueError(f"languages: {where} has no {split} words of {', '.join(missing)}.")
    if not words:
        raise ValueError(f"{where}: no words for the split {split!r}.")
    return words


def read_fields(where: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Columns of a table; a list of tags, as JSON may have it, becomes what tables have: ``V;PST``."""
    joined = [";" if column == "tags" else " " for column in columns]
    return [tuple(j.join(texts) for j, texts in zip(joined, row, strict=True)) for row in read_lists(where, columns)]


def first_of_each(words: list[Word], count: int) -> list[Word]:
    """At most ``count`` words per language; 0 keeps all."""
    taken: dict[str, int] = defaultdict(int)
    kept = []
    for word in words:
        taken[word.language] += 1
        if not count or taken[word.language] <= count:
            kept.append(word)
    return kept


def build_tokenizer(words: list[Word]) -> PreTrainedTokenizerFast:
    """Single characters, and a special token for every language and tag of the training data."""
    special = sorted({f"<{name}>" for word in words for name in (word.language, *word.tags)})
    characters = sorted({character for word in words for character in word.lemma + word.form})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return seq2seq_tokenizer(tokenizer, special)


def encode(words: list[Word], tokenizer: Any) -> list[dict[str, list[int]]]:
    sources = tokenizer([word.source for word in words])["input_ids"]
    targets = tokenizer(text_target=[word.form for word in words])["input_ids"]
    return [{"input_ids": s, "labels": t} for s, t in zip(sources, targets, strict=True)]


def build_model(settings: Settings, tokenizer: Any, longest: int) -> Any:
    """A small BART from scratch, patched as the settings say; an answer starts with the token that ends it."""
    more = {"decoder_start_token_id": 1, "max_position_embeddings": longest + 16}
    return make_sparse(build_seq2seq(settings, len(tokenizer), longest, **more), settings)


def load_ensemble(folders: list[str]) -> tuple[Any, list[Any], dict[str, Any]]:
    """Tokenizer, models, and what kind they are; kinds that differ are joined by ``+``.

    Raises:
        ValueError: if the models do not know the same symbols.
    """
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    for folder, other in zip(folders, tokenizers, strict=True):
        if other.get_vocab() != tokenizers[0].get_vocab():
            raise ValueError(
                f"ensemble: {folder} does not have the symbols of {folders[0]}; average models that were trained on the same data."
            )
    members = [AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in folders]
    kinds = [attention_and_output(member) for member in members]
    return tokenizers[0], members, {key: "+".join(dict.fromkeys(str(kind[key]) for kind in kinds)) for key in kinds[0]}


def accuracy_per_language(words: list[Word], answers: list[str]) -> dict[str, float]:
    """Share of words that are wholly right, %."""
    right = defaultdict(list)
    for word, answer in zip(words, answers, strict=True):
        right[word.language].append(answer == word.form)
    return {language: 100 * sum(flags) / len(flags) for language, flags in sorted(right.items())}


def ask(words: list[Word], tokenizer: Any, run: Run, answer: Callable[[dict[str, Any]], Sequence[Any]]) -> list[Any]:
    """What is answered to the words in batches of similar length, shared by the processes."""

    def answers(part: list[Word]) -> Sequence[Any]:
        sources = [word.source for word in part]
        return answer(dict(tokenizer(sources, padding=True, return_tensors="pt").to(run.accelerator.device)))

    return answers_of(words, answers, lambda word: len(word.lemma) + len(word.tags), 200)


def greedy_accuracy(model: Any, words: list[Word], tokenizer: Any, run: Run) -> dict[str, float]:
    """Accuracy of greedy answers, averaged over languages: quick, for choosing the epoch."""
    plain = run.accelerator.unwrap_model(model)
    ids = ask(words, tokenizer, run, lambda batch: plain.generate(**batch, num_beams=1).tolist())
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return {"score": statistics.fmean(accuracy_per_language(words, answers).values())}


def sparsity(members: list[Any], words: list[Word], tokenizer: Any, run: Run) -> dict[str, float]:
    """Nonzero symbols of the output and nonzero weights of the heads, given the right answers. On every process alike."""
    collator = Collator(tokenizer, model=members[0])
    batches = collated(encode(words, tokenizer), collator, 100, run.accelerator.device)
    measures = {"output_support": output_support(members, batches)}
    if len(members) == 1:  # the heads of an ensemble have nothing to do with one another
        measures |= head_statistics(members[0], batches, FIELDS)
    return measures


def search_test(members: list[Any], words: list[Word], tokenizer: Any, run: Run) -> dict[str, Any]:
    """Beam search with a certificate over the test words, then exact search if it has a budget; several models are averaged."""
    beams, budget = run.settings.beams, run.settings.budget

    def search(batch: dict[str, Any]) -> list[tuple[Any, bool, bool, int, str]]:
        if budget:
            found = exact_map(members, batch, budget, num_beams=beams)
        else:
            found = beam_search(members, batch, num_beams=beams)
        return [([] if r.best is None else r.best, r.optimal, r.exhaustive, len(r), r.reason) for r in found]

    rows = ask(words, tokenizer, run, search)
    answers = tokenizer.batch_decode([row[0] for row in rows], skip_special_tokens=True)
    lines = ((w.language, w.lemma, w.form, ";".join(w.tags), a) for w, a in zip(words, answers, strict=True))
    run.write("answers.tsv", map("\t".join, sorted(lines)))
    each = accuracy_per_language(words, answers)
    reasons = Counter(row[4] for row in rows if not row[1])
    run.say(
        "".join(f"not proved to be the most probable: {n} of {len(rows)}, {why}\n" for why, n in reasons.most_common())
    )
    return {
        "accuracy": round(statistics.fmean(each.values()), 2),
        "accuracy_per_language": " ".join(f"{language}={value:.1f}" for language, value in each.items()),
        "optimal": round(100 * statistics.fmean(row[1] for row in rows), 2),
        "exhaustive": round(100 * statistics.fmean(row[2] for row in rows), 2),
        "single": round(100 * statistics.fmean(row[2] and row[3] == 1 for row in rows), 2),
        "test_words": len(rows),
    }


def measure_sets(member: Any, words: list[Word], tokenizer: Any, run: Run) -> list[dict[str, Any]]:
    """Coverage and size of conformal sets: of one step of each answer, drawn at random, and of whole answers."""
    settings, device = run.settings, run.accelerator.device
    alpha = settings.output_alpha if settings.output_alpha > 1 else 1.5
    generator = torch.Generator().manual_seed(settings.seed)
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []
    scores, costs = [], []
    for batch in collated(encode(words, tokenizer), Collator(tokenizer, model=member), 100, device):
        with torch.no_grad():
            logits = member(**batch).logits.float().cpu()
        for rows, labels in zip(logits, batch["labels"].cpu(), strict=True):
            rows, labels = rows[labels != -100], labels[labels != -100]
            one = int(torch.randint(len(labels), (1,), generator=generator))
            steps.append((rows[one], labels[one]))
            scores.append(support_temperature(rows, labels, alpha).max())
            costs.append(-rows.double().log_softmax(-1).gather(-1, labels[:, None]).sum())

    def listed(places: list[int], **limits: Any) -> list[tuple[int, bool]]:
        batch = tokenizer([words[i].source for i in places], padding=True, return_tensors="pt").to(device)
        found = enumerate_hypotheses(member, dict(batch), MOST_ANSWERS, budget=MOST_PREFIXES, **limits)
        return [(len(one), len(one) < MOST_ANSWERS and one.expansions < MOST_PREFIXES) for one in found]

    def supports(places: list[int], threshold: float) -> list[tuple[int, bool]]:
        return listed(places, logits_processor=[EntmaxLogitsProcessor(alpha, threshold)])

    def likely(places: list[int], threshold: float) -> list[tuple[int, bool]]:
        return listed(places, min_mass=math.exp(-threshold))

    wanted, seed = settings.coverage, settings.seed
    logits, labels = map(torch.stack, zip(*steps, strict=True))
    records = measure_labels(logits, labels, settings.output_alpha, wanted, seed)
    records = [{"unit": "step", **record} for record in records]
    answers = {f"entmax {alpha:g}": (scores, supports)}
    if settings.output_alpha == 1.0:
        answers["probability of the answer"] = (costs, likely)
    for method, (own, listing) in answers.items():
        for record in measure_answers(torch.stack(own), wanted, seed, listing):
            records.append({"unit": "answer", "method": method, **record})
    return records


def main(settings: Settings) -> None:
    train, dev, test = (read_words(settings, split) for split in ("train", "dev", "test"))
    dev, test = first_of_each(dev, settings.dev_words), first_of_each(test, settings.test_words)
    if settings.smoke:
        train, dev, test = (first_of_each(words, 4) for words in (train, dev, test))
    for folder in settings.ensemble:
        check_model(folder)
    fields = () if settings.coverage else FIELDS
    check_finish(settings, fields)
    check_sets(settings)
    run = Run(settings, "inflection")
    measures: dict[str, Any] = {}
    if settings.ensemble:
        tokenizer, members, kind = load_ensemble(settings.ensemble)
        measures |= kind
    else:
        set_seed(settings.seed)
        tokenizer = build_tokenizer(train)
        examples = encode(train, tokenizer)
        longest = max(len(side) for example in examples for side in example.values())
        longest = max(longest, *(len(ids) for ids in tokenizer([word.source for word in dev + test])["input_ids"]))
        model = build_model(settings, tokenizer, longest)
        run.say(f"{len(train)} training words, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
        collate = Collator(tokenizer, model=model)
        batches = Batches.for_training(run, examples, collate, lambda row: len(row["input_ids"]) + len(row["labels"]))
        training = Training(run, model, tokenizer, batches, lambda m: greedy_accuracy(m, dev, tokenizer, run))
        training.fit()
        measures |= training.summary() | {"dev_accuracy": round(training.progress.best, 2)}
        members = [AutoModelForSeq2SeqLM.from_pretrained(run.folder / "model")]
    members = [member.to(run.accelerator.device).eval() for member in members]
    measures |= search_test(members, test, tokenizer, run)
    measures |= sparsity(members, dev, tokenizer, run)
    measures |= {
        "data": settings.train_split,
        "languages": len({word.language for word in test}),
        "ensemble": len(settings.ensemble) or "",
    }
    if settings.coverage:
        records = measure_sets(members[0], test, tokenizer, run)
        report(run, records, data=settings.train_split, train_steps=training.progress.best_step)
    finish(run, fields, measures, task="text2text-generation", data=name_of(settings.data), main_measures=["accuracy"])


if __name__ == "__main__":
    main(parse(Settings, __doc__))
