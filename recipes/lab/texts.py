"""Running text, the causal models that read it, and what their attention is given meanwhile.

Settings name the folder of the model, the text, the alpha of every head (``"own"``: those that the folder was saved with) and a dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

import hf_entmax
from hf_entmax.analysis.reading.tables import read_text


def encode(lines: Sequence[str], tokenizer: Any, limit: int) -> list[int]:
    """Return at most ``limit`` token ids of lines with their ends, joined."""
    ids: list[int] = []
    for line in lines:
        if len(ids) >= limit:
            break
        ids += tokenizer(line + "\n", add_special_tokens=False, verbose=False)["input_ids"]
    return ids[:limit]


def text_of(settings: Any, length: int) -> list[int]:
    """Read the first tokens of the text."""
    ids = encode(read_text(str(settings.text)), AutoTokenizer.from_pretrained(settings.model), length)
    if len(ids) < length:
        raise SystemExit(f"{settings.text} has {len(ids)} tokens, {length} are needed.")
    return ids


def load_model(settings: Any, sparse: bool = True) -> Any:
    """Load the model of the folder, patched or with SDPA."""
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype).eval()
    if settings.alpha == "own" and sparse:
        if not hf_entmax.is_patched(model):
            raise SystemExit(f"--alpha own: {settings.model} was not saved from a patched model.")
        return model
    if hf_entmax.is_patched(model):
        hf_entmax.unpatch_model(model)
    model.set_attn_implementation("sdpa")
    return hf_entmax.patch_model(model, alpha=float(settings.alpha)) if sparse else model


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[dict[int, tuple[Tensor, Tensor, Tensor]]]:
    """Note what the attention function of a model is given meanwhile: query, keys and values by layer."""
    name, seen = model.config._attn_implementation, {}
    own = AttentionInterface()[name]

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[module.layer_idx] = query, key, value
        return own(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(name, record)
    try:
        yield seen
    finally:
        AttentionInterface.register(name, own)
