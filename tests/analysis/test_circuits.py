"""Edges that decide nothing can go, to the bit; attribution finds those that decide."""

import re

import pytest
import tiny_models as tiny
import torch

from hf_entmax import patch_model
from hf_entmax.analysis import circuits, plots
from hf_entmax.analysis.circuits import Edge, LogitDifference, Task
from hf_entmax.analysis.circuits.edges import Ablated
from hf_entmax.analysis.plots.circuits import leading_to


def _task(family="llama", batch=3):
    prompts, others = (tiny.inputs(family, batch=batch, length=7, seed=seed) for seed in (0, 1))
    answers, wrong = torch.arange(5, 5 + batch)[:, None], torch.tensor([[20, 21], [22, -1], [23, 24]])[:batch]
    return Task("random", prompts, others, LogitDifference(answers, wrong), [[str(n) for n in range(7)]] * batch)


def _ready(family="llama", patched=True, **options):
    model = tiny.build(family)
    return patch_model(model, **(options or {"alpha": 1.7})) if patched else model


def _with(ablated, value):
    return {name: torch.full_like(mask, value) for name, mask in ablated.present.items()}


@pytest.mark.parametrize("ablation", ["zero", "mean", "corrupted"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_edges_that_are_not_there_can_go_without_a_change_to_the_bit(family, ablation):
    model, task = _ready(family), _task(family)
    ablated = Ablated(model, task, ablation)
    with torch.no_grad():
        plain = task.metric(model(**task.batch))
    torch.testing.assert_close(ablated.full, plain)
    assert torch.equal(ablated.full, ablated.measure(_with(ablated, True)))
    possible = sum(mask.numel() for mask in ablated.present.values()) / 3
    assert 0 < ablated.edges < possible
    assert not torch.equal(ablated.full, ablated.empty)


def test_in_a_dense_model_every_weight_is_an_edge():
    assert Ablated(_ready(patched=False), _task(), "zero").edges == 2 * 4 * 28


def test_with_all_edges_of_the_corrupted_prompt_the_first_layer_is_that_prompts():
    """With one layer, what is read is all of the corrupted prompt's; the last token itself stays."""
    model, task = tiny.build("mistral", num_hidden_layers=1, sliding_window=None), _task()
    same = {name: value.clone() for name, value in task.batch.items()}
    same["input_ids"][:, :-1] = task.corrupted["input_ids"][:, :-1]
    task = Task(task.name, task.batch, same, task.metric, task.tokens)
    with torch.no_grad():
        torch.testing.assert_close(Ablated(model, task).empty, task.metric(model(**same)))


@pytest.mark.parametrize(("patched", "ablation"), [(True, "zero"), (True, "mean"), (False, "corrupted")])
def test_scores_are_what_switching_off_each_edge_alone_does(patched, ablation):
    """Where attention moves the output so little that this is linear in the gates: by brute force, one run per edge."""
    model, task = _ready("gpt2", patched).double(), _task("gpt2", batch=2)  # a family whose norms stay in float64
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_proj.weight.mul_(1e-6)
    scores = circuits.attribute(model, task, ablation=ablation, steps=1)
    ablated = scores.ablated
    for name, mask in ablated.present.items():
        for head, query, key in mask.any(0).nonzero().tolist():
            gates = {other: own.clone() for other, own in ablated.present.items()}
            gates[name][:, head, query, key] = False
            alone = ablated.full - ablated.measure(gates)
            torch.testing.assert_close(scores.scores[name][:, head, query, key].double(), alone, rtol=0.01, atol=1e-10)
        assert not scores.scores[name][~mask].any()


def test_the_path_is_walked_through_the_middle_of_its_steps():
    """The scores add up to the whole difference; with the ends of the steps 16 of them miss four times as much."""
    scores = circuits.attribute(_ready("gpt2"), _task("gpt2"), steps=16)
    assert scores.missed < 0.1 * float((scores.ablated.full - scores.ablated.empty).abs().max())


def test_a_planted_edge_is_the_circuit():
    """One layer, and prompts that differ in one token: the answer can only come from where the last position reads it."""
    model = tiny.build("mistral", num_hidden_layers=1, sliding_window=None)
    task = _task()
    other = {name: value.clone() for name, value in task.batch.items()}
    other["input_ids"][:, 3] = (other["input_ids"][:, 3] - 2) % 30 + 3
    task = Task(task.name, task.batch, other, task.metric, task.tokens)
    scores = circuits.attribute(model, task, steps=64)
    for prompt in range(3):
        edges = scores.edges(prompt, 28 * 4)
        deciding = [edge for edge in edges if abs(edge.score) > 1e-5]
        # Weights of the last row sum to 1: a key that changes changes them all; no other row reaches the answer.
        assert deciding and {edge.query for edge in deciding} == {6}
        assert [abs(edge.score) for edge in edges] == sorted((abs(edge.score) for edge in edges), reverse=True)
    assert scores.missed < 0.01 * float((scores.ablated.full - scores.ablated.empty).abs().max())
    found = circuits.needed(scores, 1.0)
    assert found.size <= 28 and found.total == 4 * 28
    assert circuits.faithfulness(scores, [4 * 7]).faithfulness.item() == pytest.approx(1, abs=1e-3)


def test_a_curve_goes_from_nothing_to_everything():
    scores = circuits.attribute(_ready(), _task(), steps=2)
    for unit, total in (("edges", 10**6), ("heads", 8)):
        curve = circuits.faithfulness(scores, [0, total], unit)
        assert curve.faithfulness.tolist() == pytest.approx([0, 1])
        assert circuits.needed(scores, 0.5, unit).faithfulness >= 0.5
    table = scores.heads
    expected = sum(
        float(score[0, 2].sum() + score[1, 2].sum() + score[2, 2].sum()) / 3 for score in scores.scores.values()
    )
    assert sum(float(values[2]) for values in table.values()) == pytest.approx(expected, rel=1e-4)


def test_the_model_is_left_as_it_was():
    model, task = _ready(alpha="learned").train(), _task()
    circuits.attribute(model, task, steps=1)
    assert model.training and all(
        parameter.requires_grad and parameter.grad is None for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, task: circuits.attribute(model, task, steps=0), "steps=0"),
        (lambda model, task: circuits.attribute(model, task, ablation="noise"), "choose one of"),
        (lambda model, task: circuits.needed(circuits.attribute(model, task, steps=1), 0.0), "share"),
        (lambda model, task: circuits.faithfulness(circuits.attribute(model, task, steps=1), [-1]), "at least 0"),
        (lambda model, task: circuits.faithfulness(circuits.attribute(model, task, steps=1), unit="mlps"), "unit"),
    ],
)
def test_what_is_not_allowed_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call(_ready(), _task())


