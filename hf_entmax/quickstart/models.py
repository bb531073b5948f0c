"""The model that the quickstart starts from, its training with the Seq2SeqTrainer, and the check of what was saved."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback

from hf_entmax.quickstart import data

#: Weights of the small model in float16; ``python -m hf_entmax.quickstart.models`` makes them.
BASE_FILE = Path(__file__).with_name("base.safetensors")
#: Longest answer in characters that the small model may give; the longest form of the table has 19.
MAX_NEW_TOKENS = 32
BETAS = (0.9, 0.98)
#: Of a stage: the share in which the learning rate rises.
WARMUP = 0.1
#: Largest difference of logits that counts as agreement. The processes run the same code on the same machine; usually
#: the difference is exactly 0, but another number of threads may add up in another order.
TOLERANCE = 1e-4
#: The other process of `check_reload`, which knows of the model only what is on disk. Importing hf_entmax registers the
#: attention; from_pretrained then restores a patched model by itself.
_RELOAD = """
import sys, torch, hf_entmax
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM
probe = load_file(sys.argv[2])
expected = probe.pop("logits")
with torch.no_grad():
    logits = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1]).eval()(**probe).logits.float()
print((logits - expected).abs().max().item())
"""


def small_bart(tokenizer: PreTrainedTokenizerBase) -> BartForConditionalGeneration:
    """Build a randomly initialised BART of 0.24 million parameters: 2 + 2 layers of 4 heads, width 64."""
    pad, end = tokenizer.get_vocab()["<pad>"], tokenizer.get_vocab()["</s>"]
    sizes: dict[str, Any] = {"layers": 2, "attention_heads": 4, "ffn_dim": 256}
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()},
        max_position_embeddings=64,
        dropout=0.05,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=end,
        decoder_start_token_id=pad,
        forced_eos_token_id=None,
    )
    return _with_answer_length(BartForConditionalGeneration(config))


def pretrained_bart(tokenizer: PreTrainedTokenizerBase) -> BartForConditionalGeneration:
    """Load the small model of this package, trained with softmax on the known verbs."""
    model = small_bart(tokenizer)
    weights = {name: tensor.float() for name, tensor in load_file(BASE_FILE).items()}
    missing = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if missing.unexpected_keys or {name for name, _ in model.named_parameters()} - set(weights):
        raise RuntimeError(
            f"{BASE_FILE} does not fit the model: make it again with python -m hf_entmax.quickstart.models."
        )
    return model


def load_pretrained(name_or_path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a pretrained encoder-decoder and its own tokenizer."""
    config = AutoConfig.from_pretrained(name_or_path)
    if not config.is_encoder_decoder:
        raise ValueError(
            f"{name_or_path} is a {config.model_type} model; the quickstart needs an encoder-decoder that answers text with "
            "text, such as google/byt5-small or google-t5/t5-small. For other models call hf_entmax.patch_model directly."
        )
    model = AutoModelForSeq2SeqLM.from_pretrained(name_or_path)
    return _with_answer_length(model), AutoTokenizer.from_pretrained(name_or_path)


def _with_answer_length(model: Any) -> Any:
    """Make room for a whole verb form in ``generate()``."""
    model.generation_config.max_length = None
    model.generation_config.max_new_tokens = MAX_NEW_TOKENS
    return model


def learning_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: up to 1 within ``WARMUP`` of the steps, then linearly down to 0."""
    done = step / steps
    return max(0.0, min(max(done, 1 / steps) / WARMUP, (1 - done) / (1 - WARMUP), 1.0))


class _Progress(TrainerCallback):
    """A bar with the current loss, and an early end of the stage, never a silent one, where its time is up."""

    def __init__(self, title: str, steps: int, max_seconds: float, console: Console) -> None:
        self.title, self.steps, self.max_seconds, self.console = title, steps, max_seconds, console
        times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("loss {task.fields[loss]}"))
        name = TextColumn("{task.description}")
        self.bar = Progress(name, BarColumn(), MofNCompleteColumn(), *times, console=console)
        self.task = self.bar.add_task(title, total=steps, loss="-")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.monotonic()
        self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)
        if state.global_step < self.steps and time.monotonic() - self.start >= self.max_seconds:
            control.should_training_stop = control.should_log = True  # figures need at least one report

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "loss" in (logs := kwargs.get("logs") or {}):
            self.bar.update(self.task, loss=f"{float(logs['loss']):.3f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.stop()
        if state.global_step < self.steps:
            self.console.print(
                f"[bold red]{self.title} stopped after {state.global_step:,} of {self.steps:,} steps[/], because its "
                f"{self.max_seconds:.0f} seconds were over. The numbers below are those of an unfinished training and "
                "not comparable with published ones; give max_minutes (--max-minutes) more time."
            )


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Dataset,
    optimizer: Optimizer,
    *,
    title: str,
    out_dir: Path,
    steps: int,
    max_seconds: float,
    batch_size: int,
    seed: int,
    console: Console,
    callbacks: Sequence[TrainerCallback] = (),
) -> int:
    """Train with the Seq2SeqTrainer, batches grouped by length; returns the number of steps done.

    ``optimizer`` has the peak learning rates. After ``max_seconds`` training ends and says so, even if steps are left.
    """
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(out_dir),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        logging_steps=max(1, steps // 20),
        save_strategy="no",
        report_to="none",
        seed=seed,
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=pairs,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: learning_rate(step, steps))),
        callbacks=[*callbacks, _Progress(title, steps, max_seconds, console)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.global_step


@torch.no_grad()
def check_reload(model: PreTrainedModel, model_dir: Path, probe: Mapping[str, Tensor]) -> float:
    """Compare the logits of ``model`` with those of the model that a fresh process loads from ``model_dir``.

    Both run on the CPU, on ``probe``, a batch with ``labels``.
    """
    device = model.device
    inputs = {name: tensor.cpu().clone() for name, tensor in probe.items()}
    logits = model.to("cpu").eval()(**inputs).logits.float().contiguous()  # type: ignore[arg-type]
    model.to(device)  # type: ignore[arg-type]
    probe_file = model_dir.parent / "probe.safetensors"
    save_file({**inputs, "logits": logits}, probe_file)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _RELOAD, str(model_dir), str(probe_file)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own}, check=False)
    probe_file.unlink()
    if done.returncode != 0:
        raise RuntimeError(f"Loading {model_dir} in a fresh process failed:\n{done.stderr.strip()}")
    difference = float(done.stdout.strip().splitlines()[-1])
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"The model in {model_dir} gives other logits in a fresh process: they differ by up to {difference:.3g}."
        )
    return difference


def make_base(path: Path, steps: int = 2000) -> None:
    """Train the small model with softmax and write its weights in half precision, which is all that they need.

    It takes some three minutes on two cores, which the quickstart would otherwise spend before it could show anything.
    """
    set_seed(0)
    torch.set_num_threads(1)
    verbs = data.read_verbs()
    known, _ = data.split_verbs(verbs)
    tokenizer = data.build_tokenizer(verbs)
    model = small_bart(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        train(
            model, tokenizer, data.training_set(data.training_questions(known), tokenizer),
            AdamW(model.parameters(), lr=3e-3, betas=BETAS, weight_decay=0.0), title="training with softmax",
            out_dir=Path(folder), steps=steps, max_seconds=3600.0, batch_size=64, seed=0, console=Console(),
        )  # fmt: skip
    tied = {name for name, _ in model.named_parameters()}
    save_file({n: p.half().contiguous() for n, p in model.state_dict().items() if n in tied}, path)


if __name__ == "__main__":
    make_base(BASE_FILE)
