"""What the processes of the tests do: open a partition and compare batches with those of one machine."""

import torch
from torch_geometric.data import Data

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from tests.graphs import make_random_graph

CPU = torch.device("cpu")
# Of the loaders that are compared.
COMMON = {"batch_size": 16, "shuffle": True, "seed": 3}


def make_data(num_nodes=300, num_edges=3000):
    graph = make_random_graph(num_nodes, num_edges)
    generator = torch.Generator().manual_seed(0)
    data = Data(edge_index=graph.edge_index.long(), num_nodes=num_nodes)
    data.x = torch.rand(num_nodes, 5, generator=generator)
    data.y = torch.arange(num_nodes) % 7
    data.train_mask = torch.rand(num_nodes, generator=generator) < 0.5
    data.edge_attr = torch.rand(data.num_edges, 2, generator=generator)
    data.time = torch.randint(0, 50, (num_nodes,), generator=generator)
    # float32 has no number so small.
    data.weight = torch.rand(data.num_edges, generator=generator, dtype=torch.float64) * 1e-60
    return data


def write_data(folder, data, num_parts, *, times=False, weights=False, method="hash"):
    rows = {name: data[name] for name in ("x", "y", "train_mask", "time")}
    edge_rows = {name: data[name] for name in ("edge_attr", "weight")}
    partition_graph(folder, data.edge_index, num_parts, num_nodes=data.num_nodes, node_rows=rows, edge_rows=edge_rows,
                    node_time=data.time if times else None, edge_weight=data.weight if weights else None,
                    method=method)  # fmt: skip


def open_graph(folder, **options):
    return DistGraph(folder, **{"device": CPU, "check": "full", "share_graph": False, **options})


def as_dict(batch):
    """A batch in plain parts, to be sent to another process."""
    if hasattr(batch, "node_types"):
        found = {}
        for kind, store in [*batch.node_items(), *batch.edge_items()]:
            found |= {(kind, key): value for key, value in store.items() if value is not None}
        return found
    return {key: value for key, value in batch.to_dict().items() if value is not None}


def assert_equal(got, expected, drop=()):
    assert set(got) - set(drop) == set(expected) - set(drop)
    for key, value in expected.items():
        if key in drop:
            continue
        if isinstance(value, torch.Tensor):
            assert value.dtype == got[key].dtype, key
            assert torch.equal(value, got[key]), key
        else:
            assert value == got[key], key


def assert_in_turn(ranks, alone):
    """Batches of each process, as `as_dict` has them, are those of one, which they take in turn."""
    for number, batch in enumerate(alone):
        assert_equal(ranks[number % len(ranks)][number // len(ranks)], as_dict(batch))


def assert_alone(got, data, fanouts, seeds):
    """Batches, as `as_dict` has them, are those of one process."""
    expected = [as_dict(batch) for batch in NeighborLoader(data, fanouts, seeds, device="cpu", **COMMON)]
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, other)
