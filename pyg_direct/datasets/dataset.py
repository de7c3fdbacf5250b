"""`NodeDataset`, the container that every generator and loader of datasets returns, and checks of their arguments.

`make_generator` returns the random generator of a seed and a purpose.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.argument_checks import check_number


def check_int(name: str, value: Any, *, least: int) -> int:
    """Return `value` as an int; raise unless it is an integer of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ArgumentError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_positive(name: str, value: Any) -> float:
    """Return `value` as a float; raise unless it is finite and above 0."""
    number = check_number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ArgumentError(f"{name} must be a finite number above 0, got {value}")
    return number


def check_not_negative(name: str, value: Any) -> float:
    """Return `value` as a float; raise unless it is finite and at least 0."""
    number = check_number(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentError(f"{name} must be a finite number of at least 0, got {value}")
    return number


def check_fraction(name: str, value: Any) -> float:
    """Return `value` as a float; raise unless it lies in [0, 1]."""
    number = check_number(name, value)
    if not 0 <= number <= 1:
        raise ArgumentError(f"{name} must lie between 0 and 1, got {value}")
    return number


def check_float_dtype(name: str, value: Any) -> torch.dtype:
    """Return `value` itself; raise unless it is a floating-point torch dtype."""
    if not isinstance(value, torch.dtype):
        raise ArgumentTypeError(f"{name} must be a torch.dtype, got {value!r}")
    if not value.is_floating_point:
        raise ArgumentError(f"{name} must be a floating-point dtype, got {value}")
    return value


def make_generator(seed: int, purpose: str, device: torch.device) -> torch.Generator:
    """Return the generator for one `purpose`, such as "edges", of one `seed`; draws for one purpose change no other."""
    # hashed, because torch's CPU generator reads 32 bits of its seed only
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


if TYPE_CHECKING:
    from torch_geometric.data import Data


@dataclass(frozen=True, eq=False, repr=False)
class NodeDataset:
    """A graph with features, one class per node and a split of the nodes.

    Attributes:
        name: Name of the graph.
        num_nodes: N.
        num_classes: Number of classes.
        edge_index: Source (row 0) and target (row 1) of every edge, int64 or int32 `[2, E]`; an undirected
            graph holds each edge in both directions.
        x: Node features, floating point `[N, F]`, or None.
        y: Class of every node, int64 `[N]`; -1 if it is unknown.
        train_idx, val_idx, test_idx: Nodes of the three parts, int64 `[n]` each, disjoint.

    Example:
        >>> dataset = synthetic_graph("products", num_nodes=100, num_edges=400, num_features=4, num_classes=3)
        >>> dataset, len(dataset.train_idx)
        (NodeDataset(name='products', num_nodes=100, num_edges=400, num_features=4, num_classes=3), 8)
        >>> dataset.to_data()
        Data(edge_index=[2, 400], y=[100], x=[100, 4], train_mask=[100], val_mask=[100], test_mask=[100])
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
        """Return the same dataset with every tensor on `device`; tensors that are there already are shared.

        Args:
            device: A device as `Tensor.to` takes it.
        """
        names = ("edge_index", "x", "y", "train_idx", "val_idx", "test_idx")
        tensors = {name: getattr(self, name) for name in names}
        moved = {name: value.to(device) for name, value in tensors.items() if value is not None}
        return replace(self, **moved)

    def to_data(self) -> Data:
        """Return PyG's `Data` that shares these tensors: `x`, `edge_index` int64, `y`, and bool `train_mask`,
        `val_mask`, `test_mask`.
        """
        data = Data(edge_index=self.edge_index.long(), y=self.y)
        if self.x is None:
            data.num_nodes = self.num_nodes
        else:
            data.x = self.x
        data.train_mask = make_mask(self.train_idx, self.num_nodes)
        data.val_mask = make_mask(self.val_idx, self.num_nodes)
        data.test_mask = make_mask(self.test_idx, self.num_nodes)
        return data

    def __repr__(self) -> str:
        """Return one line of sizes instead of the tensors."""
        return (
            f"NodeDataset(name={self.name!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges}, "
            f"num_features={self.num_features}, num_classes={self.num_classes})"
        )


def make_mask(idx: Tensor, num_nodes: int) -> Tensor:
    """Return bool `[N]`, true at the nodes `idx`."""
    mask = torch.zeros(num_nodes, dtype=torch.bool, device=idx.device)
    mask[idx] = True
    return mask
