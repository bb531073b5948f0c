"""Controllable sparse alternatives to softmax (Laha et al. 2018): functions, modules, and their use as attention."""

from hf_entmax.ops.controllable.attention import mapped_attention
from hf_entmax.ops.controllable.domain import Interval
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
from hf_entmax.ops.controllable.registry import (
    ATTENTION_MAPPINGS,
    REFUSED_AS_ATTENTION,
    attention_mapping,
    register_mapping,
)

__all__ = [
    "ATTENTION_MAPPINGS",
    "REFUSED_AS_ATTENTION",
    "Interval",
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
    "register_mapping",
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
