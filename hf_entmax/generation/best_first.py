"""Best-first search: every hypothesis in the order of its probability, and the most probable one for certain."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from typing import Any

from torch import Tensor

from hf_entmax.generation.beam import TOLERANCE, check_search_options, run_beams
from hf_entmax.generation.members import (
    Ensemble,
    as_inputs,
    as_models,
    number_of_inputs,
    take_inputs,
    with_members,
    with_one_input,
)
from hf_entmax.generation.prefixes import PrefixCache, largest_group
from hf_entmax.generation.results import SearchResult, SearchState

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
        row: the input's place in the batch.
        eos: end-of-sequence tokens.
        max_new_tokens: longer prefixes are not expanded.
        incumbent: log-probability of the best hypothesis known.
        hypotheses: how many to list.
        floor: log-probability of the least probable hypothesis worth listing.
        budget: prefixes to expand.
        best_only: branch and bound: drop what cannot beat the best hypothesis known, stop when it is certain.
        tolerance: relative slack of "cannot beat".
    """

    row: int
    eos: list[int]
    max_new_tokens: int
    incumbent: float = -math.inf
    hypotheses: float = math.inf
    floor: float = -math.inf
    budget: int = 1000
    best_only: bool = False
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        self.found, self.order = SearchState(), itertools.count()
        self.queue: list[tuple[float, int, _Children, int]] = []
        #: Log-probabilities of the prefixes that wait for the models.
        self.waiting: dict[tuple[int, ...], float] = {(): 0.0}

    @property
    def worthless(self) -> float:
        """Continuations below this log-probability are dropped."""
        if not self.best_only:
            return self.floor
        return max(self.floor, self.incumbent - math.log1p(self.tolerance))

    def next_prefixes(self, share: int) -> None:
        """Take the best prefixes from the queue, ``share`` at most, and list the hypotheses that come before them.

        When none waits after that, the search is over: nothing is left, enough is known, or the budget is spent.
        """
        room, waiting = min(share, self.budget - self.found.expansions), self.waiting
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
                    break
            elif len(prefix) >= self.max_new_tokens:
                self.found.unfinished.append((-negative, list(prefix)))
            else:
                waiting[prefix] = -negative
        if not waiting:
            self._drop_queue()

    def _enough(self) -> bool:
        return self._listed >= self.hypotheses

    @property
    def _listed(self) -> int:
        return len(self.found.finished) + len(self.found.unfinished)

    @property
    def wanted(self) -> float:
        """How many more hypotheses the search is after."""
        return 1 if self.best_only else self.hypotheses - self._listed

    def expand(self, prefix: tuple[int, ...], log_probs: Tensor) -> None:
        """Queue what may follow a prefix that waited."""
        value = self.waiting.pop(prefix)
        self.found.expansions += 1
        total = value + log_probs
        if bool((log_probs == -math.inf).all()):
            self.found.dead_mass += math.exp(value)
            return
        self.incumbent = max(self.incumbent, float(total[self.eos].max()))
        possible = total > -math.inf
        keep = possible & (total >= self.worthless)
        self._prune(total[possible & ~keep])
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
        """Empty the queue at the end of the search: list hypotheses while there is room, drop prefixes."""
        ended = []
        for _, _, children, place in self.queue:
            values, tokens = children.log_probs[place:], children.tokens[place:]
            for token in self.eos:
                if token in tokens:
                    ended.append((values[tokens.index(token)], [*children.prefix, token]))
                    values[tokens.index(token)] = -math.inf
            self.found.prune(max(values), sum(map(math.exp, values)))
        for value, tokens in sorted(ended, key=lambda entry: -entry[0]):
            if self._enough():
                self.found.prune(value, math.exp(value))
            else:
                self.found.finished.append((value, tokens))


