"""Loops behind the edges of each target and GCN's weights: equal to the reference."""

import numpy as np
import pytest
import torch

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.aggregate.build_edge_layout import add_loops
from pyg_direct.ops.local_ids.build_csr import compress_ids
from tests.poison import poisoned_memory
from tests.reference import loops as reference

NUM_NODES, NUM_TARGETS = 12, 9


def make_edges(num_edges=40, device="cpu", dtype=torch.int64):
    """Sorted edges with loops, parallel ones, and targets without any: (indptr, row, target)."""
    random = np.random.default_rng(num_edges)
    target = np.sort(random.integers(0, NUM_TARGETS - 2, num_edges))
    row = np.where(random.random(num_edges) < 0.3, target, random.integers(0, NUM_NODES, num_edges))
    row, target = (torch.from_numpy(ids).to(device, dtype) for ids in (row, target))
    return compress_ids(target, NUM_NODES), row, target


@pytest.mark.parametrize("num_edges", [40, 3, 0])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("work", [None, torch.float32, torch.float64])
@pytest.mark.full
def test_matches_reference(device, num_edges, dtype, work):
    indptr, row, target = make_edges(num_edges, device, dtype)
    edges = list(zip(row.tolist(), target.tolist(), strict=True))
    expected = reference.add_loops(edges, NUM_TARGETS)

    with poisoned_memory():
        got = add_loops(indptr, row, target, NUM_TARGETS, work)

    assert list(zip(got.row.tolist(), got.target.tolist(), strict=True)) == expected
    assert got.indptr.tolist() == compress_ids(got.target, NUM_TARGETS).tolist()
    assert {got.row.dtype, got.target.dtype, got.indptr.dtype} == {dtype}
    if work is None:
        assert got.weight is None
    else:
        assert got.weight.dtype == work
        assert got.weight.tolist() == pytest.approx(reference.weigh(edges, NUM_TARGETS, expected), rel=1e-6)


@pytest.mark.parametrize("num_targets", [NUM_TARGETS, 5])
def test_the_first_of_the_edges_take_the_offsets_of_all(device, num_targets):
    indptr, row, target = make_edges(40, device)
    count = int(indptr[num_targets - 1])
    edges = list(zip(row[:count].tolist(), target[:count].tolist(), strict=True))
    expected = reference.add_loops(edges, num_targets)

    got = add_loops(indptr, row[:count], target[:count], num_targets, torch.float64)

    assert list(zip(got.row.tolist(), got.target.tolist(), strict=True)) == expected
    assert got.weight.tolist() == pytest.approx(reference.weigh(edges, num_targets, expected))


def test_no_targets_have_no_loops(device):
    indptr, row, target = make_edges(0, device)

    got = add_loops(indptr, row, target, 0, torch.float32)

    assert [part.tolist() for part in got] == [[0], [], [], []]


def test_arguments_are_checked():
    indptr, row, target = make_edges()

    with pytest.raises(ArgumentTypeError, match=r"row must have dtype int64 or int32, got torch\.float32"):
        add_loops(indptr, row.float(), target, NUM_TARGETS)
    with pytest.raises(ArgumentError, match=r"row, target and indptr must be of one dtype"):
        add_loops(indptr, row.int(), target, NUM_TARGETS)
    with pytest.raises(ArgumentError, match=r"num_targets must lie in \[0, 12\], got 13"):
        add_loops(indptr, row, target, 13)
    with pytest.raises(ArgumentError, match=r"every one of the 40 edges a target below num_targets=2"):
        add_loops(indptr, row, target, 2)
