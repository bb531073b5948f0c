"""The report: complete, self-contained, small, and alive in a real browser."""

from __future__ import annotations

import base64
import copy
import csv
import json
import re
import shutil

import numpy as np
import pytest
import test_collect as shared
import torch

from hf_entmax.analysis import AttentionStatistics, collect, write_report
from hf_entmax.analysis.collecting.examples import Example, SiteExample, Token, collect_examples
from hf_entmax.analysis.collecting.importance import head_importance
from hf_entmax.analysis.report.page_data import pack_examples, pack_weights
from hf_entmax.analysis.statistics.site import LayerInfo, SiteStatistics

pytestmark = pytest.mark.slow


def unpack(packed) -> np.ndarray:
    shape = packed["shape"]
    bits = np.unpackbits(np.frombuffer(base64.b64decode(packed["bits"]), np.uint8))[: int(np.prod(shape))]
    dense = np.zeros(len(bits))
    dense[bits == 1] = np.frombuffer(base64.b64decode(packed["values"]), np.uint8) / 255
    return dense.reshape(shape)


def page_data(page: str) -> dict:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1)
    return json.loads(text)


@pytest.fixture(scope="module")
def models():
    data = list(shared.batches(shared.sentences(8), 4))
    tokenizer = shared.plain_tokenizer()
    result = []
    for name, patched in (("learned <b>&", True), ("softmax", False)):
        model = shared.t5(patched)
        statistics = collect(model, data, tokenizer=tokenizer, name=name)
        statistics.importance["gradient"] = head_importance(model, data)
        statistics.examples = collect_examples(model, data, tokenizer, 3)
        result.append(statistics)
    return result


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(models[0], folder / "one")
    write_report(models, folder / "two" / "both.html")
    return folder


def test_a_treebank_of_roots_alone_has_no_baseline_and_still_a_report(models, tmp_path):
    statistics = copy.deepcopy(models[0])
    site = statistics.sites["encoder_self"]
    size = (site.num_layers, site.num_heads, 2)
    nothing = {"dependency_hits": size, "dependency_words": size[:1], "dependency_offsets": (size[0], 23)}
    site.sums |= {name: torch.zeros(shape, dtype=torch.float64) for name, shape in nothing.items()}
    page = write_report(statistics, tmp_path, figures=False).read_text()
    assert page_data(page)["models"][0]["baselines"] == {}


def test_files_and_numbers(models, folder):
    one = folder / "one"
    record = json.loads((one / "report.json").read_text())
    heads = record["models"][0]["heads"]
    assert len(heads) == models[0].num_heads == 24
    with (one / "heads.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    for row, entry in zip(rows, heads, strict=True):
        density = models[0].density[entry["site"]][entry["layer"], entry["head"]]
        assert entry["density"] == pytest.approx(float(density)) == pytest.approx(float(row["density"]))
        assert entry["alpha"] == pytest.approx(float(models[0].alphas[entry["site"]][entry["layer"], entry["head"]]))
        assert row["model"] == "learned <b>&"
    for name in ("layers", "sites", "positions", "roles", "distances"):
        assert (one / f"{name}.csv").stat().st_size > 100
    assert (folder / "two" / "both.json").exists() and (folder / "two" / "both-heads.csv").exists()


def test_page_is_self_contained(folder):
    for path in (folder / "one" / "report.html", folder / "two" / "both.html"):
        page = path.read_text()
        outside = [url for url in re.findall(r'(?:src|href)="([^"]*)"', page) if not url.startswith(("#", "data:"))]
        assert outside == []
        assert "@import" not in page and "fetch(" not in page and "default-src 'none'" in page
        assert "<b>&<" not in page  # a model's name is text, not markup
        assert len(page.encode()) < 5_000_000


def test_examples_survive_packing(models, folder):
    data = page_data((folder / "one" / "report.html").read_text())
    for example, packed in zip(models[0].examples, data["models"][0]["examples"], strict=True):
        for site, value in example.sites.items():
            weights = value.weights.numpy()
            dense = unpack(packed["sites"][site])
            assert ((dense != 0) == (weights != 0)).all()
            assert np.abs(dense - weights).max() <= 0.5 / 255 + 1 / 255
            assert len(packed["sites"][site]["queries"]) == weights.shape[2]


def test_tiny_weights_stay_nonzero():
    weights = torch.tensor([1e-30, 0.0, 1.0, 0.001]).view(1, 1, 1, 4)
    assert unpack(pack_weights(weights)).ravel() == pytest.approx([1 / 255, 0, 1, 1 / 255])


def test_examples_leave_out_padding_and_add_up(models):
    for example in models[1].examples:
        for site, value in example.sites.items():
            assert value.weights.shape[2:] == (len(value.queries), len(value.keys))
            torch.testing.assert_close(value.weights.sum(-1), torch.ones(value.weights.shape[:3]), rtol=1e-4, atol=1e-4)
            if site == "decoder_self":
                assert not value.weights.triu(1).any()


def large_statistics(layers: int = 12, heads: int = 12, length: int = 40) -> AttentionStatistics:
    """A model of BERT's size with dense examples, without running one."""
    generator = torch.Generator().manual_seed(0)
    small = collect(shared.bert(), shared.batches(shared.sentences(3), 3, targets=False), name="large")
    site = small.sites["encoder_self"]

    def grow(value):
        if value.dim() == 1:
            return value[:1].expand(layers).clone()
        copies = [layers, heads if value.shape[1] == 2 else value.shape[1], *value.shape[2:]]
        return value[:1, :1].expand(copies).clone() if value.shape[1] == 2 else value[:1].expand(copies).clone()

    infos = [LayerInfo(f"layer.{place}", place, heads) for place in range(layers)]
    small.sites["encoder_self"] = SiteStatistics(
        "encoder_self", infos, {k: grow(v) for k, v in site.sums.items()}, site.max_distance
    )
    small.extremes = {}
    tokens = [Token(f"token{place}") for place in range(length)]
    small.examples = [
        Example(
            "text " * length,
            "",
            {
                "encoder_self": SiteExample(
                    tokens, tokens, torch.rand(layers, heads, length, length, generator=generator)
                )
            },
        )
        for _ in range(60)
    ]
    return small


def test_twelve_by_twelve_stays_under_five_megabytes(tmp_path):
    path = write_report(large_statistics(), tmp_path)
    size = path.stat().st_size
    assert 2_000_000 < size < 5_000_000
    assert len(page_data(path.read_text())["models"][0]["examples"]) >= 4


def test_one_example_always_goes_in():
    tokens = [Token("a"), Token("b")]
    example = Example("x", "", {"cross": SiteExample(tokens, tokens, torch.rand(1, 1, 2, 2))})
    assert len(pack_examples([example, example], 1)) == 1


def test_without_matplotlib(models, tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name, *rest)
    )
    page = write_report(models[0], tmp_path).read_text()
    assert "matplotlib is not installed" in page and "<figure" not in page


