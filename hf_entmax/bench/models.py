"""Training speed of a whole encoder-decoder: SDPA softmax against learned alphas everywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from hf_entmax.bench.cases import ModelCase


def training_steps(case: ModelCase, device: str, seed: int = 0) -> tuple[dict[str, Callable[[], object]], int]:
    """One training step of the same model with SDPA softmax and with entmax, by implementation name.

    Beside them stand the real (unpadded) source and target tokens of one step.
    """
    from transformers import BartConfig, BartForConditionalGeneration

    import hf_entmax

    torch.manual_seed(seed)
    make_config: Any = BartConfig
    config = make_config(
        attn_implementation="sdpa",
        vocab_size=case.vocabulary,
        d_model=case.width,
        encoder_layers=case.layers,
        decoder_layers=case.layers,
        encoder_attention_heads=case.heads,
        decoder_attention_heads=case.heads,
        encoder_ffn_dim=4 * case.width,
        decoder_ffn_dim=4 * case.width,
        max_position_embeddings=max(1024, case.lengths[1]),
    )
    plain = BartForConditionalGeneration(config)
    patched = hf_entmax.patch_model(copy.deepcopy(plain))
    low, high = case.lengths
    source, target = torch.randint(low, high + 1, (2, case.batch))
    source[0] = target[0] = high
    tokens = torch.randint(4, case.vocabulary, (2, case.batch, high))
    position = torch.arange(high)
    mask = (position < source[:, None]).long()
    inputs = tokens[0] * mask + config.pad_token_id * (1 - mask)
    labels = tokens[1].masked_fill(position >= target[:, None], -100)
    batch = {"input_ids": inputs, "attention_mask": mask, "labels": labels}
    batch = {name: tensor.to(device) for name, tensor in batch.items()}

    def make_step(model: torch.nn.Module) -> Callable[[], object]:
        model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(**batch).loss.backward()
            optimizer.step()

        return step

    steps = {"sdpa": make_step(plain), "ours": make_step(patched)}
    return steps, int(source.sum() + target.sum())
