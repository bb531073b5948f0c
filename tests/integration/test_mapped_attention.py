import copy

import pytest
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax
from hf_entmax import alphas, patch_model
from hf_entmax.ops import controllable

MAPPINGS = ["sparsegen_lin", "sparsegen_exp", "sparsegen_sq", "sparsehourglass", "softmax"]


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("family", ["t5", "bart", "llama", "gemma2", "bert"])
def test_attention_weights_are_those_of_the_mapping(mapping, family, monkeypatch):
    """Against the plain model's scores: the weights of the first layer are the mapping of what eager gives to softmax."""
    model = tiny.build(family)
    batch = tiny.inputs(family)
    scores = []
    plain = torch.nn.functional.softmax

    def spy(input, *args, **kwargs):
        scores.append(input.detach().float())
        return plain(input, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", spy)
    with torch.no_grad():
        model(**batch)
    monkeypatch.undo()
    patched = patch_model(model, mapping=mapping)
    with torch.no_grad():
        out = patched(**batch, output_attentions=True)
    weights = out.encoder_attentions[0] if family in tiny.ENCODER_DECODERS else out.attentions[0]
    visible = scores[0] > -1e30
    expected = getattr(controllable, mapping)(scores[0].masked_fill(~visible, 0.0), mask=visible)
    assert torch.allclose(weights.float(), expected, atol=2e-5)


@pytest.mark.parametrize(
    "mapping, option",
    [("sparsegen_lin", "lam"), ("sparsegen_exp", "lam"), ("sparsehourglass", "q"), ("softmax", "temperature")],
)
def test_learned_options_get_gradients_and_survive(mapping, option, tmp_path):
    model = patch_model(tiny.build("bart"), mapping=mapping, mapping_options={option: "learned"})
    model(**tiny.inputs("bart", labels=True)).loss.backward()
    own = {n: p for n, p in model.named_parameters() if "entmax_norm" in n}
    assert len(own) == 6 and all(p.grad.abs().max() > 0 for p in own.values())
    with torch.no_grad():
        for parameter in own.values():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**tiny.inputs("bart")).logits, model(**tiny.inputs("bart")).logits)
    shown = hf_entmax.mapping_options(again)[option]
    assert {site: tuple(v.shape) for site, v in shown.items()} == dict.fromkeys(
        ("encoder_self", "cross", "decoder_self"), (2, 4)
    )
    assert shown["cross"].std() > 0


def test_support_shrinks_as_lambda_grows():
    nonzeros = []
    for lam in (-4.0, -1.0, 0.0, 0.5, 0.9):
        model = patch_model(tiny.build("bert"), mapping="sparsegen_lin", mapping_options={"lam": lam})
        with torch.no_grad():
            attentions = model(**tiny.inputs("bert"), output_attentions=True).attentions
        nonzeros.append((attentions[0] > 0).float().mean().item())
    assert nonzeros == sorted(nonzeros, reverse=True) and nonzeros[0] > nonzeros[-1] + 0.1


def test_padding_and_unpatching():
    model = tiny.build("bert")
    plain = copy.deepcopy(model)
    patch_model(model, mapping="sparsehourglass")
    batch = tiny.inputs("bert", batch=1, length=6)
    padded = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 3)),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 3)),
    }
    with torch.no_grad():
        assert torch.allclose(model(**padded).logits[:, :6], model(**batch).logits, atol=1e-5)
        hf_entmax.unpatch_model(model)
        assert torch.equal(model(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"mapping": "sparsegen_log"}, "cannot serve as attention"),
        ({"mapping": "sparsegen_lin", "mapping_options": {"lam": 1.0}}, "lam"),
        ({"mapping": "sparsegen_lin", "mapping_options": {"lamda": 0.5}}, "lamda"),
        ({"mapping": "sparsegen_lin", "alpha": 1.5}, "no alpha"),
        ({"mapping": "sparsegen_lin", "mapping_options": {"lam": "learned"}, "tie": "site"}, "tie"),
    ],
)
def test_bad_mappings(options, match):
    model = tiny.build("bert")
    with pytest.raises(ValueError, match=match):
        patch_model(model, **options)
    assert not hf_entmax.is_patched(model)


def test_a_mapping_without_a_kernel_refuses_the_kernel_by_name():
    model = patch_model(tiny.build("bert"), mapping="sparsegen_exp", backend="numba")
    with pytest.raises(ValueError, match="sparsegen_exp"):
        model(**tiny.inputs("bert"))


def test_there_is_no_alpha_to_show():
    model = patch_model(tiny.build("bert"), mapping="sparsegen_lin")
    with pytest.raises(ValueError, match="mapping_options"):
        alphas(model)
