"""Every test of a recipe starts as a script does: Accelerate has looked at no process yet."""

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def forget_processes():
    """Forget which processes there are; call it between the runs of one test."""

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)

    forget()
    yield forget
    forget()
