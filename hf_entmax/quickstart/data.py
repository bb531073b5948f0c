"""The verbs of the quickstart: reading the table, splitting it by lemma, a tokenizer of characters, batches.

A question is a tag and a lemma (``"<past> dream"``), its answers are the forms that the table lists (``dreamed``,
``dreamt``). No lemma is in both the training and the held-out part.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

#: Form of a verb -> its tag in the vocabulary of characters, and how other models are asked for it.
SLOTS = {
    "third_person": ("<third>", "third person singular: "),
    "past": ("<past>", "past tense: "),
    "past_participle": ("<participle>", "past participle: "),
    "present_participle": ("<ing>", "present participle: "),
}
TAGS = [tag for tag, _ in SLOTS.values()]
#: How often each irregular past form is in the training data: a list of verbs has few of them, running text has many.
IRREGULAR_COPIES = 2
#: Always in the training part: the verb whose tree of hypotheses is drawn, so that both its forms have been seen.
AMBIGUOUS_VERB = "dream"

#: What accuracies are reported for: name of the group -> what it holds.
GROUPS = {
    "regular": "regular verbs, all four forms",
    "irregular": "irregular verbs, past and participle",
    "irregular_like_training": "- inflected like a verb seen in training (mislead, lead)",
    "irregular_unlike_training": "- unlike any verb seen in training",
    "mixed": "verbs with both kinds of form, past and participle",
    "present": "irregular and mixed verbs, -s and -ing forms",
}


@dataclasses.dataclass(frozen=True)
class Verb:
    """One row of the table: ``forms[slot]`` lists the variants; ``kind`` is ``regular``, ``irregular`` or ``mixed``."""

    lemma: str
    forms: dict[str, tuple[str, ...]]
    kind: str


@dataclasses.dataclass(frozen=True)
class Question:
    """A lemma and the form asked for; every one of ``answers`` is right. ``groups`` are keys of ``GROUPS``."""

    lemma: str
    slot: str
    answers: tuple[str, ...]
    groups: tuple[str, ...] = ()


def table_path() -> Path:
    """Find the verb table, inside an installed package or in ``recipes/data`` of a checkout."""
    package = Path(__file__).parents[1]
    places = [folder / "data" / "english_verbs.tsv" for folder in (package, package.parent / "recipes")]
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"The verb table was found neither at {places[0]} nor at {places[1]}. Reinstall hf_entmax, or run from a complete checkout."
    )


def read_verbs(path: Path | None = None) -> list[Verb]:
    """Read all verbs of the table, sorted by lemma."""
    lines = (path or table_path()).read_text(encoding="utf-8").splitlines()
    header, *rows = [line.split("\t") for line in lines]
    expected = ["lemma", *SLOTS, "class"]
    if header != expected:
        raise ValueError(f"{path or table_path()} has the columns {header}; {expected} are expected.")
    forms = lambda row: (tuple(cell.split("|")) for cell in row[1:5])  # noqa: E731
    return [Verb(row[0], dict(zip(SLOTS, forms(row), strict=True)), row[5]) for row in rows]


def split_verbs(verbs: Sequence[Verb], seed: int = 0, held_out: float = 0.12) -> tuple[list[Verb], list[Verb]]:
    """Split into training and held-out verbs, a share ``held_out`` of each class, so that both parts have the same mixture."""
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out={held_out!r} is not allowed: give a share of the verbs in (0, 1).")
    rng = random.Random(seed)
    train, test = [], []
    for kind in ("regular", "irregular", "mixed"):
        own = [verb for verb in verbs if verb.kind == kind]
        rng.shuffle(own)
        own.sort(key=lambda verb: verb.lemma == AMBIGUOUS_VERB)  # stable: it goes last, where the training part is
        count = max(1, round(held_out * len(own)))
        test += own[:count]
        train += own[count:]
    return train, test


def questions(verbs: Iterable[Verb], known: Iterable[Verb] = ()) -> list[Question]:
    """Ask four questions per verb, with the groups that they count in.

    An irregular verb counts as like the training verbs, ``known``, when a prefix explains its difference from one
    (``mislead`` from ``lead``, ``understand`` and ``withstand`` from ``stand``, whether that is a verb of training or not).
    """
    verbs, known = list(verbs), list(known)
    parents = _parents([*verbs, *known])
    seen = {parents[verb.lemma] for verb in known}
    asked = []
    for verb in verbs:
        for slot in SLOTS:
            if verb.kind != "regular" and slot not in ("past", "past_participle"):
                groups = ("present",)
            elif verb.kind != "irregular":
                groups = (verb.kind,)
            else:
                like = "irregular_like_training" if parents[verb.lemma] in seen else "irregular_unlike_training"
                groups = ("irregular", like)
            asked.append(Question(verb.lemma, slot, verb.forms[slot], groups))
    return asked


def training_questions(known: Sequence[Verb]) -> list[Question]:
    """Ask every question about these verbs, those with irregular answers more than once."""
    asked = questions(known)
    return asked + (IRREGULAR_COPIES - 1) * [q for q in asked if q.groups[0] in ("irregular", "mixed")]


def _parents(verbs: Sequence[Verb]) -> dict[str, str]:
    """Find for each lemma the shortest one that makes it, and all its past forms, by the same prefix; else itself."""
    by_lemma = {verb.lemma: verb for verb in verbs}

    def derives(verb: Verb, base: Verb) -> bool:
        prefix = verb.lemma.removesuffix(base.lemma)
        pairs = [(base.forms[slot], verb.forms[slot]) for slot in ("past", "past_participle")]
        return all({prefix + form for form in bases} & set(forms) for bases, forms in pairs)

    parents = {}
    for lemma, verb in by_lemma.items():
        suffixes = [lemma[i:] for i in range(len(lemma) - 2, 0, -1)]
        parents[lemma] = next((s for s in suffixes if s in by_lemma and derives(verb, by_lemma[s])), lemma)
    return parents


def build_tokenizer(verbs: Iterable[Verb]) -> PreTrainedTokenizerFast:
    """Build a tokenizer of single characters, with one special token per form (``<past>``, ...)."""
    words = (word for verb in verbs for word in (verb.lemma, *itertools.chain(*verb.forms.values())))
    characters = sorted(set(itertools.chain(*words)))
    special = ["<pad>", "</s>", "<unk>", *TAGS]
    vocabulary = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Fuse()
    end = ("</s>", vocabulary["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=TAGS,
        clean_up_tokenization_spaces=False,
    )


def source_text(question: Question, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the encoder reads: ``<past> dream`` for a tokenizer that has the tags, ``past tense: dream`` for others."""
    tag, words = SLOTS[question.slot]
    return (f"{tag} " if tag in tokenizer.get_vocab() else words) + question.lemma


