"""Adapters of PEFT over a patched model: trained, saved, loaded by AutoPeft."""

import pytest
import tiny_models as tiny
import torch

from hf_entmax import alphas, is_patched, patch_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow
KINDS = {
    "LoRA": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", modules_to_save=["entmax_norm"]
    ),
    "DoRA": lambda: peft.LoraConfig(
        r=2, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=["entmax_norm"]
    ),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
        modules_to_save=["entmax_norm"],
    ),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.works_with("peft", "LoRA, DoRA, IA3, prefix and prompt tuning; AutoPeftModel loads them")
def test_an_adapter_trains_and_comes_back(tmp_path, kind):
    base = patch_model(tiny.build("llama"), alpha_init=1.5)
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, KINDS[kind]())
    batch = tiny.inputs("llama", labels=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(3):  # LoRA's first factor has no gradient before the second one moved
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert all((old != new).any() for old, new in zip(before, trained, strict=True))
    model.eval().save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert is_patched(again)
    torch.testing.assert_close(
        alphas(again.get_base_model())["decoder_self"], alphas(model.get_base_model())["decoder_self"]
    )
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, model(**batch).logits)
