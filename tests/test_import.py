import subprocess
import sys

import fresh
import pytest


def test_import_loads_nothing_heavy():
    code = "import sys, transformers; before = set(sys.modules); import hf_entmax; print(*sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    heavy = {"torch", "numba", "triton", "matplotlib", "typer", "jinja2"}
    assert not heavy & {name.split(".")[0] for name in run.stdout.split()}


@pytest.mark.slow
def test_import_before_and_after_transformers_registers_the_attention():
    check = "from transformers import AttentionInterface; assert 'hf_entmax' in AttentionInterface().valid_keys()"
    for after, code in (
        ("torch", f"import hf_entmax; import transformers.modeling_utils; {check}"),
        ("transformers", f"import transformers.modeling_utils; import hf_entmax; {check}"),
        ("torch", f"import hf_entmax; hf_entmax.patch_model; {check}"),
    ):
        run = fresh.run(code, after=after)
        assert run.returncode == 0, run.stderr


def test_with_another_transformers_the_mathematics_works_and_the_rest_says_what_it_needs():
    code = """
import transformers.modeling_utils as m
del m.PreTrainedModel._adjust_missing_and_unexpected_keys
import hf_entmax, torch
from hf_entmax.ops import entmax
assert abs(float(entmax(torch.randn(5), 1.5).sum()) - 1) < 1e-5
try:
    hf_entmax.patch_model
except ImportError as error:
    assert "transformers>=5.18,<6" in str(error), error
else:
    raise SystemExit("no error")
"""
    run = fresh.run(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_without_transformers_the_mathematics_works():
    code = """
import sys
sys.modules["transformers"] = None
import hf_entmax, torch
from hf_entmax.ops import entmax
from hf_entmax.losses import entmax_loss
entmax_loss(torch.randn(3, 5), torch.tensor([0, 1, 2]))
try:
    hf_entmax.patch_model
except ImportError as error:
    assert "transformers>=5.18,<6" in str(error), error
else:
    raise SystemExit("no error")
"""
    run = fresh.run(code, after="torch")
    assert run.returncode == 0, run.stderr


def test_public_names_are_all_there():
    import hf_entmax

    for name in hf_entmax.__all__:
        assert getattr(hf_entmax, name) is not None
    try:
        getattr(hf_entmax, "patchmodel")  # noqa: B009
    except AttributeError as error:
        assert "patch_model" in str(error)


@pytest.mark.slow
def test_any_part_can_be_imported_first():
    code = """
import os, torch, transformers
for name in ("integration.discovery", "integration.observe", "integration.interface", "analysis"):
    child = os.fork()
    if not child:
        __import__(f"hf_entmax.{name}")
        import hf_entmax
        hf_entmax.patch_model
        os._exit(0)
    assert not os.waitpid(child, 0)[1], name
"""
    run = fresh.run(code)
    assert run.returncode == 0, run.stderr
