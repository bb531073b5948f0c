"""TRL's trainers with patched models: packed SFT, preference and reward training."""

import itertools

import pytest
import tiny_models as tiny
import torch

from hf_entmax import alphas, is_patched, patch_model

pytestmark = pytest.mark.slow
_WORDS = [f"w{i}" for i in range(3, 30)]
_OPTIONS = dict(
    report_to=[],
    use_cpu=True,
    bf16=False,
    max_steps=1,
    learning_rate=1e-2,
    per_device_train_batch_size=2,
    save_strategy="no",
    disable_tqdm=True,
)


@pytest.fixture
def trl():
    return pytest.importorskip("trl")


@pytest.fixture
def tokenizer():
    made = tiny.tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def _dataset(**columns):
    from datasets import Dataset

    return Dataset.from_dict(columns)


def _texts(lengths):
    return [" ".join(_WORDS[(i + n) % len(_WORDS)] for i in range(length)) for n, length in enumerate(lengths)]


def _trained(make, **options):
    """Make a trainer with a patched model, train a step; every alpha must have moved."""
    model = patch_model(tiny.build("llama"), alpha_init=1.4, **options)
    before = alphas(model)["decoder_self"].clone()
    trainer = make(model)
    trainer.train()
    assert is_patched(model)
    after = alphas(model)["decoder_self"]
    assert after.isfinite().all() and (after != before).all()
    return trainer


@pytest.mark.works_with("trl", "SFTTrainer, packing='wrapped': one token stream, cut")
def test_sft_on_a_wrapped_stream(trl, tokenizer, tmp_path):
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), packing=True, packing_strategy="wrapped", max_length=8, **_OPTIONS
    )
    data = _dataset(text=_texts([6, 9, 4, 7, 5, 8]))
    _trained(
        lambda model: trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer),
        output_alpha=1.5,
    )


@pytest.mark.works_with("trl", "DPOTrainer, with a reference model; refused together with output_alpha")
def test_dpo(trl, tokenizer, tmp_path):
    arguments = trl.DPOConfig(output_dir=str(tmp_path), **_OPTIONS)
    prompts, chosen, rejected = (_texts(lengths) for lengths in ([3, 4, 3, 5], [4, 4, 5, 3], [3, 5, 4, 4]))
    data = _dataset(prompt=prompts, chosen=[" " + t for t in chosen], rejected=[" " + t for t in reversed(rejected)])

    def make(model):
        return trl.DPOTrainer(
            model=model,
            ref_model=patch_model(tiny.build("llama"), alpha_init=1.2),
            args=arguments,
            train_dataset=data,
            processing_class=tokenizer,
        )

    _trained(make)
    with pytest.raises(ValueError, match="DPOTrainer"):
        make(patch_model(tiny.build("llama"), output_alpha=1.5))


@pytest.mark.works_with("trl", "GRPOTrainer, generating with Transformers; refused together with output_alpha")
def test_grpo(trl, tokenizer, tmp_path):
    options = {**_OPTIONS, "per_device_train_batch_size": 4}
    arguments = trl.GRPOConfig(output_dir=str(tmp_path), num_generations=4, max_completion_length=4, **options)
    data = _dataset(prompt=_texts([3, 4, 3, 5]))

    def reward(completions, **_):
        return [float(len(set(text.split()))) + 0.1 * n for n, text in enumerate(completions)]

    def make(model):
        return trl.GRPOTrainer(
            model=model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer
        )

    torch.manual_seed(0)
    _trained(make)
    with pytest.raises(ValueError, match="GRPOTrainer"):
        make(patch_model(tiny.build("llama"), output_alpha=1.5))


@pytest.mark.works_with("trl", "SFTTrainer, packing='bfd' and padding-free: packed sequences do not see each other")
def test_sft_on_packed_rows(trl, tokenizer, tmp_path):
    arguments = trl.SFTConfig(output_dir=str(tmp_path), packing=True, packing_strategy="bfd", max_length=12, **_OPTIONS)
    rows = [[5, 6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16], [17, 18, 19, 20, 21, 22]]
    data = _dataset(input_ids=rows)

    def make(model):
        trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
        batch = next(iter(trainer.get_train_dataloader()))
        with torch.no_grad():
            ids = batch["input_ids"]
            starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
            assert len(starts) > 3
            packed = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits[0]
            for start, stop in itertools.pairwise(starts):
                alone = model(input_ids=ids[:, start:stop]).logits[0]
                torch.testing.assert_close(packed[start:stop], alone, atol=1e-4, rtol=1e-3)
        return trainer

    _trained(make)
