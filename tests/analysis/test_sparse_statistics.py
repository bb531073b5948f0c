"""Statistics from sparse rows: the same numbers as from dense weights, without the dense weights."""

from __future__ import annotations

import math

import brute_force
import pytest
import tiny_models
import tiny_tokenizers
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("numba")

from hf_entmax import patch_model
from hf_entmax.analysis import collect
from hf_entmax.analysis.metrics.weights import DenseWeights, SparseWeights, keep_pairs
from hf_entmax.analysis.statistics import accumulate
from hf_entmax.integration import interface
from hf_entmax.integration.observe import observe_attention
from hf_entmax.ops import SparseRows
from hf_entmax.ops.numba_cpu import host

SHARP = 6.0


def model(family: str = "bert", alpha: str | float = "learned", sharp: float = SHARP, **options):
    """A patched tiny model with sharp attention."""
    built = tiny_models.build(family, **options)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if any(part in name for part in ("query", "q_proj", "q_lin", ".q.", "Wqkv", "c_attn")):
                parameter.mul_(sharp)
    extra = {"alpha_init": "normal"} if alpha == "learned" else {}
    return patch_model(built, alpha=alpha, **extra).eval()


def batch(family: str, sizes=((12, 10), (7, 10), (9, 4), (1, 2)), left: bool = False, seed: int = 0) -> dict:
    """Ids of sentences of these (source, target) lengths, with padding, on the left if wanted."""
    generator = torch.Generator().manual_seed(seed)

    def pad(lengths, padding):
        longest = max(lengths)
        rows = torch.full((len(lengths), longest), padding)
        for row, length in zip(rows, lengths, strict=True):
            place = slice(longest - length, None) if left else slice(0, length)
            row[place] = torch.randint(3, tiny_models.VOCAB, (length,), generator=generator)
        return rows

    ids = pad([source for source, _ in sizes], 0)
    result = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if family in tiny_models.ENCODER_DECODERS:
        result["labels"] = pad([target for _, target in sizes], -100)
    return result


def with_gold(given: dict) -> dict:
    """Word ids (some words of two tokens), dependency heads, and alignment links where there are labels."""

    def words(real):
        steps = (real.cumsum(1) - 1) * 2 // 3
        return steps.masked_fill(~real, -1)

    real = given["attention_mask"].bool()
    source = words(real)
    source[:, 0] = -1
    count = int(source.max()) + 1
    present = (source.unsqueeze(-1) == torch.arange(count)).any(1)
    heads = (torch.arange(count) + 1).expand(len(real), -1) % count
    gold = {"word_ids": source, "dependency_heads": heads.masked_fill(~present, -1), "dependency_relations": heads % 3}
    if "labels" in given:
        target = words(given["labels"] != -100)
        sure = torch.rand(len(real), int(target.max()) + 1, count) < 0.3
        gold |= {"source_words": source, "target_words": target, "sure_links": sure}
    return given | gold


def tokenizer():
    return tiny_tokenizers.wordpiece([f"w{i}" for i in range(18)] + [f"##x{i}" for i in range(14)])


@pytest.fixture
def form(monkeypatch):
    """Switch between forms; what the statistics were given is noted in ``form.seen``."""
    update = accumulate.SiteSums.update

    class Form:
        def __init__(self):
            self.seen = []

        def dense(self):
            return self._at(-1.0)

        def sparse(self):
            return self._at(1.0)

        def _at(self, limit):
            self.seen.clear()
            monkeypatch.setattr(host, "_SPARSE_UP_TO", limit)

    found = Form()

    def spy(sums, row, observed, context):
        found.seen.append((sums.site, type(observed)))
        return update(sums, row, observed, context)

    monkeypatch.setattr(accumulate.SiteSums, "update", spy)
    return found


