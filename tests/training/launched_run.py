"""Run by ``accelerate launch``: train a patched model with the Trainer, save it, write what this process saw."""

import copy
import json
import sys
from pathlib import Path

import tiny_models as tiny
import torch
import transformers as tf
from test_training import Pairs

from hf_entmax import alphas, patch_model
from hf_entmax.training import AlphaLoggingCallback


def main(out: Path) -> None:
    model = patch_model(tiny.build("bart", attn_implementation="eager"), alpha_init=1.4, output_alpha=1.5)
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    arguments = tf.TrainingArguments(
        output_dir=str(out / "run"), max_steps=3, per_device_train_batch_size=int(sys.argv[2]), logging_steps=1, learning_rate=1e-2,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, seed=1,
    )  # fmt: skip
    trainer = tf.Trainer(
        model=model,
        args=arguments,
        train_dataset=Pairs("bart"),
        eval_dataset=Pairs("bart"),
        callbacks=[AlphaLoggingCallback(statistics=False)],
    )
    # A Trainer and a model of its own: evaluating first would keep the other one from being wrapped for training.
    aside = tf.Trainer(model=copy.deepcopy(model), args=arguments, eval_dataset=Pairs("bart"))
    untrained = aside.evaluate()["eval_support_size"]
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(str(out / "model"))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    table = {site: values.tolist() for site, values in alphas(model).items()}
    seen = {
        "losses": losses,
        "alphas": table,
        "support": metrics["eval_support_size"],
        "untrained_support": untrained,
        "processes": trainer.accelerator.num_processes,
    }
    (out / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
