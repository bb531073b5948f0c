"""Two CPU processes, sharing steps (DDP) or weights (FSDP2), compute what one process computes; Accelerate's files."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import recipe_runs as runs
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from test_conformance import DATA, SMALL

from common.folder import check_processes
from common.settings import parse

ROOT = Path(__file__).parents[2]

FILES = sorted((ROOT / "recipes" / "configs" / "accelerate").glob("*.yaml"))
BIN = Path(sys.executable).parent


#: Of tiny recipes that train in whole steps: words that two processes cannot share evenly, runs that are left and resumed.
OPTIONS = {
    "inflection": "--dev_words 3 --test_words 3",
    "summarization": "",
    "language_modeling": "--log_steps 1",
    "classification": "--gradient_accumulation 2 --checkpoint_steps 1 --log_steps 1",
    "translation": "--certificates 4 --checkpoint_steps 1 --log_steps 1",
}
#: After which step they are left.
LEFT = {"classification": 3, "translation": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Options of each recipe, without --out."""
    folder = tmp_path_factory.mktemp("data")
    same = f"{SMALL} --dropout 0 --attention learned --output_alpha 1.5".split()
    return {recipe: [*DATA[recipe](folder)[1], *same, *more.split()] for recipe, more in OPTIONS.items()}


def alone(recipe, arguments):
    AcceleratorState._reset_state(reset_partial_state=True)
    module = importlib.import_module(recipe)
    module.main(parse(module.Settings, module.__doc__, arguments))


