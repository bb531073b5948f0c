"""The settings of the multilabel studies, from YAML and ``key=value``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import yaml

from common.settings import option

#: By name: the mapping, the setting that holds candidates for its option, and whether the probability above which a label is
#: predicted is tuned (for sparsemax as Martins and Astudillo 2016 do); the others predict their support.
METHODS = {
    "softmax+log": ("softmax", None, True),
    "sparsemax+huber": ("sparsemax", None, True),
    "sparsemax+huber support": ("sparsemax", None, False),
    "sparsemax+hinge": ("sparsemax_hinge", None, False),
    "sparsegen_lin+hinge": ("sparsegen_lin(lam={})", "lams", False),
    "sparsehg+hinge": ("sparsehourglass(q={})", "qs", False),
    "sparsehg+hinge threshold": ("sparsehourglass(q={})", "qs", True),
    "entmax+fy": ("entmax(alpha={})", "alphas", True),
    "entmax+fy support": ("entmax(alpha={})", "alphas", False),
}
WITH_THRESHOLD = [name for name, (*_, tuned) in METHODS.items() if tuned]


@dataclasses.dataclass
class LinearConfig:
    """The linear-model studies."""

    study: str = option("mulan", "mulan or synthetic")
    methods: list[str] = option(list(METHODS), "names in METHODS")
    seeds: list[int] = option([0, 1, 2], "of the validation split and the initialisation (and the synthetic data)")
    folds: int = option(5, "validation folds of the training rows; 1 holds out a quarter of them")
    steps: int = option(400, "full-batch Adam steps, the learning rate decaying linearly to 0")
    lr: float = option(0.05, "learning rate at the start")
    l2: list[float] = option([1e-3, 1e-2, 1e-1], "candidates for the weight of ||W||^2 / 2")
    lams: list[float] = option([-3.0, -1.0, 0.0, 0.5], "candidates for lam of sparsegen-lin")
    qs: list[float] = option([0.1, 0.5, 1.0, 5.0], "candidates for q of sparsehourglass")
    alphas: list[float] = option([1.5], "candidates for alpha of entmax")
    thresholds: list[float] = option([i / 40 for i in range(25)], "candidates for the probability, where it is tuned")
    datasets: list[str] = option(["emotions", "scene", "birds"], "Mulan data sets")
    empty_rows: list[str] = option(
        ["ignore"],
        "rows without labels: ignore leaves them out of training, extra_label gives them one that does not count",
    )
    mean_labels: list[int] = option([], "synthetic: means mu; rows have mu - 1, mu or mu + 1 labels")
    label_ranges: list[int] = option([], "synthetic: ranges r; rows have 5 - r to 5 + r labels")
    lengths: list[int] = option([], "synthetic: document lengths, with Poisson(5) labels")
    n_samples: int = option(5000, "synthetic: rows, of which 20 % are test rows")

    def __post_init__(self) -> None:
        if self.study not in ("mulan", "synthetic"):
            raise ValueError(f"study={self.study!r}: choose mulan, synthetic or text.")
        if unknown := sorted(set(self.methods) - set(METHODS)):
            raise ValueError(f"methods: {unknown} are unknown; choose from {list(METHODS)}.")
        if unknown := sorted(set(self.empty_rows) - {"ignore", "extra_label"}):
            raise ValueError(f'empty_rows: {unknown} are unknown; choose from "ignore" and "extra_label".')
        if self.folds < 1 or self.steps < 1:
            raise ValueError(f"folds={self.folds} and steps={self.steps} must be at least 1.")


@dataclasses.dataclass
class TextConfig:
    """The text study."""

    study: str = option("text", "text")
    data: str = option("english_verbs", "english_verbs (built in), or a name for the files below")
    files: dict[str, str] = option({}, "TSV files by split (train, validation, test)")
    text_column: int = option(0, "column of the text in them, from 0")
    label_column: int = option(1, "column of the semicolon-separated labels, from 0")
    limit: int | None = option(None, "use at most so many rows of each split")
    outputs: list[str] = option(
        ["softmax", "sparsemax", "entmax", "sparsemax_hinge", "sparsehourglass"],
        "multilabel losses by name, perhaps with options: sparsehourglass(q=1)",
    )
    attentions: list[dict[str, Any]] = option([{"alpha": 1.0}], "attention mappings, each with fields of EntmaxConfig")
    seeds: list[int] = option([0, 1, 2], "of initialisation and batches")
    hidden: int = option(64, "width of the model; heads have 16 dimensions")
    layers: int = option(2, "number of layers")
    epochs: int = option(5, "passes over the training rows; the epoch with the best validation micro-F1 is tested")
    batch_size: int = option(64, "rows per step")
    lr: float = option(2e-3, "peak; linear warm-up over a tenth of the steps, then linear decay")
    thresholds: list[float] = option([i / 40 for i in range(25)], "candidates for softmax, chosen on validation rows")

    def __post_init__(self) -> None:
        if self.data != "english_verbs" and set(self.files) != {"train", "validation", "test"}:
            raise ValueError(f"files={self.files} must name the splits train, validation and test of {self.data!r}.")
        if self.hidden % 16:
            raise ValueError(f"hidden={self.hidden} must be a multiple of 16, the width of a head.")


def smoke_config(study: str) -> dict[str, Any]:
    """Return a configuration for a few seconds of everything."""
    if study == "text":
        return {"study": "text", "data": "english_verbs", "limit": 96, "epochs": 1, "seeds": [0], "hidden": 16}
    small = {"seeds": [0], "folds": 2, "steps": 10, "l2": [1e-2], "lams": [0.0], "qs": [1.0]}
    return {"study": "synthetic", "mean_labels": [3], "label_ranges": [2], "lengths": [50], "n_samples": 60, **small}


def build_config(values: dict[str, Any]) -> Any:
    """Make the configuration of the study that ``values["study"]`` names.

    Raises:
        ValueError: for keys that the study does not have.
    """
    kind = TextConfig if values.get("study") == "text" else LinearConfig
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"unknown configuration keys {unknown}; {kind.__name__} has {known}.")
    return kind(**values)


def overrides(pairs: list[str]) -> dict[str, Any]:
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is not of the form key=value.")
        values[key] = yaml.safe_load(value)
    return values


def read_arguments(description: str, arguments: list[str] | None) -> list[tuple[Any, Path]]:
    """Return the studies that the command line asks for, each with the file for its results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a YAML file of recipes/configs")
    parser.add_argument("--out", type=Path, help="CSV file; default: recipes/results/multilabel/STUDY.csv")
    parser.add_argument("--smoke", action="store_true", help="run all studies in a few seconds, on built-in data")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    options = parser.parse_args(arguments)
    if options.smoke == (options.config is not None):
        parser.error("give either --config or --smoke.")
    try:
        if options.smoke:
            configs = [build_config(smoke_config(study)) for study in ("synthetic", "text")]
        else:
            plan = yaml.safe_load(options.config.read_text(encoding="utf-8"))
            configs = [build_config({**plan, **overrides(options.overrides)})]
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    folder = Path("smoke") if options.smoke else Path(__file__).parents[1] / "results"
    files = [options.out or folder / "multilabel" / f"{config.study}.csv" for config in configs]
    return list(zip(configs, files, strict=True))
