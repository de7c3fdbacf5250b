"""What epochs of models are measured against."""

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.bench.models import _count_host_bytes
from pyg_direct.loader.neighbor import NeighborLoader


@pytest.mark.parametrize(("placement", "cache", "least", "most"),
                         [("cpu", None, 1, 1),
                          pytest.param("unified", None, 1, 1, marks=pytest.mark.gpu),
                          pytest.param("unified", "20%", 0.05, 0.95, marks=pytest.mark.gpu),
                          pytest.param("cuda", None, 0, 0, marks=pytest.mark.gpu)])  # fmt: skip
def test_bytes_of_rows_on_the_host_are_counted(placement, cache, least, most):
    data = Data(x=torch.rand(500, 16), edge_index=torch.randint(0, 500, (2, 5000)))
    loader = NeighborLoader(data, [5, 5], torch.arange(100), batch_size=50, placement=placement, feature_cache=cache)
    batch = next(iter(loader))

    found = _count_host_bytes(loader, batch, 6) / (batch.x.numel() * 4)

    assert least <= found <= most
