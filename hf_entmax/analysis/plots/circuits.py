"""A circuit from the input to the answer, and what circuits of growing size keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_entmax.analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style.house_style()
def circuit(edges: Sequence[Any], tokens: Sequence[str], title: str = "", answer: str = "", labels: int = 12) -> Figure:
    """Draw the edges of one prompt that lead to its last position.

    Time runs upwards: a row is a layer in which there is an edge, a column a token. A line goes from the token that is read to
    the token that reads, for all heads of the layer that do so; it is the wider the higher their summed score, blue where they
    help the answer and orange where they hinder it.
    Edges from which no path leads to the last position are left out.

    Args:
        edges: of one prompt, strongest first, as `hf_entmax.analysis.circuits.EdgeScores.edges` gives them.
        tokens: of the prompt.
        title: above the figure.
        answer: what the model says, at the top of the last column.
        labels: how many of the strongest lines are named ``layer.heads``.

    Raises:
        ValueError: if there is no edge, edges are of several sites, or a position has no token.
    """
    if not edges:
        raise ValueError("there is no edge to draw.")
    if len(sites := {edge.site for edge in edges}) > 1:
        raise ValueError(f"edges of {sorted(sites)} have no common rows of tokens: choose those of one site.")
    if max(max(edge.query, edge.key) for edge in edges) >= len(tokens):
        raise ValueError(
            f"an edge is at a position that {len(tokens)} tokens do not have: give the tokens of this prompt."
        )
    kept = leading_to(edges, len(tokens) - 1)
    rows = {layer: row for row, layer in enumerate(sorted({edge.layer for edge in kept}))}
    figure, axis = style.one_axis(max(0.62 * len(tokens) + 1.2, 4.5), max(0.42 * len(rows) + 1.5, 3.0))
    top = len(rows) + 0.4
    for place in range(len(tokens)):
        axis.plot([place, place], [0, top], color=style.INK, alpha=0.12, linewidth=1, zorder=0)
    pairs: dict[tuple[int, int, int], list[Any]] = {}
    for edge in kept:
        pairs.setdefault((edge.layer, edge.query, edge.key), []).append(edge)
    summed = {pair: sum(edge.score for edge in own) for pair, own in pairs.items()}
    strongest = max(map(abs, summed.values()), default=1.0)
    for rank, pair in enumerate(sorted(pairs, key=lambda pair: -abs(summed[pair]))):
        layer, query, key = pair
        colour = style.PALETTE[0] if summed[pair] > 0 else style.PALETTE[1]
        row, width = rows[layer], 0.6 + 3.4 * abs(summed[pair]) / strongest
        axis.plot(
            [key, query], [row + 0.1, row + 0.9], color=colour, linewidth=width, alpha=0.8, solid_capstyle="round"
        )
        axis.plot(query, row + 0.9, marker="o", color=colour, markersize=2.5 + width / 2)
        if rank < labels:
            heads = ", ".join(str(head) for head in dict.fromkeys(edge.head for edge in pairs[pair]))
            box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
            where = (key + query) / 2, row + 0.5
            axis.text(*where, f"{layer}.{heads}", fontsize=6.5, color=colour, ha="center", va="center", bbox=box)
    axis.set_xticks(
        range(len(tokens)), [style.plain(token.strip() or repr(token)) for token in tokens], rotation=40, ha="right"
    )
    axis.set_yticks([row + 0.5 for row in rows.values()], [str(layer) for layer in rows])
    axis.set(title=style.plain(title), ylabel="layer", xlim=(-0.6, len(tokens) - 0.4), ylim=(0, top + 0.5))
    axis.grid(visible=False)
    if answer:
        axis.text(len(tokens) - 1, top + 0.05, style.plain(answer.strip()), ha="center", va="bottom", weight="bold")
    return figure


def leading_to(edges: Sequence[Any], position: int) -> list[Any]:
    """List those edges of one prompt from which a path leads to a position above the last layer, in the order given."""
    live, kept = {position}, set()
    for layer in sorted({edge.layer for edge in edges}, reverse=True):
        own = [place for place, edge in enumerate(edges) if edge.layer == layer and edge.query in live]
        kept.update(own)
        live |= {edges[place].key for place in own}
    return [edge for place, edge in enumerate(edges) if place in kept]


@style.house_style()
def faithfulness_curves(curves: Mapping[str, Any], share: float = 0.9, title: str = "") -> Figure:
    """Draw what circuits keep of the metric against the number of their edges or heads.

    Args:
        curves: name -> `hf_entmax.analysis.circuits.FaithfulnessCurve`, all of one unit.
        share: where a line is drawn.
        title: above the figure.

    Raises:
        ValueError: if there is no curve, or they count different things.
    """
    if len(units := {curve.unit for curve in curves.values()}) != 1:
        raise ValueError(f"curves count {sorted(units) or 'nothing'}: give curves of edges, or of heads.")
    figure, axis = style.one_axis(4.2, 3.0)
    for place, (name, curve) in enumerate(curves.items()):
        drawn = [(size, kept) for size, kept in zip(curve.sizes, curve.faithfulness.tolist(), strict=True) if size]
        axis.plot(*zip(*drawn, strict=True), label=style.plain(name), **style.line_look(place, 3.5))
    axis.axhline(share, color=style.INK, linewidth=0.8, linestyle=":")
    axis.set(
        xscale="log",
        xlabel=f"{units.pop()} in the circuit",
        ylabel="faithfulness",
        title=style.plain(title),
        ylim=(-0.1, 1.3),
    )
    axis.legend()
    return figure
