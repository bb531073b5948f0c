"""Which backend runs, and what is said when one cannot."""

import inspect
import types

import fresh as fresh_process
import pytest
import torch

from hf_entmax.ops import available_backends, backends, dense, entmax_attention
from hf_entmax.ops.options import AttentionOptions


@pytest.fixture
def fresh(monkeypatch):
    """Forget which kernels were loaded."""
    monkeypatch.setattr(backends, "_loaded", {})


def tensors(device="cpu", dtype=torch.float32):
    return [torch.randn(1, 2, 3, 4, dtype=dtype, device=device) for _ in range(3)]


def fake(name, monkeypatch, reason=None):
    """Put a kernel in the place of a package: it records its calls and answers like the dense path."""
    calls = []

    def attention(*arguments):
        calls.append(arguments[-1])
        return dense.attention(*arguments)

    module = types.ModuleType(f"fake_{name}")
    module.attention = attention
    module.unsupported = lambda *arguments: reason
    monkeypatch.setitem(backends._loaded, name, module)
    return calls


def test_the_report_names_every_backend():
    report = available_backends()
    assert list(report) == ["torch", "numba", "triton"]
    assert report["torch"].startswith("available")
    for sentence in report.values():
        assert sentence.startswith(("available: ", "unavailable: "))


def test_a_missing_library_is_named_with_what_to_install(fresh, monkeypatch):
    find_spec = backends.importlib.util.find_spec
    monkeypatch.setattr(
        backends.importlib.util, "find_spec", lambda n: None if n in ("numba", "triton") else find_spec(n)
    )
    report = available_backends()
    assert report["numba"] == "unavailable: numba is not installed (pip install 'hf_entmax[cpu]')"
    assert "hf_entmax[gpu]" in report["triton"]
    with pytest.raises(ValueError, match=r"backend='numba' cannot run here: numba is not installed \(pip install"):
        entmax_attention(*tensors(), 1.5, backend="numba")
    # auto goes on without it.
    out, _ = entmax_attention(*tensors(), 1.5)
    assert out.shape == (1, 2, 3, 4)


def test_triton_without_a_device(fresh, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if backends.importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    assert available_backends()["triton"] == "unavailable: there is no CUDA device"
    with pytest.raises(ValueError, match="there is no CUDA device"):
        entmax_attention(*tensors(), 1.5, backend="triton")


def test_auto_takes_the_kernel_of_the_device(fresh, monkeypatch):
    numba, triton = fake("numba", monkeypatch), fake("triton", monkeypatch)
    options = {"is_causal": True, "softcap": 2.0, "key_padding_mask": torch.ones(1, 3, dtype=torch.bool)}
    query, key, value = tensors()
    entmax_attention(query, key, value, 1.5, **options)
    assert len(numba) == 1 and not triton
    # Nothing is lost on the way.
    assert {name: getattr(numba[0], name) for name in options} == options
    arguments = set(inspect.signature(entmax_attention).parameters) - {"query", "key", "value", "alpha", "backend"}
    # The largest alpha is a promise of the integration, a sink is a key by now: neither is an argument.
    assert set(vars(numba[0])) == arguments | {"alpha_max", "sink"} and numba[0].sink is None
    entmax_attention(*tensors("meta"), 1.5)
    assert len(numba) == 1 and not triton
    assert backends.kernel_module("triton", query, key, value, 1.5, AttentionOptions()) is backends._loaded["triton"]


def test_auto_falls_back_and_an_explicit_choice_does_not(fresh, monkeypatch):
    calls = fake("numba", monkeypatch, reason="softcap is not supported")
    query, key, value = tensors()
    out, _ = entmax_attention(query, key, value, 1.5, softcap=2.0)
    torch.testing.assert_close(out, entmax_attention(query, key, value, 1.5, softcap=2.0, backend="torch")[0])
    with pytest.raises(ValueError, match="backend='numba' cannot be used: softcap is not supported"):
        entmax_attention(query, key, value, 1.5, softcap=2.0, backend="numba")
    assert not calls


def test_a_package_that_cannot_be_imported_is_reported(fresh, monkeypatch):
    def broken(name):
        raise ImportError("its compiler is too old")

    monkeypatch.setattr(backends.importlib, "import_module", broken)
    out, _ = entmax_attention(*tensors(), 1.5)
    assert out.shape == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="numba_cpu cannot be imported: its compiler is too old"):
        entmax_attention(*tensors(), 1.5, backend="numba")


