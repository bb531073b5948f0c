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
from numba import njit
from numba.np.numpy_support import carray

from .forward import copy_scaled, drop_dense, drop_sparse, place_row, zero_floats
from .partition import block_rows, dropout_key, item_blocks
from .simd import (
    LANES,
    atomic_increment,
    both,
    first_lanes,
    greater,
    hashed_keep,
    indices,
    load,
    load_index,
    muladd,
    read_f32,
    read_f64,
    read_i32,
    read_i64,
    select,
    splat,
    store,
    sum_lanes,
    write_f32,
    write_f64,
)
from .tiles import PANEL, TILE_VECTORS, add_to_rows, dots_of_gathered_rows, pack_panels, product, sum_rows
from .vecmath import exp, exp_remainder, expm1, log, tanh

_f = np.float32
_ZERO, _ONE = _f(0.0), _f(1.0)
# From this u on the plain form of d_alpha loses less than one decimal digit.
_STABLE_BELOW = 0.5
# Below this u the limit u = 0 is exact to float32.
_LIMIT_BELOW = 1e-6


@njit(error_model="numpy")
def _alpha_gradient_near_softmax(p, g, n, u, entropy):
    """sum_i dP_i dp_i/dalpha in the form of exponentials' remainders, stable down to u = 0."""
    slope = splat(_f(-u))
    total = splat(_ZERO)
    for k in range(0, n, LANES):
        weight = load(p + 4 * k)
        valid = both(first_lanes(n - k), greater(weight, splat(_ZERO)))
        logs = log(select(valid, weight, splat(_ONE)))
        total = total + select(valid, weight * exp_remainder(logs * slope), splat(_ZERO))
    remainder = float(sum_lanes(total))
    y = u * entropy + remainder
    shift = math.log1p(y)
    # log1p(y) - y, by its series where that difference would cancel.
    tail = shift - y if y > 0.05 else -y * y * (0.5 - y * (1.0 / 3 - y * (0.25 - y * (0.2 - y * (1.0 / 6 - y / 7)))))
    constant = splat(_f(remainder + tail))
    steepness, offset = splat(_f(u * entropy)), splat(_f(-shift))
    total = splat(_ZERO)
    for k in range(0, n, LANES):
        weight = load(p + 4 * k)
        valid = both(first_lanes(n - k), greater(weight, splat(_ZERO)))
        logs = log(select(valid, weight, splat(_ONE)))
        x = muladd(logs, slope, offset)
        bracket = muladd(expm1(x), steepness, exp_remainder(x)) - constant
        total = total + select(valid, weight * bracket * load(g + 4 * k), splat(_ZERO))
    return -float(sum_lanes(total)) / (u * u)


@njit(error_model="numpy")
def _alpha_gradient_at_softmax(p, g, n):
    """The limit at alpha = 1: sum_i dP_i (h_i log p_i - p_i sum_j h_j log p_j) / 2."""
    first, second = splat(_ZERO), splat(_ZERO)
    total = splat(_ZERO)
    for k in range(0, n, LANES):
        weight = load(p + 4 * k)
        valid = both(first_lanes(n - k), greater(weight, splat(_ZERO)))
        weight = select(valid, weight, splat(_ONE))
        logs = log(weight)
        square = select(valid, weight * logs * logs, splat(_ZERO))
        gradient = select(valid, load(g + 4 * k), splat(_ZERO))
        first = muladd(square, gradient, first)
        second = second + square
        total = total + select(valid, weight * gradient, splat(_ZERO))
    return -0.5 * (float(sum_lanes(first)) - float(sum_lanes(total)) * float(sum_lanes(second)))


