"""Relations of GINEConv in a HeteroConv or a model of `to_hetero`: PyG's results and gradients, in one sum."""

import copy

import pytest
import torch
from torch.nn import Linear
from torch_geometric.nn import GINConv, GINEConv, HeteroConv, to_hetero

from pyg_direct import accelerate
from pyg_direct.nn.conv import gine
from tests.nn.convolutions import assert_near
from tests.nn.hetero.hetero_conv.test_kinds import OUT, WIDTH, differentiate_twice, make_batch, mlp

EDGE_WIDTH = 5


@pytest.fixture
def calls(monkeypatch):
    """Record the caller of each sum of messages."""
    made, joins, join, plain = [], [], gine.join_edges, gine.sum_messages
    monkeypatch.setattr(gine, "join_edges", lambda *args: joins.append(1) or join(*args))
    monkeypatch.setattr(gine, "sum_messages", lambda *args, **kwargs: (
        made.append("joined" if joins else "alone") or joins.clear() or plain(*args, **kwargs)))  # fmt: skip
    return made


MAKES = {
    "a matrix for edges": lambda: GINEConv(mlp(WIDTH), edge_dim=EDGE_WIDTH),
    "trained eps": lambda: GINEConv(mlp(WIDTH), eps=0.3, train_eps=True, edge_dim=EDGE_WIDTH),
    "means": lambda: GINEConv(mlp(WIDTH), aggr="mean", edge_dim=EDGE_WIDTH),
    "maxima": lambda: GINEConv(mlp(WIDTH), aggr="max", edge_dim=EDGE_WIDTH),
    "edges as wide as nodes": lambda: GINEConv(mlp(WIDTH), train_eps=True),
}


def make(kind, device="cpu", dtype=torch.float64, seeds="paper"):
    """(layer, rows by type, edges by relation, rows of edges by relation)."""
    x, edges = make_batch(device, dtype, seeds=seeds)
    draw = torch.Generator().manual_seed(5)
    width = WIDTH if kind == "edges as wide as nodes" else EDGE_WIDTH
    device = x["paper"].device
    along = {name: torch.randn(pair.shape[1], width, generator=draw).to(device, dtype) for name, pair in edges.items()}
    return HeteroConv({name: MAKES[kind]() for name in edges}).to(device, dtype), x, edges, along


def run(model, x, edges, along, **options):
    rows, of_edges = ({name: part.clone().requires_grad_() for name, part in parts.items()} for parts in (x, along))
    out = model(rows, edges, **options, edge_attr_dict=of_edges)
    given = [*rows.values(), *of_edges.values(), *model.parameters()]
    grads = torch.autograd.grad(sum(part.square().sum() for part in out.values()), given, allow_unused=True)
    return [*out.values(), *(grad for grad in grads if grad is not None)]


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("seeds", ["paper", "venue"])
@pytest.mark.parametrize("kind", MAKES)
def test_equals_pyg_with_one_sum_for_all_relations(real_device, kind, seeds, calls):
    model, *given = make(kind, real_device, seeds=seeds)
    expected = run(model, *given)

    accelerated = accelerate(model)
    got = [run(model, *given) for _ in range(2)]

    assert len(accelerated.convolutions) == len(given[1])
    assert_near(got[0], expected)
    assert_near(got[1], expected)
    assert calls == ["joined"] * 2
    accelerated.undo()
    again = run(model, *given)
    assert len(calls) == 2
    if real_device.type == "cpu":
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_narrower_numbers_are_as_near_the_exact_result_as_those_of_pyg(real_device, dtype, near, calls):
    model, *given = make("a matrix for edges", real_device, dtype)

    def apply(module, dtype):
        rows, of_edges = ({name: part.to(dtype) for name, part in parts.items()} for parts in (given[0], given[2]))
        return torch.cat([part.double().flatten() for part in module(rows, given[1], edge_attr_dict=of_edges).values()])

    exact, plain = apply(copy.deepcopy(model).double(), torch.float64), apply(model, dtype)
    accelerate(model)

    got = apply(model, dtype)

    if dtype == torch.float32:
        assert_near([got], [plain])
    assert (got - exact).norm() <= near * exact.norm()
    assert (got - exact).norm() <= 1.5 * (plain - exact).norm()
    assert calls == ["joined"]


