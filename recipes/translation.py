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
from typing import Any

from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import DataCollatorForSeq2Seq

from common.batches import collated
from common.folder import open_folder, write_lines
from common.from_scratch import Seq2SeqSettings, load_or_build
from common.heads import head_statistics, output_support
from common.results import END, columns, finish, name_of
from common.seq2seq import Pairs, bleu_and_chrf, cut_pairs, decode, encode_pairs, names_of_sets
from common.settings import option, parse
from common.trainer import RecipeTrainer, training_arguments
from hf_entmax.analysis.reading.tables import read_pairs, read_splits
from hf_entmax.generation import beam_search, certificates_in_words

FIELDS = columns(
    "attention output_alpha mapping_options seed data bleu chrf dev_bleu tests",
    "density_encoder_self density_cross density_decoder_self js_encoder_self js_cross js_decoder_self",
    "support_encoder_self support_cross support_decoder_self",
    "output_support optimal exhaustive certificates_of",
    END,
)


@dataclasses.dataclass
class Settings(Seq2SeqSettings):
    """Settings of this recipe, beside those that all share."""

    test: list[str] = option([], "pairs to test on; several sets")
    source: str = option("de", "source language: stands for {lang}, or names the column")
    target: str = option("en", "target language")
    layers: int = option(3, "from scratch: of encoder and of decoder")
    max_tokens: int = option(
        128, "longest sentence in tokens, also of a translation; longer pairs are left out of training, and counted"
    )
    dev_sentences: int = option(500, "dev pairs that are translated greedily after each epoch; 0 for all")
    beams: int = option(5, "beam width on the test sets")
    certificates: int = option(200, "sentences of the first test set to search with a certificate; 0 for none")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(beams=1, max_tokens=4, dev_sentences=0, certificates=0)


def certificates(model: Any, pairs: Pairs, tokenizer: Any, longest: int, beams: int) -> dict[str, float]:
    """Measure how often the search can prove that its translation is the most probable one. On every process alike."""
    results = []
    for start in range(0, len(pairs), 32):
        texts = [source for source, _ in pairs[start : start + 32]]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        results += beam_search(model, inputs, num_beams=beams, max_new_tokens=longest)
    PartialState().print(certificates_in_words(results))
    return {
        "optimal": round(100 * sum(result.optimal for result in results) / len(results), 2),
        "exhaustive": round(100 * sum(result.exhaustive for result in results) / len(results), 2),
        "certificates_of": len(results),
    }


def main(settings: Settings) -> None:
    wheres = {"train": settings.train, "dev": settings.dev}
    wheres |= {f"test/{name}": where for name, where in zip(names_of_sets(settings.test), settings.test, strict=True)}
    data = read_splits(wheres, (settings.source, settings.target), read_pairs)
    train, dev = data["train"], data["dev"]
    tests = {split.removeprefix("test/"): pairs for split, pairs in data.items() if split.startswith("test/")}
    if settings.smoke:
        train, dev, tests = train[:200], dev[:8], {name: pairs[:8] for name, pairs in tests.items()}
    shown = dev[: settings.dev_sentences or None]
    folder = open_folder(settings, "translation", FIELDS)
    set_seed(settings.seed)
    tokenizer, model = load_or_build(settings, (side for pair in train for side in pair), "max_tokens")
    examples, left_out = encode_pairs(train, tokenizer, settings.max_tokens)
    cut = lambda pairs: cut_pairs(pairs, tokenizer, settings.max_tokens, settings.max_tokens)  # noqa: E731
    shown_examples, _ = encode_pairs(shown, tokenizer, settings.max_tokens)
    settings.require("max_tokens", bool(examples and shown_examples), "larger: every pair of training or dev is longer")
    PartialState().print(f"{left_out} training pairs left out: longer than {settings.max_tokens} tokens.")
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)

    def measure(answers: Any) -> dict[str, float]:
        measures = bleu_and_chrf(decode(answers.predictions, tokenizer), shown)
        return {"score": measures["bleu"], **measures}

    trainer = RecipeTrainer(
        settings,
        model,
        args=training_arguments(settings, predict_with_generate=True),
        train_dataset=examples,
        eval_dataset=cut(shown),
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=measure,
    )
    best = trainer.fit()
    trainer.compute_metrics = None  # it knows the references of dev
    scores = {}
    for name, pairs in tests.items():
        hypotheses = decode(trainer.predict(cut(pairs), num_beams=settings.beams).predictions, tokenizer)
        write_lines(folder / f"hypotheses.{name}.txt", hypotheses)
        scores[name] = bleu_and_chrf(hypotheses, pairs)
    first = next(iter(scores.values()))
    measures: dict[str, Any] = {
        **trainer.summary(),
        "data": settings.train,
        "dev_bleu": round(trainer.best, 2),
        "bleu": round(first["bleu"], 2),
        "chrf": round(first["chrf"], 2),
        "tests": " ".join(f"{name}:bleu={s['bleu']:.2f},chrf={s['chrf']:.2f}" for name, s in scores.items()),
    }
    annotated = collated(shown_examples, collator, 32, best.device)
    measures |= head_statistics(best, annotated, FIELDS)
    measures["output_support"] = output_support([best], annotated)
    if settings.certificates:
        pairs = next(iter(tests.values()))[: settings.certificates]
        measures |= certificates(best, pairs, tokenizer, settings.max_tokens, settings.beams)
    card = {"task": "translation", "data": name_of(settings.train), "main_measures": ["bleu", "chrf"]}
    finish(settings, "translation", FIELDS, measures, **card)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
