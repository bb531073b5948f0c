"""Conformal sets: the promise over many splits, sets as supports of entmax, what is refused, what is saved."""

import json
import math

import pytest
import torch
import transformers as tf
from transformers.pipelines import pipeline

import hf_entmax
from hf_entmax.generation import (
    ConformalSets,
    EntmaxLogitsProcessor,
    calibrate_sets,
    enumerate_hypotheses,
    force_decode,
    prediction_sets,
)
from hf_entmax.ops import entmax
from hf_entmax.ops.conformal import conformal_temperature, support_at, support_temperature

CLASSES = 7


class Table(torch.nn.Module):
    """A "classifier" whose logits are given: the inputs number the rows."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.config = torch.nn.Parameter(logits), tf.PreTrainedConfig(num_labels=logits.shape[-1])

    def forward(self, input_ids):
        return tf.modeling_outputs.SequenceClassifierOutput(logits=self.logits[input_ids[:, 0]])


def drawn(count, seed, classes=CLASSES):
    """Logits and labels that follow their softmax, so that no set is trivial."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def batches_of(labels, size=64):
    rows = torch.arange(len(labels))
    return [{"input_ids": rows[i : i + size, None], "labels": labels[i : i + size]} for i in range(0, len(rows), size)]


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0, 3.0])
def test_the_score_is_the_temperature_at_which_a_label_gets_mass(alpha):
    logits, labels = drawn(200, 1)
    scores = support_temperature(logits, labels, alpha)
    assert (scores[labels == logits.argmax(-1)] == 0).all() and (scores[labels != logits.argmax(-1)] > 0).all()
    for factor, possible in ((1 + 1e-3, True), (1 - 1e-3, False)):
        rows = scores > 0
        probs = entmax(logits[rows] / (factor * scores[rows, None]), alpha)
        assert ((probs.gather(-1, labels[rows, None]) > 0) == possible).all()


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("classes", [2, 30, 3000])
def test_the_set_is_the_support_of_entmax(alpha, classes):
    logits, _ = drawn(40, 2, classes)
    logits[0] = 0.0  # all alike
    logits[1, 1:] = -math.inf
    for temperature in (0.01, 0.5, 3.0):
        inside = support_at(logits, temperature, alpha)
        assert torch.equal(inside, entmax(logits / temperature, alpha) > 0)
        some = torch.arange(0, classes, max(1, classes // 40))
        every = support_temperature(logits[:3, None].expand(-1, len(some), -1), some.expand(3, -1), alpha)
        assert torch.equal(inside[:3, some], every < temperature)


@pytest.mark.parametrize("delta", [0.05, 0.1, 0.3])
def test_coverage_over_many_splits_is_what_was_promised(delta):
    calibration, test, splits = 99, 100, 400
    logits, labels = drawn(splits * (calibration + test), 7)
    logits, labels = logits.unflatten(0, (splits, -1)), labels.unflatten(0, (splits, -1))
    scores = support_temperature(logits, labels, 1.5)
    hits = 0
    for own, rows, truth in zip(scores, logits[:, calibration:], labels[:, calibration:], strict=True):
        inside = support_at(rows, conformal_temperature(own[:calibration], delta), 1.5)
        hits += int(inside.gather(-1, truth[:, None]).sum())
    # Of one split, coverage is drawn from Beta(k, n + 1 - k), and hits from a binomial with it. Four standard errors.
    place = math.ceil((calibration + 1) * (1 - delta))
    mean = place / (calibration + 1)
    variance = mean * (1 - mean) * (1 / (calibration + 2) + 1 / test) / splits
    share = hits / (splits * test)
    assert mean >= 1 - delta - 1e-12
    # Several labels have the score 0, so that more may be covered than with scores that never tie.
    assert share >= mean - 4 * math.sqrt(variance)
    assert share <= mean + 4 * math.sqrt(variance)


def test_the_quantile_is_that_of_the_finite_sample():
    scores = torch.arange(1.0, 20.0).flip(0)  # 19 of them: 20 * 0.95 = 19, 20 * 0.9 = 18
    for delta, place in ((0.05, 19), (0.1, 18), (0.5, 10), (0.52, 10), (0.95, 1)):
        assert conformal_temperature(scores, delta) == pytest.approx(place, rel=1e-5)
        assert conformal_temperature(scores, delta) > place
    with pytest.raises(ValueError, match=r"delta=0.04 cannot be promised after 19 .* at least 24"):
        conformal_temperature(scores, 0.04)
    assert conformal_temperature(torch.zeros(19), 0.1) > 0
    with pytest.raises(ValueError, match="-inf"):
        conformal_temperature(torch.full((19,), math.inf), 0.1)
    with pytest.raises(ValueError, match="NaN"):
        conformal_temperature(torch.full((19,), math.nan), 0.1)


def test_a_classifier_is_calibrated_by_batches_and_alpha_is_chosen_on_other_examples():
    logits, labels = drawn(400, 3)
    model = Table(logits.clone())
    sets = calibrate_sets(model, batches_of(labels), 0.1, alpha=1.5)
    assert sets.temperature == conformal_temperature(support_temperature(logits, labels, 1.5), 0.1)
    assert (sets.examples, sets.alpha, sets.unit) == (400, 1.5, "answer") and ConformalSets.of(model) == sets
    # One label per example: a step is an answer.
    assert calibrate_sets(model, batches_of(labels), 0.1, alpha=1.5, unit="step").temperature == sets.temperature
    with pytest.raises(ValueError, match=r"\['answer', 'step'\]"):
        ConformalSets.of(model)

    logits, labels = drawn(400, 22)  # every fourth example wants another alpha than those after it
    chosen = calibrate_sets(Table(logits.clone()), batches_of(labels, 30), 0.1, alpha=(1.2, 1.5, 3.0))
    place, best = torch.arange(400) % 4, []
    first, rest = place == 0, place != 0
    for counted in (first, place == 3):
        sizes = {}
        for alpha in (1.2, 1.5, 3.0):
            scores = support_temperature(logits, labels, alpha)
            sizes[alpha] = int(support_at(logits[counted], conformal_temperature(scores[first], 0.1), alpha).sum())
        best.append(min(sizes, key=sizes.get))
    best, elsewhere = best
    assert best != elsewhere and chosen.alpha == best and chosen.examples == 300
    assert chosen.temperature == conformal_temperature(support_temperature(logits, labels, best)[rest], 0.1)


def test_what_is_refused():
    logits, labels = drawn(50, 4)
    model = Table(logits)
    given = batches_of(labels)
    with pytest.raises(ValueError, match="no output_alpha above 1"):
        calibrate_sets(model, given)
    for alpha in (1.0, 0.5, math.inf, True, "1.5", [1.5, 1.0]):
        with pytest.raises(ValueError, match="alpha"):
            calibrate_sets(model, given, alpha=alpha)
    with pytest.raises(ValueError, match="alpha is empty"):
        calibrate_sets(model, given, alpha=())
    for delta in (0.0, 1.0, -0.1, math.nan, True):
        with pytest.raises(ValueError, match=f"delta={delta}"):
            calibrate_sets(model, given, delta, alpha=1.5)
    with pytest.raises(ValueError, match=r"delta=0.01 cannot be promised after 50 .* at least 99"):
        calibrate_sets(model, given, 0.01, alpha=1.5)
    with pytest.raises(ValueError, match="after 0 example"):
        calibrate_sets(model, [], alpha=1.5)
    with pytest.raises(ValueError, match="after 13 example"):  # those that choose must be enough as well
        calibrate_sets(model, given, 0.05, alpha=[1.5, 2.0])
    with pytest.raises(ValueError, match="unit='token'"):
        calibrate_sets(model, given, alpha=1.5, unit="token")
    with pytest.raises(ValueError, match="7 classes"):
        calibrate_sets(model, batches_of(labels + 3), alpha=1.5)
    with pytest.raises(TypeError, match="integer labels"):
        calibrate_sets(model, batches_of(labels.float()), alpha=1.5)
    with pytest.raises(TypeError, match="integer labels"):
        calibrate_sets(model, [{"input_ids": torch.zeros(2, 1, dtype=torch.long)}], alpha=1.5)
    with pytest.raises(TypeError, match="dict"):
        calibrate_sets(model, [labels], alpha=1.5)
    with pytest.raises(ValueError, match="one class"):
        calibrate_sets(Table(logits[:, :1]), batches_of(labels * 0), alpha=1.5)
    with pytest.raises(ValueError, match="NaN"):
        calibrate_sets(Table(logits * math.nan), given, alpha=1.5)
    with pytest.raises(ValueError, match="-inf throughout"):
        support_at(torch.full((2, 3), -math.inf), 1.0, 1.5)
    with pytest.raises(ValueError, match="temperature=0"):
        support_at(logits, 0.0, 1.5)
    assert not hasattr(model.config, "entmax_sets")
    with pytest.raises(ValueError, match="calibrate_sets"):
        prediction_sets(model, given[0])


def _classifier():
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, num_labels=5, id2label={i: f"class {i}" for i in range(5)},
    )  # fmt: skip
    model = tf.BertForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight, std=3.0)
    return model


