"""The file of this room that knows PyG's containers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.datasets.dataset import NodeDataset


def make_data(dataset: NodeDataset) -> Data:
    """`Data` that shares the tensors of `dataset`; the split becomes masks, and int32 edges become int64."""
    data = Data(edge_index=dataset.edge_index.long(), y=dataset.y)
    if dataset.x is None:
        data.num_nodes = dataset.num_nodes
    else:
        data.x = dataset.x
    data.train_mask = make_mask(dataset.train_idx, dataset.num_nodes)
    data.val_mask = make_mask(dataset.val_idx, dataset.num_nodes)
    data.test_mask = make_mask(dataset.test_idx, dataset.num_nodes)
    return data


def make_mask(idx: Tensor, num_nodes: int) -> Tensor:
    """Bool `[N]`, true at the nodes `idx`."""
    mask = torch.zeros(num_nodes, dtype=torch.bool, device=idx.device)
    mask[idx] = True
    return mask
