"""Decoding with long caches: the tables and the figure."""

from __future__ import annotations

from matplotlib.figure import Figure

from .rows import Row, Rows, grouped, numbers, pick, table


def _alpha(row: Row) -> str:
    return "learned" if row["alpha"] == "own" else row["alpha"]


def _percent(row: Row, *names: str) -> list[str]:
    return [f"{100 * float(row[name]):.2f}" for name in names]


def _ratio(row: Row, name: str, digits: int = 2) -> str:
    """A ratio and its quartiles."""
    middle, low, high = (f"{float(row[name + end]):.{digits}f}" for end in ("", "_25", "_75"))
    return f"{middle} ({low} to {high})"


def models(rows: Rows, **wanted: object) -> str:
    """Whole models."""
    head = [
        "alpha",
        "batch",
        "tokens",
        "bits",
        "keys read, %",
        "nonzero, %",
        "K and V read, MiB a step",
        "softmax reads",
    ]
    head += ["extra memory, %", "tokens/s", "softmax, tokens/s", "its cache", "ratio (quartiles)"]
    lines = []
    for row in rows("long_context", **wanted):
        bytes_ = [f"{float(row[name]):.0f}" for name in ("key_value_mib_per_step", "softmax_key_value_mib_per_step")]
        shares = _percent(row, "read", "nonzero")
        line = [_alpha(row), row["batch"], row["length"], row["bits"], *shares, *bytes_, *_percent(row, "extra_memory")]
        speeds = [row[name] for name in ("tokens_per_second", "softmax_tokens_per_second", "softmax_cache")]
        lines.append([*line, *speeds, _ratio(row, "ratio")])
    return table(head, lines)


def operator(rows: Rows) -> str:
    """Attention alone over repeated keys."""
    head = ["alpha", "dtype", "layers", "keys", "bits", "keys read, %", "nonzero, %", "extra memory, %", "ms a layer"]
    head += ["of dense entmax (quartiles)", "of SDPA (quartiles)", "of SDPA on groups (quartiles)"]
    lines = [
        [
            _alpha(row),
            *(row[name] for name in ("dtype", "layers", "length", "bits")),
            *_percent(row, "read", "nonzero", "extra_memory"),
            row["exact_ms"],
            *(_ratio(row, name, 3) for name in ("ratio_to_dense", "ratio_to_softmax", "ratio_to_grouped_softmax")),
        ]
        for row in rows("long_context_operator")
    ]
    return table(head, lines)


def limits(rows: Rows) -> str:
    """What was read at 8,192 tokens by whole models and at 32,768 keys by the operator, beside the speed of memory."""
    head = [
        "what",
        "alpha",
        "MiB",
        "ms at the speed of memory",
        "ms",
        "softmax: MiB",
        "ms at the speed of memory",
        "ms",
    ]
    head += ["its time over ours, if memory were all", "as measured"]
    cases = []
    for row in rows("long_context", length=8192):
        weights = float(row["weights_mib"])
        mib = [weights + float(row[f"{name}key_value_mib_per_step"]) for name in ("", "softmax_")]
        ms = [1000 * int(row["batch"]) / float(row[f"{name}tokens_per_second"]) for name in ("", "softmax_")]
        cases.append((row, f"model, batch {row['batch']}, {row['softmax_cache']} cache", mib, ms))
    for (_, dtype), (row, *_) in grouped(rows("long_context_operator", length=32768, bits=4), "alpha", "dtype").items():
        mib = [float(row[f"{name}key_value_mib"]) for name in ("", "softmax_")]
        cases.append((row, f"attention, {dtype}", mib, [float(row[f"{name}_ms"]) for name in ("exact", "softmax")]))
    lines = []
    for row, what, mib, ms in cases:
        least = [1000 * amount / 1024 / float(row["bandwidth_gib_s"]) for amount in mib]
        sides = [
            f"{number:.3g}" if number < 1000 else f"{number:.0f}"
            for side in zip(mib, least, ms, strict=True)
            for number in side
        ]
        lines.append([what, _alpha(row), *sides, f"{least[1] / least[0]:.1f}", f"{ms[1] / ms[0]:.1f}"])
    return table(head, lines)


def memory_speed(rows: Rows) -> str:
    """The lowest and highest that was measured."""
    found = [
        float(row["bandwidth_gib_s"]) for group in ("long_context", "long_context_operator") for row in rows(group)
    ]
    return f"{min(found):.0f} to {max(found):.0f}"


def verified(rows: Rows) -> str:
    """Generations with and without the cache, and steps compared with dense weights."""
    head = ["alpha", "generating", "batch", "prompt", "tokens", "the same without the cache"]
    head += ["steps of a layer compared", "pairs of a query and a key", "proved zero, %", "of these with weight"]
    lines = [
        [
            _alpha(row),
            *(row[name] for name in ("way", "batch", "prompt", "tokens", "same_tokens")),
            *(f"{int(row[name]):,}" for name in ("layer_steps", "pairs")),
            f"{100 * (1 - float(row['read'])):.2f}",
            row["violations"],
        ]
        for row in rows("long_context_verified")
    ]
    return table(head, lines)


def figure(rows: Rows) -> Figure | None:
    """Tokens per second against the length of the cache; keys read in full and keys of weight against alpha."""
    found, single = rows("long_context", softmax_cache="dynamic"), rows("long_context_operator", dtype="float32")
    if not found:
        return None
    drawn = Figure(figsize=(10, 3.6), layout="constrained")
    speed, shares = drawn.subplots(1, 2)
    for (_, batch), own in grouped(found, "alpha", "batch").items():
        lengths = numbers(own, "length")
        label = f"alpha {_alpha(own[0])}, batch {batch}"
        (line,) = speed.plot(lengths, numbers(own, "tokens_per_second"), marker=".", label=label)
        speed.plot(lengths, numbers(own, "softmax_tokens_per_second"), linestyle=":", color=line.get_color())
    speed.set(xlabel="tokens in the cache (dotted: softmax)", ylabel="tokens per second", xscale="log", yscale="log")
    speed.legend(fontsize="small")
    by_length = grouped([row for row in single if row["alpha"] != "own"], "length")
    fixed = sorted(max(by_length.values(), key=len, default=[]), key=lambda row: float(row["alpha"]))
    for (bits,), own in grouped(fixed, "bits").items():
        shares.plot(numbers(own, "alpha"), numbers(own, "read", 100), marker=".", label=f"read, {bits} bits")
    if fixed:
        own = pick(fixed, bits=fixed[0]["bits"])
        shares.plot(numbers(own, "alpha"), numbers(own, "nonzero", 100), color="black", label="nonzero weight")
        shares.set(xlabel="alpha", ylabel="keys, %", yscale="log", title=f"{fixed[0]['length']} keys")
        shares.legend(fontsize="small")
    return drawn
