"""Relations of a HeteroConv are summed at once if possible, and separately otherwise."""

import copy
import io
import weakref

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, HeteroConv, SAGEConv
from torch_geometric.utils import trim_to_layer

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.errors import ArgumentError
from pyg_direct.nn.conv import sage
from pyg_direct.nn.hetero import joined_edges
from pyg_direct.nn.sorted_edges import _BATCHES, find_batch
from tests.hetero_data import make_hetero
from tests.nn.convolutions import assert_near, note_forward

WIDTH = 16


@pytest.fixture
def calls(monkeypatch):
    """Targets of the sums of several relations."""
    made = []
    note_forward(monkeypatch, sage._TypedLayer, lambda edges, *args: made.append(edges.indptr.numel() - 1))
    return made


def make_batch(device="cpu", widths=None):
    data = make_hetero()
    for kind in data.node_types:
        data[kind].x = torch.rand(data[kind].num_nodes, (widths or {}).get(kind, WIDTH))
    device = "cuda" if str(device).startswith("cuda") else "cpu"
    return next(iter(NeighborLoader(data, [3, 2], ("paper", torch.arange(12)), batch_size=12, device=device)))


def read(batch):
    """(rows by type, edges of the relations that join nodes)."""
    return batch.x_dict, {kind: pair for kind, pair in batch.edge_index_dict.items() if "nobody" not in kind}


def run(model, x, edges):
    rows = {kind: part.clone().requires_grad_() for kind, part in x.items()}
    out = model(rows, edges)
    total = sum(part.square().sum() for part in out.values())
    grads = torch.autograd.grad(total, [*rows.values(), *model.parameters()], allow_unused=True)
    return [*out.values(), *(grad for grad in grads if grad is not None)]


