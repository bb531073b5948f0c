"""Controllable sparse alternatives to softmax (Laha et al. 2018): functions, modules, and their use as attention."""

import importlib
import warnings

from hf_entmax.ops.controllable.attention import (
    ATTENTION_MAPPINGS,
    REFUSED_AS_ATTENTION,
    attention_mapping,
    mapped_attention,
)
from hf_entmax.ops.controllable.mappings import (
    softmax,
    sparsecone,
    sparsegen,
    sparsegen_exp,
    sparsegen_lin,
    sparsegen_log,
    sparsegen_sq,
    sparsehourglass,
    spherical_softmax,
    sum_normalization,
    sum_normalization_pp,
)
from hf_entmax.ops.controllable.modules import (
    Softmax,
    Sparsecone,
    Sparsegen,
    SparsegenExp,
    SparsegenLin,
    SparsegenLog,
    SparsegenSq,
    Sparsehourglass,
    SphericalSoftmax,
    SumNormalization,
    SumNormalizationPP,
)

__all__ = [
    "ATTENTION_MAPPINGS",
    "REFUSED_AS_ATTENTION",
    "Softmax",
    "Sparsecone",
    "Sparsegen",
    "SparsegenExp",
    "SparsegenLin",
    "SparsegenLog",
    "SparsegenSq",
    "Sparsehourglass",
    "SphericalSoftmax",
    "SumNormalization",
    "SumNormalizationPP",
    "attention_mapping",
    "mapped_attention",
    "softmax",
    "sparsecone",
    "sparsegen",
    "sparsegen_exp",
    "sparsegen_lin",
    "sparsegen_log",
    "sparsegen_sq",
    "sparsehourglass",
    "spherical_softmax",
    "sum_normalization",
    "sum_normalization_pp",
]

#: Names that were exported here once, and the modules that have them.
_MOVED = {
    **dict.fromkeys(("LAM", "Q", "TEMPERATURE", "Interval"), "domain"),
    **dict.fromkeys(("MappingSpec", "OptionSetting", "as_sparsemax_attention"), "attention"),
    "BoundedOption": "modules",
}


def __getattr__(name: str) -> object:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = f"{__name__}.{_MOVED[name]}"
    warnings.warn(f"{__name__}.{name} will go: import it from {place}.", FutureWarning, stacklevel=2)
    return getattr(importlib.import_module(place), name)
