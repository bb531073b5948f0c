"""One process and two give the same training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax  # noqa: F401  (so that the checkpoint loads)

HERE = Path(__file__).parent


def _launch(out, processes, batch):
    out.mkdir()
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    # accelerate launches several CPU processes through MPI only; torchrun, which it uses for GPUs, works everywhere.
    several = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    single = [
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    launcher = several if processes > 1 else single
    command = [sys.executable, "-m", *launcher, str(HERE / "launched_run.py"), str(out), str(batch)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.works_with(
    "accelerate", "two processes (DDP) train as one does, by torchrun, which accelerate launch calls for GPUs"
)
def test_one_and_two_processes_agree(tmp_path):
    (alone,) = _launch(tmp_path / "one", 1, 8)
    first, second = _launch(tmp_path / "two", 2, 4)
    assert first["processes"] == 2
    assert first["alphas"] == second["alphas"]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert first["support"] == pytest.approx(alone["support"], rel=1e-5)
    assert first["untrained_support"] == pytest.approx(alone["untrained_support"], rel=1e-6)
    for site, values in alone["alphas"].items():
        assert torch.allclose(torch.tensor(values), torch.tensor(first["alphas"][site]), atol=1e-4)
    model = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "two" / "model")
    assert model(**tiny.inputs("bart")).logits.isfinite().all()
