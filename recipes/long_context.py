"""Decoding with a long cache: entmax that reads a few bits of every key, against softmax that reads all of every key.

    python recipes/long_context.py generate models/smollm2 --text valid.txt --alpha 1.5        # whole model, tokens per second
    python recipes/long_context.py operator models/smollm2 --text valid.txt                    # attention alone, to 64k keys
    python recipes/long_context.py verify models/smollm2 --text valid.txt --steps 2000         # token by token, and the proof

`generate` reads one prompt with each model, repeats it to a batch, cuts it to each length and times single decoding steps of both
models in turn: the softmax model with PyTorch's SDPA and Transformers' own cache, the entmax model with `ExactSparseCache`. Before
that, the entmax model must choose the same tokens with Transformers' own cache. `operator` takes keys and queries of the softmax
model and repeats the keys to longer lengths. `verify` compares generations with and without the cache, and every decoding step with
dense weights in float64. A folder that was saved from a patched model keeps its own alphas (`--alpha own`).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import hf_entmax
from common.blocks import encode
from common.pretrained import check_length
from common.results import Results, columns, command, hardware, versions
from hf_entmax.analysis.reading.tables import read_text
from hf_entmax.generation import ExactSparseCache
from hf_entmax.ops import entmax_attention, exact_sparse_attention, sketch_keys

FOLDER = Path(__file__).parent / "results"
ORIGIN = "dtype command hardware versions"
FIELDS = {
    "generate": columns(
        "model alpha softmax_cache length batch steps tokens_per_second softmax_tokens_per_second ratio bits read nonzero",
        "cache_mib extra_memory key_value_mib_per_step softmax_key_value_mib_per_step",
        ORIGIN,
    ),
    "operator": columns(
        "model alpha bits length batch read nonzero exact_ms dense_ms softmax_ms ratio_to_softmax ratio_to_dense",
        "extra_memory",
        ORIGIN,
    ),
}
# Tokens of a prompt that are read at a time.
_CHUNK = 1024
# How `verify` generates.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4},
    "sampling": {"do_sample": True},
}


def load(settings: Any) -> tuple[Any, Any, Any]:
    """The softmax model, the entmax model and the tokenizer."""
    plain, sparse = (
        AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype).eval() for _ in range(2)
    )
    if hf_entmax.is_patched(plain):
        hf_entmax.unpatch_model(plain)
    if settings.alpha != "own":
        hf_entmax.patch_model(sparse, alpha=float(settings.alpha))
    elif not hf_entmax.is_patched(sparse):
        raise SystemExit(f"--alpha own: {settings.model} was not saved from a patched model.")
    plain.set_attn_implementation("sdpa")
    return plain, sparse, AutoTokenizer.from_pretrained(settings.model)


def prompt(settings: Any, model: Any, tokenizer: Any, length: int) -> Tensor:
    """The first tokens of the text, ``[1, length]``."""
    if model is not None:
        check_length(model, length, "length")
    ids, _ = encode(read_text(settings.text), tokenizer, length)
    if len(ids) < length:
        raise SystemExit(f"{settings.text} has {len(ids)} tokens, {length} are needed.")
    return torch.tensor(ids)[None]


def filled(settings: Any, model: Any, ids: Tensor, cache: Any, name: str) -> Any:
    """The cache after a prompt; kept in a folder between calls, since reading a long prompt takes a minute."""
    question = str(Path(settings.model).resolve()), settings.bits, ids.tolist()
    digest = hashlib.sha256(repr(question).encode()).hexdigest()[:12]
    kept = settings.keep and settings.keep / f"{Path(settings.model).name}-{name}-{settings.dtype}-{digest}.pt"
    if kept and kept.exists():
        return torch.load(kept, weights_only=False)
    for chunk in ids.split(_CHUNK, 1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(cache, kept)
    return cache


def cut(cache: Any, length: int, batch: int) -> Any:
    """A copy of a cache of one sequence: its first tokens, so many times."""
    cache = copy.deepcopy(cache)
    cache.crop(length - cache.get_seq_length())
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    return cache


def without_growth(cache: Any, model: Any, length: int) -> Any:
    """The same in Transformers' static cache, which has room for all tokens and is not copied at each step."""
    static = StaticCache(config=model.config, max_cache_len=length)
    for number, layer in enumerate(cache.layers):
        static.update(layer.keys, layer.values, number)
        layer.reset()
    return static


