"""Every code block of the README and of the documentation runs, in the order of the site, in one namespace and one directory."""

import csv
import dataclasses
import importlib
import itertools
import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import soundfile
import tiny_models as tiny
import tiny_speech
import torch
import transformers as tf

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
#: In the order in which they are read: what one page makes the next may use.
GUIDES = (
    "patch",
    "sparsify",
    "sparse_outputs",
    "long_texts",
    "heads",
    "circuits",
    "longer_inputs",
    "speech",
    "devices",
)
PAGES = [
    ROOT / "README.md",
    DOCS / "index.md",
    *(DOCS / "guides" / f"{name}.md" for name in GUIDES),
    *(
        DOCS / f"{name}.md"
        for name in ("recipes", "speed", "how_it_works", "kernels", "questions", "quickstart", "compatibility")
    ),
]


def blocks(language):
    """Page, number and text of every block of code."""
    for page in PAGES:
        found = re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        yield from ((page.relative_to(ROOT), number + 1, block) for number, block in enumerate(found))


PYTHON = list(blocks("python"))
SHELL = list(dict.fromkeys(line for _, _, block in blocks("bash") for line in block.splitlines() if line.strip()))
assert PYTHON and SHELL


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """A directory in which the Hub id of the README is a tiny model of the same class."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "google-t5" / "t5-small"
    tiny.build("t5").save_pretrained(folder)
    words = ["translate", "English", "to", "German", ":", "How", "old", "are", "you", "?"]
    tiny.tokenizer(["<pad>", "<s>", "</s>", "<unk>", *words]).save_pretrained(folder)
    for part in (tiny_speech.tiny_whisper(), tiny_speech.tiny_processor()):
        part.save_pretrained(tmp_path / "openai" / "whisper-tiny.en")
    samples = torch.randn(tiny_speech.RATE, generator=torch.Generator().manual_seed(0))
    soundfile.write(tmp_path / "speech.wav", 0.1 * samples.numpy(), tiny_speech.RATE)
    return tmp_path


def test_python_blocks(offline_hub, nothing_stays_registered):
    ids = torch.randint(3, tiny.VOCAB, (8, 6))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = tf.TrainingArguments(
        output_dir="out", max_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    batches = [tiny.inputs("t5", labels=True, seed=seed) for seed in range(6)]
    namespace = {"train_dataset": rows, "args": arguments, "batches": batches}
    for page, number, block in PYTHON:
        exec(compile(block, f"{page}, Python block {number}", "exec"), namespace)


@pytest.mark.slow
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
    elif line == "hf-entmax doctor":
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
        if words[1] == "-m":
            place = ROOT.joinpath(*words[2].split("."))
            scripts = [str(place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__main__.py")]
        assert scripts and all((ROOT / script).exists() for script in scripts)
        if "--config" in words:
            sys.path.insert(0, str(ROOT / "recipes"))
            settings = importlib.import_module(Path(scripts[0]).stem).Settings
            known = {f"--{field.name}" for field in dataclasses.fields(settings)} | {"--config"}
            assert {w.split("=")[0] for w in words if w.startswith("--")} <= known
        configs = [w for w in words if w.endswith(".yaml")]
        assert all((ROOT / config).exists() for config in configs)


def test_folders_that_a_line_reads_are_made_by_one_above():
    made = ["quickstart-output"]
    for line in SHELL:
        words = shlex.split(line, comments=True)
        out = words[words.index("--out") + 1] if "--out" in words else words[-1]
        read = [word for word in words if word.startswith(("runs/", "models/")) and word != out]
        assert all(any(f"{word}/".startswith(f"{folder}/") for folder in made) for word in read), line
        made.append(out)


def test_figures_of_the_quickstart_are_those_of_its_committed_results():
    found = json.loads((ROOT / "recipes" / "lab" / "results" / "quickstart.json").read_text(encoding="utf-8"))
    part = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    text = " ".join(part.split())
    before, after = (found["accuracy"][name] for name in ("before", "after"))
    for group in ("regular", "irregular", "mixed", "present"):
        shares = " | ".join(f"{100 * column[group]['share']:.1f} %" for column in (before, after))
        assert f"| {before[group]['total']:,} | {shares} |" in text
    sites = ("encoder_self", "cross", "decoder_self")

    def mean(layers):
        return statistics.fmean(torch.tensor(layers).flatten().tolist())

    kept = [f"{100 * mean(found['density'][site]):.0f} %" for site in sites]
    assert "{} in encoder self-attention, {} in cross-attention, {} in decoder self-attention".format(*kept) in text
    diverse = [[mean(found["head_diversity_nats"][when][site]) for when in ("before", "after")] for site in sites]
    assert "{:.2f} to {:.2f}, {:.2f} to {:.2f} and {:.2f} to {:.2f} nats".format(*itertools.chain(*diverse)) in text
    alphas = [alpha for site in sites for layer in found["alpha"][site] for alpha in layer]
    assert f"alphas between {min(alphas):.2f} and {max(alphas):.2f}" in text
    assert f"{found['verbs']['train']:,} English verbs" in text and f"{found['verbs']['held_out']} verbs whose" in text
    assert all(f"{steps:,}" in text for steps in found["steps_done"].values())
    shares = {name: f"{100 * found['output'][name]:.0f} %" for name in ("optimal", "exhaustive", "single")}
    assert f"({found['output']['total']} of the questions" in text and f"{shares['optimal']} of the answers" in text
    assert f"known for {shares['exhaustive']}, and for {shares['single']} there is only one" in text
    tree = [float(share) for share in re.findall(r"p = ([\d.]+) %", part)]
    assert tree == [round(100 * p, 1) for p in found["output"]["hypotheses_of"]["<past> dream"].values()]


def test_what_is_slower_than_sdpa_is_said_with_the_figures_of_the_table():
    with (ROOT / "recipes" / "lab" / "results" / "bench" / "targets-cpu.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        rows = [row for row in csv.DictReader(file) if row["implementation"] == "sdpa"]
    slower = [float(row["ratio"]) for row in rows if row["mode"] == "forward" and float(row["ratio"]) > 1]
    (memory,) = [float(row["ratio"]) for row in rows if row["mode"] == "memory"]
    text = " ".join(README.split())
    assert f"({min(slower):.1f} to {max(slower):.1f} times its time at" in text
    assert f"is {memory:.1f} times SDPA's at L 4096" in text


def test_the_readme_is_a_page():
    lines = README.splitlines()
    assert len(lines) <= 200 and max(map(len, lines)) <= 200


def test_files_and_figures_that_the_readme_names_exist():
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert path.startswith("http") or (ROOT / path).exists(), path


@pytest.mark.slow
def test_the_site_builds_without_a_dead_link(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index.html", "api/index.html", "results/index.html", "guides/sparsify/index.html"):
        assert (tmp_path / "site" / page).stat().st_size > 5000
    requests = re.findall(
        r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', (tmp_path / "site/index.html").read_text()
    )
    assert not requests, "a page must not need the network"
