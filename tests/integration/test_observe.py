"""Looking at attention while a model runs: nested, in threads, through exceptions, and with gated heads."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading

import pytest
import tiny_models as tiny
import torch
from torch.utils.checkpoint import checkpoint

from hf_entmax import patch_model
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.observe import observe_attention


def ready(family: str, patched: bool):
    model = tiny.build(family).eval()
    return patch_model(model, alpha=1.5) if patched else model


def state(model):
    """What observing touches: attributes and hooks of every module, the attention of every configuration."""
    return [
        (
            name,
            sorted(module.__dict__),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("patched", [False, True])
def test_every_call_once_and_nothing_stays(patched):
    model, data = ready("t5", patched), tiny.inputs("t5")
    before, plain = state(model), model(**data).logits
    seen = []
    with observe_attention(model, seen.append):
        assert state(model) != before
        torch.testing.assert_close(model(**data).logits, plain, rtol=1e-4, atol=1e-5)
    assert sorted(call.site.name for call in seen) == sorted(site.name for site in attention_sites(model))
    for call in seen:
        assert call.index == 0 and call.site.module is model.get_submodule(call.site.name)
        torch.testing.assert_close(call.weights.sum(-1), torch.ones(call.weights.shape[:3]))
    assert state(model) == before
    torch.testing.assert_close(model(**data).logits, plain, rtol=0, atol=0)
    assert len(seen) == len(attention_sites(model)), "the block went on looking after its end"


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("first_out", ["inner", "outer"])
def test_nested_blocks_are_left_in_any_order(patched, first_out):
    model, data = ready("gpt2", patched), tiny.inputs("gpt2")
    before, modules = state(model), len(attention_sites(model))
    outer, inner = [], []
    blocks = {"outer": observe_attention(model, outer.append), "inner": observe_attention(model, inner.append)}
    for block in ("outer", "inner"):
        blocks[block].__enter__()
    model(**data)
    assert len(outer) == len(inner) == modules
    blocks.pop(first_out).__exit__(None, None, None)
    model(**data)
    assert (len(outer), len(inner)) == ((modules, 2 * modules) if first_out == "outer" else (2 * modules, modules))
    (last,) = blocks.values()
    last.__exit__(None, None, None)
    assert state(model) == before
    model(**data)
    assert len(outer) + len(inner) == 3 * modules


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("place", ["callback", "gate", "model", "block"])
def test_an_exception_leaves_nothing_behind(patched, place):
    model, data = ready("t5", patched), tiny.inputs("t5")
    before, seen = state(model), []

    def stop(_):
        raise RuntimeError("stop")

    options = {"callback": stop if place == "callback" else seen.append, "gate": stop if place == "gate" else None}
    with pytest.raises(RuntimeError, match="stop"), observe_attention(model, **options):
        with contextlib.ExitStack() as stack:
            if place == "model":
                last = model.get_submodule(attention_sites(model)[-1].name)
                stack.callback(last.register_forward_hook(lambda *_: stop(0)).remove)
            if place != "block":
                model(**data)
        stop(0)
    assert state(model) == before


def test_calls_are_counted_anew_after_a_pass_that_broke_off():
    model, data = ready("t5", False), tiny.inputs("t5")
    seen, broken = [], [True]

    def look(call):
        seen.append(call.index)
        if broken[0] and len(seen) == 3:
            raise RuntimeError("stop")

    with observe_attention(model, look):
        with pytest.raises(RuntimeError, match="stop"):
            model(**data)
        broken[0] = False
        model(**data)
        model.encoder(data["input_ids"])  # a part of the model, run by itself as generate() does
    assert set(seen) == {0}


def test_a_shared_module_is_counted_within_each_pass():
    model, data = ready("albert", False), tiny.inputs("albert")
    seen = []
    with observe_attention(model, lambda call: seen.append((call.site.layer, call.index))):
        model(**data)
        model(**data)
    assert seen == [(0, 0), (0, 1)] * 2


def test_a_gate_reaches_one_call_of_a_shared_module():
    model, data = ready("albert", False), tiny.inputs("albert")
    outputs = []
    (site,) = attention_sites(model)
    site.module.dense.register_forward_pre_hook(lambda _, args: outputs.append(args[0].detach().clone()))

    def gate(call):
        assert call.weights is None, "weights were formed for nobody"
        return None if call.index != 1 else torch.tensor([1.0, 0.0, 1.0, 1.0]).view(1, 1, 4, 1)

    with torch.no_grad(), observe_attention(model, gate=gate):
        model(**data)
    gone = [bool((output.unflatten(-1, (4, 8))[:, :, 1] == 0).all()) for output in outputs]
    assert gone == [False, True]


@pytest.mark.parametrize("patched", [False, True])
def test_gates_of_nested_blocks_multiply(patched):
    model, data = ready("gpt2", patched), tiny.inputs("gpt2")
    heads = attention_sites(model)[0].num_heads
    half = torch.full((1, 1, heads, 1), 0.5)
    with torch.no_grad():
        with observe_attention(model, gate=lambda _: half), observe_attention(model, gate=lambda _: half):
            twice = model(**data).logits
        with observe_attention(model, gate=lambda _: half.square()):
            once = model(**data).logits
        plain = model(**data).logits
    torch.testing.assert_close(twice, once)
    assert not torch.allclose(twice, plain)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_checkpointed_layers_are_seen_once_and_their_weights_have_gradients(family):
    found = []
    for checkpointing in (False, True):
        model, seen = patch_model(tiny.build(family), alpha_init=1.5).train(), []
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        with observe_attention(model, seen.append):
            loss = model(**tiny.inputs(family, labels=True), use_cache=False).loss
            (loss + sum(call.weights.square().sum() for call in seen)).backward()
        names = [(call.site.name, call.index) for call in seen]
        found.append((names, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1])


def test_what_checkpointing_would_drop_is_refused():
    model, data = ready("llama", True).train(), tiny.inputs("llama", labels=True)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with observe_attention(model, lambda _: None):
        with pytest.raises(ValueError, match="use_reentrant=True are outside"):
            model(**data)
        with torch.no_grad():
            model(**data)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with observe_attention(model, gate=lambda _: torch.ones(1)):
        with pytest.raises(ValueError, match="cannot be gated"):
            model(**data)
        model.eval()(**data).loss.backward()

    # Checkpointed by other hands, it shows in the backward pass.
    model.gradient_checkpointing_disable()
    with observe_attention(model, gate=lambda _: torch.ones(1)):
        loss = checkpoint(lambda ids: model(ids).logits.sum(), data["input_ids"], use_reentrant=False)
        with pytest.raises(ValueError, match="cannot be gated"):
            loss.backward()


def test_what_a_callback_runs_is_not_shown_to_it():
    model, data = ready("gpt2", False), tiny.inputs("gpt2")
    outer, inner = [], []

    def look(call):
        outer.append((call.site.layer, call.index))
        with observe_attention(model, inner.append):  # its own block sees what it runs
            model(**data)

    with observe_attention(model, look):
        model(**data)
    modules = len(attention_sites(model))
    assert outer == [(layer, 0) for layer in range(modules)]
    assert len(inner) == modules**2


def test_a_copy_made_inside_the_block_is_another_model():
    model, data = ready("gpt2", True), tiny.inputs("gpt2")
    seen = []
    with observe_attention(model, seen.append):
        twin = copy.deepcopy(model)
        twin(**data)
        assert not seen
        model(**data)
    assert len(seen) == len(attention_sites(model))


@pytest.mark.parametrize("patched", [False, True])
def test_threads_see_their_own_calls(patched):
    model, data = ready("gpt2", patched), tiny.inputs("gpt2")
    before, modules = state(model), len(attention_sites(model))
    opened, first_is_out = threading.Barrier(3, timeout=60), threading.Event()
    seen, failures = {"a": [], "b": []}, []

    def work(name, passes):
        try:
            with torch.no_grad(), observe_attention(model, seen[name].append):
                opened.wait()
                for _ in range(passes):
                    model(**data)
                if name == "b":
                    assert first_is_out.wait(60)
                    model(**data)
        except Exception as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=case) for case in (("a", 1), ("b", 3))]
    for thread in threads:
        thread.start()
    opened.wait()
    with torch.no_grad():
        model(**data)  # shown to nobody: this thread has no block open
    threads[0].join()
    first_is_out.set()
    threads[1].join()
    assert not failures
    assert [(call.site.layer, call.index) for call in seen["a"]] == [(layer, 0) for layer in range(modules)]
    assert [(call.site.layer, call.index) for call in seen["b"]] == [(layer, 0) for layer in range(modules)] * 4
    assert state(model) == before


@pytest.mark.slow
def test_a_compiled_model_is_seen_and_goes_on_unseen():
    model, data = ready("gpt2", True), tiny.inputs("gpt2")
    compiled, seen = torch.compile(model, backend="eager"), []
    with torch.no_grad():
        plain = compiled(**data).logits
        with observe_attention(model, seen.append):
            torch.testing.assert_close(compiled(**data).logits, plain)
        compiled(**data)
    assert [(call.site.layer, call.index) for call in seen] == [(0, 0), (1, 0)]
    torch._dynamo.reset()


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("inside", ["forward", "block"])
def test_a_copy_made_inside_the_block_keeps_nothing_of_it(patched, inside):
    model, data = ready("t5", patched), tiny.inputs("t5")
    before, copies, seen = state(model), [], []

    def look(call):
        seen.append(call.site.name)
        if inside == "forward" and not copies:
            copies.append(copy.deepcopy(model))

    with torch.no_grad(), observe_attention(model, look):
        if inside == "block":
            copies.append(copy.deepcopy(model))
        model(**data)
        count = len(seen)
        copied = copies[0](**data).logits  # its forwards are its own: they neither show nor count
        model(**data)
    assert len(seen) == 2 * count
    assert [(row[0], row[2:]) for row in state(copies[0])] == [(row[0], row[2:]) for row in before]
    with torch.no_grad():
        assert torch.equal(model(**data).logits, copied)
    assert state(model) == before
    assert pickle.loads(pickle.dumps(copies[0])) is not None
