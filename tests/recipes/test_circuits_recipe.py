"""Rows of the recipe for circuits, on a tiny model whose tokenizer knows the words of a task."""

import sys

import pytest
import recipe_runs as runs
import tiny_models as tiny

import circuits
from hf_entmax.analysis.circuits import tasks


@pytest.mark.slow
def test_a_row_for_each_sample_none_twice_and_a_figure(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    words = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        "So",
        "is",
        "a",
        "really",
        "great",
        "friend",
        "isn",
        "t",
        ",",
        "'",
        "she",
        "he",
    ]
    words += [*tasks.WOMEN, *tasks.MEN]
    model = tiny.tf.LlamaForCausalLM(tiny.tf.LlamaConfig(**{**tiny._LLAMA, "vocab_size": len(words)}))
    tiny.save(tiny.enlarged(model), tmp_path / "model", words)

    def run(*more):
        given = [
            "--model",
            tmp_path / "model",
            "--out",
            tmp_path,
            *["--tasks", "pronouns", "--wordings", "0", "--prompts", "3"],
            *more,
        ]
        monkeypatch.setattr(sys, "argv", ["recipes/circuits.py", *map(str, given)])
        circuits.main()
        return runs.rows(tmp_path / "circuits.csv")

    assert len(run("--seeds", 0)) == 1
    rows = run("--seeds", 0, 1)
    assert [row["seed"] for row in rows] == ["0", "1"]
    dense = 2 * 4 * 11 * 12 / 2  # eleven tokens
    assert rows[0]["tokens"] == "11"
    for row in rows:
        assert 0 < float(row["edges_beyond_first"]) <= float(row["edges"]) <= float(row["edges_total"]) == dense
        assert 1 <= int(row["heads"]) <= 8 and len(row["strongest"].split()) == 8 and 0 <= float(row["accuracy"]) <= 1
    sparse = run("--seeds", 0, "--alpha", 1.7)[-1]
    assert sparse["alpha"] == "1.7" and float(sparse["edges_total"]) < dense
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        f"{tmp_path.name}-pronouns.svg",
        f"{tmp_path.name}-1.7-pronouns.svg",
    }
