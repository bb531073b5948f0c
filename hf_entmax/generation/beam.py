"""Beam search that keeps account of what it drops, and says what it can prove."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from transformers import MaxTimeCriteria
from transformers.utils import logging
from transformers.utils.generic import ModelOutput

from hf_entmax.generation.members import Ensemble, as_inputs, as_models, with_members
from hf_entmax.generation.results import SearchResult, SearchState

logger = logging.get_logger(__name__)
TOLERANCE = 1e-6


def beam_search(
    model: Any,
    inputs: Any,
    num_beams: int = 5,
    max_new_tokens: int | None = None,
    *,
    output_alpha: float | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> list[SearchResult]:
    r"""Search by beams for the most probable output, with a proof where there is one.

        p(y | x) = prod_t p(y_t | y_<t, x),     p(. | y_<t, x) = entmax(logits, alpha)

    With sparse probabilities most continuations are impossible, a beam often holds all that are left, and the search
    knows it: *exhaustive* results list every possible output, *optimal* ones start with an output that nothing dropped
    on the way can beat. Nothing is normalised by length. An input is searched until everything that is left of it has
    finished, or, once something had to be dropped, until its ``num_beams`` best hypotheses can no longer change.

    All finished hypotheses are returned, also more than ``num_beams`` of them, and the prefixes that ``max_new_tokens``
    cut off, as unfinished. The result is proved for the probabilities *as computed*: in half precision these are
    coarse. Dropout is off during the search.

    Args:
        model: a model with a language-modelling head, encoder-decoder or decoder-only; or a list of models with one
            vocabulary, whose probabilities are averaged at every step.
        inputs: what the tokenizer returned (``input_ids`` ``[B, T]``, ``attention_mask``, ...), left-padded for
            decoder-only models; or one such dictionary per model.
        num_beams: prefixes kept per input and step, at least 1.
        max_new_tokens: longest output in tokens, at least 1; by default from ``model.generation_config``.
        output_alpha: alpha of the output probabilities, ``>= 1``, for all models; by default each model's own
            ``output_alpha``, or 1 (softmax) if it has none.
        tolerance: relative. A hypothesis counts as at least as probable as a prefix ``w`` only if its probability is at
            least ``(1 + tolerance) p(w)``: certificates are withheld where rounding could decide.
        **options: further arguments of ``generate()``: ``logits_processor``, ``prefix_allowed_tokens_fn``,
            ``eos_token_id``, ``bad_words_ids``, ``forced_bos_token_id``, ... All act on the logits, before entmax.

    Returns:
        One result per input.

    Raises:
        ValueError: for ``num_beams`` or ``max_new_tokens`` below 1, alpha below 1, a negative tolerance, an ensemble of
            different vocabularies, a model without end-of-sequence token, a quantized cache, or logits that are NaN.
        TypeError: if a model cannot generate or the inputs are no dictionary.

    Examples:
        >>> import torch
        >>> from hf_entmax.generation import beam_search
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> ids = {"vocab_size": 5, "bos_token_id": 1, "eos_token_id": 1}
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, **ids))
        >>> (found,) = beam_search(model, {"input_ids": torch.tensor([[2, 3]])}, max_new_tokens=3, output_alpha=1.5)
        >>> round(sum(found.probabilities) + found.pruned_mass, 4)
        1.0

    Reference:
        Peters, Niculae, Martins 2019, sec. 4.1.
    """
    check_search_options(num_beams=num_beams, max_new_tokens=max_new_tokens, tolerance=tolerance)
    models = as_models(model)
    return with_members(
        models,
        as_inputs(inputs, models),
        lambda ensemble: [found.result(tolerance) for found in run_beams(ensemble, num_beams)],
        output_alpha=output_alpha,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        options=options,
    )


def run_beams(ensemble: Ensemble, num_beams: int) -> list[SearchState]:
    """Run the search over members prepared with ``num_beams`` rows per input."""
    size = ensemble.rows // num_beams
    found = [SearchState() for _ in range(size)]
    tokens = torch.empty(size * num_beams, 0, dtype=torch.long)
    live = torch.full((size, num_beams), -math.inf, dtype=torch.float64)
    live[:, 0] = 0.0
    eos = torch.tensor(ensemble.eos_token_ids, dtype=torch.long)
    for step in range(ensemble.max_new_tokens):
        log_probs = ensemble.step(tokens).cpu().unflatten(0, (size, num_beams))
        total = live[..., None] + log_probs
        _note_dead_ends(found, live, log_probs)
        for index, beam, which in (total[..., eos] > -math.inf).nonzero().tolist():
            token = int(eos[which])
            prefix = tokens[index * num_beams + beam].tolist()
            found[index].finished.append((float(total[index, beam, token]), [*prefix, token]))
        total[..., eos] = -math.inf
        live, parents, new = _best_continuations(found, total)
        rows = (parents + num_beams * torch.arange(size)[:, None]).flatten()
        tokens = torch.cat((tokens[rows], new.flatten()[:, None]), dim=-1)
        stop = _apply_criteria(ensemble, found, tokens, live)
        _close_decided(found, live)
        if stop or not bool((live > -math.inf).any()):
            break
        if step + 1 < ensemble.max_new_tokens:
            ensemble.reorder(rows)
    for index, beam in (live > -math.inf).nonzero().tolist():
        found[index].unfinished.append((float(live[index, beam]), tokens[index * num_beams + beam].tolist()))
    return found


def _best_continuations(found: list[SearchState], total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``K`` best of ``total`` ``[B, K, V]``: log-probabilities, parent beams and tokens, ``[B, K]`` each."""
    _, num_beams, classes = total.shape
    flat = total.flatten(1)
    best = flat.topk(num_beams, dim=-1)
    flat.scatter_(1, best.indices, -math.inf)
    for index, (value, mass) in enumerate(zip(flat.amax(-1).tolist(), flat.exp().sum(-1).tolist(), strict=True)):
        found[index].prune(value, mass)
    return best.values, best.indices // classes, best.indices % classes


