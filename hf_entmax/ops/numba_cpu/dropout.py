"""Dropout on the weights of a row: kept or not by a hash of row and column, so that backward draws the same again."""

from __future__ import annotations

import numpy as np

from .jit import jit
from .simd import LANES, hashed_keep, indices, load, load_index, select, splat, store

_f = np.float32
# The increments of the splitmix64 generator: neighbouring rows get unrelated keys.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@jit
def dropout_key(seed, row):
    """A 64-bit key for one row of one call."""
    z = np.uint64(seed) + np.uint64(row + 1) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return np.int64(z ^ (z >> np.uint64(31)))


@jit
def drop_dense(line, low, width, key, limit, factor, target):
    """Apply dropout to a dense row."""
    for k in range(0, width, LANES):
        kept = hashed_keep(indices(low + k), key, limit)
        store(target + 4 * k, select(kept, load(line + 4 * k) * splat(_f(factor)), splat(_f(0.0))))


@jit
def drop_sparse(weights, index, n, key, limit, factor, target):
    """Dropped and rescaled weights of a sparse row."""
    for k in range(0, n, LANES):
        kept = hashed_keep(load_index(index + 4 * k), key, limit)
        store(target + 4 * k, select(kept, load(weights + 4 * k) * splat(_f(factor)), splat(_f(0.0))))
