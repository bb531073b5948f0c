"""Pretrained models on longer texts: planted facts are where they are said to be, and numbers are those of plain forward passes."""

import math

import pytest
import tiny_models as tiny
import torch
from torch.nn import functional as F

import hf_entmax
from hf_entmax.integration.observe import observe_attention
from recipes.lab.length import pretrained


class Letters:
    """A tokenizer that gives every character a number."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture(scope="module")
def model():
    return hf_entmax.patch_model(tiny.build("llama").eval(), alpha=1.7)


def test_facts_stand_in_the_text_and_are_asked_for():
    ids = torch.full((800,), ord("x"))
    row, asked = pretrained.planted(ids, Letters(), seed=3)
    text = "".join(map(chr, row.tolist()))
    assert text.count("x") == 800
    for (question, answer), place in zip(asked, (100, 300, 500, 700), strict=True):
        said = "".join(map(chr, torch.cat([question, answer]).tolist()))
        assert text.count(said + ".\n") == 1
        assert text[: text.index(said)].count("x") == place
    assert len({tuple(answer.tolist()) for _, answer in asked}) == 4


@torch.no_grad()
def test_answers_are_scored_as_without_a_cache(model):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(tiny.VOCAB, (40,), generator=draw)
    asked = [tuple(torch.randint(tiny.VOCAB, (n,), generator=draw) for n in (3, 2)) for _ in range(4)]
    nats, _, chosen = pretrained.ask(model, ids, asked)
    for place, (question, _) in enumerate(asked):
        wanted = []
        for _, answer in asked:
            row = torch.cat([ids, question, answer])
            told = model(input_ids=row[None]).logits[0, len(ids) + len(question) - 1 : -1]
            wanted.append(float(F.cross_entropy(told, answer, reduction="sum")))
        assert nats[place] == pytest.approx(wanted[place], rel=1e-4)
        assert chosen[place] == (wanted[place] == min(wanted))


@torch.no_grad()
def test_perplexity_and_density_of_whole_blocks(model):
    ids = torch.randint(tiny.VOCAB, (1025,), generator=torch.Generator().manual_seed(0))
    found = pretrained.read_through(model, ids, 512, 2)
    nats, kept = [], []
    for start in (0, 512):  # the evenly spread blocks of a text that has two
        row = ids[None, start : start + 512]
        with observe_attention(model, lambda call: kept.append((call.weights > 0).double())):
            logits = model(input_ids=row).logits[0]
        nats.append(float(F.cross_entropy(logits, ids[start + 1 : start + 513])))
    assert found["perplexity"] == pytest.approx(math.exp(sum(nats) / 2), rel=1e-3)
    nonzero, pairs = torch.cat([own.mean(1) for own in kept]).mean(0), torch.ones(512, 512).tril()
    assert found["density"] == pytest.approx(float(nonzero.sum() / pairs.sum()), abs=1e-5)
    beyond = float(nonzero[:, 1:].sum() / pairs[:, 1:].sum())
    assert found["density_beyond_first"] == pytest.approx(beyond, abs=1e-5) and 0 < beyond < 1
    hf_entmax.unpatch_model(model)
    assert pretrained.read_through(model, ids, 512, 1)["density"] == 1
