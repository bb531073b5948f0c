"""Sets of possible answers with a promise: how often, at least, they hold the true one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import Pipeline

from hf_entmax.batches.prepare import evaluation_mode, prepare_batch
from hf_entmax.generation.best_first import enumerate_hypotheses
from hf_entmax.generation.members import Ensemble, as_inputs, as_models, output_alpha_of, with_one_input
from hf_entmax.generation.processor import EntmaxLogitsProcessor, log_entmax
from hf_entmax.generation.results import SearchResult
from hf_entmax.integration.config_hook import SETS_KEY
from hf_entmax.integration.output_loss import shifts_labels
from hf_entmax.losses.targets import check_labels
from hf_entmax.ops import entmax
from hf_entmax.ops.conformal import check_sparse, conformal_temperature, support_at, support_temperature
from hf_entmax.ops.solve import exact_dtype

Unit = Literal["answer", "step"]
UNITS: tuple[Unit, ...] = get_args(Unit)
Score = Literal["support", "probability"]
SCORES: tuple[Score, ...] = get_args(Score)
#: Of several alphas, the one with the smallest sets is chosen on every fourth example, which then calibrates nothing.
_CHOOSING = 4


@dataclasses.dataclass(frozen=True)
class ConformalSets:
    r"""What `calibrate_sets` found: sets with a promise, ``P(truth in set) >= 1 - delta``.

        set(x) = {y : p(y) > 0},                              p = entmax(z(x) / temperature, alpha)
        set(x) = {y : log p(y) >= min_log_probability}        calibrated by ``score="probability"``

    Attributes:
        alpha: of the mapping; it need not be the one that the model was trained with.
        temperature: in the unit of the logits; 1 for sets by probability.
        delta: allowed chance of a miss.
        unit: what is held with that probability: a whole ``"answer"`` (all labels of an example), or one ``"step"``
            of it, drawn at random.
        examples: how many were calibrated on.
        min_log_probability: of an answer, in nats; None for supports.
    """

    alpha: float
    temperature: float
    delta: float
    unit: Unit
    examples: int
    min_log_probability: float | None = None

    @classmethod
    def of(cls, model: Any, unit: Unit | None = None) -> ConformalSets:
        """Read the sets stored in a model's configuration, in this process or before it was saved.

        Args:
            model: one that `calibrate_sets` was called on.
            unit: which of them; by default the only one there is.

        Raises:
            ValueError: if there is none, or two and no ``unit``, or what is stored is damaged.
        """
        stored = getattr(model.config, SETS_KEY, None) or {}
        if unit is None and len(stored) == 1:
            unit = next(iter(stored))
        if unit not in stored:
            raise ValueError(
                f"{type(model).__name__} has sets calibrated for {sorted(stored) or 'nothing'}, unit={unit!r} was asked for: "
                "call calibrate_sets(model, batches, delta, unit=...) with held-out data first, or name the unit."
            )
        names = {field.name for field in dataclasses.fields(cls)}
        if set(stored[unit]) | {"min_log_probability"} != names:  # which older versions did not write
            raise ValueError(f"config.{SETS_KEY} holds {sorted(stored[unit])}, not {sorted(names)}: calibrate again.")
        return cls(**stored[unit])

    @property
    def processor(self) -> EntmaxLogitsProcessor:
        """For ``generate(logits_processor=[...])`` and ``force_decode``: the probabilities that the sets are made from."""
        return EntmaxLogitsProcessor(self.alpha, self.temperature)

    def support(self, logits: Tensor) -> Tensor:
        """Mark the labels in the set of each row: bool ``[..., V]`` from logits ``[..., V]``; the best label is always in it."""
        if self.min_log_probability is None:
            return support_at(logits, self.temperature, self.alpha)
        likely = self.probabilities(logits).log() >= self.min_log_probability
        return likely | (logits == logits.amax(-1, keepdim=True))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute ``p = entmax(logits / temperature, alpha)``, float64 ``[..., V]``: positive within the sets."""
        return entmax(logits.detach().double() / self.temperature, self.alpha)


