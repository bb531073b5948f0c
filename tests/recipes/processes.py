"""Runs recipes one after another in the processes of one group: their start costs more than a tiny run.

    torchrun --standalone --nproc_per_node 2 tests/recipes/processes.py '[{"recipe": "inflection", "arguments": [...]}]'

A job with ``stop_at`` is left after the step of that number, as if it had been killed. With ``HF_ENTMAX_TEST_FSDP`` set, the
processes take Accelerate's way for FSDP2, which it offers to GPUs only: gloo can do all that it needs on a CPU.
"""

import importlib
import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from common.settings import parse
from common.trainer import Pace


class Stopped(Exception):
    """A run was left in the middle."""


def use_fsdp() -> None:
    start = AcceleratorState.__init__

    def started(self, *args, **kwargs) -> None:
        start(self, *args, **kwargs)
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = kwargs.get("fsdp_plugin") or FullyShardedDataParallelPlugin()

    AcceleratorState.__init__ = started
    begin = Pace.on_step_begin

    def checked(self, args, state, control, model, **kwargs):
        kinds = {type(parameter).__name__ for parameter in model.parameters()}
        assert kinds == {"DTensor"}, kinds
        begin(self, args, state, control)

    Pace.on_step_begin = checked


def run(recipe: str, arguments: list[str], stop_at: int = 0) -> None:
    end = Pace.on_step_end

    def end_and_leave(self, args, state, control, **kwargs):
        end(self, args, state, control, **kwargs)
        if stop_at and state.global_step == stop_at + 1:  # the checkpoint of the step before is written
            raise Stopped

    Pace.on_step_end = end_and_leave
    module = importlib.import_module(recipe)
    try:
        module.main(parse(module.Settings, module.__doc__, arguments))
    except Stopped:
        pass
    finally:
        Pace.on_step_end = end
        AcceleratorState._reset_state(reset_partial_state=True)  # the group of processes stays


if os.environ.get("HF_ENTMAX_TEST_FSDP"):
    use_fsdp()
Accelerator.end_training = lambda self: None
for job in json.loads(sys.argv[1]):
    run(**job)
torch.distributed.destroy_process_group()
