"""Nodes with several weighted loops: PyG keeps the last one on a CPU, and accelerated layers do so on any device."""

import pytest
import torch
from torch_geometric.nn import GCNConv

from pyg_direct import accelerate
from pyg_direct.nn.sorted_edges import register_sorted
from tests.nn.convolutions import OUT, WIDTH, assert_near

NODES, LOOPS = 40, 500


@pytest.mark.parametrize("make", [lambda: GCNConv(WIDTH, OUT), lambda: GCNConv(WIDTH, OUT, improved=True)],
                         ids=["gcn", "improved"])  # fmt: skip
def test_the_last_of_several_loops_stays_and_each_has_its_gradient(device, make, calls):
    torch.manual_seed(0)
    others = torch.randint(NODES, (2, 300))
    # Of a few nodes, so that others have none.
    looped = torch.randint(NODES // 4, (LOOPS,))
    edge_index = torch.cat([others, looped.expand(2, -1)], dim=1)
    edge_index = edge_index[:, torch.randperm(edge_index.shape[1])]
    edge_index = edge_index[:, torch.sort(edge_index[1], stable=True).indices].contiguous()
    x, weight = torch.randn(NODES, WIDTH), torch.rand(edge_index.shape[1]) + 0.1
    conv = make()

    def run(layer, edge_index, on):
        given = x.to(on).requires_grad_(), weight.to(on).requires_grad_()
        out = layer(given[0], edge_index, given[1])
        leaves = [*given, *layer.parameters()]
        return [out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel(), device=on).view_as(out))]

    expected = run(conv, edge_index, "cpu")
    ours = edge_index.clone().to(device)
    register_sorted(ours, [NODES, 0], [ours.shape[1]])
    model = conv.to(device)
    accelerate(model)
    for _ in range(3):
        got = run(model, ours, device)
        assert_near([part.cpu() for part in got], expected)
    assert calls


def test_without_edges_each_node_has_the_loop_that_is_filled_in(device, calls):
    conv, x = GCNConv(WIDTH, OUT).to(device), torch.randn(NODES, WIDTH, device=device)
    edge_index = torch.empty(2, 0, dtype=torch.int64, device=device)
    weight = torch.empty(0, device=device, requires_grad=True)
    expected = conv(x, edge_index, weight)
    register_sorted(edge_index, [NODES, 0], [0])
    accelerate(conv)

    got = conv(x, edge_index, weight)

    assert_near([got], [expected])
    assert torch.autograd.grad(got.sum(), weight)[0].shape == (0,)
    assert calls