def test_bad_input(tmp_path):
    with pytest.raises(TypeError, match="AttentionStatistics"):
        write_report([{"density": 1}], tmp_path)
    with pytest.raises(ValueError, match="empty sequence"):
        write_report([], tmp_path)
    with pytest.raises(ValueError, match="no attention site"):
        write_report(AttentionStatistics(), tmp_path)


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium through its driver."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium with its driver on this machine")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    yield window
    window.quit()


def open_page(browser, path):
    browser.get(path.resolve().as_uri())
    browser.execute_script("document.documentElement.style.scrollBehavior = 'auto'")
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true"


def errors(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_head_and_sentence_show_only_nonzero_arcs(models, folder, browser):
    open_page(browser, folder / "one" / "report.html")
    for site, layer, head in (("encoder_self", 1, 2), ("cross", 0, 3), ("decoder_self", 1, 0)):
        for place, example in enumerate(models[0].examples):
            weights = example.sites[site].weights[layer, head]
            browser.execute_script(
                "document.querySelector(arguments[0]).click();"
                "const s = document.querySelector('.viewer select'); s.value = arguments[1]; s.dispatchEvent(new Event('change'))",
                f'[data-cell="{site}/{layer}/{head}"]',
                str(place),
            )
            assert browser.execute_script("return document.querySelectorAll('.stage .arc').length") == int(
                (weights != 0).sum()
            )
            browser.execute_script("document.querySelector('[data-view=matrix]').click()")
            assert browser.execute_script("return document.querySelectorAll('.stage rect.weight').length") == int(
                (weights != 0).sum()
            )
            browser.execute_script("document.querySelector('[data-view=arcs]').click()")
    assert f"layer {layer}, head {head}" in browser.execute_script(
        "return document.querySelector('.viewer h3').textContent"
    )
    assert errors(browser) == []


def test_token_focus_and_threshold(models, folder, browser):
    open_page(browser, folder / "one" / "report.html")
    weights = models[0].examples[0].sites["encoder_self"].weights[0, 1]
    browser.execute_script("document.querySelector('[data-cell=\"encoder_self/0/1\"]').click()")
    browser.execute_script("document.querySelectorAll('.stage .token')[1].dispatchEvent(new Event('mouseenter'))")
    assert browser.execute_script("return document.querySelectorAll('.stage .arc.out').length") == int(
        (weights[1] != 0).sum()
    )
    browser.execute_script(
        "const s = document.querySelector('input[type=range]'); s.value = 30; s.dispatchEvent(new Event('input'))"
    )
    drawn = browser.execute_script("return document.querySelectorAll('.stage .arc').length")
    assert drawn == int(((weights * 255).round() / 255 >= 0.3).sum())
    assert errors(browser) == []


def column(browser, name: str) -> list[str]:
    return browser.execute_script(
        "const heads = [...document.querySelectorAll('#headtable th')].map((th) => th.textContent);"
        "const i = heads.indexOf(arguments[0]);"
        "return [...document.querySelectorAll('#headtable tbody tr')].map((tr) => tr.children[i].textContent)",
        name,
    )


def test_table_sorts_and_filters(folder, browser):
    open_page(browser, folder / "one" / "report.html")
    assert column(browser, "Head")[:3] == ["encoder 0.0", "encoder 0.1", "encoder 0.2"]

    def numbers() -> list[float]:
        return [float(text.removesuffix(" %")) for text in column(browser, "Density")]

    click = "document.querySelector('#headtable button[data-key=density]').click()"
    browser.execute_script(click)
    descending = numbers()
    assert len(descending) == 24 and descending == sorted(descending, reverse=True) and len(set(descending)) > 3
    browser.execute_script(click)
    assert numbers() == sorted(descending)
    assert browser.execute_script("return document.querySelector('#headtable th[aria-sort]').textContent") == "Density"
    browser.execute_script(
        "const f = document.getElementById('filter'); f.value = 'cross 1.'; f.dispatchEvent(new Event('input'))"
    )
    assert sorted(column(browser, "Head")) == [f"cross 1.{head}" for head in range(4)]
    browser.execute_script("document.querySelector('#headtable tbody tr').click()")
    chosen = column(browser, "Head")[0].split()[1].replace(".", ", head ")
    assert (
        browser.execute_script("return document.querySelector('.viewer h3').textContent")
        == f"Cross-attention, layer {chosen}"
    )
    assert errors(browser) == []


def test_two_models_side_by_side(folder, browser):
    open_page(browser, folder / "two" / "both.html")
    assert browser.execute_script("return document.querySelectorAll('.pane').length") == 2
    browser.execute_script("document.querySelector('[data-cell=\"cross/1/1\"]').click()")
    titles = browser.execute_script("return [...document.querySelectorAll('.viewer h3')].map((h) => h.textContent)")
    assert titles == ["Cross-attention, layer 1, head 1"] * 2
    arcs = browser.execute_script(
        "return [...document.querySelectorAll('.stage')].map((s) => s.querySelectorAll('.arc').length)"
    )
    assert arcs[0] < arcs[1]  # entmax draws fewer than softmax
    browser.execute_script(
        "document.getElementById('linked').click(); document.querySelector('[data-cell=\"cross/0/0\"]').click()"
    )
    titles = browser.execute_script("return [...document.querySelectorAll('.viewer h3')].map((h) => h.textContent)")
    assert titles == ["Cross-attention, layer 0, head 0", "Cross-attention, layer 1, head 1"]
    assert browser.execute_script("return document.querySelectorAll('#comparetable tbody tr').length") >= 15
    assert "learned <b>&" in browser.execute_script("return document.querySelector('#comparetable thead').textContent")
    for metric in browser.execute_script(
        "return [...document.querySelectorAll('[data-metric]')].map((b) => b.dataset.metric)"
    ):
        browser.execute_script(f"document.querySelector('[data-metric={metric}]').click()")
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return document.documentElement.dataset.theme") in ("light", "dark")
    assert errors(browser) == []


def pressed(browser) -> str:
    return browser.execute_script("return document.querySelector('#metrics [aria-pressed=true]').dataset.metric")


def bare(name: str, density: float, roles: bool = False) -> AttentionStatistics:
    """Two heads without a role, the first of the given density; without roles altogether, if so wished."""
    sums = {
        "support": torch.tensor([[density * 100, 100.0]]),
        "pairs": torch.tensor([100.0]),
        "queries": torch.tensor([10.0]),
    }
    if roles:
        sums |= {"role_mass": torch.ones(1, 2, 13), "role_queries": torch.full((1, 13), 10.0)}
        sums["role_chance"] = torch.ones(1, 13)
    site = SiteStatistics("encoder_self", [LayerInfo("a", 0, 2)], {key: v.double() for key, v in sums.items()})
    return AttentionStatistics(name=name, sites={"encoder_self": site})


def test_heads_without_roles_are_coloured_by_what_tells_them_apart(browser, tmp_path):
    alphas = {"encoder_self": torch.tensor([[1.2, 1.9]], dtype=torch.float64)}
    for number, (statistics, wanted) in enumerate(
        [(bare("a", 0.3, True), "density"), (bare("b", 0.3), "density"), (bare("c", 1.0, True), "alpha")]
    ):
        statistics.alphas = alphas
        open_page(browser, write_report(statistics, tmp_path / str(number), figures=False))
        assert pressed(browser) == wanted
        offered = browser.execute_script(
            "return [...document.querySelectorAll('[data-metric]')].map((b) => b.dataset.metric)"
        )
        assert ("role" in offered) == (statistics.name != "b")
        # Nothing was measured that these panels show: they are away.
        for selector in (".viewer .controls", ".stage", *([".viewer .side"] if statistics.name == "b" else [])):
            assert browser.execute_script("return document.querySelector(arguments[0]).offsetHeight", selector) == 0
        assert browser.execute_script("return document.querySelectorAll('#figures, a[href=\"#figures\"]').length") == 0
        assert errors(browser) == []


def test_roles_come_first_where_heads_have_them(folder, browser):
    statistics = bare("named", 0.5, True)
    site = statistics.sites["encoder_self"]
    site.sums["role_mass"] *= 9.0
    site.sums["role_chance"] *= 0.5
    open_page(browser, write_report(statistics, folder / "named", figures=False))
    assert pressed(browser) == "role"


def test_scores_stand_beside_density(models, folder, browser):
    scores = {"accuracy": [0.912, 0.905], "perplexity": [12.3456, 11.0]}
    path = write_report(models, folder / "scored", scores=scores, figures=False)
    open_page(browser, path)
    boxes = browser.execute_script("return [...document.querySelectorAll('.sitebox')].map((box) => box.textContent)")
    assert "accuracy 0.912" in boxes[0] and "perplexity 12.35" in boxes[0] and "accuracy 0.905" in boxes[1]
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#comparetable tbody tr')].map((r) => r.textContent)"
    )
    assert rows[:2] == ["Whole modelaccuracy0.9120.905", "Whole modelperplexity12.3511"]
    record = json.loads((folder / "scored" / "report.json").read_text())
    assert [model["scores"]["accuracy"] for model in record["models"]] == [0.912, 0.905]
    again = AttentionStatistics.load(models[0].save(folder / "scored" / "sums.safetensors"))
    assert again.scores == {"accuracy": 0.912, "perplexity": 12.3456}
    for model in models:
        model.scores = {}
    for bad in ({"accuracy": [0.9]}, {"accuracy": 0.9}):
        with pytest.raises(ValueError, match="one number for each of the 2"):
            write_report(models, folder / "bad", scores=bad)


