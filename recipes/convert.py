"""Make a pretrained softmax model sparse, and report quality against sparsity on the way.

    python recipes/convert.py --config recipes/configs/convert_wikitext2.yaml --model runs/lm-softmax/model --out runs/lm-sparse
    python recipes/convert.py --config ... --model ... --out ... --attention 1.5 --schedule abrupt   # fixed, at once
    python recipes/convert.py --config ... --model ... --out ... --attention softmax                 # the control: train on
    python recipes/convert.py --config recipes/configs/convert_multi30k.yaml --model runs/mt-softmax/model --out runs/mt-sparse \
        --distill_logits 1.0 --distill_attention 1.0 --density_target 0.2
    python recipes/convert.py --config ... --model openai-community/gpt2 --out ... --lora_rank 8     # adapters and alphas only
    python recipes/convert.py --config recipes/configs/convert_smollm2.yaml --model models/smollm2 --out runs/smollm2-sparse \
        --schedule abrupt --release 1.5 --loss_budget 0 --loss_rate 0.1 --alpha_lr 0.01  # within the loss of the softmax model
    torchrun --standalone --nproc_per_node 2 recipes/convert.py --config ... --out ...             # two CPU processes

The model is a causal language model (data: ``--data``), an encoder-decoder (data: sentence pairs, ``--train``, ``--dev``,
``--test``) or an encoder of sentences (texts and what means the same, by the same options; `common.sentences` defines its loss and
measures). Alpha starts at ``--start`` (1: still a softmax), moves to its target over the share ``--over`` of training, and is then
held (``--attention 1.5``) or let go (``--attention learned``, from ``--release`` on). The loss is that of
`hf_entmax.training.ConversionCallback`: the task, distances to the frozen softmax model, and pressure on the density. It grows
while the density is above ``--density_target``; with ``--loss_budget`` density is the objective, and the pressure falls while the
loss is further above the softmax model's than that. Alphas are then best free and sparse from the start (``--schedule abrupt
--release 1.5 --softened true``): weights recover faster than alphas grow. A ``--model`` that is sparse already, e.g. from
`hf_entmax.sparsify`, goes on from its own alphas; its teacher has the same weights and softmax, or is another (``--teacher``).

Each evaluation is a row of ``curve.csv`` (and of ``RESULTS_curve.csv`` beside ``--results``): before, after patching without any
training, and on the way. The model kept is the last one: a conversion that stopped early would not be one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import AutoConfig, AutoTokenizer

import hf_entmax
from common import conversion_tasks as tasks
from common.conversion_settings import ConversionSettings as Settings
from common.curve import Curve
from common.folder import check_model, open_folder
from common.heads import head_statistics
from common.pretrained import check_length
from common.results import finish
from common.settings import parse
from common.trainer import RecipeTrainer, training_arguments
from hf_entmax import alphas, is_patched, patch_model
from hf_entmax.integration.interface import HEADS_MODULE
from hf_entmax.integration.labels import divides_by_items
from hf_entmax.integration.output_loss import output_losses


class ConversionTrainer(RecipeTrainer):
    """Evaluates quality and sparsity side by side, and keeps each evaluation as a row of a curve."""

    task: tasks.Task
    curve: Curve
    constraint: Any

    def point(self, model: Any, stage: str, **more: float) -> dict[str, float]:
        """Measure a model on dev: quality, density, alphas."""
        found = self.task.dev(model)
        if broken := [name for name, value in found.items() if math.isnan(value)]:
            raise ValueError(
                f"{', '.join(broken)} of dev: not a number. The model is broken, or its training has failed."
            )
        found |= {**head_statistics(model, self.task.probe), **more}
        if is_patched(model) and hf_entmax.entmax_config(model).mapping == "entmax":
            values = torch.cat([site.flatten() for site in alphas(model).values()])
            values = values[~values.isnan()]
            found |= {f"alpha_{name}": float(getattr(values, name)()) for name in ("mean", "min", "max")}
        self.accelerator.print(f"{stage}: " + "  ".join(f"{name} {value:.4g}" for name, value in found.items()))
        self.curve.add(stage, self.state.global_step, found)
        return found

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the student where it stands."""
        model = tasks.base_model(tasks.whole(self.accelerator.unwrap_model(self.model)).eval())
        pressure = {"pressure": self.constraint.multiplier} if self.constraint else {}
        metrics = {f"eval_{name}": value for name, value in self.point(model, "training", **pressure).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def main(settings: Settings) -> None:
    for folder in filter(None, (settings.model, settings.teacher)):
        check_model(folder)
    kind = tasks.kind_of(settings, AutoConfig.from_pretrained(settings.model))
    data, tokenizer = tasks.read_data(settings, kind), AutoTokenizer.from_pretrained(settings.model)
    model, teacher = tasks.load(kind, settings), tasks.load_teacher(kind, settings)
    going_on = is_patched(model)
    if going_on:
        settings.check_going_on(model)
    for each in (model, teacher):  # a teacher of its own may see less than the model, or later tokens
        check_length(each, getattr(settings, kind.longest), kind.longest)
        kind.check(each)
    curve = Curve(settings, kind.curve)
    open_folder(settings, "convert", kind.fields)
    teacher.to(PartialState().device)
    set_seed(settings.seed)
    config = settings.student()
    if config is not None and not going_on:
        patch_model(model, config)
    if settings.lora_rank:
        model = tasks.add_adapters(model, settings.lora_rank, kind)
    if settings.freeze_weights:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f".{HEADS_MODULE}." in name)
    task, schedule = tasks.make_task(kind, settings, data, tokenizer, teacher), settings.alpha_schedule()
    conversion = settings.callback(teacher, task.distance)
    changes = {"load_best_model_at_end": False, "metric_for_best_model": None}
    trainer = ConversionTrainer(
        settings,
        model,
        args=training_arguments(settings, **changes, restore_callback_states_from_checkpoint=False),
        train_dataset=task.examples,
        eval_dataset=task.probe,
        data_collator=task.collate,
        processing_class=tokenizer,
        callbacks=[conversion, *([schedule] if schedule else [])],
        compute_loss_func=None,  # the callback adds to the model's own
    )
    # Where that is a mean, the Trainer would else add up the parts of a step.
    trainer.model_accepts_loss_kwargs = divides_by_items(model) or bool(output_losses(model))
    trainer.length_lr = settings.length_lr
    trainer.task, trainer.curve, trainer.constraint = task, curve, conversion.constraint
    if not curve.has("patched" if config else "before", 0):
        trainer.point(teacher, "before")
        if schedule:
            hf_entmax.set_alphas(tasks.base_model(model), schedule.schedule.end)
        if config is not None:
            trainer.point(tasks.base_model(model.eval()), "patched")
    student = tasks.base_model(trainer.fit())
    before, after = task.test(teacher, "before"), task.test(student, "after")
    measures: dict[str, Any] = {name: value for name, value in trainer.summary().items() if name != "best_step"}
    measures |= {f"{name}_before": round(value, 4) for name, value in before.items()}
    measures |= {name: round(value, 4) for name, value in after.items()}
    measures |= {name: value for name in kind.fields if (value := getattr(settings, name, None)) is not None}
    measures |= {"lost": round(tasks.lost(before, after), 4), **head_statistics(student, task.probe)}
    if kind.keys:
        measures["keys"] = head_statistics(teacher, task.probe)["support_encoder_self"]
    measures |= {"data": settings.train or settings.data, "model": tasks.model_name(settings.model)}
    curve.share()
    card = {"data": str(measures["data"]), "main_measures": [kind.main, "density"]}
    finish(settings, "convert", kind.fields, measures, task=kind.hub_task, **card)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
