"""The forward kernel of entmax attention: maximum, threshold, output, over ever fewer key blocks."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportRedeclaration=false
from __future__ import annotations

import triton
import triton.language as tl

from hf_entmax.ops.triton_gpu.row_math import (
    LN_2,
    MASKED,
    MASKED_BELOW,
    bin_bits,
    bin_width,
    centred,
    first_threshold,
    histogram_bracket,
    largest_threshold,
    make_mapping,
    threshold_resolution,
    threshold_step,
    tile_weights,
)
from hf_entmax.ops.triton_gpu.tiles import (
    ScoreTerms,
    dot,
    dropout_factor,
    key_block_in_turn,
    key_block_range,
    load_rows,
    score_tile,
    score_unit,
    select,
    store_rows,
    whole_numbers,
    without_nonfinite,
)


@triton.jit(do_not_specialize=["T_k"])
def _key_extent_kernel(key_mask, extent, T_k, BLOCK: tl.constexpr):
    """First real key and one past the last of each sequence, int32 ``[B, 2]``; ``(T_k, 0)`` when there is none."""
    batch = tl.program_id(0)
    pointer = key_mask.pointer + batch.to(tl.int64) * key_mask.stride_b
    first = T_k
    last = 0
    for start in range(0, T_k, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        real = tl.load(pointer + cols.to(tl.int64) * key_mask.stride_d, mask=cols < T_k, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(real, cols, T_k), 0))
        last = tl.maximum(last, tl.max(tl.where(real, cols + 1, 0), 0))
    tl.store(extent + batch * 2, first)
    tl.store(extent + batch * 2 + 1, last)


# Below this u bins would be wider than the thresholds that they are to tell apart.
_LEAST_BINNED_U = tl.constexpr(0.1)


@triton.jit
def _histogram_pass(
    queries, key, row_max, least, rows, first_row, block_list, n_listed, terms, mapping, problem, OPTIONS: tl.constexpr
):  # fmt: skip
    """Scores of each row by bin, as `histogram_bracket` wants them, the width of the bins, and how many blocks stay listed.

    Every element of the tile counts for itself, four bits a bin: fifteen tiles fill them.
    """
    ROWS: tl.constexpr = OPTIONS.ROWS
    width = bin_width(least, mapping)
    inv_unit = 1.0 / score_unit(problem, OPTIONS)
    units = width * inv_unit
    reach = tl.maximum(row_max + (least - mapping.inv_u) * inv_unit, MASKED_BELOW)
    n0, n1, n2 = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    n3, n4, n5 = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    n6 = tl.zeros([ROWS], tl.float32)
    kept = 0
    for first in range(0, n_listed, 15):
        packed = tl.zeros([ROWS, OPTIONS.COLS], tl.int32)
        for position in range(first, tl.minimum(first + 15, n_listed)):
            index = tl.load(block_list + position).to(tl.int32)
            _, _, z, _ = score_tile(queries, key, rows, first_row, index * OPTIONS.COLS, terms, problem, OPTIONS)
            packed += bin_bits(z - row_max[:, None], units[:, None])
            # In place: the write never overtakes the read, and this reduction is a barrier between the two.
            listed = tl.max((tl.max(z, 1) > reach).to(tl.int32), 0)
            tl.store(block_list + kept, index, mask=listed != 0)
            kept += listed
        # Two bins in a word, sixteen bits each, for the sums over the columns.
        word = tl.sum(packed & 0x000F000F, 1)
        n0, n4 = n0 + (word & 0xFFFF), n4 + (word >> 16)
        word = tl.sum((packed >> 4) & 0x000F000F, 1)
        n1, n5 = n1 + (word & 0xFFFF), n5 + (word >> 16)
        word = tl.sum((packed >> 8) & 0x000F000F, 1)
        n2, n6 = n2 + (word & 0xFFFF), n6 + (word >> 16)
        n3 += tl.sum((packed >> 12) & 0x0000000F, 1)
    return (n0, n1, n2, n3, n4, n5, n6), width, kept


@triton.jit
def _output_pass(
    queries, key, value, row_max, c, rows, first_row, block_list, n_listed, plane, terms, mapping,
    seed, weights, stats, flags, problem, CAREFUL: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The sums ``p``, ``s``, entropy, ``-s y``, ``p v`` and ``s v`` of each row over the listed key blocks.

    CAREFUL: values that are not finite count as 0 where no row gives them weight; rows that do are NaN.
    """
    ROWS: tl.constexpr = OPTIONS.ROWS
    BLOCK_V: tl.constexpr = OPTIONS.BLOCK_V
    unit = score_unit(problem, OPTIONS)
    total = tl.zeros([ROWS], tl.float32)
    slope = tl.zeros([ROWS], tl.float32)
    entropy = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    spoilt = tl.zeros([ROWS], tl.int32)
    slope_acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for position in range(0, n_listed):
        index = tl.load(block_list + position).to(tl.int32)
        _, cols, z, _ = score_tile(queries, key, rows, first_row, index * OPTIONS.COLS, terms, problem, OPTIONS)
        values = load_rows(value, cols, problem.T_k, OPTIONS.D_V, OPTIONS.BLOCK_V)
        if CAREFUL:
            values, wrong = without_nonfinite(values)
        # As if s / w were wanted: an instruction more, but fewer registers, of which this pass has none left.
        p, s, _, log2_p = tile_weights(
            z, row_max[:, None], unit, c[:, None], mapping, OPTIONS.ALPHA, True, OPTIONS.FOLD
        )
        total += tl.sum(p, 1)
        if stats is not None:
            block_slope = tl.sum(s, 1)
            slope += block_slope
            if OPTIONS.GRAD_ALPHA:
                entropy -= tl.sum(p * log2_p, 1) * (LN_2 * mapping.log_unit)
                if mapping.small:
                    y = centred(z, row_max[:, None], unit, c[:, None], OPTIONS.FOLD)
                    moment -= tl.sum(tl.where(s == 0.0, 0.0, s * y), 1)
            # Words of a block of queries are this program's alone.
            supported = tl.max((block_slope != 0.0).to(tl.int32), 0) != 0
            tl.atomic_or(flags + index // 32, 1 << (index % 32), mask=supported, sem="relaxed")
        if OPTIONS.DROPOUT:
            factor = dropout_factor(tl.load(seed), plane, rows[:, None], cols[None, :], problem.dropout)
            p *= factor
            s *= factor
        if CAREFUL:
            read = wrong[None, :] & ((p != 0.0) | (s != 0.0))
            spoilt = tl.maximum(spoilt, tl.max(read.to(tl.int32), 1))
        acc = dot(p.to(values.dtype), values, acc, OPTIONS.PRECISION)
        if stats is not None:
            slope_acc = dot(s.to(values.dtype), values, slope_acc, OPTIONS.PRECISION)
        if weights is not None:
            # Not divided by their sum as the output is: that would take another pass, and it is 1 to a rounding.
            offsets = (plane.to(tl.int64) * problem.T_q + rows)[:, None] * problem.T_k + cols[None, :]
            inside = (rows < problem.T_q)[:, None] & (cols < problem.T_k)[None, :]
            tl.store(weights + offsets, p.to(weights.dtype.element_ty), mask=inside)
    if CAREFUL:
        acc = tl.where(spoilt[:, None] != 0, float("nan"), acc)
        slope_acc = tl.where(spoilt[:, None] != 0, float("nan"), slope_acc)
    return total, slope, entropy, moment, acc, slope_acc


@triton.jit
def _entmax_attention_fwd_kernel(
    inputs, terms, extent, out, weights, stats, slope_mean, lists, flags, max_passes, problem, OPTIONS: tl.constexpr
):
    """One block of queries of one head.

    Passes over the key blocks: (1) row maxima; (2) counts of scores by their distance from them, which bound the threshold;
    (3...) sums for a step of the threshold, until every row has it; (last) the output. Scores only ever exist as a tile. A
    block whose largest score cannot reach the threshold of any row (the lower ends of the brackets only rise) leaves ``lists``
    and is not read again; the blocks that the last pass finds on the support are set in ``flags`` for the backward kernels.

    Shapes: query ``[B, H, T_q, D]``, key ``[B, H_kv, T_k, D]``, value ``[B, H_kv, T_k, D_V]``, out as query with
    ``D_V``, alpha ``[H]``, weights ``[B, H, T_q, T_k]`` or None, lists ``[B, H, n_q, n_k]``. For the backward pass, else None:
    flags ``[B, H, n_q, n_k / 32]`` (a bit for each tile), stats ``[B, H, T_q, 5]`` (maximum in units of `score_unit`, centred
    threshold, sum s, entropy, -sum s y) and slope_mean ``[B, H, T_q, D_V]`` (sum s v / sum s).
    """
    ROWS: tl.constexpr = OPTIONS.ROWS
    COLS: tl.constexpr = OPTIONS.COLS
    problem = whole_numbers(problem)
    H, T_q, n_q, n_k = problem.H, problem.T_q, problem.n_q, problem.n_k
    pid = tl.program_id(0)
    # Causal blocks grow with their row: the longest start first, so that no long one is left for the end.
    block = n_q - 1 - pid % n_q if OPTIONS.CAUSAL else pid % n_q
    plane = pid // n_q
    batch, head = (plane // H).to(tl.int64), (plane % H).to(tl.int64)
    kv_head = head // problem.group
    first_row = block * OPTIONS.ROWS
    rows = first_row + tl.arange(0, OPTIONS.ROWS)

    key, value = select(inputs.key, batch, kv_head), select(inputs.value, batch, kv_head)
    terms = ScoreTerms(
        select(terms.mask, batch, head) if terms.mask is not None else None,
        select(terms.bias, batch, head) if terms.bias is not None else None,
        select(terms.key_mask, batch, head) if terms.key_mask is not None else None,
    )
    head_alpha = tl.load(inputs.alpha + head)
    mapping = make_mapping(head_alpha, head_alpha)
    queries = load_rows(select(inputs.query, batch, head), rows, T_q, OPTIONS.D, OPTIONS.BLOCK_D)
    block_of_queries = plane.to(tl.int64) * n_q + block
    block_list = lists + block_of_queries * n_k
    flags = flags + block_of_queries * tl.cdiv(n_k, 32) if flags is not None else None

    unit = score_unit(problem, OPTIONS)
    inv_unit = 1.0 / unit

    # Pass 1: maxima. A block is listed if it reaches what is, with the maximum so far, the lowest threshold.
    row_max = tl.full([ROWS], MASKED, tl.float32)
    row_nan = tl.zeros([ROWS], tl.int32)
    score_sum, score_count = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    top_sum, top_count = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    n_listed = 0
    first_block, last_block = key_block_range(first_row, extent, batch, problem, OPTIONS)
    for step in range(0, last_block - first_block):
        index = key_block_in_turn(step, first_block, last_block, first_row, problem, OPTIONS)
        _, _, z, _ = score_tile(queries, key, rows, first_row, index * OPTIONS.COLS, terms, problem, OPTIONS)
        top = tl.max(z, 1)
        rise = tl.maximum(top - row_max, 0.0)
        row_max = tl.maximum(row_max, top)
        # NaN, which the maximum passes over, and the infinities show in the sum.
        if OPTIONS.FOLD:
            block_sum = tl.sum(z, 1) - tl.where(row_max > MASKED_BELOW, row_max * COLS, 0.0)
        else:
            block_sum = tl.sum(z - row_max[:, None], 1)
        is_nan = (block_sum != block_sum).to(tl.int32)
        row_nan = tl.maximum(row_nan, is_nan)
        if OPTIONS.ALPHA != 1.0:
            # What `first_threshold` wants, less the maximum so far: of blocks without a masked entry, and of tops of blocks.
            whole, reached = (block_sum > MASKED_BELOW) & (top > MASKED_BELOW), top > MASKED_BELOW
            score_sum += tl.where(whole, block_sum, 0.0) - score_count * rise
            top_sum += tl.where(reached, top - row_max, 0.0) - top_count * rise
            score_count += tl.where(whole, COLS * 1.0, 0.0)
            top_count += tl.where(reached, 1.0, 0.0)
        reach = tl.maximum(row_max - mapping.inv_u * inv_unit, MASKED_BELOW)
        listed = tl.max(tl.maximum((top > reach).to(tl.int32), is_nan), 0)
        tl.store(block_list + n_listed, index, mask=listed != 0)
        n_listed += listed
    row_max = tl.where(row_max > MASKED_BELOW, row_max, 0.0)
    row_max = tl.where(row_nan != 0, float("nan"), row_max)

    # Passes 2...: the threshold. One thread writes the list, all read it: hence the barriers between passes.
    c = first_threshold(score_sum * unit, score_count, mapping.u)
    c = tl.maximum(c, first_threshold(top_sum * unit, top_count, mapping.u))
    high = largest_threshold(tl.zeros([ROWS], tl.float32) + problem.T_k, mapping.u)
    # Less what the rounding of sums may make of it, a bound up to alpha = 2.
    low = c - mapping.inv_u * 2.0**-12
    if OPTIONS.FOLD:
        low -= tl.abs(row_max * unit) * 2.0**-16  # sums of 64 scores are rounded by 2**-19 of their mean size
    low = tl.maximum(low, 0.0)
    low = tl.where(mapping.u > 1.0, 0.0, low)
    if OPTIONS.ALPHA != 1.0:  # noqa: SIM102  known when it is compiled, and only then
        if mapping.u >= _LEAST_BINNED_U:
            tl.debug_barrier()
            counts, width, n_listed = _histogram_pass(
                queries, key, row_max, low, rows, first_row, block_list, n_listed, terms, mapping, problem, OPTIONS
            )
            c, low, high = histogram_bracket(counts, width, low, high, mapping, OPTIONS.ALPHA)
    # Rarely a second time, exactly and with care: where the weights of a row do not sum to 1 as closely as they have to, or where a
    # weight of 0 times a value that is not finite is NaN. Values without weight are not read then.
    total, slope = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    entropy, moment = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, OPTIONS.BLOCK_V], tl.float32)
    slope_acc = tl.zeros([ROWS, OPTIONS.BLOCK_V], tl.float32)
    # Close to alpha = 2 a step does not foresee which scores it gives weight.
    tolerance = OPTIONS.TOLERANCE * tl.where(mapping.u > 0.6, 0.2, 1.0)
    resolution = tl.zeros([ROWS], tl.float32)
    attempt = 0
    unfinished = 1
    while attempt < 2:
        n_passes = 0
        while (n_passes < max_passes) & (unfinished != 0):
            tl.debug_barrier()
            mass = tl.zeros([ROWS], tl.float32)
            mass_slope = tl.zeros([ROWS], tl.float32)
            curvature = tl.zeros([ROWS], tl.float32)
            reach = tl.maximum(row_max + (low - mapping.inv_u) * inv_unit, MASKED_BELOW)
            kept = 0
            for position in range(0, n_listed):
                index = tl.load(block_list + position).to(tl.int32)
                _, _, z, _ = score_tile(queries, key, rows, first_row, index * OPTIONS.COLS, terms, problem, OPTIONS)
                p, s, e, _ = tile_weights(
                    z, row_max[:, None], unit, c[:, None], mapping, OPTIONS.ALPHA, True, OPTIONS.FOLD
                )
                mass += tl.sum(p, 1)
                mass_slope += tl.sum(s, 1)
                curvature += tl.sum(e, 1)
                # In place: the write never overtakes the read, and this reduction is a barrier between the two.
                listed = tl.max((tl.max(z, 1) > reach).to(tl.int32), 0)
                tl.store(block_list + kept, index, mask=listed != 0)
                kept += listed
            n_listed = kept
            c, low, high, row_unfinished = threshold_step(
                c, low, high, mass, mass_slope, curvature, n_passes, mapping.u, tolerance
            )
            resolution = threshold_resolution(c, mass_slope)
            unfinished = tl.max(row_unfinished.to(tl.int32), 0)
            n_passes += 1
        tl.debug_barrier()

        # Last pass: the output, and what the backward pass wants to know of each row.
        if attempt == 0:
            total, slope, entropy, moment, acc, slope_acc = _output_pass(
                queries, key, value, row_max, c, rows, first_row, block_list, n_listed, plane, terms, mapping,
                inputs.seed, weights, stats, flags, problem, False, OPTIONS,
            )  # fmt: skip
        else:
            total, slope, entropy, moment, acc, slope_acc = _output_pass(
                queries, key, value, row_max, c, rows, first_row, block_list, n_listed, plane, terms, mapping,
                inputs.seed, weights, stats, flags, problem, True, OPTIONS,
            )  # fmt: skip
        # A sum over so many tiles is rounded that often. Above alpha = 2 float32 thresholds may be too coarse for any limit.
        limit = tl.where(mapping.u > 1.0, 1e30, OPTIONS.LIMIT + n_k * 2.0**-24 + resolution)
        off = (tl.abs(total - 1.0) > limit) & (total > 0.0)
        unfinished = tl.max(off.to(tl.int32), 0)
        wrong = tl.max(tl.max((acc - acc != 0.0).to(tl.int32), 1), 0)
        attempt += tl.where((wrong != 0) | (unfinished != 0), 1, 2)
        tolerance = 1e-6
        high = largest_threshold(tl.zeros([ROWS], tl.float32) + problem.T_k, mapping.u)

    # Rounding of the threshold leaves sum p a few 1e-7 off 1. Rows without a key have 0 / 1; NaN rows stay NaN.
    total = tl.where(total == 0.0, 1.0, total) + (row_max - row_max)
    store_rows(select(out, batch, head), acc / total[:, None], rows, T_q, OPTIONS.D_V, OPTIONS.BLOCK_V)
    if stats is not None:
        safe_slope = tl.where(slope == 0.0, 1.0, slope)
        means = slope_acc / safe_slope[:, None]
        store_rows(select(slope_mean, batch, head), means, rows, T_q, OPTIONS.D_V, OPTIONS.BLOCK_V)
        stats += (plane.to(tl.int64) * T_q + rows) * 5
        tl.store(stats, row_max, mask=rows < T_q)
        tl.store(stats + 1, c, mask=rows < T_q)
        tl.store(stats + 2, slope, mask=rows < T_q)
        tl.store(stats + 3, entropy, mask=rows < T_q)
        tl.store(stats + 4, moment, mask=rows < T_q)
