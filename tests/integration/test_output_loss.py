import copy
import dataclasses
import functools
import inspect
import types

import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F
import transformers as tf

import hf_entmax
from hf_entmax import patch_model, unpatch_model
from hf_entmax.integration.labels import count_labels, divides_by_items, shifts_labels
from hf_entmax.losses import entmax_loss

SIZES = dict(
    vocab_size=tiny.VOCAB,
    pad_token_id=0,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=20,
)
HEADS = {
    "seq2seq": lambda: tiny.build("t5"),
    "causal": lambda: tiny.build("llama"),
    "causal-gpt2": lambda: tiny.build("gpt2"),
    "causal-unshifted": lambda: tf.BartForCausalLM(
        tf.BartConfig(vocab_size=37, d_model=16, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=20)
    ),
    "masked": lambda: tiny.build("bert"),
    "token": lambda: tf.BertForTokenClassification(tf.BertConfig(**SIZES, num_labels=5)),
    "sequence": lambda: tf.BertForSequenceClassification(tf.BertConfig(**SIZES, num_labels=5)),
    "choice": lambda: tf.BertForMultipleChoice(tf.BertConfig(**SIZES)),
}


def _batch(head):
    ids = tiny.inputs("bert", batch=4, length=8)["input_ids"]
    if head == "sequence":
        return {"input_ids": ids, "labels": torch.tensor([0, 1, 4, 2])}
    if head == "choice":
        return {"input_ids": ids.view(2, 2, 8), "labels": torch.tensor([0, 1])}
    labels = ids % 5 if head == "token" else ids.flip(0).clone()
    labels[0, 3:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.parallel.DataParallel, torch.compile])
@pytest.mark.parametrize("head", list(HEADS))
def test_the_labels_that_count_are_those_of_the_models_own_loss(head, wrap):
    model, batch = HEADS[head]().eval(), _batch(head)
    out, labels = model(**batch), batch["labels"]
    ways = [(out.logits, labels)]
    if head.startswith("causal"):
        ways.append((out.logits[:, :-1], labels[:, 1:]))
    found = []
    for logits, wanted in ways:
        kept = wanted != -100
        if torch.allclose(F.cross_entropy(logits[kept], wanted[kept]), out.loss, atol=1e-6):
            found.append(int(kept.sum()))
    assert found == [count_labels(wrap(model), batch)]


def test_labels_that_were_shifted_before_and_adapters():
    peft = pytest.importorskip("peft")
    model, batch = HEADS["causal"](), _batch("causal")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert shifts_labels(adapted) and count_labels(adapted, batch) == 3 * 7 + 2
    assert count_labels(adapted, batch | {"shift_labels": batch["labels"]}) == 3 * 8 + 3
    assert not divides_by_items(HEADS["causal-unshifted"]()) and divides_by_items(adapted)


_VIT = dict(
    hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, image_size=4, patch_size=2
)
# A head -> the model, and whether its loss heeds the number of items.
ITEMS = {
    "causal": (lambda: HEADS["causal"](), True),
    "causal-unshifted": (lambda: HEADS["causal-unshifted"](), False),
    "llama-sequence": (lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**SIZES, num_labels=5)), False),
    "llama-token": (lambda: tf.LlamaForTokenClassification(tf.LlamaConfig(**SIZES, num_labels=5)), False),
    "neox-token": (lambda: tf.GPTNeoXForTokenClassification(tf.GPTNeoXConfig(**SIZES, num_labels=5)), False),
    "vit": (lambda: tf.ViTForImageClassification(tf.ViTConfig(**_VIT, num_labels=5)), True),
    "vit-regression": (lambda: tf.ViTForImageClassification(tf.ViTConfig(**_VIT, num_labels=1)), False),
}  # fmt: skip


