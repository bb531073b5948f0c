"""softmax_attention is a state of the calling context: nothing of the model is exchanged, whatever happens inside."""

import asyncio
import contextlib
import copy
import pickle
import threading

import pytest
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax
from hf_entmax import alphas, patch_model, softmax_attention
from hf_entmax.integration import softmax_blocks

FAMILY = "llama"


@pytest.fixture
def model():
    return patch_model(tiny.build(FAMILY), alpha_init=1.7, length_scaling="log", length_scaling_init="paper")


def logits(model):
    with torch.no_grad():
        return model(**tiny.inputs(FAMILY)).logits


@pytest.fixture
def both(model):
    """What it computes sparse, and as a softmax."""
    plain = hf_entmax.unpatch_model(copy.deepcopy(model))
    sparse, softmax = logits(model), logits(plain)
    assert (sparse - softmax).abs().max() > 1e-2
    return sparse, softmax


def is_softmax(model, both):
    found = logits(model)
    assert torch.allclose(found, both[0], atol=1e-5) != torch.allclose(found, both[1], atol=1e-5)
    return torch.allclose(found, both[1], atol=1e-5)


def test_blocks_may_be_nested_and_left_in_any_order(model, both):
    first, second = softmax_attention(model), softmax_attention(model)
    first.__enter__()
    second.__enter__()
    assert is_softmax(model, both)
    first.__exit__(None, None, None)
    assert is_softmax(model, both)
    second.__exit__(None, None, None)
    assert not is_softmax(model, both)
    with contextlib.suppress(KeyError), softmax_attention(model), softmax_attention(model):
        raise KeyError
    assert not is_softmax(model, both)
    assert not softmax_blocks._entered.get() and not softmax_blocks._open  # nothing piles up from block to block
    assert torch.allclose(alphas(model)["decoder_self"], torch.tensor(1.7), atol=1e-6)


def test_other_threads_and_tasks_go_on_with_entmax(model, both):
    found = {}

    def look(name):
        found[name] = is_softmax(model, both)

    with softmax_attention(model):
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
        look("here")
    assert found == {"thread": False, "here": True}

    async def inside(opened, seen):
        with softmax_attention(model):
            opened.set()
            await seen.wait()
            return is_softmax(model, both)

    async def outside(opened, seen):
        await opened.wait()
        found = is_softmax(model, both)
        seen.set()
        return found

    async def run():
        opened, seen = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(inside(opened, seen), outside(opened, seen))

    assert asyncio.run(run()) == [True, False]


def test_what_is_saved_inside_is_the_sparse_model(model, both, tmp_path):
    names = set(model.state_dict())
    with softmax_attention(model):
        assert set(model.state_dict()) == names
        model.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), both[0])


def test_copies_made_inside_are_sparse_and_free(model, both):
    with softmax_attention(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert not any(is_softmax(each, both) for each in copies)
    assert not any(is_softmax(each, both) for each in copies)
    with softmax_attention(copies[0]):
        assert is_softmax(copies[0], both) and not is_softmax(model, both)


def test_unpatching_and_patching_inside(model, both):
    with softmax_attention(model):
        hf_entmax.unpatch_model(model)
        assert is_softmax(model, both)
        patch_model(model, alpha=2.0)
        assert is_softmax(model, both)
        hf_entmax.set_alphas(model, 1.5)
    assert torch.equal(alphas(model)["decoder_self"], torch.full((2, 4), 1.5))
    assert (logits(model) - both[1]).abs().max() > 1e-2


def test_calibrating_inside_is_refused_and_the_alphas_stay(model):
    batch = {**tiny.inputs(FAMILY), "labels": tiny.inputs(FAMILY)["input_ids"]}
    with softmax_attention(model), pytest.raises(ValueError, match="outside the block"):
        hf_entmax.calibrate_alphas(model, [batch, batch])
    assert torch.allclose(alphas(model)["decoder_self"], torch.tensor(1.7), atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_refused_rather_than_computed_again_as_entmax(model, reentrant):
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = tiny.inputs(FAMILY)["input_ids"]
    with (
        softmax_attention(model),
        pytest.raises(ValueError, match="Gradients cannot be checkpointed inside softmax_attention"),
    ):
        model(input_ids=ids, labels=ids)
    with torch.no_grad(), softmax_attention(model):
        model(input_ids=ids)
    model.eval()
    with softmax_attention(model):
        model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.slow
def test_a_compiled_model_follows(model, both):
    compiled = torch.compile(model, backend="aot_eager")
    assert not is_softmax(compiled, both)
    with softmax_attention(model):
        assert is_softmax(compiled, both)
    assert not is_softmax(compiled, both)
    torch.compiler.reset()


def test_gradients_inside_are_those_of_softmax(model):
    plain = hf_entmax.unpatch_model(copy.deepcopy(model))
    ids = tiny.inputs(FAMILY)["input_ids"]
    with softmax_attention(model):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()  # after the block: what the forward pass kept is what counts
    plain(input_ids=ids, labels=ids).loss.backward()
    own = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, atol=1e-5, rtol=1e-4)
    assert all(p.grad is None for name, p in own.items() if "entmax_norm" in name)