def _run(ensemble: Ensemble, searches: list[_BestFirst], batch_size: int) -> list[SearchState]:
    """Run the searches of all inputs side by side; their prefixes of one length are read together."""
    caches = [PrefixCache(member) for member in ensemble.members]
    active = searches
    while active:
        nodes = largest_group([(search.row, prefix) for search in active for prefix in search.waiting])
        prefixes = [prefix for _, prefix in nodes]
        all_log_probs = ensemble.average(
            [cache.member.log_probs_after(prefixes, cache.after(nodes)) for cache in caches]
        ).cpu()
        for (row, prefix), log_probs in zip(nodes, all_log_probs, strict=True):
            searches[row].expand(prefix, log_probs)
        # Prefixes that are taken ahead may turn out to be needless, the more so where one hypothesis is wanted: then no more
        # of them than make a batch with those of the other inputs.
        for search in active:
            if not search.waiting:
                search.next_prefixes(int(max(1, batch_size // len(active), min(batch_size, search.wanted))))
        active = [search for search in active if search.waiting]
    return [search.found for search in searches]


def _search(
    models: list[Any], inputs: list[dict[str, Any]], limits: list[dict[str, Any]], *, batch_size: int, **rest: Any
) -> list[SearchState]:
    """Search best-first for every element of a batch, with the limits of each."""

    def body(ensemble: Ensemble, limits: list[dict[str, Any]] = limits) -> list[SearchState] | None:
        eos, longest = ensemble.eos_token_ids, ensemble.max_new_tokens
        if ensemble.criteria or not eos:
            names = [type(criterion).__name__ for criterion in ensemble.criteria]
            raise ValueError(
                f"best-first search ends hypotheses by end-of-sequence tokens alone, not by {names}: leave them out."
            )
        if len(limits) > 1 and any(member.processors for member in ensemble.members):
            return None  # they look back at whole batches, row by row
        searches = [_BestFirst(row, eos, longest, **own) for row, own in enumerate(limits)]
        return _run(ensemble, searches, batch_size)

    options = rest.pop("options")
    rest["options"] = options if "use_cache" in options else {"cache_implementation": "dynamic", **options}
    together = options.get("prefix_allowed_tokens_fn") is None
    found = with_members(models, inputs, body, num_beams=1, **rest) if together else None
    if found is not None:
        return found
    each = []
    for index, own in enumerate(limits):
        alone: Any = with_one_input(models, inputs, index, lambda ensemble, own=own: body(ensemble, [own]), **rest)
        each += alone
    return each


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
    """List all hypotheses with a probability above 0, most probable first, down to a limit.

    Prefixes are expanded best first. A hypothesis is listed when nothing that is left can be more probable, so that
    a search that ends early has still found the most probable ones. All inputs are searched side by side, and every prefix
    is read once: its keys and values are kept (except for models whose cache is of another kind than Transformers' plain
    dynamic one).

    Args:
        model: as for :func:`beam_search`; a list of models is an ensemble.
        inputs: as for :func:`beam_search`.
        max_hypotheses: list at most this many, at least 1. Prefixes cut off by ``max_new_tokens`` count, too.
        min_mass: leave out hypotheses less probable than this, in [0, 1].
        max_new_tokens: as for :func:`beam_search`.
        budget: prefixes to expand per input at most, at least 1. When it is spent, the hypotheses met so far are listed.
        batch_size: prefixes expanded ahead, shared by the inputs of the batch, at least 1.
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
    limits = {"hypotheses": max_hypotheses, "floor": floor, "budget": budget, "tolerance": tolerance}
    shared = {"output_alpha": output_alpha, "max_new_tokens": max_new_tokens, "options": options}
    found = _search(models, each, [limits] * number_of_inputs(each), batch_size=batch_size, **shared)
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
    """Find the most probable output with certainty, by branch and bound, within a budget.

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
        batch_size: prefixes expanded ahead, shared by the inputs of the batch, at least 1.
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
    size = number_of_inputs(each)  # complains of batches that differ before the beam search
    shared: dict[str, Any] = {"output_alpha": output_alpha, "max_new_tokens": max_new_tokens, "options": options}
    beams = with_members(models, each, lambda ensemble: run_beams(ensemble, num_beams), num_beams=num_beams, **shared)
    left = [index for index, beam in enumerate(beams) if not beam.result(tolerance).optimal]
    if left:
        limits = {"budget": budget, "best_only": True, "tolerance": tolerance}
        own = [take_inputs(one, left, size) for one in each]
        if (allowed := options.get("prefix_allowed_tokens_fn")) is not None:
            # The user's function counts the elements of the user's batch.
            options["prefix_allowed_tokens_fn"] = lambda index, input_ids: allowed(left[index], input_ids)
        incumbents = [limits | {"incumbent": beams[index].best} for index in left]
        for index, exact in zip(left, _search(models, own, incumbents, batch_size=batch_size, **shared), strict=True):
            beams[index] = _merged(beams[index], exact)
    return [beam.result(tolerance) for beam in beams]


def _merged(beam: SearchState, exact: SearchState) -> SearchState:
    """Merge the hypotheses of two searches; the second, which knew the best hypothesis of the first, has the bounds."""
    finished = {tuple(tokens): value for value, tokens in [*exact.finished, *beam.finished]}
    unfinished = {tuple(tokens): value for value, tokens in exact.unfinished}
    listed = sum(math.exp(value) for value in [*finished.values(), *unfinished.values()])
    return SearchState(
        finished=[(value, list(tokens)) for tokens, value in finished.items()],
        unfinished=[(value, list(tokens)) for tokens, value in unfinished.items()],
        pruned_log_probability=exact.pruned_log_probability,
        # What the second search dropped may hold hypotheses of the first: all that is not listed is the missing mass.
        pruned_mass=max(0.0, 1.0 - listed - exact.dead_mass) if exact.pruned_mass > 0 else 0.0,
        dead_mass=exact.dead_mass,
        expansions=beam.expansions + exact.expansions,
    )
