import collections
import gc
import os

# Before transformers is imported anywhere: no network, no chatter.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# Processes of tests share the cores: threads that spin while others have their core make everything many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import fresh
import pytest
import torch

fresh.start()
CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    """Files of slow tests first, so that no process is left with a long one when the others have nothing to do."""
    slow, number = collections.Counter(), collections.Counter()
    for item in items:
        slow[item.path] += item.get_closest_marker("slow") is not None
        number[item.path] += 1
    items.sort(key=lambda item: -slow[item.path] / number[item.path])


def pytest_collection_finish():
    # Hundreds of thousands of objects of torch and Transformers that stay: no collection need look at them.
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _same_random_numbers():
    # Without a GPU `torch.manual_seed` only adds a note of the stack for every kind of device: milliseconds for each test.
    (torch.manual_seed if CUDA else torch.default_generator.manual_seed)(0)


@pytest.fixture
def nothing_stays_registered():
    """Forget the statistics and roles that a test registers; call it to forget them earlier."""
    from hf_entmax.analysis.metrics import registry

    tables = registry.STATISTICS, registry.ROLES, registry.ROLE_NAMES, registry.ROLE_PHRASES
    kept = [(table, dict(table)) for table in tables]

    def forget():
        for table, before in kept:
            table.clear()
            table.update(before)

    yield forget
    forget()
