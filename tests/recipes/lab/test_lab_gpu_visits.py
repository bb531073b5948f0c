"""Tiles that each pass of the GPU forward kernel reads, counted in Triton's interpreter."""

import csv
import json

import fresh
import pytest

pytest.importorskip("triton", reason="triton is not installed: it has wheels for Linux only")

from recipes.lab.gpu import forecast

INTERPRETED = {"TRITON_INTERPRET": "1"}

STEPS = """
import json, torch
from recipes.lab.gpu import visits
place = torch.arange(256)
block = torch.nn.functional.one_hot(place // 64).float()
query = torch.cat([2.5 * block, torch.full((256, 1), -2.5), torch.full((256, 1), 1.5)], 1)
key = torch.cat([block, torch.ones(256, 1), (place == 0).float()[:, None]], 1)
print(json.dumps(visits.count(query.bfloat16()[None, None], key.bfloat16()[None, None], 1.5)))
"""


@pytest.mark.slow
def test_the_tiles_of_each_pass():
    """Scores 0 on the diagonal, -1 at the first key, else -2.5: what lies between is never listed, as the diagonal is read first."""
    run = fresh.run(STEPS, after="torch", environment=INTERPRETED)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    assert counts.pop("passes") < 3 and counts.pop("threshold") < 2
    assert counts == {"tiles": 10, "maximum": 1.0, "histogram": 0.7, "output": 0.7, "empty": 0.3}


@pytest.mark.slow
def test_rows_of_every_kind_of_scores(tmp_path):
    out = tmp_path / "visits.csv"
    options = ("--out", out, "--length", "64")
    run = fresh.run_module("recipes.lab.gpu.visits", *options, after="torch", environment=INTERPRETED)
    assert run.returncode == 0, run.stderr
    with out.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 10 and {row["maximum"] for row in rows} == {"1.0"}


def test_the_forecast_adds_what_each_pass_costs():
    row = {"maximum": "1.0", "histogram": "0.5", "threshold": "0.5", "output": "0.4", "empty": "0.6"}
    cycles = forecast.CYCLES["1.5"]
    forward = cycles["maximum"] + 0.5 * (cycles["histogram"] + cycles["threshold"]) + 0.4 * cycles["output"]
    assert forecast.ratio(row, "1.5", backward=False) == pytest.approx(forward / 500)
    assert forecast.ratio(row, "1.5") == pytest.approx((forward + 0.4 * cycles["backward"]) / 1500)
    assert forecast.ratio(row, "learned") > forecast.ratio(row, "1.5")
    products = 1 + 0.5 + 0.5 + 3 * 0.4 + 7 * 0.4
    assert forecast.ratio(row, "1.5", hidden=False) == pytest.approx(forecast.ratio(row, "1.5") + products * 128 / 1500)
    assert forecast.adasplash(0.61) == pytest.approx(0.99) and forecast.adasplash(0.2) is None
    row |= {"scores": "recency", "length": "2048", "alpha": "1.5"}
    assert "| recency, 2k | 1.5 | 60% | 0.50 |" in forecast.table([row])
