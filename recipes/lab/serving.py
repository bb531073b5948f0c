"""Continuous batching of a patched model: its speed, the same tokens as `generate`, and a server under load.

    python -m recipes.lab.serving speed models/smollm2 --text valid.txt --alpha 1.5 --requests 8 --length 8192
    python -m recipes.lab.serving check models/smollm2 --text valid.txt --alpha 1.5 --requests 200
    python -m recipes.lab.serving load models/smollm2 --alpha 1.5 --requests 32

`speed` lets each engine read one prompt, which all its requests then share, and times their decoding in turn: SDPA, this package
reading every key, and reading sketches, all in the engine of Transformers; and `generate` of a batch with `ExactSparseCache`, which
holds a copy of the prompt for each row and is left out where that exceeds --memory. Page faults are those of the whole process, by
step. `check` compares the tokens of requests of 5 to --longest tokens, some cancelled on the way, with those of `generate` one by
one. `load` starts the server of Transformers on 127.0.0.1, sends it a bounded number of requests with the `openai` client, and two
that it has no room for. A folder that was saved from a patched model keeps its own alphas (--alpha own).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import hf_entmax
from hf_entmax.analysis.reading.tables import read_text
from hf_entmax.bench.timing import interleaved_times, ratios
from hf_entmax.generation import ExactSparseCache

from .long_context import Greedy, cut
from .rows import RESULTS, RowFile, made_by
from .texts import encode

FIELDS = (
    "model alpha requests length engine tokens_per_second tokens_per_second_20 tokens_per_second_80 ratio_to_sdpa ratio_to_generate "
    "first_token_s faults_per_step sketch_mib cache_mib read nonzero dtype command hardware versions"
)
# Tokens that a prompt is read at a time.
_CHUNK = 512
_PAGE = 256


def load_model(settings: Any, sparse: bool = True) -> Any:
    """The model of the folder, patched or with SDPA."""
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype).eval()
    if settings.alpha == "own" and sparse:
        if not hf_entmax.is_patched(model):
            raise SystemExit(f"--alpha own: {settings.model} was not saved from a patched model.")
        return model
    if hf_entmax.is_patched(model):
        hf_entmax.unpatch_model(model)
    model.set_attn_implementation("sdpa")
    return hf_entmax.patch_model(model, alpha=float(settings.alpha)) if sparse else model


def text_of(settings: Any, length: int) -> list[int]:
    """The first tokens of the text."""
    ids = encode(read_text(str(settings.text)), AutoTokenizer.from_pretrained(settings.model), length)
    if len(ids) < length:
        raise SystemExit(f"{settings.text} has {len(ids)} tokens, {length} are needed.")
    return ids


def settings_of(new: int, **options: Any) -> GenerationConfig:
    """Greedy, of a fixed length."""
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, **options)


class Engine:
    """The engine of Transformers, driven step by step in this thread, with requests that share a prompt."""

    def __init__(self, model: Any, prompt: list[int], requests: int, new: int, **options: Any) -> None:
        # Room as if nothing were shared, or the engine would not read for all of them in one step; what is not written to is not there.
        blocks = requests * (-(-(len(prompt) + new) // _PAGE) + 1)
        config = ContinuousBatchingConfig(
            page_size=_PAGE, num_blocks=blocks, max_batch_tokens=_CHUNK, safety_margin=0.0
        )
        self.manager = model.init_continuous_batching(settings_of(new, **options), config)
        self.manager._generation_thread = None
        self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        self.manager.current_batch = 0
        start = time.perf_counter()
        self.manager.add_request(prompt, max_new_tokens=new)
        self.until(1)
        self.first_token = time.perf_counter() - start
        for _ in range(requests - 1):
            self.manager.add_request(prompt, max_new_tokens=new)
        self.until(requests)

    def until(self, decoding: int) -> None:
        """Step until so many requests decode."""
        while sum(state.generated_len() > 0 for state in self.processor.scheduler.active_requests.values()) < decoding:
            self.step()

    def step(self) -> None:
        """One forward pass."""
        self.manager._generation_loop_body(self.processor, False)


@torch.no_grad()
def speed(settings: Any) -> None:
    prompt, new = text_of(settings, settings.length), 2 + (settings.trials + 1) * settings.steps
    sparse, plain = load_model(settings), load_model(settings, sparse=False)
    engines: dict[str, Any] = {
        "sdpa": Engine(plain, prompt, settings.requests, new + settings.requests),
        "dense": Engine(sparse, prompt, settings.requests, new + settings.requests, cache_config={"bits": None}),
        "sparse": Engine(sparse, prompt, settings.requests, new + settings.requests),
    }
    held = settings.requests * cache_bytes(plain, settings.length) / 2**30
    if held <= settings.memory:
        cache = ExactSparseCache(sparse)
        start = time.perf_counter()
        for chunk in torch.tensor(prompt)[None].split(_CHUNK, 1):
            logits = sparse(chunk, past_key_values=cache, logits_to_keep=1).logits
        engines["generate"] = Greedy(
            sparse, cut(cache, settings.length, settings.requests), int(logits.argmax()), settings.requests
        )
        engines["generate"].first_token = time.perf_counter() - start
        del cache
    faults: dict[str, list[int]] = {name: [] for name in engines}

    def several(name: str) -> Callable[[], None]:
        def run() -> None:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(settings.steps):
                engines[name].step()
            faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

        return run

    times = interleaved_times({name: several(name) for name in engines}, settings.trials)
    file = RowFile(settings.out / "serving.csv", FIELDS)
    for name, own in times.items():
        tokens = sorted(1e3 * settings.requests * settings.steps / t for t in own)
        row = {
            "model": Path(settings.model).name,
            "alpha": settings.alpha,
            "requests": settings.requests,
            "length": settings.length,
            "engine": name,
            "tokens_per_second": round(statistics.median(tokens), 2),
            "tokens_per_second_20": round(tokens[len(tokens) // 5], 2),
            "tokens_per_second_80": round(tokens[-1 - len(tokens) // 5], 2),
            "ratio_to_sdpa": round(ratios(times["sdpa"], own).median, 3),
            "ratio_to_generate": round(ratios(times["generate"], own).median, 3) if "generate" in times else "",
            "first_token_s": round(engines[name].first_token, 3),
            "faults_per_step": round(statistics.median(faults[name][1:]) / settings.steps, 1),
            "cache_mib": round(cache_bytes(plain, settings.length) / 2**20, 1),
            "dtype": settings.dtype,
            **made_by("serving", "--out", "--memory"),
        }
        if name == "sparse":
            found = engines[name].manager.certificate()
            counted = sum(int((layer.pairs - layer.dense).sum()) for layer in found.layers)
            row["sketch_mib"] = round(sum(layer.sketch_bytes for layer in found.layers) / 2**20, 1)
            row["read"] = round(found.keys_read / found.keys_total, 5)
            nonzero = sum(int(layer.nonzero.sum()) for layer in found.layers)
            row["nonzero"] = round(nonzero / counted, 5) if counted else ""
        file.add(**row)
        print({key: row.get(key) for key in FIELDS.split()[3:16]})


def cache_bytes(model: Any, length: int) -> int:
    """Bytes of the keys and values of one request."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * length * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize


