"""Data sets of the Hub in place of files."""

from pathlib import Path

import pytest

import language_modeling
import translation
from common.settings import parse
from hf_entmax.analysis.reading import tables

ROOT = Path(__file__).parents[2]


class TestHub:
    """A second configuration reads the same from the Hub; here from a folder in its place."""

    @pytest.fixture
    def local(self, tmp_path, monkeypatch):
        def place(name, columns, splits):
            import datasets

            folder = tmp_path / "sets" / name.replace("/", "_")
            for split, rows in splits.items():
                (folder / "data").mkdir(parents=True, exist_ok=True)
                named = datasets.Dataset.from_list([dict(zip(columns, row, strict=True)) for row in rows])
                named.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
            load = datasets.load_dataset

            def instead(path, config=None, *more, **options):
                return load(str(folder), *more, **options) if path == name else load(path, config, *more, **options)

            monkeypatch.setattr(datasets, "load_dataset", instead)

        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        return place

    def settings(self, recipe, usual, hub, tmp_path):
        files = [str(ROOT / "recipes" / "configs" / f"{name}.yaml") for name in (usual, f"hub/{hub}")]
        return parse(recipe.Settings, "", ["--config", files[0], "--config", files[1], "--out", str(tmp_path / "run")])

    def test_translation(self, local, tmp_path):
        splits = {
            name: [(f"{name} {n}", f"{name} Satz {n}") for n in range(3)] for name in ("train", "validation", "test")
        }
        local("bentrevett/multi30k", ("en", "de"), splits)
        settings = self.settings(translation, "translation_multi30k", "multi30k", tmp_path)
        assert (settings.source, settings.target) == ("de", "en")
        for where, split in ((settings.train, "train"), (settings.dev, "validation"), (settings.test[0], "test")):
            assert tables.read_pairs(where, "de", "en") == [(de, en) for en, de in splits[split]]

    def test_text(self, local, tmp_path):
        lines = ["", " = Title = \n", "", " Some words .\n"]
        local(
            "Salesforce/wikitext",
            ("text",),
            {name: [(line,) for line in lines] for name in ("train", "validation", "test")},
        )
        settings = self.settings(language_modeling, "language_modeling_wikitext2", "wikitext2", tmp_path)
        for split in ("train", settings.dev_split, "test"):
            found = tables.read_text(settings.data.replace("{split}", split), settings.column)
            assert found == [line.rstrip("\n") for line in lines]
