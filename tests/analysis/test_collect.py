"""Streaming collection: equal to the metrics on all weights at once, whatever the batches."""

from __future__ import annotations

import textwrap
from pathlib import Path

import fresh
import pytest
import tiny_tokenizers
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.moonshine.modeling_moonshine import MoonshineEncoderModelOutput

from hf_entmax import patch_model
from hf_entmax.analysis import AnalysisError, AnalysisInterrupted, AttentionStatistics, collect, metrics
from hf_entmax.analysis.statistics.sentences import SentenceExtremes
from hf_entmax.batches.prepare import prepare_batch
from hf_entmax.integration.discovery import attention_sites

ROOT = Path(__file__).parents[2]


def t5(patched: bool = False, **options):
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 40,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    model = T5ForConditionalGeneration(T5Config(**(sizes | options)))
    for name, parameter in model.named_parameters():
        if name.endswith(("q.weight", "k.weight")):
            parameter.data *= 2.5
    return patch_model(model, alpha="learned", alpha_init="normal").eval() if patched else model.eval()


def gpt2():
    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32)).eval()


def bert(**options):
    torch.manual_seed(3)
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 40,
    }
    return BertForMaskedLM(BertConfig(**(sizes | {"max_position_embeddings": 16} | options))).eval()


def sentences(count: int = 11, seed: int = 0, longest: int = 9) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(seed)

    def one(least: int) -> list[int]:
        length = int(torch.randint(least, longest + 1, (1,), generator=generator))
        return torch.randint(3, 40, (length,), generator=generator).tolist()

    return [(one(1), one(1)) for _ in range(count)]


def batches(pairs, size: int, side: str = "right", targets: bool = True):
    for start in range(0, len(pairs), size):
        chunk = pairs[start : start + size]

        def pad(rows, value):
            longest = max(map(len, rows))
            return torch.tensor(
                [[value] * (longest - len(r)) + r if side == "left" else r + [value] * (longest - len(r)) for r in rows]
            )

        ids = [source for source, _ in chunk]
        batch = {"input_ids": pad(ids, 0), "attention_mask": pad([[1] * len(row) for row in ids], 0)}
        if targets:
            labels = [target for _, target in chunk]
            longest = max(map(len, labels))
            batch["labels"] = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
        yield batch


@pytest.mark.parametrize("kind", ["output", "tuple", "own mask"])
def test_states_of_an_encoder_may_stand_for_what_it_read(kind):
    """Padding is no possible key either way, whether the batch says so or the encoder does."""
    model = t5(patched=True)
    for batch in batches(sentences(), 4):
        read = collect(model, [batch], progress=False)
        with torch.no_grad():
            states = model.encoder(batch["input_ids"], attention_mask=batch["attention_mask"])
        given = {name: value for name, value in batch.items() if name != "input_ids"} | {"encoder_outputs": states}
        if kind == "tuple":
            given["encoder_outputs"] = (states[0],)
        if kind == "own mask":
            given["encoder_outputs"] = MoonshineEncoderModelOutput(states[0], attention_mask=batch["attention_mask"])
            prepared = prepare_batch(model, given).inputs["encoder_outputs"]
            assert torch.equal(prepared.attention_mask, batch["attention_mask"])
        heard = collect(model, [given], progress=False)
        assert torch.equal(heard.density["cross"], read.density["cross"])
        assert torch.allclose(heard.mean_support["cross"], read.mean_support["cross"])
    with pytest.raises(TypeError, match=r"got dict"):
        prepare_batch(model, given | {"encoder_outputs": {"last_hidden_state": states[0]}})


def plain_tokenizer():
    """Forty entries, one for every id the models know."""
    return tiny_tokenizers.wordpiece([f"w{i}" for i in range(20)] + [f"##x{i}" for i in range(15)])


#: Relative difference of sums over float32 forward passes of batches of other shapes: some hundred roundings.
OTHER_SHAPES = 300 * torch.finfo(torch.float32).eps