@pytest.mark.parametrize("patched", [True, False])
def test_sets_are_saved_with_the_model_and_pipelines_return_them(tmp_path, patched):
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = _classifier()
    if patched:
        hf_entmax.patch_model(model, output_alpha=1.5)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 30, (60, 5), generator=generator)
    labels = torch.randint(0, 5, (60,), generator=generator)
    sets = calibrate_sets(model, [{"input_ids": ids, "labels": labels}], 0.2, alpha=None if patched else 2.0)
    model.save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "config.json").read_text())["entmax_sets"]["answer"]["temperature"] == sets.temperature
    )
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert ConformalSets.of(loaded) == sets
    found = prediction_sets(loaded, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    with torch.no_grad():
        probs = entmax(model(ids).logits.double() / sets.temperature, sets.alpha)
    for row, own in zip(found, probs, strict=True):
        assert {entry["label"]: pytest.approx(entry["score"], abs=1e-5) for entry in row} == {
            f"class {i}": float(own[i]) for i in own.nonzero().flatten().tolist()
        }
        assert [entry["score"] for entry in row] == sorted((entry["score"] for entry in row), reverse=True)
    held = sum(f"class {label}" in [e["label"] for e in row] for label, row in zip(labels.tolist(), found, strict=True))
    assert held >= math.ceil(61 * 0.8)

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, 30)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    pipe = pipeline("text-classification", model=loaded, tokenizer=tokenizer)
    texts = [" ".join(f"w{i}" for i in row) for row in ids[:10].tolist()]
    for one, other in zip(prediction_sets(pipe, texts), found, strict=False):
        assert [entry["label"] for entry in one] == [entry["label"] for entry in other]
        assert [e["score"] for e in one] == pytest.approx([e["score"] for e in other], abs=1e-5)
    with pytest.raises(TypeError, match="feature-extraction"):
        prediction_sets(pipeline("feature-extraction", model=loaded, tokenizer=tokenizer), texts)


