"""What all training recipes share: settings, data, results, batches."""

import csv
import dataclasses
import gzip
import importlib
import json
import math
import multiprocessing
import sys
from pathlib import Path

import datasets
import pytest

from common.batches import evenly
from common.results import name_of, strict_json
from common.row_file import Results, command
from common.settings import RunSettings, option, parse
from hf_entmax.analysis.reading import tables as data

RECIPES = Path(__file__).parents[2] / "recipes"


@dataclasses.dataclass
class Settings(RunSettings):
    width: int = option(8, "a setting of the recipe's own")
    names: list[str] = option([], "a list")  # noqa: RUF009


class TestSettings:
    @pytest.fixture
    def config(self, tmp_path):
        def write(text, name="c.yaml"):
            (tmp_path / name).write_text(text, encoding="utf-8")
            return str(tmp_path / name)

        return write

    def refused(self, capsys, *arguments):
        with pytest.raises(SystemExit) as stopped:
            parse(Settings, "What it does.\n\nMore.", list(arguments))
        assert stopped.value.code == 2
        return capsys.readouterr().err

    def test_the_command_line_comes_last(self, config):
        first = config("lr: 1e-2\nepochs: 3\nnames: [a, b]\nsmoke: true\nalpha_lr: null\n")
        second = config("epochs: 4\nwidth: 2\n", "d.yaml")
        read = parse(Settings, "", ["--config", first, "--config", second, "--width", "5", "--seed", "9"])
        assert (read.lr, read.epochs, read.names, read.smoke) == (0.01, 4, ["a", "b"], True)
        assert (read.width, read.seed, read.alpha_lr) == (5, 9, None)
        # Wherever --config stands, what is typed wins; a list is replaced, not added to.
        read = parse(Settings, "", ["--epochs", "7", "--names", "c", "--smoke", "False", "--config", first])
        assert (read.epochs, read.names, read.smoke) == (7, ["c"], False)

    def test_a_mapping_in_yaml_is_what_one_types(self, config):
        path = config("attention: sparsegen_lin\nmapping_options: {lam: -0.5}\n")
        read = parse(Settings, "", ["--config", path])
        typed = parse(Settings, "", ["--attention", "sparsegen_lin", "--mapping_options", "{lam: -0.5}"])
        assert read.entmax() == typed.entmax()
        assert read.entmax().mapping_options == {"lam": -0.5}

    def test_keys_that_do_not_exist(self, config, capsys):
        path = config("epochs: 3\nwarmpu: 10\n")
        message = self.refused(capsys, "--config", path)
        assert "there is no option --warmpu. Did you mean --warmup?" in message
        assert "there is no option --epoch. Did you mean --epochs?" in self.refused(capsys, "--epoch", "3")
        assert "there is no option --zzz. There are: --help, --config, --out" in self.refused(capsys, "--zzz=3")
        assert "left_over" in self.refused(capsys, "--epochs", "3", "left_over")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("epochs: many\n", "--epochs: invalid int value: 'many'"),
            ("epochs: 2.5\n", "--epochs: invalid int value: '2.5'"),
            ("epochs: [1, 2]\n", "'2'"),
            ("lr: fast\n", "--lr: invalid float value: 'fast'"),
            ("smoke: perhaps\n", "Truthy value expected: got perhaps"),
            ("epochs: 0\n", "epochs=0 is not allowed: it must be at least 1"),
            ("lr: -1\n", "lr=-1.0 is not allowed: it must be at least 0"),
            ("lr: .nan\n", "lr=nan is not allowed"),
            ("warmup: 0\n", "warmup=0 is not allowed: it must be at least 1 step"),
            ("mixed_precision: half\n", "mixed_precision='half' is not allowed: it must be one of no, bf16, fp16"),
            ("attention: 0.5\n", "alpha=0.5"),
            (
                "attention: learnt\n",
                "attention='learnt' is not allowed: it must be softmax, learned, a number from 1 on, or one of",
            ),
            ("attention: sparsegen_lin\nmapping_options: {lamb: 1}\n", "lamb"),
            ("output_alpha: 0.9\n", "output_alpha=0.9"),
            ("attention: learned\nalpha_init: 3\n", "alpha_init=3.0 is not allowed"),
            ("attention: learned\nalpha_init: big\n", "alpha_init='big' is not allowed: it must be normal or a number"),
            ("alpha_init: 1.5\n", "alpha_init=1.5 would have no effect: attention=softmax learns no alpha"),
            ("mapping_options: {lam: 0.5}\n", "mapping_options"),
            ("attention: sparsegen_lin\nmapping_options: '{lam'\n", "is not YAML"),
            ("attention: sparsegen_lin\nmapping_options: 0.5\n", "it must be a YAML mapping such as '{lam: 0.5}'"),
            ("- epochs\n", "must hold settings, `name: value` line by line, not a list"),
            ("epochs: [1\n", "is no YAML file"),
            ("seed: -1\n", "seed=-1 is not allowed: it must be at least 0 and below 42949"),
        ],
    )
    def test_values_that_are_not_allowed(self, config, capsys, text, message):
        assert message in self.refused(capsys, "--config", config(text))

    def test_files_that_are_not_there_or_not_text(self, tmp_path, capsys):
        assert "nowhere.yaml" in self.refused(capsys, "--config", str(tmp_path / "nowhere.yaml"))
        (tmp_path / "bad.yaml").write_bytes(b"out: \xff\n")
        assert "bad.yaml is no YAML file" in self.refused(capsys, "--config", str(tmp_path / "bad.yaml"))

    def test_softmax_is_left_alone(self):
        assert Settings().entmax() is None
        assert Settings(output_alpha=1.5).entmax().alpha == 1.0
        assert Settings(attention="1.5").entmax().alpha == 1.5
        assert Settings(attention="learned", alpha_init="1.2").entmax().alpha_init == 1.2

    def test_every_configuration_is_valid(self):
        for path in sorted((RECIPES / "configs").glob("*.yaml")):
            if path.stem.startswith(("multilabel", "evidence")):
                continue  # these have tests of their own
            name = next(recipe.stem for recipe in RECIPES.glob("*.py") if path.stem.startswith(recipe.stem))
            recipe = importlib.import_module(name)
            model = ["--model", "x"] if name == "convert" else []  # whose configurations leave this open
            parse(recipe.Settings, recipe.__doc__, ["--config", str(path), "--out", "x", *model])