def test_corrupted_prompts_are_needed_and_have_the_length_of_the_prompts():
    model, task = _ready(), _task()
    with pytest.raises(ValueError, match="needs corrupted prompts"):
        Ablated(model, Task("none", task.batch, None, task.metric, task.tokens))
    longer = tiny.inputs("llama", length=8)
    with pytest.raises(ValueError, match="the same length"):
        Ablated(model, Task("longer", task.batch, longer, task.metric, task.tokens))


@pytest.mark.parametrize("name", list(circuits.TASKS))
@pytest.mark.parametrize("wording", [0, 1, 2])
def test_tasks_differ_from_their_corrupted_partners_where_it_matters(name, wording):
    words = _EveryWord()
    task = circuits.TASKS[name](words, 6, seed=3, wording=wording)
    again = circuits.TASKS[name](words, 6, seed=3, wording=wording)
    assert torch.equal(task.batch["input_ids"], again.batch["input_ids"])
    differ = task.batch["input_ids"] != task.corrupted["input_ids"]
    assert differ.any(1).all() and (differ.sum(1) <= 2).all()
    assert len({tuple(row) for row in task.batch["input_ids"].tolist()}) == 6
    answers, wrong = task.metric.answers, task.metric.wrong
    assert "".join(task.tokens[0]) == "".join(words.decode([id_]) for id_ in task.batch["input_ids"][0])
    assert not (set(answers[0].tolist()) & set(wrong[0].tolist())) - {-1}
    with pytest.raises(ValueError, match="wording=3"):
        circuits.TASKS[name](words, 6, wording=3)


class _EveryWord:
    """A tokenizer that gives every word, and every sign, the next free id."""

    def __init__(self):
        self.seen = {}

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.seen.setdefault(part, len(self.seen)) for part in re.findall(r"\w+|[^\w\s]", text)]}

    def decode(self, ids):
        return list(self.seen)[ids[0]]


def test_only_edges_on_a_path_to_the_answer_are_drawn():
    pytest.importorskip("matplotlib")
    edge = lambda layer, query, key, score=1.0: Edge("decoder_self", layer, 0, query, key, score)  # noqa: E731
    edges = [edge(1, 4, 2, 2.0), edge(0, 2, 0, -1.0), edge(0, 3, 1), edge(2, 2, 0)]
    assert leading_to(edges, 4) == edges[:2]  # the third is read by nobody, the fourth too late
    figure = plots.circuit(edges, list("abcde"), answer="f")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["1.0", "0.0", "f"]
    with pytest.raises(ValueError, match="no edge"):
        plots.circuit([], list("abcde"))
    with pytest.raises(ValueError, match="tokens"):
        plots.circuit(edges, list("abc"))
    curve = circuits.FaithfulnessCurve("edges", [1, 2], torch.ones(2, 1), torch.tensor([0.5, 1.0]))
    assert len(plots.faithfulness_curves({"a": curve, "b": curve}).axes[0].lines) == 3
