r"""The backward kernels: everything on the stored support, in O(nnz * D).

With ``dP_j = dO . V_j`` on the support, ``s = p**(2 - alpha)`` and ``delta = (s . dP) / sum s``:
``dS = s (dP - delta)``, ``dQ = scaling dS K``, ``dK = scaling dS^T Q``, ``dV = P^T dO``, and for one row

    d_alpha = (p . dP - delta) / u**2 + (h . dP - H delta) / u,      h = -p log p,  H = sum h,  u = alpha - 1,

which near alpha = 1 is evaluated in the form that does not cancel. One thread owns a (batch, key head) or a slice of
its rows; slices add into their own copy of dK and dV, so no two threads ever write to the same place.
"""

from __future__ import annotations

import math

import numpy as np
from numba.np.numpy_support import carray

from .intrinsics import jit
from .rows import block_rows, dense_row_bytes, drop_dense, drop_sparse, dropout_key, item_blocks, place_row, stored_row
from .simd import (
    LANES, atomic_increment, both, first_lanes, greater, load, max_lanes, maximum, muladd, read_f32, read_f64, read_i32,
    select, splat, store, sum_lanes, write_f32, write_f64,
)  # fmt: skip
from .tiles import (
    PANEL, TILE_VECTORS, add_to_rows, copy_floats, copy_scaled, dots_of_gathered_rows, pack_panels, product,
    product_of_seen, sum_rows, zero_floats,
)  # fmt: skip
from .vecmath import exp, exp_remainder, log, remainder_ratio, tanh

_f = np.float32
_ZERO, _ONE = _f(0.0), _f(1.0)
# From this u on the plain form of d_alpha loses less than one decimal digit.
_STABLE_BELOW = 0.5
# A factor beyond this power of e is held for this: the gradient is then no float32.
_LARGEST_LOG = 80.0
# Up to this argument the series of `remainder_ratio` is exact to float32.
_SERIES_UP_TO = 0.5


@jit
def _alpha_gradient_near_softmax(p, g, s, logs, n, u, entropy, widest, delta, factor):
    """Return ``sum_i dP_i dp_i/dalpha`` in a form that does not cancel; write ``g = factor * s * (g - delta)`` on the way.

    With ``d_i = -log p_i - H``, whose mean over p is 0, ``w_i = (exp(u d_i) - 1 - u d_i) / u**2`` and ``q = sum p w``,

        dp_i/dalpha = p_i (f_i - sum_j p_j f_j),      f_i = -((H - u q) d_i + (1 + u H) w_i) / (1 + u**2 q).

    ``widest`` is the largest ``|u d_i|``.
    """
    shift = splat(_f(delta))
    scale = splat(_f(factor))
    mean, slope = splat(_f(entropy)), splat(_f(u))
    inverse_square = splat(_f(1.0 / (u * u) if u > 0.0 else 0.0))
    weight_d, weight_d_g = splat(_ZERO), splat(_ZERO)
    weight_w, weight_w_g = splat(_ZERO), splat(_ZERO)
    weight_g = splat(_ZERO)
    narrow = widest < _SERIES_UP_TO
    for k in range(0, n, LANES):
        slopes = load(s + 4 * k)
        valid = greater(slopes, splat(_ZERO))
        weight = select(valid, load(p + 4 * k), splat(_ZERO))
        gradient = select(valid, load(g + 4 * k), splat(_ZERO))
        d = splat(_ZERO) - load(logs + 4 * k) - mean
        x = d * slope
        w = remainder_ratio(x) * d * d if narrow else exp_remainder(x) * inverse_square
        product_d, product_w = weight * d, weight * w
        weight_d = weight_d + product_d
        weight_w = weight_w + product_w
        weight_d_g = muladd(product_d, gradient, weight_d_g)
        weight_w_g = muladd(product_w, gradient, weight_w_g)
        weight_g = muladd(weight, gradient, weight_g)
        store(g + 4 * k, slopes * (gradient - shift) * scale)
    average = float(sum_lanes(weight_g))
    q = float(sum_lanes(weight_w))
    first = float(sum_lanes(weight_d_g)) - float(sum_lanes(weight_d)) * average
    second = float(sum_lanes(weight_w_g)) - q * average
    return -((entropy - u * q) * first + (1.0 + u * entropy) * second) / (1.0 + u * u * q)


@jit
def _relative_to_smallest(p, g, n):
    """Subtract from dP what it is at the smallest weight; return the logarithm of that weight.

    For ``u > 1`` that weight's ``s`` outweighs all others, so that its ``dP - delta`` would be a difference of near equals.
    """
    least, place = _f(np.inf), 0
    for k in range(n):
        weight = read_f32(p + 4 * k)
        if _ZERO < weight < least:
            least, place = weight, k
    if not least <= _ONE:
        return 0.0
    reference = read_f32(g + 4 * place)
    for k in range(n):
        write_f32(g + 4 * k, read_f32(g + 4 * k) - reference)
    return math.log(float(least))


