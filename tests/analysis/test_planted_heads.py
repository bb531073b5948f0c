"""Heads whose weights were made to play a role are found and named; random heads are not."""

from __future__ import annotations

import json

import pytest
import test_collect as shared
import tiny_tokenizers
import torch
from transformers import T5Config, T5EncoderModel

from hf_entmax import patch_model
from hf_entmax.analysis import collect
from hf_entmax.analysis.analyze import analyze
from hf_entmax.analysis.metrics.roles import TEXT_ROLES, monotone_chance
from hf_entmax.analysis.reading.words import token_table
from hf_entmax.analysis.statistics import SiteStatistics
from hf_entmax.analysis.statistics.accumulate import SiteSums, SumOptions
from hf_entmax.analysis.statistics.context import build_context
from hf_entmax.analysis.statistics.site import LayerInfo
from hf_entmax.batches import BatchInfo
from hf_entmax.ops.sparse_rows import SparseRows

# Every piece belongs to one word only, so that its embedding can say which.
WORDS = {
    "the": ("det", ["the"]),
    "big": ("adj", ["big"]),
    "unhappy": ("adj", ["un", "##happy"]),
    "dog": ("noun", ["dog"]),
    "kangaroo": ("noun", ["kan", "##ga", "##roo"]),
    "sleeps": ("verb", ["sleep", "##s"]),
    "barks": ("verb", ["barks"]),
    "hesitates": ("verb", ["hesi", "##tates"]),
    "why": ("ask", ["why"]),
    "when": ("ask", ["when"]),
    "?": ("mark", ["?"]),
    ".": ("stop", ["."]),
}
CATEGORIES = ["det", "adj", "noun", "verb", "ask", "mark", "stop", "special"]
HEAD_OF = {"det": "noun", "adj": "noun", "noun": "verb", "ask": "verb", "mark": "verb", "stop": "verb"}
HEADS = ["previous", "subword", "question", "dependency_head", "next", None, None, None]


def texts() -> list[list[str]]:
    result = []
    for adjective in ("big", "unhappy"):
        for noun in ("dog", "kangaroo"):
            for verb in ("sleeps", "barks", "hesitates"):
                for ask in ("why", "when", None):
                    body = ["the", adjective, noun, verb]
                    result.append([ask, *body, "?"] if ask else [*body, "."])
    return result


def line_of(number: int, word: str, head: int, relation: str = "dep") -> str:
    return "\t".join([str(number), word, "_", "_", "_", "_", str(head), relation, "_", "_"])


def conllu() -> str:
    lines = []
    for words in texts():
        category = [WORDS[word][0] for word in words]
        for place, word in enumerate(words):
            wanted = HEAD_OF.get(category[place])
            head = category.index(wanted) + 1 if wanted else 0
            relation = {"noun": "nsubj", "det": "det", "adj": "amod", "verb": "root"}.get(category[place], "punct")
            lines.append(line_of(place + 1, word, head, relation))
        lines.append("")
    return "\n".join(lines) + "\n"


