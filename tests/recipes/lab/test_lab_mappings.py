"""The page of controllable mappings: its figures and its claims, from planted rows."""

from recipes.lab.pages import figures, mappings
from recipes.lab.rows import Rows


class TestFigures:
    def test_region_plot_outlines_the_sparse_regions(self):
        figure = figures.regions()
        panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
        assert len(panels) == len(figures.REGIONS)
        outlined = {name for name, axes in panels.items() if axes.collections}
        assert "softmax" not in outlined
        assert {"sparsemax (λ = 0)", "sparsehourglass, q = 0.1"} <= outlined

    def test_curves_need_results(self, tmp_path):
        assert figures.synthetic(Rows(tmp_path)) is None

    def test_claims_are_counted_not_assumed(self):
        def rows(hinge, huber):
            return [
                {"dataset": axis, "setting": "1", "method": m, "micro_f1": f, "jsd": "0.1"}
                for axis in ("mean_labels", "label_range", "length")
                for m, f in (
                    ("sparsemax+hinge", hinge),
                    ("sparsemax+huber", huber),
                    ("sparsemax+huber support", "0.1"),
                    ("sparsehg+hinge", "0.5"),
                    ("softmax+log", "0.9"),
                )
            ]

        better, worse = mappings.claims(rows("0.6", "0.5")), mappings.claims(rows("0.5", "0.6"))
        assert "whose threshold is tuned | 1 of 1 | 1 of 1 | 1 of 1 | **found** |" in better
        assert "whose threshold is tuned | 0 of 1 | 0 of 1 | 0 of 1 | **not found** |" in worse

    def test_the_table_compares_with_the_paper(self):
        row = dict.fromkeys(("regularisation", "training"), "") | {
            "dataset": "emotions", "setting": "l2 tuned", "empty_rows": "ignore", "test_rows": "all", "method": "softmax+log",
            "micro_f1": "0.67", "macro_f1": "0.66", "jsd": "0.2", "support": "6", "n_test": "202",
        }  # fmt: skip
        table = mappings.mulan([row, {**row, "micro_f1": "0.65"}])
        assert "| 0.660 ± 0.014 | 0.65 | +0.010 | 0.660 |" in table
