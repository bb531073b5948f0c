"""What the README says about model types, from `model_cards/model_types.csv`, which `tests/model_types/sweep.py` writes."""

from __future__ import annotations

from .rows import CARDS, Row, Rows, distinct, table

#: The checks of a model type: columns of the table, in their order.
CHECKS = (
    "alpha_1_equals_eager",
    "every_alpha_gets_a_gradient",
    "no_softmax_in_attention",
    "causal",
    "padding",
    "cached",
    "save_and_load",
    "unpatch",
    "loud_without_plugin",
)


def faults(row: Row) -> dict[str, str]:
    """The checks that an accepted model type fails, with what was seen."""
    return {name: row[name] for name in CHECKS if row[name] != "ok" and not row[name].startswith("n/a")}


def model_types() -> str:
    """Counts, and every model type by what it reads and what became of it."""
    rows = Rows(CARDS)("model_types")
    waiting = [row for row in rows if row["verdict"] == "not checked"]
    rows = [row for row in rows if row not in waiting]
    by = {verdict: [r for r in rows if r["verdict"] == verdict] for verdict in distinct(rows, "verdict")}
    accepted, refused, missing = (by.get(verdict, []) for verdict in ("accepted", "refused", "not built"))
    right = [row for row in accepted if not faults(row)]
    built = len(rows) - len(missing)
    versions = " and ".join(distinct(rows, "transformers"))
    text = (
        f"Of the {len(rows)} model types of Transformers {versions}, {built} were built tiny from their configuration: "
        f"{len(accepted)} can be patched, {len(refused)} are refused and {len(by.get('no attention', []))} have no "
        f"attention. {len(right)} of those that can be patched pass every check that applies to them"
    )
    text += "." if len(right) == len(accepted) else "; what the others (marked \\*) fail stands in the table."
    if waiting:
        text += f" The table is partial: {len(waiting)} more model types were not checked yet."
    kinds = sorted(distinct(accepted, "kind"), key=lambda kind: (kind.count("+"), kind != "text", kind))
    lines = [(kind, _named([r for r in accepted if r["kind"] == kind])) for kind in kinds]
    lines.append(("refused", _named(refused)))
    if missing:  # their configuration cannot be shrunk by a rule, or no inputs are known
        lines.append(("not built here", _named(missing)))
    listed = table(("reads", "model types"), lines)
    return f"\n{text}\n\n<details><summary>All of them by name</summary>\n\n{listed}\n\n</details>\n"


def _named(rows: list[Row]) -> str:
    names = [f"`{row['model_type']}`" + r"\*" * bool(row["verdict"] == "accepted" and faults(row)) for row in rows]
    return f"{len(rows)}: {', '.join(names)}"
