"""Run in every process of a group: what a patched model says inside torch's context parallelism."""

import sys
from pathlib import Path

import tiny_models as tiny
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from hf_entmax import patch_model

if __name__ == "__main__":
    mesh = init_device_mesh("cpu", (2,))
    model, batch = patch_model(tiny.build("llama")), tiny.inputs("llama", length=8)
    before = model(**batch).logits
    ids = batch["input_ids"]
    said = "nothing"
    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1], no_restore_buffers={ids}):
        try:
            model(input_ids=ids)
        except NotImplementedError as error:
            said = str(error)
    (Path(sys.argv[1]) / f"rank{torch.distributed.get_rank()}.txt").write_text(said)
    again = model(**tiny.inputs("llama", length=8)).logits
    assert torch.equal(before, again)
    torch.distributed.destroy_process_group()
