"""Decoding with long caches: the tables and the figure."""

from __future__ import annotations

from matplotlib.figure import Figure

from ..rows import Row, Rows, grouped, numbers, pick, row_table, table


def _alpha(row: Row) -> str:
    return "learned" if row["alpha"] == "own" else row["alpha"]


def _ratio(row: Row, name: str, digits: int = 2) -> str:
    middle, low, high = (f"{float(row[name + end]):.{digits}f}" for end in ("", "_25", "_75"))
    return f"{middle} ({low} to {high})"


def models(rows: Rows, **wanted: object) -> str:
    return row_table(rows("long_context", **wanted), {
        "alpha": _alpha, "batch": "batch", "tokens": "length", "bits": "bits",
        "keys read, %": ("read", 2, 100), "nonzero, %": ("nonzero", 2, 100),
        "K and V read, MiB a step": ("key_value_mib_per_step", 0), "softmax reads": ("softmax_key_value_mib_per_step", 0),
        "extra memory, %": ("extra_memory", 2, 100), "tokens/s": "tokens_per_second",
        "softmax, tokens/s": "softmax_tokens_per_second", "its cache": "softmax_cache",
        "ratio (quartiles)": lambda row: _ratio(row, "ratio"),
    })  # fmt: skip


def operator(rows: Rows) -> str:
    """Attention alone over repeated keys."""
    return row_table(rows("long_context_operator"), {
        "alpha": _alpha, "dtype": "dtype", "layers": "layers", "keys": "length", "bits": "bits",
        "keys read, %": ("read", 2, 100), "nonzero, %": ("nonzero", 2, 100), "extra memory, %": ("extra_memory", 2, 100),
        "ms a layer": "exact_ms",
        "of dense entmax (quartiles)": lambda row: _ratio(row, "ratio_to_dense", 3),
        "of SDPA (quartiles)": lambda row: _ratio(row, "ratio_to_softmax", 3),
        "of SDPA on groups (quartiles)": lambda row: _ratio(row, "ratio_to_grouped_softmax", 3),
    })  # fmt: skip


def limits(rows: Rows) -> str:
    """What was read at 8,192 tokens by whole models and at 32,768 keys by the operator, beside the speed of memory."""
    times = ["ms at the speed of memory", "ms"]
    head = ["what", "alpha", "MiB", *times, "softmax: MiB", *times]
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
        sides = [n for side in zip(mib, least, ms, strict=True) for n in side]
        sides = [f"{n:.3g}" if n < 1000 else f"{n:.0f}" for n in sides]
        lines.append([what, _alpha(row), *sides, f"{least[1] / least[0]:.1f}", f"{ms[1] / ms[0]:.1f}"])
    return table(head, lines)


def memory_speed(rows: Rows) -> str:
    """The lowest and highest that was measured."""
    found = numbers([*rows("long_context"), *rows("long_context_operator")], "bandwidth_gib_s")
    return f"{min(found):.0f} to {max(found):.0f}"


def verified(rows: Rows) -> str:
    """Generations with and without the cache, and steps compared with dense weights."""
    return row_table(rows("long_context_verified"), {
        "alpha": _alpha, "generating": "way", "batch": "batch", "prompt": "prompt", "tokens": "tokens",
        "the same without the cache": "same_tokens", "steps of a layer compared": lambda row: f"{int(row['layer_steps']):,}",
        "pairs of a query and a key": lambda row: f"{int(row['pairs']):,}",
        "proved zero, %": lambda row: f"{100 * (1 - float(row['read'])):.2f}", "of these with weight": "violations",
    })  # fmt: skip


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
