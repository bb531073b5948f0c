"""Conversions of softmax models: both kinds of models, every term of the loss, exact resume."""

import dataclasses
import shlex
import sys
from pathlib import Path

import pytest
import recipe_runs as runs
import torch
from recipe_runs import config, result, rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import convert
import language_modeling
import translation
from common.conversion_tasks import base_model, model_name
from common.from_scratch import build_seq2seq, train_bpe
from common.seq2seq import bleu_and_chrf
from common.settings import parse
from hf_entmax import alphas, is_patched, length_scalings, patch_model, set_alphas
from hf_entmax.analysis.reading.tables import read_pairs, read_text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Sentence pairs, and two small softmax models over them that were never trained."""
    folder = tmp_path_factory.mktemp("models")
    runs.write_pairs(folder, train=1, dev=1, test=1)
    text = (folder / "train.en").read_text()
    for split, times in (("train", 8), ("valid", 3), ("test", 3)):
        (folder / f"{split}.txt").write_text(text * times, encoding="utf-8")
    torch.manual_seed(1)
    given = language_modeling.Settings(out="x", vocabulary=300, width=32, heads=2, layers=2, block=24, prompt=8)
    tokenizer = language_modeling.train_tokenizer(read_text(str(folder / "train.txt")), 300)
    save(language_modeling.build_model(given, len(tokenizer)), tokenizer, folder / "lm" / "model")
    files = {name: str(folder / "train.{lang}") for name in ("train", "dev")}
    given = translation.Settings(out="x", **files, test=["x"], width=32, heads=2, layers=1, max_tokens=20)
    tokenizer = train_bpe((side for pair in read_pairs(files["train"], "de", "en") for side in pair), 60)
    save(build_seq2seq(given, len(tokenizer), given.max_tokens), tokenizer, folder / "mt" / "model")
    return folder


def save(model, tokenizer, folder):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # scores that differ: 1.5-entmax is sparse at once
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def settings(place, out, kind="lm", **changes):
    small = {"batch_size": 8, "epochs": 1, "lr": 0.003, "warmup": 4, "block": 24, "max_tokens": 20, "beams": 2}
    if kind == "lm":
        data = {"data": str(place / "{split}.txt")}
    else:
        data = {split: str(place / f"{split}.{{lang}}") for split in ("train", "dev", "test")}
    return convert.Settings(model=str(place / kind / "model"), out=str(out), **{**small, **data, **changes})


def log(folder):
    """The losses and evaluations of a run."""
    return [line for line in runs.history(folder) if "loss" in line or "eval_density" in line]


EVERYTHING = {"distill_logits": 0.5, "distill_attention": 0.5, "density_target": 0.2, "temperature": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lm", "mt"])
@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "learned", "output_alpha": 1.5, **EVERYTHING},
        {"attention": "1.5", "attention_loss": "mse", "distill_attention": 1.0, "task_weight": 0.0},
        {"attention": "learned", "schedule": "abrupt", "release": 1.7, "distill_logits": 1.0},
        {"attention": "learned", "schedule": "abrupt", "release": 1.7, "loss_budget": 0.05, "density_floor": 0.1},
        {"attention": "softmax"},
    ],
    ids=["annealed and learned, all terms", "attention alone", "abrupt", "loss as the constraint", "the control"],
)
def test_every_setting_is_one_option(place, tmp_path, kind, changes):
    convert.main(settings(place, tmp_path / "run", kind, smoke=True, results=str(tmp_path / "r.csv"), **changes))
    found = result(tmp_path / "run")
    assert found["steps"] == 2 and found["attention"] == changes["attention"]
    auto = AutoModelForCausalLM if kind == "lm" else AutoModelForSeq2SeqLM
    model = auto.from_pretrained(tmp_path / "run" / "model")
    assert is_patched(model) == (changes["attention"] != "softmax")
    points = rows(tmp_path / "run" / "curve.csv")
    stages = [row["stage"] for row in points]
    before = ["before", "patched"] if is_patched(model) else ["before"]
    assert stages[: len(before)] == before and set(stages[len(before) :]) == {"training"} and points[-1]["step"] == "2"
    assert float(points[0]["density"]) == 1 and points[0]["bleu" if kind == "mt" else "perplexity"]
    if is_patched(model):
        assert float(points[1]["density"]) < 1
        end = changes.get("release", 1.5)
        assert float(points[1]["alpha_mean"]) == pytest.approx(end, abs=1e-3)
        # Two steps: an annealed alpha that is learned was let go as a softmax, after the first.
        learned = changes["attention"] == "learned"
        end = 1.0 if learned and "schedule" not in changes else end
        assert float(points[-1]["alpha_mean"]) == pytest.approx(end, abs=0.1 if learned else 1e-6)
        stored = config(tmp_path / "run")["entmax_config"]
        assert stored["alpha"] == ("learned" if learned else 1.5)
    assert not (tmp_path / "r.csv").exists()  # a smoke test is no result
    if kind == "mt":  # what was made of the test set is kept, before and after
        found = result(tmp_path / "run")
        pairs = read_pairs(str(place / "test.{lang}"), "de", "en")[:8]
        for name, measure in (("before", "bleu_before"), ("after", "bleu")):
            kept = (tmp_path / "run" / f"hypotheses.{name}.txt").read_text(encoding="utf-8").splitlines()
            assert len(kept) == len(pairs) and bleu_and_chrf(kept, pairs)["bleu"] == pytest.approx(
                found[measure], abs=1e-4
            )


@pytest.mark.slow
def test_density_falls_to_its_target_and_alphas_learn(place, tmp_path):
    given = {"epochs": 12, "over": 0.4, "density_target": 0.15, "density_rate": 0.5, "evaluate_every": 7, "lr": 0.01}
    convert.main(settings(place, tmp_path / "run", results=str(tmp_path / "r.csv"), **given))
    points = rows(tmp_path / "run" / "curve.csv")
    assert rows(tmp_path / "r_curve.csv") == points and len(rows(tmp_path / "r.csv")) == 1
    steps = [int(row["step"]) for row in points[2:]]
    assert steps == sorted(set(steps)) and {7, 14, 21} <= set(steps) and len(points) > 6
    assert float(points[-1]["density"]) < 0.19 < float(points[2]["density"])
    assert max(float(row["pressure"]) for row in points[2:]) > 0.1
    assert float(points[-1]["alpha_max"]) - float(points[-1]["alpha_min"]) > 1e-3
    found = result(tmp_path / "run")
    assert found["density"] == pytest.approx(float(points[-1]["density"]), abs=1e-3)
    assert found["lost"] == pytest.approx(
        100 * (found["epsilon_perplexity"] / found["epsilon_perplexity_before"] - 1), abs=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lm", "mt"])
def test_adapters_carry_alphas(place, tmp_path, kind):
    PeftModel = pytest.importorskip("peft").PeftModel
    convert.main(settings(place, tmp_path / "run", kind, epochs=3, lora_rank=2, over=0.3, alpha_lr=0.05))
    files = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert "adapter_config.json" in files and "model.safetensors" not in files
    auto = AutoModelForCausalLM if kind == "lm" else AutoModelForSeq2SeqLM
    model = PeftModel.from_pretrained(auto.from_pretrained(place / kind / "model"), tmp_path / "run" / "model")
    values = torch.cat([site.flatten() for site in alphas(base_model(model)).values()])
    last = rows(tmp_path / "run" / "curve.csv")[-1]
    assert values.mean().item() == pytest.approx(float(last["alpha_mean"]), abs=1e-5)
    assert values.std() > 1e-4 and 1.1 < values.mean() < 1.9
    # Nothing of the base was trained.
    base = auto.from_pretrained(place / kind / "model").state_dict()
    held = base_model(model).state_dict()
    names = [name for name in base if name in held]
    assert len(names) > 5 and all(torch.equal(base[name], held[name]) for name in names)


@pytest.mark.slow
def test_alphas_alone_within_a_budget_on_the_loss(place, tmp_path):
    options = {"attention": "learned", "schedule": "abrupt", "release": 1.3, "loss_budget": 0.5, "freeze_weights": True}
    convert.main(settings(place, tmp_path / "run", epochs=1, alpha_lr=0.1, evaluate_every=2, **options))
    base = AutoModelForCausalLM.from_pretrained(place / "lm" / "model").state_dict()
    held = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert len(base) > 5 and all(torch.equal(base[name], held[name]) for name in base)
    points = rows(tmp_path / "run" / "curve.csv")
    pressures = [float(row["pressure"]) for row in points if row["stage"] == "training"]
    assert pressures[-1] > 0.5  # within the budget it grows from where it starts, the budget
    assert float(points[-1]["density"]) < float(points[1]["density"])
    assert result(tmp_path / "run")["loss_budget"] == 0.5


def test_a_softened_start_is_closer_to_the_softmax_model(place, tmp_path):
    points = {}
    for softened in (False, True):
        folder = tmp_path / str(softened)
        convert.main(settings(place, folder, schedule="abrupt", release=1.7, softened=softened, smoke=True))
        points[softened] = rows(folder / "curve.csv")
    before, bare, soft = (float(row["perplexity"]) for row in (points[True][0], points[False][1], points[True][1]))
    assert abs(soft - before) < abs(bare - before)
    factor = length_scalings(AutoModelForCausalLM.from_pretrained(tmp_path / "True" / "model"))["decoder_self"]["s"]
    assert (factor - (1 / 3.1 - 1)).abs().max() < 0.05


@pytest.mark.slow
def test_alphas_above_two_and_temperatures_with_a_rate_of_their_own(place, tmp_path):
    options = {"schedule": "abrupt", "release": 2.5, "alpha_max": 4.0, "softened": True, "density_target": 0.1}
    moved = {}
    for rate in (None, 0.1):
        folder = tmp_path / str(rate)
        convert.main(settings(place, folder, **options, lr=0.0, alpha_lr=0.0, length_lr=rate))
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        assert torch.allclose(alphas(model)["decoder_self"], torch.tensor(2.5))
        moved[rate] = (length_scalings(model)["decoder_self"]["s"] - (1 / 5.5 - 1)).abs().max().item()
    assert moved[None] < 1e-6 and moved[0.1] > 0.05
    convert.main(settings(place, tmp_path / "free", **options, alpha_lr=0.3))
    values = alphas(AutoModelForCausalLM.from_pretrained(tmp_path / "free" / "model"))["decoder_self"]
    assert values.min() > 2 and (values - 2.5).abs().max() > 0.05


def test_wrong_values_name_the_setting(place, tmp_path):
    for changes, message in [
        ({"schedule": "slow"}, "schedule='slow'"),
        ({"softened": True}, "schedule='anneal'.*softened"),
        ({"softened": True, "attention": "1.5", "schedule": "abrupt"}, "softened=True.*left out: attention=1.5"),
        ({"release": 2.5}, "release=2.5 .*between 1 and alpha_max=2"),
        ({"release": 2.5, "alpha_max": 2.2}, "release=2.5 .*between 1 and alpha_max=2.2"),
        ({"alpha_max": 1.0}, "alpha_max=1.0 .*above 1"),
        ({"attention": "1.5", "alpha_max": 3.0}, "alpha_max=3.0 .*left out: attention=1.5"),
        ({"length_lr": 0.1}, "length_lr=0.1 .*only softened"),
        ({"attention": "1.5", "release": 1.2}, "release=1.2 .*learns no alpha"),
        ({"attention": "softmax", "density_target": 0.2}, "sparse for a density_target"),
        ({"density_target": 1.2}, r"target=1\.2"),
        ({"attention": "softmax", "loss_budget": 0.1}, "sparse for a loss_budget"),
        ({"loss_budget": -0.1}, r"budget=-0\.1"),
        ({"loss_budget": 0.1, "density_target": 0.2}, "left out: density_target is the constraint"),
        ({"loss_budget": 0.1, "output_alpha": 1.5}, "output_alpha=1.5 .*the softmax model's"),
        ({"loss_budget": 0.1, "density_floor": 1.0}, "density_floor=1.0 .*below 1"),
        ({"density_floor": 0.1}, "density_floor=0.1 .*nothing pushes"),
        ({"attention": "1.5", "freeze_weights": True}, "freeze_weights=True .*only learned alphas"),
        ({"lora_rank": 2, "freeze_weights": True}, "freeze_weights=True .*adapters are weights"),
        ({"over": 0.0}, r"over=0\.0"),
        ({"start": 0.5}, r"start=0\.5"),
        ({"task_weight": 0.0}, "task_weight=0 .*nothing is distilled"),
        ({"patience": 2}, "keeps its last model"),
        ({"attention": "sparsegen_lin"}, "needs an alpha; .*'sparsegen_lin' has none. Use abrupt"),
        ({"alpha_init": "1.2"}, "--release says where"),
        ({"beams": 0}, "beams=0 .*at least 1"),
        ({"dev_sentences": -1}, "dev_sentences=-1 .*at least 0"),
        ({"max_tokens": 1}, "max_tokens=1 .*at least 2"),
        ({"block": 1}, "block=1 .*at least 2"),
        ({"train_tokens": 23}, "train_tokens=23 .*at least block=24"),
        ({"dev_tokens": -5}, "dev_tokens=-5 .*0 for all"),
        ({"test_tokens": -5}, "test_tokens=-5 .*0 for all"),
    ]:
        with pytest.raises(ValueError, match=message):
            settings(place, tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=r"model='' .*the softmax model to convert"):
        convert.Settings(out="x")
    with pytest.raises(ValueError, match=r"train='' .*given for an encoder-decoder"):
        convert.main(convert.Settings(out=str(tmp_path / "run"), model=str(place / "mt" / "model")))
    convert.main(settings(place, tmp_path / "sparse", attention="1.5", smoke=True))
    for changes, message in [
        ({}, "is sparse already"),
        ({"attention": "1.5"}, "schedule='anneal' .*abrupt: .*is sparse already"),
        ({"attention": "learned", "schedule": "abrupt"}, r"is sparse already \(--attention 1.5"),
    ]:
        again = settings(place, tmp_path / "run", **changes)
        with pytest.raises(ValueError, match=message):
            convert.main(dataclasses.replace(again, model=str(tmp_path / "sparse" / "model")))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_sparse_model_goes_on_from_its_own_alphas(place, tmp_path):
    """Its teacher has the same weights and softmax."""
    model = AutoModelForCausalLM.from_pretrained(place / "lm" / "model")
    patch_model(model, alpha_init=3.0, alpha_range=(1, 4), length_scaling="constant", length_scaling_init="softmax")
    own = torch.tensor([[1.5, 3.0], [2.0, 3.5]])
    set_alphas(model, {"decoder_self": own})
    model.save_pretrained(tmp_path / "apart")
    AutoTokenizer.from_pretrained(place / "lm" / "model").save_pretrained(tmp_path / "apart")
    options = {"attention": "learned", "schedule": "abrupt", "softened": True, "distill_logits": 1.0, "alpha_lr": 0.0}
    dense = settings(place, tmp_path / "dense", **options)
    apart = dataclasses.replace(settings(place, tmp_path / "run", **options), model=str(tmp_path / "apart"))
    convert.main(dense)
    convert.main(apart)
    kept = alphas(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"))["decoder_self"]
    assert torch.allclose(kept, own, atol=1e-5)
    assert result(tmp_path / "run")["perplexity_before"] == result(tmp_path / "dense")["perplexity_before"]
    for changes, message in [
        ({"release": 1.7}, "release=1.7 .*left out: .*keeps its own alphas"),
        ({"alpha_max": 3.0}, "alpha_max=3.0 .*left out: .*keeps its own alphas"),
        ({"softened": False}, "softened=False .*true, as in"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert.main(dataclasses.replace(apart, out=str(tmp_path / "refused"), **changes))
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_another_model_can_teach(place, tmp_path):
    """The student begins with its own weights, and is compared with the other model's."""
    taught = settings(place, tmp_path / "run", distill_logits=100.0, task_weight=0.0, schedule="abrupt")
    convert.main(dataclasses.replace(settings(place, tmp_path / "other", attention="softmax"), lr=1e-2))
    other = str(tmp_path / "other" / "model")
    convert.main(dataclasses.replace(taught, teacher=other))
    convert.main(dataclasses.replace(taught, out=str(tmp_path / "itself")))
    assert result(tmp_path / "run")["perplexity_before"] == result(tmp_path / "other")["perplexity"]
    points = {
        name: [row for row in rows(tmp_path / name / "curve.csv") if row["stage"] == "patched"]
        for name in ("run", "itself")
    }
    assert points["run"][0]["perplexity"] == points["itself"][0]["perplexity"]  # the same weights in the beginning

    def distance(name):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        ids = torch.arange(1, 13)[None]
        with torch.no_grad():
            its, own = (
                m.eval()(ids).logits.log_softmax(-1) for m in (AutoModelForCausalLM.from_pretrained(other), model)
            )
        return float((its.exp() * (its - own)).sum(-1).mean())

    assert distance("run") < distance("itself")  # it has learned to say what the other says
    patch_model(sparse := AutoModelForCausalLM.from_pretrained(place / "lm" / "model"))
    sparse.save_pretrained(tmp_path / "sparse")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    LlamaForCausalLM(LlamaConfig(vocab_size=11, **small)).save_pretrained(tmp_path / "words")
    for folder, message in [
        ("sparse", "a softmax model: this one is sparse"),
        ("words", "same tokens: it has 11 of them"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert.main(dataclasses.replace(taught, teacher=str(tmp_path / folder), out=str(tmp_path / "refused")))
    assert not (tmp_path / "refused").exists()


def test_the_model_must_be_causal_and_long_enough(place, tmp_path):
    with pytest.raises(ValueError, match=r"block=25 .*at most 24, all that the model can see"):
        convert.main(settings(place, tmp_path / "run", block=25))
    with pytest.raises(ValueError, match=r"max_tokens=29 .*at most 28"):
        convert.main(settings(place, tmp_path / "run", "mt", max_tokens=29))
    with pytest.raises(ValueError, match=r"max_tokens=2 .*larger: every train pair is longer"):
        convert.main(settings(place, tmp_path / "short", "mt", max_tokens=2))
    tokenizer = AutoTokenizer.from_pretrained(place / "lm" / "model")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertLMHeadModel(BertConfig(vocab_size=len(tokenizer), **small)).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    given = settings(place, tmp_path / "run")
    with pytest.raises(ValueError, match=r"encoder' \(bert\) sees later tokens"):
        convert.main(dataclasses.replace(given, model=str(tmp_path / "encoder")))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lm", "mt"])
def test_half_precision_checkpoints_are_converted_in_full_precision(place, tmp_path, kind):
    auto = AutoModelForCausalLM if kind == "lm" else AutoModelForSeq2SeqLM
    folder = tmp_path / "half"
    auto.from_pretrained(place / kind / "model", dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(place / kind / "model").save_pretrained(folder)
    assert auto.from_pretrained(folder).dtype == torch.bfloat16
    convert.main(dataclasses.replace(settings(place, tmp_path / "run", kind, smoke=True), model=str(folder)))
    assert config(tmp_path / "run")["dtype"] == "float32"
    assert result(tmp_path / "run")["model"] == "half"


def test_what_a_model_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert model_name("models/mine") == model_name("models/mine/") == "mine"
    assert model_name("openai-community/gpt2") == "openai-community/gpt2"
    books = sorted((runs.RECIPES / "lab" / "results").glob("convert_??.csv"))
    known = [row for book in books for row in rows(book)]
    assert len(known) > 5
    for row in known:
        words = shlex.split(row["command"])
        folder = words[words.index("--model") + 1]
        Path(folder).mkdir(parents=True, exist_ok=True)
        assert model_name(folder) == row["model"]
    monkeypatch.chdir(folder)
    assert model_name(".") == row["model"]


def test_every_conversion_has_its_curve_beside_the_results(place, tmp_path, monkeypatch, forget_processes):
    monkeypatch.setattr(sys, "argv", ["convert.py", "--model", "m", "--attention", "1.5"])
    book, curve = tmp_path / "r.csv", tmp_path / "r_curve.csv"
    first = settings(place, tmp_path / "first", attention="1.5", evaluate_every=8, results=str(book))
    first = dataclasses.replace(first, train_tokens=400, dev_tokens=50, test_tokens=50)
    again = dataclasses.replace(first, resume=True)
    second = dataclasses.replace(first, out=str(tmp_path / "second"))
    counts = []
    for given in (first, again, second):
        forget_processes()
        convert.main(given)
        counts.append((len(rows(book)), len(rows(curve))))
    points = rows(tmp_path / "first" / "curve.csv")
    assert len(points) >= 3
    assert counts == [(1, len(points)), (1, len(points)), (2, 2 * len(points))]
    assert rows(curve)[len(points) :] == rows(tmp_path / "second" / "curve.csv")
    assert {row["density_target"] for row in rows(book)} == {""}


def test_a_curve_that_cannot_be_written_is_said_before_training(place, tmp_path):
    curve = tmp_path / "r_curve.csv"
    given = settings(place, tmp_path / "run", results=str(tmp_path / "r.csv"))
    curve.write_text("command,step\n")
    with pytest.raises(ValueError, match=r"r_curve.csv has the columns"):
        convert.main(given)
    curve.unlink()
    curve.mkdir()
    with pytest.raises((ValueError, OSError), match=r"r_curve.csv"):
        convert.main(given)
    assert not (tmp_path / "run").exists()


def kill_and_resume(whole, folder, forget_processes):
    """Run a conversion in ``whole.out``, and once more in another folder, killed after step 11 and resumed."""
    torch.set_num_threads(1)
    convert.main(whole)
    forget_processes()
    killed = dataclasses.replace(whole, out=str(folder))
    given = {name: value for name, value in dataclasses.asdict(killed).items() if value not in (None, "", [])}
    runs.kill({"convert": [word for name, value in given.items() for word in (f"--{name}", str(value))]}, 11)
    convert.main(dataclasses.replace(killed, resume=True))
    assert log(folder) == log(whole.out) and len(log(folder)) > 11
    weights = [Path(place, "model", "model.safetensors").read_bytes() for place in (folder, whole.out)]
    points = [[{**row, "command": ""} for row in rows(Path(place, "curve.csv"))] for place in (folder, whole.out)]
    assert weights[0] == weights[1] and points[0] == points[1]


@pytest.mark.slow
def test_a_killed_conversion_goes_on_exactly(place, tmp_path, forget_processes):
    given = {**EVERYTHING, "over": 0.4, "epochs": 4, "evaluate_every": 3, "checkpoint_steps": 5, "log_steps": 1}
    kill_and_resume(settings(place, tmp_path / "whole", **given), tmp_path / "killed", forget_processes)
    assert any(line.get("eval_pressure", 0) > 0 for line in log(tmp_path / "whole"))


@pytest.mark.parametrize("file", ["convert_wikitext2.yaml", "convert_multi30k.yaml"])
def test_the_configurations_are_right(file):
    given = parse(
        convert.Settings,
        convert.__doc__,
        ["--config", str(runs.RECIPES / "configs" / file), "--out", "x", "--model", "m"],
    )
    assert given.attention == "learned" and given.annealed and given.evaluate_every > 0
