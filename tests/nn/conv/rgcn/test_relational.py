"""RGCNConv over sorted edges: PyG's results and gradients, in one sum over all relations."""

import copy
import pickle

import pytest
import torch
from torch_geometric.nn import GATConv, HeteroConv, HeteroLinear, HGTConv, RGCNConv, SAGEConv, to_hetero

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.nn import dispatch
from pyg_direct.nn.conv import gat, hgt, rgcn, sage
from tests.hetero_data import make_hetero
from tests.nn.convolutions import assert_near
from tests.nn.test_trimming import Batch

WIDTH, OUT, RELATIONS = 8, 12, 4
KINDS = {"mean": {}, "sum": {"aggr": "sum"}, "max": {"aggr": "max"}, "bases": {"num_bases": 2},
         "blocks": {"num_blocks": 4}, "bare": {"root_weight": False, "bias": False}}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """Segments that our operator was asked to reduce."""
    made, aggregate = [], rgcn.aggregate

    def count(x, indptr, *args, **kwargs):
        made.append(indptr.numel() - 1)
        return aggregate(x, indptr, *args, **kwargs)

    monkeypatch.setattr(rgcn, "aggregate", count)
    return made


def make_types(batch):
    return torch.randint(RELATIONS - 1, (batch.edge_index.shape[1],)).to(batch.edge_index.device)


def run(conv, x, edge_index, edge_type):
    parts = [part.clone().requires_grad_() for part in (x if isinstance(x, tuple) else (x,))]
    out = conv(tuple(parts) if isinstance(x, tuple) else parts[0], edge_index, edge_type)
    return [out, *torch.autograd.grad(out.square().sum(), [*parts, *conv.parameters()], allow_unused=True)]


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_edges", [86, 46, 0])
def test_equals_pyg_with_one_call_of_our_operator(device, kind, num_edges, calls):
    batch, conv = Batch(device), RGCNConv(WIDTH, OUT, RELATIONS, **KINDS[kind]).to(device)
    edge_index, edge_type = batch.edge_index[:, :num_edges], make_types(batch)[:num_edges]
    expected = run(conv, batch.x, edge_index, edge_type)

    accelerated = accelerate(conv)
    got = run(conv, batch.x, edge_index, edge_type)

    assert accelerated.convolutions == {"": "RGCNConv"}
    assert_near([part for part in got if part is not None], [part for part in expected if part is not None])
    assert calls == [31 * RELATIONS]
    accelerated.undo()
    again = run(conv, batch.x, edge_index, edge_type)
    assert calls == [31 * RELATIONS]
    if device.type == "cpu":
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_sources_and_targets_may_differ(device, calls):
    batch, conv = Batch(device), RGCNConv((WIDTH, 5), OUT, RELATIONS).to(device)
    x = batch.x, torch.randn(20, 5, device=device)
    edge_type = make_types(batch)
    expected = run(conv, x, batch.edge_index, edge_type)

    accelerate(conv)

    assert_near(run(conv, x, batch.edge_index, edge_type), expected)
    assert len(calls) == 1


@pytest.mark.parametrize("case", ["another tensor of relations", "other edges", "undone",
                                  "too many sums"])  # fmt: skip
