"""Exact sparse attention: bounds of all scores from the sketch of the keys, then each row from what may have weight.

See `hf_entmax.ops.exact.bounds` for why nothing is lost. Keys that no page of the sketch covers are bounded as well, by their
score and its rounding.

The pages of a row are dealt out to one or more programs, its splits, as in FlashDecoding: a step with few rows would leave most
of a GPU idle. Each finds the candidates among its pages and their scores; the threshold is that of all of them, and every
split computes it for itself, so that no program waits for another; each then sums the values of its own. Page ``i`` belongs to split
``i % splits``: keys with weight lie close together.
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
    inputs, terms, codes, low, step, norm, gaps, edges, rounding, pages, all_pages, problem,
    BITS: tl.constexpr, PAGE: tl.constexpr, DEPTH: tl.constexpr, CHANNELS: tl.constexpr, COLS: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Upper bounds of the scores of a page, as distances from the highest of them: see `_gap`.

    ``gaps``: float16 ``[B, H, T_q, all_pages, PAGE]``, infinite where a key is not visible. ``edges``, each
    ``[B, H, T_q, all_pages]``: how far below their upper bounds the lower ones of a page lie at most, the highest lower bound and
    the highest upper one, which is infinite where nothing is known. A tile holds rows of all query heads that share a key head.
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
    row = ((batch * problem.H + head) * T_q + rows) * all_pages + page
    z = tl.where(there[None, :], z, MASKED)
    highest = tl.max(z, 1)
    tl.store(
        gaps + row[:, None] * PAGE + within[None, :],
        _gap(z, highest[:, None]),
        mask=real[:, None] & (within < PAGE)[None, :],
    )
    width = tl.max(half, 1) * 2.0 * tl.abs(problem.scale)
    n_edges = (problem.B * problem.H * T_q).to(tl.int64) * all_pages
    tl.store(edges + row, width, mask=real)
    tl.store(edges + n_edges + row, tl.max(tl.where(z < float("inf"), z - width[:, None], MASKED), 1), mask=real)
    tl.store(edges + 2 * n_edges + row, highest, mask=real)


@triton.jit
def _gap(z, highest):
    """How far a bound lies below the highest of its page, float16 and never too far, so that it remains an upper bound.

    The difference is rounded by 2**-24 of it at most and the type by 2**-11, or by 2**-25 where it is below 2**-14: less than is taken
    off first. ``highest - gap`` is then at or above ``z`` exactly, hence after rounding too, which keeps the order. Where something in
    a page is unknown, all of it is.
    """
    gap = tl.where(highest < float("inf"), highest - z, 0.0)
    gap = tl.minimum(tl.maximum(gap * (1.0 - 2.0**-9) - 2.0**-24, 0.0), 65504.0)
    return tl.where(z > MASKED_BELOW, gap, float("inf")).to(tl.float16)


@triton.jit
def _bounds(gap, width, highest):
    """Lower and upper bounds of scores from what is kept of them; a score of which nothing is known has no lower one.

    The true distance from the highest is at most ``gap (1 + 2**-8 + 2**-10) + 2**-23`` where the gap is below what its type can hold.
    """
    gap = gap.to(tl.float32)
    known = (highest < float("inf")) & (gap < 65504.0)
    return tl.where(known, highest - (gap * (1.0 + 2.0**-7) + 2.0**-22) - width, MASKED), highest - gap


@triton.jit
def _list_pages(highest, least, page_list, split, splits, all_pages, CHUNK: tl.constexpr):
    """Write down the pages of a split whose highest bound is above ``least``; returns how many there are."""
    n = 0
    for first in range(split, all_pages, splits * CHUNK):
        page = first + splits * tl.arange(0, CHUNK)
        n = _append(page_list, page, tl.load(highest + page, mask=page < all_pages, other=MASKED) > least, n)
    tl.debug_barrier()
    return n


@triton.jit
def _load_bounds(gaps, width, highest, page_list, n, first, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """Lower and upper bounds of some columns of ``n`` listed pages, and their indices."""
    place = first + tl.arange(0, CHUNK)
    inside = place < n * PAGE
    page = tl.load(page_list + place // PAGE, mask=inside, other=0)
    cols = page * PAGE + place % PAGE
    gap = tl.load(gaps + cols, mask=inside, other=float("inf"))
    top = tl.load(highest + page, mask=inside, other=0.0)
    low, high = _bounds(gap, tl.load(width + page, mask=inside, other=0.0), top)
    return low, high, cols


@triton.jit
def _append(target, value, chosen, n):
    """Write the chosen values behind the ``n`` that are there; returns how many there are now."""
    chosen = chosen.to(tl.int32)
    tl.store(target + n + tl.cumsum(chosen, 0) - 1, value, mask=chosen != 0)
    return n + tl.sum(chosen, 0)


@triton.jit
def _load_scores(scores, lengths, size, first, WIDTH: tl.constexpr):
    """Some entries of the lists of a row's splits, ``[len(lengths), WIDTH]``, ``MASKED`` behind their ends.

    ``scores``: the first list; ``size``: from one list to the next.
    """
    place = first + tl.arange(0, WIDTH)[None, :]
    split = tl.arange(0, lengths.shape[0])[:, None]
    return tl.load(scores + split * size + place, mask=place < lengths[:, None], other=MASKED)


@triton.jit
def _mass(scores, lengths, size, top, c, mapping, ALPHA: tl.constexpr, WIDTH: tl.constexpr):
    """``sum p``, ``sum s`` and ``sum s / w`` of lists of scores at the threshold ``c``, relative to ``top``."""
    total, slope, curvature = 0.0, 0.0, 0.0
    for first in range(0, tl.max(lengths, 0), WIDTH):
        z = _load_scores(scores, lengths, size, first, WIDTH)
        p, s, e, _ = expq(tl.where(z <= MASKED_BELOW, MASKED, z - top - c), mapping, ALPHA)
        total += tl.sum(tl.sum(p, 1), 0)
        slope += tl.sum(tl.sum(s, 1), 0)
        curvature += tl.sum(tl.sum(e, 1), 0)
    return total, slope, curvature


@triton.jit
def _threshold(scores, lengths, size, top, mapping, max_passes, ALPHA: tl.constexpr, WIDTH: tl.constexpr):
    """The threshold of lists of scores, relative to ``top``."""
    c, low = 0.0, 0.0
    high = largest_threshold(tl.sum(lengths, 0).to(tl.float32), mapping.u)
    n_passes = 0
    unfinished = 1
    while (n_passes < max_passes) & (unfinished != 0):
        total, slope, curvature = _mass(scores, lengths, size, top, c, mapping, ALPHA, WIDTH)
        c, low, high, row_unfinished = threshold_step(
            c, low, high, total, slope, curvature, n_passes, mapping.u, TOLERANCE
        )
        unfinished = row_unfinished.to(tl.int32)
        n_passes += 1
    return c


@triton.jit(do_not_specialize=["splits", "all_pages", "size"])
def _candidate_scores_kernel(
    inputs, terms, sink, gaps, edges, page_list, found, scores, lengths, splits, all_pages, size, max_passes, problem,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The scores of what may have weight among the pages of one split of a row.

    ``found`` and ``scores`` ``[rows, splits, size]`` hold lists, ``lengths`` ``[rows, splits]`` how long they are; the first entry of a
    row is the sink's, absent or not, and that of the other splits no key. ``page_list`` ``[rows, splits, pages of a split]``: bounds
    are read page by page, where the highest of a page says that one of them matters.
    """
    COLS: tl.constexpr = OPTIONS.COLS
    problem = whole_numbers(problem)
    T_q, T_k = problem.T_q, problem.T_k
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    index, plane = row % T_q, row // T_q
    batch, head = (plane // problem.H).to(tl.int64), (plane % problem.H).to(tl.int64)
    kv_head = head // problem.group
    pages_of_row = row.to(tl.int64) * all_pages
    gaps += pages_of_row * PAGE
    page_list += tl.program_id(0).to(tl.int64) * tl.cdiv(all_pages, splits)
    n_edges = (tl.num_programs(0) // splits).to(tl.int64) * all_pages
    width = edges + pages_of_row
    highest_low, highest = width + n_edges, width + 2 * n_edges
    found += tl.program_id(0).to(tl.int64) * size
    scores += tl.program_id(0).to(tl.int64) * size
    head_alpha = tl.load(inputs.alpha + head)
    mapping = make_mapping(head_alpha, head_alpha)

    # Lower bounds of some scores give a threshold below the row's own: all of this split, and the highest of each page of the others.
    top = tl.load(sink + head) if sink is not None else MASKED
    top = tl.maximum(top.to(tl.float32), MASKED, propagate_nan=tl.PropagateNan.ALL)
    first_score = tl.where(split == 0, top, MASKED)
    tl.store(scores, top)
    n = 1
    for first in range(0, all_pages, CHUNK):
        page = first + tl.arange(0, CHUNK)
        low = tl.load(highest_low + page, mask=page < all_pages, other=MASKED)
        top = tl.maximum(top, tl.max(low, 0), propagate_nan=tl.PropagateNan.ALL)
    floor = MASKED_BELOW
    if (mapping.u > _LEAST_U) & (top > MASKED_BELOW):
        least = tl.maximum(top - mapping.inv_u, MASKED_BELOW)
        n_pages = _list_pages(highest_low, least, page_list, split, splits, all_pages, CHUNK)
        for first in range(0, n_pages * PAGE, CHUNK):
            low, _, _ = _load_bounds(gaps, width, highest, page_list, n_pages, first, PAGE, CHUNK)
            n = _append(scores, low, low > least, n)
        if splits > 1:
            for first in range(0, all_pages, CHUNK):
                page = first + tl.arange(0, CHUNK)
                other = (page < all_pages) & (page % splits != split)
                low = tl.load(highest_low + page, mask=other, other=MASKED)
                n = _append(scores, low, low > least, n)
        tl.debug_barrier()
        n_lows = tl.full([1], n, tl.int32)
        c = _threshold(scores, n_lows, size, top, mapping, max_passes, OPTIONS.ALPHA, CHUNK)
        margin = _MARGIN * (1.0 + tl.abs(top) + mapping.inv_u + problem.softcap)
        # Weights that sum to 1 or more prove that the threshold does not lie below this.
        total, _, _ = _mass(scores, n_lows, size, top, c - margin, mapping, OPTIONS.ALPHA, CHUNK)
        floor = tl.where(total >= 1.0, top + (c - mapping.inv_u - 2.0 * margin), MASKED_BELOW)
        tl.debug_barrier()
    n = 1
    floor = tl.maximum(floor, MASKED_BELOW)
    n_pages = _list_pages(highest, floor, page_list, split, splits, all_pages, CHUNK)
    for first in range(0, n_pages * PAGE, CHUNK):
        _, high, cols = _load_bounds(gaps, width, highest, page_list, n_pages, first, PAGE, CHUNK)
        n = _append(found, cols, high > floor, n)
    tl.debug_barrier()

    # The scores of what is left, as in dense attention.
    terms = ScoreTerms(
        select(terms.mask, batch, head) if terms.mask is not None else None,
        select(terms.bias, batch, head) if terms.bias is not None else None,
        select(terms.key_mask, batch, head) if terms.key_mask is not None else None,
    )
    key = select(inputs.key, batch, kv_head)
    own = load_rows(select(inputs.query, batch, head), index + tl.arange(0, 1), T_q, OPTIONS.D, OPTIONS.BLOCK_D)
    own = tl.sum(own.to(tl.float32), 0)
    for first in range(0, n, COLS):
        k = first + tl.arange(0, COLS)
        listed = (k > 0) & (k < n)
        cols = tl.load(found + k, mask=listed, other=T_k)
        keys = load_rows(key, cols, T_k, OPTIONS.D, OPTIONS.BLOCK_D).to(tl.float32)
        dots = tl.sum(keys * own[None, :], 1)
        z, _ = masked_scores(
            dots[None, :], tl.zeros([1, 1], tl.int32) + index, cols[None, :], T_q, 0, terms, problem, OPTIONS
        )
        tl.store(scores + k, tl.sum(z, 0), mask=listed)
    tl.store(scores, first_score)
    tl.store(lengths + tl.program_id(0), n)


@triton.jit(do_not_specialize=["splits", "size"])
def _candidate_output_kernel(
    inputs, found, scores, lengths, out, nonzero, splits, size, max_passes, problem,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """What the keys of one split add to the output of a row, and how many have weight, from the scores of all splits of the row.

    ``found``, ``scores`` and ``lengths`` as they were left. ``out`` ``[B, H, T_q * splits, D_V]``, ``nonzero`` ``[rows, splits]``.
    ``SPLITS``: a power of 2 that is not below ``splits``.
    """
    COLS: tl.constexpr = OPTIONS.COLS
    problem = whole_numbers(problem)
    T_q, T_k = problem.T_q, problem.T_k
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    index, plane = row % T_q, row // T_q
    batch, head = (plane // problem.H).to(tl.int64), (plane % problem.H).to(tl.int64)
    head_alpha = tl.load(inputs.alpha + head)
    mapping = make_mapping(head_alpha, head_alpha)
    of_row = scores + row.to(tl.int64) * splits * size
    each = tl.arange(0, SPLITS)
    n_each = tl.load(lengths + row * splits + each, mask=each < splits, other=0)

    # NaN, which the maximum passes over, and the infinities show apart.
    row_max, wrong = MASKED, 0
    for first in range(0, tl.max(n_each, 0), WIDTH):
        z = _load_scores(of_row, n_each, size, first, WIDTH)
        row_max = tl.maximum(row_max, tl.max(tl.max(z, 1), 0))
        wrong = tl.maximum(wrong, tl.max(tl.max((z - z != 0.0).to(tl.int32), 1), 0))
    row_max = tl.where(row_max > MASKED_BELOW, row_max, 0.0)
    row_max = tl.where(wrong != 0, float("nan"), row_max)
    c = _threshold(of_row, n_each, size, row_max, mapping, max_passes, OPTIONS.ALPHA, WIDTH)
    total, _slope, _curvature = _mass(of_row, n_each, size, row_max, c, mapping, OPTIONS.ALPHA, WIDTH)
    # Rows without a key have 0 / 1; NaN rows stay NaN.
    total = tl.where(total == 0.0, 1.0, total) + (row_max - row_max)

    # Values are read where the weight is not zero.
    value = select(inputs.value, batch, head // problem.group)
    found += tl.program_id(0).to(tl.int64) * size
    scores += tl.program_id(0).to(tl.int64) * size
    n = tl.load(lengths + tl.program_id(0))
    n_weighted = 0
    acc = tl.zeros([OPTIONS.BLOCK_V], tl.float32)
    for first in range(0, n, COLS):
        k = first + tl.arange(0, COLS)
        z = tl.load(scores + k, mask=k < n, other=MASKED)
        p, _, _, _ = expq(tl.where(z <= MASKED_BELOW, MASKED, z - row_max - c), mapping, OPTIONS.ALPHA)
        weighted = (p != 0.0) & (k > 0)
        cols = tl.load(found + k, mask=weighted, other=T_k)
        acc += tl.sum(p[:, None] * load_rows(value, cols, T_k, OPTIONS.D_V, OPTIONS.BLOCK_V).to(tl.float32), 0)
        n_weighted += tl.sum(weighted.to(tl.int32), 0)
    place = index * splits + split + tl.arange(0, 1)
    store_rows(select(out, batch, head), (acc / total)[None, :], place, T_q * splits, OPTIONS.D_V, OPTIONS.BLOCK_V)
    tl.store(nonzero + tl.program_id(0), n_weighted)
