"""Operators taken apart are PyG's convolutions, edge for edge."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch_geometric.nn import ChebConv, GCNConv, GraphConv, SAGEConv

from pyg_direct.dynamic.matrix_group import build_group
from pyg_direct.dynamic.sequence_edges import GCN, Chebyshev, Mean, Sum, Walk, walk_along
from pyg_direct.errors import ArgumentError
from pyg_direct.ops.snapshots.aggregate import aggregate_snapshots
from tests.snapshots import drawn_snapshots, make_snapshots, order_snapshots


def run_operator(operator, snapshots, x, num_nodes):
    factors = [operator.factorise(s) for s in order_snapshots(snapshots, num_nodes)]
    return aggregate_snapshots(x, build_group(factors, num_nodes))


def run_conv(conv, snapshots, x, **options):
    out = []
    for t, (edge_index, weight) in enumerate(snapshots):
        weights = {} if weight is None else {"edge_weight": torch.from_numpy(weight)}
        out.append(conv(x[:, t], torch.from_numpy(edge_index), **weights, **options))
    return torch.stack(out, dim=1)


def make_identity(conv):
    """The convolution with the identity for its weights."""
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.eye(parameter.shape[0]) if parameter.dim() == 2 else 0)
    return conv


@given(drawn=drawn_snapshots(), improved=st.booleans(), loops=st.booleans(), normalize=st.booleans())
def test_gcn_is_pygs(drawn, improved, loops, normalize):
    num_nodes, snapshots = drawn
    conv = make_identity(GCNConv(2, 2, improved=improved, add_self_loops=loops and normalize, normalize=normalize))
    x = torch.rand(num_nodes, len(snapshots), 2)

    got = run_operator(GCN(improved, loops, normalize), snapshots, x, num_nodes)

    torch.testing.assert_close(got, run_conv(conv, snapshots, x).detach(), rtol=1e-4, atol=1e-5)


@given(drawn=drawn_snapshots())
def test_sums_and_means_are_pygs(drawn):
    num_nodes, snapshots = drawn
    x = torch.rand(num_nodes, len(snapshots), 2)
    for reduce, operator in (("add", Sum()), ("mean", Mean())):
        conv = make_identity(GraphConv(2, 2, aggr=reduce))
        torch.nn.init.zeros_(conv.lin_root.weight)

        got = run_operator(operator, snapshots, x, num_nodes)

        torch.testing.assert_close(got, run_conv(conv, snapshots, x).detach(), rtol=1e-4, atol=1e-5)


def test_mean_is_that_of_sage():
    snapshots, x = make_snapshots(count=3), torch.rand(12, 3, 2)
    conv = make_identity(SAGEConv(2, 2, root_weight=False))

    got = run_operator(Mean(), snapshots, x, 12)

    torch.testing.assert_close(got, run_conv(conv, snapshots, x).detach(), rtol=1e-4, atol=1e-5)


@given(drawn=drawn_snapshots(), kind=st.sampled_from([(None, 3.0), ("sym", None), ("sym", 1.5), ("rw", 2.5)]))
def test_chebyshev_is_pygs(drawn, kind):
    num_nodes, snapshots = drawn
    normalization, lambda_max = kind
    conv = ChebConv(2, 2, K=2, normalization=normalization, bias=False)
    torch.nn.init.zeros_(conv.lins[0].weight)
    torch.nn.init.eye_(conv.lins[1].weight)
    x = torch.rand(num_nodes, len(snapshots), 2)

    got = run_operator(Chebyshev(normalization, lambda_max), snapshots, x, num_nodes)

    expected = run_conv(conv, snapshots, x, lambda_max=lambda_max).detach()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("normalization", [None, "sym", "rw"])
def test_the_largest_entry_of_a_laplacian_is_that_of_one_of_several_parallel_edges(normalization, seed):
    generator = torch.Generator().manual_seed(seed)
    # Twice each, with weights whose sum is one: degrees are above zero, and one of two weights is not.
    edges = [torch.randint(4, (2, 12), generator=generator).repeat(1, 2) for _ in range(3)]
    below = [torch.rand(12, generator=generator) * -3 for _ in range(3)]
    weights = [torch.cat([w, 1 - w]) for w in below]
    snapshots = [(e.numpy(), w.numpy()) for e, w in zip(edges, weights, strict=True)]
    x = torch.rand(4, 3, 2, generator=generator)
    conv = ChebConv(2, 2, K=2, normalization=normalization, bias=False)
    for lin, weight in zip(conv.lins, (torch.zeros(2, 2), torch.eye(2)), strict=True):
        lin.weight = torch.nn.Parameter(weight)

    got = run_operator(Chebyshev(normalization), snapshots, x, 4)

    torch.testing.assert_close(got, run_conv(conv, snapshots, x).detach(), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("normalization", [None, "sym", "rw"])
@pytest.mark.parametrize("edges", [torch.empty(2, 0, dtype=torch.int64), torch.tensor([[1, 1], [1, 1]])])
def test_chebyshev_of_no_edges_but_loops_is_pygs(normalization, edges):
    snapshots, x = [(edges.numpy(), None)], torch.rand(3, 1, 2)
    conv = ChebConv(2, 2, K=2, normalization=normalization, bias=False)
    for lin, weight in zip(conv.lins, (torch.zeros(2, 2), torch.eye(2)), strict=True):
        lin.weight = torch.nn.Parameter(weight)

    got = run_operator(Chebyshev(normalization), snapshots, x, 3)

    # Without a normalization all entries are zero, and PyG's result is a NaN.
    torch.testing.assert_close(got, run_conv(conv, snapshots, x).detach(), equal_nan=True)


def test_unknown_normalization_is_refused():
    with pytest.raises(ArgumentError, match="None, sym or rw"):
        Chebyshev("left")


@given(drawn=drawn_snapshots())
def test_steps_along_edges_share_edges_whatever_these_weigh(drawn):
    num_nodes, snapshots = drawn
    for (edge_index, weight), snapshot in zip(snapshots, order_snapshots(snapshots, num_nodes), strict=True):
        edges, weights = torch.from_numpy(edge_index), None if weight is None else torch.from_numpy(weight)

        factors = Walk().factorise(replace(snapshot, given=(edges, weights)))

        expected = torch.zeros(num_nodes, num_nodes)
        for (source, target), share in zip(edges.T.tolist(), walk_along(edges, weights)[1].tolist(), strict=True):
            expected[target, source] += share
        eye = torch.eye(num_nodes).unsqueeze(1)
        got = aggregate_snapshots(eye, build_group([factors], num_nodes)).squeeze(1)
        torch.testing.assert_close(got, expected)
        # Only edges that are there twice weigh something.
        assert (factors.weight is None) == (len(edges.T.unique(dim=0)) == edges.shape[1])
