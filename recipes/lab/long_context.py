"""Decoding with a long cache: entmax that reads a few bits of every key, against softmax that reads all of every key.

    python -m recipes.lab.long_context generate models/smollm2 --text valid.txt --alpha 1.5        # whole model, tokens per second
    python -m recipes.lab.long_context operator models/smollm2 --text valid.txt                    # attention alone, to 64k keys
    python -m recipes.lab.long_context verify models/smollm2 --text valid.txt --prompt 1040 --steps 2000   # tokens and proof

`generate` reads one prompt with each model, repeats it to a batch, cuts it to each length and times single decoding steps of both
models in turn: the softmax model with PyTorch's SDPA and Transformers' own cache, the entmax model with `ExactSparseCache`. Before
that, the entmax model must choose the same tokens with Transformers' own cache. `operator` takes keys and queries of the softmax
model (with `--alpha own` of the entmax model), repeats the keys to longer lengths and takes the layers in turn, as a model does.
Spreads are quartiles of the ratios of single steps. Both say how fast this machine reads memory: what the bytes take at least.
`verify` compares generations with and without the cache, and every step that reads a sketch with dense weights in float64. A folder
that was saved from a patched model keeps its own alphas (`--alpha own`).
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import hf_entmax
from hf_entmax.bench.timing import interleaved_times, ratios
from hf_entmax.generation import ExactSparseCache
from hf_entmax.ops import entmax_attention, exact_sparse_attention, sketch_keys

from .rows import RESULTS, RowFile, made_by
from .texts import load_model, recorded, text_of

ORIGIN = "dtype command hardware versions"
FIELDS = {
    "generate": (
        "model alpha softmax_cache length batch steps tokens_per_second softmax_tokens_per_second ratio ratio_25 ratio_75 "
        "bits read nonzero cache_mib extra_memory key_value_mib_per_step softmax_key_value_mib_per_step weights_mib "
        f"bandwidth_gib_s {ORIGIN}"
    ),
    "operator": (
        "model alpha bits length layers steps read nonzero exact_ms dense_ms softmax_ms grouped_softmax_ms "
        "ratio_to_softmax ratio_to_softmax_25 ratio_to_softmax_75 ratio_to_grouped_softmax ratio_to_grouped_softmax_25 "
        "ratio_to_grouped_softmax_75 ratio_to_dense ratio_to_dense_25 ratio_to_dense_75 extra_memory key_value_mib "
        f"softmax_key_value_mib bandwidth_gib_s {ORIGIN}"
    ),
    "verify": f"model alpha way batch prompt tokens same_tokens layer_steps pairs read nonzero bits violations {ORIGIN}",
}
FILES = {"generate": "long_context", "operator": "long_context_operator", "verify": "long_context_verified"}
# Tokens of a prompt that are read at a time.
_CHUNK = 1024
# How `verify` generates.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4},
    "sampling": {"do_sample": True},
}


def check_length(model: Any, length: int) -> None:
    """Stop before a model is asked for more positions than it knows."""
    if length > (most := getattr(model.config, "max_position_embeddings", length)):
        raise SystemExit(f"The model knows {most} positions, {length} are needed.")


def filled(model: Any, ids: Tensor, cache: Any) -> Any:
    """Return the cache after a prompt."""
    for chunk in ids.split(_CHUNK, 1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
    return cache


def cut(cache: Any, length: int, batch: int) -> Any:
    """Copy a cache of one sequence: its first tokens, so many times."""
    cache = copy.deepcopy(cache)
    cache.crop(length - cache.get_seq_length())
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    return cache


def copied(cache: Any, other: Any) -> Any:
    """Fill another kind of cache with the keys and values of this one."""
    for number, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, number)
    return other


class Greedy:
    """Greedy decoding, step by step."""

    def __init__(self, model: Any, cache: Any, token: int, batch: int) -> None:
        self.model, self.cache = model, cache
        self.token = torch.full((batch, 1), token)

    def step(self) -> None:
        """Decode one token for each sequence."""
        self.token = self.model(self.token, past_key_values=self.cache).logits[:, -1:].argmax(-1)


def bandwidth(mib: int = 512) -> float:
    """Measure GiB per second that all threads together read from memory: the median of sums over so much of it."""
    data = torch.ones(mib * 2**18)
    milliseconds = interleaved_times({"sum": data.sum}, 7, warm=0)["sum"]
    return 1000 * data.nbytes / 2**30 / statistics.median(milliseconds)


def compared(times: list[float], base: list[float], name: str) -> dict[str, str]:
    """Return how many times as long something took: the ratio of the medians, and the quartiles of the ratios step by step."""
    _, low, high, _ = ratios(times, base, 0.25)
    ratio = statistics.median(times) / statistics.median(base)
    return {name: f"{ratio:.3f}", f"{name}_25": f"{low:.3f}", f"{name}_75": f"{high:.3f}"}


def generate(settings: Any, results: RowFile) -> None:
    """Measure tokens per second of the whole model, by length and batch."""
    plain, sparse = load_model(settings, sparse=False), load_model(settings)
    check_length(plain, max(settings.lengths))
    ids = torch.tensor([text_of(settings, max(settings.lengths))])
    own = filled(plain, ids, DynamicCache(config=plain.config))
    exact = filled(sparse, ids, ExactSparseCache(sparse, settings.bits))
    machine = {"weights_mib": f"{weight_bytes(plain) / 2**20:.0f}", "bandwidth_gib_s": f"{bandwidth():.1f}"}
    for length in settings.lengths:
        check_tokens(sparse, exact, int(ids[0, length - 1]), length - 1)
        for batch in settings.batches:
            caches = cut(own, length - 1, batch), cut(exact, length - 1, batch)
            if settings.softmax_cache == "static":
                # It has room for all tokens and is not copied at each step.
                static = StaticCache(config=plain.config, max_cache_len=length + settings.steps + 1)
                caches = copied(caches[0], static), caches[1]
            named = zip(("softmax", "entmax"), (plain, sparse), caches, strict=True)
            steps = {name: Greedy(model, cache, int(ids[0, length - 1]), batch).step for name, model, cache in named}
            times = interleaved_times(steps, settings.steps, warm=2)  # the first make the sketch and choose kernels
            softmax, entmax = (f"{1000 * batch / statistics.median(own):.2f}" for own in times.values())
            results.add(
                length=length, batch=batch, steps=settings.steps, softmax_cache=settings.softmax_cache,
                tokens_per_second=entmax, softmax_tokens_per_second=softmax, **compared(times["softmax"], times["entmax"], "ratio"),
                **reading(caches[1].certificate(), head_bytes(sparse)), **machine, **settings.origin,
            )  # fmt: skip
            show(results, "generate")
            del caches, steps


def check_tokens(model: Any, cache: Any, token: int, length: int, steps: int = 4) -> None:
    """Stop where the tokens are not those of Transformers' own cache."""
    exact = cut(cache, length, 1)
    plain = copied(exact, DynamicCache(config=model.config))
    runs = Greedy(model, exact, token, 1), Greedy(model, plain, token, 1)
    for _ in range(steps):
        for run in runs:
            run.step()
        if int(runs[0].token) != int(runs[1].token):
            raise SystemExit(f"At {length} tokens the model chooses other tokens with ExactSparseCache than without.")


