"""Small tasks whose circuits people look for: prompts, corrupted partners, right and wrong answers; nothing is downloaded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_entmax.batches.prepare import evaluation_mode, prepare_batch

WOMEN = [
    "Mary", "Anna", "Sarah", "Emma", "Alice", "Laura", "Julia", "Rachel", "Kate", "Susan", "Linda", "Karen", "Lisa",
    "Jessica", "Amy", "Jane", "Helen", "Diana",
]  # fmt: skip
MEN = [
    "John", "David", "Michael", "James", "Robert", "Paul", "Peter", "Mark", "Kevin", "Brian", "Eric", "Adam", "Jason",
    "Daniel", "Thomas", "Steve", "Henry", "Frank",
]  # fmt: skip
_PLACES = [
    "store", "school", "office", "park", "station", "garden", "hospital", "restaurant",
]  # fmt: skip
_THINGS = [
    "book", "drink", "key", "letter", "ring", "ball", "basket",
]  # fmt: skip
_NOUNS = [
    "key", "dog", "book", "boy", "girl", "doctor", "driver", "teacher", "student", "picture", "letter", "car",
]  # fmt: skip
_DISTRACTORS = [
    "cabinet", "house", "teacher", "manager", "guard", "window", "farmer", "lawyer",
]  # fmt: skip
_WARS = [
    "war", "siege", "expedition", "conflict", "famine", "drought", "crisis", "voyage",
]  # fmt: skip


@dataclass(frozen=True)
class LogitDifference:
    """Mean logit of the right answers less that of the wrong ones, at the last position.

    Attributes:
        answers: token ids, long ``[B, A]``; -1 fills rows with fewer.
        wrong: token ids, long ``[B, W]``; -1 fills rows with fewer.
    """

    answers: Tensor
    wrong: Tensor

    def __call__(self, output: Any) -> Tensor:
        """Return the metric of every prompt, ``[B]``: above 0 where the model prefers the right answers."""
        last = output.logits[:, -1]
        last = last.to(torch.promote_types(last.dtype, torch.float32))
        sides = []
        for ids in (self.answers.to(last.device), self.wrong.to(last.device)):
            real = ids >= 0
            sides.append((last.gather(1, ids.clamp(min=0)) * real).sum(1) / real.sum(1))
        return sides[0] - sides[1]


@dataclass(frozen=True)
class Task:
    """Prompts of one length and what is asked of them.

    Attributes:
        name: of the task.
        batch: what the model is called with, B rows.
        corrupted: the same shapes, with the information that decides the answer exchanged; None if there is none.
        metric: ``metric(output) -> [B]``, above 0 where the model is right.
        tokens: of every prompt, for figures.
    """

    name: str
    batch: dict[str, Tensor]
    corrupted: dict[str, Tensor] | None
    metric: Callable[[Any], Tensor]
    tokens: list[list[str]]


@dataclass(frozen=True)
class _Example:
    prompt: str
    corrupted: str
    answers: list[str]
    wrong: list[str]


def indirect_objects(tokenizer: Any, prompts: int = 16, seed: int = 0, wording: int = 0) -> Task:
    """Ask to whom: "When Mary and John went to the store, John gave a drink to" Mary, not John.

    Corrupted: a third person gives.

    Args:
        tokenizer: of the model.
        prompts: how many.
        seed: of names, places and things.
        wording: 0, 1 or 2.

    Raises:
        ValueError: if there is no such wording, or the tokenizer parts too many of the words that are answers.

    Reference:
        Wang et al. 2022, Interpretability in the Wild, section 2.
    """
    wordings = (
        "When {a} and {b} went to the {place}, {c} gave a {thing} to",
        "After {a} and {b} left the {place}, {c} wanted to give a {thing} to",
        "{a} and {b} had a long day at the {place}. Afterwards {c} handed the {thing} to",
    )

    def example(choose: random.Random) -> _Example:
        a, b, other = choose.sample(WOMEN + MEN, 3)
        options = {"a": a, "b": b, "place": choose.choice(_PLACES), "thing": choose.choice(_THINGS)}
        text = _pick(wordings, wording)
        return _Example(text.format(c=b, **options), text.format(c=other, **options), [f" {a}"], [f" {b}"])

    return _task("indirect objects", tokenizer, prompts, seed, example)


def greater_than(tokenizer: Any, prompts: int = 16, seed: int = 0, wording: int = 0) -> Task:
    """Ask for a later year: "The war lasted from the year 1732 to the year 17" goes on with a digit above 3. Corrupted: 1702.

    Suits tokenizers that give every digit a token of its own; arguments and errors as for `indirect_objects`.

    Reference:
        Hanna, Liu, Variengien 2023, How does GPT-2 compute greater-than?, section 2.
    """
    wordings = (
        "The {event} lasted from the year {year} to the year {century}",
        "In {year} the {event} began, and it ended in {century}",
        "The {event} started in {year} and went on until {century}",
    )

    def example(choose: random.Random) -> _Example:
        century, tens, ones = choose.randint(12, 18), choose.randint(2, 7), choose.randint(1, 9)
        options = {"event": choose.choice(_WARS), "century": century}
        text = _pick(wordings, wording)
        digits = [str(digit) for digit in range(10)]
        prompt = text.format(year=f"{century}{tens}{ones}", **options)
        corrupted = text.format(year=f"{century}0{ones}", **options)
        return _Example(prompt, corrupted, digits[tens + 1 :], digits[:tens])

    return _task("greater-than", tokenizer, prompts, seed, example)


def induction(tokenizer: Any, prompts: int = 16, seed: int = 0, wording: int = 0) -> Task:
    """Ask what came next: random words, then the first of them again. Corrupted: two words changed places.

    Arguments and errors as for `indirect_objects`; a wording is a length: 8, 12 or 16 words.

    Reference:
        Olsson et al. 2022, In-context Learning and Induction Heads, section "Definition".
    """
    lengths = (8, 12, 16)
    words = [
        word for word in _NOUNS + _DISTRACTORS + _THINGS + _PLACES + _WARS if len(_ids(tokenizer, f" {word}")) == 1
    ]

    def example(choose: random.Random) -> _Example:
        length = _pick(lengths, wording)
        first = choose.sample(list(dict.fromkeys(words)), length)
        shown = choose.randint(1, length // 2)  # words of the repetition that are given
        other = choose.choice([place for place in range(length) if abs(place - shown) > 1 and place >= shown])
        changed = list(first)
        changed[shown], changed[other] = first[other], first[shown]
        again = first[:shown]
        prompt, corrupted = (" " + " ".join([*once, *again]) for once in (first, changed))
        return _Example(prompt, corrupted, [f" {first[shown]}"], [f" {first[other]}"])

    return _task("induction", tokenizer, prompts, seed, example)


def pronouns(tokenizer: Any, prompts: int = 16, seed: int = 0, wording: int = 0) -> Task:
    """Ask for a pronoun: "Mary went to the store because" she, not he. Corrupted: a name of the other gender.

    Arguments and errors as for `indirect_objects`.

    Reference:
        Mathwin et al. 2023, Identifying a Preliminary Circuit for Predicting Gendered Pronouns in GPT-2 Small.
    """
    wordings = (
        "So {name} is a really great friend, isn't",
        "At the {place}, {name} took off",
        "{name} went to the {place} because",
    )
    words = ((" she", " he"), (" her", " his"), (" she", " he"))

    def example(choose: random.Random) -> _Example:
        woman, place = choose.random() < 0.5, choose.choice(_PLACES)
        names = [choose.choice(WOMEN), choose.choice(MEN)]
        texts = [_pick(wordings, wording).format(name=name, place=place) for name in (names if woman else names[::-1])]
        hers, his = _pick(words, wording)
        answer, wrong = (hers, his) if woman else (his, hers)
        return _Example(texts[0], texts[1], [answer], [wrong])

    return _task("pronouns", tokenizer, prompts, seed, example)


def agreement(tokenizer: Any, prompts: int = 16, seed: int = 0, wording: int = 0) -> Task:
    """Ask for a verb: "The keys near the cabinet" are, not is. Corrupted: the number of the subject, not that of the distractor.

    Arguments and errors as for `indirect_objects`.

    Reference:
        Linzen, Dupoux, Goldberg 2016, Assessing the Ability of LSTMs to Learn Syntax-Sensitive Dependencies, section 1.
    """
    wordings = (
        "The {subject} near the {other}",
        "Yesterday the {subject} behind the {other}",
        "The {subject} that the {other} liked",
    )
    verbs = ((" is", " are"), (" was", " were"), (" is", " are"))

    def example(choose: random.Random) -> _Example:
        many = choose.random() < 0.5
        subject, other = choose.choice(_NOUNS), choose.choice(_DISTRACTORS)
        numbers = [subject + "s", subject] if many else [subject, subject + "s"]
        distractor = other if many else other + "s"  # of the other number than the subject
        texts = [_pick(wordings, wording).format(subject=own, other=distractor) for own in numbers]
        one, more = _pick(verbs, wording)
        answer, wrong = (more, one) if many else (one, more)
        return _Example(texts[0], texts[1], [answer], [wrong])

    return _task("agreement", tokenizer, prompts, seed, example)


TASKS: dict[str, Callable[..., Task]] = {
    "indirect objects": indirect_objects,
    "greater-than": greater_than,
    "induction": induction,
    "pronouns": pronouns,
    "agreement": agreement,
}


@torch.no_grad()
def accuracy(model: Any, task: Task) -> float:
    """Return the share of the prompts whose metric is above 0: a circuit is worth looking for where the model does the task."""
    with evaluation_mode(model):
        return float((task.metric(model(**prepare_batch(model, task.batch).inputs)) > 0).float().mean())


def _pick(choices: Sequence[Any], wording: int) -> Any:
    if not 0 <= wording < len(choices):
        raise ValueError(f"wording={wording!r} does not exist: choose 0 to {len(choices) - 1}.")
    return choices[wording]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _task(name: str, tokenizer: Any, prompts: int, seed: int, example: Callable[[random.Random], _Example]) -> Task:
    """Make a task of prompts of the most common length whose answers are single tokens."""
    if isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1:
        raise ValueError(f"prompts={prompts!r} is not allowed: give a whole number of at least 1.")
    choose = random.Random(seed)
    usable: list[tuple[list[int], list[int], list[int], list[int]]] = []
    seen: set[str] = set()
    for _ in range(40 * prompts):
        own = example(choose)
        ids, other = (tokenizer(text)["input_ids"] for text in (own.prompt, own.corrupted))
        answers, wrong = ([_ids(tokenizer, word) for word in words] for words in (own.answers, own.wrong))
        single = all(len(word) == 1 for word in answers + wrong)
        if single and len(ids) == len(other) and ids != other and own.prompt not in seen:
            seen.add(own.prompt)
            usable.append((ids, other, [word[0] for word in answers], [word[0] for word in wrong]))
    length = Counter(len(entry[0]) for entry in usable).most_common(1)
    kept = [entry for entry in usable if length and len(entry[0]) == length[0][0]][:prompts]
    if len(kept) < prompts:
        raise ValueError(
            f"{name}: only {len(kept)} of {prompts} prompts have answers that are one token and a common length with this "
            "tokenizer. Ask for fewer, or make a Task of your own."
        )
    batch, corrupted = ({"input_ids": torch.tensor([entry[side] for entry in kept])} for side in (0, 1))
    answers, wrong = (_filled([entry[side] for entry in kept]) for side in (2, 3))
    tokens = [[tokenizer.decode([token]) for token in entry[0]] for entry in kept]
    return Task(name, batch, corrupted, LogitDifference(answers, wrong), tokens)


def _filled(rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])
