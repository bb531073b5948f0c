"""Conversions of sentence encoders: tiny ones over pairs made for the purpose."""

import dataclasses
import json
import math

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from recipe_runs import RECIPES, rows
from test_convert import kill_and_resume

import convert
from common.conversion_tasks import base_model
from common.sentences import embed, retrieval, spearman
from common.settings import parse
from hf_entmax import alphas, is_patched


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Texts and their first halves, and a small encoder that was never trained, whose attention is not flat."""
    folder = tmp_path_factory.mktemp("sentences")
    for split, count in (("train", 32), ("dev", 9), ("test", 9)):
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for text in tiny.texts(count, 8):
                file.write(json.dumps({"text": text.split(), "partner": [text[: len(text) // 2], "w1"]}) + "\n")
    torch.manual_seed(0)
    model = tf.BertModel(tiny.build("bert").config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    tiny.save(model, folder / "encoder")
    tiny.save(tiny.build("llama"), folder / "causal")
    return folder


def settings(place, out, **changes):
    given = {split: str(place / f"{split}.jsonl") for split in ("train", "dev", "test")}
    given |= {"source": "text", "target": "partner", "model": str(place / "encoder"), "batch_size": 8, "epochs": 1}
    given |= {"lr": 0.003, "warmup": 4, "max_tokens": 16, "out": str(out), "dropout": False}
    return convert.Settings(**given | changes)


BUDGET = {"schedule": "abrupt", "release": 1.3, "task_weight": 0.0, "distill_logits": 1.0, "alpha_lr": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{**BUDGET, "loss_budget": 0.5}, {"attention": "softmax"}, {"lora_rank": 2, "distill_attention": 1.0, **BUDGET}],
    ids=["budget", "control", "adapters"],
)
def test_a_row_says_what_became_of_the_embeddings(place, tmp_path, changes):
    convert.main(settings(place, tmp_path / "run", results=str(tmp_path / "r.csv"), evaluate_every=2, **changes))
    (row,) = rows(tmp_path / "r.csv")
    points = rows(tmp_path / "r_curve.csv")
    before = tf.AutoModel.from_pretrained(place / "encoder").eval()
    folder = tmp_path / "run" / "model"
    after = tf.AutoModel.from_pretrained(place / "encoder" if "lora_rank" in changes else folder)
    if "lora_rank" in changes:
        after = pytest.importorskip("peft").PeftModel.from_pretrained(after, folder)
    after = base_model(after).eval()
    assert is_patched(after) == (changes.get("attention") != "softmax")
    tokenizer = tf.AutoTokenizer.from_pretrained(place / "encoder")
    lines = [json.loads(line) for line in (place / "test.jsonl").read_text().splitlines()]
    texts, partners = [" ".join(line["text"]) for line in lines], [line["partner"][0] for line in lines]
    old, new = (embed(m, texts, tokenizer, 16) @ embed(m, partners, tokenizer, 16).T for m in (before, after))
    pearson = float(torch.corrcoef(torch.stack([old.flatten(), new.flatten()]))[0, 1])
    assert float(row["pearson"]) == pytest.approx(pearson, abs=2e-4) and float(row["pearson"]) < 1
    assert float(row["spearman"]) == pytest.approx(spearman(torch.stack([old.flatten(), new.flatten()])), abs=1e-2)
    assert (row["pearson_before"], row["spearman_before"]) == ("1.0", "1.0")
    for suffix, similarities in (("_before", old), ("", new)):
        for name, value in retrieval(similarities).items():
            assert float(row[name + suffix]) == pytest.approx(value, abs=1e-4)
    lost = 100 * (float(row["accuracy_before"]) - float(row["accuracy"]))
    assert float(row["lost"]) == pytest.approx(lost, abs=0.02)
    stages = [point["stage"] for point in points]
    assert stages == ["before", *(["patched"] if is_patched(after) else []), "training", "training"]
    # Two rows of 6 and 10 tokens: queries of the shorter see the shorter.
    lengths = [len(ids) for text in texts + partners for ids in [tokenizer(text)["input_ids"]]]
    assert float(row["keys"]) == pytest.approx(sum(n * n for n in lengths) / sum(lengths), rel=0.01)
    if is_patched(after):
        assert 0 < float(row["density"]) < 1 and float(row["support_encoder_self"]) < float(row["keys"])
        values = torch.cat([site.flatten() for site in alphas(after).values()])
        assert values.mean().item() == pytest.approx(float(points[-1]["alpha_mean"]), abs=1e-5) and values.std() > 1e-5
    else:
        assert row["density"] == "1.0"


@pytest.mark.slow
def test_the_budget_is_on_the_distance_that_is_trained(place, tmp_path, forget_processes):
    """Alphas that start far too high come back where the embeddings may hardly move, and go on where they may."""
    options = {**BUDGET, "release": 1.9, "loss_rate": 2.0, "freeze_weights": True, "epochs": 4, "alpha_lr": 0.2}
    ends, pressures = [], []
    for budget in (0.01, 10.0):
        forget_processes()
        convert.main(settings(place, tmp_path / str(budget), loss_budget=budget, evaluate_every=1, **options))
        points = [point for point in rows(tmp_path / str(budget) / "curve.csv") if point["stage"] == "training"]
        ends.append(points[-1])
        pressures.append([float(point["pressure"]) for point in points])
    assert min(pressures[0]) < 0.005 and min(pressures[1]) > 10  # each starts at its budget
    for name, larger in (("spearman", 0), ("density", 0), ("alpha_mean", 1)):
        assert float(ends[larger][name]) > float(ends[1 - larger][name])


def test_dropout_is_off_where_the_loss_is_compared(place, tmp_path):
    assert settings(place, tmp_path, dropout=None).dropout
    assert not settings(place, tmp_path, dropout=None, loss_budget=0.1).dropout
    assert settings(place, tmp_path, dropout=True, loss_budget=0.1).dropout


def test_partners_that_are_as_near_stand_before_the_right_one():
    assert retrieval(torch.eye(3)) == {"accuracy": 1.0, "mrr": 1.0}
    assert retrieval(torch.ones(2, 2)) == {"accuracy": 0.0, "mrr": 0.5}
    found = retrieval(torch.tensor([[0.5, 0.9, 0.1], [0.0, 1.0, 0.0], [0.3, 0.2, 0.1]]))
    assert found == pytest.approx({"accuracy": 1 / 3, "mrr": (1 / 2 + 1 + 1 / 3) / 3})
    assert retrieval(torch.full((4, 4), math.nan)) == {"accuracy": 0.0, "mrr": 0.25}


def test_what_cannot_be_converted_is_said_before_training(place, tmp_path):
    given = settings(place, tmp_path / "run")
    cases = [
        ({"model": str(place / "causal")}, r"causal' \(llama\) is causal: .*Leave --train"),
        ({"train": "", "data": str(place / "{split}.txt")}, r"no .*train\.txt"),
        ({"dev": ""}, "dev='' .*given for an encoder of sentences such as"),
        ({"source": "title"}, "no title; it has text, partner"),
        ({"output_alpha": 1.5}, "output_alpha=1.5 .*no output probabilities"),
        ({"temperature": 2.0}, "temperature=2.0 .*embeddings knows none"),
        ({"batch_size": 1}, "batch_size=1 .*at least 2: a text is told from the others"),
        ({"max_tokens": 65}, "max_tokens=65 .*at most 64"),
    ]
    for changes, message in cases:
        with pytest.raises((ValueError, OSError), match=message):
            convert.main(dataclasses.replace(given, **changes))
    with pytest.raises(ValueError, match=r"train_pairs=-1 .*at least 0"):
        dataclasses.replace(given, train_pairs=-1)
    with pytest.raises(ValueError, match=r"budget=-0\.1"):
        dataclasses.replace(given, loss_budget=-0.1)
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("w1 w2 w3 w4\n" * 40)
    blocks = {"train": "", "data": str(tmp_path / "{split}.txt"), "block": 8}
    with pytest.raises(ValueError, match=r"later tokens.*with pairs of texts \(--train, --dev, --test\)"):
        convert.main(dataclasses.replace(given, **blocks))
    pooled = tmp_path / "pooled"
    tiny.save(tf.AutoModel.from_pretrained(place / "encoder"), pooled)
    (pooled / "1_Pooling").mkdir()
    (pooled / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    )
    with pytest.raises(ValueError, match="has pooling_mode_cls_token: only encoders that take the mean"):
        convert.main(dataclasses.replace(given, model=str(pooled)))
    assert not (tmp_path / "run").exists()
    broken = tf.AutoModel.from_pretrained(place / "encoder")
    with torch.no_grad():
        broken.encoder.layer[0].output.dense.bias.fill_(math.nan)
    tiny.save(broken, tmp_path / "broken")
    with pytest.raises(ValueError, match=r"spearman, pearson of dev: not a number. The model is broken"):
        convert.main(dataclasses.replace(given, model=str(tmp_path / "broken")))


@pytest.mark.slow
def test_a_killed_conversion_goes_on_exactly(place, tmp_path, forget_processes):
    options = {**BUDGET, "loss_budget": 0.2, "epochs": 4, "evaluate_every": 3, "checkpoint_steps": 5, "log_steps": 1}
    kill_and_resume(settings(place, tmp_path / "whole", **options), tmp_path / "killed", forget_processes)


def test_the_configuration_is_right():
    words = ["--config", str(RECIPES / "configs" / "convert_minilm.yaml"), "--out", "x", "--model", "m"]
    given = parse(convert.Settings, convert.__doc__, [*words, "--attention", "softmax"])
    assert given.train and given.dropout is False and given.task_weight == 0 and given.distill_logits > 0
    assert parse(convert.Settings, convert.__doc__, [*words, "--release", "1.1", "--loss_budget", "0.05"]).learned