@pytest.mark.parametrize("head", list(ITEMS))
def test_whose_loss_is_divided_by_the_number_of_items(head):
    build, heeds = ITEMS[head]
    model = build().eval()
    if head.startswith("vit"):
        labels = torch.tensor([0.5, 1.0, 2.0, 3.0]) if head == "vit-regression" else torch.tensor([0, 1, 4, 2])
        batch = {"pixel_values": torch.rand(4, 3, 4, 4), "labels": labels}
    else:
        batch = _batch("sequence" if "sequence" in head else "token" if "token" in head else "causal")
    own, count = model(**batch).loss, count_labels(model, batch)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(model).forward).parameters.values())
    divided = model(**batch, num_items_in_batch=3 * count).loss if takes_any else own
    assert torch.allclose(divided, own / 3 if heeds else own, atol=1e-6)
    assert divides_by_items(model) == heeds


@pytest.mark.parametrize("head", list(HEADS))
def test_at_alpha_one_the_loss_is_the_models_own(head):
    model = HEADS[head]().eval()
    batch = _batch(head)
    own = model(**batch).loss
    patched = patch_model(model, alpha=1.0, output_alpha=1.0)
    assert torch.allclose(patched(**batch).loss, own, atol=1e-5)
    with_tuple = patched(**batch, return_dict=False)
    assert torch.allclose(with_tuple[0], own, atol=1e-5)
    assert (
        patched(
            input_ids=batch["input_ids"],
            **({"decoder_input_ids": batch["labels"].clamp_min(0)} if head == "seq2seq" else {}),
        ).loss
        is None
    )


@pytest.mark.parametrize("head", [h for h in HEADS if h not in ("sequence", "choice", "token")])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_the_loss_is_the_entmax_loss_of_the_logits(head, alpha):
    model = patch_model(HEADS[head]().eval(), output_alpha=alpha)
    batch = _batch(head)
    out = model(**batch)
    logits, labels = out.logits, batch["labels"]
    if head in ("causal", "causal-gpt2"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    assert torch.allclose(out.loss, entmax_loss(logits, labels, alpha), atol=1e-6)
    total = entmax_loss(logits, labels, alpha, reduction="sum")
    for items in (50, torch.tensor(50)):
        assert torch.allclose(model(**batch, num_items_in_batch=items).loss, total / 50, atol=1e-6)
    out.loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_softcapped_logits_are_the_ones_that_count():
    model = tiny.build("gemma2", final_logit_softcapping=2.0)
    batch = {**tiny.inputs("gemma2"), "labels": tiny.inputs("gemma2")["input_ids"]}
    out = patch_model(model, output_alpha=1.5)(**batch)
    assert out.logits.abs().max() <= 2.0
    assert torch.allclose(out.loss, entmax_loss(out.logits[:, :-1], batch["labels"][:, 1:], 1.5), atol=1e-6)


def test_shift_labels_given_by_the_trainer_are_used_as_they_stand():
    model = patch_model(tiny.build("llama"), output_alpha=1.5)
    ids = tiny.inputs("llama")["input_ids"]
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    assert torch.allclose(
        model(input_ids=ids, labels=ids, shift_labels=shifted).loss, model(input_ids=ids, labels=ids).loss, atol=1e-6
    )


def test_shift_labels_mean_nothing_to_a_model_that_predicts_in_place():
    model = patch_model(tiny.build("bert"), output_alpha=1.5)
    ids = tiny.inputs("bert")["input_ids"]
    alone = model(input_ids=ids, labels=ids).loss
    assert torch.equal(model(input_ids=ids, labels=ids, shift_labels=ids.roll(1, -1)).loss, alone)


def test_a_mixture_of_experts_keeps_its_balancing_loss():
    sizes = {**tiny._LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, output_router_logits=True, router_aux_loss_coef=0.5)).eval()
    batch = {**tiny.inputs("llama"), "labels": tiny.inputs("llama")["input_ids"]}
    own = model(**batch).loss
    assert torch.allclose(patch_model(model, alpha=1.0, output_alpha=1.0)(**batch).loss, own, atol=1e-5)


