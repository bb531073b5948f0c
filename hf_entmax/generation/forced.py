"""Forced decoding: what the model would have accepted at each position of a given output."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hf_entmax.generation.members import Ensemble, as_inputs, as_models, number_of_inputs, with_one_input
from hf_entmax.generation.tree import STYLE, labeller, new_figure, percent


@dataclasses.dataclass
class ForcedStep:
    """One position of a given output.

    Attributes:
        token: the token that stands there.
        label: its text.
        probability: what the model gave it, after the tokens before; 0.0 if it was ruled out.
        support: text and probability of the tokens with mass, most probable first, at most ``max_support`` of them.
        support_size: how many have mass.
    """

    token: int
    label: str
    probability: float
    support: list[tuple[str, float]]
    support_size: int

    @property
    def certain(self) -> bool:
        """Whether the model left no choice, and the token is the one it would take."""
        return self.support_size == 1 and self.probability > 0.0


@dataclasses.dataclass
class ForcedDecoding:
    """A given output with the probabilities of its tokens.

    Attributes:
        steps: its positions.
    """

    steps: list[ForcedStep]

    @property
    def log_probability(self) -> float:
        """``log p(y | x)`` in nats, ``-inf`` if the model rules the output out."""
        return sum(math.log(step.probability) if step.probability > 0 else -math.inf for step in self.steps)

    def spans(self) -> list[list[ForcedStep]]:
        """Join runs of certain positions (the model completes them by itself); list all others one by one."""
        spans: list[list[ForcedStep]] = []
        for step in self.steps:
            if step.certain and spans and spans[-1][-1].certain:
                spans[-1].append(step)
            else:
                spans.append([step])
        return spans

    def _described(self) -> Iterator[tuple[str, ForcedStep, list[str], int]]:
        """Yield of each span its tokens and first step; what else had mass there, and how much more than is listed."""
        for span in self.spans():
            step, others = span[0], []
            if not step.certain:
                others = [f"{label} {percent(p)}" for label, p in step.support]
                own = f"{step.label} {percent(step.probability)}"
                if own in others:  # two tokens may share a label, so one is left out, not all
                    others.remove(own)
            name = " ".join(each.label for each in span)
            yield name, step, others, 0 if step.certain else step.support_size - len(step.support)

    def to_text(self) -> str:
        """Write one line per span: the tokens, the probability, and what else had mass."""
        lines = []
        width = max((len(name) for name, *_ in self._described()), default=0)
        for name, step, others, more in self._described():
            others += [f"and {more} more"] if more > 0 else []
            tail = "certain" if step.certain else f"{percent(step.probability):>7}"
            lines.append(f"{name:<{width}}  {tail}" + (f"   also {', '.join(others)}" if others else ""))
        return "\n".join(lines)

    def to_html(self) -> str:
        """Render a fragment of HTML: a row of boxes, certain runs in one; all text is escaped."""
        boxes = []
        for name, step, others, more in self._described():
            edge, tail = "2px solid #2b6cb0", ""
            if not step.certain:
                others += [f"+ {more}"] if more > 0 else []
                rows = "".join(f"<div>{html.escape(other)}</div>" for other in others)
                edge = "1px solid #999"
                tail = f' {html.escape(percent(step.probability))}<div style="color:#666">{rows}</div>'
            box = f"border:{edge};border-radius:4px;padding:4px 8px"
            boxes.append(f'<div style="{box}"><b>{html.escape(name)}</b>{tail}</div>')
        return f'<div style="{STYLE};display:flex;gap:4px;align-items:flex-start">{"".join(boxes)}</div>'

    def to_figure(self) -> Any:
        """Draw one column per span with matplotlib: the given token on top, what else had mass below it.

        Raises:
            ImportError: if matplotlib is missing.
        """
        columns = [
            (step.certain, [name if step.certain else f"{name}  {percent(step.probability)}", *others])
            for name, step, others, _ in self._described()
        ]
        widths = [max(len(line) for line in column) + 3 for _, column in columns]
        depth = max((len(column) for _, column in columns), default=1)
        figure = new_figure(max(2.0, 0.09 * sum(widths)), 0.3 + 0.25 * depth)
        axis = figure.axes[0]
        axis.set(xlim=(0, max(sum(widths), 1)), ylim=(-depth, 0.6))
        left = 0.0
        for (certain, column), width in zip(columns, widths, strict=True):
            box = {"boxstyle": "round", "facecolor": "#dbeafe" if certain else "white", "edgecolor": "#2b6cb0"}
            for row, line in enumerate(column):
                look: dict[str, Any] = {"color": "#666666"} if row else {"color": "black", "bbox": box}
                # Text is set as it is: dollar signs start no formula.
                axis.text(left + width / 2, -row, line, ha="center", va="center", fontsize=8, parse_math=False, **look)
            left += width
        return figure


def force_decode(
    model: Any,
    inputs: Any,
    targets: Any,
    tokenizer: Any = None,
    *,
    output_alpha: float | None = None,
    max_support: int = 20,
    **options: Any,
) -> list[ForcedDecoding]:
    """Compute the probabilities of given outputs, position by position, with what else the model would have accepted there.

    Args:
        model: as for ``beam_search``; a list of models is an ensemble.
        inputs: as for ``beam_search``.
        targets: token ids of the outputs, new tokens alone: a list of lists, or int64 ``[B, T]`` with -100 for padding.
        tokenizer: turns token ids into text: a tokenizer, a function, or None for numbers.
        output_alpha: as for ``beam_search``.
        max_support: how many of the tokens with mass to keep per position, at least 1.
        **options: as for ``beam_search``.

    Returns:
        One decoding per input.

    Raises:
        ValueError: if there is not one non-empty target per input, a token is out of range, or ``max_support < 1``.
        TypeError: as ``beam_search``.

    Reference:
        Peters, Niculae, Martins 2019, fig. 2.
    """
    if isinstance(max_support, bool) or not isinstance(max_support, int) or max_support < 1:
        raise ValueError(f"max_support={max_support!r} is not allowed: it must be an integer of at least 1.")
    models = as_models(model)
    each = as_inputs(inputs, models)
    size = number_of_inputs(each)
    given = targets.tolist() if isinstance(targets, Tensor) else targets
    rows = [[int(token) for token in row if int(token) != -100] for row in given]
    if len(rows) != size or not all(rows):
        raise ValueError(f"targets must hold one non-empty list of ids per input: got {len(rows)} for {size} inputs.")
    text = labeller(tokenizer)
    results = []
    for index, target in enumerate(rows):
        log_probs = with_one_input(
            models,
            each,
            index,
            lambda ensemble, target=target: _positions(ensemble, target),
            output_alpha=output_alpha,
            max_new_tokens=len(target),
            options={**options, "use_cache": False},
        )
        if max(target) >= (classes := log_probs.shape[-1]) or min(target) < 0:
            raise ValueError(f"targets hold {max(target)} or {min(target)}, outside the vocabulary of {classes}.")
        steps = [_step(row.exp(), token, text, max_support) for row, token in zip(log_probs, target, strict=True)]
        results.append(ForcedDecoding(steps))
    return results


def _positions(ensemble: Ensemble, target: list[int]) -> Tensor:
    """Compute log-probabilities at every position of one target, ``[T, V]``, in one pass per model."""
    prefixes = [target[:position] for position in range(len(target))]
    return ensemble.average(
        [
            member.log_probs_after(prefixes, member.forward_prefixes([target[:-1]], len(target))[0])
            for member in ensemble.members
        ]
    ).cpu()


def _step(probs: Tensor, token: int, text: Any, max_support: int) -> ForcedStep:
    size = int((probs > 0).sum())
    best = probs.topk(min(size, max_support))
    support = [(text(int(i)), float(p)) for p, i in zip(best.values, best.indices, strict=True)]
    return ForcedStep(token, text(token), float(probs[token]), support, size)
