"""Random data sets of small graphs, and a look at whether two batches are equal in everything."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.data.data import BaseData

from pyg_direct.ops.rows.graph_rows import LoopChoice


class InMemory(InMemoryDataset):
    """A data set of these graphs."""

    def __init__(self, graphs, transform=None):
        super().__init__(None, transform)
        self.data, self.slices = self.collate(graphs)


class PairData(Data):
    """Two graphs in one, whose increments and dimensions depend on the attribute."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "edge_index_s":
            return self.x_s.size(0)
        if key == "ends":
            return torch.tensor([[self.x_s.size(0)], [self.x_t.size(0)]])
        return super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key, value, *args, **kwargs):
        if key == "whole":
            return None
        if key == "ends":
            return 1
        return super().__cat_dim__(key, value, *args, **kwargs)


def make_molecules(count, seed=0, **more):
    """Graphs of ZINC's shape; some without edges, some of one node."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    graphs = []
    for number in range(count):
        nodes = int(draw(1, 9, 1))
        edges = 0 if number % 5 == 3 else int(draw(1, 15, 1))
        graphs.append(Data(x=draw(0, 28, nodes, 1), edge_index=draw(0, nodes, 2, edges), edge_attr=draw(1, 4, edges),
                           y=torch.randn(1, generator=generator)))  # fmt: skip
        for name, make in more.items():
            graphs[-1][name] = make(number, nodes, edges)
    return graphs


def make_pairs(count):
    return [PairData(x_s=torch.rand(1 + i % 3, 2), x_t=torch.rand(2 + i % 2, 3), ends=torch.tensor([[0, 0], [1, 0]]),
                     edge_index_s=torch.zeros(2, 1 + i % 4, dtype=torch.long), whole=torch.rand(3, 2))
            for i in range(count)]  # fmt: skip


def make_typed(count, names_authors=True):
    graphs = []
    for i in range(count):
        data = HeteroData()
        data["paper"].x = torch.rand(1 + i % 4, 3)
        data["author"].num_nodes = 2 + i % 3
        if names_authors:
            data["author"].id = torch.arange(2 + i % 3)
        data["author", "writes", "paper"].edge_index = torch.zeros(2, i % 3, dtype=torch.long)
        data["author", "writes", "paper"].weight = torch.rand(i % 3)
        data["paper", "cites", "paper"].edge_index = torch.zeros(2, 1, dtype=torch.int32)
        data["paper"].name = f"p{i}"
        data.y = torch.tensor([i])
        data.kind = i
        graphs.append(data)
    return graphs


def assert_equal(got, expected, path=""):
    """Values of any kind, with their types, dtypes and devices."""
    assert type(got) is type(expected), f"{path}: {type(got)} instead of {type(expected)}"
    if isinstance(got, Tensor):
        assert (got.dtype, got.shape, got.device, got.layout) == (
            expected.dtype, expected.shape, expected.device, expected.layout), path  # fmt: skip
        if got.layout is not torch.strided:
            got, expected = got.to_dense(), expected.to_dense()
        assert torch.equal(got, expected), f"{path}: {got} instead of {expected}"
    elif isinstance(got, dict):
        assert list(got) == list(expected), path
        for key in got:
            assert_equal(got[key], expected[key], f"{path}.{key}")
    elif isinstance(got, (list, tuple)):
        assert len(got) == len(expected), path
        for place, (own, other) in enumerate(zip(got, expected, strict=True)):
            assert_equal(own, other, f"{path}[{place}]")
    elif isinstance(got, BaseData):
        assert_equal_graphs(got, expected, path)
    elif isinstance(got, np.ndarray):
        np.testing.assert_array_equal(got, expected)
    else:
        assert got == expected, path


def assert_equal_graphs(got, expected, path=""):
    """Graphs or batches with all their storages, hidden attributes too."""
    assert [store._key for store in got.stores] == [store._key for store in expected.stores], path
    for own, other in zip(got.stores, expected.stores, strict=True):
        assert_equal(own._mapping, other._mapping, f"{path}{own._key or ''}")
        hidden = [{key: value for key, value in store.__dict__.items() if key not in ("_mapping", "_parent", "_key")}
                  for store in (own, other)]  # fmt: skip
        assert hidden[0].keys() == hidden[1].keys(), path
        for key in hidden[0]:
            assert_equal(hidden[0][key], hidden[1][key], f"{path}.{key}")
        assert own._parent() is got


def assert_equal_batches(got, expected):
    """Batches, and the graphs that they are taken apart into."""
    assert_equal(got, expected)
    assert got.num_graphs == expected.num_graphs
    try:
        graphs = expected.to_data_list()
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        # PyG takes some of its batches apart no more.
        with pytest.raises(type(error)):
            got.to_data_list()
        return
    assert_equal(got.to_data_list(), graphs)
    assert_equal(got[0], expected[0])


@contextmanager
def joined_by(way):
    """Batches of the block are joined by `torch` or by `loops` on a CPU, however long torch has joined before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopChoice, "seconds", float("-inf") if way == "torch" else float("inf"))
        yield
