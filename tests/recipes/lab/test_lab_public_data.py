"""Files of cloned public repositories, laid out as the recipes read them."""

import gzip
import os
import re
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

from hf_entmax.analysis.reading.alignments import read_alignments
from recipes.lab import public_data
from recipes.lab.public_data import SETS, lay_out

ROOT = Path(__file__).parents[3]
README = (ROOT / "recipes" / "data" / "README.md").read_text(encoding="utf-8")
DATA = Path(os.environ.get("HF_ENTMAX_DATA", "/nonexistent"))


def text_of(path):
    return gzip.decompress(path.read_bytes()).decode("utf-8")


def tatoeba(folder, lines):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "deu-eng.zip", "w") as archive:
        archive.writestr("deu.txt", "".join(f"{line}\n" for line in lines))
    return folder


def test_no_sentence_of_tatoeba_is_in_two_splits(tmp_path):
    pairs = [(f"Sentence {n}.", f"Satz {n}.") for n in range(600)]
    pairs += [(f"SENTENCE {n}.", f"Noch {n}.") for n in range(0, 600, 3)]  # the same English but for its case
    pairs += [(f"Other {n}.", f"satz {n}.") for n in range(0, 600, 7)]  # the same German
    repository = tatoeba(tmp_path / "zip", [f"{a}\t{b}\tCC-BY 2.0 (France)" for a, b in [*pairs, *pairs[:50]]])
    lay_out("tatoeba", repository, tmp_path / "out")
    splits = {}
    for split in ("train", "dev", "test"):
        found = text_of(tmp_path / "out" / "mt" / "tatoeba_de-en" / f"{split}.en-de.tsv.gz").splitlines()
        assert len(set(found)) == len(found) and {tuple(line.split("\t")) for line in found} <= set(pairs)
        splits[split] = {side.lower() for line in found for side in line.split("\t")}
    assert len(splits["train"]) > 1400 and splits["dev"] and splits["test"]
    assert not (splits["train"] & splits["dev"] or splits["train"] & splits["test"] or splits["dev"] & splits["test"])


def test_the_fingerprint_is_that_of_names_and_contents(tmp_path):
    def treebank(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "xx_yy-ud-test.conllu").write_text(text)
        (tmp_path / name / "README.md").write_text("not part of it")
        return lay_out("treebank", tmp_path / name, tmp_path / "out")

    first = treebank("UD_English-A", "# a\n")
    written = tmp_path / "out" / "ud" / "English-A" / "xx_yy-ud-test.conllu.gz"
    assert text_of(written) == "# a\n"
    assert written.read_bytes()[4:8] == bytes(4), "the archive holds the time at which it was written"
    assert len({first, treebank("UD_English-B", "# a\n"), treebank("UD_English-C", "# b\n")}) == 3
    assert lay_out("treebank", tmp_path / "UD_English-A", tmp_path / "again") == first
    zipped = tmp_path / "UD_English-A" / "xx_yy-ud-test.conllu"
    zipped.with_name(f"{zipped.name}.gz").write_bytes(gzip.compress(zipped.read_bytes()))
    zipped.unlink()
    assert lay_out("treebank", tmp_path / "UD_English-A", tmp_path / "out") == first


def test_alignments_keep_the_links_between_words_that_there_are(tmp_path):
    with zipfile.ZipFile(tmp_path / "German-English_WordAlignment.zip", "w") as archive:
        for name, text in (
            ("test.de", "\ufeffein haus .\nja\n"), ("test.en", "a house .\nyes\n"), ("de-en.wa", "2-2 0-0 1-1\n0-0 1-0\n"),
        ):  # fmt: skip
            archive.writestr(f"German-English_WordAlignment/{name}", text)
    lay_out("alignments", tmp_path, tmp_path / "out")
    pairs = read_alignments(tmp_path / "out" / "alignments" / "de-en.jsonl.gz")
    assert [(pair.source[-1], pair.target[-1], pair.sure) for pair in pairs] == [
        (".", ".", ((0, 0), (1, 1), (2, 2))),
        ("ja", "yes", ((0, 0),)),
    ]
    assert pairs[0].source[0] == "ein"


