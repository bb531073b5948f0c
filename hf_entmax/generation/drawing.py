"""What the drawings of hypotheses share: tokens as text, percentages, an empty figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STYLE = (
    "font-family:ui-monospace,monospace;font-size:14px;line-height:1.5;color:#1a1a1a;background:#fff;padding:8px;"
    "overflow-x:auto"
)


def labeller(tokenizer: Any) -> Callable[[int], str]:
    """Turn a token id into text: by a tokenizer, by a function, or as a number.

    Raises:
        TypeError: if ``tokenizer`` is none of these.
    """
    if tokenizer is None:
        return str
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return lambda token: str(tokenizer.convert_ids_to_tokens(token))
    if callable(tokenizer):
        return lambda token: str(tokenizer(token))
    raise TypeError(
        f"tokenizer must be a tokenizer, a function from token ids to text, or None, not {type(tokenizer).__name__}."
    )


def percent(probability: float) -> str:
    """``0.664`` as ``66.4 %``, and never rounded to a certainty that is none."""
    if 0.9995 <= probability < 1.0:
        return ">99.9 %"
    if 0.0 < probability < 0.0005:
        return "<0.1 %"
    return f"{100 * probability:.1f} %"


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure with one axis that draws nothing by itself.

    Raises:
        ImportError: if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "hf_entmax[figures]"') from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.add_subplot().set_axis_off()
    return figure
