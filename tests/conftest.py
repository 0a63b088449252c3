import os

# Before NumPy and torch start their thread pools: the workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_worker():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)  # whatever a snippet of the docs has set
