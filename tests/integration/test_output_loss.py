import copy

import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F
import transformers as tf

import hf_entmax
from hf_entmax import patch_model, unpatch_model
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
