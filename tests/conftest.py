import os

# The variables have to be set before NumPy and torch start their thread pools. The workers share
# the cores, so each takes one thread unless the environment asks for another number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

from tests import on_device


def pytest_addoption(parser):
    on_device.add_options(parser)


def pytest_configure(config):
    on_device.install(config)


@pytest.fixture(autouse=True, scope="session")
def threads_of_the_environment():
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)  # whatever a snippet of the docs has set


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Groups of tests share what takes minutes to compute; some pairs of versions ignore them."""
    grouped = [item for item in items if item.get_closest_marker("xdist_group")]
    if config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in grouped):
        raise pytest.UsageError(
            f"pytest-xdist does not keep groups together with pytest {pytest.__version__}; install "
            "the versions of constraints.txt"
        )
