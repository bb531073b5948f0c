"""The loop without a Trainer, on a tiny model."""

import pytest
import tiny_models as tiny
import torch
from transformers import AutoModelForCausalLM

import pytorch_loop
from hf_entmax import entmax_config


@pytest.fixture
def arguments(tmp_path):
    words = tiny.WORDS[:20]
    tiny.save(tiny.build("gpt2"), tmp_path / "model", words)
    (tmp_path / "text.txt").write_text(" ".join(words * 8), encoding="utf-8")
    places = {"model": str(tmp_path / "model"), "data": str(tmp_path / "text.txt"), "out": str(tmp_path / "out")}
    return pytorch_loop.Arguments(**places, block=8, batch_size=4, epochs=6, lr=0.01)


def test_it_trains_and_ends_with_a_table(arguments, capsys):
    pytorch_loop.main(arguments)
    lines = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [int(line[0]) for line in lines] == [1, 2, 3, 4, 5, 6]
    assert float(lines[-1][1]) < 0.7 * float(lines[0][1])
    assert entmax_config(AutoModelForCausalLM.from_pretrained(arguments.out)).output_alpha == 1.5


def test_the_loss_is_the_models_and_the_cross_entropy_is_another(arguments):
    pytorch_loop.main(arguments)
    model = AutoModelForCausalLM.from_pretrained(arguments.out).eval()
    ids = torch.arange(2, 10)[None]
    output = model(input_ids=ids, labels=ids)
    own, other = pytorch_loop.own_losses(output.logits, ids, 1.5)
    wanted, found, wrong = (torch.autograd.grad(loss, output.logits, retain_graph=True)[0] for loss in (output.loss, own, other))  # fmt: skip
    torch.testing.assert_close(own, output.loss)
    torch.testing.assert_close(found, wanted)
    assert float((wrong - wanted).abs().max()) > 0.01
    assert (wanted == 0).any() and not (
        wrong[:, :-1] == 0
    ).any()  # entmax leaves words alone that it gives no probability


def test_too_little_text(arguments):
    arguments.block = 1000
    with pytest.raises(ValueError, match=r"has \d+ tokens: give more, or a --block"):
        pytorch_loop.main(arguments)
