"""Speech recognition with a pretrained encoder-decoder (Whisper, Moonshine, ...): fine-tune it, or make its attention sparse.

    python recipes/pretrained_folders.py whisper-tiny.en models/whisper-tiny.en                    # or openai/whisper-tiny.en
    python recipes/speech.py --model models/whisper-tiny.en --attention 1.6 --softened true --sites cross --freeze_encoder true \
        --distill 1 --train data/train/manifest.jsonl --dev data/dev/manifest.jsonl --test data/test/manifest.jsonl \
        data/real/manifest.jsonl --lr 1e-5 --warmup 5 --batch_size 8 --epochs 2 --out runs/whisper-sparse
    accelerate launch recipes/speech.py ... --attention softmax --out runs/whisper-softmax         # the control; several processes
    python recipes/speech.py ... --train hub:OWNER/NAME@train --text sentence --out runs/common-voice

Data: tables or JSON lines that name sound files (wav, flac, ogg, mp3; any rate) and what is said in them, or data sets of the Hub
with a column of audio. Attention is softmax, a fixed alpha or learned, in all sites or in those of ``--sites``. The word and
character error rates are jiwer's, %, on greedy ``generate()``, after Whisper's own normaliser of texts. ``--distill`` adds the
distance to the original's output, ``--density_target`` pressure on the weights. With ``--freeze_encoder`` the decoder alone learns,
and where the encoder's output has one length, as Whisper's has, each clip is heard once: training is then several times as fast.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from accelerate.utils import send_to_device, set_seed

from common.audio import Collator, check_clips, error_rates, labelled, load_speech, read_clips
from common.folder import open_folder, write_lines
from common.heads import head_statistics
from common.results import END, columns, finish, name_of
from common.seq2seq import decode, names_of_sets
from common.settings import RunSettings, make_sparse, option, parse
from common.trainer import RecipeTrainer, training_arguments
from hf_entmax import EntmaxConfig
from hf_entmax.training import ConversionCallback, DensityTarget

FIELDS = columns(
    "model attention sites output_alpha seed data wer cer dev_wer tests",
    "density_encoder_self density_cross density_decoder_self support_encoder_self support_cross support_decoder_self",
    END,
)


@dataclasses.dataclass
class Settings(RunSettings):
    """Settings of this recipe, beside those that all share."""

    model: str = option("", "pretrained speech model that writes text: Hub id or folder")
    train: list[str] = option([], "clips to train on; several sets are one")
    dev: str = option("", "clips that choose the best epoch")
    test: list[str] = option([], "clips to test on; several sets")
    audio: str = option("audio", "column of the sound: a file, relative to the table, or a data set's audio")
    text: str = option("text", "column of what is said")
    language: str = option("en", "of the speech")
    sites: list[str] = option([], "where attention is sparse: encoder_self, cross, decoder_self; default: everywhere")
    softened: bool = option(False, "a temperature for each head, at which entmax starts about as sharp as the softmax")
    freeze_encoder: bool = option(False, "train the decoder alone")
    task_weight: float = option(1.0, "weight of what was said; 0 learns from the original alone")
    distill: float = option(0.0, "weight of the distance to the original's output")
    distill_encoder: float = option(0.0, "weight of the distance to the states of the original's encoder")
    density_target: float | None = option(None, "push until so few weights of a sparse module are left, mean over them")
    density_rate: float = option(0.1, "how fast that pressure grows, per step; a short training needs more")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "train", "dev", "test"):
            self.require(name, bool(getattr(self, name)), "given")
        self.require_at_least(task_weight=0, distill=0, distill_encoder=0)
        self.require(
            "distill_encoder", not (self.distill_encoder and self.freeze_encoder), "left out: encoder is frozen"
        )
        pressed = self.density_target is not None
        self.require("attention", not pressed or self.attention != "softmax", "sparse for a density_target")
        self.require("density_rate", pressed or self.density_rate == 0.1, "left out without a density_target")
        self.conversion()  # says now what is wrong with its numbers

    def conversion(self) -> ConversionCallback | None:
        """Return what adds a distance to the original or a pressure on the density to the loss, if either is asked for."""
        pressure = None if self.density_target is None else DensityTarget(self.density_target, self.density_rate)
        distances = {"distill_logits": self.distill, "distill_encoder": self.distill_encoder}
        if pressure is None and self.task_weight == 1 and not any(distances.values()):
            return None
        return ConversionCallback(pressure, task_weight=self.task_weight, **distances)

    def entmax(self) -> EntmaxConfig | None:
        """As all recipes, in the sites that were chosen."""
        config = super().entmax()
        soft = {"length_scaling": "constant", "length_scaling_init": "softmax"} if self.softened else {}
        return config and config.replace(sites=tuple(self.sites) or None, **soft)


def main(settings: Settings) -> None:
    wheres = dict(zip(names_of_sets(settings.test), settings.test, strict=True))
    read = functools.partial(read_clips, audio=settings.audio, text=settings.text)
    train, dev = [clip for where in settings.train for clip in read(where)], read(settings.dev)
    tests = [read(where) for where in wheres.values()]
    if settings.smoke:
        train, dev, tests = train[:4], dev[:2], [clips[:2] for clips in tests]
    processor, model = load_speech(settings.model, settings.language)
    check_clips([clip for clips in (train, dev, *tests) for clip in clips], processor, model)
    folder = open_folder(settings, "speech", FIELDS)
    set_seed(settings.seed)
    model = make_sparse(model, settings)
    model.get_encoder().requires_grad_(not settings.freeze_encoder)
    collator = Collator(processor, model, settings.freeze_encoder)

    def measure(answers: Any) -> dict[str, float]:
        rates = error_rates(decode(answers.predictions, processor.tokenizer), dev, settings.language)
        return {"score": -rates["wer"], **rates}

    # With a distance or a pressure the loss is the callback's affair, without them the recipes' own.
    conversion = settings.conversion()
    converted = {"callbacks": [conversion], "compute_loss_func": None} if conversion else {}
    more = {"predict_with_generate": True, "remove_unused_columns": False, "per_device_eval_batch_size": 8}
    trainer = RecipeTrainer(
        settings,
        model,
        args=training_arguments(settings, **more),
        train_dataset=labelled(train, processor, model),
        eval_dataset=labelled(dev, processor, model),
        data_collator=collator,
        processing_class=processor,
        compute_metrics=measure,
        **converted,
    )
    best = trainer.fit()
    trainer.compute_metrics, rates = None, {}
    for name, clips in zip(wheres, tests, strict=True):
        heard = decode(trainer.predict(labelled(clips, processor, model)).predictions, processor.tokenizer)
        write_lines(folder / f"hypotheses.{name}.txt", heard)
        rates[name] = error_rates(heard, clips, settings.language)
    measures: dict[str, Any] = trainer.summary() | {
        "model": settings.model,
        "sites": " ".join(settings.sites),
        "data": " ".join(settings.train),
        "dev_wer": round(-trainer.best, 2),
        **{name: round(rate, 2) for name, rate in next(iter(rates.values())).items()},
        "tests": " ".join(f"{name}:wer={r['wer']:.2f},cer={r['cer']:.2f}" for name, r in rates.items()),
    }
    shown, collator.known = labelled(dev, processor, model), None  # the encoder's heads are looked at too
    batches = [send_to_device(collator(shown[i : i + 4]), best.device) for i in range(0, len(shown), 4)]
    measures |= head_statistics(best, batches, FIELDS)
    card = {"data": ", ".join(map(name_of, settings.train)), "main_measures": ["wer", "cer"]}
    finish(settings, "speech", FIELDS, measures, task="automatic-speech-recognition", **card)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
