"""Options of the Trainer, and the trackers it reports to."""

import json

import pytest
import tiny_models as tiny
import torch
import transformers as tf

from hf_entmax import alphas, is_patched, patch_model
from hf_entmax.training import AlphaLoggingCallback

pytestmark = pytest.mark.slow


def _rows(family):
    batch = tiny.inputs(family, batch=8, labels=True)
    return [{name: values[i] for name, values in batch.items()} for i in range(8)]


def _train(tmp_path, family="llama", callbacks=(), trainer=tf.Trainer, arguments=tf.TrainingArguments, **options):
    model = patch_model(tiny.build(family), alpha_init=1.4)
    before = {site: values.clone() for site, values in alphas(model).items()}
    given = arguments(
        **{
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        }
    )
    made = trainer(
        model=model, args=given, train_dataset=_rows(family), eval_dataset=_rows(family), callbacks=list(callbacks)
    )
    made.train()
    assert is_patched(model)
    for site, values in alphas(model).items():
        assert (values != before[site]).all() and values.isfinite().all()
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.1, "optim": "adafactor"},
        {"neftune_noise_alpha": 5.0},
        {"label_smoothing_factor": 0.1},
        {"auto_find_batch_size": True},
        {"torch_empty_cache_steps": 1},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.works_with(
    "Transformers' Trainer",
    "bf16, gradient checkpointing and accumulation, clipping, Adafactor, NEFTune, label smoothing, batch size finder",
)
def test_options_of_the_trainer_train_every_alpha(tmp_path, options):
    _train(tmp_path, **options)


@pytest.mark.works_with("Transformers' Trainer", "best model at the end, resuming from a checkpoint")
def test_the_trainer_loads_its_best_model_and_resumes(tmp_path):
    options = dict(save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1, seed=3)
    whole = _train(tmp_path / "whole", load_best_model_at_end=True, **options)
    best = tf.AutoModelForCausalLM.from_pretrained(whole.state.best_model_checkpoint)
    for site, values in alphas(best).items():
        assert torch.equal(values, alphas(whole.model)[site])
    again = _train(tmp_path / "again", **options)
    again.args.max_steps = 3
    again.train(resume_from_checkpoint=str(tmp_path / "again" / "run" / "checkpoint-2"))
    assert again.state.global_step == 3


@pytest.mark.works_with("Transformers' Trainer", "Seq2SeqTrainer with predict_with_generate")
def test_the_trainer_generates(tmp_path):
    made = _train(
        tmp_path,
        "bart",
        trainer=tf.Seq2SeqTrainer,
        arguments=tf.Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=6,
        generation_num_beams=2,
    )
    assert made.predict(made.eval_dataset).predictions.shape[0] == 8


@pytest.mark.works_with("tensorboard", "gets the alphas from AlphaLoggingCallback")
def test_tensorboard_gets_the_alphas(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    _train(tmp_path, report_to=["tensorboard"], callbacks=[AlphaLoggingCallback()])
    read = events.EventAccumulator(str(next((tmp_path / "logs").rglob("events*")).parent)).Reload()
    assert any("alpha" in tag for tag in read.Tags()["scalars"])


@pytest.mark.works_with("wandb", "offline; gets the alphas from AlphaLoggingCallback")
def test_wandb_gets_the_alphas(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    logged = []
    _train(tmp_path, report_to=["wandb"], callbacks=[AlphaLoggingCallback(), _Spy(lambda: wandb.run, logged)])
    wandb.finish()
    assert list(tmp_path.rglob("*.wandb")) and any("alpha" in name for name in logged)


class _Spy(tf.TrainerCallback):
    """Keeps the names that a tracker holds."""

    def __init__(self, run, names):
        self.run, self.names = run, names

    def on_log(self, *_, **__):
        if self.run() is not None:
            self.names += list(dict(self.run().summary))


@pytest.mark.works_with("trackio", "without network; gets the alphas from AlphaLoggingCallback")
def test_trackio_gets_the_alphas(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    rows = []
    send = trackio.Run.log
    monkeypatch.setattr(
        trackio.Run, "log", lambda self, metrics, *a, **k: (rows.append(metrics), send(self, metrics, *a, **k))[1]
    )
    _train(tmp_path, report_to=["trackio"], callbacks=[AlphaLoggingCallback()])
    assert any("alpha" in name for row in rows for name in row), json.dumps(rows, default=str)[:500]
