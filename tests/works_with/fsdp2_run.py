"""Run in every process of a group: a step of FSDP2 in every process gives the losses and alphas of one process that sees all rows."""

import tiny_models as tiny
import torch
from torch.distributed.fsdp import fully_shard

from hf_entmax import patch_model


def _step(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p  # noqa: E731
    raw = [whole(p).detach().clone() for name, p in model.named_parameters() if "entmax_norm" in name]
    return loss.detach(), torch.stack(raw)


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = tiny.inputs("llama", batch=4)
    alone = patch_model(tiny.build("llama"), alpha_init=1.5, alpha_dtype="auto")
    sharded = patch_model(tiny.build("llama"), alpha_init=1.5, alpha_dtype="auto")
    start = torch.stack([p.detach().clone() for n, p in alone.named_parameters() if "entmax_norm" in n])
    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    loss, raw = _step(sharded, {name: values.chunk(size)[rank] for name, values in batch.items()})
    torch.distributed.all_reduce(loss)
    expected_loss, expected = _step(alone, batch)
    torch.testing.assert_close(loss / size, expected_loss)
    torch.testing.assert_close(raw, expected, atol=1e-5, rtol=1e-4)
    assert (raw != start).all()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
