"""Figures: what they draw, not how it looks."""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings

import pytest
import test_collect as shared
import torch

from hf_entmax.analysis import collect, plots

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def models():
    data = list(shared.batches(shared.sentences(6), 3))
    tokenizer = shared.plain_tokenizer()
    soft = collect(shared.t5(), data, tokenizer=tokenizer, name="softmax")
    learned = collect(shared.t5(True), data, tokenizer=tokenizer, name="learned")
    return soft, learned


def labels(figure) -> str:
    import matplotlib.text

    return " | ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text())


def test_alpha_per_head_shows_every_alpha_on_the_scale_of_alpha(models):
    alphas = models[1].alphas
    figure = plots.alpha_per_head(alphas)
    images = [axis.images[0] for axis in figure.axes if axis.images and axis.get_xlabel() == "head"]
    assert len(images) == len(alphas)
    for image, values in zip(images, alphas.values(), strict=True):
        assert image.get_clim() == (1.0, 2.0)
        torch.testing.assert_close(torch.tensor(image.get_array().tolist()).to(values), values, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="no alphas"):
        plots.alpha_per_head(models[0])


def test_alpha_histograms_count_every_head(models):
    figure = plots.alpha_histograms(models[1].alphas)
    assert len(figure.axes) == 3
    for axis in figure.axes:
        assert sum(patch.get_height() for patch in axis.patches) == 8
        assert axis.get_xlim() == (1.0, 2.0)
    assert "number of heads" in labels(figure) and "softmax" in labels(figure)
    with pytest.raises(ValueError, match="no alphas"):
        plots.alpha_histograms(models[0])


def test_trajectories(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(
            json.dumps({"step": s, "alpha": {"cross": [[1 + s / 100, 1.5], [1.2, 1.3]]}}) + "\n" for s in (0, 10, 20)
        )
    )
    figure = plots.alpha_trajectories(log)
    assert len(figure.axes[0].lines) == 4
    assert figure.axes[0].lines[0].get_ydata().tolist() == pytest.approx([1.0, 1.1, 1.2])
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 10, 20]
    assert len([axis for axis in plots.alpha_trajectories(log, site="cross").axes if axis.get_visible()]) == 2
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.0", "1.0", "1.1", "0.1"]  # from the lowest end up
    places = [text.xy[1] for text in figure.axes[0].texts]
    assert places == sorted(places) and min(b - a for a, b in itertools.pairwise(places)) > 0
    heads = [axis for axis in plots.alpha_trajectories(log, site="cross").axes if axis.get_visible()]
    assert [text.get_text() for text in heads[1].texts] == ["head 0", "head 1"]
    with pytest.raises(ValueError, match="no alpha of 'encoder_self'"):
        plots.alpha_trajectories(log, site="encoder_self")


def test_densities(models):
    figure = plots.density_histograms(list(models))
    assert len(figure.axes) == 6
    assert [sum(patch.get_height() for patch in axis.patches) for axis in figure.axes] == [8] * 6
    line = plots.sorted_density(models[1]).axes[0].lines[0].get_ydata()
    expected = sorted((100 * models[1].density["encoder_self"][0]).tolist())
    assert list(line) == pytest.approx(expected)
    bars = plots.density_by_site({"one": models[0], "two": models[1]}).axes[0].patches
    assert bars[3].get_height() == pytest.approx(100 * float(models[1].density["encoder_self"].mean()))
    assert "(%)" in labels(figure)


def test_many_models_leave_their_numbers_readable(models):
    many = {f"model number {i}": models[i % 2] for i in range(10)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plots.density_by_site(many)
        figure.draw_without_rendering()
    numbers = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(numbers) == 30
    assert not any(a.overlaps(b) for place, a in enumerate(numbers) for b in numbers[:place])
    (legend,) = figure.legends
    assert figure.bbox.x0 <= legend.get_window_extent().x0 and legend.get_window_extent().x1 <= figure.bbox.x1
    assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())


def test_diversity(models):
    figure = plots.head_diversity(list(models))
    assert len(figure.axes) == 3
    lines = figure.axes[1].lines
    assert list(lines[1].get_ydata()) == pytest.approx(models[1].head_diversity["cross"].tolist())
    assert "learned" in labels(figure) and lines[0].get_linestyle() != lines[1].get_linestyle()


def test_alpha_against_density(models):
    figure = plots.alpha_against_density(models[1])
    assert [len(points.get_offsets()) for points in figure.axes[0].collections] == [8, 8, 8]