def together(jobs, **environment):
    """Run jobs in two processes."""
    paths = os.pathsep.join([str(ROOT / "recipes"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
    ended = fresh.run_file(
        Path(__file__).parent / "processes.py", json.dumps(jobs), processes=2, environment=environment
    )
    assert ended.returncode == 0, ended.stderr[-5000:]


def log(folder):
    """Losses and measures, without how long they took, means of means of batches, and alphas, which FSDP2 does not log."""
    ends = ("_runtime", "_per_second", "eval_loss", "eval_support_size")
    return [
        {k: v for k, v in line.items() if not (k.endswith(ends) or k.startswith("alpha/"))}
        for line in runs.history(folder)[:-1]
    ]


def agree(one, two, tolerance=2e-3):
    """Two logs hold the same numbers, up to the order of sums."""
    assert [sorted(line) for line in one] == [sorted(line) for line in two]
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=tolerance, abs=1e-6)


def results(folder, names):
    found = runs.result(folder)
    return {name: found[name] for name in names}


@pytest.mark.slow
def test_two_processes_compute_what_one_does(data, tmp_path):
    jobs = []
    for recipe, options in data.items():
        job = {"recipe": recipe, "arguments": [*options, "--out", str(tmp_path / f"two-{recipe}")]}
        if recipe in LEFT:
            jobs += [{**job, "stop_at": LEFT[recipe]}, {**job, "arguments": [*job["arguments"], "--resume"]}]
        else:
            jobs.append(job)
    together(jobs)
    measured = {
        "inflection": ["accuracy", "optimal", "test_words", "steps", "best_step"],
        "classification": ["accuracy", "macro_f1", "test_texts", "steps", "best_step"],
        "translation": ["bleu", "chrf", "optimal", "certificates_of", "steps", "best_step"],
        "summarization": ["rouge1", "first_rouge1", "lead_rouge1", "test_texts", "steps"],
        "language_modeling": ["epsilon_perplexity", "word_epsilon_perplexity", "support_size", "density", "steps"],
    }
    for recipe, options in data.items():
        alone(recipe, [*options, "--out", str(tmp_path / f"one-{recipe}")])
        folders = tmp_path / f"one-{recipe}", tmp_path / f"two-{recipe}"
        text = recipe == "language_modeling"  # whose figures are not rounded
        agree(*map(log, folders), **({"tolerance": 2e-4} if text else {}))
        one, two = (results(folder, [*measured[recipe], "processes"]) for folder in folders)
        assert (one.pop("processes"), two.pop("processes")) == (1, 2)
        assert one == (pytest.approx(two, rel=2e-3) if text else two)


@pytest.mark.slow
def test_weights_shared_by_fsdp2(data, tmp_path):
    """Sharded weights and alphas train, are evaluated, saved and resumed as in one process."""
    options = data["classification"]
    job = {"recipe": "classification", "arguments": [*options, "--out", str(tmp_path / "two")]}
    together(
        [{**job, "stop_at": 3}, {**job, "arguments": [*job["arguments"], "--resume"]}],
        HF_ENTMAX_TEST_FSDP="1",
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="BertLayer",
        FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
        FSDP_RESHARD_AFTER_FORWARD="true",
    )
    alone("classification", [*options, "--out", str(tmp_path / "one")])
    agree(log(tmp_path / "one"), log(tmp_path / "two"))
    names = ["accuracy", "macro_f1", "density_encoder_self", "steps"]
    assert results(tmp_path / "one", names) == pytest.approx(results(tmp_path / "two", names), rel=1e-3)
    from safetensors.torch import load_file

    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and any("entmax_norm" in name for name in one)
    for name, value in one.items():
        assert torch.allclose(value, two[name], atol=2e-3), name
    assert runs.config(tmp_path / "one") == runs.config(tmp_path / "two")


class TestCountOfProcesses:
    @pytest.fixture(autouse=True)
    def _alone(self, monkeypatch):
        for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)

    def environment_of(self, *options):
        """Return what ``accelerate launch`` with these options adds to the environment of its script."""
        args = launch_command_parser().parse_args([*options, "recipes/inflection.py"])
        args, _, _ = _validate_launch_command(args)
        _, environment = prepare_simple_launcher_cmd_env(args)
        return {name: value for name, value in environment.items() if os.environ.get(name) != value}

    @pytest.mark.parametrize("asked", [1, 2])
    def test_accelerate_starts_one_process_on_cpus_and_is_found_out(self, monkeypatch, asked):
        for name, value in self.environment_of("--cpu", "--num_processes", str(asked)).items():
            monkeypatch.setenv(name, value)
        if asked == 1:
            check_processes(1)
        else:
            with pytest.raises(
                ValueError, match=r"several processes were asked for, and 1 share.*torchrun --standalone"
            ):
                check_processes(1)

    @pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
    def test_fewer_than_asked_for_are_an_error(self, monkeypatch, name):
        monkeypatch.setenv(name, "4")
        with pytest.raises(ValueError, match=r"4 processes were asked for, and 2 share"):
            check_processes(2)
        check_processes(4)

    def test_a_recipe_says_how_many_and_refuses_before_it_writes(self, data, tmp_path, monkeypatch, capsys):
        options = [*data["inflection"], "--smoke", "--out", str(tmp_path / "run")]
        alone("inflection", options)
        assert capsys.readouterr().out.startswith("inflection: 1 process on cpu.")
        for name, value in self.environment_of("--cpu", "--num_processes", "2").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match="several processes were asked for"):
            alone("inflection", [*options[:-1], str(tmp_path / "other")])
        assert not (tmp_path / "other").exists()


def test_accelerate_reads_every_file():
    kinds = {}
    for path in FILES:
        load_config_from_file(str(path))
        args = launch_command_parser().parse_args(["--config_file", str(path), "recipes/inflection.py", "--smoke"])
        args, _, _ = _validate_launch_command(args)
        kinds[path.stem] = (args.use_cpu, args.multi_gpu, args.use_fsdp, args.num_processes, args.mixed_precision)
        if args.use_fsdp:
            assert args.fsdp_version == 2
    assert kinds == {
        "one_cpu": (True, False, False, 1, "no"),
        "two_cpu_processes": (True, False, False, 2, "no"),
        "one_gpu": (False, False, False, 1, "bf16"),
        "several_gpus": (False, True, False, 2, "bf16"),
        "fsdp2": (False, False, True, 2, "bf16"),
    }


@pytest.mark.slow
def test_accelerate_launches_a_recipe(data, tmp_path):
    launch = [str(BIN / "accelerate"), "launch", "--config_file", str(ROOT / "recipes/configs/accelerate/one_cpu.yaml")]
    recipe = [str(ROOT / "recipes" / "inflection.py"), *data["inflection"], "--smoke", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [*launch, *recipe], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert results(tmp_path / "run", ["steps", "processes"]) == {"steps": 2, "processes": 1}