def _note_dead_ends(found: list[SearchState], live: Tensor, log_probs: Tensor) -> None:
    """Count the prefixes that are expanded, and the mass of those for which every continuation was forbidden."""
    alive = live > -math.inf
    dead = alive & (log_probs == -math.inf).all(-1)
    for index, count in enumerate(alive.sum(-1).tolist()):
        found[index].expansions += count
    for index, beam in dead.nonzero().tolist():
        found[index].dead_mass += math.exp(live[index, beam])


def _apply_criteria(ensemble: Ensemble, found: list[SearchState], tokens: Tensor, live: Tensor) -> bool:
    """Apply stopping criteria other than the end of sequence: what they stop is finished; return whether time is up."""
    time_is_up = False
    member = ensemble.members[0]
    whole = torch.cat((member.input_ids, tokens.to(member.input_ids.device)), dim=-1) if ensemble.criteria else tokens
    for criterion in ensemble.criteria:
        done = criterion(whole, None).cpu().view_as(live)
        if isinstance(criterion, MaxTimeCriteria):
            time_is_up = time_is_up or bool(done.all())
            continue
        for index, beam in (done & (live > -math.inf)).nonzero().tolist():
            row = index * live.shape[1] + beam
            found[index].finished.append((float(live[index, beam]), tokens[row].tolist()))
            live[index, beam] = -math.inf
    return time_is_up


def _close_decided(found: list[SearchState], live: Tensor) -> None:
    """Drop the prefixes of an input that can no longer change its best hypotheses, unless all may still be found."""
    num_beams = live.shape[1]
    for index, findings in enumerate(found):
        if findings.pruned_log_probability == -math.inf or len(findings.finished) < num_beams:
            continue
        last = sorted((value for value, _ in findings.finished), reverse=True)[num_beams - 1]
        if last >= float(live[index].max()):
            findings.prune(float(live[index].max()), float(live[index].exp().sum()))
            live[index] = -math.inf


def check_search_options(*, tolerance: float = 0.0, **counts: int | None) -> None:
    """Raise ValueError for numbers out of range."""
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} is not allowed: it must be an integer of at least 1.")
    if not 0.0 <= tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance} is not allowed: it must be a finite number of at least 0.")


