"""Circuits: which attention weights a result owes to, on any model, patched or not.

from hf_entmax.analysis import circuits, plots

task = circuits.indirect_objects(tokenizer)
print(circuits.accuracy(model, task))
scores = circuits.attribute(model, task)
print(circuits.needed(scores, 0.9), circuits.needed(scores, 0.9, unit="heads"))
plots.circuit(scores.edges(0, 40), task.tokens[0]).savefig("circuit.svg")
"""

from hf_entmax.analysis.circuits.curves import FaithfulnessCurve, Needed, faithfulness, needed
from hf_entmax.analysis.circuits.edges import Ablated, Edge, EdgeScores, attribute
from hf_entmax.analysis.circuits.tasks import (
    TASKS,
    LogitDifference,
    Task,
    accuracy,
    agreement,
    greater_than,
    indirect_objects,
    induction,
    pronouns,
)

__all__ = [
    "TASKS", "Ablated", "Edge", "EdgeScores", "FaithfulnessCurve", "LogitDifference", "Needed", "Task", "accuracy",
    "agreement", "attribute", "faithfulness", "greater_than", "indirect_objects", "induction", "needed", "pronouns",
]  # fmt: skip