def test_the_real_numba_kernel_agrees_with_the_torch_path():
    if not available_backends()["numba"].startswith("available"):
        pytest.skip(available_backends()["numba"])
    query, key, value = tensors()
    alpha = torch.tensor([1.2, 1.8])
    out, _ = entmax_attention(query, key, value, alpha, backend="numba")
    torch.testing.assert_close(out, entmax_attention(query, key, value, alpha, backend="torch")[0], atol=2e-6, rtol=0)
    double = [tensor.double() for tensor in (query, key, value)]
    with pytest.raises(ValueError, match=r"query is torch\.float64"):
        entmax_attention(*double, alpha, backend="numba")
    assert entmax_attention(*double, alpha)[0].dtype == torch.float64


def test_importing_ops_loads_no_compiler():
    code = "import sys, hf_entmax.ops as ops; ops.available_backends(); print(sorted({'numba', 'triton'} & set(sys.modules)))"
    result = fresh_process.run(code, after="torch")
    assert result.stdout.strip() == "[]", result.stderr


def test_dtype_of_the_output_follows_the_value():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        query, key, value = tensors(dtype=dtype)
        assert entmax_attention(query, key, value, 1.5)[0].dtype == dtype


@pytest.mark.parametrize("version", ["0.59.1", "0.69.0", "1.0"])
def test_another_numba_is_not_used_and_this_is_said_once(version, monkeypatch, caplog):
    monkeypatch.setattr(backends, "_loaded", {})
    real = backends.importlib.metadata.version
    monkeypatch.setattr(backends.importlib.metadata, "version", lambda name: version if name == "numba" else real(name))
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object())
    assert f"numba {version} is installed" in available_backends()["numba"]
    query, key, value = tensors()
    for _ in range(2):
        out, _weights = entmax_attention(query, key, value, 1.5)
        assert torch.equal(out, entmax_attention(query, key, value, 1.5, backend="torch")[0])
    assert [r.getMessage() for r in caplog.records].count(caplog.messages[0]) == len(caplog.messages) == 1
    assert "numba>=0.60,<0.69" in caplog.text
    with pytest.raises(ValueError, match=r"pip install 'numba>=0\.60,<0\.69'"):
        entmax_attention(query, key, value, 1.5, backend="numba")


def test_the_versions_of_numba_are_those_of_the_installation():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (first, after) = backends._VERSIONS["numba"]
    assert f'cpu = ["numba>={first[0]}.{first[1]},<{after[0]}.{after[1]}"]' in text


@pytest.mark.parametrize("fault", [None, "off", "nan", "raises"])
def test_on_a_processor_that_was_never_tried_the_kernel_is_checked_once(fault, fresh, monkeypatch, caplog):
    numba_cpu = pytest.importorskip("hf_entmax.ops.numba_cpu")
    right, calls = numba_cpu.attention, []

    def attention(*arguments):
        calls.append(1)
        if fault == "raises":
            raise RuntimeError("illegal instruction")
        out, weights = right(*arguments)
        return out * {"off": 1.01, "nan": float("nan")}.get(fault, 1.0), weights

    monkeypatch.setattr(numba_cpu, "attention", attention)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    query, key, value = tensors()
    expected = entmax_attention(query, key, value, 1.5, backend="torch")
    checked = len(calls)
    for _ in range(2):
        torch.testing.assert_close(entmax_attention(query, key, value, 1.5), expected)
    if fault is None:
        assert len(calls) > checked and not caplog.text
        return
    assert caplog.text.count("backend is not used") == 1 and "aarch64" in caplog.text
    with pytest.raises(ValueError, match="its kernel is wrong"):
        entmax_attention(query, key, value, 1.5, backend="numba")
