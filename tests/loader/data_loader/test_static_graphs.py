"""Signals over one structure: `static_graph=True` keeps it once, and batches are those of single graphs."""

import pytest
import torch
from torch.utils.data import Subset
from torch_geometric.data import Data, HeteroData

from pyg_direct import DataLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.nn.whole_graphs import find_whole
from tests.loader.data_loader.small_graphs import InMemory

NODES = 12


def make_signals(count, shares=True):
    """Graphs of one structure; `shares` uses one tensor of edges, as a program that builds them would."""
    edges, weight = torch.randint(NODES, (2, 40)), torch.rand(40)
    return [Data(x=torch.randn(NODES, 3), y=torch.randn(NODES, 1), edge_index=edges if shares else edges.clone(),
                 edge_weight=weight if shares else weight.clone(), edge_attr=torch.randn(40, 2), goal=torch.randn(1, 4),
                 time=number) for number in range(count)]  # fmt: skip


def assert_signals(batch, graphs):
    assert type(batch) is Data
    assert (batch.num_nodes, batch.batch_size) == (NODES, len(graphs))
    for name in ("x", "y", "edge_attr", "goal"):
        assert torch.equal(batch[name].cpu(), torch.stack([graph[name] for graph in graphs])), name
    assert torch.equal(batch.edge_index.cpu(), graphs[0].edge_index)
    assert torch.equal(batch.edge_weight.cpu(), graphs[0].edge_weight)
    assert batch.time.view(-1).tolist() == [graph.time for graph in graphs]


@pytest.mark.parametrize("wrap", [list, InMemory], ids=["list", "in memory"])
@pytest.mark.parametrize("shares", [True, False])
def test_batches_have_one_structure_and_signals_side_by_side(real_device, wrap, shares):
    graphs = make_signals(7, shares)

    batches = list(DataLoader(wrap(graphs), batch_size=3, static_graph=True, device=real_device))

    assert len(batches) == 3
    for number, batch in enumerate(batches):
        assert batch.x.device.type == real_device.type
        assert_signals(batch, graphs[3 * number : 3 * number + 3])
        assert batch.x.transpose(0, 1).is_contiguous()
        assert batch.edge_index is batches[0].edge_index
    # Its edges are sorted before the first layer asks.
    assert find_whole(batches[0].edge_index, NODES, 1 << 20) is not None


def test_memory_holds_the_structure_once():
    graphs = make_signals(50)
    loader = DataLoader(graphs, batch_size=5, static_graph=True, device="cpu")
    next(iter(loader))

    signals = 50 * sum(graphs[0][name].nbytes for name in ("x", "y", "edge_attr", "goal"))
    shared = graphs[0].edge_index.nbytes + graphs[0].edge_weight.nbytes

    assert signals + shared <= loader._graphs.count_bytes() <= signals + shared + 8 * 50


def test_subsets_shuffles_and_excluded_attributes(real_device):
    graphs = make_signals(9)
    loader = DataLoader(Subset(graphs, range(2, 8)), batch_size=6, shuffle=True, seed=3, static_graph=True,
                        exclude_keys=["goal"], device=real_device)  # fmt: skip

    (batch,) = loader

    assert "goal" not in batch
    assert sorted(batch.time.view(-1).tolist()) == [2, 3, 4, 5, 6, 7]
    for place, number in enumerate(batch.time.view(-1).tolist()):
        assert torch.equal(batch.x[place].cpu(), graphs[number].x)


@pytest.mark.filterwarnings("ignore:graphs of the data set were written")
def test_signals_that_are_written_or_made_one_by_one(real_device):
    graphs = make_signals(6)
    loader = DataLoader(graphs, batch_size=3, static_graph=True, device=real_device)
    batches = iter(loader)
    next(batches)
    for graph in graphs:
        graph.x = graph.x + 1

    assert_signals(next(batches), graphs[3:])
    made = InMemory(graphs, transform=lambda graph: graph)
    for number, batch in enumerate(DataLoader(made, batch_size=3, static_graph=True, device=real_device)):
        assert_signals(batch, graphs[3 * number : 3 * number + 3])


def test_graphs_that_do_not_fit_are_named():
    graphs = make_signals(5)
    graphs[3].edge_index = graphs[3].edge_index.flip(0)
    with pytest.raises(ArgumentError, match="one edge_index for static_graph=True, got another in graph 3"):
        DataLoader(graphs, static_graph=True, device="cpu", batch_size=2)
    with pytest.raises(ArgumentError, match="graphs with edge_index for static_graph=True"):
        DataLoader([Data(x=torch.ones(2, 1))] * 3, static_graph=True, device="cpu", batch_size=2)
    with pytest.raises(ArgumentTypeError, match="must hold Data"):
        DataLoader([HeteroData(), HeteroData()], static_graph=True, device="cpu", batch_size=2)
    with pytest.raises(ArgumentError, match="follow_batch must be None with static_graph=True"):
        DataLoader(make_signals(2), static_graph=True, follow_batch=["x"], device="cpu")
    with pytest.raises(ArgumentTypeError, match="static_graph"):
        DataLoader(make_signals(2), static_graph="yes", device="cpu")