class Greedy:
    """Greedy decoding, step by step."""

    def __init__(self, model: Any, cache: Any, token: int, batch: int) -> None:
        self.model, self.cache = model, cache
        self.token = torch.full((batch, 1), token)

    def step(self) -> float:
        """One token for each sequence; the seconds it took."""
        began = time.perf_counter()
        self.token = self.model(self.token, past_key_values=self.cache).logits[:, -1:].argmax(-1)
        return time.perf_counter() - began


def generate(settings: Any, results: Results) -> None:
    """Tokens per second of the whole model, by length and batch."""
    plain, sparse, tokenizer = load(settings)
    ids = prompt(settings, plain, tokenizer, max(settings.lengths))
    own = filled(settings, plain, ids, DynamicCache(config=plain.config), "softmax")
    exact = filled(settings, sparse, ids, ExactSparseCache(sparse, settings.bits), f"entmax-{settings.alpha}")
    for length in settings.lengths:
        check_tokens(sparse, exact, int(ids[0, length - 1]), length - 1)
        for batch in settings.batches:
            caches = cut(own, length - 1, batch), cut(exact, length - 1, batch)
            if settings.softmax_cache == "static":
                caches = without_growth(caches[0], plain, length + settings.steps + 1), caches[1]
            runs = [
                Greedy(model, cache, int(ids[0, length - 1]), batch)
                for model, cache in zip((plain, sparse), caches, strict=True)
            ]
            seconds: tuple[list[float], list[float]] = ([], [])
            for step in range(settings.steps + 2):
                for own_seconds, run in zip(seconds, runs, strict=True):
                    taken = run.step()
                    if step >= 2:  # the first make the sketch and choose kernels
                        own_seconds.append(taken)
            softmax, entmax = (statistics.median(taken) for taken in seconds)
            results.add(
                length=length,
                batch=batch,
                steps=settings.steps,
                softmax_cache=settings.softmax_cache,
                tokens_per_second=f"{batch / entmax:.2f}",
                softmax_tokens_per_second=f"{batch / softmax:.2f}",
                ratio=f"{softmax / entmax:.2f}",
                **reading(caches[1].certificate(), head_bytes(sparse)),
                **settings.origin,
            )
            print("  ".join(f"{name} {results.rows[-1][name]}" for name in FIELDS["generate"][1:16]), flush=True)
            del caches, runs


def check_tokens(model: Any, cache: Any, token: int, length: int, steps: int = 4) -> None:
    """Stop where the tokens are not those of Transformers' own cache."""
    exact, plain = cut(cache, length, 1), DynamicCache(config=model.config)
    for number, layer in enumerate(exact.layers):
        plain.update(layer.keys, layer.values, number)
    runs = Greedy(model, exact, token, 1), Greedy(model, plain, token, 1)
    for _ in range(steps):
        for run in runs:
            run.step()
        if int(runs[0].token) != int(runs[1].token):
            raise SystemExit(f"At {length} tokens the model chooses other tokens with ExactSparseCache than without.")