def test_anything_else_is_as_pyg_has_it(case, calls, monkeypatch):
    batch, conv = Batch(), RGCNConv(WIDTH, OUT, RELATIONS)
    x, edge_index, edge_type = batch.x, batch.edge_index, make_types(batch)
    accelerated = accelerate(conv)
    own = 0
    if case == "another tensor of relations":
        conv(x, edge_index, edge_type)
        edge_type.copy_(edge_type.flip(0))
        own = 2
    elif case == "other edges":
        edge_index = edge_index.clone()
    elif case == "undone":
        accelerated.undo()
    else:
        monkeypatch.setattr(rgcn, "_MOST_ITEMS", 10)

    got = conv(x, edge_index, edge_type)

    assert len(calls) == own
    accelerated.undo()
    torch.testing.assert_close(got, conv(x, edge_index, edge_type), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_written", [False, True])
def test_relations_may_be_told_in_inference_mode(device, is_written, calls):
    batch, conv = Batch(device), RGCNConv(WIDTH, OUT, RELATIONS).to(device)
    accelerated = accelerate(conv)

    with torch.inference_mode():
        edge_type = make_types(batch)
        conv(batch.x, batch.edge_index, edge_type)
        if is_written:
            edge_type.copy_(edge_type.flip(0))
        got = conv(batch.x, batch.edge_index, edge_type)

    assert len(calls) == 2
    accelerated.undo()
    torch.testing.assert_close(got, conv(batch.x, batch.edge_index, edge_type.clone()), rtol=1e-4, atol=1e-5)


def test_a_relation_that_is_none_is_refused_by_pyg(calls):
    batch, conv = Batch(), RGCNConv(WIDTH, OUT, RELATIONS)
    edge_type = make_types(batch)
    edge_type[3] = RELATIONS
    accelerate(conv)

    with pytest.raises(RuntimeError, match="index 4 is out of bounds"):
        conv(batch.x, batch.edge_index, edge_type)

    assert calls == []


def make_batch_with_types(device):
    """Return (a batch with types, its relations that join nodes)."""
    data = make_hetero()
    for kind in data.node_types:
        data[kind].x = torch.rand(data[kind].num_nodes, 16)
    device = "cuda" if device.type == "cuda" else "cpu"
    batch = next(iter(NeighborLoader(data, [3, 2], ("paper", torch.arange(12)), batch_size=12, device=device)))
    return batch, [kind for kind in data.edge_types if "nobody" not in kind]


def make_hetero_conv(types):
    return HeteroConv({kind: SAGEConv((-1, -1), 8) for kind in types})


def make_transformed(types):
    """A model of two layers that PyG rewrites for types."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = SAGEConv((-1, -1), 12), GATConv((-1, -1), 4, heads=2, add_self_loops=False)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    nodes = sorted({end for kind in types for end in (kind[0], kind[-1])})
    return to_hetero(Model(), (nodes, types))


@pytest.mark.parametrize(("make", "layers", "launches"), [(make_hetero_conv, 1, 1), (make_transformed, 2, 2)])
def test_relations_of_a_batch_with_types(real_device, make, layers, launches, monkeypatch):
    calls = []
    for module, name in ((dispatch, "aggregate"), (gat, "attend"), (sage, "sum_known")):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, plain=plain, **k: calls.append(1) or plain(*a, **k))
    batch, types = make_batch_with_types(real_device)
    model = make(types).to(batch["paper"].x.device)
    x, edges = batch.x_dict, {kind: batch.edge_index_dict[kind] for kind in types}
    model(x, edges)

    def run():
        rows = {kind: part.clone().requires_grad_() for kind, part in x.items()}
        out = {kind: part for kind, part in model(rows, edges).items() if part is not None}
        total = sum(part.square().sum() for part in out.values())
        grads = torch.autograd.grad(total, [*rows.values(), *model.parameters()], allow_unused=True)
        return [*out.values(), *(grad for grad in grads if grad is not None)]

    expected = run()
    accelerated = accelerate(model)
    got = run()

    assert len(accelerated.convolutions) == layers * len(types) == 5 * layers
    assert len(calls) == launches
    assert_near(got, expected, 1e-3, 1e-4)
    accelerated.undo()
    again = run()
    assert len(calls) == launches
    if real_device.type == "cpu":
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


def test_a_transformed_model_is_copied_pickled_and_changed_as_before():
    batch, types = make_batch_with_types(torch.device("cpu"))
    x, edges = batch.x_dict, {kind: batch.edge_index_dict[kind] for kind in types}
    model = make_transformed(types)
    expected = model(x, edges)["paper"]
    accelerated = accelerate(model)

    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))

    for other in (model, copied, pickled):
        assert_near([other(x, edges)["paper"]], [expected])
    (name, *_) = model.first
    model.first[name] = copy.deepcopy(model.first[name])
    torch.nn.init.zeros_(model.first[name].lin_l.weight)
    got = model(x, edges)["paper"]
    accelerated.undo()
    assert_near([got], [model(x, edges)["paper"]])
    assert not torch.allclose(got, expected)
    assert type(model).forward.__name__ == type(make_transformed(types)).forward.__name__


@pytest.mark.parametrize("fanouts", [[3, 2], [-1, 2]])
def test_attention_over_relations_equals_pyg(device, fanouts, monkeypatch):
    calls, plain = [], hgt.weigh_values
    monkeypatch.setattr(hgt, "weigh_values", lambda *args, **kwargs: calls.append(kwargs) or plain(*args, **kwargs))
    data = make_hetero()
    # Sums of all gradients are rounded by more than is allowed in fp32.
    for kind in data.node_types:
        data[kind].x = torch.rand(data[kind].num_nodes, 16, dtype=torch.float64)
    device = "cuda" if device.type == "cuda" else "cpu"
    batch = next(iter(NeighborLoader(data, fanouts, ("paper", torch.arange(12)), batch_size=12, device=device)))
    conv = HGTConv(16, 16, data.metadata(), heads=2).to(device, torch.float64)

    def run():
        x = {kind: rows.clone().requires_grad_() for kind, rows in batch.x_dict.items()}
        out = conv(x, batch.edge_index_dict)
        total = sum(rows.square().sum() for rows in out.values())
        grads = torch.autograd.grad(total, [*x.values(), *conv.parameters()], allow_unused=True)
        return [*out.values(), *(grad for grad in grads if grad is not None)]

    expected = run()
    accelerated = accelerate(conv)
    got = run()

    assert accelerated.convolutions == {"": "HGTConv"}
    assert_near(got, expected)
    assert len(calls) == 1
    accelerated.undo()
    again = run()
    if device == "cpu":
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))
    # Atomics of PyG's own kernels differ from run to run.
    assert_near(again, expected)
    assert len(calls) == 1


def read_gradients(conv, out):
    return torch.autograd.grad(sum(rows.square().sum() for rows in out.values()), list(conv.parameters()),
                               allow_unused=True)  # fmt: skip


@pytest.mark.parametrize(("change", "own"), [
    (lambda edges: edges, True), (lambda edges: dict(list(edges.items())[1:3]), True),
    # PyG then takes the matrices of other relations, and so do we.
    (lambda edges: dict(reversed(edges.items())), False),
    (lambda edges: {kind: pair.clone() for kind, pair in edges.items()}, False),
], ids=["all", "some", "in another order", "unknown"])  # fmt: skip
def test_attention_multiplies_the_sources_of_a_relation_at_once(change, own, monkeypatch):
    batch, types = make_batch_with_types(torch.device("cpu"))
    edges = change({kind: batch.edge_index_dict[kind] for kind in types})
    conv = HGTConv(16, 16, batch.metadata(), heads=2)
    expected, calls, plain = conv(batch.x_dict, edges), [], HeteroLinear.forward
    monkeypatch.setattr(HeteroLinear, "forward", lambda *args: calls.append(1) or plain(*args))

    expected_grads = read_gradients(conv, expected)
    accelerated = accelerate(conv)
    got, copied = conv(batch.x_dict, edges), copy.deepcopy(conv)

    assert len(calls) == (0 if own else 2)
    for grad, other in zip(read_gradients(conv, got), expected_grads, strict=True):
        # For a parameter that no relation here uses PyG gives None, which optimizers treat differently from zeros.
        assert (grad is None) == (other is None)
        if grad is not None:
            torch.testing.assert_close(grad, other, rtol=1e-3, atol=1e-4)
    for kind in expected:
        torch.testing.assert_close(got[kind], expected[kind], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(copied(batch.x_dict, edges)[kind], expected[kind], rtol=1e-4, atol=1e-5)
    accelerated.undo()
    assert "_construct_src_node_feat" not in conv.__dict__