def test_switch_keeps_its_router_losses():
    sizes = {
        **tiny._T5,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 2,
        "expert_capacity": 64,
    }
    model = tf.SwitchTransformersForConditionalGeneration(
        tf.SwitchTransformersConfig(**sizes, router_z_loss_coef=0.3, router_aux_loss_coef=0.5)
    ).eval()
    batch = {**tiny.inputs("t5", labels=True), "output_router_logits": True}
    own = model(**batch).loss
    without = model(**{**batch, "output_router_logits": False}).loss
    assert (own - without).abs() > 1e-3
    patch_model(model, alpha=1.0, output_alpha=1.0)
    assert torch.allclose(model(**batch).loss, own, atol=1e-5)
    assert torch.allclose(model(**{**batch, "output_router_logits": False}).loss, without, atol=1e-5)


def test_all_labels_ignored():
    model = patch_model(tiny.build("bert"), output_alpha=1.5)
    loss = model(input_ids=torch.tensor([[4, 5, 6]]), labels=torch.full((1, 3), -100)).loss
    loss.backward()
    assert loss.item() == 0.0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_copies_and_unpatching():
    model = patch_model(tiny.build("bart"), output_alpha=2.0)
    batch = tiny.inputs("bart", labels=True)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(**batch).loss, model(**batch).loss)
    unpatch_model(model)
    assert not model._forward_hooks and not model._forward_hooks_with_kwargs
    assert torch.allclose(
        model(**batch).loss, F.cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten()), atol=1e-5
    )
    assert twin._forward_hooks


@pytest.mark.parametrize(
    "build, match",
    [
        (lambda: tiny.build("bert").bert, "no classification loss"),
        (lambda: tf.BertForQuestionAnswering(tf.BertConfig(**SIZES)), "no classification loss"),
        (lambda: tf.BertForSequenceClassification(tf.BertConfig(**SIZES, num_labels=1)), "regression"),
        (
            lambda: tf.BertForSequenceClassification(
                tf.BertConfig(**SIZES, num_labels=3, problem_type="multi_label_classification")
            ),
            "output_mapping",
        ),
    ],
)
def test_models_without_a_fitting_head_are_refused(build, match):
    model = build()
    with pytest.raises(ValueError, match=match):
        patch_model(model, output_alpha=1.5)
    assert not hf_entmax.is_patched(model)


def test_labels_of_several_classes_at_once_are_refused_when_they_come():
    model = patch_model(tf.BertForSequenceClassification(tf.BertConfig(**SIZES, num_labels=3)), output_alpha=1.5)
    with pytest.raises(ValueError, match="output_mapping"):
        model(input_ids=torch.tensor([[4, 5]]), labels=torch.tensor([[0.0, 1.0, 1.0]]))


def test_labels_out_of_range_are_named():
    model = patch_model(tf.BertForTokenClassification(tf.BertConfig(**SIZES, num_labels=3)), output_alpha=1.5)
    with pytest.raises((ValueError, IndexError), match=r"7|out of"):
        model(input_ids=torch.tensor([[4, 5]]), labels=torch.tensor([[0, 7]]))


def _multilabel_model(mapping, **extra):
    model = tf.BertForSequenceClassification(
        tf.BertConfig(**SIZES, num_labels=5, problem_type="multi_label_classification")
    ).eval()
    return patch_model(model, output_mapping=mapping, **extra)