FAMILIES = ["bart", "gpt2"]


def _generator(family):
    torch.manual_seed(3)
    ids = {"vocab_size": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**ids, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    else:
        shape = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | {"d_model": 16, "max_position_embeddings": 32}
        shape |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
        shape |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
        config = tf.BartConfig(**ids, **shape, decoder_start_token_id=1, forced_eos_token_id=None)
        model = tf.BartForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "norm" not in name:
                parameter.mul_(0.4 / parameter.std())
    return model.double().eval()


def _examples(family, count, seed):
    """Sources and answers, at most 3 tokens and an end; the batch has both, as a collator makes it."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randint(3, 6, (count, 4), generator=generator)
    answers = []
    for length in torch.randint(1, 4, (count,), generator=generator).tolist():
        answers.append([*torch.randint(3, 6, (length,), generator=generator).tolist(), 2])
    padded = torch.tensor([row + [-100] * (4 - len(row)) for row in answers])
    if family == "bart":
        return sources, answers, {"input_ids": sources, "labels": padded}
    ids = torch.cat((sources, padded.clamp(min=0)), 1)
    labels = torch.cat((torch.full_like(sources, -100), padded), 1)
    mask = torch.cat((torch.ones_like(sources), (padded != -100).long()), 1)
    return sources, answers, {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_answers_are_in_the_set_exactly_if_all_their_steps_are(family):
    model = _generator(family)
    sources, answers, batch = _examples(family, 40, 5)
    sets = calibrate_sets(model, [{k: v[i : i + 16] for k, v in batch.items()} for i in (0, 16, 32)], 0.3, alpha=2.0)
    results = prediction_sets(model, {"input_ids": sources}, max_new_tokens=4, max_hypotheses=10_000, budget=10**6)
    steps = force_decode(model, {"input_ids": sources}, answers, logits_processor=[sets.processor])
    held = 0
    for answer, result, forced in zip(answers, results, steps, strict=True):
        inside = answer in result.sequences
        assert inside == all(step.probability > 0 for step in forced.steps)
        held += inside
        assert sum(result.probabilities) + result.pruned_mass == pytest.approx(1.0)
    # Of the calibrated answers themselves, so many are inside by construction, and no more where scores do not tie.
    assert held == math.ceil(41 * 0.7)
    with pytest.raises(ValueError, match="unit='step'"):
        prediction_sets(model, {"input_ids": sources}, unit="step")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_is_drawn_where_there_is_no_label(family):
    model, batch = _generator(family), _examples(family, 60, 6)[2]
    first = (batch["labels"] != -100).long().argmax(1, keepdim=True)
    batch["labels"] = torch.full_like(batch["labels"], -100).scatter(1, first, batch["labels"].gather(1, first))
    # One step is the whole answer.
    step, answer = (calibrate_sets(model, [batch], 0.2, alpha=1.5, unit=unit) for unit in ("step", "answer"))
    assert (step.temperature, step.examples) == (answer.temperature, 60)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_drawn_one_per_answer(family):
    model = _generator(family)
    sources, answers, batch = _examples(family, 60, 6)
    sets = calibrate_sets(model, [batch], 0.2, alpha=1.5, unit="step")
    assert sets.examples == 60
    assert sets.temperature < calibrate_sets(model, [batch], 0.2, alpha=1.5).temperature
    assert calibrate_sets(model, [batch], 0.2, alpha=1.5, unit="step") == sets
    others = [calibrate_sets(model, [batch], 0.2, alpha=1.5, unit="step", seed=seed) for seed in range(1, 6)]
    assert any(other != sets for other in others)
    model.config.entmax_sets["step"] = vars(sets)
    forced = force_decode(model, {"input_ids": sources}, answers, logits_processor=[sets.processor])
    shares = [sum(step.probability > 0 for step in one.steps) / len(one.steps) for one in forced]
    assert abs(sum(shares) / len(shares) - 0.8) < 0.15  # a random step of every answer: 0.8 +- 3 standard errors
    # Sampling takes nothing else.
    torch.manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": 3, "min_new_tokens": 3, "eos_token_id": None}
    drawn_ids = model.generate(input_ids=sources, logits_processor=[sets.processor], **options)[:, -3:].tolist()
    for one in force_decode(model, {"input_ids": sources}, drawn_ids, logits_processor=[sets.processor]):
        assert all(step.probability > 0 for step in one.steps)
    with pytest.raises(ValueError, match="per step"):
        model.config.entmax_sets.pop("answer")
        prediction_sets(model, {"input_ids": sources})


def test_options_that_change_probabilities_void_the_promise():
    model = _generator("bart")
    sources, _, batch = _examples("bart", 40, 7)
    calibrate_sets(model, [batch], 0.2, alpha=1.5)
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="NoRepeatNGram"):
        prediction_sets(model, {"input_ids": sources}, max_new_tokens=4)


@pytest.mark.parametrize("alpha", [None, 1.05])
@pytest.mark.parametrize("family", FAMILIES)
def test_sets_by_probability_are_all_answers_as_probable_as_that(family, alpha, tmp_path):
    model = _generator(family)
    sources, answers, batch = _examples(family, 40, 5)
    batches = [{k: v[i : i + 16] for k, v in batch.items()} for i in (0, 16, 32)]
    supports = calibrate_sets(model, batches, 0.3, alpha=1.5)
    options = {"max_new_tokens": 4, "max_hypotheses": 10_000, "budget": 10**6}
    larger = prediction_sets(model, {"input_ids": sources}, **options)
    sets = calibrate_sets(model, batches, 0.3, score="probability", alpha=alpha)
    assert (sets.alpha, sets.temperature, sets.examples) == (alpha or 1.0, 1.0, 40) and sets != supports
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert ConformalSets.of(model) == sets
    found = prediction_sets(model, {"input_ids": sources}, **options)
    every = enumerate_hypotheses(model, {"input_ids": sources}, 10_000, max_new_tokens=4, output_alpha=alpha or 1.0)
    least = math.exp(sets.min_log_probability)
    for one, whole in zip(found, every, strict=True):
        likely = [y for y, p in zip(whole.sequences, whole.probabilities, strict=True) if p >= least]
        assert one.sequences == likely
    assert sum(answer in one.sequences for answer, one in zip(answers, found, strict=True)) == math.ceil(41 * 0.7)
    assert sum(map(len, found)) < sum(map(len, larger))


def test_sets_by_probability_of_a_classifier():
    logits, labels = drawn(2000, 5)
    model = Table(logits)
    sets = calibrate_sets(model, batches_of(labels[:1000]), 0.1, score="probability")
    costs = -logits[:1000].log_softmax(-1).gather(-1, labels[:1000, None]).squeeze(-1)
    assert sets.min_log_probability == pytest.approx(-float(costs.sort().values[math.ceil(1001 * 0.9) - 1]), rel=1e-5)
    rows = {"input_ids": torch.arange(1000, 2000)[:, None]}
    found = prediction_sets(model, rows)
    for row, probs in zip(found, logits[1000:].softmax(-1), strict=True):
        wanted = {i for i, p in enumerate(probs.tolist()) if math.log(p) >= sets.min_log_probability}
        assert {entry["label"] for entry in row} == {f"LABEL_{i}" for i in wanted or {int(probs.argmax())}}
    held = sum(
        f"LABEL_{label}" in [e["label"] for e in row] for label, row in zip(labels[1000:].tolist(), found, strict=True)
    )
    assert abs(held / 1000 - 0.9) < 4 * math.sqrt(0.9 * 0.1 * (1 / 1000 + 1 / 1000))


def test_the_best_label_is_in_its_set_however_improbable_it_is():
    sets = ConformalSets(1.0, 1.0, 0.1, "answer", 100, min_log_probability=-0.1)
    assert sets.support(torch.tensor([[0.3, 0.1, 0.2], [9.0, 0.0, 0.0]])).tolist() == [[True, False, False]] * 2


def test_what_is_refused_by_probability():
    logits, labels = drawn(50, 4)
    model, given = Table(logits * 10), batches_of(labels)
    for options in ({"unit": "step"}, {"alpha": [1.5, 2.0]}):
        with pytest.raises(ValueError, match="whole answers under one alpha"):
            calibrate_sets(model, given, score="probability", **options)
    with pytest.raises(ValueError, match="score='likelihood'"):
        calibrate_sets(model, given, score="likelihood")
    with pytest.raises(ValueError, match=r"alpha=0\.5"):
        calibrate_sets(model, given, score="probability", alpha=0.5)
    with pytest.raises(ValueError, match="an answer without a probability"):  # sharp, and wrong too often
        calibrate_sets(model, given, score="probability", alpha=2.0)
    assert not hasattr(model.config, "entmax_sets")


def test_sets_of_an_older_version_are_read():
    model = Table(torch.zeros(1, CLASSES))
    stored = {"alpha": 1.5, "temperature": 0.5, "delta": 0.1, "unit": "answer", "examples": 99}
    model.config.entmax_sets = {"answer": stored}
    assert ConformalSets.of(model) == ConformalSets(**stored)
    model.config.entmax_sets["answer"] = {**stored, "more": 1}
    with pytest.raises(ValueError, match="calibrate again"):
        ConformalSets.of(model)


def test_a_set_cut_short_says_so():
    model = _generator("bart")
    sources, _, batch = _examples("bart", 40, 7)
    calibrate_sets(model, [batch], 0.05, alpha=1.5)
    for result in prediction_sets(model, {"input_ids": sources[:3]}, max_new_tokens=4, max_hypotheses=1):
        assert len(result) == 1 and not result.exhaustive and result.pruned_mass > 0


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_the_temperature_of_the_processor_acts_before_entmax_everywhere(alpha):
    model = _generator("gpt2")
    sources, _, _ = _examples("gpt2", 3, 8)
    warm = EntmaxLogitsProcessor(alpha, 2.5)
    scores = torch.randn(4, 6)
    assert torch.allclose(warm(None, scores).exp(), entmax(scores / 2.5, alpha), atol=1e-6)
    found = enumerate_hypotheses(model, {"input_ids": sources}, 10_000, max_new_tokens=2, logits_processor=[warm])
    with torch.no_grad():
        for part in (model.transformer.ln_f.weight, model.transformer.ln_f.bias):
            part.div_(2.5)  # what the temperature does, done to the model
    plain = enumerate_hypotheses(model, {"input_ids": sources}, 10_000, max_new_tokens=2, output_alpha=alpha)
    for one, other in zip(found, plain, strict=True):
        assert one.sequences == other.sequences and one.probabilities == pytest.approx(other.probabilities)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            EntmaxLogitsProcessor(1.5, wrong)
    with pytest.raises(TypeError, match="temperature"):
        EntmaxLogitsProcessor(1.5, "warm")
