"""Causal language modelling, from scratch or from a pretrained model (measures of Martins et al. 2020, sec. 4).

    python recipes/language_modeling.py --config recipes/configs/language_modeling_wikitext2.yaml --out runs/lm-softmax
    python recipes/language_modeling.py --config recipes/configs/language_modeling_wikitext2.yaml --out runs/lm-learned \
        --attention learned --output_alpha 1.5
    accelerate launch recipes/language_modeling.py --config ... --out ...               # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/language_modeling.py --config ... --out ...   # two CPU processes
    python recipes/language_modeling.py --model openai-community/gpt2 --attention learned --alpha_init 1.05 --lr 5e-5 \
        --block 512 --data hub:Salesforce/wikitext#wikitext-2-raw-v1@{split} --dev_split validation --out runs/gpt2
    python recipes/language_modeling.py --config ... --out runs/lm-softmax --resume

Attention is softmax, a fixed alpha or learned; so is the output. The lines of a text are joined and cut into blocks of
equal length. The last token of a block is the first of the next, so that every token is predicted exactly once. **No state
is carried over**: in a block a token sees only what stands before it in that block, the first ones see next to nothing, and
perplexities are therefore higher than with a sliding window or a cache. Perplexity per word counts the words between blanks
and one end per line of the text itself, the usual way for WikiText; it compares across tokenizers, perplexity per token does
not. It is left empty where ``--test_tokens`` cuts a line and the tokenizer cannot say which of its words come before the cut.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from accelerate.utils import set_seed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

import hf_entmax  # noqa: F401 - patched checkpoints load only with it
from common.batches import Batches, evenly
from common.blocks import Block, TextSettings, collate, prepare, probe, read_splits, text_measures
from common.finish import check_finish, finish
from common.heads import head_statistics
from common.pretrained import check_causal, check_length
from common.results import END, columns
from common.run import Run, write_atomically
from common.settings import option, parse
from common.training import Training, count_shifted_labels, make_sparse

FIELDS = columns(
    "attention output_alpha mapping_options seed data architecture perplexity word_perplexity epsilon_perplexity",
    "word_epsilon_perplexity sparsemax_score jensen_shannon support_size ruled_out dev_epsilon_perplexity test_tokens",
    "test_words density density_decoder_self support_decoder_self js_decoder_self",
    "distinct_1 distinct_2 distinct_4 rep_16 rep_128 human_distinct_2 human_rep_16",
    END,
)


@dataclasses.dataclass
class Settings(TextSettings):
    """Settings of this recipe, beside those that all share."""

    model: str = option("", "pretrained causal model, Hub id or folder; default: train one from scratch")
    architecture: str | None = option(None, "from scratch: gpt2 (default) or llama")
    vocabulary: int | None = option(None, "from scratch: size of the byte-level BPE (default 4000)")
    width: int | None = option(None, "from scratch: of the model (default 128)")
    layers: int | None = option(None, "from scratch: how many (default 3)")
    heads: int | None = option(None, "from scratch: per layer (default 4)")
    dropout: float | None = option(None, "from scratch, gpt2: everywhere but on attention weights (default 0.1)")
    samples: int = option(32, "continuations to sample for the repetition statistics; 0 for none")
    prompt: int = option(32, "tokens of the test text that each continues")

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {"architecture": "gpt2", "vocabulary": 4000, "width": 128, "layers": 3, "heads": 4}
        defaults |= {} if self.architecture == "llama" else {"dropout": 0.1}
        for name in (*defaults, "dropout"):
            if self.model:
                self.require(name, getattr(self, name) is None, f"left out with a pretrained model ({self.model})")
            elif getattr(self, name) is None:
                setattr(self, name, defaults.get(name))
        self.require_at_least(samples=0)
        fits = 1 <= self.prompt < self.block or not self.samples
        self.require("prompt", fits, f"between 1 and block - 1 = {self.block - 1}")
        if self.model:
            return
        self.require("architecture", self.architecture in ("gpt2", "llama"), "gpt2 or llama")
        self.require("vocabulary", self.vocabulary >= 300, "at least 300 (256 of them are the bytes)")
        self.require_at_least(width=1, layers=1, heads=1)
        self.require("heads", self.width % self.heads == 0, f"a divisor of width={self.width}")
        self.require("dropout", self.architecture == "gpt2" or not self.dropout, "0 or left out: llama has no dropout")
        self.require("dropout", 0 <= (self.dropout or 0) < 1, "at least 0 and below 1")
        even = self.architecture == "gpt2" or self.width // self.heads % 2 == 0
        self.require("heads", even, f"such that each gets an even share of width={self.width}: llama turns pairs")


def train_tokenizer(lines: list[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: lossless, whatever comes; ``<unk>`` is a word of WikiText and stays one token."""
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


