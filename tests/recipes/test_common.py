"""What all training recipes share: settings, data, results, batches."""

import csv
import dataclasses
import importlib
import json
import math
import multiprocessing
import sys
from pathlib import Path

import pytest

from common.batches import evenly
from common.results import name_of, strict_json
from common.row_file import Results, command
from common.settings import RunSettings, option, parse

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


def test_names_of_data():
    names = {
        "hub:bentrevett/multi30k@train": "bentrevett/multi30k",
        "hub:nyu-mll/glue#sst2@train": "nyu-mll/glue",
        "mt/multi30k_task1_raw/train.{lang}.gz": "multi30k_task1_raw",
        "morph/typology12/{language}/{split}.tsv.gz": "typology12",
        "train.tsv.gz": "train",
        "/data/wiki/all.tsv": "wiki",
    }
    assert {where: name_of(where) for where in names} == names


def test_evenly():
    assert evenly(range(10), 4) == [0, 2, 5, 7]
    assert evenly("abc", 5) == ["a", "b", "c"] and evenly([], 3) == []
    # 58 sorted groups of 1,000: none may be missing.
    assert {place // 1000 for place in evenly(range(58_000), 10_000)} == set(range(58))


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
