"""The backward kernels of entmax attention: queries (with alpha), keys and values, position bias.

All rebuild the tiles that the forward pass found on the support, and no others, from the row statistics it kept. With
``g = dL/dp`` and ``delta = sum s g / sum s`` of the row, ``dL/dz = s (g - delta)`` (Peters, Niculae and Martins 2019,
prop. 1). No atomics: the same inputs give the same gradients, bit for bit.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportRedeclaration=false
from __future__ import annotations

import triton
import triton.language as tl

from hf_entmax.ops.triton_gpu.row_math import alpha_gradient, alpha_sums, log_slope, make_mapping, tile_weights
from hf_entmax.ops.triton_gpu.tiles import (
    ScoreTerms,
    dot,
    dropout_factor,
    load_elements,
    load_rows,
    masked_scores,
    score_tile,
    score_unit,
    select,
    store_rows,
    whole_numbers,
    without_nonfinite,
)


@triton.jit
def _load_flag(flags, plane, block_q, block_k, n_q, n_k, inside):
    """Whether tiles are on the support, 1 or 0, from a bit for each."""
    word = tl.load(flags + (plane * n_q + block_q) * tl.cdiv(n_k, 32) + block_k // 32, mask=inside, other=0)
    return (word >> (block_k % 32).to(tl.int32)) & 1


@triton.jit(do_not_specialize=["n_q", "n_k", "by_query"])
def _compact_flags_kernel(flags, n_q, n_k, by_query, lists, counts, BLOCK: tl.constexpr):
    """For each block of queries (or of keys, if ``by_query`` is 0) of each head, the blocks of the others whose flag is set, in order.

    flags ``[B * H, n_q, n_k / 32]``, a bit for each tile. lists ``[B * H, n_outer, n_inner]``, counts ``[B * H, n_outer]``.
    """
    pid = tl.program_id(0).to(tl.int64)
    n_outer = tl.where(by_query != 0, n_q, n_k)
    n_inner = tl.where(by_query != 0, n_k, n_q)
    plane, outer = pid // n_outer, pid % n_outer
    lists += pid * n_inner
    count = 0
    for start in range(0, n_inner, BLOCK):
        index = start + tl.arange(0, BLOCK)
        block_q, block_k = tl.where(by_query != 0, outer, index), tl.where(by_query != 0, index, outer)
        flag = _load_flag(flags, plane, block_q, block_k, n_q, n_k, index < n_inner)
        tl.store(lists + count + tl.cumsum(flag, 0) - flag, index, mask=flag != 0)
        count += tl.sum(flag, 0)
    tl.store(counts + pid, count)


@triton.jit
def _weight_gradient(dots, grad_weights, rows, cols, seed, plane, problem, OPTIONS: tl.constexpr):
    """``g = dL/dp`` of a tile: from the output (``dots`` = dO . V), from the weights if they were asked for, dropped."""
    g = dots
    if grad_weights is not None:
        inside = (rows < problem.T_q) & (cols < problem.T_k)
        g += load_elements(grad_weights, rows, cols, inside).to(tl.float32)
    if OPTIONS.DROPOUT:
        g *= dropout_factor(tl.load(seed), plane, rows, cols, problem.dropout)
    return g


@triton.jit
def _load_stats(stats, plane, rows, T_q):
    """Maximum and threshold of each row; zeros beyond the last."""
    pointers = stats + (plane * T_q + rows) * 5
    return tl.load(pointers, mask=rows < T_q, other=0.0), tl.load(pointers + 1, mask=rows < T_q, other=0.0)


@triton.jit
def _query_pass(
    queries, key, value, grads, grad_weights, row_max, c, row_delta, row_log_slope, rows, first_row, block_list,
    n_listed, plane, terms, mapping, seed, problem, CAREFUL: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dL/dquery before scaling and the four sums of dL/dalpha; CAREFUL: keys without weight are not read."""
    ROWS: tl.constexpr = OPTIONS.ROWS
    COLS: tl.constexpr = OPTIONS.COLS
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    unit = score_unit(problem, OPTIONS)
    no_dots = tl.zeros([ROWS, COLS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    sum_a = tl.zeros([ROWS], tl.float32)
    sum_b = tl.zeros([ROWS], tl.float32)
    sum_c = tl.zeros([ROWS], tl.float32)
    sum_d = tl.zeros([ROWS], tl.float32)
    for position in range(0, n_listed):
        first_col = tl.load(block_list + position).to(tl.int32) * OPTIONS.COLS
        keys, cols, z, score_slope = score_tile(queries, key, rows, first_row, first_col, terms, problem, OPTIONS)
        values = load_rows(value, cols, problem.T_k, OPTIONS.D_V, OPTIONS.BLOCK_V)
        p, s, _, log2_p = tile_weights(
            z, row_max[:, None], unit, c[:, None], mapping, OPTIONS.ALPHA, False, OPTIONS.FOLD
        )
        dots = dot(grads, tl.trans(values), no_dots, OPTIONS.PRECISION)
        g = _weight_gradient(dots, grad_weights, rows[:, None], cols[None, :], seed, plane, problem, OPTIONS)
        g = g - row_delta[:, None]
        if CAREFUL:
            # Of a key without weight nothing is known: its dot products and slope may be NaN.
            g = tl.where(s == 0.0, 0.0, g)
        grad_z = s * g
        if OPTIONS.SOFTCAP:
            grad_z = tl.where(s == 0.0, 0.0, grad_z * score_slope)
        if CAREFUL:
            keys, _ = without_nonfinite(keys)
        acc = dot(grad_z.to(keys.dtype), keys, acc, OPTIONS.PRECISION)
        if OPTIONS.GRAD_ALPHA:
            tile_a, tile_b, tile_c, tile_d = alpha_sums(p, s, log2_p, g, row_log_slope[:, None], mapping)
            sum_a, sum_b, sum_c, sum_d = sum_a + tile_a, sum_b + tile_b, sum_c + tile_c, sum_d + tile_d
    return acc, sum_a, sum_b, sum_c, sum_d


@triton.jit
def _entmax_attention_bwd_query_kernel(
    inputs,
    terms,
    grads,
    stats,
    slope_mean,
    lists,
    counts,
    grad_query,
    grad_alpha,
    delta,
    problem,
    OPTIONS: tl.constexpr,
):
    """dL/dquery of one block of queries, ``delta`` for the kernels after it, and dL/dalpha of each row.

    Shapes as in the forward kernel; lists ``[B, H, n_q, n_k]`` and counts ``[B, H, n_q]`` name the key blocks on the
    support; delta and grad_alpha (or None) ``[B, H, T_q]``; grad_weights as weights, or None.
    """
    ROWS: tl.constexpr = OPTIONS.ROWS
    COLS: tl.constexpr = OPTIONS.COLS
    problem = whole_numbers(problem)
    H, T_q, n_q = problem.H, problem.T_q, problem.n_q
    pid = tl.program_id(0)
    block = n_q - 1 - pid % n_q if OPTIONS.CAUSAL else pid % n_q
    plane = pid // n_q
    batch, head = (plane // H).to(tl.int64), (plane % H).to(tl.int64)
    kv_head = head // problem.group
    first_row = block * OPTIONS.ROWS
    rows = first_row + tl.arange(0, OPTIONS.ROWS)
    row_index = plane.to(tl.int64) * T_q + rows

    key, value = select(inputs.key, batch, kv_head), select(inputs.value, batch, kv_head)
    terms = ScoreTerms(
        select(terms.mask, batch, head) if terms.mask is not None else None,
        select(terms.bias, batch, head) if terms.bias is not None else None,
        select(terms.key_mask, batch, head) if terms.key_mask is not None else None,
    )
    grad_weights = select(grads.weights, batch, head) if grads.weights is not None else None
    head_alpha = tl.load(inputs.alpha + head)
    mapping = make_mapping(head_alpha, head_alpha)
    queries = load_rows(select(inputs.query, batch, head), rows, T_q, OPTIONS.D, OPTIONS.BLOCK_D)
    grad_out = load_rows(select(grads.out, batch, head), rows, T_q, OPTIONS.D_V, OPTIONS.BLOCK_V)
    means = load_rows(select(slope_mean, batch, head), rows, T_q, OPTIONS.D_V, OPTIONS.BLOCK_V)
    row_max, c = _load_stats(stats, plane.to(tl.int64), rows, T_q)
    slope = tl.load(stats + row_index * 5 + 2, mask=rows < T_q, other=0.0)
    row_delta = tl.sum(means.to(tl.float32) * grad_out.to(tl.float32), 1)
    unit = score_unit(problem, OPTIONS)
    no_dots = tl.zeros([ROWS, COLS], tl.float32)
    block_list = lists + (plane.to(tl.int64) * n_q + block) * problem.n_k
    n_listed = tl.load(counts + plane.to(tl.int64) * n_q + block)

    if grad_weights is not None:
        # The part of delta that the output does not carry: sum s dW / sum s.
        extra = tl.zeros([ROWS], tl.float32)
        for position in range(0, n_listed):
            first_col = tl.load(block_list + position).to(tl.int32) * OPTIONS.COLS
            _, cols, z, _ = score_tile(queries, key, rows, first_row, first_col, terms, problem, OPTIONS)
            _, s, _, _ = tile_weights(
                z, row_max[:, None], unit, c[:, None], mapping, OPTIONS.ALPHA, False, OPTIONS.FOLD
            )
            g = _weight_gradient(
                no_dots, grad_weights, rows[:, None], cols[None, :], inputs.seed, plane, problem, OPTIONS
            )
            extra += tl.sum(s * g, 1)
        row_delta += extra / tl.where(slope == 0.0, 1.0, slope)
    tl.store(delta + row_index, row_delta, mask=rows < T_q)

    row_log_slope = log_slope(tl.load(stats + row_index * 5 + 4, mask=rows < T_q, other=0.0), mapping)
    acc, sum_a, sum_b, sum_c, sum_d = _query_pass(
        queries, key, value, grad_out, grad_weights, row_max, c, row_delta, row_log_slope, rows, first_row, block_list,
        n_listed, plane, terms, mapping, inputs.seed, problem, False, OPTIONS,
    )  # fmt: skip
    # 0 times what a hidden key holds may be NaN: as in the forward kernel.
    if tl.max(tl.max((acc - acc != 0.0).to(tl.int32), 1), 0) != 0:
        acc, sum_a, sum_b, sum_c, sum_d = _query_pass(
            queries, key, value, grad_out, grad_weights, row_max, c, row_delta, row_log_slope, rows, first_row, block_list,
            n_listed, plane, terms, mapping, inputs.seed, problem, True, OPTIONS,
        )  # fmt: skip

    store_rows(select(grad_query, batch, head), acc * problem.scale, rows, T_q, OPTIONS.D, OPTIONS.BLOCK_D)
    if OPTIONS.GRAD_ALPHA:
        entropy = tl.load(stats + row_index * 5 + 3, mask=rows < T_q, other=0.0)
        row_alpha = alpha_gradient(sum_a, sum_b, sum_c, sum_d, slope, entropy, mapping)
        tl.store(grad_alpha + row_index, row_alpha, mask=rows < T_q)


@triton.jit
def _entmax_attention_bwd_key_kernel(
    inputs, terms, grads, stats, delta, lists, counts, grad_key, grad_value, problem, OPTIONS: tl.constexpr
):
    """dL/dkey and dL/dvalue of one block of keys, over all query heads that share it (grouped queries).

    Tiles are transposed, keys along the rows: weights and score gradients are then left operands as they come, straight
    from registers. lists ``[B, H, n_k, n_q]`` and counts ``[B, H, n_k]`` name the query blocks on the support.
    """
    ROWS: tl.constexpr = OPTIONS.ROWS
    COLS: tl.constexpr = OPTIONS.COLS
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    BLOCK_V: tl.constexpr = OPTIONS.BLOCK_V
    problem = whole_numbers(problem)
    H, T_q, T_k, n_k = problem.H, problem.T_q, problem.T_k, problem.n_k
    n_kv_heads = H // problem.group
    pid = tl.program_id(0)
    block = pid % n_k
    kv_plane = pid // n_k
    batch, kv_head = (kv_plane // n_kv_heads).to(tl.int64), (kv_plane % n_kv_heads).to(tl.int64)
    first_col = block * OPTIONS.COLS
    cols = first_col + tl.arange(0, OPTIONS.COLS)

    keys = load_rows(select(inputs.key, batch, kv_head), cols, T_k, OPTIONS.D, OPTIONS.BLOCK_D)
    # Where a value that is not finite has weight, the mean of its row's values is not finite either, and spoils ``delta``.
    values = load_rows(select(inputs.value, batch, kv_head), cols, T_k, OPTIONS.D_V, OPTIONS.BLOCK_V)
    values, _wrong = without_nonfinite(values)
    key_acc = tl.zeros([COLS, BLOCK_D], tl.float32)
    value_acc = tl.zeros([COLS, BLOCK_V], tl.float32)
    unit = score_unit(problem, OPTIONS)
    no_dots = tl.zeros([COLS, ROWS], tl.float32)

    for member in range(0, problem.group):
        head = kv_head * problem.group + member
        plane = batch * H + head
        head_query, head_grads = select(inputs.query, batch, head), select(grads.out, batch, head)
        head_grad_weights = select(grads.weights, batch, head) if grads.weights is not None else None
        head_terms = ScoreTerms(
            select(terms.mask, batch, head) if terms.mask is not None else None,
            select(terms.bias, batch, head) if terms.bias is not None else None,
            select(terms.key_mask, batch, head) if terms.key_mask is not None else None,
        )
        head_alpha = tl.load(inputs.alpha + head)
        mapping = make_mapping(head_alpha, head_alpha)
        block_list = lists + (plane * n_k + block) * problem.n_q
        for position in range(0, tl.load(counts + plane * n_k + block)):
            first_row = tl.load(block_list + position).to(tl.int32) * OPTIONS.ROWS
            rows = first_row + tl.arange(0, OPTIONS.ROWS)
            queries = load_rows(head_query, rows, T_q, OPTIONS.D, OPTIONS.BLOCK_D)
            grad_out = load_rows(head_grads, rows, T_q, OPTIONS.D_V, OPTIONS.BLOCK_V)
            row_max, c = _load_stats(stats, plane, rows, T_q)
            row_delta = tl.load(delta + plane * T_q + rows, mask=rows < T_q, other=0.0)
            dots = dot(keys, tl.trans(queries), no_dots, OPTIONS.PRECISION)
            z, score_slope = masked_scores(
                dots, rows[None, :], cols[:, None], first_row, first_col, head_terms, problem, OPTIONS
            )
            p, s, _, _ = tile_weights(
                z, row_max[None, :], unit, c[None, :], mapping, OPTIONS.ALPHA, False, OPTIONS.FOLD
            )
            dots = dot(values, tl.trans(grad_out), no_dots, OPTIONS.PRECISION)
            small_plane = plane.to(tl.int32)
            g = _weight_gradient(
                dots, head_grad_weights, rows[None, :], cols[:, None], inputs.seed, small_plane, problem, OPTIONS
            )
            if OPTIONS.DROPOUT:
                p *= dropout_factor(tl.load(inputs.seed), small_plane, rows[None, :], cols[:, None], problem.dropout)
            value_acc = dot(p.to(grad_out.dtype), grad_out, value_acc, OPTIONS.PRECISION)
            grad_z = s * (g - row_delta[None, :])
            if OPTIONS.SOFTCAP:
                grad_z *= score_slope
            # Of a key without weight nothing is known, but that its value is finite.
            if OPTIONS.SOFTCAP or grads.weights is not None:
                grad_z = tl.where(s == 0.0, 0.0, grad_z)
            key_acc = dot(grad_z.to(queries.dtype), queries, key_acc, OPTIONS.PRECISION)

    store_rows(select(grad_key, batch, kv_head), key_acc * problem.scale, cols, T_k, OPTIONS.D, OPTIONS.BLOCK_D)
    store_rows(select(grad_value, batch, kv_head), value_acc, cols, T_k, OPTIONS.D_V, OPTIONS.BLOCK_V)


@triton.jit(do_not_specialize=["bias_batches", "bias_heads"])
def _entmax_attention_bwd_bias_kernel(
    inputs, terms, grads, stats, delta, flags, grad_bias, bias_batches, bias_heads, problem, OPTIONS: tl.constexpr
):
    """dL/dbias of one tile, summed over the sequences and heads that the bias is broadcast to.

    A bias shared by a batch (T5: ``[1, H, T_q, T_k]``) is summed here, tile by tile, rather than by adding up one
    ``[T_q, T_k]`` array per sequence. grad_bias ``[bias_batches, bias_heads, T_q, T_k]``; flags as in the forward kernel.
    """
    ROWS: tl.constexpr = OPTIONS.ROWS
    COLS: tl.constexpr = OPTIONS.COLS
    problem = whole_numbers(problem)
    H, T_q, T_k, n_q, n_k = problem.H, problem.T_q, problem.T_k, problem.n_q, problem.n_k
    pid = tl.program_id(0)
    tile = pid % (n_q * n_k)
    bias_plane = (pid // (n_q * n_k)).to(tl.int64)
    block_q, block_k = tile // n_k, tile % n_k
    first_row, first_col = block_q * OPTIONS.ROWS, block_k * OPTIONS.COLS
    rows = first_row + tl.arange(0, OPTIONS.ROWS)
    cols = first_col + tl.arange(0, OPTIONS.COLS)
    unit = score_unit(problem, OPTIONS)
    no_dots = tl.zeros([ROWS, COLS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)

    # A broadcast dimension is summed over; any other has the one index of this program.
    shared_batches = problem.B // bias_batches
    shared_heads = H // bias_heads
    for pair in range(0, shared_batches * shared_heads):
        batch = (bias_plane // bias_heads) % bias_batches + pair // shared_heads
        head = bias_plane % bias_heads + pair % shared_heads
        plane = batch * H + head
        if _load_flag(flags, plane, block_q, block_k, n_q, n_k, True) != 0:
            kv_head = head // problem.group
            head_terms = ScoreTerms(
                select(terms.mask, batch, head) if terms.mask is not None else None,
                select(terms.bias, batch, head) if terms.bias is not None else None,
                select(terms.key_mask, batch, head) if terms.key_mask is not None else None,
            )
            head_alpha = tl.load(inputs.alpha + head)
            mapping = make_mapping(head_alpha, head_alpha)
            queries = load_rows(select(inputs.query, batch, head), rows, T_q, OPTIONS.D, OPTIONS.BLOCK_D)
            grad_out = load_rows(select(grads.out, batch, head), rows, T_q, OPTIONS.D_V, OPTIONS.BLOCK_V)
            values = load_rows(select(inputs.value, batch, kv_head), cols, T_k, OPTIONS.D_V, OPTIONS.BLOCK_V)
            row_max, c = _load_stats(stats, plane, rows, T_q)
            row_delta = tl.load(delta + plane * T_q + rows, mask=rows < T_q, other=0.0)
            head_key = select(inputs.key, batch, kv_head)
            _, _, z, _ = score_tile(queries, head_key, rows, first_row, first_col, head_terms, problem, OPTIONS)
            _, s, _, _ = tile_weights(
                z, row_max[:, None], unit, c[:, None], mapping, OPTIONS.ALPHA, False, OPTIONS.FOLD
            )
            dots = dot(grad_out, tl.trans(values), no_dots, OPTIONS.PRECISION)
            head_grad_weights = select(grads.weights, batch, head) if grads.weights is not None else None
            small_plane = plane.to(tl.int32)
            g = _weight_gradient(
                dots, head_grad_weights, rows[:, None], cols[None, :], inputs.seed, small_plane, problem, OPTIONS
            )
            acc += tl.where(s == 0.0, 0.0, s * (g - row_delta[:, None]))

    offsets = (bias_plane * T_q + rows)[:, None] * T_k + cols[None, :]
    tl.store(grad_bias + offsets, acc, mask=(rows < T_q)[:, None] & (cols < T_k)[None, :])
