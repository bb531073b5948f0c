"""What `recipes.lab.serving` times: decoding of many requests, and reading one prompt, in the engine of Transformers.

Prompts are read once, by the patched model, and their keys and values written into the blocks of one buffer that all engines work
on, SDPA's too: what a step of decoding costs depends on the number and the place of the keys, and in the sparse model on how many have
weight. Engines come to decode without arithmetic, as if they had read the prompts; they go on in step, so that new keys too have one
place, and SDPA's tokens are not to be looked at. With one prompt all requests share its blocks; with several (``--prompts``) each
request has blocks of its own, with the keys of prompt ``r % prompts``. Half precision is read with linear layers in float32, which is
some ten times faster on processors without it; nothing that is timed is. `prefill` times what that leaves out: one prompt that each
engine reads itself, piece by piece in turn.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

from hf_entmax.bench.timing import interleaved_times, ratios
from hf_entmax.generation import ExactSparseCache

from .long_context import Greedy
from .rows import RowFile, made_by
from .texts import load_model, text_of

_ORIGIN = "dtype command hardware versions"
SPEED = (
    "model alpha requests length prompts engine tokens_per_second tokens_per_second_20 tokens_per_second_80 ratio_to_sdpa "
    f"ratio_to_generate faults_per_step sketch_mib cache_mib read nonzero {_ORIGIN}"
)
PREFILL = f"model alpha length engine seconds ratio_to_sdpa attention_seconds attention_ratio_to_sdpa faults {_ORIGIN}"
#: Tokens that a prompt is read at a time, and tokens of a block.
CHUNK, BLOCK = 512, 256


def clock() -> float:
    """Seconds; with one thread those of this process alone, so that other programs on the machine count less."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def settings_of(new: int, **options: Any) -> GenerationConfig:
    """Greedy, of a fixed length."""
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, **options)


