"""The table of tiles that a machine was tuned for: read where it fits, refused in words where it does not."""

import json
import logging

import pytest
import torch

from hf_entmax.ops.triton_gpu import blocks
from hf_entmax.ops.triton_gpu.blocks import Blocks, attention_blocks

TUNED = Blocks(128, 32, 8, 3, 4, 1)
BUILT_IN = attention_blocks(512, 64, 64, torch.bfloat16)


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Write a table and have it read."""

    def write(content):
        path = tmp_path / "blocks.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        monkeypatch.setenv(blocks.VARIABLE, str(path))
        blocks.tuned_blocks.cache_clear()

    yield write
    monkeypatch.undo()
    blocks.tuned_blocks.cache_clear()


def test_a_table_is_used_where_it_says(table):
    assert BUILT_IN != TUNED
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "any"
    table({"device": device, "blocks": {"half-64": TUNED._asdict()}})
    assert attention_blocks(512, 64, 64, torch.bfloat16) == attention_blocks(512, 16, 40, torch.float16) == TUNED
    # One query of decoding keeps its low tile; other widths and dtypes keep theirs.
    assert attention_blocks(1, 64, 64, torch.bfloat16).rows == 16
    for width, dtype in ((80, torch.bfloat16), (64, torch.float32)):
        assert attention_blocks(512, width, width, dtype) != TUNED


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        {"blocks": {}},
        {"device": "any", "blocks": {"half-64": {"rows": 64}}},
        {"device": "any", "blocks": {"half-64": [64, 64, 4, 3, 4, 2]}},
        {"device": "any", "blocks": {"fp16-64": TUNED._asdict()}},
        {"device": "any", "blocks": {"half-96": TUNED._asdict()}},
        {"device": "any", "blocks": {"half-64": TUNED._replace(rows=96)._asdict()}},
        {"device": "any", "blocks": {"half-64": TUNED._replace(stages=0)._asdict()}},
        {"device": "any", "blocks": {"half-64": TUNED._replace(warps="8")._asdict()}},
    ],
)
def test_a_wrong_table_is_named_once_and_not_used(table, content, caplog):
    table(content)
    with caplog.at_level(logging.WARNING, logger=blocks.__name__):
        for _ in range(3):
            assert attention_blocks(512, 64, 64, torch.bfloat16) == BUILT_IN
    (record,) = caplog.records
    assert blocks.VARIABLE in record.getMessage() and "built-in" in record.getMessage()


def test_a_table_that_is_not_there(monkeypatch, table, caplog):
    table("{}")
    monkeypatch.setenv(blocks.VARIABLE, "/nowhere/blocks.json")
    blocks.tuned_blocks.cache_clear()
    assert attention_blocks(512, 64, 64, torch.bfloat16) == BUILT_IN and len(caplog.records) == 1


def test_a_table_of_another_device(monkeypatch, table, caplog):
    table({"device": "NVIDIA H200", "blocks": {"half-64": TUNED._asdict()}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert attention_blocks(512, 64, 64, torch.bfloat16) == BUILT_IN
    assert "NVIDIA H200" in caplog.text and "NVIDIA H100" in caplog.text
    # Each device is told apart: the one that it was measured on takes it.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert attention_blocks(512, 64, 64, torch.bfloat16) == TUNED
