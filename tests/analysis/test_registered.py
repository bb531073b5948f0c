"""Statistics and roles of a user's own stand beside those of the package, and pass the same checks."""

import json

import pytest
import tiny_tokenizers
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_entmax import patch_model
from hf_entmax.analysis import AttentionStatistics, collect, measure, register_role, register_statistic, write_report
from hf_entmax.analysis.metrics import registry
from hf_entmax.analysis.report.findings import summarize
from hf_entmax.integration.observe import observe_attention

pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


def second(weights, pairs):
    return weights.topk(2, -1).values[..., 1]


def two_back(inputs):
    return None if inputs.site == "cross" else inputs.pairs.tril(-2) & ~inputs.pairs.tril(-3)


def _model(alpha):
    torch.manual_seed(0)
    tokenizer = tiny_tokenizers.byte_level()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_layer=2, n_head=2, n_embd=16)).eval()
    return patch_model(model, alpha=alpha), tokenizer


def _batches():
    random = torch.Generator().manual_seed(1)
    for length in (7, 4):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[0, :2] = 0  # on the left
        yield {"input_ids": torch.randint(5, 60, (3, length), generator=random), "attention_mask": mask}


def _weights(model):
    """Weights [B, H, T, T] and pairs of every layer and batch."""
    calls = []
    for batch in _batches():
        with observe_attention(model, lambda call: calls.append(call.weights.double())), torch.no_grad():
            model(**batch)
        keys = batch["attention_mask"].bool()
        pairs = (keys[:, :, None] & keys[:, None, :]).tril()
        yield [call.masked_fill(~pairs[:, None], 0.0) for call in calls], pairs
        calls.clear()


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_a_registered_statistic_is_the_mean_over_all_queries(alpha):
    register_statistic("second", second, "Second largest weight")
    model, tokenizer = _model(alpha)
    found = collect(model, list(_batches()), tokenizer=tokenizer).sites["decoder_self"].statistic("second")
    sums, queries = torch.zeros(2, 2, dtype=torch.float64), 0
    for layers, pairs in _weights(model):
        counted = pairs.any(-1)
        queries += counted.sum()
        for layer, weights in enumerate(layers):
            sums[layer] += (second(weights, pairs) * counted[:, None]).sum((0, 2))
    torch.testing.assert_close(found, sums / queries, rtol=1e-5, atol=1e-6)
    last = measure("second", layers[1], pairs)
    assert last.shape == (2,) and last[0] == pytest.approx(float(measure("second", layers[1][:, :1], pairs)))


def test_firing_counts_the_queries_that_look_elsewhere():
    pairs = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    weights = torch.zeros(1, 2, 4, 4)
    weights[0, 0, :, 0] = 1.0  # rests
    weights[0, 1] = torch.eye(4)
    weights[0, 1, 3] = torch.tensor([0.5, 0.0, 0.1, 0.4])  # fires once
    torch.testing.assert_close(measure("firing", weights, pairs), torch.tensor([0.0, 0.25], dtype=torch.float64))
    model, tokenizer = _model(1.0)
    soft = collect(model, list(_batches()), tokenizer=tokenizer).sites["decoder_self"].statistic("firing")
    # With softmax every query fires that has a third key: 4 and 1 queries have none but the first and themselves.
    torch.testing.assert_close(soft, torch.full((2, 2), 1 - 12 / 29, dtype=torch.float64))


def test_a_registered_role_names_the_heads_it_explains():
    register_role("two_back", two_back, "two back", "the token two places back")
    model, tokenizer = _model(1.0)
    statistics = collect(model, list(_batches()), tokenizer=tokenizer)
    score, chance, queries = statistics.sites["decoder_self"].role_scores()["two_back"]
    masses, even, count = torch.zeros(2, 2, dtype=torch.float64), 0.0, 0
    for layers, pairs in _weights(model):
        role = torch.zeros_like(pairs)
        role.diagonal(-2, 1, 2)[:] = True
        role &= pairs
        count += int(role.any(-1).sum())
        even += float((role.sum(-1) / pairs.sum(-1).clamp(min=1)).sum())
        for layer, weights in enumerate(layers):
            masses[layer] += (weights * role[:, None]).sum((0, 2, 3))
    torch.testing.assert_close(score, masses / count, rtol=1e-5, atol=1e-6)
    assert queries.tolist() == [count, count] and chance.tolist() == pytest.approx([even / count] * 2)


