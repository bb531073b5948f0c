"""What docs/compatibility.md says of model types, tools and versions.

Their rows are in `model_cards/model_types.csv`, which `tests/model_types/sweep.py` writes, `tests/works_with.csv` and `tests/versions.csv`.
"""

from __future__ import annotations

from ..rows import CARDS, ROOT, Row, Rows, distinct, row_table, table

#: The checks of a model type: columns of the table, in their order.
CHECKS = (
    "alpha_1_equals_eager", "every_alpha_gets_a_gradient", "no_softmax_in_attention", "causal", "padding", "cached",
    "save_and_load", "unpatch", "loud_without_plugin",
)  # fmt: skip

#: Why a model type was not built or not run: what its reason begins with.
PART = "no class of Transformers loads it by itself, only the model that it is a part of"
ONLY_INSIDE = "takes what the model around it computes"
PACKAGE = "needs a package that is not installed"
CONFIGURATION = "its default configuration, made small, builds no model"
NO_INPUTS = "is built, but no inputs that fit are known to the script"
LARGE = "too large, however small its configuration is made"
TIME = "takes more than two minutes"
NOT_BUILT = (PART, ONLY_INSIDE, PACKAGE, CONFIGURATION, NO_INPUTS, LARGE, TIME)


def faults(row: Row) -> dict[str, str]:
    """The checks that an accepted model type fails, with what was seen."""
    return {name: row[name] for name in CHECKS if row[name] != "ok" and not row[name].startswith("n/a")}


def listed(rows: Rows) -> str:
    """Counts, and every model type by what it reads and what became of it."""
    found = Rows(CARDS)("model_types")
    waiting = [row for row in found if row["verdict"] == "not checked"]
    found = [row for row in found if row not in waiting]
    by = {verdict: [r for r in found if r["verdict"] == verdict] for verdict in distinct(found, "verdict")}
    accepted, refused, missing = (by.get(verdict, []) for verdict in ("accepted", "refused", "not built"))
    right = [row for row in accepted if not faults(row)]
    built = len(found) - len(missing)
    versions = " and ".join(distinct(found, "transformers"))
    text = (
        f"Of the {len(found)} model types of Transformers {versions}, {built} were built tiny from their configuration: "
        f"{len(accepted)} can be patched, {len(refused)} are refused and {len(by.get('no attention', []))} have no "
        f"attention. {len(right)} of those that can be patched pass every check that applies to them"
    )
    text += "." if len(right) == len(accepted) else "; what the others (marked \\*) fail stands in the table."
    if partly := sum(_share(row) != "" for row in accepted):
        text += (
            f" The inputs made here reach every attention module of {len(accepted) - partly}; in the list, the other "
            f"{partly} carry how many of their modules were reached, as (2/4)."
        )
    silent = {name: sum(row[name].startswith("n/a") for row in accepted) for name in CHECKS}
    if named := ", ".join(f"{name} {count}" for name, count in silent.items() if count):
        text += (
            f" Types to which a check does not apply, because they read no tokens, have no cache or fail it with softmax "
            f"too: {named}."
        )
    if waiting:
        text += f" The table is partial: {len(waiting)} more model types were not checked yet."
    kinds = sorted(distinct(accepted, "kind"), key=lambda kind: (kind.count("+"), kind != "text", kind))
    lines = [(kind, _named([r for r in accepted if r["kind"] == kind])) for kind in kinds]
    lines.append(("refused", _named(refused)))
    for reason in NOT_BUILT:
        if rows_of := [row for row in missing if row["reason"].partition(":")[0] == reason]:
            lines.append((f"not run: {reason}", _named(rows_of)))
    names = table(("reads", "model types"), lines)
    return f"{text}\n\n<details><summary>All of them by name</summary>\n\n{names}\n</details>\n"


def _named(rows: list[Row]) -> str:
    accepted = [r"\*" * bool(faults(row)) + _share(row) if row["verdict"] == "accepted" else "" for row in rows]
    names = [f"`{row['model_type']}`{marks}" for row, marks in zip(rows, accepted, strict=True)]
    return f"{len(rows)}: {', '.join(names)}"


def _share(row: Row) -> str:
    """How many attention modules of an accepted model type were reached; empty where all were."""
    run, total = row["sites_run"].split("/")
    return "" if run == total else f" ({run}/{total})"


def works_with(rows: Rows) -> str:
    """What was tried with which tool; the last column names the test."""
    return row_table(Rows(ROOT / "tests")("works_with"), {
        "tool": lambda row: f"{row['tool']} {row['version']}".strip(), "use": "use", "": "verdict",
        "test": lambda row: f"`{row['test'].partition('::')[0]}`",
    })  # fmt: skip


def versions(rows: Rows) -> str:
    """Under which versions of Transformers and PyTorch the tests of `tests/versions.py` pass."""
    return row_table(Rows(ROOT / "tests")("versions"), {
        "Transformers": "transformers", "PyTorch": "torch", "": "verdict",
        "tests": lambda row: f"{row['passed']} passed, {row['skipped']} skipped",
    })  # fmt: skip