@njit(error_model="numpy")
def _row_gradient(p, g, n, u, wants_alpha):
    """Turn dP of one row in ``g`` into dS; returns the row's d_alpha. ``p`` may hold zeros (rows stored densely)."""
    exponent = splat(_f(1.0 - u))
    norm, slope_g, weight_g = splat(_ZERO), splat(_ZERO), splat(_ZERO)
    entropy, entropy_g = splat(_ZERO), splat(_ZERO)
    for k in range(0, n, LANES):
        weight = load(p + 4 * k)
        valid = both(first_lanes(n - k), greater(weight, splat(_ZERO)))
        weight = select(valid, weight, splat(_ONE))
        gradient = select(valid, load(g + 4 * k), splat(_ZERO))
        logs = log(weight)
        s = weight if u < 1e-8 else exp(logs * exponent)
        s = select(valid, s, splat(_ZERO))
        # log of the padding's weight 1 is 0, so only p itself needs masking.
        h = splat(_ZERO) - weight * logs
        norm = norm + s
        slope_g = muladd(s, gradient, slope_g)
        weight_g = muladd(weight, gradient, weight_g)
        entropy = entropy + h
        entropy_g = muladd(h, gradient, entropy_g)
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
    d_alpha = 0.0
    if not wants_alpha:
        pass
    elif u < _LIMIT_BELOW:
        d_alpha = _alpha_gradient_at_softmax(p, g, n)
    elif u < _STABLE_BELOW:
        d_alpha = _alpha_gradient_near_softmax(p, g, n, u, total_entropy)
    else:
        d_alpha = (float(sum_lanes(weight_g)) - delta) / (u * u)
        d_alpha += (float(sum_lanes(entropy_g)) - total_entropy * delta) / u
    shift = splat(_f(delta))
    for k in range(0, n, LANES):
        weight = load(p + 4 * k)
        valid = both(first_lanes(n - k), greater(weight, splat(_ZERO)))
        weight = select(valid, weight, splat(_ONE))
        s = weight if u < 1e-8 else exp(log(weight) * exponent)
        store(g + 4 * k, select(valid, s * (load(g + 4 * k) - shift), splat(_ZERO)))
    return d_alpha


@njit(error_model="numpy")
def _copy_gradient(source, target, n):
    for k in range(n):
        write_f32(target + 4 * k, read_f32(source + 4 * k))


@njit(error_model="numpy")
def _scale(values, n, factor):
    for k in range(0, n, LANES):
        store(values + 4 * k, load(values + 4 * k) * splat(_f(factor)))


@njit(error_model="numpy")
def _through_softcap(r, ds, query, index, n, k):
    """Multiply dS by the slope of the cap at each score of the support, computed again from its dot product."""
    inverse = splat(_f(r.scaling / r.softcap))
    for t in range(0, n, LANES):
        dots = dots_of_gathered_rows(query, index + 4 * t, n - 1 - t, k, r.k_t, r.depth_vectors)
        value = tanh(dots * inverse)
        store(ds + 4 * t, load(ds + 4 * t) * (splat(_ONE) - value * value))


@njit(error_model="numpy")
def _sparse_row(r, b, h, h_kv, i, row, dk, dk_t, dv, dv_t, g, w):
    """The gradients of one sparse row; returns its d_alpha."""
    index = read_i64(r.row_address + 8 * row)
    n = np.int64(read_i32(r.row_size + 4 * row))
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
        for t in range(0, n, LANES):
            kept = hashed_keep(load_index(index + 4 * t), key, r.dropout_limit)
            store(g + 4 * t, select(kept, load(g + 4 * t) * splat(_f(r.dropout_scale)), splat(_ZERO)))
        drop_sparse(p, index, n, key, r.dropout_limit, r.dropout_scale, w)
        weights = w
    if r.dv != 0:
        add_to_rows(dout, weights, index, n, dv, dv_t, r.value_vectors)
    d_alpha = _row_gradient(p, g, n, read_f64(r.alpha + 8 * h) - 1.0, r.dalpha != 0)
    if r.store_gradient != 0:
        _copy_gradient(g, index + 8 * n, n)
    if r.softcap != 0.0:
        _through_softcap(r, g, query, index, n, k)
    _scale(g, n, r.scaling)
    if r.dq != 0:
        sum_rows(dq, g, index, n, k, r.k_t, r.depth_vectors)
    if r.dk != 0:
        add_to_rows(query, g, index, n, dk, dk_t, r.depth_vectors)
    return d_alpha


