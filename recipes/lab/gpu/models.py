"""How fast are training steps of whole models, against the same models with softmax?"""

from __future__ import annotations

import sys
from typing import Any

from hf_entmax.bench.cases import ModelCase
from hf_entmax.bench.timing import package_version

from .rows import Rows, Skip
from .setting import Setting, figures, goal, together


def run(rows: Rows, setting: Setting) -> None:
    """Training steps of whole models from random weights: tokens per second against SDPA softmax."""
    if not (setting.tiny or too_old()):
        together("models", [("bart",), ("llama",)])
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


if __name__ == "__main__":
    training(sys.argv[1], 256, 2, "cuda", tiny=False)[0]["ours"]()
