"""Causal language modelling, from scratch or from a pretrained model (measures of Martins et al. 2020, sec. 4).

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
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_entmax  # noqa: F401 - patched checkpoints load only with it
from common.blocks import TextSettings, collate, prepare, probe, read_splits, text_measures
from common.causal import build_model, sample, train_tokenizer
from common.folder import open_folder
from common.heads import head_statistics
from common.pretrained import check_causal, check_length
from common.results import END, columns, finish
from common.settings import make_sparse, option, parse
from common.trainer import RecipeTrainer, training_arguments
from hf_entmax.generation import SamplingMetrics

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


def main(settings: Settings) -> None:
    lines = read_splits(settings)
    folder = open_folder(settings, "language_modeling", FIELDS)
    set_seed(settings.seed)
    if settings.model:
        tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        check_causal(model)
    else:
        tokenizer = train_tokenizer(lines["train"][:2000] if settings.smoke else lines["train"], settings.vocabulary)
        model = build_model(settings, len(tokenizer))
    check_length(model, settings.block, "block")
    model = make_sparse(model, settings)
    blocks, words = prepare(settings, lines, tokenizer)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    PartialState().print(f"{len(blocks['train'])} training blocks of {settings.block} tokens, {size:.2f} M parameters")
    metrics = SamplingMetrics.for_model(model)

    def measure(answers: Any) -> dict[str, float]:
        found = metrics.compute_metrics(answers)
        return {"score": -found["epsilon_perplexity"], **found}

    trainer = RecipeTrainer(
        settings,
        model,
        args=training_arguments(settings, per_device_eval_batch_size=16),
        train_dataset=blocks["train"],
        eval_dataset=blocks["dev"],
        data_collator=collate,
        processing_class=tokenizer,
        compute_metrics=measure,
        preprocess_logits_for_metrics=metrics.preprocess_logits_for_metrics,  # four numbers a token instead of logits
    )
    best = trainer.fit()
    found = text_measures(best, blocks["test"], words["test"])
    measures: dict[str, Any] = {
        **trainer.summary(),
        "data": settings.data,
        "architecture": settings.model or settings.architecture,
        "mapping_options": settings.mapping_options,
        "dev_epsilon_perplexity": round(-trainer.best, 3),
        "test_tokens": int(found.pop("tokens")),
        "test_words": found.pop("words", ""),
        **{name: round(value, 4) for name, value in found.items()},
        **head_statistics(best, probe(blocks["dev"], settings.block)),
    }
    if settings.samples:
        repeats = sample(settings, best, blocks["test"], tokenizer, folder / "samples.txt")
        measures |= {name: round(value, 4) for name, value in repeats.items() if name in FIELDS}
    card = {"data": settings.data, "main_measures": ["epsilon_perplexity", "sparsemax_score"]}
    finish(settings, "language_modeling", FIELDS, measures, task="text-generation", **card)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
