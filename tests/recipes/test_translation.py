"""The translation recipe, end to end on a few invented sentences."""

import dataclasses
import json
from pathlib import Path

import pytest
import recipe_runs as runs
import torch

import translation
from common.from_scratch import build_seq2seq, train_bpe
from common.seq2seq import encode_pairs
from common.settings import make_sparse, parse
from common.trainer import RecipeTrainer, SimilarLengths, training_arguments


@pytest.fixture
def data(tmp_path):
    return runs.write_pairs(tmp_path, train=8, test=1)


def settings(data, **changes):
    train, test = str(data / "train.{lang}"), str(data / "test.{lang}")
    small = runs.SMALL | {"vocabulary": 60, "width": 48, "lr": 0.005, "warmup": 40, "max_tokens": 20}
    given = {"out": str(data / "run"), **small, **changes}
    return translation.Settings(train=train, dev=test, test=[test], **given)


@pytest.mark.slow
def test_it_learns_and_a_finished_model_can_be_made_sparse(data):
    translation.main(settings(data, epochs=25, seed=2))
    result = runs.result(data / "run")
    assert result["bleu"] > 90
    model = str(data / "run" / "model")
    sparse = {"model": model, "attention": "1.2", "output_alpha": 1.5, "epochs": 2, "lr": 0.001}
    translation.main(settings(data, out=str(data / "tuned"), **sparse))
    result = runs.result(data / "tuned")
    assert result["bleu"] > 90
    assert result["optimal"] > 90
    assert result["density_cross"] < 1


@pytest.mark.slow
def test_translations_of_a_pretrained_model_may_be_long(data):
    """Without a bound of its own generate() stops after 20 tokens."""
    for language in ("de", "en"):
        lines = (data / f"test.{language}").read_text(encoding="utf-8").splitlines()
        (data / f"test.{language}").write_text("".join(" ".join([line] * 6) + "\n" for line in lines), encoding="utf-8")
        (data / f"train.{language}").write_text(
            "".join(" ".join([line] * 6) + "\n" for line in lines), encoding="utf-8"
        )
    translation.main(settings(data, epochs=1, max_tokens=60))
    model = data / "run" / "model"
    stored = runs.read(model / "generation_config.json")
    assert stored.pop("max_new_tokens") == 60
    (model / "generation_config.json").write_text(json.dumps(stored))
    more = {"out": str(data / "tuned"), "epochs": 40, "max_tokens": 60, "certificates": 2}
    translation.main(settings(data, model=str(model), **more))
    lengths = [len(line.split()) for line in (data / "tuned" / "hypotheses.test.txt").read_text().splitlines()]
    assert len(lengths) == 16 and max(lengths) >= 18
    stored = runs.read(data / "tuned" / "model" / "generation_config.json")
    assert stored["max_new_tokens"] == 60


def test_hypotheses_are_kept_and_are_those_of_the_score(data):
    (data / "a").mkdir()
    for language in ("de", "en"):
        lines = (data / f"test.{language}").read_text(encoding="utf-8").splitlines(keepends=True)
        (data / "a" / f"test.{language}").write_text("".join(lines[:3]), encoding="utf-8")
    tests = [str(data / "a" / "test.{lang}"), str(data / "test.{lang}")]
    translation.main(dataclasses.replace(settings(data, epochs=2), test=tests))
    result = runs.result(data / "run")
    scores = result["tests"].split()
    assert len(scores) == 2  # though both files are called alike
    for test, score in zip(tests, scores, strict=True):
        name = test.replace("/", "_")
        hypotheses = (data / "run" / f"hypotheses.{name}.txt").read_text(encoding="utf-8").splitlines()
        references = Path(test.replace("{lang}", "en")).read_text(encoding="utf-8").splitlines()
        expected = translation.bleu_and_chrf(hypotheses, [("", reference) for reference in references])
        assert score == f"{name}:bleu={expected['bleu']:.2f},chrf={expected['chrf']:.2f}"


@pytest.mark.slow
def test_a_sparse_model_is_trained_on_as_it_is_or_not_at_all(data):
    sparse = {"attention": "learned", "output_alpha": 1.5}
    translation.main(settings(data, smoke=True, **sparse))
    model = str(data / "run" / "model")
    for wrong in ({}, {"attention": "1.5", "output_alpha": 1.5}, {"attention": "learned"}):
        with pytest.raises(ValueError, match=r"sparse already \(--attention learned --output_alpha 1\.5\)"):
            translation.main(settings(data, out=str(data / "on"), model=model, smoke=True, **wrong))
    with pytest.raises(ValueError, match=r"alpha_init=1\.2 would have no effect: the model has alphas already"):
        translation.main(settings(data, out=str(data / "on"), model=model, smoke=True, alpha_init="1.2", **sparse))
    translation.main(settings(data, out=str(data / "on"), model=model, smoke=True, **sparse))
    result = runs.result(data / "on")
    stored = runs.config(data / "on")["entmax_config"]
    assert (
        (result["attention"], result["output_alpha"]) == (stored["alpha"], stored["output_alpha"]) == ("learned", 1.5)
    )


