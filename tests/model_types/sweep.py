"""Check every model type of the installed Transformers, each in a process of its own, and write the table.

python tests/model_types/sweep.py                       # all, on top of the rows that are there
python tests/model_types/sweep.py --only llama,vit --again
python -m recipes.lab page                         # then: the list in docs/compatibility.md is made from the table
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.modeling_utils  # noqa: E402 - here once, not in every process that is forked

from recipes.lab.pages.model_types import (  # noqa: E402
    CHECKS,
    CONFIGURATION,
    LARGE,
    NO_INPUTS,
    ONLY_INSIDE,
    PACKAGE,
    PART,
    TIME,
    faults,
)

TABLE = HERE.parents[1] / "model_cards" / "model_types.csv"
TIMEOUT = 120


def told(error: BaseException) -> str:
    """The first line of an error, without the folders of this machine."""
    text = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
    return re.sub(r"/\S*/site-packages/", "", text)[:200]


def reason(error: BaseException) -> str:
    """Why a model type was not built or not run; what stands before the first colon is one of `NOT_BUILT`."""
    text = told(error)
    if isinstance(error, ImportError):
        packages = re.findall(r"requires? the (\S+) library|named '(\w+)'", str(error))
        return f"{PACKAGE}: {' '.join(name for both in packages for name in both if name) or text}"
    if str(error).startswith("too large"):
        return f"{LARGE}: {str(error).partition(': ')[2]}"
    if type(error).__name__ == "NotRun":
        return str(error) if str(error).startswith(ONLY_INSIDE) else f"{NO_INPUTS}: {error}"
    return f"{CONFIGURATION}: {text}"


def forked(work: Callable[[], dict[str, str]], seconds: int) -> dict[str, str]:
    """What a function returns in a process of its own; a crash or a timeout is told in "error"."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        signal.alarm(seconds)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            answer = work()
        except BaseException as error:
            answer = {"error": told(error)}
        with os.fdopen(sender, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if text:
        return json.loads(text)
    ended = TIME if os.WTERMSIG(status) == signal.SIGALRM else f"the process died (status {status})"
    return {"error": ended}


def row_of(model_type: str, folder: Path) -> dict[str, str]:
    """The row of one model type; runs in a process of its own."""
    try:
        return _best_row(model_type, folder)
    except Exception as error:
        return {"verdict": "not built", "reason": reason(error)}


def _best_row(model_type: str, folder: Path) -> dict[str, str]:
    from building import attempts
    from checks import check

    started, problem = time.monotonic(), ""
    best: dict[str, str] = {}
    for tried, (cls, config, size) in enumerate(attempts(model_type)):
        if size.short and best.get("verdict") == "no attention":
            continue  # only more layers could show some
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            row = check(cls, config, folder)
        except Exception as error:
            if not problem or problem.startswith(LARGE):  # that of the smallest model
                problem = reason(error)
        else:
            if row["verdict"] == "refused" or reached(row) == 1:
                return row
            if not best or reached(row) > reached(best):
                best = row
            if (row["verdict"] == "accepted" and (tried >= 3 or reached(row) >= 0.5)) or not size.short:
                break
        if time.monotonic() - started > TIMEOUT / 3:
            break
    return best or {"verdict": "not built", "reason": problem or PART}


def reached(row: dict[str, str]) -> float:
    """Share of the attention modules that some run reaches; none where there are none."""
    if row["verdict"] != "accepted":
        return 0.0
    run, total = map(int, row["sites_run"].split("/"))
    return run / total


def loud(folder: Path, name: str) -> dict[str, str]:
    """Whether a saved model refuses to load where hf_entmax was never imported."""
    assert "hf_entmax" not in sys.modules
    cls = getattr(transformers, name, None) or transformers.AutoModel
    for implementation in (None, "eager", "sdpa"):
        try:
            cls.from_pretrained(folder, attn_implementation=implementation)
        except Exception:
            continue
        return {"loud_without_plugin": f"loads with attn_implementation={implementation!r}"}
    return {"loud_without_plugin": "ok"}


def load_plugin() -> None:
    import hf_entmax

    _ = hf_entmax.patch_model


def batch(model_types: list[str], folder: Path) -> dict[str, str]:
    """Rows of several model types, where the plugin is imported once; appended to a file as they come."""
    load_plugin()
    gc.freeze()  # else the first collection of every process would copy all that they share
    with (folder / "rows.jsonl").open("a") as file:
        for model_type in model_types:
            started = time.monotonic()
            row = forked(lambda m=model_type: row_of(m, folder / m), TIMEOUT)
            if "error" in row:
                row = {"verdict": "not built", "reason": row["error"]}
            row["seconds"] = f"{time.monotonic() - started:.0f}"
            file.write(json.dumps({"model_type": model_type, **row}) + "\n")
            file.flush()
    return {}


def sweep(model_types: list[str], on_row: Callable[[dict[str, str]], None], size: int = 16) -> None:
    """Check model types and hand over their rows."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()
    for start in range(0, len(model_types), size):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            forked(lambda t=model_types[start : start + size], f=folder: batch(t, f), TIMEOUT * size)
            rows = folder / "rows.jsonl"
            for line in rows.read_text().splitlines() if rows.exists() else ():
                row = json.loads(line)
                saved = folder / row["model_type"]
                if row["verdict"] == "accepted" and (saved / "outputs.pt").exists():
                    answer = forked(lambda s=saved, c=row["class"]: loud(s, c), TIMEOUT)
                    row["loud_without_plugin"] = answer.get("loud_without_plugin") or answer["error"]
                on_row(row)
    gc.unfreeze()


def model_types() -> list[str]:
    """All of the installed Transformers."""
    return sorted(transformers.models.auto.configuration_auto.CONFIG_MAPPING.keys())


def columns() -> list[str]:
    """Of the table."""
    first = ["model_type", "class", "kind", "verdict", "reason", "sites", "sites_run", "unpatched_softmax"]
    return [*first, *CHECKS, "parameters", "transformers", "torch"]


def read(path: Path = TABLE) -> dict[str, dict[str, str]]:
    """Model type -> its row."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["model_type"]: row for row in csv.DictReader(file) if row["verdict"] != "not checked"}


def write(rows: dict[str, dict[str, str]], path: Path = TABLE) -> None:
    """The table, sorted by model type; those that are still to come say so."""
    waiting = {name: {"model_type": name, "verdict": "not checked"} for name in model_types()}
    rows = {**waiting, **rows} if path == TABLE else rows
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns(), extrasaction="ignore", restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--again", action="store_true", help="check those that have a row, too")
    parser.add_argument("--part", default="0/1", help="of the model types only this part, e.g. 1/2")
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else model_types()
    part, parts = map(int, options.part.split("/"))
    rows = read(options.table)
    todo = [name for name in names if options.again or name not in rows][part::parts]

    def keep(row: dict[str, str]) -> None:
        rows[row["model_type"]] = {**row, "transformers": transformers.__version__, "torch": torch.__version__}
        write(rows, options.table)
        wrong = faults({**dict.fromkeys(CHECKS, ""), **row}) if row["verdict"] == "accepted" else {}
        said = row["verdict"], row.get("sites_run", ""), row.get("reason", ""), wrong or "", row.get("seconds")
        print(row["model_type"], *said, flush=True)

    sweep(todo, keep)


if __name__ == "__main__":
    main()
