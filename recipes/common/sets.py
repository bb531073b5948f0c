"""How well sets keep their promise: coverage and size of conformal sets over random splits, for the tables of the recipes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import DataCollatorForSeq2Seq

from common.batches import collated, evenly
from common.results import columns
from common.row_file import NOT_IN_COMMAND, Results, origin
from common.settings import RunSettings
from hf_entmax.generation import EntmaxLogitsProcessor, enumerate_hypotheses
from hf_entmax.ops import conformal_temperature, support_at, support_temperature

FIELDS = columns(
    "attention output_alpha seed data unit method coverage_wanted splits calibration test",
    "coverage coverage_sd size size_sd worst_stratum strata listed whole train_steps command hardware versions",
)
SPLITS = 10
#: Examples whose sets of whole answers are listed; answers of a set that are listed, prefixes that are expanded for it.
LISTED, MOST_ANSWERS, MOST_PREFIXES = 50, 200, 1000
#: Examples of a split that calibrate, half of them at most, and that test, at most.
MOST = 5000, 10_000
#: Alphas that the sets of a softmax may have, and the first of them where none is chosen.
ALPHAS = (1.5, 1.25, 2.0)
#: Sizes of sets that are counted together for size-stratified coverage: up to these, and larger ones.
STRATA = (1, 3, 10)

#: From logits and labels that calibrate, logits to test and the allowed chance of a miss: the sets, bool ``[n, V]``.
Method = Callable[[Tensor, Tensor, Tensor, float], Tensor]
#: Of some examples, how many answers have a score below a threshold, and whether that is all of them.
Listing = Callable[[list[int], float], list[tuple[int, bool]]]


def check_sets(settings: Any) -> None:
    """Say before training that the sets after it could not be measured.

    Raises:
        ValueError: if the results cannot be written, or if MAPIE is needed and not installed.
    """
    if settings.coverage and settings.results:
        Results(Path(settings.results), FIELDS)
    if settings.coverage and settings.output_alpha == 1.0:
        _mapie()


def _mapie() -> Any:
    try:
        import mapie.classification
    except ImportError as error:
        raise ValueError(
            'coverage of a softmax is compared with APS and RAPS of MAPIE: pip install "hf_entmax[conformal]".'
        ) from error
    return mapie.classification


def entmax_sets(alphas: Sequence[float]) -> Method:
    """Take supports of entmax; of several alphas the one with the smallest sets for a quarter of the calibration data."""

    def method(logits: Tensor, labels: Tensor, test: Tensor, delta: float) -> Tensor:
        best, rest = alphas[0], slice(None)
        if len(alphas) > 1:
            quarter = len(logits) // 4
            own, rest = logits[:quarter], slice(quarter, None)

            def size(alpha: float) -> int:
                found = conformal_temperature(support_temperature(own, labels[:quarter], alpha), delta)
                return int(support_at(own, found, alpha).sum())

            best = min(alphas, key=size)
        scores = support_temperature(logits[rest], labels[rest], best)
        return support_at(test, conformal_temperature(scores, delta), best)

    return method


class _Softmax:
    """What MAPIE takes for a classifier: its inputs are logits."""

    def __init__(self, classes: int) -> None:
        self.classes_ = list(range(classes))

    def fit(self, *_: Any) -> _Softmax:
        return self

    def predict_proba(self, logits: Any) -> Any:
        return torch.from_numpy(logits).softmax(-1).numpy()

    def predict(self, logits: Any) -> Any:
        return logits.argmax(-1)

    def __sklearn_is_fitted__(self) -> bool:
        return True


def _raps() -> Any:
    """Make RAPS of MAPIE, but for the examples that choose its penalty: a random fifth of all instead of each class, as one may be rare."""
    from mapie.conformity_scores import RAPSConformityScore

    class RandomFifth(RAPSConformityScore):
        def split_data(self, X: Any, y: Any, y_enc: Any, sample_weight: Any = None, groups: Any = None) -> Any:
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).numpy()
            own, rest = order[: len(y) // 5], order[len(y) // 5 :]
            self.X_raps, self.y_raps, self.y_raps_no_enc = X[own], y_enc[own], y[own]
            self.n_samples_ = len(rest)
            return X[rest], y[rest], y_enc[rest], sample_weight, groups

    return RandomFifth()


def mapie_sets(score: str) -> Method:
    """Take APS (Romano et al. 2020) or RAPS (Angelopoulos et al. 2021) on the softmax of the logits, by MAPIE."""

    def method(logits: Tensor, labels: Tensor, test: Tensor, delta: float) -> Tensor:
        mapie = _mapie()
        own = mapie.SplitConformalClassifier(
            _Softmax(logits.shape[-1]), 1.0 - delta, conformity_score=_raps() if score == "raps" else score,
            prefit=True, random_state=0,
        )  # fmt: skip
        own.conformalize(logits.double().numpy(), labels.numpy())
        options = {"conformity_score_params": {"include_last_label": "randomized"}}
        return torch.from_numpy(own.predict_set(test.double().numpy(), **options)[1][..., 0])

    return method


def methods_of(alpha: float) -> dict[str, Method]:
    """Return the methods for a model with this output alpha, by name."""
    if alpha > 1:
        return {f"entmax {alpha:g}": entmax_sets([alpha]), "entmax, alpha chosen": entmax_sets(ALPHAS)}
    found = {"entmax 1.5": entmax_sets(ALPHAS[:1]), "entmax, alpha chosen": entmax_sets(ALPHAS)}
    return {**found, "APS": mapie_sets("aps"), "RAPS": mapie_sets("raps")}


def splits(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Draw which examples calibrate and which test, in each of `SPLITS` random splits."""
    generator = torch.Generator().manual_seed(seed)
    half = min(count // 2, MOST[0])
    orders = [torch.randperm(count, generator=generator) for _ in range(SPLITS)]
    return [(order[:half], order[half : half + MOST[1]]) for order in orders]


def measure(hits: list[Tensor], sizes: list[Tensor]) -> dict[str, Any]:
    """Measure coverage and sizes of the sets of every split, ``[test]`` each; shares in %.

    Size-stratified coverage is that of the sets of similar size, over all splits; the worst is taken over the strata that
    hold at least one set in a hundred (Angelopoulos et al. 2021).
    """
    shares = [100 * float(hit.double().mean()) for hit in hits]
    means = [float(size.double().mean()) for size in sizes]
    hit, size = torch.cat(hits), torch.cat(sizes)
    strata, worst = [], 100.0
    for low, high in zip((-1, *STRATA), (*STRATA, None), strict=True):
        inside = (size > low) & (size <= high) if high is not None else size > low
        if bool(inside.any()):
            covered, share = 100 * float(hit[inside].double().mean()), 100 * float(inside.double().mean())
            strata.append(f"{f'<={high}' if high is not None else f'>{low}'}:{covered:.1f} ({share:.1f})")
            worst = min(worst, covered) if share >= 1 else worst
    return {
        "coverage": round(statistics.fmean(shares), 2),
        "coverage_sd": round(statistics.stdev(shares), 2),
        "size": round(statistics.fmean(means), 3),
        "size_sd": round(statistics.stdev(means), 3),
        "worst_stratum": round(worst, 1),
        "strata": ", ".join(strata),
        "splits": len(hits),
        "calibration": "",
        "test": len(hits[0]),
    }


def measure_labels(logits: Tensor, labels: Tensor, alpha: float, wanted: Sequence[float], seed: int) -> list[dict]:
    """Make a record for every coverage and method.

    Args:
        logits: of held-out examples, float ``[n, V]``.
        labels: int64 ``[n]``.
        alpha: of the model's output.
        wanted: coverages, in %.
        seed: of the splits.
    """
    records = []
    chosen = splits(len(labels), seed)
    for share in wanted:
        for name, method in methods_of(alpha).items():
            hits, sizes = [], []
            for held, test in chosen:
                inside = method(logits[held], labels[held], logits[test], round(1 - share / 100, 6))
                hits.append(inside.gather(-1, labels[test, None]).squeeze(-1))
                sizes.append(inside.sum(-1))
            found = {"method": name, "coverage_wanted": share, **measure(hits, sizes)}
            records.append(found | {"calibration": len(chosen[0][0])})
    return records


def measure_sequences(
    model: Any, examples: list[dict[str, list[int]]], tokenizer: Any, settings: Any
) -> list[dict[str, Any]]:
    """Make records for an encoder-decoder: sets of one step of each answer, drawn at random, and of whole answers.

    Where some inputs have several answers, the sets of whole answers are also calibrated input by input: ``any answer`` promises
    that one of them is in the set, ``every answer`` that all are; ``every of several`` says how often the sets of ``any answer``
    hold all of them, where there are several.
    """
    alpha = settings.output_alpha if settings.output_alpha > 1 else 1.5
    generator = torch.Generator().manual_seed(settings.seed)
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []
    scores, costs = [], []
    for batch in collated(examples, DataCollatorForSeq2Seq(tokenizer, model=model), 100, model.device):
        with torch.no_grad():
            logits = model(**batch).logits.float().cpu()
        for rows, labels in zip(logits, batch["labels"].cpu(), strict=True):
            rows, labels = rows[labels != -100], labels[labels != -100]
            one = int(torch.randint(len(labels), (1,), generator=generator))
            steps.append((rows[one], labels[one]))
            scores.append(support_temperature(rows, labels, alpha).max())
            costs.append(-rows.double().log_softmax(-1).gather(-1, labels[:, None]).sum())

    def listed(places: list[int], **limits: Any) -> list[tuple[int, bool]]:
        batch = tokenizer.pad([{"input_ids": examples[i]["input_ids"]} for i in places], return_tensors="pt")
        found = enumerate_hypotheses(model, dict(batch.to(model.device)), MOST_ANSWERS, budget=MOST_PREFIXES, **limits)
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
        for unit, record in measure_variants(
            torch.stack(own), [e["input_ids"] for e in examples], wanted, seed, listing
        ):
            records.append({"unit": unit, "method": method, **record})
    return records


def measure_variants(
    scores: Tensor, inputs: Sequence[Sequence[int]], wanted: Sequence[float], seed: int, listed: Listing
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield units with their records as `measure_sequences` says; none where no input has several answers.

    An input stands for all of its answers, so that those of one input are never apart: on both sides of a split.
    """
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, ids in enumerate(inputs):
        places[tuple(ids)].append(place)
    groups = list(places.values())
    several = torch.tensor([len(group) > 1 for group in groups])
    if not several.any():
        return
    least, most = (torch.stack([of(scores[group]) for group in groups]) for of in (torch.min, torch.max))

    def of_inputs(chosen: list[int], threshold: float) -> list[tuple[int, bool]]:
        return listed([groups[place][0] for place in chosen], threshold)

    for unit, own in (("any answer", least), ("every answer", most)):
        yield from ((unit, record) for record in measure_answers(own, wanted, seed, of_inputs))
    for share in wanted:
        hits = []
        for held, test in splits(len(groups), seed):
            threshold = conformal_temperature(least[held], round(1 - share / 100, 6))
            hits.append((most[test] < threshold)[several[test]])
        if not (hits := [hit for hit in hits if len(hit)]):
            continue
        found = [100 * float(hit.double().mean()) for hit in hits]
        record: dict[str, Any] = {"coverage_wanted": share, "coverage": round(statistics.fmean(found), 2)}
        record |= {"coverage_sd": round(statistics.pstdev(found), 2), "splits": len(hits), "test": int(several.sum())}
        yield "every of several", record


def measure_answers(scores: Tensor, wanted: Sequence[float], seed: int, listed: Listing) -> list[dict[str, Any]]:
    """Make a record for every coverage, for sets of whole answers: those with a score below a threshold.

    Coverage is that of all splits; the sets themselves are listed for the first examples that the first split tests, at
    its threshold. Where not all of them could be listed whole, the mean size is a lower bound.

    Args:
        scores: of the true answers, ``[n]``.
        wanted: coverages, in %.
        seed: of the splits.
        listed: of some examples, how many answers have a score below a threshold, and whether that is all of them.
    """
    records, chosen = [], splits(len(scores), seed)
    for share in wanted:
        hits, sets = [], []
        for held, test in chosen:
            threshold = conformal_temperature(scores[held], round(1 - share / 100, 6))
            hits.append(scores[test] < threshold)
            sets = sets or listed(test[:LISTED].tolist(), threshold)
        own = hits[0][:LISTED], torch.tensor([size for size, _ in sets])
        alike = measure(*([part, part] for part in own))
        found = {"coverage_wanted": share, **measure(hits, [torch.zeros(len(hit)) for hit in hits])}
        found |= {name: alike[name] for name in ("size", "strata", "worst_stratum")} | {"size_sd": ""}
        found |= {"calibration": len(chosen[0][0]), "listed": len(sets)}
        records.append(found | {"whole": round(100 * statistics.fmean(whole for _, whole in sets), 1)})
    return records


def report_labels(settings: Any, logits: Tensor, labels: Tensor, **same: Any) -> None:
    """Measure sets of classes on the answers to the test set, from all over it, and report them."""
    places = torch.tensor(evenly(range(len(labels)), sum(MOST)))
    alpha, seed = settings.output_alpha, settings.seed
    records = measure_labels(logits[places], labels[places], alpha, settings.coverage, seed)
    report(settings, records, data=settings.train, unit="label", **same)


def report(settings: RunSettings, records: list[dict[str, Any]], **same: Any) -> None:
    """Say the measures and append a row for each to the results."""
    kind = {name: getattr(settings, name) for name in ("attention", "output_alpha", "seed")}
    for record in records:
        PartialState().print("  ".join(f"{name} {value}" for name, value in {**same, **record}.items()))
    if PartialState().is_main_process and settings.results and not settings.smoke:
        book = Results(Path(settings.results), FIELDS)
        for record in records:
            row = {**kind, **same, **record, **origin(NOT_IN_COMMAND, packages=("accelerate",))}
            key = {name: row[name] for name in ("command", "unit", "method", "coverage_wanted")}
            if not book.has(**key):
                book.add(**row)
