"""Tables, figure and verdicts of real pretrained models, from rows written for the purpose."""

import csv

import pytest

from recipes.lab.pages import pretrained, pretrained_heads
from recipes.lab.rows import Rows


@pytest.fixture
def rows(tmp_path):
    """A folder of results; the function writes a group's rows into it."""

    def write(group, *entries):
        path = tmp_path / f"{group}.csv"
        path.parent.mkdir(exist_ok=True)
        with open(path, "w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, list(entries[0]))
            writer.writeheader()
            writer.writerows(entries)

    write.read = Rows(tmp_path)
    return write


def _run(attention, seed, density, budget="", **measures):
    options = f" --loss_budget {budget}" if budget else ""
    return {"attention": attention, "seed": seed, "density": density, "loss_budget": budget, "density_target": "",
            "freeze_weights": "False", "lora_rank": 0, "steps": 100, "train_seconds": 60,
            "command": f"python recipes/convert.py --seed {seed} --attention {attention}{options}", **measures}  # fmt: skip


def _encoder(attention, seed, density, spearman, budget="", accuracy=0.9):
    quality = {"spearman": spearman, "pearson": spearman, "accuracy": accuracy, "accuracy_before": 0.8, "mrr": 0.5}
    return _run(attention, seed, density, budget, support_encoder_self=50 * density, keys=50, **quality)


def test_seeds_of_a_setting_are_one_line_and_the_aim_is_judged(rows):
    control = [_encoder("softmax", seed, 1.0, 0.999) for seed in (0, 1)]
    sparse = [_encoder("learned", seed, density, 0.996, "0.1") for seed, density in ((0, 0.08), (1, 0.1))]
    sparser = [_encoder("learned", seed, 0.05, 0.98, "0.4", accuracy=0.7) for seed in (0, 1)]
    rows("convert_encoder", *sparser, *sparse, *control)
    table = pretrained.conversions(rows.read, "convert_encoder").splitlines()
    assert "perplexity" not in table[0] and len(table) == 5
    assert table[2].startswith("| softmax | 2 |") and "100.00 ± 0.00" in table[2]
    assert table[3].startswith(
        "| learned, budget 0.1 | 2 | 100 ± 0 | 9.00 ± 1.41 | 4.50 ± 0.71 | 50.00 ± 0.00 | 0.9960"
    )
    (finding,) = pretrained.findings(rows.read)
    assert finding.verdict == "found" and "9.0 ± 1.4 % left" in finding.here and "+0.0 points" in finding.here
    rows("convert_encoder", *sparser, *control[:1])
    (finding,) = pretrained.findings(rows.read)
    assert finding.verdict == "not found (one seed)" and "-20.0 points against the control" in finding.here
    rows("convert_encoder", *sparse)
    (finding,) = pretrained.findings(rows.read)
    assert finding.verdict == "found" and "+10.0 points against the model before" in finding.here


def test_a_causal_model_is_judged_by_its_control(rows):
    def run(attention, density, perplexity, budget=""):
        return _run(attention, 0, density, budget, perplexity=perplexity, perplexity_before=20, support_decoder_self=9)

    rows("convert_smollm2", run("learned", 0.04, 16.0, "0.0"), run("softmax", 1.0, 15.5))
    table = pretrained.conversions(rows.read, "convert_smollm2")
    assert "Spearman" not in table and "| learned, budget 0.0 | 1 | 100 | 4.00 | 9.00 | 20.00 | 16.00 | 1 |" in table
    (finding,) = pretrained.findings(rows.read)
    assert finding.verdict == "not found (one seed)" and "perplexity +3.2 %" in finding.here
    rows("convert_smollm2", run("learned", 0.04, 15.5, "0.0"), run("softmax", 1.0, 15.5))
    assert pretrained.findings(rows.read)[0].verdict == "found (one seed)"
    rows("convert_smollm2", run("learned", 0.04, 15.5, "0.0"))
    assert pretrained.findings(rows.read)[0].verdict == "not found (one seed)"  # there is nothing to judge it by
    longer = run("softmax", 1.0, 15.4) | {"steps": 400, "command": "python recipes/convert.py --train_tokens 204800"}
    rows("convert_smollm2", run("learned", 0.04, 15.5, "0.0"), run("softmax", 1.0, 15.5), longer)
    assert pretrained.findings(rows.read)[0].verdict == "found (one seed)"  # a control that trained for longer is none
    assert "| softmax, 204,800 tokens | 1 | 400 |" in pretrained.conversions(rows.read, "convert_smollm2")
    faster = run("softmax", 1.0, 15.0)
    faster["command"] += " --lr 2e-4"
    dense = run("learned", 0.3, 14.0, "0.1")  # at less loss, but not sparse
    rows("convert_smollm2", dense, run("learned", 0.04, 15.5, "0.0"), run("softmax", 1.0, 15.5), faster)
    (finding,) = pretrained.findings(rows.read)  # the better of two controls is the measure
    assert (
        finding.verdict == "not found (one seed)" and "4.0 % left, perplexity +3.3 % against the better" in finding.here
    )
    assert "| softmax, learning rate 0.0002 | 1 |" in pretrained.conversions(rows.read, "convert_smollm2")


def test_budgets_stand_in_order_and_missing_numbers_stay_empty(rows):
    row = {"heldout_percent": 1.5, "density": 0.7, "density_calibration": 0.6, "alpha_median": 1.02, "alpha_max": 1.9,
           "heads": 9, "heads_sparse": 4, "heads_full": 2, "seconds": 120, "similarity_correlation": "", "accuracy_before": "", "accuracy": ""}  # fmt: skip
    kinds = (("lm", "False", 5.0), ("lm", "False", 0), ("smollm2", "True", 0.5), ("smollm2", "False", 0.5))
    made = [{"model": model, "temperature": kind, "budget": budget, **row} for model, kind, budget in kinds]
    rows("calibration", *made)
    table = pretrained.calibrations(rows.read).splitlines()[2:]
    assert [line.split("|")[3].strip() for line in table] == ["0", "5", "0.5", "0.5"]
    assert table[0] == "| lm | alpha | 0 | 40.0 | 4 of 9 | 2 | +1.50 | 30.0 |  |  |  | 1.02 | 1.90 | 2 |"
    assert table[3].startswith("| smollm2 | alpha, temperature | 0.5 |")
    assert pretrained.findings(rows.read) == []  # none is within the aim's loss
    rows("calibration", *(entry | {"heldout_percent": 0.9, "density": 0.45} for entry in made[2:]), made[0])
    (finding,) = pretrained.findings(rows.read)
    assert finding.verdict == "found (one set of texts)" and "55.0 % zeros at +0.90 %" in finding.here
    alone = _run("learned", 0, 0.3, "0.01", perplexity=19.0, perplexity_before=20.0, support_decoder_self=9)
    rows("convert_smollm2", alone | {"freeze_weights": "True"})
    assert "alphas alone: 70.0 % zeros at -5.00 %" in pretrained.findings(rows.read)[0].here
    rows("convert_smollm2", alone)  # its weights were trained
    assert "55.0 % zeros at +0.90 %" in pretrained.findings(rows.read)[0].here
    (rows.read.folder / "convert_smollm2.csv").unlink()
    axes = pretrained.figure(rows.read).axes
    assert len(axes) == 1 and [list(line.get_ydata()) for line in axes[0].lines[:3]] == [[55.0], [55.0], [30.0]]


def test_the_figure_has_a_panel_for_each_model_with_rows(rows):
    assert pretrained.figure(rows.read) is None
    row = _encoder("learned", 0, 0.1, 0.99, "0.1")
    rows("convert_encoder", row)
    rows("convert_encoder_curve", {"command": row["command"], "stage": "training", "density": 0.5, "spearman": 0.999})
    (axis,) = pretrained.figure(rows.read).axes
    assert [list(line.get_xdata()) for line in axis.lines][:2] == [[50.0], [10.0]]


def test_a_role_that_only_some_models_play_better_is_said_so(rows):
    sure = {"SmolLM2": 0.75, "made sparse": 0.94, "softened": 0.74}
    heads = [{"model": model, "site": "decoder_self", "layer": 1, "head": 2, "confidence_previous": value,
              "subword_merging_multi": value / 2 if model == "SmolLM2" else 0.9} for model, value in sure.items()]  # fmt: skip
    rows("head_analysis_smollm2/heads", *heads)
    sites = [{"model": model, "head_diversity": 0.1 + 0.01 * place} for place, model in enumerate(sure)]
    rows("head_analysis_smollm2/sites", *sites)
    previous, subwords, diverse = pretrained_heads.findings(rows.read)
    assert previous.here == "SmolLM2 75.0 %, made sparse 94.0 %, softened 74.0 %"
    assert previous.verdict == "found for made sparse only (one seed)" and subwords.verdict == "found (one seed)"
    assert diverse.here == "SmolLM2 0.100, made sparse 0.110, softened 0.120" and diverse.verdict == "found (one seed)"
    for value, verdict in ((0.5, "not found: no such head in any model"), (0.997, "not to be told: sure before")):
        rows("head_analysis_smollm2/heads", *({**head, "confidence_previous": value} for head in heads))
        assert pretrained_heads.findings(rows.read)[0].verdict == verdict
    rows("head_analysis_smollm2/heads", *({**head, "interrogation": 0.3} for head in heads))
    assert pretrained_heads.findings(rows.read)[2].claim.startswith("Correia et al., figure 9, SmolLM2")
    rows("head_analysis_smollm2/heads", *heads)
    rows("head_analysis_smollm2/sites", sites[0], *({**site, "head_diversity": 0.05} for site in sites[1:]))
    assert pretrained_heads.findings(rows.read)[2].verdict == "not found (one seed)"


def test_a_head_has_to_be_sparse_here_and_dense_there_in_sentences_whose_length_is_bounded(rows):
    models = [{"model": model, "layer": 1, "head": 2, "head_diversity": 0.1} for model in ("MiniLM", "softened")]
    rows("head_analysis_minilm/sites", *models)
    rows("head_analysis_minilm/heads", *models)
    pair = {"model": "softened", "layer": 1, "head": 2, "longest": 16, "sparse_density": 0.1}
    rows(
        "head_analysis_minilm/sentences", {**pair, "dense_density": 0.7}, {**pair, "longest": "", "dense_density": 0.9}
    )
    *_, contrast = pretrained_heads.findings(rows.read)
    assert contrast.here.startswith("1 of 1 heads differ") and "10.0 % of its weights" in contrast.here
    assert "70.0 % in another, neither longer than 16 tokens" in contrast.here and contrast.holds
    rows("head_analysis_minilm/sentences", {**pair, "dense_density": 0.55})
    *_, contrast = pretrained_heads.findings(rows.read)
    assert contrast.here.startswith("0 of 1 heads") and contrast.verdict == "not found (one seed)"


def test_the_table_of_heads_has_induction_beside_its_chance(rows):
    models = ("MiniLM", "softened")
    sites = {"density": 0.5, "mean_support": 3, "max_weight": 0.4, "head_diversity": 0.1}
    rows("head_analysis_minilm/sites", *({"model": model, **sites} for model in models))
    rows("head_analysis_minilm/positions", *({"model": model, "offset": -1, "positional_heads": 1} for model in models))
    heads = [{"model": model, "layer": 0, "head": head, "first_mass": 0.95 * head, "role": "first" if head else "",
              "confidence_previous": "", "dependency_accuracy": 0.2 + 0.1 * head} for model in models for head in (0, 1)]  # fmt: skip
    rows("head_analysis_minilm/heads", *heads)
    roles = [{"model": model, "layer": 2, "head": head, "role": role, "score": 0.3 + 0.1 * head, "chance": 0.07}
             for model in models for head in (0, 1) for role in ("induction", "repeated")]  # fmt: skip
    table = pretrained_heads.summary(rows.read, pretrained_heads.ENCODER)
    assert "induction" not in table and "previous token, %" not in table and "| 95.0 (0.1) | 95.0 (0.1) |" in table
    assert "| surest head, syntactic head of the word, accuracy, % | 30.0 (0.1) | 30.0 (0.1) |" in table
    rows("head_analysis_minilm/roles", *roles)
    table = pretrained_heads.summary(rows.read, pretrained_heads.ENCODER)
    assert "(induction; by chance 7.0), % | 40.0 (2.1) | 40.0 (2.1) |" in table
