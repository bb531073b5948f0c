"""Small causal models: their tokenizer, their shape, and how the texts that they sample repeat themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from common.batches import evenly
from common.blocks import Block
from common.folder import write


def train_tokenizer(lines: list[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: lossless, whatever comes; ``<unk>`` is a word of WikiText and stays one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line + "\n" for line in lines), trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
    )


def build_model(settings: Any, vocabulary: int) -> Any:
    """Build a model in the shape of a known family."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    if settings.architecture == "gpt2":
        config: Any = GPT2Config(
            vocab_size=vocabulary,
            n_positions=settings.block,
            n_embd=settings.width,
            n_layer=settings.layers,
            n_head=settings.heads,
            resid_pdrop=settings.dropout,
            embd_pdrop=settings.dropout,
            attn_pdrop=0.0,
            **ends,
        )
    else:
        config = LlamaConfig(
            vocab_size=vocabulary,
            max_position_embeddings=settings.block,
            hidden_size=settings.width,
            intermediate_size=8 * settings.width // 3,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            tie_word_embeddings=True,
            **ends,
        )
    return AutoModelForCausalLM.from_config(config)


def repetition(rows: list[list[int]], context: int) -> dict[str, float]:
    """Measure distinct n-grams over all n-grams, and the share of tokens found among the last 16 or 128 before them.

    Args:
        rows: token ids.
        context: how many at the beginning of each are given, not counted.

    Reference:
        Martins, Marinho, Martins 2020, sec. 5 (REP); Welleck et al. 2020.
    """
    measures = {}
    for n in (1, 2, 4):
        grams = [tuple(row[i : i + n]) for row in rows for i in range(context, len(row) - n + 1)]
        measures[f"distinct_{n}"] = len(set(grams)) / max(1, len(grams))
    for window in (16, 128):
        hits = [row[i] in row[max(0, i - window) : i] for row in rows for i in range(context, len(row))]
        measures[f"rep_{window}"] = sum(hits) / max(1, len(hits))
    return measures


def sample(settings: Any, model: Any, blocks: list[Block], tokenizer: Any, path: Path) -> dict[str, float]:
    """Continue test blocks by sampling from the whole distribution, write them down, and measure how they repeat.

    Nothing, with a notice, where there is no whole block or the model has diverged: its scores are no distribution.
    """
    chosen = evenly([b["input_ids"] for b in blocks if len(b["input_ids"]) == settings.block], settings.samples)
    if not chosen:
        PartialState().print(f"No samples: the test text has no whole block of {settings.block} tokens.")
        return {}
    texts = torch.tensor(chosen, device=model.device)
    with torch.no_grad():
        finite = all((model(input_ids=text[None], use_cache=False).logits < math.inf).all() for text in texts)
    if not finite:
        PartialState().print(
            "No samples: the model has diverged, some of its logits are infinite or no numbers. Try a smaller lr."
        )
        return {}
    set_seed(settings.seed)
    prompts = texts[:, : settings.prompt]
    new = settings.block - settings.prompt
    whole = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}  # nothing is cut from the distribution
    length = {"min_new_tokens": new, "max_new_tokens": new}
    output = model.generate(prompts, attention_mask=torch.ones_like(prompts), **whole, **length).tolist()
    if PartialState().is_main_process:
        starts = [tokenizer.decode(row[: settings.prompt]) for row in output]
        ends = [tokenizer.decode(row[settings.prompt :]) for row in output]
        pairs = zip(starts, ends, strict=True)
        write(path, "\n\n".join(f"{start}\n>>>{text}" for start, text in pairs) + "\n")
    human = {f"human_{name}": value for name, value in repetition(chosen, settings.prompt).items()}
    return repetition(output, settings.prompt) | human