def assert_same(sparse, dense, tolerance: float = 1e-6) -> int:
    assert sparse.sites.keys() == dense.sites.keys()
    compared = 0
    for site in sparse.sites:
        one, two = sparse.sites[site].sums, dense.sites[site].sums
        assert one.keys() == two.keys() and one
        for key, value in one.items():
            torch.testing.assert_close(
                value, two[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=f"{site} {key}": f"{k}: {m}"
            )
            compared += 1
        extremes = sparse.extremes[site], dense.extremes[site]
        assert torch.equal(extremes[0].indices, extremes[1].indices)
    return compared


SETTINGS = {
    "bert, padding": ("bert", False, {}),
    "gpt2, causal": ("gpt2", False, {}),
    "gpt2, causal, left padding": ("gpt2", True, {}),
    "llama, key heads shared": ("llama", False, {}),
    "mistral, window": ("mistral", False, {}),
    "gemma2, softcap and window": ("gemma2", False, {}),
    "modernbert, two-sided window": ("modernbert", False, {}),
    "bart, cross": ("bart", False, {}),
    "t5, position bias": ("t5", False, {}),
    "t5, left padding apart": ("t5", True, {}),
    "albert, one module for all layers": ("albert", False, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("gold", [False, True], ids=["text", "gold"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_same_statistics_from_both_forms(setting, gold, form):
    family, left, options = SETTINGS[setting]
    built, data = model(family, **options), [batch(family, left=left), batch(family, left=left, seed=1)]
    data = [with_gold(given) for given in data] if gold else data
    form.sparse()
    sparse = collect(built, data, tokenizer=None if gold else tokenizer())
    assert {kind for _, kind in form.seen} == {SparseRows}
    form.dense()
    dense = collect(built, data, tokenizer=None if gold else tokenizer())
    assert {kind for _, kind in form.seen} == {torch.Tensor}
    assert assert_same(sparse, dense) >= 15
    assert all(float(value.mean()) < 0.7 for value in dense.density.values())
    if gold and family in ("t5", "bart"):
        assert float(dense.sites["cross"].sums["links"].sum()) > 0
    if gold and family == "bert":
        assert float(dense.sites["encoder_self"].sums["dependency_hits"].sum()) > 0


def test_other_thresholds(form):
    options = {"density_threshold": 0.2, "alignment_threshold": 0.3, "max_distance": 2}
    built, data = model("t5"), [with_gold(batch("t5"))]
    form.sparse()
    sparse = collect(built, data, **options)
    form.dense()
    assert_same(sparse, collect(built, data, **options))


def test_half_precision_model(form):
    built, data = model("bert").to(torch.bfloat16), [batch("bert")]
    form.sparse()
    sparse = collect(built, data)
    assert {kind for _, kind in form.seen} == {SparseRows}
    form.dense()
    assert_same(sparse, collect(built, data))


class Largest(TorchDispatchMode):
    """Notes the size in bytes of the largest storage that any operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def test_no_dense_weights_are_asked_for_or_made(monkeypatch):
    built = model("bert", alpha=2.0, sharp=30.0)
    data = batch("bert", sizes=((48, 0), (40, 0), (30, 0)))
    asked, largest = [], []
    attention, update = interface.attend, accumulate.SiteSums.update

    def ask(query, key, value, alpha, options, backend):
        asked.append(options.need_weights)
        out, weights = attention(query, key, value, alpha, options, backend)
        assert isinstance(weights, SparseRows)
        return out, weights

    def measure(sums, row, observed, context):
        with Largest() as found:
            density = update(sums, row, observed, context)
        with Largest() as control:
            keep_pairs(observed.dense(), context.pairs)
        dense_bytes = 4 * math.prod(observed.shape)
        assert control.nbytes >= dense_bytes
        largest.append(found.nbytes / dense_bytes)
        return density

    monkeypatch.setattr(interface, "attend", ask)
    monkeypatch.setattr(accumulate.SiteSums, "update", measure)
    statistics = collect(built, [data], tokenizer=tokenizer())
    assert asked == ["sparse"] * 2
    # What is largest is the mean over the four heads.
    assert 0 < max(largest) < 0.4
    assert 0 < float(statistics.density["encoder_self"].mean()) < 0.1


def test_softmax_and_the_torch_backend_stay_dense(form):
    data = [batch("bert")]
    form.sparse()
    collect(tiny_models.build("bert"), data)
    assert {kind for _, kind in form.seen} == {torch.Tensor}
    form.sparse()
    collect(patch_model(tiny_models.build("bert"), alpha=1.5, backend="torch").eval(), data)
    assert {kind for _, kind in form.seen} == {torch.Tensor}
    form.sparse()
    collect(model("bert").double(), data)
    assert {kind for _, kind in form.seen} == {torch.Tensor}


def test_only_the_patched_sites_of_a_model_are_sparse(form):
    built = patch_model(tiny_models.build("t5"), alpha=1.5, sites=["cross"]).eval()
    form.sparse()
    collect(built, [batch("t5")])
    kinds = {site: {kind for name, kind in form.seen if name == site} for site, _ in form.seen}
    assert kinds == {"encoder_self": {torch.Tensor}, "decoder_self": {torch.Tensor}, "cross": {SparseRows}}


def test_whoever_wants_dense_weights_gets_them(form):
    form.sparse()
    built, data = model("bert"), batch("bert")
    seen = {"dense": [], "sparse": []}

    def note(name):
        return lambda call: seen[name].append(call.weights)

    with torch.no_grad(), observe_attention(built, note("sparse"), sparse=True):
        assert built(**data).logits.isfinite().all()
        assert all(isinstance(weights, SparseRows) for weights in seen["sparse"]) and len(seen["sparse"]) == 2
        returned = built(**data, output_attentions=True).attentions
        assert all(isinstance(weights, torch.Tensor) for weights in returned) and len(returned) == 2
        for rows, weights in zip(seen["sparse"][:2], returned, strict=True):
            torch.testing.assert_close(rows.dense(), weights, rtol=0, atol=0)
        seen["sparse"].clear()
        with observe_attention(built, note("dense")):
            built(**data)
        assert {type(weights) for name in seen for weights in seen[name]} == {torch.Tensor}
        seen["sparse"].clear()
        built(**data)
        assert {type(weights) for weights in seen["sparse"]} == {SparseRows}


def test_the_key_of_an_attention_sink_is_not_shown(form):
    form.sparse()
    built = model("bert", alpha=1.5)
    module = next(m for m in built.modules() if interface.HEADS_MODULE in m._modules)
    query, key, value = torch.randn(2, 4, 6, 8) * SHARP, torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    seen = []
    for sparse in (True, False):
        with observe_attention(built, lambda call: seen.append(call.weights), sparse=sparse):
            interface.entmax_attention_forward(module, query, key, value, None, s_aux=torch.full((4,), 3.0))
    rows, weights = seen
    assert isinstance(rows, SparseRows) and rows.shape == weights.shape == (2, 4, 6, 9)
    torch.testing.assert_close(rows.dense(), weights, rtol=0, atol=0)
    assert (weights.sum(-1) < 0.999).any(), "no mass went to the sink"


def both_forms(seed: int, queries: int, keys: int, causal: bool = False):
    """The same weights in both forms, padding and all."""
    weights, key_mask, query_mask = brute_force.random_weights(3, 4, queries, keys, seed=seed, causal=causal)
    weights = weights.float()
    weights[2, 1] = 0.0  # a head without any weight
    pairs = query_mask[:, :, None] & key_mask[:, None, :]
    offsets = torch.nn.functional.pad((weights != 0).sum(-1).flatten().cumsum(0), (1, 0))
    place = weights.flatten().nonzero()[:, 0]
    rows = SparseRows(offsets, (place % max(keys, 1)).int(), weights.flatten()[place], (3, 4, queries, keys))
    dense, sparse = keep_pairs(weights, pairs), keep_pairs(rows, pairs)
    assert isinstance(dense, DenseWeights) and isinstance(sparse, SparseWeights)
    return dense, sparse, pairs


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8), (8, 3), (1, 1), (1, 5), (0, 4), (4, 0)])
def test_every_operation_agrees(queries, keys):
    generator = torch.Generator().manual_seed(1)
    dense, sparse, pairs = both_forms(3, queries, keys) if queries and keys else empty(queries, keys)
    targets = torch.rand(3, queries, keys, generator=generator) < 0.4
    stacked = torch.stack([targets, pairs]).flatten(2).permute(1, 2, 0).float()
    words_q = torch.randint(-1, 3, (3, queries), generator=generator)
    words_k = torch.randint(-1, 4, (3, keys), generator=generator)
    operations = {
        "entry_sums": lambda w: w.entry_sums(lambda value: value.square()),
        "entry counts": lambda w: w.entry_sums(lambda value: value > 0.1),
        "row_sums": lambda w: w.row_sums(targets),
        "target_sums": lambda w: w.target_sums(stacked),
        "mean_head": lambda w: w.mean_head().values,
        "between_words": lambda w: w.between_words(words_q, words_k, 3, 4),
        # Words beyond the number asked for are none.
        "between fewer words": lambda w: w.between_words(words_q, words_k, 2, 2),
        **{f"diagonal {o}": lambda w, o=o: w.diagonal(o) for o in (-9, -2, -1, 0, 1, 2, 9) if queries > 2 < keys},
    }
    if keys:
        operations |= {"row_max": lambda w: w.row_max(), "row_argmax": lambda w: w.row_argmax()}
    for name, operation in operations.items():
        torch.testing.assert_close(operation(sparse), operation(dense), msg=lambda m, n=name: f"{n}: {m}")
    for shift in (None, torch.tensor([0, 3, -2])):
        folded = []
        for weights in (dense, sparse):
            mass, distances = weights.offset_sums(shift)
            assert mass.dtype == torch.float64
            folded.append(torch.zeros(4, 31, dtype=torch.float64).index_add_(1, distances + 15, mass))
        torch.testing.assert_close(*folded)


def empty(queries, keys):
    weights, pairs = torch.zeros(3, 4, queries, keys), torch.ones(3, queries, keys, dtype=torch.bool)
    offsets = torch.zeros(12 * queries + 1, dtype=torch.long)
    rows = SparseRows(offsets, torch.zeros(0, dtype=torch.int32), torch.zeros(0), (3, 4, queries, keys))
    return keep_pairs(weights, pairs), keep_pairs(rows, pairs), pairs


def test_the_first_of_equal_weights_is_the_largest():
    weights = torch.tensor([[[[0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0] * 4, [0.0, 0.0, 1.0, 0.0]]]])
    rows = SparseRows(
        torch.tensor([0, 2, 6, 6, 7]),
        torch.tensor([1, 2, 0, 1, 2, 3, 2]).int(),
        weights[weights > 0],
        (1, 1, 4, 4),
    )
    pairs = torch.ones(1, 4, 4, dtype=torch.bool)
    for given in (weights, rows):
        assert keep_pairs(given, pairs).row_argmax().tolist() == [[[1, 0, -1, 2]]]