def cache_bytes(model: Any, length: int) -> int:
    """Bytes of the keys and values of one request."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * length * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize


@contextlib.contextmanager
def linear_in_float32() -> Iterator[None]:
    """Compute linear layers in float32, whatever the dtype of the model."""

    def forward(self: nn.Linear, states: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(states.float(), self.weight.float(), bias).to(states.dtype)

    original, nn.Linear.forward = nn.Linear.forward, forward
    try:
        yield
    finally:
        nn.Linear.forward = original


class Engine:
    """The engine of Transformers, driven step by step in this thread."""

    def __init__(self, model: Any, requests: int, length: int, new: int, share: bool, **options: Any) -> None:
        # Those that read first decode while others read.
        self.model, self.new = model, new + requests * (2 + length // CHUNK)
        # Room as if nothing were shared, or the engine would not read for all of them in one step.
        config = ContinuousBatchingConfig(
            page_size=BLOCK,
            num_blocks=requests * (-(-(length + self.new) // BLOCK) + 1),
            max_batch_tokens=CHUNK,
            safety_margin=0.0,
            allow_block_sharing=share,
        )
        self.manager = model.init_continuous_batching(settings_of(self.new, **options), config)
        self.manager._generation_thread = None
        self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        self.manager.current_batch = 0

    @property
    def active(self) -> dict[str, Any]:
        """The states of requests that were begun."""
        return self.processor.scheduler.active_requests

    def step(self) -> None:
        """One forward pass."""
        self.manager._generation_loop_body(self.processor, False)

    def read(self, prompts: list[list[int]]) -> None:
        """Step until requests of these prompts, and all before, decode."""
        wanted = len(self.active) + len(prompts)
        for prompt in prompts:
            self.manager.add_request(prompt, max_new_tokens=self.new)
        while sum(state.generated_len() > 0 for state in self.active.values()) < wanted:
            self.step()

    @property
    def allocator(self) -> Any:
        """Of the blocks, for a model with layers of one kind."""
        (allocator,) = self.processor.cache.cache_allocators.values()
        return allocator

    def fill(self, prompts: list[list[int]], requests: int, cache: Any, other: Engine | None = None) -> None:
        """Let so many requests decode the last token of their prompts, of whose other tokens ``cache`` has the keys, one prompt a row.

        With another engine that was filled alike, its buffer is used.
        """
        vocabulary = self.model.config.get_text_config().vocab_size

        def nothing(*_: Any, logits_to_keep: Tensor, **__: Any) -> Any:
            return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), vocabulary))

        asked = [prompts[number % len(prompts)][:-1] for number in range(requests)]
        self.model.forward = nothing
        try:
            # The first one's blocks are complete, and shared, when the others come.
            self.read(asked[:1])
            self.read(asked[1:])
        finally:
            del self.model.forward
        held = [(layer.keys, layer.values) for layer in cache.layers] if other is None else []
        for state in self.active.values():
            row = next(number for number, prompt in enumerate(prompts) if prompt[:-1] == state.initial_tokens)
            length, last = len(state.initial_tokens), prompts[row][-1]
            state.position_offset, state.generated_tokens, state.tokens_to_process = length, [last], [last]
            places = torch.tensor(self.allocator.get_write_indices(state.request_id, 0, length))
            for number, tensors in enumerate(held):
                for target, own in zip(self.allocator._kv_token_views[number], tensors, strict=True):
                    target[places] = own[row].transpose(0, 1)
        if other is not None:
            if list(self.allocator.block_table.values()) != list(other.allocator.block_table.values()):
                raise RuntimeError("Two engines gave the same requests other blocks: they cannot share a buffer.")
            # Its own is freed.
            self.processor.cache.cache_tensor = other.processor.cache.cache_tensor
            for name in ("cache_tensor", "_copy_view", "_kv_token_views", "_kv_page_views"):
                setattr(self.allocator, name, getattr(other.allocator, name))


@torch.no_grad()
def speed(settings: Any) -> None:
    """Time decoding steps of all engines in turn."""
    requests, length, share = settings.requests, settings.length, settings.prompts == 1
    if requests % settings.prompts:
        raise SystemExit(f"--requests {requests} is no multiple of --prompts {settings.prompts}.")
    text = text_of(settings, length * settings.prompts)
    prompts = [text[number * length :][:length] for number in range(settings.prompts)]
    new = settings.trials + 3
    sparse, plain = load_model(settings), load_model(settings, sparse=False)
    cache = ExactSparseCache(sparse, max_cache_len=length + new)
    with contextlib.nullcontext() if sparse.dtype == torch.float32 else linear_in_float32():
        for chunk in torch.tensor(prompts)[:, :-1].split(CHUNK, 1):
            sparse(chunk, past_key_values=cache, logits_to_keep=1)
    engines: dict[str, Any] = {}
    for name, model in (("sdpa", plain), ("dense", sparse), ("sparse", sparse)):
        options = {"cache_config": {"bits": None}} if name == "dense" else {}
        engines[name] = Engine(model, requests, length, new, share, **options)
        engines[name].fill(prompts, requests, cache, engines["sdpa"] if len(engines) > 1 else None)
    if requests * cache_bytes(plain, length) <= settings.memory * 2**30:
        cache.batch_repeat_interleave(requests // settings.prompts)
        engines["generate"] = Greedy(sparse, cache, 0, requests)
        last = torch.tensor([prompt[-1] for prompt in prompts])
        engines["generate"].token = last.repeat_interleave(requests // settings.prompts)[:, None]
    faults: dict[str, list[int]] = {name: [] for name in engines}

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            engines[name].step()
            faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

        return run

    times = interleaved_times({name: step(name) for name in engines}, settings.trials, clock=clock)
    certificates = {"sparse": engines["sparse"].manager.certificate()}
    if "generate" in engines:
        certificates["generate"] = cache.certificate()
    file = RowFile(settings.out / "serving.csv", SPEED)
    for name, own in times.items():
        tokens = sorted(1e3 * requests / t for t in own)
        row = {
            "model": Path(settings.model).name,
            "alpha": settings.alpha,
            "requests": requests,
            "length": length,
            "prompts": settings.prompts,
            "engine": name,
            "tokens_per_second": round(statistics.median(tokens), 2),
            "tokens_per_second_20": round(tokens[len(tokens) // 5], 2),
            "tokens_per_second_80": round(tokens[-1 - len(tokens) // 5], 2),
            "ratio_to_sdpa": round(ratios(times["sdpa"], own).median, 3),
            "ratio_to_generate": round(ratios(times["generate"], own).median, 3) if "generate" in times else "",
            "faults_per_step": round(statistics.median(faults[name][1:]), 1),
            "sketch_mib": 0.0,
            "cache_mib": round((1 if share else requests) * cache_bytes(plain, length) / 2**20, 1),
            "dtype": settings.dtype,
            **made_by("serving", "--out", "--memory"),
        }
        if name == "generate":
            row["cache_mib"] = round(requests * cache_bytes(plain, length) / 2**20, 1)
        if name in certificates:
            found = certificates[name]
            counted = sum(int((layer.pairs - layer.dense).sum()) for layer in found.layers)
            nonzero = sum(int(layer.nonzero.sum()) for layer in found.layers)
            row["sketch_mib"] = round(sum(layer.sketch_bytes for layer in found.layers) / 2**20, 1)
            row["read"] = round(found.keys_read / found.keys_total, 5)
            row["nonzero"] = round(nonzero / counted, 5) if counted else ""
        file.add(**row)
        print({key: row.get(key) for key in SPEED.split()[5:16]}, flush=True)


@contextlib.contextmanager
def timed_attention(spent: list[float]) -> Iterator[None]:
    """Add the seconds of every attention call, softmax or entmax, to the last of ``spent``."""
    interface = AttentionInterface()
    originals = {name: interface[name] for name in ("sdpa", "hf_entmax")}

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            found = original(*args, **kwargs)
            spent[-1] += clock() - start
            return found

        return attend

    for name, original in originals.items():
        AttentionInterface.register(name, timed(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            AttentionInterface.register(name, original)


@torch.no_grad()
def prefill(settings: Any) -> None:
    """Time the first token of one prompt, read piece by piece by each engine in turn."""
    prompt = text_of(settings, settings.length)
    sparse, plain = load_model(settings), load_model(settings, sparse=False)
    engines = {name: Engine(model, 2, len(prompt), 4, False) for name, model in (("sdpa", plain), ("sparse", sparse))}
    for engine in engines.values():
        engine.read([prompt[:40]])
        while engine.active:  # kernels are compiled now, for prompts and for single tokens
            engine.step()
        engine.manager.add_request(prompt, max_new_tokens=4)
    cache = ExactSparseCache(sparse)
    pieces = iter(torch.tensor(prompt)[None].split(CHUNK, 1))
    turns: dict[str, Callable[[], Any]] = {name: engine.step for name, engine in engines.items()}
    turns["generate"] = lambda: sparse(next(pieces), past_key_values=cache, logits_to_keep=1)
    seconds, faults = dict.fromkeys(turns, 0.0), dict.fromkeys(turns, 0)
    spent: dict[str, float] = dict.fromkeys(turns, 0.0)
    within = [0.0]
    with timed_attention(within):
        for _ in range(-(-len(prompt) // CHUNK)):
            for name, turn in turns.items():
                before, within[-1], start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 0.0, clock()
                turn()
                seconds[name] += clock() - start
                spent[name] += within[-1]
                faults[name] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    file = RowFile(settings.out / "serving_prefill.csv", PREFILL)
    for name in turns:
        row = {
            "model": Path(settings.model).name,
            "alpha": settings.alpha,
            "length": len(prompt),
            "engine": name,
            "seconds": round(seconds[name], 3),
            "ratio_to_sdpa": round(seconds[name] / seconds["sdpa"], 3),
            "attention_seconds": round(spent[name], 3),
            "attention_ratio_to_sdpa": round(spent[name] / spent["sdpa"], 3),
            "faults": faults[name],
            "dtype": settings.dtype,
            **made_by("serving", "--out"),
        }
        file.add(**row)
        print({key: row[key] for key in PREFILL.split()[:10]}, flush=True)