def same(first: AttentionStatistics, second: AttentionStatistics, tolerance: float = 1e-6) -> None:
    assert first.sites.keys() == second.sites.keys()
    for site in first.sites:
        one, two = first.sites[site].sums, second.sites[site].sums
        assert one.keys() == two.keys() and one
        for key in one:
            if key.endswith("histogram"):  # a value on the edge of a bin may fall to either side
                torch.testing.assert_close(one[key].sum(-1), two[key].sum(-1), rtol=0, atol=0)
                continue
            torch.testing.assert_close(
                one[key], two[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )
    assert first.num_sentences == second.num_sentences and first.num_tokens == second.num_tokens


@pytest.mark.parametrize("patched", [False, True])
def test_equal_to_metrics_on_all_weights(patched):
    model = t5(patched)
    (batch,) = batches(sentences(), 99)
    statistics = collect(model, [batch])
    if not patched:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    encoder, decoder = batch["attention_mask"].bool(), batch["labels"] != -100
    for site, layers, keys, queries, causal in (
        ("encoder_self", out.encoder_attentions, encoder, encoder, False),
        ("cross", out.cross_attentions, encoder, decoder, False),
        ("decoder_self", out.decoder_attentions, decoder, decoder, True),
    ):
        measured = statistics.sites[site]
        assert measured.num_layers == len(layers) == 2
        for layer, weights in enumerate(layers):

            def check(
                actual,
                function,
                *options,
                weights=weights,
                keys=keys,
                queries=queries,
                causal=causal,
                layer=layer,
                **named,
            ):
                expected = function(weights, keys, *options, query_mask=queries, causal=causal, **named).double()
                torch.testing.assert_close(actual[layer], expected, rtol=1e-5, atol=1e-6, equal_nan=True)

            check(measured.density(), metrics.density)
            check(measured.mean_support(), metrics.mean_support)
            check(measured.entropy(), metrics.entropy)
            check(measured.max_weight(), metrics.max_weight)
            check(measured.head_diversity(), metrics.head_diversity)
            check(measured.head_diversity(normalize=False), metrics.head_diversity, normalize=False)
            check(measured.distance_profile(), metrics.distance_profile)
            for offset in (-1, 0, 1):
                check(measured.positional_confidence(offset), metrics.positional_confidence, offset)
                if site != "cross":
                    check(measured.positional_share(offset), metrics.positional_share, offset)
            expected = metrics.sentence_density(weights, keys, queries, causal).double()
            torch.testing.assert_close(measured.sentence_density_mean()[layer], expected.mean(0), rtol=1e-5, atol=1e-6)
    if patched:
        assert float(statistics.density["encoder_self"].mean()) < 0.9
        assert set(statistics.alphas) == set(statistics.sites)
    else:
        # Sharp softmax rows may underflow, otherwise every weight is nonzero.
        assert all(float(value.mean()) > 0.95 for value in statistics.density.values()) and not statistics.alphas


@pytest.mark.parametrize("make", [lambda: t5(True), gpt2, bert], ids=["t5", "gpt2", "bert"])
def test_batch_size_order_and_padding_do_not_matter(make):
    model, pairs = make(), sentences()
    targets = isinstance(model, T5ForConditionalGeneration)
    tokenizer = plain_tokenizer()
    one = collect(model, batches(pairs, 11, targets=targets), tokenizer=tokenizer)
    same(one, collect(model, batches(pairs, 3, targets=targets), tokenizer=tokenizer), OTHER_SHAPES)
    same(one, collect(model, batches(pairs, 1, targets=targets), tokenizer=tokenizer), OTHER_SHAPES)
    same(one, collect(model, batches(pairs[::-1], 4, targets=targets), tokenizer=tokenizer), OTHER_SHAPES)
    if make is gpt2:
        # Positions of GPT-2 follow the mask only when they are given; T5's are relative.
        return
    if targets:
        same(one, collect(model, batches(pairs, 4, "left"), tokenizer=tokenizer), 2e-5)


def test_causal_pairs_are_a_triangle():
    statistics = collect(gpt2(), batches(sentences(5), 2, targets=False))
    lengths = [len(source) for source, _ in sentences(5)]
    sums = statistics.sites["decoder_self"].sums
    assert sums["pairs"].tolist() == [sum(n * (n + 1) / 2 for n in lengths)] * 2
    assert statistics.num_tokens == {"decoder_self": sum(lengths)}
    assert statistics.sites["decoder_self"].positional_confidence(1).isnan().all()


def test_confidence_is_known_without_the_roles_and_the_same():
    data = list(batches(sentences(5), 2, targets=False))
    alone = collect(gpt2(), data, groups=("position",))
    both = collect(gpt2(), data, groups=("position", "roles"))
    for offset in (-1, 0):
        found = alone.sites["decoder_self"].positional_confidence(offset)
        assert found.isfinite().all()
        torch.testing.assert_close(found, both.sites["decoder_self"].positional_confidence(offset))
        role = {-1: "previous", 0: "current"}[offset]
        (scores,) = [values for name, values in both.sites["decoder_self"].role_scores().items() if role in name]
        torch.testing.assert_close(found, scores[0], atol=1e-6, rtol=0)


def test_one_token_sentences():
    statistics = collect(
        gpt2(), [{"input_ids": torch.tensor([[5], [7]]), "attention_mask": torch.ones(2, 1, dtype=torch.long)}]
    )
    assert statistics.density["decoder_self"].tolist() == [[1.0, 1.0]] * 2
    assert statistics.positional_confidence(-1)["decoder_self"].isnan().all()


def test_missing_masks_are_derived():
    model, (batch,) = t5(True), batches(sentences(6), 6)
    full = collect(model, [batch])
    bare = {key: value for key, value in batch.items() if key != "attention_mask"}
    same(full, collect(model, [bare]), 1e-6)
    padded = dict(batch, labels=batch["labels"].masked_fill(batch["labels"] == -100, 0))
    same(full, collect(model, [padded]), 1e-6)
    given = dict(batch)
    labels = given.pop("labels")
    given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    given["decoder_attention_mask"] = (labels != -100).long()
    same(full, collect(model, [given]), 1e-6)


def test_shared_layers_are_told_apart():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "embedding_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 40,
    }
    model = AlbertForMaskedLM(AlbertConfig(num_hidden_layers=3, **sizes)).eval()
    batch = next(iter(batches(sentences(4), 4, targets=False)))
    statistics = collect(model, [batch, batch])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(**batch, output_attentions=True).attentions
    expected = torch.stack([metrics.entropy(w, batch["attention_mask"].bool()).double() for w in layers])
    torch.testing.assert_close(statistics.entropy["encoder_self"], expected, rtol=1e-5, atol=1e-6)


