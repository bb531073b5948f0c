"""Alphas as high as a budget on the loss allows, without training a weight."""

import io
import math

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from rich.console import Console

import hf_entmax
from hf_entmax import alphas, calibrate_alphas, patch_model, softmax_attention, unpatch_model
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.training.alpha_vector import AlphaVector
from hf_entmax.training.search import Task
from hf_entmax.training.sensitivity import FEWEST, ROWS, SHARES, WEIGHTS, _stride, measure_sensitivity

FAMILIES = {"llama": "decoder_self", "t5": "encoder_self", "bert": "encoder_self"}


def _batches(family, seeds=(0, 1)):
    return [tiny.inputs(family, labels=True, seed=seed) for seed in seeds]


def _mean(model, batches):
    """By the definition: every label counts the same."""
    model.eval()
    total = count = 0
    causal = not model.config.is_encoder_decoder and model.config.model_type != "bert"
    for batch in batches:
        with torch.no_grad():
            output = model(**batch)
        labels = batch["labels"][:, 1:] if causal else batch["labels"]
        logits = output.logits[:, :-1] if causal else output.logits
        kept = labels != -100
        total += float(torch.nn.functional.cross_entropy(logits[kept].float(), labels[kept], reduction="sum"))
        count += int(kept.sum())
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget, scaling", [(0.0, "none"), (0.02, "none"), (0.02, "constant")])
def test_the_budget_holds_and_only_alphas_move(family, budget, scaling):
    model = patch_model(tiny.sharp(family), length_scaling=scaling).train()
    batches = _batches(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    result = calibrate_alphas(model, batches, budget, steps=4)
    assert model.training and flags == {name: p.requires_grad for name, p in model.named_parameters()}
    after = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("entmax_norm" in name for name in moved)
    assert all(torch.equal(result.alphas[site], values) for site, values in alphas(model).items())
    with softmax_attention(model):
        assert result.loss_before == pytest.approx(_mean(model, batches), abs=1e-5)
    assert result.loss_after == pytest.approx(_mean(model, batches), abs=1e-5)
    assert result.loss_after - result.loss_before <= budget + 1e-6 * result.loss_before
    if budget:
        assert result.mean_density < 0.9 and float(torch.cat([a.flatten() for a in result.alphas.values()]).max()) > 1.1


def test_batches_that_were_not_fitted_judge():
    model = patch_model(tiny.sharp("llama"))
    batches = _batches("llama", seeds=tuple(range(8)))
    calibrate_alphas(model, batches, 0.0, steps=40, learning_rate=0.5)
    own, judges = ([batches[i] for i in range(8) if (i % 4 == 3) == chosen] for chosen in (False, True))
    rises = []
    for part in (own, judges):
        after = _mean(model, part)
        with softmax_attention(model):
            rises.append(after - _mean(model, part))
    assert rises[1] <= 1e-6


def test_density_is_what_the_model_shows():
    model = patch_model(tiny.sharp("llama"))
    batches = _batches("llama", seeds=(0,))
    result = calibrate_alphas(model, batches, 0.05, steps=0)
    with torch.no_grad():
        weights = model.eval()(**batches[0], output_attentions=True).attentions
    mask = batches[0]["attention_mask"].bool()
    pairs = mask[:, :, None] & mask[:, None, :] & torch.ones(mask.shape[1], mask.shape[1]).tril().bool()
    expected = [((w > 0) & pairs[:, None]).sum((0, 2, 3)) / pairs.sum() for w in weights]
    assert torch.allclose(result.density["decoder_self"], torch.stack(expected).float(), atol=1e-6)
    assert result.mean_density == pytest.approx(float(torch.stack(expected).mean()), abs=1e-6)


def test_a_larger_budget_is_never_denser():
    found = []
    for budget in (0.001, 0.05):
        model = patch_model(tiny.sharp("bert"))
        found.append(calibrate_alphas(model, _batches("bert"), budget, steps=0).mean_density)
    assert found[1] <= found[0]


@pytest.mark.parametrize("tie", ["layer", "model"])
def test_shared_alphas_stay_shared(tie):
    model = patch_model(tiny.sharp("llama"), tie=tie)
    result = calibrate_alphas(model, _batches("llama"), 0.02, steps=2)
    rows = result.alphas["decoder_self"]
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    assert tie == "layer" or len(rows.unique()) == 1


def test_attention_that_was_left_alone_stays_softmax():
    model = patch_model(tiny.sharp("llama"), layers=(1,))
    result = calibrate_alphas(model, _batches("llama"), 0.02, steps=2)
    assert (result.alphas["decoder_self"][0] == 1).all() and (result.alphas["decoder_self"][1] > 1).all()
    assert (result.density["decoder_self"][0] == 1).all()


def test_the_result_is_saved_and_shown_and_goes_with_the_patch(tmp_path):
    model = patch_model(tiny.sharp("llama"))
    result = calibrate_alphas(model, _batches("llama"), 0.02, steps=0)
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    record = again.config.entmax_calibration
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"calibrated on {result.tokens} tokens" in card and f"loss\n{result.loss_before:.4f} with softmax" in card
    assert record["max_loss_increase"] == 0.02 and record["tokens"] == result.tokens
    assert torch.allclose(torch.tensor(record["density"]["decoder_self"]), result.density["decoder_self"], atol=1e-4)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(result)
    shown = console.export_text()
    assert "head 3" in shown and f"{float(result.alphas['decoder_self'][1, 3]):.3f}" in shown
    unpatch_model(again)
    assert not hasattr(again.config, "entmax_calibration")


def test_a_model_without_a_head_takes_a_loss_of_its_own():
    torch.manual_seed(0)
    model = patch_model(tf.BertModel(tiny.build("bert").config).eval())
    batch = {name: value for name, value in tiny.inputs("bert").items() if name != "labels"}
    with torch.no_grad(), softmax_attention(model):
        wanted = model(**batch).last_hidden_state

    def distance(model, batch):
        return (model(**batch).last_hidden_state - wanted).square().mean()

    with pytest.raises(ValueError, match=r"no labels.*loss="):
        calibrate_alphas(model, [batch], 0.1)
    result = calibrate_alphas(model, [batch], 1e-4, loss=distance, steps=3)
    assert result.loss_before == 0 and 0 <= result.loss_after <= 1e-4 and result.tokens == len(wanted)


def test_what_only_the_batches_that_judge_allow_is_drawn_back():
    torch.manual_seed(0)
    model = patch_model(tiny.sharp("bert"))
    batches = [{n: v for n, v in batch.items() if n != "labels"} for batch in _batches("bert")]
    with torch.no_grad(), softmax_attention(model):
        wanted = [model(**batch).logits for batch in batches]

    def distance(model, batch):
        judges = torch.equal(batch["input_ids"], batches[1]["input_ids"])
        return (1.0 if judges else 1.8) * (model(**batch).logits - wanted[judges]).square().mean()

    result = calibrate_alphas(model, batches, 0.01, loss=distance, steps=0)
    with torch.no_grad():
        rises = [float(distance(model, batch)) for batch in batches]
    assert result.loss_after == pytest.approx(sum(rises) / 2, rel=1e-3)
    assert 0.005 < result.loss_after <= 0.01


def _at(vector, place, softening):
    share = torch.full((vector.count,), SHARES[place], dtype=torch.float64)
    return vector.softened(share.logit(), softening)


def test_densities_of_the_grid_are_those_of_the_alphas_themselves():
    model = patch_model(tiny.sharp("llama")).eval()
    vector = AlphaVector(model)
    batch = {**tiny.inputs("llama", labels=True), "use_cache": False}
    table = measure_sensitivity(model, [batch], [24], lambda m, b: m(**b).loss, vector)
    assert (table.cost[:, -1] > 0).all() and attention_sites(model)[0].module.entmax_norm.backend == "auto"
    place = 12
    # The first layer's scores do not depend on any alpha.
    vector.set_(_at(vector, place, table.softening))
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[0]
    mask = batch["attention_mask"].bool()
    pairs = mask[:, :, None] & mask[:, None, :] & torch.ones(mask.shape[1], mask.shape[1]).tril().bool()
    expected = ((weights > 0) & pairs[:, None]).sum((0, 2, 3)) / pairs.sum()
    assert torch.allclose(table.density[:4, place].float(), expected, atol=1e-6)
    assert (table.density[:, 0] == 1).all() and (table.density.diff(dim=1) <= 1e-9).all()


@pytest.mark.parametrize("queries, keys", [(5, 7), (64, 64), (256, 256), (1024, 1024), (8192, 8192), (448, 1500)])
def test_what_is_tried_of_long_rows_is_bounded(queries, keys):
    tried = len(range(0, queries, _stride(queries, keys)))
    assert min(queries, FEWEST) <= tried <= 2 * ROWS
    assert tried * keys <= 2 * WEIGHTS or tried <= 2 * FEWEST


@pytest.mark.parametrize("options", [{}, {"tie": "layer"}, {"length_scaling_heads": (1, 3)}])
def test_temperatures_follow_the_alphas(options):
    """The densities foreseen are those of the model, and other heads keep a factor of 1."""
    model = patch_model(tiny.sharp("llama"), length_scaling="constant", **options).eval()
    vector = AlphaVector(model)
    batch = {**tiny.inputs("llama", labels=True), "use_cache": False}
    loss = lambda m, b: m(**b).loss  # noqa: E731
    table = measure_sensitivity(model, [batch], [24], loss, vector)
    assert float(table.softening.max()) > 0
    place = 14
    vector.set_(_at(vector, place, table.softening))
    factor = 1 + hf_entmax.length_scalings(model)["decoder_self"]["s"]
    expected = (1 / (1 + table.softening * SHARES[place])).float().view(2, -1).expand(2, 4)
    chosen = list(options.get("length_scaling_heads", range(4)))
    assert torch.allclose(factor[:, chosen], expected[:, chosen], atol=1e-6)
    if unscaled := [head for head in range(4) if head not in chosen]:
        assert factor[:, unscaled].isnan().all() and (expected[:, unscaled] == 1).all()
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[0]
    pairs = torch.ones(weights.shape[-2:]).tril().bool().expand_as(weights)
    kept = ((weights > 0) & pairs).float().sum((0, 2, 3)) / pairs[:, 0].sum()
    if "tie" not in options:
        assert torch.allclose(table.density[:4, place].float(), kept, atol=1e-6)
    else:
        assert float(table.density[0, place]) == pytest.approx(float(kept.mean()), abs=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"tie": "layer"}, {"length_scaling_heads": (1, 3)}, {"length_scaling": "none"}]
)
def test_one_alpha_for_all_softens_every_head_that_has_a_temperature(options):
    model = patch_model(tiny.sharp("llama"), **{"length_scaling": "constant", **options}).eval()
    AlphaVector(model).set_(AlphaVector(model).even(0.5))
    assert torch.allclose(alphas(model)["decoder_self"], torch.full((2, 4), 1.5))
    if "length_scaling" in options:
        return
    factor = 1 + hf_entmax.length_scalings(model)["decoder_self"]["s"]
    chosen = list(options.get("length_scaling_heads", range(4)))
    assert torch.allclose(factor[:, chosen], torch.tensor(0.4)) and factor.isnan().sum() == 2 * (4 - len(chosen))


