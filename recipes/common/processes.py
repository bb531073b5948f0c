"""Says how many processes run, and notices where a launcher was asked for more."""

from __future__ import annotations

import os

from accelerate import Accelerator

#: What torchrun and the programs of MPI call the number of processes that they start.
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")

HOW = (
    "On CPUs `accelerate launch` starts one process however many it is asked for, unless it is configured with MPI "
    "(recipes/configs/accelerate/two_cpu_processes.yaml); without MPI use `torchrun --standalone --nproc_per_node N recipes/...`."
)


def say_processes(recipe: str, accelerator: Accelerator | None = None) -> None:
    """Print how many processes run a recipe, on what.

    Args:
        recipe: its name.
        accelerator: the group of its processes; None for a recipe that one process runs.

    Raises:
        ValueError: if fewer run than were asked for.
    """
    running = accelerator.num_processes if accelerator else 1
    check_processes(running)
    if accelerator is None or accelerator.is_main_process:
        print(f"{recipe}: {_count(running)}{f' on {accelerator.device.type}' if accelerator else ''}.", flush=True)


def check_processes(running: int) -> None:
    """Check that as many processes share the work as the launcher was asked for.

    Args:
        running: size of the group that the processes have formed.

    Raises:
        ValueError: if fewer run.
    """
    asked = max((int(os.environ[name]) for name in SIZES if os.environ.get(name, "").isdecimal()), default=1)
    if asked > running:
        raise ValueError(
            f"{asked} processes were asked for, and this one works as one of {_count(running)}: each would train "
            f"a model of its own. {HOW}"
        )
    # Accelerate gives its script the address of the group where it was asked for several processes, and without MPI it then
    # starts one on a CPU: nobody has a rank in that group.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    if running == 1 and launched and not any(name in os.environ for name in SIZES):
        raise ValueError(
            f"`accelerate launch` was asked for several processes and started one. {HOW} If one is meant, give "
            "--num_processes 1 and unset MASTER_ADDR and MASTER_PORT."
        )


def _count(processes: int) -> str:
    return f"{processes} process{'es' if processes != 1 else ''}"
