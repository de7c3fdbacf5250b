"""Matrices arrive as they were, whatever of them was not sent."""

import pytest
import torch

from pyg_direct.dynamic.device_caches import Budget, MatrixCache, Sent
from pyg_direct.dynamic.matrix_group import FORMS, build_group
from pyg_direct.dynamic.overlapped_work import CopyStream
from pyg_direct.dynamic.sequence_edges import GCN, Mean, Sum
from pyg_direct.dynamic.snapshot import order_edges
from pyg_direct.ops.snapshots.slice_csr import PackedCSR, SlicedCSR
from tests.snapshots import make_snapshots

NODES = 40


def make_group(operator, form="mask", count=3, weighted=False, loops=False):
    factors = []
    for edges, weight in make_snapshots(NODES, 90, count, weighted=weighted):
        edge_index = torch.from_numpy(edges)
        # Each edge once, and no loops unless asked for.
        edge_index = torch.unique(edge_index[:, edge_index[0] != edge_index[1]], dim=1)
        weight = torch.rand(edge_index.shape[1]) if weighted else None
        if loops:
            edge_index = torch.cat([edge_index, torch.tensor([[3], [3]])], 1)
            weight = None if weight is None else torch.cat([weight, torch.tensor([2.0])])
        factors.append(operator.factorise(order_edges(edge_index, weight, NODES)))
    return build_group(factors, NODES, form)


def assert_equal(got, expected):
    for name in ("row", "column", "diagonal"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-6, atol=0)
    for mine, theirs in zip(got.pieces, expected.pieces, strict=True):
        assert mine.to(torch.device("cpu")).equals(theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 3])
def test_factors_of_edges_without_weights_are_not_sent(device, form, count):
    group = make_group(GCN(), form, count)

    sent = Sent.of(group)

    assert (sent.makes_row, sent.makes_diagonal) == (True, True)
    assert sent.num_bytes == sum(PackedCSR.of(piece).num_bytes for piece in group.pieces)
    got = sent.to(device).complete()
    assert_equal(got, group)
    assert got.column is got.row
    assert got.device.type == device.type


@pytest.mark.parametrize(
    ("operator", "options", "expected"),
    [
        # Weights are summed in another order, and existing loops keep their weights.
        (GCN(), {"weighted": True}, (False, True)),
        (GCN(), {"weighted": True, "loops": True}, (False, False)),
        (GCN(improved=True), {"weighted": True}, (False, False)),
        # A loop that is there is the filled one.
        (GCN(), {"loops": True}, (True, True)),
        (GCN(add_self_loops=False), {}, (False, False)),
        (GCN(normalize=False), {}, (False, False)),
        (Mean(), {}, (False, False)),
        (Sum(), {}, (False, False)),
    ],
)
def test_what_does_not_follow_is_sent(device, operator, options, expected):
    group = make_group(operator, **options)

    sent = Sent.of(group)

    assert (sent.makes_row, sent.makes_diagonal) == expected
    assert_equal(sent.to(device).complete(), group)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("largest", "makes_row"), [(255.0, True), (256.0, False), (2.5, False), (-1.0, False)])
def test_roots_of_small_whole_weights_are_not_sent(device, form, largest, makes_row):
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    weights = [torch.tensor([1.0, 2.0, 1.0, largest]), torch.tensor([1.0, 1.0, 2.0, 1.0])]
    group = build_group([GCN().factorise(order_edges(edges, weight, NODES)) for weight in weights], NODES, form)

    sent = Sent.of(group)

    assert sent.makes_row == makes_row
    got = sent.to(device).complete()
    assert_equal(got, group)
    assert all(piece.weight.dtype == torch.float32 for piece in got.pieces)


def test_a_number_that_differs_is_sent():
    group = make_group(GCN())
    group.row[5, 1] *= 1.001

    sent = Sent.of(group)

    assert (sent.makes_row, sent.makes_diagonal) == (False, False)
    assert_equal(sent.complete(), group)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_edges_that_are_symmetric_are_turned_once(device, monkeypatch, is_symmetric):
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2 if is_symmetric else 0]])
    group = build_group([GCN().factorise(order_edges(edges, None, NODES))], NODES)
    budget = Budget(0)
    matrices, calls = MatrixCache(torch.device(device), budget, CopyStream(torch.device(device))), []
    real = SlicedCSR.transpose
    monkeypatch.setattr(SlicedCSR, "transpose", lambda piece: calls.append(1) or real(piece))
    turned = []

    for _ in range(3):
        # The frame before was of other snapshots.
        matrices.visit(range(5, 6))
        matrices.visit(range(1))
        here = matrices.get("a", range(1), lambda: group)
        turned.append(here.by_source())

    assert len(calls) == (1 if is_symmetric else 3)
    assert all(a.equals(b) for parts in turned for a, b in zip(parts, turned[0], strict=True))
    assert (turned[0] is group.pieces or turned[0][0].equals(group.pieces[0].to(device))) == is_symmetric
    assert budget.used == 0


@pytest.mark.gpu
def test_page_locked_copies_arrive_equal():
    group = make_group(GCN())

    pinned = Sent.of(group).pin_memory()

    assert pinned.is_pinned
    assert pinned.pin_memory() is pinned
    assert_equal(pinned.to(torch.device("cuda")).complete(), group)
