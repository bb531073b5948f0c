"""Tables, JSON lines, running text and parallel files: good ones and broken ones, named with their line."""

import gzip
from pathlib import Path

import datasets
import pytest

from hf_entmax.analysis.reading import tables


def write(tmp_path, name, raw):
    path = tmp_path / name
    raw = raw if isinstance(raw, bytes) else raw.encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return str(path)


def test_tables_with_and_without_a_header(tmp_path):
    wanted = [("a b", "1"), ('"c', "2")]
    assert tables.read_rows(write(tmp_path, "a.tsv", 'a b\t1\n"c\t2\n'), ("text", "label")) == wanted
    header = 'label\tother\ttext\n1\tx\t a b \n2\ty\t"c\n'
    assert tables.read_rows(write(tmp_path, "b.tsv.gz", header), ("text", "label")) == wanted
    assert tables.read_rows(write(tmp_path, "c.csv", 'text,label\n"a, b",1\r\n'), ("text", "label")) == [("a, b", "1")]
    # Numbers name columns of a table without a header; a mark at the beginning of the file is none of its text.
    assert tables.read_rows(write(tmp_path, "d.tsv", b"\xef\xbb\xbfx\ty\tz\n"), ("2", "0")) == [("z", "x")]


def test_columns_are_taken_in_order_only_where_there_are_as_many(tmp_path, capsys):
    path = write(tmp_path, "a.tsv", "7\tgood\tpos\n")
    with pytest.raises(ValueError, match=r"a\.tsv:1: 3 column\(s\) .*expected text, label.*give their numbers"):
        tables.read_rows(path, ("text", "label"))
    with pytest.raises(ValueError, match=r"there is no column 3"):
        tables.read_rows(path, ("1", "3"))
    assert tables.read_rows(path, ("1", "2")) == [("good", "pos")]
    assert capsys.readouterr().err == ""
    assert tables.read_rows(path, ("number", "text", "label")) == [("7", "good", "pos")]
    assert "no header; the columns in order are number '7', text 'good', label 'pos'" in capsys.readouterr().err


def test_quoted_fields_may_go_over_several_lines(tmp_path):
    text = 'label,text\n1,"good film"\n0,"bad film\nslow, long"\n1,ok\n'
    rows = [("good film", "1"), ("bad film\nslow, long", "0"), ("ok", "1")]
    assert tables.read_rows(write(tmp_path, "a.csv", text), ("text", "label")) == rows
    for tail, message in (
        ('1,"open\n', r"a\.csv:6: not valid CSV"),
        ("1\n", r"a\.csv:6: 1 column\(s\), the first line has 2"),
        ("\n", r"a\.csv:6: the line is empty"),
        ('0,"x"y\n', r"a\.csv:6: not valid CSV"),
    ):
        with pytest.raises(ValueError, match=message):
            tables.read_rows(write(tmp_path, "a.csv", text + tail), ("text", "label"))


def test_long_fields_and_stray_returns_of_a_tsv_file_are_text(tmp_path):
    long = "x" * 200_000
    assert tables.read_rows(write(tmp_path, "a.tsv", f"{long}\ta\rb\n"), ("x", "y")) == [(long, "a\rb")]


