"""How a key sketch is written, and the safety of the bounds that are read from it: said once, for every backend.

Nothing is imported here: the processes that compile kernels read this file alone.
"""

#: Keys of a block of codes, and what head dimensions are rounded up to a multiple of: the floats of a vector on the CPU.
LANES = 16
#: Bits per channel -> the planes of the codes: bits of the plane, how far they stand to the left.
PLANES = {2: ((2, 0),), 4: ((4, 0),), 6: ((4, 2), (2, 0)), 8: ((8, 0),)}
#: Half a step, and the rounding of the quotient that a code is rounded from (255 * 2**-23 at most).
HALF_STEP = 0.5001
#: How far below the threshold a bound must lie, in roundings of the numbers there; see `hf_entmax.ops.exact.bounds`.
THRESHOLD_ROUNDINGS = 64.0
