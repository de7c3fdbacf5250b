"""Processes that share the batches of loaders of sets of nodes, and of walks: together they have those of one."""

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    Node2Vec,
    PPRLoader,
    RandomNodeLoader,
)
from pyg_direct.errors import ArgumentError
from tests.processes import run_ranks

GENERATOR = torch.Generator().manual_seed(1)
DATA = Data(x=torch.rand(60, 3, generator=GENERATOR), y=torch.arange(60),
            edge_index=torch.randint(60, (2, 500), generator=GENERATOR))  # fmt: skip


def make_clusters(**options):
    return ClusterLoader(ClusterData(DATA, 9, log=False), batch_size=2, shuffle=True, **options)


def make_walks(**options):
    model = Node2Vec(DATA.edge_index, 8, 5, 3, num_nodes=60, device="cpu")
    return model.loader(batch_size=13, shuffle=True, **options)


# Each has five batches.
LOADERS = {
    "RandomNodeLoader": lambda **options: RandomNodeLoader(DATA, 5, shuffle=True, **options),
    "ClusterLoader": make_clusters,
    "GraphSAINTNodeSampler": lambda **options: GraphSAINTNodeSampler(DATA, 20, 5, **options),
    "GraphSAINTEdgeSampler": lambda **options: GraphSAINTEdgeSampler(DATA, 20, 5, **options),
    "GraphSAINTRandomWalkSampler": lambda **options: GraphSAINTRandomWalkSampler(DATA, 6, 3, 5, **options),
    "PPRLoader": lambda **options: PPRLoader(DATA, 4, batch_size=13, shuffle=True, num_walks=4, **options),
    "Node2Vec": make_walks,
}


def make(name, **options):
    return LOADERS[name](**{"seed": 7, "device": "cpu", **options})


def show(value):
    return [show(part) for part in value] if isinstance(value, (list, tuple)) else value.tolist()


def look(loader):
    return [show(batch if isinstance(batch, tuple) else [batch.x, batch.edge_index]) for batch in loader]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_processes_share_the_batches_of_each_epoch(name, prefetch):
    loader = make(name)
    whole = [look(loader) for _ in range(2)]
    parts = [make(name, ranks=(rank, 3), uneven="keep", prefetch=prefetch) for rank in range(3)]

    assert len(whole[0]) == 5
    assert [len(part) for part in parts] == [2, 2, 1]
    for epoch in range(2):
        assert [look(part) for part in parts] == [whole[epoch][rank::3] for rank in range(3)]


@pytest.mark.parametrize("name", LOADERS)
def test_uneven_batches_are_filled_up_or_dropped(name):
    whole = look(make(name))
    padded = [look(make(name, ranks=(rank, 2))) for rank in range(2)]
    dropped = [look(make(name, ranks=(rank, 2), uneven="drop")) for rank in range(2)]

    assert [len(part) for part in padded] == [3, 3]
    assert padded[0] == whole[0::2]
    assert padded[1][:2] == whole[1::2]
    assert dropped == [whole[0:4:2], whole[1:4:2]]


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_is_resumed_by_another_number_of_processes(name):
    loader = make(name, ranks=(1, 2), uneven="keep")
    running = iter(loader)
    next(running)
    state = loader.state_dict()

    alone = make(name)
    alone.load_state_dict(state)

    assert look(alone) == look(make(name))[2:]


@pytest.mark.parametrize("name", LOADERS)
def test_processes_need_a_seed_or_a_group(name):
    with pytest.raises(ArgumentError, match="seed must be given with ranks"):
        list(make(name, seed=None, ranks=(0, 2)))
    with pytest.raises(ArgumentError, match="uneven='drop' needs ranks"):
        make(name, uneven="drop")
    with pytest.raises(ArgumentError, match="ranks must have a rank"):
        make(name, ranks=(2, 2))


def test_samplers_of_the_program_need_one_process():
    options = {"seed": 1, "device": "cpu", "ranks": (0, 2)}
    for loader in (RandomNodeLoader(DATA, 5, batch_sampler=[[0]], **options),
                   GraphSAINTNodeSampler(DATA, 20, 5, sampler=[1, 2], **options),
                   PPRLoader(DATA, 4, sampler=[1, 2], **options)):  # fmt: skip
        with pytest.raises(ArgumentError, match="ranks needs"):
            iter(loader)


def run_without_seeds(rank):
    torch.manual_seed(rank)
    found = [look(make(name, seed=None, ranks="auto", uneven="keep")) for name in LOADERS]
    sampler = GraphSAINTNodeSampler(DATA, 20, 5, sample_coverage=2, log=False, device="cpu", ranks="auto")
    return found, sampler.node_norm.tolist()


@pytest.mark.usefixtures("quick_starts")
def test_without_a_seed_processes_follow_the_first_one():
    torch.manual_seed(0)
    whole = [look(make(name, seed=None)) for name in LOADERS]
    norm = GraphSAINTNodeSampler(DATA, 20, 5, sample_coverage=2, log=False, device="cpu").node_norm.tolist()

    parts = run_ranks(run_without_seeds, 2)

    for number, name in enumerate(LOADERS):
        assert [part[0][number] for part in parts] == [whole[number][rank::2] for rank in range(2)], name
    assert parts[0][1] == parts[1][1] == norm
