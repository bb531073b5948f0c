"""Continuous batching of a patched model: its speed, the same tokens as `generate`, and a server under load.

    python -m recipes.lab.serving speed models/smollm2 --text valid.txt --alpha 1.5 --requests 8 --length 8192
    python -m recipes.lab.serving prefill models/smollm2 --text valid.txt --alpha 1.5 --length 8192
    python -m recipes.lab.serving check models/smollm2 --text valid.txt --alpha 1.5 --requests 200
    python -m recipes.lab.serving load models/smollm2 --alpha 1.5 --requests 32

`speed` times decoding steps in turn: SDPA, this package reading every key, and reading sketches, all in the engine of Transformers;
and `generate` of a batch with `ExactSparseCache`, which holds the keys of each row and is left out where they exceed --memory.
`prefill` times the first token of one prompt. Page faults are those of the whole process. How caches are filled is told in
`serving_speed`. `check` compares the tokens of requests of 5 to --longest tokens, some cancelled on the way, with those of
`generate` one by one. `load` starts the server of Transformers on 127.0.0.1, sends it a bounded number of requests with the
`openai` client, and two that it has no room for. A folder that was saved from a patched model keeps its own alphas (--alpha own).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, ContinuousBatchingConfig

from .rows import RESULTS
from .serving_speed import BLOCK, CHUNK, prefill, settings_of, speed
from .texts import load_model, text_of


@torch.no_grad()
def check(settings: Any) -> None:
    """Requests that come and go, a third of them cancelled or sharing a prefix, against `generate` one by one."""
    model, text = load_model(settings), text_of(settings, settings.longest + settings.requests)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, settings.longest + 1, (settings.requests,), generator=generator).tolist()
    # Every third begins where all do, and shares what it has in common with others.
    prompts = [text[(number if number % 3 else 0) :][:length] for number, length in enumerate(lengths)]
    blocks = max(-(-settings.longest // 32) * 6, 16)
    config = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=CHUNK)
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
        cb_block_size=BLOCK,
        cb_num_blocks=settings.blocks,
        cb_max_batch_tokens=CHUNK,
        log_level="error",
        non_blocking=True,
    )
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{settings.port}/v1", api_key="none", max_retries=1, timeout=settings.seconds
    )
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

    def ask(number: int) -> tuple[str, float, float]:
        too_long = number in (3, 4)  # one is answered at once, one streamed
        said = " ".join(words) * (settings.blocks * BLOCK // 8) if too_long else f"Count to {words[number % 10]}."
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
    parser.add_argument("what", choices=("speed", "prefill", "check", "load"))
    parser.add_argument("model", help="folder of a decoder")
    parser.add_argument("--text", type=Path, help="a text file to read from")
    parser.add_argument("--alpha", default="1.5", help="of all heads, or own: those that the folder was saved with")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048, help="speed, prefill: tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="speed: different prompts; 1 is shared by all requests")
    parser.add_argument("--longest", type=int, default=2000, help="check: tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=12, help="check, load: tokens to generate")
    parser.add_argument("--trials", type=int, default=5, help="speed: timed steps of each engine, in turn")
    parser.add_argument("--memory", type=float, default=4.0, help="speed: GiB that the cache of generate may take")
    parser.add_argument("--clients", type=int, default=8, help="load: requests at a time")
    parser.add_argument("--blocks", type=int, default=32, help=f"load: blocks of {BLOCK} tokens that the server has")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--seconds", type=float, default=120.0, help="load: until a request is given up")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    settings = parser.parse_args(arguments)
    {"speed": speed, "prefill": prefill, "check": check, "load": load}[settings.what](settings)


if __name__ == "__main__":
    main()