def test_attention_map_outlines_exactly_the_support():
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [1e-6, 0.0, 1.0]])
    figure = plots.attention_map(weights, ["a", "b", "$c"], title="head")
    axis = figure.axes[0]
    (outline,) = axis.collections
    segments = {tuple(sorted((tuple(a), tuple(b)))) for a, b in (s.tolist() for s in outline.get_segments())}
    expected = set()
    for i in range(3):
        for j in range(3):
            for di, dj, edge in (
                (-1, 0, ((j - 0.5, i - 0.5), (j + 0.5, i - 0.5))),
                (1, 0, ((j - 0.5, i + 0.5), (j + 0.5, i + 0.5))),
                (0, -1, ((j - 0.5, i - 0.5), (j - 0.5, i + 0.5))),
                (0, 1, ((j + 0.5, i - 0.5), (j + 0.5, i + 0.5))),
            ):
                k, m = i + di, j + dj
                other = 0 <= k < 3 and 0 <= m < 3 and weights[k, m] != 0
                if (weights[i, j] != 0) != bool(other):
                    expected.add(tuple(sorted(edge)))
    assert segments == expected
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["a", "b", r"\$c"]
    with pytest.raises(ValueError, match="2 labels for 3 tokens"):
        plots.attention_map(weights, ["a", "b"])
    with pytest.raises(ValueError, match="choose one sentence"):
        plots.attention_map(weights[None])


def test_profiles_roles_positions_importance_curves(models):
    figure = plots.distance_profile(models[1], [("encoder_self", 0, 1)])
    expected = 100 * models[1].sites["encoder_self"].distance_profile()[0, 1]
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx(expected.tolist())
    assert len(plots.head_roles(models[1], 0.05).axes[0].patches) == 8
    assert "previous token" in labels(plots.positional_heads(list(models)))
    figure = plots.head_importance({"cross": torch.randn(2, 4)})
    assert figure.axes[0].images[0].get_array().shape == (2, 4)
    curves = plots.entmax_curves((1.0, 2.0)).axes[0].lines
    t, soft = curves[0].get_data()
    assert soft == pytest.approx(1 / (1 + torch.exp(-torch.tensor(t))).numpy())
    assert curves[1].get_ydata() == pytest.approx(torch.tensor(t + 1).div(2).clamp(0, 1).numpy())


def test_every_figure_saves(models, tmp_path):
    for place, figure in enumerate(
        (plots.sorted_density(models[0]), plots.attention_maps([("x", torch.eye(4), list("abcd"), None)]))
    ):
        figure.savefig(tmp_path / f"{place}.png")
        assert (tmp_path / f"{place}.png").stat().st_size > 5000


def test_plots_do_not_touch_global_state(models):
    before = dict(matplotlib.rcParams)
    plots.density_histograms(models[1])
    assert dict(matplotlib.rcParams) == before


def test_matplotlib_is_imported_only_when_a_figure_is_drawn():
    import ast
    from pathlib import Path

    import hf_entmax.analysis

    files = sorted(Path(hf_entmax.analysis.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for node in ast.parse(path.read_text()).body:  # at the top level, not under TYPE_CHECKING or in functions
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "matplotlib" for name in names), path


def test_dollars_in_a_model_name_are_text(models):
    named = {"runs/$a$ and $b_{": models[0], "x$$": models[1]}
    for draw in (plots.density_by_site, plots.density_histograms, plots.head_diversity):
        draw(named).draw_without_rendering()


def test_checkpoints_are_drawn_in_the_order_of_their_steps(models):
    named = []
    for step, of in ((20, models[1]), (5, models[1]), (100, models[1])):
        named.append(copy.copy(of))
        named[-1].name = f"run/checkpoint-{step}"
    figure = plots.over_training(named)
    for axis, expected in ((figure.axes[1], "alphas"), (figure.axes[2], "density")):
        assert [list(line.get_xdata()) for line in axis.lines] == [[5, 20, 100]] * 3
        means = {site: float(values.nanmean()) for site, values in getattr(models[1], expected).items()}
        assert sorted(line.get_ydata()[1] for line in axis.lines) == pytest.approx(sorted(means.values()))
    roles = [role for site in models[1].sites.values() for row in site.best_roles() for role in row if role]
    assert sum(line.get_ydata()[0] for line in figure.axes[0].lines) == len(roles)
    named[0], named[1].name = models[0], named[2].name
    again = plots.over_training(named)  # names do not tell steps, and the first is a softmax without alphas
    assert list(again.axes[2].lines[0].get_xdata()) == [0, 1, 2] and math.isnan(again.axes[1].lines[0].get_ydata()[0])
    with pytest.raises(ValueError, match="2 checkpoints"):
        plots.over_training(models)
