"""Run in every process of a group: a step of DeepSpeed's ZeRO, stages 2 and 3, gives the alphas of one process that sees all rows."""

import deepspeed
import tiny_models as tiny
import torch

from hf_entmax import patch_model

LR = 0.5


def _model():
    return patch_model(tiny.build("llama"), alpha_init=1.5)


def _alphas(model):
    raw = [p for name, p in model.named_parameters() if "entmax_norm" in name]
    with deepspeed.zero.GatheredParameters(raw):
        return torch.stack([p.detach().clone() for p in raw])


def _expected(batch):
    model = _model()
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return loss.detach(), _alphas(model)


def _sharded(stage, batch):
    model, (rank, size) = _model(), (torch.distributed.get_rank(), torch.distributed.get_world_size())
    config = {
        "train_micro_batch_size_per_gpu": len(batch["input_ids"]) // size,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    own = {name: values.chunk(size)[rank] for name, values in batch.items()}
    loss = engine(**own, labels=own["input_ids"]).loss
    engine.backward(loss)
    engine.step()
    loss = loss.detach().clone()
    torch.distributed.all_reduce(loss)
    return loss / size, _alphas(engine.module)


def main() -> None:
    torch.set_num_threads(1)
    # This extension would be compiled at the first start, for minutes; stopped meanwhile, that leaves a lock in
    # ~/.cache/torch_extensions which every later start waits for without a word.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    batch = tiny.inputs("llama", batch=4)
    start, (loss, alphas) = _alphas(_model()), _expected(batch)
    for stage in (2, 3):
        found_loss, found = _sharded(stage, batch)
        torch.testing.assert_close(found_loss, loss)
        torch.testing.assert_close(found, alphas, atol=1e-5, rtol=1e-4)
        assert (found != start).all()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
