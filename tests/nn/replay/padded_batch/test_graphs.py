"""Batches of small graphs in places of fixed size: the losses, gradients and norms of the batches themselves."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn import BatchNorm1d, Embedding, Linear, Module, ReLU, Sequential
from torch_geometric.data import Data
from torch_geometric.nn import (
    MLP,
    BatchNorm,
    GINConv,
    GINEConv,
    MessagePassing,
    NNConv,
    global_add_pool,
    global_mean_pool,
)

from pyg_direct import DataLoader, GraphedStep, NeighborLoader, accelerate
from pyg_direct.errors import ArgumentError
from pyg_direct.nn.replay.padded_batch import PaddedGraphs, masked_norms, read_graph_sizes
from tests.graphs import make_random_graph
from tests.loader.data_loader.small_graphs import make_pairs, make_typed
from tests.nn.convolutions import assert_near


def make_molecules(count):
    """Graphs like molecules: atoms, bonds in both directions, positions, and a number to predict."""
    graphs = []
    for _ in range(count):
        nodes = int(torch.randint(4, 12, ()))
        ends = torch.randint(nodes, (2, 2 * nodes))
        edges = torch.cat([ends, ends.flip(0)], 1)
        graphs.append(Data(x=torch.randint(7, (nodes,)), edge_index=edges, edge_attr=torch.randn(4 * nodes, 3),
                           pos=torch.randn(nodes, 3), y=torch.randn(1, 2)))  # fmt: skip
    return graphs


class SchNetLike(MessagePassing):
    """Filters that are functions of distances."""

    def __init__(self, width):
        super().__init__(aggr="add")
        self.filter = Sequential(Linear(1, width), ReLU(), Linear(width, width))

    def forward(self, x, edge_index, pos):
        apart = (pos[edge_index[0]] - pos[edge_index[1]]).square().sum(1, keepdim=True)
        return self.propagate(edge_index, x=x, weight=self.filter(apart))

    def message(self, x_j, weight):
        return x_j * weight


class Model(Module):
    def __init__(self, kind, norm=None, width=16):
        super().__init__()
        self.kind, self.atoms, self.bonds = kind, Embedding(7, width), Linear(3, width)
        if kind == "gin":
            self.conv = GINConv(MLP([width, width, width], norm=norm))
        elif kind == "gine":
            self.conv = GINEConv(MLP([width, width, width], norm=norm))
        elif kind == "nnconv":
            self.conv = NNConv(width, width, Linear(3, width * width), aggr="mean")
        else:
            self.conv = SchNetLike(width)
        self.norm = BatchNorm(width) if norm else None
        self.head = Linear(width, 2)

    def forward(self, batch):
        x = self.atoms(batch.x)
        more = {"gin": (), "gine": (self.bonds(batch.edge_attr),), "nnconv": (batch.edge_attr,), "schnet": (batch.pos,)}
        x = self.conv(x, batch.edge_index, *more[self.kind]).relu()
        x = x if self.norm is None else self.norm(x)
        return self.head(global_add_pool(x, batch.batch, size=batch.num_graphs))


def make_compute(model):
    return lambda batch: F.mse_loss(model(batch)[: len(batch.y)], batch.y)


def find_gradients(model, batch, masks=None):
    model.zero_grad()
    with masked_norms(model, masks):
        loss = make_compute(model)(batch)
    loss.backward()
    return [loss.detach(), *(part.grad for part in model.parameters() if part.grad is not None)]


def make_places(batches, margin=0.05):
    largest = read_graph_sizes(batches[0])
    for batch in batches:
        largest = largest.join(read_graph_sizes(batch))
    return PaddedGraphs(batches[0], largest, margin, None)


@pytest.mark.parametrize("is_accelerated", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("norm", [None, "batch_norm"])
@pytest.mark.parametrize("kind", ["gin", "gine", "nnconv", "schnet"])
def test_padded_batches_give_the_loss_gradients_and_means_of_batches(real_device, kind, norm, is_accelerated):
    # In double precision, as differences of float32 sums are as large as small gradients.
    model = Model(kind, norm).to(real_device).double()
    other = copy.deepcopy(model)
    if is_accelerated:
        accelerate(other)
    graphs = [graph.apply(lambda value: value.double() if value.is_floating_point() else value)
              for graph in make_molecules(40)]  # fmt: skip
    batches = list(DataLoader(graphs, batch_size=8, device=real_device))
    padded = make_places(batches)
    memory = [value.data_ptr() for value in padded.data.to_dict().values() if isinstance(value, torch.Tensor)]

    for batch in batches:
        expected = find_gradients(model, batch)
        assert padded.fill(batch)
        assert_near(find_gradients(other, padded.data, padded.masks), expected)
        for own, theirs in zip(other.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(own, theirs)

    assert memory == [value.data_ptr() for value in padded.data.to_dict().values() if isinstance(value, torch.Tensor)]
    assert not any("forward" in part.__dict__ for part in other.modules() if isinstance(part, BatchNorm1d))
    if is_accelerated and kind in ("gin", "gine"):
        assert other.conv._paths.accelerated >= 5


def test_places_hold_the_graphs_and_one_more_for_the_padding(real_device):
    (batch,) = DataLoader(make_molecules(8), batch_size=8, device=real_device)
    padded = make_places([batch], 0.2)

    assert padded.fill(batch)

    data, nodes, edges = padded.data, batch.num_nodes, batch.num_edges
    assert data.num_graphs == 9
    assert torch.equal(data.batch[:nodes], batch.batch)
    assert (data.batch[nodes:] == 8).all()
    assert data.num_nodes == len(data.x) > nodes
    assert data.ptr.tolist() == [*batch.ptr.tolist(), data.num_nodes]
    assert torch.equal(data.y, batch.y)
    assert (data.edge_index[1].diff() >= 0).all()
    loops = data.edge_index[:, edges:]
    assert torch.equal(loops[0], loops[1])
    assert (loops >= nodes).all()
    # The same edges with their attributes, in another order.
    order = batch.edge_index[1].argsort(stable=True)
    assert torch.equal(data.edge_attr[:edges], batch.edge_attr[order])


def test_a_mean_over_graphs_leaves_the_padding_out(real_device):
    (batch,) = DataLoader(make_molecules(8), batch_size=8, device=real_device)
    padded = make_places([batch], 0.2)
    padded.fill(batch)

    pooled = global_mean_pool(padded.data.pos, padded.data.batch, size=padded.data.num_graphs)[:8]

    torch.testing.assert_close(pooled, global_mean_pool(batch.pos, batch.batch))


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}, {"affine": False}, {}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_torch(real_device, options, dtype):
    own = BatchNorm1d(4, **options).to(real_device)
    theirs = copy.deepcopy(own)
    model, rows = torch.nn.ModuleList([own]), torch.randn(10, 4, device=real_device, dtype=dtype)
    mask = torch.zeros(10, 1, device=real_device)
    mask[:7] = 1
    masks = {10: (mask, torch.tensor(7.0, device=real_device))}
    rows[7:] = torch.inf

    for is_training in (True, True, False):
        model.train(is_training), theirs.train(is_training)
        with masked_norms(model, masks):
            got = own(rows)[:7]
        expected = theirs(rows[:7])
        torch.testing.assert_close(got, expected)

    for mine, other in zip(own.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other)
    own.train()
    with masked_norms(model, masks), pytest.raises(RuntimeError, match="would read padding"):
        own(rows[:9])


def test_batches_that_find_no_room_or_are_of_another_kind_are_told():
    first, second = DataLoader(make_molecules(16), batch_size=8, device="cpu")
    padded = make_places([first], 0)

    assert padded.fill(first)
    assert not padded.fill(next(iter(DataLoader(make_molecules(7), batch_size=7, device="cpu"))))
    assert not padded.fill(next(iter(DataLoader(make_molecules(80), batch_size=80, device="cpu"))))
    first.pos = first.pos.double()
    assert not padded.fill(first)
    assert padded.find_varying(first) == "pos"
    assert padded.find_varying(second) is None
    with pytest.raises(ArgumentError, match="rows of nodes, edges or graphs, got 'ptr'"):
        PaddedGraphs(second, read_graph_sizes(second), 0, ["ptr"])


def test_rows_of_neither_nodes_nor_edges_are_named_once_they_differ():
    graphs = make_molecules(16)
    for number, graph in enumerate(graphs):
        graph.pairs = torch.zeros(1 + number, 2)
    first, second = DataLoader(graphs, batch_size=8, device="cpu")
    padded = make_places([first, second])

    assert padded.fill(first)
    assert not padded.fill(second)
    assert (padded.find_varying(first), padded.find_varying(second)) == (None, "pairs")
    # A smaller batch has fewer rows of graphs.
    assert padded.find_varying(next(iter(DataLoader(graphs, batch_size=7, device="cpu")))) is None


def test_other_batches_have_no_sizes():
    graph = make_random_graph(30, 90)
    sampled = next(iter(NeighborLoader(Data(edge_index=graph.edge_index, num_nodes=30), [2], device="cpu")))
    (followed,) = DataLoader(make_molecules(2), batch_size=2, follow_batch=["x"], device="cpu")
    others = [next(iter(DataLoader(graphs, batch_size=2, device="cpu"))) for graphs in (make_typed(2), make_pairs(2))]

    assert [read_graph_sizes(batch) for batch in (sampled, followed, *others, None)] == [None] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [None, "batch_norm"])
@pytest.mark.parametrize("kind", ["gin", "gine", "nnconv", "schnet"])
def test_steps_over_small_graphs_are_replayed(kind, norm):
    ordinary = Model(kind, norm).cuda()
    graphed, losses = copy.deepcopy(ordinary), []
    graphs = make_molecules(203)
    for model in (ordinary, graphed):
        accelerate(model)
        # Not Adam: it scales up the rounding errors that are the gradient of a bias before a norm. Sums of squared
        # distances without a norm would leave the range of numbers at a larger rate.
        sgd = torch.optim.SGD(model.parameters(), lr=1e-4 if kind == "schnet" else 0.01)
        step = GraphedStep(model, make_compute(model), sgd, warm_up=4 if model is graphed else 1000, margin=0.1)
        loader = DataLoader(graphs, batch_size=20, shuffle=True, seed=1)
        losses.append([float(step(batch)) for _ in range(3) for batch in loader])

    assert step.reason is None
    # The last batch of an epoch is smaller.
    assert step.replayed > 18
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-2, atol=1e-3)
    for own, theirs in zip(graphed.buffers(), ordinary.buffers(), strict=True):
        torch.testing.assert_close(own.float(), theirs.float(), rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:steps are not replayed")
@pytest.mark.parametrize(
    ("compute", "reason"),
    [(lambda model, batch: model(batch).square().mean(), "the last one holds the padding"),
     (lambda model, batch: F.cross_entropy(model(batch), (batch.y[:, 0] > 0).long()), "batch_size"),
     (lambda model, batch: F.mse_loss(global_mean_pool(batch.pos, batch.batch)[: len(batch.y), :2], batch.y)
      + model(batch).sum() * 0, "sync")],
    ids=["all graphs", "an error", "a pool without a size"],
)  # fmt: skip
def test_losses_that_read_the_padding_or_wait_stay_ordinary(compute, reason):
    model = Model("gin").cuda()
    step = GraphedStep(model, lambda batch: compute(model, batch), torch.optim.SGD(model.parameters(), 0.01), warm_up=2)

    losses = [float(step(batch)) for batch in DataLoader(make_molecules(40), batch_size=8)]

    assert (step.replayed, step.ordinary, len(losses)) == (0, 5, 5)
    assert reason in step.reason


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:steps are not replayed")
def test_what_cannot_be_replayed_stays_ordinary_with_a_reason():
    graphs = make_molecules(40)
    for graph in graphs:
        graph.pairs = torch.zeros(int(torch.randint(1, 9, ())), 2)
    model = Model("gin").cuda()
    step = GraphedStep(model, make_compute(model), torch.optim.SGD(model.parameters(), 0.01), warm_up=2)

    for batch in DataLoader(graphs, batch_size=4):
        step(batch)

    assert step.replayed == 0
    assert "rows of 'pairs'" in step.reason