def show(results: RowFile, what: str) -> None:
    print("  ".join(f"{name} {results.rows[-1][name]}" for name in FIELDS[what].split()[1:-4]), flush=True)


def weight_bytes(model: Any) -> int:
    """Count what a step reads of the weights: all but an embedding that is not the output layer too."""
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    unread = 0 if tied else model.get_input_embeddings().weight.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - unread


def head_bytes(model: Any) -> int:
    """Count the bytes of one key of one head."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width * next(model.parameters()).element_size()


def reading(certificate: Any, row_bytes: int) -> dict[str, Any]:
    """Return what was read, as shares and per step; a row that several query heads read in full counts for each of them.

    Args:
        certificate: of the cache.
        row_bytes: of a key, or of a value.
    """
    layers = certificate.layers
    names = ("pairs", "read", "dense", "nonzero")
    pairs, read, dense, nonzero = (sum(int(getattr(layer, name).sum()) for layer in layers) for name in names)
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


def verify(settings: Any, results: RowFile) -> None:
    """Generate with and without the cache, and compare every step that reads a sketch with dense weights in float64."""
    model, batch, steps = load_model(settings), settings.batches[0], settings.steps
    check_length(model, settings.prompt + steps)
    ids = torch.tensor(text_of(settings, batch * settings.prompt)).view(batch, -1)
    exact = ExactSparseCache(model, settings.bits, verify=True)
    found = []
    for cache in (exact, DynamicCache(config=model.config)):
        torch.manual_seed(0)
        options = {"max_new_tokens": steps, "min_new_tokens": steps, **WAYS[settings.way]}
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
        found.append(tokens[:, settings.prompt :])
    certificate = exact.certificate()
    print(certificate)
    other = (found[0] != found[1]).nonzero()
    results.add(
        way=settings.way, batch=batch, prompt=settings.prompt, tokens=batch * steps,
        same_tokens=batch * steps - len(other), violations=certificate.violations,
        layer_steps=sum(layer.steps for layer in certificate.layers), pairs=certificate.keys_total,
        **{name: what for name, what in reading(certificate, 0).items() if name in FIELDS["verify"].split()},
        **settings.origin,
    )  # fmt: skip
    said = f"{batch} x {steps} tokens, {settings.way}, after prompts of {settings.prompt}: "
    if len(other):
        raise SystemExit(f"{said}DIFFERENT from token {int(other[:, 1].min())} on")
    print(f"{said}the same")


def operator(settings: Any, results: RowFile) -> None:
    """Time attention of one query over the real keys of some layers, repeated to each length; means over the layers."""
    if "own" in settings.alphas and settings.alpha != "own":
        raise SystemExit(
            "--alphas own: those that the folder was saved with are kept by --alpha own alone; give that too."
        )
    sparse = load_model(settings)
    model = sparse if settings.alpha == "own" else load_model(settings, sparse=False)
    length = min(settings.prompt, *settings.lengths)
    check_length(model, length)
    ids = torch.tensor([text_of(settings, length)])
    cache = filled(model, ids[:, :-1], DynamicCache(config=model.config))
    with recorded(model) as seen:
        model(ids[:, -1:], past_key_values=cache)
    layers = settings.layers or sorted(seen)
    own = hf_entmax.alphas(sparse)["decoder_self"]
    machine = {"layers": len(layers), "steps": settings.steps, "bandwidth_gib_s": f"{bandwidth():.1f}"}
    for length in settings.lengths:
        given = [tuple(repeated(t, length) for t in seen[layer][1:]) for layer in layers]
        for alpha in settings.alphas:
            alphas = [own[layer] if alpha == "own" else float(alpha) for layer in layers]
            for bits in settings.all_bits:
                calls = zip(layers, given, alphas, strict=True)
                cases = [Call(seen[layer][0], *tensors, alpha, bits) for layer, tensors, alpha in calls]
                row = {"length": length, "bits": bits, **timed(cases, settings.steps), **machine}
                results.add(**row, **{**settings.origin, "alpha": alpha})
                show(results, "operator")


def repeated(tensor: Tensor, length: int) -> Tensor:
    """Repeat keys or values, again and again up to a length."""
    return tensor.repeat(1, 1, -(-length // tensor.shape[2]), 1)[:, :, :length].contiguous()


class Call:
    """One call of four kinds, compared with each other; bytes are those that the exact one and SDPA read."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, alpha: Any, bits: int) -> None:
        sketch = sketch_keys(key, bits)
        softmax = torch.nn.functional.scaled_dot_product_attention
        self.calls: dict[str, Callable[[], Any]] = {
            "exact_ms": lambda: exact_sparse_attention(query, sketch, key, value, alpha),
            "dense_ms": lambda: entmax_attention(query, key, value, alpha),
            "softmax_ms": lambda: softmax(query, key, value, enable_gqa=query.shape[1] != key.shape[1]),
            # A single query needs no mask, so that those of the heads that share keys can be rows of one product.
            "grouped_softmax_ms": lambda: softmax(query.view(*key.shape[:2], -1, query.shape[-1]), key, value),
        }
        (out, counts), (dense, _) = self.calls["exact_ms"](), self.calls["dense_ms"]()
        error = float((out - dense).abs().max() / value.abs().max())
        if not error < 64 * torch.finfo(out.dtype).eps:
            raise SystemExit(f"The output differs from the dense one by {error:.2g} of the largest value.")
        self.total, self.read, self.nonzero = (int(count.sum()) for count in counts)
        self.sketch_bytes, self.cache_bytes = sketch.nbytes, key.nbytes + value.nbytes
        row_bytes = key.shape[-1] * key.element_size()
        self.bytes_read = sketch.nbytes + (self.read + self.nonzero) * row_bytes


