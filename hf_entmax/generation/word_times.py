"""When was each word said? From the frames that sparse cross-attention looked at: all others had a weight of exactly zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_entmax.batches.prepare import frame_seconds
from hf_entmax.integration.attach import heads_of
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.observe import AttentionCall, observe_attention

#: Frames before and after the monotone path of a head that still count as on it.
_WIDTH = 2
#: A head is chosen if its share on a path is at least this much of the best head's ...
_LEAST = 0.6
#: ... and the middle of what it looks at is, in the median over the tokens, so many seconds from that of those heads at most.
_FARTHEST = 0.12
#: A head is narrow if what it looks at for three of four tokens lies within so many seconds.
_REACH = 1.0
#: What nobody wrote ("um") is looked at before the word, and little, with a pause between: a word's own stretch has no more than so
#: many frames in a row ...
_PAUSE = 3
#: ... with less than this share of its largest weight ...
_QUIET = 0.2
#: ... and the word begins where this share of the weight from there on has been looked at. All three were chosen on words that
#: festival said, with fillers and without, for the smallest mean error of the starts.
_ONSET = 0.1


@dataclass(frozen=True)
class WordTime:
    """A word and when it was said.

    Attributes:
        word: as the model wrote it, with its punctuation.
        start: seconds.
        end: seconds.
        interval: first and last second that any of the ``narrow`` heads looked at while the word was written: outside it their
            weights are exactly zero.
        frame: seconds of a frame.
        weights: float32 ``[frames]``, mean over ``heads``, sum over the tokens of the word; zero where none looked.
        heads: those that the times come from, as (layer, head).
        narrow: those of them that never look far for most tokens; all of them where none is so.
    """

    word: str
    start: float
    end: float
    interval: tuple[float, float]
    frame: float
    weights: Tensor
    heads: tuple[tuple[int, int], ...]
    narrow: tuple[tuple[int, int], ...]


@torch.no_grad()
def word_times(
    model: PreTrainedModel,
    processor: Any,
    audio: Any,
    *,
    sampling_rate: int,
    text: str | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    **generate: Any,
) -> list[WordTime]:
    r"""Transcribe a recording and say when each word was said.

    While it writes a token, each head of sparse cross-attention looks at a few frames. Which heads follow the speech is
    measured on the recording itself, by the share of a head's weight that lies within two frames of a path that moves on with
    every token,

        share_h = 1/T max_{f_1 < f_2 < ... < f_T} sum_t sum_{|f - f_t| <= 2} w_h[t, f]

    Chosen are the heads with 0.6 of the best head's share or more, whose middle frame is within 0.12 s of the median of those
    heads. The words lie in segments, one after the other, that hold most of the chosen heads' weight; punctuation has segments of
    its own, which take the pauses. A word ends with the last frame of its segment that a head looked at. It begins behind the last
    pause before its largest weight (more than three frames in a row with less than a fifth of that), where a tenth of the weight from
    there on has been looked at: what is not written, such as "um", comes before. Some heads rest part of their weight far away, at
    the ends of the recording; those whose frames for three of four tokens lie within a second say the exact interval.

    The transcript is taken through the model once more, with the weights of one layer held at a time. Words are what stands
    between blanks: a text without blanks is one word.

    Args:
        model: a speech model that writes (Whisper, Moonshine, Speech2Text, ...), its cross-attention patched with an alpha
            above 1, e.g. ``patch_model(model, alpha=1.5, sites=("cross",))``.
        processor: the model's, with a ``feature_extractor`` and a ``tokenizer``.
        audio: samples of one channel, ``[N]`` floats: a list, an array or a tensor.
        sampling_rate: of ``audio``, Hz; it must be the processor's.
        text: what is said, if it is known; the model then only aligns it.
        heads: (layer, head) of the cross-attention to use instead, counted from 0.
        **generate: arguments of ``model.generate``, such as ``language`` or ``num_beams``.

    Returns:
        The words in their order; none where the model writes none, as for silence.

    Raises:
        TypeError: if ``audio`` is a path or no samples.
        ValueError: if ``audio`` is empty, not finite, of several channels, of another rate or longer than the model hears; if
            no cross-attention is sparse, or one of ``heads`` is not; if ``text`` and arguments of ``generate`` are both given.
    """
    extractor, tokenizer = processor.feature_extractor, processor.tokenizer
    samples = _samples(audio, sampling_rate, extractor)
    sparse = {
        site.name: site.layer for site in attention_sites(model) if site.site == "cross" and heads_of(site) is not None
    }
    if not sparse:
        raise ValueError(
            "this model has no sparse cross-attention, so that every word looks at every frame: patch it with "
            'hf_entmax.patch_model(model, alpha=1.5, sites=("cross",)) and fine-tune it.'
        )
    inputs = dict(extractor(samples.numpy(), sampling_rate=sampling_rate, return_tensors="pt").to(model.device))
    start = int(model.config.decoder_start_token_id)  # type: ignore[arg-type]
    if text is not None:
        if generate:
            raise ValueError(f"text is given, so nothing is generated: leave {', '.join(sorted(generate))} out.")
        ids = tokenizer(text)["input_ids"]
    else:
        ids = model.generate(**inputs, **generate, return_dict_in_generate=True)["sequences"][0].tolist()  # type: ignore[operator]
    ids = ids if ids[:1] == [start] else [start, *ids]
    places, parts = word_parts(ids, tokenizer)
    if not parts:
        return []
    weights: dict[int, Tensor] = {}

    def keep(call: AttentionCall) -> None:
        if call.site.name in sparse:
            # The query that reads a token writes the next one.
            weights[call.site.layer] = call.weights[0, :, [place - 1 for place in places]].float().cpu()

    with observe_attention(model, keep):
        model(**inputs, decoder_input_ids=torch.tensor([ids[:-1]], device=model.device))
    seconds = frame_seconds(model, extractor)
    heard = math.ceil(len(samples) / sampling_rate / seconds)
    every = {(layer, head): rows[head] for layer, rows in weights.items() for head in range(len(rows))}
    if heads is not None:
        if unknown := [head for head in heads if tuple(head) not in every]:
            raise ValueError(f"heads: {unknown} are no heads of sparse cross-attention; there are {sorted(every)}.")
        chosen = [(int(layer), int(head)) for layer, head in heads]
    else:
        chosen = follow_speech(every, seconds)
    near = narrow_heads({head: every[head] for head in chosen}, seconds)
    sizes = [size for _, size, _ in parts]

    def per_part(heads: list[tuple[int, int]]) -> Tensor:
        mean = torch.stack([every[head] for head in heads]).mean(0)
        return torch.stack([tokens.sum(0) for tokens in mean.split(sizes)])

    weights_of, looked = per_part(chosen), per_part(near) > 0
    found: list[WordTime] = []
    for place, (begin, end) in enumerate(segments(weights_of[:, :heard])):
        text, _, spoken = parts[place]
        if not spoken and found:
            found[-1] = replace(found[-1], word=found[-1].word + text)
            continue
        frames = looked[place].nonzero().flatten()
        interval = (int(frames[0]) * seconds, (int(frames[-1]) + 1) * seconds)
        begin = onset(weights_of[place], begin, end)
        times = begin * seconds, end * seconds
        found.append(WordTime(text, *times, interval, seconds, weights_of[place], tuple(chosen), tuple(near)))
    return found


def _samples(audio: Any, rate: int, extractor: Any) -> Tensor:
    """One channel of finite float32 samples that the model can hear at once, ``[N]``."""
    if isinstance(audio, (str, bytes)) or hasattr(audio, "__fspath__"):
        raise TypeError(
            f"audio={audio!r} is a name: read the file first, e.g. with soundfile.read, and give its samples."
        )
    try:
        samples = torch.as_tensor(audio).detach().cpu().float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"audio must be samples [N], not {type(audio).__name__} ({error}).") from error
    if samples.ndim != 1:
        raise ValueError(
            f"audio has the shape {tuple(samples.shape)}: give the samples of one channel, [N]; for stereo e.g. the mean."
        )
    if not len(samples):
        raise ValueError("audio is empty: there are no samples.")
    if not samples.isfinite().all():
        raise ValueError("audio has samples that are not finite (NaN or infinity).")
    own = int(extractor.sampling_rate)
    if rate != own:
        raise ValueError(f"sampling_rate={rate} is not the processor's: resample the audio to {own} Hz.")
    longest = getattr(extractor, "n_samples", None)
    if longest is not None and len(samples) > longest:
        raise ValueError(
            f"audio is {len(samples) / rate:.1f} s long, and the model hears {longest / own:g} s at once: cut it where nobody "
            "speaks, and add what lies before to the times."
        )
    return samples


def word_parts(ids: Sequence[int], tokenizer: Any) -> tuple[list[int], list[tuple[str, int, bool]]]:
    """Places of the tokens that are text, and what these are in turn: a word, or the punctuation after one.

    Each part has its text, its number of tokens, and whether it is spoken: a pause belongs to the punctuation, not to the word.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}  # timestamps are no special tokens
    places = [place for place, token in enumerate(ids) if token not in special]
    parts: list[tuple[str, int, bool]] = []
    before = ""
    for count in range(1, len(places) + 1):
        text = tokenizer.decode([ids[place] for place in places[:count]])
        new = text[len(before) :] if text.startswith(before) else ""  # else the first part of a character
        before = text
        spoken = not new or any(character.isalnum() for character in new)
        if not parts or new[:1].isspace() or (not spoken and parts[-1][2]):
            parts.append((new.strip(), 1, spoken))
        else:
            parts[-1] = (parts[-1][0] + new, parts[-1][1] + 1, parts[-1][2] or spoken)
    return places, parts


