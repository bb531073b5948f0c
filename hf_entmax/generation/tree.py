"""The tree of hypotheses that a search found, as text, HTML or a figure; and what other drawings of hypotheses share with it."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterator
from typing import Any

from hf_entmax.generation.results import SearchResult

#: Tokens and probability of a hypothesis, and whether it ended by itself.
Entry = tuple[list[int], float, bool]
#: Of what is drawn in HTML.
STYLE = (
    "font-family:ui-monospace,monospace;font-size:14px;line-height:1.5;color:#1a1a1a;background:#fff;padding:8px;"
    "overflow-x:auto"
)


@dataclasses.dataclass
class TreeNode:
    """A stretch of tokens without a branch.

    Attributes:
        labels: text of the tokens.
        mass: total probability of the hypotheses that go through here.
        share: this mass over that of the parent node.
        finished: whether a hypothesis ends here by itself; None if none ends here, False if one was cut off here.
        children: what may follow, most probable first.
    """

    labels: list[str]
    mass: float
    share: float
    finished: bool | None
    children: list[TreeNode]

    def walk(self) -> Iterator[TreeNode]:
        """Yield this node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def text(self) -> str:
        """The tokens, and an ellipsis where a hypothesis was cut off."""
        return " ".join([*self.labels, *(["…"] if self.finished is False else [])])


@dataclasses.dataclass
class HypothesisTree:
    """All hypotheses of one input, common beginnings drawn once.

    Attributes:
        root: holds the common beginning of all hypotheses (no token at all, if they have none).
        missing: probability of what is not in the tree.
    """

    root: TreeNode
    missing: float

    def to_text(self) -> str:
        """Draw the branches with lines; ``p`` of each leaf is the probability of the whole hypothesis."""
        lines: list[tuple[str, str]] = []
        _write(self.root, "", "", lines)
        width = max(len(left) for left, _ in lines)
        text = [f"{left:<{width}}  {right}".rstrip() for left, right in lines]
        return "\n".join([*text, *([f"({percent(self.missing)} elsewhere)"] if self.missing > 0 else [])])

    def to_html(self) -> str:
        """Render a fragment of HTML: nested lists; all text is escaped."""
        missing = f"<div>{percent(self.missing)} elsewhere</div>" if self.missing > 0 else ""
        return f'<div style="{STYLE}"><ul>{_item(self.root)}</ul>{missing}</div>'

    def to_figure(self) -> Any:
        """Draw the tree with matplotlib from left to right; the width of a branch grows with its probability.

        Raises:
            ImportError: if matplotlib is missing.
        """
        leaves = sum(1 for node in self.root.walk() if not node.children)
        ends: list[float] = []
        figure = new_figure(8.0, 0.6 + 0.35 * leaves)
        axis = figure.axes[0]
        rows = iter(range(leaves))
        _draw(axis, self.root, 0.0, rows, ends)
        axis.set_xlim(-0.5, max(ends) + 1)
        # So wide that the letters, whose size does not depend on the figure's, take the room that was planned for them.
        figure.set_size_inches(max(3.0, 0.5 * (max(ends) + 1.5)), 0.6 + 0.35 * leaves)
        axis.set_ylim(-leaves, 1)
        if self.missing > 0:
            axis.set_title(f"{percent(self.missing)} elsewhere", fontsize=8, loc="right")
        return figure


def hypothesis_tree(result: SearchResult, tokenizer: Any = None) -> HypothesisTree:
    """Join the hypotheses of a search into a tree.

    Args:
        result: of a beam search, an enumeration or an exact search, with at least one hypothesis.
        tokenizer: turns token ids into text: a tokenizer, a function, or None for numbers.

    Returns:
        The tree. Where the result is not exhaustive, the probabilities at branches are those of the hypotheses listed.

    Raises:
        ValueError: if the result is empty.
        TypeError: for an unsuitable ``tokenizer``.

    Reference:
        Peters, Niculae, Martins 2019, fig. 1.
    """
    if not result.sequences:
        raise ValueError("the result holds no hypothesis: there is no tree to draw.")
    text = labeller(tokenizer)
    entries = list(zip(result.sequences, result.probabilities, result.finished, strict=True))
    return HypothesisTree(_grow([], entries, 0, math.nan, text), result.pruned_mass)


def _grow(labels: list[str], entries: list[Entry], depth: int, parent: float, text: Any) -> TreeNode:
    """Build the node of entries that share their first ``depth`` tokens, extended by all further tokens they share."""
    mass = math.fsum(p for _, p, _ in entries)
    share = 1.0 if math.isnan(parent) or parent == 0 else mass / parent
    labels = list(labels)
    while True:
        ended = [done for tokens, _, done in entries if len(tokens) == depth]
        following: dict[int, list[Entry]] = {}
        for entry in entries:
            if len(entry[0]) > depth:
                following.setdefault(entry[0][depth], []).append(entry)
        if ended or len(following) != 1:
            break
        labels.append(text(next(iter(following))))
        depth += 1
    children = [_grow([text(token)], group, depth + 1, mass, text) for token, group in following.items()]
    children.sort(key=lambda node: -node.mass)
    return TreeNode(labels, mass, share, all(ended) if ended else None, children)


def _write(node: TreeNode, lead: str, below: str, lines: list[tuple[str, str]]) -> None:
    leaf = not node.children
    numbers = f"p = {percent(node.mass)}" if leaf or node.finished is not None else percent(node.share)
    lines.append((lead + (node.text or "(start)"), numbers if lead or leaf else ""))
    for place, child in enumerate(node.children):
        last = place == len(node.children) - 1
        _write(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), lines)


def _item(node: TreeNode) -> str:
    numbers = f"p = {percent(node.mass)}" if not node.children else percent(node.share)
    inner = f"<ul>{''.join(_item(child) for child in node.children)}</ul>" if node.children else ""
    return f'<li><b>{html.escape(node.text or "(start)")}</b> <span style="color:#666">{numbers}</span>{inner}</li>'


def _draw(axis: Any, node: TreeNode, left: float, rows: Iterator[int], ends: list[float]) -> float:
    """Draw a node and what follows it; returns the height it stands at: the middle of its children."""
    label = node.text or "(start)"
    note = f"{label}  {percent(node.mass)}" if not node.children else label
    right = left + 0.16 * len(note) + 0.6
    ends.append(right)
    heights = [_draw(axis, child, right + 2.2, rows, ends) for child in node.children]
    height = sum(heights) / len(heights) if heights else -float(next(rows))
    axis.text(left, height, note, ha="left", va="center", fontsize=9, family="monospace", parse_math=False)
    for child, there in zip(node.children, heights, strict=True):
        axis.plot([right, right + 2.0], [height, there], color="#2b6cb0", linewidth=0.5 + 3.0 * child.share)
        axis.text(
            right + 1.0, (height + there) / 2, percent(child.share), fontsize=7, color="#666666", ha="center", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    return height


def labeller(tokenizer: Any) -> Callable[[int], str]:
    """Turn a token id into text: by a tokenizer, by a function, or as a number."""
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
    """Write ``0.664`` as ``66.4 %``, and never rounded to a certainty that is none."""
    if 0.9995 <= probability < 1.0:
        return ">99.9 %"
    if 0.0 < probability < 0.0005:
        return "<0.1 %"
    return f"{100 * probability:.1f} %"


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure with one axis that draws nothing by itself."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "hf_entmax[figures]"') from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.add_subplot().set_axis_off()
    return figure
