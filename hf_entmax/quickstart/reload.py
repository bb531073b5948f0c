"""Does a saved model give the same logits in another process? Both sides of that check.

As a program, ``python -m hf_entmax.quickstart.reload MODEL_DIR PROBE_FILE`` is the other process: it knows of the model
only what is on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

#: Largest difference of logits that counts as agreement. The processes run the same code on the same machine; usually
#: the difference is exactly 0, but another number of threads may add up in another order.
TOLERANCE = 1e-4


def check_reload(model: PreTrainedModel, model_dir: Path, probe: dict[str, Tensor]) -> float:
    """Load ``model_dir`` in a fresh process and compare its logits with those of ``model``.

    Args:
        model: as it is in memory; runs on the CPU for the comparison and is put back where it was.
        model_dir: where it was saved.
        probe: a batch with ``labels``.

    Returns:
        The largest absolute difference of a logit.

    Raises:
        RuntimeError: if the other process fails, or its logits differ by more than ``TOLERANCE``.
    """
    device = model.device
    logits = _logits(model.to("cpu").eval(), {name: tensor.cpu() for name, tensor in probe.items()})  # type: ignore[arg-type]
    model.to(device)  # type: ignore[arg-type]
    probe_file = model_dir.parent / "probe.safetensors"
    save_file({**{name: tensor.cpu().clone() for name, tensor in probe.items()}, "logits": logits}, probe_file)
    package_parent = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "hf_entmax.quickstart.reload", str(model_dir), str(probe_file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    probe_file.unlink()
    if done.returncode != 0:
        raise RuntimeError(f"Loading {model_dir} in a fresh process failed:\n{done.stderr.strip()}")
    difference = float(json.loads(done.stdout.strip().splitlines()[-1])["largest_difference"])
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"The model in {model_dir} gives other logits in a fresh process: they differ by up to {difference:.3g}."
        )
    return difference


def main(model_dir: str, probe_file: str) -> None:
    """Print the largest difference as a line of JSON."""
    probe = load_file(probe_file)
    expected = probe.pop("logits")
    import hf_entmax  # noqa: F401 - registers the attention; from_pretrained then restores a patched model by itself

    model = AutoModelForSeq2SeqLM.from_pretrained(model_dir)
    difference = (_logits(model.eval(), probe) - expected).abs().max().item()
    print(json.dumps({"largest_difference": difference}))


@torch.no_grad()
def _logits(model: PreTrainedModel, probe: dict[str, Tensor]) -> Tensor:
    return model(**probe).logits.float().contiguous()


if __name__ == "__main__":
    main(*sys.argv[1:])
