"""Torch's default device is what a program makes tensors on, and none of ours: positions and counts lie on the CPU."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from pyg_direct import (
    ClusterData,
    ClusterLoader,
    CSRTopo,
    DataLoader,
    Feature,
    GraphSageSampler,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
    inference_loader,
)
from pyg_direct.loader import NeighborSampler as LayerLoader
from tests.batches import make_data
from tests.hetero_data import make_hetero
from tests.loader.data_loader.small_graphs import InMemory, make_molecules, make_typed

# Tensors that are made on it by mistake hold nothing, and cannot be read.
ELSEWHERE = torch.device("meta")
DATA, TYPED = make_data(weight=torch.rand(600), time=torch.arange(600)), make_hetero()
GRAPHS, TYPED_GRAPHS = make_molecules(40, size=lambda i, n, e: i), InMemory(make_typed(20))
SEEDS, LINKS, KIND = torch.arange(40), DATA.edge_index[:, :20], TYPED.node_types[0]
COMMON = {"batch_size": 16, "seed": 1}


def without_size(options):
    return {name: value for name, value in options.items() if name != "batch_size"}


LOADERS = {
    "plain": lambda **options: NeighborLoader(DATA, [3, 2], SEEDS, shuffle=True, **options),
    "all nodes": lambda **options: NeighborLoader(DATA, [3, 2], **options),
    "alone": lambda **options: NeighborLoader(DATA, [3, 2], [1, 2, 3], prefetch=0, **options),
    "generator": lambda **options: NeighborLoader(DATA, [3], SEEDS, shuffle=True,
                                                  generator=torch.Generator().manual_seed(2), **options),
    "replacement": lambda **options: NeighborLoader(
        DATA, [3], SEEDS, sampler=torch.utils.data.RandomSampler(range(40), True, 9,
                                                                 torch.Generator().manual_seed(2)), **options),
    "ranks": lambda **options: NeighborLoader(DATA, [3], SEEDS, sampler=DistributedSampler(range(40), 2, 1), **options),
    "labor": lambda **options: NeighborLoader(DATA, [3, 2], SEEDS, sampling="labor", **options),
    "induced": lambda **options: NeighborLoader(DATA, [3, 2], SEEDS, subgraph_type="induced", **options),
    "weights": lambda **options: NeighborLoader(DATA, [3, 2], SEEDS, weight_attr="weight", **options),
    "times": lambda **options: NeighborLoader(DATA, [3, 2], SEEDS, time_attr="time", input_time=SEEDS, **options),
    "types": lambda **options: NeighborLoader(TYPED, [3, 2], KIND, shuffle=True, **options),
    "links": lambda **options: LinkNeighborLoader(DATA, [3, 2], LINKS, neg_sampling="binary", **options),
    "triplets": lambda **options: LinkNeighborLoader(DATA, [3], None, neg_sampling="triplet", strict_negatives=True,
                                                     **{**options, "batch_size": 300}),
    "hgt": lambda **options: HGTLoader(TYPED, [9, 9], KIND, **options),
    "shadow": lambda **options: ShaDowKHopSampler(DATA, 2, 3, **options),
    "clusters": lambda **options: ClusterLoader(ClusterData(DATA, 5, log=False), shuffle=True,
                                                **{**options, "batch_size": 2}),
    "parts": lambda **options: RandomNodeLoader(DATA, 4, shuffle=True, **without_size(options)),
    "parts with types": lambda **options: RandomNodeLoader(TYPED, 4, shuffle=True, **without_size(options)),
    "sources": lambda **options: GraphSAINTNodeSampler(DATA, num_steps=2, sample_coverage=1, log=False, **options),
    "ends": lambda **options: GraphSAINTEdgeSampler(DATA, num_steps=2, sample_coverage=1, log=False, **options),
    "walks": lambda **options: GraphSAINTRandomWalkSampler(DATA, walk_length=3, num_steps=2, **options),
    "layers": lambda **options: LayerLoader(DATA.edge_index, [3, 2], **options),
    "graphs": lambda **options: DataLoader(GRAPHS, shuffle=True, follow_batch=["x", "y"], **options),
    "graphs of types": lambda **options: DataLoader(TYPED_GRAPHS, **options),
    "graphs in torch's order": lambda **options: DataLoader(GRAPHS, shuffle=True, **follow_torch(options)),
    "inference": lambda **options: inference_loader(DATA, batch_size=30, device=options["device"]),
}  # fmt: skip


def follow_torch(options):
    torch.manual_seed(3)
    return {**options, "seed": None}


def list_batches(loader):
    return [str(batch if isinstance(batch, tuple) else batch.to_dict()) for _ in range(2) for batch in loader]


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_make_the_same_batches(real_device, name):
    expected = list_batches(LOADERS[name](device=real_device, **COMMON))

    with ELSEWHERE:
        got = list_batches(LOADERS[name](device=real_device, **COMMON))

    assert got == expected


@pytest.mark.parametrize("name", ["plain", "types", "links", "layers"])
def test_loaders_are_called_with_positions(real_device, name):
    calls = [lambda loader: loader.collate_fn([1, 0]),
             lambda loader: loader.load_state_dict(loader.state_dict())]  # fmt: skip
    if name != "layers":
        calls.append(lambda loader: loader([1, 0]))

    with ELSEWHERE:
        loader = LOADERS[name](device=real_device, **COMMON)
        made = [call(loader) for call in calls]

    assert made[0] is not None


def test_a_transform_makes_tensors_where_its_program_says(real_device):
    def note(batch):
        found.append(torch.empty(1).device)
        return batch

    found = []

    with ELSEWHERE:
        next(iter(NeighborLoader(DATA, [3], SEEDS, transform=note, device=real_device)))

    assert found == [ELSEWHERE]


def test_samplers_and_rows_take_lists(real_device):
    topology = CSRTopo(DATA.edge_index)

    with ELSEWHERE:
        sampler = GraphSageSampler(topology, [3, 2], device=real_device)
        n_id, batch_size, _ = sampler.sample([4, 5])
        rows = Feature(device=real_device, csr_topo=topology, device_cache_size="20%").from_cpu_tensor(DATA.x)[[4, 5]]

    assert n_id[:batch_size].tolist() == [4, 5]
    assert torch.equal(rows.cpu(), DATA.x[[4, 5]])


@pytest.mark.parametrize("shuffle", [False, True])
def test_seeds_may_lie_where_batches_do(real_device, shuffle):
    seeds, links = SEEDS.to(real_device), LINKS.to(real_device)
    options = {"device": real_device, "shuffle": shuffle, "disjoint": True, **COMMON}

    got = [list_batches(NeighborLoader(DATA, [3], seeds, **options)),
           list_batches(NeighborLoader(TYPED, [3], (KIND, seeds[:9]), input_id=seeds[:9], **options)),
           list_batches(LinkNeighborLoader(DATA, [3], links, **options))]  # fmt: skip

    assert got == [list_batches(NeighborLoader(DATA, [3], SEEDS, **options)),
                   list_batches(NeighborLoader(TYPED, [3], (KIND, SEEDS[:9]), input_id=SEEDS[:9], **options)),
                   list_batches(LinkNeighborLoader(DATA, [3], LINKS, **options))]  # fmt: skip