@pytest.mark.parametrize(
    "options", [{}, {"tie": "model"}, {"length_scaling_heads": (1, 3)}, {"length_scaling": "none"}]
)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_slopes_are_those_of_cost_and_soft_density(options, backend):
    model = patch_model(tiny.sharp("llama"), backend=backend, **{"length_scaling": "constant", **options}).eval()
    vector = AlphaVector(model)
    task = Task(model, _batches("llama"), None, vector)
    middle = vector.even(0.4)
    values = middle + 0.3 * torch.randn(len(middle), generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def both(at):
        vector.set_(at)
        cost, density = task.cost_and_density(0)
        return cost + 3 * density

    slope, step = vector.slope(both(values)), 0.01
    assert slope.shape == middle.shape and (slope != 0).all()
    for start in (0, len(slope) // 2):  # alphas, temperatures
        direction = torch.zeros_like(values)
        direction[start : start + len(slope) // 2] = 1
        ends = [float(both(values + sign * step * direction)) for sign in (1, -1)]
        assert float(slope @ direction) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=0.05, abs=2e-5)
    assert backend == "torch" or attention_sites(model)[0].module.entmax_norm.backend == "auto"


@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_the_cost_is_the_distance_to_the_predictions_with_softmax(family):
    model = patch_model(tiny.sharp(family), length_scaling="constant").eval()
    vector, batches = AlphaVector(model), _batches(family)
    if family == "llama":
        batches[0]["attention_mask"][:, 6:] = 0
    task = Task(model, batches, None, vector)
    with torch.no_grad(), softmax_attention(model):
        q = model(**batches[0]).logits.log_softmax(-1)
    vector.set_(vector.even(0.4))
    with torch.no_grad():
        p = model(**batches[0]).logits.log_softmax(-1)
    each = (q.exp() * (q - p)).sum(-1)
    real = batches[0]["attention_mask"].bool() if family == "llama" else torch.ones_like(each, dtype=torch.bool)
    assert float(task.cost_and_density(0)[0]) == pytest.approx(float(each[real].mean()), rel=1e-4)
    own = Task(model, batches, lambda model, batch: model(**batch).loss * 2, vector)
    assert float(own.cost_and_density(0)[0]) == pytest.approx(2 * float(model(**batches[0]).loss), rel=1e-5)


def test_lines_go_through_the_alphas_and_end_at_their_ends():
    vector = AlphaVector(patch_model(tiny.sharp("llama"), length_scaling="constant"))
    low, high = vector.even(1e-6), vector.even(0.8)
    assert torch.allclose(vector.between(low, high, 1.0), high) and torch.allclose(vector.between(low, high, 0.0), low)
    assert torch.allclose(
        vector.between(low, high, 0.5)[:8].sigmoid(), torch.tensor(0.4, dtype=torch.float64), atol=1e-5
    )
    beyond = vector.between(low, high, 9.0)
    assert (beyond[:8] == vector.top).all() and torch.equal(beyond, vector.clamp(beyond))


def test_temperatures_buy_zeros():
    """Labels are drawn from what the model itself predicts, so that whatever changes it costs something."""

    def build(scaling):
        model = tiny.sharp("llama").eval()
        with torch.no_grad():
            model.lm_head.weight.mul_(10)
        return patch_model(model, length_scaling=scaling) if scaling else model

    plain, generator, batches = build(None), torch.Generator().manual_seed(0), []
    for _ in range(8):
        ids = torch.randint(3, plain.config.vocab_size, (8, 24), generator=generator)
        with torch.no_grad():
            predicted = plain(input_ids=ids).logits.softmax(-1).flatten(0, 1)
        labels = torch.multinomial(predicted, 1, generator=generator).view(8, 24).roll(1, 1)
        batches.append({"input_ids": ids, "labels": labels})
    without, found = (calibrate_alphas(build(scaling), batches, 0.05, steps=0) for scaling in ("none", "constant"))
    assert found.mean_density < without.mean_density - 0.1
    assert max(result.loss_after - result.loss_before for result in (without, found)) <= 0.05


def test_temperatures_are_restored_on_failure():
    model = patch_model(tiny.sharp("llama"), length_scaling="constant", alpha_range=(1.6, 2.0), alpha_init=1.7)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("length_scaling.s")).fill_(0.25)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rising = lambda m, batch: m(**batch).loss + (alphas(m)["decoder_self"].mean() - 1)  # noqa: E731
    with pytest.raises(ValueError, match="left as it was"):
        calibrate_alphas(model, _batches("llama"), 0.001, loss=rising)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_decoder_that_does_not_shift_its_labels():
    config = tf.BartConfig(vocab_size=37, d_model=16, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=20)
    model = patch_model(tf.BartForCausalLM(config))
    batches = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(3, 11)[None], torch.arange(3, 6)[None])]
    result = calibrate_alphas(model, batches, 0.1, steps=0)
    with torch.no_grad(), softmax_attention(model.eval()):
        losses = [float(model(**batch).loss) for batch in batches]
    assert result.tokens == 11 and result.loss_before == pytest.approx((8 * losses[0] + 3 * losses[1]) / 11, abs=1e-5)