def planted_model(tokenizer, sharpness: float = 12.0) -> T5EncoderModel:
    """One layer of T5: embeddings are one-hot (word, category, constant), heads read them off."""
    pieces = {piece: (name, category) for name, (category, parts) in WORDS.items() for piece in parts}
    names = list(WORDS)
    width = len(names) + len(CATEGORIES) + 1
    heads = len(HEADS)
    sizes = {"d_model": width, "d_kv": width, "d_ff": 8, "num_layers": 1, "num_heads": heads}
    model = T5EncoderModel(T5Config(vocab_size=len(tokenizer), relative_attention_num_buckets=32, **sizes)).eval()
    embedding = torch.zeros(len(tokenizer), width)
    embedding[:, -1] = 1.0
    for token, index in tokenizer.get_vocab().items():
        name, category = pieces.get(token, (None, "special"))
        embedding[index, len(names) + CATEGORIES.index(category)] = 1.0
        if name is not None:
            embedding[index, names.index(name)] = 1.0
    model.shared.weight.data.copy_(embedding)
    attention = model.encoder.block[0].layer[0].SelfAttention
    generator = torch.Generator().manual_seed(5)
    identity = torch.eye(width)
    # RMS normalisation makes each of the three ones of an embedding sqrt(width / 3).
    scale = sharpness / (width / 3)
    query, key = torch.zeros(heads, width, width), torch.zeros(heads, width, width)
    bias = torch.zeros(32, heads)
    for head, role in enumerate(HEADS):
        key[head] = identity
        if role in ("previous", "next"):
            bias[1 if role == "previous" else 17, head] = sharpness  # buckets of distance -1 and +1
        elif role == "subword":
            for place in range(len(names)):
                query[head, place, place] = 2 * scale
            bias[0, head] = -sharpness  # not the token itself, unless it is alone in its word
        elif role == "question":
            query[head, len(names) + CATEGORIES.index("mark"), -1] = scale
        elif role == "dependency_head":
            for category, wanted in HEAD_OF.items():
                query[head, len(names) + CATEGORIES.index(wanted), len(names) + CATEGORIES.index(category)] = scale
        else:
            query[head] = torch.randn(width, width, generator=generator) * 0.08
            key[head] = torch.randn(width, width, generator=generator) * 0.08
    attention.q.weight.data.copy_(query.reshape(heads * width, width))
    attention.k.weight.data.copy_(key.reshape(heads * width, width))
    attention.relative_attention_bias.weight.data.copy_(bias)
    return model


@pytest.mark.parametrize("patched", [False, True], ids=["softmax", "entmax"])
def test_planted_heads_are_found_and_named(tmp_path, patched):
    tokenizer = tiny_tokenizers.wordpiece([piece for _, parts in WORDS.values() for piece in parts])
    model = planted_model(tokenizer)
    if patched:
        patch_model(model, alpha=1.5)
    (tmp_path / "data.txt").write_text("\n".join(" ".join(words) for words in texts()) + "\n")
    (tmp_path / "gold.conllu").write_text(conllu())
    result = analyze(
        model,
        tmp_path / "data.txt",
        tokenizer=tokenizer,
        conllu=tmp_path / "gold.conllu",
        out=tmp_path / "report",
        importance="none",
        figures=False,
        device="cpu",
        progress=False,
    )
    assert result.problems == []
    site = result.statistics[0].sites["encoder_self"]
    assert [role.role if role else None for role in site.best_roles()[0]] == HEADS
    assert float(site.positional_confidence(-1)[0, 0]) > 0.99
    assert float(site.subword_merging(min_pieces=2)[0, 1]) > 0.95
    assert float(site.interrogation()[0, 2]) > 0.99
    assert float(site.dependency_accuracy()[0, 3]) > 0.99
    assert all(float(value) < 0.8 for value in site.dependency_accuracy()[0, 5:])
    offset, baseline = site.dependency_baseline()
    assert offset == 1 and 0.3 < baseline < 0.9
    if patched:
        assert all(float(value) < 0.3 for value in site.density()[0, [0, 4]])
    record = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [row["role"] for row in record["models"][0]["heads"]] == HEADS
    page = (tmp_path / "report" / "report.html").read_text()
    assert "1 of 8 self-attention heads looks at the previous token with" in page
    assert "3 of 8 heads have no single role" in page


@pytest.mark.parametrize("patched", [False, True], ids=["softmax", "entmax"])
def test_random_heads_have_no_role(patched):
    pairs = shared.sentences(40, longest=16)
    statistics = collect(shared.t5(patched), shared.batches(pairs, 8), tokenizer=shared.plain_tokenizer())
    named = [
        role for site in statistics.sites.values() for row in site.best_roles() for role in row if role is not None
    ]
    assert named == []


