"""Best-first search: every hypothesis in the order of its probability, and the most probable one for certain."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from typing import Any

from torch import Tensor

from hf_entmax.generation.beam import TOLERANCE, check_search_options, run_beams
from hf_entmax.generation.members import Ensemble, as_inputs, as_models, number_of_inputs, with_members, with_one_input
from hf_entmax.generation.results import Findings, SearchResult

# Continuations remembered per prefix; softmax models have as many as the vocabulary is large. The others count as
# dropped, which can cost a certificate but never falsify one.
MAX_CHILDREN = 4096


@dataclasses.dataclass
class _Children:
    """The possible continuations of one prefix, best first."""

    prefix: tuple[int, ...]
    tokens: list[int]
    log_probs: list[float]


@dataclasses.dataclass
class _BestFirst:
    """The search for one input: a priority queue of continuations.

    Siblings wait behind the best of them, so that the queue holds one entry per expanded prefix.

    Attributes:
        ensemble: prepared for this input.
        incumbent: log-probability of the best hypothesis known.
        hypotheses: how many to list.
        floor: log-probability of the least probable hypothesis worth listing.
        budget: prefixes to expand.
        batch_size: prefixes to expand at a time.
        best_only: branch and bound: drop what cannot beat the best hypothesis known, stop when it is certain.
        tolerance: relative slack of "cannot beat".
    """

    ensemble: Ensemble
    incumbent: float = -math.inf
    hypotheses: float = math.inf
    floor: float = -math.inf
    budget: int = 1000
    batch_size: int = 16
    best_only: bool = False
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        self.found, self.eos, self.order = Findings(), self.ensemble.eos_token_ids, itertools.count()
        self.queue: list[tuple[float, int, _Children, int]] = []

    @property
    def worthless(self) -> float:
        """Continuations below this log-probability are dropped."""
        if not self.best_only:
            return self.floor
        return max(self.floor, self.incumbent - math.log1p(self.tolerance))

    def run(self) -> Findings:
        """Search until nothing is left, enough is known, or the budget is spent."""
        self._expand([((), 0.0)])
        while (waiting := self._next_prefixes()) is not None:
            self._expand(waiting)
        self._drop_queue()
        return self.found

    def _next_prefixes(self) -> list[tuple[tuple[int, ...], float]] | None:
        """Take the best prefixes from the queue, listing the hypotheses that come before them; None at the end."""
        room = min(self.batch_size, self.budget - self.found.expansions)
        waiting: list[tuple[tuple[int, ...], float]] = []
        while self.queue and len(waiting) < room and not self._enough():
            negative, _, children, place = self.queue[0]
            token = children.tokens[place]
            ended = token in self.eos
            # A prefix that waits may lead to something better than this hypothesis; below the bound nothing can.
            if (ended and waiting) or -negative < self.worthless:
                break
            heapq.heappop(self.queue)
            self._push(children, place + 1)
            prefix = (*children.prefix, token)
            if ended:
                self.found.finished.append((-negative, list(prefix)))
                if self.best_only:
                    return None
            elif len(prefix) >= self.ensemble.max_new_tokens:
                self.found.unfinished.append((-negative, list(prefix)))
            else:
                waiting.append((prefix, -negative))
        return waiting or None

    def _enough(self) -> bool:
        return len(self.found.finished) + len(self.found.unfinished) >= self.hypotheses

    def _expand(self, nodes: list[tuple[tuple[int, ...], float]]) -> None:
        """Ask the models what may follow some prefixes, and queue it."""
        all_log_probs = self.ensemble.after([prefix for prefix, _ in nodes]).cpu()
        self.found.expansions += len(nodes)
        for (prefix, value), log_probs in zip(nodes, all_log_probs, strict=True):
            total = value + log_probs
            if bool((log_probs == -math.inf).all()):
                self.found.dead_mass += math.exp(value)
                continue
            self.incumbent = max(self.incumbent, float(total[self.eos].max()))
            keep = (total > -math.inf) & (total >= self.worthless)
            self._prune(total[(total > -math.inf) & ~keep])
            tokens = keep.nonzero().squeeze(-1)
            values, order = total[tokens].sort(descending=True, stable=True)
            self._prune(values[MAX_CHILDREN:])
            self._push(_Children(prefix, tokens[order][:MAX_CHILDREN].tolist(), values[:MAX_CHILDREN].tolist()), 0)

    def _push(self, children: _Children, place: int) -> None:
        if place < len(children.tokens):
            heapq.heappush(self.queue, (-children.log_probs[place], next(self.order), children, place))

    def _prune(self, log_probs: Tensor) -> None:
        if log_probs.numel():
            self.found.prune(float(log_probs.max()), float(log_probs.exp().sum()))

    def _drop_queue(self) -> None:
        """What is queued when the search ends: hypotheses are listed as far as there is room, prefixes are dropped."""
        left = [
            (value, token in self.eos, [*children.prefix, token])
            for _, _, children, place in self.queue
            for value, token in zip(children.log_probs[place:], children.tokens[place:], strict=True)
        ]
        for value, ended, tokens in sorted(left, key=lambda entry: -entry[0]):
            if ended and not self._enough():
                self.found.finished.append((value, tokens))
            else:
                self.found.prune(value, math.exp(value))


def _search_one(
    models: list[Any], inputs: list[dict[str, Any]], index: int, limits: dict[str, Any], **rest: Any
) -> Findings:
    """Best-first search for element ``index`` of a batch."""

    def body(ensemble: Ensemble) -> Findings:
        if ensemble.criteria or not ensemble.eos_token_ids:
            names = [type(criterion).__name__ for criterion in ensemble.criteria]
            raise ValueError(
                f"best-first search ends hypotheses by end-of-sequence tokens alone, not by {names}: leave them out."
            )
        return _BestFirst(ensemble, **limits).run()

    return with_one_input(models, inputs, index, body, **rest)


def enumerate_hypotheses(
    model: Any,
    inputs: Any,
    max_hypotheses: int = 100,
    min_mass: float = 0.0,
    max_new_tokens: int | None = None,
    *,
    budget: int = 10_000,
    batch_size: int = 16,
    output_alpha: float | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> list[SearchResult]:
    """All hypotheses with a probability above 0, in the order of their probability, down to a limit.

    Prefixes are expanded best first. A hypothesis is listed when nothing that is left can be more probable, so that
    a search that ends early has still found the most probable ones. The model runs without a cache, on
    ``batch_size`` prefixes at a time.

    Args:
        model: as for :func:`beam_search`; a list of models is an ensemble.
        inputs: as for :func:`beam_search`.
        max_hypotheses: list so many at most, at least 1. Prefixes cut off by ``max_new_tokens`` count, too.
        min_mass: leave out hypotheses less probable than this, in [0, 1].
        max_new_tokens: as for :func:`beam_search`.
        budget: prefixes to expand per input at most, at least 1. When it is spent, the hypotheses met so far are listed.
        batch_size: prefixes expanded at a time, at least 1.
        output_alpha: as for :func:`beam_search`.
        tolerance: as for :func:`beam_search`.
        **options: as for :func:`beam_search`; ``stopping_criteria`` are refused.

    Returns:
        One result per input. ``exhaustive`` says that the list is complete, ``pruned_mass`` what is missing.

    Raises:
        ValueError: for limits out of range, and as :func:`beam_search`.
        TypeError: as :func:`beam_search`.

    Reference:
        Peters, Niculae, Martins 2019, fig. 1.
    """
    counts = {"max_hypotheses": max_hypotheses, "budget": budget, "batch_size": batch_size}
    check_search_options(max_new_tokens=max_new_tokens, tolerance=tolerance, **counts)
    if not 0.0 <= min_mass <= 1.0:
        raise ValueError(f"min_mass={min_mass} is not allowed: it is a probability, between 0.0 and 1.0.")
    models = as_models(model)
    each = as_inputs(inputs, models)
    floor = math.log(min_mass) if min_mass > 0 else -math.inf
    limits = {"hypotheses": max_hypotheses, "floor": floor, "budget": budget, "batch_size": batch_size}
    limits |= {"tolerance": tolerance}
    shared = {"output_alpha": output_alpha, "max_new_tokens": max_new_tokens, "options": options}
    found = [_search_one(models, each, i, limits, **shared) for i in range(number_of_inputs(each))]
    return [one.result(tolerance) for one in found]


def exact_map(
    model: Any,
    inputs: Any,
    budget: int = 1000,
    num_beams: int = 5,
    max_new_tokens: int | None = None,
    *,
    batch_size: int = 16,
    output_alpha: float | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> list[SearchResult]:
    """The most probable output for certain, by branch and bound, as far as a budget goes.

        y* = argmax_y p(y | x)

    A beam search comes first; inputs that it certifies are done. For the others, prefixes are expanded best first, and
    prefixes less probable than the best hypothesis known are dropped: no continuation is more probable than its prefix.

    Args:
        model: as for :func:`beam_search`; a list of models is an ensemble.
        inputs: as for :func:`beam_search`.
        budget: prefixes to expand per input after the beam search, at least 1.
        num_beams: of the beam search, at least 1.
        max_new_tokens: as for :func:`beam_search`. Outputs longer than that are not ruled out by it: a prefix that it
            cuts off and that is more probable than the best hypothesis costs the certificate.
        batch_size: prefixes expanded at a time, at least 1.
        output_alpha: as for :func:`beam_search`.
        tolerance: as for :func:`beam_search`.
        **options: as for :func:`beam_search`; ``stopping_criteria`` are refused.

    Returns:
        One result per input, with all hypotheses met on the way. ``optimal`` says whether the first is proved to be the
        most probable output; False means that the budget or ``max_new_tokens`` did not suffice.

    Raises:
        ValueError: for limits out of range, and as :func:`beam_search`.
        TypeError: as :func:`beam_search`.

    Reference:
        Peters, Niculae, Martins 2019, sec. 4.1; Stahlberg and Byrne 2019 (exact inference by bounding with a hypothesis).
    """
    check_search_options(
        num_beams=num_beams, max_new_tokens=max_new_tokens, tolerance=tolerance, budget=budget, batch_size=batch_size
    )
    models = as_models(model)
    each = as_inputs(inputs, models)
    number_of_inputs(each)  # complains of batches that differ before the beam search
    shared: dict[str, Any] = {"output_alpha": output_alpha, "max_new_tokens": max_new_tokens, "options": options}
    beams = with_members(models, each, lambda ensemble: run_beams(ensemble, num_beams), num_beams=num_beams, **shared)
    limits = {"budget": budget, "batch_size": batch_size, "best_only": True, "tolerance": tolerance}
    results = []
    for index, beam in enumerate(beams):
        if not beam.result(tolerance).optimal:
            beam = _merged(beam, _search_one(models, each, index, limits | {"incumbent": beam.best}, **shared))
        results.append(beam.result(tolerance))
    return results


def _merged(beam: Findings, exact: Findings) -> Findings:
    """All hypotheses of both searches; the bounds of the second, which knew the best hypothesis of the first."""
    finished = {tuple(tokens): value for value, tokens in [*exact.finished, *beam.finished]}
    unfinished = {tuple(tokens): value for value, tokens in exact.unfinished}
    listed = sum(math.exp(value) for value in [*finished.values(), *unfinished.values()])
    return Findings(
        finished=[(value, list(tokens)) for tokens, value in finished.items()],
        unfinished=[(value, list(tokens)) for tokens, value in unfinished.items()],
        pruned_log_probability=exact.pruned_log_probability,
        # What the second search dropped may hold hypotheses of the first: all that is not listed is the missing mass.
        pruned_mass=max(0.0, 1.0 - listed - exact.dead_mass) if exact.pruned_mass > 0 else 0.0,
        dead_mass=exact.dead_mass,
        expansions=beam.expansions + exact.expansions,
    )