BAD = [
    (dict(max_loss_increase=-0.1), ValueError, "max_loss_increase=-0.1"),
    (dict(max_loss_increase=math.nan), ValueError, "max_loss_increase=nan"),
    (dict(max_loss_increase="1 %"), ValueError, "max_loss_increase='1 %'"),
    (dict(steps=-1), ValueError, "steps=-1"),
    (dict(learning_rate=0), ValueError, "learning_rate=0"),
    (dict(batches=[]), ValueError, "nothing to predict"),
    (dict(batches=[{"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[-100, -100]])}]), ValueError, "nothing to"),
    (dict(batches=[{"input_ids": torch.tensor([[5, 6]])}]), ValueError, "no labels"),
    (dict(batches=[{"input_ids": torch.tensor([[5, 999]]), "labels": torch.tensor([[5, 6]])}]), ValueError, "999"),
    (dict(batches=["text"]), TypeError, "dict of tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_named_and_changes_nothing(given, error, words):
    model = patch_model(tiny.build("llama"))
    before = alphas(model)["decoder_self"]
    with pytest.raises(error, match=words):
        calibrate_alphas(model, **{"batches": _batches("llama"), **given})
    assert torch.equal(alphas(model)["decoder_self"], before) and not hasattr(model.config, "entmax_calibration")


def test_models_that_have_nothing_to_calibrate():
    with pytest.raises(ValueError, match="not patched"):
        calibrate_alphas(tiny.build("llama"), _batches("llama"))
    with pytest.raises(ValueError, match=r"alpha=1.5.*learned alphas are needed"):
        calibrate_alphas(patch_model(tiny.build("llama"), alpha=1.5), _batches("llama"))
    with pytest.raises(TypeError, match="PreTrainedModel"):
        calibrate_alphas(torch.nn.Linear(2, 2), _batches("llama"))


def test_a_model_whose_loss_is_nan():
    model = patch_model(tiny.build("llama"))
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    before = alphas(model)["decoder_self"]
    with pytest.raises(ValueError, match="is nan: there is nothing to compare with"):
        calibrate_alphas(model, _batches("llama"))
    assert torch.equal(alphas(model)["decoder_self"], before)


def test_a_budget_that_no_alpha_meets_leaves_the_model_as_it_was():
    model = patch_model(tiny.sharp("llama"), alpha_range=(1.6, 2.0), alpha_init=1.7)
    batches = _batches("llama")
    before = alphas(model)["decoder_self"]
    calls = []

    def loss(model, batch):  # above the reference as soon as attention is not softmax
        calls.append(1)
        return model(**batch).loss + (alphas(model)["decoder_self"].mean() - 1)

    with pytest.raises(ValueError, match=r"max_loss_increase=0.001 cannot be met.*left as it was"):
        calibrate_alphas(model, batches, 0.001, loss=loss)
    assert calls and torch.equal(alphas(model)["decoder_self"], before)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_default_start_leaves_a_model_as_good_as_it_was_and_every_alpha_learns():
    model = patch_model(tiny.sharp("llama")).eval()
    assert hf_entmax.EntmaxConfig().alpha_init == 1.01
    batch = tiny.inputs("llama", labels=True)
    loss = model(**batch).loss
    with softmax_attention(model), torch.no_grad():
        reference = model(**batch).loss
    assert abs(float(loss / reference) - 1) < 0.005
    loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "entmax_norm" in name]
    assert gradients and all(g.isfinite().all() and (g != 0).all() for g in gradients)


def test_an_interruption_keeps_the_best_that_was_found():
    model, lines = patch_model(tiny.sharp("llama")), []

    def say(line):
        lines.append(line)
        if len(lines) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_alphas(model, _batches("llama"), 0.05, progress=say)
    assert "interrupted: the best so far is kept" in lines[-1]
    kept = _mean(model, _batches("llama")[1:])  # the batch that judges
    with softmax_attention(model):
        assert kept <= _mean(model, _batches("llama")[1:]) + 0.05 + 1e-5
    assert float(alphas(model)["decoder_self"].max()) > 1.01


def test_progress_is_shown_unless_it_is_switched_off(capsys):
    calibrate_alphas(patch_model(tiny.sharp("llama")), _batches("llama"), 0.05)
    assert "zeros at" in capsys.readouterr().out
    calibrate_alphas(patch_model(tiny.sharp("llama")), _batches("llama"), 0.05, progress=None)
    assert not capsys.readouterr().out


def test_it_works_under_no_grad_and_says_what_it_cannot_use():
    batches = _batches("llama")
    wanted = calibrate_alphas(patch_model(tiny.sharp("llama")), batches, 0.05, progress=None)
    with torch.no_grad():
        found = calibrate_alphas(patch_model(tiny.sharp("llama")), batches, 0.05, progress=None)
    assert torch.equal(found.alphas["decoder_self"], wanted.alphas["decoder_self"])
    model = patch_model(tiny.sharp("llama"))
    start = alphas(model)["decoder_self"]
    for loss, message in (
        (lambda model, batch: 1.0, r"returned 1\.0 \(float\)"),
        (lambda model, batch: "low", "returned 'low'"),
        (lambda model, batch: model(**batch).logits.sum(-1), r"returned a tensor \(3, 9\)"),
        (lambda model, batch: model(**batch).loss.detach(), "without a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate_alphas(model, batches, 0.05, loss=loss, progress=None)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        calibrate_alphas(model, batches, 0.05, progress=None)
    for data in ("abc", ["abc"], [3]):
        with pytest.raises(TypeError, match="must be a dict of tensors"):
            calibrate_alphas(model, data, progress=None)
    ids = batches[0]["input_ids"]
    for batch, name in (
        ({"input_ids": "abc"}, "input_ids of a batch must be a tensor, got str"),
        ({"input_ids": ids, "labels": ids.tolist()}, "labels of a batch must be a tensor, got list"),
    ):
        with pytest.raises(TypeError, match=name):
            calibrate_alphas(model, [batch], progress=None)
    with pytest.raises(ValueError, match="learning_rate='fast'"):
        calibrate_alphas(model, batches, learning_rate="fast")
    assert torch.equal(alphas(model)["decoder_self"], start)
