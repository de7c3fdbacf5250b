"""Relations of GINConv, GATConv, GATv2Conv and GCNConv in a HeteroConv: PyG's results and gradients, in one sum."""

import copy
from itertools import product

import pytest
import torch
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, HeteroConv, SAGEConv, to_hetero

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.nn.conv import gat, gcn, gin, sage
from pyg_direct.nn.hetero import joined_edges
from tests.hetero_data import make_hetero
from tests.nn.convolutions import assert_near, note_forward
from tests.nn.hetero.hetero_conv.test_joined import run

WIDTH, OUT = 16, 8


@pytest.fixture
def calls(monkeypatch):
    """Record (caller, targets) of each sum and softmax."""
    made = []
    for module, name in ((gin, "add_own"), (gat, "attend"), (gat, "aggregate"), (gcn, "aggregate")):
        plain, label = getattr(module, name), f"{'.'.join(module.__name__.split('.')[-2:])}.{name}"

        def count(*args, plain=plain, label=label, **kwargs):
            # Weights of GCN are sums of ones.
            if not (label == "conv.gcn.aggregate" and args[0].shape[1] == 1):
                made.append(label)
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, name, count)
    for kind, label in ((gin._JoinedSums, "joined gin"), (sage._TypedLayer, "joined sage")):
        note_forward(monkeypatch, kind, lambda *args, label=label: made.append(label))
    return made


def make_batch(device="cpu", dtype=torch.float32, widths=None, seeds="paper"):
    """(rows by type, edges by relation), with two relations among papers and one venue that most papers are in."""
    data = make_hetero()
    draw = torch.Generator().manual_seed(3)
    data["paper", "likes", "paper"].edge_index = torch.randint(40, (2, 90), generator=draw)
    for kind in data.node_types:
        rows = torch.randn(data[kind].num_nodes, (widths or {}).get(kind, WIDTH), generator=draw)
        data[kind].x = rows.to(dtype)
    device = "cuda" if str(device).startswith("cuda") else "cpu"
    count = data[seeds].num_nodes
    batch = next(iter(NeighborLoader(data, [-1, 2], (seeds, torch.arange(count)), batch_size=12, device=device)))
    return batch.x_dict, {kind: pair for kind, pair in batch.edge_index_dict.items() if "nobody" not in kind}


def mlp(width):
    return Sequential(Linear(width, OUT), ReLU(), Linear(OUT, OUT))


MAKES = {
    "gin": lambda one, other: GINConv(mlp(one)),
    "gin of trained eps": lambda one, other: GINConv(mlp(one), eps=0.3, train_eps=True),
    "gin of means": lambda one, other: GINConv(mlp(one), eps=0.3, train_eps=True, aggr="mean"),
    "gin that writes": lambda one, other: GINConv(Sequential(ReLU(inplace=True), Linear(one, OUT)), train_eps=True),
    "gat": lambda one, other: GATConv((one, other), 4, heads=2, add_self_loops=False),
    "gat of means": lambda one, other: GATConv((one, other), OUT, heads=3, concat=False, add_self_loops=False),
    "gat of one head": lambda one, other: GATConv((one, other), OUT, add_self_loops=False, negative_slope=0.3),
    "gat of one matrix": lambda one, other: GATConv(one, 4, heads=2, add_self_loops=False, bias=False),
    "gatv2": lambda one, other: GATv2Conv((one, other), 4, heads=2, add_self_loops=False),
    "gatv2 of means": lambda one, other: GATv2Conv((one, other), OUT, heads=3, concat=False, add_self_loops=False),
    "gatv2 of one matrix": lambda one, other: GATv2Conv(one, OUT, add_self_loops=False, bias=False, share_weights=True),
    "gatv2 and residuals": lambda one, other: GATv2Conv((one, other), 4, heads=2, add_self_loops=False, residual=True),
    "gat and residuals": lambda one, other: GATConv((one, other), 4, heads=2, add_self_loops=False, residual=True),
}
EXPECTED = {"gin": ["joined gin"], "gat": ["conv.gat.attend"], "gcn": ["conv.gcn.aggregate"]}


def make_layer(kind, x, edges, aggr="sum"):
    device = next(iter(x.values())).device
    return HeteroConv({name: MAKES[kind](x[name[0]].shape[1], x[name[-1]].shape[1]) for name in edges}, aggr).to(device)


