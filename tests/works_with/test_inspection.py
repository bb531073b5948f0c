"""Tools that look inside a model."""

import pytest
import tiny_models as tiny
import torch
import transformers as tf

from hf_entmax import patch_model

pytestmark = pytest.mark.slow


def _sparse(family="bert", **options):
    return patch_model(tiny.build(family), alpha=2.0, **options).eval()


@pytest.mark.works_with("bertviz", "head_view and model_view of attentions with exact zeros")
def test_bertviz_draws_the_zeros():
    bertviz = pytest.importorskip("bertviz")
    batch = tiny.inputs("bert", batch=1)
    with torch.no_grad():
        attentions = _sparse()(**batch, output_attentions=True).attentions
    assert (attentions[0] == 0).any()
    tokens = [f"t{i}" for i in range(9)]
    for view in (bertviz.head_view, bertviz.model_view):
        assert "t8" in view(attentions, tokens, html_action="return").data


@pytest.mark.works_with("captum", "layer integrated gradients add up to the difference they explain")
def test_captum_attributes():
    attr = pytest.importorskip("captum.attr")
    model = patch_model(tiny.build("bert"), alpha_init=1.5).eval()
    ids = tiny.inputs("bert", batch=1)["input_ids"]
    explained = attr.LayerIntegratedGradients(lambda ids: model(ids).logits[:, 3, 5], model.bert.embeddings)
    _, delta = explained.attribute(ids, baselines=torch.zeros_like(ids), n_steps=200, return_convergence_delta=True)
    with torch.no_grad():
        whole = model(ids).logits[0, 3, 5] - model(torch.zeros_like(ids)).logits[0, 3, 5]
    assert delta.abs().item() < 0.05 * whole.abs().item() + 0.02


@pytest.mark.works_with("shap", "permutation values add up to the difference they explain")
def test_shap_attributes():
    shap = pytest.importorskip("shap")
    import numpy as np

    model = _sparse()
    ids = tiny.inputs("bert", batch=1)["input_ids"].numpy()

    def score(rows):
        with torch.no_grad():
            return model(torch.as_tensor(np.asarray(rows, dtype=np.int64))).logits[:, 3, 5].numpy()

    values = shap.PermutationExplainer(score, np.zeros_like(ids))(ids, max_evals=100)
    assert values.values.sum() == pytest.approx((score(ids) - score(np.zeros_like(ids)))[0], abs=1e-3)


@pytest.mark.works_with("nnsight", "reads and changes attention outputs of a patched model")
def test_nnsight_reads_attention():
    nnsight = pytest.importorskip("nnsight")
    model = _sparse("llama")
    batch = tiny.inputs("llama", batch=1)
    with torch.no_grad():
        expected = model(**batch).logits
        wrapped = nnsight.NNsight(model)
        with wrapped.trace(**batch):
            seen = wrapped.model.layers[0].self_attn.output[0].save()
            logits = wrapped.output.logits.save()
        with wrapped.trace(**batch):
            wrapped.model.layers[0].self_attn.output[0][:] = 0
            without = wrapped.output.logits.save()
    assert seen.shape[-1] == model.config.hidden_size
    assert torch.equal(logits, expected) and not torch.allclose(without, expected)


@pytest.fixture
def folder(tmp_path):
    tiny.tokenizer(unk_token="w0").save_pretrained(tmp_path)
    _sparse("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.works_with("inseq", "attribution of generated tokens, with a model loaded by from_pretrained")
def test_inseq_attributes_a_model_in_memory(folder):
    inseq = pytest.importorskip("inseq")
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    wrapped = inseq.load_model(model, "saliency", tokenizer=str(folder))
    out = wrapped.attribute("w5 w6 w7", generation_args={"max_new_tokens": 2, "min_new_tokens": 2}, show_progress=False)
    assert out.sequence_attributions[0].target_attributions.nan_to_num().abs().sum() > 0


@pytest.mark.works_with("inseq", "load_model with the name of a checkpoint asks for eager softmax", "refused")
def test_inseq_gets_no_silent_softmax(folder):
    inseq = pytest.importorskip("inseq")
    with pytest.raises(ValueError, match="silently turn it back into a softmax"):
        inseq.load_model(str(folder), "attention")


@pytest.mark.works_with("TransformerLens", "TransformerBridge turns the model into eager softmax", "refused")
def test_transformer_lens_gets_no_silent_softmax(folder):
    pytest.importorskip("transformer_lens")
    from transformer_lens.model_bridge import TransformerBridge

    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    with pytest.raises((ValueError, RuntimeError), match="softmax"):
        bridge = TransformerBridge.boot_transformers(str(folder), hf_model=model, tokenizer=tokenizer, device="cpu")
        bridge(tiny.inputs("llama", batch=1)["input_ids"])