@jit
def _row_gradient(p, g, s, logs, n, u, wants_alpha, factor):
    """Turn dP of one row in ``g`` into ``factor * dS``; return the row's d_alpha.

    ``p`` may hold zeros (rows stored densely); ``s`` and ``logs`` are scratch for as many floats.
    """
    exponent, base = splat(_f(1.0 - u)), splat(_ZERO)
    if u > 1.0:
        # There p**(1 - u) has no bound: it is taken relative to that of the smallest weight.
        least = _relative_to_smallest(p, g, n)
        base, factor = splat(_f(least)), factor * math.exp(min((1.0 - u) * least, _LARGEST_LOG))
    norm, slope_g, weight_g = splat(_ZERO), splat(_ZERO), splat(_ZERO)
    entropy, entropy_g = splat(_ZERO), splat(_ZERO)
    lowest, highest = splat(_ZERO), splat(_f(-np.inf))
    for k in range(0, n, LANES):
        weight = load(p + 4 * k)
        valid = both(first_lanes(n - k), greater(weight, splat(_ZERO)))
        weight = select(valid, weight, splat(_ONE))
        gradient = select(valid, load(g + 4 * k), splat(_ZERO))
        log_weight = log(weight)
        slope = weight if u < 1e-8 else exp((log_weight - base) * exponent)
        slope = select(valid, slope, splat(_ZERO))
        store(s + 4 * k, slope)
        store(logs + 4 * k, log_weight)
        # log of the padding's weight 1 is 0, so only p itself needs masking.
        h = splat(_ZERO) - weight * log_weight
        norm = norm + slope
        slope_g = muladd(slope, gradient, slope_g)
        weight_g = muladd(weight, gradient, weight_g)
        entropy = entropy + h
        entropy_g = muladd(h, gradient, entropy_g)
        lowest = select(greater(lowest, log_weight), log_weight, lowest)
        highest = maximum(select(valid, log_weight, highest), highest)
    total_entropy = float(sum_lanes(entropy))
    if sum_lanes(norm) == 0.0:
        # No positive weight: nothing was allowed in this row of a dense block, or the weights are NaN, to be handed on.
        result = _ZERO
        for k in range(n):
            if math.isnan(read_f32(p + 4 * k)):
                result = _f(np.nan)
        for k in range(n):
            write_f32(g + 4 * k, result)
        return float(result)
    delta = float(sum_lanes(slope_g)) / float(sum_lanes(norm))
    if wants_alpha and u < _STABLE_BELOW:
        depth = float(max_lanes(splat(_ZERO) - lowest))
        widest = u * max(depth - total_entropy, float(max_lanes(highest)) + total_entropy)
        return _alpha_gradient_near_softmax(p, g, s, logs, n, u, total_entropy, widest, delta, factor)
    shift = splat(_f(delta))
    scale = splat(_f(factor))
    for k in range(0, n, LANES):
        slopes = load(s + 4 * k)
        # Where the weight is 0, dP may be NaN: the values of a forbidden key are nobody's business.
        gradient = select(greater(slopes, splat(_ZERO)), load(g + 4 * k), splat(_ZERO))
        store(g + 4 * k, slopes * (gradient - shift) * scale)
    if not wants_alpha:
        return 0.0
    d_alpha = (float(sum_lanes(weight_g)) - delta) / (u * u)
    return d_alpha + (float(sum_lanes(entropy_g)) - total_entropy * delta) / u


@jit
def _through_softcap(r, ds, query, index, n, k):
    """Multiply dS by the slope of the cap at each score of the support, computed again from its dot product."""
    inverse = splat(_f(r.scaling / r.softcap))
    for t in range(0, n, LANES):
        dots = dots_of_gathered_rows(query, index + 4 * t, n - 1 - t, k, r.k_t, r.depth_vectors)
        value = tanh(dots * inverse)
        store(ds + 4 * t, load(ds + 4 * t) * (splat(_ONE) - value * value))