def test_the_order_follows_from_seed_and_epoch():
    lengths = [(7 * place) % 31 for place in range(2003)]

    def order(seed, epoch):
        sampler = SimilarLengths(lengths, 8, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert sorted(order(0, 0)) == list(range(2003))
    assert order(0, 1) == order(0, 1) != order(0, 2) and order(0, 1) != order(1, 1)
    steps = [order(0, 0)[i : i + 8] for i in range(0, 2003, 8)]
    spreads = [max(lengths[i] for i in step) - min(lengths[i] for i in step) for step in steps]
    assert len(steps[-1]) == 3 and sum(spreads) / len(spreads) < 2
    means = torch.tensor([sum(lengths[i] for i in step) / 8 for step in steps[:-1]])
    assert abs(torch.corrcoef(torch.stack([means[1:], means[:-1]]))[0, 1]) < 0.3  # short and long steps are mixed


def test_weight_decay_is_on_the_same_parameters_whatever_the_attention(data):
    decayed = []
    for attention in ("softmax", "1.5", "learned"):
        chosen = settings(data, architecture="t5", attention=attention)
        model = make_sparse(build_seq2seq(chosen, 60, 20, chosen.architecture), chosen)
        names = {parameter: name for name, parameter in model.named_parameters()}
        trainer = RecipeTrainer(chosen, model, args=training_arguments(chosen), train_dataset=[], eval_dataset=[])
        groups = trainer.create_optimizer().param_groups
        decayed.append({names[p] for group in groups if group["weight_decay"] for p in group["params"]})
    assert decayed[0] == decayed[1] == decayed[2]
    assert not any("bias" in name for name in decayed[0]) and "shared.weight" in decayed[0]


def test_lengths_are_checked_before_training(data):
    with pytest.raises(
        ValueError, match="max_tokens=4 is not allowed: it must be larger: every pair of training or dev is longer"
    ):
        translation.main(settings(data, max_tokens=4))
    translation.main(settings(data, smoke=True))
    model = str(data / "run" / "model")
    with pytest.raises(ValueError, match="max_tokens=200 is not allowed: it must be at most"):
        translation.main(settings(data, out=str(data / "long"), model=model, max_tokens=200))


def test_the_tokenizer_gives_back_what_it_read(data):
    pairs = [("Der Hund läuft, oder?", 'The dog runs, or "does" it?')]
    tokenizer = train_bpe([side for pair in pairs * 2 for side in pair], 80)
    for text in pairs[0]:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_long_pairs_are_left_out_and_counted(data):
    pairs = [("kurz", "short"), ("sehr " * 30, "very " * 30)]
    tokenizer = train_bpe([side for pair in pairs for side in pair], 60)
    examples, left_out = encode_pairs(pairs, tokenizer, 20)
    assert (len(examples), left_out) == (1, 1)


def test_sides_of_different_length_are_an_error(data):
    (data / "train.en").write_text("One line.\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.de has 128 lines and .*train\.en 1"):
        translation.main(settings(data))
    assert not (data / "run").exists()


def test_missing_data_and_wrong_values_name_the_setting():
    with pytest.raises(ValueError, match="train='' is not allowed"):
        translation.Settings(out="x")
    for name, value in {"certificates": -1, "dev_sentences": -1, "layers": 0, "heads": 3, "dropout": 1.0}.items():
        with pytest.raises(ValueError, match="is not allowed: it must be"):
            translation.Settings(out="x", train="a", dev="b", test=["c"], **{name: value})
    with pytest.raises(ValueError, match="architecture='gpt' is not allowed"):
        translation.Settings(out="x", train="a", dev="b", test=["c"], architecture="gpt")


@pytest.mark.parametrize(("file", "sides", "tests"), [("multi30k", ("de", "en"), 2), ("tatoeba", ("1", "0"), 1)])
def test_the_configurations_are_right(file, sides, tests):
    chosen = parse(translation.Settings, "x", ["--config", str(runs.RECIPES / "configs" / f"translation_{file}.yaml")])
    assert ((chosen.source, chosen.target), len(chosen.test)) == (sides, tests)
