"""Models made ready for a search: prepared by ``generate()`` itself, asked for probabilities step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
)
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils.generic import ModelOutput

from hf_entmax.batches.prepare import evaluation_mode
from hf_entmax.generation.processor import EntmaxLogitsProcessor, log_entmax
from hf_entmax.integration.config_hook import CONFIG_KEY

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Member:
    """One model with its inputs, as ``generate()`` hands them to a decoding loop.

    ``input_ids`` ``[rows, T]`` are prompts or decoder start tokens, ``processors`` act on the logits before they become
    probabilities by ``entmax``, the mapping and its temperature, ``options`` are keyword arguments for the model.

    Raises:
        ValueError: if they hold a quantized cache.
    """

    model: Any
    entmax: EntmaxLogitsProcessor
    input_ids: Tensor
    processors: LogitsProcessorList
    options: dict[str, Any]
    _first: bool = True

    def __post_init__(self) -> None:
        cache = self.options.get(self.cache_name)
        if any("Quantized" in type(part).__name__ for part in (cache, *(getattr(cache, "layers", None) or ()))):
            raise ValueError(
                f"{type(self.model).__name__} would run on a quantized cache, which makes probabilities depend on the way to a "
                "prefix: nothing can be proved with them. Pass cache_implementation='dynamic' or use_cache=False."
            )

    @property
    def cache_name(self) -> str:
        """Under which of the options the cache is, empty if there is none."""
        return next((name for name in ALL_CACHE_NAMES if self.options.get(name) is not None), "")

    def log_probs(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        """Return log-probabilities ``[rows, V]`` in float64, ``-inf`` where they are 0."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores = self.processors(input_ids, logits.to(dtype=wide, copy=True))  # type: ignore[arg-type]
        if bool(torch.isnan(scores).any()):
            raise ValueError(f"{type(self.model).__name__} returned NaN: there are no probabilities to search.")
        if scores.device.type == "mps":
            scores = scores.cpu()
        return log_entmax(scores.double() / self.entmax.temperature, self.entmax.alpha)

    def step(self, tokens: Tensor) -> Tensor:
        """Continue all rows, with the cache: log-probabilities ``[rows, V]`` after the new tokens ``[rows, t]``."""
        input_ids = self.with_prompts(tokens)
        # Without a cache, every step is a first one: the model sees the whole sequence.
        one = 1 if self.options.get("use_cache") and not self._first else None
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=one, is_first_iteration=self._first, **self.options
        )
        outputs = self.model(**inputs, return_dict=True)
        self._first = False
        self.options = self.model._update_model_kwargs_for_generation(
            outputs, self.options, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        return self.log_probs(outputs.logits[:, -1], input_ids)

    def reorder(self, rows: Tensor) -> None:
        """Let row ``i`` continue what row ``rows[i]`` was; prompts stay where they are."""
        name = self.cache_name
        if not name:
            return
        rows = rows.to(self.input_ids.device)
        cache = self.options[name]
        if hasattr(self.model, "_reorder_cache"):
            self.options[name] = self.model._reorder_cache(cache, rows)
        elif hasattr(cache, "reorder_cache"):
            cache.reorder_cache(rows)
        else:
            raise ValueError(
                f"the cache of {type(self.model).__name__} ({type(cache).__name__}) cannot be reordered: pass use_cache=False."
            )

    def forward_prefixes(
        self, prefixes: Sequence[Sequence[int]], keep: int, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Return logits ``[n, keep, V]`` after ``n`` prefixes of any lengths, in one pass without a cache.

        Shorter prefixes are filled up behind their end, which a causal model does not notice before. ``keep`` positions
        are returned, counted from the end of the longest prefix. ``rows`` says which input each belongs to (the only one).
        """
        longest = max(len(prefix) for prefix in prefixes)
        filler = int(self.input_ids[0, -1])
        new = torch.tensor([[*prefix, *[filler] * (longest - len(prefix))] for prefix in prefixes], dtype=torch.long)
        rows = [0] * len(prefixes) if rows is None else rows
        input_ids, options = self.with_prompts(new, rows), self.options_after(rows, longest)
        if "logits_to_keep" in options:
            options["logits_to_keep"] = keep
        inputs = self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **options)
        return self.model(**inputs, return_dict=True).logits[:, -keep:]

    def options_after(self, rows: Sequence[int], length: int) -> dict[str, Any]:
        """Return the model's other arguments for some of the inputs, after ``num_tokens`` tokens have followed the prompt."""
        options = take_inputs(self.options, rows, self.input_ids.shape[0])
        if not length:
            return options
        coded = self.model.config.is_encoder_decoder
        update = self.model._update_model_kwargs_for_generation
        return update(ModelOutput(), options, is_encoder_decoder=coded, num_new_tokens=length)

    def log_probs_after(self, prefixes: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Return log-probabilities from the logits ``[n, V]`` after ``n`` prefixes of any lengths; of one input if processed."""
        if not self.processors:
            return self.log_probs(logits, self.input_ids)
        # Processors look back at whole sequences, which differ in length here.
        rows = []
        for prefix, scores in zip(prefixes, logits, strict=True):
            new = torch.tensor([list(prefix)], dtype=torch.long)
            rows.append(self.log_probs(scores[None], self.with_prompts(new)))
        return torch.cat(rows)

    def with_prompts(self, tokens: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Join prompts, those of ``rows`` or as many as there are rows of tokens, and new tokens."""
        prompts = self.input_ids.expand(len(tokens), -1) if rows is None else self.input_ids[list(rows)]
        return torch.cat((prompts, tokens.to(prompts.device)), dim=-1)


@dataclasses.dataclass
class Ensemble:
    """One or several members of one vocabulary, whose probabilities are averaged at every step."""

    members: list[Member]
    eos_token_ids: list[int]
    max_new_tokens: int
    criteria: list[Any]

    @classmethod
    def of_one(
        cls,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        options: dict[str, Any],
        output_alpha: float | None = None,
    ) -> Ensemble:
        """Make one from what ``generate()`` hands to a decoding loop; where ``output_alpha`` is None, the configuration decides."""
        processors, entmax = _without_entmax(logits_processor, model, output_alpha)
        eos, criteria = _end_of_sequence(generation_config, stopping_criteria)
        length = int(generation_config.max_length) - input_ids.shape[1]
        return cls([Member(model, entmax, input_ids, processors, options)], eos, length, criteria)

    @classmethod
    def joined(cls, parts: Sequence[Ensemble]) -> Ensemble:
        """Make one of all members, which stops by the criteria of the first."""
        ends = [part.eos_token_ids for part in parts]
        if len({tuple(sorted(eos)) for eos in ends}) > 1:
            raise ValueError(f"the models of an ensemble must end their sequences alike, but have eos_token_id {ends}.")
        if len({part.rows for part in parts}) > 1:
            raise ValueError("the models of an ensemble were given batches of different sizes.")
        members = [member for part in parts for member in part.members]
        return cls(members, ends[0], min(part.max_new_tokens for part in parts), parts[0].criteria)

    @property
    def rows(self) -> int:
        """How many sequences the members were prepared for."""
        return self.members[0].input_ids.shape[0]

    def average(self, all_log_probs: list[Tensor]) -> Tensor:
        """Return the logarithm of the mean probability, exact where there is one member."""
        if len(all_log_probs) == 1:
            return all_log_probs[0]
        sizes = [log_probs.shape[-1] for log_probs in all_log_probs]
        if len(set(sizes)) > 1:
            names = ", ".join(f"{type(m.model).__name__}: {n}" for m, n in zip(self.members, sizes, strict=True))
            raise ValueError(f"the models of an ensemble must have one vocabulary, but their sizes differ ({names}).")
        device = all_log_probs[0].device
        stacked = torch.stack([log_probs.to(device) for log_probs in all_log_probs])
        # logsumexp of a column that is -inf throughout is -inf, as it should be.
        return stacked.logsumexp(0) - math.log(len(all_log_probs))

    def step(self, tokens: Tensor) -> Tensor:
        """See :meth:`Member.step`."""
        return self.average([member.step(tokens) for member in self.members])

    def reorder(self, rows: Tensor) -> None:
        """See :meth:`Member.reorder`."""
        for member in self.members:
            member.reorder(rows)


def _take_rows(name: str, value: Any, rows: Tensor, size: int) -> Any:
    """Select the rows of some of ``size`` inputs."""
    if isinstance(value, ModelOutput):
        return type(value)(**{key: _take_rows(key, part, rows, size) for key, part in value.items()})
    if isinstance(value, tuple):
        return tuple(_take_rows(name, part, rows, size) for part in value)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    # Positions may have a dimension for their kinds (text, height, width) before the batch.
    batch_dim = 1 if name.endswith("position_ids") and value.dim() == 3 else 0
    return value.index_select(batch_dim, rows.to(value.device)) if value.shape[batch_dim] == size else value


def output_alpha_of(model: Any, given: float | None) -> float:
    """Return the alpha of a model's output: as given, else as configured by ``output_alpha``, else 1 (softmax)."""
    if given is not None:
        return EntmaxLogitsProcessor(given).alpha
    config = getattr(model.config, CONFIG_KEY, None) or {}
    return float(config.get("output_alpha") or 1.0)


def _without_entmax(
    processors: LogitsProcessorList, model: Any, output_alpha: float | None
) -> tuple[LogitsProcessorList, EntmaxLogitsProcessor]:
    """Take out the entmax processor, which the search applies itself, in float64; where there is none, make one of the model's alpha.

    A given ``output_alpha`` replaces that of the processor. An end that is forced at the maximum length is taken out too: it
    would make every cut-off sequence look finished.
    """
    rest, entmax = LogitsProcessorList(), None
    for processor in processors:
        if isinstance(processor, EntmaxLogitsProcessor):
            entmax = processor
        elif not isinstance(processor, ForcedEOSTokenLogitsProcessor):
            rest.append(processor)
    if entmax is None or output_alpha is not None:
        entmax = EntmaxLogitsProcessor(output_alpha_of(model, output_alpha), entmax.temperature if entmax else 1.0)
    return rest, entmax


def _end_of_sequence(generation_config: GenerationConfig, criteria: Any) -> tuple[list[int], list[Any]]:
    """Return the end-of-sequence tokens, and the stopping criteria that are left besides them and the maximum length."""
    tokens = getattr(generation_config, "_eos_token_tensor", None)
    ids = [] if tokens is None else [int(token) for token in tokens]
    rest = [c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
    if not ids and not rest:
        raise ValueError(
            "no sequence can ever finish: the model has no end-of-sequence token. Set model.generation_config.eos_token_id "
            "or pass eos_token_id=..."
        )
    return ids, rest


def as_models(model: Any) -> list[Any]:
    """Make a list of models from one model or several."""
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    if not models:
        raise ValueError("the ensemble is empty: give at least one model.")
    for one in models:
        if not hasattr(one, "generate") or not hasattr(one, "prepare_inputs_for_generation"):
            raise TypeError(
                f"{type(one).__name__} cannot generate: load it with a language-modelling head, e.g. by "
                "AutoModelForCausalLM or AutoModelForSeq2SeqLM."
            )
    return models


def as_inputs(inputs: Any, models: list[Any]) -> list[dict[str, Any]]:
    """Return one dictionary of inputs for each model, on its device."""
    several = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs] * len(models)
    if len(several) != len(models):
        raise ValueError(f"{len(several)} dictionaries of inputs for {len(models)} models: give one, or one each.")
    ready = []
    for one, model in zip(several, models, strict=True):
        if not isinstance(one, Mapping):
            raise TypeError(
                f"inputs must be a dictionary as tokenizers return it (input_ids, attention_mask, ...), not "
                f"{type(one).__name__}."
            )
        if one.get("past_key_values") is not None:
            raise ValueError("inputs hold past_key_values: the search keeps caches of its own; give the whole prompt.")
        device = model.device
        ready.append({k: v.to(device) if isinstance(v, Tensor) else v for k, v in one.items() if k != "labels"})
    return ready


def number_of_inputs(inputs: list[dict[str, Any]]) -> int:
    """Return how many inputs the dictionaries hold, one for each model."""
    sizes = set()
    for one in inputs:
        sizes.add(next((v.shape[0] for v in one.values() if isinstance(v, Tensor) and v.dim()), None))
        if None in sizes:
            raise ValueError(f"inputs hold no tensor, only {sorted(one)}: the batch size cannot be told.")
    if len(sizes) > 1:
        raise ValueError(f"the models of an ensemble were given batches of different sizes: {sorted(sizes)}.")
    return sizes.pop()


def take_inputs(inputs: Mapping[str, Any], indices: Sequence[int], size: int) -> dict[str, Any]:
    """Select the rows of some of ``size`` elements of the batch."""
    return {name: _take_rows(name, value, torch.tensor(indices), size) for name, value in inputs.items()}


def with_members(
    models: list[Any],
    inputs: list[dict[str, Any]],
    body: Callable[[Ensemble], T],
    *,
    output_alpha: float | None,
    num_beams: int,
    max_new_tokens: int | None,
    options: dict[str, Any],
) -> T:
    """Have ``generate()`` of each model prepare its inputs, then run ``body`` inside the innermost call.

    Inside, because wrappers (PEFT among them) change their model for the duration of the call only. Where
    ``output_alpha`` or ``max_new_tokens`` is None, the models' configurations decide; ``num_beams`` are rows per input.
    """
    parts: list[Ensemble] = []
    results: list[T] = []

    def next_member(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **rest: Any,
    ) -> T:
        given = (model, input_ids, logits_processor, stopping_criteria, generation_config)
        parts.append(Ensemble.of_one(*given, rest, output_alpha))
        return prepare(len(parts))

    def prepare(index: int) -> T:
        if index < len(models):
            limit = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
            return models[index].generate(
                **inputs[index],
                **{"do_sample": False, "num_return_sequences": 1, "return_dict_in_generate": False},
                **limit,
                **options,
                num_beams=num_beams,
                custom_generate=next_member,
            )
        results.append(body(Ensemble.joined(parts)))
        return results[0]

    # Dropout is off: what it draws anew at every step is no distribution to search.
    with contextlib.ExitStack() as off:
        for model in models:
            off.enter_context(evaluation_mode(model))
        try:
            returned = prepare(0)
        except Exception as error:
            if not results:
                raise
            raise _cannot_search(models) from error
    if not results or returned is not results[0]:
        raise _cannot_search(models)
    return returned


def _cannot_search(models: list[Any]) -> TypeError:
    names = ", ".join(type(model).__name__ for model in models)
    return TypeError(
        f"generate() of {names} works on what its decoding loop returns, or runs another loop: it cannot be searched. "
        "Models that use generate() of Transformers' GenerationMixin can."
    )


def with_one_input(
    models: list[Any],
    inputs: list[dict[str, Any]],
    index: int,
    body: Callable[[Ensemble], T],
    *,
    options: dict[str, Any],
    **rest: Any,
) -> T:
    """Do as :func:`with_members` for element ``index`` of the batch alone."""
    if (allowed := options.get("prefix_allowed_tokens_fn")) is not None:
        # The user's function counts the elements of the user's batch.
        options = {**options, "prefix_allowed_tokens_fn": lambda _, input_ids: allowed(index, input_ids)}
    size = number_of_inputs(inputs)
    one = [take_inputs(each, [index], size) for each in inputs]
    return with_members(models, one, body, num_beams=1, options=options, **rest)
