"""Sums of GINConv with a target's own row: torch's results and gradients, also second gradients."""

import pytest
import torch
from torch_geometric.nn import GIN, GINConv

from pyg_direct import accelerate
from pyg_direct.nn.conv.gin import add_own
from pyg_direct.nn.conv.sage import Fitting
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from tests.nn.convolutions import EDGES, NODES, WIDTH, Batch, assert_near

NUM_NODES, NUM_TARGETS = sum(NODES), sum(NODES[:2])


def make_parts(device, is_same, dtype=torch.float64):
    shapes = [(NUM_NODES, WIDTH), (NUM_NODES if is_same else NUM_TARGETS, WIDTH), (1,)]
    x, own, eps = (torch.randn(s, dtype=dtype).to(device).requires_grad_() for s in shapes)
    return x, x if is_same else own, eps


def expect(x, own, eps, batch, reduce):
    row, target = batch.edge_index
    sums = torch.zeros(len(own), WIDTH, dtype=x.dtype, device=x.device).index_add(0, target, x[row])
    if reduce == "mean":
        sums = sums / torch.bincount(target, minlength=len(own)).clamp(min=1)[:, None]
    return sums + (1 + eps) * own


def fit(batch, is_turned=True):
    known = find_batch(batch.edge_index)
    edges = known.view(batch.edge_index)
    return Fitting(edges, known.transpose(edges, NUM_NODES) if is_turned else None)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("is_same", [True, False], ids=["same", "bipartite"])
def test_equals_torch(device, reduce, is_same):
    batch = Batch(device)
    parts = make_parts(device, is_same, torch.float32)
    wanted = list({id(part): part for part in parts}.values())
    expected = expect(*parts, batch, reduce)
    # A GPU also adds in any order.
    for is_turned in (True, False) if runs_on_gpu(parts[0]) else (True,):
        got = add_own(*parts, fit(batch, is_turned), reduce=reduce)

        # Given to both: neither may write to it.
        grad = torch.randn_like(got)
        assert_near([got, *torch.autograd.grad(got, wanted, grad)],
                    [expected, *torch.autograd.grad(expected, wanted, grad, retain_graph=True)])  # fmt: skip


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_are_left_as_they_were(device, reduce):
    batch = Batch(device)
    x, own, eps = make_parts(device, False, torch.float32)
    grad = torch.randn(NUM_TARGETS, WIDTH, device=device)
    before = grad.clone()

    torch.autograd.grad(add_own(x, own, eps, fit(batch), reduce=reduce), [x, own], grad)

    assert torch.equal(grad, before)


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "bipartite"])
def test_gradients_are_differentiated_again(real_device, is_same):
    batch = Batch(real_device)
    x, own, eps = make_parts(real_device, is_same)

    def layer(x, *others):
        own, eps = (x, *others) if is_same else others
        return add_own(x, own, eps, fit(batch), reduce="mean")

    # On a GPU torch adds the gradients of gradients in any order.
    again = {"fast_mode": True, "nondet_tol": 1e-12 if runs_on_gpu(x) else 0.0}
    inputs = (x, eps) if is_same else (x, own, eps)
    assert torch.autograd.gradcheck(layer, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, inputs, **again)
    # Of some of them alone.
    assert torch.autograd.gradgradcheck(layer, (inputs[0].detach(), *inputs[1:]), **again)


def test_first_rows_get_one_gradient(device):
    """Narrow rows from the sources by a step that adds both gradients."""
    model = GIN(WIDTH, 16, 2, 4).to(device)
    batch = Batch(device)
    x = torch.randn(batch.num_nodes, WIDTH, device=device)
    results = []
    for _ in range(2):
        rows = x.clone().requires_grad_()
        out = model(rows, batch.edge_index, num_sampled_nodes_per_hop=NODES, num_sampled_edges_per_hop=EDGES)[
            : NODES[0]
        ]
        results.append([out, *torch.autograd.grad(out.square().sum(), [rows, *model.parameters()])])
        accelerate(model)
    assert_near(*results, rtol=1e-3, atol=1e-3)


def test_rows_of_other_dtypes_are_left_to_pyg(device, calls):
    batch, conv = Batch(device), GINConv(torch.nn.Identity(), eps=0.5).to(device)
    x = torch.randn(batch.num_nodes, WIDTH, device=device)
    expected = conv(x.half(), batch.edge_index)
    accelerate(conv)

    got = conv(x.half(), batch.edge_index)

    assert got.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    conv(x, batch.edge_index)
    assert calls[-1] == "sum"


def test_targets_of_another_width_are_refused_as_by_pyg(device):
    batch, conv = Batch(device), GINConv(torch.nn.Identity()).to(device)
    x, own = torch.randn(NUM_NODES, WIDTH, device=device), torch.randn(NUM_TARGETS, 3, device=device)
    accelerate(conv)

    with pytest.raises(RuntimeError, match="size of tensor"):
        conv((x, own), batch.edge_index)


@pytest.mark.gpu
def test_a_sum_does_not_wait_for_the_gpu():
    batch, conv = Batch("cuda"), GINConv(torch.nn.Identity(), train_eps=True).cuda()
    x = torch.randn(batch.num_nodes, WIDTH, device="cuda", requires_grad=True)
    accelerate(conv)
    with waits_refused():
        conv(x, batch.edge_index).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_rows_may_be_written_once_they_are_summed(real_device, reduce):
    """A residual in place, which PyG's own code allows."""
    conv, batch = GINConv(torch.nn.Linear(WIDTH, WIDTH), aggr=reduce).to(real_device), Batch(real_device)
    given = torch.randn(batch.num_nodes, WIDTH, device=real_device, requires_grad=True)

    def run():
        rows = given * 1
        out = conv(rows, batch.edge_index)
        rows += 1
        return [out, *torch.autograd.grad(out.sum() + rows.sum(), [given, *conv.parameters()])]

    expected = run()
    accelerate(conv)

    assert_near(run(), expected)


def test_a_layer_that_is_used_twice_is_differentiated_again():
    conv, batch = GINConv(torch.nn.Linear(WIDTH, WIDTH), eps=0.3, train_eps=True).double(), Batch()
    x = torch.randn(batch.num_nodes, WIDTH, dtype=torch.float64, requires_grad=True)

    def run():
        loss = conv(conv(x, batch.edge_index).tanh(), batch.edge_index).square().sum()
        grads = torch.autograd.grad(loss, [x, conv.eps], create_graph=True)
        again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), [x, *conv.parameters()])
        return [*grads, *again]

    expected = run()
    accelerate(conv)

    assert_near(run(), expected, rtol=1e-9, atol=1e-9)
