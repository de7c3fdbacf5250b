"""A layer in one step of autograd: torch's results and gradients, also second gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphConv, SAGEConv

from pyg_direct import accelerate
from pyg_direct.nn.conv.sage import _multiplies_first, convolve
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from tests.nn.convolutions import EDGES, NODES, WIDTH, Batch, assert_near, run

NUM_NODES, NUM_TARGETS, OUT = sum(NODES), sum(NODES[:2]), 10


def make_parts(device, is_same, dtype=torch.float64, has_bias=True):
    num_targets = NUM_NODES if is_same else NUM_TARGETS
    shapes = [(NUM_NODES, WIDTH), (num_targets, WIDTH), (OUT, WIDTH), (OUT,), (OUT, WIDTH)]
    x, own, weight, bias, own_weight = (torch.randn(s, dtype=dtype).to(device).requires_grad_() for s in shapes)
    return x, x if is_same else own, weight, bias if has_bias else None, own_weight


def expect(x, own, weight, bias, own_weight, batch, reduce):
    row, target = batch.edge_index
    sums = torch.zeros(len(own), WIDTH, dtype=x.dtype, device=x.device).index_add(0, target, x[row])
    if reduce == "mean":
        sums = sums / torch.bincount(target, minlength=len(own)).clamp(min=1)[:, None]
    return F.linear(sums, weight, bias) + F.linear(own, own_weight)


def given(batch, x, is_turned=True):
    known = find_batch(batch.edge_index)
    edges = known.view(batch.edge_index)
    return {"edges": edges, "transposed": known.transpose(edges, len(x)) if is_turned else None}


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("is_same", [True, False], ids=["same", "bipartite"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "bare"])
def test_equals_torch(device, reduce, is_same, has_bias):
    batch = Batch(device)
    parts = make_parts(device, is_same, torch.float32, has_bias)
    wanted = list({id(part): part for part in parts if part is not None}.values())
    expected = expect(*parts, batch, reduce)
    # A GPU also adds in any order.
    for is_turned in (True, False) if runs_on_gpu(parts[0]) else (True,):
        got = convolve(*parts, **given(batch, parts[0], is_turned), reduce=reduce)

        grad = torch.randn_like(got)
        assert_near([got, *torch.autograd.grad(got, wanted, grad)],
                    [expected, *torch.autograd.grad(expected, wanted, grad, retain_graph=True)])  # fmt: skip
        with torch.no_grad():
            assert torch.equal(convolve(*parts, **given(batch, parts[0]), reduce=reduce), got)


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "bipartite"])
def test_gradients_are_differentiated_again(real_device, is_same):
    batch = Batch(real_device)
    parts = make_parts(real_device, is_same)
    options = given(batch, parts[0])

    def layer(x, *others):
        own, *rest = (x, *others) if is_same else others
        return convolve(x, own, *rest, **options, reduce="mean")

    # On a GPU torch adds the gradients of gradients in any order.
    again = {"fast_mode": True, "nondet_tol": 1e-12 if runs_on_gpu(parts[0]) else 0.0}
    inputs = parts if not is_same else (parts[0], *parts[2:])
    assert torch.autograd.gradcheck(layer, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, inputs, **again)
    # Of some of them alone.
    inputs = (inputs[0].detach(), *inputs[1:])
    assert torch.autograd.gradgradcheck(layer, inputs, **again)


def test_matrices_that_are_one_add_up_its_gradient(device):
    batch = Batch(device)
    x, own, weight, bias, _ = make_parts(device, False)
    wanted = [x, own, weight, bias]
    out = convolve(x, own, weight, bias, weight, **given(batch, x), reduce="sum")

    got = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)

    expected = expect(x, own, weight, bias, weight, batch, "sum")
    assert_near(list(got), list(torch.autograd.grad(expected.square().sum(), wanted)))


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "bipartite"])
def test_only_wanted_gradients_are_computed(device, is_same):
    batch = Batch(device)
    x, own, weight, bias, own_weight = make_parts(device, is_same, torch.float32)
    own = x.detach() if is_same else own.detach()
    convolve(own if is_same else x.detach(), own, weight, bias, own_weight.detach(), **given(batch, x),
             reduce="sum").sum().backward()  # fmt: skip

    assert x.grad is own.grad is own_weight.grad is None
    assert_near([bias.grad], [torch.full((OUT,), float(len(own)), device=device)])


@pytest.mark.parametrize("make", [lambda: SAGEConv(WIDTH, OUT), lambda: GraphConv(WIDTH, OUT)], ids=["sage", "graph"])
def test_layers_that_share_rows_and_edges_equal_pyg(device, make):
    batch = Batch(device)
    plain = torch.nn.ModuleList([make(), make()]).to(device)
    fast = copy.deepcopy(plain)
    accelerate(fast)
    x = torch.randn(batch.num_nodes, WIDTH, device=device)

    def both(convs):
        return lambda x, edges: convs[0](x, edges) * convs[1](x, edges)

    results = []
    for convs in (plain, fast):
        rows = x.clone().requires_grad_()
        out = both(convs)(rows, batch.edge_index)
        results.append([out, *torch.autograd.grad(out.square().sum(), [rows, *convs.parameters()])])
    assert_near(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", [lambda: SAGEConv(WIDTH, OUT), lambda: GraphConv(WIDTH, OUT)], ids=["sage", "graph"])
def test_a_layer_is_one_step_of_autograd(device, make):
    batch, model = Batch(device), make().to(device)
    accelerate(model)

    out = model(torch.randn(batch.num_nodes, WIDTH, device=device, requires_grad=True), batch.edge_index)

    assert type(out.grad_fn).__name__ == "_LayerBackward"


@pytest.mark.gpu
def test_a_layer_is_captured_with_its_gradients():
    batch, model = Batch("cuda"), SAGEConv(WIDTH, OUT).cuda()
    x = torch.randn(batch.num_nodes, WIDTH, device="cuda", requires_grad=True)
    wanted = [x, *model.parameters()]
    accelerate(model)

    def work():
        return torch.autograd.grad(model(x, batch.edge_index).square().sum(), wanted)

    expected = work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    with torch.no_grad():
        x.mul_(2)
    graph.replay()
    assert not torch.allclose(got[0], expected[0])
    assert_near(got, work())


@pytest.mark.gpu
def test_a_layer_does_not_wait_for_the_gpu():
    batch, model = Batch("cuda"), SAGEConv(WIDTH, OUT).cuda()
    x = torch.randn(batch.num_nodes, WIDTH, device="cuda", requires_grad=True)
    accelerate(model)
    with waits_refused():
        model(x, batch.edge_index).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1])
def test_rows_of_another_width_are_refused_by_torch(width):
    batch, model = Batch(), SAGEConv(WIDTH, OUT)
    accelerate(model)

    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.randn(batch.num_nodes, width), batch.edge_index)


def test_edges_are_checked_once_for_the_layers_that_share_them(monkeypatch):
    from pyg_direct.nn import sorted_edges as known

    checked = []
    check = known.read_hops
    monkeypatch.setattr(known, "read_hops", lambda *args: checked.append(args[0].shape[1]) or check(*args))
    batch, model = Batch(), SAGEConv(WIDTH, OUT)
    accelerate(model)
    x = torch.randn(batch.num_nodes, WIDTH)
    for edge_index in (batch.edge_index, batch.edge_index, batch.edge_index[:, : EDGES[0]]):
        run(model, x, edge_index)

    assert checked == [sum(EDGES)]


def test_wrong_ids_are_found_before_they_are_read():
    batch, model = Batch(), SAGEConv(WIDTH, OUT)
    accelerate(model)
    # Beyond the version that counts it.
    batch.edge_index.numpy()[0, 3] = NUM_NODES

    # In PyG's words, which serves such edges.
    with pytest.raises(IndexError, match="are larger than"):
        model(torch.randn(batch.num_nodes, WIDTH), batch.edge_index)


@pytest.mark.parametrize(("targets", "edges", "width", "expected"), [(7723, 85_810, 64, True), (20, 14_328, 64, False),
                                                                    (7723, 85_810, 8000, False)])  # fmt: skip
def test_wide_rows_are_multiplied_first_if_many_edges_read_them(targets, edges, width, expected):
    x, weight = torch.empty(14_328, 4231, device="meta"), torch.empty(width, 4231, device="meta")

    assert _multiplies_first(x, weight, edges, targets) == expected