def test_jensen_shannon_is_spelled_out_where_it_first_stands(folder, browser):
    open_page(browser, folder / "two" / "both.html")
    text = browser.execute_script("return document.querySelector('main').innerText")
    assert "JS" not in text[: text.index("Jensen")]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", ["one/report.html", "two/both.html"])
def test_page_does_not_scroll_sideways(folder, browser, width, page):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    open_page(browser, folder / page)
    wide, seen = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= seen


def test_a_head_is_found_by_number_and_by_role(models, folder, browser):
    open_page(browser, folder / "one" / "report.html")

    def search(text):
        browser.execute_script(
            "const s = document.querySelector('.headsearch input'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            text,
        )
        missing = browser.execute_script(
            "return document.querySelector('.headsearch input').classList.contains('missing')"
        )
        return browser.execute_script("return document.querySelector('.viewer h3').textContent"), missing

    assert search("cross 0.3") == ("Cross-attention, layer 0, head 3", False)
    assert search("decoder 1.0") == ("Decoder self-attention, layer 1, head 0", False)
    assert search("9.9") == ("Decoder self-attention, layer 1, head 0", True)
    assert errors(browser) == []


def test_the_first_head_that_is_shown_does_not_rest(folder, browser, tmp_path):
    """However surely a head looks at the first token, another role is what one wants to see."""
    text = (folder / "one" / "report.html").read_text(encoding="utf-8")
    data = page_data(text)
    heads = data["models"][0]["heads"]
    named = {("decoder_self", 0, 0): ("first", 0.99), ("decoder_self", 1, 1): ("induction", 0.4)}
    places = zip(heads["site"], heads["layer"], heads["head"], strict=True)
    heads["role"], heads["role_strength"] = zip(*(named.get(place, ("", None)) for place in places), strict=True)
    page = tmp_path / "report.html"
    start = text.index('id="data">') + len('id="data">')
    page.write_text(text[:start] + json.dumps(data) + text[text.index("</script>", start) :], encoding="utf-8")
    open_page(browser, page)
    assert browser.execute_script("return document.querySelector('.viewer h3').textContent").endswith("layer 1, head 1")


def test_on_a_phone_the_arcs_come_before_the_map_and_stay_inside(folder, browser):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    open_page(browser, folder / "one" / "report.html")
    stage, maps, viewer = browser.execute_script(
        "return ['.stage', '.maps', '.viewer'].map((name) => document.querySelector(name).getBoundingClientRect().toJSON())"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert stage["bottom"] <= maps["top"]
    assert viewer["left"] - 1 <= stage["left"] and stage["right"] <= viewer["right"] + 1
