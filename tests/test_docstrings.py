"""The examples in the docstrings of the public names run as they stand."""

import doctest
import importlib

import pytest
import torch

#: Dotted names whose docstrings have an example.
EXAMPLES = [
    "hf_entmax.generation.beam_search",
    "hf_entmax.losses.entmax_loss",
    "hf_entmax.losses.linear_entmax_loss",
    "hf_entmax.ops.Entmax",
    "hf_entmax.ops.entmax",
    "hf_entmax.ops.entmax15",
    "hf_entmax.ops.sparsemax",
    "hf_entmax.EntmaxConfig",
    "hf_entmax.alphas",
    "hf_entmax.is_patched",
    "hf_entmax.patch_model",
    "hf_entmax.set_alphas",
    "hf_entmax.softmax_attention",
    "hf_entmax.unpatch_model",
    "hf_entmax.unpatched_softmax",
    "hf_entmax.analysis.collect",
    "hf_entmax.analysis.density",
    "hf_entmax.analysis.head_diversity",
    "hf_entmax.analysis.positional_confidence",
    "hf_entmax.analysis.write_report",
    "hf_entmax.ops.available_backends",
    "hf_entmax.ops.controllable.softmax",
    "hf_entmax.ops.controllable.sparsegen_lin",
    "hf_entmax.ops.controllable.sparsehourglass",
    "hf_entmax.ops.entmax_attention",
]


@pytest.mark.filterwarnings("ignore:.*outside the attention interface")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name):
    module, _, attribute = name.rpartition(".")
    found = importlib.import_module(module)
    examples = doctest.DocTestFinder(recurse=False).find(
        getattr(found, attribute), name, globs={**vars(found), "torch": torch}
    )
    assert sum(len(example.examples) for example in examples) > 0, f"{name} has no example"
    for example in examples:
        report: list[str] = []
        result = doctest.DocTestRunner().run(example, out=report.append)
        assert not result.failed, "".join(report)
