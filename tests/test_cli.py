import dataclasses
import json
import subprocess
import sys
from typing import get_type_hints

import fresh
import pytest
import tiny_models as tiny
import transformers as tf
import typer
from typer.testing import CliRunner

import hf_entmax
from hf_entmax import alphas, entmax_config, is_patched, patch_model
from hf_entmax.cli import app
from hf_entmax.options import AnalysisOptions, BenchOptions

run = CliRunner().invoke


def test_patch_writes_a_loadable_model(tmp_path):
    tiny.build("bart").save_pretrained(tmp_path / "plain")
    arguments = [
        "--alpha-init",
        "1.4",
        "--site",
        "cross",
        "--site",
        "decoder_self",
        "--layer",
        "1",
        "--output-alpha",
        "1.5",
    ]
    result = run(app, ["patch", str(tmp_path / "plain"), "--out", str(tmp_path / "sparse"), *arguments])
    assert result.exit_code == 0, result.output
    model = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "sparse")
    config = entmax_config(model)
    assert (config.sites, config.layers, config.output_alpha) == (("cross", "decoder_self"), (1,), 1.5)
    assert alphas(model)["cross"][1].tolist() == pytest.approx([1.4] * 4)


def test_patch_with_a_fixed_alpha_and_a_class(tmp_path):
    tiny.build("bert").save_pretrained(tmp_path / "plain")
    arguments = ["--alpha", "2", "--auto-class", "AutoModelForSequenceClassification"]
    result = run(app, ["patch", str(tmp_path / "plain"), "--out", str(tmp_path / "sparse"), *arguments])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "sparse/config.json").read_text())["entmax_config"]["alpha"] == 2.0
    assert is_patched(tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "sparse"))


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path):
    tiny.build("gpt2").save_pretrained(tmp_path / "plain")
    out = tmp_path / "sparse"
    for arguments, word in (
        (["--alpha", "lerned"], "lerned"),
        (["--alpha", "0.3"], "alpha=0.3"),
        (["--site", "cross"], "cross"),
        (["--auto-class", "AutoModelForEverything"], "AutoModelForEverything"),
        (["--alpha", "[cpu][/x]"], "'[cpu][/x]'"),  # no markup of the console
    ):
        result = fresh.run_module("hf_entmax.cli", "patch", str(tmp_path / "plain"), "--out", str(out), *arguments)
        assert result.returncode == 2 and word in result.stdout and "Traceback" not in result.stdout + result.stderr
        assert not out.exists()


def test_nothing_is_overwritten(tmp_path):
    tiny.build("gpt2").save_pretrained(tmp_path / "plain")
    before = (tmp_path / "plain/config.json").read_text()
    result = run(app, ["patch", str(tmp_path / "plain"), "--out", str(tmp_path / "plain")])
    assert isinstance(result.exception, ValueError) and "not empty" in str(result.exception)
    assert (tmp_path / "plain/config.json").read_text() == before


def test_doctor_tells_versions_and_backends():
    result = run(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("transformers", "torch", "numba", "triton", "works"):
        assert word in result.output


def test_doctor_names_the_extra_to_install(monkeypatch):
    from hf_entmax.ops import backends

    real = backends.importlib.util.find_spec
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    result = run(app, ["doctor"])
    assert "pip install 'hf_entmax[gpu]'" in " ".join(result.output.replace("│", " ").split())


def test_doctor_compiles_ahead(monkeypatch):
    pytest.importorskip("numba")
    from hf_entmax.ops.numba_cpu import kernels

    done = []
    monkeypatch.setattr(kernels, "compile_all", lambda report: (report("forward"), done.append(True)))
    result = run(app, ["doctor", "--compile"])
    assert result.exit_code == 0 and done and "CPU kernels: compiled, kept in" in " ".join(result.output.split())


def test_bench_prints_ratios():
    result = run(app, ["bench", "--length", "32", "--repeats", "1", "--implementation", "eager_softmax"])
    assert result.exit_code == 0, result.output + str(result.exception)
    assert "eager_softmax" in result.output and "ours_numba" in result.output


def test_every_command_has_help():
    result = run(app, ["--help"])
    for command in ("quickstart", "patch", "analyze", "bench", "doctor"):
        assert command in result.output
        assert run(app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "../a/b"])