def test_another_folder_is_refused_and_nothing_written(tmp_path, monkeypatch, capsys):
    for name in SETS:
        monkeypatch.setattr(sys, "argv", ["", name, str(tmp_path), "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit, match="1"):
            public_data.main()
        assert str(tmp_path) in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_table_of_sets_says_where_each_comes_from():
    for name, source in SETS.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*$", README, re.MULTILINE)
        assert source.url in line and source.fingerprint in line


def test_published_commands_name_files_that_are_laid_out():
    page = (ROOT / "model_cards" / "RESULTS.md").read_text(encoding="utf-8")
    named = {
        path.removeprefix("data/")
        for path in re.findall(r"^    .*--(?:text|pairs|conllu) '?([^ ']+)", page, re.MULTILINE)
    }
    folders = {folder for source in SETS.values() for _, folder in source.files} | {
        "ud/English-PUD"
    }  # a whole treebank
    assert len(named) >= 4
    assert {path.rpartition("/")[0] for path in named} <= folders


#: Folders of the data, and where their files are in a clone.
PLACES = {
    "multi30k": ("mt/multi30k_task1_raw", "data/task1/raw"),
    "enja": ("mt/small_parallel_enja", "."),
    "scitldr": ("summ/scitldr-a", "SciTLDR-Data/SciTLDR-A"),
    "shakespeare": ("lm/tinyshakespeare", "data/tinyshakespeare"),
    "wikitext-2": ("lm/wikitext-2", "word_language_model/data/wikitext-2"),
    "treebank": ("ud/English-PUD", "."),
    "treebank-ewt": ("ud/English-EWT", "."),
    "treebank-german": ("ud/German-PUD", "."),
    "mulan": ("multilabel", "data/multi-label"),
}


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="HF_ENTMAX_DATA does not name a folder with the public data sets")
class TestRealData:
    """What is laid out of copies in the places of a clone is what the results were made from, byte by byte."""

    def check(self, name, clone, out):
        assert lay_out(name, clone, out) == SETS[name].fingerprint
        written = [path for path in out.rglob("*") if path.is_file()]
        for path in written:
            ours, theirs = (folder / path.relative_to(out) for folder in (out, DATA))
            assert ours.read_bytes() == theirs.read_bytes() or text_of(ours) == text_of(theirs), path
        return len(written)

    @pytest.mark.parametrize(("name", "files"), zip(PLACES, (15, 6, 3, 1, 3, 1, 2, 1, 9), strict=True))
    def test_files(self, name, files, tmp_path):
        folder, place = PLACES[name]
        clone = tmp_path / f"UD_{Path(folder).name}"
        for path in (path for path in (DATA / folder).rglob("*") if path.is_file()):
            copy = clone / place / path.relative_to(DATA / folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            raw = path.suffix == ".gz" and name != "multi30k"  # as it is in its repository
            (copy.with_suffix("") if raw else copy).write_bytes(
                gzip.decompress(path.read_bytes()) if raw else path.read_bytes()
            )
        assert self.check(name, clone, tmp_path / "out") == files

    def test_inflection(self, tmp_path):
        rows = defaultdict(list)
        for line in text_of(DATA / "morph" / "all_medium_94langs.tsv.gz").splitlines()[1:]:
            language, split, row = line.split("\t", 2)
            rows[f"{language}-{'train-medium' if split == 'train' else split}"].append(row)
        for line in text_of(DATA / "morph" / "all_high_train_78langs.tsv.gz").splitlines()[1:]:
            language, row = line.split("\t", 1)
            rows[f"{language}-train-high"].append(row)
        rows |= {f"basque-{split}": ["a\tb\tN"] for split in ("train-medium", "dev", "test")}  # of another licence
        rows["gothic-test"] = []
        folder = tmp_path / "task1" / "all"
        folder.mkdir(parents=True)
        for name, lines in rows.items():
            (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        assert self.check("inflection", tmp_path, tmp_path / "out") == 50
