import math

import pytest
import tiny_models as tiny
import torch

from hf_entmax.generation import enumerate_hypotheses, force_decode, hypothesis_tree
from hf_entmax.generation.results import SearchResult

TEXT = ["<pad>", "<s>", "</s>", "a", "b", "$x", "<b>&"]


def _result(entries, missing=0.0):
    entries = sorted(entries, key=lambda e: -e[1])
    return SearchResult(
        sequences=[list(e[0]) for e in entries],
        log_probabilities=[math.log(e[1]) for e in entries],
        finished=[e[0][-1] == 2 for e in entries],
        optimal=True,
        exhaustive=missing == 0.0,
        pruned_mass=missing,
        pruned_log_probability=-math.inf,
        expansions=1,
    )


def _texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_tree_draws_common_beginnings_once():
    tree = hypothesis_tree(
        _result([((3, 4, 5, 2), 0.6), ((3, 4, 6, 3, 2), 0.3), ((3, 4, 6, 4), 0.05)], 0.05), TEXT.__getitem__
    )
    assert tree.root.labels == ["a", "b"] and tree.root.mass == pytest.approx(0.95)
    first, second = tree.root.children
    assert first.labels == ["$x", "</s>"] and first.finished is True and first.share == pytest.approx(0.6 / 0.95)
    assert second.labels == ["<b>&"] and second.finished is None
    assert [node.text for node in second.children] == ["a </s>", "b …"]
    assert tree.to_text().splitlines() == [
        "a b",
        "├─ $x </s>    p = 60.0 %",
        "└─ <b>&       36.8 %",
        "   ├─ a </s>  p = 30.0 %",
        "   └─ b …     p = 5.0 %",
        "(5.0 % elsewhere)",
    ]
    page = tree.to_html()
    assert "<b>&lt;b&gt;&amp;</b>" in page and "<b><b>" not in page and page.count("<li>") == page.count("</li>") == 5
    figure = tree.to_figure()
    figure.canvas.draw()
    assert {"a b", "$x </s>  60.0 %", "<b>&", "b …  5.0 %"} <= set(_texts(figure))


def test_a_hypothesis_that_begins_another_one_keeps_its_place():
    tree = hypothesis_tree(_result([((3,), 0.5), ((3, 2), 0.5)]))
    assert tree.root.labels == ["3"] and tree.root.finished is False
    assert [child.labels for child in tree.root.children] == [["2"]]
    (alone,) = [hypothesis_tree(_result([((3, 2), 1.0)]))]
    assert alone.to_text() == "3 2  p = 100.0 %"
    with pytest.raises(ValueError, match="no hypothesis"):
        hypothesis_tree(_result([]))
    with pytest.raises(TypeError, match="tokenizer"):
        hypothesis_tree(_result([((3, 2), 1.0)]), 5)


def test_probabilities_near_certainty_are_not_rounded_to_it():
    tree = hypothesis_tree(_result([((3, 2), 0.99999), ((4, 2), 0.00001)]))
    assert ">99.9 %" in tree.to_text() and "<0.1 %" in tree.to_text() and "100.0 %" not in tree.to_text()


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_forced_decoding_agrees_with_the_search(family):
    model = tiny.build(family).double()
    batch = {k: v for k, v in tiny.inputs(family, batch=2, length=5).items() if k != "decoder_input_ids"}
    options = {"output_alpha": 1.2, "sequence_bias": {(tiny.EOS,): 1.0}}
    found = enumerate_hypotheses(model, batch, max_hypotheses=4, max_new_tokens=4, **options)
    for place in (0, 1):
        targets = [result.sequences[place] for result in found]
        longest = max(map(len, targets))
        padded = torch.tensor([[*t, *[-100] * (longest - len(t))] for t in targets])
        for given in (targets, padded):
            for decoding, result in zip(force_decode(model, batch, given, **options), found, strict=True):
                assert decoding.log_probability == pytest.approx(result.log_probabilities[place], abs=1e-9)
                for step in decoding.steps:
                    assert sum(p for _, p in step.support) <= 1 + 1e-9
                    assert step.probability == pytest.approx(dict(step.support)[str(step.token)], abs=1e-12)
    ensemble = force_decode([model, tiny.build(family, seed=1).double()], batch, targets, **options)
    assert all(0 < step.probability <= 1 for step in ensemble[0].steps[:1])


def test_forced_decoding_joins_certain_runs_and_names_the_rest():
    model = tiny.build("gpt2").double()
    batch = tiny.inputs("gpt2", batch=1, length=4)
    forced = [7, 9, 2]

    def allowed(_, ids):
        place = ids.shape[-1] - 4
        return [5, 6, 8] if place == 0 else [forced[place - 1]]

    (view,) = force_decode(
        model, batch, [[5, *forced]], lambda t: f"<{t}>", output_alpha=1.0, prefix_allowed_tokens_fn=allowed
    )
    assert [[step.token for step in span] for span in view.spans()] == [[5], forced]
    assert [step.support_size for step in view.steps] == [3, 1, 1, 1]
    first, second = view.to_text().splitlines()
    assert first.startswith("<5>") and "also <" in first and "<5>" not in first[3:]
    assert second == "<7> <9> <2>  certain"
    page = view.to_html()
    assert "&lt;7&gt; &lt;9&gt; &lt;2&gt;" in page and "<7>" not in page
    assert "<7> <9> <2>" in _texts(view.to_figure())
    (wrong,) = force_decode(model, batch, [[5, 8, 2]], output_alpha=1.0, prefix_allowed_tokens_fn=allowed)
    assert wrong.steps[1].probability == 0.0 and wrong.log_probability == -math.inf and not wrong.steps[1].certain
    (short,) = force_decode(model, batch, [[5]], output_alpha=1.0, max_support=2)
    assert (
        len(short.steps[0].support) == 2
        and short.steps[0].support_size == tiny.VOCAB
        and "and 35 more" in short.to_text()
    )


def test_bad_targets():
    model = tiny.build("gpt2")
    batch = tiny.inputs("gpt2", batch=2, length=4)
    for targets in ([[3]], [[3], []]):
        with pytest.raises(ValueError, match="one non-empty list"):
            force_decode(model, batch, targets)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        force_decode(model, batch, [[3], [99]])
    with pytest.raises(ValueError, match="max_support=0"):
        force_decode(model, batch, [[3], [3]], max_support=0)
