"""Search with certificates against brute force: every sequence that a small model can produce, enumerated."""

import math
import random
import re

import pytest
import torch
import transformers as tf

import hf_entmax
from hf_entmax.generation import (
    SearchResult,
    beam_search,
    certificates_in_words,
    certified_beam_search,
    enumerate_hypotheses,
    exact_map,
    force_decode,
)
from hf_entmax.ops import entmax

VOCAB, PAD, BOS, EOS = 6, 0, 1, 2
_IDS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_SEQ = {
    **_IDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 32,
    "decoder_start_token_id": BOS,
    "forced_eos_token_id": None,
}
_LLAMA = {
    **_IDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}
FAMILIES = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**_IDS, n_embd=16, n_layer=1, n_head=2, n_positions=32)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_LLAMA)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(**_IDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=PAD)
    ),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**_SEQ)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**_SEQ)),
}


def build(family, seed):
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "norm" not in name:
                parameter.mul_(0.5 / parameter.std())
    # In float64 the cached, the batched and the plain forward pass agree to the last digits that are compared.
    return model.double().eval()


def batch_of(model, lengths, rng):
    """Token ids, padded left for decoders, with their mask; and the same without padding, one by one."""
    rows = [[rng.randint(3, VOCAB - 1) for _ in range(length)] for length in lengths]
    longest = max(lengths)
    fill = lambda row: [PAD] * (longest - len(row))  # noqa: E731
    right = model.config.is_encoder_decoder
    ids = torch.tensor([row + fill(row) if right else fill(row) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}, rows


def unchanged(logits, ids, step):
    return logits


def brute_force(models, row, alpha, length, adjust=unchanged, ends=(EOS,)):
    """Probabilities of all finished sequences, and of all prefixes of the full length; ``adjust(logits, ids, step)``."""
    finished, prefixes = {}, {(): 1.0}
    for step in range(length):
        probs = 0.0
        for model in models:
            decodes = model.config.is_encoder_decoder
            start = [model.config.decoder_start_token_id] if decodes else row
            ids = torch.tensor([[*start, *prefix] for prefix in prefixes])
            source = torch.tensor([row]).expand(len(ids), -1)
            with torch.no_grad():
                out = model(source, decoder_input_ids=ids) if decodes else model(ids)
            logits = [adjust(own, seen, step) for own, seen in zip(out.logits[:, -1], ids.tolist(), strict=True)]
            probs = probs + entmax(torch.stack(logits), alpha) / len(models)
        following = {}
        for (prefix, mass), row_probs in zip(prefixes.items(), probs.tolist(), strict=True):
            for token, p in enumerate(row_probs):
                if p > 0:
                    (finished if token in ends else following)[(*prefix, token)] = mass * p
        prefixes = following
        if not prefixes:
            break
    return finished, prefixes


def check(result, finished, unfinished):
    """Nothing listed is wrong, nothing claimed is wrong."""
    assert result.probabilities == sorted(result.probabilities, reverse=True)
    assert len({tuple(s) for s in result.sequences}) == len(result.sequences)
    for tokens, p, done in zip(result.sequences, result.probabilities, result.finished, strict=True):
        assert p == pytest.approx((finished if done else unfinished)[tuple(tokens)], abs=1e-9)
    most = max([*finished.values(), *unfinished.values()])
    if result.optimal:
        assert result.finished[0] and result.probabilities[0] >= most - 1e-12
        assert result.best == result.sequences[0]
    if result.exhaustive:
        assert result.optimal and not unfinished and result.pruned_mass == 0.0
        assert {tuple(s) for s in result.sequences} == set(finished)
        assert sum(result.probabilities) == pytest.approx(1.0, abs=1e-9)
    assert sum(result.probabilities) + result.pruned_mass == pytest.approx(1.0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_two_hundred_random_cases_agree_with_brute_force(part):
    claims = {"optimal": 0, "exhaustive": 0}
    for case in range(20 * part, 20 * part + 20):
        rng = random.Random(case)
        family = list(FAMILIES)[case % 5]
        length, alpha = rng.choice([2, 3, 4]), rng.choice([1.0, 1.3, 1.5, 2.0, 2.0, 3.0])
        length = min(length, 3) if alpha < 1.5 else length
        beams, eos_bias = rng.choice([1, 2, 3, 6]), rng.choice([0.0, 2.0, 4.0])
        models = [build(family, 10 * case + i) for i in range(rng.choice([1, 1, 1, 2]))]
        batch, rows = batch_of(models[0], [rng.randint(2, 5) for _ in range(2)], rng)
        options = {"max_new_tokens": length, "output_alpha": alpha, "sequence_bias": {(EOS,): eos_bias}}
        options = options if eos_bias else {k: v for k, v in options.items() if k != "sequence_bias"}
        bias = eos_bias * torch.nn.functional.one_hot(torch.tensor(EOS), VOCAB)
        model = models if len(models) > 1 else models[0]
        beam = beam_search(model, batch, num_beams=beams, **options)
        listed = enumerate_hypotheses(model, batch, max_hypotheses=10_000, batch_size=rng.choice([1, 4, 16]), **options)
        exact = exact_map(model, batch, num_beams=beams, budget=1000, **options)
        hasty = exact_map(model, batch, num_beams=1, budget=rng.choice([1, 3]), **options)
        for i, row in enumerate(rows):
            finished, unfinished = brute_force(models, row, alpha, length, lambda z, *_: z + bias)  # noqa: B023
            for result in (beam[i], listed[i], exact[i], hasty[i]):
                check(result, finished, unfinished)
                claims["optimal"] += result.optimal
                claims["exhaustive"] += result.exhaustive
            # Nothing is missing from an enumeration without limits, and nothing is left to prove.
            assert {tuple(s) for s in listed[i].sequences} == set(finished) | set(unfinished)
            assert listed[i].exhaustive == (not unfinished)
            # With budget enough, the exact search proves whatever is true.
            best = max(finished.values(), default=0.0)
            rival = max(unfinished.values(), default=0.0)
            if best > rival * (1 + 1e-5):
                assert exact[i].optimal and exact[i].probabilities[0] == pytest.approx(best, abs=1e-9)
            elif rival > best * (1 + 1e-5):
                assert not exact[i].optimal
    assert claims["optimal"] >= 20 and claims["exhaustive"] >= 4


@pytest.mark.parametrize("family", list(FAMILIES))
def test_wide_beams_equal_the_enumeration(family):
    model = build(family, 3)
    batch, _ = batch_of(model, [3, 5, 2], random.Random(0))
    options = {"max_new_tokens": 3, "output_alpha": 2.0}
    wide = beam_search(model, batch, num_beams=VOCAB**3, **options)
    listed = enumerate_hypotheses(model, batch, max_hypotheses=VOCAB**4, **options)
    for a, b in zip(wide, listed, strict=True):
        assert a.pruned_mass == 0.0 and b.pruned_mass == 0.0
        assert dict(zip(map(tuple, a.sequences), a.probabilities, strict=True)) == pytest.approx(
            dict(zip(map(tuple, b.sequences), b.probabilities, strict=True)), abs=1e-10
        )


def test_the_limits_of_an_enumeration():
    model = build("gpt2", 1)
    batch, _ = batch_of(model, [4], random.Random(1))
    options = {"max_new_tokens": 4, "output_alpha": 1.5, "sequence_bias": {(EOS,): 2.0}}
    (everything,) = enumerate_hypotheses(model, batch, max_hypotheses=10_000, **options)
    (few,) = enumerate_hypotheses(model, batch, max_hypotheses=3, **options)
    assert few.sequences == everything.sequences[:3] and not few.exhaustive
    assert few.pruned_mass == pytest.approx(1 - sum(few.probabilities)) and few.expansions < everything.expansions
    floor = everything.probabilities[5] * 0.999
    (likely,) = enumerate_hypotheses(model, batch, max_hypotheses=10_000, min_mass=floor, **options)
    assert likely.sequences == [
        s for s, p in zip(everything.sequences, everything.probabilities, strict=True) if p >= floor
    ]
    (poor,) = enumerate_hypotheses(model, batch, budget=2, batch_size=1, **options)
    assert poor.expansions == 2 and not poor.exhaustive
    assert set(map(tuple, poor.sequences)) <= set(map(tuple, everything.sequences))


def test_an_output_that_does_not_fit_is_unfinished_and_never_certified():
    model = build("t5", 0)
    batch, _ = batch_of(model, [4, 3], random.Random(2))
    for search in (beam_search, enumerate_hypotheses, exact_map):
        for result in search(model, batch, max_new_tokens=2, output_alpha=2.0, suppress_tokens=[EOS]):
            assert result.sequences and not any(result.finished)
            assert not result.optimal and not result.exhaustive and result.best is None


def test_alpha_comes_from_the_model():
    model = hf_entmax.patch_model(build("bart", 4).float(), alpha=1.5, output_alpha=2.0)
    batch, _ = batch_of(model, [4, 3], random.Random(3))
    own = beam_search(model, batch, max_new_tokens=4)
    assert own == beam_search(model, batch, max_new_tokens=4, output_alpha=2.0)
    assert own != beam_search(model, batch, max_new_tokens=4, output_alpha=1.0)
    soft = build("bart", 4)
    assert beam_search(soft, batch, max_new_tokens=3) == beam_search(soft, batch, max_new_tokens=3, output_alpha=1.0)


def test_one_beam_is_as_good_as_greedy_search_and_dropout_is_off():
    shared = 0
    for family, seed in ((family, seed) for family in FAMILIES for seed in range(5, 11)):
        model = build(family, seed).train()
        batch, _ = batch_of(model, [4, 3], random.Random(seed))
        results = beam_search(model, batch, num_beams=1, max_new_tokens=5)
        assert model.training
        model.eval()
        greedy = model.generate(**batch, max_new_tokens=5, do_sample=False)
        new = greedy[:, 1 if model.config.is_encoder_decoder else batch["input_ids"].shape[1] :]
        rows = [row[: row.index(EOS) + 1] if EOS in row else row for row in new.tolist()]
        for result, row, greedy in zip(results, rows, force_decode(model, batch, rows), strict=True):
            # It goes on as greedy search does until that ends, and lists what ends on the way ...
            if row in result.sequences:
                shared += 1
                place = result.sequences.index(row)
                assert result.log_probabilities[place] == pytest.approx(greedy.log_probability, abs=1e-9)
            else:
                # ... or stops, when what has ended is at least as probable as the prefix it is on, which is greedy's:
                # the hypotheses are such prefixes, each with an end, and none of greedy's continuations is better.
                reached = sum(math.log(step.probability) for step in greedy.steps[: result.expansions])
                assert all(result.finished) and result.log_probabilities[0] >= reached - 1e-9
                assert reached >= greedy.log_probability
                assert all(tokens[:-1] == row[: len(tokens) - 1] for tokens in result.sequences)
    assert shared >= 10


def test_constraints_keep_to_their_input():
    for family in ("llama", "bart"):
        model = build(family, 6)
        batch, _ = batch_of(model, [3, 3, 4], random.Random(5))
        allowed = lambda index, ids: [3 + index, EOS]  # noqa: E731
        options = {"max_new_tokens": 3, "output_alpha": 1.5, "prefix_allowed_tokens_fn": allowed}
        for search in (beam_search, enumerate_hypotheses, exact_map):
            for index, result in enumerate(search(model, batch, **options)):
                assert {token for tokens in result.sequences for token in tokens} <= {3 + index, EOS}
                assert sum(result.probabilities) + result.pruned_mass == pytest.approx(1.0)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_as_the_decoding_loop_of_generate(family):
    model = hf_entmax.patch_model(build(family, 7).float(), alpha=1.5, output_alpha=1.5)
    batch, _ = batch_of(model, [4, 2], random.Random(6))
    results = beam_search(model, batch, num_beams=4, max_new_tokens=4)
    call = {"num_beams": 4, "max_new_tokens": 4, "do_sample": False, "custom_generate": certified_beam_search}
    sequences = model.generate(**batch, **call, num_return_sequences=2)
    out = model.generate(**batch, **call, num_return_sequences=2, return_dict_in_generate=True)
    assert torch.equal(out.sequences, sequences) and sequences.shape[0] == 4
    prompt = 1 if family == "t5" else batch["input_ids"].shape[1]
    for i, result in enumerate(results):
        assert out.optimal[i] == result.optimal and out.results[i] == result
        for j in range(2):
            tokens = result.sequences[j]
            assert sequences[2 * i + j, prompt : prompt + len(tokens)].tolist() == tokens
            assert out.sequences_scores[2 * i + j].item() == pytest.approx(result.log_probabilities[j], abs=1e-5)
    with pytest.raises(ValueError, match="do_sample"):
        model.generate(**batch, max_new_tokens=3, do_sample=True, custom_generate=certified_beam_search)
    with pytest.raises(ValueError, match="output_attentions"):
        model.generate(**batch, **call, return_dict_in_generate=True, output_attentions=True)


def test_fewer_hypotheses_than_asked_for_fill_the_batch_up():
    model = build("gpt2", 8)
    batch, _ = batch_of(model, [3], random.Random(7))
    out = model.generate(
        **batch, num_beams=3, num_return_sequences=3, max_new_tokens=3, custom_generate=certified_beam_search,
        return_dict_in_generate=True, sequence_bias={(EOS,): 100.0}, logits_processor=[hf_entmax.generation.EntmaxLogitsProcessor(2.0)],
    )  # fmt: skip
    assert out.exhaustive.tolist() == [True] and out.sequences.shape == (3, 4)
    assert out.sequences_scores.tolist() == [0.0, -math.inf, -math.inf] and out.finished.tolist() == [
        True,
        False,
        False,
    ]


def test_stopping_criteria_end_hypotheses():
    class AfterThree(tf.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == 3

    model = build("llama", 9)
    batch, _ = batch_of(model, [3], random.Random(8))
    (result,) = beam_search(
        model, batch, max_new_tokens=3, output_alpha=1.0, num_beams=6, stopping_criteria=[AfterThree()]
    )
    ended = [tokens for tokens, done in zip(result.sequences, result.finished, strict=True) if done]
    assert any(tokens[-1] == 3 for tokens in ended) and all(tokens[-1] in (3, EOS) for tokens in ended)
    assert all(3 not in tokens[:-1] for tokens in result.sequences)
    with pytest.raises(ValueError, match="AfterThree"):
        enumerate_hypotheses(model, batch, max_new_tokens=2, stopping_criteria=[AfterThree()])


def test_bad_input():
    model = build("gpt2", 0)
    batch, _ = batch_of(model, [3], random.Random(0))
    other = tf.GPT2LMHeadModel(tf.GPT2Config(**_IDS | {"vocab_size": 9}, n_embd=8, n_layer=1, n_head=1)).eval()
    headless = tf.GPT2Model(tf.GPT2Config(**_IDS, n_embd=8, n_layer=1, n_head=1))
    for search in (beam_search, enumerate_hypotheses, exact_map):
        for options, message in (
            ({"max_new_tokens": 0}, "max_new_tokens=0"),
            ({"output_alpha": 0.5}, "alpha=0.5"),
            ({"tolerance": -1.0}, "tolerance=-1.0"),
        ):
            with pytest.raises(ValueError, match=message):
                search(model, batch, **{"max_new_tokens": 2} | options)
        with pytest.raises(ValueError, match="one vocabulary"):
            search([model, other], batch, max_new_tokens=2)
        with pytest.raises(ValueError, match="empty"):
            search([], batch)
        with pytest.raises(TypeError, match="GPT2Model cannot generate"):
            search(headless, batch)
        with pytest.raises(TypeError, match="dictionary"):
            search(model, batch["input_ids"])
    with pytest.raises(ValueError, match="num_beams=0"):
        beam_search(model, batch, num_beams=0)
    for search in (enumerate_hypotheses, exact_map):
        with pytest.raises(ValueError, match="budget=0"):
            search(model, batch, budget=0)
    with pytest.raises(ValueError, match="min_mass=2"):
        enumerate_hypotheses(model, batch, min_mass=2)
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        beam_search(model, batch, max_new_tokens=2)
    broken = build("gpt2", 0)
    with torch.no_grad():
        broken.transformer.wte.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN"):
        beam_search(broken, batch, max_new_tokens=2)


def test_ensembles_of_models_that_end_differently_are_refused():
    a, b = build("gpt2", 0), build("gpt2", 1)
    b.generation_config.eos_token_id = 3
    batch, _ = batch_of(a, [3], random.Random(0))
    with pytest.raises(ValueError, match="end their sequences alike"):
        beam_search([a, b], batch, max_new_tokens=2)


def test_a_model_with_a_generate_of_its_own_is_refused():
    class Tokens(tf.GPT2LMHeadModel):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)["sequences"]

    class Deaf(tf.GPT2LMHeadModel):
        def generate(self, *args, custom_generate=None, **kwargs):
            return super().generate(*args, **kwargs)

    batch, _ = batch_of(build("gpt2", 0), [3], random.Random(0))
    for kind in (Tokens, Deaf):
        model = kind(tf.GPT2Config(**_IDS, n_embd=16, n_layer=1, n_head=2)).eval()
        with pytest.raises(TypeError, match=f"generate.. of {kind.__name__}"):
            beam_search(model, batch, max_new_tokens=2)


def test_adapters_do_not_change_the_search():
    peft = pytest.importorskip("peft")
    model = hf_entmax.patch_model(build("llama", 2).float(), alpha=1.5, output_alpha=1.5)
    batch, _ = batch_of(model, [4, 2], random.Random(1))
    plain = beam_search(model, batch, max_new_tokens=3)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    # Two of the hypotheses are equally probable to twelve digits: their order is not compared.
    for result, expected in zip(beam_search(wrapped, batch, max_new_tokens=3), plain, strict=True):
        found = dict(zip(map(tuple, result.sequences), result.probabilities, strict=True))
        wanted = dict(zip(map(tuple, expected.sequences), expected.probabilities, strict=True))
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_claimed_follows_from_what_is_known(alone):
    from hf_entmax.generation.results import SearchState

    tolerance, half = 1e-3, math.log(0.5)

    def claims(best=half, **known):
        result = SearchState(finished=[(best, [EOS])], **known).result(tolerance)
        return result.optimal, result.exhaustive

    assert claims(dead_mass=0.0) == (True, True)
    # Continuations that were all forbidden leave something unlisted, though nothing that could be more probable.
    assert claims(dead_mass=0.5) == (True, False)
    assert SearchState(finished=[(half, [EOS])], dead_mass=0.5).result(tolerance).pruned_mass == 0.5
    # As probable as what was dropped, or better by less than the tolerance, is no proof; nor is being worse by as little.
    for factor, optimal in (
        (1 - tolerance / 2, False),
        (1.0, False),
        (1 + tolerance / 2, False),
        (1 + 2 * tolerance, True),
    ):
        rival = {"pruned_log_probability": half} if alone else {"unfinished": [(half, [5])]}
        assert claims(best=half + math.log(factor), **rival) == (optimal, False), factor
    assert SearchState(unfinished=[(half, [5])]).result(tolerance).optimal is False
    assert SearchState().result(tolerance).exhaustive is False


def test_an_input_is_given_up_only_when_its_best_hypotheses_can_no_longer_change():
    from hf_entmax.generation.beam import _close_decided
    from hf_entmax.generation.results import SearchState

    found = SearchState([(math.log(0.4), [EOS]), (math.log(0.1), [5, EOS])], [], math.log(0.01), 0.01)
    live = torch.tensor([[math.log(0.3), -math.inf]], dtype=torch.float64)
    _close_decided([found], live)
    assert live[0, 0] == math.log(0.3) and found.pruned_mass == 0.01
    live = torch.tensor([[math.log(0.1), math.log(0.05)]], dtype=torch.float64)
    _close_decided([found], live)
    assert live.eq(-math.inf).all() and found.pruned_log_probability == pytest.approx(math.log(0.1))
    assert found.pruned_mass == pytest.approx(0.16)


def _found(log_probabilities, finished, pruned=-math.inf, optimal=False):
    tokens = [[place] for place in range(len(finished))]
    mass = 0.0 if pruned == -math.inf else math.exp(pruned)
    exhaustive = optimal and all(finished) and mass == 0.0
    return SearchResult(tokens, log_probabilities, finished, optimal, exhaustive, mass, pruned, 1)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (_found([-0.1], [True], optimal=True), "all hypotheses are known"),
        (_found([-0.1], [True], pruned=-3.0, optimal=True), "nothing that was dropped"),
        (_found([-0.1], [False]), "no hypothesis ended"),
        (_found([-0.1, -2.0], [False, True], pruned=-3.0), "cut off by max_new_tokens"),
        (_found([-2.0], [True], pruned=-1.0), "a prefix that was dropped is more probable"),
        (_found([-1.0], [True], pruned=-1.0 - 1e-12), "too close for rounding"),
    ],
)
def test_a_result_says_why_it_is_proved_or_not(result, reason):
    assert reason in result.reason


def test_a_softmax_output_is_never_proved_and_says_why():
    """Peaked, cut off and dense outputs of one model: every answer is counted once, with its reason."""
    model = build("t5", 0)
    batch, _ = batch_of(model, [3, 4, 5], random.Random(0))
    results = beam_search(model, batch, num_beams=1, max_new_tokens=6, output_alpha=1.0)
    said = certificates_in_words(results)
    assert said.startswith(f"{sum(r.optimal for r in results)} of 3 answers are proved")
    assert sum(int(n) for n in re.findall(r"; (\d+) not: ", said)) == 3 - sum(r.optimal for r in results) > 0
    with pytest.raises(ValueError, match="no results"):
        certificates_in_words([])