def test_running_text_keeps_its_blank_lines(tmp_path):
    lines = write(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": ""}\n{"text": null}\n{"text": "b"}\n')
    assert tables.read_text(lines) == ["a", "", "", "b"]
    assert tables.read_text(write(tmp_path, "a.tsv", "text\na\n\nb\n")) == ["a", "", "b"]
    with pytest.raises(ValueError, match="nothing in it"):
        tables.read_text(write(tmp_path, "b.jsonl", '{"text": ""}\n'))


def test_json_lines(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"source": ["One.", " Two."], "target": ["x", "y"], "n": 3}\n')
    assert tables.read_rows(path, ("source", "n")) == [("One. Two.", "3")]
    assert tables.read_lists(path, ("source", "target")) == [(["One.", "Two."], ["x", "y"])]
    pairs = write(tmp_path, "b.jsonl", '{"translation": {"de": "ja", "en": "yes"}}\n')
    assert tables.read_pairs(pairs, "de", "en") == [("ja", "yes")]


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.tsv", "only one\n", r"a\.tsv:1: 1 column\(s\) \['only one'\]; expected text, label"),
        ("a.tsv", "label\tother\n1\ta\n", r"a\.tsv:1: no column text; it has label, other"),
        ("a.tsv", "a\tb\nc\n", r"a\.tsv:2: 1 column\(s\), the first line has 2"),
        ("a.tsv", "a\tb\nc\td\te\n", r"a\.tsv:2: 3 column\(s\), the first line has 2"),
        ("a.tsv", "text\tlabel\na\tb\n\nc\td\n", r"a\.tsv:3: the line is empty"),
        ("a.tsv.gz", "a\tb\nc\t \n", r"a\.tsv\.gz:2: label is empty"),
        ("a.tsv", b"a\tb\nc\t\xff\n", r"a\.tsv:2: not UTF-8"),
        ("a.tsv", "", r"a\.tsv: there is nothing in it"),
        ("a.tsv", "text\tlabel\n", r"a\.tsv: there is nothing in it"),
        ("a.csv", "a\tb\n", r"a\.csv:1: 1 column\(s\)"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "a"}\n', r"a\.jsonl:2: no label; it has text"),
        ("a.jsonl", '{"text": "a", "label": ""}\n', r"a\.jsonl:1: label is empty"),
        ("a.jsonl", '{"text": "a", "label": null}\n', r"a\.jsonl:1: label is empty"),
        ("a.jsonl", '{"text": [], "label": 1}\n', r"a\.jsonl:1: text is empty"),
        ("a.jsonl", '{"text": "a", "label": 1}\n\n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: expected an object with text, label, found list"),
        ("a.doc", "x", r"a\.doc: this kind of file has no columns"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, name, raw, message):
    with pytest.raises(ValueError, match=message):
        tables.read_rows(write(tmp_path, name, raw), ("text", "label"))


def test_one_rule_about_headers(tmp_path):
    # Names in another case are names; usual names that are not those asked for are a header too, not a first row.
    assert tables.read_rows(write(tmp_path, "a.tsv", "Text\tLABEL\na\t1\n"), ("text", "label")) == [("a", "1")]
    usual = write(tmp_path, "b.tsv", "sentence\tsource\ncat\tword\n")
    with pytest.raises(ValueError, match=r"b\.tsv:1: no column text, label; it has sentence, source"):
        tables.read_rows(usual, ("text", "label"))
    assert tables.read_rows(usual, ("0", "1")) == [("cat", "word")]
    # One usual name may be a word of the text.
    assert tables.read_rows(write(tmp_path, "c.tsv", "word\tWort\n"), ("en", "de")) == [("word", "Wort")]


def test_a_header_of_other_names_is_seen_in_several_files(tmp_path):
    body = [f"word {i}\tWort {i}\n" for i in range(30)]
    train = write(tmp_path, "train.tsv", "English\tGerman\n" + "".join(body))
    dev = write(tmp_path, "dev.tsv", "English\tGerman\n" + "".join(reversed(body)))
    wheres = {"train": train, "dev": dev, "test": dev}
    with pytest.raises(ValueError, match=r"both begin with English / German.*Name its columns instead of en, de"):
        tables.read_splits(wheres, ("en", "de"))
    assert len(tables.read_splits(wheres, ("English", "German"))["test"]) == 30
    assert len(tables.read_splits(wheres, ("0", "1"))["train"]) == 31  # by number nothing is guessed
    for path in (train, dev):  # a first row that comes again is text
        Path(path).write_text(Path(path).read_text() + "English\tGerman\n")
    assert len(tables.read_splits(wheres, ("en", "de"))["dev"]) == 32


def test_data_sets_on_disk(tmp_path):
    path = write(tmp_path, "train.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n')
    wanted = [("a", "1"), ("b", "0")]
    assert tables.read_rows(f"hub:{Path(path).parent}@train", ("text", "label")) == wanted
    datasets.Dataset.from_list([{"text": "a", "label": 1}, {"text": "b", "label": 0}]).to_parquet(
        tmp_path / "p.parquet"
    )
    assert tables.read_rows(str(tmp_path / "p.parquet"), ("text", "label")) == wanted


def test_parallel_files(tmp_path):
    write(tmp_path, "p.de", "ja\nnein\n")
    write(tmp_path, "p.en", "yes\nno\n")
    where = str(tmp_path / "p.{lang}")
    assert tables.read_pairs(where, "de", "en") == [("ja", "yes"), ("nein", "no")]
    write(tmp_path, "p.en", "yes\n\nno\n")
    with pytest.raises(ValueError, match=r"p\.en:2: the line is empty"):
        tables.read_pairs(where, "de", "en")
    write(tmp_path, "p.en", "yes\n")
    with pytest.raises(ValueError, match=r"p\.de has 2 lines and .*p\.en 1; they must be parallel"):
        tables.read_pairs(where, "de", "en")


def test_where_files_are_looked_for(tmp_path, monkeypatch):
    path = write(tmp_path, "a.tsv", "a\tb\n")
    monkeypatch.setenv("HF_ENTMAX_DATA", str(tmp_path))
    assert tables.find("a.tsv") == Path(path)
    with pytest.raises(FileNotFoundError, match=r"there is no b\.tsv or .*b\.tsv\..*HF_ENTMAX_DATA"):
        tables.find("b.tsv")
    with pytest.raises(ValueError, match=r"hub:OWNER/NAME\[#CONFIG\]@SPLIT"):
        tables.read_rows("hub:somebody/something", ("text",))