def test_patch_names_a_folder_that_is_not_there(tmp_path, name):
    for arguments in (["patch", name, "--out", str(tmp_path / "sparse")], ["doctor", name]):
        result = run(app, arguments)
        assert result.exit_code == 1
        assert f"There is no folder {name}" in str(result.exception)


def test_doctor_judges_a_model_by_its_configuration(tmp_path):
    said = run(app, ["doctor", "siglip_vision_model"])
    assert said.exit_code == 0, said.output
    assert "SiglipVisionModel can be patched" in said.output and "Keeps a softmax: head.attention" in said.output
    patch_model(tiny.build("bart")).save_pretrained(tmp_path)
    said = run(app, ["doctor", str(tmp_path)])
    assert said.exit_code == 0 and "Nothing keeps a softmax." in said.output
    assert [line.split()[1::2] for line in said.output.splitlines() if "cross" in line] == [["cross", "2", "8"]]
    said = run(app, ["doctor", "blt_patcher"])  # AutoModel knows none
    assert said.exit_code == 0 and "BltPatcher can be patched" in said.output
    said = run(app, ["doctor", "bart"])
    assert "BartForConditionalGeneration" in said.output and "cross" in said.output
    said = run(app, ["doctor", "maskformer-swin"])
    assert said.exit_code == 1 and "cannot be patched" in said.output.replace("\n", " ")
    said = run(app, ["doctor", "nemotron"])  # a default configuration that is not whole
    assert isinstance(said.exception, ValueError) and "NemotronForCausalLM cannot be built" in str(said.exception)
    said = run(app, ["doctor", "sam_mask_decoder"])
    assert "the model that it is a part of" in str(said.exception)
    refused = run(app, ["doctor", "gptj"])
    assert refused.exit_code == 1 and "cannot be patched" in refused.output.replace("\n", " ")


def test_help_and_version_load_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_entmax.cli import app\n"
        "run = CliRunner().invoke\n"
        "print(run(app, ['--version']).output, run(app, ['--help']).exit_code, run(app, ['analyze', '--help']).exit_code)\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, loaded = done.stdout.split("\n", 1)
    assert hf_entmax.__version__ in version and loaded.split("\n")[0].endswith("0 0") and "[]" in loaded, done.stdout


def test_doctor_does_not_wait_for_a_hub_that_cannot_be_reached(monkeypatch):
    import socket

    import transformers

    tried = []

    def refuse(address, timeout=None):
        tried.append(address)
        raise OSError("no route")

    def local(name, local_files_only=False, **options):
        assert local_files_only, "would go to the network"
        raise OSError("not in the cache")

    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", local)
    result = run(app, ["doctor", "someone/model"])
    assert len(tried) == 1 and isinstance(result.exception, FileNotFoundError)
    assert "cannot be reached" in str(result.exception)


@pytest.mark.parametrize(("command", "options"), [("analyze", AnalysisOptions), ("bench", BenchOptions)])
def test_each_option_stands_once_and_is_on_the_command_line(command, options):
    found = {parameter.name: parameter for parameter in typer.main.get_command(app).commands[command].params}
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        if field.name == "sharpness":
            continue  # for callers from Python
        assert found[field.name].help == hints[field.name].__metadata__[0].help
        assert found[field.name].default == field.default or found[field.name].default in (None, ())


def test_serve_hands_its_options_to_the_server_of_transformers(monkeypatch):
    from hf_entmax.generation.serving import hooks, server

    for module in (hooks, server):
        monkeypatch.setattr(module, "has_server", lambda: False)
    assert "hf_entmax[serving]" in str(run(app, ["serve", "folder"]).exception)
    assert "the server needs" in hooks.state()
    monkeypatch.undo()
    if hooks.has_server():
        assert "--cb-num-blocks" in run(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