def timed(cases: list[Call], repeats: int) -> dict[str, Any]:
    """Measure times per layer and shares: every kind of call goes through all layers, so that none finds its keys in a cache."""
    layers = {name: lambda name=name: [case.calls[name]() for case in cases] for name in cases[0].calls}
    taken = interleaved_times(layers, repeats)

    def total(name: str) -> int:
        return sum(getattr(case, name) for case in cases)

    figures = {name: statistics.median(own) / len(cases) for name, own in taken.items()}
    figures |= {name: total(name) / total("total") for name in ("read", "nonzero")}
    figures["extra_memory"] = total("sketch_bytes") / total("cache_bytes")
    for name, bytes_ in (("key_value_mib", "bytes_read"), ("softmax_key_value_mib", "cache_bytes")):
        figures[name] = total(bytes_) / len(cases) / 2**20
    row = {name: f"{figure:.4g}" for name, figure in figures.items()}
    for name in ("softmax", "grouped_softmax", "dense"):
        row |= compared(taken["exact_ms"], taken[f"{name}_ms"], f"ratio_to_{name}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generate", "operator", "verify"))
    parser.add_argument("model", help="folder of a causal language model")
    parser.add_argument("--text", required=True, help="running text, one paragraph a line (.gz or not)")
    parser.add_argument("--alpha", default="1.5", help="of every head, or 'own': those that the folder was saved with")
    parser.add_argument("--bits", default="auto", type=lambda word: word if word == "auto" else int(word))
    parser.add_argument("--way", choices=WAYS, default="greedy", help="of generating (verify): 4 beams, one seed")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; default 1024 to 8192, or 4096 to 65536 keys")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences; the first for verify")
    parser.add_argument("--softmax_cache", default="dynamic", choices=("dynamic", "static"), help="of Transformers")
    parser.add_argument("--steps", type=int, default=8, help="that are timed, or tokens that are verified")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens read before (verify, operator)")
    parser.add_argument("--layers", type=int, nargs="+", help="whose keys are used (operator); default all")
    parser.add_argument("--alphas", nargs="+", default=["1.25", "1.5", "2"], help="a number or 'own' (operator)")
    parser.add_argument("--all_bits", type=int, nargs="+", default=[4], help="of the sketches (operator)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--results", type=Path, help="CSV file that grows by the rows")
    settings = parser.parse_args()
    powers = range(12, 17) if settings.what == "operator" else range(10, 14)
    settings.lengths = settings.lengths or [2**power for power in powers]
    settings.origin = {"model": "/".join(Path(settings.model).parts[-2:]), "alpha": settings.alpha}
    settings.origin |= {"dtype": settings.dtype, **made_by("long_context", "--results")}
    settings.dtype = getattr(torch, settings.dtype)
    what = {"generate": generate, "operator": operator, "verify": verify}[settings.what]
    path = settings.results or RESULTS / f"{FILES[settings.what]}.csv"
    with torch.no_grad():
        what(settings, RowFile(path, FIELDS[settings.what]))


if __name__ == "__main__":
    main()
