"""A model whose heads are split among processes computes, learns and saves what it does in one."""

import os
from pathlib import Path

import fresh
import pytest
import tiny_models as tiny
import torch
import transformers as tf
from tensor_parallel_run import seen

from hf_entmax import patch_model, set_alphas
from hf_entmax.integration import parallel

FOUR = ("softmax", "fixed", "heads")
HERE = Path(__file__).parent
OPTIONS = {
    "softmax": None,
    "heads": {},
    "fixed": {"alpha": 1.5},
    "one_layer": {"layers": [1]},
    "tied_model": {"tie": "model", "alpha_init": 1.4},
    "tied_layer": {"tie": "layer", "alpha_init": 1.4},
    "constant": {"length_scaling": "constant", "length_scaling_heads": [1, 2]},
    "log": {"length_scaling": "log", "length_scaling_init": "paper", "length_scaling_heads": [0, 3]},
    "adaptive": {"alpha": 1.5, "length_scaling": "adaptive", "length_scaling_init": "paper"},
    "mapping": {"mapping": "sparsegen_lin", "mapping_options": {"lam": "learned"}},
}


def run(script, *arguments, processes=2):
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = fresh.run_file(HERE / script, *arguments, processes=processes, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def _llama(key_heads):
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**tiny._LLAMA, "num_key_value_heads": key_heads})).eval()
    with torch.no_grad():  # weights large enough for the alphas to matter
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.3 / parameter.std())
    return model


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """The folder of the models, that of the run and what both processes saw."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("run")
    for name, options in OPTIONS.items():
        # Four processes need four heads of keys, two may share.
        torch.manual_seed(0)
        model = _llama(4 if name in FOUR else 2)
        if options is not None:
            patch_model(model, **options)
        if name == "heads":
            set_alphas(model, {"decoder_self": torch.linspace(1.1, 1.9, 8).view(2, 4)})
        model.save_pretrained(models / name)
    run("tensor_parallel_run.py", models, out)
    return models, out, [torch.load(out / f"rank{rank}of2.pt") for rank in range(2)]


def agree(one, other, tolerance):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            agree(value, other[name], tolerance)
        else:
            torch.testing.assert_close(other[name], value, atol=tolerance, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.works_with("Transformers", 'tensor parallelism, tp_plan="auto", two processes')
@pytest.mark.parametrize("name", [*OPTIONS, "patched_here"])
def test_two_processes_agree_with_one(split, name):
    models, out, ranks = split
    folder = out / "drawn" if name == "patched_here" else models / name
    start = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    alone = seen(start, tiny.inputs("llama"))
    if name != "softmax" and name != "fixed":
        learned = {key: value for key, value in alone["gradients"].items() if ".entmax_norm." in key}
        assert learned and all(value.abs().max() > 1e-4 for value in learned.values())
    for rank in ranks:
        agree(alone, rank[name], 1e-6)
    # Saved whole: one process reads what the trained model was.
    read = tf.AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float64)
    for key, value in start.state_dict().items():
        torch.testing.assert_close(read.state_dict()[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_saved_by_two_read_by_four(split, tmp_path):
    _, out, _ = split
    folder = tmp_path / "models"
    folder.mkdir()
    for name in FOUR:
        (folder / name).symlink_to(out / name)
    run("tensor_parallel_run.py", folder, tmp_path, processes=4)
    seen_last = torch.load(tmp_path / "rank3of4.pt")
    for name in FOUR:
        read = tf.AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float64)
        agree(seen(read, tiny.inputs("llama")), seen_last[name], 1e-6)


def test_heads_that_nobody_split_are_named():
    assert parallel.heads_mesh(torch.nn.Linear(2, 2), 4, 4) is None
    with pytest.raises(ValueError, match="Linear has 4 heads, but its attention was given 2"):
        parallel.heads_mesh(torch.nn.Linear(2, 2), 2, 4)


@pytest.mark.slow
@pytest.mark.works_with("torch", "context_parallel: a threshold needs all keys", "refused")
def test_context_parallelism_is_refused(tmp_path):
    run("context_parallel_run.py", tmp_path)
    for rank in range(2):
        assert "threshold of an entmax depends on all of them" in (tmp_path / f"rank{rank}.txt").read_text()
