"""What a search returns: hypotheses with probabilities, and what has been proved about them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence


@dataclasses.dataclass
class SearchResult:
    """The hypotheses that a search found for one input, most probable first.

    Attributes:
        sequences: token ids of each hypothesis: the new tokens alone, without the prompt (or the start token of a
            decoder), with the final end-of-sequence token where there is one.
        log_probabilities: ``log p(y | x)`` of each, in nats, added up in float64.
        finished: whether each ended by itself; False where it ran into ``max_new_tokens``.
        optimal: True only if the first hypothesis is finished and proved to be at least as probable as every other
            sequence: as every hypothesis found and every prefix that was dropped or did not finish.
        exhaustive: True only if the hypotheses are all there are: nothing with a probability above 0 was dropped and
            all are finished, so that their probabilities sum to 1.
        pruned_mass: total probability of all sequences that are not listed, 0.0 if ``exhaustive``.
        pruned_log_probability: log-probability of the most probable prefix that was dropped, ``-inf`` if none was.
        expansions: how many prefixes were handed to the model.
    """

    sequences: list[list[int]]
    log_probabilities: list[float]
    finished: list[bool]
    optimal: bool
    exhaustive: bool
    pruned_mass: float
    pruned_log_probability: float
    expansions: int

    @property
    def probabilities(self) -> list[float]:
        """``p(y | x)`` of each hypothesis, most probable first."""
        return [math.exp(value) for value in self.log_probabilities]

    @property
    def best(self) -> list[int] | None:
        """The most probable finished hypothesis, None if there is none."""
        return next((s for s, done in zip(self.sequences, self.finished, strict=True) if done), None)

    @property
    def reason(self) -> str:
        """Why ``optimal`` is what it is, in words."""
        best = max((v for v, done in zip(self.log_probabilities, self.finished, strict=True) if done), default=None)
        open_ = max(
            (v for v, done in zip(self.log_probabilities, self.finished, strict=True) if not done), default=None
        )
        if self.optimal:
            return "all hypotheses are known" if self.exhaustive else "nothing that was dropped can be more probable"
        if best is None:
            return "no hypothesis ended: raise max_new_tokens"
        if open_ is not None and open_ >= max(best, self.pruned_log_probability):
            return "a hypothesis that was cut off by max_new_tokens is more probable"
        if self.pruned_log_probability > best:
            return "a prefix that was dropped is more probable: more beams, or sparser outputs"
        return "the two most probable are too close for rounding to decide"

    def __len__(self) -> int:
        return len(self.sequences)


def certificates_in_words(results: Sequence[SearchResult]) -> str:
    """Say how many answers are proved to be the most probable, and why the others are not.

    Args:
        results: of :func:`beam_search`, :func:`exact_map` or :func:`enumerate_hypotheses`, at least one.

    Returns:
        One sentence, such as ``"12 of 200 answers are proved to be the most probable; 188 are not: a prefix that was dropped is
        more probable: more beams, or sparser outputs"``.

    Raises:
        ValueError: if there are no results.
    """
    if not results:
        raise ValueError("there are no results to speak of: give those of a search, one per input.")
    proved = sum(result.optimal for result in results)
    reasons = Counter(result.reason for result in results if not result.optimal).most_common()
    others = "".join(f"; {count} not: {reason}" for reason, count in reasons)
    return f"{proved} of {len(results)} answers are proved to be the most probable{others}."


@dataclasses.dataclass
class SearchState:
    """What a search has come to know about one input so far."""

    finished: list[tuple[float, list[int]]] = dataclasses.field(default_factory=list)
    unfinished: list[tuple[float, list[int]]] = dataclasses.field(default_factory=list)
    pruned_log_probability: float = -math.inf
    pruned_mass: float = 0.0
    dead_mass: float = 0.0
    expansions: int = 0

    def prune(self, best: float, mass: float) -> None:
        """Record prefixes that are not followed: the log-probability of the best, the probability of all."""
        if best > -math.inf:
            self.pruned_log_probability = max(self.pruned_log_probability, best)
            self.pruned_mass += mass

    @property
    def best(self) -> float:
        """Log-probability of the best finished hypothesis, ``-inf`` if there is none."""
        return max((value for value, _ in self.finished), default=-math.inf)

    def result(self, tolerance: float) -> SearchResult:
        """Sort, and claim what can be claimed."""
        listed = [(value, True, tokens) for value, tokens in self.finished]
        listed += [(value, False, tokens) for value, tokens in self.unfinished]
        listed.sort(key=lambda entry: (-entry[0], not entry[1]))
        rivals = max([self.pruned_log_probability, *(value for value, _ in self.unfinished)], default=-math.inf)
        optimal = bool(self.finished) and (rivals == -math.inf or self.best >= rivals + math.log1p(tolerance))
        # Compared as probabilities are: not even a prefix whose probability underflows may be missing.
        exhaustive = (
            bool(self.finished)
            and not self.unfinished
            and self.pruned_log_probability == -math.inf
            and self.dead_mass == 0.0
        )
        return SearchResult(
            sequences=[tokens for _, _, tokens in listed],
            log_probabilities=[value for value, _, _ in listed],
            finished=[done for _, done, _ in listed],
            optimal=optimal,
            exhaustive=exhaustive,
            pruned_mass=min(1.0, self.pruned_mass + self.dead_mass),
            pruned_log_probability=self.pruned_log_probability,
            expansions=self.expansions,
        )
