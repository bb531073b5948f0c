"""Run in every process of a group: what each model of a folder computes, learns and saves with its heads split among the processes."""

import sys
from pathlib import Path

import tiny_models as tiny
import torch
import transformers as tf
from torch.distributed.tensor import DTensor

from hf_entmax import alphas, is_patched, mapping_options, patch_model
from hf_entmax.integration.observe import observe_attention


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def seen(model, batch):
    """Logits, gradients after two backward passes, what a step of them changes, and the weights of all heads."""
    weights = {}
    with torch.no_grad():
        logits = model(**batch).logits
        with observe_attention(model, lambda call: weights.update({call.site.name: call.weights.clone()})):
            model(**batch)
        with observe_attention(model, gate=lambda call: torch.arange(4.0).view(1, 1, 4, 1)):
            gated = model(**batch).logits
    for part in (slice(0, 1), slice(1, None)):  # a gradient that is reduced twice would show
        model(**{name: value[part] for name, value in batch.items()}, labels=batch["input_ids"][part]).loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
        after = model(**batch).logits
    numbers = {}
    if is_patched(model):
        numbers = alphas(model) if "mapping" not in model.config.name_or_path else mapping_options(model)
    return {
        "logits": logits,
        "gradients": gradients,
        "after": after,
        "numbers": numbers,
        "weights": weights,
        "gated": gated,
    }


def main(models: Path, out: Path) -> None:
    batch = tiny.inputs("llama")
    results = {}
    for folder in sorted(models.iterdir()):
        model = tf.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float64)
        assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj").weight, DTensor)
        results[folder.name] = seen(model, batch)
        model.save_pretrained(out / folder.name)
    plain = tf.AutoModelForCausalLM.from_pretrained(models / "softmax", tp_plan="auto", dtype=torch.float64)
    torch.manual_seed(torch.distributed.get_rank())  # random numbers must not differ between the processes
    patch_model(plain, alpha_init="normal").save_pretrained(out / "drawn")
    results["patched_here"] = seen(plain, batch)
    plain.save_pretrained(out / "patched_here")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.save(results, out / f"rank{rank}of{size}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