def head_bytes(model: Any) -> int:
    """Of one key of one head."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width * next(model.parameters()).element_size()


def reading(certificate: Any, row_bytes: int) -> dict[str, Any]:
    """What was read, as shares and per step; a row that several query heads read in full counts for each of them.

    Args:
        certificate: of the cache.
        row_bytes: of a key, or of a value.
    """
    layers = certificate.layers
    pairs, read, dense, nonzero = (
        sum(int(getattr(layer, name).sum()) for layer in layers) for name in ("pairs", "read", "dense", "nonzero")
    )
    support = nonzero / max(1, pairs - dense)
    cache, sketch = (sum(getattr(layer, name) for layer in layers) for name in ("cache_bytes", "sketch_bytes"))
    steps = max(layer.steps + sum(layer.dense_steps.values()) for layer in layers)
    return {
        "bits": "/".join(str(bits) for bits in sorted({bits or 0 for layer in layers for bits in layer.head_bits})),
        "read": f"{read / pairs:.5f}",
        "nonzero": f"{support:.5f}",
        "cache_mib": f"{cache / 2**20:.1f}",
        "extra_memory": f"{sketch / cache:.4f}",
        "key_value_mib_per_step": f"{(sketch + (read + support * pairs) / steps * row_bytes) / 2**20:.1f}",
        "softmax_key_value_mib_per_step": f"{cache / 2**20:.1f}",
    }


def verify(settings: Any, results: Any) -> None:
    """Generate with and without the cache, and compare every step with dense weights."""
    _, model, tokenizer = load(settings)
    batch = settings.batches[0]
    check_length(model, settings.prompt + settings.steps, "prompt + steps")
    ids = prompt(settings, None, tokenizer, batch * settings.prompt).view(batch, -1)
    found = {}
    for name, cache in (
        ("with the cache", ExactSparseCache(model, settings.bits, verify=not settings.tokens_only)),
        ("without", DynamicCache(config=model.config)),
    ):
        began = time.perf_counter()
        torch.manual_seed(0)
        found[name] = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=settings.steps,
            min_new_tokens=settings.steps,
            **WAYS[settings.way],
        )
        print(f"{name}: {batch} x {settings.steps} tokens in {time.perf_counter() - began:.0f} s", flush=True)
        if isinstance(cache, ExactSparseCache):
            print(cache.certificate())
    other = (found["with the cache"] != found["without"]).nonzero()
    said = f"{batch} x {settings.steps} tokens, {settings.way}, after prompts of {settings.prompt}: "
    if len(other):
        raise SystemExit(f"{said}DIFFERENT from token {int(other[:, 1].min()) - settings.prompt} on")
    print(f"{said}the same")


class Recorder:
    """SDPA that keeps the queries and keys of some layers."""

    def __init__(self, model: Any, layers: list[int]) -> None:
        self.layers, self.seen = set(layers), {layer: [] for layer in layers}  # type: dict[int, list[Any]]
        AttentionInterface.register("long_context_recorder", self)
        AttentionMaskInterface.register("long_context_recorder", sdpa_mask)
        model.set_attn_implementation("long_context_recorder")

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As any attention function of Transformers."""
        if module.layer_idx in self.layers:
            self.seen[module.layer_idx].append((query, key, value))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