def path_share(weights: Tensor) -> Tensor:
    """Share of a head's weight that lies near a path which moves on with every token; see `word_times`.

    Args:
        weights: ``[H, T, F]``, rows that sum to 1.

    Returns:
        ``[H]``, in [0, 1].
    """
    near = nn.functional.avg_pool1d(weights, 2 * _WIDTH + 1, 1, _WIDTH) * (2 * _WIDTH + 1)
    best = near[:, 0]
    for row in range(1, near.shape[1]):
        # On the way to frame f the path was before it.
        best = near[:, row] + nn.functional.pad(best.cummax(-1).values[:, :-1], (1, 0))
    return best.amax(-1) / near.shape[1]


def follow_speech(weights: dict[tuple[int, int], Tensor], seconds: float) -> list[tuple[int, int]]:
    """The heads that follow the speech: on a path that moves on, and where most of those heads are.

    Args:
        weights: head -> ``[T, F]``.
        seconds: of a frame.

    Returns:
        The heads, at least one.
    """
    names, rows = list(weights), torch.stack(list(weights.values()))
    share = path_share(rows)
    kept = (share >= _LEAST * share.max()).nonzero().flatten()
    middle = (rows[kept].cumsum(-1) < 0.5).sum(-1).float()
    apart = (middle - middle.median(0).values).abs().median(-1).values * seconds
    return [names[int(head)] for head in kept[apart <= max(_FARTHEST, float(apart.min()))]]


