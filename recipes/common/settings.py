"""Settings of a recipe: a dataclass, filled from YAML files and from the command line, and the model that they ask for."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser, SchedulerType

from hf_entmax import EntmaxConfig, entmax_config, is_patched, patch_model
from hf_entmax.ops.controllable import ATTENTION_MAPPINGS


def option(default: Any, help: str) -> Any:
    """Make a field of a settings class with its help text."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class RunSettings:
    """Settings of every training recipe."""

    out: str = option("", "folder of the run: model, checkpoint, log; must not hold another run")
    attention: str = option("softmax", "softmax, a fixed alpha such as 1.5, learned, or a mapping like sparsegen_lin")
    mapping_options: str = option("", "YAML mapping of that mapping's options, e.g. '{lam: 0.5}'")
    alpha_init: str = option("normal", "where a learned alpha starts: a number between 1 and 2, or normal: a ~ N(0, 1)")
    output_alpha: float = option(1.0, "alpha of the output probabilities and loss; 1 is softmax with cross-entropy")
    seed: int = option(0, "of initialisation, order of the data and dropout")
    epochs: int = option(10, "passes over the training data")
    batch_size: int = option(64, "examples per optimiser step, over all processes and accumulation steps")
    gradient_accumulation: int = option(1, "forward and backward passes per optimiser step")
    lr: float = option(1e-3, "peak learning rate")
    alpha_lr: float | None = option(None, "peak learning rate of learned alphas (default: lr)")
    weight_decay: float = option(0.01, "AdamW's; never on alphas, biases and norms")
    warmup: int = option(400, "steps of linear warm-up")
    lr_scheduler: str = option(
        "inverse_sqrt", "how lr falls after the warm-up: a scheduler of Transformers, e.g. linear"
    )
    clip_norm: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    mixed_precision: str | None = option(None, "no, bf16 or fp16; default: as accelerate is configured")
    patience: int = option(0, "stop after so many evaluations without a better dev score; 0 never stops early")
    checkpoint_steps: int = option(0, "write a checkpoint every so many steps too, not only after each epoch")
    log_steps: int = option(20, "report every so many optimiser steps")
    report_to: list[str] = option([], "trackers: tensorboard, wandb, trackio, ...")
    results: str = option("", "CSV file to append the final numbers to")
    resume: bool = option(False, "go on with the run in --out where its last checkpoint stands")
    smoke: bool = option(False, "two steps on a few examples, to see that everything runs")
    push_to_hub: str = option("", "Hub repository to upload the finished model to")

    def __post_init__(self) -> None:
        self.require_at_least(epochs=1, batch_size=1, gradient_accumulation=1, log_steps=1)
        self.require("warmup", self.warmup >= 1, "at least 1 step")
        self.require_at_least(lr=0, weight_decay=0, clip_norm=0, patience=0, checkpoint_steps=0)
        self.require("lr_scheduler", self.lr_scheduler in list(SchedulerType), f"one of {', '.join(SchedulerType)}")
        self.require("alpha_lr", self.alpha_lr is None or self.alpha_lr >= 0, "at least 0")
        self.require("mixed_precision", self.mixed_precision in (None, "no", "bf16", "fp16"), "one of no, bf16, fp16")
        # NumPy's seeds end there, and every process adds its number.
        self.require("seed", 0 <= self.seed < 2**32 - 2**16, f"at least 0 and below {2**32 - 2**16}")
        self.entmax()  # says now what is wrong with attention, mapping_options, alpha_init and output_alpha

    def require(self, name: str, right: bool, allowed: str) -> None:
        """Raise ``ValueError`` that names a setting, what was given and what is allowed."""
        if not right:
            raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: it must be {allowed}.")

    def require_at_least(self, **least: int) -> None:
        """Raise ``ValueError`` where one of these settings is smaller."""
        for name, bound in least.items():
            self.require(name, getattr(self, name) >= bound, f"at least {bound}")

    def entmax(self) -> EntmaxConfig | None:
        """Return how the model is to be patched; None where attention and output are softmax."""
        kind, start = self.attention, self.alpha_init
        output = None if self.output_alpha == 1.0 else self.output_alpha
        try:
            chosen = yaml.safe_load(self.mapping_options) if self.mapping_options else {}
        except yaml.YAMLError as error:
            raise ValueError(f"mapping_options={self.mapping_options!r} is not YAML: {error}") from error
        self.require("mapping_options", isinstance(chosen, dict), "a YAML mapping such as '{lam: 0.5}'")
        self.require("alpha_init", start == "normal" or _number(start), "normal or a number between 1 and 2")
        if start != "normal" and kind != "learned":
            raise ValueError(f"alpha_init={start} would have no effect: attention={kind} learns no alpha.")
        fields: dict[str, Any] = {"mapping_options": chosen} if chosen else {}
        if kind == "learned":
            fields |= {"alpha": "learned", "alpha_init": start if start == "normal" else float(start)}
        elif kind == "softmax" or _number(kind):
            fields["alpha"] = 1.0 if kind == "softmax" else float(kind)
        else:
            known = f"softmax, learned, a number from 1 on, or one of {', '.join(sorted(ATTENTION_MAPPINGS))}"
            self.require("attention", kind in ATTENTION_MAPPINGS, known)
            ATTENTION_MAPPINGS[kind].settings(chosen)  # says what is wrong with them
            fields["mapping"] = kind
        config = EntmaxConfig(**fields, output_alpha=output)
        return None if kind == "softmax" and output is None else config