@jit
def _sparse_row(r, b, h, h_kv, i, row, dk, dk_t, dv, dv_t, g, w, logs):
    """Add up the gradients of one sparse row; return its d_alpha."""
    index, n = stored_row(r, row)
    dq = r.dq + b * r.dq_b + h * r.dq_h + i * r.dq_t
    if n == 0:
        if r.dq != 0:
            zero_floats(dq, LANES * r.depth_vectors)
        return 0.0
    p = index + 4 * n
    query = r.q + b * r.q_b + h * r.q_h + i * r.q_t
    dout = r.dout + b * r.dout_b + h * r.dout_h + i * r.dout_t
    k = r.k + b * r.k_b + h_kv * r.k_h
    v = r.v + b * r.v_b + h_kv * r.v_h
    for t in range(0, n, LANES):
        store(g + 4 * t, dots_of_gathered_rows(dout, index + 4 * t, n - 1 - t, v, r.v_t, r.value_vectors))
    if r.dweights != 0:
        line = r.dweights + 4 * r.keys * row
        for t in range(n):
            extra = read_f32(line + 4 * np.int64(read_i32(index + 4 * t)))
            write_f32(g + 4 * t, read_f32(g + 4 * t) + extra)
    weights = p
    if r.dropout_limit != 0:
        key = dropout_key(r.seed, row)
        drop_sparse(g, index, n, key, r.dropout_limit, r.dropout_scale, g)
        drop_sparse(p, index, n, key, r.dropout_limit, r.dropout_scale, w)
        weights = w
    if r.dv != 0:
        add_to_rows(dout, weights, index, n, dv, dv_t, r.value_vectors)
    plain = r.store_gradient == 0 and r.softcap == 0.0
    u = read_f64(r.alpha + 8 * h) - 1.0
    d_alpha = _row_gradient(p, g, w, logs, n, u, r.dalpha != 0, r.scaling if plain else 1.0)
    if r.store_gradient != 0:
        copy_floats(g, index + 8 * n, n)
    if r.softcap != 0.0:
        _through_softcap(r, g, query, index, n, k)
    if not plain:
        copy_scaled(g, g, (n + LANES - 1) // LANES, _f(r.scaling))
    if r.dq != 0:
        sum_rows(dq, g, index, n, k, r.k_t, r.depth_vectors)
    if r.dk != 0:
        add_to_rows(query, g, index, n, dk, dk_t, r.depth_vectors)
    return d_alpha


@jit
def _dense_block(r, b, h, h_kv, i, rows, row, dk, dk_t, dv, dv_t, v_pack, q_pack, slopes, logs, gradients, dropped):
    """Add up the gradients of a block stored densely, by matrix products; return its d_alpha."""
    low = np.int64(read_i32(r.row_start + 4 * row))
    stored, size = stored_row(r, row)
    width = -1 - size
    stride = dense_row_bytes(width, r.store_gradient)
    query = r.q + b * r.q_b + h * r.q_h + i * r.q_t
    dout = r.dout + b * r.dout_b + h * r.dout_h + i * r.dout_t
    k = r.k + b * r.k_b + h_kv * r.k_h + low * r.k_t
    span = 4 * r.span
    # dP = dO V^T with V in panels; the panels start at a multiple of PANEL, so does this product.
    origin = low // PANEL * PANEL
    depth = LANES * r.value_vectors
    for t in range(rows):
        copy_scaled(dout + t * r.dout_t, q_pack + 4 * depth * t, r.value_vectors, _ONE)
    for j in range(origin, low + width, PANEL):
        vectors = min(TILE_VECTORS, (low + width - j + LANES - 1) // LANES)
        panel = v_pack + (j // PANEL) * PANEL * 4 * depth
        target = gradients + 4 * (j - origin)
        product(q_pack, 4 * depth, 4, rows, panel, 4 * PANEL, vectors, target, span, depth, 0)
    gradients += 4 * (low - origin)
    weights, weights_row = stored, stride
    d_alpha = 0.0
    u = read_f64(r.alpha + 8 * h) - 1.0
    for t in range(rows):
        g = gradients + span * t
        p = stored + stride * t
        if r.dweights != 0:
            line = r.dweights + 4 * (r.keys * (row + t) + low)
            for j in range(width):
                write_f32(g + 4 * j, read_f32(g + 4 * j) + read_f32(line + 4 * j))
        if r.dropout_limit != 0:
            key = dropout_key(r.seed, row + t)
            drop_dense(g, low, width, key, r.dropout_limit, r.dropout_scale, g)
            drop_dense(p, low, width, key, r.dropout_limit, r.dropout_scale, dropped + span * t)
            weights, weights_row = dropped, span
        plain = r.store_gradient == 0
        d_alpha += _row_gradient(p, g, slopes, logs, width, u, r.dalpha != 0, r.scaling if plain else 1.0)
        if not plain:
            copy_floats(g, p + stride // 2, width)
            copy_scaled(g, g, (width + LANES - 1) // LANES, _f(r.scaling))
    if r.dv != 0:
        product(weights, 4, weights_row, width, dout, r.dout_t, r.value_vectors, dv + low * dv_t, dv_t, rows, 1)
    if r.dq != 0:
        dq = r.dq + b * r.dq_b + h * r.dq_h + i * r.dq_t
        product_of_seen(gradients, span, rows, k, r.k_t, r.depth_vectors, dq, r.dq_t, width)
    if r.dk != 0:
        product(gradients, 4, span, width, query, r.q_t, r.depth_vectors, dk + low * dk_t, dk_t, rows, 1)
    return d_alpha


@jit
def _add_alpha(r, chunk, b, h, d_alpha):
    if r.dalpha != 0:
        place = r.dalpha + 8 * ((chunk * r.batch + b) * r.heads + h)
        write_f64(place, read_f64(place) + d_alpha)


def run_backward(record):
    """Take items until none is left."""
    r = carray(record, 1)[0]
    v_pack = r.scratch + atomic_increment(r.counters + 8) * r.scratch_bytes
    q_pack, g = v_pack + r.pack_at, v_pack + r.rows_at
    w, logs = g + r.row_bytes, g + 2 * r.row_bytes
    gradients, dropped = v_pack + r.scores_at, v_pack + r.dropped_at
    items = r.batch * r.kv_heads * r.chunks
    while True:
        item = atomic_increment(r.counters)
        if item >= items:
            return
        b, h_kv, start, stop = item_blocks(r, item)
        chunk = item % r.chunks
        # Slices of one head add into their own copies, laid out [chunks, B, H_kv, T_k, D] behind each other.
        dk = r.dk + (chunk * r.batch + b) * r.dk_b + h_kv * r.dk_h
        dv = r.dv + (chunk * r.batch + b) * r.dv_b + h_kv * r.dv_h
        for j in range(r.keys):
            if r.dk != 0:
                zero_floats(dk + j * r.dk_t, LANES * r.depth_vectors)
            if r.dv != 0:
                zero_floats(dv + j * r.dv_t, LANES * r.value_vectors)
        packed = False
        for block in range(start, stop):
            first, rows = block_rows(r, block)
            row = (b * r.kv_heads + h_kv) * r.groups * r.queries + first
            h, i = place_row(r, h_kv, first)
            if rows > 0 and read_i32(r.row_size + 4 * row) < 0:
                if not packed:
                    v = r.v + b * r.v_b + h_kv * r.v_h
                    pack_panels(v, r.v_t, np.int64(0), r.keys, r.value_vectors, v_pack)
                    packed = True
                d_alpha = _dense_block(
                    r, b, h, h_kv, i, rows, row, dk, r.dk_t, dv, r.dv_t, v_pack, q_pack, w, logs, gradients, dropped
                )
                _add_alpha(r, chunk, b, h, d_alpha)
                continue
            for t in range(rows):
                h, i = place_row(r, h_kv, first + t)
                d_alpha = _sparse_row(r, b, h, h_kv, i, row + t, dk, r.dk_t, dv, r.dv_t, g, w, logs)
                _add_alpha(r, chunk, b, h, d_alpha)


@jit
def _add_stored(r, row, target, stride):
    """Add the stored score gradient of one row to ``target`` (byte stride ``stride`` over columns, possibly 0)."""
    address, n = stored_row(r, row)
    if n >= 0:
        for k in range(n):
            place = target + stride * np.int64(read_i32(address + 4 * k))
            write_f32(place, read_f32(place) + read_f32(address + 4 * (2 * n + k)))
        return
    width = -1 - n
    low = np.int64(read_i32(r.row_start + 4 * row))
    address += dense_row_bytes(width, r.store_gradient) // 2
    for k in range(width):
        place = target + stride * (low + k)
        write_f32(place, read_f32(place) + read_f32(address + 4 * k))


def run_bias_gradient(record):
    """Sum the stored score gradients over the dimensions a bias was broadcast over; one thread per row of the bias."""
    r = carray(record, 1)[0]
    items = r.dbias_b * r.dbias_h * r.dbias_q
    stride = 4 if r.dbias_k > 1 else 0
    while True:
        item = atomic_increment(r.counters)
        if item >= items:
            return
        line = r.dbias + 4 * r.dbias_k * item
        zero_floats(line, r.dbias_k)
        b_item, rest = item // (r.dbias_h * r.dbias_q), item % (r.dbias_h * r.dbias_q)
        h_item, i_item = rest // r.dbias_q, rest % r.dbias_q
        for b in range(r.batch if r.dbias_b == 1 else 1):
            for h in range(r.heads if r.dbias_h == 1 else 1):
                for i in range(r.queries if r.dbias_q == 1 else 1):
                    row = ((b + b_item) * r.heads + h + h_item) * r.queries + i + i_item
                    _add_stored(r, row, line, stride)
