"""Attributes that are an `Index` of PyG, a tensor that knows how many values there are."""

import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.index import Index

from pyg_direct import NeighborLoader
from tests.batches import make_data


@pytest.mark.parametrize("prefetch", [0, 2])
def test_they_stay_what_they_are(real_device, prefetch):
    data = make_data(y=Index(torch.arange(70) % 7, dim_size=7), edge_type=Index(torch.arange(600) % 5, dim_size=5))

    for batch in NeighborLoader(data, [3], batch_size=16, device=real_device, prefetch=prefetch):
        assert (type(batch.y), batch.y.dim_size, batch.y.device.type) == (Index, 7, real_device.type)
        assert batch.y.as_tensor().tolist() == (batch.n_id % 7).tolist()
        assert batch.edge_type.as_tensor().tolist() == (batch.e_id % 5).tolist()


@pytest.mark.parametrize("super_batch", [None, 1])
def test_those_of_types_do_too(real_device, super_batch):
    data = HeteroData()
    data["a"].x, data["a"].y = torch.ones(70, 2), Index(torch.arange(70) % 7, dim_size=7)
    data["a", "to", "a"].edge_index = make_data().edge_index

    for batch in NeighborLoader(data, [3], "a", batch_size=16, device=real_device, super_batch=super_batch):
        assert (type(batch["a"].y), batch["a"].y.dim_size) == (Index, 7)
        assert batch["a"].y.as_tensor().tolist() == (batch["a"].n_id % 7).tolist()