def training_set(asked: Iterable[Question], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Make a data set of the token ids of all pairs: a question with several answers gives one pair for each."""
    pairs = [(source_text(question, tokenizer), answer) for question in asked for answer in question.answers]
    sources = tokenizer([source for source, _ in pairs])
    labels = tokenizer(text_target=[answer for _, answer in pairs])["input_ids"]
    lengths = [len(s) + len(t) for s, t in zip(sources["input_ids"], labels, strict=True)]
    columns = {name: sources[name] for name in ("input_ids", "attention_mask")}
    return Dataset.from_dict(columns | {"labels": labels, "length": lengths})


def batches(
    asked: Sequence[Question], tokenizer: PreTrainedTokenizerBase, batch_size: int = 512
) -> Iterable[tuple[list[Question], BatchEncoding]]:
    """Yield padded encoder inputs of questions sorted by length, with the questions of each batch."""
    ordered = sorted(asked, key=lambda question: len(question.lemma))
    for start in range(0, len(ordered), batch_size):
        part = ordered[start : start + batch_size]
        texts = [source_text(question, tokenizer) for question in part]
        yield part, tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)


def labelled_batches(
    asked: Sequence[Question], tokenizer: PreTrainedTokenizerBase, batch_size: int = 128
) -> list[BatchEncoding]:
    """Make batches with the first right answers as labels, padded with -100."""
    found = []
    for part, inputs in batches(asked, tokenizer, batch_size):
        firsts = [question.answers[0] for question in part]
        encoded: Any = tokenizer(text_target=firsts, padding=True, return_tensors="pt")
        inputs["labels"] = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        found.append(inputs)
    return found