@torch.no_grad()
def check(settings: Any) -> None:
    """Requests that come and go, a third of them cancelled or sharing a prefix, against `generate` one by one."""
    model, text = load_model(settings), text_of(settings, settings.longest + settings.requests)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, settings.longest + 1, (settings.requests,), generator=generator).tolist()
    # Every third begins where all do, and shares what it has in common with others.
    prompts = [text[(number if number % 3 else 0) :][:length] for number, length in enumerate(lengths)]
    blocks = max(-(-settings.longest // 32) * 6, 16)
    config = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=_CHUNK)
    start = time.perf_counter()
    with model.continuous_batching_context_manager(
        settings_of(settings.new), continuous_batching_config=config
    ) as manager:
        names, results = [], {}
        for number, prompt in enumerate(prompts):
            names.append(manager.add_request(prompt, max_new_tokens=settings.new))
            if number % 10 == 5:
                unwanted = manager.add_request(prompt, max_new_tokens=settings.new, streaming=True)
                manager.cancel_request(unwanted)
        while len(results) < len(names) and manager.is_running():
            out = manager.get_result(timeout=5)
            if out is not None and out.is_finished() and out.request_id in names:
                results[out.request_id] = out
        print(manager.certificate())
    print(
        f"{len(results)} of {len(names)} requests finished in {time.perf_counter() - start:.0f} s, blocks for {blocks * 32} tokens"
    )
    errors = [out.error for out in results.values() if out.error]
    same = 0
    for name, prompt in zip(names, prompts, strict=True):
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings_of(settings.new))[0]
        if alone[len(prompt) :].tolist() == results[name].generated_tokens:
            same += 1
        else:
            print(
                f"{name} ({len(prompt)} tokens): {results[name].generated_tokens} instead of {alone[len(prompt) :].tolist()}"
            )
    print(f"{same} of {len(names)} have the tokens of generate; {len(errors)} errors {errors[:1]}")


