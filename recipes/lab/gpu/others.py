"""How fast is the rest? Entmax losses, training steps of whole models, decoding with exact sparse attention."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from hf_entmax.bench.cases import LossCase, ModelCase
from hf_entmax.bench.losses import loss_steps
from hf_entmax.bench.timing import package_version, peak_memory
from hf_entmax.ops import entmax_attention, exact_sparse_attention, sketch_keys

from .rows import Rows, Skip
from .setting import Setting, figures, goal, together


def run_losses(rows: Rows, setting: Setting) -> None:
    """The entmax loss of a large vocabulary against cross-entropy: time on logits, time and memory on hidden states."""
    count, classes, width = (9, 300, 8) if setting.tiny else (8192, 128_000, 2048)
    for kind in ("flat", "trained"):
        case = LossCase(kind, classes, count)
        rows.run(f"logits, {kind}", lambda case=case: losses(case, (1.5, 2.0, 1.2), setting))
    # The same from hidden states, with the output layer: the logits are never whole.
    rows.run("hidden states", lambda: losses(LossCase("flat", classes, count, width), (1.5,), setting))


def losses(case: LossCase, alphas: tuple[float, ...], setting: Setting) -> dict[str, Any]:
    """Forward and backward passes in bfloat16, after a check against float64: times, memory and goals of alpha 1.5."""
    calls, errors = loss_steps(case, setting.device, torch.bfloat16, alphas)
    times = figures(setting.times(calls, seconds=12.0))
    memory = {name: round(peak_memory(call, setting.device), 1) for name, call in calls.items()}
    against, ours, *_ = calls
    goals = {f"{ours} / {against}": goal(times[ours]["median"] / times[against]["median"], 1.2)}
    if case.dimension is not None:
        goals["memory"] = goal(memory[ours] / max(memory[against], 1e-9), 0.25)
    return {"errors": errors, "forward+backward": times, "memory_mib": memory, "goals": goals}


def run_models(rows: Rows, setting: Setting) -> None:
    """Training steps of whole models from random weights: tokens per second against SDPA softmax."""
    if not (setting.tiny or too_old()):
        together("others", [("bart",), ("llama",)])
    for shape in ("bart", "llama"):
        for length in (24,) if setting.tiny else (512, 2048):
            rows.run(f"{shape}, L {length}", lambda shape=shape, length=length: models(shape, length, setting))


def models(shape: str, length: int, setting: Setting) -> dict[str, Any]:
    """BART-base or a Llama of 135M parameters, learned alpha everywhere, bfloat16 under autocast."""
    if reason := too_old():
        raise Skip(reason)
    steps, tokens = training(shape, length, 1 if setting.tiny else 16384 // length, setting.device, tiny=setting.tiny)
    times = figures(setting.times(steps, seconds=20.0))
    rates = {name: round(1e3 * tokens / values["median"], 1) for name, values in times.items()}
    goals = {"sdpa / ours, tokens per second": goal(rates["sdpa"] / rates["ours"], 1 / 0.9)}
    return {"times": times, "tokens_per_second": rates, "goals": goals}


def too_old() -> str:
    """Why the Transformers that is there does not serve, with what to carry; empty if it does."""
    found = package_version("transformers")
    if found and tuple(int(part) for part in found.split(".")[:2]) >= (5, 18):
        return ""
    there = f"transformers {found} is installed" if found else "transformers is not installed"
    return f"{there}; carry the wheels of transformers>=5.18, tokenizers and huggingface_hub"


def training(shape: str, length: int, batch: int, device: str, *, tiny: bool) -> tuple[dict[str, Any], int]:
    """Steps of the model with SDPA and ours, and the tokens of a step."""
    from hf_entmax.bench.implementations import training_steps

    small = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 64}
    llama = {"layers": 30, "width": 576, "heads": 9, "vocabulary": 49152}
    sizes = small if tiny else llama if shape == "llama" else {"vocabulary": 50265}
    case = ModelCase(f"{shape} {length}", batch=batch, lengths=(length, length), kind=shape, bfloat16=True, **sizes)
    return training_steps(case, device)


def run_decoding(rows: Rows, setting: Setting) -> None:
    """One query against 32k keys: exact sparse decoding, ours over all keys, and SDPA."""
    for alpha in (1.5,) if setting.tiny else (1.5, 1.25):
        rows.run(f"alpha {alpha}", lambda alpha=alpha: decoding(alpha, setting))


def decoding(alpha: float, setting: Setting) -> dict[str, Any]:
    """Keys on a few directions, as in trained models, so that few have weight; four query heads share a key head."""
    batch, heads, keys, head_dim = (1, 4, 40, 16) if setting.tiny else (8, 32, 32768, 64)
    generator = torch.Generator(setting.device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=setting.device)

    key, value = (draw(batch, heads // 4, keys, head_dim).bfloat16() for _ in range(2))
    query, sketch = (3.0 * draw(batch, heads, 1, head_dim)).bfloat16(), sketch_keys(key)
    functions = {
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "ours": lambda: entmax_attention(query, key, value, alpha, backend="triton")[0],
        "exact": lambda: exact_sparse_attention(query, sketch, key, value, alpha)[0],
    }
    with torch.no_grad():
        wanted = entmax_attention(query.double(), key.double(), value.double(), alpha, backend="torch")[0]
        errors = {n: float((f().double() - wanted).abs().max()) for n, f in functions.items() if n != "sdpa"}
        if not max(errors.values()) < 0.03:
            raise ValueError(f"off by {errors}: nothing was timed")
        times = figures(setting.times(functions, seconds=6.0))
        counts = exact_sparse_attention(query, sketch, key, value, alpha)[1]
    shares = {name: float(number.sum() / counts.total.sum()) for name, number in counts._asdict().items()}
    ratio = times["exact"]["median"] / times["sdpa"]["median"]
    return {"errors": errors, "times": times, "shares": shares, "goals": {"exact / sdpa": goal(ratio, 0.3)}}


if __name__ == "__main__":
    training(sys.argv[1], 256, 2, "cuda", tiny=False)[0]["ours"]()