def calibrate_sets(
    model: Any,
    batches: Iterable[Mapping[str, Any]],
    delta: float = 0.1,
    *,
    unit: Unit = "answer",
    score: Score = "support",
    alpha: float | Sequence[float] | None = None,
    seed: int = 0,
) -> ConformalSets:
    r"""Find the temperature at which the support of entmax holds the truth with probability ``1 - delta``.

    Or the least probability that the true answer has as often (``score="probability"``).

    Split conformal prediction: of ``n`` held-out examples each has a score, the temperature above which all that is true
    of it is possible,

        s(x, y) = max_t (alpha - 1) * || (z_t - z_{t, y_t})_+ ||_p,     p = 1 / (alpha - 1)
        temperature = just above the k-th smallest of s_1 ... s_n,     k = ceil((n + 1)(1 - delta))

    and the support at that temperature holds the truth of the next example with probability at least ``1 - delta`` (and at
    most ``1 - delta + 1 / (n + 1)`` where scores do not tie). That is a mean over calibrations and examples, and needs
    nothing of the model; it needs examples that are exchangeable: held out from training *and* from choosing the model,
    and of the kind that comes later. Whoever trains on calibrates again.

    - Classification: one label per example.
    - Sequences, ``unit="answer"``: ``t`` runs over the labels of an example. The true answer is then among those that have
      a probability above 0 at this temperature, which `prediction_sets` lists.
    - Sequences, ``unit="step"``: ``t`` is one position of each example, drawn at random (steps of one answer depend on each
      other). The support after the true beginning holds the true next token, at a position drawn from a new answer.

    A support grows with every step that is unsure, so that many whole answers have a probability. With
    ``score="probability"`` the set is all answers that have at least so much,

        s(x, y) = -sum_t log p_{t, y_t},     p_t = entmax(z_t, alpha)
        min_log_probability = just below minus the k-th smallest of s_1 ... s_n

    which are far fewer; there may be none. It takes a model that gives the truth a probability nearly always: a softmax, or
    an entmax that has learned well.

    The result is kept in ``model.config.entmax_sets`` under its unit and saved with the model; no weight changes.

    Args:
        model: any with logits and labels: a classification head of any kind, a token classifier, a masked or causal language
            model, an encoder-decoder. Patched or not, trained with entmax or not.
        batches: dicts of tensors as a data collator returns them, with integer ``labels``; -100 is ignored (prompts, padding).
            Examples without a label do not count.
        delta: allowed chance of a miss, strictly between 0 and 1; takes at least ``1 / delta - 1`` examples.
        unit: see above.
        score: see above; ``"probability"`` is of whole answers.
        alpha: by default the model's ``output_alpha``; above 1 for supports. Of several, the one with the smallest supports
            (their mean size over labelled positions) is taken. Every fourth example chooses, the others calibrate, so that
            the promise holds.
        seed: of the positions drawn.

    Returns:
        What was found; `ConformalSets.of` reads it from a model.

    Raises:
        ValueError: if ``delta`` is out of range or too small for so few examples, alpha is not above 1 (the support of softmax
            is everything) or is needed and not given, labels lie outside the classes, logits are NaN, there is one class
            only, or the truth has no probability too often for ``score="probability"``.
        TypeError: for labels that are no class indices, or a batch that is no mapping.

    Reference:
        Campos, Cálem, Sklaviadis, Figueiredo, Martins 2025, Sparse Activations as Conformal Predictors (the score of
        gamma-entmax, in one more unit: the maximum over steps); Sadinle, Lei, Wasserman 2019, Least Ambiguous Set-Valued
        Classifiers (a threshold on the probability).
    """
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} is not known; choose one of {list(UNITS)}.")
    if score not in SCORES:
        raise ValueError(f"score={score!r} is not known; choose one of {list(SCORES)}.")
    if score == "probability":
        found = _by_probability(model, batches, delta, unit, alpha)
    else:
        found = _by_support(model, list(batches), delta, unit, _alphas(model, alpha), seed)
    setattr(model.config, SETS_KEY, {**(getattr(model.config, SETS_KEY, None) or {}), unit: dataclasses.asdict(found)})
    return found


def _by_probability(
    model: Any, batches: Iterable[Mapping[str, Any]], delta: float, unit: Unit, alpha: float | Sequence[float] | None
) -> ConformalSets:
    if unit != "answer" or isinstance(alpha, Sequence):
        raise ValueError(
            f"score='probability' is of whole answers under one alpha; unit={unit!r}, alpha={alpha!r} was asked for: use "
            "score='support'."
        )
    chosen = output_alpha_of(model, alpha)
    costs = [torch.zeros(0, dtype=torch.float64)]
    for logits, labels in _positions(model, batches):
        labelled = labels != -100
        steps = torch.zeros(labels.shape, dtype=torch.float64, device=logits.device)
        logs = log_entmax(logits[labelled].to(exact_dtype(logits)), chosen)
        steps[labelled] = -logs.gather(-1, labels[labelled][:, None]).squeeze(-1).double()
        costs.append(steps.flatten(1).sum(1)[labelled.flatten(1).any(1)].cpu())
    scores = torch.cat(costs)
    return ConformalSets(chosen, 1.0, float(delta), unit, len(scores), -conformal_temperature(scores, delta))