@pytest.mark.parametrize(
    "mapping", ["sparsehourglass(q=2)", "sparsegen_lin(lam=0.5)", "entmax(alpha=1.3)", "sparsemax", "softmax"]
)
def test_multilabel_losses_by_name(mapping, tmp_path):
    from hf_entmax.losses.multilabel import multilabel_loss

    model = _multilabel_model(mapping)
    labels = torch.tensor([[1.0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    batch = {"input_ids": tiny.inputs("bert")["input_ids"], "labels": labels}
    out = model(**batch)
    assert torch.allclose(out.loss, multilabel_loss(out.logits, labels, mapping), atol=1e-6)
    summed = model(**batch, num_items_in_batch=torch.tensor(15)).loss
    assert torch.allclose(summed, multilabel_loss(out.logits, labels, mapping, reduction="sum") / 3, atol=1e-6)
    out.loss.backward()
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again(**batch).loss, out.loss)


def test_multilabel_losses_want_a_multilabel_head():
    with pytest.raises(ValueError, match="multi_label_classification"):
        patch_model(tiny.build("bert"), output_mapping="sparsemax")
    with pytest.raises(ValueError, match="unknown"):
        _multilabel_model("sparsemin")
    with pytest.raises(ValueError, match="both choose"):
        _multilabel_model("sparsemax", output_alpha=1.5)


def test_support_is_counted_from_the_losses_own_solution_and_only_when_asked_for(monkeypatch):
    from hf_entmax.integration.output_loss import counting_support, output_losses
    from hf_entmax.losses import core

    solved, original = [], core.solve_rows
    monkeypatch.setattr(core, "solve_rows", lambda scores, u: (solved.append(len(scores)), original(scores, u))[1])
    model = patch_model(HEADS["causal"](), output_alpha=1.5).eval()
    batch = _batch("causal")
    with torch.no_grad():
        for _ in range(3):
            logits = model(**batch).logits
        once, solved[:] = sum(solved) // 3, []
        assert all(hook.support is None for hook in output_losses(model))
        with counting_support(model) as support:
            model(**batch)
    assert sum(solved) == once
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    sizes = (hf_entmax.ops.entmax(logits, 1.5) > 0).sum(-1) * (labels != -100)
    assert support[0].tolist() == torch.stack((sizes.sum(1), (labels != -100).sum(1)), 1).tolist()
    assert len(support) == 1 and all(hook.support is None for hook in output_losses(model))


@dataclasses.dataclass
class FusedOutput(tf.utils.ModelOutput):
    """What TRL's fused head returns: no logits."""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None


def _with_fused_head(model):
    """As TRL's ``add_fused_lm_head``: log-probabilities of a softmax for the labels, without logits in the output."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, num_items_in_batch=None, **kwargs):
        if not fused_lm_head:
            return original(*args, labels=labels, **kwargs)
        hidden, target = self.base_model(*args, **kwargs).last_hidden_state[:, :-1], labels[:, 1:]
        mask = target != -100
        probs = self.get_output_embeddings()(hidden).log_softmax(-1)
        chosen = probs.gather(-1, target.clamp(min=0)[..., None])[..., 0] * mask
        entropy = torch.special.entr(probs.exp()).sum(-1) * mask
        return FusedOutput(loss=-chosen.sum() / mask.sum(), log_probs=chosen, entropy=entropy, label_mask=mask)

    model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_head_without_logits_gets_the_linear_form(alpha, softcap):
    from hf_entmax.integration.output_loss import counting_support, output_losses

    model = patch_model(tiny.build("llama"), alpha=1.5, output_alpha=alpha)
    batch = _batch("causal")
    if softcap is not None:
        model.config.final_logit_softcapping = softcap
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    logits = logits if softcap is None else (logits / softcap).tanh() * softcap
    labels = batch["labels"][:, 1:]
    expected = entmax_loss(logits, labels, alpha, reduction="none")
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(expected.sum(), parameters)
    _with_fused_head(model)
    for hook in output_losses(model):
        hook.replaces_log_probs = True
    with counting_support(model) as support:
        output = model(**batch, fused_lm_head=True)
    torch.testing.assert_close(-output.log_probs, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(output.loss, expected.sum() / (labels != -100).sum())
    for found, wanted in zip(torch.autograd.grad(-output.log_probs.sum(), parameters), gradients, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    probs, counted = hf_entmax.ops.entmax(logits.detach(), alpha), labels != -100
    torch.testing.assert_close(output.entropy, torch.special.entr(probs).sum(-1) * counted, atol=1e-5, rtol=1e-5)
    assert support[0].tolist() == torch.stack((((probs > 0).sum(-1) * counted).sum(1), counted.sum(1)), 1).tolist()
    assert not model.base_model._forward_hooks
    assert model(**batch, num_items_in_batch=7, fused_lm_head=True).loss.item() == pytest.approx(
        expected.sum().item() / 7
    )
    unpatch_model(model)
    assert not model._forward_pre_hooks
    assert model(**batch, fused_lm_head=True).log_probs.sum().item() != 0


def test_heads_without_logits_that_cannot_be_served_are_refused():
    model = _with_fused_head(patch_model(tiny.build("llama"), output_alpha=1.5))
    with pytest.raises(ValueError, match=r"fused_lm_head=True.*SFTTrainer"):
        model(**_batch("causal"), fused_lm_head=True)
    cohere = patch_model(tiny.build("llama"), output_alpha=1.5)
    cohere.config.logit_scale = 0.5
    with pytest.raises(ValueError, match=r"logit_scale=0\.5"):
        _sft_trainer(cohere)
    model = patch_model(tiny.build("llama"), output_alpha=1.5)
    model.forward = lambda **_: FusedOutput(loss=torch.zeros(()))
    with pytest.raises(ValueError, match="returned no logits"):
        model(**_batch("causal"))


def _sft_trainer(model, name="SFTTrainer", **options):
    """A trainer that is TRL's by its module's name."""
    kind = type(name, (tf.Trainer,), {"__module__": "trl.trainer.made_up"})
    arguments = tf.TrainingArguments(output_dir="unused", report_to=[], use_cpu=True)
    for key, value in options.items():
        setattr(arguments, key, value)
    return kind(model=model, args=arguments)


def test_trainers_that_take_another_loss_are_refused_by_name():
    from hf_entmax.integration.output_loss import output_losses

    def own_loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum()

    def trainer(model, loss):
        arguments = tf.TrainingArguments(output_dir="unused", report_to=[], use_cpu=True)
        return tf.Trainer(model=model, args=arguments, compute_loss_func=loss)

    model = patch_model(tiny.build("llama"), output_alpha=1.5)
    with pytest.raises(ValueError, match=r"compute_loss_func=own_loss.*output_alpha=1\.5"):
        trainer(model, own_loss)
    trainer(patch_model(tiny.build("llama")), own_loss)
    with pytest.raises(ValueError, match="TRL's DPOTrainer"):
        _sft_trainer(model, "DPOTrainer")
    _sft_trainer(patch_model(tiny.build("llama")), "DPOTrainer")
    with pytest.raises(ValueError, match="loss_type='dft'"):
        _sft_trainer(model, loss_type="dft")
    assert not any(hook.replaces_log_probs for hook in output_losses(model))
    _sft_trainer(model)
    assert all(hook.replaces_log_probs for hook in output_losses(model))
    own_loss.replaces_output_loss = True
    trainer(model, own_loss)


class _Adds(tf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class _Replaces(tf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class _TakesTheLabels(_Replaces):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, outputs = inputs.pop("labels"), model(input_ids=inputs["input_ids"])
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class _SaysSo(_Replaces):
    replaces_output_loss = True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "output_alpha", "refused"),
    [
        (_Adds, 1.5, False),
        (_Replaces, 1.5, True),
        (_TakesTheLabels, 1.5, True),
        (_SaysSo, 1.5, False),
        (_Replaces, None, False),
    ],
)
def test_a_trainer_with_a_loss_of_its_own(tmp_path, kind, output_alpha, refused):
    model = patch_model(tiny.build("llama"), output_alpha=output_alpha)
    batch = tiny.inputs("llama", batch=4)
    rows = [{"input_ids": ids, "labels": ids} for ids in batch["input_ids"]]
    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, max_steps=2, save_strategy="no", disable_tqdm=True
    )
    trainer = kind(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.evaluate()
    if refused:
        with pytest.raises(
            ValueError, match=rf"{kind.__name__}\.compute_loss .* output_alpha=1\.5.*replaces_output_loss"
        ):
            trainer.train()
        return
    trainer.train()
    assert "compute_loss" not in vars(trainer)


def test_trl_trains_with_the_entmax_loss(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    model = patch_model(tiny.build("llama"), alpha=1.5, output_alpha=1.5)
    rows = [{"input_ids": [5, 6, 7, 8, 9, 10]}, {"input_ids": [11, 12, 13, 14]}]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, max_steps=1, logging_steps=1, bf16=False,
        per_device_train_batch_size=2, learning_rate=0.0, save_strategy="no",
    )  # fmt: skip
    data = Dataset.from_list(rows)
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tiny.tokenizer())
    batch = next(iter(trainer.get_train_dataloader()))
    expected = entmax_loss(model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:], 1.5)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [pytest.approx(expected.item(), abs=1e-3)]