class TestData:
    def write(self, tmp_path, name, raw):
        path = tmp_path / name
        raw = raw if isinstance(raw, bytes) else raw.encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return str(path)

    def test_tables_with_and_without_a_header(self, tmp_path):
        wanted = [("a b", "1"), ('"c', "2")]
        assert data.read_rows(self.write(tmp_path, "a.tsv", 'a b\t1\n"c\t2\n'), ("text", "label")) == wanted
        header = 'label\tother\ttext\n1\tx\t a b \n2\ty\t"c\n'
        assert data.read_rows(self.write(tmp_path, "b.tsv.gz", header), ("text", "label")) == wanted
        assert data.read_rows(self.write(tmp_path, "c.csv", 'text,label\n"a, b",1\r\n'), ("text", "label")) == [
            ("a, b", "1")
        ]
        # Numbers name columns of a table without a header; a mark at the beginning of the file is none of its text.
        assert data.read_rows(self.write(tmp_path, "d.tsv", b"\xef\xbb\xbfx\ty\tz\n"), ("2", "0")) == [("z", "x")]

    def test_columns_are_taken_in_order_only_where_there_are_as_many(self, tmp_path, capsys):
        path = self.write(tmp_path, "a.tsv", "7\tgood\tpos\n")
        with pytest.raises(ValueError, match=r"a\.tsv:1: 3 column\(s\) .*expected text, label.*give their numbers"):
            data.read_rows(path, ("text", "label"))
        with pytest.raises(ValueError, match=r"there is no column 3"):
            data.read_rows(path, ("1", "3"))
        assert data.read_rows(path, ("1", "2")) == [("good", "pos")]
        assert capsys.readouterr().err == ""
        assert data.read_rows(path, ("number", "text", "label")) == [("7", "good", "pos")]
        assert "no header; the columns in order are number '7', text 'good', label 'pos'" in capsys.readouterr().err

    def test_quoted_fields_may_go_over_several_lines(self, tmp_path):
        text = 'label,text\n1,"good film"\n0,"bad film\nslow, long"\n1,ok\n'
        rows = [("good film", "1"), ("bad film\nslow, long", "0"), ("ok", "1")]
        assert data.read_rows(self.write(tmp_path, "a.csv", text), ("text", "label")) == rows
        for tail, message in (
            ('1,"open\n', r"a\.csv:6: not valid CSV"),
            ("1\n", r"a\.csv:6: 1 column\(s\), the first line has 2"),
            ("\n", r"a\.csv:6: the line is empty"),
            ('0,"x"y\n', r"a\.csv:6: not valid CSV"),
        ):
            with pytest.raises(ValueError, match=message):
                data.read_rows(self.write(tmp_path, "a.csv", text + tail), ("text", "label"))

    def test_long_fields_and_stray_returns_of_a_tsv_file_are_text(self, tmp_path):
        long = "x" * 200_000
        assert data.read_rows(self.write(tmp_path, "a.tsv", f"{long}\ta\rb\n"), ("x", "y")) == [(long, "a\rb")]

    def test_running_text_keeps_its_blank_lines(self, tmp_path):
        lines = self.write(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": ""}\n{"text": null}\n{"text": "b"}\n')
        assert data.read_text(lines) == ["a", "", "", "b"]
        assert data.read_text(self.write(tmp_path, "a.tsv", "text\na\n\nb\n")) == ["a", "", "b"]
        with pytest.raises(ValueError, match="nothing in it"):
            data.read_text(self.write(tmp_path, "b.jsonl", '{"text": ""}\n'))

    def test_names_of_data(self):
        names = {
            "hub:bentrevett/multi30k@train": "bentrevett/multi30k",
            "hub:nyu-mll/glue#sst2@train": "nyu-mll/glue",
            "mt/multi30k_task1_raw/train.{lang}.gz": "multi30k_task1_raw",
            "morph/typology12/{language}/{split}.tsv.gz": "typology12",
            "train.tsv.gz": "train",
            "/data/wiki/all.tsv": "wiki",
        }
        assert {where: name_of(where) for where in names} == names

    def test_evenly(self):
        assert evenly(range(10), 4) == [0, 2, 5, 7]
        assert evenly("abc", 5) == ["a", "b", "c"] and evenly([], 3) == []
        # 58 sorted groups of 1,000: none may be missing.
        assert {place // 1000 for place in evenly(range(58_000), 10_000)} == set(range(58))

    def test_json_lines(self, tmp_path):
        path = self.write(tmp_path, "a.jsonl", '{"source": ["One.", " Two."], "target": ["x", "y"], "n": 3}\n')
        assert data.read_rows(path, ("source", "n")) == [("One. Two.", "3")]
        assert data.read_lists(path, ("source", "target")) == [(["One.", "Two."], ["x", "y"])]
        pairs = self.write(tmp_path, "b.jsonl", '{"translation": {"de": "ja", "en": "yes"}}\n')
        assert data.read_pairs(pairs, "de", "en") == [("ja", "yes")]

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
    def test_bad_files_are_named_with_their_line(self, tmp_path, name, raw, message):
        with pytest.raises(ValueError, match=message):
            data.read_rows(self.write(tmp_path, name, raw), ("text", "label"))

    def test_one_rule_about_headers(self, tmp_path):
        # Names in another case are names; usual names that are not those asked for are a header too, not a first row.
        assert data.read_rows(self.write(tmp_path, "a.tsv", "Text\tLABEL\na\t1\n"), ("text", "label")) == [("a", "1")]
        usual = self.write(tmp_path, "b.tsv", "sentence\tsource\ncat\tword\n")
        with pytest.raises(ValueError, match=r"b\.tsv:1: no column text, label; it has sentence, source"):
            data.read_rows(usual, ("text", "label"))
        assert data.read_rows(usual, ("0", "1")) == [("cat", "word")]
        # One usual name may be a word of the text.
        assert data.read_rows(self.write(tmp_path, "c.tsv", "word\tWort\n"), ("en", "de")) == [("word", "Wort")]

    def test_a_header_of_other_names_is_seen_in_several_files(self, tmp_path):
        body = [f"word {i}\tWort {i}\n" for i in range(30)]
        train = self.write(tmp_path, "train.tsv", "English\tGerman\n" + "".join(body))
        dev = self.write(tmp_path, "dev.tsv", "English\tGerman\n" + "".join(reversed(body)))
        wheres = {"train": train, "dev": dev, "test": dev}
        with pytest.raises(ValueError, match=r"both begin with English / German.*Name its columns instead of en, de"):
            data.read_splits(wheres, ("en", "de"))
        assert len(data.read_splits(wheres, ("English", "German"))["test"]) == 30
        assert len(data.read_splits(wheres, ("0", "1"))["train"]) == 31  # by number nothing is guessed
        for path in (train, dev):  # a first row that comes again is text
            Path(path).write_text(Path(path).read_text() + "English\tGerman\n")
        assert len(data.read_splits(wheres, ("en", "de"))["dev"]) == 32

    def test_data_sets_on_disk(self, tmp_path):
        path = self.write(tmp_path, "train.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n')
        wanted = [("a", "1"), ("b", "0")]
        assert data.read_rows(f"hub:{Path(path).parent}@train", ("text", "label")) == wanted
        datasets.Dataset.from_list([{"text": "a", "label": 1}, {"text": "b", "label": 0}]).to_parquet(
            tmp_path / "p.parquet"
        )
        assert data.read_rows(str(tmp_path / "p.parquet"), ("text", "label")) == wanted

    def test_parallel_files(self, tmp_path):
        self.write(tmp_path, "p.de", "ja\nnein\n")
        self.write(tmp_path, "p.en", "yes\nno\n")
        where = str(tmp_path / "p.{lang}")
        assert data.read_pairs(where, "de", "en") == [("ja", "yes"), ("nein", "no")]
        self.write(tmp_path, "p.en", "yes\n\nno\n")
        with pytest.raises(ValueError, match=r"p\.en:2: the line is empty"):
            data.read_pairs(where, "de", "en")
        self.write(tmp_path, "p.en", "yes\n")
        with pytest.raises(ValueError, match=r"p\.de has 2 lines and .*p\.en 1; they must be parallel"):
            data.read_pairs(where, "de", "en")

    def test_where_files_are_looked_for(self, tmp_path, monkeypatch):
        path = self.write(tmp_path, "a.tsv", "a\tb\n")
        monkeypatch.setenv("HF_ENTMAX_DATA", str(tmp_path))
        assert data.find("a.tsv") == Path(path)
        with pytest.raises(FileNotFoundError, match=r"there is no b\.tsv or .*b\.tsv\..*HF_ENTMAX_DATA"):
            data.find("b.tsv")
        with pytest.raises(ValueError, match=r"hub:OWNER/NAME\[#CONFIG\]@SPLIT"):
            data.read_rows("hub:somebody/something", ("text",))


class TestResults:
    def test_json_of_a_result_is_strict(self):
        text = strict_json({"perplexity": math.inf, "score": -math.inf, "norm": math.nan, "bleu": 1.5, "name": "x"})
        found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert found["bleu"] == 1.5 and found["perplexity"] is found["score"] is found["norm"] is None
        assert found["not_finite"] == {"perplexity": "inf", "score": "-inf", "norm": "nan"}
        assert "not_finite" not in json.loads(strict_json({"bleu": 1.5}))

    def test_rows_are_on_disk_at_once_and_found_again(self, tmp_path):
        path = tmp_path / "new" / "r.csv"
        book = Results(path, ("a", "b"))
        book.add(a=1)
        book.add(a=2, b='x, "y"')
        assert path.read_bytes() == b'a,b\n1,\n2,"x, ""y"""\n'
        again = Results(path, ("a", "b"))
        assert again.has(a=2) and not again.has(a=1, b=2)

    def test_runs_that_finish_together_write_one_header(self, tmp_path):
        path = tmp_path / "r.csv"
        several = multiprocessing.get_context("fork")  # they only write: nothing has to be imported anew
        start = several.Barrier(3)

        def run(name):
            book = Results(path, ("a",))
            start.wait(60)
            for _ in range(50):
                book.add(a=name)

        started = [several.Process(target=run, args=(name,)) for name in "xyz"]
        for process in started:
            process.start()
        for process in started:
            process.join(60)
        assert [process.exitcode for process in started] == [0, 0, 0]
        assert sorted(path.read_text().split()) == sorted(["a", *"xyz" * 50])

    def test_files_that_cannot_be_written_are_an_error(self, tmp_path):
        (tmp_path / "file").write_text("x")
        for path in (tmp_path / "file" / "r.csv", tmp_path):
            with pytest.raises(ValueError, match="cannot be written, because of"):
                Results(path, ("a",))
        (tmp_path / "empty.csv").touch()
        Results(tmp_path / "empty.csv", ("a",)).add(a=1)
        assert (tmp_path / "empty.csv").read_text() == "a\n1\n"

    def test_other_columns_are_an_error(self, tmp_path):
        path = tmp_path / "r.csv"
        path.write_text("a,c\n")
        with pytest.raises(ValueError, match=r"r\.csv has the columns \['a', 'c'\], not \['a', 'b'\]"):
            Results(path, ("a", "b"))
        with pytest.raises(ValueError, match=r"no columns for \['d'\]"):
            Results(tmp_path / "s.csv", ("a",)).add(d=1)
        assert not (tmp_path / "s.csv").exists()

    def test_the_command_leaves_places_out(self, monkeypatch):
        def called(*words):
            monkeypatch.setattr(sys, "argv", ["/somewhere/recipes/x.py", *words])
            return command(("--out", "--resume", "--report_to"), ("--report_to",))

        plain = "python recipes/x.py --lr 1 --names a b"
        assert called("--lr", "1", "--names", "a", "b") == plain
        assert called("--out", "/o", "--lr", "1", "--resume", "--names", "a", "b") == plain
        assert called("--resume", "True", "--lr", "1", "--names", "a", "b", "--out=/o") == plain
        assert called("--report_to", "p", "q", "--lr", "1", "--names", "a", "b", "--resume") == plain

    def test_no_committed_file_mixes_line_ends_or_columns(self):
        paths = sorted((RECIPES / "lab" / "results").rglob("*.csv"))
        assert len(paths) >= 3
        for path in paths:
            with path.open(newline="", encoding="utf-8") as lines:
                widths = {len(row) for row in csv.reader(lines)}
            assert b"\r" not in path.read_bytes() and len(widths) == 1, path