#: Cross-attention: what a head does with query i of T and S keys, given the source and the target token by token.
PLANTED = {
    "copy": lambda i, source, target: source.index(target[i + 1]) if i + 1 < len(target) else 0,
    "diagonal": lambda i, source, target: (2 * i + 1) * len(source) // (2 * len(target)),
    "monotone": lambda i, source, target: min(3 + i, len(source) - 1),
    "monotone, by two": lambda i, source, target: min(2 * i, len(source) - 1),
    "stays": lambda i, source, target: 4,
    "back and forth": lambda i, source, target: 5 if i % 2 else 1,
}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("sharpness", [1.0, 0.8])
def test_heads_that_copy_or_move_forward_through_the_source_are_named(sparse, sharpness):
    table = token_table(shared.plain_tokenizer())
    ordinary = [index for index in range(len(table)) if not table.special[index]]
    generator = torch.Generator().manual_seed(3)
    sentences = []
    for length, of_target in ((9, 6), (12, 6), (7, 5)):
        source = [ordinary[place] for place in torch.randperm(len(ordinary), generator=generator)[:length]]
        target = [source[place] for place in torch.randperm(length, generator=generator)[:of_target]]
        sentences.append((source, target))
    longest, most = 12, 6
    ids, decoder_ids = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, most, dtype=torch.long)
    mask, decoder_mask = ids.bool(), decoder_ids.bool()
    weights = torch.zeros(3, len(PLANTED) + 1, most, longest)
    monotone = torch.zeros(len(PLANTED) + 1, dtype=torch.float64)
    for b, (source, target) in enumerate(sentences):  # the source is padded on the left, the target on the right
        left = longest - len(source)
        ids[b, left:], mask[b, left:] = torch.tensor(source), True
        decoder_ids[b, : len(target)], decoder_mask[b, : len(target)] = torch.tensor(target), True
        for i in range(len(target)):
            rest = (1 - sharpness) / len(source)
            weights[b, :, i, left:] = rest
            for head, plant in enumerate(PLANTED.values()):
                weights[b, head, i, left + plant(i, source, target)] += sharpness
            weights[b, -1, i, left:] = 1 / len(source)  # the last head looks everywhere
            if i:
                looked = weights[b, :, i - 1].argmax(-1)
                for head, place in enumerate(looked.tolist()):
                    monotone[head] += weights[b, head, i, place + 1 : place + 3].double().sum()
    info = BatchInfo({"x": ids}, 3, ids, mask, decoder_ids, decoder_mask)
    context = build_context("cross", (3, most, longest), info, frozenset({"roles"}), table, ())
    if sparse:
        offsets = torch.nn.functional.pad((weights != 0).sum(-1).flatten().cumsum(0), (1, 0))
        place = weights.flatten().nonzero()[:, 0]
        rows = SparseRows(offsets, (place % longest).int(), weights.flatten()[place], tuple(weights.shape))
    heads = len(PLANTED) + 1
    sums = SiteSums("cross", [heads], SumOptions(frozenset({"roles"})), torch.device("cpu"))
    sums.update(0, rows if sparse else weights, context)
    torch.testing.assert_close(
        sums.sums["role_mass"][0, :, TEXT_ROLES.index("monotone")], monotone, rtol=1e-5, atol=1e-6
    )
    site = SiteStatistics("cross", [LayerInfo("cross", 0, heads)], sums.sums)
    named = [role.role if role else None for role in site.best_roles()[0]]
    assert named == ["copy", "diagonal", "monotone", "monotone", None, None, None]
    scores = site.role_scores()
    assert float(scores["copy"][0][0, 0]) == pytest.approx(sharpness + (1 - sharpness) / 9, abs=0.02)
    assert int(scores["copy"][2][0]) == sum(len(target) - 1 for _, target in sentences) == int(scores["monotone"][2][0])
    for name in ("copy", "diagonal", "monotone"):  # an even head is at chance
        assert float(scores[name][0][0, -1]) == pytest.approx(float(scores[name][1][0]), abs=1e-6)


@pytest.mark.parametrize(("keys", "expected"), [(1, 1.0), (2, 1.0), (5, 2 / 5)])
def test_chance_of_monotone_alignment_is_a_share(keys, expected):
    pairs = torch.zeros(1, 4, 6, dtype=torch.bool)
    pairs[:, :3, :keys] = True  # three real queries, of which two follow another one
    queries, chance = monotone_chance(pairs)
    assert queries.tolist() == [2.0] and chance.tolist() == pytest.approx([2 * expected])
