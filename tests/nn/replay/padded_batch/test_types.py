"""Batches with types in places of fixed size: the loss and gradients of batches, whatever their size."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, SAGEConv, to_hetero

from pyg_direct import GraphedStep, NeighborLoader, accelerate
from pyg_direct.errors import ArgumentError
from pyg_direct.nn.replay import padded_batch
from pyg_direct.nn.replay.padded_batch import PaddedBatch, Sizes, find_input, read_sizes
from pyg_direct.nn.sorted_edges import find_batch
from tests.hetero_data import make_hetero
from tests.nn.convolutions import assert_near

CLASSES = 4


def make_data():
    """Papers with labels, authors, one venue, and a type that no edge meets."""
    torch.manual_seed(0)
    data = make_hetero()
    for kind in data.node_types:
        data[kind].x = torch.randn(data[kind].num_nodes, 16)
    data["paper"].y = torch.randint(CLASSES, (data["paper"].num_nodes,))
    return data


def make_loader(data, device, batch_size=6, fanouts=(3, 2), **options):
    return NeighborLoader(data, list(fanouts), ("paper", torch.arange(40)), batch_size=batch_size, seed=0,
                          device=device, **options)  # fmt: skip


class _Layers(torch.nn.Module):
    def __init__(self, data, make):
        super().__init__()
        self.layers = torch.nn.ModuleList(HeteroConv({kind: make(width) for kind in data.edge_types})
                                          for width in (8, CLASSES))  # fmt: skip

    def forward(self, x, edges):
        for layer in self.layers:
            x = {**x, **layer(x, edges)}
            x = {kind: rows.relu() for kind, rows in x.items() if rows.shape[1] != 16}
            edges = {kind: edge_index for kind, edge_index in edges.items() if kind[0] in x and kind[-1] in x}
        return x


class _Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), CLASSES)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def make_transformed(data):
    nodes = sorted({end for kind in data.edge_types for end in (kind[0], kind[-1])})
    return to_hetero(_Plain(), (nodes, data.edge_types))


MODELS = {
    "sage": lambda data: _Layers(data, lambda width: SAGEConv((-1, -1), width)),
    "gat": lambda data: _Layers(data, lambda width: GATConv((-1, -1), width, add_self_loops=False)),
    "to_hetero": make_transformed,
}


def make_model(name, data, device, is_accelerated):
    torch.manual_seed(1)
    model = MODELS[name](data)
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    model = model.to(device)
    if is_accelerated:
        accelerate(model)
    return model


def make_compute(model):
    def compute(batch):
        paper = batch["paper"]
        out = model(batch.x_dict, batch.edge_index_dict)["paper"]
        return F.cross_entropy(out[: paper.batch_size], paper.y[: paper.batch_size])

    return compute


def join_sizes(batches):
    largest = read_sizes(batches[0])
    for batch in batches:
        assert largest.is_like(read_sizes(batch))
        largest = largest.join(read_sizes(batch))
    return largest


@pytest.mark.filterwarnings("ignore:.*no edges|.*isolated:UserWarning")
@pytest.mark.parametrize("is_accelerated", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_give_the_loss_and_gradients_of_batches(real_device, name, is_accelerated):
    data = make_data()
    model = make_model(name, data, real_device, is_accelerated)
    batches = list(make_loader(data, real_device, drop_last=True))
    padded = PaddedBatch(batches[0], join_sizes(batches), 0.5, ["x", "y"])
    memory = [rows.data_ptr() for rows in (*padded.data.x_dict.values(), *padded.data.edge_index_dict.values())]

    def find(batch):
        loss = make_compute(model)(batch)
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return [loss, *(torch.zeros(0) if grad is None else grad for grad in grads)]

    for batch in batches:
        assert padded.fill(batch)
        assert all(find_batch(edges) is not None for edges in padded.data.edge_index_dict.values())
        assert_near(find(padded.data), find(batch))

    again = [rows.data_ptr() for rows in (*padded.data.x_dict.values(), *padded.data.edge_index_dict.values())]
    assert again == memory
    assert len({tuple(read_sizes(batch).nodes.items()) for batch in batches}) > 1


def test_edges_and_rows_are_those_of_the_batch(real_device):
    data = make_data()
    batches = list(make_loader(data, real_device, drop_last=True))
    padded = PaddedBatch(batches[0], join_sizes(batches), 0.5, ["x", "edge_attr"])

    for batch in batches:
        assert padded.fill(batch)
        for kind in batch.edge_types:
            edges, own = padded.data[kind], batch[kind]
            # Attributes of make_hetero distinguish edges; unused places are zeros, or hold old contents.
            known = torch.isin(edges.edge_attr, own.edge_attr) & (edges.edge_attr > 0)
            ends = padded.data[kind[0]].x[edges.edge_index[0]], padded.data[kind[-1]].x[edges.edge_index[1]]
            wanted = batch[kind[0]].x[own.edge_index[0]], batch[kind[-1]].x[own.edge_index[1]]
            for end, rows in zip(ends, wanted, strict=True):
                found = {tuple(row) for row in end[known].tolist()}
                assert {tuple(row) for row in rows[own.edge_attr > 0].tolist()} <= found
            assert bool((edges.edge_index[1].diff() >= 0).all())


def test_batches_that_find_no_room_are_told():
    data = make_data()
    first, *others = make_loader(data, "cpu")
    padded = PaddedBatch(first, read_sizes(first), 0.0, ["x"])

    assert padded.fill(first)
    assert not padded.fill(others[-1])
    assert not padded.fill(next(iter(make_loader(data, "cpu", fanouts=(20, 20)))))
    assert not padded.fill(next(iter(make_loader(data, "cpu", fanouts=(3, 2, 1)))))
    first["author"].x = first["author"].x.double()
    assert not padded.fill(first)


@pytest.mark.parametrize("change", [
    lambda batch: batch["paper"].pop("batch_size"), lambda batch: batch["author"].update({"batch_size": 3}),
    lambda batch: batch["author"].pop("num_sampled_nodes"),
    lambda batch: batch["paper", "cites", "paper"].pop("num_sampled_edges"),
    lambda batch: batch["paper", "cites", "paper"].update(
        {"edge_index": batch["paper", "cites", "paper"].edge_index.clone()}),
    lambda batch: batch["author"].update({"x": torch.zeros(1, 16)}),
], ids=["no seeds", "two seeds", "nodes", "edges", "not sorted", "rows"])  # fmt: skip
def test_sizes_of_other_batches_are_not_known(change):
    batch = next(iter(make_loader(make_data(), "cpu")))
    assert read_sizes(batch) is not None

    change(batch)

    assert read_sizes(batch) is None


def test_batches_without_types_or_edges_have_no_sizes():
    assert read_sizes(HeteroData()) is None
    assert find_input(make_data()) is None
    assert read_sizes(next(iter(make_loader(make_data(), "cpu"))).to_homogeneous()) is None


def test_places_hold_what_smaller_batches_leave_over():
    writes = "author", "writes", "paper"
    sizes = Sizes({"paper": (10, 30, 50), "author": (0, 20, 7)}, {writes: (40, 100)})

    places = sizes.widen(0.1, {writes: 5})

    # A tenth, four times the square root, and eight.
    assert places.edges == {writes: (40 + 4 + 26 + 8, 100 + 10 + 40 + 8)}
    assert places.nodes["author"] == (8, 20 + 2 + 18 + 8, 7 + 1 + 11 + 8)
    # Places for padding edges, five each.
    assert places.nodes["paper"] == (10 + 1 + -(-4 * 38 // 5), 30 + 1 + -(-4 * 58 // 5), 50 + 5 + 29 + 8)


def test_places_of_large_batches_are_whole_pieces_of_products(monkeypatch):
    writes = "author", "writes", "paper"
    sizes = Sizes({"paper": (10, 30, 50), "author": (0, 20, 7)}, {writes: (40, 100)})
    small = sizes.widen(0.1, {writes: 5})
    monkeypatch.setattr(padded_batch, "_MANY", 117)

    places = sizes.widen(0.1, {writes: 5})

    counts = [count for part in (places.nodes, places.edges) for hops in part.values() for count in hops]
    assert all(count % 32 == 0 for count in counts)
    # No more than needed, and room for padding edges.
    assert places.edges == {writes: (96, 160)}
    assert all(least <= count for kind, hops in small.nodes.items()
               for least, count in zip(hops, places.nodes[kind], strict=True))  # fmt: skip
    spare = [most - count for most, count in zip(places.edges[writes], sizes.edges[writes], strict=True)]
    assert all(5 * (most - count) >= edges for most, count, edges in
               zip(places.nodes["paper"], sizes.nodes["paper"], spare, strict=False))  # fmt: skip


@pytest.mark.parametrize("least", [0, 1 << 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_of_hops_are_copied_to_their_places(real_device, monkeypatch, least, dtype):
    monkeypatch.setattr(padded_batch, "_COPIED_ALONE", least)
    rows = torch.arange(10, device=real_device).view(5, 2).to(torch.float32).to(dtype)
    place = torch.zeros(9, 2, device=real_device).to(dtype)

    padded_batch.copy_hops([padded_batch.HopRows(rows, place, (2, 0, 3), (3, 2, 4))])

    expected = torch.zeros(9, 2)
    expected[:2], expected[5:8] = rows[:2].float().cpu(), rows[2:].float().cpu()
    assert torch.equal(place.float().cpu(), expected)


def test_names_are_of_rows():
    batch = next(iter(make_loader(make_data(), "cpu")))

    for name in ("batch_size", "nothing"):
        with pytest.raises(ArgumentError, match=f"a row for each node or edge, got '{name}'"):
            PaddedBatch(batch, read_sizes(batch), 0.1, [name])


def test_steps_on_a_cpu_are_ordinary():
    data = make_data()
    model = make_model("sage", data, "cpu", True)
    step = GraphedStep(model, make_compute(model), torch.optim.Adam(model.parameters(), lr=0.01), warm_up=1)

    losses = [float(step(batch)) for _ in range(6) for batch in make_loader(data, "cpu")]

    assert (step.replayed, step.reason) == (0, None)
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*no edges|.*isolated:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_ordinary_steps(name):
    data = make_data()
    ordinary = make_model(name, data, "cuda", False)
    graphed = copy.deepcopy(ordinary)
    losses = []
    for model in (ordinary, graphed):
        accelerate(model)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        step = GraphedStep(model, make_compute(model), adam, warm_up=12 if model is graphed else 1000, margin=0.5)
        batches = (batch for _ in range(8) for batch in make_loader(data, "cuda", shuffle=True, drop_last=True))
        losses.append([float(step(batch)) for batch in batches])

    assert step.reason is None
    assert step.replayed > 8
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-2, atol=1e-3)
    assert min(losses[1]) < losses[1][0]