def test_model_is_left_as_it_was():
    model = t5()
    model.train()
    model.encoder.block[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    collect(model, batches(sentences(3), 3))
    assert before == {name: module.training for name, module in model.named_modules()}
    assert model.config._attn_implementation != "hf_entmax"


def test_word_statistics_against_metrics():
    tokenizer = tiny_tokenizers.wordpiece()
    model = bert()
    encoded = tokenizer(["the unhappiness of the walkers", "who walks the dog ?"])["input_ids"]
    batch = next(iter(batches([(row, row) for row in encoded], 2, targets=False)))
    statistics = collect(model, [batch], tokenizer=tokenizer)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[1]
    words = torch.tensor([[-1, 0, 1, 1, 1, 2, 3, 4, 4, -1], [-1, 0, 1, 1, 2, 3, 4, -1, -1, -1]])
    site = statistics.sites["encoder_self"]
    assert (words >= 0).sum() == batch["attention_mask"].sum() - 4
    for pieces in (1, 2):
        expected = metrics.subword_merging(weights, words, min_pieces=pieces).double()
        torch.testing.assert_close(site.subword_merging(pieces)[1], expected, rtol=1e-5, atol=1e-6)
    asks, mark = torch.zeros_like(words, dtype=torch.bool), torch.zeros_like(words, dtype=torch.bool)
    asks[1, 1] = mark[1, 6] = True
    torch.testing.assert_close(
        site.interrogation()[1], metrics.interrogation(weights, asks, mark).double(), rtol=1e-5, atol=1e-6
    )
    special = (batch["input_ids"] == 2) | (batch["input_ids"] == 3)
    expected = metrics.sink_mass(weights, special, batch["attention_mask"].bool()).double()
    torch.testing.assert_close(site.sink_mass("special")[1], expected, rtol=1e-5, atol=1e-6)


def test_gold_annotation_against_metrics():
    model = t5(True)
    batch = next(iter(batches(sentences(3, longest=5), 3)))
    words = torch.where(batch["attention_mask"].bool(), torch.arange(batch["input_ids"].shape[1]), -1)
    targets = torch.where(batch["labels"] != -100, torch.arange(batch["labels"].shape[1]), -1)
    heads = torch.where(words > 0, words - 1, -1)
    sure = torch.rand(3, targets.shape[1], words.shape[1]) < 0.3
    sure &= (targets >= 0).unsqueeze(-1) & (words >= 0).unsqueeze(1)
    gold = {"word_ids": words, "dependency_heads": heads, "dependency_relations": heads.clamp(max=0) + 5}
    statistics = collect(model, [batch | gold | {"source_words": words, "target_words": targets, "sure_links": sure}])
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    measured = statistics.sites["encoder_self"]
    for direction in ("to_head", "to_dependent"):
        expected = metrics.dependency_accuracy(out.encoder_attentions[1], heads, words, direction).double()
        torch.testing.assert_close(measured.dependency_accuracy(direction)[1], expected)
    offset, baseline = measured.dependency_baseline()
    assert (offset, baseline) == (-1, 1.0)
    cross = out.cross_attentions[1]
    keys, queries = batch["attention_mask"].bool(), batch["labels"] != -100
    for method, threshold in (("argmax", None), ("support", None), ("threshold", 0.1)):
        expected = metrics.alignment_error_rate(cross, sure, None, method, threshold, keys, queries).double()
        torch.testing.assert_close(statistics.sites["cross"].alignment_error_rate(method)[1], expected)
    real = cross * queries[:, None, :, None]
    later = torch.cat([real[:, :, 1:], torch.zeros_like(real[:, :, :1])], dim=2)
    expected = metrics.alignment_error_rate(later, sure, None, "argmax", None, keys, queries).double()
    torch.testing.assert_close(statistics.sites["cross"].alignment_error_rate("argmax", "input")[1], expected)


def test_sparse_and_dense_sentences_are_remembered():
    model, pairs = t5(True), sentences(24, longest=14)
    tokenizer = plain_tokenizer()
    statistics = collect(model, batches(pairs, 5), tokenizer=tokenizer)
    alone = [collect(model, batches([pair], 1)).density["encoder_self"] for pair in pairs]
    checked = 0
    for layer in range(2):
        for head in range(4):
            for pair in statistics.extremes["encoder_self"].pairs(layer, head):
                density = [float(value[layer, head]) for value in alone]
                rivals = [i for i, (source, _) in enumerate(pairs) if (len(source) <= 8) == (pair.length_class == 0)]
                assert pair.dense_density == pytest.approx(max(density[i] for i in rivals))
                assert pair.sparse_density == pytest.approx(min(density[i] for i in rivals))
                assert pair.dense_text == tokenizer.decode(pairs[pair.dense][0], skip_special_tokens=True)
                checked += 1
    assert checked >= 8


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data():
    model = t5()
    few, many = (collect(model, batches(sentences(n), 4), tokenizer=plain_tokenizer()) for n in (60, 240))

    def size(statistics):
        kept = sum(value.numel() for site in statistics.sites.values() for value in site.sums.values())
        return kept, sum(extremes.indices.numel() for extremes in statistics.extremes.values())

    assert size(few) == size(many)
    slots = sum(extremes.indices.numel() for extremes in many.extremes.values())
    assert sum(len(extremes.texts) for extremes in many.extremes.values()) <= slots


def test_save_and_load(tmp_path):
    statistics = collect(t5(True), batches(sentences(), 4), tokenizer=plain_tokenizer(), name="tiny")
    again = AttentionStatistics.load(statistics.save(tmp_path / "sums.safetensors"))
    same(statistics, again, 0.0)
    assert again.name == "tiny" and again.sites["cross"].layers == statistics.sites["cross"].layers
    torch.testing.assert_close(again.alphas["cross"], statistics.alphas["cross"])
    assert again.extremes["cross"].pairs(0, 0) == statistics.extremes["cross"].pairs(0, 0)
    (tmp_path / "other.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a safetensors file"):
        AttentionStatistics.load(tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError):
        AttentionStatistics.load(tmp_path / "missing.safetensors")


def bad(change) -> dict:
    batch = next(iter(batches(sentences(3), 3)))
    return batch | change


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (t5, lambda: bad({"input_ids": torch.full((3, 9), 77)}), "outside the model's vocabulary of 40"),
        (t5, lambda: {k: v for k, v in bad({}).items() if k != "labels"}, "needs labels or decoder_input_ids"),
        (bert, lambda: {"input_ids": torch.full((1, 17), 5)}, "beyond the model's maximum of 16"),
        (t5, lambda: bad({"attention_mask": torch.ones(3, 1, 9)}), r"shape \[B, T\]"),
        (t5, lambda: {"labels": torch.ones(2, 2)}, "needs one of input_ids"),
    ],
    ids=["vocabulary", "no-target", "too-long", "mask", "nothing"],
)
def test_bad_batches_are_named_and_partial_results_kept(model, batch, message):
    model = model()
    good = list(batches(sentences(4), 4, targets=isinstance(model, T5ForConditionalGeneration)))
    with pytest.raises(AnalysisError, match=message) as caught:
        collect(model, [*good, batch(), *good])
    assert "batch 1" in str(caught.value)
    same(caught.value.statistics, collect(model, good))
    skipped = collect(model, [*good, batch()], on_error="skip")
    assert any("batch 1" in note for note in skipped.notes)
    same(skipped, collect(model, good))


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=["a fault", "Ctrl-C"])
def test_a_batch_counts_whole_or_not_at_all(error):
    """Whatever stops it in the middle of the model: its first layers had been seen."""
    model = bert()
    good = list(batches(sentences(8), 4, targets=False))
    expected, calls = collect(model, good[:1]), []

    def stop_in_the_second_batch(module, inputs):
        calls.append(module)
        if len(calls) == 2:
            raise error

    *_, last = (site.module for site in attention_sites(model))
    handle = last.register_forward_pre_hook(stop_in_the_second_batch)
    kind = AnalysisInterrupted if isinstance(error, KeyboardInterrupt) else AnalysisError
    with handle, pytest.raises(kind) as caught:
        collect(model, good)
    same(caught.value.statistics, expected)
    assert kind is AnalysisError or "first 4 sentences" in str(caught.value.statistics.notes)
    assert len(calls) == 2


