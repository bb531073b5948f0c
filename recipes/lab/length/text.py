"""Language models on texts longer than those of training: perplexity by position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, SmolLM3Config, SmolLM3ForCausalLM

from hf_entmax import patch_model
from hf_entmax.analysis.reading.tables import read_text
from hf_entmax.training import alpha_parameter_groups

from .sequences import Row, descend


def build(row: Row, pretrained: str, width: int, heads: int, layers: int) -> Any:
    """Load a pretrained causal model, or build a new one over bytes without any position encoding, patched as a line of the table says."""
    if pretrained:
        model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    else:
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        counts = {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 256}
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
        model = SmolLM3ForCausalLM(SmolLM3Config(**sizes, **counts, **tokens, no_rope_layers=[0] * layers))
    scaling = {} if row.scaling == "none" else {"length_scaling": row.scaling, "length_scaling_init": row.init}
    return patch_model(model, alpha=row.alpha, **scaling)


def read(data: str, split: str, pretrained: str) -> Tensor:
    """Read the token ids (bytes for a model from scratch) of a text, joined, ``[N]``."""
    text = "\n".join(read_text(data.replace("{split}", split), "text"))
    if not pretrained:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def train(
    model: Any, ids: Tensor, block: int, size: int, steps: int, lr: float, seed: int, numbers_only: bool
) -> float:
    """AdamW with a linear warm-up over a tenth of the steps; returns the mean loss of the last tenth, in nats.

    Args:
        model: patched.
        ids: of the training text.
        block: tokens that the model sees at once.
        size: blocks in a batch.
        steps: how many.
        lr: learning rate; that of alphas and length scaling is ten times it.
        seed: of the choice of blocks.
        numbers_only: leave the weights alone, train alphas and length scaling.
    """
    if numbers_only:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".entmax_norm." in name)
    if not steps or not any(parameter.requires_grad for parameter in model.parameters()):
        return math.nan
    if any(".entmax_norm." in name for name, _ in model.named_parameters()):
        learned = [name for name, p in model.named_parameters() if ".entmax_norm." in name and p.requires_grad]
        scaled = [name for name in learned if ".length_scaling." in name]
        rates = {"alpha_lr": 10 * lr if len(scaled) < len(learned) else None, "length_lr": 10 * lr if scaled else None}
        groups: Any = alpha_parameter_groups(model, lr, weight_decay=0.01, **rates)
    else:
        groups = model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, steps // 10)))
    generator = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        starts = torch.randint(len(ids) - block, (size, 1), generator=generator)
        rows = ids[starts + torch.arange(block)]
        return model(input_ids=rows, labels=rows, use_cache=False).loss

    return descend(optimizer, schedule, loss, steps)


@torch.no_grad()
def perplexity_by_position(model: Any, ids: Tensor, length: int, bucket: int, samples: int) -> dict[int, float]:
    """Measure the perplexity of the tokens at positions up to each multiple of ``bucket`` and after the one before.

    Args:
        model: of language.
        ids: of the test text.
        length: tokens of a block, a multiple of ``bucket``.
        bucket: positions taken together.
        samples: blocks, evenly spread over the text.
    """
    model.eval()
    starts = torch.linspace(0, len(ids) - length - 1, min(samples, (len(ids) - 1) // length)).long()
    total = torch.zeros(length)
    for start in starts.tolist():
        row = ids[None, start : start + length + 1]
        logits = model(input_ids=row[:, :-1], use_cache=False).logits
        total += torch.nn.functional.cross_entropy(logits[0].float(), row[0, 1:], reduction="none")
    means = (total / len(starts)).view(-1, bucket).mean(-1).exp().tolist()
    return {bucket * (place + 1): value for place, value in enumerate(means)}
