"""Options of loaders around loaders, samplers and graphs in parts: each is refused if its value has no meaning."""

import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data, HeteroData

from pyg_direct import (
    CachedLoader,
    LastNeighborLoader,
    NeighborLoader,
    PrefetchLoader,
    Producers,
    install,
    random_walk,
    uninstall,
)
from pyg_direct.distributed import DistGraph, DistNeighborSampler, partition_graph, plan_replicas
from pyg_direct.sampler import HGTSampler, NeighborSampler
from tests.options import Refused, check_options

RING = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
DATA = Data(x=torch.rand(4, 2), edge_index=RING, num_nodes=4)
TYPED = HeteroData(a={"x": torch.rand(4, 2)}, a__to__a={"edge_index": RING})
DEVICE = Refused("tpu", "device must name")
SEED = Refused("x", "seed must be an integer")
REPLACE, DISJOINT = Refused(3, "replace must be True or False"), Refused("no", "disjoint must be True or False")
STRICT = Refused("x", "strict_negatives must be True or False")


class RefusedAsPyg(Refused):
    """A value that PyG refuses by an error of Python."""

    errors = (NotImplementedError,)


SAMPLING = {
    "num_neighbors": Refused("x", "num_neighbors must be"), "subgraph_type": Refused("x", "subgraph_type must be"),
    "replace": REPLACE, "disjoint": DISJOINT, "temporal_strategy": Refused("x", "temporal_strategy must be"),
    "time_attr": Refused("x", "time_attr"), "weight_attr": Refused("x", "weight_attr"), "seed": SEED,
    "time_comparison": Refused("x", "time_comparison must be"), "time_window": Refused(-1, "time_window must be"),
    "strict_negatives": STRICT, "exclude_target_edges": Refused("x", "exclude_target_edges must be"),
    "rev_edge_type": Refused(3, "rev_edge_type must be"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    partition_graph(tmp_path / "ring", RING, num_parts=1, num_nodes=4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path / "ring"
    dist.destroy_process_group()


def take(kind, **given):
    return lambda **options: kind(**{**given, **options})


def test_loaders_around_loaders():
    loader = NeighborLoader(DATA, [2], batch_size=2, device="cpu")
    given = Refused(5, "loader must")

    check_options(PrefetchLoader, take(PrefetchLoader, loader=loader), {"loader": given, "device": DEVICE})
    check_options(CachedLoader, take(CachedLoader, loader=loader),
                  {"loader": given, "device": DEVICE, "transform": Refused(3, "transform must be")})  # fmt: skip
    check_options(Producers, take(Producers, loader=loader), {
        "loader": given, "devices": Refused(["tpu"], "device must name"), "device": DEVICE,
        "ahead": Refused(-1, "ahead must be"), "threads": Refused(0, "threads must be")})  # fmt: skip


def test_samplers():
    check_options(NeighborSampler, take(NeighborSampler, data=DATA, num_neighbors=[2], device="cpu"), {
        **SAMPLING, "data": Refused(3, "data must be"), "is_sorted": Refused(3, "is_sorted must be True or False"),
        "share_memory": Refused(3, "share_memory must be True or False"), "directed": Refused(3, "directed must be"),
        "sample_direction": Refused("x", "sample_direction must be"), "device": DEVICE,
        "placement": Refused("x", "placement must be"), "topology_cache": Refused("x", "topology_cache must look"),
        "sampling": Refused("x", "sampling must be one of"),
        "layer_dependency": Refused(3, "layer_dependency must be True or False")
        })  # fmt: skip
    check_options(HGTSampler, take(HGTSampler, data=TYPED, num_samples=[2], device="cpu"), {
        "data": RefusedAsPyg(3, "data must be a Hetero"), "num_samples": Refused("x", "num_samples"), "device": DEVICE,
        "is_sorted": Refused(3, "is_sorted must be"), "share_memory": Refused(3, "share_memory must be"),
        "placement": Refused("x", "placement must be"), "seed": SEED, "most_neighbors": Refused("x", "most_neighbors")
        })  # fmt: skip


def test_walks_and_latest_neighbors():
    graph = (torch.tensor([0, 1, 2]), torch.tensor([1, 0]))
    check_options(random_walk, take(random_walk, topology=graph, start=torch.tensor([0]), walk_length=2), {
        "topology": Refused(3, "topology must be"), "start": Refused(torch.tensor([5]), "start must"),
        "walk_length": Refused(-1, "walk_length must lie"), "p": Refused(-1, "p must be"), "q": Refused(0, "q must be"),
        "seed": SEED, "device": DEVICE, "placement": Refused("x", "placement must be")})  # fmt: skip
    check_options(LastNeighborLoader, take(LastNeighborLoader, num_nodes=4, size=2), {
        "num_nodes": Refused(0, "num_nodes must be"), "size": Refused(0, "size must be"), "device": DEVICE
        })  # fmt: skip


def test_classes_put_in_the_place_of_pygs():
    try:
        check_options(install, install, {
            "device": DEVICE, "placement": Refused("x", "placement must be"), "seed": SEED,
            "feature_cache": Refused("x", "feature_cache must look"),
            **{name: Refused(3, f"{name} must be True or False") for name in ("accelerate", "replay", "verbose")}
            })  # fmt: skip
    finally:
        uninstall()


def test_graphs_in_parts(folder):
    check_options(DistGraph, take(DistGraph, folder=folder, device="cpu"), {
        "folder": Refused(folder / "none", "none"), "device": DEVICE, "group": Refused("x", "group must be"),
        "backend": Refused("x", "backend must be"), "check": Refused("x", "check must be"),
        "device_cache_size": Refused("x", "device_cache_size must look"), "placement": Refused("x", "placement must"),
        "replicas": Refused("x", "replicas must look"), "share_rows": Refused("x", "share_rows must be True or False"),
        "share_graph": Refused("x", "share_graph must be"), "captured": Refused("x", "captured must be"),
        "timeout": Refused(-1, "timeout must be above 0"), "silence": Refused(0, "silence must be above 0")
        })  # fmt: skip
    check_options(DistNeighborSampler, take(DistNeighborSampler, graph=DistGraph(folder, device="cpu"),
                                            num_neighbors=[2]),
                  SAMPLING | {"graph": Refused(3, "graph must be a DistGraph")})  # fmt: skip


def test_partitions(folder, tmp_path):
    each = Refused(3, "must")
    check_options(partition_graph, take(partition_graph, out=tmp_path / "new", edges=RING, num_parts=2, num_nodes=4), {
        "out": Refused(folder, "out must not exist"), "edges": each, "num_parts": Refused(0, "num_parts must be"),
        "num_nodes": Refused(2, "must hold ids"), "method": Refused("x", "method must be"),
        "direction": Refused("x", "direction must be"), "node_rows": each, "edge_rows": each, "node_time": each,
        "edge_time": each, "edge_weight": each, "memory": Refused("x", "memory must look"), "seed": SEED,
        "progress": Refused(3, "progress must be True or False")})  # fmt: skip
    check_options(plan_replicas, take(plan_replicas, folder=folder, counts={}, share=0.5), {
        "folder": Refused(tmp_path / "none", "none"), "counts": Refused(3, "counts must map"),
        "share": Refused("20%", "share must lie")})  # fmt: skip
