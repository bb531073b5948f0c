"""Exact sparse attention over keys in blocks of one buffer: what attention over each sequence alone gives."""

import pytest
import torch
from tolerances import assert_half

from hf_entmax.ops import available_backends
from hf_entmax.ops.attention import attend
from hf_entmax.ops.exact import KeySketch
from hf_entmax.ops.exact.blocks import BlockTable
from hf_entmax.ops.exact.paged import paged_attention
from hf_entmax.ops.options import AttentionOptions

pytestmark = pytest.mark.usefixtures("two_threads")
BACKENDS = [n for n, why in available_backends().items() if n != "triton" and why.startswith("available")]
H, H_KV, D, SIZE, PAGE = 6, 2, 20, 64, 32
LENGTHS = (1, 33, 64, 150, 197, 200)


def _problem(dtype=torch.float32, bits=4):
    """Sequences whose blocks lie in disorder, two of which share their first ones; all other rows are NaN."""
    blocks, stride = 16, 3 * SIZE  # values, and another layer, lie between
    key, value = (torch.full((1, H_KV, blocks * stride, D), torch.nan, dtype=dtype) for _ in range(2))
    order = torch.randperm(blocks).tolist()
    tables = torch.zeros(len(LENGTHS), 4, dtype=torch.int32)
    for b, length in enumerate(LENGTHS):
        for n in range(-(-length // SIZE)):
            shared = b == len(LENGTHS) - 1 and n < 2
            tables[b, n] = tables[b - 1, n] if shared else order.pop()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    table = BlockTable(tables, lengths, lengths // PAGE * PAGE, SIZE, stride)
    sketch = KeySketch.allocate(1, H_KV, D, blocks * SIZE, bits=bits, page_size=PAGE, dtype=dtype)
    sketch.norm.fill_(torch.nan)
    for b in range(len(LENGTHS)):
        rows = table.rows(b)
        fresh = rows[key[0, 0, rows, 0].isnan()]
        key[:, :, fresh] = torch.randn(1, H_KV, len(fresh), D).to(dtype)
        value[:, :, fresh] = torch.randn(1, H_KV, len(fresh), D).to(dtype)
        pages = table.pages(b, PAGE)
        if len(pages):
            sketch.put(key[:, :, rows[: len(pages) * PAGE]], pages)
    query = (2 * torch.randn(len(LENGTHS), H, 1, D)).to(dtype)
    return query, key, value, table, sketch


def _alone(query, key, value, alpha, table, backend="auto", **options):
    outs = []
    for b in range(len(query)):
        rows = table.rows(b)
        own = query[b : b + 1], key[:, :, rows], value[:, :, rows], alpha, AttentionOptions(**options), backend
        outs.append(attend(*own)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scaling": 0.5}, {"sink": torch.linspace(-2, 2, H)}], ids=str)
def test_every_sequence_is_attended_to_by_itself(backend, options):
    query, key, value, table, sketch = _problem()
    alpha = torch.tensor([1.0, 1.05, 1.5, 1.2, 2.0, 3.0])
    expected = _alone(query.double(), key.double(), value.double(), alpha.double(), table, backend="torch", **options)
    for own in (sketch, None):
        out, counts = paged_attention(query, key, value, alpha, table, own, AttentionOptions(**options), backend)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
        assert counts.total.tolist() == [[length] * H for length in LENGTHS]
        assert (counts.nonzero <= counts.read).all() and (counts.read <= counts.total).all()
        # Sparse heads leave keys of long sequences unread where there is a sketch, and only there.
        assert bool((counts.read[3:, [2, 4, 5]] < counts.total[3:, [2, 4, 5]]).all()) == (own is sketch)


@pytest.mark.parametrize("bits", [2, 6, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_other_numbers_of_bits(dtype, bits):
    query, key, value, table, sketch = _problem(dtype, bits)
    expected = _alone(query.double(), key.double(), value.double(), 1.5, table)
    plain = _alone(query, key, value, 1.5, table)
    out, _ = paged_attention(query, key, value, 1.5, table, sketch, AttentionOptions())
    assert_half(out, plain, expected)


def test_both_backends_read_what_the_bounds_ask_for():
    query, key, value, table, sketch = _problem()
    counts = [paged_attention(query, key, value, 1.5, table, sketch, AttentionOptions(), name)[1] for name in BACKENDS]
    for own in counts:
        assert torch.equal(own.total, counts[0].total) and torch.equal(own.nonzero, counts[0].nonzero)


def test_what_it_does_not_take_is_refused():
    query, key, value, table, sketch = _problem()
    with pytest.raises(ValueError, match="scaling, softcap and sink alone"):
        paged_attention(query, key, value, 1.5, table, sketch, AttentionOptions(is_causal=True))
    odd = BlockTable(table.tables, table.lengths, table.sketched, 48, table.stride)
    with pytest.raises(ValueError, match="power of 2"):
        paged_attention(query, key, value, 1.5, odd, sketch, AttentionOptions())
