"""What a finished run says: its row in a CSV file, with its origin, and the numbers in the model's card."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData

from common.row_file import NOT_IN_COMMAND, Results, origin
from common.settings import RunSettings
from hf_entmax.analysis.reading.tables import HUB
from hf_entmax.integration.card import MARKER

#: The last columns of every table of runs.
END = "steps best_step train_seconds tokens_per_second processes command hardware versions"


def columns(*names: str) -> tuple[str, ...]:
    """Names between blanks, as a tuple."""
    return tuple(" ".join(names).split())


def finish(settings: RunSettings, recipe: str, fields: Sequence[str], measures: dict[str, Any], **card: Any) -> None:
    """Say the numbers, write ``result.json``, the model card and the row of results, and upload the model if asked to.

    Args:
        settings: of the recipe.
        recipe: its name.
        fields: columns of the results file; none where it takes other rows than this one.
        measures: the numbers.
        card: see `write_card`.
    """
    state, folder = PartialState(), Path(settings.out)
    model = folder / "model" if (folder / "model").exists() else folder  # an ensemble has no model of its own
    if state.is_main_process:
        row = {"attention": settings.attention, "output_alpha": settings.output_alpha, "seed": settings.seed}
        row |= {"mapping_options": settings.mapping_options} if "mapping_options" in fields else {}
        row |= {**measures, "processes": state.num_processes}
        show(measures)
        row |= origin(NOT_IN_COMMAND, ("--report_to",), ("accelerate",))
        finished = (folder / "result.json").exists()
        (folder / "result.json").write_text(strict_json(row), encoding="utf-8")
        write_card(model, recipe, row, **card)
        if settings.results and fields and not settings.smoke:
            book = Results(Path(settings.results), fields)
            # A finished run that is resumed only tests again.
            if not (finished and book.has(command=row["command"])):
                book.add(**row)
        if settings.push_to_hub:
            HfApi().create_repo(settings.push_to_hub, exist_ok=True)
            HfApi().upload_folder(repo_id=settings.push_to_hub, folder_path=model, ignore_patterns="training_args.bin")
    state.wait_for_everyone()


def show(measures: dict[str, Any]) -> None:
    """Print every number that was measured, on the main process."""
    PartialState().print("\n".join(f"{name:24} {value}" for name, value in measures.items() if value not in ("", None)))


def strict_json(row: dict[str, Any]) -> str:
    """Write JSON that every reader takes: a number that is not finite becomes null, and ``not_finite`` says what it was.

    {"perplexity": null, "not_finite": {"perplexity": "inf"}}
    """
    odd = {name: str(v) for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps({**row, **dict.fromkeys(odd)} | ({"not_finite": odd} if odd else {}), indent=1, allow_nan=False)


def write_card(
    folder: Path, recipe: str, row: dict[str, Any], *, task: str, data: str, main_measures: Sequence[str]
) -> None:
    """Add the measured numbers to the model's card, or write one where ``save_pretrained`` wrote none.

    Args:
        folder: of the model.
        recipe: its name.
        row: the numbers.
        task: the Hub's name of the task, e.g. ``"translation"``.
        data: name of the data.
        main_measures: those that stand in the card's metadata.
    """
    path, heading = folder / "README.md", f"\n## Results\n\nTrained by `recipes/{recipe}.py` of hf_entmax on "
    if path.exists():
        # The line that marks the card as the plugin's goes: a later save_pretrained must not overwrite these numbers.
        card = ModelCard(path.read_text(encoding="utf-8").replace(MARKER + "\n", ""))
    else:
        header = ModelCardData(library_name="transformers", tags=["hf_entmax"]).to_yaml()
        card = ModelCard(f"---\n{header}\n---\n\n# {recipe}\n\nA softmax baseline of hf_entmax's recipes.\n")
    table = "".join(f"| {name} | {value} |\n" for name, value in row.items() if value not in ("", None))
    text = card.text.partition(heading)[0].rstrip()  # without what an earlier test found
    card.text = f"{text}\n{heading}{data}.\n\n| measure | value |\n|---|---|\n{table}"
    card.data.model_name = f"{recipe} {row['attention']}/{row['output_alpha']}"
    kind = {"task_type": task, "dataset_type": data, "dataset_name": data}
    card.data.eval_results = [EvalResult(**kind, metric_type=name, metric_value=row[name]) for name in main_measures]
    card.save(path)


def name_of(where: str) -> str:
    """Return what a card calls the data: the data set of the Hub, else the folder that holds the files, else the file."""
    if where.startswith(HUB):
        return where.removeprefix(HUB).partition("@")[0].partition("#")[0]
    fixed = where.partition("{")[0]
    folder = Path(fixed) if fixed.endswith("/") else Path(fixed).parent
    return folder.name or Path(where).name.partition(".")[0]
