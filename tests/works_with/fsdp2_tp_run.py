"""Run in every process of a group: FSDP2 over models whose heads are split among processes (a 2 x 2 mesh)."""

import sys

import torch
import transformers as tf
from transformers.distributed import DistributedConfig

import hf_entmax  # noqa: F401


def main() -> None:
    folder = sys.argv[1]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    split = DistributedConfig(tp_size=2, fsdp_size=2)
    model = tf.AutoModelForCausalLM.from_pretrained(folder, distributed_config=split)
    alone = tf.AutoModelForCausalLM.from_pretrained(folder)
    start = torch.stack([p.detach().clone() for n, p in alone.named_parameters() if "entmax_norm" in n])
    ids = torch.arange(3, 27).view(4, 6)
    rank = torch.distributed.get_rank() // 2  # the processes of one row of the mesh see the same
    losses = []
    for own, rows in ((model, ids.chunk(2)[rank]), (alone, ids)):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        loss = own(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p  # noqa: E731
    raw, expected = (
        torch.stack([whole(p).detach() for n, p in own.named_parameters() if "entmax_norm" in n])
        for own in (model, alone)
    )
    torch.distributed.all_reduce(losses[0])
    torch.testing.assert_close(losses[0] / 4, losses[1])
    assert (expected != start).all()
    torch.testing.assert_close(raw, expected, atol=1e-5, rtol=1e-4)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
