"""Searches of models whose generation_config constrains them, of ensembles and with every cache, against brute force."""

import itertools
import random

import pytest
import torch
import transformers as tf
from test_search import BOS, EOS, FAMILIES, VOCAB, batch_of, brute_force, build, check

from hf_entmax.generation import beam_search, enumerate_hypotheses, exact_map, force_decode


def without(tokens):
    return lambda logits: logits.index_fill(0, torch.tensor(sorted(tokens), dtype=torch.long), -torch.inf)


def no_repeated_pairs(logits, ids, step):
    return without({b for a, b in itertools.pairwise(ids) if a == ids[-1]})(logits)


def penalised(logits, ids, step):
    seen = torch.tensor(sorted(set(ids)))
    old = logits[seen]
    return logits.index_copy(0, seen, torch.where(old < 0, old * 1.5, old / 1.5))


CONSTRAINTS = {
    "suppress_tokens": ({"suppress_tokens": [3]}, lambda z, ids, step: without({3})(z)),
    "begin_suppress_tokens": (
        {"begin_suppress_tokens": [4, EOS]},
        lambda z, ids, step: without({4, EOS} if step == 0 else set())(z),
    ),
    "forced_bos_token_id": (
        {"forced_bos_token_id": 5},
        lambda z, ids, step: torch.where(torch.arange(VOCAB) == 5, 0.0, -torch.inf).to(z) if len(ids) == 1 else z,
    ),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, no_repeated_pairs),
    "min_new_tokens": ({"min_new_tokens": 2}, lambda z, ids, step: without({EOS} if step < 2 else set())(z)),
    "bad_words_ids": ({"bad_words_ids": [[4]]}, lambda z, ids, step: without({4})(z)),
    "repetition_penalty": ({"repetition_penalty": 1.5}, penalised),
    "several ends": ({"eos_token_id": [EOS, 5]}, lambda z, ids, step: z),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_constraints_of_the_generation_config_are_kept(constraint, family):
    settings, adjust = CONSTRAINTS[constraint]
    model = build(family, 11)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    # Transformers looks for repeated pairs in the padding as well.
    lengths = [3, 3] if constraint == "no_repeat_ngram_size" else [4, 2]
    batch, rows = batch_of(model, lengths, random.Random(3))
    ends = settings.get("eos_token_id", [EOS])
    options = {"max_new_tokens": 3, "output_alpha": 1.5}
    beam = beam_search(model, batch, num_beams=3, **options)
    listed = enumerate_hypotheses(model, batch, max_hypotheses=10_000, **options)
    exact = exact_map(model, batch, num_beams=1, **options)
    for i, row in enumerate(rows):
        finished, unfinished = brute_force([model], row, 1.5, 3, adjust, ends)
        for result in (beam[i], listed[i], exact[i]):
            check(result, finished, unfinished)
        assert {tuple(s) for s in listed[i].sequences} == set(finished) | set(unfinished)


@pytest.mark.parametrize("families", [("gpt2", "llama", "gpt2"), ("bart", "marian", "bart"), ("bart", "t5")], ids=str)
def test_ensembles_of_several_kinds_average_at_every_step(families):
    models = [build(family, 20 + i) for i, family in enumerate(families)]
    batch, rows = batch_of(models[0], [4, 2], random.Random(5))
    options = {"max_new_tokens": 3, "output_alpha": 2.0}
    beam = beam_search(models, batch, num_beams=4, **options)
    listed = enumerate_hypotheses(models, batch, max_hypotheses=10_000, **options)
    exact = exact_map(models, batch, num_beams=1, **options)
    for i, row in enumerate(rows):
        finished, unfinished = brute_force(models, row, 2.0, 3)
        for result in (beam[i], listed[i], exact[i]):
            check(result, finished, unfinished)
        assert {tuple(s) for s in listed[i].sequences} == set(finished) | set(unfinished)
        forced = force_decode(
            models, {k: v[i : i + 1] for k, v in batch.items()}, [listed[i].sequences[0]], output_alpha=2.0
        )
        assert forced[0].log_probability == pytest.approx(listed[i].log_probabilities[0], abs=1e-9)


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cache_leads_to_the_same_search(family, options):
    model = build(family, 12)
    batch, _ = batch_of(model, [5, 3, 2], random.Random(0))
    call = {"max_new_tokens": 4, "output_alpha": 1.5, "num_beams": 3}
    for search in (beam_search, exact_map):
        for one, other in zip(search(model, batch, **call), search(model, batch, **call, **options), strict=True):
            assert one.sequences == other.sequences and one.optimal == other.optimal
            assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-9)


def test_a_quantized_cache_proves_nothing_and_is_refused():
    pytest.importorskip("hqq")
    model = build("llama", 12)
    batch, _ = batch_of(model, [5, 3], random.Random(0))
    cache = {"cache_implementation": "quantized", "cache_config": {"backend": "hqq", "nbits": 8, "q_group_size": 8}}
    for search in (beam_search, exact_map):
        with pytest.raises(ValueError, match="quantized cache"):
            search(model, batch, max_new_tokens=2, **cache)


def test_windows_shorter_than_the_prompt():
    torch.manual_seed(2)
    config = build("llama", 0).config.to_diff_dict() | {"sliding_window": 3, "bos_token_id": BOS}
    model = tf.MistralForCausalLM(tf.MistralConfig(**config)).double().eval()
    batch, rows = batch_of(model, [6, 4], random.Random(1))
    call = {"max_new_tokens": 3, "output_alpha": 1.5}
    beam = beam_search(model, batch, num_beams=4, **call)
    exact = exact_map(model, batch, num_beams=2, **call)
    for i, row in enumerate(rows):
        finished, unfinished = brute_force([model], row, 1.5, 3)
        check(beam[i], finished, unfinished)
        check(exact[i], finished, unfinished)