@dataclasses.dataclass
class CertifiedGenerateOutput(ModelOutput):
    """What ``generate(custom_generate=certified_beam_search, return_dict_in_generate=True)`` returns.

    Attributes:
        sequences: prompt (or decoder start) and new tokens, padded, ``[B * num_return_sequences, T]``.
        sequences_scores: ``log p(y | x)``, float32 ``[B * num_return_sequences]``; ``-inf`` for rows that only fill the
            batch up because the input has fewer hypotheses.
        finished: bool ``[B * num_return_sequences]``.
        optimal: bool ``[B]``, see :class:`SearchResult`; likewise ``exhaustive``.
        exhaustive: bool ``[B]``.
        pruned_mass: float64 ``[B]``.
        results: the full results, one per input.
    """

    sequences: Tensor | None = None
    sequences_scores: Tensor | None = None
    finished: Tensor | None = None
    optimal: Tensor | None = None
    exhaustive: Tensor | None = None
    pruned_mass: Tensor | None = None
    results: tuple[SearchResult, ...] | None = None


@torch.no_grad()
def certified_beam_search(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    tolerance: float = TOLERANCE,
    **model_kwargs: Any,
) -> Tensor | CertifiedGenerateOutput:
    """Run :func:`beam_search` as the decoding loop of ``generate()``.

        model.generate(**inputs, num_beams=5, custom_generate=hf_entmax.generation.certified_beam_search)

    Args:
        model: filled in by ``generate()``, like all arguments but ``tolerance``.
        input_ids: ``[B * num_beams, T]``.
        logits_processor: acts on the logits; alpha is that of the ``EntmaxLogitsProcessor`` in it (which a model with
            ``output_alpha`` has by itself), or 1.
        stopping_criteria: besides the end of sequence and the maximum length, what they stop counts as finished; when
            the time is up, the search ends with what it has.
        generation_config: ``num_beams``, ``num_return_sequences``, ``return_dict_in_generate`` are followed.
        tolerance: as for :func:`beam_search`; can be passed to ``generate()``.
        **model_kwargs: what the model needs.

    Returns:
        The ``num_return_sequences`` most probable sequences of each input, ``[B * num_return_sequences, T]``, padded; or
        a :class:`CertifiedGenerateOutput`.

    Raises:
        ValueError: for ``do_sample``, and for outputs that are not collected here (``output_scores`` adds nothing to the
            scores that there always are).
    """
    if generation_config.do_sample:
        raise ValueError("certified_beam_search is a deterministic search: pass do_sample=False.")
    for name in ("output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None) and generation_config.return_dict_in_generate:
            raise ValueError(f"certified_beam_search does not collect what {name}=True asks for: leave it out.")
    if (generation_config.length_penalty or 1.0) != 1.0:
        logger.warning_once(
            f"length_penalty={generation_config.length_penalty} has no effect: certified_beam_search ranks by probability."
        )
    check_search_options(tolerance=tolerance)
    num_beams = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    count = generation_config.num_return_sequences or 1
    given = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    ensemble = Ensemble.of_one(*given, model_kwargs)
    results = tuple(found.result(tolerance) for found in run_beams(ensemble, num_beams))
    pad = generation_config._pad_token_tensor
    sequences = _padded(
        input_ids[::num_beams], results, count, int(pad) if pad is not None else (ensemble.eos_token_ids or [0])[0]
    )
    if not generation_config.return_dict_in_generate:
        return sequences
    fill = lambda values, empty: [(*values, *[empty] * count)[:count] for values in values]  # noqa: E731
    tensor = lambda values, dtype: torch.tensor(values, dtype=dtype, device=input_ids.device)  # noqa: E731
    return CertifiedGenerateOutput(
        sequences=sequences,
        sequences_scores=tensor(fill([r.log_probabilities for r in results], -math.inf), torch.float32).flatten(),
        finished=tensor(fill([r.finished for r in results], False), torch.bool).flatten(),
        optimal=tensor([r.optimal for r in results], torch.bool),
        exhaustive=tensor([r.exhaustive for r in results], torch.bool),
        pruned_mass=torch.tensor([r.pruned_mass for r in results], dtype=torch.float64),
        results=results,
    )


def _padded(prompts: Tensor, results: tuple[SearchResult, ...], count: int, pad: int) -> Tensor:
    chosen = [[*result.sequences, *[[]] * count][:count] for result in results]
    longest = max((len(tokens) for group in chosen for tokens in group), default=0)
    rows = [[*tokens, *[pad] * (longest - len(tokens))] for group in chosen for tokens in group]
    new = torch.tensor(rows, dtype=torch.long, device=prompts.device).view(len(rows), longest)
    return torch.cat((prompts.repeat_interleave(count, dim=0), new), dim=-1)