def build_model(settings: Settings, vocabulary: int) -> Any:
    """A model from scratch in the shape of a known family."""
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
    """Distinct n-grams over all n-grams, and the share of tokens found among the last 16 or 128 before them.

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


def sample(model: Any, blocks: list[Block], tokenizer: Any, run: Run) -> dict[str, float]:
    """Continue test blocks by sampling from the whole distribution, write them down, and measure how they repeat.

    Nothing, with a notice, where there is no whole block or the model has diverged: its scores are no distribution.
    """
    settings = run.settings
    chosen = evenly([b["input_ids"] for b in blocks if len(b["input_ids"]) == settings.block], settings.samples)
    if not chosen:
        run.say(f"No samples: the test text has no whole block of {settings.block} tokens.")
        return {}
    texts = torch.tensor(chosen, device=run.accelerator.device)
    with torch.no_grad():
        finite = all((model(input_ids=text[None], use_cache=False).logits < math.inf).all() for text in texts)
    if not finite:
        run.say("No samples: the model has diverged, some of its logits are infinite or no numbers. Try a smaller lr.")
        return {}
    set_seed(settings.seed)
    prompts = texts[:, : settings.prompt]
    new = settings.block - settings.prompt
    whole = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}  # nothing is cut from the distribution
    length = {"min_new_tokens": new, "max_new_tokens": new}
    output = model.generate(prompts, attention_mask=torch.ones_like(prompts), **whole, **length).tolist()
    if run.main:
        starts = [tokenizer.decode(row[: settings.prompt]) for row in output]
        ends = [tokenizer.decode(row[settings.prompt :]) for row in output]
        pairs = zip(starts, ends, strict=True)
        write_atomically(run.folder / "samples.txt", "\n\n".join(f"{start}\n>>>{text}" for start, text in pairs) + "\n")
    human = {f"human_{name}": value for name, value in repetition(chosen, settings.prompt).items()}
    return repetition(output, settings.prompt) | human


def main(settings: Settings) -> None:
    lines = read_splits(settings)
    check_finish(settings, FIELDS)
    run = Run(settings, "language_modeling")
    set_seed(settings.seed)
    if settings.model:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(lines["train"][:2000] if settings.smoke else lines["train"], settings.vocabulary)
        model = build_model(settings, len(tokenizer))
    check_length(model, settings.block, "block")
    if settings.model:
        check_causal(model)
    model = make_sparse(model, settings)
    blocks, words = prepare(settings, lines, tokenizer)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    run.say(f"{len(blocks['train'])} training blocks of {settings.block} tokens, {size:.2f} M parameters")

    def evaluate(current: Any) -> dict[str, float]:
        measures = text_measures(current, blocks["dev"], words["dev"], run)
        return {"score": -measures["epsilon_perplexity"], **measures}

    batches = Batches.for_training(run, blocks["train"], collate, lambda block: len(block["input_ids"]))
    training = Training(run, model, tokenizer, batches, evaluate, count=count_shifted_labels)
    training.fit()
    best = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    best = best.to(run.accelerator.device).eval()
    test = text_measures(best, blocks["test"], words["test"], run)
    measures: dict[str, Any] = {
        **training.summary(),
        "data": settings.data,
        "architecture": settings.model or settings.architecture,
        "mapping_options": settings.mapping_options,
        "dev_epsilon_perplexity": round(-training.progress.best, 3),
        "test_tokens": int(test.pop("tokens")),
        "test_words": test.pop("words", ""),
        **{name: round(value, 4) for name, value in test.items()},
        **head_statistics(best, probe(blocks["dev"], settings.block)),
    }
    if settings.samples:
        repeats = sample(best, blocks["test"], tokenizer, run)
        measures |= {name: round(value, 4) for name, value in repeats.items() if name in FIELDS}
    main_measures = ["epsilon_perplexity", "sparsemax_score"]
    finish(run, FIELDS, measures, task="text-generation", data=settings.data, main_measures=main_measures)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
