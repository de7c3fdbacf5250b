"""RGCNConv and FastRGCNConv over whole graphs, and of nodes without rows, as in PyG's `rgcn.py`."""

import copy

import pytest
import torch
from torch_geometric.nn import FastRGCNConv, RGCNConv

from pyg_direct import accelerate
from pyg_direct.nn import whole_graphs
from pyg_direct.nn.conv import rgcn
from tests.nn.convolutions import assert_near
from tests.nn.tape import record_on_tapes

pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
NODES, EDGES, RELATIONS, WIDTH, OUT = 40, 300, 5, 8, 12
KINDS = {"mean": {}, "sum": {"aggr": "sum"}, "bases": {"num_bases": 2}, "bare": {"root_weight": False, "bias": False},
         "blocks": {"num_blocks": 4}}  # fmt: skip
GIVEN = ["rows", "none", "ids"]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Our reductions; whole graphs of any size are sorted."""
    monkeypatch.setattr(whole_graphs, "_WORTH", {"cpu": 0, "gpu": 0})
    made, plain = [], rgcn.aggregate
    monkeypatch.setattr(rgcn, "aggregate", lambda *args, **more: (made.append(1), plain(*args, **more))[1])
    return made


def make(kind, options, given, device, num_edges=EDGES):
    """(PyG's layer, an accelerated copy, its arguments)."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    edge_index = torch.randint(NODES, (2, num_edges), generator=draw).to(device)
    edge_type = torch.randint(RELATIONS - 1, (num_edges,), generator=draw).to(device)
    layer = kind(WIDTH if given == "rows" else NODES, OUT, RELATIONS, **options).double().to(device)
    x = None
    if given == "rows":
        x = torch.randn(NODES, WIDTH, dtype=torch.float64, generator=draw).to(device)
    elif given == "ids":
        x = (
            torch.arange(NODES, device=device)
            if kind is FastRGCNConv
            else torch.randint(NODES, (NODES,), generator=draw)
        )
        x = x.to(device)
    fast = copy.deepcopy(layer)
    assert accelerate(fast).convolutions == {"": kind.__name__}
    return layer, fast, (x, edge_index, edge_type)


def run(layer, x, edge_index, edge_type):
    leaves = [*([x.requires_grad_()] if x is not None and x.is_floating_point() else []), *layer.parameters()]
    out = layer(x, edge_index, edge_type)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


# PyG refuses blocks for nodes without rows.
CASES = [(options, given) for options in KINDS for given in GIVEN if options != "blocks" or given == "rows"]


@pytest.mark.parametrize(("options", "given"), CASES)
@pytest.mark.parametrize("kind", [RGCNConv, FastRGCNConv])
def test_a_graph_that_comes_back_equals_pyg(real_device, kind, options, given, calls):
    layer, fast, args = make(kind, KINDS[options], given, real_device)
    expected = run(layer, *args)

    for _ in range(12):
        got = run(fast, *args)

    assert calls
    assert_near(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", [RGCNConv, FastRGCNConv])
def test_relations_that_are_written_to_are_read_again(real_device, kind, given, calls):
    layer, fast, args = make(kind, {"num_bases": 2}, given, real_device)
    for _ in range(12):
        run(fast, *args)

    args[2].copy_(args[2].flip(0))

    assert_near(run(fast, *args), run(layer, *args), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrong", ["relation", "node", "negative node"])
def test_what_pyg_refuses_or_reads_in_its_own_way_is_left_to_it(wrong, calls):
    layer, fast, (x, edge_index, edge_type) = make(RGCNConv, {}, "ids", "cpu")
    for _ in range(12):
        fast(x, edge_index, edge_type)
    calls.clear()
    if wrong == "relation":
        edge_type[7] = RELATIONS
    else:
        x = x.clone()
        x[int(edge_index[0, 0])] = -1 if wrong == "negative node" else NODES

    if wrong == "negative node":
        assert_near([fast(x, edge_index, edge_type)], [layer(x, edge_index, edge_type)])
    else:
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            fast(x, edge_index, edge_type)
    assert not calls


def test_no_edges_leave_the_own_rows(real_device):
    layer, fast, args = make(RGCNConv, {}, "none", real_device, num_edges=0)

    for _ in range(12):
        got = fast(*args)

    assert_near([got], [layer(*args)])


def test_equal_steps_give_equal_bits(real_device, calls):
    _, fast, args = make(RGCNConv, {"num_bases": 2}, "none", real_device)
    for _ in range(12):
        run(fast, *args)

    assert all(map(torch.equal, run(fast, *args), run(fast, *args)))
    assert calls


def test_relations_on_a_cpu_are_read_again_after_numpy_wrote_to_them(calls):
    layer, fast, (x, edge_index, edge_type) = make(RGCNConv, {}, "rows", "cpu")
    for _ in range(12):
        fast(x, edge_index, edge_type)

    edge_type.numpy()[:] = (edge_type.numpy() + 1) % RELATIONS

    assert calls
    assert_near([fast(x, edge_index, edge_type)], [layer(x, edge_index, edge_type)], rtol=1e-6, atol=1e-7)


def test_relations_of_another_width_in_the_same_memory_are_others(calls):
    layer, fast, (x, edge_index, edge_type) = make(RGCNConv, {}, "rows", "cpu")
    for _ in range(12):
        fast(x, edge_index, edge_type)
    narrow = edge_type.view(torch.int32)[: len(edge_type)]

    got = fast(x, edge_index, narrow)

    assert_near([got], [layer(x, edge_index, narrow.long())], rtol=1e-6, atol=1e-7)


def test_new_relations_in_each_step_do_not_fill_memory():
    _, fast, (x, edge_index, edge_type) = make(RGCNConv, {}, "rows", "cpu")
    for step in range(40):
        fast(x, edge_index, (edge_type + step) % RELATIONS)

    graph = whole_graphs.find_whole(edge_index, NODES, WIDTH, saves_launches=True)

    assert 0 < sum("relations" in str(key) for key in graph._made) <= 8


@pytest.mark.parametrize("kind", [RGCNConv, FastRGCNConv])
@pytest.mark.parametrize("trains", [True, False])
def test_replayed_passes_read_the_relations_of_each_step(monkeypatch, kind, trains):
    record_on_tapes(monkeypatch)
    layer, _, (x, edge_index, edge_type) = make(kind, {}, "rows", "cpu")
    fast = copy.deepcopy(layer)
    accelerate(fast, replay="auto")

    for step in range(14):
        given = (edge_type + step) % RELATIONS
        with torch.set_grad_enabled(trains):
            got = fast(x, edge_index, given)
        assert_near([got], [layer(x, edge_index, given)], rtol=1e-6, atol=1e-7)
