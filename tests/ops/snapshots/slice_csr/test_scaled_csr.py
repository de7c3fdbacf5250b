"""Sums over CSR on a GPU equal sums of slices and dense products, with any factors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pyg_direct.dynamic.matrix_group import build_group
from pyg_direct.dynamic.sequence_edges import GCN, Mean, Sum
from pyg_direct.ops.snapshots import aggregate, aggregate as ops, slice_csr as scaled
from tests.poison import poisoned_memory
from tests.reference import snapshots as reference
from tests.snapshots import make_snapshots, order_snapshots

# Enough for long rows.
NODES, EDGES = 150, 900
pytestmark = pytest.mark.gpu


def build(count, operator, weighted, change, values=None, form="split", edges=EDGES):
    drawn = make_snapshots(NODES, edges, count, change, weighted, hub=True)
    # Parallel edges would be weights.
    drawn = drawn if weighted else [(np.unique(index, axis=1), None) for index, _ in drawn]
    factors = [operator.factorise(s) for s in order_snapshots(drawn, NODES)]
    dense = []
    for f in factors:
        matrix = np.zeros((NODES, NODES))
        matrix[f.keys // NODES, f.keys % NODES] = 1 if f.weight is None else f.weight
        row, column, diagonal = (fill if v is None else v.double().numpy()
                                 for v, fill in ((f.row, np.ones(NODES)), (f.column, np.ones(NODES)),
                                                 (f.diagonal, np.zeros(NODES))))  # fmt: skip
        dense.append(row[:, None] * matrix * column + np.diag(diagonal))
    return build_group(factors, NODES, form, values).to(torch.device("cuda")), dense


@pytest.mark.parametrize("run", [1, 3, 8])
@pytest.mark.parametrize("kernel", ["rows", "wide"])
@pytest.mark.parametrize("form", ["split", "mask"])
@pytest.mark.parametrize(("count", "channels", "change"), [(1, 4, 0), (4, 1, 0), (2, 16, 0.2), (4, 20, 0.2), (8, 4, 1),
                                                           (4, 2, 0), (8, 5, 0)])  # fmt: skip
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("operator", [GCN(), Mean(), Sum()], ids=str)
def test_sums_are_dense_products(operator, weighted, count, channels, change, form, kernel, run, monkeypatch):
    monkeypatch.setattr(scaled, "length_of_run", lambda *_: run)
    # Rows of any width; factors of sources are read for every edge, or multiplied into rows before.
    for name in ("WIDE_ROW", "WIDE_ROW_MASKED", "WIDE_ROW_ALONE"):
        monkeypatch.setattr(aggregate, name, (1, 1))
    for name in ("MANY_NUMBERS", "MANY_MASKED", "MANY_SUMS"):
        monkeypatch.setattr(aggregate, name, 1)
    monkeypatch.setattr(scaled, "_SCALED_HERE", 1 if run > 1 else 64)
    choose = ops.choose_kernel
    chosen = []
    monkeypatch.setattr(ops, "choose_kernel", lambda *a: chosen.append(choose(*a)) or kernel)
    group, dense = build(count, operator, weighted, change, form=form)
    x = torch.randn(NODES, count, channels, device="cuda")

    for transposed in (False, True):
        with poisoned_memory():
            got = ops.multiply_snapshots(x, group, 0, transposed)

        expected = reference.aggregate([m.T if transposed else m for m in dense], x.cpu().double().numpy())
        torch.testing.assert_close(got.double().cpu(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)
    assert set(chosen) == {"rows"}


@pytest.mark.parametrize("form", ["split", "mask"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_a_part_of_a_group_takes_its_own_weights(weighted, form):
    group, dense = build(4, Sum(), weighted, 0.2, "stacked" if weighted else None, form)
    x = torch.randn(NODES, 2, 16, device="cuda")

    got = ops.aggregate_snapshots(x, group, 1, deterministic=form == "mask")

    expected = reference.aggregate(dense[1:3], x.cpu().double().numpy())
    torch.testing.assert_close(got.double().cpu(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "count", "channels", "edges", "weighted", "expected"), [
    ("split", 4, 2, 3000, False, "wide"), ("split", 4, 4, 3000, False, "rows"), ("split", 1, 16, 3000, False, "rows"),
    ("split", 4, 2, 300, False, "rows"), ("split", 4, 1, 300, False, "wide"),
    ("split", 4, 4, 3000, True, "wide"), ("split", 4, 8, 3000, True, "rows"),
    ("mask", 4, 2, 3000, False, "wide"), ("mask", 4, 4, 3000, False, "rows"),
    ("mask", 2, 4, 3000, True, "wide"), ("mask", 2, 8, 3000, True, "rows"),
    ("mask", 4, 1, 300, False, "wide"), ("mask", 4, 2, 300, False, "rows"), ("mask", 2, 4, 300, True, "rows"),
])  # fmt: skip
def test_wide_rows_of_many_edges_are_summed_over_csr(form, count, channels, edges, weighted, expected, monkeypatch):
    group, _ = build(count, Sum(), weighted, 0.1 if form == "mask" else 0, form=form, edges=edges)
    x = torch.randn(NODES, count, channels, device="cuda")

    def choose(deterministic):
        return {aggregate.choose_kernel(x, piece, deterministic) for piece in group.pieces if piece.num_edges}

    few = choose(False)
    for name in ("MANY_NUMBERS", "MANY_MASKED", "MANY_SUMS"):
        monkeypatch.setattr(aggregate, name, 1)

    assert (few, choose(False)) == ({"wide"}, {expected})
    # And all whose sums are equal at every call.
    assert choose(True) == {"rows"}


def test_ids_that_leave_no_bits_for_snapshots_stay_in_slices():
    (piece,) = build(4, Sum(), False, 0.2, form="mask")[0].pieces
    x = torch.randn(NODES, 4, 16, device="cuda")

    most, more = (replace(piece, num_rows=rows) for rows in (2**28, 2**28 + 1))

    assert [aggregate.choose_kernel(x, p, True) for p in (piece, most, more)] == ["rows", "rows", "wide"]


def test_the_last_snapshot_of_eight_is_told_by_the_uppermost_bit():
    group, dense = build(8, Sum(), False, 1.0, form="mask")

    csr = group.pieces[0].csr

    assert csr.shift == 24
    assert bool((csr.row < 0).any())
    x = torch.randn(NODES, 1, 4, device="cuda")
    got = ops.aggregate_snapshots(x, group, 7, deterministic=True)
    expected = reference.aggregate(dense[7:], x.cpu().double().numpy())
    torch.testing.assert_close(got.double().cpu(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("weighted", "channels", "expected"), [
    (False, 8, "wide"), (False, 16, "rows"), (True, 64, "wide"), (True, 128, "rows"),
])  # fmt: skip
def test_edges_of_one_snapshot_are_summed_over_csr_where_they_are_wider(weighted, channels, expected, monkeypatch):
    for name in ("MANY_NUMBERS", "MANY_MASKED", "MANY_SUMS"):
        monkeypatch.setattr(aggregate, name, 1)
    group, dense = build(4, GCN(), weighted, 0.5)
    x = torch.randn(NODES, 4, channels, device="cuda")

    got = ops.aggregate_snapshots(x, group)

    assert [aggregate.choose_kernel(x, piece, False) for piece in group.pieces] == ["rows", expected]
    expected = reference.aggregate(dense, x.cpu().double().numpy())
    torch.testing.assert_close(got.double().cpu(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [2, 8])
def test_snapshots_without_an_edge_take_nothing_over_it(channels):
    # A piece of four numbers is of two snapshots, or of one.
    drawn = [(np.array([[1, 2], [0, 0]]), None), (np.array([[2], [0]]), None)]
    factors = [Sum().factorise(s) for s in order_snapshots(drawn, 4)]
    group = build_group(factors, 4, "mask").to(torch.device("cuda"))
    x = torch.ones(4, 2, channels, device="cuda")
    x[1, 1] = float("nan")

    got = ops.aggregate_snapshots(x, group, deterministic=True)

    assert {aggregate.choose_kernel(x, piece, True) for piece in group.pieces} == {"rows"}
    assert got[0].tolist() == [[2.0] * channels, [1.0] * channels]


@pytest.mark.parametrize("form", ["split", "mask"])
def test_equal_calls_give_equal_results(form):
    group, _ = build(4, GCN(), True, 0.2, form=form)
    x = torch.randn(NODES, 4, 8, device="cuda")

    first, *others = (ops.aggregate_snapshots(x, group, deterministic=form == "mask") for _ in range(5))

    assert all(torch.equal(first, other) for other in others)
