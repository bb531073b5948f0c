"""Tensors in, tensors out: the mappings and attention. Depends on torch alone."""

from hf_entmax.ops.attention import entmax_attention
from hf_entmax.ops.backends import available_backends
from hf_entmax.ops.conformal import conformal_temperature, support_at, support_temperature
from hf_entmax.ops.exact import KeySketch, SparseCounts, exact_sparse_attention, sketch_keys
from hf_entmax.ops.mapping import Entmax, Entmax15, Sparsemax, entmax, entmax15, sparsemax
from hf_entmax.ops.sparse_rows import SparseRows

__all__ = [
    "Entmax",
    "Entmax15",
    "KeySketch",
    "SparseCounts",
    "SparseRows",
    "Sparsemax",
    "available_backends",
    "conformal_temperature",
    "entmax",
    "entmax15",
    "entmax_attention",
    "exact_sparse_attention",
    "sketch_keys",
    "sparsemax",
    "support_at",
    "support_temperature",
]