def milliseconds(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Medians, the calls in turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if repeat:
                taken[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in taken.items()}


def operator(settings: Any, results: Results) -> None:
    """Attention of one query over the real keys of some layers, repeated to each length; means over the layers."""
    if "own" in settings.alphas and settings.alpha != "own":
        raise SystemExit(
            "--alphas own: those that the folder was saved with are kept by --alpha own alone; give that too."
        )
    plain, sparse, tokenizer = load(settings)
    ids = prompt(settings, plain, tokenizer, min(settings.prompt, min(settings.lengths)))
    cache = filled(settings, plain, ids[:, :-1], DynamicCache(config=plain.config), "softmax")
    recorder = Recorder(plain, settings.layers)
    plain(ids[:, -1:], past_key_values=cache)
    own = hf_entmax.alphas(sparse)["decoder_self"]
    for length in settings.lengths:
        for alpha in settings.alphas:
            for bits in settings.all_bits:
                rows = []
                for layer, seen in recorder.seen.items():
                    query, key, value = seen[0]
                    copies = -(-length // key.shape[2])
                    key, value = (t.repeat(1, 1, copies, 1)[:, :, :length].contiguous() for t in (key, value))
                    rows.append(
                        one_case(settings, query, key, value, own[layer] if alpha == "own" else float(alpha), bits)
                    )
                means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
                results.add(
                    length=length,
                    batch=1,
                    bits=bits,
                    **{name: f"{value:.4g}" for name, value in means.items()},
                    ratio_to_softmax=f"{means['exact_ms'] / means['softmax_ms']:.3f}",
                    ratio_to_dense=f"{means['exact_ms'] / means['dense_ms']:.3f}",
                    **{**settings.origin, "alpha": alpha},
                )
                print("  ".join(f"{name} {results.rows[-1][name]}" for name in FIELDS["operator"][1:13]), flush=True)


def one_case(settings: Any, query: Tensor, key: Tensor, value: Tensor, alpha: Any, bits: int) -> dict[str, float]:
    """Times and shares of one call, after it was compared with the dense one."""
    sketch = sketch_keys(key, bits)
    out, counts = exact_sparse_attention(query, sketch, key, value, alpha)
    dense, _ = entmax_attention(query, key, value, alpha)
    error = float((out - dense).abs().max() / value.abs().max())
    if not error < 64 * torch.finfo(out.dtype).eps:
        raise SystemExit(f"The output differs from the dense one by {error:.2g} of the largest value.")
    softmax = torch.nn.functional.scaled_dot_product_attention
    taken = milliseconds(
        {
            "exact_ms": lambda: exact_sparse_attention(query, sketch, key, value, alpha),
            "dense_ms": lambda: entmax_attention(query, key, value, alpha),
            "softmax_ms": lambda: softmax(query, key, value, enable_gqa=query.shape[1] != key.shape[1]),
        },
        settings.steps,
    )
    total = int(counts.total.sum())
    shares = {"read": int(counts.read.sum()) / total, "nonzero": int(counts.nonzero.sum()) / total}
    return {**taken, **shares, "extra_memory": sketch.nbytes / (key.nbytes + value.nbytes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generate", "operator", "verify"))
    parser.add_argument("model", help="folder of a causal language model")
    parser.add_argument("--text", required=True, help="running text, one paragraph a line (.gz or not)")
    parser.add_argument("--alpha", default="1.5", help="of every head, or 'own': those that the folder was saved with")
    parser.add_argument("--bits", default="auto", type=lambda word: word if word == "auto" else int(word))
    parser.add_argument(
        "--way", choices=WAYS, default="greedy", help="of generating (verify); with 4 beams, or one seed"
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; default 1024 to 8192, or 4096 to 65536 keys")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences; the first for verify")
    parser.add_argument("--softmax_cache", default="dynamic", choices=("dynamic", "static"), help="of Transformers")
    parser.add_argument("--steps", type=int, default=8, help="that are timed, or tokens that are verified")
    parser.add_argument("--tokens_only", action="store_true", help="compare tokens, not each step (verify)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens read before (verify, operator)")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 10, 20], help="whose keys are used (operator)")
    parser.add_argument("--alphas", nargs="+", default=["1.25", "1.5", "2"], help="a number or 'own' (operator)")
    parser.add_argument("--all_bits", type=int, nargs="+", default=[4], help="of the sketches (operator)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--keep", type=Path, help="folder for filled caches, used again where they are there")
    parser.add_argument("--results", type=Path, help="CSV file that grows by the rows")
    settings = parser.parse_args()
    many = settings.what == "operator"
    settings.lengths = settings.lengths or [2**power for power in (range(12, 17) if many else range(10, 14))]
    settings.origin = {
        "model": Path(settings.model).name,
        "alpha": settings.alpha,
        "dtype": settings.dtype,
        "command": command(without=("--keep", "--results")),
        "hardware": hardware(),
        "versions": versions(),
    }
    settings.dtype = getattr(torch, settings.dtype)
    what = {"generate": generate, "operator": operator, "verify": verify}[settings.what]
    path = settings.results or FOLDER / f"long_context{'_operator' if many else ''}.csv"
    with torch.no_grad():
        what(settings, Results(path, FIELDS[settings.what]) if settings.what in FIELDS else None)


if __name__ == "__main__":
    main()
