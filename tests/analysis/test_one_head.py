"""One head on one sentence, and the loss without it."""

import pytest
import tiny_models as tiny
import torch

from hf_entmax import patch_model
from hf_entmax.analysis import ablated, head
from hf_entmax.integration.observe import observe_attention

TEXT = "the cat sat on the mat"


def _tokenizer():
    return tiny.tokenizer(["<pad>", "<s>", "</s>", "<unk>", *dict.fromkeys(TEXT.split())])


def _ready(family, **options):
    return patch_model(tiny.build(family).eval(), **(options or {"alpha": 2.0}))


def _logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("patched", [True, False])
def test_its_weights_are_those_of_the_model(patched):
    model = _ready("llama") if patched else tiny.build("llama").eval()
    view = head(model, 1, 2, TEXT, tokenizer=_tokenizer())
    seen = {}
    with torch.no_grad(), observe_attention(model, lambda call: seen.__setitem__(call.site.layer, call.weights)):
        model(**_tokenizer()(TEXT, return_tensors="pt"))
    torch.testing.assert_close(view.weights, seen[1][0, 2])
    assert [token.text for token in view.keys] == TEXT.split()
    assert view.density < 1 if patched else view.density == 1


def test_frame_and_graph_hold_every_weight_that_is_not_zero():
    pytest.importorskip("pandas")
    networkx = pytest.importorskip("networkx")
    view = head(_ready("llama"), 0, 0, TEXT, tokenizer=_tokenizer())
    frame, graph = view.frame, view.graph()
    count = int((view.weights > 0).sum())
    assert len(frame) == graph.number_of_edges() == count
    assert frame["weight"].is_monotonic_decreasing
    first = frame.iloc[0]
    assert view.weights[first["query_position"], first["key_position"]] == pytest.approx(first["weight"])
    assert isinstance(graph, networkx.DiGraph) and graph.nodes[1]["text"] == "cat"
    assert sum(data["weight"] for _, _, data in graph.out_edges(3, data=True)) == pytest.approx(1.0, abs=1e-5)


def test_the_tokenizer_is_that_beside_the_model(tmp_path):
    model = _ready("llama")
    with pytest.raises(ValueError, match=r"no tokenizer was found where the model came from .*: give tokenizer="):
        head(model, 0, 0, TEXT)
    model.save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(head(model, 0, 0, TEXT).weights, head(model, 0, 0, TEXT, tokenizer=_tokenizer()).weights)


def test_a_head_fires_where_it_looks_elsewhere():
    view = head(_ready("llama"), 0, 1, TEXT, tokenizer=_tokenizer())
    expected = [i for i, row in enumerate(view.weights) if any(w > 0 for j, w in enumerate(row) if j not in (0, i))]
    assert view.fires == expected
    pytest.importorskip("pandas")
    frame = view.elsewhere
    assert sorted(set(frame["query_position"])) == expected
    pairs = list(zip(frame["query_position"], frame["key_position"], strict=True))
    assert pairs and not any(key in (0, query) for query, key in pairs)
    assert frame["weight"].sum() == pytest.approx(
        sum(float(w) for i, row in enumerate(view.weights) for j, w in enumerate(row) if j not in (0, i)), rel=1e-5
    )


def test_an_encoder_decoder_has_three_sites_and_a_figure():
    pytest.importorskip("matplotlib")
    model, batch = _ready("t5"), tiny.inputs("t5", batch=1, labels=True)
    view = head(model, 1, 0, batch, tokenizer=_tokenizer(), site="cross")
    assert view.weights.shape == (batch["labels"].shape[1], int(batch["attention_mask"].sum()))
    assert view.figure().axes
    with pytest.raises(ValueError, match="several sites"):
        head(model, 1, 0, batch, tokenizer=_tokenizer())


@pytest.mark.parametrize("patched", [True, False])
def test_without_a_head_its_output_projection_sees_zeros(patched):
    model = _ready("llama") if patched else tiny.build("llama").eval()
    batch = tiny.inputs("llama")
    before = _logits(model, batch)
    projection = model.model.layers[1].self_attn.o_proj
    width = projection.in_features // 4
    with ablated(model, (1, 2)):
        found = _logits(model, batch)
        with ablated(model, [(0, 0), (1, 1)], factor=0.5):
            assert not torch.equal(_logits(model, batch), found)
        assert torch.equal(_logits(model, batch), found)
    kept = projection.weight.detach().clone()
    with torch.no_grad():
        projection.weight[:, 2 * width : 3 * width] = 0
        torch.testing.assert_close(found, _logits(model, batch))
        projection.weight.copy_(kept)
    assert torch.equal(_logits(model, batch), before) and not torch.equal(found, before)


def test_an_exception_leaves_the_model_as_it_was():
    model, batch = _ready("t5"), tiny.inputs("t5", labels=True)
    before = _logits(model, batch)
    with pytest.raises(RuntimeError, match="stop"), ablated(model, ("cross", 0, 1)):
        raise RuntimeError("stop")
    assert torch.equal(_logits(model, batch), before)


def test_heads_that_do_not_exist_are_named():
    model, batch = _ready("llama"), tiny.inputs("llama", batch=2)
    for arguments, message in (
        ((model, 7, 0, TEXT), "layer=7 does not exist"),
        ((model, 0, 9, TEXT), "head=9 does not exist"),
        ((model, 0, 0, batch), "give one sentence"),
    ):
        with pytest.raises(ValueError, match=message):
            head(*arguments, tokenizer=_tokenizer())
    with pytest.raises(ValueError, match="site='cross'"):
        head(model, 0, 0, TEXT, tokenizer=_tokenizer(), site="cross")
    for heads, message in (([(0, 1), (0, 1)], "twice"), ((0, 9), "head=9")):
        with pytest.raises(ValueError, match=message), ablated(model, heads):
            pass
    with pytest.raises(ValueError, match="factor=nan"), ablated(model, (0, 0), factor=float("nan")):
        pass