def differentiate_twice(rows, leaves):
    """Return gradients of the cubes of rows by type, and the gradients of the squares of these gradients, if there are
    any.
    """
    total = sum(part.pow(3).sum() for part in rows.values())
    grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    grads = [part for part in grads if part is not None]
    again = torch.autograd.grad(sum(part.square().sum() for part in grads), leaves, allow_unused=True)
    return [*grads, *(part for part in again if part is not None)]


@pytest.mark.parametrize("seeds", ["paper", "venue"])
@pytest.mark.parametrize("kind", MAKES)
def test_equals_pyg_with_one_launch_for_all_relations(real_device, kind, seeds, calls):
    # Sums of all gradients are rounded by more than is allowed in fp32.
    dtype = torch.float64 if kind.startswith(("gat", "gin")) else torch.float32
    x, edges = make_batch(real_device, dtype, seeds=seeds)
    model = make_layer(kind, x, edges).to(dtype)
    expected = run(model, x, edges)

    accelerated = accelerate(model)
    got = [run(model, x, edges) for _ in range(2)]

    assert_near(got[0], expected)
    assert_near(got[1], expected)
    assert calls == EXPECTED[kind[:3]] * 2
    accelerated.undo()
    again = run(model, x, edges)
    assert calls == EXPECTED[kind[:3]] * 2
    if real_device.type == "cpu":
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


@pytest.mark.parametrize("kind", ["gin of trained eps", "gat", "gatv2"])
def test_results_in_fp32_are_those_of_pyg(real_device, kind, calls):
    x, edges = make_batch(real_device)
    model = make_layer(kind, x, edges, "mean")
    expected = model(x, edges)

    accelerate(model)
    got = model(x, edges)

    assert list(got) == list(expected)
    assert_near(got.values(), expected.values())
    assert calls == EXPECTED[kind[:3]]


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"bias": False}, {"improved": True}], ids=str)
@pytest.mark.parametrize("out", [24, 8], ids=["wider", "narrower"])
def test_gcn_over_relations_of_a_type_with_itself(real_device, options, out, calls):
    x, edges = make_batch(real_device, torch.float64)
    edges = {name: pair for name, pair in edges.items() if name[0] == name[-1]}
    assert len(edges) == 3
    model = HeteroConv({name: GCNConv(WIDTH, out, **options) for name in edges}).to(x["paper"].device, torch.float64)
    expected = run(model, x, edges)

    accelerated = accelerate(model)
    got = [run(model, x, edges) for _ in range(2)]

    assert_near(got[0], expected)
    assert_near(got[1], expected)
    assert calls == EXPECTED["gcn"] * 2
    accelerated.undo()
    if real_device.type == "cpu":
        assert all(torch.equal(one, other) for one, other in zip(run(model, x, edges), expected, strict=True))
    model.float()
    x = {kind: rows.float() for kind, rows in x.items()}
    plain = model(x, edges)
    accelerate(model)
    assert_near(model(x, edges).values(), plain.values())
    assert calls == EXPECTED["gcn"] * 3


def test_each_kind_goes_together_and_the_rest_by_itself(real_device, calls):
    x, edges = make_batch(real_device, torch.float64)
    first, second, third, *others = edges
    convs = {first: MAKES["gin"](WIDTH, WIDTH), second: MAKES["gat"](WIDTH, WIDTH), third: SAGEConv(WIDTH, OUT),
             others[0]: MAKES["gin"](WIDTH, WIDTH), others[1]: MAKES["gat"](WIDTH, WIDTH),
             others[2]: GATv2Conv((WIDTH, WIDTH), OUT, add_self_loops=False)}  # fmt: skip
    assert set(convs) == set(edges)
    model = HeteroConv(convs).to(x["paper"].device, torch.float64)
    expected = run(model, x, edges)

    accelerate(model)

    assert_near(run(model, x, edges), expected)
    assert calls == [*EXPECTED["gin"], *EXPECTED["gat"], "conv.gat.attend"]


