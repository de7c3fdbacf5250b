"""Edges of a snapshot in order; bad ones are refused."""

import pytest
import torch
from hypothesis import given

from pyg_direct.dynamic.snapshot import join_edges, order_edges
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from tests.reference import snapshots as reference
from tests.snapshots import drawn_snapshots, order_snapshots


@given(drawn=drawn_snapshots())
def test_edges_are_those_of_the_reference(device, drawn):
    num_nodes, snapshots = drawn

    for (edge_index, weight), found in zip(snapshots, order_snapshots(snapshots, num_nodes, device), strict=True):
        expected = dict(sorted(reference.merge(edge_index, weight).items()))
        got = found.weight.tolist() if found.weight is not None else [1.0] * len(expected)
        assert list(zip(found.targets.tolist(), found.sources.tolist(), strict=True)) == list(expected)
        assert got == list(expected.values())
        loops = {int(s): weight[e] if weight is not None else 1 for e, (s, t) in enumerate(edge_index.T) if s == t}
        assert found.loop_nodes.tolist() == sorted(loops)
        if weight is not None:
            assert found.loop_weight.tolist() == [loops[node] for node in sorted(loops)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(drawn=drawn_snapshots())
def test_snapshots_in_order_together_are_those_one_by_one(device, dtype, drawn):
    num_nodes, snapshots = drawn
    edges = [torch.from_numpy(e).to(device) for e, _ in snapshots]
    for weights in ([None] * len(edges), [torch.arange(e.shape[1], device=device) / 2 for e in edges]):
        together = join_edges(edges, weights, num_nodes, dtype).split()

        for got, edge_index, weight in zip(together, edges, weights, strict=True):
            expected = order_edges(edge_index, weight, num_nodes, dtype=dtype)
            for name in ("keys", "weight", "loop_nodes", "loop_weight", "num_in"):
                mine, other = getattr(got, name), getattr(expected, name)
                assert (mine is None) == (other is None), name
                assert mine is None or (mine.dtype == other.dtype and torch.equal(mine, other)), name
            assert got.dtype == dtype
            assert got.weight is None or got.weight.dtype == dtype


def test_snapshots_without_nodes_are_put_in_order_together():
    first, second = join_edges([torch.zeros(2, 0).long()] * 2, [None] * 2, 0).split()

    assert first.keys.numel() == second.num_in.numel() == 0


@pytest.mark.parametrize("node", [-1, 5])
@pytest.mark.parametrize("side", [0, 1])
def test_edges_of_nodes_that_are_not_there_are_refused_wherever_they_are(device, node, side):
    edges = torch.tensor([[0, 1, 4], [1, 2, 0]], device=device)
    wrong = edges.clone()
    wrong[side, 1] = node

    for parts in ([wrong], [edges, wrong]):
        with pytest.raises(IdError, match=rf"edge_index must lie in \[0, 5\), got {node}"):
            join_edges(parts, [None] * len(parts), 5)


def test_weights_of_any_floating_dtype_and_a_column_are_taken():
    edges = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)

    found = order_edges(edges, torch.tensor([[1.0], [2.0]], dtype=torch.float64), 2)

    assert (found.weight.tolist(), found.weight.dtype) == ([2.0, 1.0], torch.float32)


@pytest.mark.parametrize(
    ("edge_index", "weight", "error", "message"),
    [
        (torch.zeros(3, 2).long(), None, ArgumentError, r"shape \[2, E\], got \(3, 2\)"),
        (None, None, ArgumentError, "got NoneType"),
        (torch.zeros(2, 2), None, ArgumentTypeError, "int64 or int32"),
        (torch.tensor([[0], [5]]), None, IdError, r"\[0, 5\), got 5"),
        (torch.tensor([[-1], [0]]), None, IdError, r"got -1"),
        (torch.tensor([[0], [1]]), torch.ones(2), ArgumentError, r"shape \[1\], got \(2,\)"),
        (torch.tensor([[0], [1]]), torch.ones(1).long(), ArgumentTypeError, "floating"),
    ],
)
def test_bad_edges_are_refused(edge_index, weight, error, message):
    with pytest.raises(error, match=message):
        order_edges(edge_index, weight, 5)