def test_they_stand_in_the_tables_the_findings_and_the_report(tmp_path, nothing_stays_registered):
    register_statistic("second", second, "Second largest weight")
    register_role("two_back", two_back, "two back", "the token two places back")
    model, tokenizer = _model(1.0)
    statistics = collect(model, list(_batches()), tokenizer=tokenizer)
    # A head that looks two places back wherever it can.
    sums = statistics.sites["decoder_self"].sums
    sums["role:two_back_mass"][1, 1] = sums["role:two_back_queries"][1]
    assert any("the token two places back" in finding.text for finding in summarize(statistics))
    assert any(finding.topic == "Second largest weight" for finding in summarize(statistics))
    statistics.save(tmp_path / "kept.safetensors")
    page = write_report(statistics, tmp_path / "a", figures=True).read_text()
    assert "Second largest weight" in page and "two back" in page
    row = json.loads((tmp_path / "a/report.json").read_text())["models"][0]["heads"][3]
    assert row["role"] == "two_back" and 0 < row["second"] < 1 and 0 < row["firing"] < 1
    # Where they are not registered a file that holds them is read all the same, under their names.
    nothing_stays_registered()
    again = AttentionStatistics.load(tmp_path / "kept.safetensors")
    row = json.loads(write_report(again, tmp_path / "b").with_suffix(".json").read_text())["models"][0]["heads"][3]
    assert row["role"] == "two_back" and row["second"] > 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda weights, pairs: weights.sum(-1).sum(-1), "return"),
        (lambda weights, pairs: 1.0, "returned float"),
        (lambda weights, pairs: weights[..., 0].log() * 0 / 0, "not finite"),
        (lambda weights, pairs: weights[..., 0] / weights[..., 0].amax(1, keepdim=True), "of the other heads"),
        (lambda weights, pairs: weights[..., 0] - weights[..., 0].mean(0), "of the other sentences"),
        (lambda weights, pairs: weights.mean(-1), "of padding"),
        (lambda weights, pairs: weights.mul_(2)[..., 0], "changes the weights"),
    ],
)
def test_a_statistic_that_breaks_a_rule_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        register_statistic("mine", function)
    assert "mine" not in registry.STATISTICS


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda inputs: inputs.pairs.float(), "returned torch.float32"),
        (lambda inputs: inputs.pairs[0], "returned torch.bool"),
        (lambda inputs: inputs.pairs & (torch.arange(len(inputs.pairs)) == 0)[:, None, None], "stands alone"),
        (lambda inputs: inputs.pairs & (torch.arange(inputs.pairs.shape[2]) == inputs.pairs.shape[2] - 1), "padding"),
        (lambda inputs: inputs.pairs.zero_(), "changes the pairs"),
    ],
)
def test_a_role_that_breaks_a_rule_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        register_role("mine", function)
    assert "mine" not in registry.ROLES


def test_names_are_checked():
    for register, own in ((register_statistic, "firing"), (register_role, "previous")):
        good = second if register is register_statistic else two_back
        with pytest.raises(ValueError, match="Python identifier"):
            register("my own", good)
        with pytest.raises(ValueError, match="of hf_entmax"):
            register(own, good)
        register("mine", good)
        with pytest.raises(ValueError, match="exist_ok"):
            register("mine", good)
        register("mine", good, exist_ok=True)
        with pytest.raises(TypeError, match="callable as"):
            register("other", 3)
        with pytest.raises(TypeError, match="cannot be called"):
            register("other", lambda: None)
    with pytest.raises(ValueError, match="'third' is no statistic"):
        measure("third", torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool))