@pytest.mark.parametrize(("kind", "edit", "count"), [
    ("gat", {"add_self_loops": True}, 1), ("gat", {"heads": 1, "out_channels": 8}, 1), ("gat", {"dropout": 0.5}, 1),
    ("gin", {"aggr": "mean"}, 1), ("gin", {"width": 8}, 3),
], ids=str)  # fmt: skip
def test_relations_that_are_not_alike_are_by_themselves(kind, edit, count, calls):
    width = edit.pop("width", None)
    x, edges = make_batch(dtype=torch.float64, widths={"author": width or WIDTH})
    edges = {name: pair for name, pair in edges.items() if width is None or name[0] == name[-1]}
    model = make_layer(kind, x, edges).to(torch.float64).eval()
    odd = next(iter(edges)) if width is None else ("author", "knows", "author")
    options = {"out_channels": 4, "heads": 2, "add_self_loops": False, **edit}
    if kind == "gat":
        odd = ("paper", "cites", "paper")
        model.convs[odd] = GATConv((WIDTH, WIDTH), **options).double().eval()
    elif width is None:
        model.convs[odd] = GINConv(mlp(WIDTH), **edit).double()
    if "dropout" in edit:
        # Dropout has no effect in `eval`, so both are alike.
        model.convs[odd].train()
        model.convs[odd].dropout = 1.0
    expected = run(model, x, edges)

    accelerate(model)

    assert_near(run(model, x, edges), expected)
    # Dropout acts between the softmax and the sum.
    by_itself = "conv.gat.aggregate" if "dropout" in edit else "conv.gat.attend"
    alone = {"gat": [by_itself], "gin": ["conv.gin.add_own"]}[kind]
    assert sorted(calls) == sorted([*EXPECTED[kind], *alone])
    assert len(edges) == (6 if width is None else count)


def test_large_sums_of_gin_are_by_themselves_on_a_cpu(calls, monkeypatch):
    x, edges = make_batch()
    model = make_layer("gin", x, edges)
    expected = run(model, x, edges)
    accelerate(model)
    size = 4 * WIDTH * sum(x[name[-1]].shape[0] for name in edges)

    for most in (size, size - 1):
        monkeypatch.setattr(gin, "MOST_BYTES", most)
        assert_near(run(model, x, edges), expected)

    assert calls == [*EXPECTED["gin"], *["conv.gin.add_own"] * len(edges)]


def test_many_edges_of_gatv2_are_by_themselves_on_a_cpu(calls, monkeypatch):
    x, edges = make_batch(dtype=torch.float64)
    model = make_layer("gatv2", x, edges).double()
    expected = run(model, x, edges)
    accelerate(model)
    size = 8 * 8 * sum(pair.shape[1] for pair in edges.values())

    for most in (size, size - 1):
        monkeypatch.setattr(gat, "_MOST_BYTES", most)
        assert_near(run(model, x, edges), expected)

    assert calls == EXPECTED["gat"] * (1 + len(edges))


def make_double(kind, gcn_width):
    """A layer in double precision, its rows and its edges; of GCN over relations from a type to itself."""
    x, edges = make_batch(dtype=torch.float64)
    if kind != "gcn":
        return make_layer(kind, x, edges).double(), x, edges
    edges = {name: pair for name, pair in edges.items() if name[0] == name[-1]}
    return HeteroConv({name: GCNConv(WIDTH, gcn_width) for name in edges}).double(), x, edges


@pytest.mark.parametrize("kind", ["gin of trained eps", "gin of means", "gat and residuals", "gatv2 and residuals",
                                  "gcn"])  # fmt: skip
