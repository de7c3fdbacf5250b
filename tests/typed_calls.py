"""Calls that a type checker takes, and calls that it refuses, each marked by the word that its message has.

`tests/test_types.py` has mypy read it; nothing here is run.
"""

from collections.abc import Iterator

import torch
from torch_geometric.data import Data

import pyg_direct
from pyg_direct import (
    ClusterData,
    ClusterLoader,
    DataListLoader,
    DataLoader,
    Feature,
    FeatureStore,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    Node2Vec,
    NodeLoader,
    PPRLoader,
    Producers,
    RandomNodeLoader,
    ShaDowKHopSampler,
    SubGraphLoader,
    infer,
    inference_loader,
)
from pyg_direct.distributed import DistGraph, DistNeighborLoader, DistSubGraphLoader
from pyg_direct.loader.batch_report import LoaderReport
from pyg_direct.sampler import NeighborSampler


def make_right_calls(data: Data, model: torch.nn.Module, graph: DistGraph) -> None:
    loader = NeighborLoader(data, [10, 5], torch.arange(9), batch_size=4, shuffle=True, placement="auto", seed=3,
                            num_workers=2, generator=torch.Generator(), ranks=(0, 2))  # fmt: skip
    LinkNeighborLoader(data, {("a", "to", "b"): [3]}, batch_size=8, neg_sampling="binary", drop_last=True)
    NodeLoader(data, NeighborSampler(data, [3], seed=1), batch_size=8, persistent_workers=False)
    HGTLoader(data, {"a": [4]}, ("a", torch.arange(3)), batch_size=8)
    SubGraphLoader(data, num_neighbors=[2], batch_size=8, feature_cache="20%", device="cuda:0")
    PPRLoader(data, 8, [1, 2, 3], batch_size=8, shuffle=True)
    ShaDowKHopSampler(data, 2, 3, batch_size=8)
    RandomNodeLoader(data, 4, shuffle=True)
    ClusterLoader(ClusterData(data, 4), batch_size=2)
    GraphSAINTNodeSampler(data, 16, 3, seed=1)
    DataLoader([data], 2, follow_batch=["x"], drop_last=True)
    Node2Vec(data.edge_index, 8, 4, 2).loader(batch_size=8, shuffle=True, seed=1)
    infer(model, data, device="cpu", batch_size=9)
    DistNeighborLoader(graph, [3], batch_size=8, ranks="own")
    DistSubGraphLoader(graph, [3], batch_size=8, seed=1)
    Producers(loader, ["cuda:1", "cpu"], device="cuda:0")
    batches: Iterator[Data] = iter(loader)
    report: LoaderReport = loader.report()
    numbers: dict[str, int | float] = report.to_dict()
    rows: torch.Tensor = Feature(device="cpu")[torch.tensor([1])]
    print(batches, numbers, rows)


def make_wrong_calls(data: Data, model: torch.nn.Module, graph: DistGraph) -> None:
    NeighborLoader(data, [10, 5], placment="auto")  # refused: "placment"
    NeighborLoader(data, [10, 5], batch_size="4")  # refused: "batch_size"
    NeighborLoader(data, [10, 5], shufle=True)  # refused: "shufle"
    NeighborLoader(data, [10, 5], prefetch="2")  # refused: "prefetch"
    NeighborLoader(data, [10, 5], replace="yes")  # refused: "replace"
    LinkNeighborLoader(data, [3], neg_samplng="binary")  # refused: "neg_samplng"
    LinkNeighborLoader(data, [3], seed=1.5)  # refused: "seed"
    NodeLoader(data, NeighborSampler(data, [3]), num_worker=2)  # refused: "num_worker"
    NeighborSampler(data, [3], replce=True)  # refused: "replce"
    HGTLoader(data, [4], "a", most_neighbours=3)  # refused: "most_neighbours"
    SubGraphLoader(data, num_neighbors=[2], subgraph_type="induced")  # refused: "subgraph_type"
    SubGraphLoader(data, num_neighbors=[2], feature_cach="20%")  # refused: "feature_cach"
    PPRLoader(data, 8, alpa=0.2)  # refused: "alpa"
    ShaDowKHopSampler(data, "2", 3)  # refused: "str"
    RandomNodeLoader(data, 4, batch_size=8)  # refused: "batch_size"
    ClusterLoader(ClusterData(data, 4), suffle=True)  # refused: "suffle"
    ClusterData(data, num_part=4)  # refused: "num_part"
    GraphSAINTNodeSampler(data, 16, num_step=3)  # refused: "num_step"
    GraphSAINTRandomWalkSampler(data, 16, 2, walks=3)  # refused: "walks"
    DataLoader([data], 2, follow_batches=["x"])  # refused: "follow_batches"
    DataListLoader([data], batchsize=2)  # refused: "batchsize"
    Node2Vec(data.edge_index, 8, 4, 2).loader(batchsize=8)  # refused: "batchsize"
    infer(model, data, devise="cpu")  # refused: "devise"
    inference_loader(data, shuffle=True)  # refused: "shuffle"
    DistNeighborLoader(graph, [3], placement="cuda")  # refused: "placement"
    DistSubGraphLoader(graph, [3], subgraph_type="induced")  # refused: "subgraph_type"
    Producers(NeighborLoader(data, [3]), ahed=2)  # refused: "ahed"
    Feature(device_cache="20%")  # refused: "device_cache"
    FeatureStore(placment="unified")  # refused: "placment"
    NeighborLoader(data, [3]).report(1.5)  # refused: "float"
    pyg_direct.NeighbourLoader(data, [3])  # refused: "NeighbourLoader"
    pyg_direct.dynamic.stream([data]).shift(1)  # refused: "shift"
