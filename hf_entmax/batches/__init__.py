"""A batch, ready for a forward pass that is looked at: what the model is called with, and which pairs are real."""

from hf_entmax.batches.pairs import possible_pairs
from hf_entmax.batches.prepare import BatchInfo, evaluation_mode, prepare_batch

__all__ = ["BatchInfo", "evaluation_mode", "possible_pairs", "prepare_batch"]
