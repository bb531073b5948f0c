"""A kind of GPU is tried before it is used, and what is wrong there costs speed, not a crash or a wrong number."""

import json
import types

import pytest
import torch

from hf_entmax.ops import backends, dense, self_check

first_use = pytest.importorskip("hf_entmax.ops.triton_gpu.first_use")
DEVICE = torch.device("cuda", 0)


def planted(fault):
    """Kernels that are the dense path, but for one fault in the output or in a gradient."""

    def attention(query, key, value, alpha, options):
        if fault == "gradient" and isinstance(alpha, torch.Tensor):
            alpha = alpha.detach() + 1.01 * (alpha - alpha.detach())
        out, weights = dense.attention(query.double(), key.double(), value.double(), alpha, options)
        if fault == "raises":
            raise RuntimeError("an illegal memory access was encountered")
        out = out * {"off": 1.01, "nan": float("nan")}.get(fault, 1.0)
        return out.to(query.dtype), weights

    def exact(query, sketch, key, value, alpha, options):
        out, _ = attention(query, key, value, alpha, options)
        if fault == "decoding":  # the last page's keys are lost
            out, _ = attention(query, key[:, :, :-64], value[:, :, :-64], alpha, options)
        return out, None

    return types.SimpleNamespace(attention=attention, exact_sparse_attention=exact, unsupported=lambda *arguments: None)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(None, None), ("off", "output differs by 0.01 "), ("nan", "output differs by nan"), ("raises", "illegal memory"), ("gradient", "grad alpha"),
     ("decoding", "in the case 'exact decoding' its output differs")],
)  # fmt: skip
def test_planted_faults_are_found(fault, said):
    found = self_check.fault(planted(fault), torch.device("cpu"))
    assert (found is None) if said is None else (said in found)


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine whose only GPU was never seen."""
    monkeypatch.setitem(backends._loaded, "triton", planted(None))
    monkeypatch.setattr(backends, "_refused_on", {})
    monkeypatch.setattr(first_use, "_known", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def chosen(name):
    query = types.SimpleNamespace(device=DEVICE)
    return backends.kernel_module(name, query, None, None, 1.5, None)


def test_a_fault_costs_one_warning_and_the_dense_path(one_gpu, monkeypatch, caplog):
    monkeypatch.setattr(first_use, "fault_of", lambda index: "its output differs")
    for _ in range(2):
        assert chosen("auto") is None
    assert caplog.text.count("backend is not used") == 1
    assert (
        "on this GPU (a GPU) its kernel is wrong: its output differs" in caplog.text and "doctor --check" in caplog.text
    )
    with pytest.raises(ValueError, match="cannot be used: on this GPU"):
        chosen("triton")


def test_what_was_right_is_remembered_and_a_fault_is_not(one_gpu, monkeypatch, tmp_path):
    looked, answers = [], [None, "wrong"]
    monkeypatch.setattr(first_use, "_place", lambda: tmp_path / "folder" / "checked.json")
    monkeypatch.setattr(first_use, "_examine", lambda index: looked.append(index) or answers[len(looked) - 1])
    monkeypatch.setattr(first_use, "_key", lambda index: "a GPU, driver 1")
    for _ in range(2):
        assert chosen("auto") is backends._loaded["triton"]
    first_use._known.clear()  # as in the next process
    assert chosen("triton") is backends._loaded["triton"] and looked == [0]
    monkeypatch.setattr(first_use, "_key", lambda index: "a GPU, driver 2")
    for _ in range(2):  # of this process, and of the next
        first_use._known.clear()
        answers[1:] = ["wrong", "wrong"]
        assert first_use.fault_of(0) == "wrong"
    assert looked == [0, 0, 0] and json.loads((tmp_path / "folder" / "checked.json").read_text()) == ["a GPU, driver 1"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("""echo noise; echo '{"fault": null}'""", None),
        ("""echo '{"fault": "its output differs"}'""", "its output differs"),
        ("echo 'CUDA error: misaligned address' >&2; kill -SEGV $$", "ended with -11: CUDA error: misaligned address"),
        ("exec sleep 30", "did not end within 1 s"),
        ("exit 3", "tried here"),
    ],
)
def test_a_crash_stays_in_the_process_that_tries(script, said, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(first_use.sys, "executable", str(python))
    monkeypatch.setattr(first_use, "_SECONDS", 1 if "sleep" in script else 20)
    monkeypatch.setattr(first_use, "fault", lambda module, device: f"tried here, on {device}")
    found = first_use._examine(0)
    assert (found is None) if said is None else (said in found)


def test_nothing_is_tried_while_a_graph_is_captured(one_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(first_use, "_examine", lambda index: pytest.fail("tried"))
    assert chosen("auto") is backends._loaded["triton"] and not first_use._known
