import gc
import os

# Before transformers is imported anywhere: no network, no chatter.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import fresh
import pytest
import torch

fresh.start()


def pytest_collection_finish():
    # Hundreds of thousands of objects of torch and Transformers that stay: no collection need look at them again.
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)