def load(settings: Any) -> None:
    """Chat completions from several clients at once, every fourth streamed; two that the cache has no room for."""
    import openai
    from transformers.cli.serve import Serve

    from hf_entmax.generation.serving.server import prepare_server

    prepare_server()
    model = load_model(settings)
    folder = settings.out / "served"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(settings.model).save_pretrained(folder)
    server = Serve(
        force_model=str(folder),
        continuous_batching=True,
        device="cpu",
        host="127.0.0.1",
        port=settings.port,
        cb_block_size=_PAGE,
        cb_num_blocks=settings.blocks,
        cb_max_batch_tokens=_CHUNK,
        log_level="error",
        non_blocking=True,
    )
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{settings.port}/v1", api_key="none", max_retries=1, timeout=settings.seconds
    )
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

    def ask(number: int) -> tuple[str, float, float]:
        too_long = number in (3, 4)  # one is answered at once, one streamed
        said = " ".join(words) * (settings.blocks * _PAGE // 8) if too_long else f"Count to {words[number % 10]}."
        start = time.perf_counter()
        call = {
            "model": str(folder),
            "messages": [{"role": "user", "content": said}],
            "max_tokens": settings.new,
            "temperature": 0,
        }
        try:
            if number % 4:
                client.chat.completions.create(**call)
                first = time.perf_counter() - start
            else:
                pieces = iter(client.chat.completions.create(stream=True, **call))
                next(pieces)
                first = time.perf_counter() - start
                for _ in pieces:
                    pass
        except openai.APIError as error:
            return f"{type(error).__name__}: {str(error)[:400]}", 0.0, time.perf_counter() - start
        return "", first, time.perf_counter() - start

    try:
        ask(1)  # loads the model, compiles kernels
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(settings.clients) as pool:
            found = list(pool.map(ask, range(settings.requests)))
        seconds = time.perf_counter() - start
        healthy = not ask(1)[0]
    finally:
        server.kill_server()
    errors = [error for error, _, _ in found if error]
    times = sorted(whole for error, _, whole in found if not error)
    print(
        f"{settings.requests} requests from {settings.clients} clients: {settings.requests / seconds:.2f} a second, {len(errors)} refused"
    )
    print(f"seconds for {settings.new} tokens: median {statistics.median(times):.2f}, longest {times[-1]:.2f}")
    print("\n".join(sorted(set(errors))))
    print(f"afterwards the server {'answers' if healthy else 'does NOT answer'}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "check", "load"))
    parser.add_argument("model", help="folder of a decoder")
    parser.add_argument("--text", type=Path, help="a text file to read from")
    parser.add_argument("--alpha", default="1.5", help="of all heads, or own: those that the folder was saved with")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048, help="speed: tokens of the prompt")
    parser.add_argument("--longest", type=int, default=2000, help="check: tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=12, help="check, load: tokens to generate")
    parser.add_argument("--trials", type=int, default=5, help="speed: timed turns of each engine")
    parser.add_argument("--steps", type=int, default=4, help="speed: steps of a turn")
    parser.add_argument("--memory", type=float, default=4.0, help="speed: GiB that the cache of generate may take")
    parser.add_argument("--clients", type=int, default=8, help="load: requests at a time")
    parser.add_argument("--blocks", type=int, default=32, help=f"load: blocks of {_PAGE} tokens that the server has")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--seconds", type=float, default=120.0, help="load: until a request is given up")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    settings = parser.parse_args(arguments)
    {"speed": speed, "check": check, "load": load}[settings.what](settings)


if __name__ == "__main__":
    main()