def test_gradients_are_differentiated_again():
    model, *given = make("trained eps")

    def differentiate():
        rows, of_edges = ({name: part.clone().requires_grad_() for name, part in parts.items()}
                          for parts in (given[0], given[2]))  # fmt: skip
        leaves = [*rows.values(), *of_edges.values(), *model.parameters()]
        return differentiate_twice(model(rows, given[1], edge_attr_dict=of_edges), leaves)

    expected = differentiate()
    accelerate(model)

    for one, other in zip(differentiate(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-6)


def test_only_what_a_result_is_used_of_gets_a_gradient():
    model, x, edges, along = make("trained eps")
    fast = copy.deepcopy(model)
    accelerate(fast)

    def differentiate(model):
        rows, of_edges = ({name: part.clone().requires_grad_() for name, part in parts.items()} for parts in (x, along))
        model(rows, edges, edge_attr_dict=of_edges)["venue"].square().sum().backward()
        return [part.grad for part in (*rows.values(), *of_edges.values(), *model.parameters())]

    got, expected = differentiate(fast), differentiate(model)

    assert any(part is None for part in expected)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", ["another width", "another dtype", "a hook", "another class", "no matrix that fits"])
def test_relations_that_are_not_alike_are_by_themselves(case, calls):
    model, x, edges, along = make("a matrix for edges")
    odd = next(iter(edges))
    if case == "another width":
        model.convs[odd] = GINEConv(mlp(WIDTH), edge_dim=EDGE_WIDTH + 1).double()
        along[odd] = torch.randn(len(along[odd]), EDGE_WIDTH + 1).double()
    elif case == "another dtype":
        along[odd] = along[odd].float()
        model.convs[odd].lin.float()
    elif case == "a hook":
        model.convs[odd].register_forward_hook(lambda module, given, out: out + 1)
    elif case == "another class":
        model.convs[odd] = GINConv(mlp(WIDTH)).double()
        del along[odd]
    else:
        model.convs[odd] = GINEConv(mlp(WIDTH)).double()
        along[odd] = torch.randn(len(along[odd]), WIDTH).double()
    expected = run(model, x, edges, along)

    accelerate(model)

    assert_near(run(model, x, edges, along), expected)
    # Matrices of other widths serve all the same.
    alone = {"another width": 0, "another class": 0, "no matrix that fits": 0}.get(case, 1)
    assert sorted(calls) == ["alone"] * alone + ["joined"]


@pytest.mark.parametrize(("edit", "error"), [
    (lambda edges, along: along.pop(next(iter(edges))), TypeError),
    (lambda edges, along: along.update({next(iter(edges)): torch.randn(3, EDGE_WIDTH).double()}), RuntimeError),
    (lambda edges, along: along.update({next(iter(edges)): torch.randn(len(next(iter(along.values()))), 2).double()}),
     RuntimeError),
], ids=["none", "too few", "too narrow"])  # fmt: skip
def test_what_fits_no_edges_is_refused_by_pyg(edit, error):
    model, x, edges, along = make("a matrix for edges")
    edit(edges, along)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        model(x, edges, edge_attr_dict=along)

    accelerate(model)

    with pytest.raises(error) as got:
        model(x, edges, edge_attr_dict=along)
    assert str(got.value) == str(expected.value)


def test_rows_told_by_type_of_node_are_left_to_pyg(calls):
    model, x, edges, along = make("a matrix for edges")
    accelerate(model)

    with pytest.raises(Exception, match=r"."):
        model(x, edges, edge_attr_dict={**along, "paper": torch.randn(3, EDGE_WIDTH)}, more_dict=x)
    assert calls == []


def test_many_messages_are_by_themselves_on_a_cpu(calls, monkeypatch):
    model, *given = make("a matrix for edges")
    expected = run(model, *given)
    accelerate(model)
    size = 8 * WIDTH * sum(pair.shape[1] for pair in given[1].values())

    for most in (size, size - 1):
        monkeypatch.setattr(gine, "MOST_BYTES", most)
        assert_near(run(model, *given), expected)

    assert calls == ["joined", *["alone"] * len(given[1])]


class _Model(torch.nn.Module):
    def __init__(self, by_name):
        super().__init__()
        self.first, self.second = (GINEConv(Linear(WIDTH, out), edge_dim=EDGE_WIDTH) for out in (WIDTH, OUT))
        self.by_name = by_name

    def forward(self, x, edge_index, edge_attr):
        if self.by_name:
            return self.second(self.first(x, edge_index, edge_attr=edge_attr).relu(), edge_index, edge_attr=edge_attr)
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


@pytest.mark.parametrize("by_name", [False, True])
def test_models_of_to_hetero_sum_each_layer_at_once(real_device, by_name, calls):
    _, x, edges, along = make("a matrix for edges", real_device)
    nodes = sorted({end for name in edges for end in (name[0], name[-1])})
    model = to_hetero(_Model(by_name), (nodes, list(edges))).to(x["paper"].device, torch.float64)
    x = {name: x[name] for name in nodes}

    def compute():
        rows = {name: part.clone().requires_grad_() for name, part in x.items()}
        out = model(rows, edges, along)
        total = sum(part.square().sum() for part in out.values())
        grads = torch.autograd.grad(total, [*rows.values(), *model.parameters()], allow_unused=True)
        return [*out.values(), *(grad for grad in grads if grad is not None)]

    expected = compute()
    accelerated = accelerate(model)

    assert_near(compute(), expected)
    assert calls == ["joined"] * 2
    accelerated.undo()
    compute()
    assert len(calls) == 2


def test_networks_are_told_as_pyg_tells_them():
    model, *given = make("means")
    seen = []
    for module in model.convs.values():
        module.nn.register_forward_hook(lambda module, given, out: seen.append(tuple(given[0].shape)))
    model(*given[:2], edge_attr_dict=given[2])
    expected, seen[:] = list(seen), []

    accelerate(model)
    model(*given[:2], edge_attr_dict=given[2])

    assert seen == expected