def narrow_heads(weights: dict[tuple[int, int], Tensor], seconds: float) -> list[tuple[int, int]]:
    """Those heads whose nonzero weights lie within `_REACH` seconds for three of four tokens; all where none is so."""
    reach = {}
    for head, rows in weights.items():
        looked = (rows > 0).float()
        size = looked.shape[-1] - looked.flip(-1).argmax(-1) - looked.argmax(-1)
        reach[head] = float((size * seconds).quantile(0.75))
    return [head for head, value in reach.items() if value <= _REACH] or list(weights)


def onset(weights: Tensor, begin: int, end: int) -> int:
    """First frame of what a word looks at in its segment, without what comes before a pause; ``begin`` where there is nothing.

    Args:
        weights: of a word, ``[F]``.
        begin: first frame of its segment.
        end: frame after the last.
    """
    inside = weights[begin:end].double()
    if not inside.any():
        return begin
    loud = (inside >= _QUIET * inside.max()).nonzero().flatten()
    loud = loud[loud <= inside.argmax()]
    after = (loud.diff() > _PAUSE + 1).nonzero().flatten()
    first = int(loud[after[-1] + 1 if len(after) else 0])
    sums = inside[first:].cumsum(0)
    return begin + first + int((sums < _ONSET * sums[-1]).sum())


def segments(weights: Tensor) -> list[tuple[int, int]]:
    """Cut time into one segment per word, in their order, so that they hold as much of their weights as possible.

    Args:
        weights: ``[words, F]``.

    Returns:
        First frame and frame after the last of each word; frames without weight at the ends of a segment are left out. A word
        that nobody looked at in its place has an empty segment.
    """
    words, frames = weights.shape
    sums = nn.functional.pad(weights.double().cumsum(-1), (1, 0))
    best, origins = torch.zeros(frames + 1, dtype=torch.float64), []
    for row in sums:
        # Of all beginnings up to a frame the one with the highest total before it, less what this word has there.
        value, origin = (best - row).cummax(0)
        origins.append(origin)
        best = row + value
    end = int(best.argmax())
    found = []
    for word in range(words - 1, -1, -1):
        begin = int(origins[word][end])
        looked = weights[word, begin:end].nonzero().flatten().tolist()
        found.append((begin + looked[0], begin + looked[-1] + 1) if looked else (begin, begin))
        end = begin
    return found[::-1]