@njit(error_model="numpy")
def _dense_block(r, b, h, h_kv, i, rows, row, dk, dk_t, dv, dv_t, v_pack, q_pack, gradients, dropped):
    """The gradients of a block stored densely, as matrix products; returns its d_alpha."""
    low = np.int64(read_i32(r.row_start + 4 * row))
    width = -1 - np.int64(read_i32(r.row_size + 4 * row))
    stride = 4 * width * (2 if r.store_gradient != 0 else 1)
    stored = read_i64(r.row_address + 8 * row)
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
            drop_dense(g, low, width, key, r.dropout_limit, r.dropout_scale)
            for j in range(0, width, LANES):
                kept = hashed_keep(indices(low + j), key, r.dropout_limit)
                value = select(kept, load(p + 4 * j) * splat(_f(r.dropout_scale)), splat(_ZERO))
                store(dropped + span * t + 4 * j, value)
            weights, weights_row = dropped, span
        d_alpha += _row_gradient(p, g, width, u, r.dalpha != 0)
        if r.store_gradient != 0:
            _copy_gradient(g, p + 4 * width, width)
        _scale(g, width, r.scaling)
    if r.dv != 0:
        product(weights, 4, weights_row, width, dout, r.dout_t, r.value_vectors, dv + low * dv_t, dv_t, rows, 1)
    if r.dq != 0:
        dq = r.dq + b * r.dq_b + h * r.dq_h + i * r.dq_t
        product(gradients, span, 4, rows, k, r.k_t, r.depth_vectors, dq, r.dq_t, width, 0)
    if r.dk != 0:
        product(gradients, 4, span, width, query, r.q_t, r.depth_vectors, dk + low * dk_t, dk_t, rows, 1)
    return d_alpha


@njit(error_model="numpy")
def _add_alpha(r, chunk, b, h, d_alpha):
    if r.dalpha != 0:
        place = r.dalpha + 8 * ((chunk * r.batch + b) * r.heads + h)
        write_f64(place, read_f64(place) + d_alpha)


@njit(error_model="numpy")
def run_backward(record):
    """Take items until none is left."""
    r = carray(record, 1)[0]
    thread = atomic_increment(r.counters + 8)
    v_pack = r.scratch + thread * r.scratch_bytes
    q_pack = v_pack + 64 * r.value_vectors * r.padded_keys
    row_bytes = 4 * (r.padded_keys + 2 * LANES)
    g = q_pack + 64 * r.value_vectors * r.block_rows
    w = g + row_bytes
    gradients = w + row_bytes
    dropped = gradients + 4 * r.block_rows * r.span + 64
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
                    pack_panels(v, r.v_t, 0, r.keys, r.value_vectors, v_pack)
                    packed = True
                d_alpha = _dense_block(
                    r, b, h, h_kv, i, rows, row, dk, r.dk_t, dv, r.dv_t, v_pack, q_pack, gradients, dropped
                )
                _add_alpha(r, chunk, b, h, d_alpha)
                continue
            for t in range(rows):
                h, i = place_row(r, h_kv, first + t)
                d_alpha = _sparse_row(r, b, h, h_kv, i, row + t, dk, r.dk_t, dv, r.dv_t, g, w)
                _add_alpha(r, chunk, b, h, d_alpha)


@njit(error_model="numpy")
def _add_stored(r, row, target, stride):
    """Add the stored score gradient of one row to ``target`` (byte stride ``stride`` over columns, possibly 0)."""
    address = read_i64(r.row_address + 8 * row)
    n = np.int64(read_i32(r.row_size + 4 * row))
    if n >= 0:
        for k in range(n):
            place = target + stride * np.int64(read_i32(address + 4 * k))
            write_f32(place, read_f32(place) + read_f32(address + 4 * (2 * n + k)))
        return
    width = -1 - n
    low = np.int64(read_i32(r.row_start + 4 * row))
    for k in range(width):
        place = target + stride * (low + k)
        write_f32(place, read_f32(place) + read_f32(address + 4 * (width + k)))


@njit(error_model="numpy")
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
