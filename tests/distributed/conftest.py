"""A graph, and the same in two parts."""

import numpy as np
import pytest
import torch.distributed as dist

from tests.distributed.partitions import EDGES, NODES
from tests.distributed.ranks import make_data, write_data


@pytest.fixture
def data():
    return make_data()


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path, data):
    write_data(tmp_path / "p", data, 2, times=True, weights=True)
    return tmp_path / "p"


@pytest.fixture
def edges():
    """Ends of random edges, `[2, EDGES]`."""
    return np.random.default_rng(0).integers(0, NODES, (2, EDGES))
