"""A recording, its words, and the frames that cross-attention looked at for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_entmax.analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style.house_style()
def word_times(
    words: Sequence[Any], audio: Any, sampling_rate: int, *, truth: Sequence[tuple[str, float, float]] = ()
) -> Figure:
    """Draw a waveform with its words, and below it a row for each word with the frames that it was heard in.

    Args:
        words: what `hf_entmax.generation.word_times` returns, in their order.
        audio: the samples of the recording, ``[N]``.
        sampling_rate: of it, Hz.
        truth: words with their start and end in seconds, where they are known; they are drawn as brackets.

    Returns:
        A Figure. Each row is dark where its word's heads looked, white where their weight is exactly zero; the box is the word
        from start to end.

    Raises:
        ValueError: if there are no words or no samples.
    """
    samples = torch.as_tensor(audio).flatten().float()
    if not words or not len(samples):
        raise ValueError(f"{len(words)} words and {len(samples)} samples: there is nothing to draw.")
    length = len(samples) / sampling_rate
    size = {"width": max(6.0, 0.9 * length), "height": 0.8 + 0.095 * len(words)}
    ratios = {"height_ratios": [1.3, 0.19 * len(words)]}
    figure, ((wave,), (grid,)) = style.new_figure(1, 2, **size, sharex=True, gridspec_kw=ratios)
    step = max(1, len(samples) // 4000)
    whole = samples[: len(samples) // step * step].view(-1, step)
    times = torch.arange(len(whole)) * step / sampling_rate
    wave.fill_between(times.tolist(), whole.amin(1).tolist(), whole.amax(1).tolist(), color="#8a9199", linewidth=0)
    wave.set(yticks=[], xlim=(0, length))
    wave.grid(visible=False)
    high = float(samples.abs().max()) or 1.0
    for place, word in enumerate(words):
        colour = style.PALETTE[place % 2]
        wave.axvspan(word.start, word.end, color=colour, alpha=0.12, linewidth=0)
        middle = (word.start + word.end) / 2
        wave.text(
            middle, 1.08 * high, style.plain(word.word), rotation=60, ha="left", va="bottom", fontsize=7, color=colour
        )
        shades = (word.weights / word.weights.max()).sqrt()
        for at in word.weights.nonzero().flatten().tolist():
            look = {"color": colour, "alpha": 0.15 + 0.85 * float(shades[at])}
            grid.barh(place, word.frame, left=at * word.frame, height=0.8, linewidth=0, **look)
        grid.barh(
            place, word.end - word.start, left=word.start, height=0.9, fill=False, edgecolor=style.INK, linewidth=0.7
        )
    for _, start, end in truth:
        wave.plot([start, start, end, end], [-0.9 * high, -high, -high, -0.9 * high], color=style.INK, linewidth=0.8)
    grid.set(yticks=range(len(words)), yticklabels=[style.plain(word.word) for word in words], xlabel="time (s)")
    grid.tick_params(axis="y", labelsize=7)
    grid.set_ylim(len(words) - 0.4, -0.6)
    return figure