KINDS = {
    "sage": lambda own, other: SAGEConv((own, other), 8),
    "sage normalised": lambda own, other: SAGEConv((own, other), 8, aggr="sum", normalize=True),
    "graph": lambda own, other: GraphConv((own, other), 8),
    "graph mean": lambda own, other: GraphConv((own, other), 8, aggr="mean"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggr", ["sum", "mean", "cat", None, "max"])
def test_equals_pyg_with_one_sum_for_all_relations(real_device, kind, aggr, calls):
    x, edges = read(make_batch(real_device))
    model = HeteroConv({name: KINDS[kind](WIDTH, WIDTH) for name in edges}, aggr).to(next(iter(x.values())).device)
    expected = run(model, x, edges)

    accelerate(model)
    got = [run(model, x, edges) for _ in range(2)]

    assert_near(got[0], expected)
    assert_near(got[1], expected)
    assert calls == [sum(x[name[-1]].shape[0] for name in edges)] * 2


def test_a_layer_by_itself_is_joined_and_not_replayed(calls):
    x, edges = read(make_batch())
    model = HeteroConv({name: KINDS["sage"](WIDTH, WIDTH) for name in edges}, "sum")
    expected = run(model, x, edges)

    # As by default on a machine with a GPU.
    assert accelerate(model, replay="auto").replay is None

    assert_near(run(model, x, edges), expected)
    assert len(calls) == 1
    with pytest.raises(ArgumentError, match=r"model must be one that holds convolutions .*, got HeteroConv"):
        accelerate(model, replay=True)


LAYERS = {
    "sage": lambda: SAGEConv((WIDTH, WIDTH), 8),
    "graph": lambda: GraphConv((WIDTH, WIDTH), 8),
    "gcn": lambda: GCNConv(WIDTH, 8, add_self_loops=False),
    "gin": lambda: GINConv(torch.nn.Linear(WIDTH, 8)),
    "gat": lambda: GATConv((WIDTH, WIDTH), 8, add_self_loops=False),
    "gatv2": lambda: GATv2Conv((WIDTH, WIDTH), 8, add_self_loops=False, share_weights=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_that_add_up_share_no_memory(real_device, name):
    x, edges = read(make_batch(real_device))
    if name == "gcn":
        # Between two types PyG has no such layer.
        edges = {kind: pair for kind, pair in edges.items() if kind[0] == kind[-1]}
    model = HeteroConv({kind: LAYERS[name]() for kind in edges}, "sum").to(next(iter(x.values())).device)
    accelerate(model)

    def go_back():
        sum(part.square().sum() for part in model(x, edges).values()).backward()
        return [part.grad.clone() for part in model.parameters() if part.grad is not None]

    once = go_back()
    twice = go_back()

    assert_near(twice, [2 * part for part in once])
    found = [part.grad for part in model.parameters() if part.grad is not None]
    assert len({part.data_ptr() for part in found}) == len(found) > 1


def test_edges_are_joined_once_for_the_layers_that_share_them(calls, monkeypatch):
    x, edges = read(make_batch())
    made, plain = [], joined_edges._join
    monkeypatch.setattr(joined_edges, "_join", lambda *args: made.append(1) or plain(*args))
    layers = [HeteroConv({name: SAGEConv((WIDTH, WIDTH), 8) for name in edges}) for _ in range(2)]
    expected = [run(layer, x, edges) for layer in layers]

    for layer in layers:
        accelerate(layer)

    assert_near(run(layers[0], x, edges), expected[0])
    assert_near(run(layers[1], x, edges), expected[1])
    assert (len(calls), len(made)) == (2, 1)


def test_trimmed_layers_equal_pyg(calls):
    batch = make_batch()
    x, edges = read(batch)
    nodes = batch.num_sampled_nodes_dict
    counts = {name: batch.num_sampled_edges_dict[name] for name in edges}
    x, edges, _ = trim_to_layer(1, nodes, counts, x, edges)
    model = HeteroConv({name: SAGEConv((WIDTH, WIDTH), 8) for name in edges})
    expected = run(model, x, edges)

    accelerate(model)

    assert_near(run(model, x, edges), expected)
    assert len(calls) == 1


def edit(case, model, x, edges):
    """(rows, edges) of a case in which some relation is not summed with the others."""
    first = next(iter(edges))
    if case == "other edges":
        edges = {**edges, first: edges[first].clone()}
    elif case == "written edges":
        edges[first].add_(0)
    elif case == "one relation":
        edges = {first: edges[first]}
    elif case == "a hook":
        model.convs[first].register_forward_hook(lambda *_: None)
    elif case == "a hook on messages":
        model.convs[first].register_message_forward_hook(lambda *_: None)
    elif case == "rows of no type":
        x = {kind: rows for kind, rows in x.items() if kind != first[0]}
        edges = {name: pair for name, pair in edges.items() if first[0] not in (name[0], name[-1])}
    return x, edges


@pytest.mark.parametrize("case", ["other edges", "written edges", "one relation", "a hook", "a hook on messages",
                                  "another sum", "a projection", "another width", "another class"])  # fmt: skip
def test_anything_else_is_summed_by_itself_and_the_rest_at_once(case, calls):
    x, edges = read(make_batch(widths={"author": 8} if case == "another width" else None))
    options = {"another sum": {"aggr": "sum"}, "a projection": {"project": True}}.get(case, {})
    convs = {name: SAGEConv((x[name[0]].shape[1], x[name[-1]].shape[1]), 8) for name in edges}
    first = next(iter(edges))
    sizes = x[first[0]].shape[1], x[first[-1]].shape[1]
    convs[first] = GraphConv(sizes, 8) if case == "another class" else SAGEConv(sizes, 8, **options)
    model = HeteroConv(convs)
    accelerated = accelerate(model)
    x, edges = edit(case, model, x, edges)

    got = run(model, x, edges)

    # Of the narrow ones there is one more than one, of the others two.
    groups = [[name for name in edges if name[0] == "author"], [name for name in edges if name[0] != "author"]]
    groups = groups if case == "another width" else [[name for name in edges if name != first]]
    assert calls == [sum(x[name[-1]].shape[0] for name in group) for group in groups if len(group) > 1]
    accelerated.undo()
    assert_near(got, run(model, x, edges))


def test_models_are_saved_copied_and_undone(calls):
    x, edges = read(make_batch())
    model = HeteroConv({name: SAGEConv((WIDTH, WIDTH), 8) for name in edges})
    expected, attributes = run(model, x, edges), set(model.__dict__)
    accelerated, file = accelerate(model), io.BytesIO()

    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_near(run(again, x, edges), expected)
    accelerate(again)
    calls.clear()
    run(again, x, edges)
    assert calls
    accelerated.undo()
    calls.clear()

    assert all(torch.equal(a, b) for a, b in zip(run(model, x, edges), expected, strict=True))
    assert (calls, set(model.__dict__)) == ([], attributes)


def test_what_is_joined_does_not_keep_itself_alive(calls):
    x, edges = read(make_batch())
    model = HeteroConv({name: SAGEConv((WIDTH, WIDTH), 8) for name in edges})
    accelerate(model)
    with torch.no_grad():
        model(x, edges)
    batches = [weakref.ref(find_batch(pair)) for pair in edges.values()]

    # As when the edges are gone.
    for place in [place for place, batch in _BATCHES.items() if weakref.ref(batch) in batches]:
        del _BATCHES[place]

    assert [batch() for batch in batches] == [None] * len(edges)
    assert len(calls) == 1
