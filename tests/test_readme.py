"""Every code block of the README runs, in order, each file in one namespace and one directory."""

import dataclasses
import importlib
import re
import shlex
import sys
from pathlib import Path

import fresh
import pytest
import tiny_models as tiny
import torch
import transformers as tf

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = [
    line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.strip()
]
assert PYTHON and SHELL


def _word_tokenizer(directory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        *["translate", "English", "to", "German", ":", "How", "old", "are", "you", "?"],
    ]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(directory)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A directory in which the Hub id of the README is a tiny model of the same class."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "google-t5" / "t5-small"
    tiny.build("t5").save_pretrained(folder)
    _word_tokenizer(folder)
    return tmp_path


def test_python_blocks(workplace):
    ids = torch.randint(3, tiny.VOCAB, (8, 6))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = tf.TrainingArguments(
        output_dir="out", max_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    namespace = {"train_dataset": rows, "args": arguments}
    for number, block in enumerate(PYTHON):
        code = compile(block, f"README.md, Python block {number + 1}", "exec")
        exec(code, namespace)


@pytest.mark.parametrize("line", SHELL)
def test_shell_lines(line, tmp_path):
    """Make targets exist, what is installed is an extra of this project, and every command accepts its arguments."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[:2] == ["pip", "install"]:
        extras = re.search(r"\[(.*)\]", words[2])
        known = re.findall(
            r"^(\w+) = \[",
            (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1],
            re.MULTILINE,
        )
        assert extras and set(extras[1].split(",")) <= set(known)
    elif words[0] == "hf-entmax" and words[1] == "doctor":
        run = fresh.run_module("hf_entmax.cli", "doctor", folder=tmp_path)
        assert run.returncode == 0 and "works" in run.stdout, run.stdout + run.stderr
    elif words[0] == "hf-entmax":
        run = fresh.run_module("hf_entmax.cli", words[1], "--help")
        assert run.returncode == 0, run.stderr
        options = [w.split("=")[0] for w in words[2:] if w.startswith("--")]
        plain = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout)
        assert all(option in plain for option in options), (options, plain)
    else:
        assert words[0] in ("python", "accelerate"), f"nothing checks {line!r}"
        scripts = [w for w in words if w.endswith(".py")]
        assert scripts and all((ROOT / script).exists() for script in scripts)
        if "--config" in words:
            sys.path.insert(0, str(ROOT / "recipes"))
            settings = importlib.import_module(Path(scripts[0]).stem).Settings
            known = {f"--{field.name}" for field in dataclasses.fields(settings)} | {"--config"}
            assert {w.split("=")[0] for w in words if w.startswith("--")} <= known
        configs = [w for w in words if w.endswith(".yaml")]
        assert all((ROOT / config).exists() for config in configs)


def test_files_and_figures_that_the_readme_names_exist():
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert path.startswith("http") or (ROOT / path).exists(), path