def test_bad_options():
    model = t5()
    good = list(batches(sentences(2), 2))
    with pytest.raises(ValueError, match="there is no data"):
        collect(model, [])
    with pytest.raises(TypeError, match=r"pass \[batch\]"):
        collect(model, good[0])
    with pytest.raises(TypeError, match="dict of tensors"):
        collect(model, [[1, 2]])
    with pytest.raises(ValueError, match="groups holds 'density'"):
        collect(model, good, groups=["density"])
    with pytest.raises(ValueError, match="has no cross"):
        collect(bert(), list(batches(sentences(2), 2, targets=False)), sites=["cross"])
    with pytest.raises(ValueError, match="no attention"):
        collect(torch.nn.Linear(2, 2), good)
    with pytest.raises(ValueError, match="on_error"):
        collect(model, good, on_error="ignore")


TWO_PROCESSES = """
    import sys, torch
    sys.path[:0] = {paths!r}
    from accelerate import Accelerator
    import test_collect as t, tiny_tokenizers
    from hf_entmax.analysis import collect
    from hf_entmax.analysis.collecting.importance import head_importance
    accelerator = Accelerator(cpu=True)
    model = t.t5(True)
    pairs = t.sentences(11)
    tokenizer = t.plain_tokenizer()
    statistics = collect(model, t.batches(pairs, 3), tokenizer=tokenizer, accelerator=accelerator)
    for method in ("gradient", "masking"):
        statistics.importance[method] = head_importance(model, t.batches(pairs[:6], 3), method=method, accelerator=accelerator)
    one = collect(model, t.batches(pairs[:3], 3), accelerator=accelerator)
    assert accelerator.num_processes == 2
    torch.save([statistics.density["cross"], one.density["cross"]], f"{out}/{{accelerator.process_index}}.pt")
    if accelerator.is_main_process:
        statistics.save("{out}/sums.safetensors")
"""


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path):
    code = textwrap.dedent(TWO_PROCESSES).format(paths=[str(ROOT), str(Path(__file__).parent)], out=tmp_path)
    result = fresh.run(code, processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    from hf_entmax.analysis.collecting.importance import head_importance

    model, pairs = t5(True), sentences(11)
    tokenizer = plain_tokenizer()
    alone = collect(model, batches(pairs, 3), tokenizer=tokenizer)
    together = AttentionStatistics.load(tmp_path / "sums.safetensors")
    same(alone, together, 1e-6)
    for site, extremes in alone.extremes.items():
        assert torch.equal(extremes.indices, together.extremes[site].indices)
        assert extremes.texts == together.extremes[site].texts
    for method in ("gradient", "masking"):
        expected = head_importance(model, batches(pairs[:6], 3), method=method)
        for site, value in expected.items():
            torch.testing.assert_close(together.importance[method][site], value, rtol=1e-5, atol=1e-7)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for mine, other in zip(first, second, strict=True):
        torch.testing.assert_close(mine, other)  # every process holds the whole result


@pytest.mark.parametrize("order", [(0, 4), (4, 0)])
def test_of_equally_dense_sentences_the_earlier_ones_are_kept(order):
    extremes = SentenceExtremes(1, 1)
    densities, lengths = torch.full((1, 4, 1), 0.5, dtype=torch.float64), torch.full((4,), 12)
    for first in order:  # processes hand in their sentences in any order
        extremes.update(densities, lengths, first)
    assert extremes.wanted() == {0, 1}


def test_remembered_sentences_survive_a_layer_found_later():
    extremes, more = SentenceExtremes(1, 2), SentenceExtremes(3, 4)
    lengths = torch.tensor([5, 6])
    extremes.update(torch.tensor([[[0.2, 0.3], [0.9, 0.1]]], dtype=torch.float64), lengths, 0)
    more.update(torch.full((3, 2, 4), 0.5, dtype=torch.float64), lengths, 2)
    before = extremes.pairs(0, 1)[0]
    extremes.texts = {0: "zero", 1: "one"}
    extremes.merge(more)
    assert extremes.values.shape[1:3] == (3, 4) and extremes.wanted() == {0, 1, 2, 3}
    after = extremes.pairs(0, 1)[0]
    assert (after.sparse, after.sparse_text) == (before.sparse, "one") and more.texts == {}


def test_another_pass_adds_what_is_missing_and_changes_nothing():
    pairs = sentences()
    model = t5()
    statistics = collect(model, batches(pairs[:4], 4), groups=["sparsity"])
    before = {site: value.clone() for site, value in statistics.mean_support.items()}
    other = collect(model, batches(pairs[4:], 4), groups=["sparsity", "diversity"])
    assert any((other.mean_support[site] != before[site]).any() for site in before)
    statistics.update(other)
    for site, value in before.items():
        assert torch.equal(statistics.mean_support[site], value)
        assert torch.equal(statistics.head_diversity[site], other.head_diversity[site])
