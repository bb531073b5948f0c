"""Translation (Peters et al. 2019, table 2; Correia et al. 2019, table 1), from scratch or from a pretrained model.

    python recipes/translation.py --config recipes/configs/translation_multi30k.yaml --out runs/mt-softmax
    python recipes/translation.py --config recipes/configs/translation_multi30k.yaml --out runs/mt-learned \
        --attention learned --output_alpha 1.5
    accelerate launch recipes/translation.py --config ... --out ...                     # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/translation.py --config ... --out ...         # two CPU processes
    python recipes/translation.py --model Helsinki-NLP/opus-mt-de-en --attention learned --alpha_init 1.05 --lr 1e-4 \
        --train pairs.tsv --dev dev.tsv --test test.tsv --out runs/marian-sparse
    python recipes/translation.py --config ... --out runs/mt-softmax --resume

Data are sentence pairs: two parallel files (``train.{lang}.gz``), a table or JSON lines with the two languages as columns, or a
data set of the Hub (``hub:bentrevett/multi30k@train``). Without ``--model`` the recipe trains a joint BPE and a BART-, Marian-
or T5-shaped model. BLEU and chrF are sacrebleu's, on ``generate()`` with a beam; part of the test set is searched again with
`hf_entmax.generation.beam_search`, which proves what it can.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from accelerate.utils import set_seed
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    DataCollatorForSeq2Seq,
    MarianConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from common.batches import Batches
from common.finish import check_finish, finish, name_of
from common.heads import head_statistics
from common.outputs import output_support
from common.pretrained import check_length
from common.run import Run
from common.settings import RunSettings, option, parse
from common.training import Training, make_sparse
from hf_entmax.analysis.reading.tables import read_pairs
from hf_entmax.generation import beam_search

Pairs = list[tuple[str, str]]

FIELDS = (
    *("attention", "output_alpha", "mapping_options", "seed", "data", "bleu", "chrf", "dev_bleu", "tests"),
    *(
        "density_encoder_self",
        "density_cross",
        "density_decoder_self",
        "js_encoder_self",
        "js_cross",
        "js_decoder_self",
    ),
    *("support_encoder_self", "support_cross", "support_decoder_self", "output_support"),
    *("optimal", "exhaustive", "certificates_of"),
    *("steps", "best_step", "train_seconds", "tokens_per_second", "processes", "command", "hardware", "versions"),
)


@dataclasses.dataclass
class Settings(RunSettings):
    """What this recipe can be told beside what all can."""

    train: str = option("", "sentence pairs to train on")
    dev: str = option("", "pairs that choose the best epoch")
    test: list[str] = option([], "pairs to test on; several sets")
    source: str = option("de", "source language: stands for {lang}, or names the column")
    target: str = option("en", "target language")
    model: str = option("", "pretrained encoder-decoder, Hub id or folder; default: train one from scratch")
    architecture: str = option("bart", "from scratch: bart, marian or t5")
    vocabulary: int = option(4000, "from scratch: size of the joint BPE")
    width: int = option(128, "from scratch: of the model")
    layers: int = option(3, "from scratch: of encoder and of decoder")
    heads: int = option(4, "from scratch: per layer")
    dropout: float = option(0.1, "from scratch: everywhere but on attention weights")
    max_tokens: int = option(
        128, "longest sentence in tokens, also of a translation; longer pairs are left out of training, and counted"
    )
    dev_sentences: int = option(500, "dev pairs that are translated greedily after each epoch; 0 for all")
    beams: int = option(5, "beam width on the test sets")
    certificates: int = option(200, "sentences of the first test set to search with a certificate; 0 for none")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("architecture", self.architecture in ("bart", "marian", "t5"), "bart, marian or t5")
        for name in ("train", "dev", "test"):
            self.require(name, bool(getattr(self, name)), "given: a file, or hub:OWNER/NAME@SPLIT")
        for name in ("beams", "layers", "heads", "width"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_tokens", "vocabulary"):
            self.require(name, getattr(self, name) >= 4, "at least 4")
        for name in ("dev_sentences", "certificates"):
            self.require(name, getattr(self, name) >= 0, "at least 0")
        self.require("width", self.width % self.heads == 0, f"a multiple of heads={self.heads}")
        self.require("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")


# --- 1. Tokenizer and model --------------------------------------------------------------------------------------------


def train_tokenizer(pairs: Pairs, size: int) -> PreTrainedTokenizerFast:
    """A BPE of both languages; ``▁`` marks the beginnings of words, as SentencePiece does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator((side for pair in pairs for side in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def build_model(settings: Settings, vocabulary: int, longest: int) -> Any:
    """A model from scratch in the shape of a known family, for texts of at most ``longest`` tokens."""
    width, layers, heads = settings.width, settings.layers, settings.heads
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    if settings.architecture == "t5":
        config: Any = T5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_ff=4 * width,
            d_kv=width // heads,
            num_layers=layers,
            num_decoder_layers=layers,
            num_heads=heads,
            dropout_rate=settings.dropout,
            **special,
        )
    else:
        kind = BartConfig if settings.architecture == "bart" else MarianConfig
        config = kind(
            vocab_size=vocabulary,
            d_model=width,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width,
            max_position_embeddings=longest + 8,
            dropout=settings.dropout,
            scale_embedding=True,
            bos_token_id=1,
            forced_eos_token_id=None,
            **special,
        )
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config.max_length = None
    model.generation_config.max_new_tokens = longest
    return model


def encode(pairs: Pairs, tokenizer: Any, longest: int) -> tuple[list[dict[str, list[int]]], int]:
    """Token ids of pairs, and how many were left out because a side is too long."""
    sources = tokenizer([source for source, _ in pairs])["input_ids"]
    targets = tokenizer(text_target=[target for _, target in pairs])["input_ids"]
    examples = [
        {"input_ids": s, "labels": t} for s, t in zip(sources, targets, strict=True) if max(len(s), len(t)) <= longest
    ]
    return examples, len(pairs) - len(examples)


# --- 2. Measures -------------------------------------------------------------------------------------------------------


def sentences(pairs: Pairs, tokenizer: Any, run: Run, longest: int, size: int = 64) -> Batches:
    """Pairs in batches of similar length; too long sources are cut, in evaluation none is left out."""

    def collate(part: list[tuple[int, str, str]]) -> dict[str, Any]:
        texts = [source for _, source, _ in part]
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        return {name: inputs[name] for name in ("input_ids", "attention_mask")} | {"rows": [row for row, *_ in part]}

    rows = [(row, source, target) for row, (source, target) in enumerate(pairs)]
    return Batches(rows, collate, lambda row: len(row[1]), run.accelerator, size)


def translations(model: Any, pairs: Pairs, tokenizer: Any, run: Run, longest: int, beams: int) -> list[str]:
    """What ``generate()`` makes of the sources, in their order, on all processes."""
    plain = run.accelerator.unwrap_model(model)
    found: list[tuple[int, str]] = []
    for batch in tqdm(
        list(sentences(pairs, tokenizer, run, longest).in_order()), disable=not run.main, mininterval=5, unit="batch"
    ):
        rows = batch.pop("rows")
        # Without a number of its own a pretrained model would stop after 20 tokens.
        output = plain.generate(**batch, num_beams=beams, max_new_tokens=longest)
        found += zip(rows, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True)
    if run.accelerator.num_processes > 1:
        parts: list[Any] = [None] * run.accelerator.num_processes
        torch.distributed.all_gather_object(parts, found)
        found = [row for part in parts for row in part]
    return [text for _, text in sorted(found)]


def bleu_and_chrf(hypotheses: list[str], pairs: Pairs) -> dict[str, float]:
    """See sacrebleu for their signatures."""
    references = [[target for _, target in pairs]]
    return {
        "bleu": sacrebleu.corpus_bleu(hypotheses, references).score,
        "chrf": sacrebleu.corpus_chrf(hypotheses, references).score,
    }


def translate(model: Any, pairs: Pairs, tokenizer: Any, run: Run, longest: int, beams: int) -> dict[str, float]:
    """BLEU and chrF of a model."""
    return bleu_and_chrf(translations(model, pairs, tokenizer, run, longest, beams), pairs)


def names_of_sets(places: list[str]) -> list[str]:
    """What to call the test sets: by their files, or by the whole path where these are called alike."""
    short = [Path(where).name.partition(".")[0] for where in places]
    return short if len(set(short)) == len(short) else [where.replace("/", "_") for where in places]


def certificates(model: Any, pairs: Pairs, tokenizer: Any, run: Run, longest: int, beams: int) -> dict[str, float]:
    """How often the search can prove that its translation is the most probable one. On every process alike."""
    results = []
    for start in range(0, len(pairs), 32):
        texts = [source for source, _ in pairs[start : start + 32]]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        inputs = {name: batch[name].to(run.accelerator.device) for name in ("input_ids", "attention_mask")}
        results += beam_search(model, inputs, num_beams=beams, max_new_tokens=longest)
    return {
        "optimal": round(100 * sum(result.optimal for result in results) / len(results), 2),
        "exhaustive": round(100 * sum(result.exhaustive for result in results) / len(results), 2),
        "certificates_of": len(results),
    }


# --- 3. One run --------------------------------------------------------------------------------------------------------


def main(settings: Settings) -> None:
    train, dev = (read_pairs(where, settings.source, settings.target) for where in (settings.train, settings.dev))
    names = names_of_sets(settings.test)
    tests = {
        name: read_pairs(where, settings.source, settings.target)
        for name, where in zip(names, settings.test, strict=True)
    }
    if settings.smoke:
        train, dev, tests = train[:200], dev[:8], {name: pairs[:8] for name, pairs in tests.items()}
    shown = dev[: settings.dev_sentences or None]
    check_finish(settings, FIELDS)
    run = Run(settings, "translation")
    set_seed(settings.seed)
    if settings.model:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(settings.model, dtype=torch.float32)
        check_length(model, settings.max_tokens, "max_tokens")
        model.generation_config.max_length, model.generation_config.max_new_tokens = None, settings.max_tokens
    else:
        tokenizer = train_tokenizer(train, settings.vocabulary)
        model = build_model(settings, len(tokenizer), settings.max_tokens)
    model = make_sparse(model, settings)
    examples, left_out = encode(train, tokenizer, settings.max_tokens)
    shown_examples, _ = encode(shown, tokenizer, settings.max_tokens)
    for split, kept in (("training", examples), ("dev", shown_examples)):
        if not kept:
            raise ValueError(f"max_tokens={settings.max_tokens}: every {split} pair is longer; raise it.")
    run.say(
        f"{len(examples)} training pairs ({left_out} longer than {settings.max_tokens} tokens left out), "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    batches = Batches(
        examples,
        collator,
        lambda example: len(example["input_ids"]) + len(example["labels"]),
        run.accelerator,
        settings.batch_size,
        settings.gradient_accumulation,
        settings.seed,
    )

    def evaluate(current: Any) -> dict[str, float]:
        measures = translate(current, shown, tokenizer, run, settings.max_tokens, beams=1)
        return {"score": measures["bleu"], **measures}

    training = Training(run, model, tokenizer, batches, evaluate)
    training.fit()
    best = AutoModelForSeq2SeqLM.from_pretrained(run.folder / "model").to(run.accelerator.device).eval()
    scores = {}
    for name, pairs in tests.items():
        hypotheses = translations(best, pairs, tokenizer, run, settings.max_tokens, settings.beams)
        run.write(f"hypotheses.{name}.txt", hypotheses)
        scores[name] = bleu_and_chrf(hypotheses, pairs)
    first = next(iter(scores.values()))
    measures: dict[str, Any] = {
        **training.summary(),
        "data": settings.train,
        "dev_bleu": round(training.progress.best, 2),
        "bleu": round(first["bleu"], 2),
        "chrf": round(first["chrf"], 2),
        "tests": " ".join(f"{name}:bleu={s['bleu']:.2f},chrf={s['chrf']:.2f}" for name, s in scores.items()),
        "mapping_options": settings.mapping_options,
    }
    parts = (shown_examples[start : start + 32] for start in range(0, len(shown_examples), 32))
    annotated = [dict(collator(part).to(run.accelerator.device)) for part in parts]
    measures |= {name: value for name, value in head_statistics(best, annotated).items() if name in FIELDS}
    measures["output_support"] = output_support([best], annotated)
    if settings.certificates:
        pairs = next(iter(tests.values()))[: settings.certificates]
        measures |= certificates(best, pairs, tokenizer, run, settings.max_tokens, settings.beams)
    run.say("  ".join(f"{name} {value}" for name, value in measures.items()))
    finish(run, FIELDS, measures, task="translation", data=name_of(settings.train), main_measures=["bleu", "chrf"])


if __name__ == "__main__":
    main(parse(Settings, __doc__))
