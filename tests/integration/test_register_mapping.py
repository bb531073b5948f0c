"""Mappings registered from outside: the checks they pass, and a model that uses one."""

import pytest
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax
from hf_entmax.ops import controllable as C
from hf_entmax.ops.controllable import Interval

SHIFT = Interval("shift", lower=0.0, default=1.0, learned_range=(0.1, 5.0))


def squared_relu(scores, mask, shift=1.0):
    top = scores.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    kept = (scores - top + shift).relu() ** 2 * mask
    return kept / kept.sum(-1, keepdim=True)


def masked_softmax(scores, mask):
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


@pytest.fixture(scope="module")
def mappings():
    """Those that there are, and ours: its checks are made once."""
    before = dict(C.ATTENTION_MAPPINGS)
    hf_entmax.register_mapping("squared_relu", squared_relu, [SHIFT])
    yield dict(C.ATTENTION_MAPPINGS)
    C.ATTENTION_MAPPINGS.clear()
    C.ATTENTION_MAPPINGS.update(before)


@pytest.fixture(autouse=True)
def _registered(mappings):
    C.ATTENTION_MAPPINGS.clear()
    C.ATTENTION_MAPPINGS.update(mappings)


def test_a_model_uses_learns_saves_and_loads_it(tmp_path):
    model = hf_entmax.patch_model(tiny.build("bart"), mapping="squared_relu", mapping_options={"shift": "learned"})
    model(**tiny.inputs("bart", labels=True)).loss.backward()
    own = [p for name, p in model.named_parameters() if "entmax_norm" in name]
    assert own and all(p.grad.abs().max() > 0 for p in own)
    with torch.no_grad():
        weights = model(**tiny.inputs("bart"), output_attentions=True).cross_attentions[0]
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**tiny.inputs("bart")).logits, model(**tiny.inputs("bart")).logits)
    del C.ATTENTION_MAPPINGS["squared_relu"]
    with pytest.raises(ValueError, match="register_mapping before a model that uses it is patched or loaded"):
        tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)


def test_a_registered_softmax_attends_as_softmax_does():
    hf_entmax.register_mapping("my_softmax", masked_softmax)
    plain = tiny.build("llama").eval()
    batch = tiny.inputs("llama")
    with torch.no_grad():
        expected = plain(**batch).logits
        found = hf_entmax.patch_model(plain, mapping="my_softmax")(**batch).logits
    # Two softmaxes of the same scores in float32, through a few tiny layers.
    assert torch.allclose(found, expected, atol=1e-5)


def test_hidden_keys_and_empty_rows_get_no_weight_and_no_gradient():
    weights = C.attention_mapping("squared_relu").weights
    scores = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    scores[..., 3] = torch.nan
    mask = torch.tensor([True, True, True, False]).expand(3, 4).clone()
    mask[1] = False
    leaf = scores.clone().requires_grad_()
    found = weights(leaf, mask, shift=torch.tensor([0.5, 2.0], dtype=torch.float64))
    found.square().sum().backward()
    assert bool((found[..., 3] == 0).all()) and bool((found[:, :, 1] == 0).all())
    assert bool((leaf.grad[..., 3] == 0).all()) and bool((leaf.grad[:, :, 1] == 0).all())
    assert torch.allclose(found[:, 0, 0, :3], squared_relu(scores[:, 0, 0, :3], mask[0, :3], 0.5))
    low = torch.where(mask, scores, torch.finfo(torch.float64).min)
    assert torch.equal(weights(low, None, shift=1.0), weights(scores, mask, shift=1.0))


def naive_softmax(scores, mask):
    share = scores.exp() * mask
    return share / share.sum(-1, keepdim=True)


FAULTS = {
    "ignores the mask": (lambda scores, mask: scores.softmax(-1), (), "a row sums to 1 .* only within"),
    "sums to 2": (lambda scores, mask: 2 * masked_softmax(scores, mask), (), "a row sums to 1 .* only within 1"),
    "negative": (lambda scores, mask: scores * mask / (scores * mask).sum(-1, keepdim=True), (), "negative|not finite"),
    "overflows": (naive_softmax, (), "scores of about 100 some weights are not finite"),
    "shape": (lambda scores, mask: scores[..., 0], (), r"returned \(2, 3, 5\) for scores of shape"),
    "no tensor": (lambda scores, mask: 1.0, (), "returned float"),
    "raises": (lambda scores, mask: scores @ scores, (), "trying it raised RuntimeError"),
    "no gradient": (lambda scores, mask: masked_softmax(scores, mask).detach(), (), "have no gradient"),
    "wrong gradient": (
        lambda scores, mask: masked_softmax(scores, mask).detach() + 0 * scores,
        (),
        "GradcheckError: Jacobian mismatch",
    ),
    "counts hidden keys": (
        lambda scores, mask: masked_softmax(scores / scores.shape[-1], mask),
        (),
        "masked keys change the weights",
    ),
    "position": (
        lambda scores, mask: masked_softmax(scores + torch.arange(scores.shape[-1]), mask),
        (),
        "order of the keys",
    ),
    "first head for all": (
        lambda scores, mask, shift: squared_relu(scores, mask, torch.as_tensor(shift).flatten()[0]),
        (SHIFT,),
        r"options \[H, 1, 1\]",
    ),
    "option without gradient": (
        lambda scores, mask, shift: squared_relu(scores, mask, torch.as_tensor(shift).detach()),
        (SHIFT,),
        "GradcheckError",
    ),
    "no default": (squared_relu, (Interval("shift"),), "needs a default"),
    "default outside": (squared_relu, (Interval("shift", lower=2.0, default=1.0),), r"default in \(2, inf\)"),
    "one option twice": (squared_relu, (SHIFT, SHIFT), "name one twice"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_faulty_mapping_is_refused_by_what_is_wrong(fault):
    function, options, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        hf_entmax.register_mapping("faulty", function, options)
    assert "faulty" not in C.ATTENTION_MAPPINGS


def test_names_and_types():
    for name in ("entmax", "softmax", "sparsecone", "not a name", "squared_relu"):
        with pytest.raises(ValueError, match=r"another name|identifier"):
            hf_entmax.register_mapping(name, masked_softmax)
    with pytest.raises(TypeError, match=r"hf_entmax\.ops\.controllable\.Interval"):
        hf_entmax.register_mapping("mine", squared_relu, [("shift", 1.0)])
    with pytest.raises(TypeError, match=r"cannot be called as function\(scores, mask=mask"):
        hf_entmax.register_mapping("mine", torch.softmax)
    with pytest.raises(TypeError, match="must be callable"):
        hf_entmax.register_mapping("mine", None)
    hf_entmax.register_mapping("squared_relu", squared_relu, [SHIFT], description="relu^2", exist_ok=True)
    assert C.ATTENTION_MAPPINGS["squared_relu"].description == "relu^2"
    assert C.attention_mapping("squared_relu").settings({"shift": "learned"})["shift"].bounds == (0.1, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparsegen_lin", "sparsegen_exp", "sparsegen_sq", "sparsehourglass", "softmax"])
def test_ours_pass_the_same_checks(name):
    spec = C.ATTENTION_MAPPINGS[name]
    ours = lambda scores, mask, **options: getattr(C, name)(scores, mask=mask, **options)  # noqa: E731
    hf_entmax.register_mapping("again", ours, list(spec.options.values()))
