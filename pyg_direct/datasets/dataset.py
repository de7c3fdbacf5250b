"""The one container that every generator and loader of this room returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_geometric.data import Data


@dataclass(frozen=True, eq=False, repr=False)
class NodeDataset:
    """A graph with features, one class per node and a split of the nodes.

    Attributes:
        name: What the graph is called.
        num_nodes: N.
        num_classes: Number of classes.
        edge_index: Source (row 0) and target (row 1) of every edge, int64 or int32 `[2, E]`; an undirected
            graph holds each edge in both directions.
        x: Node features, floating point `[N, F]`, or None.
        y: Class of every node, int64 `[N]`; -1 where it is unknown.
        train_idx, val_idx, test_idx: Nodes of the three parts, int64 `[n]` each, disjoint.
    """

    name: str
    num_nodes: int
    num_classes: int
    edge_index: Tensor
    x: Tensor | None
    y: Tensor
    train_idx: Tensor
    val_idx: Tensor
    test_idx: Tensor

    @property
    def num_edges(self) -> int:
        """E, every direction of an undirected edge counted."""
        return self.edge_index.shape[1]

    @property
    def num_features(self) -> int:
        """F, or 0 without features."""
        return 0 if self.x is None else self.x.shape[1]

    def to(self, device: str | int | torch.device) -> NodeDataset:
        """The same dataset with every tensor on `device`; tensors that are there already are shared.

        Args:
            device: What `Tensor.to` takes.
        """
        names = ("edge_index", "x", "y", "train_idx", "val_idx", "test_idx")
        tensors = {name: getattr(self, name) for name in names}
        moved = {name: value.to(device) for name, value in tensors.items() if value is not None}
        return replace(self, **moved)

    def to_data(self) -> Data:
        """PyG's `Data`: `x`, `edge_index` int64, `y`, and bool `train_mask`, `val_mask`, `test_mask`."""
        from pyg_direct.datasets.pyg import make_data  # here, so that this room is of use without PyG

        return make_data(self)

    def __repr__(self) -> str:
        """One line of sizes instead of the tensors."""
        return (
            f"NodeDataset(name={self.name!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges}, "
            f"num_features={self.num_features}, num_classes={self.num_classes})"
        )