def test_gradients_are_differentiated_again(kind):
    model, x, edges = make_double(kind, 24)

    def differentiate():
        rows = {name: part.clone().requires_grad_() for name, part in x.items()}
        return differentiate_twice(model(rows, edges), [*rows.values(), *model.parameters()])

    expected = differentiate()
    accelerate(model)

    for one, other in zip(differentiate(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize("kind", ["gin of trained eps", "gat", "gatv2", "gcn"])
def test_only_what_asks_for_a_gradient_gets_one(kind):
    model, x, edges = make_double(kind, 8)
    fast, source = copy.deepcopy(model), "paper" if kind == "gcn" else "author"
    accelerate(fast)

    def differentiate(model, frozen):
        for parameter in model.parameters():
            parameter.requires_grad_(not frozen).grad = None
        rows = {name: part.clone().requires_grad_(frozen and name == source) for name, part in x.items()}
        model(rows, edges)["paper"].square().sum().backward()
        return [part.grad for part in (*rows.values(), *model.parameters())]

    for frozen in (False, True):
        for got, expected in zip(differentiate(fast, frozen), differentiate(model, frozen), strict=True):
            # Tensors that lead to other types get None, which optimizers treat differently from zeros.
            assert (got is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("kind", ["sage", "gin of trained eps", "gat and residuals", "gatv2 and residuals", "gcn"])
def test_rows_that_lead_nowhere_get_no_gradient(real_device, kind, again):
    x, edges = make_batch(real_device, torch.float64)
    if kind == "gcn":
        edges = {name: pair for name, pair in edges.items() if name[0] == name[-1]}
    makes = MAKES | {"gcn": lambda one, other: GCNConv(one, WIDTH), "sage": lambda *ends: SAGEConv(ends, WIDTH)}
    layers = [HeteroConv({name: makes[kind](WIDTH, WIDTH) for name in edges}) for _ in range(1 + (kind == "sage"))]
    model = torch.nn.ModuleList(layers).to(x["paper"].device, torch.float64)

    def differentiate(target):
        rows = {name: part.clone().requires_grad_() for name, part in x.items()}
        out = rows
        for layer in model:
            out = layer(out, edges)
        given = [*rows.values(), *model.parameters()]
        found = torch.autograd.grad(out[target].pow(3).sum(), given, allow_unused=True, create_graph=again)
        if again:
            total = sum(part.square().sum() for part in found if part is not None)
            found += torch.autograd.grad(total, given, allow_unused=True)
        return list(out), found

    targets = list(dict.fromkeys(name[-1] for name in edges))
    expected = [differentiate(target) for target in targets]
    accelerate(model)

    for target, (names, grads) in zip(targets, expected, strict=True):
        got_names, got = differentiate(target)
        assert got_names == names
        # Optimizers treat None differently from zeros.
        assert [grad is None for grad in got] == [grad is None for grad in grads]
        for one, other in zip(got, grads, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["gin", "sage"])
@pytest.mark.parametrize("again", [False, True])
def test_one_table_is_learned_whether_or_not_results_reach_it(real_device, kind, again):
    x, edges = make_batch(real_device, torch.float64)
    makes = MAKES | {"sage": lambda *ends: SAGEConv(ends, WIDTH)}
    model = HeteroConv({name: makes[kind](WIDTH, WIDTH) for name in edges}).to(x["paper"].device, torch.float64)
    # Only one table of the layer's inputs requires a gradient.
    model.requires_grad_(False)

    def differentiate(target, name):
        rows = {**x, name: x[name].clone().requires_grad_()}
        loss = model(rows, edges)[target].pow(3).sum() + rows[name].pow(2).sum()
        return torch.autograd.grad(loss, rows[name], create_graph=again)

    pairs = list(product(dict.fromkeys(name[-1] for name in edges), x))
    expected = [differentiate(*pair) for pair in pairs]
    accelerate(model)

    for pair, (other,) in zip(pairs, expected, strict=True):
        (one,) = differentiate(*pair)
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["gin", "gat", "gatv2"])
def test_edges_are_joined_once_for_the_layers_that_share_them(name, calls, monkeypatch):
    x, edges = make_batch()
    made, plain = [], joined_edges._join
    monkeypatch.setattr(joined_edges, "_join", lambda *args: made.append(1) or plain(*args))
    layers = [make_layer(name, x, edges) for _ in range(2)]

    for layer in layers:
        accelerate(layer)
        layer(x, edges)

    assert (len(calls), len(made)) == (2 * len(EXPECTED[name[:3]]), 1)


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
@pytest.mark.full
def test_dropout_of_attention_takes_its_share_and_keeps_the_mean(kind):
    x, edges = make_batch(dtype=torch.float64)
    model = make_layer(kind, x, edges).double()
    expected = model(x, edges)["paper"]
    for module in model.convs.values():
        module.dropout = 0.5
    accelerate(model)

    drawn = torch.stack([model(x, edges)["paper"] for _ in range(600)])

    assert not torch.equal(drawn[0], drawn[1])
    error = (drawn.mean(0) - expected).abs() / (drawn.std(0) / 600**0.5 + 1e-9)
    assert error.max() < 6


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GINConv(mlp(WIDTH), train_eps=True), GATConv((-1, -1), 4, 2, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def test_models_of_to_hetero_sum_each_layer_at_once(real_device, calls):
    x, edges = make_batch(real_device, torch.float64)
    nodes = sorted({end for name in edges for end in (name[0], name[-1])})
    model = to_hetero(_Model(), (nodes, list(edges))).to(x["paper"].device, torch.float64)
    x = {name: x[name] for name in nodes}
    model(x, edges)
    expected = run(model, x, edges)

    accelerated = accelerate(model)

    assert_near(run(model, x, edges), expected)
    assert calls == [*EXPECTED["gin"], *EXPECTED["gat"]]
    accelerated.undo()
    again = run(model, x, edges)
    assert len(calls) == 2
    if real_device.type == "cpu":
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))
