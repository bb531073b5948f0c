"""The sketch of the keys: what it says of them, how it grows, and what it refuses."""

import itertools
import math

import pytest
import torch

from hf_entmax.ops import KeySketch, sketch_keys
from hf_entmax.ops.exact import suggested_bits
from hf_entmax.ops.sketch_format import HALF_STEP

KINDS = {
    "normal": lambda *s: torch.randn(s),
    "constant": lambda *s: torch.full(s, 3.7),
    "constant channels": lambda *s: 100 * torch.randn(s[-1]) + 1e-3 * torch.randn(s),
    "huge ranges": lambda *s: torch.randn(s) * 10.0 ** torch.randint(-8, 5, s),
    "denormal": lambda *s: torch.randn(s) * 1e-39,
    "zero": lambda *s: torch.zeros(s),
}


def fields(sketch):
    return [t[:, :, : sketch.pages] for t in (sketch.codes, sketch.low, sketch.step, sketch.norm)]


def assert_same(a, b):
    assert a.length == b.length
    for x, y in zip(fields(a), fields(b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_no_key_is_further_from_its_code_than_half_a_step(kind):
    for bits, page, depth, dtype in itertools.product(
        (2, 4, 6, 8), (16, 48, 128), (5, 16, 40), (torch.float32, torch.bfloat16, torch.float16)
    ):
        key = KINDS[kind](2, 2, 2 * page + 3, depth).to(dtype)
        sketch = sketch_keys(key, bits, page)
        assert sketch.length == 2 * page and sketch.codes.shape[-1] == -(-depth // 16) * 2 * page * bits
        code = sketch.unpack()
        assert int(code.max()) < 2**bits
        step, low = sketch.step[:, :, :2, None].double(), sketch.low[:, :, :2, None].double()
        whole = torch.nn.functional.pad(key[:, :, : sketch.length].double(), (0, -depth % 16)).unflatten(2, (2, page))
        good = sketch.norm[:, :, :2].isfinite()
        error = (whole - low - code * step).abs() / step
        assert error[good].numel() == 0 or float(error[good].max()) <= HALF_STEP
        norm = torch.linalg.vector_norm(whole.abs().amax(3), dim=-1)
        assert bool((sketch.norm[:, :, :2].double() >= norm).all())
        if kind != "huge ranges":
            assert bool(good.all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_page_that_cannot_be_bounded_says_so(bad):
    key = torch.randn(1, 2, 64, 8)
    key[0, 1, 40, 3] = bad
    sketch = sketch_keys(key, page_size=32)
    assert sketch.norm.isinf().tolist() == [[[False, False], [False, True]]]
    assert sketch.low.isfinite().all() and sketch.step.isfinite().all()


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_a_sketch_that_grows_equals_one_made_at_once(bits):
    buffer = torch.randn(2, 150, 3, 20).transpose(1, 2)  # as models lay keys out
    sketch = KeySketch.allocate(2, 3, 20, 16, bits=bits, page_size=16)
    rooms = set()
    for length in range(1, 151):
        sketch.extend(buffer, length)
        rooms.add(sketch.norm.shape[2])
        assert sketch.length == length // 16 * 16
    assert_same(sketch, sketch_keys(buffer, bits, 16))
    assert rooms == {1, 2, 4, 8, 16}
    assert sketch.nbytes >= sum(t.nbytes for t in fields(sketch))


def test_keys_that_were_sketched_are_not_looked_at_again():
    key = torch.randn(1, 1, 64, 16)
    sketch, whole = sketch_keys(key[:, :, :32], page_size=32), sketch_keys(key, page_size=32)
    spoilt = key.clone()
    spoilt[:, :, :32] = math.nan
    sketch.extend(spoilt, 64)
    assert_same(sketch, whole)


def test_crop_forgets_a_page_that_is_cut():
    key, other = torch.randn(2, 1, 1, 100, 8)
    sketch = sketch_keys(key, page_size=16)
    sketch.crop(40)
    assert sketch.length == 32
    mixed = torch.cat((key[:, :, :40], other[:, :, 40:]), 2)
    sketch.extend(mixed, 100)
    assert_same(sketch, sketch_keys(mixed, page_size=16))
    sketch.crop(1000)
    assert sketch.length == 96
    sketch.crop(0)
    assert sketch.length == sketch.pages == 0


def test_reorder_takes_other_sequences():
    key = torch.randn(3, 2, 70, 8)
    for index in (torch.tensor([2, 0, 0]), torch.tensor([1]), torch.tensor([0, 0, 1, 1, 2, 2])):
        sketch = sketch_keys(key)
        sketch.reorder(index)
        assert_same(sketch, sketch_keys(key[index]))


def test_memory_is_a_tenth_of_keys_and_values():
    key = torch.randn(1, 3, 4096, 64)
    assert sketch_keys(key).nbytes <= 0.1 * 2 * key.nbytes


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"bits": 3}, "bits is 3, but must be one of 2, 4, 6, 8"),
        ({"page_size": 24}, "page_size is 24, but must be a multiple of 16"),
        ({"page_size": 8}, "multiple of 16"),
        ({"page_size": 256}, "up to 128"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"capacity": -1}, "capacity is -1"),
        ({"dtype": torch.int8}, "floating"),
    ],
)
def test_what_cannot_be_allocated(change, error):
    arguments = {"batch": 1, "kv_heads": 2, "head_dim": 16, "capacity": 64, **change}
    with pytest.raises((TypeError, ValueError), match=error):
        KeySketch.allocate(**arguments)


@pytest.mark.parametrize(
    ("key", "length", "error"),
    [
        (torch.zeros(1, 2, 70, 16, dtype=torch.bfloat16), 70, "bfloat16"),
        (torch.zeros(1, 2, 70, 8), 70, r"\[B, H_kv, D\] = \(1, 2, 8\)"),
        (torch.zeros(2, 2, 70, 16), 70, "made for"),
        (torch.zeros(1, 2, 70, 16), 71, "length is 71"),
        (torch.zeros(1, 2, 70, 16), 63, "crop the"),
        (torch.zeros(1, 2, 40, 16), 40, "crop the sketch"),
        (torch.zeros(2, 70, 16), 70, "four dimensions"),
        (torch.zeros(1, 2, 70, 16, device="meta"), 70, "meta"),
    ],
)
def test_keys_that_do_not_fit(key, length, error):
    sketch = sketch_keys(torch.zeros(1, 2, 64, 16))
    with pytest.raises((TypeError, ValueError), match=error):
        sketch.extend(key, length)


def test_more_bits_are_suggested_where_scores_lie_closer():
    assert suggested_bits(1.5) == 4 and suggested_bits(torch.tensor([1.05, 1.1])) == 6
    with pytest.raises(ValueError, match="at least 0"):
        sketch_keys(torch.zeros(1, 1, 16, 4)).crop(-1)