def _by_support(
    model: Any, held: list[Mapping[str, Any]], delta: float, unit: Unit, alphas: list[float], seed: int
) -> ConformalSets:
    generator = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    for logits, labels in _positions(model, held):
        labelled = labels != -100
        steps = torch.full((*labels.shape, len(alphas)), -1.0, dtype=torch.float64)
        for index, one in enumerate(alphas):
            steps[labelled.cpu(), index] = support_temperature(logits[labelled], labels[labelled], one).double().cpu()
        steps = steps.flatten(1, -2)[labelled.flatten(1).any(1).cpu()]
        if unit == "step":
            chance = torch.rand(steps.shape[:2], generator=generator).masked_fill_(steps[..., 0] < 0, -1.0)
            steps = steps.gather(1, chance.argmax(1)[:, None, None].expand(-1, 1, len(alphas)))
        rows.append(steps.amax(1))
    scores = torch.cat(rows) if rows else torch.zeros(0, len(alphas))
    best = 0
    if len(alphas) > 1:
        chooses = torch.arange(len(scores)) % _CHOOSING == 0
        temperatures = [conformal_temperature(column, delta) for column in scores[chooses].T]
        best = _smallest(model, held, list(zip(alphas, temperatures, strict=True)))
        scores = scores[~chooses]
    return ConformalSets(alphas[best], conformal_temperature(scores[:, best], delta), float(delta), unit, len(scores))


def _alphas(model: Any, given: float | Sequence[float] | None) -> list[float]:
    if given is None and output_alpha_of(model, None) == 1.0:
        raise ValueError(
            f"{type(model).__name__} has no output_alpha above 1: its output is a softmax, whose support is everything. Give "
            "the alpha of the sets, e.g. alpha=1.5, or several to choose from."
        )
    alphas = (
        [output_alpha_of(model, None)] if given is None else list(given) if isinstance(given, Sequence) else [given]
    )
    if not alphas:
        raise ValueError("alpha is empty: give at least one number above 1.")
    for one in alphas:
        check_sparse(one)
    return [float(one) for one in alphas]


