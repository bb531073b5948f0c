"""Exact sparse decoding: prove from a few bits of every key which keys have weight zero, and read only the others."""

from hf_entmax.ops.exact.attention import SparseCounts, exact_sparse_attention
from hf_entmax.ops.exact.sketch import KeySketch, sketch_keys, suggested_bits

__all__ = ["KeySketch", "SparseCounts", "exact_sparse_attention", "sketch_keys", "suggested_bits"]
