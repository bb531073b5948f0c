"""CoNLL-U, alignments, plain data, trajectories: good files and broken ones."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from pathlib import Path

import pytest
import torch

from hf_entmax.analysis.reading.alignments import read_alignments
from hf_entmax.analysis.reading.conllu import read_conllu
from hf_entmax.analysis.reading.data import TextRecord, read_data
from hf_entmax.analysis.reading.trajectory import read_trajectory

DATA = Path(os.environ.get("HF_ENTMAX_DATA", "/nonexistent"))
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="HF_ENTMAX_DATA does not name a folder with treebanks and alignments"
)


def line(number, form, head, relation="dep", features="_", misc="_"):
    return "\t".join([str(number), form, "_", "_", "_", features, str(head), relation, "_", misc])


GERMAN = "\n".join(
    [
        "# sent_id = one",
        line(1, "Wer", 2, "nsubj", "Case=Nom|PronType=Int"),
        line(2, "geht", 0, "root"),
        "3-4\tzum\t_\t_\t_\t_\t_\t_\t_\t_",
        line(3, "zu", 5, "case"),
        line(4, "dem", 5, "det"),
        line(5, "Hof", 2, "obl:arg", misc="SpaceAfter=No"),
        "5.1\tleer\t_\t_\t_\t_\t_\t_\t_\t_",
        line(6, "?", 2, "punct"),
        "",
        line(1, "Ja", 0, "root"),
    ]
)


def test_conllu(tmp_path):
    path = tmp_path / "tree.conllu"
    path.write_text(GERMAN)
    first, second = read_conllu(path)
    assert first.sent_id == "one" and first.text == "Wer geht zum Hof?" and second.text == "Ja"
    assert first.words == ["Wer", "geht", "zu", "dem", "Hof", "?"]
    assert first.heads == [1, -1, 4, 4, 1, 1]
    assert first.relations == ["nsubj", "root", "case", "det", "obl", "punct"]
    assert first.interrogative == [True, False, False, False, False, False]
    assert first.surface == ["Wer", "geht", "zum", "Hof", "?"]
    heads, relations, asks = first.surface_dependencies()
    assert heads == [1, -1, 3, 1, 1] and relations[2] == "case" and asks == [True, False, False, False, False]
    assert [first.text[a:b] for a, b in first.surface_spans()] == first.surface
    with gzip.open(tmp_path / "tree.conllu.gz", "wt") as file:
        file.write(GERMAN)
    assert read_conllu(tmp_path / "tree.conllu.gz") == [first, second]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\tonly\tthree", ":1: expected 10 tab-separated columns, found 3"),
        (line(1, "a", 0) + "\n" + line(3, "b", 1), ":2: word number '3' where 2 was expected"),
        (line(1, "a", "x"), ":1: the head 'x' is not a number"),
        (line(1, "a", 0) + "\n" + line(2, "b", 9), ":2: head 9 in a sentence of 2 words"),
        (line(1, "a", 1), ":1: word 1 is its own head"),
        ("2-1\tab" + "\t_" * 8, ":1: '2-1' is not a range"),
        ("# nothing\n", "no sentence in it"),
    ],
)
def test_broken_conllu_names_the_line(tmp_path, text, message):
    path = tmp_path / "broken.conllu"
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=r"broken\.conllu") as caught:
        read_conllu(path)
    assert message in str(caught.value)


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.conllu"
    path.write_bytes(b"# ok\n" + line(1, "x", 0).encode().replace(b"x", b"\xe9") + b"\n")
    with pytest.raises(ValueError, match=r"latin.conllu:2: not UTF-8"):
        read_conllu(path)
    (tmp_path / "cut.conllu.gz").write_bytes(gzip.compress(GERMAN.encode())[:-9])
    with pytest.raises(ValueError, match="damaged gzip"):
        read_conllu(tmp_path / "cut.conllu.gz")
    with pytest.raises(FileNotFoundError):
        read_conllu(tmp_path / "missing.conllu")


def test_alignments(tmp_path):
    record = {"id": "x", "src": ["das", "Haus"], "tgt": ["the", "house"], "sure": [[0, 0]], "possible": [[1, 1]]}
    path = tmp_path / "gold.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (pair,) = read_alignments(path)
    assert (pair.source, pair.target, pair.sure, pair.possible) == (
        ("das", "Haus"),
        ("the", "house"),
        ((0, 0),),
        ((1, 1),),
    )
    (tmp_path / "gold.tsv").write_text("das Haus\tthe house\t0-0 1p1\n")
    (again,) = read_alignments(tmp_path / "gold.tsv")
    assert (again.source, again.sure, again.possible) == (pair.source, pair.sure, pair.possible)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"src": ["a"], "tgt": ["b"], "sure": [[0, 0]]}\n{"src": [', ":2: not valid JSON"),
        ('{"src": [], "tgt": ["b"], "sure": []}', ":1: 'src' must be a non-empty list"),
        ('{"src": ["a"], "tgt": ["b"]}', ":1: 'sure' is missing"),
        ('{"src": ["a"], "tgt": ["b"], "sure": [[0, 1]]}', "outside a sentence of 1 source and 1 target"),
        ('{"src": ["a"], "tgt": ["b"], "sure": [[0.5, 0]]}', "a link is"),
        ("a\tb", "three tab-separated columns"),
        ("a\tb\t0=0", "'0=0' is not a link"),
        ("\n\n", "no aligned sentence pair"),
    ],
)
def test_broken_alignments_name_the_line(tmp_path, text, message):
    path = tmp_path / "broken.txt"
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=r"broken\.txt") as caught:
        read_alignments(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "options", "expected"),
    [
        ("a.txt", "one\n\n two \n", {}, [("one", None), ("two", None)]),
        ("a.tsv", "das Haus\tthe house\n", {}, [("das Haus", "the house")]),
        ("a.tsv", 'src\tother\ttgt\na\tx\t"b\n', {}, [("a", '"b')]),
        ("a.tsv", "x\ty\n", {"source_column": "1", "target_column": "0"}, [("y", "x")]),
        ("a.csv", 'text,label\n"a, b",1\n', {}, [("a, b", None)]),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}\n', {}, [("a", None), ("b", None)]),
        ("a.jsonl", '{"translation": {"en": "a", "de": "b"}}\n', {}, [("a", "b")]),
        (
            "a.jsonl",
            '{"translation": {"en": "a", "de": "b"}}\n',
            {"source_column": "de", "target_column": "en"},
            [("b", "a")],
        ),
        ("a.json", '[{"document": "a", "summary": ["b", "c"]}]', {}, [("a", "b c")]),
        ("a.txt", "one\ntwo\nthree\n", {"limit": 2}, [("one", None), ("two", None)]),
    ],
)
def test_data(tmp_path, name, text, options, expected):
    (tmp_path / name).write_text(text)
    assert read_data(tmp_path / name, **options) == [TextRecord(*pair) for pair in expected]


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.txt", "\n \n", {}, "no sentence in it"),
        ("a.txt", "a\n", {"source_column": "x"}, "plain text has no columns"),
        ("a.tsv", "a\tb\nc\n", {}, ":2: 1 column"),
        ("a.csv", "text,label\na,b\n", {"source_column": "title"}, "no column 'title'"),
        ("a.jsonl", '{"text": "a"}\nnonsense\n', {}, ":2: not valid JSON"),
        ("a.jsonl", '{"foo": "a"}\n', {}, "none of the fields foo"),
        ("a.txt", "a\n", {"limit": 0}, "at least 1"),
    ],
)
def test_bad_data(tmp_path, name, text, options, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_data(tmp_path / name, **options)


def test_missing_data():
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_data("nowhere/to/be/found.txt")


def test_trajectory(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [
        {"step": 10, "alpha": {"cross": [[1.5, 1.6]]}, "density": {"cross": [0.5]}},
        {"step": 0, "alpha": {"cross": [[1.1, 1.2]]}},
        {"step": 10, "alpha": {"cross": [[1.7, 1.8]]}, "density": {"cross": [0.4]}, "js": {"cross": [0.3]}},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    trajectory = read_trajectory(path)
    assert trajectory.steps == [0, 10] and trajectory.sites == ["cross"]
    assert trajectory.alpha["cross"].tolist() == [[[1.1, 1.2]], [[1.7, 1.8]]]
    torch.testing.assert_close(
        trajectory.density["cross"][:, 0], torch.tensor([float("nan"), 0.4]).double(), equal_nan=True, rtol=1e-7, atol=0
    )
    with path.open("a") as file:
        file.write('{"step": 20, "alp')
    with pytest.warns(UserWarning, match="cut off"):
        assert read_trajectory(path).steps == [0, 10]
    with path.open("a") as file:
        file.write("\n" + json.dumps(lines[0]) + "\n")
    with pytest.raises(ValueError, match=r"log.jsonl:4: not valid JSON"):
        read_trajectory(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no logged step"),
        ('{"alpha": {}}', "integer 'step'"),
        ('{"step": 1, "alpha": {"cross": [1.0]}}', "layers"),
        ('{"step": 1, "alpha": {"cross": [[1.0, 2.0], [1.0]]}}', "rectangular"),
        (
            '{"step": 1, "alpha": {"cross": [[1.0]]}}\n{"step": 2, "alpha": {"cross": [[1.0, 2.0]]}}',
            "changes its shape",
        ),
    ],
)
def test_broken_trajectories(tmp_path, text, message):
    (tmp_path / "log.jsonl").write_text(text + "\n")
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        read_trajectory(tmp_path / "log.jsonl")


@needs_data
@pytest.mark.parametrize("name", ["English-PUD/en_pud-ud-test", "German-PUD/de_pud-ud-test"])
def test_treebanks(name):
    path = DATA / "ud" / f"{name}.conllu.gz"
    sentences = read_conllu(path)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = [row[len("# text = ") :].strip() for row in lines if row.startswith("# text = ")]
    assert [sentence.text for sentence in sentences] == texts
    assert all(max(sentence.heads) < len(sentence.words) and sentence.heads.count(-1) == 1 for sentence in sentences)


@needs_data
def test_gold_alignments():
    counts = {"en-fr": (447, 4038, 13400), "de-en": (100, 1232, 0)}
    for name, expected in counts.items():
        pairs = read_alignments(DATA / "alignments" / f"{name}.jsonl.gz")
        assert (len(pairs), sum(len(p.sure) for p in pairs), sum(len(p.possible) for p in pairs)) == expected