def _positions(model: Any, batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield aligned logits ``[B, ..., V]`` and labels ``[B, ...]`` of every batch, always with a step dimension."""
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            info = prepare_batch(model, {"logits_to_keep": 0, **batch} if isinstance(batch, Mapping) else batch)
            labels = batch.get("labels")
            if not isinstance(labels, Tensor) or labels.is_floating_point():
                raise TypeError(
                    f"batches need integer labels, one class index per prediction; this one has "
                    f"{getattr(labels, 'dtype', type(labels).__name__)}."
                )
            logits = model(**info.inputs).logits
            labels = labels.to(logits.device).long()
            if shifts_labels(model):
                logits, labels = logits[:, :-1], labels[:, 1:]
            if logits.shape[-1] < 2:
                raise ValueError(f"{type(model).__name__} has one class only: there is nothing to choose from.")
            check_labels(labels, logits.shape[:-1], logits.shape[-1], -100)
            yield (logits, labels) if labels.dim() > 1 else (logits[:, None], labels[:, None])


def _smallest(model: Any, batches: list[Mapping[str, Any]], settings: list[tuple[float, float]]) -> int:
    """Choose the alpha that, at its temperature, has the smallest mean set over the positions of the choosing examples."""
    sizes, seen = torch.zeros(len(settings)), 0
    for logits, labels in _positions(model, batches):
        labelled = labels != -100
        counted = labelled.flatten(1).any(1)
        place = seen + counted.cumsum(0) - 1
        seen += int(counted.sum())
        rows = logits[labelled & (counted & (place % _CHOOSING == 0)).view(-1, *[1] * (labels.dim() - 1))]
        for index, (alpha, temperature) in enumerate(settings):
            if len(rows):
                sizes[index] += support_at(rows, temperature, alpha).sum().item()
    return int(sizes.argmin())


def prediction_sets(
    model: Any,
    inputs: Any,
    *,
    unit: Unit | None = None,
    max_hypotheses: int = 1000,
    budget: int = 10_000,
    max_new_tokens: int | None = None,
) -> list[Any]:
    """Predict the sets of a calibrated model (`calibrate_sets`) for new inputs.

    Args:
        model: the model, or a classification pipeline of Transformers with it (text, image, audio, video).
        inputs: what the tokenizer or processor returned, without labels; of a pipeline, its inputs in a list.
        unit: which calibration; by default the only one there is.
        max_hypotheses: list at most this many answers per input of a model that generates.
        budget: expand at most this many prefixes per input of a model that generates.
        max_new_tokens: of a model that generates, as for ``beam_search``.

    Returns:
        One entry per input.
        For classification a list of ``{"label": name, "score": probability}``, most probable first, the probability being
        that of `ConformalSets`. For heads with a prediction per position a list of such lists.
        For models that generate, calibrated by ``unit="answer"``, a `SearchResult` with the answers and their
        probabilities; it is the whole set where it is ``exhaustive``, else the limits above cut it short and the promise
        is that of the whole. (What is calibrated by ``unit="step"`` is a set at every step:
        ``generate(logits_processor=[ConformalSets.of(model, "step").processor])`` samples from these.)

    Raises:
        ValueError: if the model has not been calibrated so, or its generation configuration changes probabilities
            (``no_repeat_ngram_size``, ``forced_bos_token_id``, ...), which voids the promise.
        TypeError: for a pipeline of another kind.
    """
    if isinstance(model, Pipeline):
        return _piped(model, inputs, ConformalSets.of(model.model, unit))
    sets = ConformalSets.of(model, unit)
    if hasattr(model, "can_generate") and model.can_generate():
        if sets.unit != "answer":
            raise ValueError(
                f"{type(model).__name__} was calibrated per step: whole answers need calibrate_sets(..., unit='answer'); "
                "generate(logits_processor=[ConformalSets.of(model).processor]) uses the sets of its steps."
            )
        return _answers(model, inputs, sets, max_hypotheses, max_new_tokens, budget)
    info = prepare_batch(model, inputs)
    with evaluation_mode(model), torch.no_grad():
        logits = model(**info.inputs).logits
    return _named(logits, sets, lambda index: (model.config.id2label or {}).get(index, index))


def _named(logits: Tensor, sets: ConformalSets, name: Callable[[int], Any]) -> list[Any]:
    """List labels and probabilities of the sets of logits ``[..., V]``, nested like these."""
    if logits.dim() > 1:
        return [_named(row, sets, name) for row in logits]
    inside = sets.support(logits[None])[0].nonzero().squeeze(-1)
    probs = sets.probabilities(logits[None])[0]
    ranked = inside[probs[inside].argsort(descending=True, stable=True)]
    return [{"label": name(int(i)), "score": float(probs[i])} for i in ranked]


def _piped(pipe: Pipeline, inputs: Any, sets: ConformalSets) -> list[Any]:
    kinds = ("text-classification", "image-classification", "audio-classification", "video-classification")
    if pipe.task not in kinds:
        raise TypeError(
            f"a pipeline for {pipe.task!r} cannot return sets; those for {list(kinds)} can. Else give the model itself and "
            "what the tokenizer returns."
        )
    given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    found = []
    scored: Any = pipe(given, top_k=pipe.model.config.num_labels, function_to_apply="none")
    for rows in scored:
        logits = torch.tensor([row["score"] for row in rows])
        found.append(_named(logits, sets, [row["label"] for row in rows].__getitem__))
    return found


def _answers(
    model: Any, inputs: Any, sets: ConformalSets, hypotheses: int, max_new_tokens: int | None, budget: int
) -> list[SearchResult]:
    options: dict[str, Any] = {"logits_processor": [sets.processor]}
    models = as_models(model)

    def others(ensemble: Ensemble) -> list[str]:
        return [type(one).__name__ for one in ensemble.members[0].processors]

    shared: dict[str, Any] = {"output_alpha": None, "max_new_tokens": max_new_tokens, "options": options}
    if found := with_one_input(models, as_inputs(inputs, models), 0, others, **shared):
        raise ValueError(
            f"the generation configuration of {type(model).__name__} asks for {found}, which change the probabilities that the "
            "sets were calibrated for: reset it (model.generation_config = GenerationConfig.from_model_config(model.config)), "
            "or set these options to None."
        )
    least = 0.0 if sets.min_log_probability is None else math.exp(sets.min_log_probability)
    return enumerate_hypotheses(model, inputs, hypotheses, least, max_new_tokens, budget=budget, **options)