def attention_and_output(model: Any) -> dict[str, Any]:
    """Return attention and output of a model, in the words of the settings."""
    if not is_patched(model):
        return {"attention": "softmax", "output_alpha": 1.0}
    config = entmax_config(model)
    attention = config.alpha if config.mapping == "entmax" else config.mapping
    return {"attention": "softmax" if attention == 1.0 else str(attention), "output_alpha": config.output_alpha or 1.0}


def make_sparse(model: Any, settings: RunSettings) -> Any:
    """Patch a model as the settings say; softmax in attention and output leaves it as it is.

    A model that is sparse already is trained on as it is.

    Raises:
        ValueError: if it is sparse in another way than the settings say, or has alphas and they say where these start.
    """
    config = settings.entmax()
    if is_patched(model):
        kind, held = attention_and_output(model), entmax_config(model)
        names = ("mapping", "mapping_options", "output_alpha")
        same = config is not None and all(getattr(config, name) == getattr(held, name) for name in names)
        if not (same and (config.mapping != "entmax" or config.alpha == held.alpha)):
            options = " ".join(f"--{name} {value}" for name, value in kind.items())
            more = f" with mapping_options {held.mapping_options}" if held.mapping_options else ""
            raise ValueError(
                f"the model is sparse already ({options}{more}), and the settings say attention={settings.attention} with "
                f"output_alpha={settings.output_alpha}: give its own to train it on, or a model with softmax."
            )
        if settings.alpha_init != "normal":
            raise ValueError(
                f"alpha_init={settings.alpha_init} would have no effect: the model has alphas already. Leave it out."
            )
        return model
    return model if config is None else patch_model(model, config)


SettingsT = TypeVar("SettingsT", bound=RunSettings)


def parse(settings_class: type[SettingsT], description: str, arguments: list[str] | None = None) -> SettingsT:
    """Read ``--config`` files, then the options after them; what comes later wins.

    Exits with status 2 and one line that says what is wrong, for options that do not exist and values that are not allowed.

    Args:
        settings_class: a dataclass; every field becomes an option ``--name`` and may stand in a YAML file.
        description: for ``--help``; its first paragraph is shown.
        arguments: the command line; default ``sys.argv[1:]``.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", action="append", default=[])
    given, rest = files.parse_known_args(arguments)
    parser = HfArgumentParser(settings_class, description=description.strip().split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--config", action="append", help="YAML file of settings; may be given several times")
    names = ["--help", "--config", *(f"--{field.name}" for field in dataclasses.fields(settings_class))]
    try:
        words = [word for file in given.config for word in _words(Path(file))] + rest
        for word in words:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in names:
                near = "".join(f" Did you mean {name}?" for name in difflib.get_close_matches(option, names, n=1))
                raise ValueError(f"there is no option {option}.{near} There are: {', '.join(names)}.")
        return parser.parse_args_into_dataclasses(words, look_for_args_file=False)[0]
    except (ValueError, TypeError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _words(path: Path) -> list[str]:
    """Return the settings of a YAML file as command-line words, so that both are read in the same way."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings, `name: value` line by line, not a {type(values).__name__}.")
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            text = yaml.safe_dump(value, default_flow_style=True).strip() if isinstance(value, dict) else value
            words.append(f"--{name}={text}")
    return words


def _number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
