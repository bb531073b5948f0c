"""Exact sparse attention: bounds of all scores from the sketch of the keys, then each row from what may have weight.

See `hf_entmax.ops.exact.bounds` for why nothing is lost. Keys that no page of the sketch covers are bounded as well, by their
score and its rounding.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportRedeclaration=false
# Some releases of Triton declare that a kernel called by a kernel never returns.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from hf_entmax.ops.exact.bounds import LEAST_U
from hf_entmax.ops.sketch_format import HALF_STEP, LANES, THRESHOLD_ROUNDINGS
from hf_entmax.ops.triton_gpu.row_math import (
    MASKED,
    MASKED_BELOW,
    TOLERANCE,
    expq,
    largest_threshold,
    make_mapping,
    threshold_step,
)
from hf_entmax.ops.triton_gpu.tiles import (
    ScoreTerms,
    dot,
    load_elements,
    load_rows,
    masked_scores,
    select,
    store_rows,
    whole_numbers,
)

_LANES, _HALF_STEP, _LEAST_U = tl.constexpr(LANES), tl.constexpr(HALF_STEP), tl.constexpr(LEAST_U)
# What two bfloat16 numbers leave of a float32 number, at most, as a share of it.
_LEFT = tl.constexpr(2.0**-15)
_MARGIN = tl.constexpr(THRESHOLD_ROUNDINGS * 2.0**-23)


@triton.jit
def _load_codes(plane, channels, keys, inside, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of ``WIDTH`` bits of a page, laid out as `hf_entmax.ops.exact.KeySketch` says; indices in two dimensions."""
    FIELDS: tl.constexpr = 8 // WIDTH
    chunk = keys // _LANES * (DEPTH * WIDTH // 32) + channels // (4 * FIELDS)
    byte = tl.load(plane + (chunk * _LANES + keys % _LANES) * 4 + channels % 4, mask=inside, other=0)
    return (byte.to(tl.int32) >> (channels // 4 % FIELDS * WIDTH)) & (2**WIDTH - 1)


@triton.jit(do_not_specialize=["pages", "all_pages"])
def _score_bounds_kernel(
    inputs, terms, codes, low, step, norm, upper, edges, rounding, pages, all_pages, problem,
    BITS: tl.constexpr, PAGE: tl.constexpr, DEPTH: tl.constexpr, CHANNELS: tl.constexpr, COLS: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Upper bounds ``[B, H, T_q, T_k]`` of the scores of a page, infinite where nothing is known, ``MASKED`` where not visible.

    ``edges`` ``[3, B, H, T_q, all_pages]``: how far below them the lower bounds of a page lie at most, the highest lower bound
    and the highest upper one. A tile holds rows of all query heads that share a key head.
    """
    ROWS: tl.constexpr = OPTIONS.ROWS
    problem = whole_numbers(problem)
    T_q, T_k, group = problem.T_q, problem.T_k, problem.group
    kv_heads, blocks = problem.H // group, tl.cdiv(group * T_q, ROWS)
    # One axis of the grid: the others end at 65,535.
    page, block = tl.program_id(0) % all_pages, tl.program_id(0) // all_pages
    plane = block // blocks
    batch, kv_head = (plane // kv_heads).to(tl.int64), (plane % kv_heads).to(tl.int64)
    place = block % blocks * ROWS + tl.arange(0, ROWS)
    real = place < group * T_q
    head = kv_head * group + tl.where(real, place // T_q, 0)
    # Pointers differ from row to row.
    queries = select(inputs.query, batch, head[:, None])
    rows = tl.where(real, place % T_q, T_q)
    within = tl.arange(0, COLS)
    cols = page * PAGE + within
    there = (within < PAGE) & (cols < T_k)
    key, codes, low, step = (
        select(inputs.key, batch, kv_head), select(codes, batch, kv_head), select(low, batch, kv_head), select(step, batch, kv_head)
    )  # fmt: skip
    codes_of_page = codes.pointer + page.to(tl.int64) * codes.stride_t

    dots = tl.zeros([ROWS, COLS], tl.float32)
    base, steps, squares = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    key_squares = tl.zeros([COLS], tl.float32)
    sketched = page < pages
    for first in range(0, DEPTH, CHANNELS):
        d = first + tl.arange(0, CHANNELS)
        q = load_elements(queries, rows[:, None], d[None, :], real[:, None] & (d < OPTIONS.D)[None, :]).to(tl.float32)
        squares += tl.sum(q * q, 1)
        if sketched:
            at = page.to(tl.int64) * low.stride_t + d
            base += tl.sum(q * tl.load(low.pointer + at).to(tl.float32)[None, :], 1)
            weight = q * tl.load(step.pointer + at).to(tl.float32)[None, :]
            steps += tl.sum(tl.abs(weight), 1)
            channels, keys, inside = d[:, None], within[None, :], (within < PAGE)[None, :] & (d >= 0)[:, None]
            if BITS == 6:
                code = _load_codes(codes_of_page, channels, keys, inside, DEPTH, 4) << 2
                code += _load_codes(codes_of_page + PAGE * DEPTH // 2, channels, keys, inside, DEPTH, 2)
            else:
                code = _load_codes(codes_of_page, channels, keys, inside, DEPTH, BITS)
            # Exact: codes have eight bits. The weight is split into two numbers of half precision, for tensor cores.
            code = code.to(tl.float32).to(tl.bfloat16)
            large = weight.to(tl.bfloat16)
            dots = dot(large, code, dots, "ieee")
            dots = dot((weight - large.to(tl.float32)).to(tl.bfloat16), code, dots, "ieee")
        else:
            k = load_elements(key, cols[None, :], d[:, None], there[None, :] & (d < OPTIONS.D)[:, None]).to(tl.float32)
            dots = dot(q, k, dots, "ieee")
            key_squares += tl.sum(k * k, 0)

    size = tl.sqrt(key_squares)
    if sketched:
        size += tl.load(select(norm, batch, kv_head).pointer + page * norm.stride_t)
    dots += base[:, None]
    half = (steps * (_HALF_STEP + (2**BITS - 1) * _LEFT))[:, None]
    half += (rounding * tl.sqrt(squares) + 1e-37)[:, None] * size[None, :]
    # NaN too means that nothing is known.
    known = tl.abs(dots) + half < float("inf")
    dots, half = tl.where(known, dots, 0.0), tl.where(known & there[None, :], half, 0.0)
    bound = dots + tl.where(problem.scale < 0, -half, half)
    z, _ = masked_scores(bound, rows[:, None], cols[None, :], T_q, 0, ScoreTerms(
        select(terms.mask, batch, head[:, None]) if terms.mask is not None else None,
        select(terms.bias, batch, head[:, None]) if terms.bias is not None else None,
        select(terms.key_mask, batch, kv_head * group) if terms.key_mask is not None else None,
    ), problem, OPTIONS)  # fmt: skip
    z = tl.where((z != z) | ((z > MASKED_BELOW) & (known == 0)), float("inf"), z)
    row = (batch * problem.H + head) * T_q + rows
    tl.store(upper + row[:, None] * T_k + cols[None, :], z, mask=real[:, None] & there[None, :])
    width = tl.max(half, 1) * 2.0 * tl.abs(problem.scale)
    z = tl.where(there[None, :], z, MASKED)
    n_edges = (problem.B * problem.H * T_q).to(tl.int64) * all_pages
    edges += row * all_pages + page
    tl.store(edges, width, mask=real)
    tl.store(edges + n_edges, tl.max(_lower(z, width[:, None]), 1), mask=real)
    tl.store(edges + 2 * n_edges, tl.max(z, 1), mask=real)


@triton.jit
def _lower(high, width):
    """Lower bounds from upper ones; a score of which nothing is known has none."""
    return tl.where(high < float("inf"), high - width, MASKED)


@triton.jit
def _list_pages(highest, least, page_list, all_pages, CHUNK: tl.constexpr):
    """Write down the pages whose highest bound is above ``least``; returns how many there are."""
    n = 0
    for first in range(0, all_pages, CHUNK):
        page = first + tl.arange(0, CHUNK)
        n = _append(page_list, page, tl.load(highest + page, mask=page < all_pages, other=MASKED) > least, n)
    tl.debug_barrier()
    return n


@triton.jit
def _load_bounds(upper, width, page_list, n, first, T_k, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """Lower and upper bounds of some columns of ``n`` listed pages, and their indices."""
    place = first + tl.arange(0, CHUNK)
    inside = place < n * PAGE
    page = tl.load(page_list + place // PAGE, mask=inside, other=0)
    cols = page * PAGE + place % PAGE
    high = tl.load(upper + cols, mask=inside & (cols < T_k), other=MASKED)
    return _lower(high, tl.load(width + page, mask=inside, other=0.0)), high, cols


@triton.jit
def _append(target, value, chosen, n):
    """Write the chosen values behind the ``n`` that are there; returns how many there are now."""
    chosen = chosen.to(tl.int32)
    tl.store(target + n + tl.cumsum(chosen, 0) - 1, value, mask=chosen != 0)
    return n + tl.sum(chosen, 0)


@triton.jit
def _mass(scores, n, top, c, mapping, ALPHA: tl.constexpr, CHUNK: tl.constexpr):
    """``sum p``, ``sum s`` and ``sum s / w`` of a list of scores at the threshold ``c``, relative to ``top``."""
    total, slope, curvature = 0.0, 0.0, 0.0
    for first in range(0, n, CHUNK):
        k = first + tl.arange(0, CHUNK)
        z = tl.load(scores + k, mask=k < n, other=MASKED)
        p, s, e, _ = expq(tl.where(z <= MASKED_BELOW, MASKED, z - top - c), mapping, ALPHA)
        total += tl.sum(p, 0)
        slope += tl.sum(s, 0)
        curvature += tl.sum(e, 0)
    return total, slope, curvature


@triton.jit
def _threshold(scores, n, top, mapping, max_passes, ALPHA: tl.constexpr, CHUNK: tl.constexpr):
    """The threshold of a list of scores, relative to ``top``."""
    c, low = 0.0, 0.0
    high = largest_threshold(n.to(tl.float32), mapping.u)
    n_passes = 0
    unfinished = 1
    while (n_passes < max_passes) & (unfinished != 0):
        total, slope, curvature = _mass(scores, n, top, c, mapping, ALPHA, CHUNK)
        c, low, high, row_unfinished = threshold_step(
            c, low, high, total, slope, curvature, n_passes, mapping.u, TOLERANCE
        )
        unfinished = row_unfinished.to(tl.int32)
        n_passes += 1
    return c


@triton.jit
def _exact_rows_kernel(
    inputs, terms, sink, upper, edges, page_list, found, scores, out, counts, all_pages, max_passes, problem,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Output of one row, and how many keys were read and have weight: counts ``[2, rows]``.

    ``found`` and ``scores`` ``[rows, T_k + 1]`` hold lists; their first entry is the sink's, absent or not. ``page_list``
    ``[rows, all_pages]``: bounds are read page by page, where the highest of a page says that one of them matters.
    """
    COLS: tl.constexpr = OPTIONS.COLS
    problem = whole_numbers(problem)
    T_q, T_k = problem.T_q, problem.T_k
    row = tl.program_id(0)
    index, plane = row % T_q, row // T_q
    batch, head = (plane // problem.H).to(tl.int64), (plane % problem.H).to(tl.int64)
    kv_head = head // problem.group
    upper += row.to(tl.int64) * T_k
    page_list += row.to(tl.int64) * all_pages
    n_edges = tl.num_programs(0).to(tl.int64) * all_pages
    width = edges + row.to(tl.int64) * all_pages
    highest_low, highest = width + n_edges, width + 2 * n_edges
    found += row.to(tl.int64) * (T_k + 1)
    scores += row.to(tl.int64) * (T_k + 1)
    head_alpha = tl.load(inputs.alpha + head)
    mapping = make_mapping(head_alpha, head_alpha)

    # Lower bounds give a threshold below the row's own.
    top = tl.load(sink + head) if sink is not None else MASKED
    top = tl.maximum(top.to(tl.float32), MASKED, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scores, top)
    n = 1
    for first in range(0, all_pages, CHUNK):
        page = first + tl.arange(0, CHUNK)
        low = tl.load(highest_low + page, mask=page < all_pages, other=MASKED)
        top = tl.maximum(top, tl.max(low, 0), propagate_nan=tl.PropagateNan.ALL)
    floor = MASKED_BELOW
    if (mapping.u > _LEAST_U) & (top > MASKED_BELOW):
        least = tl.maximum(top - mapping.inv_u, MASKED_BELOW)
        n_pages = _list_pages(highest_low, least, page_list, all_pages, CHUNK)
        for first in range(0, n_pages * PAGE, CHUNK):
            low, _, _ = _load_bounds(upper, width, page_list, n_pages, first, T_k, PAGE, CHUNK)
            n = _append(scores, low, low > least, n)
        tl.debug_barrier()
        c = _threshold(scores, n, top, mapping, max_passes, OPTIONS.ALPHA, CHUNK)
        margin = _MARGIN * (1.0 + tl.abs(top) + mapping.inv_u + problem.softcap)
        # Weights that sum to 1 or more prove that the threshold does not lie below this.
        total, _, _ = _mass(scores, n, top, c - margin, mapping, OPTIONS.ALPHA, CHUNK)
        floor = tl.where(total >= 1.0, top + (c - mapping.inv_u - 2.0 * margin), MASKED_BELOW)
        tl.debug_barrier()
    n = 1
    floor = tl.maximum(floor, MASKED_BELOW)
    n_pages = _list_pages(highest, floor, page_list, all_pages, CHUNK)
    for first in range(0, n_pages * PAGE, CHUNK):
        _, high, cols = _load_bounds(upper, width, page_list, n_pages, first, T_k, PAGE, CHUNK)
        n = _append(found, cols, high > floor, n)
    tl.debug_barrier()

    # The scores of what is left, as in dense attention. NaN, which the maximum passes over, and the infinities show apart.
    terms = ScoreTerms(
        select(terms.mask, batch, head) if terms.mask is not None else None,
        select(terms.bias, batch, head) if terms.bias is not None else None,
        select(terms.key_mask, batch, head) if terms.key_mask is not None else None,
    )
    key, value = select(inputs.key, batch, kv_head), select(inputs.value, batch, kv_head)
    own = load_rows(select(inputs.query, batch, head), index + tl.arange(0, 1), T_q, OPTIONS.D, OPTIONS.BLOCK_D)
    own = tl.sum(own.to(tl.float32), 0)
    row_max = tl.load(scores)
    wrong = (row_max - row_max != 0.0).to(tl.int32)
    for first in range(0, n, COLS):
        k = first + tl.arange(0, COLS)
        listed = (k > 0) & (k < n)
        cols = tl.load(found + k, mask=listed, other=T_k)
        keys = load_rows(key, cols, T_k, OPTIONS.D, OPTIONS.BLOCK_D).to(tl.float32)
        dots = tl.sum(keys * own[None, :], 1)
        z, _ = masked_scores(
            dots[None, :], tl.zeros([1, 1], tl.int32) + index, cols[None, :], T_q, 0, terms, problem, OPTIONS
        )
        z = tl.sum(z, 0)
        row_max = tl.maximum(row_max, tl.max(z, 0))
        wrong = tl.maximum(wrong, tl.max((z - z != 0.0).to(tl.int32), 0))
        tl.store(scores + k, z, mask=listed)
    row_max = tl.where(row_max > MASKED_BELOW, row_max, 0.0)
    row_max = tl.where(wrong != 0, float("nan"), row_max)
    tl.debug_barrier()
    c = _threshold(scores, n, row_max, mapping, max_passes, OPTIONS.ALPHA, CHUNK)

    # Values are read where the weight is not zero.
    total, nonzero = 0.0, 0
    acc = tl.zeros([OPTIONS.BLOCK_V], tl.float32)
    for first in range(0, n, COLS):
        k = first + tl.arange(0, COLS)
        z = tl.load(scores + k, mask=k < n, other=MASKED)
        p, _, _, _ = expq(tl.where(z <= MASKED_BELOW, MASKED, z - row_max - c), mapping, OPTIONS.ALPHA)
        weighted = (p != 0.0) & (k > 0)
        cols = tl.load(found + k, mask=weighted, other=T_k)
        acc += tl.sum(p[:, None] * load_rows(value, cols, T_k, OPTIONS.D_V, OPTIONS.BLOCK_V).to(tl.float32), 0)
        total += tl.sum(p, 0)
        nonzero += tl.sum(weighted.to(tl.int32), 0)
    # Rows without a key have 0 / 1; NaN rows stay NaN.
    total = tl.where(total == 0.0, 1.0, total) + (row_max - row_max)
    store_rows(
        select(out, batch, head), (acc / total)[None, :], index + tl.arange(0, 1), T_q, OPTIONS.D_V, OPTIONS.BLOCK_V
    )
    tl.store(counts + row, n - 1)
    tl.store(counts + tl.num_programs(0) + row, nonzero)
